package store

import (
	"errors"
	"io"
	"os"

	"penstock.io/penstock/chunkserver"
	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/replica"
)

// Checkpoint makes all chunks durable in their own files and lets the log
// begin anew. Appends and syncs go on meanwhile.
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
	// What the log holds before pos belongs to chunks that are dirty now: they
	// are marked before their records are written. Some will have moved on
	// when their turn comes; replay skips what .meta already knows.
	pos := s.log.end()
	s.mu.Lock()
	dirty := s.dirty
	s.dirty = map[*chunk]struct{}{}
	s.mu.Unlock()
	if len(dirty) == 0 && pos == s.log.start {
		return nil
	}
	// What the log says was deleted before pos goes with this checkpoint: its record must
	// outlast its files, and be read no more once they are gone.
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
		// All of them again next time.
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

// settle makes dirty chunks' data files and .meta files say all there is to
// say: data synced, .meta written beside and synced, renamed, directories synced. The log
// is durable up to pos and will begin there.
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
			if t.made { // before .meta speaks of it
				if err := s.syncDir(dirOf(t.c.id)); err != nil {
					return s.fail(ioError(cpOp, t.c.id.String(), err))
				}
				t.c.mu.Lock()
				if t.c.file == t.h { // nobody deleted it meanwhile
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

// settling is one chunk on its way to its own files.
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
		s.touch(c) // the log goes on speaking of it: the next checkpoint takes it once more
	}
	switch {
	case c.erased, c.gone > 0 && c.gone <= pos:
		return t, nil
	case c.deleted && !c.unread:
		// Its deletion is under way. Should the power fail before the log has that, the
		// chunk is there: its records before the checkpoint must not be missed then.
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

// replace puts a new .meta file in place, or removes what is left of a chunk
// that is deleted, perhaps meanwhile.
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

// Mark notes in the log how far it is durable, as the background goroutine
// does when the log falls idle.
func (s *Store) Mark() { s.log.mark() }

// piece is a part of an append that lies within one checksum block.
type piece struct {
	off uint64
	n   uint64
	crc uint32
}

// replayed is what the log tells of one chunk beyond its .meta file.
type replayed struct {
	base   uint64 // length in .meta
	pieces []piece
	synced uint64
	sealed *record
	// broken: the records don't continue what .meta says. That is corruption,
	// unless the chunk's deletion follows, which removed .meta.
	broken bool
}

// recover brings the chunks that the log speaks of to what can be verified,
// writes that down, and begins a new log. Running it again after a crash in its middle gives the same.
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
	// Where the process alone ended, records may be in memory only. That a chunk was
	// deleted must outlast its files, which settle removes.
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

// replay takes in one record.
func (s *Store) replay(found map[meta.ChunkID]*replayed, r record) error {
	if r.typ == recMark {
		return nil
	}
	c, err := s.use(r.id)
	if err != nil {
		if kind := meta.KindOf(err); kind != meta.Corrupt && kind != meta.Version {
			return err
		}
		// An unreadable .meta file stays the trouble of its chunk alone, which
		// may still be deleted.
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
			return nil // overtaken by its deletion
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
			return nil // .meta was written after this
		}
		off := r.off
		for _, crc := range r.crcs {
			n := min(r.end-off, block-off%block)
			if off+n > have { // else a recovery that was cut short had kept this piece
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

// rebuild decides what a chunk's length is: the longest prefix that verifies,
// which must reach the synced mark; what is sealed ends where the seal says.
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
	// Bytes below base are .meta's word, which was durable before the log began.
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
				// The seal cut within this piece, and the file with it, maybe: the
				// seal's own checksum tells below whether what stays is right.
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
		// Rule 5: corrupt, not short. It keeps the length and the checksums that
		// the bytes ought to have, so that reads of the bad part fail and say why.
		s.slog.Error("chunk damaged below its synced length", "chunk", c.id.String(), "verified", good, "synced", keep)
		s.stats.corrupt.Add(1)
		c.damaged = true
	}
	for _, p := range f.pieces {
		if p.off+p.n <= keep {
			c.grow(p.n, []uint32{p.crc})
		} else if p.off < keep {
			// A seal cut within this piece: only the bytes themselves tell the checksum of what stays.
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
		return meta.E("recover", meta.Corrupt, c.id.String(), errors.New("synced beyond what was appended"))
	}
	// Whatever was checked piece by piece counts as verified from its first whole block on.
	for b := chunkserver.Blocks(f.base); b < chunkserver.Blocks(good); b++ {
		c.bits.set(b)
		c.wrote = true
	}
	if f.sealed != nil {
		c.state = meta.ChunkSealed
		if chunkserver.SealCRC(c.crcs) != f.sealed.crcs[0] && !c.damaged {
			s.slog.Error("sealed chunk doesn't match its seal", "chunk", c.id.String())
			s.stats.corrupt.Add(1)
			c.damaged = true
		}
	}
	c.synced, c.asked = c.length, min(c.length, max(r.Promised, f.base))
	return s.cut(c)
}

// growPart adds the first n bytes of a piece or block that a seal cut: the rest
// may be gone already. Whether they are right, the seal's checksum tells.
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

// cut drops from the data file what lies beyond the chunk's length.
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
		return nil // trimmed when it was sealed: to do it again would change ctime
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
