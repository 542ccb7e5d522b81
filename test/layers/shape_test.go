package layers

import (
	"flag"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// Bounds on the shape of packages. For comparison, MeasureTree counts this in other code bases
// (go test ./test/layers -run TestMeasure -v -args -measure DIR), in the whole or of the type
// with the most:
//
//	                   pebble  restic  litefs  raft  bbolt  go-fuse  etcd server
//	methods of a type     157      47     113    43     37       66          160
//	fields                 48      16      36    32     36       30           51
//	files locking a type   13       0       1     0      1        4            2
//	arrows back, %         20       8      44    40     35       17           22
//	pronouns, %           4.0     3.0     2.8   4.2    2.6      4.1          2.1
const (
	maxMethods  = 80 // of a type
	maxFields   = 40 // of a type with five methods or more; options and reports are lists
	maxLocked   = 8  // files that lock a mutex of a type
	maxNames    = 60 // exported types, functions and variables of a package
	maxBack     = 20 // of 100 arrows between files of a package with minArrows or more
	maxPronouns = 5  // of 100 words in the comments of a package with minWords or more, and of its tests with minTestWords or more

	minArrows    = 20
	minWords     = 500
	minTestWords = 100
)

// vocabularies are packages whose subject is words: the packages may have many.
var vocabularies = []string{"meta", "meta/wire", "meta/admin", "chunkserver", "chunkserver/wire"}

// owed lists the values that do not keep the bounds yet. No value may grow, and a value that
// keeps its bound now leaves the list.
var owed = map[string]int{
	"meta/client.Session: methods":   103,
	"meta/cluster.Cluster: methods":  103,
	"meta/namespace: exported names": 77,
	"meta/client: arrows back, %":    44,
	"meta/cluster: arrows back, %":   42,
}

// excess lists the values beyond the bounds. A key names the package or type and the measure.
func excess(shapes []*Shape) map[string]int {
	over := map[string]int{}
	beyond := func(value, bound int, format string, args ...any) {
		if value > bound {
			over[fmt.Sprintf(format, args...)] = value
		}
	}
	for _, s := range shapes {
		tests, product := s.InTests, !within(s.Path, "test")
		if !product { // all comments are comments of tests
			tests.Words, tests.Pronouns = tests.Words+s.Words, tests.Pronouns+s.Pronouns
		}
		if tests.Words >= minTestWords {
			beyond(tests.Percent(), maxPronouns, "%s: pronouns in tests, %%", s.Path)
		}
		if !product {
			continue
		}
		for name, ts := range s.Types {
			beyond(ts.Methods, maxMethods, "%s.%s: methods", s.Path, name)
			if ts.Methods >= 5 {
				beyond(ts.Fields, maxFields, "%s.%s: fields", s.Path, name)
			}
			beyond(ts.Locked, maxLocked, "%s.%s: files that lock it", s.Path, name)
		}
		if !slices.Contains(vocabularies, s.Path) {
			beyond(s.Names, maxNames, "%s: exported names", s.Path)
		}
		if len(s.Arrows) >= minArrows {
			beyond(100*s.Back()/len(s.Arrows), maxBack, "%s: arrows back, %%", s.Path)
		}
		if s.Words >= minWords {
			beyond(s.Percent(), maxPronouns, "%s: pronouns, %%", s.Path)
		}
	}
	return over
}

func TestShapes(t *testing.T) {
	shapes, err := MeasureTree(filepath.Join("..", ".."))
	if err != nil {
		t.Fatal(err)
	}
	if len(shapes) < 30 {
		t.Fatalf("only %d packages were measured: the test looks in the wrong place", len(shapes))
	}
	over := excess(shapes)
	for _, what := range slices.Sorted(maps.Keys(over)) {
		if value, most := over[what], owed[what]; value > most {
			t.Errorf("%s: %d; the bound is in shape_test.go, and %d is owed: give the concept that grew a type or package of its own (pronouns: name the thing)", what, value, most)
		}
	}
	for _, what := range slices.Sorted(maps.Keys(owed)) {
		if _, still := over[what]; !still {
			t.Errorf("%s keeps its bound now: take it out of owed", what)
		}
	}
}

// plant writes the files of a tree and measures the tree.
func plant(t *testing.T, files map[string]string) []*Shape {
	t.Helper()
	dir := t.TempDir()
	for name, text := range files { // in any order: each is a file of its own
		name = filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(name), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(name, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	shapes, err := MeasureTree(dir)
	if err != nil {
		t.Fatal(err)
	}
	return shapes
}

// TestShapeIsCounted measures a planted package.
func TestShapeIsCounted(t *testing.T) {
	shapes := plant(t, map[string]string{
		"a.go": `// Package p has what it needs of those.
package p

import "sync"

type T struct {
	mu   sync.Mutex
	a, b int
}

func (t *T) A() { t.mu.Lock(); t.b2() }
func (t *T) c() {}
func Free()     {}
`,
		"b.go": `package p

func (t *T) b2()      { t.c(); Free() }
func other(t *T)      { t.mu.Lock(); x(t).c() }
func x(t *T) *T       { return t }
func (g G[K]) m()     {}

type G[K any] struct{}
`,
		"b_test.go": "package p\n\n// tests needs it.\nfunc (t *T) tests() {}\n",
		"gen.go":    "// Code generated by hand. DO NOT EDIT.\n\npackage p\n\nfunc (t *T) Made() {}\n",
	})
	if len(shapes) != 1 {
		t.Fatal(shapes)
	}
	s := shapes[0]
	if got, want := *s.Types["T"], (TypeShape{Fields: 3, Methods: 3, Files: 2, Locked: 2}); got != want {
		t.Errorf("T has shape %+v, not %+v", got, want)
	}
	if got := s.Types["G"].Methods; got != 1 {
		t.Errorf("a type with parameters has %d methods, not 1", got)
	}
	if s.Names != 3 || len(s.Arrows) != 2 || s.Back() != 2 || s.Comments != (Comments{8, 3}) || s.InTests != (Comments{3, 1}) {
		t.Errorf("names %d, arrows %v, %d of them back, comments %v, in tests %v", s.Names, s.Arrows, s.Back(), s.Comments, s.InTests)
	}
	if over := excess(shapes); len(over) != 0 {
		t.Errorf("excess: %v", over)
	}
}

// TestExcessIsSeen plants, for each bound, a tree that keeps the bound and a tree that is beyond
// the bound by the least possible.
func TestExcessIsSeen(t *testing.T) {
	const head = "package p\n\nimport \"sync\"\n\n"
	repeat := func(n int, format string) string {
		var b strings.Builder
		for i := range n {
			fmt.Fprintf(&b, format+"\n", i)
		}
		return b.String()
	}
	one := func(name, text string) map[string]string { return map[string]string{name: text} }
	words := func(n, pronouns int) string {
		return "// " + strings.Repeat("those ", pronouns) + strings.Repeat("word ", n-pronouns) + "\npackage p\n"
	}
	for what, tree := range map[string]func(excess int) map[string]string{
		"..T: methods": func(x int) map[string]string {
			return one("a.go", head+"type T struct{}\n"+repeat(maxMethods+x, "func (T) m%d() {}"))
		},
		"..T: fields": func(x int) map[string]string {
			return one("a.go", head+"type T struct{\n"+repeat(maxFields+x, "f%d int")+"}\n"+repeat(5, "func (T) m%d() {}"))
		},
		"..T: files that lock it": func(x int) map[string]string {
			files := one("a.go", head+"type T struct{ mu sync.RWMutex }\n")
			for i := range maxLocked + x {
				files[fmt.Sprintf("b%d.go", i)] = fmt.Sprintf("package p\n\nfunc b%d(t *T) { t.mu.RLock() }\n", i)
			}
			return files
		},
		".: exported names": func(x int) map[string]string {
			return one("a.go", head+repeat(maxNames+x, "func F%d() {}"))
		},
		".: arrows back, %": func(x int) map[string]string {
			const calls = 30
			files := map[string]string{"top.go": head, "a.go": "package p\n\nfunc a() {\n"}
			back := calls * maxBack / 100 / 2
			for i := range calls - back {
				body := ""
				if i < back+x {
					body = "a()"
				}
				files[fmt.Sprintf("b%d.go", i)] = fmt.Sprintf("package p\n\nfunc b%d() { %s }\n", i, body)
				files["a.go"] += fmt.Sprintf("b%d()\n", i)
			}
			files["a.go"] += "}\n"
			return files
		},
		".: pronouns, %": func(x int) map[string]string { return one("a.go", words(1000, 10*maxPronouns+x)) },
		".: pronouns in tests, %": func(x int) map[string]string {
			return one("a_test.go", words(minTestWords, maxPronouns+x))
		},
		"test/a: pronouns in tests, %": func(x int) map[string]string {
			return map[string]string{"test/a/a.go": words(minTestWords/2, maxPronouns), "test/a/a_test.go": words(minTestWords/2, x)}
		},
	} {
		if over := excess(plant(t, tree(0))); len(over) != 0 {
			t.Errorf("%s: a tree that keeps the bound has the excess %v", what, over)
		}
		if over := excess(plant(t, tree(1))); len(over) != 1 || over[what] == 0 {
			t.Errorf("%s: a tree beyond the bound has the excess %v", what, over)
		}
	}
}

var measured = flag.String("measure", "", "print the shape of another code base, to compare with")

// TestMeasure prints the shape of the code base that the flag -measure names.
func TestMeasure(t *testing.T) {
	if *measured == "" {
		return
	}
	shapes, err := MeasureTree(*measured)
	if err != nil {
		t.Fatal(err)
	}
	var words, pronouns, arrows, back int
	for _, s := range shapes {
		words, pronouns, arrows, back = words+s.Words, pronouns+s.Pronouns, arrows+len(s.Arrows), back+s.Back()
		fmt.Printf("%s: %d names, %d arrows, %d of them back, %d words, %d pronouns; in tests %d words, %d pronouns\n",
			s.Path, s.Names, len(s.Arrows), s.Back(), s.Words, s.Pronouns, s.InTests.Words, s.InTests.Pronouns)
		for _, name := range slices.Sorted(maps.Keys(s.Types)) {
			if ts := s.Types[name]; ts.Methods > maxMethods/2 || ts.Fields > maxFields/2 || ts.Locked > maxLocked/2 {
				fmt.Printf("\t%s: %d methods in %d files, %d fields, locked in %d files\n", name, ts.Methods, ts.Files, ts.Fields, ts.Locked)
			}
		}
	}
	fmt.Printf("all: %d arrows, %d of them back, %d words, %d pronouns\n", arrows, back, words, pronouns)
}
