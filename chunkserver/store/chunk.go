package store

import (
	"container/list"
	"context"
	"errors"
	"fmt"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"penstock.io/penstock/chunkserver"
	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/replica"
)

const block = chunkserver.ChecksumBlock

// chunk is the state of one chunk in memory. The first use loads a chunk. An unused chunk
// leaves memory, unless the log has facts about the chunk that the .meta file lacks.
type chunk struct {
	id meta.ChunkID

	// Guarded by Store.mu.
	pins  int // users, plus one while dirty
	where *list.Element

	// ending is held during Seal and Delete, also during their syncs: only one of the two runs
	// at a time.
	ending sync.Mutex

	mu      sync.Mutex
	loaded  bool
	loadErr error // .meta is unreadable: every operation but Delete returns this error
	exists  bool
	deleted bool
	erased  bool   // deleted, and the record of the deletion is durable: the files may be removed
	gone    uint64 // the log's position after the record of the deletion; 0: no record yet
	unread  bool   // .meta was unreadable at the deletion
	damaged bool   // bytes below the synced mark were found bad; no appends
	intact  bool   // begun by this process, so no acknowledged byte is missing
	dirty   bool   // in Store.dirty, or in a running checkpoint
	frozen  bool   // a final seal is under way
	state   meta.ChunkState
	fence   meta.Fence
	length  uint64
	// crcs are the checksums of all blocks of [0, length); the last checksum covers the present
	// bytes of a partial block. INVARIANT: len(crcs) == Blocks(length).
	crcs []uint32
	// INVARIANT: synced <= length; the bytes [0, synced) can be had after a
	// power loss from the data file and the log together.
	synced  uint64
	dataOK  uint64        // durable in the data file
	asked   uint64        // the highest mark acknowledged by a sync; the rest of synced was never acknowledged
	entry   bool          // the data file's directory entry is durable
	syncing chan struct{} // closed when the sync under way ends
	file    *handle       // nil until needed
	wb      uint64        // bytes for which write-back was started
	alloc   uint64        // bytes allocated ahead
	bits    bitmap        // while open: blocks verified, or written, since Open
	wrote   bool          // some of bits were only written, or verified in pieces
	whole   Stamp         // while open and not wrote: of the file when bits were verified
	// checked is up to where an open chunk's whole blocks were verified; for
	// sealed chunks Store.vouched tells.
	checked  uint64
	checking *checking // the verification under way
	queued   bool      // to be verified, since something was appended

	pack     *packing // layout of the .pack file; nil: not compressed
	dense    bool     // compression was found to save nothing
	packing  *byte    // identifies the running compression, which is void when packing has changed
	next     *packing // written, for the next checkpoint to put in place
	nextFile *handle
	plain    bool // the .meta with pack is renamed in the cache, and the data file still exists
}

// handle is an open data file. The last user closes the file.
type handle struct {
	File
	writable bool
	refs     atomic.Int32
}

func (h *handle) done() {
	if h.refs.Add(-1) == 0 {
		h.Close()
	}
}

// bitmap is a growing set of block numbers.
type bitmap []uint64

func (b bitmap) has(i uint64) bool { return i/64 < uint64(len(b)) && b[i/64]>>(i%64)&1 != 0 }

func (b *bitmap) set(i uint64) {
	for i/64 >= uint64(len(*b)) {
		*b = append(*b, 0)
	}
	(*b)[i/64] |= 1 << (i % 64)
}

func (c *chunk) closeFile() {
	if c.file != nil {
		c.file.done()
		c.file = nil
	}
}

// hold takes a reference on the data file, and opens the file if necessary.
func (s *Store) hold(c *chunk, write, create bool) (*handle, error) {
	if c.file == nil || write && !c.file.writable {
		var f File
		var err error
		switch {
		case c.pack != nil && write:
			err = errPacked
		case c.pack != nil:
			if f, err = s.d.OpenRead(packName(c.id)); err == nil {
				f = &packedFile{File: f, p: c.pack, length: c.length, cache: &s.packs.frames}
			}
		case write:
			f, err = s.d.Open(dataName(c.id), create)
		default:
			f, err = s.d.OpenRead(dataName(c.id))
		}
		if err != nil {
			return nil, ioError("open chunk", c.id.String(), err)
		}
		c.closeFile()
		c.file = &handle{File: f, writable: write}
		c.file.refs.Store(1)
	}
	c.file.refs.Add(1)
	return c.file, nil
}

// use finds a chunk, pinned and locked. The caller calls leave. With an error, nothing is held.
func (s *Store) use(id meta.ChunkID) (*chunk, error) {
	c := s.pin(id)
	if s.shut.Load() {
		s.unpin(c)
		return nil, errShut(id)
	}
	c.mu.Lock()
	if !c.loaded {
		c.loadErr = s.load(c)
		c.loaded = true
	}
	if c.loadErr != nil {
		err := c.loadErr
		s.leave(c)
		return nil, err
	}
	return c, nil
}

func (s *Store) leave(c *chunk) {
	c.mu.Unlock()
	s.unpin(c)
}

func (s *Store) pin(id meta.ChunkID) *chunk {
	s.mu.Lock()
	defer s.mu.Unlock()
	c := s.chunks[id]
	if c == nil {
		c = &chunk{id: id}
		s.chunks[id] = c
	}
	if c.where != nil {
		s.lru.Remove(c.where)
		c.where = nil
	}
	c.pins++
	return c
}

func (s *Store) unpin(c *chunk) {
	var drop *chunk
	s.mu.Lock()
	if c.pins--; c.pins == 0 {
		c.where = s.lru.PushBack(c)
		if s.lru.Len() > maxHandles {
			drop = s.lru.Remove(s.lru.Front()).(*chunk)
			drop.where = nil
			delete(s.chunks, drop.id)
		}
	}
	s.mu.Unlock()
	if drop != nil {
		drop.mu.Lock()
		drop.closeFile()
		s.packs.dropNext(drop)
		drop.mu.Unlock()
	}
}

// touch notes that the log will get facts about c that .meta lacks.
func (s *Store) touch(c *chunk) {
	if c.dirty {
		return
	}
	c.dirty = true
	s.mu.Lock()
	if _, ok := s.dirty[c]; !ok { // after a failed checkpoint, c is in dirty already
		s.dirty[c] = struct{}{}
		c.pins++
	}
	many := len(s.dirty) >= maxDirty
	s.mu.Unlock()
	if many {
		s.points.want()
	}
}

// load reads a chunk's .meta file.
func (s *Store) load(c *chunk) error {
	b, err := readFile(s.d, metaName(c.id), maxMeta)
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err != nil {
		err = ioError("read chunk metadata", c.id.String(), err)
		s.bad.tellFailed(c.id, err)
		return err
	}
	m, err := decodeMeta(c.id, b)
	if err != nil {
		if meta.KindOf(err) == meta.Corrupt {
			s.stats.corrupt.Add(1)
		}
		s.bad.tell(c.id)
		return err
	}
	c.set(m)
	return nil
}

// set takes over the state in a .meta file.
func (c *chunk) set(m *chunkMeta) {
	c.exists, c.state, c.damaged, c.fence = true, m.state, m.damaged, m.fence
	c.length, c.synced, c.dataOK, c.wb = m.length, m.length, m.length, m.length
	c.entry = m.length > 0 // a .meta may be of a fence alone, and the data file newer
	c.asked = m.length     // as far as is known
	c.crcs, c.pack, c.dense = m.crcs, m.pack, m.dense
}

// grow adds the checksums of the pieces of an append of n bytes at the end.
func (c *chunk) grow(n uint64, crcs []uint32) {
	for _, crc := range crcs {
		in := c.length % block
		k := min(n, block-in)
		if in == 0 {
			c.crcs = append(c.crcs, crc)
		} else {
			last := &c.crcs[len(c.crcs)-1]
			*last = chunkserver.CombineCRC(*last, crc, k)
		}
		c.length += k
		n -= k
	}
}

// sums cuts p, which lies at off, at block boundaries, and returns the checksum of each piece
// and of p as a whole.
func sums(off uint64, p []byte) (crcs []uint32, whole uint32) {
	crcs = make([]uint32, 0, pieces(off, uint64(len(p))))
	for len(p) > 0 {
		k := min(uint64(len(p)), block-off%block)
		crc := chunkserver.CRC(p[:k])
		if len(crcs) == 0 {
			whole = crc
		} else {
			whole = chunkserver.CombineCRC(whole, crc, k)
		}
		crcs = append(crcs, crc)
		off += k
		p = p[k:]
	}
	return crcs, whole
}

func (c *chunk) info() chunkserver.Info {
	i := chunkserver.Info{ID: c.id, State: c.state, Length: c.length, Synced: c.synced, Fence: c.fence}
	if c.state == meta.ChunkSealed {
		i.CRC = chunkserver.SealCRC(c.crcs)
	}
	i.Form, i.Stored = c.stored()
	i.Dense = c.isDense()
	return i
}

// replica returns c in the form that the deciding machine of meta/replica takes.
func (s *Store) replica(c *chunk) replica.Replica {
	r := replica.Replica{Fence: c.fence, Length: c.length, Synced: c.synced, Promised: c.asked, Damaged: c.damaged, Ending: c.frozen, Off: s.off}
	switch {
	case c.exists && c.state == meta.ChunkSealed:
		r.State = replica.Sealed
	case c.exists:
		r.State = replica.Open
	default:
		tomb, buried := s.tomb(c.id)
		if c.deleted || buried {
			r.State = replica.Deleted
		}
		if r.Fence.Less(tomb) {
			r.Fence = tomb
		}
	}
	return r
}

// refused names the chunk in the machine's refusal.
func (c *chunk) refused(err error) error {
	var e *meta.Error
	if errors.As(err, &e) {
		e.Subject = c.id.String()
	}
	return err
}

func (c *chunk) noSuch(op string) error { return meta.E(op, meta.NoSuchChunk, c.id.String(), nil) }

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

// A chunk larger than allocFrom is allocated ahead in steps of the chunk's present size, at most
// allocMost, so that chunks written at the same time lie in long runs.
const (
	allocFrom = 4 << 20
	allocMost = 64 << 20
)

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

func (s *Store) syncFile(h File) error {
	if s.o.UnsafeNoSync {
		return nil
	}
	return h.Sync()
}

func (s *Store) syncDir(name string) error {
	if s.o.UnsafeNoSync {
		return nil
	}
	return s.d.SyncDir(name)
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
		s.slog.Warn("sealed chunk not trimmed", "chunk", c.id.String(), "err", err)
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

// unlink removes a chunk's files, as far as they exist.
func (s *Store) unlink(id meta.ChunkID) error {
	for _, name := range []string{dataName(id), packName(id), metaName(id)} {
		if err := s.d.Remove(name); err != nil && !errors.Is(err, os.ErrNotExist) {
			return ioError("delete", id.String(), err)
		}
	}
	return nil
}

// bury remembers a deleted chunk and the fence of the deletion for a while.
func (s *Store) bury(id meta.ChunkID, fence meta.Fence) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if old, ok := s.tombs[id]; ok {
		if old.Less(fence) {
			s.tombs[id] = fence
		}
		return
	}
	if len(s.tombQ) >= maxTombs {
		delete(s.tombs, s.tombQ[0])
		s.tombQ = s.tombQ[1:]
	}
	s.tombs[id] = fence
	s.tombQ = append(s.tombQ, id)
}

func (s *Store) buried(id meta.ChunkID) bool {
	_, ok := s.tomb(id)
	return ok
}

func (s *Store) tomb(id meta.ChunkID) (meta.Fence, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	f, ok := s.tombs[id]
	return f, ok
}

// List calls fn for every chunk on the disk, in no order, until fn returns false. err is set
// where a chunk's metadata is unreadable. A data file, plain or compressed, without any record
// (left by a crash) is listed as an open and empty chunk; it may be deleted.
func (s *Store) List(ctx context.Context, fn func(info chunkserver.Info, err error) bool) error {
	for i := range chunkDirs {
		dir := fmt.Sprintf("%s/%02x", chunksDir, i)
		names, err := s.d.List(dir)
		if err != nil {
			return ioError("list chunks", dir, err)
		}
		ids := map[meta.ChunkID]struct{}{}
		for _, n := range names {
			if id, ok := chunkOf(n); ok {
				ids[id] = struct{}{}
			}
		}
		// Chunks of which only the log knows so far.
		s.mu.Lock()
		for c := range s.dirty {
			if dirOf(c.id) == dir {
				ids[c.id] = struct{}{}
			}
		}
		s.mu.Unlock()
		for id := range ids {
			if err := ctx.Err(); err != nil {
				return meta.E("list chunks", meta.Canceled, "", err)
			}
			info, err := s.Stat(ctx, id)
			if meta.KindOf(err) == meta.NoSuchChunk {
				if s.buried(id) {
					continue
				}
				info, err = chunkserver.Info{ID: id, State: meta.ChunkOpen}, nil
			}
			if !fn(info, err) {
				return nil
			}
		}
	}
	return nil
}
