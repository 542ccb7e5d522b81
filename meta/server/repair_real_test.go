package server

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net"
	"path/filepath"
	"slices"
	"sync"
	"syscall"
	"testing"
	"time"

	chunkclient "penstock.io/penstock/chunkserver/client"
	chunks "penstock.io/penstock/chunkserver/server"
	disk "penstock.io/penstock/chunkserver/store"
	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/client"
	"penstock.io/penstock/meta/wire"
	loop "penstock.io/penstock/test/disk"
)

// realServer is a chunk server as in production, on a folder.
func (g *grid) realServer(id meta.ServerID, at string) (stop func()) {
	_, stop = g.realServerOn(id, at, g.t.TempDir())
	return stop
}

// realServerOn is a realServer with disks.
func (g *grid) realServerOn(id meta.ServerID, at string, dirs ...string) (srv *chunks.Server, stop func()) {
	return g.realServerWith(chunks.Config{ID: id, Topology: at}, dirs...)
}

// realServerWith is a realServer with settings of its own.
func (g *grid) realServerWith(cfg chunks.Config, dirs ...string) (srv *chunks.Server, stop func()) {
	t, id := g.t, cfg.ID
	log := slog.New(slog.DiscardHandler)
	var specs []chunks.DiskSpec
	for _, dir := range dirs {
		specs = append(specs, chunks.DiskSpec{Path: dir, Class: "ssd"})
	}
	ds, err := chunks.OpenDisks(chunks.DisksConfig{Dir: t.TempDir(), Disks: specs, Server: id, Logger: log, Options: disk.Options{Reserve: 1 << 20}})
	if err == nil {
		err = ds.FirstError()
	}
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(t.TempDir(), "s")
	cfg.Addr, cfg.Logger, cfg.PullRate, cfg.ScrubPeriod = "unix:"+path, log, 4<<30, -1
	cfg.Peers = func(where func(meta.ServerID) (meta.ServerInfo, bool), cap func(meta.ChunkID) []byte) chunks.Peers {
		return chunkclient.New(chunkclient.Config{Resolve: where, ReadChunkCap: cap, Logger: log})
	}
	srv = chunks.NewWithDisks(cfg, ds)
	l, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 2)
	go func() { done <- srv.Serve(ctx, l) }()
	order := func(call context.Context, o meta.Order) meta.OrderResult {
		g.mu.Lock()
		before := g.before
		g.mu.Unlock()
		if before != nil && o.Kind != meta.OrderKeys && !before(id, o) {
			g.mu.Lock()
			g.late = append(g.late, func() meta.OrderResult { return srv.Order(ctx, o) })
			g.mu.Unlock()
			<-call.Done()
			return meta.OrderResult{Err: meta.Canceled}
		}
		return srv.Order(call, o)
	}
	go func() {
		done <- client.RunLink(ctx, client.LinkConfig{
			Addrs: []string{"unix:" + g.s.addr}, Name: fmt.Sprint("real", id), Order: order, Events: srv.Events, Interval: 100 * time.Millisecond, Clock: srv.HeardClock,
			Report: func() wire.Report {
				return wire.Report{Info: srv.Info(), Generation: srv.Generation(), Now: srv.Clock()}
			},
		})
	}()
	stopped := false
	stop = func() {
		if stopped {
			return
		}
		stopped = true
		cancel()
		srv.Close()
		<-done
		<-done
	}
	t.Cleanup(stop)
	wait, c := context.WithTimeout(context.Background(), time.Minute)
	defer c()
	if err := g.s.srv.chunkServers.AwaitServer(wait, []meta.ServerID{id}); err != nil {
		t.Fatal(err)
	}
	return srv, stop
}

// fillWith writes n sealed chunks of a size in bytes.
func (g *grid) fillWith(p *peer, n, size int) {
	g.t.Helper()
	cl := chunkclient.New(chunkclient.Config{Resolve: g.s.srv.chunkServers.Resolve, Logger: slog.New(slog.DiscardHandler), Timeout: 30 * time.Second})
	defer cl.Close()
	for i := range n {
		ino := p.create(g.t, fmt.Sprint("chunk", i)).Attr.Ino
		gr := p.alloc(g.t, true)
		w := cl.NewWriter(gr)
		if _, err := w.Append(g.t.Context(), make([]byte, size)); err != nil {
			g.t.Fatal(err)
		}
		if err := w.Sync(g.t.Context()); err != nil {
			g.t.Fatal(err)
		}
		w.Close()
		p.commit(g.t, ino, gr, 0, uint64(size), true)
		if _, err := p.SealChunk(g.t.Context(), 1, gr.ID); err != nil {
			g.t.Fatal(err)
		}
	}
}

// Of two chunk servers, each with a disk of its own, the first is fuller, and an empty server
// joins: chunks move onto the empty server until the fills are within the band, though the old
// replicas are deleted late, and then no more chunks move.
func TestNewServerFills(t *testing.T) {
	t.Parallel()
	const size = 1 << 20
	g := newGrid(t, func(c *Config) {
		c.Balance, c.RepairGrace = 0.1, 3*time.Second
		c.RepairServerRate, c.RepairRate = 1<<30, 1<<30
	})
	var servers []*chunks.Server
	join := func(mib int64) {
		id := meta.ServerID(len(servers) + 1)
		dir := t.TempDir()
		d, err := loop.New(filepath.Join(dir, "image"), filepath.Join(dir, "disk"), mib<<20)
		if d != nil {
			t.Cleanup(func() {
				if err := d.Remove(); err != nil {
					t.Error(err)
				}
			})
		}
		if err != nil {
			t.Fatal(err)
		}
		srv, _ := g.realServerOn(id, racks[id-1], d.At)
		servers = append(servers, srv)
	}
	join(64)
	join(96)
	p := g.s.dial("a")
	g.policy(p, meta.Policy{Replicas: 1})
	g.fillWith(p, 60, size)
	settled := func(st *RepairStatus) bool { return full(st) && st.Imbalanced == 0 }
	g.await("settled", settled)
	where := map[meta.ChunkID]meta.ServerID{}
	for _, r := range g.records() {
		where[r.ID] = r.Servers[0]
	}
	before := g.status().Copied
	move := g.holdsPulls()
	defer move()
	join(64)
	st := g.await("chunks are to move", func(st *RepairStatus) bool { return st.Imbalanced > 0 && st.Nodes[3].ToArrive > 0 })
	var leave, arrive uint64
	for _, n := range st.Nodes {
		leave, arrive = leave+n.ToLeaveBytes, arrive+n.ToArriveBytes
	}
	if leave != arrive || leave != st.Imbalanced*size {
		t.Errorf("%d bytes are to leave, %d to arrive, in %d chunks", leave, arrive, st.Imbalanced)
	}
	move()
	// A server's report may miss the latest deletions and copies, and a report may then move
	// nothing: settled waits for a lasting state.
	var copies uint64
	since := time.Now()
	st = g.await("moved, and what was left behind is deleted", func(st *RepairStatus) bool {
		if !settled(st) || st.Copied != copies {
			copies, since = st.Copied, time.Now()
		}
		return time.Since(since) > 3*reportLag
	})
	moved := uint64(0)
	for _, r := range g.records() {
		if r.Servers[0] != where[r.ID] {
			moved++
		}
	}
	if got := st.Copied - before; got > moved+moved/4 || moved < 10 {
		t.Errorf("%d copies for %d chunks that lie elsewhere now: some went to and fro", got, moved)
	}
	lo, hi := 1.0, 0.0
	for _, s := range servers {
		i := s.Info()
		fill := 1 - float64(i.Free)/float64(i.Total)
		lo, hi = min(lo, fill), max(hi, fill)
		t.Logf("server %d: %d MiB, %.3f full", i.ID, i.Total>>20, fill)
	}
	if hi-lo > 0.1+0.04 { // a chunk, and the file system's overhead for the chunk
		t.Errorf("fills from %.3f to %.3f", lo, hi)
	}
}

// holdsPulls keeps chunk servers from copying until move is called: the test must see the plan
// before the copies.
func (g *grid) holdsPulls() (move func()) {
	counted := make(chan struct{})
	g.mu.Lock()
	defer g.mu.Unlock()
	g.before = func(_ meta.ServerID, o meta.Order) bool {
		if o.Kind == meta.OrderPull {
			<-counted
		}
		return true
	}
	return sync.OnceFunc(func() { close(counted) })
}

// A disk is given up, and its server is the only server: the disk's replicas move to the server's
// other disk.
func TestFailedDiskMovesWithinItsServer(t *testing.T) {
	t.Parallel()
	g := newGrid(t, nil)
	srv, _ := g.realServerOn(1, racks[0], t.TempDir(), t.TempDir())
	p := g.s.dial("a")
	g.policy(p, meta.Policy{Replicas: 1})
	g.fillWith(p, 24, 100_000)
	g.await("full", full)
	bad := srv.Info().Disks[0].ID
	on := func() (n int) {
		for _, c := range srv.Order(t.Context(), meta.Order{Kind: meta.OrderList, Volume: 1, Term: 1}).Chunks {
			if c.Disk == bad {
				n++
			}
		}
		return n
	}
	if n := on(); n == 0 || n == 24 {
		t.Fatalf("%d of 24 chunks lie on the disk", n)
	}
	move := g.holdsPulls()
	defer move()
	if r := srv.Order(t.Context(), meta.Order{Kind: meta.OrderDisk, Disk: bad}); r.Err != meta.KindOK {
		t.Fatalf("%+v", r)
	}
	g.await("counted by disk", func(st *RepairStatus) bool { return st.Disks[bad].Chunks > 0 && st.Disks[bad].Bytes > 0 })
	move()
	g.await("moved", func(st *RepairStatus) bool {
		return on() == 0 && full(st) && st.Unscanned == 0 && st.Disks[bad] == DiskChunks{}
	})
	if l := srv.Order(t.Context(), meta.Order{Kind: meta.OrderList, Volume: 1, Term: 1}).Chunks; len(l) != 24 {
		t.Errorf("%d chunks are left", len(l))
	}
	for _, r := range g.records() {
		if !slices.Equal(r.Servers, []meta.ServerID{1}) {
			t.Errorf("%v is on %v", r.ID, r.Servers)
		}
	}
}

// Real chunk servers: a server dies, the others copy its chunks, and a client reads every byte
// back from the remaining replicas.
func TestRepairWithRealServers(t *testing.T) {
	g := newGrid(t, func(c *Config) { c.RepairServerRate, c.RepairRate = 4<<30, 4<<30 })
	stops := map[meta.ServerID]func(){}
	for i := range 4 {
		stops[meta.ServerID(i+1)] = g.realServer(meta.ServerID(i+1), racks[i])
	}
	p := g.s.dial("a")
	g.policy(p, meta.Policy{Replicas: 2})
	cl := chunkclient.New(chunkclient.Config{Resolve: g.s.srv.chunkServers.Resolve, ReadCap: g.s.srv.chunkServers.SystemReadCap, Logger: slog.New(slog.DiscardHandler), Timeout: 30 * time.Second})
	t.Cleanup(func() { cl.Close() })
	const size = 8 << 20
	want := map[meta.ChunkID][]byte{}
	for i := range 24 {
		ino := p.create(t, fmt.Sprint("f", i)).Attr.Ino
		gr := p.alloc(t, true)
		data := make([]byte, size)
		r := rand.New(rand.NewPCG(uint64(i), 1))
		for j := 0; j < size; j += 8 {
			x := r.Uint64()
			for b := range 8 {
				data[j+b] = byte(x >> (8 * b))
			}
		}
		w := cl.NewWriter(gr)
		for off := 0; off < size; off += 1 << 20 {
			if _, err := w.Append(t.Context(), data[off:off+1<<20]); err != nil {
				t.Fatal(err)
			}
		}
		if err := w.Sync(t.Context()); err != nil {
			t.Fatal(err)
		}
		w.Close()
		p.commit(t, ino, gr, 0, size, true)
		if _, err := p.SealChunk(t.Context(), 1, gr.ID); err != nil {
			t.Fatal(err)
		}
		want[gr.ID] = data
	}
	g.await("full", full)
	cpu := func() time.Duration {
		var u syscall.Rusage
		if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
			t.Fatal(err)
		}
		return time.Duration(u.Utime.Nano() + u.Stime.Nano())
	}
	stops[1]()
	g.await("copying", func(st *RepairStatus) bool { return st.Degraded() > 0 || st.Copying > 0 || st.Copied > 0 })
	began, used := time.Now(), cpu()
	first := g.status().CopiedBytes
	g.await("copied", func(st *RepairStatus) bool { return st.Degraded() == 0 })
	took, spent := time.Since(began), cpu()-used
	st := g.await("full again", full)
	n := st.CopiedBytes - first
	t.Logf("%d MiB copied in %v: %.0f MB/s, %.2f CPU-s/GB (both ends)", n>>20, took.Round(time.Millisecond), float64(n)/1e6/took.Seconds(), spent.Seconds()*1e9/float64(max(n, 1)))
	for _, rec := range g.records() {
		if len(rec.Servers) != 2 {
			t.Errorf("%v", rec)
		}
		for _, id := range rec.Servers { // each replica by itself
			got := make([]byte, size)
			if err := cl.ReadAt(t.Context(), meta.ChunkPlace{ID: rec.ID, Servers: []meta.ServerID{id}, Sealed: true, Length: rec.Length}, got, 0); err != nil {
				t.Errorf("%v on server %d: %v", rec.ID, id, err)
			} else if !bytes.Equal(got, want[rec.ID]) {
				t.Errorf("DATA: %v on server %d has other bytes", rec.ID, id)
			}
		}
	}
	if r, err := g.s.srv.checker.Fsck(t.Context(), 1); err != nil || r.Count != 0 {
		t.Errorf("DATA: fsck: %v %+v", err, r)
	}
}

// An owner decides that a chunk ends, and the order to freeze the chunk stays on its way. Another
// owner takes the volume and looks around. When the order arrives, the chunk server refuses the
// order: the writer, by then a client of the next owner, goes on.
func TestStoppedOwnersFreeze(t *testing.T) {
	t.Parallel()
	g := newGrid(t, nil)
	g.realServer(1, racks[0])
	p := g.s.dial("a")
	cl := chunkclient.New(chunkclient.Config{Resolve: g.s.srv.chunkServers.Resolve, Logger: slog.New(slog.DiscardHandler), Timeout: 30 * time.Second})
	t.Cleanup(func() { cl.Close() })
	ino := p.create(t, "f").Attr.Ino
	gr := p.alloc(t, false)
	w := cl.NewWriter(gr)
	defer w.Close()
	if _, err := w.Append(t.Context(), make([]byte, 1000)); err != nil {
		t.Fatal(err)
	}
	if err := w.Sync(t.Context()); err != nil {
		t.Fatal(err)
	}
	p.commit(t, ino, gr, 0, 1000, true)
	g.mu.Lock()
	g.before = func(_ meta.ServerID, o meta.Order) bool { return o.Kind != meta.OrderSeal }
	g.mu.Unlock()
	o := g.s.srv.hosted.opened(1)
	first := o.own.Term()
	sealed := make(chan error, 1)
	go func() {
		_, err := o.sealing.seal(o.ctx, gr.ID, nil)
		sealed <- err
	}()
	// The owner's lease ends; the next owner is in the same process.
	time.Sleep(50 * time.Millisecond)
	g.s.cluster.lose(1)
	if err := <-sealed; err == nil {
		t.Fatal("an order that did not arrive sealed the chunk")
	}
	eventually(t, "another owner", func() error {
		o, err := g.s.srv.hosted.open(t.Context(), 1)
		if err == nil && o.own.Term() == first {
			err = meta.E("open", meta.Busy, "", nil)
		}
		return err
	})
	g.await("looked around", func(st *RepairStatus) bool { return st.Unscanned == 0 })
	g.mu.Lock()
	g.before = nil
	late := g.late
	g.mu.Unlock()
	if len(late) == 0 {
		t.Fatal("no order is on its way")
	}
	for _, arrive := range late {
		if r := arrive(); r.Err != meta.Fenced {
			t.Errorf("the late order is answered with %+v", r)
		}
	}
	if _, err := w.Append(t.Context(), make([]byte, 1000)); err != nil {
		t.Errorf("the writer is in trouble: %v", err)
	}
}
