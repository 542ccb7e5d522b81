package placement

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"penstock.io/penstock/meta"
)

// world is the real state of the replicas of a chunk.
type world struct {
	record []Replica
}

// take carries a step out, as the repair loop would, and reports a fault of the step.
func (w *world) take(m *Map, p *meta.Policy, st Step) error {
	state := map[meta.ServerID]ReplicaState{}
	var order []meta.ServerID
	for _, x := range w.record {
		state[x.Server] = x.State
		order = append(order, x.Server)
	}
	if len(st.Add) > 0 && len(st.From) == 0 {
		return fmt.Errorf("copies from nowhere: %+v", st)
	}
	for _, id := range st.From {
		s, ok := m.Server(id)
		if x, had := state[id]; !ok || !had || x == Bad || s.State == Away || s.State == Gone {
			return fmt.Errorf("server %d is no source: %+v", id, st)
		}
	}
	var next []Replica
	for _, id := range st.Keep {
		x, had := state[id]
		if !had {
			return fmt.Errorf("keeps %d, which has none: %+v", id, st)
		}
		next = append(next, Replica{Server: id, State: x})
	}
	for _, id := range st.Add {
		s, ok := m.Server(id)
		if x, had := state[id]; had && x != Bad && x != Unfit {
			return fmt.Errorf("copies to %d, which has it: %+v", id, st)
		}
		if !ok || s.State != Live || s.usable(p.Class) == 0 || slices.Contains(st.Keep, id) || slices.Contains(st.Remove, id) {
			return fmt.Errorf("copies to %d, which can't take it: %+v", id, st)
		}
		next = append(next, Replica{Server: id})
	}
	if len(next)+len(st.Remove) < len(order) {
		return fmt.Errorf("forgets some of %v: %+v", order, st)
	}
	w.record = next
	return nil
}

// live counts the good replicas within reach.
func (w *world) live(m *Map) (n int) {
	for _, x := range w.record {
		if s, ok := m.Server(x.Server); ok && x.State != Bad && (s.State == Live || s.State == Draining) {
			n++
		}
	}
	return n
}

// planOnce follows a chunk through changes of servers and policy.
func planOnce(seed uint64) error {
	r := rand.New(rand.NewPCG(seed, 2))
	servers := randomSite(r, 24)
	p := randomPolicy(r)
	m := NewMap(servers)
	got, err := m.Choose(r, &p, int(p.Replicas), Writer{}, nil, nil)
	if err != nil {
		return nil
	}
	w := &world{}
	for _, id := range got {
		w.record = append(w.record, Replica{Server: id})
	}
	for round := range 12 {
		switch r.IntN(6) {
		case 0:
			servers[r.IntN(len(servers))].State = State(r.IntN(4))
		case 1:
			w.record[r.IntN(len(w.record))].State = ReplicaState(r.IntN(3))
		case 2:
			p = randomPolicy(r)
		case 3:
			s := &servers[r.IntN(len(servers))]
			s.Disks = []Disk{{Class: "ssd", Total: 1 << 40, Free: uint64(r.IntN(2)) << 39}}
		case 4:
			servers[r.IntN(len(servers))].Topology = fmt.Sprintf("/dc%d/r%d/n%d", r.IntN(2), r.IntN(3), r.IntN(9))
		case 5:
			if len(servers) > 1 {
				i := r.IntN(len(servers))
				servers = slices.Delete(servers, i, i+1)
			}
		}
		m = NewMap(servers)
		for step := 0; ; step++ {
			before := w.live(m)
			st := m.Plan(r, &p, w.record)
			fail := func(format string, a ...any) error {
				return fmt.Errorf("round %d step %d, policy %+v, replicas %v, plan %+v: %s", round, step, p, w.record, st, fmt.Sprintf(format, a...))
			}
			if st.Live != before {
				return fail("%d replicas live", before)
			}
			if before == 0 {
				away := slices.ContainsFunc(w.record, func(x Replica) bool {
					s, ok := m.Server(x.Server)
					return ok && s.State == Away && x.State != Bad
				})
				if st.Work() || !away && (st.Reason != Lost || !st.Blocked) {
					return fail("nothing can be done for a lost chunk")
				}
				w.record[0].State = Good // the operator brings a server back
				break
			}
			if !st.Work() {
				if err := settled(m, &p, w, st); err != nil {
					return fail("%v", err)
				}
				break
			}
			if step > 4 {
				return fail("the plans don't end")
			}
			if st.Reason == None {
				return fail("work without a reason")
			}
			// Stopped in the middle: some of the copies are made, nothing else.
			if len(st.Remove) > 0 && w.keeps(m, &p, st) < min(int(p.Replicas), len(w.record)) {
				return fail("removes too many")
			}
			if err := w.take(m, &p, st); err != nil {
				return fail("%v", err)
			}
			if after := w.live(m); after < min(before, int(p.Replicas)) {
				return fail("%d replicas live, before it were %d", after, before)
			}
		}
	}
	return nil
}

// keeps counts the remaining replicas after a step.
func (w *world) keeps(m *Map, p *meta.Policy, st Step) int { return len(st.Keep) + len(st.Add) }

// settled reports the fault of a chunk for which Plan has no step.
func settled(m *Map, p *meta.Policy, w *world, st Step) error {
	ids := func() (l []meta.ServerID) {
		for _, x := range w.record {
			l = append(l, x.Server)
		}
		return l
	}
	domains := map[int32]bool{}
	fit := 0
	for _, x := range w.record {
		i, ok := m.index(x.Server)
		if !ok || x.State != Good || m.servers[i].State != Live && m.servers[i].State != Away || !m.fits(i, p) || domains[m.domain[p.Spread][i]] {
			continue
		}
		domains[m.domain[p.Spread][i]] = true
		fit++
	}
	if fit == int(p.Replicas) && len(w.record) == fit {
		if st.Reason != None || st.Blocked {
			return fmt.Errorf("all is as it should be")
		}
		return nil
	}
	if st.Reason == None {
		return fmt.Errorf("%d of %d replicas fit, and no reason is given", fit, p.Replicas)
	}
	if !st.Blocked {
		return fmt.Errorf("it is not said that nothing can be done")
	}
	for i, s := range m.servers {
		if s.State == Live && m.fits(i, p) && s.usable(p.Class) > 0 && !domains[m.domain[p.Spread][i]] && !slices.Contains(ids(), s.ID) && fit < int(p.Replicas) {
			return fmt.Errorf("server %d could take one", s.ID)
		}
	}
	return nil
}

func TestPlan(t *testing.T) {
	for seed := range uint64(6000) {
		if err := planOnce(seed); err != nil {
			t.Fatalf("seed %d: %v", seed, err)
		}
	}
}

func TestPlanStories(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 1))
	p := meta.Policy{Replicas: 3, Spread: meta.SpreadRack}
	on := func(ids ...meta.ServerID) (l []Replica) {
		for _, id := range ids {
			l = append(l, Replica{Server: id})
		}
		return l
	}
	servers := site(1, 4, 2, 1<<40, 1<<39) // ids 1,2 in rack 0; 3,4 in 1; 5,6 in 2; 7,8 in 3
	plan := func(change func([]Server), x []Replica) Step {
		s := slices.Clone(servers)
		if change != nil {
			change(s)
		}
		return NewMap(s).Plan(r, &p, x)
	}
	if st := plan(nil, on(1, 3, 5)); st.Work() || st.Reason != None {
		t.Errorf("a chunk in order: %+v", st)
	}
	away := func(s []Server) { s[0].State = Away }
	if st := plan(away, on(1, 3, 5)); st.Work() || st.Reason != None {
		t.Errorf("a server away for a moment: %+v", st)
	}
	gone := func(s []Server) { s[0].State = Gone }
	if st := plan(gone, on(1, 3, 5)); st.Reason != UnderReplicate || len(st.Add) != 1 || !slices.Equal(st.Keep, []meta.ServerID{3, 5}) || !slices.Equal(st.Remove, []meta.ServerID{1}) || slices.Contains(st.From, 1) {
		t.Errorf("a server gone: %+v", st)
	}
	two := func(s []Server) { s[0].State, s[2].State = Gone, Gone }
	one, under := plan(two, on(1, 3, 5)), plan(gone, on(1, 3, 5))
	if one.Reason != Endangered || one.Urgency() <= under.Urgency() {
		t.Errorf("one left is urgency %d (%+v), two left %d", one.Urgency(), one, under.Urgency())
	}
	bad := on(1, 3, 5)
	bad[1].State = Bad
	if st := plan(nil, bad); !slices.Equal(st.Add, []meta.ServerID{3}) || len(st.Remove) != 0 || slices.Contains(st.From, 3) {
		t.Errorf("a corrupt one is made anew where it lies: %+v", st)
	}
	if st := plan(nil, on(1, 2, 5)); st.Reason != Misplaced || len(st.Add) != 1 || len(st.Remove) != 1 {
		t.Errorf("two in a rack: %+v", st)
	}
	drain := func(s []Server) { s[4].State = Draining }
	if st := plan(drain, on(1, 3, 5)); st.Reason != Evacuate || !slices.Equal(st.Remove, []meta.ServerID{5}) || !slices.Contains(st.From, 5) {
		t.Errorf("a draining server: %+v", st)
	}
	// A disk is given up: its replica moves to another disk of the server with room, and stays
	// the server's replica; otherwise to another server.
	unfit := on(1, 3, 5)
	unfit[2].State, unfit[2].Length = Unfit, 1<<30
	if st := plan(nil, unfit); st.Reason != Evacuate || !slices.Equal(st.Add, []meta.ServerID{5}) || len(st.Remove) != 0 || !slices.Contains(st.From, 5) || len(st.Keep) != 2 {
		t.Errorf("a disk given up: %+v", st)
	}
	small := func(s []Server) { s[4].Disks = []Disk{{Class: "ssd", Total: 1 << 40, Free: 1 << 30}} }
	if st := plan(small, unfit); st.Reason != Evacuate || !slices.Equal(st.Remove, []meta.ServerID{5}) || len(st.Add) != 1 || st.Add[0] == 5 {
		t.Errorf("a disk given up, and the others of its server have no room: %+v", st)
	}
	nvme := p
	nvme.Class = "nvme"
	mixed := func(s []Server) {
		for i := range s {
			s[i].Disks = append(slices.Clone(s[i].Disks), Disk{Class: "nvme", Total: 1 << 40, Free: 1 << 39})
		}
	}
	if st := func() Step {
		s := slices.Clone(servers)
		mixed(s)
		return NewMap(s).Plan(r, &nvme, unfit)
	}(); !slices.Equal(st.Add, []meta.ServerID{5}) || len(st.Remove) != 0 {
		t.Errorf("a replica on a disk of another class than the policy's: %+v", st)
	}
	if st := plan(nil, on(1, 3, 5, 7)); st.Reason != Extra || !slices.Equal(st.Remove, []meta.ServerID{7}) || len(st.Add) != 0 {
		t.Errorf("one too many: %+v", st)
	}
	// Two racks left: three copies still, and the plan rests.
	racks := func(s []Server) {
		for i := 4; i < 8; i++ {
			s[i].State = Gone
		}
	}
	st := plan(racks, on(1, 3, 5))
	if len(st.Add) != 1 || len(st.Remove) != 0 {
		t.Fatalf("a third copy in a rack that has one: %+v", st)
	}
	rest := on(append(st.Keep, st.Add...)...)
	if st := plan(racks, rest); st.Work() || !st.Blocked {
		t.Errorf("nothing more can be done: %+v", st)
	}
	if st := plan(nil, rest); st.Reason == None || !st.Work() {
		t.Errorf("the racks are back: %+v", st)
	}
}
