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

// lockEnd is the inclusive end of a lock that reaches to the end of the file.
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

// noteLocker remembers who takes a POSIX lock. close(2) of any descriptor of
// the file must give it up, which the kernel tells by FLUSH; read-only handles
// are opened without FLUSH as long as nobody locks. So the next opens get
// FLUSH, and what was locked through a handle without is given up at RELEASE.
func (f *fileSystem) noteLocker(node, fh, owner uint64) {
	f.opens.with(node, false, func(n *openNode) {
		n.locked = true
		if modeOf(fh)&modeNoFlush == 0 || slices.Contains(n.lockers[fh], owner) {
			return
		}
		if n.lockers == nil {
			n.lockers = make(map[uint64][]uint64)
		}
		n.lockers[fh] = append(n.lockers[fh], owner)
	})
}
