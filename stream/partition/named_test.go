package partition

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"testing"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/stream/log"
)

// named makes a batch of a producer with a name; the records have the numbers as values.
func named(name string, first int64, n int) []byte {
	b := log.Batch{BaseTime: 1, MaxTime: 1, Records: int32(n), LastDelta: int32(n) - 1}
	b.Number(log.NamedProducer(name), first)
	var records []byte
	for i := range n {
		records = log.AppendRecord(records, int32(i), 0, nil, fmt.Append(nil, name, " ", first+int64(i)), nil)
	}
	return b.Encode(records)
}

// TestNamedProducers: over crashes, and with any division into batches, the log has every number
// of a producer once and in order. Two producers begin again at each crash with a number that
// the log may have, and leave numbers out.
func TestNamedProducers(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	r := rand.New(rand.NewPCG(seed, 0))
	dir := newMemDir()
	const edge = 1 << 31 // where the epoch of the batches changes
	last := map[string]int64{"a": -1, "b": edge - 100}
	want := map[string][]string{}
	for range 40 {
		l := open(t, dir, fixed(Policy{SegmentBytes: 2000}))
		for name := range last {
			id := log.NamedProducer(name)
			at, wait, ok := l.Place(id)
			if ok != (len(want[name]) > 0) || ok && at.Last != last[name] {
				t.Fatalf("DATA: producer %s is at %+v, %v, not at %d", name, at, ok, last[name])
			}
			if ok {
				if err := wait.Wait(t.Context()); err != nil {
					t.Fatal(err)
				}
			}
			for range r.IntN(4) {
				first, n := last[name]+1, 1+r.IntN(5)
				if r.IntN(2) == 0 {
					first += r.Int64N(7) // numbers are left out
				}
				if first < edge && first+int64(n) > edge {
					if _, err := l.AppendNamed(named(name, first, n), last[name]); !errors.Is(err, meta.Invalid) {
						t.Fatalf("a batch of two epochs: %v", err)
					}
					n = int(log.Room(first))
				}
				if ok {
					var refused *SequenceError
					if _, err := l.AppendNamed(named(name, first+1, 1), first); !errors.As(err, &refused) || refused.Verdict != log.OutOfOrder {
						t.Fatalf("DATA: a gap before %d: %v", first+1, err)
					}
				}
				a, err := l.AppendNamed(named(name, first, n), last[name])
				if err != nil {
					t.Fatalf("numbers from %d after %d: %v", first, last[name], err)
				}
				if err := a.Wait(t.Context()); err != nil {
					t.Fatal(err)
				}
				for i := range n {
					want[name] = append(want[name], fmt.Sprint(name, " ", first+int64(i)))
				}
				last[name], ok = first+int64(n)-1, true
				if offset, found := l.Find(id, first); !found || offset != a.Base {
					t.Errorf("DATA: number %d is at %d, %v, not at %d", first, offset, found, a.Base)
				}
				// The same number in another batch.
				again, err := l.AppendNamed(named(name, last[name], 1), last[name]-1)
				if err != nil || !again.Repeated {
					t.Fatalf("DATA: number %d again: %+v, %v", last[name], again, err)
				}
			}
		}
		if err := l.Close(); err != nil {
			t.Fatal(err)
		}
		dir = dir.crash(r.Float64())
	}
	l := open(t, dir, fixed(Policy{SegmentBytes: 2000}))
	defer l.Close()
	got := map[string][]string{}
	_, all := values(t, l, 1<<20)
	for _, v := range all {
		got[v[:1]] = append(got[v[:1]], v)
	}
	for name := range last {
		if fmt.Sprint(got[name]) != fmt.Sprint(want[name]) {
			t.Errorf("DATA: producer %s has %v, not %v", name, got[name], want[name])
		}
	}
	if _, err := l.Append(named("a", 1<<40, 1)); !errors.Is(err, meta.Invalid) {
		t.Errorf("DATA: a Kafka client appends as a producer with a name: %v", err)
	}
	if _, err := l.AppendNamed(batch(7, 0, 1, "x"), -1); !errors.Is(err, meta.Invalid) {
		t.Errorf("a batch without a name: %v", err)
	}
}
