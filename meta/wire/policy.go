package wire

import "penstock.io/penstock/meta"

// Policy tells a session in a volume which policy was set. The session answers with
// PolicyTaken, with the same id, once it follows that policy.
type Policy struct {
	Volume meta.VolumeID
	Policy meta.Policy
}

func (*Policy) frameType() Type   { return TPolicy }
func (m *Policy) fields(c *coder) { c.volume(&m.Volume); c.policy(&m.Policy) }

// PolicyTaken answers Policy.
type PolicyTaken struct{ Volume meta.VolumeID }

func (*PolicyTaken) frameType() Type   { return TPolicyTaken }
func (m *PolicyTaken) fields(c *coder) { c.volume(&m.Volume) }
