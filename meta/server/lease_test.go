package server

import (
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"penstock.io/penstock/meta"
)

// TestWhereSessionsStand: sessions come and go in any order; the table always knows where
// each stands, and little more, and who is taken out stands nowhere.
func TestWhereSessionsStand(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	table := newLeaseTable()
	sessions := []*session{{}, {}, {}}
	stand := map[*session]map[meta.Ino]bool{}
	for _, s := range sessions {
		stand[s] = map[meta.Ino]bool{}
	}
	for step := range 50_000 {
		s, ino := sessions[rng.IntN(len(sessions))], meta.Ino(rng.IntN(400))
		switch n := rng.IntN(1000); {
		case n < 500:
			table.grant(s, ino, meta.LeaseMode(rng.IntN(int(meta.LeaseExclusive)+1)))
			if n := len(table.at[s]); !stand[s][ino] && n > 2*table.count[s]+standRoom {
				t.Fatalf("step %d: %d inodes are noted of one that has come to %d", step, n, table.count[s])
			}
			stand[s][ino] = true
		case n < 998:
			table.drop(s, ino)
			delete(stand[s], ino)
		case n < 999:
			table.dropAllBut(s, func(ino meta.Ino) bool { return ino < 20 })
			for ino := range stand[s] {
				if ino >= 20 {
					delete(stand[s], ino)
				}
			}
		default:
			table.dropAll(s)
			clear(stand[s])
		}
		if step%100 != 0 {
			continue
		}
		for _, s := range sessions {
			if len(stand[s]) != table.count[s] {
				t.Fatalf("step %d: it stands at %d inodes, the table says %d", step, len(stand[s]), table.count[s])
			}
			for ino := range stand[s] {
				if !table.stands(s, ino) || !slices.Contains(table.at[s], ino) {
					t.Fatalf("step %d: the table does not know that it stands at %d", step, ino)
				}
			}
		}
	}
	for _, s := range sessions {
		table.dropAll(s)
	}
	if len(table.m)+len(table.count)+len(table.at) > 0 {
		t.Errorf("nobody is left, and the table has %d inodes of %d sessions", len(table.m), len(table.at))
	}
}

// TestComingAndGoingIsCheap: what it costs that a session enters a volume, or ends,
// depends on its own leases: beside 100,000 times as many of others it may take longer by
// what memory costs, not by their number.
func TestComingAndGoingIsCheap(t *testing.T) {
	cost := func(others int) time.Duration {
		table, other, s := newLeaseTable(), &session{}, &session{}
		for i := range others {
			table.grant(other, meta.Ino(1000+i), meta.LeaseShared)
		}
		best := time.Hour
		for range 200 {
			for i := range 10 {
				table.grant(s, meta.Ino(1+i), meta.LeaseShared)
			}
			began := time.Now()
			table.asked(s, func(*recall) { t.Error("nobody asked it") })
			table.dropAll(s)
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
