package fuse

import (
	"math"
	"testing"

	"penstock.io/penstock/meta/keep"
)

// keepsTails makes a process that keeps its open files of tail for a successor.
func keepsTails(t *testing.T, from *keep.Memory) *streamFiles {
	t.Helper()
	m, err := keep.New(1 << 20)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(m.Close)
	f := &fileSystem{}
	f.kept.keep, f.streams.f = m, f
	if from == nil {
		return &f.streams
	}
	left, err := keep.Left(from.FD())
	if err != nil {
		t.Fatal(err)
	}
	defer left.Close()
	records, err := left.Records()
	if err != nil {
		t.Fatal(err)
	}
	for _, r := range records {
		if r.Kind != keep.Tail {
			t.Fatalf("a record of kind %d", r.Kind)
		}
		f.streams.restore(&r)
	}
	return &f.streams
}

// same compares a successor's state of a handle with its predecessor's state.
func (s *streamFiles) same(t *testing.T, fh uint64, want *tailHandle) {
	t.Helper()
	got := s.handle(fh)
	if got == nil {
		t.Fatalf("DATA: handle %d is not there", fh)
	}
	if got.node != want.node || got.last != want.last || got.before != want.before || got.at != want.at {
		t.Errorf("DATA: the successor has node %d, READ %d, places %+v and %+v; the predecessor had node %d, READ %d, places %+v and %+v",
			got.node, got.last, got.before, got.at, want.node, want.last, want.before, want.at)
	}
	r, ok := s.f.kept.keep.Get(got.slot)
	if !ok || r.N[1] != fh {
		t.Errorf("the successor keeps handle %d in no slot of its own: %+v, %v", fh, r, ok)
	}
}

// whole marks the memory of a process as complete, so that a successor can begin.
func (s *streamFiles) whole() *keep.Memory {
	s.f.kept.keep.Whole()
	return s.f.kept.keep
}

// FuzzTailsAreKept: a successor, and the successor's successor, know each place of an open file of
// tail, and of two records of a file take the later one.
func FuzzTailsAreKept(f *testing.F) {
	f.Add(uint64(1), uint64(2), uint64(3), int64(0), int64(0), uint32(0), uint32(0), false)
	f.Add(uint64(math.MaxUint64), uint64(1<<40), uint64(7), int64(41), int64(math.MaxInt64), uint32(100), uint32(math.MaxInt32), true)
	f.Add(uint64(5), uint64(6), uint64(1<<63), int64(math.MaxInt64), int64(1), uint32(math.MaxInt32), uint32(1), true)
	f.Fuzz(func(t *testing.T, node, fh, last uint64, before, at int64, skipBefore, skip uint32, twice bool) {
		want := &tailHandle{
			node: node, last: last, turn: make(chan struct{}, 1),
			before: place{before, int(skipBefore & math.MaxInt32)}, at: place{at, int(skip & math.MaxInt32)},
		}
		s := keepsTails(t, nil)
		other := &tailHandle{node: 9, last: 8, turn: make(chan struct{}, 1), at: place{77, 7}}
		s.add(fh+1, other)
		if twice { // the process was killed between its two changes
			earlier := *want
			earlier.last, earlier.at = last-1, want.before
			s.note(fh, &earlier)
		}
		s.add(fh, want)
		for range 2 {
			s = keepsTails(t, s.whole())
			s.same(t, fh, want)
			s.same(t, fh+1, other)
			if records, err := s.f.kept.keep.Records(); err != nil || len(records) != 2 {
				t.Errorf("two files have the records %+v, %v", records, err)
			}
		}
	})
}
