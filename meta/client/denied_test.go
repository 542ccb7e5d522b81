package client

import (
	"context"
	"errors"
	"net"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/wire"
)

// evictingServer answers everybody until evict, and nobody after.
type evictingServer struct {
	addr string

	mu    sync.Mutex
	out   bool
	gone  bool          // sessions in volumes are forgotten, and nobody may enter any more
	away  bool          // nobody owns any volume
	seq   meta.Seq      // of answers
	syncs chan meta.Seq // asked for
	held  chan func()   // answers to calls, sent when the functions are called; nil: at once
	conns []net.Conn
}

func newEvictingServer(t *testing.T) *evictingServer {
	t.Helper()
	path := filepath.Join(t.TempDir(), "s")
	ln, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { ln.Close() })
	s := &evictingServer{addr: "unix:" + path, syncs: make(chan meta.Seq, 100)}
	go func() {
		for {
			nc, err := ln.Accept()
			if err != nil {
				return
			}
			s.mu.Lock()
			s.conns = append(s.conns, nc)
			s.mu.Unlock()
			go s.serve(nc)
		}
	}()
	return s
}

func (s *evictingServer) serve(nc net.Conn) {
	defer nc.Close()
	rd := wire.NewReader(nc)
	for {
		typ, id, body, err := rd.Next()
		if err != nil {
			return
		}
		s.mu.Lock()
		out, gone, away, seq, held := s.out, s.gone, s.away, s.seq, s.held
		s.mu.Unlock()
		var re wire.Message
		switch typ {
		case wire.THello:
			var h wire.Hello
			if wire.Decode(body, &h) != nil {
				return
			}
			a := &wire.Hello{Min: wire.Version, Max: wire.Version, Session: h.Session, Cluster: "c", TTL: 6000}
			if out {
				a.Err, a.Detail = meta.AccessDenied, "it was evicted from the cluster"
			}
			re = a
		case wire.TEnter:
			var e wire.Enter
			if wire.Decode(body, &e) != nil {
				return
			}
			switch {
			case away:
				re = &wire.Entered{Status: wire.Status{Err: meta.NotOwner}}
			case gone && e.Known:
				re = &wire.Entered{}
			case gone:
				re = &wire.Entered{Status: wire.Status{Err: meta.AccessDenied}}
			default:
				re = &wire.Entered{Known: true}
			}
		case wire.TCall:
			re = &wire.Reply{Seq: seq, Result: meta.Result{Attr: meta.Attr{Ino: 9}}}
			if held != nil {
				held <- func() { _, _ = nc.Write(wire.Append(nil, body.Version, id, re)) }
				continue
			}
		case wire.TSync:
			var m wire.Sync
			if wire.Decode(body, &m) != nil {
				return
			}
			s.syncs <- m.Seq
			re = &wire.Reply{}
		case wire.TKeepAlive:
			var k wire.KeepAlive
			if wire.Decode(body, &k) != nil {
				return
			}
			re = &wire.KeepAlive{Count: k.Count, TTL: 6000}
		case wire.TBye:
			re = &wire.Bye{}
		default:
			continue
		}
		_, _ = nc.Write(wire.Append(nil, body.Version, id, re))
	}
}

// evict hangs up on everybody, for good.
func (s *evictingServer) evict() { s.hangUp(func() { s.out = true }) }

func (s *evictingServer) hangUp(change func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	change()
	for _, nc := range s.conns {
		nc.Close()
	}
}

// expiries notes why leases ended.
type expiries struct {
	mu sync.Mutex
	l  []error
}

func (e *expiries) Granted(meta.VolumeID, meta.Grant) {}
func (e *expiries) Recall(_ meta.Recall, done func()) { done() }
func (e *expiries) Expired(_ []meta.VolumeID, err error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.l = append(e.l, err)
}

// TestEvictedIsTold: an evicted client gets the refusal soon, even if some servers are
// unreachable, and does not look for the owners of its volumes for ever.
func TestEvictedIsTold(t *testing.T) {
	srv := newEvictingServer(t)
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	told := &expiries{}
	s, err := Dial(ctx, Config{Addrs: []string{srv.addr, "unix:" + filepath.Join(t.TempDir(), "gone")}, Name: "evicted", Handler: told})
	if err != nil {
		t.Fatal(err)
	}
	stat := func() error {
		_, err := s.Do(ctx, meta.RootVolume, meta.OpID{}, &meta.GetAttr{Ino: 9}, meta.LeaseNone)
		return err
	}
	if err := stat(); err != nil {
		t.Fatal(err)
	}
	srv.evict()
	for range 3 {
		// A request that was under way when the connection broke is sent again, and
		// refused.
		if err := stat(); !errors.Is(err, meta.AccessDenied) || meta.KindOf(err) != meta.AccessDenied {
			t.Errorf("told %v", err)
		}
	}
	// The holder of cached leases is told, too, once.
	told.mu.Lock()
	if len(told.l) != 1 || meta.KindOf(told.l[0]) != meta.AccessDenied {
		t.Errorf("the leases ended so: %v", told.l)
	}
	told.mu.Unlock()
	if err := s.Close(ctx); err != nil {
		t.Error(err)
	}
}

// TestForgottenAndRefused: a client whose session is forgotten, and which is then
// refused, learns of both. State without a lease, such as snapshots, is shown until the
// refusal.
func TestForgottenAndRefused(t *testing.T) {
	srv := newEvictingServer(t)
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	told := &expiries{}
	s, err := Dial(ctx, Config{Addrs: []string{srv.addr}, Name: "revoked", Handler: told})
	if err != nil {
		t.Fatal(err)
	}
	stat := func() error {
		_, err := s.Do(ctx, meta.RootVolume, meta.OpID{}, &meta.GetAttr{Ino: 9}, meta.LeaseNone)
		return err
	}
	if err := stat(); err != nil {
		t.Fatal(err)
	}
	srv.hangUp(func() { srv.gone = true })
	for err = nil; meta.KindOf(err) != meta.AccessDenied; err = stat() {
		if ctx.Err() != nil {
			t.Fatal(err)
		}
	}
	told.mu.Lock()
	if l := told.l; len(l) != 2 || meta.KindOf(l[0]) != meta.SessionExpired || meta.KindOf(l[1]) != meta.AccessDenied {
		t.Errorf("the leases ended so: %v", l)
	}
	told.mu.Unlock()
	if err := s.Close(ctx); err != nil {
		t.Error(err)
	}
}
