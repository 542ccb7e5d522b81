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

// TestRoll: roll.sh replaces old pods, metadata servers first, and goes on to the next pod when
// all was well three times in a row after the pod before. Run again, roll.sh replaces nothing.
func TestRoll(t *testing.T) {
	dir, run := rolling(t, "roll.sh", "kubectl")
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

// TestRollSeesFailures: roll.sh stops with an error when kubectl fails, at any call of roll.sh,
// and does not take a missing answer for an answer. After the error roll.sh deletes no pod.
func TestRollSeesFailures(t *testing.T) {
	for _, asked := range []string{
		"get statefulsets -l *", "get statefulset.*component}", "*metadata.generation*", "*observedGeneration*", "*updateRevision*",
		"get pods -l *penstock.io/set=penstock-meta -o name", "get pod/*controller-revision-hash*", "delete pod/*",
	} {
		dir, run := rolling(t, "roll.sh", "kubectl")
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

// TestRollNodes: roll-nodes.sh replaces the driver where the driver is old and pods keep their
// mounts, and each node is ready before the next node is begun. Where pods would lose their
// mounts (an old kernel, no holder, or a driver that gave the holder nothing) roll-nodes.sh
// does nothing, says so and ends with an error. With --drain, roll-nodes.sh drains such a node
// first, and afterwards uncordons the node if it was in use before. Run again, roll-nodes.sh
// does nothing.
func TestRollNodes(t *testing.T) {
	const held = "delete pod penstock-node-held\nready held\n"
	drained := func(node string, back bool) string {
		s := "drain " + node + " --ignore-daemonsets --delete-emptydir-data\ndelete pod penstock-node-" + node + "\nready " + node + "\n"
		if back {
			s += "uncordon " + node + "\n"
		}
		return s
	}
	dir, run := rolling(t, "roll-nodes.sh", "kubectl-nodes")
	did := func(want string, args ...string) (out string, err error) {
		t.Helper()
		out, err = run("", args...)
		wrong, _ := os.ReadFile(filepath.Join(dir, "wrong"))
		log, _ := os.ReadFile(filepath.Join(dir, "did"))
		if string(log) != want || len(wrong) > 0 {
			t.Errorf("%v: it did\n%s, not\n%s%s%s", args, log, want, out, wrong)
		}
		return out, err
	}
	out, err := did(held)
	if _, ended := errors.AsType[*exec.ExitError](err); !ended || !strings.Contains(out, "would lose their mounts: old older bare kept unheld moved\n") || strings.Contains(out, "on all nodes") {
		t.Errorf("nodes whose pods would lose their mounts are not named: %v, %s", err, out)
	}
	all := held + drained("old", true) + drained("older", true) + drained("bare", true) + drained("kept", false) + drained("unheld", true) + drained("moved", true)
	for range 2 {
		if out, err := did(all, "--drain"); err != nil || !strings.Contains(out, "on all nodes") {
			t.Errorf("%v: %s", err, out)
		}
	}
}

// TestRollNodesOfNewer: another version is asked for while the driver is replaced.
// roll-nodes.sh does not wait for pods that are made no more, and ends with all nodes at the
// last version.
func TestRollNodesOfNewer(t *testing.T) {
	t.Setenv("ROLL_NEWER", "yes")
	dir, run := rolling(t, "roll-nodes.sh", "kubectl-nodes")
	out, err := run("", "--drain")
	if err != nil || !strings.Contains(out, "on all nodes") {
		t.Errorf("%v: %s", err, out)
	}
	var gone []string
	for line := range strings.Lines(string(read(t, dir, "did"))) {
		if pod, is := strings.CutPrefix(line, "delete pod penstock-node-"); is {
			gone = append(gone, strings.TrimSpace(pod))
		}
	}
	if want := []string{"held", "old", "older", "bare", "kept", "unheld", "moved", "held", "fresh"}; !slices.Equal(gone, want) {
		t.Errorf("replaced %v, not %v", gone, want)
	}
}

// TestRollNodesSeesFailures: roll-nodes.sh stops when kubectl fails, and replaces nothing
// afterwards. The script names a node that the script took out of use.
func TestRollNodesSeesFailures(t *testing.T) {
	for _, asked := range []string{
		"*metadata.generation*", "*observedGeneration*", "get controllerrevisions *", "get pods -l *component=node -o *", "get pod penstock-node-held *", "get daemonset *args}", "*component=hold *",
		"*kernelVersion*", "*unschedulable*", "drain old *", "delete pod penstock-node-old", "uncordon old",
	} {
		dir, run := rolling(t, "roll-nodes.sh", "kubectl-nodes")
		out, err := run(asked, "--drain")
		if _, ended := errors.AsType[*exec.ExitError](err); !ended || strings.Contains(out, "on all nodes") {
			t.Errorf("%q fails: %v, %s", asked, err, out)
		}
		if strings.HasSuffix(asked, "old") || strings.HasPrefix(asked, "drain") {
			if !strings.Contains(out, "kubectl uncordon old\n") {
				t.Errorf("%q fails, and it is not said that a node is out of use: %s", asked, out)
			}
		}
		lines := strings.Split(strings.TrimSpace(string(read(t, dir, "log"))), "\n")
		if is, err := path.Match(strings.ReplaceAll(asked, "/", "|"), strings.ReplaceAll(lines[len(lines)-1], "/", "|")); err != nil || !is {
			t.Errorf("after %q failed it goes on: %q, %v", asked, lines, err)
		}
	}
}

// rolling is a folder with the programs that a script of deploy/kubernetes calls, and runs the
// script; the first call of kubectl's stand-in that a pattern names fails.
func rolling(t *testing.T, script, standIn string) (dir string, run func(fails string, args ...string) (string, error)) {
	t.Helper()
	dir = t.TempDir()
	for name, text := range map[string]string{"sleep": "#!/bin/sh\n", "kubectl": string(read(t, "testdata", standIn))} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	return dir, func(fails string, args ...string) (string, error) {
		cmd := exec.CommandContext(t.Context(), "sh", append(append([]string{filepath.Join(driverChart.plain, script)}, args...), "elsewhere")...)
		cmd.Env = append(os.Environ(), "PATH="+dir+":"+os.Getenv("PATH"), "ROLL_DIR="+dir, "ROLL_FAILS="+fails)
		out, err := cmd.CombinedOutput()
		return string(out), err
	}
}
