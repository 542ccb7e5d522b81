package kafka

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"sync/atomic"
	"time"

	"github.com/twmb/franz-go/pkg/kmsg"

	"penstock.io/penstock/stream"
)

// pipeline bounds the unanswered requests of a connection.
const pipeline = 16

// smallWeight is the count of a byte in Limits.Memory for requests other than Produce, because
// the decoded request can take many times the bytes.
const smallWeight = 32

// errLogin ends a connection whose client could not log in.
var errLogin = errors.New("the client could not log in")

// connection is a client's connection. A goroutine reads and begins requests, another
// finishes the requests in order and writes the responses.
type connection struct {
	s      *Server
	number uint64 // a later connection of the Server has a higher number
	c      net.Conn
	ctx    context.Context // ends when the client is gone or the server stops
	stop   context.CancelFunc
	// login is used by the goroutine that reads requests.
	login login
	as    atomic.Pointer[stream.Login] // the client's login; nil: none yet
}

func newConnection(s *Server, c net.Conn) *connection {
	k := &connection{s: s, number: s.accepted.Add(1), c: c, login: login{users: s.cfg.Users}}
	if s.cfg.TLS != nil {
		k.c = tls.Server(c, s.cfg.TLS)
	}
	k.ctx, k.stop = context.WithCancel(s.ctx)
	return k
}

// request is a request under way.
type request struct {
	header
	ctx  context.Context
	conn *connection
	as   *stream.Login // nil: the server asks for no credentials
	body kmsg.Request
	// answer finishes the request; nil is no response.
	answer func() kmsg.Response
	// free gives back the resources of the request, after the response was written.
	free []func()
	// last: the connection ends after the response.
	last bool
}

func (r *request) release() {
	for _, f := range r.free {
		f()
	}
	r.free = nil
}

// serve serves the connection to the end.
func (k *connection) serve() {
	defer k.stop()
	if err := k.handshake(); err != nil {
		k.s.cfg.Logger.Debug("kafka: a client did not come through TLS", "client", k.c.RemoteAddr(), "error", err)
		return
	}
	queue := make(chan *request, pipeline)
	done := make(chan struct{})
	go func() {
		defer close(done)
		k.write(queue)
	}()
	err := k.read(queue)
	// Accepted batches are still acknowledged, if the client listens; waits end.
	if !errors.Is(err, io.EOF) {
		k.s.cfg.Logger.Debug("kafka: a connection has ended", "client", k.c.RemoteAddr(), "error", err)
	}
	k.stop()
	close(queue)
	<-done
}

// handshake does the handshake of TLS, and logs the client in by a client certificate.
func (k *connection) handshake() error {
	t, ok := k.c.(*tls.Conn)
	if !ok {
		return nil
	}
	ctx, cancel := context.WithTimeout(k.ctx, k.s.cfg.Limits.Transfer)
	defer cancel()
	if err := t.HandshakeContext(ctx); err != nil || k.s.cfg.Users == nil {
		return err
	}
	as, err := k.s.cfg.Users.BeginTLS(t.ConnectionState())
	if err != nil {
		k.s.cfg.Logger.Warn("kafka: a client could not log in", "client", k.c.RemoteAddr(), "error", err)
		return err
	}
	k.loggedIn(as)
	return nil
}

// loggedIn notes who the client is; nil: nobody yet.
func (k *connection) loggedIn(as *stream.Login) {
	k.login.as = as
	k.as.Store(as)
}

// read reads requests and begins them.
func (k *connection) read(queue chan<- *request) error {
	for {
		r := &request{ctx: k.ctx, conn: k}
		if err := k.next(r); err != nil {
			r.release()
			return err
		}
		last := r.last
		select {
		case queue <- r:
			if last {
				return errLogin
			}
		case <-k.ctx.Done():
			r.release()
			return context.Cause(k.ctx)
		}
	}
}

// next reads a request and begins it.
func (k *connection) next(r *request) error {
	limits := &k.s.cfg.Limits
	wait := limits.Idle
	if k.login.wanted() {
		wait = limits.Transfer
	}
	if err := k.c.SetReadDeadline(time.Now().Add(wait)); err != nil {
		return err
	}
	var weight int64
	frame, err := readFrame(k.c, func(key int16, size int) error {
		most := limits.SmallFrame
		weight = int64(size) * smallWeight
		if key == produceKey {
			most, weight = limits.Frame, int64(size)
		}
		if k.login.wanted() {
			most = maxLogin
		}
		if size > most {
			return fmt.Errorf("%w: a request %d has %d bytes, more than %d", errFrame, key, size, most)
		}
		// A client that has not logged in must not keep memory from other clients by half a frame: the
		// connection has room for the frame, and takes memory when the frame is whole.
		if !k.login.wanted() {
			if err := k.reserve(r, weight); err != nil {
				return err
			}
		}
		return k.c.SetReadDeadline(time.Now().Add(limits.Transfer))
	})
	if err == nil && k.login.wanted() {
		err = k.reserve(r, weight)
	}
	if err != nil {
		return err
	}
	return k.s.begin(r, frame)
}

// reserve takes memory for a request until the request's release.
func (k *connection) reserve(r *request, weight int64) error {
	weight = min(weight, k.s.cfg.Limits.Memory)
	if err := k.s.memory.Acquire(k.ctx, weight); err != nil {
		return err
	}
	r.free = append(r.free, func() { k.s.memory.Release(weight) })
	return nil
}

// write finishes requests in order and writes their responses.
func (k *connection) write(queue <-chan *request) {
	var buf []byte
	for r := range queue {
		p := r.answer()
		if p != nil {
			buf = appendResponse(buf[:0], r.correlation, p)
			err := k.c.SetWriteDeadline(time.Now().Add(k.s.cfg.Limits.Transfer))
			if err == nil {
				_, err = k.c.Write(buf)
			}
			if err != nil {
				k.stop() // the reader ends, too
				k.c.Close()
			}
			if cap(buf) > 1<<20 {
				buf = nil
			}
		}
		r.release()
	}
}

// begin decodes a request and begins it. After an error the connection is closed.
func (s *Server) begin(r *request, frame []byte) error {
	var err error
	var rest []byte
	if r.header, rest, err = parseHeader(frame); err != nil {
		return err
	}
	k, ok := keys[r.key]
	switch {
	case r.key == apiVersionsKey && (r.version < 0 || r.version > k.max):
		r.answer = func() kmsg.Response { return versionsTooNew() }
		return nil
	case !ok:
		return fmt.Errorf("%w: request %d is not known", errFrame, r.key)
	case r.version < k.min || r.version > k.max:
		return fmt.Errorf("%w: version %d of request %d is not known, only %d to %d", errFrame, r.version, r.key, k.min, k.max)
	}
	if err := r.conn.login.admit(r.key); err != nil {
		return err
	}
	r.as = r.conn.login.as
	if r.body, err = parseBody(r.header, rest); err != nil {
		return err
	}
	p := r.body.ResponseKind()
	p.SetVersion(r.version)
	r.answer = k.begin(s, r)
	return nil
}
