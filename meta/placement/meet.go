package placement

import (
	"slices"

	"penstock.io/penstock/meta"
)

// domainsOf names the failure domains of a spread, for people.
func domainsOf(s meta.Spread) string {
	switch s {
	case meta.SpreadRack:
		return "racks"
	case meta.SpreadDC:
		return "data centres"
	}
	return "hosts"
}

// Meets reports whether a chunk with replicas on some servers meets the policy's conditions
// for a new chunk: each server is where the policy wants data, and they are at least its least
// number, in as many failure domains. A server missing in the map is assumed to be in the
// right place. A server that also has disks of other classes may have its replica on those.
func (m *Map) Meets(p *meta.Policy, on []meta.ServerID) bool {
	mixed := slices.ContainsFunc(on, func(id meta.ServerID) bool {
		i, ok := m.index(id)
		return ok && p.Class != "" && slices.ContainsFunc(m.servers[i].Disks, func(d Disk) bool { return d.Class != p.Class })
	})
	return !mixed && !m.Outside(p, on) && m.apart(p.Spread, on) >= int(p.Least())
}
