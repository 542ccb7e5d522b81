package suite

import (
	"fmt"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// timesCases check which of the three times each operation changes, and leaves alone, on
// the object, its directory and other objects.
func timesCases() []Case {
	var cs []Case
	// The stage: directory d with file d/f (links: d/f2), directory d/sub, link
	// d/l, directory e with e/g. Their access and modification times lie long
	// ago, so relatime lets a read change the access time.
	type row struct {
		op      string
		changes string // path.field separated by spaces
		keeps   string
		do      func(t *T) error
	}
	fd := func(t *T, path string, flags int) int { return t.Open(path, flags, 0) }
	rows := []row{
		{"chmod", "d/f.ctime", "d/f.mtime d/f.atime d.mtime d.ctime", func(*T) error { return unix.Chmod("d/f", 0o600) }},
		{"chown", "d/f.ctime", "d/f.mtime d/f.atime d.mtime d.ctime", func(*T) error { return unix.Chown("d/f", 5, 6) }},
		{"lchown-symlink", "d/l.ctime", "d/l.mtime d/f.ctime d.mtime", func(*T) error { return unix.Lchown("d/l", 5, 6) }},
		{"setxattr", "d/f.ctime", "d/f.mtime d/f.atime d.mtime", func(*T) error { return unix.Setxattr("d/f", "user.x", []byte("v"), 0) }},
		{"removexattr", "d/f.ctime", "d/f.mtime", func(*T) error { return unix.Removexattr("d/f", "user.a") }},
		{"getxattr", "", "d/f.ctime d/f.mtime d/f.atime", func(*T) error { _, err := unix.Getxattr("d/f", "user.a", nil); return err }},
		{"set-acl", "d/f.ctime", "d/f.mtime", func(*T) error {
			return unix.Setxattr("d/f", aclAccess, acl{{aclUserObj, 6, 0}, {aclUser, 4, 77}, {aclGroupObj, 4, 0}, {aclMask, 4, 0}, {aclOther, 0, 0}}.encode(), 0)
		}},
		{"link", "d/f.ctime d.mtime d.ctime", "d/f.mtime d/f.atime", func(*T) error { return unix.Link("d/f", "d/new") }},
		{"link-to-other-directory", "d/f.ctime e.mtime e.ctime", "d.mtime d.ctime", func(*T) error { return unix.Link("d/f", "e/new") }},
		{"unlink-one-of-two", "d/f.ctime d.mtime d.ctime", "d/f.mtime d/f.atime", func(*T) error { return unix.Unlink("d/f2") }},
		{"rename", "d/renamed.ctime d.mtime d.ctime", "d/renamed.mtime d/renamed.atime", func(*T) error { return unix.Rename("d/f", "d/renamed") }},
		{"rename-to-other-directory", "e/renamed.ctime d.mtime d.ctime e.mtime e.ctime", "e/renamed.mtime", func(*T) error { return unix.Rename("d/f", "e/renamed") }},
		{"rename-directory", "e/renamed.ctime d.mtime d.ctime e.mtime e.ctime", "", func(*T) error { return unix.Rename("d/sub", "e/renamed") }},
		{"rename-over-linked-file", "d/f2.ctime d.mtime e.mtime", "d/f2.mtime", func(*T) error { return unix.Rename("e/g", "d/f") }},
		{"exchange", "d/f.ctime e/g.ctime d.mtime e.mtime d.ctime e.ctime", "", func(*T) error { return unix.Renameat2(here, "d/f", here, "e/g", unix.RENAME_EXCHANGE) }},
		{"rename-to-own-link", "", "d/f.mtime d.mtime", func(*T) error { return unix.Rename("d/f", "d/f2") }},
		{"write", "d/f.mtime d/f.ctime", "d.mtime d.ctime d/f.atime", func(t *T) error { _, err := unix.Write(fd(t, "d/f", unix.O_WRONLY), []byte("x")); return err }},
		{"pwrite", "d/f.mtime d/f.ctime", "d/f.atime", func(t *T) error { _, err := unix.Pwrite(fd(t, "d/f", unix.O_WRONLY), []byte("x"), 3); return err }},
		{"writev", "d/f.mtime d/f.ctime", "", func(t *T) error { _, err := unix.Writev(fd(t, "d/f", unix.O_WRONLY), [][]byte{{1}, {2}}); return err }},
		{"append", "d/f.mtime d/f.ctime", "", func(t *T) error {
			_, err := unix.Write(fd(t, "d/f", unix.O_WRONLY|unix.O_APPEND), []byte("x"))
			return err
		}},
		{"write-of-nothing", "", "d/f.mtime d/f.ctime", func(t *T) error { _, err := unix.Write(fd(t, "d/f", unix.O_WRONLY), nil); return err }},
		{"truncate-shorter", "d/f.mtime d/f.ctime", "d.mtime d/f.atime", func(*T) error { return unix.Truncate("d/f", 1) }},
		{"truncate-longer", "d/f.mtime d/f.ctime", "d.mtime d/f.atime", func(*T) error { return unix.Truncate("d/f", 100000) }},
		{"ftruncate-shorter", "d/f.mtime d/f.ctime", "", func(t *T) error { return unix.Ftruncate(fd(t, "d/f", unix.O_WRONLY), 1) }},
		{"ftruncate-to-same-size", "d/f.mtime d/f.ctime", "", func(t *T) error { return unix.Ftruncate(fd(t, "d/f", unix.O_WRONLY), 7) }},
		{"open-O_TRUNC", "d/f.mtime d/f.ctime", "d.mtime", func(*T) error { return tryOpen("d/f", unix.O_WRONLY|unix.O_TRUNC) }},
		{"open-O_TRUNC-of-empty-file", "e/g.mtime e/g.ctime", "e.mtime", func(*T) error { return tryOpen("e/g", unix.O_WRONLY|unix.O_TRUNC) }},
		{"open-O_CREAT-of-existing", "", "d/f.mtime d/f.ctime d/f.atime d.mtime d.ctime", func(*T) error { return tryOpen("d/f", unix.O_WRONLY|unix.O_CREAT) }},
		{"open-and-close", "", "d/f.mtime d/f.ctime d/f.atime", func(*T) error { return tryOpen("d/f", unix.O_RDWR) }},
		{"fallocate-longer", "d/f.ctime d/f.mtime", "d.mtime", func(t *T) error { return unix.Fallocate(fd(t, "d/f", unix.O_WRONLY), 0, 0, 100000) }},
		{"punch-hole", "d/f.mtime d/f.ctime", "d.mtime", func(t *T) error {
			return unix.Fallocate(fd(t, "d/f", unix.O_WRONLY), unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, 0, 4096)
		}},
		{"zero-range", "d/f.mtime d/f.ctime", "", func(t *T) error {
			return unix.Fallocate(fd(t, "d/f", unix.O_WRONLY), unix.FALLOC_FL_ZERO_RANGE, 0, 4096)
		}},
		{"copy_file_range", "e/g.mtime e/g.ctime", "d/f.mtime d/f.ctime", func(t *T) error {
			_, err := unix.CopyFileRange(fd(t, "d/f", unix.O_RDONLY), nil, fd(t, "e/g", unix.O_WRONLY), nil, 7, 0)
			return err
		}},
		{"mmap-write-and-msync", "d/f.mtime d/f.ctime", "d.mtime", func(t *T) error {
			m := mapFile(t, fd(t, "d/f", unix.O_RDWR), 4096, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
			m[0] = 'X'
			return unix.Msync(m, unix.MS_SYNC)
		}},
		{"read", "d/f.atime", "d/f.mtime d/f.ctime d.atime", func(t *T) error { _, err := unix.Read(fd(t, "d/f", unix.O_RDONLY), make([]byte, 4)); return err }},
		{"pread", "d/f.atime", "d/f.mtime d/f.ctime", func(t *T) error { _, err := unix.Pread(fd(t, "d/f", unix.O_RDONLY), make([]byte, 4), 2); return err }},
		{"readlink", "d/l.atime", "d/l.mtime d/l.ctime d/f.atime", func(*T) error { _, err := unix.Readlink("d/l", make([]byte, 9)); return err }},
		{"readdir", "d.atime", "d.mtime d.ctime", func(t *T) error {
			_, err := unix.Getdents(fd(t, "d", unix.O_RDONLY|unix.O_DIRECTORY), make([]byte, 4096))
			return err
		}},
		{"stat", "", "d/f.mtime d/f.ctime d/f.atime d.atime", func(t *T) error { t.Lstat("d/f"); return nil }},
		{"access", "", "d/f.mtime d/f.ctime d/f.atime", func(*T) error { return unix.Access("d/f", 6) }},
		{"fsync", "", "d/f.mtime d/f.ctime d/f.atime", func(t *T) error { return unix.Fsync(fd(t, "d/f", unix.O_WRONLY)) }},
		{"flock", "", "d/f.mtime d/f.ctime d/f.atime", func(t *T) error { return unix.Flock(fd(t, "d/f", unix.O_RDONLY), unix.LOCK_EX) }},
		{"lseek", "", "d/f.mtime d/f.ctime d/f.atime", func(t *T) error { _, err := unix.Seek(fd(t, "d/f", unix.O_RDONLY), 3, unix.SEEK_SET); return err }},
		{"utimensat", "d/f.ctime d/f.mtime d/f.atime", "d.mtime d.ctime", func(*T) error {
			return unix.UtimesNanoAt(here, "d/f", []unix.Timespec{{Sec: 4}, {Sec: 5}}, 0)
		}},
		{"utimensat-atime-only", "d/f.ctime d/f.atime", "d/f.mtime", func(*T) error {
			return unix.UtimesNanoAt(here, "d/f", []unix.Timespec{{Sec: 4}, {Nsec: unix.UTIME_OMIT}}, 0)
		}},
		{"utimensat-mtime-only", "d/f.ctime d/f.mtime", "d/f.atime", func(*T) error {
			return unix.UtimesNanoAt(here, "d/f", []unix.Timespec{{Nsec: unix.UTIME_OMIT}, {Sec: 5}}, 0)
		}},
		{"utimensat-omit-both", "", "d/f.ctime d/f.mtime d/f.atime", func(*T) error {
			return unix.UtimesNanoAt(here, "d/f", []unix.Timespec{{Nsec: unix.UTIME_OMIT}, {Nsec: unix.UTIME_OMIT}}, 0)
		}},
		{"symlink-to-it", "e.mtime e.ctime", "d/f.ctime d/f.mtime d.mtime", func(*T) error { return unix.Symlink("../d/f", "e/new") }},
		{"mkdir-below", "d/sub.mtime d/sub.ctime", "d.mtime d.ctime", func(*T) error { return unix.Mkdir("d/sub/x", 0o755) }},
		{"tmpfile", "", "d.mtime", func(t *T) error { return tryOpen("d", unix.O_TMPFILE|unix.O_RDWR) }},
		{"link-of-tmpfile", "d.mtime d.ctime", "", func(t *T) error {
			return unix.Linkat(fd(t, "d", unix.O_TMPFILE|unix.O_RDWR), "", here, "d/new", unix.AT_EMPTY_PATH)
		}},
		{"rmdir", "d.mtime d.ctime", "", func(*T) error { return unix.Rmdir("d/sub") }},
		{"failed-mkdir", "", "d.mtime d.ctime d/f.ctime", func(t *T) error { t.Want("mkdir", unix.Mkdir("d/f", 0o755), unix.EEXIST); return nil }},
		{"failed-unlink", "", "d.mtime d.ctime d/sub.ctime", func(t *T) error { t.Want("unlink", unix.Unlink("d/sub"), unix.EISDIR); return nil }},
		{"failed-rmdir", "", "d.mtime d.ctime", func(t *T) error { t.Want("rmdir", unix.Rmdir("d/none"), unix.ENOENT); return nil }},
		{"failed-rename", "", "d.mtime d.ctime d/f.ctime", func(t *T) error { t.Want("rename", unix.Rename("d/f", "d/sub"), unix.EISDIR); return nil }},
		{"failed-link", "", "d.mtime d.ctime d/f.ctime", func(t *T) error { t.Want("link", unix.Link("d/f", "d/f2"), unix.EEXIST); return nil }},
		{"failed-chmod", "", "d/f.ctime", func(t *T) error {
			t.As(alice, func() { t.Want("chmod", unix.Chmod("d/f", 0), unix.EPERM) })
			return nil
		}},
		{"failed-chown", "", "d/f.ctime", func(t *T) error {
			t.As(alice, func() { t.Want("chown", unix.Chown("d/f", alice.UID, -1), unix.EPERM) })
			return nil
		}},
		{"failed-truncate", "", "d/f.ctime d/f.mtime", func(t *T) error {
			t.Chmod("d/f", 0o644)
			t.Want("truncate", unix.Truncate("d/f", -1), unix.EINVAL)
			return nil
		}},
	}
	rows[len(rows)-1].keeps = "d/f.mtime" // the chmod changes the ctime
	for _, typ := range allTypes {
		rows = append(rows,
			row{"create-" + string(typ), "d.mtime d.ctime", "d/f.ctime", func(t *T) error { return create(typ, "d/new", 0o755) }},
			row{"remove-" + string(typ), "d.mtime d.ctime", "d/f.ctime", func(t *T) error { return remove(typ, "d/a-"+string(typ)) }},
		)
	}
	stage := func(t *T) {
		t.Mkdir("d")
		t.Mkdir("e")
		t.File("d/f", "content")
		t.OK("setxattr", unix.Setxattr("d/f", "user.a", []byte("v"), 0))
		t.OK("link", unix.Link("d/f", "d/f2"))
		t.Mkdir("d/sub")
		t.OK("symlink", unix.Symlink("f", "d/l"))
		t.File("e/g", "")
		for _, typ := range allTypes {
			t.Make(typ, "d/a-"+string(typ), 0o755)
		}
		for _, p := range []string{"d/f", "d/sub", "d/l", "e/g", "d", "e"} {
			setTimes(t, p, 1_000_000_000, 1_100_000_000)
		}
	}
	renamed := map[string]string{"rename/d/renamed": "d/f", "rename-to-other-directory/e/renamed": "d/f", "rename-directory/e/renamed": "d/sub"}
	for _, r := range rows {
		check := func(spec string, change bool) {
			path, field, _ := strings.Cut(spec, ".")
			word := "stays"
			if change {
				word = "changes"
			}
			cs = append(cs, Case{fmt.Sprintf("times/%s/%s-of-%s-%s", r.op, field, strings.ReplaceAll(path, "/", ":"), word), func(t *T) {
				stage(t)
				first := path
				if p, ok := renamed[r.op+"/"+path]; ok {
					first = p
				}
				before := timeOf(t.Lstat(first), field)
				tick()
				t.OK(r.op, r.do(t))
				after := timeOf(t.Lstat(path), field)
				if change && after == before {
					t.Fatalf("%s of %s: expected a change, is still %s", field, path, time.Unix(0, before))
				}
				if !change && after != before {
					t.Fatalf("%s of %s: expected no change, went from %s to %s", field, path, time.Unix(0, before), time.Unix(0, after))
				}
			}})
		}
		for _, spec := range strings.Fields(r.changes) {
			check(spec, true)
		}
		for _, spec := range strings.Fields(r.keeps) {
			check(spec, false)
		}
	}
	for _, typ := range allTypes {
		for _, field := range []string{"atime", "mtime", "ctime"} {
			cs = append(cs, Case{fmt.Sprintf("times/new-%s/%s-is-now", typ, field), func(t *T) {
				before := time.Now().Add(-20 * time.Millisecond) // the kernel's coarse clock may lag by a tick
				t.Make(typ, "f", 0o755)
				got := time.Unix(0, timeOf(t.Lstat("f"), field))
				if got.Before(before) || got.After(time.Now().Add(20*time.Millisecond)) {
					t.Fatalf("%s: expected between %s and %s, got %s", field, before, time.Now(), got)
				}
			}})
		}
		cs = append(cs, Case{fmt.Sprintf("times/new-%s/all-three-are-equal", typ), func(t *T) {
			t.Make(typ, "f", 0o755)
			st := t.Lstat("f")
			Equal(t, "atime", st.Atim, st.Mtim)
			Equal(t, "ctime", st.Ctim, st.Mtim)
		}})
	}
	cs = append(cs,
		Case{"times/mtime-by-fstat-right-after-write", func(t *T) {
			f := t.Open("f", unix.O_CREAT|unix.O_RDWR, 0o644)
			setTimes(t, "f", 1000, 1000)
			t.Write(f, "x")
			t.True(t.Fstat(f).Mtim.Sec > 1000, "fstat shows the old mtime after a write")
			t.True(t.Lstat("f").Mtim == t.Fstat(f).Mtim, "lstat and fstat differ")
		}},
		Case{"times/mtime-set-after-write-stays-when-file-is-closed", func(t *T) {
			f, err := unix.Open("f", unix.O_CREAT|unix.O_RDWR|unix.O_CLOEXEC, 0o644)
			t.OK("open", err)
			t.Write(f, "x")
			setTimes(t, "f", 1000, 2000)
			t.OK("close", unix.Close(f))
			tick()
			Equal(t, "mtime after close", t.Lstat("f").Mtim.Sec, 2000)
		}},
		Case{"times/mtime-set-after-write-stays-after-fsync", func(t *T) {
			f := t.Open("f", unix.O_CREAT|unix.O_RDWR, 0o644)
			t.Write(f, "x")
			setTimes(t, "f", 1000, 2000)
			t.OK("fsync", unix.Fsync(f))
			Equal(t, "mtime after fsync", t.Lstat("f").Mtim.Sec, 2000)
		}},
		Case{"times/mtime-never-goes-back", func(t *T) {
			f := t.Open("f", unix.O_CREAT|unix.O_RDWR, 0o644)
			last := int64(0)
			for range 200 {
				t.Write(f, "x")
				now := nanos(t.Fstat(f).Mtim)
				t.True(now >= last, "mtime went back from %d to %d", last, now)
				last = now
			}
		}},
		Case{"times/relatime-second-read-keeps-atime", func(t *T) {
			t.File("f", "content")
			setTimes(t, "f", 1_000_000_000, 1_100_000_000)
			t.Read("f")
			first := timeOf(t.Lstat("f"), "atime")
			tick()
			t.Read("f")
			t.True(timeOf(t.Lstat("f"), "atime") >= first, "atime went back")
		}},
	)
	return cs
}

func timeOf(st unix.Stat_t, field string) int64 {
	switch field {
	case "atime":
		return nanos(st.Atim)
	case "mtime":
		return nanos(st.Mtim)
	case "ctime":
		return nanos(st.Ctim)
	}
	panic("no such time: " + field)
}

// setTimes sets access and modification time of path itself, in seconds.
func setTimes(t *T, path string, atime, mtime int64) {
	t.OK("utimensat "+short(path), unix.UtimesNanoAt(here, path, []unix.Timespec{{Sec: atime}, {Sec: mtime}}, unix.AT_SYMLINK_NOFOLLOW))
}
