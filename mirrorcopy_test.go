package penstock

import (
	"context"
	"math/rand/v2"
	"testing"
	"testing/synctest"
	"time"

	"penstock.io/penstock/meta"
)

// TestMirrorRanges compares the ranges to be copied and punched with an image of each
// byte's place.
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

// TestPace: no more bytes pass in a time than the rate allows, nothing is delayed without
// a rate, and a new rate also holds for waiting callers.
func TestPace(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		took := func(p *pace, bytes ...uint64) time.Duration {
			t.Helper()
			began := time.Now()
			for _, n := range bytes {
				if err := p.wait(t.Context(), p.turn(n)); err != nil {
					t.Fatal(err)
				}
			}
			return time.Since(began).Round(time.Millisecond)
		}
		p := newPace(1_000_000)
		const part = 50_000
		if d := took(p, part, part, part, part, part); d != time.Second/5 {
			t.Errorf("200 kB at 1 MB a second took %v", d)
		}
		time.Sleep(time.Hour)
		if d := took(p, part, part); d != time.Second/20 {
			t.Errorf("after an hour of rest 50 kB took %v", d)
		}
		for _, p := range []*pace{nil, newPace(0)} {
			if d := took(p, 1<<40, 1<<40); d != 0 {
				t.Errorf("without a rate it took %v", d)
			}
		}
		// A quarter passes at the first rate, the next at twice the rate, the rest at
		// once.
		time.Sleep(time.Minute)
		began, ended := time.Now(), make(chan time.Duration)
		p.turn(4_000_000)
		for range 3 {
			at := p.turn(0)
			go func() {
				if err := p.wait(t.Context(), at); err != nil {
					t.Error(err)
				}
				ended <- time.Since(began)
			}()
		}
		time.Sleep(time.Second)
		p.set(2_000_000)
		time.Sleep(time.Second / 2)
		synctest.Wait()
		select {
		case d := <-ended:
			t.Fatalf("it passed after %v", d)
		default:
		}
		p.set(0)
		for range 3 {
			if d := <-ended; d != 3*time.Second/2 {
				t.Errorf("it passed after %v", d)
			}
		}
		p.set(1)
		p.turn(1 << 30)
		ctx, cancel := context.WithCancel(t.Context())
		time.AfterFunc(time.Second, cancel)
		if err := p.wait(ctx, p.turn(1)); err == nil {
			t.Error("it did not hear that nobody waits")
		}
	})
}
