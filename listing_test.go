package penstock

import (
	"fmt"
	"math/rand"
	"testing"
	"time"

	"penstock.io/penstock/meta"
)

// listing is a listing under way, with the names that it must have.
type listing struct {
	v     *Volume
	at    DirCursor
	told  []DirEntry
	since map[string]bool              // names that existed from the listing's beginning on, all the time
	meant map[string]map[meta.Ino]bool // inodes of a name at some time since the beginning
}

// listings are the listings under way in a directory; the test reports changes to them.
type listings map[*listing]bool

func (ls listings) set(name string, ino meta.Ino) {
	for l := range ls {
		if ino == 0 {
			delete(l.since, name)
			continue
		}
		if l.meant[name] == nil {
			l.meant[name] = make(map[meta.Ino]bool)
		}
		l.meant[name][ino] = true
	}
}

func (l *listing) begin(names map[string]meta.Ino) {
	l.at, l.told, l.since, l.meant = DirCursor{}, nil, make(map[string]bool), make(map[string]map[meta.Ino]bool)
	for name, ino := range names {
		l.since[name], l.meant[name] = true, map[meta.Ino]bool{ino: true}
	}
}

// TestListingsAndChanges: three clients make, remove, rename and replace names of one
// directory. Meanwhile listings with pages of any size, some of which go back or begin
// anew, return each name that exists all the time exactly once, no name twice, and end.
func TestListingsAndChanges(t *testing.T) {
	seed := time.Now().UnixNano()
	t.Logf("seed %d", seed)
	for round := range int64(12) {
		rng := rand.New(rand.NewSource(seed + round))
		w := newWorld(t, meta.Policy{Replicas: 1})
		var vs []*Volume
		for range 3 {
			cfg := Config{Notify: newKernel()}
			if round%3 == 2 {
				cfg.MetaCache = 30
			}
			_, v := open(t, w, cfg)
			vs = append(vs, v)
		}
		ctx := t.Context()
		const dir = meta.RootIno
		other := must(vs[0].Create(ctx, &Call{}, meta.Create{Parent: dir, Name: "other", Mode: meta.TypeDir | 0o755})).Attr.Ino
		names, ls := map[string]meta.Ino{"other": other}, listings{}
		set := func(name string, ino meta.Ino) {
			if names[name] = ino; ino == 0 {
				delete(names, name)
			}
			ls.set(name, ino)
		}
		any := func() string { return fmt.Sprintf("n%d", rng.Intn([]int{60, 600}[round%2])) }
		create := func(v *Volume, name string) {
			if names[name] == 0 {
				set(name, must(v.Create(ctx, &Call{}, meta.Create{Parent: dir, Name: name, Mode: meta.TypeRegular | 0o644, Excl: true})).Attr.Ino)
			}
		}
		fail := func(err error) {
			t.Helper()
			if err != nil {
				t.Fatal(err)
			}
		}
		for range 400 {
			create(vs[0], any())
		}
		ended, pages := 0, 0
		for range 4 {
			l := &listing{v: vs[rng.Intn(3)]}
			ls[l] = true
			l.begin(names)
		}
		for step := 0; ended < 40; step++ {
			if step > 100_000 {
				t.Fatalf("round %d: %d listings ended, of 40, after %d pages", round, ended, pages)
			}
			v, name, to := vs[rng.Intn(3)], any(), any()
			switch rng.Intn(10) {
			case 0:
				create(v, name)
			case 1:
				if names[name] != 0 {
					fail(v.Unlink(ctx, &Call{}, dir, name, false))
					set(name, 0)
				}
			case 2, 3: // a new name, or the replacement of a name that exists all the time
				if ino := names[name]; ino != 0 && name != to {
					fail(v.Rename(ctx, &Call{}, dir, name, dir, to, 0))
					set(name, 0)
					set(to, ino)
				}
			case 4: // back and forth
				if ino := names[name]; ino != 0 && names["back"] == 0 {
					fail(v.Rename(ctx, &Call{}, dir, name, dir, "back", 0))
					set(name, 0)
					set("back", ino)
					fail(v.Rename(ctx, &Call{}, dir, "back", dir, name, 0))
					set("back", 0)
					set(name, ino)
				}
			case 5:
				if a, b := names[name], names[to]; a != 0 && b != 0 && a != b {
					fail(v.Rename(ctx, &Call{}, dir, name, dir, to, meta.RenameExchange))
					set(name, b)
					set(to, a)
				}
			case 6: // from another directory, over an existing name
				ino := must(v.Create(ctx, &Call{}, meta.Create{Parent: other, Name: "x", Mode: meta.TypeRegular | 0o644, Excl: true})).Attr.Ino
				fail(v.Rename(ctx, &Call{}, other, "x", dir, name, 0))
				set(name, ino)
			default:
				for l := range ls { // any
					pages++
					if rng.Intn(30) == 0 && len(l.told) > 0 { // telldir and seekdir
						i := rng.Intn(len(l.told))
						l.at.Cookie, l.told = l.told[i].Cookie, l.told[:i+1]
					}
					if rng.Intn(100) == 0 {
						l.begin(names)
					}
					list, eof, err := l.v.ReadDir(ctx, dir, &l.at, rng.Intn(60), rng.Intn(2) == 0)
					fail(err)
					for _, e := range list {
						if !l.meant[e.Name][e.Ino] {
							t.Fatalf("DATA: round %d: a listing says that %s is inode %d, which it was not since the listing began", round, e.Name, e.Ino)
						}
						l.told = append(l.told, e)
					}
					if !eof && len(list) > 0 {
						break
					}
					l.check(t)
					ended++
					l.v = vs[rng.Intn(3)]
					l.begin(names)
					break
				}
			}
		}
		w.check()
	}
}

func (l *listing) check(t *testing.T) {
	t.Helper()
	told := make(map[string]int)
	for i, e := range l.told {
		told[e.Name]++
		if told[e.Name] > 1 {
			t.Fatalf("DATA: a listing told %s twice", e.Name)
		}
		if i > 0 && e.Cookie <= l.told[i-1].Cookie {
			t.Fatalf("DATA: position %d of %s follows %d", e.Cookie, e.Name, l.told[i-1].Cookie)
		}
	}
	for name := range l.since {
		if told[name] != 1 {
			t.Fatalf("DATA: %s was there from the beginning of a listing to its end, and is not in it", name)
		}
	}
}

// TestListingEnds: a program that makes a new name for each listed name comes to the end of the
// listing, in a directory of several pages, with changes by this client and by another.
func TestListingEnds(t *testing.T) {
	const files = 5000
	w := newWorld(t, meta.Policy{Replicas: 1})
	_, v := open(t, w, Config{})
	_, other := open(t, w, Config{})
	ctx := t.Context()
	for i := range files {
		must(v.Create(ctx, &Call{}, meta.Create{Parent: meta.RootIno, Name: fmt.Sprint("f", i), Mode: meta.TypeRegular | 0o644}))
	}
	by := v
	for pass, change := range []func(name string) error{
		func(name string) error { return by.Rename(ctx, &Call{}, meta.RootIno, name, meta.RootIno, name+"x", 0) },
		func(name string) error {
			if err := by.Unlink(ctx, &Call{}, meta.RootIno, name, false); err != nil {
				return err
			}
			_, err := by.Create(ctx, &Call{}, meta.Create{Parent: meta.RootIno, Name: name, Mode: meta.TypeRegular | 0o644})
			return err
		},
	} {
		for _, by = range []*Volume{v, other} {
			told, at := 0, DirCursor{}
			for eof := false; !eof; {
				var list []DirEntry
				var err error
				if list, eof, err = v.ReadDir(ctx, meta.RootIno, &at, 300, true); err != nil {
					t.Fatal(err)
				}
				for _, e := range list {
					if told++; told > files {
						t.Fatalf("pass %d: DATA: a listing of %d names goes on after as many", pass, files)
					}
					if err := change(e.Name); err != nil {
						t.Fatal(err)
					}
				}
			}
			if told != files {
				t.Errorf("pass %d: DATA: %d names were told, of %d", pass, told, files)
			}
		}
	}
}
