package fuse

import (
	"runtime"
	"slices"
	"time"
	"unsafe"

	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"

	penstock "penstock.io/penstock"
	"penstock.io/penstock/meta"
)

// How many goroutines wait for a request.
//
// Most of a request's cost is switching between threads. Of two waiting threads the kernel
// wakes each in turn, and a thread that takes a request while no thread waits starts a third.
// A single waiting thread is often still running, in the write of its last answer, when the
// next request comes, and needs no wakeup.
//
// But a single waiting thread must not begin a request that may wait: a READ from a chunk
// server, or an OPEN that the owner answers only after a recall, whose invalidation waits for
// a READ that no thread takes. So the thread first tries to answer from memory (quick), and
// starts a successor if the try fails. Where most requests may wait, a second thread waits
// too, since starting a thread costs more than taking turns.

// quickVolume is a Volume that can answer from memory; see *penstock.Volume for the methods.
// No method waits.
type quickVolume interface {
	LookupCached(parent meta.Ino, name string) (penstock.Entry, bool)
	GetAttrCached(ino meta.Ino) (penstock.Entry, bool)
	OpenCached(ino meta.Ino, flags uint32) (penstock.OpenInfo, bool)
	ReadCached(ino meta.Ino, p []byte, off int64, atime bool) (n int, ok bool)
	ReleaseCached(ino meta.Ino, flags uint32) bool
}

var _ quickVolume = (*penstock.Volume)(nil)

// quick answers a request of n bytes if the answer needs no waiting. ok false: quick has not
// begun the request.
func (c *conn) quick(s *slot, n int) (ok bool) {
	op := order.Uint32(s.in[4:])
	switch op {
	case opForget, opIoctl, opPoll, opInterrupt:
		// Forgets need no answer, so nothing but us holds the kernel back.
		c.handle(s, n)
		return true
	case opLookup, opGetattr, opOpen, opRead, opRelease:
	default:
		return false
	}
	h := (*fuse.InHeader)(unsafe.Pointer(&s.in[0]))
	if h.TotalExtlen != 0 || uintptr(n) < directSize[op] || h.Unique&resent != 0 || isOwn(h.NodeId) || isSnapshots(h.NodeId) {
		return false
	}
	generation := c.generation.Load()
	st, size, ok := c.fs.quickly.quick(op, h, s, n)
	if !ok {
		return false
	}
	c.requests[op].Add(1)
	c.reply(op, s.out[:answer(s.out, h, st, size)], generation)
	return true
}

// quickly answers requests from memory.
type quickly struct{ *fileSystem }

func (q *quickly) quick(op uint32, h *fuse.InHeader, s *slot, n int) (st fuse.Status, size uintptr, ok bool) {
	id, ino := q.split(h.NodeId)
	q.mu.RLock()
	of := q.volumes[id]
	q.mu.RUnlock()
	v, ok := of.(quickVolume)
	if !ok || of.Ended() {
		return 0, 0, false
	}
	body := s.out[outHeaderSize:]
	switch op {
	case opLookup:
		out := at[fuse.EntryOut](body)
		st, ok = q.quickLookup(v, id, ino, cString(s.in[inHeaderSize:n]), out)
		return st, unsafe.Sizeof(*out), ok
	case opGetattr:
		out := at[fuse.AttrOut](body)
		e, ok := v.GetAttrCached(ino)
		if ok = ok && !q.mustFill(h.NodeId, &e.Attr); ok {
			q.fillAttrOut(h.NodeId, &e, out)
		}
		return fuse.OK, unsafe.Sizeof(*out), ok
	case opOpen:
		out, in := at[fuse.OpenOut](body), (*fuse.OpenIn)(unsafe.Pointer(h))
		if q.noOpen {
			return fuse.ENOSYS, 0, true
		}
		info, ok := v.OpenCached(ino, in.Flags)
		if ok {
			q.openCached(in.NodeId, &info, out)
			q.kept.opened(in.NodeId, out.Fh, in.Flags, out.BackingID, in.Unique)
		}
		return fuse.OK, unsafe.Sizeof(*out), ok
	case opRead:
		in := (*fuse.ReadIn)(unsafe.Pointer(h))
		got, ok := q.quickRead(v, ino, in, body)
		return fuse.OK, uintptr(got), ok
	}
	return fuse.OK, 0, q.quickRelease(v, ino, (*fuse.ReleaseIn)(unsafe.Pointer(h)))
}

func (q *quickly) quickLookup(v quickVolume, id meta.VolumeID, parent meta.Ino, name string, out *fuse.EntryOut) (fuse.Status, bool) {
	if isVirtualName(name) || q.noOpen && id != q.rootVolume {
		return 0, false
	}
	e, ok := v.LookupCached(parent, name)
	switch {
	case !ok:
		return 0, false
	case !e.Negative:
		q.fillEntry(&e, out)
	case isStreamName(name):
		return 0, false
	default:
		valid := q.entryTimeout(e.Volume, e.Valid)
		if valid <= 0 {
			return fuse.ENOENT, true
		}
		out.SetEntryTimeout(valid)
	}
	return fuse.OK, true
}

// quickRead answers from memory: the bytes of files stored in their inodes, and buffered
// bytes. quickRead leaves the overlay of queued pages to read.
func (q *quickly) quickRead(v quickVolume, ino meta.Ino, in *fuse.ReadIn, body []byte) (n int, ok bool) {
	if int(in.Size) > len(body) || modeOf(in.Fh)&modeWrite != 0 || q.back.queued.Load() > 0 {
		return 0, false
	}
	if in.ReadFlags&fuse.READ_LOCKOWNER == 0 {
		if q.opens.pageRead(in.NodeId, in.Fh, int64(in.Offset), int64(in.Size)) {
			q.conn.newGeneration()
			q.conn.invalidateAttr(in.NodeId)
		}
		defer q.opens.pageReadEnds(in.NodeId)
	}
	began := time.Now()
	if n, ok = v.ReadCached(ino, body[:in.Size], int64(in.Offset), in.Flags&unix.O_NOATIME == 0); ok {
		q.conn.reads.begin(began)
		q.conn.reads.end(began, time.Now())
	}
	return n, ok
}

// quickRelease ends an open for reading through which nothing is locked.
func (q *quickly) quickRelease(v quickVolume, ino meta.Ino, in *fuse.ReleaseIn) (ok bool) {
	mode := modeOf(in.Fh)
	if mode&modeCached == 0 || mode&(modeWrite|modePassthrough|modeVirtual) != 0 || in.ReleaseFlags&fuse.FUSE_RELEASE_FLOCK_UNLOCK != 0 {
		return false
	}
	locks := false
	q.opens.with(in.NodeId, false, func(n *openNode) {
		for _, through := range n.lockers {
			locks = locks || slices.Contains(through, in.Fh)
		}
		locks = locks || n.backing != 0 && n.through == 0 || len(n.failures) > 0
	})
	if locks || !v.ReleaseCached(ino, in.Flags) {
		return false
	}
	q.opens.with(in.NodeId, false, func(n *openNode) { n.count(mode, -1) })
	q.kept.released(in.Fh)
	return true
}

// Marks that decide whether a second goroutine waits: each request adds or subtracts marks.
const (
	markSlow  = 3  // the request could wait
	markQuick = -2 // the request could not wait
	marksFull = 32
	manyCPUs  = 2 // with more processors, callers by turns are served side by side
)

// mark books a request, and gives how many goroutines are to wait for the next.
func (c *conn) mark(pid uint32, quick bool) (readers int32) {
	if quick && pid != 0 && c.last.Swap(pid) != pid && runtime.GOMAXPROCS(0) > manyCPUs {
		quick = false
	}
	by := int32(markSlow)
	if quick {
		by = markQuick
	}
	marks := min(max(c.marks.Load()+by, 0), marksFull) // of two concurrent updates one may be lost
	c.marks.Store(marks)
	if marks > marksFull/2 {
		return maxReaders
	}
	return 1
}
