package streams

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"math/big"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"
	saslplain "github.com/twmb/franz-go/pkg/sasl/plain"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	"penstock.io/penstock/cmd/penstock/spawn"
	"penstock.io/penstock/stream/ingest"
	"penstock.io/penstock/test/program"
)

// authority makes certificates for a test.
type authority struct {
	t    *testing.T
	dir  string
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
}

func newAuthority(t *testing.T) *authority {
	a := &authority{t: t, dir: t.TempDir()}
	a.make("ca", &x509.Certificate{IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign})
	return a
}

// file returns the path of a file of the authority.
func (a *authority) file(name string) string { return filepath.Join(a.dir, name) }

// make makes NAME.crt and NAME.key, with the common name NAME.
func (a *authority) make(name string, c *x509.Certificate) {
	a.t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		a.t.Fatal(err)
	}
	c.SerialNumber, c.Subject = big.NewInt(time.Now().UnixNano()), pkix.Name{CommonName: name}
	c.NotBefore, c.NotAfter = time.Now().Add(-time.Hour), time.Now().Add(time.Hour)
	if a.cert == nil {
		a.cert, a.key = c, key
	}
	der, err := x509.CreateCertificate(rand.Reader, c, a.cert, key.Public(), a.key)
	if err != nil {
		a.t.Fatal(err)
	}
	secret, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		a.t.Fatal(err)
	}
	for file, block := range map[string]*pem.Block{".crt": {Type: "CERTIFICATE", Bytes: der}, ".key": {Type: "PRIVATE KEY", Bytes: secret}} {
		if err := os.WriteFile(a.file(name+file), pem.EncodeToMemory(block), 0o600); err != nil {
			a.t.Fatal(err)
		}
	}
	if c == a.cert {
		if a.cert, err = x509.ParseCertificate(der); err != nil {
			a.t.Fatal(err)
		}
	}
}

// trust returns the TLS configuration of a client; the name of the client's certificate may be
// empty.
func (a *authority) trust(name string) *tls.Config {
	a.t.Helper()
	c := &tls.Config{RootCAs: x509.NewCertPool()}
	c.RootCAs.AddCert(a.cert)
	if name != "" {
		pair, err := tls.LoadX509KeyPair(a.file(name+".crt"), a.file(name+".key"))
		if err != nil {
			a.t.Fatal(err)
		}
		c.Certificates = []tls.Certificate{pair}
	}
	return c
}

// guarded is a machine whose gateway has users and TLS: ann (user id 1000), bob (1001), and loader
// (1000), who has a certificate and no password.
type guarded struct {
	*machine
	*authority
	users string
	mnt   string
}

func newGuarded(t *testing.T) *guarded {
	a := newAuthority(t)
	a.make("server", &x509.Certificate{IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)}, DNSNames: []string{"localhost"}})
	for _, name := range []string{"loader", "stranger"} {
		a.make(name, &x509.Certificate{ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}})
	}
	g := &guarded{authority: a, users: a.file("users.json"), mnt: filepath.Join(t.TempDir(), "m")}
	if err := os.Mkdir(g.mnt, 0o755); err != nil {
		t.Fatal(err)
	}
	g.password("ann", "secret", "--uid", "1000", "--gid", "1000")
	g.password("bob", "secret", "--uid", "1001", "--gid", "1001", "--gid", "2000")
	g.password("loader", "", "--uid", "1000", "--gid", "1000", "--no-password")
	g.machine = newMachine(t, "--mount", g.mnt, "--stream-users", g.users, "--tls-cert", a.file("server.crt"), "--tls-key", a.file("server.key"), "--tls-client-ca", a.file("ca.crt"))
	t.Cleanup(func() {
		if err := spawn.Unmount(g.mnt); err != nil {
			t.Error(err)
		}
	})
	return g
}

// password sets the password of a user.
func (g *guarded) password(name, password string, args ...string) {
	g.t.Helper()
	cmd := exec.CommandContext(g.t.Context(), program.Path, append([]string{"stream", "password", name, "--file", g.users}, args...)...)
	cmd.Stdin = strings.NewReader(password + "\n")
	if out, err := cmd.CombinedOutput(); err != nil {
		g.t.Fatalf("%v: %s", err, out)
	}
}

// as makes a client of franz-go that logs in.
func (g *guarded) as(user, password string) *kgo.Client {
	return g.client(kgo.DialTLSConfig(g.trust("")), kgo.SASL(saslplain.Auth{User: user, Pass: password}.AsMechanism()), kgo.RequestRetries(0))
}

// code runs a request about a topic, and returns the error of the topic.
func (g *guarded) code(c *kgo.Client, what, topic string) error {
	g.t.Helper()
	ctx, cancel := context.WithTimeout(g.t.Context(), patience)
	defer cancel()
	var code int16
	var err error
	switch what {
	case "create":
		q := kmsg.NewPtrCreateTopicsRequest()
		qt := kmsg.NewCreateTopicsRequestTopic()
		qt.Topic, qt.NumPartitions, qt.ReplicationFactor = topic, 1, 1
		q.Topics, q.TimeoutMillis = append(q.Topics, qt), 30000
		var p *kmsg.CreateTopicsResponse
		if p, err = q.RequestWith(ctx, c); err == nil {
			code = p.Topics[0].ErrorCode
		}
	case "delete":
		q := kmsg.NewPtrDeleteTopicsRequest()
		qt := kmsg.NewDeleteTopicsRequestTopic()
		qt.Topic = &topic
		q.Topics, q.TimeoutMillis = append(q.Topics, qt), 30000
		var p *kmsg.DeleteTopicsResponse
		if p, err = q.RequestWith(ctx, c); err == nil {
			code = p.Topics[0].ErrorCode
		}
	case "read":
		q := kmsg.NewPtrListOffsetsRequest()
		qt := kmsg.NewListOffsetsRequestTopic()
		qp := kmsg.NewListOffsetsRequestTopicPartition()
		qp.Timestamp = -1
		qt.Topic, qt.Partitions = topic, append(qt.Partitions, qp)
		q.Topics = append(q.Topics, qt)
		var p *kmsg.ListOffsetsResponse
		if p, err = q.RequestWith(ctx, c); err == nil {
			code = p.Topics[0].Partitions[0].ErrorCode
		}
	case "grow":
		return grow(g.t, c, topic, 2, true)
	case "alter":
		return alter(g.t, c, topic, true, op(kmsg.IncrementalAlterConfigOpSet, "retention.ms", "1000"))
	case "truncate":
		_, err := truncate(g.t, c, topic, 0)
		return err
	case "write":
		return c.ProduceSync(ctx, &kgo.Record{Topic: topic, Value: []byte("x")}).FirstErr()
	}
	if err == nil {
		err = kerr.ErrorForCode(code)
	}
	return err
}

// status appends a record over HTTP, and returns the status.
func (g *guarded) status(config *tls.Config, user, password string) int {
	g.t.Helper()
	q, err := http.NewRequestWithContext(g.t.Context(), http.MethodPost, "https://"+g.ingest+"/v1/append/v/t", strings.NewReader("h\n"))
	if err != nil {
		g.t.Fatal(err)
	}
	q.Header.Set("Content-Type", "text/plain")
	if user != "" {
		q.SetBasicAuth(user, password)
	}
	transport := &http.Transport{TLSClientConfig: config, ForceAttemptHTTP2: true}
	defer transport.CloseIdleConnections()
	p, err := transport.RoundTrip(q)
	if err != nil {
		g.t.Fatal(err)
	}
	defer p.Body.Close()
	if _, err := io.Copy(io.Discard, p.Body); err != nil {
		g.t.Fatal(err)
	}
	return p.StatusCode
}

// call opens a stream over gRPC, and returns the code of the status.
func (g *guarded) call(config *tls.Config, user, password string) codes.Code {
	g.t.Helper()
	c, err := grpc.NewClient(g.ingest, grpc.WithTransportCredentials(credentials.NewTLS(config)))
	if err != nil {
		g.t.Fatal(err)
	}
	defer c.Close()
	ctx, cancel := context.WithTimeout(g.t.Context(), patience)
	defer cancel()
	if user != "" {
		q := &http.Request{Header: http.Header{}}
		q.SetBasicAuth(user, password)
		ctx = metadata.AppendToOutgoingContext(ctx, "authorization", q.Header.Get("Authorization"))
	}
	s, err := ingest.NewIngestClient(c).Append(ctx)
	if err == nil {
		// An error of Send is told by Recv.
		_ = s.Send(&ingest.AppendRequest{Request: &ingest.AppendRequest_Open{Open: &ingest.Open{Stream: "/v/t"}}})
		_, err = s.Recv()
	}
	return status.Code(err)
}

// TestRights: over TLS, users log in with each mechanism of SASL, with Basic authentication and
// with certificates, and may do at each door what the mode and the ACL of a stream's directory
// say; nothing is done for anybody else. A changed password ends open connections.
func TestRights(t *testing.T) {
	g := newGuarded(t)
	g.Must("stream", "create", "/v/first")
	g.Until("the mount serves", func() error { return os.Chown(filepath.Join(g.mnt, "v"), 1000, 1000) })
	ann, bob := g.as("ann", "secret"), g.as("bob", "secret")
	expect := func(c *kgo.Client, what, topic string, want error) {
		t.Helper()
		if err := g.code(c, what, topic); !errors.Is(err, want) {
			t.Errorf("%s %s: %v, want %v", what, topic, err, want)
		}
	}
	denied := kerr.TopicAuthorizationFailed
	expect(bob, "create", "v.t", denied)
	expect(ann, "create", "v.t", nil)
	dir := filepath.Join(g.mnt, "v/t")
	for _, name := range []string{"", "stream.json", "log/0"} {
		info, err := os.Stat(filepath.Join(dir, name))
		if err != nil {
			t.Fatal(err)
		}
		if st := info.Sys().(*syscall.Stat_t); st.Uid != 1000 || st.Gid != 1000 {
			t.Errorf("%s of ann's stream belongs to %d:%d", name, st.Uid, st.Gid)
		}
	}

	tlsArgs := []string{"-X", "ssl.ca.location=" + g.file("ca.crt")}
	sasl := func(mechanism, password string) []string {
		return append([]string{"-X", "security.protocol=SASL_SSL", "-X", "sasl.mechanisms=" + mechanism, "-X", "sasl.username=ann", "-X", "sasl.password=" + password}, tlsArgs...)
	}
	cert := func(name string) []string {
		return append([]string{"-X", "security.protocol=SSL", "-X", "ssl.certificate.location=" + g.file(name+".crt"), "-X", "ssl.key.location=" + g.file(name+".key")}, tlsArgs...)
	}
	ways := [][]string{sasl("PLAIN", "secret"), sasl("SCRAM-SHA-256", "secret"), sasl("SCRAM-SHA-512", "secret"), cert("loader")}
	for _, args := range ways {
		g.kcat("1\n", append(args, "-P", "-t", "v.t")...)
	}
	if got := g.kcat("", append(cert("loader"), "-C", "-t", "v.t", "-o", "beginning", "-e")...); strings.Count(got, "1\n") != len(ways) {
		t.Errorf("DATA: %q", got)
	}
	for name, args := range map[string][]string{"no login": append([]string{"-X", "security.protocol=SSL"}, tlsArgs...), "a wrong password": sasl("SCRAM-SHA-256", "other"), "a certificate of no user": cert("stranger"), "no TLS": nil} {
		args = slices.Concat([]string{"-b", g.kafka, "-L", "-m", "3"}, args)
		if out, err := exec.CommandContext(t.Context(), "kcat", args...).CombinedOutput(); err == nil {
			t.Errorf("%s: kcat got %s", name, out)
		}
	}

	doors := func(what string, read, write error) {
		t.Helper()
		expect(bob, "read", "v.t", read)
		expect(bob, "write", "v.t", write)
		web, call := http.StatusOK, codes.OK
		if write != nil {
			web, call = http.StatusForbidden, codes.PermissionDenied
		}
		if got := g.status(g.trust(""), "bob", "secret"); got != web {
			t.Errorf("%s: HTTP says %d", what, got)
		}
		if got := g.call(g.trust(""), "bob", "secret"); got != call {
			t.Errorf("%s: gRPC says %v", what, got)
		}
	}
	run := func(name string, args ...string) {
		t.Helper()
		if out, err := exec.CommandContext(t.Context(), name, args...).CombinedOutput(); err != nil {
			t.Fatalf("%s %v: %v: %s", name, args, err, out)
		}
	}
	change := func(want error) {
		t.Helper()
		for _, what := range []string{"grow", "alter", "truncate"} {
			expect(bob, what, "v.t", want)
		}
	}
	doors("mode 0755", nil, denied)
	change(denied)
	run("chmod", "0700", dir)
	doors("mode 0700", denied, denied)
	_, id, err := described(t, ann, "v.t", topicID{})
	if err != nil {
		t.Fatal(err)
	}
	if name, _, err := described(t, bob, "", id); name != "" || err != kerr.UnknownTopicID {
		t.Errorf("bob describes ann's stream by its id: %q, %v", name, err)
	}
	if name, err := deleted(t, bob, "", id); name != "" || err != kerr.UnknownTopicID {
		t.Errorf("bob deletes ann's stream by its id: %q, %v", name, err)
	}
	if out := g.kcat("", append(slices.Replace(sasl("PLAIN", "secret"), 5, 6, "sasl.username=bob"), "-L")...); strings.Contains(out, "v.t") || !strings.Contains(out, "v.first") {
		t.Errorf("bob sees %s", out)
	}
	run("setfacl", "-m", "g:2000:wx", dir)
	doors("an ACL that lets bob's group write", denied, nil)
	change(nil)
	run("setfacl", "-m", "g:2000:w", dir)
	change(denied)
	run("setfacl", "-m", "g:2000:wx", dir)
	expect(bob, "delete", "v.t", denied)
	run("setfacl", "-b", dir)
	doors("no ACL any more", denied, denied)

	for want, got := range map[int]int{
		http.StatusOK:           g.status(g.trust(""), "ann", "secret"),
		http.StatusUnauthorized: g.status(g.trust(""), "ann", "other"),
	} {
		if got != want {
			t.Errorf("HTTP says %d, want %d", got, want)
		}
	}
	if got := g.status(g.trust("loader"), "", ""); got != http.StatusOK {
		t.Errorf("HTTP with a certificate says %d", got)
	}
	if got := g.status(g.trust(""), "", ""); got != http.StatusUnauthorized {
		t.Errorf("HTTP without a login says %d", got)
	}
	if got := g.call(g.trust(""), "", ""); got != codes.Unauthenticated {
		t.Errorf("gRPC without a login says %v", got)
	}
	if got := g.call(g.trust("loader"), "", ""); got != codes.OK {
		t.Errorf("gRPC with a certificate says %v", got)
	}

	g.testCommands(t)

	g.password("ann", "another")
	g.Until("ann's open connections end", func() error {
		if err := ann.Ping(t.Context()); err == nil {
			return fmt.Errorf("ann is still served")
		}
		return nil
	})
	expect(g.as("ann", "another"), "delete", "v.t", nil)
}

// testCommands: the program's own commands log in with a password or a certificate, and report
// what a login lacks.
func (g *guarded) testCommands(t *testing.T) {
	file := func(name, text string) string {
		t.Helper()
		name = filepath.Join(t.TempDir(), name)
		if err := os.WriteFile(name, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		return name
	}
	password := []string{"--user", "ann", "--password-file", file("password", "secret\n"), "--tls-ca", g.file("ca.crt")}
	certificate := []string{"--tls-cert", g.file("loader.crt"), "--tls-key", g.file("loader.key"), "--tls-ca", g.file("ca.crt")}
	if out, err := g.command("by a password\n", append([]string{"stream", "produce", "v.t"}, password...)...); err != nil {
		t.Errorf("produce with a password: %v: %s", err, out)
	}
	if out, err := g.command("by a certificate\n", append([]string{"stream", "produce", "v.t"}, certificate...)...); err != nil {
		t.Errorf("produce with a certificate: %v: %s", err, out)
	}
	for _, as := range [][]string{password, certificate} {
		if out, err := g.command("", append([]string{"stream", "consume", "v.t"}, as...)...); err != nil || !strings.HasSuffix(out, "by a password\nby a certificate\n") {
			t.Errorf("DATA: consumed %s, %v", out, err)
		}
	}
	if out, err := g.Ctl(append([]string{"stream", "groups", "/v/t", "--kafka", g.kafka}, password...)...); err != nil {
		t.Errorf("groups with a password: %v: %s", err, out)
	}
	for says, args := range map[string][]string{
		"--user":             {"--tls-ca", g.file("ca.crt")},
		"no user ann":        {"--user", "ann", "--password-file", file("wrong", "wrong\n"), "--tls-ca", g.file("ca.crt")},
		"no password":        {"--user", "ann", "--password-file", file("empty", "\n"), "--tls-ca", g.file("ca.crt")},
		"no-such":            {"--user", "ann", "--password-file", "/no-such", "--tls-ca", g.file("ca.crt")},
		"certificate":        {"--user", "ann", "--password-file", file("right", "secret")},
		"no certificate":     {"--tls-ca", g.users},
		"no gateway answers": {"--tls-cert", g.file("stranger.crt"), "--tls-key", g.file("stranger.key"), "--tls-ca", g.file("ca.crt")},
	} {
		if says == "certificate" {
			args = append(args, "--tls") // the machine does not trust the gateway's authority
		}
		if out, err := g.command("", append([]string{"stream", "consume", "v.t"}, args...)...); err == nil || !strings.Contains(out, says) {
			t.Errorf("%v: %v, and it does not say %q: %s", args, err, says, out)
		}
	}
}
