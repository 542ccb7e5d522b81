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

// fileBuffers takes written bytes into the client's buffers: a lease, a promise of the quota,
// blobs in the file's map, and a kick for the write-back.
type fileBuffers struct{ v *Volume }

// putLocked buffers p at off and returns by how many bytes the buffers grew.
func (fb *fileBuffers) putLocked(f *file, p []byte, off uint64) (grew int) {
	// The first change turns a stored inline file into ordinary buffered bytes: the commit
	// replaces the whole file.
	if s, ok := f.m.at(off); ok && s.b != nil && !s.b.frozen && s.b.cw == nil {
		// Overwrite in place as far as the bytes are buffered and no flush uses them.
		if off+uint64(len(p)) <= s.end() {
			copy(s.b.data[s.pos+(off-s.off):], p)
			return 0
		}
	}
	total := 0
	for len(p) > 0 {
		n, g := fb.putPart(f, p, off)
		p, off, total = p[n:], off+uint64(n), total+g
	}
	return total
}

// putPart buffers a prefix of p: at the end of the previous blob if it has room, else in a new
// blob.
func (fb *fileBuffers) putPart(f *file, p []byte, off uint64) (n, grew int) {
	v := fb.v
	prev, ok := f.m.before(off)
	var run uint64 // how far the bytes just before are a stream
	if ok && prev.b != nil && !prev.b.clean {
		b := prev.b
		run = uint64(len(b.data))
		if !b.frozen && b.refs == 1 && prev.pos+prev.n == uint64(len(b.data)) && len(b.data) < blockSize {
			n = v.c.kept.upToNoted(f, off, len(p))
			if room := cap(b.data) - len(b.data); room < n && cap(b.data) < blockSize {
				fb.grow(b, len(b.data)+n)
			}
			if n = min(n, cap(b.data)-len(b.data), blockSize-len(b.data)); n > 0 {
				f.m.replace(off, off+uint64(n), nil, fb.freeBlobOf(f))
				b.data = append(b.data, p[:n]...)
				prev, _ = f.m.before(off) // replace may have moved the blob
				prev.n += uint64(n)
				f.uncommitted += int64(n)
				f.unpushed += int64(n)
				v.c.cfg.Keep.SetN(b.slot, 3, uint64(len(b.data)))
				return n, n
			}
		}
	}
	n = min(len(p), blockSize)
	b := &blob{}
	switch {
	case run >= blockSize/2:
		b.data, b.pooled = v.c.buf.buffer(blockSize), true
	case n >= smallBuffer/2 || v.c.cfg.Keep != nil:
		b.data, b.pooled = v.c.buf.buffer(n), true
	default:
		b.data = make([]byte, 0, n)
	}
	b.data = append(b.data, p[:n]...)
	v.c.kept.blob(f, b, off) // before the replaced bytes are forgotten
	f.m.replace(off, off+uint64(n), []segment{{off: off, n: uint64(n), b: b}}, fb.freeBlobOf(f))
	f.uncommitted += int64(n)
	f.unpushed += int64(n)
	return n, n
}

// grow gives a blob at least want bytes of room, up to a block.
func (fb *fileBuffers) grow(b *blob, want int) {
	v := fb.v
	want = max(want, 2*cap(b.data))
	old, was := b.data, b.pooled
	if b.pooled = want >= smallBuffer/2 || v.c.cfg.Keep != nil; b.pooled {
		b.data = append(v.c.buf.buffer(want), old...)
	} else {
		b.data = append(make([]byte, 0, want), old...)
	}
	v.c.kept.moved(b)
	if was {
		v.c.buf.recycle(old)
	}
}

// freeBlobOf returns the function that replace calls when a blob has lost its last segment.
func (fb *fileBuffers) freeBlobOf(f *file) func(*blob) {
	return func(b *blob) {
		if b.clean {
			return
		}
		fb.v.c.kept.forget(f, b)
		f.uncommitted -= int64(len(b.data))
		if b.cw == nil {
			f.unpushed -= int64(len(b.data))
		}
		fb.settle(b)
	}
}

// settle returns the memory of a blob that is no longer needed.
func (fb *fileBuffers) settle(b *blob) {
	v := fb.v
	if b.refs > 0 || b.busy > 0 || b.data == nil || b.clean {
		return
	}
	n := int64(len(b.data))
	v.c.buf.give(n)
	v.back.dirtyBytes.Add(-n)
	if b.pooled {
		v.c.buf.recycle(b.data)
	}
	b.data = nil
	if b.cw != nil {
		v.chunks.dropBlob(b.cw)
		b.cw = nil
	}
}
