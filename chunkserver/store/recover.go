package store

import (
	"errors"
	"io"
	"os"

	"penstock.io/penstock/chunkserver"
	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/replica"
)

// Checkpoint makes all chunks durable in their own files, after which the log begins anew.
// Appends and syncs continue meanwhile.
func (s *Store) Checkpoint() error {
	s.cpMu.Lock()
	defer s.cpMu.Unlock()
	err := s.Err()
	if err == nil {
		err = s.checkpoint()
	}
	s.cpDoneMu.Lock()
	s.cpErr = err
	close(s.cpDone)
	s.cpDone = make(chan struct{})
	s.cpDoneMu.Unlock()
	return err
}

func (s *Store) checkpoint() error {
	s.sinceCP.Store(0)
	// Records before pos belong to chunks that are dirty now, because chunks are marked before
	// their records are written. Some of the chunks will have newer records when settle reaches
	// the chunk; replay skips facts that .meta has already.
	pos := s.log.end()
	s.mu.Lock()
	dirty := s.dirty
	s.dirty = map[*chunk]struct{}{}
	s.mu.Unlock()
	if len(dirty) == 0 && pos == s.log.start {
		return nil
	}
	// Chunks that were deleted before pos go with this checkpoint. The record of a deletion
	// must outlast the chunk's files, and must not be read any more when the files are gone.
	err := s.log.wait(pos)
	if err != nil {
		err = s.fail(err)
	}
	if err == nil {
		err = s.settle(dirty, pos)
	}
	if err == nil {
		err = s.log.checkpoint(pos)
		if err != nil && meta.KindOf(err) != meta.NoSpace {
			err = s.fail(err)
		}
	}
	if err != nil {
		// After a failure, all the chunks are dirty again.
		s.mu.Lock()
		for c := range dirty {
			if _, again := s.dirty[c]; again {
				c.pins-- // touched meanwhile, and pinned again
			}
			s.dirty[c] = struct{}{}
		}
		s.mu.Unlock()
		return err
	}
	for c := range dirty {
		s.unpin(c)
	}
	s.stats.checkpoints.Add(1)
	return nil
}

// batchFrom is the number of chunks from which a checkpoint syncs the whole
// file system three times rather than each file and directory.
const batchFrom = 16

const cpOp = "checkpoint"

// settle completes the data files and .meta files of dirty chunks: data synced, .meta written
// as a new file, synced and renamed, directories synced. The log is durable up to pos and will
// begin at pos.
func (s *Store) settle(dirty map[*chunk]struct{}, pos uint64) error {
	batch := len(dirty) >= s.o.batch
	all := make([]*settling, 0, len(dirty))
	defer func() {
		for _, t := range all {
			if t.h != nil {
				t.h.done()
			}
		}
	}()
	needData := false
	for c := range dirty {
		t, err := s.snapshot(c, pos)
		if err != nil {
			return err
		}
		if t != nil {
			all = append(all, t)
			needData = needData || t.h != nil
		}
	}
	if batch && needData {
		if err := s.syncAll(); err != nil {
			return err
		}
	}
	for _, t := range all {
		if !batch && t.h != nil {
			if err := s.syncFile(t.h); err != nil {
				return s.fail(ioError(cpOp, t.c.id.String(), err))
			}
			if t.made { // before .meta names the file
				if err := s.syncDir(dirOf(t.c.id)); err != nil {
					return s.fail(ioError(cpOp, t.c.id.String(), err))
				}
				t.c.mu.Lock()
				if t.c.file == t.h { // the chunk was not deleted meanwhile
					t.c.entry = true
				}
				t.c.mu.Unlock()
			}
		}
		if t.m != nil {
			if err := writeBeside(s.d, metaName(t.c.id), t.m.encode(), !batch && !s.o.UnsafeNoSync); err != nil {
				return s.diskError(cpOp, t.c.id, err)
			}
		}
	}
	if batch {
		if err := s.syncAll(); err != nil {
			return err
		}
	}
	dirs := map[string]struct{}{}
	for _, t := range all {
		if err := s.replace(t); err != nil {
			return s.diskError(cpOp, t.c.id, err)
		}
		dirs[dirOf(t.c.id)] = struct{}{}
	}
	if batch {
		if err := s.syncAll(); err != nil {
			return err
		}
		dirs = nil
	}
	for dir := range dirs {
		if err := s.syncDir(dir); err != nil {
			return s.fail(ioError(cpOp, dir, err))
		}
	}
	s.dropPlain(all)
	return nil
}

// settling is one chunk whose files a checkpoint completes.
type settling struct {
	c    *chunk
	m    *chunkMeta // nil: the chunk is deleted
	h    *handle    // nil: the data file needs no sync
	next bool       // m names the compressed file, h, for the first time
	made bool       // h's directory entry may not be durable yet
}

func (s *Store) snapshot(c *chunk, pos uint64) (*settling, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.dirty = false
	t := &settling{c: c}
	if c.gone > pos {
		s.touch(c) // the log still has records of the chunk: the next checkpoint handles the chunk again
	}
	switch {
	case c.erased, c.gone > 0 && c.gone <= pos:
		return t, nil
	case c.deleted && !c.unread:
		// The chunk is being deleted. After a power cut before the record of the deletion is
		// durable, the chunk exists, and its records before the checkpoint must not be
		// missing.
	case !c.exists:
		return nil, nil
	}
	t.m = &chunkMeta{id: c.id, state: c.state, damaged: c.damaged, fence: c.fence, length: c.length,
		crcs: append([]uint32(nil), c.crcs...), dense: c.dense, pack: c.pack}
	var err error
	if c.damaged && c.next != nil {
		s.dropNext(c)
		if err := s.d.Remove(packName(c.id)); err != nil && !errors.Is(err, os.ErrNotExist) {
			s.slog.Warn("a leftover stays", "chunk", c.id.String(), "err", err) // until the chunk is listed, or goes
		}
	}
	if c.next != nil {
		t.m.pack, t.h, t.next, t.made = c.next, c.nextFile, true, true
		t.h.refs.Add(1)
	} else if c.length > c.dataOK {
		t.h, err = s.hold(c, true, false)
		t.made = !c.entry
	}
	return t, err
}

// replace puts a new .meta file in place, or removes the remains of a chunk that was deleted,
// perhaps meanwhile.
func (s *Store) replace(t *settling) error {
	c := t.c
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.erased || t.m == nil {
		if err := s.d.Remove(metaName(c.id) + tmpSuffix); err != nil && !errors.Is(err, os.ErrNotExist) {
			return err
		}
		return s.unlink(c.id)
	}
	if err := s.d.Rename(metaName(c.id)+tmpSuffix, metaName(c.id)); err != nil {
		return err
	}
	c.dataOK = max(c.dataOK, min(t.m.length, c.length))
	if t.next {
		c.pack, c.plain = t.m.pack, true
		s.dropNext(c)
		c.closeFile()
	}
	return nil
}

func (s *Store) syncAll() error {
	if s.o.UnsafeNoSync {
		return nil
	}
	if err := s.d.SyncAll(); err != nil {
		return s.fail(ioError(cpOp, "", err))
	}
	return nil
}

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
	if err := s.settle(s.dirty, 0); err != nil {
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
	if sealed && n == c.length && s.knows(c.id, stamp) {
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
