package penstock

import (
	"context"
	"math/rand/v2"
	"testing"
	"time"

	"penstock.io/penstock/meta"
)

// TestMirrorRanges compares what is to be copied and punched with an image of
// each byte's place.
func TestMirrorRanges(t *testing.T) {
	const size = 60
	r := rand.New(rand.NewPCG(1, 1))
	type where struct {
		chunk uint64
		at    uint64
	}
	random := func() (l []meta.Extent, image [size]where) {
		for off := uint64(r.IntN(10)); off < size; {
			e := meta.Extent{Off: off, Len: 1 + r.Uint64N(15), ChunkOff: r.Uint64N(3) + off}
			if r.IntN(4) > 0 {
				e.Chunk = meta.ChunkID{Volume: 1, Term: 1, Counter: 1 + r.Uint64N(2)}
			}
			l = append(l, e)
			for i := off; i < min(e.End(), size) && !e.Chunk.IsZero(); i++ {
				image[i] = where{e.Chunk.Counter, e.ChunkOff + i - off}
			}
			off = e.End() + r.Uint64N(2)*r.Uint64N(10)
		}
		return l, image
	}
	for range 20_000 {
		a, was := random()
		b, now := random()
		if r.IntN(2) == 0 { // parts in common
			k := r.IntN(len(a))
			b, now = append([]meta.Extent(nil), a[:k]...), [size]where{}
			for _, e := range b {
				for i := e.Off; i < min(e.End(), size) && !e.Chunk.IsZero(); i++ {
					now[i] = where{e.Chunk.Counter, e.ChunkOff + i - e.Off}
				}
			}
		}
		todo := otherPlaces(a, b, size)
		data := within(todo, b)
		holes := without(todo, data)
		var got [size]byte
		for _, s := range data {
			for i := s.lo; i < s.hi; i++ {
				got[i] += 1
			}
		}
		for _, s := range holes {
			for i := s.lo; i < s.hi; i++ {
				got[i] += 10
			}
		}
		for i := range got {
			want := byte(0)
			if was[i] != now[i] {
				want = 1
				if now[i] == (where{}) {
					want = 10
				}
			}
			if got[i] != want {
				t.Fatalf("byte %d is %d, it should be %d: from %v to %v", i, got[i], want, a, b)
			}
		}
	}
}

// TestPace: no more goes through in a time than the rate allows, and nothing is
// held up without one.
func TestPace(t *testing.T) {
	p := &pace{rate: 1 << 20}
	began := time.Now()
	for range 5 {
		if err := waitUntil(context.Background(), p.turn(64<<10)); err != nil {
			t.Fatal(err)
		}
	}
	if took := time.Since(began); took < 4*time.Second/16 {
		t.Errorf("256 KiB at 1 MiB a second took %v", took)
	}
	// Turns are given out in the order in which they are asked for.
	if a, b := p.turn(1), p.turn(1); !a.Before(b) {
		t.Errorf("turns at %v and %v", a, b)
	}
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	if err := waitUntil(ctx, p.turn(1<<20)); err == nil {
		t.Error("it did not hear that nobody waits")
	}
	for _, p := range []*pace{nil, {}} {
		if err := waitUntil(context.Background(), p.turn(1<<40)); err != nil {
			t.Error(err)
		}
	}
}
