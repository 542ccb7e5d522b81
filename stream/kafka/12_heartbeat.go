package kafka

import "github.com/twmb/franz-go/pkg/kmsg"

// heartbeat records a member's sign of life.
func (s *Server) heartbeat(r *request, q *kmsg.HeartbeatRequest) *kmsg.HeartbeatResponse {
	p := q.ResponseKind().(*kmsg.HeartbeatResponse)
	g, code := s.group(r, q.Group, false)
	if code != codeOK {
		p.ErrorCode = code
		return p
	}
	if g == nil {
		p.ErrorCode = s.unknown(r, q.Group, q.MemberID)
		return p
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	p.ErrorCode = g.codeFor(q.MemberID, g.machine.Heartbeat(now(), q.Generation, q.MemberID, deref(q.InstanceID)))
	g.deliverLocked(nil)
	return p
}
