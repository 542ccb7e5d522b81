package lease

import (
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"penstock.io/penstock/meta"
)

// TestWhereSessionsStand: sessions come and go in any order; the table always knows where
// each stands, and little more, and who is taken out stands nowhere.
func TestWhereSessionsStand(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	table := New[int](Config{NoRecall: true})
	stand := map[int]map[meta.Ino]bool{1: {}, 2: {}, 3: {}}
	for step := range 50_000 {
		s, ino := 1+rng.IntN(3), meta.Ino(rng.IntN(400))
		switch n := rng.IntN(1000); {
		case n < 500:
			table.Grant(s, ino, meta.LeaseMode(rng.IntN(int(meta.LeaseExclusive)+1)))
			if n := len(table.sessions[s].inodes); !stand[s][ino] && n > 2*table.Count(s)+standingRoom {
				t.Fatalf("step %d: %d inodes are noted of a session that has come to %d", step, n, table.Count(s))
			}
			stand[s][ino] = true
		case n < 998:
			table.Drop(s, ino)
			delete(stand[s], ino)
		case n < 999:
			table.DropAll(s, 1, 2, 3)
			for ino := range stand[s] {
				if ino < 1 || ino > 3 {
					delete(stand[s], ino)
				}
			}
		default:
			table.DropAll(s)
			clear(stand[s])
		}
		if step%100 != 0 {
			continue
		}
		if err := table.Check(); err != nil {
			t.Fatalf("step %d: %v", step, err)
		}
		for s, at := range stand {
			if len(at) != table.Count(s) {
				t.Fatalf("step %d: it stands at %d inodes, the table says %d", step, len(at), table.Count(s))
			}
			for ino := range at {
				if !slices.Contains(table.Holders(ino), s) {
					t.Fatalf("step %d: the table does not know that it stands at %d", step, ino)
				}
			}
		}
	}
	for s := range stand {
		table.DropAll(s)
	}
	if table.Len()+len(table.sessions) > 0 {
		t.Errorf("nobody is left, and the table has %d inodes of %d sessions", table.Len(), len(table.sessions))
	}
}

// TestComingAndGoingIsCheap: the cost of a session's entry into a volume, and of the session's
// end, depends on the session's own leases: beside 100,000 times as many leases of others the
// cost may grow by the cost of memory, not by their number.
func TestComingAndGoingIsCheap(t *testing.T) {
	cost := func(others int) time.Duration {
		table, other, s := New[int](Config{}), 1, 2
		for i := range others {
			table.Grant(other, meta.Ino(1000+i), meta.LeaseShared)
		}
		best := time.Hour
		for range 200 {
			for i := range 10 {
				table.Grant(s, meta.Ino(1+i), meta.LeaseShared)
			}
			began := time.Now()
			if len(table.Unanswered(s)) > 0 {
				t.Error("nobody asked it")
			}
			table.DropAll(s)
			best = min(best, time.Since(began))
		}
		return best
	}
	few, many := cost(2), cost(200_000)
	t.Logf("beside 2 leases of others %v, beside 200,000 %v", few, many)
	if many > 100*few+100*time.Microsecond {
		t.Errorf("a session comes and goes in %v beside 2 leases of others, in %v beside 200,000", few, many)
	}
}

// TestRecall: an operation takes a lease back, and no session gets a new lease before the
// operation ran.
func TestRecall(t *testing.T) {
	table := New[string](Config{})
	now := time.Unix(100, 0)
	table.Grant("writer", 7, meta.LeaseExclusive)
	over, send := table.Recall(now, "reader", 7, meta.LeaseShared)
	if over == nil || len(send) != 1 || send[0].To != "writer" || send[0].Recall != (meta.Recall{Ino: 7, Keep: meta.LeaseShared}) {
		t.Fatalf("%v, %+v", over, send)
	}
	var op Blocker
	table.Block(&op, 7)
	if _, has := table.Grant("third", 7, meta.LeaseShared); has != meta.LeaseNone {
		t.Errorf("a lease is granted past an operation that waits: %v", has)
	}
	if table.Answer(now, "writer", 7, send[0].Round+1, false) || table.Answer(now, "third", 7, send[0].Round, false) || table.Answer(now, "writer", 7, send[0].Round, true) {
		t.Error("an answer counts that is to another round, of a session that was not asked, or that holds on to what it must give up")
	}
	if !table.Answer(now, "writer", 7, send[0].Round, false) || !isClosed(over) {
		t.Error("the answer does not count, or the round goes on")
	}
	if table.Mode("writer", 7) != meta.LeaseShared || !table.WasExclusive("writer", 7) {
		t.Errorf("the writer has %v", table.Mode("writer", 7))
	}
	wait := table.Blocked(&Blocker{}, 7)
	table.Unblock(&op)
	if wait == nil || !isClosed(wait) {
		t.Error("the block does not end with the operation")
	}
	if _, has := table.Grant("third", 7, meta.LeaseExclusive); has != meta.LeaseShared {
		t.Errorf("beside a reader it gets %v", has)
	}
	if err := table.Check(); err != nil {
		t.Error(err)
	}
}

// TestBarrier: writers are asked, a refusal is remembered until the barrier goes, and
// nobody gets an exclusive lease meanwhile.
func TestBarrier(t *testing.T) {
	table := New[string](Config{})
	now := time.Unix(100, 0)
	nobodyIsAway := func(string) bool { return false }
	table.Grant("writer", 7, meta.LeaseExclusive)
	early, send := table.Ask(now, "", 7, meta.LeaseShared, time.Second)
	table.RaiseBarrier()
	table.Answer(now, "writer", 7, send[0].Round, true) // the session was asked before
	if !isClosed(early) {
		t.Fatal("the round goes on")
	}
	over, send := table.AskWriters(now, time.Second, nobodyIsAway)
	if len(over) != 1 || len(send) != 1 {
		t.Fatalf("a refusal from before the barrier counts: %v", send)
	}
	table.Answer(now, "writer", 7, send[0].Round, true)
	if over, send := table.AskWriters(now, time.Second, nobodyIsAway); len(over)+len(send) > 0 {
		t.Errorf("it refused, and is asked again: %v", send)
	}
	if _, has := table.Grant("other", 8, meta.LeaseExclusive); has != meta.LeaseShared {
		t.Errorf("behind the barrier it gets %v", has)
	}
	table.LowerBarrier()
	if _, has := table.Grant("other", 8, meta.LeaseExclusive); has != meta.LeaseExclusive {
		t.Errorf("after the barrier it gets %v", has)
	}
}

// TestCheck is the control of Check: Check finds damage made by hand.
func TestCheck(t *testing.T) {
	for what, harm := range map[string]func(*Table[int]){
		"sessions have leases":   func(t *Table[int]) { t.inodes[1].more[0].mode = meta.LeaseExclusive; t.exclusive[1] = struct{}{} },
		"noted":                  func(t *Table[int]) { delete(t.exclusive, 2) },
		"blocks are counted":     func(t *Table[int]) { t.blocks++ },
		"waited for":             func(t *Table[int]) { t.inodes[1].unblocked = make(chan struct{}) },
		"is a holder twice":      func(t *Table[int]) { t.inodes[1].more[0].session = 1 },
		"noted as a holder":      func(t *Table[int]) { t.sessions[1].count++ },
		"no more than it may":    func(t *Table[int]) { t.inodes[2].round.pending = []int{3} },
		"rounds are unanswered":  func(t *Table[int]) { t.inodes[2].round = nil },
		"left of an exclusive":   func(t *Table[int]) { t.inodes[2].first.wasExclusive = true },
		"nobody holds on to it":  func(t *Table[int]) { t.inodes[1].refused = time.Unix(1, 0) },
		"it is not noted that":   func(t *Table[int]) { t.sessions[1].inodes = nil },
		"nobody is its first":    func(t *Table[int]) { t.inodes[9] = &inode[int]{} },
		"sessions are noted":     func(t *Table[int]) { t.sessions[9] = &standing{count: 1} },
		"waits for 0 sessions":   func(t *Table[int]) { t.inodes[2].round.pending = nil },
		"are noted as leased ex": func(t *Table[int]) { t.exclusive[9] = struct{}{} },
	} {
		table := New[int](Config{})
		table.Grant(1, 1, meta.LeaseShared)
		table.Grant(2, 1, meta.LeaseShared)
		table.Grant(1, 2, meta.LeaseExclusive)
		table.Recall(time.Unix(1, 0), 2, 2, meta.LeaseNone)
		if err := table.Check(); err != nil {
			t.Fatal(err)
		}
		harm(table)
		if err := table.Check(); err == nil || !strings.Contains(err.Error(), what) {
			t.Errorf("Check does not say %q: %v", what, err)
		}
	}
}
