package server

import (
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"penstock.io/penstock/meta"
)

// However a volume was emptied, files still being deleted included, a volume left alone takes at
// most 1.5 times its live bytes, plus compactLeast.
func TestSparseChunksAreEmptied(t *testing.T) {
	type chunk struct{ length, live uint64 }
	for seed := range uint64(2000) {
		r := rand.New(rand.NewPCG(seed, 1))
		all := map[meta.ChunkID]chunk{}
		next := uint64(0)
		fill := func(c chunk) {
			next++
			all[meta.ChunkID{Volume: 1, Term: 1, Counter: next}] = c
		}
		size := uint64(1) << (16 + r.IntN(10))
		for range 1 + r.IntN(12) {
			n := 1 + r.Uint64N(size)
			fill(chunk{n, n})
		}
		look := func() bool {
			var s sparseChunks
			var used uint64
			for id, c := range all {
				s.add(meta.ChunkRecord{ID: id, State: meta.ChunkSealed, Length: c.length, Live: c.live})
				used += c.live
			}
			empty, err := s.worth(func() (uint64, error) { return used, nil })
			if err != nil {
				t.Fatal(err)
			}
			var live uint64
			for id, v := range empty {
				if v.chosen {
					live += all[id].live
					delete(all, id)
				}
			}
			if live > 0 {
				fill(chunk{live, live})
			}
			return live > 0
		}
		for range r.IntN(8) { // deletions, and a look between two deletions
			part := r.Float64()
			for id, c := range all {
				c.live -= uint64(float64(c.live) * part * r.Float64())
				if all[id] = c; c.live == 0 {
					delete(all, id)
				}
			}
			look()
		}
		for looks := 0; look(); looks++ {
			if looks > 100 {
				t.Fatalf("seed %d: it is looked at without end: %v", seed, all)
			}
		}
		var length, live uint64
		for _, c := range all {
			length, live = length+c.length, live+c.live
		}
		if most := live + live/2 + compactLeast; length > most {
			t.Errorf("seed %d: left at %d bytes of which %d live, at most %d: %v", seed, length, live, most, all)
		}
	}
}

// A compaction that is only just worth its cost happens once: chunks with mostly live bytes are
// left alone.
func TestFullChunksAreLeft(t *testing.T) {
	var s sparseChunks
	for i, live := range []uint64{60, 70, 80, 90, 100, 55} { // of 100 MiB; together the chunks take 1.32 times the live bytes
		s.add(meta.ChunkRecord{ID: meta.ChunkID{Volume: 1, Counter: uint64(i)}, State: meta.ChunkSealed, Length: 100 << 20, Live: live << 20})
	}
	s.add(meta.ChunkRecord{ID: meta.ChunkID{Volume: 1, Counter: 100}, State: meta.ChunkOpen, Length: 1 << 40, Live: 1})
	s.add(meta.ChunkRecord{ID: meta.ChunkID{Volume: 1, Counter: 101}, State: meta.ChunkSealed, Lost: true, Length: 1 << 40, Live: 1})
	s.add(meta.ChunkRecord{ID: meta.ChunkID{Volume: 1, Counter: 102}, State: meta.ChunkSealed, Length: 1 << 40})
	if some, err := s.worth(func() (uint64, error) { return 1 << 40, nil }); err != nil || len(some) > 0 {
		t.Errorf("%d chunks are emptied, %v", len(some), err)
	}
}

// The emptiest chunks come first, in any order of the chunks; a chunk larger than the amount
// emptied at a time is emptied alone.
func TestEmptiestFirst(t *testing.T) {
	chosen := func(all ...[2]uint64) (ids []uint64) {
		var s sparseChunks
		for i, c := range all {
			s.add(meta.ChunkRecord{ID: meta.ChunkID{Volume: 1, Counter: uint64(i)}, State: meta.ChunkSealed, Length: c[0] << 20, Live: c[1] << 20})
		}
		some, err := s.worth(func() (uint64, error) { return 1 << 40, nil })
		if err != nil {
			t.Fatal(err)
		}
		for id, v := range some {
			if v.chosen {
				ids = append(ids, id.Counter)
			}
		}
		slices.Sort(ids)
		return ids
	}
	for _, c := range []struct {
		all  [][2]uint64
		want []uint64
	}{
		{[][2]uint64{{300, 190}, {300, 190}, {300, 190}, {100, 20}}, []uint64{3, 0}}, // 20 and 190 of 256 MiB
		{[][2]uint64{{1024, 410}}, []uint64{0}},
		{[][2]uint64{{1024, 410}, {1024, 400}}, []uint64{1}},
	} {
		slices.Sort(c.want)
		if got := chosen(c.all...); !slices.Equal(got, c.want) {
			t.Errorf("%v: chosen are %v, want %v", c.all, got, c.want)
		}
	}
}

// A mostly dead chunk, of which a snapshot keeps the rest, does not make compaction search all
// files again and again: compaction searches again when the last search's time is a small share.
func TestLooksInVainTakeTurns(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	s.crash()
	s.adjust = func(c *Config) { c.CompactInterval, c.JoinLeast = time.Hour, 1 }
	s.start()
	a := s.dial("a")
	chunks := s.chunkServer(1)
	kept, goes := a.create(t, "kept").Attr.Ino, a.create(t, "goes").Attr.Ino
	g := a.alloc(t, false)
	chunks.has(g.ID, 16<<20, 16<<20)
	a.commit(t, kept, g, 0, 4<<20, true)
	a.commit(t, goes, g, 4<<20, 12<<20, true)
	if _, err := a.SealChunk(t.Context(), 1, g.ID); err != nil {
		t.Fatal(err)
	}
	a.do(t, &meta.SetAttr{Ino: goes, Mask: meta.SetSize}, meta.LeaseNone)
	a.snapshot(t, "s")
	o, err := s.srv.hosted.open(t.Context(), 1)
	if err != nil {
		t.Fatal(err)
	}
	look := func() (walks uint64) {
		t.Helper()
		was := o.compaction.walks.Load()
		if err := o.compaction.compact(); err != nil {
			t.Fatal(err)
		}
		return o.compaction.walks.Load() - was
	}
	began := time.Now()
	eventually(t, "the chunk is worth a look", func() error { return unless(look() == 1) })
	if !o.compaction.vain.After(began) {
		t.Fatal("it may be looked through again at once")
	}
	o.compaction.vain = time.Now().Add(time.Hour)
	if n := look(); n != 0 {
		t.Errorf("%d walks, before their time", n)
	}
	if _, passed := o.compaction.passed[g.ID]; !passed || len(o.compaction.passed) != 1 {
		t.Errorf("passed over: %v", o.compaction.passed)
	}
	o.compaction.vain = time.Now()
	if n := look(); n != 1 {
		t.Errorf("%d walks, at their time", n)
	}
}
