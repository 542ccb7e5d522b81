// Package compact decides which records a compaction by key keeps, and makes the batches that are
// left of a segment. Of each key the last record stays, at its offset, and records without a
// key stay. The batches of a segment follow each other without gaps before and after: where all
// records of a batch are gone, a batch without records has the offsets.
package compact

import (
	"bytes"
	"compress/gzip"
	"crypto/sha256"
	"fmt"
	"io"
	"math"

	"github.com/klauspost/compress/zstd"
	"github.com/pierrec/lz4/v4"

	"penstock.io/penstock/stream/decompress"
	"penstock.io/penstock/stream/log"
)

// hash stands for a key. A client can't make two keys with the same hash.
type hash [16]byte

func hashOf(key []byte) hash {
	sum := sha256.Sum256(key)
	return hash(sum[:16])
}

// Keys has the offset of the last record of each of some keys.
type Keys struct {
	of   map[hash]int64
	most int
}

// NewKeys makes Keys that are full with a number of keys.
func NewKeys(most int) *Keys { return &Keys{of: map[hash]int64{}, most: most} }

// Full reports that a further batch should go into other Keys.
func (k *Keys) Full() bool { return len(k.of) >= k.most }

// Len returns the number of keys.
func (k *Keys) Len() int { return len(k.of) }

// Add adds the records of the batch p, whose header is b. The batches come in the order of their
// offsets. A batch that can't be decoded adds nothing: Rewriter keeps such a batch.
func (k *Keys) Add(b *log.Batch, p []byte) {
	plain, err := decompress.Records(b.Compression(), p[log.HeaderSize:])
	if err != nil {
		return
	}
	_ = b.Each(plain, func(r log.Record) error { // what was decoded before an error is true
		if r.Key != nil {
			k.of[hashOf(r.Key)] = r.Offset
		}
		return nil
	})
}

// Rewriter makes the bytes of a segment after a compaction. Keys are the last records. All earlier
// records of a key with a record before Clean have been removed. With Tombstones, a last record
// without a value is removed, too. Remembered are the offsets of the batches by which repeated
// batches of idempotent producers are recognised: their headers stay.
type Rewriter struct {
	Keys       *Keys
	Clean      int64
	Tombstones bool
	Remembered map[int64]struct{}

	out     []byte
	gap     *log.Batch // a batch without records, not in out yet
	removed int64
}

// keep decides about a record.
func (w *Rewriter) keep(r *log.Record) bool {
	if r.Key == nil {
		return true
	}
	last, known := w.Keys.of[hashOf(r.Key)]
	switch {
	case known && last > r.Offset:
		return false
	case r.Value != nil || !w.Tombstones:
		return true
	case known:
		return last < r.Offset // beyond the records that Keys is of: the record at last stays, too
	}
	return r.Offset >= w.Clean
}

// Add adds the batch p, whose header is b. A batch that can't be decoded stays as it is.
// Errors: those of the compression.
func (w *Rewriter) Add(b *log.Batch, p []byte) error {
	plain, err := decompress.Records(b.Compression(), p[log.HeaderSize:])
	var records []byte
	kept, latest := int32(0), int64(math.MinInt64)
	if err == nil {
		err = b.Each(plain, func(r log.Record) error {
			if w.keep(&r) {
				kept, latest = kept+1, max(latest, r.Time)
				records = log.AppendRecord(records, int32(r.Offset-b.Base), r.Time-b.BaseTime, r.Key, r.Value, r.Headers)
			}
			return nil
		})
	}
	if err != nil || kept == b.Records && kept > 0 {
		w.flush()
		w.out = append(w.out, p[:b.Size]...)
		return nil
	}
	w.removed += int64(b.Records - kept)
	if kept == 0 {
		w.empty(b)
		return nil
	}
	left := *b
	left.Records, left.MaxTime = kept, latest
	codec, packed, err := compress(b.Compression(), records)
	if err != nil {
		return fmt.Errorf("compress the batch at offset %d: %w", b.Base, err)
	}
	left.SetCompression(codec)
	w.flush()
	w.out = append(w.out, left.Encode(packed)...)
	return nil
}

// empty adds a batch without records in the place of a batch.
func (w *Rewriter) empty(b *log.Batch) {
	e := log.Batch{Base: b.Base, LastDelta: b.LastDelta, LeaderEpoch: b.LeaderEpoch, BaseTime: -1, MaxTime: -1, Producer: log.NoProducer, Epoch: -1, Sequence: -1}
	if _, ok := w.Remembered[b.Base]; ok && b.Idempotent() {
		e.Producer, e.Epoch, e.Sequence = b.Producer, b.Epoch, b.Sequence
		w.flush()
		w.out = append(w.out, e.Encode(nil)...)
		return
	}
	if g := w.gap; g != nil && g.LeaderEpoch == e.LeaderEpoch && int64(g.LastDelta)+int64(e.LastDelta)+1 <= math.MaxInt32 {
		g.LastDelta += e.LastDelta + 1
		return
	}
	w.flush()
	w.gap = &e
}

func (w *Rewriter) flush() {
	if w.gap != nil {
		w.out = append(w.out, w.gap.Encode(nil)...)
		w.gap = nil
	}
}

// Finish returns the bytes of the segment, and the number of records that were removed.
func (w *Rewriter) Finish() (segment []byte, removed int64) {
	w.flush()
	return w.out, w.removed
}

// compress compresses records as they were compressed before. Snappy has two forms, of which each
// client reads one for sure: LZ4 takes its place.
func compress(codec int, records []byte) (as int, packed []byte, err error) {
	var buf bytes.Buffer
	var to io.WriteCloser
	switch codec {
	case log.Gzip:
		to = gzip.NewWriter(&buf)
	case log.Snappy, log.LZ4:
		z := lz4.NewWriter(&buf)
		if err := z.Apply(lz4.ChecksumOption(false)); err != nil {
			return 0, nil, err
		}
		codec, to = log.LZ4, z
	case log.Zstd:
		if to, err = zstd.NewWriter(&buf, zstd.WithEncoderConcurrency(1)); err != nil {
			return 0, nil, err
		}
	default:
		return log.Plain, records, nil
	}
	_, err = to.Write(records)
	if cerr := to.Close(); err == nil {
		err = cerr
	}
	return codec, buf.Bytes(), err
}
