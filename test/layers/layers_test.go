package layers

import (
	"bytes"
	"fmt"
	"go/ast"
	"go/build"
	"go/importer"
	"go/parser"
	"go/token"
	"go/types"
	"io/fs"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
)

// A test that was built with -trimpath does not know where Go's own packages are, but the go
// command does.
func TestMain(m *testing.M) {
	if build.Default.GOROOT == "" {
		root, err := exec.Command("go", "env", "GOROOT").Output()
		if err != nil {
			fmt.Fprintln(os.Stderr, "go env GOROOT:", err)
			os.Exit(1)
		}
		build.Default.GOROOT = strings.TrimSpace(string(root))
	}
	os.Exit(m.Run())
}

// folder is the parsed content of one package folder.
type folder struct {
	path  string // relative to the module, "." for the root
	files map[string]*ast.File
	lines map[string]int
}

var fset = token.NewFileSet()

// load parses every Go file of the module, in order of their paths.
func load(t *testing.T) []*folder {
	t.Helper()
	root := filepath.Join("..", "..")
	byPath := map[string]*folder{}
	var order []*folder
	err := filepath.WalkDir(root, func(name string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		rel, err := filepath.Rel(root, name)
		if err != nil {
			return err
		}
		base := d.Name()
		if d.IsDir() {
			if rel != "." && (strings.HasPrefix(base, ".") || base == "testdata" || base == "bin" || base == "vendor") {
				return filepath.SkipDir
			}
			return nil
		}
		if !strings.HasSuffix(base, ".go") {
			return nil
		}
		src, err := os.ReadFile(name)
		if err != nil {
			return err
		}
		file, err := parser.ParseFile(fset, rel, src, parser.ParseComments|parser.SkipObjectResolution)
		if err != nil {
			return err
		}
		dir := filepath.ToSlash(filepath.Dir(rel))
		f := byPath[dir]
		if f == nil {
			f = &folder{path: dir, files: map[string]*ast.File{}, lines: map[string]int{}}
			byPath[dir] = f
			order = append(order, f)
		}
		f.files[base] = file
		f.lines[base] = bytes.Count(src, []byte("\n"))
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if len(order) < 5 {
		t.Fatalf("found only %d packages below %s: the test looks in the wrong place", len(order), root)
	}
	return order
}

// sources are a folder's file names without tests, sorted.
func (f *folder) sources() []string {
	return f.names(func(name string) bool { return !strings.HasSuffix(name, "_test.go") })
}

func (f *folder) names(keep func(string) bool) []string {
	var names []string
	for name := range f.files {
		if keep(name) {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	return names
}

// within reports whether path is folder or below.
func within(path, folder string) bool {
	return path == folder || strings.HasPrefix(path, folder+"/")
}

// rowOf finds the row for a folder: its own, or the closest row above where the folder is part of
// cmd or test.
func rowOf(path string) (row, bool) {
	best, found := row{}, false
	for _, r := range table {
		exact := r.path == path
		below := (within(path, "cmd") || within(path, "test")) && within(path, r.path)
		if (exact || below) && (!found || len(r.path) > len(best.path)) {
			best, found = r, true
		}
	}
	return best, found
}

func allowed(r row, imported string) bool {
	for _, a := range r.imports {
		if a == "*" || a == imported {
			return true
		}
		if prefix, ok := strings.CutSuffix(a, "/*"); ok && within(imported, prefix) {
			return true
		}
	}
	return within(imported, r.path) && r.path != "." && (within(r.path, "cmd") || within(r.path, "test"))
}

func imports(file *ast.File) []string {
	var list []string
	for _, spec := range file.Imports {
		p, err := strconv.Unquote(spec.Path.Value)
		if err != nil {
			panic(err) // the parser accepted the literal
		}
		list = append(list, p)
	}
	return list
}

func TestImportsPointOneWay(t *testing.T) {
	for _, f := range load(t) {
		sources := f.sources()
		if len(sources) == 0 {
			continue
		}
		r, ok := rowOf(f.path)
		if !ok {
			t.Errorf("folder %s has no row in the layout table of test/layers: say what it may import, and why", f.path)
			continue
		}
		for _, name := range sources {
			for _, imported := range imports(f.files[name]) {
				rel, ours := strings.CutPrefix(imported, Module+"/")
				if imported == Module {
					rel, ours = ".", true
				}
				if ours && rel != f.path && !allowed(r, rel) {
					t.Errorf("%s imports %s: %s may import %v: %s", path.Join(f.path, name), rel, r.path, r.imports, r.why)
				}
				if ours {
					continue
				}
				if slices.Contains(standardOnly, f.path) && strings.Contains(strings.Split(imported, "/")[0], ".") {
					t.Errorf("%s imports %s: this package imports the standard library and words only", path.Join(f.path, name), imported)
				}
				for _, o := range outside {
					if within(imported, o.module) || strings.HasPrefix(imported, o.module+"/") {
						if !slices.ContainsFunc(o.only, func(p string) bool { return within(f.path, p) }) || slices.Contains(neither[o.module], f.path) {
							t.Errorf("%s imports %s, which is for %v: %s", path.Join(f.path, name), imported, o.only, o.why)
						}
					}
				}
			}
		}
	}
}

// TestTableIsOrdered: a row may only allow earlier rows, so the table itself can't hold a cycle.
// (The embedded etcd is the exception: the etcd log's tests run on the embedded etcd.)
func TestTableIsOrdered(t *testing.T) {
	seen := map[string]bool{}
	for _, r := range table {
		if r.why == "" {
			t.Errorf("row %s has no reason", r.path)
		}
		if seen[r.path] {
			t.Errorf("row %s stands twice", r.path)
		}
		seen[r.path] = true
		for _, a := range r.imports {
			a = strings.TrimSuffix(a, "/*")
			if a != "*" && !seen[a] && a != "meta/cluster/embedded" {
				t.Errorf("row %s allows %s, which is not below it", r.path, a)
			}
		}
	}
}

// TestPurePackages: see the comment at pure.
func TestPurePackages(t *testing.T) {
	loaded := load(t)
	im := &treeImporter{folders: loaded, done: map[string]*types.Package{}, std: importer.ForCompiler(fset, "gc", nil)}
	for _, f := range loaded {
		if !slices.Contains(pure, f.path) {
			continue
		}
		info := im.check(t, f)
		for _, name := range f.sources() {
			for _, problem := range impurities(f.files[name], info) {
				t.Error(problem)
			}
		}
	}
}

// impurities lists the forbidden parts of a file of a pure package.
func impurities(file *ast.File, info *types.Info) []string {
	var found []string
	report := func(n ast.Node, format string, a ...any) {
		found = append(found, fset.Position(n.Pos()).String()+": "+fmt.Sprintf(format, a...))
	}
	for _, spec := range file.Imports {
		p := strings.Trim(spec.Path.Value, `"`)
		if slices.ContainsFunc(forbiddenImports, func(f string) bool { return within(p, f) }) {
			report(spec, "pure packages don't import %s", p)
		}
	}
	sorted := sortedAfter(file)
	ast.Inspect(file, func(n ast.Node) bool {
		switch n := n.(type) {
		case *ast.GoStmt:
			report(n, "go statement in a pure package")
		case *ast.SelectorExpr:
			if x, ok := n.X.(*ast.Ident); ok && slices.Contains(forbiddenCalls[x.Name], n.Sel.Name) {
				report(n, "%s.%s in a pure package: take the time from the caller", x.Name, n.Sel.Name)
			}
		case *ast.RangeStmt:
			if walksMap(info.TypeOf(n.X), n.X) && !sorted(n) && !anyOrder(file, n) && !inCheck(file, n) {
				report(n, "walk over a map in a pure package: sort what it collects in the same function, or say \"in any order\" in a comment at the loop")
			}
		}
		return true
	})
	return found
}

// TestImpuritiesAreSeen is the control of the test above: impurities finds the planted faults,
// and nothing else.
func TestImpuritiesAreSeen(t *testing.T) {
	const src = `package p
import ("math/rand"; "os"; "slices"; "time")
func bad(m map[int]int) time.Time {
	go bad(nil)
	for range m { os.Exit(rand.Int()) }
	return time.Now()
}
func good(m map[int]int) (keys []int, d time.Duration) {
	for k := range m { keys = append(keys, k) }
	slices.Sort(keys)
	// In any order: a sum.
	for _, v := range m { d += time.Duration(v) }
	for range keys { d++ }
	return keys, d
}`
	file, err := parser.ParseFile(fset, "planted.go", src, parser.ParseComments)
	if err != nil {
		t.Fatal(err)
	}
	info := &types.Info{Types: map[ast.Expr]types.TypeAndValue{}, Defs: map[*ast.Ident]types.Object{}, Uses: map[*ast.Ident]types.Object{}}
	conf := types.Config{Importer: importer.ForCompiler(fset, "gc", nil)}
	if _, err := conf.Check("p", fset, []*ast.File{file}, info); err != nil {
		t.Fatal(err)
	}
	found := impurities(file, info)
	var lines []string
	for _, f := range found {
		lines = append(lines, strings.Split(f, ":")[1])
	}
	if want := []string{"2", "2", "4", "5", "6"}; !slices.Equal(lines, want) {
		t.Errorf("impurities on lines %v, want %v:\n%s", lines, want, strings.Join(found, "\n"))
	}
}

// walksMap reports whether a range goes over a map, or over maps.Keys, Values or All of a map.
func walksMap(ranged types.Type, x ast.Expr) bool {
	if ranged != nil {
		if _, ok := ranged.Underlying().(*types.Map); ok {
			return true
		}
	}
	call, ok := x.(*ast.CallExpr)
	if !ok {
		return false
	}
	sel, ok := call.Fun.(*ast.SelectorExpr)
	if !ok {
		return false
	}
	pkg, ok := sel.X.(*ast.Ident)
	return ok && pkg.Name == "maps" && slices.Contains([]string{"Keys", "Values", "All"}, sel.Sel.Name)
}

// sortedAfter reports for a loop whether a sort follows in the innermost function around the
// loop.
func sortedAfter(file *ast.File) func(ast.Node) bool {
	type span struct{ lo, hi token.Pos }
	var functions []span
	var sorts []token.Pos
	ast.Inspect(file, func(n ast.Node) bool {
		switch n := n.(type) {
		case *ast.FuncDecl:
			functions = append(functions, span{n.Pos(), n.End()})
		case *ast.FuncLit:
			functions = append(functions, span{n.Pos(), n.End()})
		case *ast.CallExpr:
			if sel, ok := n.Fun.(*ast.SelectorExpr); ok {
				if x, ok := sel.X.(*ast.Ident); ok && (x.Name == "slices" && strings.HasPrefix(sel.Sel.Name, "Sort") || x.Name == "sort") {
					sorts = append(sorts, n.Pos())
				}
			}
		}
		return true
	})
	return func(loop ast.Node) bool {
		in := span{token.NoPos, token.Pos(1 << 40)}
		for _, f := range functions {
			if f.lo <= loop.Pos() && loop.End() <= f.hi && f.hi-f.lo < in.hi-in.lo {
				in = f
			}
		}
		return slices.ContainsFunc(sorts, func(p token.Pos) bool { return p > loop.End() && p < in.hi })
	}
}

// inCheck reports whether a loop is in a function named Check: its order only
// decides which of several broken invariants is told first.
func inCheck(file *ast.File, loop ast.Node) bool {
	for _, d := range file.Decls {
		if f, ok := d.(*ast.FuncDecl); ok && f.Name.Name == "Check" && f.Pos() <= loop.Pos() && loop.End() <= f.End() {
			return true
		}
	}
	return false
}

// anyOrder reports whether a comment at the loop (on the same line, or ending on the line above)
// declares that the order does not matter.
func anyOrder(file *ast.File, loop ast.Node) bool {
	line := fset.Position(loop.Pos()).Line
	for _, c := range file.Comments {
		first, last := fset.Position(c.Pos()).Line, fset.Position(c.End()).Line
		if (first == line || last == line-1) && strings.Contains(c.Text(), "any order") {
			return true
		}
	}
	return false
}

// treeImporter type-checks packages of this module from the parsed files, and
// takes the others' export data from the build cache.
type treeImporter struct {
	folders []*folder
	done    map[string]*types.Package
	std     types.Importer
}

// Import makes treeImporter a types.Importer.
func (im *treeImporter) Import(p string) (*types.Package, error) {
	rel, ours := strings.CutPrefix(p, Module+"/")
	if !ours {
		return im.std.Import(p)
	}
	if pkg := im.done[p]; pkg != nil {
		return pkg, nil
	}
	i := slices.IndexFunc(im.folders, func(f *folder) bool { return f.path == rel })
	if i < 0 {
		return nil, fs.ErrNotExist
	}
	pkg, err := im.typeCheck(im.folders[i], nil)
	im.done[p] = pkg
	return pkg, err
}

func (im *treeImporter) typeCheck(f *folder, info *types.Info) (*types.Package, error) {
	var files []*ast.File
	for _, name := range f.sources() {
		files = append(files, f.files[name])
	}
	conf := types.Config{Importer: im}
	return conf.Check(path.Join(Module, f.path), fset, files, info)
}

func (im *treeImporter) check(t *testing.T, f *folder) *types.Info {
	t.Helper()
	info := &types.Info{Types: map[ast.Expr]types.TypeAndValue{}, Defs: map[*ast.Ident]types.Object{}, Uses: map[*ast.Ident]types.Object{}}
	if _, err := im.typeCheck(f, info); err != nil {
		t.Fatalf("type-checking %s: %v", f.path, err)
	}
	return info
}

func TestFilesAreShort(t *testing.T) {
	for _, f := range load(t) {
		for _, name := range f.names(func(string) bool { return true }) {
			limit := maxLines
			if strings.HasSuffix(name, "_test.go") || within(f.path, "test") {
				limit = maxTestLines
			}
			if ast.IsGenerated(f.files[name]) {
				continue
			}
			if n := f.lines[name]; n > limit {
				t.Errorf("%s has %d lines; the limit is %d: split it along its subjects", path.Join(f.path, name), n, limit)
			}
		}
	}
}

func TestPackagesSayWhatTheyOwn(t *testing.T) {
	for _, f := range load(t) {
		documented := false
		for _, name := range f.names(func(string) bool { return true }) {
			file := f.files[name]
			if slices.Contains(vagueNames, file.Name.Name) {
				t.Errorf("%s: package %s says nothing about what it owns", path.Join(f.path, name), file.Name.Name)
			}
			if file.Doc != nil {
				documented = true
			}
		}
		if !documented {
			t.Errorf("package %s has no package comment", f.path)
		}
	}
}

func TestInterfacesAreNarrow(t *testing.T) {
	for _, f := range load(t) {
		for _, name := range f.sources() {
			ast.Inspect(f.files[name], func(n ast.Node) bool {
				if i, ok := n.(*ast.InterfaceType); ok && i.Methods.NumFields() > maxInterfaceMethods {
					t.Errorf("%s: interface with %d methods; the limit is %d", fset.Position(n.Pos()), i.Methods.NumFields(), maxInterfaceMethods)
				}
				return true
			})
		}
	}
}

// TestNoTestIsSkipped: a skipped test guards nothing; the needs of tests are in deps.txt.
func TestNoTestIsSkipped(t *testing.T) {
	for _, f := range load(t) {
		for _, name := range f.names(func(name string) bool { return strings.HasSuffix(name, "_test.go") || within(f.path, "test") }) {
			ast.Inspect(f.files[name], func(n ast.Node) bool {
				call, ok := n.(*ast.CallExpr)
				if !ok {
					return true
				}
				if sel, ok := call.Fun.(*ast.SelectorExpr); ok {
					if x, ok := sel.X.(*ast.Ident); ok && slices.Contains([]string{"t", "b", "f", "tb"}, x.Name) && slices.Contains([]string{"Skip", "Skipf", "SkipNow"}, sel.Sel.Name) {
						t.Errorf("%s: %s.%s: a test needs what deps.txt lists, and fails without it", fset.Position(n.Pos()), x.Name, sel.Sel.Name)
					}
				}
				return true
			})
		}
	}
}
