package partition

import (
	"context"
	"errors"
	"fmt"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/stream/log"
)

// flushBytes bounds the bytes of a write and the sync after the write. A larger batch is
// written alone.
const flushBytes = 8 << 20

// Append is an accepted batch. Wait waits until the batch is durable.
type Append struct {
	Base     int64 // offset of the first record
	Repeated bool  // the producer had sent the batch before; the log has the batch once

	l   *Log
	end int64
}

// Append takes the batch p into the log. The caller must not change p from then on. Batches get
// offsets in the order of the calls. The batch is durable, and visible to reads, when Wait
// returns nil. Errors: errors of log.Admit; NotSupported (the batch is of a transaction);
// Invalid (the batch is of a producer with a name); OutOfOrder and Fenced as *SequenceError;
// Fenced (the leadership is over); ReadOnly (OpenRead opened the log); Unavailable (the log was
// closed, or failed before).
func (l *Log) Append(p []byte) (*Append, error) {
	b, err := l.admit(p)
	if err != nil {
		return nil, err
	}
	if b.Named() {
		return nil, l.fail("append", meta.Invalid, fmt.Errorf("the producer id %d belongs to a producer with a name", b.Producer))
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.err != nil {
		return nil, l.err
	}
	switch verdict, base := l.arrived.Check(&b); verdict {
	case log.Repeated:
		return &Append{Base: base, Repeated: true, l: l, end: base + int64(b.LastDelta) + 1}, nil
	case log.OutOfOrder, log.Fenced:
		return nil, &SequenceError{Verdict: verdict, Producer: b.Producer, Epoch: b.Epoch, Sequence: b.Sequence}
	}
	return l.arriveLocked(b, p), nil
}

// AppendNamed is Append for a batch of a producer with a name. previous is the number of the
// producer's record before the batch; see log.CheckNamed. The Base of a repeated batch is -1.
func (l *Log) AppendNamed(p []byte, previous int64) (*Append, error) {
	b, err := l.admit(p)
	if err != nil {
		return nil, err
	}
	if !b.Named() {
		return nil, l.fail("append", meta.Invalid, fmt.Errorf("the producer id %d belongs to no producer with a name", b.Producer))
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.err != nil {
		return nil, l.err
	}
	switch verdict := l.arrived.CheckNamed(&b, previous); verdict {
	case log.Repeated:
		at, _ := l.arrived.Place(b.Producer)
		return &Append{Base: -1, Repeated: true, l: l, end: at.Offset + 1}, nil
	case log.OutOfOrder:
		return nil, &SequenceError{Verdict: verdict, Producer: b.Producer, Epoch: b.Epoch, Sequence: b.Sequence}
	}
	return l.arriveLocked(b, p), nil
}

// Place returns the place of the last record of a producer with a name, durable or not; ok is
// false for an unknown producer. Wait of the returned Append waits until the record is durable.
func (l *Log) Place(producer int64) (at log.Place, wait *Append, ok bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	at, ok = l.arrived.Place(producer)
	return at, &Append{Base: at.Offset, Repeated: true, l: l, end: at.Offset + 1}, ok
}

// Find returns the offset of a record of a producer with a name, durable or not; ok is false if
// the log does not remember the record.
func (l *Log) Find(producer, number int64) (offset int64, ok bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.arrived.Find(producer, number)
}

// admit checks a batch that a producer has sent.
func (l *Log) admit(p []byte) (log.Batch, error) {
	if l.lead == nil {
		return log.Batch{}, l.fail("append", meta.ReadOnly, errors.New("the stream can't be written here: it is the target of a mirror, or lies in a snapshot or an immutable volume"))
	}
	b, err := log.Admit(p, l.cfg.MaxBatch)
	if err == nil && b.Transactional() {
		err = l.fail("append", meta.NotSupported, fmt.Errorf("batches of transactions are not supported"))
	}
	return b, err
}

// arriveLocked gives a batch its offsets, and leaves the batch to flush, which writes the
// batch.
func (l *Log) arriveLocked(b log.Batch, p []byte) *Append {
	b.Assign(p, l.next, l.epoch)
	now := l.cfg.Now()
	l.arrived.Add(&b, now.UnixMilli())
	l.next = b.Next()
	l.pending = append(l.pending, arrival{batch: b, bytes: p, at: now})
	if !l.flushing {
		l.flushing = true
		l.wg.Go(l.flush)
	}
	return &Append{Base: b.Base, l: l, end: l.next}
}

// Wait waits until the batch is durable. After an error, the log may or may not have the batch:
// the producer must repeat the request. Errors: the reason why the log failed; the cause of
// ctx.
func (a *Append) Wait(ctx context.Context) error {
	notice := make(chan struct{}, 1)
	defer a.l.Watch(notice)()
	for {
		a.l.mu.Lock()
		high, err := a.l.high, a.l.err
		flushing := a.l.flushing
		a.l.mu.Unlock()
		if high >= a.end {
			return nil
		}
		if err != nil && !flushing {
			return err
		}
		select {
		case <-notice:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// SequenceError is the error for a batch that does not continue the producer's sequence, or is
// of an earlier epoch of the producer.
type SequenceError struct {
	Verdict  log.Verdict // log.OutOfOrder or log.Fenced
	Producer int64
	Epoch    int16
	Sequence int32
}

// Error names the producer and the reason.
func (e *SequenceError) Error() string {
	why := "does not continue its sequence"
	if e.Verdict == log.Fenced {
		why = "is of an earlier epoch"
	}
	return fmt.Sprintf("a batch of producer %d, epoch %d, sequence number %d %s", e.Producer, e.Epoch, e.Sequence, why)
}

// flush writes and syncs the pending batches until none is left. At most one goroutine runs flush.
func (l *Log) flush() {
	l.mu.Lock()
	defer l.mu.Unlock()
	var buf []byte
	for len(l.pending) > 0 {
		if l.err != nil && len(l.pending) > 0 && !l.closingLocked() {
			break
		}
		batches := l.takeLocked()
		l.mu.Unlock()
		buf = buf[:0]
		for _, a := range batches {
			buf = append(buf, a.bytes...)
		}
		err := l.commit(buf)
		l.mu.Lock()
		if err != nil {
			l.cfg.Logger.Warn("a partition takes no records until it is opened again", "partition", l.cfg.Name, "error", err)
			l.pending = nil
			l.err = err // also after Close: err says more than the error that Close has set
			break
		}
		active := l.segments[len(l.segments)-1]
		now := l.cfg.Now()
		for _, a := range batches {
			active.Add(&a.batch)
			l.durable.Add(&a.batch, now.UnixMilli())
			l.cfg.Counters.AppendedRecords.Add(uint64(a.batch.Records))
			l.cfg.Counters.AppendedBytes.Add(uint64(len(a.bytes)))
			l.cfg.Counters.Append.Add(now.Sub(a.at))
		}
		active.size, l.high = active.Size, active.Next
		l.notifyLocked()
	}
	l.flushing = false
	l.notifyLocked()
}

// closingLocked reports that the log was closed and has not failed: flush still writes the
// pending batches.
func (l *Log) closingLocked() bool { return isClosed(l.err) }

// takeLocked removes the batches of the next write from pending: at least one batch.
func (l *Log) takeLocked() []arrival {
	n, size := 0, 0
	for n < len(l.pending) && (n == 0 || size+len(l.pending[n].bytes) <= flushBytes) {
		size += len(l.pending[n].bytes)
		n++
	}
	batches := l.pending[:n:n]
	l.pending = l.pending[n:]
	return batches
}

// commit appends bytes to the last segment, or to a new segment, and syncs. Only flush calls
// commit, and nobody else changes the last segment.
func (l *Log) commit(p []byte) error {
	select {
	case <-l.lead.Done():
		return l.over()
	default:
	}
	l.mu.Lock()
	var active *segment
	if n := len(l.segments); n > 0 {
		active = l.segments[n-1]
	}
	policy := l.cfg.policy()
	full := active == nil || active.Size > 0 && (active.Size+int64(len(p)) > policy.SegmentBytes || l.cfg.Now().Sub(active.created) > policy.SegmentAge)
	l.mu.Unlock()
	if full {
		var err error
		if active, err = l.roll(); err != nil {
			return err
		}
	}
	if _, err := active.file.WriteAt(p, active.Size); err != nil {
		return err
	}
	if l.cfg.UnsafeNoSync {
		return nil
	}
	return active.file.Sync()
}

// roll begins the next segment, at the high watermark.
func (l *Log) roll() (*segment, error) {
	l.mu.Lock()
	now := l.cfg.Now()
	l.durable.Expire(now.Add(-l.cfg.ProducerExpiry).UnixMilli())
	l.arrived.Expire(now.Add(-l.cfg.ProducerExpiry).UnixMilli())
	first, state := l.high, l.durable.AppendBinary(nil, l.high)
	l.mu.Unlock()
	if first > 0 {
		if err := l.dir.Replace(l.ctx, producersFile, state); err != nil {
			return nil, err
		}
	}
	f, err := l.dir.Create(l.ctx, SegmentName(first))
	if err != nil {
		return nil, err
	}
	s := &segment{Segment: log.NewSegment(first), created: now, file: f, scanned: true}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.segments = append(l.segments, s)
	return s, nil
}
