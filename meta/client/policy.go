package client

import (
	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/wire"
)

// PolicyHandler is a Handler that applies the policies of volumes.
type PolicyHandler interface {
	// PolicySet: the client follows policy p from the return of this call on. The owner sends
	// the policy when the session enters the volume, and after each change. PolicySet must not
	// block and must not call the session.
	PolicySet(v meta.VolumeID, p meta.Policy)
}

// policy applies a volume's policy and acknowledges the policy to the owner.
func (s *Session) policy(c *conn, id uint64, m *wire.Policy) {
	s.mu.Lock()
	vs := s.volumes[m.Volume]
	here := vs != nil && vs.conn == c
	s.mu.Unlock()
	if !here {
		return // c leads to a former owner; Entered of the present owner carries the policy
	}
	if h, ok := s.cfg.Handler.(PolicyHandler); ok {
		h.PolicySet(m.Volume, m.Policy)
	}
	c.send.Enqueue(id, &wire.PolicyTaken{Volume: m.Volume})
	c.send.FlushSoon()
}
