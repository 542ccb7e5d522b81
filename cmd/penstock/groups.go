package main

import (
	"fmt"
	"slices"
	"strings"

	"github.com/spf13/cobra"
)

// finishTree completes the command tree, after all commands were added. Every mistake in a
// command's arguments becomes a wrong call (exit status 2). A command that only groups other
// commands prints its help, or refuses an unknown word. For an unknown word, cobra alone
// prints the help and ends with status 0, and a script with a misspelt command would go on as
// if the command had run.
func finishTree(root *cobra.Command) {
	root.InitDefaultHelpCmd()
	root.InitDefaultCompletionCmd()
	root.SetFlagErrorFunc(func(cmd *cobra.Command, err error) error {
		// For a misspelt command with flags, the mistake is the word: the flags are not the
		// group's.
		if words := cmd.Flags().Args(); isGroup(cmd) && len(words) > 0 {
			return unknownCommand(cmd, words[0])
		}
		return &usageError{err}
	})
	finishCommands(root)
}

// onlyGroups marks commands that only group other commands.
const onlyGroups = "penstock.io/group"

func isGroup(cmd *cobra.Command) bool { return cmd.Annotations[onlyGroups] != "" }

func finishCommands(cmd *cobra.Command) {
	for _, c := range cmd.Commands() {
		finishCommands(c)
	}
	switch {
	case cmd.Name() == "help" && !cmd.HasSubCommands():
		cmd.Run, cmd.RunE = nil, helpOn
	case !cmd.HasParent(): // cobra looks at the root's words before anything else
		return
	case cmd.HasSubCommands() && !cmd.Runnable():
		if cmd.Annotations == nil {
			cmd.Annotations = map[string]string{}
		}
		cmd.Annotations[onlyGroups] = "yes"
		cmd.Args = cobra.NoArgs
		cmd.RunE = func(cmd *cobra.Command, _ []string) error { return cmd.Help() }
	}
	if check := cmd.Args; check != nil {
		cmd.Args = func(cmd *cobra.Command, words []string) error {
			err := check(cmd, words)
			switch {
			case err == nil:
				return nil
			case len(words) > 0 && (isGroup(cmd) || len(similar(cmd, words[0])) > 0):
				return unknownCommand(cmd, words[0])
			}
			return &usageError{err}
		}
	}
}

// unknownCommand refuses a word that is no command of a group, and suggests commands with
// similar names.
func unknownCommand(group *cobra.Command, word string) error {
	text := fmt.Sprintf("unknown command %q for %q", word, group.CommandPath())
	if s := similar(group, word); len(s) > 0 {
		text += "; did you mean " + strings.Join(s, " or ") + "?"
	}
	return usagef("%s", text)
}

// similar lists the commands of a group with names similar to word.
func similar(group *cobra.Command, word string) []string {
	group.SuggestionsMinimumDistance = 2
	all := group.SuggestionsFor(word)
	slices.Sort(all)
	return all
}

// helpOn is `penstock help COMMAND...`.
func helpOn(cmd *cobra.Command, words []string) error {
	root := cmd.Root()
	about, rest, err := root.Find(words)
	if err != nil {
		return &usageError{err}
	}
	if len(rest) > 0 {
		return unknownCommand(about, rest[0])
	}
	about.InitDefaultHelpFlag() // adds --help to the help text
	return about.Help()
}
