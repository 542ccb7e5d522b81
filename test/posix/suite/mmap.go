package suite

import (
	"fmt"
	"runtime/debug"
	"strings"
	"unsafe"

	"golang.org/x/sys/unix"
)

// mapFile maps the first n bytes of fd until the case ends.
func mapFile(t *T, fd, n, prot, flags int) []byte {
	m, err := unix.Mmap(fd, 0, n, prot, flags)
	t.OK("mmap", err)
	t.Cleanup(func() { unix.Munmap(m) })
	return m
}

// addr passes memory to a raw system call.
func addr[V any](p *V) uintptr { return uintptr(unsafe.Pointer(p)) }

// faults reports whether f ends in a memory fault (SIGBUS or SIGSEGV).
func faults(f func()) (fault bool) {
	defer debug.SetPanicOnFault(debug.SetPanicOnFault(true))
	defer func() {
		if r := recover(); r != nil {
			if _, ok := r.(failure); ok {
				panic(r)
			}
			fault = true
		}
	}()
	f()
	return false
}

// touch reads one byte; the compiler can't leave it out.
//
//go:noinline
func touch(m []byte, at int) byte { return m[at] }

// mmapCases are mmap(2) and msync(2), shared and private, and how mappings and
// the other operations see each other.
func mmapCases() []Case {
	var cs []Case
	add := func(name string, run func(*T)) { cs = append(cs, Case{"mmap/" + name, run}) }
	const rw = unix.PROT_READ | unix.PROT_WRITE
	open := func(t *T, content string) int {
		t.File("f", content)
		return t.Open("f", unix.O_RDWR, 0)
	}
	add("ok/shared-write-is-seen-by-read-at-once", func(t *T) {
		fd := open(t, strings.Repeat("-", 8192))
		m := mapFile(t, fd, 8192, rw, unix.MAP_SHARED)
		copy(m[4000:], "through the mapping")
		Equal(t, "read", t.Pread(fd, 19, 4000), "through the mapping")
	})
	add("ok/write-is-seen-by-shared-mapping-at-once", func(t *T) {
		fd := open(t, strings.Repeat("-", 8192))
		m := mapFile(t, fd, 8192, unix.PROT_READ, unix.MAP_SHARED)
		Equal(t, "before", m[5000], '-')
		t.Pwrite(fd, "written", 5000)
		Equal(t, "mapped bytes", string(m[5000:5007]), "written")
	})
	add("ok/write-by-other-descriptor-is-seen-by-shared-mapping", func(t *T) {
		fd := open(t, strings.Repeat("-", 8192))
		m := mapFile(t, fd, 8192, unix.PROT_READ, unix.MAP_SHARED)
		Equal(t, "before", m[0], '-')
		t.Pwrite(t.Open("f", unix.O_WRONLY, 0), "new", 0)
		Equal(t, "mapped bytes", string(m[:3]), "new")
	})
	add("ok/two-shared-mappings-see-each-other", func(t *T) {
		fd := open(t, strings.Repeat("-", 8192))
		a, b := mapFile(t, fd, 8192, rw, unix.MAP_SHARED), mapFile(t, t.Open("f", unix.O_RDWR, 0), 8192, rw, unix.MAP_SHARED)
		copy(a[10:], "from a")
		Equal(t, "bytes in b", string(b[10:16]), "from a")
		copy(b[8000:], "from b")
		Equal(t, "bytes in a", string(a[8000:8006]), "from b")
	})
	add("ok/private-write-stays-private", func(t *T) {
		fd := open(t, strings.Repeat("-", 4096))
		m := mapFile(t, fd, 4096, rw, unix.MAP_PRIVATE)
		copy(m, "private")
		Equal(t, "mapped bytes", string(m[:7]), "private")
		Equal(t, "read", t.Pread(fd, 7, 0), "-------")
		t.OK("msync", unix.Msync(m, unix.MS_SYNC))
		Equal(t, "read after msync", t.Pread(fd, 7, 0), "-------")
	})
	add("ok/private-writable-mapping-of-read-only-descriptor", func(t *T) {
		t.File("f", "content")
		m := mapFile(t, t.Open("f", unix.O_RDONLY, 0), 4096, rw, unix.MAP_PRIVATE)
		m[0] = 'C'
		Equal(t, "mapped bytes", string(m[:7]), "Content")
	})
	add("EACCES/shared-writable-mapping-of-read-only-descriptor", func(t *T) {
		t.File("f", "content")
		_, err := unix.Mmap(t.Open("f", unix.O_RDONLY, 0), 0, 4096, rw, unix.MAP_SHARED)
		t.Want("mmap", err, unix.EACCES)
	})
	add("EACCES/mapping-of-write-only-descriptor", func(t *T) {
		t.File("f", "content")
		_, err := unix.Mmap(t.Open("f", unix.O_WRONLY, 0), 0, 4096, unix.PROT_READ, unix.MAP_SHARED)
		t.Want("mmap", err, unix.EACCES)
	})
	add("ENODEV/directory", func(t *T) {
		t.Mkdir("d")
		_, err := unix.Mmap(t.Open("d", unix.O_RDONLY, 0), 0, 4096, unix.PROT_READ, unix.MAP_PRIVATE)
		t.Want("mmap", err, unix.ENODEV)
	})
	add("EINVAL/offset-inside-page", func(t *T) {
		fd := open(t, "content")
		_, err := unix.Mmap(fd, 100, 4096, unix.PROT_READ, unix.MAP_PRIVATE)
		t.Want("mmap", err, unix.EINVAL)
	})
	add("ok/tail-of-last-page-is-zeros", func(t *T) {
		fd := open(t, "content")
		m := mapFile(t, fd, 4096, unix.PROT_READ, unix.MAP_SHARED)
		sameBytes(t, "the rest of the page", m[7:], make([]byte, 4089))
	})
	add("ok/write-to-tail-of-last-page-does-not-reach-the-file", func(t *T) {
		fd := open(t, "content")
		m := mapFile(t, fd, 4096, rw, unix.MAP_SHARED)
		copy(m[7:], "lost")
		t.OK("msync", unix.Msync(m, unix.MS_SYNC))
		Equal(t, "size", t.Fstat(fd).Size, 7)
		t.Content("f", "content")
	})
	add("ok/tail-of-last-page-is-zeros-after-extension", func(t *T) {
		fd := open(t, "content")
		m := mapFile(t, fd, 4096, rw, unix.MAP_SHARED)
		copy(m[7:], "garbage")
		t.OK("ftruncate", unix.Ftruncate(fd, 20))
		t.Content("f", "content"+strings.Repeat("\x00", 13))
	})
	// A second descriptor, open for reading, has its own handle: its READ fills the page that
	// the mapping then stores into.
	add("ok/store-after-extension-and-read-by-other-descriptor", func(t *T) {
		fd := open(t, strings.Repeat("-", 100))
		m := mapFile(t, fd, 4096, rw, unix.MAP_SHARED)
		Equal(t, "before", touch(m, 0), '-')
		t.OK("ftruncate", unix.Ftruncate(fd, 200))
		Equal(t, "read by the other descriptor", t.Pread(t.Open("f", unix.O_RDONLY, 0), 1, 150), "\x00")
		m[150] = 'x'
		t.OK("msync", unix.Msync(m, unix.MS_SYNC))
		Equal(t, "read", t.Pread(fd, 3, 149), "\x00x\x00")
	})
	for name, extend := range map[string]func(t *T, fd int){
		"ftruncate": func(t *T, fd int) { t.OK("ftruncate", unix.Ftruncate(fd, 9000)) },
		"pwrite":    func(t *T, fd int) { t.Pwrite(fd, "end", 8997) },
		"fallocate": func(t *T, fd int) { t.OK("fallocate", unix.Fallocate(fd, 0, 8192, 808)) },
	} {
		add("ok/tail-of-page-read-by-other-descriptor-is-zeros-after-extension-by-"+name, func(t *T) {
			fd := open(t, "content")
			m := mapFile(t, fd, 4096, rw, unix.MAP_SHARED)
			Equal(t, "read by the other descriptor", t.Pread(t.Open("f", unix.O_RDONLY, 0), 7, 0), "content")
			copy(m[7:], "garbage")
			extend(t, fd)
			Equal(t, "size", t.Fstat(fd).Size, 9000)
			t.OK("msync", unix.Msync(m, unix.MS_SYNC))
			Equal(t, "read", t.Pread(fd, 20, 0), "content"+strings.Repeat("\x00", 13))
		})
	}
	add("SIGBUS/access-beyond-the-last-page", func(t *T) {
		fd := open(t, "content")
		m := mapFile(t, fd, 8192, unix.PROT_READ, unix.MAP_SHARED)
		t.True(faults(func() { touch(m, 5000) }), "reading a page beyond the end of the file worked")
	})
	add("SIGBUS/access-after-truncation", func(t *T) {
		fd := open(t, strings.Repeat("x", 16384))
		m := mapFile(t, fd, 16384, unix.PROT_READ, unix.MAP_SHARED)
		Equal(t, "before", m[12000], 'x')
		t.OK("ftruncate", unix.Ftruncate(fd, 4096))
		t.True(faults(func() { touch(m, 12000) }), "reading a page that was cut off worked")
		Equal(t, "what is left", m[4095], 'x')
	})
	add("SIGSEGV/write-to-read-only-mapping", func(t *T) {
		fd := open(t, "content")
		m := mapFile(t, fd, 4096, unix.PROT_READ, unix.MAP_SHARED)
		t.True(faults(func() { m[0] = 'x' }), "writing to a read-only mapping worked")
		t.Content("f", "content")
	})
	add("ok/access-works-again-after-extension", func(t *T) {
		fd := open(t, strings.Repeat("x", 8192))
		m := mapFile(t, fd, 16384, rw, unix.MAP_SHARED)
		t.OK("ftruncate", unix.Ftruncate(fd, 0))
		t.OK("ftruncate", unix.Ftruncate(fd, 16384))
		Equal(t, "a byte", m[100], 0)
		m[12000] = 'y'
		Equal(t, "read", t.Pread(fd, 1, 12000), "y")
	})
	add("ok/mapping-outlives-its-descriptor", func(t *T) {
		t.File("f", "content")
		fd, err := unix.Open("f", unix.O_RDWR|unix.O_CLOEXEC, 0)
		t.OK("open", err)
		m := mapFile(t, fd, 4096, rw, unix.MAP_SHARED)
		t.OK("close", unix.Close(fd))
		copy(m, "CONTENT")
		t.OK("msync", unix.Msync(m, unix.MS_SYNC))
		t.Content("f", "CONTENT")
	})
	add("ok/written-without-msync-is-there-after-munmap-and-close", func(t *T) {
		t.File("f", strings.Repeat("-", 100000))
		fd, err := unix.Open("f", unix.O_RDWR|unix.O_CLOEXEC, 0)
		t.OK("open", err)
		m, err := unix.Mmap(fd, 0, 100000, rw, unix.MAP_SHARED)
		t.OK("mmap", err)
		fill(m, 9)
		want := string(m)
		t.OK("munmap", unix.Munmap(m))
		t.OK("close", unix.Close(fd))
		t.Content("f", want)
	})
	for name, flag := range map[string]int{"MS_SYNC": unix.MS_SYNC, "MS_ASYNC": unix.MS_ASYNC, "MS_INVALIDATE": unix.MS_INVALIDATE, "MS_SYNC-MS_INVALIDATE": unix.MS_SYNC | unix.MS_INVALIDATE} {
		add("ok/msync-"+name, func(t *T) {
			fd := open(t, strings.Repeat("-", 8192))
			m := mapFile(t, fd, 8192, rw, unix.MAP_SHARED)
			copy(m[4090:], "across the pages")
			t.OK("msync", unix.Msync(m, flag))
			Equal(t, "read", t.Pread(fd, 16, 4090), "across the pages")
		})
	}
	add("EINVAL/msync-SYNC-with-ASYNC", func(t *T) {
		m := mapFile(t, open(t, "content"), 4096, rw, unix.MAP_SHARED)
		t.Want("msync", unix.Msync(m, unix.MS_SYNC|unix.MS_ASYNC), unix.EINVAL)
	})
	add("ok/sparse-file", func(t *T) {
		fd := t.Open("f", unix.O_CREAT|unix.O_RDWR, 0o644)
		t.OK("ftruncate", unix.Ftruncate(fd, 1<<20))
		m := mapFile(t, fd, 1<<20, rw, unix.MAP_SHARED)
		Equal(t, "a byte of the hole", m[500000], 0)
		m[500000] = 'x'
		t.OK("msync", unix.Msync(m, unix.MS_SYNC))
		Equal(t, "read", t.Pread(fd, 3, 499999), "\x00x\x00")
	})
	for _, size := range []int{4096, 65536, 1 << 20, 4 << 20} {
		add(fmt.Sprintf("ok/whole-file-of-%d-written-through-mapping", size), func(t *T) {
			fd := t.Open("f", unix.O_CREAT|unix.O_RDWR, 0o644)
			t.OK("ftruncate", unix.Ftruncate(fd, int64(size)))
			m := mapFile(t, fd, size, rw, unix.MAP_SHARED)
			fill(m, 5)
			t.OK("msync", unix.Msync(m, unix.MS_SYNC))
			want := make([]byte, size)
			fill(want, 5)
			sameBytes(t, "content", []byte(t.Read("f")), want)
		})
		add(fmt.Sprintf("ok/file-of-%d-read-through-mapping", size), func(t *T) {
			want := make([]byte, size)
			fill(want, 6)
			t.File("f", string(want))
			for name, flags := range map[string]int{"shared": unix.MAP_SHARED, "private": unix.MAP_PRIVATE, "populated": unix.MAP_PRIVATE | unix.MAP_POPULATE} {
				sameBytes(t, name+" mapping", mapFile(t, t.Open("f", unix.O_RDONLY, 0), size, unix.PROT_READ, flags), want)
			}
		})
	}
	add("ok/mapping-at-offset", func(t *T) {
		want := make([]byte, 100000)
		fill(want, 7)
		fd := open(t, string(want))
		m, err := unix.Mmap(fd, 40960, 20000, unix.PROT_READ, unix.MAP_SHARED)
		t.OK("mmap", err)
		defer unix.Munmap(m)
		sameBytes(t, "mapped bytes", m, want[40960:60960])
	})
	add("ok/other-process-sees-shared-writes", func(t *T) {
		fd := open(t, strings.Repeat("-", 4096))
		m := mapFile(t, fd, 4096, rw, unix.MAP_SHARED)
		h := t.Helper()
		h.Do(t, "open f f rdwr")
		h.Do(t, "map f 4096")
		copy(m, "to-the-other")
		Equal(t, "mapped there", h.Do(t, "peek f 0 12"), "to-the-other")
		h.Do(t, "poke f 100 and-back")
		Equal(t, "mapped here", string(m[100:108]), "and-back")
		Equal(t, "read here", t.Pread(fd, 8, 100), "and-back")
	})
	add("ok/O_TRUNC-while-mapped", func(t *T) {
		fd := open(t, strings.Repeat("x", 8192))
		m := mapFile(t, fd, 8192, unix.PROT_READ, unix.MAP_SHARED)
		Equal(t, "before", m[0], 'x')
		t.OK("open(O_TRUNC)", tryOpen("f", unix.O_WRONLY|unix.O_TRUNC))
		Equal(t, "size", t.Fstat(fd).Size, 0)
		t.True(faults(func() { touch(m, 0) }), "reading a page that was cut off worked")
	})
	add("ok/punched-hole-reads-as-zeros-through-mapping", func(t *T) {
		fd := open(t, strings.Repeat("x", 16384))
		m := mapFile(t, fd, 16384, unix.PROT_READ, unix.MAP_SHARED)
		Equal(t, "before", m[5000], 'x')
		t.OK("fallocate", unix.Fallocate(fd, unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, 4096, 8192))
		sameBytes(t, "the hole", m[4096:12288], make([]byte, 8192))
		Equal(t, "after the hole", m[12288], 'x')
	})
	add("ok/read-into-own-mapping", func(t *T) {
		fd := open(t, strings.Repeat("abcd", 4096))
		m := mapFile(t, fd, 16384, rw, unix.MAP_SHARED)
		n, err := unix.Pread(fd, m[:4096], 8193)
		t.OK("pread into the mapping of the same file", err)
		Equal(t, "bytes", n, 4096)
		Equal(t, "first byte", m[0], 'b')
	})
	add("ok/write-from-own-mapping", func(t *T) {
		fd := open(t, strings.Repeat("abcd", 4096))
		m := mapFile(t, fd, 16384, unix.PROT_READ, unix.MAP_SHARED)
		n, err := unix.Pwrite(fd, m[1:4097], 8192)
		t.OK("pwrite from the mapping of the same file", err)
		Equal(t, "bytes", n, 4096)
		Equal(t, "first byte", t.Pread(fd, 4, 8192), "bcda")
	})
	add("ok/madvise-DONTNEED-reads-again", func(t *T) {
		fd := open(t, strings.Repeat("x", 8192))
		m := mapFile(t, fd, 8192, rw, unix.MAP_SHARED)
		copy(m, "kept")
		t.OK("madvise", unix.Madvise(m, unix.MADV_DONTNEED))
		Equal(t, "mapped bytes", string(m[:4]), "kept")
	})
	add("ok/mapping-of-executable-file", func(t *T) {
		t.File("f", strings.Repeat("\xc3", 4096))
		m := mapFile(t, t.Open("f", unix.O_RDONLY, 0), 4096, unix.PROT_READ|unix.PROT_EXEC, unix.MAP_PRIVATE)
		Equal(t, "first byte", m[0], 0xc3)
	})
	return cs
}
