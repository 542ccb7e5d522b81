// Package csi is the driver of the Container Storage Interface, version 1.13
// (github.com/container-storage-interface/spec). The driver serves its services on a Unix
// socket. The Controller and Node services are packages of their own; this package has the
// Identity service, the socket, and the logs and counters of calls.
//
// The driver logs only ids, names and paths of a request, so that no secret reaches the log:
// neither a field marked secret by the specification nor a secret that a user wrote into a
// wrong field.
package csi

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"path"
	"strings"
	"sync"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"penstock.io/penstock/csi/controller"
	"penstock.io/penstock/csi/node"
	"penstock.io/penstock/meta"
)

// Name is the driver's name.
const Name = "csi.penstock.io"

// Config names the socket, the services on it, and the services' surroundings.
type Config struct {
	// Endpoint is the socket: unix:///path, unix:/path or a path.
	Endpoint string
	Version  string
	// Controller and Node are the services to serve; nil: the service is not served.
	Controller *controller.Server
	Node       *node.Server
	// Registration is the directory in which the kubelet looks for drivers
	// (/var/lib/kubelet/plugins_registry). The directory must exist. "": the driver does not
	// register with a kubelet.
	Registration string
	// Dying reports whether process pid was killed but has not ended. The driver replaces the
	// socket of such a process, although the socket still accepts connections. Nil: no process
	// counts as dying.
	Dying func(pid int) bool
	// Ready returns an error unless the cluster answers.
	Ready   func(context.Context) error
	Logger  *slog.Logger
	Metrics prometheus.Registerer // nil: metrics are not registered
}

// Server is the running driver.
type Server struct {
	csi.UnimplementedIdentityServer
	cfg       Config
	path      string
	grpc      *grpc.Server
	registrar *registrar // nil: without Registration
	failed    chan error
	calls     *prometheus.CounterVec
	seconds   *prometheus.HistogramVec
	// unregister is done by the first Close alone: a later one would take the metrics of the
	// next Server, which have the same names.
	unregister sync.Once
}

// socketPath reads an endpoint. Errors: Invalid.
func socketPath(endpoint string) (string, error) {
	p := endpoint
	for _, prefix := range []string{"unix://", "unix:"} {
		if rest, found := strings.CutPrefix(endpoint, prefix); found {
			p = rest
			break
		}
	}
	if !path.IsAbs(p) || path.Clean(p) != p {
		return "", meta.E("listen", meta.Invalid, endpoint, errors.New("the endpoint is a Unix socket, such as unix:///csi/csi.sock"))
	}
	return p, nil
}

// listen opens the socket. listen replaces the socket of a dead process, and the socket of a
// dying process: the kernel accepts connections on that socket until the last thread of the
// process has ended. Errors: Invalid, Busy (another process serves on the socket), IO.
func (c *Config) listen(socket string) (net.Listener, error) {
	const op = "listen"
	st, err := os.Lstat(socket)
	if err == nil {
		if st.Mode()&os.ModeSocket == 0 {
			return nil, meta.E(op, meta.Invalid, socket, errors.New("the path exists and is no socket: remove it, or give another --endpoint"))
		}
		if there, err := net.Dial("unix", socket); err == nil {
			pid := listener(there.(*net.UnixConn))
			there.Close()
			if c.Dying == nil || pid == 0 || !c.Dying(pid) {
				return nil, meta.E(op, meta.Busy, socket, errors.New("another process serves this socket: end that process, or give another --endpoint"))
			}
			c.Logger.Warn("the socket belongs to a killed process that can't end: this process replaces the socket", "socket", socket, "pid", pid)
		}
		if err := os.Remove(socket); err != nil {
			return nil, meta.E(op, meta.IO, socket, err)
		}
	}
	l, err := net.Listen("unix", socket)
	if err != nil {
		return nil, meta.E(op, meta.IO, socket, err)
	}
	if err := os.Chmod(socket, 0o600); err != nil {
		l.Close()
		return nil, meta.E(op, meta.IO, socket, err)
	}
	return l, nil
}

// listener returns the id of the process listening at the other end of c. 0: the id is
// unknown, or the process is in another PID namespace.
func listener(c *net.UnixConn) (pid int) {
	raw, err := c.SyscallConn()
	if err != nil {
		return 0
	}
	var cred *unix.Ucred
	cerr := raw.Control(func(fd uintptr) { cred, err = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED) })
	if errors.Join(cerr, err) != nil {
		return 0
	}
	return int(cred.Pid)
}

// Serve opens the socket and begins to serve. Metrics are registered from then on until Close.
// Errors: Invalid, Busy, IO.
func Serve(cfg Config) (*Server, error) {
	socket, err := socketPath(cfg.Endpoint)
	if err != nil {
		return nil, err
	}
	s := &Server{
		cfg: cfg, path: socket, failed: make(chan error, 1),
		calls:   prometheus.NewCounterVec(prometheus.CounterOpts{Name: "penstock_csi_calls_total", Help: "Calls of the Container Storage Interface, by method and code of the answer."}, []string{"method", "code"}),
		seconds: prometheus.NewHistogramVec(prometheus.HistogramOpts{Name: "penstock_csi_call_seconds", Help: "How long calls took.", Buckets: prometheus.ExponentialBuckets(0.001, 4, 9)}, []string{"method"}),
	}
	s.grpc = grpc.NewServer(grpc.UnaryInterceptor(s.observe))
	csi.RegisterIdentityServer(s.grpc, s)
	if cfg.Controller != nil {
		csi.RegisterControllerServer(s.grpc, cfg.Controller)
		if g := cfg.Controller.Groups(); g != nil {
			csi.RegisterGroupControllerServer(s.grpc, g)
		}
	}
	if cfg.Node != nil {
		csi.RegisterNodeServer(s.grpc, cfg.Node)
	}
	l, err := cfg.listen(socket)
	if err != nil {
		return nil, err
	}
	go func() { // ends with Close
		if err := s.grpc.Serve(l); err != nil {
			s.fail(fmt.Errorf("serve %s: %w", socket, err))
		}
	}()
	if cfg.Registration != "" {
		// Register last: the kubelet calls the driver as soon as the kubelet sees the socket.
		if err := s.register(cfg.Registration); err != nil {
			l.Close() // grpc.Serve may not own the listener yet
			s.grpc.Stop()
			return nil, err
		}
	}
	// After all that can fail, so that a failed Serve leaves no metric in the registry.
	if cfg.Metrics != nil {
		cfg.Metrics.MustRegister(s.metrics()...)
	}
	return s, nil
}

// metrics are the metrics that are registered as long as s serves.
func (s *Server) metrics() []prometheus.Collector {
	all := []prometheus.Collector{s.calls, s.seconds}
	if s.registrar != nil {
		all = append(all, s.registrar.taken)
	}
	return all
}

// fail records the reason why serving ended; only the first reason is kept.
func (s *Server) fail(err error) {
	select {
	case s.failed <- err:
	default:
	}
}

// Failed delivers the error that ended serving without Close.
func (s *Server) Failed() <-chan error { return s.failed }

// Close removes the socket watched by the kubelet, so that the kubelet unregisters the driver.
// Then Close waits for running calls, at most until ctx ends, stops the server, and unregisters
// its metrics.
func (s *Server) Close(ctx context.Context) {
	if s.registrar != nil {
		s.registrar.close()
	}
	done := make(chan struct{})
	go func() { s.grpc.GracefulStop(); close(done) }()
	select {
	case <-done:
	case <-ctx.Done():
		s.grpc.Stop()
		<-done
	}
	s.unregister.Do(func() {
		if s.cfg.Metrics == nil {
			return
		}
		for _, m := range s.metrics() {
			s.cfg.Metrics.Unregister(m)
		}
	})
}

// The interfaces select the fields of requests that observe may log.
type (
	ofVolume interface{ GetVolumeId() string }
	ofName   interface{ GetName() string }
	ofTarget interface{ GetTargetPath() string }
	ofStage  interface{ GetStagingTargetPath() string }
	ofShot   interface{ GetSnapshotId() string }
	ofGroup  interface{ GetGroupSnapshotId() string }
)

// observe counts and logs a call.
func (s *Server) observe(ctx context.Context, request any, info *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (any, error) {
	began := time.Now()
	answer, err := handler(ctx, request)
	took := time.Since(began)
	method, code := path.Base(info.FullMethod), status.Code(err)
	s.calls.WithLabelValues(method, code.String()).Inc()
	s.seconds.WithLabelValues(method).Observe(took.Seconds())
	attrs := []any{"method", method, "code", code.String(), "ms", took.Milliseconds()}
	if q, is := request.(ofVolume); is {
		attrs = append(attrs, "volume", q.GetVolumeId())
	}
	if q, is := request.(ofShot); is {
		attrs = append(attrs, "snapshot", q.GetSnapshotId())
	}
	if q, is := request.(ofGroup); is {
		attrs = append(attrs, "group", q.GetGroupSnapshotId())
	}
	if q, is := request.(ofName); is {
		attrs = append(attrs, "name", q.GetName())
	}
	if q, is := request.(ofStage); is {
		attrs = append(attrs, "staging", q.GetStagingTargetPath())
	}
	if q, is := request.(ofTarget); is {
		attrs = append(attrs, "target", q.GetTargetPath())
	}
	switch code {
	case codes.Internal, codes.Unknown, codes.DataLoss, codes.Unavailable:
		s.cfg.Logger.Warn("csi call failed", append(attrs, "err", err)...)
	case codes.OK:
		s.cfg.Logger.Debug("csi call", attrs...)
	default:
		s.cfg.Logger.Debug("csi call refused", append(attrs, "err", err)...)
	}
	return answer, err
}

// GetPluginInfo names the driver.
func (s *Server) GetPluginInfo(context.Context, *csi.GetPluginInfoRequest) (*csi.GetPluginInfoResponse, error) {
	return &csi.GetPluginInfoResponse{Name: Name, VendorVersion: s.cfg.Version}, nil
}

// GetPluginCapabilities lists the capabilities of the driver as a whole.
func (s *Server) GetPluginCapabilities(context.Context, *csi.GetPluginCapabilitiesRequest) (*csi.GetPluginCapabilitiesResponse, error) {
	service := func(t csi.PluginCapability_Service_Type) *csi.PluginCapability {
		return &csi.PluginCapability{Type: &csi.PluginCapability_Service_{Service: &csi.PluginCapability_Service{Type: t}}}
	}
	r := &csi.GetPluginCapabilitiesResponse{Capabilities: []*csi.PluginCapability{
		service(csi.PluginCapability_Service_VOLUME_ACCESSIBILITY_CONSTRAINTS),
		{Type: &csi.PluginCapability_VolumeExpansion_{VolumeExpansion: &csi.PluginCapability_VolumeExpansion{Type: csi.PluginCapability_VolumeExpansion_ONLINE}}},
	}}
	if s.cfg.Controller != nil {
		r.Capabilities = append(r.Capabilities, service(csi.PluginCapability_Service_CONTROLLER_SERVICE))
		if s.cfg.Controller.Groups() != nil {
			r.Capabilities = append(r.Capabilities, service(csi.PluginCapability_Service_GROUP_CONTROLLER_SERVICE))
		}
	}
	return r, nil
}

// probeWait bounds how long Probe waits for the cluster.
const probeWait = 5 * time.Second

// Probe reports whether the driver is ready. If the cluster does not answer within probeWait,
// the driver is healthy but not ready.
func (s *Server) Probe(ctx context.Context, _ *csi.ProbeRequest) (*csi.ProbeResponse, error) {
	ctx, cancel := context.WithTimeout(ctx, probeWait)
	defer cancel()
	err := s.cfg.Ready(ctx)
	if err != nil {
		s.cfg.Logger.Warn("the cluster does not answer", "err", err)
	}
	return &csi.ProbeResponse{Ready: wrapperspb.Bool(err == nil)}, nil
}
