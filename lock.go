package penstock

import (
	"context"
	"slices"
	"sync"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/keep"
)

// heldLocks are the advisory locks that this client holds on a volume, to
// claim them again from an owner that was restarted, and to know at close(2)
// whether there is anything to release.
type heldLocks struct {
	mu sync.Mutex
	m  map[lockKey][]meta.Lock // in order of Start, without overlap

	// asked are owners of POSIX locks of whom a predecessor noted that they lock: what
	// they were granted may not be in m.
	asked map[lockKey]struct{}

	keep   *keep.Memory // where a successor finds them
	volume meta.VolumeID
	slots  map[lockKey][]keep.Slot
}

type lockKey struct {
	ino   meta.Ino
	owner uint64
	flock bool
}

// set books what the owner granted: l replaces what it overlaps of the same
// lock owner.
func (h *heldLocks) set(l meta.Lock) {
	if l.Flock {
		l.Start, l.End = 0, 1<<63-1
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	k := lockKey{l.Ino, l.Owner, l.Flock}
	var out []meta.Lock
	for _, o := range h.m[k] {
		if o.End < l.Start || o.Start > l.End {
			out = append(out, o)
			continue
		}
		if o.Start < l.Start {
			left := o
			left.End = l.Start - 1
			out = append(out, left)
		}
		if o.End > l.End {
			right := o
			right.Start = l.End + 1
			out = append(out, right)
		}
	}
	if l.Type != meta.LockUnlock {
		out = append(out, l)
	} else if l.Start == 0 && l.End == 1<<63-1 {
		delete(h.asked, k)
	}
	h.keepLocked(k, out)
	if len(out) == 0 {
		delete(h.m, k)
		return
	}
	slices.SortFunc(out, func(a, b meta.Lock) int {
		if a.Start < b.Start {
			return -1
		}
		return 1
	})
	if h.m == nil {
		h.m = make(map[lockKey][]meta.Lock)
	}
	h.m[k] = out
}

func (h *heldLocks) drop(k lockKey) (had bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	_, had = h.m[k]
	_, asked := h.asked[k]
	delete(h.m, k)
	delete(h.asked, k)
	h.keepLocked(k, nil)
	return had || asked
}

// MayLock notes that a predecessor of this process was asked for POSIX locks of an
// owner. It may have been killed before it booked one, and who asked, too, so that
// nobody asks again: the owner's close gives up whatever it has.
func (v *Volume) MayLock(ino meta.Ino, owner uint64) {
	if v.frozen() {
		return
	}
	h := &v.locks
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.asked == nil {
		h.asked = make(map[lockKey]struct{})
	}
	h.asked[lockKey{ino, owner, false}] = struct{}{}
}

// clear forgets all: the session expired, and its locks with it.
func (h *heldLocks) clear() {
	h.mu.Lock()
	defer h.mu.Unlock()
	for k := range h.m {
		h.keepLocked(k, nil)
	}
	h.m = nil
}

func (h *heldLocks) all() (l []meta.Lock) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, ls := range h.m {
		l = append(l, ls...)
	}
	return l
}

// SetLock takes, changes or (LockUnlock) gives up an advisory lock. With wait
// it waits until ctx ends (then: Interrupted). Errors: WouldBlock, Deadlock.
func (v *Volume) SetLock(ctx context.Context, l meta.Lock, wait bool) error {
	if v.frozen() {
		return v.view.locks.set(ctx, l, wait)
	}
	v.c.stats.rpcs.Add(1)
	return v.c.sess.SetLock(ctx, v.id, l, wait)
}

// Locked books that the owner set or released a lock. It is called by the
// session's reader goroutine, so that what Claims tells of is what the owner
// said last.
func (c *Client) Locked(id meta.VolumeID, l meta.Lock) {
	if v := c.lookVolume(id); v != nil {
		v.locks.set(l)
	}
}

// Holds tells what a lock owner holds on an inode. The session holds its own lock
// meanwhile.
func (c *Client) Holds(id meta.VolumeID, ino meta.Ino, owner uint64, flock bool) []meta.Lock {
	v := c.lookVolume(id)
	if v == nil {
		return nil
	}
	v.locks.mu.Lock()
	defer v.locks.mu.Unlock()
	return slices.Clone(v.locks.m[lockKey{ino, owner, flock}])
}

// GetLock tells a lock that l would conflict with; Type LockUnlock if none.
func (v *Volume) GetLock(ctx context.Context, l meta.Lock) (meta.Lock, error) {
	if v.frozen() {
		return v.view.locks.get(l), nil
	}
	v.c.stats.rpcs.Add(1)
	return v.c.sess.GetLock(ctx, v.id, l)
}

// closeLocks releases the POSIX locks of an owner, if it took any here, or again: a
// predecessor may have been killed between its book and the volume's owner.
func (v *Volume) closeLocks(ctx context.Context, ino meta.Ino, owner uint64, again bool) error {
	if v.frozen() {
		v.view.locks.drop(ino, owner)
		return nil
	}
	if !v.locks.drop(lockKey{ino, owner, false}) && !again {
		return nil
	}
	v.c.stats.rpcs.Add(1)
	return v.c.sess.DropLocks(ctx, v.id, meta.Lock{Ino: ino, Owner: owner})
}
