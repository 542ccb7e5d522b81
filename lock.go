package penstock

import (
	"context"
	"slices"
	"sync"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/keep"
)

// heldLocks are the advisory locks of this client on a volume. The client claims the locks
// again from a restarted owner, and checks heldLocks at close(2) for locks to release.
type heldLocks struct {
	v *Volume

	mu sync.Mutex
	m  map[lockKey][]meta.Lock // in order of Start, without overlap

	// asked has the lock owners for which a predecessor requested POSIX locks; the granted
	// locks may be missing in m.
	asked map[lockKey]struct{}

	keep   *keep.Memory // memory for a successor process
	volume meta.VolumeID
	slots  map[lockKey][]keep.Slot
}

type lockKey struct {
	ino   meta.Ino
	owner uint64
	flock bool
}

// set records a granted lock: l replaces overlapping locks of the same lock owner.
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

// MayLock notes that a predecessor of this process requested POSIX locks for a lock owner. The
// predecessor may have been killed before it recorded the grant, and the requesting program,
// too, so that the kernel does not repeat the request. The close of the lock owner then
// releases every lock that the volume's owner has granted.
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

// clear forgets all locks: they ended with the session.
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

// SetLock takes, changes or (LockUnlock) releases an advisory lock. With wait, it waits for
// the lock until ctx ends (then: Interrupted). Errors: WouldBlock, Deadlock.
func (v *Volume) SetLock(ctx context.Context, l meta.Lock, wait bool) error {
	if v.frozen() {
		return v.view.locks.set(ctx, l, wait)
	}
	v.c.stats.rpcs.Add(1)
	return v.c.sess.SetLock(ctx, v.id, l, wait)
}

// Locked records that the owner set or released a lock. The session's reader goroutine calls
// Locked, so that Claims returns the owner's latest decision.
func (c *Client) Locked(id meta.VolumeID, l meta.Lock) {
	if v := c.lookVolume(id); v != nil {
		v.locks.set(l)
	}
}

// Holds returns the locks of a lock owner on an inode. The session holds its own lock
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

// GetLock returns a lock that conflicts with l. Type LockUnlock: no lock conflicts.
func (v *Volume) GetLock(ctx context.Context, l meta.Lock) (meta.Lock, error) {
	if v.frozen() {
		return v.view.locks.get(l), nil
	}
	v.c.stats.rpcs.Add(1)
	return v.c.sess.GetLock(ctx, v.id, l)
}

// close releases the POSIX locks of a lock owner, if any were taken through this client.
// With again, close always sends the release: a predecessor may have been killed after
// the grant of a lock and before recording the lock.
func (h *heldLocks) close(ctx context.Context, ino meta.Ino, owner uint64, again bool) error {
	v := h.v
	if v.frozen() {
		v.view.locks.drop(ino, owner)
		return nil
	}
	if !h.drop(lockKey{ino, owner, false}) && !again {
		return nil
	}
	v.c.stats.rpcs.Add(1)
	return v.c.sess.DropLocks(ctx, v.id, meta.Lock{Ino: ino, Owner: owner})
}
