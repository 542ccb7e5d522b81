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

// adminPort are the flags --admin and --metrics of a role: where it serves metrics,
// health and profiles, and where metrics alone.
type adminPort struct {
	addr    string
	metrics string // address of /metrics alone; "": none
	replace bool   // whoever listens there on a socket
	// patience is how long is waited for a port that somebody else has.
	patience time.Duration
	routes   map[string]http.HandlerFunc // beside
}

// portLook is the time between two looks at a port that somebody else has.
const portLook = 250 * time.Millisecond

// noAdmin switches it off.
const noAdmin = "none"

func (a *adminPort) flag(cmd *cobra.Command, standard string) {
	cmd.Flags().StringVar(&a.addr, "admin", "", "address of /metrics, /healthz and /readyz, and of /debug/pprof on a socket: unix:/path, a loopback host:port, or none (default "+standard+")")
}

// openFlag is the --metrics flag, of roles that are not started beside each other: a
// mount's successor would find the port taken.
func (a *adminPort) openFlag(cmd *cobra.Command) {
	cmd.Flags().StringVar(&a.metrics, "metrics", "", "host:port of /metrics and nothing else, for whoever reaches it: it asks nobody who they are (default: none)")
}

// serve begins to serve at the addresses, or else at standard. It gives the one of
// --admin, and what stops both.
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

// listen begins to serve; it gives where, and what stops it.
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

// adminSocket is where a role serves in its data directory.
func adminSocket(dir string) string {
	if abs, err := filepath.Abs(dir); err == nil {
		dir = abs
	}
	return "unix:" + filepath.Join(dir, "admin.sock")
}

// mountSocket is where a mount serves, which has no data directory.
func mountSocket() string {
	return "unix:" + filepath.Join(noteDir(), "mount-"+strconv.Itoa(os.Getpid())+".sock")
}
