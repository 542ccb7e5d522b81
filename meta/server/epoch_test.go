package server

import (
	"errors"
	"testing"
	"time"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/client"
	"penstock.io/penstock/meta/wire"
)

// expiredTimes waits until a client has heard n times that its session ended.
func (p *peer) expiredTimes(t *testing.T, n int) {
	t.Helper()
	for end := time.Now().Add(30 * time.Second); ; time.Sleep(time.Millisecond) {
		p.mu.Lock()
		got := p.expired
		p.mu.Unlock()
		if got == n {
			return
		}
		if got > n || time.Now().After(end) {
			t.Fatalf("the session expired %d times, want %d", got, n)
		}
	}
}

// A batch that was made before the session ended is executed neither by the end of the session
// nor in the next session; a later batch is executed. The same holds for a single operation that
// is bound to its epoch.
func TestBatchOfAnEpochBefore(t *testing.T) {
	t.Parallel()
	t.Run("batch", func(t *testing.T) {
		ofAnEpochBefore(t, func(a *peer, epoch uint64, op meta.Op) error {
			_, errs, err := a.DoBatch(t.Context(), 1, epoch, []client.BatchOp{{Op: op}})
			return errors.Join(append(errs, err)...)
		})
	})
	t.Run("one", func(t *testing.T) {
		ofAnEpochBefore(t, func(a *peer, epoch uint64, op meta.Op) error {
			_, err := a.DoThrough(t.Context(), 1, epoch, meta.OpID{}, op, meta.LeaseShared, nil)
			return err
		})
	})
}

func ofAnEpochBefore(t *testing.T, do func(a *peer, epoch uint64, op meta.Op) error) {
	s := newSiteTTL(t, 10*time.Second)
	a, b := s.dial("a"), s.dial("b")
	ino := a.create(t, "x").Attr.Ino
	chmod := func(epoch uint64, mode uint32) error {
		return do(a, epoch, &meta.SetAttr{Ino: ino, Mask: meta.SetMode, Mode: mode})
	}
	if err := chmod(1, 0o600); err != nil {
		t.Fatal(err)
	}
	s.srv.clients.endSession(s.srv.clients.session(a.ID()), errors.New("test"))
	if err := chmod(1, 0o601); !errors.Is(err, meta.SessionExpired) {
		t.Errorf("a batch from before tells %v", err)
	}
	a.expiredTimes(t, 1)
	if err := chmod(1, 0o602); !errors.Is(err, meta.SessionExpired) {
		t.Errorf("a batch from before tells %v when the session has begun anew", err)
	}
	if got := b.do(t, &meta.GetAttr{Ino: ino}, meta.LeaseNone).Attr.Mode & 0o777; got != 0o600 {
		t.Errorf("mode %o, want 600", got)
	}
	if err := chmod(2, 0o604); err != nil {
		t.Error(err)
	}
	if err := chmod(client.AnyEpoch, 0o606); err != nil {
		t.Error(err)
	}
}

// An operation waits at the owner for another client's lease. Meanwhile the operation's session
// ends in the volume and begins anew, over the same connection: the client was told that the
// operation is lost, and the owner does not execute the operation.
func TestWaitingOperationEndsWithItsSession(t *testing.T) {
	t.Parallel()
	s := newSiteTTL(t, 10*time.Second)
	a, b := s.dial("a"), s.dial("b")
	ino := b.create(t, "x").Attr.Ino
	b.mu.Lock()
	b.hold = true
	b.mu.Unlock()
	single, batch := make(chan error, 1), make(chan error, 1)
	go func() {
		_, err := a.Do(t.Context(), 1, meta.OpID{}, &meta.SetAttr{Ino: ino, Mask: meta.SetMode, Mode: 0o601}, meta.LeaseNone)
		single <- err
	}()
	go func() {
		_, _, err := a.DoBatch(t.Context(), 1, client.AnyEpoch, []client.BatchOp{{Op: &meta.SetAttr{Ino: ino, Mask: meta.SetUID, UID: 7}}})
		batch <- err
	}()
	o, sess := s.srv.hosted.opened(1), s.srv.clients.session(a.ID())
	for end := time.Now().Add(30 * time.Second); ; time.Sleep(time.Millisecond) {
		sess.mu.Lock()
		waiting := len(sess.cancels)
		sess.mu.Unlock()
		if waiting == 2 {
			break
		}
		if time.Now().After(end) {
			t.Fatalf("%d operations wait, want 2", waiting)
		}
	}
	o.endSession(sess.id, sess)
	sess.enqueue(0, &wire.Moved{Volume: 1})
	sess.flush()
	a.expiredTimes(t, 1)
	for _, ch := range []chan error{single, batch} {
		if err := <-ch; !errors.Is(err, meta.SessionExpired) {
			t.Errorf("the waiting operation tells %v", err)
		}
	}
	a.do(t, &meta.GetAttr{Ino: meta.RootIno}, meta.LeaseNone) // the session is inside again
	b.mu.Lock()
	b.hold = false
	held := b.held
	b.held = nil
	b.mu.Unlock()
	for _, done := range held {
		done()
	}
	for end := time.Now().Add(30 * time.Second); ; time.Sleep(time.Millisecond) {
		sess.mu.Lock()
		waiting := len(sess.cancels)
		sess.mu.Unlock()
		if waiting == 0 {
			break
		}
		if time.Now().After(end) {
			t.Fatalf("%d operations still wait", waiting)
		}
	}
	if got := b.do(t, &meta.GetAttr{Ino: ino}, meta.LeaseNone).Attr; got.Mode&0o777 != 0o644 || got.UID == 7 {
		t.Errorf("mode %o, user %d: an operation of the session before was executed", got.Mode&0o777, got.UID)
	}
}
