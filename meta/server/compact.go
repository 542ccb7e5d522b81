package server

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/namespace"
	"penstock.io/penstock/meta/placement"
)

// Compaction copies what is still live out of sealed chunks that are more than
// half dead, on the server that has them, and swaps the extents. It runs only
// when enough can be won, since finding the extents that refer to a chunk
// reads all extents of the volume once.

// A volume with fewer dead bytes than compactMin is left alone, and if they are
// a quarter of what it holds (then there is little to look through), one with
// fewer than compactLeast.
const (
	compactMin   = 16 << 20
	compactLeast = 1 << 20
)

// compactTarget is the largest chunk that compaction fills.
const compactTarget = 256 << 20

// compactSome does one round; more reports that another may be worth it.
func (o *owner) compactSome() (more bool) {
	if time.Since(o.lastCompact) < o.srv.cfg.CompactInterval {
		return false
	}
	o.lastCompact = time.Now()
	if err := o.compact(); err != nil && o.ctx.Err() == nil {
		o.log.Warn("compaction stopped, it is tried again", "error", err)
	}
	return false
}

// ref is one extent that refers to a chunk being compacted.
type ref struct {
	ino meta.Ino
	ext meta.Extent
}

func (o *owner) compact() error {
	o.mu.Lock()
	victims := map[meta.ChunkID]meta.ChunkRecord{}
	var dead, live uint64
	err := namespace.Chunks(&view{o: o}, func(c meta.ChunkRecord) bool {
		if c.State == meta.ChunkSealed && !c.Lost && c.Live > 0 && c.Live*2 < c.Length && live+c.Live <= compactTarget {
			victims[c.ID] = c
			dead += c.Length - c.Live
			live += c.Live
		}
		return true
	})
	if err == nil && dead < compactMin {
		var used uint64
		used, _, err = namespace.Usage(&view{o: o})
		if dead < max(compactLeast, used/4) {
			dead = 0
		}
	}
	if err != nil || dead == 0 {
		o.mu.Unlock()
		return err
	}
	refs := map[meta.ChunkID][]ref{}
	err = namespace.Extents(&view{o: o}, func(ino meta.Ino, e meta.Extent) bool {
		if _, ok := victims[e.Chunk]; ok && !e.OpenEnded {
			refs[e.Chunk] = append(refs[e.Chunk], ref{ino, e})
		}
		return true
	})
	o.mu.Unlock()
	if err != nil {
		return err
	}
	// Copies stay on the servers that have the source, so sources of one set of
	// servers share a target.
	m := o.srv.servers()
	groups := map[string][]meta.ChunkRecord{}
	n := 0
	for _, c := range victims {
		if !o.worthCopying(&c, refs[c.ID], m) {
			continue
		}
		slices.Sort(c.Servers)
		k := fmt.Sprint(c.Servers)
		groups[k] = append(groups[k], c)
		n++
	}
	if n == 0 {
		return nil
	}
	o.log.Info("compacting", "chunks", n, "dead", dead, "live", live)
	// What one set of servers can't do now does not keep the others from it.
	var errs []error
	for _, k := range slices.Sorted(maps.Keys(groups)) {
		g := groups[k]
		slices.SortFunc(g, func(a, b meta.ChunkRecord) int { return a.ID.Compare(b.ID) })
		if err := o.compactGroup(g, refs); err != nil {
			errs = append(errs, err)
		}
	}
	o.kickGC()
	return errors.Join(errs...)
}

// worthCopying: the copy would free the chunk, and every replica can make it.
// What a snapshot alone refers to can't be moved; what is to be repaired or
// moved is left to that first.
func (o *owner) worthCopying(c *meta.ChunkRecord, refs []ref, m *placement.Map) bool {
	var found uint64
	for _, r := range refs {
		found += r.ext.Len
	}
	if found != c.Live {
		return false
	}
	for _, id := range c.Servers {
		if s, ok := m.Server(id); !ok || s.State != placement.Live || o.faults.has(c.ID, id) {
			return false
		}
	}
	return true
}

// compactGroup copies the live ranges of chunks on the same servers into one
// fresh chunk, synced, swaps the extents one by one, and seals the chunk.
func (o *owner) compactGroup(g []meta.ChunkRecord, refs map[meta.ChunkID][]ref) error {
	servers := g[0].Servers
	o.mu.Lock()
	if o.failed != nil {
		o.mu.Unlock()
		return o.failed
	}
	seq := o.cur.seq
	fence := meta.Fence{Term: o.own.Term()}
	res, err := o.run(&meta.AllocChunks{N: 1, Servers: [][]meta.ServerID{servers}, Fence: fence}, 0)
	if err != nil {
		o.mu.Unlock()
		return err
	}
	target := res.Chunks[0].ID
	wait := o.untilDurable(seq)
	o.mu.Unlock()
	if err := o.await(o.ctx, wait); err != nil {
		return err
	}
	type move struct {
		ref
		to uint64
	}
	var moves []move
	var at uint64
	var failed error
copying:
	for _, c := range g {
		rs := refs[c.ID]
		for len(rs) > 0 {
			n := min(len(rs), 1024)
			order := meta.Order{Kind: meta.OrderCopy, Chunk: target, Fence: fence, From: c.ID, Length: at}
			next := at
			for _, r := range rs[:n] {
				order.Ranges = append(order.Ranges, meta.CopyRun{Off: r.ext.ChunkOff, Len: r.ext.Len})
				moves = append(moves, move{r, next})
				next += r.ext.Len
			}
			if err := o.copyOn(servers, order, next); err != nil {
				failed = err
				moves = moves[:len(moves)-n]
				break copying
			}
			at, rs = next, rs[n:]
		}
	}
	// The target is sealed only when files refer to it: a sealed chunk that
	// nothing refers to is garbage. If we don't get that far, the collector
	// seals it as it seals what writers leave open.
	for _, m := range moves {
		ext := m.ext
		ext.Chunk, ext.ChunkOff = target, m.to
		if err := o.swap(m.ino, m.ext, ext); err != nil && !errors.Is(err, meta.Again) && !errors.Is(err, meta.Stale) {
			return errors.Join(failed, err)
		}
	}
	if _, err := o.seal(o.ctx, target, nil); err != nil {
		return errors.Join(failed, err)
	}
	return failed
}

// copyOn has every replica of a chunk being filled copy what its server has of
// another, side by side; the chunk then has length bytes on each, or an error.
func (o *owner) copyOn(servers []meta.ServerID, order meta.Order, length uint64) error {
	var n uint64
	for _, r := range order.Ranges {
		n += r.Len
	}
	ctx, cancel := context.WithTimeout(o.ctx, copyPatience+time.Duration(n/minCopyRate)*time.Second)
	defer cancel()
	errs := make([]error, len(servers))
	var wg sync.WaitGroup
	for i, srv := range servers {
		wg.Go(func() {
			r, err := o.order(ctx, srv, order)
			if err == nil && r.Length != length {
				err = meta.E("compact", meta.Corrupt, order.Chunk.String(), fmt.Errorf("the copy on server %d has %d bytes, not %d", srv, r.Length, length))
			}
			errs[i] = err
		})
	}
	wg.Wait()
	return errors.Join(errs...)
}

// swap replaces one extent's place.
func (o *owner) swap(ino meta.Ino, old, new meta.Extent) error {
	_, err := o.swapped(ino, &meta.ReplaceExtents{Ino: ino, Old: []meta.Extent{old}, New: []meta.Extent{new}})
	return err
}

// swapped runs an operation that changes where bytes of a file lie. Sessions that
// cached the file's extents are asked to forget them first; those with data
// still to commit keep it, since their commits only replace ranges.
func (o *owner) swapped(ino meta.Ino, op meta.Op) (*meta.Result, error) {
	k := &ticket{}
	o.mu.Lock()
	defer o.mu.Unlock()
	for {
		if o.failed != nil {
			return nil, o.failed
		}
		ch := o.leases.conflict(o.vol, nil, ino, meta.LeaseNone)
		if ch == nil {
			break
		}
		o.leases.block(k, ino)
		o.mu.Unlock()
		err := o.await(o.ctx, ch)
		o.mu.Lock()
		if err != nil {
			o.leases.unblock(k)
			return nil, err
		}
	}
	res, err := o.run(op, 0)
	o.leases.unblock(k)
	return res, err
}
