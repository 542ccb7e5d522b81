package placement

import (
	"math/rand/v2"
	"testing"
)

// keys are the partitions of some streams.
func keys() (all []Key) {
	for dir := range uint64(60) {
		for n := range int32(50) {
			all = append(all, Key{Volume: uint32(dir % 3), Directory: 1000 + dir, Number: n})
		}
	}
	return all
}

// place is the leader of each key.
func place(t *testing.T, live []Gateway) map[Key]int32 {
	t.Helper()
	of := map[Key]int32{}
	for _, k := range keys() {
		g, ok := Leader(k, live)
		if !ok {
			t.Fatal("nobody leads")
		}
		of[k] = g.Number
	}
	return of
}

// While gateways come and go at random, in lists of any order, only the leaderships of a leaving
// gateway move, and those that a new gateway gets; and all gateways have about equal shares.
func TestLeader(t *testing.T) {
	if _, ok := Leader(Key{}, nil); ok {
		t.Error("a gateway of an empty list leads")
	}
	seed := rand.Uint64()
	r := rand.New(rand.NewPCG(seed, 1))
	live := []Gateway{{Number: 1}, {Number: 2}}
	was := place(t, live)
	next := int32(3)
	for step := range 40 {
		came, went := int32(0), int32(0)
		if len(live) == 1 || len(live) < 9 && r.IntN(2) == 0 {
			live = append(live, Gateway{Number: next})
			came = next
			next += 1 + r.Int32N(5)
		} else {
			i := r.IntN(len(live))
			went = live[i].Number
			live = append(live[:i:i], live[i+1:]...)
		}
		r.Shuffle(len(live), func(i, j int) { live[i], live[j] = live[j], live[i] })
		is := place(t, live)
		share := map[int32]int{}
		for k, g := range is {
			share[g]++
			if g != was[k] && g != came && was[k] != went {
				t.Fatalf("seed %d, step %d: %+v moved from %d to %d, when %d came or %d went", seed, step, k, was[k], g, came, went)
			}
		}
		fair := float64(len(is)) / float64(len(live))
		for _, g := range live {
			if n := float64(share[g.Number]); n < 0.75*fair || n > 1.25*fair {
				t.Errorf("seed %d, step %d: gateway %d of %d leads %v of %d", seed, step, g.Number, len(live), n, len(is))
			}
		}
		was = is
	}
}
