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
	"testing"
	"time"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/client"
	"penstock.io/penstock/meta/namespace"
	"penstock.io/penstock/meta/wire"
)

// grid is a set of chunk servers that keep bytes in memory and obey the orders of repair as real
// chunk servers do.
type grid struct {
	t *testing.T
	s *site
	// before is called before each order but lists; false: the order is not carried out, and its
	// answer never comes.
	mu     sync.Mutex
	before func(id meta.ServerID, o meta.Order) bool
	// lists, if not nil, is called before each list that an owner makes.
	lists func()
	late  []func() meta.OrderResult // of real servers: these orders, as if the orders arrived now
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
	corrupt bool // a bit is flipped: a read finds the damage
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

// add makes a server, or starts a stopped server again with its replicas.
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
	if err := g.s.srv.chunkServers.AwaitServer(wait, []meta.ServerID{id}); err != nil {
		g.t.Fatal(err)
	}
	return n
}

// halt cuts a chunk server off. When halt returns, the metadata server knows: nothing is placed
// on the chunk server any more.
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
	for deadline := time.Now().Add(time.Minute); slices.ContainsFunc(srv.serverMap.sightings(), connected); time.Sleep(time.Millisecond) {
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

// piece reads a piece of a source from the first server in the order that has the source.
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

// list returns replicas in an order of its own, a few at a time.
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

// force sets a policy also if no servers can meet the policy.
func (g *grid) force(p *peer, pol meta.Policy) {
	g.t.Helper()
	if _, err := p.SetVolume(g.t.Context(), 1, pol, meta.VolumeWords{Force: true}); err != nil {
		g.t.Fatal(err)
	}
}

func (g *grid) status() *RepairStatus {
	g.t.Helper()
	st, err := g.s.srv.repairs.RepairStatus(g.t.Context(), 0)
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
	o := g.s.srv.hosted.opened(1)
	o.mu.Lock()
	defer o.mu.Unlock()
	if err := namespace.Chunks(o.view(), func(c meta.ChunkRecord) bool { all = append(all, c); return true }); err != nil {
		g.t.Fatal(err)
	}
	return all
}

// exact fails unless each sealed chunk has the given number of good replicas, equal to the
// chunk's record, on servers that run, and no server has anything else.
func (g *grid) exact(replicas int) {
	g.t.Helper()
	// The journal seals a chunk first, then the chunk's servers are told.
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
	r, err := g.s.srv.checker.Fsck(g.t.Context(), 1)
	if err != nil || r.Count != 0 {
		g.t.Errorf("DATA: fsck: %v %+v", err, r)
	}
	if g.t.Failed() {
		g.dump()
	}
}

// inexact is the check of exact for records and replicas.
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
