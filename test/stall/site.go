// Package stall measures how long writers stand still when a chunk server is killed, stopped or
// cut off, and whether any byte that fsync acknowledged is lost: a metadata server in this
// process, chunk servers in processes of their own, and between them and the client a relay that
// can swallow bytes.
package stall

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"sync"
	"syscall"
	"testing"
	"time"

	"penstock.io/penstock"
	"penstock.io/penstock/cmd/penstock/local"
	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/peer"
	"penstock.io/penstock/test/child"
	"penstock.io/penstock/test/operator"
	"penstock.io/penstock/test/port"
)

// role is a chunk server: the work of a child process.
type role struct{ Dir, Meta, Listen, Advertise, Name, Topology string }

// Run serves until the parent is gone.
func (c role) Run() error {
	ctx := context.Background()
	cs, release, err := local.RunChunkServer(ctx, local.ChunkConfig{
		Dir: c.Dir, Meta: []string{c.Meta}, Listen: c.Listen, Advertise: c.Advertise, Creds: peer.Insecure(),
		Congestion: "cubic", Topology: c.Topology, Class: "ssd", Name: c.Name, Logger: slog.New(slog.DiscardHandler),
	})
	if err != nil {
		return err
	}
	child.Ready(c.Advertise)
	child.Orphaned()
	return errors.Join(cs.Close(ctx), release())
}

// site is the cluster.
type site struct {
	t       *testing.T
	dir     string
	meta    *local.Meta
	servers []*chunkServer
}

type chunkServer struct {
	s     *site
	n     int
	proc  *child.Process
	dir   string
	port  string
	relay *relay
}

func newSite(t *testing.T, servers int) *site {
	t.Helper()
	dir, err := os.MkdirTemp("/var/tmp", "ps-") // short: the directory holds sockets
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	s := &site{t: t, dir: dir}
	quiet := slog.New(slog.DiscardHandler)
	var release func() error
	s.meta, release, err = local.RunMeta(context.Background(), local.MetaConfig{Dir: filepath.Join(dir, "m"), Name: "m", Logger: quiet})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
		defer cancel()
		if err := s.meta.Close(ctx); err != nil {
			t.Log(err)
		}
		_ = release()
	})
	for i := range servers {
		c := &chunkServer{s: s, n: i + 1, dir: filepath.Join(dir, fmt.Sprint("c", i+1))}
		c.port = port.Free(t)
		if c.relay, err = newRelay(c.port); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(c.relay.close)
		c.start()
		t.Cleanup(c.kill)
		s.servers = append(s.servers, c)
	}
	s.eventually("the chunk servers are there", func() bool { return s.there() == servers })
	return s
}

// there is the number of chunk servers known to the metadata server.
func (s *site) there() int { return s.meta.Server.Counters().ChunkServers }

func (s *site) eventually(what string, ok func() bool) {
	s.t.Helper()
	for end := time.Now().Add(90 * time.Second); !ok(); time.Sleep(20 * time.Millisecond) {
		if time.Now().After(end) {
			s.t.Fatalf("not within 90 s: %s", what)
		}
	}
}

func (c *chunkServer) start() {
	c.s.t.Helper()
	if err := os.MkdirAll(c.dir, 0o700); err != nil {
		c.s.t.Fatal(err)
	}
	c.proc = child.Start(c.s.t, role{Dir: c.dir, Meta: "unix:" + filepath.Join(c.s.dir, "m", local.MetaSocket), Listen: c.port,
		Advertise: c.relay.addr(), Name: fmt.Sprint("c", c.n), Topology: fmt.Sprintf("/dc/rack%d/n%d", c.n, c.n)})
}

func (c *chunkServer) kill() {
	if c.proc != nil {
		c.proc.Kill()
		c.proc = nil
	}
}

func (c *chunkServer) signal(sig syscall.Signal) {
	if err := c.proc.Signal(sig); err != nil {
		c.s.t.Error(err)
	}
}

func (s *site) metaAddr() string { return "unix:" + filepath.Join(s.dir, "m", local.MetaSocket) }

// volume makes a volume with three replicas.
func (s *site) volume(name string, replicas uint32) {
	s.t.Helper()
	o := operator.New(s.t, s.metaAddr(), nil)
	if _, err := o.CreateVolume(s.t.Context(), name, meta.Policy{Replicas: replicas, Spread: meta.SpreadHost}, meta.VolumeWords{Force: true}); err != nil {
		s.t.Fatal(err)
	}
}

func (s *site) client(name, volume string) (*penstock.Client, *penstock.Volume) {
	s.t.Helper()
	c, err := penstock.Dial(s.t.Context(), penstock.Config{Meta: []string{s.metaAddr()}, Name: name, Creds: peer.Insecure(), Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		s.t.Fatal(err)
	}
	v, err := c.Volume(s.t.Context(), volume)
	if err != nil {
		s.t.Fatal(err)
	}
	return c, v
}

// relay stands between clients and a chunk server. When held, the relay goes on taking
// connections and bytes and passes nothing on, as a broken network does.
type relay struct {
	ln net.Listener
	to string

	mu    sync.Mutex
	held  bool
	conns map[net.Conn]struct{}
}

func newRelay(to string) (*relay, error) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	r := &relay{ln: ln, to: to, conns: map[net.Conn]struct{}{}}
	go func() {
		for {
			nc, err := ln.Accept()
			if err != nil {
				return
			}
			go r.serve(nc)
		}
	}()
	return r, nil
}

func (r *relay) addr() string { return r.ln.Addr().String() }

func (r *relay) hold(held bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.held = held
	if !held { // a peer with swallowed bytes is out of step for good
		for c := range r.conns {
			c.Close()
		}
	}
}

func (r *relay) holds() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.held
}

func (r *relay) keep(c net.Conn, in bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if in {
		r.conns[c] = struct{}{}
	} else {
		delete(r.conns, c)
	}
}

func (r *relay) serve(nc net.Conn) {
	defer nc.Close()
	r.keep(nc, true)
	defer r.keep(nc, false)
	if r.holds() {
		_, _ = io.Copy(io.Discard, nc)
		return
	}
	up, err := net.Dial("tcp", r.to)
	if err != nil {
		return
	}
	defer up.Close()
	r.keep(up, true)
	defer r.keep(up, false)
	go func() { r.pass(up, nc); nc.Close(); up.Close() }()
	r.pass(nc, up)
}

func (r *relay) pass(to, from net.Conn) {
	buf := make([]byte, 256<<10)
	for {
		n, err := from.Read(buf)
		if n > 0 && !r.holds() {
			if _, err := to.Write(buf[:n]); err != nil {
				return
			}
		}
		if err != nil {
			return
		}
	}
}

func (r *relay) close() {
	r.ln.Close()
	r.hold(false)
}
