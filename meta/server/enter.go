package server

import (
	"slices"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/namespace"
	"penstock.io/penstock/meta/wire"
)

// How sessions enter a volume at its owner, and leave it.
//
// A session is the same in the whole cluster, but the session's state belongs to volumes:
// leases and locks in the owner's memory; early replies, orphans and open chunks in the
// journal. So a session enters each volume. An owner journals a session before the first
// answer to the session. So the owner's successor knows every session that may have an answer
// or a lease from the owner, and waits for no other session.

// serveEnter answers a session's request to enter the volume, when the session may enter.
func (o *owner) serveEnter(s *session, id uint64, m *wire.Enter) {
	e := &wire.Entered{}
	for {
		o.mu.Lock()
		wait := o.enter(s, m, e)
		if wait == nil {
			s.enqueue(id, e)
			o.mu.Unlock()
			return
		}
		o.mu.Unlock()
		select {
		case <-wait:
		case <-o.ctx.Done():
			e.Status = wire.StatusOf(o.gone())
			s.enqueue(id, e)
			return
		case <-s.ctx.Done():
			return
		}
	}
}

// enter fills in the answer, or returns a channel to wait for before the next try. The caller
// holds mu.
func (o *owner) enter(s *session, m *wire.Enter, e *wire.Entered) <-chan struct{} {
	if o.failed != nil {
		e.Status = wire.StatusOf(o.failed)
		return nil
	}
	if s.ended.Load() {
		return never // the session's connection is being closed
	}
	if o.leaving != nil {
		return o.leaving // or until the volume is gone
	}
	if o.outsideLease() {
		return soon()
	}
	if o.closed != nil {
		return o.closed
	}
	j := o.sessions[s.id]
	_, inside := o.entered[s]
	_, awaited := o.awaited[s.id]
	switch {
	case j != nil && (j.ending || slices.Contains(o.over, s.id)):
		return soon() // the session ends here, and begins again
	case m.Known && (j == nil || !inside && !awaited):
		// The session ended. The client learns so (Known is false) before it begins again.
		return nil
	}
	wait, err := o.journalSession(s)
	if err != nil {
		e.Status = wire.StatusOf(err)
		return nil
	}
	if wait != nil {
		return wait
	}
	if awaited {
		o.awaited[s.id] = true
	}
	if !inside {
		o.entries++
		o.entered[s] = o.entries
	}
	if e.Policy, err = o.enteredPolicy(s); err != nil {
		e.Status = wire.StatusOf(err)
		return nil
	}
	e.Known, e.Claim, e.Metered = true, awaited, o.quota.metered()
	e.Overwrites = o.quota.overwrites
	return nil
}

// back records that a session has sent its claims and replays, and sends the session the
// recalls again that it may not have received.
func (o *owner) back(s *session) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if _, ok := o.entered[s]; !ok || o.failed != nil {
		return
	}
	delete(o.awaited, s.id)
	if len(o.awaited) == 0 {
		select {
		case o.allBack <- struct{}{}:
		default:
		}
	}
	o.leases.sendRecalls(o.leases.Unanswered(s))
	// The session holds files that lost their last name while the session was away, or under
	// an owner that did not notify the session. Without notice, the session would hold them
	// until it ends.
	err := namespace.Orphans(o.view(), s.id, func(ino meta.Ino) bool {
		s.enqueue(0, &wire.Recall{Recall: meta.Recall{Volume: o.vol, Ino: ino}, Orphan: true})
		return true
	})
	if err != nil {
		o.log.Error("a session could not be told which files lost their names", "session", s.name, "error", err)
	}
}
