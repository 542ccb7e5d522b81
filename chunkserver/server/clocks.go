package server

import (
	"sync"
	"sync/atomic"
	"time"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/process"
)

// clocks computes the time by which the chunk server judges capabilities: the time of the
// metadata servers, which sign capabilities. The machine's own clock may be minutes off, and a
// capability is valid for less than a minute. The answer to each report has a metadata
// server's time, read after the report was sent and before the answer arrived. Between
// answers, the computed time advances with the machine's time since boot, which steps of the
// machine's clock do not change.
//
// A capability does not name the signing metadata server, so the slowest of the metadata
// servers' clocks decides: a capability never ends earlier than the signer meant. While the
// clocks agree, the capability ends no later either. If the clocks differ, the capability may
// end later by the difference, at most meta.ClockSkew: a clock further behind the fastest
// counts as meta.ClockSkew behind. The zero value has no clock.
type clocks struct {
	own     func() time.Time // nil: this machine's clock
	alone   bool             // positive control: only this machine's clock decides
	mu      sync.Mutex
	latest  time.Duration // when a clock was last heard of, on process.Uptime
	servers map[string]clockHeard

	read atomic.Pointer[clockRead]
}

// clockHeard is a metadata server's clock: bounds of its lead over the time since boot.
type clockHeard struct {
	least, most time.Duration
	at          time.Duration // on process.Uptime
}

// clockRead is a result of now, and the time of the call.
type clockRead struct {
	at  time.Time
	now meta.Time
}

const (
	// clockKept is how long the clock of a silent metadata server counts while others are
	// heard. While none is heard, the clocks that counted last continue to count.
	clockKept = time.Minute
	// clockSlack bounds for how long an answer is assumed to have travelled. On overloaded
	// machines the whole time may be most of a capability's life. The next quick answer
	// tells the time more exactly.
	clockSlack = 2 * time.Second
	// clockReads is how long now derives results from its last computed result.
	clockReads = 20 * time.Millisecond
)

// heard records a metadata server's time. asked is the time of the request, as time since
// boot.
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
	// The answer to a slow request gives wide bounds; the intersection with earlier bounds may
	// be narrower. The bounds are disjoint if a clock was set.
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

// now returns the time by the metadata servers' clocks; before the first answer, by this
// machine's clock.
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

// machine returns the time of this machine's clock.
func (c *clocks) machine() time.Time {
	if c.own != nil {
		return c.own()
	}
	return time.Now()
}

// Clock returns the time of this machine's clock. Reports carry the time to the metadata
// servers.
func (s *Server) Clock() meta.Time { return meta.Time(s.clocks.machine().UnixNano()) }

// HeardClock records the time of a metadata server's clock, by which capabilities are judged.
// asked is the time of the request to that server, as time since boot (process.Uptime).
func (s *Server) HeardClock(server string, asked time.Duration, theirs meta.Time) {
	s.clocks.heard(server, asked, theirs)
}
