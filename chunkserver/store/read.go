package store

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"penstock.io/penstock/chunkserver"
	"penstock.io/penstock/meta"
)

// view is the state of a chunk for one reader: the bytes below length and their checksums don't
// change any more.
type view struct {
	id     meta.ChunkID
	h      *handle
	length uint64
	first  uint64 // block number of crcs[0]
	crcs   []uint32
}

// look takes a view of the blocks that [off, off+n) touches. The caller must call h.done.
func (s *Store) look(id meta.ChunkID, off, n uint64) (view, error) {
	c, err := s.use(id)
	if err != nil {
		return view{}, err
	}
	defer s.leave(c)
	if !c.exists {
		return view{}, c.noSuch("read chunk")
	}
	if off > c.length || n > c.length-off {
		return view{}, meta.E("read chunk", meta.NoSuchOffset, id.String(), fmt.Errorf("%d bytes at %d of %d", n, off, c.length))
	}
	s.lastRead.Store(time.Now().UnixNano())
	v := view{id: id, length: c.length, first: off / block}
	if n > 0 {
		v.crcs = append(v.crcs, c.crcs[off/block:chunkserver.Blocks(off+n)]...)
	}
	if v.h, err = s.hold(c, false, false); err != nil {
		if n > 0 && errors.Is(err, os.ErrNotExist) {
			err = meta.E("read chunk", meta.Corrupt, id.String(), err)
		}
		s.bad.tellFailed(id, err)
		return view{}, err
	}
	return v, nil
}

// Read implements chunkserver.Service. Read reads every touched block completely and verifies
// the block.
func (s *Store) Read(ctx context.Context, id meta.ChunkID, p []byte, off uint64) error {
	v, err := s.look(id, off, uint64(len(p)))
	if err != nil {
		return err
	}
	defer v.h.done()
	if err := s.readView(v, p, off); err != nil {
		return err
	}
	s.stats.reads.Add(1)
	s.stats.readBytes.Add(uint64(len(p)))
	return nil
}

func (s *Store) readView(v view, p []byte, off uint64) error {
	for len(p) > 0 {
		b := off / block
		size := min(block, v.length-b*block)
		in := off - b*block
		n := min(uint64(len(p)), size-in)
		crc := v.crcs[b-v.first]
		if in == 0 && n == size {
			if err := s.readBlock(v.id, v.h, p[:n], off, crc); err != nil {
				return err
			}
		} else {
			buf := getBlock()
			err := s.readBlock(v.id, v.h, (*buf)[:size], b*block, crc)
			if err == nil {
				copy(p[:n], (*buf)[in:])
			}
			putBlock(buf)
			if err != nil {
				return err
			}
		}
		p, off = p[n:], off+n
	}
	return nil
}

// Raw returns the means to send [off, off+n) without reading the bytes: the data file and the
// checksums of all touched blocks; the receiver verifies. off must be a multiple of
// ChecksumBlock, and n too unless the range ends at the chunk's end. fd is -1 if the plain
// bytes have no descriptor; then nothing counts as read. The caller calls done after sending.
func (s *Store) Raw(id meta.ChunkID, off, n uint64) (fd int, crcs []uint32, done func(), err error) {
	v, err := s.look(id, off, n)
	if err != nil {
		return -1, nil, nil, err
	}
	if off%block != 0 || n%block != 0 && off+n != v.length {
		v.h.done()
		return -1, nil, nil, meta.E("read chunk", meta.Invalid, id.String(), fmt.Errorf("raw range %d at %d of %d is not whole blocks", n, off, v.length))
	}
	fd = -1
	if d, ok := v.h.File.(interface{ Fd() int }); ok {
		fd = d.Fd()
		s.stats.reads.Add(1)
		s.stats.readBytes.Add(n)
	}
	return fd, v.crcs, v.h.done, nil
}

// Local tells a reader on the same machine how to read a chunk without further requests: the
// checksums from block First on, and the blocks that need no check.
type Local struct {
	Info     chunkserver.Info
	First    uint64   // block number of CRCs[0] and of bit 0 of Verified
	CRCs     []uint32 // at most as many as the caller asked for
	Verified []byte   // a bit a block, lowest first: verified since the machine booted, and not touched since
	Changed  int64    // of a sealed chunk: ctime of the data file that Verified is about, ns since 1970
	File     File     // read-only, owned by the caller; nil if not asked for
}

// Local returns the means to read a chunk directly, for up to most blocks from first on. With
// open, File is a new read-only descriptor. Errors: NotSupported for a compressed chunk, and
// the errors of Read.
func (s *Store) Local(id meta.ChunkID, first uint64, most int, open bool) (Local, error) {
	c, err := s.use(id)
	if err != nil {
		return Local{}, err
	}
	defer s.leave(c)
	if !c.exists {
		return Local{}, c.noSuch("open chunk")
	}
	if c.pack != nil {
		return Local{}, meta.E("open chunk", meta.NotSupported, id.String(), errors.New("it is compressed: its file holds other bytes"))
	}
	l := Local{Info: chunkserver.Info{ID: c.id, State: c.state, Length: c.length, Synced: c.synced, Fence: c.fence}, First: first}
	var good uint64 // blocks
	if c.length > 0 {
		h, err := s.hold(c, false, false)
		if err != nil {
			return Local{}, err
		}
		upTo, stamp, err := s.verified.checkedOf(c, h)
		h.done()
		if err != nil {
			return Local{}, err
		}
		l.Changed = stamp.Changed
		if good = upTo / block; upTo == c.length {
			good = uint64(len(c.crcs))
		} else {
			s.verified.enqueue(id)
		}
	}
	if first < uint64(len(c.crcs)) {
		l.CRCs = append(l.CRCs, c.crcs[first:min(uint64(len(c.crcs)), first+uint64(most))]...)
	}
	l.Verified = make([]byte, (len(l.CRCs)+7)/8)
	for i := range l.CRCs {
		if first+uint64(i) < good {
			l.Verified[i/8] |= 1 << (i % 8)
		}
	}
	if open {
		if l.File, err = s.d.OpenRead(dataName(id)); err != nil {
			return Local{}, ioError("open chunk", id.String(), err)
		}
	}
	return l, nil
}

// verifyOpen verifies every byte of an open chunk before a seal is told the chunk's length:
// verifyOpen reads the blocks that were neither written nor checked since Open. A bad block is
// corruption, not a shorter chunk: the chunk is marked as damaged. If c.wrote is false, the result
// is the stamp of the file with which all blocks were verified, else zero.
func (s *Store) verifyOpen(c *chunk) (Stamp, error) {
	if c.length == 0 {
		return Stamp{}, nil
	}
	h, err := s.hold(c, false, false)
	if err != nil {
		return Stamp{}, err
	}
	defer h.done()
	var stamp Stamp
	if !c.wrote {
		if stamp, err = h.Stamp(); err != nil {
			return Stamp{}, ioError("seal", c.id.String(), err)
		}
		if stamp != c.whole {
			c.bits, c.whole = nil, stamp
		}
	}
	buf := getBlock()
	defer putBlock(buf)
	for i, crc := range c.crcs {
		if c.bits.has(uint64(i)) {
			continue
		}
		at := uint64(i) * block
		if err := s.readBlock(c.id, h, (*buf)[:min(block, c.length-at)], at, crc); err != nil {
			// Everything loaded from .meta or recovered was durable.
			c.damaged = true
			return Stamp{}, err
		}
		c.bits.set(uint64(i))
	}
	return stamp, nil
}

// ScrubReport is the result of a scrub.
type ScrubReport struct {
	Chunks, Blocks, Bytes uint64
	Bad                   []BadChunk
}

// BadChunk is a chunk with wrong checksums.
type BadChunk struct {
	ID  meta.ChunkID
	Err error
}

// Scrub reads and verifies every chunk, at most rate bytes a second (0: as fast as the disk
// reads). Chunks that are deleted meanwhile are skipped. The error is about the listing or ctx;
// bad chunks are in the report.
func (s *Store) Scrub(ctx context.Context, rate uint64) (ScrubReport, error) {
	var rep ScrubReport
	var ids []meta.ChunkID
	err := s.List(ctx, func(i chunkserver.Info, err error) bool {
		if err != nil {
			rep.Bad = append(rep.Bad, BadChunk{i.ID, err})
		} else {
			ids = append(ids, i.ID)
		}
		return true
	})
	if err != nil {
		return rep, err
	}
	start := time.Now()
	pace := func(uint64) error {
		if rate == 0 {
			return nil
		}
		ahead := time.Duration(float64(rep.Bytes)/float64(rate)*float64(time.Second)) - time.Since(start)
		if ahead > 10*time.Millisecond {
			select {
			case <-time.After(ahead):
			case <-ctx.Done():
			}
		}
		return nil
	}
	for _, id := range ids {
		rep.Chunks++
		if err := s.scrubOne(ctx, id, pace, &rep); err != nil {
			switch meta.KindOf(err) {
			case meta.NoSuchChunk:
			case meta.Canceled:
				return rep, err
			default:
				s.slog.Error("scrub found a bad chunk", "chunk", id.String(), "err", err)
				rep.Bad = append(rep.Bad, BadChunk{id, err})
			}
		}
	}
	return rep, nil
}

// ReadAll reads a chunk and compares the bytes with the checksums. After each block ReadAll
// calls pace with the number of bytes in the block; pace may wait, or end the reading with an
// error.
func (s *Store) ReadAll(ctx context.Context, id meta.ChunkID, pace func(n uint64) error) error {
	var rep ScrubReport
	return s.scrubOne(ctx, id, pace, &rep)
}

func (s *Store) scrubOne(ctx context.Context, id meta.ChunkID, pace func(n uint64) error, rep *ScrubReport) error {
	info, err := s.Stat(ctx, id)
	if err != nil || info.Length == 0 {
		return err
	}
	v, err := s.look(id, 0, info.Length)
	if err != nil {
		return err
	}
	defer v.h.done()
	stamp, err := v.h.Stamp()
	if err != nil {
		return ioError("scrub", id.String(), err)
	}
	buf := getBlock()
	defer putBlock(buf)
	for i, crc := range v.crcs {
		at := uint64(i) * block
		if at >= info.Length {
			break
		}
		b := (*buf)[:min(block, v.length-at)]
		if err := s.readBlock(id, v.h, b, at, crc); err != nil {
			return err
		}
		rep.Blocks++
		rep.Bytes += uint64(len(b))
		if err := pace(uint64(len(b))); err != nil {
			return meta.E("scrub", meta.Canceled, id.String(), err)
		}
		if ctx.Err() != nil {
			return meta.E("scrub", meta.Canceled, id.String(), ctx.Err())
		}
	}
	// Local readers may skip blocks that were verified here.
	c, err := s.use(id)
	if err != nil {
		return err
	}
	defer s.leave(c)
	if after, err := v.h.Stamp(); err == nil && after == stamp && c.exists && c.state == meta.ChunkSealed && c.length == v.length {
		s.verified.vouch(id, stamp, v.length)
	}
	return nil
}
