package penstock

import (
	"context"
	"errors"

	"penstock.io/penstock/meta"
)

// bulk writes much of a file for somebody who can get the bytes once more. They go
// straight to chunks of the file's own and are in no buffer of this client from then
// on: nobody waits for room that a sync gives back, and each chunk is synced once,
// however slow the disk is. What fails is written again, as other writes are, by who
// has the bytes.
//
// The volume knows of the bytes, and readers see them, after commit. Nothing of the
// file may be written in another way meanwhile.
type bulk struct {
	v      *Volume
	in     *inode
	epoch  uint64   // in which it began
	chunks []*chunk // of which the last is appended to
	ext    []meta.Extent
	done   int    // of ext: those before are committed as they are
	fresh  uint64 // bytes that are not committed
	until  uint64 // what was written before this offset is
	failed error  // of a write or a commit
	most   uint64 // of these, at most: who is killed loses no more of a file
}

// Bounds of what bulk is good for.
const (
	bulkFrom    = 1 << 20   // bytes of a file, as for a chunk of its own
	bulkPiece   = 256 << 10 // bytes of a piece on the average: smaller ones are better packed
	bulkPieces  = maxExtents / 2
	bulkCommit  = 128 << 20 // bytes of one file that are not committed
	bulkAhead   = 2 << 20   // bytes of one chunk that are on their way to servers
	bulkUnready = 512 << 20 // bytes of all files of a mirror that are not
)

// bulkFits tells whether pieces of a file of n bytes together are for a bulk. Where
// bytes have to be promised before they are written they go the ordinary way.
func (v *Volume) bulkFits(pieces int, n uint64) bool {
	return n >= bulkFrom && pieces <= bulkPieces && n/uint64(pieces) >= bulkPiece && !v.meter.on.Load() && v.c.cfg.Keep == nil
}

// newBulk begins; end has to be called.
func (v *Volume) newBulk(ino meta.Ino) *bulk {
	return &bulk{v: v, in: v.node(ino), epoch: v.epoch.Load(), most: bulkCommit}
}

// write appends bytes that belong at an offset, which is not below that of bytes
// before. p may be used again when it returns.
func (b *bulk) write(ctx context.Context, p []byte, off uint64) error {
	err := b.append(ctx, p, off)
	b.failed = err
	return err
}

func (b *bulk) append(ctx context.Context, p []byte, off uint64) error {
	v := b.v
	if b.fresh > 0 && b.fresh+uint64(len(p)) > b.most {
		if err := b.commit(ctx); err != nil {
			return err
		}
	}
	if err := v.space.take(ctx, v, int64(len(p))); err != nil {
		return err
	}
	c, err := b.room(ctx, uint64(len(p)))
	if err != nil {
		return err
	}
	at, err := c.w.Append(ctx, p)
	if err == nil {
		// More would only lie about in memory: what is read next may take the place
		// that is in the processor's caches.
		err = c.w.Within(ctx, bulkAhead)
	}
	if err != nil {
		if ctx.Err() == nil {
			v.breakChunk(c, err)
		}
		return err
	}
	n := uint64(len(p))
	v.c.stats.written.Add(n)
	v.c.stats.appended.Add(n)
	b.fresh += n
	e := meta.Extent{Off: off, Len: n, Chunk: c.id, ChunkOff: at}
	if k := len(b.ext); k > 0 {
		if last := &b.ext[k-1]; last.Chunk == e.Chunk && last.End() == e.Off && last.ChunkOff+last.Len == e.ChunkOff {
			last.Len += n
			return nil
		}
	}
	b.ext = append(b.ext, e)
	return nil
}

// room gives the chunk that takes n bytes.
func (b *bulk) room(ctx context.Context, n uint64) (*chunk, error) {
	if k := len(b.chunks); k > 0 {
		c := b.chunks[k-1]
		if c.w.Len()+n <= c.max && !c.doubtful() {
			return c, nil
		}
		b.v.retire(c)
	}
	c, err := b.v.newOwn(ctx)
	if err != nil {
		return nil, err
	}
	c.holdBlob() // it is not sealed before what is in it is committed
	b.chunks = append(b.chunks, c)
	return c, nil
}

// commit makes durable what was written, and then the volume know of it.
func (b *bulk) commit(ctx context.Context) error {
	if b.fresh == 0 {
		return nil
	}
	v := b.v
	for _, c := range b.chunks {
		c.mu.Lock()
		synced := c.synced
		c.mu.Unlock()
		if synced == c.w.Len() {
			continue // by an earlier commit
		}
		if err := c.sync(ctx); err != nil {
			return err
		}
	}
	err := v.alone(ctx, b.in, true, func() error {
		if v.epoch.Load() != b.epoch {
			return meta.E("write back", meta.SessionExpired, v.subject(b.in.ino), errors.New("this was given up when the session expired"))
		}
		return v.changeMap(ctx, nil, b.in, &meta.Write{Ino: b.in.ino, Extents: b.ext[b.done:], Synced: true})
	})
	if err != nil {
		return err
	}
	v.c.stats.commits.Add(1)
	b.done, b.fresh = len(b.ext)-1, 0 // the last may grow
	b.until = b.ext[b.done].End()
	// Those that are full are sealed now: what is open is not repaired.
	last := len(b.chunks) - 1
	for _, c := range b.chunks[:last] {
		v.dropBlob(c)
	}
	b.chunks = b.chunks[last:]
	return nil
}

// end lets go of the chunks, which are sealed then.
func (b *bulk) end() {
	for _, c := range b.chunks {
		b.v.retire(c)
		b.v.dropBlob(c)
	}
	b.in.put()
}
