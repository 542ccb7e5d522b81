package csi

import (
	"context"
	"fmt"
	"path/filepath"

	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/grpc"
	registration "k8s.io/kubelet/pkg/apis/pluginregistration/v1"
)

// versionOfCSI is what the kubelet is told: it takes drivers of the first major
// version, which is all that it compares.
const versionOfCSI = "1.0.0"

// registrar makes the driver known to the kubelet of its machine, which watches a
// directory for sockets (k8s.io/kubelet/pkg/apis/pluginregistration/v1), asks each
// what it is, and tells it whether it was taken. A driver that was refused does
// nothing about it: the kubelet asks again by itself.
type registrar struct {
	registration.UnimplementedRegistrationServer
	s     *Server
	grpc  *grpc.Server
	taken prometheus.Gauge
}

// register begins to serve on DIR/csi.penstock.io-reg.sock. Errors: those of
// listen.
func (s *Server) register(dir string) error {
	r := &registrar{
		s: s, grpc: grpc.NewServer(),
		taken: prometheus.NewGauge(prometheus.GaugeOpts{Name: "penstock_csi_registered", Help: "1 once the kubelet took the driver."}),
	}
	l, err := listen(filepath.Join(dir, Name+"-reg.sock"))
	if err != nil {
		return err
	}
	if s.cfg.Metrics != nil {
		s.cfg.Metrics.MustRegister(r.taken)
	}
	registration.RegisterRegistrationServer(r.grpc, r)
	s.registrar = r
	go func() { // ends with Close
		if err := r.grpc.Serve(l); err != nil {
			s.fail(fmt.Errorf("serve %s: %w", l.Addr(), err))
		}
	}()
	return nil
}

// GetInfo tells the kubelet what this is and where it serves: the path must be
// the same one for the kubelet.
func (r *registrar) GetInfo(context.Context, *registration.InfoRequest) (*registration.PluginInfo, error) {
	return &registration.PluginInfo{Type: registration.CSIPlugin, Name: Name, Endpoint: r.s.path, SupportedVersions: []string{versionOfCSI}}, nil
}

// NotifyRegistrationStatus is told what came of it.
func (r *registrar) NotifyRegistrationStatus(_ context.Context, q *registration.RegistrationStatus) (*registration.RegistrationStatusResponse, error) {
	if q.GetPluginRegistered() {
		r.taken.Set(1)
		r.s.cfg.Logger.Info("the kubelet took the driver", "endpoint", r.s.path)
	} else {
		r.taken.Set(0)
		r.s.cfg.Logger.Warn("the kubelet did not take the driver; it will ask again", "err", q.GetError())
	}
	return &registration.RegistrationStatusResponse{}, nil
}
