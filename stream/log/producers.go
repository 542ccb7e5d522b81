package log

import (
	"encoding/binary"
	"fmt"
	"hash/crc32"
	"maps"
	"slices"

	"penstock.io/penstock/meta"
)

// remembered is the number of batches of a producer by which a repeated batch is recognised.
// A Kafka producer has at most five requests to a partition under way.
const remembered = 5

// Producers is the state of a partition's idempotent producers: it recognises repeated
// batches and refuses batches that would leave a gap or come from an earlier epoch of the
// producer. It is a function of the log: Check decides about a batch, Add applies an appended
// one, and replaying the log gives the same state.
//
// INVARIANT: the batches of a producer have one epoch, ascending offsets, and sequence numbers
// that are consecutive, or ascending for a producer with a name; the number of batches is one to
// five, see Consistent.
type Producers struct {
	of map[int64]*producer
}

type producer struct {
	epoch   int16
	last    int64 // time of the last append, ms since 1970
	batches []sequenced
}

// sequenced is an appended batch of a producer.
type sequenced struct {
	first, last int32 // sequence numbers
	base        int64 // offset
}

// Verdict is the decision about a batch.
type Verdict uint8

const (
	// Append the batch.
	Append Verdict = iota
	// Repeated: the batch was appended before, at the returned offset. Acknowledge it.
	Repeated
	// OutOfOrder: the batch does not continue the producer's sequence
	// (OUT_OF_ORDER_SEQUENCE_NUMBER).
	OutOfOrder
	// Fenced: a later epoch of the producer has appended (INVALID_PRODUCER_EPOCH).
	Fenced
)

// Check decides about a batch that a producer has sent. For Repeated it returns the offset of
// the batch's first record.
//
// The rules are those of Kafka: the first batch of a new epoch has sequence number 0, and a
// producer without any state may begin with any number, because retention may have removed
// its earlier batches.
func (ps *Producers) Check(b *Batch) (Verdict, int64) {
	if !b.Idempotent() {
		return Append, 0
	}
	p := ps.of[b.Producer]
	if p == nil {
		return Append, 0
	}
	if b.Epoch < p.epoch {
		return Fenced, 0
	}
	if b.Epoch > p.epoch {
		if b.Sequence != 0 {
			return OutOfOrder, 0
		}
		return Append, 0
	}
	for _, s := range p.batches {
		if s.first == b.Sequence && s.last == b.LastSequence() {
			return Repeated, s.base
		}
	}
	if n := len(p.batches); n > 0 && addSequence(p.batches[n-1].last, 1) != b.Sequence {
		return OutOfOrder, 0
	}
	return Append, 0
}

// Add applies a batch that was appended to the log, with its offset. now is the time of the
// append, ms since 1970.
func (ps *Producers) Add(b *Batch, now int64) {
	if !b.Idempotent() {
		return
	}
	if ps.of == nil {
		ps.of = map[int64]*producer{}
	}
	p := ps.of[b.Producer]
	if p == nil || p.epoch != b.Epoch {
		p = &producer{epoch: b.Epoch}
		ps.of[b.Producer] = p
	}
	p.last = max(p.last, now)
	if n := len(p.batches); n > 0 && !follows(b.Producer, p.batches[n-1].last, b.Sequence) {
		p.batches = p.batches[:0] // a compaction has removed the batches between
	}
	if len(p.batches) == remembered {
		p.batches = append(p.batches[:0], p.batches[1:]...)
	}
	p.batches = append(p.batches, sequenced{first: b.Sequence, last: b.LastSequence(), base: b.Base})
}

// Bases returns the offsets of the batches by which repeated batches are recognised.
func (ps *Producers) Bases() map[int64]struct{} {
	all := map[int64]struct{}{}
	for _, p := range ps.of { // in any order
		for _, s := range p.batches {
			all[s.base] = struct{}{}
		}
	}
	return all
}

// Len returns the number of producers.
func (ps *Producers) Len() int { return len(ps.of) }

// Expire forgets producers without an append since the time before, ms since 1970. A later
// batch of such a producer is accepted with any sequence number.
func (ps *Producers) Expire(before int64) {
	maps.DeleteFunc(ps.of, func(_ int64, p *producer) bool { return p.last < before })
}

// Truncate forgets batches at and after an offset, as after a rollback. A producer without
// batches left is forgotten.
func (ps *Producers) Truncate(end int64) {
	maps.DeleteFunc(ps.of, func(_ int64, p *producer) bool {
		p.batches = slices.DeleteFunc(p.batches, func(s sequenced) bool { return s.base >= end })
		return len(p.batches) == 0
	})
}

// producersVersion is the newest format of the producers' state that this program knows.
const producersVersion = 1

// AppendBinary appends the state of the producers at an offset of the log, so that recovery
// need not read the log before it. Numbers are big-endian:
//
//	"PSPS" | version 1, 1 | end of the log 8 | producers 4 |
//	producers * ( id 8 | epoch 2 | time 8 | batches 1 | batches * ( first 4 | last 4 | offset 8 ) ) |
//	CRC32C of all before 4
func (ps *Producers) AppendBinary(dst []byte, end int64) []byte {
	start := len(dst)
	dst = append(dst, "PSPS"...)
	dst = append(dst, producersVersion)
	dst = binary.BigEndian.AppendUint64(dst, uint64(end))
	dst = binary.BigEndian.AppendUint32(dst, uint32(len(ps.of)))
	for _, id := range slices.Sorted(maps.Keys(ps.of)) {
		p := ps.of[id]
		dst = binary.BigEndian.AppendUint64(dst, uint64(id))
		dst = binary.BigEndian.AppendUint16(dst, uint16(p.epoch))
		dst = binary.BigEndian.AppendUint64(dst, uint64(p.last))
		dst = append(dst, byte(len(p.batches)))
		for _, s := range p.batches {
			dst = binary.BigEndian.AppendUint32(dst, uint32(s.first))
			dst = binary.BigEndian.AppendUint32(dst, uint32(s.last))
			dst = binary.BigEndian.AppendUint64(dst, uint64(s.base))
		}
	}
	return binary.BigEndian.AppendUint32(dst, crc32.Checksum(dst[start:], castagnoli))
}

// DecodeProducers decodes the output of AppendBinary and returns the end of the log that it
// describes. Errors: Version, Corrupt.
func DecodeProducers(b []byte) (ps Producers, end int64, err error) {
	bad := func(why string) (Producers, int64, error) {
		return Producers{}, 0, meta.E("read producers", meta.Corrupt, "stream", fmt.Errorf("%s", why))
	}
	const head, tail = 17, 4
	if len(b) < 5 || string(b[:4]) != "PSPS" {
		return bad("no state of producers")
	}
	if b[4] > producersVersion {
		return Producers{}, 0, meta.E("read producers", meta.Version, "stream", fmt.Errorf("version %d is newer than %d", b[4], producersVersion))
	}
	if len(b) < head+tail || crc32.Checksum(b[:len(b)-tail], castagnoli) != binary.BigEndian.Uint32(b[len(b)-tail:]) {
		return bad("wrong checksum")
	}
	end = int64(binary.BigEndian.Uint64(b[5:]))
	n := binary.BigEndian.Uint32(b[13:])
	b = b[head : len(b)-tail]
	if uint64(n)*19 > uint64(len(b)) {
		return bad("too many producers")
	}
	ps.of = make(map[int64]*producer, n)
	for range n {
		if len(b) < 19 {
			return bad("cut")
		}
		id := int64(binary.BigEndian.Uint64(b))
		p := &producer{epoch: int16(binary.BigEndian.Uint16(b[8:])), last: int64(binary.BigEndian.Uint64(b[10:]))}
		count := int(b[18])
		b = b[19:]
		if count == 0 || count > remembered || len(b) < 16*count || ps.of[id] != nil {
			return bad("wrong number of batches")
		}
		for range count {
			p.batches = append(p.batches, sequenced{
				first: int32(binary.BigEndian.Uint32(b)), last: int32(binary.BigEndian.Uint32(b[4:])), base: int64(binary.BigEndian.Uint64(b[8:])),
			})
			b = b[16:]
		}
		ps.of[id] = p
	}
	if len(b) > 0 {
		return bad("bytes after the last producer")
	}
	return ps, end, ps.Consistent()
}

// follows reports that a batch of a producer may begin with a sequence number after an earlier
// batch that ends with last.
func follows(id int64, last, first int32) bool {
	if id >= firstNamed {
		return first > last
	}
	return first == addSequence(last, 1)
}

// Consistent verifies the invariant. Errors: Corrupt.
func (ps *Producers) Consistent() error {
	for _, id := range slices.Sorted(maps.Keys(ps.of)) {
		p := ps.of[id]
		for i, s := range p.batches {
			if i > 0 && (!follows(id, p.batches[i-1].last, s.first) || p.batches[i-1].base >= s.base) {
				return meta.E("check producers", meta.Corrupt, "stream", fmt.Errorf("batches of producer %d do not follow each other: %v", id, p.batches))
			}
		}
		if len(p.batches) == 0 || len(p.batches) > remembered {
			return meta.E("check producers", meta.Corrupt, "stream", fmt.Errorf("producer %d has %d batches", id, len(p.batches)))
		}
	}
	return nil
}
