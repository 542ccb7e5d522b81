package local

import (
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"testing"

	"penstock.io/penstock/meta"
)

// Copies of a cluster that was restored since are set aside, whole, once; copies of a cluster
// without a restore, or newer than the restore, stay; and no copy is given up for an older etcd.
func TestAgeCopies(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "meta")
	log := slog.New(slog.DiscardHandler)
	put := func(rel, what string) {
		t.Helper()
		path := filepath.Join(dir, rel)
		if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(what), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	there := func(rel, want string) {
		t.Helper()
		if b, err := os.ReadFile(filepath.Join(dir, rel)); err != nil || string(b) != want {
			t.Errorf("DATA: %s: %q, %v", rel, b, err)
		}
	}
	age := func(restored meta.Time, want error) {
		t.Helper()
		if err := ageCopies(dir, restored, log); !errors.Is(err, want) {
			t.Fatalf("restored at %d: %v", restored, err)
		}
	}
	age(0, nil) // not even a folder exists
	put("volume-00000001/FORMAT", "one")
	put("volume-00000002.damaged-1/FORMAT", "two")
	put("digests/x", "digest")
	put("scratch/x", "s")
	age(0, nil)
	there("volume-00000001/FORMAT", "one")

	age(1e18, nil)
	aside := "before-" + stamp(1e18) + "/"
	there(aside+"volume-00000001/FORMAT", "one")
	there(aside+"volume-00000002.damaged-1/FORMAT", "two")
	there(aside+"digests/x", "digest")
	there("scratch/x", "s")
	if _, err := os.Stat(filepath.Join(dir, "volume-00000001")); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the copy is where it was: %v", err)
	}

	put("volume-00000001/FORMAT", "new")
	age(1e18, nil)
	there("volume-00000001/FORMAT", "new")
	age(0, meta.Invalid)
	age(5e17, meta.Invalid)
	there("volume-00000001/FORMAT", "new")
	age(2e18, nil) // restored once more
	there("before-"+stamp(2e18)+"/volume-00000001/FORMAT", "new")

	// Killed between the renaming and the note: moved copies stay, the rest follows.
	put("volume-00000003/FORMAT", "three")
	put("before-"+stamp(3e18)+"/volume-00000004/FORMAT", "four")
	age(3e18, nil)
	there("before-"+stamp(3e18)+"/volume-00000003/FORMAT", "three")
	there("before-"+stamp(3e18)+"/volume-00000004/FORMAT", "four")

	if err := os.WriteFile(filepath.Join(dir, copiesFile), []byte(`{"v":2}`), 0o600); err != nil {
		t.Fatal(err)
	}
	age(3e18, meta.Version)
	if err := os.WriteFile(filepath.Join(dir, copiesFile), []byte("x"), 0o600); err != nil {
		t.Fatal(err)
	}
	age(3e18, meta.Corrupt)
}
