package server

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/cluster"
)

// viewed is a cluster that lists its volumes, as a cluster with etcd does: so its server closes
// unused volumes.
type viewed struct{ *fakeCluster }

func (v viewed) View() *cluster.View {
	all, _ := v.Volumes(context.Background())
	return &cluster.View{Revision: 1, Volumes: all, MetaServers: []cluster.MetaServer{{Name: "m", Addr: "unix:/m"}}, Nodes: v.Nodes()}
}

// idleVolumes makes volumes with a chunk of two replicas each, and waits until the volumes are
// closed.
func idleVolumes(g *grid, n int) (ids []meta.VolumeID) {
	t := g.t
	t.Helper()
	p := g.s.dial("maker")
	for i := range n {
		v, err := g.s.cluster.CreateVolume(t.Context(), fmt.Sprint("v", i), meta.Policy{Replicas: 2}, 0)
		if err != nil {
			t.Fatal(err)
		}
		r, err := p.Do(t.Context(), v.ID, meta.OpID{}, newFile("f"), meta.LeaseNone)
		if err != nil {
			t.Fatal(err)
		}
		gr, err := p.AllocChunks(t.Context(), v.ID, 1, false)
		if err != nil {
			t.Fatal(err)
		}
		for _, id := range gr[0].Servers {
			node := g.nodes[id]
			node.mu.Lock()
			node.chunks[gr[0].ID] = &gridChunk{data: fmt.Appendf(nil, "volume %d", i), state: meta.ChunkOpen, fence: gr[0].Fence}
			node.mu.Unlock()
		}
		w := &meta.Write{Ino: r.Attr.Ino, Extents: []meta.Extent{{Len: 8, Chunk: gr[0].ID}}, Size: 8, Synced: true}
		if _, err := p.Do(t.Context(), v.ID, meta.OpID{}, w, meta.LeaseNone); err != nil {
			t.Fatal(err)
		}
		if _, err := p.SealChunk(t.Context(), v.ID, gr[0].ID); err != nil {
			t.Fatal(err)
		}
		ids = append(ids, v.ID)
	}
	p.Close(t.Context())
	closed(g, ids)
	return ids
}

func closed(g *grid, ids []meta.VolumeID) {
	g.t.Helper()
	within(g, 90*time.Second, "all volumes are closed", func() error {
		for _, v := range ids {
			if g.s.srv.hosted.opened(v) != nil {
				return fmt.Errorf("volume %d is open", v)
			}
		}
		return nil
	})
}

func within(g *grid, d time.Duration, what string, try func() error) {
	g.t.Helper()
	for end := time.Now().Add(d); ; time.Sleep(50 * time.Millisecond) {
		err := try()
		if err == nil {
			return
		}
		if time.Now().After(end) {
			g.t.Fatalf("%s: %v", what, err)
		}
	}
}

// copies counts each chunk's replicas on running servers, except a given server.
func (g *grid) copies(but meta.ServerID) map[meta.ChunkID]int {
	m := map[meta.ChunkID]int{}
	for id, n := range g.nodes {
		n.mu.Lock()
		for c, x := range n.chunks {
			if n.stop != nil && id != but && x.state == meta.ChunkSealed {
				m[c]++
			}
		}
		n.mu.Unlock()
	}
	return m
}

// Fifty unused volumes are closed. A chunk server is to be emptied, then another chunk server
// dies: no client asks for the volumes, and each volume has its two replicas again within the
// time of a visit to all volumes, and is closed after the visit.
func TestIdleVolumesAreRepaired(t *testing.T) {
	t.Parallel()
	const n = 50
	g := newGrid(t, func(c *Config) {
		c.Cluster = viewed{c.Cluster.(*fakeCluster)}
		c.IdleClose, c.HomeAfter, c.Followers = 100*time.Millisecond, 100*time.Millisecond, -1
	}, racks[:5]...)
	ids := idleVolumes(g, n)
	const bound = (n/visitPace+1)*visitLook + 60*time.Second // and the delay of a busy machine
	began := time.Now()
	ctx := t.Context()
	if _, err := g.s.cluster.SetNodeState(ctx, 1, cluster.NodeDraining, 0); err != nil {
		t.Fatal(err)
	}
	whole := func(without meta.ServerID) func() error {
		return func() error {
			m := g.copies(without)
			two := 0
			for _, k := range m {
				if k == 2 {
					two++
				}
			}
			if two != n {
				return fmt.Errorf("%d of %d chunks have two replicas elsewhere", two, n)
			}
			if node := g.nodes[without]; node.stop != nil {
				node.mu.Lock()
				defer node.mu.Unlock()
				if len(node.chunks) > 0 {
					return fmt.Errorf("%d replicas are still on server %d", len(node.chunks), without)
				}
			}
			return nil
		}
	}
	within(g, bound, "the drain ends", whole(1))
	t.Logf("drained of %d closed volumes in %v", n, time.Since(began).Round(time.Millisecond))
	closed(g, ids)
	began = time.Now()
	g.nodes[2].halt()
	within(g, bound, "what a dead server had is copied", whole(2))
	t.Logf("repaired %d closed volumes in %v", n, time.Since(began).Round(time.Millisecond))
	closed(g, ids)
}

// No client opened a volume since the volume went to the trash. The volume's chunks still count:
// a chunk server with the only replicas of a volume that can be undeleted is not removed.
func TestTrashKeepsNodes(t *testing.T) {
	t.Parallel()
	g := newGrid(t, func(c *Config) {
		c.Cluster = viewed{c.Cluster.(*fakeCluster)}
		c.IdleClose, c.HomeAfter, c.Followers = 100*time.Millisecond, 100*time.Millisecond, -1
	}, racks[0], racks[1])
	ids := idleVolumes(g, 1)
	if _, err := g.s.cluster.UpdateVolume(t.Context(), ids[0], func(v *cluster.Volume) error {
		v.State, v.Until = cluster.VolumeTrash, meta.Time(time.Now().Add(time.Hour).UnixNano())
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	within(g, 60*time.Second, "the chunks of both volumes are known", func() error {
		st, err := g.s.srv.repairs.RepairStatus(t.Context(), 0)
		if err == nil && st.Unscanned > 0 {
			err = fmt.Errorf("%d volumes are not looked through", st.Unscanned)
		}
		return err
	})
	if st, err := g.s.srv.repairs.RepairStatus(t.Context(), 0); err != nil || st.Nodes[1].Chunks != 1 {
		t.Errorf("DATA: chunks of a volume in the trash are not counted: %+v %v", st, err)
	}
	if err := g.s.srv.repairs.removeNode(t.Context(), 1, false); meta.KindOf(err) != meta.Busy {
		t.Errorf("DATA: a chunk server with the replicas of a volume in the trash was removed: %v", err)
	}
}

// TestVisitsForSchedules: of 10,000 closed volumes, those with a schedule are visited in each
// interval, the other volumes as often as without schedules.
func TestVisitsForSchedules(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	const n, step = 10_000, time.Minute
	view := &cluster.View{}
	for i := range n {
		x := cluster.Volume{ID: meta.VolumeID(1000 + i), State: cluster.VolumeActive}
		if i%4 == 0 {
			x.Keep = "30d:1h"
		}
		view.Volumes = append(view.Volumes, x)
	}
	v := visits{at: map[meta.VolumeID]time.Time{}, not: map[meta.VolumeID]time.Time{}}
	const broken = meta.VolumeID(1004) // can't be opened
	began := time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
	hours := map[meta.VolumeID]map[int]time.Duration{}
	last := map[meta.VolumeID]time.Time{}
	for now := began; now.Before(began.Add(3 * time.Hour)); now = now.Add(step) {
		pace := int(step/visitLook) * visitPace
		for _, id := range v.due(&s.srv.hosted, view, now) {
			if pace--; pace < 0 {
				break
			}
			if id == broken {
				v.not[id] = now.Add(visitAgain)
				continue
			}
			v.at[id] = now
			if gap := now.Sub(last[id]); !last[id].IsZero() && gap > between(n)+2*visitRound(n) {
				t.Fatalf("volume %d was visited after %v", id, gap)
			}
			last[id] = now
			if hours[id] == nil {
				hours[id] = map[int]time.Duration{}
			}
			h := int(now.Sub(began) / time.Hour)
			if _, had := hours[id][h]; !had {
				hours[id][h] = now.Sub(began) % time.Hour
			}
		}
	}
	var worst time.Duration
	for _, x := range view.Volumes {
		if x.ID == broken {
			continue
		}
		if last[x.ID].IsZero() {
			t.Fatalf("volume %d was never visited", x.ID)
		}
		if x.Keep == "" {
			continue
		}
		for h := range 3 {
			late, ok := hours[x.ID][h]
			if !ok {
				t.Fatalf("volume %d was not visited in hour %d", x.ID, h)
			}
			if h > 0 {
				worst = max(worst, late)
			}
		}
	}
	if worst > visitRound(n/4)+2*step {
		t.Errorf("the last of them was visited %v after its hour began", worst)
	}
	t.Logf("%d of %d closed volumes with an hourly schedule: the last is visited after %v", n/4, n, worst)
	for _, c := range []struct {
		every   time.Duration
		volumes int
		open    bool
	}{{19 * time.Minute, 1, true}, {20 * time.Minute, 1, false}, {30 * time.Minute, n, true}, {time.Hour, n, false}} {
		if staysOpen(c.every, c.volumes) != c.open {
			t.Errorf("every %v, %d volumes: stays open is not %v", c.every, c.volumes, c.open)
		}
	}
}

// TestVisitsOfBroken: scheduled volumes that can't be opened keep no other volume from its turn.
func TestVisitsOfBroken(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	now := time.Now()
	v := visits{at: map[meta.VolumeID]time.Time{}, not: map[meta.VolumeID]time.Time{}}
	view := &cluster.View{}
	for i := range meta.VolumeID(3 * visitPace) {
		x := cluster.Volume{ID: 1000 + i, State: cluster.VolumeActive}
		if i < 2*visitPace {
			x.Keep = "30d:1h"
			v.not[x.ID] = now.Add(-time.Second) // the volume is tried again
		}
		view.Volumes = append(view.Volumes, x)
	}
	view.Volumes[0].Keep = "30d:1d"
	delete(v.not, 1000) // the volume was not tried yet
	ids := v.due(&s.srv.hosted, view, now)
	if len(ids) != len(view.Volumes) || ids[0] != 1000 {
		t.Fatal(ids)
	}
	for i, id := range ids[1:] {
		if broken := id < 1000+2*visitPace; broken != (i >= visitPace) {
			t.Fatalf("in turn %d it is volume %d: %v", i, id, ids)
		}
	}
}

// TestScheduleOfClosedVolume: an unused volume is opened for its schedule.
func TestScheduleOfClosedVolume(t *testing.T) {
	t.Parallel()
	g := newGrid(t, func(c *Config) {
		c.Cluster = viewed{c.Cluster.(*fakeCluster)}
		c.IdleClose, c.HomeAfter, c.Followers = 100*time.Millisecond, 100*time.Millisecond, -1
	}, racks[:2]...)
	id := idleVolumes(g, 1)[0]
	if _, err := g.s.cluster.UpdateVolume(t.Context(), id, func(v *cluster.Volume) error { v.Keep = "5m:1s"; return nil }); err != nil {
		t.Fatal(err)
	}
	within(g, 90*time.Second, "a snapshot is taken", func() error {
		o := g.s.srv.hosted.opened(id)
		if o == nil {
			return errors.New("it is closed")
		}
		l, err := o.snapshots.list()
		if err == nil && len(l) == 0 {
			err = errors.New("there is none")
		}
		return err
	})
}

// The events that make the server visit closed volumes again.
func TestWorse(t *testing.T) {
	t.Parallel()
	ok := serverStanding{id: 1, live: true, node: cluster.NodeActive}
	with := func(f func(*serverStanding)) serverStanding { x := ok; f(&x); return x }
	dead := with(func(s *serverStanding) { s.live = false })
	draining := with(func(s *serverStanding) { s.node = cluster.NodeDraining })
	removed := with(func(s *serverStanding) { s.node = cluster.NodeRemoved })
	disk := with(func(s *serverStanding) { s.disks = "a " })
	disks := with(func(s *serverStanding) { s.disks = "a b " })
	unknown := with(func(s *serverStanding) { s.node = "" })
	for i, c := range []struct {
		was, now []serverStanding
		want     bool
	}{
		{nil, nil, false},
		{nil, []serverStanding{ok}, false},
		{[]serverStanding{ok}, []serverStanding{ok}, false},
		{[]serverStanding{ok}, []serverStanding{dead}, true},
		{[]serverStanding{dead}, []serverStanding{dead}, false},
		{[]serverStanding{dead}, []serverStanding{ok}, false},
		{[]serverStanding{ok}, []serverStanding{draining}, true},
		{[]serverStanding{draining}, []serverStanding{draining}, false},
		{[]serverStanding{draining}, []serverStanding{removed}, true},
		{[]serverStanding{draining}, []serverStanding{ok}, false},
		{[]serverStanding{ok}, []serverStanding{disk}, true},
		{[]serverStanding{disk}, []serverStanding{disks}, true},
		{[]serverStanding{disks}, []serverStanding{ok}, false},
		{[]serverStanding{unknown}, []serverStanding{ok}, false},
	} {
		if got := worse(c.was, c.now); got != c.want {
			t.Errorf("%d: %v", i, got)
		}
	}
}

// A caller that asks for the state of repair, as a drain does, gets an answer in a moment: a
// volume that waits for its sessions, or that can't be opened, counts as not inspected.
func TestRepairStatusWaitsForNobody(t *testing.T) {
	t.Parallel()
	g := newGrid(t, nil, racks[:2]...)
	p := g.s.dial("a")
	g.policy(p, meta.Policy{Replicas: 1})
	g.chunk(p, "f", 100)
	g.await("full", full)
	g.s.crash()
	for _, n := range g.nodes {
		n.halt()
	}
	g.s.addr += "2" // where the client does not find the server
	g.s.start()
	began := time.Now()
	st, err := g.s.srv.repairs.RepairStatus(t.Context(), 0)
	if err != nil || st.Unscanned != 1 || st.Full() {
		t.Errorf("%+v, %v", st, err)
	}
	if took := time.Since(began); took > repairStatusWait+30*time.Second {
		t.Errorf("it took %v", took)
	}
	// The drain itself needs no volume at all.
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	if err := g.s.srv.repairs.drainNode(ctx, 2); err != nil {
		t.Error(err)
	}
	if !slices.ContainsFunc(g.s.cluster.Nodes(), func(n cluster.Node) bool { return n.ID == 2 && n.State == cluster.NodeDraining }) {
		t.Error("the node is not draining")
	}
}
