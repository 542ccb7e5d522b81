package main

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"
)

// limited runs scripts/limit.sh and returns its output and its status.
func limited(t *testing.T, seconds string, command ...string) (string, int) {
	t.Helper()
	log := filepath.Join(t.TempDir(), "log")
	out, err := exec.Command("../../scripts/limit.sh", append([]string{seconds, log}, command...)...).CombinedOutput()
	status := 0
	if exit := new(exec.ExitError); errors.As(err, &exit) {
		status = exit.ExitCode()
	} else if err != nil {
		t.Fatal(err)
	}
	kept, err := os.ReadFile(log)
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(kept)) {
		if !strings.Contains(string(out), line) {
			t.Errorf("%q was kept and not shown", line)
		}
	}
	return string(out), status
}

func TestLimit(t *testing.T) {
	t.Run("in time", func(t *testing.T) {
		t.Parallel()
		if out, status := limited(t, "600", "sh", "-c", "echo out; echo err >&2; exit 3"); status != 3 || !strings.Contains(out, "out\nerr\n") {
			t.Errorf("%d: %s", status, out)
		}
	})
	// A command that ignores SIGTERM, and a child in a process group of its own.
	t.Run("not in time", func(t *testing.T) {
		t.Parallel()
		out, status := limited(t, "1", "bash", "-c", `trap "echo told" TERM; set -m; sleep 1000 & p=$!; until grep -q ^sleep /proc/$p/cmdline; do :; done; kill -STOP $p; echo pid $p; while :; do sleep 1; done`)
		if status != 124 || !strings.Contains(out, "told\n") {
			t.Errorf("%d: %s", status, out)
		}
		_, rest, _ := strings.Cut(out, "pid ")
		text, _, _ := strings.Cut(rest, "\n")
		pid, err := strconv.Atoi(text)
		if err != nil {
			t.Fatalf("%v: %s", err, out)
		}
		if !strings.Contains(out, "T do_signal_stop sleep 1000") {
			t.Errorf("it does not tell of process %d, which stands still:\n%s", pid, out)
		}
		for deadline := time.Now().Add(30 * time.Second); syscall.Kill(pid, 0) == nil; time.Sleep(10 * time.Millisecond) {
			if time.Now().After(deadline) {
				t.Fatalf("process %d is left", pid)
			}
		}
	})
}
