package placement

import (
	"slices"

	"penstock.io/penstock/meta"
)

// Most returns the number of replicas of a new chunk if Choose picked servers now, none of the
// servers in avoid; 0 if Choose would refuse it.
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
	// A narrower spread may allow more replicas; hosts are the narrowest.
	return min(domains(meta.SpreadHost), int(max(p.Replicas, 1)))
}

// With returns the map with a server in another state.
func (m *Map) With(id meta.ServerID, state State) *Map {
	all := slices.Clone(m.servers)
	for i := range all {
		if all[i].ID == id {
			all[i].State = state
		}
	}
	return NewMap(all)
}

// Standing counts the replicas of an open chunk by state.
type Standing struct {
	Live int // good, and can be reached
	Away int // out of reach for now, and counted on
}

// Counted returns the number of existing replicas.
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

// ShortReason returns the reason for repairing a chunk with counted replicas of want wanted
// replicas; None if counted replicas suffice.
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

// Fuller reports whether the appending to an open chunk should end, because a new chunk would
// have more replicas, or replicas in more failure domains: the chunk was begun while servers
// were missing, or under another policy, and a server for a missing replica is available now.
// avoid has the servers out of the writer's reach.
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

// apart counts the failure domains of servers at a level. A server missing in the map counts as
// a separate domain.
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
