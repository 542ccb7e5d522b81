package mirror

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"penstock.io/penstock/meta/peer"
	"penstock.io/penstock/test/program"
)

// newSecure is a cluster whose parts know each other by certificates, over TCP,
// with a metadata server and a chunk server.
func newSecure(t *testing.T) *machine {
	t.Helper()
	m := &machine{Rig: program.NewRig(t)}
	m.Secure()
	m.up = m.Run("meta", "--dir", filepath.Join(m.Dir, "m"), "--listen", m.Addr, "--credentials", m.Credentials("meta"))
	m.Until("the metadata server answers", func() error { _, err := m.Ctl("volume", "show", "root"); return err })
	m.Join("chunkserver", "c")
	m.Run("chunkserver", "--data", filepath.Join(m.Dir, "c"), "--cluster", m.Addr, "--listen", "127.0.0.1:0", "--credentials", m.Credentials("c"), "--topology", "/dc/r1/n1")
	var err error
	if m.creds, err = peer.Load(m.Credentials("admin"), nil); err != nil {
		t.Fatal(err)
	}
	m.c = m.dial()
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 2*time.Second)
		defer cancel()
		m.c.Close(ctx)
	})
	return m
}

// TestSecureClusters mirrors between two clusters that each believe only their own authority,
// with a certificate from a join token of the source's cluster. Certificates and addresses of the
// wrong cluster are refused, at the beginning and in the middle, with the reason.
func TestSecureClusters(t *testing.T) {
	t.Parallel()
	a, b := newSecure(t), newSecure(t)
	a.Must("volume", "create", "src")
	src := a.volume("src")
	w := newWriter(t, src, *seed+1100)
	w.steps(40)
	b.copier()
	east := b.Credentials("east")
	create := []string{"mirror", "create", "src", "dst", "--source-cluster", a.Addr, "--source-credentials"}
	for _, c := range []struct {
		what  string
		words []string
		args  []string
	}{
		{"a token of the target's own cluster", []string{"authority", a.Addr}, []string{east, "--source-token-file", b.JoinToken("admin")}},
		{"a certificate of the target's own cluster", []string{"authority", a.Addr}, []string{b.Credentials("admin")}},
		{"no certificate", []string{"no credentials", east}, []string{east}},
		{"a client without a grant", []string{"src"}, []string{east, "--source-token-file", a.JoinToken("client"), "--source-name", "west"}},
	} {
		if _, err := os.Stat(east); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("what was refused left credentials: %v", err)
		}
		_, err := b.Ctl(append(create, c.args...)...)
		if err == nil {
			t.Fatalf("%s was taken", c.what)
		}
		for _, word := range c.words {
			if !strings.Contains(err.Error(), word) {
				t.Errorf("%s: nothing of %q in: %v", c.what, word, err)
			}
		}
		if out, err := b.Ctl("volume", "show", "dst"); err == nil {
			t.Fatalf("%s: a volume was made: %s", c.what, out)
		}
	}
	a.Must("grant", "add", "west", "src", "--rights", "admin")
	b.Must(append(create, east)...)
	b.Must("mirror", "sync", "dst", "--wait")
	r := b.mirror("dst")
	same(t, src, b.volume("dst"), &r.Mirror)

	// The source's cluster is believed no more, and then believed again.
	ca := filepath.Join(east, "ca.pem")
	right, err := os.ReadFile(ca)
	w.must(err)
	wrong, err := os.ReadFile(filepath.Join(b.Credentials("admin"), "ca.pem"))
	w.must(err)
	w.must(os.WriteFile(ca, wrong, 0o600))
	b.Must("mirror", "sync", "dst")
	b.Until("the mirror says what is wrong", func() error {
		if e := b.mirror("dst").Error; !strings.Contains(e, "authority") {
			return errors.New(e)
		}
		return nil
	})
	w.steps(20)
	w.must(src.SyncAll(t.Context()))
	w.must(os.WriteFile(ca, right, 0o600))
	b.Must("mirror", "sync", "dst", "--wait")
	r = b.mirror("dst")
	same(t, src, b.volume("dst"), &r.Mirror)
	b.Must("mirror", "delete", "dst", "--yes")
	if l, err := a.operator().Snapshots(t.Context(), src.ID()); err != nil || len(l.Snapshots) != 0 {
		t.Errorf("snapshots of a mirror that is no more: %v %v", l, err)
	}
}
