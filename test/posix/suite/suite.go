// Package suite owns Penstock's POSIX conformance cases: the behaviour that a Linux
// program may expect of any file system, with a named case for each operation, situation
// and expected result. The cases know nothing of Penstock; they run in any directory, as
// root, and native ext4 passes all of them.
//
// A case gets a fresh directory, a separate thread with this directory as its working
// directory, and umask 0. So a case can use short relative paths and change its identity
// (T.As) without touching other cases.
package suite

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"runtime/debug"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// Case is a condition: an operation in a situation with its result. The name has all
// three, as in "unlink/ENOTDIR/prefix-is-fifo".
type Case struct {
	Name string
	Run  func(*T)
}

// Result is the outcome of a case; Err is nil if the case passed.
type Result struct {
	Name string
	Err  error
	Took time.Duration
}

// caseTimeout bounds one case: a hang is a failure of that case only.
const caseTimeout = 60 * time.Second

// Cases lists all cases, sorted by name.
func Cases() []Case {
	all := slices.Concat(
		pathCases(), dirfdCases(), openCases(), createCases(), unlinkCases(), linkCases(), symlinkCases(),
		renameCases(), permissionCases(), chmodCases(), chownCases(), timesCases(), utimensCases(),
		readWriteCases(), mmapCases(), truncateCases(), fallocateCases(), seekCases(), copyRangeCases(), syncCases(),
		readdirCases(), statCases(), xattrCases(), aclCases(), lockCases(), specialCases(), execCases(), raceCases(), descriptorCases(), handleCases(),
	)
	slices.SortFunc(all, func(a, b Case) int { return strings.Compare(a.Name, b.Name) })
	return all
}

// Run runs cases below dir, workers at a time, and reports each as it ends
// (report is called from one goroutine at a time). The process must be root:
// cases become other users and make devices. Other is the path of the same
// directory on another mount, for CoherenceCases; it may be dir itself.
func Run(dir, other string, cases []Case, workers int, report func(Result)) (passed, failed int) {
	queue := make(chan int)
	var wg sync.WaitGroup
	var mu sync.Mutex
	for range workers {
		wg.Go(func() {
			for i := range queue {
				start := time.Now()
				own := fmt.Sprintf("c%05d", i)
				err := runCase(filepath.Join(dir, own), filepath.Join(other, own), cases[i])
				mu.Lock()
				if err == nil {
					passed++
				} else {
					failed++
				}
				report(Result{cases[i].Name, err, time.Since(start)})
				mu.Unlock()
			}
		})
	}
	for i := range cases {
		queue <- i
	}
	close(queue)
	wg.Wait()
	return passed, failed
}

// runCase makes the case's directory, runs the case, and waits for at most caseTimeout.
func runCase(dir, other string, c Case) error {
	if err := os.Mkdir(dir, 0o777); err != nil {
		return fmt.Errorf("before the case: %w", err)
	}
	if err := os.Chmod(dir, 0o777); err != nil {
		return fmt.Errorf("before the case: %w", err)
	}
	done := make(chan error, 1)
	go onThread(dir, other, c, done)
	timer := time.NewTimer(caseTimeout)
	defer timer.Stop()
	select {
	case err := <-done:
		if err != nil {
			os.RemoveAll(dir) // the failure is reported already
			return err
		}
		if err := os.RemoveAll(dir); err != nil {
			return fmt.Errorf("removing the case's directory afterwards: %w", err)
		}
		return nil
	case <-timer.C:
		return fmt.Errorf("no end after %s: the operation hangs", caseTimeout)
	}
}

// onThread runs the case on a thread with its own working directory, umask and
// credentials. The thread is never unlocked, so the runtime ends it with the goroutine,
// and no other code runs with the state that the case left behind.
func onThread(dir, other string, c Case, done chan<- error) {
	runtime.LockOSThread()
	debug.SetPanicOnFault(true) // SIGBUS of a mapping fails the case, not the program
	t := &T{Dir: dir, Other: other}
	defer func() {
		r := recover()
		t.cleanup()
		// The runtime keeps the process's first thread for ever, even after it was
		// locked; the thread must not keep the directory in use.
		if err := unix.Chdir("/"); err != nil && r == nil {
			r = failure("chdir / after the case: " + err.Error())
		}
		switch r := r.(type) {
		case nil:
			done <- nil
		case failure:
			done <- errors.New(string(r))
		default:
			done <- fmt.Errorf("panic: %v\n%s", r, debug.Stack())
		}
	}()
	t.OK("unshare(CLONE_FS)", unix.Unshare(unix.CLONE_FS))
	unix.Umask(0)
	t.OK("chdir to the case's directory", unix.Chdir(dir))
	c.Run(t)
}

// failure is the value of T.Fatalf's panic.
type failure string

// T is a case in progress.
type T struct {
	Dir      string // the case's own directory, absolute; also the working directory
	Other    string // the same directory on another mount; "": none
	cleanups []func()
}

// Fatalf ends the case as failed. Only the case's own goroutine may call it.
func (t *T) Fatalf(format string, args ...any) {
	panic(failure(fmt.Sprintf(format, args...)))
}

// Cleanup registers f to run when the case ends, last first.
func (t *T) Cleanup(f func()) { t.cleanups = append(t.cleanups, f) }

func (t *T) cleanup() {
	for _, f := range slices.Backward(t.cleanups) {
		f()
	}
}

// OK fails the case unless err is nil.
func (t *T) OK(op string, err error) {
	if err != nil {
		t.Fatalf("%s: expected success, got %s", op, errText(err))
	}
}

// Want fails the case unless err is the expected errno (nil for success).
func (t *T) Want(op string, err, want error) {
	if want == nil {
		t.OK(op, err)
		return
	}
	if !errors.Is(err, want) {
		t.Fatalf("%s: expected %s, got %s", op, errText(want), errText(err))
	}
}

// WantOneOf fails the case unless err is one of the expected errnos.
func (t *T) WantOneOf(op string, err error, wants ...error) {
	for _, w := range wants {
		if errors.Is(err, w) || err == nil && w == nil {
			return
		}
	}
	text := ""
	for i, w := range wants {
		if i > 0 {
			text += " or "
		}
		text += errText(w)
	}
	t.Fatalf("%s: expected %s, got %s", op, text, errText(err))
}

// Equal fails the case unless got is want.
func Equal[V comparable](t *T, what string, got, want V) {
	if got != want {
		t.Fatalf("%s: expected %v, got %v", what, want, got)
	}
}

// True fails the case unless ok.
func (t *T) True(ok bool, format string, args ...any) {
	if !ok {
		t.Fatalf(format, args...)
	}
}

// errText names an errno as manual pages do.
func errText(err error) string {
	if err == nil {
		return "success"
	}
	var no unix.Errno
	if errors.As(err, &no) {
		return unix.ErrnoName(no)
	}
	return err.Error()
}
