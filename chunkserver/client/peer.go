package client

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"penstock.io/penstock/chunkserver/wire"
	"penstock.io/penstock/meta"
)

// peer is one chunk server.
type peer struct {
	c  *Client
	id meta.ServerID

	dialing sync.Mutex // held while connecting: one attempt at a time; taken before mu
	mu      sync.Mutex
	addr    string
	// pools are the connections for the two uses, appends (whose bytes would delay small
	// requests of others) and everything else, with TLS and plain.
	pools   [4][]*link
	ticket  ticket    // for plain connections
	noLocal time.Time // this client may not use the server's local socket; not tried again before this time
	down    time.Time // connecting failed, or the server fell silent; not tried again before this time
	downErr error
	pause   time.Duration // pause after the next failure
	away    time.Time     // since when the server is unreachable; zero: reachable, or never tried
	missed  time.Time     // the last time that the server was unreachable
}

func (c *Client) peer(id meta.ServerID) *peer {
	c.mu.Lock()
	defer c.mu.Unlock()
	p := c.peers[id]
	if p == nil {
		p = &peer{c: c, id: id}
		c.peers[id] = p
	}
	return p
}

// link returns the least busy connection of a pool, and makes one if all are busy and the
// bound allows.
func (p *peer) link(ctx context.Context, pool int) (*link, error) {
	near := p.near()
	if near {
		pool %= plain // there the kernel sends and receives without encryption
	}
	if l := p.idle(pool, near, false); l != nil {
		return l, nil
	}
	if pool >= plain {
		if err := p.holdTicket(ctx); err != nil {
			return nil, err
		}
	}
	p.dialing.Lock()
	defer p.dialing.Unlock()
	if l := p.idle(pool, near, false); l != nil {
		return l, nil
	}
	l, err := p.dial(ctx, pool)
	if err != nil {
		if l := p.idle(pool, false, true); l != nil {
			return l, nil
		}
		return nil, err
	}
	return l, nil
}

// idle returns an existing connection: with near, only a connection within this machine; with
// any, also a busy connection.
func (p *peer) idle(pool int, near, any bool) *link {
	p.mu.Lock()
	defer p.mu.Unlock()
	var best *link
	n := 0
	for _, l := range p.pools[pool] {
		if near && !l.Local() {
			continue
		}
		n++
		if best == nil || l.users.Load() < best.users.Load() {
			best = l
		}
	}
	if best != nil && (any || best.users.Load() == 0 || n >= p.c.cfg.Conns) {
		best.users.Add(1)
		return best
	}
	return nil
}

// dial connects and greets.
func (p *peer) dial(ctx context.Context, pool int) (*link, error) {
	const op = "connect to chunk server"
	c := p.c
	subject := fmt.Sprint(uint64(p.id))
	info, ok := c.cfg.Resolve(p.id)
	if !ok {
		p.mu.Lock()
		p.missedLocked()
		p.mu.Unlock()
		return nil, meta.E(op, meta.Unavailable, subject, errors.New("the metadata servers have not announced a chunk server with this number"))
	}
	p.mu.Lock()
	wait, werr := p.addr == info.Addr && time.Now().Before(p.down), p.downErr
	p.addr = info.Addr
	p.mu.Unlock()
	if wait {
		return nil, werr
	}
	var l *link
	var err error
	if p.c.besides(&info) && p.mayLocal() {
		there := info
		there.Addr = info.Local
		if l, err = p.connect(ctx, there, pool); err != nil {
			p.mu.Lock()
			p.noLocal = time.Now().Add(localPause)
			p.mu.Unlock()
			c.slog.Debug("a chunk server of this machine is reached as if it were elsewhere", "server", uint64(p.id), "socket", info.Local, "err", err)
			if l := p.idle(pool, false, false); l != nil {
				return l, nil
			}
		}
	}
	if l == nil {
		l, err = p.connect(ctx, info, pool)
	}
	if err != nil {
		if meta.KindOf(err) != meta.Version {
			err = meta.E(op, meta.Unavailable, subject+" at "+info.Addr, err)
		}
		if ctx.Err() == nil {
			p.mu.Lock()
			p.failedLocked(err)
			p.mu.Unlock()
		}
		return nil, err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		l.Close()
		return nil, meta.E(op, meta.Canceled, subject, nil)
	}
	l.users.Add(1)
	p.mu.Lock()
	p.pools[pool] = append(p.pools[pool], l)
	p.pause, p.away = 0, time.Time{}
	p.mu.Unlock()
	c.wg.Go(l.read)
	return l, nil
}

// failedLocked leaves the server alone for a while, longer each time.
func (p *peer) failedLocked(err error) {
	p.pause = min(max(2*p.pause, 200*time.Millisecond), 5*time.Second)
	p.down, p.downErr = time.Now().Add(p.pause), err
	p.missedLocked()
}

func (p *peer) missedLocked() {
	now := time.Now()
	if p.away.IsZero() || now.Sub(p.missed) > missedLong {
		p.away = now
	}
	p.missed = now
}

// Awaited reports whether an unreadable replica may become readable in a moment: one of the
// servers has been away for less than Patience.
func (c *Client) Awaited(servers []meta.ServerID) bool {
	for _, id := range servers {
		p := c.peer(id)
		p.mu.Lock()
		away := p.away
		p.mu.Unlock()
		if time.Since(away) < Patience {
			return true
		}
	}
	return false
}

// suspect reports that the last contact with the server failed.
func (p *peer) suspect() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.pause > 0
}

func (p *peer) connect(ctx context.Context, info meta.ServerInfo, pool int) (*link, error) {
	ctx, cancel := context.WithTimeout(ctx, p.c.cfg.Timeout)
	defer cancel()
	nc, err := p.reach(ctx, info, pool)
	if err != nil {
		return nil, err
	}
	w, err := wire.NewConn(nc, p.c.cfg.Congestion)
	if err != nil {
		nc.Close()
		return nil, err
	}
	l := &link{Conn: w, p: p, appends: pool%plain == forAppends, pending: map[uint64]*call{}, hurry: make(chan struct{}, 1)}
	deadline, _ := ctx.Deadline()
	_ = nc.SetDeadline(deadline)
	if err := l.greet(info, pool); err != nil {
		nc.Close()
		return nil, err
	}
	_ = nc.SetDeadline(time.Time{})
	if pool%plain == forAppends {
		l.Block()
	}
	return l, nil
}

// has reports whether a connection belongs to a pool and, as far as known, works.
func (p *peer) has(l *link, pool int) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return slices.Contains(p.pools[pool], l)
}

func (p *peer) drop(l *link) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for i := range p.pools {
		for j, m := range p.pools[i] {
			if m == l {
				p.pools[i] = append(p.pools[i][:j:j], p.pools[i][j+1:]...)
				return
			}
		}
	}
}

// holdTicket gets a ticket that is valid for a while. The caller does not hold p.dialing:
// getting a ticket may need a connection with TLS.
func (p *peer) holdTicket(ctx context.Context) error {
	info, ok := p.c.cfg.Resolve(p.id)
	if !ok || !ticketed(info, plain) {
		return nil // dialling will say so
	}
	p.mu.Lock()
	have := time.Now().Before(p.ticket.until)
	p.mu.Unlock()
	if have {
		return nil
	}
	l, err := p.link(ctx, forOthers)
	if err != nil {
		return err
	}
	defer l.release()
	k := &call{t: wire.Ticket}
	asked := time.Now()
	if err := l.do(ctx, &wire.Request{}, k, 0); err != nil {
		return err
	}
	p.mu.Lock()
	p.ticket = ticket{k.answer.Ticket, k.answer.Secret, asked.Add(time.Duration(k.answer.TTL)*time.Second - ticketMargin)}
	p.mu.Unlock()
	return nil
}

// watch finds connections that fell silent with requests under way. It asks for a sign of
// life, and closes connections without a sign of life in time: other requests to the server
// are most likely lost, too.
func (l *link) watch(now time.Time, limit time.Duration) {
	l.mu.Lock()
	busy, asked := (len(l.pending) > 0 || l.coming.Load()) && l.err == nil, l.asked
	l.mu.Unlock()
	if n := l.Received(); n != l.seen {
		// The data of one answer may take longer than the limit to arrive.
		l.seen = n
		l.heard.Store(max(l.heard.Load(), now.UnixNano()))
	}
	if !busy {
		return
	}
	heard := time.Unix(0, l.heard.Load())
	silent := now.Sub(heard)
	switch {
	case silent > limit:
		err := fmt.Errorf("no sign of life for %v", silent.Round(time.Millisecond))
		p := l.p
		p.mu.Lock()
		p.failedLocked(meta.E("connect to chunk server", meta.Unavailable, fmt.Sprint(uint64(p.id)), err))
		var others []*link
		for _, pool := range p.pools {
			for _, m := range pool {
				if m != l && m.heard.Load() <= heard.UnixNano() {
					others = append(others, m)
				}
			}
		}
		p.mu.Unlock()
		for _, m := range append(others, l) {
			m.fail(err)
		}
	case now.Sub(asked) > stuckAfter*limit && l.appends:
		l.fail(fmt.Errorf("nothing was answered for %v", now.Sub(asked).Round(time.Millisecond)))
	case silent > limit/4:
		if id, err := l.start(&call{t: wire.Ping, notify: func(*wire.Answer, error) {}}); err == nil {
			q := wire.Request{}
			// In its own goroutine: the connection may accept no more bytes.
			l.p.c.wg.Go(func() { _ = l.Send(q.AppendFrame(nil, wire.Ping, 0, id, 0, 0), nil) })
		}
	}
}
