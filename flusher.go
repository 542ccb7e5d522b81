package penstock

import (
	"cmp"
	"context"
	"errors"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"

	"penstock.io/penstock/meta"
)

// writeBack takes a volume's buffered bytes to the chunk servers and the volume's owner.
type writeBack struct {
	v *Volume

	dirtyBytes atomic.Int64
	flying     atomic.Int64 // of dirtyBytes, in groups that the flusher is flushing
	failure    lastFailure

	mu    sync.Mutex
	dirty map[*inode]struct{} // pinned

	kicked  chan struct{}
	running sync.Once
}

// listDirtyLocked adds a file to the volume's list of files to flush.
func (wb *writeBack) listDirtyLocked(in *inode) {
	f := in.file
	if f.listed {
		return
	}
	f.listed = true
	in.pins.Add(1)
	wb.mu.Lock()
	wb.dirty[in] = struct{}{}
	first := len(wb.dirty) == 1
	wb.mu.Unlock()
	wb.running.Do(func() { wb.v.c.spawn(wb.flusher) })
	if first {
		select {
		case wb.kicked <- struct{}{}: // starts the flusher's clock
		default:
		}
	}
}

func (wb *writeBack) unlistLocked(in *inode) {
	f := in.file
	if !f.listed || f.uncommitted > 0 || f.sealWant || f.metaDirty && !f.own.ended {
		return
	}
	f.listed = false
	wb.mu.Lock()
	delete(wb.dirty, in)
	wb.mu.Unlock()
	in.pins.Add(-1)
}

// kick makes the flusher run at once.
func (wb *writeBack) kick() {
	select {
	case wb.kicked <- struct{}{}:
	default:
	}
}

// flights is the number of groups that the flusher flushes in parallel: a sync costs disk
// time, not CPU, and disks and their file systems do several syncs in little more than the
// time of one.
const flights = 4

// flusher commits written bytes after FlushEvery, or earlier when many bytes wait. It appends,
// syncs and commits several groups of files in parallel.
func (wb *writeBack) flusher() {
	v := wb.v
	c := v.c
	slots := make(chan struct{}, flights)
	var under sync.WaitGroup
	defer under.Wait()
	timer := time.NewTimer(c.flushEvery)
	defer timer.Stop()
	armed := true
	for {
		select {
		case <-c.ctx.Done():
			return
		case <-timer.C:
			armed = false
		case <-wb.kicked:
			if !wb.muchDirty() {
				if !armed { // the first dirty file: others may join it within FlushEvery
					timer.Reset(c.flushEvery)
					armed = true
				}
				continue
			}
		}
		v.atimes.send(v)
		wb.mu.Lock()
		round := len(wb.dirty)
		wb.mu.Unlock()
		var failed atomic.Bool // a flush of this round
		for {
			select {
			case slots <- struct{}{}:
			case <-c.ctx.Done():
				return
			}
			if armed && failed.Load() {
				<-slots
				break // an immediate failure would fail again at once: the next tick tries again
			}
			ws, bytes := wb.nextGroup(armed)
			if len(ws) == 0 {
				<-slots
				break
			}
			wb.flying.Add(bytes)
			under.Go(func() {
				wb.pushGroup(c.ctx, ws, true)
				wb.commitGroup(c.ctx, ws)
				err := wb.settleGroup(c.ctx, ws)
				if err != nil {
					failed.Store(true)
				}
				wb.flying.Add(-bytes)
				<-slots
				if err == nil && wb.muchDirty() { // the bytes may have been written to these files meanwhile
					wb.kick()
				}
			})
			if round -= len(ws); armed && !wb.muchDirty() || !armed && round <= 0 {
				break // the rest, and new bytes, wait for the next tick
			}
		}
		wb.mu.Lock()
		left := len(wb.dirty)
		wb.mu.Unlock()
		if left > 0 && !armed {
			timer.Reset(c.flushEvery)
			armed = true
		}
	}
}

// muchDirty reports that another group should be flushed at once: enough bytes wait besides
// those in flight, or the client's write buffer is filling up and no flush in flight will make
// room.
func (wb *writeBack) muchDirty() bool {
	flying := wb.flying.Load()
	return wb.dirtyBytes.Load()-flying >= wb.v.c.flushBytes || flying == 0 && wb.v.c.buf.full()
}

// nextGroup takes the commit turns of some dirty files that no other flush holds, and returns
// the files and the number of their bytes. With enough, nextGroup takes the files with the
// most bytes first, and none if all the files together are not worth a sync, unless no flush
// in flight will free bytes.
func (wb *writeBack) nextGroup(enough bool) (ws []*work, bytes int64) {
	type candidate struct {
		in    *inode
		bytes int64
	}
	wb.mu.Lock()
	list := make([]candidate, 0, min(len(wb.dirty), 4*groupFiles))
	for in := range wb.dirty {
		if len(list) == 4*groupFiles {
			break
		}
		list = append(list, candidate{in: in})
	}
	wb.mu.Unlock()
	may := func(in *inode) bool { // mu is held
		f := in.file
		return f != nil && f.listed && f.turns.busy&turnCommit == 0 && in.recall == nil && (f.uncommitted > 0 || f.metaDirty || f.sealWant)
	}
	n, all := 0, int64(0)
	for _, c := range list {
		c.in.mu.Lock()
		if may(c.in) {
			c.bytes = c.in.file.uncommitted
			list[n] = c
			n++
			all += c.bytes
		}
		c.in.mu.Unlock()
	}
	list = list[:n]
	flying := wb.flying.Load()
	if enough && flying > 0 && all < wb.v.c.flushBytes/2 {
		return nil, 0
	}
	if enough { // else all files get their turn
		slices.SortFunc(list, func(a, b candidate) int { return cmp.Compare(b.bytes, a.bytes) })
	}
	most := max(groupBytes, (wb.dirtyBytes.Load()-flying)/flights)
	for _, c := range list {
		if len(ws) == groupFiles || bytes >= most {
			break
		}
		c.in.mu.Lock()
		if may(c.in) {
			c.in.file.turns.busy |= turnCommit
			c.in.pins.Add(1)
			ws = append(ws, &work{in: c.in, mode: flushKeep})
			bytes += c.in.file.uncommitted
		}
		c.in.mu.Unlock()
	}
	return ws, bytes
}

// settleGroup ends the flush of a group: it leaves the turns, keeps failures for the writers,
// and returns the last failure.
func (wb *writeBack) settleGroup(ctx context.Context, ws []*work) (last error) {
	v := wb.v
	var waits error
	// Another chunk may do; with the retries.
	var again []*work
	for _, w := range ws {
		if w.err == nil || !errors.Is(w.err, errAgain) || ctx.Err() != nil {
			continue
		}
		w.in.mu.Lock()
		_, err := w.in.take(ctx, turnPush)
		w.in.mu.Unlock()
		if err == nil {
			w.err = nil
			again = append(again, w)
		}
	}
	if len(again) > 0 {
		wb.flushGroup(ctx, again, true)
	}
	for _, w := range ws {
		in := w.in
		err := wb.verdict(in, w.err)
		if errors.Is(err, meta.ReadOnly) && ctx.Err() == nil {
			// The volume became immutable by force, which gave up uncommitted bytes.
			wb.loseDirty(in, err)
		}
		in.mu.Lock()
		if f := in.file; f != nil {
			if err != nil && ctx.Err() == nil && !w.stale() { // else Expired has reported the loss
				if passing(err) {
					waits = err // the flush will succeed later: only a caller that can't wait gets the error
				} else {
					f.fail(err, false)
					last = err
				}
			}
			f.turns.leave(turnCommit)
			v.chunks.endOwnLocked(f)
		}
		in.mu.Unlock()
		in.put()
	}
	if ctx.Err() == nil {
		v.c.buf.outcome(last)
		if last = cmp.Or(last, waits); last != nil {
			v.c.log.Warn("written bytes of a volume could not be made durable; the client tries again", "volume", v.name, "err", last)
		}
	}
	return last
}

// flushAll flushes every dirty file.
func (wb *writeBack) flushAll(ctx context.Context, mode flushMode) error {
	return wb.flushThese(ctx, wb.dirtyInodes(), mode)
}

// flushFiles makes the buffered bytes of some files durable and committed. It also fails if
// bytes were lost before and no fsync has returned the error.
func (wb *writeBack) flushFiles(ctx context.Context, inos []meta.Ino) error {
	var todo []*inode
	for _, ino := range inos {
		if in := wb.v.c.table.peek(wb.v.id, ino); in != nil {
			todo = append(todo, in)
			in.pins.Add(1)
			defer in.put()
		}
	}
	err := wb.flushThese(ctx, slices.Clone(todo), flushKeep)
	for _, in := range todo {
		in.mu.Lock()
		if f := in.file; f != nil {
			err = cmp.Or(err, f.toldBySync(Handle{}))
		}
		in.mu.Unlock()
	}
	return err
}

// handedBack are files of a group that are flushed once more, with their pins, as long as a
// caller waits for the group.
type handedBack struct {
	mu    sync.Mutex
	taken bool
	list  []*inode
}

// add tells whether in will be flushed once more.
func (h *handedBack) add(in *inode) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	if !h.taken {
		h.list = append(h.list, in)
	}
	return !h.taken
}

func (h *handedBack) take() []*inode {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.taken = true
	return h.list
}

// besides bounds the files that are flushed individually, in parallel.
const besides = 16

// flushThese flushes files and drops one pin of each: first, in groups, the files whose turns
// are free, then the others individually. Most of those only wait for the end of another
// flush, the rest until servers are back. flushThese continues after an error and returns the
// first.
func (wb *writeBack) flushThese(ctx context.Context, todo []*inode, mode flushMode) error {
	var first error
	var later []*inode
	for len(todo) > 0 && ctx.Err() == nil {
		var ws []*work
		var bytes int64
		for len(todo) > 0 && len(ws) < groupFiles && bytes < 4*groupBytes {
			in := todo[0]
			todo = todo[1:]
			in.mu.Lock()
			f := in.file
			if f != nil && f.turns.busy == 0 {
				f.turns.busy |= turnCommit | turnPush
				bytes += f.uncommitted
				ws = append(ws, &work{in: in, mode: mode})
			} else {
				later = append(later, in)
			}
			in.mu.Unlock()
		}
		var again handedBack
		err := wb.toItsEnd(ctx, func(ctx context.Context) (first error) {
			wb.flushGroup(ctx, ws, true)
			for _, w := range ws {
				err := wb.verdict(w.in, w.err)
				w.in.mu.Lock()
				if f := w.in.file; f != nil {
					f.turns.leave(turnCommit)
					wb.v.chunks.endOwnLocked(f)
				}
				w.in.mu.Unlock()
				if passing(err) && again.add(w.in) {
					continue
				}
				if err != nil && first == nil {
					first = err
				}
				w.in.put()
			}
			return first
		})
		later = append(later, again.take()...)
		if err != nil && first == nil {
			first = err
		}
	}
	var others errgroup.Group
	others.SetLimit(besides)
	for _, in := range append(later, todo...) { // of todo nothing is left unless ctx ended
		others.Go(func() error {
			defer in.put()
			return wb.flushOne(ctx, in, mode)
		})
	}
	return cmp.Or(first, others.Wait())
}

// ---- access times

// atimeList holds inodes whose access time this client renewed.
type atimeList struct {
	v *Volume

	mu   sync.Mutex
	list map[*inode]struct{}
}

// maxAtimes bounds the list; further inodes keep their old access time.
const maxAtimes = 10_000

// add is called with the inode's mu held.
func (l *atimeList) add(in *inode) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.list == nil {
		l.list = make(map[*inode]struct{})
	}
	if _, ok := l.list[in]; ok || len(l.list) >= maxAtimes {
		return
	}
	in.pins.Add(1)
	l.list[in] = struct{}{}
	in.vol.back.running.Do(func() { in.vol.c.spawn(in.vol.back.flusher) })
	if len(l.list) == 1 {
		in.vol.back.kick()
	}
}

// send tells the owner, many in a batch.
func (l *atimeList) send(v *Volume) {
	l.mu.Lock()
	list := l.list
	l.list = nil
	l.mu.Unlock()
	var ops []batchOp
	var ins []*inode
	var epoch uint64 // of all in ops
	flush := func() {
		if len(ops) == 0 {
			return
		}
		res, errs, stamp, err := v.owner.doBatch(v.c.ctx, epoch, ops)
		for i := range ops {
			ins[i].mu.Lock()
			if err == nil && errs[i] == nil {
				ins[i].learnLocked(&res[i].Attr, stamp)
			}
			if f := ins[i].file; f != nil {
				f.turns.leave(turnCommit)
			}
			ins[i].mu.Unlock()
		}
		ops, ins = ops[:0], ins[:0]
	}
	for in := range list {
		in.mu.Lock()
		f := in.file
		send := f != nil && f.atimeDirty
		if send && f.turns.busy&turnCommit != 0 {
			// The inode's attributes are being changed: wait for the next round.
			l.add(in)
			in.mu.Unlock()
			continue
		}
		if send {
			f.atimeDirty = false
		}
		a := in.attr
		var learnt uint64
		if send = send && in.attrOK && a.Nlink > 0; send {
			f.turns.busy |= turnCommit
			learnt = f.epoch
		}
		in.mu.Unlock()
		if send {
			if learnt != epoch {
				flush()
				epoch = learnt
			}
			// The time of a read: see meta.SetAttr.ReadTime.
			ops = append(ops, batchOp{Op: &meta.SetAttr{Ino: in.ino, Mask: meta.SetAtime | meta.SetCtime, Atime: a.Atime, Ctime: a.Ctime}})
			ins = append(ins, in)
		}
		if len(ops) == groupFiles {
			flush()
		}
	}
	flush()
	for in := range list {
		in.put()
	}
}

// ---- orphans

// orphanList collects unlinked inodes without openers here, for a message to the owner.
type orphanList struct {
	mu   sync.Mutex
	inos []meta.Ino
	runs bool
}

// clear forgets all: the session expired.
func (o *orphanList) clear() {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.inos = nil
}

// orphanWait is how long unlinked inodes are gathered.
const orphanWait = 10 * time.Millisecond

func (wb *writeBack) releaseOrphan(ino meta.Ino) {
	o := &wb.v.orphans
	o.mu.Lock()
	defer o.mu.Unlock()
	o.inos = append(o.inos, ino)
	if !o.runs {
		o.runs = true
		wb.v.c.spawn(wb.sendOrphans)
	}
}

func (wb *writeBack) sendOrphans() {
	v := wb.v
	o := &v.orphans
	for {
		select {
		case <-time.After(orphanWait):
		case <-v.c.ctx.Done():
			return
		}
		o.mu.Lock()
		inos := o.inos
		o.inos = nil
		if len(inos) == 0 {
			o.runs = false
			o.mu.Unlock()
			return
		}
		o.mu.Unlock()
		for len(inos) > 0 {
			n := min(len(inos), 4096)
			if _, _, err := v.owner.do(v.c.ctx, nil, &meta.ReleaseOrphans{Inos: inos[:n]}, meta.LeaseNone); err != nil && v.c.ctx.Err() == nil {
				v.c.log.Warn("the owner was not told that unlinked files were closed: the files stay until this session ends", "volume", v.name, "inodes", n, "err", err)
			}
			wb.forgetDead(inos[:n])
			inos = inos[n:]
		}
	}
}

// forgetDead takes removed inodes out of the table and gives their leases back. Inodes that a
// process may still use (a removed working directory) stay cached.
func (wb *writeBack) forgetDead(inos []meta.Ino) {
	t := &wb.v.c.table
	gone := make([]inodeKey, 0, len(inos))
	t.mu.Lock()
	for _, ino := range inos {
		k := inodeKey{wb.v.id, ino}
		in := t.m[k]
		if in == nil {
			gone = append(gone, k)
			continue
		}
		in.mu.Lock()
		keep := in.recall != nil || in.attrOK && in.attr.Nlink > 0 || in.file != nil && in.file.users.opens > 0 || in.dir != nil || in.attrOK && in.attr.IsDir()
		if !keep {
			in.lowerLocked(meta.LeaseNone)
			gone = append(gone, k)
		}
		keep = keep || in.busyLocked() || in.pins.Load() > 0
		in.mu.Unlock()
		if !keep {
			t.removeLocked(in)
		}
	}
	send := t.giveUpLocked(gone...)
	t.mu.Unlock()
	if send {
		t.sendDrops()
	}
}

// bury forgets the buffered bytes of an inode without names and openers, and makes the owner
// forget the inode, but not before the kernel has forgotten it. Until then the inode may get a
// name again (linkat of an O_PATH descriptor).
func (wb *writeBack) bury(in *inode) {
	if !wb.v.holds.hold(in.ino) {
		wb.buryNow(in)
	}
}

func (wb *writeBack) buryNow(in *inode) {
	in.mu.Lock()
	f := in.file
	if f != nil && (f.users.opens > 0 || f.users.linking > 0) || in.attrOK && in.attr.Nlink > 0 {
		in.mu.Unlock()
		return
	}
	in.dropDirtyLocked()
	if f != nil {
		f.failed = nil
	}
	in.mu.Unlock()
	wb.releaseOrphan(in.ino)
}

// alone runs fn while no write, flush or similar operation on the file runs. With flush, all
// buffered bytes are committed first. An open-ended last extent in the journal is closed in
// any case (rule 7). alone waits while servers needed for that are away.
func (wb *writeBack) alone(ctx context.Context, in *inode, flush bool, fn func() error) error {
	return wb.patiently(ctx, in, func() error { return wb.aloneRound(ctx, in, flush, fn) })
}

// aloneRound is alone with a bounded time. If fn has not run, the error is that of the steps
// before fn.
func (wb *writeBack) aloneRound(ctx context.Context, in *inode, flush bool, fn func() error) error {
	in.mu.Lock()
	f, err := in.take(ctx, turnCommit)
	if err == nil {
		if f, err = in.take(ctx, turnPush); err != nil {
			in.file.turns.leave(turnCommit)
		}
	}
	if err != nil {
		in.mu.Unlock()
		return err
	}
	f.turns.shut()
	flush = flush || f.own.ended
	in.mu.Unlock()
	if flush {
		err = wb.flushHeld(in, flushClose)
	}
	if err == nil {
		err = fn()
	}
	in.mu.Lock()
	f.turns.gate--
	f.turns.leave(turnCommit | turnPush)
	in.mu.Unlock()
	return err
}

func (wb *writeBack) syncAll(ctx context.Context) error {
	v := wb.v
	if v.frozen() {
		return nil
	}
	err := wb.flushAll(ctx, flushKeep)
	v.atimes.send(v)
	if e := v.owner.sync(ctx); err == nil {
		err = e
	}
	return err
}

// settle commits a file without writers and seals its own chunk.
func (wb *writeBack) settle(in *inode) {
	v := wb.v
	if err := wb.flushOne(v.c.ctx, in, flushClose); err != nil {
		v.c.log.Warn("written bytes of a file could not be made durable; the client tries again", "inode", v.subject(in.ino), "err", err)
		in.mu.Lock()
		if in.file != nil {
			in.file.fail(err, false)
		}
		in.mu.Unlock()
	}
}

// sealNow finishes a pending seal-on-close before a reader comes.
func (wb *writeBack) sealNow(ctx context.Context, in *inode) error {
	in.mu.Lock()
	want := in.file != nil && in.file.sealWant
	in.mu.Unlock()
	if !want {
		return nil
	}
	return wb.flushOne(ctx, in, flushClose)
}

// touch renews the access time in memory as relatime does; the next
// round of commits tells the owner.
func (l *atimeList) touch(in *inode) {
	if p := l.v.settings.policy.Load(); p.NoAtime || p.Immutable || p.SealOnClose || l.v.c.atimes.none.Load() {
		return
	}
	now := meta.Time(time.Now().UnixNano())
	in.mu.Lock()
	defer in.mu.Unlock()
	a := &in.attr
	if !in.attrOK || !a.AtimeOld(now) {
		return
	}
	a.Atime = now
	f := in.fileLocked()
	if !f.atimeDirty {
		f.atimeDirty = true
		l.add(in)
	}
}

// streamBatch is the number of blocks that a stream appends before it checks the file again.
const streamBatch = 8

// streamEnd is where the next block of a stream would start.
func (f *file) streamEnd() uint64 {
	if f.own.chunk != nil {
		return f.own.base + f.own.chunk.w.Len()
	}
	return 0
}

// streamsLocked reports that a full block waits at the end of the file's own chunk, or at the
// start of a file without a chunk.
func (f *file) streamsLocked() bool {
	if f.turns.busy&turnPush != 0 {
		return false
	}
	at := f.streamEnd()
	if f.own.chunk != nil && f.own.chunk.w.Len()+blockSize > f.own.chunk.max {
		return false // the next flush takes another chunk
	}
	s, ok := f.m.at(at)
	return ok && s.streamable(at)
}

func (s *segment) streamable(at uint64) bool {
	return s.b != nil && s.b.cw == nil && s.b.busy == 0 && s.off == at && s.pos == 0 && s.n == blockSize && len(s.b.data) == blockSize
}

// stream appends each full block of a file to the file's own chunk soon after the write, so
// that a later sync has little left to do. Failures are left to the flush, which has the
// retries.
func (wb *writeBack) stream(in *inode) {
	v := wb.v
	ctx := v.c.ctx
	for {
		in.mu.Lock()
		f := in.fileLocked()
		var err error
		for err == nil && (f.turns.pushers > 0 || f.turns.busy&turnPush != 0) {
			err = in.wait(ctx, f)
			f = in.fileLocked()
		}
		if err != nil {
			in.fileLocked().pushing = false
			in.mu.Unlock()
			return
		}
		f.turns.busy |= turnPush
		var blobs []*blob
		at := f.streamEnd()
		room := v.settings.maxChunk()
		if f.own.chunk != nil {
			room = f.own.chunk.max - f.own.chunk.w.Len()
		}
		for len(blobs) < streamBatch && room >= blockSize {
			s, ok := f.m.at(at)
			if !ok || !s.streamable(at) || f.own.chunk == nil && len(blobs) == 0 && f.anyCommitted() {
				break
			}
			s.b.frozen = true
			s.b.busy++
			blobs = append(blobs, s.b)
			at += blockSize
			room -= blockSize
		}
		own, epoch := f.own.chunk, f.epoch
		if len(blobs) == 0 || own != nil && own.doubtful() {
			for _, b := range blobs {
				b.busy--
			}
			f.pushing = false
			f.turns.leave(turnPush)
			in.mu.Unlock()
			return
		}
		in.mu.Unlock()
		if own == nil {
			if own, err = v.chunks.newOwn(ctx); err == nil {
				in.mu.Lock()
				if err = in.expiredSince(f, epoch); err == nil {
					f.own.chunk, f.own.base = own, 0
				}
				in.mu.Unlock()
				if err != nil {
					v.chunks.retire(own)
					own = nil
				}
			}
		}
		for i := 0; i < len(blobs) && err == nil; i++ {
			var off uint64
			if off, err = own.w.Append(ctx, blobs[i].data); err == nil {
				v.c.stats.appended.Add(blockSize)
				wb.placed(in, blobs[i], own, off)
			}
		}
		if err != nil && own != nil && ctx.Err() == nil && !errors.Is(err, meta.FileTooBig) {
			v.chunks.breakChunk(own, err)
		}
		in.mu.Lock()
		for _, b := range blobs {
			b.busy--
			v.buffers.settle(b)
		}
		f.turns.leave(turnPush)
		if err != nil {
			f.pushing = false
			in.mu.Unlock()
			return
		}
		in.mu.Unlock()
	}
}

// anyCommitted reports that some byte of the file lies in a chunk.
func (f *file) anyCommitted() bool {
	s, ok := f.m.at(f.m.end() - 1)
	return ok && s.b == nil
}
