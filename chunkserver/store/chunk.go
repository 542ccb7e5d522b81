package store

import (
	"container/list"
	"errors"
	"os"
	"sync"
	"sync/atomic"

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

// A chunk larger than allocFrom is allocated ahead in steps of the chunk's present size, at most
// allocMost, so that chunks written at the same time lie in long runs.
const (
	allocFrom = 4 << 20
	allocMost = 64 << 20
)

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

// unlink removes a chunk's files, as far as they exist.
func (s *Store) unlink(id meta.ChunkID) error {
	for _, name := range []string{dataName(id), packName(id), metaName(id)} {
		if err := s.d.Remove(name); err != nil && !errors.Is(err, os.ErrNotExist) {
			return ioError("delete", id.String(), err)
		}
	}
	return nil
}

// isDense reports whether compression would save nothing.
func (c *chunk) isDense() bool { return c.dense || c.length < packFrom }

// stored returns a chunk's compression and stored size: the plain length, or the size of the
// compressed file.
func (c *chunk) stored() (meta.Compression, uint64) {
	if c.pack == nil {
		return meta.CompressNone, c.length
	}
	return c.pack.alg, c.pack.size()
}
