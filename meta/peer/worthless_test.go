package peer

import (
	"slices"
	"testing"
)

// Certificates carry the number of their admission; lists refuse all certificates of a name, or
// the certificates of earlier admissions.
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
	list, malformed := ParseWorthless([]string{"client/a", WorthlessBelow("client/c", 2), "client/d<nonsense", "client/e<4294967296", "client/e<1", "<"})
	if want := []string{"client/d<nonsense", "client/e<4294967296", "<"}; !slices.Equal(malformed, want) {
		t.Errorf("malformed are %q, want %q", malformed, want)
	}
	for _, x := range []struct {
		id   Identity
		want bool
	}{
		{id, false}, {first, true},
		{Identity{Role: Client, Name: "a", Admission: 1 << 31}, true},
		{Identity{Role: Client, Name: "b"}, false}, {Identity{Role: Client, Name: "d"}, true},
		{Identity{Role: Client, Name: "e", Admission: 9}, true},
		{Identity{Role: Admin, Name: "a"}, false}, {Identity{Local: true}, false},
	} {
		if list.Has(x.id) != x.want {
			t.Errorf("%+v is refused: %v", x.id, !x.want)
		}
	}
}
