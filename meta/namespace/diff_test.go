package namespace

import (
	"fmt"
	"maps"
	"slices"
	"testing"

	"penstock.io/penstock/meta"
)

// walked is a volume as a walk over its directories finds it.
type walked struct {
	entries map[place]whom
	paths   map[place]string
	inodes  map[meta.Ino]string // the compared properties, as text
	content map[meta.Ino]string
	extents map[meta.Ino]string // may change by compaction alone: told or not
}

func (s *sim) walk(gen meta.Generation) *walked {
	s.t.Helper()
	w := &walked{map[place]whom{}, map[place]string{}, map[meta.Ino]string{}, map[meta.Ino]string{}, map[meta.Ino]string{}}
	c := s.ctx()
	c.At = gen
	ask := func(op meta.Op) *meta.Result {
		s.t.Helper()
		res, err := Query(s.s, c, op)
		if err != nil {
			s.t.Fatalf("%T %+v in generation %d: %v", op, op, gen, err)
		}
		return res
	}
	var dir func(ino meta.Ino, path string)
	note := func(ino meta.Ino) {
		res := ask(&meta.Open{Ino: ino})
		a := res.Attr
		w.inodes[ino] = fmt.Sprint(a.Mode, a.UID, a.GID)
		for _, name := range splitNames(ask(&meta.ListXattr{Ino: ino}).Data) {
			w.inodes[ino] += fmt.Sprintf(" %s=%x", name, ask(&meta.GetXattr{Ino: ino, Name: name}).Data)
		}
		if !a.IsDir() {
			w.content[ino] = fmt.Sprintf("%d %d %x", a.Size, a.Mtime, res.Data)
			w.extents[ino] = fmt.Sprintf("%+v", res.Extents)
		}
		if a.Mode&meta.TypeMask == meta.TypeSymlink {
			w.content[ino] += string(ask(&meta.ReadLink{Ino: ino}).Data)
		}
	}
	dir = func(ino meta.Ino, path string) {
		note(ino)
		for _, e := range ask(&meta.ReadDir{Ino: ino}).Entries {
			p := place{ino, e.Name}
			w.entries[p] = whom{e.Ino, e.Volume, e.Type}
			w.paths[p] = join(path, e.Name)
			switch {
			case e.Volume != 0:
				w.entries[p] = whom{0, e.Volume, e.Type}
			case e.Type == meta.TypeDir:
				dir(e.Ino, join(path, e.Name))
			default:
				note(e.Ino)
			}
		}
	}
	dir(meta.RootIno, "")
	return w
}

func splitNames(b []byte) (names []string) {
	for len(b) > 0 {
		n := slices.Index(b, 0)
		names = append(names, string(b[:n]))
		b = b[n+1:]
	}
	return names
}

// diffs compares Diff between random snapshots with two walks.
func (s *sim) diffs() {
	s.t.Helper()
	if len(s.frozen) == 0 {
		return
	}
	i := s.rng.IntN(len(s.frozen))
	j := i + 1 + s.rng.IntN(len(s.frozen)-i)
	to := meta.Generation(0)
	if j < len(s.frozen) {
		to = s.frozen[j].gen
	}
	from := s.frozen[i].gen
	got, err := Diff(s.s, from, to)
	if err != nil {
		s.t.Fatal(err)
	}
	a, b := s.walk(from), s.walk(to)
	gone, come := map[string]meta.Ino{}, map[string]meta.Ino{}
	lost, won := map[meta.Ino]int{}, map[meta.Ino]int{}
	for p, w := range a.entries {
		if b.entries[p] != w {
			gone[a.paths[p]] = w.ino
			lost[w.ino]++
		}
	}
	for p, w := range b.entries {
		if a.entries[p] != w {
			come[b.paths[p]] = w.ino
			won[w.ino]++
		}
	}
	renamed, changed := map[meta.Ino]int{}, map[meta.Ino]bool{}
	take := func(from map[string]meta.Ino, path string, c meta.Change) {
		if ino, ok := from[path]; !ok || ino != c.Ino {
			s.t.Fatalf("%d to %d: %+v: %q is inode %d, %v", s.frozen[i].gen, to, c, path, ino, ok)
		}
		delete(from, path)
	}
	for _, c := range got {
		switch c.Kind {
		case meta.PathAdded:
			take(come, c.Path, c)
		case meta.PathRemoved:
			take(gone, c.Path, c)
		case meta.PathRenamed:
			take(come, c.Path, c)
			take(gone, c.From, c)
			renamed[c.Ino]++
		case meta.PathChanged:
			at := c.Path == "" && c.Ino == meta.RootIno
			for p, w := range b.entries {
				at = at || b.paths[p] == c.Path && w.ino == c.Ino
			}
			moved := a.extents[c.Ino] != b.extents[c.Ino]
			if !at || !moved && c.Content != (a.content[c.Ino] != b.content[c.Ino]) {
				s.t.Fatalf("%+v: there %v, content %q, was %q", c, at, b.content[c.Ino], a.content[c.Ino])
			}
			changed[c.Ino] = true
		}
	}
	if len(gone)+len(come) > 0 {
		s.t.Fatalf("%d to %d: not told: %v gone, %v come", s.frozen[i].gen, to, gone, come)
	}
	for ino, n := range lost {
		if want := min(n, won[ino]); ino != 0 && renamed[ino] != want {
			s.t.Fatalf("inode %d was renamed %d times, told are %d", ino, want, renamed[ino])
		}
	}
	for _, ino := range slices.Sorted(maps.Keys(b.inodes)) {
		_, was := a.inodes[ino]
		want := was && (a.inodes[ino] != b.inodes[ino] || a.content[ino] != b.content[ino])
		moved := a.extents[ino] != b.extents[ino]
		if changed[ino] != want && !(moved && changed[ino]) {
			s.t.Fatalf("inode %d: told to differ %v, it does %v:\n%s %s\n%s %s", ino, changed[ino], want, a.inodes[ino], a.content[ino], b.inodes[ino], b.content[ino])
		}
	}
}

// TestDiffReadsWhatChanged: the cost of a comparison depends on the number of changes,
// not on the size of the tree.
func TestDiffReadsWhatChanged(t *testing.T) {
	reads := func(files int) int {
		f := newFixture(t)
		dir := f.do(&meta.Create{Parent: 1, Name: "dir", Mode: meta.TypeDir | 0o755}).Attr.Ino
		for i := range files {
			f.do(&meta.Create{Parent: dir, Name: fmt.Sprint("file", i), Mode: meta.TypeRegular | 0o644})
		}
		from := f.do(&meta.TakeSnapshot{Name: "a"}).Off
		f.do(&meta.Rename{Parent: dir, Name: "file7", NewParent: 1, NewName: "moved"})
		e := f.do(&meta.Lookup{Parent: dir, Name: "file8"}).Attr
		f.do(&meta.SetAttr{Ino: e.Ino, Mask: meta.SetMode, Mode: 0o600})
		f.do(&meta.Create{Parent: dir, Name: "new", Mode: meta.TypeRegular})
		f.do(&meta.Unlink{Parent: dir, Name: "file9", Holders: []meta.SessionID{0}})
		c := &counting{memStore: f.s}
		got, err := Diff(c, meta.Generation(from), 0)
		if err != nil {
			t.Fatal(err)
		}
		want := fmt.Sprint([]string{"changed dir/file8 ", "removed dir/file9 ", "added dir/new ", "renamed moved dir/file7"})
		var l []string
		for _, g := range got {
			l = append(l, fmt.Sprint([]string{"", "added", "removed", "renamed", "changed"}[g.Kind], " ", g.Path, " ", g.From))
		}
		if fmt.Sprint(l) != want {
			t.Fatalf("%v, want %v", l, want)
		}
		return c.records
	}
	if few, many := reads(20), reads(5000); many > few+5 {
		t.Errorf("%d records were read of 20 files, %d of 5000", few, many)
	}
}

// TestDiffReadsInProportion: ten times the changes cost ten times the reads, in a
// volume of twice the size, too.
func TestDiffReadsInProportion(t *testing.T) {
	reads := func(files, changed int) int {
		f := newFixture(t)
		var inos []meta.Ino
		for i := range files {
			inos = append(inos, f.do(&meta.Create{Parent: meta.RootIno, Name: fmt.Sprint("file", i), Mode: meta.TypeRegular | 0o644}).Attr.Ino)
		}
		from := f.do(&meta.TakeSnapshot{Name: "a"}).Off
		for i := range changed {
			f.do(&meta.SetAttr{Ino: inos[i*(files/changed)], Mask: meta.SetMode, Mode: 0o600})
		}
		c := &counting{memStore: f.s}
		if l, err := Diff(c, meta.Generation(from), 0); err != nil || len(l) != changed {
			t.Fatal(len(l), err)
		}
		return c.records
	}
	few := reads(2000, 100)
	for _, c := range []struct{ files, changed int }{{4000, 100}, {2000, 1000}, {4000, 1000}} {
		n := reads(c.files, c.changed)
		if most := few*c.changed/100 + 20; n > most {
			t.Errorf("%d records were read for %d changes of %d files, %d for 100 of 2000", n, c.changed, c.files, few)
		}
	}
}

// TestDiffFindsNamesAtOnce: for files with several names whose recorded name was removed,
// one walk finds the other names, however many files there are.
func TestDiffFindsNamesAtOnce(t *testing.T) {
	const files, others = 200, 1000
	f := newFixture(t)
	dir := func(name string) meta.Ino {
		return f.do(&meta.Create{Parent: meta.RootIno, Name: name, Mode: meta.TypeDir | 0o755}).Attr.Ino
	}
	kept, gone, fresh := dir("kept"), dir("gone"), dir("new")
	for i := range others {
		f.do(&meta.Create{Parent: gone, Name: fmt.Sprint("other", i), Mode: meta.TypeRegular})
	}
	var inos []meta.Ino
	for i := range files {
		ino := f.do(&meta.Create{Parent: kept, Name: fmt.Sprint(i), Mode: meta.TypeRegular | 0o644}).Attr.Ino
		inos = append(inos, ino)
		f.do(&meta.Link{Ino: ino, Parent: gone, Name: fmt.Sprint(i)})
		f.do(&meta.Unlink{Parent: gone, Name: fmt.Sprint(i)})
	}
	compare := func(from, to uint64, what string, want func(i int, c meta.Change) bool) {
		t.Helper()
		c := &counting{memStore: f.s}
		l, err := DiffExact(c, meta.Generation(from), meta.Generation(to))
		if err != nil {
			t.Fatal(err)
		}
		found := 0
		for _, x := range l {
			if i := slices.Index(inos, x.Ino); i >= 0 && want(i, x) {
				found++
			}
		}
		if found != files {
			t.Errorf("%s: %d of %d were told: %v", what, found, files, l[:min(len(l), 5)])
		}
		// A few of each change, and each entry once.
		if most := 30*files + 3*(others+2*files); c.records > most {
			t.Errorf("%s: %d records were read for %d changes among %d entries", what, c.records, files, others)
		}
	}
	a := f.do(&meta.TakeSnapshot{Name: "a"}).Off
	for _, ino := range inos {
		f.do(&meta.SetAttr{Ino: ino, Mask: meta.SetMode, Mode: 0o600})
	}
	b := f.do(&meta.TakeSnapshot{Name: "b"}).Off
	compare(a, b, "changed", func(i int, c meta.Change) bool {
		return c.Kind == meta.PathChanged && c.Path == fmt.Sprint("kept/", i)
	})
	for i, ino := range inos {
		f.do(&meta.Link{Ino: ino, Parent: fresh, Name: fmt.Sprint("n", i)})
	}
	compare(b, 0, "linked", func(i int, c meta.Change) bool {
		return c.Kind == meta.PathAdded && c.Path == fmt.Sprint("new/n", i) && c.From == fmt.Sprint("kept/", i)
	})
}

// counting counts the records read.
type counting struct {
	*memStore
	records int
}

func (c *counting) Get(k []byte) ([]byte, bool, error) {
	c.records++
	return c.memStore.Get(k)
}

func (c *counting) Scan(lo, hi []byte, fn func(k, v []byte) bool) error {
	return c.memStore.Scan(lo, hi, func(k, v []byte) bool {
		c.records++
		return fn(k, v)
	})
}
