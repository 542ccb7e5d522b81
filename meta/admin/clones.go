package admin

import "penstock.io/penstock/meta"

// Info translates a clone to package meta.
func (x *Clone) Info() (i meta.CloneInfo) {
	Hear(&i, x)
	return i
}

// List translates clones to package meta.
func (x *ListClonesResponse) List() []meta.CloneInfo {
	l := []meta.CloneInfo{}
	for _, c := range x.GetClones() {
		l = append(l, c.Info())
	}
	return l
}

// Status translates the progress of a promotion to package meta.
func (x *Promotion) Status() (st meta.PromoteStatus) {
	Hear(&st, x)
	return st
}
