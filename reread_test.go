package penstock

import (
	"bytes"
	"sync/atomic"
	"testing"

	"penstock.io/penstock/meta"
)

// TestReadsGoOnInTheNextSession: the end of a session without unsynced bytes is no error
// for readers: unanswered reads are sent again in the next session. A change is not sent
// again: its outcome is unknown.
func TestReadsGoOnInTheNextSession(t *testing.T) {
	w := newWorld(t, meta.Policy{Replicas: 1})
	c, v := open(t, w, Config{})
	want := bytes.Repeat([]byte("r"), 3*meta.InlineMax)
	ino := create(t, v, "f")
	write(t, v, ino, want, 0)
	flushAll(t, v)
	// Each operation finds its session ended at its first attempt.
	var ended atomic.Bool
	var met atomic.Int64
	w.mu.Lock()
	w.fail = func(op meta.Op) error {
		if ended.CompareAndSwap(true, false) {
			met.Add(1)
			return meta.E("call", meta.SessionExpired, "", nil)
		}
		return nil
	}
	w.mu.Unlock()
	end := func() {
		c.sess.(*fakeSession).expire()
		ended.Store(true)
	}
	ctx := t.Context()
	end()
	if _, err := v.Lookup(ctx, meta.RootIno, "f"); err != nil {
		t.Errorf("lookup: %v", err)
	}
	end()
	if _, err := v.GetAttr(ctx, ino); err != nil {
		t.Errorf("getattr: %v", err)
	}
	end()
	got := make([]byte, len(want))
	if n, err := v.Read(ctx, ino, got, 0); err != nil || !bytes.Equal(got[:n], want) {
		t.Errorf("DATA: read: %d bytes, %v", n, err)
	}
	if n := met.Load(); n < 3 {
		t.Errorf("%d operations found the session ended: this tests nothing", n)
	}
	end()
	if err := v.Unlink(ctx, &Call{}, meta.RootIno, "f", false); meta.KindOf(err) != meta.SessionExpired {
		t.Errorf("a change that may be done: %v", err)
	}
	w.mu.Lock()
	w.fail = nil
	w.mu.Unlock()
}
