package wire

import "penstock.io/penstock/meta"

// Policy notifies a session in a volume of the volume's policy. The session answers with
// PolicyTaken, with the same id, once the session follows the policy.
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
