package kafka

import "github.com/twmb/franz-go/pkg/kmsg"

// heartbeat records a member's sign of life.
func (s *Server) heartbeat(_ *request, q *kmsg.HeartbeatRequest) *kmsg.HeartbeatResponse {
	p := q.ResponseKind().(*kmsg.HeartbeatResponse)
	g := s.groups.find(q.Group, false)
	if g == nil {
		p.ErrorCode = codeUnknownMember
		return p
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	p.ErrorCode = codeOfGroup(g.machine.Heartbeat(now(), q.Generation, q.MemberID, deref(q.InstanceID)))
	g.deliverLocked(nil)
	return p
}
