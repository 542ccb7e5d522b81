package server

import (
	"errors"
	"fmt"
	"slices"

	"penstock.io/penstock/chunkserver/wire"
	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/capability"
	"penstock.io/penstock/meta/peer"
)

// rule says which peers may send a frame, and which rights the frame's capability must have.
type rule struct {
	roles []peer.Role       // roles whose certificates may send it
	right capability.Rights // right of its capability; 0: the frame names no chunk
	// anyFence: the capability's fence need not be the request's, which has none.
	anyFence bool
	// plain: the frame may come over a ticketed connection. If the frame names a chunk, the
	// frame's capability needs the right Plain.
	plain bool
}

var (
	users   = []peer.Role{peer.Client, peer.Gateway, peer.Admin, peer.Meta, peer.ChunkServer}
	readers = users
	writers = []peer.Role{peer.Client, peer.Gateway, peer.Admin, peer.Meta}
	owners  = []peer.Role{peer.Meta}
)

// rules has a row for every type of frame that a client may send: the length of rules is
// wire.Types, so that the program does not build while a type has no row. Only authorize reads
// rules. A process of this machine's administrator (a Unix socket), and anybody on loopback
// with --insecure, may act in any role; such a process needs capabilities all the same.
var rules = [...]rule{
	wire.Hello:  {roles: users, plain: true}, // once, as the first frame: see loop
	wire.Append: {roles: writers, right: capability.Append, plain: true},
	wire.Sync:   {roles: writers, right: capability.Append, anyFence: true, plain: true},
	wire.Read:   {roles: readers, right: capability.Read, plain: true},
	wire.Stat:   {roles: readers, right: capability.Read, plain: true},
	wire.Seal:   {roles: owners, right: capability.Seal},
	wire.Delete: {roles: owners, right: capability.Delete},
	wire.Local:  {roles: readers, right: capability.Read}, // Unix sockets only: see local
	wire.Ping:   {roles: users, plain: true},
	wire.Share:  {roles: writers}, // Unix sockets only: see share
	wire.Ticket: {roles: users},   // not over a ticketed connection
}

var _ [wire.Types]struct{} = [len(rules)]struct{}{}

// authorize checks that a connection's peer may send a frame. n is the number of bytes in an
// append. Errors: AccessDenied (another peer may), BadCapability, Fenced.
func (c *conn) authorize(h wire.Header, q *wire.Request, n int) error {
	const op = "authorize"
	if int(h.Type) >= len(rules) || rules[h.Type].roles == nil {
		return meta.E(op, meta.Protocol, "", fmt.Errorf("frame type %d", h.Type))
	}
	r := rules[h.Type]
	if !c.who.Anyone() && !slices.Contains(r.roles, c.who.Role) || c.plain && !r.plain {
		c.s.refused.Add(1)
		return meta.E(op, meta.AccessDenied, c.who.String(), fmt.Errorf("it may not send frames of type %d on this connection", h.Type))
	}
	if r.right == 0 || c.s.cfg.UnsafeNoCap {
		return nil
	}
	claims, err := c.s.claims(q.Cap)
	if err == nil {
		err = claims.Allow(r.right, q.Chunk, q.Fence, q.Off+uint64(n))
		if r.anyFence && meta.KindOf(err) == meta.Fenced {
			err = nil
		}
	}
	switch {
	case err != nil:
	case claims.Client != "" && c.who.Role != "" && claims.Client != c.who.String():
		err = meta.E(op, meta.BadCapability, q.Chunk.String(), fmt.Errorf("it was given to %s, and %s shows it", claims.Client, c.who))
	case c.plain && claims.Rights&capability.Plain == 0:
		err = meta.E(op, meta.BadCapability, q.Chunk.String(), errors.New("the volume's bytes go over TLS only"))
	}
	if err != nil {
		c.s.refused.Add(1)
	}
	return err
}

// claims checks a token, in the cache if it was seen before.
func (s *Server) claims(token []byte) (capability.Claims, error) {
	now := s.clocks.now()
	s.capMu.RLock()
	c, ok := s.seen[string(token)]
	keys := s.keys
	s.capMu.RUnlock()
	if ok && now < c.Expiry {
		return c, nil
	}
	c, err := capability.Verify(keys, token, now)
	if err != nil {
		return c, err
	}
	s.capMu.Lock()
	if len(s.seen) >= 1<<16 {
		clear(s.seen)
	}
	s.seen[string(token)] = c
	s.capMu.Unlock()
	return c, nil
}
