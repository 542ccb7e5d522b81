package suite

import (
	"encoding/binary"
	"fmt"

	"golang.org/x/sys/unix"
)

// The kernel's form of a POSIX ACL as an extended attribute, little endian:
//
//	u32 version = 2
//	per entry: u16 tag, u16 permissions, u32 id (0xffffffff where the tag has none)
//
// sorted by tag, then id.
const (
	aclAccess  = "system.posix_acl_access"
	aclDefault = "system.posix_acl_default"

	aclUserObj  = 0x01
	aclUser     = 0x02
	aclGroupObj = 0x04
	aclGroup    = 0x08
	aclMask     = 0x10
	aclOther    = 0x20
)

type aclEntry struct {
	tag, perm uint16
	id        uint32
}

type acl []aclEntry

func (a acl) encode() []byte {
	b := binary.LittleEndian.AppendUint32(nil, 2)
	for _, e := range a {
		id := e.id
		if e.tag != aclUser && e.tag != aclGroup {
			id = 0xffffffff
		}
		b = binary.LittleEndian.AppendUint16(b, e.tag)
		b = binary.LittleEndian.AppendUint16(b, e.perm)
		b = binary.LittleEndian.AppendUint32(b, id)
	}
	return b
}

func decodeACL(b []byte) (a acl, ok bool) {
	if len(b) < 4 || (len(b)-4)%8 != 0 || binary.LittleEndian.Uint32(b) != 2 {
		return nil, false
	}
	for b = b[4:]; len(b) > 0; b = b[8:] {
		e := aclEntry{binary.LittleEndian.Uint16(b), binary.LittleEndian.Uint16(b[2:]), binary.LittleEndian.Uint32(b[4:])}
		if e.tag != aclUser && e.tag != aclGroup {
			e.id = 0
		}
		a = append(a, e)
	}
	return a, true
}

// String is the short text form, as in u::rwx,u:77:r--.
func (a acl) String() string {
	s := ""
	for i, e := range a {
		if i > 0 {
			s += ","
		}
		name := map[uint16]string{aclUserObj: "u:", aclUser: fmt.Sprint("u:", e.id), aclGroupObj: "g:", aclGroup: fmt.Sprint("g:", e.id), aclMask: "m:", aclOther: "o:"}[e.tag]
		s += name + ":" + rwx(uint32(e.perm))
	}
	return s
}

// SetACL sets the access ACL or the default ACL.
func (t *T) SetACL(path, kind string, a acl) {
	t.OK(fmt.Sprintf("setxattr(%s, %s, %s)", path, kind, a), unix.Setxattr(path, kind, a.encode(), 0))
}

// ACL fails unless path has this ACL; nil means none.
func (t *T) ACL(path, kind string, want acl) {
	b := make([]byte, 4096)
	n, err := unix.Getxattr(path, kind, b)
	if want == nil {
		t.Want("getxattr("+path+", "+kind+")", err, unix.ENODATA)
		return
	}
	t.OK("getxattr("+path+", "+kind+")", err)
	got, ok := decodeACL(b[:n])
	t.True(ok, "%s of %s is malformed: %x", kind, path, b[:n])
	Equal(t, kind+" of "+path, got.String(), want.String())
}

// aclCases are the cases of POSIX ACLs (POSIX.1e draft 17): the rights of each class of
// users, the agreement of ACL and mode, and the inheritance by new objects.
func aclCases() []Case {
	var cs []Case
	add := func(name string, run func(*T)) { cs = append(cs, Case{"acl/" + name, run}) }

	// The algorithm of access checks: the first matching class decides.
	// Alice asks, in each row with all three permissions in turn.
	A := func(entries ...aclEntry) acl { return entries }
	uo := func(p uint16) aclEntry { return aclEntry{aclUserObj, p, 0} }
	u := func(id int, p uint16) aclEntry { return aclEntry{aclUser, p, uint32(id)} }
	gobj := func(p uint16) aclEntry { return aclEntry{aclGroupObj, p, 0} }
	g := func(id int, p uint16) aclEntry { return aclEntry{aclGroup, p, uint32(id)} }
	m := func(p uint16) aclEntry { return aclEntry{aclMask, p, 0} }
	o := func(p uint16) aclEntry { return aclEntry{aclOther, p, 0} }
	rows := []struct {
		name    string
		owner   User
		acl     acl
		granted uint16
	}{
		{"owner-entry-decides-for-owner", alice, A(uo(4), u(alice.UID, 7), gobj(7), g(team, 7), m(7), o(7)), 4},
		{"mask-does-not-limit-owner", alice, A(uo(7), u(bob.UID, 7), gobj(7), m(0), o(0)), 7},
		{"named-user", bob, A(uo(0), u(alice.UID, 5), gobj(0), m(7), o(0)), 5},
		{"named-user-limited-by-mask", bob, A(uo(7), u(alice.UID, 7), gobj(7), m(4), o(7)), 4},
		{"named-user-with-nothing-though-group-has", User{UID: bob.UID, GID: alice.GID}, A(uo(7), u(alice.UID, 0), gobj(7), m(7), o(7)), 0},
		{"named-user-with-nothing-though-other-has", bob, A(uo(7), u(alice.UID, 0), gobj(7), m(7), o(7)), 0},
		{"owning-group", User{UID: bob.UID, GID: alice.GID}, A(uo(0), u(bob.UID, 7), gobj(6), m(7), o(0)), 6},
		{"owning-group-limited-by-mask", User{UID: bob.UID, GID: alice.GID}, A(uo(0), u(bob.UID, 7), gobj(7), m(1), o(7)), 1},
		{"owning-group-supplementary", User{UID: bob.UID, GID: team}, A(uo(0), u(bob.UID, 7), gobj(3), m(7), o(0)), 3},
		{"named-group", bob, A(uo(0), gobj(0), g(alice.GID, 6), m(7), o(0)), 6},
		{"named-group-supplementary", bob, A(uo(0), gobj(0), g(team, 5), m(7), o(0)), 5},
		{"named-group-limited-by-mask", bob, A(uo(7), gobj(7), g(team, 7), m(2), o(7)), 2},
		{"named-group-with-nothing-though-other-has", bob, A(uo(7), gobj(7), g(team, 0), m(7), o(7)), 0},
		{"other", bob, A(uo(0), u(carol.UID, 0), gobj(0), g(30002, 0), m(0), o(5)), 5},
		{"other-not-limited-by-mask", bob, A(uo(0), u(carol.UID, 0), gobj(0), m(0), o(7)), 7},
		{"any-matching-group-may-grant-all", User{UID: bob.UID, GID: alice.GID}, A(uo(0), gobj(4), g(team, 7), m(7), o(0)), 7},
		{"minimal-acl-is-the-mode", bob, A(uo(7), gobj(5), o(4)), 4},
	}
	for _, r := range rows {
		for _, bit := range []uint16{4, 2, 1} {
			want, word := error(nil), "ok"
			if r.granted&bit == 0 {
				want, word = unix.EACCES, "EACCES"
			}
			add(fmt.Sprintf("%s/%s-%s", word, r.name, rwx(uint32(bit))), func(t *T) {
				t.newObject(regular, "f")
				t.Give("f", r.owner)
				t.SetACL("f", aclAccess, r.acl)
				t.As(alice, func() {
					switch bit {
					case 4:
						t.Want("open for reading", tryOpen("f", unix.O_RDONLY), want)
					case 2:
						t.Want("open for writing", tryOpen("f", unix.O_WRONLY), want)
					case 1:
						t.Want("access(X_OK)", unix.Access("f", unix.X_OK), want)
					}
				})
			})
			add(fmt.Sprintf("%s/directory-%s-%s", word, r.name, rwx(uint32(bit))), func(t *T) {
				t.Mkdir("d")
				t.File("d/f", "")
				t.Give("d", r.owner)
				t.SetACL("d", aclAccess, r.acl)
				t.As(alice, func() {
					switch bit {
					case 4:
						t.Want("open directory", tryOpen("d", unix.O_RDONLY|unix.O_DIRECTORY), want)
					case 2:
						t.Want("access(W_OK)", unix.Access("d", unix.W_OK), want)
					case 1:
						var st unix.Stat_t
						t.Want("lstat inside", unix.Lstat("d/f", &st), want)
					}
				})
			})
		}
	}
	add("EACCES/no-class-adds-up-permissions-of-two-groups", func(t *T) {
		t.newObject(regular, "f")
		t.Give("f", User{UID: bob.UID, GID: alice.GID})
		t.SetACL("f", aclAccess, A(uo(0), gobj(4), g(team, 2), m(7), o(0)))
		t.As(alice, func() {
			t.OK("open for reading", tryOpen("f", unix.O_RDONLY))
			t.OK("open for writing", tryOpen("f", unix.O_WRONLY))
			t.Want("open for both", tryOpen("f", unix.O_RDWR), unix.EACCES)
		})
	})

	full := A(uo(7), u(77, 6), gobj(5), g(88, 4), m(6), o(1))
	for _, typ := range []Type{regular, dir, fifo, socket, char} {
		add("ok/set-and-get-on-"+string(typ), func(t *T) {
			t.Make(typ, "f", 0o644)
			t.SetACL("f", aclAccess, full)
			t.ACL("f", aclAccess, full)
		})
		add("ok/group-bits-of-"+string(typ)+"-show-the-mask", func(t *T) {
			t.Make(typ, "f", 0o644)
			t.SetACL("f", aclAccess, full)
			t.Mode("f", 0o761)
		})
		add("ok/chmod-of-"+string(typ)+"-changes-the-mask-not-the-group", func(t *T) {
			t.Make(typ, "f", 0o644)
			t.SetACL("f", aclAccess, full)
			t.Chmod("f", 0o640)
			t.ACL("f", aclAccess, A(uo(6), u(77, 6), gobj(5), g(88, 4), m(4), o(0)))
			t.Mode("f", 0o640)
		})
		add("ok/minimal-acl-on-"+string(typ)+"-becomes-the-mode", func(t *T) {
			t.Make(typ, "f", 0o777)
			t.SetACL("f", aclAccess, A(uo(6), gobj(4), o(0)))
			t.Mode("f", 0o640)
			t.ACL("f", aclAccess, nil)
		})
		add("ok/removal-from-"+string(typ)+"-keeps-the-mode", func(t *T) {
			t.Make(typ, "f", 0o644)
			t.SetACL("f", aclAccess, full)
			t.OK("removexattr", unix.Removexattr("f", aclAccess))
			t.ACL("f", aclAccess, nil)
			t.Mode("f", 0o761)
		})
		add("EPERM/set-on-"+string(typ)+"-by-other-user", func(t *T) {
			t.Make(typ, "f", 0o777)
			t.As(alice, func() { t.Want("setxattr", unix.Setxattr("f", aclAccess, full.encode(), 0), unix.EPERM) })
		})
		add("ok/set-on-"+string(typ)+"-by-owner", func(t *T) {
			t.Make(typ, "f", 0o777)
			t.Give("f", alice)
			t.As(alice, func() { t.SetACL("f", aclAccess, full) })
			t.ACL("f", aclAccess, full)
		})
		if typ != dir {
			add("EACCES/default-acl-on-"+string(typ), func(t *T) {
				t.Make(typ, "f", 0o777)
				t.WantOneOf("setxattr", unix.Setxattr("f", aclDefault, full.encode(), 0), unix.EACCES, unix.EOPNOTSUPP)
			})
		}
	}
	add("EOPNOTSUPP/on-symlink", func(t *T) {
		t.Make(symlink, "l", 0)
		t.Want("lsetxattr", unix.Lsetxattr("l", aclAccess, full.encode(), 0), unix.EOPNOTSUPP)
	})
	add("ENODATA/new-file-has-none", func(t *T) {
		t.File("f", "")
		t.ACL("f", aclAccess, nil)
		t.Mkdir("d")
		t.ACL("d", aclDefault, nil)
	})
	for name, raw := range map[string][]byte{
		"without-owner":            A(gobj(4), o(0)).encode(),
		"without-group":            A(uo(4), o(0)).encode(),
		"without-other":            A(uo(4), gobj(4)).encode(),
		"named-without-mask":       A(uo(4), u(77, 4), gobj(4), o(0)).encode(),
		"two-owners":               A(uo(4), uo(4), gobj(4), o(0)).encode(),
		"wrong-order":              A(o(4), gobj(4), uo(0)).encode(),
		"unknown-tag":              A(uo(4), gobj(4), aclEntry{0x40, 4, 0}, o(0)).encode(),
		"permission-bits-beyond-7": A(uo(8), gobj(4), o(0)).encode(),
		"cut-off":                  full.encode()[:21],
	} {
		add("EINVAL/"+name, func(t *T) {
			t.File("f", "")
			t.Want("setxattr", unix.Setxattr("f", aclAccess, raw, 0), unix.EINVAL)
			t.ACL("f", aclAccess, nil)
		})
	}
	add("EOPNOTSUPP/unknown-version", func(t *T) {
		t.File("f", "")
		raw := full.encode()
		raw[0] = 9
		t.WantOneOf("setxattr", unix.Setxattr("f", aclAccess, raw, 0), unix.EOPNOTSUPP, unix.EINVAL)
	})
	add("ok/listed-among-attributes", func(t *T) {
		t.Mkdir("d")
		t.SetACL("d", aclAccess, full)
		t.SetACL("d", aclDefault, full)
		b := make([]byte, 1000)
		n, err := unix.Listxattr("d", b)
		t.OK("listxattr", err)
		for _, name := range []string{aclAccess, aclDefault} {
			t.True(contains(b[:n], name), "the list %q lacks %s", b[:n], name)
		}
	})
	add("ok/setting-clears-set-group-id-when-owner-is-not-in-the-group", func(t *T) {
		t.File("f", "")
		t.OK("chown", unix.Chown("f", alice.UID, 30002))
		t.Chmod("f", 0o2755)
		t.As(alice, func() { t.SetACL("f", aclAccess, A(uo(7), gobj(5), o(5))) })
		t.Mode("f", 0o755)
	})
	add("ok/setting-keeps-set-group-id-for-root", func(t *T) {
		t.File("f", "")
		t.Chmod("f", 0o2755)
		t.SetACL("f", aclAccess, A(uo(7), gobj(5), o(5)))
		t.Mode("f", 0o2755)
	})
	add("ok/change-is-in-force-at-once", func(t *T) {
		t.Make(regular, "f", 0o600)
		t.As(alice, func() { t.Want("open", tryOpen("f", unix.O_RDONLY), unix.EACCES) })
		t.SetACL("f", aclAccess, A(uo(6), u(alice.UID, 4), gobj(0), m(4), o(0)))
		t.As(alice, func() { t.OK("open", tryOpen("f", unix.O_RDONLY)) })
		t.OK("removexattr", unix.Removexattr("f", aclAccess))
		t.As(alice, func() { t.Want("open", tryOpen("f", unix.O_RDONLY), unix.EACCES) })
	})
	add("ok/chown-keeps-it", func(t *T) {
		t.File("f", "")
		t.SetACL("f", aclAccess, full)
		t.OK("chown", unix.Chown("f", 5, 6))
		t.ACL("f", aclAccess, full)
	})
	add("ok/rename-keeps-it", func(t *T) {
		t.File("f", "")
		t.SetACL("f", aclAccess, full)
		t.OK("rename", unix.Rename("f", "g"))
		t.ACL("g", aclAccess, full)
	})
	add("ok/hundred-entries", func(t *T) {
		t.File("f", "")
		a := A(uo(6))
		for i := range 100 {
			a = append(a, u(1000+i, uint16(i%8)))
		}
		a = append(a, gobj(4), m(7), o(0))
		t.SetACL("f", aclAccess, a)
		t.ACL("f", aclAccess, a)
	})

	// Inheritance: the default ACL of the directory becomes the access ACL of
	// the new object, cut by the mode asked for; the umask then counts not.
	defaults := []struct {
		name string
		acl  acl
	}{
		{"minimal", A(uo(7), gobj(5), o(0))},
		{"named-user", A(uo(7), u(77, 7), gobj(5), m(7), o(5))},
		{"named-group-and-narrow-mask", A(uo(6), gobj(7), g(88, 7), m(5), o(4))},
		{"nothing-for-other", A(uo(7), u(77, 6), gobj(6), m(6), o(0))},
	}
	for _, d := range defaults {
		for _, typ := range []Type{regular, dir, fifo, socket, char} {
			for _, mode := range []uint32{0o777, 0o640, 0o600} {
				for _, umask := range []int{0, 0o077} {
					add(fmt.Sprintf("inherit/%s-to-%s-with-mode-%04o-umask-%03o", d.name, typ, mode, umask), func(t *T) {
						t.Mkdir("d")
						t.SetACL("d", aclDefault, d.acl)
						t.Umask(umask)
						t.Make(typ, "d/f", mode)
						access, want := inherit(d.acl, mode)
						t.Mode("d/f", want)
						t.ACL("d/f", aclAccess, access)
						if typ == dir {
							t.ACL("d/f", aclDefault, d.acl)
						}
					})
				}
			}
		}
		add("inherit/"+d.name+"-through-three-levels", func(t *T) {
			t.Mkdir("d")
			t.SetACL("d", aclDefault, d.acl)
			for _, p := range []string{"d/a", "d/a/b", "d/a/b/c"} {
				t.Mkdir(p)
			}
			t.ACL("d/a/b/c", aclDefault, d.acl)
		})
		add("inherit/"+d.name+"-to-tmpfile", func(t *T) {
			t.Mkdir("d")
			t.SetACL("d", aclDefault, d.acl)
			t.Umask(0o077)
			fd := t.Open("d", unix.O_TMPFILE|unix.O_RDWR, 0o666)
			_, want := inherit(d.acl, 0o666)
			Equal(t, "mode", t.Fstat(fd).Mode&0o7777, want)
		})
		add("inherit/"+d.name+"-does-not-change-existing-entries", func(t *T) {
			t.Mkdir("d")
			t.Make(regular, "d/f", 0o604)
			t.SetACL("d", aclDefault, d.acl)
			t.Mode("d/f", 0o604)
			t.ACL("d/f", aclAccess, nil)
		})
	}
	add("inherit/symlink-is-not-touched", func(t *T) {
		t.Mkdir("d")
		t.SetACL("d", aclDefault, defaults[1].acl)
		t.Make(symlink, "d/l", 0)
		t.Mode("d/l", 0o777)
	})
	add("inherit/moved-or-linked-file-keeps-its-own", func(t *T) {
		t.Mkdir("d")
		t.SetACL("d", aclDefault, defaults[1].acl)
		t.Make(regular, "f", 0o640)
		t.OK("link", unix.Link("f", "d/g"))
		t.OK("rename", unix.Rename("f", "d/f"))
		t.ACL("d/f", aclAccess, nil)
		t.Mode("d/f", 0o640)
	})
	add("inherit/removed-default-acl-brings-the-umask-back", func(t *T) {
		t.Mkdir("d")
		t.SetACL("d", aclDefault, defaults[1].acl)
		t.OK("removexattr", unix.Removexattr("d", aclDefault))
		t.Umask(0o027)
		t.Make(regular, "d/f", 0o666)
		t.Mode("d/f", 0o640)
		t.ACL("d/f", aclAccess, nil)
	})
	add("inherit/empty-default-acl-removes-it", func(t *T) {
		t.Mkdir("d")
		t.SetACL("d", aclDefault, defaults[1].acl)
		t.SetACL("d", aclDefault, A())
		t.ACL("d", aclDefault, nil)
	})
	add("ok/default-acl-does-not-change-the-mode-of-its-directory", func(t *T) {
		t.Mkdir("d")
		t.Chmod("d", 0o750)
		t.SetACL("d", aclDefault, defaults[1].acl)
		t.Mode("d", 0o750)
		t.ACL("d", aclAccess, nil)
	})
	return cs
}

// inherit returns the values that POSIX.1e demands for a new object below a default ACL:
// the access ACL (nil if the mode is enough) and the permission bits.
func inherit(def acl, mode uint32) (acl, uint32) {
	access := append(acl(nil), def...)
	hasMask := false
	for _, e := range def {
		hasMask = hasMask || e.tag == aclMask
	}
	var bits uint32
	for i := range access {
		e := &access[i]
		switch {
		case e.tag == aclUserObj:
			e.perm &= uint16(mode >> 6 & 7)
			bits |= uint32(e.perm) << 6
		case e.tag == aclMask, e.tag == aclGroupObj && !hasMask:
			e.perm &= uint16(mode >> 3 & 7)
			bits |= uint32(e.perm) << 3
		case e.tag == aclOther:
			e.perm &= uint16(mode & 7)
			bits |= uint32(e.perm)
		}
	}
	if len(def) == 3 {
		return nil, bits
	}
	return access, bits
}

// contains reports whether the attribute list has the name.
func contains(list []byte, name string) bool {
	for len(list) > 0 {
		i := 0
		for list[i] != 0 {
			i++
		}
		if string(list[:i]) == name {
			return true
		}
		list = list[i+1:]
	}
	return false
}
