package suite

import (
	"fmt"

	"golang.org/x/sys/unix"
)

// createCases are the rules for the properties of a new object: mode, umask, owner,
// group, times, links.
func createCases() []Case {
	var cs []Case
	add := func(name string, run func(*T)) { cs = append(cs, Case{"create/" + name, run}) }
	modes := []uint32{0, 0o111, 0o222, 0o444, 0o600, 0o644, 0o700, 0o755, 0o777, 0o1777, 0o4755, 0o6711}
	for _, typ := range nonLinks {
		for _, umask := range []int{0, 0o022, 0o027, 0o077, 0o177, 0o777} {
			add(fmt.Sprintf("mode-of-%s-with-umask-%03o", typ, umask), func(t *T) {
				t.Umask(umask)
				for i, m := range modes {
					path := fmt.Sprint("f", i)
					t.Make(typ, path, m)
					want := m &^ uint32(umask)
					if typ == dir {
						want &= 0o1777 // mkdir(2) takes permissions and the sticky bit only
					}
					t.Mode(path, want)
				}
			})
		}
		add("links-of-new-"+string(typ), func(t *T) {
			t.Make(typ, "f", 0o755)
			if typ == dir {
				t.Nlink("f", 2)
			} else {
				t.Nlink("f", 1)
			}
		})
		add("size-of-new-"+string(typ), func(t *T) {
			t.Make(typ, "f", 0o755)
			if typ != dir {
				Equal(t, "size", t.Lstat("f").Size, 0)
				Equal(t, "blocks", t.Lstat("f").Blocks, 0)
			} else {
				Equal(t, "entries", len(names(t, "f")), 0)
			}
		})
	}
	for _, typ := range allTypes {
		add("type-of-new-"+string(typ), func(t *T) {
			t.Make(typ, "f", 0o755)
			t.Exists("f", typ)
		})
		add("owner-of-new-"+string(typ)+"-is-root", func(t *T) {
			t.Make(typ, "f", 0o755)
			t.Owner("f", 0, 0)
		})
		add("inode-number-of-new-"+string(typ)+"-is-its-own", func(t *T) {
			t.Make(typ, "f", 0o755)
			t.Make(typ, "g", 0o755)
			t.True(t.Lstat("f").Ino != t.Lstat("g").Ino, "f and g have the same inode number %d", t.Lstat("f").Ino)
			t.True(t.Lstat("f").Ino != 0, "inode number 0")
		})
		add("group-of-new-"+string(typ)+"-in-set-group-id-directory", func(t *T) {
			sgidDir(t, "d")
			t.Make(typ, "d/f", 0o755)
			t.Owner("d/f", 0, 30002)
			bit := t.Lstat("d/f").Mode & unix.S_ISGID
			if typ == dir {
				Equal(t, "set-group-id bit of the new directory", bit, unix.S_ISGID)
			} else {
				Equal(t, "set-group-id bit of the new object", bit, 0)
			}
		})
		if typ != char && typ != block {
			add("owner-of-new-"+string(typ)+"-is-the-caller", func(t *T) {
				t.As(alice, func() { t.Make(typ, "f", 0o755) })
				t.Owner("f", alice.UID, alice.GID)
			})
			add("owner-of-new-"+string(typ)+"-is-the-caller-in-directory-of-other", func(t *T) {
				t.Mkdir("d")
				t.Give("d", bob)
				t.As(alice, func() { t.Make(typ, "d/f", 0o755) })
				t.Owner("d/f", alice.UID, alice.GID)
			})
			add("group-of-new-"+string(typ)+"-in-set-group-id-directory-as-user", func(t *T) {
				sgidDir(t, "d")
				t.As(alice, func() { t.Make(typ, "d/f", 0o755) })
				t.Owner("d/f", alice.UID, 30002)
			})
		} else {
			add("EPERM/"+string(typ)+"-device-by-user", func(t *T) {
				t.As(alice, func() { t.Want("mknod", create(typ, "f", 0o644), unix.EPERM) })
				t.Missing("f")
			})
		}
	}
	add("set-group-id-bit-dropped-when-caller-is-not-in-the-group", func(t *T) {
		sgidDir(t, "d")
		t.As(alice, func() { t.Make(regular, "d/f", 0o2775) })
		t.Mode("d/f", 0o775)
	})
	add("set-group-id-bit-kept-when-caller-is-in-the-group", func(t *T) {
		t.Mkdir("d")
		t.OK("chown", unix.Chown("d", 0, team))
		t.Chmod("d", 0o2777)
		t.As(alice, func() { t.Make(regular, "d/f", 0o2775) })
		t.Mode("d/f", 0o2775)
	})
	add("set-group-id-bit-without-group-execution-kept-in-plain-directory", func(t *T) {
		t.As(alice, func() { t.Make(regular, "f", 0o2664) })
		t.Mode("f", 0o2664)
	})
	add("set-group-id-inherited-through-three-levels", func(t *T) {
		sgidDir(t, "d")
		t.As(alice, func() {
			for _, p := range []string{"d/a", "d/a/b", "d/a/b/c"} {
				t.Mkdir(p)
			}
			t.File("d/a/b/c/f", "")
		})
		t.Owner("d/a/b/c/f", alice.UID, 30002)
	})
	add("mkdir-ignores-set-id-bits-of-mode", func(t *T) {
		t.OK("mkdir", unix.Mkdir("d", 0o6755))
		t.Mode("d", 0o755)
	})
	add("links-of-parent-count-subdirectories", func(t *T) {
		t.Mkdir("d")
		for i := range 5 {
			t.Mkdir(fmt.Sprintf("d/%d", i))
			t.Nlink("d", uint64(3+i))
		}
		t.File("d/f", "")
		t.Nlink("d", 7)
	})
	add("device-numbers-are-kept", func(t *T) {
		for i, d := range []uint64{unix.Mkdev(1, 3), unix.Mkdev(8, 1), unix.Mkdev(255, 255), unix.Mkdev(259, 65536), unix.Mkdev(4095, 1<<20-1), 0} {
			for _, bits := range []uint32{unix.S_IFCHR, unix.S_IFBLK} {
				path := fmt.Sprintf("n%d-%o", i, bits)
				t.OK("mknod", unix.Mknod(path, bits|0o600, int(d)))
				Equal(t, "rdev", t.Lstat(path).Rdev, d)
			}
		}
	})
	add("EPERM/mknod-of-directory", func(t *T) { t.Want("mknod(S_IFDIR)", unix.Mknod("d", unix.S_IFDIR|0o755, 0), unix.EPERM) })
	add("EINVAL/mknod-of-symlink", func(t *T) { t.Want("mknod(S_IFLNK)", unix.Mknod("l", unix.S_IFLNK|0o755, 0), unix.EINVAL) })
	add("EINVAL/mknod-of-unknown-type", func(t *T) { t.Want("mknod(0150000)", unix.Mknod("l", 0o150000|0o755, 0), unix.EINVAL) })
	add("mknod-without-type-makes-regular-file", func(t *T) {
		t.OK("mknod", unix.Mknod("f", 0o640, 0))
		t.Exists("f", regular)
		t.Mode("f", 0o640)
	})
	add("symlink-mode-is-0777-with-any-umask", func(t *T) {
		t.Umask(0o777)
		t.Make(symlink, "l", 0)
		t.Mode("l", 0o777)
	})
	add("mkdir-mode-0-can-be-entered-by-root-only", func(t *T) {
		t.As(alice, func() {
			t.OK("mkdir", unix.Mkdir("d", 0))
			t.Want("mkdir inside", unix.Mkdir("d/e", 0o755), unix.EACCES)
		})
		t.OK("mkdir inside as root", unix.Mkdir("d/e", 0o755))
	})
	for _, n := range []int{1, 2, 254, 255} {
		for _, typ := range allTypes {
			add(fmt.Sprintf("%s-with-name-of-%d-bytes", typ, n), func(t *T) {
				name := string(make([]byte, 0, n))
				for len(name) < n {
					name += string(rune('a' + len(name)%26))
				}
				t.Make(typ, name, 0o755)
				list := names(t, ".")
				Equal(t, "entries", len(list), 1)
				Equal(t, "name", list[0], name)
				t.OK("removing it", remove(typ, name))
			})
		}
	}
	for name, n := range map[string]string{
		"newline": "a\nb", "space": " ", "dash": "-rf", "invalid-utf8": "\xff\xfe\x80", "backslash": "a\\b", "three-dots": "...", "dot-dot-x": "..x",
		"control-bytes": "\x01\x02\x1b[31m", "utf8-decomposed": "e\u0301", "utf8-composed": "\u00e9", "tilde": "~", "star": "*?[]", "colon": "a:b", "trailing-dot": "a.", "trailing-space": "a ",
	} {
		add("ok/name-with-"+name, func(t *T) {
			t.File(n, "content")
			t.Content(n, "content")
			list := names(t, ".")
			Equal(t, "entries", len(list), 1)
			Equal(t, "name", list[0], n)
		})
	}
	add("ok/names-that-differ-in-case-are-distinct", func(t *T) {
		t.File("name", "1")
		t.File("NAME", "2")
		t.Content("name", "1")
		Equal(t, "entries", len(names(t, ".")), 2)
	})
	add("ok/composed-and-decomposed-names-are-distinct", func(t *T) {
		t.File("\u00e9", "1")
		t.File("e\u0301", "2")
		Equal(t, "entries", len(names(t, ".")), 2)
	})
	return cs
}

// sgidDir makes a directory of a group that no user of the cases is in.
func sgidDir(t *T, path string) {
	t.Mkdir(path)
	t.OK("chown", unix.Chown(path, 0, 30002))
	t.Chmod(path, 0o2777)
}
