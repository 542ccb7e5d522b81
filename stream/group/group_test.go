package group

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
)

var testConfig = Config{MinSession: 100, MaxSession: 10_000, InitialDelay: 0}

// story drives one group and keeps the answers by ticket.
type story struct {
	t      *testing.T
	g      *Group
	now    int64
	ticket uint64
	got    map[uint64]Answer
}

func newStory(t *testing.T, cfg Config) *story {
	return &story{t: t, g: New(cfg, 0), now: 1, got: map[uint64]Answer{}}
}

func (s *story) take(l []Answer) {
	s.t.Helper()
	for _, a := range l {
		if _, twice := s.got[a.Ticket]; twice || a.Ticket == 0 {
			s.t.Fatalf("ticket %d is answered twice: %+v", a.Ticket, a)
		}
		s.got[a.Ticket] = a
	}
	if err := s.g.Consistent(); err != nil {
		s.t.Fatal(err)
	}
}

func (s *story) join(id, instance, newID string, protocols ...string) uint64 {
	s.t.Helper()
	s.ticket++
	q := JoinRequest{Member: id, Instance: instance, NewID: newID, Session: 1000, Rebalance: 2000, Type: "consumer"}
	for _, p := range protocols {
		q.Protocols = append(q.Protocols, Protocol{Name: p, Metadata: []byte("topics")})
	}
	s.take(s.g.Join(s.now, s.ticket, q))
	return s.ticket
}

func (s *story) sync(generation int32, id string, assignments map[string][]byte) uint64 {
	s.t.Helper()
	s.ticket++
	instance := ""
	if m := s.g.members[id]; m != nil {
		instance = m.instance
	}
	s.take(s.g.Sync(s.now, s.ticket, generation, id, instance, assignments))
	return s.ticket
}

func (s *story) pass(ms int64) {
	s.t.Helper()
	for end := s.now + ms; ; {
		next := s.g.Deadline()
		if next == 0 || next > end {
			s.now = end
			return
		}
		s.now = max(s.now+1, next)
		s.take(s.g.Tick(s.now))
	}
}

func (s *story) answer(ticket uint64, code Code) Answer {
	s.t.Helper()
	a, ok := s.got[ticket]
	if !ok || a.Code != code {
		s.t.Fatalf("ticket %d: %+v (answered: %v), want code %d", ticket, a, ok, code)
	}
	return a
}

func (s *story) waits(ticket uint64) {
	s.t.Helper()
	if a, ok := s.got[ticket]; ok {
		s.t.Fatalf("ticket %d is answered: %+v", ticket, a)
	}
}

// two makes a stable group of members a (the leader) and b.
func two(t *testing.T) *story {
	s := newStory(t, testConfig)
	s.answer(s.join("", "", "a", "range"), OK)
	b := s.join("", "", "b", "range")
	s.waits(b)
	if code := s.g.Heartbeat(s.now, 1, "a", ""); code != RebalanceInProgress {
		t.Fatalf("the leader is not told to join again: %d", code)
	}
	a := s.join("a", "", "", "range")
	first := s.answer(a, OK)
	if first.Leader != "a" || len(first.Members) != 2 || first.Generation != 2 || s.answer(b, OK).Members != nil {
		t.Fatalf("%+v, %+v", first, s.got[b])
	}
	waiting := s.sync(2, "b", nil)
	s.waits(waiting)
	s.answer(s.sync(2, "a", map[string][]byte{"a": []byte("0"), "b": []byte("1")}), OK)
	if got := s.answer(waiting, OK).Assignment; string(got) != "1" {
		t.Fatalf("b is assigned %q", got)
	}
	return s
}

func TestTwoMembers(t *testing.T) {
	s := two(t)
	if s.g.State() != Stable || s.g.Heartbeat(s.now, 2, "b", "") != OK || s.g.Heartbeat(s.now, 1, "b", "") != IllegalGeneration || s.g.Heartbeat(s.now, 2, "c", "") != UnknownMember {
		t.Error("heartbeats of a stable group")
	}
	if s.g.MayCommit(s.now, 2, "a", "") != OK || s.g.MayCommit(s.now, 1, "a", "") != IllegalGeneration || s.g.MayCommit(s.now, -1, "", "") != UnknownMember {
		t.Error("commits in a stable group")
	}
}

func TestSilentMemberIsRemoved(t *testing.T) {
	s := two(t)
	for range 3 {
		s.pass(500)
		s.g.Heartbeat(s.now, 2, "a", "")
	}
	if code := s.g.Heartbeat(s.now, 2, "a", ""); code != RebalanceInProgress {
		t.Fatalf("after the end of b's session: %d", code)
	}
	if s.g.Heartbeat(s.now, 2, "b", "") != UnknownMember {
		t.Error("the silent member is still known")
	}
	if a := s.answer(s.join("a", "", "", "range"), OK); a.Generation != 3 || len(a.Members) != 1 {
		t.Errorf("%+v", a)
	}
}

func TestLeaverIsRemovedAtOnce(t *testing.T) {
	s := two(t)
	code, l := s.g.Leave(s.now, "a", "")
	s.take(l)
	if code != OK || s.g.Heartbeat(s.now, 2, "b", "") != RebalanceInProgress {
		t.Fatal("the group is not rebalanced")
	}
	if a := s.answer(s.join("b", "", "", "range"), OK); a.Leader != "b" {
		t.Errorf("%+v", a)
	}
	if code, _ := s.g.Leave(s.now, "a", ""); code != UnknownMember {
		t.Errorf("leaving twice: %d", code)
	}
}

func TestMemberThatDoesNotJoinAgainIsRemoved(t *testing.T) {
	s := two(t)
	c := s.join("", "", "c", "range")
	a := s.join("a", "", "", "range")
	s.waits(a)
	for range 4 {
		s.pass(500)
		s.g.Heartbeat(s.now, 2, "b", "") // alive, and never joins
	}
	s.pass(1)
	if got := s.answer(a, OK); len(got.Members) != 2 || s.answer(c, OK).Generation != 3 {
		t.Errorf("%+v", got)
	}
}

func TestLeaderThatDoesNotSyncIsRemoved(t *testing.T) {
	s := newStory(t, testConfig)
	s.join("", "", "a", "range")
	b := s.join("", "", "b", "range")
	s.join("a", "", "", "range")
	s.answer(b, OK)
	w := s.sync(2, "b", nil)
	for range 8 {
		s.pass(300)
		s.g.Heartbeat(s.now, 2, "a", "")
	}
	if a := s.answer(w, RebalanceInProgress); a.Member != "b" {
		t.Error(a)
	}
	if s.g.Heartbeat(s.now, 2, "a", "") != UnknownMember {
		t.Error("the leader is still a member")
	}
	if a := s.answer(s.join("b", "", "", "range"), OK); a.Leader != "b" {
		t.Errorf("%+v", a)
	}
}

func TestMemberIDComesFirst(t *testing.T) {
	s := newStory(t, testConfig)
	q := JoinRequest{NewID: "x", Session: 1000, Rebalance: 1000, Type: "consumer", Protocols: []Protocol{{Name: "range"}}, KnownID: true}
	s.take(s.g.Join(s.now, 1, q))
	if a := s.answer(1, MemberIDRequired); a.Member != "x" {
		t.Fatal(a)
	}
	q.Member = "x"
	s.take(s.g.Join(s.now, 2, q))
	s.answer(2, OK)
	q.Member, q.NewID = "", "y"
	s.take(s.g.Join(s.now, 3, q))
	s.pass(3000) // an unused id is forgotten, and delays no member
	q.Member = "y"
	s.take(s.g.Join(s.now, 4, q))
	s.answer(4, UnknownMember)
}

func TestStaticMemberComesBackWithItsAssignment(t *testing.T) {
	s := newStory(t, testConfig)
	s.answer(s.join("", "one", "a", "range"), OK)
	s.answer(s.sync(1, "a", map[string][]byte{"a": []byte("all")}), OK)
	again := s.answer(s.join("", "one", "b", "range"), OK)
	if again.Generation != 1 || again.Member != "b" || !again.SkipAssignment || s.g.State() != Stable {
		t.Fatalf("%+v", again)
	}
	if got := s.answer(s.sync(1, "b", nil), OK); string(got.Assignment) != "all" {
		t.Errorf("assigned %q", got.Assignment)
	}
	if s.g.Heartbeat(s.now, 1, "a", "one") != FencedInstance || s.g.MayCommit(s.now, 1, "a", "one") != FencedInstance {
		t.Error("the incarnation before is not fenced")
	}
	s.answer(s.join("a", "one", "", "range"), FencedInstance)
	if code, l := s.g.Leave(s.now, "", "one"); code != OK || l != nil || s.g.State() != Empty {
		t.Error("leaving by instance", code, s.g.State())
	}
}

func TestProtocolsMustMeet(t *testing.T) {
	s := two(t)
	s.answer(s.join("", "", "c", "sticky"), InconsistentProtocol)
	if s.g.State() != Stable {
		t.Error("a refused member disturbs the group")
	}
	s.ticket++
	s.take(s.g.Join(s.now, s.ticket, JoinRequest{NewID: "d", Session: 1000, Rebalance: 1, Type: "connect", Protocols: []Protocol{{Name: "range"}}}))
	s.answer(s.ticket, InconsistentProtocol)
	s.ticket++
	s.take(s.g.Join(s.now, s.ticket, JoinRequest{NewID: "d", Session: 1, Rebalance: 1, Type: "consumer", Protocols: []Protocol{{Name: "range"}}}))
	s.answer(s.ticket, InvalidSessionTimeout)
}

func TestProtocolOfTheMost(t *testing.T) {
	s := newStory(t, Config{MinSession: 1, MaxSession: 1 << 20, InitialDelay: 100})
	var l []uint64
	for i, p := range []string{"sticky range", "range sticky", "sticky range", "range"} {
		l = append(l, s.join("", "", fmt.Sprint("m", i), strings.Fields(p)...))
	}
	s.pass(200)
	for _, ticket := range l {
		if a := s.answer(ticket, OK); a.Protocol != "range" || a.Generation != 1 {
			t.Errorf("%+v", a)
		}
	}
}

func TestFirstMembersAreGathered(t *testing.T) {
	s := newStory(t, Config{MinSession: 1, MaxSession: 1 << 20, InitialDelay: 100})
	a := s.join("", "", "a", "range")
	s.pass(60)
	b := s.join("", "", "b", "range")
	s.pass(60)
	s.waits(a)
	s.pass(60)
	if s.answer(a, OK).Generation != 1 || s.answer(b, OK).Generation != 1 {
		t.Error("not in one generation")
	}
}

func TestGroupIsFull(t *testing.T) {
	s := newStory(t, Config{MinSession: 1, MaxSession: 1 << 20, MaxMembers: 1})
	s.answer(s.join("", "", "a", "range"), OK)
	s.answer(s.join("", "", "b", "range"), GroupMaxSize)
}

// consumer is a client of the model: the client follows the protocol, and may lose requests,
// answers, and its life.
type consumer struct {
	instance   string
	id         string
	generation int32
	ticket     uint64 // under way; 0: none
	wants      string // join, sync or beat
	part       string // the client's partitions by its own belief
	owned      int32  // in that generation
	next       int64
	dead       bool
	leads      []Member
	protocols  []Protocol
}

// TestRandomGroups drives groups with clients that follow the protocol, lose answers, stand
// still and die. At every moment no two clients own the same partition in one generation, and
// no generation comes twice. When the faults end, all clients that live share all partitions.
func TestRandomGroups(t *testing.T) {
	for seed := range uint64(300) {
		r := rand.New(rand.NewPCG(seed, 21))
		cfg := Config{MinSession: 1, MaxSession: 1 << 20, InitialDelay: int64(r.IntN(2) * 30)}
		g := New(cfg, 7)
		now := int64(1)
		ids, ticket := 0, uint64(0)
		var all []*consumer
		waiting := map[uint64]*consumer{} // whose answer is wanted
		open := map[uint64]bool{}         // tickets without an answer
		started := map[int32]string{}     // the assignments of each generation
		trace := []string{}
		fail := func(format string, args ...any) {
			t.Helper()
			t.Fatalf("seed %d at %d: %s\n%s", seed, now, fmt.Sprintf(format, args...), strings.Join(trace[max(0, len(trace)-30):], "\n"))
		}
		take := func(l []Answer, lossy bool) {
			t.Helper()
			for _, a := range l {
				if !open[a.Ticket] {
					fail("ticket %d is answered twice, or was never given: %+v", a.Ticket, a)
				}
				delete(open, a.Ticket)
				trace = append(trace, fmt.Sprintf("%d: answer %+v", now, a))
				c := waiting[a.Ticket]
				delete(waiting, a.Ticket)
				if c == nil || c.dead || c.ticket != a.Ticket || lossy && r.IntN(10) == 0 {
					continue // lost; the client asks again
				}
				c.ticket, c.next = 0, now
				switch {
				case a.Code == MemberIDRequired:
					c.id = a.Member
				case a.Code == UnknownMember || a.Code == FencedInstance:
					c.id, c.generation, c.wants = "", -1, "join"
				case a.Code == RebalanceInProgress || a.Code == IllegalGeneration:
					c.wants = "join"
				case a.Code != OK:
					fail("unexpected answer %+v", a)
				case c.wants == "join":
					c.id, c.generation, c.wants, c.leads = a.Member, a.Generation, "sync", nil
					if a.Leader == a.Member && !a.SkipAssignment {
						c.leads = a.Members
					}
				case c.wants == "sync":
					c.part, c.owned, c.wants = string(a.Assignment), c.generation, "beat"
				}
			}
			if err := g.Consistent(); err != nil {
				fail("%v", err)
			}
		}
		const partitions = 5
		step := func(lossy bool) {
			if d := g.Deadline(); d > 0 && d <= now {
				take(g.Tick(now), lossy)
			}
			for _, c := range all {
				if c.dead || c.next > now || c.ticket != 0 {
					if c.ticket != 0 && !c.dead && c.next+400 < now { // no answer: again
						c.ticket, c.next = 0, now
					}
					continue
				}
				ticket++
				c.next = now
				before := g.Generation()
				switch c.wants {
				case "join":
					ids++
					c.ticket = ticket
					waiting[ticket], open[ticket] = c, true
					trace = append(trace, fmt.Sprintf("%d: join %q %q ticket %d", now, c.id, c.instance, ticket))
					take(g.Join(now, ticket, JoinRequest{Member: c.id, Instance: c.instance, NewID: fmt.Sprint("id", ids), Session: 100, Rebalance: 150, Type: "consumer", Protocols: c.protocols, KnownID: r.IntN(2) == 0}), lossy)
				case "sync":
					c.ticket = ticket
					waiting[ticket], open[ticket] = c, true
					as := map[string][]byte{}
					if c.leads != nil {
						for p := range partitions {
							id := c.leads[p%len(c.leads)].ID
							as[id] = append(as[id], byte('0'+p))
						}
					}
					trace = append(trace, fmt.Sprintf("%d: sync %q generation %d ticket %d", now, c.id, c.generation, ticket))
					was := g.State()
					take(g.Sync(now, ticket, c.generation, c.id, c.instance, as), lossy)
					if was == Completing && g.State() == Stable {
						text := fmt.Sprint(as)
						if old, ok := started[g.Generation()]; ok && old != text {
							fail("generation %d has two assignments: %s, %s", g.Generation(), old, text)
						}
						started[g.Generation()] = text
					}
				default:
					c.next = now + 30
					switch g.Heartbeat(now, c.generation, c.id, c.instance) {
					case UnknownMember, FencedInstance:
						c.id, c.wants, c.part = "", "join", ""
						c.next = now
					case RebalanceInProgress, IllegalGeneration:
						c.wants, c.next = "join", now
					}
				}
				if g.Generation() < before {
					fail("generation %d after %d", g.Generation(), before)
				}
			}
			owner := map[string]*consumer{}
			for _, c := range all {
				if c.owned != g.Generation() || c.dead {
					continue
				}
				if code := g.MayCommit(now, c.owned, c.id, c.instance); code != OK || lossy && false {
					continue // the client can't commit, and owns nothing any more
				}
				for _, p := range c.part {
					if o := owner[string(p)]; o != nil && o != c {
						fail("partition %c has two owners in generation %d: %q and %q", p, g.Generation(), o.id, c.id)
					}
					owner[string(p)] = c
				}
			}
		}
		for range 1500 {
			now += r.Int64N(20)
			switch k := r.IntN(60); {
			case k == 0 && len(all) < 8:
				c := &consumer{generation: -1, wants: "join", next: now, protocols: []Protocol{{Name: "range", Metadata: []byte("m")}}}
				if r.IntN(3) == 0 {
					c.instance = fmt.Sprint("static", r.IntN(3))
					all = slices.DeleteFunc(all, func(o *consumer) bool { return o.instance == c.instance }) // the last incarnation is gone
				}
				all = append(all, c)
			case k == 1 && len(all) > 0:
				all[r.IntN(len(all))].dead = true
			case k == 2 && len(all) > 0:
				all[r.IntN(len(all))].next = now + 50 + r.Int64N(200) // the client stands still
			case k == 3 && len(all) > 0:
				c := all[r.IntN(len(all))]
				if !c.dead && c.id != "" {
					_, l := g.Leave(now, c.id, c.instance)
					take(l, true)
					c.dead = true
				}
			}
			step(true)
		}
		for range 400 { // no more faults
			now += 10
			step(false)
		}
		live := map[string]bool{}
		got := ""
		for _, c := range all {
			if !c.dead {
				live[c.id] = true
				if g.State() != Stable || c.owned != g.Generation() {
					fail("member %q owns %q in generation %d; the group is in state %d, generation %d", c.id, c.part, c.owned, g.State(), g.Generation())
				}
				got += c.part
			}
		}
		if len(live) > 0 {
			parts := strings.Split(got, "")
			slices.Sort(parts)
			if strings.Join(parts, "") != "01234" {
				fail("partitions %q are owned", parts)
			}
		} else if g.State() != Empty {
			fail("without members the group is in state %d", g.State())
		}
		if len(g.Members()) != len(live) {
			fail("%d members of %d clients", len(g.Members()), len(live))
		}
		if len(started) < 3 && len(all) > 2 {
			fail("only %d generations had assignments", len(started))
		}
	}
}

// TestAdopt: a member of the time before the group was made joins by its id, static or not, if the
// caller says so, and is unknown otherwise.
func TestAdopt(t *testing.T) {
	join := func(g *Group, ticket uint64, member, instance string, adopt bool) []Answer {
		return g.Join(1000, ticket, JoinRequest{
			Member: member, Instance: instance, NewID: "new", Session: 10_000, Rebalance: 10_000, Type: "consumer",
			Protocols: []Protocol{{Name: "range"}}, KnownID: true, Adopt: adopt,
		})
	}
	g := New(Config{MinSession: 1, MaxSession: 60_000}, 41)
	for _, instance := range []string{"", "i"} {
		if l := join(g, 1, "old", instance, false); len(l) != 1 || l[0].Code != UnknownMember {
			t.Errorf("instance %q: %+v", instance, l)
		}
	}
	l := join(g, 2, "old", "", true)
	if len(l) != 1 || l[0].Code != OK || l[0].Member != "old" || l[0].Generation != 42 {
		t.Fatalf("%+v", l)
	}
	l = join(g, 3, "older", "i", true)
	l = append(l, join(g, 4, "old", "", false)...)
	if err := g.Consistent(); err != nil {
		t.Error(err)
	}
	codes := map[uint64]Code{}
	for _, a := range l {
		codes[a.Ticket] = a.Code
	}
	if len(g.Members()) != 2 || codes[3] != OK || codes[4] != OK {
		t.Errorf("%+v, members %+v", l, g.Members())
	}
}
