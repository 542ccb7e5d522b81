package kafka

import (
	"github.com/twmb/franz-go/pkg/kmsg"

	"penstock.io/penstock/stream/group"
)

// stateName returns Kafka's name of a group's state.
func stateName(s group.State) string {
	switch s {
	case group.Empty:
		return "Empty"
	case group.Preparing:
		return "PreparingRebalance"
	case group.Completing:
		return "CompletingRebalance"
	}
	return "Stable"
}

// describeGroups tells the states and members of groups.
func (s *Server) describeGroups(r *request, q *kmsg.DescribeGroupsRequest) *kmsg.DescribeGroupsResponse {
	p := q.ResponseKind().(*kmsg.DescribeGroupsResponse)
	for _, name := range q.Groups {
		pg := kmsg.NewDescribeGroupsResponseGroup()
		pg.Group, pg.State, pg.AuthorizedOperations = name, "Dead", noOperations
		g, code := s.group(r, name, false)
		if pg.ErrorCode = code; g != nil {
			g.describe(&pg)
		}
		p.Groups = append(p.Groups, pg)
	}
	return p
}

func (g *coordinated) describe(pg *kmsg.DescribeGroupsResponseGroup) {
	g.mu.Lock()
	defer g.mu.Unlock()
	pg.State, pg.ProtocolType, pg.Protocol = stateName(g.machine.State()), g.machine.Type(), g.machine.Protocol()
	for _, m := range g.machine.Members() {
		pm := kmsg.NewDescribeGroupsResponseGroupMember()
		pm.MemberID, pm.ProtocolMetadata, pm.MemberAssignment = m.ID, m.Metadata, g.machine.Assignment(m.ID)
		pm.ClientID, pm.ClientHost = g.clients[m.ID].id, g.clients[m.ID].host
		if m.Instance != "" {
			pm.InstanceID = &m.Instance
		}
		pg.Members = append(pg.Members, pm)
	}
}
