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

// verifications knows which sealed chunks were compared with their checksums, and compares
// others while the disk is quiet.
type verifications struct {
	s *Store

	mu      sync.Mutex // guards all below but checks
	vouched map[meta.ChunkID]vouched
	unsaved bool // vouched is newer than the record on the disk
	queue   []meta.ChunkID
	waiting map[meta.ChunkID]struct{} // chunks in queue that still need verification
	checks  chan struct{}             // bounds the verifications for waiting callers
}

func (vs *verifications) begin(s *Store) {
	vs.s, vs.vouched, vs.waiting = s, map[meta.ChunkID]vouched{}, map[meta.ChunkID]struct{}{}
	vs.checks = make(chan struct{}, maxChecks)
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
func (vs *verifications) vouchedFor(id meta.ChunkID, now Stamp) uint64 {
	vs.mu.Lock()
	defer vs.mu.Unlock()
	if v := vs.vouched[id]; v.stamp == now {
		return v.upTo
	}
	return 0
}

// knows reports whether a sealed chunk's data file is unchanged since the last note about it.
func (vs *verifications) knows(id meta.ChunkID, now Stamp) bool {
	vs.mu.Lock()
	defer vs.mu.Unlock()
	v, ok := vs.vouched[id]
	return ok && v.stamp == now
}

// vouch notes that a sealed chunk is verified up to upTo, and schedules the rest.
func (vs *verifications) vouch(id meta.ChunkID, stamp Stamp, upTo uint64) {
	vs.mu.Lock()
	defer vs.mu.Unlock()
	if _, ok := vs.vouched[id]; !ok && len(vs.vouched) >= maxVerified {
		for other := range vs.vouched { // any chunk: the chunk will be verified again
			delete(vs.vouched, other)
			break
		}
	}
	vs.vouched[id] = vouched{stamp, upTo}
	vs.unsaved = true
}

// forget forgets the verification of a deleted chunk.
func (vs *verifications) forget(id meta.ChunkID) {
	vs.mu.Lock()
	defer vs.mu.Unlock()
	if _, ok := vs.vouched[id]; ok {
		delete(vs.vouched, id)
		vs.unsaved = true
	}
	delete(vs.waiting, id)
}

// enqueue has a chunk verified when the disk is quiet.
func (vs *verifications) enqueue(id meta.ChunkID) {
	vs.mu.Lock()
	defer vs.mu.Unlock()
	if _, ok := vs.waiting[id]; ok || len(vs.waiting) >= maxVerified {
		return
	}
	vs.waiting[id] = struct{}{}
	vs.queue = append(vs.queue, id)
}

// next takes a chunk from the queue.
func (vs *verifications) next() (meta.ChunkID, bool) {
	vs.mu.Lock()
	defer vs.mu.Unlock()
	for len(vs.queue) > 0 {
		id := vs.queue[0]
		vs.queue = vs.queue[1:]
		if _, ok := vs.waiting[id]; ok {
			delete(vs.waiting, id)
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
	return s.verified.verify(ctx, id, nil)
}

// verify is Verify. If pace is not nil, verify calls pace between steps, not locked, with the
// time that the last step took. pace may wait, and may end the verification with an error.
func (vs *verifications) verify(ctx context.Context, id meta.ChunkID, pace func(time.Duration) error) error {
	const op = "verify chunk"
	c, err := vs.s.use(id)
	if err != nil {
		return err
	}
	defer vs.s.leave(c)
	for try := 0; ; try++ {
		if !c.exists {
			return c.noSuch(op)
		}
		c.queued = false
		if c.length == 0 || c.pack != nil { // nobody gets the file of a compressed chunk
			return nil
		}
		h, err := vs.s.hold(c, false, false)
		if err != nil {
			return err
		}
		from, stamp, err := vs.checkedOf(c, h)
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
			vs.checks <- struct{}{}
		}
		if sealed {
			if age := time.Since(time.Unix(0, stamp.Changed)); age >= 0 && age < settleTime {
				time.Sleep(settleTime - age)
			}
		}
		upTo, err := vs.compare(ctx, c, k, h, crcs, from, to, pace)
		if pace == nil {
			<-vs.checks
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
			vs.vouch(id, stamp, upTo)
		default:
			c.checked = max(c.checked, upTo)
		}
		return err
	}
}

// checkedOf returns the length up to which a chunk is verified, and the stamp of a sealed
// chunk. The caller holds c.mu.
func (vs *verifications) checkedOf(c *chunk, h *handle) (upTo uint64, stamp Stamp, err error) {
	if c.state != meta.ChunkSealed {
		return c.checked, Stamp{}, nil
	}
	if stamp, err = h.Stamp(); err != nil {
		return 0, stamp, ioError("verify chunk", c.id.String(), err)
	}
	return vs.vouchedFor(c.id, stamp), stamp, nil
}

// compare reads [from, to), whole blocks except at the end, and compares the blocks with crcs.
// compare returns the length up to which all blocks are right.
func (vs *verifications) compare(ctx context.Context, c *chunk, k *checking, h *handle, crcs []uint32, from, to uint64, pace func(time.Duration) error) (uint64, error) {
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
			vs.s.bad.tell(c.id)
			return from, err
		}
		vs.s.stats.checked.Add(uint64(n))
		for at := 0; at < len(p); at += block {
			q := p[at:min(len(p), at+block)]
			if (at+len(q) > n || chunkserver.CRC(q) != crcs[from/block]) && !vs.s.o.UnsafeNoVerify {
				vs.s.stats.corrupt.Add(1)
				vs.s.slog.Error("verification found a bad block", "chunk", c.id.String(), "offset", from)
				bad := meta.E("verify chunk", meta.Corrupt, c.id.String(), fmt.Errorf("block at %d", from))
				vs.s.bad.tell(c.id)
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
func (vs *verifications) check() {
	tick := time.NewTicker(100 * time.Millisecond)
	defer tick.Stop()
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	var saved time.Time
	busy := meta.E("verify chunk", meta.Canceled, "", nil)
	pace := func(took time.Duration) error {
		select {
		case <-vs.s.stop:
			return busy
		case <-time.After(min(took, time.Second)):
		}
		if !vs.s.quiet() {
			return busy
		}
		return nil
	}
	for {
		select {
		case <-vs.s.stop:
			return
		case <-tick.C:
		}
		for vs.s.quiet() && vs.s.failed.Load() == nil {
			id, ok := vs.next()
			if !ok {
				break
			}
			err := vs.verify(ctx, id, pace)
			if meta.KindOf(err) == meta.Canceled {
				vs.enqueue(id) // continues at the same position later
			}
			select {
			case <-vs.s.stop:
				return
			default:
			}
		}
		if time.Since(saved) >= saveEvery {
			start := time.Now()
			vs.save()
			// A large record is written less often.
			saved = time.Now().Add(50 * time.Since(start))
		}
	}
}

// checkLast verifies, on Close, the chunks that were sealed last, for a short while.
func (vs *verifications) checkLast() {
	ctx, cancel := context.WithTimeout(context.Background(), closeCheck)
	defer cancel()
	for vs.s.failed.Load() == nil && ctx.Err() == nil {
		id, ok := vs.next()
		if !ok {
			return
		}
		if i, err := vs.s.Stat(ctx, id); err == nil && i.State == meta.ChunkSealed {
			_ = vs.s.Verify(ctx, id) // bad blocks were logged; readers find bad blocks, too
		}
	}
}

// load reads the record.
func (vs *verifications) load() {
	if vs.s.o.Boot == "" || len(vs.s.o.Boot) > bootLen {
		return
	}
	b, err := readFile(vs.s.d, verifiedName, verifiedHead+verifiedEntry*maxVerified+4)
	if err != nil {
		if !errors.Is(err, os.ErrNotExist) {
			vs.s.slog.Warn("the record of verified chunks can't be read: chunks are verified again", "err", err)
		}
		return
	}
	all, err := decodeVerified(b, vs.s.f.disk, vs.s.o.Boot)
	if err != nil {
		vs.s.slog.Info("the record of verified chunks is not used: chunks are verified again", "err", err)
		return
	}
	vs.vouched = all
	for id, v := range all {
		if v.upTo < uint64(v.stamp.Size) {
			vs.enqueue(id)
		}
	}
}

// save writes the list if the list changed. Failures cost only time later.
func (vs *verifications) save() {
	if vs.s.o.Boot == "" || len(vs.s.o.Boot) > bootLen || vs.s.failed.Load() != nil {
		return
	}
	vs.mu.Lock()
	if !vs.unsaved {
		vs.mu.Unlock()
		return
	}
	vs.unsaved = false
	b := encodeVerified(vs.vouched, vs.s.f.disk, vs.s.o.Boot)
	vs.mu.Unlock()
	err := writeBeside(vs.s.d, verifiedName, b, false)
	if err == nil {
		err = vs.s.d.Rename(verifiedName+tmpSuffix, verifiedName)
	}
	if err != nil {
		vs.s.slog.Warn("the record of verified chunks could not be written: chunks are verified again after a restart", "err", err)
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
