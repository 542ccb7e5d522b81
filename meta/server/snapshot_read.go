package server

import (
	"context"
	"errors"
	"fmt"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/namespace"
	"penstock.io/penstock/meta/wire"
)

// snapshotReading reads the tree and the files of a volume at a snapshot.
type snapshotReading struct {
	k       *kernel
	foreign *foreign
}

// ask reads the namespace at a snapshot. It calls waiting before each wait for the owners of
// other volumes.
func (sr *snapshotReading) ask(ctx context.Context, at meta.Generation, op meta.Op, waiting func()) (*meta.Result, error) {
	k := sr.k
	for {
		res, wait, err := sr.try(at, op)
		if err != nil || wait == nil {
			return res, err
		}
		waiting()
		if err := k.await(ctx, wait); err != nil {
			return nil, err
		}
	}
}

// try reads the namespace at a snapshot. If places of a clone's chunks in other volumes are
// unknown, it returns a channel to wait for before the next try.
func (sr *snapshotReading) try(at meta.Generation, op meta.Op) (*meta.Result, <-chan struct{}, error) {
	k := sr.k
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.failed != nil {
		return nil, nil, k.failed
	}
	q := k.context(0)
	q.At = at
	res, err := namespace.Query(k.view(), q, op)
	if err != nil {
		return nil, nil, err
	}
	wait, err := sr.foreign.fillPlaces(res)
	return res, wait, err
}

// readAt reads bytes of a file. ask answers questions about the file's tree.
func (sr *snapshotReading) readAt(ctx context.Context, ask func(context.Context, meta.Op) (*meta.Result, error), ino meta.Ino, p []byte, off uint64) error {
	var m fileMap
	if err := m.ask(func(op meta.Op) (*meta.Result, error) { return ask(ctx, op) }, ino, off, off+uint64(len(p))); err != nil {
		return err
	}
	return sr.readMapped(ctx, &m, p, off)
}

// fileMap says where a part of a file lies.
type fileMap struct {
	extents []meta.Extent // in order, holes left out
	inline  []byte        // the file's first bytes
	places  map[meta.ChunkID]meta.ChunkPlace
}

// ask fills in the map of the bytes [off, end).
func (m *fileMap) ask(ask func(meta.Op) (*meta.Result, error), ino meta.Ino, off, end uint64) error {
	m.places = map[meta.ChunkID]meta.ChunkPlace{}
	for off < end {
		res, err := ask(&meta.Open{Ino: ino, Off: off, Len: end - off})
		if err != nil {
			return err
		}
		m.inline = res.Data
		for _, pl := range res.Places {
			m.places[pl.ID] = pl
		}
		m.extents = append(m.extents, res.Extents...)
		if res.EOF || len(res.Extents) == 0 {
			break
		}
		off = m.extents[len(m.extents)-1].End()
	}
	return nil
}

// readMapped reads bytes of a file from the chunks that the map names. Holes read as zeros.
func (sr *snapshotReading) readMapped(ctx context.Context, m *fileMap, p []byte, off uint64) error {
	k := sr.k
	clear(p)
	if off < uint64(len(m.inline)) {
		copy(p, m.inline[off:])
	}
	end := off + uint64(len(p))
	for _, e := range m.extents {
		lo, hi := max(e.Off, off), min(e.End(), end)
		if e.Chunk.IsZero() || lo >= hi {
			continue
		}
		pl, ok := m.places[e.Chunk]
		if !ok {
			return meta.E("digest", meta.Unavailable, k.subject(), fmt.Errorf("the place of chunk %v is not known", e.Chunk))
		}
		if err := k.srv.cfg.Chunks.ReadAt(ctx, pl, p[lo-off:hi-off], e.ChunkOff+lo-e.Off); err != nil {
			return err
		}
	}
	return nil
}

// queryAt answers a read at a snapshot. The state of a snapshot never changes and is in the
// journal, so a read needs no lease, and waits neither for other sessions nor for the claims
// after a change of owner. The caller holds mu.
func (o *owner) queryAt(s *session, c *wire.Call) (*wire.Reply, <-chan struct{}) {
	if c.Op.Code().Mutates() {
		return refuse(meta.E("call", meta.ReadOnly, "", errors.New("snapshots can't be changed")))
	}
	if o.snapshots.snapped > o.durable {
		return nil, o.untilDurable(o.snapshots.snapped)
	}
	q := o.context(s.id)
	q.At = c.At
	res, err := namespace.Query(&view{k: &o.kernel, session: s.id}, q, c.Op)
	if err != nil {
		return refuse(err)
	}
	if wait, err := o.foreign.fillPlaces(res); wait != nil || err != nil {
		if err != nil {
			return refuse(err)
		}
		return nil, wait
	}
	if _, ok := c.Op.(*meta.StatFSOp); ok {
		o.srv.chunkServers.fillDisk(&res.StatFS)
	}
	return &wire.Reply{Result: *res}, nil
}
