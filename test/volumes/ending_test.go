package volumes

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"
)

// Everything that programs wrote before a volume's end of writing, by a plain copy that syncs
// nothing, is complete: for other mounts of a volume that became immutable, and in a volume that
// comes out of the trash. Later writers get an error at once, and the mount goes on.
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
	// Mounts follow each policy when the command has returned.
	write := func(mount, name string) error {
		return os.WriteFile(filepath.Join(mount, "v", name), []byte("x"), 0o644)
	}
	for i, mount := range []string{one, two, one} {
		if err := write(mount, "again"); err != nil {
			t.Errorf("round %d: writing after immutable=false: %v", i, err)
		}
		r.Must("volume", "set", "v", "--immutable")
		r.fails("writing after immutable", write(mount, "again"), unix.EROFS)
		r.Must("volume", "set", "v", "--immutable=false", "--seal-on-close")
		if err := write(mount, fmt.Sprint("sealed", i)); err != nil {
			t.Errorf("round %d: writing after immutable=false: %v", i, err)
		}
		// The kernel tells of the end of an open file after close(2) has returned.
		r.Until("a file that was closed after seal-on-close is sealed", func() error {
			if err := write(mount, fmt.Sprint("sealed", i)); !errors.Is(err, unix.EPERM) {
				return fmt.Errorf("writing to it: %v", err)
			}
			return nil
		})
		r.Must("volume", "set", "v", "--seal-on-close=false")
		for range 2 {
			if err := write(mount, fmt.Sprint("open", i)); err != nil {
				t.Errorf("round %d: writing to a file that was closed after seal-on-close=false: %v", i, err)
			}
		}
	}
	open = copyAll("deleted")
	r.Must("volume", "detach", "v")
	r.Must("volume", "delete", "v", "--yes")
	open.Close() // whatever the error
	r.Must("volume", "undelete", "v")
	r.Must("volume", "attach", "v", "/v")
	r.Until("the volume hangs there again", func() error { _, err := os.Stat(filepath.Join(two, "v", "kept")); return err })
	same(two, "kept")
	same(two, "deleted")
}
