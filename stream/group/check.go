package group

import (
	"fmt"
	"slices"
)

// Consistent verifies the invariants of a group:
//
//   - the order of joining has every member once, and every static member is registered for its
//     instance;
//   - an empty group has no member and no leader, any other group has members, and the leader of a
//     Completing or Stable group is a member;
//   - requests wait for a generation only while the group is Preparing, and for assignments only
//     while the group is Completing;
//   - in a stable group every member has an assignment;
//   - a pending id is no member's id.
func (g *Group) Consistent() error {
	if len(g.order) != len(g.members) {
		return fmt.Errorf("%d members in order, %d in all", len(g.order), len(g.members))
	}
	static := 0
	for i, id := range g.order {
		m := g.members[id]
		switch {
		case m == nil || m.id != id || slices.Contains(g.order[:i], id):
			return fmt.Errorf("member %q is not one of the members, once", id)
		case m.join != 0 && g.state != Preparing:
			return fmt.Errorf("member %q waits for a generation in state %d", id, g.state)
		case m.sync != 0 && g.state != Completing:
			return fmt.Errorf("member %q waits for its assignment in state %d", id, g.state)
		case g.state == Stable && m.assignment == nil:
			return fmt.Errorf("member %q has no assignment in a stable group", id)
		case m.instance != "" && g.instances[m.instance] != id:
			return fmt.Errorf("instance %q is %q, not member %q", m.instance, g.instances[m.instance], id)
		}
		if m.instance != "" {
			static++
		}
		if _, ok := g.pending[id]; ok {
			return fmt.Errorf("member %q has an id that was only given out", id)
		}
	}
	if static != len(g.instances) {
		return fmt.Errorf("%d static members have %d instances", static, len(g.instances))
	}
	switch {
	case g.state == Empty && (len(g.members) > 0 || g.leader != ""):
		return fmt.Errorf("an empty group has %d members and leader %q", len(g.members), g.leader)
	case (g.state == Completing || g.state == Stable) && g.members[g.leader] == nil:
		return fmt.Errorf("leader %q is no member", g.leader)
	}
	return nil
}
