package suite

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"slices"
	"sort"
	"strings"

	"golang.org/x/sys/unix"
)

// entry is one struct linux_dirent64.
type entry struct {
	name string
	ino  uint64
	typ  byte
	off  int64 // the cookie of the next entry
}

// getdents reads one buffer of entries.
func getdents(fd, size int) ([]entry, error) {
	b := make([]byte, size)
	n, err := unix.Getdents(fd, b)
	if err != nil {
		return nil, err
	}
	var es []entry
	for b = b[:n]; len(b) > 0; {
		length := binary.NativeEndian.Uint16(b[16:])
		name, _, _ := bytes.Cut(b[19:length], []byte{0})
		es = append(es, entry{string(name), binary.NativeEndian.Uint64(b), b[18], int64(binary.NativeEndian.Uint64(b[8:]))})
		b = b[length:]
	}
	return es, nil
}

// entries reads the directory from the descriptor's position to its end.
func entries(t *T, fd int) []entry {
	var all []entry
	for {
		es, err := getdents(fd, 32768)
		t.OK("getdents", err)
		if len(es) == 0 {
			return all
		}
		all = append(all, es...)
	}
}

// names lists a directory without the dot entries, sorted.
func names(t *T, path string) []string {
	fd, err := unix.Open(path, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	t.OK("open directory "+short(path), err)
	defer unix.Close(fd)
	var ns []string
	for _, e := range entries(t, fd) {
		if e.name != "." && e.name != ".." {
			ns = append(ns, e.name)
		}
	}
	sort.Strings(ns)
	return ns
}

var direntTypes = map[Type]byte{
	regular: unix.DT_REG, dir: unix.DT_DIR, fifo: unix.DT_FIFO, block: unix.DT_BLK, char: unix.DT_CHR, socket: unix.DT_SOCK, symlink: unix.DT_LNK,
}

// readdirCases are getdents(2) and the positions of a directory.
func readdirCases() []Case {
	var cs []Case
	add := func(name string, run func(*T)) { cs = append(cs, Case{"readdir/" + name, run}) }
	openDir := func(t *T, path string) int { return t.Open(path, unix.O_RDONLY|unix.O_DIRECTORY, 0) }
	fillDir := func(t *T, n int) []string {
		var want []string
		t.Mkdir("d")
		for i := range n {
			name := fmt.Sprintf("entry-%06d", i)
			t.Make(regular, "d/"+name, 0o644)
			want = append(want, name)
		}
		return want
	}
	same := func(t *T, got, want []string) {
		if !slices.Equal(got, want) {
			t.Fatalf("entries: expected %d, got %d; first difference %s", len(want), len(got), firstDifference(got, want))
		}
	}
	for _, n := range []int{0, 1, 2, 10, 100, 1000, 5000} {
		add(fmt.Sprintf("ok/%d-entries", n), func(t *T) {
			want := fillDir(t, n)
			same(t, names(t, "d"), want)
		})
		if n <= 1000 {
			for _, size := range []int{280, 1024, 65536} {
				add(fmt.Sprintf("ok/%d-entries-with-buffer-of-%d", n, size), func(t *T) {
					want := fillDir(t, n)
					fd := openDir(t, "d")
					var got []string
					for {
						es, err := getdents(fd, size)
						t.OK("getdents", err)
						if len(es) == 0 {
							break
						}
						for _, e := range es {
							if e.name[0] != '.' {
								got = append(got, e.name)
							}
						}
					}
					sort.Strings(got)
					same(t, got, want)
				})
			}
			add(fmt.Sprintf("ok/%d-entries-read-twice-after-rewind", n), func(t *T) {
				want := fillDir(t, n)
				fd := openDir(t, "d")
				a := entries(t, fd)
				_, err := unix.Seek(fd, 0, unix.SEEK_SET)
				t.OK("rewinddir", err)
				b := entries(t, fd)
				Equal(t, "entries in the first pass", len(a), len(want)+2)
				Equal(t, "entries in the second pass", len(b), len(a))
				for i := range a {
					Equal(t, "name in both passes", b[i].name, a[i].name)
				}
			})
		}
	}
	for _, n := range []int{3, 50, 600} {
		add(fmt.Sprintf("ok/seekdir-to-every-cookie-of-%d", n), func(t *T) {
			fillDir(t, n)
			fd := openDir(t, "d")
			all := entries(t, fd)
			step := max(1, n/40)
			for i := 0; i < len(all)-1; i += step {
				_, err := unix.Seek(fd, all[i].off, unix.SEEK_SET)
				t.OK("seekdir", err)
				es, err := getdents(fd, 1024)
				t.OK("getdents", err)
				t.True(len(es) > 0, "nothing after the cookie of entry %d of %d", i, len(all))
				Equal(t, fmt.Sprintf("the entry after number %d", i), es[0].name, all[i+1].name)
			}
			_, err := unix.Seek(fd, all[len(all)-1].off, unix.SEEK_SET)
			t.OK("seekdir", err)
			es, err := getdents(fd, 1024)
			t.OK("getdents", err)
			Equal(t, "entries after the last cookie", len(es), 0)
		})
		add(fmt.Sprintf("ok/telldir-tells-the-cookie-of-%d", n), func(t *T) {
			fillDir(t, n)
			fd := openDir(t, "d")
			for {
				es, err := getdents(fd, 1024)
				t.OK("getdents", err)
				if len(es) == 0 {
					break
				}
				at, err := unix.Seek(fd, 0, unix.SEEK_CUR)
				t.OK("telldir", err)
				Equal(t, "position", at, es[len(es)-1].off)
			}
		})
		add(fmt.Sprintf("ok/cookie-holds-in-second-descriptor-of-%d", n), func(t *T) {
			fillDir(t, n)
			all := entries(t, openDir(t, "d"))
			fd := openDir(t, "d")
			i := len(all) / 2
			_, err := unix.Seek(fd, all[i].off, unix.SEEK_SET)
			t.OK("seekdir", err)
			rest := entries(t, fd)
			Equal(t, "entries after the middle", len(rest), len(all)-i-1)
		})
		add(fmt.Sprintf("ok/cookies-differ-among-%d", n), func(t *T) {
			fillDir(t, n)
			seen := map[int64]string{}
			for _, e := range entries(t, openDir(t, "d")) {
				t.True(seen[e.off] == "", "%s and %s have the same cookie", e.name, seen[e.off])
				seen[e.off] = e.name
			}
		})
	}
	for _, typ := range allTypes {
		add("ok/d_type-of-"+string(typ), func(t *T) {
			t.Mkdir("d")
			t.Make(typ, "d/f", 0o755)
			for _, e := range entries(t, openDir(t, "d")) {
				if e.name == "f" {
					Equal(t, "d_type", e.typ, direntTypes[typ])
				}
			}
		})
		add("ok/d_ino-of-"+string(typ)+"-is-st_ino", func(t *T) {
			t.Mkdir("d")
			t.Make(typ, "d/f", 0o755)
			for _, e := range entries(t, openDir(t, "d")) {
				if e.name == "f" {
					Equal(t, "d_ino", e.ino, t.Lstat("d/f").Ino)
				}
			}
		})
		add("ok/d_type-follows-replacement-by-"+string(typ), func(t *T) {
			t.Mkdir("d")
			for _, first := range allTypes {
				t.Make(first, "d/f", 0o755)
				names(t, "d")
				t.OK("removing", remove(first, "d/f"))
			}
			t.Make(typ, "d/f", 0o755)
			for _, e := range entries(t, openDir(t, "d")) {
				if e.name == "f" {
					Equal(t, "d_type", e.typ, direntTypes[typ])
				}
			}
		})
		if typ != dir {
			add("ENOTDIR/getdents-of-"+string(typ), func(t *T) {
				t.Make(typ, "f", 0o644)
				flags := unix.O_RDWR | unix.O_NONBLOCK
				want := error(unix.ENOTDIR)
				if typ == socket || typ == symlink || typ == block {
					flags, want = unix.O_PATH|unix.O_NOFOLLOW, unix.EBADF
				}
				_, err := getdents(t.Open("f", flags, 0), 1024)
				t.Want("getdents", err, want)
			})
		}
	}
	add("ok/dot-entries", func(t *T) {
		t.Mkdir("d")
		found := map[string]entry{}
		for _, e := range entries(t, openDir(t, "d")) {
			found[e.name] = e
		}
		Equal(t, "entries", len(found), 2)
		Equal(t, "inode number of .", found["."].ino, t.Lstat("d").Ino)
		Equal(t, "inode number of ..", found[".."].ino, t.Lstat(".").Ino)
		Equal(t, "type of .", found["."].typ, unix.DT_DIR)
		Equal(t, "type of ..", found[".."].typ, unix.DT_DIR)
	})
	for _, n := range []int{1, 100, 255} {
		add(fmt.Sprintf("ok/names-of-%d-bytes", n), func(t *T) {
			t.Mkdir("d")
			var want []string
			for i := range 40 {
				name := strings.Repeat(string(rune('A'+i)), n)
				t.File("d/"+name, "")
				want = append(want, name)
			}
			sort.Strings(want)
			same(t, names(t, "d"), want)
		})
	}
	add("EINVAL/buffer-too-small", func(t *T) {
		t.Mkdir("d")
		_, err := getdents(openDir(t, "d"), 10)
		t.Want("getdents", err, unix.EINVAL)
	})
	add("EFAULT/bad-buffer", func(t *T) {
		t.Mkdir("d")
		t.Want("getdents64", call(unix.SYS_GETDENTS64, uintptr(openDir(t, "d")), 4096, 1024), unix.EFAULT)
	})
	add("ok/new-entry-is-seen-by-next-listing", func(t *T) {
		t.Mkdir("d")
		for i := range 30 {
			Equal(t, "entries", len(names(t, "d")), i)
			t.File(fmt.Sprint("d/", i), "")
		}
	})
	add("ok/removed-entry-is-gone-from-next-listing", func(t *T) {
		fillDir(t, 30)
		for i := range 30 {
			t.OK("unlink", unix.Unlink(fmt.Sprintf("d/entry-%06d", i)))
			Equal(t, "entries", len(names(t, "d")), 29-i)
		}
	})
	add("ok/rewind-shows-entries-made-meanwhile", func(t *T) {
		fillDir(t, 5)
		fd := openDir(t, "d")
		Equal(t, "entries", len(entries(t, fd)), 7)
		t.File("d/new", "")
		t.OK("unlink", unix.Unlink("d/entry-000000"))
		t.File("d/new2", "")
		unix.Seek(fd, 0, unix.SEEK_SET)
		Equal(t, "entries after rewinddir", len(entries(t, fd)), 8)
	})
	// A program that changes each name that it reads comes to the end.
	for _, c := range []struct {
		name   string
		change func(t *T, name string)
	}{
		{"renamed", func(t *T, name string) { t.OK("rename", unix.Rename("d/"+name, "d/"+name+".x")) }},
		{"made-again", func(t *T, name string) {
			t.OK("unlink", unix.Unlink("d/"+name))
			t.File("d/"+name+".x", "")
		}},
		{"moved-out-and-back", func(t *T, name string) {
			t.OK("rename", unix.Rename("d/"+name, "out"))
			t.OK("rename", unix.Rename("out", "d/"+name))
		}},
	} {
		for _, size := range []int{600, 32768} {
			add(fmt.Sprintf("ok/ends-while-each-entry-is-%s-with-buffer-of-%d", c.name, size), func(t *T) {
				const n = 1000
				fillDir(t, n)
				fd := openDir(t, "d")
				for pass := range 2 {
					told := 0
					for {
						es, err := getdents(fd, size)
						t.OK("getdents", err)
						if len(es) == 0 {
							break
						}
						for _, e := range es {
							if e.name[0] != '.' && told < 3*n && len(e.name) < 200 {
								told++
								c.change(t, e.name)
							}
						}
						t.True(told < 3*n, "pass %d of a directory of %d goes on after %d entries", pass, n, told)
					}
					t.True(told >= n, "pass %d of a directory of %d ended after %d entries", pass, n, told)
					_, err := unix.Seek(fd, 0, unix.SEEK_SET)
					t.OK("rewinddir", err)
				}
			})
		}
	}
	// A name that exists from the first call to the last comes exactly once, whatever
	// other names are made and removed meanwhile.
	for _, c := range []struct {
		name   string
		change func(t *T, i int)
	}{
		{"entries-are-made", func(t *T, i int) { t.File(fmt.Sprintf("d/new-%06d", i), "") }},
		{"other-entries-are-removed", func(t *T, i int) { unix.Unlink(fmt.Sprintf("d/other-%06d", i)) }},
		{"other-entries-are-renamed", func(t *T, i int) {
			unix.Rename(fmt.Sprintf("d/other-%06d", i), fmt.Sprintf("d/moved-%06d", i))
		}},
		{"entries-are-made-and-removed", func(t *T, i int) {
			t.File(fmt.Sprintf("d/new-%06d", i), "")
			unix.Unlink(fmt.Sprintf("d/new-%06d", i-3))
		}},
		{"files-are-written", func(t *T, i int) { t.File(fmt.Sprintf("d/other-%06d", i%500), "content") }},
	} {
		add("ok/stable-entries-come-once-while-"+c.name, func(t *T) {
			want := fillDir(t, 500)
			for i := range 500 {
				t.Make(regular, fmt.Sprintf("d/other-%06d", i), 0o644)
			}
			fd := openDir(t, "d")
			seen := map[string]int{}
			for i := 0; ; i++ {
				es, err := getdents(fd, 600)
				t.OK("getdents", err)
				if len(es) == 0 {
					break
				}
				for _, e := range es {
					seen[e.name]++
				}
				if i < 2000 {
					c.change(t, i)
				}
			}
			for _, name := range want {
				Equal(t, "times that "+name+" was listed", seen[name], 1)
			}
		})
	}
	add("ok/remove-everything-while-listing", func(t *T) {
		fillDir(t, 1000)
		fd := openDir(t, "d")
		for {
			es, err := getdents(fd, 1024)
			t.OK("getdents", err)
			if len(es) == 0 {
				break
			}
			for _, e := range es {
				if e.name != "." && e.name != ".." {
					t.OK("unlink "+e.name, unix.Unlink("d/"+e.name))
				}
			}
		}
		Equal(t, "entries left", len(names(t, "d")), 0)
		t.OK("rmdir", unix.Rmdir("d"))
	})
	add("ok/by-O_PATH-reopen", func(t *T) {
		fillDir(t, 3)
		fd := t.Open("d", unix.O_PATH, 0)
		_, err := getdents(fd, 1024)
		t.Want("getdents on O_PATH", err, unix.EBADF)
		Equal(t, "entries by /proc/self/fd", len(names(t, fmt.Sprintf("/proc/self/fd/%d", fd))), 3)
	})
	add("ok/two-descriptors-have-their-own-position", func(t *T) {
		fillDir(t, 100)
		a, b := openDir(t, "d"), openDir(t, "d")
		_, err := getdents(a, 600)
		t.OK("getdents", err)
		Equal(t, "entries by the other descriptor", len(entries(t, b)), 102)
	})
	add("ok/dup-shares-the-position", func(t *T) {
		fillDir(t, 100)
		a := openDir(t, "d")
		b, err := unix.Dup(a)
		t.OK("dup", err)
		defer unix.Close(b)
		es, err := getdents(a, 600)
		t.OK("getdents", err)
		Equal(t, "entries by the duplicate", len(entries(t, b)), 102-len(es))
	})
	add("ok/nested-directories-of-depth-200", func(t *T) {
		path := "d"
		for range 200 {
			t.Mkdir(path)
			path += "/d"
		}
		fd := openDir(t, "d")
		for range 199 {
			next, err := unix.Openat(fd, "d", unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
			t.OK("openat", err)
			t.Cleanup(func() { unix.Close(next) })
			fd = next
		}
		Equal(t, "entries at the bottom", len(entries(t, fd)), 2)
	})
	return cs
}

func firstDifference(got, want []string) string {
	for i := range max(len(got), len(want)) {
		g, w := "(nothing)", "(nothing)"
		if i < len(got) {
			g = got[i]
		}
		if i < len(want) {
			w = want[i]
		}
		if g != w {
			return fmt.Sprintf("at %d: expected %s, got %s", i, w, g)
		}
	}
	return "none"
}
