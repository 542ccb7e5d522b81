package penstock

import (
	"time"

	"penstock.io/penstock/meta"
)

// Call identifies the caller of an operation. Each request has a Call of its own. The zero
// Call stands for the process itself as root; the client then numbers the operation.
type Call struct {
	// Op is the id of the request. The client increments Step for each operation within the
	// request, so that a request repeated after a replacement of the daemon runs exactly once.
	Op    meta.OpID
	UID   uint32
	GID   uint32
	PID   uint32
	Umask uint32
	// Resent: the kernel repeats the request, because the previous daemon was killed before it
	// answered.
	Resent bool

	led  meta.Led       // of Leadership's changes of names; zero: no condition
	late []*meta.Result // results of operations that finished after the caller was killed (uncancel)
}

// Entry describes the inode behind a name, and how long the description may be cached.
type Entry struct {
	Attr meta.Attr
	// Volume is the volume of Attr.Ino. For a junction it differs from the volume asked, and
	// Attr describes the root of the other volume.
	Volume meta.VolumeID
	// Valid is how long a cache above the client (the kernel) may keep the name and the
	// attributes: the rest of the session's lease minus a margin; zero without a lease. The
	// cache must follow recalls.
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
	// Failures is for the Handle of this opener.
	Failures uint32
}

// DirEntry is one entry of a directory listing.
type DirEntry struct {
	Name   string
	Ino    meta.Ino // within Volume
	Volume meta.VolumeID
	Type   uint32 // S_IFMT bits
	Cookie uint64 // position behind this entry; at least 3
	// Entry is set when attributes were asked for.
	Entry Entry
}

// DirCursor is the position of a directory listing. The zero value is the beginning. A listing
// returns once each name that exists from the beginning to the end of the listing. Names added
// meanwhile, also by renames, are left out, so a listing always ends.
type DirCursor struct {
	// Cookie is the cookie of the last returned entry; 0: none. ReadDir sets it. To continue
	// behind another entry, the caller sets the Cookie of that entry; 0 begins a new listing.
	Cookie uint64
	// End is the cookie of the first name added after the listing began; 0: not known yet.
	// ReadDir sets it.
	End uint64
}

// Notifier invalidates caches above the client before a lease is given back. The client calls
// the methods from its own goroutines. A method returns when the cache shows nothing stale any
// more; it must not wait for a lock that an operation in flight holds, except a READ's.
type Notifier interface {
	// InvalAttr drops the cached attributes of an inode.
	InvalAttr(v meta.VolumeID, ino meta.Ino)
	// InvalData drops cached pages and attributes; n <= 0 means to the end. It may wait for
	// reads of the dropped pages in flight.
	InvalData(v meta.VolumeID, ino meta.Ino, off, n int64)
	// InvalEntries drops all cached names, present and absent, of a directory.
	InvalEntries(v meta.VolumeID, dir meta.Ino)
}

// SeekHole and SeekData are the values of whence for Seek.
const (
	SeekData uint32 = 3
	SeekHole uint32 = 4
)
