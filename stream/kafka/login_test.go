package kafka

import (
	"context"
	"encoding/binary"
	"errors"
	"io"
	"log/slog"
	"net"
	"path/filepath"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"
	"github.com/twmb/franz-go/pkg/sasl"
	saslplain "github.com/twmb/franz-go/pkg/sasl/plain"
	saslscram "github.com/twmb/franz-go/pkg/sasl/scram"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/stream"
)

// guarded serves one user, ann with the password secret, and returns the address.
func guarded(t *testing.T) string {
	t.Helper()
	file := filepath.Join(t.TempDir(), "users.json")
	if err := stream.SetUser(file, "ann", "secret, = 1", &stream.User{UID: 1000, GIDs: []uint32{1000}}); err != nil {
		t.Fatal(err)
	}
	users, err := stream.OpenUsers(file)
	if err != nil {
		t.Fatal(err)
	}
	s := New(Config{
		Host: func(context.Context) (*stream.Host, error) {
			return nil, meta.E("connect", meta.Unavailable, "test", errors.New("there is no cluster"))
		},
		Cluster: "test", Logger: slog.New(slog.DiscardHandler), Users: users,
	})
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan error, 1)
	go func() { done <- s.Serve(l) }()
	t.Cleanup(func() {
		s.Close()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	return l.Addr().String()
}

// TestLogin: a client of franz-go logs in with every mechanism, and is refused with the
// protocol's error without the password.
func TestLogin(t *testing.T) {
	addr := guarded(t)
	for name, c := range map[string]struct {
		mechanism func(user, password string) sasl.Mechanism
	}{
		"PLAIN":         {func(u, p string) sasl.Mechanism { return saslplain.Auth{User: u, Pass: p}.AsMechanism() }},
		"SCRAM-SHA-256": {func(u, p string) sasl.Mechanism { return saslscram.Auth{User: u, Pass: p}.AsSha256Mechanism() }},
		"SCRAM-SHA-512": {func(u, p string) sasl.Mechanism { return saslscram.Auth{User: u, Pass: p}.AsSha512Mechanism() }},
	} {
		try := func(user, password string) error {
			client, err := kgo.NewClient(kgo.SeedBrokers(addr), kgo.SASL(c.mechanism(user, password)), kgo.RequestRetries(0))
			if err != nil {
				t.Fatal(err)
			}
			defer client.Close()
			ctx, cancel := context.WithTimeout(t.Context(), 90*time.Second)
			defer cancel()
			return client.Ping(ctx)
		}
		if err := try("ann", "secret, = 1"); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		for _, wrong := range [][2]string{{"ann", "secret"}, {"bob", "secret, = 1"}} {
			if err := try(wrong[0], wrong[1]); !errors.Is(err, kerr.SaslAuthenticationFailed) {
				t.Errorf("%s: %s with the password %s: %v", name, wrong[0], wrong[1], err)
			}
		}
	}
}

// exchange sends a request, and returns the response's body; io.EOF: the server closed.
func exchange(t *testing.T, c net.Conn, q kmsg.Request) (kmsg.Response, error) {
	t.Helper()
	if _, err := c.Write(frameOf(q, 1)); err != nil {
		return nil, err
	}
	head := make([]byte, 8)
	if _, err := io.ReadFull(c, head); err != nil {
		return nil, err
	}
	body := make([]byte, binary.BigEndian.Uint32(head)-4)
	if _, err := io.ReadFull(c, body); err != nil {
		return nil, err
	}
	p := q.ResponseKind()
	p.SetVersion(q.GetVersion())
	if p.IsFlexible() && p.Key() != apiVersionsKey {
		body = body[1:]
	}
	return p, p.ReadFrom(body)
}

// TestLoginComesFirst: before the login a connection takes ApiVersions and the login alone, and
// ends with anything else; the order of the login is kept.
func TestLoginComesFirst(t *testing.T) {
	addr := guarded(t)
	handshake := func(mechanism string) kmsg.Request {
		q := kmsg.NewPtrSASLHandshakeRequest()
		q.SetVersion(1)
		q.Mechanism = mechanism
		return q
	}
	token := func(text string) kmsg.Request {
		q := kmsg.NewPtrSASLAuthenticateRequest()
		q.SetVersion(2)
		q.SASLAuthBytes = []byte(text)
		return q
	}
	versioned := func(q kmsg.Request, v int16) kmsg.Request { q.SetVersion(v); return q }
	code := func(p kmsg.Response) int16 {
		switch p := p.(type) {
		case *kmsg.SASLHandshakeResponse:
			return p.ErrorCode
		case *kmsg.SASLAuthenticateResponse:
			return p.ErrorCode
		}
		return 0
	}
	const closes = int16(-100)
	big := kmsg.NewPtrSASLAuthenticateRequest()
	big.SASLAuthBytes = make([]byte, maxLogin)
	for name, steps := range map[string][]struct {
		q    kmsg.Request
		want int16
	}{
		"no login":           {{versioned(kmsg.NewPtrApiVersionsRequest(), 3), 0}, {versioned(kmsg.NewPtrMetadataRequest(), 5), closes}},
		"produce":            {{versioned(kmsg.NewPtrProduceRequest(), 9), closes}},
		"token first":        {{token("\x00ann\x00secret, = 1"), codeLoginState}, {handshake("PLAIN"), closes}},
		"other mechanism":    {{handshake("GSSAPI"), codeMechanism}, {handshake("PLAIN"), closes}},
		"handshake twice":    {{handshake("PLAIN"), 0}, {handshake("PLAIN"), codeLoginState}},
		"metadata between":   {{handshake("PLAIN"), 0}, {versioned(kmsg.NewPtrMetadataRequest(), 5), closes}},
		"wrong password":     {{handshake("PLAIN"), 0}, {token("\x00ann\x00x"), codeLoginFailed}, {token("\x00ann\x00secret, = 1"), closes}},
		"as another":         {{handshake("PLAIN"), 0}, {token("root\x00ann\x00secret, = 1"), codeLoginFailed}},
		"malformed":          {{handshake("PLAIN"), 0}, {token("ann"), codeLoginFailed}},
		"malformed SCRAM":    {{handshake("SCRAM-SHA-256"), 0}, {token("\x00"), codeLoginFailed}},
		"an oversized token": {{handshake("PLAIN"), 0}, {big, closes}},
		"login":              {{handshake("PLAIN"), 0}, {token("\x00ann\x00secret, = 1"), 0}, {versioned(kmsg.NewPtrMetadataRequest(), 5), 0}, {handshake("PLAIN"), codeLoginState}, {token("x"), codeLoginState}, {versioned(kmsg.NewPtrMetadataRequest(), 5), 0}},
	} {
		c, err := net.Dial("tcp", addr)
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		if err := c.SetDeadline(time.Now().Add(90 * time.Second)); err != nil {
			t.Fatal(err)
		}
		for i, s := range steps {
			p, err := exchange(t, c, s.q)
			if s.want == closes {
				if err == nil || errors.Is(err, context.DeadlineExceeded) {
					t.Errorf("%s, step %d: answered %+v, %v", name, i, p, err)
				}
				break
			}
			if err != nil || code(p) != s.want {
				t.Errorf("%s, step %d: %+v, %v; want code %d", name, i, p, err, s.want)
				break
			}
		}
	}
}

// FuzzScram gives both messages of a client to a login: no message but the user's proves the
// password, and none does harm.
func FuzzScram(f *testing.F) {
	file := filepath.Join(f.TempDir(), "users.json")
	if err := stream.SetUser(file, "ann", "secret", &stream.User{UID: 1000, GIDs: []uint32{1000}}); err != nil {
		f.Fatal(err)
	}
	users, err := stream.OpenUsers(file)
	if err != nil {
		f.Fatal(err)
	}
	f.Add("n,,n=ann,r=abc", "c=biws,r=abcabcdef,p=AAAA")
	f.Add("n,a=ann,n=ann,r=abc", "c=bixhPWFubiw=,r=,p=")
	f.Add("y,,n=ann,r=", ",r=,p=")
	f.Add("n,", "")
	f.Fuzz(func(t *testing.T, first, last string) {
		l, err := newScramLogin(users, stream.SHA256)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := l.first(first); err != nil {
			return
		}
		if _, err := l.last(last); err == nil {
			t.Errorf("DATA: %q, %q logged in", first, last)
		}
	})
}
