package deploy

import (
	"errors"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// TestRoll: roll.sh replaces what is old, metadata servers first, each when all was
// well three times in a row after the one before; and nothing when it is run again.
func TestRoll(t *testing.T) {
	dir, run := rolling(t)
	roll := func() []string {
		t.Helper()
		if out, err := run(""); err != nil {
			wrong, _ := os.ReadFile(filepath.Join(dir, "wrong"))
			t.Fatalf("%v: %s%s", err, out, wrong)
		}
		var asked []string
		for _, line := range strings.Split(string(read(t, dir, "log")), "\n") {
			if word, _, _ := strings.Cut(line, " "); word == "delete" || word == "wait" || word == "exec" {
				asked = append(asked, line)
			}
		}
		return asked
	}
	var gone []string
	looks := 0
	for _, line := range roll() {
		switch pod, is := strings.CutPrefix(line, "delete pod/penstock-"); {
		case is:
			if looks < 3 {
				t.Errorf("%s goes after %d looks at the cluster", pod, looks)
			}
			gone = append(gone, pod)
			looks = 0
		case strings.HasPrefix(line, "exec"):
			looks++
		case line != "wait --for=condition=Ready pod/penstock-"+gone[len(gone)-1]+" --timeout=60s":
			t.Errorf("after %v: %s", gone, line)
		}
	}
	if want := []string{"meta-0", "meta-first-0", "chunkserver-a-0", "chunkserver-a-1", "chunkserver-b-0"}; !slices.Equal(gone, want) {
		t.Errorf("replaced %v, not %v", gone, want)
	}
	if again := strings.Join(roll(), "\n"); strings.Count(again, "delete") != len(gone) {
		t.Errorf("run again it replaces what is new: %s", again)
	}
}

// TestRollSeesFailures: roll.sh stops with an error when kubectl fails, whatever it asked
// for, and does not take no answer for one. Nothing goes after that.
func TestRollSeesFailures(t *testing.T) {
	for _, asked := range []string{
		"get statefulsets -l *", "get statefulset.*component}", "*metadata.generation*", "*observedGeneration*", "*updateRevision*",
		"get pods -l *penstock.io/set=penstock-meta -o name", "get pod/*controller-revision-hash*", "delete pod/*",
	} {
		dir, run := rolling(t)
		out, err := run(asked)
		if _, ended := errors.AsType[*exec.ExitError](err); !ended || strings.Contains(out, "all servers") {
			t.Errorf("%q fails: %v, %s", asked, err, out)
		}
		lines := strings.Split(strings.TrimSpace(string(read(t, dir, "log"))), "\n")
		if is, err := path.Match(strings.ReplaceAll(asked, "/", "|"), strings.ReplaceAll(lines[len(lines)-1], "/", "|")); err != nil || !is {
			t.Errorf("after %q failed it goes on: %q, %v", asked, lines, err)
		}
	}
}

// rolling is a folder with what roll.sh calls, and runs it; the first of what a pattern
// names fails.
func rolling(t *testing.T) (dir string, run func(fails string) (string, error)) {
	t.Helper()
	dir = t.TempDir()
	for name, text := range map[string]string{"sleep": "#!/bin/sh\n", "kubectl": string(read(t, "testdata", "kubectl"))} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	return dir, func(fails string) (string, error) {
		cmd := exec.CommandContext(t.Context(), "sh", filepath.Join(driverChart.plain, "roll.sh"), "elsewhere")
		cmd.Env = append(os.Environ(), "PATH="+dir+":"+os.Getenv("PATH"), "ROLL_DIR="+dir, "ROLL_FAILS="+fails)
		out, err := cmd.CombinedOutput()
		return string(out), err
	}
}
