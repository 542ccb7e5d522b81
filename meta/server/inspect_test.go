package server

import (
	"container/heap"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/placement"
)

// A replica that was on a disk to be emptied, and is listed on another disk by now, counts for
// the first disk no more, whatever its faults.
func TestFaultsFollowTheDisk(t *testing.T) {
	t.Parallel()
	id := meta.ChunkID{Volume: 1, Counter: 1}
	rec := &meta.ChunkRecord{ID: id, State: meta.ChunkSealed, Length: 100, Servers: []meta.ServerID{1, 2}}
	x := &sighting{info: meta.ServerInfo{ID: 1, Disks: []meta.DiskInfo{{ID: "old", State: meta.DiskFailing}, {ID: "new", Class: "hdd"}}}}
	for _, c := range []struct {
		name    string
		listed  meta.ReplicaInfo // on the new disk
		class   string
		corrupt bool // the replica was known to be corrupt
		state   placement.ReplicaState
	}{
		{name: "good", listed: meta.ReplicaInfo{Length: 100}, state: placement.Good},
		{name: "too short", listed: meta.ReplicaInfo{Length: 50}, state: placement.Bad},
		{name: "corrupt", listed: meta.ReplicaInfo{Length: 100, Err: meta.Corrupt}, state: placement.Bad},
		{name: "was corrupt", listed: meta.ReplicaInfo{Length: 100}, corrupt: true, state: placement.Bad},
		{name: "of another class", listed: meta.ReplicaInfo{Length: 100}, class: "ssd", state: placement.Unfit},
	} {
		t.Run(c.name, func(t *testing.T) {
			o := &owner{}
			o.lodge()
			list := func(c meta.ReplicaInfo, disk, class string) {
				c.ID, c.State, c.Disk = id, meta.ChunkSealed, disk
				o.inspection.listedOne(x, &c, rec, false, &meta.Policy{Class: class})
			}
			counted := func() uint64 {
				var st RepairStatus
				o.faults.onDisks(rec, &st)
				return st.Disks["old"].Chunks
			}
			list(meta.ReplicaInfo{Length: 100}, "old", "")
			if n := counted(); n != 1 {
				t.Fatalf("%d chunks are on the failing disk", n)
			}
			o.faults.set(id, 1, placement.Bad, c.corrupt) // an inspector that does not know the replica's place
			if n := counted(); n != 1 {
				t.Errorf("found bad: %d chunks are on the failing disk", n)
			}
			list(c.listed, "new", c.class)
			if n := counted(); n != 0 {
				t.Errorf("on another disk: %d chunks are on the failing one", n)
			}
			if got := o.faults.replicas(rec)[0].State; got != c.state {
				t.Errorf("the replica is %v, not %v", got, c.state)
			}
		})
	}
}

// The list of a server breaks off in each round. The listed part hides no replica that is missing
// on another server, whose list is complete.
func TestBrokenListHidesNothing(t *testing.T) {
	t.Parallel()
	g := newGrid(t, nil, racks[0], racks[2])
	p := g.s.dial("a")
	g.policy(p, meta.Policy{Replicas: 2})
	for i := range 8 {
		g.chunk(p, fmt.Sprint("f", i), 100)
	}
	g.await("full", full)
	broken, other := g.nodes[1], g.nodes[2]
	broken.mu.Lock()
	first := broken.list(meta.Order{Volume: 1}).Chunks[0].ID
	broken.failPage = true
	broken.mu.Unlock()
	other.mu.Lock()
	delete(other.chunks, first)
	other.mu.Unlock()
	eventually(t, "the missing replica is copied again", func() error {
		other.mu.Lock()
		defer other.mu.Unlock()
		if other.chunks[first] == nil {
			return errors.New("it is missing")
		}
		return nil
	})
}

// A server's disk fails while the server's replicas are listed: that list does not count as
// made after the failure, and another follows at once.
func TestChangeWhileListedIsSeen(t *testing.T) {
	t.Parallel()
	g := newGrid(t, func(c *Config) { c.ListInterval = time.Hour })
	begun, hold := make(chan struct{}, 100), make(chan struct{})
	var held atomic.Bool
	g.mu.Lock()
	g.lists = func() {
		begun <- struct{}{}
		if held.Load() {
			<-hold
		}
	}
	g.mu.Unlock()
	g.add(1, racks[0])
	g.await("listed", full)
	held.Store(true)
	for len(begun) > 0 {
		<-begun
	}
	next := func() {
		t.Helper()
		select {
		case <-begun:
		case <-time.After(30 * time.Second):
			t.Fatal("the server is not listed")
		}
	}
	g.s.srv.repairs.relist(1)
	next()
	g.s.srv.repairs.events(1, []meta.ReplicaEvent{{Kind: meta.EventDiskFailed}})
	close(hold)
	next()
}

// An owner that ends leaves no job in the queue, however the jobs of other owners lie between.
func TestForgottenOwnerLeavesNoJob(t *testing.T) {
	t.Parallel()
	seed := rand.Uint64()
	rnd := rand.New(rand.NewPCG(seed, 0))
	ends, stays := &repairing{k: &kernel{vol: 1}}, &repairing{k: &kernel{vol: 2}}
	for range 200 {
		r := newRepairs()
		want := 0
		for i := range 40 {
			by := ends
			if rnd.IntN(2) == 0 {
				by = stays
				want++
			}
			st := placement.Step{Reason: placement.UnderReplicate, Live: 1 + rnd.IntN(40)}
			r.add(by, meta.ChunkID{Volume: by.k.vol, Counter: uint64(i)}, &st, 1)
		}
		r.forget(ends)
		if len(r.queue) != want || len(r.byChunk) != want || slices.ContainsFunc(r.queue, func(j *job) bool { return j.by == ends }) {
			t.Fatalf("%d jobs and %d chunks are left, want %d (seed %d)", len(r.queue), len(r.byChunk), want, seed)
		}
		for last := 1 << 30; len(r.queue) > 0; {
			j := heap.Pop(&r.queue).(*job)
			if j.urgency > last {
				t.Fatalf("the most urgent job is not the first: %+v (seed %d)", j, seed)
			}
			last = j.urgency
		}
	}
}
