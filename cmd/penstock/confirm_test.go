package main

import (
	"bytes"
	"errors"
	"maps"
	"slices"
	"strings"
	"testing"

	"github.com/spf13/cobra"
)

// undoing are names of commands that remove something.
var undoing = []string{"abandon", "accept-loss", "break", "delete", "discard", "drop", "evict", "fail", "promote", "purge", "remove", "replace", "resync", "restore", "revoke", "rollback"}

// notDestroying are the commands with such a name, or with --yes, that are not marked as
// destroying, with the reason.
var notDestroying = map[string]string{
	"penstock cluster evict":   "what is stored stays; a token lets the identity in again, and an emergency does not wait",
	"penstock grant revoke":    "what is stored stays; it can be granted again, and an emergency does not wait",
	"penstock cluster restore": "without --yes it shows what it found, and writes nothing",
	"penstock mirror resync":   "its --yes is --discard",
	"penstock node drain":      "asks, but copies before anything goes; 'node drain --cancel' takes it back",
	"penstock volume promote":  "copies what a clone shares; the origin stays",
}

// TestDestroyingCommandsAsk: commands that destroy data are marked: each has --yes, also in its
// examples. (test/cmd, confirm.txtar, tests the texts, and that the commands do nothing without a
// terminal.)
func TestDestroyingCommandsAsk(t *testing.T) {
	marked := map[string]bool{}
	every(newRoot(), func(cmd *cobra.Command) {
		path := cmd.CommandPath()
		if !cmd.Runnable() || isGroup(cmd) {
			return
		}
		if !isDestroying(cmd) {
			if (slices.Contains(undoing, cmd.Name()) || cmd.Flags().Lookup("yes") != nil) && notDestroying[path] == "" {
				t.Errorf("%s is not marked as destroying; mark it, or say why it is not", path)
			}
			return
		}
		marked[path] = true
		if !strings.Contains(cmd.Example, "--yes") {
			t.Errorf("the example of %s does not say --yes", path)
		}
	})
	want := []string{
		"penstock chunk accept-loss", "penstock client abandon", "penstock disk fail", "penstock disk replace",
		"penstock mirror delete", "penstock mirror promote", "penstock node remove", "penstock snapshot delete",
		"penstock snapshot group delete", "penstock snapshot rollback", "penstock stream delete", "penstock stream delete-group", "penstock volume delete",
	}
	if got := slices.Sorted(maps.Keys(marked)); !slices.Equal(got, want) {
		t.Errorf("marked as destroying are %q, want %q", got, want)
	}
}

// TestConfirmNamesWhatWouldBeLost: without a terminal, too, a command names the data that
// would be lost.
func TestConfirmNamesWhatWouldBeLost(t *testing.T) {
	cmd := newRoot()
	var said bytes.Buffer
	cmd.SetErr(&said)
	cmd.SetIn(strings.NewReader("v\n"))
	err := confirm(cmd, "Delete volume v (3 GiB)?", "v")
	var usage *usageError
	if !errors.As(err, &usage) || !strings.Contains(err.Error(), "Delete volume v (3 GiB)?") || !strings.Contains(err.Error(), "give --yes") {
		t.Errorf("it says %v", err)
	}
}
