package namespace

import (
	"slices"
	"testing"

	"penstock.io/penstock/meta"
)

// TestMirrorRecord: a target shows an existing snapshot, which then can't be deleted; a
// clone of the target is no target; fsck sees a damaged record.
func TestMirrorRecord(t *testing.T) {
	f := newFixture(t)
	shown := func(want meta.Generation) {
		t.Helper()
		if got, err := Mirror(f.s); err != nil || got != want {
			t.Fatalf("shown is %d, %v; it should be %d", got, err, want)
		}
		f.check()
	}
	a := meta.Generation(f.do(&meta.TakeSnapshot{Name: "a"}).Off)
	f.mkdir(1, "d")
	b := meta.Generation(f.do(&meta.TakeSnapshot{Name: "b"}).Off)
	shown(0)
	f.fails(meta.NoSuchSnapshot, &meta.SetMirror{Shown: b + 1})
	f.do(&meta.SetMirror{Shown: a})
	shown(a)
	f.fails(meta.Busy, &meta.DropSnapshot{At: a})
	f.do(&meta.SetMirror{Shown: b})
	shown(b)
	f.do(&meta.DropSnapshot{At: a})
	f.fails(meta.Busy, &meta.DropSnapshot{At: b})
	for _, bad := range [][]byte{{}, {mirrorV1}, appendMirror(nil, 0), appendMirror(nil, b+1), append(appendMirror(nil, b), 0), {9, 0, 0, 0, 1}} {
		f.s.t.ReplaceOrInsert(memItem{mirrorKey, bad})
		r, err := Check(f.s)
		if err != nil || len(r.Problems) == 0 {
			t.Errorf("%x: fsck sees nothing: %v", bad, err)
		}
	}
	f.s.t.ReplaceOrInsert(memItem{mirrorKey, appendMirror(nil, b)})
	f.do(&meta.SetMirror{})
	shown(0)
	f.do(&meta.DropSnapshot{At: b})
}

// TestDiffExact: the changes that a comparison omits and a copy needs.
func TestDiffExact(t *testing.T) {
	f := newFixture(t)
	d := f.mkdir(1, "d")
	file := f.create(d, "file", reg|0o644).Ino
	f.create(d, "other", reg|0o644)
	from := meta.Generation(f.do(&meta.TakeSnapshot{Name: "a"}).Off)
	f.do(&meta.SetAttr{Ino: d, Mask: meta.SetMtime, Mtime: 5})
	f.do(&meta.Link{Ino: file, Parent: 1, Name: "link"})
	has := func(l []meta.Change, c meta.Change) bool { return slices.Contains(l, c) }
	touched := meta.Change{Kind: meta.PathChanged, Path: "d", Ino: d, Type: meta.TypeDir}
	linked := meta.Change{Kind: meta.PathAdded, Path: "link", Ino: file, Type: meta.TypeRegular}
	l, err := Diff(f.s, from, 0)
	if err != nil || has(l, touched) || !has(l, linked) {
		t.Fatalf("%+v %v", l, err)
	}
	linked.From = "d/file"
	l, err = DiffExact(f.s, from, 0)
	if err != nil || !has(l, touched) || !has(l, linked) {
		t.Fatalf("%+v %v", l, err)
	}
}

func FuzzMirror(f *testing.F) {
	f.Add(appendMirror(nil, 1))
	f.Add(appendMirror(nil, 1<<32-1))
	f.Add([]byte{mirrorV1, 0, 0, 0, 0})
	f.Fuzz(func(t *testing.T, b []byte) {
		g, err := decodeMirror(b)
		if err != nil {
			if k := meta.KindOf(err); k != meta.Corrupt && k != meta.Version {
				t.Fatalf("kind %v", k)
			}
			return
		}
		if got := appendMirror(nil, g); string(got) != string(b) {
			t.Fatalf("%x became %x", b, got)
		}
	})
}
