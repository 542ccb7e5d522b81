package server

import (
	"reflect"
	"testing"
)

// TestGuestsKnowTheirPeers: each guest of an owner has the owner's kernel and the owner's other
// guests, and none has a peer that is missing or belongs to nobody. A guest without a peer
// would panic only at the moment of its rarest task.
func TestGuestsKnowTheirPeers(t *testing.T) {
	t.Parallel()
	o := &owner{leases: &leases{}}
	o.leases.k = &o.kernel
	o.lodge()
	if guests, peers := checkPeers(t, o); guests < 20 || peers < 60 {
		t.Errorf("%d guests with %d peers were found: the test looks in the wrong place", guests, peers)
	}
}

// TestPartsKnowTheirPeers: each part of a server has the server's other parts that the part
// names, for the same reason.
func TestPartsKnowTheirPeers(t *testing.T) {
	t.Parallel()
	s := &Server{api: &api{}, standbys: &standbys{}, repairs: newRepairs(), comparisons: newComparisons()}
	s.standbys.s, s.api.s = s, s
	s.furnish()
	if parts, peers := checkPeers(t, s); parts < 15 || peers < 60 {
		t.Errorf("%d parts with %d peers were found: the test looks in the wrong place", parts, peers)
	}
}

// checkPeers fails the test for each pointer in a part of whole, a pointer to a struct, that
// points to something of the type of whole or of one of its parts, and not to that itself. It
// returns the number of parts with peers, and the number of their peers.
func checkPeers(t *testing.T, whole any) (parts, peers int) {
	t.Helper()
	v := reflect.ValueOf(whole).Elem()
	places := map[reflect.Type]uintptr{v.Type(): reflect.ValueOf(whole).Pointer()}
	for i := range v.NumField() {
		switch f := v.Field(i); f.Kind() {
		case reflect.Struct:
			places[f.Type()] = f.UnsafeAddr()
		case reflect.Pointer:
			places[f.Type().Elem()] = f.Pointer()
		}
	}
	for i := range v.NumField() {
		g := reflect.Indirect(v.Field(i))
		if g.Kind() != reflect.Struct || v.Type().Field(i).Anonymous || g.Type().PkgPath() != v.Type().PkgPath() {
			continue
		}
		before := peers
		for j := range g.NumField() {
			f, name := g.Field(j), g.Type().Field(j).Name
			if f.Kind() != reflect.Pointer || places[f.Type().Elem()] == 0 {
				continue
			}
			if peers++; f.Pointer() != places[f.Type().Elem()] {
				t.Errorf("%s.%s is not the %s of the whole", g.Type().Name(), name, f.Type().Elem().Name())
			}
		}
		if peers > before {
			parts++
		}
	}
	return parts, peers
}
