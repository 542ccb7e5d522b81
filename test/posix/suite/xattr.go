package suite

import (
	"fmt"
	"slices"
	"sort"
	"strings"

	"golang.org/x/sys/unix"
)

// xattrCases are extended attributes: namespaces, types, sizes, flags, rights.
func xattrCases() []Case {
	var cs []Case
	add := func(name string, run func(*T)) { cs = append(cs, Case{"xattr/" + name, run}) }
	get := func(path, name string) (string, error) {
		b := make([]byte, 70000)
		n, err := unix.Lgetxattr(path, name, b)
		return string(b[:max(n, 0)]), err
	}
	list := func(t *T, path string) []string {
		b := make([]byte, 70000)
		n, err := unix.Llistxattr(path, b)
		t.OK("llistxattr", err)
		var ns []string
		for _, s := range strings.Split(strings.TrimSuffix(string(b[:n]), "\x00"), "\x00") {
			if s != "" && s != "security.selinux" {
				ns = append(ns, s)
			}
		}
		sort.Strings(ns)
		return ns
	}
	for _, typ := range allTypes {
		for _, space := range []string{"user", "trusted", "security"} {
			name := space + ".penstock-test"
			allowed := space != "user" || typ == regular || typ == dir
			if !allowed {
				add(fmt.Sprintf("EPERM/set-%s-on-%s", space, typ), func(t *T) {
					t.Make(typ, "f", 0o755)
					t.Want("lsetxattr", unix.Lsetxattr("f", name, []byte("v"), 0), unix.EPERM)
				})
				add(fmt.Sprintf("ENODATA-or-EPERM/get-%s-of-%s", space, typ), func(t *T) {
					t.Make(typ, "f", 0o755)
					_, err := get("f", name)
					t.WantOneOf("lgetxattr", err, unix.ENODATA, unix.EPERM)
				})
				continue
			}
			add(fmt.Sprintf("ok/set-get-list-remove-%s-on-%s", space, typ), func(t *T) {
				t.Make(typ, "f", 0o755)
				t.OK("lsetxattr", unix.Lsetxattr("f", name, []byte("value"), 0))
				v, err := get("f", name)
				t.OK("lgetxattr", err)
				Equal(t, "value", v, "value")
				t.True(slices.Contains(list(t, "f"), name), "the list %q lacks %s", list(t, "f"), name)
				t.OK("lremovexattr", unix.Lremovexattr("f", name))
				_, err = get("f", name)
				t.Want("lgetxattr after removal", err, unix.ENODATA)
				t.True(!slices.Contains(list(t, "f"), name), "the list still has %s", name)
			})
			add(fmt.Sprintf("ENODATA/get-missing-%s-of-%s", space, typ), func(t *T) {
				t.Make(typ, "f", 0o755)
				_, err := get("f", name)
				t.Want("lgetxattr", err, unix.ENODATA)
			})
			add(fmt.Sprintf("ENODATA/remove-missing-%s-of-%s", space, typ), func(t *T) {
				t.Make(typ, "f", 0o755)
				t.Want("lremovexattr", unix.Lremovexattr("f", name), unix.ENODATA)
			})
			add(fmt.Sprintf("EEXIST/create-existing-%s-on-%s", space, typ), func(t *T) {
				t.Make(typ, "f", 0o755)
				t.OK("lsetxattr(CREATE)", unix.Lsetxattr("f", name, []byte("1"), unix.XATTR_CREATE))
				t.Want("lsetxattr(CREATE)", unix.Lsetxattr("f", name, []byte("2"), unix.XATTR_CREATE), unix.EEXIST)
				v, _ := get("f", name)
				Equal(t, "value", v, "1")
			})
			add(fmt.Sprintf("ENODATA/replace-missing-%s-on-%s", space, typ), func(t *T) {
				t.Make(typ, "f", 0o755)
				t.Want("lsetxattr(REPLACE)", unix.Lsetxattr("f", name, []byte("1"), unix.XATTR_REPLACE), unix.ENODATA)
				_, err := get("f", name)
				t.Want("lgetxattr", err, unix.ENODATA)
			})
			add(fmt.Sprintf("ok/replace-%s-on-%s", space, typ), func(t *T) {
				t.Make(typ, "f", 0o755)
				t.OK("lsetxattr", unix.Lsetxattr("f", name, []byte("a longer first value"), 0))
				t.OK("lsetxattr(REPLACE)", unix.Lsetxattr("f", name, []byte("2"), unix.XATTR_REPLACE))
				v, _ := get("f", name)
				Equal(t, "value", v, "2")
			})
			if space != "user" {
				add(fmt.Sprintf("EPERM/set-%s-on-%s-by-user", space, typ), func(t *T) {
					t.Make(typ, "f", 0o777)
					t.Give("f", alice)
					t.As(alice, func() { t.Want("lsetxattr", unix.Lsetxattr("f", name, []byte("v"), 0), unix.EPERM) })
				})
			}
		}
		add("ok/list-of-new-"+string(typ)+"-is-empty", func(t *T) {
			t.Make(typ, "f", 0o755)
			Equal(t, "names", strings.Join(list(t, "f"), " "), "")
		})
	}
	for _, size := range []int{0, 1, 2, 64, 255, 1000, 2000} {
		for _, typ := range []Type{regular, dir} {
			add(fmt.Sprintf("ok/value-of-%d-bytes-on-%s", size, typ), func(t *T) {
				t.Make(typ, "f", 0o755)
				v := make([]byte, size)
				fill(v, uint64(size))
				t.OK("lsetxattr", unix.Lsetxattr("f", "user.v", v, 0))
				got, err := get("f", "user.v")
				t.OK("lgetxattr", err)
				sameBytes(t, "value", []byte(got), v)
				n, err := unix.Lgetxattr("f", "user.v", nil)
				t.OK("lgetxattr with size 0", err)
				Equal(t, "size told", n, size)
			})
		}
	}
	for _, n := range []int{1, 100, 249, 250} {
		add(fmt.Sprintf("ok/name-of-%d-bytes-after-the-prefix", n), func(t *T) {
			t.File("f", "")
			name := "user." + strings.Repeat("n", n)
			t.OK("setxattr", unix.Setxattr("f", name, []byte("v"), 0))
			v, err := get("f", name)
			t.OK("getxattr", err)
			Equal(t, "value", v, "v")
			Equal(t, "list", strings.Join(list(t, "f"), " "), name)
		})
	}
	for op, do := range map[string]func(name string) error{
		"set":    func(name string) error { return unix.Setxattr("f", name, []byte("v"), 0) },
		"get":    func(name string) error { _, err := unix.Getxattr("f", name, make([]byte, 10)); return err },
		"remove": func(name string) error { return unix.Removexattr("f", name) },
	} {
		add("ERANGE/"+op+"-name-of-256-bytes", func(t *T) {
			t.File("f", "")
			t.Want(op, do("user."+strings.Repeat("n", 251)), unix.ERANGE)
		})
		add("ERANGE/"+op+"-empty-name", func(t *T) {
			t.File("f", "")
			t.Want(op, do(""), unix.ERANGE)
		})
		add("EOPNOTSUPP/"+op+"-unknown-namespace", func(t *T) {
			t.File("f", "")
			t.Want(op, do("nonsense.name"), unix.EOPNOTSUPP)
		})
		add("EOPNOTSUPP/"+op+"-name-without-namespace", func(t *T) {
			t.File("f", "")
			t.Want(op, do("name"), unix.EOPNOTSUPP)
		})
		add("EINVAL/"+op+"-namespace-without-name", func(t *T) {
			t.File("f", "")
			t.Want(op, do("user."), unix.EINVAL)
		})
	}
	add("E2BIG/value-of-64-KiB-and-one", func(t *T) {
		t.File("f", "")
		t.Want("setxattr", unix.Setxattr("f", "user.v", make([]byte, 65537), 0), unix.E2BIG)
	})
	add("EINVAL/unknown-flag", func(t *T) {
		t.File("f", "")
		t.Want("setxattr", unix.Setxattr("f", "user.v", []byte("v"), 8), unix.EINVAL)
	})
	add("ERANGE/get-with-buffer-too-small", func(t *T) {
		t.File("f", "")
		t.OK("setxattr", unix.Setxattr("f", "user.v", []byte("value"), 0))
		_, err := unix.Getxattr("f", "user.v", make([]byte, 4))
		t.Want("getxattr", err, unix.ERANGE)
		n, err := unix.Getxattr("f", "user.v", make([]byte, 5))
		t.OK("getxattr with the right size", err)
		Equal(t, "bytes", n, 5)
	})
	add("ERANGE/list-with-buffer-too-small", func(t *T) {
		t.File("f", "")
		t.OK("setxattr", unix.Setxattr("f", "user.v", []byte("value"), 0))
		n, err := unix.Listxattr("f", nil)
		t.OK("listxattr with size 0", err)
		_, err = unix.Listxattr("f", make([]byte, n-1))
		t.Want("listxattr", err, unix.ERANGE)
		_, err = unix.Listxattr("f", make([]byte, n))
		t.OK("listxattr with the right size", err)
	})
	for _, n := range []int{2, 10, 50} {
		add(fmt.Sprintf("ok/%d-attributes", n), func(t *T) {
			t.File("f", "")
			var want []string
			for i := range n {
				name := fmt.Sprintf("user.attribute-%02d", i)
				t.OK("setxattr", unix.Setxattr("f", name, []byte(fmt.Sprint("value ", i)), 0))
				want = append(want, name)
			}
			Equal(t, "list", strings.Join(list(t, "f"), " "), strings.Join(want, " "))
			for i, name := range want {
				v, err := get("f", name)
				t.OK("getxattr", err)
				Equal(t, "value", v, fmt.Sprint("value ", i))
			}
		})
	}
	add("ok/values-are-bytes-not-text", func(t *T) {
		t.File("f", "")
		t.OK("setxattr", unix.Setxattr("f", "user.v", []byte("a\x00b\xff"), 0))
		v, _ := get("f", "user.v")
		Equal(t, "value", v, "a\x00b\xff")
	})
	add("ok/by-descriptor", func(t *T) {
		fd := t.Open("f", unix.O_CREAT|unix.O_RDWR, 0o644)
		t.OK("fsetxattr", unix.Fsetxattr(fd, "user.v", []byte("v"), 0))
		b := make([]byte, 10)
		n, err := unix.Fgetxattr(fd, "user.v", b)
		t.OK("fgetxattr", err)
		Equal(t, "value", string(b[:n]), "v")
		n, err = unix.Flistxattr(fd, b)
		t.OK("flistxattr", err)
		Equal(t, "list", string(b[:n]), "user.v\x00")
		t.OK("fremovexattr", unix.Fremovexattr(fd, "user.v"))
	})
	add("ok/read-only-descriptor-can-set", func(t *T) {
		t.File("f", "")
		t.OK("fsetxattr", unix.Fsetxattr(t.Open("f", unix.O_RDONLY, 0), "user.v", []byte("v"), 0))
	})
	add("ok/follows-symlink", func(t *T) {
		t.File("target", "")
		t.Make(symlink, "l", 0)
		t.OK("setxattr", unix.Setxattr("l", "user.v", []byte("v"), 0))
		v, err := get("target", "user.v")
		t.OK("getxattr", err)
		Equal(t, "value", v, "v")
	})
	add("ok/shared-by-hard-links", func(t *T) {
		t.File("f", "")
		t.OK("link", unix.Link("f", "g"))
		t.OK("setxattr", unix.Setxattr("f", "user.v", []byte("v"), 0))
		v, err := get("g", "user.v")
		t.OK("getxattr", err)
		Equal(t, "value", v, "v")
	})
	add("ok/kept-by-rename-and-truncate-and-write", func(t *T) {
		t.File("f", "content")
		t.OK("setxattr", unix.Setxattr("f", "user.v", []byte("v"), 0))
		t.OK("rename", unix.Rename("f", "g"))
		t.OK("truncate", unix.Truncate("g", 0))
		t.Pwrite(t.Open("g", unix.O_WRONLY, 0), "new", 0)
		v, err := get("g", "user.v")
		t.OK("getxattr", err)
		Equal(t, "value", v, "v")
	})
	add("ok/gone-with-the-file", func(t *T) {
		t.File("f", "")
		t.OK("setxattr", unix.Setxattr("f", "user.v", []byte("v"), 0))
		t.OK("unlink", unix.Unlink("f"))
		t.File("f", "")
		_, err := get("f", "user.v")
		t.Want("getxattr", err, unix.ENODATA)
	})
	add("ok/exchange-takes-them-along", func(t *T) {
		t.File("f", "")
		t.File("g", "")
		t.OK("setxattr", unix.Setxattr("f", "user.v", []byte("of f"), 0))
		t.OK("renameat2", unix.Renameat2(here, "f", here, "g", unix.RENAME_EXCHANGE))
		v, err := get("g", "user.v")
		t.OK("getxattr", err)
		Equal(t, "value", v, "of f")
		_, err = get("f", "user.v")
		t.Want("getxattr", err, unix.ENODATA)
	})
	add("EACCES/get-without-read-permission", func(t *T) {
		t.Make(regular, "f", 0o600)
		t.OK("setxattr", unix.Setxattr("f", "user.v", []byte("v"), 0))
		t.As(alice, func() { _, err := get("f", "user.v"); t.Want("getxattr", err, unix.EACCES) })
	})
	add("EACCES/set-without-write-permission", func(t *T) {
		t.Make(regular, "f", 0o644)
		t.As(alice, func() { t.Want("setxattr", unix.Setxattr("f", "user.v", []byte("v"), 0), unix.EACCES) })
	})
	add("EACCES/remove-without-write-permission", func(t *T) {
		t.Make(regular, "f", 0o644)
		t.OK("setxattr", unix.Setxattr("f", "user.v", []byte("v"), 0))
		t.As(alice, func() { t.Want("removexattr", unix.Removexattr("f", "user.v"), unix.EACCES) })
	})
	add("ok/list-without-read-permission", func(t *T) {
		t.Make(regular, "f", 0)
		t.OK("setxattr", unix.Setxattr("f", "user.v", []byte("v"), 0))
		t.As(alice, func() { Equal(t, "list", strings.Join(list(t, "f"), " "), "user.v") })
	})
	add("ENODATA-or-EPERM/trusted-is-hidden-from-users", func(t *T) {
		t.File("f", "")
		t.OK("setxattr", unix.Setxattr("f", "trusted.v", []byte("v"), 0))
		t.As(alice, func() {
			_, err := get("f", "trusted.v")
			t.WantOneOf("getxattr", err, unix.ENODATA, unix.EPERM)
			Equal(t, "list", strings.Join(list(t, "f"), " "), "")
		})
		Equal(t, "list for root", strings.Join(list(t, "f"), " "), "trusted.v")
	})
	add("EPERM/set-user-on-sticky-directory-by-other", func(t *T) {
		t.Mkdir("d")
		t.Chmod("d", 0o1777)
		t.As(alice, func() { t.Want("setxattr", unix.Setxattr("d", "user.v", []byte("v"), 0), unix.EPERM) })
	})
	add("ok/set-user-on-sticky-directory-by-owner", func(t *T) {
		t.Mkdir("d")
		t.Give("d", alice)
		t.Chmod("d", 0o1777)
		t.As(alice, func() { t.OK("setxattr", unix.Setxattr("d", "user.v", []byte("v"), 0)) })
	})
	for name, f := range map[string]func(p uintptr) error{
		"value": func(p uintptr) error {
			return with("user.v", func(q uintptr) error { return call(unix.SYS_SETXATTR, p, q, 4, 10, 0) })
		},
		"name": func(p uintptr) error { return call(unix.SYS_SETXATTR, p, 4, 0, 0, 0) },
		"list": func(p uintptr) error { return call(unix.SYS_LISTXATTR, p, 4, 100) },
	} {
		add("EFAULT/bad-address-of-"+name, func(t *T) {
			t.File("f", "")
			t.OK("setxattr", unix.Setxattr("f", "user.a", []byte("v"), 0))
			t.Want("call", with("f", f), unix.EFAULT)
		})
	}
	return cs
}
