package suite

import (
	"bytes"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	"golang.org/x/sys/unix"
)

// Cases of a file that is open, read and mapped while it becomes longer: every way of
// reading must find the new bytes.

// CantBeHad are the ways of reading that need not find at once the bytes that another
// mount has appended, each with the reason. docs/parts/posix.md has the same table for
// users; a test of package posix compares. None of these ways may return wrong bytes, and
// after fstat(2) each finds all bytes.
var CantBeHad = map[string]string{
	"copy_file_range": "the kernel cuts the length off at the size that it knows before it asks the mount",
	"sendfile":        "the kernel ends at the size that it knows, and asks nobody",
	"splice":          "the kernel ends at the size that it knows, and asks nobody",
	"mapping":         "the kernel answers an access behind the size that it knows with SIGBUS, and asks nobody",
}

const (
	grownOld = 2 * mapPage // the size before,
	grownNew = 5 * mapPage // and after
)

// grownFile is such a file, open by the first mount, and its expected contents.
type grownFile struct {
	fd     int
	m      []byte // longer than the file
	before unix.Stat_t
	want   []byte
}

func newGrown(t *T, mode int) *grownFile {
	f := &grownFile{want: bytes.Repeat([]byte("o"), grownOld)}
	t.File("f", string(f.want))
	f.fd = t.Open("f", mode, 0)
	t.Pread(f.fd, 10, 0)
	f.before = t.Fstat(f.fd)
	m, err := unix.Mmap(f.fd, 0, grownNew, unix.PROT_READ, unix.MAP_SHARED)
	t.OK("mmap", err)
	t.Cleanup(func() { unix.Munmap(m) })
	f.m = m
	Equal(t, "DATA: byte of the mapping", m[grownOld-1], 'o')
	return f
}

// GrownCases are the table: the mount and process that make the file longer, the call,
// and the way of reading.
func GrownCases() []Case {
	added := strings.Repeat("N", grownNew-grownOld)
	type growth struct {
		name  string
		do    func(t *T, path func(string) string)
		other []string // the same by another process
		bytes string   // bytes behind the old end
	}
	zeros := string(make([]byte, grownNew-grownOld))
	tail := zeros[:len(zeros)-mapPage] + strings.Repeat("N", mapPage)
	growths := []growth{
		{"append", func(t *T, p func(string) string) {
			t.Write(t.Open(p("f"), unix.O_WRONLY|unix.O_APPEND, 0), added)
		}, []string{fmt.Sprintf("pwrite w %d %s", grownOld, added)}, added},
		{"pwrite-behind-a-hole", func(t *T, p func(string) string) {
			t.Pwrite(t.Open(p("f"), unix.O_WRONLY, 0), tail[len(tail)-mapPage:], grownNew-mapPage)
		}, nil, tail},
		{"truncate", func(t *T, p func(string) string) {
			t.OK("truncate", unix.Truncate(p("f"), grownNew))
		}, []string{fmt.Sprintf("ftruncate w %d", grownNew)}, zeros},
		{"fallocate", func(t *T, p func(string) string) {
			t.OK("fallocate", unix.Fallocate(t.Open(p("f"), unix.O_WRONLY, 0), 0, grownOld, grownNew-grownOld))
		}, nil, zeros},
		{"copy_file_range-into", func(t *T, p func(string) string) {
			t.File("src", added)
			from, to, off := t.Open(p("src"), unix.O_RDONLY, 0), t.Open(p("f"), unix.O_RDWR, 0), int64(grownOld)
			for left := len(added); left > 0; {
				n, err := unix.CopyFileRange(from, nil, to, &off, left, 0)
				t.OK("copy_file_range", err)
				t.True(n > 0, "copy_file_range ended with %d bytes left", left)
				left -= n
			}
		}, nil, added},
	}
	size := func(t *T, got int64) { Equal(t, "DATA: size", got, int64(grownNew)) }
	all := func(t *T, f *grownFile, got string) {
		t.True(got == string(f.want), "DATA: read %d bytes, not the %d of the file", len(got), len(f.want))
	}
	direct := map[string]func(t *T, f *grownFile){
		"read":  func(t *T, f *grownFile) { all(t, f, t.Pread(f.fd, grownNew+mapPage, 0)) },
		"fstat": func(t *T, f *grownFile) { size(t, t.Fstat(f.fd).Size) },
		"stat":  func(t *T, f *grownFile) { size(t, t.Lstat("f").Size) },
		"open":  func(t *T, f *grownFile) { all(t, f, t.Read("f")) },
		"SEEK_END": func(t *T, f *grownFile) {
			at, err := unix.Seek(f.fd, 0, unix.SEEK_END)
			t.OK("lseek", err)
			size(t, at)
		},
		"read-O_DIRECT": func(t *T, f *grownFile) {
			b := aligned(t, grownNew)
			n, err := unix.Pread(t.Open("f", unix.O_RDONLY|unix.O_DIRECT, 0), b, 0)
			t.OK("pread", err)
			all(t, f, string(b[:n]))
		},
		"SEEK_HOLE": func(t *T, f *grownFile) {
			at, err := unix.Seek(f.fd, grownNew-1, unix.SEEK_HOLE)
			t.OK("lseek", err)
			if f.want[grownNew-1] != 0 { // else the last byte may lie in a hole
				size(t, at)
			}
		},
		"SEEK_DATA": func(t *T, f *grownFile) {
			at, err := unix.Seek(f.fd, grownOld, unix.SEEK_DATA)
			if i := bytes.IndexByte(f.want, 'N'); i >= 0 {
				t.OK("lseek", err)
				t.True(at >= grownOld && at <= int64(i), "DATA: first data at %d, not by %d", at, i)
			}
		},
		"st_blocks": func(t *T, f *grownFile) {
			if after := t.Fstat(f.fd).Blocks; bytes.IndexByte(f.want, 'N') >= 0 {
				t.True(after > f.before.Blocks, "DATA: %d blocks before, %d after", f.before.Blocks, after)
			}
		},
	}
	// These ways read from the old end until no byte follows.
	pumped := func(t *T, step func(to int, off *int64, n int) (int64, error)) string {
		out, off := t.Open("out", unix.O_RDWR|unix.O_CREAT|unix.O_TRUNC, 0o644), int64(grownOld)
		for {
			n, err := step(out, &off, grownNew)
			t.OK("copying", err)
			if n == 0 {
				return t.Pread(out, grownNew, 0)
			}
		}
	}
	cut := map[string]func(t *T, f *grownFile) string{
		"copy_file_range": func(t *T, f *grownFile) string {
			return pumped(t, func(to int, off *int64, n int) (int64, error) {
				got, err := unix.CopyFileRange(f.fd, off, to, nil, n, 0)
				return int64(got), err
			})
		},
		"sendfile": func(t *T, f *grownFile) string {
			return pumped(t, func(to int, off *int64, n int) (int64, error) {
				got, err := unix.Sendfile(to, f.fd, off, n)
				return int64(got), err
			})
		},
		"splice": func(t *T, f *grownFile) string {
			var pipe [2]int
			t.OK("pipe", unix.Pipe2(pipe[:], unix.O_CLOEXEC))
			defer unix.Close(pipe[0])
			defer unix.Close(pipe[1])
			return pumped(t, func(to int, off *int64, n int) (int64, error) {
				got, err := unix.Splice(f.fd, off, pipe[1], nil, n, 0)
				if err != nil || got == 0 {
					return 0, err
				}
				moved, err := unix.Splice(pipe[0], nil, to, nil, int(got), 0)
				t.True(err != nil || moved == got, "%d of %d bytes left the pipe", moved, got)
				return got, err
			})
		},
		"mapping": func(t *T, f *grownFile) string {
			return pumped(t, func(to int, off *int64, _ int) (int64, error) {
				if *off == grownNew {
					return 0, nil
				}
				n, err := unix.Write(to, f.m[*off:*off+mapPage]) // the kernel's own access: EFAULT instead of SIGBUS
				if errors.Is(err, unix.EFAULT) {
					return 0, nil
				}
				*off += int64(max(n, 0))
				return int64(n), err
			})
		},
	}
	var cs []Case
	add := func(g growth, by, mode string, how string, test func(t *T, f *grownFile)) {
		flags := map[string]int{"": unix.O_RDONLY, "-of-a-writer": unix.O_RDWR}[mode]
		cs = append(cs, Case{fmt.Sprintf("grown/%s-by-%s/%s%s", g.name, by, how, mode), func(t *T) {
			f := newGrown(t, flags)
			f.want = append(f.want, g.bytes...)
			switch by {
			case "this-process":
				g.do(t, func(p string) string { return p })
			case "the-other-mount":
				g.do(t, t.there)
			default:
				h := t.Helper()
				h.Do(t, "open w f rdwr")
				for _, command := range g.other {
					h.Do(t, command)
				}
			}
			test(t, f)
		}})
	}
	for _, g := range growths {
		for _, by := range []string{"this-process", "another-process", "the-other-mount"} {
			for _, mode := range []string{"", "-of-a-writer"} {
				if by == "another-process" && g.other == nil || mode != "" && g.other == nil {
					continue
				}
				for _, how := range slices.Sorted(maps.Keys(direct)) {
					add(g, by, mode, how, direct[how])
				}
				for _, how := range slices.Sorted(maps.Keys(cut)) {
					read := cut[how]
					add(g, by, mode, how, func(t *T, f *grownFile) {
						want := string(f.want[grownOld:])
						got := read(t, f)
						if CantBeHad[how] != "" && by == "the-other-mount" && t.Other != t.Dir {
							t.True(strings.HasPrefix(want, got), "DATA: %d bytes came, and not those of the file", len(got))
							t.Fstat(f.fd)
							got = read(t, f)
						}
						t.True(got == want, "DATA: %d bytes came, not the %d behind the old end", len(got), len(want))
					})
				}
			}
		}
	}
	return cs
}
