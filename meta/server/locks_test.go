package server

import (
	"errors"
	"testing"
	"time"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/wire"
)

// A session's part in a volume ends while a request of the session waits for a lock: the
// request is refused, though the session goes on elsewhere.
func TestWaitEndsWithSession(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	a, b := s.dial("a"), s.dial("b")
	ino := a.create(t, "x").Attr.Ino
	l := meta.Lock{Ino: ino, Owner: 1, Type: meta.LockWrite, End: 1<<63 - 1}
	if err := a.SetLock(t.Context(), 1, l, false); err != nil {
		t.Fatal(err)
	}
	answer := make(chan error, 1)
	go func() { answer <- b.SetLock(t.Context(), 1, l, true) }()
	o := s.srv.hosted.opened(1)
	eventually(t, "b waits", func() error {
		o.mu.Lock()
		defer o.mu.Unlock()
		return unless(len(o.locks.waits) == 1)
	})
	o.mu.Lock()
	o.locks.drop(b.ID())
	o.mu.Unlock()
	select {
	case err := <-answer:
		if !errors.Is(err, meta.SessionExpired) {
			t.Errorf("the wait ends with %v", err)
		}
	case <-time.After(30 * time.Second):
		t.Error("the wait goes on, though nothing can grant the lock any more")
	}
}

// A request for a lock is served late, when the session's entry into the volume is over. The
// request sets no lock: the session's locks were dropped before, and nothing would drop the late
// lock.
func TestNoLockWithoutEntry(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	a := s.dial("a")
	ino := a.create(t, "x").Attr.Ino
	o, sess := s.srv.hosted.opened(1), s.srv.clients.session(a.ID())
	m := &wire.Lock{Volume: 1, Lock: meta.Lock{Ino: ino, Owner: 1, Type: meta.LockWrite, End: 1<<63 - 1}}
	held := func() int {
		o.mu.Lock()
		defer o.mu.Unlock()
		return len(o.locks.All())
	}
	o.mu.Lock()
	entry := o.entered[sess]
	delete(o.entered, sess)
	o.mu.Unlock()
	o.lockNow(sess, 1<<40, m, entry)
	if held() != 0 {
		t.Error("DATA: a session that is not in the volume has a lock there")
	}
	o.mu.Lock()
	o.entered[sess] = entry + 1 // the session entered again
	o.mu.Unlock()
	o.lockNow(sess, 1<<40, m, entry)
	if held() != 0 {
		t.Error("DATA: a request from before the session's end set a lock")
	}
	o.lockNow(sess, 1<<40, m, entry+1)
	if held() != 1 {
		t.Error("a session in the volume gets no lock")
	}
	o.mu.Lock()
	o.entered[sess] = entry
	o.mu.Unlock()
}
