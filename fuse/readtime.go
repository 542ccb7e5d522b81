package fuse

import (
	"sync"
	"time"
)

// ReadTimes measures how long programs waited for bytes: the READ requests for bytes missing
// in the kernel's page cache. ReadTimes includes read-ahead, although a program may not have
// waited yet.
type ReadTimes struct {
	// Buckets counts by bound the READs that took at most the bound in ReadBounds, as a
	// Prometheus histogram does. Only Count includes longer READs.
	Buckets [len(ReadBounds)]uint64
	Count   uint64
	// Sum is the total duration of all READs. Waiting is the time with at least one unanswered
	// READ, never more than the elapsed time; so Waiting divided by the elapsed time is an
	// upper bound for the share of time in which a reading program stood still.
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
	since   time.Time // begin of the current period with running READs
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

// ReadTimes returns the times of the READs answered by this process.
func (m *Mount) ReadTimes() ReadTimes { return m.fs.conn.reads.read(time.Now()) }
