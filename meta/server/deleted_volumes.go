package server

import (
	"context"
	"errors"

	"penstock.io/penstock/meta"
)

// A volume can be deleted while chunk servers are away, some for good. The record that
// replaces the volume's row names every known chunk server. The owner of the root volume asks
// each of these servers, when connected, for the chunks of the volume, and deletes them, with
// replicas that no record named any more. When a complete list shows no chunk, the owner takes
// the server off the record. The record is the proof that the volume is deleted: it was
// written when the row was deleted, the cluster never reuses the id of a volume, and a record
// that can't be read proves nothing.

// sweepServer deletes the chunks that a server has of a deleted volume, files of the volume's
// checkpoints included, and returns how many it deleted.
func (o *owner) sweepServer(ctx context.Context, id meta.ServerID, v meta.VolumeID) (n int, err error) {
	var chunks []meta.ChunkID
	if err := o.srv.chunkServers.listChunks(id, v, func(c meta.ChunkID) { chunks = append(chunks, c) }); err != nil {
		return 0, err
	}
	if err := o.srv.chunkServers.listChunks(id, 0, func(c meta.ChunkID) {
		if c.Term < blobTerm && meta.VolumeID(c.Counter>>32) == v {
			chunks = append(chunks, c)
		}
	}); err != nil {
		return 0, err
	}
	for _, c := range chunks {
		if o.own.Left() <= 0 {
			return n, meta.E("collect chunks", meta.Unavailable, c.String(), errors.New("the root volume's lease is not certain now"))
		}
		call, cancel := context.WithTimeout(ctx, orderPatience)
		_, err := o.order(call, id, meta.Order{Kind: meta.OrderDelete, Chunk: c, Fence: meta.Fence{Term: 1<<64 - 1}})
		cancel()
		if err != nil && !errors.Is(err, meta.NoSuchChunk) {
			return n, err
		}
		n++
		o.srv.stats.staleDeleted.Add(1)
	}
	if n > 0 {
		o.log.Info("chunks of a deleted volume were deleted", "volume", v, "server", id, "chunks", n)
	}
	return n, nil
}
