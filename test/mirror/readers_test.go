package mirror

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"syscall"
	"testing"
	"time"

	"penstock.io/penstock/cmd/penstock/spawn"
	"penstock.io/penstock/meta"
)

// TestStoppedReader stops a mount of a target (SIGSTOP), which then does not give its leases
// back: the next snapshot is shown only after the end of the mount's session, and other readers
// do not wait.
func TestStoppedReader(t *testing.T) {
	t.Parallel()
	m := newCluster(t)
	w := newWriter(t, m.volume("src"), *seed+1200)
	w.file("f", 1000)
	m.Must("mirror", "create", "src", "dst", "--attach", "/dst")
	m.copier()
	m.Must("mirror", "sync", "dst", "--wait")
	at := filepath.Join(m.Dir, "at")
	w.must(os.Mkdir(at, 0o755))
	p := m.Run("mount", "--cluster", m.Addr, "/dst", at)
	t.Cleanup(func() { p.Kill(); spawn.Unmount(at) })
	m.Until("mounted", func() error {
		if !spawn.Mounted(at) {
			return errors.New("not yet")
		}
		return nil
	})
	ctx, dst := t.Context(), m.volume("dst")
	e, err := dst.Lookup(ctx, meta.RootIno, "f")
	w.must(err)
	// Any other cause that delays a read for so long does not do so three times.
	const most = 2 * time.Second
	for try := 0; ; try++ {
		want := w.bytes(1000 + try)
		_, err := w.v.Write(ctx, nil, w.lookup("f"), want, 0, false, false)
		w.must(err)
		w.must(w.v.SyncAll(ctx))
		if _, err := os.ReadFile(filepath.Join(at, "f")); err != nil {
			t.Fatal(err)
		}
		w.must(syscall.Kill(p.PID(), syscall.SIGSTOP))
		stopped := time.Now()
		over := make(chan struct{})
		var longest time.Duration
		var reads int
		var wg sync.WaitGroup
		wg.Go(func() {
			b := make([]byte, len(want)+1)
			for {
				began := time.Now()
				if _, err := dst.Read(ctx, e.Attr.Ino, b, 0); err != nil {
					t.Error(err)
					return
				}
				longest = max(longest, time.Since(began))
				reads++
				select {
				case <-over:
					return
				case <-time.After(10 * time.Millisecond):
				}
			}
		})
		_, err = m.Ctl("mirror", "sync", "dst", "--wait")
		took := time.Since(stopped)
		close(over)
		wg.Wait()
		w.must(syscall.Kill(p.PID(), syscall.SIGCONT))
		w.must(err)
		t.Logf("shown %v after a reader was stopped; the longest of %d reads took %v", took.Round(time.Millisecond), reads, longest.Round(time.Millisecond))
		b := make([]byte, len(want)+1)
		if n, err := dst.Read(ctx, e.Attr.Ino, b, 0); err != nil || !bytes.Equal(b[:n], want) {
			t.Fatalf("readers don't see the next snapshot: %v", err)
		}
		m.Until("who was stopped sees it", func() error {
			b, err := os.ReadFile(filepath.Join(at, "f"))
			if err == nil && !bytes.Equal(b, want) {
				err = errors.New("not yet")
			}
			return err
		})
		if longest < most {
			return
		}
		if try == 2 {
			t.Fatalf("a reader waited for another one that was stopped, each time")
		}
	}
}

// TestBehind: the mirror reports the number of bytes of the next round before the round, for
// files of every kind. A round under way keeps to a rate that is set meanwhile.
func TestBehind(t *testing.T) {
	t.Parallel()
	m := newCluster(t)
	w := newWriter(t, m.volume("src"), *seed+1300)
	ctx := t.Context()
	w.file("big", 16<<20)
	w.file("inline", 1000)
	w.file("holes", 1000)
	holes := w.lookup("holes")
	for i := range 300 {
		_, err := w.v.Write(ctx, nil, holes, w.bytes(5000), int64(i)<<20, false, false)
		w.must(err)
	}
	w.must(w.v.SyncAll(ctx))                                  // bytes buffered for longer than a second come after a snapshot
	m.Must("mirror", "create", "src", "dst", "--rate", "64K") // the round would take minutes
	m.copier()
	m.copying("dst")
	if lag := m.mirror("dst").LagSeconds; lag != -1 {
		t.Errorf("nothing is shown yet, and that is %d s old", lag)
	}
	m.rate("dst", "0")
	first := time.Now()
	m.Must("mirror", "sync", "dst", "--wait", "--timeout", "85s")
	if lag := m.mirror("dst").LagSeconds; lag < 0 || lag > int64(time.Since(first)/time.Second) {
		t.Errorf("what was asked for %v ago is told to be %d s old", time.Since(first), lag)
	}
	m.Must("mirror", "pause", "dst")
	m.Until("what readers see gets older", func() error {
		lag, most := m.mirror("dst").LagSeconds, int64(time.Since(first)/time.Second)
		if lag < 2 || lag > most {
			return fmt.Errorf("%d s old, %d s after it was asked for", lag, most)
		}
		return nil
	})
	lock := meta.Lock{Ino: meta.MirrorLock, Owner: 1, Type: meta.LockWrite, Flock: true, End: 1<<63 - 1}
	m.Until("the copier let go", func() error { return m.volume("dst").SetLock(ctx, lock, false) }) // the copier looks when the copier begins again
	lock.Type = meta.LockUnlock
	w.must(m.volume("dst").SetLock(ctx, lock, false))
	w.file("new", 300<<10)
	for ino, at := range map[meta.Ino]int64{w.lookup("big"): 5 << 20, w.lookup("inline"): 10, holes: 280<<20 + 1000} {
		_, err := w.v.Write(ctx, nil, ino, w.bytes(900), at, false, false)
		w.must(err)
	}
	_, err := w.v.Write(ctx, nil, holes, w.bytes(9000), 400<<20, false, false)
	w.must(err)
	w.must(w.v.SyncAll(ctx))
	began := time.Now()
	m.Must("mirror", "resume", "dst")
	m.Until("it was looked at", func() error {
		if r := m.mirror("dst"); !r.Looked.After(began) {
			return errors.New("not yet")
		}
		return nil
	})
	behind := m.mirror("dst").Behind
	m.Must("mirror", "sync", "dst", "--wait")
	if sent := m.mirror("dst").Last.Sent; sent != behind || sent == 0 {
		t.Errorf("%d bytes were said to be missing, %d were sent", behind, sent)
	}
}

func (w *writer) lookup(name string) meta.Ino {
	w.t.Helper()
	e, err := w.v.Lookup(w.t.Context(), meta.RootIno, name)
	w.must(err)
	return e.Attr.Ino
}
