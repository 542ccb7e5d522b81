// Package fuse owns the mount: it turns the kernel's requests into calls of the client library
// and the client's recalls into notifications for the kernel, and it owns mount(2), unmount
// and the loop that reads /dev/fuse. The contents of a file, the place of its bytes and their
// durability belong to the library.
//
// # Node ids and file handles
//
// Both are pure functions, so that a successor on a live mount needs no table of its
// predecessor:
//
//	node id      63      44 43                                0
//	            +----------+-----------------------------------+
//	            |  volume  |               inode               |    st_ino: inumber.go
//	            +----------+-----------------------------------+
//	            the mount's own root is node 1; volume 0 holds the files of .penstock;
//	            inode 0 of a volume is the directory of its snapshots; the volumes
//	            above meta.MaxVolume are views of snapshots, with the snapshot's inodes;
//	            a view's node has generation Volume.Turn plus one, any other node 1
//
//	file handle  63                                  8 7       0
//	            +-------------------------------------+---------+
//	            |  number of the open, only a key     |  mode   |    handle.go
//	            +-------------------------------------+---------+
//
// # What the kernel may cache
//
// The kernel may cache entries, attributes and the pages of files opened for reading, while
// the session's lease runs and until a recall (notify.go). Files opened for writing bypass the
// page cache (FOPEN_DIRECT_IO), so that no page stays locked while a WRITE waits for a lease.
// Stores through shared mappings are the only exception: see writeback.go.
package fuse

import (
	"context"
	"os"

	penstock "penstock.io/penstock"
	"penstock.io/penstock/meta"
)

// Tree opens the volumes below a mount; *penstock.Client wrapped by ClientTree implements
// Tree.
type Tree interface {
	// VolumeByID opens a volume by number, as named by a junction.
	VolumeByID(ctx context.Context, id meta.VolumeID) (Volume, error)
}

// ClientTree makes a client's volumes a Tree.
func ClientTree(c *penstock.Client) Tree { return clientTree{c} }

type clientTree struct{ c *penstock.Client }

func (t clientTree) VolumeByID(ctx context.Context, id meta.VolumeID) (Volume, error) {
	v, err := t.c.VolumeByID(ctx, id)
	if err != nil {
		return nil, err
	}
	return v, nil
}

func (t clientTree) Cluster() string              { return t.c.Cluster() }
func (t clientTree) LeaveAtimes(files, dirs bool) { t.c.LeaveAtimes(files, dirs) }

// Volume is the interface of a volume for a mount. *penstock.Volume implements Volume and
// documents each method.
type Volume interface {
	Name() string
	Policy() meta.Policy
	StatFS(ctx context.Context) (meta.StatFS, error)
	SyncAll(ctx context.Context) error
	FsyncDir(ctx context.Context, ino meta.Ino) error
	Forget(ino meta.Ino)
	volumeSnapshots
	volumeNames
	volumeInodes
	volumeFiles
	volumeData
	volumeLocks
}

// volumeSnapshots lead from a live volume to the views of its snapshots.
type volumeSnapshots interface {
	View() (of meta.VolumeID, s meta.Snapshot, ok bool)
	ViewID(at meta.Generation) meta.VolumeID
	Ended() bool
	Turn() uint32
	ReadSnapshots(ctx context.Context) ([]meta.Snapshot, error)
	LookupSnapshot(ctx context.Context, name string) (penstock.Entry, error)
}

// volumeNames are the operations on entries of directories.
type volumeNames interface {
	Lookup(ctx context.Context, parent meta.Ino, name string) (penstock.Entry, error)
	Create(ctx context.Context, call *penstock.Call, req meta.Create) (penstock.Entry, error)
	Link(ctx context.Context, call *penstock.Call, ino, parent meta.Ino, name string) (penstock.Entry, error)
	Unlink(ctx context.Context, call *penstock.Call, parent meta.Ino, name string, dir bool) error
	Rename(ctx context.Context, call *penstock.Call, parent meta.Ino, name string, newParent meta.Ino, newName string, flags uint32) error
	ReadDir(ctx context.Context, ino meta.Ino, at *penstock.DirCursor, max int, plus bool) (list []penstock.DirEntry, eof bool, err error)
}

// volumeInodes are the operations on attributes, links and extended attributes of an inode.
type volumeInodes interface {
	GetAttr(ctx context.Context, ino meta.Ino) (penstock.Entry, error)
	SetAttr(ctx context.Context, call *penstock.Call, req meta.SetAttr) (penstock.Entry, error)
	ReadLink(ctx context.Context, ino meta.Ino) (string, error)
	GetXattr(ctx context.Context, ino meta.Ino, name string) ([]byte, error)
	ListXattr(ctx context.Context, ino meta.Ino) ([]string, error)
	SetXattr(ctx context.Context, call *penstock.Call, req meta.SetXattr) error
	RemoveXattr(ctx context.Context, call *penstock.Call, ino meta.Ino, name string) error
}

// volumeFiles opens and closes regular files.
type volumeFiles interface {
	CreateOpen(ctx context.Context, call *penstock.Call, req meta.Create, flags uint32) (penstock.OpenInfo, error)
	Tmpfile(ctx context.Context, call *penstock.Call, req meta.Tmpfile, flags uint32) (penstock.OpenInfo, error)
	Open(ctx context.Context, call *penstock.Call, ino meta.Ino, flags uint32) (penstock.OpenInfo, error)
	Flush(ctx context.Context, call *penstock.Call, ino meta.Ino, lockOwner uint64) error
	Release(ctx context.Context, ino meta.Ino, flags uint32)
	Backing(ctx context.Context, ino meta.Ino) (*os.File, error)
}

// volumeData moves bytes of regular files.
type volumeData interface {
	Read(ctx context.Context, ino meta.Ino, p []byte, off int64) (n int, err error)
	Write(ctx context.Context, call *penstock.Call, ino meta.Ino, p []byte, off int64, atEnd, kill bool) (n int, err error)
	WritePage(ctx context.Context, call *penstock.Call, ino meta.Ino, p []byte, off int64, epoch uint64) error
	Epoch() uint64
	Fsync(ctx context.Context, ino meta.Ino, dataOnly bool) error
	Fallocate(ctx context.Context, call *penstock.Call, req meta.Fallocate) error
	CopyRange(ctx context.Context, call *penstock.Call, req meta.CopyRange) (uint64, error)
	Seek(ctx context.Context, ino meta.Ino, off int64, whence uint32) (int64, error)
}

// volumeLocks are advisory locks.
type volumeLocks interface {
	SetLock(ctx context.Context, l meta.Lock, wait bool) error
	GetLock(ctx context.Context, l meta.Lock) (meta.Lock, error)
}
