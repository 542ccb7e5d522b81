package layers

import (
	"fmt"
	"go/ast"
	"io/fs"
	"maps"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// documents are the pages of the repository by path.
func documents(t *testing.T) map[string]string {
	t.Helper()
	pages := map[string]string{}
	read := func(name string) {
		b, err := os.ReadFile(filepath.Join("../..", name))
		if err != nil {
			t.Fatal(err)
		}
		pages[filepath.ToSlash(name)] = string(b)
	}
	read("README.md")
	read("CONTRIBUTING.md")
	err := filepath.WalkDir("../../docs", func(name string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() || filepath.Ext(name) != ".md" {
			return err
		}
		rel, err := filepath.Rel("../..", name)
		if err == nil {
			read(rel)
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return pages
}

var (
	link    = regexp.MustCompile(`\]\(([^)\s]+)\)`)
	heading = regexp.MustCompile(`(?m)^#+ (.*)$`)
	fence   = regexp.MustCompile(`(?m)^    .*$`)
)

// anchors are the names of a page's headings in links.
func anchors(page string) map[string]bool {
	all := map[string]bool{}
	for _, h := range heading.FindAllStringSubmatch(fence.ReplaceAllString(page, ""), -1) {
		var b strings.Builder
		for _, r := range strings.ToLower(link.ReplaceAllString(h[1], "]")) {
			switch {
			case r == ' ':
				b.WriteByte('-')
			case r == '-' || r == '_' || r >= 'a' && r <= 'z' || r >= '0' && r <= '9' || r > 127:
				b.WriteRune(r)
			}
		}
		all[b.String()] = true
	}
	return all
}

// badLinks lists links without a target, and pages that no links lead to from README.md. there
// reports whether a file other than a page exists.
func badLinks(pages map[string]string, there func(string) bool) (bad []string) {
	reached, next := map[string]bool{"README.md": true}, []string{"README.md"}
	for len(next) > 0 {
		from := next[0]
		next = next[1:]
		for _, m := range link.FindAllStringSubmatch(fence.ReplaceAllString(pages[from], ""), -1) {
			if strings.Contains(m[1], "://") {
				continue
			}
			to, anchor, _ := strings.Cut(m[1], "#")
			if to = path.Join(path.Dir(from), to); strings.HasPrefix(m[1], "#") {
				to = from
			}
			page, is := pages[to]
			switch {
			case !is && !there(to):
				bad = append(bad, fmt.Sprintf("%s: nothing is at %s", from, m[1]))
			case is && anchor != "" && !anchors(page)[anchor]:
				bad = append(bad, fmt.Sprintf("%s: %s has no heading for #%s", from, to, anchor))
			}
			if is && !reached[to] {
				reached[to] = true
				next = append(next, to)
			}
		}
	}
	for name := range pages { // in any order: sorted below
		if !reached[name] {
			bad = append(bad, name+": no links lead there from README.md")
		}
	}
	slices.Sort(bad)
	return bad
}

// TestDocumentsAreLinked: every page can be reached from README.md, and no link
// leads nowhere.
func TestDocumentsAreLinked(t *testing.T) {
	pages := documents(t)
	if len(pages) < 20 {
		t.Fatalf("only %d pages: the test looks in the wrong place", len(pages))
	}
	for _, b := range badLinks(pages, func(name string) bool { _, err := os.Stat(filepath.Join("../..", name)); return err == nil }) {
		t.Error(b)
	}
}

// TestBadLinksAreSeen is the control of the test above.
func TestBadLinksAreSeen(t *testing.T) {
	pages := map[string]string{
		"README.md":        "[a](docs/a.md) [b](docs/a.md#what-is-new-here) [c](LICENSE) [d](https://example.com/x) [e](none.md)\n\n    [f](code.md)\n",
		"docs/a.md":        "# What is `new`, here?\n[up](../README.md#nothing) [self](#what-is-new-here) [self](#no)",
		"docs/parts/b.md":  "[a](../a.md)",
		"docs/parts/bb.md": "[b](b.md)",
	}
	want := []string{
		"README.md: nothing is at none.md",
		"docs/a.md: README.md has no heading for #nothing",
		"docs/a.md: docs/a.md has no heading for #no",
		"docs/parts/b.md: no links lead there from README.md",
		"docs/parts/bb.md: no links lead there from README.md",
	}
	if got := badLinks(pages, func(name string) bool { return name == "LICENSE" }); !slices.Equal(got, want) {
		t.Errorf("got  %q\nwant %q", got, want)
	}
}

var (
	namedTest = regexp.MustCompile(`\b((?:Test|Fuzz)[A-Z]\w*)(\*|\.\.\.)?`)
	namedFile = regexp.MustCompile("`((?:[a-z0-9]+/)+[a-z0-9_]+\\.go)`")
	cited     = regexp.MustCompile(`\b[Rr]ules? (\d+)`)
)

// TestDocumentsNameWhatIsThere: the tests and files that pages name, and the rules that sources
// and pages cite by number, exist.
func TestDocumentsNameWhatIsThere(t *testing.T) {
	functions, pages := map[string]bool{}, documents(t)
	rules := ruleNumbers(pages["docs/rules.md"])
	if len(rules) < 10 {
		t.Fatalf("docs/rules.md has %d rules", len(rules))
	}
	cites := func(where, text string) {
		for _, m := range cited.FindAllStringSubmatch(text, -1) {
			if !rules[m[1]] {
				t.Errorf("%s cites rule %s, which docs/rules.md does not have", where, m[1])
			}
		}
	}
	for _, f := range load(t) {
		for _, name := range f.names(func(string) bool { return true }) {
			file := f.files[name]
			for _, d := range file.Decls {
				if fn, is := d.(*ast.FuncDecl); is && fn.Recv == nil {
					functions[fn.Name.Name] = true
				}
			}
			for _, c := range file.Comments {
				if path.Join(f.path, name) != "test/layers/docs_test.go" {
					cites(path.Join(f.path, name), c.Text())
				}
			}
		}
	}
	for name, page := range pages { // in any order: each is independent
		cites(name, page)
		for _, m := range namedTest.FindAllStringSubmatch(page, -1) {
			begins := func(f string) bool { return strings.HasPrefix(f, m[1]) } // "TestPull*", "TestBulk..."
			if !functions[m[1]] && (m[2] == "" || !slices.ContainsFunc(slices.Collect(maps.Keys(functions)), begins)) {
				t.Errorf("%s names %s, which is nowhere", name, m[0])
			}
		}
		for _, m := range namedFile.FindAllStringSubmatch(page, -1) {
			if _, err := os.Stat(filepath.Join("../..", m[1])); err != nil {
				t.Errorf("%s names %s, which is not there", name, m[1])
			}
		}
	}
}

// ruleNumbers are the numbers of the headings "## N. ...".
func ruleNumbers(page string) map[string]bool {
	all := map[string]bool{}
	for _, m := range regexp.MustCompile(`(?m)^## (\d+)\. `).FindAllStringSubmatch(page, -1) {
		all[m[1]] = true
	}
	return all
}
