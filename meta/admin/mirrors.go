package admin

import "penstock.io/penstock/meta"

// Record translates a mirror's record to package meta.
func (x *Mirror) Record() (m meta.Mirror) {
	Hear(&m, x)
	return m
}

// SayMirror translates a mirror's record to the API.
func SayMirror(m meta.Mirror) *Mirror {
	x := &Mirror{}
	Say(x, m)
	return x
}

// Records translates all records to package meta.
func (x *ListMirrorsResponse) Records() []meta.Mirror {
	all := make([]meta.Mirror, len(x.Mirrors))
	for i, m := range x.Mirrors {
		all[i] = m.Record()
	}
	return all
}
