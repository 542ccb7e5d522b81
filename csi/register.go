package csi

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"sync"

	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/grpc"
	registration "k8s.io/kubelet/pkg/apis/pluginregistration/v1"
)

// versionOfCSI is the version announced to the kubelet. The kubelet accepts drivers of the
// first major version, and compares nothing else.
const versionOfCSI = "1.0.0"

// registrar registers the driver with the kubelet of its machine. The kubelet watches a
// directory for sockets (k8s.io/kubelet/pkg/apis/pluginregistration/v1), calls GetInfo on each
// socket, and reports the result. After a refusal the driver does nothing: the kubelet calls
// again by itself.
type registrar struct {
	registration.UnimplementedRegistrationServer
	s     *Server
	dir   string
	taken prometheus.Gauge

	mu     sync.Mutex
	grpc   *grpc.Server // of the present socket
	closed bool

	stop  context.CancelFunc // of again
	again sync.WaitGroup
}

// register begins to serve on DIR/csi.penstock.io-reg.sock. Errors: as of Config.listen.
func (s *Server) register(dir string) error {
	r := &registrar{
		s: s, dir: dir,
		taken: prometheus.NewGauge(prometheus.GaugeOpts{Name: "penstock_csi_registered", Help: "1 once the kubelet took the driver."}),
	}
	if err := r.listen(); err != nil {
		return err
	}
	s.registrar = r
	ctx, stop := context.WithCancel(context.Background())
	r.stop = stop
	if n := s.cfg.Node; n != nil {
		r.again.Go(func() {
			for n.PlaceLearned(ctx) == nil {
				if err := r.anew(); err != nil {
					s.fail(err)
				}
			}
		})
	}
	return nil
}

// listen serves at a new socket.
func (r *registrar) listen() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.closed {
		return nil
	}
	l, err := r.s.cfg.listen(filepath.Join(r.dir, Name+"-reg.sock"))
	if err != nil {
		return err
	}
	g := grpc.NewServer()
	registration.RegisterRegistrationServer(g, r)
	r.grpc = g
	go func() { // ends with Stop
		if err := g.Serve(l); err != nil && !errors.Is(err, grpc.ErrServerStopped) {
			r.s.fail(fmt.Errorf("serve %s: %w", l.Addr(), err))
		}
		l.Close() // Serve may have come after Stop
	}()
	return nil
}

// anew makes the kubelet register the driver again, and so call NodeGetInfo again, by
// replacing the socket.
func (r *registrar) anew() error {
	r.mu.Lock()
	r.grpc.Stop()
	r.mu.Unlock()
	return r.listen()
}

// close stops the registration, and removes the socket.
func (r *registrar) close() {
	r.stop()
	r.again.Wait()
	r.mu.Lock()
	defer r.mu.Unlock()
	r.closed = true
	r.grpc.Stop()
}

// GetInfo returns the driver's type, name and socket. The driver and the kubelet must see the
// socket at the same path.
func (r *registrar) GetInfo(context.Context, *registration.InfoRequest) (*registration.PluginInfo, error) {
	return &registration.PluginInfo{Type: registration.CSIPlugin, Name: Name, Endpoint: r.s.path, SupportedVersions: []string{versionOfCSI}}, nil
}

// NotifyRegistrationStatus records whether the kubelet accepted the driver.
func (r *registrar) NotifyRegistrationStatus(_ context.Context, q *registration.RegistrationStatus) (*registration.RegistrationStatusResponse, error) {
	if q.GetPluginRegistered() {
		r.taken.Set(1)
		r.s.cfg.Logger.Info("the kubelet took the driver", "endpoint", r.s.path)
	} else {
		r.taken.Set(0)
		r.s.cfg.Logger.Warn("the kubelet refused the registration of the driver, and will ask again", "err", q.GetError())
	}
	return &registration.RegistrationStatusResponse{}, nil
}
