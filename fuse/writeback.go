package fuse

import (
	"sync"
	"sync/atomic"

	penstock "penstock.io/penstock"
	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/keep"
)

// writeback takes over the pages that the kernel writes back from shared mappings.
//
// The kernel marks the page of such a WRITE as under writeback, and a recall's invalidation
// waits until the mark is cleared. If the WRITE then waited for a lease, which the owner
// grants only after the answer to the same recall, WRITE and recall would wait for each other
// for ever. (Answering the WRITE first and invalidating inside its handler hung at the first
// try.) So writeback copies the bytes, the kernel gets its answer at once, and a goroutine for
// each node writes the bytes in order. Operations that must follow the bytes wait for the node
// (drain): msync and fsync, close, write(2), truncate, fallocate, copy_file_range. A READ may
// hold a page lock, so a READ doesn't wait but overlays the queued bytes on its result.
//
// A page that can't be written is lost. A volume reports the loss itself (pageLoser); for any
// other volume the node's next drain returns the error.
type writeback struct {
	log func(node uint64, err error)

	queued atomic.Int64 // pages in all queues; zero: nobody needs the lock

	mu    sync.Mutex
	done  *sync.Cond // a page was written, or an invalidation began
	nodes map[uint64]*pageQueue
	bytes int
	// invalidating counts the running invalidations by node. The WRITEs of such a node must
	// not wait for room.
	invalidating map[uint64]int
}

// pageLoser is a Volume that reports lost pages to programs with the file open.
// *penstock.Volume implements pageLoser.
type pageLoser interface {
	PageLost(ino meta.Ino, bytes int, err error)
}

var _ pageLoser = (*penstock.Volume)(nil)

// maxQueued bounds the bytes in the queues. A WRITE waits while the queues hold more.
const maxQueued = 64 << 20

type pageQueue struct {
	pages   []pageWrite // the goroutine of run writes pages[0]
	added   uint64      // pages ever added
	written uint64
	err     error
}

type pageWrite struct {
	v    Volume
	call *penstock.Call
	ino  meta.Ino
	data []byte
	off  int64
	// epoch is the volume's when the kernel wrote the page back.
	epoch uint64

	// slot and kept are the record of an unwritten page in keep, for a successor.
	keep *keep.Memory
	slot keep.Slot
	kept []byte
}

func newWriteback(log func(node uint64, err error)) *writeback {
	w := &writeback{log: log, nodes: make(map[uint64]*pageQueue), invalidating: make(map[uint64]int)}
	w.done = sync.NewCond(&w.mu)
	return w
}

// add queues p. The caller must not use p.data afterwards.
func (w *writeback) add(node uint64, p pageWrite) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for w.bytes > maxQueued && w.invalidating[node] == 0 {
		w.done.Wait()
	}
	q := w.nodes[node]
	if q == nil {
		q = new(pageQueue)
		w.nodes[node] = q
	}
	q.pages = append(q.pages, p)
	q.added++
	w.bytes += len(p.data)
	w.queued.Add(1)
	if len(q.pages) == 1 {
		go w.run(node, q) // ends with an empty queue; drainAll waits
	}
}

// run writes one node's pages until the queue is empty.
func (w *writeback) run(node uint64, q *pageQueue) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for len(q.pages) > 0 {
		p := q.pages[0]
		w.mu.Unlock()
		err := p.v.WritePage(request(nil), p.call, p.ino, p.data, p.off, p.epoch)
		if err != nil {
			w.log(node, err)
			if l, ok := p.v.(pageLoser); ok { // only programs with the file open get the error
				l.PageLost(p.ino, len(p.data), err)
				err = nil
			}
		}
		if p.keep != nil {
			p.keep.Erase(p.slot)
			p.keep.Recycle(p.kept)
		}
		w.mu.Lock()
		q.pages[0] = pageWrite{}
		q.pages = q.pages[1:]
		q.written++
		if err != nil && q.err == nil {
			q.err = err
		}
		w.bytes -= len(p.data)
		w.queued.Add(-1)
		w.done.Broadcast()
	}
	if q.err == nil {
		delete(w.nodes, node)
	}
}

// has reports whether pages of the node are queued.
func (w *writeback) has(node uint64) bool {
	if w.queued.Load() == 0 {
		return false
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	q := w.nodes[node]
	return q != nil && len(q.pages) > 0
}

// fail has the node's next drain tell an error.
func (w *writeback) fail(node uint64, err error) {
	w.log(node, err)
	w.mu.Lock()
	defer w.mu.Unlock()
	q := w.nodes[node]
	if q == nil {
		q = new(pageQueue)
		w.nodes[node] = q
	}
	if q.err == nil {
		q.err = err
	}
}

// settle waits until all pages now queued of the node are written, and leaves an error to the
// next drain.
func (w *writeback) settle(node uint64) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.settleLocked(w.nodes[node])
}

func (w *writeback) settleLocked(q *pageQueue) {
	if q == nil {
		return
	}
	for until := q.added; q.written < until; {
		w.done.Wait()
	}
}

// drain waits until all pages now queued of the node are written, and returns an error once.
func (w *writeback) drain(node uint64) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	q := w.nodes[node]
	if q == nil {
		return nil
	}
	w.settleLocked(q)
	err := q.err
	q.err = nil
	if len(q.pages) == 0 && w.nodes[node] == q {
		delete(w.nodes, node)
	}
	return err
}

// drainAll drains every node and tells the first error.
func (w *writeback) drainAll() error {
	w.mu.Lock()
	nodes := make([]uint64, 0, len(w.nodes))
	for node := range w.nodes {
		nodes = append(nodes, node)
	}
	w.mu.Unlock()
	var err error
	for _, node := range nodes {
		if e := w.drain(node); e != nil && err == nil {
			err = e
		}
	}
	return err
}

// pending returns the queued pages of a node, to be overlaid on a read that begins now. The
// caller takes the list before reading, so the list includes pages written and dequeued during
// the read.
func (w *writeback) pending(node uint64) []pageWrite {
	if w.queued.Load() == 0 {
		return nil
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	q := w.nodes[node]
	if q == nil {
		return nil
	}
	return append([]pageWrite(nil), q.pages...)
}

// overlay lays pages over bytes read from off.
func overlay(pages []pageWrite, p []byte, off int64) {
	for _, w := range pages {
		from, to := max(w.off, off), min(w.off+int64(len(w.data)), off+int64(len(p)))
		if from < to {
			copy(p[from-off:to-off], w.data[from-w.off:])
		}
	}
}

// invalidate runs fn, which waits for the node's writeback in the kernel.
func (w *writeback) invalidate(node uint64, fn func()) {
	w.mu.Lock()
	w.invalidating[node]++
	w.done.Broadcast()
	w.mu.Unlock()
	fn()
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.invalidating[node]--; w.invalidating[node] == 0 {
		delete(w.invalidating, node)
	}
}
