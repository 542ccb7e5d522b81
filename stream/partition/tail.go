package partition

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/stream/log"
)

// Files are the segments of a partition for a client that does not lead the partition. A segment
// is named by the offset of its first record. A segment shows the bytes that its leader has
// synced, and no others. Errors: NotFound (no such segment), Stale (the partition was removed).
type Files interface {
	// Segments returns the offsets of the segments, in any order.
	Segments(ctx context.Context) ([]int64, error)
	// Size returns the bytes of a segment.
	Size(ctx context.Context, first int64) (int64, error)
	// ReadAt reads bytes of a segment. At the end of the segment, ReadAt returns fewer bytes than
	// p has, and io.EOF.
	ReadAt(ctx context.Context, first int64, p []byte, off int64) (int, error)
}

// Tail reads the batches of a partition from the files alone, as the partition's leader appends
// the batches. A Tail is for one goroutine at a time.
//
// When retention has removed the place of a Tail, the Tail goes on with the first record that is
// left. When a rollback has cut the log before the place, the Tail goes on at the new end.
type Tail struct {
	files Files
	name  string // of the partition, for errors

	next  int64 // offset of the next record
	first int64 // of the segment with the record; none: the partition has no segment
	pos   int64 // of the batch with the record, in the segment
	buf   []byte
	bufAt int64 // position of buf in the segment
	// odd is the size of the segment when the bytes at pos were no batch; 0: they were one.
	odd int64
}

const none = -1 // no segment

// fromEnd as the offset of OpenTail is the end of the log.
const fromEnd = -1

// tailRead is how much a Tail reads at once, in bytes. Larger batches are read in the whole.
const tailRead = 256 << 10

// tailTries bounds the attempts to find a place while segments come and go.
const tailTries = 8

// OpenTail opens a Tail whose next record has an offset; -1: the next record to be appended.
func OpenTail(ctx context.Context, files Files, name string, offset int64) (*Tail, error) {
	t := &Tail{files: files, name: name, first: none}
	return t, t.find(ctx, max(offset, fromEnd))
}

// Offset returns the offset of the next record.
func (t *Tail) Offset() int64 { return t.next }

// find sets the place of an offset, or of the end of the log.
func (t *Tail) find(ctx context.Context, offset int64) (err error) {
	t.buf, t.odd = nil, 0
	for range tailTries {
		var firsts []int64
		if firsts, err = t.files.Segments(ctx); err != nil {
			return err
		}
		if len(firsts) == 0 {
			t.first, t.pos, t.next = none, 0, max(offset, 0)
			return nil
		}
		slices.Sort(firsts)
		i := len(firsts) - 1
		for offset >= 0 && i > 0 && firsts[i] > offset {
			i--
		}
		if err = t.findIn(ctx, firsts[i], offset); !errors.Is(err, meta.NotFound) {
			return err
		}
	}
	return err
}

// findIn sets the place of an offset within a segment.
func (t *Tail) findIn(ctx context.Context, first, offset int64) error {
	size, err := t.files.Size(ctx, first)
	if err != nil {
		return err
	}
	pos := int64(0)
	s, _, err := log.Scan(&segmentReader{ctx: ctx, files: t.files, first: first, end: size}, first, DefaultMaxBatch, func(b *log.Batch) {
		if b.Next() <= offset {
			pos += int64(b.Size)
		}
	})
	if err != nil {
		return err
	}
	t.first, t.pos, t.next = first, pos, max(offset, first)
	if offset < 0 || offset >= s.Next {
		t.pos, t.next = s.Size, s.Next
	}
	return nil
}

// segmentReader reads a segment from its beginning to a size.
type segmentReader struct {
	ctx            context.Context
	files          Files
	first, at, end int64
}

func (r *segmentReader) Read(p []byte) (int, error) {
	if r.at >= r.end {
		return 0, io.EOF
	}
	n, err := r.files.ReadAt(r.ctx, r.first, p[:min(int64(len(p)), r.end-r.at)], r.at)
	r.at += int64(n)
	if n > 0 && errors.Is(err, io.EOF) {
		err = nil
	}
	return n, err
}

// Next returns the batch with the next record, with its header; no bytes if the record was not
// appended yet. The bytes are valid until the next call. Errors: Corrupt, Stale (the partition
// was removed), and those of the files.
func (t *Tail) Next(ctx context.Context) (log.Batch, []byte, error) {
	for range tailTries {
		if b, ok := t.buffered(); ok {
			return b, t.buf[:b.Size], nil
		}
		again, err := t.read(ctx)
		if err != nil || !again {
			return log.Batch{}, nil, err
		}
	}
	return log.Batch{}, nil, nil
}

// buffered returns the batch at the beginning of buf, if it is whole and the next one.
func (t *Tail) buffered() (log.Batch, bool) {
	if t.bufAt != t.pos || len(t.buf) == 0 {
		return log.Batch{}, false
	}
	b, err := log.Parse(t.buf, DefaultMaxBatch)
	if err != nil || b.Base > t.next || b.Next() <= t.next || b.Verify(t.buf) != nil {
		return b, false
	}
	return b, true
}

// Advance makes an offset of the batch that Next returned, or the offset after it, the offset of
// the next record.
func (t *Tail) Advance(offset int64) {
	b, err := log.Parse(t.buf, DefaultMaxBatch)
	if err != nil || offset < t.next || offset > b.Next() {
		panic(fmt.Sprintf("partition: a tail at offset %d is advanced to %d, beyond its batch", t.next, offset))
	}
	t.next = offset
	if offset == b.Next() {
		t.pos, t.buf = t.pos+int64(b.Size), t.buf[b.Size:]
		t.bufAt = t.pos
	}
}

// read fills buf, or goes to the next segment; again is false if nothing new was appended.
func (t *Tail) read(ctx context.Context) (again bool, err error) {
	if t.first == none {
		err := t.find(ctx, t.next)
		return t.first != none, err
	}
	size, err := t.files.Size(ctx, t.first)
	if errors.Is(err, meta.NotFound) || err == nil && size < t.pos {
		return true, t.find(ctx, t.next) // retention, or a rollback
	}
	if err != nil {
		return false, err
	}
	if size == t.pos || size == t.odd {
		return t.follow(ctx, size == t.odd)
	}
	want := min(size-t.pos, tailRead)
	p := make([]byte, want)
	if err := t.fill(ctx, p); err != nil {
		return false, err
	}
	b, perr := log.Parse(p, DefaultMaxBatch)
	if errors.Is(perr, log.ErrShort) && b.Size > len(p) && int64(b.Size) <= size-t.pos {
		p = make([]byte, b.Size)
		if err := t.fill(ctx, p); err != nil {
			return false, err
		}
	}
	t.buf, t.bufAt = p, t.pos
	if _, ok := t.buffered(); ok {
		return true, nil
	}
	if errors.Is(perr, log.ErrShort) && b.Base == t.next {
		t.odd = size // the rest comes with the leader's next sync, or the next recovery cuts the part
		return t.follow(ctx, true)
	}
	// A rollback has cut the log, which has grown again meanwhile; or the next recovery cuts these
	// bytes.
	first, pos := t.first, t.pos
	if err := t.find(ctx, t.next); err != nil {
		return false, err
	}
	if t.first != first || t.pos != pos {
		return true, nil
	}
	t.odd = size
	return t.follow(ctx, true)
}

// fill reads bytes at pos.
func (t *Tail) fill(ctx context.Context, p []byte) error {
	n, err := t.files.ReadAt(ctx, t.first, p, t.pos)
	if n == len(p) || errors.Is(err, meta.NotFound) {
		return nil // the next look finds out what became of the segment
	}
	if err == nil || errors.Is(err, io.EOF) { // the segment was cut meanwhile
		clear(p[n:])
		return nil
	}
	return err
}

// follow goes to the segment that begins with the next record, if it is there. odd: the segment
// before has bytes after its last batch.
func (t *Tail) follow(ctx context.Context, odd bool) (again bool, err error) {
	if t.next == t.first {
		return false, nil // an empty segment
	}
	_, err = t.files.Size(ctx, t.next)
	switch {
	case errors.Is(err, meta.NotFound):
		return false, nil
	case err != nil:
		return false, err
	case odd:
		if size, err := t.files.Size(ctx, t.first); err != nil || size != t.odd {
			return err == nil, err // a recovery has cut the bytes
		}
		return false, meta.E("read", meta.Corrupt, t.name, fmt.Errorf("segment %s has bytes after its last batch, and another segment follows", SegmentName(t.first)))
	}
	t.first, t.pos, t.buf, t.odd = t.next, 0, nil, 0
	return true, nil
}
