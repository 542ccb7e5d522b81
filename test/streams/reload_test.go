package streams

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"math/big"
	"net"
	"net/http"
	"os"
	"strings"
	"testing"
	"time"
)

// shown returns the serial number of the certificate that a server shows to a new connection.
func (g *guarded) shown(addr string) *big.Int {
	g.t.Helper()
	config := g.trust("")
	config.ServerName = "localhost"
	c, err := tls.Dial("tcp", addr, config)
	if err != nil {
		g.t.Fatal(err)
	}
	defer c.Close()
	return c.ConnectionState().PeerCertificates[0].SerialNumber
}

// read reads a file.
func (g *guarded) read(name string) []byte {
	g.t.Helper()
	b, err := os.ReadFile(name)
	if err != nil {
		g.t.Fatal(err)
	}
	return b
}

// TestReload: certificates and the file of users are replaced while clients have connections. New
// connections see the new files. Files that can't be used change nothing, and the log tells of
// them. The connections go on.
func TestReload(t *testing.T) {
	g := newGuarded(t)
	addrs := []string{g.kafka, g.ingest}
	old, cert := g.dial(g.trust("")), g.dial(g.trust("loader"))
	if err := errors.Join(old.login("ann", "secret"), old.serves(), cert.serves()); err != nil {
		t.Fatal(err)
	}
	g.Must("stream", "create", "/v/t", "--no-table")
	g.Until("the mount serves", func() error { return os.Chmod(g.mnt+"/v/t", 0o777) })
	call := g.open(g.trust(""), "ann", "secret", "/v/t")
	goesOn := func(when string) {
		t.Helper()
		if err := errors.Join(old.serves(), cert.serves(), appendOne(call)); err != nil {
			t.Errorf("%s: a connection from before has ended: %v", when, err)
		}
	}
	first := g.shown(g.kafka)
	// stays waits until the servers have looked at the files, and the log tells of them.
	stays := func(what, tells string, want *big.Int) {
		t.Helper()
		g.Until("the log tells of "+what, func() error {
			for _, addr := range addrs {
				if got := g.shown(addr); got.Cmp(want) != 0 {
					t.Fatalf("with %s, %s shows certificate %v in place of %v", what, addr, got, want)
				}
			}
			if out := g.up.Output(); !strings.Contains(out, "goes on with the earlier certificate") || !strings.Contains(out, tells) {
				return fmt.Errorf("the log has %s", out)
			}
			return nil
		})
		goesOn("with " + what)
	}
	shows := func(want *big.Int) {
		t.Helper()
		for _, addr := range addrs {
			g.Until("new connections see the new certificate", func() error {
				if got := g.shown(addr); got.Cmp(want) != 0 {
					return fmt.Errorf("%s shows certificate %v in place of %v", addr, got, want)
				}
				return nil
			})
		}
		goesOn("with a new certificate")
	}
	next := &x509.Certificate{IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)}, DNSNames: []string{"localhost"}}
	g.make("next", next)
	g.replace(g.file("server.crt"), g.read(g.file("next.crt")))
	stays("a certificate without its key", "does not match", first)
	g.replace(g.file("server.key"), g.read(g.file("next.key")))
	shows(next.SerialNumber)
	g.replace(g.file("server.crt"), []byte("damage"))
	stays("a damaged certificate", "PEM", next.SerialNumber)
	if err := os.Remove(g.file("server.crt")); err != nil {
		t.Fatal(err)
	}
	stays("no certificate", "no such file", next.SerialNumber)
	last := &x509.Certificate{IPAddresses: next.IPAddresses, DNSNames: next.DNSNames}
	g.make("server", last)
	shows(last.SerialNumber)

	// The authority of clients: certificates of the former authority log nobody in any more.
	other := newAuthority(t)
	g.replace(g.file("ca.crt"), g.read(other.file("ca.crt")))
	g.Until("a certificate of the former authority is refused", func() error {
		if err := g.dial(g.trust("loader")).serves(); err == nil {
			return errors.New("it logs in")
		}
		return nil
	})
	goesOn("with another authority of clients")

	// A damaged file of users: nobody can log in; who has logged in goes on.
	users := g.read(g.users)
	g.replace(g.users, []byte("damage"))
	damaged := time.Now()
	if err := g.dial(g.trust("")).login("ann", "secret"); err == nil {
		t.Error("a client logs in by a damaged file of users")
	}
	if code := g.status(g.trust(""), "ann", "secret"); code != http.StatusServiceUnavailable {
		t.Errorf("with a damaged file of users, HTTP says %d", code)
	}
	g.Until("the log tells of the file of users", func() error {
		if out := g.up.Output(); !strings.Contains(out, "could not log in") || !strings.Contains(out, g.users) {
			return fmt.Errorf("the log has %s", out)
		}
		return nil
	})
	if time.Since(damaged) > 15*time.Second { // who has logged in goes on for 30 s
		t.Log("the machine is too slow to see that open connections go on")
		return
	}
	goesOn("with a damaged file of users")
	g.replace(g.users, users)
	if err := g.dial(g.trust("")).login("ann", "secret"); err != nil {
		t.Error("a client can't log in by the repaired file of users:", err)
	}
	g.password("new", "secret", "--uid", "1002", "--gid", "1002")
	if err := g.dial(g.trust("")).login("new", "secret"); err != nil {
		t.Error("a new user can't log in:", err)
	}
	goesOn("with a new user")
}
