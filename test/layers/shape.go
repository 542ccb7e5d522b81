package layers

import (
	"bytes"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

// A Shape counts the parts of one package. A package of short files may still have a type with
// hundreds of methods, or files that all call each other; the counts show both. All counts but
// InTests leave out the files *_test.go.
type Shape struct {
	Path     string // of the folder, relative to the measured root
	Types    map[string]*TypeShape
	Names    int                // exported types, functions and variables
	Arrows   map[[2]string]bool // from a calling file to each other file whose functions the first file calls
	Comments                    // of the package
	InTests  Comments           // of the files *_test.go
}

// Comments counts the words of comments.
type Comments struct {
	Words    int
	Pronouns int // among Words
}

// Percent is the share of pronouns, rounded up.
func (c Comments) Percent() int {
	return (100*c.Pronouns + c.Words - 1) / max(c.Words, 1)
}

// A TypeShape counts the parts of a type.
type TypeShape struct {
	Fields  int
	Methods int
	Files   int // with methods of the type
	Locked  int // files that lock a mutex of the type
}

// Back counts the arrows that run back: the called file calls the calling file, too.
func (s *Shape) Back() int {
	n := 0
	for a := range s.Arrows {
		if s.Arrows[[2]string{a[1], a[0]}] {
			n++
		}
	}
	return n
}

// pronouns make a reader go back for the noun.
var pronouns = strings.Fields("who whom whose whoever what whatever one ones that those these this it its itself they them their there")

// MeasureTree measures every package below root. Generated code is left out.
func MeasureTree(root string) ([]*Shape, error) {
	files, tests := map[string]map[string]*ast.File{}, map[string][]*ast.File{}
	fset := token.NewFileSet()
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
			if rel != "." && (strings.HasPrefix(base, ".") || base == "testdata" || base == "vendor" || base == "bin") {
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
		if !bytes.Contains(src, []byte("\npackage ")) && !bytes.HasPrefix(src, []byte("package ")) {
			return nil
		}
		file, err := parser.ParseFile(fset, rel, src, parser.ParseComments|parser.SkipObjectResolution)
		if err != nil {
			return err
		}
		if ast.IsGenerated(file) {
			return nil
		}
		dir := filepath.ToSlash(filepath.Dir(rel))
		if files[dir] == nil {
			files[dir] = map[string]*ast.File{}
		}
		if strings.HasSuffix(base, "_test.go") {
			tests[dir] = append(tests[dir], file)
		} else {
			files[dir][base] = file
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	var shapes []*Shape
	for _, dir := range slices.Sorted(maps.Keys(files)) {
		s := measure(dir, files[dir])
		for _, file := range tests[dir] {
			s.InTests.count(file)
		}
		shapes = append(shapes, s)
	}
	return shapes, nil
}

// measure measures the files of one package, without the tests.
func measure(dir string, files map[string]*ast.File) *Shape {
	m := &measuring{
		Shape:     &Shape{Path: dir, Types: map[string]*TypeShape{}, Arrows: map[[2]string]bool{}},
		functions: map[string]string{},
		methods:   map[string]map[string]string{},
		lockFiles: map[string]map[string]bool{},
	}
	names := slices.Sorted(maps.Keys(files))
	methodFiles := map[string]map[string]bool{}
	for _, name := range names {
		for _, d := range files[name].Decls {
			switch d := d.(type) {
			case *ast.GenDecl:
				m.declare(d)
			case *ast.FuncDecl:
				if d.Recv == nil {
					m.functions[d.Name.Name] = name
					m.export(d.Name)
					continue
				}
				recv := localType(d.Recv.List[0].Type)
				m.typeOf(recv).Methods++
				add(methodFiles, recv, name)
				if m.methods[d.Name.Name] == nil {
					m.methods[d.Name.Name] = map[string]string{}
				}
				m.methods[d.Name.Name][recv] = name
			}
		}
	}
	for t, in := range methodFiles {
		m.Types[t].Files = len(in)
	}
	for _, name := range names {
		m.count(files[name])
		for _, d := range files[name].Decls {
			if f, ok := d.(*ast.FuncDecl); ok && f.Body != nil {
				m.calls(name, files[name], f)
			}
		}
	}
	for t, in := range m.lockFiles {
		if ts := m.Types[t]; ts != nil {
			ts.Locked = len(in)
		}
	}
	return m.Shape
}

// measuring is the state of one package's measurement.
type measuring struct {
	*Shape
	functions map[string]string            // their files
	methods   map[string]map[string]string // by name and type, their files
	lockFiles map[string]map[string]bool   // by type
}

func (m *measuring) typeOf(name string) *TypeShape {
	if m.Types[name] == nil {
		m.Types[name] = &TypeShape{}
	}
	return m.Types[name]
}

func (m *measuring) export(id *ast.Ident) {
	if id.IsExported() {
		m.Names++
	}
}

// declare counts types, their fields, and exported names.
func (m *measuring) declare(d *ast.GenDecl) {
	for _, spec := range d.Specs {
		switch spec := spec.(type) {
		case *ast.TypeSpec:
			m.export(spec.Name)
			if s, ok := spec.Type.(*ast.StructType); ok {
				n := 0
				for _, f := range s.Fields.List {
					n += max(1, len(f.Names))
				}
				m.typeOf(spec.Name.Name).Fields = n
			}
		case *ast.ValueSpec:
			if d.Tok == token.VAR {
				for _, id := range spec.Names {
					m.export(id)
				}
			}
		}
	}
}

// calls adds the arrows of a function and the mutexes that the function locks. Nothing is
// type-checked: the types of receivers and parameters are known, and a call on any other
// expression counts only if all methods of the name lie in the same file of the package.
func (m *measuring) calls(file string, in *ast.File, f *ast.FuncDecl) {
	known := map[string]string{}
	for _, list := range []*ast.FieldList{f.Recv, f.Type.Params} {
		if list == nil {
			continue
		}
		for _, p := range list.List {
			for _, id := range p.Names {
				known[id.Name] = localType(p.Type)
			}
		}
	}
	imported := map[string]bool{}
	for _, spec := range in.Imports {
		p := strings.Trim(spec.Path.Value, `"`)
		imported[p[strings.LastIndex(p, "/")+1:]] = true
		if spec.Name != nil {
			imported[spec.Name.Name] = true
		}
	}
	ast.Inspect(f.Body, func(n ast.Node) bool {
		call, ok := n.(*ast.CallExpr)
		if !ok {
			return true
		}
		switch fun := call.Fun.(type) {
		case *ast.Ident:
			m.arrow(file, m.functions[fun.Name])
		case *ast.SelectorExpr:
			x, isIdent := fun.X.(*ast.Ident)
			if isIdent && known[x.Name] == "" && imported[x.Name] {
				return true
			}
			if fun.Sel.Name == "Lock" || fun.Sel.Name == "RLock" {
				if mu, ok := fun.X.(*ast.SelectorExpr); ok {
					if x, ok := mu.X.(*ast.Ident); ok && known[x.Name] != "" {
						add(m.lockFiles, known[x.Name], file)
					}
				}
			}
			has := m.methods[fun.Sel.Name]
			if isIdent && known[x.Name] != "" {
				m.arrow(file, has[known[x.Name]])
			} else if where := slices.Compact(slices.Sorted(maps.Values(has))); len(where) == 1 {
				m.arrow(file, where[0])
			}
		}
		return true
	})
}

func (m *measuring) arrow(from, to string) {
	if to != "" && from != to {
		m.Arrows[[2]string{from, to}] = true
	}
}

// count adds the comments of a file.
func (c *Comments) count(file *ast.File) {
	for _, group := range file.Comments {
		for _, w := range strings.FieldsFunc(group.Text(), func(r rune) bool {
			return !(r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z' || r == '\'')
		}) {
			c.Words++
			if slices.Contains(pronouns, strings.ToLower(w)) {
				c.Pronouns++
			}
		}
	}
}

// localType is the name of a type of this package, behind pointers and type parameters.
func localType(e ast.Expr) string {
	switch e := e.(type) {
	case *ast.Ident:
		return e.Name
	case *ast.StarExpr:
		return localType(e.X)
	case *ast.IndexExpr:
		return localType(e.X)
	case *ast.IndexListExpr:
		return localType(e.X)
	}
	return ""
}

func add(m map[string]map[string]bool, key, value string) {
	if m[key] == nil {
		m[key] = map[string]bool{}
	}
	m[key][value] = true
}
