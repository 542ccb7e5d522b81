package suite

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"sync"

	"golang.org/x/sys/unix"
)

// Cases of a store through a shared mapping, followed by an operation: the operation
// finds the stored bytes, and its own changes stay. Only the kernel knows of the store,
// and it writes the page back at any time.

const (
	mapPage   = 4096
	mapSize   = 8 * mapPage
	mapInData = mapPage + 100   // place of a store: in a page with bytes
	mapInHole = 3*mapPage + 100 // place of a store: in a hole
)

// mappedFile is a file with a hole, mapped and stored into, and its expected contents.
type mappedFile struct {
	t    *T
	fd   int // of the mapping, by the first mount
	m    []byte
	want []byte
	by   *Helper // stores, if another process does
}

// PrepareMapped makes files for MappedCases in the same directory: each case takes one of
// them over instead of making a file. In a clone of the volume, these files then have the
// extents of the origin.
func PrepareMapped(dir string) error {
	if err := os.Mkdir(filepath.Join(dir, "ready"), 0o755); err != nil {
		return err
	}
	for i := range len(MappedCases()) {
		f, err := os.Create(filepath.Join(dir, "ready", strconv.Itoa(i)))
		if err != nil {
			return err
		}
		b := mappedBytes()
		_, e1 := f.WriteAt(b[:2*mapPage], 0)
		_, e2 := f.WriteAt(b[6*mapPage:], 6*mapPage)
		// A snapshot has the files of a slow client only as of their last sync.
		if err := errors.Join(e1, e2, f.Sync(), f.Close()); err != nil {
			return err
		}
	}
	return nil
}

// taken counts, by directory, the files taken over.
var taken struct {
	mu   sync.Mutex
	next map[string]int
}

// takeOver renames a prepared file to name, if any is left.
func takeOver(t *T, name string) (ok bool) {
	if unix.Access("../ready", unix.F_OK) != nil {
		return false
	}
	taken.mu.Lock()
	dir := filepath.Dir(t.Dir)
	i := taken.next[dir]
	if taken.next == nil {
		taken.next = map[string]int{}
	}
	taken.next[dir]++
	taken.mu.Unlock()
	t.OK("taking over a file of the origin", unix.Rename(fmt.Sprintf("../ready/%d", i), name))
	return true
}

// mappedBytes is the file's content at first.
func mappedBytes() []byte {
	b := make([]byte, mapSize)
	for i := range b {
		if i < 2*mapPage || i >= 6*mapPage {
			b[i] = byte('a' + i%23)
		}
	}
	return b
}

// newMapped makes a file; shared: the file shares the extents of another file.
func newMapped(t *T, shared bool) *mappedFile {
	f := &mappedFile{t: t, want: mappedBytes()}
	name := "f"
	if shared {
		name = "origin"
	}
	took := takeOver(t, name)
	if !took {
		t.File(name, string(f.want[:2*mapPage]))
	}
	fd := t.Open(name, unix.O_RDWR, 0)
	if !took {
		t.OK("ftruncate", unix.Ftruncate(fd, mapSize))
		t.Pwrite(fd, string(f.want[6*mapPage:]), 6*mapPage)
	}
	t.OK("fsync", unix.Fsync(fd))
	if shared {
		t.File("f", "")
		to := t.Open("f", unix.O_RDWR, 0)
		t.OK("ftruncate", unix.Ftruncate(to, mapSize))
		for _, part := range [][2]int64{{0, 2 * mapPage}, {6 * mapPage, mapSize}} {
			so, do := part[0], part[0]
			n, err := unix.CopyFileRange(fd, &so, to, &do, int(part[1]-part[0]), 0)
			t.OK("copy_file_range", err)
			Equal(t, "copied", int64(n), part[1]-part[0])
		}
		fd = to
	}
	f.fd = fd
	m, err := unix.Mmap(fd, 0, mapSize, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	t.OK("mmap", err)
	f.m = m
	t.Cleanup(func() {
		if f.m != nil {
			unix.Munmap(f.m)
		}
	})
	return f
}

// store stores into both pages.
func (f *mappedFile) store() {
	for _, at := range []int{mapInData, mapInHole} {
		if f.by != nil {
			f.by.Do(f.t, fmt.Sprintf("poke m %d stored-by-mapping", at))
		} else {
			copy(f.m[at:], "stored-by-mapping")
		}
		copy(f.want[at:], "stored-by-mapping")
	}
}

// holds fails the case unless got equals the file's contents.
func (f *mappedFile) holds(what string, got []byte) {
	f.t.True(len(got) == len(f.want), "DATA: %s: %d bytes, expected %d", what, len(got), len(f.want))
	if !bytes.Equal(got, f.want) {
		at := 0
		for got[at] == f.want[at] {
			at++
		}
		f.t.Fatalf("DATA: %s: byte %d is %q, expected %q", what, at, got[at:min(at+20, len(got))], f.want[at:min(at+20, len(got))])
	}
}

// check reads the file in every way, and again after all mappings are gone.
func (f *mappedFile) check() {
	t := f.t
	read := func(fd int) []byte { return []byte(t.Pread(fd, mapSize+mapPage, 0)) }
	f.holds("read by the descriptor", read(f.fd))
	f.holds("read by another one", []byte(t.Read("f")))
	if n := min(len(f.want), mapSize); !bytes.Equal(f.m[:n], f.want[:n]) {
		t.Fatalf("DATA: the mapping shows something else than the file")
	}
	t.OK("msync", unix.Msync(f.m, unix.MS_SYNC))
	f.holds("read by the other mount", []byte(t.Read(t.there("f"))))
	t.OK("munmap", unix.Munmap(f.m))
	f.m = nil
	t.OK("fsync", unix.Fsync(f.fd))
	f.holds("read by the other mount at the end", []byte(t.Read(t.there("f"))))
	f.holds("read by the descriptor at the end", read(f.fd))
}

// MappedCases are the table: an operation, by the same mount or the other mount, on a
// file that another program has mapped and stored into.
func MappedCases() []Case {
	type op struct {
		name string
		// reads: the operation returns stored bytes; on another mount, synced bytes.
		reads bool
		do    func(t *T, f *mappedFile, path func(string) string)
	}
	change := func(f *mappedFile, off int, b string) {
		f.want = append(f.want[:off], append([]byte(b), f.want[min(len(f.want), off+len(b)):]...)...)
	}
	zero := func(f *mappedFile, off, n int) { clear(f.want[off : off+n]) }
	fill := func(n int) string { return string(bytes.Repeat([]byte("N"), n)) }
	output := func(t *T) int { return t.Open("out", unix.O_RDWR|unix.O_CREAT|unix.O_TRUNC, 0o644) }
	whole := func(t *T, f *mappedFile, to int) { f.holds("the copy", []byte(t.Pread(to, mapSize+mapPage, 0))) }
	ops := []op{
		{"pwrite-beside", false, func(t *T, f *mappedFile, p func(string) string) {
			t.Pwrite(t.Open(p("f"), unix.O_WRONLY, 0), fill(50), mapPage+500)
			change(f, mapPage+500, fill(50))
		}},
		{"pwrite-over", false, func(t *T, f *mappedFile, p func(string) string) {
			t.Pwrite(t.Open(p("f"), unix.O_WRONLY, 0), fill(mapPage), mapPage)
			change(f, mapPage, fill(mapPage))
		}},
		{"pwrite-in-hole", false, func(t *T, f *mappedFile, p func(string) string) {
			t.Pwrite(t.Open(p("f"), unix.O_WRONLY, 0), fill(30), mapInHole+5)
			change(f, mapInHole+5, fill(30))
		}},
		{"pwrite-O_DIRECT", false, func(t *T, f *mappedFile, p func(string) string) {
			b := aligned(t, mapPage)
			copy(b, fill(mapPage))
			_, err := unix.Pwrite(t.Open(p("f"), unix.O_WRONLY|unix.O_DIRECT, 0), b, 3*mapPage)
			t.OK("pwrite", err)
			change(f, 3*mapPage, fill(mapPage))
		}},
		{"append", false, func(t *T, f *mappedFile, p func(string) string) {
			t.Write(t.Open(p("f"), unix.O_WRONLY|unix.O_APPEND, 0), fill(100))
			f.want = append(f.want, fill(100)...)
		}},
		{"truncate", false, func(t *T, f *mappedFile, p func(string) string) {
			t.OK("truncate", unix.Truncate(p("f"), mapPage))
			f.want = f.want[:mapPage]
		}},
		{"truncate-in-page", false, func(t *T, f *mappedFile, p func(string) string) {
			t.OK("truncate", unix.Truncate(p("f"), mapInHole+5))
			f.want = f.want[:mapInHole+5]
		}},
		{"truncate-to-0", false, func(t *T, f *mappedFile, p func(string) string) {
			t.OK("truncate", unix.Truncate(p("f"), 0))
			f.want = nil
		}},
		{"truncate-and-grow", false, func(t *T, f *mappedFile, p func(string) string) {
			t.OK("truncate", unix.Truncate(p("f"), mapPage))
			t.OK("truncate", unix.Truncate(p("f"), mapSize))
			zero(f, mapPage, mapSize-mapPage)
		}},
		{"O_TRUNC", false, func(t *T, f *mappedFile, p func(string) string) {
			t.Write(t.Open(p("f"), unix.O_WRONLY|unix.O_TRUNC, 0), fill(100))
			f.want = []byte(fill(100))
		}},
		{"punch", false, func(t *T, f *mappedFile, p func(string) string) {
			t.OK("fallocate", unix.Fallocate(t.Open(p("f"), unix.O_WRONLY, 0), unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, mapPage, 3*mapPage))
			zero(f, mapPage, 3*mapPage)
		}},
		{"punch-part", false, func(t *T, f *mappedFile, p func(string) string) {
			t.OK("fallocate", unix.Fallocate(t.Open(p("f"), unix.O_WRONLY, 0), unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, mapInData+5, 100))
			zero(f, mapInData+5, 100)
		}},
		{"zero-range", false, func(t *T, f *mappedFile, p func(string) string) {
			t.OK("fallocate", unix.Fallocate(t.Open(p("f"), unix.O_WRONLY, 0), unix.FALLOC_FL_ZERO_RANGE, mapInData+5, 3*mapPage))
			zero(f, mapInData+5, 3*mapPage)
		}},
		{"copy_file_range-into", false, func(t *T, f *mappedFile, p func(string) string) {
			t.File("src", fill(3*mapPage))
			off := int64(mapInData + 5)
			for left := 2 * mapPage; left > 0; {
				n, err := unix.CopyFileRange(t.Open(p("src"), unix.O_RDONLY, 0), nil, t.Open(p("f"), unix.O_RDWR, 0), &off, left, 0)
				t.OK("copy_file_range", err)
				t.True(n > 0, "copy_file_range ended with %d bytes left", left)
				left -= n
			}
			change(f, mapInData+5, fill(2*mapPage))
		}},
		{"copy_file_range-out-of", true, func(t *T, f *mappedFile, p func(string) string) {
			from, to := t.Open(p("f"), unix.O_RDONLY, 0), output(t)
			for left := mapSize; left > 0; {
				n, err := unix.CopyFileRange(from, nil, to, nil, left, 0)
				t.OK("copy_file_range", err)
				t.True(n > 0, "DATA: copy_file_range ended with %d bytes left", left)
				left -= n
			}
			whole(t, f, to)
		}},
		{"sendfile", true, func(t *T, f *mappedFile, p func(string) string) {
			from, to := t.Open(p("f"), unix.O_RDONLY, 0), output(t)
			for left := mapSize; left > 0; {
				n, err := unix.Sendfile(to, from, nil, left)
				t.OK("sendfile", err)
				t.True(n > 0, "DATA: sendfile ended with %d bytes left", left)
				left -= n
			}
			whole(t, f, to)
		}},
		{"splice", true, func(t *T, f *mappedFile, p func(string) string) {
			from, to := t.Open(p("f"), unix.O_RDONLY, 0), output(t)
			var pipe [2]int
			t.OK("pipe", unix.Pipe2(pipe[:], unix.O_CLOEXEC))
			defer unix.Close(pipe[0])
			defer unix.Close(pipe[1])
			for left := mapSize; left > 0; {
				n, err := unix.Splice(from, nil, pipe[1], nil, left, 0)
				t.OK("splice", err)
				t.True(n > 0, "DATA: splice ended with %d bytes left", left)
				_, err = unix.Splice(pipe[0], nil, to, nil, int(n), 0)
				t.OK("splice", err)
				left -= int(n)
			}
			whole(t, f, to)
		}},
		{"read-O_DIRECT", true, func(t *T, f *mappedFile, p func(string) string) {
			b := aligned(t, mapSize)
			n, err := unix.Pread(t.Open(p("f"), unix.O_RDONLY|unix.O_DIRECT, 0), b, 0)
			t.OK("pread", err)
			f.holds("read", b[:n])
		}},
		{"rename-over-another", true, func(t *T, f *mappedFile, p func(string) string) {
			t.File("g", "old")
			t.OK("rename", unix.Rename(p("f"), p("g")))
			f.holds("the new file", []byte(t.Read(p("g"))))
			t.OK("rename", unix.Rename(p("g"), p("f")))
		}},
		{"rename-over-it", true, func(t *T, f *mappedFile, p func(string) string) {
			t.File("g", "new")
			t.OK("link", unix.Link(p("f"), p("kept")))
			t.OK("rename", unix.Rename(p("g"), p("f")))
			t.Content(p("f"), "new")
			t.OK("rename", unix.Rename(p("kept"), p("f")))
		}},
		{"SEEK_DATA", true, func(t *T, f *mappedFile, p func(string) string) {
			at, err := unix.Seek(t.Open(p("f"), unix.O_RDONLY, 0), 2*mapPage, unix.SEEK_DATA)
			t.OK("lseek", err)
			Equal(t, "DATA: first data after the hole's beginning", at, 3*mapPage)
		}},
		{"SEEK_HOLE", true, func(t *T, f *mappedFile, p func(string) string) {
			fd := t.Open(p("f"), unix.O_RDONLY, 0)
			at, err := unix.Seek(fd, 3*mapPage, unix.SEEK_HOLE)
			t.OK("lseek", err)
			Equal(t, "DATA: end of what was stored", at, 4*mapPage)
		}},
	}
	var cs []Case
	for _, o := range ops {
		for _, shared := range []bool{false, true} {
			for _, by := range []string{"this-mount", "another-process", "the-other"} {
				for _, again := range []bool{false, true} {
					if by == "another-process" && (shared || again) {
						continue // the same kernel: no different from the same process
					}
					name := fmt.Sprintf("mapped/%s-by-%s", o.name, by)
					if shared {
						name += "-of-shared-extents"
					}
					if again {
						name += "-after-one-before"
					}
					cs = append(cs, Case{name, func(t *T) {
						f := newMapped(t, shared)
						path := func(p string) string { return p }
						if by == "the-other" {
							path = t.there
						}
						if again { // the lease, and the pages, have gone and come back
							t.Pwrite(t.Open(t.there("f"), unix.O_WRONLY, 0), "B", 10)
							change(f, 10, "B")
							Equal(t, "byte of the mapping", f.m[10], 'B')
						}
						if by == "another-process" {
							f.by = t.Helper()
							f.by.Do(t, "open m f rdwr")
							f.by.Do(t, fmt.Sprintf("map m %d", mapSize))
						}
						f.store()
						if o.reads && by == "the-other" {
							t.OK("msync", unix.Msync(f.m, unix.MS_SYNC))
						}
						o.do(t, f, path)
						f.check()
					}})
				}
			}
		}
	}
	blocks := func(get func(t *T, f *mappedFile) int64) func(*T) {
		return func(t *T) {
			f := newMapped(t, false)
			for i := range 4 { // each step works in a hole that the previous step left
				before := get(t, f)
				f.m[(2+i)*mapPage] = 'x'
				f.want[(2+i)*mapPage] = 'x'
				after := get(t, f)
				t.True(after > before, "DATA: %d blocks before the store into a hole, %d after it", before, after)
			}
			f.check()
		}
	}
	return append(cs,
		Case{"mapped/st_blocks-by-stat", blocks(func(t *T, _ *mappedFile) int64 { return t.Lstat("f").Blocks })},
		Case{"mapped/st_blocks-by-fstat", blocks(func(t *T, f *mappedFile) int64 { return t.Fstat(f.fd).Blocks })},
		Case{"mapped/st_blocks-by-statx", blocks(func(t *T, _ *mappedFile) int64 { return int64(t.Statx("f", 0).Blocks) })},
		Case{"mapped/store-after-a-cached-read", func(t *T) {
			f := newMapped(t, false)
			t.Read("f") // fills the pages by another way
			f.store()
			at, err := unix.Seek(t.Open("f", unix.O_RDONLY, 0), 2*mapPage, unix.SEEK_DATA)
			t.OK("lseek", err)
			Equal(t, "DATA: first data after the hole's beginning", at, 3*mapPage)
			t.OK("truncate", unix.Truncate(t.there("f"), mapPage))
			f.want = f.want[:mapPage]
			f.check()
		}},
		Case{"mapped/stores-while-the-other-mount-writes", func(t *T) {
			f := newMapped(t, false)
			other := t.Open(t.there("f"), unix.O_WRONLY, 0)
			for i := range 40 { // neither loses a byte of the other's, page by page
				at := (i%8)*mapPage + 2*i
				f.m[at] = 'm'
				f.want[at] = 'm'
				t.Pwrite(other, "w", int64(at+1))
				f.want[at+1] = 'w'
			}
			f.check()
		}},
	)
}
