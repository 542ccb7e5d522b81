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

// Meets tells whether a chunk whose replicas lie on some servers is as the policy lets
// chunks begin: each where it wants data, and no fewer than its least number, in as many
// failure domains. A server that is not in the map is taken to be where it should be; one
// that has disks of other classes beside may have its replica on these.
func (m *Map) Meets(p *meta.Policy, on []meta.ServerID) bool {
	mixed := slices.ContainsFunc(on, func(id meta.ServerID) bool {
		i, ok := m.index(id)
		return ok && p.Class != "" && slices.ContainsFunc(m.servers[i].Disks, func(d Disk) bool { return d.Class != p.Class })
	})
	return !mixed && !m.Outside(p, on) && m.apart(p.Spread, on) >= int(p.Least())
}
