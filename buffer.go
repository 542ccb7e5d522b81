package penstock

import (
	"context"
	"sync"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/keep"
)

// blockSize is the size of the largest blob and of the pooled buffers of streams, in bytes.
const blockSize = 1 << 20

// blob holds written bytes until they are durable and committed (the bytes of a small inline
// file for ever). The inode's mu guards all fields; data up to its length is immutable once
// the blob is frozen.
type blob struct {
	data   []byte
	refs   int32     // segments of the map that refer to the blob
	busy   int32     // pushes and commits that use the blob now
	frozen bool      // being appended or appended: never changed in place
	clean  bool      // committed as the inode's inline data: costs no budget
	pooled bool      // data is a buffer of the budget's
	synced bool      // durable at cw, off
	cw     *chunk    // the chunk to which the blob was appended; nil: none yet
	off    uint64    // in cw
	slot   keep.Slot // the blob's place for a successor process
}

// budget bounds the bytes of all blobs of the client and recycles their blocks: the first use
// of a fresh page costs four times as much as the reuse of a page.
type budget struct {
	mu   sync.Mutex
	max  int64
	keep *keep.Memory // memory for buffers, for a successor process; nil: the heap
	used int64
	wake chan struct{} // closed when used fell; nil: nobody waits
	last error         // error of the last flush, until a flush succeeds

	free      [bufferSizes][][]byte
	freeBytes int64
}

// take waits until n bytes fit into the budget. A request larger than the whole budget
// succeeds when no other bytes are held. take fails with the error that keeps the flusher from
// freeing bytes.
func (g *budget) take(ctx context.Context, n int64, kick func()) error {
	g.mu.Lock()
	for g.used > 0 && g.used+n > g.max {
		if err := g.last; err != nil {
			g.mu.Unlock()
			return err
		}
		if g.wake == nil {
			g.wake = make(chan struct{})
		}
		ch := g.wake
		g.mu.Unlock()
		kick()
		select {
		case <-ch:
		case <-ctx.Done():
			return meta.E("write", meta.Interrupted, "waiting for buffer space", context.Cause(ctx))
		}
		g.mu.Lock()
	}
	g.used += n
	g.mu.Unlock()
	return nil
}

// force takes n bytes without waiting.
func (g *budget) force(n int64) {
	g.mu.Lock()
	g.used += n
	g.mu.Unlock()
}

func (g *budget) give(n int64) {
	if n == 0 {
		return
	}
	g.mu.Lock()
	g.used -= n
	if g.used < 0 {
		g.mu.Unlock()
		panic("penstock: more write buffer given back than taken")
	}
	g.wakeLocked()
	g.mu.Unlock()
}

func (g *budget) wakeLocked() {
	if g.wake != nil {
		close(g.wake)
		g.wake = nil
	}
}

// outcome tells waiters how the last flush went.
func (g *budget) outcome(err error) {
	g.mu.Lock()
	if g.last = err; err != nil {
		g.wakeLocked()
	}
	g.mu.Unlock()
}

func (g *budget) inUse() int64 {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.used
}

// full reports that more than half of the budget is used.
func (g *budget) full() bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.used > g.max/2
}

// Buffers have sizes of powers of two from smallBuffer to blockSize. Each size has a free
// list; all lists together are bounded.
const (
	smallBuffer = 4 << 10
	bufferSizes = 9 // 4 KiB to 1 MiB
)

// sizeOf gives the list for buffers of at least n bytes.
func sizeOf(n int) int {
	i := 0
	for size := smallBuffer; size < n && i < bufferSizes-1; size *= 2 {
		i++
	}
	return i
}

// buffer gives an empty buffer with room for at least n bytes, at most a block.
func (g *budget) buffer(n int) []byte {
	if g.keep != nil {
		if b := g.keep.Buffer(n); b != nil {
			return b
		}
	}
	i := sizeOf(n)
	g.mu.Lock()
	if k := len(g.free[i]); k > 0 {
		b := g.free[i][k-1]
		g.free[i] = g.free[i][:k-1]
		g.freeBytes -= int64(cap(b))
		g.mu.Unlock()
		return b[:0]
	}
	g.mu.Unlock()
	return make([]byte, 0, smallBuffer<<i)
}

// recycle takes back a slice from buffer.
func (g *budget) recycle(b []byte) {
	if g.keep.Recycle(b) {
		return
	}
	g.mu.Lock()
	if n := int64(cap(b)); g.freeBytes+n <= max(g.max/4, 16*blockSize) {
		i := sizeOf(cap(b))
		g.free[i] = append(g.free[i], b)
		g.freeBytes += n
	}
	g.mu.Unlock()
}
