package partition

import (
	"context"
	"errors"
	"fmt"

	"penstock.io/penstock/meta"
)

// DeleteBefore deletes the records before an offset, and returns the offset at which the log begins
// then; -1 stands for the high watermark. The log never begins earlier again: the name of an empty
// file says where the log begins, and of several such files the greatest offset counts, so that a
// leader whose time is over can't take a later leader's deletion back. Retain then removes the
// segments of which all records are deleted. Errors: Range (the offset is less than -1, or more
// than the high watermark), ReadOnly, Fenced (the leadership is over; the records may be deleted),
// the error of Err, and errors of the directory.
func (l *Log) DeleteBefore(ctx context.Context, offset int64) (start int64, err error) {
	if l.lead == nil {
		return 0, l.fail("delete records", meta.ReadOnly, errors.New("records can't be deleted here: the stream is the target of a mirror, or lies in a snapshot or an immutable volume"))
	}
	if err := l.setStart(ctx, offset); err != nil {
		return 0, err
	}
	if _, err := l.Retain(ctx); err != nil && ctx.Err() == nil {
		l.cfg.Logger.Warn("the files of deleted records could not be removed; the gateway tries again", "partition", l.cfg.Name, "error", err)
	}
	start, _ = l.Bounds()
	return start, nil
}

// setStart makes durable that the log begins at an offset, unless the log begins later.
func (l *Log) setStart(ctx context.Context, offset int64) error {
	l.loading.Lock()
	defer l.loading.Unlock()
	l.mu.Lock()
	old, first, high, err := l.start, l.startLocked(), l.high, l.err
	l.mu.Unlock()
	if offset == -1 {
		offset = high
	}
	switch {
	case err != nil:
		return err
	case offset < 0 || offset > high:
		return l.fail("delete records", meta.Range, fmt.Errorf("offset %d is not between 0 and %d", offset, high))
	case offset <= first:
		return nil
	}
	if err := l.dir.Replace(ctx, startName(offset), nil); err != nil {
		return err
	}
	if !l.lead.Valid() {
		return l.over()
	}
	l.mu.Lock()
	l.start = offset
	l.mu.Unlock()
	if old > 0 {
		if err := l.dir.Remove(ctx, startName(old)); err != nil && !errors.Is(err, meta.NotFound) {
			l.cfg.Logger.Warn("the file of an earlier deletion of records stays; it does no harm", "partition", l.cfg.Name, "file", startName(old), "error", err)
		}
	}
	return nil
}

// checkStart verifies that the log has all records that were acknowledged when records were deleted.
func (l *Log) checkStart() error {
	if l.start > l.high {
		return l.fail("open", meta.Corrupt, fmt.Errorf("records before offset %d were deleted, and the log ends at offset %d; restore it from a snapshot", l.start, l.high))
	}
	return nil
}
