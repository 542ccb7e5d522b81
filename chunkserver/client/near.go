package client

import (
	mathbits "math/bits"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"penstock.io/penstock/meta"
)

// Distances from the client to a server.
const (
	onHost = iota // the same machine
	// then one more for each level of the topology in which the two differ
	farAway = 1 << 10 // of unknown place
)

// distance returns how far away a server is. The operator's topology takes precedence over
// boot ids: containers and network name spaces of one machine have one boot id and may stand
// for different places.
func (c *Client) distance(info *meta.ServerInfo) int {
	away := apart(c.topology(), info.Topology)
	if c.cfg.HostID != "" && info.Host == c.cfg.HostID && (away == farAway || away == 1) {
		return onHost
	}
	return away
}

// besides reports whether a server with a network address also has a socket on this machine,
// through which it passes descriptors and memory. The socket may still be out of reach: a
// container has the machine's boot id, but not its paths.
func (c *Client) besides(info *meta.ServerInfo) bool {
	return info.Local != "" && info.Local != info.Addr && !strings.HasPrefix(info.Addr, "unix:") && c.cfg.HostID != "" && c.distance(info) == onHost
}

// localPause is how long an unusable socket is not tried again.
const localPause = 10 * time.Second

// mayLocal reports whether the socket is worth a try.
func (p *peer) mayLocal() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return !time.Now().Before(p.noLocal)
}

// near reports whether the server is, as far as known, reached over its socket on this
// machine.
func (p *peer) near() bool {
	info, ok := p.c.cfg.Resolve(p.id)
	return ok && p.c.besides(&info) && p.mayLocal()
}

// topology returns the client's configured location, or the location of a server on this
// machine.
func (c *Client) topology() string {
	if c.cfg.Topology != "" || c.cfg.Servers == nil || c.cfg.HostID == "" {
		return c.cfg.Topology
	}
	now := time.Now()
	if t := c.place.Load(); t != nil && now.Before(t.until) {
		return t.topology
	}
	t := &place{until: now.Add(placeFor)}
	for _, i := range c.cfg.Servers() {
		if i.Host == c.cfg.HostID && i.Topology != "" {
			t.topology = i.Topology
			break
		}
	}
	c.place.Store(t)
	return t.topology
}

// place is where we stand, as looked up some time ago.
type place struct {
	topology string
	until    time.Time
}

const placeFor = 2 * time.Second

// apart counts the levels of /dc/rack/node in which two places differ.
func apart(a, b string) int {
	if a == "" || b == "" {
		return farAway
	}
	x, y := strings.Split(strings.Trim(a, "/"), "/"), strings.Split(strings.Trim(b, "/"), "/")
	same := 0
	for same < min(len(x), len(y)) && x[same] == y[same] {
		same++
	}
	return 1 + max(len(x), len(y)) - same
}

// busy counts the reads under way at a server.
func (p *peer) busy() (n int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, use := range []int{forOthers, forOthers + plain} {
		for _, l := range p.pools[use] {
			n += int(l.users.Load())
		}
	}
	return n
}

// ---- hedging

// latency records the duration of reads by class of size, and allows a bounded share of reads
// to ask a second replica when the first takes longer than nearly all reads do.
type latency struct {
	mu      sync.Mutex
	classes [4]histogram
	tokens  float64

	hedged, won atomic.Uint64
}

// histogram counts durations by powers of two of 16 us. Counts are halved from time to time,
// so that the past fades.
type histogram struct {
	n    uint32
	bins [20]uint32
}

const (
	hedgeShare = 0.05 // extra requests, of all
	hedgeBurst = 8
	hedgeLeast = 2 * time.Millisecond
	hedgeMost  = 500 * time.Millisecond
	hedgeFirst = 50 * time.Millisecond // before anything is known
	fadeEvery  = 1024
)

func sizeClass(n int) int {
	switch {
	case n <= 16<<10:
		return 0
	case n <= 128<<10:
		return 1
	case n <= 512<<10:
		return 2
	}
	return 3
}

func (l *latency) took(n int, d time.Duration) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.tokens = min(l.tokens+hedgeShare, hedgeBurst)
	h := &l.classes[sizeClass(n)]
	i := min(mathbits.Len64(uint64(d/(16*time.Microsecond))), len(h.bins)-1)
	h.bins[i]++
	if h.n++; h.n >= fadeEvery {
		h.n = 0
		for i := range h.bins {
			h.bins[i] /= 2
			h.n += h.bins[i]
		}
	}
}

// patience returns how long a read of n bytes waits before it asks another replica: the 99th
// percentile of recent reads, rounded up.
func (l *latency) patience(n int) time.Duration {
	l.mu.Lock()
	defer l.mu.Unlock()
	h := &l.classes[sizeClass(n)]
	if h.n < 100 {
		return hedgeFirst
	}
	left := h.n / 100
	for i := len(h.bins) - 1; i >= 0; i-- {
		if h.bins[i] > left {
			return min(max(16*time.Microsecond<<i, hedgeLeast), hedgeMost)
		}
		left -= h.bins[i]
	}
	return hedgeFirst
}

// may takes a token for a further request, if any.
func (l *latency) may() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.tokens < 1 {
		return false
	}
	l.tokens--
	return true
}

// Hedged returns how many reads asked a second replica because the first took long, and in how
// many of these the second answered first.
func (c *Client) Hedged() (asked, won uint64) { return c.lat.hedged.Load(), c.lat.won.Load() }
