package quota

import (
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"

	"penstock.io/penstock/meta"
)

// model is the account in the plainest form: the promises of each session, the used bytes of the
// volume, and nothing that could be computed from the two.
type model struct {
	limit, used, left uint64
	promised          map[meta.SessionID]uint64
	drawn             map[meta.SessionID]map[meta.Ino]uint64
	granted           map[meta.SessionID]uint64 // with the last serial number
	given             map[meta.SessionID]uint64
	serial            map[meta.SessionID]uint64
	pending           map[meta.SessionID]bool // of the round
	number            uint64                  // of the last round
}

func (m *model) reset() {
	m.left = 0
	m.promised, m.drawn = map[meta.SessionID]uint64{}, map[meta.SessionID]map[meta.Ino]uint64{}
	m.granted, m.given, m.serial = map[meta.SessionID]uint64{}, map[meta.SessionID]uint64{}, map[meta.SessionID]uint64{}
	m.pending = map[meta.SessionID]bool{}
}

func (m *model) sum() (all uint64) {
	for _, n := range m.promised {
		all += n
	}
	return all + m.left
}

func (m *model) free() uint64 {
	if taken := m.used + m.sum(); taken < m.limit {
		return m.limit - taken
	}
	return 0
}

func (m *model) take(id meta.SessionID, n uint64) {
	m.promised[id] -= min(n, m.promised[id])
}

// TestAgainstModel does thousands of random steps in an account and in the model, and compares
// all answers after each step. Sessions get only free bytes, and operations take only promised or
// free bytes, so the used and promised bytes never exceed the limit, unless the limit was lowered
// or a claim came.
func TestAgainstModel(t *testing.T) {
	for seed := range uint64(20) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			rng := rand.New(rand.NewPCG(seed, 17))
			a, m := &Account{}, &model{}
			m.reset()
			var round *Round
			within := true // the limit: used and promised are
			for step := range 4000 {
				id, ino := meta.SessionID(1+rng.IntN(5)), meta.Ino(1+rng.IntN(3))
				n := rng.Uint64N(2000)
				what := ""
				equal := func(of string, got, want any) {
					t.Helper()
					if got != want {
						t.Fatalf("step %d, %s: %s: the account says %v, the model %v", step, what, of, got, want)
					}
				}
				switch k := rng.IntN(100); {
				case k < 3 || m.limit == 0:
					limit := uint64(rng.IntN(3)) * 50_000
					what = fmt.Sprintf("the limit becomes %d", limit)
					if m.limit > 0 && limit == 0 {
						m.reset()
					}
					a.SetLimit(limit)
					m.limit = limit
					within = m.used+m.sum() <= limit
				case k < 35:
					serial := m.serial[id] + uint64(rng.IntN(3))
					what = fmt.Sprintf("session %d wants %d, serial %d", id, n, serial)
					granted, before := a.Decided(id, serial)
					equal("decided before", before, serial <= m.serial[id])
					if before {
						equal("granted", granted, m.granted[id])
						break
					}
					if free := m.free(); free < n {
						a.Wait(id)
						if m.number > 0 {
							delete(m.pending, id)
						}
						if rng.IntN(2) == 0 {
							a.WaitNoMore(id)
						}
						break
					}
					a.WaitNoMore(id)
					a.Share(id)
					free := m.free()
					granted = a.Grant(id, serial, n)
					if granted < n || granted > free {
						t.Fatalf("step %d, %s: %d of %d free bytes are granted", step, what, granted, free)
					}
					m.promised[id] += granted
					m.granted[id], m.serial[id] = granted, serial
				case k < 45:
					serial := m.given[id] + uint64(rng.IntN(2))
					what = fmt.Sprintf("session %d gives %d back, serial %d", id, n, serial)
					a.GiveBack(id, serial, n)
					if serial > m.given[id] {
						m.given[id] = serial
						m.take(id, n)
					}
				case k < 55:
					cover := a.Cover(id, n, false)
					what = fmt.Sprintf("an operation of session %d takes %d, promised %d", id, n, cover)
					equal("cover", cover, min(n, m.promised[id]))
					m.used += cover
					a.SetUsed(m.used)
					a.Spend(id, n)
					m.take(id, n)
				case k < 65:
					cover := a.Cover(id, 0, true)
					equal("cover", cover, m.promised[id])
					grown := min(cover, n)
					what = fmt.Sprintf("session %d draws %d for inode %d", id, grown, ino)
					before := m.used
					m.used += grown
					a.SetUsed(m.used)
					a.Draw(id, ino, before)
					if m.drawn[id] == nil {
						m.drawn[id] = map[meta.Ino]uint64{}
					}
					m.drawn[id][ino] += grown
					m.take(id, grown)
				case k < 72:
					what = fmt.Sprintf("session %d ends a commit of inode %d, of %d bytes", id, ino, n)
					a.ChargeWrite(id, ino, n)
					if drawn := m.drawn[id][ino]; n > drawn {
						m.take(id, n-drawn)
					}
					delete(m.drawn[id], ino)
				case k < 80:
					what = fmt.Sprintf("%d bytes are deleted", n)
					m.used -= min(n, m.used)
					a.SetUsed(m.used)
				case k < 83:
					what = fmt.Sprintf("session %d ends", id)
					a.Leave(id)
					m.left += m.promised[id]
					delete(m.promised, id)
					delete(m.drawn, id)
					delete(m.granted, id)
					delete(m.given, id)
					delete(m.serial, id)
					delete(m.pending, id)
				case k < 86:
					what = "what ended sessions left is sealed"
					a.FreeLeft()
					m.left = 0
				case k < 88:
					what = fmt.Sprintf("session %d claims %d", id, n)
					a.Claim(id, n)
					m.promised[id] = n
					within = within && m.used+m.sum() <= m.limit
				case k < 90:
					what = fmt.Sprintf("another process of session %d", id)
					equal("inherited", a.Inherit(id, m.serial[id]+1), m.promised[id])
					m.serial[id]++
					m.granted[id] = m.promised[id]
					delete(m.drawn, id)
				case k < 94:
					what = "a round begins"
					var asked []meta.SessionID
					before := round
					running := a.Round()
					for id := range meta.SessionID(6) {
						if a.Askable(id) {
							equal("it was promised something", m.promised[id] > 0, true)
							asked = append(asked, id)
						}
					}
					m.number++
					equal("its number", a.NextRound(), m.number)
					r := a.BeginRound(asked)
					equal("it waits", r != nil, len(asked) > 0)
					if r != nil {
						if running != nil && running == before {
							equal("the round before is over", isOver(before), true)
						}
						round = r
						m.pending = map[meta.SessionID]bool{}
						for _, id := range asked {
							m.pending[id] = true
						}
					}
				case k < 99:
					number := m.number - min(m.number, uint64(rng.IntN(2)))
					what = fmt.Sprintf("session %d answers round %d", id, number)
					a.Answer(id, number)
					if round != nil && number >= round.Number {
						delete(m.pending, id)
					}
				default:
					what = "the round takes too long"
					equal("it was under way", a.EndRound(round), len(m.pending) > 0)
					clear(m.pending)
				}
				if err := a.Check(); err != nil {
					t.Fatalf("step %d, %s: %v", step, what, err)
				}
				equal("promised", a.Promised(), m.sum())
				equal("left", a.Left(), m.left)
				equal("free", a.Free(), m.free())
				for id := range meta.SessionID(6) {
					bytes, _ := a.Promise(id)
					equal(fmt.Sprintf("promised to session %d", id), bytes, m.promised[id])
				}
				if round != nil {
					equal("the round is over", isOver(round), len(m.pending) == 0)
				}
				within = within || m.used+m.sum() <= m.limit
				if within && m.limit > 0 && m.used+m.sum() > m.limit {
					t.Fatalf("step %d, %s: %d bytes are used and %d promised of %d", step, what, m.used, m.sum(), m.limit)
				}
			}
		})
	}
}

func isOver(r *Round) bool {
	select {
	case <-r.Over():
		return true
	default:
		return false
	}
}

// TestIdle: sessions share the bound on idle promises, and a session that waits for more has no
// idle promise.
func TestIdle(t *testing.T) {
	a := &Account{}
	a.SetLimit(100_000)
	if most := a.MostIdle(); most != 1000 {
		t.Fatalf("%d bytes may lie idle", most)
	}
	for id := range meta.SessionID(4) {
		crowded := a.Share(1 + id)
		a.Grant(1+id, 1, 500)
		if bytes, idle := a.Promise(1 + id); id == 0 && (idle != 1000 || bytes != 1500) || id > 0 && (!crowded || idle != 0) {
			t.Errorf("session %d was promised %d bytes, %d may lie idle; crowded: %v", 1+id, bytes, idle, crowded)
		}
	}
	a.Answer(1, 0)
	if crowded := a.Share(2); crowded || a.Idle() != 250 {
		t.Errorf("of what the first gave back %d bytes lie idle; crowded: %v", a.Idle(), crowded)
	}
	a.Wait(2)
	if _, idle := a.Promise(2); idle != 0 || a.Idle() != 0 || a.Askable(2) {
		t.Errorf("it waits, and %d bytes may lie idle", idle)
	}
}

// TestReplacedRound: a caller that waits for a replaced round looks again.
func TestReplacedRound(t *testing.T) {
	a := &Account{}
	a.SetLimit(1000)
	first := a.BeginRound([]meta.SessionID{1})
	second := a.BeginRound([]meta.SessionID{1, 2})
	if !isOver(first) || isOver(second) || a.EndRound(first) {
		t.Error("the round that was replaced goes on, or the other one does not")
	}
	a.Answer(1, first.Number)
	if second.Pending() != 2 {
		t.Error("an answer to the round before counts")
	}
}

// TestCheck is the control of Check: Check finds damage made by hand.
func TestCheck(t *testing.T) {
	for what, harm := range map[string]func(*Account){
		"are promised, and counted": func(a *Account) { a.promised++ },
		"may lie idle, and are":     func(a *Account) { a.idle++ },
		"waits for more":            func(a *Account) { a.promises[1].waiting = true },
		"waits for 0 sessions":      func(a *Account) { a.round.pending = nil },
	} {
		a := &Account{}
		a.SetLimit(100_000)
		a.Share(1)
		a.Grant(1, 1, 500)
		a.BeginRound([]meta.SessionID{1})
		if err := a.Check(); err != nil {
			t.Fatal(err)
		}
		harm(a)
		if err := a.Check(); err == nil || !strings.Contains(err.Error(), what) {
			t.Errorf("Check does not say %q: %v", what, err)
		}
	}
}
