package namespace

import (
	"bytes"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"penstock.io/penstock/meta"
)

// pinModel is a model of pins without the machine.
type pinModel map[meta.Generation]map[string]meta.Time // until

func (m pinModel) held(at meta.Generation, now meta.Time) (l []string) {
	for holder, until := range m[at] {
		if now <= until+meta.Time(meta.ClockSkew) {
			l = append(l, holder)
		}
	}
	slices.Sort(l)
	return l
}

// TestPinsAgainstModel pins, renews and releases at random while snapshots are taken and
// deleted, the volume is rolled back and the clock jumps, also backwards: a snapshot can
// be deleted exactly if no pin holds it.
func TestPinsAgainstModel(t *testing.T) {
	for seed := range uint64(20) {
		t.Run(fmt.Sprint("seed ", seed), func(t *testing.T) { runPins(t, seed) })
	}
}

func runPins(t *testing.T, seed uint64) {
	f := newFixture(t)
	rng := rand.New(rand.NewPCG(seed, 2))
	m := pinModel{}
	var going []meta.Generation
	pick := func() (at meta.Generation) {
		if len(m) == 0 || rng.IntN(20) == 0 {
			return meta.Generation(rng.IntN(50) + 100)
		}
		all := slices.Sorted(maps.Keys(m))
		return all[rng.IntN(len(all))]
	}
	kinds := map[string]int{}
	for i := range 400 {
		holder := fmt.Sprint("run-", rng.IntN(4))
		switch at := pick(); rng.IntN(9) {
		case 0:
			f.mkdir(1, fmt.Sprint("d", i))
			res := f.do(&meta.TakeSnapshot{Name: fmt.Sprint("s", i)})
			m[meta.Generation(res.Off)] = map[string]meta.Time{}
		case 1, 2, 3:
			op := &meta.PinSnapshot{At: at, Holder: holder, By: "client/a", TTL: time.Duration(rng.IntN(30)+1) * time.Minute}
			if m[at] == nil {
				f.fails(meta.NoSuchSnapshot, op)
				break
			}
			res := f.do(op)
			maps.DeleteFunc(m[at], func(h string, _ meta.Time) bool { // expired pins are removed, and stay removed if the clock goes back
				return h != holder && !slices.Contains(m.held(at, f.now), h)
			})
			m[at][holder] = max(m[at][holder], f.now+meta.Time(op.TTL))
			if meta.Time(res.Off) != m[at][holder] {
				t.Fatalf("step %d: until %d, want %d", i, res.Off, m[at][holder])
			}
			kinds["pinned"]++
		case 4:
			_, there := m[at][holder]
			if f.do(&meta.UnpinSnapshot{At: at, Holder: holder}).Existed && !there {
				t.Fatalf("step %d: released a pin that there was not", i)
			}
			delete(m[at], holder)
		case 5, 6:
			if m[at] == nil {
				break
			}
			held := m.held(at, f.now+1)
			_, err := f.try(&meta.DropSnapshot{At: at, Max: 1})
			if (err != nil) != (len(held) > 0) {
				t.Fatalf("step %d: %v; held by %v", i, err, held)
			}
			if err == nil {
				delete(m, at)
				going = append(going, at)
				kinds["deleted"]++
				break
			}
			kinds["refused"]++
			if meta.KindOf(err) != meta.Busy {
				t.Fatal(err)
			}
			for _, holder := range held {
				if until := time.Unix(0, int64(m[at][holder])).UTC().Format(time.RFC3339); !strings.Contains(err.Error(), holder+" until "+until) {
					t.Fatalf("%v does not name %s until %s", err, holder, until)
				}
			}
		case 7:
			f.now += meta.Time(time.Duration(rng.IntN(20)-4) * time.Minute)
		case 8:
			if m[at] == nil || rng.IntN(4) > 0 {
				break
			}
			for op := (&meta.Rollback{To: at}); ; {
				res := f.do(op)
				if res.EOF {
					break
				}
				op.From = res.Data
			}
			kinds["rolled back"]++
		}
		for len(going) > 0 && rng.IntN(3) == 0 {
			if f.do(&meta.DropSnapshot{At: going[0]}).EOF {
				going = going[1:]
			}
		}
		l, err := Pins(f.s, f.now)
		if err != nil {
			t.Fatal(err)
		}
		want, got := map[string]meta.Time{}, map[string]meta.Time{}
		for at := range m {
			for _, holder := range m.held(at, f.now) {
				want[fmt.Sprint(at, holder)] = m[at][holder]
			}
		}
		for _, p := range l {
			got[fmt.Sprint(p.Snapshot, p.Holder)] = p.Until
			if p.By != "client/a" {
				t.Fatal(p)
			}
		}
		if !maps.Equal(got, want) {
			t.Fatalf("step %d: %v, want %v", i, got, want)
		}
		if i%20 == 0 {
			f.check()
		}
	}
	for _, k := range []string{"pinned", "deleted", "refused", "rolled back"} {
		if kinds[k] == 0 {
			t.Errorf("never %s: the test tests little", k)
		}
	}
	// When the last snapshot is gone, so is the last pin.
	f.now += meta.Time(2 * time.Hour)
	for _, at := range append(going, slices.Sorted(maps.Keys(m))...) {
		for !f.do(&meta.DropSnapshot{At: at}).EOF {
		}
	}
	f.check()
	if keys, err := (&tx{view: view{r: f.s}}).snaps().keysFrom([]byte{prefixPin}, 1); err != nil || len(keys) != 0 {
		t.Fatalf("left: %x, %v", keys, err)
	}
}

func TestPinBounds(t *testing.T) {
	f := newFixture(t)
	at := meta.Generation(f.do(&meta.TakeSnapshot{Name: "one"}).Off)
	for kind, op := range map[*meta.PinSnapshot]meta.Kind{
		{At: at, TTL: time.Hour}:                                      meta.Invalid,
		{At: at, Holder: "a"}:                                         meta.Invalid,
		{At: at, Holder: "a", TTL: -1}:                                meta.Invalid,
		{At: at, Holder: "a", TTL: meta.MaxPinTTL + 1}:                meta.Invalid,
		{At: at, Holder: "a\xff", TTL: time.Hour}:                     meta.Invalid,
		{At: at, Holder: "a\nb", TTL: time.Hour}:                      meta.Invalid,
		{At: at, Holder: strings.Repeat("a", meta.MaxName+1), TTL: 1}: meta.NameTooLong,
		{At: at + 1, Holder: "a", TTL: time.Hour}:                     meta.NoSuchSnapshot,
	} {
		f.fails(op, kind)
	}
	for i := range meta.MaxPins {
		f.do(&meta.PinSnapshot{At: at, Holder: fmt.Sprint("run-", i), TTL: time.Minute})
	}
	more := &meta.PinSnapshot{At: at, Holder: "more", TTL: time.Hour}
	f.fails(meta.ResourceExceeded, more)
	f.do(&meta.PinSnapshot{At: at, Holder: "run-7", TTL: time.Hour}) // renews an existing pin
	if _, err := f.try(&meta.DropSnapshot{At: at}); meta.KindOf(err) != meta.Busy || !strings.Contains(err.Error(), "1019 others") {
		t.Fatal(err)
	}
	// Expired pins make room, and are removed at the next pin.
	f.now += meta.Time(10 * time.Minute)
	f.do(more)
	keys, err := (&tx{view: view{r: f.s}}).snaps().keysFrom([]byte{prefixPin}, 10)
	if err != nil || len(keys) != 2 {
		t.Fatalf("%q, %v", keys, err)
	}
}

// TestDamagedPins: Check and readers see each.
func TestDamagedPins(t *testing.T) {
	f := newFixture(t)
	at := meta.Generation(f.do(&meta.TakeSnapshot{Name: "one"}).Off)
	f.do(&meta.PinSnapshot{At: at, Holder: "a", By: "client/x", TTL: time.Hour})
	key := appendPinKey(nil, uint32(at), "a")
	good, _, _ := f.s.Get(key)
	good = bytes.Clone(good)
	for name, v := range map[string][]byte{
		"cut": good[:len(good)-1], "empty": nil, "longer": append(bytes.Clone(good), 1), "version": append([]byte{9}, good[1:]...),
		"ends before it begins": appendPin(nil, &meta.Pin{Made: 9, Until: 9}),
	} {
		f.s.t.ReplaceOrInsert(memItem{key, v})
		if rep, err := Check(f.s); err != nil || rep.OK() {
			t.Errorf("%s: Check sees nothing (%v)", name, err)
		}
		if _, err := Pins(f.s, f.now); meta.KindOf(err) != meta.Corrupt && meta.KindOf(err) != meta.Version {
			t.Errorf("%s: %v", name, err)
		}
		if _, err := f.try(&meta.DropSnapshot{At: at}); err == nil {
			t.Errorf("%s: a snapshot with a damaged pin was deleted", name)
		}
	}
	f.s.t.ReplaceOrInsert(memItem{key, good})
	stray := memItem{appendPinKey(nil, uint32(at)+5, "a"), good}
	f.s.t.ReplaceOrInsert(stray)
	if rep, err := Check(f.s); err != nil || rep.OK() {
		t.Errorf("a pin of no snapshot: Check sees nothing (%v)", err)
	}
	f.s.t.Delete(stray)
}

// TestCloneHasNoPins: a pin belongs to the snapshot, not to the snapshot's clones.
func TestCloneHasNoPins(t *testing.T) {
	f := newFixture(t)
	at := meta.Generation(f.do(&meta.TakeSnapshot{Name: "one"}).Off)
	f.do(&meta.PinSnapshot{At: at, Holder: "a", TTL: time.Hour})
	l, err := CloneEffects(f.s, at, testVolume+1, meta.Policy{}, f.now)
	if err != nil {
		t.Fatal(err)
	}
	clone := &memStore{f.s.t.Clone()}
	clone.apply(l)
	if pins, err := Pins(clone, f.now); err != nil || len(pins) != 0 {
		t.Error(pins, err)
	}
	if rep, err := Check(clone); err != nil || !rep.OK() {
		t.Error(rep.Problems, err)
	}
}
