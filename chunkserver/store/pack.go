package store

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"github.com/klauspost/compress/s2"
	"github.com/klauspost/compress/zstd"

	"penstock.io/penstock/meta"
)

// A sealed chunk may be compressed. Then ID.pack replaces the data file ID.data. ID.pack is a
// sequence of frames, one frame for every FrameSize bytes of the chunk, the last frame for the
// remaining bytes. A frame has the compressed bytes or, where compression would not save a
// sixteenth, the plain bytes. The .meta file has the algorithm and the length of each frame.
// The block checksums remain the checksums of the plain bytes, and so also detect mistakes of a
// decoder. Code above the store reads plain bytes at plain offsets and does not notice the
// compression, except that the plain bytes have no descriptor.
//
// Compression runs in the background:
//
//  1. ID.pack is written; each frame is decoded again and compared
//  2. a checkpoint syncs the file and the directory, and then replaces ID.meta by a file that
//     names the frames
//  3. the directory is synced again, and ID.data removed
//
// After a crash both data files may exist. The next listing of the directory, which each owner
// of a volume requests soon, removes the file that ID.meta does not name (tidy).
const (
	// FrameSize is how many bytes are compressed together.
	FrameSize = 128 << 10
	// frameAsIs marks the length of a frame that is not compressed.
	frameAsIs = 1 << 31
	// packFrom is the least length of a chunk that is compressed. For smaller chunks, the block
	// size of file systems leaves nothing to save.
	packFrom = 8 << 10
	// packTry is the number of bytes after which the compression of a chunk that does not
	// shrink ends.
	packTry = 16 * FrameSize
	// packedFrames bounds the cache of decoded frames for small reads.
	packedFrames = 32
	// maxPacks bounds the chunks that wait for compression. Owners repeat requests for further
	// chunks.
	maxPacks = 1 << 16
	// packBatch and packBytes bound the compression between two checkpoints.
	packBatch = 64
	packBytes = 1 << 30
)

// packing is the layout of a chunk's ID.pack.
type packing struct {
	alg  meta.Compression
	lens []uint32 // of the frames, in bytes; frameAsIs beside
	ends []uint64 // where each ends in the file
}

func newPacking(alg meta.Compression, lens []uint32) *packing {
	p := &packing{alg: alg, lens: lens, ends: make([]uint64, len(lens))}
	at := uint64(0)
	for i, n := range lens {
		at += uint64(n &^ frameAsIs)
		p.ends[i] = at
	}
	return p
}

// size is the length of the file.
func (p *packing) size() uint64 {
	if len(p.ends) == 0 {
		return 0
	}
	return p.ends[len(p.ends)-1]
}

// frame returns the position of a frame in the file, and whether it is stored as is.
func (p *packing) frame(i uint64) (off uint64, n int, asIs bool) {
	n = int(p.lens[i] &^ frameAsIs)
	return p.ends[i] - uint64(n), n, p.lens[i]&frameAsIs != 0
}

func frames(length uint64) uint64 { return (length + FrameSize - 1) / FrameSize }

// frameLen is how many plain bytes frame i of a chunk stands for.
func frameLen(i, length uint64) uint64 { return min(FrameSize, length-i*FrameSize) }

// checkFrames checks the frame lengths of a chunk of length bytes.
func checkFrames(lens []uint32, length uint64) error {
	if uint64(len(lens)) != frames(length) {
		return fmt.Errorf("%d frames for %d bytes", len(lens), length)
	}
	for i, n := range lens {
		plain := uint32(frameLen(uint64(i), length))
		if n&frameAsIs != 0 && n != plain|frameAsIs || n&frameAsIs == 0 && (n == 0 || n >= plain) {
			return fmt.Errorf("frame %d of %d bytes for %d", i, n&^frameAsIs, plain)
		}
	}
	return nil
}

// The coders are safe for concurrent use and made when first needed.
var (
	zstdWriter = sync.OnceValue(func() *zstd.Encoder {
		e, err := zstd.NewWriter(nil, zstd.WithEncoderLevel(zstd.SpeedDefault), zstd.WithEncoderConcurrency(1),
			zstd.WithEncoderCRC(false), zstd.WithWindowSize(FrameSize))
		if err != nil {
			panic("store: options of the encoder: " + err.Error())
		}
		return e
	})
	// The decoder takes no more memory than the result may have, also for a damaged frame
	// header.
	zstdReader = sync.OnceValue(func() *zstd.Decoder {
		d, err := zstd.NewReader(nil, zstd.WithDecoderConcurrency(0), zstd.WithDecoderMaxMemory(FrameSize),
			zstd.WithDecodeAllCapLimit(true), zstd.IgnoreChecksum(true))
		if err != nil {
			panic("store: options of the decoder: " + err.Error())
		}
		return d
	})
)

// encodeFrame compresses plain into the beginning of scratch, which has 2*FrameSize bytes; nil
// if the compressed form saves less than a sixteenth.
func encodeFrame(alg meta.Compression, scratch, plain []byte) []byte {
	var b []byte
	switch alg {
	case meta.CompressS2:
		b = s2.Encode(scratch[:cap(scratch)], plain)
	case meta.CompressZstd:
		b = zstdWriter().EncodeAll(plain, scratch[:0])
	}
	if len(b) == 0 || len(b) > len(plain)-len(plain)/16 {
		return nil
	}
	return b
}

// decodeFrame fills plain from a frame of exactly so many bytes. The frame may
// be anything; nothing is written beyond plain.
func decodeFrame(alg meta.Compression, plain, frame []byte) error {
	var got []byte
	var err error
	switch alg {
	case meta.CompressS2:
		var n int
		if n, err = s2.DecodedLen(frame); err == nil && n != len(plain) {
			return fmt.Errorf("a frame of %d bytes, not %d", n, len(plain))
		}
		if err == nil {
			got, err = s2.Decode(plain[:len(plain):len(plain)], frame)
		}
	case meta.CompressZstd:
		got, err = zstdReader().DecodeAll(frame, plain[:0:len(plain)])
	default:
		return fmt.Errorf("compressed with algorithm %d", alg)
	}
	if err != nil {
		return err
	}
	if len(got) != len(plain) {
		return fmt.Errorf("a frame of %d bytes, not %d", len(got), len(plain))
	}
	if len(got) > 0 && &got[0] != &plain[0] {
		copy(plain, got)
	}
	return nil
}

// packedFile reads the plain bytes of a compressed chunk.
type packedFile struct {
	File   // ID.pack
	p      *packing
	length uint64
	cache  *frameCache
}

var errPacked = errors.New("a compressed chunk is read only")

func (f *packedFile) WriteAt([]byte, int64) (int, error) { return 0, errPacked }
func (f *packedFile) Truncate(int64) error               { return errPacked }
func (f *packedFile) Allocate(int64, int64) error        { return errPacked }
func (f *packedFile) StartWrite(int64, int64)            {}
func (f *packedFile) Size() (int64, error)               { return int64(f.length), nil }

// WillNeed gives hints for the frames of the range.
func (f *packedFile) WillNeed(off, n int64) {
	if n <= 0 || uint64(off) >= f.length {
		return
	}
	last := min(uint64(off+n), f.length) - 1
	from, _, _ := f.p.frame(uint64(off) / FrameSize)
	f.File.WillNeed(int64(from), int64(f.p.ends[last/FrameSize]-from))
}

// ReadAt implements io.ReaderAt. Errors: Corrupt for a frame that can't be decoded.
func (f *packedFile) ReadAt(b []byte, off int64) (done int, err error) {
	for done < len(b) {
		at := uint64(off) + uint64(done)
		if at >= f.length {
			return done, io.EOF
		}
		i, in := at/FrameSize, at%FrameSize
		plain := frameLen(i, f.length)
		n := min(uint64(len(b)-done), plain-in)
		to := b[done : done+int(n)]
		switch {
		case in == 0 && n == plain:
			err = f.decode(i, to)
		case !f.cache.copy(frameKey{f.p, i}, to, in):
			buf := framePool.Get().(*[]byte)
			p := (*buf)[:plain]
			if err = f.decode(i, p); err == nil {
				copy(to, p[in:])
				f.cache.keep(frameKey{f.p, i}, p)
			}
			framePool.Put(buf)
		}
		if err != nil {
			return done, err
		}
		done += int(n)
	}
	return done, nil
}

var framePool = sync.Pool{New: func() any { b := make([]byte, 2*FrameSize); return &b }}

// decode reads and decodes one frame into plain, which has the frame's plain length.
func (f *packedFile) decode(i uint64, plain []byte) error {
	off, n, asIs := f.p.frame(i)
	src := plain
	if !asIs {
		buf := framePool.Get().(*[]byte)
		defer framePool.Put(buf)
		src = (*buf)[:n]
	}
	if got, err := f.File.ReadAt(src, int64(off)); err != nil && !errors.Is(err, io.EOF) {
		return err
	} else if got < len(src) {
		return meta.E("read chunk", meta.Corrupt, "", fmt.Errorf("the compressed file ends at %d", off+uint64(got)))
	}
	if asIs {
		return nil
	}
	if err := decodeFrame(f.p.alg, plain, src); err != nil {
		return meta.E("read chunk", meta.Corrupt, "", fmt.Errorf("compressed bytes for %d: %w", i*FrameSize, err))
	}
	return nil
}

// frameCache holds the frames last decoded for small reads.
type frameCache struct {
	mu    sync.Mutex
	slots [packedFrames]struct {
		key frameKey
		n   int
		buf []byte
	}
	next int
}

type frameKey struct {
	p *packing
	i uint64
}

// copy fills to from a cached frame, from offset in on.
func (c *frameCache) copy(key frameKey, to []byte, in uint64) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	for i := range c.slots {
		if s := &c.slots[i]; s.key == key {
			copy(to, s.buf[in:s.n])
			return true
		}
	}
	return false
}

// keep caches a frame in place of the oldest frame.
func (c *frameCache) keep(key frameKey, plain []byte) {
	c.mu.Lock()
	defer c.mu.Unlock()
	s := &c.slots[c.next]
	c.next = (c.next + 1) % len(c.slots)
	if s.buf == nil {
		s.buf = make([]byte, FrameSize)
	}
	s.key, s.n = key, copy(s.buf, plain)
}

// ---- compressing

// packer compresses sealed chunks in the background.
type packer struct {
	s *Store

	mu      sync.Mutex                        // guards waiting
	waiting map[meta.ChunkID]meta.Compression // chunks that wait for compression
	kick    chan struct{}
	frames  frameCache
	// pending is how many bytes of compressed files wait for a checkpoint.
	pending atomic.Uint64
}

// Compress schedules the compression of a sealed chunk, and does not wait. A chunk that is
// compressed, or was found not to shrink, stays as before. A failed compression is tried again
// on request.
func (s *Store) Compress(id meta.ChunkID, alg meta.Compression) {
	if alg == meta.CompressNone || s.writable() != nil {
		return
	}
	s.packs.mu.Lock()
	defer s.packs.mu.Unlock()
	if len(s.packs.waiting) < maxPacks || s.packs.waiting[id] != 0 {
		s.packs.waiting[id] = alg
	}
	select {
	case s.packs.kick <- struct{}{}:
	default:
	}
}

// next takes a chunk that waits for compression.
func (pk *packer) next() (meta.ChunkID, meta.Compression, bool) {
	pk.mu.Lock()
	defer pk.mu.Unlock()
	for id, alg := range pk.waiting {
		delete(pk.waiting, id)
		return id, alg, true
	}
	return meta.ChunkID{}, 0, false
}

// run compresses the waiting chunks, a batch and a checkpoint at a time.
func (pk *packer) run() {
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	pk.s.wg.Go(func() { <-pk.s.stop; cancel() })
	for {
		select {
		case <-pk.s.stop:
			return
		case <-pk.kick:
		}
		told := false
		for more := true; more && ctx.Err() == nil && pk.s.writable() == nil; {
			done, bytes := 0, uint64(0)
			for done < packBatch && bytes < packBytes && ctx.Err() == nil {
				var id meta.ChunkID
				var alg meta.Compression
				if id, alg, more = pk.next(); !more {
					break
				}
				n, err := pk.pack(ctx, id, alg, pk.pace(ctx))
				if err != nil {
					switch k := meta.KindOf(err); {
					case k == meta.NoSuchChunk || k == meta.Canceled || k == meta.Busy:
					case k == meta.NoSpace && done > 0:
						// The checkpoint frees the plain files of earlier chunks, and so makes
						// room.
						pk.s.Compress(id, alg)
						bytes = packBytes
					case k == meta.NoSpace && told:
					default:
						told = told || k == meta.NoSpace
						pk.s.slog.Warn("a chunk could not be compressed", "chunk", id.String(), "err", err)
					}
					continue
				}
				if bytes += n; n > 0 {
					done++
				}
			}
			if done > 0 {
				if err := pk.s.Checkpoint(); err != nil {
					pk.s.slog.Warn("compressed chunks are not in their places yet", "err", err)
				}
			}
		}
	}
}

// pace waits as long as the compression took, and three times as long while other
// operations use the disk. Unlike verification, compression must make progress on a busy disk,
// too: otherwise a disk with constant writes would fill up with chunks that could be smaller.
func (pk *packer) pace(ctx context.Context) func(time.Duration) error {
	var owed time.Duration
	return func(took time.Duration) error {
		if owed += took; !pk.s.quiet() {
			owed += 2 * took
		}
		if owed < time.Millisecond { // less than a timer can do
			return nil
		}
		select {
		case <-time.After(min(owed, 3*time.Second)):
		case <-ctx.Done():
			return ctx.Err()
		}
		owed = 0
		return nil
	}
}

const packOp = "compress chunk"

// Pack writes the compressed form of a sealed chunk; the next checkpoint replaces the plain
// form. n is the plain length; 0: no work was to be done. One call at a time. Errors:
// NoSuchChunk, Busy (the chunk is not sealed), Corrupt, NoSpace (the free space is too close to
// the space kept for writers), Canceled (also if the chunk was deleted or replaced meanwhile),
// IO.
func (s *Store) Pack(ctx context.Context, id meta.ChunkID, alg meta.Compression) (n uint64, err error) {
	return s.packs.pack(ctx, id, alg, nil)
}

// pack is Pack. If pace is not nil, pack calls pace between frames, unlocked, with the time
// that the last frame took. pace may wait, and may end the compression with an error.
func (pk *packer) pack(ctx context.Context, id meta.ChunkID, alg meta.Compression, pace func(time.Duration) error) (n uint64, err error) {
	const op = packOp
	c, err := pk.s.use(id)
	if err != nil {
		return 0, err
	}
	defer pk.s.leave(c)
	switch {
	case !c.exists:
		return 0, c.noSuch(op)
	case c.state != meta.ChunkSealed:
		return 0, meta.E(op, meta.Busy, id.String(), errors.New("it is not sealed"))
	case c.damaged:
		return 0, meta.E(op, meta.Corrupt, id.String(), errors.New("it is damaged"))
	case c.pack != nil, c.next != nil, c.isDense():
		return 0, nil
	}
	h, err := pk.s.hold(c, false, false)
	if err != nil {
		return 0, err
	}
	defer h.done()
	length, crcs := c.length, c.crcs // constant in a sealed chunk
	turn := new(byte)
	c.packing = turn
	// void returns the reason why the compression may end, or nil; the caller holds c.mu.
	void := func() error {
		switch {
		case c.packing != turn:
			return meta.E(op, meta.Canceled, id.String(), errors.New("it was deleted or replaced meanwhile"))
		case c.damaged:
			return meta.E(op, meta.Corrupt, id.String(), errors.New("damage was found meanwhile"))
		}
		return nil
	}
	c.mu.Unlock()
	p, f, err := pk.writePack(ctx, id, alg, h, crcs, length, func(took time.Duration) error {
		c.mu.Lock()
		err := void()
		c.mu.Unlock()
		if err == nil && pace != nil {
			if err = pace(took); err != nil {
				err = meta.E(op, meta.Canceled, id.String(), err)
			}
		}
		return err
	})
	c.mu.Lock()
	if err == nil {
		err = void()
	}
	mine := c.packing == turn
	if mine {
		c.packing = nil
	}
	if err != nil || p == nil {
		if f != nil {
			f.Close()
		}
		if rerr := pk.s.d.Remove(packName(id)); rerr != nil && !errors.Is(rerr, os.ErrNotExist) {
			err = errors.Join(err, ioError(op, id.String(), rerr))
		}
		if err == nil {
			c.dense = true
			pk.s.touch(c) // the next checkpoint records dense
		}
		return 0, err
	}
	c.next, c.nextFile = p, &handle{File: f}
	c.nextFile.refs.Store(1)
	pk.pending.Add(p.size())
	pk.s.touch(c)
	return length, nil
}

// dropNext forgets a compressed form that is not in place yet.
func (pk *packer) dropNext(c *chunk) {
	if c.next == nil {
		return
	}
	pk.pending.Add(-c.next.size())
	c.nextFile.done()
	c.next, c.nextFile = nil, nil
}

// roomToPack ensures that after writing n bytes the disk has room for writers and new chunks,
// which come before compression. Compressed forms that wait for a checkpoint beside their plain
// forms count twice, so that compression takes at most half of the free space.
func (pk *packer) roomToPack(id meta.ChunkID, n uint64) error {
	keep := pk.s.reserve + fullAt
	need := n + pk.pending.Load()
	free, err := pk.s.space.take(pk.s.d, 0, keep+need)
	if err != nil {
		return ioError(packOp, id.String(), err)
	}
	if free < keep+need {
		return meta.E(packOp, meta.NoSpace, id.String(), fmt.Errorf("%d bytes free, %d are kept for writers, %d may be needed", free, keep, need))
	}
	return nil
}

// writePack writes ID.pack, unsynced, and calls step after each frame with the time that the
// frame took. No packing and no error: the chunk does not shrink.
func (pk *packer) writePack(ctx context.Context, id meta.ChunkID, alg meta.Compression, h *handle, crcs []uint32, length uint64, step func(time.Duration) error) (*packing, File, error) {
	const op = packOp
	if err := pk.roomToPack(id, length); err != nil {
		return nil, nil, err
	}
	f, err := pk.s.d.Open(packName(id), true)
	if err != nil {
		return nil, nil, pk.s.diskError(op, id, err)
	}
	if err := f.Truncate(0); err != nil {
		return nil, f, pk.s.diskError(op, id, err)
	}
	plain, again, coded := make([]byte, FrameSize), make([]byte, FrameSize), make([]byte, 2*FrameSize)
	lens := make([]uint32, 0, frames(length))
	var out []byte
	var at, size uint64 // bytes written, and bytes written plus the bytes in out
	var done uint64     // of the plain bytes
	flush := func() error {
		if len(out) == 0 {
			return nil
		}
		if err := pk.roomToPack(id, uint64(len(out))+length-done); err != nil {
			return err
		}
		if _, err := f.WriteAt(out, int64(at)); err != nil {
			return pk.s.diskError(op, id, err)
		}
		if _, err := pk.s.space.take(pk.s.d, uint64(len(out)), pk.s.reserve); err != nil {
			return ioError(op, id.String(), err)
		}
		at, out = at+uint64(len(out)), out[:0]
		return nil
	}
	for i := range frames(length) {
		if ctx.Err() != nil {
			return nil, f, meta.E(op, meta.Canceled, id.String(), ctx.Err())
		}
		began := time.Now()
		b := plain[:frameLen(i, length)]
		for n := uint64(0); n < uint64(len(b)); n += block {
			off := i*FrameSize + n
			if err := pk.s.readBlock(id, h, b[n:min(n+block, uint64(len(b)))], off, crcs[off/block]); err != nil {
				return nil, f, err
			}
		}
		z := encodeFrame(alg, coded, b)
		if z == nil {
			z = b
			lens = append(lens, uint32(len(b))|frameAsIs)
		} else {
			// The plain bytes will be deleted when ID.pack is in place, so verify the frame.
			if err := decodeFrame(alg, again[:len(b)], z); err != nil || !bytes.Equal(again[:len(b)], b) {
				return nil, f, meta.E(op, meta.Corrupt, id.String(), differs(i*FrameSize, err))
			}
			lens = append(lens, uint32(len(z)))
		}
		out = append(out, z...)
		size += uint64(len(z))
		done = min((i+1)*FrameSize, length)
		if (done == packTry || done == length) && size > done-done/16 {
			return nil, f, nil
		}
		if len(out) >= 1<<20 {
			if err := flush(); err != nil {
				return nil, f, err
			}
		}
		if err := step(time.Since(began)); err != nil {
			return nil, f, err
		}
	}
	if err := flush(); err != nil {
		return nil, f, err
	}
	const page = 4096
	if (size+page-1)/page >= (length+page-1)/page {
		return nil, f, nil
	}
	return newPacking(alg, lens), f, nil
}

// differs makes the error for a frame that decodes to wrong bytes or, with err, not at all.
func differs(at uint64, err error) error {
	if err == nil {
		return fmt.Errorf("the compressed block at %d decodes to other bytes", at)
	}
	return fmt.Errorf("the compressed block at %d can't be decoded: %w", at, err)
}

// dropPlain removes the data files of chunks whose compressed files a checkpoint has put in
// place. The caller holds checkpoints.mu.
func (pk *packer) dropPlain(all []*settling) {
	for _, t := range all {
		if t.m == nil || t.m.pack == nil {
			continue
		}
		t.c.mu.Lock()
		if t.c.plain && t.c.pack == t.m.pack {
			if err := pk.s.d.Remove(dataName(t.c.id)); err != nil && !errors.Is(err, os.ErrNotExist) {
				pk.s.slog.Warn("the plain data of a compressed chunk is still there", "chunk", t.c.id.String(), "err", err)
			}
			t.c.plain = false
			pk.s.stats.packed.Add(1)
		}
		t.c.mu.Unlock()
	}
}

// tidy handles the chunks of a directory that have both data files after a crash or a failure:
// tidy removes the file that .meta does not name.
func (pk *packer) tidy(dir string, ids []meta.ChunkID) {
	pk.s.points.mu.Lock() // no .meta is replaced meanwhile
	defer pk.s.points.mu.Unlock()
	if len(ids) == 0 || pk.s.writable() != nil {
		return
	}
	// A failed checkpoint, or a process killed during a checkpoint, may have renamed a .meta in
	// the cache only. The plain file goes after the sync.
	if err := pk.s.syncDir(dir); err != nil {
		_ = pk.s.fail(ioError("list chunks", dir, err))
		return
	}
	for _, id := range ids {
		pk.tidyOne(id)
	}
}

func (pk *packer) tidyOne(id meta.ChunkID) {
	c, err := pk.s.use(id)
	if err != nil {
		return
	}
	defer pk.s.leave(c)
	name := dataName(id)
	switch {
	case c.packing != nil, c.next != nil, !c.exists, c.state != meta.ChunkSealed:
		return
	case c.pack == nil:
		name = packName(id)
	}
	if err := pk.s.d.Remove(name); err != nil && !errors.Is(err, os.ErrNotExist) {
		pk.s.slog.Warn("a leftover stays", "chunk", id.String(), "err", err)
	}
}
