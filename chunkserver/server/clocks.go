package server

import (
	"sync"
	"sync/atomic"
	"time"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/process"
)

// clocks tells the time that capabilities are judged by: the metadata servers',
// since those sign. This machine's clock may be minutes off, and capabilities hold
// for less than one. Each report brings a metadata server's time, which was read
// between the sending of the report and the answer's arrival; in between this
// machine's time since boot goes on, which no step of its clock changes.
//
// A capability does not say which metadata server signed it, so that the slowest
// clock decides: whoever signed, it holds for no less than it was given. With clocks
// that are right it holds for no more. Where the metadata servers' own clocks differ,
// it may hold for longer by that, up to meta.ClockSkew: the fastest one less that is
// the least that is believed. The zero value has heard nobody.
type clocks struct {
	own     func() time.Time // nil: this machine's clock
	alone   bool             // positive control: it alone decides
	mu      sync.Mutex
	latest  time.Duration // when a clock was last heard of, on process.Uptime
	servers map[string]clockHeard

	read atomic.Pointer[clockRead]
}

// clockHeard is a metadata server's clock: by how much it is ahead of the time since
// boot, at least and at most.
type clockHeard struct {
	least, most time.Duration
	at          time.Duration // on process.Uptime
}

// clockRead is what now told, when.
type clockRead struct {
	at  time.Time
	now meta.Time
}

const (
	// clockKept is how long a clock counts that is heard of no more, while others are.
	// If none is, all count that did at the end.
	clockKept = time.Minute
	// clockSlack bounds what an answer that travelled for long is taken to be late: where
	// machines are overloaded that may be most of a capability's life. The next quick answer
	// says more.
	clockSlack = 2 * time.Second
	// clockReads is how long now is told by the cheap clock since it was last made out.
	clockReads = 20 * time.Millisecond
)

// heard takes in a metadata server's time, which it was asked for at a time since boot.
func (c *clocks) heard(server string, asked time.Duration, theirs meta.Time) {
	c.heardAt(server, asked, process.Uptime(), theirs)
}

func (c *clocks) heardAt(server string, asked, answered time.Duration, theirs meta.Time) {
	if theirs == 0 || asked > answered {
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	n := clockHeard{least: time.Duration(theirs) - answered, most: time.Duration(theirs) - asked, at: answered}
	// Answers that took long say little; together with those before they may say more.
	// They contradict each other when a clock was set.
	if o, ok := c.servers[server]; ok && o.least <= n.most && n.least <= o.most {
		n.least, n.most = max(n.least, o.least), min(n.most, o.most)
	}
	if c.servers == nil {
		c.servers = map[string]clockHeard{}
	}
	c.servers[server] = n
	c.latest = max(c.latest, answered)
	for name, o := range c.servers {
		if c.latest-o.at > clockKept {
			delete(c.servers, name)
		}
	}
	c.read.Store(nil)
}

// now is the time by the metadata servers' clocks; before any was heard of, by this
// machine's.
func (c *clocks) now() meta.Time {
	if r := c.read.Load(); r != nil {
		if since := time.Since(r.at); since < clockReads {
			return r.now + meta.Time(since)
		}
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	at, up := time.Now(), process.Uptime()
	now := c.nowAt(up)
	c.read.Store(&clockRead{at: at, now: now})
	return now
}

// nowAt is now at a time since boot. The caller holds mu.
func (c *clocks) nowAt(up time.Duration) meta.Time {
	if len(c.servers) == 0 || c.alone {
		return meta.Time(c.machine().UnixNano())
	}
	first := true
	var slowest, fastest time.Duration
	for _, o := range c.servers {
		ahead := min(o.most, o.least+clockSlack)
		if first {
			slowest, fastest, first = ahead, ahead, false
		}
		slowest, fastest = min(slowest, ahead), max(fastest, ahead)
	}
	return meta.Time(up + max(slowest, fastest-meta.ClockSkew))
}

// machine is the time on this machine's clock.
func (c *clocks) machine() time.Time {
	if c.own != nil {
		return c.own()
	}
	return time.Now()
}

// Clock is this machine's time: what reports tell.
func (s *Server) Clock() meta.Time { return meta.Time(s.clocks.machine().UnixNano()) }

// HeardClock takes in the time on a metadata server's clock, which it was asked for at
// a time since boot (process.Uptime): capabilities are judged by it.
func (s *Server) HeardClock(server string, asked time.Duration, theirs meta.Time) {
	s.clocks.heard(server, asked, theirs)
}
