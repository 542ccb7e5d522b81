package wire

import "penstock.io/penstock/meta"

// Growth asks the session with the exclusive lease on a file how long the file is. The session
// keeps its lease, and answers with GrowthRe, with the same id.
type Growth struct {
	Volume meta.VolumeID
	Ino    meta.Ino
}

func (*Growth) frameType() Type { return TGrowth }
func (m *Growth) fields(c *coder) {
	c.volume(&m.Volume)
	ino(c, &m.Ino)
}

// GrowthRe answers Growth.
type GrowthRe struct {
	Volume meta.VolumeID
	Ino    meta.Ino
	Growth meta.Growth
}

func (*GrowthRe) frameType() Type { return TGrowthRe }
func (m *GrowthRe) fields(c *coder) {
	c.volume(&m.Volume)
	ino(c, &m.Ino)
	c.bool(&m.Growth.OK)
	c.u64(&m.Growth.Size)
	c.time(&m.Growth.Mtime)
	c.time(&m.Growth.Ctime)
	c.u64(&m.Growth.Change)
}
