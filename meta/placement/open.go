package placement

import (
	"slices"

	"penstock.io/penstock/meta"
)

// Most is the number of replicas that a new chunk would have now, on none of the servers
// to avoid; 0 if Choose would refuse it.
func (m *Map) Most(p *meta.Policy, avoid []meta.ServerID) int {
	l := m.pool(p, avoid)
	domains := func(level meta.Spread) int {
		seen := map[int32]bool{}
		for _, i := range l.idx {
			seen[m.domain[level][i]] = true
		}
		return len(seen)
	}
	if domains(p.Spread) < int(p.Least()) {
		return 0
	}
	// What a spread does not allow a narrower one may, and hosts are the narrowest.
	return min(domains(meta.SpreadHost), int(max(p.Replicas, 1)))
}

// With is the map with one server in another state.
func (m *Map) With(id meta.ServerID, state State) *Map {
	all := slices.Clone(m.servers)
	for i := range all {
		if all[i].ID == id {
			all[i].State = state
		}
	}
	return NewMap(all)
}

// Standing is how the replicas of a chunk stand that is still being appended to.
type Standing struct {
	Live int // good, and can be reached
	Away int // out of reach for now, and counted on
}

// Counted is the number of replicas that are somewhere.
func (s Standing) Counted() int { return s.Live + s.Away }

// Standing counts a chunk's replicas as Plan does.
func (m *Map) Standing(replicas []Replica) (s Standing) {
	for _, x := range replicas {
		i, ok := m.index(x.Server)
		switch {
		case !ok || m.servers[i].State == Gone || x.State == Bad:
		case m.servers[i].State == Away:
			s.Away++
		default:
			s.Live++
		}
	}
	return s
}

// ShortReason is what is wrong with a chunk that should have want replicas and has as
// many as count; None if they are enough.
func ShortReason(counted, want int) Reason {
	switch {
	case counted == 0:
		return Lost
	case counted >= want:
		return None
	case counted == 1:
		return Endangered
	}
	return UnderReplicate
}

// Fuller reports whether a chunk that is being appended to on some servers should end
// where it is, since a new one would have more replicas, or more of them in failure domains
// of their own: it was begun while servers were missing, or under another policy, and one
// that may have the missing replica is there. avoid are the servers that its writer can't
// reach.
func (m *Map) Fuller(p *meta.Policy, on, avoid []meta.ServerID) bool {
	want := int(max(p.Replicas, 1))
	apart := m.apart(p.Spread, on)
	if len(on) >= want && apart >= want {
		return false
	}
	avoid = slices.DeleteFunc(slices.Clone(avoid), func(id meta.ServerID) bool { return slices.Contains(on, id) })
	most := m.Most(p, avoid)
	if most == 0 {
		return false
	}
	var pool []meta.ServerID
	for _, i := range m.pool(p, avoid).idx {
		pool = append(pool, m.servers[i].ID)
	}
	return most > len(on) || most == len(on) && min(m.apart(p.Spread, pool), want) > apart
}

// apart counts the failure domains at a level that servers stand in; one that is not in
// the map stands in one of its own.
func (m *Map) apart(level meta.Spread, servers []meta.ServerID) (n int) {
	seen := map[int32]bool{}
	for _, id := range servers {
		if i, ok := m.index(id); !ok {
			n++
		} else {
			seen[m.domain[level][i]] = true
		}
	}
	return n + len(seen)
}
