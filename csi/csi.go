// Package csi is the driver of the Container Storage Interface, version 1.13
// (github.com/container-storage-interface/spec): its services on a Unix socket.
// Controller and Node are packages of their own; the Identity service, the
// socket, logs and counters of calls are here.
//
// Nothing of a request but ids, names and paths is ever logged, so that no secret
// can be: not those that the specification marks, nor those that somebody wrote
// where they don't belong.
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

// Name is the driver's.
const Name = "csi.penstock.io"

// Config says what is served.
type Config struct {
	// Endpoint is the socket: unix:///path, unix:/path or a path.
	Endpoint string
	Version  string
	// Controller and Node are served if they are not nil.
	Controller *controller.Server
	Node       *node.Server
	// Registration is the directory in which the kubelet looks for drivers
	// (/var/lib/kubelet/plugins_registry); it must exist. "": none looks.
	Registration string
	// Dying tells that a process was killed, and is not gone: its sockets are
	// replaced, though they look as if somebody served there. Nil: of nobody.
	Dying func(pid int) bool
	// Ready tells whether the cluster answers.
	Ready   func(context.Context) error
	Logger  *slog.Logger
	Metrics prometheus.Registerer // nil: nobody counts
}

// Server serves.
type Server struct {
	csi.UnimplementedIdentityServer
	cfg       Config
	path      string
	grpc      *grpc.Server
	registrar *registrar // nil: no kubelet looks
	failed    chan error
	calls     *prometheus.CounterVec
	seconds   *prometheus.HistogramVec
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

// listen opens the socket; one that a dead process left behind is replaced, and one
// of a process that is dying: the kernel takes connections there as long as one of
// its threads can't end. Errors: Invalid, Busy (somebody answers there), IO.
func (c *Config) listen(socket string) (net.Listener, error) {
	const op = "listen"
	st, err := os.Lstat(socket)
	if err == nil {
		if st.Mode()&os.ModeSocket == 0 {
			return nil, meta.E(op, meta.Invalid, socket, errors.New("something that is no socket is there"))
		}
		if there, err := net.Dial("unix", socket); err == nil {
			pid := listener(there.(*net.UnixConn))
			there.Close()
			if c.Dying == nil || pid == 0 || !c.Dying(pid) {
				return nil, meta.E(op, meta.Busy, socket, errors.New("another process serves there"))
			}
			c.Logger.Warn("the socket of a process that was killed and can't end is replaced", "socket", socket, "pid", pid)
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

// listener is the process that listens where a connection leads; 0: it is not known,
// or in another name space of processes.
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

// Serve begins to serve.
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
	if cfg.Metrics != nil {
		cfg.Metrics.MustRegister(s.calls, s.seconds)
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
		// Last: the kubelet calls as soon as it sees the socket.
		if err := s.register(cfg.Registration); err != nil {
			l.Close() // Serve may not have seen it yet
			s.grpc.Stop()
			return nil, err
		}
	}
	return s, nil
}

// fail notes why serving ended; one reason is enough.
func (s *Server) fail(err error) {
	select {
	case s.failed <- err:
	default:
	}
}

// Failed says why serving ended without Close.
func (s *Server) Failed() <-chan error { return s.failed }

// Close tells the kubelet that the driver is gone, by removing the socket that it
// watches; lets calls under way end, until ctx does, and stops.
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
}

// told are the fields of requests that may be logged.
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

// GetPluginCapabilities tells what the driver as a whole can do.
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

// probeWait bounds how long the cluster may take to answer a probe.
const probeWait = 5 * time.Second

// Probe tells whether the driver and its cluster are there. A cluster that does
// not answer is not ready; the driver is healthy.
func (s *Server) Probe(ctx context.Context, _ *csi.ProbeRequest) (*csi.ProbeResponse, error) {
	ctx, cancel := context.WithTimeout(ctx, probeWait)
	defer cancel()
	err := s.cfg.Ready(ctx)
	if err != nil {
		s.cfg.Logger.Warn("the cluster does not answer", "err", err)
	}
	return &csi.ProbeResponse{Ready: wrapperspb.Bool(err == nil)}, nil
}
