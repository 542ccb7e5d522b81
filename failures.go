package penstock

import (
	"context"

	"penstock.io/penstock/meta"
)

// A failure to make bytes of a file durable is reported to every handle of the file, by the
// rules of Linux's errseq_t. The handle's next fsync fails, once. Until then each close of one
// of the handle's descriptors fails, since the first close may be that of a child process that
// ignores the result. Until a handle reports the failure, the next write fails, or a rename of
// the file over another one, once, and a handle opened later reports the failure by fsync and
// close. After a handle has reported the failure, later handles, writes and renames succeed.

// HandleKey is the key under which the context of a Flush, an Fsync or a Release carries the
// Handle. Calls without a Handle share one handle, and a close reports a failure to the shared
// handle once.
type HandleKey struct{}

// Handle is one open(2) of a file. Several descriptors may share a handle.
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

// fail notes that bytes are not durable; lost: the bytes are gone. Repeated attempts to commit
// the same bytes count as one failure.
func (f *file) fail(err error, lost bool) {
	if !lost && f.failsStill(err) {
		return
	}
	x := f.failure(err)
	x.lost = x.lost || lost
	x.seen, x.rename = false, true
}

// syncFailed records err, which an fsync through h returned for its own attempt. The file's
// other handles will report err, and h counts as having reported all earlier failures.
func (f *file) syncFailed(h Handle, err error) {
	if f.users.opens > 1 && !f.failsStill(err) {
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

// toldBySync returns the error for an fsync through the handle, and records the error as
// reported.
func (f *file) toldBySync(h Handle) error {
	x := f.failed
	if x == nil || x.knows(h) {
		return nil
	}
	x.told(h)
	return x.last
}

// toldByClose returns the error for a close of one of the handle's descriptors.
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

// toldByWrite returns the error for the next write: nil after any handle has reported the
// failure. A page written back by the kernel is no write: nobody would receive the error, and
// the page would be lost.
func (f *file) toldByWrite() error {
	x := f.failed
	if x == nil || x.seen {
		return nil
	}
	x.seen = true
	return x.last
}

// toldByRename returns the error for a rename of the file over another one: nil after any
// handle has reported the failure.
func (f *file) toldByRename() error {
	x := f.failed
	if x == nil || x.seen || !x.rename {
		return nil
	}
	x.rename = false
	return x.last
}

// untold reports whether a failure exists that no handle has reported.
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

// releaseHandle forgets which failures a handle reported. With the last handle of a file, it
// forgets all failures unless a failure is unreported or bytes are still uncommitted.
func (f *file) releaseHandle(h Handle) {
	if f.failed == nil {
		return
	}
	delete(f.failed.synced, h.ID)
	if f.users.opens == 0 && !f.untold() && f.uncommitted == 0 {
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
