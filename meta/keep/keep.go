// Package keep is the memory in which a client leaves the open files, the locks and the
// uncommitted bytes for a successor after a kill. The memory is a memfd, so the memory lives as
// long as any process has the memfd open: the serving process, and the holder, which keeps the
// memfd for the next serving process.
//
// # Format, version 1
//
// Numbers are in the machine's byte order: the memory never leaves the machine.
//
//	0        magic "PSTKKEEP"
//	8        version 4, flags 4 (bit 0: whole, see Whole)
//	16       slots 8, arena bytes 8: the sizes of slots and arena
//	32       missed 8: records that found no room
//	40       length of the head 4, CRC-32C of the head 4
//	48       slots used so far 8
//	4096     head: JSON, agreed once and for all
//	1 MiB    slots of 64 bytes
//	then     arena: the bytes of slots, from a multiple of 1 MiB on
//
//	slot     kind 4 (0: free), aux 4, seq 8, six numbers of 8 bytes
//
// A process killed during a change must leave no half-written slot: the kind is written last
// and cleared first, each time in one store. Bytes are in the arena before the slot is written.
//
// A successor makes a new memory, of the successor's version, and gives the complete memory to
// the holder: until then the old memory can be taken over again. The successor changes the old
// memory only to note that the session ended in a volume (Void).
package keep

import (
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"slices"
	"sync"
	"sync/atomic"
	"unsafe"

	"golang.org/x/sys/unix"

	"penstock.io/penstock/meta"
)

// Version is the version of the format, for writing and reading.
const Version = 1

const (
	magic     = "PSTKKEEP"
	headAt    = 4096
	slotsAt   = 1 << 20
	maxHead   = slotsAt - headAt
	slotSize  = 64
	maxSlots  = 1 << 21
	spanSize  = 1 << 20 // size of the largest buffer; smaller buffers are cut from such spans
	minBuffer = 64
	classes   = 15 // 64 bytes to 1 MiB
	maxArena  = 1 << 37
	flagWhole = 1
)

// Kind is the kind of a slot's record. New kinds are added at the end, with a new version: a
// reader refuses memory with unknown kinds.
type Kind uint32

// Kinds of records, and their numbers.
const (
	Volume   Kind = 1 + iota // volume, number of ends of the volume's session, number of ends of successors' sessions
	View                     // number of the view, volume, generation (0: none now), number of earlier views with the number
	Open                     // node, handle, flags | backing id<<32, unique of the OPEN request
	Lock                     // volume, inode, owner, start, end; aux: type | flock<<8; last: process
	Locker                   // node, lock owner, handle: a POSIX lock was taken through the handle
	Chunk                    // volume, term, counter of an allocated, unsealed chunk
	Data                     // volume, inode, offset, length, place, mtime of uncommitted bytes; aux: number of earlier ends of the session in the volume
	Page                     // node, uid | gid<<32, offset, length, place, unique | kill<<63 of a page written back
	Append                   // volume, inode, unique, offset of an appending WRITE request
	Tail                     // node, handle, unique of the last READ, or of the OPEN, record offset before that READ and after it, bytes read of the records' lines: before<<32 | after
	Input                    // node, handle, unique of the OPEN, name of the producer, number of the next line<<16 | partition+1, bytes done<<10 | released<<9 | skipping<<8 | kind of a failure; aux: process
	Line                     // handle, position, unique of the WRITE, length, place of bytes written to an Input
	lastKind = Line
)

// Nowhere is the place of bytes without room in the arena: only the fact of the write is known.
const Nowhere = 1<<64 - 1

// Record is the contents of a slot.
type Record struct {
	Kind Kind
	Aux  uint32
	Seq  uint64 // grows with each record of a memory
	N    [6]uint64
}

// Slot identifies a written record; zero: none.
type Slot uint32

// Memory is safe for concurrent use. A nil *Memory keeps nothing.
type Memory struct {
	fd    int
	all   []byte
	slots uint64
	arena []byte

	mu     sync.Mutex
	seq    uint64
	free   []Slot // to be used before next
	next   Slot
	spans  int // of the arena, in use
	buffer [classes][]uint32
}

// New makes an empty memory with room for arena bytes. The machine's memory is allocated on
// use.
func New(arena int64) (*Memory, error) {
	const op = "make memory for a successor"
	if arena < spanSize || arena > maxArena {
		return nil, meta.E(op, meta.Invalid, fmt.Sprint(arena), nil)
	}
	fd, err := unix.MemfdCreate("penstock-keep", unix.MFD_CLOEXEC)
	if err != nil {
		return nil, meta.E(op, meta.IO, "memfd_create", err)
	}
	arena = (arena + spanSize - 1) &^ (spanSize - 1)
	size := int64(slotsAt+maxSlots*slotSize) + arena
	if err := unix.Ftruncate(fd, size); err != nil {
		unix.Close(fd)
		return nil, meta.E(op, meta.IO, "ftruncate", err)
	}
	m, err := open(fd, size)
	if err != nil {
		unix.Close(fd)
		return nil, err
	}
	m.slots = maxSlots
	m.arena = m.all[slotsAt+maxSlots*slotSize:]
	copy(m.all, magic)
	binary.NativeEndian.PutUint32(m.all[8:], Version)
	binary.NativeEndian.PutUint64(m.all[16:], m.slots)
	binary.NativeEndian.PutUint64(m.all[24:], uint64(arena))
	return m, nil
}

func open(fd int, size int64) (*Memory, error) {
	all, err := unix.Mmap(fd, 0, int(size), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return nil, meta.E("map memory for a successor", meta.IO, "", err)
	}
	return &Memory{fd: fd, all: all, next: 1}, nil
}

// Left opens a predecessor's memory; the caller keeps fd. Errors: Corrupt, Version (of another
// program version, which must read the memory), IO (the memory was never complete, or has
// missed records).
func Left(fd int) (*Memory, error) {
	const op = "read what a predecessor left"
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return nil, meta.E(op, meta.IO, "", err)
	}
	bad := func(what string) (*Memory, error) { return nil, meta.E(op, meta.Corrupt, what, nil) }
	if st.Size < slotsAt || st.Size > maxArena+slotsAt+maxSlots*slotSize {
		return bad("size")
	}
	dup, err := unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return nil, meta.E(op, meta.IO, "", err)
	}
	m, err := open(dup, st.Size)
	if err != nil {
		unix.Close(dup)
		return nil, err
	}
	if err := m.check(st.Size); err != nil {
		m.Close()
		return nil, err
	}
	return m, nil
}

func (m *Memory) check(size int64) error {
	const op = "read what a predecessor left"
	e := binary.NativeEndian
	if string(m.all[:len(magic)]) != magic {
		return meta.E(op, meta.Corrupt, "magic", nil)
	}
	if v := e.Uint32(m.all[8:]); v != Version {
		return meta.E(op, meta.Version, "", fmt.Errorf("the record has version %d, this program knows version %d", v, Version))
	}
	m.slots = e.Uint64(m.all[16:])
	arena := e.Uint64(m.all[24:])
	if m.slots > maxSlots || arena > maxArena || uint64(size) != slotsAt+m.slots*slotSize+arena {
		return meta.E(op, meta.Corrupt, "sizes", nil)
	}
	m.arena = m.all[slotsAt+m.slots*slotSize:]
	n := e.Uint32(m.all[40:])
	if n > maxHead || crc32.Checksum(m.all[headAt:headAt+n], table) != e.Uint32(m.all[44:]) {
		return meta.E(op, meta.Corrupt, "head", nil)
	}
	if e.Uint32(m.all[12:])&flagWhole == 0 {
		return meta.E(op, meta.IO, "", errors.New("its maker ended before it was whole"))
	}
	if n := e.Uint64(m.all[32:]); n > 0 {
		return meta.E(op, meta.IO, "", fmt.Errorf("%d records found no room in it", n))
	}
	return nil
}

var table = crc32.MakeTable(crc32.Castagnoli)

// FD returns the descriptor to be held for a successor; the memory keeps the descriptor.
func (m *Memory) FD() int { return m.fd }

// Close releases the memory; the memory's buffers must not be used any more.
func (m *Memory) Close() {
	if m == nil {
		return
	}
	unix.Munmap(m.all)
	unix.Close(m.fd)
}

// SetHead writes the head, once, before Whole. Errors: Invalid (too long).
func (m *Memory) SetHead(b []byte) error {
	if len(b) > maxHead {
		return meta.E("write head", meta.Invalid, fmt.Sprintf("%d bytes", len(b)), nil)
	}
	copy(m.all[headAt:], b)
	binary.NativeEndian.PutUint32(m.all[40:], uint32(len(b)))
	binary.NativeEndian.PutUint32(m.all[44:], crc32.Checksum(b, table))
	return nil
}

// Head returns the bytes of SetHead.
func (m *Memory) Head() []byte {
	n := binary.NativeEndian.Uint32(m.all[40:])
	return slices.Clone(m.all[headAt : headAt+n])
}

// Whole marks the memory as complete: a successor can take over.
func (m *Memory) Whole() { m.word(12).Store(flagWhole) }

func (m *Memory) word(at uint64) *atomic.Uint32 { return (*atomic.Uint32)(unsafe.Pointer(&m.all[at])) }

func (m *Memory) at(s Slot) []byte {
	return m.all[slotsAt+uint64(s-1)*slotSize:][:slotSize]
}

// Note writes a record, with the next Seq unless r.Seq is set. Zero: no slot was free, and from
// now on no successor can take over.
func (m *Memory) Note(r Record) Slot {
	if m == nil {
		return 0
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	var s Slot
	switch n := len(m.free); {
	case n > 0:
		s, m.free = m.free[n-1], m.free[:n-1]
	case uint64(m.next) <= m.slots:
		s = m.next
		m.next++
		(*atomic.Uint64)(unsafe.Pointer(&m.all[48])).Store(uint64(s))
	default:
		(*atomic.Uint64)(unsafe.Pointer(&m.all[32])).Add(1)
		return 0
	}
	if r.Seq == 0 {
		r.Seq = m.seq + 1
	}
	m.seq = max(m.seq, r.Seq)
	m.write(s, &r)
	return s
}

func (m *Memory) write(s Slot, r *Record) {
	b, e := m.at(s), binary.NativeEndian
	e.PutUint32(b[4:], r.Aux)
	e.PutUint64(b[8:], r.Seq)
	for i, n := range r.N {
		e.PutUint64(b[16+8*i:], n)
	}
	(*atomic.Uint32)(unsafe.Pointer(&b[0])).Store(uint32(r.Kind))
}

// SetN replaces a number of a record.
func (m *Memory) SetN(s Slot, i int, n uint64) {
	if m == nil || s == 0 {
		return
	}
	(*atomic.Uint64)(unsafe.Pointer(&m.at(s)[16+8*i])).Store(n)
}

// Expired notes that the session ended in a volume: bytes written before must not be restored.
// Void notes the end of a successor's session: no bytes of the volume in this memory may be
// restored. Both are noted before a new session begins.
func (m *Memory) Expired(volume uint64) { m.count(volume, 1) }

// Void: see Expired.
func (m *Memory) Void(volume uint64) { m.count(volume, 2) }

func (m *Memory) count(volume uint64, i int) {
	if m == nil {
		return
	}
	used := (*atomic.Uint64)(unsafe.Pointer(&m.all[48])).Load()
	for s := Slot(1); uint64(s) <= min(used, m.slots); s++ {
		if r, ok := m.Get(s); ok && r.Kind == Volume && r.N[0] == volume {
			m.SetN(s, i, r.N[i]+1)
		}
	}
}

// Get reads a record; ok is false for an erased record.
func (m *Memory) Get(s Slot) (r Record, ok bool) {
	b, e := m.at(s), binary.NativeEndian
	r.Kind = Kind((*atomic.Uint32)(unsafe.Pointer(&b[0])).Load())
	r.Aux, r.Seq = e.Uint32(b[4:]), e.Uint64(b[8:])
	for i := range r.N {
		r.N[i] = e.Uint64(b[16+8*i:])
	}
	return r, r.Kind != 0
}

// Erase takes a record back.
func (m *Memory) Erase(s Slot) {
	if m == nil || s == 0 {
		return
	}
	(*atomic.Uint32)(unsafe.Pointer(&m.at(s)[0])).Store(0)
	m.mu.Lock()
	m.free = append(m.free, s)
	m.mu.Unlock()
}

// EraseAll erases records, the oldest first, so of two overlapping records the newer never goes
// before the older.
func (m *Memory) EraseAll(l []Slot) {
	if m == nil || len(l) == 0 {
		return
	}
	slices.SortFunc(l, func(a, b Slot) int { return cmp.Compare(m.seqOf(a), m.seqOf(b)) })
	for _, s := range l {
		m.Erase(s)
	}
}

func (m *Memory) seqOf(s Slot) uint64 {
	if s == 0 {
		return 0
	}
	return binary.NativeEndian.Uint64(m.at(s)[8:])
}

// Records lists all records, oldest first. Errors: Corrupt.
func (m *Memory) Records() ([]Record, error) {
	const op = "read what a predecessor left"
	var l []Record
	used := (*atomic.Uint64)(unsafe.Pointer(&m.all[48])).Load()
	if used > m.slots {
		return nil, meta.E(op, meta.Corrupt, "slots", nil)
	}
	for s := Slot(1); uint64(s) <= used; s++ {
		r, ok := m.Get(s)
		if !ok {
			continue
		}
		if r.Kind > lastKind {
			return nil, meta.E(op, meta.Corrupt, fmt.Sprintf("slot %d", s), fmt.Errorf("kind %d", r.Kind))
		}
		if r.Kind == Data || r.Kind == Page || r.Kind == Line {
			if n, at := r.N[3], r.N[4]; n > spanSize || at != Nowhere && (at > uint64(len(m.arena)) || n > uint64(len(m.arena))-at) {
				return nil, meta.E(op, meta.Corrupt, fmt.Sprintf("slot %d", s), errors.New("its bytes are outside"))
			}
		}
		l = append(l, r)
	}
	slices.SortStableFunc(l, func(a, b Record) int { return cmp.Compare(a.Seq, b.Seq) })
	return l, nil
}

// Bytes returns the bytes of a Data, Page or Line record; nil if the arena had no room for the bytes.
func (m *Memory) Bytes(r Record) []byte {
	if r.N[4] == Nowhere {
		return nil
	}
	return m.arena[r.N[4]:][:r.N[3]]
}

// class is the list for buffers of at least n bytes.
func class(n int) int {
	c := 0
	for size := minBuffer; size < n; size *= 2 {
		c++
	}
	return c
}

// Buffer returns an empty buffer in the arena with room for at least n bytes, at most 1 MiB;
// nil if the arena is full.
func (m *Memory) Buffer(n int) []byte {
	c := class(min(n, spanSize))
	size := minBuffer << c
	m.mu.Lock()
	defer m.mu.Unlock()
	if len(m.buffer[c]) == 0 {
		if (m.spans+1)*spanSize > len(m.arena) {
			return nil
		}
		for at := m.spans * spanSize; at < (m.spans+1)*spanSize; at += size {
			m.buffer[c] = append(m.buffer[c], uint32(at/minBuffer))
		}
		m.spans++
	}
	k := len(m.buffer[c]) - 1
	at := int(m.buffer[c][k]) * minBuffer
	m.buffer[c] = m.buffer[c][:k]
	return m.arena[at : at : at+size]
}

// Place returns the place of a buffer, Nowhere for a buffer outside the arena.
func (m *Memory) Place(b []byte) uint64 {
	if cap(b) == 0 || len(m.arena) == 0 {
		return Nowhere
	}
	p, base := uintptr(unsafe.Pointer(unsafe.SliceData(b))), uintptr(unsafe.Pointer(&m.arena[0]))
	if p < base || p >= base+uintptr(len(m.arena)) {
		return Nowhere
	}
	return uint64(p - base)
}

// Recycle takes a buffer back; false: the buffer is not in the arena.
func (m *Memory) Recycle(b []byte) bool {
	if m == nil {
		return false
	}
	at := m.Place(b)
	if at == Nowhere {
		return false
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	c := class(cap(b))
	m.buffer[c] = append(m.buffer[c], uint32(at/minBuffer))
	return true
}
