package kafka

import "github.com/twmb/franz-go/pkg/kmsg"

// leaveGroup removes members from a group.
func (s *Server) leaveGroup(r *request, q *kmsg.LeaveGroupRequest) *kmsg.LeaveGroupResponse {
	p := q.ResponseKind().(*kmsg.LeaveGroupResponse)
	g, no := s.group(r, q.Group, false)
	if no != codeOK {
		p.ErrorCode = no
		return p
	}
	leave := func(id, instance string) int16 {
		if g == nil {
			return codeUnknownMember
		}
		g.mu.Lock()
		defer g.mu.Unlock()
		code, answers := g.machine.Leave(now(), id, instance)
		g.deliverLocked(answers)
		return codeOfGroup(code)
	}
	if r.version < 3 {
		p.ErrorCode = leave(q.MemberID, "")
		return p
	}
	for _, m := range q.Members {
		pm := kmsg.NewLeaveGroupResponseMember()
		pm.MemberID, pm.InstanceID, pm.ErrorCode = m.MemberID, m.InstanceID, leave(m.MemberID, deref(m.InstanceID))
		p.Members = append(p.Members, pm)
	}
	return p
}
