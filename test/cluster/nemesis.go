package cluster

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"time"

	"penstock.io/penstock/test/netns"
)

// A fault is one failure that lasts a while.
type fault struct {
	kind string
	// slots: one fault of a slot at a time, so that the faults together never exceed the system's
	// promise: a majority of etcd, one replica of each chunk.
	slots []string
	// longest time of the fault; 0 for a fault that is over at once.
	longest time.Duration
	weight  int
	do      func(ctx context.Context, r *rand.Rand) (what string, heal func(context.Context) error, err error)
}

// nemesis makes faults and heals the faults.
type nemesis struct {
	s      *Soak
	c      *Cluster
	rand   *rand.Rand
	faults []fault
	flips  map[string]bool // chunks that have a flipped bit on some disk

	mu     sync.Mutex
	busy   map[string]bool // slots
	total  map[string]*count
	healed sync.WaitGroup
	errs   []error
}

type count struct {
	kind   string
	times  int
	lasted time.Duration
}

func newNemesis(s *Soak) *nemesis {
	n := &nemesis{s: s, c: s.Cluster, rand: rand.New(rand.NewPCG(s.Seed, 666)), flips: map[string]bool{}, busy: map[string]bool{}, total: map[string]*count{}}
	for _, f := range n.all() {
		if len(s.Only) == 0 || slices.Contains(s.Only, f.kind) {
			n.faults = append(n.faults, f)
		}
	}
	return n
}

// errNothing: the fault finds nothing to break now.
var errNothing = errors.New("nothing to break")

// run makes one fault after the other until ctx ends.
func (n *nemesis) run(ctx context.Context) error {
	heal := context.WithoutCancel(ctx)
	for ctx.Err() == nil {
		// Between none and twice the mean; long enough to tell causes apart.
		sleep(ctx, time.Duration(n.rand.Int64N(int64(2*n.s.Every))))
		if ctx.Err() != nil {
			break
		}
		f, ok := n.choose()
		if !ok {
			continue
		}
		met := n.s.stalls.begin(f.kind)
		what, undo, err := f.do(ctx, n.rand)
		if err != nil || f.longest == 0 {
			n.s.stalls.end(met)
		}
		if errors.Is(err, errNothing) {
			n.free(f)
			continue
		}
		if err != nil {
			n.free(f)
			return fmt.Errorf("fault %s: %w", f.kind, err)
		}
		lasts := time.Duration(0)
		if f.longest > 0 {
			lasts = f.longest/8 + time.Duration(n.rand.Int64N(int64(f.longest*7/8)))
		}
		n.s.Logf("%s %s: %s for %v", time.Now().Format("15:04:05.000"), f.kind, what, lasts.Round(time.Millisecond))
		n.count(f, lasts)
		n.healed.Go(func() {
			defer n.free(f)
			defer n.s.stalls.end(met)
			sleep(ctx, lasts)
			if undo == nil {
				return
			}
			if err := undo(heal); err != nil {
				n.mu.Lock()
				n.errs = append(n.errs, fmt.Errorf("healing %s %s: %w", f.kind, what, err))
				n.mu.Unlock()
				n.s.fail(fmt.Errorf("healing %s %s: %w", f.kind, what, err))
			}
		})
	}
	return nil
}

// choose takes a fault whose slot is free.
func (n *nemesis) choose() (fault, bool) {
	n.mu.Lock()
	defer n.mu.Unlock()
	var free []fault
	sum := 0
	for _, f := range n.faults {
		if !slices.ContainsFunc(f.slots, func(slot string) bool { return n.busy[slot] }) {
			free = append(free, f)
			sum += f.weight
		}
	}
	if sum == 0 {
		return fault{}, false
	}
	at := n.rand.IntN(sum)
	for _, f := range free {
		if at -= f.weight; at < 0 {
			for _, slot := range f.slots {
				n.busy[slot] = true
			}
			return f, true
		}
	}
	panic("weights that do not add up")
}

func (n *nemesis) free(f fault) {
	n.mu.Lock()
	defer n.mu.Unlock()
	for _, slot := range f.slots {
		n.busy[slot] = false
	}
}

func (n *nemesis) count(f fault, lasted time.Duration) {
	n.mu.Lock()
	defer n.mu.Unlock()
	c := n.total[f.kind]
	if c == nil {
		c = &count{kind: f.kind}
		n.total[f.kind] = c
	}
	c.times++
	c.lasted += lasted
}

func (n *nemesis) counts() []count {
	n.mu.Lock()
	defer n.mu.Unlock()
	var all []count
	for _, c := range n.total {
		all = append(all, *c)
	}
	slices.SortFunc(all, func(a, b count) int { return strings.Compare(a.kind, b.kind) })
	return all
}

// healAll waits until each fault was healed, and until every part serves.
func (n *nemesis) healAll(ctx context.Context) error {
	n.healed.Wait()
	n.mu.Lock()
	errs := slices.Clone(n.errs)
	n.mu.Unlock()
	errs = append(errs, n.c.Net.HealAll(), n.c.Ready(ctx, n.s.members()...))
	return errors.Join(errs...)
}

// all are the faults that the nemesis knows.
func (n *nemesis) all() []fault {
	return slices.Concat(n.ofProcesses(), n.ofLinks(), n.ofDisks(), n.ofPower(), n.ofOrders(), n.ofTrust(), n.ofGateways())
}

type doing = func(context.Context, *rand.Rand) (string, func(context.Context) error, error)

// some takes a member by chance.
func some[T any](r *rand.Rand, from []T) T { return from[r.IntN(len(from))] }

// restart starts a member again, and waits until the member serves.
func (n *nemesis) restart(m *Member) func(context.Context) error {
	return func(ctx context.Context) error {
		if err := m.Start(); err != nil {
			return err
		}
		return n.c.Ready(ctx, m)
	}
}

func (n *nemesis) kill(from func() []*Member) doing {
	return func(_ context.Context, r *rand.Rand) (string, func(context.Context) error, error) {
		m := some(r, from())
		m.Kill()
		return m.Name, n.restart(m), nil
	}
}

func (n *nemesis) pause(from func() []*Member) doing {
	return func(_ context.Context, r *rand.Rand) (string, func(context.Context) error, error) {
		m := some(r, from())
		return m.Name, func(context.Context) error { return m.Resume() }, m.Pause()
	}
}

func (n *nemesis) etcd() []*Member   { return n.c.Etcd }
func (n *nemesis) metas() []*Member  { return n.c.Metas }
func (n *nemesis) chunks() []*Member { return n.c.Chunks }

// last is the client that may lose its session.
func (n *nemesis) last() []*Member {
	return []*Member{n.c.Mounts[len(n.c.Mounts)-1].Member}
}

// steady are the other clients.
func (n *nemesis) steady() []*Member {
	var all []*Member
	for _, m := range n.c.Mounts[:len(n.c.Mounts)-1] {
		all = append(all, m.Member)
	}
	return all
}

func (n *nemesis) ofProcesses() []fault {
	return []fault{
		{"kill etcd", []string{"etcd"}, 8 * time.Second, 3, n.kill(n.etcd)},
		{"pause etcd", []string{"etcd"}, 6 * time.Second, 2, n.pause(n.etcd)},
		{"kill meta", []string{"meta"}, 6 * time.Second, 3, n.kill(n.metas)},
		{"pause meta", []string{"meta"}, 12 * time.Second, 3, n.pause(n.metas)},
		{"kill chunk server", []string{"chunk"}, 10 * time.Second, 4, n.kill(n.chunks)},
		{"pause chunk server", []string{"chunk"}, 10 * time.Second, 4, n.pause(n.chunks)},
		{"kill client", []string{"client"}, 4 * time.Second, 2, n.kill(n.last)},
		{"pause client", []string{"client"}, 15 * time.Second, 3, n.pause(n.last)},
	}
}

// link is a fault between two members.
func (n *nemesis) link(from, to func() []*Member, how string) doing {
	return func(_ context.Context, r *rand.Rand) (string, func(context.Context) error, error) {
		a, b := some(r, from()), some(r, to())
		if a == b {
			return "", nil, errNothing
		}
		net := n.c.Net
		heal := func(context.Context) error { return net.Heal(a.Node, b.Node) }
		way := r.IntN(2) == 0
		switch how {
		case "cut":
			return a.Name + " from " + b.Name, heal, net.Cut(a.Node, b.Node)
		case "one way":
			if way {
				a, b = b, a
			}
			return a.Name + " to " + b.Name, heal, net.CutOneWay(a.Node, b.Node)
		}
		return a.Name + " and " + b.Name, heal, errors.Join(net.Set(a.Node, b.Node, netns.Fault{Loss: 0.2}), net.Set(b.Node, a.Node, netns.Fault{Loss: 0.2}))
	}
}

func (n *nemesis) ofLinks() []fault {
	short, long := 2*time.Second, 10*time.Second
	return []fault{
		{"cut client from meta briefly", []string{"meta"}, short, 2, n.link(n.steady, n.metas, "cut")},
		{"cut client from meta for long", []string{"client"}, 15 * time.Second, 2, n.link(n.last, n.metas, "cut")},
		{"cut client from meta one way", []string{"client"}, long, 2, n.link(n.last, n.metas, "one way")},
		{"cut meta from etcd", []string{"etcd"}, long, 2, n.link(n.metas, n.etcd, "cut")},
		{"cut meta from etcd one way", []string{"etcd"}, long, 1, n.link(n.metas, n.etcd, "one way")},
		{"isolate meta from etcd", []string{"meta"}, long, 2, n.isolate(n.metas, n.etcd)},
		{"cut etcd from etcd", []string{"etcd"}, long, 1, n.link(n.etcd, n.etcd, "cut")},
		{"cut chunk from chunk", []string{"chunk"}, long, 2, n.link(n.chunks, n.chunks, "cut")},
		{"cut client from chunk", []string{"chunk"}, long, 2, n.link(n.clients, n.chunks, "cut")},
		{"cut client from chunk one way", []string{"chunk"}, long, 2, n.link(n.clients, n.chunks, "one way")},
		{"cut meta from chunk", []string{"chunk"}, long, 2, n.link(n.metas, n.chunks, "cut")},
		{"lose packets of client and chunk", []string{"chunk"}, long, 1, n.link(n.clients, n.chunks, "loss")},
		// The rack has a member of each kind, the last client among the members.
		{"cut the uplink of a rack", []string{"etcd", "meta", "chunk", "client"}, long, 8, n.uplink},
		{"slow chunk server", []string{"chunk"}, long, 1, n.slow(n.chunks)},
	}
}

func (n *nemesis) clients() []*Member { return append(n.steady(), n.last()...) }

// isolate cuts one member off from all others.
func (n *nemesis) isolate(from, others func() []*Member) doing {
	return func(_ context.Context, r *rand.Rand) (string, func(context.Context) error, error) {
		a := some(r, from())
		var errs []error
		for _, b := range others() {
			errs = append(errs, n.c.Net.Cut(a.Node, b.Node))
		}
		return a.Name, func(context.Context) error {
			var errs []error
			for _, b := range others() {
				errs = append(errs, n.c.Net.Heal(a.Node, b.Node))
			}
			return errors.Join(errs...)
		}, errors.Join(errs...)
	}
}

// uplink cuts the last client's rack off all others.
func (n *nemesis) uplink(context.Context, *rand.Rand) (string, func(context.Context) error, error) {
	rack := n.last()[0].Node.Rack
	return rack.Name, func(context.Context) error { return rack.HealUplink() }, rack.CutUplink()
}

func (n *nemesis) slow(from func() []*Member) doing {
	return func(_ context.Context, r *rand.Rand) (string, func(context.Context) error, error) {
		m := some(r, from())
		return m.Name, func(context.Context) error { return m.Node.Slow(0) }, m.Node.Slow(1 << 20)
	}
}
