package state

import (
	"sync"
	"time"

	"github.com/cockroachdb/pebble/v2"
)

// compactions grants Pebble the compactions of one store, as many at once as it
// allows itself, and none before something was flushed to it or must wait to be.
// Opening and closing wait for compactions that are under way, and a copy of a store
// has to do again what that had to do: a fresh clone, or a server that starts, would
// answer only after rewriting tables, and a clone that is only read would have them
// twice.
//
// Whatever lets more run pokes grant: one that ended, a flush, allow.
type compactions struct {
	db   pebble.DBForCompaction
	poke chan struct{}
	stop chan struct{}
	end  sync.Once
	loop sync.WaitGroup

	mu      sync.Mutex // under Pebble's
	allowed bool
	over    bool // unregistered
	running int
}

// grantEvery is how often is looked whether a compaction waits, unasked: that no
// event was missed is not for the life of a store.
const grantEvery = time.Second

func newCompactions() *compactions {
	return &compactions{poke: make(chan struct{}, 1), stop: make(chan struct{})}
}

// allow lets compactions run from now on. It may be called under Pebble's locks.
func (c *compactions) allow() {
	c.mu.Lock()
	c.allowed = !c.over
	c.mu.Unlock()
	c.UpdateGetAllowedWithoutPermission()
}

// Register is Pebble's, when it opens the store.
func (c *compactions) Register(_ int, db pebble.DBForCompaction) {
	c.db = db
	c.loop.Go(func() {
		t := time.NewTicker(grantEvery)
		defer t.Stop()
		for {
			select {
			case <-c.stop:
				return
			case <-c.poke:
			case <-t.C:
			}
			for c.grant() {
			}
		}
	})
}

// Unregister is Pebble's, when it closes the store, and for a store that could not
// be opened: Pebble is asked for nothing afterwards.
func (c *compactions) Unregister() {
	c.mu.Lock()
	c.allowed, c.over = false, true
	c.mu.Unlock()
	c.end.Do(func() { close(c.stop) })
	c.loop.Wait()
}

// TrySchedule takes a right to compact, if there is one. What gets none waits for
// grant.
func (c *compactions) TrySchedule() (bool, pebble.CompactionGrantHandle) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.allowed || c.running >= c.db.GetAllowedWithoutPermission() {
		return false, nil
	}
	c.running++
	return true, c
}

// grant starts a compaction that waits; it tells whether there was one.
func (c *compactions) grant() bool {
	ok, _ := c.TrySchedule()
	if !ok {
		return false
	}
	if waits, _ := c.db.GetWaitingCompaction(); waits && c.db.Schedule(c) {
		return true
	}
	c.mu.Lock()
	c.running--
	c.mu.Unlock()
	return false
}

// UpdateGetAllowedWithoutPermission: more may be allowed now.
func (c *compactions) UpdateGetAllowedWithoutPermission() {
	select {
	case c.poke <- struct{}{}:
	default:
	}
}

// Done gives a right back.
func (c *compactions) Done() {
	c.mu.Lock()
	c.running--
	c.mu.Unlock()
	c.UpdateGetAllowedWithoutPermission()
}

// Started, MeasureCPU and CumulativeStats are for schedulers that weigh.
func (c *compactions) Started() {}

// MeasureCPU does nothing.
func (c *compactions) MeasureCPU(pebble.CompactionGoroutineKind) {}

// CumulativeStats does nothing.
func (c *compactions) CumulativeStats(pebble.CompactionGrantHandleStats) {}

var _ pebble.CompactionScheduler = (*compactions)(nil)
var _ pebble.CompactionGrantHandle = (*compactions)(nil)
