package server

import (
	"fmt"
	"reflect"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/admin"
	"penstock.io/penstock/meta/placement"
)

// loss asks for the lost chunks, by id.
func (g *grid) loss() map[meta.ChunkID]LostChunk {
	g.t.Helper()
	answer, err := g.s.api().Volumes.ListLostChunks(g.t.Context(), &admin.ListLostChunksRequest{Volume: admin.Numbered(1)})
	if err != nil {
		g.t.Fatal(err)
	}
	m := map[meta.ChunkID]LostChunk{}
	for _, x := range answer.Chunks {
		m[heardLost(g.t, x).ID] = heardLost(g.t, x)
	}
	return m
}

// heardLost reads the event of a lost chunk.
func heardLost(t *testing.T, x *admin.LostChunk) (c LostChunk) {
	t.Helper()
	admin.Hear(&c, x)
	var err error
	if c.ID, err = meta.ParseChunkID(c.Chunk); err != nil {
		t.Fatal(err)
	}
	return c
}

// accept asks the owner to give up chunks.
func (g *grid) accept(damaged bool, ids ...meta.ChunkID) ([]*admin.LostChunk, error) {
	q := &admin.AcceptLossRequest{Volume: admin.Numbered(1), Damaged: damaged}
	for _, id := range ids {
		q.Chunks = append(q.Chunks, id.String())
	}
	answer, err := g.s.api().Volumes.AcceptLoss(g.t.Context(), q)
	return answer.GetChunks(), err
}

// accepts demands a result of accept.
func (g *grid) accepts(want meta.Kind, damaged bool, ids ...meta.ChunkID) {
	g.t.Helper()
	if _, err := g.accept(damaged, ids...); meta.KindOf(err) != want {
		g.t.Fatalf("accepted: %v, want %v", err, want)
	}
}

func (g *grid) record(id meta.ChunkID) (r meta.ChunkRecord) {
	for _, rec := range g.records() {
		if rec.ID == id {
			r = rec
		}
	}
	return r
}

// All servers that have a chunk go. Before an administrator accepts the loss, the servers may
// come back with the chunk; after the acceptance, the loss is on record, nothing is left to
// repair, and a server that comes back still is told to delete the chunk.
func TestAcceptedLossIsForGood(t *testing.T) {
	t.Parallel()
	g := newGrid(t, nil, racks[0], racks[2])
	p := g.s.dial("a")
	g.policy(p, meta.Policy{Replicas: 2})
	sealed, kept := g.chunk(p, "sealed", 500).ID, g.chunk(p, "kept", 300).ID
	open := g.open(p, "open", 100)
	g.await("full", full)
	g.accepts(meta.Busy, true, sealed) // the chunk is whole
	g.nodes[1].halt()
	g.nodes[2].halt()
	g.await("gone", func(st *RepairStatus) bool { return st.Lost == 3 })
	if l := g.loss(); l[sealed].State != LossPending || l[open].State != LossPending {
		t.Fatalf("of servers that are only away: %+v", l)
	}
	g.accepts(meta.Unavailable, true, sealed) // the servers may come back
	g.accepts(meta.Unavailable, true, open)
	for _, id := range []meta.ServerID{1, 2} {
		if err := g.s.srv.repairs.removeNode(t.Context(), id, true); err != nil {
			t.Fatal(err)
		}
	}
	// No loss is accepted yet: a server that comes back brings the bytes.
	g.add(1, racks[0])
	g.await("back", func(st *RepairStatus) bool { return st.Lost == 0 && st.Unscanned == 0 })
	g.accepts(meta.Busy, true, kept)
	g.nodes[1].halt()
	g.await("gone again", func(st *RepairStatus) bool { return st.Lost >= 2 })
	l := g.loss()
	if s := l[sealed]; s.State != LossTotal || len(s.Files) != 1 || s.Files[0].Path != "/sealed" || s.Files[0].Bytes != 500 || s.Live != 500 {
		t.Fatalf("%+v", l)
	}
	g.accepts(meta.KindOK, false, sealed, open)
	g.s.crash()
	g.s.start()
	p = g.s.dial("b")
	g.accepts(meta.Invalid, false, meta.ChunkID{Volume: 9})
	for _, id := range []meta.ChunkID{sealed, open} {
		if rec := g.record(id); !rec.Gone() {
			t.Fatalf("%+v", rec)
		}
	}
	if l = g.loss(); l[sealed].State != LossAccepted || l[open].State != LossAccepted || l[kept].State != LossTotal {
		t.Fatalf("%+v", l)
	}
	// A server that comes back keeps the chunks not given up and loses the chunks given up.
	g.add(1, racks[0])
	g.await("what was given up is deleted", func(st *RepairStatus) bool {
		n := g.nodes[1]
		n.mu.Lock()
		defer n.mu.Unlock()
		return n.chunks[sealed] == nil && n.chunks[open] == nil && n.chunks[kept] != nil && st.AcceptedLost == 2 && st.Lost == 0
	})
	if rec := g.record(sealed); !rec.Gone() || len(g.record(kept).Servers) == 0 {
		t.Fatalf("%+v %+v", rec, g.record(kept))
	}
	r, err := g.s.srv.checker.Fsck(t.Context(), 1)
	if err != nil || r.Lost != 600 || len(r.Accepted) != 2 || slices.ContainsFunc(r.Problems, func(s string) bool {
		return strings.Contains(s, sealed.String()) || strings.Contains(s, open.String())
	}) {
		t.Fatalf("%+v %v", r, err)
	}
	// The chunk's bytes go, and with the bytes the record.
	p.do(t, &meta.SetAttr{Ino: l[sealed].Files[0].Ino, Mask: meta.SetSize}, meta.LeaseNone)
	g.await("dropped", func(*RepairStatus) bool { return g.record(sealed).ID.IsZero() })
}

// The server of a good replica is so slow, or so disturbed, that the server does not tell the
// replica's state. No caller can give the replica up as damaged, and the replica counts as good
// once the server answers.
func TestSlowReplicaIsNotGivenUp(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name string
		no   meta.Kind // the answer of a server to the order to read the replica; KindOK: no answer comes
	}{{"slow", meta.KindOK}, {"away", meta.Unavailable}, {"canceled", meta.Canceled}, {"interrupted", meta.Interrupted}, {"busy", meta.ResourceExceeded}} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			g := newGrid(t, nil, racks[0])
			p := g.s.dial("a")
			g.policy(p, meta.Policy{Replicas: 1})
			id := g.chunk(p, "file", 500).ID
			n := g.nodes[1]
			var slow atomic.Bool
			slow.Store(true)
			if c.no == meta.KindOK {
				// The server lists the replica and then falls silent.
				asked := 0
				g.mu.Lock()
				g.before = func(_ meta.ServerID, o meta.Order) bool {
					g.mu.Lock()
					defer g.mu.Unlock()
					if o.Kind == meta.OrderStat && o.Chunk == id {
						asked++
					}
					return o.Kind != meta.OrderStat || asked%2 == 1 || !slow.Load()
				}
				g.mu.Unlock()
			} else {
				// A reader found wrong bytes: only a read of the replica proves the bytes right.
				n.mu.Lock()
				n.failVerify = c.no
				n.mu.Unlock()
				g.s.srv.repairs.badReplica(id, 1, true)
			}
			accept := func(want meta.Kind) {
				t.Helper()
				eventually(t, "it is answered", func() error {
					_, err := g.accept(true, id)
					if kind := meta.KindOf(err); kind != want && !strings.Contains(fmt.Sprint(err), "being repaired") {
						t.Fatalf("DATA: a replica that could not be judged was to be given up: %v, want %v", err, want)
					}
					return unless(meta.KindOf(err) == want)
				})
			}
			accept(meta.Unavailable)
			if rec := g.record(id); rec.Lost || !slices.Equal(rec.Servers, []meta.ServerID{1}) {
				t.Fatalf("DATA: %+v", rec)
			}
			slow.Store(false)
			n.mu.Lock()
			n.failVerify = meta.KindOK
			n.mu.Unlock()
			g.await("it is good again", full)
			accept(meta.Busy)
		})
	}
}

// Accepting a loss does not give up bytes that damaged replicas still serve, and an open chunk
// that ends before the journal's promised length ends only by an operator's order.
func TestLossOfPart(t *testing.T) {
	t.Parallel()
	g := newGrid(t, nil, racks[0], racks[2])
	p := g.s.dial("a")
	g.policy(p, meta.Policy{Replicas: 2})
	writer := g.s.dial("writer")
	bad, short := g.chunk(p, "bad", 500).ID, g.open(writer, "short", 100)
	g.await("full", full)
	for _, n := range g.nodes {
		n.mu.Lock()
		n.chunks[bad].corrupt, n.chunks[bad].told = true, true
		n.chunks[short].data = n.chunks[short].data[:60]
		n.mu.Unlock()
	}
	g.await("lost", func(st *RepairStatus) bool { return st.Lost == 1 })
	if _, err := writer.SealChunk(t.Context(), 1, short); meta.KindOf(err) != meta.Corrupt {
		t.Fatalf("sealed at less than was promised: %v", err)
	}
	writer.Close(t.Context())
	eventually(t, "both are lost", func() error {
		l := g.loss()
		if l[bad].State != LossDamaged || l[short].State != LossShort {
			return fmt.Errorf("%+v", l)
		}
		return nil
	})
	answer := func(want meta.Kind, damaged bool, ids ...meta.ChunkID) { // Busy: a repair is trying the chunk
		t.Helper()
		eventually(t, "it is answered", func() error {
			_, err := g.accept(damaged, ids...)
			if kind := meta.KindOf(err); kind != want && kind != meta.Busy {
				t.Fatalf("accepted: %v, want %v", err, want)
			}
			return unless(meta.KindOf(err) == want)
		})
	}
	answer(meta.Corrupt, false, bad)
	answer(meta.KindOK, true, bad, short)
	if rec := g.record(short); rec.State != meta.ChunkSealed || rec.Length != 60 || len(rec.Servers) != 2 || !rec.Lost {
		t.Fatalf("%+v", rec)
	}
	g.await("done", func(st *RepairStatus) bool { return full(st) && st.AcceptedLost == 2 })
	r, err := g.s.srv.checker.Fsck(t.Context(), 1)
	if err != nil || r.Count != 0 || r.Lost != 540 || len(r.Accepted) != 2 {
		t.Fatalf("DATA: fsck: %+v %v", r, err)
	}
	deadline := time.Now().Add(time.Minute)
	for n := g.nodes[1]; ; time.Sleep(20 * time.Millisecond) {
		n.mu.Lock()
		_, there := n.chunks[bad]
		n.mu.Unlock()
		if !there {
			return
		}
		if time.Now().After(deadline) {
			t.Fatal("a damaged replica that was given up stays")
		}
	}
}

// No server can copy an open chunk before the chunk is sealed: if all servers of an open chunk
// are gone, or some can't be reached for now, the status counts the chunk as the status counts a
// sealed chunk.
func TestOpenChunksOutOfReachAreTold(t *testing.T) {
	m := placement.NewMap([]placement.Server{{ID: 1, State: placement.Live}, {ID: 2, State: placement.Away}, {ID: 3, State: placement.Gone}})
	for _, c := range []struct {
		servers []meta.ServerID
		want    int
		tells   RepairStatus
	}{
		{[]meta.ServerID{1}, 1, RepairStatus{}},
		{[]meta.ServerID{1}, 2, RepairStatus{Endangered: 1, ShortBytes: 7}},
		{[]meta.ServerID{1, 2}, 2, RepairStatus{Away: 1, LastReachable: 1}},
		{[]meta.ServerID{1, 2}, 3, RepairStatus{Away: 1, LastReachable: 1, UnderReplicated: 1, ShortBytes: 7}},
		{[]meta.ServerID{2, 3}, 1, RepairStatus{Away: 1, Unreachable: 1}},
		{[]meta.ServerID{1, 3}, 2, RepairStatus{Endangered: 1, ShortBytes: 7}}, // the chunk is sealed soon
		{[]meta.ServerID{3, 4}, 2, RepairStatus{Lost: 1, ShortBytes: 7}},
	} {
		for _, written := range []bool{true, false} {
			want := c.tells
			if !written {
				want = RepairStatus{Away: c.tells.Away} // the journal promises no bytes of the chunk
			}
			want.Open = 1
			rec := meta.ChunkRecord{Servers: c.servers, Live: 7}
			st := RepairStatus{Nodes: map[meta.ServerID]NodeChunks{}}
			st.addOpen(&openChunk{rec: &rec, written: written, want: c.want, standing: m.Standing(new(faults).replicas(&rec))})
			st.Nodes = nil
			if !reflect.DeepEqual(st, want) {
				t.Errorf("on %v of %d, written %v: %+v, want %+v", c.servers, c.want, written, st, want)
			}
		}
	}
}
