package fuse

import (
	"github.com/hanwen/go-fuse/v2/fuse"

	"penstock.io/penstock/meta"
)

// Handles of files (name_to_handle_at(2), open_by_handle_at(2)), for NFS servers, backup
// programs and fanotify. The kernel makes a handle from the node id and the generation; both
// have the same meaning in every process that serves the mount. For a handle of a forgotten
// inode, the kernel looks up "." in the node, and ".." in each directory above a directory.
//
// Two kinds of handles are stale as soon as the kernel forgets the inode: handles of nodes
// made by package fuse (.penstock, .snapshot, tail of a stream), and handles of directories in a volume below
// the mount's own volume, since the root of a volume does not know its path.

// handleLookup answers a lookup of "." or ".." in a node. The kernel turns ENOENT into
// ESTALE.
func (f *fileSystem) handleLookup(ctx request, node uint64, name string, out *fuse.EntryOut) fuse.Status {
	if isOwn(node) || isSnapshots(node) {
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

// reached reports whether a handle may lead into a volume: into the mount's own volume, into a
// volume already opened through a path of the mount, or, if the mount shows the whole tree,
// into any volume. So a made-up handle can't reach a volume beside the volume given to a pod.
func (f *fileSystem) reached(id meta.VolumeID) bool {
	if id == f.rootVolume || f.rootVolume == meta.RootVolume && f.rootIno == meta.RootIno {
		return true
	}
	f.mu.RLock()
	defer f.mu.RUnlock()
	return f.volumes[id] != nil
}

// handleStatus returns the status of a failed lookup by handle. A handle of a deleted file, or
// not made by penstock, is stale.
func (f *fileSystem) handleStatus(node uint64, err error) fuse.Status {
	switch meta.KindOf(err) {
	case meta.NotFound, meta.Stale, meta.NoSuchVolume, meta.NotDir:
		return fuse.ENOENT
	}
	return f.status("lookup", node, err)
}
