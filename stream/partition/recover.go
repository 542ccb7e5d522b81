package partition

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"sort"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/stream/log"
)

// Open opens a partition's log for a leader, and recovers the log: Open scans the last segment,
// cuts the remains of a crash after the last whole batch, and reads the state of the producers
// from the file producers and from later batches. Errors: Fenced (a later leader has
// opened the log), Corrupt (a batch before the last segment's tail is missing or damaged),
// Version, and errors of dir.
func Open(ctx context.Context, dir Dir, cfg Config, lead Leadership) (*Log, error) {
	cfg.defaults()
	l := &Log{dir: dir, cfg: cfg, lead: lead}
	l.ctx, l.stop = context.WithCancel(context.WithoutCancel(ctx))
	l.closing = make(chan struct{})
	if err := l.recover(ctx); err != nil {
		return nil, errors.Join(err, l.Close())
	}
	l.wg.Go(l.untilOver)
	return l, nil
}

// untilOver ends the appends, and wakes everybody who waits, when the leadership ends.
func (l *Log) untilOver() {
	select {
	case <-l.closing:
	case <-l.lead.Done():
		l.mu.Lock()
		defer l.mu.Unlock()
		l.failLocked(l.over())
	}
}

// over is the error of a log whose leadership has ended.
func (l *Log) over() error {
	return l.fail("append", meta.Fenced, fmt.Errorf("the leadership of epoch %d has ended", l.epoch))
}

// recover runs before anybody else knows the log.
func (l *Log) recover(ctx context.Context) error {
	led, err := readLeaders(ctx, l.dir)
	if err != nil {
		return err
	}
	if l.epoch, err = led.number(l.cfg.Volume, l.lead.Epoch()); err != nil {
		return l.fail("open", meta.KindOf(err), err)
	}
	if err := l.findSegments(ctx); err != nil {
		return err
	}
	from, err := l.readProducers(ctx)
	if err != nil {
		return err
	}
	if err := l.scanTail(from); err != nil {
		return err
	}
	if err := l.checkStart(); err != nil {
		return err
	}
	l.durable.Expire(l.cfg.Now().Add(-l.cfg.ProducerExpiry).UnixMilli())
	copied, _, err := log.DecodeProducers(l.durable.AppendBinary(nil, l.high))
	if err != nil {
		return err
	}
	l.arrived, l.next = copied, l.high
	led.list = led.list.begin(l.epoch, l.high)
	l.epochs = led.list
	return l.dir.Replace(ctx, epochsFile, led.encode())
}

// findSegments lists the segments in order.
func (l *Log) findSegments(ctx context.Context) error {
	files, err := l.dir.List(ctx)
	if err != nil {
		return err
	}
	for _, f := range files {
		if first, ok := FirstOf(f.Name); ok {
			l.segments = append(l.segments, &segment{Segment: log.NewSegment(first), size: f.Size, created: f.Created})
		}
		if start, ok := startOf(f.Name); ok {
			l.start = max(l.start, start)
		}
	}
	sort.Slice(l.segments, func(i, j int) bool { return l.segments[i].First < l.segments[j].First })
	for i := len(l.segments) - 2; i > 0; i-- {
		if l.segments[i].size > 0 {
			continue
		}
		if l.lead == nil {
			l.segments = slices.Delete(l.segments, i, i+1)
			continue
		}
		if empty, err := l.removeEmpty(SegmentName(l.segments[i].First)); err != nil {
			return err
		} else if empty {
			l.segments = slices.Delete(l.segments, i, i+1)
		}
	}
	for i := 1; i < len(l.segments); i++ {
		l.segments[i-1].Next = l.segments[i].First
	}
	return nil
}

// removeEmpty removes a segment between two others, unless the segment has bytes. A leader whose
// time was over began the segment, and died before it removed the segment again.
func (l *Log) removeEmpty(name string) (bool, error) {
	f, err := l.dir.Open(l.ctx, name, true)
	if err != nil {
		return false, err
	}
	if _, err := f.ReadAt(make([]byte, 1), 0); err == nil {
		return false, f.Close()
	} else if !errors.Is(err, io.EOF) {
		return false, errors.Join(err, f.Close())
	}
	return true, errors.Join(f.Close(), l.dir.Remove(l.ctx, name))
}

// readProducers reads the state of the producers, and returns the offset from which on batches
// must be added.
func (l *Log) readProducers(ctx context.Context) (from int64, err error) {
	b, err := l.dir.ReadFile(ctx, producersFile)
	if errors.Is(err, meta.NotFound) {
		return 0, nil
	}
	if err != nil {
		return 0, err
	}
	ps, end, err := log.DecodeProducers(b)
	if errors.Is(err, meta.Corrupt) {
		// The log itself has everything; only the recovery takes longer.
		l.cfg.Logger.Warn("the state of the producers is damaged, the whole log is read instead", "partition", l.cfg.Name, "error", err)
		return 0, nil
	}
	if err != nil {
		return 0, err
	}
	if len(l.segments) == 0 {
		return 0, l.fail("open", meta.Corrupt, fmt.Errorf("the producers' state is of offset %d, and there is no segment; restore the log from a snapshot", end))
	}
	l.durable = ps
	return end, nil
}

// openTail opens the last segment for appends. An empty segment after another one is removed:
// a leader began the segment and appended nothing.
func (l *Log) openTail() error {
	for n := len(l.segments) - 1; n >= 0; n-- {
		s := l.segments[n]
		f, err := l.dir.Open(l.ctx, SegmentName(s.First), true)
		if err != nil {
			return err
		}
		s.file = f
		if n == 0 {
			return nil
		}
		if _, err := f.ReadAt(make([]byte, 1), 0); !errors.Is(err, io.EOF) {
			return err
		}
		s.file = nil
		l.segments = l.segments[:n]
		if err := errors.Join(f.Close(), l.dir.Remove(l.ctx, SegmentName(s.First))); err != nil {
			return err
		}
	}
	return nil
}

// scanTail scans the segments with batches at or after an offset, and the last segment in any case.
func (l *Log) scanTail(from int64) error {
	if err := l.openTail(); err != nil {
		return err
	}
	now := l.cfg.Now().UnixMilli()
	for i, s := range l.segments {
		last := i == len(l.segments)-1
		if !last && s.Next <= from {
			continue
		}
		if !last {
			f, err := l.dir.Open(l.ctx, SegmentName(s.First), false)
			if err != nil {
				return err
			}
			s.file = f
		}
		f := s.file
		found, torn, err := l.scan(f, s.First, func(b *log.Batch) {
			if b.Base >= from {
				l.durable.Add(b, now)
			}
		})
		if err != nil {
			return err
		}
		switch {
		case !last && (torn != nil || found.Next != s.Next):
			return l.fail("open", meta.Corrupt, fmt.Errorf("segment %s ends at offset %d instead of %d (%v); restore it from a snapshot", SegmentName(s.First), found.Next, s.Next, torn))
		case last && found.Next < from:
			return l.fail("open", meta.Corrupt, fmt.Errorf("the log ends at offset %d (%v), and the producers' state is of offset %d", found.Next, torn, from))
		case torn != nil:
			l.cfg.Logger.Warn("the end of a partition's log was cut by a crash and is removed", "partition", l.cfg.Name, "offset", found.Next, "bytes", s.size-found.Size, "why", torn)
			if err := f.Truncate(found.Size); err != nil {
				return err
			}
		}
		s.Segment, s.size, s.scanned = found, found.Size, true
		if last {
			// The predecessor may have ended between a write and the sync.
			if err := f.Sync(); err != nil {
				return err
			}
			l.high = found.Next
		}
	}
	return nil
}
