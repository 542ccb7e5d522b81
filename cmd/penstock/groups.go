package main

import (
	"fmt"
	"slices"
	"strings"

	"github.com/spf13/cobra"
)

// finishTree completes the command tree, once all commands are in it: whatever is
// wrong with a command's arguments is a wrong call (exit status 2), and a command
// that only groups others prints its help, or refuses a word that is none of them.
// cobra alone prints the help for such a word, too, and ends with status 0, so that
// a script with a misspelt command goes on as if the work were done.
func finishTree(root *cobra.Command) {
	root.InitDefaultHelpCmd()
	root.InitDefaultCompletionCmd()
	root.SetFlagErrorFunc(func(cmd *cobra.Command, err error) error {
		// A misspelt command's flags are not the group's: the word is what is wrong.
		if words := cmd.Flags().Args(); isGroup(cmd) && len(words) > 0 {
			return unknownCommand(cmd, words[0])
		}
		return &usageError{err}
	})
	finishCommands(root)
}

// onlyGroups marks commands that do nothing but group others.
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

// unknownCommand refuses a word that is no command of a group, and names those that
// are spelt like it.
func unknownCommand(group *cobra.Command, word string) error {
	text := fmt.Sprintf("unknown command %q for %q", word, group.CommandPath())
	if s := similar(group, word); len(s) > 0 {
		text += "; did you mean " + strings.Join(s, " or ") + "?"
	}
	return usagef("%s", text)
}

// similar are the commands of a group that are spelt like a word.
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
	about.InitDefaultHelpFlag() // so that the help names it
	return about.Help()
}
