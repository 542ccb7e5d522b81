package server

import (
	"crypto/tls"
	"errors"
	"go/ast"
	"go/parser"
	gotoken "go/token"
	"net"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"penstock.io/penstock/chunkserver"
	"penstock.io/penstock/chunkserver/wire"
	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/capability"
	"penstock.io/penstock/meta/peer"
)

// constants lists the constants of a type in a package's source: the service
// definition, which no test can forget a part of.
func constants(t *testing.T, dir, typ string) (names []string) {
	t.Helper()
	files, err := filepath.Glob(filepath.Join(dir, "*.go"))
	if err != nil || len(files) == 0 {
		t.Fatal(dir, err)
	}
	for _, name := range files {
		if strings.HasSuffix(name, "_test.go") {
			continue
		}
		f, err := parser.ParseFile(gotoken.NewFileSet(), name, nil, 0)
		if err != nil {
			t.Fatal(err)
		}
		for _, d := range f.Decls {
			g, ok := d.(*ast.GenDecl)
			if !ok || g.Tok != gotoken.CONST || len(g.Specs) == 0 {
				continue
			}
			first, ok := g.Specs[0].(*ast.ValueSpec)
			if !ok {
				continue
			}
			if id, ok := first.Type.(*ast.Ident); !ok || id.Name != typ {
				continue
			}
			for _, s := range g.Specs {
				v := s.(*ast.ValueSpec)
				if v != first && len(v.Values) > 0 {
					break // Reply, a bit
				}
				if n := v.Names[0].Name; !strings.HasPrefix(n, "last") {
					names = append(names, n)
				}
			}
		}
	}
	return names
}

// TestEveryFrameHasARule: every type of frame has a rule. Orders come in the other
// direction, over the connection that the chunk server dialled; meta/client takes orders
// from metadata servers only.
func TestEveryFrameHasARule(t *testing.T) {
	frames := constants(t, "../wire", "Type")
	if len(frames) != wire.Types-1 {
		t.Fatalf("%d types are defined, %d numbered: %v", len(frames), wire.Types-1, frames)
	}
	for typ := 1; typ < wire.Types; typ++ {
		if len(rules[typ].roles) == 0 {
			t.Errorf("frame %s has no rule", frames[typ-1])
		}
	}
}

// secure is a server on TCP with certificates.
func secure(t *testing.T) (*Server, string, *peer.Authority) {
	t.Helper()
	a, err := peer.NewAuthority("test", time.Hour)
	if err != nil {
		t.Fatal(err)
	}
	s := New(Config{ID: 7, Host: "h", Keys: []meta.CapKey{key}, Logger: quiet}, newStore(t))
	l, err := peer.ListenTicketed("127.0.0.1:0", as(t, a, peer.ChunkServer, "k"))
	if err != nil {
		t.Fatal(err)
	}
	served := make(chan error, 1)
	go func() { served <- s.Serve(ctx, l) }()
	t.Cleanup(func() {
		if err := errors.Join(s.Close(), <-served); err != nil {
			t.Error(err)
		}
	})
	return s, l.Addr().String(), a
}

func as(t *testing.T, a *peer.Authority, role peer.Role, name string) *peer.Credentials {
	t.Helper()
	return asAgain(t, a, role, name, 0)
}

// asAgain makes the certificate of an identity with this number of admissions.
func asAgain(t *testing.T, a *peer.Authority, role peer.Role, name string, admission uint32) *peer.Credentials {
	t.Helper()
	dir := filepath.Join(t.TempDir(), "c")
	if err := a.Issue(dir, peer.Identity{Cluster: "test", Role: role, Name: name, Admission: admission}, nil); err != nil {
		t.Fatal(err)
	}
	c, err := peer.Load(dir, quiet)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func dialTLS(t *testing.T, addr string, creds *peer.Credentials) *wire.Conn {
	t.Helper()
	nc, err := peer.Dial(t.Context(), addr, creds, peer.ChunkServer)
	if err != nil {
		t.Fatal(err)
	}
	_ = nc.SetDeadline(time.Now().Add(time.Minute))
	c, err := wire.NewConn(nc, "")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return c
}

// TestEvictedConnectionsEnd: an evicted identity loses its connections at once, with tickets or
// without, and gets no new connections; other identities keep their connections; an identity that
// was admitted again can connect.
func TestEvictedConnectionsEnd(t *testing.T) {
	s, addr, a := secure(t)
	bad, good := as(t, a, peer.Client, "bad"), as(t, a, peer.Client, "good")
	greet := func(c *wire.Conn) error {
		if err := c.Send((&wire.Request{Speaks: wire.Version}).AppendFrame(nil, wire.Hello, 0, 1, 0, 0), nil); err != nil {
			return err
		}
		_, _, err := c.Next()
		return err
	}
	ping := func(c *wire.Conn) error {
		if err := c.Send((&wire.Request{}).AppendFrame(nil, wire.Ping, 0, 2, 0, 0), nil); err != nil {
			return err
		}
		_, _, err := c.Next()
		return err
	}
	theirs, others := dialTLS(t, addr, bad), dialTLS(t, addr, good)
	for _, c := range []*wire.Conn{theirs, others} {
		if err := errors.Join(greet(c), ping(c)); err != nil {
			t.Fatal(err)
		}
	}
	// An earlier ticket of the identity does not help.
	ticket, err := s.ticket(bad.Identity(), time.Now())
	if err != nil {
		t.Fatal(err)
	}
	if _, who, err := s.admit(ticket.Ticket, time.Now()); err != nil || who.String() != "client/bad" {
		t.Fatal(who, err)
	}
	s.Order(ctx, meta.Order{Kind: meta.OrderKeys, Keys: []meta.CapKey{key}, Evicted: []string{"client/bad"}})
	if err := ping(theirs); err == nil {
		t.Error("the connection of who was evicted still answers")
	}
	if err := greet(dialTLS(t, addr, bad)); err == nil {
		t.Error("who was evicted is greeted")
	}
	nc, err := net.Dial("tcp", addr)
	if err != nil {
		t.Fatal(err)
	}
	_ = nc.SetDeadline(time.Now().Add(time.Minute))
	plain, err := wire.NewConn(nc, "")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { plain.Close() })
	hello := &wire.Request{Speaks: wire.Version, Cap: append(ticket.Ticket, make([]byte, wire.NonceSize)...)}
	if err := plain.Send(hello.AppendFrame(nil, wire.Hello, wire.FlagTicket, 1, 0, 0), nil); err == nil {
		if _, _, err = plain.Next(); err == nil {
			t.Error("a ticket of who was evicted is taken")
		}
	}
	if err := ping(others); err != nil {
		t.Errorf("somebody else lost a connection: %v", err)
	}
	s.Order(ctx, meta.Order{Kind: meta.OrderKeys, Keys: []meta.CapKey{key}})
	if err := greet(dialTLS(t, addr, bad)); err != nil {
		t.Errorf("who was let in again is refused: %v", err)
	}
	// The identity was admitted again, with new certificates: earlier certificates stay
	// worthless.
	s.Order(ctx, meta.Order{Kind: meta.OrderKeys, Keys: []meta.CapKey{key}, Evicted: []string{"client/bad<1"}})
	if err := greet(dialTLS(t, addr, bad)); err == nil {
		t.Error("a certificate of before the eviction is good again")
	}
	if _, who, err := s.admit(ticket.Ticket, time.Now()); err != nil || !s.evicted.Has(who) {
		t.Errorf("so is its ticket: %v %v", who, err)
	}
	if err := greet(dialTLS(t, addr, asAgain(t, a, peer.Client, "bad", 1))); err != nil {
		t.Errorf("the certificate of the new admission is refused: %v", err)
	}
}

// TestEveryFrameIsRefusedToStrangers: every frame that names a chunk is refused from
// every role with every kind of bad capability, and is served for an allowed role with a
// good capability.
func TestEveryFrameIsRefusedToStrangers(t *testing.T) {
	s, addr, a := secure(t)
	if err := s.Append(ctx, id, fence, 0, []byte("hello"), chunkserver.CRC([]byte("hello"))); err != nil {
		t.Fatal(err)
	}
	// The sync gives a good request an answer.
	if _, err := s.Sync(ctx, id, 5); err != nil {
		t.Fatal(err)
	}
	now := time.Now()
	sign := func(k meta.CapKey, c capability.Claims) []byte { return capability.Sign(k, c) }
	for _, role := range []peer.Role{peer.Client, peer.Admin, peer.Meta, peer.ChunkServer} {
		c := dialTLS(t, addr, as(t, a, role, "x"))
		greet(t, c)
		for typ := wire.Append; int(typ) < wire.Types; typ++ {
			r := rules[typ]
			if r.right == 0 {
				continue
			}
			good := capability.Claims{Volume: 1, Chunk: id, Rights: r.right, Fence: fence, Client: string(role) + "/x", Expiry: meta.Time(now.Add(time.Hour).UnixNano())}
			with := func(change func(*capability.Claims)) []byte { c := good; change(&c); return sign(key, c) }
			forged := sign(key, good)
			forged[len(forged)-1] ^= 1
			bad := map[string][]byte{
				"none":                    nil,
				"noise":                   []byte("let me in"),
				"forged":                  forged,
				"signed by another":       sign(meta.CapKey{ID: 1, Secret: []byte("another secret of 32 bytes......")}, good),
				"of an unknown key":       sign(meta.CapKey{ID: 9, Secret: key.Secret}, good),
				"expired":                 with(func(c *capability.Claims) { c.Expiry = meta.Time(now.Add(-time.Second).UnixNano()) }),
				"of another volume":       with(func(c *capability.Claims) { c.Volume, c.Chunk.Volume = 2, 2 }),
				"of another volume's all": with(func(c *capability.Claims) { c.Volume, c.Chunk = 2, meta.ChunkID{} }),
				"of another chunk":        with(func(c *capability.Claims) { c.Chunk.Counter++ }),
				"without the right":       with(func(c *capability.Claims) { c.Rights = ^r.right &^ capability.Plain }),
				"of somebody else":        with(func(c *capability.Claims) { c.Client = "client/other" }),
			}
			if !r.anyFence && r.right != capability.Read {
				bad["of another fence"] = with(func(c *capability.Claims) { c.Fence.Seals = 7 })
			}
			ask := func(token []byte) wire.Answer {
				q := &wire.Request{Cap: token, Chunk: id, Fence: fence, Off: 5, N: 1}
				return ask(t, c, typ, 0, q, nil)
			}
			for what, token := range bad {
				if a := ask(token); a.Kind != meta.BadCapability && a.Kind != meta.Fenced && a.Kind != meta.AccessDenied {
					t.Errorf("frame %d by a %s with a capability %s: %+v", typ, role, what, a)
				}
			}
			allowed := false
			for _, x := range r.roles {
				allowed = allowed || x == role
			}
			a := ask(sign(key, good))
			if denied := a.Kind == meta.AccessDenied || a.Kind == meta.BadCapability; denied == allowed {
				t.Errorf("frame %d by a %s with a good capability: %+v", typ, role, a)
			}
			if typ == wire.Seal || typ == wire.Delete {
				if allowed { // the chunk is needed again
					s.Order(ctx, meta.Order{Kind: meta.OrderDelete, Chunk: id, Fence: meta.Fence{Term: 9}})
				}
			}
		}
	}
}

// TestNoWayInWithoutACertificate: without a certificate no connection is served, neither
// over TLS nor over a plain connection, whatever the ticket.
func TestNoWayInWithoutACertificate(t *testing.T) {
	s, addr, a := secure(t)
	who := peer.Identity{Cluster: "test", Role: peer.Client, Name: "x", Expires: time.Now().Add(time.Hour)}
	good, err := s.ticket(who, time.Now())
	if err != nil {
		t.Fatal(err)
	}
	old, err := s.ticket(who, time.Now().Add(-time.Hour))
	if err != nil {
		t.Fatal(err)
	}
	other := New(Config{ID: 8, Logger: quiet})
	defer other.Close()
	others, err := other.ticket(who, time.Now())
	if err != nil {
		t.Fatal(err)
	}
	forged := append([]byte(nil), good.Ticket...)
	forged[20] ^= 1
	nonce := make([]byte, wire.NonceSize)
	for what, x := range map[string]struct {
		ticket []byte
		flags  uint16
		ok     bool
	}{
		"none":             {nil, wire.FlagTicket, false},
		"a plain hello":    {nil, 0, false},
		"noise":            {[]byte("let me in, please; it is cold out here"), wire.FlagTicket, false},
		"forged":           {forged, wire.FlagTicket, false},
		"out of time":      {old.Ticket, wire.FlagTicket, false},
		"another server's": {others.Ticket, wire.FlagTicket, false},
		"a good one":       {good.Ticket, wire.FlagTicket, true},
	} {
		nc, err := net.Dial("tcp", addr)
		if err != nil {
			t.Fatal(err)
		}
		_ = nc.SetDeadline(time.Now().Add(time.Minute))
		c, err := wire.NewConn(nc, "")
		if err != nil {
			t.Fatal(err)
		}
		q := wire.Request{Speaks: 1, Cap: append(append([]byte(nil), x.ticket...), nonce...)}
		if err := c.Send(q.AppendFrame(nil, wire.Hello, x.flags, 1, 0, 0), nil); err != nil {
			t.Fatal(err)
		}
		h, body, err := c.Next()
		if err == nil {
			var ans wire.Answer
			if ans, err = wire.DecodeAnswer(wire.Hello, h.Flags, body); err == nil {
				err = ans.Err("hello", "")
			}
		}
		if (err == nil) != x.ok {
			t.Errorf("ticket %s: %v", what, err)
		}
		if x.ok {
			// The ticket alone is not enough: its secret was never sent in plain.
			stolen := (&wire.Request{}).AppendFrame(nil, wire.Ping, 0, 2, 0, 0)
			if err := c.Send(stolen, nil); err != nil {
				t.Fatal(err)
			}
			ended(t, c)
		}
		c.Close()
	}
	nc, err := tls.Dial("tcp", addr, &tls.Config{InsecureSkipVerify: true, NextProtos: []string{"penstock"}})
	if err == nil {
		_, err = nc.Read(make([]byte, 1))
	}
	if !peer.Refused(err) {
		t.Errorf("TLS without a certificate: %v", err)
	}
	elsewhere, err := peer.NewAuthority("test", time.Hour)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := peer.Dial(t.Context(), addr, as(t, elsewhere, peer.Client, "x"), peer.ChunkServer); meta.KindOf(err) != meta.AccessDenied {
		t.Errorf("a certificate of another authority: %v", err)
	}
	_ = a
}

// TestConnectionsAreBounded: a stranger's connection makes the server allocate next to
// nothing, and strangers can't have more connections than the bound.
func TestConnectionsAreBounded(t *testing.T) {
	s, path := newServer(t, 1)
	s.mu.Lock()
	s.cfg.MaxConns = 3
	s.mu.Unlock()
	for range 3 {
		greet(t, dial(t, path))
	}
	c := dial(t, path)
	_ = c.Send((&wire.Request{Speaks: 1}).AppendFrame(nil, wire.Hello, 0, 1, 0, 0), nil)
	if _, _, err := c.Next(); err == nil {
		t.Fatal("a fourth connection is served")
	}
}

func FuzzTicket(f *testing.F) {
	s := New(Config{ID: 7, Logger: quiet})
	f.Cleanup(func() { s.Close() })
	a, err := s.ticket(peer.Identity{Cluster: "c", Role: peer.Client, Name: "x", Expires: time.Now().Add(time.Hour)}, time.Now())
	if err != nil {
		f.Fatal(err)
	}
	f.Add(a.Ticket[1:])
	f.Fuzz(func(t *testing.T, b []byte) {
		if _, who, err := s.admit(b, time.Now()); err == nil {
			t.Fatalf("%x is a ticket of %v", b, who)
		}
	})
}
