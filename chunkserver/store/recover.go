package store

import (
	"errors"
	"io"
	"os"

	"penstock.io/penstock/chunkserver"
	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/replica"
)

// Mark records in the log how far the log is durable, as the background goroutine does when the
// log becomes idle.
func (s *Store) Mark() { s.log.mark() }

// piece is a part of an append within one checksum block.
type piece struct {
	off uint64
	n   uint64
	crc uint32
}

// replayed has the log's facts about one chunk that the .meta file lacks.
type replayed struct {
	base   uint64 // length in .meta
	pieces []piece
	synced uint64
	sealed *record
	// broken: the records don't continue the state in .meta. The chunk is corrupt, unless a
	// deletion of the chunk follows, which removed .meta.
	broken bool
}

// recover brings the chunks with records in the log to their verifiable state, writes the state
// to their files, and begins a new log. A repetition after a crash gives the same result.
func (s *Store) recover() error {
	l, err := openLog(s.d, s.f)
	if err != nil {
		return err
	}
	s.log = l
	l.nosync = s.o.UnsafeNoSync
	found := map[meta.ChunkID]*replayed{}
	next, err := l.replay(func(r record) error { return s.replay(found, r) })
	if err != nil {
		return err
	}
	// If only the process ended, records may be in memory only. The record of a deletion must
	// outlast the chunk's files, which settle removes.
	if err := l.settled(); err != nil {
		return err
	}
	for id, r := range found {
		if err := s.rebuild(s.chunks[id], r); err != nil {
			return err
		}
	}
	if err := s.points.settle(s.dirty, 0); err != nil {
		return err
	}
	for c := range s.dirty {
		c.mu.Lock()
		c.entry = true
		c.mu.Unlock()
		s.unpin(c)
	}
	clear(s.dirty)
	if err := l.begin(next); err != nil {
		return err
	}
	return s.dropIncoming()
}

// replay handles one record.
func (s *Store) replay(found map[meta.ChunkID]*replayed, r record) error {
	if r.typ == recMark {
		return nil
	}
	c, err := s.use(r.id)
	if err != nil {
		if kind := meta.KindOf(err); kind != meta.Corrupt && kind != meta.Version {
			return err
		}
		// An unreadable .meta file affects only one chunk, which may still be deleted.
		if r.typ != recDelete {
			s.slog.Error("chunk metadata unreadable", "chunk", r.id.String(), "err", err)
			return nil
		}
		c = s.pin(r.id)
		c.mu.Lock()
		c.loadErr = nil
	}
	defer s.leave(c)
	f := found[r.id]
	if f == nil {
		f = &replayed{base: c.length, synced: c.length}
		found[r.id] = f
		s.touch(c)
	}
	switch r.typ {
	case recDelete:
		c.deleted, c.erased, c.exists = true, true, false
		s.bury(r.id, meta.Fence{})
		*f = replayed{}
		return nil
	case recFence, recAppend, recSeal:
		if c.deleted {
			return meta.E("replay log", meta.Corrupt, r.id.String(), errors.New("a record after the chunk was deleted"))
		}
		if !c.exists {
			c.exists, c.state = true, meta.ChunkOpen
		}
		if c.fence.Less(r.fence) {
			c.fence = r.fence
		}
	case recSync:
		if !c.exists {
			return nil // the chunk was deleted later
		}
	}
	if c.state == meta.ChunkSealed {
		return nil // .meta knows all
	}
	switch r.typ {
	case recAppend:
		have := f.base
		if k := len(f.pieces); k > 0 {
			have = f.pieces[k-1].off + f.pieces[k-1].n
		}
		if r.end <= have {
			return nil // .meta is newer than the record
		}
		off := r.off
		for _, crc := range r.crcs {
			n := min(r.end-off, block-off%block)
			if off+n > have { // else an interrupted recovery had kept the piece
				if off != have || f.sealed != nil {
					f.broken = true
					return nil
				}
				f.pieces = append(f.pieces, piece{off, n, crc})
				have += n
			}
			off += n
		}
	case recSync:
		f.synced = max(f.synced, r.end)
		if r.inline == nil || r.end <= f.base {
			return nil
		}
		h, err := s.hold(c, true, true)
		if err != nil {
			return err
		}
		defer h.done()
		if _, err := h.WriteAt(r.inline, int64(r.off)); err != nil {
			return ioError("recover", r.id.String(), err)
		}
	case recSeal:
		r.inline = nil
		f.sealed = &r
	}
	return nil
}

// rebuild determines a chunk's length: the longest prefix that verifies, which must reach the
// synced mark. A sealed chunk ends at the length of the seal.
func (s *Store) rebuild(c *chunk, f *replayed) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.exists || c.state == meta.ChunkSealed {
		return nil
	}
	if f.broken {
		return meta.E("replay log", meta.Corrupt, c.id.String(), errors.New("an append that doesn't continue the chunk"))
	}
	found := replica.Found{Fence: c.fence, Synced: f.synced, Damaged: c.damaged}
	if k := len(f.pieces); k > 0 {
		found.Appended = f.pieces[k-1].off + f.pieces[k-1].n
	}
	if f.sealed != nil {
		found.Sealed, found.SealedAt = true, f.sealed.off
	}
	limit := found.Limit()
	good := min(f.base, limit)
	// The bytes below base were durable before the log began, as .meta says.
	if len(f.pieces) > 0 && good == f.base {
		h, err := s.hold(c, true, true)
		if err != nil {
			return err
		}
		defer h.done()
		buf := getBlock()
		defer putBlock(buf)
		for _, p := range f.pieces {
			if p.off >= limit {
				break
			}
			if p.off+p.n > limit {
				// The seal cut within this piece, and perhaps the file, too: the checksum of
				// the seal decides below whether the rest is right.
				good = limit
				break
			}
			n, err := h.ReadAt((*buf)[:p.n], int64(p.off))
			if err != nil && !errors.Is(err, io.EOF) {
				return ioError("recover", c.id.String(), err)
			}
			if uint64(n) < p.n || chunkserver.CRC((*buf)[:p.n]) != p.crc && !s.o.UnsafeNoVerify {
				break
			}
			good = p.off + p.n
		}
	}
	found.Verified = good
	r := replica.Recovered(found, s.off)
	keep := r.Length
	if r.Damaged && !c.damaged {
		// Rule 5: corrupt, not short. The chunk keeps its length and the right checksums, so
		// that reads of the bad part fail and name the reason.
		s.slog.Error("a chunk is damaged below its synced length", "chunk", c.id.String(), "verified", good, "synced", keep)
		s.stats.corrupt.Add(1)
		c.damaged = true
	}
	for _, p := range f.pieces {
		if p.off+p.n <= keep {
			c.grow(p.n, []uint32{p.crc})
		} else if p.off < keep {
			// A seal cut within this piece: the checksum of the rest must be computed from the
			// remaining bytes.
			if err := s.growPart(c, keep-p.off); err != nil {
				return err
			}
		}
	}
	if c.length > keep { // the seal cut below base
		c.crcs = append([]uint32(nil), c.crcs[:keep/block]...)
		c.length = keep / block * block
		if n := keep % block; n > 0 {
			if err := s.growPart(c, n); err != nil {
				return err
			}
		}
	}
	if c.length != keep {
		return meta.E("recover", meta.Corrupt, c.id.String(), errors.New("synced beyond the appended bytes"))
	}
	// Blocks that were checked piece by piece count as verified.
	for b := chunkserver.Blocks(f.base); b < chunkserver.Blocks(good); b++ {
		c.bits.set(b)
		c.wrote = true
	}
	if f.sealed != nil {
		c.state = meta.ChunkSealed
		if chunkserver.SealCRC(c.crcs) != f.sealed.crcs[0] && !c.damaged {
			s.slog.Error("a sealed chunk does not match its seal", "chunk", c.id.String())
			s.stats.corrupt.Add(1)
			c.damaged = true
		}
	}
	c.synced, c.asked = c.length, min(c.length, max(r.Promised, f.base))
	return s.cut(c)
}

// growPart adds the first n bytes of a piece or block that a seal cut; the other bytes may be
// gone already. The checksum of the seal decides whether the bytes are right.
func (s *Store) growPart(c *chunk, n uint64) error {
	h, err := s.hold(c, true, false)
	if err != nil {
		return err
	}
	defer h.done()
	buf := getBlock()
	defer putBlock(buf)
	if _, err := h.ReadAt((*buf)[:n], int64(c.length)); err != nil && !errors.Is(err, io.EOF) {
		return ioError("recover", c.id.String(), err)
	}
	c.grow(n, []uint32{chunkserver.CRC((*buf)[:n])})
	return nil
}

// cut truncates the data file to the chunk's length.
func (s *Store) cut(c *chunk) error {
	h, err := s.hold(c, true, c.length > 0)
	if err != nil {
		if errors.Is(err, os.ErrNotExist) {
			return nil // fenced before anything was written
		}
		return err
	}
	defer h.done()
	stamp, err := h.Stamp()
	if err != nil {
		return ioError("recover", c.id.String(), err)
	}
	n, sealed := uint64(stamp.Size), c.state == meta.ChunkSealed
	if sealed && n == c.length && s.verified.knows(c.id, stamp) {
		return nil // trimmed at the seal: another truncation would change ctime
	}
	if n > c.length || sealed {
		if err := h.Truncate(int64(min(n, c.length))); err != nil {
			return ioError("recover", c.id.String(), err)
		}
	}
	if sealed {
		s.toVerify(c, h, 0)
	}
	return nil
}
