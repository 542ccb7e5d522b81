package layers

import (
	"go/ast"
	"go/token"
	"slices"
	"strings"
	"testing"
)

// Places where a test compares bytes that are no user's data: formats that a test codes again,
// certificates, configuration.
var notData = []string{
	"chunkserver/wire", "cmd/...", "csi/...", "fuse/conn_test.go", "meta", "meta/admin/...", "meta/cluster/...", "meta/journal", "meta/keep", "meta/peer",
	"test/deploy", "test/helm/...", "test/k8s/...", "test/layers", "test/mirror/readers_test.go", "test/sim/...", "test/verdict/...",
}

// A test that finds other bytes than were written reports DATA:, so that no reader takes the
// failure for a slow moment's fault (test/verdict).
func TestWrongBytesAreCalledSo(t *testing.T) {
	seen := 0
	for _, f := range load(t) {
		for _, name := range f.names(func(name string) bool {
			return (strings.HasSuffix(name, "_test.go") || within(f.path, "test")) && !skipped(slices.Concat(notData, standardOnly, pure), f.path, name)
		}) {
			ast.Inspect(f.files[name], func(n ast.Node) bool {
				if i, ok := n.(*ast.IfStmt); ok && contains(i.Cond, unequal) {
					for _, call := range reports(i.Body) {
						seen++
						if lit, ok := call.Args[0].(*ast.BasicLit); !ok || !strings.HasPrefix(lit.Value[1:], "DATA:") {
							t.Errorf("%s: other bytes are told without DATA:", fset.Position(call.Pos()))
						}
					}
				}
				return true
			})
		}
	}
	if seen < 50 {
		t.Errorf("only %d comparisons of bytes: the test looks in the wrong place", seen)
	}
}

// skipped says whether a list of folders, trees (folder/...) and files has a file.
func skipped(list []string, dir, name string) bool {
	return slices.ContainsFunc(list, func(p string) bool {
		tree, is := strings.CutSuffix(p, "/...")
		return p == dir || p == dir+"/"+name || is && within(dir, tree)
	})
}

// unequal is !bytes.Equal(...).
func unequal(n ast.Node) bool {
	not, ok := n.(*ast.UnaryExpr)
	if !ok || not.Op != token.NOT {
		return false
	}
	call, ok := not.X.(*ast.CallExpr)
	if !ok {
		return false
	}
	fun, ok := call.Fun.(*ast.SelectorExpr)
	if !ok {
		return false
	}
	pkg, ok := fun.X.(*ast.Ident)
	return ok && pkg.Name == "bytes" && fun.Sel.Name == "Equal"
}

func contains(n ast.Node, is func(ast.Node) bool) bool {
	found := false
	ast.Inspect(n, func(n ast.Node) bool {
		found = found || n != nil && is(n)
		return !found
	})
	return found
}

// reports are the calls by which a test or its helper reports a failure.
func reports(body *ast.BlockStmt) []*ast.CallExpr {
	var calls []*ast.CallExpr
	for _, st := range body.List {
		// An if inside has a condition of its own.
		if _, ok := st.(*ast.IfStmt); ok {
			continue
		}
		ast.Inspect(st, func(n ast.Node) bool {
			call, ok := n.(*ast.CallExpr)
			if !ok || len(call.Args) == 0 {
				return true
			}
			if fun, ok := call.Fun.(*ast.SelectorExpr); ok {
				switch fun.Sel.Name {
				case "Error", "Errorf", "Fatal", "Fatalf":
					calls = append(calls, call)
				}
			}
			return true
		})
	}
	return calls
}

// No program calls sync(2): the call waits for every mount of the machine, also for a mount that
// stands still, and can't be killed meanwhile.
func TestNobodySyncsTheMachine(t *testing.T) {
	for _, f := range load(t) {
		for _, name := range f.names(func(string) bool { return true }) {
			ast.Inspect(f.files[name], func(n ast.Node) bool {
				if sel, ok := n.(*ast.SelectorExpr); ok && sel.Sel.Name == "Sync" {
					if pkg, ok := sel.X.(*ast.Ident); ok && (pkg.Name == "unix" || pkg.Name == "syscall") {
						t.Errorf("%s: sync(2); syncfs or fsync what is meant", fset.Position(n.Pos()))
					}
				}
				return true
			})
		}
	}
}
