package server

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"hash/crc32"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/admin"
	"penstock.io/penstock/meta/client"
	"penstock.io/penstock/meta/namespace"
	"penstock.io/penstock/meta/placement"
	"penstock.io/penstock/meta/wire"
)

// grid is a set of chunk servers that keep bytes in memory and obey the orders
// of repair as real ones do.
type grid struct {
	t *testing.T
	s *site
	// before is called before each order but lists; false: it is not carried
	// out, and its answer never comes.
	mu     sync.Mutex
	before func(id meta.ServerID, o meta.Order) bool
	// lists, if not nil, is called before each list that an owner makes.
	lists func()
	late  []func() meta.OrderResult // of real servers: those orders, as if they arrived now
	nodes map[meta.ServerID]*gridNode
}

type gridNode struct {
	g    *grid
	info meta.ServerInfo
	stop context.CancelFunc
	done chan error

	mu         sync.Mutex
	chunks     map[meta.ChunkID]*gridChunk
	generation uint64
	failList   bool
	failPage   bool // of a list, but the first
	emptyPage  bool // each page of a list is empty, and announces more
	failDelete meta.Kind
	failPull   meta.Kind
	failVerify meta.Kind
	events     []meta.ReplicaEvent
	pulls      int
}

type gridChunk struct {
	data    []byte
	state   meta.ChunkState
	fence   meta.Fence
	corrupt bool // a bit is flipped: a read finds it
	told    bool // and the server knows
}

func newGrid(t *testing.T, adjust func(*Config), nodes ...string) *grid {
	s := &site{t: t, dir: t.TempDir(), ttl: 20 * time.Second}
	s.addr = s.dir + "/m.sock"
	s.cluster = newFakeCluster(t, s.dir)
	s.adjust = func(c *Config) {
		c.RepairDelay, c.RepairGrace, c.RepairInterval, c.ListInterval = 300*time.Millisecond, 200*time.Millisecond, 100*time.Millisecond, 500*time.Millisecond
		c.Balance, c.CompactInterval = -1, time.Hour
		if adjust != nil {
			adjust(c)
		}
	}
	s.start()
	t.Cleanup(func() {
		if s.srv != nil {
			s.srv.Close(context.Background())
			<-s.done
		}
		s.cluster.Shared.Close()
	})
	g := &grid{t: t, s: s, nodes: map[meta.ServerID]*gridNode{}}
	for i, at := range nodes {
		g.add(meta.ServerID(i+1), at)
	}
	return g
}

// add makes a server, or starts one again that was stopped, with what it has.
func (g *grid) add(id meta.ServerID, at string) *gridNode {
	g.t.Helper()
	n := g.nodes[id]
	if n == nil {
		n = &gridNode{g: g, chunks: map[meta.ChunkID]*gridChunk{},
			info: meta.ServerInfo{ID: id, Addr: fmt.Sprint("unix:/", id), Topology: at, Class: "ssd", Total: 1 << 40, Free: 1 << 39}}
		g.nodes[id] = n
		g.t.Cleanup(func() { n.halt() })
	}
	ctx, cancel := context.WithCancel(context.Background())
	n.stop, n.done = cancel, make(chan error, 1)
	n.mu.Lock()
	n.generation++
	n.mu.Unlock()
	go func() {
		n.done <- client.RunLink(ctx, client.LinkConfig{
			Addrs: []string{"unix:" + g.s.addr}, Name: fmt.Sprint("node", id), Order: n.order, Interval: 50 * time.Millisecond,
			Report: func() wire.Report {
				n.mu.Lock()
				defer n.mu.Unlock()
				return wire.Report{Info: n.info, Generation: n.generation}
			},
			Events: func(seen uint64, most int) []meta.ReplicaEvent {
				n.mu.Lock()
				defer n.mu.Unlock()
				return slices.DeleteFunc(slices.Clone(n.events), func(e meta.ReplicaEvent) bool { return e.Seq <= seen })
			},
		})
	}()
	wait, stop := context.WithTimeout(context.Background(), time.Minute)
	defer stop()
	if err := g.s.srv.AwaitServer(wait, []meta.ServerID{id}); err != nil {
		g.t.Fatal(err)
	}
	return n
}

// halt cuts a chunk server off. When it returns, the metadata server knows: nothing is
// placed on that chunk server any more.
func (n *gridNode) halt() {
	if n.stop == nil {
		return
	}
	n.stop()
	if err := <-n.done; err != nil {
		n.g.t.Error(err)
	}
	n.stop = nil
	srv := n.g.s.srv
	if srv == nil {
		return
	}
	connected := func(x sighting) bool { return x.info.ID == n.info.ID && x.live }
	for deadline := time.Now().Add(time.Minute); slices.ContainsFunc(srv.sightings(), connected); time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			n.g.t.Errorf("a minute after chunk server %d ended the metadata server still counts it as connected", n.info.ID)
			return
		}
	}
}

func crcOf(b []byte) uint32 { return crc32.Checksum(b, crc32.MakeTable(crc32.Castagnoli)) }

func (n *gridNode) order(ctx context.Context, o meta.Order) meta.OrderResult {
	if o.Kind == meta.OrderKeys {
		return meta.OrderResult{}
	}
	n.g.mu.Lock()
	before, lists := n.g.before, n.g.lists
	n.g.mu.Unlock()
	if lists != nil && o.Kind == meta.OrderList && o.Owner != 0 {
		lists()
	}
	if before != nil && o.Kind != meta.OrderList && !before(n.info.ID, o) {
		<-ctx.Done()
		return meta.OrderResult{Err: meta.Canceled}
	}
	if o.Kind == meta.OrderPull {
		return n.pull(o)
	}
	var gathered []byte
	if o.Kind == meta.OrderGather {
		for _, p := range o.Pieces {
			b := n.g.piece(&o.Chunks[p.Chunk], p)
			if b == nil {
				return meta.OrderResult{Err: meta.Unavailable, Detail: "a source is not there"}
			}
			gathered = append(gathered, b...)
		}
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	if o.Kind == meta.OrderGather {
		to := n.chunks[o.Chunk]
		if to == nil {
			to = &gridChunk{state: meta.ChunkOpen, fence: o.Fence}
			n.chunks[o.Chunk] = to
		}
		if to.state != meta.ChunkOpen {
			return meta.OrderResult{Err: meta.Sealed}
		}
		if o.Fence.Less(to.fence) {
			return meta.OrderResult{Err: meta.Fenced}
		}
		to.data = append(to.data[:o.Length], gathered...)
	}
	c := n.chunks[o.Chunk]
	tell := func() meta.OrderResult {
		return meta.OrderResult{State: c.state, Length: uint64(len(c.data)), Synced: uint64(len(c.data)), CRC: crcOf(c.data), Fence: c.fence, Existing: true}
	}
	switch o.Kind {
	case meta.OrderList:
		return n.list(o)
	case meta.OrderDelete:
		if n.failDelete != meta.KindOK {
			return meta.OrderResult{Err: n.failDelete}
		}
		if c != nil && o.Fence.Less(c.fence) {
			return meta.OrderResult{Err: meta.Fenced}
		}
		delete(n.chunks, o.Chunk)
		return meta.OrderResult{}
	}
	if c == nil {
		return meta.OrderResult{Err: meta.NoSuchChunk}
	}
	switch o.Kind {
	case meta.OrderGather:
	case meta.OrderStat:
		if c.told {
			return meta.OrderResult{Err: meta.Corrupt}
		}
	case meta.OrderVerify:
		if n.failVerify != meta.KindOK {
			return meta.OrderResult{Err: n.failVerify}
		}
		if c.corrupt {
			c.told = true
			return meta.OrderResult{Err: meta.Corrupt}
		}
	case meta.OrderSeal:
		switch {
		case o.Fence.Less(c.fence):
			return meta.OrderResult{Err: meta.Fenced}
		case c.state == meta.ChunkSealed && o.Final && o.Length != uint64(len(c.data)):
			return meta.OrderResult{Err: meta.Sealed}
		case o.Final && uint64(len(c.data)) < o.Length:
			return meta.OrderResult{Err: meta.WrongOffset}
		case o.Final:
			c.state, c.data = meta.ChunkSealed, c.data[:o.Length]
		}
		c.fence = o.Fence
	default:
		return meta.OrderResult{Err: meta.NotSupported}
	}
	return tell()
}

// piece reads of a source on the first server that has it as the order says.
func (g *grid) piece(c *meta.CopySource, p meta.CopyPiece) []byte {
	for _, id := range c.Servers {
		g.mu.Lock()
		n := g.nodes[id]
		g.mu.Unlock()
		n.mu.Lock()
		x := n.chunks[c.Chunk]
		ok := x != nil && n.stop != nil && x.state == meta.ChunkSealed && !x.corrupt && uint64(len(x.data)) == c.Length && crcOf(x.data) == c.CRC
		var b []byte
		if ok {
			b = slices.Clone(x.data[p.Off : p.Off+p.Len])
		}
		n.mu.Unlock()
		if ok {
			return b
		}
	}
	return nil
}

// list gives replicas in an order of its own, a few at a time.
func (n *gridNode) list(o meta.Order) (r meta.OrderResult) {
	if n.failList || n.failPage && !o.After.IsZero() {
		return meta.OrderResult{Err: meta.IO}
	}
	if n.emptyPage {
		return meta.OrderResult{More: true}
	}
	byEnd := func(a, b meta.ChunkID) int {
		return cmp.Or(cmp.Compare(byte(a.Counter), byte(b.Counter)), a.Compare(b))
	}
	var ids []meta.ChunkID
	for id := range n.chunks {
		if id.Volume == o.Volume && (o.After.IsZero() || byEnd(id, o.After) > 0) {
			ids = append(ids, id)
		}
	}
	slices.SortFunc(ids, byEnd)
	if len(ids) > 3 {
		ids, r.More = ids[:3], true
	}
	for _, id := range ids {
		c := n.chunks[id]
		x := meta.ReplicaInfo{ID: id, State: c.state, Length: uint64(len(c.data)), CRC: crcOf(c.data), Fence: c.fence, Disk: "d"}
		if c.told {
			x.Err = meta.Corrupt
		}
		r.Chunks = append(r.Chunks, x)
	}
	return r
}

func (n *gridNode) pull(o meta.Order) meta.OrderResult {
	n.mu.Lock()
	n.pulls++
	if k := n.failPull; k != meta.KindOK {
		n.mu.Unlock()
		return meta.OrderResult{Err: k}
	}
	if c := n.chunks[o.Chunk]; c != nil && !c.corrupt && c.state == meta.ChunkSealed && crcOf(c.data) == o.CRC {
		n.mu.Unlock()
		return meta.OrderResult{State: c.state, Length: o.Length, CRC: o.CRC, Fence: o.Fence, Existing: true}
	}
	n.mu.Unlock()
	kind := meta.Unavailable
	for _, src := range o.Sources {
		n.g.mu.Lock()
		from := n.g.nodes[src.ID]
		n.g.mu.Unlock()
		from.mu.Lock()
		c := from.chunks[o.Chunk]
		var data []byte
		if ok := c != nil && c.state == meta.ChunkSealed && from.stop != nil; ok && !c.corrupt && uint64(len(c.data)) == o.Length && crcOf(c.data) == o.CRC {
			data = slices.Clone(c.data)
		} else if ok {
			kind = meta.Corrupt
		}
		from.mu.Unlock()
		if data != nil {
			n.mu.Lock()
			defer n.mu.Unlock()
			n.chunks[o.Chunk] = &gridChunk{data: data, state: meta.ChunkSealed, fence: o.Fence}
			return meta.OrderResult{State: meta.ChunkSealed, Length: o.Length, CRC: o.CRC, Fence: o.Fence, Existing: true}
		}
	}
	return meta.OrderResult{Err: kind}
}

// chunk makes a sealed chunk of a file, its bytes on every replica.
func (g *grid) chunk(p *peer, name string, n int) meta.ChunkRecord {
	g.t.Helper()
	id := g.open(p, name, n)
	rec, err := p.SealChunk(g.t.Context(), 1, id)
	if err != nil {
		g.t.Fatal(err)
	}
	return rec
}

// open makes a chunk that its writer still appends to.
func (g *grid) open(p *peer, name string, n int) meta.ChunkID {
	g.t.Helper()
	ino := p.create(g.t, name).Attr.Ino
	gr := p.alloc(g.t, false)
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
	p.commit(g.t, ino, gr, 0, uint64(n), true)
	return gr.ID
}

func (g *grid) policy(p *peer, pol meta.Policy) {
	g.t.Helper()
	if _, err := p.SetVolume(g.t.Context(), 1, pol, meta.VolumeWords{}); err != nil {
		g.t.Fatal(err)
	}
}

// force sets a policy also if nothing can meet it.
func (g *grid) force(p *peer, pol meta.Policy) {
	g.t.Helper()
	if _, err := p.SetVolume(g.t.Context(), 1, pol, meta.VolumeWords{Force: true}); err != nil {
		g.t.Fatal(err)
	}
}

func (g *grid) status() *RepairStatus {
	g.t.Helper()
	st, err := g.s.srv.RepairStatus(g.t.Context(), 0)
	if err != nil {
		g.t.Fatal(err)
	}
	return st
}

// await waits until the repairs are done, or as far as a test says.
func (g *grid) await(what string, ok func(*RepairStatus) bool) *RepairStatus {
	g.t.Helper()
	deadline := time.Now().Add(90 * time.Second)
	for {
		st := g.status()
		if ok(st) {
			return st
		}
		if time.Now().After(deadline) {
			g.dump()
			g.t.Fatalf("not %s: %+v", what, st)
		}
		time.Sleep(20 * time.Millisecond)
	}
}

func (g *grid) dump() {
	for _, rec := range g.records() {
		g.t.Logf("%v", rec)
	}
	for id, n := range g.nodes {
		n.mu.Lock()
		for c, x := range n.chunks {
			g.t.Logf("server %d has %v state %d, %d bytes, fence %v, corrupt %v told %v", id, c, x.state, len(x.data), x.fence, x.corrupt, x.told)
		}
		n.mu.Unlock()
	}
}

func (g *grid) records() (all []meta.ChunkRecord) {
	o := g.s.srv.opened(1)
	o.mu.Lock()
	defer o.mu.Unlock()
	if err := namespace.Chunks(&view{o: o}, func(c meta.ChunkRecord) bool { all = append(all, c); return true }); err != nil {
		g.t.Fatal(err)
	}
	return all
}

// exact fails unless each sealed chunk has replicas good ones that agree with
// its record, on servers that run, and no server has anything else.
func (g *grid) exact(replicas int) {
	g.t.Helper()
	// The journal says first that a chunk is sealed, then its servers are told.
	eventually(g.t, "servers know what is sealed", func() error {
		for _, rec := range g.records() {
			for _, id := range rec.Servers {
				n := g.nodes[id]
				n.mu.Lock()
				c := n.chunks[rec.ID]
				told := rec.State != meta.ChunkSealed || c == nil || c.state == meta.ChunkSealed || n.stop == nil
				n.mu.Unlock()
				if !told {
					return fmt.Errorf("server %d has %v unsealed", id, rec.ID)
				}
			}
		}
		return nil
	})
	if err := g.inexact(replicas); err != nil {
		g.t.Error(err)
	}
	r, err := g.s.srv.Fsck(g.t.Context(), 1)
	if err != nil || r.Count != 0 {
		g.t.Errorf("DATA: fsck: %v %+v", err, r)
	}
	if g.t.Failed() {
		g.dump()
	}
}

// inexact is what exact says of records and replicas.
func (g *grid) inexact(replicas int) error {
	var errs []error
	want := map[replicaKey]bool{}
	for _, rec := range g.records() {
		if rec.State != meta.ChunkSealed {
			for _, id := range rec.Servers {
				want[replicaKey{rec.ID, id}] = true
			}
			continue
		}
		if len(rec.Servers) != replicas {
			errs = append(errs, fmt.Errorf("%v has %d replicas, want %d", rec, len(rec.Servers), replicas))
		}
		for _, id := range rec.Servers {
			want[replicaKey{rec.ID, id}] = true
			n := g.nodes[id]
			n.mu.Lock()
			c := n.chunks[rec.ID]
			if c == nil || n.stop == nil || c.corrupt || c.state != meta.ChunkSealed || uint64(len(c.data)) != rec.Length || crcOf(c.data) != rec.CRC {
				errs = append(errs, fmt.Errorf("%v on server %d: %+v", rec.ID, id, c != nil))
			}
			n.mu.Unlock()
		}
	}
	for id, n := range g.nodes {
		n.mu.Lock()
		for c := range n.chunks {
			if !want[replicaKey{c, id}] && n.stop != nil {
				errs = append(errs, fmt.Errorf("server %d has %v, which it should not", id, c))
			}
		}
		n.mu.Unlock()
	}
	return errors.Join(errs...)
}

var racks = []string{"/dc/a/1", "/dc/a/2", "/dc/b/3", "/dc/b/4", "/dc/c/5", "/dc/c/6"}

func full(st *RepairStatus) bool { return st.Full() }

// A server goes and does not come back: after a while its chunks are copied,
// onto other racks than those that have them. Later it does come back: what it
// has is nobody's by then.
func TestRepairServerGone(t *testing.T) {
	t.Parallel()
	g := newGrid(t, nil, racks...)
	p := g.s.dial("a")
	g.policy(p, meta.Policy{Replicas: 3, Spread: meta.SpreadRack})
	for i := range 12 {
		g.chunk(p, fmt.Sprint("f", i), 1000+i)
	}
	g.await("full", full)
	g.exact(3)
	g.nodes[1].halt()
	if st := g.status(); st.Degraded() != 0 {
		t.Errorf("at once: %+v", st)
	}
	g.await("degraded", func(st *RepairStatus) bool { return st.Degraded() > 0 || st.Copied > 0 })
	g.await("full again", full)
	g.exact(3)
	for _, rec := range g.records() {
		seen := map[string]bool{}
		for _, id := range rec.Servers {
			rack := g.nodes[id].info.Topology[:5]
			if seen[rack] || id == 1 {
				t.Errorf("%v", rec)
			}
			seen[rack] = true
		}
	}
	g.add(1, racks[0])
	g.await("tidy", func(st *RepairStatus) bool {
		g.nodes[1].mu.Lock()
		defer g.nodes[1].mu.Unlock()
		return full(st) && len(g.nodes[1].chunks) == 0
	})
	g.exact(3)
}

// A replica is found corrupt, by the server's own reading; another one is gone
// with its disk; a third is shorter than was journaled. Each is made anew where
// it lay, and never from a bad one.
func TestRepairBadReplicas(t *testing.T) {
	t.Parallel()
	g := newGrid(t, nil, racks[0], racks[2], racks[4])
	p := g.s.dial("a")
	g.policy(p, meta.Policy{Replicas: 3})
	a, b, c := g.chunk(p, "a", 100), g.chunk(p, "b", 200), g.chunk(p, "c", 300)
	g.await("full", full)
	g.nodes[1].mu.Lock()
	g.nodes[1].chunks[a.ID].corrupt, g.nodes[1].chunks[a.ID].told = true, true
	g.nodes[1].events = append(g.nodes[1].events, meta.ReplicaEvent{Seq: 1, Kind: meta.EventCorrupt, Chunk: a.ID, Disk: "d"})
	g.nodes[1].mu.Unlock()
	g.nodes[2].mu.Lock()
	delete(g.nodes[2].chunks, b.ID)
	g.nodes[2].mu.Unlock()
	g.nodes[3].mu.Lock()
	g.nodes[3].chunks[c.ID].data = g.nodes[3].chunks[c.ID].data[:250]
	g.nodes[3].mu.Unlock()
	g.await("three copies", func(st *RepairStatus) bool { return st.Copied >= 3 && full(st) })
	g.exact(3)
}

// Every replica is said to be bad, as by servers whose disks all failed for a
// moment. Each is asked, what is whole counts again, and what is missing is made.
func TestRepairFalseAlarm(t *testing.T) {
	t.Parallel()
	g := newGrid(t, nil, racks[0], racks[2], racks[4])
	p := g.s.dial("a")
	g.policy(p, meta.Policy{Replicas: 3})
	a := g.chunk(p, "a", 100)
	g.await("full", full)
	var asked atomic.Int32
	g.mu.Lock()
	g.before = func(_ meta.ServerID, o meta.Order) bool {
		if o.Kind == meta.OrderVerify && o.Chunk == a.ID {
			asked.Add(1)
		}
		return true
	}
	g.mu.Unlock()
	// All at once, before anything is done about the first.
	unlock, ok := g.s.srv.repairs.lock(g.s.srv.opened(1), a.ID)
	if !ok {
		t.Fatal("a repair of a whole chunk")
	}
	g.nodes[3].mu.Lock()
	delete(g.nodes[3].chunks, a.ID)
	g.nodes[3].mu.Unlock()
	for _, n := range g.nodes {
		n.mu.Lock()
		n.events = append(n.events, meta.ReplicaEvent{Seq: 1, Kind: meta.EventCorrupt, Chunk: a.ID, Disk: "d"})
		n.mu.Unlock()
	}
	g.await("all said to be bad", func(st *RepairStatus) bool { return st.Lost == 1 })
	unlock()
	g.await("whole", func(st *RepairStatus) bool { return full(st) && asked.Load() >= 2 })
	g.exact(3)
}

// One that was away while its chunks were sealed is told the end: what is
// longer is cut, what is shorter or different is made anew.
func TestRepairReturnedServer(t *testing.T) {
	t.Parallel()
	g := newGrid(t, func(c *Config) { c.RepairDelay = time.Hour }, racks[0], racks[2], racks[4])
	p := g.s.dial("a")
	g.policy(p, meta.Policy{Replicas: 3})
	longer, shorter, other := g.open(p, "longer", 100), g.open(p, "shorter", 100), g.open(p, "other", 100)
	g.nodes[2].halt()
	n := g.nodes[2]
	n.chunks[longer].data = append(n.chunks[longer].data, "more"...)
	n.chunks[shorter].data = n.chunks[shorter].data[:60]
	n.chunks[other].data[7] ^= 1
	for _, id := range []meta.ChunkID{longer, shorter, other} {
		rec, err := p.SealChunk(t.Context(), 1, id)
		if err != nil || slices.Contains(rec.Servers, 2) {
			t.Fatal(rec, err)
		}
		// As if the seal had counted on it, and its final order had not arrived.
		o := g.s.srv.opened(1)
		if err := o.setReplicas(t.Context(), &rec, append(slices.Clone(rec.Servers), 2), meta.Fence{}); err != nil {
			t.Fatal(err)
		}
	}
	g.add(2, racks[2])
	g.await("full", func(st *RepairStatus) bool { return full(st) && st.Copied >= 2 })
	g.exact(3)
	if n.pulls != 2 {
		t.Errorf("%d copies were made, two were needed", n.pulls)
	}
}

// A chunk moves from one server to another and back. The order to delete it
// at the first arrives a second time, late: it is not what is there now.
func TestLateDeletion(t *testing.T) {
	t.Parallel()
	g := newGrid(t, nil, racks[:2]...)
	p := g.s.dial("a")
	g.policy(p, meta.Policy{Replicas: 1})
	rec := g.chunk(p, "f", 500)
	g.await("full", full)
	first := rec.Servers[0]
	second := 3 - first
	var mu sync.Mutex
	var deletions []meta.Order
	g.mu.Lock()
	g.before = func(id meta.ServerID, o meta.Order) bool {
		mu.Lock()
		defer mu.Unlock()
		if id == first && o.Kind == meta.OrderDelete {
			deletions = append(deletions, o)
		}
		return true
	}
	g.mu.Unlock()
	api := g.s.api()
	drain := func(id meta.ServerID) {
		t.Helper()
		if _, err := api.Nodes.DrainNode(t.Context(), &admin.DrainNodeRequest{Node: uint64(id)}); err != nil {
			t.Fatal(err)
		}
	}
	at := func(id meta.ServerID) func(*RepairStatus) bool {
		return func(st *RepairStatus) bool {
			return full(st) && slices.Equal(g.records()[0].Servers, []meta.ServerID{id}) && st.Extra == 0
		}
	}
	drain(first)
	g.await("moved", at(second))
	if _, err := api.Nodes.CancelDrain(t.Context(), &admin.CancelDrainRequest{Node: uint64(first)}); err != nil {
		t.Fatal(err)
	}
	drain(second)
	g.await("moved back", at(first))
	mu.Lock()
	late := slices.Clone(deletions)
	mu.Unlock()
	if len(late) == 0 {
		t.Fatal("the first copy was never deleted")
	}
	for _, o := range late {
		if r := g.nodes[first].order(t.Context(), o); r.Err != meta.Fenced {
			t.Errorf("the late order %+v is answered with %+v", o, r)
		}
	}
	g.exact(1)
}

// A drain empties a server, also of the chunk that is being written, and what
// reads by the old record finds the replicas for a while.
func TestDrain(t *testing.T) {
	t.Parallel()
	g := newGrid(t, nil, racks[:4]...)
	p := g.s.dial("a")
	g.policy(p, meta.Policy{Replicas: 2})
	for i := range 10 {
		g.chunk(p, fmt.Sprint("f", i), 500)
	}
	for i := range 4 {
		g.open(p, fmt.Sprint("open", i), 100)
	}
	g.await("full", full)
	nodes := g.s.api().Nodes
	if _, err := nodes.RemoveNode(t.Context(), &admin.RemoveNodeRequest{Node: 2}); meta.KindOf(err) != meta.Busy {
		t.Fatalf("a server with chunks was removed: %v", err)
	}
	if _, err := nodes.DrainNode(t.Context(), &admin.DrainNodeRequest{Node: 9}); meta.KindOf(err) != meta.NotFound {
		t.Fatal(err)
	}
	if _, err := nodes.DrainNode(t.Context(), &admin.DrainNodeRequest{Node: 2}); err != nil {
		t.Fatal(err)
	}
	for range 10 {
		if gr := p.alloc(t, false); slices.Contains(gr.Servers, 2) {
			t.Fatal("a chunk on a server that is being emptied")
		}
	}
	g.await("empty", func(st *RepairStatus) bool { return st.Nodes[2].Chunks+st.Nodes[2].Open == 0 && st.Draining == 0 })
	g.await("full", full)
	list, err := nodes.ListNodes(t.Context(), &admin.ListNodesRequest{})
	if l := list.GetNodes(); err != nil || len(l) != 4 || l[1].State != admin.NodeState_NODE_DRAINING || !l[1].Live || l[0].Name != "node1" {
		t.Fatalf("%v %v", err, l)
	}
	g.nodes[2].mu.Lock()
	if n := len(g.nodes[2].chunks); n != 0 {
		t.Errorf("%d replicas are left there", n)
	}
	g.nodes[2].mu.Unlock()
	if _, err := nodes.RemoveNode(t.Context(), &admin.RemoveNodeRequest{Node: 2}); err != nil {
		t.Error(err)
	}
	g.exact(2)
}

// What a policy says now is so of old data, too, after a while.
func TestPolicyMovesData(t *testing.T) {
	t.Parallel()
	g := newGrid(t, nil, append(slices.Clone(racks), "/dc2/x/7", "/dc2/y/8", "/dc2/z/9")...)
	p := g.s.dial("a")
	g.policy(p, meta.Policy{Replicas: 1})
	for i := range 8 {
		g.chunk(p, fmt.Sprint("f", i), 300)
	}
	g.await("full", full)
	for _, pol := range []meta.Policy{
		{Replicas: 3, Spread: meta.SpreadRack},
		{Replicas: 2, Spread: meta.SpreadDC},
		{Replicas: 3, Topology: "/dc2", Spread: meta.SpreadRack},
		{Replicas: 1},
	} {
		g.policy(p, pol)
		g.await(fmt.Sprintf("as %+v wants", pol), full)
		g.exact(int(pol.Replicas))
		for _, rec := range g.records() {
			for _, id := range rec.Servers {
				if pol.Topology == "/dc2" && id < 7 {
					t.Errorf("%v with %+v", rec, pol)
				}
			}
		}
	}
	// One that can't be met: the data stays whole, and it is said.
	g.force(p, meta.Policy{Replicas: 4, Spread: meta.SpreadDC})
	st := g.await("four copies", func(st *RepairStatus) bool { return st.Copying == 0 && st.Blocked == 8 && st.CopyBytes == 0 })
	if st.Misplaced != 8 {
		t.Errorf("%+v", st)
	}
	g.exact(4)
}

// A list that fails proves nothing: nothing is deleted and nothing is copied
// for it, however empty the rest is.
func TestFailedListsProveNothing(t *testing.T) {
	t.Parallel()
	g := newGrid(t, nil, racks[0], racks[2], racks[4])
	p := g.s.dial("a")
	g.policy(p, meta.Policy{Replicas: 2})
	var ids []meta.ChunkID
	for i := range 6 {
		ids = append(ids, g.chunk(p, fmt.Sprint("f", i), 100).ID)
	}
	g.await("full", full)
	n := g.nodes[1]
	n.halt()
	n.mu.Lock()
	n.failList = true
	had := len(n.chunks)
	n.mu.Unlock()
	g.add(1, racks[0])
	g.await("not listed", func(st *RepairStatus) bool { return st.Unscanned > 0 })
	time.Sleep(time.Second)
	st := g.status()
	n.mu.Lock()
	if len(n.chunks) != had || st.Unscanned == 0 || st.Full() {
		t.Errorf("%d replicas were %d: %+v", len(n.chunks), had, st)
	}
	n.failList = false
	n.mu.Unlock()
	g.await("full", full)
	g.exact(2)
	// A journal that was set back does not know chunks of its future: they stay.
	future := ids[0]
	future.Counter += 1000
	n.mu.Lock()
	n.chunks[future] = &gridChunk{data: []byte("x"), state: meta.ChunkSealed}
	n.mu.Unlock()
	time.Sleep(1500 * time.Millisecond)
	n.mu.Lock()
	if n.chunks[future] == nil {
		t.Error("a chunk that the journal has not given out was deleted")
	}
	delete(n.chunks, future)
	// One that it did give out and has no record of is an orphan.
	orphan := ids[0]
	n.mu.Unlock()
	gone := p.do(t, &meta.Unlink{Parent: meta.RootIno, Name: "f0"}, meta.LeaseNone).Attr.Ino
	p.do(t, &meta.ReleaseOrphans{Inos: []meta.Ino{gone}}, meta.LeaseNone)
	eventually(t, "its chunk goes", func() error { return unless(len(g.records()) == 5) })
	n.mu.Lock()
	n.chunks[orphan] = &gridChunk{data: []byte("x"), state: meta.ChunkOpen}
	n.mu.Unlock()
	g.await("the orphan deleted", func(st *RepairStatus) bool {
		n.mu.Lock()
		defer n.mu.Unlock()
		return n.chunks[orphan] == nil && full(st)
	})
}

// A record of before the chunk was moved, as a checkpoint that a lost cluster
// was made again from has it: the replicas that it does not name are all there
// are, and become its own.
func TestOldRecordAdoptsReplicas(t *testing.T) {
	t.Parallel()
	g := newGrid(t, nil, racks...)
	p := g.s.dial("a")
	g.policy(p, meta.Policy{Replicas: 2})
	rec := g.chunk(p, "f", 700)
	g.await("full", full)
	data := g.nodes[rec.Servers[0]].chunks[rec.ID].data
	var others []meta.ServerID
	for id := meta.ServerID(1); id <= 6; id++ {
		n := g.nodes[id]
		n.mu.Lock()
		if n.chunks[rec.ID] == nil && len(others) < 2 {
			n.chunks[rec.ID] = &gridChunk{data: slices.Clone(data), state: meta.ChunkSealed, fence: rec.Fence}
			others = append(others, id)
		} else {
			delete(n.chunks, rec.ID)
		}
		n.mu.Unlock()
	}
	// A look that finds one of them alone takes that, and copies it to where it likes.
	st := g.await("full", func(st *RepairStatus) bool {
		now := g.records()[0].Servers
		return full(st) && (slices.Contains(now, others[0]) || slices.Contains(now, others[1]))
	})
	if st.Lost != 0 {
		t.Errorf("%+v", st)
	}
	g.exact(2)
}

// crashing runs a story and stops the owner, as a crash would, at the k-th
// order, carried out or not; the owner that follows finishes it.
func crashing(t *testing.T, k int, carryOut bool) (reached bool) {
	g := newGrid(t, nil, racks...)
	p := g.s.dial("a")
	g.policy(p, meta.Policy{Replicas: 3, Spread: meta.SpreadRack})
	for i := range 4 {
		g.chunk(p, fmt.Sprint("f", i), 400)
	}
	// One is deleted while it is repaired.
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
			st, err := srv.RepairStatus(t.Context(), 0)
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
	// Whoever reads by the journal now finds at least one good replica.
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

// The most endangered chunk comes first, and no server is asked for more than
// its share at a time.
func TestMostEndangeredFirst(t *testing.T) {
	t.Parallel()
	g := newGrid(t, func(c *Config) { c.RepairParallel = 1; c.RepairDelay = time.Hour }, racks...)
	p := g.s.dial("a")
	g.policy(p, meta.Policy{Replicas: 3})
	var recs []meta.ChunkRecord
	for i := range 6 {
		recs = append(recs, g.chunk(p, fmt.Sprint("f", i), 100))
	}
	g.await("full", full)
	var mu sync.Mutex
	var order []meta.ChunkID
	hold := true
	g.mu.Lock()
	g.before = func(_ meta.ServerID, o meta.Order) bool {
		if o.Kind != meta.OrderPull {
			return true
		}
		mu.Lock()
		order = append(order, o.Chunk)
		mu.Unlock()
		for {
			mu.Lock()
			h := hold
			mu.Unlock()
			if !h {
				return true
			}
			time.Sleep(5 * time.Millisecond)
		}
	}
	g.mu.Unlock()
	lose := func(rec meta.ChunkRecord, n int) {
		for _, id := range rec.Servers[:n] {
			node := g.nodes[id]
			node.mu.Lock()
			delete(node.chunks, rec.ID)
			node.mu.Unlock()
			g.s.srv.badReplica(rec.ID, id, false)
		}
	}
	// The first holds the only slot while the others come, the worst last.
	lose(recs[0], 1)
	await := func(n int) {
		until(t, fmt.Sprintf("%d copies are ordered", n), func() bool {
			mu.Lock()
			defer mu.Unlock()
			return len(order) >= n
		})
	}
	await(1)
	for i := 1; i < 5; i++ {
		lose(recs[i], 1)
	}
	lose(recs[5], 2)
	until(t, "all others wait for their turn", func() bool {
		r := g.s.srv.repairs
		r.mu.Lock()
		defer r.mu.Unlock()
		j := r.byChunk[recs[5].ID]
		return len(r.queue) == 5 && j != nil && j.reason == placement.Endangered
	})
	mu.Lock()
	hold = false
	mu.Unlock()
	await(3)
	mu.Lock()
	defer mu.Unlock()
	if order[1] != recs[5].ID {
		t.Errorf("copied in the order %v, %v has one replica left", order, recs[5].ID)
	}
}

// compacting fills a chunk with two files, removes one, and stops the owner at
// the k-th order of what follows; its successor ends with the other file's bytes
// in a chunk of their own, and nothing else anywhere. With join both files stay,
// the small one is in many pieces, in two chunks, and ends up in one.
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
		// The small file lies in pieces around the big one, out of order.
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
		o := g.s.srv.opened(1)
		o.mu.Lock()
		defer o.mu.Unlock()
		var got []byte
		var exts []meta.Extent
		if err := namespace.Extents(&view{o: o}, func(ino meta.Ino, e meta.Extent) bool {
			if ino == small {
				exts = append(exts, e)
			}
			return true
		}); err != nil {
			t.Fatal(err)
		}
		for _, e := range exts {
			rec, _, err := namespace.ReadChunk(&view{o: o}, e.Chunk)
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
	g.await("the old chunks are gone", full) // asked after that
	// What it was asked is of the last look at all servers.
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

// What a changed policy wants elsewhere ends, open as it is, and moves; until then the
// volume does not count as placed, also where nothing has room for it.
func TestOpenChunksFollowThePolicy(t *testing.T) {
	t.Parallel()
	g := newGrid(t, nil, "/dc/r1/a", "/dc/r2/b")
	p := g.s.dial("p")
	g.policy(p, meta.Policy{Replicas: 1, Topology: "/dc/r1"})
	id := g.open(p, "f", 4096)
	if rec := g.record(id); rec.State != meta.ChunkOpen || !slices.Equal(rec.Servers, []meta.ServerID{1}) {
		t.Fatal(rec)
	}
	g.force(p, meta.Policy{Replicas: 1, Topology: "/dc/r3"})
	if rec := g.record(id); rec.State != meta.ChunkSealed {
		t.Fatal("it goes on where its policy wants no data", rec)
	}
	if st := g.status(); st.Degraded() != 1 {
		t.Fatalf("it counts as placed, and is not: %+v", st)
	}
	g.policy(p, meta.Policy{Replicas: 1, Topology: "/dc/r2"})
	g.await("placed", func(st *RepairStatus) bool {
		rec := g.record(id)
		there := rec.State == meta.ChunkSealed && slices.Equal(rec.Servers, []meta.ServerID{2})
		if st.Degraded() == 0 && st.Unscanned == 0 && !there {
			rec = g.record(id) // it may have moved since
			if rec.State != meta.ChunkSealed || !slices.Equal(rec.Servers, []meta.ServerID{2}) {
				t.Fatalf("it counts as placed, and is %+v", rec)
			}
		}
		return there
	})
}
