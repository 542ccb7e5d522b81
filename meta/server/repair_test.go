package server

import (
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/admin"
	"penstock.io/penstock/meta/placement"
)

// A server goes and does not come back: after a while its chunks are copied, onto other racks
// than the remaining replicas' racks. Later the server does come back: its replicas are orphans
// by then.
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

// A replica is found corrupt, by the server's own reading; another replica is gone with its disk;
// a third replica is shorter than the journal's length. Each is made anew in its place, and never
// from a bad replica.
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

// Every replica is reported bad, as by servers whose disks all failed for a moment. The owner
// asks for each, whole replicas count again, and the missing replicas are made.
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
	unlock, ok := g.s.srv.repairs.lock(&g.s.srv.hosted.opened(1).repairing, a.ID)
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

// A server that was away while its chunks were sealed learns the end: a longer replica is cut, a
// shorter or different replica is made anew.
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
		// As if the seal had counted on the server, and its final order had not arrived.
		o := g.s.srv.hosted.opened(1)
		if err := o.repairing.setReplicas(t.Context(), &rec, append(slices.Clone(rec.Servers), 2), meta.Fence{}); err != nil {
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

// A chunk moves from one server to another and back. The order to delete the chunk at the first
// server arrives a second time, late: the new replica stays.
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

// A drain empties a server, including the chunk being written, and a reader with the old record
// finds the replicas for a while.
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

// A changed policy also applies to old data, after a while.
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
	// A policy that can't be met: the data stays whole, and the status says so.
	g.force(p, meta.Policy{Replicas: 4, Spread: meta.SpreadDC})
	st := g.await("four copies", func(st *RepairStatus) bool { return st.Copying == 0 && st.Blocked == 8 && st.CopyBytes == 0 })
	if st.Misplaced != 8 {
		t.Errorf("%+v", st)
	}
	g.exact(4)
}

// A list that fails proves nothing: nothing is deleted and nothing is copied because of the
// failed list, however empty the rest is.
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
	// A journal that was set back does not know chunks of its future: the chunks stay.
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
	// A chunk that the journal did give out and has no record of is an orphan.
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

// A record from before the chunk was moved, as a checkpoint has after a restore of the cluster:
// the replicas that the record does not name are the only replicas, and the record takes the
// replicas up.
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
	// A look that finds a single replica takes the replica, and copies the replica to any
	// suitable server.
	st := g.await("full", func(st *RepairStatus) bool {
		now := g.records()[0].Servers
		return full(st) && (slices.Contains(now, others[0]) || slices.Contains(now, others[1]))
	})
	if st.Lost != 0 {
		t.Errorf("%+v", st)
	}
	g.exact(2)
}

// The most endangered chunk comes first, and no server is asked for more than its share at a
// time.
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
			g.s.srv.repairs.badReplica(rec.ID, id, false)
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

// A chunk that a changed policy wants elsewhere ends, even an open chunk, and moves; until then
// the volume does not count as placed, also where no server has room for the chunk.
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
			rec = g.record(id) // the chunk may have moved since
			if rec.State != meta.ChunkSealed || !slices.Equal(rec.Servers, []meta.ServerID{2}) {
				t.Fatalf("it counts as placed, and is %+v", rec)
			}
		}
		return there
	})
}
