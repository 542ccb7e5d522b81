package penstock

import (
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"penstock.io/penstock/meta"
)

// When a reply may be cached.
//
// The owner decides in one order, and grants, recalls and replies reach a session in that
// order. But a reply is handed to the goroutine that sent the request, and this goroutine may
// look at the reply long after the reader goroutine has handled later grants and recalls.
// Therefore the inode holds the lease: Granted raises it on the reader goroutine, and giving
// it back lowers it. Raising and lowering each take a tick from a counter of the client.
// Before sending an operation, a goroutine reads the counter; the value is the operation's
// stamp.
//
// The attributes in a reply may be cached only if the inode is leased now, the lease was not
// lowered since the stamp, and the lease was raised either before the stamp or by the reply
// itself. Then the client held the lease without a break from the owner's decision until now,
// and no other client can have changed the attributes. A lease raised by another reply is not
// enough: the owner may have decided this reply before a change that the other reply already
// shows.
//
// The client's own operations can change an attribute, too. Attributes carry Change, which
// grows with every change, and older attributes never overwrite newer ones. Names are ordered
// by name locks (names.go).

// stamp decides whether a reply may be cached.
type stamp struct {
	tick   uint64       // of the table, when the operation was sent
	grants []meta.Grant // of the reply
	set    map[meta.Ino]struct{}
}

// with returns the stamp of one reply of a batch.
func (s stamp) with(r *meta.Result) stamp {
	return stamp{tick: s.tick, grants: r.Grants}
}

// index prepares the stamp for many lookups in one reply.
func (s *stamp) index() {
	if len(s.grants) < 8 {
		return
	}
	s.set = make(map[meta.Ino]struct{}, len(s.grants))
	for _, g := range s.grants {
		s.set[g.Ino] = struct{}{}
	}
}

func (s *stamp) granted(ino meta.Ino) bool {
	if s.set != nil {
		_, ok := s.set[ino]
		return ok
	}
	for _, g := range s.grants {
		if g.Ino == ino {
			return true
		}
	}
	return false
}

type inodeKey struct {
	v   meta.VolumeID
	ino meta.Ino
}

// inode is one cached inode. Lock order: name locks, turns (file.go), table.mu, inode.mu, then
// budget.mu and chunk.mu. No mutex is held during a call to a server or to the Notifier.
type inode struct {
	vol  *Volume
	ino  meta.Ino
	pins atomic.Int32 // running operations on the inode; a pinned inode stays in the table
	used atomic.Bool  // since the eviction hand passed

	mu     sync.Mutex
	lease  meta.LeaseMode
	attrOK bool   // attr is right while the lease is held; older attributes are not cached
	fresh  bool   // opened since a predecessor's session expired; see distrusted
	inval  uint32 // running invalidations of the kernel's cache after the session expired
	low    uint64 // tick at which the lease was last lowered,
	since  uint64 // tick at which the lease was last raised from none
	attr   meta.Attr
	dir    *dir
	file   *file
	recall *recall
	grown  time.Time // of the last answer about an open end; see Client.Growth
	// direct: all openers of the file read past the kernel's cache of pages.
	direct bool
	// loose: the kernel may have pages that no lease covers.
	loose  bool
	passed uint32 // snapshots taken while this client kept the exclusive lease

	prev, next *inode // the table's ring
}

// table holds the client's inodes of all volumes. The clock algorithm bounds their number: a
// hand goes round the ring, spares inodes used since its last pass, and evicts the others.
type table struct {
	c    *Client
	max  int
	tick atomic.Uint64 // counts lowerings of leases

	mu sync.Mutex
	// INVARIANT: the ring of hand holds every inode of m exactly once (see check).
	m       map[inodeKey]*inode
	hand    *inode
	evicted uint64 // tick of the last eviction: the first tick of a new inode
	drops
}

// get finds or makes an inode and pins it. put unpins.
func (t *table) get(v *Volume, ino meta.Ino) *inode {
	k := inodeKey{v.id, ino}
	t.mu.Lock()
	in := t.m[k]
	if in != nil && in.vol != v {
		// Of two views with the same number, the later view owns the number.
		if v.view.gone.Load() {
			t.mu.Unlock()
			in = &inode{vol: v, ino: ino, lease: meta.LeaseShared}
			in.pins.Add(1)
			return in
		}
		in.mu.Lock()
		in.lowerLocked(meta.LeaseNone) // the end of its view may not have reached the inode yet
		in.mu.Unlock()
		t.removeLocked(in)
		in = nil
	}
	if in == nil {
		in = &inode{vol: v, ino: ino, low: t.evicted}
		if v.frozen() {
			in.lease = meta.LeaseShared // for ever, see snapshot.go
		}
		t.m[k] = in
		if t.hand == nil {
			in.prev, in.next = in, in
			t.hand = in
		} else { // just behind the hand: the last to be looked at
			in.prev, in.next = t.hand.prev, t.hand
			in.prev.next, in.next.prev = in, in
		}
	}
	in.pins.Add(1)
	over := len(t.m) > t.max
	t.mu.Unlock()
	if !in.used.Load() {
		in.used.Store(true)
	}
	if over {
		t.c.kickEvict()
	}
	return in
}

// peek returns a cached inode, pinned, or nil.
func (t *table) peek(v meta.VolumeID, ino meta.Ino) *inode {
	t.mu.Lock()
	in := t.m[inodeKey{v, ino}]
	if in != nil {
		in.pins.Add(1)
	}
	t.mu.Unlock()
	if in != nil && !in.used.Load() {
		in.used.Store(true)
	}
	return in
}

func (in *inode) put() {
	if in.pins.Add(-1) < 0 {
		panic("penstock: inode unpinned twice")
	}
}

func (t *table) len() int {
	t.mu.Lock()
	defer t.mu.Unlock()
	return len(t.m)
}

// all pins and returns every inode for which ok is true. ok runs under the table's lock.
func (t *table) all(ok func(*inode) bool) []*inode {
	t.mu.Lock()
	defer t.mu.Unlock()
	var l []*inode
	for _, in := range t.m {
		if ok(in) {
			in.pins.Add(1)
			l = append(l, in)
		}
	}
	return l
}

// idleTurns is the number of parts in which the hand goes round the ring within Config.MetaIdle.
const idleTurns = 8

// evictIdle evicts inodes that nobody has used since the hand passed, until the client's end.
func (t *table) evictIdle(idle time.Duration) {
	tick := time.NewTicker(idle / idleTurns)
	defer tick.Stop()
	for {
		select {
		case <-tick.C:
			t.evict(t.chooseIdle())
		case <-t.c.ctx.Done():
			return
		}
	}
}

// evict removes inodes, which the caller has pinned, invalidates the removed inodes in the
// kernel's cache and gives their leases back.
func (t *table) evict(victims []*inode) {
	if len(victims) == 0 {
		return
	}
	n := t.c.cfg.Notify
	for _, in := range victims {
		in.mu.Lock()
		lease, loose, d := in.lease, in.loose, in.dir != nil || in.attrOK && in.attr.IsDir()
		in.mu.Unlock()
		if lease == meta.LeaseNone && !loose || in.vol.frozen() {
			continue
		}
		if n != nil {
			if d {
				n.InvalEntries(in.vol.id, in.ino)
				n.InvalAttr(in.vol.id, in.ino)
			} else {
				n.InvalData(in.vol.id, in.ino, 0, 0)
			}
		}
	}
	// An inode used meanwhile stays, with its lease: a kernel may have cached the inode again,
	// or a program may have opened it. If the owner received a drop of such an inode, the
	// owner would not count this client among the openers, and would free the bytes when the
	// last name is removed. Of the others, inodes without a lease are dropped, too: the owner
	// may still count this client.
	var gone []inodeKey
	t.mu.Lock()
	for _, in := range victims {
		in.mu.Lock()
		keep := in.pins.Load() > 1 || in.used.Load() || in.busyLocked()
		if !keep {
			in.lowerLocked(meta.LeaseNone)
		}
		in.mu.Unlock()
		if !keep {
			if !in.vol.frozen() {
				gone = append(gone, inodeKey{in.vol.id, in.ino})
			}
			t.removeLocked(in)
		}
		in.pins.Add(-1)
	}
	send := t.giveUpLocked(gone...)
	t.mu.Unlock()
	if send {
		t.sendDrops()
	}
}

// removeLocked takes an inode out of the map and the ring, if it is still there. (A pin does
// not prevent get from giving the inode's number to a new view after its view ended.) The
// caller holds t.mu.
func (t *table) removeLocked(in *inode) {
	k := inodeKey{in.vol.id, in.ino}
	if t.m[k] != in {
		return
	}
	delete(t.m, k)
	if t.hand == in {
		t.hand = in.next
	}
	in.prev.next, in.next.prev = in.next, in.prev
	if t.hand == in {
		t.hand = nil
	}
}

// check verifies the invariant of the ring and the map.
func (t *table) check() error {
	t.mu.Lock()
	defer t.mu.Unlock()
	n := 0
	for in := t.hand; in != nil; {
		if k := (inodeKey{in.vol.id, in.ino}); t.m[k] != in {
			return fmt.Errorf("inode %d of volume %d is in the ring and not in the map", k.ino, k.v)
		}
		if in.next.prev != in {
			return fmt.Errorf("inode %d of volume %d is not before the one after it", in.ino, in.vol.id)
		}
		if n++; n > len(t.m) {
			return fmt.Errorf("the ring does not come back to the hand after %d inodes", len(t.m))
		}
		if in = in.next; in == t.hand {
			break
		}
	}
	if n != len(t.m) {
		return fmt.Errorf("%d inodes in the ring, %d in the map", n, len(t.m))
	}
	return nil
}

// choose pins up to a sixteenth of the table as victims. Nothing is chosen
// while the grants of an earlier round could still come.
func (t *table) choose() []*inode {
	t.mu.Lock()
	defer t.mu.Unlock()
	if len(t.m) <= t.max || t.dropping != nil {
		return nil
	}
	return t.passLocked(2*len(t.m), len(t.m)-t.max+t.max/16+1)
}

// chooseIdle pins the unused inodes of the next part of the ring as victims.
func (t *table) chooseIdle() []*inode {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.dropping != nil {
		return nil
	}
	part := (len(t.m) + idleTurns - 1) / idleTurns
	return t.passLocked(part, part)
}

// passLocked moves the hand by so many steps, until it has pinned so many victims: inodes that nobody
// has used since the hand passed, and that can leave the table. The caller holds t.mu.
func (t *table) passLocked(steps, want int) (victims []*inode) {
	for i := steps; i > 0 && len(victims) < want; i-- {
		in := t.hand
		t.hand = in.next
		if in.used.Swap(false) || in.pins.Load() > 0 {
			continue
		}
		in.mu.Lock()
		busy := in.busyLocked()
		in.mu.Unlock()
		if !busy {
			in.pins.Add(1)
			victims = append(victims, in)
		}
	}
	return victims
}

// busyLocked reports that the inode can't leave the table: the inode is open, dirty, being
// recalled, or has an error that no caller has received yet.
func (in *inode) busyLocked() bool {
	if in.recall != nil {
		return true
	}
	f := in.file
	return f != nil && (f.users.opens > 0 || f.uncommitted > 0 || f.turns.busy != 0 || f.users.reads > 0 || f.users.linking > 0 || f.untold() || f.own.chunk != nil || f.own.ended || f.sealWant)
}

// lowerLocked lowers the lease to keep and forgets facts that no lease covers.
func (in *inode) lowerLocked(keep meta.LeaseMode) {
	if in.lease > keep {
		in.lease = keep
	}
	in.low = in.vol.c.table.tick.Add(1)
	if in.lease == meta.LeaseNone {
		in.attrOK = false
		if in.dir != nil {
			in.vol.c.dentries.Add(-int64(len(in.dir.names)))
			in.dir = &dir{changes: in.dir.changes + 1}
		}
		if f := in.file; f != nil {
			f.forgetMap()
			if f.users.opens == 0 && f.uncommitted == 0 && f.turns.busy == 0 && f.users.reads == 0 && f.users.linking == 0 && !f.untold() && f.own.chunk == nil && !f.own.ended && !f.sealWant && f.turns.gate == 0 && f.turns.wake == nil {
				in.file = nil
			}
		}
	}
}

// liveLocked reports that cached facts about the inode may be used.
func (in *inode) liveLocked() bool {
	if in.lease == meta.LeaseNone {
		return false
	}
	return in.vol.frozen() || in.vol.c.sess.LeaseLeft(in.vol.id) > 0
}

// cacheableLocked reports that a reply with this stamp is still right.
func (in *inode) cacheableLocked(stamp stamp) bool {
	return in.lease != meta.LeaseNone && in.low <= stamp.tick && (in.since <= stamp.tick || stamp.granted(in.ino))
}

// learnLocked takes attributes from a reply. It reports whether the same or newer attributes
// are cached now.
func (in *inode) learnLocked(a *meta.Attr, stamp stamp) bool {
	if a.Ino != in.ino {
		return false
	}
	if !in.cacheableLocked(stamp) {
		if a.Change > in.attr.Change {
			// The reply shows a change by this client, for which the owner recalls no lease.
			in.attrOK, in.attr.Change = false, a.Change
		}
		return false
	}
	if a.Change >= in.attr.Change {
		at := in.attr.Atime
		keep := in.attrOK && in.file != nil && in.file.atimeDirty && at > a.Atime
		in.attr = *a
		if keep {
			in.attr.Atime = at
		}
		in.attrOK = true
		if a.Nlink > 0 && in.file != nil {
			in.file.orphaned = false // after a rollback of the volume, the file has names again
		}
	}
	return in.attrOK
}

// viewLocked returns the attributes for stat: attr plus the uncommitted writes of this client.
func (in *inode) viewLocked(a meta.Attr) meta.Attr {
	f := in.file
	if f == nil || !f.mapOK || in.lease != meta.LeaseExclusive || !(f.uncommitted > 0 || f.own.ended || f.metaDirty) {
		return a
	}
	a.Size = f.size
	if f.mtime != 0 {
		a.Mtime = f.mtime
		a.Ctime = max(a.Ctime, f.ctime)
	}
	a.Blocks += uint64(f.uncommitted)
	return a
}

// entryLocked makes the Entry of an inode from the attributes of a reply, or from better
// cached attributes.
func (in *inode) entryLocked(a *meta.Attr, cached bool) Entry {
	e := Entry{Volume: in.vol.id}
	if cached || a == nil {
		e.Attr = in.viewLocked(in.attr)
		if in.recall == nil && in.inval == 0 {
			e.Valid = in.vol.valid()
		}
	} else {
		e.Attr = in.viewLocked(*a)
	}
	return e
}

// learn is learnLocked for an inode that may not be in the table. Only a grant, or a view,
// puts an inode into the table.
func (v *Volume) learn(a *meta.Attr, stamp stamp) Entry {
	var in *inode
	if v.frozen() {
		in = v.node(a.Ino)
	} else if in = v.c.table.peek(v.id, a.Ino); in == nil {
		return Entry{Attr: *a, Volume: v.id}
	}
	defer in.put()
	in.mu.Lock()
	defer in.mu.Unlock()
	return in.entryLocked(a, in.learnLocked(a, stamp))
}

// node finds or makes an inode and pins it.
func (v *Volume) node(ino meta.Ino) *inode { return v.c.table.get(v, ino) }

func (c *Client) kickEvict() {
	if c.evicting.CompareAndSwap(false, true) {
		c.spawn(func() {
			c.table.evict(c.table.choose())
			c.evicting.Store(false)
		})
	}
}
