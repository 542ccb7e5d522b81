package fuse

import (
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	penstock "penstock.io/penstock"
)

// handleMode is the low byte of a file handle: how it was opened.
type handleMode uint8

const (
	modeWrite       handleMode = 1 << iota // may write: bypasses the page cache
	modeCached                             // reads through the page cache
	modePassthrough                        // the kernel reads a backing file itself
	modeNoFlush                            // the kernel sends no FLUSH for it
	modeVirtual                            // a file of .penstock
)

const handleShift = 8

// accessMode says whether open(2) flags allow writing.
func writable(flags uint32) bool { return flags&syscall.O_ACCMODE != syscall.O_RDONLY }

// openNode is what is known of a node while it is open through this mount.
// After a take-over it starts empty again: everything here only saves work or
// makes a rare case sharper, apart from backing, which the successor learns.
type openNode struct {
	readers int // handles with modeCached
	writers int
	through int   // handles with modePassthrough
	backing int32 // the kernel's id of the backing file while through > 0
	// mapped: pages came into the cache through a handle that bypasses it, so
	// a shared mapping exists.
	mapped bool
	// filled: a page was filled since the node is open for writing, so that it may be
	// dirty; told is what the kernel was told meanwhile. See mapped.go.
	filled bool
	told   answered
	// around are the changes under way that go around the page cache.
	around []around
	// reading counts the READs of pages that are being answered.
	reading int
	// tail are the bytes of a page between an old end of the file and the page's
	// end, after a truncation to a larger size; see grow.
	tail span
	// lockers are the owners of POSIX locks, each with the handles that it
	// locked through.
	lockers map[uint64][]uint64
	// failures are, of handles that were opened after something failed, how many
	// failures they need not hear of.
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

// with runs fn on the node's entry under its lock; make says to make one. fn
// must not call the library or wait. It is not run when there is no entry.
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

// pagesMayExist reports whether the kernel may hold pages of the node which
// reads in flight can have filled with bytes older than a write that bypassed
// the cache.
func (o *opens) pagesMayExist(node uint64) (yes bool) {
	o.with(node, false, func(n *openNode) { yes = n.readers > 0 || n.mapped })
	return yes
}

// pageRead notes that pages are being read through fh. It is called before the
// bytes are read, so that a write that comes later sees it; pageReadEnds after
// them. It reports whether the node may have dirty pages from now on.
func (o *opens) pageRead(node, fh uint64, off, length int64) (first bool) {
	o.with(node, true, func(n *openNode) {
		n.reading++
		first = n.fills()
		if modeOf(fh)&modeWrite == 0 {
			return
		}
		n.mapped = true
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

// awaitPageReads waits for READs of pages that are being answered.
func (o *opens) awaitPageReads(node uint64) {
	for end := time.Now().Add(pageReadWait); time.Now().Before(end); time.Sleep(pageReadPoll) {
		reading := 0
		o.with(node, false, func(n *openNode) { reading = n.reading })
		if reading == 0 {
			return
		}
	}
}

// grow notes a truncation to a larger size. What a program stored in a mapping
// beyond the old end must read as zeros now, but the kernel writes that page
// back in the very truncation, after our answer and with the new size. So the
// first page that is written back there is cleared beyond the old end. If the
// page was not dirty, the kernel has dropped it, and a READ comes before any
// store can: then there is nothing to clear.
func (o *opens) grow(node uint64, size int64) {
	o.with(node, false, func(n *openNode) {
		if n.mapped {
			n.tail = span{size, (size + pageSize - 1) &^ (pageSize - 1)}
		}
	})
}

const pageSize = 4096

// clearTail clears what a page written back holds beyond an old end.
func (o *opens) clearTail(node uint64, p []byte, off int64) {
	o.with(node, false, func(n *openNode) {
		from, to := max(n.tail.from, off), min(n.tail.to, off+int64(len(p)))
		if from < to {
			clear(p[from-off : to-off])
			n.tail = span{}
		}
	})
}
