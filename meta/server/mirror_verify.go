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

// Blocks written to a mirror's target are read back and summed soon after arrival, while
// copying goes on: the blocks are then still in the memory of the chunk servers. Without such
// sums, the digest would read everything after the copy, while readers wait for the digest.
// The sums are recorded beside the sums of digests, keyed by the places of the bytes. The
// bytes at a place never change, so a sum stays right if the file changes meanwhile or the
// mirror's round is given up. Arrivals may also stay unsummed, if too many wait or the
// volume's owner changed: the digest then reads the blocks.
//
// Days may pass between a block's arrival and the moment when readers see the block. So a
// target's digest believes the sum of a block that no earlier digest had only if a chunk
// server reads a replica of the block's chunk once more and the replica agrees with its
// checksums. The server reads its own disk, without the network between (OrderVerify). The
// checksums cover the same bytes that were read and compared by SHA-256. Whether a digest had
// a block is decided when the sum is recorded: the end of another digest of the volume proves
// nothing about arrivals, nor about blocks that a failed digest read or had verified.

const (
	// maxArrived bounds the ranges waiting to be summed.
	maxArrived = 1 << 16
	// arrivedStep is how many bytes of a file are mapped by one query.
	arrivedStep = 64 * digest.BlockSize
	// vouchers bounds the chunks of a volume being verified at a time. A chunk server carries
	// out more long orders than vouchers at once, since repair needs some too. maxVouched
	// bounds the verified chunks that a digest remembers.
	vouchers   = 2
	maxVouched = 1 << 16
)

// arrival is a written range of a file, [lo, hi).
type arrival struct {
	ino    meta.Ino
	lo, hi uint64
}

// arrived queues the extents of a write to a mirror's target for summing.
func (mt *mirrorTarget) arrived(w *meta.Write) {
	k := mt.k
	d := mt.digesting
	if !k.srv.digestsHere() {
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
		k.tasks.digests.Wake()
	}
}

// nextArrival takes the oldest arrival from the queue.
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

// forgetArrivals empties the queue: the digest reads the blocks.
func (d *digesting) forgetArrivals() {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.arrivals = nil
}

// sumArrivals sums the queued arrivals until the queue is empty or a caller waits for a
// digest.
func (mt *mirrorTarget) sumArrivals() (err error) {
	k := mt.k
	t := &turn{d: mt.digesting, arrivals: true}
	defer t.leave()
	mt.digesting.digestBusy(true)
	defer mt.digesting.digestBusy(false)
	if err := t.take(k.ctx, 0, 0); errors.Is(err, errOvertaken) {
		return nil
	} else if err != nil {
		return err
	}
	if t.blocks, err = known.Open(k.ctx, k.srv.trash.digestDir(k.vol)); err != nil {
		return err
	}
	t.blocks.Growing = t.leave
	defer func() { err = errors.Join(err, t.blocks.Close()) }()
	for {
		a, ok := mt.digesting.nextArrival()
		if !ok {
			return nil
		}
		if err := t.sumArrival(a); err != nil {
			switch {
			case k.ctx.Err() != nil:
				return k.gone()
			case errors.Is(err, errOvertaken):
				return nil
			}
			// The digest reads the blocks later, and reports an error that lasts.
			k.log.Debug("what arrived could not be summed yet", "inode", a.ino, "error", err)
		}
	}
}

// sumArrival sums the blocks of the live tree that lie at least partly in an arrival.
func (t *turn) sumArrival(a arrival) error {
	k := t.d.k
	ask := func(op meta.Op) (*meta.Result, error) {
		if err := t.take(k.ctx, 1, 0); err != nil {
			return nil, err
		}
		return t.d.reading.ask(k.ctx, 0, op, t.leave)
	}
	res, err := ask(&meta.GetAttr{Ino: a.ino})
	if meta.KindOf(err) == meta.Stale {
		return nil // the file was removed
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

// arrivedBuffers are the buffers of sumBlocks.
var arrivedBuffers = sync.Pool{New: func() any { return new([digest.BlockSize]byte) }}

// sumBlocks sums the blocks in [lo, hi) without a recorded sum, up to aside blocks at a time.
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
			if err := t.take(t.d.k.ctx, 0, int(n)); err != nil {
				wg.Wait()
				return err
			}
			b, at := &block{places: places}, lo
			some = append(some, b)
			wg.Go(func() {
				buf := arrivedBuffers.Get().(*[digest.BlockSize]byte)
				defer arrivedBuffers.Put(buf)
				p := buf[:n]
				if b.err = t.d.reading.readMapped(t.d.k.ctx, m, p, at); b.err == nil {
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

// anyKnown returns a block's sum as recorded by a digest or by an arrival.
func anyKnown(blocks *known.Blocks, places digest.Sum) (block digest.Sum, ok bool) {
	if block, ok = blocks.Get(places); ok {
		return block, true
	}
	return blocks.GetUnproved(places)
}

// vouching is the digest.Known of a mirror target's digest. A chunk server verifies the blocks
// believed without reading, each chunk once.
type vouching struct {
	t      *turn
	proved *known.Apart // blocks first used by this digest; known once all verify
	group  *errgroup.Group
	ctx    context.Context // ends when a chunk does not verify
	cancel context.CancelFunc
	begun  map[meta.ChunkID]bool // chunks ordered to verify; false: open, so not enough
}

var _ digest.Known = (*vouching)(nil)

// newVouching begins a vouching. The caller ends it by wait and proved.Close.
func (t *turn) newVouching() (*vouching, error) {
	proved, err := t.blocks.Apart()
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancel(t.d.k.ctx)
	g, ctx := errgroup.WithContext(ctx)
	g.SetLimit(vouchers)
	return &vouching{t: t, proved: proved, group: g, ctx: ctx, cancel: cancel, begun: map[meta.ChunkID]bool{}}, nil
}

// wait waits for all orders begun; if the digest failed with err, wait cancels the orders. It
// returns why the digest fails; nil: every chunk verified.
func (v *vouching) wait(err error) error {
	v.t.leave()
	before := v.ctx.Err() == nil
	if err != nil {
		v.cancel()
	}
	defer v.cancel()
	if found := v.group.Wait(); found != nil && (err == nil || !before) {
		return found // the cause; err may only be the cancellation by found
	}
	return err
}

// rate is the speed limit of one chunk's verification, in bytes a second: all vouchers
// together verify as fast as the digest may read. Zero: unlimited.
func (v *vouching) rate() uint64 {
	d := &v.t.d.k.srv.digests
	lane := &d.background
	if awaited, unpaced := v.t.d.isAwaited(v.t.sn.At); unpaced {
		return 0
	} else if awaited {
		lane = &d.awaited
	}
	return uint64(lane.limit.Limit()) / vouchers
}

// Get returns a recorded block. The digest uses the block only if believe agrees.
func (v *vouching) Get(places digest.Sum) (block digest.Sum, ok bool) {
	return anyKnown(v.t.blocks, places)
}

// Put remembers a block that was read.
func (v *vouching) Put(places, block digest.Sum) {
	v.t.blocks.PutUnproved(places, block)
	v.proved.Put(places, block)
}

// believe reports whether the digest may use a recorded block without reading it.
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

// block orders the verification of the chunks with bytes of extents below hi. It returns false
// if the digest must read the block: a chunk has no servers, is lost, or is open, so that no
// record says its length.
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
		k := v.t.d.k
		k.mu.Lock()
		rec, _, err := namespace.ReadChunk(k.view(), e.Chunk)
		k.mu.Unlock()
		if err != nil || rec.Lost || len(rec.Servers) == 0 {
			return false
		}
		if len(v.begun) >= maxVouched {
			clear(v.begun)
		}
		enough := rec.State == meta.ChunkSealed
		v.begun[e.Chunk] = enough
		rate := v.rate()
		vouch := func() error { return v.t.d.mirror.vouch(v.ctx, &rec, rate) }
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

// vouch has a chunk's servers, one after another until the first success, read all of their
// replica and compare it with its checksums. rate is in bytes a second; zero: unlimited.
// Errors: Corrupt if any server found so, else the error of the last server asked.
func (mt *mirrorTarget) vouch(ctx context.Context, rec *meta.ChunkRecord, rate uint64) (worst error) {
	// The record of an open chunk does not say the length. The order may wait for other long
	// orders.
	length := max(rec.Length, 256<<20)
	patience := copyPatience + time.Duration(length/minCopyRate)*time.Second
	if rate != 0 {
		patience += time.Duration(length/rate) * time.Second
	}
	for _, id := range rec.Servers {
		err := mt.repairing.verifyReplica(ctx, rec, id, rate, patience)
		if err == nil {
			return nil
		}
		if meta.KindOf(worst) != meta.Corrupt {
			worst = err
		}
	}
	return fmt.Errorf("chunk %v, which was copied before: %w", rec.ID, worst)
}
