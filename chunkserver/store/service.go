package store

import (
	"context"
	"fmt"
	"sync"
	"time"

	"penstock.io/penstock/chunkserver"
	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/replica"
)

// Append implements chunkserver.Service. After Append returned nil, the bytes survive the end
// of the process, not of the machine.
func (s *Store) Append(ctx context.Context, id meta.ChunkID, fence meta.Fence, off uint64, p []byte, crc uint32) error {
	const op = "append"
	if len(p) == 0 || len(p) > chunkserver.MaxAppend || off > maxChunk || id.IsZero() {
		return meta.E(op, meta.Invalid, id.String(), fmt.Errorf("%d bytes at %d", len(p), off))
	}
	if err := s.admit(ctx, len(p)); err != nil {
		return err
	}
	s.lastAppend.Store(time.Now().UnixNano())
	crcs, whole := sums(off, p)
	if whole != crc && !s.o.UnsafeNoVerify {
		return meta.E(op, meta.Corrupt, id.String(), fmt.Errorf("the bytes at %d have checksum %08x, the sender says %08x", off, whole, crc))
	}
	c, err := s.use(id)
	if err != nil {
		return err
	}
	defer s.leave(c)
	r := s.replica(c)
	switch do, err := r.Append(fence, off, uint64(len(p))); {
	case err != nil:
		return c.refused(err)
	case do == replica.Compare:
		return s.repeated(c, &r, off, p)
	}
	h, err := s.hold(c, true, true)
	if err != nil {
		return err
	}
	defer h.done()
	if off == 0 {
		c.entry = false // the file is new, even where a fence was known before
		// A crash left part of an append that was never acknowledged.
		if n, err := h.Size(); err != nil || n > 0 {
			if err = h.Truncate(0); err != nil {
				return s.fail(ioError(op, id.String(), err))
			}
		}
	}
	if end := off + uint64(len(p)); off >= allocFrom && end > c.alloc {
		step := min(max(off, allocFrom), allocMost)
		if free, err := s.space.take(s.d, 0, s.reserve); err == nil && free > 16*step {
			_ = h.Allocate(int64(off), int64(step)) // only a hint: on a full disk, the write fails
		}
		c.alloc = off + step
	}
	if _, err := h.WriteAt(p, int64(off)); err != nil {
		if err = ioError(op, id.String(), err); meta.KindOf(err) != meta.NoSpace {
			return s.fail(err)
		}
		return err
	}
	s.touch(c)
	if _, err := s.log.append(recAppend, appendBody(id, fence, off, len(p), crcs), nil); err != nil {
		if meta.KindOf(err) != meta.NoSpace {
			return s.fail(err)
		}
		return err
	}
	if !c.exists {
		c.exists, c.state = true, meta.ChunkOpen
	}
	r.Appended(fence, uint64(len(p)))
	c.fence = r.Fence
	c.intact = c.intact || off == 0
	for b := (off + block - 1) / block; b < chunkserver.Blocks(off+uint64(len(p))); b++ {
		c.bits.set(b)
	}
	c.wrote = true
	if !c.queued {
		c.queued = true
		s.verified.enqueue(id)
	}
	c.grow(uint64(len(p)), crcs)
	if c.length-c.wb >= writebackStep {
		h.StartWrite(int64(c.wb), int64(c.length-c.wb))
		c.wb = c.length
	}
	s.stats.appends.Add(1)
	s.stats.appendBytes.Add(uint64(len(p)))
	return nil
}

// repeated acknowledges an append of existing bytes.
func (s *Store) repeated(c *chunk, r *replica.Replica, off uint64, p []byte) error {
	h, err := s.hold(c, false, false)
	if err != nil {
		return err
	}
	defer h.done()
	have := make([]byte, len(p))
	if _, err := h.ReadAt(have, int64(off)); err != nil {
		return ioError("append", c.id.String(), err)
	}
	if string(have) != string(p) {
		return c.refused(r.Differs(off))
	}
	return nil
}

// Sync implements chunkserver.Service.
func (s *Store) Sync(ctx context.Context, id meta.ChunkID, upTo uint64) (uint64, error) {
	if err := s.writable(); err != nil {
		return 0, err
	}
	c, err := s.use(id)
	if err != nil {
		return 0, err
	}
	defer s.leave(c)
	r := s.replica(c)
	do, err := r.Sync(upTo)
	if err != nil {
		return 0, c.refused(err)
	}
	s.stats.syncs.Add(1)
	if do == replica.Write {
		if err := s.syncTo(c, upTo); err != nil {
			return 0, err
		}
	}
	r = s.replica(c)
	c.asked = r.Promise(upTo)
	return c.asked, nil
}

// syncTo makes at least [0, upTo) durable. Meanwhile c.mu is unlocked.
func (s *Store) syncTo(c *chunk, upTo uint64) error {
	for c.synced < min(upTo, c.length) {
		if err := s.Err(); err != nil {
			return err
		}
		if busy := c.syncing; busy != nil {
			c.mu.Unlock()
			<-busy
			c.mu.Lock()
			continue
		}
		h, err := s.hold(c, true, false)
		if err != nil {
			return err
		}
		from, to, entry := c.synced, c.length, c.entry
		busy := make(chan struct{})
		c.syncing = busy
		s.touch(c)
		c.mu.Unlock()
		inline := to-from <= uint64(s.o.InlineMax)
		err = s.syncRange(c.id, h, from, to, entry, inline)
		h.done()
		c.mu.Lock()
		c.syncing = nil
		close(busy)
		if err != nil {
			return err
		}
		r := s.replica(c)
		r.SyncedTo(to)
		c.synced = r.Synced
		if !inline {
			c.dataOK, c.entry = max(c.dataOK, min(to, c.length)), true
		}
	}
	return nil
}

var inlinePool = sync.Pool{New: func() any { b := make([]byte, inlineMax); return &b }}

// syncRange makes [from, to) of a chunk durable. inline: the sync record carries the bytes.
// Otherwise the data file is synced first, and then the sync record is written.
func (s *Store) syncRange(id meta.ChunkID, h *handle, from, to uint64, entry, inline bool) error {
	const op = "sync"
	var tail []byte
	if inline {
		buf := inlinePool.Get().(*[]byte)
		defer inlinePool.Put(buf)
		tail = (*buf)[:to-from]
		if _, err := h.ReadAt(tail, int64(from)); err != nil {
			return s.fail(ioError(op, id.String(), err))
		}
		s.stats.inlineSyncs.Add(1)
	} else {
		if err := s.syncFile(h); err != nil {
			return s.fail(ioError(op, id.String(), err))
		}
		if !entry {
			if err := s.syncDir(dirOf(id)); err != nil {
				return s.fail(ioError(op, id.String(), err))
			}
		}
	}
	return s.commit(recSync, syncBody(id, from, to), tail)
}

// commit writes a record and waits until the record is durable. If the log is full, commit
// writes a checkpoint first.
func (s *Store) commit(typ recType, head, tail []byte) error {
	pos, err := s.log.append(typ, head, tail)
	if err != nil && meta.KindOf(err) == meta.NoSpace {
		if err = s.Checkpoint(); err == nil {
			pos, err = s.log.append(typ, head, tail)
		}
	}
	if err == nil {
		err = s.log.wait(pos)
	}
	if err != nil && meta.KindOf(err) != meta.NoSpace {
		return s.fail(err)
	}
	return err
}

// Seal implements chunkserver.Service.
func (s *Store) Seal(ctx context.Context, id meta.ChunkID, fence meta.Fence, final bool, length uint64) (chunkserver.Info, error) {
	var none chunkserver.Info
	if err := s.writable(); err != nil {
		return none, err
	}
	p := s.pin(id)
	defer s.unpin(p)
	p.ending.Lock()
	defer p.ending.Unlock()
	c, err := s.use(id)
	if err != nil {
		return none, err
	}
	defer s.leave(c)
	r := s.replica(c)
	switch do, err := r.Freeze(fence); {
	case meta.KindOf(err) == meta.NoSuchChunk:
		return none, c.refused(err)
	case err != nil:
		return c.info(), c.refused(err)
	case do == replica.Write:
		r.Frozen(fence)
		if err := s.raise(c, r.Fence); err != nil {
			return none, err
		}
	}
	var before Stamp
	if r.State != replica.Sealed {
		if before, err = s.verifyOpen(c); err != nil {
			return c.info(), err
		}
	}
	if !final {
		return s.tell(c, length)
	}
	r = s.replica(c)
	if do, err := r.End(fence, length); err != nil || do == replica.Nothing {
		return c.info(), c.refused(err)
	}
	c.frozen = true
	defer func() { c.frozen = false }()
	if err := s.syncTo(c, length); err != nil {
		return none, err
	}
	crcs, err := s.crcsAt(c, length)
	if err != nil {
		return none, err
	}
	// The record and the state change within one hold of c.mu, so that a checkpoint after the
	// record finds the chunk sealed.
	pos, err := s.write(c, recSeal, sealBody(id, fence, length, chunkserver.SealCRC(crcs)))
	if err != nil {
		return none, err
	}
	r.Ended(length, chunkserver.SealCRC(crcs))
	c.state, c.length, c.synced, c.asked, c.crcs = meta.ChunkSealed, r.Length, r.Synced, r.Synced, crcs
	c.dataOK = min(c.dataOK, length)
	c.mu.Unlock()
	err = s.log.wait(pos)
	c.mu.Lock()
	if err != nil {
		return none, s.fail(err)
	}
	s.trim(c, before)
	if c.dataOK == length {
		c.closeFile() // nothing more to sync; the next checkpoint may be far
	}
	s.stats.seals.Add(1)
	return c.info(), nil
}

// tell answers a freeze with the length that a seal could keep, which is the length of the
// chunk, and with the checksum at length. All bytes are made durable first, because the journal
// is going to name the bytes.
func (s *Store) tell(c *chunk, length uint64) (chunkserver.Info, error) {
	if c.state == meta.ChunkSealed {
		return c.info(), nil
	}
	r := s.replica(c)
	if err := s.syncTo(c, r.Tells()); err != nil {
		return chunkserver.Info{}, err
	}
	i := c.info()
	if length == 0 {
		length = i.Length
	}
	crcs, err := s.crcsAt(c, min(length, i.Length))
	if err != nil {
		return i, err
	}
	i.CRC, i.Whole, i.Synced = chunkserver.SealCRC(crcs), c.intact, c.asked
	return i, nil
}

// write adds a record to the log, giving up c.mu only if the log must be
// emptied first.
func (s *Store) write(c *chunk, typ recType, body []byte) (pos uint64, err error) {
	for try := 0; ; try++ {
		s.touch(c)
		pos, err = s.log.append(typ, body, nil)
		if err == nil || try > 0 || meta.KindOf(err) != meta.NoSpace {
			break
		}
		c.mu.Unlock()
		err = s.Checkpoint()
		c.mu.Lock()
		if err != nil {
			break
		}
	}
	if err != nil && meta.KindOf(err) != meta.NoSpace {
		return 0, s.fail(err)
	}
	return pos, err
}

// raise makes a fence durable, so that an older writer is refused for ever, even if the store
// has nothing of the chunk yet.
func (s *Store) raise(c *chunk, fence meta.Fence) error {
	if c.exists && c.fence == fence {
		return nil
	}
	s.touch(c)
	if !c.exists {
		c.exists, c.state = true, meta.ChunkOpen
	}
	c.fence = fence
	c.mu.Unlock()
	err := s.commit(recFence, fenceBody(c.id, fence), nil)
	c.mu.Lock()
	return err
}

// crcsAt is the table of checksums of the first length bytes.
func (s *Store) crcsAt(c *chunk, length uint64) ([]uint32, error) {
	n := chunkserver.Blocks(length)
	if length == c.length {
		return c.crcs, nil
	}
	crcs := append([]uint32(nil), c.crcs[:n]...)
	if length%block == 0 {
		return crcs, nil
	}
	// The seal cuts the last block: verify the whole block first, then checksum the rest.
	h, err := s.hold(c, false, false)
	if err != nil {
		return nil, err
	}
	defer h.done()
	buf := getBlock()
	defer putBlock(buf)
	at := (n - 1) * block
	b := (*buf)[:min(block, c.length-at)]
	if err := s.readBlock(c.id, h, b, at, c.crcs[n-1]); err != nil {
		return nil, err
	}
	crcs[n-1] = chunkserver.CRC(b[:length-at])
	return crcs, nil
}

// trim cuts a sealed chunk's data file to the chunk's length, which frees space that was
// allocated ahead. A failure only costs space; recovery and fsck notice the failure. before is
// the stamp with which the whole file was verified, or zero.
func (s *Store) trim(c *chunk, before Stamp) {
	h, err := s.hold(c, true, false)
	if err != nil {
		return // nothing was ever written
	}
	defer h.done()
	upTo := uint64(0)
	if now, err := h.Stamp(); err == nil && now == before {
		upTo = c.length
	}
	if err := h.Truncate(int64(c.length)); err != nil {
		s.slog.Warn("the file of a sealed chunk could not be cut to the chunk's length", "chunk", c.id.String(), "err", err)
	}
	s.toVerify(c, h, upTo)
	c.bits = nil
}

// toVerify schedules the verification of a newly sealed chunk from upTo on.
func (s *Store) toVerify(c *chunk, h *handle, upTo uint64) {
	if c.length == 0 {
		return
	}
	if now, err := h.Stamp(); err == nil {
		s.verified.vouch(c.id, now, upTo)
	}
	if upTo < c.length {
		s.verified.enqueue(c.id)
	}
}

// Stat implements chunkserver.Service.
func (s *Store) Stat(ctx context.Context, id meta.ChunkID) (chunkserver.Info, error) {
	c, err := s.use(id)
	if err != nil {
		return chunkserver.Info{}, err
	}
	defer s.leave(c)
	if !c.exists {
		return chunkserver.Info{}, c.noSuch("stat")
	}
	return c.info(), nil
}

// Delete implements chunkserver.Service.
func (s *Store) Delete(ctx context.Context, id meta.ChunkID, fence meta.Fence) error {
	if err := s.writable(); err != nil {
		return err
	}
	c := s.pin(id)
	defer s.unpin(c)
	c.ending.Lock()
	defer c.ending.Unlock()
	// Unlike use, go on where .meta is unreadable: the chunk may still go.
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.loaded {
		c.loadErr = s.load(c)
		c.loaded = true
	}
	r := s.replica(c)
	if _, err := r.Delete(fence); err != nil {
		return c.refused(err)
	}
	return s.erase(c, fence)
}

// erase deletes a chunk for good, by an order of the given fence. c.ending and
// c.mu are held; c.mu is given up meanwhile.
func (s *Store) erase(c *chunk, fence meta.Fence) error {
	id, r := c.id, s.replica(c)
	r.Gone(fence)
	s.bury(id, r.Fence)
	if c.exists || c.loadErr != nil || c.deleted && !c.erased {
		s.touch(c)
		c.unread = c.unread || c.loadErr != nil
		c.deleted, c.exists, c.loadErr, c.fence, c.intact = true, false, nil, r.Fence, false
		// The record and its position within one hold of c.mu, so that a checkpoint from which
		// the log begins after the record finds the chunk deleted.
		pos, err := s.write(c, recDelete, fenceBody(id, c.fence)[:16])
		if err != nil {
			return err
		}
		c.gone = pos
		c.mu.Unlock()
		err = s.log.wait(pos)
		c.mu.Lock()
		if err != nil {
			return s.fail(err)
		}
		c.erased = true
		s.stats.deletes.Add(1)
	}
	c.closeFile()
	s.packs.dropNext(c)
	c.pack, c.packing, c.dense, c.plain = nil, nil, false, false
	c.length, c.synced, c.asked, c.dataOK, c.crcs, c.bits, c.checked, c.damaged = 0, 0, 0, 0, nil, nil, 0, false
	s.verified.forget(id)
	return s.unlink(id)
}
