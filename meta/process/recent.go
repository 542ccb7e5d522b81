package process

import (
	"sync"
	"sync/atomic"
	"time"
)

// Recent is a cheap Uptime, for callers that need the time for every name that a mount
// answers from memory: a system call for each would be a tenth of the mount's processor
// time.
//
// The kernel has two clocks, whose difference is the time for which the machine was
// suspended. Reading the clock that stops with the machine needs no system call. So
// Recent reads this clock, and uses a known difference for keepDifference. Recent is late
// only by a suspension that began and ended within keepDifference, and going to sleep and
// waking up take many times as long.
func Recent() time.Duration { return recent.now() }

// keepDifference is the time for which a difference of the clocks is used, on the clock
// that stops with the machine: as long as two or three requests of a mount take.
const keepDifference = 100 * time.Microsecond

var (
	started = time.Now()
	recent  = clocks{running: func() time.Duration { return time.Since(started) }, uptime: Uptime}
)

// clocks reads two clocks that run alike while the machine runs.
type clocks struct {
	running func() time.Duration // stands still while the machine is suspended
	uptime  func() time.Duration // goes on

	reads sync.Mutex // held while both clocks are read; no caller waits for the lock
	// The difference of uptime and running, and the time on the clock running at which it
	// was found. INVARIANT: ahead is written before at, so a reader of at sees the ahead
	// of that time or a later one.
	ahead, at atomic.Int64
}

func (c *clocks) now() time.Duration {
	at := time.Duration(c.at.Load())
	now := c.running()
	if at != 0 && now-at < keepDifference {
		return now + time.Duration(c.ahead.Load())
	}
	if !c.reads.TryLock() {
		return c.uptime()
	}
	defer c.reads.Unlock()
	now = c.running() // first: the time between the two reads then shortens leases
	up := c.uptime()
	c.ahead.Store(int64(up - now))
	c.at.Store(int64(now))
	return up
}
