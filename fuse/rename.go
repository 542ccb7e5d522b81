package fuse

import (
	"github.com/hanwen/go-fuse/v2/fuse"

	"penstock.io/penstock/meta"
)

// Rename answers rename(2) and renameat2(2). A rename to another volume fails with EXDEV, and
// whiteouts fail with EINVAL.
func (f *fileSystem) Rename(cancel <-chan struct{}, in *fuse.RenameIn, oldName, newName string) fuse.Status {
	if isOwn(in.NodeId) || isOwn(in.Newdir) {
		return fuse.EPERM
	}
	if in.Flags&^(meta.RenameNoReplace|meta.RenameExchange) != 0 {
		return fuse.EINVAL
	}
	if isSnapshots(in.NodeId) || isSnapshots(in.Newdir) {
		return fuse.EROFS
	}
	from, parent := f.split(in.NodeId)
	to, newParent := f.split(in.Newdir)
	if from != to {
		return fuse.EXDEV
	}
	ctx := request(cancel)
	v, err := f.volume(ctx, from)
	if err == nil && isStreamName(newName) {
		if e, lerr := v.Lookup(ctx, newParent, newName); lerr == nil && e.Negative && f.streams.shows(ctx, v, in.Newdir, newName) {
			return fuse.EPERM
		}
	}
	if err == nil {
		err = v.Rename(ctx, f.call(&in.InHeader), parent, oldName, newParent, newName, in.Flags)
	}
	return f.status("rename", in.NodeId, err)
}

// Link answers link(2), and linkat(2) of a file made by O_TMPFILE.
func (f *fileSystem) Link(cancel <-chan struct{}, in *fuse.LinkIn, name string, out *fuse.EntryOut) fuse.Status {
	if isOwn(in.NodeId) || isOwn(in.Oldnodeid) {
		return fuse.EPERM
	}
	if isSnapshots(in.NodeId) {
		return fuse.EROFS
	}
	from, ino := f.split(in.Oldnodeid)
	to, parent := f.split(in.NodeId)
	if from != to {
		return fuse.EXDEV
	}
	ctx := request(cancel)
	v, err := f.volume(ctx, from)
	if err != nil {
		return f.status("link", in.NodeId, err)
	}
	e, err := v.Link(ctx, f.call(&in.InHeader), ino, parent, name)
	if err != nil {
		return f.status("link", in.NodeId, err)
	}
	f.fillEntry(&e, out)
	return fuse.OK
}
