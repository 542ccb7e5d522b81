package client

import (
	"context"

	"penstock.io/penstock/chunkserver"
	"penstock.io/penstock/chunkserver/wire"
	"penstock.io/penstock/meta"
)

// readCap is the right to read a chunk.
func (c *Client) readCap(id meta.ChunkID) []byte {
	if c.cfg.ReadChunkCap != nil {
		return c.cfg.ReadChunkCap(id)
	}
	return c.cfg.ReadCap(id.Volume)
}

// Stat asks a server about a chunk. Errors: NoSuchChunk, Unavailable, BadCapability.
func (c *Client) Stat(ctx context.Context, server meta.ServerID, id meta.ChunkID) (chunkserver.Info, error) {
	q := wire.Request{Cap: c.readCap(id), Chunk: id}
	k := &call{t: wire.Stat}
	err := c.ask(ctx, server, &q, k, 0)
	return k.answer.Info, err
}

// Seal freezes or seals a chunk on one server, with the chunk's capability; as
// chunkserver.Service.Seal.
func (c *Client) Seal(ctx context.Context, server meta.ServerID, token []byte, id meta.ChunkID, fence meta.Fence, final bool, length uint64) (chunkserver.Info, error) {
	q := wire.Request{Cap: token, Chunk: id, Fence: fence, Final: final, Off: length}
	k := &call{t: wire.Seal}
	err := c.ask(ctx, server, &q, k, 0)
	return k.answer.Info, err
}

// Delete removes a chunk from one server, with the chunk's capability.
func (c *Client) Delete(ctx context.Context, server meta.ServerID, token []byte, id meta.ChunkID, fence meta.Fence) error {
	q := wire.Request{Cap: token, Chunk: id, Fence: fence}
	return c.ask(ctx, server, &q, &call{t: wire.Delete}, 0)
}

// ask does one request on any connection to a server. If the connection turns out to have
// broken while idle, ask repeats the request once.
func (c *Client) ask(ctx context.Context, server meta.ServerID, q *wire.Request, k *call, flags uint16) error {
	for try := 0; ; try++ {
		l, err := c.peer(server).link(ctx, c.pool(forOthers, q.Cap))
		if err != nil {
			return err
		}
		err = l.do(ctx, q, k, flags)
		l.release()
		if meta.KindOf(err) != meta.Unavailable || try > 0 || ctx.Err() != nil {
			return err
		}
	}
}
