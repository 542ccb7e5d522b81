package suite

import (
	"fmt"

	"golang.org/x/sys/unix"
)

// permissionCases check which class of the mode (owner, group, other) decides for which
// user, the rights of root, and the restrictions of the sticky bit.
func permissionCases() []Case {
	var cs []Case
	add := func(name string, run func(*T)) { cs = append(cs, Case{"permission/" + name, run}) }

	// Alice is the caller. The mode gives her class the bits and the other classes the
	// opposite, so that a wrong class shows.
	classes := []struct {
		name  string
		owner User
		shift int
	}{
		{"owner", alice, 6}, {"group", User{UID: bob.UID, GID: alice.GID}, 3},
		{"supplementary-group", User{UID: bob.UID, GID: team}, 3}, {"other", bob, 0},
	}
	type action struct {
		name string
		need uint32
		do   func() error
	}
	fileActions := []action{
		{"open-rdonly", 4, func() error { return tryOpen("f", unix.O_RDONLY) }},
		{"open-wronly", 2, func() error { return tryOpen("f", unix.O_WRONLY) }},
		{"open-rdwr", 6, func() error { return tryOpen("f", unix.O_RDWR) }},
		{"truncate", 2, func() error { return unix.Truncate("f", 0) }},
		{"exec", 1, func() error { return execPath("f") }},
		{"access-r", 4, func() error { return unix.Access("f", unix.R_OK) }},
		{"access-w", 2, func() error { return unix.Access("f", unix.W_OK) }},
		{"access-x", 1, func() error { return unix.Access("f", unix.X_OK) }},
		{"getxattr", 4, func() error { _, err := unix.Getxattr("f", "user.a", nil); return err }},
		{"setxattr", 2, func() error { return unix.Setxattr("f", "user.a", []byte("w"), 0) }},
		{"utimes-now", 2, func() error {
			return unix.UtimesNanoAt(here, "f", []unix.Timespec{{Nsec: unix.UTIME_NOW}, {Nsec: unix.UTIME_NOW}}, 0)
		}},
	}
	dirActions := []action{
		{"list", 4, func() error { return tryOpen("d", unix.O_RDONLY|unix.O_DIRECTORY) }},
		{"lookup", 1, func() error { var st unix.Stat_t; return unix.Lstat("d/f", &st) }},
		{"create", 3, func() error { return tryOpen("d/new", unix.O_CREAT|unix.O_WRONLY) }},
		{"mkdir", 3, func() error { return unix.Mkdir("d/new", 0o755) }},
		{"unlink", 3, func() error { return unix.Unlink("d/f") }},
		{"rename-inside", 3, func() error { return unix.Rename("d/f", "d/g") }},
		{"chdir", 1, func() error { return unix.Chdir("d") }},
		{"access-rwx", 7, func() error { return unix.Access("d", 7) }},
	}
	verdict := func(need, bits uint32) (string, error) {
		if need&bits == need {
			return "ok", nil
		}
		return "EACCES", unix.EACCES
	}
	for _, c := range classes {
		for bits := range uint32(8) {
			mode := (7&^bits)*0o111&^(7<<c.shift) | bits<<c.shift
			for _, a := range fileActions {
				name, want := verdict(a.need, bits)
				if a.name == "utimes-now" && c.name == "owner" {
					name, want = "ok", nil
				}
				add(fmt.Sprintf("%s/%s-by-%s-of-file-with-%s", name, a.name, c.name, rwx(bits)), func(t *T) {
					t.newObject(regular, "f")
					t.Give("f", c.owner)
					t.Chmod("f", mode)
					t.As(alice, func() {
						t.Want(fmt.Sprintf("%s of file with mode %04o", a.name, mode), a.do(), want)
					})
				})
			}
			for _, a := range dirActions {
				name, want := verdict(a.need, bits)
				add(fmt.Sprintf("%s/%s-by-%s-of-directory-with-%s", name, a.name, c.name, rwx(bits)), func(t *T) {
					t.Mkdir("d")
					t.File("d/f", "")
					t.Give("d", c.owner)
					t.Chmod("d", mode)
					t.As(alice, func() { t.Want(fmt.Sprintf("%s in directory with mode %04o", a.name, mode), a.do(), want) })
				})
			}
		}
	}

	// Root passes all checks but execution of a file that nobody may execute.
	for _, a := range fileActions {
		want, name := error(nil), "ok"
		if a.name == "exec" || a.name == "access-x" {
			want, name = unix.EACCES, "EACCES"
		}
		add(name+"/"+a.name+"-by-root-of-file-with-mode-0", func(t *T) {
			t.newObject(regular, "f")
			t.Give("f", alice)
			t.Chmod("f", 0)
			t.Want(a.name, a.do(), want)
		})
	}
	for _, a := range dirActions {
		add("ok/"+a.name+"-by-root-of-directory-with-mode-0", func(t *T) {
			t.Mkdir("d")
			t.File("d/f", "")
			t.Give("d", alice)
			t.Chmod("d", 0)
			t.OK(a.name, a.do())
		})
	}
	for _, mode := range []uint32{0o100, 0o010, 0o001} {
		add(fmt.Sprintf("ok/access-x-by-root-with-mode-%04o", mode), func(t *T) {
			t.Make(regular, "f", mode)
			t.OK("access(X_OK)", unix.Access("f", unix.X_OK))
		})
	}
	add("ok/permission-was-checked-at-open-not-later", func(t *T) {
		t.File("f", "content")
		t.Give("f", alice)
		t.As(alice, func() {
			fd := t.Open("f", unix.O_RDWR, 0)
			t.Chmod("f", 0)
			Equal(t, "content", t.Pread(fd, 100, 0), "content")
			t.Pwrite(fd, "C", 0)
			t.Want("new open", tryOpen("f", unix.O_RDONLY), unix.EACCES)
		})
	})
	add("ok/change-of-mode-is-in-force-at-once", func(t *T) {
		t.File("f", "")
		t.As(alice, func() { t.Want("open", tryOpen("f", unix.O_WRONLY), unix.EACCES) })
		t.Chmod("f", 0o666)
		t.As(alice, func() { t.OK("open", tryOpen("f", unix.O_WRONLY)) })
		t.Chmod("f", 0o444)
		t.As(alice, func() { t.Want("open", tryOpen("f", unix.O_WRONLY), unix.EACCES) })
	})
	add("ok/change-of-owner-is-in-force-at-once", func(t *T) {
		t.Make(regular, "f", 0o600)
		t.As(alice, func() { t.Want("open", tryOpen("f", unix.O_RDONLY), unix.EACCES) })
		t.Give("f", alice)
		t.As(alice, func() { t.OK("open", tryOpen("f", unix.O_RDONLY)) })
		t.As(bob, func() { t.Want("open", tryOpen("f", unix.O_RDONLY), unix.EACCES) })
	})
	add("ok/directory-without-search-hides-entries-but-lists-names", func(t *T) {
		t.Mkdir("d")
		t.File("d/f", "")
		t.Chmod("d", 0o744)
		t.As(alice, func() {
			Equal(t, "entries", len(names(t, "d")), 1)
			var st unix.Stat_t
			t.Want("lstat", unix.Lstat("d/f", &st), unix.EACCES)
		})
	})
	add("ok/faccessat2-with-AT_EACCESS-asks-for-the-effective-user", func(t *T) {
		t.Make(regular, "f", 0o600)
		t.As(alice, func() {
			t.Want("faccessat2", unix.Faccessat2(here, "f", unix.R_OK, unix.AT_EACCESS), unix.EACCES)
			t.OK("faccessat2(F_OK)", unix.Faccessat2(here, "f", unix.F_OK, unix.AT_EACCESS))
		})
	})
	add("EINVAL/access-with-unknown-mode", func(t *T) {
		t.File("f", "")
		t.Want("access", unix.Access("f", 0o77), unix.EINVAL)
	})

	// In a sticky directory only the owner of the object, of the directory, or
	// root removes or renames.
	persons := []struct {
		name           string
		object, parent User
		who            User
		want           error
	}{
		{"owner-of-object", alice, bob, alice, nil}, {"owner-of-directory", bob, alice, alice, nil},
		{"neither", bob, carol, alice, unix.EPERM}, {"root", bob, carol, root, nil}, {"owner-of-both", alice, alice, alice, nil},
	}
	for _, typ := range allTypes {
		for _, p := range persons {
			for name, op := range map[string]func(t *T) error{
				"remove":       func(t *T) error { return remove(typ, "d/f") },
				"rename-from":  func(t *T) error { return unix.Rename("d/f", "d/g") },
				"rename-away":  func(t *T) error { return unix.Rename("d/f", "e/g") },
				"rename-over":  func(t *T) error { return unix.Rename("e/mine", "d/f") },
				"exchange-out": func(t *T) error { return unix.Renameat2(here, "e/mine", here, "d/f", unix.RENAME_EXCHANGE) },
			} {
				add(fmt.Sprintf("%s/sticky-%s-%s-by-%s", trailName(p.want), name, typ, p.name), func(t *T) {
					t.Mkdir("d")
					t.Mkdir("e")
					t.Make(typ, "d/f", 0o777)
					t.Give("d/f", p.object)
					t.Give("d", p.parent)
					t.Chmod("d", 0o1777)
					if typ == dir && p.object.UID != p.who.UID {
						t.Chmod("d/f", 0o777) // writable, as a move to another parent needs
					}
					other := regular
					if typ == dir {
						other = dir
					}
					t.Make(other, "e/mine", 0o777)
					t.Give("e/mine", p.who)
					t.As(p.who, func() { t.Want(name, op(t), p.want) })
				})
			}
		}
	}
	add("ok/sticky-create-by-anybody", func(t *T) {
		t.Mkdir("d")
		t.Chmod("d", 0o1777)
		t.As(alice, func() { t.File("d/f", "") })
		t.As(bob, func() { t.File("d/g", "") })
	})
	return cs
}

func rwx(bits uint32) string {
	b := []byte("---")
	for i, c := range "rwx" {
		if bits&(4>>i) != 0 {
			b[i] = byte(c)
		}
	}
	return string(b)
}
