package penstock

import (
	"cmp"
	"context"
	"fmt"
	"hash/maphash"
	"maps"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/keep"
)

// How a client shows a snapshot.
//
// A Volume with a view shows a snapshot of a live volume. A snapshot never changes, so the
// client caches the owner's answers without a lease and never asks again: an inode of a view
// counts as leased from its creation, and only eviction takes it out of the table, without a
// message to the owner. Only the places of bytes change, with repair and compaction; a read
// that fails fetches the places again, as on a live volume.
//
// A view ends when its snapshot is deleted. The client learns of the deletion from the answer
// to a request about the snapshot, or from the list of snapshots, which it fetches whenever a
// program looks at the list, and every viewCheck while it has views. Then the client drops
// everything cached, in its own memory and in the kernel, and all operations on the view fail
// with Stale.

// SnapshotDir is the name of the directory in a volume's root in which mounts, and Tree, show
// the volume's snapshots. A file of the volume with this name hides the snapshots.
const SnapshotDir = ".snapshot"

const (
	// viewValid is how long a cache above the client may keep the names and attributes of a
	// view.
	viewValid = time.Hour
	// snapshotsAge is how old the list of snapshots may be when a name is looked up.
	snapshotsAge = time.Second
	// viewCheck is the interval at which a client with views fetches the list of snapshots.
	viewCheck = 30 * time.Second
	// maxViews bounds the snapshots that one client can show at once: three quarters of the
	// numbers, so that a search for a free number is short.
	maxViews = meta.Views / 4 * 3
)

// view is the additional state of a Volume that shows a snapshot.
type view struct {
	v     *Volume // itself
	of    *Volume // the live volume
	snap  meta.Snapshot
	turn  uint32 // see Turn
	born  time.Time
	gone  atomic.Bool
	locks viewLocks
}

// snapshotNames is the last fetched list of a live volume's snapshots.
type snapshotNames struct {
	v *Volume

	mu    sync.Mutex
	list  []meta.Snapshot
	asked time.Time
}

// viewKey names a snapshot for ever: generations are never used again.
type viewKey struct {
	v  meta.VolumeID
	at meta.Generation
}

// views are a client's views and their numbers. The client's mu guards them.
//
// A view gets its number when the snapshot is first shown. The number is part of the kernel's
// ids of the view's files and outlives the view: the client assigns it to another snapshot
// only when the kernel knows no inode of the first any more (freeViews). The kernel may still
// hold an inode without asking for it, for example a watched inode; viewNumber.turn
// distinguishes such inodes.
type views struct {
	keep   *keep.Memory
	max    int // how many are given at once; 0: maxViews
	number map[viewKey]meta.VolumeID
	all    map[meta.VolumeID]*viewNumber // every number assigned so far
	over   map[meta.VolumeID]bool        // numbers of views that ended; true once the kernel knew no inode of the view
	watch  sync.Once
}

// viewNumber is a number of a view.
type viewNumber struct {
	key  viewKey // key.at 0: the number is free
	turn uint32  // number of snapshots that had the number before
	slot keep.Slot
}

// Snapshot opens a snapshot of a volume for reading. Changes fail with ReadOnly and, after the
// deletion of the snapshot, all operations with Stale. A junction is an empty directory in a
// snapshot: the volume behind it has snapshots of its own. Errors: NoSuchVolume,
// NoSuchSnapshot.
func (c *Client) Snapshot(ctx context.Context, volume, name string) (*Volume, error) {
	v, err := c.Volume(ctx, volume)
	if err != nil {
		return nil, err
	}
	return v.Snapshot(ctx, name)
}

// Snapshot is Client.Snapshot for an open volume.
func (v *Volume) Snapshot(ctx context.Context, name string) (*Volume, error) {
	none := meta.E("open snapshot", meta.NoSuchSnapshot, v.name+"@"+name, nil)
	if v.view != nil {
		return nil, none
	}
	find := func(l []meta.Snapshot) int {
		return slices.IndexFunc(l, func(s meta.Snapshot) bool { return s.Name == name })
	}
	list, fresh, err := v.snapshots.since(ctx, snapshotsAge)
	if err != nil {
		return nil, err
	}
	i := find(list)
	if i < 0 && !fresh { // the snapshot may have been taken a moment ago
		if list, _, err = v.snapshots.since(ctx, 0); err != nil {
			return nil, err
		}
		i = find(list)
	}
	if i < 0 {
		return nil, none
	}
	return v.c.openView(v, list[i])
}

// LookupSnapshot is Lookup in the directory of snapshots; it returns the root of a snapshot.
// Errors: NoSuchSnapshot.
func (v *Volume) LookupSnapshot(ctx context.Context, name string) (Entry, error) {
	w, err := v.Snapshot(ctx, name)
	if err != nil {
		return Entry{}, err
	}
	e, err := w.GetAttr(ctx, meta.RootIno)
	if err == nil && w.Ended() { // the view ended meanwhile: its number must not reach the kernel
		err = w.view.stale(nil)
	}
	return e, err
}

// ReadSnapshots lists the directory of snapshots, oldest first, as of at most a second ago.
func (v *Volume) ReadSnapshots(ctx context.Context) ([]meta.Snapshot, error) {
	if v.view != nil {
		return nil, nil
	}
	l, _, err := v.snapshots.since(ctx, snapshotsAge)
	return slices.Clone(l), err
}

// changed has the next look at snapshots ask anew.
func (sn *snapshotNames) changed() {
	sn.mu.Lock()
	defer sn.mu.Unlock()
	sn.asked = time.Time{}
}

// since returns a list of an age of at most age. fresh reports that the call fetched
// the list.
func (sn *snapshotNames) since(ctx context.Context, age time.Duration) (l []meta.Snapshot, fresh bool, err error) {
	v := sn.v
	sn.mu.Lock()
	if !sn.asked.IsZero() && time.Since(sn.asked) < age {
		defer sn.mu.Unlock()
		return sn.list, false, nil
	}
	sn.mu.Unlock()
	asked := time.Now()
	v.c.stats.rpcs.Add(1)
	all, err := v.c.sess.ListSnapshots(ctx, v.id)
	if err != nil {
		if meta.KindOf(err) == meta.NoSuchVolume {
			sn.endViews(asked, nil)
		}
		return nil, false, err
	}
	l = slices.DeleteFunc(all, func(s meta.Snapshot) bool { return s.Deleting })
	slices.SortFunc(l, func(a, b meta.Snapshot) int { return int(int64(a.At) - int64(b.At)) })
	sn.mu.Lock()
	if asked.After(sn.asked) {
		sn.list, sn.asked = l, asked
	}
	sn.mu.Unlock()
	sn.endViews(asked, l)
	return l, true, nil
}

// endViews ends the views of snapshots missing in the list l, except views opened after the
// list was requested.
func (sn *snapshotNames) endViews(asked time.Time, l []meta.Snapshot) {
	for _, w := range sn.v.c.openVolumes() {
		if w.view == nil || w.view.of != sn.v || w.view.born.After(asked) {
			continue
		}
		_, there := slices.BinarySearchFunc(l, w.view.snap.At, func(s meta.Snapshot, at meta.Generation) int { return int(int64(s.At) - int64(at)) })
		if !there {
			w.view.end()
		}
	}
}

// ViewID returns the volume number under which a snapshot of this volume is shown, or would be
// shown now: the Volume of the view's entries, from which inode numbers are made. Every client
// uses the same number for a snapshot, unless two snapshots of one client would get the same.
// Minutes after the end of the view the number may stand for another snapshot.
func (v *Volume) ViewID(at meta.Generation) meta.VolumeID {
	v.c.mu.Lock()
	defer v.c.mu.Unlock()
	return v.c.views.find(viewKey{v.id, at})
}

// Ended reports that v is the view of a deleted snapshot, or of a volume that the client may
// no longer read. Such a view shows nothing and never will.
func (v *Volume) Ended() bool { return v.view != nil && v.view.gone.Load() }

// Turn counts the earlier snapshots with this view's number, in this client and its
// predecessors. The pair of number and turn names one snapshot for ever.
func (v *Volume) Turn() uint32 {
	if v.view == nil {
		return 0
	}
	return v.view.turn
}

// find returns the number that a view has or would get.
func (s *views) find(k viewKey) meta.VolumeID {
	if id, ok := s.number[k]; ok {
		return id
	}
	i := mix(uint64(k.v)<<32|uint64(k.at)) % meta.Views
	for {
		id := meta.MaxVolume + 1 + meta.VolumeID(i)
		if n := s.all[id]; n == nil || n.key.at == 0 {
			return id
		}
		i = (i + 1) % meta.Views
	}
}

// numberOf finds or gives the number of a view.
func (s *views) numberOf(k viewKey) (id meta.VolumeID, turn uint32, err error) {
	id, ok := s.number[k]
	if !ok {
		if most := cmp.Or(s.max, maxViews); len(s.number) >= most {
			return 0, 0, meta.E("open snapshot", meta.ResourceExceeded, fmt.Sprintf("volume %d generation %d", k.v, k.at),
				fmt.Errorf("this client shows %d snapshots; it forgets a deleted snapshot a minute after the last use", most))
		}
		id = s.find(k)
		if n := s.all[id]; n != nil {
			s.set(id, k, n.turn+1)
		} else {
			s.set(id, k, 0)
		}
	}
	delete(s.over, id)
	return id, s.all[id].turn, nil
}

// set assigns a number to a view or, with key.at 0, frees the number, and notes it for a
// successor process: for a free number, how many views had it before.
func (s *views) set(id meta.VolumeID, k viewKey, turn uint32) {
	if s.all == nil {
		s.number, s.all, s.over = make(map[viewKey]meta.VolumeID), make(map[meta.VolumeID]*viewNumber), make(map[meta.VolumeID]bool)
	}
	n := s.all[id]
	if n == nil {
		n = &viewNumber{slot: s.keep.Note(keep.Record{Kind: keep.View, N: [6]uint64{uint64(id), uint64(k.v), uint64(k.at), uint64(turn)}})}
		s.all[id] = n
	} else {
		s.keep.SetN(n.slot, 2, 0)
		s.keep.SetN(n.slot, 3, uint64(turn))
		s.keep.SetN(n.slot, 1, uint64(k.v))
		s.keep.SetN(n.slot, 2, uint64(k.at))
	}
	if s.number[n.key] == id {
		delete(s.number, n.key)
	}
	n.key, n.turn = k, turn
	if k.at == 0 {
		delete(s.over, id)
	} else {
		s.number[k] = id
	}
}

// mix spreads the differences of similar numbers over all bits. Its results are inode numbers,
// so the function must never change.
func mix(x uint64) uint64 {
	x ^= x >> 30
	x *= 0xbf58476d1ce4e5b9
	x ^= x >> 27
	x *= 0x94d049bb133111eb
	return x ^ x>>31
}

// openView finds or makes the view of a snapshot.
func (c *Client) openView(of *Volume, s meta.Snapshot) (*Volume, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	id, turn, err := c.views.numberOf(viewKey{of.id, s.At})
	if err != nil {
		return nil, err
	}
	if v := c.volumes[id]; v != nil {
		return v, nil
	}
	v := &Volume{
		c: c, id: id, name: of.name + "@" + s.Name,
		view: &view{of: of, snap: s, turn: turn, born: time.Now()},
	}
	v.lodge(of.dirs.locks)
	p := *of.settings.policy.Load()
	p.Immutable, p.NoAtime, p.SyncOnClose, p.SealOnClose = true, true, false, false
	v.settings.set(p)
	c.volumes[id] = v
	c.watchLocked()
	return v, nil
}

// watchLocked starts watchViews, once. c.mu is held.
func (c *Client) watchLocked() {
	if !c.closed {
		c.views.watch.Do(func() { c.spawn(c.watchViews) })
	}
}

// watchViews checks regularly whether the shown snapshots still exist, and frees the numbers
// of deleted ones.
func (c *Client) watchViews() {
	for {
		select {
		case <-time.After(viewCheck):
		case <-c.ctx.Done():
			return
		}
		asked := make(map[*Volume]bool)
		for _, v := range c.openVolumes() {
			if v.view == nil || asked[v.view.of] {
				continue
			}
			asked[v.view.of] = true
			if _, _, err := v.view.of.snapshots.since(c.ctx, viewCheck/2); err != nil {
				if meta.KindOf(err) == meta.AccessDenied {
					c.forbidIndexes(v.view.of, err)
				}
				c.log.Debug("snapshots not listed", "volume", v.view.of.name, "err", err)
			}
		}
		c.freeViews()
	}
}

// ViewHolder is a Notifier that can report whether the layer above the client still refers to
// an inode of an ended view. The layer must keep nothing of a view without references: the
// view's number may soon stand for another snapshot.
type ViewHolder interface {
	HoldsView(v meta.VolumeID) bool
}

// freeViews frees the numbers of ended views of which the kernel knew no inode now and a
// viewCheck ago: answers that were on their way to the kernel then have arrived.
func (c *Client) freeViews() {
	c.mu.Lock()
	over := slices.Collect(maps.Keys(c.views.over))
	c.mu.Unlock()
	h, _ := c.cfg.Notify.(ViewHolder)
	for _, id := range over {
		held := h != nil && h.HoldsView(id)
		c.mu.Lock()
		switch unknown, ended := c.views.over[id]; {
		case !ended: // the snapshot is shown again
		case held || !unknown:
			c.views.over[id] = !held
		default:
			c.views.set(id, viewKey{}, c.views.all[id].turn)
		}
		c.mu.Unlock()
	}
}

// forbidIndexes gives up the indexes of all snapshots of a volume.
func (c *Client) forbidIndexes(of *Volume, err error) {
	for _, v := range c.openVolumes() {
		if v.view != nil && v.view.of == of {
			v.index.forbid(err)
		}
	}
}

func (w *view) stale(cause error) error { return meta.E("read snapshot", meta.Stale, w.v.name, cause) }

// verdictAt ends the view if the error says that the snapshot does not exist.
func (w *view) verdictAt(err error) error {
	switch meta.KindOf(err) {
	case meta.NoSuchSnapshot, meta.NoSuchVolume:
		w.end()
		return w.stale(err)
	}
	return err
}

// end forgets a view whose snapshot is gone.
func (w *view) end() {
	v := w.v
	if w.gone.Swap(true) {
		return
	}
	c := v.c
	c.mu.Lock()
	delete(c.volumes, v.id)
	c.views.over[v.id] = false
	closed := c.closed
	c.mu.Unlock()
	c.log.Info("a snapshot in use was deleted: its files are stale", "snapshot", v.name)
	ins := c.table.all(func(in *inode) bool { return in.vol == v })
	for _, in := range ins {
		in.mu.Lock()
		in.lowerLocked(meta.LeaseNone)
		in.mu.Unlock()
	}
	tell := func() {
		n := c.cfg.Notify
		if n != nil {
			n.InvalEntries(w.of.id, 0)
		}
		for _, in := range ins {
			if n != nil {
				n.InvalData(v.id, in.ino, 0, 0)
			}
			c.table.drop(in)
		}
	}
	if closed {
		tell()
		return
	}
	c.spawn(tell)
}

// drop unpins an inode and takes it out of the table unless another operation uses the inode.
func (t *table) drop(in *inode) {
	t.mu.Lock()
	defer t.mu.Unlock()
	in.mu.Lock()
	busy := in.busyLocked()
	in.mu.Unlock()
	if in.pins.Add(-1) == 0 && !busy {
		t.removeLocked(in)
	}
}

// ---- junctions in a snapshot

// stubIno is the inode number of a junction in a view, where the junction is an empty
// directory. The number of the junction's volume is unique: a volume is attached in one place
// at a time.
func stubIno(of meta.VolumeID) meta.Ino { return meta.MaxIno - meta.Ino(of) }

func (w *view) isStub(ino meta.Ino) bool {
	return w != nil && ino >= meta.MaxIno-meta.Ino(meta.MaxVolume)
}

func (w *view) stub(ino meta.Ino) Entry {
	t := w.snap.Created
	return Entry{
		Attr:   meta.Attr{Ino: ino, Mode: meta.TypeDir | 0o555, Nlink: 2, Atime: t, Mtime: t, Ctime: t, Btime: t, Parent: ino},
		Volume: w.v.id, Valid: w.v.valid(),
	}
}

// newNames makes the locks of a volume's names.
func newNames() *nameLocks { return &nameLocks{seed: maphash.MakeSeed()} }
