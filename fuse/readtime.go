package fuse

import (
	"sync"
	"time"
)

// ReadTimes tells how long programs waited for bytes: READ requests, of what the
// kernel did not have in its page cache. Read-ahead is in it, for which a program
// may not have waited yet.
type ReadTimes struct {
	// Buckets counts READs that took at most so many of ReadBounds, as a histogram
	// of Prometheus does; longer ones are in Count alone.
	Buckets [len(ReadBounds)]uint64
	Count   uint64
	// Sum is what all took together; Waiting is the time in which at least one was
	// asked for and not answered: never more than went by, so its share of that is
	// an upper bound for how long a program that reads stood still.
	Sum, Waiting time.Duration
}

// ReadBounds are the bounds of ReadTimes.Buckets.
var ReadBounds = [...]time.Duration{
	100 * time.Microsecond, 300 * time.Microsecond, time.Millisecond, 3 * time.Millisecond, 10 * time.Millisecond, 30 * time.Millisecond,
	100 * time.Millisecond, 300 * time.Millisecond, time.Second, 3 * time.Second, 10 * time.Second,
}

// readClock measures READs.
type readClock struct {
	mu      sync.Mutex
	times   ReadTimes
	running int
	since   time.Time // when the first of those that run began
}

func (c *readClock) begin(now time.Time) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.running == 0 {
		c.since = now
	}
	c.running++
}

func (c *readClock) end(began, now time.Time) {
	took := now.Sub(began)
	c.mu.Lock()
	defer c.mu.Unlock()
	c.running--
	if c.running == 0 {
		c.times.Waiting += now.Sub(c.since)
	}
	c.times.Count++
	c.times.Sum += took
	for i, bound := range ReadBounds {
		if took <= bound {
			c.times.Buckets[i]++
		}
	}
}

func (c *readClock) read(now time.Time) ReadTimes {
	c.mu.Lock()
	defer c.mu.Unlock()
	t := c.times
	if c.running > 0 {
		t.Waiting += now.Sub(c.since)
	}
	return t
}

// ReadTimes tells how long READs took since this process serves the mount.
func (m *Mount) ReadTimes() ReadTimes { return m.fs.conn.reads.read(time.Now()) }
