package client

import (
	"context"
	"net"
	"strings"
	"time"

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
