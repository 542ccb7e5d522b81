package wire

import (
	"net"
	"sync"
	"sync/atomic"
)

// Sender writes frames to a connection in the order of Enqueue. Enqueue never blocks on the
// network, so the caller may hold the mutex that decides the order. Flush writes in the
// goroutine of its first caller: a single request needs no goroutine switch, and many requests
// share a write.
type Sender struct {
	conn net.Conn
	v    uint8

	soon atomic.Bool // a goroutine is about to flush

	mu      sync.Mutex
	buf     []byte
	spare   []byte
	writing bool
	err     error
	onError func(error)
}

// MaxQueued bounds the bytes queued for a peer that does not read. Beyond MaxQueued the Sender
// closes the connection.
const MaxQueued = 64 << 20

// NewSender returns a Sender for conn with the negotiated protocol version. onError, if not
// nil, is called once when a write failed or the peer fell too far behind.
func NewSender(conn net.Conn, v uint8, onError func(error)) *Sender {
	return &Sender{conn: conn, v: v, onError: onError}
}

// Enqueue appends a frame to the queue. Errors: ResourceExceeded, as Encode. After an error
// nothing is queued, so the caller must give a waiting peer another answer; the caller may
// ignore the error of a message that the peer did not ask for. A broken connection is no error
// here.
func (s *Sender) Enqueue(id uint64, m Message) (err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.err == nil {
		s.buf, err = Encode(s.buf, s.v, id, m)
	}
	return err
}

// Flush writes the queue. If another goroutine is writing, Flush returns at once, and that
// goroutine writes this caller's frames, too.
func (s *Sender) Flush() error {
	s.mu.Lock()
	if s.writing || s.err != nil {
		err := s.err
		if err == nil && len(s.buf) > MaxQueued {
			err = errBehind
			s.err = err
			s.mu.Unlock()
			s.fail(err)
			return err
		}
		s.mu.Unlock()
		return err
	}
	s.writing = true
	for len(s.buf) > 0 && s.err == nil {
		out := s.buf
		s.buf = s.spare[:0]
		s.spare = nil
		s.mu.Unlock()
		_, err := s.conn.Write(out)
		s.mu.Lock()
		if cap(out) <= 1<<20 {
			s.spare = out
		}
		if err != nil && s.err == nil {
			s.err = err
		}
	}
	s.writing = false
	err := s.err
	s.mu.Unlock()
	if err != nil {
		s.fail(err)
	}
	return err
}

// FlushSoon starts a goroutine to flush, for a caller that must not wait for the network. The
// goroutine serves all frames enqueued before its start.
func (s *Sender) FlushSoon() {
	if s.soon.CompareAndSwap(false, true) {
		go func() {
			s.soon.Store(false) // a later call of FlushSoon starts another goroutine
			s.Flush()
		}()
	}
}

// Send enqueues a frame and flushes.
func (s *Sender) Send(id uint64, m Message) error {
	if err := s.Enqueue(id, m); err != nil {
		return err
	}
	return s.Flush()
}

func (s *Sender) fail(err error) {
	s.mu.Lock()
	f := s.onError
	s.onError = nil
	s.mu.Unlock()
	s.conn.Close()
	if f != nil {
		f(err)
	}
}

type behindError struct{}

func (behindError) Error() string { return "the peer does not read: too many bytes wait for it" }

var errBehind error = behindError{}
