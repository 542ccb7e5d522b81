package store

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"sync"
	"time"

	"penstock.io/penstock/chunkserver"
	"penstock.io/penstock/meta"
)

// The file DIR/verified lists sealed chunks of which a prefix (mostly the whole chunk) was read
// and compared with the checksums since the machine booted, so that a restart of the process
// does not lose the list:
//
//	 0  4  "PSCV"
//	 4  1  version, 1
//	 5  3  zero
//	 8 16  disk
//	24 40  boot id of the machine, padded with zeros
//	64  4  number of entries
//	68     entries of 48 bytes: chunk id 16, then of its data file: inode number 8, ctime 8 (ns since 1970), size 8, verified up to 8
//	    4  CRC32C of all before
//
// An entry is valid only while the data file has the same inode number, ctime and size: every
// write to the file changes ctime. A chunk whose entry ends before the chunk's end is verified
// soon. The list is only a cache: a save writes the whole list to another file, without syncs,
// and renames the file. A file that is damaged, or of another version, disk or boot, counts as
// empty.
const (
	verifiedName    = "verified"
	verifiedMagic   = "PSCV"
	verifiedVersion = 1
	verifiedHead    = 68
	verifiedEntry   = 48
	bootLen         = 40
	// maxVerified bounds the chunks that are remembered.
	maxVerified = 1 << 18
)

// Stamp identifies a state of a file's contents: every write to the file changes the stamp.
type Stamp struct {
	Inode   uint64
	Changed int64 // ctime, in nanoseconds since 1970
	Size    int64
}

// vouched is the verified part of a sealed chunk whose data file has the stamp.
type vouched struct {
	stamp Stamp
	upTo  uint64
}

// checking is a verification under way.
type checking struct {
	done   chan struct{}
	urgent bool // somebody waits; guarded by chunk.mu
}

const (
	// quietAppend and quietRead are how long nobody may have appended or read
	// before chunks are verified in the background.
	quietAppend = 2 * time.Second
	quietRead   = 200 * time.Millisecond
	// checkStep is the number of bytes read and compared at a time.
	checkStep = 1 << 20
	// checkAhead is how far ahead of the comparison the kernel is asked to read, in bytes.
	checkAhead = 8 << 20
	// settleTime is the least age at which a ctime distinguishes a state of a file from a later
	// state: the clock behind ctime may tick every 10 ms only.
	settleTime = 20 * time.Millisecond
	// saveEvery is the least time between two writings of the record.
	saveEvery = 2 * time.Second
	// closeCheck bounds the time for which Close verifies the chunks sealed last, most likely
	// from the page cache.
	closeCheck = time.Second
)

// vouchedFor returns the verified length of a sealed chunk whose data file has the stamp now.
func (s *Store) vouchedFor(id meta.ChunkID, now Stamp) uint64 {
	s.vmu.Lock()
	defer s.vmu.Unlock()
	if v := s.vouched[id]; v.stamp == now {
		return v.upTo
	}
	return 0
}

// knows reports whether a sealed chunk's data file is unchanged since the last note about it.
func (s *Store) knows(id meta.ChunkID, now Stamp) bool {
	s.vmu.Lock()
	defer s.vmu.Unlock()
	v, ok := s.vouched[id]
	return ok && v.stamp == now
}

// vouch notes that a sealed chunk is verified up to upTo, and schedules the rest.
func (s *Store) vouch(id meta.ChunkID, stamp Stamp, upTo uint64) {
	s.vmu.Lock()
	defer s.vmu.Unlock()
	if _, ok := s.vouched[id]; !ok && len(s.vouched) >= maxVerified {
		for other := range s.vouched { // any chunk: the chunk will be verified again
			delete(s.vouched, other)
			break
		}
	}
	s.vouched[id] = vouched{stamp, upTo}
	s.unsaved = true
}

// forget forgets the verification of a deleted chunk.
func (s *Store) forget(id meta.ChunkID) {
	s.vmu.Lock()
	defer s.vmu.Unlock()
	if _, ok := s.vouched[id]; ok {
		delete(s.vouched, id)
		s.unsaved = true
	}
	delete(s.waiting, id)
}

// enqueue has a chunk verified when the disk is quiet.
func (s *Store) enqueue(id meta.ChunkID) {
	s.vmu.Lock()
	defer s.vmu.Unlock()
	if _, ok := s.waiting[id]; ok || len(s.waiting) >= maxVerified {
		return
	}
	s.waiting[id] = struct{}{}
	s.queue = append(s.queue, id)
}

// next takes a chunk from the queue.
func (s *Store) next() (meta.ChunkID, bool) {
	s.vmu.Lock()
	defer s.vmu.Unlock()
	for len(s.queue) > 0 {
		id := s.queue[0]
		s.queue = s.queue[1:]
		if _, ok := s.waiting[id]; ok {
			delete(s.waiting, id)
			return id, true
		}
	}
	return meta.ChunkID{}, false
}

// Verify ensures that all of a sealed chunk, or all whole blocks of an open chunk, were read
// and compared with the checksums since the machine booted, and reads the missing blocks.
// Verify serves readers that read the data file directly. Nobody gets the file of a compressed
// chunk, so Verify reads no compressed chunk; ReadAll reads any chunk. Errors: NoSuchChunk,
// Corrupt, IO, Canceled, Busy (another process writes to the data file).
func (s *Store) Verify(ctx context.Context, id meta.ChunkID) error {
	return s.verify(ctx, id, nil)
}

// verify is Verify. If pace is not nil, verify calls pace between steps, not locked, with the
// time that the last step took. pace may wait, and may end the verification with an error.
func (s *Store) verify(ctx context.Context, id meta.ChunkID, pace func(time.Duration) error) error {
	const op = "verify chunk"
	c, err := s.use(id)
	if err != nil {
		return err
	}
	defer s.leave(c)
	for try := 0; ; try++ {
		if !c.exists {
			return c.noSuch(op)
		}
		c.queued = false
		if c.length == 0 || c.pack != nil { // nobody gets the file of a compressed chunk
			return nil
		}
		h, err := s.hold(c, false, false)
		if err != nil {
			return err
		}
		from, stamp, err := s.checkedOf(c, h)
		sealed, to := c.state == meta.ChunkSealed, c.length
		if !sealed {
			to = to / block * block
		}
		if err != nil || from >= to {
			h.done()
			return err
		}
		if k := c.checking; k != nil {
			h.done()
			k.urgent = k.urgent || pace == nil
			c.mu.Unlock()
			select {
			case <-k.done:
			case <-ctx.Done():
			}
			c.mu.Lock()
			if ctx.Err() != nil {
				return meta.E(op, meta.Canceled, id.String(), ctx.Err())
			}
			continue
		}
		k := &checking{done: make(chan struct{})}
		c.checking = k
		crcs := append([]uint32(nil), c.crcs[:chunkserver.Blocks(to)]...)
		c.mu.Unlock()
		if pace == nil {
			s.checks <- struct{}{}
		}
		if sealed {
			if age := time.Since(time.Unix(0, stamp.Changed)); age >= 0 && age < settleTime {
				time.Sleep(settleTime - age)
			}
		}
		upTo, err := s.compare(ctx, c, k, h, crcs, from, to, pace)
		if pace == nil {
			<-s.checks
		}
		var after Stamp
		serr := error(nil)
		if sealed {
			after, serr = h.Stamp()
		}
		h.done()
		c.mu.Lock()
		c.checking = nil
		close(k.done)
		switch {
		case serr != nil:
			return ioError(op, id.String(), serr)
		case !c.exists || sealed && after != stamp || !sealed && c.state == meta.ChunkSealed:
			// Changed meanwhile: the bytes that were read prove nothing.
			if err == nil && pace == nil {
				if try < 3 {
					continue
				}
				err = meta.E(op, meta.Busy, id.String(), errors.New("another process writes to the data file"))
			}
		case sealed:
			s.vouch(id, stamp, upTo)
		default:
			c.checked = max(c.checked, upTo)
		}
		return err
	}
}

// checkedOf returns the length up to which a chunk is verified, and the stamp of a sealed
// chunk. The caller holds c.mu.
func (s *Store) checkedOf(c *chunk, h *handle) (upTo uint64, stamp Stamp, err error) {
	if c.state != meta.ChunkSealed {
		return c.checked, Stamp{}, nil
	}
	if stamp, err = h.Stamp(); err != nil {
		return 0, stamp, ioError("verify chunk", c.id.String(), err)
	}
	return s.vouchedFor(c.id, stamp), stamp, nil
}

// compare reads [from, to), whole blocks except at the end, and compares the blocks with crcs.
// compare returns the length up to which all blocks are right.
func (s *Store) compare(ctx context.Context, c *chunk, k *checking, h *handle, crcs []uint32, from, to uint64, pace func(time.Duration) error) (uint64, error) {
	buf := checkPool.Get().(*[]byte)
	defer checkPool.Put(buf)
	from = from / block * block
	ahead := from
	for from < to {
		start := time.Now()
		if from+checkAhead/2 >= ahead {
			n := min(to, from+checkAhead) - ahead
			h.WillNeed(int64(ahead), int64(n))
			ahead += n
		}
		p := (*buf)[:min(checkStep, to-from)]
		n, err := h.ReadAt(p, int64(from))
		if err != nil && !errors.Is(err, io.EOF) {
			err = ioError("verify chunk", c.id.String(), err)
			s.tellBad(c.id)
			return from, err
		}
		s.stats.checked.Add(uint64(n))
		for at := 0; at < len(p); at += block {
			q := p[at:min(len(p), at+block)]
			if (at+len(q) > n || chunkserver.CRC(q) != crcs[from/block]) && !s.o.UnsafeNoVerify {
				s.stats.corrupt.Add(1)
				s.slog.Error("verification found a bad block", "chunk", c.id.String(), "offset", from)
				bad := meta.E("verify chunk", meta.Corrupt, c.id.String(), fmt.Errorf("block at %d", from))
				s.tellBad(c.id)
				return from, bad
			}
			from += uint64(len(q))
		}
		if ctx.Err() != nil {
			return from, meta.E("verify chunk", meta.Canceled, c.id.String(), ctx.Err())
		}
		if pace == nil {
			continue
		}
		c.mu.Lock()
		urgent := k.urgent
		c.mu.Unlock()
		if !urgent {
			if err := pace(time.Since(start)); err != nil {
				return from, err
			}
		}
	}
	return to, nil
}

var checkPool = sync.Pool{New: func() any { b := make([]byte, checkStep); return &b }}

// quiet reports whether the disk has been unused for quietAppend and quietRead.
func (s *Store) quiet() bool {
	now := time.Now().UnixNano()
	return now-s.lastAppend.Load() >= int64(quietAppend) && now-s.lastRead.Load() >= int64(quietRead)
}

// check verifies the queued chunks whenever the disk is quiet, at half the possible speed.
func (s *Store) check() {
	tick := time.NewTicker(100 * time.Millisecond)
	defer tick.Stop()
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	var saved time.Time
	busy := meta.E("verify chunk", meta.Canceled, "", nil)
	pace := func(took time.Duration) error {
		select {
		case <-s.stop:
			return busy
		case <-time.After(min(took, time.Second)):
		}
		if !s.quiet() {
			return busy
		}
		return nil
	}
	for {
		select {
		case <-s.stop:
			return
		case <-tick.C:
		}
		for s.quiet() && s.failed.Load() == nil {
			id, ok := s.next()
			if !ok {
				break
			}
			err := s.verify(ctx, id, pace)
			if meta.KindOf(err) == meta.Canceled {
				s.enqueue(id) // continues at the same position later
			}
			select {
			case <-s.stop:
				return
			default:
			}
		}
		if time.Since(saved) >= saveEvery {
			start := time.Now()
			s.saveVerified()
			// A large record is written less often.
			saved = time.Now().Add(50 * time.Since(start))
		}
	}
}

// checkLast verifies, on Close, the chunks that were sealed last, for a short while.
func (s *Store) checkLast() {
	ctx, cancel := context.WithTimeout(context.Background(), closeCheck)
	defer cancel()
	for s.failed.Load() == nil && ctx.Err() == nil {
		id, ok := s.next()
		if !ok {
			return
		}
		if i, err := s.Stat(ctx, id); err == nil && i.State == meta.ChunkSealed {
			_ = s.Verify(ctx, id) // bad blocks were logged; readers find bad blocks, too
		}
	}
}

// loadVerified reads the record.
func (s *Store) loadVerified() {
	if s.o.Boot == "" || len(s.o.Boot) > bootLen {
		return
	}
	b, err := readFile(s.d, verifiedName, verifiedHead+verifiedEntry*maxVerified+4)
	if err != nil {
		if !errors.Is(err, os.ErrNotExist) {
			s.slog.Warn("record of verified chunks unreadable", "err", err)
		}
		return
	}
	all, err := decodeVerified(b, s.f.disk, s.o.Boot)
	if err != nil {
		s.slog.Info("record of verified chunks not used", "err", err)
		return
	}
	s.vouched = all
	for id, v := range all {
		if v.upTo < uint64(v.stamp.Size) {
			s.enqueue(id)
		}
	}
}

// saveVerified writes the list if the list changed. Failures cost only time later.
func (s *Store) saveVerified() {
	if s.o.Boot == "" || len(s.o.Boot) > bootLen || s.failed.Load() != nil {
		return
	}
	s.vmu.Lock()
	if !s.unsaved {
		s.vmu.Unlock()
		return
	}
	s.unsaved = false
	b := encodeVerified(s.vouched, s.f.disk, s.o.Boot)
	s.vmu.Unlock()
	err := writeBeside(s.d, verifiedName, b, false)
	if err == nil {
		err = s.d.Rename(verifiedName+tmpSuffix, verifiedName)
	}
	if err != nil {
		s.slog.Warn("record of verified chunks not written", "err", err)
	}
}

func encodeVerified(all map[meta.ChunkID]vouched, disk [16]byte, boot string) []byte {
	b := make([]byte, verifiedHead, verifiedHead+verifiedEntry*len(all)+4)
	copy(b, verifiedMagic)
	b[4] = verifiedVersion
	copy(b[8:], disk[:])
	copy(b[24:], boot)
	binary.BigEndian.PutUint32(b[64:], uint32(len(all)))
	for id, v := range all {
		i := id.Bytes()
		b = append(b, i[:]...)
		b = binary.BigEndian.AppendUint64(b, v.stamp.Inode)
		b = binary.BigEndian.AppendUint64(b, uint64(v.stamp.Changed))
		b = binary.BigEndian.AppendUint64(b, uint64(v.stamp.Size))
		b = binary.BigEndian.AppendUint64(b, v.upTo)
	}
	return binary.BigEndian.AppendUint32(b, chunkserver.CRC(b))
}

// decodeVerified reads a record. Errors: Corrupt, Version, and Invalid
// for another disk's or boot's.
func decodeVerified(b []byte, disk [16]byte, boot string) (map[meta.ChunkID]vouched, error) {
	const op = "read record of verified chunks"
	if len(b) < verifiedHead+4 || string(b[:4]) != verifiedMagic {
		return nil, meta.E(op, meta.Corrupt, "", nil)
	}
	if b[4] != verifiedVersion {
		return nil, meta.E(op, meta.Version, "", fmt.Errorf("version %d", b[4]))
	}
	end := len(b) - 4
	n := int(binary.BigEndian.Uint32(b[64:]))
	if chunkserver.CRC(b[:end]) != binary.BigEndian.Uint32(b[end:]) || n > maxVerified || end != verifiedHead+verifiedEntry*n {
		return nil, meta.E(op, meta.Corrupt, "", nil)
	}
	var id [bootLen]byte
	copy(id[:], boot)
	if [16]byte(b[8:24]) != disk || [bootLen]byte(b[24:24+bootLen]) != id {
		return nil, meta.E(op, meta.Invalid, "", errors.New("of another disk, or from before the machine was started"))
	}
	all := make(map[meta.ChunkID]vouched, n)
	for e := b[verifiedHead:end]; len(e) > 0; e = e[verifiedEntry:] {
		all[meta.ChunkIDFromBytes(e[:16])] = vouched{
			Stamp{binary.BigEndian.Uint64(e[16:]), int64(binary.BigEndian.Uint64(e[24:])), int64(binary.BigEndian.Uint64(e[32:]))},
			binary.BigEndian.Uint64(e[40:]),
		}
	}
	return all, nil
}
