package suite

import (
	"fmt"

	"golang.org/x/sys/unix"
)

// chownCases are the rules of chown(2) and its relatives.
func chownCases() []Case {
	var cs []Case
	add := func(name string, run func(*T)) { cs = append(cs, Case{"chown/" + name, run}) }
	for _, typ := range allTypes {
		add("ok/lchown-"+string(typ)+"-by-root", func(t *T) {
			t.Make(typ, "f", 0o644)
			t.OK("lchown", unix.Lchown("f", 123, 456))
			t.Owner("f", 123, 456)
			t.OK("lchown", unix.Lchown("f", 4000000000, 4000000001))
			t.Owner("f", 4000000000, 4000000001)
			t.Exists("f", typ)
		})
		add("ok/only-owner-of-"+string(typ), func(t *T) {
			t.Make(typ, "f", 0o644)
			t.OK("lchown", unix.Lchown("f", 123, 456))
			t.OK("lchown(7, -1)", unix.Lchown("f", 7, -1))
			t.Owner("f", 7, 456)
			t.OK("lchown(-1, 8)", unix.Lchown("f", -1, 8))
			t.Owner("f", 7, 8)
			t.OK("lchown(-1, -1)", unix.Lchown("f", -1, -1))
			t.Owner("f", 7, 8)
		})
		for _, c := range []struct {
			name  string
			owner User
			uid   int
			gid   int
			want  error
		}{
			{"owner-to-other-owner", alice, bob.UID, -1, unix.EPERM}, {"owner-to-itself", alice, alice.UID, -1, nil},
			{"owner-to-own-group", alice, -1, alice.GID, nil}, {"owner-to-supplementary-group", alice, -1, team, nil},
			{"owner-to-foreign-group", alice, -1, bob.GID, unix.EPERM}, {"other-to-own-group", bob, -1, alice.GID, unix.EPERM},
			{"other-takes-it", bob, alice.UID, -1, unix.EPERM}, {"owner-to-itself-and-supplementary-group", alice, alice.UID, team, nil},
			{"owner-to-root", alice, 0, -1, unix.EPERM},
		} {
			add(fmt.Sprintf("%s/%s-of-%s", trailName(c.want), c.name, typ), func(t *T) {
				t.Make(typ, "f", 0o666)
				t.Give("f", c.owner)
				t.As(alice, func() { t.Want("lchown", unix.Lchown("f", c.uid, c.gid), c.want) })
				switch {
				case c.want != nil:
					t.Owner("f", c.owner.UID, c.owner.GID)
				case c.gid >= 0:
					t.Owner("f", alice.UID, c.gid)
				default:
					t.Owner("f", alice.UID, alice.GID)
				}
			})
		}
	}
	add("ok/chown-follows-symlink", func(t *T) {
		t.File("target", "")
		t.Make(symlink, "l", 0)
		t.OK("chown", unix.Chown("l", 5, 6))
		t.Owner("target", 5, 6)
		t.Owner("l", 0, 0)
	})
	add("ok/lchown-does-not-follow-symlink", func(t *T) {
		t.File("target", "")
		t.Make(symlink, "l", 0)
		t.OK("lchown", unix.Lchown("l", 5, 6))
		t.Owner("target", 0, 0)
		t.Owner("l", 5, 6)
	})
	for name, do := range map[string]func(t *T) error{
		"fchown":                       func(t *T) error { return unix.Fchown(t.Open("f", unix.O_RDONLY, 0), 5, 6) },
		"fchownat":                     func(t *T) error { return unix.Fchownat(t.Open(".", unix.O_RDONLY, 0), "f", 5, 6, 0) },
		"fchownat-AT_EMPTY_PATH":       func(t *T) error { return unix.Fchownat(t.Open("f", unix.O_PATH, 0), "", 5, 6, unix.AT_EMPTY_PATH) },
		"fchownat-AT_SYMLINK_NOFOLLOW": func(t *T) error { return unix.Fchownat(here, "f", 5, 6, unix.AT_SYMLINK_NOFOLLOW) },
	} {
		add("ok/"+name, func(t *T) {
			t.File("f", "")
			t.OK(name, do(t))
			t.Owner("f", 5, 6)
		})
	}
	add("EINVAL/fchownat-with-unknown-flag", func(t *T) {
		t.File("f", "")
		t.Want("fchownat", unix.Fchownat(here, "f", 5, 6, 1<<20), unix.EINVAL)
	})
	for _, c := range []struct {
		who          User
		before, left uint32
	}{
		{root, 0o4755, 0o755}, {root, 0o2755, 0o755}, {root, 0o6755, 0o755}, {root, 0o2745, 0o2745}, {root, 0o1755, 0o1755},
		{alice, 0o4755, 0o755}, {alice, 0o2755, 0o755}, {alice, 0o6755, 0o755}, {alice, 0o4644, 0o644},
	} {
		add(fmt.Sprintf("set-id/bits-of-file-with-%04o-after-chown-by-%s", c.before, c.who.Name), func(t *T) {
			t.File("f", "")
			t.Give("f", alice)
			t.Chmod("f", c.before)
			t.As(c.who, func() { t.OK("chown", unix.Chown("f", -1, team)) })
			t.Mode("f", c.left)
			t.Owner("f", alice.UID, team)
		})
		add(fmt.Sprintf("set-id/bits-of-directory-with-%04o-stay-after-chown-by-%s", c.before, c.who.Name), func(t *T) {
			t.Mkdir("d")
			t.Give("d", alice)
			t.Chmod("d", c.before)
			t.As(c.who, func() { t.OK("chown", unix.Chown("d", -1, team)) })
			t.Mode("d", c.before)
		})
	}
	add("ok/new-owner-may-chmod-old-may-not", func(t *T) {
		t.File("f", "")
		t.Give("f", alice)
		t.Give("f", bob)
		t.As(alice, func() { t.Want("chmod by the old owner", unix.Chmod("f", 0o600), unix.EPERM) })
		t.As(bob, func() { t.Chmod("f", 0o600) })
	})
	add("ok/open-descriptor-sees-new-owner", func(t *T) {
		t.File("f", "")
		fd := t.Open("f", unix.O_RDONLY, 0)
		t.Give("f", bob)
		Equal(t, "owner by fstat", int(t.Fstat(fd).Uid), bob.UID)
	})
	return cs
}
