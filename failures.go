package penstock

import (
	"context"

	"penstock.io/penstock/meta"
)

// What of a file could not be made durable is told to whoever has it open, by the rules
// of Linux's errseq_t: each handle hears of it at its next fsync, once, and at each close
// of one of its descriptors until then, for the first of these may be that of a child
// process which looks at no result. A handle that was opened later hears of bytes that
// are lost if nobody had been told. One write fails, too, and a rename of the file over
// another one, if nobody had been told before.

// HandleKey is the key of a context's value, a Handle, that says through which handle a
// Flush, an Fsync or a Release goes. All without one count as the same handle, and then a
// close tells once.
type HandleKey struct{}

// Handle is one open(2) of a file, whose descriptors may be many.
type Handle struct {
	// ID is the caller's: no other handle of the file has it while this one is open.
	ID uint64
	// Failures is what OpenInfo told when it was opened.
	Failures uint32
}

func handleOf(ctx context.Context) Handle {
	h, _ := ctx.Value(HandleKey{}).(Handle)
	return h
}

// failures are what handles of a file are told. Guarded by the inode's mu.
type failures struct {
	last error
	n    uint32 // how many there were
	// lost: bytes are gone. Else they are here, and are tried again.
	lost bool
	seen bool // a handle was told of the last one
	// write, rename: the next one is told of the last one.
	write, rename bool
	// synced is of how many a handle was told by fsync; closed is of how many those
	// without a handle were told by a close.
	synced map[uint64]uint32
	closed uint32
}

// fail notes that bytes are not durable; lost says that they are not here any more.
func (f *file) fail(err error, lost bool) {
	x := f.failure(err)
	x.lost = x.lost || lost
	x.seen, x.write, x.rename = false, true, true
}

// failBeside notes for the other handles what an fsync through this one was told.
func (f *file) failBeside(h Handle, err error) {
	if f.opens < 2 {
		return
	}
	x := f.failure(err)
	x.told(h)
}

func (f *file) failure(err error) *failures {
	if f.failed == nil {
		f.failed = &failures{synced: make(map[uint64]uint32)}
	}
	f.failed.n++
	f.failed.last = err
	return f.failed
}

// told books that a handle was told by fsync.
func (x *failures) told(h Handle) {
	x.synced[h.ID] = x.n
	x.seen, x.rename = true, false
}

// knows reports that an fsync through a handle has told of all.
func (x *failures) knows(h Handle) bool { return max(x.synced[h.ID], h.Failures) >= x.n }

// toldBySync is what an fsync tells.
func (f *file) toldBySync(h Handle) error {
	x := f.failed
	if x == nil || x.knows(h) {
		return nil
	}
	x.told(h)
	return x.last
}

// toldByClose is what a close of one of a handle's descriptors tells.
func (f *file) toldByClose(h Handle) error {
	x := f.failed
	if x == nil || x.knows(h) || h.ID == 0 && x.closed >= x.n {
		return nil
	}
	if h.ID == 0 {
		x.closed = x.n
	}
	x.seen, x.rename = true, false
	return x.last
}

// toldByWrite is what the next write tells.
func (f *file) toldByWrite() error {
	x := f.failed
	if x == nil || !x.write {
		return nil
	}
	x.write, x.rename = false, false
	return x.last
}

// toldByRename is what a rename over another file tells: it need not hear what somebody
// else did.
func (f *file) toldByRename() error {
	x := f.failed
	if x == nil || !x.rename {
		return nil
	}
	x.rename = false
	return x.last
}

// untold reports that of something nobody was told yet.
func (f *file) untold() bool {
	x := f.failed
	return x != nil && !x.seen && (x.lost || f.uncommitted > 0)
}

// toldBefore is of how many failures a handle that is opened now need not hear.
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

// PageLost tells that bytes which the kernel wrote back of a shared mapping could not be
// put in. Whoever has the file open hears of it, and the next sync of the whole volume.
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
