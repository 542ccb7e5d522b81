package main

import (
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/spf13/cobra"
)

// Where a command line of penstock begins in a block of a page: at the line's start, with a
// prompt perhaps, or where a shell begins another command.
var (
	inBlock = regexp.MustCompile(`(?:^ *(?:[\w.-]+\$ )?|until |if |; |&& |\|\| |\$\(|-- /)(?:bin/|/usr/local/bin/|/)?penstock ([^#;|)>&]*(?:[a-z]\|[a-z][^#;|)>&]*)*)`)
	inText  = regexp.MustCompile("`(?:bin/)?penstock ([^`]*)`")
)

// documented are the command lines of a page, each with its place.
func documented(t *testing.T, path string) map[string]string {
	t.Helper()
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	lines := map[string]string{}
	fenced := false
	for i, line := range strings.Split(string(b), "\n") {
		at := fmt.Sprintf("%s:%d", path, i+1)
		if strings.HasPrefix(strings.TrimSpace(line), "```") {
			fenced = !fenced
			continue
		}
		which := inText
		if fenced || strings.HasPrefix(line, "    ") {
			which = inBlock
		}
		for _, m := range which.FindAllStringSubmatch(line, -1) {
			lines[at+" "+m[1]] = m[1]
		}
	}
	return lines
}

// TestDocumentedCommands: each command line of penstock in the pages names an existing command,
// and existing flags of the command.
func TestDocumentedCommands(t *testing.T) {
	root := newRoot()
	seen := 0
	var pages []string
	for _, top := range []string{"../../README.md", "../../docs"} {
		err := filepath.WalkDir(top, func(path string, d fs.DirEntry, err error) error {
			if err == nil && filepath.Ext(path) == ".md" {
				pages = append(pages, path)
			}
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	for _, page := range pages {
		for at, line := range documented(t, page) {
			seen++
			if err := isCommand(root, line); err != nil {
				t.Errorf("%s: %v", at, err)
			}
		}
	}
	if seen < 250 {
		t.Errorf("%d command lines were found", seen)
	}
}

// TestExamplesAreCommands: the same for the examples in the help.
func TestExamplesAreCommands(t *testing.T) {
	every(newRoot(), func(cmd *cobra.Command) {
		if strings.Contains(cmd.CommandPath(), " completion") {
			return
		}
		text := strings.ReplaceAll(cmd.Example, "\\\n", " ")
		for _, line := range strings.Split(text, "\n") {
			for _, m := range inBlock.FindAllStringSubmatch(line, -1) {
				if err := isCommand(newRoot(), m[1]); err != nil {
					t.Errorf("example of %s: %v", cmd.CommandPath(), err)
				}
			}
		}
	})
}

// TestNoCommand: the tests above recognise wrong command lines.
func TestNoCommand(t *testing.T) {
	root := newRoot()
	for line, good := range map[string]bool{
		"volume list": true, "volume": true, "volume lst": false, "nonsense": false, "volume list --trash": true, "volume list --no-such": false, "pin v@s --holder x": true, "pin list v": true,
		"mirror sync|pause|resume v": true, "mirror sync|paus v": false, "volume set NAME --quota=3": true, "snapshot group list   what there is": true, "... --index-dir DIR": true, "csi guard --wat 3m": false,
	} {
		if err := isCommand(root, line); (err == nil) != good {
			t.Errorf("%s: %v", line, err)
		}
	}
	for line, want := range map[string]int{
		"    penstock volume list": 1, "    lab-1$ penstock mount v:/ /mnt": 1, "    until penstock cluster status; do sleep 1; done": 1, "    helm install penstock deploy/helm/penstock": 0,
		"    kubectl exec x -- /penstock csi guard": 1, "    penstock csi guard && penstock volume list": 2, "    old=$(penstock node list | awk 1)": 1,
	} {
		if got := len(inBlock.FindAllString(line, -1)); got != want {
			t.Errorf("%s: %d commands", line, got)
		}
	}
}

var flagWord = regexp.MustCompile(`^\[?--([a-z][a-z-]*)`)

// isCommand returns an error if the words behind "penstock" in a page are no command. A
// description may follow after two blanks; of a|b both are tried; words behind a group's
// name that can't be a command, such as NAME, end the check.
func isCommand(root *cobra.Command, line string) error {
	line, _, _ = strings.Cut(line, "   ")
	words := strings.Fields(line)
	cmd := root
	for len(words) > 0 && cmd.HasSubCommands() {
		word := strings.TrimRight(words[0], ",.")
		if word == "" { // "..."
			return nil
		}
		if strings.HasPrefix(word, "-") || strings.Contains(word, "$") {
			break
		}
		var next *cobra.Command
		for _, w := range strings.Split(word, "|") {
			next = nil
			for _, c := range cmd.Commands() {
				if c.Name() == w {
					next = c
				}
			}
			if next == nil {
				break
			}
		}
		if next == nil {
			if cmd == root || isGroup(cmd) {
				return fmt.Errorf("%q: there is no command %q of %q", line, word, cmd.CommandPath())
			}
			break
		}
		cmd, words = next, words[1:]
	}
	for _, w := range words {
		if m := flagWord.FindStringSubmatch(w); m != nil && m[1] != "help" && cmd.Flag(m[1]) == nil && !isGroup(cmd) {
			return fmt.Errorf("%q: %q has no --%s", line, cmd.CommandPath(), m[1])
		}
	}
	return nil
}
