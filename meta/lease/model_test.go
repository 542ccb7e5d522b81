package lease

import (
	"cmp"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"penstock.io/penstock/meta"
)

// model is the table in the plainest form: lists that are searched from end to end.
// Sessions are numbers; 0 is nobody.
type model struct {
	holders []modelHolder
	rounds  []modelRound
	blocks  []modelBlock
	refused map[meta.Ino]time.Time
	last    uint64
	live    map[int]bool // see the live tree of a mirror's target
	// barrier: up since that round; refusedSince are the inodes refused since.
	barrier      bool
	barrierSince uint64
	refusedSince map[meta.Ino]bool
}

type modelHolder struct {
	s            int
	ino          meta.Ino
	mode         meta.LeaseMode
	wasExclusive bool
}

type modelRound struct {
	ino     meta.Ino
	number  uint64
	since   time.Time
	keep    meta.LeaseMode
	within  time.Duration
	pending map[int]bool
	awaited bool
}

type modelBlock struct {
	by  int
	ino meta.Ino
}

func (m *model) holder(s int, ino meta.Ino) *modelHolder {
	for i := range m.holders {
		if h := &m.holders[i]; h.s == s && h.ino == ino {
			return h
		}
	}
	return nil
}

func (m *model) mode(s int, ino meta.Ino) meta.LeaseMode {
	if h := m.holder(s, ino); h != nil {
		return h.mode
	}
	return meta.LeaseNone
}

// inWay lists the sessions with more than keep in the way of s.
func (m *model) inWay(s int, ino meta.Ino, keep meta.LeaseMode) (all []int) {
	for _, h := range m.holders {
		apart := s != 0 && m.live[s] != m.live[h.s]
		if h.ino == ino && h.s != s && h.mode > keep && !apart {
			all = append(all, h.s)
		}
	}
	slices.Sort(all)
	return all
}

func (m *model) round(ino meta.Ino) *modelRound {
	for i := range m.rounds {
		if m.rounds[i].ino == ino {
			return &m.rounds[i]
		}
	}
	return nil
}

func (m *model) exclusive(ino meta.Ino) bool { return len(m.inWay(0, ino, meta.LeaseShared)) > 0 }

func (m *model) grant(s int, ino meta.Ino, mode meta.LeaseMode) meta.LeaseMode {
	if m.barrier || len(m.inWay(s, ino, meta.LeaseNone)) > 0 {
		mode = min(mode, meta.LeaseShared)
	}
	blocked := slices.ContainsFunc(m.blocks, func(b modelBlock) bool { return b.ino == ino })
	if blocked || len(m.inWay(s, ino, meta.LeaseShared)) > 0 {
		mode = meta.LeaseNone
	}
	if m.holder(s, ino) == nil {
		m.holders = append(m.holders, modelHolder{s: s, ino: ino})
	}
	h := m.holder(s, ino)
	if r := m.round(ino); r != nil && r.pending[s] {
		return min(h.mode, r.keep)
	}
	if mode > h.mode {
		h.mode, h.wasExclusive = mode, false
	}
	return h.mode
}

// ask returns whether the caller must wait, and the sessions that get a message.
func (m *model) ask(now time.Time, s int, ino meta.Ino, keep meta.LeaseMode, within time.Duration, awaited bool) (wait bool, send []int) {
	inWay := m.inWay(s, ino, keep)
	if len(inWay) == 0 {
		return false, nil
	}
	if r := m.round(ino); r != nil {
		r.awaited = r.awaited || awaited
		return true, nil
	}
	m.last++
	pending := map[int]bool{}
	for _, s := range inWay {
		pending[s] = true
	}
	m.rounds = append(m.rounds, modelRound{ino: ino, number: m.last, since: now, keep: keep, within: within, pending: pending, awaited: awaited})
	return true, inWay
}

// done takes a session out of an inode's round, and tidies.
func (m *model) done(s int, ino meta.Ino) {
	if r := m.round(ino); r != nil {
		delete(r.pending, s)
	}
	m.rounds = slices.DeleteFunc(m.rounds, func(r modelRound) bool { return len(r.pending) == 0 })
	if !m.exclusive(ino) {
		delete(m.refused, ino)
	}
}

func (m *model) count(s int) (n int) {
	for _, h := range m.holders {
		if h.s == s {
			n++
		}
	}
	return n
}

func (m *model) drop(s int, ino meta.Ino) {
	before := m.count(s)
	m.holders = slices.DeleteFunc(m.holders, func(h modelHolder) bool { return h.s == s && h.ino == ino })
	if m.count(s) == 0 && before > 0 {
		delete(m.live, s)
	}
	m.done(s, ino)
}

// dropAll takes a session out of all inodes but one, if given.
func (m *model) dropAll(s int, stays meta.Ino) {
	if m.count(s) == 0 {
		delete(m.live, s)
	}
	for i := range modelInodes {
		if ino := meta.Ino(1 + i); ino != stays {
			m.drop(s, ino)
		}
	}
}

func (m *model) answer(now time.Time, s int, ino meta.Ino, number uint64, holdsOn bool) bool {
	r := m.round(ino)
	if r == nil || r.number != number || !r.pending[s] || holdsOn && r.within == 0 {
		return false
	}
	switch h := m.holder(s, ino); {
	case holdsOn:
		m.refused[ino] = now
		if m.barrier && number > m.barrierSince {
			m.refusedSince[ino] = true
		}
	case h.mode > r.keep:
		h.wasExclusive = h.mode == meta.LeaseExclusive && r.keep == meta.LeaseShared
		h.mode = r.keep
	}
	m.done(s, ino)
	return true
}

// recipients are the sessions that get messages, sorted.
func recipients(send []Message[int]) (to []int) {
	for _, m := range send {
		to = append(to, m.To)
	}
	slices.Sort(to)
	return to
}

func sorted[E cmp.Ordered](l []E) []E { slices.Sort(l); return l }

const (
	modelSessions = 4
	modelInodes   = 5
	modelRest     = 30 * time.Second
)

// world is a table beside the model, and the waits of the sessions' operations.
type world struct {
	t     *testing.T
	rng   *rand.Rand
	table *Table[int]
	model *model
	now   time.Time
	// blockers are operations, by number.
	blockers []Blocker
	// rounds and blocks are the returned channels that must still be open.
	rounds map[uint64]<-chan struct{}
	blocks map[meta.Ino]<-chan struct{}
	what   string // the present step
}

func (w *world) equal(what string, got, want any) {
	w.t.Helper()
	if g, x := fmt.Sprint(got), fmt.Sprint(want); g != x {
		w.t.Fatalf("%s: %s: the table says %s, the model %s", w.what, what, g, x)
	}
}

func isClosed(ch <-chan struct{}) bool {
	select {
	case <-ch:
		return true
	default:
		return false
	}
}

func (w *world) ask(s int, ino meta.Ino, keep meta.LeaseMode, within time.Duration, awaited bool) {
	var over <-chan struct{}
	var send []Message[int]
	if awaited {
		over, send = w.table.Recall(w.now, s, ino, keep)
	} else {
		over, send = w.table.Ask(w.now, s, ino, keep, within)
	}
	wait, to := w.model.ask(w.now, s, ino, keep, within, awaited)
	w.equal("it waits", over != nil, wait)
	w.equal("asked", recipients(send), to)
	if over != nil {
		w.rounds[w.model.round(ino).number] = over
	}
}

// step does something at random in both.
func (w *world) step() {
	s, ino := 1+w.rng.IntN(modelSessions), meta.Ino(1+w.rng.IntN(modelInodes))
	mode := meta.LeaseMode(w.rng.IntN(int(meta.LeaseExclusive) + 1))
	keep := meta.LeaseMode(w.rng.IntN(int(meta.LeaseExclusive)))
	within := time.Duration(w.rng.IntN(2)) * time.Second
	k := w.rng.IntN(len(w.blockers))
	m := w.model
	switch n := w.rng.IntN(100); {
	case n < 35:
		w.what = fmt.Sprintf("session %d is granted %v of inode %d", s, mode, ino)
		before := m.mode(s, ino)
		had, has := w.table.Grant(s, ino, mode)
		w.equal("before", had, before)
		w.equal("after", has, m.grant(s, ino, mode))
	case n < 45:
		w.what = fmt.Sprintf("session %d recalls inode %d down to %v", s, ino, keep)
		w.ask(s, ino, keep, 0, true)
	case n < 52:
		w.what = fmt.Sprintf("the owner asks for inode %d down to %v within %v", ino, keep, within)
		w.ask(0, ino, keep, within, false)
	case n < 72:
		number := m.last - uint64(w.rng.IntN(2)) // the answer may be late
		if r := m.round(ino); r != nil && w.rng.IntN(4) > 0 {
			number = r.number
		}
		holdsOn := w.rng.IntN(3) == 0
		w.what = fmt.Sprintf("session %d answers round %d about inode %d, holds on: %v", s, number, ino, holdsOn)
		w.equal("it counts", w.table.Answer(w.now, s, ino, number, holdsOn), m.answer(w.now, s, ino, number, holdsOn))
	case n < 78:
		w.what = fmt.Sprintf("session %d drops inode %d", s, ino)
		w.table.Drop(s, ino)
		m.drop(s, ino)
	case n < 80:
		w.what = fmt.Sprintf("session %d ends, but for inode %d", s, ino)
		w.table.DropAll(s, ino)
		m.dropAll(s, ino)
	case n < 84:
		w.what = fmt.Sprintf("operation %d blocks inode %d", k, ino)
		w.table.Block(&w.blockers[k], ino)
		if b := (modelBlock{k, ino}); !slices.Contains(m.blocks, b) {
			m.blocks = append(m.blocks, b)
		}
	case n < 87:
		w.what = fmt.Sprintf("operation %d runs", k)
		w.table.Unblock(&w.blockers[k])
		m.blocks = slices.DeleteFunc(m.blocks, func(b modelBlock) bool { return b.by == k })
	case n < 89:
		w.what = fmt.Sprintf("operation %d may lease inode %d", k, ino)
		w.table.UnblockInode(&w.blockers[k], ino)
		m.blocks = slices.DeleteFunc(m.blocks, func(b modelBlock) bool { return b == modelBlock{k, ino} })
	case n < 93:
		w.what = fmt.Sprintf("session %d puts in what it has of inode %d", s, ino)
		yes, send := w.table.PutIn(s, ino)
		var to []int
		r := m.round(ino)
		may := r != nil && r.pending[s] && r.keep == meta.LeaseNone && r.within == 0
		if may {
			for _, other := range m.inWay(s, ino, meta.LeaseNone) {
				if !r.pending[other] {
					r.pending[other] = true
					to = append(to, other)
				}
			}
		}
		w.equal("it may", yes, may)
		w.equal("asked, too", recipients(send), to)
	case n < 95:
		w.what = "the barrier goes up or down"
		if m.barrier = !m.barrier; m.barrier {
			m.barrierSince, m.refusedSince = m.last, map[meta.Ino]bool{}
			w.table.RaiseBarrier()
		} else {
			w.table.LowerBarrier()
		}
	case n < 97:
		w.what = fmt.Sprintf("writers are asked; session %d is away", s)
		w.askWriters(s, within)
	case n < 98:
		by := time.Duration(w.rng.IntN(20)) * time.Second
		w.what = fmt.Sprintf("%v do not count", by)
		w.table.Extend(by)
		for i := range m.rounds {
			m.rounds[i].since = m.rounds[i].since.Add(by)
		}
	case n < 99:
		w.what = "all is recalled"
		over, send := w.table.RecallAll(w.now)
		waits, to := 0, []int(nil)
		for i := range modelInodes {
			wait, some := m.ask(w.now, 0, meta.Ino(1+i), meta.LeaseNone, 0, true)
			to = append(to, some...)
			if wait {
				waits++
			}
		}
		w.equal("waits", len(over), waits)
		w.equal("asked", recipients(send), sorted(to))
	default:
		// The session that fills a mirror's target has leases of its own tree. The session has
		// none when the filling begins.
		w.what = fmt.Sprintf("session %d sees the live tree, which is a mirror's", s)
		if len(m.live) > 0 {
			if len(m.holders) == 0 {
				w.table.OneTree()
				clear(m.live)
			}
			return
		}
		w.table.DropAll(s)
		m.dropAll(s, 0)
		w.table.EnterLiveTree(s)
		m.live[s] = true
	}
}

func (w *world) askWriters(away int, within time.Duration) {
	m := w.model
	var to []int
	waits := 0
	for i := range modelInodes {
		ino := meta.Ino(1 + i)
		if !m.exclusive(ino) || m.barrier && m.refusedSince[ino] {
			continue
		}
		wait, some := m.ask(w.now, 0, ino, meta.LeaseShared, within, false)
		to = append(to, some...)
		if wait && m.mode(away, ino) != meta.LeaseExclusive {
			waits++
		}
	}
	over, send := w.table.AskWriters(w.now, within, func(s int) bool { return s == away })
	w.equal("asked", recipients(send), sorted(to))
	w.equal("waits", len(over), waits)
}

// compare compares all answers of the table and the model.
func (w *world) compare() {
	t, m := w.table, w.model
	if err := t.Check(); err != nil {
		w.t.Fatalf("%s: %v", w.what, err)
	}
	for i := range modelInodes {
		ino := meta.Ino(1 + i)
		var holders []int
		for i := range modelSessions {
			s := 1 + i
			w.equal("mode", t.Mode(s, ino), m.mode(s, ino))
			h := m.holder(s, ino)
			if h != nil {
				holders = append(holders, s)
			}
			w.equal("was exclusive", t.WasExclusive(s, ino), h != nil && h.wasExclusive)
			w.equal("exclusive elsewhere", t.ExclusiveElsewhere(s, ino), len(m.inWay(s, ino, meta.LeaseShared)) > 0)
			// The promise of the table: no session reads beside a writer of the same tree.
			if m.mode(s, ino) == meta.LeaseExclusive && len(m.inWay(s, ino, meta.LeaseNone)) > 0 {
				w.t.Fatalf("%s: of inode %d session %d has an exclusive lease, and others have leases", w.what, ino, s)
			}
		}
		w.equal("holders", sorted(t.Holders(ino)), holders)
		w.equal("exclusive", t.HeldExclusively(ino), m.exclusive(ino))
		at, refused := m.refused[ino]
		refused = refused && w.now.Sub(at) < modelRest
		w.equal("refused", t.Refused(w.now, ino), refused)
		w.equal("out of reach", t.OutOfReach(w.now, ino, func(s int) bool { return s == 1 }), refused || m.mode(1, ino) > meta.LeaseNone)
		for k := range w.blockers {
			blocked := slices.ContainsFunc(m.blocks, func(b modelBlock) bool { return b.ino == ino })
			own := slices.Contains(m.blocks, modelBlock{k, ino})
			ch := t.Blocked(&w.blockers[k], ino)
			w.equal("blocked", ch != nil, blocked && !own)
			if ch != nil {
				w.blocks[ino] = ch
			}
		}
		if ch := w.blocks[ino]; ch != nil {
			over := !slices.ContainsFunc(m.blocks, func(b modelBlock) bool { return b.ino == ino })
			w.equal("unblocked", isClosed(ch), over)
			if over {
				delete(w.blocks, ino)
			}
		}
	}
	var stubborn, inTheWay []int
	open := map[uint64]bool{}
	for _, r := range m.rounds {
		open[r.number] = true
		for s := range r.pending {
			if r.since.Before(w.now.Add(-10 * time.Second)) {
				stubborn = append(stubborn, s)
			}
			if r.awaited {
				inTheWay = append(inTheWay, s)
			}
		}
	}
	w.equal("stubborn", sorted(t.Stubborn(w.now.Add(-10*time.Second))), sorted(stubborn))
	w.equal("in the way", sorted(t.InTheWay()), sorted(inTheWay))
	for number, ch := range w.rounds {
		w.equal(fmt.Sprintf("round %d is over", number), isClosed(ch), !open[number])
		if !open[number] {
			delete(w.rounds, number)
		}
	}
	for i := range modelSessions {
		s := 1 + i
		count := m.count(s)
		w.equal("count", t.Count(s), count)
		w.equal("alone", t.Alone(s), count == len(m.holders))
		var again []uint64
		for _, r := range m.rounds {
			if r.pending[s] {
				again = append(again, r.number)
			}
		}
		var got []uint64
		for _, x := range t.Unanswered(s) {
			got = append(got, x.Round)
		}
		w.equal("asked again in rounds", got, sorted(again))
	}
}

// TestAgainstModel does thousands of random steps in a table and in the model, and compares all
// answers after each step.
func TestAgainstModel(t *testing.T) {
	for seed := range uint64(10) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			w := &world{
				t: t, rng: rand.New(rand.NewPCG(seed, 16)), table: New[int](Config{RefusalRest: modelRest}), now: time.Unix(1_700_000_000, 0),
				model: &model{refused: map[meta.Ino]time.Time{}, live: map[int]bool{}}, blockers: make([]Blocker, 3),
				rounds: map[uint64]<-chan struct{}{}, blocks: map[meta.Ino]<-chan struct{}{},
			}
			for range 2000 {
				w.now = w.now.Add(time.Duration(w.rng.IntN(2000)) * time.Millisecond)
				w.step()
				w.compare()
			}
		})
	}
}

// TestRepeats: the same calls give the same answers and messages in the same order.
func TestRepeats(t *testing.T) {
	run := func() (log []string) {
		rng := rand.New(rand.NewPCG(7, 7))
		table := New[int](Config{})
		note := func(a ...any) { log = append(log, fmt.Sprint(a...)) }
		now := time.Unix(1, 0)
		for range 2000 {
			s, ino := 1+rng.IntN(20), meta.Ino(rng.IntN(50))
			switch rng.IntN(12) {
			case 0:
				_, send := table.RecallAll(now)
				note(send)
			case 1:
				_, send := table.AskWriters(now, time.Second, func(int) bool { return false })
				note(send, table.Stubborn(now.Add(1)), table.InTheWay(), table.Unanswered(s))
			case 2:
				table.DropAll(s)
			default:
				note(table.Grant(s, ino, meta.LeaseMode(rng.IntN(3))))
				note(table.Holders(ino))
			}
		}
		return log
	}
	first := run()
	for range 5 {
		if !slices.Equal(first, run()) {
			t.Fatal("the same calls gave other answers")
		}
	}
}
