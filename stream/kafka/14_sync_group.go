package kafka

import (
	"github.com/twmb/franz-go/pkg/kmsg"

	"penstock.io/penstock/stream/group"
)

// syncGroup gives a member the assignment, which the group's leader brings.
func (s *Server) syncGroup(r *request, q *kmsg.SyncGroupRequest) *kmsg.SyncGroupResponse {
	p := q.ResponseKind().(*kmsg.SyncGroupResponse)
	p.ProtocolType, p.Protocol = q.ProtocolType, q.Protocol
	g, code := s.group(r, q.Group, false)
	if code != codeOK {
		p.ErrorCode = code
		return p
	}
	if g == nil {
		p.ErrorCode = s.unknown(r, q.Group, q.MemberID)
		return p
	}
	assignments := map[string][]byte{}
	for _, a := range q.GroupAssignment {
		assignments[a.MemberID] = a.MemberAssignment
	}
	a, ok := g.ask(r.ctx, func(ticket uint64) []group.Answer {
		return g.machine.Sync(now(), ticket, q.Generation, q.MemberID, deref(q.InstanceID), assignments)
	})
	if !ok {
		p.ErrorCode = codeRebalance
		return p
	}
	p.ErrorCode, p.MemberAssignment = g.codeFor(q.MemberID, a.Code), a.Assignment
	if a.Code == group.OK {
		g.mu.Lock()
		typ, protocol := g.machine.Type(), g.machine.Protocol()
		g.mu.Unlock()
		p.ProtocolType, p.Protocol = &typ, &protocol
	}
	return p
}
