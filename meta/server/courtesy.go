package server

import (
	"cmp"
	"context"
	"errors"
	"io"
	"slices"
	"syscall"
	"time"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/namespace"
	"penstock.io/penstock/meta/wire"
)

// An overloaded machine is not a dead one. A client that does not renew its lease in time
// may be short of processors, asleep, or cut off for a while; what was written there and is
// not committed would be lost for nobody's sake if its session ended with the lease. So a
// session that is late is kept, as NFS servers keep courteous clients, and comes back as it
// was by renewing. Its leases and locks stand meanwhile, and the client itself answers
// nothing from them (rule 2).
//
// A late session ends as soon as somebody needs what it holds:
//
//   - another session waits for a lease or a lock that it has, or was refused a lock;
//   - a new owner waits for its claims, and others wait for the new owner (recover.go);
//   - there is no room: in a quota, on the chunk servers, or here for so many of them;
//   - its volume is to be rolled back or deleted;
//   - its process is known to be gone, or it was late for longer than it is kept.
//
// What the owner does by itself ends no session: see owner.askInBackground.

const (
	// DefaultCourtesy is for how long a session is kept whose client is not heard of.
	DefaultCourtesy = 24 * time.Hour
	// closedCourtesy is that of a client which closed its last connection, or the kernel did
	// for it: its process may have ended, on a machine of which this server does not know
	// that. A client that lives connects again much sooner, however busy its machine is.
	closedCourtesy = 5 * time.Minute
	// maxLate bounds the late sessions of this server, maxLateLeases the inodes that they
	// stand at, all of them together.
	maxLate       = 1000
	maxLateLeases = 1 << 20
)

// closedByPeer tells of the error that ended a connection whether the other end closed it.
// Else nobody knows whether the other end is there.
func closedByPeer(err error) bool {
	return errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) || errors.Is(err, syscall.ECONNRESET) || errors.Is(err, syscall.EPIPE)
}

// keptFor is for how long the session is kept after its client was heard of.
func (s *session) keptFor() time.Duration {
	asked := time.Duration(s.linger.Load())
	switch {
	case s.role != wire.RoleClient || s.srv.cfg.Unsafe.NoCourtesy:
		return max(asked, s.srv.cfg.SessionTTL)
	case s.closed.Load():
		return max(asked, min(closedCourtesy, s.srv.cfg.Courtesy))
	}
	return max(asked, s.srv.cfg.Courtesy)
}

// isLate tells whether the session's lease ran out.
func (s *session) isLate() bool { return s.idle() > s.srv.cfg.SessionTTL }

// lateClients lists those that use a volume here and have been late for a while, as health
// tells of them.
func (s *Server) lateClients(now time.Time) (l []meta.ClientHealth) {
	s.mu.Lock()
	var late []*session
	for _, sess := range s.sessions {
		if idle := sess.idle(); sess.role == wire.RoleClient && sess.away.Load() && idle > 2*s.cfg.SessionTTL && idle < cutOffTold {
			late = append(late, sess)
		}
	}
	s.mu.Unlock()
	owners := s.owners()
	for _, sess := range late {
		if slices.ContainsFunc(owners, func(o *owner) bool { return o.has(sess) }) {
			l = append(l, meta.ClientHealth{Name: sess.name, Identity: sess.holder(), At: now.Add(-sess.idle()), Kept: true,
				Why: "it is not heard of; its session is kept until somebody needs what it holds"})
		}
	}
	slices.SortFunc(l, func(a, b meta.ClientHealth) int { return b.At.Compare(a.At) })
	return l
}

// deadAmong gives those of some late sessions whose process surely runs no more.
func (s *Server) deadAmong(late []*session) (dead []*session) {
	if s.cfg.Dead == nil {
		return nil
	}
	for _, sess := range late {
		if s.cfg.Dead(sess.host, sess.pid, sess.start) {
			dead = append(dead, sess)
		}
	}
	return dead
}

// tooMany gives those of some late sessions that there is no room for: of all the ones that
// are late for the longest time.
func (s *Server) tooMany(late []*session) []*session {
	leases := map[*session]int{}
	sum := 0
	for _, o := range s.owners() {
		o.mu.Lock()
		for _, sess := range late {
			leases[sess] += o.leases.Count(sess)
			sum += o.leases.Count(sess)
		}
		o.mu.Unlock()
	}
	if len(late) <= maxLate && sum <= maxLateLeases {
		return nil
	}
	late = slices.Clone(late)
	slices.SortFunc(late, func(a, b *session) int { return cmp.Compare(b.idle(), a.idle()) })
	n := 0
	for ; len(late)-n > maxLate || sum > maxLateLeases; n++ {
		sum -= leases[late[n]]
	}
	return late[:n]
}

// lateHoldFiles tells whether late sessions hold files that have no name any more, whose
// room others need; they end for it. Caller holds mu.
func (o *owner) lateHoldFiles() (yes bool) {
	for s := range o.entered {
		if !s.isLate() {
			continue
		}
		some := false
		if err := namespace.Orphans(&view{o: o}, s.id, func(meta.Ino) bool { some = true; return false }); err == nil && some {
			s.wanted.Store(true)
			yes = true
		}
	}
	return yes
}

// noChunkRoom ends late sessions that hold files without a name, as the chunk servers have
// no room: who asked tries again.
func (o *owner) noChunkRoom() {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.lateHoldFiles()
}

// lateEnd has the late sessions of the volume end, for a request that no session may be in
// the way of, and waits until they have, or came back.
func (o *owner) lateEnd(ctx context.Context) error {
	for {
		o.mu.Lock()
		some := false
		for s := range o.entered {
			if s.isLate() {
				s.wanted.Store(true)
				some = true
			}
		}
		o.mu.Unlock()
		if !some {
			return nil
		}
		if err := o.await(ctx, soon()); err != nil {
			return err
		}
	}
}

// ownTime adds up time of which this process had its part: where one turn takes longer than
// it should, the machine is overloaded or stood still, and so may be the clients whose
// answer is waited for.
type ownTime struct {
	every time.Duration
	last  time.Time
	sum   time.Duration
}

// passed books that a turn is over, and gives the sum.
func (t *ownTime) passed(now time.Time) time.Duration {
	t.sum += min(now.Sub(t.last), 2*t.every)
	t.last = now
	return t.sum
}
