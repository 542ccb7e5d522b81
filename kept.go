package penstock

import (
	"cmp"
	"context"
	"slices"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"

	"penstock.io/penstock/meta"
	metaclient "penstock.io/penstock/meta/client"
	"penstock.io/penstock/meta/keep"
)

// The state that a client leaves for its successor process.
//
// A client with Config.Keep has its write buffer in memory that outlives the process, and
// notes there the files and chunks being written, the held locks and the volumes in use. A
// successor continues the session. To owners, the client was merely silent for a moment, and
// its leases hold. So
//
//   - uncommitted bytes are still covered by the exclusive lease under which they were written,
//     and the successor restores them before it does anything else;
//   - the kernel's cache is still covered by leases, but the successor does not know the leased
//     inodes: a recall of an inode outside its table makes the kernel forget the inode in any
//     case;
//   - an operation without an answer, repeated by the kernel, has the same number as before and
//     gets the first reply.
//
// A successor never appends to a chunk of its predecessor: first the owner seals the chunk
// (rule 6), which also closes an open-ended extent at the synced length.
//
// Overwritten bytes are in two blobs, the newer blob above the older. INVARIANT: of two
// overlapping blobs in Keep, the newer is not forgotten before the older: blobs are restored
// in order.

// kept is the client's side of its Keep.
type kept struct {
	keep    *keep.Memory // nil: nothing is kept
	session counted      // nil in tests without a session

	mu      sync.Mutex
	left    *keep.Memory // the records with which another successor would begin; nil: keep
	chunks  map[meta.ChunkID]keep.Slot
	at      map[uint64]uint64 // offsets of appends that a predecessor had begun, by request
	ring    []keep.Slot       // the appends begun last
	turn    int
	waiting []func() // until Resumed
	resumed bool
}

// counted is a session that another process may continue. It counts the kernel's requests; see
// metaclient.Session.Begin.
type counted interface {
	Begin() uint32
	End(turn uint32)
	Inherit(ctx context.Context, v meta.VolumeID) (metaclient.Promise, error)
	SealChunk(ctx context.Context, v meta.VolumeID, id meta.ChunkID) (meta.ChunkRecord, error)
}

// appendsKept is how many appends are remembered: more than the kernel sends at
// once.
const appendsKept = 4096

func (k *kept) init(cfg *Config) {
	k.keep, k.left, k.resumed = cfg.Keep, cfg.Left, cfg.Left == nil
	k.chunks = make(map[meta.ChunkID]keep.Slot)
}

// Begin counts a request from above whose operations have ids (Call.Op): after a kill of this
// process, the request may be repeated under the same ids. The caller passes turn to End when
// the request was answered and can't be repeated any more.
func (c *Client) Begin() (turn uint32) {
	if c.kept.keep == nil || c.kept.session == nil {
		return 0
	}
	return c.kept.session.Begin()
}

// End ends a request that Begin counted.
func (c *Client) End(turn uint32) {
	if c.kept.keep != nil && c.kept.session != nil {
		c.kept.session.End(turn)
	}
}

// blob notes a new blob of a file at an offset.
func (k *kept) blob(f *file, b *blob, off uint64) {
	if k.keep == nil {
		return
	}
	b.slot = k.keep.Note(keep.Record{Kind: keep.Data, Aux: uint32(f.epoch - 1), N: [6]uint64{
		uint64(f.in.vol.id), uint64(f.in.ino), off, uint64(len(b.data)), k.keep.Place(b.data), uint64(f.mtime),
	}})
}

// upToNoted returns by how many of n bytes at off a blob may grow: up to the first byte of
// another noted blob. The other blob may be the newer one and still needed for other bytes,
// and would be restored above the new bytes.
func (k *kept) upToNoted(f *file, off uint64, n int) int {
	if k.keep == nil {
		return n
	}
	f.m.each(off, off+uint64(n), func(s *segment) bool {
		if s.b == nil || s.b.slot == 0 {
			return true
		}
		n = int(max(s.off, off) - off)
		return false
	})
	return n
}

// moved notes a blob's new place.
func (k *kept) moved(b *blob) {
	if k.keep == nil || b.slot == 0 {
		return
	}
	r, _ := k.keep.Get(b.slot)
	r.N[3], r.N[4] = uint64(len(b.data)), k.keep.Place(b.data)
	old := b.slot
	b.slot = k.keep.Note(r) // in the same place of the order
	k.keep.Erase(old)
}

// forget notes that a blob is no longer needed.
func (k *kept) forget(f *file, b *blob) {
	if b.slot == 0 {
		return
	}
	if f.notes.erasing {
		f.notes.erased = append(f.notes.erased, b.slot)
	} else {
		k.keep.Erase(b.slot)
	}
	b.slot = 0
}

// inOrder delays forgetting: the returned function forgets all blobs that were given to forget
// meanwhile, oldest first. The caller holds f's mu from inOrder until then.
func (k *kept) inOrder(f *file) func() {
	if k.keep == nil {
		return func() {}
	}
	f.notes.erasing = true
	return func() {
		k.keep.EraseAll(f.notes.erased)
		f.notes.erasing, f.notes.erased = false, nil
	}
}

// forgetAll forgets the buffered bytes of a file before the file is dropped. If the file is
// not dropped after all, the returned function notes the remaining buffered bytes again, in
// their old order; its caller holds in's mu.
func (k *kept) forgetAll(in *inode) (again func()) {
	if k.keep == nil {
		return func() {}
	}
	type noted struct {
		b *blob
		r keep.Record
	}
	var all []noted
	in.mu.Lock()
	defer in.mu.Unlock()
	f := in.fileLocked()
	defer k.inOrder(f)()
	f.m.each(0, 1<<63, func(s *segment) bool {
		if s.b != nil && s.b.slot != 0 {
			r, _ := k.keep.Get(s.b.slot)
			all = append(all, noted{s.b, r})
			k.forget(f, s.b)
		}
		return true
	})
	return func() {
		left := make(map[*blob]bool, len(all))
		f.m.each(0, 1<<63, func(s *segment) bool {
			left[s.b] = true
			return true
		})
		// Newest first, for the invariant.
		slices.SortFunc(all, func(x, y noted) int { return cmp.Compare(y.r.Seq, x.r.Seq) })
		for _, n := range all {
			if left[n.b] {
				n.b.slot = k.keep.Note(n.r)
			}
		}
	}
}

// chunk notes an assigned chunk; ended notes that the chunk was sealed.
func (k *kept) chunk(id meta.ChunkID) {
	if k.keep == nil {
		return
	}
	s := k.keep.Note(keep.Record{Kind: keep.Chunk, N: [6]uint64{uint64(id.Volume), uint64(id.Term), id.Counter}})
	k.mu.Lock()
	k.chunks[id] = s
	k.mu.Unlock()
}

func (k *kept) ended(id meta.ChunkID) {
	if k.keep == nil {
		return
	}
	k.mu.Lock()
	s := k.chunks[id]
	delete(k.chunks, id)
	k.mu.Unlock()
	k.keep.Erase(s)
}

// appendAt returns the offset for the bytes of an append: the end of the file, unless a
// predecessor may have done this append already. It notes the offset before the bytes are
// written.
func (k *kept) appendAt(in *inode, call *Call, end uint64) uint64 {
	if call == nil || call.Op.Unique == 0 {
		return end
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	if at, ok := k.at[call.Op.Unique]; ok && call.Resent {
		return at
	}
	k.noteAppend(keep.Record{Kind: keep.Append, N: [6]uint64{uint64(in.vol.id), uint64(in.ino), call.Op.Unique, end}})
	return end
}

func (k *kept) noteAppend(r keep.Record) {
	r.Seq = 0
	if len(k.ring) < appendsKept {
		k.ring = append(k.ring, k.keep.Note(r))
		return
	}
	k.keep.Erase(k.ring[k.turn])
	k.ring[k.turn] = k.keep.Note(r)
	k.turn = (k.turn + 1) % appendsKept
}

// keepLocked replaces the noted locks of one lock owner.
func (h *heldLocks) keepLocked(k lockKey, l []meta.Lock) {
	if h.keep == nil {
		return
	}
	old := h.slots[k]
	var slots []keep.Slot
	for _, o := range l {
		aux := uint32(o.Type)
		if o.Flock {
			aux |= 1 << 8
		}
		slots = append(slots, h.keep.Note(keep.Record{Kind: keep.Lock, Aux: aux, N: [6]uint64{
			uint64(h.volume), uint64(o.Ino), o.Owner, o.Start, o.End, uint64(o.PID),
		}}))
	}
	if h.slots == nil {
		h.slots = make(map[lockKey][]keep.Slot)
	}
	if h.slots[k] = slots; len(slots) == 0 {
		delete(h.slots, k)
	}
	h.keep.EraseAll(old)
}

// expired notes that the session ended in a volume. The owner knows the session again as soon
// as a new one has begun, so a successor would not hear of the end, and would write bytes that
// were given up over the bytes of other clients.
func (k *kept) expired(v meta.VolumeID) {
	k.keep.Expired(uint64(v))
	k.mu.Lock()
	defer k.mu.Unlock()
	k.left.Void(uint64(v))
}

// ---- the successor

// volumesOf lists the volumes that a predecessor had open.
func volumesOf(left []keep.Record) (l []meta.VolumeID) {
	for _, r := range left {
		if r.Kind == keep.Volume {
			l = append(l, meta.VolumeID(r.N[0]))
		}
	}
	return l
}

// later postpones fn, which answers a request of the cluster, until all state is restored.
func (k *kept) later(fn func()) bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.resumed {
		return false
	}
	k.waiting = append(k.waiting, fn)
	return true
}

// Resumed tells a client with Config.Left that all open files are open again (Reopen). From
// now on the client answers requests of the cluster.
func (c *Client) Resumed() {
	c.kept.mu.Lock()
	l := c.kept.waiting
	c.kept.resumed, c.kept.waiting, c.kept.left = true, nil, nil
	c.kept.mu.Unlock()
	for _, fn := range l {
		fn()
	}
}

// Reopen counts an opener of a regular file, as Open does, for a file opened by a predecessor
// with the same flags. It sends no request.
func (v *Volume) Reopen(ino meta.Ino, flags uint32) {
	in := v.node(ino)
	defer in.put()
	in.mu.Lock()
	defer in.mu.Unlock()
	f := in.fileLocked()
	f.users.opens++
	in.direct = false
	if forWriting(flags) {
		f.users.writers++
	}
}

// Bounds of resume.
const (
	sealsAtOnce = 16
	filesAtOnce = 64
	inheritWait = 2 * time.Second
)

// resume restores a predecessor's state.
func (c *Client) resume(ctx context.Context, left []keep.Record) error {
	written := make(map[meta.VolumeID]bool)
	ends := make(map[meta.VolumeID]uint32) // of the predecessor's session
	void := make(map[meta.VolumeID]bool)   // volumes in which the session of an earlier successor ended
	for _, r := range left {
		switch id := meta.VolumeID(r.N[0]); r.Kind {
		case keep.Data, keep.Chunk:
			written[id] = true
		case keep.Volume:
			ends[id], void[id] = uint32(r.N[1]), r.N[2] > 0
		}
	}
	// Nobody waits for the owner of a volume to which nothing is to be written.
	brief, cancel := context.WithTimeout(ctx, inheritWait)
	defer cancel()
	var volumes []*Volume
	var promises errgroup.Group
	promises.SetLimit(filesAtOnce)
	for _, id := range volumesOf(left) {
		v, err := c.VolumeByID(ctx, id)
		if err != nil {
			c.log.Warn("a volume of the predecessor can't be opened", "volume", id, "err", err)
			continue
		}
		volumes = append(volumes, v)
		if void[id] {
			v.distrust.Store(true)
		}
		v.meter.inheriting()
		until := ctx
		if !written[id] {
			until = brief
		}
		promises.Go(func() error { v.meter.inherit(until); return nil })
	}
	_ = promises.Wait() // none fails
	var seals errgroup.Group
	seals.SetLimit(sealsAtOnce)
	files := make(map[inodeKey][]keep.Record)
	c.kept.at = make(map[uint64]uint64)
	for _, r := range left {
		switch r.Kind {
		case keep.View:
			c.reopenView(ctx, r)
		case keep.Chunk:
			id := meta.ChunkID{Volume: meta.VolumeID(r.N[0]), Term: uint32(r.N[1]), Counter: r.N[2]}
			c.kept.chunk(id)
			if v := c.lookVolume(id.Volume); v != nil {
				seals.Go(func() error { c.endLeft(ctx, v, id); return nil })
			}
		case keep.Lock:
			if v := c.lookVolume(meta.VolumeID(r.N[0])); v != nil && !void[v.id] {
				v.locks.set(meta.Lock{Ino: meta.Ino(r.N[1]), Owner: r.N[2], Start: r.N[3], End: r.N[4], PID: uint32(r.N[5]), Type: meta.LockType(r.Aux & 0xff), Flock: r.Aux>>8 != 0})
			}
		case keep.Append:
			c.kept.at[r.N[2]] = r.N[3]
			if c.kept.keep != nil {
				c.kept.noteAppend(r)
			}
		case keep.Data:
			k := inodeKey{meta.VolumeID(r.N[0]), meta.Ino(r.N[1])}
			files[k] = append(files[k], r)
		}
	}
	_ = seals.Wait() // none fails
	g, ctx := errgroup.WithContext(ctx)
	g.SetLimit(filesAtOnce)
	for k, l := range files {
		g.Go(func() error {
			return c.putBack(ctx, k, l, func(r keep.Record) bool { return void[k.v] || r.Aux != ends[k.v] })
		})
	}
	if err := g.Wait(); err != nil {
		return err
	}
	for _, v := range volumes {
		v.meter.inherited()
	}
	return nil
}

// endLeft makes the owner seal a chunk of the predecessor, at once or later.
func (c *Client) endLeft(ctx context.Context, v *Volume, id meta.ChunkID) {
	err := c.sealLeft(ctx, v, id)
	switch meta.KindOf(err) {
	case meta.KindOK, meta.NoSuchChunk, meta.SessionExpired:
		c.kept.ended(id)
	default:
		v.meter.inheriting()
		v.chunks.endLater(id, func(ctx context.Context) error {
			err := c.sealLeft(ctx, v, id)
			if k := meta.KindOf(err); k == meta.KindOK || k == meta.NoSuchChunk {
				v.meter.inherited()
			}
			return err
		})
	}
}

// sealLeft asks for a seal without an acknowledged length, as any client may: the chunk keeps
// all bytes of its replicas. (EndChunk, the writer's own call, would cut the chunk.)
func (c *Client) sealLeft(ctx context.Context, v *Volume, id meta.ChunkID) error {
	c.stats.rpcs.Add(1)
	_, err := c.kept.session.SealChunk(ctx, v.id, id)
	return err
}

// reopenView gives a view the number that the kernel knows. A view without a snapshot keeps
// its number as long as the kernel knows an inode of it; of a free number, only the turn is
// restored.
func (c *Client) reopenView(ctx context.Context, r keep.Record) {
	id, of, at := meta.VolumeID(r.N[0]), meta.VolumeID(r.N[1]), meta.Generation(r.N[2])
	c.mu.Lock()
	c.views.set(id, viewKey{of, at}, uint32(r.N[3]))
	if at != 0 {
		c.views.over[id] = false
	}
	c.watchLocked()
	c.mu.Unlock()
	if at == 0 {
		return
	}
	v, err := c.VolumeByID(ctx, of)
	if err == nil {
		var l []meta.Snapshot
		if l, _, err = v.snapshots.since(ctx, snapshotsAge); err == nil {
			for _, s := range l {
				if s.At == at {
					_, err = c.openView(v, s)
				}
			}
		}
	}
	if err != nil {
		c.log.Warn("a snapshot of the predecessor can't be opened", "volume", of, "generation", at, "err", err)
	}
}

// putBack buffers the uncommitted bytes of a file again. If the session has expired meanwhile,
// or had expired before (gone), the bytes are lost, and the file gets an error. Errors: those
// of requests to the cluster.
func (c *Client) putBack(ctx context.Context, k inodeKey, l []keep.Record, gone func(keep.Record) bool) error {
	v := c.lookVolume(k.v)
	if v == nil {
		return nil // the loss was logged
	}
	lost, n := 0, 0
	for _, r := range l {
		if gone(r) {
			lost += int(r.N[3])
			continue
		}
		l[n] = r
		n++
	}
	l = l[:n]
	in := v.node(k.ino)
	defer in.put()
	defer func() { c.lostLeft(in, lost) }() // mu is not held any more
	in.mu.Lock()
	if len(l) == 0 || v.owner.epoch.Load() != 1 {
		for _, r := range l {
			lost += int(r.N[3])
		}
		in.mu.Unlock()
		return nil
	}
	// The predecessor wrote under an exclusive lease, and an owner that recalls the lease
	// waits for this client. If the session ends from now on, Expired finds the lease here.
	in.lease, in.since = meta.LeaseExclusive, c.table.tick.Add(1)
	in.mu.Unlock()
	f, _, err := in.withMap(ctx, meta.LeaseExclusive)
	switch {
	case err == nil:
	case meta.KindOf(err) == meta.Stale:
		return nil // the file is gone
	default:
		return err
	}
	defer in.mu.Unlock()
	for _, r := range l {
		p := c.cfg.Left.Bytes(r)
		if p == nil || v.owner.epoch.Load() != 1 {
			lost += int(r.N[3])
			continue
		}
		n := int64(len(p))
		if n == 0 {
			continue
		}
		c.buf.force(n)
		off := r.N[2]
		if f.uncommitted == 0 {
			f.lo, f.hi = off, off+uint64(n)
		} else {
			f.lo, f.hi = min(f.lo, off), max(f.hi, off+uint64(n))
		}
		f.mtime = max(f.mtime, meta.Time(r.N[5]))
		f.ctime = f.mtime
		if v.meter.on.Load() {
			v.meter.putBack(&f.promised, in.needs(f, off, uint64(n)))
		}
		grew := int64(v.buffers.putLocked(f, p, off))
		c.buf.give(n - grew)
		f.size = max(f.size, off+uint64(n))
		f.puts++
		v.back.dirtyBytes.Add(grew)
		v.back.listDirtyLocked(in)
	}
	return nil
}

// lostLeft reports the loss of bytes that a predecessor accepted.
func (c *Client) lostLeft(in *inode, bytes int) {
	if bytes == 0 {
		return
	}
	c.stats.lose(int64(bytes))
	c.log.Error("bytes written through the predecessor are lost", "inode", in.vol.subject(in.ino), "bytes", bytes)
	in.mu.Lock()
	defer in.mu.Unlock()
	in.fileLocked().fail(meta.E("write back", meta.IO, in.vol.subject(in.ino), nil), true)
}

// uncertain notes that no lease covers the kernel's cache of the predecessor's time any more,
// and that the inodes in the cache are unknown. It makes the kernel forget names, and the
// pages of open files; pages of other files are forgotten when the files are opened. Cached
// attributes expire by themselves: the lease of the predecessor's time bounded their lifetime.
func (k *kept) uncertain(v *Volume) {
	if v.c.cfg.Left == nil {
		return
	}
	v.distrust.Store(true)
	n := v.c.cfg.Notify
	if n == nil {
		return
	}
	open := v.c.table.all(func(in *inode) bool { return in.vol == v })
	v.c.spawn(func() {
		n.InvalEntries(v.id, meta.RootIno)
		for _, in := range open {
			in.mu.Lock()
			unknown := in.lease == meta.LeaseNone && in.file != nil && in.file.users.opens > 0
			in.mu.Unlock()
			if unknown {
				n.InvalData(v.id, in.ino, 0, 0)
			}
			in.put()
		}
	})
}

// distrusted reports, once for each inode, that the kernel must drop the inode's pages. The
// caller holds mu.
func (in *inode) distrusted() bool {
	if in.fresh || !in.vol.distrust.Load() {
		return false
	}
	in.fresh = true
	return true
}
