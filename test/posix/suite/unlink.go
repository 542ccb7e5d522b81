package suite

import (
	"fmt"
	"strings"

	"golang.org/x/sys/unix"
)

// unlinkCases are the rules of unlink(2) and rmdir(2).
func unlinkCases() []Case {
	var cs []Case
	add := func(name string, run func(*T)) { cs = append(cs, Case{name, run}) }

	for _, typ := range nonDirs {
		add("unlink/ok/"+string(typ), func(t *T) {
			t.Make(typ, "f", 0o644)
			t.OK("unlink", unix.Unlink("f"))
			t.Missing("f")
			Equal(t, "entries", len(names(t, ".")), 0)
		})
		add("unlink/ok/name-of-"+string(typ)+"-can-be-used-again", func(t *T) {
			t.Make(typ, "f", 0o644)
			t.OK("unlink", unix.Unlink("f"))
			t.Make(dir, "f", 0o755)
			t.Exists("f", dir)
		})
		add("unlink/ok/one-of-two-links-of-"+string(typ), func(t *T) {
			t.Make(typ, "f", 0o644)
			t.OK("link", unix.Link("f", "g"))
			ino := t.Lstat("f").Ino
			t.OK("unlink", unix.Unlink("f"))
			t.Missing("f")
			t.Exists("g", typ)
			t.Nlink("g", 1)
			Equal(t, "inode number", t.Lstat("g").Ino, ino)
		})
		add("unlink/ok/O_PATH-descriptor-of-"+string(typ)+"-sees-no-links", func(t *T) {
			t.Make(typ, "f", 0o644)
			fd := t.Open("f", unix.O_PATH|unix.O_NOFOLLOW, 0)
			t.OK("unlink", unix.Unlink("f"))
			Equal(t, "links", t.Fstat(fd).Nlink, 0)
			Equal(t, "type", t.Fstat(fd).Mode&unix.S_IFMT, typeBits[typ])
		})
		add("rmdir/ENOTDIR/"+string(typ), func(t *T) {
			t.Make(typ, "f", 0o644)
			t.Want("rmdir", unix.Rmdir("f"), unix.ENOTDIR)
			t.Exists("f", typ)
		})
		add("unlink/ok/read-only-"+string(typ)+"-in-writable-directory", func(t *T) {
			t.Make(typ, "f", 0o444)
			t.As(alice, func() { t.OK("unlink", unix.Unlink("f")) })
			t.Missing("f")
		})
	}
	for _, typ := range allTypes {
		add("rmdir/ENOTEMPTY/directory-with-"+string(typ), func(t *T) {
			t.Mkdir("d")
			t.Make(typ, "d/f", 0o644)
			t.Want("rmdir", unix.Rmdir("d"), unix.ENOTEMPTY)
			t.Exists("d/f", typ)
			t.OK("removing the entry", remove(typ, "d/f"))
			t.OK("rmdir of the empty directory", unix.Rmdir("d"))
			t.Missing("d")
		})
	}
	for name, path := range map[string]string{"dot": ".", "dotdot": "..", "directory": "d", "directory-with-slash": "d/", "symlink-to-directory-with-slash": "l/"} {
		want := error(unix.EISDIR)
		if strings.HasPrefix(name, "symlink") {
			want = unix.ENOTDIR
		}
		add("unlink/"+errText(want)+"/"+name, func(t *T) {
			t.Mkdir("d")
			t.OK("symlink", unix.Symlink("d", "l"))
			t.Want("unlink("+path+")", unix.Unlink(path), want)
			t.Exists("d", dir)
			t.Exists("l", symlink)
		})
	}
	for name, c := range map[string]struct {
		path string
		want error
	}{
		"EINVAL/dot": {"d/.", unix.EINVAL}, "ENOTEMPTY/dotdot": {"d/..", unix.ENOTEMPTY}, "EBUSY/root": {"/", unix.EBUSY},
		"ENOTDIR/symlink-to-directory": {"l", unix.ENOTDIR}, "ENOTDIR/symlink-to-directory-with-slash": {"l/", unix.ENOTDIR},
		"EINVAL/working-directory-as-dot": {".", unix.EINVAL},
	} {
		add("rmdir/"+name, func(t *T) {
			t.Mkdir("d")
			t.OK("symlink", unix.Symlink("d", "l"))
			t.Want("rmdir("+c.path+")", unix.Rmdir(c.path), c.want)
			t.Exists("d", dir)
		})
	}
	add("unlink/EISDIR/as-user", func(t *T) {
		t.As(alice, func() {
			t.Mkdir("d")
			t.Want("unlink", unix.Unlink("d"), unix.EISDIR)
		})
	})
	add("unlink/EINVAL/unlinkat-with-unknown-flag", func(t *T) {
		t.File("f", "")
		t.Want("unlinkat", unix.Unlinkat(here, "f", 0x10000), unix.EINVAL)
	})
	add("unlink/ok/open-file-stays-readable-and-writable", func(t *T) {
		fd := t.Open("f", unix.O_CREAT|unix.O_RDWR, 0o644)
		t.Write(fd, "before")
		t.OK("unlink", unix.Unlink("f"))
		t.Write(fd, " after")
		Equal(t, "content", t.Pread(fd, 100, 0), "before after")
		Equal(t, "links", t.Fstat(fd).Nlink, 0)
		Equal(t, "size", t.Fstat(fd).Size, 12)
	})
	for name, op := range map[string]func(t *T, fd int){
		"ftruncate": func(t *T, fd int) {
			t.OK("ftruncate", unix.Ftruncate(fd, 3))
			Equal(t, "size", t.Fstat(fd).Size, 3)
		},
		"fchmod": func(t *T, fd int) {
			t.OK("fchmod", unix.Fchmod(fd, 0o600))
			Equal(t, "mode", t.Fstat(fd).Mode&0o7777, 0o600)
		},
		"fchown": func(t *T, fd int) {
			t.OK("fchown", unix.Fchown(fd, 5, 6))
			Equal(t, "owner", t.Fstat(fd).Uid, 5)
		},
		"fsetxattr": func(t *T, fd int) {
			t.OK("fsetxattr", unix.Fsetxattr(fd, "user.x", []byte("v"), 0))
			b := make([]byte, 8)
			n, err := unix.Fgetxattr(fd, "user.x", b)
			t.OK("fgetxattr", err)
			Equal(t, "value", string(b[:n]), "v")
		},
		"fsync": func(t *T, fd int) { t.OK("fsync", unix.Fsync(fd)) },
		"futimens": func(t *T, fd int) {
			ts := [2]unix.Timespec{{Sec: 5}, {Sec: 6}}
			t.OK("utimensat", call(unix.SYS_UTIMENSAT, uintptr(fd), 0, addr(&ts), 0))
			Equal(t, "mtime", t.Fstat(fd).Mtim.Sec, 6)
		},
		"fallocate": func(t *T, fd int) {
			t.OK("fallocate", unix.Fallocate(fd, 0, 0, 100000))
			Equal(t, "size", t.Fstat(fd).Size, 100000)
		},
		"flock": func(t *T, fd int) { t.OK("flock", unix.Flock(fd, unix.LOCK_EX|unix.LOCK_NB)) },
		"mmap": func(t *T, fd int) {
			m := mapFile(t, fd, 4096, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
			m[0] = 'D'
			Equal(t, "first byte", t.Pread(fd, 1, 0), "D")
		},
		"reopen-by-proc": func(t *T, fd int) {
			got := t.Open(fmt.Sprintf("/proc/self/fd/%d", fd), unix.O_RDONLY, 0)
			Equal(t, "content", t.Pread(got, 100, 0), "data")
		},
		"reopen-by-proc-with-O_TRUNC": func(t *T, fd int) {
			t.Open(fmt.Sprintf("/proc/self/fd/%d", fd), unix.O_RDWR|unix.O_TRUNC, 0)
			Equal(t, "size", t.Fstat(fd).Size, 0)
		},
	} {
		add("unlink/ok/"+name+"-of-unlinked-open-file", func(t *T) {
			fd := t.Open("f", unix.O_CREAT|unix.O_RDWR, 0o644)
			t.Write(fd, "data")
			t.OK("unlink", unix.Unlink("f"))
			op(t, fd)
		})
	}
	add("unlink/ENOENT/unlinked-open-file-can-not-be-linked-again", func(t *T) {
		fd := t.Open("f", unix.O_CREAT|unix.O_RDWR, 0o644)
		t.OK("unlink", unix.Unlink("f"))
		t.Want("linkat", unix.Linkat(here, fmt.Sprintf("/proc/self/fd/%d", fd), here, "g", unix.AT_SYMLINK_FOLLOW), unix.ENOENT)
	})
	add("unlink/ok/open-file-replaced-by-new-one-of-the-same-name", func(t *T) {
		fd := t.Open("f", unix.O_CREAT|unix.O_RDWR, 0o644)
		t.Write(fd, "old")
		t.OK("unlink", unix.Unlink("f"))
		t.File("f", "new")
		Equal(t, "content of the unlinked file", t.Pread(fd, 10, 0), "old")
		t.Content("f", "new")
		t.True(t.Fstat(fd).Ino != t.Lstat("f").Ino, "the new file has the inode number of the unlinked open one")
	})
	add("unlink/ok/mapping-outlives-name-and-descriptor", func(t *T) {
		t.File("f", strings.Repeat("m", 8192))
		fd, err := unix.Open("f", unix.O_RDONLY|unix.O_CLOEXEC, 0)
		t.OK("open", err)
		m := mapFile(t, fd, 8192, unix.PROT_READ, unix.MAP_SHARED)
		unix.Close(fd)
		t.OK("unlink", unix.Unlink("f"))
		Equal(t, "a mapped byte", m[8191], 'm')
	})
	add("unlink/ok/large-file-with-many-extents", func(t *T) {
		fd := t.Open("f", unix.O_CREAT|unix.O_RDWR, 0o644)
		for i := range 200 {
			t.Pwrite(fd, "x", int64(i)*65536)
		}
		t.OK("unlink", unix.Unlink("f"))
		Equal(t, "a byte", t.Pread(fd, 1, 199*65536), "x")
	})
	add("unlink/ENOENT/second-time", func(t *T) {
		t.File("f", "")
		t.OK("unlink", unix.Unlink("f"))
		t.Want("unlink", unix.Unlink("f"), unix.ENOENT)
	})
	add("rmdir/ENOENT/second-time", func(t *T) {
		t.Mkdir("d")
		t.OK("rmdir", unix.Rmdir("d"))
		t.Want("rmdir", unix.Rmdir("d"), unix.ENOENT)
	})
	add("unlink/ok/symlink-not-its-target", func(t *T) {
		t.File("target", "kept")
		t.Make(symlink, "l", 0)
		t.OK("unlink", unix.Unlink("l"))
		t.Content("target", "kept")
	})
	add("rmdir/ok/links-of-parent-fall", func(t *T) {
		t.Mkdir("d")
		t.Mkdir("d/a")
		t.Mkdir("d/b")
		t.Nlink("d", 4)
		t.OK("rmdir", unix.Rmdir("d/a"))
		t.Nlink("d", 3)
		t.OK("rmdir", unix.Rmdir("d/b"))
		t.Nlink("d", 2)
	})
	add("rmdir/ok/deep-tree-from-the-bottom", func(t *T) {
		path := "d"
		var all []string
		for range 100 {
			t.Mkdir(path)
			all = append(all, path)
			path += "/d"
		}
		for i := len(all) - 1; i >= 0; i-- {
			t.OK("rmdir", unix.Rmdir(all[i]))
		}
	})
	add("rmdir/ok/working-directory-of-the-caller", func(t *T) {
		t.Mkdir("d")
		t.OK("chdir", unix.Chdir("d"))
		t.OK("rmdir", unix.Rmdir(t.Dir+"/d"))
		t.Want("mkdir in the removed directory", unix.Mkdir("e", 0o755), unix.ENOENT)
		t.Want("open in the removed directory", tryOpen("f", unix.O_CREAT|unix.O_WRONLY), unix.ENOENT)
		t.Want("mkdir by way of dotdot", unix.Mkdir("./e", 0o755), unix.ENOENT)
		_, err := unix.Getcwd(make([]byte, 4096))
		t.Want("getcwd", err, unix.ENOENT)
		t.OK("opening .. of the removed directory", tryOpen("..", unix.O_RDONLY))
		Equal(t, "links of the removed directory", t.Lstat(".").Nlink, 0)
	})
	add("rmdir/ok/open-directory-lists-nothing-afterwards", func(t *T) {
		t.Mkdir("d")
		fd := t.Open("d", unix.O_RDONLY|unix.O_DIRECTORY, 0)
		t.OK("rmdir", unix.Rmdir("d"))
		n, err := unix.Getdents(fd, make([]byte, 4096))
		t.WantOneOf("getdents", err, nil, unix.ENOENT)
		if err == nil {
			Equal(t, "bytes of entries", n, 0)
		}
	})
	add("rmdir/ok/fstat-of-removed-directory", func(t *T) {
		t.Mkdir("d")
		fd := t.Open("d", unix.O_RDONLY|unix.O_DIRECTORY, 0)
		t.OK("rmdir", unix.Rmdir("d"))
		Equal(t, "links", t.Fstat(fd).Nlink, 0)
		Equal(t, "type", t.Fstat(fd).Mode&unix.S_IFMT, unix.S_IFDIR)
	})
	add("rmdir/ok/attributes-of-removed-open-directory-can-be-set", func(t *T) {
		t.Mkdir("d")
		fd := t.Open("d", unix.O_RDONLY|unix.O_DIRECTORY, 0)
		t.OK("rmdir", unix.Rmdir("d"))
		t.OK("fchmod", unix.Fchmod(fd, 0o700))
		Equal(t, "mode", t.Fstat(fd).Mode&0o7777, 0o700)
	})
	add("rmdir/ok/name-used-again-for-file", func(t *T) {
		t.Mkdir("d")
		t.OK("rmdir", unix.Rmdir("d"))
		t.File("d", "now a file")
		t.Content("d", "now a file")
	})
	add("rmdir/ok/directory-with-255-byte-name", func(t *T) {
		name := strings.Repeat("d", 255)
		t.Mkdir(name)
		t.OK("rmdir", unix.Rmdir(name))
		t.Missing(name)
	})
	add("unlink/ok/thousand-files", func(t *T) {
		for i := range 1000 {
			t.Make(regular, fmt.Sprint(i), 0o644)
		}
		for i := range 1000 {
			t.OK("unlink", unix.Unlink(fmt.Sprint(i)))
		}
		Equal(t, "entries", len(names(t, ".")), 0)
	})
	return cs
}
