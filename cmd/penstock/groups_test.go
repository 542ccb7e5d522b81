package main

import (
	"bytes"
	"slices"
	"strings"
	"testing"

	"github.com/spf13/cobra"
)

// every calls visit for each command of the tree.
func every(cmd *cobra.Command, visit func(*cobra.Command)) {
	visit(cmd)
	for _, c := range cmd.Commands() {
		every(c, visit)
	}
}

// TestMisspeltCommands: in every group, an unknown word ends with status 2, whatever flags
// follow, and the error suggests the similar command.
func TestMisspeltCommands(t *testing.T) {
	groups := 0
	every(newRoot(), func(cmd *cobra.Command) {
		if !cmd.HasSubCommands() {
			return
		}
		groups++
		meant := cmd.Commands()[len(cmd.Commands())-1].Name()
		typo := meant[:1] + meant[2:] + "q"
		at := strings.Fields(cmd.CommandPath())
		for _, words := range [][]string{{typo}, {typo, "a", "b"}, {typo, "--no-such-flag", "x"}, {"no-such-command"}, {"-no-such-command"}} {
			line := append(slices.Clone(at), words...)
			var out, said bytes.Buffer
			if status := run(line, strings.NewReader(""), &out, &said); status != exitUsage {
				t.Errorf("%q ends with status %d, want %d\n%s", line, status, exitUsage, said.Bytes())
			}
			if out.Len() > 0 {
				t.Errorf("%q prints on standard output: %s", line, out.Bytes())
			}
			if isGroup(cmd) && words[0] == typo && (!strings.Contains(said.String(), "unknown command") || !strings.Contains(said.String(), meant)) {
				t.Errorf("%q says nothing of %s: %s", line, meant, said.Bytes())
			}
		}
		// A group without a command prints its help.
		var out, said bytes.Buffer
		if isGroup(cmd) {
			if status := run(at, strings.NewReader(""), &out, &said); status != exitOK || !strings.Contains(out.String(), meant) {
				t.Errorf("%q ends with status %d and prints %s%s", at, status, out.Bytes(), said.Bytes())
			}
		}
		line := append(append([]string{"penstock", "help"}, at[1:]...), typo)
		if status := run(line, strings.NewReader(""), &out, &said); status != exitUsage {
			t.Errorf("%q ends with status %d, want %d\n%s", line, status, exitUsage, said.Bytes())
		}
	})
	if groups < 12 {
		t.Errorf("the tree has %d groups of commands", groups)
	}
}

// TestTooManyArguments: no command ignores additional words, and an error about arguments
// is a wrong call (status 2).
func TestTooManyArguments(t *testing.T) {
	every(newRoot(), func(cmd *cobra.Command) {
		if cmd.HasSubCommands() || strings.Contains(cmd.Use, "...") || cmd.Name() == "help" {
			return
		}
		line := append(strings.Fields(cmd.CommandPath()), "a", "b", "c", "d")
		want := exitUsage
		if forMonitors(cmd) {
			want = healthUnknown
		}
		var out, said bytes.Buffer
		if status := run(line, strings.NewReader(""), &out, &said); status != want {
			t.Errorf("%q ends with status %d, want %d\n%s%s", line, status, want, out.Bytes(), said.Bytes())
		}
	})
}

// TestHelp: each command has a one-line description, an example of its use, and --help.
func TestHelp(t *testing.T) {
	every(newRoot(), func(cmd *cobra.Command) {
		if cmd.Name() == "help" || strings.Contains(cmd.CommandPath(), " completion") {
			return
		}
		if cmd.Short == "" || strings.HasSuffix(cmd.Short, ".") {
			t.Errorf("%s: Short is %q", cmd.CommandPath(), cmd.Short)
		}
		if cmd.Runnable() && !isGroup(cmd) && !strings.Contains(cmd.Example, cmd.CommandPath()) {
			t.Errorf("%s: its example does not show it: %q", cmd.CommandPath(), cmd.Example)
		}
		var out, said bytes.Buffer
		if status := run(append(strings.Fields(cmd.CommandPath()), "--help"), strings.NewReader(""), &out, &said); status != exitOK || !strings.Contains(out.String(), "Usage:") {
			t.Errorf("%s --help ends with status %d and prints %s%s", cmd.CommandPath(), status, out.Bytes(), said.Bytes())
		}
	})
}
