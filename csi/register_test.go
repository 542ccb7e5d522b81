package csi

import (
	"context"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"sync/atomic"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	registration "k8s.io/kubelet/pkg/apis/pluginregistration/v1"

	"penstock.io/penstock/csi/node"
	"penstock.io/penstock/meta"
)

func dial(t *testing.T, socket string) *grpc.ClientConn {
	t.Helper()
	conn, err := grpc.NewClient("unix://"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	return conn
}

// registered reads the gauge.
func registered(t *testing.T, r *prometheus.Registry) float64 {
	t.Helper()
	all, err := r.Gather()
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range all {
		if f.GetName() == "penstock_csi_registered" {
			return f.GetMetric()[0].GetGauge().GetValue()
		}
	}
	t.Fatal("nothing tells whether the kubelet took the driver")
	return 0
}

// TestKubelet plays the kubelet: the kubelet looks for sockets in its directory, asks for the
// driver's name, calls the driver at its address, and reports the result.
func TestKubelet(t *testing.T) {
	dir, err := os.MkdirTemp("", "reg") // t.TempDir is too long for a socket
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	registry, endpoint := filepath.Join(dir, "plugins_registry"), filepath.Join(dir, "csi.sock")
	if err := os.Mkdir(registry, 0o700); err != nil {
		t.Fatal(err)
	}
	// The leftover socket of a killed driver.
	stale, err := net.ListenUnix("unix", &net.UnixAddr{Name: filepath.Join(registry, Name+"-reg.sock"), Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	stale.SetUnlinkOnClose(false)
	stale.Close()

	metrics := prometheus.NewRegistry()
	s, err := Serve(Config{
		Endpoint: "unix://" + endpoint, Version: "1.2.3", Registration: registry, Metrics: metrics,
		Ready: func(context.Context) error { return nil }, Logger: slog.New(slog.DiscardHandler),
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close(context.Background()) })

	found, err := filepath.Glob(filepath.Join(registry, "*"))
	if err != nil || len(found) != 1 {
		t.Fatalf("in the kubelet's directory: %v, %v", found, err)
	}
	driver := registration.NewRegistrationClient(dial(t, found[0]))
	info, err := driver.GetInfo(t.Context(), &registration.InfoRequest{})
	if err != nil {
		t.Fatal(err)
	}
	if info.GetType() != registration.CSIPlugin || info.GetEndpoint() != endpoint || len(info.GetSupportedVersions()) != 1 || info.GetSupportedVersions()[0] != "1.0.0" {
		t.Errorf("the kubelet is told: %v", info)
	}
	plugin, err := csi.NewIdentityClient(dial(t, info.GetEndpoint())).GetPluginInfo(t.Context(), &csi.GetPluginInfoRequest{})
	if err != nil || plugin.GetName() != info.GetName() || plugin.GetVendorVersion() != "1.2.3" {
		t.Errorf("at the endpoint that the kubelet was told: %v, %v", plugin, err)
	}
	for _, taken := range []bool{true, false, true} {
		if _, err := driver.NotifyRegistrationStatus(t.Context(), &registration.RegistrationStatus{PluginRegistered: taken, Error: "no such node"}); err != nil {
			t.Fatal(err)
		}
		if got := registered(t, metrics) == 1; got != taken {
			t.Errorf("told %t, shown %t", taken, got)
		}
	}

	// An end in order is seen by the kubelet: the socket is gone.
	s.Close(t.Context())
	if found, _ := filepath.Glob(filepath.Join(registry, "*")); len(found) > 0 {
		t.Errorf("left in the kubelet's directory: %v", found)
	}
}

// TestMetricsOfWhoServes: a failed Serve, and a closed Serve, leave no metric in the registry, so
// that the next Serve can use the same registry. The late end of an earlier Serve takes nothing
// from the next Serve.
func TestMetricsOfWhoServes(t *testing.T) {
	dir, err := os.MkdirTemp("", "reg")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	metrics := prometheus.NewRegistry()
	serve := func(name, registration string) (*Server, error) {
		return Serve(Config{
			Endpoint: filepath.Join(dir, name), Registration: registration, Metrics: metrics,
			Ready: func(context.Context) error { return nil }, Logger: slog.New(slog.DiscardHandler),
		})
	}
	if err := os.WriteFile(filepath.Join(dir, "file"), nil, 0o644); err != nil {
		t.Fatal(err)
	}
	_, err = serve("file", "")
	if meta.KindOf(err) != meta.Invalid {
		t.Fatalf("served at a file: %v", err)
	}
	_, err = serve("csi.sock", filepath.Join(dir, "none"))
	if meta.KindOf(err) != meta.IO {
		t.Fatalf("registered in no directory: %v", err)
	}
	var before *Server
	for range 2 {
		s, err := serve("csi.sock", dir)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { s.Close(context.Background()) })
		if before != nil {
			before.Close(t.Context())
		}
		if all, err := metrics.Gather(); err != nil || len(all) == 0 {
			t.Errorf("%d metrics, %v", len(all), err)
		}
		s.Close(t.Context())
		if all, err := metrics.Gather(); err != nil || len(all) > 0 {
			t.Errorf("of a closed driver there are %d metrics, %v", len(all), err)
		}
		before = s
	}
}

// TestSocketOfTheDying: a socket belongs to its serving process, unless the process was killed
// and can't end.
func TestSocketOfTheDying(t *testing.T) {
	dir, err := os.MkdirTemp("", "reg")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	begin := func(name string, dying func(int) bool) error {
		s, err := Serve(Config{
			Endpoint: filepath.Join(dir, name), Version: "of the last", Registration: dir, Dying: dying,
			Ready: func(context.Context) error { return nil }, Logger: slog.New(slog.DiscardHandler),
		})
		if err == nil {
			t.Cleanup(func() { s.Close(context.Background()) })
		}
		return err
	}
	if err := begin("csi.sock", nil); err != nil {
		t.Fatal(err)
	}
	var asked []int
	alive := func(pid int) bool { asked = append(asked, pid); return false }
	for _, name := range []string{"csi.sock", "another.sock"} { // the new driver meets the other at the kubelet's
		for _, dying := range []func(int) bool{nil, alive} {
			if err := begin(name, dying); meta.KindOf(err) != meta.Busy {
				t.Errorf("%s, where somebody serves: %v", name, err)
			}
		}
	}
	if len(asked) != 2 || asked[0] != os.Getpid() || asked[1] != os.Getpid() {
		t.Errorf("asked of processes %v, this one is %d", asked, os.Getpid())
	}
	if err := begin("csi.sock", func(pid int) bool { return pid == os.Getpid() }); err != nil {
		t.Errorf("where one serves who is dying: %v", err)
	}
	if _, err := csi.NewIdentityClient(dial(t, filepath.Join(dir, "csi.sock"))).GetPluginInfo(t.Context(), &csi.GetPluginInfoRequest{}); err != nil {
		t.Error(err)
	}
}

// placed is a cluster that learns the place of its node.
type placed struct {
	node.Cluster
	at atomic.Value
}

func (p *placed) Here(context.Context) (string, error) { return p.at.Load().(string), nil }

// TestPlaceLearned: a node whose chunk server is started after the driver makes the kubelet ask
// again, once.
func TestPlaceLearned(t *testing.T) {
	dir, err := os.MkdirTemp("", "reg")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	cluster := new(placed)
	cluster.at.Store("")
	log := slog.New(slog.DiscardHandler)
	s, err := Serve(Config{
		Endpoint: filepath.Join(dir, "csi.sock"), Registration: dir, Logger: log,
		Node: node.New(node.Config{Cluster: cluster, Logger: log, Name: "node1", State: dir, PlaceEvery: 20 * time.Millisecond}),
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close(context.Background()) })
	asked := func() map[string]string {
		t.Helper()
		info, err := csi.NewNodeClient(dial(t, filepath.Join(dir, "csi.sock"))).NodeGetInfo(t.Context(), &csi.NodeGetInfoRequest{})
		if err != nil {
			t.Fatal(err)
		}
		return info.GetAccessibleTopology().GetSegments()
	}
	socket := filepath.Join(dir, Name+"-reg.sock")
	// next is the socket that follows another; the kernel may use the inode number again at once,
	// but the time differs.
	next := func(than os.FileInfo) os.FileInfo {
		t.Helper()
		for deadline := time.Now().Add(60 * time.Second); time.Now().Before(deadline); time.Sleep(time.Millisecond) {
			if now, err := os.Lstat(socket); err == nil && (than == nil || !now.ModTime().Equal(than.ModTime())) {
				return now
			}
		}
		t.Fatal("the kubelet is not made to ask again")
		return nil
	}
	first := next(nil)
	if at := asked(); len(at) > 0 {
		t.Errorf("the node stands at %v", at)
	}
	cluster.at.Store("/z/r/h")
	second := next(first)
	if _, err := registration.NewRegistrationClient(dial(t, socket)).GetInfo(t.Context(), &registration.InfoRequest{}, grpc.WaitForReady(true)); err != nil {
		t.Fatal(err)
	}
	if at := asked(); len(at) != 3 {
		t.Errorf("the node stands at %v", at)
	}
	time.Sleep(50 * time.Millisecond)
	if now, err := os.Lstat(socket); err != nil || !now.ModTime().Equal(second.ModTime()) {
		t.Errorf("the kubelet is made to ask once more: %v", err)
	}
	s.Close(t.Context())
	if _, err := os.Lstat(socket); err == nil {
		t.Error("the socket is left")
	}
}

// TestNoKubelet: a missing directory is an error at the start, and leaves no server.
func TestNoKubelet(t *testing.T) {
	dir, err := os.MkdirTemp("", "reg")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	endpoint := filepath.Join(dir, "csi.sock")
	_, err = Serve(Config{Endpoint: endpoint, Registration: filepath.Join(dir, "none"), Logger: slog.New(slog.DiscardHandler)})
	if meta.KindOf(err) != meta.IO {
		t.Errorf("no directory of the kubelet's: %v", err)
	}
	if _, err := net.Dial("unix", endpoint); err == nil {
		t.Error("the driver serves nevertheless")
	}
}
