package penstock

import (
	"testing"
	"time"

	"penstock.io/penstock/meta"
)

// rollBack rolls the volume back to a snapshot, as an owner does by force: all sessions
// end first.
func (w *world) rollBack(at meta.Generation) {
	w.t.Helper()
	w.mu.Lock()
	var all []*fakeSession
	for _, s := range w.sessions {
		all = append(all, s)
	}
	for _, s := range all {
		w.endLocked(s)
	}
	w.mu.Unlock()
	for op := (&meta.Rollback{To: at}); ; {
		res := w.run(op)
		if res.EOF {
			break
		}
		op.From = res.Data
	}
	for _, s := range all {
		w.mu.Lock()
		w.startLocked(s)
		s.expired++
		w.mu.Unlock()
		told := make(chan struct{})
		s.events <- func() {
			s.c.Expired([]meta.VolumeID{1}, meta.E("session", meta.SessionExpired, "", nil))
			close(told)
		}
		<-told
	}
}

// TestRemovedAndRolledBack: a file that was removed, and exists again after a rollback,
// is an ordinary file: writes through an earlier descriptor stay.
func TestRemovedAndRolledBack(t *testing.T) {
	for _, held := range []bool{false, true} {
		w := newWorld(t, meta.Policy{Replicas: 1})
		k := newHoldingKernel()
		a, va := open(t, w, Config{FlushEvery: time.Hour, Notify: k})
		_, vb := open(t, w, Config{FlushEvery: time.Hour})
		ino := create(t, va, "f")
		write(t, va, ino, []byte("was the snapshot"), 0)
		if err := va.Fsync(t.Context(), ino, false); err != nil {
			t.Fatal(err)
		}
		at := w.take("s")
		if held { // closed, but not forgotten by the kernel
			va.Release(t.Context(), ino, rdwr)
			k.held.Store(true)
		}
		if err := vb.Unlink(t.Context(), &Call{}, meta.RootIno, "f", false); err != nil {
			t.Fatal(err)
		}
		a.Orphaned(1, ino)
		if held {
			eventually(t, "the file is kept for the kernel", func() bool {
				va.holds.mu.Lock()
				defer va.holds.mu.Unlock()
				return len(va.holds.inos) == 1
			})
		}
		w.rollBack(at)
		if held {
			if _, err := va.Open(t.Context(), &Call{}, ino, rdwr); err != nil {
				t.Fatal(err)
			}
		}
		write(t, va, ino, []byte("the"), 0)
		va.Release(t.Context(), ino, rdwr)
		if held {
			va.Forget(ino)
		}
		if got := string(contents(t, vb, ino)); got != "the the snapshot" {
			t.Errorf("held %v: it has %q", held, got)
		}
		w.check()
	}
}
