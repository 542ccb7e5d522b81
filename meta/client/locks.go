package client

import (
	"cmp"
	"slices"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/wire"
)

// Locks that nobody waits for any more.
//
// Who asks for a lock may be killed, or give up at a signal, before there is an
// answer: its owner stands still, or another one is looked for. It has closed its
// files by the time at which the lock is granted, so nobody would ever give it up.
// So a request that was given up is not asked again of another owner; and what one
// grants all the same is given back, but for what is held by earlier requests of the
// same kind and owner:
//
//	given up, not sent                  forgotten
//	given up, then granted              given back, once no other request of that lock
//	                                    owner is under way: it may have been granted the
//	                                    same bytes already
//	given up, then the connection ends  not asked again; given back before what is asked
//	                                    again, if the server is the same: it may have
//	                                    granted it. Another one knows what was claimed

// LockBook is a LockHandler that tells what it has of one lock owner on one inode, in
// order of Start. The session holds its own lock meanwhile.
type LockBook interface {
	Holds(v meta.VolumeID, ino meta.Ino, owner uint64, flock bool) []meta.Lock
}

// taking gives the lock that a request asks for, if it is one that takes a lock.
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

// giveBack gives back what was granted in a volume that is up and nobody wants,
// except where its lock owner asks for something else: then it is called again.
// Caller holds mu, and flushes.
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

// giveBackAll is giveBack on a connection where the volume comes up, before anything
// is asked again there. same: the server knew the session before. Caller holds mu.
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

// unlock gives up what a lock has beyond what its owner holds. Caller holds mu.
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

// beyond lists what makes of l, which was granted, what was held before it: in order,
// without overlap.
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
