package penstock

import (
	"context"
	"fmt"
	"hash/maphash"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/keep"
)

// How a snapshot is shown.
//
// A Volume with a view shows a snapshot of another, live, one. Nothing of it can
// change, so what its owner says is cached without a lease and never asked
// again: an inode of a view counts as leased from its birth, and only eviction
// takes it out of the table (nobody need be told). Where bytes lie does change,
// with repair and compaction; a read that fails asks anew, as on a live volume.
//
// A view ends when its snapshot is deleted. The client learns that from the
// answer to a question about it, or from the list of snapshots, which it asks
// for whenever somebody looks there, and every viewCheck while it has views.
// Then everything cached is dropped, here and above, and whoever still uses the
// view is told Stale.

// SnapshotDir is the name under which mounts, and Tree, show the snapshots of a
// volume in its root. A file of that name which the volume itself holds hides
// them.
const SnapshotDir = ".snapshot"

const (
	// viewValid is how long what a view says may be believed by who caches above.
	viewValid = time.Hour
	// snapshotsAge is how old the list of snapshots may be when a name is looked up.
	snapshotsAge = time.Second
	// viewCheck is how often a client that has views asks which snapshots exist.
	viewCheck = 30 * time.Second
	// maxViews is how many snapshots one client can show in its life: three of
	// four numbers, so that a free one is near.
	maxViews = meta.Views / 4 * 3
)

// view is what a volume has that shows a snapshot.
type view struct {
	of    *Volume // the live volume
	snap  meta.Snapshot
	born  time.Time
	gone  atomic.Bool
	locks viewLocks
	index viewIndex
}

// snapshotNames is the list of a live volume's snapshots as it was last told.
type snapshotNames struct {
	mu    sync.Mutex
	list  []meta.Snapshot
	asked time.Time
}

// viewKey names a snapshot for ever: generations are never used again.
type viewKey struct {
	v  meta.VolumeID
	at meta.Generation
}

// views are a client's views and their numbers. Guarded by the client's mu.
type views struct {
	number map[viewKey]meta.VolumeID
	key    map[meta.VolumeID]viewKey
	watch  sync.Once
}

// View tells which snapshot of which volume is shown here; ok is false for a
// live volume.
func (v *Volume) View() (of meta.VolumeID, s meta.Snapshot, ok bool) {
	if v.view == nil {
		return 0, meta.Snapshot{}, false
	}
	return v.view.of.id, v.view.snap, true
}

// Snapshot opens a snapshot of a volume, to be read: changes fail with ReadOnly,
// and once the snapshot is deleted everything with Stale. Junctions are empty
// directories in it: what hangs there has snapshots of its own.
// Errors: NoSuchVolume, NoSuchSnapshot.
func (c *Client) Snapshot(ctx context.Context, volume, name string) (*Volume, error) {
	v, err := c.Volume(ctx, volume)
	if err != nil {
		return nil, err
	}
	return v.Snapshot(ctx, name)
}

// Snapshot is Client.Snapshot for a volume that is open.
func (v *Volume) Snapshot(ctx context.Context, name string) (*Volume, error) {
	none := meta.E("open snapshot", meta.NoSuchSnapshot, v.name+"@"+name, nil)
	if v.view != nil {
		return nil, none
	}
	find := func(l []meta.Snapshot) int {
		return slices.IndexFunc(l, func(s meta.Snapshot) bool { return s.Name == name })
	}
	list, fresh, err := v.snapshotsSince(ctx, snapshotsAge)
	if err != nil {
		return nil, err
	}
	i := find(list)
	if i < 0 && !fresh { // it may have been taken a moment ago
		if list, _, err = v.snapshotsSince(ctx, 0); err != nil {
			return nil, err
		}
		i = find(list)
	}
	if i < 0 {
		return nil, none
	}
	return v.c.openView(v, list[i])
}

// LookupSnapshot is Lookup in the directory of snapshots: it gives the root of
// one. Errors: NoSuchSnapshot.
func (v *Volume) LookupSnapshot(ctx context.Context, name string) (Entry, error) {
	w, err := v.Snapshot(ctx, name)
	if err != nil {
		return Entry{}, err
	}
	return w.GetAttr(ctx, meta.RootIno)
}

// ReadSnapshots lists the directory of snapshots: those that could be read a
// second ago, oldest first.
func (v *Volume) ReadSnapshots(ctx context.Context) ([]meta.Snapshot, error) {
	if v.view != nil {
		return nil, nil
	}
	l, _, err := v.snapshotsSince(ctx, snapshotsAge)
	return slices.Clone(l), err
}

// snapshotsChanged has the next look at snapshots ask anew.
func (v *Volume) snapshotsChanged() {
	v.snapshots.mu.Lock()
	defer v.snapshots.mu.Unlock()
	v.snapshots.asked = time.Time{}
}

// snapshotsSince gives a list that is at most so old, and tells whether it was
// asked for just now.
func (v *Volume) snapshotsSince(ctx context.Context, age time.Duration) (l []meta.Snapshot, fresh bool, err error) {
	n := &v.snapshots
	n.mu.Lock()
	if !n.asked.IsZero() && time.Since(n.asked) < age {
		defer n.mu.Unlock()
		return n.list, false, nil
	}
	n.mu.Unlock()
	asked := time.Now()
	v.c.stats.rpcs.Add(1)
	all, err := v.c.sess.ListSnapshots(ctx, v.id)
	if err != nil {
		if meta.KindOf(err) == meta.NoSuchVolume {
			v.endViews(asked, nil)
		}
		return nil, false, err
	}
	l = slices.DeleteFunc(all, func(s meta.Snapshot) bool { return s.Deleting })
	slices.SortFunc(l, func(a, b meta.Snapshot) int { return int(int64(a.At) - int64(b.At)) })
	n.mu.Lock()
	if asked.After(n.asked) {
		n.list, n.asked = l, asked
	}
	n.mu.Unlock()
	v.endViews(asked, l)
	return l, true, nil
}

// endViews ends the views whose snapshots are not in a list that was asked for
// after they were opened.
func (v *Volume) endViews(asked time.Time, l []meta.Snapshot) {
	for _, w := range v.c.openVolumes() {
		if w.view == nil || w.view.of != v || w.view.born.After(asked) {
			continue
		}
		_, there := slices.BinarySearchFunc(l, w.view.snap.At, func(s meta.Snapshot, at meta.Generation) int { return int(int64(s.At) - int64(at)) })
		if !there {
			w.end()
		}
	}
}

// ViewID is the number under which a snapshot of this volume is shown: that of
// its view's Volume, and the upper part of its inode numbers. It is the same in
// every client, unless two that one client uses fall on one number.
func (v *Volume) ViewID(at meta.Generation) (meta.VolumeID, error) {
	v.c.mu.Lock()
	defer v.c.mu.Unlock()
	return v.c.views.numberOf(viewKey{v.id, at})
}

// numberOf finds or makes the number of a view.
func (s *views) numberOf(k viewKey) (meta.VolumeID, error) {
	if id, ok := s.number[k]; ok {
		return id, nil
	}
	if len(s.key) == maxViews {
		return 0, meta.E("open snapshot", meta.ResourceExceeded, fmt.Sprintf("volume %d generation %d", k.v, k.at),
			fmt.Errorf("this client has shown %d snapshots since it began", maxViews))
	}
	if s.number == nil {
		s.number, s.key = make(map[viewKey]meta.VolumeID), make(map[meta.VolumeID]viewKey)
	}
	i := mix(uint64(k.v)<<32|uint64(k.at)) % meta.Views
	for {
		id := meta.MaxVolume + 1 + meta.VolumeID(i)
		if _, taken := s.key[id]; !taken {
			s.number[k], s.key[id] = id, k
			return id, nil
		}
		i = (i + 1) % meta.Views
	}
}

// mix spreads numbers that differ in a few bits over all bits. Its answers are
// inode numbers: it must never change.
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
	id, err := c.views.numberOf(viewKey{of.id, s.At})
	if err != nil {
		return nil, err
	}
	if v := c.volumes[id]; v != nil {
		return v, nil
	}
	v := &Volume{
		c: c, id: id, name: of.name + "@" + s.Name,
		names:  of.names,
		dirty:  make(map[*inode]struct{}),
		kicked: make(chan struct{}, 1),
		view:   &view{of: of, snap: s, born: time.Now()},
	}
	p := *of.policy.Load()
	p.Immutable, p.NoAtime, p.SyncOnClose, p.SealOnClose = true, true, false, false
	v.setPolicy(p)
	c.volumes[id] = v
	c.cfg.Keep.Note(keep.Record{Kind: keep.View, N: [6]uint64{uint64(id), uint64(of.id), uint64(s.At)}})
	if !c.closed {
		c.views.watch.Do(func() { c.spawn(c.watchViews) })
	}
	return v, nil
}

// watchViews asks from time to time whether the snapshots still exist that are
// shown here.
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
			if _, _, err := v.view.of.snapshotsSince(c.ctx, viewCheck/2); err != nil {
				if meta.KindOf(err) == meta.AccessDenied {
					c.forbidIndexes(v.view.of, err)
				}
				c.log.Debug("snapshots not listed", "volume", v.view.of.name, "err", err)
			}
		}
	}
}

// forbidIndexes gives up the indexes of all snapshots of a volume.
func (c *Client) forbidIndexes(of *Volume, err error) {
	for _, v := range c.openVolumes() {
		if v.view != nil && v.view.of == of {
			v.forbidIndex(err)
		}
	}
}

// frozen reports that the volume shows a snapshot.
func (v *Volume) frozen() bool { return v.view != nil }

// readOnly refuses a change of a snapshot.
func (v *Volume) readOnly(op string) error {
	if v.view == nil {
		return nil
	}
	return meta.E(op, meta.ReadOnly, v.name, nil)
}

// mayName refuses new names in a snapshot, and the one that would hide the
// volume's snapshots.
func (v *Volume) mayName(op string, parent meta.Ino, name string) error {
	if v.view == nil && parent == meta.RootIno && name == SnapshotDir {
		return meta.E(op, meta.Exists, name, nil)
	}
	return v.readOnly(op)
}

// home is the volume that knows where chunks lie: views share their volume's.
func (v *Volume) home() *Volume {
	if v.view != nil {
		return v.view.of
	}
	return v
}

// ask is do for a view.
func (v *Volume) ask(ctx context.Context, op meta.Op) (*meta.Result, stamp, error) {
	c := v.c
	st := stamp{tick: c.table.tick.Load()}
	if op.Code().Mutates() {
		return nil, st, v.readOnly("change")
	}
	if v.view.gone.Load() {
		return nil, st, v.stale(nil)
	}
	if res, ok, err := v.fromIndex(ctx, op); ok {
		return res, st, err
	}
	c.stats.rpcs.Add(1)
	res, err := c.sess.DoAt(ctx, v.view.of.id, v.view.snap.At, op)
	return res, st, v.verdictAt(err)
}

func (v *Volume) stale(cause error) error { return meta.E("read snapshot", meta.Stale, v.name, cause) }

// verdictAt turns the answer that there is no such snapshot into the view's end.
func (v *Volume) verdictAt(err error) error {
	switch meta.KindOf(err) {
	case meta.NoSuchSnapshot, meta.NoSuchVolume:
		v.end()
		return v.stale(err)
	}
	return err
}

// end forgets a view whose snapshot is gone.
func (v *Volume) end() {
	if v.view.gone.Swap(true) {
		return
	}
	c := v.c
	c.mu.Lock()
	delete(c.volumes, v.id)
	closed := c.closed
	c.mu.Unlock()
	c.log.Info("snapshot is gone", "snapshot", v.name)
	ins := c.table.all(func(in *inode) bool { return in.vol == v })
	for _, in := range ins {
		in.mu.Lock()
		in.lowerLocked(meta.LeaseNone)
		in.mu.Unlock()
	}
	tell := func() {
		n := c.cfg.Notify
		if n != nil {
			n.InvalEntries(v.view.of.id, 0)
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

// drop unpins an inode and takes it out of the table unless it is in use.
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

// stubIno is the number that a junction has in a view, where it is an empty
// directory: a volume hangs in one place at a time, so its number will do.
func stubIno(of meta.VolumeID) meta.Ino { return meta.MaxIno - meta.Ino(of) }

func (v *Volume) isStub(ino meta.Ino) bool {
	return v.view != nil && ino >= meta.MaxIno-meta.Ino(meta.MaxVolume)
}

func (v *Volume) stub(ino meta.Ino) Entry {
	t := v.view.snap.Created
	return Entry{
		Attr:   meta.Attr{Ino: ino, Mode: meta.TypeDir | 0o555, Nlink: 2, Atime: t, Mtime: t, Ctime: t, Btime: t, Parent: ino},
		Volume: v.id, Valid: v.valid(),
	}
}

// newNames makes the locks of a volume's names.
func newNames() *nameLocks { return &nameLocks{seed: maphash.MakeSeed()} }
