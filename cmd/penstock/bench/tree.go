package bench

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
)

// pattern occurs in some files of any tree of Go sources.
const pattern = "func NewReader("

// sourceTree is the packed source tree of the tree rows, with the counts that the tools must
// find.
type sourceTree struct {
	tar     string // path
	entries int    // files and directories, without the root
	goFiles int
	matches int // files with the pattern
	bytes   int64
}

// treeGroup runs common tools on a source tree: tar, find, grep, rm.
func treeGroup() group {
	t := &treeState{}
	src := func(s *side) string { return filepath.Join(s.dir, "src") }
	grep := func(s *side) (float64, error) {
		out, err := tool("grep", "-rlF", "--", pattern, src(s))
		if err != nil {
			return 0, err
		}
		if n := countLines(out); n != t.tree.matches {
			return 0, fmt.Errorf("grep found %d files, the source tree has %d: %w", n, t.tree.matches, errMismatch)
		}
		return 0, nil
	}
	return group{name: "tree", prepare: func(s *side) error { return t.pack(s.cfg) }, rows: []row{
		{name: "untar", title: "tar x of a source tree", unit: Seconds, run: func(s *side) (float64, error) {
			_, err := tool("tar", "-C", s.dir, "-xf", t.tree.tar)
			return 0, err
		}},
		{name: "find", title: "find in the tree", unit: Seconds, run: func(s *side) (float64, error) {
			out, err := tool("find", src(s), "-type", "f", "-name", "*.go")
			if err != nil {
				return 0, err
			}
			if n := countLines(out); n != t.tree.goFiles {
				return 0, fmt.Errorf("find printed %d files, the source tree has %d: %w", n, t.tree.goFiles, errMismatch)
			}
			return 0, nil
		}},
		{name: "grep-cold", title: "grep -r in the tree, cold", unit: Seconds, cold: true, run: grep},
		{name: "grep-warm", title: "grep -r in the tree, warm", unit: Seconds, before: func(s *side) error { _, err := grep(s); return err }, run: grep},
		{name: "rm-rf", title: "rm -rf of the tree", unit: Seconds, removes: true,
			before: func(s *side) error { return t.verify(src(s)) }, run: func(s *side) (float64, error) {
				_, err := tool("rm", "-rf", src(s))
				return 0, err
			}},
	}}
}

// treeState packs the tree at the first use.
type treeState struct {
	once sync.Once
	err  error
	tree sourceTree
}

func (t *treeState) pack(cfg *Config) error {
	t.once.Do(func() { t.err = t.doPack(cfg) })
	return t.err
}

func (t *treeState) doPack(cfg *Config) error {
	from := cfg.Tree
	if from == "" {
		var err error
		if from, err = goSources(); err != nil {
			return err
		}
	}
	dir, err := os.MkdirTemp(cfg.Scratch, "penstock-bench-tar-")
	if err != nil {
		return err
	}
	t.tree.tar = filepath.Join(dir, "tree.tar")
	f, err := os.Create(t.tree.tar)
	if err != nil {
		return err
	}
	// The open file keeps the packed tree, so the scratch folder is empty even after a crash.
	if err := os.RemoveAll(dir); err != nil {
		return err
	}
	t.tree.tar = fmt.Sprintf("/proc/%d/fd/%d", os.Getpid(), f.Fd())
	runtime.SetFinalizer(t, func(*treeState) { f.Close() })
	cmd := exec.Command("tar", "-C", from, "--transform", "s,^\\.,src,", "--owner=0", "--group=0", "-cf", "-", ".")
	cmd.Stdout = f
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	if err := cmd.Run(); err != nil {
		return fmt.Errorf("packing %s: %w\n%s", from, err, stderr.Bytes())
	}
	return t.tree.count(from)
}

// goSources finds the sources of the installed Go.
func goSources() (string, error) {
	out, err := exec.Command("go", "env", "GOROOT").Output()
	if err != nil {
		return "", fmt.Errorf("no source tree given (--tree), and no Go found to take its sources: %w", err)
	}
	return filepath.Join(strings.TrimSpace(string(out)), "src"), nil
}

// count counts a tree's entries, Go files, bytes and matches. count does not follow links.
func (t *sourceTree) count(root string) error {
	*t = sourceTree{tar: t.tar}
	return filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err != nil || path == root {
			return err
		}
		t.entries++
		if !d.Type().IsRegular() {
			return nil
		}
		if strings.HasSuffix(path, ".go") {
			t.goFiles++
		}
		b, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		t.bytes += int64(len(b))
		if bytes.Contains(b, []byte(pattern)) {
			t.matches++
		}
		return nil
	})
}

// verify compares the unpacked tree's counts with the packed tree's.
func (t *treeState) verify(root string) error {
	got := sourceTree{tar: t.tree.tar}
	if err := got.count(root); err != nil {
		return err
	}
	if got != t.tree {
		return fmt.Errorf("the unpacked tree is %+v, packed was %+v: %w", got, t.tree, errMismatch)
	}
	return nil
}

// tool runs a program in the C locale and returns its output.
func tool(name string, args ...string) ([]byte, error) {
	cmd := exec.Command(name, args...)
	cmd.Env = append(os.Environ(), "LC_ALL=C")
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		return nil, fmt.Errorf("%s: %w\n%s", name, errors.Join(err), stderr.Bytes())
	}
	return out, nil
}

func countLines(b []byte) int { return bytes.Count(b, []byte("\n")) }
