package fuse

import (
	"math/rand/v2"
	"sync"

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

// listings knows the end of each running listing. An entry added after the begin of a listing
// has a position beyond the end, and the listing omits the entry; so every listing ends,
// despite concurrent creates and renames. A position is a cookie, valid for ever. A listing
// begins with its first READDIR, and begins anew with rewinddir(3), which asks for position 0.
// A listing begun by a predecessor ends as if it began now. The zero value is ready.
type listings struct {
	mu   sync.Mutex
	last uint64            // last handle given
	ends map[uint64]uint64 // by handle; without opens all listings have handle 0
}

// open returns a new handle. The first handle is random, since the kernel may have handles of
// a predecessor.
func (l *listings) open() uint64 {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.last == 0 {
		l.last = rand.Uint64() >> 1
	}
	l.last++
	return l.last
}

// end returns the end of a listing that continues from a position; 0: not yet known.
func (l *listings) end(handle, from uint64) uint64 {
	l.mu.Lock()
	defer l.mu.Unlock()
	if from == 0 {
		delete(l.ends, handle)
	}
	return l.ends[handle]
}

// endsAt notes where a listing ends.
func (l *listings) endsAt(handle, end uint64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if handle == 0 || end == 0 {
		return
	}
	if l.ends == nil {
		l.ends = make(map[uint64]uint64)
	}
	l.ends[handle] = end
}

func (l *listings) release(handle uint64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	delete(l.ends, handle)
}

// OpenDir gives a handle for the end of the listing.
func (f *fileSystem) OpenDir(_ <-chan struct{}, in *fuse.OpenIn, out *fuse.OpenOut) fuse.Status {
	if f.noOpen && !isOwn(in.NodeId) && !isSnapshots(in.NodeId) {
		return fuse.ENOSYS // the kernel caches listings, too
	}
	out.Fh = f.listings.open()
	return fuse.OK
}

// ReleaseDir forgets where the listing ends.
func (f *fileSystem) ReleaseDir(in *fuse.ReleaseIn) { f.listings.release(in.Fh) }

// FsyncDir makes the names durable that this mount has acknowledged.
func (f *fileSystem) FsyncDir(cancel <-chan struct{}, in *fuse.FsyncIn) fuse.Status {
	if isOwn(in.NodeId) || isSnapshots(in.NodeId) {
		return fuse.OK
	}
	ctx := request(cancel)
	v, ino, err := f.inode(ctx, in.NodeId)
	if err == nil {
		err = v.FsyncDir(ctx, ino)
	}
	return f.status("fsyncdir", in.NodeId, err)
}

// direntBytes and plusBytes are the estimated bytes of an entry in a listing: a header and a
// name of sixteen bytes, and for plusBytes the attributes.
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

// ReadDirPlus lists names, each with the result of a lookup.
func (f *fileSystem) ReadDirPlus(cancel <-chan struct{}, in *fuse.ReadIn, out *fuse.DirEntryList) fuse.Status {
	return f.readDir(cancel, in, out, true, func(e fuse.DirEntry, known *penstock.Entry) bool {
		entry := out.AddDirLookupEntry(e)
		if entry == nil {
			return false
		}
		// The entry has node 0 by default, which makes the kernel look up the name.
		if known != nil && known.Attr.Ino != 0 && f.crossable(known) == fuse.OK {
			f.fillEntry(known, entry)
		}
		return true
	})
}

// readDir lists a directory from the kernel's position. add reports whether an entry fitted.
func (f *fileSystem) readDir(cancel <-chan struct{}, in *fuse.ReadIn, out *fuse.DirEntryList, plus bool, add func(fuse.DirEntry, *penstock.Entry) bool) fuse.Status {
	ctx := request(cancel)
	if dir := f.virtualAt(in.NodeId); dir != nil {
		return dir.readDir(ctx, in, add)
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
	at := penstock.DirCursor{End: f.listings.end(in.Fh, in.Offset)}
	if in.Offset > afterDotDot {
		at.Cookie = in.Offset
	}
	each := direntBytes
	if plus {
		each = plusBytes
	}
	list, _, err := v.ReadDir(ctx, ino, &at, int(in.Size)/each+1, plus)
	if meta.KindOf(err) == meta.Stale {
		return fuse.OK // the directory was removed while open: no entry is left
	}
	if err != nil {
		return f.status("readdir", in.NodeId, err)
	}
	f.listings.endsAt(in.Fh, at.End)
	for i := range list {
		d := &list[i]
		if !add(fuse.DirEntry{Name: d.Name, Ino: f.inumbers.of(d.Volume, d.Ino), Mode: d.Type, Off: d.Cookie}, &d.Entry) {
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
	if from < afterDot && !add(fuse.DirEntry{Name: ".", Ino: f.inumbers.of(id, ino), Mode: meta.TypeDir, Off: afterDot}, nil) {
		return fuse.OK
	}
	add(fuse.DirEntry{Name: "..", Ino: f.inumbers.of(id, parent), Mode: meta.TypeDir, Off: afterDotDot}, nil)
	return fuse.OK
}
