package fuse

import (
	"syscall"

	"github.com/hanwen/go-fuse/v2/fuse"

	penstock "penstock.io/penstock"
	"penstock.io/penstock/meta"
)

// Lookup finds a name. The answer for an absent name has node 0, which the kernel may cache.
// The answer for a junction is the root of the junction's volume.
func (f *fileSystem) Lookup(cancel <-chan struct{}, in *fuse.InHeader, name string, out *fuse.EntryOut) fuse.Status {
	ctx := request(cancel)
	if (name == "." || name == "..") && !isText(in.NodeId) {
		return f.handleLookup(ctx, in.NodeId, name, out)
	}
	if dir := f.virtualAt(in.NodeId); dir != nil {
		return dir.lookup(ctx, in.NodeId, name, out)
	}
	if in.NodeId == fuse.FUSE_ROOT_ID && name == textsName {
		return textDirectory{f}.enter(out)
	}
	v, ino, err := f.inode(ctx, in.NodeId)
	if err != nil {
		return f.status("lookup", in.NodeId, err)
	}
	e, err := v.Lookup(ctx, ino, name)
	if meta.KindOf(err) == meta.NotFound {
		return fuse.ENOENT
	}
	if err != nil {
		return f.status("lookup", in.NodeId, err)
	}
	if e.Negative {
		valid := f.entryTimeout(e.Volume, e.Valid)
		if id, _ := f.split(in.NodeId); name == penstock.SnapshotDir && showsSnapshots(id, ino) {
			return snapshotDirectory{f}.enter(ctx, v, id, valid, out)
		}
		if st, ok := f.streams.nameIn(ctx, v, in.NodeId, name, out); ok {
			return st
		}
		if valid <= 0 {
			return fuse.ENOENT
		}
		out.SetEntryTimeout(valid)
		return fuse.OK
	}
	if st := f.crossable(&e); st != fuse.OK {
		return st
	}
	f.fillEntry(&e, out)
	return fuse.OK
}

// crossable refuses a junction from a mount without opens into a mutable volume, since the
// mutable volume's files need opens (rule 19).
func (f *fileSystem) crossable(e *penstock.Entry) fuse.Status {
	if !f.noOpen || e.Volume == f.rootVolume {
		return fuse.OK
	}
	v, err := f.volume(request(nil), e.Volume)
	if err != nil {
		return f.status("lookup", nodeOf(e.Volume, e.Attr.Ino), err)
	}
	if !v.Policy().Immutable {
		f.log.Warn("junction not followed: this mount is of an immutable volume and answers no opens; mount the other volume by itself", "volume", v.Name())
		return fuse.EXDEV
	}
	return fuse.OK
}

// Readlink reads a symbolic link.
func (f *fileSystem) Readlink(cancel <-chan struct{}, in *fuse.InHeader) ([]byte, fuse.Status) {
	ctx := request(cancel)
	v, ino, err := f.inode(ctx, in.NodeId)
	if err != nil {
		return nil, f.status("readlink", in.NodeId, err)
	}
	target, err := v.ReadLink(ctx, ino)
	if err != nil {
		return nil, f.status("readlink", in.NodeId, err)
	}
	return []byte(target), fuse.OK
}

// Mknod makes a node of any type but a directory or a link.
func (f *fileSystem) Mknod(cancel <-chan struct{}, in *fuse.MknodIn, name string, out *fuse.EntryOut) fuse.Status {
	return f.create(cancel, "mknod", &in.InHeader, meta.Create{Name: name, Mode: in.Mode, Umask: in.Umask, Rdev: in.Rdev}, out)
}

// Mkdir makes a directory.
func (f *fileSystem) Mkdir(cancel <-chan struct{}, in *fuse.MkdirIn, name string, out *fuse.EntryOut) fuse.Status {
	return f.create(cancel, "mkdir", &in.InHeader, meta.Create{Name: name, Mode: meta.TypeDir | in.Mode&meta.ModePerm, Umask: in.Umask}, out)
}

// Symlink makes a symbolic link.
func (f *fileSystem) Symlink(cancel <-chan struct{}, in *fuse.InHeader, target, name string, out *fuse.EntryOut) fuse.Status {
	if len(target) > meta.MaxSymlink {
		return fuse.Status(syscall.ENAMETOOLONG)
	}
	return f.create(cancel, "symlink", in, meta.Create{Name: name, Mode: meta.TypeSymlink | 0o777, Target: target}, out)
}

// create makes a node with a new name; an existing name is an error.
func (f *fileSystem) create(cancel <-chan struct{}, op string, h *fuse.InHeader, req meta.Create, out *fuse.EntryOut) fuse.Status {
	if isOwn(h.NodeId) {
		return fuse.EPERM
	}
	ctx := request(cancel)
	v, parent, err := f.inode(ctx, h.NodeId)
	if err != nil {
		return f.status(op, h.NodeId, err)
	}
	req.Parent, req.UID, req.GID, req.Excl = parent, h.Uid, h.Gid, true
	e, err := v.Create(ctx, f.call(h), req)
	if err != nil {
		return f.status(op, h.NodeId, err)
	}
	f.fillEntry(&e, out)
	return fuse.OK
}

// Unlink removes the name of a file other than a directory.
func (f *fileSystem) Unlink(cancel <-chan struct{}, in *fuse.InHeader, name string) fuse.Status {
	return f.unlink(cancel, "unlink", in, name, false)
}

// Rmdir removes an empty directory.
func (f *fileSystem) Rmdir(cancel <-chan struct{}, in *fuse.InHeader, name string) fuse.Status {
	return f.unlink(cancel, "rmdir", in, name, true)
}

func (f *fileSystem) unlink(cancel <-chan struct{}, op string, in *fuse.InHeader, name string, dir bool) fuse.Status {
	if isOwn(in.NodeId) {
		return fuse.EPERM
	}
	ctx := request(cancel)
	v, parent, err := f.inode(ctx, in.NodeId)
	if err == nil {
		err = v.Unlink(ctx, f.call(in), parent, name, dir)
		if id, _ := f.split(in.NodeId); meta.KindOf(err) == meta.NotFound && name == penstock.SnapshotDir && showsSnapshots(id, parent) {
			err = meta.E(op, meta.ReadOnly, name, nil)
		}
		if meta.KindOf(err) == meta.NotFound && f.streams.shows(ctx, v, in.NodeId, name) {
			err = meta.E(op, meta.NotPermitted, name, nil)
		}
	}
	return f.status(op, in.NodeId, err)
}
