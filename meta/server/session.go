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
	"penstock.io/penstock/meta/wire"
)

// session is a client's standing with this server. It outlives a broken
// connection until its lease runs out.
type session struct {
	srv   *Server
	id    meta.SessionID
	role  wire.Role
	name  string
	host  string
	pid   uint32
	start uint64

	// renewed is when the last keep-alive came, nanoseconds of the server's
	// monotonic clock.
	renewed atomic.Int64
	// claims: the session comes from an owner before this one; its claims and
	// replays are on their way.
	claims atomic.Bool

	mu      sync.Mutex
	conn    net.Conn
	send    *wire.Sender // nil between connections
	cancels map[uint64]context.CancelCauseFunc
	ended   bool
	ordered []func() // replays, oldest first; the first is being run

	ctx    context.Context // ends with the session, not with a connection
	cancel context.CancelCauseFunc
	wg     sync.WaitGroup
}

// byeWait bounds how long a good-bye waits for the journal.
const byeWait = time.Second

var (
	errCanceled = errors.New("the caller waits no more")
	errLeft     = errors.New("the client left")
)

// inOrder runs work that must keep the order in which it came but may wait,
// which the reading goroutine must not: another session's answer to a recall
// may be behind it.
func (s *session) inOrder(work func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.ordered = append(s.ordered, work)
	if len(s.ordered) > 1 {
		return // somebody is at it
	}
	s.wg.Go(func() {
		for {
			s.mu.Lock()
			next := s.ordered[0]
			s.mu.Unlock()
			next()
			s.mu.Lock()
			s.ordered[0] = nil
			s.ordered = s.ordered[1:]
			if len(s.ordered) == 0 {
				s.ordered = nil
				s.mu.Unlock()
				return
			}
			s.mu.Unlock()
		}
	})
}

// enqueue adds a frame to what the session will be sent. Without a connection
// it is dropped: the client asks again when it is back, and recalls are
// repeated then.
func (s *session) enqueue(id uint64, m wire.Message) {
	s.mu.Lock()
	snd := s.send
	s.mu.Unlock()
	if snd != nil {
		snd.Enqueue(id, m)
		if _, ok := m.(*wire.Recall); ok {
			// Whoever asks holds a lock and flushes its own session only.
			go snd.Flush()
		}
	}
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

// attach gives the session a new connection and closes an older one.
func (s *session) attach(conn net.Conn) *wire.Sender {
	snd := wire.NewSender(conn, nil)
	s.mu.Lock()
	if s.conn != nil {
		s.conn.Close()
	}
	s.conn, s.send = conn, snd
	s.mu.Unlock()
	s.touch()
	return snd
}

func (s *session) detach(conn net.Conn) {
	s.mu.Lock()
	if s.conn == conn {
		s.conn, s.send = nil, nil
	}
	s.mu.Unlock()
	conn.Close()
}

func (s *session) touch() { s.renewed.Store(int64(time.Since(s.srv.epoch))) }

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
		done, err := s.handle(t, id, body)
		if done || err != nil {
			return err
		}
	}
}

func (s *session) refuse(id uint64, err error) {
	s.enqueue(id, &wire.Reply{Status: wire.StatusOf(err)})
}

// withOwner runs fn with the volume's owner, at once if it is open here, else
// from a goroutine that opens it.
func (s *session) withOwner(id uint64, v meta.VolumeID, fn func(*owner)) {
	if o := s.srv.opened(v); o != nil {
		fn(o)
		return
	}
	s.wg.Go(func() {
		o, err := s.srv.open(s.ctx, v)
		if err != nil {
			s.refuse(id, err)
		} else {
			fn(o)
		}
		s.flush()
	})
}

func (s *session) handle(t wire.Type, id uint64, body []byte) (done bool, err error) {
	switch t {
	case wire.TCall:
		c := new(wire.Call)
		if err := wire.Decode(body, c); err != nil {
			return false, err
		}
		s.srv.stats.calls.Add(1)
		if c.Replay {
			s.inOrder(func() {
				o, err := s.srv.open(s.ctx, c.Volume)
				if err != nil {
					s.refuse(id, err)
				} else {
					o.serve(s, id, c, true)
				}
				s.flush()
			})
			return false, nil
		}
		s.withOwner(id, c.Volume, func(o *owner) { o.serve(s, id, c, false) })
	case wire.TBatch:
		b := new(wire.Batch)
		if err := wire.Decode(body, b); err != nil {
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
		s.withOwner(id, b.Calls[0].Volume, func(o *owner) { o.serveBatch(s, id, b) })
	case wire.TSync:
		m := new(wire.Sync)
		if err := wire.Decode(body, m); err != nil {
			return false, err
		}
		s.withOwner(id, m.Volume, func(o *owner) { o.serveSync(s, id, m) })
	case wire.TRecalled:
		var m wire.Recalled
		if err := wire.Decode(body, &m); err != nil {
			return false, err
		}
		if o := s.srv.opened(m.Volume); o != nil {
			o.mu.Lock()
			o.leases.recalled(s, m.Ino, id)
			o.mu.Unlock()
		}
	case wire.TDrop:
		var m wire.Drop
		if err := wire.Decode(body, &m); err != nil {
			return false, err
		}
		if o := s.srv.opened(m.Volume); o != nil {
			o.mu.Lock()
			for _, i := range m.Inos {
				o.leases.drop(s, i)
			}
			o.mu.Unlock()
		}
	case wire.TKeepAlive:
		var m wire.KeepAlive
		if err := wire.Decode(body, &m); err != nil {
			return false, err
		}
		s.touch()
		s.enqueue(id, &m)
		if s.claims.CompareAndSwap(true, false) {
			// Claims and replays come before the first keep-alive.
			s.inOrder(func() {
				for _, o := range s.srv.owners() {
					o.mu.Lock()
					o.back(s.id)
					o.mu.Unlock()
				}
			})
		}
	case wire.TAlloc:
		m := new(wire.Alloc)
		if err := wire.Decode(body, m); err != nil {
			return false, err
		}
		s.withOwner(id, m.Volume, func(o *owner) { o.serveAlloc(s, id, m) })
	case wire.TSeal:
		m := new(wire.Seal)
		if err := wire.Decode(body, m); err != nil {
			return false, err
		}
		s.withOwner(id, m.Chunk.Volume, func(o *owner) { o.serveSeal(s, id, m.Chunk) })
	case wire.TLock:
		m := new(wire.Lock)
		if err := wire.Decode(body, m); err != nil {
			return false, err
		}
		s.withOwner(id, m.Volume, func(o *owner) { o.serveLock(s, id, m) })
	case wire.TCancel:
		var m wire.Cancel
		if err := wire.Decode(body, &m); err != nil {
			return false, err
		}
		s.mu.Lock()
		if cancel := s.cancels[m.Request]; cancel != nil {
			cancel(errCanceled)
		}
		s.mu.Unlock()
	case wire.TClaim:
		m := new(wire.Claim)
		if err := wire.Decode(body, m); err != nil {
			return false, err
		}
		o, err := s.srv.open(s.ctx, m.Volume)
		if err != nil {
			s.srv.log.Warn("a claim could not be served", "session", s.name, "error", err)
			return false, nil
		}
		o.serveClaim(s, m)
	case wire.TCaps:
		m := new(wire.Caps)
		if err := wire.Decode(body, m); err != nil {
			return false, err
		}
		re := &wire.CapsRe{}
		token, ttl, err := s.srv.readCap(m.Volume, s)
		re.Status, re.Cap, re.TTL = wire.StatusOf(err), token, uint64(ttl.Milliseconds())
		s.enqueue(id, re)
	case wire.TAdmin:
		m := new(wire.Admin)
		if err := wire.Decode(body, m); err != nil {
			return false, err
		}
		s.wg.Go(func() {
			re := s.srv.admin(s.ctx, s, m)
			s.enqueue(id, re)
			s.flush()
		})
	case wire.TBye:
		s.wg.Go(func() {
			s.srv.endSession(s, errLeft)
			// Whoever takes the volumes next shall not wait for this session.
			for _, o := range s.srv.owners() {
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

// resendRecalls asks again, on a new connection, for what the old one may have
// lost.
func (s *session) resendRecalls() {
	for _, o := range s.srv.owners() {
		o.mu.Lock()
		for ino, l := range o.leases.m {
			if l.recall == nil {
				continue
			}
			if _, asked := l.recall.pending[s]; asked {
				s.enqueue(l.recall.round, &wire.Recall{Recall: meta.Recall{Volume: o.vol, Ino: ino, Keep: l.recall.keep}})
			}
		}
		o.mu.Unlock()
	}
}
