// Package replicas owns the simulation of replication: chunk servers with disks that lose
// unsynced bytes, writers, owners with a journal that fences the owners, repair and
// deletion. All decide by the machines of meta/replica. One goroutine runs the simulation
// from one random source and one queue of events. The same seed gives the same run; a
// hash over every event proves this.
//
// The rules that must hold are in truth.go, and are checked at every event. Off plants
// bugs: then a check must fail, or the check guards nothing.
package replicas

import (
	"fmt"
	"math/rand/v2"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/replica"
	"penstock.io/penstock/test/sim/schedule"
)

// Off plants bugs: it switches rules of the machines off, and switches mistakes around
// the machines on.
type Off struct {
	replica.Off
	MarkInPlace bool // a sync overwrites the last synced record before the new record is durable
	Orphans     bool // open chunks without extents are collected
	Members     bool // a replica is deleted before the journal removes it from the set
	OldFences   bool // orders to delete and copy carry the fence of the seal, not a fresh fence
	CutFirst    bool // replicas are cut before the seal is journaled
	Pull        bool // a copy is taken from any replica, unverified
}

// Config configures a run.
type Config struct {
	Seed    uint64
	Steps   int // events until the world is healed and must come to rest
	Servers int // default 5
	Writers int // default 3
	Calm    bool
	// Lonely: every second fault leaves the owners with one server, which was unreachable
	// a moment ago.
	Lonely bool
	Off    Off
	// Log, if not nil, gets a line for each event with a message.
	Log func(string)
}

// Result is the outcome of a run.
type Result struct {
	Hash                                              uint64
	Steps, Appends, Repeats, Syncs, Seals, Shortened  int
	Fenced, Crashes, Kills, Wipes, Rots, Cuts, Pauses int
	Takeovers, Pulls, Joins, Moves, Deletes, Reads    int
	Promises, Losses, Successors, Renewals, Chunks    int
}

// Add sums results up.
func (r *Result) Add(x Result) {
	for _, p := range [][2]*int{
		{&r.Steps, &x.Steps}, {&r.Appends, &x.Appends}, {&r.Repeats, &x.Repeats}, {&r.Syncs, &x.Syncs}, {&r.Seals, &x.Seals},
		{&r.Shortened, &x.Shortened}, {&r.Fenced, &x.Fenced}, {&r.Crashes, &x.Crashes}, {&r.Kills, &x.Kills}, {&r.Wipes, &x.Wipes},
		{&r.Rots, &x.Rots}, {&r.Cuts, &x.Cuts}, {&r.Pauses, &x.Pauses}, {&r.Takeovers, &x.Takeovers}, {&r.Pulls, &x.Pulls},
		{&r.Joins, &x.Joins}, {&r.Moves, &x.Moves}, {&r.Deletes, &x.Deletes}, {&r.Reads, &x.Reads}, {&r.Promises, &x.Promises},
		{&r.Losses, &x.Losses}, {&r.Successors, &x.Successors}, {&r.Renewals, &x.Renewals}, {&r.Chunks, &x.Chunks},
	} {
		*p[0] += *p[1]
	}
}

// Times of the simulated world, in milliseconds.
const (
	wait       = 60  // for an answer
	sessionTTL = 400 // until an owner gives a silent writer up
	beat       = 80
)

// node is a process: a node can stand still and can end.
type node struct {
	i      int
	name   string
	life   int   // grows with each end: events of an earlier life are void
	paused int64 // until then nothing runs
	down   int64 // until then messages to the node are lost
}

func (n *node) Condition() (life int, paused int64) { return n.life, n.paused }

type world struct {
	schedule.Queue
	cfg  Config
	rng  *rand.Rand
	hash uint64
	res  Result
	err  error
	calm bool // no more faults

	journal journal
	truth   truth
	nodes   []*node
	servers []*server
	owners  []*owner
	writers []*writer
	cut     [][]int64 // [from][to]: until when nothing passes
	last    [][]int64 // [from][to]: arrival of the last message of an ordered stream
}

func newWorld(cfg Config) *world {
	def := func(p *int, n int) {
		if *p == 0 {
			*p = n
		}
	}
	def(&cfg.Servers, 5)
	def(&cfg.Writers, 3)
	def(&cfg.Steps, 20_000)
	w := &world{cfg: cfg, rng: rand.New(rand.NewPCG(cfg.Seed, 0x9e11ca)), hash: 14695981039346656037, calm: cfg.Calm}
	add := func(n *node, name string, i int) {
		*n = node{i: len(w.nodes), name: fmt.Sprintf("%s%d", name, i+1)}
		w.nodes = append(w.nodes, n)
	}
	w.truth.w = w
	for i := range cfg.Servers {
		s := &server{w: w}
		add(&s.node, "disk", i)
		w.servers = append(w.servers, s)
	}
	for i := range 2 {
		o := &owner{w: w}
		add(&o.node, "owner", i)
		w.owners = append(w.owners, o)
	}
	for i := range cfg.Writers {
		c := &writer{w: w, k: i}
		add(&c.node, "writer", i)
		w.writers = append(w.writers, c)
	}
	for range w.nodes {
		w.cut = append(w.cut, make([]int64, len(w.nodes)))
		w.last = append(w.last, make([]int64, len(w.nodes)))
	}
	return w
}

func (w *world) fail(format string, a ...any) {
	if w.err == nil {
		w.err = fmt.Errorf("at %d ms: "+format, append([]any{w.Now}, a...)...)
		w.trace("VIOLATION %v", w.err)
	}
}

// mix makes a number part of the run's hash.
func (w *world) mix(v uint64) {
	w.hash = (w.hash ^ v) * 1099511628211
	w.hash ^= w.hash >> 29
}

func (w *world) trace(format string, a ...any) {
	if w.cfg.Log != nil {
		w.cfg.Log(fmt.Sprintf("%6d ", w.Now) + fmt.Sprintf(format, a...))
	}
}

// chance is true with probability p/1000, never when the world is calm.
func (w *world) chance(p int) bool { return !w.calm && w.rng.IntN(1000) < p }

func (w *world) schedule(at int64, n *node, do func()) {
	if n == nil {
		w.At(at, nil, do) // an untyped nil: a nil *node in the interface would be called
		return
	}
	w.At(at, n, do)
}

// after runs do on a node in d milliseconds, unless the node's life ends first.
func (w *world) after(d int64, n *node, do func()) { w.schedule(w.Now+d, n, do) }

func (w *world) delay() int64 {
	if w.chance(15) {
		return 10 + w.rng.Int64N(400)
	}
	return w.rng.Int64N(4)
}

// send carries a message: late, twice, overtaken or not at all.
func (w *world) send(from, to *node, ordered bool, do func()) {
	d := w.delay()
	if w.cut[from.i][to.i] > w.Now || w.chance(2) {
		return
	}
	at := w.Now + d
	if last := &w.last[from.i][to.i]; ordered && !w.chance(3) {
		at = max(at, *last)
		*last = at
	}
	arrive := func() {
		if to.down <= w.Now {
			do()
		}
	}
	w.schedule(at, to, arrive)
	if w.chance(10) {
		w.schedule(at+w.rng.Int64N(300), to, arrive)
	}
}

// answer is the result of a call; ok is false if no answer came in time.
type answer[T any] struct {
	v  T
	ok bool
}

// call sends a request to node to; work gets a function to answer with. call calls back
// once: with the answer, or without an answer after a while.
func call[T any](w *world, from, to *node, ordered bool, work func(reply func(T)), back func(answer[T])) {
	done, life := false, from.life
	w.send(from, to, ordered, func() {
		work(func(v T) {
			w.send(to, from, ordered, func() {
				if !done && from.life == life {
					done = true
					back(answer[T]{v, true})
				}
			})
		})
	})
	w.after(wait+w.rng.Int64N(10), from, func() {
		if !done {
			done = true
			back(answer[T]{})
		}
	})
}

// step runs one event. It returns false if no event is left, or a check failed.
func (w *world) step() bool {
	if w.err != nil {
		return false
	}
	e, ok := w.Next()
	if e == nil {
		return ok
	}
	w.res.Steps++
	w.mix(uint64(e.At))
	w.mix(e.N)
	e.Do()
	w.truth.step()
	return true
}

// Run runs a world with faults, removes the faults, lets the world come to rest and
// checks the final state.
func Run(cfg Config) (Result, error) {
	w := newWorld(cfg)
	w.owners[0].take()
	for _, c := range w.writers {
		c.boot()
	}
	w.watch()
	w.faults()
	w.unlinks()
	w.reads()
	for w.res.Steps < w.cfg.Steps && w.step() {
	}
	w.rest()
	w.res.Hash = w.hash
	w.res.Chunks = len(w.journal.recs)
	if w.err != nil {
		return w.res, fmt.Errorf("seed %d: %w", cfg.Seed, w.err)
	}
	return w.res, nil
}

// rest removes the faults, ends the load and lets the operations under way finish.
func (w *world) rest() {
	if w.err != nil {
		return
	}
	w.calm = true
	for _, n := range w.nodes {
		n.paused, n.down = 0, min(n.down, w.Now+1)
		for j := range w.nodes {
			w.cut[n.i][j] = 0
		}
	}
	for _, c := range w.writers {
		c.stopping = true
	}
	for end := w.Now + 30_000; w.Now < end && w.step() && !w.truth.settled(); {
	}
	if w.err == nil {
		w.truth.atRest()
	}
}

// watch lets another owner take over from an owner that is gone.
func (w *world) watch() {
	w.after(150+w.rng.Int64N(150), nil, func() {
		w.watch()
		i := int(w.journal.term) % 2 // owners take turns: term t is of owner t-1 mod 2
		cur := w.owners[(i+1)%2]
		if gone := cur.paused > w.Now || cur.down > w.Now || !cur.active; gone || w.chance(60) {
			if next := w.owners[i]; next.paused <= w.Now && next.down <= w.Now {
				next.take()
			} else if !cur.active && cur.down <= w.Now && cur.paused <= w.Now {
				w.journal.term++ // the other one's turn is skipped
				cur.take()
			}
		}
	})
}

// faults makes something go wrong now and then.
func (w *world) faults() {
	w.after(10+w.rng.Int64N(120), nil, func() {
		if w.calm {
			return
		}
		s := w.servers[w.rng.IntN(len(w.servers))]
		r := w.rng.IntN(100)
		if w.cfg.Lonely && w.rng.IntN(2) == 0 {
			r = 90
		}
		switch {
		case r < 14:
			s.crash()
		case r < 20:
			s.kill()
		case r < 24:
			s.wipe()
		case r < 28:
			s.rot()
		case r < 40:
			w.pause(&s.node, w.rng.Int64N(300))
		case r < 50:
			w.pause(&w.writers[w.rng.IntN(len(w.writers))].node, w.rng.Int64N(2*sessionTTL))
		case r < 56:
			w.writers[w.rng.IntN(len(w.writers))].crash()
		case r < 60:
			w.pause(&w.owners[w.rng.IntN(2)].node, w.rng.Int64N(600))
		case r < 64:
			w.owners[w.rng.IntN(2)].crash()
		case r < 88:
			w.res.Cuts++
			a, b := w.nodes[w.rng.IntN(len(w.nodes))], s.i
			until := w.Now + w.rng.Int64N(500)
			w.cut[a.i][b] = until
			if w.rng.IntN(2) == 0 { // otherwise one way only
				w.cut[b][a.i] = until
			}
			w.trace("%s and %s are cut until %d", a.name, s.name, until)
		case r < 94: // cut all servers but one from the owners
			w.res.Cuts++
			until := w.Now + w.rng.Int64N(300)
			for _, x := range w.servers {
				for _, o := range w.owners {
					if x != s {
						w.cut[o.i][x.i], w.cut[x.i][o.i] = until, until
					}
				}
			}
			w.trace("owners reach only %s until %d", s.name, until)
			switch w.rng.IntN(4) { // and the remaining server was just unreachable
			case 0:
				s.crash()
				s.down = w.Now + w.rng.Int64N(20)
			case 1:
				s.wipe()
			}
		default: // cut one server from all others
			w.res.Cuts++
			until := w.Now + w.rng.Int64N(900)
			for i := range w.nodes {
				w.cut[i][s.i], w.cut[s.i][i] = until, until
			}
			w.trace("%s is cut off until %d", s.name, until)
		}
		w.faults()
	})
}

func (w *world) pause(n *node, d int64) {
	w.res.Pauses++
	w.trace("%s stands still for %d", n.name, d)
	n.paused = w.Now + d
}

// owner returns the owner that a client asks: mostly the present owner.
func (w *world) owner() *owner {
	o := w.owners[(int(w.journal.term)+1)%2]
	if w.chance(30) {
		o = w.owners[w.rng.IntN(2)]
	}
	return o
}

// reads reads chunks at the places that some node knew.
func (w *world) reads() {
	w.after(5+w.rng.Int64N(20), nil, func() {
		w.reads()
		if w.calm || len(w.journal.recs) == 0 {
			return
		}
		r := *w.journal.recs[w.rng.IntN(len(w.journal.recs))]
		if r.dropped || r.committed == 0 || len(r.Servers) == 0 {
			return
		}
		var known meta.Fence
		if r.State == meta.ChunkSealed {
			known = r.Fence
		}
		c := w.writers[w.rng.IntN(len(w.writers))]
		s := w.servers[int(r.Servers[w.rng.IntN(len(r.Servers))])-1]
		off := w.rng.Uint64N(r.committed)
		n := 1 + w.rng.Uint64N(r.committed-off)
		w.send(&c.node, &s.node, false, func() {
			if p, err := s.read(r.n, known, off, n); err == nil {
				w.res.Reads++
				w.truth.readBack(r.n, off, p)
			}
		})
	})
}
