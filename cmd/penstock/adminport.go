package main

import (
	"context"
	"log/slog"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/spf13/cobra"

	"penstock.io/penstock/cmd/penstock/admin"
)

// adminPort is the --admin flag of a role: where it serves metrics, health and
// profiles.
type adminPort struct{ addr string }

// noAdmin switches it off.
const noAdmin = "none"

func (a *adminPort) flag(cmd *cobra.Command, standard string) {
	cmd.Flags().StringVar(&a.addr, "admin", "", "address of /metrics, /healthz, /readyz and /debug/pprof: unix:/path, a loopback host:port, or none (default "+standard+")")
}

// serve begins to serve at the address, or else at standard. It gives the
// address, and what stops it.
func (a *adminPort) serve(ctx context.Context, log *slog.Logger, standard string, g prometheus.Gatherer, ready func() error) (addr string, stop func(), err error) {
	addr = a.addr
	if addr == "" {
		addr = standard
	}
	if addr == noAdmin {
		return addr, func() {}, nil
	}
	if path, ok := strings.CutPrefix(addr, "unix:"); ok && a.addr == "" {
		if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
			return addr, nil, err
		}
	}
	s, err := admin.Listen(admin.Config{Addr: addr, Gatherer: g, Ready: ready, Logger: log})
	if err != nil {
		return addr, nil, err
	}
	return s.Addr(), func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), closeTimeout)
		defer cancel()
		if err := s.Close(ctx); err != nil {
			log.Debug("the admin endpoint did not stop in order", "error", err)
		}
		if path, ok := strings.CutPrefix(addr, "unix:"); ok {
			os.Remove(path)
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
