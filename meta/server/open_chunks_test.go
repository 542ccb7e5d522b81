package server

import (
	"errors"
	"testing"
	"time"

	"penstock.io/penstock/meta"
)

// takeDisk has a server lose all its replicas, as after a change of its disk.
func (n *gridNode) takeDisk() {
	n.mu.Lock()
	defer n.mu.Unlock()
	clear(n.chunks)
	n.generation++
}

// An open chunk of an idle writer that lost a replica with its disk, that a server reported
// corrupt, or that vanished from a server without notice, is ended and copied like a sealed
// chunk; an open chunk without bytes stays unchanged.
func TestHurtOpenChunksAreRepaired(t *testing.T) {
	t.Parallel()
	g := newGrid(t, func(c *Config) { c.RepairDelay = time.Hour }, racks[0], racks[2], racks[4])
	p := g.s.dial("a")
	g.policy(p, meta.Policy{Replicas: 3})
	corrupt, vanished := g.open(p, "corrupt", 100), g.open(p, "vanished", 200)
	begun := p.alloc(t, false).ID
	g.await("full", full)
	g.nodes[1].mu.Lock()
	g.nodes[1].chunks[corrupt].corrupt, g.nodes[1].chunks[corrupt].told = true, true
	g.nodes[1].events = append(g.nodes[1].events, meta.ReplicaEvent{Seq: 1, Kind: meta.EventCorrupt, Chunk: corrupt, Disk: "d"})
	g.nodes[1].mu.Unlock()
	g.nodes[2].mu.Lock()
	delete(g.nodes[2].chunks, vanished)
	g.nodes[2].mu.Unlock()
	whole := func(what string, ids ...meta.ChunkID) {
		t.Helper()
		g.await(what, func(st *RepairStatus) bool {
			for _, id := range ids {
				if rec := g.record(id); rec.State != meta.ChunkSealed || len(rec.Servers) != 3 {
					return false
				}
			}
			// The status may say for a moment that all is whole, while the fault of a replica is
			// not listed yet.
			return full(st) && g.inexact(3) == nil
		})
		g.exact(3)
	}
	whole("ended and whole", corrupt, vanished)
	lost := []meta.ChunkID{g.open(p, "one", 300), g.open(p, "two", 400)}
	g.nodes[3].takeDisk()
	whole("whole again", lost...)
	if rec := g.record(begun); rec.State != meta.ChunkOpen {
		t.Errorf("a chunk that nobody wrote to yet was ended: %v", rec)
	}
}

// While the replica that an open chunk lost has no place, and the others are silent, the status
// counts the chunk like a sealed chunk; and 'penstock chunk lost' knows a chunk whose bytes are
// nowhere, though its writer has the chunk open.
func TestHurtOpenChunksAreTold(t *testing.T) {
	t.Parallel()
	g := newGrid(t, func(c *Config) { c.RepairDelay = time.Hour }, racks[0], racks[2])
	p := g.s.dial("a")
	g.policy(p, meta.Policy{Replicas: 2})
	one, short, gone := g.open(p, "one", 100), g.open(p, "short", 200), g.open(p, "gone", 300)
	g.await("full", full)
	for _, n := range g.nodes { // disks that were set back to an old image
		n.mu.Lock()
		n.chunks[short].data = n.chunks[short].data[:60]
		n.mu.Unlock()
	}
	if l := g.loss(); len(l) != 1 || l[short].State != LossShort {
		t.Errorf("an open chunk that ends before what was synced: %+v", l)
	}
	for _, n := range g.nodes {
		n.mu.Lock()
		delete(n.chunks, gone)
		n.mu.Unlock()
	}
	if l := g.loss(); len(l) != 2 || l[gone].State != LossTotal || len(l[gone].Files) != 1 || l[gone].Files[0].Path != "/gone" {
		t.Errorf("an open chunk that is on no disk: %+v", l)
	}
	g.await("told", func(st *RepairStatus) bool { return st.Lost >= 1 })
	g.nodes[2].halt()
	st := g.await("one is left", func(st *RepairStatus) bool { return st.LastReachable > 0 })
	if rec := g.record(one); st.Away == 0 || rec.State != meta.ChunkOpen {
		t.Errorf("%+v, %v", st, rec)
	}
	g.nodes[1].halt()
	g.await("none is left", func(st *RepairStatus) bool { return st.Unreachable > 0 && st.LastReachable == 0 })
	if l := g.loss(); l[one].State != LossPending {
		t.Errorf("a chunk whose servers are all away: %+v", l)
	}
}

// Of three replicas two acknowledge where the third has no server. What was written so is
// counted as short, and comes to full number as soon as the server is back, however idle
// its writer is. Fewer than the policy's least take nothing.
func TestShortChunksAreFilled(t *testing.T) {
	t.Parallel()
	g := newGrid(t, func(c *Config) { c.RepairDelay = time.Hour }, racks[0], racks[2], racks[4])
	p := g.s.dial("a")
	g.policy(p, meta.Policy{Replicas: 3})
	whole := g.open(p, "whole", 50)
	g.nodes[3].halt()
	first, second := g.open(p, "first", 100), g.open(p, "second", 200)
	begun := p.alloc(t, false)
	for _, id := range []meta.ChunkID{first, second, begun.ID} {
		if rec := g.record(id); len(rec.Servers) != 2 {
			t.Fatalf("%v, want two servers", rec)
		}
	}
	if _, err := p.SealChunk(t.Context(), 1, second); err != nil {
		t.Fatal(err)
	}
	st := g.await("counted", func(st *RepairStatus) bool { return st.UnderReplicated == 2 })
	if st.ShortBytes != 300 || st.Open != 3 {
		t.Errorf("two chunks of 300 bytes are short: %+v", st)
	}
	g.nodes[2].halt()
	if _, err := p.AllocChunks(t.Context(), 1, 1, false); !errors.Is(err, meta.Unavailable) {
		t.Fatalf("DATA: with one server of three: %v, want a refusal", err)
	}
	g.policy(p, meta.Policy{Replicas: 2})
	if _, err := p.AllocChunks(t.Context(), 1, 1, false); !errors.Is(err, meta.Unavailable) {
		t.Fatalf("DATA: with one server of two: %v, want a refusal", err)
	}
	g.policy(p, meta.Policy{Replicas: 3, MinReplicas: 1})
	if last := g.record(g.open(p, "last", 400)); len(last.Servers) != 1 {
		t.Fatalf("with one server, where one is enough: %v", last)
	}
	g.add(2, racks[2])
	g.add(3, racks[4])
	g.await("full number", func(st *RepairStatus) bool {
		for _, rec := range g.records() {
			if len(rec.Servers) != 3 {
				return false
			}
		}
		return full(st)
	})
	g.exact(3)
	if rec := g.record(whole); rec.State != meta.ChunkOpen {
		t.Errorf("a chunk that had all its replicas was ended: %v", rec)
	}
}

// A short chunk whose writer reports that the third server is out of reach goes on: a fresh chunk
// would not have the third server either.
func TestShortChunksWaitForTheirWriter(t *testing.T) {
	t.Parallel()
	g := newGrid(t, nil, racks[0], racks[2], racks[4])
	p := g.s.dial("a")
	g.policy(p, meta.Policy{Replicas: 3})
	p.Trouble(1, []meta.ServerID{3}, nil)
	var id meta.ChunkID
	eventually(t, "the owner heard it", func() error {
		gr := p.alloc(t, false)
		id = gr.ID
		return unless(len(gr.Servers) == 2)
	})
	o := g.s.srv.hosted.opened(1)
	policy, err := o.policy()
	if err != nil {
		t.Fatal(err)
	}
	rec := g.record(id)
	if x := o.inspection.openChunk(&rec, &policy, g.s.srv.serverMap.servers()); x.ends != "" {
		t.Errorf("it ends: %s", x.ends)
	}
	g.nodes[3].halt()
	g.add(3, racks[4]) // the writer's report is over
	eventually(t, "it ends, since its writer has nothing against the third server any more", func() error {
		return unless(o.inspection.openChunk(&rec, &policy, g.s.srv.serverMap.servers()).ends != "")
	})
}

// A chunk without bytes ends and goes when its servers were given up, though none of the servers
// can be asked, and no writer comes.
func TestUnwrittenChunkOnRemovedServer(t *testing.T) {
	t.Parallel()
	g := newGrid(t, nil, racks[0])
	p := g.s.dial("a")
	g.policy(p, meta.Policy{Replicas: 1})
	id := p.alloc(t, false).ID
	g.nodes[1].halt()
	if err := g.s.srv.repairs.removeNode(t.Context(), 1, true); err != nil {
		t.Fatal(err)
	}
	eventually(t, "it went", func() error { return unless(g.record(id).ID.IsZero()) })
}
