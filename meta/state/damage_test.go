package state

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"penstock.io/penstock/meta"
)

// Whatever kind of file of a state directory is cut (to nothing, to half, by its last byte) or
// has a byte changed, the store either opens with its old contents, or returns Corrupt, upon
// which the caller puts the directory aside and makes the directory anew from the checkpoint and
// the journal. The store returns no other error, since a caller stops at any other.
func TestDamageOfEveryFile(t *testing.T) {
	const n = 400
	good := filepath.Join(t.TempDir(), "good")
	if err := fill(t, good, shared(t), n).Close(); err != nil {
		t.Fatal(err)
	}
	damages := map[string]func([]byte) []byte{
		"empty":         func(b []byte) []byte { return nil },
		"half":          func(b []byte) []byte { return b[:len(b)/2] },
		"one byte less": func(b []byte) []byte { return b[:max(0, len(b)-1)] },
		"first flipped": func(b []byte) []byte { return flipped(b, 0) },
		"mid flipped":   func(b []byte) []byte { return flipped(b, len(b)/2) },
		"last flipped":  func(b []byte) []byte { return flipped(b, len(b)-1) },
		"zeros at end":  func(b []byte) []byte { clear(b[len(b)/2:]); return b },
	}
	kinds := map[string]bool{}
	err := filepath.WalkDir(good, func(path string, d os.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		rel, err := filepath.Rel(good, path)
		if err != nil {
			return err
		}
		kinds[kindOfFile(rel)] = true
		for name, damage := range damages {
			t.Run(rel+" "+name, func(t *testing.T) {
				dir := filepath.Join(t.TempDir(), "v")
				if err := os.CopyFS(dir, os.DirFS(good)); err != nil {
					t.Fatal(err)
				}
				file := filepath.Join(dir, rel)
				b, err := os.ReadFile(file)
				if err != nil {
					t.Fatal(err)
				}
				if err := os.WriteFile(file, damage(b), 0o600); err != nil {
					t.Fatal(err)
				}
				sh := NewShared(1<<20, 10, nil)
				defer sh.Close()
				if err := readWhole(dir, sh, n); err != nil {
					want(t, err, meta.Corrupt)
				}
			})
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	for _, kind := range []string{"FORMAT", ".sst", "MANIFEST", "OPTIONS", "marker"} {
		if !kinds[kind] {
			t.Errorf("no file of kind %s was damaged: %v", kind, kinds)
		}
	}
}

// readWhole opens a store made by fill and reads all of the store.
func readWhole(dir string, sh *Shared, n int) error {
	s, err := Open(dir, vol, sh)
	if err != nil {
		return err
	}
	defer s.closeDB()
	// An older whole store would do: the caller reads the journal from its position on.
	last := int(s.Applied().Seq)
	if _, ok, err := s.Get(key(last + 1)); err != nil || ok || last > n {
		return fmt.Errorf("DATA: it opens at entry %d of %d, and has the next one's key: %w", last, n, err)
	}
	for i := 1; i <= last; i++ {
		v, ok, err := s.Get(key(i))
		if err != nil {
			return err
		}
		if !ok || !bytes.Equal(v, bytes.Repeat([]byte{byte(i)}, 500)) {
			return fmt.Errorf("DATA: key %d has a wrong value", i)
		}
	}
	return nil
}

func flipped(b []byte, at int) []byte {
	if len(b) > 0 {
		b[at] ^= 0x41
	}
	return b
}

func kindOfFile(rel string) string {
	base := filepath.Base(rel)
	for _, prefix := range []string{"MANIFEST", "OPTIONS", "marker"} {
		if strings.HasPrefix(base, prefix) {
			return prefix
		}
	}
	if ext := filepath.Ext(base); ext != "" {
		return ext
	}
	return base
}
