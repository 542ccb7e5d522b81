package partition

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/stream/compact"
	"penstock.io/penstock/stream/log"
)

// compactedRecord is the JSON in the file compacted: no key with a record before End has an
// earlier record. The file only saves work: without it, a compaction begins at the beginning.
type compactedRecord struct {
	Version int   `json:"version"`
	End     int64 `json:"end"`
}

const compactedVersion = 1

// UnsafeCompact switches mechanisms of compaction off, for positive controls.
type UnsafeCompact struct {
	NoAge   bool // a record without a value goes at once
	NoOrder bool // the newest segments are replaced first
}

// Compact removes the records of a key before the key's last record, if Config.Compact is set, and
// at least half of the bytes before the last segment were appended since the last compaction.
// The last segment stays as it is. Compact makes passes over the segments. A pass reads new
// records until it has enough keys, and then replaces the segments with earlier records of
// these keys, the oldest first. Compact needs the memory of a segment. Compact returns
// the number of removed records. Errors: Corrupt, and errors of the directory.
func (l *Log) Compact(ctx context.Context) (removed int64, err error) {
	if !l.cfg.policy().Compact || l.lead == nil || !l.compacting.TryLock() {
		return 0, nil
	}
	defer l.compacting.Unlock()
	l.mu.Lock()
	sealed := slices.Clone(l.segments[:max(len(l.segments)-1, 0)])
	l.mu.Unlock()
	if len(sealed) == 0 {
		return 0, nil
	}
	clean, err := l.readCompacted(ctx)
	if err != nil {
		return 0, err
	}
	var all, dirty int64
	for _, s := range sealed {
		all += s.size
		if s.Next > clean {
			dirty += s.size
		}
	}
	if dirty == 0 || dirty < all/2 {
		return 0, nil
	}
	for end := sealed[len(sealed)-1].Next; clean < end; {
		n, next, err := l.compactPass(ctx, sealed, clean)
		removed += n
		if err != nil {
			return removed, err
		}
		clean = next
	}
	return removed, nil
}

// compactPass is a pass over sealed segments. All before the offset clean is compacted already;
// all before the returned offset is compacted then.
func (l *Log) compactPass(ctx context.Context, sealed []*segment, clean int64) (removed, next int64, err error) {
	keys := compact.NewKeys(l.cfg.CompactKeys)
	next = clean
	for _, s := range sealed {
		if s.Next <= clean {
			continue
		}
		err := l.eachBatch(ctx, s, func(b *log.Batch, p []byte) error {
			if b.Next() <= clean || keys.Full() {
				return nil
			}
			keys.Add(b, p)
			next = b.Next()
			return nil
		})
		if err != nil {
			return 0, clean, err
		}
		if keys.Full() {
			break
		}
	}
	if l.cfg.UnsafeCompact.NoOrder {
		sealed = slices.Clone(sealed)
		slices.Reverse(sealed)
	}
	for _, s := range sealed {
		if s.First >= next {
			continue
		}
		n, err := l.compactSegment(ctx, s, keys, clean)
		removed += n
		if err != nil {
			return removed, clean, err
		}
	}
	b, err := json.Marshal(compactedRecord{Version: compactedVersion, End: next})
	if err == nil {
		err = l.dir.Replace(ctx, compactedFile, append(b, '\n'))
	}
	return removed, next, err
}

// compactSegment replaces a segment by one without the records that keys makes superfluous,
// unless there are none. A crash leaves the old or the new segment.
func (l *Log) compactSegment(ctx context.Context, s *segment, keys *compact.Keys, clean int64) (removed int64, err error) {
	l.mu.Lock()
	w := compact.Rewriter{
		Keys: keys, Clean: clean, Remembered: l.durable.Bases(),
		Tombstones: l.cfg.UnsafeCompact.NoAge || s.created.Before(l.cfg.Now().Add(-l.cfg.policy().TombstoneAge)),
	}
	l.mu.Unlock()
	if err := l.eachBatch(ctx, s, w.Add); err != nil {
		return 0, err
	}
	data, removed := w.Finish()
	if removed == 0 {
		return 0, nil
	}
	return removed, l.replaceSegment(ctx, s, data)
}

// replaceSegment replaces the file of a segment before the last one by a file with the same
// offsets. Snapshots keep the old file.
func (l *Log) replaceSegment(ctx context.Context, s *segment, data []byte) error {
	l.loading.Lock()
	defer l.loading.Unlock()
	l.mu.Lock()
	i, failed := slices.Index(l.segments, s), l.err
	l.mu.Unlock()
	if failed != nil || i < 0 {
		return failed // nil: retention has removed the segment
	}
	name := SegmentName(s.First)
	if err := l.dir.Replace(ctx, name, data); err != nil {
		return err
	}
	f, err := l.dir.Open(l.ctx, name, false)
	if err != nil {
		return err
	}
	found, torn, err := l.scan(f, s.First, nil)
	if err == nil && (torn != nil || found.Next != s.Next) {
		err = l.fail("compact", meta.Corrupt, fmt.Errorf("the new segment %s ends at offset %d instead of %d (%v)", name, found.Next, s.Next, torn))
	}
	if err != nil {
		return errors.Join(err, f.Close())
	}
	l.mu.Lock()
	old := s.file
	s.Segment, s.size, s.file, s.created, s.scanned = found, found.Size, f, l.cfg.Now(), true
	l.mu.Unlock()
	if old == nil {
		return nil
	}
	return old.Close()
}

// eachBatch calls fn for the batches of a segment, in order. The bytes are valid until fn returns.
func (l *Log) eachBatch(ctx context.Context, s *segment, fn func(b *log.Batch, p []byte) error) error {
	if err := l.load(s); err != nil {
		return err
	}
	l.mu.Lock()
	f, size := s.file, s.Size
	l.mu.Unlock()
	if f == nil {
		return l.fail("compact", meta.Again, fmt.Errorf("segment %s was closed or removed", SegmentName(s.First)))
	}
	r := bufio.NewReaderSize(io.NewSectionReader(f, 0, size), 1<<20)
	var p []byte
	for at := int64(0); at < size; {
		if err := context.Cause(ctx); err != nil {
			return err
		}
		p = slices.Grow(p[:0], log.HeaderSize)[:log.HeaderSize]
		if _, err := io.ReadFull(r, p); err != nil {
			return l.cut(s, at, err)
		}
		b, err := log.Parse(p, l.cfg.MaxBatch)
		if err != nil && !errors.Is(err, log.ErrShort) {
			return err
		}
		p = slices.Grow(p, b.Size-len(p))[:b.Size]
		if _, err := io.ReadFull(r, p[log.HeaderSize:]); err != nil {
			return l.cut(s, at, err)
		}
		if err := b.Verify(p); err != nil {
			return err
		}
		if err := fn(&b, p); err != nil {
			return err
		}
		at += int64(b.Size)
	}
	return nil
}

func (l *Log) cut(s *segment, at int64, err error) error {
	if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
		return l.fail("compact", meta.Corrupt, fmt.Errorf("segment %s is cut in the batch at byte %d", SegmentName(s.First), at))
	}
	return err
}

// readCompacted reads how far the last compaction came; 0 if that is not known.
func (l *Log) readCompacted(ctx context.Context) (int64, error) {
	b, err := l.dir.ReadFile(ctx, compactedFile)
	if errors.Is(err, meta.NotFound) {
		return 0, nil
	}
	if err != nil {
		return 0, err
	}
	return decodeCompacted(b)
}

// decodeCompacted decodes the file compacted; the result is 0 for damaged bytes. Errors: Version.
func decodeCompacted(b []byte) (int64, error) {
	var r compactedRecord
	if err := json.Unmarshal(b, &r); err != nil || r.Version < 1 || r.End < 0 {
		return 0, nil
	}
	if r.Version > compactedVersion {
		return 0, meta.E("compact", meta.Version, compactedFile, fmt.Errorf("version %d is newer than %d: use a newer program", r.Version, compactedVersion))
	}
	return r.End, nil
}
