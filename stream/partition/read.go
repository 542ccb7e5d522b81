package partition

import (
	"context"
	"errors"
	"fmt"
	"io"
	"sort"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/stream/decompress"
	"penstock.io/penstock/stream/log"
)

// slack is read beside the requested bytes, because an index leads to a place before the batch.
const slack = 8 << 10

// Read returns whole batches from the log, the first of which has the record at an offset: at
// most max bytes, but at least a batch. At the high watermark Read returns nothing. Errors:
// Range (the offset is not between Bounds), Corrupt, the error of Err (the log was closed), and
// errors of the files.
func (l *Log) Read(offset int64, most int) ([]byte, error) {
	l.mu.Lock()
	start, high := l.startLocked(), l.high
	if offset < start || offset > high {
		l.mu.Unlock()
		return nil, l.fail("read", meta.Range, fmt.Errorf("offset %d is not between %d and %d", offset, start, high))
	}
	if offset == high {
		l.mu.Unlock()
		return nil, nil
	}
	s := l.segments[sort.Search(len(l.segments), func(i int) bool { return l.segments[i].First > offset })-1]
	scanned := s.scanned
	l.mu.Unlock()
	if !scanned {
		if err := l.load(s); err != nil {
			return nil, err
		}
	}
	l.mu.Lock()
	f, at, end, failed := s.file, s.Index.Find(offset), s.Size, l.err
	l.mu.Unlock()
	switch {
	case f == nil && failed != nil: // Close has closed the file: the records are still there
		return nil, failed
	case f == nil:
		return nil, l.fail("read", meta.Range, fmt.Errorf("offset %d was removed by retention", offset))
	}
	began := l.cfg.Now()
	p, err := l.readFrom(f, at, end, offset, most)
	if err != nil {
		return nil, err
	}
	l.cfg.Counters.Read.Add(l.cfg.Now().Sub(began))
	l.cfg.Counters.ReadBytes.Add(uint64(len(p)))
	for rest := p; len(rest) > 0; {
		b, err := log.Parse(rest, l.cfg.MaxBatch)
		if err != nil {
			break
		}
		l.cfg.Counters.ReadRecords.Add(uint64(b.Records))
		rest = rest[b.Size:]
	}
	return p, nil
}

// readFrom finds the batch with an offset at or after the position at of a segment, whose
// batches end at end.
func (l *Log) readFrom(f File, at, end, offset int64, most int) ([]byte, error) {
	want := int64(most) + slack
	for {
		buf := make([]byte, min(want, end-at))
		if n, err := f.ReadAt(buf, at); n < len(buf) {
			if err == nil || errors.Is(err, io.EOF) {
				err = l.fail("read", meta.Corrupt, fmt.Errorf("a segment ends at byte %d, before %d", at+int64(n), end))
			}
			return nil, err
		}
		skip := 0 // bytes before the batch
		for {
			b, err := log.Parse(buf[skip:], l.cfg.MaxBatch)
			if err != nil && !errors.Is(err, log.ErrShort) {
				return nil, err
			}
			if err != nil && len(buf)-skip < log.HeaderSize || err != nil && b.Next() > offset {
				// The batch lies beyond the bytes, in part or in the whole: begin with the batch.
				if skip == 0 && int64(len(buf)) == end-at {
					return nil, l.fail("read", meta.Corrupt, fmt.Errorf("the batch at byte %d ends after its segment", at))
				}
				at, want = at+int64(skip), max(want, int64(b.Size))
				break
			}
			if b.Next() > offset {
				return l.whole(buf[skip:], most), nil
			}
			skip += b.Size
			if skip >= len(buf) {
				at += int64(skip)
				if at >= end {
					return nil, l.fail("read", meta.Corrupt, fmt.Errorf("offset %d is not in its segment", offset))
				}
				break
			}
		}
	}
}

// whole cuts bytes after the last whole batch within max bytes; the first batch always stays.
func (l *Log) whole(p []byte, most int) []byte {
	n := 0
	for n < len(p) {
		b, err := log.Parse(p[n:], l.cfg.MaxBatch)
		if err != nil || n > 0 && n+b.Size > most {
			break
		}
		n += b.Size
	}
	return p[:n:n]
}

// load scans an older segment at the first read.
func (l *Log) load(s *segment) error {
	l.loading.Lock()
	defer l.loading.Unlock()
	l.mu.Lock()
	done := s.scanned || l.err != nil && isClosed(l.err)
	gone := s.First < l.firstLocked()
	err := l.err
	l.mu.Unlock()
	switch {
	case done && !s.scanned:
		return err
	case done:
		return nil
	case gone:
		return l.fail("read", meta.Range, fmt.Errorf("segment %s was removed by retention", SegmentName(s.First)))
	}
	f, err := l.dir.Open(l.ctx, SegmentName(s.First), false)
	if err != nil {
		return err
	}
	found, torn, err := l.scan(f, s.First, nil)
	if err == nil && (torn != nil || found.Next != s.Next) {
		err = l.fail("read", meta.Corrupt, fmt.Errorf("segment %s ends at offset %d instead of %d (%v)", SegmentName(s.First), found.Next, s.Next, torn))
	}
	if err != nil {
		return errors.Join(err, f.Close())
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	s.Segment, s.file, s.scanned = found, f, true
	return nil
}

func isClosed(err error) bool { return errors.Is(err, errClosed) }

// OffsetAt returns the offset and the time of the first record with a time, ms since 1970, or a
// later one; ok is false without such a record. In a batch that can't be decompressed, OffsetAt
// returns the first record.
func (l *Log) OffsetAt(ctx context.Context, ms int64) (offset, at int64, ok bool, err error) {
	l.mu.Lock()
	segments, start := append([]*segment(nil), l.segments...), l.startLocked()
	l.mu.Unlock()
	for _, s := range segments {
		l.mu.Lock()
		scanned := s.scanned
		l.mu.Unlock()
		if !scanned {
			if err := l.load(s); errors.Is(err, meta.Range) {
				continue
			} else if err != nil {
				return 0, 0, false, err
			}
		}
		l.mu.Lock()
		latest, f, pos, end, failed := s.Time, s.file, s.Index.FindTime(ms), s.Size, l.err
		l.mu.Unlock()
		switch {
		case latest < ms:
			continue
		case f == nil && failed != nil: // Close has closed the file
			return 0, 0, false, failed
		case f == nil: // retention has removed the segment
			continue
		}
		for pos < end {
			if err := context.Cause(ctx); err != nil {
				return 0, 0, false, err
			}
			p, err := l.readFrom(f, pos, end, 0, 1)
			if err != nil {
				return 0, 0, false, err
			}
			b, err := log.Parse(p, l.cfg.MaxBatch)
			if err != nil {
				return 0, 0, false, err
			}
			if b.MaxTime >= ms && b.Next() > start {
				offset, at, err = firstAt(ctx, &b, p, ms, start)
				if err != nil || offset >= start {
					return offset, at, err == nil, err
				}
			}
			pos += int64(b.Size)
		}
	}
	return 0, 0, false, nil
}

// decompressing bounds the batches that are decompressed at a time: each takes up to
// decompress.Max bytes, which no budget of requests counts.
var decompressing = make(chan struct{}, 2)

// firstAt finds the first record of a batch, from the offset start on, with a time or a later one.
// If the batch has none, firstAt returns the first record of the batch.
func firstAt(ctx context.Context, b *log.Batch, p []byte, ms, start int64) (offset, at int64, err error) {
	select {
	case decompressing <- struct{}{}:
		defer func() { <-decompressing }()
	case <-ctx.Done():
		return 0, 0, context.Cause(ctx)
	}
	offset = -1
	plain, err := decompress.Records(b.Compression(), p[log.HeaderSize:b.Size])
	if err == nil {
		err = b.Each(plain, func(r log.Record) error {
			if offset < 0 && r.Offset >= start && r.Time >= ms {
				offset, at = r.Offset, r.Time
			}
			return nil
		})
	}
	if b.Compression() == log.Plain && err != nil {
		return 0, 0, err
	}
	if offset < 0 { // the producer compressed something else, or the header promises another time
		offset, at = b.Base, b.BaseTime
	}
	return offset, at, nil
}
