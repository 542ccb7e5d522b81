package client

import (
	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/wire"
)

// PolicyHandler is a Handler that keeps the policies of volumes.
type PolicyHandler interface {
	// PolicySet: from the return of this call on the client follows this policy. The owner
	// says so when the session enters the volume, and whenever a policy was set. It must
	// not block, and not call into the session.
	PolicySet(v meta.VolumeID, p meta.Policy)
}

// policy takes in the policy of a volume and tells the owner that it is followed.
func (s *Session) policy(c *conn, id uint64, m *wire.Policy) {
	s.mu.Lock()
	vs := s.volumes[m.Volume]
	here := vs != nil && vs.conn == c
	s.mu.Unlock()
	if !here {
		return // an owner of before; the present one says so when the session enters
	}
	if h, ok := s.cfg.Handler.(PolicyHandler); ok {
		h.PolicySet(m.Volume, m.Policy)
	}
	c.send.Enqueue(id, &wire.PolicyTaken{Volume: m.Volume})
	c.send.FlushSoon()
}
