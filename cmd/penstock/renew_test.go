package main

import (
	"bytes"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	penstock "penstock.io/penstock"
	"penstock.io/penstock/cmd/penstock/local"
	"penstock.io/penstock/meta/peer"
	"penstock.io/penstock/test/port"
)

// TestAdministratorsAreRenewed: each way in which commands reach a cluster renews the
// administrator's certificate after half of its life, and not before.
func TestAdministratorsAreRenewed(t *testing.T) {
	log := slog.New(slog.DiscardHandler)
	dir, err := os.MkdirTemp("", "rn") // short: the path of a socket is bounded
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	creds := filepath.Join(dir, "c")
	if _, err := local.Found(t.Context(), local.FoundConfig{Dir: filepath.Join(dir, "m"), Credentials: creds, Meta: "m", Life: time.Hour, Logger: log}); err != nil {
		t.Fatal(err)
	}
	own, err := peer.Load(filepath.Join(creds, "meta"), log)
	if err != nil {
		t.Fatal(err)
	}
	addr := port.Free(t)
	m, release, err := local.RunMeta(t.Context(), local.MetaConfig{Dir: filepath.Join(dir, "m"), Listen: addr, Creds: own, Logger: log})
	if err != nil {
		t.Fatal(err)
	}
	closed := sync.OnceFunc(func() {
		if err := m.Close(t.Context()); err != nil {
			t.Error(err)
		}
		if err := release(); err != nil {
			t.Error(err)
		}
	})
	defer closed()
	admin := filepath.Join(creds, "admin")
	identity := func() []byte {
		t.Helper()
		b, err := os.ReadFile(filepath.Join(admin, "identity.pem"))
		if err != nil {
			t.Fatal(err)
		}
		return b
	}
	var ahead time.Duration
	w := where{cluster: []string{addr}, now: func() time.Time { return time.Now().Add(ahead) }}
	w.credentials.credentials = admin
	for name, use := range map[string]func() error{
		"dial": func() error {
			s, err := w.dial(t.Context())
			if err != nil {
				return err
			}
			return s.Close(t.Context())
		},
		"connect": func() error {
			c, err := w.connect(t.Context())
			if err != nil {
				return err
			}
			return c.Close(t.Context())
		},
		"withMirrors": func() error {
			return w.withMirrors(t.Context(), func(*penstock.Client, penstock.Mirrors) error { return nil })
		},
	} {
		for _, later := range []time.Duration{0, 31 * time.Minute} {
			ahead = later
			before := identity()
			if err := use(); err != nil {
				t.Fatalf("%s: %v", name, err)
			}
			if renewed := !bytes.Equal(before, identity()); renewed != (later > 0) {
				t.Errorf("%s, %v later: the certificate was renewed: %v", name, later, renewed)
			}
		}
	}
	// An expired certificate is reported as such.
	closed()
	ahead = 2 * time.Hour
	if _, err := w.dial(t.Context()); err == nil || !strings.Contains(err.Error(), "ended at") || !strings.Contains(err.Error(), "join-token --role admin") {
		t.Errorf("with a certificate that has ended: %v", err)
	}
}
