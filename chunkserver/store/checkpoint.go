package store

import (
	"errors"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"penstock.io/penstock/meta"
)

// checkpoints completes the files of changed chunks, after which the log begins anew.
type checkpoints struct {
	s *Store

	mu     sync.Mutex   // one checkpoint at a time
	since  atomic.Int64 // bytes appended since the last checkpoint
	kick   chan struct{}
	doneMu sync.Mutex    // guards done and err
	done   chan struct{} // closed and replaced when a checkpoint ends
	err    error         // of the last checkpoint
}

// Checkpoint makes all chunks durable in their own files, after which the log begins anew.
// Appends and syncs continue meanwhile.
func (s *Store) Checkpoint() error {
	s.points.mu.Lock()
	defer s.points.mu.Unlock()
	err := s.Err()
	if err == nil {
		err = s.points.write()
	}
	s.points.doneMu.Lock()
	s.points.err = err
	close(s.points.done)
	s.points.done = make(chan struct{})
	s.points.doneMu.Unlock()
	return err
}

func (cp *checkpoints) write() error {
	cp.since.Store(0)
	// Records before pos belong to chunks that are dirty now, because chunks are marked before
	// their records are written. Some of the chunks will have newer records when settle reaches
	// the chunk; replay skips facts that .meta has already.
	pos := cp.s.log.end()
	cp.s.mu.Lock()
	dirty := cp.s.dirty
	cp.s.dirty = map[*chunk]struct{}{}
	cp.s.mu.Unlock()
	if len(dirty) == 0 && pos == cp.s.log.start {
		return nil
	}
	// Chunks that were deleted before pos go with this checkpoint. The record of a deletion
	// must outlast the chunk's files, and must not be read any more when the files are gone.
	err := cp.s.log.wait(pos)
	if err != nil {
		err = cp.s.fail(err)
	}
	if err == nil {
		err = cp.settle(dirty, pos)
	}
	if err == nil {
		err = cp.s.log.checkpoint(pos)
		if err != nil && meta.KindOf(err) != meta.NoSpace {
			err = cp.s.fail(err)
		}
	}
	if err != nil {
		// After a failure, all the chunks are dirty again.
		cp.s.mu.Lock()
		for c := range dirty {
			if _, again := cp.s.dirty[c]; again {
				c.pins-- // touched meanwhile, and pinned again
			}
			cp.s.dirty[c] = struct{}{}
		}
		cp.s.mu.Unlock()
		return err
	}
	for c := range dirty {
		cp.s.unpin(c)
	}
	cp.s.stats.checkpoints.Add(1)
	return nil
}

// batchFrom is the number of chunks from which a checkpoint syncs the whole
// file system three times rather than each file and directory.
const batchFrom = 16

const cpOp = "checkpoint"

// settle completes the data files and .meta files of dirty chunks: data synced, .meta written
// as a new file, synced and renamed, directories synced. The log is durable up to pos and will
// begin at pos.
func (cp *checkpoints) settle(dirty map[*chunk]struct{}, pos uint64) error {
	batch := len(dirty) >= cp.s.o.batch
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
		t, err := cp.snapshot(c, pos)
		if err != nil {
			return err
		}
		if t != nil {
			all = append(all, t)
			needData = needData || t.h != nil
		}
	}
	if batch && needData {
		if err := cp.syncAll(); err != nil {
			return err
		}
	}
	for _, t := range all {
		if !batch && t.h != nil {
			if err := cp.s.syncFile(t.h); err != nil {
				return cp.s.fail(ioError(cpOp, t.c.id.String(), err))
			}
			if t.made { // before .meta names the file
				if err := cp.s.syncDir(dirOf(t.c.id)); err != nil {
					return cp.s.fail(ioError(cpOp, t.c.id.String(), err))
				}
				t.c.mu.Lock()
				if t.c.file == t.h { // the chunk was not deleted meanwhile
					t.c.entry = true
				}
				t.c.mu.Unlock()
			}
		}
		if t.m != nil {
			if err := writeBeside(cp.s.d, metaName(t.c.id), t.m.encode(), !batch && !cp.s.o.UnsafeNoSync); err != nil {
				return cp.s.diskError(cpOp, t.c.id, err)
			}
		}
	}
	if batch {
		if err := cp.syncAll(); err != nil {
			return err
		}
	}
	dirs := map[string]struct{}{}
	for _, t := range all {
		if err := cp.replace(t); err != nil {
			return cp.s.diskError(cpOp, t.c.id, err)
		}
		dirs[dirOf(t.c.id)] = struct{}{}
	}
	if batch {
		if err := cp.syncAll(); err != nil {
			return err
		}
		dirs = nil
	}
	for dir := range dirs {
		if err := cp.s.syncDir(dir); err != nil {
			return cp.s.fail(ioError(cpOp, dir, err))
		}
	}
	cp.s.packs.dropPlain(all)
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

func (cp *checkpoints) snapshot(c *chunk, pos uint64) (*settling, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.dirty = false
	t := &settling{c: c}
	if c.gone > pos {
		cp.s.touch(c) // the log still has records of the chunk: the next checkpoint handles the chunk again
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
		cp.s.packs.dropNext(c)
		if err := cp.s.d.Remove(packName(c.id)); err != nil && !errors.Is(err, os.ErrNotExist) {
			cp.s.slog.Warn("a leftover stays", "chunk", c.id.String(), "err", err) // until the chunk is listed, or goes
		}
	}
	if c.next != nil {
		t.m.pack, t.h, t.next, t.made = c.next, c.nextFile, true, true
		t.h.refs.Add(1)
	} else if c.length > c.dataOK {
		t.h, err = cp.s.hold(c, true, false)
		t.made = !c.entry
	}
	return t, err
}

// replace puts a new .meta file in place, or removes the remains of a chunk that was deleted,
// perhaps meanwhile.
func (cp *checkpoints) replace(t *settling) error {
	c := t.c
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.erased || t.m == nil {
		if err := cp.s.d.Remove(metaName(c.id) + tmpSuffix); err != nil && !errors.Is(err, os.ErrNotExist) {
			return err
		}
		return cp.s.unlink(c.id)
	}
	if err := cp.s.d.Rename(metaName(c.id)+tmpSuffix, metaName(c.id)); err != nil {
		return err
	}
	c.dataOK = max(c.dataOK, min(t.m.length, c.length))
	if t.next {
		c.pack, c.plain = t.m.pack, true
		cp.s.packs.dropNext(c)
		c.closeFile()
	}
	return nil
}

func (cp *checkpoints) syncAll() error {
	if cp.s.o.UnsafeNoSync {
		return nil
	}
	if err := cp.s.d.SyncAll(); err != nil {
		return cp.s.fail(ioError(cpOp, "", err))
	}
	return nil
}

// run writes checkpoints: when an append asks for a checkpoint, when the log fills up, and at
// least every CheckpointEvery while the log has new records.
func (cp *checkpoints) run() {
	tick := time.NewTicker(250 * time.Millisecond)
	defer tick.Stop()
	last := time.Now()
	for {
		select {
		case <-cp.s.stop:
			return
		case <-cp.kick:
		case <-tick.C:
			cp.s.log.mark()
			cp.s.space.forget()
			cp.s.mu.Lock()
			idle := len(cp.s.dirty) == 0
			cp.s.mu.Unlock()
			if idle {
				last = time.Now()
				continue
			}
			if cp.s.log.pressure() == 0 && cp.since.Load() < checkpointBytes && time.Since(last) < cp.s.o.CheckpointEvery {
				continue
			}
		}
		if cp.s.failed.Load() != nil {
			_ = cp.s.Checkpoint() // only wakes the waiting callers
			continue
		}
		if err := cp.s.Checkpoint(); err != nil {
			cp.s.slog.Warn("a checkpoint of the disk's log failed; the store tries again", "err", err)
			// Leave a full disk some time to be cleared.
			select {
			case <-cp.s.stop:
				return
			case <-time.After(100 * time.Millisecond):
			}
		}
		last = time.Now()
	}
}

func (cp *checkpoints) want() {
	select {
	case cp.kick <- struct{}{}:
	default:
	}
}
