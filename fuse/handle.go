package fuse

import (
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	penstock "penstock.io/penstock"
)

// handleMode is the low byte of a file handle: how the file was opened.
type handleMode uint8

const (
	modeWrite       handleMode = 1 << iota // may write: bypasses the page cache
	modeCached                             // reads through the page cache
	modePassthrough                        // the kernel itself reads a backing file
	modeNoFlush                            // the kernel sends no FLUSH for the handle
	modeVirtual                            // a file of .penstock, or of tail of a stream
)

const handleShift = 8

// writable reports whether the flags of open(2) allow writing.
func writable(flags uint32) bool { return flags&syscall.O_ACCMODE != syscall.O_RDONLY }

// openNode is the state of a node while the node is open through this mount. A successor
// restores the counts of handles, backing and lockers, and assumes mapped (restore); all other
// fields start empty, since these fields only save work or matter in rare cases.
type openNode struct {
	readers int // handles with modeCached
	writers int
	through int   // handles with modePassthrough
	backing int32 // the kernel's id of the backing file while through > 0
	// mapped: a handle that bypasses the page cache has filled pages, so a shared mapping
	// exists.
	mapped bool
	// filled: a page was filled while the node was open for writing, so pages may be dirty.
	// told is the last answer to the kernel meanwhile. See mapped.go.
	filled bool
	told   answered
	// around are the running changes that bypass the page cache.
	around []around
	// reading counts the unanswered READs of pages.
	reading int
	// tail are the bytes of a page between an old end of the file and the page's
	// end, after a truncation to a larger size; see grow.
	tail span
	// lockers are the owners of POSIX locks, each with the handles used for locking.
	lockers map[uint64][]uint64
	// flocks are the owners of flock locks, each with the last handle used for locking.
	flocks map[uint64]uint64
	ending lockEnds
	// failures counts, by handle, the file's failures before the open. Calls through the
	// handle do not report these failures.
	failures map[uint64]uint32
}

// through is a request through a handle.
type through struct {
	request
	handle penstock.Handle
}

func (t through) Value(key any) any {
	if _, ok := key.(penstock.HandleKey); ok {
		return t.handle
	}
	return nil
}

// through says which handle a request goes through.
func (o *opens) through(ctx request, node, fh uint64) through {
	t := through{ctx, penstock.Handle{ID: fh}}
	o.with(node, false, func(n *openNode) { t.handle.Failures = n.failures[fh] })
	return t
}

// opened counts a new handle.
func (n *openNode) opened(fh uint64, info *penstock.OpenInfo) {
	n.count(modeOf(fh), 1)
	if info.Failures == 0 {
		return
	}
	if n.failures == nil {
		n.failures = make(map[uint64]uint32)
	}
	n.failures[fh] = info.Failures
}

const openShards = 32

// span is a range of bytes; empty if from == to.
type span struct{ from, to int64 }

// opens is the table of open nodes, sharded by node.
type opens struct {
	next   atomic.Uint64
	shards [openShards]struct {
		mu    sync.Mutex
		nodes map[uint64]*openNode
	}
}

// with runs fn on the node's entry under the shard's lock. If the node has no entry, create
// makes an entry; otherwise fn does not run. fn must not call the library or wait.
func (o *opens) with(node uint64, create bool, fn func(*openNode)) {
	s := &o.shards[node%openShards]
	s.mu.Lock()
	defer s.mu.Unlock()
	n := s.nodes[node]
	if n == nil {
		if !create {
			return
		}
		if s.nodes == nil {
			s.nodes = make(map[uint64]*openNode)
		}
		n = new(openNode)
		s.nodes[node] = n
	}
	fn(n)
	if n.readers == 0 && n.writers == 0 && n.through == 0 && n.reading == 0 {
		delete(s.nodes, node)
	}
}

// handle makes a file handle.
func (o *opens) handle(mode handleMode) uint64 {
	return o.next.Add(1)<<handleShift | uint64(mode)
}

// modeOf reads the mode back.
func modeOf(fh uint64) handleMode { return handleMode(fh & (1<<handleShift - 1)) }

// count adds delta handles of a mode to the node.
func (n *openNode) count(mode handleMode, delta int) {
	switch {
	case mode&modePassthrough != 0:
		n.through += delta
	case mode&modeWrite != 0:
		if n.writers += delta; n.writers == 0 {
			n.filled, n.told = false, answered{}
		}
	default:
		n.readers += delta
	}
}

// pagesMayExist reports whether the kernel may hold pages of the node filled, by READs in
// flight, with bytes older than a write that bypassed the page cache. A shared mapping keeps
// pages that a handle for reading filled, after the close of that handle.
func (o *opens) pagesMayExist(node uint64) (yes bool) {
	o.with(node, false, func(n *openNode) { yes = n.readers > 0 || n.mapped || n.filled })
	return yes
}

// pageRead notes a READ of pages through fh, and reports whether the node may have dirty pages
// from now on. The caller calls pageRead before reading the bytes, so that a later write sees
// the READ, and pageReadEnds afterwards.
func (o *opens) pageRead(node, fh uint64, off, length int64) (first bool) {
	o.with(node, true, func(n *openNode) {
		n.reading++
		first = n.fills()
		n.mapped = n.mapped || modeOf(fh)&modeWrite != 0
		if off < n.tail.to && n.tail.from < off+length {
			n.tail = span{}
		}
	})
	return first
}

func (o *opens) pageReadEnds(node uint64) {
	o.with(node, false, func(n *openNode) { n.reading-- })
}

// Bounds of awaitPageReads: a stream of READs has no end.
const (
	pageReadPoll = 200 * time.Microsecond
	pageReadWait = 100 * time.Millisecond
)

// awaitPageReads waits for unanswered READs of pages, for pageReadWait at most.
func (o *opens) awaitPageReads(node uint64) {
	for end := time.Now().Add(pageReadWait); time.Now().Before(end); time.Sleep(pageReadPoll) {
		reading := 0
		o.with(node, false, func(n *openNode) { reading = n.reading })
		if reading == 0 {
			return
		}
	}
}

// grow notes, before SetAttr runs, a truncation to a larger size; size is the old size. Bytes
// stored in a mapping beyond the old end must now read as zeros, but the kernel writes back the
// page during the truncation, after the answer to SETATTR and with the new size. So clearTail
// clears the first page written back there beyond the old end. If the page was not dirty, the
// kernel has dropped the page, and a READ comes before any store: pageRead then cancels the
// clearing, whatever handle the READ goes through. The kernel sends no WRITE of a mapping
// between SETATTR and the answer. If SetAttr fails, the caller must call notGrown.
func (o *opens) grow(node uint64, size int64) {
	o.with(node, false, func(n *openNode) {
		if n.mayBeDirty() {
			n.tail = span{size, pageEnd(size)}
		}
	})
}

// notGrown cancels grow: the truncation failed.
func (o *opens) notGrown(node uint64) {
	o.with(node, false, func(n *openNode) { n.tail = span{} })
}

const pageSize = 4096

// pageEnd is the end of the page that holds the last byte of a file of this size.
func pageEnd(size int64) int64 { return (size + pageSize - 1) &^ (pageSize - 1) }

// clearTail clears the bytes beyond an old end in a page written back at off.
func (o *opens) clearTail(node uint64, p []byte, off int64) {
	o.with(node, false, func(n *openNode) {
		from, to := max(n.tail.from, off), min(n.tail.to, off+int64(len(p)))
		if from < to {
			clear(p[from-off : to-off])
			n.tail = span{}
		}
	})
}
