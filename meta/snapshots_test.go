package meta

import "testing"

// TestNamed: of two snapshots with the same name, the readable snapshot is meant.
func TestNamed(t *testing.T) {
	l := SnapshotList{Snapshots: []SnapshotInfo{{Name: "a", State: SnapshotDeleting}, {Name: "b", State: SnapshotDeleting}, {Name: "a", State: SnapshotReady}, {Name: "c", State: SnapshotRolling}}}
	for name, want := range map[string]int{"a": 2, "b": -1, "c": 3, "": -1} {
		if got := l.Named(name); got != want {
			t.Errorf("%q is at %d, not %d", name, got, want)
		}
	}
}
