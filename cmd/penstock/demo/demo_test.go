package demo

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// TestSteps runs, on a plain directory, every step that needs no system.
func TestSteps(t *testing.T) {
	target, tree := t.TempDir(), t.TempDir()
	if err := os.MkdirAll(filepath.Join(tree, "a", "b"), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(tree, "a", "b", "c.go"), []byte("package c\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	var out bytes.Buffer
	err := Run(t.Context(), Config{Scratch: t.TempDir(), Target: target, Tree: tree, Images: 20, ShardBytes: 1<<20 + 5, Out: &out})
	if err != nil {
		t.Fatalf("%v\n%s", err, out.String())
	}
	if !strings.Contains(out.String(), "verified 24 files") { // 1 source, 20 images, 2 shards, 1 checkpoint
		t.Errorf("output:\n%s", out.String())
	}
	left, err := os.ReadDir(target)
	if err != nil || len(left) > 0 {
		t.Errorf("left behind: %v, %v", left, err)
	}
}

// TestVerifySeesDamage: verify finds a changed byte, a missing file and an additional
// file.
func TestVerifySeesDamage(t *testing.T) {
	root := t.TempDir()
	d := &demo{root: root, cfg: Config{Out: &bytes.Buffer{}}, files: map[string]want{}}
	name := filepath.Join(root, "f")
	d.files["f"] = records(1, 3*recordBytes)
	write := func() {
		t.Helper()
		if err := writeRecords(t.Context(), name, 1, 3*recordBytes); err != nil {
			t.Fatal(err)
		}
	}
	write()
	if err := d.verify(t.Context()); err != nil {
		t.Fatal(err)
	}
	for what, damage := range map[string]func() error{
		"a changed byte": func() error {
			f, err := os.OpenFile(name, os.O_RDWR, 0)
			if err != nil {
				return err
			}
			defer f.Close()
			_, err = f.WriteAt([]byte{'!'}, recordBytes+77)
			return err
		},
		"a missing file": func() error { return os.Remove(name) },
		"a file too many": func() error {
			return os.WriteFile(filepath.Join(root, "g"), nil, 0o644)
		},
	} {
		if err := damage(); err != nil {
			t.Fatal(err)
		}
		if err := d.verify(t.Context()); err == nil {
			t.Errorf("%s was not seen", what)
		}
		os.Remove(filepath.Join(root, "g"))
		write()
	}
}
