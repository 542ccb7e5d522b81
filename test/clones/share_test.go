package clones

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"

	"penstock.io/penstock/test/program"
)

// TestPageCacheIsShared: an unwritten file of a clone, and a copy of it, are read from
// the page cache that the origin's reader filled. Bytes written in the clone have their
// own pages.
func TestPageCacheIsShared(t *testing.T) {
	r := newRig(t)
	r.Must("volume", "create", "data", "--attach", "/data", "--seal-on-close")
	const size = 9 << 20
	for _, name := range []string{"kept", "changed"} {
		r.write(filepath.Join("data", name), random(size))
	}
	r.Must("clone", "create", "data", "copy", "--attach", "/copy")
	if err := os.Remove(r.path("copy", "changed")); err != nil { // a sealed file must be made anew
		t.Fatal(err)
	}
	r.write("copy/changed", bytes.Repeat([]byte("mine"), size/4))
	if out, err := exec.Command("cp", "--reflink=auto", r.path("copy", "kept"), r.path("copy", "again")).CombinedOutput(); err != nil {
		t.Fatal(err, string(out))
	}
	var was [2][]byte
	for i, name := range []string{"kept", "changed"} {
		b, err := os.ReadFile(r.path("copy", name)) // the read verifies the file
		if err != nil {
			t.Fatal(err)
		}
		was[i] = b
	}
	origin, kept, changed := r.mapped("data", "kept"), r.mapped("copy", "kept"), r.mapped("copy", "changed")
	again, theirs := r.mapped("copy", "again"), r.mapped("data", "changed")
	r.Until("chunks out of the page cache", func() error {
		r.disk(func(p string, _ fs.FileInfo) error { return uncache(p) })
		for _, m := range []mapping{origin, kept, again, theirs} {
			if err := uncache(m.path); err != nil { // in case the kernel has pages of the mount's file
				return err
			}
			if n := m.resident(); n > 0 {
				return fmt.Errorf("%s: %d pages", m.path, n)
			}
		}
		return nil
	})
	for _, name := range []string{"kept", "changed"} {
		if _, err := os.ReadFile(r.path("data", name)); err != nil {
			t.Fatal(err)
		}
	}
	const pages = size / 4096
	for what, m := range map[string]mapping{"the origin": origin, "the clone": kept, "a copy in the clone": again} {
		if n := m.resident(); n < pages*9/10 { // the kernel may need some
			t.Errorf("%s has %d of %d pages in the page cache after the origin was read", what, n, pages)
		}
	}
	if !bytes.Equal(kept.b, was[0]) || !bytes.Equal(again.b, was[0]) || !bytes.Equal(changed.b, was[1]) || bytes.Equal(theirs.b, was[1]) {
		t.Error("DATA: the clone shows other bytes")
	}
}

// mapping is a file that is mapped into memory, and not touched.
type mapping struct {
	r    *rig
	path string
	b    []byte
}

func (r *rig) mapped(p ...string) mapping {
	r.T.Helper()
	f, err := os.Open(r.path(p...))
	if err != nil {
		r.T.Fatal(err)
	}
	defer f.Close()
	st, err := f.Stat()
	if err != nil {
		r.T.Fatal(err)
	}
	b, err := unix.Mmap(int(f.Fd()), 0, int(st.Size()), unix.PROT_READ, unix.MAP_SHARED)
	if err != nil {
		r.T.Fatal(err)
	}
	r.T.Cleanup(func() { unix.Munmap(b) })
	return mapping{r, r.path(p...), b}
}

// resident counts the mapping's pages in the kernel's memory.
func (m mapping) resident() (n int) {
	m.r.T.Helper()
	in := make([]byte, (len(m.b)+4095)/4096)
	if _, _, e := unix.Syscall(unix.SYS_MINCORE, uintptr(unsafe.Pointer(&m.b[0])), uintptr(len(m.b)), uintptr(unsafe.Pointer(&in[0]))); e != 0 {
		m.r.T.Fatal(e)
	}
	for _, b := range in {
		n += int(b & 1)
	}
	return n
}

// uncache makes the kernel drop a file's pages from memory.
func uncache(path string) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	return errors.Join(f.Sync(), unix.Fadvise(int(f.Fd()), 0, 0, unix.FADV_DONTNEED))
}

// disk calls fn for every file of the remaining chunk server.
func (r *rig) disk(fn func(p string, st fs.FileInfo) error) {
	r.T.Helper()
	if err := filepath.WalkDir(filepath.Join(r.Dir, "d", "chunks"), func(p string, e fs.DirEntry, err error) error {
		if err == nil && e.Type().IsRegular() {
			var st fs.FileInfo
			if st, err = e.Info(); err == nil {
				err = fn(p, st)
			}
		}
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		return err
	}); err != nil {
		r.T.Fatal(err)
	}
}

// TestCopiesTakeNoRoom: cp and copy_file_range within a volume, and out of a snapshot,
// send no bytes and take none of the disk.
func TestCopiesTakeNoRoom(t *testing.T) {
	r := newRig(t)
	r.Must("volume", "create", "data", "--attach", "/data")
	const size = 24 << 20
	r.write("data/big", random(size))
	r.Must("snapshot", "create", "data", "v1")
	sent := func() float64 {
		t.Helper()
		m, err := program.Metrics(filepath.Join(r.Dir, "d", "admin.sock"))
		n, ok := m["penstock_client_appended_bytes_total"]
		if err != nil || !ok {
			t.Fatal(n, err)
		}
		return n
	}
	room := func() (n int64) {
		t.Helper()
		r.disk(func(_ string, st fs.FileInfo) error {
			n += st.Sys().(*syscall.Stat_t).Blocks * 512
			return nil
		})
		return n
	}
	began, had := sent(), room()
	if began < size || had < size {
		t.Fatalf("%.0f bytes sent, %d on the disk, for a file of %d: nothing would be seen", began, had, size)
	}
	for i := range 4 {
		for _, from := range []string{r.path("data", "big"), r.path("data", ".snapshot", "v1", "big")} {
			to := r.path("data", fmt.Sprint("copy", i, filepath.Base(filepath.Dir(from))))
			if out, err := exec.Command("cp", "--reflink=auto", from, to).CombinedOutput(); err != nil {
				t.Fatal(err, string(out))
			}
			copyRange(t, from, to+".range")
		}
	}
	if n, b := sent()-began, room()-had; n != 0 || b > size/2 {
		t.Errorf("16 copies of %d bytes sent %.0f bytes and take %d on the disk", size, n, b)
	}
	want := r.tree("data")
	for name, sum := range want {
		if sum != want["big"] {
			t.Errorf("%s is %s, not %s", name, sum, want["big"])
		}
	}
	if len(want) != 17 {
		t.Errorf("%d files", len(want))
	}
	r.Must("fsck")
}
