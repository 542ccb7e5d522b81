package fuse

import (
	"github.com/hanwen/go-fuse/v2/fuse"

	penstock "penstock.io/penstock"
)

// virtualDirectory answers what the kernel asks of the nodes of one kind that no volume keeps:
// the texts of .penstock, the snapshots of .snapshot. Each kind is a provider, found by the
// numbers of its nodes; the directory above has a name for it (enter), which is never listed.
type virtualDirectory interface {
	// lookup finds a name in a node of this kind.
	lookup(ctx request, node uint64, name string, out *fuse.EntryOut) fuse.Status
	getAttr(ctx request, node uint64, out *fuse.AttrOut) fuse.Status
	statx(ctx request, node uint64, out *fuse.StatxOut) fuse.Status
	readDir(ctx request, in *fuse.ReadIn, add addEntry) fuse.Status
}

// addEntry adds a name to a listing, with its entry if that is known; false: no room is left.
type addEntry func(fuse.DirEntry, *penstock.Entry) bool

// virtualAt gives the provider of a node; nil: a volume keeps it.
func (f *fileSystem) virtualAt(node uint64) virtualDirectory {
	switch {
	case isText(node):
		return textDirectory{f}
	case isSnapshots(node):
		return snapshotDirectory{f}
	}
	return nil
}

// isVirtualName tells whether a name may lead to a virtual directory, so that a volume's
// entries alone don't answer for it.
func isVirtualName(name string) bool { return name == textsName || name == penstock.SnapshotDir }
