package store

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"

	"penstock.io/penstock/chunkserver"
	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/replica"
)

// The steps of receiving a copy of a sealed chunk from another server:
//
//  1. pull-ID is made beside the format file, and the directory is synced
//  2. the bytes go to chunks/xx/ID.data.tmp, which is synced
//  3. length and checksum are compared with the values in the journal; a bad replica of the
//     chunk on this disk is deleted, and a checkpoint removes the replica's records from the log
//  4. ID.data.tmp becomes ID.data, ID.meta.tmp is written and synced, the directory is synced
//  5. ID.meta.tmp becomes ID.meta, and the directory is synced: now the chunk exists
//  6. pull-ID is removed
//
// A chunk without a .meta file and without records in the log does not exist. Open removes the
// remains of interrupted copies. The names pull-ID tell Open the directories to look into, so
// that Open need not read all directories.
const pullPrefix = "pull-"

const receiveOp = "receive chunk"

// Incoming is a sealed chunk that is being received. Not for concurrent use.
type Incoming struct {
	s      *Store
	id     meta.ChunkID
	fence  meta.Fence
	length uint64
	crc    uint32

	f      File
	at     uint64
	wb     uint64
	crcs   []uint32
	done   bool
	placed bool
}

// Receive begins to receive a chunk that was sealed at length under fence with the checksum
// crc. If the store already has exactly this chunk, and the chunk is not known to be damaged,
// Receive returns nil and no error. The chunk stays invisible until Commit has returned nil;
// the caller ends the reception with Commit or Abort. Errors: Busy (the chunk is being received
// already), Fenced, Sealed (the store has a sound replica with other contents), NoSpace, IO.
func (s *Store) Receive(ctx context.Context, id meta.ChunkID, fence meta.Fence, length uint64, crc uint32) (*Incoming, error) {
	const op = receiveOp
	if id.IsZero() || length > maxChunk {
		return nil, meta.E(op, meta.Invalid, id.String(), fmt.Errorf("%d bytes", length))
	}
	if err := s.writable(); err != nil {
		return nil, err
	}
	p := s.pin(id)
	p.ending.Lock() // the record of a deletion never precedes the record of a fence
	same, err := s.receivable(id, fence, length, crc)
	p.ending.Unlock()
	s.unpin(p)
	if err != nil || same {
		return nil, err
	}
	free, err := s.space.take(s.d, 0, s.reserve)
	if err != nil {
		return nil, ioError(op, "", err)
	}
	if free < s.reserve+length {
		return nil, meta.E(op, meta.NoSpace, id.String(), fmt.Errorf("%d bytes free, %d are kept in reserve, %d are to come", free, s.reserve, length))
	}
	s.mu.Lock()
	if _, busy := s.coming[id]; busy {
		s.mu.Unlock()
		return nil, meta.E(op, meta.Busy, id.String(), errors.New("it is coming in already"))
	}
	s.coming[id] = struct{}{}
	s.mu.Unlock()
	in := &Incoming{s: s, id: id, fence: fence, length: length, crc: crc, crcs: make([]uint32, 0, chunkserver.Blocks(length))}
	if err := in.begin(); err != nil {
		in.Abort()
		return nil, s.diskError(receiveOp, id, err)
	}
	return in, nil
}

// receivable reports whether the store has the wanted chunk already, or returns an error if it
// has a chunk that must not be replaced. The caller holds the chunk's ending.
func (s *Store) receivable(id meta.ChunkID, fence meta.Fence, length uint64, crc uint32) (same bool, err error) {
	c, err := s.use(id)
	if k := meta.KindOf(err); k == meta.Corrupt || k == meta.Version {
		return false, nil // unreadable: to be replaced
	}
	if err != nil {
		return false, err
	}
	defer s.leave(c)
	r := s.replica(c)
	if r.State == replica.Sealed {
		r.CRC = chunkserver.SealCRC(c.crcs)
	}
	do, err := r.Install(fence, length, crc)
	if err != nil {
		return false, c.refused(err)
	}
	if do == replica.Write && r.State == replica.Sealed && !r.Damaged && r.Length == length && r.CRC == crc {
		// The contents are right; only the fence must rise, so that no earlier order deletes
		// the chunk.
		s.touch(c)
		c.fence = fence
		c.mu.Unlock()
		err := s.commit(recFence, fenceBody(id, fence), nil)
		c.mu.Lock()
		return err == nil, err
	}
	return do == replica.Nothing, nil
}

func (in *Incoming) begin() error {
	d := in.s.d
	f, err := d.Open(pullPrefix+in.id.String(), true)
	if err != nil {
		return err
	}
	if err := errors.Join(f.Close(), in.s.syncDir(".")); err != nil {
		return in.s.fail(ioError(receiveOp, in.id.String(), err))
	}
	if in.f, err = d.Open(dataName(in.id)+tmpSuffix, true); err != nil {
		return err
	}
	if err := in.f.Truncate(0); err != nil {
		return err
	}
	_ = in.f.Allocate(0, int64(in.length)) // only a hint
	return nil
}

// Write adds the next bytes. Only the last piece, and no other, may end within
// a checksum block.
func (in *Incoming) Write(p []byte) (int, error) {
	const op = receiveOp
	if in.at%block != 0 || uint64(len(p)) > in.length-in.at {
		return 0, meta.E(op, meta.Invalid, in.id.String(), fmt.Errorf("%d bytes at %d of %d", len(p), in.at, in.length))
	}
	if err := in.s.writable(); err != nil {
		return 0, err
	}
	free, err := in.s.space.take(in.s.d, uint64(len(p)), in.s.reserve)
	if err != nil {
		return 0, ioError(op, "", err)
	}
	if free < in.s.reserve {
		return 0, meta.E(op, meta.NoSpace, in.id.String(), fmt.Errorf("%d bytes free, %d are kept in reserve", free, in.s.reserve))
	}
	if _, err := in.f.WriteAt(p, int64(in.at)); err != nil {
		return 0, in.s.diskError(receiveOp, in.id, err)
	}
	crcs, _ := sums(in.at, p)
	in.crcs = append(in.crcs, crcs...)
	in.at += uint64(len(p))
	if in.at-in.wb >= writebackStep {
		in.f.StartWrite(int64(in.wb), int64(in.at-in.wb))
		in.wb = in.at
	}
	return len(p), nil
}

// Abort gives up the received bytes.
func (in *Incoming) Abort() {
	if in.done {
		return
	}
	in.done = true
	if in.f != nil {
		in.f.Close()
	}
	// The next Open removes files that can't be removed now. Open finds the files by pull-ID,
	// so pull-ID is removed last.
	gone := in.placed
	if !gone && in.s.failed.Load() == nil {
		err := in.s.d.Remove(dataName(in.id) + tmpSuffix)
		gone = err == nil || errors.Is(err, os.ErrNotExist)
		if err := in.s.syncDir(dirOf(in.id)); err != nil {
			_ = in.s.fail(ioError(receiveOp, in.id.String(), err))
			gone = false
		}
	}
	if gone {
		_ = in.s.d.Remove(pullPrefix + in.id.String())
	}
	in.s.mu.Lock()
	delete(in.s.coming, in.id)
	in.s.mu.Unlock()
}

// Commit makes the chunk exist, durably. Errors: Corrupt (other bytes were received than were
// sealed), and the errors of Receive.
func (in *Incoming) Commit(ctx context.Context) (chunkserver.Info, error) {
	const op = receiveOp
	var none chunkserver.Info
	defer in.Abort()
	s := in.s
	if crc := chunkserver.SealCRC(in.crcs); in.at != in.length || crc != in.crc && !s.o.UnsafeNoVerify {
		return none, meta.E(op, meta.Corrupt, in.id.String(),
			fmt.Errorf("%d bytes with checksum %08x came, %d with %08x were sealed", in.at, crc, in.length, in.crc))
	}
	if err := s.syncFile(in.f); err != nil {
		return none, s.diskError(receiveOp, in.id, err)
	}
	p := s.pin(in.id)
	defer s.unpin(p)
	p.ending.Lock()
	defer p.ending.Unlock()
	p.mu.Lock()
	defer p.mu.Unlock()
	if !p.loaded {
		p.loadErr = s.load(p)
		p.loaded = true
	}
	p.mu.Unlock()
	same, err := s.receivable(in.id, in.fence, in.length, in.crc)
	p.mu.Lock()
	switch {
	case err != nil:
		return none, err
	case same:
		return p.info(), nil
	}
	// From here on nothing else changes the chunk, even while locks are released for syncs:
	// appends are refused, and seals and deletions wait for ending.
	p.frozen = true
	defer func() { p.frozen = false }()
	if p.exists || p.loadErr != nil || p.deleted && !p.erased { // a bad replica, or a half-deleted chunk
		s.slog.Info("a bad replica is replaced", "chunk", in.id.String(), "state", p.state, "length", p.length, "damaged", p.damaged)
		if err := s.erase(p, p.fence); err != nil {
			return none, err
		}
	}
	p.mu.Unlock()
	err = s.emptyLogOf(p)
	if err == nil {
		err = in.place()
	}
	p.mu.Lock()
	if err != nil {
		return none, err
	}
	p.set(&chunkMeta{id: in.id, state: meta.ChunkSealed, fence: in.fence, length: in.length, crcs: in.crcs})
	p.deleted, p.erased, p.gone, p.unread, p.bits, p.wrote, p.checked = false, false, 0, false, nil, false, 0
	in.placed = true
	s.unbury(in.id)
	if h, err := s.hold(p, false, false); err == nil {
		s.toVerify(p, h, 0)
		h.done()
	}
	s.stats.received.Add(1)
	return p.info(), nil
}

// emptyLogOf ensures that the log has no records of a chunk: a replay would apply the records
// to the chunk's new files.
func (s *Store) emptyLogOf(c *chunk) error {
	for try := 0; ; try++ {
		s.points.mu.Lock()
		s.mu.Lock()
		_, dirty := s.dirty[c]
		s.mu.Unlock()
		s.points.mu.Unlock()
		if !dirty {
			return nil
		}
		if try > 2 {
			return meta.E(receiveOp, meta.Busy, c.id.String(), errors.New("the log goes on speaking of it"))
		}
		if err := s.Checkpoint(); err != nil {
			return err
		}
	}
}

// place moves the files to their places.
func (in *Incoming) place() error {
	s, id := in.s, in.id
	if err := s.d.Rename(dataName(id)+tmpSuffix, dataName(id)); err != nil {
		return s.diskError(receiveOp, id, err)
	}
	undo := func(err error) error {
		err = s.diskError(receiveOp, id, err)
		if s.failed.Load() == nil { // the disk is full
			_ = s.d.Remove(metaName(id) + tmpSuffix)
			_ = s.d.Remove(dataName(id))
		}
		return err
	}
	m := chunkMeta{id: id, state: meta.ChunkSealed, fence: in.fence, length: in.length, crcs: in.crcs}
	if err := writeBeside(s.d, metaName(id), m.encode(), !s.o.UnsafeNoSync); err != nil {
		return undo(err)
	}
	if err := s.syncDir(dirOf(id)); err != nil {
		return s.fail(ioError(receiveOp, id.String(), err))
	}
	if err := s.d.Rename(metaName(id)+tmpSuffix, metaName(id)); err != nil {
		return undo(err)
	}
	if err := s.syncDir(dirOf(id)); err != nil {
		return s.fail(ioError(receiveOp, id.String(), err))
	}
	return nil
}

// dropIncoming removes the remains of interrupted copies. The caller has replayed the log into
// .meta files.
func (s *Store) dropIncoming() error {
	const op = "drop interrupted copies"
	names, err := s.d.List(".")
	if err != nil {
		return ioError(op, "", err)
	}
	for _, n := range names {
		hex, ok := strings.CutPrefix(n, pullPrefix)
		if !ok {
			continue
		}
		id, err := meta.ParseChunkID(hex)
		if err != nil {
			continue
		}
		drop := []string{dataName(id) + tmpSuffix, metaName(id) + tmpSuffix}
		f, err := s.d.OpenRead(metaName(id))
		switch {
		case err == nil:
			f.Close()
		case errors.Is(err, os.ErrNotExist):
			drop = append(drop, dataName(id), packName(id))
		default:
			return ioError(op, metaName(id), err)
		}
		for _, name := range append(drop, n) {
			if err := s.d.Remove(name); err != nil && !errors.Is(err, os.ErrNotExist) {
				return ioError(op, name, err)
			}
		}
	}
	return nil
}
