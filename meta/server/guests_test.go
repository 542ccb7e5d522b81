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
	v := reflect.ValueOf(o).Elem()
	places := map[reflect.Type]uintptr{reflect.TypeFor[owner](): reflect.ValueOf(o).Pointer()}
	for i := range v.NumField() {
		switch f := v.Field(i); f.Kind() {
		case reflect.Struct:
			places[f.Type()] = f.UnsafeAddr()
		case reflect.Pointer:
			places[f.Type().Elem()] = f.Pointer()
		}
	}
	guests, peers := 0, 0
	for i := range v.NumField() {
		g := reflect.Indirect(v.Field(i))
		if g.Kind() != reflect.Struct || g.Type() == reflect.TypeFor[kernel]() || g.Type().PkgPath() != v.Type().PkgPath() {
			continue
		}
		before := peers
		for j := range g.NumField() {
			f, name := g.Field(j), g.Type().Field(j).Name
			if f.Kind() != reflect.Pointer || places[f.Type().Elem()] == 0 {
				continue
			}
			if peers++; f.Pointer() != places[f.Type().Elem()] {
				t.Errorf("%s.%s is not the owner's %s", g.Type().Name(), name, f.Type().Elem().Name())
			}
		}
		if peers > before {
			guests++
		}
	}
	if guests < 20 || peers < 60 {
		t.Errorf("%d guests with %d peers were found: the test looks in the wrong place", guests, peers)
	}
}
