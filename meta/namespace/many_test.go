package namespace

import (
	"flag"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
)

var (
	manySnapshots = flag.Int("snapshots", 16, "how many snapshots TestManySnapshots takes and deletes")
	manySeed      = flag.Uint64("snapshots-seed", 1, "its seed")
)

// TestManySnapshots takes many snapshots of a volume that changes all the time, and
// deletes them in any order during the changes, several at once, in steps of any size.
// Each snapshot shows the same state until it is deleted, the check is exact after every
// deletion, and after the last one no trace of snapshots is left. `make soak` has 200.
func TestManySnapshots(t *testing.T) {
	f := newFixture(t)
	s := &sim{fixture: f, rng: rand.New(rand.NewPCG(*manySeed, 2))}
	s.m = newModel(f.now-2, testSession)
	defer func() {
		if t.Failed() {
			t.Logf("seed %d, the last of %d operations:\n%s", *manySeed, len(s.log), strings.Join(s.log[max(0, len(s.log)-12):], "\n"))
		}
	}()
	work := func() {
		for range s.rng.IntN(8) {
			s.step()
		}
	}
	for i := range *manySnapshots {
		work()
		s.frozen = append(s.frozen, s.freeze(i))
	}
	s.sameTree()
	for len(s.frozen)+len(s.going) > 0 {
		work()
		if len(s.frozen) > 0 && (len(s.going) == 0 || len(s.going) < 4 && s.rng.IntN(3) == 0) {
			n := s.rng.IntN(len(s.frozen))
			s.frozen[n].compare(s)
			s.going = append(s.going, s.frozen[n].gen)
			s.frozen = slices.Delete(s.frozen, n, n+1)
		}
		before := len(s.going)
		s.dropStep(s.rng.IntN(before))
		if len(s.going) < before {
			s.check()
			if len(s.frozen) > 0 {
				s.frozen[s.rng.IntN(len(s.frozen))].compare(s)
			}
		}
	}
	s.dropAll()
}
