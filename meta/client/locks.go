package client

import (
	"cmp"
	"slices"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/wire"
)

// Locks with no waiting caller.
//
// A caller waiting for a lock may be killed or interrupted by a signal before the answer: the
// owner may stand still, or the session may be looking for a new owner. The caller has closed
// its files by the time the lock is granted, so no caller would ever release the lock. So the
// session does not repeat an abandoned request at another owner. If an owner grants the lock
// nevertheless, the session gives the lock back, except for ranges held by earlier requests of
// the same kind and lock owner:
//
//	given up, not sent                  forgotten
//	given up, then granted              given back, once no other request of that lock
//	                                    owner is in progress: such a request may have
//	                                    been granted the same bytes already
//	given up, then the connection ends  not repeated. If the session reaches the same
//	                                    server again, the lock is given back before
//	                                    other requests are repeated: the server may have
//	                                    granted the lock. Another server knows only the
//	                                    claimed locks

// LockBook is a LockHandler that returns its locks of one lock owner on one inode, in order of
// Start. The session holds its own mutex during the call.
type LockBook interface {
	Holds(v meta.VolumeID, ino meta.Ino, owner uint64, flock bool) []meta.Lock
}

// taking returns the lock that a request asks for, if the request takes a lock.
func taking(m wire.Message) (*meta.Lock, bool) {
	l, ok := m.(*wire.Lock)
	if !ok || l.Test || l.DropOwner || l.Lock.Type == meta.LockUnlock {
		return nil, false
	}
	return &l.Lock, true
}

func sameOwner(a, b *meta.Lock) bool {
	return a.Ino == b.Ino && a.Owner == b.Owner && a.Flock == b.Flock
}

// giveBack releases a volume's unwanted locks. An unwanted lock stays while its lock owner has
// another lock request pending: the answer to that request calls giveBack again. The volume is
// up. The caller holds mu and flushes.
func (s *Session) giveBack(v meta.VolumeID) {
	vs := s.volume(v)
	vs.unwanted = slices.DeleteFunc(vs.unwanted, func(l meta.Lock) bool {
		for _, r := range s.pending {
			if m, ok := r.msg.(*wire.Lock); ok && !r.over && r.ofVolume && r.volume == v && sameOwner(&m.Lock, &l) {
				return false
			}
		}
		s.unlock(v, vs.conn, l)
		return true
	})
}

// giveBackAll is giveBack on a connection where the volume comes up, before the session
// repeats other requests on the connection. same: the server knew the session before. The
// caller holds mu.
func (s *Session) giveBackAll(v meta.VolumeID, c *conn, same bool) {
	vs := s.volume(v)
	for id, r := range s.pending {
		if r.over && r.volume == v {
			l, _ := taking(r.msg)
			vs.unwanted = append(vs.unwanted, *l)
			delete(s.pending, id)
		}
	}
	if same {
		for _, l := range vs.unwanted {
			s.unlock(v, c, l)
		}
	}
	vs.unwanted = nil
}

// unlock releases the part of l that its lock owner does not hold by earlier requests. The
// caller holds mu.
func (s *Session) unlock(v meta.VolumeID, c *conn, l meta.Lock) {
	var held []meta.Lock
	if h, ok := s.cfg.Handler.(LockBook); ok {
		held = h.Holds(v, l.Ino, l.Owner, l.Flock)
	}
	for _, p := range beyond(l, held) {
		r := &request{msg: &wire.Lock{Volume: v, Lock: p}, volume: v, ofVolume: true, conn: c, sent: true, done: make(chan response, 1)}
		s.book(r)
		s.put(r)
	}
}

// beyond lists the changes that restore the locks held before l was granted: in order, without
// overlap.
func beyond(l meta.Lock, held []meta.Lock) (back []meta.Lock) {
	add := func(t meta.LockType, from, to uint64) {
		p := l
		p.Type, p.Start, p.End = t, from, to
		back = append(back, p)
	}
	if l.Flock {
		l.Start, l.End = 0, 1<<63-1
	}
	held = slices.SortedFunc(slices.Values(held), func(a, b meta.Lock) int { return cmp.Compare(a.Start, b.Start) })
	next := l.Start
	for _, h := range held {
		if h.End < next || h.Start > l.End {
			continue
		}
		if h.Start > next {
			add(meta.LockUnlock, next, h.Start-1)
		}
		if h.Type < l.Type {
			add(h.Type, max(next, h.Start), min(h.End, l.End))
		}
		next = h.End + 1 // at most 1<<63
	}
	if next <= l.End {
		add(meta.LockUnlock, next, l.End)
	}
	return back
}
