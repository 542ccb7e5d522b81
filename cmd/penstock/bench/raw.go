package bench

import (
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"sync"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// The functions below make system calls without notice to Go's scheduler, as a loop in C
// would: the tool measures the file system. With notice, a call that blocks for 50 µs would
// cost about as much again to hand the processor over and to take the processor back. All
// functions but rawClose retry EINTR.

// cpath is a path with a final NUL, made before the clock starts.
type cpath []byte

func newPath(s string) cpath { return append([]byte(s), 0) }

func (p cpath) String() string { return string(p[:len(p)-1]) }

// call makes a system call. The directive keeps what the arguments point to
// alive and in place.
//
//go:uintptrescapes
func call(trap, a, b, c, d uintptr) (uintptr, error) {
	for {
		r, _, errno := syscall.RawSyscall6(trap, a, b, c, d, 0, 0)
		switch errno {
		case 0:
			return r, nil
		case syscall.EINTR:
			continue
		}
		return r, errno
	}
}

func rawOpen(p cpath, flags int, mode uint32) (int, error) {
	at := unix.AT_FDCWD
	fd, err := call(syscall.SYS_OPENAT, uintptr(at), uintptr(unsafe.Pointer(&p[0])), uintptr(flags|unix.O_CLOEXEC), uintptr(mode))
	if err != nil {
		return -1, fmt.Errorf("open %s: %w", p, err)
	}
	return int(fd), nil
}

func rawClose(fd int) error {
	if _, _, errno := syscall.RawSyscall(syscall.SYS_CLOSE, uintptr(fd), 0, 0); errno != 0 {
		return fmt.Errorf("close: %w", errno)
	}
	return nil
}

// readFull reads until b is full or the file ends.
func readFull(fd int, b []byte) (int, error) {
	n := 0
	for n < len(b) {
		r, err := call(syscall.SYS_READ, uintptr(fd), uintptr(unsafe.Pointer(&b[n])), uintptr(len(b)-n), 0)
		if err != nil {
			return n, fmt.Errorf("read: %w", err)
		}
		if r == 0 {
			return n, nil
		}
		n += int(r)
	}
	return n, nil
}

// preadFull reads exactly len(b) bytes at off.
func preadFull(fd int, b []byte, off int64) error {
	for n := 0; n < len(b); {
		r, err := call(syscall.SYS_PREAD64, uintptr(fd), uintptr(unsafe.Pointer(&b[n])), uintptr(len(b)-n), uintptr(off)+uintptr(n))
		if err != nil {
			return fmt.Errorf("pread at %d: %w", off, err)
		}
		if r == 0 {
			return fmt.Errorf("pread at %d: the file ends early", off)
		}
		n += int(r)
	}
	return nil
}

func writeFull(fd int, b []byte) error {
	for n := 0; n < len(b); {
		r, err := call(syscall.SYS_WRITE, uintptr(fd), uintptr(unsafe.Pointer(&b[n])), uintptr(len(b)-n), 0)
		if err != nil {
			return fmt.Errorf("write: %w", err)
		}
		n += int(r)
	}
	return nil
}

func rawFsync(fd int) error {
	if _, err := call(syscall.SYS_FSYNC, uintptr(fd), 0, 0, 0); err != nil {
		return fmt.Errorf("fsync: %w", err)
	}
	return nil
}

func rawStat(p cpath, st *unix.Stat_t) error {
	at := unix.AT_FDCWD
	if _, err := call(syscall.SYS_NEWFSTATAT, uintptr(at), uintptr(unsafe.Pointer(&p[0])), uintptr(unsafe.Pointer(st)), unix.AT_SYMLINK_NOFOLLOW); err != nil {
		return fmt.Errorf("stat %s: %w", p, err)
	}
	return nil
}

func rawUnlink(p cpath) error {
	at := unix.AT_FDCWD
	if _, err := call(syscall.SYS_UNLINKAT, uintptr(at), uintptr(unsafe.Pointer(&p[0])), 0, 0); err != nil {
		return fmt.Errorf("unlink %s: %w", p, err)
	}
	return nil
}

// parallel runs work(i) for i in [0, n) on workers goroutines; worker w takes w, w+workers,
// ... parallel returns the error of the first worker, in order of w, with an error.
func parallel(workers, n int, work func(worker, i int) error) error {
	errs := make([]error, workers)
	var wg sync.WaitGroup
	for w := range workers {
		wg.Go(func() {
			for i := w; i < n; i += workers {
				if errs[w] = work(w, i); errs[w] != nil {
					return
				}
			}
		})
	}
	wg.Wait()
	for _, err := range errs {
		if err != nil {
			return err
		}
	}
	return nil
}

// Contents. Each block of 4 KiB begins with a stamp (little-endian):
//
//	+0  8  seed of the round, mixed with the file's number
//	+8  8  block number in the file
//
// The rest of the block is random, and the same in every file. Compression gains nothing on
// random bytes.
const blockSize = 4 << 10

var noise = sync.OnceValue(func() []byte {
	b := make([]byte, 1<<20)
	r := rand.NewChaCha8([32]byte{'p', 'e', 'n', 's', 't', 'o', 'c', 'k'})
	r.Read(b)
	return b
})

// newBuffer returns a buffer filled with noise.
func newBuffer(size int) []byte {
	b := make([]byte, size)
	for n := 0; n < size; {
		n += copy(b[n:], noise())
	}
	return b
}

func mix(seed uint64, file int) uint64 { return seed ^ uint64(file)*0x9e3779b97f4a7c15 }

// stamp writes the stamps of b's blocks. b lies at offset off of a file.
func stamp(b []byte, id uint64, off int64) {
	for i := 0; i+16 <= len(b); i += blockSize {
		binary.LittleEndian.PutUint64(b[i:], id)
		binary.LittleEndian.PutUint64(b[i+8:], uint64(off+int64(i))/blockSize)
	}
}

// check compares the stamps of b with the stamps for id and off.
func check(b []byte, id uint64, off int64) error {
	for i := 0; i+16 <= len(b); i += blockSize {
		gotID, gotBlock := binary.LittleEndian.Uint64(b[i:]), binary.LittleEndian.Uint64(b[i+8:])
		if want := uint64(off+int64(i)) / blockSize; gotID != id || gotBlock != want {
			return fmt.Errorf("at offset %d: stamp %x/%d, want %x/%d: %w", off+int64(i), gotID, gotBlock, id, want, errMismatch)
		}
	}
	return nil
}
