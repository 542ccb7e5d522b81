package placement

import (
	"errors"
	"fmt"
	"slices"
	"strings"

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

// Meetable refuses a policy if the servers of the map could not meet the policy even when all
// servers are connected and empty: no server is where the policy's data may lie, or the servers
// stand in fewer failure domains than the policy wants replicas. The policy's least number of
// replicas does not matter: the least number is for times when servers are missing. Errors:
// ResourceExceeded, with the servers and domains that exist.
func (m *Map) Meetable(p *meta.Policy) error {
	const op = "meet policy"
	below, ofClass := false, false
	classes, domains := map[string]bool{}, map[int32]bool{}
	for i := range m.servers {
		s := &m.servers[i]
		if Within(s.Topology, p.Topology) {
			below = true
		}
		for _, d := range s.Disks {
			if d.Class != "" {
				classes[d.Class] = true
			}
			ofClass = ofClass || d.Class == p.Class
		}
		if m.fits(i, p) {
			domains[m.domain[p.Spread][i]] = true
		}
	}
	var why string
	switch want := int(max(p.Replicas, 1)); {
	case !below:
		why = fmt.Sprintf("no chunk server stands below %s", p.Topology)
	case p.Class != "" && !ofClass:
		have := make([]string, 0, len(classes))
		for c := range classes {
			have = append(have, c)
		}
		slices.Sort(have)
		why = fmt.Sprintf("no chunk server has disks of class %s: there are %s", p.Class, strings.Join(have, ", "))
	case len(domains) == 0:
		why = fmt.Sprintf("no chunk server below %s has disks of class %s", p.Topology, p.Class)
	case len(domains) < want:
		why = fmt.Sprintf("it wants %d replicas on as many %s, and the chunk servers that qualify stand on %d", want, domainsOf(p.Spread), len(domains))
	default:
		return nil
	}
	return meta.E(op, meta.ResourceExceeded, "", errors.New(why))
}

// Meets reports whether a chunk with replicas on some servers meets the policy's conditions for
// a new chunk: each server is where the policy wants data, and the servers are at least the
// policy's least number, in as many failure domains. A server missing in the map is assumed to
// be in the right place. A server with disks of other classes, too, may have the replica on
// such a disk.
func (m *Map) Meets(p *meta.Policy, on []meta.ServerID) bool {
	mixed := slices.ContainsFunc(on, func(id meta.ServerID) bool {
		i, ok := m.index(id)
		return ok && p.Class != "" && slices.ContainsFunc(m.servers[i].Disks, func(d Disk) bool { return d.Class != p.Class })
	})
	return !mixed && !m.Outside(p, on) && m.apart(p.Spread, on) >= int(p.Least())
}
