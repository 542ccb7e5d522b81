package kafka

import (
	"errors"

	"github.com/twmb/franz-go/pkg/kmsg"

	"penstock.io/penstock/meta"
)

// Types of coordinators.
const coordinatorOfGroups = 0

// findCoordinator names the gateway that coordinates a group.
func (s *Server) findCoordinator(r *request, q *kmsg.FindCoordinatorRequest) *kmsg.FindCoordinatorResponse {
	p := q.ResponseKind().(*kmsg.FindCoordinatorResponse)
	find := func(group string) (b broker, code int16, text *string) {
		if q.CoordinatorType != coordinatorOfGroups {
			why := errTransactions.Error()
			return broker{id: -1, port: -1}, codeTransactionDenied, &why
		}
		b, ok := s.coordinatorOf(r, group)
		if !ok {
			return broker{id: -1, port: -1}, codeCoordinatorNotAvailable, nil
		}
		return b, codeOK, nil
	}
	if r.version < 4 {
		b, code, text := find(q.CoordinatorKey)
		p.Host, p.Port, p.NodeID, p.ErrorCode, p.ErrorMessage = b.host, b.port, b.id, code, text
	}
	for _, key := range q.CoordinatorKeys {
		c := kmsg.NewFindCoordinatorResponseCoordinator()
		b, code, text := find(key)
		c.Key, c.Host, c.Port, c.NodeID, c.ErrorCode, c.ErrorMessage = key, b.host, b.port, b.id, code, text
		p.Coordinators = append(p.Coordinators, c)
	}
	return p
}

// coordinatorOf returns the gateway that coordinates a group: this gateway, unless another one
// does.
func (s *Server) coordinatorOf(r *request, group string) (broker, bool) {
	h, err := s.cfg.Host(r.ctx)
	if err == nil {
		_, err = h.Coordinate(r.ctx, group)
	}
	if err == nil {
		return s.self(r), true
	}
	if !errors.Is(err, meta.NotOwner) {
		s.cfg.Logger.Warn("kafka: a group can't be coordinated; its members try again", "group", group, "error", err)
		return broker{}, false
	}
	g, err := h.Coordinator(r.ctx, group)
	if err != nil {
		return broker{}, false // the coordinator may have ended meanwhile: the client asks again
	}
	b, ok := brokerOf(g)
	return b, ok && b.id != s.cfg.Node
}
