// Package log defines the log of a stream's partition: record batches, the state of
// idempotent producers, sparse indexes of segments, and the recovery of a segment after a
// crash. The package is pure: bytes and times are arguments, and nothing here reads a file,
// a clock or chance.
//
// A partition's log is a sequence of segments, each an ordinary file. A segment is a sequence
// of record batches as producers send them over the Kafka protocol (message format 2).
// Numbers are big-endian:
//
//	 0  8  offset of the first record, assigned by the partition's leader
//	 8  4  length of the rest, from byte 12 on
//	12  4  epoch of the leader that appended the batch
//	16  1  format, 2
//	17  4  CRC32C of the rest, from byte 21 on
//	21  2  attributes: compression 0-2, time of append 3, transactional 4, control 5
//	23  4  offset of the last record minus that of the first
//	27  8  time of the first record, ms since 1970
//	35  8  greatest time of a record, ms since 1970
//	43  8  producer id; -1: not idempotent
//	51  2  producer epoch
//	53  4  sequence number of the first record
//	57  4  number of records
//	61     records, compressed as a whole
//
// A batch that a producer has sent has a record for each offset. A compaction by key removes
// records (package stream/compact): the other records keep their offsets, and a batch without
// records stands for offsets without records.
//
// The checksum does not cover the offset and the leader's epoch, so the leader sets them
// without touching the rest of the batch.
package log

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"

	"penstock.io/penstock/meta"
)

// HeaderSize is the size of a batch without its records, in bytes.
const HeaderSize = 61

// prefixSize is the size of the fields that the length does not count.
const prefixSize = 12

const format = 2

// Compression of the records of a batch.
const (
	Plain  = 0
	Gzip   = 1
	Snappy = 2
	LZ4    = 3
	Zstd   = 4
)

const (
	compressionBits = 0x07
	bitTransaction  = 0x10
	bitControl      = 0x20
	knownBits       = 0x7f
)

// NoProducer is the producer id of a batch of a producer that is not idempotent.
const NoProducer = -1

// ErrShort says that the bytes end before the batch does.
var ErrShort = errors.New("the bytes end within a batch")

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// Batch is the header of a record batch.
type Batch struct {
	Base        int64 // offset of the first record
	Size        int   // bytes of the whole batch
	LeaderEpoch int32
	Attributes  int16
	LastDelta   int32 // offset of the last record minus Base
	BaseTime    int64 // ms since 1970
	MaxTime     int64 // ms since 1970
	Producer    int64 // NoProducer: not idempotent
	Epoch       int16 // of the producer
	Sequence    int32 // of the first record
	Records     int32

	crc uint32
}

// Next returns the offset after the last record.
func (b *Batch) Next() int64 { return b.Base + int64(b.LastDelta) + 1 }

// Compression returns the compression of the records: Plain to Zstd, or a greater number that
// this program does not know.
func (b *Batch) Compression() int { return int(b.Attributes & compressionBits) }

// SetCompression sets the compression of the records.
func (b *Batch) SetCompression(c int) {
	b.Attributes = b.Attributes&^compressionBits | int16(c)&compressionBits
}

// Idempotent reports whether the batch has a producer id and a sequence number.
func (b *Batch) Idempotent() bool { return b.Producer != NoProducer }

// Transactional reports whether the batch belongs to a transaction, Control whether it is a
// marker of one.
func (b *Batch) Transactional() bool { return b.Attributes&bitTransaction != 0 }

// Control reports whether the batch is a marker of a transaction.
func (b *Batch) Control() bool { return b.Attributes&bitControl != 0 }

// LastSequence returns the sequence number of the last record. Sequence numbers wrap around
// from 2^31-1 to 0.
func (b *Batch) LastSequence() int32 { return addSequence(b.Sequence, b.LastDelta) }

func addSequence(s, n int32) int32 { return int32((int64(s) + int64(n)) & 0x7fffffff) }

// Parse decodes the header of the batch at the beginning of p, without looking at the records.
// max bounds the size of a batch, in bytes. Errors: ErrShort (p does not have the whole
// batch; if p has a header, Batch.Size tells how many bytes are needed), Version (another
// format), TooBig, Corrupt.
func Parse(p []byte, max int) (b Batch, err error) {
	if len(p) < prefixSize+5 {
		return b, ErrShort
	}
	length := int32(binary.BigEndian.Uint32(p[8:]))
	if p[16] != format {
		return b, fail(meta.Version, "message format %d is not %d", p[16], format)
	}
	if length < HeaderSize-prefixSize {
		return b, fail(meta.Corrupt, "a batch of %d bytes is shorter than its header", int64(length)+prefixSize)
	}
	if int64(length)+prefixSize > int64(max) {
		return b, fail(meta.TooBig, "a batch of %d bytes is larger than %d", int64(length)+prefixSize, max)
	}
	b.Size = int(length) + prefixSize
	if len(p) < HeaderSize {
		return b, ErrShort
	}
	b.Base = int64(binary.BigEndian.Uint64(p))
	b.LeaderEpoch = int32(binary.BigEndian.Uint32(p[12:]))
	b.crc = binary.BigEndian.Uint32(p[17:])
	b.Attributes = int16(binary.BigEndian.Uint16(p[21:]))
	b.LastDelta = int32(binary.BigEndian.Uint32(p[23:]))
	b.BaseTime = int64(binary.BigEndian.Uint64(p[27:]))
	b.MaxTime = int64(binary.BigEndian.Uint64(p[35:]))
	b.Producer = int64(binary.BigEndian.Uint64(p[43:]))
	b.Epoch = int16(binary.BigEndian.Uint16(p[51:]))
	b.Sequence = int32(binary.BigEndian.Uint32(p[53:]))
	b.Records = int32(binary.BigEndian.Uint32(p[57:]))
	if b.LastDelta < 0 || b.Records < 0 || b.Base < 0 || b.Base > b.Base+int64(b.LastDelta)+1 {
		return b, fail(meta.Corrupt, "a batch of %d records at offset %d ends %d after it", b.Records, b.Base, b.LastDelta)
	}
	if len(p) < b.Size {
		return b, ErrShort
	}
	return b, nil
}

// Verify compares the batch at the beginning of p, whose header is b, with its checksum.
// Errors: Corrupt.
func (b *Batch) Verify(p []byte) error {
	if got := crc32.Checksum(p[21:b.Size], castagnoli); got != b.crc {
		return fail(meta.Corrupt, "the checksum of the batch at offset %d is %08x, not %08x", b.Base, got, b.crc)
	}
	return nil
}

// Admit checks a batch that a producer has sent: p must be exactly one batch. Besides the
// checksum, the numbers must agree: the records are numbered without gaps, and the producer
// id, epoch and sequence number are all present or all absent. Compressed records are not
// examined. Errors: those of Parse, with ErrShort as Corrupt; Invalid (numbers that do not
// agree, or a marker of a transaction).
func Admit(p []byte, max int) (Batch, error) {
	b, err := Parse(p, max)
	if errors.Is(err, ErrShort) {
		return b, fail(meta.Corrupt, "a batch is cut after %d bytes", len(p))
	}
	if err != nil {
		return b, err
	}
	if b.Size != len(p) {
		return b, fail(meta.Corrupt, "%d bytes follow a batch", len(p)-b.Size)
	}
	if err := b.Verify(p); err != nil {
		return b, err
	}
	switch {
	case b.Records == 0 || b.Records-1 != b.LastDelta:
		return b, fail(meta.Invalid, "%d records are numbered up to %d", b.Records, b.LastDelta)
	case b.Control():
		return b, fail(meta.Invalid, "a producer can't write markers of transactions")
	case b.Attributes&^knownBits != 0 || b.Compression() > Zstd:
		return b, fail(meta.Invalid, "attributes %#x are unknown", b.Attributes)
	case b.Idempotent() && (b.Producer < 0 || b.Epoch < 0 || b.Sequence < 0):
		return b, fail(meta.Invalid, "producer %d has epoch %d and sequence number %d", b.Producer, b.Epoch, b.Sequence)
	}
	if b.Named() {
		if err := b.admitNamed(); err != nil {
			return b, err
		}
	}
	if b.Compression() == Plain {
		n := int32(0)
		if err := b.Each(p[HeaderSize:b.Size], func(Record) error { n++; return nil }); err != nil {
			return b, err
		}
	}
	return b, nil
}

// Assign sets the offset of the first record and the leader's epoch of the batch at the
// beginning of p.
func (b *Batch) Assign(p []byte, base int64, epoch int32) {
	b.Base, b.LeaderEpoch = base, epoch
	binary.BigEndian.PutUint64(p, uint64(base))
	binary.BigEndian.PutUint32(p[12:], uint32(epoch))
}

func fail(kind meta.Kind, format string, args ...any) error {
	return meta.E("read batch", kind, "stream", fmt.Errorf(format, args...))
}
