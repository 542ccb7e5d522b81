package suite

import (
	"fmt"
	"strings"

	"golang.org/x/sys/unix"
)

// renameCases are the rules of rename(2) and renameat2(2).
func renameCases() []Case {
	var cs []Case
	add := func(name string, run func(*T)) { cs = append(cs, Case{name, run}) }

	// Every type onto every type, with the expected result.
	for _, from := range allTypes {
		add("rename/ok/"+string(from)+"-to-new-name", func(t *T) {
			t.Make(from, "f", 0o755)
			ino := t.Lstat("f").Ino
			t.OK("rename", unix.Rename("f", "g"))
			t.Missing("f")
			t.Exists("g", from)
			Equal(t, "inode number", t.Lstat("g").Ino, ino)
		})
		add("rename/ok/"+string(from)+"-to-other-directory", func(t *T) {
			t.Make(from, "f", 0o755)
			t.Mkdir("d")
			ino := t.Lstat("f").Ino
			t.OK("rename", unix.Rename("f", "d/g"))
			t.Missing("f")
			t.Exists("d/g", from)
			Equal(t, "inode number", t.Lstat("d/g").Ino, ino)
		})
		add("rename/ok/"+string(from)+"-to-itself", func(t *T) {
			t.Make(from, "f", 0o755)
			ino := t.Lstat("f").Ino
			t.OK("rename", unix.Rename("f", "f"))
			Equal(t, "inode number", t.Lstat("f").Ino, ino)
		})
		add("rename/ok/attributes-of-"+string(from)+"-stay", func(t *T) {
			t.Make(from, "f", 0o640)
			t.OK("lchown", unix.Lchown("f", 11, 12))
			if from != symlink {
				t.Chmod("f", 0o751)
			}
			setTimes(t, "f", 1000, 2000)
			before := t.Lstat("f")
			t.OK("rename", unix.Rename("f", "g"))
			after := t.Lstat("g")
			Equal(t, "mode", after.Mode, before.Mode)
			Equal(t, "owner", after.Uid, before.Uid)
			Equal(t, "group", after.Gid, before.Gid)
			Equal(t, "mtime", after.Mtim, before.Mtim)
			Equal(t, "size", after.Size, before.Size)
		})
		add("rename/EXDEV/"+string(from)+"-to-other-file-system", func(t *T) {
			t.Make(from, "f", 0o755)
			t.Want("rename", unix.Rename("f", elsewhere), unix.EXDEV)
			t.Exists("f", from)
		})
		for _, to := range allTypes {
			var want error
			switch {
			case from == dir && to != dir:
				want = unix.ENOTDIR
			case from != dir && to == dir:
				want = unix.EISDIR
			}
			for _, place := range []string{"same-directory", "other-directory"} {
				add(fmt.Sprintf("rename/%s/%s-over-%s-in-%s", trailName(want), from, to, place), func(t *T) {
					target := "g"
					if place == "other-directory" {
						t.Mkdir("d")
						target = "d/g"
					}
					t.Make(from, "f", 0o755)
					t.Make(to, target, 0o755)
					ino, old := t.Lstat("f").Ino, t.Lstat(target).Ino
					t.Want("rename", unix.Rename("f", target), want)
					if want == nil {
						t.Missing("f")
						t.Exists(target, from)
						Equal(t, "inode number of the target", t.Lstat(target).Ino, ino)
						return
					}
					Equal(t, "inode number of the source", t.Lstat("f").Ino, ino)
					Equal(t, "inode number of the target", t.Lstat(target).Ino, old)
				})
			}
			add(fmt.Sprintf("rename-noreplace/EEXIST/%s-over-%s", from, to), func(t *T) {
				t.Make(from, "f", 0o755)
				t.Make(to, "g", 0o755)
				t.Want("renameat2(NOREPLACE)", unix.Renameat2(here, "f", here, "g", unix.RENAME_NOREPLACE), unix.EEXIST)
				t.Exists("f", from)
				t.Exists("g", to)
			})
			add(fmt.Sprintf("rename-exchange/ok/%s-with-%s", from, to), func(t *T) {
				t.Mkdir("d")
				t.Make(from, "f", 0o755)
				t.Make(to, "d/g", 0o755)
				a, b := t.Lstat("f").Ino, t.Lstat("d/g").Ino
				t.OK("renameat2(EXCHANGE)", unix.Renameat2(here, "f", here, "d/g", unix.RENAME_EXCHANGE))
				t.Exists("f", to)
				t.Exists("d/g", from)
				Equal(t, "inode number of f", t.Lstat("f").Ino, b)
				Equal(t, "inode number of d/g", t.Lstat("d/g").Ino, a)
			})
		}
		add("rename-noreplace/ok/"+string(from)+"-to-new-name", func(t *T) {
			t.Make(from, "f", 0o755)
			t.OK("renameat2(NOREPLACE)", unix.Renameat2(here, "f", here, "g", unix.RENAME_NOREPLACE))
			t.Exists("g", from)
			t.Missing("f")
		})
		add("rename-noreplace/EEXIST/"+string(from)+"-over-itself", func(t *T) {
			t.Make(from, "f", 0o755)
			t.Want("renameat2(NOREPLACE)", unix.Renameat2(here, "f", here, "f", unix.RENAME_NOREPLACE), unix.EEXIST)
		})
		add("rename-exchange/ENOENT/"+string(from)+"-with-missing", func(t *T) {
			t.Make(from, "f", 0o755)
			t.Want("renameat2(EXCHANGE)", unix.Renameat2(here, "f", here, "g", unix.RENAME_EXCHANGE), unix.ENOENT)
			t.Want("renameat2(EXCHANGE)", unix.Renameat2(here, "g", here, "f", unix.RENAME_EXCHANGE), unix.ENOENT)
			t.Exists("f", from)
		})
		want := error(unix.EISDIR)
		if from == dir {
			want = unix.ENOTEMPTY
		}
		add(fmt.Sprintf("rename/%s/%s-over-directory-with-entries", errText(want), from), func(t *T) {
			t.Make(from, "f", 0o755)
			t.Mkdir("g")
			t.File("g/entry", "")
			t.Want("rename", unix.Rename("f", "g"), want)
			t.Exists("g/entry", regular)
			t.Exists("f", from)
		})
		if from != dir {
			add("rename/ok/"+string(from)+"-over-its-own-other-link-changes-nothing", func(t *T) {
				t.Make(from, "f", 0o644)
				t.OK("link", unix.Link("f", "g"))
				t.OK("rename", unix.Rename("f", "g"))
				t.Exists("f", from)
				t.Exists("g", from)
				t.Nlink("f", 2)
			})
			add("rename-exchange/ok/"+string(from)+"-with-its-own-other-link", func(t *T) {
				t.Make(from, "f", 0o644)
				t.OK("link", unix.Link("f", "g"))
				t.OK("renameat2(EXCHANGE)", unix.Renameat2(here, "f", here, "g", unix.RENAME_EXCHANGE))
				t.Nlink("f", 2)
				t.Nlink("g", 2)
			})
			add("rename/ok/links-of-replaced-"+string(from)+"-fall", func(t *T) {
				t.Make(from, "old", 0o644)
				t.OK("link", unix.Link("old", "other"))
				t.File("f", "")
				t.OK("rename", unix.Rename("f", "old"))
				t.Nlink("other", 1)
			})
		}
	}

	for name, c := range map[string]struct {
		from, to string
		want     error
	}{
		"EINVAL/into-own-subdirectory":         {"d", "d/sub/x", unix.EINVAL},
		"EINVAL/into-itself":                   {"d", "d/x", unix.EINVAL},
		"ENOTEMPTY/over-own-parent":            {"d/sub", "d", unix.ENOTEMPTY},
		"EBUSY/from-dot":                       {"d/.", "e", unix.EBUSY},
		"EBUSY/from-dotdot":                    {"d/sub/..", "e", unix.EBUSY},
		"EBUSY/to-dot":                         {"empty", "d/.", unix.EBUSY},
		"EBUSY/to-dotdot":                      {"empty", "d/sub/..", unix.EBUSY},
		"EBUSY/working-directory-as-dot":       {".", "e", unix.EBUSY},
		"ENOTDIR/file-to-name-with-slash":      {"f", "e/", unix.ENOTDIR},
		"ENOTDIR/file-with-slash-to-new-name":  {"f/", "e", unix.ENOTDIR},
		"ok/directory-to-name-with-slash":      {"empty", "e/", nil},
		"ok/directory-with-slash-to-new-name":  {"empty/", "e", nil},
		"ok/directory-over-empty-with-slash":   {"d", "empty/", nil},
		"ENOTDIR/symlink-to-directory-w-slash": {"l/", "e", unix.ENOTDIR},
		"ok/subdirectory-up":                   {"d/sub", "e", nil},
		"ok/empty-directory-into-sibling":      {"empty", "d/sub/x", nil},
		"ENOENT/both-missing":                  {"nothing", "nothing2", unix.ENOENT},
	} {
		add("rename/"+name, func(t *T) {
			t.Mkdir("d")
			t.Mkdir("d/sub")
			t.Mkdir("empty")
			t.File("f", "")
			t.OK("symlink", unix.Symlink("d", "l"))
			t.Want(fmt.Sprintf("rename(%s, %s)", c.from, c.to), unix.Rename(c.from, c.to), c.want)
		})
	}
	for name, c := range map[string]struct {
		a, b string
		want error
	}{
		"EINVAL/with-own-subdirectory": {"d", "d/sub", unix.EINVAL}, "EINVAL/with-own-parent": {"d/sub", "d", unix.EINVAL},
		"EINVAL/with-file-deep-inside": {"d", "d/sub/deep", unix.EINVAL}, "EBUSY/with-dot": {"d", ".", unix.EBUSY},
		"ok/file-with-directory-that-has-entries": {"f", "d", nil}, "ok/two-in-one-directory": {"f", "g", nil}, "ok/with-itself": {"f", "f", nil},
		"ok/directories-of-different-depth": {"e", "d/sub", nil},
	} {
		add("rename-exchange/"+name, func(t *T) {
			t.Mkdir("d")
			t.Mkdir("e")
			t.Mkdir("d/sub")
			t.File("d/sub/deep", "")
			t.File("f", "")
			t.File("g", "")
			t.Want("renameat2(EXCHANGE)", unix.Renameat2(here, c.a, here, c.b, unix.RENAME_EXCHANGE), c.want)
		})
	}
	for name, flags := range map[string]uint{"NOREPLACE-EXCHANGE": unix.RENAME_NOREPLACE | unix.RENAME_EXCHANGE, "unknown-flag": 1 << 10, "WHITEOUT-EXCHANGE": unix.RENAME_WHITEOUT | unix.RENAME_EXCHANGE} {
		add("renameat2/EINVAL/"+name, func(t *T) {
			t.File("f", "")
			t.File("g", "")
			t.Want("renameat2", unix.Renameat2(here, "f", here, "g", flags), unix.EINVAL)
		})
	}
	add("renameat2/ok-or-EINVAL/WHITEOUT", func(t *T) {
		t.File("f", "x")
		err := unix.Renameat2(here, "f", here, "g", unix.RENAME_WHITEOUT)
		t.WantOneOf("renameat2(WHITEOUT)", err, nil, unix.EINVAL)
		if err == nil {
			t.Exists("f", char)
			Equal(t, "device number of the whiteout", t.Lstat("f").Rdev, 0)
			t.Content("g", "x")
		}
	})

	add("rename/ok/links-of-parents-follow-moved-directory", func(t *T) {
		t.Mkdir("a")
		t.Mkdir("b")
		t.Mkdir("a/d")
		t.OK("rename", unix.Rename("a/d", "b/d"))
		t.Nlink("a", 2)
		t.Nlink("b", 3)
	})
	add("rename/ok/links-of-parent-when-directory-replaces-directory", func(t *T) {
		t.Mkdir("p")
		t.Mkdir("p/a")
		t.Mkdir("p/b")
		t.OK("rename", unix.Rename("p/a", "p/b"))
		t.Nlink("p", 3)
	})
	add("rename-exchange/ok/links-of-parents-when-file-and-directory-change-places", func(t *T) {
		t.Mkdir("a")
		t.Mkdir("b")
		t.Mkdir("a/d")
		t.File("b/f", "")
		t.OK("renameat2", unix.Renameat2(here, "a/d", here, "b/f", unix.RENAME_EXCHANGE))
		t.Nlink("a", 2)
		t.Nlink("b", 3)
	})
	add("rename/ok/dotdot-of-moved-directory", func(t *T) {
		t.Mkdir("a")
		t.Mkdir("b")
		t.Mkdir("a/d")
		t.OK("rename", unix.Rename("a/d", "b/d"))
		Equal(t, "inode number of b/d/..", t.Lstat("b/d/..").Ino, t.Lstat("b").Ino)
		fd := t.Open("b/d", unix.O_RDONLY|unix.O_DIRECTORY, 0)
		for _, e := range entries(t, fd) {
			if e.name == ".." {
				Equal(t, "inode number of .. in the listing", e.ino, t.Lstat("b").Ino)
			}
		}
	})
	add("rename-exchange/ok/dotdot-of-both-directories", func(t *T) {
		for _, d := range []string{"a", "b", "a/x", "b/y"} {
			t.Mkdir(d)
		}
		t.File("a/x/in-x", "")
		t.OK("renameat2", unix.Renameat2(here, "a/x", here, "b/y", unix.RENAME_EXCHANGE))
		Equal(t, "inode number of b/y/..", t.Lstat("b/y/..").Ino, t.Lstat("b").Ino)
		Equal(t, "inode number of a/x/..", t.Lstat("a/x/..").Ino, t.Lstat("a").Ino)
		t.Exists("b/y/in-x", regular)
	})
	add("rename/ok/tree-moves-with-its-directory", func(t *T) {
		t.Mkdir("a")
		t.Mkdir("a/b")
		t.File("a/b/f", "deep")
		t.OK("rename", unix.Rename("a", "z"))
		t.Content("z/b/f", "deep")
		t.Missing("a")
	})
	add("rename/ok/open-file-follows-its-name", func(t *T) {
		fd := t.Open("f", unix.O_CREAT|unix.O_RDWR, 0o644)
		t.OK("rename", unix.Rename("f", "g"))
		t.Write(fd, "after")
		t.Content("g", "after")
	})
	add("rename/ok/replaced-open-file-stays-readable", func(t *T) {
		t.File("old", "old content")
		t.File("new", "new")
		fd := t.Open("old", unix.O_RDWR, 0)
		t.OK("rename", unix.Rename("new", "old"))
		Equal(t, "content of the replaced file", t.Pread(fd, 100, 0), "old content")
		Equal(t, "links of the replaced file", t.Fstat(fd).Nlink, 0)
		t.Pwrite(fd, "OLD", 0)
		t.Content("old", "new")
	})
	add("rename/ok/replaced-open-directory-is-dead", func(t *T) {
		t.Mkdir("a")
		t.Mkdir("b")
		fd := t.Open("b", unix.O_RDONLY|unix.O_DIRECTORY, 0)
		t.OK("rename", unix.Rename("a", "b"))
		Equal(t, "links of the replaced directory", t.Fstat(fd).Nlink, 0)
		t.Want("mkdirat in it", unix.Mkdirat(fd, "x", 0o755), unix.ENOENT)
	})
	add("rename/ok/open-directory-follows-its-name", func(t *T) {
		t.Mkdir("a")
		fd := t.Open("a", unix.O_RDONLY|unix.O_DIRECTORY, 0)
		t.OK("rename", unix.Rename("a", "b"))
		t.OK("mkdirat", unix.Mkdirat(fd, "x", 0o755))
		t.Exists("b/x", dir)
	})
	add("rename/ok/working-directory-follows", func(t *T) {
		t.Mkdir("a")
		t.Mkdir("p")
		t.OK("chdir", unix.Chdir("a"))
		t.OK("rename", unix.Rename(t.Dir+"/a", t.Dir+"/p/b"))
		t.File("f", "x")
		t.Content(t.Dir+"/p/b/f", "x")
		b := make([]byte, 4096)
		n, err := unix.Getcwd(b)
		t.OK("getcwd", err)
		t.True(strings.HasSuffix(string(b[:n-1]), "/p/b"), "getcwd gives %s", b[:n-1])
		Equal(t, "inode number of ..", t.Lstat("..").Ino, t.Lstat(t.Dir+"/p").Ino)
	})
	add("rename/ok/symlink-itself-not-its-target", func(t *T) {
		t.File("target", "x")
		t.Make(symlink, "l", 0)
		t.OK("rename", unix.Rename("l", "m"))
		t.Exists("m", symlink)
		t.Exists("target", regular)
	})
	add("rename/ok/over-symlink-replaces-the-link", func(t *T) {
		t.File("target", "kept")
		t.Make(symlink, "l", 0)
		t.File("f", "new")
		t.OK("rename", unix.Rename("f", "l"))
		t.Exists("l", regular)
		t.Content("target", "kept")
	})
	add("rename/ok/over-file-without-permissions", func(t *T) {
		t.As(alice, func() {
			t.File("f", "new")
			t.Make(regular, "g", 0)
			t.OK("rename", unix.Rename("f", "g"))
			t.Content("g", "new")
		})
	})
	add("rename/ok/unsynced-data-over-existing-file", func(t *T) {
		t.File("conf", "old")
		fd := t.Open("conf.new", unix.O_CREAT|unix.O_WRONLY, 0o644)
		t.Write(fd, "new")
		t.OK("rename without fsync", unix.Rename("conf.new", "conf"))
		t.Content("conf", "new")
		t.Write(fd, " and more")
		t.Content("conf", "new and more")
	})
	add("rename/ok/255-byte-names", func(t *T) {
		a, b := strings.Repeat("a", 255), strings.Repeat("b", 255)
		t.File(a, "x")
		t.OK("rename", unix.Rename(a, b))
		t.Content(b, "x")
		t.Missing(a)
	})
	add("rename/ok/there-and-back-hundred-times", func(t *T) {
		t.File("f", "x")
		ino := t.Lstat("f").Ino
		for range 50 {
			t.OK("rename", unix.Rename("f", "g"))
			t.OK("rename", unix.Rename("g", "f"))
		}
		Equal(t, "inode number", t.Lstat("f").Ino, ino)
		Equal(t, "entries", len(names(t, ".")), 1)
	})
	add("rename/ok/missing-name-can-be-made-again", func(t *T) {
		t.File("f", "1")
		t.OK("rename", unix.Rename("f", "g"))
		t.File("f", "2")
		t.Content("f", "2")
		t.Content("g", "1")
	})
	add("rename/ok/case-only", func(t *T) {
		t.File("name", "x")
		t.OK("rename", unix.Rename("name", "NAME"))
		t.Missing("name")
		t.Content("NAME", "x")
	})
	for _, n := range []string{"rename", "rename-noreplace", "rename-exchange"} {
		flags := map[string]uint{"rename": 0, "rename-noreplace": unix.RENAME_NOREPLACE, "rename-exchange": unix.RENAME_EXCHANGE}[n]
		add(n+"/EACCES/moving-directory-that-is-not-writable-to-other-parent", func(t *T) {
			// Its ".." entry changes, which needs write permission on the directory itself.
			t.Mkdir("a")
			t.Mkdir("b")
			t.OK("mkdir", unix.Mkdir("a/d", 0o555))
			t.Give("a/d", alice)
			if flags == unix.RENAME_EXCHANGE {
				t.Mkdir("b/d")
				t.Give("b/d", alice)
			}
			t.As(alice, func() { t.Want("rename", unix.Renameat2(here, "a/d", here, "b/d", flags), unix.EACCES) })
		})
		add(n+"/ok/renaming-directory-that-is-not-writable-in-its-parent", func(t *T) {
			t.OK("mkdir", unix.Mkdir("d", 0o555))
			t.Give("d", alice)
			if flags == unix.RENAME_EXCHANGE {
				t.Mkdir("e")
			}
			t.As(alice, func() { t.OK("rename", unix.Renameat2(here, "d", here, "e", flags)) })
		})
		add(n+"/EACCES/no-write-permission-on-source-directory", func(t *T) {
			t.OK("mkdir", unix.Mkdir("a", 0o755))
			t.File("a/f", "")
			if flags == unix.RENAME_EXCHANGE {
				t.File("g", "")
			}
			t.As(alice, func() { t.Want("rename", unix.Renameat2(here, "a/f", here, "g", flags), unix.EACCES) })
			t.Exists("a/f", regular)
		})
		add(n+"/EACCES/no-write-permission-on-target-directory", func(t *T) {
			t.OK("mkdir", unix.Mkdir("a", 0o755))
			t.File("f", "")
			if flags == unix.RENAME_EXCHANGE {
				t.File("a/g", "")
			}
			t.As(alice, func() { t.Want("rename", unix.Renameat2(here, "f", here, "a/g", flags), unix.EACCES) })
			t.Exists("f", regular)
		})
	}
	return cs
}
