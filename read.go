package penstock

import (
	"context"
	"errors"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"penstock.io/penstock/meta"
)

// fileReads reads from chunks.
type fileReads struct {
	v     *Volume
	ahead aheadState
}

// piece is the part of a read that lies in one chunk.
type piece struct {
	ref *chunkRef
	p   []byte
	off uint64
}

// inChunks tells whether bytes of [lo, hi) are in chunks only.
func (m *extmap) inChunks(lo, hi uint64) (yes bool) {
	m.each(lo, hi, func(s *segment) bool {
		yes = s.b == nil && s.ref != nil
		return !yes
	})
	return yes
}

// planRead fills p[:n] with buffered bytes and zeros, and returns the remaining parts as
// pieces. The caller holds the mu that guards m.
func planRead(m *extmap, size uint64, p []byte, off uint64, pieces []piece) (int, []piece) {
	if off >= size {
		return 0, pieces
	}
	n := uint64(len(p))
	n = min(n, size-off)
	p = p[:n]
	at := off
	m.each(off, off+n, func(s *segment) bool {
		c := s.cut(off, off+n)
		if c.off > at {
			clear(p[at-off : c.off-off])
		}
		at = c.end()
		dst := p[c.off-off : at-off]
		switch {
		case c.b != nil:
			copy(dst, c.b.data[c.pos:c.pos+c.n])
		case c.ref != nil:
			pieces = append(pieces, piece{c.ref, dst, c.pos})
		default:
			clear(dst)
		}
		return true
	})
	if at < off+n {
		clear(p[at-off:])
	}
	return int(n), pieces
}

// Read fills p from offset off, up to the end of the file; n < len(p) only
// there. Errors: Corrupt, IO.
func (v *Volume) Read(ctx context.Context, ino meta.Ino, p []byte, off int64) (n int, err error) {
	if off < 0 {
		return 0, meta.E("read", meta.Invalid, v.subject(ino), nil)
	}
	in := v.node(ino)
	defer in.put()
	rng := &byteRange{off, int64(len(p))}
	var failed time.Time // the first time
	for try := 0; ; try++ {
		f, sn, err := in.withMapFor(ctx, meta.LeaseShared, rng)
		if err != nil {
			return 0, err
		}
		var few [4]piece
		var pieces []piece
		if sn != nil {
			n, pieces = planRead(&sn.m, sn.size, p, uint64(off), few[:0])
			in.loose = in.loose || sn.followed // a private mapping's pages stay, also of direct openers
		} else {
			n, pieces = planRead(&f.m, f.size, p, uint64(off), few[:0])
		}
		in.beginRead(f, off, len(p))
		in.mu.Unlock()
		err = v.reads.pieces(ctx, pieces)
		in.endRead()
		if err == nil {
			v.c.stats.read.Add(uint64(n))
			if off == 0 && ctx.Value(NoAtime{}) == nil {
				v.atimes.touch(in)
			}
			if notify := v.c.cfg.Notify; notify != nil && sn != nil && sn.followed {
				// The READ may be of a mapping's page. No recall would drop the page, so it
				// goes as soon as the READ is answered.
				v.c.spawn(func() { notify.InvalData(v.id, ino, off, int64(len(p))) })
			}
			return n, nil
		}
		if failed.IsZero() {
			failed = time.Now()
		}
		// A refused capability that was just renewed has expired on the way, or the server has
		// just started and does not know the signing key yet.
		refused := errors.Is(err, meta.BadCapability)
		if try > 0 && time.Since(failed) < maxAwait && (refused || errors.Is(err, meta.Unavailable) && v.reads.awaited(pieces)) {
			select {
			case <-time.After(awaitEvery):
				try = 0
			case <-ctx.Done():
			}
		}
		if ctx.Err() != nil && (refused || errors.Is(err, meta.Unavailable)) {
			// Not EIO: a signal with a handler also ends up here, and after EINTR the program
			// tries again.
			return 0, meta.E("read", meta.Interrupted, v.subject(ino), errors.Join(context.Cause(ctx), err))
		}
		// Compaction may have moved the bytes, or repair the replicas.
		if try >= 2 || ctx.Err() != nil || errors.Is(err, meta.Corrupt) && try > 0 {
			if errors.Is(err, meta.NoSuchOffset) {
				// The chunk was sealed shorter than the file's extent: the rest was lost.
				err = meta.E("read", meta.IO, v.subject(ino), err)
			}
			return 0, err
		}
		if err := v.reads.reload(ctx, in); err != nil {
			return 0, err
		}
	}
}

// A read that finds none of a chunk's servers tries again every awaitEvery, for at most
// maxAwait, while one of the servers may be restarting or refuses the capability.
const (
	awaitEvery = 200 * time.Millisecond
	maxAwait   = 15 * time.Second
)

// awaited reports whether the unread pieces may become readable in a moment.
func (rd *fileReads) awaited(pieces []piece) bool {
	for _, pc := range pieces {
		if rd.v.c.chunks.Awaited(pc.ref.place.Load().Servers) {
			return true
		}
	}
	return false
}

// parallelPiece is the size in bytes from which the pieces of one read are fetched in
// parallel.
const parallelPiece = 128 << 10

func (rd *fileReads) pieces(ctx context.Context, pieces []piece) error {
	io := rd.v.c.chunks
	if len(pieces) > 1 && len(pieces[0].p) >= parallelPiece {
		errs := make([]error, len(pieces))
		var wg sync.WaitGroup
		for i, pc := range pieces {
			wg.Go(func() { errs[i] = io.ReadAt(ctx, *pc.ref.place.Load(), pc.p, pc.off) })
		}
		wg.Wait()
		return errors.Join(errs...)
	}
	for _, pc := range pieces {
		if err := io.ReadAt(ctx, *pc.ref.place.Load(), pc.p, pc.off); err != nil {
			return err
		}
	}
	return nil
}

// ReadFD returns a descriptor with the bytes [off, off+n) of the file at fdOff, for splicing,
// if all the bytes lie in one local chunk and none is buffered here; else ok is false and the
// caller uses Read. At the end of the file, got may be smaller than n. The caller calls
// release after reading.
func (v *Volume) ReadFD(ctx context.Context, ino meta.Ino, off int64, n int) (fd *os.File, fdOff int64, got int, release func(), ok bool) {
	if off < 0 || n <= 0 {
		return nil, 0, 0, nil, false
	}
	in := v.node(ino)
	f, sn, err := in.withMapFor(ctx, meta.LeaseShared, &byteRange{off, int64(n)})
	if err != nil {
		in.put()
		return nil, 0, 0, nil, false
	}
	var c segment
	if lo := uint64(off); sn == nil && lo < f.size {
		hi := min(lo+uint64(n), f.size)
		f.m.each(lo, hi, func(s *segment) bool {
			if s.ref != nil && s.off <= lo && s.end() >= hi {
				c = s.cut(lo, hi)
			}
			return false
		})
	}
	if c.ref == nil {
		in.mu.Unlock()
		in.put()
		return nil, 0, 0, nil, false
	}
	in.beginRead(f, off, n)
	in.mu.Unlock()
	fd, done, err := v.c.chunks.File(ctx, *c.ref.place.Load(), c.pos, c.n)
	if err != nil {
		in.endRead()
		in.put()
		return nil, 0, 0, nil, false
	}
	if off == 0 {
		v.atimes.touch(in)
	}
	v.c.stats.read.Add(c.n)
	return fd, int64(c.pos), int(c.n), func() { done(); in.endRead(); in.put() }, true
}

// readAhead detects that files are opened in the order of their places in a packed chunk, and
// makes the chunk client fetch the following bytes. s is the first segment of the opened file.
func (rd *fileReads) readAhead(s segment) {
	if s.ref == nil || s.off != 0 || s.n >= blockSize {
		return
	}
	const window, gap = 4 << 20, 64 << 10
	a := &rd.ahead
	from, ok := func() (uint64, bool) {
		a.mu.Lock()
		defer a.mu.Unlock()
		return a.next(s, window, gap)
	}()
	if ok {
		rd.v.c.chunks.Prefetch(*s.ref.place.Load(), from, window)
	}
}

// next records the opening of a file with first segment s, and returns the range to fetch.
func (a *aheadState) next(s segment, window, gap uint64) (from uint64, ok bool) {
	if a.ref != s.ref || s.pos < a.end || s.pos > a.end+gap {
		a.ref, a.end, a.hits, a.upTo = s.ref, s.pos+s.n, 0, 0
		return 0, false
	}
	a.end = s.pos + s.n
	if a.hits++; a.hits < 3 || a.upTo > a.end+window/2 {
		return 0, false
	}
	from = max(a.upTo, a.end)
	a.upTo = from + window
	return from, true
}

// aheadState is where cross-file read-ahead stands.
type aheadState struct {
	mu   sync.Mutex
	ref  *chunkRef
	end  uint64 // of the file opened last
	upTo uint64 // asked for so far
	hits int
}

// NoAtime is a context key. If a context has a value for it, of any type, Read leaves the
// access time unchanged (O_NOATIME).
type NoAtime struct{}

// atimes says which access times reads leave unchanged, besides those of the volumes'
// policies: all, or those of directories.
type atimes struct{ none, noDirs atomic.Bool }

// LeaveAtimes makes reads leave all access times unchanged, or those of directories, whatever
// the policies of volumes say. The setting may be changed at any time.
func (c *Client) LeaveAtimes(all, dirs bool) {
	c.atimes.none.Store(all)
	c.atimes.noDirs.Store(dirs)
}

// Seek finds the next data (SeekData) or hole (SeekHole) at or after off.
// Errors: NoSuchOffset.
func (v *Volume) Seek(ctx context.Context, ino meta.Ino, off int64, whence uint32) (int64, error) {
	if off < 0 {
		return 0, meta.E("seek", meta.NoSuchOffset, v.subject(ino), nil)
	}
	in := v.node(ino)
	defer in.put()
	f, sn, err := in.withMap(ctx, meta.LeaseShared)
	if err != nil {
		return 0, err
	}
	defer in.mu.Unlock()
	m, size := &f.m, f.size
	if sn != nil {
		m, size = &sn.m, sn.size
	}
	at := uint64(off)
	if at >= size {
		return 0, meta.E("seek", meta.NoSuchOffset, v.subject(ino), nil)
	}
	hole := whence == SeekHole
	found := false
	m.each(at, size, func(s *segment) bool {
		data := s.b != nil || s.ref != nil // preallocated zeros count as a hole
		switch {
		case hole && (s.off > at || !data):
			found = true
		case hole:
			at = s.end()
		case data:
			at, found = max(at, s.off), true
		}
		return !found
	})
	if found || hole {
		return int64(min(at, size)), nil
	}
	return 0, meta.E("seek", meta.NoSuchOffset, v.subject(ino), nil)
}
