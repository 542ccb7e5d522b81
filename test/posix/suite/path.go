package suite

import (
	"fmt"
	"strings"

	"golang.org/x/sys/unix"
)

// pathCases brings every operation with a path into every situation of path resolution:
// path_resolution(7) holds for all of them alike.
func pathCases() []Case {
	var cs []Case
	for _, op := range pathOps() {
		add := func(situation string, run func(*T)) {
			cs = append(cs, Case{op.name + "/" + situation, func(t *T) {
				t.newObject(regular, "src")
				run(t)
			}})
		}
		// want runs the operation on path and expects the errno.
		want := func(t *T, path string, errno error) {
			t.Want(fmt.Sprintf("%s(%s)", op.name, short(path)), op.onPath(here, path), errno)
		}

		for _, typ := range append(plainTypes, symlink) {
			add("ENOTDIR/prefix-is-"+string(typ), func(t *T) {
				if typ == symlink {
					t.File("file", "")
					t.OK("symlink", unix.Symlink("file", "p"))
				} else {
					t.Make(typ, "p", 0o755)
				}
				want(t, "p/f", unix.ENOTDIR)
			})
		}
		add("ENOENT/prefix-is-missing", func(t *T) { want(t, "missing/f", unix.ENOENT) })
		add("ENOENT/prefix-is-dangling-symlink", func(t *T) {
			t.Make(symlink, "p", 0)
			want(t, "p/f", unix.ENOENT)
		})
		add("ENOENT/empty-path", func(t *T) { want(t, "", unix.ENOENT) })
		if op.need != none {
			add("ENOENT/last-is-missing", func(t *T) { want(t, "f", unix.ENOENT) })
		}
		add("ENAMETOOLONG/name-of-256-bytes", func(t *T) { want(t, strings.Repeat("n", 256), unix.ENAMETOOLONG) })
		add("ENAMETOOLONG/prefix-name-of-256-bytes", func(t *T) { want(t, strings.Repeat("n", 256)+"/f", unix.ENAMETOOLONG) })
		add("ENAMETOOLONG/path-of-4096-bytes", func(t *T) {
			t.newObject(op.need, "ff")
			want(t, strings.Repeat("./", 2047)+"ff", unix.ENAMETOOLONG)
		})
		add("ok/path-of-4095-bytes", func(t *T) {
			t.newObject(op.need, "f")
			want(t, strings.Repeat("./", 2047)+"f", nil)
		})
		add("ok/name-of-255-bytes", func(t *T) {
			name := strings.Repeat("n", 255)
			t.newObject(op.need, name)
			want(t, name, nil)
		})
		add("ok/name-of-255-bytes-of-every-value", func(t *T) {
			name := everyByte()
			t.newObject(op.need, name)
			want(t, name, nil)
		})
		add("ELOOP/prefix-is-symlink-to-itself", func(t *T) {
			t.OK("symlink", unix.Symlink("p", "p"))
			want(t, "p/f", unix.ELOOP)
		})
		add("ELOOP/prefix-is-pair-of-symlinks", func(t *T) {
			t.OK("symlink", unix.Symlink("q", "p"))
			t.OK("symlink", unix.Symlink("p", "q"))
			want(t, "p/f", unix.ELOOP)
		})
		add("ELOOP/prefix-is-chain-of-41-symlinks", func(t *T) {
			chain(t, op.need, 41)
			want(t, "l41/f", unix.ELOOP)
		})
		add("ok/prefix-is-chain-of-40-symlinks", func(t *T) {
			chain(t, op.need, 40)
			want(t, "l40/f", nil)
		})
		if op.follow {
			add("ELOOP/last-is-symlink-to-itself", func(t *T) {
				t.OK("symlink", unix.Symlink("l", "l"))
				want(t, "l", unix.ELOOP)
			})
			add("ok/last-is-symlink", func(t *T) {
				t.newObject(op.need, "target")
				t.Make(symlink, "l", 0)
				want(t, "l", nil)
			})
			if op.need != none {
				add("ENOENT/last-is-dangling-symlink", func(t *T) {
					t.Make(symlink, "l", 0)
					want(t, "l", unix.ENOENT)
				})
			}
		} else if op.need == regular && !strings.Contains(op.name, "xattr") {
			add("ok/last-is-symlink-to-itself", func(t *T) {
				t.OK("symlink", unix.Symlink("l", "l"))
				want(t, "l", nil)
			})
		}
		for _, c := range []struct {
			class             string
			owner             User
			noSearch, noWrite uint32
		}{
			{"owner", alice, 0o677, 0o577}, {"group", User{GID: alice.GID}, 0o767, 0o757},
			{"supplementary-group", User{GID: team}, 0o767, 0o757}, {"other", bob, 0o776, 0o775},
		} {
			denied := func(mode uint32) func(t *T) {
				return func(t *T) {
					t.Mkdir("d")
					t.newObject(op.need, "d/f")
					t.Give("d", c.owner)
					t.Chmod("d", mode)
					t.As(alice, func() { want(t, "d/f", unix.EACCES) })
				}
			}
			add("EACCES/no-search-permission-as-"+c.class, denied(c.noSearch))
			if op.modify {
				add("EACCES/no-write-permission-as-"+c.class, denied(c.noWrite))
			}
		}
		if op.name != "exec" {
			add("EFAULT/bad-address", func(t *T) { t.Want(op.name+"(path at address 4)", op.do(here, 4), unix.EFAULT) })
		}
		add("ENOENT/working-directory-was-removed", func(t *T) {
			t.Mkdir("gone")
			src := t.Dir + "/gone"
			t.OK("chdir", unix.Chdir(src))
			t.OK("rmdir", unix.Rmdir(src))
			want(t, "f", unix.ENOENT)
		})
		if op.need == regular || op.need == symlink {
			add("ENOTDIR/trailing-slash-after-file", func(t *T) {
				t.newObject(regular, "f")
				want(t, "f/", unix.ENOTDIR)
			})
		}
		if op.need == dir {
			add("ENOTDIR/last-is-file", func(t *T) {
				t.newObject(regular, "f")
				want(t, "f", unix.ENOTDIR)
			})
			add("ok/trailing-slashes", func(t *T) {
				t.newObject(dir, "d")
				want(t, "d///", nil)
			})
		}
		if trail, ok := slashNew[op.name]; ok {
			add(trailName(trail)+"/trailing-slash-after-new-name", func(t *T) { want(t, "new/", trail) })
		}
		if op.need == none && op.name != "open-creat" && op.name != "rename-to" {
			for _, typ := range allTypes {
				add("EEXIST/last-is-"+string(typ), func(t *T) {
					t.Make(typ, "f", 0o755)
					before := t.Lstat("f")
					want(t, "f", unix.EEXIST)
					after := t.Lstat("f")
					Equal(t, "inode number afterwards", after.Ino, before.Ino)
				})
			}
			add("EEXIST/last-is-dot", func(t *T) { want(t, ".", unix.EEXIST) })
		}
	}
	return cs
}

// slashNew has the errors of operations that make a name, if a slash follows the name:
// only mkdir may be called in this way.
var slashNew = map[string]error{
	"mkdir": nil, "mkfifo": unix.ENOENT, "mknod-regular": unix.ENOENT, "mknod-char": unix.ENOENT, "mknod-block": unix.ENOENT, "mknod-socket": unix.ENOENT,
	"symlink": unix.ENOENT, "link-to": unix.ENOENT, "open-creat": unix.EISDIR, "open-creat-excl": unix.EISDIR, "rename-to": unix.ENOTDIR, "rename-noreplace-to": unix.ENOTDIR,
}

func trailName(err error) string {
	if err == nil {
		return "ok"
	}
	return errText(err)
}

// chain makes n symbolic links: l1 points to a directory with the object f, each later
// link to the link before.
func chain(t *T, need Type, n int) {
	t.Mkdir("l0")
	t.newObject(need, "l0/f")
	for i := range n {
		t.OK("symlink", unix.Symlink(fmt.Sprintf("l%d", i), fmt.Sprintf("l%d", i+1)))
	}
}

// everyByte returns a name of 255 bytes: all values except NUL and the slash, and a
// single value twice.
func everyByte() string {
	b := []byte{'x'}
	for v := 1; v < 256; v++ {
		if v != '/' {
			b = append(b, byte(v))
		}
	}
	return string(b)
}

// dirfdCases tries the operations with a directory descriptor on valid and invalid
// descriptors.
func dirfdCases() []Case {
	var cs []Case
	for _, op := range pathOps() {
		if !op.at {
			continue
		}
		add := func(situation string, run func(*T)) {
			cs = append(cs, Case{op.name + "/" + situation, func(t *T) {
				t.newObject(regular, "src")
				run(t)
			}})
		}
		add("EBADF/descriptor-is-not-open", func(t *T) {
			t.newObject(op.need, "f")
			t.Want(op.name+"at(-1, f)", op.onPath(-1, "f"), unix.EBADF)
		})
		add("ok/bad-descriptor-with-absolute-path", func(t *T) {
			t.newObject(op.need, "f")
			t.OK(op.name+"at(-1, absolute path)", op.onPath(-1, t.Dir+"/f"))
		})
		add("ENOTDIR/descriptor-of-file", func(t *T) {
			t.newObject(op.need, "f")
			fd := t.Open("src", unix.O_RDONLY, 0)
			t.Want(op.name+"at(file, f)", op.onPath(fd, "f"), unix.ENOTDIR)
		})
		add("ok/relative-to-other-directory", func(t *T) {
			t.Mkdir("d")
			t.newObject(op.need, "d/f")
			fd := t.Open("d", unix.O_RDONLY|unix.O_DIRECTORY, 0)
			t.OK(op.name+"at(d, f)", op.onPath(fd, "f"))
		})
		add("ok/relative-to-O_PATH-descriptor", func(t *T) {
			t.Mkdir("d")
			t.newObject(op.need, "d/f")
			fd := t.Open("d", unix.O_PATH|unix.O_DIRECTORY, 0)
			t.OK(op.name+"at(d, f)", op.onPath(fd, "f"))
		})
		add("ok/relative-to-directory-that-was-renamed", func(t *T) {
			t.Mkdir("d")
			t.newObject(op.need, "d/f")
			fd := t.Open("d", unix.O_RDONLY|unix.O_DIRECTORY, 0)
			t.OK("rename", unix.Rename("d", "e"))
			t.OK(op.name+"at(e, f)", op.onPath(fd, "f"))
		})
		add("ENOENT/descriptor-of-removed-directory", func(t *T) {
			t.Mkdir("d")
			fd := t.Open("d", unix.O_RDONLY|unix.O_DIRECTORY, 0)
			t.OK("rmdir", unix.Rmdir("d"))
			t.Want(op.name+"at(removed, f)", op.onPath(fd, "f"), unix.ENOENT)
		})
	}
	return cs
}
