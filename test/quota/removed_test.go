package quota

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// TestRemovedElsewhere: files that one mount removes no longer count in the quota, although the
// kernel of another mount remembers their names, and has had one of the files open until then.
func TestRemovedElsewhere(t *testing.T) {
	const files = 40
	r := newRig(t)
	r.volume("create", "q", "--attach", "/q", "--quota", "64MiB")
	a, _ := r.mount("a")
	b, _ := r.mount("b")
	name := func(at string, i int) string { return filepath.Join(at, fmt.Sprint("f", i)) }
	before := r.used()
	for i := range files {
		if err := os.WriteFile(name(a, i), make([]byte, 10000), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	for i := range files {
		if p, err := os.ReadFile(name(b, i)); err != nil || len(p) != 10000 {
			t.Fatalf("%d bytes, %v", len(p), err)
		}
	}
	open, err := os.Open(name(b, 0))
	if err != nil {
		t.Fatal(err)
	}
	defer open.Close()
	for i := range files {
		if err := os.Remove(name(a, i)); err != nil {
			t.Fatal(err)
		}
	}
	left := func(files uint64) {
		t.Helper()
		r.Until(fmt.Sprintf("%d files are left", files), func() error {
			if !prunes(t, b) {
				// Such a kernel forgets when it lacks memory.
				if err := os.WriteFile("/proc/sys/vm/drop_caches", []byte("2"), 0); err != nil {
					return err
				}
			}
			if u := r.used(); u.Files != before.Files+files {
				return fmt.Errorf("there are %d, and were %d before", u.Files, before.Files)
			}
			return nil
		})
	}
	left(1)
	if n, err := open.ReadAt(make([]byte, 10001), 0); n != 10000 {
		t.Errorf("of what is open %d bytes can be read, %v", n, err)
	}
	if err := open.Close(); err != nil {
		t.Fatal(err)
	}
	left(0)
	if u := r.used(); u.Used != before.Used {
		t.Errorf("%d bytes, %d before", u.Used, before.Used)
	}
	if _, err := os.Stat(name(b, 0)); !errors.Is(err, os.ErrNotExist) {
		t.Error(err)
	}
	r.fsck()
}

// prunes reports whether the kernel forgets files at a mount's request (FUSE 7.45).
func prunes(t *testing.T, at string) bool {
	t.Helper()
	b, err := os.ReadFile(filepath.Join(at, ".penstock", "mount"))
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(b)) {
		var minor int
		if _, err := fmt.Sscanf(line, "kernel 7.%d", &minor); err == nil {
			return minor >= 45
		}
	}
	t.Fatalf("no protocol in %q", b)
	return false
}
