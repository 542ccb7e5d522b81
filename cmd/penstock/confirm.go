package main

import (
	"bufio"
	"fmt"
	"strings"

	"github.com/spf13/cobra"
)

// destroys marks commands that delete data which no other command restores.
const destroys = "penstock.io/destroys"

// destroying marks a command as destroying, and adds the flag --yes. Without --yes the command
// says what would be lost, and asks the user on a terminal (confirm); without a terminal the
// command is refused.
func destroying(cmd *cobra.Command, yes *bool) {
	if cmd.Annotations == nil {
		cmd.Annotations = map[string]string{}
	}
	cmd.Annotations[destroys] = "yes"
	cmd.Flags().BoolVar(yes, "yes", false, "do not ask")
}

func isDestroying(cmd *cobra.Command) bool { return cmd.Annotations[destroys] != "" }

// confirm asks the user on a terminal to type a word. Without a terminal, confirm refuses the
// command. The question says what would be lost, and is part of the refusal, too.
func confirm(cmd *cobra.Command, question, word string) error {
	if !isTerminal(cmd.InOrStdin()) {
		return usagef("%s Nobody can be asked here: give --yes", question)
	}
	cmd.PrintErrf("%s Type %q to go on: ", question, word)
	line, err := bufio.NewReader(cmd.InOrStdin()).ReadString('\n')
	if err != nil {
		return err
	}
	if strings.TrimSpace(line) != word {
		return fmt.Errorf("nothing was done: %q was not typed", word)
	}
	return nil
}
