package suite

import (
	"fmt"
	"math"
	"strings"

	"golang.org/x/sys/unix"
)

// A writer is a way to write bytes at an offset, a reader a way to read them. Every pair
// must agree in every layout.
type writer struct {
	name string
	do   func(t *T, path string, p []byte, off int64)
}

type reader struct {
	name string
	do   func(t *T, path string, n int, off int64) []byte
}

func writers() []writer {
	full := func(t *T, op string, n, want int, err error) {
		t.OK(op, err)
		Equal(t, "bytes written by "+op, n, want)
	}
	return []writer{
		{"pwrite", func(t *T, path string, p []byte, off int64) {
			n, err := unix.Pwrite(t.Open(path, unix.O_WRONLY, 0), p, off)
			full(t, "pwrite", n, len(p), err)
		}},
		{"lseek-write", func(t *T, path string, p []byte, off int64) {
			fd := t.Open(path, unix.O_WRONLY, 0)
			_, err := unix.Seek(fd, off, unix.SEEK_SET)
			t.OK("lseek", err)
			n, err := unix.Write(fd, p)
			full(t, "write", n, len(p), err)
		}},
		{"pwritev", func(t *T, path string, p []byte, off int64) {
			third := len(p) / 3
			n, err := unix.Pwritev(t.Open(path, unix.O_WRONLY, 0), [][]byte{p[:third], p[third : 2*third], p[2*third:]}, off)
			full(t, "pwritev", n, len(p), err)
		}},
		{"pwritev2-DSYNC", func(t *T, path string, p []byte, off int64) {
			n, err := unix.Pwritev2(t.Open(path, unix.O_WRONLY, 0), [][]byte{p}, off, unix.RWF_DSYNC)
			full(t, "pwritev2(RWF_DSYNC)", n, len(p), err)
		}},
		{"byte-by-byte-ends", func(t *T, path string, p []byte, off int64) {
			fd := t.Open(path, unix.O_WRONLY, 0)
			cut := min(len(p), 7)
			for i := range cut {
				t.Pwrite(fd, string(p[i:i+1]), off+int64(i))
			}
			if len(p) > cut {
				t.Pwrite(fd, string(p[cut:]), off+int64(cut))
			}
		}},
		{"backwards-in-blocks", func(t *T, path string, p []byte, off int64) {
			fd := t.Open(path, unix.O_WRONLY, 0)
			for end := len(p); end > 0; end -= 4096 {
				start := max(0, end-4096)
				t.Pwrite(fd, string(p[start:end]), off+int64(start))
			}
		}},
		{"mmap", func(t *T, path string, p []byte, off int64) {
			fd := t.Open(path, unix.O_RDWR, 0)
			if t.Fstat(fd).Size < off+int64(len(p)) {
				t.OK("ftruncate", unix.Ftruncate(fd, off+int64(len(p))))
			}
			base := off &^ 4095
			m, err := unix.Mmap(fd, base, int(off-base)+len(p), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
			t.OK("mmap", err)
			copy(m[off-base:], p)
			t.OK("msync", unix.Msync(m, unix.MS_SYNC))
			t.OK("munmap", unix.Munmap(m))
		}},
		{"splice", func(t *T, path string, p []byte, off int64) {
			fd := t.Open(path, unix.O_WRONLY, 0)
			r, w := pipe(t)
			for len(p) > 0 {
				n, err := unix.Write(w, p[:min(len(p), 16384)])
				t.OK("write to the pipe", err)
				for left := n; left > 0; {
					m, err := unix.Splice(r, nil, fd, &off, left, 0)
					t.OK("splice", err)
					left -= int(m)
				}
				p = p[n:]
			}
		}},
		{"sendfile", func(t *T, path string, p []byte, off int64) {
			t.File("sendfile-source", string(p))
			src, fd := t.Open("sendfile-source", unix.O_RDONLY, 0), t.Open(path, unix.O_WRONLY, 0)
			_, err := unix.Seek(fd, off, unix.SEEK_SET)
			t.OK("lseek", err)
			for left := len(p); left > 0; {
				n, err := unix.Sendfile(fd, src, nil, left)
				t.OK("sendfile", err)
				t.True(n > 0, "sendfile copied nothing with %d bytes left", left)
				left -= n
			}
		}},
		{"copy_file_range", func(t *T, path string, p []byte, off int64) {
			t.File("range-source", string(p))
			src, fd := t.Open("range-source", unix.O_RDONLY, 0), t.Open(path, unix.O_WRONLY, 0)
			for left := len(p); left > 0; {
				n, err := unix.CopyFileRange(src, nil, fd, &off, left, 0)
				t.OK("copy_file_range", err)
				t.True(n > 0, "copy_file_range copied nothing with %d bytes left", left)
				left -= n
			}
		}},
	}
}

func readers() []reader {
	return []reader{
		{"pread", func(t *T, path string, n int, off int64) []byte {
			return []byte(t.Pread(t.Open(path, unix.O_RDONLY, 0), n, off))
		}},
		{"preadv", func(t *T, path string, n int, off int64) []byte {
			b := make([]byte, n)
			got, err := unix.Preadv(t.Open(path, unix.O_RDONLY, 0), [][]byte{b[:n/3], b[n/3:]}, off)
			t.OK("preadv", err)
			return b[:got]
		}},
		{"mmap", func(t *T, path string, n int, off int64) []byte {
			fd := t.Open(path, unix.O_RDONLY, 0)
			n = int(min(int64(n), t.Fstat(fd).Size-off))
			base := off &^ 4095
			m, err := unix.Mmap(fd, base, int(off-base)+n, unix.PROT_READ, unix.MAP_PRIVATE)
			t.OK("mmap", err)
			b := append([]byte(nil), m[off-base:]...)
			t.OK("munmap", unix.Munmap(m))
			return b
		}},
		{"sendfile-to-pipe", func(t *T, path string, n int, off int64) []byte {
			fd := t.Open(path, unix.O_RDONLY, 0)
			r, w := pipe(t)
			var out []byte
			b := make([]byte, 65536)
			for len(out) < n {
				m, err := unix.Sendfile(w, fd, &off, min(n-len(out), 16384))
				t.OK("sendfile", err)
				if m == 0 {
					break
				}
				for left := m; left > 0; {
					k, err := unix.Read(r, b[:left])
					t.OK("read from the pipe", err)
					out = append(out, b[:k]...)
					left -= k
				}
			}
			return out
		}},
		{"O_DIRECT", func(t *T, path string, n int, off int64) []byte {
			fd := t.Open(path, unix.O_RDONLY|unix.O_DIRECT, 0)
			base := off &^ 4095
			b := aligned(t, (int(off-base)+n+4095)&^4095)
			got := 0
			for got < len(b) {
				m, err := unix.Pread(fd, b[got:], base+int64(got))
				t.OK("pread with O_DIRECT", err)
				got += m
				if m == 0 || m%4096 != 0 {
					break
				}
			}
			return b[off-base : min(got, int(off-base)+n)]
		}},
	}
}

func pipe(t *T) (r, w int) {
	var p [2]int
	t.OK("pipe", unix.Pipe2(p[:], unix.O_CLOEXEC))
	t.Cleanup(func() { unix.Close(p[0]); unix.Close(p[1]) })
	return p[0], p[1]
}

// readWriteCases are read(2), write(2) and their relatives.
func readWriteCases() []Case {
	var cs []Case
	add := func(name string, run func(*T)) { cs = append(cs, Case{name, run}) }

	layouts := []struct {
		name    string
		initial int   // bytes in the file before
		off     int64 // where the write begins
		size    int
	}{
		{"new-file", 0, 0, 5000}, {"one-byte", 0, 0, 1}, {"inside", 20000, 5000, 3000}, {"over-the-start", 20000, 0, 4096},
		{"over-the-end", 5000, 4000, 3000}, {"right-at-the-end", 5000, 5000, 3000}, {"beyond-the-end-leaves-hole", 100, 50000, 300},
		{"beyond-the-end-in-the-same-block", 100, 300, 50}, {"whole-blocks", 65536, 8192, 16384}, {"across-a-block-edge", 65536, 4090, 12},
		{"one-megabyte-and-a-bit", 0, 0, 1<<20 + 17}, {"all-of-it", 9999, 0, 9999}, {"at-128-KiB-edge", 200000, 131072 - 5, 10}, {"far-offset", 0, 1 << 33, 100},
	}
	for _, l := range layouts {
		for _, w := range writers() {
			add(fmt.Sprintf("write/%s/%s", w.name, l.name), func(t *T) {
				model := make([]byte, l.initial)
				fill(model, 1)
				t.File("f", string(model))
				p := make([]byte, l.size)
				fill(p, 2)
				w.do(t, "f", p, l.off)
				end := max(int64(l.initial), l.off+int64(l.size))
				Equal(t, "size", t.Lstat("f").Size, end)
				if l.off > 1<<30 {
					sameBytes(t, "what was written", []byte(t.Pread(t.Open("f", unix.O_RDONLY, 0), l.size, l.off)), p)
					sameBytes(t, "the hole before it", []byte(t.Pread(t.Open("f", unix.O_RDONLY, 0), 4096, l.off-4096)), make([]byte, 4096))
					return
				}
				model = append(model, make([]byte, end-int64(l.initial))...)
				copy(model[l.off:], p)
				t.Content("f", string(model))
			})
		}
		for _, r := range readers() {
			if l.off > 1<<30 && r.name == "sendfile-to-pipe" {
				continue
			}
			add(fmt.Sprintf("read/%s/%s", r.name, l.name), func(t *T) {
				model := make([]byte, max(l.initial, int(min(l.off, 1<<20))+l.size))
				fill(model, 3)
				off := min(l.off, 1<<20)
				t.File("f", string(model))
				sameBytes(t, "what "+r.name+" reads", r.do(t, "f", l.size, off), model[off:off+int64(l.size)])
			})
		}
	}
	for _, r := range readers() {
		add("read/"+r.name+"/hole-is-zeros", func(t *T) {
			fd := t.Open("f", unix.O_CREAT|unix.O_RDWR, 0o644)
			t.OK("ftruncate", unix.Ftruncate(fd, 100000))
			sameBytes(t, "the hole", r.do(t, "f", 60000, 10000), make([]byte, 60000))
		})
		add("read/"+r.name+"/half-hole-half-data", func(t *T) {
			fd := t.Open("f", unix.O_CREAT|unix.O_RDWR, 0o644)
			t.Pwrite(fd, strings.Repeat("d", 4096), 8192)
			want := append(make([]byte, 4096), []byte(strings.Repeat("d", 4096))...)
			sameBytes(t, "hole and data", r.do(t, "f", 8192, 4096), want)
		})
		add("read/"+r.name+"/short-at-the-end", func(t *T) {
			t.File("f", "0123456789")
			Equal(t, "what "+r.name+" reads", string(r.do(t, "f", 100, 4)), "456789")
		})
		for _, w := range writers() {
			add(fmt.Sprintf("read/%s/sees-overwrite-by-%s", r.name, w.name), func(t *T) {
				model := make([]byte, 50000)
				fill(model, 4)
				t.File("f", string(model))
				sameBytes(t, "before", r.do(t, "f", 50000, 0), model) // brings the old bytes into caches
				p := make([]byte, 20000)
				fill(p, 5)
				w.do(t, "f", p, 13000)
				copy(model[13000:], p)
				sameBytes(t, "after", r.do(t, "f", 50000, 0), model)
			})
		}
	}

	add("read/ok/zero-bytes", func(t *T) {
		t.File("f", "content")
		n, err := unix.Read(t.Open("f", unix.O_RDONLY, 0), nil)
		t.OK("read", err)
		Equal(t, "bytes", n, 0)
	})
	add("read/ok/at-the-end-gives-nothing", func(t *T) {
		t.File("f", "content")
		n, err := unix.Pread(t.Open("f", unix.O_RDONLY, 0), make([]byte, 10), 7)
		t.OK("pread", err)
		Equal(t, "bytes", n, 0)
	})
	add("read/ok/far-beyond-the-end-gives-nothing", func(t *T) {
		t.File("f", "content")
		n, err := unix.Pread(t.Open("f", unix.O_RDONLY, 0), make([]byte, 10), math.MaxInt64-4096)
		t.OK("pread", err)
		Equal(t, "bytes", n, 0)
	})
	add("read/ok/empty-file", func(t *T) {
		t.File("f", "")
		n, err := unix.Read(t.Open("f", unix.O_RDONLY, 0), make([]byte, 10))
		t.OK("read", err)
		Equal(t, "bytes", n, 0)
	})
	add("read/ok/offset-moves-by-what-was-read", func(t *T) {
		t.File("f", "0123456789")
		fd := t.Open("f", unix.O_RDONLY, 0)
		b := make([]byte, 4)
		for _, want := range []string{"0123", "4567", "89"} {
			n, err := unix.Read(fd, b)
			t.OK("read", err)
			Equal(t, "bytes", string(b[:n]), want)
		}
		off, _ := unix.Seek(fd, 0, unix.SEEK_CUR)
		Equal(t, "offset", off, 10)
	})
	add("read/ok/pread-leaves-offset", func(t *T) {
		t.File("f", "0123456789")
		fd := t.Open("f", unix.O_RDONLY, 0)
		t.Pread(fd, 4, 5)
		off, _ := unix.Seek(fd, 0, unix.SEEK_CUR)
		Equal(t, "offset", off, 0)
	})
	add("read/ok/dup-shares-offset", func(t *T) {
		t.File("f", "0123456789")
		fd := t.Open("f", unix.O_RDONLY, 0)
		d, err := unix.Dup(fd)
		t.OK("dup", err)
		defer unix.Close(d)
		b := make([]byte, 4)
		unix.Read(fd, b)
		unix.Read(d, b)
		Equal(t, "second part", string(b), "4567")
	})
	add("read/EISDIR/directory", func(t *T) {
		t.Mkdir("d")
		_, err := unix.Read(t.Open("d", unix.O_RDONLY, 0), make([]byte, 10))
		t.Want("read", err, unix.EISDIR)
	})
	add("read/EINVAL/negative-offset", func(t *T) {
		t.File("f", "content")
		_, err := unix.Pread(t.Open("f", unix.O_RDONLY, 0), make([]byte, 10), -1)
		t.Want("pread", err, unix.EINVAL)
	})
	add("write/EINVAL/negative-offset", func(t *T) {
		t.File("f", "content")
		_, err := unix.Pwrite(t.Open("f", unix.O_WRONLY, 0), make([]byte, 10), -1)
		t.Want("pwrite", err, unix.EINVAL)
	})
	add("write/EFBIG/offset-at-the-largest-number", func(t *T) {
		t.File("f", "content")
		_, err := unix.Pwrite(t.Open("f", unix.O_WRONLY, 0), make([]byte, 10), math.MaxInt64-1)
		t.WantOneOf("pwrite", err, unix.EFBIG, unix.EINVAL)
		t.Content("f", "content")
	})
	for name, fd := range map[string]int{"-1": -1, "closed": 1 << 20} {
		for op, err := range map[string]func(fd int) error{
			"read": func(fd int) error { _, err := unix.Read(fd, make([]byte, 1)); return err }, "write": func(fd int) error { _, err := unix.Write(fd, make([]byte, 1)); return err },
			"pread": func(fd int) error { _, err := unix.Pread(fd, make([]byte, 1), 0); return err }, "pwrite": func(fd int) error { _, err := unix.Pwrite(fd, make([]byte, 1), 0); return err },
			"fsync": unix.Fsync, "fdatasync": unix.Fdatasync, "ftruncate": func(fd int) error { return unix.Ftruncate(fd, 0) },
			"fstat": func(fd int) error { var st unix.Stat_t; return unix.Fstat(fd, &st) }, "fchmod": func(fd int) error { return unix.Fchmod(fd, 0) },
			"fchown": func(fd int) error { return unix.Fchown(fd, 0, 0) }, "fchdir": unix.Fchdir, "flock": func(fd int) error { return unix.Flock(fd, unix.LOCK_SH) },
			"lseek": func(fd int) error { _, err := unix.Seek(fd, 0, 0); return err }, "fallocate": func(fd int) error { return unix.Fallocate(fd, 0, 0, 1) },
			"close": unix.Close, "getdents": func(fd int) error { _, err := unix.Getdents(fd, make([]byte, 100)); return err }, "syncfs": unix.Syncfs,
		} {
			add(fmt.Sprintf("%s/EBADF/descriptor-%s", op, name), func(t *T) { t.Want(op, err(fd), unix.EBADF) })
		}
	}
	for op, nr := range map[string]uintptr{"read": unix.SYS_READ, "write": unix.SYS_WRITE, "pread": unix.SYS_PREAD64, "pwrite": unix.SYS_PWRITE64} {
		add(op+"/EFAULT/bad-buffer", func(t *T) {
			t.File("f", strings.Repeat("x", 8192))
			t.Want(op, call(nr, uintptr(t.Open("f", unix.O_RDWR, 0)), 4096, 4096, 0), unix.EFAULT)
			Equal(t, "size", t.Lstat("f").Size, 8192)
		})
	}
	add("write/ok/zero-bytes-beyond-the-end-does-not-extend", func(t *T) {
		t.File("f", "content")
		n, err := unix.Pwrite(t.Open("f", unix.O_WRONLY, 0), nil, 1000)
		t.OK("pwrite", err)
		Equal(t, "bytes", n, 0)
		Equal(t, "size", t.Lstat("f").Size, 7)
	})
	add("write/ok/pwrite-leaves-offset", func(t *T) {
		fd := t.Open("f", unix.O_CREAT|unix.O_WRONLY, 0o644)
		t.Pwrite(fd, "xxx", 100)
		off, _ := unix.Seek(fd, 0, unix.SEEK_CUR)
		Equal(t, "offset", off, 0)
	})
	add("write/ok/seen-by-second-descriptor-at-once", func(t *T) {
		w, r := t.Open("f", unix.O_CREAT|unix.O_WRONLY, 0o644), t.Open("f", unix.O_RDONLY, 0)
		want := ""
		for i := range 50 {
			line := fmt.Sprintf("line %d\n", i)
			t.Write(w, line)
			want += line
			Equal(t, "size by the reader", t.Fstat(r).Size, int64(len(want)))
			Equal(t, "content by the reader", t.Pread(r, 10000, 0), want)
		}
	})
	add("write/ok/size-by-lstat-at-once", func(t *T) {
		fd := t.Open("f", unix.O_CREAT|unix.O_WRONLY, 0o644)
		for i := range 20 {
			t.Write(fd, "0123456789")
			Equal(t, "size", t.Lstat("f").Size, int64(10*(i+1)))
		}
	})
	add("write/ok/many-random-places", func(t *T) {
		fd := t.Open("f", unix.O_CREAT|unix.O_RDWR, 0o644)
		model := make([]byte, 1<<20)
		x := uint64(12345)
		for range 300 {
			x = x*6364136223846793005 + 1442695040888963407
			off, n := int(x>>33)%(1<<20-9000), int(x>>20)%9000+1
			p := make([]byte, n)
			fill(p, x)
			t.Pwrite(fd, string(p), int64(off))
			copy(model[off:], p)
		}
		got := t.Read("f")
		sameBytes(t, "content", []byte(got), model[:len(got)])
	})
	add("write/ok/sixteen-megabytes", func(t *T) {
		fd := t.Open("f", unix.O_CREAT|unix.O_RDWR, 0o644)
		b := make([]byte, 1<<20)
		for i := range 16 {
			fill(b, uint64(i))
			t.Pwrite(fd, string(b), int64(i)<<20)
		}
		for i := range 16 {
			fill(b, uint64(i))
			sameBytes(t, fmt.Sprint("megabyte ", i), []byte(t.Pread(fd, 1<<20, int64(i)<<20)), b)
		}
	})
	add("write/ok/thousand-small-appends", func(t *T) {
		fd := t.Open("f", unix.O_CREAT|unix.O_WRONLY|unix.O_APPEND, 0o644)
		var want strings.Builder
		for i := range 1000 {
			t.Write(fd, fmt.Sprintf("%04d", i))
			fmt.Fprintf(&want, "%04d", i)
		}
		t.Content("f", want.String())
	})
	add("pwritev2/ok/RWF_APPEND", func(t *T) {
		t.File("f", "one")
		fd := t.Open("f", unix.O_WRONLY, 0)
		n, err := unix.Pwritev2(fd, [][]byte{[]byte("two")}, 0, unix.RWF_APPEND)
		t.OK("pwritev2(RWF_APPEND)", err)
		Equal(t, "bytes", n, 3)
		t.Content("f", "onetwo")
	})
	add("pwritev2/ok/RWF_SYNC", func(t *T) {
		fd := t.Open("f", unix.O_CREAT|unix.O_WRONLY, 0o644)
		_, err := unix.Pwritev2(fd, [][]byte{[]byte("synced")}, 0, unix.RWF_SYNC)
		t.OK("pwritev2(RWF_SYNC)", err)
		t.Content("f", "synced")
	})
	add("pwritev2/ok/offset-minus-one-uses-file-offset", func(t *T) {
		fd := t.Open("f", unix.O_CREAT|unix.O_WRONLY, 0o644)
		t.Write(fd, "one")
		_, err := unix.Pwritev2(fd, [][]byte{[]byte("two")}, -1, 0)
		t.OK("pwritev2(-1)", err)
		t.Content("f", "onetwo")
	})
	add("pwritev2/EOPNOTSUPP/unknown-flag", func(t *T) {
		fd := t.Open("f", unix.O_CREAT|unix.O_WRONLY, 0o644)
		_, err := unix.Pwritev2(fd, [][]byte{[]byte("two")}, 0, 1<<20)
		t.Want("pwritev2", err, unix.EOPNOTSUPP)
	})
	add("preadv2/ok-or-EAGAIN-or-EOPNOTSUPP/RWF_NOWAIT", func(t *T) {
		t.File("f", "content")
		b := make([]byte, 100)
		n, err := unix.Preadv2(t.Open("f", unix.O_RDONLY, 0), [][]byte{b}, 0, unix.RWF_NOWAIT)
		t.WantOneOf("preadv2(RWF_NOWAIT)", err, nil, unix.EAGAIN, unix.EOPNOTSUPP)
		if err == nil {
			Equal(t, "content", string(b[:n]), "content"[:n])
		}
	})
	add("pwritev2/ok-or-EAGAIN-or-EOPNOTSUPP/RWF_NOWAIT", func(t *T) {
		fd := t.Open("f", unix.O_CREAT|unix.O_WRONLY, 0o644)
		n, err := unix.Pwritev2(fd, [][]byte{[]byte("content")}, 0, unix.RWF_NOWAIT)
		t.WantOneOf("pwritev2(RWF_NOWAIT)", err, nil, unix.EAGAIN, unix.EOPNOTSUPP)
		if err == nil {
			t.Content("f", "content"[:n])
		} else {
			t.Content("f", "")
		}
	})
	add("writev/ok/empty-and-full-vectors", func(t *T) {
		fd := t.Open("f", unix.O_CREAT|unix.O_WRONLY, 0o644)
		n, err := unix.Writev(fd, [][]byte{[]byte("a"), {}, []byte("bc"), {}, []byte("def")})
		t.OK("writev", err)
		Equal(t, "bytes", n, 6)
		t.Content("f", "abcdef")
	})
	add("writev/ok/1024-vectors", func(t *T) {
		fd := t.Open("f", unix.O_CREAT|unix.O_WRONLY, 0o644)
		v := make([][]byte, 1024)
		for i := range v {
			v[i] = []byte{byte('a' + i%26)}
		}
		n, err := unix.Writev(fd, v)
		t.OK("writev", err)
		Equal(t, "bytes", n, 1024)
		Equal(t, "size", t.Lstat("f").Size, 1024)
	})
	add("readv/ok/scatters", func(t *T) {
		t.File("f", "abcdef")
		a, b := make([]byte, 2), make([]byte, 10)
		n, err := unix.Readv(t.Open("f", unix.O_RDONLY, 0), [][]byte{a, b})
		t.OK("readv", err)
		Equal(t, "bytes", n, 6)
		Equal(t, "parts", string(a)+"|"+string(b[:4]), "ab|cdef")
	})
	add("write/ok/RLIMIT_FSIZE-not-reached", func(t *T) {
		fd := t.Open("f", unix.O_CREAT|unix.O_WRONLY, 0o644)
		t.Pwrite(fd, "x", 1<<40)
		Equal(t, "size", t.Lstat("f").Size, 1<<40+1)
		t.True(t.Lstat("f").Blocks < 1<<20, "a sparse file of 1 TiB takes %d blocks", t.Lstat("f").Blocks)
	})
	add("write/ok/processes-append-without-loss", func(t *T) { appendFromProcesses(t, 4, 200) })
	add("write/ok/second-process-sees-bytes-at-once", func(t *T) {
		h := t.Helper()
		fd := t.Open("f", unix.O_CREAT|unix.O_WRONLY, 0o644)
		h.Do(t, "open r f rdonly")
		for i := range 20 {
			t.Pwrite(fd, fmt.Sprintf("version %02d", i), 0)
			Equal(t, "what the other process reads", h.Do(t, "pread r 0 10"), fmt.Sprintf("version %02d", i))
		}
	})
	add("write/ok/bytes-of-second-process-are-seen-at-once", func(t *T) {
		h := t.Helper()
		t.File("f", "")
		fd := t.Open("f", unix.O_RDONLY, 0)
		h.Do(t, "open w f rdwr")
		for i := range 20 {
			h.Do(t, fmt.Sprintf("pwrite w 0 version-%02d", i))
			Equal(t, "what this process reads", t.Pread(fd, 10, 0), fmt.Sprintf("version-%02d", i))
		}
	})
	return cs
}

// appendFromProcesses lets processes append lines to one file at the same
// time; each line must be whole and none may be lost.
func appendFromProcesses(t *T, processes, lines int) {
	t.File("log", "")
	var hs []*Helper
	for i := range processes {
		h := t.Helper()
		h.Do(t, "open a log append")
		h.Start(t, fmt.Sprintf("appendlines a %d %d", i, lines))
		hs = append(hs, h)
	}
	for _, h := range hs {
		h.Wait(t)
	}
	seen := map[string]int{}
	for _, line := range strings.Split(strings.TrimSuffix(t.Read("log"), "\n"), "\n") {
		seen[line]++
	}
	for i := range processes {
		for j := range lines {
			Equal(t, fmt.Sprintf("occurrences of the line %d of process %d", j, i), seen[fmt.Sprintf("process %d line %d", i, j)], 1)
		}
	}
	Equal(t, "lines", len(seen), processes*lines)
}
