package sim

import (
	"bytes"
	"fmt"

	"penstock.io/penstock/meta"
)

// disk is a chunk server with one disk: a crash loses unsynced bytes.
type disk struct {
	node
	w      *world
	id     meta.ServerID
	chunks map[meta.ChunkID]*replica
}

type replica struct {
	data   []byte
	synced int
	fence  meta.Fence
	sealed bool
	gone   bool // deleted: a late append must not make the replica again
}

func newDisk(w *world, i int) *disk {
	return &disk{w: w, id: meta.ServerID(i + 1), node: node{name: fmt.Sprintf("disk%d", i+1)}, chunks: map[meta.ChunkID]*replica{}}
}

// crash keeps the synced bytes and a random prefix of the later bytes.
func (d *disk) crash() {
	d.w.res.Crashes++
	d.w.trace("%s crashes", d.name)
	d.life++
	d.paused = d.w.Now + d.w.rng.Int64N(60)
	for _, id := range sortedChunks(d.chunks) {
		r := d.chunks[id]
		keep := r.synced + d.w.rng.IntN(len(r.data)-r.synced+1)
		if d.w.cfg.Off.Sync && !r.sealed {
			keep = 0
			r.synced = 0
		}
		r.data = r.data[:keep:keep]
	}
}

// append adds p at off. A repeated append is acknowledged if the replica has the same
// bytes.
func (d *disk) append(id meta.ChunkID, f meta.Fence, off int, p []byte) error {
	r := d.chunks[id]
	if r == nil {
		if off != 0 {
			return meta.WrongOffset
		}
		r = &replica{fence: f}
		d.chunks[id] = r
	}
	if f.Less(r.fence) && !d.w.cfg.Off.Fence {
		return meta.Fenced
	}
	switch {
	case r.gone, r.sealed && !d.w.cfg.Off.Fence:
		return meta.Sealed
	case off+len(p) <= len(r.data):
		if bytes.Equal(r.data[off:off+len(p)], p) {
			return nil
		}
		return meta.WrongOffset
	case off != len(r.data):
		return meta.WrongOffset
	}
	d.w.truth.appended(d, id, f, r)
	r.data = append(r.data, p...)
	return nil
}

func (d *disk) sync(id meta.ChunkID, upTo int) error {
	r := d.chunks[id]
	if r == nil || r.gone || upTo > len(r.data) {
		return meta.WrongOffset
	}
	r.synced = max(r.synced, upTo)
	return nil
}

// freeze raises the fence, durably, and returns the state of the replica.
func (d *disk) freeze(id meta.ChunkID, f meta.Fence) meta.OrderResult {
	r := d.chunks[id]
	if r == nil {
		r = &replica{}
		d.chunks[id] = r
	}
	if f.Less(r.fence) {
		return meta.OrderResult{Err: meta.Fenced}
	}
	r.fence = f
	r.synced = len(r.data) // bytes in the answer must not be lost later
	return meta.OrderResult{Length: uint64(len(r.data)), Synced: uint64(r.synced), Fence: f, Existing: true}
}

// seal ends the chunk at a journaled length.
func (d *disk) seal(id meta.ChunkID, f meta.Fence, length int) error {
	r := d.chunks[id]
	if r == nil || r.gone {
		return meta.NoSuchChunk
	}
	if f.Less(r.fence) {
		return meta.Fenced
	}
	if len(r.data) < length {
		return meta.Corrupt
	}
	r.fence, r.sealed, r.data, r.synced = f, true, r.data[:length:length], length
	return nil
}

func (d *disk) delete(id meta.ChunkID) { d.chunks[id] = &replica{gone: true, sealed: true} }

func (d *disk) read(id meta.ChunkID, off, n int) ([]byte, error) {
	r := d.chunks[id]
	if r == nil || r.gone {
		return nil, meta.NoSuchChunk
	}
	if off+n > len(r.data) {
		return nil, meta.NoSuchOffset
	}
	return r.data[off : off+n], nil
}
