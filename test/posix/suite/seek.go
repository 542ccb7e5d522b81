package suite

import (
	"fmt"
	"math"
	"strings"

	"golang.org/x/sys/unix"
)

const (
	seekData = 3
	seekHole = 4
)

// seekCases are lseek(2) with all five whences.
func seekCases() []Case {
	var cs []Case
	add := func(name string, run func(*T)) { cs = append(cs, Case{"lseek/" + name, run}) }
	for _, c := range []struct {
		name   string
		off    int64
		whence int
		want   int64
		err    error
	}{
		{"SET-0", 0, 0, 0, nil}, {"SET-inside", 3, 0, 3, nil}, {"SET-at-end", 7, 0, 7, nil}, {"SET-beyond-end", 1 << 40, 0, 1 << 40, nil}, {"SET-negative", -1, 0, 0, unix.EINVAL},
		{"CUR-forward", 2, 1, 6, nil}, {"CUR-back", -4, 1, 0, nil}, {"CUR-before-start", -5, 1, 0, unix.EINVAL}, {"CUR-overflow", math.MaxInt64, 1, 0, unix.EOVERFLOW},
		{"END-0", 0, 2, 7, nil}, {"END-back", -7, 2, 0, nil}, {"END-beyond", 10, 2, 17, nil}, {"END-before-start", -8, 2, 0, unix.EINVAL}, {"unknown-whence", 0, 9, 0, unix.EINVAL},
	} {
		add(trailName(c.err)+"/"+c.name, func(t *T) {
			t.File("f", "content")
			fd := t.Open("f", unix.O_RDWR, 0)
			unix.Seek(fd, 4, unix.SEEK_SET)
			got, err := unix.Seek(fd, c.off, c.whence)
			if c.err == unix.EOVERFLOW {
				t.WantOneOf("lseek", err, unix.EOVERFLOW, unix.EINVAL)
			} else {
				t.Want("lseek", err, c.err)
			}
			if c.err == nil {
				Equal(t, "offset", got, c.want)
				return
			}
			got, _ = unix.Seek(fd, 0, unix.SEEK_CUR)
			Equal(t, "offset after the failure", got, 4)
		})
	}
	add("ESPIPE/pipe", func(t *T) {
		r, _ := pipe(t)
		_, err := unix.Seek(r, 0, 0)
		t.Want("lseek", err, unix.ESPIPE)
	})
	add("ESPIPE/fifo", func(t *T) {
		t.Make(fifo, "p", 0o644)
		_, err := unix.Seek(t.Open("p", unix.O_RDWR, 0), 0, 0)
		t.Want("lseek", err, unix.ESPIPE)
	})
	add("ok/END-follows-writes-of-other-descriptor", func(t *T) {
		t.File("f", "content")
		fd := t.Open("f", unix.O_RDONLY, 0)
		t.Pwrite(t.Open("f", unix.O_WRONLY, 0), "x", 99)
		got, err := unix.Seek(fd, 0, unix.SEEK_END)
		t.OK("lseek", err)
		Equal(t, "offset", got, 100)
	})
	add("ok/seek-alone-does-not-extend", func(t *T) {
		t.File("f", "content")
		fd := t.Open("f", unix.O_RDWR, 0)
		unix.Seek(fd, 1000, unix.SEEK_SET)
		Equal(t, "size", t.Fstat(fd).Size, 7)
	})

	// Layouts in blocks of 64 KiB: D data, - hole. Data must never be skipped;
	// where a file system tracks holes in units of up to 64 KiB the answers
	// are exact.
	const unit = 65536
	layouts := []string{"D", "-", "D-", "-D", "D-D", "-D-", "D--D-D", "--DD--"}
	for _, layout := range layouts {
		for _, synced := range []bool{false, true} {
			word := map[bool]string{false: "unsynced", true: "synced"}[synced]
			build := func(t *T) int {
				fd := t.Open("f", unix.O_CREAT|unix.O_RDWR, 0o644)
				for i, c := range layout {
					if c == 'D' {
						t.Pwrite(fd, strings.Repeat("d", unit), int64(i*unit))
					}
				}
				t.OK("ftruncate", unix.Ftruncate(fd, int64(len(layout)*unit)))
				if synced {
					t.OK("fsync", unix.Fsync(fd))
				}
				return fd
			}
			// next finds the first unit of the kind at or after unit i; the
			// end of the file counts as a hole.
			next := func(i int, kind byte) int64 {
				for ; i < len(layout); i++ {
					if layout[i] == kind {
						return int64(i * unit)
					}
				}
				if kind == '-' {
					return int64(len(layout) * unit)
				}
				return -1
			}
			for i := range layout {
				for _, inside := range []int64{0, 1000} {
					off := int64(i*unit) + inside
					for name, w := range map[string]struct {
						whence int
						kind   byte
					}{"DATA": {seekData, 'D'}, "HOLE": {seekHole, '-'}} {
						want := next(i, w.kind)
						if want >= 0 && want < off {
							want = off
						}
						result := fmt.Sprint(want)
						if want < 0 {
							result = "ENXIO"
						}
						add(fmt.Sprintf("%s/%s-%s-from-%d-is-%s", layout, word, name, off, result), func(t *T) {
							fd := build(t)
							got, err := unix.Seek(fd, off, w.whence)
							if want < 0 {
								t.Want("lseek", err, unix.ENXIO)
								return
							}
							t.OK("lseek", err)
							Equal(t, "offset", got, want)
						})
					}
				}
			}
		}
	}
	for name, whence := range map[string]int{"DATA": seekData, "HOLE": seekHole} {
		add("ENXIO/"+name+"-at-the-end", func(t *T) {
			t.File("f", "content")
			_, err := unix.Seek(t.Open("f", unix.O_RDONLY, 0), 7, whence)
			t.Want("lseek", err, unix.ENXIO)
		})
		add("ENXIO/"+name+"-beyond-the-end", func(t *T) {
			t.File("f", "content")
			_, err := unix.Seek(t.Open("f", unix.O_RDONLY, 0), 700, whence)
			t.Want("lseek", err, unix.ENXIO)
		})
		add("ENXIO/"+name+"-of-empty-file", func(t *T) {
			t.File("f", "")
			_, err := unix.Seek(t.Open("f", unix.O_RDONLY, 0), 0, whence)
			t.Want("lseek", err, unix.ENXIO)
		})
		add("ENXIO/"+name+"-negative", func(t *T) {
			t.File("f", "content")
			_, err := unix.Seek(t.Open("f", unix.O_RDONLY, 0), -1, whence)
			t.Want("lseek", err, unix.ENXIO)
		})
	}
	add("ok/HOLE-of-small-file-is-its-end", func(t *T) {
		t.File("f", "content")
		got, err := unix.Seek(t.Open("f", unix.O_RDONLY, 0), 2, seekHole)
		t.OK("lseek", err)
		Equal(t, "offset", got, 7)
	})
	add("ok/punched-hole-is-found", func(t *T) {
		t.File("f", strings.Repeat("d", 4*unit))
		fd := t.Open("f", unix.O_RDWR, 0)
		t.OK("fallocate", unix.Fallocate(fd, unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, unit, unit))
		got, err := unix.Seek(fd, 0, seekHole)
		t.OK("lseek", err)
		Equal(t, "hole", got, unit)
		got, err = unix.Seek(fd, unit, seekData)
		t.OK("lseek", err)
		Equal(t, "data", got, 2*unit)
	})
	add("ok/data-written-through-mapping-is-found", func(t *T) {
		fd := t.Open("f", unix.O_CREAT|unix.O_RDWR, 0o644)
		t.OK("ftruncate", unix.Ftruncate(fd, 4*unit))
		m := mapFile(t, fd, 4*unit, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
		for i := range unit {
			m[2*unit+i] = 'd'
		}
		t.OK("msync", unix.Msync(m, unix.MS_SYNC))
		got, err := unix.Seek(fd, 0, seekData)
		t.OK("lseek", err)
		Equal(t, "data", got, 2*unit)
	})
	return cs
}

// copyRangeCases are copy_file_range(2).
func copyRangeCases() []Case {
	var cs []Case
	add := func(name string, run func(*T)) { cs = append(cs, Case{"copy_file_range/" + name, run}) }
	for _, c := range []struct {
		name            string
		srcOff, dstOff  int64
		length          int
		srcSize, dstLen int
	}{
		{"all-to-empty", 0, 0, 50000, 50000, 0}, {"part-to-empty", 5000, 0, 7000, 50000, 0}, {"aligned-blocks", 4096, 8192, 16384, 65536, 65536}, {"unaligned", 1234, 4321, 9876, 50000, 50000},
		{"over-the-end-of-target", 0, 30000, 20000, 50000, 40000}, {"behind-the-end-of-target", 0, 60000, 1000, 50000, 100}, {"short-at-the-end-of-source", 49000, 0, 10000, 50000, 0},
		{"one-byte", 25000, 3, 1, 50000, 10}, {"from-the-end-of-source", 50000, 0, 100, 50000, 10}, {"small-file", 0, 0, 100, 10, 0}, {"one-megabyte", 0, 0, 1 << 20, 1 << 20, 0},
	} {
		for _, how := range []string{"offsets", "file-offsets"} {
			add("ok/"+c.name+"-by-"+how, func(t *T) {
				src, dst := make([]byte, c.srcSize), make([]byte, c.dstLen)
				fill(src, 1)
				fill(dst, 2)
				t.File("s", string(src))
				t.File("d", string(dst))
				s, d := t.Open("s", unix.O_RDONLY, 0), t.Open("d", unix.O_RDWR, 0)
				so, do := c.srcOff, c.dstOff
				sp, dp := &so, &do
				if how == "file-offsets" {
					unix.Seek(s, so, unix.SEEK_SET)
					unix.Seek(d, do, unix.SEEK_SET)
					sp, dp = nil, nil
				}
				want := max(0, min(c.length, c.srcSize-int(c.srcOff)))
				for left := c.length; left > 0; {
					n, err := unix.CopyFileRange(s, sp, d, dp, left, 0)
					t.OK("copy_file_range", err)
					if n == 0 {
						break
					}
					left -= n
				}
				if want > 0 {
					dst = append(dst, make([]byte, max(0, int(c.dstOff)+want-len(dst)))...)
					copy(dst[c.dstOff:], src[c.srcOff:int(c.srcOff)+want])
				}
				t.Content("d", string(dst))
				t.Content("s", string(src))
				a, _ := unix.Seek(s, 0, unix.SEEK_CUR)
				b, _ := unix.Seek(d, 0, unix.SEEK_CUR)
				if how == "offsets" {
					Equal(t, "file offset of the source", a, 0)
					Equal(t, "file offset of the target", b, 0)
					Equal(t, "source offset argument", so, c.srcOff+int64(want))
				} else {
					Equal(t, "file offset of the source", a, c.srcOff+int64(want))
					Equal(t, "file offset of the target", b, c.dstOff+int64(want))
				}
			})
		}
	}
	add("ok/within-one-file", func(t *T) {
		t.File("f", strings.Repeat("a", 10000)+strings.Repeat("b", 10000))
		fd := t.Open("f", unix.O_RDWR, 0)
		so, do := int64(0), int64(10000)
		n, err := unix.CopyFileRange(fd, &so, fd, &do, 10000, 0)
		t.OK("copy_file_range", err)
		Equal(t, "bytes", n, 10000)
		t.Content("f", strings.Repeat("a", 20000))
	})
	add("EINVAL/overlapping-within-one-file", func(t *T) {
		t.File("f", strings.Repeat("a", 20000))
		fd := t.Open("f", unix.O_RDWR, 0)
		so, do := int64(0), int64(5000)
		_, err := unix.CopyFileRange(fd, &so, fd, &do, 10000, 0)
		t.Want("copy_file_range", err, unix.EINVAL)
	})
	add("ok/copy-is-independent-of-source-afterwards", func(t *T) {
		t.File("s", strings.Repeat("s", 65536))
		s, d := t.Open("s", unix.O_RDWR, 0), t.Open("d", unix.O_CREAT|unix.O_RDWR, 0o644)
		_, err := unix.CopyFileRange(s, nil, d, nil, 65536, 0)
		t.OK("copy_file_range", err)
		t.Pwrite(s, "changed", 100)
		Equal(t, "the copy", t.Pread(d, 7, 100), "sssssss")
		t.Pwrite(d, "other", 200)
		Equal(t, "the source", t.Pread(s, 5, 200), "sssss")
		t.OK("unlink", unix.Unlink("s"))
		Equal(t, "the copy after unlink of the source", t.Pread(d, 4, 65532), "ssss")
	})
	add("ok/copy-is-independent-after-truncation-of-source", func(t *T) {
		t.File("s", strings.Repeat("s", 65536))
		s, d := t.Open("s", unix.O_RDWR, 0), t.Open("d", unix.O_CREAT|unix.O_RDWR, 0o644)
		_, err := unix.CopyFileRange(s, nil, d, nil, 65536, 0)
		t.OK("copy_file_range", err)
		t.OK("ftruncate", unix.Ftruncate(s, 0))
		t.Content("d", strings.Repeat("s", 65536))
	})
	add("ok/unsynced-source", func(t *T) {
		s, d := t.Open("s", unix.O_CREAT|unix.O_RDWR, 0o644), t.Open("d", unix.O_CREAT|unix.O_RDWR, 0o644)
		for i := range 20 {
			t.Pwrite(s, fmt.Sprintf("version %02d", i), 0)
			so, do := int64(0), int64(0)
			_, err := unix.CopyFileRange(s, &so, d, &do, 10, 0)
			t.OK("copy_file_range", err)
			Equal(t, "copy", t.Pread(d, 10, 0), fmt.Sprintf("version %02d", i))
		}
	})
	add("ok/hole-copies-as-zeros", func(t *T) {
		s, d := t.Open("s", unix.O_CREAT|unix.O_RDWR, 0o644), t.Open("d", unix.O_CREAT|unix.O_RDWR, 0o644)
		t.OK("ftruncate", unix.Ftruncate(s, 100000))
		t.Pwrite(d, strings.Repeat("x", 100000), 0)
		for left := 100000; left > 0; {
			n, err := unix.CopyFileRange(s, nil, d, nil, left, 0)
			t.OK("copy_file_range", err)
			t.True(n > 0, "copied nothing with %d bytes left", left)
			left -= n
		}
		t.Content("d", strings.Repeat("\x00", 100000))
	})
	for name, c := range map[string]struct {
		src, dst   int
		flags      int
		want       error
		dir        bool
		srcT, dstT Type
	}{
		"EBADF/target-read-only":  {unix.O_RDONLY, unix.O_RDONLY, 0, unix.EBADF, false, regular, regular},
		"EBADF/source-write-only": {unix.O_WRONLY, unix.O_WRONLY, 0, unix.EBADF, false, regular, regular},
		"EBADF/target-O_APPEND":   {unix.O_RDONLY, unix.O_WRONLY | unix.O_APPEND, 0, unix.EBADF, false, regular, regular},
		"EINVAL/flags":            {unix.O_RDONLY, unix.O_WRONLY, 1, unix.EINVAL, false, regular, regular},
		"EISDIR/source-directory": {unix.O_RDONLY, unix.O_WRONLY, 0, unix.EISDIR, true, dir, regular},
		"EINVAL/source-fifo":      {unix.O_RDWR, unix.O_WRONLY, 0, unix.EINVAL, false, fifo, regular},
		"EINVAL/target-fifo":      {unix.O_RDONLY, unix.O_RDWR, 0, unix.EINVAL, false, regular, fifo},
	} {
		add(name, func(t *T) {
			t.Make(c.srcT, "s", 0o755)
			t.Make(c.dstT, "d", 0o755)
			_, err := unix.CopyFileRange(t.Open("s", c.src, 0), nil, t.Open("d", c.dst, 0), nil, 10, c.flags)
			t.Want("copy_file_range", err, c.want)
		})
	}
	return cs
}

// syncCases are cases of the calls that make data durable. Other tests try their promises
// after a crash; these cases test on which objects the calls work, and that readers see
// no change.
func syncCases() []Case {
	var cs []Case
	calls := map[string]func(fd int) error{
		"fsync": unix.Fsync, "fdatasync": unix.Fdatasync, "syncfs": unix.Syncfs,
		"sync_file_range": func(fd int) error { return unix.SyncFileRange(fd, 0, 0, 7) },
	}
	for name, sync := range calls {
		add := func(situation string, run func(*T)) { cs = append(cs, Case{name + "/" + situation, run}) }
		for how, flags := range map[string]int{"O_RDONLY": unix.O_RDONLY, "O_WRONLY": unix.O_WRONLY, "O_RDWR": unix.O_RDWR, "O_SYNC": unix.O_RDWR | unix.O_SYNC, "O_DIRECT": unix.O_RDWR | unix.O_DIRECT} {
			add("ok/descriptor-"+how, func(t *T) {
				t.File("f", "content")
				t.OK(name, sync(t.Open("f", flags, 0)))
			})
		}
		add("ok/after-write", func(t *T) {
			fd := t.Open("f", unix.O_CREAT|unix.O_RDWR, 0o644)
			t.Write(fd, strings.Repeat("data", 10000))
			t.OK(name, sync(fd))
			t.Content("f", strings.Repeat("data", 10000))
		})
		add("ok/twenty-times-with-appends-between", func(t *T) {
			fd := t.Open("f", unix.O_CREAT|unix.O_RDWR, 0o644)
			for range 20 {
				t.Write(fd, "0123456789")
				t.OK(name, sync(fd))
			}
			t.Content("f", strings.Repeat("0123456789", 20))
		})
		add("ok/after-truncation", func(t *T) {
			fd := t.Open("f", unix.O_CREAT|unix.O_RDWR, 0o644)
			t.Write(fd, "long content")
			t.OK(name, sync(fd))
			t.OK("ftruncate", unix.Ftruncate(fd, 4))
			t.OK(name, sync(fd))
			t.Content("f", "long")
		})
		add("ok/unlinked-file", func(t *T) {
			fd := t.Open("f", unix.O_CREAT|unix.O_RDWR, 0o644)
			t.Write(fd, "data")
			t.OK("unlink", unix.Unlink("f"))
			t.OK(name, sync(fd))
			Equal(t, "content", t.Pread(fd, 10, 0), "data")
		})
		add("ok/empty-file", func(t *T) { t.OK(name, sync(t.Open("f", unix.O_CREAT|unix.O_RDWR, 0o644))) })
		add("ok/by-user-on-read-only-descriptor-of-foreign-file", func(t *T) {
			t.File("f", "x")
			t.As(alice, func() { t.OK(name, sync(t.Open("f", unix.O_RDONLY, 0))) })
		})
		if name != "sync_file_range" {
			add("ok/directory", func(t *T) {
				t.Mkdir("d")
				t.File("d/f", "x")
				t.OK(name, sync(t.Open("d", unix.O_RDONLY|unix.O_DIRECTORY, 0)))
			})
			add("ok/removed-directory", func(t *T) {
				t.Mkdir("d")
				fd := t.Open("d", unix.O_RDONLY|unix.O_DIRECTORY, 0)
				t.OK("rmdir", unix.Rmdir("d"))
				t.OK(name, sync(fd))
			})
			add("ok/directory-after-rename", func(t *T) {
				t.File("f", "x")
				t.OK("rename", unix.Rename("f", "g"))
				t.OK(name, sync(t.Open(".", unix.O_RDONLY|unix.O_DIRECTORY, 0)))
			})
		}
		if name == "fsync" || name == "fdatasync" {
			add("EINVAL/pipe", func(t *T) {
				_, w := pipe(t)
				t.Want(name, sync(w), unix.EINVAL)
			})
			add("EINVAL/fifo", func(t *T) {
				t.Make(fifo, "p", 0o644)
				t.Want(name, sync(t.Open("p", unix.O_RDWR, 0)), unix.EINVAL)
			})
		}
	}
	cs = append(cs,
		Case{"sync_file_range/EINVAL/unknown-flag", func(t *T) {
			t.File("f", "x")
			t.Want("sync_file_range", unix.SyncFileRange(t.Open("f", unix.O_RDWR, 0), 0, 1, 1<<10), unix.EINVAL)
		}},
		Case{"sync_file_range/EINVAL/negative-offset", func(t *T) {
			t.File("f", "x")
			t.Want("sync_file_range", unix.SyncFileRange(t.Open("f", unix.O_RDWR, 0), -1, 1, 7), unix.EINVAL)
		}},
		Case{"sync_file_range/ESPIPE/pipe", func(t *T) {
			_, w := pipe(t)
			t.Want("sync_file_range", unix.SyncFileRange(w, 0, 1, 7), unix.ESPIPE)
		}},
		Case{"posix_fadvise/ok/all-advices", func(t *T) {
			t.File("f", strings.Repeat("x", 10000))
			fd := t.Open("f", unix.O_RDWR, 0)
			for advice := range 6 {
				t.OK(fmt.Sprint("posix_fadvise ", advice), unix.Fadvise(fd, 0, 0, advice))
			}
			t.Content("f", strings.Repeat("x", 10000))
		}},
		Case{"readahead/ok", func(t *T) {
			t.File("f", strings.Repeat("x", 100000))
			t.OK("readahead", call(unix.SYS_READAHEAD, uintptr(t.Open("f", unix.O_RDONLY, 0)), 0, 100000))
		}},
	)
	return cs
}
