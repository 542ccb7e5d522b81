// Package cmd runs the built binary's command line through the scripts in
// testdata: what is printed, where, and with which exit status.
package cmd

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"github.com/rogpeppe/go-internal/testscript"

	"penstock.io/penstock/cmd/penstock/spawn"
)

// binary is the penstock that TestMain built.
var binary string

func TestMain(m *testing.M) {
	os.Exit(build(m))
}

func build(m *testing.M) int {
	dir, err := os.MkdirTemp("", "penstock-cmd-")
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	defer os.RemoveAll(dir)
	binary = filepath.Join(dir, "penstock")
	cmd := exec.Command("go", "build", "-o", binary, "penstock.io/penstock/cmd/penstock")
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		fmt.Fprintf(os.Stderr, "building penstock: %v\n%s", err, out)
		return 1
	}
	return m.Run()
}

func TestScripts(t *testing.T) {
	testscript.Run(t, testscript.Params{
		Dir: "testdata",
		Setup: func(e *testscript.Env) error {
			// Whatever a script leaves mounted, and whatever is below it, goes.
			e.Defer(func() {
				if err := spawn.Unmount(filepath.Join(e.WorkDir, "mnt")); err != nil {
					t.Error(err)
				}
			})
			e.Setenv("PATH", filepath.Dir(binary)+string(os.PathListSeparator)+e.Getenv("PATH"))
			return nil
		},
		Cmds: map[string]func(*testscript.TestScript, bool, []string){
			// served DIR: waits until something is mounted at DIR and serves.
			"served": func(ts *testscript.TestScript, neg bool, args []string) {
				if neg || len(args) != 1 {
					ts.Fatalf("usage: served DIR")
				}
				dir := ts.MkAbs(args[0])
				for deadline := time.Now().Add(30 * time.Second); !spawn.Mounted(dir); time.Sleep(5 * time.Millisecond) {
					if time.Now().After(deadline) {
						ts.Fatalf("nothing is mounted at %s", dir)
					}
				}
			},
			// status N COMMAND...: the command must end with exit status N.
			"status": func(ts *testscript.TestScript, neg bool, args []string) {
				if neg || len(args) < 2 {
					ts.Fatalf("usage: status N COMMAND...")
				}
				want := args[0]
				err := ts.Exec(args[1], args[2:]...)
				got := 0
				var exit *exec.ExitError
				if errors.As(err, &exit) {
					got = exit.ExitCode()
				} else if err != nil {
					ts.Fatalf("%v", err)
				}
				if fmt.Sprint(got) != want {
					ts.Fatalf("exit status %d, want %s", got, want)
				}
			},
		},
	})
}
