package suite

import (
	"fmt"
	"math"
	"time"

	"golang.org/x/sys/unix"
)

// utimensCases are the rules of utimensat(2): values, special values, and the rights that
// each value needs.
func utimensCases() []Case {
	var cs []Case
	add := func(name string, run func(*T)) { cs = append(cs, Case{"utimensat/" + name, run}) }
	now, omit := unix.Timespec{Nsec: unix.UTIME_NOW}, unix.Timespec{Nsec: unix.UTIME_OMIT}

	values := map[string]unix.Timespec{
		"epoch": {}, "one-nanosecond": {Nsec: 1}, "last-nanosecond": {Sec: 1, Nsec: 999999999}, "odd-nanoseconds": {Sec: 1234567890, Nsec: 123456789},
		"before-epoch": {Sec: -1, Nsec: 5}, "year-1901": {Sec: math.MinInt32}, "last-of-31-bits": {Sec: math.MaxInt32, Nsec: 999999999},
		"first-beyond-31-bits": {Sec: 1 << 31}, "first-beyond-32-bits": {Sec: 1 << 32, Nsec: 7}, "year-2400": {Sec: 13569465600, Nsec: 42},
	}
	for name, v := range values {
		for _, typ := range []Type{regular, dir, symlink, fifo} {
			add(fmt.Sprintf("ok/%s-on-%s", name, typ), func(t *T) {
				t.Make(typ, "f", 0o644)
				other := unix.Timespec{Sec: 77, Nsec: 88}
				t.OK("utimensat", unix.UtimesNanoAt(here, "f", []unix.Timespec{v, other}, unix.AT_SYMLINK_NOFOLLOW))
				Equal(t, "atime", t.Lstat("f").Atim, v)
				Equal(t, "mtime", t.Lstat("f").Mtim, other)
				t.OK("utimensat", unix.UtimesNanoAt(here, "f", []unix.Timespec{other, v}, unix.AT_SYMLINK_NOFOLLOW))
				Equal(t, "atime", t.Lstat("f").Atim, other)
				Equal(t, "mtime", t.Lstat("f").Mtim, v)
			})
		}
	}
	kinds := []struct {
		name string
		ts   unix.Timespec
	}{{"NOW", now}, {"OMIT", omit}, {"value", unix.Timespec{Sec: 500, Nsec: 600}}}
	for _, typ := range allTypes {
		for _, a := range kinds {
			for _, m := range kinds {
				add(fmt.Sprintf("ok/atime-%s-mtime-%s-on-%s", a.name, m.name, typ), func(t *T) {
					t.Make(typ, "f", 0o644)
					setTimes(t, "f", 100, 200)
					t.OK("utimensat", unix.UtimesNanoAt(here, "f", []unix.Timespec{a.ts, m.ts}, unix.AT_SYMLINK_NOFOLLOW))
					st := t.Lstat("f")
					check := func(what, kind string, got unix.Timespec, old int64) {
						switch kind {
						case "NOW":
							t.True(math.Abs(float64(time.Now().UnixNano()-got.Nano())) < 2e9, "%s: expected now, got %v", what, got)
						case "OMIT":
							Equal(t, what, got, unix.Timespec{Sec: old})
						default:
							Equal(t, what, got, unix.Timespec{Sec: 500, Nsec: 600})
						}
					}
					check("atime", a.name, st.Atim, 100)
					check("mtime", m.name, st.Mtim, 200)
				})
			}
		}
	}
	sets := []struct {
		name          string
		ts            *[2]unix.Timespec
		explicit, not bool // not: asks for nothing
	}{
		{"null", nil, false, false}, {"both-NOW", &[2]unix.Timespec{now, now}, false, false}, {"both-OMIT", &[2]unix.Timespec{omit, omit}, false, true},
		{"values", &[2]unix.Timespec{{Sec: 1}, {Sec: 2}}, true, false}, {"NOW-and-OMIT", &[2]unix.Timespec{now, omit}, true, false},
		{"OMIT-and-NOW", &[2]unix.Timespec{omit, now}, true, false}, {"NOW-and-value", &[2]unix.Timespec{now, {Sec: 2}}, true, false},
	}
	persons := []struct {
		name  string
		owner User
		mode  uint32
		who   User
		own   bool
		write bool
	}{
		{"owner-with-write", alice, 0o600, alice, true, true}, {"owner-without-write", alice, 0o400, alice, true, false},
		{"other-with-write", bob, 0o666, alice, false, true}, {"other-without-write", bob, 0o644, alice, false, false}, {"root", bob, 0, root, true, true},
		{"group-with-write", User{UID: bob.UID, GID: team}, 0o660, alice, false, true},
	}
	for _, s := range sets {
		for _, p := range persons {
			for _, typ := range []Type{regular, dir} {
				var want error
				switch {
				case s.not || p.own:
				case s.explicit:
					want = unix.EPERM
				case !p.write:
					want = unix.EACCES
				}
				add(fmt.Sprintf("%s/%s-on-%s-by-%s", trailName(want), s.name, typ, p.name), func(t *T) {
					t.Make(typ, "f", 0o777)
					t.Give("f", p.owner)
					t.Chmod("f", p.mode)
					setTimes(t, "f", 100, 200)
					arg := uintptr(0)
					if s.ts != nil {
						arg = addr(s.ts)
					}
					t.As(p.who, func() {
						t.Want("utimensat", with("f", func(q uintptr) error { return call(unix.SYS_UTIMENSAT, cwd, q, arg, 0) }), want)
					})
					if want != nil {
						Equal(t, "mtime after the refusal", t.Lstat("f").Mtim.Sec, 200)
					}
				})
			}
		}
	}
	for name, ns := range map[string]int64{"-1": -1, "one-billion": 1e9, "two-billion": 2e9} {
		for i, which := range []string{"atime", "mtime"} {
			add(fmt.Sprintf("EINVAL/%s-with-%s-nanoseconds", which, name), func(t *T) {
				t.File("f", "")
				ts := [2]unix.Timespec{{Sec: 1}, {Sec: 1}}
				ts[i].Nsec = ns
				t.Want("utimensat", unix.UtimesNanoAt(here, "f", ts[:], 0), unix.EINVAL)
			})
		}
	}
	add("ok/follows-symlink", func(t *T) {
		t.File("target", "")
		t.Make(symlink, "l", 0)
		setTimes(t, "l", 1, 2)
		t.OK("utimensat", unix.UtimesNanoAt(here, "l", []unix.Timespec{{Sec: 7}, {Sec: 8}}, 0))
		Equal(t, "mtime of the target", t.Lstat("target").Mtim.Sec, 8)
		Equal(t, "mtime of the link", t.Lstat("l").Mtim.Sec, 2)
	})
	for name, flags := range map[string]int{"O_RDONLY": unix.O_RDONLY, "O_WRONLY": unix.O_WRONLY} {
		add("ok/futimens-on-"+name+"-descriptor", func(t *T) {
			t.File("f", "")
			ts := [2]unix.Timespec{{Sec: 7, Nsec: 1}, {Sec: 8, Nsec: 2}}
			t.OK("futimens", call(unix.SYS_UTIMENSAT, uintptr(t.Open("f", flags, 0)), 0, addr(&ts), 0))
			Equal(t, "mtime", t.Lstat("f").Mtim, ts[1])
		})
	}
	add("ok/AT_EMPTY_PATH", func(t *T) {
		t.File("f", "")
		t.OK("utimensat", unix.UtimesNanoAt(t.Open("f", unix.O_PATH, 0), "", []unix.Timespec{{Sec: 7}, {Sec: 8}}, unix.AT_EMPTY_PATH))
		Equal(t, "mtime", t.Lstat("f").Mtim.Sec, 8)
	})
	add("EBADF/futimens-on-O_PATH-descriptor", func(t *T) {
		t.File("f", "")
		t.Want("futimens", call(unix.SYS_UTIMENSAT, uintptr(t.Open("f", unix.O_PATH, 0)), 0, 0, 0), unix.EBADF)
	})
	add("EINVAL/unknown-flag", func(t *T) {
		t.File("f", "")
		t.Want("utimensat", unix.UtimesNanoAt(here, "f", []unix.Timespec{{}, {}}, 1<<20), unix.EINVAL)
	})
	add("EFAULT/bad-times-address", func(t *T) {
		t.File("f", "")
		t.Want("utimensat", with("f", func(q uintptr) error { return call(unix.SYS_UTIMENSAT, cwd, q, 4, 0) }), unix.EFAULT)
	})
	add("ok/both-OMIT-on-missing-file-is-ENOENT-or-nothing", func(t *T) {
		err := unix.UtimesNanoAt(here, "f", []unix.Timespec{omit, omit}, 0)
		t.WantOneOf("utimensat", err, nil, unix.ENOENT)
	})
	return cs
}
