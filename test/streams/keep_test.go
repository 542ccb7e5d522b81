package streams

import (
	"errors"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"
)

// keeps tries, as root, every call that would change the contents of a stream's files, or would
// put a file beside the files, through a mount; and then the calls that must work.
func keeps(t *testing.T, stream, segment string) {
	t.Helper()
	dir := filepath.Dir(segment)
	foreign := filepath.Join(stream, "foreign")
	if err := os.WriteFile(foreign, []byte("foreign"), 0o644); err != nil {
		t.Fatal(err)
	}
	before, err := os.ReadFile(segment)
	if err != nil {
		t.Fatal(err)
	}
	read, err := os.Open(segment)
	if err != nil {
		t.Fatal(err)
	}
	defer read.Close()
	open := func(name string, flags int) func() error {
		return func() error {
			f, err := os.OpenFile(name, flags, 0o644)
			if err == nil {
				f.Close()
			}
			return err
		}
	}
	new := filepath.Join(dir, "00000000000000009999.seg")
	for name, try := range map[string]func() error{
		"open to write":    open(segment, os.O_WRONLY),
		"open to map":      open(segment, os.O_RDWR),
		"open to append":   open(segment, os.O_WRONLY|os.O_APPEND),
		"O_TRUNC":          open(segment, os.O_WRONLY|os.O_TRUNC),
		"O_CREAT":          open(segment, os.O_WRONLY|os.O_CREATE),
		"truncate":         func() error { return os.Truncate(segment, 1) },
		"grow":             func() error { return os.Truncate(segment, 1<<30) },
		"create":           open(new, os.O_RDWR|os.O_CREATE|os.O_EXCL),
		"O_TMPFILE":        open(dir, unix.O_TMPFILE|os.O_RDWR),
		"mkdir":            func() error { return os.Mkdir(new, 0o755) },
		"mkdir of a log":   func() error { return os.Mkdir(filepath.Join(filepath.Dir(dir), "99"), 0o755) },
		"symlink":          func() error { return os.Symlink("x", new) },
		"mknod":            func() error { return unix.Mkfifo(new, 0o644) },
		"link":             func() error { return os.Link(foreign, new) },
		"rename":           func() error { return os.Rename(foreign, new) },
		"rename over":      func() error { return os.Rename(foreign, segment) },
		"exchange":         func() error { return unix.Renameat2(0, segment, 0, foreign, unix.RENAME_EXCHANGE) },
		"write the spec":   open(filepath.Join(stream, "stream.json"), os.O_WRONLY),
		"write of a group": open(filepath.Join(stream, "groups", "g.offsets"), os.O_WRONLY),
		"a group":          open(filepath.Join(stream, "groups", "h.offsets"), os.O_WRONLY|os.O_CREATE),
	} {
		if err := try(); !errors.Is(err, unix.EPERM) {
			t.Errorf("DATA: %s: %v", name, err)
		}
	}
	if after, err := os.ReadFile(segment); err != nil || string(after) != string(before) {
		t.Errorf("DATA: a segment of %d bytes has %d, %v", len(before), len(after), err)
	}
	outside := filepath.Join(stream, "link")
	for name, err := range map[string]error{
		"chmod":      os.Chmod(segment, 0o444),
		"chown":      os.Chown(dir, 0, 0),
		"an ACL":     unix.Setxattr(stream, "system.posix_acl_access", []byte("\x02\x00\x00\x00\x01\x00\x07\x00\xff\xff\xff\xff\x04\x00\x05\x00\xff\xff\xff\xff\x20\x00\x05\x00\xff\xff\xff\xff"), 0),
		"link away":  os.Link(segment, outside),
		"rm":         os.Remove(outside),
		"rm foreign": os.Remove(foreign),
	} {
		if err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
}
