package partition

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/stream/log"
)

// TestDeleteBefore deletes records up to the middle of a batch, up to batches and up to the end,
// and cuts the power at every change in turn. The log begins where an acknowledged deletion says,
// or at a later deletion that was asked for, and has every record from there on.
func TestDeleteBefore(t *testing.T) {
	seed := rand.Uint64()
	r := rand.New(rand.NewPCG(seed, 2))
	cfg := fixed(Policy{SegmentBytes: 300})
	for at := 0; ; at++ {
		dir := newMemDir()
		dir.left = at
		acked, asked, appended := int64(0), int64(0), 0
		l, err := tryOpen(t, dir, cfg)
		for step := 0; err == nil && step < 12; step++ {
			for range 2 {
				if err == nil {
					_, err = appendAll(l, batch(log.NoProducer, 0, 1, fmt.Sprint(appended), fmt.Sprint(appended+1), fmt.Sprint(appended+2)))
				}
				if err == nil {
					appended += 3
				}
			}
			if err != nil {
				break
			}
			switch step % 4 {
			case 0:
				asked = acked + 2 // in a batch, of which a part stays
			case 1:
				asked = max(acked, int64(appended-3))
			case 2:
				asked = int64(appended)
			case 3:
				asked = acked - 1 // deleted already
			}
			give := asked
			if step%8 == 2 {
				give = -1
			}
			var start int64
			if start, err = l.DeleteBefore(t.Context(), give); err == nil {
				if start != max(asked, acked) {
					t.Fatalf("DATA: after the deletion before %d the log begins at %d", give, start)
				}
				acked = start
			}
		}
		if err != nil && !errors.Is(err, meta.IO) {
			t.Fatalf("seed %d, crash %d: %v", seed, at, err)
		}
		if l != nil {
			l.Close()
		}
		whole := !dir.dead
		dir = dir.crash(r.Float64())
		l = open(t, dir, cfg)
		start, all := values(t, l, 1<<20)
		if start != acked && start != asked || start < acked {
			t.Fatalf("DATA: seed %d, crash %d: the log begins at %d; the deletion before %d was acknowledged, before %d asked for", seed, at, start, acked, asked)
		}
		if int(start)+len(all) < appended {
			t.Fatalf("DATA: seed %d, crash %d: of %d records from %d on, %d are there", seed, at, appended, start, len(all))
		}
		for i, v := range all {
			if v != fmt.Sprint(int(start)+i) {
				t.Fatalf("DATA: seed %d, crash %d: offset %d has %q", seed, at, int(start)+i, v)
			}
		}
		if _, err := l.Read(start-1, 1); start > 0 && !errors.Is(err, meta.Range) {
			t.Fatalf("seed %d, crash %d: a deleted offset: %v", seed, at, err)
		}
		if err := l.Close(); err != nil {
			t.Fatal(err)
		}
		if whole {
			return
		}
	}
}

// backwards is a directory that lists its files in the reverse order of their names.
type backwards struct{ *memDir }

// List lists the files.
func (d backwards) List(ctx context.Context) ([]Info, error) {
	l, err := d.memDir.List(ctx)
	slices.Reverse(l)
	return l, err
}

// TestDeleteBeforeFrees: files of deleted records are removed, also of an idle partition, lookups
// by time find no deleted record, and wrong offsets are refused.
func TestDeleteBeforeFrees(t *testing.T) {
	dir := newMemDir()
	l := open(t, dir, fixed(Policy{SegmentBytes: 300}))
	for i := range 20 {
		if _, err := appendAll(l, batch(log.NoProducer, 0, int64(1000+2*i), fmt.Sprint(2*i), fmt.Sprint(2*i+1))); err != nil {
			t.Fatal(err)
		}
	}
	for _, offset := range []int64{-2, 41} {
		if _, err := l.DeleteBefore(t.Context(), offset); !errors.Is(err, meta.Range) {
			t.Errorf("offset %d: %v", offset, err)
		}
	}
	size := l.Size()
	if start, err := l.DeleteBefore(t.Context(), 31); err != nil || start != 31 || l.Size() > size/2 {
		t.Errorf("DATA: the log begins at %d, %v, and has %d of %d bytes", start, err, l.Size(), size)
	}
	for _, ms := range []int64{0, 1030, 1031} {
		if offset, at, ok, err := l.OffsetAt(t.Context(), ms); !ok || err != nil || offset != 31 || at != 1031 {
			t.Errorf("DATA: time %d is at offset %d, time %d, %v, %v", ms, offset, at, ok, err)
		}
	}
	read, err := OpenRead(t.Context(), dir, Config{})
	if err != nil {
		t.Fatal(err)
	}
	if start, all := values(t, read, 1000); start != 31 || len(all) != 9 {
		t.Errorf("DATA: for reads, the log begins at %d: %v", start, all)
	}
	if _, err := read.DeleteBefore(t.Context(), 35); !errors.Is(err, meta.ReadOnly) {
		t.Errorf("a log that is open for reads: %v", err)
	}
	if err := read.Close(); err != nil {
		t.Fatal(err)
	}
	// A former leader has asked for less, later.
	if err := dir.Replace(t.Context(), startName(5), nil); err != nil {
		t.Fatal(err)
	}
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	l = open(t, backwards{dir}, fixed(Policy{SegmentBytes: 300}))
	defer l.Close()
	if start, err := l.DeleteBefore(t.Context(), 10); err != nil || start != 31 {
		t.Errorf("DATA: after a late deletion the log begins at %d, %v", start, err)
	}
	if start, err := l.DeleteBefore(t.Context(), -1); err != nil || start != 40 || l.Size() != 0 {
		t.Errorf("DATA: all is deleted: the log begins at %d, %v, and has %d bytes", start, err, l.Size())
	}
	if base, err := appendAll(l, batch(log.NoProducer, 0, 1, "next")); err != nil || base != 40 {
		t.Errorf("DATA: the next record has offset %d, %v", base, err)
	}
	// A log that has lost durable records is not opened.
	if err := dir.Replace(t.Context(), startName(100), nil); err != nil {
		t.Fatal(err)
	}
	if _, err := tryOpen(t, dir, fixed(Policy{})); !errors.Is(err, meta.Corrupt) {
		t.Errorf("a log that ends before its beginning: %v", err)
	}
}
