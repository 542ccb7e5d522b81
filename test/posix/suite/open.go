package suite

import (
	"fmt"
	"os"
	"strings"
	"unsafe"

	"golang.org/x/sys/unix"
)

// openCases are the promises of each flag of open(2) on each type of file.
func openCases() []Case {
	var cs []Case
	add := func(name string, run func(*T)) { cs = append(cs, Case{"open/" + name, run}) }

	// Directories can't be opened for writing by any flags.
	for name, flags := range map[string]int{
		"O_WRONLY": unix.O_WRONLY, "O_RDWR": unix.O_RDWR, "O_RDONLY-O_TRUNC": unix.O_TRUNC, "O_CREAT": unix.O_CREAT,
		"O_WRONLY-O_APPEND": unix.O_WRONLY | unix.O_APPEND, "O_WRONLY-O_CREAT-O_TRUNC": unix.O_WRONLY | unix.O_CREAT | unix.O_TRUNC,
	} {
		add("EISDIR/directory-with-"+name, func(t *T) {
			t.Mkdir("d")
			t.Want("open(d)", tryOpen("d", flags), unix.EISDIR)
		})
	}
	for _, typ := range plainTypes {
		add("ENOTDIR/O_DIRECTORY-on-"+string(typ), func(t *T) {
			t.Make(typ, "f", 0o644)
			t.Want("open(f, O_DIRECTORY)", tryOpen("f", unix.O_DIRECTORY), unix.ENOTDIR)
		})
	}
	add("ENOTDIR/O_DIRECTORY-on-symlink-to-file", func(t *T) {
		t.File("target", "")
		t.Make(symlink, "l", 0)
		t.Want("open(l, O_DIRECTORY)", tryOpen("l", unix.O_DIRECTORY), unix.ENOTDIR)
	})
	add("ok/O_DIRECTORY-on-symlink-to-directory", func(t *T) {
		t.Mkdir("target")
		t.Make(symlink, "l", 0)
		t.OK("open(l, O_DIRECTORY)", tryOpen("l", unix.O_DIRECTORY))
	})
	add("ELOOP/O_NOFOLLOW-on-symlink-to-file", func(t *T) {
		t.File("target", "")
		t.Make(symlink, "l", 0)
		t.Want("open(l, O_NOFOLLOW)", tryOpen("l", unix.O_NOFOLLOW), unix.ELOOP)
	})
	add("ELOOP/O_NOFOLLOW-on-dangling-symlink", func(t *T) {
		t.Make(symlink, "l", 0)
		t.Want("open(l, O_NOFOLLOW)", tryOpen("l", unix.O_NOFOLLOW), unix.ELOOP)
	})
	add("ELOOP/O_NOFOLLOW-O_CREAT-on-dangling-symlink", func(t *T) {
		t.Make(symlink, "l", 0)
		t.Want("open(l, O_NOFOLLOW|O_CREAT)", tryOpen("l", unix.O_NOFOLLOW|unix.O_CREAT|unix.O_RDWR), unix.ELOOP)
		t.Missing("target")
	})
	add("ENOTDIR/O_NOFOLLOW-O_DIRECTORY-on-symlink-to-directory", func(t *T) {
		t.Mkdir("target")
		t.Make(symlink, "l", 0)
		t.Want("open(l, O_NOFOLLOW|O_DIRECTORY)", tryOpen("l", unix.O_NOFOLLOW|unix.O_DIRECTORY), unix.ENOTDIR)
	})
	add("ok/O_NOFOLLOW-on-file-below-symlink", func(t *T) {
		t.Mkdir("target")
		t.File("target/f", "")
		t.Make(symlink, "l", 0)
		t.OK("open(l/f, O_NOFOLLOW)", tryOpen("l/f", unix.O_NOFOLLOW))
	})
	for _, typ := range nonLinks {
		if typ == socket || typ == block || typ == fifo {
			continue
		}
		add("ok/O_NOFOLLOW-on-"+string(typ), func(t *T) {
			t.Make(typ, "f", 0o644)
			t.OK("open(f, O_NOFOLLOW)", tryOpen("f", unix.O_NOFOLLOW))
		})
	}
	for _, typ := range allTypes {
		add("ok/O_PATH-O_NOFOLLOW-on-"+string(typ), func(t *T) {
			t.Make(typ, "f", 0o644)
			fd := t.Open("f", unix.O_PATH|unix.O_NOFOLLOW, 0)
			Equal(t, "type by fstat", t.Fstat(fd).Mode&unix.S_IFMT, typeBits[typ])
			Equal(t, "inode number by fstat", t.Fstat(fd).Ino, t.Lstat("f").Ino)
		})
	}
	for name, flags := range map[string]int{"O_RDONLY": unix.O_RDONLY, "O_WRONLY": unix.O_WRONLY, "O_RDWR": unix.O_RDWR} {
		add("ENXIO/socket-with-"+name, func(t *T) {
			t.Make(socket, "s", 0o644)
			t.Want("open(s)", tryOpen("s", flags), unix.ENXIO)
		})
		add("ENXIO/char-device-without-driver-with-"+name, func(t *T) {
			t.OK("mknod", unix.Mknod("c", unix.S_IFCHR|0o666, int(unix.Mkdev(241, 77))))
			t.Want("open(c)", tryOpen("c", flags), unix.ENXIO)
		})
	}

	add("ok/char-device-reads-end-of-file", func(t *T) {
		t.Make(char, "c", 0o666)
		fd := t.Open("c", unix.O_RDWR, 0)
		n, err := unix.Read(fd, make([]byte, 10))
		t.OK("read of /dev/null's twin", err)
		Equal(t, "bytes read", n, 0)
		t.Write(fd, "swallowed")
	})
	add("EACCES/char-device-permission", func(t *T) {
		t.Make(char, "c", 0o600)
		t.As(alice, func() { t.Want("open(c)", tryOpen("c", unix.O_RDWR), unix.EACCES) })
	})

	// O_CREAT.
	add("ok/O_CREAT-through-dangling-symlink-makes-the-target", func(t *T) {
		t.Make(symlink, "l", 0)
		t.OK("open(l, O_CREAT)", tryOpen("l", unix.O_CREAT|unix.O_WRONLY))
		t.Exists("l", symlink)
		t.Exists("target", regular)
	})
	add("ok/O_CREAT-keeps-mode-and-owner-of-existing-file", func(t *T) {
		t.Make(regular, "f", 0o640)
		t.Give("f", alice)
		fd, err := unix.Open("f", unix.O_CREAT|unix.O_WRONLY, 0o777)
		t.OK("open", err)
		unix.Close(fd)
		t.Mode("f", 0o640)
		t.Owner("f", alice.UID, alice.GID)
	})
	add("ok/O_CREAT-keeps-content", func(t *T) {
		t.File("f", "kept")
		t.OK("open", tryOpen("f", unix.O_CREAT|unix.O_RDWR))
		t.Content("f", "kept")
	})
	add("ok/O_CREAT-of-read-only-file-can-be-written-by-its-descriptor", func(t *T) {
		t.As(alice, func() {
			fd := t.Open("f", unix.O_CREAT|unix.O_EXCL|unix.O_RDWR, 0o400)
			t.Write(fd, "data")
			Equal(t, "content", t.Pread(fd, 10, 0), "data")
			t.Want("second open for writing", tryOpen("f", unix.O_WRONLY), unix.EACCES)
		})
	})
	add("ok/O_CREAT-of-mode-0-can-be-read-and-written-by-its-descriptor", func(t *T) {
		t.As(alice, func() {
			fd := t.Open("f", unix.O_CREAT|unix.O_EXCL|unix.O_RDWR, 0)
			t.Write(fd, "data")
			Equal(t, "content", t.Pread(fd, 10, 0), "data")
			t.Want("second open for reading", tryOpen("f", unix.O_RDONLY), unix.EACCES)
		})
	})
	add("ok/O_EXCL-without-O_CREAT-is-ignored", func(t *T) {
		t.File("f", "")
		t.OK("open(f, O_EXCL)", tryOpen("f", unix.O_EXCL))
	})
	add("EINVAL/O_CREAT-O_DIRECTORY", func(t *T) {
		t.Want("open(d, O_CREAT|O_DIRECTORY)", tryOpen("d", unix.O_CREAT|unix.O_DIRECTORY), unix.EINVAL)
		t.Missing("d")
	})
	add("ENOENT/O_CREAT-in-symlink-to-missing-directory", func(t *T) {
		t.OK("symlink", unix.Symlink("nodir/f", "l"))
		t.Want("open(l, O_CREAT)", tryOpen("l", unix.O_CREAT|unix.O_WRONLY), unix.ENOENT)
	})

	// O_TRUNC.
	for name, flags := range map[string]int{"O_WRONLY": unix.O_WRONLY, "O_RDWR": unix.O_RDWR, "O_RDONLY": unix.O_RDONLY, "O_WRONLY-O_APPEND": unix.O_WRONLY | unix.O_APPEND} {
		add("ok/O_TRUNC-"+name+"-empties", func(t *T) {
			t.File("f", strings.Repeat("x", 10000))
			t.OK("open", tryOpen("f", flags|unix.O_TRUNC))
			Equal(t, "size", t.Lstat("f").Size, 0)
			t.Content("f", "")
		})
	}
	add("EACCES/O_TRUNC-without-write-permission-leaves-content", func(t *T) {
		t.File("f", "kept")
		t.As(alice, func() { t.Want("open(O_TRUNC)", tryOpen("f", unix.O_TRUNC), unix.EACCES) })
		t.Content("f", "kept")
	})
	add("ok/O_TRUNC-is-seen-by-open-descriptor", func(t *T) {
		t.File("f", "content")
		fd := t.Open("f", unix.O_RDONLY, 0)
		t.OK("open(O_TRUNC)", tryOpen("f", unix.O_WRONLY|unix.O_TRUNC))
		Equal(t, "content by the other descriptor", t.Pread(fd, 100, 0), "")
		Equal(t, "size by the other descriptor", t.Fstat(fd).Size, 0)
	})
	add("ok/O_TRUNC-then-write-elsewhere-leaves-hole", func(t *T) {
		t.File("f", "old content")
		fd := t.Open("f", unix.O_RDWR|unix.O_TRUNC, 0)
		t.Pwrite(fd, "new", 5)
		t.Content("f", "\x00\x00\x00\x00\x00new")
	})

	// O_APPEND.
	add("ok/O_APPEND-write-goes-to-the-end", func(t *T) {
		t.File("f", "one")
		fd := t.Open("f", unix.O_WRONLY|unix.O_APPEND, 0)
		t.Write(fd, "two")
		t.Content("f", "onetwo")
	})
	add("ok/O_APPEND-write-after-lseek-goes-to-the-end", func(t *T) {
		t.File("f", "one")
		fd := t.Open("f", unix.O_WRONLY|unix.O_APPEND, 0)
		_, err := unix.Seek(fd, 0, unix.SEEK_SET)
		t.OK("lseek", err)
		t.Write(fd, "two")
		t.Content("f", "onetwo")
		off, err := unix.Seek(fd, 0, unix.SEEK_CUR)
		t.OK("lseek", err)
		Equal(t, "offset after the write", off, 6)
	})
	add("ok/O_APPEND-pwrite-appends-on-Linux", func(t *T) {
		t.File("f", "one")
		fd := t.Open("f", unix.O_WRONLY|unix.O_APPEND, 0)
		t.Pwrite(fd, "two", 0)
		t.Content("f", "onetwo")
	})
	add("ok/O_APPEND-two-descriptors-alternate", func(t *T) {
		a, b := t.Open("f", unix.O_CREAT|unix.O_WRONLY|unix.O_APPEND, 0o644), t.Open("f", unix.O_WRONLY|unix.O_APPEND, 0)
		want := ""
		for i := range 20 {
			t.Write([]int{a, b}[i%2], fmt.Sprint(i, ","))
			want += fmt.Sprint(i, ",")
		}
		t.Content("f", want)
	})
	add("ok/O_APPEND-follows-ftruncate", func(t *T) {
		fd := t.Open("f", unix.O_CREAT|unix.O_RDWR|unix.O_APPEND, 0o644)
		t.Write(fd, "long content")
		t.OK("ftruncate", unix.Ftruncate(fd, 4))
		t.Write(fd, "!")
		t.Content("f", "long!")
	})
	add("ok/O_APPEND-set-by-fcntl", func(t *T) {
		t.File("f", "one")
		fd := t.Open("f", unix.O_WRONLY, 0)
		_, err := unix.FcntlInt(uintptr(fd), unix.F_SETFL, unix.O_APPEND)
		t.OK("F_SETFL O_APPEND", err)
		t.Write(fd, "two")
		t.Content("f", "onetwo")
	})
	add("ok/O_APPEND-taken-away-by-fcntl", func(t *T) {
		t.File("f", "one")
		fd := t.Open("f", unix.O_WRONLY|unix.O_APPEND, 0)
		_, err := unix.FcntlInt(uintptr(fd), unix.F_SETFL, 0)
		t.OK("F_SETFL 0", err)
		t.Write(fd, "two")
		t.Content("f", "two")
	})
	add("ok/O_APPEND-reads-from-the-offset", func(t *T) {
		t.File("f", "one")
		fd := t.Open("f", unix.O_RDWR|unix.O_APPEND, 0)
		b := make([]byte, 2)
		_, err := unix.Read(fd, b)
		t.OK("read", err)
		Equal(t, "first bytes", string(b), "on")
	})
	add("ok/O_APPEND-after-other-descriptor-made-it-longer", func(t *T) {
		fd := t.Open("f", unix.O_CREAT|unix.O_WRONLY|unix.O_APPEND, 0o644)
		other := t.Open("f", unix.O_WRONLY, 0)
		t.Pwrite(other, "x", 9)
		t.Write(fd, "end")
		Equal(t, "size", t.Lstat("f").Size, 13)
	})

	// O_DIRECT: aligned blocks of 4 KiB, which every file system allows.
	for _, size := range []int{4096, 8192, 65536, 1 << 20} {
		add(fmt.Sprintf("ok/O_DIRECT-write-then-read-%d-aligned", size), func(t *T) {
			fd := t.Open("f", unix.O_CREAT|unix.O_RDWR|unix.O_DIRECT, 0o644)
			w := aligned(t, size)
			fill(w, 1)
			n, err := unix.Pwrite(fd, w, 0)
			t.OK("pwrite", err)
			Equal(t, "bytes written", n, size)
			r := aligned(t, size)
			n, err = unix.Pread(fd, r, 0)
			t.OK("pread", err)
			Equal(t, "bytes read", n, size)
			sameBytes(t, "what O_DIRECT reads", r, w)
			t.Content("f", string(w))
		})
	}
	add("ok/O_DIRECT-read-sees-buffered-write", func(t *T) {
		buffered := t.Open("f", unix.O_CREAT|unix.O_RDWR, 0o644)
		w := make([]byte, 8192)
		fill(w, 2)
		t.Pwrite(buffered, string(w), 0)
		direct := t.Open("f", unix.O_RDONLY|unix.O_DIRECT, 0)
		r := aligned(t, 8192)
		_, err := unix.Pread(direct, r, 0)
		t.OK("pread", err)
		sameBytes(t, "what O_DIRECT reads", r, w)
	})
	add("ok/buffered-read-sees-O_DIRECT-write", func(t *T) {
		t.File("f", strings.Repeat("old ", 2048))
		t.Read("f") // brings the old bytes into the page cache
		direct := t.Open("f", unix.O_RDWR|unix.O_DIRECT, 0)
		w := aligned(t, 4096)
		fill(w, 3)
		_, err := unix.Pwrite(direct, w, 4096)
		t.OK("pwrite", err)
		sameBytes(t, "the second block", []byte(t.Read("f")[4096:]), w)
	})
	add("ok/O_DIRECT-read-at-the-end-is-short", func(t *T) {
		t.File("f", "short file")
		fd := t.Open("f", unix.O_RDONLY|unix.O_DIRECT, 0)
		n, err := unix.Pread(fd, aligned(t, 4096), 0)
		t.OK("pread", err)
		Equal(t, "bytes read", n, 10)
	})
	add("ok/O_DIRECT-read-past-the-end-is-empty", func(t *T) {
		t.File("f", "short file")
		fd := t.Open("f", unix.O_RDONLY|unix.O_DIRECT, 0)
		n, err := unix.Pread(fd, aligned(t, 4096), 1<<20)
		t.OK("pread", err)
		Equal(t, "bytes read", n, 0)
	})
	add("ok/O_DIRECT-set-by-fcntl", func(t *T) {
		fd := t.Open("f", unix.O_CREAT|unix.O_RDWR, 0o644)
		_, err := unix.FcntlInt(uintptr(fd), unix.F_SETFL, unix.O_DIRECT)
		t.OK("F_SETFL O_DIRECT", err)
		w := aligned(t, 4096)
		fill(w, 4)
		_, err = unix.Pwrite(fd, w, 0)
		t.OK("pwrite", err)
		t.Content("f", string(w))
	})

	// O_TMPFILE.
	add("ok/O_TMPFILE-has-no-name", func(t *T) {
		fd := t.Open(".", unix.O_TMPFILE|unix.O_RDWR, 0o600)
		Equal(t, "links", t.Fstat(fd).Nlink, 0)
		Equal(t, "entries in the directory", len(names(t, ".")), 0)
	})
	add("ok/O_TMPFILE-holds-data", func(t *T) {
		fd := t.Open(".", unix.O_TMPFILE|unix.O_RDWR, 0o600)
		t.Write(fd, "hidden")
		Equal(t, "content", t.Pread(fd, 10, 0), "hidden")
		Equal(t, "size", t.Fstat(fd).Size, 6)
	})
	add("ok/O_TMPFILE-linked-by-proc", func(t *T) {
		fd := t.Open(".", unix.O_TMPFILE|unix.O_RDWR, 0o640)
		t.Write(fd, "now visible")
		t.OK("linkat(/proc/self/fd)", unix.Linkat(here, fmt.Sprintf("/proc/self/fd/%d", fd), here, "f", unix.AT_SYMLINK_FOLLOW))
		t.Content("f", "now visible")
		t.Nlink("f", 1)
		t.Mode("f", 0o640)
	})
	add("ok/O_TMPFILE-linked-by-AT_EMPTY_PATH", func(t *T) {
		fd := t.Open(".", unix.O_TMPFILE|unix.O_WRONLY, 0o600)
		t.Write(fd, "x")
		t.OK("linkat(fd, AT_EMPTY_PATH)", unix.Linkat(fd, "", here, "f", unix.AT_EMPTY_PATH))
		t.Content("f", "x")
	})
	add("ok/O_TMPFILE-linked-twice", func(t *T) {
		fd := t.Open(".", unix.O_TMPFILE|unix.O_WRONLY, 0o600)
		t.OK("first linkat", unix.Linkat(fd, "", here, "f", unix.AT_EMPTY_PATH))
		t.OK("second linkat", unix.Linkat(fd, "", here, "g", unix.AT_EMPTY_PATH))
		t.Nlink("f", 2)
	})
	add("EEXIST/O_TMPFILE-linked-over-existing", func(t *T) {
		t.File("f", "kept")
		fd := t.Open(".", unix.O_TMPFILE|unix.O_WRONLY, 0o600)
		t.Want("linkat", unix.Linkat(fd, "", here, "f", unix.AT_EMPTY_PATH), unix.EEXIST)
		t.Content("f", "kept")
	})
	add("ok/O_TMPFILE-unlinked-after-link-still-readable", func(t *T) {
		fd := t.Open(".", unix.O_TMPFILE|unix.O_RDWR, 0o600)
		t.Write(fd, "data")
		t.OK("linkat", unix.Linkat(fd, "", here, "f", unix.AT_EMPTY_PATH))
		t.OK("unlink", unix.Unlink("f"))
		Equal(t, "content", t.Pread(fd, 10, 0), "data")
		Equal(t, "links", t.Fstat(fd).Nlink, 0)
	})
	add("ENOENT/O_TMPFILE-O_EXCL-can-not-be-linked", func(t *T) {
		fd := t.Open(".", unix.O_TMPFILE|unix.O_EXCL|unix.O_WRONLY, 0o600)
		t.Want("linkat", unix.Linkat(fd, "", here, "f", unix.AT_EMPTY_PATH), unix.ENOENT)
	})
	add("EINVAL/O_TMPFILE-read-only", func(t *T) {
		t.Want("open(., O_TMPFILE|O_RDONLY)", tryOpen(".", unix.O_TMPFILE|unix.O_RDONLY), unix.EINVAL)
	})
	add("ok/O_TMPFILE-obeys-umask", func(t *T) {
		t.Umask(0o027)
		fd := t.Open(".", unix.O_TMPFILE|unix.O_WRONLY, 0o666)
		Equal(t, "mode", t.Fstat(fd).Mode&0o7777, 0o640)
	})
	add("ok/O_TMPFILE-belongs-to-the-caller", func(t *T) {
		t.As(alice, func() {
			fd := t.Open(".", unix.O_TMPFILE|unix.O_WRONLY, 0o600)
			Equal(t, "owner", int(t.Fstat(fd).Uid), alice.UID)
			Equal(t, "group", int(t.Fstat(fd).Gid), alice.GID)
		})
	})
	add("EACCES/O_TMPFILE-without-write-permission-on-directory", func(t *T) {
		t.OK("mkdir", unix.Mkdir("d", 0o755))
		t.As(alice, func() { t.Want("open(d, O_TMPFILE)", tryOpen("d", unix.O_TMPFILE|unix.O_RDWR), unix.EACCES) })
	})
	for _, typ := range plainTypes {
		add("ENOTDIR/O_TMPFILE-in-"+string(typ), func(t *T) {
			t.Make(typ, "f", 0o644)
			t.Want("open(f, O_TMPFILE)", tryOpen("f", unix.O_TMPFILE|unix.O_RDWR), unix.ENOTDIR)
		})
	}

	// O_NOATIME.
	add("EPERM/O_NOATIME-by-other-user", func(t *T) {
		t.File("f", "x")
		t.As(alice, func() { t.Want("open(f, O_NOATIME)", tryOpen("f", unix.O_NOATIME), unix.EPERM) })
	})
	add("ok/O_NOATIME-by-owner", func(t *T) {
		t.File("f", "x")
		t.Give("f", alice)
		t.As(alice, func() { t.OK("open(f, O_NOATIME)", tryOpen("f", unix.O_NOATIME)) })
	})
	add("ok/O_NOATIME-read-keeps-atime", func(t *T) {
		t.File("f", "x")
		setTimes(t, "f", 1000, 2000)
		fd := t.Open("f", unix.O_RDONLY|unix.O_NOATIME, 0)
		t.Pread(fd, 1, 0)
		Equal(t, "atime", t.Lstat("f").Atim.Sec, 1000)
	})
	add("EPERM/O_NOATIME-set-by-fcntl-by-other-user", func(t *T) {
		t.File("f", "x")
		t.As(alice, func() {
			fd := t.Open("f", unix.O_RDONLY, 0)
			_, err := unix.FcntlInt(uintptr(fd), unix.F_SETFL, unix.O_NOATIME)
			t.Want("F_SETFL O_NOATIME", err, unix.EPERM)
		})
	})

	// Flags that only change how writes are answered.
	for name, flag := range map[string]int{"O_SYNC": unix.O_SYNC, "O_DSYNC": unix.O_DSYNC, "O_NONBLOCK": unix.O_NONBLOCK, "O_LARGEFILE": 0o100000, "O_NOCTTY": unix.O_NOCTTY, "O_ASYNC": unix.O_ASYNC} {
		add("ok/"+name+"-write-and-read-back", func(t *T) {
			fd := t.Open("f", unix.O_CREAT|unix.O_RDWR|flag, 0o644)
			t.Write(fd, "data")
			t.Write(fd, "more")
			Equal(t, "content", t.Pread(fd, 100, 0), "datamore")
		})
	}
	for name, flag := range map[string]int{"O_RDONLY": unix.O_RDONLY, "O_WRONLY": unix.O_WRONLY, "O_RDWR": unix.O_RDWR, "O_APPEND": unix.O_RDWR | unix.O_APPEND,
		"O_SYNC": unix.O_RDWR | unix.O_SYNC, "O_DSYNC": unix.O_RDWR | unix.O_DSYNC, "O_NONBLOCK": unix.O_NONBLOCK, "O_DIRECT": unix.O_RDWR | unix.O_DIRECT, "O_NOATIME": unix.O_NOATIME, "O_PATH": unix.O_PATH} {
		add("ok/F_GETFL-tells-"+name, func(t *T) {
			t.File("f", "")
			fd := t.Open("f", flag, 0)
			got, err := unix.FcntlInt(uintptr(fd), unix.F_GETFL, 0)
			t.OK("F_GETFL", err)
			Equal(t, "flags", got&^0o100000, flag)
		})
	}
	add("ok/O_CLOEXEC-sets-FD_CLOEXEC", func(t *T) {
		t.File("f", "")
		fd := t.Open("f", unix.O_RDONLY, 0)
		got, err := unix.FcntlInt(uintptr(fd), unix.F_GETFD, 0)
		t.OK("F_GETFD", err)
		Equal(t, "FD_CLOEXEC", got, unix.FD_CLOEXEC)
	})

	// Access modes of descriptors.
	for name, use := range map[string]struct {
		flags int
		op    func(fd int) error
	}{
		"read-on-O_WRONLY":       {unix.O_WRONLY, func(fd int) error { _, err := unix.Read(fd, make([]byte, 1)); return err }},
		"pread-on-O_WRONLY":      {unix.O_WRONLY, func(fd int) error { _, err := unix.Pread(fd, make([]byte, 1), 0); return err }},
		"write-on-O_RDONLY":      {unix.O_RDONLY, func(fd int) error { _, err := unix.Write(fd, make([]byte, 1)); return err }},
		"pwrite-on-O_RDONLY":     {unix.O_RDONLY, func(fd int) error { _, err := unix.Pwrite(fd, make([]byte, 1), 0); return err }},
		"fallocate-on-O_RDONLY":  {unix.O_RDONLY, func(fd int) error { return unix.Fallocate(fd, 0, 0, 1) }},
		"read-on-access-mode-3":  {3, func(fd int) error { _, err := unix.Read(fd, make([]byte, 1)); return err }},
		"write-on-access-mode-3": {3, func(fd int) error { _, err := unix.Write(fd, make([]byte, 1)); return err }},
		"read-on-O_PATH":         {unix.O_PATH, func(fd int) error { _, err := unix.Read(fd, make([]byte, 1)); return err }},
		"write-on-O_PATH":        {unix.O_PATH, func(fd int) error { _, err := unix.Write(fd, make([]byte, 1)); return err }},
		"fchmod-on-O_PATH":       {unix.O_PATH, func(fd int) error { return unix.Fchmod(fd, 0o600) }},
		"fchown-on-O_PATH":       {unix.O_PATH, func(fd int) error { return unix.Fchown(fd, 1, 1) }},
		"ftruncate-on-O_PATH":    {unix.O_PATH, func(fd int) error { return unix.Ftruncate(fd, 0) }},
		"fsync-on-O_PATH":        {unix.O_PATH, func(fd int) error { return unix.Fsync(fd) }},
		"lseek-on-O_PATH":        {unix.O_PATH, func(fd int) error { _, err := unix.Seek(fd, 0, 0); return err }},
		"fgetxattr-on-O_PATH":    {unix.O_PATH, func(fd int) error { _, err := unix.Fgetxattr(fd, "user.a", nil); return err }},
		"flock-on-O_PATH":        {unix.O_PATH, func(fd int) error { return unix.Flock(fd, unix.LOCK_SH) }},
		"mmap-on-O_PATH": {unix.O_PATH, func(fd int) error {
			_, err := unix.Mmap(fd, 0, 4096, unix.PROT_READ, unix.MAP_PRIVATE)
			return err
		}},
	} {
		add("EBADF/"+name, func(t *T) {
			t.File("f", "content")
			fd := t.Open("f", use.flags, 0)
			t.Want(name, use.op(fd), unix.EBADF)
		})
	}
	add("EINVAL/ftruncate-on-O_RDONLY", func(t *T) {
		t.File("f", "content")
		t.Want("ftruncate", unix.Ftruncate(t.Open("f", unix.O_RDONLY, 0), 0), unix.EINVAL)
	})
	add("ok/O_PATH-descriptor-reopened-by-proc", func(t *T) {
		t.File("f", "content")
		fd := t.Open("f", unix.O_PATH, 0)
		t.OK("unlink", unix.Unlink("f"))
		got, err := os.ReadFile(fmt.Sprintf("/proc/self/fd/%d", fd))
		t.OK("reading by /proc/self/fd", err)
		Equal(t, "content", string(got), "content")
	})

	// openat2's restrictions.
	for name, c := range map[string]struct {
		path    string
		resolve uint64
		want    error
	}{
		"EXDEV/RESOLVE_BENEATH-dotdot":               {"..", unix.RESOLVE_BENEATH, unix.EXDEV},
		"EXDEV/RESOLVE_BENEATH-absolute":             {"/", unix.RESOLVE_BENEATH, unix.EXDEV},
		"EXDEV/RESOLVE_BENEATH-symlink-out":          {"out", unix.RESOLVE_BENEATH, unix.EXDEV},
		"ok/RESOLVE_BENEATH-symlink-inside":          {"in", unix.RESOLVE_BENEATH, nil},
		"ok/RESOLVE_BENEATH-dotdot-inside":           {"d/../f", unix.RESOLVE_BENEATH, nil},
		"ELOOP/RESOLVE_NO_SYMLINKS-last":             {"in", unix.RESOLVE_NO_SYMLINKS, unix.ELOOP},
		"ELOOP/RESOLVE_NO_SYMLINKS-prefix":           {"dl/g", unix.RESOLVE_NO_SYMLINKS, unix.ELOOP},
		"ok/RESOLVE_NO_SYMLINKS-plain":               {"d/g", unix.RESOLVE_NO_SYMLINKS, nil},
		"ok/RESOLVE_IN_ROOT-absolute":                {"/f", unix.RESOLVE_IN_ROOT, nil},
		"ok/RESOLVE_IN_ROOT-dotdot-stays":            {"../../f", unix.RESOLVE_IN_ROOT, nil},
		"ok/RESOLVE_NO_XDEV-inside":                  {"d/g", unix.RESOLVE_NO_XDEV, nil},
		"ENOENT/RESOLVE_IN_ROOT-symlink-to-absolute": {"out", unix.RESOLVE_IN_ROOT, unix.ENOENT},
	} {
		errno, rest, _ := strings.Cut(name, "/")
		add(errno+"/openat2-"+rest, func(t *T) {
			t.Mkdir("d")
			t.File("f", "")
			t.File("d/g", "")
			t.OK("symlink", unix.Symlink("f", "in"))
			t.OK("symlink", unix.Symlink("/proc/version", "out"))
			t.OK("symlink", unix.Symlink("d", "dl"))
			dirfd := t.Open(".", unix.O_RDONLY|unix.O_DIRECTORY, 0)
			fd, err := unix.Openat2(dirfd, c.path, &unix.OpenHow{Flags: unix.O_RDONLY | unix.O_CLOEXEC, Resolve: c.resolve})
			if err == nil {
				unix.Close(fd)
			}
			t.Want("openat2("+c.path+")", err, c.want)
		})
	}

	// File handles.
	for _, typ := range []Type{regular, dir, fifo, symlink} {
		add("ok/open_by_handle_at-finds-"+string(typ), func(t *T) {
			t.Make(typ, "f", 0o755)
			h, _, err := unix.NameToHandleAt(here, "f", 0)
			t.OK("name_to_handle_at", err)
			mount := t.Open(".", unix.O_RDONLY, 0)
			fd, err := unix.OpenByHandleAt(mount, h, unix.O_PATH|unix.O_CLOEXEC|unix.O_NOFOLLOW)
			t.OK("open_by_handle_at", err)
			defer unix.Close(fd)
			Equal(t, "inode number", t.Fstat(fd).Ino, t.Lstat("f").Ino)
		})
	}
	return cs
}

// tryOpen opens path with mode 0644 and closes it again.
func tryOpen(path string, flags int) error {
	fd, err := unix.Open(path, flags|unix.O_CLOEXEC, 0o644)
	if err != nil {
		return err
	}
	return unix.Close(fd)
}

// aligned returns memory at a page boundary, for O_DIRECT.
func aligned(t *T, n int) []byte {
	b, err := unix.Mmap(-1, 0, n, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_ANON|unix.MAP_PRIVATE)
	t.OK("mmap of anonymous memory", err)
	t.Cleanup(func() { unix.Munmap(b) })
	return b
}

// fill writes bytes that are a function of their offset and the seed.
func fill(b []byte, seed uint64) {
	for i := range b {
		x := (uint64(i)/8 + seed*0x9e3779b97f4a7c15) * 0xbf58476d1ce4e5b9
		b[i] = (*[8]byte)(unsafe.Pointer(&x))[i%8]
	}
}
