package partition

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"slices"
	"testing"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/stream/log"
)

// synced shows the contents of a directory in memory after a loss of power: other clients see the
// same of a leader's files.
type synced struct{ d *memDir }

func (s synced) Segments(context.Context) (l []int64, err error) {
	s.d.mu.Lock()
	defer s.d.mu.Unlock()
	for name := range s.d.files {
		if first, ok := FirstOf(name); ok {
			l = append(l, first)
		}
	}
	return l, nil
}

func (s synced) bytes(first int64) ([]byte, error) {
	s.d.mu.Lock()
	defer s.d.mu.Unlock()
	f := s.d.files[SegmentName(first)]
	if f == nil {
		return nil, meta.E("open", meta.NotFound, SegmentName(first), nil)
	}
	return f.synced, nil
}

func (s synced) Size(_ context.Context, first int64) (int64, error) {
	p, err := s.bytes(first)
	return int64(len(p)), err
}

func (s synced) ReadAt(_ context.Context, first int64, p []byte, off int64) (int, error) {
	all, err := s.bytes(first)
	if err != nil {
		return 0, err
	}
	n := copy(p, all[min(off, int64(len(all))):])
	if n < len(p) {
		err = io.EOF
	}
	return n, err
}

func tail(t *testing.T, d *memDir, offset int64) *Tail {
	t.Helper()
	tl, err := OpenTail(t.Context(), synced{d}, "test", offset)
	if err != nil {
		t.Fatal(err)
	}
	return tl
}

// rest reads the present values of a tail, from its next record on.
func rest(t *testing.T, tl *Tail) (all []string) {
	t.Helper()
	for {
		b, p, err := tl.Next(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		if p == nil {
			return all
		}
		err = b.Each(p[log.HeaderSize:], func(r log.Record) error {
			if r.Offset >= tl.Offset() {
				all = append(all, fmt.Sprintf("%d:%s", r.Offset, r.Value))
			}
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
		tl.Advance(b.Next())
	}
}

func put(t *testing.T, l *Log, values ...string) {
	t.Helper()
	if _, err := appendAll(l, batch(log.NoProducer, 0, 1, values...)); err != nil {
		t.Fatal(err)
	}
}

func want(t *testing.T, got []string, values ...string) {
	t.Helper()
	if !slices.Equal(got, values) {
		t.Fatalf("DATA: the tail has %q, not %q", got, values)
	}
}

// TestTail: a tail sees each record once, from the end or from an offset, over segments,
// retention, a rollback and bytes that are no batch.
func TestTail(t *testing.T) {
	d := newMemDir()
	early := tail(t, d, -1)
	want(t, rest(t, early))
	l := open(t, d, fixed(Policy{SegmentBytes: 200}))
	put(t, l, "a", "b")
	end, middle := tail(t, d, -1), tail(t, d, 1)
	want(t, rest(t, end))
	want(t, rest(t, early), "0:a", "1:b")
	want(t, rest(t, middle), "1:b")
	for i := range 10 {
		put(t, l, fmt.Sprint(i), "x")
		want(t, rest(t, end), fmt.Sprintf("%d:%d", 2*i+2, i), fmt.Sprintf("%d:x", 2*i+3))
	}
	if got := rest(t, middle); len(got) != 20 {
		t.Fatalf("DATA: a tail that fell behind has %q", got)
	}
	late := tail(t, d, 0)

	firsts, _ := synced{d}.Segments(t.Context())
	if len(firsts) < 3 {
		t.Fatalf("only %d segments", len(firsts))
	}
	slices.Sort(firsts)
	before := d.crash(0)
	for _, first := range firsts[:2] {
		if err := d.Remove(t.Context(), SegmentName(first)); err != nil {
			t.Fatal(err)
		}
	}
	if got := rest(t, late); len(got) != 22-int(firsts[2]) {
		t.Fatalf("DATA: after retention up to %d, the tail has %q", firsts[2], got)
	}

	// A rollback: the files of an earlier moment come back, and the log grows from there.
	put(t, l, "undone")
	want(t, rest(t, end), "22:undone")
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	d.mu.Lock()
	d.files = before.files
	d.mu.Unlock()
	for _, f := range before.files {
		f.d = d
	}
	want(t, rest(t, end))
	l = open(t, d, fixed(Policy{SegmentBytes: 200}))
	put(t, l, "again", "and again")
	want(t, rest(t, end), "22:again", "23:and again")
}

// TestTailBehindARegrownLog: between two looks, a rollback has cut the log, and the log has grown
// beyond the place of the tail.
func TestTailBehindARegrownLog(t *testing.T) {
	d := newMemDir()
	l := open(t, d, Config{})
	put(t, l, "a")
	before := d.crash(0)
	put(t, l, "b")
	tl := tail(t, d, -1)
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	d.files = before.files
	for _, f := range before.files {
		f.d = d
	}
	l = open(t, d, Config{})
	put(t, l, "longer than the batch that was cut", "c", "d")
	if got := rest(t, tl); len(got) == 0 || got[len(got)-1] != "3:d" {
		t.Fatalf("DATA: the tail has %q", got)
	}
}

// TestTailWaitsForWholeBatches: parts of a batch, and bytes that are no batch, are not shown; a
// segment after such bytes is damage.
func TestTailWaitsForWholeBatches(t *testing.T) {
	d := newMemDir()
	l := open(t, d, Config{})
	put(t, l, "a")
	tl := tail(t, d, 0)
	want(t, rest(t, tl), "0:a")
	put(t, l, "b", "c")
	f := d.files[SegmentName(0)]
	whole := f.synced
	for n := tl.pos; n < int64(len(whole)); n++ {
		f.synced = whole[:n:n]
		want(t, rest(t, tl))
	}
	f.synced = append(slices.Clone(whole), "rubbish that is no batch, of a hundred bytes and more, so that it could be a header of a batch....."...)
	want(t, rest(t, tl), "1:b", "2:c")
	want(t, rest(t, tl))
	f.synced = whole // a recovery
	want(t, rest(t, tl))
	put(t, l, "d")
	want(t, rest(t, tl), "3:d")
	f.synced = append(slices.Clone(f.synced), "rubbish"...)
	want(t, rest(t, tl))
	d.files[SegmentName(4)] = &memFile{d: d}
	if _, _, err := tl.Next(t.Context()); !errors.Is(err, meta.Corrupt) {
		t.Fatalf("a damaged segment: %v", err)
	}
}

// TestTailAnywhere: from each offset, a tail has the rest of the log.
func TestTailAnywhere(t *testing.T) {
	d, rng := newMemDir(), rand.New(rand.NewPCG(1, 2))
	l := open(t, d, fixed(Policy{SegmentBytes: 1000}))
	var all []string
	for len(all) < 200 {
		var values []string
		for range 1 + rng.IntN(5) {
			values = append(values, fmt.Sprint(rng.Uint64()))
			all = append(all, fmt.Sprintf("%d:%s", len(all), values[len(values)-1]))
		}
		put(t, l, values...)
	}
	for i := range all {
		want(t, rest(t, tail(t, d, int64(i))), all[i:]...)
	}
	want(t, rest(t, tail(t, d, int64(len(all)))))
}
