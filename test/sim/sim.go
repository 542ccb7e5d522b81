// Package sim owns the simulation of the metadata protocol: owners of volumes, their
// sessions, the log that fences the owners, and the chunk servers. One goroutine runs the
// simulation from one random source and one queue of events. Clock, network and disks are
// simulated; the state machine is real (meta/namespace), and so are the log's entries and
// hashes (meta/journal). The same seed gives the same run; a hash over every event proves
// this.
//
// The owner here (owner.go) is the algorithm of meta/server without goroutines,
// connections and etcd: overlay, early replies, leases and recalls, group commit,
// recovery with replays, sealing. The rules that must hold are in truth.go, and are
// checked at every answer and every commit. Off switches mechanisms off: then a check
// must fail, or the check guards nothing.
package sim

import (
	"encoding/binary"
	"fmt"
	"hash"
	"hash/fnv"
	"math/rand/v2"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/test/sim/schedule"
)

// Times of the simulated world, in milliseconds.
const (
	ownerTTL   = 500            // an owner's lease at the log's store
	sessionTTL = 400            // a session's lease at its owner
	courtesy   = 8 * sessionTTL // until a late session ends whose leases nobody needs
	margin     = 8              // an eighth, by which a holder gives up early
	pollEvery  = 100            // how often servers look for volumes without an owner
	backAfter  = 30             // until a client with a broken connection dials again
)

// Off switches mechanisms off.
type Off struct {
	Fence       bool // the log takes entries from anyone, chunks take appends at any fence
	ReplayOrder bool // clients re-send early-answered operations in any order
	Wait        bool // other sessions see changes that are not durable
	Recall      bool // nothing is recalled
	OwnerLease  bool // owners answer after the end of their lease
	Courtesy    bool // a session ends with its lease, though nobody needs its leases
	Sync        bool // a crash of a chunk server loses synced bytes, too
}

// Config configures a run.
type Config struct {
	Seed    uint64
	Events  int // until the world is healed and must come to rest
	Servers int // default 2
	Clients int // default 3
	Volumes int // default 2
	Disks   int // default 2
	Calm    bool
	Off     Off
	// Log gets a line for every event.
	Log func(string)
}

// Result is the outcome of a run.
type Result struct {
	Hash                                       uint64
	Events, Commits, Takeovers, Replays        int
	Crashes, Pauses, Breaks, Seals, Operations int
	Expired, Checkpoints, Reads, Writes        int
	Snapshots, Shown, Rollbacks                int
}

// node is a process on a machine: a node can stand still and can end.
type node struct {
	name   string
	life   int   // grows with each crash: events of an earlier life are void
	paused int64 // until then nothing runs
	drift  int64 // of the node's clock, in thousandths
}

func (n *node) Condition() (life int, paused int64) { return n.life, n.paused }

// world is everything.
type world struct {
	schedule.Queue
	cfg   Config
	rng   *rand.Rand
	sum   hash.Hash64
	res   Result
	err   error
	calm  bool // no more faults
	truth *truth

	log     []*volumeLog // by volume-1
	servers []*server
	clients []*client
	disks   []*disk
}

// clock returns the time of a node's own clock, which drifts, and runs while the node
// stands still.
func (w *world) clock(n *node) int64 { return w.Now + w.Now*n.drift/1000 }

func (w *world) fail(format string, a ...any) {
	if w.err == nil {
		w.err = fmt.Errorf("at %d ms: "+format, append([]any{w.Now}, a...)...)
		w.trace("VIOLATION %v", w.err)
	}
}

func (w *world) trace(format string, a ...any) {
	line := fmt.Sprintf(format, a...)
	var b [8]byte
	binary.LittleEndian.PutUint64(b[:], uint64(w.Now))
	w.sum.Write(b[:])
	w.sum.Write([]byte(line))
	if w.cfg.Log != nil {
		w.cfg.Log(fmt.Sprintf("%6d %s", w.Now, line))
	}
}

// after runs do on a node in d milliseconds, unless the node's life ends first.
func (w *world) after(d int64, n *node, do func()) {
	if n == nil {
		w.At(w.Now+d, nil, do) // an untyped nil: a nil *node in the interface would be called
		return
	}
	w.At(w.Now+d, n, do)
}

// chance is true with probability p/1000, never when the world is calm.
func (w *world) chance(p int) bool { return !w.calm && w.rng.IntN(1000) < p }

func (w *world) delay() int64 {
	if w.chance(20) {
		return 20 + w.rng.Int64N(150)
	}
	return 1 + w.rng.Int64N(4)
}

// step runs one event. It returns false if no event is left.
func (w *world) step() bool {
	if w.err != nil {
		return false
	}
	e, ok := w.Next()
	if e == nil {
		return ok
	}
	w.res.Events++
	e.Do()
	return true
}

// newWorld makes a world before its first event.
func newWorld(cfg Config) *world {
	def := func(p *int, n int) {
		if *p == 0 {
			*p = n
		}
	}
	def(&cfg.Servers, 2)
	def(&cfg.Clients, 3)
	def(&cfg.Volumes, 2)
	def(&cfg.Disks, 2)
	def(&cfg.Events, 20_000)
	w := &world{cfg: cfg, rng: rand.New(rand.NewPCG(cfg.Seed, 0x5eed)), sum: fnv.New64a(), calm: cfg.Calm}
	w.truth = newTruth(w)
	for v := range cfg.Volumes {
		w.log = append(w.log, newVolumeLog(w, meta.VolumeID(v+1)))
	}
	for i := range cfg.Disks {
		w.disks = append(w.disks, newDisk(w, i))
	}
	for i := range cfg.Servers {
		w.servers = append(w.servers, newServer(w, i))
	}
	for i := range cfg.Clients {
		w.clients = append(w.clients, newClient(w, i))
	}
	return w
}

// Run runs a world with faults, removes the faults, lets the world come to rest and
// checks the final state.
func Run(cfg Config) (Result, error) {
	w := newWorld(cfg)
	for _, s := range w.servers {
		s.boot()
	}
	for _, c := range w.clients {
		c.boot()
	}
	w.faults()
	for w.res.Events < w.cfg.Events && w.step() {
	}
	w.rest()
	w.res.Hash = w.sum.Sum64()
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
	for _, n := range w.nodes() {
		n.paused = 0
	}
	for _, c := range w.clients {
		c.stopping = true
	}
	for end := w.Now + 12*sessionTTL + 4*ownerTTL; w.Now < end && w.step(); {
	}
	if w.err == nil {
		w.truth.atRest()
	}
}

func (w *world) nodes() (all []*node) {
	for _, s := range w.servers {
		all = append(all, &s.node)
	}
	for _, c := range w.clients {
		all = append(all, &c.node)
	}
	for _, d := range w.disks {
		all = append(all, &d.node)
	}
	return all
}

// faults makes something go wrong now and then.
func (w *world) faults() {
	w.after(40+w.rng.Int64N(260), nil, func() {
		if w.calm {
			return
		}
		switch r := w.rng.IntN(100); {
		case r < 25:
			w.breakOne()
		case r < 50:
			s := w.servers[w.rng.IntN(len(w.servers))]
			w.pause(&s.node, w.rng.Int64N(2*ownerTTL))
		case r < 60:
			w.servers[w.rng.IntN(len(w.servers))].crash()
		case r < 75:
			c := w.clients[w.rng.IntN(len(w.clients))]
			w.pause(&c.node, w.rng.Int64N(2*sessionTTL))
		case r < 82:
			w.clients[w.rng.IntN(len(w.clients))].crash()
		case r < 92:
			w.disks[w.rng.IntN(len(w.disks))].crash()
		default:
			d := w.disks[w.rng.IntN(len(w.disks))]
			w.pause(&d.node, w.rng.Int64N(100))
		}
		w.faults()
	})
}

func (w *world) pause(n *node, d int64) {
	w.res.Pauses++
	w.trace("%s stands still for %d", n.name, d)
	n.paused = w.Now + d
}

func (w *world) breakOne() {
	c := w.clients[w.rng.IntN(len(w.clients))]
	c.vols[w.rng.IntN(len(c.vols))].disconnect()
}
