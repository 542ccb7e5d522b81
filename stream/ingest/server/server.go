// Package server serves the ingestion of records into streams, over HTTP and gRPC: the package owns
// the connections, the requests under way and their memory, and the translation of requests
// into appends to partitions. Records are appended as record batches of package stream/log, so
// that Kafka's consumers read them like the records of Kafka's producers.
//
// A request is answered when its records are durable. A record that does not fit the format of
// its stream is refused alone, with a reason; the other records of the request are appended.
package server

import (
	"cmp"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"sync/atomic"
	"time"

	"golang.org/x/sync/semaphore"
	"google.golang.org/grpc"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/stream"
	"penstock.io/penstock/stream/log"
	"penstock.io/penstock/stream/partition"
	"penstock.io/penstock/stream/placement"
)

// Config configures a Server. Zero values take the defaults.
type Config struct {
	// Host gives the streams. The server calls Host at the first need, again after an
	// error; Host must return the same value every time.
	Host func(ctx context.Context) (*stream.Host, error)
	// Users: clients log in as one of these users, by HTTP's Basic authentication (RFC
	// 7617) or by a client certificate; nil: the server asks for no credentials, and lets
	// every client use every stream.
	Users *stream.Users
	// TLS encrypts all connections; nil: none. A client certificate that TLS accepts logs the client
	// in as the user of Users with the certificate's common name.
	TLS *tls.Config
	// Member returns the login of a client of the cluster, by its certificate of the cluster; nil for
	// another client. Member is nil if TLS lets no such client in. Errors: AccessDenied.
	Member func(tls.ConnectionState) (*stream.Login, error)
	Logger *slog.Logger
	Limits Limits
}

// Limits bound the resources of a Server. Zero values take the defaults.
type Limits struct {
	Connections int           // default 1000
	Requests    int64         // requests and gRPC calls under way; default 2000
	Memory      int64         // bytes of all records under way; default 256 MiB, at least 16 MiB
	Body        int64         // bytes of the body of an HTTP request; default 64 MiB
	Transfer    time.Duration // bytes that the server waits for must come within; default 60 s
	Idle        time.Duration // a connection without requests is closed; default 15 min
	Patience    time.Duration // a request waits for memory; default 10 s
}

func (l *Limits) defaults() {
	l.Connections = cmp.Or(l.Connections, 1000)
	l.Requests = cmp.Or(l.Requests, 2000)
	l.Memory = max(cmp.Or(l.Memory, 256<<20), 16<<20)
	l.Body = cmp.Or(l.Body, 64<<20)
	l.Transfer = cmp.Or(l.Transfer, time.Minute)
	l.Idle = cmp.Or(l.Idle, 15*time.Minute)
	l.Patience = cmp.Or(l.Patience, 10*time.Second)
}

// Server serves the ingestion of records.
type Server struct {
	cfg      Config
	find     func(ctx context.Context, path string) (target, error)
	http     *http.Server
	grpc     *grpc.Server        // serves as a handler of http
	memory   *semaphore.Weighted // of records
	entries  *semaphore.Weighted // of messages of gRPC calls before their append
	requests *semaphore.Weighted
	turn     atomic.Uint32 // counts the requests that leave the choice of the partition to the server
	ctx      context.Context
	stop     context.CancelCauseFunc
}

// Bounds of an HTTP/2 connection: calls under way, and received bytes of a call that are not read
// yet. All calls together are bounded by Limits.Requests.
const (
	maxCalls   = 256
	callBuffer = 64 << 10
)

// New makes a Server.
func New(cfg Config) *Server {
	cfg.Limits.defaults()
	if cfg.Logger == nil {
		cfg.Logger = slog.Default()
	}
	s := &Server{
		cfg: cfg, memory: semaphore.NewWeighted(cfg.Limits.Memory), entries: semaphore.NewWeighted(allEntries),
		requests: semaphore.NewWeighted(cfg.Limits.Requests),
	}
	s.find = s.stream
	s.ctx, s.stop = context.WithCancelCause(context.Background())
	s.grpc = s.newGRPC()
	protocols := new(http.Protocols)
	protocols.SetHTTP1(true)
	protocols.SetHTTP2(cfg.TLS != nil)
	protocols.SetUnencryptedHTTP2(cfg.TLS == nil)
	s.http = &http.Server{
		Handler: s.handler(), Protocols: protocols, TLSConfig: cfg.TLS, MaxHeaderBytes: 16 << 10,
		ReadHeaderTimeout: cfg.Limits.Transfer, IdleTimeout: cfg.Limits.Idle,
		// A connection has room for what all its calls may send: calls that wait for memory must not
		// keep a call from its bytes that has the memory.
		HTTP2: &http.HTTP2Config{
			MaxConcurrentStreams: maxCalls, MaxReceiveBufferPerStream: callBuffer, MaxReceiveBufferPerConnection: maxCalls * callBuffer,
		},
		ErrorLog: slog.NewLogLogger(cfg.Logger.Handler(), slog.LevelDebug),
	}
	return s
}

// Serve accepts connections until Close. The listener is closed then.
func (s *Server) Serve(l net.Listener) error {
	l = &limited{Listener: l, free: semaphore.NewWeighted(int64(s.cfg.Limits.Connections)), ctx: s.ctx}
	var err error
	if s.cfg.TLS != nil {
		err = s.http.ServeTLS(l, "", "") // the configuration has the certificate
	} else {
		err = s.http.Serve(l)
	}
	if errors.Is(err, http.ErrServerClosed) {
		return nil
	}
	return err
}

// errStopping is the cause of the end of requests when the server stops.
var errStopping = meta.E("append", meta.Unavailable, "gateway", errors.New("the gateway stops"))

// Close ends all connections and waits for the end of the requests under way. The streams stay
// open.
func (s *Server) Close() {
	s.stop(errStopping)
	if err := s.http.Close(); err != nil {
		s.cfg.Logger.Debug("ingest: a listener was not closed well", "error", err)
	}
	// The background context never ends: Acquire waits for the requests, and has no error.
	_ = s.requests.Acquire(context.Background(), s.cfg.Limits.Requests)
	s.requests.Release(s.cfg.Limits.Requests)
}

// limited is a listener that accepts no connection while the greatest number is open.
type limited struct {
	net.Listener
	free *semaphore.Weighted
	ctx  context.Context // ends when the server stops
}

func (l *limited) Accept() (net.Conn, error) {
	if err := l.free.Acquire(l.ctx, 1); err != nil {
		return nil, err
	}
	c, err := l.Listener.Accept()
	if err != nil {
		l.free.Release(1)
		return nil, err
	}
	return &counted{Conn: c, l: l}, nil
}

// counted is a connection of a limited listener.
type counted struct {
	net.Conn
	l      *limited
	closed atomic.Bool
}

func (c *counted) Close() error {
	if c.closed.CompareAndSwap(false, true) {
		c.l.free.Release(1)
	}
	return c.Conn.Close()
}

// handler checks each request before the handler of its path runs.
func (s *Server) handler() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("POST /v1/append/{path...}", s.appendLines)
	origins := http.NewCrossOriginProtection()
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if !s.requests.TryAcquire(1) {
			refuse(w, meta.E("append", meta.WouldBlock, r.URL.Path, errors.New("too many requests are under way")))
			return
		}
		defer s.requests.Release(1)
		// A page in the browser of a user of this machine must not write into streams.
		if err := origins.Check(r); err != nil {
			refuse(w, meta.E("append", meta.AccessDenied, r.URL.Path, err))
			return
		}
		if s.cfg.Users == nil && !toLoopback(r) {
			refuse(w, meta.E("append", meta.AccessDenied, r.Host, errors.New("the Host of a request to a loopback address is localhost or a loopback address")))
			return
		}
		if s.cfg.Users != nil {
			as, err := s.login(r)
			if err != nil {
				s.cfg.Logger.Warn("ingest: a client could not log in", "client", r.RemoteAddr, "error", err)
				unauthenticated(w, err)
				return
			}
			r = r.WithContext(context.WithValue(r.Context(), loginKey{}, as))
		}
		if isGRPC(r) {
			s.serveGRPC(w, r)
			return
		}
		mux.ServeHTTP(w, r)
	})
}

// loginKey is the key of the client's *stream.Login in the context of a request.
type loginKey struct{}

// login finds out who the client of a request is. Errors: AccessDenied, and those of
// stream.Users.Check.
func (s *Server) login(r *http.Request) (*stream.Login, error) {
	if name, password, ok := r.BasicAuth(); ok {
		return s.cfg.Users.Check(r.Context(), name, password)
	}
	if r.TLS != nil && s.cfg.Member != nil {
		if as, err := s.cfg.Member(*r.TLS); as != nil || err != nil {
			return as, err
		}
	}
	if r.TLS != nil {
		if as, err := s.cfg.Users.BeginTLS(*r.TLS); as != nil || err != nil {
			return as, err
		}
	}
	return nil, meta.E("log in", meta.AccessDenied, "client", errors.New("the request has no name and password (Authorization: Basic), and the connection no client certificate"))
}

// toLoopback reports whether the Host of a request is a loopback address or localhost, as it
// must be at a loopback address: a page whose name resolves to 127.0.0.1 has another Host.
func toLoopback(r *http.Request) bool {
	local, ok := r.Context().Value(http.LocalAddrContextKey).(*net.TCPAddr)
	if !ok || !local.IP.IsLoopback() {
		return true
	}
	host, _, err := net.SplitHostPort(r.Host)
	if err != nil {
		host = r.Host
	}
	ip := net.ParseIP(host)
	return host == "localhost" || ip != nil && ip.IsLoopback()
}

// reserve takes memory for records; release gives the memory back. Errors: WouldBlock (the memory
// is in use by other requests), and why ctx ended.
func (s *Server) reserve(ctx context.Context, bytes int64) (release func(), err error) {
	bytes = min(bytes, s.cfg.Limits.Memory)
	wait, cancel := context.WithTimeout(ctx, s.cfg.Limits.Patience)
	defer cancel()
	if err := s.memory.Acquire(wait, bytes); err != nil {
		if ctx.Err() != nil {
			return nil, context.Cause(ctx)
		}
		return nil, meta.E("append", meta.WouldBlock, "gateway", errors.New("the records of other requests take all memory for records"))
	}
	return func() { s.memory.Release(bytes) }, nil
}

// target is a stream to which records are appended.
type target struct {
	format string // of the values
	// partitions is the number of partitions, and named the number that producers with a name are
	// spread over.
	partitions, named int
	// partition returns the log of a partition. Errors: NotFound, and those of partition.Open.
	partition func(ctx context.Context, n int32) (*partition.Log, error)
	// leader returns the other gateway that leads a partition, or is to lead it; nil: the server
	// is alone. Errors: NotFound.
	leader func(ctx context.Context, n int32) (placement.Gateway, error)
	// here reports that this process is to lead a partition; nil: all of them.
	here func(n int32) bool
	// batchBytes returns the bound on a batch, in bytes.
	batchBytes func() int
}

// elsewhere is the error of a partition that another gateway leads.
type elsewhere struct {
	error
	gateway string // address of its server for appends, host:port
}

func (e *elsewhere) Unwrap() error { return e.error }

// open returns the log of a partition. Errors: as of partition, with the other gateway's address if
// another gateway leads the partition (*elsewhere).
func (t *target) open(ctx context.Context, n int32) (*partition.Log, error) {
	l, err := t.partition(ctx, n)
	if errors.Is(err, meta.NotOwner) && t.leader != nil {
		if g, lerr := t.leader(ctx, n); lerr == nil && g.Ingest != "" {
			err = &elsewhere{err, g.Ingest}
		}
	}
	return l, err
}

// stream finds a stream by path, for a client that may append to the stream.
func (s *Server) stream(ctx context.Context, p string) (target, error) {
	if _, err := stream.Topic(p); err != nil {
		return target{}, err
	}
	return s.opened(ctx, p, func(h *stream.Host, ctx context.Context, as *stream.Login) (*stream.Stream, error) {
		return h.Stream(ctx, as, p, stream.MayWrite)
	})
}

// directory finds a stream by the inode of its directory, for a client that may append to the
// stream.
func (s *Server) directory(ctx context.Context, volume meta.VolumeID, ino meta.Ino) (target, error) {
	name := fmt.Sprintf("volume %d, inode %d", volume, ino)
	return s.opened(ctx, name, func(h *stream.Host, ctx context.Context, as *stream.Login) (*stream.Stream, error) {
		return h.StreamAt(ctx, as, volume, ino, stream.MayWrite)
	})
}

// opened finds a stream with find. p names the stream in errors.
func (s *Server) opened(ctx context.Context, p string, find func(*stream.Host, context.Context, *stream.Login) (*stream.Stream, error)) (target, error) {
	h, err := s.cfg.Host(ctx)
	if err != nil {
		return target{}, meta.E("open stream", meta.Unavailable, p, err)
	}
	as, _ := ctx.Value(loginKey{}).(*stream.Login) // nil: the server asks for no credentials
	st, err := find(h, ctx, as)
	if err != nil {
		return target{}, err
	}
	// A request or call can last: each batch finds the stream again, and asks again whether the
	// client may append.
	open := func(ctx context.Context, n int32) (*partition.Log, error) {
		if as == nil {
			again, err := h.Again(ctx, st)
			if err != nil {
				return nil, err
			}
			return again.Partition(ctx, n)
		}
		again, err := find(h, ctx, as)
		if err == nil && !again.Is(st) {
			err = meta.E("append", meta.Stale, p, errors.New("another stream has this path now"))
		}
		if err != nil {
			return nil, err
		}
		return again.Partition(ctx, n)
	}
	leader := func(ctx context.Context, n int32) (placement.Gateway, error) {
		g, _, err := st.Leader(ctx, n)
		return g, err
	}
	here := func(n int32) bool {
		_, other := st.Place(n)
		return !other
	}
	spec := st.Spec()
	batchBytes := func() int {
		now := st.Spec()
		return now.BatchBytes()
	}
	return target{spec.Format, spec.Partitions, spec.Named(), open, leader, here, batchBytes}, nil
}

// choose chooses the partition of a request: for a producer with a name always the same one, also
// when the stream gets more partitions, else the next one that this gateway is to lead.
func (s *Server) choose(name string, t *target) int32 {
	if name != "" {
		return int32(log.NamedProducer(name) % int64(t.named))
	}
	first := s.turn.Add(1)
	for i := range uint32(t.partitions) {
		if n := int32((first + i) % uint32(t.partitions)); t.here == nil || t.here(n) {
			return n
		}
	}
	return int32(first % uint32(t.partitions))
}
