package penstock

import (
	"time"

	"penstock.io/penstock/meta"
)

// Call says on whose behalf an operation runs. A Call is used by one request,
// not shared. The zero Call is the process itself as root, with an operation
// id that the client counts.
type Call struct {
	// Op is the id of the request; Step is counted inside, one for each
	// operation that the request takes, so that a request which is sent again
	// after the daemon was replaced runs exactly once.
	Op    meta.OpID
	UID   uint32
	GID   uint32
	PID   uint32
	Umask uint32
	// Resent: the kernel sends it again, since a predecessor of this process was
	// killed before it answered.
	Resent bool

	late []*meta.Result // of what was done after the caller was killed; see through
}

// Entry is what a name or an inode is, and for how long that may be believed.
type Entry struct {
	Attr meta.Attr
	// Volume is the volume that Attr.Ino belongs to: another one than asked
	// when the name is a junction, and then Attr is of that volume's root.
	Volume meta.VolumeID
	// Valid is how long name and attributes may be cached by whoever gets the
	// recalls (the kernel): what is left of the session's lease less a margin,
	// zero when no lease is held.
	Valid time.Duration
	// Negative: the name does not exist; Attr is not set.
	Negative bool
}

// OpenInfo tells how an opened file may be cached.
type OpenInfo struct {
	Entry Entry
	// KeepCache: pages cached since an earlier open are still right.
	KeepCache bool
	// DirectIO: nothing may be cached, no lease could be had.
	DirectIO bool
	// Sealed: contents can't change any more; Backing may give a descriptor.
	Sealed bool
	// Failures is for the Handle that is made of it.
	Failures uint32
}

// DirEntry is one entry of a directory listing.
type DirEntry struct {
	Name   string
	Ino    meta.Ino // within Volume
	Volume meta.VolumeID
	Type   uint32 // S_IFMT bits
	Cookie uint64 // position after this entry; at least 3
	// Entry is set when attributes were asked for.
	Entry Entry
}

// DirCursor is where a listing of a directory stands. The zero value is its beginning.
// A listing tells each name once that is there from its beginning to its end. Names
// that are added meanwhile, by renames too, are not told: so it ends.
type DirCursor struct {
	// Cookie is that of the last entry that was told; 0: none was. ReadDir sets it. A
	// caller may set it to the Cookie of any entry, and goes on behind that one; with 0
	// a new listing begins.
	Cookie uint64
	// End is the cookie that the first name got, or will get, that was added after the
	// listing began; 0: not known yet. ReadDir sets it.
	End uint64
}

// Notifier is told what must be forgotten before a lease is given back. Its
// methods are called from goroutines of the client's own and return when
// nothing stale can be seen any more; they must not wait for a lock that an
// operation in flight holds, other than a READ's.
type Notifier interface {
	// InvalAttr drops the cached attributes of an inode.
	InvalAttr(v meta.VolumeID, ino meta.Ino)
	// InvalData drops cached pages and attributes; n <= 0 means to the end.
	// It may wait for reads of those pages that are in flight.
	InvalData(v meta.VolumeID, ino meta.Ino, off, n int64)
	// InvalEntries drops all cached names, present and absent, of a directory.
	InvalEntries(v meta.VolumeID, dir meta.Ino)
}

// SeekHole and SeekData are the two questions that Seek answers.
const (
	SeekData uint32 = 3
	SeekHole uint32 = 4
)
