package lock

import (
	"math/rand/v2"
	"slices"
	"testing"

	"penstock.io/penstock/meta"
)

func fcntl(owner uint64, ty meta.LockType, start, end uint64) meta.Lock {
	return meta.Lock{Ino: 5, Session: 1, Owner: owner, PID: uint32(owner), Type: ty, Start: start, End: end}
}

func flock(owner uint64, ty meta.LockType) meta.Lock {
	return meta.Lock{Ino: 5, Session: 1, Owner: owner, Type: ty, Flock: true}
}

const (
	un = meta.LockUnlock
	rd = meta.LockRead
	wr = meta.LockWrite
)

// must sets a possible lock and returns the requests that the lock woke.
func must(t *testing.T, tb *Table, l meta.Lock) []Ticket {
	t.Helper()
	a, err := tb.Set(l, 0)
	if err != nil || !a.Granted {
		t.Fatalf("set %+v: %+v, %v", l, a, err)
	}
	check(t, tb)
	return a.Woken
}

func refused(t *testing.T, tb *Table, l meta.Lock, kind meta.Kind) meta.Lock {
	t.Helper()
	a, err := tb.Set(l, 0)
	if meta.KindOf(err) != kind || a.Granted {
		t.Fatalf("set %+v: %+v, %v; want %v", l, a, err, kind)
	}
	check(t, tb)
	return a.Conflict
}

func waits(t *testing.T, tb *Table, l meta.Lock, w Ticket) {
	t.Helper()
	if a, err := tb.Set(l, w); err != nil || a.Granted {
		t.Fatalf("set %+v: %+v, %v; want to wait", l, a, err)
	}
	check(t, tb)
}

func check(t *testing.T, tb *Table) {
	t.Helper()
	if err := tb.Check(); err != nil {
		t.Fatal(err)
	}
}

func TestRangesSplitAndMerge(t *testing.T) {
	type r struct {
		ty         meta.LockType
		start, end uint64
	}
	for _, c := range []struct {
		name string
		set  []r
		want []r
	}{
		{"one", []r{{rd, 0, 9}}, []r{{rd, 0, 9}}},
		{"touching merge", []r{{rd, 0, 9}, {rd, 10, 19}}, []r{{rd, 0, 19}}},
		{"touching from the right merge", []r{{rd, 10, 19}, {rd, 0, 9}}, []r{{rd, 0, 19}}},
		{"types don't merge", []r{{rd, 0, 9}, {wr, 10, 19}}, []r{{rd, 0, 9}, {wr, 10, 19}}},
		{"a hole stays", []r{{rd, 0, 9}, {rd, 11, 19}}, []r{{rd, 0, 9}, {rd, 11, 19}}},
		{"unlock in the middle splits", []r{{wr, 0, 99}, {un, 40, 59}}, []r{{wr, 0, 39}, {wr, 60, 99}}},
		{"other type in the middle splits", []r{{wr, 0, 99}, {rd, 40, 59}}, []r{{wr, 0, 39}, {rd, 40, 59}, {wr, 60, 99}}},
		{"filling a hole joins three", []r{{rd, 0, 9}, {rd, 20, 29}, {rd, 10, 19}}, []r{{rd, 0, 29}}},
		{"covering replaces all", []r{{rd, 0, 9}, {wr, 20, 29}, {wr, 0, maxOffset}}, []r{{wr, 0, maxOffset}}},
		{"unlock to the end", []r{{wr, 0, maxOffset}, {un, 10, maxOffset}}, []r{{wr, 0, 9}}},
		{"unlock nothing", []r{{un, 0, maxOffset}}, nil},
	} {
		t.Run(c.name, func(t *testing.T) {
			tb := New()
			for _, s := range c.set {
				must(t, tb, fcntl(1, s.ty, s.start, s.end))
			}
			var got []r
			for _, l := range tb.All() {
				got = append(got, r{l.Type, l.Start, l.End})
			}
			if !slices.Equal(got, c.want) {
				t.Fatalf("%v, want %v", got, c.want)
			}
		})
	}
}

func TestConflicts(t *testing.T) {
	tb := New()
	must(t, tb, fcntl(1, rd, 0, 99))
	must(t, tb, fcntl(2, rd, 50, 149))
	if c := refused(t, tb, fcntl(3, wr, 120, 130), meta.WouldBlock); c.Owner != 2 {
		t.Fatalf("conflict %+v", c)
	}
	if c, ok := tb.Get(fcntl(3, wr, 0, maxOffset)); !ok || c.Owner != 1 || c.PID != 1 {
		t.Fatalf("get %+v %v", c, ok)
	}
	if _, ok := tb.Get(fcntl(3, rd, 0, maxOffset)); ok {
		t.Fatal("readers share")
	}
	if _, ok := tb.Get(fcntl(1, wr, 0, 49)); ok {
		t.Fatal("nobody is in the way of himself")
	}
	other := fcntl(1, wr, 0, 49)
	other.Session = 2
	refused(t, tb, other, meta.WouldBlock)
	must(t, tb, flock(3, wr)) // the other kind
	refused(t, tb, fcntl(1, rd, 5, 4), meta.Invalid)
	refused(t, tb, fcntl(1, rd, 0, maxOffset+1), meta.Invalid)
}

func TestWaiting(t *testing.T) {
	tb := New()
	must(t, tb, fcntl(1, wr, 0, 99))
	waits(t, tb, fcntl(2, wr, 0, 9), 20)
	waits(t, tb, fcntl(3, rd, 5, 99), 30)
	waits(t, tb, fcntl(4, rd, 50, 99), 40)
	if !tb.Cancel(40) || tb.Cancel(40) {
		t.Fatal("cancel")
	}
	// Downgrading lets the reader in, not the writer.
	if w := must(t, tb, fcntl(1, rd, 0, 99)); !slices.Equal(w, []Ticket{30}) {
		t.Fatalf("woken %v", w)
	}
	if w := tb.DropOwner(5, 1, 1, false); len(w) != 0 {
		t.Fatalf("woken %v", w)
	}
	if w := must(t, tb, fcntl(3, un, 0, 9)); !slices.Equal(w, []Ticket{20}) {
		t.Fatalf("woken %v", w)
	}
	check(t, tb)
}

func TestDeadlock(t *testing.T) {
	tb := New()
	must(t, tb, fcntl(1, wr, 0, 0))
	must(t, tb, fcntl(2, wr, 1, 1))
	must(t, tb, fcntl(3, wr, 2, 2))
	waits(t, tb, fcntl(1, wr, 1, 1), 1)
	waits(t, tb, fcntl(2, wr, 2, 2), 2)
	if _, err := tb.Set(fcntl(3, wr, 0, 0), 3); meta.KindOf(err) != meta.Deadlock {
		t.Fatalf("circle of three: %v", err)
	}
	if w := tb.DropOwner(5, 1, 3, false); !slices.Equal(w, []Ticket{2}) {
		t.Fatalf("woken %v", w)
	}
	// A reader upgrades while another reader does the same.
	tb = New()
	must(t, tb, fcntl(1, rd, 0, 9))
	must(t, tb, fcntl(2, rd, 0, 9))
	waits(t, tb, fcntl(1, wr, 0, 9), 1)
	if _, err := tb.Set(fcntl(2, wr, 0, 9), 2); meta.KindOf(err) != meta.Deadlock {
		t.Fatalf("two upgrades: %v", err)
	}
	// Over two inodes.
	tb = New()
	must(t, tb, fcntl(1, wr, 0, 9))
	l := fcntl(2, wr, 0, 9)
	l.Ino = 6
	must(t, tb, l)
	waits(t, tb, fcntl(2, wr, 0, 9), 1)
	l.Owner = 1
	if _, err := tb.Set(l, 2); meta.KindOf(err) != meta.Deadlock {
		t.Fatalf("two inodes: %v", err)
	}
}

func TestFlock(t *testing.T) {
	tb := New()
	must(t, tb, flock(1, rd))
	must(t, tb, flock(2, rd))
	waits(t, tb, flock(3, wr), 3)
	// A refused conversion loses the lock.
	refused(t, tb, flock(1, wr), meta.WouldBlock)
	if n := len(tb.All()); n != 1 {
		t.Fatalf("%d locks left", n)
	}
	if w := must(t, tb, flock(2, un)); !slices.Equal(w, []Ticket{3}) {
		t.Fatalf("woken %v", w)
	}
	waits(t, tb, flock(1, rd), 4)
	waits(t, tb, flock(2, rd), 5)
	if w := must(t, tb, flock(3, rd)); !slices.Equal(w, []Ticket{4, 5}) {
		t.Fatalf("woken %v", w)
	}
}

func TestDropSession(t *testing.T) {
	tb := New()
	must(t, tb, fcntl(1, wr, 0, 9))
	must(t, tb, flock(1, wr))
	a := fcntl(1, wr, 5, 5)
	a.Session = 2
	waits(t, tb, a, 1)
	b := flock(9, rd)
	b.Session = 2
	waits(t, tb, b, 2)
	c := fcntl(2, rd, 0, 0)
	waits(t, tb, c, 3)
	woken, canceled := tb.DropSession(1)
	check(t, tb)
	slices.Sort(woken)
	if !slices.Equal(woken, []Ticket{1, 2}) || !slices.Equal(canceled, []Ticket{3}) {
		t.Fatalf("woken %v canceled %v", woken, canceled)
	}
	if w, c := tb.DropSession(2); len(w)+len(c) != 0 || len(tb.files) != 0 || len(tb.sessions) != 0 {
		t.Fatalf("left over: %v %v %v", w, c, tb)
	}
}

// TestAgainstBytes compares with a model that knows the holders of each byte and their modes.
func TestAgainstBytes(t *testing.T) {
	const size, owners, steps = 24, 4, 400
	for seed := range uint64(200) {
		rng := rand.New(rand.NewPCG(seed, 7))
		tb := New()
		var model [size][owners]meta.LockType
		pending := map[Ticket]meta.Lock{}
		fits := func(l meta.Lock) bool {
			for b := l.Start; b <= l.End && l.Type != un; b++ {
				for o, ty := range model[b] {
					if uint64(o) != l.Owner && (ty == wr || ty == rd && l.Type == wr) {
						return false
					}
				}
			}
			return true
		}
		set := func(l meta.Lock) {
			for b := l.Start; b <= l.End; b++ {
				model[b][l.Owner] = l.Type
			}
		}
		for step := range steps {
			start := rng.Uint64N(size)
			l := fcntl(rng.Uint64N(owners), meta.LockType(rng.IntN(3)), start, start+rng.Uint64N(size-start))
			var ticket Ticket
			if rng.IntN(3) == 0 {
				ticket = Ticket(step + 1)
			}
			want := fits(l)
			a, err := tb.Set(l, ticket)
			if a.Granted != want {
				t.Fatalf("seed %d step %d: %+v granted %v, want %v (%v)", seed, step, l, a.Granted, want, err)
			}
			switch {
			case a.Granted:
				set(l)
			case err == nil:
				pending[ticket] = l
			}
			for _, w := range a.Woken {
				if !fits(pending[w]) {
					t.Fatalf("seed %d step %d: woke %+v, which does not fit", seed, step, pending[w])
				}
				set(pending[w])
				delete(pending, w)
			}
			for w, p := range pending {
				if fits(p) {
					t.Fatalf("seed %d step %d: ticket %d %+v fits and still waits", seed, step, w, p)
				}
			}
			if err := tb.Check(); err != nil {
				t.Fatalf("seed %d step %d: %v", seed, step, err)
			}
			var got [size][owners]meta.LockType
			for _, h := range tb.All() {
				for b := h.Start; b <= h.End; b++ {
					got[b][h.Owner] = h.Type
				}
			}
			if got != model {
				t.Fatalf("seed %d step %d after %+v:\n got %v\nwant %v", seed, step, l, got, model)
			}
		}
	}
}

// The table names the holders in the way of others, each for the first request; other holders are
// not named.
func TestHoldups(t *testing.T) {
	tb := New()
	flock := func(s meta.SessionID, ino meta.Ino, ticket Ticket) {
		t.Helper()
		_, err := tb.Set(meta.Lock{Ino: ino, Session: s, Owner: 1, Type: meta.LockWrite, Flock: true}, ticket)
		if err != nil {
			t.Fatal(err)
		}
	}
	bytes := func(s meta.SessionID, start, end uint64, ticket Ticket) {
		t.Helper()
		_, err := tb.Set(meta.Lock{Ino: 7, Session: s, Owner: 1, Type: meta.LockWrite, Start: start, End: end}, ticket)
		if err != nil {
			t.Fatal(err)
		}
	}
	want := func(ids ...meta.SessionID) {
		t.Helper()
		if got := tb.Holdups(); !slices.Equal(got, ids) {
			t.Errorf("in the way are %v, not %v", got, ids)
		}
	}
	want()
	flock(1, 5, 0)
	bytes(2, 0, 9, 0)
	bytes(3, 10, 19, 0)
	want()
	flock(4, 5, 1)
	want(1)
	bytes(4, 5, 15, 2)
	want(1, 2)
	tb.DropSession(2)
	want(1, 3)
	tb.Cancel(2)
	tb.DropSession(1)
	want()
}
