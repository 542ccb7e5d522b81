package server

import (
	"context"
	"errors"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/lock"
	"penstock.io/penstock/meta/wire"
)

// locks are a volume's advisory locks and the requests waiting for a lock. The owner's mu
// guards locks.
type locks struct {
	*lock.Table
	waits  map[lock.Ticket]*lockWait
	ticket lock.Ticket // the last ticket given out
}

func newLocks() locks { return locks{Table: lock.New(), waits: map[lock.Ticket]*lockWait{}} }

// wake notifies the waiting requests of granted locks.
func (l *locks) wake(woken []lock.Ticket) {
	for _, t := range woken {
		if w := l.waits[t]; w != nil {
			delete(l.waits, t)
			close(w.decided)
		}
	}
}

// drop releases the locks of a session that ended, and refuses its waiting requests.
func (l *locks) drop(id meta.SessionID) {
	woken, canceled := l.DropSession(id)
	for _, t := range canceled {
		if w := l.waits[t]; w != nil {
			w.expired = true
		}
	}
	l.wake(canceled)
	l.wake(woken)
}

// lockWait is a session's request waiting for a lock.
type lockWait struct {
	decided chan struct{} // closed: the lock is granted, or expired
	session meta.SessionID
	expired bool // the session ended in the volume
}

// serveLock sets, tests or drops locks.
func (o *owner) serveLock(s *session, id uint64, m *wire.Lock) {
	o.mu.Lock()
	entry := o.entered[s]
	o.mu.Unlock()
	select {
	case <-o.recovered:
		if !o.outsideLease() && !s.waits(s.late, o.vol) {
			o.lockNow(s, id, m, entry)
			return
		}
	default:
	}
	// No lock is granted before the previous owner's sessions had time to claim their locks,
	// nor while another server may own the volume (rule 2). A session's requests keep their
	// order: a client may give a lock back and then ask for the same lock.
	s.inQueue(s.late, o.vol, func() {
		err := o.await(s.ctx, o.recovered)
		for err == nil && o.outsideLease() {
			err = o.await(s.ctx, soon())
		}
		if err != nil {
			s.enqueue(id, &wire.LockRe{Status: wire.StatusOf(err)})
		} else {
			o.lockNow(s, id, m, entry)
		}
		s.flush()
	})
}

// lockNow serves a request that a session sent after its entry into the volume. If that entry
// is over, the locks of the session were dropped, and nobody would drop a lock set now.
func (o *owner) lockNow(s *session, id uint64, m *wire.Lock, entry uint64) {
	l := m.Lock
	l.Session = s.id
	re := &wire.LockRe{}
	o.mu.Lock()
	defer o.mu.Unlock()
	switch {
	case o.failed != nil:
		re.Status = wire.StatusOf(o.failed)
	case o.leaving != nil:
		re.Status = wire.StatusOf(o.srv.hosted.elsewhere(o.vol))
	case s.ctx.Err() != nil, entry == 0, o.entered[s] != entry:
		re.Status = wire.StatusOf(meta.E("lock", meta.SessionExpired, s.name, nil))
	case m.Test:
		if c, ok := o.locks.Get(l); ok {
			re.Conflict = c
		}
	case m.DropOwner:
		o.locks.wake(o.locks.DropOwner(l.Ino, s.id, l.Owner, l.Flock))
	default:
		var t lock.Ticket
		if m.Wait {
			o.locks.ticket++
			t = o.locks.ticket
		}
		a, err := o.locks.Set(l, t)
		o.locks.wake(a.Woken)
		re.Status = wire.StatusOf(err)
		if err != nil {
			re.Conflict = a.Conflict
			o.refusedFor(a.Conflict.Session)
		} else if !a.Granted {
			w := &lockWait{decided: make(chan struct{}), session: s.id}
			o.locks.waits[t] = w
			o.waitForLock(s, id, t, w)
			return
		}
	}
	s.enqueue(id, re)
}

// refusedFor notes that a session's lock made a request fail. If the session only lingers, the
// session is ended. Caller holds mu.
func (o *owner) refusedFor(id meta.SessionID) {
	for s := range o.entered {
		if s.id == id && s.idle() > o.srv.cfg.SessionTTL {
			s.wanted.Store(true)
		}
	}
}

// waitForLock answers when the lock is granted or the caller waits no more.
func (o *owner) waitForLock(s *session, id uint64, t lock.Ticket, w *lockWait) {
	ctx, stop := s.waiting(id)
	s.wg.Go(func() {
		defer stop()
		var err error
		select {
		case <-w.decided:
		case <-ctx.Done():
			err = meta.E("lock", meta.Interrupted, "", context.Cause(ctx))
		case <-o.ctx.Done():
			err = o.gone()
		}
		o.mu.Lock()
		if w.expired {
			err = meta.E("lock", meta.SessionExpired, s.name, nil)
		} else if err != nil && o.locks.waits[t] == w {
			delete(o.locks.waits, t)
			if !o.locks.Cancel(t) {
				err = nil // granted in the last moment
			}
		} else if errors.Is(err, meta.Interrupted) {
			err = nil
		}
		s.enqueue(id, &wire.LockRe{Status: wire.StatusOf(err)})
		o.mu.Unlock()
		s.flush()
	})
}
