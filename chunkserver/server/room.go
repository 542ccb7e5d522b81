package server

import (
	"context"

	"golang.org/x/sync/semaphore"

	"penstock.io/penstock/chunkserver/wire"
	"penstock.io/penstock/meta"
)

// A client may request many reads at once and take its time with the answers, or never take
// the answers. The bytes of answers in this server's memory are bounded, for each connection
// and for all connections of an identity together; further answers wait before their bytes are
// read from disk, and are never refused. The second bound is many times the first, so that a
// stopped client does not stop other clients of the same identity. Connections without a
// certificate (this machine's administrator, --insecure) have the first bound only: many
// clients may share the missing identity.
const (
	answersConn = 4 * wire.MaxData
	answersPeer = 64 * wire.MaxData
)

// share is the common bound of the connections of one identity.
type share struct {
	room  *semaphore.Weighted
	conns int // guarded by Server.mu
}

// room waits until an answer of n bytes, at most wire.MaxData, may be read into memory; the
// caller calls giveBack after sending. The error is that of ctx, which ends with the
// connection.
func (c *conn) room(ctx context.Context, n int64) (giveBack func(), err error) {
	peers := c.shared()
	rooms := []*semaphore.Weighted{c.answers}
	if peers != nil {
		rooms = append(rooms, peers.room)
	}
	free := func(got int) {
		for _, r := range rooms[:got] {
			r.Release(n)
		}
	}
	held := false
	for i, r := range rooms {
		if r.TryAcquire(n) {
			continue
		}
		if !held {
			held = true
			c.s.held.Add(1)
		}
		if err := r.Acquire(ctx, n); err != nil {
			free(i)
			return nil, meta.E("read chunk", meta.Canceled, "", err)
		}
	}
	c.s.answering.Add(n)
	return func() {
		c.s.answering.Add(-n)
		free(len(rooms))
	}, nil
}

// shared returns the bound of the connection's identity, nil if it has none.
func (c *conn) shared() *share {
	c.s.mu.Lock()
	defer c.s.mu.Unlock()
	if c.peers != nil || c.who.Role == "" || c.who.Anyone() {
		return c.peers
	}
	name := c.who.String()
	p := c.s.shares[name]
	if p == nil {
		p = &share{room: semaphore.NewWeighted(answersPeer)}
		c.s.shares[name] = p
	}
	p.conns++
	c.peers = p
	return p
}

// unshare is called when the connection has ended. Server.mu is held.
func (c *conn) unshare() {
	if c.peers == nil {
		return
	}
	if c.peers.conns--; c.peers.conns == 0 {
		delete(c.s.shares, c.who.String())
	}
	c.peers = nil
}
