package server

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/cluster"
	"penstock.io/penstock/meta/namespace"
)

// onlyOnNews has volumes inspected on news alone, not every few moments.
func onlyOnNews(c *Config) { c.RepairInterval = time.Hour }

// states are the chunks of the first volume by the journal.
func (s *site) states() map[meta.ChunkID]meta.ChunkRecord {
	s.t.Helper()
	o, err := s.srv.hosted.open(s.t.Context(), 1)
	if err != nil {
		s.t.Fatal(err)
	}
	all := map[meta.ChunkID]meta.ChunkRecord{}
	if err := o.inspection.walkRecords(func(rec *meta.ChunkRecord) { all[rec.ID] = *rec }); err != nil {
		s.t.Fatal(err)
	}
	return all
}

// TestPolicyHoldsWhenAnswered: when a change of policy is answered, no writer can append to a
// chunk that breaks the policy, including a chunk that its writer got a moment before; new chunks
// meet the policy. Chunks that meet the policy go on.
func TestPolicyHoldsWhenAnswered(t *testing.T) {
	t.Parallel()
	s := newSiteWith(t, 10*time.Second, onlyOnNews)
	s.chunkServerAt(1, "/dc/a/1")
	s.chunkServerAt(2, "/dc/b/2")
	a, admin := s.dial("a"), s.dial("admin")
	own, idle := a.alloc(t, true), a.alloc(t, false)
	if n := len(own.Servers); n != 1 {
		t.Fatalf("a chunk has %d replicas", n)
	}
	set := func(what string, change func(*meta.Policy), word string, ended, goesOn []meta.ChunkGrant) {
		t.Helper()
		if err := admin.setWords(t.Context(), false, change, word); err != nil {
			t.Fatal(err)
		}
		all := s.states()
		for _, g := range ended {
			if rec, ok := all[g.ID]; ok && rec.State == meta.ChunkOpen {
				t.Errorf("DATA: %s: chunk %v on servers %v is still appended to, and the policy was answered", what, g.ID, rec.Servers)
			}
		}
		for _, g := range goesOn {
			if all[g.ID].State != meta.ChunkOpen {
				t.Errorf("%s: a chunk that meets the policy was ended: %+v", what, all[g.ID])
			}
		}
	}
	set("replicas", func(p *meta.Policy) { p.Replicas = 2 }, "replicas", []meta.ChunkGrant{own, idle}, nil)
	two := a.alloc(t, false)
	if n := len(two.Servers); n != 2 {
		t.Errorf("DATA: a chunk that was begun afterwards has %d replicas, not 2", n)
	}
	both := []meta.ChunkGrant{two}
	set("racks", func(p *meta.Policy) { p.Spread = meta.SpreadRack }, "spread", nil, both)
	set("least", func(p *meta.Policy) { p.MinReplicas = 1 }, "min-replicas", nil, both)
	set("fewer", func(p *meta.Policy) { p.Replicas = 1 }, "replicas", nil, both)
	set("not of places", func(p *meta.Policy) { p.NoAtime = true }, "noatime", nil, both)
	set("rack a", func(p *meta.Policy) { p.Topology = "/dc/a" }, "topology", both, nil)
	one := a.alloc(t, false)
	set("encrypted", func(p *meta.Policy) { p.Encrypt = true }, "encrypt", []meta.ChunkGrant{one}, nil)
	s.chunkServerAt(3, "/dc/a/3")
	set("hosts", func(p *meta.Policy) { p.Spread = meta.SpreadHost }, "spread", nil, nil)
	near := a.alloc(t, false)
	set("both of rack a", func(p *meta.Policy) { p.Replicas = 2 }, "replicas", []meta.ChunkGrant{near}, nil)
}

// TestPolicySetAgain: the answer names chunks that can't be ended when a policy is set; a
// repeated request ends those chunks, though the policy is unchanged.
func TestPolicySetAgain(t *testing.T) {
	t.Parallel()
	s := newSiteWith(t, 10*time.Second, onlyOnNews)
	one := s.chunkServerAt(1, "/dc/a/1")
	a, admin := s.dial("a"), s.dial("admin")
	g := a.alloc(t, false)
	one.has(g.ID, 100, 100)
	a.commit(t, a.create(t, "f").Attr.Ino, g, 0, 100, true)
	s.chunkServerAt(2, "/dc/b/2")
	one.refuse(meta.IO)
	set := func() error {
		return admin.setWords(t.Context(), false, func(p *meta.Policy) { p.Replicas = 2 }, "replicas")
	}
	if err := set(); !errors.Is(err, meta.Unavailable) {
		t.Fatalf("DATA: a chunk of one replica can't be ended, and the policy of two was answered: %v", err)
	}
	one.refuse(meta.KindOK)
	if err := set(); err != nil {
		t.Fatal(err)
	}
	if rec := s.states()[g.ID]; rec.State != meta.ChunkSealed {
		t.Errorf("DATA: it was answered, and the chunk is as before: %+v", rec)
	}
}

// TestPolicyOutlivesItsOwner: a server dies when a policy is journaled and before the chunks that
// break the policy have ended. Writers go on in no such chunk under the successor, with or
// without a repeated request.
func TestPolicyOutlivesItsOwner(t *testing.T) {
	t.Parallel()
	for _, again := range []bool{true, false} {
		g := newGrid(t, func(c *Config) { c.RepairDelay = time.Hour }, "/dc/a/1")
		p, admin := g.s.dial("a"), g.s.dial("admin")
		id := g.open(p, "f", 100)
		g.add(2, "/dc/b/2")
		stuck := make(chan struct{})
		g.mu.Lock()
		var once bool
		g.before = func(_ meta.ServerID, o meta.Order) bool {
			if o.Kind != meta.OrderSeal {
				return true
			}
			g.mu.Lock()
			defer g.mu.Unlock()
			if !once {
				once = true
				close(stuck)
			}
			return false
		}
		g.mu.Unlock()
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		answer := make(chan error, 1)
		go func() {
			answer <- admin.setWords(ctx, false, func(p *meta.Policy) { p.Replicas = 2 }, "replicas")
		}()
		select {
		case <-stuck:
		case err := <-answer:
			t.Fatalf("DATA: the policy was answered, and no chunk was ended: %v", err)
		}
		if !again {
			cancel()
			<-answer
		}
		g.s.crash()
		g.mu.Lock()
		g.before = nil
		g.mu.Unlock()
		g.s.start()
		if again {
			if err := <-answer; err != nil { // the server that died had time to answer
				if err := admin.setWords(ctx, false, func(p *meta.Policy) { p.Replicas = 2 }, "replicas"); err != nil {
					t.Fatal(err)
				}
			}
			if rec := g.record(id); rec.State == meta.ChunkOpen {
				t.Errorf("DATA: chunk %v is still appended to, and the policy of 2 replicas was answered", rec)
			}
		}
		g.await("ended and whole", func(st *RepairStatus) bool {
			rec := g.record(id)
			return rec.State == meta.ChunkSealed && len(rec.Servers) == 2 && full(st)
		})
	}
}

// TestCompactionHoldsThePolicy: copies that compaction made under an earlier policy get no files.
func TestCompactionHoldsThePolicy(t *testing.T) {
	t.Parallel()
	g := newGrid(t, func(c *Config) { c.RepairDelay = time.Hour }, "/dc/a/1", "/dc/b/2")
	p := g.s.dial("a")
	id := g.open(p, "f", 100)
	if _, err := p.SealChunk(t.Context(), 1, id); err != nil {
		t.Fatal(err)
	}
	o := g.s.srv.hosted.opened(1)
	f := o.compaction.newFiller(meta.Policy{})
	var err error
	if f.policy, err = o.policy(); err != nil {
		t.Fatal(err)
	}
	var some []move
	o.mu.Lock()
	err = namespace.AllExtents(o.view(), func(ino meta.Ino, e meta.Extent) bool {
		some = append(some, move{ino: ino, ext: e})
		return true
	})
	o.mu.Unlock()
	if err != nil || len(some) != 1 {
		t.Fatal(some, err)
	}
	g.policy(p, meta.Policy{Replicas: 2})
	if err := f.end(f.step(some)); err == nil || f.moved != 0 {
		t.Errorf("DATA: moved into a chunk of the policy before: %v, %v", f.moved, err)
	}
}

// TestNothingMeetsIt: a policy that no servers of the cluster can meet is refused, when a volume
// is made and when the policy is set, unless the request forces the policy; other words of a
// volume with such a policy can be set.
func TestNothingMeetsIt(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	admin := s.dial("admin")
	if _, err := admin.CreateVolume(t.Context(), "early", meta.Policy{Replicas: 3}, meta.VolumeWords{}); err != nil {
		t.Errorf("before any chunk server is known: %v", err)
	}
	s.chunkServerAt(1, "/dc/a/1")
	for _, p := range []meta.Policy{{Replicas: 2}, {Replicas: 1, Class: "tape"}, {Replicas: 1, Topology: "/mars"}} {
		_, err := admin.CreateVolume(t.Context(), "v", p, meta.VolumeWords{})
		wantKind(t, err, meta.ResourceExceeded)
		if _, err := admin.FindVolume(t.Context(), "v"); !errors.Is(err, meta.NoSuchVolume) {
			t.Errorf("a volume that was refused is there: %v", err)
		}
		_, err = admin.SetVolume(t.Context(), 1, p, meta.VolumeWords{Only: []string{"replicas", "class", "topology"}})
		wantKind(t, err, meta.ResourceExceeded)
	}
	v, err := admin.CreateVolume(t.Context(), "v", meta.Policy{Replicas: 2}, meta.VolumeWords{Force: true})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := admin.SetVolume(t.Context(), v.ID, meta.Policy{QuotaBytes: 1 << 20}, meta.VolumeWords{Only: []string{"quota"}}); err != nil {
		t.Errorf("another word of a policy that can't be met: %v", err)
	}
	s.chunkServerAt(2, "/dc/a/2")
	if _, err := admin.CreateVolume(t.Context(), "w", meta.Policy{Replicas: 2}, meta.VolumeWords{}); err != nil {
		t.Errorf("with a second server: %v", err)
	}
}

// TestServersThatAreAwayCount: a policy is refused because of servers that were given up, and not
// because of servers that are down: neither by the metadata server that saw the server go, nor by
// a metadata server started since, which knows the server by its record alone.
func TestServersThatAreAwayCount(t *testing.T) {
	t.Parallel()
	g := newGrid(t, nil, "/dc/a/1", "/dc/b/2")
	p := g.s.dial("admin")
	create := func(name string, replicas uint32) error {
		_, err := p.CreateVolume(t.Context(), name, meta.Policy{Replicas: replicas, Spread: meta.SpreadRack}, meta.VolumeWords{})
		return err
	}
	until(t, "both are recorded", func() bool { return len(g.s.cluster.Nodes()) == 2 })
	wantKind(t, create("three", 3), meta.ResourceExceeded)
	g.add(3, "/dc/c/3")
	if err := create("three", 3); err != nil {
		t.Errorf("with a third server, which arrived later: %v", err)
	}
	until(t, "all are recorded", func() bool { return len(g.s.cluster.Nodes()) == 3 })
	g.nodes[2].halt()
	if err := create("down", 3); err != nil {
		t.Errorf("while one of three is down: %v", err)
	}
	g.s.crash()
	g.s.start()
	p = g.s.dial("admin")
	if err := create("restarted", 3); err != nil {
		t.Errorf("one of three is known by its record alone: %v", err)
	}
	// The owner of a volume tells health, and every reader of health, once a rack was given up.
	v, err := p.FindVolume(t.Context(), "three")
	if err != nil {
		t.Fatal(err)
	}
	told := func() (health, show string) {
		st, err := g.s.srv.repairs.RepairStatus(t.Context(), v.ID)
		if err != nil {
			t.Fatal(err)
		}
		page, _ := g.s.srv.health.VolumesHealth(0)
		for _, h := range page {
			if h.Name == "three" {
				health = h.Unmet
			} else if h.ID == meta.RootVolume && h.Unmet != "" {
				t.Errorf("%+v", h)
			}
		}
		return health, st.Unmet
	}
	if health, show := told(); health+show != "" {
		t.Errorf("while one of three is down: health %q, show %q", health, show)
	}
	if err := g.s.srv.repairs.setNodeState(t.Context(), 2, cluster.NodeRemoved); err != nil {
		t.Fatal(err)
	}
	if health, show := told(); !strings.Contains(health, "3 replicas on as many racks") || show != health {
		t.Errorf("one of three was removed: health %q, show %q", health, show)
	}
	wantKind(t, create("removed", 3), meta.ResourceExceeded)
	if err := create("two", 2); err != nil {
		t.Error(err)
	}
}
