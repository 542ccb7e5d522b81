package process

import (
	"sync"
	"sync/atomic"
	"time"
)

// Recent is Uptime for those who ask it for every name that a mount answers from
// memory: a system call each would be a tenth of the mount's processor time.
//
// The two clocks of the kernel differ by how long the machine was suspended, and the
// one that stands still then costs no system call. So it is asked, and the difference
// believed for keepDifference: Recent is behind by a suspension that began and ended
// within that time, of which going to sleep and waking up alone take many times as
// much.
func Recent() time.Duration { return recent.now() }

// keepDifference is how long the difference of the clocks is believed, on the one that
// stands still with the machine: as long as two or three requests of a mount take.
const keepDifference = 100 * time.Microsecond

var (
	started = time.Now()
	recent  = clocks{running: func() time.Duration { return time.Since(started) }, uptime: Uptime}
)

// clocks reads two clocks that run alike while the machine does.
type clocks struct {
	running func() time.Duration // stands still while the machine is suspended
	uptime  func() time.Duration // goes on

	reads sync.Mutex // who reads both holds it; nobody waits for it
	// What uptime was ahead, and when on the clock running it was found. INVARIANT:
	// ahead is written first, so whoever sees the one sees the other, or a later one.
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
	now = c.running() // first: then what is between the two makes leases shorter
	up := c.uptime()
	c.ahead.Store(int64(up - now))
	c.at.Store(int64(now))
	return up
}
