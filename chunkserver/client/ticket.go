package client

import (
	"context"
	"crypto/rand"
	"errors"
	"net"
	"strings"
	"time"

	"penstock.io/penstock/chunkserver/wire"
	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/capability"
	peering "penstock.io/penstock/meta/peer"
)

// Plain connections for bulk bytes, where a volume allows them: see wire/mac.go.

// ticket opens plain connections to one server.
type ticket struct {
	bytes, secret []byte
	until         time.Time
}

// ticketMargin is the least remaining lifetime of a usable ticket.
const ticketMargin = 10 * time.Second

// pool returns the pool for a request with this capability: plain connections where the volume
// allows them and the alternative is TLS.
func (c *Client) pool(use int, token []byte) int {
	if c.cfg.Creds == nil || c.cfg.Creds.IsInsecure() || capability.RightsOf(token)&capability.Plain == 0 {
		return use
	}
	return use + plain
}

// ticketed reports whether a pool's connections to a server are plain ones.
func ticketed(info meta.ServerInfo, pool int) bool {
	return pool >= plain && !strings.HasPrefix(info.Addr, "unix:")
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

// reach connects to a server.
func (p *peer) reach(ctx context.Context, info meta.ServerInfo, pool int) (net.Conn, error) {
	if ticketed(info, pool) {
		return peering.DialPlain(ctx, info.Addr)
	}
	if info.Addr == info.Local {
		return peering.DialLocal(ctx, info.Local)
	}
	return peering.Dial(ctx, info.Addr, p.c.cfg.Creds, peering.ChunkServer)
}

// hello is the first exchange on a connection. On a plain connection it shows the ticket, and
// from then on both sides authenticate every frame.
func (l *link) hello(info meta.ServerInfo, pool int) (wire.Answer, error) {
	q := wire.Request{Speaks: wire.Version, Name: l.p.c.cfg.Name}
	if !ticketed(info, pool) {
		return l.exchange(wire.Hello, q.AppendFrame(nil, wire.Hello, 0, 1, 0, 0), -1)
	}
	l.p.mu.Lock()
	t := l.p.ticket
	l.p.mu.Unlock()
	ours := make([]byte, wire.NonceSize)
	rand.Read(ours)
	q.Cap = append(append([]byte(nil), t.bytes...), ours...)
	a, err := l.exchange(wire.Hello, q.AppendFrame(nil, wire.Hello, wire.FlagTicket, 1, 0, 0), -1)
	switch {
	case err != nil:
		return a, err
	case a.Kind != meta.KindOK:
		if a.Kind == meta.BadCapability {
			l.p.mu.Lock()
			l.p.ticket = ticket{} // the server was started again: the next try gets another
			l.p.mu.Unlock()
		}
		return a, nil
	case len(a.Ticket) != wire.NonceSize:
		return a, meta.E("hello", meta.Protocol, info.Addr, errors.New("the server took no notice of the ticket"))
	}
	l.Protect(t.secret, ours, a.Ticket)
	return a, nil
}
