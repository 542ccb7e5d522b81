package penstock

import (
	"context"
	"errors"
	"sync"
	"time"

	"penstock.io/penstock/meta"
)

// How buffered bytes become durable:
//
//	capture  freeze the buffered bytes (under the inode's mu)
//	push     append the bytes to chunks
//	sync     sync each chunk once, whatever the number of files
//	commit   the extents of many files in one batch, marked as synced
//	finish   replace the captured blobs by references to chunks
//
// A file may have an open end: the journal has the file's last extent without a length, and the
// extent covers all synced bytes of the file's own chunk. An fsync of bytes appended there
// needs no commit. If a chunk fails on the way, the owner seals the chunk, and the flush
// appends the chunk's unsynced bytes to a fresh chunk: bytes stay in memory until their commit.

type flushMode uint8

const (
	flushKeep  flushMode = iota // in the background
	flushFsync                  // an application waits for one file
	flushClose                  // a recall, the last close or a truncation waits: the open end is closed, too
)

// Bounds of a flush.
const (
	flushFor     = 15 * time.Second // of one round; after failures, the round tries other chunks
	maxExtents   = 2048             // of one Write
	gatherSize   = 1 << 20          // bytes of small blobs of one append
	gatherBelow  = 64 << 10         // smaller blobs are copied together
	groupBytes   = 16 << 20         // bytes of one background round
	groupFiles   = 512              // files of one background round
	inlineBatch  = 256 << 10        // inline bytes of one batch
	ownChunkFrom = 1 << 20          // a file gets its own chunk for at least this many bytes to append
	endedAfter   = 2                // fsyncs of an appended tail before the journal gets an open end
)

// work is one file's part of a flush.
type work struct {
	in     *inode
	f      *file
	mode   flushMode
	segs   []segment // captured, in file order, all with blobs
	blobs  []*blob   // of the segments, each blob once
	inline bool
	data   []byte // inline
	size   uint64
	mtime  meta.Time
	puts   uint32
	epoch  uint64 // epoch of the volume in which the captured bytes were written
	fast   bool   // the open end in the journal covers the bytes: no commit
	open   bool   // commit the last extent open-ended
	close  bool   // commit an explicit end of the open-ended extent
	seal   bool
	own    *chunk // with seal: the file's own chunk, to be sealed before the file
	idle   bool   // nothing to do
	done   bool
	err    error
	ops    int // operations that are sent in a batch and not answered yet
	// admitted is the file's promise at the time of the capture. promised is the part that
	// goes with the commit, and returns to the file if the commit fails.
	admitted uint64
	promised promise
	// pushTurn: this flush holds the file's push turn.
	pushTurn bool
}

// capture freezes the bytes of a file that are to be flushed. The caller holds the inode's mu
// and both turns (turnPush and turnCommit).
func (wb *writeBack) capture(w *work) {
	in, f := w.in, w.in.fileLocked()
	w.f, w.segs, w.blobs, w.data = f, nil, nil, nil
	w.inline, w.fast, w.open, w.close, w.seal, w.idle, w.own = false, false, false, false, false, false, nil
	w.size, w.mtime, w.puts, w.epoch = f.size, f.mtime, f.puts, f.epoch
	w.admitted = wb.v.meter.has(&f.promised)
	w.seal = f.sealWant
	if f.uncommitted == 0 && !f.metaDirty && !w.seal && !(f.own.ended && w.mode == flushClose) {
		w.idle = true
		return
	}
	if w.mtime == 0 && in.attrOK {
		w.mtime = in.attr.Mtime
	}
	dirty := false
	if f.uncommitted > 0 {
		var upTo uint64
		collect := func(s *segment) bool {
			if s.b != nil && s.off >= upTo {
				w.segs = append(w.segs, *s)
				dirty = dirty || !s.b.clean
				upTo = s.end()
			}
			return true
		}
		f.m.each(0, meta.InlineMax, collect) // every commit includes inline bytes
		f.m.each(f.lo, f.hi, collect)
	}
	if !dirty {
		w.segs = nil
	}
	chunked := f.own.chunk != nil || f.own.ended
	if !chunked && w.size <= meta.InlineMax && dirty {
		f.m.each(0, 1<<63, func(s *segment) bool { // preallocated space counts, too
			chunked = s.ref != nil || s.b == nil
			return !chunked
		})
		w.inline = !chunked
	}
	if w.inline {
		w.data = make([]byte, w.size)
		planRead(&f.m, w.size, w.data, 0, nil)
	}
	for _, s := range w.segs {
		b := s.b
		if b.busy > 0 {
			continue // captured with an earlier segment; no other flush can have captured b, since the caller holds both turns
		}
		b.busy++
		b.frozen = true
		if b.clean && !w.inline { // the blob goes to a chunk with the other blobs
			b.clean = false
			n := int64(len(b.data))
			wb.v.c.buf.force(n)
			wb.dirtyBytes.Add(n)
			f.uncommitted += n
			f.unpushed += n
		}
		w.blobs = append(w.blobs, b)
	}
	tail := w.tailFrom(f)
	switch {
	case f.own.ended:
		if w.mode == flushClose || !w.fitsEnd(f) || w.inline || w.seal || f.own.chunk.doubtful() {
			w.close = true
		} else {
			w.fast = true
		}
	case w.mode == flushFsync && tail != 0 && in.lease == meta.LeaseExclusive && f.users.writers > 0 && !w.inline:
		if f.appends < 250 {
			f.appends++
		}
		w.open = f.appends > endedAfter && !w.seal
	case w.mode == flushFsync:
		f.appends = 0
	}
}

// fitsEnd reports that the captured bytes directly follow the open end in the file's own
// chunk.
func (w *work) fitsEnd(f *file) bool {
	at := f.own.base + f.own.upTo
	chunk := f.own.upTo
	fresh := false
	for _, s := range w.segs {
		if s.off != at || s.pos != 0 || s.n != uint64(len(s.b.data)) {
			return false
		}
		if s.b.cw != nil {
			if fresh || s.b.cw != f.own.chunk || s.b.off != chunk {
				return false
			}
		} else if !fresh {
			if fresh = true; chunk != f.own.chunk.w.Len() {
				return false
			}
		}
		at += s.n
		chunk += s.n
	}
	return len(w.segs) == 0 || at == w.size && f.m.end() == at
}

// tailFrom returns the offset of the captured bytes if the bytes are one run up to the end of
// the file; else zero.
func (w *work) tailFrom(f *file) uint64 {
	if len(w.segs) == 0 {
		return 0
	}
	for i := 1; i < len(w.segs); i++ {
		if w.segs[i-1].end() != w.segs[i].off {
			return 0
		}
	}
	if w.segs[len(w.segs)-1].end() != w.size || f.m.end() != w.size {
		return 0
	}
	for _, s := range w.segs {
		if s.pos != 0 || s.n != uint64(len(s.b.data)) {
			return 0
		}
	}
	return w.segs[0].off
}

// release ends a capture: the blobs that are not committed can be captured again.
func (wb *writeBack) release(w *work) {
	for _, b := range w.blobs {
		b.busy--
		wb.v.buffers.settle(b)
	}
	w.blobs, w.segs = nil, nil
}

// placed notes where a blob was appended.
func (wb *writeBack) placed(in *inode, b *blob, c *chunk, off uint64) {
	c.holdBlob()
	in.mu.Lock()
	b.cw, b.off, b.synced = c, off, false
	if b.refs > 0 {
		in.file.unpushed -= int64(len(b.data))
	}
	in.mu.Unlock()
}

// push appends the captured blobs that are in no chunk yet. The caller holds the push turn.
func (wb *writeBack) push(ctx context.Context, w *work, g *gather) error {
	v := wb.v
	if w.inline || w.idle {
		return nil
	}
	in, f := w.in, w.f
	for i, s := range w.segs {
		b := s.b
		in.mu.Lock()
		err := in.expiredSince(f, w.epoch)
		placed := b.cw != nil
		own, base := f.own.chunk, f.own.base
		in.mu.Unlock()
		if err != nil {
			return err
		}
		if placed {
			continue
		}
		whole := s.pos == 0 && s.n == uint64(len(b.data))
		if own != nil && (w.close && f.own.ended || own.doubtful() || own.w.Len()+s.n > own.max) && !(w.fast) {
			wb.dropOwn(in, f, own)
			own = nil
		}
		if own == nil && whole && !(w.close && f.own.ended) && (w.open || w.runFrom(i) >= ownChunkFrom && wb.atEnd(in, f, s.off)) && f.own.chunk == nil {
			c, err := v.chunks.newOwn(ctx)
			if err != nil {
				return err
			}
			in.mu.Lock()
			if err = in.expiredSince(f, w.epoch); err == nil {
				f.own.chunk, f.own.base = c, s.off
			}
			in.mu.Unlock()
			if err != nil {
				v.chunks.retire(c)
				return err
			}
			own, base = c, s.off
		}
		if own != nil && whole && s.off == base+own.w.Len() {
			off, err := own.w.Append(ctx, b.data)
			if err == nil {
				v.c.stats.appended.Add(uint64(len(b.data)))
				wb.placed(in, b, own, off)
				continue
			}
			if ctx.Err() != nil {
				return err
			}
			if !errors.Is(err, meta.FileTooBig) {
				v.chunks.breakChunk(own, err)
			}
			wb.dropOwn(in, f, own)
			if w.fast || w.open {
				return errors.Join(errAgain, err)
			}
		}
		if w.fast { // the chunk is full, or the bytes don't fit after all: capture again and close the open end
			return meta.E("append", meta.Again, own.id.String(), nil)
		}
		if len(b.data) < gatherBelow {
			if err := g.add(ctx, w, b); err != nil {
				return err
			}
			continue
		}
		c, off, err := v.chunks.appendPacked(ctx, b.data)
		if err != nil {
			return err
		}
		wb.placed(in, b, c, off)
	}
	return nil
}

// dropOwn forgets a file's own chunk, unless the journal has an open end in the chunk.
func (wb *writeBack) dropOwn(in *inode, f *file, own *chunk) {
	in.mu.Lock()
	drop := f.own.chunk == own && !f.own.ended
	if drop {
		f.own.chunk = nil
	}
	in.mu.Unlock()
	if drop {
		wb.v.chunks.retire(own)
	}
}

// runFrom is the length of the unbroken run of captured bytes from segment i.
func (w *work) runFrom(i int) (n uint64) {
	for j := i; j < len(w.segs); j++ {
		if j > i && w.segs[j-1].end() != w.segs[j].off {
			break
		}
		if n += w.segs[j].n; n >= ownChunkFrom {
			break
		}
	}
	return n
}

// atEnd reports that nothing is committed at or after off: bytes appended at off become the
// end of the file.
func (wb *writeBack) atEnd(in *inode, f *file, off uint64) bool {
	in.mu.Lock()
	defer in.mu.Unlock()
	free := true
	f.m.each(off, 1<<63, func(s *segment) bool {
		free = s.b != nil
		return free
	})
	return free
}

// flushGroup flushes files, and sets the error of each file. The caller holds the commit turn
// and the push turn of each file; with leavePush, flushGroup leaves the push turns after the
// appends.
func (wb *writeBack) flushGroup(ctx context.Context, ws []*work, leavePush bool) {
	for _, w := range ws {
		w.pushTurn = true
	}
	wb.pushGroup(ctx, ws, leavePush)
	wb.commitGroup(ctx, ws)
	for begun, pause := time.Now(), time.Duration(0); pause == 0 || time.Since(begun) < flushFor && !recalled(ws); pause = min(2*pause+10*time.Millisecond, time.Second) {
		var again []*work
		for _, w := range ws {
			if w.err == nil || !errors.Is(w.err, errAgain) || ctx.Err() != nil {
				continue
			}
			w.in.mu.Lock()
			if w.stale() { // the captured bytes are of an epoch that has ended
				w.err = w.in.expiredSince(w.f, w.epoch)
			} else {
				again = append(again, w)
			}
			w.in.mu.Unlock()
		}
		if len(again) == 0 {
			return
		}
		if pause > 0 { // the first retry usually gets a better chunk at once
			select {
			case <-time.After(pause):
			case <-ctx.Done():
				return
			}
		}
		for _, w := range again {
			w.err = nil
			if leavePush {
				w.in.mu.Lock()
				if _, w.err = w.in.take(ctx, turnPush); w.err == nil {
					w.pushTurn = true
				}
				w.in.mu.Unlock()
			}
		}
		wb.pushGroup(ctx, again, leavePush)
		wb.commitGroup(ctx, again)
	}
}

// errAgain reports a failed chunk: the chunk's bytes must be appended again.
var errAgain = errors.New("a chunk failed")

func (wb *writeBack) pushGroup(ctx context.Context, ws []*work, leavePush bool) {
	g := gather{v: wb.v}
	defer g.close()
	for _, w := range ws {
		if w.err != nil {
			continue
		}
		w.in.mu.Lock()
		if !w.pushTurn {
			// A stream leaves its turn after some blocks. Every other holder of the push turn
			// holds the commit turn, too.
			if _, w.err = w.in.take(ctx, turnPush); w.err != nil {
				w.in.mu.Unlock()
				continue
			}
			w.pushTurn = true
		}
		wb.capture(w)
		w.in.mu.Unlock()
		if err := wb.push(ctx, w, &g); err != nil {
			w.err = errors.Join(w.err, pushAgain(ctx, err))
		}
		if n := len(g.list); w.err == nil && leavePush && (n == 0 || g.list[n-1].w != w) {
			w.endPush() // a stream may go on while others of the group are appended
		}
	}
	_ = g.flush(ctx) // flush sets the error of each file
	for _, w := range ws {
		w.in.mu.Lock()
		if w.err != nil {
			wb.release(w)
		}
		w.in.mu.Unlock()
		if leavePush && w.pushTurn {
			w.endPush()
		}
	}
}

func (w *work) endPush() {
	w.in.mu.Lock()
	defer w.in.mu.Unlock()
	w.pushTurn = false
	w.in.file.turns.leave(turnPush)
}

// pushAgain joins errAgain to err if another chunk may help: a chunk failed, perhaps because of
// a full disk. Another chunk does not help if the owner has no chunk to give.
func pushAgain(ctx context.Context, err error) error {
	if ctx.Err() != nil || errors.Is(err, errAgain) {
		return err
	}
	switch meta.KindOf(err) {
	case meta.NoSpace, meta.QuotaExceeded, meta.SessionExpired, meta.ReadOnly, meta.AccessDenied:
		return err
	}
	return errors.Join(errAgain, err)
}

// commitGroup syncs the chunks, commits and finishes.
func (wb *writeBack) commitGroup(ctx context.Context, ws []*work) {
	wb.syncGroup(ctx, ws)
	var ops []batchOp
	var of []*work
	var epoch uint64 // epoch of all operations in ops
	inline := 0
	send := func() {
		if len(ops) > 0 {
			wb.sendCommits(ctx, epoch, ops, of)
		}
		ops, of, inline = ops[:0], of[:0], 0
	}
	for _, w := range ws {
		if w.err != nil || w.idle && !w.close {
			continue
		}
		if w.fast {
			w.in.mu.Lock()
			wb.finish(w, nil, stamp{})
			w.in.mu.Unlock()
			continue
		}
		w.in.mu.Lock()
		if w.err = w.in.expiredSince(w.f, w.epoch); w.err != nil {
			w.in.mu.Unlock()
			continue
		}
		if w.seal {
			w.own = w.f.own.chunk
		}
		list := wb.commitOps(w)
		wb.v.meter.move(&w.f.promised, &w.promised, w.admitted)
		w.in.mu.Unlock()
		w.ops = len(list)
		if epoch != w.epoch {
			send()
			epoch = w.epoch
		}
		for i, op := range list {
			b := batchOp{Op: op, Draw: i < len(list)-1}
			if !b.Draw {
				b.Reserved = w.promised.n
			}
			ops, of = append(ops, b), append(of, w)
		}
		if inline += len(w.data); len(ops) >= groupFiles || inline >= inlineBatch {
			send()
		}
	}
	send()
	for _, w := range ws {
		if w.own != nil && w.err == nil {
			w.err = wb.sealFile(ctx, w)
		}
		w.in.mu.Lock()
		wb.release(w) // finish has released finished works
		w.in.mu.Unlock()
	}
}

// syncGroup syncs every chunk with blobs of the works once.
func (wb *writeBack) syncGroup(ctx context.Context, ws []*work) {
	var chunks []*chunk
	errs := make(map[*chunk]error)
	for _, w := range ws {
		if w.err != nil || w.inline {
			continue
		}
		w.in.mu.Lock()
		for _, b := range w.blobs {
			if b.cw == nil || b.synced {
				continue
			}
			if _, ok := errs[b.cw]; !ok {
				errs[b.cw] = nil
				chunks = append(chunks, b.cw)
			}
		}
		w.in.mu.Unlock()
	}
	if len(chunks) == 1 {
		errs[chunks[0]] = chunks[0].sync(ctx)
	} else if len(chunks) > 1 {
		var mu sync.Mutex
		var wg sync.WaitGroup
		for _, c := range chunks {
			wg.Go(func() {
				err := c.sync(ctx)
				mu.Lock()
				errs[c] = err
				mu.Unlock()
			})
		}
		wg.Wait()
	}
	for _, w := range ws {
		if w.err != nil || w.inline {
			continue
		}
		w.in.mu.Lock()
		for _, b := range w.blobs {
			if b.cw == nil || b.synced {
				continue
			}
			if err := errs[b.cw]; err != nil {
				if ctx.Err() == nil {
					err = errors.Join(errAgain, err)
				}
				w.err = errors.Join(w.err, err)
				if b.cw.isBroken() {
					// The chunk failed before any sync: the bytes go to another chunk.
					c := b.cw
					wb.v.chunks.dropBlob(c)
					b.cw = nil
					if b.refs > 0 {
						w.f.unpushed += int64(len(b.data))
					}
					if w.f.own.chunk == c && !w.f.own.ended {
						w.f.own.chunk = nil
					}
				}
				continue
			}
			b.synced = true
		}
		w.in.mu.Unlock()
	}
}

// unplace forgets the chunks of a file's captured bytes, because the owner ended these chunks;
// the bytes go to other chunks.
func (wb *writeBack) unplace(w *work, err error) {
	var chunks []*chunk
	w.in.mu.Lock()
	for _, b := range w.blobs {
		if b.cw == nil {
			continue
		}
		chunks = append(chunks, b.cw)
		wb.v.chunks.dropBlob(b.cw)
		if w.f.own.chunk == b.cw && !w.f.own.ended {
			w.f.own.chunk = nil
		}
		b.cw, b.synced = nil, false
		if b.refs > 0 {
			w.f.unpushed += int64(len(b.data))
		}
	}
	w.in.mu.Unlock()
	for _, c := range chunks {
		wb.v.chunks.breakChunk(c, err)
	}
}

// commitOps makes the operations that commit a file. The caller holds mu.
func (wb *writeBack) commitOps(w *work) []meta.Op {
	f := w.f
	base := meta.Write{Ino: w.in.ino, Size: w.size, Mtime: w.mtime, Synced: true, Seal: w.seal && w.own == nil, CloseEnded: w.close}
	if w.inline {
		base.Inline, base.Data = true, w.data
		return []meta.Op{&base}
	}
	var ext []meta.Extent
	add := func(e meta.Extent) {
		if k := len(ext); k > 0 {
			p := &ext[k-1]
			if p.Chunk == e.Chunk && p.End() == e.Off && p.ChunkOff+p.Len == e.ChunkOff {
				p.Len += e.Len
				return
			}
		}
		ext = append(ext, e)
	}
	if w.close && f.own.chunk != nil {
		// The open-ended extent gets its synced length.
		if n := f.own.upTo; n > 0 {
			add(meta.Extent{Off: f.own.base, Len: n, Chunk: f.own.chunk.id})
		}
	}
	for _, s := range w.segs {
		e := meta.Extent{Off: s.off, Len: s.n, Chunk: s.b.cw.id, ChunkOff: s.b.off + s.pos}
		if w.close && f.own.chunk != nil && overlaps(ext, e) {
			ext = overlay(ext, e)
			continue
		}
		// The last committed extent of a file that is written from front to back grows: all
		// commits of the file make a single record.
		if len(ext) == 0 || ext[len(ext)-1].End() != e.Off {
			if p, ok := f.m.before(s.off); ok && p.ref == s.b.cw.ref && p.pos+p.n == e.ChunkOff {
				e.Off, e.ChunkOff, e.Len = p.off, p.pos, e.Len+p.n
			}
		}
		add(e)
	}
	if w.open && len(ext) > 0 && f.own.chunk != nil {
		last := &ext[len(ext)-1]
		if last.Chunk == f.own.chunk.id && last.End() == w.size && last.ChunkOff == last.Off-f.own.base {
			last.Off, last.ChunkOff, last.Len = f.own.base, 0, w.size-f.own.base
			last.OpenEnded = true
			ext = trimBefore(ext, f.own.base)
		} else {
			w.open = false
		}
	} else {
		w.open = false
	}
	if len(ext) <= maxExtents {
		base.Extents = ext
		return []meta.Op{&base}
	}
	var ops []meta.Op
	for len(ext) > 0 {
		n := min(len(ext), maxExtents)
		op := base
		op.Extents, ext = ext[:n], ext[n:]
		op.Size = min(op.Size, op.Extents[n-1].End())
		op.Seal = base.Seal && len(ext) == 0
		if len(ext) == 0 {
			op.Size = w.size
		}
		ops = append(ops, &op)
	}
	return ops
}

// sealFile seals a seal-on-close file that has a chunk of its own: after the commit of all
// bytes, first the chunk, then the file. So every reader of a sealed file can pass the chunk to
// the kernel.
func (wb *writeBack) sealFile(ctx context.Context, w *work) error {
	v := wb.v
	if err := v.chunks.seal(ctx, w.own); err != nil {
		return err
	}
	res, errs, stamp, err := v.owner.doBatch(ctx, w.epoch, []batchOp{{Op: &meta.Write{Ino: w.in.ino, Size: w.size, Mtime: w.mtime, Seal: true}}})
	if err == nil {
		err = errs[0]
	}
	if err != nil {
		return err
	}
	w.in.mu.Lock()
	defer w.in.mu.Unlock()
	if err := w.in.expiredSince(w.f, w.epoch); err != nil {
		return err
	}
	w.in.learnLocked(&res[0].Attr, stamp)
	w.f.sealWant = false
	if w.f.own.chunk == w.own {
		w.f.own.chunk = nil
		v.chunks.retire(w.own)
	}
	wb.unlistLocked(w.in)
	return nil
}

// sendCommits sends a batch of one epoch and handles the answers.
func (wb *writeBack) sendCommits(ctx context.Context, epoch uint64, ops []batchOp, of []*work) {
	v := wb.v
	res, errs, stamp, err := v.owner.doBatch(ctx, epoch, ops)
	for i, w := range of {
		var r *meta.Result
		e := err
		if e == nil && i < len(errs) {
			e = errs[i]
		}
		if e == nil {
			r = &res[i]
		}
		if e != nil {
			if k := meta.KindOf(e); k == meta.NoSuchChunk || k == meta.Sealed {
				wb.unplace(w, e)
				e = errors.Join(errAgain, e)
			}
			w.err = errors.Join(w.err, e)
			if ops[i].Draw {
				continue
			}
			v.meter.notSpent(w, err != nil && ctx.Err() != nil)
			continue
		}
		if !ops[i].Draw {
			w.promised = promise{}
		}
		if w.ops--; w.ops == 0 && w.err == nil {
			v.c.stats.commits.Add(1)
			w.in.mu.Lock()
			wb.finish(w, r, stamp)
			w.in.mu.Unlock()
		}
	}
}

// finish records that the captured bytes are durable and committed. The caller holds mu.
func (wb *writeBack) finish(w *work, r *meta.Result, stamp stamp) {
	v := wb.v
	in, f := w.in, w.f
	w.done = true
	if w.err = in.expiredSince(f, w.epoch); w.err != nil {
		// The owner may or may not have the commit. In both cases the writer was told that the
		// bytes are lost.
		wb.release(w)
		return
	}
	defer v.c.kept.inOrder(f)()
	if r != nil {
		in.learnLocked(&r.Attr, stamp)
		v.closed.askedLocked(f, r)
	}
	switch {
	case w.inline && f.puts == w.puts && f.mapOK && f.size == w.size:
		var segs []segment
		if len(w.data) > 0 {
			segs = []segment{{n: w.size, b: &blob{data: w.data, clean: true, frozen: true}}}
		}
		f.m.replace(0, 1<<63, segs, v.buffers.freeBlobOf(f))
	case w.inline: // the file changed meanwhile: the next commit includes the whole inline file
	default:
		for _, s := range w.segs {
			f.m.each(s.off, s.end(), func(t *segment) bool {
				if t.b == s.b {
					t.ref, t.pos, t.b = s.b.cw.ref, s.b.off+t.pos, nil
					if s.b.refs--; s.b.refs == 0 {
						v.buffers.freeBlobOf(f)(s.b)
					}
				}
				return true
			})
		}
		if k := len(w.segs); k > 0 {
			f.m.join(w.segs[0].off, w.segs[k-1].end())
		}
	}
	if w.fast {
		f.own.upTo = max(f.own.upTo, w.size-f.own.base)
	}
	if w.open {
		f.own.ended, f.own.upTo = true, w.size-f.own.base
	}
	if w.close {
		f.own.ended, f.appends = false, 0
		if own := f.own.chunk; own != nil && (own.isBroken() || own.w.Len() != f.own.upTo) {
			f.own.chunk = nil
			v.chunks.retire(own)
		}
	}
	if w.seal && w.own == nil {
		f.sealWant = false
	}
	if f.puts == w.puts {
		if !w.fast {
			f.metaDirty = false
			if f.uncommitted == 0 && !f.own.ended {
				f.mtime, f.ctime = 0, 0
			}
		} else {
			f.metaDirty = true
		}
	}
	if f.uncommitted == 0 {
		f.lo, f.hi = 1<<63, 0
	}
	v.meter.unneededLocked(f)
	if own := f.own.chunk; own != nil && w.mode == flushClose && f.users.writers == 0 && f.uncommitted == 0 && !f.own.ended {
		f.own.chunk = nil
		v.chunks.retire(own)
	}
	wb.release(w)
	wb.unlistLocked(in)
	v.closed.closedLocked(in)
}

// flushOne flushes one file and waits for the end, also while needed servers are away. When
// flushOne returns, the commit may not be journaled yet.
func (wb *writeBack) flushOne(ctx context.Context, in *inode, mode flushMode) error {
	return wb.patiently(ctx, in, func() error { return wb.flushRound(ctx, in, mode) })
}

// flushRound is flushOne for a bounded time, if the volume's owner answers. If the function
// passing returns true for the error, another round may succeed.
func (wb *writeBack) flushRound(ctx context.Context, in *inode, mode flushMode) error {
	in.mu.Lock()
	f := in.file
	if f == nil || !f.leftFor(mode) {
		in.mu.Unlock()
		return nil
	}
	_, err := in.take(ctx, turnCommit)
	if err == nil {
		if _, err = in.take(ctx, turnPush); err != nil {
			in.file.turns.leave(turnCommit)
		}
	}
	in.mu.Unlock()
	if err != nil {
		return err
	}
	in.pins.Add(1)
	return wb.toItsEnd(ctx, func(ctx context.Context) error {
		defer in.put()
		w := &work{in: in, mode: mode}
		wb.flushGroup(ctx, []*work{w}, true)
		in.mu.Lock()
		if f := in.file; f != nil {
			f.turns.leave(turnCommit)
			wb.v.chunks.endOwnLocked(f)
		}
		in.mu.Unlock()
		return wb.verdict(in, w.err)
	})
}

// leftFor reports that a flush has something to do or to wait for. The caller holds the
// inode's mu.
func (f *file) leftFor(mode flushMode) bool {
	return f.turns.busy != 0 || f.uncommitted > 0 || f.metaDirty || f.sealWant || mode == flushClose && (f.own.ended || f.own.chunk != nil && f.users.writers == 0)
}

// toItsEnd runs a flush, which holds turns, with the client's context, and waits for it. If
// ctx ends first, for example because the waiting process was killed, toItsEnd returns an
// error and the flush goes on. The turns must stay held until the end of the flush: its commit
// may still arrive, and would undo a newer one.
func (wb *writeBack) toItsEnd(ctx context.Context, flush func(context.Context) error) error {
	v := wb.v
	if ctx.Done() == nil || ctx == v.c.ctx {
		return flush(v.c.ctx)
	}
	done := make(chan error, 1)
	v.c.spawn(func() { done <- flush(v.c.ctx) })
	select {
	case err := <-done:
		return err
	case <-ctx.Done():
		return meta.E("write back", meta.Interrupted, v.name, context.Cause(ctx))
	}
}

// flushHeld is flushOne for a caller that holds and keeps both turns. flushHeld always waits
// until the flush has ended.
func (wb *writeBack) flushHeld(in *inode, mode flushMode) error {
	w := &work{in: in, mode: mode}
	wb.flushGroup(wb.v.c.ctx, []*work{w}, false)
	return wb.verdict(in, w.err)
}

// verdict turns the error of a flush into the error for callers. verdict drops the bytes of a
// deleted file.
func (wb *writeBack) verdict(in *inode, err error) error {
	wb.failure.note(err)
	if err == nil {
		return nil
	}
	if errors.Is(err, meta.Stale) {
		// Inode numbers are never used twice, so the file has lost its last name, although the
		// owner may not have notified this client. Only openers of the file would miss the
		// bytes.
		in.mu.Lock()
		dead := in.attrOK && in.attr.Nlink == 0 || in.file == nil || in.file.users.opens == 0
		in.dropDirtyLocked()
		in.mu.Unlock()
		if dead {
			return nil
		}
	}
	if e, ok := errors.AsType[*meta.Error](err); ok && !errors.Is(err, errAgain) {
		return e
	}
	kind := meta.KindOf(err)
	switch kind {
	case meta.NoSpace, meta.QuotaExceeded, meta.Interrupted, meta.SessionExpired, meta.Stale:
	default:
		if kind = meta.IO; passes(err) {
			kind = meta.Unavailable
		}
	}
	return meta.E("write back", kind, wb.v.subject(in.ino), err)
}

// flushIfDirty makes a file's buffered bytes durable and committed. flushIfDirty also fails if
// bytes were lost before and no caller was told of the loss.
func (wb *writeBack) flushIfDirty(ctx context.Context, ino meta.Ino) error {
	in := wb.v.c.table.peek(wb.v.id, ino)
	if in == nil {
		return nil
	}
	defer in.put()
	if err := wb.flushOne(ctx, in, flushKeep); err != nil {
		return err
	}
	in.mu.Lock()
	defer in.mu.Unlock()
	if in.file == nil {
		return nil
	}
	return in.file.toldByRename()
}

// dropDirtyLocked forgets all buffered bytes of a file. Bytes captured by a flush stay in
// memory until the end of the flush.
func (in *inode) dropDirtyLocked() {
	f, v := in.file, in.vol
	if f == nil {
		return
	}
	f.m.replace(0, 1<<63, nil, v.buffers.freeBlobOf(f))
	f.m, f.mapOK = extmap{}, false
	f.mapGen++
	f.puts++
	f.uncommitted, f.unpushed = 0, 0
	v.meter.drop(&f.promised)
	f.metaDirty, f.sealWant, f.mtime, f.ctime = false, false, 0, 0
	f.lo, f.hi = 1<<63, 0
	if own := f.own.chunk; own != nil {
		f.own.chunk, f.own.ended = nil, false
		v.chunks.retire(own)
	}
	v.back.unlistLocked(in)
}

// loseDirty gives up the buffered bytes of a file and reports the loss. loseDirty returns the
// number of lost bytes, and whether any state was lost.
func (wb *writeBack) loseDirty(in *inode, err error) (bytes int64, lost bool) {
	v := wb.v
	in.mu.Lock()
	defer in.mu.Unlock()
	f := in.file
	if f == nil || f.uncommitted == 0 && !f.metaDirty && !f.sealWant && !f.own.ended {
		return 0, false
	}
	bytes = f.uncommitted
	v.c.stats.lose(bytes)
	v.c.log.Error("written bytes are lost", "inode", v.subject(in.ino), "bytes", bytes, "err", err)
	f.fail(meta.E("write back", meta.KindOf(err), v.subject(in.ino), err), true)
	in.dropDirtyLocked()
	return bytes, true
}
