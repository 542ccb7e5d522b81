package server

import (
	"testing"
	"time"

	"penstock.io/penstock/meta"
)

// A volume is deleted while a server is away: when the server is back, the volume's replicas go
// from the server, a replica that no record named included, and nothing else goes. A failed list
// or an unreadable record proves nothing.
func TestDeletedVolumeGoesFromServersThatWereAway(t *testing.T) {
	t.Parallel()
	l := newLeakSite(t)
	ctx := t.Context()
	p := l.s.dial("admin")
	v := p.must(t, toCreate("gone", meta.Policy{Replicas: 1}))
	other := p.must(t, toCreate("stays", meta.Policy{Replicas: 1}))
	orphan := l.lay(meta.ChunkID{Volume: v, Term: 1, Counter: 9}, 1, 2, 3)
	blob := l.lay(meta.ChunkID{Term: 1, Counter: uint64(v)<<32 | 1}, 3)
	kept := l.lay(meta.ChunkID{Volume: other, Term: 1, Counter: 9}, 1, 2, 3)
	eventually(t, "the nodes are known", func() error {
		if n := len(l.s.cluster.Nodes()); n != 3 {
			return meta.E("count", meta.Busy, "", nil)
		}
		return nil
	})
	l.nodes[3].halt()
	p.must(t, toDelete(v))
	since := map[meta.VolumeID]time.Time{}
	sweep := func(times int) (err error) {
		for range times {
			err = l.s.srv.trash.sweepDeleted(since)
			time.Sleep(time.Millisecond)
		}
		return err
	}
	left := func() int {
		all, err := l.s.cluster.DeletedVolumes(ctx)
		if err != nil {
			t.Fatal(err)
		}
		n := 0
		for _, d := range all {
			n += len(d.On)
		}
		return n
	}

	l.s.cluster.mu.Lock()
	l.s.cluster.noDeleted = meta.E("read", meta.Unavailable, "", nil)
	l.s.cluster.mu.Unlock()
	if err := sweep(3); err == nil || !l.there(orphan, 1, 2, 3) {
		t.Fatal("without a record that could be read", err)
	}
	l.s.cluster.mu.Lock()
	l.s.cluster.noDeleted = nil
	l.s.cluster.mu.Unlock()
	l.nodes[1].mu.Lock()
	l.nodes[1].failList = true
	l.nodes[1].mu.Unlock()
	if err := sweep(3); err == nil {
		t.Error("a list that failed is not told")
	}
	if !l.there(orphan, 1) || l.there(orphan, 2) {
		t.Error("server 1 could not be listed, server 2 could")
	}
	l.nodes[1].mu.Lock()
	l.nodes[1].failList, l.nodes[1].emptyPage = false, true
	l.nodes[1].mu.Unlock()
	if err := sweep(3); err == nil || !l.there(orphan, 1) || left() != 2 {
		t.Errorf("a list that announces more and shows nothing counts as complete: %v, %d servers are left to be looked at", err, left())
	}
	l.nodes[1].mu.Lock()
	l.nodes[1].emptyPage = false
	l.nodes[1].mu.Unlock()
	if err := sweep(3); err != nil || l.there(orphan, 1) {
		t.Fatal("the orphan is still on server 1", err)
	}
	if n := left(); n != 1 || !l.there(orphan, 3) {
		t.Fatalf("%d servers are left to be looked at: server 3 is away", n)
	}
	l.add(3, racks[4])
	if err := sweep(3); err != nil || l.there(orphan, 3) || l.there(blob, 3) {
		t.Fatal("server 3 is back and keeps what it had", err)
	}
	if n := left(); n != 0 {
		t.Errorf("%d servers are left to be looked at", n)
	}
	if !l.there(kept, 1, 2, 3) {
		t.Error("another volume's chunk was deleted")
	}
	// A record whose volume exists, as after restoring an older checkpoint, deletes nothing.
	l.s.cluster.mu.Lock()
	l.s.cluster.deleted[other] = []meta.ServerID{1, 2, 3}
	l.s.cluster.mu.Unlock()
	if err := sweep(3); err != nil || !l.there(kept, 1, 2, 3) {
		t.Error("a volume that exists lost chunks to a record that says it was deleted", err)
	}
}
