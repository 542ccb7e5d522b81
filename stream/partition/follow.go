package partition

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"penstock.io/penstock/meta"
)

// OpenRead opens a partition's log in a directory in which nobody can lead the partition, such
// as the target of a mirror. The log has the records that the directory has at the time of
// the call, and the last leader's epoch; appends fail with ReadOnly. Contents says when the
// directory has other records. Errors: Corrupt, Version, and errors of dir.
func OpenRead(ctx context.Context, dir Dir, cfg Config) (*Log, error) {
	cfg.defaults()
	l := &Log{dir: dir, cfg: cfg}
	l.ctx, l.stop = context.WithCancel(context.WithoutCancel(ctx))
	l.closing = make(chan struct{})
	if err := l.read(ctx); err != nil {
		return nil, errors.Join(err, l.Close())
	}
	return l, nil
}

// read runs before anybody else knows the log. Bytes after the last whole batch of the last
// segment stay: only a leader may cut them.
func (l *Log) read(ctx context.Context) error {
	led, err := readLeaders(ctx, l.dir)
	if err != nil {
		return err
	}
	l.epochs, l.epoch = led.list, max(led.list.last(), 0)
	if err := l.findSegments(ctx); err != nil {
		return err
	}
	if len(l.segments) == 0 {
		return l.checkStart()
	}
	s := l.segments[len(l.segments)-1]
	if s.file, err = l.dir.Open(ctx, SegmentName(s.First), false); err != nil {
		return err
	}
	found, _, err := l.scan(s.file, s.First, nil)
	if err != nil {
		return err
	}
	s.Segment, s.size, s.scanned = found, found.Size, true
	l.high, l.next = found.Next, found.Next
	return l.checkStart()
}

// ReadOnly reports that OpenRead opened the log.
func (l *Log) ReadOnly() bool { return l.lead == nil }

// Contents describes the files of a partition's directory: it differs whenever the records or
// the leaders differ.
func Contents(ctx context.Context, dir Dir) (string, error) {
	files, err := dir.List(ctx)
	if err != nil {
		return "", err
	}
	var b strings.Builder
	slices.SortFunc(files, func(a, b Info) int { return strings.Compare(a.Name, b.Name) })
	for _, f := range files {
		_, segment := FirstOf(f.Name)
		if _, start := startOf(f.Name); segment || start {
			fmt.Fprintln(&b, f.Name, f.Size)
		}
	}
	leaders, err := dir.ReadFile(ctx, epochsFile)
	if err != nil && !errors.Is(err, meta.NotFound) {
		return "", err
	}
	b.Write(leaders)
	return b.String(), nil
}
