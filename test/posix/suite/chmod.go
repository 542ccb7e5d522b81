package suite

import (
	"fmt"
	"strings"

	"golang.org/x/sys/unix"
)

// chmodCases are the rules of chmod(2), and of the loss of set-id bits.
func chmodCases() []Case {
	var cs []Case
	add := func(name string, run func(*T)) { cs = append(cs, Case{"chmod/" + name, run}) }
	for _, typ := range nonLinks {
		add("ok/every-mode-on-"+string(typ), func(t *T) {
			t.Make(typ, "f", 0)
			for mode := uint32(0); mode <= 0o7777; mode += 0o111 {
				t.Chmod("f", mode)
				t.Mode("f", mode)
			}
			t.Exists("f", typ)
		})
		add("ok/by-symlink-to-"+string(typ), func(t *T) {
			t.Make(typ, "target", 0o600)
			t.Make(symlink, "l", 0)
			t.Chmod("l", 0o741)
			t.Mode("target", 0o741)
			t.Mode("l", 0o777)
		})
		add("ok/by-owner-of-"+string(typ), func(t *T) {
			t.Make(typ, "f", 0o644)
			t.Give("f", alice)
			t.As(alice, func() { t.Chmod("f", 0o600) })
			t.Mode("f", 0o600)
		})
		for name, who := range map[string]User{"other-user": bob, "member-of-the-group": {"member", 10009, alice.GID, nil}} {
			add("EPERM/"+string(typ)+"-by-"+name, func(t *T) {
				t.Make(typ, "f", 0o666)
				t.Give("f", alice)
				t.As(who, func() { t.Want("chmod", unix.Chmod("f", 0o600), unix.EPERM) })
				t.Mode("f", 0o666)
			})
		}
		add("ok/set-group-id-on-"+string(typ)+"-by-owner-in-the-group", func(t *T) {
			t.Make(typ, "f", 0o755)
			t.OK("chown", unix.Chown("f", alice.UID, team))
			t.As(alice, func() { t.Chmod("f", 0o2755) })
			t.Mode("f", 0o2755)
		})
		add("ok/set-group-id-dropped-on-"+string(typ)+"-by-owner-outside-the-group", func(t *T) {
			t.Make(typ, "f", 0o755)
			t.OK("chown", unix.Chown("f", alice.UID, 30002))
			t.As(alice, func() { t.Chmod("f", 0o2711) })
			t.Mode("f", 0o711)
		})
		add("ok/set-group-id-on-"+string(typ)+"-by-root-outside-the-group", func(t *T) {
			t.Make(typ, "f", 0o755)
			t.OK("chown", unix.Chown("f", alice.UID, 30002))
			t.Chmod("f", 0o2755)
			t.Mode("f", 0o2755)
		})
	}
	for name, do := range map[string]func(t *T, mode uint32) error{
		"fchmod": func(t *T, mode uint32) error { return unix.Fchmod(t.Open("f", unix.O_RDONLY, 0), mode) },
		"fchmodat": func(t *T, mode uint32) error {
			return unix.Fchmodat(t.Open(".", unix.O_RDONLY, 0), "f", mode, 0)
		},
		"fchmodat2-AT_EMPTY_PATH": func(t *T, mode uint32) error {
			return with("", func(p uintptr) error {
				return call(452, uintptr(t.Open("f", unix.O_PATH, 0)), p, uintptr(mode), unix.AT_EMPTY_PATH)
			})
		},
		"proc-self-fd": func(t *T, mode uint32) error {
			return unix.Chmod(fmt.Sprintf("/proc/self/fd/%d", t.Open("f", unix.O_PATH, 0)), mode)
		},
	} {
		add("ok/"+name, func(t *T) {
			t.File("f", "")
			t.OK(name, do(t, 0o4751))
			t.Mode("f", 0o4751)
		})
	}
	add("EOPNOTSUPP/symlink-itself", func(t *T) {
		t.Make(symlink, "l", 0)
		err := with("l", func(p uintptr) error { return call(452, cwd, p, 0o600, unix.AT_SYMLINK_NOFOLLOW) })
		t.Want("fchmodat2(AT_SYMLINK_NOFOLLOW)", err, unix.EOPNOTSUPP)
	})
	add("ok/bits-beyond-07777-are-ignored", func(t *T) {
		t.File("f", "")
		t.OK("chmod", unix.Chmod("f", 0o170644))
		t.Exists("f", regular)
		t.Mode("f", 0o644)
	})
	add("ok/sticky-bit-on-file-by-owner", func(t *T) {
		t.File("f", "")
		t.Give("f", alice)
		t.As(alice, func() { t.Chmod("f", 0o1644) })
		t.Mode("f", 0o1644)
	})
	add("ok/open-descriptor-sees-new-mode", func(t *T) {
		t.File("f", "")
		fd := t.Open("f", unix.O_RDONLY, 0)
		t.Chmod("f", 0o751)
		Equal(t, "mode by fstat", t.Fstat(fd).Mode&0o7777, 0o751)
	})

	// A change of a file's bytes by a caller without privilege clears the set-id bits.
	changes := map[string]func(t *T) error{
		"write":  func(t *T) error { _, err := unix.Write(t.Open("f", unix.O_WRONLY, 0), []byte("x")); return err },
		"pwrite": func(t *T) error { _, err := unix.Pwrite(t.Open("f", unix.O_WRONLY, 0), []byte("x"), 5); return err },
		"writev": func(t *T) error { _, err := unix.Writev(t.Open("f", unix.O_WRONLY, 0), [][]byte{{1}, {2}}); return err },
		"append": func(t *T) error {
			_, err := unix.Write(t.Open("f", unix.O_WRONLY|unix.O_APPEND, 0), []byte("x"))
			return err
		},
		"truncate": func(t *T) error { return unix.Truncate("f", 1) },
		"ftruncate": func(t *T) error {
			return unix.Ftruncate(t.Open("f", unix.O_WRONLY, 0), 1)
		},
		"truncate-longer": func(t *T) error { return unix.Truncate("f", 9999) },
		"O_TRUNC":         func(t *T) error { return tryOpen("f", unix.O_WRONLY|unix.O_TRUNC) },
		"fallocate":       func(t *T) error { return unix.Fallocate(t.Open("f", unix.O_WRONLY, 0), 0, 0, 100000) },
		"punch-hole": func(t *T) error {
			return unix.Fallocate(t.Open("f", unix.O_WRONLY, 0), unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, 0, 4096)
		},
		"copy_file_range": func(t *T) error {
			_, err := unix.CopyFileRange(t.Open("src", unix.O_RDONLY, 0), nil, t.Open("f", unix.O_WRONLY, 0), nil, 10, 0)
			return err
		},
		"splice": func(t *T) error {
			var p [2]int
			if err := unix.Pipe(p[:]); err != nil {
				return err
			}
			defer unix.Close(p[0])
			defer unix.Close(p[1])
			if _, err := unix.Write(p[1], []byte("spliced")); err != nil {
				return err
			}
			_, err := unix.Splice(p[0], nil, t.Open("f", unix.O_WRONLY, 0), nil, 7, 0)
			return err
		},
		"sendfile": func(t *T) error {
			_, err := unix.Sendfile(t.Open("f", unix.O_WRONLY, 0), t.Open("src", unix.O_RDONLY, 0), nil, 10)
			return err
		},
	}
	member := User{"member", 10009, 20009, []int{30002}}
	for name, do := range changes {
		for _, c := range []struct {
			who          User
			whoText      string
			before, left uint32
		}{
			{alice, "other-user", 0o4777, 0o777}, {alice, "other-user", 0o2777, 0o777}, {alice, "other-user", 0o6777, 0o777}, {alice, "other-user", 0o2767, 0o767},
			{bob, "owner", 0o6777, 0o777}, {member, "member-of-the-group", 0o2777, 0o777}, {member, "member-of-the-group", 0o2767, 0o2767}, {alice, "other-user", 0o1777, 0o1777},
			{root, "root", 0o6777, 0o6777},
		} {
			word := "take-away"
			if c.before == c.left {
				word = "keep"
			}
			add(fmt.Sprintf("set-id/%s-by-%s-%ss-bits-of-%04o", name, c.whoText, strings.Replace(word, "take-away", "clear", 1), c.before), func(t *T) {
				t.File("src", strings.Repeat("s", 100))
				t.File("f", strings.Repeat("f", 5000))
				t.OK("chown", unix.Chown("f", bob.UID, 30002))
				t.Chmod("f", c.before)
				t.As(c.who, func() { t.OK(name, do(t)) })
				t.Mode("f", c.left)
			})
		}
	}
	add("set-id/write-of-0-bytes-keeps-bits", func(t *T) {
		t.File("f", "x")
		t.Chmod("f", 0o6777)
		t.As(alice, func() {
			_, err := unix.Write(t.Open("f", unix.O_WRONLY, 0), nil)
			t.OK("write of nothing", err)
		})
		t.Mode("f", 0o6777)
	})
	add("set-id/read-keeps-bits", func(t *T) {
		t.File("f", "x")
		t.Chmod("f", 0o6777)
		t.As(alice, func() { t.Read("f") })
		t.Mode("f", 0o6777)
	})
	add("set-id/capabilities-are-dropped-by-chown", func(t *T) {
		t.File("f", "x")
		t.OK("setxattr", unix.Setxattr("f", "security.capability", []byte(netRaw), 0))
		t.OK("chown", unix.Chown("f", 5, 5))
		_, err := unix.Getxattr("f", "security.capability", make([]byte, 100))
		t.Want("getxattr(security.capability)", err, unix.ENODATA)
	})
	cs = append(cs, setIDExecCases()...)
	for name, do := range changes {
		for _, u := range []User{alice, root} {
			add("set-id/capabilities-are-dropped-by-"+name+"-of-"+u.Name, func(t *T) {
				t.File("src", strings.Repeat("s", 100))
				t.File("f", strings.Repeat("f", 5000))
				t.Chmod("f", 0o777)
				t.OK("setxattr", unix.Setxattr("f", "security.capability", []byte(netRaw), 0))
				t.As(u, func() { t.OK(name, do(t)) })
				_, err := unix.Getxattr("f", "security.capability", make([]byte, 100))
				t.Want("getxattr(security.capability)", err, unix.ENODATA)
			})
		}
	}
	return cs
}
