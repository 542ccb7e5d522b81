package server

import (
	"testing"

	"penstock.io/penstock/meta"
)

// A list of snapshots tells the bytes that the snapshots alone hold as `snapshot usage` counts
// the bytes: after a rollback the volume has the bytes of the snapshot again, in extents of its
// own, and the snapshot alone holds nothing.
func TestListedHoldIsExactAfterRollback(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	chunks := s.chunkServer(1)
	a := s.dial("a")
	ino, g := a.create(t, "f").Attr.Ino, a.alloc(t, false)
	const size = 4 << 20
	chunks.has(g.ID, size, size)
	a.do(t, &meta.Write{Ino: ino, Extents: []meta.Extent{{Len: size, Chunk: g.ID}}, Synced: true}, meta.LeaseNone)
	a.snapshot(t, "one")
	listed := func(when string, want uint64) {
		t.Helper()
		l, err := a.CountedSnapshots(t.Context(), 1)
		if err != nil {
			t.Fatal(err)
		}
		if u := a.use(t); !l.Counted || l.Held != want || u.Alone != want {
			t.Errorf("DATA: %s: the list says that snapshots hold %d bytes (counted: %v), the count %d; it is %d", when, l.Held, l.Counted, u.Alone, want)
		}
	}
	listed("nothing changed", 0)
	a.do(t, &meta.SetAttr{Ino: ino, Mask: meta.SetSize}, meta.LeaseNone)
	listed("the file was cut off", size)
	if err := a.RollBack(t.Context(), 1, "one", true); err != nil {
		t.Fatal(err)
	}
	if held := a.snapshots(t).Held; held != size {
		t.Errorf("superseded extents are %d bytes: this tests nothing", held)
	}
	listed("rolled back", 0)
}
