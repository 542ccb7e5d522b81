package fuse

import (
	"github.com/hanwen/go-fuse/v2/fuse"

	penstock "penstock.io/penstock"
	"penstock.io/penstock/meta"
)

// Positions in a directory stream: 1 is after ".", 2 after "..", and the
// library's cookies, which are at least 3, follow.
const (
	afterDot    = 1
	afterDotDot = 2
)

// OpenDir needs no handle: a position is a cookie, valid for ever.
func (f *fileSystem) OpenDir(_ <-chan struct{}, in *fuse.OpenIn, out *fuse.OpenOut) fuse.Status {
	if f.noOpen && !isVirtual(in.NodeId) && !isSnapshots(in.NodeId) {
		return fuse.ENOSYS // the kernel caches listings, too
	}
	return fuse.OK
}

// ReleaseDir has nothing to release.
func (f *fileSystem) ReleaseDir(*fuse.ReleaseIn) {}

// FsyncDir makes the names that this mount was answered for durable.
func (f *fileSystem) FsyncDir(cancel <-chan struct{}, in *fuse.FsyncIn) fuse.Status {
	if isVirtual(in.NodeId) || isSnapshots(in.NodeId) {
		return fuse.OK
	}
	ctx := request(cancel)
	v, ino, err := f.inode(ctx, in.NodeId)
	if err == nil {
		err = v.FsyncDir(ctx, ino)
	}
	return f.status("fsyncdir", in.NodeId, err)
}

// direntBytes and plusBytes are about what an entry takes in a listing: its
// header and a name of sixteen bytes, and its attributes.
const (
	direntBytes = 24 + 16
	plusBytes   = direntBytes + 128
)

// ReadDir lists names.
func (f *fileSystem) ReadDir(cancel <-chan struct{}, in *fuse.ReadIn, out *fuse.DirEntryList) fuse.Status {
	return f.readDir(cancel, in, out, false, func(e fuse.DirEntry, _ *penstock.Entry) bool {
		return out.AddDirEntry(e)
	})
}

// ReadDirPlus lists names with what a lookup of each would tell.
func (f *fileSystem) ReadDirPlus(cancel <-chan struct{}, in *fuse.ReadIn, out *fuse.DirEntryList) fuse.Status {
	return f.readDir(cancel, in, out, true, func(e fuse.DirEntry, known *penstock.Entry) bool {
		entry := out.AddDirLookupEntry(e)
		if entry == nil {
			return false
		}
		// Node 0, which the entry has already, says: look it up yourself.
		if known != nil && known.Attr.Ino != 0 && f.crossable(known) == fuse.OK {
			f.fillEntry(known, entry)
		}
		return true
	})
}

// readDir streams a directory from the position that the kernel names. add
// says whether an entry fitted.
func (f *fileSystem) readDir(cancel <-chan struct{}, in *fuse.ReadIn, out *fuse.DirEntryList, plus bool, add func(fuse.DirEntry, *penstock.Entry) bool) fuse.Status {
	if isVirtual(in.NodeId) {
		return f.virtualReadDir(in.Offset, add)
	}
	ctx := request(cancel)
	if isSnapshots(in.NodeId) {
		return f.snapshotsReadDir(ctx, in.NodeId, in.Offset, add)
	}
	id, _ := f.split(in.NodeId)
	v, ino, err := f.inode(ctx, in.NodeId)
	if err != nil {
		return f.status("readdir", in.NodeId, err)
	}
	if in.Offset < afterDotDot {
		if st := f.dots(ctx, v, id, ino, in.Offset, add); st != fuse.OK {
			return st
		}
	}
	cookie := uint64(0)
	if in.Offset > afterDotDot {
		cookie = in.Offset
	}
	each := direntBytes
	if plus {
		each = plusBytes
	}
	list, _, err := v.ReadDir(ctx, ino, cookie, int(in.Size)/each+1, plus)
	if meta.KindOf(err) == meta.Stale {
		return fuse.OK // removed while it was open: nothing is left in it
	}
	if err != nil {
		return f.status("readdir", in.NodeId, err)
	}
	for i := range list {
		d := &list[i]
		if !add(fuse.DirEntry{Name: d.Name, Ino: f.inumber(d.Volume, d.Ino), Mode: d.Type, Off: d.Cookie}, &d.Entry) {
			break
		}
	}
	return fuse.OK
}

// dots adds "." and "..".
func (f *fileSystem) dots(ctx request, v Volume, id meta.VolumeID, ino meta.Ino, from uint64, add func(fuse.DirEntry, *penstock.Entry) bool) fuse.Status {
	e, err := v.GetAttr(ctx, ino)
	if meta.KindOf(err) == meta.Stale {
		return fuse.OK
	}
	if err != nil {
		return f.status("readdir", f.nodeID(id, ino), err)
	}
	parent := e.Attr.Parent
	if parent == 0 {
		parent = ino
	}
	if from < afterDot && !add(fuse.DirEntry{Name: ".", Ino: f.inumber(id, ino), Mode: meta.TypeDir, Off: afterDot}, nil) {
		return fuse.OK
	}
	add(fuse.DirEntry{Name: "..", Ino: f.inumber(id, parent), Mode: meta.TypeDir, Off: afterDotDot}, nil)
	return fuse.OK
}
