package suite

import (
	"fmt"
	"strings"

	"golang.org/x/sys/unix"
)

// elsewhere is a name on another file system (devtmpfs). The cases only use it
// where the operation must fail before it makes anything.
const elsewhere = "/dev/penstock-posix-suite"

// linkCases are the rules of link(2) and linkat(2).
func linkCases() []Case {
	var cs []Case
	add := func(name string, run func(*T)) { cs = append(cs, Case{"link/" + name, run}) }
	for _, typ := range nonDirs {
		add("ok/"+string(typ), func(t *T) {
			t.Make(typ, "f", 0o644)
			t.OK("link", unix.Link("f", "g"))
			Equal(t, "inode number", t.Lstat("g").Ino, t.Lstat("f").Ino)
			t.Nlink("f", 2)
			t.Nlink("g", 2)
			t.Exists("g", typ)
			t.OK("third link", unix.Link("g", "h"))
			t.Nlink("f", 3)
		})
		add("ok/"+string(typ)+"-in-other-directory", func(t *T) {
			t.Mkdir("d")
			t.Make(typ, "f", 0o644)
			t.OK("link", unix.Link("f", "d/g"))
			t.OK("unlink of the first name", unix.Unlink("f"))
			t.Exists("d/g", typ)
			t.Nlink("d/g", 1)
		})
		add("ok/attributes-of-"+string(typ)+"-are-shared", func(t *T) {
			t.Make(typ, "f", 0o644)
			t.OK("link", unix.Link("f", "g"))
			t.OK("lchown", unix.Lchown("g", 7, 8))
			t.Owner("f", 7, 8)
			if typ != symlink {
				t.Chmod("f", 0o600)
				t.Mode("g", 0o600)
			}
		})
		add("EXDEV/"+string(typ)+"-to-other-file-system", func(t *T) {
			t.Make(typ, "f", 0o644)
			t.Want("link", unix.Link("f", elsewhere), unix.EXDEV)
		})
		for _, other := range allTypes {
			add("EEXIST/"+string(typ)+"-to-"+string(other), func(t *T) {
				t.Make(typ, "f", 0o644)
				t.Make(other, "g", 0o644)
				t.Want("link", unix.Link("f", "g"), unix.EEXIST)
				t.Exists("g", other)
				t.Nlink("f", 1)
			})
		}
	}
	add("EPERM/directory", func(t *T) {
		t.Mkdir("d")
		t.Want("link", unix.Link("d", "e"), unix.EPERM)
		t.Missing("e")
	})
	add("EPERM/directory-as-user", func(t *T) {
		t.As(alice, func() {
			t.Mkdir("d")
			t.Want("link", unix.Link("d", "e"), unix.EPERM)
		})
	})
	add("EEXIST/to-itself", func(t *T) {
		t.File("f", "x")
		t.Want("link", unix.Link("f", "f"), unix.EEXIST)
	})
	add("ok/symlink-is-not-followed", func(t *T) {
		t.File("target", "x")
		t.Make(symlink, "l", 0)
		t.OK("link", unix.Link("l", "m"))
		t.Exists("m", symlink)
		t.Nlink("target", 1)
	})
	add("ok/AT_SYMLINK_FOLLOW", func(t *T) {
		t.File("target", "x")
		t.Make(symlink, "l", 0)
		t.OK("linkat", unix.Linkat(here, "l", here, "m", unix.AT_SYMLINK_FOLLOW))
		t.Exists("m", regular)
		t.Nlink("target", 2)
	})
	add("ENOENT/AT_SYMLINK_FOLLOW-dangling", func(t *T) {
		t.Make(symlink, "l", 0)
		t.Want("linkat", unix.Linkat(here, "l", here, "m", unix.AT_SYMLINK_FOLLOW), unix.ENOENT)
	})
	add("ok/AT_EMPTY_PATH", func(t *T) {
		t.File("f", "x")
		fd := t.Open("f", unix.O_RDONLY, 0)
		t.OK("linkat", unix.Linkat(fd, "", here, "g", unix.AT_EMPTY_PATH))
		t.Nlink("f", 2)
	})
	add("EINVAL/unknown-flag", func(t *T) {
		t.File("f", "x")
		t.Want("linkat", unix.Linkat(here, "f", here, "g", 1<<20), unix.EINVAL)
	})
	add("EEXIST/new-name-is-dot", func(t *T) {
		t.File("f", "x")
		t.Want("link", unix.Link("f", "."), unix.EEXIST)
	})
	add("EEXIST/new-name-is-dangling-symlink", func(t *T) {
		t.File("f", "x")
		t.Make(symlink, "l", 0)
		t.Want("link", unix.Link("f", "l"), unix.EEXIST)
		t.Missing("target")
	})
	add("ok/content-is-shared", func(t *T) {
		t.File("f", "one")
		t.OK("link", unix.Link("f", "g"))
		fd := t.Open("g", unix.O_WRONLY, 0)
		t.Pwrite(fd, "two!", 0)
		t.Content("f", "two!")
	})
	add("ok/truncation-by-one-name-seen-by-the-other", func(t *T) {
		t.File("f", "content")
		t.OK("link", unix.Link("f", "g"))
		t.OK("truncate", unix.Truncate("g", 3))
		Equal(t, "size", t.Lstat("f").Size, 3)
		t.Content("f", "con")
	})
	add("ok/open-descriptor-sees-link-count", func(t *T) {
		t.File("f", "x")
		fd := t.Open("f", unix.O_RDONLY, 0)
		for i := range 5 {
			t.OK("link", unix.Link("f", fmt.Sprint("g", i)))
			Equal(t, "links by fstat", t.Fstat(fd).Nlink, uint64(2+i))
		}
	})
	add("ok/thousand-links", func(t *T) {
		t.File("f", "x")
		for i := range 1000 {
			t.OK("link", unix.Link("f", fmt.Sprint(i)))
		}
		t.Nlink("f", 1001)
		for i := range 1000 {
			t.OK("unlink", unix.Unlink(fmt.Sprint(i)))
		}
		t.Nlink("f", 1)
	})
	add("ok/links-in-ten-directories", func(t *T) {
		t.File("f", "x")
		for i := range 10 {
			t.Mkdir(fmt.Sprint("d", i))
			t.OK("link", unix.Link("f", fmt.Sprintf("d%d/f", i)))
		}
		t.Nlink("f", 11)
		t.OK("unlink", unix.Unlink("f"))
		t.Content("d7/f", "x")
	})
	add("ok/same-name-linked-again-after-unlink", func(t *T) {
		t.File("f", "x")
		for range 20 {
			t.OK("link", unix.Link("f", "g"))
			t.OK("unlink", unix.Unlink("g"))
		}
		t.Nlink("f", 1)
	})
	add("ok/by-owner-without-permission-to-read", func(t *T) {
		t.File("f", "x")
		t.Give("f", alice)
		t.Chmod("f", 0)
		t.As(alice, func() { t.OK("link", unix.Link("f", "g")) })
	})
	return cs
}

// symlinkCases are the rules of symlink(2) and readlink(2).
func symlinkCases() []Case {
	var cs []Case
	add := func(name string, run func(*T)) { cs = append(cs, Case{name, run}) }
	for _, n := range []int{1, 2, 59, 60, 61, 127, 255, 256, 1023, 4094, 4095} {
		add(fmt.Sprintf("symlink/ok/target-of-%d-bytes", n), func(t *T) {
			target := strings.Repeat("0123456789abcde/", n/16+1)[:n]
			t.OK("symlink", unix.Symlink(target, "l"))
			Equal(t, "size", t.Lstat("l").Size, int64(n))
			b := make([]byte, 5000)
			got, err := unix.Readlink("l", b)
			t.OK("readlink", err)
			sameBytes(t, "target", b[:got], []byte(target))
		})
	}
	for name, target := range map[string]string{"absolute": "/etc/passwd", "dot": ".", "dotdot": "..", "trailing-slash": "dir/", "double-slash": "a//b", "newline": "a\nb", "invalid-utf8": "\xff\x80", "space": " ", "percent": "%s%n"} {
		add("symlink/ok/target-with-"+name+"-is-kept-as-it-is", func(t *T) {
			t.OK("symlink", unix.Symlink(target, "l"))
			b := make([]byte, 100)
			n, err := unix.Readlink("l", b)
			t.OK("readlink", err)
			Equal(t, "target", string(b[:n]), target)
		})
	}
	add("symlink/ENAMETOOLONG/target-of-4096-bytes", func(t *T) {
		t.Want("symlink", unix.Symlink(strings.Repeat("x", 4096), "l"), unix.ENAMETOOLONG)
		t.Missing("l")
	})
	add("symlink/ENOENT/empty-target", func(t *T) {
		t.Want("symlink", unix.Symlink("", "l"), unix.ENOENT)
		t.Missing("l")
	})
	add("symlink/EFAULT/bad-target-address", func(t *T) {
		t.Want("symlinkat", with("l", func(p uintptr) error { return call(unix.SYS_SYMLINKAT, 4, cwd, p) }), unix.EFAULT)
	})
	add("symlink/ENAMETOOLONG/following-target-with-256-byte-name", func(t *T) {
		t.OK("symlink", unix.Symlink(strings.Repeat("x", 256), "l"))
		t.Want("open", tryOpen("l", unix.O_RDONLY), unix.ENAMETOOLONG)
	})
	for _, typ := range nonLinks {
		add("readlink/EINVAL/"+string(typ), func(t *T) {
			t.Make(typ, "f", 0o644)
			_, err := unix.Readlink("f", make([]byte, 10))
			t.Want("readlink", err, unix.EINVAL)
		})
		add("symlink/ok/to-"+string(typ)+"-is-followed-by-stat", func(t *T) {
			t.Make(typ, "target", 0o644)
			t.Make(symlink, "l", 0)
			var st unix.Stat_t
			t.OK("stat", unix.Stat("l", &st))
			Equal(t, "inode number", st.Ino, t.Lstat("target").Ino)
			Equal(t, "type", st.Mode&unix.S_IFMT, typeBits[typ])
		})
	}
	for _, n := range []int{1, 5, 6, 7} {
		add(fmt.Sprintf("readlink/ok/buffer-of-%d-bytes-for-target-of-6", n), func(t *T) {
			t.Make(symlink, "l", 0) // "target"
			b := []byte("________")
			got, err := unix.Readlink("l", b[:n])
			t.OK("readlink", err)
			Equal(t, "bytes", got, min(n, 6))
			Equal(t, "buffer", string(b), "target"[:min(n, 6)]+"________"[min(n, 6):])
		})
	}
	add("readlink/EINVAL/buffer-of-0-bytes", func(t *T) {
		t.Make(symlink, "l", 0)
		t.Want("readlink", with("l", func(p uintptr) error { return call(unix.SYS_READLINKAT, cwd, p, 0, 0) }), unix.EINVAL)
	})
	add("readlink/EFAULT/bad-buffer", func(t *T) {
		t.Make(symlink, "l", 0)
		t.Want("readlink", with("l", func(p uintptr) error { return call(unix.SYS_READLINKAT, cwd, p, 4, 10) }), unix.EFAULT)
	})
	add("readlink/ok/empty-path-with-descriptor-of-link", func(t *T) {
		t.Make(symlink, "l", 0)
		fd := t.Open("l", unix.O_PATH|unix.O_NOFOLLOW, 0)
		b := make([]byte, 20)
		n, err := unix.Readlinkat(fd, "", b)
		t.OK("readlinkat", err)
		Equal(t, "target", string(b[:n]), "target")
	})
	add("readlink/ok/by-user-whatever-the-mode", func(t *T) {
		t.Make(symlink, "l", 0)
		t.As(alice, func() {
			_, err := unix.Readlink("l", make([]byte, 10))
			t.OK("readlink", err)
		})
	})
	add("symlink/ok/target-is-relative-to-the-link", func(t *T) {
		t.Mkdir("d")
		t.File("d/target", "inside")
		t.File("target", "outside")
		t.Make(symlink, "d/l", 0)
		t.Content("d/l", "inside")
	})
	add("symlink/ok/to-directory-used-as-prefix", func(t *T) {
		t.Mkdir("target")
		t.Make(symlink, "l", 0)
		t.File("l/f", "x")
		t.Content("target/f", "x")
		t.Mkdir("l/d")
		t.OK("rmdir", unix.Rmdir("l/d"))
		t.OK("unlink", unix.Unlink("l/f"))
	})
	add("symlink/ok/dotdot-after-symlink-is-the-parent-of-its-target", func(t *T) {
		t.Mkdir("a")
		t.Mkdir("a/b")
		t.File("a/f", "in a")
		t.OK("symlink", unix.Symlink("a/b", "l"))
		t.Content("l/../f", "in a")
	})
	add("symlink/ok/made-by-user-belongs-to-it", func(t *T) {
		t.As(alice, func() { t.Make(symlink, "l", 0) })
		t.Owner("l", alice.UID, alice.GID)
	})
	add("symlink/ok/same-target-after-rename-of-the-link", func(t *T) {
		t.Make(symlink, "l", 0)
		t.Mkdir("d")
		t.OK("rename", unix.Rename("l", "d/m"))
		b := make([]byte, 20)
		n, err := unix.Readlink("d/m", b)
		t.OK("readlink", err)
		Equal(t, "target", string(b[:n]), "target")
	})
	return cs
}
