package client

import (
	"container/list"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"penstock.io/penstock/chunkserver"
	"penstock.io/penstock/chunkserver/wire"
	"penstock.io/penstock/meta"
)

// file is a chunk's data file, whose descriptor a server on this machine passed, and the
// checksums of the file's blocks. The client verifies a block at the first read, unless the
// server reports the block as verified. Later reads of the block need no request. The server
// verifies in the background, and the client asks again from time to time.
type file struct {
	c      *Client
	server meta.ServerID
	id     meta.ChunkID
	fd     int
	os     *os.File
	refs   atomic.Int32
	where  *list.Element // guarded by Client.mu
	looked atomic.Int64  // unix nanoseconds of the last look at ctime
	asked  atomic.Int64  // unix nanoseconds of the last answer of the server

	asking sync.Mutex // one request to the server at a time; taken before mu

	mu     sync.RWMutex
	sealed bool
	length uint64
	ctime  int64 // when sealed: of the file when blocks were verified
	// crcs are the checksums of blocks. A set bit in known marks a valid checksum.
	crcs  []uint32
	known bits
	// INVARIANT: good is a subset of known.
	good bits
}

// bits is a growing set of block numbers.
type bits []uint64

func (b bits) has(i uint64) bool { return i/64 < uint64(len(b)) && b[i/64]>>(i%64)&1 != 0 }

func (b *bits) set(i uint64, v bool) {
	for i/64 >= uint64(len(*b)) {
		*b = append(*b, 0)
	}
	if v {
		(*b)[i/64] |= 1 << (i % 64)
	} else {
		(*b)[i/64] &^= 1 << (i % 64)
	}
}

func (f *file) isSealed() bool {
	f.mu.RLock()
	defer f.mu.RUnlock()
	return f.sealed
}

func (f *file) unref() {
	if f.refs.Add(-1) == 0 {
		f.os.Close()
	}
}

// cached returns the chunk's file if the client has it; the caller calls unref. For a sealed
// chunk, a file from the time when the chunk was open is not used: only of a sealed chunk's
// file can the client detect writes by others.
func (c *Client) cached(id meta.ChunkID, sealed bool) *file {
	c.mu.Lock()
	defer c.mu.Unlock()
	f := c.files[id]
	if f == nil {
		return nil
	}
	if sealed && !f.isSealed() {
		c.forgetLocked(f)
		return nil
	}
	c.lru.MoveToBack(f.where)
	f.refs.Add(1)
	return f
}

// file returns the chunk's file, and asks the server for it, with flags, if necessary.
func (c *Client) file(ctx context.Context, server meta.ServerID, pl *meta.ChunkPlace, flags uint16) (*file, error) {
	if f := c.cached(pl.ID, pl.Sealed); f != nil {
		if f.server == server {
			return f, nil
		}
		f.unref()
	}
	if c.hasNoFile(server, pl.ID) {
		return nil, meta.E("open chunk", meta.NotSupported, pl.ID.String(), errors.New("its server gives no file of it"))
	}
	f := &file{c: c, server: server, id: pl.ID}
	if err := f.ask(ctx, 0, wire.FlagDescriptor|flags); err != nil {
		return nil, err
	}
	f.refs.Store(2) // the cache's and the caller's
	var drop *file
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		f.refs.Store(1)
		f.unref()
		return nil, meta.E("open chunk", meta.Canceled, pl.ID.String(), nil)
	}
	if old := c.files[pl.ID]; old != nil {
		drop = old
	} else if len(c.files) >= c.cfg.Files {
		drop = c.lru.Front().Value.(*file)
	}
	if drop != nil {
		c.forgetLocked(drop)
	}
	c.files[pl.ID] = f
	f.where = c.lru.PushBack(f)
	return f, nil
}

const (
	// maxNoFile bounds the chunks known to have no readable file, because they are packed or
	// compressed. They are read through the server, without asking for the file each time.
	maxNoFile = 1 << 14
	// noFileFor is how long a chunk is assumed to have no file: another replica may replace
	// it.
	noFileFor = time.Minute
)

func (c *Client) hasNoFile(server meta.ServerID, id meta.ChunkID) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	until, no := c.noFile[badReplica{id, server}]
	if no && !time.Now().Before(until) {
		delete(c.noFile, badReplica{id, server})
		return false
	}
	return no
}

func (c *Client) noteNoFile(server meta.ServerID, id meta.ChunkID) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.noFile == nil || len(c.noFile) >= maxNoFile {
		c.noFile = map[badReplica]time.Time{}
	}
	c.noFile[badReplica{id, server}] = time.Now().Add(noFileFor)
}

func (c *Client) forgetLocked(f *file) {
	if c.files[f.id] != f {
		return
	}
	delete(c.files, f.id)
	c.lru.Remove(f.where)
	f.unref()
}

func (c *Client) forget(f *file) {
	c.mu.Lock()
	c.forgetLocked(f)
	c.mu.Unlock()
}

// ask asks the server about blocks from first on. With FlagDescriptor it also gets the
// descriptor (no other goroutine may use f yet); with FlagVerify the server answers after it
// has verified all blocks.
func (f *file) ask(ctx context.Context, first uint64, flags uint16) error {
	q := wire.Request{Cap: f.c.readCap(f.id), Chunk: f.id, Off: first, N: wire.MaxLocal}
	k := &call{t: wire.Local}
	open := flags&wire.FlagDescriptor != 0
	if err := f.c.ask(ctx, f.server, &q, k, flags); err != nil {
		// Over another kind of connection no chunk has a file: such an answer says nothing
		// about this chunk.
		if l := k.at.Load(); open && meta.KindOf(err) == meta.NotSupported && l != nil && l.Local() {
			f.c.noteNoFile(f.server, f.id)
		}
		if k.fd > 0 {
			closeFD(k.fd)
		}
		return err
	}
	if open {
		if k.fd < 0 {
			return meta.E("open chunk", meta.Protocol, f.id.String(), errors.New("no descriptor came"))
		}
		f.fd, f.os = k.fd, os.NewFile(uintptr(k.fd), f.id.String())
	}
	n := uint64(len(k.data)) * 8 / 33 // 4 bytes and a bit each, rounded up
	if n > wire.MaxLocal || uint64(len(k.data)) != 4*n+(n+7)/8 {
		return meta.E("open chunk", meta.Protocol, f.id.String(), fmt.Errorf("%d bytes of checksums", len(k.data)))
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	info := &k.answer.Info
	if was := min(f.length, info.Length); f.length != info.Length && was%block != 0 {
		// The block at the old end has grown, and the answer may begin behind the block: the
		// known checksum covers fewer bytes.
		f.known.set(was/block, false)
		f.good.set(was/block, false)
	}
	f.sealed, f.length = info.State == meta.ChunkSealed, info.Length
	f.asked.Store(time.Now().UnixNano())
	if f.sealed && f.ctime != k.answer.Time {
		// Verified blocks are valid as of the server's time; look compares the time with the
		// file's own at once.
		clear(f.good)
		f.ctime = k.answer.Time
		f.looked.Store(0)
	}
	for i := range n {
		b := first + i
		crc := binary.BigEndian.Uint32(k.data[4*i:])
		for b >= uint64(len(f.crcs)) {
			f.crcs = append(f.crcs, 0)
		}
		good := k.data[4*n+i/8]>>(i%8)&1 != 0 || f.good.has(b) && f.crcs[b] == crc
		f.crcs[b] = crc
		f.known.set(b, true)
		f.good.set(b, good)
	}
	return nil
}

// changed returns the file's ctime, -1 if the file is deleted.
func (f *file) changed() int64 {
	var st unix.Stat_t
	if err := unix.Fstat(f.fd, &st); err != nil || st.Nlink == 0 {
		return -1
	}
	return st.Ctim.Nano()
}

// look notices, within lookEvery, a write to a sealed chunk's file; verified blocks then no
// longer count. It returns false if the file is deleted.
func (f *file) look() bool {
	now := time.Now().UnixNano()
	if last := f.looked.Load(); now-last < int64(lookEvery) || !f.looked.CompareAndSwap(last, now) {
		return true
	}
	f.mu.RLock()
	sealed, was := f.sealed, f.ctime
	f.mu.RUnlock()
	if !sealed {
		return true
	}
	switch is := f.changed(); {
	case is == was:
	case is < 0:
		return false
	default:
		f.mu.Lock()
		f.ctime = is
		clear(f.good)
		f.mu.Unlock()
	}
	return true
}

const lookEvery = 20 * time.Millisecond

// covers reports whether [off, end) is within the known length with known checksums, and
// whether all its blocks are verified. The caller holds f.mu.
func (f *file) covers(off, end uint64) (known, good bool) {
	if end > f.length {
		return false, false
	}
	good = true
	for b := off / block; b*block < end; b++ {
		if f.good.has(b) {
			continue
		}
		if !f.known.has(b) {
			return false, false
		}
		good = false
	}
	return true, good
}

// learn makes the checksums of [off, off+n) known, and reports whether all its blocks are
// verified.
func (f *file) learn(ctx context.Context, off, n uint64) (good bool, err error) {
	if good, err = f.learned(ctx, off, n); err != nil {
		return false, err
	}
	// The first look comes after the first answer: good is valid only if the file is still the
	// file verified by the server.
	if !f.look() {
		f.c.forget(f)
		return false, meta.E("read chunk", meta.NoSuchChunk, f.id.String(), nil)
	}
	if good {
		f.mu.RLock()
		_, good = f.covers(off, off+n)
		f.mu.RUnlock()
	}
	return good, nil
}

// askEvery is the interval at which the server is asked again whether it has verified more
// blocks.
const askEvery = time.Second

func (f *file) learned(ctx context.Context, off, n uint64) (good bool, err error) {
	end := off + n
	f.mu.RLock()
	known, good := f.covers(off, end)
	f.mu.RUnlock()
	if good && known {
		return true, nil
	}
	if known {
		if time.Now().UnixNano()-f.asked.Load() < int64(askEvery) || !f.asking.TryLock() {
			return false, nil
		}
		defer f.asking.Unlock()
		f.asked.Store(time.Now().UnixNano())
		if err := f.ask(ctx, off/block, 0); err != nil {
			return false, nil // we verify ourselves, then
		}
		f.mu.RLock()
		defer f.mu.RUnlock()
		known, good = f.covers(off, end)
		return known && good, nil
	}
	f.asking.Lock()
	defer f.asking.Unlock()
	for b := off / block; b*block < end || b == off/block; b += wire.MaxLocal {
		f.mu.RLock()
		known, good = f.covers(off, end)
		f.mu.RUnlock()
		if known {
			return good, nil
		}
		if err := f.ask(ctx, b, 0); err != nil {
			return false, err
		}
	}
	f.mu.RLock()
	defer f.mu.RUnlock()
	if end > f.length {
		return false, meta.E("read chunk", meta.NoSuchOffset, f.id.String(), fmt.Errorf("%d bytes at %d of %d", n, off, f.length))
	}
	if known, good = f.covers(off, end); !known {
		return false, meta.E("read chunk", meta.Protocol, f.id.String(), errors.New("the server leaves checksums out"))
	}
	return good, nil
}

// readAt reads verified bytes.
func (f *file) readAt(ctx context.Context, p []byte, off uint64) error {
	good, err := f.learn(ctx, off, uint64(len(p)))
	if err != nil {
		return err
	}
	if good {
		return f.pread(p, off)
	}
	return f.check(off, uint64(len(p)), p)
}

// ensure verifies the unverified blocks of [off, off+n).
func (f *file) ensure(ctx context.Context, off, n uint64) error {
	good, err := f.learn(ctx, off, n)
	if err != nil || good || n == 0 {
		return err
	}
	return f.check(off, n, nil)
}

// whole makes the server verify all n bytes of a sealed chunk, if it has not.
func (f *file) whole(ctx context.Context, n uint64) error {
	f.asking.Lock()
	defer f.asking.Unlock()
	for first, again := uint64(0), false; ; {
		if !f.look() {
			f.c.forget(f)
			return meta.E("open chunk", meta.NoSuchChunk, f.id.String(), nil)
		}
		f.mu.RLock()
		sealed, length := f.sealed, f.length
		_, good := f.covers(first*block, min(n, (first+wire.MaxLocal)*block))
		f.mu.RUnlock()
		switch {
		case !sealed || n > length:
			return meta.E("open chunk", meta.NoSuchOffset, f.id.String(), fmt.Errorf("%d bytes of %d", n, length))
		case good:
			if first += wire.MaxLocal; first*block >= n {
				return nil
			}
			again = false
		case again:
			return meta.E("open chunk", meta.Corrupt, f.id.String(), errors.New("the data file changes"))
		default:
			if err := f.ask(ctx, first, wire.FlagVerify); err != nil {
				return err
			}
			again = true
		}
	}
}

func (f *file) pread(p []byte, off uint64) error {
	for len(p) > 0 {
		n, err := unix.Pread(f.fd, p, int64(off))
		switch {
		case err == unix.EINTR:
			continue
		case err != nil:
			return meta.E("read chunk", meta.IO, f.id.String(), err)
		case n == 0:
			// Cut by a seal since we asked.
			f.c.forget(f)
			return meta.E("read chunk", meta.NoSuchOffset, f.id.String(), fmt.Errorf("the data file ends at %d", off))
		}
		p, off = p[n:], off+uint64(n)
	}
	return nil
}

var blockPool = sync.Pool{New: func() any { b := make([]byte, block); return &b }}

// check reads [off, off+n), verifies its blocks, and fills p unless p is nil. Blocks entirely
// within p are read directly into p.
func (f *file) check(off, n uint64, p []byte) error {
	scratch := blockPool.Get().(*[]byte)
	defer blockPool.Put(scratch)
	f.mu.RLock()
	length := f.length
	b0, b1 := off/block, (off+n-1)/block
	crcs := append([]uint32(nil), f.crcs[b0:b1+1]...)
	todo := make([]bool, len(crcs))
	for i := range todo {
		todo[i] = !f.good.has(b0 + uint64(i))
	}
	f.mu.RUnlock()
	// Runs of blocks entirely within p are read with one call.
	end := off + n
	if p != nil {
		if err := f.pread(p, off); err != nil {
			return err
		}
	}
	for i, crc := range crcs {
		if !todo[i] {
			continue
		}
		at := (b0 + uint64(i)) * block
		to := min(at+block, length)
		var q []byte
		if p != nil && at >= off && to <= end {
			q = p[at-off : to-off]
		} else {
			q = (*scratch)[:to-at]
			if err := f.pread(q, at); err != nil {
				return err
			}
		}
		f.c.checked.Add(uint64(len(q)))
		if chunkserver.CRC(q) != crc && !f.c.cfg.UnsafeNoVerify {
			return corrupt(f.id, at)
		}
		if p != nil && (at < off || to > end) {
			// The verified bytes themselves are returned.
			lo, hi := max(at, off), min(to, end)
			copy(p[lo-off:hi-off], q[lo-at:])
		}
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	for i, crc := range crcs {
		b := b0 + uint64(i)
		if todo[i] && b < uint64(len(f.crcs)) && f.crcs[b] == crc {
			f.good.set(b, true)
		}
	}
	return nil
}

// dropDeleted closes idle descriptors of deleted chunks.
func (c *Client) dropDeleted() {
	c.mu.Lock()
	all := make([]*file, 0, len(c.files))
	for _, f := range c.files {
		f.refs.Add(1)
		all = append(all, f)
	}
	c.mu.Unlock()
	for _, f := range all {
		if f.changed() < 0 {
			c.forget(f)
		}
		f.unref()
	}
}
