// Package takeover tests that a mount outlives the process that serves the mount: the process is
// replaced or killed, and the mount's users see a pause and no error.
package takeover

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/fnv"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// load is the work of a process in a mount until the test stops the process. The load knows every
// byte beforehand; any error, and any other byte, fails the load.
type load struct {
	dir  string
	stop chan struct{}
	ops  sync.Map // kind to *atomic.Int64
}

func (l *load) stopped() bool {
	select {
	case <-l.stop:
		return true
	default:
		return false
	}
}

func (l *load) count(kind string) {
	n, _ := l.ops.LoadOrStore(kind, new(atomic.Int64))
	n.(*atomic.Int64).Add(1)
}

// kinds are the parts of a load, each with a folder of its own.
var kinds = map[string]func(l *load, dir string) error{
	"append": (*load).appends, "blocks": (*load).blocks, "tree": (*load).tree, "mapped": (*load).mapped, "locks": (*load).locks,
	"list": (*load).list, "unlinked": (*load).unlinked, "stream": (*load).stream, "tails": (*load).tails,
}

// run does the given kinds until stdin ends, and prints the counts of operations.
func run(dir string, names []string, stdin io.Reader, out io.Writer) error {
	l := &load{dir: dir, stop: make(chan struct{})}
	var wg sync.WaitGroup
	errs := make(chan error, len(names)+1)
	for _, name := range names {
		at := filepath.Join(dir, name)
		if err := os.MkdirAll(at, 0o755); err != nil {
			return err
		}
		wg.Go(func() {
			if err := kinds[name](l, at); err != nil {
				errs <- fmt.Errorf("%s: %w", name, err)
			}
		})
	}
	fmt.Fprintln(out, "begun")
	_, _ = io.Copy(io.Discard, stdin)
	close(l.stop)
	wg.Wait()
	close(errs)
	var all []error
	for err := range errs {
		all = append(all, err)
	}
	l.ops.Range(func(k, n any) bool {
		fmt.Fprintf(out, "%s=%d ", k, n.(*atomic.Int64).Load())
		return true
	})
	fmt.Fprintln(out)
	return errors.Join(all...)
}

// appends writes logs, one after the other, so that the last log is short even in a load that ran
// for long: reading every log from the start would take minutes.
func (l *load) appends(dir string) error {
	name := filepath.Join(dir, "log")
	for {
		if err := l.appendLog(name); err != nil || l.stopped() {
			return err
		}
		if err := os.Remove(name); err != nil {
			return err
		}
	}
}

// appendLog writes numbered lines with O_APPEND from two descriptors; at the end each line is in
// the file once, the lines of one descriptor in order.
func (l *load) appendLog(name string) error {
	const writers, line, most = 2, 64, 20_000
	var wg sync.WaitGroup
	errs := make([]error, writers)
	written := make([]int, writers)
	for w := range writers {
		wg.Go(func() {
			f, err := os.OpenFile(name, os.O_WRONLY|os.O_APPEND|os.O_CREATE, 0o644)
			if err != nil {
				errs[w] = err
				return
			}
			defer f.Close()
			for i := 0; i < most && !l.stopped(); i++ {
				if _, err := fmt.Fprintf(f, "%*s\n", line-1, fmt.Sprintf("%d %d", w, i)); err != nil {
					errs[w] = err
					return
				}
				written[w] = i + 1
				l.count("append")
				time.Sleep(100 * time.Microsecond)
			}
		})
	}
	wg.Wait()
	if err := errors.Join(errs...); err != nil {
		return err
	}
	b, err := os.ReadFile(name)
	if err != nil {
		return err
	}
	next := make([]int, writers)
	for at := 0; at < len(b); at += line {
		var w, i int
		if _, err := fmt.Sscan(string(b[at:min(at+line, len(b))]), &w, &i); err != nil || w >= writers {
			return fmt.Errorf("DATA: at %d of %d: %q: %v", at, len(b), b[at:min(at+line, len(b))], err)
		}
		if i != next[w] {
			return fmt.Errorf("DATA: at %d: line %d of writer %d, not %d", at, i, w, next[w])
		}
		next[w]++
	}
	for w := range next {
		if next[w] != written[w] {
			return fmt.Errorf("DATA: %d lines of writer %d, not %d", next[w], w, written[w])
		}
	}
	return nil
}

// blocks writes blocks at random places of an open file, sometimes syncs, and reads the blocks
// back through another descriptor.
func (l *load) blocks(dir string) error {
	const count, size = 256, 4096
	w, err := os.OpenFile(filepath.Join(dir, "blocks"), os.O_RDWR|os.O_CREATE, 0o644)
	if err != nil {
		return err
	}
	defer w.Close()
	r, err := os.Open(w.Name())
	if err != nil {
		return err
	}
	defer r.Close()
	var version [count]uint64
	rnd := rand.New(rand.NewPCG(1, 2))
	got := make([]byte, size)
	check := func(f *os.File, i int) error {
		if version[i] == 0 {
			return nil
		}
		if _, err := f.ReadAt(got, int64(i)*size); err != nil {
			return err
		}
		if !bytes.Equal(got, pattern(uint64(i), version[i], size)) {
			return fmt.Errorf("DATA: block %d is of version %d, not %d", i, binary.LittleEndian.Uint64(got[8:]), version[i])
		}
		return nil
	}
	for n := uint64(1); !l.stopped(); n++ {
		i := rnd.IntN(count)
		version[i] = n
		if _, err := w.WriteAt(pattern(uint64(i), n, size), int64(i)*size); err != nil {
			return err
		}
		l.count("write")
		if rnd.IntN(200) == 0 {
			if err := w.Sync(); err != nil {
				return err
			}
			l.count("fsync")
		}
		if err := check([]*os.File{w, r}[n%2], rnd.IntN(count)); err != nil {
			return err
		}
		l.count("read")
	}
	for i := range count {
		if err := check(r, i); err != nil {
			return err
		}
	}
	return nil
}

// pattern is a block that names itself.
func pattern(i, version uint64, size int) []byte {
	b := make([]byte, size)
	h := fnv.New64a()
	binary.Write(h, binary.LittleEndian, [2]uint64{i, version})
	x := h.Sum64()
	for at := 0; at+8 <= size; at += 8 {
		x = x*6364136223846793005 + 1442695040888963407
		binary.LittleEndian.PutUint64(b[at:], x)
	}
	binary.LittleEndian.PutUint64(b, i)
	binary.LittleEndian.PutUint64(b[8:], version)
	return b
}

// tree makes, renames, links and removes names; each operation fails if done twice.
func (l *load) tree(dir string) error {
	for n := 0; !l.stopped(); n++ {
		d := filepath.Join(dir, fmt.Sprintf("d%d", n))
		if err := os.Mkdir(d, 0o755); err != nil {
			return err
		}
		f, err := os.OpenFile(filepath.Join(d, "a"), os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o644)
		if err != nil {
			return err
		}
		if _, err := fmt.Fprint(f, n); err != nil {
			return err
		}
		if err := f.Close(); err != nil {
			return err
		}
		if err := os.Rename(filepath.Join(d, "a"), filepath.Join(d, "b")); err != nil {
			return err
		}
		if err := os.Link(filepath.Join(d, "b"), filepath.Join(d, "c")); err != nil {
			return err
		}
		if err := os.Symlink("b", filepath.Join(d, "s")); err != nil {
			return err
		}
		b, err := os.ReadFile(filepath.Join(d, "s"))
		if err != nil || string(b) != fmt.Sprint(n) {
			return fmt.Errorf("DATA: %q, %w", b, err)
		}
		for _, name := range []string{"b", "c", "s"} {
			if err := os.Remove(filepath.Join(d, name)); err != nil {
				return err
			}
		}
		if err := syscall.Rmdir(d); err != nil {
			return &os.PathError{Op: "rmdir", Path: d, Err: err}
		}
		l.count("tree")
	}
	return nil
}

// mapped stores through a shared mapping, and reads by read(2) and the mapping.
func (l *load) mapped(dir string) error {
	const count, size = 64, 4096
	f, err := os.OpenFile(filepath.Join(dir, "mapped"), os.O_RDWR|os.O_CREATE, 0o644)
	if err != nil {
		return err
	}
	defer f.Close()
	if err := f.Truncate(count * size); err != nil {
		return err
	}
	m, err := unix.Mmap(int(f.Fd()), 0, count*size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return err
	}
	defer unix.Munmap(m)
	var version [count]uint64
	rnd := rand.New(rand.NewPCG(3, 4))
	for n := uint64(1); !l.stopped(); n++ {
		i := rnd.IntN(count)
		version[i] = n
		copy(m[i*size:], pattern(uint64(i), n, size))
		l.count("store")
		if rnd.IntN(20) == 0 {
			if err := unix.Msync(m, unix.MS_SYNC); err != nil {
				return err
			}
			l.count("msync")
			got := make([]byte, size)
			if _, err := f.ReadAt(got, int64(i*size)); err != nil || !bytes.Equal(got, pattern(uint64(i), n, size)) {
				return fmt.Errorf("DATA: read(2) of page %d after msync: version %d, not %d: %w", i, binary.LittleEndian.Uint64(got[8:]), n, err)
			}
			if err := unix.Madvise(m, unix.MADV_DONTNEED); err != nil {
				return err
			}
		}
		j := rnd.IntN(count)
		if version[j] != 0 && !bytes.Equal(m[j*size:(j+1)*size], pattern(uint64(j), version[j], size)) {
			return fmt.Errorf("DATA: page %d is of version %d, not %d", j, binary.LittleEndian.Uint64(m[j*size+8:]), version[j])
		}
		time.Sleep(time.Millisecond)
	}
	return nil
}

// locking are the three ways to lock a file.
var locking = map[string]func(f *os.File, kind int16, wait bool) error{
	"ofd": func(f *os.File, kind int16, wait bool) error {
		cmd := unix.F_OFD_SETLK
		if wait {
			cmd = unix.F_OFD_SETLKW
		}
		return unix.FcntlFlock(f.Fd(), cmd, &unix.Flock_t{Type: kind, Len: 8})
	},
	"posix": func(f *os.File, kind int16, wait bool) error {
		cmd := unix.F_SETLK
		if wait {
			cmd = unix.F_SETLKW
		}
		return unix.FcntlFlock(f.Fd(), cmd, &unix.Flock_t{Type: kind, Len: 8})
	},
	"flock": func(f *os.File, kind int16, wait bool) error {
		how := map[int16]int{unix.F_WRLCK: unix.LOCK_EX, unix.F_RDLCK: unix.LOCK_SH, unix.F_UNLCK: unix.LOCK_UN}[kind]
		if !wait {
			how |= unix.LOCK_NB
		}
		return unix.Flock(int(f.Fd()), how)
	},
}

// locks adds one to a number in a file under a lock, from several open file descriptions: of one
// file by open file description locks, of another file by flock. (TestLocksOutliveTheServer tests
// the locks of processes.)
func (l *load) locks(dir string) error {
	var wg sync.WaitGroup
	var errs [2]error
	for i, how := range []string{"ofd", "flock"} {
		wg.Go(func() { errs[i] = l.adds(filepath.Join(dir, how), locking[how]) })
	}
	wg.Wait()
	return errors.Join(errs[:]...)
}

func (l *load) adds(name string, lock func(f *os.File, kind int16, wait bool) error) error {
	if err := os.WriteFile(name, make([]byte, 8), 0o644); err != nil {
		return err
	}
	const who = 3
	var wg sync.WaitGroup
	errs := make([]error, who)
	var added atomic.Uint64
	for w := range who {
		wg.Go(func() {
			errs[w] = func() error {
				f, err := os.OpenFile(name, os.O_RDWR, 0)
				if err != nil {
					return err
				}
				defer f.Close()
				for !l.stopped() {
					if err := retry(func() error { return lock(f, unix.F_WRLCK, true) }); err != nil {
						return fmt.Errorf("lock: %w", err)
					}
					var b [8]byte
					if _, err := f.ReadAt(b[:], 0); err != nil {
						return err
					}
					binary.LittleEndian.PutUint64(b[:], binary.LittleEndian.Uint64(b[:])+1)
					if _, err := f.WriteAt(b[:], 0); err != nil {
						return err
					}
					added.Add(1)
					l.count("lock")
					if err := lock(f, unix.F_UNLCK, false); err != nil {
						return fmt.Errorf("unlock: %w", err)
					}
					time.Sleep(time.Millisecond)
				}
				return nil
			}()
		})
	}
	wg.Wait()
	if err := errors.Join(errs...); err != nil {
		return err
	}
	b, err := os.ReadFile(name)
	if err != nil {
		return err
	}
	if got := binary.LittleEndian.Uint64(b); got != added.Load() {
		return fmt.Errorf("DATA: the number in %s is %d after %d additions", name, got, added.Load())
	}
	return nil
}

// retry is for calls that a signal of the process's own runtime may interrupt.
func retry(fn func() error) error {
	for {
		if err := fn(); !errors.Is(err, syscall.EINTR) {
			return err
		}
	}
}

// list lists a directory of many names: each lasting name is listed once.
func (l *load) list(dir string) error {
	const names = 400
	for i := range names {
		if err := os.WriteFile(filepath.Join(dir, fmt.Sprintf("f%03d", i)), nil, 0o644); err != nil {
			return err
		}
	}
	for n := 0; !l.stopped(); n++ {
		extra := filepath.Join(dir, "x")
		if err := os.WriteFile(extra, []byte("x"), 0o644); err != nil { // so that the listing is not cached
			return err
		}
		got, err := os.ReadDir(dir)
		if err != nil {
			return err
		}
		seen := 0
		for _, e := range got {
			if strings.HasPrefix(e.Name(), "f") {
				seen++
			}
		}
		if seen != names {
			return fmt.Errorf("DATA: %d names, not %d", seen, names)
		}
		if err := os.Remove(extra); err != nil {
			return err
		}
		l.count("readdir")
		time.Sleep(2 * time.Millisecond)
	}
	return nil
}

// unlinked writes and reads a file without a name.
func (l *load) unlinked(dir string) error {
	for n := uint64(1); !l.stopped(); n++ {
		f, err := os.OpenFile(filepath.Join(dir, "gone"), os.O_CREATE|os.O_EXCL|os.O_RDWR, 0o644)
		if err != nil {
			return err
		}
		if err := os.Remove(f.Name()); err != nil {
			return err
		}
		for i := range uint64(8) {
			if _, err := f.WriteAt(pattern(i, n, 4096), int64(i)*4096); err != nil {
				return err
			}
			time.Sleep(3 * time.Millisecond)
		}
		got := make([]byte, 4096)
		for i := range uint64(8) {
			if _, err := f.ReadAt(got, int64(i)*4096); err != nil || !bytes.Equal(got, pattern(i, n, 4096)) {
				return fmt.Errorf("DATA: block %d: %w", i, err)
			}
		}
		if err := f.Close(); err != nil {
			return err
		}
		l.count("unlinked")
	}
	return nil
}

// stream writes a large file in large pieces, and reads all of the file.
func (l *load) stream(dir string) error {
	const piece, pieces = 1 << 20, 24
	for n := uint64(1); !l.stopped(); n++ {
		name := filepath.Join(dir, fmt.Sprintf("s%d", n%2))
		f, err := os.Create(name)
		if err != nil {
			return err
		}
		for i := range uint64(pieces) {
			if _, err := f.Write(pattern(i, n, piece)); err != nil {
				return err
			}
		}
		if n%2 == 0 {
			if err := f.Sync(); err != nil {
				return err
			}
		}
		if err := f.Close(); err != nil {
			return err
		}
		r, err := os.Open(name)
		if err != nil {
			return err
		}
		got := make([]byte, piece)
		for i := range uint64(pieces) {
			if _, err := io.ReadFull(r, got); err != nil || !bytes.Equal(got, pattern(i, n, piece)) {
				return fmt.Errorf("DATA: round %d piece %d of %s: version %d: %w", n, i, name, binary.LittleEndian.Uint64(got[8:]), err)
			}
		}
		if err := r.Close(); err != nil {
			return err
		}
		l.count("stream")
	}
	return nil
}

// tails appends to a file and syncs each time, as a write-ahead log does: its end
// in the journal is open.
func (l *load) tails(dir string) error {
	const piece = 3000
	for n := uint64(1); !l.stopped(); n++ {
		f, err := os.Create(filepath.Join(dir, "wal"))
		if err != nil {
			return err
		}
		i := uint64(0)
		for ; i < 300 && !l.stopped(); i++ {
			if _, err := f.Write(pattern(i, n, piece)); err != nil {
				return err
			}
			if err := f.Sync(); err != nil {
				return err
			}
			l.count("wal")
		}
		if err := f.Close(); err != nil {
			return err
		}
		b, err := os.ReadFile(f.Name())
		if err != nil || len(b) != int(i)*piece {
			return fmt.Errorf("DATA: %d bytes, not %d: %w", len(b), int(i)*piece, err)
		}
		for j := range i {
			if !bytes.Equal(b[j*piece:(j+1)*piece], pattern(j, n, piece)) {
				return fmt.Errorf("DATA: piece %d of %d is another", j, i)
			}
		}
	}
	return nil
}
