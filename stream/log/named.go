package log

import (
	"crypto/sha256"
	"encoding/binary"
	"math"

	"penstock.io/penstock/meta"
)

// A producer with a name, whose state has the form of that of an idempotent producer: the name
// gives the producer id, and a sequence number of 46 bits is split into the producer's epoch and
// the sequence number of a batch. Unlike a producer of the Kafka protocol, a producer with a name
// begins again where the log ends, with any division into batches: so every sequence number up
// to the last one counts as repeated, and numbers may be left out where the producer says so.
//
//	id        bit 62 | the first 62 bits of the SHA-256 of the name; other ids are smaller
//	number    epoch 15 | sequence number of a record 31

// firstNamed is the smallest id of a producer with a name.
const firstNamed = 1 << 62

// MaxNumber is the greatest sequence number of a record of a producer with a name.
const MaxNumber = 1<<46 - 1

// numberBits is the size of the part of a number that is the sequence number of a batch.
const numberBits = 31

// NamedProducer returns the producer id of a name.
func NamedProducer(name string) int64 {
	sum := sha256.Sum256([]byte(name))
	return firstNamed | int64(binary.BigEndian.Uint64(sum[:])>>2)
}

// Named reports whether the batch is of a producer with a name.
func (b *Batch) Named() bool { return b.Producer >= firstNamed }

// First and Last return the numbers of the first and the last record of a batch of a producer
// with a name.
func (b *Batch) First() int64 { return int64(b.Epoch)<<numberBits | int64(b.Sequence) }
func (b *Batch) Last() int64  { return b.First() + int64(b.LastDelta) }

// Number sets the producer and the number of the first record. A batch has at most Room(number)
// records.
func (b *Batch) Number(producer, first int64) {
	b.Producer, b.Epoch, b.Sequence = producer, int16(first>>numberBits), int32(first&math.MaxInt32)
}

// Room returns how many records a batch may have whose first record has a number.
func Room(first int64) int64 { return 1<<numberBits - first&math.MaxInt32 }

// admitNamed checks the numbers of a batch of a producer with a name. Errors: Invalid.
func (b *Batch) admitNamed() error {
	if int64(b.LastDelta) >= Room(b.First()) {
		return fail(meta.Invalid, "the numbers %d to %d of a batch are of two epochs", b.First(), b.Last())
	}
	return nil
}

// Place says where the last record of a producer with a name lies.
type Place struct {
	Last   int64 // number of the record
	Offset int64
}

// Place returns the place of the last record of a producer; ok is false for an unknown
// producer.
func (ps *Producers) Place(id int64) (p Place, ok bool) {
	of := ps.of[id]
	if of == nil {
		return Place{}, false
	}
	s := of.batches[len(of.batches)-1]
	return Place{Last: of.number(s.last), Offset: s.base + int64(s.last-s.first)}, true
}

// Find returns the offset of a record of a producer with a name; ok is false if the record is
// not in one of the remembered batches.
func (ps *Producers) Find(id, number int64) (offset int64, ok bool) {
	of := ps.of[id]
	if of == nil {
		return 0, false
	}
	for _, s := range of.batches {
		if of.number(s.first) <= number && number <= of.number(s.last) {
			return s.base + number - of.number(s.first), true
		}
	}
	return 0, false
}

func (p *producer) number(sequence int32) int64 {
	return int64(p.epoch)<<numberBits | int64(sequence)
}

// CheckNamed decides about a batch of a producer with a name. previous is the number of the
// producer's record before the batch. The batch is Repeated, at an unknown offset, if the log has
// all numbers or later ones, and OutOfOrder if the log has a part of the numbers, or if previous is
// not the producer's last record. The first batch of an unknown producer may have any numbers.
func (ps *Producers) CheckNamed(b *Batch, previous int64) Verdict {
	at, ok := ps.Place(b.Producer)
	switch {
	case !ok:
		return Append
	case b.Last() <= at.Last:
		return Repeated
	case previous != at.Last || b.First() <= at.Last:
		return OutOfOrder
	}
	return Append
}
