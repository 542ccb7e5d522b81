// Package program builds the penstock that tests start as processes of its own.
package program

import (
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"syscall"
	"testing"
)

// Path of the penstock that Main built or was given.
var Path string

// Variable of the environment that names a penstock to test instead of one
// that is built.
const Variable = "PENSTOCK_BINARY"

// Main builds penstock, runs the tests of a package in a mount name space of
// their own, and removes what it built. It gives the exit status.
//
// What they mount goes with them, though they be killed, and no name space that
// another process makes meanwhile keeps a copy of it.
func Main(m *testing.M) int {
	return inOwnMounts(func() int { return Built(m) })
}

// own is set where the mount name space is the tests' own.
const own = "PENSTOCK_TEST_OWN_MOUNTS"

// inOwnMounts runs main in this process if the mount name space is its own, and
// else lets it run in another of the same program and arguments whose it is.
func inOwnMounts(main func() int) int {
	if os.Geteuid() != 0 || os.Getenv(own) != "" {
		return main()
	}
	exe, err := os.Executable()
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	runtime.LockOSThread() // the other is killed when this thread ends
	defer runtime.UnlockOSThread()
	cmd := exec.Command(exe, os.Args[1:]...)
	cmd.Env = append(os.Environ(), own+"=1")
	cmd.Stdout, cmd.Stderr = os.Stdout, os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Unshareflags: syscall.CLONE_NEWNS, Pdeathsig: syscall.SIGKILL}
	if err := cmd.Run(); err != nil {
		if exit := new(exec.ExitError); errors.As(err, &exit) && exit.ExitCode() > 0 {
			return exit.ExitCode() // it has said why
		}
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return 0
}

// Built is Main for tests that look after their mounts themselves.
func Built(m *testing.M) int {
	if !flag.Parsed() { // a caller may have put in defaults since
		flag.Parse()
	}
	if Path = os.Getenv(Variable); Path != "" {
		return m.Run()
	}
	dir, err := os.MkdirTemp("", "penstock-program-")
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	defer os.RemoveAll(dir)
	Path = filepath.Join(dir, "penstock")
	if err := Build(Path, "penstock.io/penstock/cmd/penstock"); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return m.Run()
}

// Build builds a program, static; with the race detector if the test has it.
func Build(to, pkg string) error {
	args, env := []string{"build", "-o", to}, "CGO_ENABLED=0"
	if race {
		args, env = append(args, "-race"), "CGO_ENABLED=1"
	}
	cmd := exec.Command("go", append(args, pkg)...)
	cmd.Env = append(os.Environ(), env)
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("building %s: %w\n%s", pkg, err, out)
	}
	return nil
}
