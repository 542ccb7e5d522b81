package server

import (
	"errors"
	"io"
	"syscall"
	"testing"
	"time"

	"penstock.io/penstock/meta"
)

// late is a client that uses a volume and has fallen silent: its connection stands, and no
// messages come. A machine that is short of processors, asleep, or cut off looks the same.
func (s *site) late(name string, use func(p *peer)) (*peer, *session) {
	s.t.Helper()
	p := s.dial(name)
	use(p)
	if err := p.Sync(s.t.Context(), 1); err != nil {
		s.t.Fatal(err)
	}
	return p, s.srv.clients.session(p.ID())
}

// standsStill keeps a session late for some looks of the server, and tells whether the session
// stands.
func (s *site) standsStill(sess *session) bool {
	for begun := time.Now(); time.Since(begun) < s.ttl/2; time.Sleep(5 * time.Millisecond) {
		sess.renewed.Store(int64(time.Since(s.srv.epoch) - 100*s.ttl))
		select {
		case <-sess.gone:
			return false
		default:
		}
	}
	return true
}

// A late session stands as long as no other session needs the late session's leases, and then
// comes back by renewing, with everything: leases, locks, files without a name. The session ends
// when another session needs a lease.
func TestLateSessionIsKept(t *testing.T) {
	t.Parallel()
	lock := func(ino meta.Ino) meta.Lock {
		return meta.Lock{Ino: ino, Owner: 1, Type: meta.LockWrite, End: 1<<63 - 1}
	}
	for _, c := range []struct {
		name string
		need func(t *testing.T, s *site, other *peer, ino meta.Ino) // nil: nobody needs anything
	}{
		{"nobody needs anything", nil},
		{"a lease", func(t *testing.T, _ *site, other *peer, ino meta.Ino) {
			if err := other.try(t, &meta.Open{Ino: ino}); err != nil {
				t.Error(err)
			}
		}},
		{"a name", func(t *testing.T, _ *site, other *peer, ino meta.Ino) { other.create(t, "beside") }},
		{"a lock, waiting", func(t *testing.T, _ *site, other *peer, ino meta.Ino) {
			if err := other.SetLock(t.Context(), 1, lock(ino), true); err != nil {
				t.Error(err)
			}
		}},
		{"a lock, asking", func(t *testing.T, s *site, other *peer, ino meta.Ino) {
			eventually(t, "the lock is free", func() error { return other.SetLock(t.Context(), 1, lock(ino), false) })
		}},
		{"room", func(t *testing.T, s *site, other *peer, ino meta.Ino) {
			// Only the late session still has a file without a name.
			if err := other.try(t, &meta.Create{Parent: meta.RootIno, Name: "fits", Mode: 0o100644}); err != nil {
				t.Error(err)
			}
		}},
		{"the volume as it was", func(t *testing.T, s *site, other *peer, ino meta.Ino) {
			ctx := t.Context()
			if err := s.srv.hosted.opened(1).late.awaitEnd(ctx); err != nil {
				t.Error(err)
			}
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			s := newSiteTTL(t, 2*time.Second)
			other := s.dial("other")
			var ino, gone meta.Ino
			p, sess := s.late("late", func(p *peer) {
				ino = p.create(t, "x").Attr.Ino
				p.do(t, &meta.GetAttr{Ino: meta.RootIno}, meta.LeaseShared)
				if err := p.SetLock(t.Context(), 1, lock(ino), false); err != nil {
					t.Fatal(err)
				}
				gone = p.create(t, "gone").Attr.Ino
				p.do(t, &meta.Unlink{Parent: meta.RootIno, Name: "gone"}, meta.LeaseShared)
			})
			if c.name == "room" {
				o := s.srv.hosted.opened(1)
				policy, err := o.policy()
				if err != nil {
					t.Fatal(err)
				}
				policy.QuotaInodes = 3 // the root, x, and the removed file
				if err := o.leases.durably(t.Context(), &meta.SetPolicy{Policy: policy}); err != nil {
					t.Fatal(err)
				}
			}
			if c.need == nil {
				if !s.standsStill(sess) {
					t.Fatal("DATA: its session ended, and nobody needed what it held")
				}
				sess.touch() // the server hears from the session again
				p.do(t, &meta.GetAttr{Ino: gone}, meta.LeaseNone)
				if err := other.SetLock(t.Context(), 1, lock(ino), false); !errors.Is(err, meta.WouldBlock) {
					t.Errorf("another one gets its lock: %v", err)
				}
				p.mu.Lock()
				defer p.mu.Unlock()
				if p.expired > 0 || p.leases[meta.RootIno] == meta.LeaseNone {
					t.Errorf("it expired %d times, and has %v of the directory", p.expired, p.leases[meta.RootIno])
				}
				return
			}
			done := make(chan struct{})
			defer func() { <-done }()
			p.mu.Lock()
			p.hold = true // the session answers no recall
			p.mu.Unlock()
			go func() {
				defer close(done)
				c.need(t, s, other, ino)
			}()
			eventually(t, "it ends, as somebody needs what it holds", func() error {
				if s.standsStill(sess) {
					return errors.New("it stands")
				}
				return nil
			})
		})
	}
}

// The server tells by a connection's end whether the client closed the connection.
func TestClosedByPeer(t *testing.T) {
	for err, want := range map[error]bool{io.EOF: true, syscall.ECONNRESET: true, syscall.ETIMEDOUT: false, errReplaced: false, nil: false} {
		if got := closedByPeer(err); got != want {
			t.Errorf("%v: %v", err, got)
		}
	}
}

// The server keeps a limited number of late sessions and ends the session that is late for the
// longest time first; a session whose process is gone ends at once.
func TestTooManyLateSessions(t *testing.T) {
	t.Parallel()
	s := newSiteTTL(t, time.Hour)
	s.srv.cfg.Dead = func(_ string, pid uint32, _ uint64) bool { return pid == 7 }
	var late []*session
	for i := range maxLate + 2 {
		x := &session{srv: s.srv, pid: uint32(i)}
		x.renewed.Store(-int64(time.Hour) * int64(1+i%(maxLate+1)))
		late = append(late, x)
	}
	over := s.srv.clients.tooMany(late)
	if len(over) != 2 || over[0] != late[maxLate] || over[1] != late[maxLate-1] {
		t.Errorf("%d are too many", len(over))
	}
	if over := s.srv.clients.tooMany(late[:maxLate]); over != nil {
		t.Errorf("%d are too many of %d", len(over), maxLate)
	}
	if dead := s.srv.clients.deadAmong(late); len(dead) != 1 || dead[0] != late[7] {
		t.Errorf("%d are dead", len(dead))
	}
}
