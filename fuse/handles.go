package fuse

import (
	"github.com/hanwen/go-fuse/v2/fuse"

	"penstock.io/penstock/meta"
)

// Handles of files (name_to_handle_at(2), open_by_handle_at(2)), as NFS servers, backup
// programs and fanotify use them. The kernel makes a handle of the node id and the
// generation, and both say the same of a file in every process that serves the mount.
// For a handle whose inode the kernel has forgotten it looks up "." in the node, and
// ".." in each directory above a directory.
//
// Two kinds of handles are stale as soon as the kernel forgets the inode: those of what
// this package makes itself (.penstock, .snapshot), and those of directories in
// a volume that hangs below the mount's own, since the root of a volume does not know
// the path that leads to it.

// handleLookup answers a lookup of "." or ".." in a node. The kernel turns ENOENT into
// ESTALE.
func (f *fileSystem) handleLookup(ctx request, node uint64, name string, out *fuse.EntryOut) fuse.Status {
	if isText(node) || isSnapshots(node) {
		return fuse.ENOENT
	}
	id, ino := f.split(node)
	if !f.reached(id) || name == ".." && ino == meta.RootIno {
		return fuse.ENOENT
	}
	v, err := f.volume(ctx, id)
	if err != nil {
		return f.handleStatus(node, err)
	}
	e, err := v.Lookup(ctx, ino, name)
	if err != nil {
		return f.handleStatus(node, err)
	}
	if e.Negative || e.Attr.Nlink == 0 {
		return fuse.ENOENT
	}
	f.fillEntry(&e, out)
	return fuse.OK
}

// reached reports whether a handle may lead into a volume: into the mount's own, one that
// a path of this mount has led to, or, if the mount shows the whole tree, any. So nobody
// reaches by a made-up handle what lies beside the volume that a pod was given.
func (f *fileSystem) reached(id meta.VolumeID) bool {
	if id == f.rootVolume || f.rootVolume == meta.RootVolume && f.rootIno == meta.RootIno {
		return true
	}
	f.mu.RLock()
	defer f.mu.RUnlock()
	return f.volumes[id] != nil
}

// handleStatus is the status of a lookup by handle that failed. A handle of what is
// gone, or is no handle of ours, is stale.
func (f *fileSystem) handleStatus(node uint64, err error) fuse.Status {
	switch meta.KindOf(err) {
	case meta.NotFound, meta.Stale, meta.NoSuchVolume, meta.NotDir:
		return fuse.ENOENT
	}
	return f.status("lookup", node, err)
}
