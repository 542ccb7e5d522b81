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
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/moby/sys/mountinfo"
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
	return InOwnMounts(func() int { return built(m) })
}

// own is set where the mount name space is the tests' own.
const own = "PENSTOCK_TEST_OWN_MOUNTS"

// InOwnMounts runs main in this process if the mount name space is its own, and
// else lets it run in another of the same program and arguments whose it is.
func InOwnMounts(main func() int) int {
	if os.Geteuid() != 0 {
		return main()
	}
	if os.Getenv(own) != "" {
		if err := forgetOthers(); err != nil {
			fmt.Fprintln(os.Stderr, err)
			return 1
		}
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

// forgetOthers takes away the copies of what others had mounted when this name
// space was made: a copy keeps a file system mounted, and its disk busy, after
// those who mounted it have unmounted it.
func forgetOthers() error {
	mounts, err := mountinfo.GetMounts(func(i *mountinfo.Info) (skip, stop bool) {
		return !strings.HasPrefix(i.FSType, "fuse") && !strings.HasPrefix(i.Source, "/dev/loop"), false
	})
	if err != nil {
		return err
	}
	for _, m := range slices.Backward(mounts) {
		// It may have gone with one below it.
		if err := syscall.Unmount(m.Mountpoint, syscall.MNT_DETACH); err != nil && !errors.Is(err, syscall.EINVAL) && !errors.Is(err, syscall.ENOENT) {
			return fmt.Errorf("unmount the copy of %s: %w", m.Mountpoint, err)
		}
	}
	return nil
}

// built runs the tests with penstock built.
func built(m *testing.M) int {
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
