// Package exercise owns the random exercisers of a file system: one file
// against an array in memory, in the manner of fsx, and a tree of directories
// against a tree in memory, in the manner of fsstress. The same seed gives the
// same operations.
package exercise

import (
	"bytes"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"

	"golang.org/x/sys/unix"
)

// MaxFile is the largest size that File gives its file.
const MaxFile = 1 << 20

// file is the state of a run: the file in two open descriptors, and its expected
// contents.
type file struct {
	path  string
	fd    int
	other int // a second descriptor of the same file, which writes too
	want  []byte
	r     *rand.Rand
	log   []string // the last operations, for the failure's text
}

// File does ops random operations on a new file at path and compares each read with a
// model. Between the operations File closes, syncs and opens the file again. The error
// names the seed and the last operations.
func File(path string, seed uint64, ops int) error {
	f := &file{path: path, r: rand.New(rand.NewPCG(seed, 1)), fd: -1, other: -1}
	err := f.reopen(unix.O_CREAT | unix.O_EXCL)
	for i := 0; i < ops && err == nil; i++ {
		err = f.step()
	}
	if err == nil {
		err = f.compare(0, len(f.want))
	}
	f.close()
	if err != nil {
		return fmt.Errorf("seed %d: %w; the last operations:\n%s", seed, err, strings.Join(f.log, "\n"))
	}
	return unix.Unlink(path)
}

func (f *file) close() {
	unix.Close(f.fd)
	unix.Close(f.other)
}

func (f *file) reopen(extra int) error {
	f.close()
	var err error
	if f.fd, err = unix.Open(f.path, unix.O_RDWR|unix.O_CLOEXEC|extra, 0o644); err != nil {
		return fmt.Errorf("open: %w", err)
	}
	f.other, err = unix.Open(f.path, unix.O_RDWR|unix.O_CLOEXEC, 0)
	return err
}

// say notes an operation.
func (f *file) say(format string, args ...any) {
	f.log = append(f.log, fmt.Sprintf(format, args...))
	if len(f.log) > 25 {
		f.log = f.log[1:]
	}
}

// place picks a range below MaxFile. Offsets at block edges, and small
// lengths, come more often.
func (f *file) place() (off, n int) {
	off = f.r.IntN(MaxFile)
	switch f.r.IntN(4) {
	case 0:
		off &^= 4095
	case 1:
		if len(f.want) > 0 {
			off = f.r.IntN(len(f.want))
		}
	}
	n = 1 + f.r.IntN([]int{16, 5000, 70000, 300000}[f.r.IntN(4)])
	if f.r.IntN(4) == 0 {
		n = (n + 4095) &^ 4095
	}
	return off, min(n, MaxFile-off)
}

// grow makes the model at least n bytes long.
func (f *file) grow(n int) {
	if n > len(f.want) {
		f.want = append(f.want, make([]byte, n-len(f.want))...)
	}
}

func (f *file) data(n int) []byte {
	b := make([]byte, n)
	x := f.r.Uint64()
	for i := range b {
		x ^= x << 13
		x ^= x >> 7
		x ^= x << 17
		b[i] = byte(x)
	}
	return b
}

func (f *file) step() error {
	off, n := f.place()
	fd := []int{f.fd, f.other}[f.r.IntN(2)]
	switch k := f.r.IntN(100); {
	case k < 22:
		f.say("pwrite [%d, +%d)", off, n)
		b := f.data(n)
		got, err := unix.Pwrite(fd, b, int64(off))
		if err != nil || got != n {
			return fmt.Errorf("pwrite of %d bytes: %d, %w", n, got, err)
		}
		f.grow(off + n)
		copy(f.want[off:], b)
	case k < 45:
		f.say("pread [%d, +%d)", off, n)
		return f.compare(off, n)
	case k < 53:
		return f.mapped(fd, off, n, false)
	case k < 61:
		return f.mapped(fd, off, n, true)
	case k < 68:
		size := f.r.IntN(MaxFile)
		f.say("ftruncate %d", size)
		if err := unix.Ftruncate(fd, int64(size)); err != nil {
			return fmt.Errorf("ftruncate: %w", err)
		}
		f.grow(size)
		f.want = f.want[:size]
		return f.size()
	case k < 72:
		f.say("allocate [%d, +%d)", off, n)
		if err := unix.Fallocate(fd, 0, int64(off), int64(n)); err != nil {
			return fmt.Errorf("fallocate: %w", err)
		}
		f.grow(off + n)
		return f.size()
	case k < 75:
		f.say("allocate, keep size [%d, +%d)", off, n)
		if err := unix.Fallocate(fd, unix.FALLOC_FL_KEEP_SIZE, int64(off), int64(n)); err != nil {
			return fmt.Errorf("fallocate: %w", err)
		}
		return f.size()
	case k < 80:
		f.say("punch [%d, +%d)", off, n)
		if err := unix.Fallocate(fd, unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, int64(off), int64(n)); err != nil {
			return fmt.Errorf("fallocate: %w", err)
		}
		f.zero(off, n)
	case k < 84:
		f.say("zero range [%d, +%d)", off, n)
		if err := unix.Fallocate(fd, unix.FALLOC_FL_ZERO_RANGE, int64(off), int64(n)); err != nil {
			return fmt.Errorf("fallocate: %w", err)
		}
		f.grow(off + n)
		f.zero(off, n)
	case k < 89:
		return f.copyRange(fd, off, n)
	case k < 93:
		f.say("append %d", min(n, MaxFile-len(f.want)))
		b := f.data(min(n, MaxFile-len(f.want)))
		a, err := unix.Open(f.path, unix.O_WRONLY|unix.O_APPEND|unix.O_CLOEXEC, 0)
		if err != nil {
			return fmt.Errorf("open for append: %w", err)
		}
		got, err := unix.Write(a, b)
		if cerr := unix.Close(a); err != nil || got != len(b) || cerr != nil {
			return fmt.Errorf("append of %d bytes: %d, %w", len(b), got, errors.Join(err, cerr))
		}
		f.want = append(f.want, b...)
	case k < 95:
		f.say("fsync")
		if err := unix.Fsync(fd); err != nil {
			return fmt.Errorf("fsync: %w", err)
		}
	case k < 97:
		f.say("close and open")
		return f.reopen(0)
	case k < 98:
		f.say("drop cached pages")
		return unix.Fadvise(fd, 0, 0, unix.FADV_DONTNEED)
	default:
		f.say("size and holes")
		return errors.Join(f.size(), f.holes())
	}
	return nil
}

// zero clears the part of a range that lies in the file.
func (f *file) zero(off, n int) {
	if off < len(f.want) {
		clear(f.want[off:min(off+n, len(f.want))])
	}
}

func (f *file) size() error {
	var st unix.Stat_t
	if err := unix.Fstat(f.fd, &st); err != nil {
		return fmt.Errorf("fstat: %w", err)
	}
	if st.Size != int64(len(f.want)) {
		return fmt.Errorf("size is %d, expected %d", st.Size, len(f.want))
	}
	return nil
}

// compare reads a range, checks its bytes, and checks the end of the file.
func (f *file) compare(off, n int) error {
	b := make([]byte, n)
	got := 0
	for got < n {
		m, err := unix.Pread(f.fd, b[got:], int64(off+got))
		if err != nil {
			return fmt.Errorf("pread at %d: %w", off+got, err)
		}
		if m == 0 {
			break
		}
		got += m
	}
	var want []byte
	if off < len(f.want) {
		want = f.want[off:min(off+n, len(f.want))]
	}
	if got != len(want) {
		return fmt.Errorf("DATA: pread of [%d, +%d) gives %d bytes, expected %d of a file of %d", off, n, got, len(want), len(f.want))
	}
	return same(b[:got], want, off)
}

// same tells the first difference.
func same(got, want []byte, off int) error {
	if bytes.Equal(got, want) {
		return nil
	}
	for i := range want {
		if got[i] != want[i] {
			return fmt.Errorf("DATA: byte %d is %#x, expected %#x (range of %d bytes from %d)", off+i, got[i], want[i], len(want), off)
		}
	}
	return nil
}

// mapped reads or writes a range inside the file through a mapping.
func (f *file) mapped(fd, off, n int, write bool) error {
	if off >= len(f.want) {
		return nil
	}
	n = min(n, len(f.want)-off)
	f.say("map [%d, +%d), write %v", off, n, write)
	base := off &^ 4095
	prot := unix.PROT_READ
	if write {
		prot |= unix.PROT_WRITE
	}
	m, err := unix.Mmap(fd, int64(base), off-base+n, prot, unix.MAP_SHARED)
	if err != nil {
		return fmt.Errorf("mmap: %w", err)
	}
	if !write {
		err = same(m[off-base:], f.want[off:off+n], off)
		return errors.Join(err, unix.Munmap(m))
	}
	b := f.data(n)
	copy(m[off-base:], b)
	copy(f.want[off:], b)
	if f.r.IntN(2) == 0 {
		if err := unix.Msync(m, unix.MS_SYNC); err != nil {
			return errors.Join(fmt.Errorf("msync: %w", err), unix.Munmap(m))
		}
	}
	return unix.Munmap(m)
}

// copyRange copies a range within the file to a place without an overlap.
func (f *file) copyRange(fd, off, n int) error {
	if off >= len(f.want) {
		return nil
	}
	n = min(n, len(f.want)-off)
	to := f.r.IntN(MaxFile - n + 1)
	if to < off+n && off < to+n {
		return nil
	}
	f.say("copy [%d, +%d) to %d", off, n, to)
	src, dst := int64(off), int64(to)
	for left := n; left > 0; {
		m, err := unix.CopyFileRange(fd, &src, f.fd, &dst, left, 0)
		if err != nil || m == 0 {
			return fmt.Errorf("copy_file_range with %d bytes left: %d, %w", left, m, err)
		}
		left -= m
	}
	f.grow(to + n)
	copy(f.want[to:to+n], f.want[off:off+n])
	return f.size()
}

// holes walks over the file by SEEK_DATA and SEEK_HOLE: each hole must read as zeros.
func (f *file) holes() error {
	const seekData, seekHole = 3, 4
	for at := int64(0); at < int64(len(f.want)); {
		data, err := unix.Seek(f.fd, at, seekData)
		if errors.Is(err, unix.ENXIO) {
			data = int64(len(f.want))
		} else if err != nil {
			return fmt.Errorf("SEEK_DATA from %d: %w", at, err)
		}
		if data < at || data > int64(len(f.want)) {
			return fmt.Errorf("SEEK_DATA from %d gives %d in a file of %d", at, data, len(f.want))
		}
		for i, b := range f.want[at:data] {
			if b != 0 {
				return fmt.Errorf("SEEK_DATA from %d gives %d, but byte %d isn't zero", at, data, at+int64(i))
			}
		}
		if data == int64(len(f.want)) {
			return nil
		}
		if at, err = unix.Seek(f.fd, data, seekHole); err != nil {
			return fmt.Errorf("SEEK_HOLE from %d: %w", data, err)
		}
		if at <= data {
			return fmt.Errorf("SEEK_HOLE from %d gives %d", data, at)
		}
	}
	return nil
}
