package penstock

import (
	"cmp"
	"context"
	"errors"
	"slices"
	"time"

	"penstock.io/penstock/meta"
)

// How the client gives a lease back.
//
// A goroutine handles each recall, one at a time for an inode, and never waits for an
// operation that itself waits for a lease:
//
//  0. If the kernel may have dirty pages of mappings, the kernel writes the pages back
//     (mapped.go).
//  1. For an exclusive lease, writers are held back, and buffered bytes are synced and
//     committed.
//  2. The client makes the kernel forget its cache. Meanwhile, reads are still served under
//     the old lease: the kernel holds a page's lock during a READ, so a READ waiting for a new
//     lease would block the invalidation for ever. But a READ received after the invalidation
//     has passed its page leaves stale bytes in the page cache. So ranges read meanwhile are
//     recorded. Then new reads are held back, reads in flight end, and just the recorded
//     ranges are invalidated again, except pages locked by held-back reads: the held-back
//     reads fill these pages anew. A read of a page during the page's invalidation is served,
//     and is recorded again.
//  3. The client lowers the lease, forgets cached state and notifies the owner. The held-back
//     operations continue and ask for a lease again.
//
// An owner that takes a snapshot waits only for a moment. Bytes not committed by then stay
// buffered, with the lease: the writers continue, and the bytes are committed later, like all
// others. The snapshot has the last synced state of the file. How the other inodes get their
// leases again: barred.go.

// Bounds of a recall.
const (
	recallGrace = 50 * time.Millisecond // for a writer that waited for the lease, to use the lease once
	recallTries = 10 * time.Second      // time of flushing before the client gives up bytes that can never be committed
)

// recall is the state of an inode while its lease is being given back.
type recall struct {
	queue []recallAsk
	track bool         // record the ranges of reads
	read  []byteRange  // while track
	hold  bool         // reads wait,
	held  []*byteRange // these ranges,
	now   byteRange    // except ranges that overlap now, while busy
	busy  bool

	// pages: the kernel writes pages of mappings under the lease that is being given back
	// (toWritePage), also behind the gate if gated.
	pages bool
	gated bool
}

type recallAsk struct {
	keep  meta.LeaseMode
	epoch uint64    // the volume's epoch at the time of the recall, which concerns leases of that epoch only
	until time.Time // after this time the client keeps the lease; zero: no bound
	done  func(held bool)
}

type byteRange struct{ off, n int64 }

// Granted raises a lease. The session's reader goroutine calls it.
func (c *Client) Granted(id meta.VolumeID, g meta.Grant) {
	v := c.lookVolume(id)
	if v == nil {
		return
	}
	t, k := &c.table, inodeKey{id, g.Ino}
	in := t.get(v, g.Ino)
	defer in.put()
	t.mu.Lock() // a drop that begins now comes after the grant
	defer t.mu.Unlock()
	if t.voidLocked(k) {
		t.giveUpLocked(k) // in the next round of drops: a round is under way
		return
	}
	in.mu.Lock()
	defer in.mu.Unlock()
	if in.lease == meta.LeaseNone {
		in.since = t.tick.Add(1)
	}
	in.lease = max(in.lease, g.Mode)
}

// Recall lowers a lease and calls done. The session's reader goroutine calls Recall, which
// does not block.
func (c *Client) Recall(r meta.Recall, done func()) {
	ask := recallAsk{keep: r.Keep, epoch: c.epochOf(r.Volume), done: func(bool) { done() }}
	if c.kept.later(func() { c.recalled(r, ask) }) {
		return
	}
	c.recalled(r, ask)
}

// epochOf returns the epoch of a volume, open or not. The session's reader goroutine calls it.
func (c *Client) epochOf(id meta.VolumeID) uint64 {
	c.mu.Lock()
	defer c.mu.Unlock()
	return 1 + c.expired[id]
}

// RecallWithin lowers a lease if the buffered bytes can be committed within the recall's time,
// and calls done with held: whether the client keeps the lease. It is called like Recall.
func (c *Client) RecallWithin(r meta.Recall, done func(held bool)) {
	ask := recallAsk{r.Keep, c.epochOf(r.Volume), time.Now().Add(r.Within), done}
	if c.kept.later(func() { c.recalled(r, ask) }) {
		return // the answer comes later, but the time counts from now
	}
	c.recalled(r, ask)
}

func (c *Client) recalled(r meta.Recall, ask recallAsk) {
	c.stats.recalls.Add(1)
	in := c.table.peek(r.Volume, r.Ino)
	if in == nil {
		c.unknown(inodeKey{r.Volume, r.Ino}, func() { ask.done(false) })
		return
	}
	dirty := ask.keep == meta.LeaseShared && c.mayBeDirty(r.Volume, r.Ino) != nil
	in.mu.Lock()
	if in.recall != nil {
		in.recall.queue = append(in.recall.queue, ask)
		in.mu.Unlock()
		in.put()
		return
	}
	if ask.keep == meta.LeaseShared && !dirty && ask.epoch == in.vol.owner.epoch.Load() && in.giveBackClean(!ask.until.IsZero()) {
		in.mu.Unlock()
		in.put()
		ask.done(false)
		return
	}
	in.recall = &recall{queue: []recallAsk{ask}}
	in.mu.Unlock()
	c.spawn(func() {
		defer in.put()
		in.serveRecalls()
	})
}

// growthEvery is the pause between two answers about a file: readers that ask all the time must
// not make the writer sync all the time.
const growthEvery = 2 * time.Millisecond

// Growth answers how long a file is to which this client appends, without giving the lease
// back: other clients may read what is synced in the file's own chunk. Growth first syncs every
// byte whose write has returned. If the file has no open end in the journal, done gets an
// answer that is not OK. The session's reader goroutine calls Growth, which does not block.
func (c *Client) Growth(id meta.VolumeID, ino meta.Ino, done func(meta.Growth)) {
	epoch := c.epochOf(id)
	c.stats.growths.Add(1)
	answer := func() {
		in := c.table.peek(id, ino)
		if in == nil || c.mayBeDirty(id, ino) != nil {
			if in != nil {
				in.put()
			}
			done(meta.Growth{})
			return
		}
		c.spawn(func() {
			defer in.put()
			done(in.growth(epoch))
		})
	}
	if !c.kept.later(answer) {
		answer()
	}
}

// growth syncs the appended bytes and returns the file's state, or an answer that is not OK.
func (in *inode) growth(epoch uint64) meta.Growth {
	v := in.vol
	in.mu.Lock()
	if !in.growsLocked(epoch) {
		in.mu.Unlock()
		return meta.Growth{}
	}
	pause := time.Until(in.grown.Add(growthEvery))
	in.mu.Unlock()
	if pause > 0 {
		time.Sleep(pause)
	}
	in.mu.Lock()
	dirty := in.file != nil && in.file.uncommitted > 0
	in.mu.Unlock()
	if dirty && !v.c.cfg.UnsafeNoGrowthSync {
		if err := v.back.flushRound(v.c.ctx, in, flushKeep); err != nil {
			return meta.Growth{} // the recall reports the failure
		}
	}
	in.mu.Lock()
	defer in.mu.Unlock()
	in.grown = time.Now()
	if !in.growsLocked(epoch) {
		return meta.Growth{}
	}
	f := in.file
	size := f.own.base + f.own.upTo
	if v.c.cfg.UnsafeNoGrowthSync {
		size = f.size
	}
	if f.uncommitted == 0 && size != f.size {
		return meta.Growth{}
	}
	g := meta.Growth{OK: true, Size: size, Mtime: f.mtime, Ctime: max(f.ctime, in.attr.Ctime), Change: in.attr.Change}
	if g.Mtime == 0 {
		g.Mtime = in.attr.Mtime
	}
	return g
}

// growsLocked reports that the file has an open end in the journal, under an exclusive lease
// that is not being recalled. The caller holds mu.
func (in *inode) growsLocked(epoch uint64) bool {
	f := in.file
	return f != nil && f.own.ended && f.own.chunk != nil && in.attrOK && in.lease == meta.LeaseExclusive && in.recall == nil && in.vol.owner.epoch.Load() == epoch
}

// unknown answers the recall of an inode that is not cached here, and makes the owner forget
// this client's lease.
func (c *Client) unknown(k inodeKey, done func()) {
	t := &c.table
	t.mu.Lock()
	// An operation may use the inode by now, but nothing is granted to it before the drop.
	send := t.giveUpLocked(k)
	t.mu.Unlock()
	c.spawn(func() {
		if c.cfg.Left != nil && c.cfg.Notify != nil {
			// The kernel may have cached the inode under the lease of a predecessor process.
			c.cfg.Notify.InvalEntries(k.v, k.ino)
			c.cfg.Notify.InvalData(k.v, k.ino, 0, 0)
		}
		done()
		if send {
			t.sendDrops()
		}
	})
}

func (in *inode) serveRecalls() {
	kept := false
	for {
		in.mu.Lock()
		r := in.recall
		if len(r.queue) == 0 {
			in.recall = nil
			in.mu.Unlock()
			if kept {
				in.vol.back.kick() // the flusher skips files that are being recalled
			}
			return
		}
		ask := r.queue[0]
		r.queue = r.queue[1:]
		lease := in.lease
		in.mu.Unlock()
		held := lease > ask.keep && !in.giveBack(&ask)
		kept = kept || held
		ask.done(held)
	}
}

// giveBackClean lowers an exclusive lease to a shared lease if nothing is to be committed or
// awaited. The client may hold very many such leases, of closed files made a moment ago.
// barrier: the recall is part of a snapshot's barrier. The caller holds mu.
func (in *inode) giveBackClean(barrier bool) bool {
	f := in.file
	if f != nil && (f.turns.want > 0 || f.turns.gate > 0 || f.leftFor(flushClose)) {
		return false
	}
	written := in.lease == meta.LeaseExclusive && f != nil && f.puts != f.barred
	if f != nil {
		f.turns.changed()
	}
	in.lowerLocked(meta.LeaseShared)
	if written && barrier {
		f.barred = f.puts
		in.vol.barred.add(in.ino)
	}
	return true
}

// giveBack lowers the lease. If the recall has a bound on its time, giveBack reports whether
// it lowered the lease; if not, nothing has changed. A lease of a later epoch stays: the
// recall concerned a lease that has ended.
func (in *inode) giveBack(ask *recallAsk) bool {
	v, n := in.vol, in.vol.c.cfg.Notify
	keep, until := ask.keep, ask.until
	var pages Launderer
	if until.IsZero() { // a snapshot shows synced bytes
		pages = v.c.mayBeDirty(v.id, in.ino)
	}
	in.mu.Lock()
	if v.owner.epoch.Load() != ask.epoch {
		in.mu.Unlock()
		return true
	}
	if pages != nil {
		in.recall.pages = true
		in.mu.Unlock()
		in.collect(func() { pages.Launder(v.id, in.ino) })
		in.mu.Lock()
	}
	f := in.file
	gated := in.lease == meta.LeaseExclusive && f != nil
	if gated {
		in.letPending(f)
		f.turns.shut()
	}
	in.recall.gated = gated
	if keep == meta.LeaseShared {
		in.recall.pages = false // the kernel may keep pages stored from now on
	}
	if gated || pages != nil && f != nil && f.uncommitted > 0 {
		in.mu.Unlock()
		gone := in.flushForRecall(ask)
		in.mu.Lock()
		if !gone {
			in.recall.gated = false
			in.passed++
			if gated {
				f.turns.gate--
			}
			f.turns.changed()
			in.mu.Unlock()
			return false
		}
	}
	isDir := in.dir != nil || in.attrOK && in.attr.IsDir()
	if keep == meta.LeaseNone && n != nil {
		in.recall.track = true
		in.mu.Unlock()
		if isDir {
			n.InvalEntries(v.id, in.ino)
			n.InvalAttr(v.id, in.ino)
		} else {
			n.InvalData(v.id, in.ino, 0, 0)
		}
		in.mu.Lock()
		in.invalidateRead()
		if pages != nil {
			in.collectLast(ask, pages)
		}
	}
	if f := in.file; f != nil {
		f.turns.changed() // before the file may be forgotten, so that waiting goroutines look again
	}
	mine := v.owner.epoch.Load() == ask.epoch // else the lease is void, or will be soon; a new lease may exist
	if mine {
		in.lowerLocked(keep)
	}
	if in.recall != nil {
		in.recall.track, in.recall.hold, in.recall.read = false, false, nil
		in.recall.pages, in.recall.gated = false, false
	}
	if gated {
		f.turns.gate--
	}
	if f := in.file; f != nil {
		f.turns.changed()
		if mine && gated && keep == meta.LeaseShared && !until.IsZero() && f.puts != f.barred {
			f.barred = f.puts
			v.barred.add(in.ino)
		}
	}
	in.mu.Unlock()
	return true
}

// Orphaned tells that another session removed the last name of an inode while this session
// held a lease on it. When no opener is left here, the owner may forget the inode. The
// session's reader goroutine calls Orphaned.
func (c *Client) Orphaned(id meta.VolumeID, ino meta.Ino) {
	if c.kept.later(func() { c.Orphaned(id, ino) }) {
		return
	}
	v := c.lookVolume(id)
	if v == nil {
		return
	}
	in := c.table.peek(id, ino)
	if in == nil {
		c.spawn(func() {
			if !v.holds.hold(ino) {
				v.back.releaseOrphan(ino)
			}
		})
		return
	}
	defer in.put()
	in.mu.Lock()
	open := in.file != nil && in.file.users.opens > 0
	if open {
		in.file.orphaned = true
	}
	in.mu.Unlock()
	if !open {
		c.spawn(func() { v.back.bury(v.node(ino)) })
	}
}

// Claims returns this client's leases and locks in a volume, for an owner that has lost them,
// and the files open without a lease, which the owner keeps when their last name is removed.
// The session holds its own lock meanwhile, so Claims makes no calls on the session.
func (c *Client) Claims(id meta.VolumeID) (leases []meta.Grant, locks []meta.Lock) {
	v := c.lookVolume(id)
	if v == nil {
		return nil, nil
	}
	c.kept.uncertain(v)
	for _, in := range c.table.all(func(in *inode) bool { return in.vol == v }) {
		in.mu.Lock()
		if in.lease != meta.LeaseNone || in.file != nil && in.file.users.opens > 0 {
			leases = append(leases, meta.Grant{Ino: in.ino, Mode: in.lease})
		}
		in.mu.Unlock()
		in.put()
	}
	return leases, v.locks.all()
}

// letPending gives a writer the chance to use a fresh grant once, so that two clients which
// write the same file both make progress.
func (in *inode) letPending(f *file) {
	if f.turns.want == 0 {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), recallGrace)
	defer cancel()
	for n := f.puts; f.turns.want > 0 && f.puts == n; {
		if in.wait(ctx, f) != nil {
			return
		}
	}
}

// invalidateRead does step 2's second half; in.mu is held, and released
// meanwhile.
func (in *inode) invalidateRead() {
	r := in.recall
	r.hold = true
	for {
		for f := in.file; f != nil && f.users.reads > 0; f = in.file {
			if in.wait(context.Background(), f) != nil {
				break
			}
		}
		g, ok := r.next()
		if !ok {
			r.track = false
			return
		}
		r.now, r.busy = g, true
		in.mu.Unlock()
		in.vol.c.cfg.Notify.InvalData(in.vol.id, in.ino, g.off, g.n)
		in.mu.Lock()
		r.busy = false
	}
}

// next removes and returns a recorded range for which no read waits: the pages of a waiting
// read are locked, and will be filled under the new lease.
func (r *recall) next() (byteRange, bool) {
	const page = 4096
	for i := range r.read {
		g := &r.read[i]
		end := (g.off + g.n + page - 1) &^ (page - 1)
		g.off &^= page - 1
		g.n = end - g.off
	}
	slices.SortFunc(r.read, func(a, b byteRange) int { return cmp.Compare(a.off, b.off) })
	var merged []byteRange
	for _, g := range r.read {
		if k := len(merged) - 1; k >= 0 && g.off <= merged[k].off+merged[k].n {
			merged[k].n = max(merged[k].n, g.off+g.n-merged[k].off)
			continue
		}
		merged = append(merged, g)
	}
	for _, h := range r.held {
		lo, hi := h.off&^(page-1), (h.off+h.n+page-1)&^(page-1)
		var rest []byteRange
		for _, g := range merged {
			if g.off < min(lo, g.off+g.n) {
				rest = append(rest, byteRange{g.off, min(lo, g.off+g.n) - g.off})
			}
			if from := max(hi, g.off); from < g.off+g.n {
				rest = append(rest, byteRange{from, g.off + g.n - from})
			}
		}
		merged = rest
	}
	if len(merged) == 0 {
		r.read = nil
		return byteRange{}, false
	}
	r.read = merged[1:]
	return merged[0], true
}

// awaitTurn holds a read back during the end of a recall. A read whose pages are being
// invalidated goes through under the old lease and is recorded again, because the invalidation
// may be waiting for the page's lock. rng is nil if the caller holds no page lock.
func (in *inode) awaitTurn(ctx context.Context, rng *byteRange) error {
	for {
		r := in.recall
		if r == nil || !r.hold || rng != nil && r.busy && r.now.touches(rng) {
			return nil
		}
		if rng != nil {
			r.held = append(r.held, rng)
		}
		err := in.wait(ctx, in.fileLocked())
		if rng != nil {
			r.held = slices.DeleteFunc(r.held, func(h *byteRange) bool { return h == rng })
		}
		if err != nil {
			return err
		}
	}
}

// flushForRecall commits all buffered bytes and reports whether nothing is left.
//
// With a bound on the recall's time, it retries transient failures until then; the rest stays
// buffered. Without a bound, another client waits for this file, and flushForRecall retries
// for as long as servers are away, disks are full or broken, or a quota is exhausted: the
// bytes exist only here, and the program that wrote them may have closed the file and ended.
// Meanwhile open handles get the error. The volume's owner bounds how long it waits for a
// recall, and then ends the session (endStubborn of meta/server).
//
// After recallTries of a permanent failure, flushForRecall gives the bytes up and the writer
// gets the error.
func (in *inode) flushForRecall(ask *recallAsk) (nothingLeft bool) {
	v, until := in.vol, ask.until
	ctx, deadline := v.c.ctx, time.Now().Add(recallTries)
	say := deadline
	if !until.IsZero() {
		var cancel context.CancelFunc
		ctx, cancel = context.WithDeadline(ctx, until)
		defer cancel()
	}
	for wait := 10 * time.Millisecond; ; wait = min(2*wait, time.Second) {
		// After the end of ctx, a flush that hangs goes on with its bytes.
		err := v.back.flushRound(ctx, in, flushClose)
		switch {
		case err == nil, v.owner.epoch.Load() != ask.epoch: // or the buffered bytes belong to a lease of a later epoch
			return true
		case errors.Is(err, meta.SessionExpired) || errors.Is(err, meta.Stale) || errors.Is(err, meta.ReadOnly) || v.c.ctx.Err() != nil, // the owner closes the file's open end
			until.IsZero() && (v.c.cfg.UnsafeNoSpaceWait || !mayPass(err)) && time.Now().After(deadline) && in.closeEnd(ctx):
			v.back.loseDirty(in, err)
			return true
		case ctx.Err() != nil:
			return false
		}
		if !passing(err) {
			in.mu.Lock()
			if in.file != nil {
				in.file.fail(err, false)
			}
			in.mu.Unlock()
		}
		if now := time.Now(); until.IsZero() && now.After(say) {
			say = now.Add(recallTries)
			v.c.log.Warn("another client waits for a file: this client can't make the file's bytes durable yet", "inode", v.subject(in.ino), "err", err)
		}
		select {
		case <-time.After(wait):
		case <-ctx.Done():
		}
	}
}

// closeEnd makes the owner close a file's open end, if any: only the chunk may know of bytes
// acknowledged by an fsync, and the next holder of the lease must find the bytes. It returns
// whether no open end is left.
func (in *inode) closeEnd(ctx context.Context) bool {
	in.mu.Lock()
	f := in.file
	if f == nil || !f.own.ended {
		in.mu.Unlock()
		return true
	}
	own := f.own.chunk
	in.mu.Unlock()
	err := in.vol.chunks.seal(ctx, own)
	if err != nil && meta.KindOf(err) != meta.NoSuchChunk {
		in.vol.c.log.Warn("the open end of a file can't be closed yet: this client keeps the lease", "inode", in.vol.subject(in.ino), "chunk", own.id, "err", err)
		return false
	}
	return true
}

// Expired voids every lease in some volumes: the session ended there, and uncommitted bytes
// are lost. A goroutine of the session calls Expired and delivers no other messages of these
// volumes meanwhile. A new session follows.
func (c *Client) Expired(volumes []meta.VolumeID, err error) {
	for _, id := range volumes {
		c.mu.Lock()
		c.expired[id]++
		v, epoch := c.volumes[id], 1+c.expired[id]
		c.kept.expired(id)
		c.mu.Unlock()
		if v != nil {
			v.expired(epoch, err)
		}
		if meta.KindOf(err) != meta.AccessDenied {
			continue // snapshots do not change
		}
		c.mu.Lock()
		var views []*Volume
		for _, w := range c.volumes {
			if w.view != nil && w.view.of.id == id {
				views = append(views, w)
			}
		}
		c.mu.Unlock()
		for _, w := range views {
			w.view.end() // a client that gets access again opens the views again
		}
	}
}

// expired begins an epoch. No grant arrives before it returns, so that all buffered bytes were
// written in an earlier epoch, which each file records. Captured bytes of an earlier epoch are
// not sent any more (expiredSince, and DoBatch).
func (v *Volume) expired(epoch uint64, err error) {
	c := v.c
	v.owner.epoch.Store(epoch)
	c.kept.uncertain(v)
	v.meter.void(epoch)
	// After a rollback of the volume, removed files may exist again. Files without a name
	// ended with the session.
	v.holds.clear()
	v.orphans.clear()
	v.locks.clear()
	v.leaderships.endAll()
	// A client that may no longer read also drops the kernel's entries cached without a lease:
	// an owner's last answer during writes of others.
	every := c.cfg.Left != nil || meta.KindOf(err) == meta.AccessDenied
	lost, files := int64(0), 0
	ins := c.table.all(func(in *inode) bool { return in.vol == v })
	for _, in := range ins {
		in.mu.Lock()
		had := in.lease != meta.LeaseNone
		isDir := in.dir != nil || in.attrOK && in.attr.IsDir()
		if f := in.file; f != nil && (f.uncommitted > 0 || f.own.ended) {
			in.vol.c.stats.lose(f.uncommitted)
			lost, files = lost+f.uncommitted, files+1
			f.fail(meta.E("write back", meta.IO, in.vol.subject(in.ino), err), true)
			in.dropDirtyLocked()
		}
		if f := in.file; f != nil {
			if f.own.chunk != nil {
				in.vol.chunks.retire(f.own.chunk)
			}
			f.own.chunk, f.own.ended, f.appends, f.orphaned = nil, false, 0, false
			if f.metaDirty || f.sealWant {
				// The size is somebody else's to change now, and so are the times.
				f.size, f.mtime, f.ctime, f.metaDirty = 0, 0, 0, f.sealWant
				f.puts++
				v.back.unlistLocked(in)
			}
			f.epoch = epoch
		}
		in.attr.Change = 0 // lost changes counted, too
		in.lowerLocked(meta.LeaseNone)
		if f := in.file; f != nil {
			f.turns.changed()
		}
		tell := (had || every) && c.cfg.Notify != nil
		if tell {
			// Pages that are being read stay locked until the answer, which may need a lease
			// of the new session, so nobody can wait here. The next opener of the file makes
			// the kernel forget the pages first.
			in.inval++
		}
		in.mu.Unlock()
		if tell {
			c.spawn(func() {
				defer in.put()
				defer func() {
					in.mu.Lock()
					in.inval--
					in.mu.Unlock()
				}()
				if isDir {
					c.cfg.Notify.InvalEntries(in.vol.id, in.ino)
					c.cfg.Notify.InvalAttr(in.vol.id, in.ino)
				} else {
					c.cfg.Notify.InvalData(in.vol.id, in.ino, 0, 0)
				}
			})
		} else {
			in.put()
		}
	}
	v.chunks.forget()
	if files > 0 {
		c.log.Error("the session expired: bytes that were not synced are lost", "volume", v.name, "bytes", lost, "files", files, "err", err)
	} else {
		c.log.Warn("the session expired: no file had unsynced bytes, and the client goes on in a new session", "volume", v.name, "err", err)
	}
}

// touches reports that the ranges share a page.
func (g byteRange) touches(h *byteRange) bool {
	const page = 4096
	return h.off&^(page-1) < g.off+g.n && g.off&^(page-1) < h.off+h.n
}

// pageFlush is the interval at which written-back pages are flushed while more pages arrive:
// the pages of one file may exceed the write buffer.
const pageFlush = 20 * time.Millisecond

// pageFlushMax bounds a wait for another operation of this client on the file: the operation
// may itself wait for the end of the recall.
const pageFlushMax = 2 * time.Second

// flushPages commits written-back pages, if there are any.
func (in *inode) flushPages(within time.Duration) {
	in.mu.Lock()
	some := in.file != nil && in.file.uncommitted > 0
	in.mu.Unlock()
	if !some {
		return
	}
	ctx, cancel := context.WithTimeout(in.vol.c.ctx, within)
	defer cancel()
	_ = in.vol.back.flushRound(ctx, in, flushClose)
}

// collect runs fn, during which the kernel writes pages back while the lease is being given
// back, and commits pages meanwhile to make room for more.
func (in *inode) collect(fn func()) {
	done := make(chan struct{})
	in.vol.c.spawn(func() {
		fn()
		close(done)
	})
	for {
		select {
		case <-done:
			return
		case <-time.After(pageFlush):
			// The next flush returns the same error.
			in.flushPages(pageFlushMax)
		}
	}
}

// collectLast commits the pages that programs dirtied while the kernel forgot other pages.
// After that the kernel has no pages of the file, and gets none while reads are held back. The
// caller holds in.mu, which collectLast releases meanwhile.
func (in *inode) collectLast(ask *recallAsk, pages Launderer) {
	in.mu.Unlock()
	in.collect(func() { pages.Settle(in.vol.id, in.ino) })
	in.mu.Lock()
	in.recall.pages = false
	if f := in.file; f != nil && f.uncommitted > 0 {
		in.mu.Unlock()
		in.flushForRecall(ask)
		in.mu.Lock()
	}
}
