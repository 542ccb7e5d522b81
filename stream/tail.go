package stream

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strconv"

	penstock "penstock.io/penstock"
	"penstock.io/penstock/meta"
	"penstock.io/penstock/stream/lines"
	"penstock.io/penstock/stream/partition"
	"penstock.io/penstock/stream/publish"
)

// Tail returns the text of the records of a partition, of which the directory below log is
// given, from a place on (see lines.Tail.Place); offset -1: of the records that are appended from
// now on. The caller needs no leadership, and its session need not serve streams. Errors: Stale
// (the partition was removed), Corrupt, Version.
func Tail(ctx context.Context, v *penstock.Volume, dir meta.Ino, offset int64, skip int) (*lines.Tail, error) {
	number, of, err := partitionAt(ctx, v, dir)
	if err != nil {
		return nil, err
	}
	b, err := of.ReadFile(ctx, SpecFile)
	if err != nil {
		return nil, err
	}
	spec, err := DecodeSpec(b)
	if err != nil {
		return nil, err
	}
	t, err := partition.OpenTail(ctx, segments{volumeDir{v, dir}}, fmt.Sprintf("partition %d", number), offset)
	if err != nil {
		return nil, err
	}
	if t.Offset() != offset {
		skip = 0 // the record is gone
	}
	return lines.NewTail(t, number, spec.Format == publish.JSON, skip), nil
}

// partitionAt returns the number of the partition whose directory is given, and the directory of
// the stream.
func partitionAt(ctx context.Context, v *penstock.Volume, dir meta.Ino) (number int, of volumeDir, err error) {
	e, err := v.GetAttr(ctx, dir)
	if err != nil {
		return 0, of, err
	}
	log := volumeDir{v, e.Attr.Parent}
	above, err := v.GetAttr(ctx, log.ino)
	if err != nil {
		return 0, of, err
	}
	for at := (penstock.DirCursor{}); ; {
		list, eof, err := v.ReadDir(ctx, log.ino, &at, 0, false)
		if err != nil {
			return 0, of, err
		}
		for _, d := range list {
			if n, perr := strconv.Atoi(d.Name); perr == nil && d.Ino == dir {
				return n, volumeDir{v, above.Attr.Parent}, nil
			}
		}
		if eof || len(list) == 0 {
			return 0, of, meta.E("open", meta.Stale, "partition", errors.New("the directory is not below the log of a stream"))
		}
	}
}

// segments are the segments in the directory of a partition. They are not opened: a segment that
// retention removes can't be read any more.
type segments struct{ dir volumeDir }

var _ partition.Files = segments{}

// gone makes of an error about a file the error about the directory, if the directory is gone.
func (s segments) gone(ctx context.Context, err error) error {
	if !errors.Is(err, meta.NotFound) && !errors.Is(err, meta.Stale) {
		return err
	}
	e, aerr := s.dir.v.GetAttr(ctx, s.dir.ino)
	switch {
	case errors.Is(aerr, meta.NotFound), errors.Is(aerr, meta.Stale), aerr == nil && e.Attr.Nlink == 0:
		return meta.E("read", meta.Stale, "partition", errors.New("the partition was removed"))
	case aerr != nil:
		return aerr
	}
	return meta.E("read", meta.NotFound, "segment", err)
}

func (s segments) Segments(ctx context.Context) (firsts []int64, err error) {
	for at := (penstock.DirCursor{}); ; {
		list, eof, err := s.dir.v.ReadDir(ctx, s.dir.ino, &at, 0, false)
		if err != nil {
			return nil, s.gone(ctx, err)
		}
		for _, d := range list {
			if first, ok := partition.FirstOf(d.Name); ok && d.Type == meta.TypeRegular {
				firsts = append(firsts, first)
			}
		}
		if eof || len(list) == 0 {
			return firsts, nil
		}
	}
}

func (s segments) Size(ctx context.Context, first int64) (int64, error) {
	e, err := s.dir.lookup(ctx, partition.SegmentName(first))
	if err != nil {
		return 0, s.gone(ctx, err)
	}
	// An entry may be as old as the name. The attributes of a file that grows come from its leader.
	if e, err = s.dir.v.GetAttr(ctx, e.Attr.Ino); err != nil {
		return 0, s.gone(ctx, err)
	}
	return int64(e.Attr.Size), nil
}

func (s segments) ReadAt(ctx context.Context, first int64, p []byte, off int64) (int, error) {
	e, err := s.dir.lookup(ctx, partition.SegmentName(first))
	if err != nil {
		return 0, s.gone(ctx, err)
	}
	n, err := s.dir.v.Read(ctx, e.Attr.Ino, p, off)
	if err == nil && n < len(p) {
		err = io.EOF
	}
	if err != nil && !errors.Is(err, io.EOF) {
		err = s.gone(ctx, err)
	}
	return n, err
}
