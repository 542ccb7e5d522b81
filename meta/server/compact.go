package server

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/capability"
	"penstock.io/penstock/meta/lease"
	"penstock.io/penstock/meta/namespace"
	"penstock.io/penstock/meta/placement"
	"penstock.io/penstock/meta/task"
)

// Compaction moves extents to fresh chunks, for two ends: to win back the space of sealed
// chunks with many dead bytes (sparseChunks), and to join fragments (placement.JoinRule). A
// batch of extents fills a fresh chunk. Compaction may stop after any of these steps:
//
//  1. The owner allocates the chunk, and journals the allocation (rule 4), on
//     servers where the policy wants data.
//  2. Each of these servers gathers and verifies the bytes, in the order of the
//     batch, and syncs them.
//  3. The owner maps each extent to its copy, if the extent is still mapped as
//     it was read: a newer write is never covered. Steps 2 and 3 repeat.
//  4. The owner seals the chunk.
//
// If compaction stops before step 3, the chunk is open and nothing refers to it: the collector
// seals and deletes the chunk. If compaction stops later, the collector seals the chunk at the
// length that extents refer to. An old chunk is deleted when nothing refers to it. The
// progress of compaction is not recorded: the next owner looks through the volume again.

// Defaults of Config.
const (
	DefaultCompactInterval = 2 * time.Second
	DefaultCompactRate     = 64 << 20
	DefaultJoinLeast       = 16
	DefaultJoinSmall       = 256 << 10
	DefaultJoinInterval    = 5 * time.Minute
)

const (
	// A volume whose chunks more than half dead have fewer than compactMin dead bytes is left
	// alone. The bound is compactLeast instead if the dead bytes are a quarter of the volume's
	// bytes (then the walk is short), or if the dead bytes in all sealed chunks exceed half of
	// the live bytes.
	compactMin   = 16 << 20
	compactLeast = 1 << 20
	// compactTarget is the length of the largest chunk that compaction fills.
	compactTarget = 256 << 20
	// joinAlone is the size from which the fragments of a file fill chunks not shared with
	// other files.
	joinAlone = 1 << 20
	// joinMost bounds the extents that a look gathers to be joined.
	joinMost = 200_000
	// joinWindow is how many extents of a file are looked at together.
	joinWindow = 100_000
	// walkShare: at most a fiftieth of the time may go into walks for fragments, and into
	// walks that find no chunk worth emptying.
	walkShare = 50
	// copyBytes bounds an order to gather, in bytes. It bounds the work lost by an
	// interruption, and the time from reading an extent to moving the extent.
	copyBytes = 16 << 20
	// swapSome bounds the extents moved while the volume's lock is held.
	swapSome = 512
)

// compaction is the state of an owner's looks. Only the compaction task changes it, except
// heldBack.
type compaction struct {
	k          *kernel
	faults     *faults
	collection *collection
	sealing    *sealing
	leases     *leases

	begun    meta.Seq                  // the newest entry when the task began
	joined   time.Time                 // when the last walk for fragments ended
	took     time.Duration             // how long that walk took
	seen     meta.Seq                  // the newest entry at the last look that joined all fragments
	passed   map[meta.ChunkID]struct{} // not worth copying at a look (a snapshot keeps some of each, say): skipped
	vain     time.Time                 // until when passed chunks are skipped
	heldBack bool                      // the last look left extents: see leases.outOfReach; guarded by the owner's mu

	files, fragments atomic.Uint64 // to be joined, as of the last walk
	looks            atomic.Uint64 // looks begun
	walks            atomic.Uint64 // walks over all extents
}

// newCompactionTask returns the task that looks for extents to move, in rounds.
func newCompactionTask(c *compaction) *task.Task {
	every := c.k.srv.cfg.CompactInterval
	return task.New(task.Options{
		Name: "compact chunks", First: every, Failed: "compaction stopped, it is tried again", Log: c.k.log,
		Begin: func() {
			c.k.mu.Lock()
			c.begun = c.k.newest()
			c.k.mu.Unlock()
			c.joined = time.Now()
		},
		Round: func(ctx context.Context) (time.Duration, error) {
			c.looks.Add(1)
			err := c.compact()
			if err != nil && ctx.Err() == nil {
				c.k.srv.stats.compactFailed.Add(1)
			}
			if err != nil || c.heldUp() {
				return min(5*every, max(every, 30*time.Second)), err
			}
			return every, nil
		},
	})
}

// heldUp reports whether the last look left extents because a session with a lease on the file
// is away or does not give the lease up.
func (c *compaction) heldUp() bool {
	c.k.mu.Lock()
	defer c.k.mu.Unlock()
	return c.heldBack
}

// joinSoon bounds the wait for the next look for fragments in a volume without sessions, which
// will be closed, and in a volume without a complete look so far.
const joinSoon = 10 * time.Second

// joinDue reports whether a look for fragments is due.
func (c *compaction) joinDue(newest meta.Seq, inUse bool) bool {
	k := c.k
	if now := k.srv.cfg.joinNow; now != nil {
		return now()
	}
	if k.srv.cfg.JoinLeast < 2 || newest == c.seen || !inUse && newest == c.begun {
		return false // joining is off, nothing changed, or the volume was opened for maintenance only
	}
	wait := k.srv.cfg.JoinInterval
	if !inUse || c.seen == 0 {
		wait = min(wait, joinSoon)
	}
	return time.Since(c.joined) >= max(wait, walkShare*c.took)
}

// victim is a chunk with many dead bytes, and its live extents.
type victim struct {
	rec    meta.ChunkRecord
	chosen bool // to be emptied now
	files  []placement.Part
	found  uint64 // bytes of files
	kept   bool   // a snapshot sees some of its extents, or the chunk is not worth copying
}

// compact looks through a frozen state of the volume, and moves the extents worth moving. The
// volume may have changed by then: each move compares.
func (c *compaction) compact() error {
	k := c.k
	k.mu.Lock()
	if k.failed != nil || k.leaving != nil || k.closed != nil || k.stClosed || k.ctx.Err() != nil {
		k.mu.Unlock()
		return nil
	}
	c.heldBack = false
	newest, inUse := k.newest(), len(k.entered) > 0
	join := c.joinDue(newest, inUse)
	if join {
		// The frozen state must show extents shared since a moment ago.
		k.mu.Unlock()
		if err := k.settled(k.ctx); err != nil {
			return err
		}
		k.mu.Lock()
		if k.stClosed || k.ctx.Err() != nil {
			k.mu.Unlock()
			return nil
		}
	}
	k.wg.Hold() // keeps the store open
	frozen := k.st.Freeze()
	k.mu.Unlock()
	var batches []placement.Batch
	victims, err := c.sparse(frozen)
	if err == nil && (join || len(victims) > 0) {
		batches, err = c.lookThrough(frozen, victims, join)
	}
	err = errors.Join(err, frozen.Close())
	k.wg.Release()
	// A batch that fails does not stop the batches after it.
	errs := []error{err}
	for i := range batches {
		if k.ctx.Err() != nil {
			break
		}
		errs = append(errs, c.fill(&batches[i]))
	}
	if len(batches) > 0 {
		k.tasks.collection.Wake()
	}
	// After a failure, the next look for fragments does not wait for a change.
	if err = errors.Join(errs...); err == nil && join && !c.heldUp() && k.ctx.Err() == nil {
		c.seen = newest
	}
	return err
}

// sparse finds the chunks worth emptying, if they are worth a walk over the extents. It skips
// the chunks of compaction.passed.
func (c *compaction) sparse(r namespace.Reader) (map[meta.ChunkID]*victim, error) {
	if !time.Now().Before(c.vain) {
		c.passed = nil
	}
	var s sparseChunks
	if err := namespace.Chunks(r, func(rec meta.ChunkRecord) bool {
		if _, passed := c.passed[rec.ID]; !passed {
			s.add(rec)
		}
		return true
	}); err != nil {
		return nil, err
	}
	return s.worth(func() (uint64, error) {
		used, _, err := namespace.Usage(r)
		return used, err
	})
}

// sparseChunks are sealed chunks with live bytes. Chunks more than half dead are emptied.
// Chunks filled while files were being deleted may all end just short of half: if all chunks
// together have more than 1.5 times their live bytes, chunks more than a third dead are
// emptied. So a volume without writes takes at most 1.5 times its live bytes, and
// compactLeast. The bytes kept by snapshots come on top.
type sparseChunks struct {
	length, live uint64  // of all sealed chunks with live bytes
	half, third  victims // chunks with more than this part dead
}

// victims are chunks that may be emptied.
type victims struct {
	all  []*victim
	dead uint64
}

func (s *sparseChunks) add(c meta.ChunkRecord) {
	if c.State != meta.ChunkSealed || c.Lost || c.Live == 0 {
		return
	}
	s.length += c.Length
	s.live += c.Live
	if c.Live*2 < c.Length {
		s.half.add(c)
	}
	if c.Live*3 < c.Length*2 {
		s.third.add(c)
	}
}

func (v *victims) add(c meta.ChunkRecord) {
	v.all = append(v.all, &victim{rec: c})
	v.dead += c.Length - c.Live
}

// choose marks the victims to be emptied now, the emptiest first. Together they have at most
// compactTarget live bytes, except that the first is always chosen. It returns all victims.
func (v *victims) choose() map[meta.ChunkID]*victim {
	slices.SortFunc(v.all, func(a, b *victim) int {
		return cmp.Or(cmp.Compare(float64(a.rec.Live)/float64(a.rec.Length), float64(b.rec.Live)/float64(b.rec.Length)), a.rec.ID.Compare(b.rec.ID))
	})
	m := make(map[meta.ChunkID]*victim, len(v.all))
	var live uint64
	for _, x := range v.all {
		m[x.rec.ID] = x
		if live == 0 || live+x.rec.Live <= compactTarget {
			x.chosen = true
			live += x.rec.Live
		}
	}
	return m
}

// worth returns the chunks that may be emptied, with some chosen, or none if they have too few
// dead bytes. used returns the bytes that the volume holds.
func (s *sparseChunks) worth(used func() (uint64, error)) (map[meta.ChunkID]*victim, error) {
	if s.length > s.live+s.live/2 {
		if s.third.dead < compactLeast {
			return nil, nil
		}
		return s.third.choose(), nil
	}
	if s.half.dead < compactMin {
		if n, err := used(); err != nil || s.half.dead < max(compactLeast, n/4) {
			return nil, err
		}
	}
	return s.half.choose(), nil
}

// lookThrough walks over all extents. It collects the extents in victims and, with join, the
// fragments, and returns batches of both.
func (c *compaction) lookThrough(r namespace.Reader, victims map[meta.ChunkID]*victim, join bool) ([]placement.Batch, error) {
	k := c.k
	policy, err := namespace.Policy(r)
	if err != nil {
		return nil, err
	}
	began := time.Now()
	c.walks.Add(1)
	m := k.srv.serverMap.servers()
	target := min(compactTarget, maxLen(policy, false))
	f := fragments{c: c, r: r, m: m, rule: placement.JoinRule{Least: k.srv.cfg.JoinLeast, Small: k.srv.cfg.JoinSmall}, may: map[meta.ChunkID]bool{}}
	err = namespace.LiveExtents(r, func(ino meta.Ino, e meta.Extent, kept bool) bool {
		v := victims[e.Chunk]
		if v != nil {
			v.kept = v.kept || kept
		}
		if v != nil && v.chosen && !e.OpenEnded {
			if n := len(v.files); n == 0 || v.files[n-1].Ino != ino {
				v.files = append(v.files, placement.Part{Ino: ino})
			}
			part := &v.files[len(v.files)-1]
			part.Pieces = append(part.Pieces, placement.Piece{Extent: e})
			v.found += e.Len
		}
		if join {
			f.add(ino, e, kept || v != nil)
		}
		return f.err == nil && k.ctx.Err() == nil
	})
	if err = errors.Join(err, f.err, context.Cause(k.ctx)); err != nil {
		return nil, err
	}
	batches := c.emptying(victims, m, &policy, target)
	c.pass(victims, time.Since(began))
	if !join {
		return batches, nil
	}
	files, err := f.finish()
	if err != nil {
		return batches, err
	}
	var n uint64
	for i := range files {
		some, _ := files[i].Size()
		n += uint64(some)
	}
	c.files.Store(uint64(len(files)))
	c.fragments.Store(n)
	c.joined, c.took = time.Now(), time.Since(began)
	if n == 0 {
		return batches, nil
	}
	k.log.Info("joining fragments", "files", len(files), "fragments", n, "looked", c.took.Round(time.Millisecond))
	return append(batches, placement.Batches(files, target, joinAlone)...), nil
}

// emptying makes batches of the live extents in victims. Victims on the same set of servers
// share fresh chunks, placed on the same servers: no byte crosses the network.
func (c *compaction) emptying(victims map[meta.ChunkID]*victim, m *placement.Map, p *meta.Policy, target uint64) (batches []placement.Batch) {
	groups := map[string]map[meta.Ino][]placement.Piece{}
	n, dead := 0, uint64(0)
	for _, v := range victims {
		if !v.chosen {
			continue
		}
		if !c.worthCopying(v, m, p) {
			v.kept = true
			continue
		}
		slices.Sort(v.rec.Servers)
		k := fmt.Sprint(v.rec.Servers)
		if groups[k] == nil {
			groups[k] = map[meta.Ino][]placement.Piece{}
		}
		for _, part := range v.files {
			groups[k][part.Ino] = append(groups[k][part.Ino], part.Pieces...)
		}
		n++
		dead += v.rec.Length - v.rec.Live
	}
	if n == 0 {
		return nil
	}
	c.k.log.Info("compacting", "chunks", n, "dead", dead)
	for _, k := range slices.Sorted(maps.Keys(groups)) {
		var files []placement.Fragmented
		for _, ino := range slices.Sorted(maps.Keys(groups[k])) {
			pieces := groups[k][ino]
			slices.SortFunc(pieces, func(a, b placement.Piece) int { return cmp.Compare(a.Off, b.Off) })
			files = append(files, placement.Fragmented{Ino: ino, Stretches: []placement.Stretch{{Pieces: pieces}}})
		}
		batches = append(batches, placement.Batches(files, target, joinAlone)...)
	}
	return batches
}

// pass records the chunks found not worth copying by a look that took so long. Looks skip
// these chunks for walkShare times took.
func (c *compaction) pass(victims map[meta.ChunkID]*victim, took time.Duration) {
	for id, v := range victims {
		if !v.kept {
			continue
		}
		if c.passed == nil {
			c.passed, c.vain = map[meta.ChunkID]struct{}{}, time.Now().Add(walkShare*took)
		}
		c.passed[id] = struct{}{}
	}
}

// worthCopying reports whether a copy would free the chunk, and the chunk lies where the
// policy wants it. A chunk that a snapshot refers to would stay. A chunk due for repair or a
// move is repaired or moved first.
func (c *compaction) worthCopying(v *victim, m *placement.Map, p *meta.Policy) bool {
	if v.found != v.rec.Live || v.kept {
		return false
	}
	for _, id := range v.rec.Servers {
		if s, ok := m.Server(id); !ok || s.State != placement.Live || c.faults.has(v.rec.ID, id) {
			return false
		}
	}
	return c.settledAt(&v.rec, m, p)
}

// settledAt reports whether repair would leave the chunk on its servers.
func (c *compaction) settledAt(rec *meta.ChunkRecord, m *placement.Map, p *meta.Policy) bool {
	st := m.Plan(chance{}, p, c.faults.replicas(rec))
	return !st.Work()
}

// ---- fragments

// fragments gathers the files with fragments to join.
type fragments struct {
	c    *compaction
	r    namespace.Reader
	m    *placement.Map
	rule placement.JoinRule
	may  map[meta.ChunkID]bool // a cache: extents may leave this chunk

	ino    meta.Ino
	pieces []placement.Piece // of ino
	files  []placement.Fragmented
	n      int // pieces in files
	err    error
}

// add takes the next extent of the walk.
func (f *fragments) add(ino meta.Ino, e meta.Extent, fixed bool) {
	if ino != f.ino || len(f.pieces) >= joinWindow {
		f.end()
		f.ino = ino
	}
	f.pieces = append(f.pieces, placement.Piece{Extent: e, Fixed: fixed || e.OpenEnded || !f.movable(e.Chunk)})
}

// movable reports whether the chunk belongs to this volume, is sealed, and can be read.
func (f *fragments) movable(id meta.ChunkID) bool {
	if id.IsZero() || id.Volume != f.c.k.vol {
		return false
	}
	if may, ok := f.may[id]; ok {
		return may
	}
	rec, _, err := namespace.ReadChunk(f.r, id)
	if err != nil {
		f.err = err
		return false
	}
	if len(f.may) > 1<<16 {
		clear(f.may)
	}
	f.may[id] = rec.State == meta.ChunkSealed && !rec.Lost && len(f.c.readable(&rec, f.m)) > 0
	return f.may[id]
}

// readable lists the servers with a replica of the chunk that can be read.
func (c *compaction) readable(rec *meta.ChunkRecord, m *placement.Map) (ids []meta.ServerID) {
	for _, id := range rec.Servers {
		if s, ok := m.Server(id); ok && (s.State == placement.Live || s.State == placement.Draining) && !c.faults.has(rec.ID, id) {
			ids = append(ids, id)
		}
	}
	return ids
}

// end adds the stretches of the current file, or of a window of the file, to files.
func (f *fragments) end() {
	st := f.rule.Stretches(f.pieces)
	f.pieces = f.pieces[:0]
	if len(st) == 0 {
		return
	}
	for i := range st {
		st[i].Pieces = slices.Clone(st[i].Pieces)
		f.n += len(st[i].Pieces)
	}
	f.files = append(f.files, placement.Fragmented{Ino: f.ino, Stretches: st})
	if f.n > 2*joinMost {
		f.trim()
	}
}

// trim keeps the most fragmented files, at most joinMost extents but at least a file.
func (f *fragments) trim() {
	slices.SortFunc(f.files, func(a, b placement.Fragmented) int { return placement.MostFragmented(&a, &b) })
	f.n = 0
	for i, x := range f.files {
		for _, s := range x.Stretches {
			f.n += len(s.Pieces)
		}
		if f.n > joinMost && i > 0 {
			f.files = slices.Clip(f.files[:i])
			break
		}
	}
}

// finish leaves out extents with several references, in any generation: each reference would
// need a copy, or the bytes would take space twice.
func (f *fragments) finish() ([]placement.Fragmented, error) {
	f.end()
	f.trim()
	if len(f.files) == 0 {
		return nil, nil
	}
	uses := placement.NewUses(f.files)
	if err := namespace.AllExtents(f.r, func(_ meta.Ino, e meta.Extent) bool {
		uses.Saw(&e)
		return f.c.k.ctx.Err() == nil
	}); err != nil {
		return nil, err
	}
	out := f.files[:0]
	for _, x := range f.files {
		var st []placement.Stretch
		for _, s := range x.Stretches {
			for i := range s.Pieces {
				s.Pieces[i].Fixed = uses.Shared(&s.Pieces[i].Extent)
			}
			st = append(st, f.rule.Stretches(s.Pieces)...)
		}
		if len(st) > 0 {
			out = append(out, placement.Fragmented{Ino: x.Ino, Stretches: st})
		}
	}
	slices.SortFunc(out, func(a, b placement.Fragmented) int { return placement.MostFragmented(&a, &b) })
	return out, f.c.k.ctx.Err()
}

// ---- moving

// move is an extent to be copied to offset to of the chunk being filled.
type move struct {
	ino meta.Ino
	ext meta.Extent
	to  uint64
}

// filler fills a chunk.
type filler struct {
	k          *kernel
	compaction *compaction
	collection *collection
	sealing    *sealing
	policy     meta.Policy
	fence      meta.Fence
	target     meta.ChunkID // zero: not allocated yet
	servers    []meta.ServerID
	at         uint64 // length of target
	moved      int
}

// newFiller makes a filler of chunks that meet the policy.
func (c *compaction) newFiller(policy meta.Policy) *filler {
	return &filler{k: c.k, compaction: c, collection: c.collection, sealing: c.sealing, policy: policy}
}

// fill moves a batch into a fresh chunk. The process fills a single chunk at a time, for all
// its volumes: the rate of a chunk's orders bounds the copying of all of them.
func (c *compaction) fill(b *placement.Batch) (err error) {
	k := c.k
	select {
	case k.srv.filling <- struct{}{}:
		defer func() { <-k.srv.filling }()
	case <-k.ctx.Done():
		return nil
	}
	policy, err := k.policy()
	if err != nil {
		return err
	}
	f := c.newFiller(policy)
	var some []move
	var n uint64
	flush := func() error {
		err := f.step(some)
		some, n = some[:0], 0
		return err
	}
	for _, part := range b.Parts {
		for _, p := range part.Pieces {
			if len(some) == meta.MaxPieces || n > 0 && n+p.Len > copyBytes {
				if err = flush(); err != nil {
					return f.end(err)
				}
			}
			some = append(some, move{ino: part.Ino, ext: p.Extent})
			n += p.Len
		}
	}
	return f.end(flush())
}

// end seals the chunk. If sealing fails, or nothing refers to the chunk, the collector treats
// the chunk like the open chunks left by writers.
func (f *filler) end(err error) error {
	if f.target.IsZero() {
		return err
	}
	k := f.k
	defer func() {
		k.mu.Lock()
		delete(f.collection.filling, f.target)
		k.mu.Unlock()
	}()
	if f.moved == 0 {
		return err
	}
	k.srv.stats.compacted.Add(1)
	_, sealErr := f.sealing.seal(k.ctx, f.target, nil)
	return errors.Join(err, sealErr)
}

// step carries out the moves whose extents are still there.
func (f *filler) step(some []move) error {
	k := f.k
	k.mu.Lock()
	if err := cmp.Or(k.failed, f.compaction.resting()); err != nil {
		k.mu.Unlock()
		return err
	}
	some, err := f.compaction.stillThere(some)
	// A write into the middle of an extent splits it, and an order is bounded.
	var rest []move
	if len(some) > meta.MaxPieces {
		some, rest = some[:meta.MaxPieces], some[meta.MaxPieces:]
	}
	order := meta.Order{Kind: meta.OrderGather, Length: f.at, Rate: k.srv.cfg.CompactRate}
	var recs []meta.ChunkRecord
	if err == nil {
		recs, err = f.pieces(some, &order)
	}
	k.mu.Unlock()
	if err != nil || len(some) == 0 {
		return err
	}
	m := k.srv.serverMap.servers()
	if f.target.IsZero() {
		if err := f.begin(recs, m); err != nil {
			return err
		}
	}
	at := f.at
	for i := range some {
		some[i].to = at
		at += some[i].ext.Len
	}
	order.Chunk, order.Fence, order.Class = f.target, f.fence, f.policy.Class
	if err := f.gather(order, recs, m, at-f.at); err != nil {
		return err
	}
	k.srv.stats.compactedBytes.Add(at - f.at)
	f.at = at
	for len(some) > 0 {
		n := 1
		for n < min(len(some), swapSome) && some[n].ino == some[0].ino {
			n++
		}
		moved, err := f.swap(some[:n])
		if err != nil && !errors.Is(err, meta.Again) && !errors.Is(err, meta.Stale) {
			return err
		}
		f.moved += moved
		k.srv.stats.compactedExtents.Add(uint64(moved))
		some = some[n:]
	}
	if len(rest) > 0 {
		return f.step(rest)
	}
	return nil
}

// resting returns why no extent may be moved now, or nil. The caller holds the owner's mu.
func (c *compaction) resting() error {
	k := c.k
	switch {
	case k.leaving != nil:
		return errLeaving
	case k.closed != nil:
		return meta.E("compact", meta.Busy, "", errors.New("the volume is being rolled back"))
	}
	return k.full(&meta.ReplaceExtents{})
}

// stillThere narrows moves, grouped by file and each file's in order of offsets, to the
// extents still mapped as the moves say and seen by no snapshot. It drops files out of reach,
// and sets compaction.heldBack: a later look finds them again. The caller holds the owner's mu.
func (c *compaction) stillThere(some []move) (out []move, err error) {
	for len(some) > 0 {
		n := 1
		for n < len(some) && some[n].ino == some[0].ino {
			n++
		}
		file := some[:n]
		some = some[n:]
		if c.leases.outOfReach(file[0].ino) {
			c.heldBack = true
			continue
		}
		i := 0
		err := namespace.FileExtents(c.k.view(), file[0].ino, file[0].ext.Off, file[n-1].ext.End(), func(e meta.Extent, kept bool) bool {
			for i < n && file[i].ext.End() <= e.Off {
				i++
			}
			for k := i; k < n && file[k].ext.Off < e.End(); k++ {
				x := file[k]
				if kept || e.OpenEnded || e.Chunk != x.ext.Chunk || e.ChunkOff-e.Off != x.ext.ChunkOff-x.ext.Off {
					continue
				}
				lo, hi := max(e.Off, x.ext.Off), min(e.End(), x.ext.End())
				by := lo - x.ext.Off
				x.ext.Off, x.ext.ChunkOff, x.ext.Len, x.to = lo, x.ext.ChunkOff+by, hi-lo, x.to+by
				out = append(out, x)
			}
			return i < n
		})
		if err != nil && !errors.Is(err, meta.Stale) {
			return nil, err
		}
	}
	return out, nil
}

// pieces fills in the pieces that an order is to gather, and returns the records of their
// chunks. The caller holds the owner's mu.
func (f *filler) pieces(some []move, order *meta.Order) (recs []meta.ChunkRecord, err error) {
	index := map[meta.ChunkID]uint32{}
	for _, x := range some {
		i, ok := index[x.ext.Chunk]
		if !ok {
			rec, _, err := namespace.ReadChunk(f.k.view(), x.ext.Chunk)
			if err != nil {
				return nil, err
			}
			i = uint32(len(recs))
			index[x.ext.Chunk], recs = i, append(recs, rec)
		}
		order.Pieces = append(order.Pieces, meta.CopyPiece{Chunk: i, Off: x.ext.ChunkOff, Len: x.ext.Len})
	}
	return recs, nil
}

// begin allocates the chunk. The chunk goes to the servers of its sources, if all sources have
// the same servers and the policy wants chunks there, else to the servers that placement
// chooses for a new chunk.
func (f *filler) begin(recs []meta.ChunkRecord, m *placement.Map) error {
	k := f.k
	together := f.compaction.settledAt(&recs[0], m, &f.policy)
	servers := slices.Sorted(slices.Values(recs[0].Servers))
	for i := range recs {
		together = together && slices.Equal(servers, slices.Sorted(slices.Values(recs[i].Servers)))
	}
	for _, id := range servers {
		s, ok := m.Server(id)
		together = together && ok && s.State == placement.Live
	}
	if !together {
		placed, err := k.srv.serverMap.place(1, &f.policy, placement.Writer{}, nil)
		if err != nil {
			return err
		}
		servers = placed[0]
	}
	f.servers, f.fence = servers, meta.Fence{Term: k.own.Term()}
	k.mu.Lock()
	if err := cmp.Or(k.failed, f.compaction.resting()); err != nil {
		k.mu.Unlock()
		return err
	}
	res, wait, err := k.start(&meta.AllocChunks{N: 1, Servers: [][]meta.ServerID{servers}, Fence: f.fence}, 0)
	if err != nil {
		k.mu.Unlock()
		return err
	}
	f.target = res.Chunks[0].ID
	f.collection.filling[f.target] = true
	k.mu.Unlock()
	return k.await(k.ctx, wait)
}

// gather makes every replica of the chunk gather n bytes, all replicas in parallel. If gather
// returns no error, the bytes are durable on each replica.
func (f *filler) gather(order meta.Order, recs []meta.ChunkRecord, m *placement.Map, n uint64) error {
	k := f.k
	known := map[meta.ServerID]bool{}
	for i := range recs {
		from := f.compaction.readable(&recs[i], m)
		for _, id := range from {
			if info, ok := k.srv.chunkServers.Resolve(id); ok && !known[id] {
				info.Disks = nil
				order.Sources = append(order.Sources, info)
				known[id] = true
			}
		}
		order.Chunks = append(order.Chunks, meta.CopySource{Chunk: recs[i].ID, Length: recs[i].Length, CRC: recs[i].CRC, Servers: from})
	}
	rate, patience := copyTerms(n, order.Rate)
	order.Rate = rate
	return f.compaction.copyOn(k.ctx, f.servers, order, order.Length+n, patience, func(to meta.ServerID, or *meta.Order) {
		or.Chunks = slices.Clone(or.Chunks)
		for i := range or.Chunks {
			or.Chunks[i].Servers = m.Nearest(to, or.Chunks[i].Servers)
		}
		or.Cap = k.srv.chunkServers.sign(patience+time.Minute, capability.Claims{
			Volume: k.vol, Rights: capability.Read, Client: k.srv.chunkServers.certified(to), // the server that shows the capability
		})
	})
}

// copyOn sends an order to every replica of a chunk being filled, in parallel, and waits at
// most patience. It returns an error unless the chunk then has length bytes on each. adjust,
// if not nil, changes the order for a server.
func (c *compaction) copyOn(ctx context.Context, servers []meta.ServerID, order meta.Order, length uint64, patience time.Duration, adjust func(meta.ServerID, *meta.Order)) error {
	k := c.k
	ctx, cancel := context.WithTimeoutCause(ctx, patience, errors.New("the copy took too long"))
	defer cancel()
	errs := make([]error, len(servers))
	var wg sync.WaitGroup
	for i, srv := range servers {
		wg.Go(func() {
			order := order
			if adjust != nil {
				adjust(srv, &order)
			}
			r, err := k.order(ctx, srv, order)
			if err == nil && r.Length != length {
				err = meta.E("compact", meta.Corrupt, order.Chunk.String(), fmt.Errorf("the copy on server %d has %d bytes, not %d", srv, r.Length, length))
			}
			errs[i] = err
		})
	}
	wg.Wait()
	return errors.Join(errs...)
}

// errPolicyChanged ends the filling of a chunk: bytes written since the volume's policy
// changed must not move to a chunk placed by the earlier policy.
var errPolicyChanged error = meta.E("compact", meta.Unavailable, "", errors.New("the volume's policy says now that chunks lie elsewhere"))

// swap maps the extents of some moves, all of the same file, to their copies, if they are
// still there. It returns the number of extents mapped.
func (f *filler) swap(some []move) (moved int, err error) {
	k := f.k
	_, err = f.compaction.swapped(some[0].ino, func() (meta.Op, error) {
		if err := f.compaction.resting(); err != nil {
			return nil, err
		}
		if p, err := namespace.Policy(k.view()); err != nil || otherPlaces(&f.policy, &p) {
			return nil, cmp.Or(err, errPolicyChanged)
		}
		now, err := f.compaction.stillThere(some)
		if err == nil && len(now) == 0 {
			err = meta.E("compact", meta.Again, fmt.Sprintf("inode %d", some[0].ino), nil)
		}
		if err != nil {
			return nil, err
		}
		op := &meta.ReplaceExtents{Ino: some[0].ino}
		for _, x := range now {
			op.Old = append(op.Old, x.ext)
			x.ext.Chunk, x.ext.ChunkOff = f.target, x.to
			op.New = append(op.New, x.ext)
		}
		moved = len(now)
		return op, nil
	})
	if err != nil {
		moved = 0
	}
	return moved, err
}

// moveWait is how long a client may take to commit the writes that it buffered of a file whose
// bytes are to be moved.
const moveWait = 2 * time.Second

// swapped runs an operation that changes where bytes of a file lie. The owner first recalls the
// leases of sessions that cached the file's extents: they commit buffered writes, and drop the
// cache. No client loses bytes: a session that can't commit in time keeps its lease, and the
// file stays as before. swapped calls make with the owner's mu held, when no session has a lease
// on the file. Errors: Again (a session with a lease is away or does not give the lease up, for
// an unknown time), and make's.
func (c *compaction) swapped(ino meta.Ino, make func() (meta.Op, error)) (*meta.Result, error) {
	k := c.k
	var blocked lease.Blocker
	k.mu.Lock()
	defer k.mu.Unlock()
	defer c.leases.Unblock(&blocked)
	for {
		if k.failed != nil {
			return nil, k.failed
		}
		if c.leases.outOfReach(ino) {
			c.heldBack = true
			return nil, meta.E("move extents", meta.Again, fmt.Sprintf("inode %d", ino), errors.New("a client that is away, or can't commit its writes, may have cached their places"))
		}
		ch := c.leases.askInBackground(ino, meta.LeaseNone, moveWait)
		switch {
		case ch != nil:
			c.leases.Block(&blocked, ino)
		case k.queued > maxQueued:
			ch = k.untilDurable(k.queue[len(k.queue)-1].seq)
		}
		if ch == nil {
			break
		}
		k.mu.Unlock()
		look := time.NewTimer(k.srv.cfg.SessionTTL / 4) // a recalled session may go away
		select {
		case <-ch:
		case <-look.C:
		case <-k.ctx.Done():
		}
		look.Stop()
		k.mu.Lock()
		if k.ctx.Err() != nil {
			return nil, k.gone()
		}
	}
	op, err := make()
	var res *meta.Result
	if err == nil {
		res, err = k.run(op, 0)
	}
	return res, err
}
