package state

import (
	"sync"
	"time"

	"github.com/cockroachdb/pebble/v2"
)

// compactions grants Pebble the compactions of one store, as many at once as Pebble allows,
// but none before the first flush, or before a write must wait for one. Opening and closing a
// store wait for running compactions, and a copy of a store must repeat the compactions of the
// original: a new clone, or a starting server, would answer only after rewriting tables, and a
// read-only clone would have its tables twice.
//
// Every event that admits more compactions calls grant: the end of a compaction, a flush,
// allow.
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

// grantEvery is the interval of additional calls of grant: a missed event must not stop a
// store's compactions for ever.
const grantEvery = time.Second

func newCompactions() *compactions {
	return &compactions{poke: make(chan struct{}, 1), stop: make(chan struct{})}
}

// allow admits compactions from now on. It may be called under Pebble's locks.
func (c *compactions) allow() {
	c.mu.Lock()
	c.allowed = !c.over
	c.mu.Unlock()
	c.UpdateGetAllowedWithoutPermission()
}

// Register is called by Pebble when it opens the store.
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

// Unregister is called by Pebble when it closes the store, and for a store that could not be
// opened. Afterwards compactions makes no calls of Pebble.
func (c *compactions) Unregister() {
	c.mu.Lock()
	c.allowed, c.over = false, true
	c.mu.Unlock()
	c.end.Do(func() { close(c.stop) })
	c.loop.Wait()
}

// TrySchedule takes the right to compact, if there is one. Otherwise the compaction waits for
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

// grant starts a waiting compaction, and reports whether there was one.
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
