package wire

import (
	"net"
	"sync"
	"sync/atomic"
)

// Sender writes frames to a connection in the order of Enqueue. Enqueue never
// blocks on the network, so it may be called under a lock that decides the
// order; Flush does the writing, in the goroutine of whoever calls it first,
// so that a lone request costs no switch of goroutines and many share a write.
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

// MaxQueued bounds the bytes waiting for a peer that does not read. A peer
// beyond it is cut off.
const MaxQueued = 64 << 20

// NewSender sends on conn in the version that was negotiated; onError, if not nil, is called once when a write
// failed or the peer fell too far behind.
func NewSender(conn net.Conn, v uint8, onError func(error)) *Sender {
	return &Sender{conn: conn, v: v, onError: onError}
}

// Enqueue adds a frame to what will be written. Errors: NotSupported and
// ResourceExceeded, as Encode: nothing is written then, and whoever waits for this
// answer must be given another. What is told unasked to a peer that has no words for
// it may be left unsaid; who waits for an answer must look. That the connection
// broke is no error here.
func (s *Sender) Enqueue(id uint64, m Message) (err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.err == nil {
		s.buf, err = Encode(s.buf, s.v, id, m)
	}
	return err
}

// Flush writes what is queued unless another goroutine is at it already, which
// then writes this, too.
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

// FlushSoon has a goroutine flush, for who must not wait for the network: one for
// however many frames are enqueued until it runs.
func (s *Sender) FlushSoon() {
	if s.soon.CompareAndSwap(false, true) {
		go func() {
			s.soon.Store(false) // what is enqueued from here on is flushed by the next one
			s.Flush()
		}()
	}
}

// Send enqueues one frame and flushes.
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
