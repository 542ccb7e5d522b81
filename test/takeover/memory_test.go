package takeover

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"golang.org/x/sys/unix"
)

// resident is how much memory a process has, MiB.
func resident(t *testing.T, pid int) (mib int) {
	t.Helper()
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(b)) {
		if rest, ok := strings.CutPrefix(line, "VmRSS:"); ok {
			if _, err := fmt.Sscan(rest, &mib); err != nil {
				t.Fatal(err)
			}
		}
	}
	return mib >> 10
}

// TestWaitingRequestsTakeLittleMemory: a request that waits for long takes little memory,
// although its pages exist before the request is read: a thousand processes may wait for one
// lock.
func TestWaitingRequestsTakeLittleMemory(t *testing.T) {
	const waiters, bound = 1000, 100 // MiB, for all of the waiters
	r := newRig(t, "--respawn")
	r.mount()
	name := filepath.Join(r.at, "lock")
	open := func() *os.File {
		f, err := os.OpenFile(name, os.O_RDWR|os.O_CREATE, 0o644)
		if err != nil {
			t.Fatal(err)
		}
		return f
	}
	lock := func(f *os.File, cmd int, kind int16) error {
		return retry(func() error { return unix.FcntlFlock(f.Fd(), cmd, &unix.Flock_t{Type: kind, Len: 1}) })
	}
	first := open()
	if err := lock(first, unix.F_OFD_SETLKW, unix.F_WRLCK); err != nil {
		t.Fatal(err)
	}
	pid := r.server()
	before := resident(t, pid)
	var wg sync.WaitGroup
	var got atomic.Int64
	for range waiters {
		f := open()
		wg.Go(func() {
			defer f.Close()
			if err := lock(f, unix.F_OFD_SETLKW, unix.F_RDLCK); err != nil {
				t.Errorf("lock: %v", err)
				return
			}
			got.Add(1)
		})
	}
	requests := filepath.Join(r.at, ".penstock", "requests")
	r.Until("all to wait", func() error {
		b, err := os.ReadFile(requests)
		if err != nil {
			return err
		}
		for line := range strings.Lines(string(b)) {
			var n int
			if _, err := fmt.Sscanf(line, "setlkw %d", &n); err == nil && n > waiters {
				return nil
			}
		}
		return fmt.Errorf("%s", b)
	})
	after := resident(t, pid)
	t.Logf("%d MiB before, %d MiB with %d requests that wait", before, after, waiters)
	if after-before > bound {
		t.Errorf("%d requests that wait take %d MiB", waiters, after-before)
	}
	if n := got.Load(); n != 0 {
		t.Errorf("%d got the lock that is held", n)
	}
	if err := lock(first, unix.F_OFD_SETLK, unix.F_UNLCK); err != nil {
		t.Error(err)
	}
	first.Close()
	wg.Wait()
	if n := got.Load(); n != waiters {
		t.Errorf("%d of %d got the lock", n, waiters)
	}
	r.clean(pid)
}
