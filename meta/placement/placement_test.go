package placement

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"penstock.io/penstock/meta"
)

// site makes a cluster of dcs x racks x nodes, each of free bytes out of total.
func site(dcs, racks, nodes int, total, free uint64) []Server {
	var all []Server
	for d := range dcs {
		for r := range racks {
			for n := range nodes {
				id := meta.ServerID(len(all) + 1)
				all = append(all, Server{ID: id, Topology: fmt.Sprintf("/dc%d/r%d/n%d", d, r, n), Host: fmt.Sprint("boot", id),
					Disks: []Disk{{Class: "ssd", Total: total, Free: free}}})
			}
		}
	}
	return all
}

func TestDomains(t *testing.T) {
	for at, want := range map[string][3]string{
		"/dc1/r2/n3":      {"dc1/r2/n3", "dc1/r2", "dc1"},
		"/eu/dc1/r2/n3":   {"eu/dc1/r2/n3", "eu/dc1/r2", "eu"},
		"/r2/n3":          {"r2/n3", "r2", "r2"},
		"/n3":             {"n3", "", ""},
		"":                {"", "", ""},
		"/":               {"", "", ""},
		"dc1/r2/n3/extra": {"dc1/r2/n3/extra", "dc1/r2/n3", "dc1"},
	} {
		for level, d := range want {
			if got := Domain(at, meta.Spread(level)); got != d {
				t.Errorf("%s: %v is %q, want %q", at, meta.Spread(level), got, d)
			}
		}
	}
	for _, c := range []struct {
		at, sub string
		want    bool
	}{{"/a/b/c", "/a", true}, {"/a/b/c", "/a/b/c", true}, {"/a/bb/c", "/a/b", false}, {"/a", "/a/b", false}, {"", "/a", false}, {"", "", true}, {"/x", "/", true}} {
		if Within(c.at, c.sub) != c.want {
			t.Errorf("%q within %q is %v", c.at, c.sub, !c.want)
		}
	}
}

// check reports the faults of servers chosen for a policy: the rules that no choice may break,
// whatever the policy lets go.
func check(m *Map, p *meta.Policy, level meta.Spread, have, got, avoid []meta.ServerID) error {
	seen := map[string]meta.ServerID{}
	for k, id := range slices.Concat(have, got) {
		s, ok := m.Server(id)
		if !ok {
			if k < len(have) {
				continue
			}
			return fmt.Errorf("server %d is not in the map", id)
		}
		d := Domain(s.Topology, level)
		if d == "" && level == meta.SpreadHost {
			d = fmt.Sprint("server ", id)
		}
		if k >= len(have) {
			if other, twice := seen[d]; twice {
				return fmt.Errorf("servers %d and %d share %v %q", other, id, level, d)
			}
			if slices.Contains(avoid, id) {
				return fmt.Errorf("server %d was to be avoided", id)
			}
			if s.State != Live {
				return fmt.Errorf("server %d is in state %d", id, s.State)
			}
			if !Within(s.Topology, p.Topology) {
				return fmt.Errorf("server %d at %s is not below %s", id, s.Topology, p.Topology)
			}
			if p.Class != "" && !slices.ContainsFunc(s.Disks, func(d Disk) bool { return d.Class == p.Class && d.Free > Reserve(d.Total) }) {
				return fmt.Errorf("server %d has no room of class %s", id, p.Class)
			}
			if s.usable(p.Class) == 0 {
				return fmt.Errorf("server %d is full", id)
			}
		}
		seen[d] = id
	}
	return nil
}

// randomSite makes a cluster with all possible faults.
func randomSite(r *rand.Rand, most int) []Server {
	n := 1 + r.IntN(most)
	dcs, racks, nodes := 1+r.IntN(3), 1+r.IntN(4), 1+r.IntN(most)
	all := make([]Server, n)
	for i := range all {
		s := Server{ID: meta.ServerID(i*3 + 1), Host: fmt.Sprint("h", r.IntN(nodes)), Load: r.Uint32N(4)}
		switch r.IntN(8) {
		case 0: // doesn't say
		case 1:
			s.Topology = fmt.Sprintf("/n%d", r.IntN(nodes))
		default:
			s.Topology = fmt.Sprintf("/dc%d/r%d/n%d", r.IntN(dcs), r.IntN(racks), r.IntN(nodes))
		}
		for range 1 + r.IntN(3) {
			total := uint64(1+r.IntN(100)) << 30
			d := Disk{Class: []string{"ssd", "hdd", "nvme"}[r.IntN(3)], Total: total, Free: r.Uint64N(total + 1)}
			if r.IntN(6) == 0 {
				d.Free = 0
			}
			s.Disks = append(s.Disks, d)
		}
		if r.IntN(5) == 0 {
			s.State = State(r.IntN(4))
		}
		all[i] = s
	}
	return all
}

func randomPolicy(r *rand.Rand) meta.Policy {
	p := meta.Policy{Replicas: 1 + r.Uint32N(5), Spread: meta.Spread(r.IntN(3)), LocalFirst: r.IntN(2) == 0}
	if r.IntN(2) == 0 {
		p.MinReplicas = 1 + r.Uint32N(p.Replicas)
	}
	if r.IntN(3) == 0 {
		p.Topology = []string{"/", "/dc0", "/dc1", "/dc0/r0", "/nowhere"}[r.IntN(5)]
	}
	if r.IntN(3) == 0 {
		p.Class = []string{"ssd", "hdd", "tape"}[r.IntN(3)]
	}
	return p
}

// best is the number of replicas that a policy can have, found the slow way: the number of
// domains with a server that may take a replica.
func best(m *Map, p *meta.Policy, level meta.Spread, avoid []meta.ServerID) int {
	domains := map[int32]bool{}
	for i, s := range m.servers {
		if s.State == Live && m.fits(i, p) && s.usable(p.Class) > 0 && !slices.Contains(avoid, s.ID) {
			domains[m.domain[level][i]] = true
		}
	}
	return len(domains)
}

func chooseOnce(seed uint64) error {
	r := rand.New(rand.NewPCG(seed, 1))
	m := NewMap(randomSite(r, 30))
	p := randomPolicy(r)
	n := int(p.Replicas)
	var avoid []meta.ServerID
	for _, s := range m.servers {
		if r.IntN(10) == 0 {
			avoid = append(avoid, s.ID)
		}
	}
	at := m.servers[r.IntN(len(m.servers))]
	w := Writer{Host: at.Host, Topology: at.Topology}
	got, err := m.Choose(r, &p, n, w, nil, avoid)
	can := best(m, &p, p.Spread, avoid)
	if most := m.Most(&p, avoid); (err != nil) != (most == 0) || len(got) != most {
		return fmt.Errorf("%d servers, %w; Most says %d", len(got), err, most)
	}
	switch {
	case err != nil && can >= int(p.Least()):
		return fmt.Errorf("refused, although %d domains have room: %w", can, err)
	case err != nil:
		if k := meta.KindOf(err); k != meta.NoSpace && k != meta.Unavailable {
			return fmt.Errorf("kind %v: %w", k, err)
		}
		return nil
	case can < int(p.Least()):
		return fmt.Errorf("%d servers, although %d domains have room and %d are the least", len(got), can, p.Least())
	case len(got) > n:
		return fmt.Errorf("%d servers, %d wanted", len(got), n)
	case len(got) < min(n, best(m, &p, meta.SpreadHost, avoid)):
		return fmt.Errorf("%d servers, %d hosts have room", len(got), best(m, &p, meta.SpreadHost, avoid))
	}
	level := p.Spread
	if can < n {
		level = meta.SpreadHost
	}
	if err := check(m, &p, level, nil, got, avoid); err != nil {
		return err
	}
	if p.LocalFirst && at.State == Live && !slices.Contains(avoid, at.ID) && Within(at.Topology, p.Topology) && at.usable(p.Class) > 0 {
		if s, _ := m.Server(got[0]); s.Host != at.Host {
			return fmt.Errorf("the first is %d on %s, the writer is on %s", s.ID, s.Host, at.Host)
		}
	}
	again, _ := m.Choose(rand.New(rand.NewPCG(seed, 9)), &p, n, w, nil, avoid)
	more, _ := m.Choose(rand.New(rand.NewPCG(seed, 9)), &p, n, w, nil, avoid)
	if !slices.Equal(again, more) {
		return fmt.Errorf("the same chance gives %v and %v", again, more)
	}
	return nil
}

func TestChoose(t *testing.T) {
	for seed := range uint64(6000) {
		if err := chooseOnce(seed); err != nil {
			t.Fatalf("seed %d: %v", seed, err)
		}
	}
}

func FuzzChoose(f *testing.F) {
	f.Add(uint64(1))
	f.Fuzz(func(t *testing.T, seed uint64) {
		if err := chooseOnce(seed); err != nil {
			t.Fatal(err)
		}
		if err := planOnce(seed); err != nil {
			t.Fatal(err)
		}
	})
}

// A refusal says enough to know the remedy.
func TestRefusals(t *testing.T) {
	all := site(1, 2, 2, 100<<30, 50<<30)
	r := rand.New(rand.NewPCG(1, 1))
	for _, c := range []struct {
		p      meta.Policy
		change func([]Server)
		kind   meta.Kind
		words  []string
		never  bool // even when all come back and are empty
	}{
		{meta.Policy{Spread: meta.SpreadRack}, nil, meta.NoSpace, []string{"2 of 3 servers", "(racks)"}, true},
		{meta.Policy{Class: "nvme"}, nil, meta.NoSpace, []string{"0 of 3", "class nvme"}, true},
		{meta.Policy{Topology: "/dc9"}, nil, meta.NoSpace, []string{"below /dc9"}, true},
		{meta.Policy{}, func(s []Server) { s[0].State, s[1].State = Away, Draining }, meta.Unavailable, []string{"1 out of reach", "1 draining"}, false},
		{meta.Policy{}, func(s []Server) { s[0].State, s[1].State = Draining, Gone }, meta.Unavailable, []string{"1 draining"}, true},
		{meta.Policy{}, func(s []Server) { s[0].Disks[0].Free, s[1].Disks[0].Free = 1<<30, 0 }, meta.NoSpace, []string{"2 are full"}, false},
	} {
		servers := slices.Clone(all)
		for i := range servers {
			servers[i].Disks = slices.Clone(servers[i].Disks)
		}
		if c.change != nil {
			c.change(servers)
		}
		c.p.Replicas, c.p.MinReplicas = 3, 3
		m := NewMap(servers)
		_, err := m.Choose(r, &c.p, 3, Writer{}, nil, nil)
		if meta.KindOf(err) != c.kind {
			t.Errorf("%+v: %v, want %v", c.p, err, c.kind)
		}
		if _, never := m.AtBest().Choose(r, &c.p, 3, Writer{}, nil, nil); (never != nil) != c.never {
			t.Errorf("%+v: at best %v", c.p, never)
		}
		for _, w := range c.words {
			if err == nil || !strings.Contains(err.Error(), w) {
				t.Errorf("%+v: %v, want %q in it", c.p, err, w)
			}
		}
	}
	p := meta.Policy{Replicas: 3}
	if _, err := NewMap(all[:1]).Choose(r, &p, 3, Writer{}, nil, nil); err == nil || !strings.Contains(err.Error(), "1 of 3 servers (2 are the least)") {
		t.Errorf("one of three servers, and no word of the least: %v", err)
	}
	if _, err := NewMap(nil).Choose(r, &meta.Policy{Replicas: 1}, 1, Writer{}, nil, nil); meta.KindOf(err) != meta.Unavailable {
		t.Error(err)
	}
}

// A thousand servers of two sizes fill evenly, each part in proportion, and a
// choice costs little.
func TestFillsEvenly(t *testing.T) {
	servers := site(2, 25, 20, 100<<30, 100<<30)
	for i := range servers {
		if i%4 == 0 {
			servers[i].Disks[0] = Disk{Class: "ssd", Total: 400 << 30, Free: 400 << 30}
		}
	}
	p := meta.Policy{Replicas: 3, Spread: meta.SpreadRack}
	r := rand.New(rand.NewPCG(5, 5))
	var spent time.Duration
	const rounds, each = 400, 64
	for range rounds {
		m := NewMap(servers)
		began := time.Now()
		for range each {
			got, err := m.Choose(r, &p, 3, Writer{}, nil, nil)
			if err != nil {
				t.Fatal(err)
			}
			if err := check(m, &p, p.Spread, nil, got, nil); err != nil {
				t.Fatal(err)
			}
			for _, id := range got {
				servers[id-1].Disks[0].Free -= 1 << 30
			}
		}
		spent += time.Since(began)
	}
	b := NewMap(servers).Balance(&p, 1)
	lo, hi := 1.0, 0.0
	for _, s := range servers {
		lo, hi = min(lo, b.Fill(s.ID)), max(hi, b.Fill(s.ID))
	}
	t.Logf("mean fill %.3f, from %.3f to %.3f; %v a choice", b.mean, lo, hi, spent/(rounds*each))
	if hi-lo > 0.25 || b.mean < 0.4 {
		t.Errorf("mean fill %.3f, from %.3f to %.3f", b.mean, lo, hi)
	}
}

func TestNearest(t *testing.T) {
	m := NewMap(site(2, 2, 3, 1<<40, 1<<40))
	got := m.Nearest(2, []meta.ServerID{12, 5, 3, 7, 2})
	if want := []meta.ServerID{2, 3, 5, 12, 7}; !slices.Equal(got, want) {
		t.Errorf("%v, want %v", got, want)
	}
}

func BenchmarkChoose(b *testing.B) {
	m := NewMap(site(2, 25, 20, 100<<30, 50<<30))
	p := meta.Policy{Replicas: 3, Spread: meta.SpreadRack}
	r := rand.New(rand.NewPCG(1, 1))
	for b.Loop() {
		m.Choose(r, &p, 3, Writer{}, nil, nil)
	}
}
