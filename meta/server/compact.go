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

// Compaction moves extents to fresh chunks, for one of two ends: to win back the
// space of sealed chunks of which much is dead (sparseChunks), and to join what became
// fragments (placement.JoinRule). A batch of extents is one fresh chunk, made in
// this order, which may be left at any point:
//
//  1. the chunk is handed out, journaled (rule 4), on servers where the policy
//     wants data;
//  2. each of them gathers the bytes, verified, in the order of the batch, and
//     syncs them;
//  3. what is still mapped as it was read is mapped to the copy, by comparison: a
//     newer write is never covered. 2 and 3 go on in steps;
//  4. the chunk is sealed.
//
// Stopped before 3, the chunk is open and nothing refers to it: the collector
// seals and deletes it. Stopped after, it is sealed at what refers to it. The old
// chunks go when nothing refers to them. Nothing is written down for it: a
// successor finds the same by looking.

// Defaults of Config.
const (
	DefaultCompactInterval = 2 * time.Second
	DefaultCompactRate     = 64 << 20
	DefaultJoinLeast       = 16
	DefaultJoinSmall       = 256 << 10
	DefaultJoinInterval    = 5 * time.Minute
)

const (
	// A volume with fewer dead bytes than compactMin is left alone, and if they are
	// a quarter of what it holds (then there is little to look through) or more than
	// half of what lives in its chunks, one with fewer than compactLeast.
	compactMin   = 16 << 20
	compactLeast = 1 << 20
	// compactTarget is the largest chunk that compaction fills.
	compactTarget = 256 << 20
	// joinAlone is the size from which a file's fragments get a chunk of their own.
	joinAlone = 1 << 20
	// joinMost bounds the extents that one look gathers to be joined.
	joinMost = 200_000
	// joinWindow is how many extents of one file are looked at together.
	joinWindow = 100_000
	// walkShare: one part in so many of the time may go into looking through a
	// volume for fragments, or in vain for what would empty a chunk.
	walkShare = 50
	// copyBytes bounds one order to gather, in bytes: what is lost when it is
	// interrupted, and the time from reading an extent to moving it.
	copyBytes = 16 << 20
	// swapSome bounds the extents moved while the volume's lock is held.
	swapSome = 512
)

// compaction is how the looks of one owner stand. Only the task changes it.
type compaction struct {
	begun  meta.Seq                  // the newest entry when the task began
	joined time.Time                 // when extents were last looked through for fragments,
	took   time.Duration             // which took so long
	seen   meta.Seq                  // the newest entry at the last look of which all was joined
	passed map[meta.ChunkID]struct{} // came to nothing at a look (a snapshot keeps some of each, say): not looked for
	vain   time.Time                 // until then
	heldUp bool                      // some was left at the last look: see owner.outOfReach; guarded by the owner's mu

	files, fragments atomic.Uint64 // to be joined, when last looked for
	looks            atomic.Uint64 // begun
	walks            atomic.Uint64 // over all extents
}

// newCompactionTask looks for what to move, again and again.
func newCompactionTask(o *owner) *task.Task {
	every := o.srv.cfg.CompactInterval
	return task.New(task.Options{
		Name: "compact chunks", First: every, Failed: "compaction stopped, it is tried again", Log: o.log,
		Begin: func() {
			o.mu.Lock()
			o.compaction.begun = o.newest()
			o.mu.Unlock()
			o.compaction.joined = time.Now()
		},
		Round: func(ctx context.Context) (time.Duration, error) {
			o.compaction.looks.Add(1)
			err := o.compact()
			if err != nil && ctx.Err() == nil {
				o.srv.stats.compactFailed.Add(1)
			}
			if err != nil || o.heldUp() {
				return min(5*every, max(every, 30*time.Second)), err
			}
			return every, nil
		},
	})
}

// heldUp: at the last look some was left that a client has which is away, or holds on
// to it.
func (o *owner) heldUp() bool {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.compaction.heldUp
}

// joinSoon is when a volume that nobody is in any more, and that will be closed,
// is looked through for fragments.
const joinSoon = 10 * time.Second

// joinDue reports whether it is time to look for fragments.
func (o *owner) joinDue(newest meta.Seq, inUse bool) bool {
	c := &o.compaction
	if now := o.srv.cfg.joinNow; now != nil {
		return now()
	}
	if o.srv.cfg.JoinLeast < 2 || newest == c.seen || !inUse && newest == c.begun {
		return false // nothing changed, or it was only opened to be looked after
	}
	wait := o.srv.cfg.JoinInterval
	if !inUse || c.seen == 0 {
		wait = min(wait, joinSoon)
	}
	return time.Since(c.joined) >= max(wait, walkShare*c.took)
}

// victim is a chunk of which much is dead, and the live extents in it.
type victim struct {
	rec    meta.ChunkRecord
	chosen bool // to be emptied now
	files  []placement.Part
	found  uint64 // bytes of them
	kept   bool   // a snapshot sees some of them, or it is not worth copying otherwise
}

// compact looks at the volume as the journal has it, and moves what is worth it.
// What it finds may have changed by then: moving compares.
func (o *owner) compact() error {
	o.mu.Lock()
	if o.failed != nil || o.leaving != nil || o.closed != nil || o.stClosed || o.ctx.Err() != nil {
		o.mu.Unlock()
		return nil
	}
	o.compaction.heldUp = false
	newest, inUse := o.newest(), len(o.entered) > 0
	join := o.joinDue(newest, inUse)
	if join {
		// What shares extents since a moment ago is to be seen.
		o.mu.Unlock()
		if err := o.settled(o.ctx); err != nil {
			return err
		}
		o.mu.Lock()
		if o.stClosed || o.ctx.Err() != nil {
			o.mu.Unlock()
			return nil
		}
	}
	o.wg.Add(1) // the store is not closed under it
	frozen := o.st.Freeze()
	o.mu.Unlock()
	var batches []placement.Batch
	victims, err := o.sparse(frozen)
	if err == nil && (join || len(victims) > 0) {
		batches, err = o.lookThrough(frozen, victims, join)
	}
	err = errors.Join(err, frozen.Close())
	o.wg.Done()
	// What one batch can't do now does not keep the others from it.
	errs := []error{err}
	for i := range batches {
		if o.ctx.Err() != nil {
			break
		}
		errs = append(errs, o.fill(&batches[i]))
	}
	if len(batches) > 0 {
		o.tasks.collection.Wake()
	}
	// What failed is looked for again, though nothing changes.
	if err = errors.Join(errs...); err == nil && join && !o.heldUp() && o.ctx.Err() == nil {
		o.compaction.seen = newest
	}
	return err
}

// sparse finds the chunks that are worth emptying, if it is worth looking for what
// refers to them. Those that came to nothing lately are passed over.
func (o *owner) sparse(r namespace.Reader) (map[meta.ChunkID]*victim, error) {
	c := &o.compaction
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

// sparseChunks are sealed chunks in which something lives. Those more than half dead
// are emptied. Chunks that were filled while files were being deleted may end just
// short of that, all of them: where they take more than 1.5 times what lives in them,
// those more than a third dead are emptied. So a volume that is left alone takes at
// most 1.5 times what lives, and compactLeast; what a snapshot keeps is not in this.
type sparseChunks struct {
	length, live uint64  // of all
	half, third  victims // more than so much of them is dead
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

// choose marks those to be emptied now, the emptiest first: what lives in them is at most
// compactTarget bytes, unless it is a single chunk.
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

// worth gives what may be emptied, and some of it is chosen, if that is worth while in a
// volume that holds so many bytes.
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

// lookThrough walks over all extents, for what refers to victims and, with join,
// for fragments.
func (o *owner) lookThrough(r namespace.Reader, victims map[meta.ChunkID]*victim, join bool) ([]placement.Batch, error) {
	policy, err := namespace.Policy(r)
	if err != nil {
		return nil, err
	}
	began := time.Now()
	o.compaction.walks.Add(1)
	m := o.srv.servers()
	target := min(compactTarget, maxLen(policy, false))
	f := fragments{o: o, r: r, m: m, rule: placement.JoinRule{Least: o.srv.cfg.JoinLeast, Small: o.srv.cfg.JoinSmall}, may: map[meta.ChunkID]bool{}}
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
		return f.err == nil && o.ctx.Err() == nil
	})
	if err = errors.Join(err, f.err, context.Cause(o.ctx)); err != nil {
		return nil, err
	}
	batches := o.emptying(victims, m, &policy, target)
	o.pass(victims, time.Since(began))
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
	c := &o.compaction
	c.files.Store(uint64(len(files)))
	c.fragments.Store(n)
	c.joined, c.took = time.Now(), time.Since(began)
	if n == 0 {
		return batches, nil
	}
	o.log.Info("joining fragments", "files", len(files), "fragments", n, "looked", c.took.Round(time.Millisecond))
	return append(batches, placement.Batches(files, target, joinAlone)...), nil
}

// emptying makes batches of what is live in victims. Those of one set of servers
// share fresh chunks, which then lie there, too, and no byte crosses the network.
func (o *owner) emptying(victims map[meta.ChunkID]*victim, m *placement.Map, p *meta.Policy, target uint64) (batches []placement.Batch) {
	groups := map[string]map[meta.Ino][]placement.Piece{}
	n, dead := 0, uint64(0)
	for _, v := range victims {
		if !v.chosen {
			continue
		}
		if !o.worthCopying(v, m, p) {
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
	o.log.Info("compacting", "chunks", n, "dead", dead)
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

// pass notes which chunks a look that took so long found not to be worth copying. They
// are passed over while the next looks would take more than their share of the time.
func (o *owner) pass(victims map[meta.ChunkID]*victim, took time.Duration) {
	c := &o.compaction
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

// worthCopying: the copy would free the chunk, and it lies where it should. What
// a snapshot refers to would stay; what is to be repaired or moved is left to
// that first.
func (o *owner) worthCopying(v *victim, m *placement.Map, p *meta.Policy) bool {
	if v.found != v.rec.Live || v.kept {
		return false
	}
	for _, id := range v.rec.Servers {
		if s, ok := m.Server(id); !ok || s.State != placement.Live || o.faults.has(v.rec.ID, id) {
			return false
		}
	}
	return o.settledAt(&v.rec, m, p)
}

// settledAt: repair would leave the chunk where it is.
func (o *owner) settledAt(rec *meta.ChunkRecord, m *placement.Map, p *meta.Policy) bool {
	st := m.Plan(chance{}, p, o.faults.replicas(rec))
	return !st.Work()
}

// ---- fragments

// fragments gathers files with something to be joined.
type fragments struct {
	o    *owner
	r    namespace.Reader
	m    *placement.Map
	rule placement.JoinRule
	may  map[meta.ChunkID]bool // extents may leave this chunk; what is known of some

	ino    meta.Ino
	pieces []placement.Piece // of it
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

// movable: the chunk is sealed, this volume's, and can be read.
func (f *fragments) movable(id meta.ChunkID) bool {
	if id.IsZero() || id.Volume != f.o.vol {
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
	f.may[id] = rec.State == meta.ChunkSealed && !rec.Lost && len(f.o.readable(&rec, f.m)) > 0
	return f.may[id]
}

// readable lists the servers that a chunk can be read on.
func (o *owner) readable(rec *meta.ChunkRecord, m *placement.Map) (ids []meta.ServerID) {
	for _, id := range rec.Servers {
		if s, ok := m.Server(id); ok && (s.State == placement.Live || s.State == placement.Draining) && !o.faults.has(rec.ID, id) {
			ids = append(ids, id)
		}
	}
	return ids
}

// end takes in a file, or a window of one.
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

// trim leaves the most fragmented files, so many as one look deals with.
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

// finish leaves out what is referred to more than once, in any generation: each
// reference would need a copy of its own, or the bytes would lie in two places.
func (f *fragments) finish() ([]placement.Fragmented, error) {
	f.end()
	f.trim()
	if len(f.files) == 0 {
		return nil, nil
	}
	uses := placement.NewUses(f.files)
	if err := namespace.AllExtents(f.r, func(_ meta.Ino, e meta.Extent) bool {
		uses.Saw(&e)
		return f.o.ctx.Err() == nil
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
	return out, f.o.ctx.Err()
}

// ---- moving

// move is an extent that goes to an offset of the chunk being filled.
type move struct {
	ino meta.Ino
	ext meta.Extent
	to  uint64
}

// filler fills one chunk.
type filler struct {
	o       *owner
	policy  meta.Policy
	fence   meta.Fence
	target  meta.ChunkID // zero: not handed out yet
	servers []meta.ServerID
	at      uint64 // its length
	moved   int
}

// fill moves a batch into a fresh chunk. One chunk at a time is filled for all
// volumes of the process: that bounds what compaction copies.
func (o *owner) fill(b *placement.Batch) (err error) {
	select {
	case o.srv.filling <- struct{}{}:
		defer func() { <-o.srv.filling }()
	case <-o.ctx.Done():
		return nil
	}
	f := &filler{o: o}
	if f.policy, err = o.policy(); err != nil {
		return err
	}
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

// end seals the chunk. If it can't be, or nothing refers to it, the collector
// deals with it as with what writers leave open.
func (f *filler) end(err error) error {
	if f.target.IsZero() {
		return err
	}
	o := f.o
	defer func() {
		o.mu.Lock()
		delete(o.filling, f.target)
		o.mu.Unlock()
	}()
	if f.moved == 0 {
		return err
	}
	o.srv.stats.compacted.Add(1)
	_, sealErr := o.seal(o.ctx, f.target, nil)
	return errors.Join(err, sealErr)
}

// step moves some extents: those that are still there.
func (f *filler) step(some []move) error {
	o := f.o
	o.mu.Lock()
	if err := cmp.Or(o.failed, o.resting()); err != nil {
		o.mu.Unlock()
		return err
	}
	some, err := o.stillThere(some)
	// What was written over in its middle is two by now, and an order is bounded.
	var rest []move
	if len(some) > meta.MaxPieces {
		some, rest = some[:meta.MaxPieces], some[meta.MaxPieces:]
	}
	order := meta.Order{Kind: meta.OrderGather, Length: f.at, Rate: o.srv.cfg.CompactRate}
	var recs []meta.ChunkRecord
	if err == nil {
		recs, err = f.pieces(some, &order)
	}
	o.mu.Unlock()
	if err != nil || len(some) == 0 {
		return err
	}
	m := o.srv.servers()
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
	o.srv.stats.compactedBytes.Add(at - f.at)
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
		o.srv.stats.compactedExtents.Add(uint64(moved))
		some = some[n:]
	}
	if len(rest) > 0 {
		return f.step(rest)
	}
	return nil
}

// resting is why nothing is to be moved now. Caller holds mu.
func (o *owner) resting() error {
	switch {
	case o.leaving != nil:
		return errLeaving
	case o.closed != nil:
		return meta.E("compact", meta.Busy, "", errors.New("the volume is being rolled back"))
	}
	return o.full(&meta.ReplaceExtents{})
}

// stillThere narrows moves of files, each in order of offsets, to what is mapped
// as they say, seen by no snapshot, and within reach: what is not is
// looked for again. Caller holds mu.
func (o *owner) stillThere(some []move) (out []move, err error) {
	for len(some) > 0 {
		n := 1
		for n < len(some) && some[n].ino == some[0].ino {
			n++
		}
		file := some[:n]
		some = some[n:]
		if o.outOfReach(file[0].ino) {
			o.compaction.heldUp = true
			continue
		}
		i := 0
		err := namespace.FileExtents(&view{o: o}, file[0].ino, file[0].ext.Off, file[n-1].ext.End(), func(e meta.Extent, kept bool) bool {
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

// pieces fills in what an order is to gather, and gives the records of the
// chunks. Caller holds mu.
func (f *filler) pieces(some []move, order *meta.Order) (recs []meta.ChunkRecord, err error) {
	index := map[meta.ChunkID]uint32{}
	for _, x := range some {
		i, ok := index[x.ext.Chunk]
		if !ok {
			rec, _, err := namespace.ReadChunk(&view{o: f.o}, x.ext.Chunk)
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

// begin hands out the chunk: where its sources lie, if they lie together and
// where the policy wants them, else where a new chunk would.
func (f *filler) begin(recs []meta.ChunkRecord, m *placement.Map) error {
	o := f.o
	together := o.settledAt(&recs[0], m, &f.policy)
	servers := slices.Sorted(slices.Values(recs[0].Servers))
	for i := range recs {
		together = together && slices.Equal(servers, slices.Sorted(slices.Values(recs[i].Servers)))
	}
	for _, id := range servers {
		s, ok := m.Server(id)
		together = together && ok && s.State == placement.Live
	}
	if !together {
		placed, err := o.srv.place(1, &f.policy, placement.Writer{}, nil)
		if err != nil {
			return err
		}
		servers = placed[0]
	}
	f.servers, f.fence = servers, meta.Fence{Term: o.own.Term()}
	o.mu.Lock()
	if err := cmp.Or(o.failed, o.resting()); err != nil {
		o.mu.Unlock()
		return err
	}
	seq := o.cur.seq
	res, err := o.run(&meta.AllocChunks{N: 1, Servers: [][]meta.ServerID{servers}, Fence: f.fence}, 0)
	if err != nil {
		o.mu.Unlock()
		return err
	}
	f.target = res.Chunks[0].ID
	o.filling[f.target] = true
	wait := o.untilDurable(seq)
	o.mu.Unlock()
	return o.await(o.ctx, wait)
}

// gather has every replica of the chunk gather n bytes, side by side; they are
// then durable on each, or there is an error.
func (f *filler) gather(order meta.Order, recs []meta.ChunkRecord, m *placement.Map, n uint64) error {
	o := f.o
	known := map[meta.ServerID]bool{}
	for i := range recs {
		from := o.readable(&recs[i], m)
		for _, id := range from {
			if info, ok := o.srv.Resolve(id); ok && !known[id] {
				info.Disks = nil
				order.Sources = append(order.Sources, info)
				known[id] = true
			}
		}
		order.Chunks = append(order.Chunks, meta.CopySource{Chunk: recs[i].ID, Length: recs[i].Length, CRC: recs[i].CRC, Servers: from})
	}
	rate, patience := copyTerms(n, order.Rate)
	order.Rate = rate
	return o.copyOn(o.ctx, f.servers, order, order.Length+n, patience, func(to meta.ServerID, or *meta.Order) {
		or.Chunks = slices.Clone(or.Chunks)
		for i := range or.Chunks {
			or.Chunks[i].Servers = m.Nearest(to, or.Chunks[i].Servers)
		}
		or.Cap = o.srv.sign(patience+time.Minute, capability.Claims{
			Volume: o.vol, Rights: capability.Read, Client: o.srv.certified(to), // who shows it
		})
	})
}

// copyOn has every replica of a chunk being filled carry out an order, side by
// side; the chunk then has length bytes on each, or an error. adjust, if not nil,
// changes what one of them is told.
func (o *owner) copyOn(ctx context.Context, servers []meta.ServerID, order meta.Order, length uint64, patience time.Duration, adjust func(meta.ServerID, *meta.Order)) error {
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

// errPolicyChanged is why a chunk that compaction fills is given up: what was written
// since the volume's policy changed must not come to lie in one of the policy before.
var errPolicyChanged error = meta.E("compact", meta.Unavailable, "", errors.New("the volume's policy says now that chunks lie elsewhere"))

// swap maps what is still there of some moves of one file to their copies, and
// tells how many extents that were.
func (f *filler) swap(some []move) (moved int, err error) {
	o := f.o
	_, err = o.swapped(some[0].ino, func() (meta.Op, error) {
		if err := o.resting(); err != nil {
			return nil, err
		}
		if p, err := namespace.Policy(&view{o: o}); err != nil || otherPlaces(&f.policy, &p) {
			return nil, cmp.Or(err, errPolicyChanged)
		}
		now, err := o.stillThere(some)
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

// moveWait is how long a client may take to commit what it buffered of a file whose
// bytes are to be moved.
const moveWait = 2 * time.Second

// swapped runs an operation that changes where bytes of a file lie. Sessions that
// cached the file's extents are asked to commit what they buffered, and to forget
// them. Nobody gives a byte up for it: who can't commit in time keeps its lease, and
// the file stays as it is. make is called with mu held, when nobody has a lease on the
// file. Errors: Again (a session that has a lease is away, or holds on to it: nobody
// knows when it gives that up), and make's.
func (o *owner) swapped(ino meta.Ino, make func() (meta.Op, error)) (*meta.Result, error) {
	var blocked lease.Blocker
	o.mu.Lock()
	defer o.mu.Unlock()
	defer o.leases.Unblock(&blocked)
	for {
		if o.failed != nil {
			return nil, o.failed
		}
		if o.outOfReach(ino) {
			o.compaction.heldUp = true
			return nil, meta.E("move extents", meta.Again, fmt.Sprintf("inode %d", ino), errors.New("a client that is away, or can't commit what it wrote, may have cached where they lie"))
		}
		ch := o.askInBackground(ino, meta.LeaseNone, moveWait)
		switch {
		case ch != nil:
			o.leases.Block(&blocked, ino)
		case o.queued > maxQueued:
			ch = o.untilDurable(o.queue[len(o.queue)-1].seq)
		}
		if ch == nil {
			break
		}
		o.mu.Unlock()
		look := time.NewTimer(o.srv.cfg.SessionTTL / 4) // whoever is asked may go away
		select {
		case <-ch:
		case <-look.C:
		case <-o.ctx.Done():
		}
		look.Stop()
		o.mu.Lock()
		if o.ctx.Err() != nil {
			return nil, o.gone()
		}
	}
	op, err := make()
	var res *meta.Result
	if err == nil {
		res, err = o.run(op, 0)
	}
	return res, err
}
