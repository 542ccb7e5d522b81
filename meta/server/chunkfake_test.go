package server

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/client"
	"penstock.io/penstock/meta/wire"
)

// fakeChunks is a chunk server that has chunks of the lengths that a test sets, and remembers the
// orders of the owner.
type fakeChunks struct {
	id   meta.ServerID
	stop context.CancelFunc // ends the fake's connection for good

	mu     sync.Mutex
	chunks map[meta.ChunkID]meta.OrderResult
	orders []meta.Order
	away   bool          // answers nothing but Unavailable
	stuck  chan struct{} // closed when the server goes on; nil: the server does not hang
	no     meta.Kind     // the error of seals

	copying func(meta.Order) // called with each order to copy before the copy begins; may be nil
	sealing func(meta.Order) // called with each order to seal after the seal, before the answer leaves
}

func (f *fakeChunks) order(ctx context.Context, o meta.Order) meta.OrderResult {
	r := f.obey(ctx, o)
	f.mu.Lock()
	sealing := f.sealing
	f.mu.Unlock()
	if sealing != nil && o.Kind == meta.OrderSeal {
		sealing(o)
	}
	return r
}

func (f *fakeChunks) obey(ctx context.Context, o meta.Order) meta.OrderResult {
	f.mu.Lock()
	if stuck := f.stuck; stuck != nil {
		f.mu.Unlock()
		select {
		case <-stuck:
		case <-ctx.Done():
		}
		f.mu.Lock()
	}
	if copying := f.copying; copying != nil && o.Kind == meta.OrderCopy {
		f.mu.Unlock()
		copying(o)
		f.mu.Lock()
	}
	defer f.mu.Unlock()
	if o.Kind == meta.OrderKeys {
		return meta.OrderResult{}
	}
	f.orders = append(f.orders, o)
	if f.away {
		return meta.OrderResult{Err: meta.Unavailable}
	}
	r, ok := f.chunks[o.Chunk]
	switch {
	case o.Kind == meta.OrderCopy && r.State != meta.ChunkSealed && r.Fence.Seals == 0:
		r = meta.OrderResult{State: meta.ChunkOpen, Length: o.Length, Existing: true}
		for _, run := range o.Ranges {
			r.Length += run.Len
		}
		r.Synced = r.Length
		f.chunks[o.Chunk] = r
	case o.Kind == meta.OrderCopy:
		return meta.OrderResult{Err: meta.Fenced}
	case !ok && o.Kind != meta.OrderDelete:
		return meta.OrderResult{Err: meta.NoSuchChunk}
	case o.Kind == meta.OrderDelete:
		delete(f.chunks, o.Chunk)
	case o.Kind == meta.OrderSeal && f.no != meta.KindOK:
		return meta.OrderResult{Err: f.no}
	case o.Kind == meta.OrderSeal:
		r.Fence = o.Fence
		if o.Final {
			r.State, r.Length = meta.ChunkSealed, o.Length
		}
		f.chunks[o.Chunk] = r
	}
	return r
}

// copied lists the orders to copy that the server got.
func (f *fakeChunks) copied() []meta.Order {
	f.mu.Lock()
	defer f.mu.Unlock()
	return slices.DeleteFunc(slices.Clone(f.orders), func(o meta.Order) bool { return o.Kind != meta.OrderCopy })
}

// has makes the server list a chunk.
func (f *fakeChunks) has(id meta.ChunkID, length, synced uint64) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.chunks[id] = meta.OrderResult{State: meta.ChunkOpen, Length: length, Synced: synced, Existing: true}
}

// cut makes the server list a chunk, in its present state, with a given length.
func (f *fakeChunks) cut(id meta.ChunkID, length uint64) {
	f.mu.Lock()
	defer f.mu.Unlock()
	r := f.chunks[id]
	r.Length = length
	f.chunks[id] = r
}

func (f *fakeChunks) setAway(away bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.away = away
}

// hang makes the server answer nothing until wake, like a stopped process.
func (f *fakeChunks) hang() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.stuck = make(chan struct{})
}

func (f *fakeChunks) wake() {
	f.mu.Lock()
	defer f.mu.Unlock()
	close(f.stuck)
	f.stuck = nil
}

// refuse makes seals fail from now on.
func (f *fakeChunks) refuse(k meta.Kind) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.no = k
}

// ordered lists the orders of a kind for a chunk.
func (f *fakeChunks) ordered(id meta.ChunkID, k meta.OrderKind) []meta.Order {
	f.mu.Lock()
	defer f.mu.Unlock()
	return slices.DeleteFunc(slices.Clone(f.orders), func(o meta.Order) bool { return o.Chunk != id || o.Kind != k })
}

func (s *site) chunkServer(id meta.ServerID) *fakeChunks {
	s.t.Helper()
	return s.chunkServerAt(id, "")
}

// chunkServerAt starts a chunk server at a place in the topology.
func (s *site) chunkServerAt(id meta.ServerID, place string) *fakeChunks {
	s.t.Helper()
	return s.chunkServerOf(id, place, "")
}

// chunkServerOf starts a chunk server at a place in the topology; the server's disks have a
// class.
func (s *site) chunkServerOf(id meta.ServerID, place, class string) *fakeChunks {
	s.t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	f := &fakeChunks{id: id, stop: cancel, chunks: map[meta.ChunkID]meta.OrderResult{}}
	done := make(chan error, 1)
	go func() {
		done <- client.RunLink(ctx, client.LinkConfig{
			Addrs: []string{"unix:" + s.addr}, Name: fmt.Sprint("chunks", id), Order: f.order,
			Report: func() wire.Report {
				return wire.Report{Info: meta.ServerInfo{ID: id, Addr: "unix:/nowhere", Topology: place, Class: class, Total: 1 << 40, Free: 1 << 39}}
			},
		})
	}()
	s.t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			s.t.Error(err)
		}
	})
	wait, stop := context.WithTimeout(context.Background(), time.Minute)
	defer stop()
	if err := s.srv.chunkServers.AwaitServer(wait, []meta.ServerID{id}); err != nil {
		s.t.Fatal(err)
	}
	return f
}

func (p *peer) alloc(t *testing.T, own bool) meta.ChunkGrant {
	t.Helper()
	g, err := p.AllocChunks(t.Context(), 1, 1, own)
	if err != nil {
		t.Fatal(err)
	}
	return g[0]
}

// commit maps n bytes of a chunk to the beginning of a file.
func (p *peer) commit(t *testing.T, ino meta.Ino, g meta.ChunkGrant, off, n uint64, synced bool) {
	t.Helper()
	p.do(t, &meta.Write{Ino: ino, Extents: []meta.Extent{{Off: 0, Len: n, Chunk: g.ID, ChunkOff: off}}, Size: n, Synced: synced}, meta.LeaseNone)
}
