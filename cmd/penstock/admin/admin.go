// Package admin owns the administrative HTTP endpoint of a role: /metrics for Prometheus,
// /healthz and /readyz for supervisors and load balancers, and /debug/pprof. The endpoint
// listens on a Unix socket of mode 0600, or on loopback without profiles, since any
// process of the machine may connect there. The endpoint has no authentication of its
// own, so any other address is refused, unless the endpoint serves /metrics alone.
package admin

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net"
	"net/http"
	"net/http/pprof"
	"os"
	"strings"
	"syscall"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"golang.org/x/net/netutil"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/peer"
)

// Config configures an endpoint.
type Config struct {
	// Addr is "unix:/path" or "host:port" with a loopback host. Port 0 takes a free port;
	// see Server.Addr.
	Addr string
	// MetricsOnly: the endpoint serves only /metrics, and Addr may be any address. The
	// network decides which machines may read the metrics.
	MetricsOnly bool
	// Gatherer has the metrics; nil: the metrics of the process registry.
	Gatherer prometheus.Gatherer
	// Ready returns the reason why the role can't serve now; nil: ready. Ready is called
	// for each request and must not block.
	Ready func() error
	// Replace makes this endpoint take the place of an endpoint that listens at the
	// socket: the endpoint of this process's predecessor.
	Replace bool
	Logger  *slog.Logger
	// Routes are further handlers, by their patterns of net/http; never served with
	// MetricsOnly.
	Routes map[string]http.HandlerFunc
}

// Bounds where metrics are open to all machines, and any machine may connect and ask. A
// Prometheus has one connection, and opens a new connection if the idle connection was
// closed.
const (
	headerWithin = 10 * time.Second
	idleFor      = 2 * time.Minute
	openAnswers  = time.Minute // for one answer; open endpoints have no profiles, which may take longer
	openConns    = 64
	openAtOnce   = 4 // gatherings: two Prometheus servers at once, and people
)

// Server is a listening endpoint.
type Server struct {
	http http.Server
	addr string
	path string      // of a socket; "": none
	file fs.FileInfo // the socket that this endpoint bound
	done chan struct{}
}

// Listen begins to serve. Errors: Busy (the port is in use), NotPermitted (not
// a loopback address), Invalid.
func Listen(cfg Config) (*Server, error) {
	if cfg.Gatherer == nil {
		cfg.Gatherer = prometheus.DefaultGatherer
	}
	if cfg.Logger == nil {
		cfg.Logger = slog.New(slog.DiscardHandler)
	}
	l, err := listen(cfg.Addr, cfg.MetricsOnly, cfg.Replace)
	if err != nil {
		return nil, err
	}
	s := &Server{addr: l.Addr().String(), done: make(chan struct{})}
	if u, ok := l.(*net.UnixListener); ok {
		s.path, s.addr = s.addr, "unix:"+s.addr
		u.SetUnlinkOnClose(false) // Close removes only this endpoint's socket
		if s.file, err = os.Lstat(s.path); err != nil {
			l.Close()
			return nil, meta.E("listen", meta.IO, s.addr, err)
		}
	}
	s.http = http.Server{Handler: handler(cfg), ReadHeaderTimeout: headerWithin, IdleTimeout: idleFor, MaxHeaderBytes: 16 << 10,
		ErrorLog: slog.NewLogLogger(cfg.Logger.Handler(), slog.LevelDebug)}
	s.http.ConnState = (&idlers{}).state
	if cfg.MetricsOnly {
		s.http.ReadTimeout, s.http.WriteTimeout = headerWithin, openAnswers // requests have no body
		l = netutil.LimitListener(l, openConns)
	}
	go func() {
		defer close(s.done)
		if err := s.http.Serve(l); !errors.Is(err, http.ErrServerClosed) {
			cfg.Logger.Error("the admin endpoint stopped", "addr", s.addr, "error", err)
		}
	}()
	return s, nil
}

// idlers bounds the connections without a request: the connections that have waited
// longest are closed, so that callers with requests are answered, however many others
// only connect.
type idlers struct{ gate peer.Gate }

func (i *idlers) state(nc net.Conn, state http.ConnState) {
	switch state {
	case http.StateNew, http.StateIdle:
		i.gate.Enter(nc)
	default:
		i.gate.Leave(nc)
	}
}

// Addr is where the server listens, in the form of Config.Addr.
func (s *Server) Addr() string { return s.addr }

// Close stops serving; requests under way get until ctx ends. Close removes the socket,
// unless another process has put its own socket in the place.
func (s *Server) Close(ctx context.Context) error {
	err := s.http.Shutdown(ctx)
	if err != nil {
		err = errors.Join(err, s.http.Close())
	}
	<-s.done
	if s.path != "" {
		if now, serr := os.Lstat(s.path); serr == nil && os.SameFile(now, s.file) {
			err = errors.Join(err, os.Remove(s.path))
		}
	}
	return err
}

func listen(addr string, anywhere, replace bool) (net.Listener, error) {
	if path, ok := strings.CutPrefix(addr, "unix:"); ok {
		return listenUnix(path, replace)
	}
	host, _, err := net.SplitHostPort(addr)
	if err != nil {
		return nil, meta.E("listen", meta.Invalid, addr, err)
	}
	if ip := net.ParseIP(host); !anywhere && host != "localhost" && (ip == nil || !ip.IsLoopback()) {
		return nil, meta.E("listen", meta.NotPermitted, addr, errors.New("the admin endpoint has no authentication: use a loopback address or unix:/path"))
	}
	l, err := net.Listen("tcp", addr)
	if err != nil {
		kind := meta.Invalid // an address of another machine, or an unknown name
		if errors.Is(err, syscall.EADDRINUSE) {
			kind = meta.Busy
		}
		return nil, meta.E("listen", kind, addr, err)
	}
	return l, nil
}

// listenUnix replaces the socket of a dead process, and with replace also the socket of a
// living process.
func listenUnix(path string, replace bool) (net.Listener, error) {
	if c, err := net.Dial("unix", path); err == nil && replace {
		c.Close()
	} else if err == nil {
		c.Close()
		return nil, meta.E("listen", meta.Busy, "unix:"+path, errors.New("another process listens there"))
	}
	if st, err := os.Lstat(path); err == nil {
		if st.Mode().Type() != fs.ModeSocket {
			return nil, meta.E("listen", meta.Exists, "unix:"+path, errors.New("there is something else than a socket"))
		}
		if err := os.Remove(path); err != nil {
			return nil, meta.E("listen", meta.AccessDenied, "unix:"+path, err)
		}
	}
	l, err := net.Listen("unix", path)
	if err != nil {
		return nil, meta.E("listen", meta.Invalid, "unix:"+path, err)
	}
	if err := os.Chmod(path, 0o600); err != nil {
		l.Close()
		return nil, meta.E("listen", meta.AccessDenied, "unix:"+path, err)
	}
	return l, nil
}

func handler(cfg Config) http.Handler {
	mux := http.NewServeMux()
	var opts promhttp.HandlerOpts
	if cfg.MetricsOnly {
		opts.MaxRequestsInFlight = openAtOnce // more get 503
	}
	mux.Handle("GET /metrics", promhttp.HandlerFor(cfg.Gatherer, opts))
	if cfg.MetricsOnly {
		return mux
	}
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, _ *http.Request) { fmt.Fprintln(w, "ok") })
	mux.HandleFunc("GET /readyz", func(w http.ResponseWriter, _ *http.Request) {
		if cfg.Ready != nil {
			if err := cfg.Ready(); err != nil {
				http.Error(w, err.Error(), http.StatusServiceUnavailable)
				return
			}
		}
		fmt.Fprintln(w, "ok")
	})
	if !strings.HasPrefix(cfg.Addr, "unix:") { // every process of this machine can connect
		return mux
	}
	for pattern, h := range cfg.Routes {
		mux.HandleFunc(pattern, h)
	}
	mux.HandleFunc("/debug/pprof/", pprof.Index)
	mux.HandleFunc("/debug/pprof/cmdline", pprof.Cmdline)
	mux.HandleFunc("/debug/pprof/profile", pprof.Profile)
	mux.HandleFunc("/debug/pprof/symbol", pprof.Symbol)
	mux.HandleFunc("/debug/pprof/trace", pprof.Trace)
	return mux
}
