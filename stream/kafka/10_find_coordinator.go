package kafka

import "github.com/twmb/franz-go/pkg/kmsg"

// Types of coordinators.
const coordinatorOfGroups = 0

// findCoordinator names the gateway that coordinates a group.
func (s *Server) findCoordinator(r *request, q *kmsg.FindCoordinatorRequest) *kmsg.FindCoordinatorResponse {
	p := q.ResponseKind().(*kmsg.FindCoordinatorResponse)
	host, port := r.address()
	node, code := s.cfg.Node, codeOK
	var text *string
	if q.CoordinatorType != coordinatorOfGroups {
		why := errTransactions.Error()
		text = &why
		host, port, node, code = "", -1, -1, codeTransactionDenied
	}
	p.Host, p.Port, p.NodeID, p.ErrorCode, p.ErrorMessage = host, port, node, code, text
	for _, key := range q.CoordinatorKeys {
		c := kmsg.NewFindCoordinatorResponseCoordinator()
		c.Key, c.Host, c.Port, c.NodeID, c.ErrorCode, c.ErrorMessage = key, host, port, node, code, text
		p.Coordinators = append(p.Coordinators, c)
	}
	return p
}
