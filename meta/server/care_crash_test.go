package server

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/namespace"
)

// crashing runs a story and stops the owner, as a crash would, at the k-th order, carried out or
// not; the next owner finishes the story.
func crashing(t *testing.T, k int, carryOut bool) (reached bool) {
	g := newGrid(t, nil, racks...)
	p := g.s.dial("a")
	g.policy(p, meta.Policy{Replicas: 3, Spread: meta.SpreadRack})
	for i := range 4 {
		g.chunk(p, fmt.Sprint("f", i), 400)
	}
	// A file is deleted while repair copies the file's chunk.
	g.await("full", full)
	crash := make(chan struct{})
	n := 0
	g.mu.Lock()
	g.before = func(meta.ServerID, meta.Order) bool {
		g.mu.Lock()
		defer g.mu.Unlock()
		n++
		if n == k {
			close(crash)
		}
		return n < k || carryOut && n == k
	}
	g.mu.Unlock()
	victim := g.records()[0].Servers[0]
	g.nodes[victim].halt()
	bad := g.records()[1].Servers[1]
	if bad != victim {
		node := g.nodes[bad]
		node.mu.Lock()
		c := node.chunks[g.records()[1].ID]
		c.corrupt, c.told = true, true
		node.mu.Unlock()
	}
	gone := p.do(t, &meta.Unlink{Parent: meta.RootIno, Name: "f3"}, meta.LeaseNone).Attr.Ino
	p.do(t, &meta.ReleaseOrphans{Inos: []meta.Ino{gone}}, meta.LeaseNone)
	done := make(chan struct{})
	srv := g.s.srv
	go func() {
		defer close(done)
		deadline := time.Now().Add(time.Minute)
		for time.Now().Before(deadline) {
			st, err := srv.repairs.RepairStatus(t.Context(), 0)
			if err != nil || srv.ctx.Err() != nil || st.Copied > 0 && st.Full() {
				return
			}
			time.Sleep(10 * time.Millisecond)
		}
	}()
	select {
	case <-crash:
		reached = true
	case <-done:
	}
	g.mu.Lock()
	g.before = nil
	g.mu.Unlock()
	// A client that reads by the journal now finds at least one good replica.
	g.s.crash()
	<-done
	g.s.start()
	for _, rec := range g.records() {
		good := 0
		for _, id := range rec.Servers {
			node := g.nodes[id]
			node.mu.Lock()
			if c := node.chunks[rec.ID]; c != nil && !c.corrupt && c.state == meta.ChunkSealed {
				good++
			}
			node.mu.Unlock()
		}
		if good == 0 && rec.State == meta.ChunkSealed {
			t.Errorf("order %d: %v has no good replica", k, rec)
		}
	}
	g.await("full", func(st *RepairStatus) bool { return full(st) && st.Chunks == 3 })
	g.exact(3)
	if t.Failed() {
		t.Logf("crashed at order %d, carried out: %v", k, carryOut)
	}
	return reached
}

func TestRepairSurvivesCrashes(t *testing.T) {
	t.Parallel()
	steps := 0
	for k := 1; ; k++ {
		// The answer is lost, or the order, too.
		reached := crashing(t, k, true) && crashing(t, k, false)
		if t.Failed() {
			return
		}
		if !reached {
			break
		}
		steps++
		if steps > 60 {
			break
		}
	}
	t.Logf("stopped at %d orders", steps)
	if steps < 3 { // 4 to 6, as the machine is busy
		t.Errorf("the story has %d orders only", steps)
	}
}

// compacting fills a chunk with two files, removes a file, and stops the owner at the k-th order
// of the compaction; the successor ends with the other file's bytes in a chunk of their own, and
// nothing else anywhere. With join, both files stay; the small file is in many pieces in two
// chunks, and ends up in a single chunk.
func compacting(t *testing.T, join bool, k int, carryOut bool) (reached bool) {
	var begun atomic.Bool
	g := newGrid(t, func(c *Config) {
		c.CompactInterval, c.JoinLeast = 50*time.Millisecond, 4
		c.joinNow = func() bool { return join && begun.Load() }
	}, racks[0], racks[2], racks[4])
	p := g.s.dial("a")
	g.policy(p, meta.Policy{Replicas: 3})
	crash := make(chan struct{})
	n := 0
	count := false
	g.mu.Lock()
	g.before = func(meta.ServerID, meta.Order) bool {
		g.mu.Lock()
		defer g.mu.Unlock()
		if !count {
			return true
		}
		n++
		if n == k {
			close(crash)
		}
		return n < k || carryOut && n == k
	}
	g.mu.Unlock()
	// fill makes a chunk of n bytes, still open.
	fill := func(n int) (meta.ChunkID, []byte) {
		gr := p.alloc(t, false)
		data := make([]byte, n)
		for i := range data {
			data[i] = byte(rand.Uint32())
		}
		for _, id := range gr.Servers {
			node := g.nodes[id]
			node.mu.Lock()
			node.chunks[gr.ID] = &gridChunk{data: slices.Clone(data), state: meta.ChunkOpen, fence: gr.Fence}
			node.mu.Unlock()
		}
		return gr.ID, data
	}
	put := func(ino meta.Ino, chunk meta.ChunkID, fileOff, chunkOff, n uint64) {
		p.do(t, &meta.Write{Ino: ino, Synced: true, Size: fileOff + n, Extents: []meta.Extent{{Off: fileOff, Len: n, Chunk: chunk, ChunkOff: chunkOff}}}, meta.LeaseNone)
	}
	seal := func(id meta.ChunkID) {
		if _, err := p.SealChunk(t.Context(), 1, id); err != nil {
			t.Fatal(err)
		}
	}
	begin := func() {
		g.mu.Lock()
		count = true
		g.mu.Unlock()
		begun.Store(true)
	}
	const piece = 700 << 10
	small := p.create(t, "small").Attr.Ino
	var old []meta.ChunkID
	var want []byte
	if join {
		const some = 20
		a, x := fill(some * 1000)
		b, y := fill(some * 1000)
		old = []meta.ChunkID{a, b}
		for i := range uint64(some) {
			put(small, a, 2000*i, 1000*(some-1-i), 1000)
			put(small, b, 2000*i+1000, 1000*i, 1000)
			want = slices.Concat(want, x[1000*(some-1-i):1000*(some-i)], y[1000*i:1000*(i+1)])
		}
		seal(a)
		seal(b)
		begin()
	} else {
		big := p.create(t, "big").Attr.Ino
		id, data := fill(3 * piece)
		old = []meta.ChunkID{id}
		// The small file lies in pieces around the big file, out of order.
		put(small, id, 0, 2*piece+piece/2, piece/2)
		put(big, id, 0, piece/2, 2*piece)
		put(small, id, piece/2, 0, piece/2)
		want = slices.Concat(data[2*piece+piece/2:], data[:piece/2])
		seal(id)
		begin()
		p.do(t, &meta.Unlink{Parent: meta.RootIno, Name: "big"}, meta.LeaseNone)
		p.do(t, &meta.ReleaseOrphans{Inos: []meta.Ino{big}}, meta.LeaseNone)
	}
	compacted := func() bool {
		recs := g.records()
		return len(recs) == 1 && !slices.Contains(old, recs[0].ID) && recs[0].State == meta.ChunkSealed
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		for deadline := time.Now().Add(time.Minute); time.Now().Before(deadline) && !compacted(); time.Sleep(10 * time.Millisecond) {
			select {
			case <-crash:
				return
			default:
			}
		}
	}()
	select {
	case <-crash:
		reached = true
	case <-done:
	}
	<-done
	g.mu.Lock()
	g.before = nil
	g.mu.Unlock()
	read := func() {
		t.Helper()
		o := g.s.srv.hosted.opened(1)
		o.mu.Lock()
		defer o.mu.Unlock()
		var got []byte
		var exts []meta.Extent
		if err := namespace.Extents(o.view(), func(ino meta.Ino, e meta.Extent) bool {
			if ino == small {
				exts = append(exts, e)
			}
			return true
		}); err != nil {
			t.Fatal(err)
		}
		for _, e := range exts {
			rec, _, err := namespace.ReadChunk(o.view(), e.Chunk)
			if err != nil {
				t.Fatal(err)
			}
			node := g.nodes[rec.Servers[0]]
			node.mu.Lock()
			if c := node.chunks[e.Chunk]; c != nil && uint64(len(c.data)) >= e.ChunkOff+e.Len {
				got = append(got, c.data[e.ChunkOff:e.ChunkOff+e.Len]...)
			}
			node.mu.Unlock()
		}
		if !slices.Equal(got, want) {
			t.Errorf("order %d, carried out %v: the file has other bytes: %d of %d, extents %v", k, carryOut, len(got), len(want), exts)
		}
	}
	g.s.crash()
	g.s.start()
	read()
	eventually(t, "compacted", func() error { return unless(compacted()) })
	g.await("the old chunks are gone", full) // asked after the old chunks are gone
	// The order follows from the last look at all servers.
	eventually(t, "each replica is as its record says", func() error { return g.inexact(3) })
	read()
	g.exact(3)
	return reached
}

func TestCompactionSurvivesCrashes(t *testing.T) {
	t.Parallel()
	steps := 0
	for k := 1; steps < 40; k++ {
		reached := compacting(t, false, k, true) && compacting(t, false, k, false)
		if t.Failed() {
			return
		}
		if !reached {
			break
		}
		steps++
	}
	t.Logf("stopped at %d orders", steps)
	if steps < 8 {
		t.Errorf("the story has %d orders only", steps)
	}
}

func TestJoinSurvivesCrashes(t *testing.T) {
	t.Parallel()
	k := 1
	for ; k < 40 && compacting(t, true, k, k%2 == 0); k++ {
		if t.Failed() {
			return
		}
	}
	t.Logf("stopped at %d orders", k-1)
	if k <= 8 {
		t.Errorf("the story has %d orders only", k-1)
	}
}
