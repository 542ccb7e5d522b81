package kafka

import (
	"testing"

	"penstock.io/penstock/stream"
	"penstock.io/penstock/stream/group"
)

// TestForgetGroups: when a coordination ends, the waiting members of its groups hear at once of
// another coordinator, and the members of other groups hear nothing; a later epoch has a group
// without the members, with generations above the earlier generations.
func TestForgetGroups(t *testing.T) {
	var c coordinator
	c.init()
	defer c.close()
	join := func(g *coordinated, member string) chan group.Answer {
		answers := make(chan group.Answer, 1)
		ready := make(chan struct{})
		go func() {
			a, _ := g.ask(t.Context(), func(ticket uint64) []group.Answer {
				defer close(ready)
				return g.machine.Join(now(), ticket, group.JoinRequest{
					Member: member, NewID: member, Session: 60_000, Rebalance: 60_000, Type: "consumer", Protocols: []group.Protocol{{Name: "range"}}, Adopt: true,
				})
			})
			answers <- a
		}()
		<-ready
		return answers
	}
	moved, stays := c.find("moved", true, 7), c.find("stays", true, 8)
	// A pending member makes the others wait.
	for _, g := range []*coordinated{moved, stays} {
		g.mu.Lock()
		g.machine.Join(now(), 99, group.JoinRequest{NewID: "slow", Session: 60_000, Rebalance: 60_000, Type: "consumer", Protocols: []group.Protocol{{Name: "range"}}, KnownID: true})
		g.mu.Unlock()
	}
	in, out := join(moved, "a"), join(stays, "b")
	c.forget(func(of stream.Coordination) bool { return of.Group == "moved" })
	if a := <-in; a.Code != group.NotCoordinator || codeOfGroup(a.Code) != codeNotCoordinator {
		t.Errorf("a waiting member hears %+v", a)
	}
	select {
	case a := <-out:
		t.Errorf("a member of another group hears %+v", a)
	default:
	}
	if a, _ := moved.ask(t.Context(), nil); a.Code != group.NotCoordinator {
		t.Errorf("a member that comes late hears %+v", a)
	}
	if c.find("moved", false, 7) != nil {
		t.Error("the group is there still")
	}
	next := c.find("moved", true, 9)
	if next.machine.Generation() <= moved.machine.Generation() || !next.adopts("a") || next.adopts("") {
		t.Errorf("generation %d after %d", next.machine.Generation(), moved.machine.Generation())
	}
	c.forget(func(of stream.Coordination) bool { return of.Epoch <= 8 })
	if c.find("moved", false, 9) != next {
		t.Error("the end of an earlier epoch has ended the group")
	}
	<-out
}
