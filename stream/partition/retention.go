package partition

import (
	"context"
	"fmt"
	"time"

	"penstock.io/penstock/meta"
)

// Retain removes the oldest segments while all records are older than Policy.Retention,
// or while the log is larger than Policy.RetentionBytes, or while all records are deleted. The growing segment stays; Retain
// begins the next one when the records are old enough, so that an idle partition becomes
// empty, too. Retain returns the number of removed segments.
func (l *Log) Retain(ctx context.Context) (removed int, err error) {
	policy := l.cfg.policy()
	l.mu.Lock()
	deleted := l.firstLocked() < l.start
	l.mu.Unlock()
	if policy.Retention <= 0 && policy.RetentionBytes <= 0 && !deleted || l.lead == nil {
		return 0, nil
	}
	if err := l.retire(policy.Retention); err != nil {
		return 0, err
	}
	for {
		l.mu.Lock()
		if len(l.segments) < 2 || l.err != nil {
			l.mu.Unlock()
			return removed, nil
		}
		s, size := l.segments[0], int64(0)
		for _, s := range l.segments {
			size += s.size
		}
		scanned := s.scanned
		gone := policy.RetentionBytes > 0 && size > policy.RetentionBytes || s.Next <= l.start // of s
		l.mu.Unlock()
		if !gone && policy.Retention > 0 && !scanned {
			if err := l.load(s); err != nil {
				return removed, err
			}
		}
		if !gone && !l.old(s, policy.Retention) {
			return removed, nil
		}
		if err := l.removeFirst(ctx, s); err != nil {
			return removed, err
		}
		removed++
	}
}

// MayBeOld reports that a partition has records, and that its first segment was begun before a
// time: so the records of the segment may be from before the time.
func MayBeOld(ctx context.Context, dir Dir, before time.Time) (bool, error) {
	files, err := dir.List(ctx)
	if err != nil {
		return false, err
	}
	size, first := int64(0), time.Time{}
	for _, f := range files {
		if _, ok := FirstOf(f.Name); !ok {
			continue
		}
		size += f.Size
		if first.IsZero() || f.Created.Before(first) {
			first = f.Created
		}
	}
	return size > 0 && first.Before(before), nil
}

// old reports that all records of a segment are older than the retention (0: no record is old), or
// deleted.
func (l *Log) old(s *segment, retention time.Duration) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if s.First < s.Next && s.Next <= l.start {
		return true
	}
	return retention > 0 && s.Size > 0 && s.Time < l.cfg.Now().Add(-retention).UnixMilli()
}

// retire begins a segment if all records of the last segment are old and nothing is under way.
func (l *Log) retire(retention time.Duration) error {
	l.mu.Lock()
	n := len(l.segments)
	if n == 0 || l.flushing || l.err != nil {
		l.mu.Unlock()
		return nil
	}
	s := l.segments[n-1]
	l.mu.Unlock()
	if !l.old(s, retention) {
		return nil
	}
	l.mu.Lock()
	if l.flushing || l.err != nil || l.segments[len(l.segments)-1] != s {
		l.mu.Unlock()
		return nil
	}
	l.flushing = true // keeps flush from running beside roll
	l.mu.Unlock()
	next, err := l.roll()
	if err == nil {
		err = next.file.Sync()
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if err != nil {
		l.failLocked(err)
	}
	l.flushing = false
	if len(l.pending) > 0 {
		l.flushing = true
		l.wg.Go(l.flush)
	}
	l.notifyLocked()
	return err
}

// removeFirst removes the first segment.
func (l *Log) removeFirst(ctx context.Context, s *segment) error {
	l.loading.Lock()
	defer l.loading.Unlock()
	l.mu.Lock()
	if len(l.segments) < 2 || l.segments[0] != s {
		l.mu.Unlock()
		return l.fail("remove segment", meta.Again, fmt.Errorf("the segments have changed"))
	}
	l.segments = l.segments[1:]
	f := s.file
	s.file = nil
	l.mu.Unlock()
	if f != nil {
		if err := f.Close(); err != nil {
			return err
		}
	}
	return l.dir.Remove(ctx, SegmentName(s.First))
}
