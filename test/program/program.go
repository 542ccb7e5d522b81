// Package program builds the penstock that tests start as separate processes.
package program

import (
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/moby/sys/mountinfo"
)

// Path is the path of the penstock that Main built or was given.
var Path string

// Variable is the environment variable that names an existing penstock to test.
const Variable = "PENSTOCK_BINARY"

// Given returns the penstock that Variable names; "": none. Tests run in other folders and also
// find the program by its name: any other kind of path is an error.
func Given() (string, error) {
	path := os.Getenv(Variable)
	if path != "" && (!filepath.IsAbs(path) || filepath.Base(path) != "penstock") {
		return "", fmt.Errorf("%s=%s: an absolute path of a file named penstock is needed", Variable, path)
	}
	return path, nil
}

// Main builds penstock, runs the tests of a package in a separate mount name space, and
// removes the built program. Main returns the exit status.
//
// The tests' mounts go with the name space, even if the tests are killed, and no name
// space that another process makes meanwhile keeps a copy of them.
func Main(m *testing.M) int {
	return InOwnMounts(func() int { return built(m) })
}

// Beside sets how many parallel tests of a package run at a time, unless the command line
// sets the number: tests that mostly wait leave processors to others. Beside must be
// called before Main.
func Beside(n int) {
	if err := flag.Set("test.parallel", strconv.Itoa(n)); err != nil {
		panic(err) // every test binary has this flag
	}
}

// own says which part of InOwnMounts a process plays; the first has none.
const (
	own    = "PENSTOCK_TEST_OWN_MOUNTS"
	keeper = "keeper"
	tester = "tester"
)

// InOwnMounts runs main in a separate mount name space, if this process is root: in
// another process of the same program and arguments. InOwnMounts returns main's exit
// status.
//
// A third process between the two outlives all other processes of the name space. When
// the last process of a name space ends, the kernel unmounts the remaining mounts, and
// waits for the server of each FUSE device. A server that is itself the last process
// never answers, and sync(2) hangs on the whole machine.
func InOwnMounts(main func() int) int {
	if os.Geteuid() != 0 {
		return main()
	}
	attr := &syscall.SysProcAttr{}
	next := ""
	switch os.Getenv(own) {
	case tester:
		return main()
	case keeper:
		if err := forgetOthers(); err != nil {
			fmt.Fprintln(os.Stderr, err)
			return 1
		}
		next, attr.Pdeathsig = tester, syscall.SIGKILL
	default:
		next, attr.Pdeathsig, attr.Unshareflags = keeper, syscall.SIGTERM, syscall.CLONE_NEWNS
	}
	runtime.LockOSThread() // the kernel signals the other process when this thread ends
	defer runtime.UnlockOSThread()
	exe, err := os.Executable()
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	cmd := exec.Command(exe, os.Args[1:]...)
	cmd.Env = append(os.Environ(), own+"="+next)
	cmd.Stdout, cmd.Stderr, cmd.SysProcAttr = os.Stdout, os.Stderr, attr
	if next == tester {
		ended := make(chan os.Signal, 1)
		signal.Notify(ended, syscall.SIGTERM, syscall.SIGINT)
		err = cmd.Start()
		if err == nil {
			go func() {
				<-ended
				cmd.Process.Kill()
			}()
			err = cmd.Wait()
		}
		endOthers()
	} else {
		err = cmd.Run()
	}
	if exit := new(exec.ExitError); errors.As(err, &exit) && exit.ExitCode() > 0 {
		return exit.ExitCode() // the process has printed the reason
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return 0
}

// endOthers kills the remaining processes of this mount name space, and waits for their
// ends.
func endOthers() {
	for deadline := time.Now().Add(10 * time.Second); ; time.Sleep(10 * time.Millisecond) {
		left := 0
		mine, err := os.Readlink("/proc/self/ns/mnt")
		dirs, gerr := filepath.Glob("/proc/[0-9]*")
		if err = errors.Join(err, gerr); err != nil {
			fmt.Fprintln(os.Stderr, err)
			return
		}
		for _, dir := range dirs {
			pid, err := strconv.Atoi(filepath.Base(dir))
			// A process that has ended meanwhile has no name space.
			if ns, lerr := os.Readlink(dir + "/ns/mnt"); err != nil || lerr != nil || ns != mine || pid == os.Getpid() {
				continue
			}
			left++
			syscall.Kill(pid, syscall.SIGKILL)
		}
		if left == 0 {
			return
		}
		if time.Now().After(deadline) {
			fmt.Fprintf(os.Stderr, "%d processes of the tests do not end\n", left)
			return
		}
	}
}

// forgetOthers unmounts this name space's copies of other processes' mounts: a copy keeps a file
// system mounted, and its disk busy, after the original was unmounted.
func forgetOthers() error {
	mounts, err := mountinfo.GetMounts(func(i *mountinfo.Info) (skip, stop bool) {
		return !strings.HasPrefix(i.FSType, "fuse") && !strings.HasPrefix(i.Source, "/dev/loop"), false
	})
	if err != nil {
		return err
	}
	for _, m := range slices.Backward(mounts) {
		// The mount may have gone with a mount below.
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
	dir, err := os.MkdirTemp("", "penstock-program-")
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	defer os.RemoveAll(dir)
	// Indexes of mounted snapshots lie in the scratch folder, not on this machine's disk.
	if err := os.Setenv("PENSTOCK_INDEX_DIR", filepath.Join(dir, "indexes")); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	if Path, err = Given(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	if Path != "" {
		return m.Run()
	}
	Path = filepath.Join(dir, "penstock")
	if err := Build(Path, "penstock.io/penstock/cmd/penstock"); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return m.Run()
}

// Build builds a static program, with the race detector in a test with the race detector.
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
