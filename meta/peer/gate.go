package peer

import (
	"container/list"
	"log/slog"
	"net"
	"net/netip"
	"sync"
	"time"
)

// Bounds of connections with unidentified peers.
const (
	gatePerAddr = 128
	gateAll     = 2048
	// firstByteWait bounds the silence of a new connection. A client sends its first byte at
	// once; the handshake then has handshakeWait.
	firstByteWait = 5 * time.Second
)

// Gate bounds a server's connections with unidentified peers, for each address and in all.
// Gate refuses no connection: beyond a bound, Gate closes the oldest connection of the address
// with the most connections. A peer with a certificate identifies itself within milliseconds,
// and until then its connection is among the newest. The zero value is ready for use.
type Gate struct {
	mu    sync.Mutex
	by    map[netip.Prefix]*list.List // of net.Conn, the oldest first
	in    map[net.Conn]gated
	perIP int // 0: gatePerAddr
	all   int // 0: gateAll
}

type gated struct {
	at netip.Prefix
	el *list.Element
}

// Enter counts a connection, and may close another connection. Enter ignores Unix sockets of
// this machine: the kernel identifies their peers.
func (g *Gate) Enter(nc net.Conn) {
	at, ok := addressOf(nc)
	if !ok {
		return
	}
	g.mu.Lock()
	if g.in == nil {
		g.by, g.in = make(map[netip.Prefix]*list.List), make(map[net.Conn]gated)
	}
	l := g.by[at]
	if l == nil {
		l = list.New()
		g.by[at] = l
	}
	g.in[nc] = gated{at, l.PushBack(nc)}
	perIP, all := g.perIP, g.all
	if perIP == 0 {
		perIP, all = gatePerAddr, gateAll
	}
	var out net.Conn
	switch {
	case l.Len() > perIP:
		out = l.Front().Value.(net.Conn)
	case len(g.in) > all:
		for _, other := range g.by {
			if other.Len() > l.Len() {
				l = other
			}
		}
		out = l.Front().Value.(net.Conn)
	}
	if out != nil {
		g.leave(out)
	}
	g.mu.Unlock()
	if out != nil {
		out.Close()
	}
}

// Leave ends the count of an identified or closed connection. A repeated Leave has no effect.
func (g *Gate) Leave(nc net.Conn) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.leave(nc)
}

func (g *Gate) leave(nc net.Conn) {
	c, ok := g.in[nc]
	if !ok {
		return
	}
	delete(g.in, nc)
	l := g.by[c.at]
	if l.Remove(c.el); l.Len() == 0 {
		delete(g.by, c.at)
	}
}

// addressOf returns the remote address of a connection or, for IPv6, the address's /64
// network, which a provider gives to one site. ok is false for a Unix socket.
func addressOf(nc net.Conn) (netip.Prefix, bool) {
	a, ok := nc.RemoteAddr().(*net.TCPAddr)
	if !ok {
		return netip.Prefix{}, false
	}
	ip, ok := netip.AddrFromSlice(a.IP)
	if !ok {
		return netip.Prefix{}, false
	}
	bits := 64
	if ip = ip.Unmap(); ip.Is4() {
		bits = 32
	}
	p, err := ip.Prefix(bits)
	return p, err == nil
}

// Refusals logs some refused connections, and counts the others, because the peers determine
// the number of refusals. The zero value is ready for use.
type Refusals struct {
	mu     sync.Mutex
	since  time.Time
	said   int
	unsaid uint64
}

// In each refusalEvery refusalLines are said.
const (
	refusalEvery = time.Minute
	refusalLines = 10
)

// Warn logs or counts a refusal.
func (r *Refusals) Warn(log *slog.Logger, msg string, args ...any) {
	r.mu.Lock()
	now := time.Now()
	if now.Sub(r.since) >= refusalEvery {
		r.since, r.said = now, 0
	}
	if r.said >= refusalLines {
		r.unsaid++
		r.mu.Unlock()
		return
	}
	r.said++
	unsaid := r.unsaid
	r.unsaid = 0
	r.mu.Unlock()
	if unsaid > 0 {
		args = append(args, "refusals since the last line", unsaid)
	}
	log.Warn(msg, args...)
}
