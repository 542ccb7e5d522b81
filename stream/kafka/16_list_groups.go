package kafka

import (
	"maps"
	"slices"

	"github.com/twmb/franz-go/pkg/kmsg"
)

// listGroups lists the groups with members or commits since the gateway began, except
// groups of other users.
func (s *Server) listGroups(r *request, q *kmsg.ListGroupsRequest) *kmsg.ListGroupsResponse {
	p := q.ResponseKind().(*kmsg.ListGroupsResponse)
	s.groups.mu.Lock()
	groups := maps.Clone(s.groups.groups)
	s.groups.mu.Unlock()
	for _, name := range slices.Sorted(maps.Keys(groups)) {
		g := groups[name]
		if !g.admit(r.as) {
			continue
		}
		g.mu.Lock()
		state, typ := stateName(g.machine.State()), g.machine.Type()
		g.mu.Unlock()
		if len(q.StatesFilter) > 0 && !slices.Contains(q.StatesFilter, state) {
			continue
		}
		pg := kmsg.NewListGroupsResponseGroup()
		pg.Group, pg.ProtocolType, pg.GroupState = name, typ, state
		p.Groups = append(p.Groups, pg)
	}
	return p
}
