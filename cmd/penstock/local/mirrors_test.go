package local

import (
	"bytes"
	"log/slog"
	"os"
	"path/filepath"
	"testing"
	"time"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/peer"
	"penstock.io/penstock/test/port"
)

// TestSourceCertificateIsRenewed: the copier of a mirror renews the certificate for the source's
// cluster once half of the certificate's life is over, and not before.
func TestSourceCertificateIsRenewed(t *testing.T) {
	log := slog.New(slog.DiscardHandler)
	dir, err := os.MkdirTemp("", "lm") // short: the directory holds a socket
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	creds := filepath.Join(dir, "c")
	if _, err := Found(t.Context(), FoundConfig{Dir: filepath.Join(dir, "m"), Credentials: creds, Meta: "m", Life: time.Hour, Logger: log}); err != nil {
		t.Fatal(err)
	}
	addr := port.Free(t)
	own, err := peer.Load(filepath.Join(creds, "meta"), log)
	if err != nil {
		t.Fatal(err)
	}
	m, release, err := RunMeta(t.Context(), MetaConfig{Dir: filepath.Join(dir, "m"), Listen: addr, Creds: own, Logger: log})
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := m.Close(t.Context()); err != nil {
			t.Error(err)
		}
		if err := release(); err != nil {
			t.Error(err)
		}
	}()
	at := meta.MirrorSource{Meta: []string{addr}, Credentials: filepath.Join(creds, "admin")}
	dialled := func(now time.Time) []byte {
		t.Helper()
		c, err := dialSource(t.Context(), at, log, now)
		if err != nil {
			t.Fatal(err)
		}
		if err := c.Close(t.Context()); err != nil {
			t.Error(err)
		}
		b, err := os.ReadFile(filepath.Join(at.Credentials, "identity.pem"))
		if err != nil {
			t.Fatal(err)
		}
		return b
	}
	first := dialled(time.Now())
	if again := dialled(time.Now()); !bytes.Equal(first, again) {
		t.Error("a certificate that has just been signed was renewed")
	}
	if later := dialled(time.Now().Add(31 * time.Minute)); bytes.Equal(first, later) {
		t.Error("a certificate was not renewed after half of its life")
	}
}
