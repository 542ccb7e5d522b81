package peer

import "testing"

// Certificates say of which admission they are; lists refuse all of a name, or those
// of earlier ones.
func TestAdmissions(t *testing.T) {
	a := authority(t, "one")
	id := Identity{Cluster: "one", Role: Client, Name: "c", Admission: 2}
	c, _ := issue(t, a, id)
	if got := c.Identity(); got.Admission != 2 || got.String() != id.String() {
		t.Fatalf("%+v", got)
	}
	first := id
	first.Admission = 0
	c, _ = issue(t, a, first)
	if got := c.Identity(); got.Admission != 0 || got.Same(id) {
		t.Fatalf("%+v", got)
	}
	list := ParseWorthless([]string{"client/a", WorthlessBelow("client/c", 2), "client/d<nonsense"})
	for _, x := range []struct {
		id   Identity
		want bool
	}{
		{id, false}, {first, true},
		{Identity{Role: Client, Name: "a", Admission: 1 << 31}, true},
		{Identity{Role: Client, Name: "b"}, false}, {Identity{Role: Client, Name: "d"}, false},
		{Identity{Role: Admin, Name: "a"}, false}, {Identity{Local: true}, false},
	} {
		if list.Has(x.id) != x.want {
			t.Errorf("%+v is refused: %v", x.id, !x.want)
		}
	}
}
