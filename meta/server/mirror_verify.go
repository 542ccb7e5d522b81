package server

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/digest"
	"penstock.io/penstock/meta/digest/known"
	"penstock.io/penstock/meta/namespace"
)

// What is written to a mirror's target is read back and summed as it arrives, beside
// the copying, and not only when all of it is there and readers wait for the digest:
// then it is in the chunk servers' memory, too. The sums are remembered beside those of
// digests, by the places of the bytes, which never change; so it does no harm if a
// file is changed meanwhile, or the round given up. Nor if what arrives is not summed
// at all, since there is too much of it or the owner is another: then the digest reads
// it.
//
// But days may pass between a block's arrival and the moment when readers see it. So a
// target's digest believes no block that no digest has had before unless a replica of
// its chunk was read once more by its server, and agrees with its checksums: on the
// disks of its server, without a network between (OrderVerify). What was read and
// compared by SHA-256 is what that checksum is of. What a digest had is remembered as
// such when it was recorded: what others of the volume finish meanwhile proves nothing of
// what arrived, nor of what this one read or had verified before it failed.

const (
	// maxArrived bounds the ranges that wait to be summed.
	maxArrived = 1 << 16
	// arrivedStep is how many bytes of a file are asked for at once.
	arrivedStep = 64 * digest.BlockSize
	// vouchers are the chunks of a volume that are verified at a time, fewer than the
	// long orders that a chunk server carries out at once, which repair needs, too;
	// maxVouched are those that are remembered to have been.
	vouchers   = 2
	maxVouched = 1 << 16
)

// arrival is a range of a file that was written.
type arrival struct {
	ino    meta.Ino
	lo, hi uint64
}

// arrived notes what was written to a mirror's target.
func (o *owner) arrived(w *meta.Write) {
	d := &o.digesting
	if !o.srv.digestsHere() {
		return
	}
	d.mu.Lock()
	for _, e := range w.Extents {
		if n := len(d.arrivals); n > 0 && d.arrivals[n-1].ino == w.Ino && d.arrivals[n-1].hi == e.Off {
			d.arrivals[n-1].hi = e.End()
		} else if n < maxArrived {
			d.arrivals = append(d.arrivals, arrival{w.Ino, e.Off, e.End()})
		}
	}
	some := len(d.arrivals) > 0
	d.mu.Unlock()
	if some {
		o.tasks.digests.Wake()
	}
}

// nextArrival takes one from the queue.
func (d *digesting) nextArrival() (a arrival, ok bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if len(d.arrivals) == 0 {
		d.arrivals = nil
		return a, false
	}
	a = d.arrivals[0]
	d.arrivals = d.arrivals[1:]
	return a, true
}

func (d *digesting) someArrived() bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return len(d.arrivals) > 0
}

// forgetArrivals leaves all of them to the digest.
func (d *digesting) forgetArrivals() {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.arrivals = nil
}

// sumArrivals sums what arrived, until there is no more or somebody waits for a digest.
func (o *owner) sumArrivals() (err error) {
	t := &turn{o: o, arrivals: true}
	defer t.leave()
	o.digestBusy(true)
	defer o.digestBusy(false)
	if err := t.take(o.ctx, 0, 0); errors.Is(err, errOvertaken) {
		return nil
	} else if err != nil {
		return err
	}
	if t.blocks, err = known.Open(o.ctx, o.srv.digestDir(o.vol)); err != nil {
		return err
	}
	t.blocks.Growing = t.leave
	defer func() { err = errors.Join(err, t.blocks.Close()) }()
	for {
		a, ok := o.digesting.nextArrival()
		if !ok {
			return nil
		}
		if err := t.sumArrival(a); err != nil {
			switch {
			case o.ctx.Err() != nil:
				return o.gone()
			case errors.Is(err, errOvertaken):
				return nil
			}
			// The digest reads it, and says what is wrong if that lasts.
			o.log.Debug("what arrived could not be summed yet", "inode", a.ino, "error", err)
		}
	}
}

// sumArrival sums the blocks that lie in a range of the live tree, or partly.
func (t *turn) sumArrival(a arrival) error {
	o := t.o
	ask := func(op meta.Op) (*meta.Result, error) {
		if err := t.take(o.ctx, 1, 0); err != nil {
			return nil, err
		}
		return o.askAt(o.ctx, 0, op, t.leave)
	}
	res, err := ask(&meta.GetAttr{Ino: a.ino})
	if meta.KindOf(err) == meta.Stale {
		return nil // removed since
	}
	if err != nil {
		return err
	}
	size := res.Attr.Size
	a.hi = min((a.hi+digest.BlockSize-1)/digest.BlockSize*digest.BlockSize, size)
	for off := a.lo / digest.BlockSize * digest.BlockSize; off < a.hi; off += arrivedStep {
		end := min(off+arrivedStep, a.hi)
		var m fileMap
		if err := m.ask(ask, a.ino, off, end); err != nil {
			return err
		}
		if err := t.sumBlocks(&m, off, end); err != nil {
			return err
		}
	}
	return nil
}

// arrivedBuffers are what sumBlocks reads into.
var arrivedBuffers = sync.Pool{New: func() any { return new([digest.BlockSize]byte) }}

// sumBlocks sums what is not known of some blocks, several at a time.
func (t *turn) sumBlocks(m *fileMap, lo, hi uint64) error {
	type block struct {
		places, sum digest.Sum
		err         error
	}
	for lo < hi {
		var wg sync.WaitGroup
		var some []*block
		for ; lo < hi && len(some) < t.aside(); lo += digest.BlockSize {
			n := min(digest.BlockSize, hi-lo)
			places, any := digest.PlacesOf(m.extents, lo, lo+n)
			if !any || lo < uint64(len(m.inline)) {
				continue
			}
			if _, ok := anyKnown(t.blocks, places); ok {
				continue
			}
			if err := t.take(t.o.ctx, 0, int(n)); err != nil {
				wg.Wait()
				return err
			}
			b, at := &block{places: places}, lo
			some = append(some, b)
			wg.Go(func() {
				buf := arrivedBuffers.Get().(*[digest.BlockSize]byte)
				defer arrivedBuffers.Put(buf)
				p := buf[:n]
				if b.err = t.o.readMapped(t.o.ctx, m, p, at); b.err == nil {
					b.sum = digest.Block(p)
				}
			})
		}
		wg.Wait()
		for _, b := range some {
			if b.err != nil {
				return b.err
			}
			t.blocks.PutUnproved(b.places, b.sum)
		}
	}
	return nil
}

// anyKnown finds what a digest had, or what arrived.
func anyKnown(blocks *known.Blocks, places digest.Sum) (block digest.Sum, ok bool) {
	if block, ok = blocks.Get(places); ok {
		return block, true
	}
	return blocks.GetUnproved(places)
}

// vouching is what the digest of a mirror's target knows: what it believes without
// reading it is verified where it lies, each chunk once.
type vouching struct {
	t      *turn
	proved *known.Apart // if all of them are right, what is used of them for the first time
	group  *errgroup.Group
	ctx    context.Context // ends when a chunk does not verify
	cancel context.CancelFunc
	begun  map[meta.ChunkID]bool // whether that says enough: not of an open one
}

var _ digest.Known = (*vouching)(nil)

// newVouching is to be ended by wait and proved.Close.
func (t *turn) newVouching() (*vouching, error) {
	proved, err := t.blocks.Apart()
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancel(t.o.ctx)
	g, ctx := errgroup.WithContext(ctx)
	g.SetLimit(vouchers)
	return &vouching{t: t, proved: proved, group: g, ctx: ctx, cancel: cancel, begun: map[meta.ChunkID]bool{}}, nil
}

// wait waits for all that was begun, or has it end if the digest failed with err. It
// gives why there is no digest; nil: all of it is right.
func (v *vouching) wait(err error) error {
	v.t.leave()
	before := v.ctx.Err() == nil
	if err != nil {
		v.cancel()
	}
	defer v.cancel()
	if found := v.group.Wait(); found != nil && (err == nil || !before) {
		return found // rather than that the digest was ended for it
	}
	return err
}

// rate is how fast a server is to verify, in bytes a second: all of them together as
// fast as the digest may read; zero: that is at no rate.
func (v *vouching) rate() uint64 {
	d := &v.t.o.srv.digests
	lane := &d.background
	if awaited, unpaced := v.t.o.digesting.isAwaited(v.t.sn.At); unpaced {
		return 0
	} else if awaited {
		lane = &d.awaited
	}
	return uint64(lane.limit.Limit()) / vouchers
}

// Get finds a block that is to be believed if believe says so.
func (v *vouching) Get(places digest.Sum) (block digest.Sum, ok bool) {
	return anyKnown(v.t.blocks, places)
}

// Put remembers a block that was read.
func (v *vouching) Put(places, block digest.Sum) {
	v.t.blocks.PutUnproved(places, block)
	v.proved.Put(places, block)
}

// believe tells whether a block need not be read.
func (v *vouching) believe(extents []meta.Extent, hi uint64, places, block digest.Sum) bool {
	switch {
	case v.t.blocks.Before(places):
		return true
	case v.block(extents, hi):
		v.proved.Put(places, block)
		return true
	}
	return false
}

// block has the chunks verified that the bytes below hi lie in; it gives false if the
// owner does not know where that is, or what is to be there: of an open chunk no record
// says how long it is.
func (v *vouching) block(extents []meta.Extent, hi uint64) bool {
	for _, e := range extents {
		if e.Off >= hi {
			break
		}
		if enough, ok := v.begun[e.Chunk]; ok && !enough {
			return false
		} else if ok || e.Chunk.IsZero() {
			continue
		}
		o := v.t.o
		o.mu.Lock()
		rec, _, err := namespace.ReadChunk(&view{o: o}, e.Chunk)
		o.mu.Unlock()
		if err != nil || rec.Lost || len(rec.Servers) == 0 {
			return false
		}
		if len(v.begun) >= maxVouched {
			clear(v.begun)
		}
		enough := rec.State == meta.ChunkSealed
		v.begun[e.Chunk] = enough
		rate := v.rate()
		vouch := func() error { return o.vouch(v.ctx, &rec, rate) }
		if !v.group.TryGo(vouch) {
			v.t.leave()
			v.group.Go(vouch)
		}
		if !enough {
			return false
		}
	}
	return true
}

// vouch has one of a chunk's servers read all of it, at a rate unless that is zero,
// and compare it with its checksums.
// Errors: Corrupt if that is what one of them found, else of the last that was asked.
func (o *owner) vouch(ctx context.Context, rec *meta.ChunkRecord, rate uint64) (worst error) {
	// Of an open chunk the record does not say how long it is. It may wait for other long
	// orders.
	length := max(rec.Length, 256<<20)
	patience := copyPatience + time.Duration(length/minCopyRate)*time.Second
	if rate != 0 {
		patience += time.Duration(length/rate) * time.Second
	}
	for _, id := range rec.Servers {
		err := o.verifyReplica(ctx, rec, id, rate, patience)
		if err == nil {
			return nil
		}
		if meta.KindOf(worst) != meta.Corrupt {
			worst = err
		}
	}
	return fmt.Errorf("chunk %v, which was copied before: %w", rec.ID, worst)
}
