package namespace

import (
	"cmp"
	"fmt"
	"slices"

	"penstock.io/penstock/meta"
)

// maxAlloc bounds the chunks that one operation allocates.
const maxAlloc = 1024

// chunkRecords are the operations on chunks, within an operation on the namespace.
type chunkRecords struct{ *tx }

func (t *tx) chunkRecords() chunkRecords { return chunkRecords{t} }

func (t chunkRecords) allocChunks(op *meta.AllocChunks, res *meta.Result) error {
	if op.N == 0 || op.N > maxAlloc || int(op.N) != len(op.Servers) {
		return fail("allocate chunks", meta.Invalid, fmt.Sprintf("%d chunks on %d sets of servers", op.N, len(op.Servers)))
	}
	if t.c.Term == 0 || t.c.Term > 1<<32-1 {
		return fail("allocate chunks", meta.Invalid, fmt.Sprintf("term %d", t.c.Term))
	}
	for _, servers := range op.Servers {
		t.vol.chunks++
		c := &chunk{fresh: true}
		c.ID = meta.ChunkID{Volume: t.vol.id, Term: uint32(t.c.Term), Counter: t.vol.chunks}
		c.State, c.Session, c.Fence, c.Own = meta.ChunkOpen, t.c.Session, op.Fence, op.Own
		c.Servers = slices.Clone(servers)
		t.addChunk(c)
		res.Chunks = append(res.Chunks, c.ChunkRecord)
	}
	return nil
}

func (t chunkRecords) sealChunk(op *meta.SealChunk, res *meta.Result) error {
	c, err := t.chunk(op.Chunk)
	if err != nil {
		return err
	}
	if c.State != meta.ChunkOpen {
		if c.Length != op.Length || c.CRC != op.CRC {
			return fail("seal", meta.Sealed, fmt.Sprintf("chunk %v at %d, not at %d", op.Chunk, c.Length, op.Length))
		}
		res.Chunks = []meta.ChunkRecord{c.ChunkRecord}
		return nil
	}
	if op.Fence.Less(c.Fence) {
		return fail("seal", meta.Fenced, op.Chunk.String())
	}
	if c.owner != 0 {
		in, err := t.load(c.owner)
		if meta.KindOf(err) == meta.Stale {
			return meta.E("seal", meta.Corrupt, fmt.Sprintf("chunk %v is said to end inode %d", op.Chunk, c.owner), err)
		}
		if err != nil {
			return err
		}
		size := in.Size
		if err := t.content().closeEnd(in, op.Length, true); err != nil {
			return err
		}
		touch(in)
		if in.Size != size {
			in.Mtime, in.Ctime = t.c.Now, t.c.Now
			if err := t.fileEvent(meta.EventChanged, in); err != nil {
				return err
			}
		}
		res.Attr = in.Attr
	}
	c.State, c.Session, c.owner = meta.ChunkSealed, 0, 0
	c.Length, c.CRC, c.Fence = op.Length, op.CRC, op.Fence
	c.Servers = slices.Clone(op.Servers)
	c.Lost = op.Lost
	if c.Live == 0 {
		c.State = meta.ChunkDeleting
	}
	res.Chunks = []meta.ChunkRecord{c.ChunkRecord}
	return nil
}

func (t chunkRecords) dropChunk(op *meta.DropChunk) error {
	c, err := t.chunk(op.Chunk)
	if meta.KindOf(err) == meta.NoSuchChunk {
		return nil
	}
	if err != nil {
		return err
	}
	if c.State != meta.ChunkDeleting {
		return fail("drop chunk", meta.Busy, fmt.Sprintf("%v is not to be deleted, %d bytes are live", op.Chunk, c.Live))
	}
	c.gone = true
	return nil
}

// setReplicas changes the servers of a sealed chunk. The chunk's length and checksum stay; the
// fence may rise.
func (t chunkRecords) setReplicas(op *meta.SetReplicas, res *meta.Result) error {
	const name = "set replicas"
	if (len(op.Servers) == 0) != op.Lost || len(op.Servers) > maxReplicas || slices.Contains(op.Servers, 0) {
		return fail(name, meta.Invalid, fmt.Sprintf("%v on servers %v", op.Chunk, op.Servers))
	}
	for i, s := range op.Servers {
		if slices.Contains(op.Servers[:i], s) {
			return fail(name, meta.Invalid, fmt.Sprintf("%v twice on server %d", op.Chunk, s))
		}
	}
	c, err := t.chunk(op.Chunk)
	if err != nil {
		return err
	}
	switch {
	case c.State == meta.ChunkOpen:
		return fail(name, meta.Busy, op.Chunk.String())
	case c.State != meta.ChunkSealed, c.Gone():
		return fail(name, meta.NoSuchChunk, op.Chunk.String())
	case !slices.Equal(c.Servers, op.Expect):
		return fail(name, meta.Again, fmt.Sprintf("chunk %v is on %v, not on %v", op.Chunk, c.Servers, op.Expect))
	}
	c.Servers = slices.Clone(op.Servers)
	c.Lost = c.Lost || op.Lost
	if c.Fence.Less(op.Fence) {
		c.Fence = op.Fence
	}
	res.Chunks = []meta.ChunkRecord{c.ChunkRecord}
	return nil
}

// maxReplicas bounds the servers of a chunk while some are added and others
// not yet removed.
const maxReplicas = 2 * meta.MaxReplicas

// replaceExtents moves bytes to other places. The file's contents, size and
// times stay.
func (t chunkRecords) replaceExtents(op *meta.ReplaceExtents, res *meta.Result) error {
	again := fail("replace extents", meta.Again, fmt.Sprintf("inode %d changed", op.Ino))
	in, err := t.inode(op.Ino)
	if err != nil {
		return err
	}
	olds, news := sortedExtents(op.Old), sortedExtents(op.New)
	cuts, ok := spans(olds)
	onto, ok2 := spans(news)
	if !ok || !ok2 || len(cuts) == 0 || !slices.Equal(cuts, onto) {
		return fail("replace extents", meta.Invalid, "the new extents don't cover what the old ones do")
	}
	for _, e := range news {
		if e.Chunk.IsZero() || e.OpenEnded {
			return fail("replace extents", meta.Invalid, "new extents are closed and lie in chunks")
		}
		if err := t.content().checkNew(e); err != nil {
			return err
		}
	}
	for _, o := range olds {
		at := o.Off
		err := t.extents().scanLive(in, o.Off, func(e extent) bool {
			if e.Off > at || e.OpenEnded || o.OpenEnded || e.Chunk != o.Chunk || e.ChunkOff-e.Off != o.ChunkOff-o.Off || e.Chunk.IsZero() {
				return false
			}
			at = e.End()
			return at < o.End()
		})
		if err != nil {
			return err
		}
		if at < o.End() {
			return again
		}
	}
	if err := t.extents().edit(in, cuts, news); err != nil {
		return err
	}
	res.Attr = in.Attr
	return nil
}

func sortedExtents(l []meta.Extent) []meta.Extent {
	l = slices.Clone(l)
	slices.SortFunc(l, func(a, b meta.Extent) int { return cmp.Compare(a.Off, b.Off) })
	return l
}

// spans returns the ranges of sorted extents, joined where they touch; ok is false if an
// extent is empty, too long or overlaps another.
func spans(l []meta.Extent) (out []span, ok bool) {
	for _, e := range l {
		n := len(out)
		switch {
		case e.Len == 0 || e.End() < e.Off || e.End() > meta.MaxFileSize || n > 0 && e.Off < out[n-1].hi:
			return nil, false
		case n > 0 && e.Off == out[n-1].hi:
			out[n-1].hi = e.End()
		default:
			out = append(out, span{e.Off, e.End()})
		}
	}
	return out, true
}
