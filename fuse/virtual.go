package fuse

import (
	"github.com/hanwen/go-fuse/v2/fuse"

	penstock "penstock.io/penstock"
)

// virtualDirectory answers the kernel's requests for the nodes of one kind outside all
// volumes: the texts of .penstock, the snapshots of .snapshot, or the unlisted files of a stream.
// Each kind is a provider, found by node number. A directory of a volume has a name for the
// provider (enter), which is never listed.
type virtualDirectory interface {
	// lookup finds a name in a node of the provider's kind.
	lookup(ctx request, node uint64, name string, out *fuse.EntryOut) fuse.Status
	getAttr(ctx request, node uint64, out *fuse.AttrOut) fuse.Status
	statx(ctx request, node uint64, out *fuse.StatxOut) fuse.Status
	readDir(ctx request, in *fuse.ReadIn, add addEntry) fuse.Status
}

// addEntry adds a name to a listing, with the name's entry if known; false: no room is left.
type addEntry func(fuse.DirEntry, *penstock.Entry) bool

// virtualAt returns the provider of a node; nil: the node belongs to a volume.
func (f *fileSystem) virtualAt(node uint64) virtualDirectory {
	switch {
	case isText(node):
		return textDirectory{f}
	case isSnapshots(node):
		return snapshotDirectory{f}
	case isStream(node):
		return &f.streams
	}
	return nil
}

// isVirtualName reports whether a name may lead to a virtual directory, so that a lookup must
// not be answered from a volume's entries alone.
func isVirtualName(name string) bool { return name == textsName || name == penstock.SnapshotDir }
