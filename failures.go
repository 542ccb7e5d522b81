package penstock

import (
	"context"

	"penstock.io/penstock/meta"
)

// A failure to make bytes of a file durable is told to every handle of the file, by the
// rules of Linux's errseq_t: the handle's next fsync fails, once, and until then each close
// of one of its descriptors does, since the first close may be that of a child process that
// ignores its result. As long as no handle was told, the next write fails, or a rename of the
// file over another one, once, and a handle that is opened later hears of the failure by its
// fsync and close. Once a handle was told, later handles, writes and renames are told nothing.

// HandleKey is the key under which a context carries the Handle that a Flush, an Fsync or a
// Release is made through. Calls without one count as made through one and the same handle,
// and a close tells that handle once.
type HandleKey struct{}

// Handle is one open(2) of a file, whose descriptors may be many.
type Handle struct {
	// ID is chosen by the caller. No other open handle of the file has it.
	ID uint64
	// Failures is OpenInfo.Failures of the open.
	Failures uint32
}

func handleOf(ctx context.Context) Handle {
	h, _ := ctx.Value(HandleKey{}).(Handle)
	return h
}

// failures keeps the last failure of a file and which handles were told. The inode's mu
// guards it.
type failures struct {
	last error
	n    uint32 // number of failures
	puts uint32 // file.puts at the last one
	// lost: the bytes are gone. Otherwise they are still here and are tried again.
	lost bool
	seen bool // a handle was told of the last failure
	// rename: the next rename is told of the last failure, unless it was seen.
	rename bool
	// synced has by handle how many of the failures an fsync told; closed is how many a
	// close told of the calls without a handle.
	synced map[uint64]uint32
	closed uint32
	one    bool // Config.UnsafeTellOne
}

// fail notes that bytes are not durable; lost says that they are not here any more. Bytes
// that are tried again and again fail once.
func (f *file) fail(err error, lost bool) {
	if !lost && f.failsStill(err) {
		return
	}
	x := f.failure(err)
	x.lost = x.lost || lost
	x.seen, x.rename = false, true
}

// syncFailed books what an fsync through a handle returned of its own attempt: the other
// handles hear of it, and this one has been told of all that failed before.
func (f *file) syncFailed(h Handle, err error) {
	if f.opens > 1 && !f.failsStill(err) {
		f.failure(err)
	}
	if f.failed != nil {
		f.failed.told(h)
	}
}

func (f *file) failure(err error) *failures {
	if f.failed == nil {
		f.failed = &failures{synced: make(map[uint64]uint32), one: f.in.vol.c.cfg.UnsafeTellOne}
	}
	f.failed.n++
	f.failed.last, f.failed.puts = err, f.puts
	return f.failed
}

// failsStill reports whether err is the last failure once more: nothing was written since.
func (f *file) failsStill(err error) bool {
	x := f.failed
	return x != nil && x.puts == f.puts && meta.KindOf(err) == meta.KindOf(x.last)
}

// told books that a handle was told by fsync.
func (x *failures) told(h Handle) {
	x.synced[h.ID] = x.n
	x.seen = true
}

// knows reports whether an fsync through the handle has told of all failures.
func (x *failures) knows(h Handle) bool {
	return max(x.synced[h.ID], h.Failures) >= x.n || x.one && x.seen
}

// toldBySync gives the error that an fsync through the handle returns, and books it as told.
func (f *file) toldBySync(h Handle) error {
	x := f.failed
	if x == nil || x.knows(h) {
		return nil
	}
	x.told(h)
	return x.last
}

// toldByClose gives the error that a close of one of the handle's descriptors returns.
func (f *file) toldByClose(h Handle) error {
	x := f.failed
	if x == nil || x.knows(h) || h.ID == 0 && x.closed >= x.n {
		return nil
	}
	if h.ID == 0 {
		x.closed = x.n
	}
	x.seen = true
	return x.last
}

// toldByWrite gives the error that the next write returns. It returns none once any handle
// was told. A page that the kernel writes back is no write: nobody would be told, and the
// page would be lost.
func (f *file) toldByWrite() error {
	x := f.failed
	if x == nil || x.seen {
		return nil
	}
	x.seen = true
	return x.last
}

// toldByRename gives the error that a rename of the file over another one returns. It returns
// none once any handle was told.
func (f *file) toldByRename() error {
	x := f.failed
	if x == nil || x.seen || !x.rename {
		return nil
	}
	x.rename = false
	return x.last
}

// untold reports whether there is a failure that no handle was told of.
func (f *file) untold() bool {
	x := f.failed
	return x != nil && !x.seen && (x.lost || f.uncommitted > 0)
}

// toldBefore gives the number of failures that a handle which is opened now need not hear of.
func (f *file) toldBefore() uint32 {
	switch {
	case f.failed == nil:
		return 0
	case f.untold():
		return f.failed.n - 1
	}
	return f.failed.n
}

// releaseHandle forgets what a handle was told; with the last one, all that somebody was
// told of or that turned out well.
func (f *file) releaseHandle(h Handle) {
	if f.failed == nil {
		return
	}
	delete(f.failed.synced, h.ID)
	if f.opens == 0 && !f.untold() && f.uncommitted == 0 {
		f.failed = nil
	}
}

// PageLost tells that bytes of a shared mapping, which the kernel wrote back, could not be
// taken in. The handles of the file hear of it, and so does the next sync of the volume.
func (v *Volume) PageLost(ino meta.Ino, bytes int, err error) {
	in := v.node(ino)
	defer in.put()
	v.c.stats.lose(int64(bytes))
	v.c.log.Error("written bytes of a mapping are lost", "inode", v.subject(ino), "bytes", bytes, "err", err)
	in.mu.Lock()
	in.fileLocked().fail(meta.E("write a page of a mapping", meta.KindOf(err), v.subject(ino), err), true)
	in.mu.Unlock()
	v.lost.any(err)
}
