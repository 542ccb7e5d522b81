// Package journal owns the ordered, durable log of one volume: entries with the effects of
// operations, each bound to the previous entry by a hash, and the checkpoint record, after
// which older entries may be deleted. The package has the interface, the in-memory form and the
// test suite of both forms; the etcd form lives in journal/etcd.
//
// An entry is these bytes, all numbers big-endian:
//
//	offset  size
//	     0     2  magic "PJ"
//	     2     1  version, 1
//	     3     1  flags, 0
//	     4     4  volume
//	     8     8  sequence number, dense, from 1
//	    16     8  term of the owner that wrote the entry
//	    24    16  hash of the previous entry; zero in entry 1
//	    40    16  hash: SHA-256 of bytes 2..40 and the payload, cut to 16 bytes
//	    56     4  length of the payload
//	    60     4  CRC32C (Castagnoli) of bytes 0..60 and the payload
//	    64        payload
//
// The checksum finds rot; the hash binds the order: equal hashes mean equal entries, and equal
// histories before the entries. A reader refuses an entry of a newer version than the reader
// knows (kind Version).
package journal

import (
	"context"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"hash/crc32"

	"penstock.io/penstock/meta"
)

// MaxPayload is the largest payload of an entry, in bytes. An entry with key and comparisons
// stays below etcd's request limit of 1.5 MiB, and two entries fit one page of a read.
const MaxPayload = 700 << 10

// HeaderSize is the bytes of an entry before its payload.
const HeaderSize = 64

// Version is the newest entry format that the program writes and reads.
const Version = 1

// Hash identifies an entry and all entries before it.
type Hash [16]byte

// String renders the hash as 32 hexadecimal digits.
func (h Hash) String() string { return hex.EncodeToString(h[:]) }

// Position is a place in a log: all entries up to and including Seq, whose hash is Hash. The
// zero Position is before the first entry.
type Position struct {
	Seq  meta.Seq
	Hash Hash
}

// String renders the position for people.
func (p Position) String() string { return fmt.Sprintf("%d/%s", p.Seq, p.Hash) }

// Entry is one commit. Next makes an entry, without copying Payload.
type Entry struct {
	Volume  meta.VolumeID
	Seq     meta.Seq
	Term    meta.Term
	Prev    Hash
	Hash    Hash
	Payload []byte
}

// Position is the place after the entry.
func (e Entry) Position() Position { return Position{e.Seq, e.Hash} }

// Next makes the entry that follows a position.
func Next(v meta.VolumeID, after Position, term meta.Term, payload []byte) Entry {
	e := Entry{Volume: v, Seq: after.Seq + 1, Term: term, Prev: after.Hash, Payload: payload}
	var head [HeaderSize]byte
	e.header(head[:])
	e.Hash = hashOf(head[:], payload)
	return e
}

// Log is the journal of one volume. Only the owner appends and trims, one Append at a time; any
// process may read.
type Log interface {
	// Append commits e, which must follow the last entry. After Append returned nil, e is
	// durable on a majority of etcd. Append settles a commit of unknown outcome (a timeout, a
	// lost connection) before returning: Append proposes the entry again and reads the log
	// until the entry exists with the same bytes, or until another owner makes the commit
	// impossible. If ctx ends or the lease is lost earlier, Append returns Unavailable. Then
	// the entry may or may not exist, every later Append on the Log fails, and the caller must
	// drop uncommitted state, take ownership again and read to the end. Errors: Fenced (another
	// owner, or ownership lost; e is not in the log and never will be), NoSpace (nothing was
	// written), ResourceExceeded (payload too large), Corrupt (the log has entries that the
	// owner did not write), Again (e does not follow the end), Unavailable.
	Append(ctx context.Context, e Entry) error

	// Read calls fn for every entry after a position, in order, up to the end of the log at
	// some moment after the call. fn owns the payloads. Read checks the checksum, number and
	// hash of each entry, and that each entry continues the previous entry. An error of fn ends
	// Read. Errors: Stale (entries after the position were trimmed: load the checkpoint), Ahead
	// (the log ends before the position: the log's storage was set back to an older copy, and
	// nothing may be written over the reader's state), Corrupt (a gap or a mismatch), Version,
	// Unavailable.
	Read(ctx context.Context, after Position, fn func(Entry) error) error

	// Follow reads like Read and continues as the log grows, until ctx ends (the error is
	// ctx's), fn fails, or Read would fail. If caughtUp is not nil, Follow calls caughtUp each
	// time at the end of the log.
	Follow(ctx context.Context, after Position, fn func(Entry) error, caughtUp func()) error

	// Entry reads one entry. Errors: NotFound, Corrupt, Version, Unavailable.
	Entry(ctx context.Context, seq meta.Seq) (Entry, error)

	// Trim records a checkpoint durably, verifies the record by reading, then deletes the
	// entries before cp.Seq, except the last entry and entries protected by a pin. The entry
	// cp.Seq must exist with cp.Hash. Errors: Fenced, Corrupt (no such entry), Invalid (cp is
	// older than the recorded checkpoint), NoSpace, Unavailable.
	Trim(ctx context.Context, cp Checkpoint) error

	// Checkpoint returns the recorded checkpoint; false: none is recorded.
	Checkpoint(ctx context.Context) (Checkpoint, bool, error)

	// Pin returns the recorded checkpoint, and protects the checkpoint and the entries after
	// cp.Seq from trimming until release is called or the reader's lease ends. Before the files
	// of older checkpoints are deleted, the caller must ask OldestPin. Errors: NotFound (no
	// checkpoint), Unavailable.
	Pin(ctx context.Context) (cp Checkpoint, release func(context.Context) error, err error)

	// OldestPin returns the lowest entry number that a reader protects; false: no pin exists.
	OldestPin(ctx context.Context) (meta.Seq, bool, error)

	// Size returns the bytes of all entries.
	Size(ctx context.Context) (int64, error)
}

const (
	magic0 = 'P'
	magic1 = 'J'
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// header fills everything but the checksum.
func (e *Entry) header(b []byte) {
	b[0], b[1], b[2], b[3] = magic0, magic1, Version, 0
	binary.BigEndian.PutUint32(b[4:], uint32(e.Volume))
	binary.BigEndian.PutUint64(b[8:], uint64(e.Seq))
	binary.BigEndian.PutUint64(b[16:], uint64(e.Term))
	copy(b[24:40], e.Prev[:])
	copy(b[40:56], e.Hash[:])
	binary.BigEndian.PutUint32(b[56:], uint32(len(e.Payload)))
}

func hashOf(head, payload []byte) (h Hash) {
	s := sha256.New()
	s.Write(head[2:40])
	s.Write(payload)
	var sum [sha256.Size]byte
	copy(h[:], s.Sum(sum[:0]))
	return h
}

func checksum(head, payload []byte) uint32 {
	return crc32.Update(crc32.Checksum(head[:60], castagnoli), castagnoli, payload)
}

// Encode gives the entry's bytes. Errors: ResourceExceeded.
func Encode(e Entry) ([]byte, error) {
	if len(e.Payload) > MaxPayload {
		return nil, meta.E("encode journal entry", meta.ResourceExceeded, e.Position().String(),
			fmt.Errorf("payload of %d bytes exceeds %d", len(e.Payload), MaxPayload))
	}
	b := make([]byte, HeaderSize, HeaderSize+len(e.Payload))
	e.header(b)
	binary.BigEndian.PutUint32(b[60:], checksum(b, e.Payload))
	return append(b, e.Payload...), nil
}

// Decode decodes an entry, and checks the checksum and the hash; the payload shares b's memory.
// Errors: Corrupt, Version.
func Decode(b []byte) (Entry, error) {
	corrupt := func(format string, a ...any) (Entry, error) {
		return Entry{}, meta.E("decode journal entry", meta.Corrupt, "", fmt.Errorf(format, a...))
	}
	if len(b) < HeaderSize || b[0] != magic0 || b[1] != magic1 {
		return corrupt("%d bytes are no entry", len(b))
	}
	if b[2] > Version {
		return Entry{}, meta.E("decode journal entry", meta.Version, "",
			fmt.Errorf("entry has format %d, this program knows up to %d", b[2], Version))
	}
	head, payload := b[:HeaderSize], b[HeaderSize:]
	if n := binary.BigEndian.Uint32(b[56:]); uint64(n) != uint64(len(payload)) {
		return corrupt("payload has %d bytes, not %d", len(payload), n)
	}
	if want, got := binary.BigEndian.Uint32(b[60:]), checksum(head, payload); want != got {
		return corrupt("checksum %08x, want %08x", got, want)
	}
	if b[2] != Version || b[3] != 0 {
		return corrupt("version %d, flags %02x", b[2], b[3])
	}
	e := Entry{
		Volume:  meta.VolumeID(binary.BigEndian.Uint32(b[4:])),
		Seq:     meta.Seq(binary.BigEndian.Uint64(b[8:])),
		Term:    meta.Term(binary.BigEndian.Uint64(b[16:])),
		Payload: payload,
	}
	copy(e.Prev[:], b[24:40])
	copy(e.Hash[:], b[40:56])
	if h := hashOf(head, payload); h != e.Hash {
		return corrupt("hash %s, want %s", h, e.Hash)
	}
	return e, nil
}

// Chain checks entries in the order of reading: each must belong to the volume and continue the
// previous entry.
type Chain struct {
	Volume meta.VolumeID
	At     Position
	Term   meta.Term // of the last entry seen
}

// Step accepts the next entry, or returns why e can't be the next. Errors: Corrupt.
func (c *Chain) Step(e Entry) error {
	var why error
	switch {
	case e.Volume != c.Volume:
		why = fmt.Errorf("it belongs to volume %d", e.Volume)
	case e.Seq != c.At.Seq+1:
		why = fmt.Errorf("it is entry %d: a gap", e.Seq)
	case e.Prev != c.At.Hash:
		why = fmt.Errorf("it follows %s, not %s", e.Prev, c.At.Hash)
	case e.Term < c.Term:
		why = fmt.Errorf("its term %d is older than %d before it", e.Term, c.Term)
	default:
		c.At, c.Term = e.Position(), e.Term
		return nil
	}
	return meta.E("read journal", meta.Corrupt, fmt.Sprintf("volume %d entry %d", c.Volume, c.At.Seq+1), why)
}
