package server

import (
	"context"
	"errors"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"penstock.io/penstock/meta"
	peering "penstock.io/penstock/meta/peer"
	"penstock.io/penstock/meta/wire"
)

// session is a client's standing with this server. A session outlives a broken connection
// until its lease runs out.
type session struct {
	srv   *Server
	id    meta.SessionID
	who   peering.Identity // of the client that opened the session
	pace  *pace            // of its identity; nil: no limit
	role  wire.Role
	name  string
	host  string
	pid   uint32
	start uint64
	// streams: the client serves streams, and may change their files.
	streams bool

	accMu sync.Mutex // of acc; no other lock is taken under accMu
	acc   map[meta.VolumeID]accessAt
	// look is the time from which the next refused operation reads the view again.
	look time.Time

	// came: the session has had a connection. again: the session has a later connection. A
	// drop lost with an earlier connection leaves leases here unknown to the client. So after
	// a reconnection the owner answers each request for a lease with the lease, even if the
	// lease is not new.
	came, again atomic.Bool

	// renewed is when the last keep-alive came, nanoseconds of the server's
	// monotonic clock.
	renewed atomic.Int64
	// away: the client was silent for longer than a lease, and the session is kept
	// (courtesy.go). Only expireLoop sets away, because only expireLoop knows how long this
	// process stood still. returned is when the client renewed again, on the same clock.
	away     atomic.Bool
	returned atomic.Int64
	// followed is when a later session of the same place began, on the same clock.
	followed atomic.Int64
	ended    atomic.Bool
	// linger is how long after the last keep-alive another process may resume the session, in
	// nanoseconds. wanted: since then another caller was refused because of a lock, room or a
	// file held by the session.
	linger  atomic.Int64
	wanted  atomic.Bool
	closed  atomic.Bool   // the client closed the last connection
	gone    chan struct{} // closed when the session has ended in all volumes here
	reading sync.Mutex    // held while a frame is handled; locked before mu
	calls   int           // of the batch being handled; guarded by reading

	mu      sync.Mutex
	conn    net.Conn
	send    *wire.Sender // nil between connections
	cancels map[uint64]context.CancelCauseFunc
	// ordered are the waiting replays of each volume.
	ordered queues
	// late are the lock requests of each volume that can't be served yet.
	late queues

	ctx    context.Context // ends with the session, not with a connection
	cancel context.CancelCauseFunc
	wg     sync.WaitGroup
}

// holder returns the identity that the session's capabilities are bound to; empty if the
// session has no certificate.
func (s *session) holder() string {
	if s.who.Role == "" {
		return ""
	}
	return s.who.String()
}

// byeWait bounds how long a good-bye waits for the journal.
const byeWait = time.Second

var (
	errCanceled = errors.New("the caller waits no more")
	errLeft     = errors.New("the client left")
	errReplaced = errors.New("its connection is gone")
)

// inOrder runs the work of one volume in order of arrival, on another goroutine. The work may
// wait; the reading goroutine must not, because another answer to a recall may be next on the
// connection.
func (s *session) inOrder(v meta.VolumeID, work func()) { s.inQueue(s.ordered, v, work) }

// queues hold the work waiting per volume, oldest first; the first entry is running.
type queues map[meta.VolumeID][]func()

func (s *session) inQueue(l queues, v meta.VolumeID, work func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	l[v] = append(l[v], work)
	if len(l[v]) > 1 {
		return // a goroutine works on the queue already
	}
	s.wg.Go(func() {
		for {
			s.mu.Lock()
			next := l[v][0]
			s.mu.Unlock()
			next()
			s.mu.Lock()
			l[v][0] = nil
			if l[v] = l[v][1:]; len(l[v]) == 0 {
				delete(l, v)
				s.mu.Unlock()
				return
			}
			s.mu.Unlock()
		}
	})
}

// waits reports whether the queue holds work of a volume.
func (s *session) waits(l queues, v meta.VolumeID) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(l[v]) > 0
}

// enqueue adds a frame to the session's outgoing queue. Without a connection enqueue drops the
// frame and returns true: the client asks again after its reconnection, and the owner repeats
// recalls then.
//
// enqueue returns false if the client's older protocol lacks the message, or if an unrequested
// message does not fit into a frame.
func (s *session) enqueue(id uint64, m wire.Message) bool {
	s.mu.Lock()
	snd := s.send
	s.mu.Unlock()
	if snd != nil {
		err := snd.Enqueue(id, m)
		if errors.Is(err, meta.ResourceExceeded) {
			// A second request would get as long an answer, so the client gets an error.
			s.srv.log.Error("a message to a client does not fit into a frame", "session", s.name, "error", err)
			if id != 0 {
				err = snd.Enqueue(id, &wire.Reply{Status: wire.StatusOf(err)})
			}
		}
		if err != nil {
			return false
		}
		switch m.(type) {
		case *wire.Recall, *wire.Growth:
			// The caller holds a lock and flushes only its own session.
			snd.FlushSoon()
		}
	}
	return true
}

func (s *session) flush() {
	s.mu.Lock()
	snd := s.send
	s.mu.Unlock()
	if snd != nil {
		snd.Flush()
	}
}

// waiting registers a waiting request, so that a Cancel frame finds the request.
func (s *session) waiting(id uint64) (context.Context, func()) {
	ctx, cancel := context.WithCancelCause(s.ctx)
	s.mu.Lock()
	s.cancels[id] = cancel
	s.mu.Unlock()
	return ctx, func() {
		s.mu.Lock()
		delete(s.cancels, id)
		s.mu.Unlock()
		cancel(nil)
	}
}

// attach answers the hello on a new connection and makes the connection the session's. attach
// closes an older connection and cancels its waiting requests; unread frames of the older
// connection are ignored, because they would run after the client's newer frames.
func (s *session) attach(conn net.Conn, v uint8, hello *wire.Hello) *wire.Sender {
	if _, err := conn.Write(wire.Append(nil, v, 0, hello)); err != nil {
		return nil
	}
	snd := wire.NewSender(conn, v, nil)
	s.reading.Lock()
	defer s.reading.Unlock()
	s.mu.Lock()
	if s.conn != nil {
		s.conn.Close()
	}
	s.cancelLocked()
	s.conn, s.send = conn, snd
	s.mu.Unlock()
	if s.came.Swap(true) {
		s.again.Store(true)
	}
	s.touch()
	s.closed.Store(false)
	s.wanted.Store(false)
	if s.ended.Load() {
		conn.Close() // ended meanwhile; the client connects again
	}
	return snd
}

// cancelLocked cancels the requests of a closed connection. A living client asks again. A
// killed client does not, and its request must not run after other clients have observed that
// the request did not run. The caller holds mu.
func (s *session) cancelLocked() {
	for _, cancel := range s.cancels {
		cancel(errReplaced)
	}
}

func (s *session) detach(conn net.Conn, cause error) {
	s.mu.Lock()
	if s.conn == conn {
		s.closed.Store(closedByPeer(cause))
		s.conn, s.send = nil, nil
		s.cancelLocked()
	}
	s.mu.Unlock()
	conn.Close()
}

func (s *session) touch() {
	s.renewed.Store(int64(time.Since(s.srv.epoch)))
	s.heard()
}

// heard marks the session as present again, if the session was away.
func (s *session) heard() {
	if s.wanted.Load() {
		s.wanted.Store(false) // from now on the owner can recall
	}
	if s.away.Swap(false) {
		s.returned.Store(int64(time.Since(s.srv.epoch)))
	}
}

// lapse marks the session as away, and returns false if the client renewed meanwhile.
func (s *session) lapse() bool {
	s.away.Store(true)
	if s.idle() > s.srv.cfg.SessionTTL {
		return true
	}
	s.heard() // touch may have run before away was set
	return false
}

func (s *session) idle() time.Duration {
	return time.Since(s.srv.epoch) - time.Duration(s.renewed.Load())
}

// read serves one connection until the connection breaks or the client leaves.
func (s *session) read(conn net.Conn, rd *wire.Reader) error {
	defer s.flush()
	for {
		if rd.Buffered() == 0 {
			s.flush()
		}
		t, id, body, err := rd.Next()
		if err != nil {
			return err
		}
		s.reading.Lock()
		s.mu.Lock()
		ours := s.conn == conn
		s.mu.Unlock()
		if !ours {
			s.reading.Unlock()
			return errReplaced
		}
		s.calls = 0
		done, err := s.handle(t, id, body)
		n := costOf(t, s.calls)
		s.reading.Unlock()
		if done || err != nil {
			return err
		}
		s.hold(s.ctx, n)
	}
}
