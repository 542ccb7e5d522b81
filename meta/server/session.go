package server

import (
	"context"
	"errors"
	"fmt"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"penstock.io/penstock/meta"
	peering "penstock.io/penstock/meta/peer"
	"penstock.io/penstock/meta/wire"
)

// session is a client's standing with this server. It outlives a broken
// connection until its lease runs out.
type session struct {
	srv   *Server
	id    meta.SessionID
	who   peering.Identity // that opened it
	pace  *pace            // of its identity; nil: it is not held up
	role  wire.Role
	name  string
	host  string
	pid   uint32
	start uint64

	accMu sync.Mutex // of acc; nothing is taken under it
	acc   map[meta.VolumeID]accessAt
	// look is when the next operation that is refused has the view read anew.
	look time.Time

	// came: it has had a connection; again: it has another by now. A drop that was
	// lost with the one before leaves it with leases here that it does not know of,
	// so that it is told of each that it asks for, news or not.
	came, again atomic.Bool

	// renewed is when the last keep-alive came, nanoseconds of the server's
	// monotonic clock.
	renewed atomic.Int64
	// away: it was not heard of for longer than a lease, and is kept (courtesy.go). Only
	// expireLoop finds that, which knows for how long this process stood still. returned is
	// when it was heard of again, on the same clock.
	away     atomic.Bool
	returned atomic.Int64
	// followed is when another session of its place began, on the same clock.
	followed atomic.Int64
	ended    atomic.Bool
	// linger is how long after the last keep-alive another process may go on with
	// the session, nanoseconds; wanted: meanwhile somebody was refused what it holds.
	linger  atomic.Int64
	wanted  atomic.Bool
	closed  atomic.Bool   // by its client, the last connection was
	gone    chan struct{} // closed when it ended everywhere here
	reading sync.Mutex    // held while a frame is handled, before mu
	calls   int           // in the batch that is handled; under reading

	mu      sync.Mutex
	conn    net.Conn
	send    *wire.Sender // nil between connections
	cancels map[uint64]context.CancelCauseFunc
	// ordered are the replays of each volume.
	ordered queues
	// late are requests for locks that can't be served yet, likewise.
	late queues

	ctx    context.Context // ends with the session, not with a connection
	cancel context.CancelCauseFunc
	wg     sync.WaitGroup
}

// holder is whom capabilities of the session are bound to: nobody, if the
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

// inOrder runs work of one volume that must keep the order in which it came but
// may wait, which the reading goroutine must not: another session's answer to a
// recall may be behind it.
func (s *session) inOrder(v meta.VolumeID, work func()) { s.inQueue(s.ordered, v, work) }

// queues are what waits of each volume, oldest first; the first is being done.
type queues map[meta.VolumeID][]func()

func (s *session) inQueue(l queues, v meta.VolumeID, work func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	l[v] = append(l[v], work)
	if len(l[v]) > 1 {
		return // somebody is at it
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

// waits tells whether something of a volume is in a queue.
func (s *session) waits(l queues, v meta.VolumeID) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(l[v]) > 0
}

// enqueue adds a frame to what the session will be sent. Without a connection
// it is dropped: the client asks again when it is back, and recalls are
// repeated then.
//
// false: the client speaks an older protocol and has no words for it, or nobody
// asked for it and it does not fit into a frame.
func (s *session) enqueue(id uint64, m wire.Message) bool {
	s.mu.Lock()
	snd := s.send
	s.mu.Unlock()
	if snd != nil {
		err := snd.Enqueue(id, m)
		if errors.Is(err, meta.ResourceExceeded) {
			// Asked again, it would be as long: the client is told that.
			s.srv.log.Error("what a client is to be told does not fit into a frame", "session", s.name, "error", err)
			if id != 0 {
				err = snd.Enqueue(id, &wire.Reply{Status: wire.StatusOf(err)})
			}
		}
		if err != nil {
			return false
		}
		if _, ok := m.(*wire.Recall); ok {
			// Whoever asks holds a lock and flushes its own session only.
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

// waiting books a request that waits, so that Cancel finds it.
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

// attach answers the hello on a new connection and gives it to the session; an
// older one is closed, and nothing that is still in it is looked at, or waits: it
// would come after what the client says now.
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
		conn.Close() // while we were at it: the client comes again
	}
	return snd
}

// cancelLocked ends what waits of a connection that is gone: a client that lives
// asks again. One that was killed does not, and what it had asked must not be done
// after others have seen that it was not.
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

// heard ends that the session was away, if it was.
func (s *session) heard() {
	if s.wanted.Load() {
		s.wanted.Store(false) // whoever waits for it asks it from now on
	}
	if s.away.Swap(false) {
		s.returned.Store(int64(time.Since(s.srv.epoch)))
	}
}

// lapse notes that the session is away. false: it was heard of meanwhile.
func (s *session) lapse() bool {
	s.away.Store(true)
	if s.idle() > s.srv.cfg.SessionTTL {
		return true
	}
	s.heard() // touch may have looked before there was something to end
	return false
}

func (s *session) idle() time.Duration {
	return time.Since(s.srv.epoch) - time.Duration(s.renewed.Load())
}

// read serves one connection until it breaks or the client says good-bye.
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

func (s *session) refuse(id uint64, err error) {
	s.enqueue(id, &wire.Reply{Status: wire.StatusOf(err)})
}

// withOwner runs fn with the owner of a volume that the session entered here. A
// client that did not is told to look for the owner: a volume came and went, or
// it knows an old owner.
func (s *session) withOwner(id uint64, v meta.VolumeID, fn func(*owner)) {
	if o := s.srv.opened(v); o != nil && o.has(s) {
		fn(o)
		return
	}
	s.refuse(id, s.srv.elsewhere(v))
}

// handle serves one frame, or refuses it.
func (s *session) handle(t wire.Type, id uint64, body wire.Body) (done bool, err error) {
	if err := maySend(s.who, t); err != nil {
		return false, err
	}
	done, err = s.serve(t, id, body)
	var no *refusal
	if errors.As(err, &no) {
		s.srv.stats.refused.Add(1)
		if no.answer != nil {
			s.enqueue(id, no.answer)
		}
		return false, nil
	}
	return done, err
}

func (s *session) serve(t wire.Type, id uint64, body wire.Body) (done bool, err error) {
	switch t {
	case wire.TCall:
		c := new(wire.Call)
		if err := s.take(body, c); err != nil {
			return false, err
		}
		s.srv.stats.calls.Add(1)
		if c.Replay {
			s.inOrder(c.Volume, func() {
				s.withOwner(id, c.Volume, func(o *owner) { o.serve(s, id, c, true) })
				s.flush()
			})
			return false, nil
		}
		s.withOwner(id, c.Volume, func(o *owner) { o.serve(s, id, c, false) })
	case wire.TBatch:
		b := new(wire.Batch)
		if err := s.take(body, b); err != nil {
			return false, err
		}
		if len(b.Calls) == 0 {
			s.enqueue(id, &wire.BatchRe{})
			return false, nil
		}
		for i := range b.Calls {
			if b.Calls[i].Volume != b.Calls[0].Volume {
				return false, meta.E("batch", meta.Protocol, "", errors.New("several volumes in one batch"))
			}
		}
		s.srv.stats.calls.Add(uint64(len(b.Calls)))
		s.calls = len(b.Calls)
		s.withOwner(id, b.Calls[0].Volume, func(o *owner) { o.serveBatch(s, id, b) })
	case wire.TSync:
		m := new(wire.Sync)
		if err := s.take(body, m); err != nil {
			return false, err
		}
		s.inOrder(m.Volume, func() { // after the replays before it: what they change is in no entry yet
			s.withOwner(id, m.Volume, func(o *owner) { o.serveSync(s, id, m) })
			s.flush()
		})
	case wire.TRecalled:
		var m wire.Recalled
		if err := s.take(body, &m); err != nil {
			return false, err
		}
		if o := s.srv.opened(m.Volume); o != nil {
			o.mu.Lock()
			o.leases.Answer(time.Now(), s, m.Ino, id, m.Held)
			o.mu.Unlock()
		}
	case wire.TPolicyTaken:
		var m wire.PolicyTaken
		if err := s.take(body, &m); err != nil {
			return false, err
		}
		if o := s.srv.opened(m.Volume); o != nil {
			o.mu.Lock()
			o.told.answered(s, id)
			o.mu.Unlock()
		}
	case wire.TDrop:
		var m wire.Drop
		if err := s.take(body, &m); err != nil {
			return false, err
		}
		if o := s.srv.opened(m.Volume); o != nil {
			o.mu.Lock()
			for _, i := range m.Inos {
				o.leases.Drop(s, i)
			}
			o.mu.Unlock()
		}
	case wire.TKeepAlive:
		var m wire.KeepAlive
		if err := s.take(body, &m); err != nil {
			return false, err
		}
		s.touch()
		// Beyond the server's own lease another may own the volumes (rule 2).
		if grant := s.srv.grant(); grant > 0 {
			m.TTL = uint64(grant.Milliseconds())
			s.enqueue(id, &m)
		}
	case wire.TEnter:
		m := new(wire.Enter)
		err := s.take(body, m)
		var no *refusal
		if err != nil && !errors.As(err, &no) {
			return false, err
		}
		s.wg.Go(func() {
			e := &wire.Entered{}
			if no != nil {
				if err := s.refusedStill(m, no.cause); err != nil {
					s.srv.stats.refused.Add(1)
					e.Status = wire.StatusOf(err)
					s.enqueue(id, e)
					s.flush()
					return
				}
			}
			if o, err := s.srv.ownerFor(s.ctx, m.Volume); err != nil {
				e.Status = wire.StatusOf(err)
				s.enqueue(id, e)
			} else {
				o.serveEnter(s, id, m)
			}
			s.flush()
		})
	case wire.TBack:
		m := new(wire.Back)
		if err := s.take(body, m); err != nil {
			return false, err
		}
		o := s.srv.opened(m.Volume) // not the next owner, to which the session has not replayed yet
		s.inOrder(m.Volume, func() {
			if o != nil {
				o.back(s)
			}
			s.flush()
		})
	case wire.TAlloc:
		m := new(wire.Alloc)
		if err := s.take(body, m); err != nil {
			return false, err
		}
		s.withOwner(id, m.Volume, func(o *owner) { o.serveAlloc(s, id, m) })
	case wire.TSeal:
		m := new(wire.Seal)
		if err := s.take(body, m); err != nil {
			return false, err
		}
		s.withOwner(id, m.Chunk.Volume, func(o *owner) { o.serveSeal(s, id, m) })
	case wire.TTrouble:
		var m wire.Trouble
		if err := s.take(body, &m); err != nil {
			return false, err
		}
		s.srv.trouble(s, &m)
	case wire.TGaveUp:
		var m wire.GaveUp
		if err := s.take(body, &m); err != nil {
			return false, err
		}
		s.srv.gaveUp(s, &m)
	case wire.TLock:
		m := new(wire.Lock)
		if err := s.take(body, m); err != nil {
			return false, err
		}
		s.withOwner(id, m.Volume, func(o *owner) { o.serveLock(s, id, m) })
	case wire.TCancel:
		var m wire.Cancel
		if err := s.take(body, &m); err != nil {
			return false, err
		}
		s.mu.Lock()
		if cancel := s.cancels[m.Request]; cancel != nil {
			cancel(errCanceled)
		}
		s.mu.Unlock()
	case wire.TClaim:
		m := new(wire.Claim)
		if err := s.take(body, m); err != nil {
			return false, err
		}
		if o := s.srv.opened(m.Volume); o != nil {
			o.serveClaim(s, m)
		}
	case wire.TReserve:
		m := new(wire.Reserve)
		if err := s.take(body, m); err != nil {
			return false, err
		}
		if m.Claim {
			if o := s.srv.opened(m.Volume); o != nil {
				o.claimPromise(s, m.Want)
			}
			break
		}
		s.withOwner(id, m.Volume, func(o *owner) { o.serveReserve(s, id, m) })
	case wire.TCaps:
		m := new(wire.Caps)
		if err := s.take(body, m); err != nil {
			return false, err
		}
		if !m.Chunk.IsZero() {
			s.withOwner(id, m.Volume, func(o *owner) {
				if m.Chunk.Volume != m.Volume {
					o.serveForeignCap(s, id, m.Chunk)
					return
				}
				o.serveAppendCap(s, id, m.Chunk)
			})
			break
		}
		re := &wire.CapsRe{}
		token, ttl, err := s.srv.readCap(m.Volume, s)
		re.Status, re.Cap, re.TTL = wire.StatusOf(err), token, uint64(ttl.Milliseconds())
		s.enqueue(id, re)
	case wire.TAdmin:
		m := new(wire.Admin)
		if err := s.take(body, m); err != nil {
			return false, err
		}
		s.wg.Go(func() {
			re := s.srv.admin(s.ctx, s, m)
			s.enqueue(id, re)
			s.flush()
		})
	case wire.TBye:
		s.wg.Go(func() {
			var used []*owner
			for _, o := range s.srv.owners() {
				if o.has(s) {
					used = append(used, o)
				}
			}
			s.srv.endSession(s, errLeft)
			// Whoever takes the volumes next shall not wait for this session.
			for _, o := range used {
				ctx, cancel := context.WithTimeout(o.ctx, byeWait)
				if err := o.flush(ctx); err != nil {
					o.log.Debug("a session's end is not in the journal yet", "error", err)
				}
				cancel()
			}
			s.mu.Lock()
			snd := s.send
			s.mu.Unlock()
			if snd != nil {
				snd.Send(id, &wire.Bye{})
			}
		})
	default:
		return false, meta.E("read frame", meta.Protocol, s.name, fmt.Errorf("frame type %d from a client", t))
	}
	return false, nil
}
