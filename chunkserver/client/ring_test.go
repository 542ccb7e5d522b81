package client

import (
	"math/rand/v2"
	"testing"
)

// TestRingStaysAtItsFront: a ring is used only as far as necessary: with few bytes under
// way, at its front. New ranges never overlap ranges under way.
func TestRingStaysAtItsFront(t *testing.T) {
	const size = 16 << 20
	for _, most := range []int{1 << 20, 3 << 20, 15 << 20} {
		r := &ring{mem: make([]byte, size)}
		type piece struct{ pos, n, end uint64 }
		var under []piece
		rng := rand.New(rand.NewPCG(1, uint64(most)))
		var furthest uint64
		held, given, refused := 0, 0, 0
		for range 20_000 {
			n := shareFrom + rng.IntN(frameMax-shareFrom)
			for len(under) > 0 && (held+n > most || rng.IntN(8) == 0) {
				r.give(under[0].end)
				held -= int(under[0].n)
				under = under[1:]
			}
			p, pos, end := r.take(n)
			if p == nil {
				if held == 0 {
					t.Fatalf("no %d bytes of %d", n, size)
				}
				if held < size/4 {
					refused++
				}
				continue
			}
			for _, u := range under {
				if pos < u.pos+u.n && u.pos < pos+uint64(n) {
					t.Fatalf("%d bytes at %d were given out, %d at %d are under way", n, pos, u.n, u.pos)
				}
			}
			given++
			held += n
			under = append(under, piece{pos, uint64(n), end})
			furthest = max(furthest, pos+uint64(n))
		}
		if given < 5_000 || refused > given/100 {
			t.Errorf("%d pieces were given out, %d were not though little was under way", given, refused)
		}
		if limit := uint64(ringHot + 2*most + frameMax); furthest > limit && limit < size {
			t.Errorf("with %d bytes under way, %d of the ring are used", most, furthest)
		}
	}
}

// TestWithin: Within returns when no more than the given number of bytes is under way.
func TestWithin(t *testing.T) {
	f := newFixture(t, "unix", 1, Config{Direct: nobody})
	w := f.NewWriter(f.grant())
	defer w.Close()
	p := random(1<<20, 5)
	for range 20 {
		if _, err := w.Append(t.Context(), p); err != nil {
			t.Fatal(err)
		}
		if err := w.Within(t.Context(), 1<<19); err != nil {
			t.Fatal(err)
		}
		if n := w.Len() - w.Acked(); n > 1<<19 {
			t.Fatalf("%d bytes are on their way", n)
		}
	}
}
