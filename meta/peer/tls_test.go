package peer

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"io"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"penstock.io/penstock/meta"
)

func authority(t testing.TB, cluster string) *Authority {
	t.Helper()
	a, err := NewAuthority(cluster, time.Hour)
	if err != nil {
		t.Fatal(err)
	}
	return a
}

// issue makes a directory of credentials.
func issue(t testing.TB, a *Authority, id Identity) (*Credentials, string) {
	t.Helper()
	key, request, err := NewKey()
	if err != nil {
		t.Fatal(err)
	}
	chain, err := a.Sign(id, request)
	if err != nil {
		t.Fatal(err)
	}
	dir := filepath.Join(t.TempDir(), "c")
	if err := Save(dir, id, key, chain, a.CertPEM(), nil); err != nil {
		t.Fatal(err)
	}
	c, err := Load(dir, nil)
	if err != nil {
		t.Fatal(err)
	}
	return c, dir
}

// expired makes credentials whose certificate ended a while ago.
func expired(t *testing.T, a *Authority, id Identity) *Credentials {
	t.Helper()
	was := a.Life
	a.Life = 2 * time.Second
	c, _ := issue(t, a, id)
	a.Life = was
	c.checked = time.Now().Add(time.Hour)
	time.Sleep(time.Until(c.now.Load().leaf.NotAfter) + 10*time.Millisecond)
	return c
}

func TestMutualTLS(t *testing.T) {
	a := authority(t, "one")
	m, _ := issue(t, a, Identity{Cluster: "one", Role: Meta, Name: "m1"})
	c, _ := issue(t, a, Identity{Cluster: "one", Role: Client, Name: "pod-7"})
	nc, id, err := pair(t, "127.0.0.1:0", m, c)
	if err != nil {
		t.Fatal(err)
	}
	if id.String() != "client/pod-7" || id.Cluster != "one" || id.Anyone() || id.Expires.IsZero() {
		t.Fatalf("%+v", id)
	}
	st := nc.(*tls.Conn).ConnectionState()
	if st.Version != tls.VersionTLS13 {
		t.Errorf("TLS version %x", st.Version)
	}
}

// Neither side believes a peer without a valid certificate.
func TestStrangersAreRefused(t *testing.T) {
	a, other := authority(t, "one"), authority(t, "one")
	m, _ := issue(t, a, Identity{Cluster: "one", Role: Meta, Name: "m1"})
	c, _ := issue(t, a, Identity{Cluster: "one", Role: Client, Name: "c"})
	chunk, _ := issue(t, a, Identity{Cluster: "one", Role: ChunkServer, Name: "k"})
	forged, _ := issue(t, other, Identity{Cluster: "one", Role: Client, Name: "c"})
	forgedMeta, _ := issue(t, other, Identity{Cluster: "one", Role: Meta, Name: "m1"})
	elsewhere, _ := issue(t, a, Identity{Cluster: "two", Role: Client, Name: "c"})
	elsewhereMeta, _ := issue(t, a, Identity{Cluster: "two", Role: Meta, Name: "m"})
	for name, x := range map[string]struct{ server, client *Credentials }{
		"another authority's client":            {m, forged},
		"another authority's server":            {forgedMeta, c},
		"a client of another cluster":           {m, elsewhere},
		"a server of another cluster":           {elsewhereMeta, c},
		"an expired client":                     {m, expired(t, a, Identity{Cluster: "one", Role: Client, Name: "c"})},
		"an expired server":                     {expired(t, a, Identity{Cluster: "one", Role: Meta, Name: "m"}), c},
		"a chunk server in place of a meta one": {chunk, c},
		"a client in place of a server":         {c, c},
		"plain TCP to a server with TLS":        {m, Insecure()},
		"TLS to a plain server":                 {Insecure(), c},
	} {
		t.Run(name, func(t *testing.T) {
			if name == "plain TCP to a server with TLS" || name == "TLS to a plain server" {
				refusedPlain(t, x.server, x.client)
				return
			}
			_, id, err := pair(t, "127.0.0.1:0", x.server, x.client)
			if meta.KindOf(err) != meta.AccessDenied {
				t.Fatalf("%+v: %v", id, err)
			}
		})
	}
}

// refusedPlain: whichever side speaks TLS, the other side gets no byte across.
func refusedPlain(t *testing.T, server, client *Credentials) {
	l, err := Listen("127.0.0.1:0", server)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	got := make(chan error, 1)
	go func() {
		nc, err := l.Accept()
		if err == nil {
			var id Identity
			nc, id, err = Greet(context.Background(), nc)
			if err == nil && !id.Insecure {
				t.Errorf("a plain connection is %+v", id)
			}
			if nc != nil {
				nc.Close()
			}
		}
		got <- err
	}()
	nc, err := Dial(t.Context(), l.Addr().String(), client, Meta)
	if client.IsInsecure() {
		if err != nil {
			t.Fatal(err)
		}
		nc.Write([]byte("hello, who are you? let me in, please"))
		if err := <-got; meta.KindOf(err) != meta.AccessDenied {
			t.Fatal(err)
		}
		nc.Close()
		return
	}
	if err == nil {
		t.Fatal("TLS with a plain server")
	}
	<-got
}

// Strangers get in only where tokens are taken; a joiner believes only the authority in its
// token.
func TestJoiners(t *testing.T) {
	a, other := authority(t, "one"), authority(t, "one")
	for _, x := range []struct {
		server  *Authority
		joiners bool
		kind    meta.Kind
	}{{a, true, meta.KindOK}, {other, true, meta.AccessDenied}} {
		m, _ := issue(t, x.server, Identity{Cluster: "one", Role: Meta, Name: "m1"})
		l, err := ListenJoiners("127.0.0.1:0", m)
		if err != nil {
			t.Fatal(err)
		}
		got := make(chan Identity, 1)
		go func() {
			nc, err := l.Accept()
			if err != nil {
				return
			}
			nc, id, _ := Greet(context.Background(), nc)
			if nc != nil {
				nc.Write([]byte("x"))
				nc.Close()
			}
			got <- id
		}()
		nc, ca, err := DialStranger(t.Context(), l.Addr().String(), a.Fingerprint())
		if meta.KindOf(err) != x.kind {
			t.Fatalf("%v, want %v", err, x.kind)
		}
		if err == nil {
			if !bytes.Equal(ca, a.CertPEM()) {
				t.Error("another authority")
			}
			if id := <-got; id.Role != "" || id.Anyone() || id.String() != "stranger" {
				t.Errorf("%+v", id)
			}
			nc.Close()
		}
		l.Close()
	}
	// A chunk server's listener lets no stranger in.
	k, _ := issue(t, a, Identity{Cluster: "one", Role: ChunkServer, Name: "k"})
	l, err := Listen("127.0.0.1:0", k)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	go func() {
		nc, err := l.Accept()
		if err != nil {
			return
		}
		if _, id, err := Greet(context.Background(), nc); err == nil {
			t.Errorf("%+v was let in", id)
		}
	}()
	nc, err := tls.Dial("tcp", l.Addr().String(), &tls.Config{InsecureSkipVerify: true, NextProtos: []string{"penstock"}})
	if err == nil {
		_, err = nc.Read(make([]byte, 1))
	}
	if !Refused(err) {
		t.Fatal(err)
	}
}

// The next connection shows a certificate that is put in place while the process runs; unusable
// files change nothing.
func TestReload(t *testing.T) {
	a := authority(t, "one")
	id := Identity{Cluster: "one", Role: Client, Name: "c"}
	c, dir := issue(t, a, id)
	first := c.now.Load().leaf.SerialNumber
	key, request, _ := NewKey()
	chain, err := a.Sign(id, request)
	if err != nil {
		t.Fatal(err)
	}
	if err := c.Replace(key, chain); err != nil {
		t.Fatal(err)
	}
	second := c.current().leaf.SerialNumber
	if first.Cmp(second) == 0 {
		t.Fatal("the old certificate is still in use")
	}
	stranger, _ := a.Sign(Identity{Cluster: "one", Role: Admin, Name: "c"}, request)
	if err := c.Replace(key, stranger); meta.KindOf(err) != meta.AccessDenied {
		t.Fatalf("a certificate of another identity: %v", err)
	}
	if err := os.WriteFile(filepath.Join(dir, identityFile), []byte("nothing"), 0o600); err != nil {
		t.Fatal(err)
	}
	c.checked = time.Time{}
	if c.current().leaf.SerialNumber.Cmp(second) != 0 {
		t.Fatal("a broken file replaced a good one")
	}
	// A second process that finds the file in this state reports the damage.
	if _, err := Load(dir, nil); meta.KindOf(err) != meta.Corrupt {
		t.Fatal(err)
	}
	if _, err := Load(t.TempDir(), nil); meta.KindOf(err) != meta.NotFound {
		t.Fatal(err)
	}
	_, dir = issue(t, a, id)
	if err := os.Chmod(filepath.Join(dir, identityFile), 0o644); err != nil {
		t.Fatal(err)
	}
	if _, err := Load(dir, nil); meta.KindOf(err) != meta.AccessDenied {
		t.Fatalf("a key that everybody can read: %v", err)
	}
	if err := Save(dir, id, key, chain, a.CertPEM(), nil); meta.KindOf(err) != meta.Exists {
		t.Fatalf("overwritten: %v", err)
	}
}

func TestRenewAtHalfLife(t *testing.T) {
	a := authority(t, "one")
	c, _ := issue(t, a, Identity{Cluster: "one", Role: Client, Name: "c"})
	if left := time.Until(c.RenewAt()); left < 25*time.Minute || left > 35*time.Minute {
		t.Fatalf("a certificate of an hour is renewed in %v", left)
	}
}

// The authority's key is kept sealed; only its own cluster key opens the seal.
func TestSealedAuthority(t *testing.T) {
	a := authority(t, "one")
	key := bytes.Repeat([]byte{7}, SealKeySize)
	s, err := a.Seal(key)
	if err != nil {
		t.Fatal(err)
	}
	b, err := s.Open(key)
	if err != nil || b.Fingerprint() != a.Fingerprint() || b.Life != time.Hour {
		t.Fatal(b, err)
	}
	if _, err := s.Open(bytes.Repeat([]byte{8}, SealKeySize)); meta.KindOf(err) != meta.AccessDenied {
		t.Fatal(err)
	}
	der, _ := x509.MarshalPKCS8PrivateKey(a.key)
	if bytes.Contains(s.Key, der[len(der)-40:]) {
		t.Fatal("the key is there in the clear")
	}
	other := authority(t, "one")
	s.Cert = other.CertPEM()
	if _, err := s.Open(key); err == nil {
		t.Fatal("a key was taken for another certificate's")
	}
}

// The authority signs by its own records, not by the words of a request.
func TestRequestsDecideNothing(t *testing.T) {
	a := authority(t, "one")
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	want := Identity{Cluster: "one", Role: Client, Name: "c"}
	sly := Identity{Cluster: "one", Role: Admin, Name: "root"}
	request, err := x509.CreateCertificateRequest(rand.Reader, &x509.CertificateRequest{URIs: []*url.URL{sly.URI()}, DNSNames: []string{"meta"}}, key)
	if err != nil {
		t.Fatal(err)
	}
	chain, err := a.Sign(want, request)
	if err != nil {
		t.Fatal(err)
	}
	certs, _ := parseCerts(chain)
	if id, err := identityOf(certs[0]); err != nil || id.String() != "client/c" || certs[0].IsCA {
		t.Fatalf("%+v, %v", id, err)
	}
	for _, bad := range []Identity{{Cluster: "one", Role: "root", Name: "c"}, {Cluster: "one", Role: Client, Name: "a/b"}, {Cluster: "one", Role: Client}} {
		if _, err := a.Sign(bad, request); meta.KindOf(err) != meta.Invalid {
			t.Errorf("%+v: %v", bad, err)
		}
	}
	request[len(request)-5] ^= 1
	if _, err := a.Sign(want, request); meta.KindOf(err) != meta.Invalid {
		t.Errorf("a request whose signature is wrong: %v", err)
	}
}

func TestTokens(t *testing.T) {
	a := authority(t, "one")
	k := NewToken(ChunkServer, a.Fingerprint())
	got, err := ParseToken(" " + k.String() + "\n")
	if err != nil || got != k || !got.Matches(k.SecretHash()) {
		t.Fatal(got, err)
	}
	if NewToken(Client, a.Fingerprint()).Matches(k.SecretHash()) {
		t.Fatal("another token's secret matches")
	}
	for _, bad := range []string{"", "psj1", k.String()[1:], strings.Replace(k.String(), "chunkserver", "root", 1), k.String() + ".x", k.String()[:len(k.String())-2]} {
		_, err := ParseToken(bad)
		if meta.KindOf(err) != meta.Invalid {
			t.Errorf("%q: %v", bad, err)
		}
		if err != nil && len(bad) > 20 && strings.Contains(err.Error(), k.Secret) {
			t.Errorf("the secret stands in an error: %v", err)
		}
	}
}

// Silence must not hold a connection for ever.
func TestSilentStranger(t *testing.T) {
	a := authority(t, "one")
	m, _ := issue(t, a, Identity{Cluster: "one", Role: Meta, Name: "m1"})
	l, err := Listen("127.0.0.1:0", m)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	out, err := net.Dial("tcp", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer out.Close()
	in, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if _, _, err := Greet(ctx, in); meta.KindOf(err) != meta.AccessDenied {
		t.Fatal(err)
	}
	out.SetReadDeadline(time.Now().Add(time.Minute))
	if _, err := io.Copy(io.Discard, out); err != nil && !strings.Contains(err.Error(), "reset") {
		t.Fatal(err)
	}
}

func FuzzToken(f *testing.F) {
	f.Add(NewToken(Client, strings.Repeat("0", 64)).String())
	f.Fuzz(func(t *testing.T, s string) {
		k, err := ParseToken(s)
		if err != nil {
			return
		}
		if k.String() != strings.TrimSpace(s) {
			t.Fatalf("%q comes back as %q", s, k)
		}
	})
}

func FuzzRequest(f *testing.F) {
	a, err := NewAuthority("one", time.Hour)
	if err != nil {
		f.Fatal(err)
	}
	_, request, _ := NewKey()
	f.Add(request)
	f.Fuzz(func(t *testing.T, b []byte) {
		chain, err := a.Sign(Identity{Cluster: "one", Role: Client, Name: "c"}, b)
		if err != nil && meta.KindOf(err) != meta.Invalid {
			t.Fatal(err)
		}
		if err == nil {
			if certs, err := parseCerts(chain); err != nil || len(certs) != 2 {
				t.Fatal(err)
			}
		}
	})
}
