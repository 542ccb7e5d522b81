package penstock

import (
	"context"
	"errors"

	"penstock.io/penstock/meta"
)

// bulk writes large amounts of a file for a caller that can produce the bytes again. The bytes
// go directly to chunks of the file's own and are not buffered in this client: no write waits
// for room that a sync frees, and each chunk is synced once, however slow the disk is. After a
// failure the caller, which has the bytes, writes them again in the ordinary way.
//
// The volume has the bytes, and readers see them, after commit. Until then the file must not
// be written in another way.
type bulk struct {
	v      *Volume
	in     *inode
	epoch  uint64   // in which the bulk began
	chunks []*chunk // of which the last is appended to
	ext    []meta.Extent
	done   int    // the first done extents of ext are committed
	fresh  uint64 // uncommitted bytes
	until  uint64 // bytes before this offset are committed
	failed error  // of a write or a commit
	most   uint64 // bound of fresh: a killed process loses no more than this of a file
}

// Bounds within which bulk is worthwhile.
const (
	bulkFrom    = 1 << 20   // bytes of a file, as for an own chunk
	bulkPiece   = 256 << 10 // average bytes of a piece: smaller pieces are better packed
	bulkPieces  = maxExtents / 2
	bulkCommit  = 128 << 20 // uncommitted bytes of one file
	bulkAhead   = 2 << 20   // bytes of one chunk that are being sent to servers
	bulkUnready = 512 << 20 // uncommitted bytes of all files of a mirror
)

// bulkFits reports whether a bulk should write pieces of a file with n bytes in all. In a
// volume with a quota, where bytes are promised before they are written, writes take the
// ordinary way.
func (wb *writeBack) bulkFits(pieces int, n uint64) bool {
	return n >= bulkFrom && pieces <= bulkPieces && n/uint64(pieces) >= bulkPiece && !wb.v.meter.on.Load() && wb.v.c.cfg.Keep == nil
}

// newBulk begins; end has to be called.
func (wb *writeBack) newBulk(ino meta.Ino) *bulk {
	v := wb.v
	return &bulk{v: v, in: v.node(ino), epoch: v.owner.epoch.Load(), most: bulkCommit}
}

// write appends the bytes of offset off, which must not be below earlier bytes. The caller may
// reuse p when write returns.
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
		// More bytes in flight would only occupy memory; the next read may reuse this buffer
		// while it is in the processor's caches.
		err = c.w.Within(ctx, bulkAhead)
	}
	if err != nil {
		if ctx.Err() == nil {
			v.chunks.breakChunk(c, err)
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

// room returns a chunk with room for n bytes.
func (b *bulk) room(ctx context.Context, n uint64) (*chunk, error) {
	if k := len(b.chunks); k > 0 {
		c := b.chunks[k-1]
		if c.w.Len()+n <= c.max && !c.doubtful() {
			return c, nil
		}
		b.v.chunks.retire(c)
	}
	c, err := b.v.chunks.newOwn(ctx)
	if err != nil {
		return nil, err
	}
	c.holdBlob() // not sealed before its bytes are committed
	b.chunks = append(b.chunks, c)
	return c, nil
}

// commit makes the written bytes durable and then commits them to the volume.
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
	err := v.back.alone(ctx, b.in, true, func() error {
		if v.owner.epoch.Load() != b.epoch {
			return meta.E("write back", meta.SessionExpired, v.subject(b.in.ino), errors.New("the bytes were given up when the session expired"))
		}
		return v.changes.changeMap(ctx, nil, b.in, &meta.Write{Ino: b.in.ino, Extents: b.ext[b.done:], Synced: true})
	})
	if err != nil {
		return err
	}
	v.c.stats.commits.Add(1)
	b.done, b.fresh = len(b.ext)-1, 0 // the last may grow
	b.until = b.ext[b.done].End()
	// Full chunks are sealed now: an open chunk is not repaired.
	last := len(b.chunks) - 1
	for _, c := range b.chunks[:last] {
		v.chunks.dropBlob(c)
	}
	b.chunks = b.chunks[last:]
	return nil
}

// end lets go of the chunks, which are sealed then.
func (b *bulk) end() {
	for _, c := range b.chunks {
		b.v.chunks.retire(c)
		b.v.chunks.dropBlob(c)
	}
	b.in.put()
}
