package lines

import (
	"context"
	"errors"
	"io"
	"time"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/stream/decompress"
	"penstock.io/penstock/stream/log"
	"penstock.io/penstock/stream/partition"
)

// Tail reads the text of a partition, and waits for records that are not appended yet. A Tail is
// for one goroutine at a time.
type Tail struct {
	from      *partition.Tail
	partition int
	asJSON    bool

	ready []line // made and not read
	skip  int    // bytes of the first line that were read
}

// line is the text of a record.
type line struct {
	offset int64
	text   []byte
}

// NewTail makes a Tail of a partition with a number. asJSON: the values are JSON. The next
// record of from is the first line; skip bytes of the line are left out.
func NewTail(from *partition.Tail, number int, asJSON bool, skip int) *Tail {
	return &Tail{from: from, partition: number, asJSON: asJSON, skip: skip}
}

// Place returns the place of the next byte: the offset of a record, and the number of bytes of
// the record's line before the byte.
func (t *Tail) Place() (offset int64, skip int) {
	if len(t.ready) == 0 {
		return t.from.Offset(), t.skip
	}
	return t.ready[0].offset, t.skip
}

// Bounds of the wait for new records: the first look, and the longest time between two looks. A
// look at a partition in which nothing happens is a request to the volume's owner.
const (
	firstLook = 10 * time.Millisecond
	lastLook  = 500 * time.Millisecond
)

// Read reads text, one byte or more, and waits until a record comes. Errors: io.EOF (the
// partition was removed), Interrupted (ctx has ended), Corrupt, and errors of the files.
func (t *Tail) Read(ctx context.Context, p []byte) (n int, err error) {
	for wait := firstLook; ; wait = min(2*wait, lastLook) {
		if len(t.ready) == 0 {
			err = t.fill(ctx)
		}
		if n = t.take(p); n > 0 || len(p) == 0 {
			return n, nil
		}
		switch {
		case ctx.Err() != nil: // below
		case errors.Is(err, meta.Stale):
			return 0, io.EOF
		case errors.Is(err, meta.Unavailable), errors.Is(err, meta.Again), errors.Is(err, meta.Busy):
			wait = lastLook // the owner of the volume may change
		case err != nil:
			return 0, err
		}
		select {
		case <-time.After(wait):
		case <-ctx.Done():
			return 0, meta.E("read", meta.Interrupted, "tail of a partition", context.Cause(ctx))
		}
	}
}

// take moves text to p.
func (t *Tail) take(p []byte) (n int) {
	for len(t.ready) > 0 && n < len(p) {
		text := t.ready[0].text
		t.skip = min(t.skip, len(text))
		m := copy(p[n:], text[t.skip:])
		if n, t.skip = n+m, t.skip+m; t.skip == len(text) {
			t.ready, t.skip = t.ready[1:], 0
		}
	}
	return n
}

// fillBytes is how much text is made at once, in bytes; a line may be longer.
const fillBytes = 128 << 10

// errFilled ends the records of a batch early.
var errFilled = errors.New("enough lines")

// fill makes the lines of the next records.
func (t *Tail) fill(ctx context.Context) error {
	t.ready = nil
	for made := 0; made < fillBytes; {
		b, p, err := t.from.Next(ctx)
		if err != nil && made > 0 {
			return nil // the next call finds the error again
		}
		if err != nil || p == nil {
			return err
		}
		first, next := t.from.Offset(), b.Next()
		plain, err := decompress.Records(b.Compression(), p[log.HeaderSize:])
		if err == nil {
			err = b.Each(plain, func(r log.Record) error {
				if r.Offset < first {
					return nil
				}
				if made >= fillBytes {
					next = r.Offset
					return errFilled
				}
				text := appendRecord(nil, t.partition, &r, t.asJSON)
				t.ready = append(t.ready, line{r.Offset, text})
				made += len(text)
				return nil
			})
		}
		if err != nil && !errors.Is(err, errFilled) {
			if n := len(t.ready); n > 0 && t.ready[n-1].offset >= first {
				first = t.ready[n-1].offset + 1 // the records before the damage are shown
			}
			if first < next {
				text := appendFailure(nil, t.partition, first, next-first, err)
				t.ready = append(t.ready, line{first, text})
				made += len(text)
			}
		}
		t.from.Advance(next)
	}
	return nil
}
