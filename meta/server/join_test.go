package server

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	chunkclient "penstock.io/penstock/chunkserver/client"
	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/namespace"
)

// scribbler writes a file in blocks, anywhere, and knows the right contents.
type scribbler struct {
	g      *grid
	p      *peer
	cl     *chunkclient.Client
	ino    meta.Ino
	want   []byte
	writes uint64
	r      *rand.Rand
}

const blockSize = 4096

func (g *grid) scribbler(p *peer, name string, blocks int) *scribbler {
	cl := chunkclient.New(chunkclient.Config{Resolve: g.s.srv.chunkServers.Resolve, ReadCap: g.s.srv.chunkServers.SystemReadCap, Logger: slog.New(slog.DiscardHandler), Timeout: 30 * time.Second})
	g.t.Cleanup(func() { cl.Close() })
	return &scribbler{g: g, p: p, cl: cl, ino: p.create(g.t, name).Attr.Ino, want: make([]byte, blocks*blockSize), r: rand.New(rand.NewPCG(1, 2))}
}

// write puts new bytes into blocks, in a chunk of its own, a few blocks at a time, and seals the
// chunk.
func (s *scribbler) write(blocks []int) error {
	ctx := s.g.t.Context()
	gs, err := s.p.AllocChunks(ctx, 1, 1, false)
	if err != nil {
		return err
	}
	gr := gs[0]
	w := s.cl.NewWriter(gr)
	defer w.Close()
	at := uint64(0)
	for some := range slices.Chunk(blocks, 256) {
		op := &meta.Write{Ino: s.ino, Synced: true, Size: uint64(len(s.want))}
		buf := make([]byte, 0, len(some)*blockSize)
		for _, b := range some {
			// Each block names itself and its write.
			s.writes++
			block := make([]byte, blockSize)
			binary.BigEndian.PutUint64(block, uint64(b))
			for i := 8; i < blockSize; i += 8 {
				binary.BigEndian.PutUint64(block[i:], s.writes)
			}
			op.Extents = append(op.Extents, meta.Extent{Off: uint64(b) * blockSize, Len: blockSize, Chunk: gr.ID, ChunkOff: at + uint64(len(buf))})
			buf = append(buf, block...)
			copy(s.want[b*blockSize:], block)
		}
		if _, err := w.Append(ctx, buf); err != nil {
			return err
		}
		at += uint64(len(buf))
		if err := w.Sync(ctx); err != nil {
			return err
		}
		if _, err := s.p.Do(ctx, 1, meta.OpID{}, op, meta.LeaseNone); err != nil {
			return err
		}
	}
	_, err = s.p.SealChunk(ctx, 1, gr.ID)
	return err
}

// extents is the owner's map of the file.
func (s *scribbler) extents() (all []meta.Extent) {
	o := s.g.s.srv.hosted.opened(1)
	o.mu.Lock()
	defer o.mu.Unlock()
	if err := namespace.FileExtents(o.view(), s.ino, 0, 1<<60, func(e meta.Extent, _ bool) bool { all = append(all, e); return true }); err != nil {
		s.g.t.Error(err)
	}
	return all
}

// check reads the file, from each replica of its chunks. Meanwhile compaction may give the file
// other chunks and remove the old chunks: then check looks again.
func (s *scribbler) check() {
	t := s.g.t
	t.Helper()
	for deadline := time.Now().Add(30 * time.Second); ; {
		extents := s.extents()
		err := s.compare(extents)
		if err == nil {
			return
		}
		if slices.Equal(extents, s.extents()) || time.Now().After(deadline) {
			t.Fatal(err)
		}
	}
}

// compare reads the bytes of the extents, from each replica.
func (s *scribbler) compare(extents []meta.Extent) error {
	recs := map[meta.ChunkID]meta.ChunkRecord{}
	for _, rec := range s.g.records() {
		recs[rec.ID] = rec
	}
	for k := range 3 {
		got, some := make([]byte, len(s.want)), false
		for _, e := range extents {
			rec, ok := recs[e.Chunk]
			if !ok {
				return fmt.Errorf("%v: there is no such chunk", e)
			}
			if k >= len(rec.Servers) {
				continue
			}
			some = true
			pl := meta.ChunkPlace{ID: e.Chunk, Servers: rec.Servers[k : k+1], Sealed: rec.State == meta.ChunkSealed, Length: rec.Length}
			if err := s.cl.ReadAt(s.g.t.Context(), pl, got[e.Off:e.End()], e.ChunkOff); err != nil {
				return fmt.Errorf("%v on server %v: %w", e, pl.Servers, err)
			}
		}
		if k > 0 && !some {
			return nil // no more replicas exist
		}
		for b := range len(s.want) / blockSize {
			if g, w := got[b*blockSize:(b+1)*blockSize], s.want[b*blockSize:(b+1)*blockSize]; !bytes.Equal(g, w) {
				return fmt.Errorf("DATA: replica %d, block %d: it is block %d of write %d, ought to be write %d", k, b,
					binary.BigEndian.Uint64(g), binary.BigEndian.Uint64(g[8:]), binary.BigEndian.Uint64(w[8:]))
			}
		}
	}
	return nil
}

// joiner lets compaction look all the time when a test sets on.
func joiner(on *atomic.Bool) func(*Config) {
	return func(c *Config) {
		c.CompactInterval, c.JoinInterval, c.CompactRate = 20*time.Millisecond, time.Millisecond, 1<<30
		// Any piece of the file between two writes counts as small, so that the number of extents
		// at the end is no matter of chance.
		c.JoinLeast, c.JoinSmall = 4, 8<<20
		c.joinNow = on.Load
	}
}

// A file of thousands of small writes lies all over many chunks. While a client goes on
// overwriting the file, compaction joins the file: its map gets short, reads return the last
// written bytes, on every replica, and nothing else is left anywhere.
func TestJoinUnderWriters(t *testing.T) {
	t.Parallel()
	var on atomic.Bool
	g := newGrid(t, joiner(&on))
	for i := range 3 {
		g.realServer(meta.ServerID(i+1), racks[2*i])
	}
	p := g.s.dial("a")
	g.policy(p, meta.Policy{Replicas: 2})
	const blocks = 4096
	s := g.scribbler(p, "f", blocks)
	for some := range slices.Chunk(s.r.Perm(blocks), 512) {
		if err := s.write(some); err != nil {
			t.Fatal(err)
		}
	}
	before := len(s.extents())
	if before < blocks*9/10 {
		t.Fatalf("only %d extents", before)
	}
	s.check()
	stats := &g.s.srv.stats
	on.Store(true)
	// The writer goes on for as long as the first joins take.
	rounds := 0
	for deadline := time.Now().Add(60 * time.Second); (rounds < 10 || stats.compactedExtents.Load() < blocks) && time.Now().Before(deadline); rounds++ {
		if err := s.write(s.r.Perm(blocks)[:64]); err != nil {
			t.Fatal(err)
		}
	}
	g.await("joined", func(st *RepairStatus) bool { return full(st) && st.Deleting == 0 && len(s.extents()) < 32 })
	s.check()
	after := s.extents()
	chunks := map[meta.ChunkID]bool{}
	for _, e := range after {
		chunks[e.Chunk] = true
	}
	t.Logf("%d extents before, %d in %d chunks after %d writes beside; %d bytes in %d extents were moved, %d chunks filled, %d steps failed", before, len(after), len(chunks), rounds*64,
		stats.compactedBytes.Load(), stats.compactedExtents.Load(), stats.compacted.Load(), stats.compactFailed.Load())
	if r, err := g.s.srv.checker.Fsck(t.Context(), 1); err != nil || r.Count != 0 {
		t.Errorf("DATA: fsck: %v %+v", err, r)
	}
}

// rests fails if anything is moved while compaction looks around three times.
func (s *scribbler) rests(why string) {
	t := s.g.t
	t.Helper()
	moved := s.g.s.srv.stats.compactedExtents.Load()
	s.looks()
	if n := s.g.s.srv.stats.compactedExtents.Load() - moved; n != 0 {
		t.Errorf("%s: %d extents were moved", why, n)
	}
}

// looks waits until the present look is over, and three more.
func (s *scribbler) looks() {
	t := s.g.t
	t.Helper()
	o := s.g.s.srv.hosted.opened(1)
	look := o.compaction.looks.Load()
	eventually(t, "three looks", func() error { return unless(o.compaction.looks.Load() >= look+4) })
}

// space is the sum of all chunks.
func (s *scribbler) space() (n uint64) {
	for _, rec := range s.g.records() {
		n += rec.Length
	}
	return n / blockSize
}

func perm(r *rand.Rand, from, to int) (blocks []int) {
	for _, b := range r.Perm(to - from) {
		blocks = append(blocks, from+b)
	}
	return blocks
}

// Extents shared with a snapshot or another file stay where they are: a copy would take space,
// and free none. When the snapshot or the other file goes, compaction joins the extents. The same
// holds for chunks that are half dead.
func TestSharedExtentsAreNotJoined(t *testing.T) {
	t.Parallel()
	var on atomic.Bool
	g := newGrid(t, joiner(&on))
	g.realServer(1, racks[0])
	p := g.s.dial("a")
	const blocks = 512
	s := g.scribbler(p, "f", blocks)
	write := func(l []int) {
		t.Helper()
		if err := s.write(l); err != nil {
			t.Fatal(err)
		}
	}
	wait := func(what string, most int, space uint64) {
		t.Helper()
		g.await(what, func(st *RepairStatus) bool {
			return full(st) && st.Deleting == 0 && len(s.extents()) <= most && s.space() == space
		})
		s.check()
	}
	write(perm(s.r, 0, blocks))
	p.snapshot(t, "one")
	on.Store(true)
	s.rests("a snapshot sees all of it")
	if n := s.space(); n != blocks {
		t.Errorf("%d blocks are used", n)
	}
	// Extents written after the snapshot are joined, the others are not.
	write(perm(s.r, 0, blocks/2))
	wait("the new half is joined", blocks/2+4, blocks+blocks/2)
	s.rests("all is done")
	if _, err := p.DeleteSnapshot(t.Context(), 1, "one"); err != nil {
		t.Fatal(err)
	}
	wait("all is joined", 8, blocks)

	write(perm(s.r, 0, blocks))
	on.Store(false)
	s.looks() // a look under way has seen only a single file with these extents
	wait("the old chunks are gone", blocks, blocks)
	other := p.create(t, "other").Attr.Ino
	p.do(t, &meta.CopyRange{Src: s.ino, Dst: other, Len: blocks * blockSize}, meta.LeaseNone)
	on.Store(true)
	s.rests("another file has the same extents")
	if n := s.space(); n != blocks {
		t.Errorf("%d blocks are used", n)
	}
	p.do(t, &meta.Unlink{Parent: meta.RootIno, Name: "other"}, meta.LeaseNone)
	p.do(t, &meta.ReleaseOrphans{Inos: []meta.Ino{other}}, meta.LeaseNone)
	wait("all is joined again", 8, blocks)

	// A chunk that is more than half dead, whose live bytes a snapshot sees.
	on.Store(false)
	write(perm(s.r, 0, blocks))
	p.snapshot(t, "two")
	write(perm(s.r, 0, blocks)[:blocks*3/4])
	p.snapshot(t, "three")
	if _, err := p.DeleteSnapshot(t.Context(), 1, "two"); err != nil {
		t.Fatal(err)
	}
	g.await("the snapshot's own are let go", func(st *RepairStatus) bool {
		var live uint64
		for _, rec := range g.records() {
			live += rec.Live
		}
		return full(st) && live == blocks*blockSize
	})
	s.rests("a snapshot sees what lives of the half dead chunk")
	if n := s.space(); n != blocks+blocks*3/4 {
		t.Errorf("%d blocks are used", n)
	}
	s.check()
	if r, err := g.s.srv.checker.Fsck(t.Context(), 1); err != nil || r.Count != 0 {
		t.Errorf("DATA: fsck: %v %+v", err, r)
	}
}

// The policy has just moved the data to disks of another class. Repair has not moved the chunks
// yet; joined extents still go where the policy wants the data.
func TestJoinObeysThePolicy(t *testing.T) {
	t.Parallel()
	var on atomic.Bool
	g := newGrid(t, joiner(&on), racks[0], racks[1], racks[2], racks[3])
	for _, id := range []meta.ServerID{3, 4} {
		n := g.nodes[id]
		n.mu.Lock()
		n.info.Class = "hdd"
		n.mu.Unlock()
	}
	p := g.s.dial("a")
	g.policy(p, meta.Policy{Replicas: 2, Topology: "/dc/a", Class: "ssd"})
	g.await("the classes are known", func(*RepairStatus) bool {
		s, ok := g.s.srv.serverMap.servers().Server(4)
		return ok && len(s.Disks) == 1 && s.Disks[0].Class == "hdd"
	})
	type where struct {
		server meta.ServerID
		class  string
	}
	var mu sync.Mutex
	got := map[where]int{}
	hold := true
	g.mu.Lock()
	g.before = func(id meta.ServerID, o meta.Order) bool {
		mu.Lock()
		defer mu.Unlock()
		if o.Kind == meta.OrderGather {
			got[where{id, o.Class}]++
		}
		return o.Kind != meta.OrderPull || !hold
	}
	g.mu.Unlock()
	const some = 40
	var want []byte
	var ids []meta.ChunkID
	ino := p.create(t, "f").Attr.Ino
	for c := range 2 {
		gr := p.alloc(t, false)
		data := make([]byte, some*1000)
		for i := range data {
			data[i] = byte(rand.Uint32())
		}
		for _, id := range gr.Servers {
			g.nodes[id].mu.Lock()
			g.nodes[id].chunks[gr.ID] = &gridChunk{data: slices.Clone(data), state: meta.ChunkOpen, fence: gr.Fence}
			g.nodes[id].mu.Unlock()
		}
		for i := range uint64(some) {
			off := uint64(c)*some*1000 + 1000*i
			p.do(t, &meta.Write{Ino: ino, Synced: true, Size: off + 1000, Extents: []meta.Extent{{Off: off, Len: 1000, Chunk: gr.ID, ChunkOff: 1000 * (some - 1 - i)}}}, meta.LeaseNone)
			want = append(want, data[1000*(some-1-i):1000*(some-i)]...)
		}
		ids = append(ids, gr.ID)
		if _, err := p.SealChunk(t.Context(), 1, gr.ID); err != nil {
			t.Fatal(err)
		}
	}
	g.policy(p, meta.Policy{Replicas: 2, Topology: "/dc/b", Class: "hdd"})
	on.Store(true)
	g.await("joined", func(st *RepairStatus) bool {
		recs := g.records()
		return len(recs) == 1 && !slices.Contains(ids, recs[0].ID) && recs[0].State == meta.ChunkSealed
	})
	rec := g.records()[0]
	if servers := slices.Sorted(slices.Values(rec.Servers)); !slices.Equal(servers, []meta.ServerID{3, 4}) {
		t.Errorf("the copy lies on %v", servers)
	}
	mu.Lock()
	for w, n := range got {
		if w.server < 3 || w.class != "hdd" {
			t.Errorf("%d orders to gather for class %q went to server %d", n, w.class, w.server)
		}
	}
	if len(got) != 2 {
		t.Errorf("orders: %v", got)
	}
	hold = false
	mu.Unlock()
	g.await("full", full)
	for _, id := range rec.Servers {
		g.nodes[id].mu.Lock()
		if c := g.nodes[id].chunks[rec.ID]; c == nil || !bytes.Equal(c.data, want) {
			t.Errorf("DATA: server %d has other bytes", id)
		}
		g.nodes[id].mu.Unlock()
	}
	g.exact(2)
}

// Extents that were written over since the look are more pieces than an order may have: several
// orders move the pieces.
func TestJoinOfSplitPieces(t *testing.T) {
	t.Parallel()
	var on atomic.Bool
	g := newGrid(t, joiner(&on))
	g.realServer(1, racks[0])
	g.s.srv.filling <- struct{}{} // no other work moves the extents of this test
	defer func() { <-g.s.srv.filling }()
	p := g.s.dial("a")
	const blocks = 3 * meta.MaxPieces / 4
	s := g.scribbler(p, "f", blocks*3)
	all := make([]int, blocks*3)
	for i := range all {
		all[i] = i
	}
	if err := s.write(all); err != nil {
		t.Fatal(err)
	}
	o := g.s.srv.hosted.opened(1)
	var looked []move
	for i := range blocks { // three blocks as one piece each
		for _, e := range s.extents() {
			if off := uint64(i) * 3 * blockSize; e.Off <= off && off < e.End() {
				looked = append(looked, move{ino: s.ino, ext: meta.Extent{Off: off, Len: 3 * blockSize, Chunk: e.Chunk, ChunkOff: e.ChunkOff + off - e.Off}})
			}
		}
	}
	var middles []int
	for i := range blocks {
		middles = append(middles, 3*i+1)
	}
	if err := s.write(middles); err != nil {
		t.Fatal(err)
	}
	policy, err := o.policy()
	if err != nil {
		t.Fatal(err)
	}
	f := o.compaction.newFiller(policy)
	if err := f.end(f.step(looked)); err != nil || f.moved != 2*blocks {
		t.Errorf("%d extents were moved, want %d: %v", f.moved, 2*blocks, err)
	}
	s.check()
}

// The fragments of a file whose client can't commit its buffer stay unjoined until the client can
// commit.
func TestJoinLeavesWhoHoldsOn(t *testing.T) {
	t.Parallel()
	var on atomic.Bool
	g := newGrid(t, joiner(&on))
	g.realServer(1, racks[0])
	p := g.s.dial("a")
	s := g.scribbler(p, "f", 64)
	for _, b := range perm(s.r, 0, 64) {
		if err := s.write([]int{b}); err != nil {
			t.Fatal(err)
		}
	}
	holdOn := func(on bool) {
		p.mu.Lock()
		defer p.mu.Unlock()
		p.holdsOn = on
	}
	if p.mode(s.ino) != meta.LeaseExclusive {
		t.Fatal("it has no lease")
	}
	holdOn(true)
	on.Store(true)
	o := g.s.srv.hosted.opened(1)
	eventually(t, "it is asked", func() error {
		o.mu.Lock()
		defer o.mu.Unlock()
		return unless(o.leases.Refused(time.Now(), s.ino))
	})
	s.rests("it holds on")
	if p.mode(s.ino) != meta.LeaseExclusive || p.recalls != 0 {
		t.Fatalf("it has %v left", p.mode(s.ino))
	}
	holdOn(false)
	o.asksAgain()
	eventually(t, "joined", func() error { return unless(len(s.extents()) < 8) })
	s.check()
}

// A look whose joins failed counts for nothing: the look is repeated though nothing changed.
// Nothing is moved while the journal has no room.
func TestJoinIsTriedAgain(t *testing.T) {
	t.Parallel()
	g := newGrid(t, func(c *Config) {
		c.CompactInterval, c.JoinInterval, c.CompactRate, c.JoinLeast, c.JoinSmall = 10*time.Millisecond, time.Millisecond, 1<<30, 4, 8<<20
	})
	g.realServer(1, racks[0])
	p := g.s.dial("a")
	s := g.scribbler(p, "f", 64)
	o := g.s.srv.hosted.opened(1)
	tight := &shortage{err: meta.E("journal", meta.NoSpace, "test", nil)}
	g.s.srv.filling <- struct{}{} // joins wait until all is written
	for _, b := range perm(s.r, 0, 64) {
		if err := s.write([]int{b}); err != nil {
			t.Fatal(err)
		}
	}
	if n := len(s.extents()); n < 32 {
		t.Fatalf("%d extents", n)
	}
	g.s.srv.room.tight.Store(tight)
	<-g.s.srv.filling
	moved := g.s.srv.stats.compactedExtents.Load()
	looks := o.compaction.looks.Load()
	eventually(t, "looks", func() error { return unless(o.compaction.looks.Load() > looks+3) })
	if n := g.s.srv.stats.compactedExtents.Load() - moved; n != 0 {
		t.Errorf("%d extents were moved without room", n)
	}
	g.s.srv.room.tight.Store(nil)
	eventually(t, "joined", func() error { return unless(len(s.extents()) < 8) })
	s.check()
}
