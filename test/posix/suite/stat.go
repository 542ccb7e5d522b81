package suite

import (
	"fmt"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// statCases are stat(2), statx(2) and statfs(2).
func statCases() []Case {
	var cs []Case
	add := func(name string, run func(*T)) { cs = append(cs, Case{name, run}) }
	for _, typ := range allTypes {
		add("stat/ok/lstat-fstat-and-statx-agree-on-"+string(typ), func(t *T) {
			t.Make(typ, "f", 0o640)
			t.OK("lchown", unix.Lchown("f", 12, 34))
			st, x := t.Lstat("f"), t.Statx("f", unix.AT_SYMLINK_NOFOLLOW)
			byFd := t.Fstat(t.Open("f", unix.O_PATH|unix.O_NOFOLLOW, 0))
			Equal(t, "fstat", byFd, st)
			Equal(t, "stx_ino", x.Ino, st.Ino)
			Equal(t, "stx_mode", uint32(x.Mode), st.Mode)
			Equal(t, "stx_uid", x.Uid, st.Uid)
			Equal(t, "stx_gid", x.Gid, st.Gid)
			Equal(t, "stx_size", x.Size, uint64(st.Size))
			Equal(t, "stx_blocks", x.Blocks, uint64(st.Blocks))
			Equal(t, "stx_nlink", uint64(x.Nlink), uint64(st.Nlink))
			Equal(t, "stx_mtime", x.Mtime.Sec, st.Mtim.Sec)
			Equal(t, "stx_mtime nanoseconds", int64(x.Mtime.Nsec), st.Mtim.Nsec)
			Equal(t, "stx_dev", unix.Mkdev(x.Dev_major, x.Dev_minor), st.Dev)
			Equal(t, "stx_rdev", unix.Mkdev(x.Rdev_major, x.Rdev_minor), st.Rdev)
			const basic = unix.STATX_BASIC_STATS
			Equal(t, "basic fields in the mask", x.Mask&basic, basic)
		})
		add("stat/ok/inode-number-of-"+string(typ)+"-is-stable", func(t *T) {
			t.Make(typ, "f", 0o644)
			ino := t.Lstat("f").Ino
			for range 5 {
				Equal(t, "inode number", t.Lstat("f").Ino, ino)
				names(t, ".")
			}
			t.OK("lchown", unix.Lchown("f", 1, 1))
			t.OK("rename", unix.Rename("f", "g"))
			Equal(t, "inode number after rename", t.Lstat("g").Ino, ino)
		})
		add("stat/ok/device-of-"+string(typ)+"-is-that-of-its-directory", func(t *T) {
			t.Make(typ, "f", 0o644)
			Equal(t, "st_dev", t.Lstat("f").Dev, t.Lstat(".").Dev)
		})
		add("statx/ok/birth-time-of-"+string(typ)+"-is-its-creation", func(t *T) {
			before := time.Now().Add(-20 * time.Millisecond)
			t.Make(typ, "f", 0o644)
			x := t.Statx("f", unix.AT_SYMLINK_NOFOLLOW)
			t.True(x.Mask&unix.STATX_BTIME != 0, "no birth time")
			born := time.Unix(x.Btime.Sec, int64(x.Btime.Nsec))
			t.True(!born.Before(before) && !born.After(time.Now().Add(20*time.Millisecond)), "birth time %s isn't now", born)
		})
		add("statx/ok/birth-time-of-"+string(typ)+"-never-changes", func(t *T) {
			t.Make(typ, "f", 0o644)
			born := t.Statx("f", unix.AT_SYMLINK_NOFOLLOW).Btime
			tick()
			t.OK("lchown", unix.Lchown("f", 1, 1))
			setTimes(t, "f", 100, 200)
			t.OK("rename", unix.Rename("f", "g"))
			Equal(t, "birth time", t.Statx("g", unix.AT_SYMLINK_NOFOLLOW).Btime, born)
		})
		add("stat/ok/rdev-of-"+string(typ), func(t *T) {
			t.Make(typ, "f", 0o644)
			want := uint64(0)
			switch typ {
			case char:
				want = nullDevice
			case block:
				want = blockDevice
			}
			Equal(t, "st_rdev", t.Lstat("f").Rdev, want)
		})
	}
	for _, size := range []int{0, 1, 511, 512, 513, 4095, 4096, 4097, 100000, 1 << 20} {
		add(fmt.Sprintf("stat/ok/size-%d", size), func(t *T) {
			t.File("f", strings.Repeat("x", size))
			Equal(t, "size", t.Lstat("f").Size, int64(size))
		})
		add(fmt.Sprintf("stat/ok/blocks-cover-size-%d-after-fsync", size), func(t *T) {
			t.File("f", strings.Repeat("x", size))
			t.OK("fsync", unix.Fsync(t.Open("f", unix.O_RDWR, 0)))
			if size > 160 { // smaller files may lie in the inode
				t.True(t.Lstat("f").Blocks*512 >= int64(size), "%d blocks of 512 bytes for %d bytes", t.Lstat("f").Blocks, size)
			}
			t.True(t.Lstat("f").Blocks*512 <= int64(size)+1<<20, "%d blocks of 512 bytes for %d bytes", t.Lstat("f").Blocks, size)
		})
	}
	add("stat/ok/blksize-is-a-sensible-power-of-two", func(t *T) {
		t.File("f", "x")
		b := t.Lstat("f").Blksize
		t.True(b >= 512 && b <= 16<<20 && b&(b-1) == 0, "st_blksize is %d", b)
	})
	add("stat/ok/follows-symlink", func(t *T) {
		t.File("target", "content")
		t.Make(symlink, "l", 0)
		var st unix.Stat_t
		t.OK("stat", unix.Stat("l", &st))
		Equal(t, "size", st.Size, 7)
		Equal(t, "size of the link", t.Lstat("l").Size, 6)
	})
	add("stat/ok/without-any-permission-on-the-file", func(t *T) {
		t.Make(regular, "f", 0)
		t.As(alice, func() { t.Lstat("f") })
	})
	add("stat/EFAULT/bad-result-address", func(t *T) {
		t.File("f", "")
		t.Want("statx", with("f", func(p uintptr) error { return call(unix.SYS_STATX, cwd, p, 0, unix.STATX_BASIC_STATS, 4) }), unix.EFAULT)
	})
	add("statx/ok/AT_EMPTY_PATH", func(t *T) {
		t.File("f", "content")
		var x unix.Statx_t
		t.OK("statx", unix.Statx(t.Open("f", unix.O_RDONLY, 0), "", unix.AT_EMPTY_PATH, unix.STATX_SIZE, &x))
		Equal(t, "size", x.Size, 7)
	})
	add("statx/EINVAL/reserved-mask-bit", func(t *T) {
		t.File("f", "")
		var x unix.Statx_t
		t.Want("statx", unix.Statx(here, "f", 0, 1<<31, &x), unix.EINVAL)
	})
	add("statx/EINVAL/both-sync-types", func(t *T) {
		t.File("f", "")
		var x unix.Statx_t
		t.Want("statx", unix.Statx(here, "f", unix.AT_STATX_FORCE_SYNC|unix.AT_STATX_DONT_SYNC, unix.STATX_SIZE, &x), unix.EINVAL)
	})
	for name, flag := range map[string]int{"AT_STATX_FORCE_SYNC": unix.AT_STATX_FORCE_SYNC, "AT_STATX_SYNC_AS_STAT": unix.AT_STATX_SYNC_AS_STAT} {
		add("statx/ok/"+name+"-after-write", func(t *T) {
			fd := t.Open("f", unix.O_CREAT|unix.O_WRONLY, 0o644)
			t.Write(fd, "content")
			Equal(t, "size", t.Statx("f", flag).Size, 7)
		})
	}
	add("stat/ok/large-inode-numbers-fit", func(t *T) {
		seen := map[uint64]bool{}
		for i := range 200 {
			t.Make(regular, fmt.Sprint(i), 0o644)
			ino := t.Lstat(fmt.Sprint(i)).Ino
			t.True(!seen[ino], "inode number %d stands twice", ino)
			seen[ino] = true
		}
	})
	add("stat/ok/inode-number-of-unlinked-open-file-is-not-given-again", func(t *T) {
		held := map[uint64]bool{}
		for i := range 50 {
			fd := t.Open(fmt.Sprint(i), unix.O_CREAT|unix.O_RDWR, 0o644)
			t.OK("unlink", unix.Unlink(fmt.Sprint(i)))
			ino := t.Fstat(fd).Ino
			t.True(!held[ino], "inode number %d given again while the file is open", ino)
			held[ino] = true
		}
	})

	// statfs.
	for _, typ := range allTypes {
		add("statfs/ok/on-descriptor-of-"+string(typ), func(t *T) {
			t.Make(typ, "f", 0o644)
			var a, b unix.Statfs_t
			t.OK("fstatfs", unix.Fstatfs(t.Open("f", unix.O_PATH|unix.O_NOFOLLOW, 0), &a))
			t.OK("statfs", unix.Statfs(".", &b))
			Equal(t, "f_type", a.Type, b.Type)
			Equal(t, "f_blocks", a.Blocks, b.Blocks)
		})
	}
	for name, check := range map[string]func(t *T, s unix.Statfs_t){
		"longest-name-is-255": func(t *T, s unix.Statfs_t) { Equal(t, "f_namelen", s.Namelen, 255) },
		"block-size-is-positive": func(t *T, s unix.Statfs_t) {
			t.True(s.Bsize > 0 && s.Frsize > 0, "f_bsize %d, f_frsize %d", s.Bsize, s.Frsize)
		},
		"free-is-at-most-all":    func(t *T, s unix.Statfs_t) { t.True(s.Bfree <= s.Blocks, "f_bfree %d, f_blocks %d", s.Bfree, s.Blocks) },
		"available-at-most-free": func(t *T, s unix.Statfs_t) { t.True(s.Bavail <= s.Bfree, "f_bavail %d, f_bfree %d", s.Bavail, s.Bfree) },
		"some-space": func(t *T, s unix.Statfs_t) {
			t.True(s.Blocks > 0 && s.Bavail > 0, "f_blocks %d, f_bavail %d", s.Blocks, s.Bavail)
		},
		"free-inodes-at-most-all": func(t *T, s unix.Statfs_t) { t.True(s.Ffree <= s.Files, "f_ffree %d, f_files %d", s.Ffree, s.Files) },
		"some-inodes": func(t *T, s unix.Statfs_t) {
			t.True(s.Files > 0 && s.Ffree > 0, "f_files %d, f_ffree %d", s.Files, s.Ffree)
		},
		"not-mounted-read-only":    func(t *T, s unix.Statfs_t) { Equal(t, "ST_RDONLY", s.Flags&unix.ST_RDONLY, 0) },
		"device-files-are-allowed": func(t *T, s unix.Statfs_t) { Equal(t, "ST_NODEV", s.Flags&unix.ST_NODEV, 0) },
		"set-id-is-allowed":        func(t *T, s unix.Statfs_t) { Equal(t, "ST_NOSUID", s.Flags&unix.ST_NOSUID, 0) },
	} {
		add("statfs/ok/"+name, func(t *T) {
			var s unix.Statfs_t
			t.OK("statfs", unix.Statfs(".", &s))
			check(t, s)
		})
	}
	add("statfs/EFAULT/bad-result-address", func(t *T) {
		t.Want("statfs", with(".", func(p uintptr) error { return call(unix.SYS_STATFS, p, 4) }), unix.EFAULT)
	})
	return cs
}
