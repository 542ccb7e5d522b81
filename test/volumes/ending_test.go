package volumes

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"
)

// What programs wrote before writing ends in a volume, by a plain copy that syncs nothing,
// is all there: for other mounts of a volume that became immutable, and in one that comes
// back out of the trash. Who writes later is told at once, and the mount goes on.
func TestWritingEnds(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.Must("volume", "create", "v", "--attach", "/v", "--trash", "1h")
	one, two := r.mount("/", "one"), r.mount("/", "two")
	const files = 300
	content := func(i int) []byte { return bytes.Repeat([]byte{byte(i), byte(i >> 8), 7}, 100+i*50) }
	copyAll := func(name string) *os.File {
		t.Helper()
		dir := filepath.Join(one, "v", name)
		if err := os.Mkdir(dir, 0o755); err != nil {
			t.Fatal(err)
		}
		for i := range files {
			if err := os.WriteFile(filepath.Join(dir, fmt.Sprint(i)), content(i), 0o644); err != nil {
				t.Fatal(err)
			}
		}
		f, err := os.Create(filepath.Join(dir, "open"))
		if err == nil {
			_, err = f.Write(content(files))
		}
		if err != nil {
			t.Fatal(err)
		}
		return f
	}
	same := func(mount, name string) {
		t.Helper()
		for i := range files + 1 {
			file := filepath.Join(mount, "v", name, fmt.Sprint(i))
			if i == files {
				file = filepath.Join(mount, "v", name, "open")
			}
			if b, err := os.ReadFile(file); err != nil || !bytes.Equal(b, content(i)) {
				t.Fatalf("DATA: %s has %d bytes, not the %d that were written, %v", file, len(b), len(content(i)), err)
			}
		}
	}

	open := copyAll("kept")
	r.Must("volume", "set", "v", "--immutable")
	same(two, "kept")
	same(one, "kept")
	_, err := open.Write([]byte("later"))
	r.fails("writing to a file that was open", err, unix.EROFS)
	_, err = os.OpenFile(filepath.Join(one, "v", "kept", "1"), os.O_WRONLY|os.O_APPEND, 0)
	r.fails("opening a file to write", err, unix.EROFS)
	if err := open.Close(); err != nil {
		t.Error("closing it: ", err)
	}
	dir, err := os.Open(filepath.Join(one, "v"))
	if err == nil {
		err = unix.Syncfs(int(dir.Fd()))
		dir.Close()
	}
	if err != nil {
		t.Error("syncing the mount afterwards: ", err)
	}

	r.Must("volume", "set", "v", "--immutable=false")
	// Bytes tell, and not the name: the mount asks for the policy each 2 s, and refuses them by
	// what it knows.
	r.Until("the mount may write again", func() error { return os.WriteFile(filepath.Join(one, "v", "again"), []byte("x"), 0o644) })
	open = copyAll("deleted")
	r.Must("volume", "detach", "v")
	r.Must("volume", "delete", "v", "--yes")
	open.Close() // whatever it is told
	r.Must("volume", "undelete", "v")
	r.Must("volume", "attach", "v", "/v")
	r.Until("the volume hangs there again", func() error { _, err := os.Stat(filepath.Join(two, "v", "kept")); return err })
	same(two, "kept")
	same(two, "deleted")
}
