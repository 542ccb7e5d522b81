package store

import (
	"bytes"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"sync"

	"penstock.io/penstock/chunkserver"
	"penstock.io/penstock/meta"
)

// The log of a disk is a ring of preallocated files log/NNNN. Init fills the files with zeros,
// so that fdatasync of a file never waits for the file system's own journal. Segment number q
// (from 1, never reused) lies in file q mod the number of files; a position in the log is
// q*segmentSize plus the offset in the file. All integers are big-endian.
//
// Each segment begins with a header, at the start of the segment's first 4096 bytes:
//
//	 0  4  "PSLS"
//	 4  1  version, 1; 3 zero
//	 8 16  disk id
//	24  8  q
//	32  8  salt, random
//	40  4  segment size
//	44  8  salt of segment q-1, which segment q continues; zero if a log begins with segment q
//	52  4  CRC32C of the bytes before
//
// Records follow, each at a multiple of 8, none across segments:
//
//	 0  4  "PSLR"
//	 4  1  type
//	 5  1  version, 1; 2 zero
//	 8  4  length of the body
//	12  4  q, its low 32 bits
//	16  8  the position below which the log was durable when the record was written
//	24  4  offset of the record in the segment
//	28  4  CRC32C of the salt, the 28 bytes before and the body
//	32     body, then zeros to a multiple of 8
//
// Types and bodies (id is 16 bytes, fence 12):
//
//	1 append  id, fence, offset 8, length 4, CRC32C 4 of each piece; pieces end at multiples of ChecksumBlock
//	2 sync    id, from 8, to 8, then either nothing (the data file was synced) or the bytes [from, to)
//	3 fence   id, fence
//	4 seal    id, fence, length 8, CRC32C 4 over the block checksums
//	5 delete  id
//	6 mark    nothing: written when the log falls idle, for its durable position
//	7 end     nothing: the next record is the first of segment q+1
//
// No user knows the salt of a disk, so stored bytes (which sync records carry) can't pass for
// records. The salt also keeps records of an earlier use of the file from being replayed.
//
// Reading stops at the first bytes that are no record. Usually this position is the torn end of
// the log. If a later record says that the log was durable beyond the position, the log is
// corrupt, and the store doesn't open: a flipped bit must not silently undo synced changes.
//
// log/checkpoint says where replay starts. The file has two copies, at 0 and 4096, written in
// turn and synced; the valid copy with the higher count holds.
//
//	 0  4  "PSLC"
//	 4  1  version, 1; 3 zero
//	 8 16  disk id
//	24  8  count
//	32  8  position
//	40  4  CRC32C of the bytes before
const (
	segMagic   = "PSLS"
	recMagic   = "PSLR"
	cpMagic    = "PSLC"
	logVersion = 1
	segHead    = 4096
	segHeadLen = 56
	recHead    = 32
	cpLen      = 44
	cpName     = logDir + "/checkpoint"

	minSegment = 256 << 10
	maxSegment = 1 << 30
)

type recType byte

const (
	recAppend recType = 1 + iota
	recSync
	recFence
	recSeal
	recDelete
	recMark
	recEnd
)

// record is the decoded form of any record.
type record struct {
	typ    recType
	id     meta.ChunkID
	fence  meta.Fence
	off    uint64 // append: offset; sync: from; seal: length
	end    uint64 // append: offset after; sync: to
	crcs   []uint32
	inline []byte // sync: the bytes, or nil; valid until the next record is read
}

func segName(slot int) string { return fmt.Sprintf("%s/%04d", logDir, slot) }

var errLogFull = errors.New("the log is full until a checkpoint succeeds")

// diskLog writes records and makes many records durable at once.
type diskLog struct {
	f      format
	nosync bool // control: claim durability without syncing

	// mu is held during writes into the page cache, never during a sync: the order of records
	// in the file is the order of events.
	mu    sync.Mutex
	files []File
	seq   uint64
	salt  uint64
	off   uint32 // in segment seq
	start uint64 // start of the replay; the segment of start and later segments are in use
	cp    File
	count uint64 // of checkpoint writes
	buf   []byte
	// unsynced are segments before seq with records that are not durable yet.
	unsynced []uint64
	marked   uint64 // durable position in the last mark

	// smu guards durability: one waiter syncs for all.
	smu     sync.Mutex
	cond    sync.Cond
	durable uint64
	syncing bool
	err     error // sticky
	syncs   uint64
}

func createLog(d Disk, f format) error {
	const op = "make log"
	zero := make([]byte, 1<<20)
	for i := range int(f.segments) {
		file, err := d.Open(segName(i), true)
		if err != nil {
			return ioError(op, segName(i), err)
		}
		for off := int64(0); off < int64(f.segmentSize) && err == nil; off += int64(len(zero)) {
			_, err = file.WriteAt(zero[:min(int64(len(zero)), int64(f.segmentSize)-off)], off)
		}
		if err == nil {
			err = file.Sync()
		}
		if cerr := file.Close(); err == nil {
			err = cerr
		}
		if err != nil {
			return ioError(op, segName(i), err)
		}
	}
	cp, err := d.Open(cpName, true)
	if err != nil {
		return ioError(op, cpName, err)
	}
	defer cp.Close()
	if err := cp.Truncate(2 * 4096); err != nil {
		return ioError(op, cpName, err)
	}
	l := &diskLog{f: f, cp: cp}
	l.cond.L = &l.smu
	for i := range int(f.segments) {
		file, err := d.Open(segName(i), false)
		if err != nil {
			return ioError(op, segName(i), err)
		}
		defer file.Close()
		l.files = append(l.files, file)
	}
	if err := l.begin(1); err != nil {
		return err
	}
	return ioError(op, logDir, d.SyncDir(logDir))
}

func (l *diskLog) file(seq uint64) File { return l.files[seq%uint64(len(l.files))] }

func (l *diskLog) pos(seq uint64, off uint32) uint64 {
	return seq*uint64(l.f.segmentSize) + uint64(off)
}

// writeHead begins segment seq in the segment's file, without syncing. prev is the salt of the
// previous segment.
func (l *diskLog) writeHead(seq, prev uint64) error {
	var salt [8]byte
	rand.Read(salt[:])
	b := make([]byte, segHeadLen)
	copy(b, segMagic)
	b[4] = logVersion
	copy(b[8:], l.f.disk[:])
	binary.BigEndian.PutUint64(b[24:], seq)
	copy(b[32:], salt[:])
	binary.BigEndian.PutUint32(b[40:], l.f.segmentSize)
	binary.BigEndian.PutUint64(b[44:], prev)
	binary.BigEndian.PutUint32(b[52:], chunkserver.CRC(b[:52]))
	if _, err := l.file(seq).WriteAt(b, 0); err != nil {
		return ioError("begin log segment", segName(int(seq%uint64(len(l.files)))), err)
	}
	l.seq, l.salt, l.off = seq, binary.BigEndian.Uint64(salt[:]), segHead
	return nil
}

// begin starts an empty log at segment seq, and writes a checkpoint with this position.
func (l *diskLog) begin(seq uint64) error {
	if err := l.writeHead(seq, 0); err != nil {
		return err
	}
	if err := l.file(seq).Sync(); err != nil {
		return ioError("begin log", "", err)
	}
	l.durable = l.pos(seq, segHead)
	l.marked = l.durable
	return l.checkpoint(l.durable)
}

// checkpoint makes replay start at pos from now on. The caller has made everything before pos
// durable elsewhere, and runs one checkpoint at a time.
func (l *diskLog) checkpoint(pos uint64) error {
	// The first segment of the replay must be readable after a power cut.
	if err := l.wait(pos); err != nil {
		return err
	}
	b := make([]byte, cpLen)
	copy(b, cpMagic)
	b[4] = logVersion
	copy(b[8:], l.f.disk[:])
	binary.BigEndian.PutUint64(b[24:], l.count+1)
	binary.BigEndian.PutUint64(b[32:], pos)
	binary.BigEndian.PutUint32(b[40:], chunkserver.CRC(b[:40]))
	_, err := l.cp.WriteAt(b, int64((l.count+1)%2)*4096)
	if err == nil && !l.nosync {
		err = l.cp.Sync()
	}
	if err != nil {
		return ioError("write log checkpoint", cpName, err)
	}
	l.count++
	l.mu.Lock()
	l.start = pos
	l.mu.Unlock()
	return nil
}

// usedLocked returns the number of segments with records to replay, and the limit of this
// number.
func (l *diskLog) usedLocked() (used, most int) {
	// One segment stays free, so that recovery can begin a new log. A second segment stays free
	// because a power cut may leave the header of the next segment behind.
	return int(l.seq - l.start/uint64(l.f.segmentSize) + 1), len(l.files) - 2
}

// pressure returns how full the log is: 0 is calm, 1 asks for a checkpoint, 2 admits only
// operations that free space.
func (l *diskLog) pressure() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	used, most := l.usedLocked()
	switch {
	case used >= most && l.off > l.f.segmentSize/2:
		return 2
	case used > most/2:
		return 1
	}
	return 0
}

// end is the position after the last record.
func (l *diskLog) end() uint64 {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.pos(l.seq, l.off)
}

// append writes a record with the body head+tail, not yet durable, and returns the position
// after it.
func (l *diskLog) append(typ recType, head, tail []byte) (uint64, error) {
	l.smu.Lock()
	durable, err := l.durable, l.err
	l.smu.Unlock()
	if err != nil {
		return 0, err
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	need := uint32((recHead+len(head)+len(tail)+7)&^7) + recHead // and room for the end record
	if l.off+need > l.f.segmentSize {
		if used, most := l.usedLocked(); used >= most {
			return 0, meta.E("write log", meta.NoSpace, "", errLogFull)
		}
		if err := l.writeLocked(recEnd, durable, nil, nil); err != nil {
			return 0, err
		}
		old := l.seq
		if err := l.writeHead(old+1, l.salt); err != nil {
			return 0, err
		}
		l.unsynced = append(l.unsynced, old)
	}
	if err := l.writeLocked(typ, durable, head, tail); err != nil {
		return 0, err
	}
	return l.pos(l.seq, l.off), nil
}

func (l *diskLog) writeLocked(typ recType, durable uint64, head, tail []byte) error {
	n := len(head) + len(tail)
	b := append(l.buf[:0], recMagic...)
	b = append(b, byte(typ), logVersion, 0, 0)
	b = binary.BigEndian.AppendUint32(b, uint32(n))
	b = binary.BigEndian.AppendUint32(b, uint32(l.seq))
	b = binary.BigEndian.AppendUint64(b, durable)
	b = binary.BigEndian.AppendUint32(b, l.off)
	b = append(b, 0, 0, 0, 0)
	b = append(b, head...)
	b = append(b, tail...)
	binary.BigEndian.PutUint32(b[28:], recordCRC(l.salt, b))
	for len(b)%8 != 0 {
		b = append(b, 0)
	}
	l.buf = b
	if _, err := l.file(l.seq).WriteAt(b, int64(l.off)); err != nil {
		return ioError("write log", "", err)
	}
	l.off += uint32(len(b))
	return nil
}

// recordCRC is the checksum of an unpadded record.
func recordCRC(salt uint64, b []byte) uint32 {
	var s [8]byte
	binary.BigEndian.PutUint64(s[:], salt)
	return chunkserver.UpdateCRC(chunkserver.UpdateCRC(chunkserver.CRC(s[:]), b[:28]), b[recHead:])
}

// wait returns when everything before pos is durable. One of the waiters syncs for all records
// written by then; meanwhile the next group gathers. After a failure, nothing becomes durable
// any more: the kernel may have dropped dirty pages, and would report success the next time.
func (l *diskLog) wait(pos uint64) error {
	l.smu.Lock()
	defer l.smu.Unlock()
	for l.durable < pos && l.err == nil {
		if l.syncing {
			l.cond.Wait()
			continue
		}
		l.syncing = true
		l.smu.Unlock()
		end, err := l.sync()
		l.smu.Lock()
		l.syncing = false
		l.syncs++
		if err != nil {
			l.err = err
		} else {
			l.durable = max(l.durable, end)
		}
		l.cond.Broadcast()
	}
	return l.err
}

// sync makes everything written before the call durable. One call at a time.
func (l *diskLog) sync() (end uint64, err error) {
	l.mu.Lock()
	end = l.pos(l.seq, l.off)
	segs := append(l.unsynced, l.seq)
	l.unsynced = nil
	l.mu.Unlock()
	if l.nosync {
		return end, nil
	}
	for _, q := range segs {
		if err := l.file(q).Sync(); err != nil {
			return 0, ioError("sync log", segName(int(q%uint64(len(l.files)))), err)
		}
	}
	return end, nil
}

// mark records how far the log is durable, if no record says so yet. A flipped bit in the last
// synced record can then be distinguished from a torn end. The mark itself is not synced.
func (l *diskLog) mark() {
	l.smu.Lock()
	durable := l.durable
	l.smu.Unlock()
	l.mu.Lock()
	due := durable > l.marked && durable == l.pos(l.seq, l.off)
	l.mu.Unlock()
	if !due {
		return
	}
	if _, err := l.append(recMark, nil, nil); err == nil {
		l.mu.Lock()
		// The mark will become durable at some time, and needs no second mark.
		l.marked = l.pos(l.seq, l.off)
		l.mu.Unlock()
	}
}

func (l *diskLog) close() {
	for _, f := range l.files {
		f.Close()
	}
	l.cp.Close()
}

// ---- reading

// openLog opens the files of a log and finds the checkpoint; replay reads the log.
func openLog(d Disk, f format) (*diskLog, error) {
	const op = "open log"
	l := &diskLog{f: f}
	l.cond.L = &l.smu
	for i := range int(f.segments) {
		file, err := d.Open(segName(i), false)
		if err != nil {
			return nil, ioError(op, segName(i), err)
		}
		l.files = append(l.files, file)
	}
	cp, err := d.Open(cpName, false)
	if err != nil {
		return nil, ioError(op, cpName, err)
	}
	l.cp = cp
	found := false
	for _, off := range []int64{0, 4096} {
		b := make([]byte, cpLen)
		if _, err := cp.ReadAt(b, off); err != nil {
			return nil, ioError(op, cpName, err)
		}
		if string(b[:4]) != cpMagic || chunkserver.CRC(b[:40]) != binary.BigEndian.Uint32(b[40:]) || !bytes.Equal(b[8:24], f.disk[:]) {
			continue
		}
		if b[4] != logVersion {
			return nil, meta.E(op, meta.Version, cpName, fmt.Errorf("version %d", b[4]))
		}
		if n := binary.BigEndian.Uint64(b[24:]); !found || n > l.count {
			found, l.count, l.start = true, n, binary.BigEndian.Uint64(b[32:])
		}
	}
	if !found {
		return nil, meta.E(op, meta.Corrupt, cpName, errors.New("no valid checkpoint"))
	}
	return l, nil
}

// head reads the header of file slot: the segment number, or 0 if no segment was ever begun in
// the file.
func (l *diskLog) head(slot int) (seq, salt, prev uint64, err error) {
	const op = "read log"
	b := make([]byte, segHeadLen)
	if _, err := l.files[slot].ReadAt(b, 0); err != nil {
		return 0, 0, 0, ioError(op, segName(slot), err)
	}
	if bytes.Equal(b, make([]byte, segHeadLen)) {
		return 0, 0, 0, nil
	}
	// A header lies in one sector, which is written whole or not at all.
	if string(b[:4]) != segMagic || chunkserver.CRC(b[:52]) != binary.BigEndian.Uint32(b[52:]) || !bytes.Equal(b[8:24], l.f.disk[:]) {
		return 0, 0, 0, meta.E(op, meta.Corrupt, segName(slot), errors.New("segment header"))
	}
	if b[4] != logVersion {
		return 0, 0, 0, meta.E(op, meta.Version, segName(slot), fmt.Errorf("version %d", b[4]))
	}
	seq = binary.BigEndian.Uint64(b[24:])
	if seq%uint64(len(l.files)) != uint64(slot) {
		return 0, 0, 0, meta.E(op, meta.Corrupt, segName(slot), fmt.Errorf("holds segment %d", seq))
	}
	return seq, binary.BigEndian.Uint64(b[32:]), binary.BigEndian.Uint64(b[44:]), nil
}

// replay calls fn with every record from the checkpoint on and returns the number of the next
// segment. A repeated call returns the same number, so that crashes during recovery don't use
// up the ring.
func (l *diskLog) replay(fn func(record) error) (next uint64, err error) {
	const op = "replay log"
	size := l.f.segmentSize
	seqs := make([]uint64, len(l.files))
	salts := make([]uint64, len(l.files))
	prevs := make([]uint64, len(l.files))
	for i := range l.files {
		if seqs[i], salts[i], prevs[i], err = l.head(i); err != nil {
			return 0, err
		}
	}
	seq, off := l.start/uint64(size), uint32(l.start%uint64(size))
	slot := int(seq % uint64(len(l.files)))
	if seqs[slot] != seq || off < segHead {
		return 0, meta.E(op, meta.Corrupt, segName(slot),
			fmt.Errorf("the checkpoint is in segment %d, the file holds %d", seq, seqs[slot]))
	}
	buf := make([]byte, size)
	var salt uint64
	for {
		slot = int(seq % uint64(len(l.files)))
		if seqs[slot] != seq || salt != 0 && prevs[slot] != salt {
			// The next segment was not begun, or a power cut took its header. (The file may
			// have the header of an earlier use, which continues another segment.)
			next = seq
			break
		}
		salt = salts[slot]
		next = seq + 1
		if _, err := l.files[slot].ReadAt(buf, 0); err != nil {
			return 0, ioError(op, segName(slot), err)
		}
		ended := false
		for !ended {
			_, body, n := parseRecord(buf, off, seq, salt)
			if n == 0 {
				break
			}
			typ := recType(buf[off+4])
			if typ == recEnd {
				ended = true
				break
			}
			r, ok := decodeBody(typ, body)
			if !ok {
				return 0, meta.E(op, meta.Corrupt, fmt.Sprintf("%s at %d", segName(slot), off), errors.New("record body"))
			}
			if err := fn(r); err != nil {
				return 0, err
			}
			off += n
		}
		if !ended {
			break
		}
		seq, off = seq+1, segHead
	}
	// No record at (seq, off) means the end of the log, unless a later record says that the log
	// was durable beyond this position.
	end := l.pos(seq, off)
	for i := range l.files {
		if seqs[i] < seq {
			continue
		}
		if _, err := l.files[i].ReadAt(buf, 0); err != nil {
			return 0, ioError(op, segName(i), err)
		}
		from := uint32(segHead)
		if seqs[i] == seq {
			from = off
		}
		for o := from; o+recHead <= size; o += 8 {
			if !bytes.Equal(buf[o:o+4], []byte(recMagic)) {
				continue
			}
			if durable, _, n := parseRecord(buf, o, seqs[i], salts[i]); n != 0 && durable > end {
				return 0, meta.E(op, meta.Corrupt, fmt.Sprintf("segment %d at %d", seq, off),
					fmt.Errorf("no valid record here, but a later one says that the log was durable up to %d", durable))
			}
		}
	}
	return next, nil
}

// settled makes the replayed records durable.
func (l *diskLog) settled() error {
	if l.nosync {
		return nil
	}
	for i, f := range l.files {
		if err := f.Sync(); err != nil {
			return ioError("replay log", segName(i), err)
		}
	}
	return nil
}

// parseRecord checks the record at off and returns the body and the padded length; length 0: no
// record.
func parseRecord(seg []byte, off uint32, seq, salt uint64) (durable uint64, body []byte, n uint32) {
	if uint64(off)+recHead > uint64(len(seg)) {
		return 0, nil, 0
	}
	b := seg[off:]
	size := binary.BigEndian.Uint32(b[8:])
	if string(b[:4]) != recMagic || uint64(size) > uint64(len(b)-recHead) ||
		binary.BigEndian.Uint32(b[12:]) != uint32(seq) || binary.BigEndian.Uint32(b[24:]) != off {
		return 0, nil, 0
	}
	b = b[:recHead+size]
	if recordCRC(salt, b) != binary.BigEndian.Uint32(b[28:]) || b[5] != logVersion {
		return 0, nil, 0
	}
	return binary.BigEndian.Uint64(b[16:]), b[recHead:], (recHead + size + 7) &^ 7
}

// ---- bodies

func appendBody(id meta.ChunkID, fence meta.Fence, off uint64, n int, crcs []uint32) []byte {
	b := make([]byte, 40, 40+4*len(crcs))
	i := id.Bytes()
	copy(b, i[:])
	putFence(b[16:], fence)
	binary.BigEndian.PutUint64(b[28:], off)
	binary.BigEndian.PutUint32(b[36:], uint32(n))
	for _, c := range crcs {
		b = binary.BigEndian.AppendUint32(b, c)
	}
	return b
}

func syncBody(id meta.ChunkID, from, to uint64) []byte {
	b := make([]byte, 32)
	i := id.Bytes()
	copy(b, i[:])
	binary.BigEndian.PutUint64(b[16:], from)
	binary.BigEndian.PutUint64(b[24:], to)
	return b
}

func fenceBody(id meta.ChunkID, fence meta.Fence) []byte {
	b := make([]byte, 28)
	i := id.Bytes()
	copy(b, i[:])
	putFence(b[16:], fence)
	return b
}

func sealBody(id meta.ChunkID, fence meta.Fence, length uint64, crc uint32) []byte {
	b := binary.BigEndian.AppendUint64(fenceBody(id, fence), length)
	return binary.BigEndian.AppendUint32(b, crc)
}

// decodeBody decodes a record's body; ok is false if the body does not fit the type.
func decodeBody(typ recType, b []byte) (r record, ok bool) {
	r.typ = typ
	if typ == recMark || typ == recEnd {
		return r, len(b) == 0
	}
	if len(b) < 16 {
		return r, false
	}
	r.id = meta.ChunkIDFromBytes(b)
	switch typ {
	case recDelete:
		return r, len(b) == 16
	case recFence:
		if len(b) != 28 {
			return r, false
		}
		r.fence = getFence(b[16:])
	case recSeal:
		if len(b) != 40 {
			return r, false
		}
		r.fence, r.off = getFence(b[16:]), binary.BigEndian.Uint64(b[28:])
		r.crcs = []uint32{binary.BigEndian.Uint32(b[36:])}
		return r, r.off <= maxChunk
	case recSync:
		if len(b) < 32 {
			return r, false
		}
		r.off, r.end = binary.BigEndian.Uint64(b[16:]), binary.BigEndian.Uint64(b[24:])
		if r.off > r.end || r.end > maxChunk {
			return r, false
		}
		if len(b) > 32 {
			r.inline = b[32:]
			return r, uint64(len(r.inline)) == r.end-r.off
		}
	case recAppend:
		if len(b) < 44 {
			return r, false
		}
		r.fence, r.off = getFence(b[16:]), binary.BigEndian.Uint64(b[28:])
		n := uint64(binary.BigEndian.Uint32(b[36:]))
		r.end = r.off + n
		if n == 0 || n > chunkserver.MaxAppend || r.off > maxChunk || r.end > maxChunk || uint64(len(b)-40) != 4*uint64(pieces(r.off, n)) {
			return r, false
		}
		for b = b[40:]; len(b) > 0; b = b[4:] {
			r.crcs = append(r.crcs, binary.BigEndian.Uint32(b))
		}
	default:
		return r, false
	}
	return r, true
}

// pieces returns the number of parts into which block boundaries cut [off, off+n).
func pieces(off, n uint64) int {
	return int((off+n-1)/chunkserver.ChecksumBlock - off/chunkserver.ChecksumBlock + 1)
}
