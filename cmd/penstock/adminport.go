package main

import (
	"context"
	"log/slog"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/spf13/cobra"

	"penstock.io/penstock/cmd/penstock/admin"
	"penstock.io/penstock/meta"
)

// adminPort holds the flags --admin and --metrics of a role: the addresses of metrics, health
// and profiles, and of metrics alone.
type adminPort struct {
	addr    string
	metrics string // address of /metrics alone; "": none
	replace bool   // takes a socket over from its listener
	// patience bounds the wait for a port in use.
	patience time.Duration
	routes   map[string]http.HandlerFunc // more routes of --admin
}

// portLook is the time between two tries to listen at a port in use.
const portLook = 250 * time.Millisecond

// noAdmin is the value of --admin that switches the endpoint off.
const noAdmin = "none"

func (a *adminPort) flag(cmd *cobra.Command, standard string) {
	cmd.Flags().StringVar(&a.addr, "admin", "", "address of /metrics, /healthz and /readyz, and of /debug/pprof on a socket: unix:/path, a loopback host:port, or none (default "+standard+")")
}

// openFlag adds the flag --metrics. A mount has no such flag: a mount's successor starts
// beside the mount and would find the port in use.
func (a *adminPort) openFlag(cmd *cobra.Command) {
	cmd.Flags().StringVar(&a.metrics, "metrics", "", "host:port that serves /metrics, and nothing else, without credentials to every client that reaches the port (default: none)")
}

// serve starts serving at the addresses of the flags; standard is the default for --admin.
// serve returns the address of --admin and a function to stop both endpoints.
func (a *adminPort) serve(ctx context.Context, log *slog.Logger, standard string, g prometheus.Gatherer, ready func() error) (addr string, stop func(), err error) {
	stopMetrics := func() {}
	if a.metrics != "" {
		at, stop, err := a.listen(ctx, admin.Config{Addr: a.metrics, MetricsOnly: true, Gatherer: g, Logger: log})
		if err != nil {
			return a.metrics, nil, err
		}
		log.Info("metrics are served", "address", at)
		stopMetrics = stop
	}
	addr = a.addr
	if addr == "" {
		addr = standard
	}
	if addr == noAdmin {
		return addr, stopMetrics, nil
	}
	if path, ok := strings.CutPrefix(addr, "unix:"); ok && a.addr == "" {
		if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
			stopMetrics()
			return addr, nil, err
		}
	}
	at, stopAdmin, err := a.listen(ctx, admin.Config{Addr: addr, Gatherer: g, Ready: ready, Replace: a.replace, Logger: log, Routes: a.routes})
	if err != nil {
		stopMetrics()
		return addr, nil, err
	}
	return at, func() {
		stopAdmin()
		stopMetrics()
	}, nil
}

// listen starts an endpoint, and returns its address and a function to stop the endpoint.
// listen waits up to patience for a port in use.
func (a *adminPort) listen(ctx context.Context, cfg admin.Config) (addr string, stop func(), err error) {
	until := time.Now().Add(a.patience)
	s, err := admin.Listen(cfg)
	if meta.KindOf(err) == meta.Busy && a.patience > 0 {
		cfg.Logger.Warn("the admin endpoint's port is waited for", "at most", a.patience, "error", err)
	}
	for ; meta.KindOf(err) == meta.Busy && time.Now().Before(until) && ctx.Err() == nil; s, err = admin.Listen(cfg) {
		select {
		case <-ctx.Done():
		case <-time.After(portLook):
		}
	}
	if err != nil {
		return cfg.Addr, nil, err
	}
	return s.Addr(), func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), closeTimeout)
		defer cancel()
		if err := s.Close(ctx); err != nil {
			cfg.Logger.Debug("the admin endpoint did not stop in order", "error", err)
		}
	}, nil
}

// adminSocket returns the default address of --admin for a role with a data directory.
func adminSocket(dir string) string {
	if abs, err := filepath.Abs(dir); err == nil {
		dir = abs
	}
	return "unix:" + filepath.Join(dir, "admin.sock")
}

// mountSocket returns the default address of --admin for a mount, which has no data directory.
func mountSocket() string {
	return "unix:" + filepath.Join(noteDir(), "mount-"+strconv.Itoa(os.Getpid())+".sock")
}
