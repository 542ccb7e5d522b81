package server

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync/atomic"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/cluster"
	"penstock.io/penstock/meta/namespace"
)

// checker checks volumes.
type checker struct {
	*process
	chunkServers *chunkServers
	hosted       *hosted
	junctions    *junctionTree
	peers        *peers
}

// FsckReport is the result of a check of a volume.
type FsckReport struct {
	Volume   meta.VolumeID `json:"volume"`
	Inodes   uint64        `json:"inodes"`
	Dirs     uint64        `json:"directories"`
	Entries  uint64        `json:"entries"`
	Extents  uint64        `json:"extents"`
	Chunks   uint64        `json:"chunks"`
	Replicas uint64        `json:"replicas"`
	Orphans  uint64        `json:"orphans"`
	// Junctions lead to other volumes; each is compared with the other volume's row.
	Junctions uint64 `json:"junctions"`
	Bytes     uint64 `json:"bytes"`
	// Lost are bytes of files, of any generation, that an operator accepted as lost, in the
	// chunks of Accepted (the first 1,000). Lost bytes are no problem.
	Lost     uint64   `json:"accepted_lost_bytes"`
	Accepted []string `json:"accepted_lost,omitempty"`
	Problems []string `json:"problems"`
	// Count is the number of problems, including problems left out of the list.
	Count uint64 `json:"problem_count"`
}

func (r *FsckReport) problem(format string, a ...any) {
	r.Count++
	if len(r.Problems) < 1000 {
		r.Problems = append(r.Problems, fmt.Sprintf(format, a...))
	}
}

// CheckStatus is the progress of a check of a volume.
type CheckStatus struct {
	Volume  meta.VolumeID `json:"volume"`
	Records uint64        `json:"records"` // read so far
	Chunks  uint64        `json:"chunks"`  // asked for so far
	Of      uint64        `json:"of"`      // of so many; 0: not known yet
}

// checking counts the progress of a running check.
type checking struct {
	records, chunks, of atomic.Uint64
}

// frozenReader reads a frozen store, counts the records, and stops when ctx ends.
type frozenReader struct {
	Frozen
	ctx context.Context
	c   *checking
}

func (r frozenReader) Scan(lo, hi []byte, fn func(k, v []byte) bool) error {
	var stopped error
	err := r.Frozen.Scan(lo, hi, func(k, v []byte) bool {
		if r.c.records.Add(1)%1024 == 0 && r.ctx.Err() != nil {
			stopped = meta.E("check", meta.Canceled, "", context.Cause(r.ctx))
			return false
		}
		return fn(k, v)
	})
	return errors.Join(err, stopped)
}

// Fsck checks a volume's state, with all counts made again, and asks the chunk servers for
// every chunk in the state. It reads the state at a single journal entry: changes go on
// meanwhile.
func (ch *checker) Fsck(ctx context.Context, v meta.VolumeID) (*FsckReport, error) {
	o, err := ch.hosted.ownerFor(ctx, v)
	if err != nil {
		return nil, err
	}
	if err := o.await(ctx, o.recovered); err != nil {
		return nil, err
	}
	// The check must see every operation answered before: journaled and applied.
	if err := o.settled(ctx); err != nil {
		return nil, err
	}
	c := &checking{}
	view, release, err := o.freezeState(ctx, c)
	if err != nil {
		return nil, err
	}
	defer release()
	ctx = view.ctx
	o.mu.Lock()
	o.check = c
	o.mu.Unlock()
	defer func() {
		o.mu.Lock()
		defer o.mu.Unlock()
		if o.check == c {
			o.check = nil
		}
	}()
	var chunks []meta.ChunkRecord
	ends := map[meta.ChunkID]uint64{} // of open chunks: where the last extent ends
	report, err := namespace.Check(view)
	if err == nil {
		err = namespace.Chunks(view, func(c meta.ChunkRecord) bool { chunks = append(chunks, c); return true })
	}
	open := map[meta.ChunkID]bool{}
	for _, c := range chunks {
		if c.State == meta.ChunkOpen {
			open[c.ID] = true
		}
	}
	if err == nil && len(open) > 0 {
		err = namespace.AllExtents(view, func(_ meta.Ino, e meta.Extent) bool {
			if open[e.Chunk] {
				ends[e.Chunk] = max(ends[e.Chunk], e.ChunkOff+e.Len)
			}
			return true
		})
		if err == nil {
			var indexes map[meta.Generation]meta.SnapshotIndex
			indexes, err = namespace.Indexes(view)
			for _, x := range indexes {
				for _, p := range x.Parts {
					ends[p.Chunk] = max(ends[p.Chunk], p.Length)
				}
			}
		}
	}
	foreign := map[meta.ChunkID]uint64{} // the length that a clone needs of other volumes' chunks
	if err == nil {
		err = namespace.ForeignExtents(view, func(e namespace.ForeignExtent) bool {
			foreign[e.Chunk] = max(foreign[e.Chunk], e.ChunkOff+e.Len)
			return true
		})
	}
	if err = errors.Join(err, view.Close()); err != nil {
		return nil, err
	}
	r := &FsckReport{
		Volume: v, Inodes: report.Inodes, Dirs: report.Dirs, Entries: report.Entries, Extents: report.Extents,
		Chunks: report.Chunks, Orphans: report.Orphans, Bytes: report.Bytes, Lost: report.Lost, Count: report.Count, Problems: []string{},
	}
	for _, p := range report.Problems {
		r.Problems = append(r.Problems, p.String())
	}
	if err := ch.junctions.checkJunctions(ctx, o, report.Junctions, r); err != nil {
		return nil, err
	}
	if err := ch.checkForeign(ctx, foreign, r); err != nil {
		return nil, err
	}
	c.of.Store(uint64(len(chunks)))
	for _, rec := range chunks {
		c.chunks.Add(1)
		if rec.State == meta.ChunkDeleting {
			continue
		}
		if rec.Lost && len(r.Accepted) < 1000 {
			r.Accepted = append(r.Accepted, rec.ID.String())
		}
		one := &FsckReport{}
		if err := ch.checkReplicas(ctx, rec, ends[rec.ID], one); err != nil {
			return nil, err
		}
		if one.Count > 0 {
			// The record may have changed since the state was frozen: check it again.
			now, err := o.chunkRecord(rec.ID)
			if err != nil {
				return nil, err
			}
			if now == nil || now.State == meta.ChunkDeleting {
				continue
			}
			one = &FsckReport{}
			if err := ch.checkReplicas(ctx, *now, ends[rec.ID], one); err != nil {
				return nil, err
			}
		}
		r.Replicas += one.Replicas
		for _, p := range one.Problems {
			r.problem("%s", p)
		}
	}
	return r, nil
}

// checkReplicas asks the servers in a chunk's record for the replica, and adds the problems to
// r. end is where the chunk's last extent ends. Errors: Unavailable (a server does not answer,
// and was not removed).
func (ch *checker) checkReplicas(ctx context.Context, c meta.ChunkRecord, end uint64, r *FsckReport) error {
	if len(c.Servers) == 0 && !c.Gone() && c.Live > 0 {
		r.problem("chunk %s of %d live bytes is on no server, and nobody accepted that it is lost", c.ID, c.Live)
	}
	for _, srv := range c.Servers {
		res, err := ch.chunkServers.Order(ctx, srv, meta.Order{Kind: meta.OrderStat, Chunk: c.ID})
		switch {
		case errors.Is(err, meta.NoSuchChunk):
			if c.State == meta.ChunkSealed && c.Length > 0 || c.Live > 0 {
				r.problem("chunk %s of %d live bytes is not on server %d", c.ID, c.Live, srv)
			}
		case errors.Is(err, meta.Unavailable) && ch.chunkServers.neverBack(srv):
			r.problem("chunk %s of %d live bytes: server %d was removed", c.ID, c.Live, srv)
		case err != nil && !provesBad(meta.KindOf(err)):
			return err
		case err != nil:
			r.problem("chunk %s on server %d: %v", c.ID, srv, err)
		default:
			r.Replicas++
			if c.State == meta.ChunkSealed && res.Length != c.Length {
				r.problem("chunk %s on server %d has %d bytes, its record says %d", c.ID, srv, res.Length, c.Length)
			}
			if c.State == meta.ChunkOpen && res.Length < end {
				r.problem("open chunk %s on server %d has %d bytes, %d are referred to", c.ID, srv, res.Length, end)
			}
		}
	}
	return nil
}

// checks lists the running checks.
func (ch *checker) checks() (all []CheckStatus) {
	for _, o := range ch.hosted.owners() {
		o.mu.Lock()
		if c := o.check; c != nil {
			all = append(all, CheckStatus{Volume: o.vol, Records: c.records.Load(), Chunks: c.chunks.Load(), Of: c.of.Load()})
		}
		o.mu.Unlock()
	}
	return all
}

// checkForeign compares the bytes that a clone needs of other volumes' chunks with the records
// of the chunks' owners, and reports problems in r.
func (ch *checker) checkForeign(ctx context.Context, need map[meta.ChunkID]uint64, r *FsckReport) error {
	byVolume := map[meta.VolumeID][]meta.ChunkID{}
	for _, id := range slices.SortedFunc(maps.Keys(need), meta.ChunkID.Compare) {
		byVolume[id.Volume] = append(byVolume[id.Volume], id)
	}
	for v, ids := range byVolume {
		for some := range slices.Chunk(ids, 4096) {
			places, err := ch.peers.placesIn(ctx, v, some, false)
			if err != nil {
				return err
			}
			for _, p := range places {
				switch {
				case len(p.Servers) == 0 && p.Sealed: // accepted as lost
				case len(p.Servers) == 0:
					r.problem("chunk %s, of which %d bytes are needed, is not kept by volume %d", p.ID, need[p.ID], v)
				case p.Sealed && p.Length < need[p.ID]:
					r.problem("chunk %s of volume %d has %d bytes, %d are needed", p.ID, v, p.Length, need[p.ID])
				}
			}
		}
	}
	return nil
}

// checkJunctions compares the junctions in a volume with the rows of the attached volumes, and
// the rows of volumes attached here with the junctions. A difference is checked again with the
// present row and entry, since both change meanwhile.
func (jt *junctionTree) checkJunctions(ctx context.Context, o *owner, junctions []namespace.JunctionAt, r *FsckReport) error {
	r.Junctions = uint64(len(junctions))
	rows, err := jt.cfg.Cluster.Volumes(ctx)
	if err != nil {
		return err
	}
	hang := map[meta.VolumeID]cluster.Attach{}
	for _, v := range rows {
		if v.Attach != nil && v.Attach.Parent == o.vol {
			hang[v.ID] = *v.Attach
		}
	}
	now := func(id meta.VolumeID) (*cluster.Attach, error) {
		v, err := jt.cfg.Cluster.Volume(ctx, id)
		if errors.Is(err, meta.NoSuchVolume) {
			return nil, nil
		}
		return v.Attach, err
	}
	for _, j := range junctions {
		at := cluster.Attach{Parent: o.vol, Ino: j.Parent, Name: j.Name}
		if row, ok := hang[j.Volume]; ok && row.Same(at) {
			delete(hang, j.Volume)
			continue
		}
		row, err := now(j.Volume)
		if err != nil {
			return err
		}
		if (row == nil || !row.Same(at)) && o.leadsTo(at) == j.Volume {
			r.problem("%q in directory %d leads to volume %d, which does not hang there", j.Name, j.Parent, j.Volume)
		}
	}
	for _, id := range slices.Sorted(maps.Keys(hang)) {
		row, err := now(id)
		if err != nil {
			return err
		}
		// A row with an unfinished step is no problem: the step is finished soon.
		if row != nil && row.Parent == o.vol && row.Step == cluster.Attached && o.leadsTo(*row) != id {
			r.problem("volume %d should hang in directory %d as %q, and nothing there leads to it", id, row.Ino, row.Name)
		}
	}
	return nil
}
