// Package kafka serves streams over the Kafka protocol. The package owns the connections, the frames,
// the translation of every request into calls of package stream, and the coordinator of
// consumer groups. A file for each kind of request is named after the request's API key.
//
// A connection's requests are handled in order, as Kafka does; batches of a Produce
// request enter their logs when the request is read, so that several requests of a producer
// share a sync. Transactions are refused.
package kafka

import (
	"context"
	"crypto/tls"
	"errors"
	"log/slog"
	"maps"
	"net"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sync/semaphore"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/stream"
	"penstock.io/penstock/stream/placement"
)

// Config configures a Server. Zero values take the defaults.
type Config struct {
	// Host gives the streams. The server calls Host at each need, because a host is closed
	// when nobody uses the streams, and another one is opened later.
	Host    func(ctx context.Context) (*stream.Host, error)
	Cluster string // id of the cluster
	Node    int32  // id of the gateway; default 1
	// Gateways returns this gateway and the registered gateways; nil: this gateway is alone.
	Gateways func() (self placement.Gateway, live []placement.Gateway)
	// Advertise is the address that clients are told of this gateway, host:port; "": the address at
	// which the client has reached it.
	Advertise string
	// Users: clients log in as one of these users, by SASL or by a client certificate;
	// nil: the server asks for no credentials, and lets every client use every stream.
	Users *stream.Users
	// TLS encrypts all connections; nil: none. A client certificate that TLS accepts logs the client
	// in as the user of Users with the certificate's common name.
	TLS    *tls.Config
	Logger *slog.Logger
	Limits Limits

	// UnsafeLate, a control, lets commits on a former connection of a member move offsets back.
	UnsafeLate bool
}

// Limits bound the resources of a Server. Zero values take the defaults.
type Limits struct {
	Connections int           // default 1000
	Frame       int           // bytes of a Produce request; default 32 MiB
	SmallFrame  int           // bytes of another request; default 1 MiB
	Memory      int64         // bytes of all requests under way; default 256 MiB
	Responses   int64         // bytes of all records under way; default 256 MiB
	Idle        time.Duration // a connection without requests is closed; default 15 min
	Transfer    time.Duration // a frame must come, and a response must go, within; default 60 s
}

func (l *Limits) defaults() {
	set(&l.Connections, 1000)
	set(&l.Frame, 32<<20)
	set(&l.SmallFrame, 1<<20)
	set(&l.Memory, 256<<20)
	set(&l.Responses, 256<<20)
	set(&l.Idle, 15*time.Minute)
	set(&l.Transfer, time.Minute)
}

func set[T ~int | ~int32 | ~int64](v *T, def T) {
	if *v == 0 {
		*v = def
	}
}

// Server serves streams over the Kafka protocol.
type Server struct {
	cfg       Config
	memory    *semaphore.Weighted // of requests
	responses *semaphore.Weighted // of records in responses
	groups    coordinator
	idPrefix  [4]byte         // of topic ids
	ctx       context.Context // ends when the server stops
	stop      context.CancelFunc
	wg        sync.WaitGroup // of connections
	accepted  atomic.Uint64  // connections so far
	noLeader  atomic.Int64   // when tellNoLeader logged, in nanoseconds since 1970

	mu     sync.Mutex
	closed bool
	conns  map[*connection]struct{}
}

// New makes a Server.
func New(cfg Config) *Server {
	cfg.Limits.defaults()
	set(&cfg.Node, 1)
	if cfg.Logger == nil {
		cfg.Logger = slog.Default()
	}
	s := &Server{
		cfg: cfg, memory: semaphore.NewWeighted(cfg.Limits.Memory), responses: semaphore.NewWeighted(cfg.Limits.Responses),
		idPrefix: clusterPrefix(cfg.Cluster), conns: map[*connection]struct{}{},
	}
	s.ctx, s.stop = context.WithCancel(context.Background())
	s.groups.init()
	if cfg.Users != nil {
		s.wg.Go(s.endLogins)
	}
	return s
}

// Serve accepts connections until Close. The listener is closed then.
func (s *Server) Serve(l net.Listener) error {
	end := context.AfterFunc(s.ctx, func() { l.Close() })
	defer end()
	for {
		c, err := l.Accept()
		if s.ctx.Err() != nil {
			if err == nil {
				c.Close()
			}
			return nil
		}
		if err != nil {
			var ne net.Error
			if errors.As(err, &ne) && ne.Timeout() {
				continue
			}
			// Out of descriptors: ended connections give some back.
			s.cfg.Logger.Warn("kafka: a connection was not accepted; the server tries again", "error", err)
			select {
			case <-time.After(100 * time.Millisecond):
			case <-s.ctx.Done():
			}
			continue
		}
		s.start(c)
	}
}

// start serves a connection, unless there are too many.
func (s *Server) start(c net.Conn) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed || len(s.conns) >= s.cfg.Limits.Connections {
		c.Close()
		return
	}
	k := newConnection(s, c)
	s.conns[k] = struct{}{}
	s.wg.Go(func() {
		k.serve()
		k.c.Close()
		s.mu.Lock()
		defer s.mu.Unlock()
		delete(s.conns, k)
	})
}

// loginsEvery is how often the server looks for connections whose login has ended.
const loginsEvery = 5 * time.Second

// endLogins closes the connections of users who were removed or have another password, until the
// server stops.
func (s *Server) endLogins() {
	for {
		select {
		case <-time.After(loginsEvery):
		case <-s.ctx.Done():
			return
		}
		s.mu.Lock()
		open := slices.Collect(maps.Keys(s.conns))
		s.mu.Unlock()
		for _, k := range open {
			as := k.as.Load()
			if as == nil {
				continue
			}
			if _, err := as.User(); err != nil {
				s.cfg.Logger.Info("kafka: the server closes the connection of a client that must log in again", "client", k.c.RemoteAddr(), "error", err)
				k.stop()
				k.c.Close()
			}
		}
	}
}

// Close ends all connections and waits for the requests under way. The streams stay open.
func (s *Server) Close() {
	s.mu.Lock()
	s.closed = true
	for k := range s.conns {
		k.c.Close()
	}
	s.mu.Unlock()
	s.stop()
	s.wg.Wait()
	s.groups.close()
}

// EndGroups forgets groups that this gateway no longer coordinates. Their waiting members get
// NOT_COORDINATOR, find the new coordinator, and join again by their ids.
func (s *Server) EndGroups(of func(stream.Coordination) bool) { s.groups.forget(of) }

// stream finds the stream of a topic, for a client that needs a permission.
func (s *Server) stream(r *request, topic string, want stream.Permission) (*stream.Stream, error) {
	p, err := stream.Path(topic)
	if err != nil {
		return nil, err
	}
	h, err := s.cfg.Host(r.ctx)
	if err != nil {
		return nil, meta.E("open stream", meta.Unavailable, topic, err)
	}
	return h.Stream(r.ctx, r.as, p, want)
}

// seen finds the stream of a topic, for a client that needs to read or write it.
func (s *Server) seen(r *request, topic string) (*stream.Stream, error) {
	st, err := s.stream(r, topic, stream.MayRead)
	if errors.Is(err, meta.AccessDenied) {
		return s.stream(r, topic, stream.MayWrite)
	}
	return st, err
}
