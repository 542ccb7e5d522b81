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

// GetLk answers F_GETLK.
func (f *fileSystem) GetLk(cancel <-chan struct{}, in *fuse.LkIn, out *fuse.LkOut) fuse.Status {
	ctx := request(cancel)
	v, ino, err := f.inode(ctx, in.NodeId)
	if err != nil {
		return f.status("getlk", in.NodeId, err)
	}
	l, err := v.GetLock(ctx, lockOf(ino, in))
	if err != nil {
		return f.status("getlk", in.NodeId, err)
	}
	out.Lk = fuse.FileLock{Start: l.Start, End: l.End, Typ: lockNumbers[l.Type], Pid: l.PID}
	return fuse.OK
}

// SetLk answers F_SETLK and flock(2) with LOCK_NB.
func (f *fileSystem) SetLk(cancel <-chan struct{}, in *fuse.LkIn) fuse.Status {
	return f.setLock(cancel, in, false)
}

// SetLkw answers F_SETLKW and flock(2). A signal ends the waiting.
func (f *fileSystem) SetLkw(cancel <-chan struct{}, in *fuse.LkIn) fuse.Status {
	return f.setLock(cancel, in, true)
}

func (f *fileSystem) setLock(cancel <-chan struct{}, in *fuse.LkIn, wait bool) fuse.Status {
	ctx := request(cancel)
	v, ino, err := f.inode(ctx, in.NodeId)
	if err != nil {
		return f.status("setlk", in.NodeId, err)
	}
	l := lockOf(ino, in)
	if !l.Flock && l.Type != meta.LockUnlock {
		f.noteLocker(in.NodeId, in.Fh, in.Owner)
	}
	return f.status("setlk", in.NodeId, v.SetLock(ctx, l, wait))
}

// close(2) must give up two kinds of locks:
//
//   - A process's POSIX locks, when the process closes any descriptor of the file. The kernel
//     sends FLUSH. A handle for reading is opened without FLUSH only while no process has the
//     file open for writing or locks it (openCached). Closing an older handle without FLUSH
//     keeps the locks taken through other handles.
//   - Locks of an open file description (F_OFD_SETLK), at the last close. The kernel neither
//     marks such a lock nor unlocks it. So RELEASE gives up all locks taken through the
//     handle and not yet given up by a FLUSH.

// noteLocker records the owner of a POSIX lock and the handle used for locking.
func (f *fileSystem) noteLocker(node, fh, owner uint64) {
	f.opens.with(node, false, func(n *openNode) {
		if slices.Contains(n.lockers[owner], fh) {
			return
		}
		if n.lockers == nil {
			n.lockers = make(map[uint64][]uint64)
		}
		n.lockers[owner] = append(n.lockers[owner], fh)
		f.kept.locks(node, owner, fh)
	})
}

// flushed forgets an owner. The caller's FLUSH gives up the owner's locks.
func (o *opens) flushed(node, owner uint64) {
	o.with(node, false, func(n *openNode) { delete(n.lockers, owner) })
}

// releasing removes and returns the owners with locks taken through fh. The caller's RELEASE
// gives up the locks.
func (n *openNode) releasing(fh uint64) (owners []uint64) {
	for owner, through := range n.lockers {
		if slices.Contains(through, fh) {
			owners = append(owners, owner)
		}
	}
	for _, owner := range owners {
		delete(n.lockers, owner)
	}
	return owners
}
