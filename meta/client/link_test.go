package client

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"time"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/wire"
)

// listingServer is a metadata server for the reports of chunk servers. The server answers the
// first report on each stream with a list of servers, as a real metadata server does.
type listingServer struct {
	addr string // the server's own address

	mu    sync.Mutex
	list  []string
	came  map[string]int // dialed address -> hellos there
	conns []net.Conn     // open connections
	heard int            // reports
}

// listingServerAt makes a server that can be reached under further names.
func listingServerAt(t *testing.T, names ...string) *listingServer {
	t.Helper()
	dir := t.TempDir()
	s := &listingServer{addr: "unix:" + filepath.Join(dir, "own"), came: map[string]int{}}
	for _, name := range append(names, "own") {
		path := filepath.Join(dir, name)
		ln, err := net.Listen("unix", path)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { ln.Close() })
		go func() {
			for {
				nc, err := ln.Accept()
				if err != nil {
					return
				}
				go s.serve(nc, "unix:"+path)
			}
		}()
	}
	return s
}

// under is the address of another name.
func (s *listingServer) under(name string) string {
	return "unix:" + filepath.Join(filepath.Dir(s.addr[len("unix:"):]), name)
}

func (s *listingServer) serve(nc net.Conn, dialed string) {
	s.mu.Lock()
	s.conns = append(s.conns, nc)
	s.mu.Unlock()
	defer func() {
		nc.Close()
		s.mu.Lock()
		s.conns = slices.DeleteFunc(s.conns, func(c net.Conn) bool { return c == nc })
		s.mu.Unlock()
	}()
	rd := wire.NewReader(nc)
	for told := false; ; {
		typ, id, body, err := rd.Next()
		if err != nil {
			return
		}
		var re wire.Message
		s.mu.Lock()
		switch typ {
		case wire.THello:
			s.came[dialed]++
			re = &wire.Hello{Min: wire.Version, Max: wire.Version, Host: s.addr}
		case wire.TReport:
			s.heard++
			if !told {
				re, told = s.metas(), true
			}
		}
		if re != nil { // under mu: no list overtakes a later list
			_, _ = nc.Write(wire.Append(nil, body.Version, id, re))
		}
		s.mu.Unlock()
	}
}

// metas is the list. Caller holds mu.
func (s *listingServer) metas() *wire.Metas {
	m := &wire.Metas{}
	for i, addr := range s.list {
		m.Servers = append(m.Servers, wire.MetaServer{Name: fmt.Sprint("m", i), Addr: addr})
	}
	return m
}

// names changes the list, and tells every stream.
func (s *listingServer) names(list ...string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.list = list
	for _, nc := range s.conns {
		_, _ = nc.Write(wire.Append(nil, wire.Version, 0, s.metas()))
	}
}

// hangUp ends the open streams.
func (s *listingServer) hangUp() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, nc := range s.conns {
		nc.Close()
	}
}

// hellos returns how often the server was dialled at an address; reports returns the
// number of reports.
func (s *listingServer) hellos(addr string) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.came[addr]
}

func (s *listingServer) reports() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.heard
}

// linked maintains the streams of a chunk server that knows some addresses, and forgets
// at once addresses that no list names.
func linked(t *testing.T, addrs ...string) *links {
	t.Helper()
	l := newLinks(LinkConfig{
		Addrs: addrs, Name: "chunks", Interval: 5 * time.Millisecond, Logger: slog.New(slog.DiscardHandler),
		Report: func() wire.Report { return wire.Report{Info: meta.ServerInfo{ID: 1}} },
		Order:  func(context.Context, meta.Order) meta.OrderResult { return meta.OrderResult{} },
	})
	l.forget = time.Nanosecond
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- l.keepAll(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	return l
}

func until(t *testing.T, what string, is func() bool) {
	t.Helper()
	for end := time.Now().Add(time.Minute); !is(); time.Sleep(2 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal("not seen: ", what)
		}
	}
}

// TestLearntServerIsDialedAgain: a metadata server from a list is dialled again when its stream
// breaks, even without a new list; a server missing from the latest list is not.
func TestLearntServerIsDialedAgain(t *testing.T) {
	a, b := listingServerAt(t), listingServerAt(t)
	a.list, b.list = []string{a.addr, b.addr}, []string{a.addr, b.addr}
	l := linked(t, a.addr)
	for n := 1; n <= 3; n++ {
		until(t, "a stream to the server that was learnt", func() bool { return b.hellos(b.addr) == n && l.stands(b.addr) })
		b.hangUp()
	}
	until(t, "the stream again", func() bool { return b.hellos(b.addr) == 4 && l.stands(b.addr) })
	// The server's answer to the first report, which names the server itself, may still be on its
	// way: messages behind the answer on the same stream have been read when c is known.
	c := listingServerAt(t)
	c.list = []string{a.addr, c.addr}
	b.names(a.addr, c.addr)
	until(t, "the list that comes last", func() bool { return l.stands(c.addr) })
	a.names(a.addr)
	until(t, "the list without it", func() bool {
		l.mu.Lock()
		defer l.mu.Unlock()
		return !l.metas[b.addr].IsZero()
	})
	b.hangUp()
	until(t, "that it is given up", func() bool {
		l.mu.Lock()
		defer l.mu.Unlock()
		return !l.tried[b.addr]
	})
	a.names(a.addr, b.addr)
	until(t, "the stream to one that is named again", func() bool { return l.stands(b.addr) })
}

// TestLearntStreamOutlives: the stream to a server outlives the stream on which the
// server was named.
func TestLearntStreamOutlives(t *testing.T) {
	a, b := listingServerAt(t), listingServerAt(t)
	a.list = []string{a.addr, b.addr}
	l := linked(t, a.addr)
	until(t, "a stream to the server that was learnt", func() bool { return b.reports() > 0 })
	a.hangUp()
	until(t, "a stream to the one that named it, anew", func() bool { return a.hellos(a.addr) > 1 && l.stands(a.addr) })
	n := b.reports()
	until(t, "further reports", func() bool { return b.reports() > n+2 })
	if n := b.hellos(b.addr); n != 1 {
		t.Errorf("it was dialed %d times", n)
	}
}

// TestServerUnderAnotherName: a server that is reached under one of several names is also kept
// under its own address: the name may lead elsewhere next time. While the server's stream is
// open, the name is not dialled again and again.
func TestServerUnderAnotherName(t *testing.T) {
	a := listingServerAt(t, "service")
	a.list = []string{a.addr}
	service := a.under("service")
	l := linked(t, service)
	until(t, "a stream under the name", func() bool {
		l.mu.Lock()
		defer l.mu.Unlock()
		return l.up[a.addr] != nil && l.tried[a.addr]
	})
	if n, own := a.hellos(service), a.hellos(a.addr); n != 1 || own != 0 {
		t.Fatalf("dialed %d times under the name, %d times under its own", n, own)
	}
	other := listingServerAt(t)
	other.list = []string{other.addr, a.addr}
	l = linked(t, other.addr)
	until(t, "a stream under its own", func() bool { return l.stands(a.addr) })
	other.names(other.addr, a.addr, service)
	until(t, "a look at where the name leads", func() bool { return a.hellos(service) == 2 })
	time.Sleep(2500 * time.Millisecond) // a look every second would be seen
	if n := a.hellos(service); n != 2 {
		t.Errorf("the name was dialed %d times more, and leads to a server whose stream stands", n-2)
	}
}
