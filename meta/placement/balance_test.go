package placement

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"penstock.io/penstock/meta"
)

// balanced is a cluster whose chunks Balance moves, as the repair loop does: an inspection
// proposes, a few moves are made until the next inspection, each planned anew, and the replicas
// left behind are deleted many inspections later.
type balanced struct {
	r       *rand.Rand
	p       meta.Policy
	servers []Server
	chunks  []*balancedChunk
	// delete[n] is done n inspections from now.
	delete [][]leftover
	grace  int
	blind  bool // no count includes the replicas to be deleted
	moves  int
}

type balancedChunk struct {
	servers []meta.ServerID
	length  uint64
	was     []meta.ServerID // the earlier places
	back    bool
}

type leftover struct {
	server meta.ServerID
	length uint64
}

const band = 0.1

// fill writes chunks until the servers are about as full as given.
func (w *balanced) fill(part float64, length func() uint64) {
	for {
		var used, total uint64
		for _, s := range w.servers {
			t, f := s.room("")
			used, total = used+t-f, total+t
		}
		if float64(used) >= part*float64(total) {
			return
		}
		got, err := NewMap(w.servers).Choose(w.r, &w.p, int(w.p.Replicas), Writer{}, nil, nil)
		if err != nil {
			return
		}
		c := &balancedChunk{servers: got, length: length()}
		w.chunks = append(w.chunks, c)
		for _, id := range got {
			w.servers[id-1].Disks[0].Free -= min(c.length, w.servers[id-1].Disks[0].Free)
		}
	}
}

func (w *balanced) inspectOnce(parallel int) (proposed int) {
	b := NewMap(w.servers).Balance(&w.p, band)
	var queue []*balancedChunk
	for _, c := range w.chunks {
		if _, ok := b.Move(w.r, c.servers, c.length); ok {
			queue = append(queue, c)
		}
	}
	for len(w.delete) <= w.grace {
		w.delete = append(w.delete, nil)
	}
	for _, c := range queue[:min(parallel, len(queue))] {
		st, ok := NewMap(w.servers).Balance(&w.p, band).Move(w.r, c.servers, c.length)
		if !ok {
			continue
		}
		to, from := st.Add[0], st.Remove[0]
		c.back = c.back || slices.Contains(c.was, to)
		c.was = append(c.was, from)
		c.servers = slices.Concat(st.Keep, st.Add)
		w.servers[to-1].Disks[0].Free -= c.length
		if !w.blind {
			w.servers[from-1].Leaving += c.length
		}
		w.delete[w.grace] = append(w.delete[w.grace], leftover{from, c.length})
		w.moves++
	}
	for _, l := range w.delete[0] {
		s := &w.servers[l.server-1]
		s.Disks[0].Free += l.length
		if !w.blind {
			s.Leaving -= l.length
		}
	}
	w.delete = w.delete[1:]
	return len(queue)
}

// used is the fill of every server by its disk.
func (w *balanced) used() (all []float64) {
	for _, s := range w.servers {
		t, f := s.room("")
		all = append(all, float64(t-f)/float64(t))
	}
	return all
}

// run inspects until nothing moves and nothing is left to delete, and gives the
// highest fill that each server had on the way.
func (w *balanced) run(t *testing.T, parallel int) (peak []float64) {
	t.Helper()
	peak = w.used()
	for round := 0; ; round++ {
		n := w.inspectOnce(parallel)
		for i, f := range w.used() {
			peak[i] = max(peak[i], f)
		}
		if n == 0 && !slices.ContainsFunc(w.delete, func(l []leftover) bool { return len(l) > 0 }) {
			return peak
		}
		if round > 20_000 {
			t.Fatalf("it does not end: fills %.3f, %d would move", w.used(), n)
		}
	}
}

// Two servers at 60 % and an empty server, with late deletions: chunks move until the fills are
// within the band, none of the chunks twice, and then no more chunks move.
func TestBalanceDoesNotOvershoot(t *testing.T) {
	const gib = 1 << 30
	story := func(blind bool) (*balanced, []float64) {
		w := &balanced{r: rand.New(rand.NewPCG(3, 3)), p: meta.Policy{Replicas: 1}, grace: 60, blind: blind}
		for id := range 2 {
			w.servers = append(w.servers, Server{ID: meta.ServerID(id + 1), Disks: []Disk{{Total: 1000 * gib, Free: 1000 * gib}}})
		}
		w.fill(0.6, func() uint64 { return gib })
		w.servers = append(w.servers, Server{ID: 3, Disks: []Disk{{Total: 1000 * gib, Free: 1000 * gib}}})
		return w, w.run(t, 8)
	}
	w, peak := story(false)
	t.Logf("%d moves; fills %.3f, highest on the way %.3f", w.moves, w.used(), peak)
	if peak[2] > 0.4 {
		t.Errorf("the new server got to %.3f, the mean is 0.4", peak[2])
	}
	if w.moves > 340 {
		t.Errorf("%d moves; 334 do", w.moves)
	}
	for _, c := range w.chunks {
		if len(c.was) > 1 {
			t.Fatalf("a chunk moved %d times: %v", len(c.was), c.was)
		}
	}
	if f := w.used(); slices.Max(f)-slices.Min(f) > band+0.002 {
		t.Errorf("fills are %.3f", f)
	}
	// As before replicas to be deleted were counted.
	blind, peak := story(true)
	t.Logf("blind: %d moves; fills %.3f, highest on the way %.3f", blind.moves, blind.used(), peak)
	if peak[2] < 0.45 {
		t.Errorf("the test shows nothing: without the count the new server got to %.3f only", peak[2])
	}
}

// Whatever the sizes of servers and chunks, moving ends within the band, or within a chunk of the
// band, with no server pushed over the mean and no chunk moved back to an earlier place, and no
// move breaks the policy.
func TestBalanceEnds(t *testing.T) {
	for seed := range uint64(12) {
		r := rand.New(rand.NewPCG(seed, 17))
		w := &balanced{r: r, grace: r.IntN(40), p: meta.Policy{Replicas: uint32(1 + r.IntN(3)), Spread: meta.SpreadRack}}
		add := func(rack int) {
			id := meta.ServerID(len(w.servers) + 1)
			total := uint64(200+r.IntN(800)) << 30
			w.servers = append(w.servers, Server{ID: id, Topology: fmt.Sprintf("/dc/r%d/n%d", rack, id), Disks: []Disk{{Class: "ssd", Total: total, Free: total}}})
		}
		for n := range 12 {
			add(n % 4)
		}
		w.fill(0.2+0.5*r.Float64(), func() uint64 { return 1<<28 + r.Uint64N(1<<31) })
		for rack := range 4 {
			add(rack) // a new server in each rack
		}
		b := NewMap(w.servers).Balance(&w.p, band)
		mean := b.mean
		before := w.used()
		peak := w.run(t, 1+r.IntN(8))
		const slack = 0.012 // a chunk on the smallest server
		for i, f := range peak {
			if f > max(mean, before[i])+slack {
				t.Errorf("seed %d: server %d was filled to %.3f, the mean is %.3f", seed, i+1, f, mean)
			}
		}
		b = NewMap(w.servers).Balance(&w.p, band)
		for _, c := range w.chunks {
			if c.back {
				t.Errorf("seed %d: a chunk went to and fro: %v, then %v", seed, c.was, c.servers)
			}
			var on []Replica
			for _, id := range c.servers {
				on = append(on, Replica{Server: id})
			}
			if st := NewMap(w.servers).Plan(r, &w.p, on); st.Reason != None {
				t.Fatalf("seed %d: a move broke the policy: %v, %+v", seed, c.servers, st)
			}
			if _, ok := b.Move(r, c.servers, c.length); ok {
				t.Fatalf("seed %d: something would still move", seed)
			}
		}
		f := w.used()
		if got := slices.Max(f) - slices.Min(f); got > band+slack {
			t.Errorf("seed %d: fills differ by %.3f: %.3f", seed, got, f)
		}
		if t.Failed() {
			return
		}
	}
}

// Where a volume may not lie, and disks of other classes, don't count.
func TestBalanceLooksAtThePolicysDisks(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	disk := func(class string, used uint64) Disk {
		return Disk{Class: class, Total: 1 << 40, Free: (100 - used) << 40 / 100}
	}
	servers := []Server{
		{ID: 1, Topology: "/a/r/1", Disks: []Disk{disk("hdd", 20), disk("nvme", 70)}},
		{ID: 2, Topology: "/a/r/2", Disks: []Disk{disk("hdd", 70), disk("nvme", 20)}},
		{ID: 3, Topology: "/b/r/3", Disks: []Disk{disk("hdd", 95), disk("nvme", 1)}},
	}
	m := NewMap(servers)
	p := meta.Policy{Replicas: 1, Topology: "/a", Class: "nvme"}
	if st, ok := m.Balance(&p, 0.1).Move(r, []meta.ServerID{1}, 1<<20); !ok || !slices.Equal(st.Add, []meta.ServerID{2}) {
		t.Errorf("nvme of /a: %+v", st)
	}
	p.Class = "hdd"
	if st, ok := m.Balance(&p, 0.1).Move(r, []meta.ServerID{1}, 1<<20); ok {
		t.Errorf("from the emptiest of its class: %+v", st)
	}
	if st, ok := m.Balance(&p, 0.1).Move(r, []meta.ServerID{2}, 1<<20); !ok || !slices.Equal(st.Add, []meta.ServerID{1}) {
		t.Errorf("hdd of /a, though /b is fuller: %+v", st)
	}
	// A chunk that would make the emptier server the fuller server stays.
	if st, ok := m.Balance(&p, 0.1).Move(r, []meta.ServerID{2}, 300<<30); ok {
		t.Errorf("300 of 1024 GiB moved across a difference of half a disk: %+v", st)
	}
	for _, off := range []float64{0, -1} {
		if st, ok := m.Balance(&p, off).Move(r, []meta.ServerID{2}, 1<<20); ok {
			t.Errorf("it is off: %+v", st)
		}
	}
}
