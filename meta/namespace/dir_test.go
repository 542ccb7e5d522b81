package namespace

import (
	"fmt"
	"runtime"
	"slices"
	"strings"
	"testing"

	"penstock.io/penstock/meta"
)

const (
	reg = meta.TypeRegular
	dir = meta.TypeDir
)

func TestCreateErrors(t *testing.T) {
	f := newFixture(t)
	file := f.file("file")
	f.mkdir(meta.RootIno, "dir")
	gone := f.mkdir(meta.RootIno, "gone")
	f.do(&meta.Unlink{Parent: meta.RootIno, Name: "gone", Dir: true})
	for _, c := range []struct {
		op   meta.Create
		want meta.Kind
	}{
		{meta.Create{Parent: 1, Name: "file", Mode: reg, Excl: true}, meta.Exists},
		{meta.Create{Parent: 1, Name: "file", Mode: reg}, 0},
		{meta.Create{Parent: 1, Name: "file", Mode: dir}, meta.Exists},
		{meta.Create{Parent: 1, Name: "dir", Mode: reg}, meta.Exists},
		{meta.Create{Parent: 1, Name: "dir", Mode: dir}, meta.Exists},
		{meta.Create{Parent: 1, Name: ".", Mode: dir}, meta.Exists},
		{meta.Create{Parent: 1, Name: "..", Mode: reg}, meta.Exists},
		{meta.Create{Parent: file, Name: "x", Mode: reg}, meta.NotDir},
		{meta.Create{Parent: 99, Name: "x", Mode: reg}, meta.NotFound},
		{meta.Create{Parent: gone, Name: "x", Mode: reg}, meta.NotFound},
		{meta.Create{Parent: 1, Name: "", Mode: reg}, meta.NotFound},
		{meta.Create{Parent: 1, Name: "a/b", Mode: reg}, meta.Invalid},
		{meta.Create{Parent: 1, Name: "a\x00b", Mode: reg}, meta.Invalid},
		{meta.Create{Parent: 1, Name: strings.Repeat("n", 255), Mode: reg}, 0},
		{meta.Create{Parent: 1, Name: strings.Repeat("n", 256), Mode: reg}, meta.NameTooLong},
		{meta.Create{Parent: file, Name: strings.Repeat("n", 256), Mode: reg}, meta.NotDir},
		{meta.Create{Parent: 1, Name: "l", Mode: meta.TypeSymlink, Target: strings.Repeat("t", 4095)}, 0},
		{meta.Create{Parent: 1, Name: "l2", Mode: meta.TypeSymlink, Target: strings.Repeat("t", 4096)}, meta.NameTooLong},
		{meta.Create{Parent: 1, Name: "l2", Mode: meta.TypeSymlink}, meta.NotFound},
		{meta.Create{Parent: 1, Name: "odd", Mode: 0o030000}, meta.Invalid},
		{meta.Create{Parent: 1, Name: "plain", Mode: 0o600}, 0},
		{meta.Create{Parent: 1, Name: "early", Mode: reg, Ino: file}, meta.Again},
	} {
		if _, err := f.try(&c.op); meta.KindOf(err) != c.want {
			t.Errorf("%.60s: %v, want %v", fmt.Sprintf("%+v", c.op), err, c.want)
		}
	}
}

func TestCreateSets(t *testing.T) {
	f := newFixture(t)
	now := f.now + 1
	a := f.do(&meta.Create{Parent: 1, Name: "f", Mode: reg | 0o7777, Umask: 0o027, UID: 5, GID: 6}).Attr
	want := meta.Attr{Ino: 2, Mode: reg | 0o7750, Nlink: 1, UID: 5, GID: 6, Atime: now, Mtime: now, Ctime: now, Btime: now, Change: 1}
	if a != want {
		t.Errorf("file\n got %+v\nwant %+v", a, want)
	}
	root := f.attr(1)
	if root.Mtime != now || root.Ctime != now || root.Atime == now || root.Nlink != 2 || root.Size != 1 {
		t.Errorf("the parent %+v", root)
	}
	d := f.do(&meta.Create{Parent: 1, Name: "d", Mode: dir | 0o777, Umask: 0o022, GID: 6})
	if d.Attr.Nlink != 2 || d.Attr.Mode != dir|0o755 || d.Attr.Parent != 1 || d.ParentAttr.Nlink != 3 {
		t.Errorf("directory %+v in %+v", d.Attr, d.ParentAttr)
	}
	if a := f.do(&meta.Create{Parent: 1, Name: "dev", Mode: meta.TypeChar | 0o600, Rdev: 0x103}).Attr; a.Rdev != 0x103 {
		t.Errorf("device %+v", a)
	}
	l := f.do(&meta.Create{Parent: 1, Name: "l", Mode: meta.TypeSymlink, Umask: 0o077, Target: "to/here"}).Attr
	if l.Mode != meta.TypeSymlink|0o777 || l.Size != 7 || string(f.do(&meta.ReadLink{Ino: l.Ino}).Data) != "to/here" {
		t.Errorf("link %+v", l)
	}
	f.fails(meta.Invalid, &meta.ReadLink{Ino: a.Ino})

	// New objects get the group of a set-group-id directory, and new directories also the
	// bit.
	f.do(&meta.SetAttr{Ino: d.Attr.Ino, Mask: meta.SetMode | meta.SetGID, Mode: 0o2755, GID: 77})
	if a := f.do(&meta.Create{Parent: d.Attr.Ino, Name: "f", Mode: reg | 0o644, GID: 6}).Attr; a.GID != 77 || a.Mode != reg|0o644 {
		t.Errorf("file in a setgid directory %+v", a)
	}
	if a := f.do(&meta.Create{Parent: d.Attr.Ino, Name: "d", Mode: dir | 0o755, GID: 6}).Attr; a.GID != 77 || a.Mode != dir|0o2755 {
		t.Errorf("directory in a setgid directory %+v", a)
	}
	if a := f.do(&meta.Tmpfile{Parent: d.Attr.Ino, Mode: 0o666, Umask: 0o022, GID: 6}).Attr; a.GID != 77 || a.Mode != reg|0o644 || a.Nlink != 0 {
		t.Errorf("temporary file in a setgid directory %+v", a)
	}
	// A replay gets the number that an early reply assigned.
	a = f.do(&meta.Create{Parent: 1, Name: "again", Mode: reg, Ino: 500, Time: 12345}).Attr
	if a.Ino != 500 || a.Btime != 12345 || a.Mtime != 12345 {
		t.Errorf("replayed %+v", a)
	}
	if next := f.file("next"); next != 501 {
		t.Errorf("inode %d after 500", next)
	}
}

func TestExistingIsResult(t *testing.T) {
	f := newFixture(t)
	ino := f.file("f")
	res := f.do(&meta.Create{Parent: 1, Name: "f", Mode: reg | 0o600})
	if !res.Existed || res.Attr.Ino != ino || res.Attr.Mode != reg|0o644 || len(f.last) != 0 {
		t.Fatalf("%+v, effects %d", res, len(f.last))
	}
}

func TestLookup(t *testing.T) {
	f := newFixture(t)
	d := f.mkdir(1, "d")
	sub := f.mkdir(d, "sub")
	file := f.create(d, "f", reg).Ino
	for _, c := range []struct {
		parent meta.Ino
		name   string
		want   meta.Ino
		kind   meta.Kind
	}{
		{1, "d", d, 0}, {d, ".", d, 0}, {d, "..", 1, 0}, {1, "..", 1, 0}, {sub, "..", d, 0}, {d, "f", file, 0},
		{d, "none", 0, meta.NotFound}, {file, "x", 0, meta.NotDir}, {99, "x", 0, meta.Stale}, {file, ".", 0, meta.NotDir},
		{d, strings.Repeat("n", 256), 0, meta.NameTooLong},
	} {
		res, err := f.try(&meta.Lookup{Parent: c.parent, Name: c.name})
		if meta.KindOf(err) != c.kind || err == nil && res.Attr.Ino != c.want {
			t.Errorf("%d %q: %v %v", c.parent, c.name, res, err)
		}
	}
}

func TestLink(t *testing.T) {
	f := newFixture(t)
	ino, d := f.file("f"), f.mkdir(1, "d")
	a := f.do(&meta.Link{Ino: ino, Parent: d, Name: "g"})
	if a.Attr.Nlink != 2 || a.Attr.Ctime != f.now || a.Attr.Mtime == f.now || a.ParentAttr.Mtime != f.now {
		t.Errorf("%+v", a)
	}
	f.fails(meta.Exists, &meta.Link{Ino: ino, Parent: d, Name: "g"})
	f.fails(meta.NotPermitted, &meta.Link{Ino: d, Parent: 1, Name: "h"})
	f.fails(meta.Exists, &meta.Link{Ino: d, Parent: 1, Name: "f"})
	f.fails(meta.Stale, &meta.Link{Ino: 99, Parent: 1, Name: "h"})
	f.fails(meta.NotFound, &meta.Link{Ino: ino, Parent: 99, Name: "h"})
	f.fails(meta.NotDir, &meta.Link{Ino: ino, Parent: ino, Name: "h"})
	f.fails(meta.NameTooLong, &meta.Link{Ino: ino, Parent: 1, Name: strings.Repeat("n", 256)})
	f.do(&meta.Unlink{Parent: 1, Name: "f"})
	f.do(&meta.Unlink{Parent: d, Name: "g"})
	f.fails(meta.NotFound, &meta.Link{Ino: ino, Parent: 1, Name: "back"})

	tmp := f.do(&meta.Tmpfile{Parent: 1, Mode: 0o600}).Attr.Ino
	f.session = otherSess // a link by any session ends the hold
	if a := f.do(&meta.Link{Ino: tmp, Parent: 1, Name: "tmp"}); a.Attr.Nlink != 1 {
		t.Errorf("linked temporary file %+v", a.Attr)
	}
	f.session = testSession
	f.do(&meta.ReleaseOrphans{Inos: []meta.Ino{tmp}})
	f.attr(tmp)
	f.do(&meta.Unlink{Parent: 1, Name: "tmp"})
	f.fails(meta.NotFound, &meta.Link{Ino: tmp, Parent: 1, Name: "tmp"})
}

func TestUnlinkAndRmdir(t *testing.T) {
	f := newFixture(t)
	file, d := f.file("f"), f.mkdir(1, "d")
	f.mkdir(d, "sub")
	for _, c := range []struct {
		op   meta.Unlink
		want meta.Kind
	}{
		{meta.Unlink{Parent: 1, Name: "none"}, meta.NotFound},
		{meta.Unlink{Parent: 1, Name: "d"}, meta.IsDir},
		{meta.Unlink{Parent: 1, Name: "f", Dir: true}, meta.NotDir},
		{meta.Unlink{Parent: 1, Name: "d", Dir: true}, meta.NotEmpty},
		{meta.Unlink{Parent: 1, Name: ".", Dir: true}, meta.Invalid},
		{meta.Unlink{Parent: 1, Name: "..", Dir: true}, meta.NotEmpty},
		{meta.Unlink{Parent: 1, Name: "."}, meta.IsDir},
		{meta.Unlink{Parent: file, Name: "x"}, meta.NotDir},
		{meta.Unlink{Parent: 99, Name: "x"}, meta.NotFound},
		{meta.Unlink{Parent: 1, Name: strings.Repeat("n", 256)}, meta.NameTooLong},
	} {
		if _, err := f.try(&c.op); meta.KindOf(err) != c.want {
			t.Errorf("%+v: %v, want %v", c.op, err, c.want)
		}
	}
	res := f.do(&meta.Unlink{Parent: d, Name: "sub", Dir: true})
	if res.Attr.Nlink != 0 || res.ParentAttr.Nlink != 2 || res.ParentAttr.Size != 0 || res.ParentAttr.Mtime != f.now {
		t.Errorf("rmdir %+v", res)
	}
	f.do(&meta.Unlink{Parent: 1, Name: "d", Dir: true, Holders: []meta.SessionID{otherSess}})
	f.attr(d) // still held
	f.fails(meta.NotFound, &meta.Lookup{Parent: d, Name: "sub"})
	f.do(&meta.ReleaseOrphans{Inos: []meta.Ino{d}})
	f.attr(d) // not by us
	f.session = otherSess
	f.do(&meta.ReleaseOrphans{Inos: []meta.Ino{d, d, 12345}})
	f.fails(meta.Stale, &meta.GetAttr{Ino: d})
}

func TestOrphanStaysUsable(t *testing.T) {
	f := newFixture(t)
	ino := f.file("f")
	f.do(&meta.Unlink{Parent: 1, Name: "f", Holders: []meta.SessionID{testSession, otherSess}})
	f.do(&meta.Write{Ino: ino, Inline: true, Data: []byte("still here")})
	f.do(&meta.SetAttr{Ino: ino, Mask: meta.SetMode, Mode: 0o600})
	if a := f.attr(ino); a.Size != 10 || a.Nlink != 0 || a.Mode != reg|0o600 {
		t.Errorf("%+v", a)
	}
	f.check()
	f.do(&meta.ReleaseOrphans{Inos: []meta.Ino{ino}})
	f.attr(ino)
	for !f.do(&meta.SessionEnd{Session: otherSess}).EOF {
	}
	f.fails(meta.Stale, &meta.GetAttr{Ino: ino})
}

// TestRename tries all combinations of source and target types.
func TestRename(t *testing.T) {
	setup := func(t *testing.T) (*fixture, map[string]meta.Ino) {
		f := newFixture(t)
		m := map[string]meta.Ino{"/": 1}
		m["a"] = f.mkdir(1, "a")
		m["a/b"] = f.mkdir(m["a"], "b")
		m["a/b/c"] = f.mkdir(m["a/b"], "c")
		m["empty"] = f.mkdir(1, "empty")
		m["f"] = f.file("f")
		m["g"] = f.file("g")
		f.do(&meta.Link{Ino: m["f"], Parent: 1, Name: "f2"})
		m["a/f"] = f.create(m["a"], "f", reg).Ino
		f.do(&meta.Junction{Parent: 1, Name: "vol", Volume: 9})
		return f, m
	}
	for _, c := range []struct {
		from, name, to, newName string
		flags                   uint32
		want                    meta.Kind
	}{
		{"/", "f", "/", "new", 0, 0},
		{"/", "f", "a", "new", 0, 0},
		{"/", "f", "/", "g", 0, 0},
		{"/", "f", "a", "f", 0, 0},
		{"/", "f", "/", "f", 0, 0},
		{"/", "f", "/", "f2", 0, 0},
		{"/", "f", "/", "f2", meta.RenameExchange, 0},
		{"/", "f", "/", "f2", meta.RenameNoReplace, meta.Exists},
		{"/", "f", "/", "empty", 0, meta.IsDir},
		{"/", "f", "/", "a", 0, meta.IsDir},
		{"/", "empty", "/", "f", 0, meta.NotDir},
		{"/", "empty", "/", "a", 0, meta.NotEmpty},
		{"/", "a", "/", "empty", 0, 0},
		{"/", "a", "/", "a", 0, 0},
		{"/", "a", "a", "x", 0, meta.Invalid},
		{"/", "a", "a/b/c", "x", 0, meta.Invalid},
		{"/", "a", "a", "b", 0, meta.Invalid},
		{"a/b", "c", "/", "a", 0, meta.NotEmpty},
		{"a", "f", "/", "a", 0, meta.NotEmpty},
		{"a/b", "c", "/", "a", meta.RenameExchange, meta.Invalid},
		{"/", "a", "a/b", "c", meta.RenameExchange, meta.Invalid},
		{"a/b", "c", "/", "top", 0, 0},
		{"a", "b", "/", "empty", 0, 0},
		{"a", "b", "empty", "b", 0, 0},
		{"/", "none", "/", "x", 0, meta.NotFound},
		{"/", "none", "/", "f", meta.RenameNoReplace, meta.NotFound},
		{"/", "f", "/", "none", meta.RenameExchange, meta.NotFound},
		{"/", "f", "/", "none", meta.RenameNoReplace, 0},
		{"/", "f", "/", "g", meta.RenameExchange, 0},
		{"/", "f", "a", "b", meta.RenameExchange, 0},
		{"a", "b", "/", "f", meta.RenameExchange, 0},
		{"a", "b", "/", "empty", meta.RenameExchange, 0},
		{"/", "f", "/", "g", 3, meta.Invalid},
		{"/", "f", "/", "g", 4, meta.Invalid},
		{"/", ".", "/", "g", 0, meta.Busy},
		{"/", "f", "/", "..", 0, meta.Busy},
		{"/", "f", "/", ".", meta.RenameNoReplace, meta.Exists},
		{"/", "vol", "/", "x", 0, meta.Busy},
		{"/", "empty", "/", "vol", 0, meta.Busy},
		{"/", "f", "f", "x", 0, meta.NotDir},
		{"f", "x", "/", "x", 0, meta.NotDir},
		{"/", "f", "/", strings.Repeat("n", 256), 0, meta.NameTooLong},
	} {
		t.Run(fmt.Sprintf("%s %s to %s %.9s flags %d", c.from, c.name, c.to, c.newName, c.flags), func(t *testing.T) {
			f, m := setup(t)
			_, err := f.try(&meta.Rename{Parent: m[c.from], Name: c.name, NewParent: m[c.to], NewName: c.newName, Flags: c.flags})
			if meta.KindOf(err) != c.want {
				t.Errorf("%v, want %v", err, c.want)
			}
		})
	}
}

func TestRenameSets(t *testing.T) {
	f := newFixture(t)
	a, b := f.mkdir(1, "a"), f.mkdir(1, "b")
	x := f.mkdir(a, "x")
	y := f.create(b, "y", reg).Ino
	res := f.do(&meta.Rename{Parent: a, Name: "x", NewParent: b, NewName: "y", Flags: meta.RenameExchange})
	if res.Attr.Ino != x || res.Attr.Parent != b || res.Attr.Ctime != f.now || res.Attr2.Ino != y || res.Attr2.Ctime != f.now || res.Attr2.Nlink != 1 {
		t.Errorf("exchange %+v", res)
	}
	if res.ParentAttr.Nlink != 2 || res.NewParentAttr.Nlink != 3 || res.ParentAttr.Mtime != f.now || res.NewParentAttr.Ctime != f.now {
		t.Errorf("parents %+v %+v", res.ParentAttr, res.NewParentAttr)
	}
	// A replaced directory is an orphan of the sessions that hold it.
	z := f.mkdir(a, "z")
	res = f.do(&meta.Rename{Parent: b, Name: "y", NewParent: a, NewName: "z", Holders: []meta.SessionID{otherSess}})
	if res.Attr2.Ino != z || res.Attr2.Nlink != 0 || res.NewParentAttr.Nlink != 3 || res.ParentAttr.Nlink != 2 {
		t.Errorf("replace %+v", res)
	}
	n := 0
	if err := Orphans(f.s, otherSess, func(ino meta.Ino) bool { n++; return ino == z }); err != nil || n != 1 {
		t.Errorf("%d orphans, %v", n, err)
	}
	// A rename between two names of one inode does nothing.
	i := f.file("i")
	f.do(&meta.Link{Ino: i, Parent: 1, Name: "j"})
	before := f.attr(i)
	f.do(&meta.Rename{Parent: 1, Name: "i", NewParent: 1, NewName: "j"})
	if f.attr(i) != before || len(f.last) != 0 {
		t.Error("renaming onto itself changed something")
	}
	f.do(&meta.Lookup{Parent: 1, Name: "i"})
}

func TestRenameWaitsForBytes(t *testing.T) {
	f := newFixture(t)
	f.file("target")
	ino := f.file("new")
	c := f.chunks(1, false)[0]
	f.do(&meta.Write{Ino: ino, Extents: []meta.Extent{{Len: 10, Chunk: c}}})
	op := &meta.Rename{Parent: 1, Name: "new", NewParent: 1, NewName: "target"}
	f.fails(meta.NotSynced, op)
	f.do(&meta.Rename{Parent: 1, Name: "new", NewParent: 1, NewName: "fresh"}) // nothing is replaced
	f.do(&meta.Rename{Parent: 1, Name: "fresh", NewParent: 1, NewName: "new"})
	f.do(&meta.Write{Ino: ino, MarkSynced: true})
	f.do(op)
}

func TestReadDirIsStable(t *testing.T) {
	f := newFixture(t)
	for i := range 100 {
		f.file(fmt.Sprint("f", i))
	}
	seen := map[string]int{}
	var cookie, next uint64
	for eof, page := false, 0; !eof; page++ {
		res := f.do(&meta.ReadDir{Ino: 1, Cookie: cookie, Max: 7})
		if res.Off <= next {
			t.Errorf("the next name would get the position %d, after %d", res.Off, next)
		}
		next = res.Off
		for _, e := range res.Entries {
			if e.Cookie >= next {
				t.Errorf("%s has the position %d, and the next name gets %d", e.Name, e.Cookie, next)
			}
			seen[e.Name]++
			cookie = e.Cookie
		}
		eof = res.EOF
		// Names come and go behind and before the reader.
		f.do(&meta.Unlink{Parent: 1, Name: fmt.Sprint("f", page)})
		if page < 5 {
			f.file(fmt.Sprint("new", page))
		}
		f.do(&meta.Rename{Parent: 1, Name: "f99", NewParent: 1, NewName: "f98"})
		f.do(&meta.Create{Parent: 1, Name: "f99", Mode: reg})
		added := f.do(&meta.ReadDir{Ino: 1, Cookie: next - 1}).Entries // all that has a position from there on
		if len(added) == 0 || !slices.ContainsFunc(added, func(e meta.Dirent) bool { return e.Name == "f99" }) {
			t.Errorf("DATA: from position %d on are %v", next, added)
		}
	}
	for i := 20; i < 98; i++ {
		if n := seen[fmt.Sprint("f", i)]; n != 1 {
			t.Errorf("f%d was seen %d times", i, n)
		}
	}
	f.fails(meta.NotDir, &meta.ReadDir{Ino: f.do(&meta.Lookup{Parent: 1, Name: "f50"}).Attr.Ino})
	if res := f.do(&meta.ReadDir{Ino: 1, Cookie: 1<<64 - 1}); !res.EOF || len(res.Entries) != 0 {
		t.Errorf("behind the end: %+v", res)
	}
}

func TestJunction(t *testing.T) {
	f := newFixture(t)
	d := f.mkdir(1, "d")
	if a := f.do(&meta.Junction{Parent: d, Name: "vol", Volume: 9}).ParentAttr; a.Nlink != 3 {
		t.Errorf("%+v", a)
	}
	if v := f.do(&meta.Lookup{Parent: d, Name: "vol"}).Volume; v != 9 {
		t.Errorf("volume %d", v)
	}
	e := f.do(&meta.ReadDir{Ino: d, Plus: true}).Entries
	if len(e) != 1 || e[0].Volume != 9 || e[0].Ino != meta.RootIno || e[0].Type != dir || e[0].Attr != nil {
		t.Errorf("%+v", e)
	}
	f.fails(meta.Exists, &meta.Junction{Parent: d, Name: "vol", Volume: 8})
	f.fails(meta.Exists, &meta.Create{Parent: d, Name: "vol", Mode: reg})
	f.fails(meta.Busy, &meta.Unlink{Parent: d, Name: "vol", Dir: true})
	f.fails(meta.NotEmpty, &meta.Unlink{Parent: 1, Name: "d", Dir: true})
	f.fails(meta.NotFound, &meta.Junction{Parent: d, Name: "none", Detach: true})
	f.fails(meta.NotAttached, &meta.Junction{Parent: 1, Name: "d", Detach: true})
	f.fails(meta.NotAttached, &meta.Junction{Parent: d, Name: "vol", Volume: 8, Detach: true})
	f.fails(meta.Invalid, &meta.Junction{Parent: d, Name: "zero"})
	f.do(&meta.Junction{Parent: d, Name: "vol", Detach: true})
	f.do(&meta.Unlink{Parent: 1, Name: "d", Dir: true})
}

func TestTouchedAndNeeds(t *testing.T) {
	f := newFixture(t)
	d, x, y := f.mkdir(1, "d"), f.file("x"), f.file("y")
	c := f.chunks(1, true)[0]
	f.do(&meta.Write{Ino: y, Extents: []meta.Extent{{Len: 5, Chunk: c, OpenEnded: true}}})
	for _, tc := range []struct {
		op             meta.Op
		touched, needs []meta.Ino
	}{
		{&meta.Lookup{Parent: 1, Name: "x"}, nil, []meta.Ino{x}},
		{&meta.Lookup{Parent: 1, Name: "none"}, nil, nil},
		{&meta.Lookup{Parent: d, Name: ".."}, nil, []meta.Ino{d}},
		{&meta.GetAttr{Ino: x}, nil, []meta.Ino{x}},
		{&meta.Create{Parent: 1, Name: "x"}, nil, []meta.Ino{x}},
		{&meta.Create{Parent: 1, Name: "new"}, []meta.Ino{1}, nil},
		{&meta.Create{Parent: 1, Name: strings.Repeat("n", 256)}, []meta.Ino{1}, nil},
		{&meta.Unlink{Parent: 1, Name: "x"}, []meta.Ino{1, x}, nil},
		{&meta.Unlink{Parent: 1, Name: "none"}, []meta.Ino{1}, nil},
		{&meta.Link{Parent: d, Ino: x, Name: "l"}, []meta.Ino{d, x}, nil},
		{&meta.Rename{Parent: 1, Name: "x", NewParent: d, NewName: "z"}, []meta.Ino{1, d, x}, nil},
		{&meta.Rename{Parent: 1, Name: "x", NewParent: 1, NewName: "y"}, []meta.Ino{1, x, y}, nil},
		{&meta.Write{Ino: x}, []meta.Ino{x}, nil},
		{&meta.SetAttr{Ino: x}, []meta.Ino{x}, nil},
		{&meta.CopyRange{Src: x, Dst: y}, []meta.Ino{y}, []meta.Ino{x}},
		{&meta.SealChunk{Chunk: c}, []meta.Ino{y}, nil},
		{&meta.SealChunk{Chunk: meta.ChunkID{Volume: 1}}, nil, nil},
		{&meta.Tmpfile{Parent: d}, nil, nil},
		{&meta.ReleaseOrphans{Inos: []meta.Ino{x}}, nil, nil},
	} {
		touched, err := Touched(f.s, tc.op)
		if err != nil || !slices.Equal(touched, tc.touched) {
			t.Errorf("%T %+v touches %v, %v; want %v", tc.op, tc.op, touched, err, tc.touched)
		}
		needs, err := Needs(f.s, tc.op)
		if err != nil || !slices.Equal(needs, tc.needs) {
			t.Errorf("%T %+v needs %v, %v; want %v", tc.op, tc.op, needs, err, tc.needs)
		}
	}
}

func TestPathOf(t *testing.T) {
	f := newFixture(t)
	a := f.mkdir(1, "a")
	b := f.mkdir(a, "b")
	file := f.create(b, "f", reg).Ino
	f.do(&meta.Junction{Parent: 1, Name: "vol", Volume: 9})
	for _, c := range []struct {
		ino  meta.Ino
		want []string
		kind meta.Kind
	}{{1, nil, 0}, {a, []string{"a"}, 0}, {b, []string{"a", "b"}, 0}, {file, nil, meta.NotDir}, {99, nil, meta.Stale}} {
		got, err := PathOf(f.s, c.ino)
		if meta.KindOf(err) != c.kind || !slices.Equal(got, c.want) {
			t.Errorf("%d: %v %v", c.ino, got, err)
		}
	}
	f.do(&meta.Unlink{Parent: b, Name: "f"})
	f.do(&meta.Unlink{Parent: a, Name: "b", Dir: true})
	if _, err := PathOf(f.s, b); meta.KindOf(err) != meta.Stale {
		t.Errorf("a removed directory: %v", err)
	}
}

// deep makes n directories inside each other below dir.
func (f *fixture) deep(dir meta.Ino, n int, name string) []meta.Ino {
	var all []meta.Ino
	for range n {
		dir = f.mkdir(dir, name)
		all = append(all, dir)
	}
	return all
}

// TestPaths: Paths returns the path of each inode that a path can reach, in any order of
// requests, and reports that the others are too deep. The memory for a chain is about
// that of its longest path.
func TestPaths(t *testing.T) {
	f := newFixture(t)
	name := strings.Repeat("n", meta.MaxName)
	chain := f.deep(meta.RootIno, 64, name)
	side := f.mkdir(chain[3], "side")
	want := func(i int) string { return strings.TrimSuffix(strings.Repeat(name+"/", i+1), "/") }
	for _, order := range [][]int{{0, 1, 14, 15, 16, 20, 63, 3}, {63, 62, 17, 16, 15, 2, 14}, {14, 63, 15, 16}, {16, 15}} {
		p := NewPaths(f.s)
		for _, i := range order {
			got, err := p.Of(chain[i])
			if i > 14 { // 15 names of 255 bytes and their slashes fit, exactly 4095 are 16 without one
				if len(want(i)) >= meta.MaxPath != (meta.KindOf(err) == meta.NameTooLong) {
					t.Errorf("%v: depth %d: %d bytes, %v", order, i, len(got), err)
				}
				continue
			}
			if err != nil || got != want(i) {
				t.Errorf("%v: depth %d: %d bytes, %v", order, i, len(got), err)
			}
		}
		if got, err := p.Of(side); err != nil || got != want(3)+"/side" {
			t.Errorf("%v: %q, %v", order, got, err)
		}
		if got, err := p.Of(meta.RootIno); err != nil || got != "" {
			t.Errorf("%q, %v", got, err)
		}
		if _, err := p.Of(99999); meta.KindOf(err) != meta.Stale {
			t.Error(err)
		}
	}
	short := f.deep(meta.RootIno, 3000, "d")
	p := NewPaths(f.s)
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	if got, err := p.Of(short[2000]); err != nil || len(got) != 2*2001-1 {
		t.Errorf("%d bytes, %v", len(got), err)
	}
	if _, err := p.Of(short[2999]); meta.KindOf(err) != meta.NameTooLong {
		t.Error(err)
	}
	runtime.GC()
	runtime.ReadMemStats(&after)
	if n := int64(after.HeapAlloc) - int64(before.HeapAlloc); n > 1<<20 {
		t.Errorf("the paths of 2,000 directories take %d bytes", n)
	}
	runtime.KeepAlive(p)
	// Files below a directory that is too deep are left out, others are named.
	file, far := f.create(chain[0], "f", reg).Ino, f.create(chain[40], "f", reg).Ino
	names, err := NamesOf(f.s, map[meta.Ino]bool{file: true, far: true})
	if err != nil || len(names) != 1 || names[file] != name+"/f" {
		t.Errorf("%v, %v", names, err)
	}
}
