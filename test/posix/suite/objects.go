package suite

import (
	"bytes"
	"fmt"
	"os"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// Type is a file type by the name that cases use for it.
type Type string

const (
	none    Type = ""
	regular Type = "regular"
	dir     Type = "dir"
	fifo    Type = "fifo"
	block   Type = "block"
	char    Type = "char"
	socket  Type = "socket"
	symlink Type = "symlink"
)

var (
	allTypes    = []Type{regular, dir, fifo, block, char, socket, symlink}
	nonDirs     = []Type{regular, fifo, block, char, socket, symlink}
	nonLinks    = []Type{regular, dir, fifo, block, char, socket}
	plainTypes  = []Type{regular, fifo, block, char, socket} // neither directory nor link
	specialOnes = []Type{fifo, block, char, socket}
)

var typeBits = map[Type]uint32{
	regular: unix.S_IFREG, dir: unix.S_IFDIR, fifo: unix.S_IFIFO, block: unix.S_IFBLK,
	char: unix.S_IFCHR, socket: unix.S_IFSOCK, symlink: unix.S_IFLNK,
}

// Device numbers of nodes: /dev/null, and an unused loop device.
var (
	nullDevice  = unix.Mkdev(1, 3)
	blockDevice = unix.Mkdev(7, 240)
)

// Make creates an object of the type. A regular file is an empty one, a
// symbolic link points to "target".
func (t *T) Make(typ Type, path string, mode uint32) {
	t.OK(fmt.Sprintf("making %s %s", typ, short(path)), create(typ, path, mode))
}

func create(typ Type, path string, mode uint32) error {
	switch typ {
	case regular:
		fd, err := unix.Open(path, unix.O_CREAT|unix.O_EXCL|unix.O_WRONLY|unix.O_CLOEXEC, mode)
		if err != nil {
			return err
		}
		return unix.Close(fd)
	case dir:
		return unix.Mkdir(path, mode)
	case symlink:
		return unix.Symlink("target", path)
	case char:
		return unix.Mknod(path, typeBits[typ]|mode, int(nullDevice))
	case block:
		return unix.Mknod(path, typeBits[typ]|mode, int(blockDevice))
	default:
		return unix.Mknod(path, typeBits[typ]|mode, 0)
	}
}

// remove removes an object of the type.
func remove(typ Type, path string) error {
	if typ == dir {
		return unix.Rmdir(path)
	}
	return unix.Unlink(path)
}

// File makes a regular file with content, mode 0644.
func (t *T) File(path string, content string) {
	t.OK("writing "+short(path), os.WriteFile(path, []byte(content), 0o644))
}

// Dir makes a directory of mode 0777.
func (t *T) Mkdir(path string) { t.OK("mkdir "+short(path), unix.Mkdir(path, 0o777)) }

// Open opens path and closes it when the case ends.
func (t *T) Open(path string, flags int, mode uint32) int {
	fd, err := unix.Open(path, flags|unix.O_CLOEXEC, mode)
	t.OK(fmt.Sprintf("open %s %s", short(path), flagText(flags)), err)
	t.Cleanup(func() { unix.Close(fd) })
	return fd
}

// Lstat reads attributes without following a link.
func (t *T) Lstat(path string) unix.Stat_t {
	var st unix.Stat_t
	t.OK("lstat "+short(path), unix.Lstat(path, &st))
	return st
}

// Fstat reads attributes of a descriptor.
func (t *T) Fstat(fd int) unix.Stat_t {
	var st unix.Stat_t
	t.OK("fstat", unix.Fstat(fd, &st))
	return st
}

// Statx reads all extended attributes of statx(2).
func (t *T) Statx(path string, flags int) unix.Statx_t {
	var st unix.Statx_t
	t.OK("statx "+short(path), unix.Statx(unix.AT_FDCWD, path, flags, unix.STATX_ALL|unix.STATX_BTIME, &st))
	return st
}

// Missing fails unless there is nothing at path.
func (t *T) Missing(path string) {
	var st unix.Stat_t
	t.Want("lstat "+short(path)+", which should be gone", unix.Lstat(path, &st), unix.ENOENT)
}

// Read reads the whole file, and fails on an error.
func (t *T) Read(path string) string {
	b, err := os.ReadFile(path)
	t.OK("reading "+short(path), err)
	return string(b)
}

// Content fails unless the file at path has exactly this content.
func (t *T) Content(path, want string) {
	sameBytes(t, "content of "+short(path), []byte(t.Read(path)), []byte(want))
}

// sameBytes compares and tells the first difference, not two megabytes.
func sameBytes(t *T, what string, got, want []byte) {
	if bytes.Equal(got, want) {
		return
	}
	n := min(len(got), len(want))
	at := n
	for i := range n {
		if got[i] != want[i] {
			at = i
			break
		}
	}
	t.Fatalf("DATA: %s: expected %d bytes, got %d; they differ first at offset %d: expected %q, got %q", what, len(want), len(got), at, peek(want, at), peek(got, at))
}

func peek(b []byte, at int) []byte { return b[min(at, len(b)):min(at+16, len(b))] }

// Mode fails unless path (a link itself, too) has these permission bits.
func (t *T) Mode(path string, want uint32) {
	if got := t.Lstat(path).Mode &^ unix.S_IFMT; got != want {
		t.Fatalf("mode of %s: expected %04o, got %04o", short(path), want, got)
	}
}

// Owner fails unless path itself belongs to uid and gid.
func (t *T) Owner(path string, uid, gid int) {
	st := t.Lstat(path)
	if st.Uid != uint32(uid) || st.Gid != uint32(gid) {
		t.Fatalf("owner of %s: expected %d:%d, got %d:%d", short(path), uid, gid, st.Uid, st.Gid)
	}
}

// Give changes the owner of path itself.
func (t *T) Give(path string, u User) {
	t.OK("lchown "+short(path), unix.Lchown(path, u.UID, u.GID))
}

// Chmod changes permission bits.
func (t *T) Chmod(path string, mode uint32) {
	t.OK(fmt.Sprintf("chmod %s %04o", short(path), mode), unix.Chmod(path, mode))
}

// Exists fails unless path (a link itself) is of the type.
func (t *T) Exists(path string, typ Type) {
	if got := t.Lstat(path).Mode & unix.S_IFMT; got != typeBits[typ] {
		t.Fatalf("type of %s: expected %s, got %#o", short(path), typ, got)
	}
}

// Nlink fails unless path itself has n links.
func (t *T) Nlink(path string, n uint64) {
	if got := uint64(t.Lstat(path).Nlink); got != n {
		t.Fatalf("links of %s: expected %d, got %d", short(path), n, got)
	}
}

// Write writes all of p to fd at its offset.
func (t *T) Write(fd int, p string) {
	n, err := unix.Write(fd, []byte(p))
	t.OK("write", err)
	Equal(t, "bytes written", n, len(p))
}

// Pwrite writes all of p at off.
func (t *T) Pwrite(fd int, p string, off int64) {
	n, err := unix.Pwrite(fd, []byte(p), off)
	t.OK("pwrite", err)
	Equal(t, "bytes written", n, len(p))
}

// Pread reads up to n bytes at off.
func (t *T) Pread(fd int, n int, off int64) string {
	b := make([]byte, n)
	total := 0
	for total < n {
		m, err := unix.Pread(fd, b[total:], off+int64(total))
		t.OK("pread", err)
		if m == 0 {
			break
		}
		total += m
	}
	return string(b[:total])
}

// tick waits until the coarsest clock of file systems (a kernel tick of 10 ms) has
// advanced.
func tick() { time.Sleep(12 * time.Millisecond) }

func nanos(ts unix.Timespec) int64 { return ts.Nano() }

// short keeps long names out of messages.
func short(p string) string {
	if len(p) <= 48 {
		return fmt.Sprintf("%q", p)
	}
	return fmt.Sprintf("%q...(%d bytes)", p[:24], len(p))
}

func flagText(flags int) string {
	names := []struct {
		bit  int
		name string
	}{
		{unix.O_CREAT, "O_CREAT"}, {unix.O_EXCL, "O_EXCL"}, {unix.O_TRUNC, "O_TRUNC"}, {unix.O_APPEND, "O_APPEND"},
		{unix.O_NONBLOCK, "O_NONBLOCK"}, {unix.O_DIRECT, "O_DIRECT"}, {unix.O_NOFOLLOW, "O_NOFOLLOW"}, {unix.O_NOATIME, "O_NOATIME"}, {unix.O_PATH, "O_PATH"},
	}
	text := []string{[]string{"O_RDONLY", "O_WRONLY", "O_RDWR", "3"}[flags&unix.O_ACCMODE]}
	for _, n := range names {
		if flags&n.bit != 0 {
			text = append(text, n.name)
		}
	}
	switch {
	case flags&unix.O_TMPFILE == unix.O_TMPFILE:
		text = append(text, "O_TMPFILE")
	case flags&unix.O_DIRECTORY != 0:
		text = append(text, "O_DIRECTORY")
	}
	if flags&unix.O_SYNC == unix.O_SYNC {
		text = append(text, "O_SYNC")
	} else if flags&unix.O_DSYNC != 0 {
		text = append(text, "O_DSYNC")
	}
	return strings.Join(text, "|")
}
