package server

import (
	"context"
	"errors"
	"io"
	"syscall"
	"time"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/namespace"
	"penstock.io/penstock/meta/wire"
)

// A client that does not renew its lease in time is not necessarily dead: its machine may be
// overloaded, asleep, or cut off for a while. If its session ended with the lease, the
// client's uncommitted writes would be lost, although nobody needs the session's leases. So
// the server keeps a late session, as NFS servers keep courteous clients, and the session
// continues unchanged when the client renews. Meanwhile its leases and locks stay granted, and
// the client itself answers nothing from them (rule 2).
//
// A late session ends as soon as its leases, locks or files are needed:
//
//   - another session waits for a lease or a lock of the late session, or was refused a lock;
//   - a new owner waits for its claims, and others wait for the new owner (recover.go);
//   - there is no room: in a quota, on the chunk servers, or here for so many late sessions;
//   - its volume is to be rolled back or deleted;
//   - its process is known to be gone, or it was late for longer than it is kept.
//
// The owner's background work ends no session: see leases.askInBackground.

const (
	// DefaultCourtesy is how long the server keeps the session of a silent client.
	DefaultCourtesy = 24 * time.Hour
	// closedCourtesy is how long the server keeps the session of a client whose last
	// connection was closed, by the client or by its kernel. The client's process may have
	// ended without this server's knowledge. A living client connects again much sooner,
	// however busy its machine is.
	closedCourtesy = 5 * time.Minute
	// maxLate bounds the late sessions of this server. maxLateLeases bounds the inodes that
	// all of them together have leases on.
	maxLate       = 1000
	maxLateLeases = 1 << 20
)

// closedByPeer reports whether the error that ended a connection shows that the other end
// closed the connection. Otherwise the other end may be alive or not.
func closedByPeer(err error) bool {
	return errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) || errors.Is(err, syscall.ECONNRESET) || errors.Is(err, syscall.EPIPE)
}

// keptFor returns how long the session is kept after the client's last message.
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

// isLate reports whether the session's lease has expired.
func (s *session) isLate() bool { return s.idle() > s.srv.cfg.SessionTTL }

// lateSessions ends late sessions of a volume that are in the way.
type lateSessions struct{ k *kernel }

// holdFiles reports whether late sessions hold files without a name, and marks those
// sessions to end, since other sessions need the files' room. The caller holds mu.
func (l *lateSessions) holdFiles() (yes bool) {
	for s := range l.k.entered {
		if !s.isLate() {
			continue
		}
		some := false
		if err := namespace.Orphans(l.k.view(), s.id, func(meta.Ino) bool { some = true; return false }); err == nil && some {
			s.wanted.Store(true)
			yes = true
		}
	}
	return yes
}

// noChunkRoom marks late sessions that hold files without a name to end, when the chunk
// servers have no room. The requester tries again.
func (l *lateSessions) noChunkRoom() {
	l.k.mu.Lock()
	defer l.k.mu.Unlock()
	l.holdFiles()
}

// awaitEnd marks the late sessions of the volume to end, for a request that no session may
// delay, and waits until each has ended or came back.
func (l *lateSessions) awaitEnd(ctx context.Context) error {
	for {
		l.k.mu.Lock()
		some := false
		for s := range l.k.entered {
			if s.isLate() {
				s.wanted.Store(true)
				some = true
			}
		}
		l.k.mu.Unlock()
		if !some {
			return nil
		}
		if err := l.k.await(ctx, soon()); err != nil {
			return err
		}
	}
}

// ownTime adds up the time during which this process ran, in turns due after every. If a turn
// takes longer than twice that, this machine is overloaded or stood still, and so may be the
// clients whose answers are awaited; the excess is not counted.
type ownTime struct {
	every time.Duration
	last  time.Time
	sum   time.Duration
}

// passed adds the turn that ends now, and returns the sum.
func (t *ownTime) passed(now time.Time) time.Duration {
	t.sum += min(now.Sub(t.last), 2*t.every)
	t.last = now
	return t.sum
}
