package suite

import (
	"fmt"
	"math"
	"strings"

	"golang.org/x/sys/unix"
)

// truncateCases are cases of truncate(2), ftruncate(2) and the bytes beyond the old and
// the new end.
func truncateCases() []Case {
	var cs []Case
	ways := []struct {
		name string
		do   func(t *T, n int64) error
	}{
		{"truncate", func(t *T, n int64) error { return unix.Truncate("f", n) }},
		{"ftruncate", func(t *T, n int64) error { return unix.Ftruncate(t.Open("f", unix.O_RDWR, 0), n) }},
		{"ftruncate-O_APPEND", func(t *T, n int64) error { return unix.Ftruncate(t.Open("f", unix.O_WRONLY|unix.O_APPEND, 0), n) }},
	}
	for _, w := range ways {
		add := func(name string, run func(*T)) { cs = append(cs, Case{w.name + "/" + name, run}) }
		for _, c := range []struct{ from, to int64 }{
			{0, 0}, {0, 1}, {0, 4096}, {0, 5000}, {1, 0}, {100, 50}, {100, 100}, {100, 200}, {100, 4096}, {100, 4097}, {4096, 0}, {4096, 4095}, {4096, 4097}, {5000, 4096},
			{10000, 3}, {10000, 100000}, {131072, 131071}, {131073, 131072}, {1 << 20, 1}, {1 << 20, 1<<20 - 1}, {5000, 1 << 30},
		} {
			add(fmt.Sprintf("ok/from-%d-to-%d", c.from, c.to), func(t *T) {
				data := make([]byte, c.from)
				fill(data, 1)
				t.File("f", string(data))
				t.OK(w.name, w.do(t, c.to))
				Equal(t, "size", t.Lstat("f").Size, c.to)
				want := data[:min(c.from, c.to)]
				want = append(want[:len(want):len(want)], make([]byte, max(0, min(c.to, 1<<20)-c.from))...)
				sameBytes(t, "content", []byte(t.Pread(t.Open("f", unix.O_RDONLY, 0), len(want), 0)), want)
			})
		}
		add("ok/shrink-then-grow-shows-zeros", func(t *T) {
			t.File("f", strings.Repeat("x", 10000))
			t.OK(w.name, w.do(t, 5000))
			t.OK(w.name, w.do(t, 10000))
			t.Content("f", strings.Repeat("x", 5000)+strings.Repeat("\x00", 5000))
		})
		add("ok/shrink-then-write-beyond-shows-zeros-between", func(t *T) {
			t.File("f", strings.Repeat("x", 10000))
			t.OK(w.name, w.do(t, 100))
			t.Pwrite(t.Open("f", unix.O_WRONLY, 0), "y", 6000)
			t.Content("f", strings.Repeat("x", 100)+strings.Repeat("\x00", 5900)+"y")
		})
		add("ok/to-4-TiB-is-sparse", func(t *T) {
			t.File("f", "x")
			t.OK(w.name, w.do(t, 1<<42))
			Equal(t, "size", t.Lstat("f").Size, 1<<42)
			t.True(t.Lstat("f").Blocks < 1000, "an empty file of 4 TiB takes %d blocks", t.Lstat("f").Blocks)
			Equal(t, "a byte far out", t.Pread(t.Open("f", unix.O_RDONLY, 0), 1, 1<<42-1), "\x00")
		})
		add("EINVAL/negative-size", func(t *T) {
			t.File("f", "content")
			t.Want(w.name, w.do(t, -1), unix.EINVAL)
			t.Content("f", "content")
		})
		add("EFBIG-or-ok/largest-size", func(t *T) {
			t.File("f", "content")
			t.WantOneOf(w.name, w.do(t, math.MaxInt64), nil, unix.EFBIG, unix.EINVAL)
			Equal(t, "content", t.Pread(t.Open("f", unix.O_RDONLY, 0), 7, 0), "content")
		})
		add("ok/frees-blocks", func(t *T) {
			t.File("f", strings.Repeat("x", 1<<20))
			t.OK("fsync", unix.Fsync(t.Open("f", unix.O_RDWR, 0)))
			t.True(t.Lstat("f").Blocks >= 2048, "a file of 1 MiB has %d blocks", t.Lstat("f").Blocks)
			t.OK(w.name, w.do(t, 0))
			Equal(t, "blocks", t.Lstat("f").Blocks, 0)
		})
		add("ok/offset-of-descriptor-stays", func(t *T) {
			t.File("f", "0123456789")
			fd := t.Open("f", unix.O_RDWR, 0)
			unix.Seek(fd, 8, unix.SEEK_SET)
			t.OK(w.name, w.do(t, 2))
			off, _ := unix.Seek(fd, 0, unix.SEEK_CUR)
			Equal(t, "offset", off, 8)
			t.Write(fd, "z")
			t.Content("f", "01\x00\x00\x00\x00\x00\x00z")
		})
		add("ok/hundred-times-up-and-down", func(t *T) {
			t.File("f", strings.Repeat("x", 3000))
			for i := range 50 {
				t.OK(w.name, w.do(t, int64(3000+i*100)))
				t.OK(w.name, w.do(t, 3000))
			}
			t.Content("f", strings.Repeat("x", 3000))
		})
	}
	add := func(name string, run func(*T)) { cs = append(cs, Case{name, run}) }
	add("truncate/EISDIR/directory", func(t *T) {
		t.Mkdir("d")
		t.Want("truncate", unix.Truncate("d", 0), unix.EISDIR)
	})
	for _, typ := range specialOnes {
		add("truncate/EINVAL/"+string(typ), func(t *T) {
			t.Make(typ, "f", 0o666)
			t.Want("truncate", unix.Truncate("f", 0), unix.EINVAL)
		})
	}
	add("ftruncate/EINVAL/directory", func(t *T) {
		t.Mkdir("d")
		t.WantOneOf("ftruncate", unix.Ftruncate(t.Open("d", unix.O_RDONLY, 0), 0), unix.EINVAL, unix.EBADF)
	})
	add("ftruncate/EINVAL/pipe", func(t *T) {
		_, w := pipe(t)
		t.Want("ftruncate", unix.Ftruncate(w, 0), unix.EINVAL)
	})
	add("truncate/ok/by-other-process-seen-here", func(t *T) {
		t.File("f", "content")
		fd := t.Open("f", unix.O_RDONLY, 0)
		t.Pread(fd, 7, 0)
		h := t.Helper()
		h.Do(t, "open f f rdwr")
		h.Do(t, "ftruncate f 3")
		Equal(t, "size", t.Fstat(fd).Size, 3)
		Equal(t, "content", t.Pread(fd, 100, 0), "con")
	})
	return cs
}

// fallocateCases are the modes of fallocate(2).
func fallocateCases() []Case {
	var cs []Case
	add := func(name string, run func(*T)) { cs = append(cs, Case{"fallocate/" + name, run}) }
	const keep, punch, zero = unix.FALLOC_FL_KEEP_SIZE, unix.FALLOC_FL_PUNCH_HOLE | unix.FALLOC_FL_KEEP_SIZE, unix.FALLOC_FL_ZERO_RANGE
	modes := []struct {
		name string
		mode uint32
	}{{"allocate", 0}, {"keep-size", keep}, {"punch-hole", punch}, {"zero-range", zero}, {"zero-range-keep-size", zero | keep}}
	ranges := []struct {
		name     string
		off, len int64
	}{
		{"all", 0, 40000}, {"first-block", 0, 4096}, {"inside-a-block", 5000, 100}, {"across-a-block-edge", 4000, 200}, {"blocks-in-the-middle", 8192, 16384},
		{"unaligned-middle", 7777, 11111}, {"to-the-end", 30000, 10000}, {"over-the-end", 30000, 50000}, {"behind-the-end", 50000, 30000}, {"one-byte", 20000, 1}, {"last-byte", 39999, 1},
	}
	for _, m := range modes {
		for _, r := range ranges {
			add("ok/"+m.name+"/"+r.name, func(t *T) {
				data := make([]byte, 40000)
				fill(data, 3)
				t.File("f", string(data))
				fd := t.Open("f", unix.O_RDWR, 0)
				t.OK("fallocate", unix.Fallocate(fd, m.mode, r.off, r.len))
				size := int64(40000)
				if m.mode&keep == 0 {
					size = max(size, r.off+r.len)
				}
				Equal(t, "size", t.Fstat(fd).Size, size)
				want := append(data, make([]byte, size-40000)...)
				if m.mode&(unix.FALLOC_FL_PUNCH_HOLE|zero) != 0 {
					for i := r.off; i < min(r.off+r.len, size); i++ {
						want[i] = 0
					}
				}
				sameBytes(t, "content", []byte(t.Read("f")), want)
			})
			add("ok/"+m.name+"/"+r.name+"-of-empty-file", func(t *T) {
				fd := t.Open("f", unix.O_CREAT|unix.O_RDWR, 0o644)
				t.OK("fallocate", unix.Fallocate(fd, m.mode, r.off, r.len))
				size := int64(0)
				if m.mode&keep == 0 {
					size = r.off + r.len
				}
				Equal(t, "size", t.Fstat(fd).Size, size)
				sameBytes(t, "content", []byte(t.Read("f")), make([]byte, size))
			})
		}
		add("ok/"+m.name+"/then-write-inside", func(t *T) {
			t.File("f", strings.Repeat("a", 40000))
			fd := t.Open("f", unix.O_RDWR, 0)
			t.OK("fallocate", unix.Fallocate(fd, m.mode, 8192, 8192))
			t.Pwrite(fd, "inside", 10000)
			Equal(t, "written bytes", t.Pread(fd, 6, 10000), "inside")
			Equal(t, "size", t.Fstat(fd).Size, 40000)
		})
		add("EINVAL/"+m.name+"/length-0", func(t *T) {
			t.File("f", "x")
			t.Want("fallocate", unix.Fallocate(t.Open("f", unix.O_RDWR, 0), m.mode, 0, 0), unix.EINVAL)
		})
		add("EINVAL/"+m.name+"/negative-length", func(t *T) {
			t.File("f", "x")
			t.Want("fallocate", unix.Fallocate(t.Open("f", unix.O_RDWR, 0), m.mode, 0, -1), unix.EINVAL)
		})
		add("EINVAL/"+m.name+"/negative-offset", func(t *T) {
			t.File("f", "x")
			t.Want("fallocate", unix.Fallocate(t.Open("f", unix.O_RDWR, 0), m.mode, -1, 10), unix.EINVAL)
		})
		add("EFBIG/"+m.name+"/end-overflows", func(t *T) {
			t.File("f", "x")
			t.Want("fallocate", unix.Fallocate(t.Open("f", unix.O_RDWR, 0), m.mode, math.MaxInt64-10, 100), unix.EFBIG)
		})
		add("ESPIPE/"+m.name+"/pipe", func(t *T) {
			_, w := pipe(t)
			t.Want("fallocate", unix.Fallocate(w, m.mode, 0, 10), unix.ESPIPE)
		})
		add("EBADF/"+m.name+"/read-only-descriptor", func(t *T) {
			t.File("f", "x")
			t.Want("fallocate", unix.Fallocate(t.Open("f", unix.O_RDONLY, 0), m.mode, 0, 10), unix.EBADF)
		})
	}
	add("EOPNOTSUPP/punch-hole-without-keep-size", func(t *T) {
		t.File("f", "x")
		t.Want("fallocate", unix.Fallocate(t.Open("f", unix.O_RDWR, 0), unix.FALLOC_FL_PUNCH_HOLE, 0, 10), unix.EOPNOTSUPP)
	})
	add("EOPNOTSUPP/unknown-mode", func(t *T) {
		t.File("f", "x")
		t.Want("fallocate", unix.Fallocate(t.Open("f", unix.O_RDWR, 0), 1<<12, 0, 10), unix.EOPNOTSUPP)
	})
	add("EOPNOTSUPP-or-EINVAL/punch-hole-with-zero-range", func(t *T) {
		t.File("f", "x")
		t.WantOneOf("fallocate", unix.Fallocate(t.Open("f", unix.O_RDWR, 0), punch|zero, 0, 10), unix.EOPNOTSUPP, unix.EINVAL)
	})
	// The kernel's FUSE itself refuses these two modes, so a clear EOPNOTSUPP is
	// accepted, too.
	add("ok-or-EOPNOTSUPP/collapse-range", func(t *T) {
		t.File("f", strings.Repeat("a", 65536)+strings.Repeat("b", 65536))
		err := unix.Fallocate(t.Open("f", unix.O_RDWR, 0), unix.FALLOC_FL_COLLAPSE_RANGE, 0, 65536)
		t.WantOneOf("fallocate(COLLAPSE_RANGE)", err, nil, unix.EOPNOTSUPP)
		if err == nil {
			t.Content("f", strings.Repeat("b", 65536))
		} else {
			Equal(t, "size", t.Lstat("f").Size, 131072)
		}
	})
	add("ok-or-EOPNOTSUPP/insert-range", func(t *T) {
		t.File("f", strings.Repeat("a", 65536)+strings.Repeat("b", 65536))
		err := unix.Fallocate(t.Open("f", unix.O_RDWR, 0), unix.FALLOC_FL_INSERT_RANGE, 65536, 65536)
		t.WantOneOf("fallocate(INSERT_RANGE)", err, nil, unix.EOPNOTSUPP)
		if err == nil {
			t.Content("f", strings.Repeat("a", 65536)+strings.Repeat("\x00", 65536)+strings.Repeat("b", 65536))
		} else {
			Equal(t, "size", t.Lstat("f").Size, 131072)
		}
	})
	add("ok/allocate-takes-blocks", func(t *T) {
		fd := t.Open("f", unix.O_CREAT|unix.O_RDWR, 0o644)
		t.OK("fallocate", unix.Fallocate(fd, 0, 0, 1<<20))
		t.True(t.Fstat(fd).Blocks >= 2048, "1 MiB allocated, but st_blocks is %d", t.Fstat(fd).Blocks)
	})
	add("ok/keep-size-takes-blocks", func(t *T) {
		fd := t.Open("f", unix.O_CREAT|unix.O_RDWR, 0o644)
		t.OK("fallocate", unix.Fallocate(fd, keep, 0, 1<<20))
		Equal(t, "size", t.Fstat(fd).Size, 0)
		t.True(t.Fstat(fd).Blocks >= 2048, "1 MiB allocated, but st_blocks is %d", t.Fstat(fd).Blocks)
	})
	add("ok/punch-hole-gives-blocks-back", func(t *T) {
		t.File("f", strings.Repeat("x", 1<<20))
		fd := t.Open("f", unix.O_RDWR, 0)
		t.OK("fsync", unix.Fsync(fd))
		before := t.Fstat(fd).Blocks
		t.OK("fallocate", unix.Fallocate(fd, punch, 0, 1<<19))
		t.True(t.Fstat(fd).Blocks <= before-1024, "blocks before %d, after punching half of it %d", before, t.Fstat(fd).Blocks)
	})
	add("ok/append-goes-after-allocated-size", func(t *T) {
		fd := t.Open("f", unix.O_CREAT|unix.O_RDWR|unix.O_APPEND, 0o644)
		t.OK("fallocate", unix.Fallocate(fd, 0, 0, 100))
		t.Write(fd, "x")
		Equal(t, "size", t.Fstat(fd).Size, 101)
	})
	add("ok/append-ignores-keep-size-allocation", func(t *T) {
		fd := t.Open("f", unix.O_CREAT|unix.O_RDWR|unix.O_APPEND, 0o644)
		t.OK("fallocate", unix.Fallocate(fd, keep, 0, 100000))
		t.Write(fd, "x")
		Equal(t, "size", t.Fstat(fd).Size, 1)
	})
	add("ok/unlinked-file", func(t *T) {
		fd := t.Open("f", unix.O_CREAT|unix.O_RDWR, 0o644)
		t.OK("unlink", unix.Unlink("f"))
		t.OK("fallocate", unix.Fallocate(fd, 0, 0, 100000))
		Equal(t, "size", t.Fstat(fd).Size, 100000)
	})
	return cs
}
