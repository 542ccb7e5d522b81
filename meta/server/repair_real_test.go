package server

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	chunkclient "penstock.io/penstock/chunkserver/client"
	chunks "penstock.io/penstock/chunkserver/server"
	disk "penstock.io/penstock/chunkserver/store"
	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/client"
	"penstock.io/penstock/meta/wire"
)

// realServer is a chunk server as it runs in production, on a folder.
func (g *grid) realServer(id meta.ServerID, at string) (stop func()) {
	t := g.t
	dir := t.TempDir()
	log := slog.New(slog.DiscardHandler)
	if err := disk.Init(disk.DirDisk(dir), disk.Options{}); err != nil {
		t.Fatal(err)
	}
	st, err := disk.Open(disk.DirDisk(dir), disk.Options{Logger: log})
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(dir, "s")
	srv := chunks.New(chunks.Config{
		ID: id, Addr: "unix:" + path, Topology: at, Logger: log, PullRate: 4 << 30, ScrubPeriod: -1,
		Peers: func(where func(meta.ServerID) (meta.ServerInfo, bool), cap func(meta.ChunkID) []byte) chunks.Peers {
			return chunkclient.New(chunkclient.Config{Resolve: where, ReadChunkCap: cap, Logger: log})
		},
	}, st)
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
			Addrs: []string{"unix:" + g.s.addr}, Name: fmt.Sprint("real", id), Order: order, Events: srv.Events, Interval: 100 * time.Millisecond,
			Report: func() wire.Report { return wire.Report{Info: srv.Info(), Generation: srv.Generation()} },
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
	wait, c := context.WithTimeout(context.Background(), 5*time.Second)
	defer c()
	if err := g.s.srv.AwaitServer(wait, []meta.ServerID{id}); err != nil {
		t.Fatal(err)
	}
	return stop
}

// Real chunk servers: one dies, its chunks are copied by the others, and every
// byte is read back from what is left of the replicas.
func TestRepairWithRealServers(t *testing.T) {
	g := newGrid(t, func(c *Config) { c.RepairServerRate, c.RepairRate = 4<<30, 4<<30 })
	stops := map[meta.ServerID]func(){}
	for i := range 4 {
		stops[meta.ServerID(i+1)] = g.realServer(meta.ServerID(i+1), racks[i])
	}
	p := g.s.dial("a")
	g.policy(p, meta.Policy{Replicas: 2})
	cl := chunkclient.New(chunkclient.Config{Resolve: g.s.srv.Resolve, ReadCap: g.s.srv.SystemReadCap, Logger: slog.New(slog.DiscardHandler)})
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
				t.Errorf("%v on server %d has other bytes", rec.ID, id)
			}
		}
	}
	if r, err := g.s.srv.Fsck(t.Context(), 1); err != nil || r.Count != 0 {
		t.Errorf("fsck: %v %+v", err, r)
	}
}

// An owner decides that a chunk ends, and its order to freeze it stays on its
// way. Another one takes the volume and looks around. When the order arrives it
// is refused: the writer, who is the next owner's by then, goes on.
func TestStoppedOwnersFreeze(t *testing.T) {
	g := newGrid(t, nil)
	g.realServer(1, racks[0])
	p := g.s.dial("a")
	cl := chunkclient.New(chunkclient.Config{Resolve: g.s.srv.Resolve, Logger: slog.New(slog.DiscardHandler)})
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
	o := g.s.srv.opened(1)
	first := o.own.Term()
	sealed := make(chan error, 1)
	go func() {
		_, err := o.seal(o.ctx, gr.ID, nil)
		sealed <- err
	}()
	// Its lease ends; the next owner is in the same process.
	time.Sleep(50 * time.Millisecond)
	g.s.cluster.lose(1)
	if err := <-sealed; err == nil {
		t.Fatal("an order that did not arrive sealed the chunk")
	}
	eventually(t, "another owner", func() error {
		o, err := g.s.srv.open(t.Context(), 1)
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
