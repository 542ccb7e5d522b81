package fuse

import (
	"slices"
	"syscall"

	"github.com/hanwen/go-fuse/v2/fuse"

	"penstock.io/penstock/meta"
)

var lockTypes = map[uint32]meta.LockType{
	syscall.F_RDLCK: meta.LockRead,
	syscall.F_WRLCK: meta.LockWrite,
	syscall.F_UNLCK: meta.LockUnlock,
}

var lockNumbers = map[meta.LockType]uint32{
	meta.LockRead:   syscall.F_RDLCK,
	meta.LockWrite:  syscall.F_WRLCK,
	meta.LockUnlock: syscall.F_UNLCK,
}

// lockEnd is the inclusive end of a lock up to the end of the file.
const lockEnd = 1<<63 - 1

func lockOf(ino meta.Ino, in *fuse.LkIn) meta.Lock {
	l := meta.Lock{Ino: ino, Owner: in.Owner, PID: in.Lk.Pid, Type: lockTypes[in.Lk.Typ], Start: in.Lk.Start, End: in.Lk.End}
	if in.LkFlags&fuse.LK_FLOCK != 0 {
		l.Flock, l.Start, l.End = true, 0, lockEnd
	}
	return l
}

// lockRequests answers the requests about locks.
type lockRequests struct{ *fileSystem }

// GetLk answers F_GETLK.
func (lr *lockRequests) GetLk(cancel <-chan struct{}, in *fuse.LkIn, out *fuse.LkOut) fuse.Status {
	ctx := request(cancel)
	v, ino, err := lr.inode(ctx, in.NodeId)
	if err != nil {
		return lr.status("getlk", in.NodeId, err)
	}
	l, err := v.GetLock(ctx, lockOf(ino, in))
	if err != nil {
		return lr.status("getlk", in.NodeId, err)
	}
	out.Lk = fuse.FileLock{Start: l.Start, End: l.End, Typ: lockNumbers[l.Type], Pid: l.PID}
	return fuse.OK
}

// SetLk answers F_SETLK and flock(2) with LOCK_NB.
func (lr *lockRequests) SetLk(cancel <-chan struct{}, in *fuse.LkIn) fuse.Status {
	return lr.setLock(cancel, in, false)
}

// SetLkw answers F_SETLKW and flock(2). A signal ends the waiting.
func (lr *lockRequests) SetLkw(cancel <-chan struct{}, in *fuse.LkIn) fuse.Status {
	return lr.setLock(cancel, in, true)
}

func (lr *lockRequests) setLock(cancel <-chan struct{}, in *fuse.LkIn, wait bool) fuse.Status {
	ctx := request(cancel)
	v, ino, err := lr.inode(ctx, in.NodeId)
	if err != nil {
		return lr.status("setlk", in.NodeId, err)
	}
	l := lockOf(ino, in)
	if l.Type != meta.LockUnlock {
		if err := lr.opens.beginLock(ctx, &lr.kept, in.NodeId, in.Fh, l); err != nil {
			return lr.status("setlk", in.NodeId, err)
		}
	}
	return lr.status("setlk", in.NodeId, v.SetLock(ctx, l, wait))
}

// close(2) must give up two kinds of locks:
//
//   - A process's POSIX locks, when the process closes any descriptor of the file. The kernel
//     sends FLUSH. A handle for reading is opened without FLUSH only while no process has the
//     file open for writing or holds a lock (openCached). Closing an older handle without FLUSH
//     keeps the locks taken through other handles.
//   - Locks of an open file description (F_OFD_SETLK), at the last close. The kernel neither
//     marks such a lock nor unlocks it. So RELEASE gives up all locks taken through the
//     handle and not yet given up by a FLUSH.

// Linux makes the number of the owner of an F_OFD_SETLK lock or of a flock from the address of
// the open file description, and may reuse the address while the RELEASE is still on its way.
// So the owner in a RELEASE may also be the owner of a later handle. Two rules keep the locks
// of the later handle, and the record of the locker for a successor:
//
//   - beginLock waits while a RELEASE gives up locks of the same owner.
//   - A RELEASE that is served after the later handle locked gives up nothing. The locks of the
//     earlier handle then end with the locks of the later handle.

// lockEnds maps each lock owner whose locks a RELEASE is giving up to a channel. The channel is
// closed when the owner of the volume has answered.
type lockEnds map[uint64]chan struct{}

// beginLock records the owner of a lock and the handle used for locking. Error: Interrupted.
func (o *opens) beginLock(ctx request, k *openRecords, node, fh uint64, l meta.Lock) error {
	for {
		var ending chan struct{}
		o.with(node, false, func(n *openNode) {
			if ending = n.ending[l.Owner]; ending != nil {
				return
			}
			if !l.Flock {
				n.noteLocker(k, node, fh, l.Owner)
				return
			}
			if n.flocks == nil {
				n.flocks = make(map[uint64]uint64)
			}
			n.flocks[l.Owner] = fh
		})
		if ending == nil {
			return nil
		}
		select {
		case <-ending:
		case <-ctx.Done():
			return meta.E("lock", meta.Interrupted, "", ctx.Err())
		}
	}
}

// noteLocker records the owner of a POSIX lock and the handle used for locking.
func (o *opens) noteLocker(k *openRecords, node, fh, owner uint64) {
	o.with(node, false, func(n *openNode) { n.noteLocker(k, node, fh, owner) })
}

// noteLocker is opens.noteLocker, for a caller inside opens.with.
func (n *openNode) noteLocker(k *openRecords, node, fh, owner uint64) {
	if slices.Contains(n.lockers[owner], fh) {
		return
	}
	if n.lockers == nil {
		n.lockers = make(map[uint64][]uint64)
	}
	n.lockers[owner] = append(n.lockers[owner], fh)
	k.locks(node, owner, fh)
}

// flushed forgets an owner and the owner's record. The caller serves a FLUSH, which gives up
// the owner's locks.
func (o *opens) flushed(k *openRecords, node, owner uint64) {
	o.with(node, false, func(n *openNode) {
		delete(n.lockers, owner)
		k.unlocks(node, owner)
	})
}

// releaseLocks gives up the locks taken through a handle that RELEASE ends, and forgets the
// lockers.
func (lr *lockRequests) releaseLocks(ctx request, v Volume, ino meta.Ino, in *fuse.ReleaseIn) {
	var owners, ends []uint64
	flock := in.ReleaseFlags&fuse.FUSE_RELEASE_FLOCK_UNLOCK != 0
	done := make(chan struct{})
	lr.opens.with(in.NodeId, false, func(n *openNode) {
		var left []uint64
		owners, left = n.releasing(in.Fh)
		for _, owner := range left {
			lr.kept.unlocksThrough(in.NodeId, owner, in.Fh)
		}
		ends = owners
		if fh, ok := n.flocks[in.LockOwner]; flock && ok && fh != in.Fh {
			flock = false // the owner's flock is of a later handle
		}
		if flock {
			delete(n.flocks, in.LockOwner)
			ends = append(slices.Clone(owners), in.LockOwner)
		}
		for _, owner := range ends {
			if n.ending == nil {
				n.ending = make(lockEnds)
			}
			n.ending[owner] = done
		}
	})
	if flock {
		lr.unlock(ctx, v, in.NodeId, meta.Lock{Ino: ino, Owner: in.LockOwner, End: lockEnd, Flock: true})
	}
	for _, owner := range owners {
		lr.unlock(ctx, v, in.NodeId, meta.Lock{Ino: ino, Owner: owner, End: lockEnd})
		lr.kept.unlocks(in.NodeId, owner)
	}
	if len(ends) == 0 {
		return
	}
	lr.opens.with(in.NodeId, false, func(n *openNode) {
		for _, owner := range ends {
			if n.ending[owner] == done {
				delete(n.ending, owner)
			}
		}
	})
	close(done)
}

// releasing returns the owners whose locks a RELEASE of fh must give up, and forgets these
// owners; left are owners that locked through fh and keep their locks. An owner that locked
// through fh and through another handle keeps its locks if the kernel sends FLUSH for fh: a
// process that closed fh was forgotten at its FLUSH, so the owner is an open file description
// with the reused number, and its handle is the later handle.
func (n *openNode) releasing(fh uint64) (owners, left []uint64) {
	flushes := modeOf(fh)&(modeNoFlush|modePassthrough) == 0
	for owner, through := range n.lockers {
		switch {
		case !slices.Contains(through, fh):
		case flushes && len(through) > 1:
			n.lockers[owner] = slices.DeleteFunc(through, func(other uint64) bool { return other == fh })
			left = append(left, owner)
		default:
			delete(n.lockers, owner)
			owners = append(owners, owner)
		}
	}
	return owners, left
}
