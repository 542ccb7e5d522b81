package penstock

import (
	"context"
	"errors"
	"sync"
	"time"

	"penstock.io/penstock/meta"
)

// listDirtyLocked notes that a file has something to flush.
func (v *Volume) listDirtyLocked(in *inode) {
	f := in.file
	if f.listed {
		return
	}
	f.listed = true
	in.pins.Add(1)
	v.dirtyMu.Lock()
	v.dirty[in] = struct{}{}
	first := len(v.dirty) == 1
	v.dirtyMu.Unlock()
	v.running.Do(func() { v.c.spawn(v.flusher) })
	if first {
		select {
		case v.kicked <- struct{}{}: // starts the flusher's clock
		default:
		}
	}
}

func (v *Volume) unlistLocked(in *inode) {
	f := in.file
	if !f.listed || f.uncommitted > 0 || f.sealWant || f.metaDirty && !f.ended {
		return
	}
	f.listed = false
	v.dirtyMu.Lock()
	delete(v.dirty, in)
	v.dirtyMu.Unlock()
	in.pins.Add(-1)
}

// kick makes the flusher run at once.
func (v *Volume) kick() {
	select {
	case v.kicked <- struct{}{}:
	default:
	}
}

// flusher commits what was written, a while after or when much is waiting. It
// works in two stages: while a group is being synced and committed, the next
// is appended.
func (v *Volume) flusher() {
	c := v.c
	stage := make(chan []*work, 1)
	done := make(chan struct{})
	go func() {
		defer close(done)
		for ws := range stage {
			v.commitGroup(c.ctx, ws)
			v.settleGroup(c.ctx, ws)
		}
	}()
	defer func() { close(stage); <-done }()
	timer := time.NewTimer(c.flushEvery)
	defer timer.Stop()
	armed := true
	for {
		select {
		case <-c.ctx.Done():
			return
		case <-timer.C:
			armed = false
		case <-v.kicked:
			if v.dirtyBytes.Load() < c.flushBytes && !c.buf.full() {
				if !armed { // the first dirty file: give others time to join it
					timer.Reset(c.flushEvery)
					armed = true
				}
				continue
			}
		}
		v.atimes.send(v)
		for {
			ws := v.nextGroup()
			if len(ws) == 0 {
				break
			}
			for _, w := range ws {
				w.pushTurn = true
			}
			v.pushGroup(c.ctx, ws, true)
			select {
			case stage <- ws:
			case <-c.ctx.Done():
				v.abandon(ws)
				return
			}
			if armed && v.dirtyBytes.Load() < c.flushBytes {
				break // the rest waits for the clock
			}
		}
		v.dirtyMu.Lock()
		left := len(v.dirty)
		v.dirtyMu.Unlock()
		if left > 0 && !armed {
			timer.Reset(c.flushEvery)
			armed = true
		}
	}
}

// nextGroup takes the turns of some dirty files that nobody else flushes now.
func (v *Volume) nextGroup() []*work {
	v.dirtyMu.Lock()
	ins := make([]*inode, 0, min(len(v.dirty), groupFiles))
	for in := range v.dirty {
		if len(ins) == 4*groupFiles {
			break
		}
		ins = append(ins, in)
	}
	v.dirtyMu.Unlock()
	var ws []*work
	var bytes int64
	for _, in := range ins {
		if len(ws) == groupFiles || bytes >= groupBytes {
			break
		}
		in.mu.Lock()
		f := in.file
		if f != nil && f.listed && f.busy&turnCommit == 0 && in.recall == nil && (f.uncommitted > 0 || f.metaDirty || f.sealWant) {
			f.busy |= turnCommit
			// A stream leaves its turn after some blocks; nothing else that holds
			// the push turn does so without the commit turn.
			if _, err := in.take(v.c.ctx, turnPush); err != nil {
				f.leave(turnCommit)
				in.mu.Unlock()
				break
			}
			in.pins.Add(1)
			ws = append(ws, &work{in: in, mode: flushKeep})
			bytes += f.uncommitted
		}
		in.mu.Unlock()
	}
	return ws
}

// settleGroup ends the flush of a group: turns are left, failures kept for
// the writers.
func (v *Volume) settleGroup(ctx context.Context, ws []*work) {
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
		v.flushGroup(ctx, again, true)
	}
	var last error
	for _, w := range ws {
		in := w.in
		err := v.verdict(in, w.err)
		in.mu.Lock()
		if f := in.file; f != nil {
			if err != nil && ctx.Err() == nil && !w.stale() { // else it was told when the session expired
				f.fail(err)
				last = err
			}
			f.leave(turnCommit)
			v.endOwnLocked(f)
		}
		in.mu.Unlock()
		in.put()
	}
	if ctx.Err() == nil {
		v.c.buf.outcome(last)
		if last != nil {
			v.c.log.Warn("write back failed, will be tried again", "volume", v.name, "err", last)
		}
	}
}

func (v *Volume) abandon(ws []*work) {
	for _, w := range ws {
		w.in.mu.Lock()
		v.release(w)
		if f := w.in.file; f != nil {
			f.leave(turnCommit)
		}
		w.in.mu.Unlock()
		w.in.put()
	}
}

// flushAll flushes every dirty file: groups of those whose turns are free,
// then the others one by one.
func (v *Volume) flushAll(ctx context.Context, mode flushMode) error {
	v.dirtyMu.Lock()
	todo := make([]*inode, 0, len(v.dirty))
	for in := range v.dirty {
		in.pins.Add(1)
		todo = append(todo, in)
	}
	v.dirtyMu.Unlock()
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
			if f != nil && f.busy == 0 {
				f.busy |= turnCommit | turnPush
				bytes += f.uncommitted
				ws = append(ws, &work{in: in, mode: mode})
			} else {
				later = append(later, in)
			}
			in.mu.Unlock()
		}
		err := v.toItsEnd(ctx, func(ctx context.Context) (first error) {
			v.flushGroup(ctx, ws, true)
			for _, w := range ws {
				err := v.verdict(w.in, w.err)
				if err != nil && first == nil {
					first = err
				}
				w.in.mu.Lock()
				if f := w.in.file; f != nil {
					f.leave(turnCommit)
					v.endOwnLocked(f)
				}
				w.in.mu.Unlock()
				w.in.put()
			}
			return first
		})
		if err != nil && first == nil {
			first = err
		}
	}
	for _, in := range append(later, todo...) { // of todo nothing is left unless ctx ended
		if err := v.flushOne(ctx, in, mode); err != nil && first == nil {
			first = err
		}
		in.put()
	}
	return first
}

// ---- access times

// atimeList holds inodes whose access time was renewed here.
type atimeList struct {
	mu   sync.Mutex
	list map[*inode]struct{}
}

// maxAtimes bounds the list; what does not fit keeps its old access time.
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
	in.vol.running.Do(func() { in.vol.c.spawn(in.vol.flusher) })
	if len(l.list) == 1 {
		in.vol.kick()
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
		res, errs, stamp, err := v.doBatch(v.c.ctx, epoch, ops)
		for i := range ops {
			ins[i].mu.Lock()
			if err == nil && errs[i] == nil {
				ins[i].learnLocked(&res[i].Attr, stamp)
			}
			if f := ins[i].file; f != nil {
				f.leave(turnCommit)
			}
			ins[i].mu.Unlock()
		}
		ops, ins = ops[:0], ins[:0]
	}
	for in := range list {
		in.mu.Lock()
		f := in.file
		send := f != nil && f.atimeDirty
		if send && f.busy&turnCommit != 0 {
			// Its attributes are being changed: in the next round.
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
			f.busy |= turnCommit
			learnt = f.epoch
		}
		in.mu.Unlock()
		if send {
			if learnt != epoch {
				flush()
				epoch = learnt
			}
			// Reading changes no ctime: it is set to what it was.
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

// orphanList gathers unlinked inodes that nobody here has open, for the owner
// to forget.
type orphanList struct {
	mu   sync.Mutex
	inos []meta.Ino
	runs bool
}

// orphanWait is how long unlinked inodes are gathered.
const orphanWait = 10 * time.Millisecond

func (v *Volume) releaseOrphan(ino meta.Ino) {
	o := &v.orphans
	o.mu.Lock()
	defer o.mu.Unlock()
	o.inos = append(o.inos, ino)
	if !o.runs {
		o.runs = true
		v.c.spawn(v.sendOrphans)
	}
}

func (v *Volume) sendOrphans() {
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
			if _, _, err := v.do(v.c.ctx, nil, &meta.ReleaseOrphans{Inos: inos[:n]}, meta.LeaseNone); err != nil && v.c.ctx.Err() == nil {
				v.c.log.Warn("unlinked files stay until this session ends", "volume", v.name, "inodes", n, "err", err)
			}
			v.forgetDead(inos[:n])
			inos = inos[n:]
		}
	}
}

// forgetDead takes removed inodes out of the table and gives their leases back. What a
// process may still look at (a removed working directory) stays cached.
func (v *Volume) forgetDead(inos []meta.Ino) {
	t := &v.c.table
	gone := make([]inodeKey, 0, len(inos))
	t.mu.Lock()
	for _, ino := range inos {
		k := inodeKey{v.id, ino}
		in := t.m[k]
		if in == nil {
			gone = append(gone, k)
			continue
		}
		in.mu.Lock()
		keep := in.recall != nil || in.file != nil && in.file.opens > 0 || in.dir != nil || in.attrOK && in.attr.IsDir()
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

// bury forgets what is buffered of an inode without names or openers, and
// has the owner forget the inode.
func (v *Volume) bury(in *inode) {
	if !v.hold(in.ino) {
		v.buryNow(in)
	}
}

func (v *Volume) buryNow(in *inode) {
	in.mu.Lock()
	if f := in.file; f != nil && f.opens > 0 {
		in.mu.Unlock()
		return
	}
	in.dropDirtyLocked()
	if f := in.file; f != nil {
		f.err, f.errFor = nil, 0
	}
	in.mu.Unlock()
	v.releaseOrphan(in.ino)
}
