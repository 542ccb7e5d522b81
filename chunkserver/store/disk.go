package store

import (
	"errors"
	"io"
	"io/fs"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// Disk is the seam to the file system below a store: the few operations that the store uses,
// so that tests can make them fail, tear or forget. Names are relative to the store's
// directory. Errors are those of package os.
type Disk interface {
	// Open opens a file for reading and writing; with create, a missing file is created.
	Open(name string, create bool) (File, error)
	// OpenRead opens a file for reading only.
	OpenRead(name string) (File, error)
	Remove(name string) error
	Rename(from, to string) error
	Mkdir(name string) error
	// List gives the names in a directory, in any order.
	List(name string) ([]string, error)
	// SyncDir makes the entries of a directory durable.
	SyncDir(name string) error
	// SyncAll makes everything on the disk durable: files, lengths, entries.
	SyncAll() error
	// Space returns the size of the file system and the bytes available to the store.
	Space() (total, free uint64, err error)
	// Lock keeps other processes out until the returned Closer is closed.
	// If another process has the directory, the error matches os.ErrExist.
	Lock() (io.Closer, error)
}

// File is an open file of a Disk.
type File interface {
	io.ReaderAt
	io.WriterAt
	io.Closer
	// Sync makes the bytes and the length durable (fdatasync).
	Sync() error
	Truncate(n int64) error
	Size() (int64, error)
	// Stamp identifies the present state of the file's contents.
	Stamp() (Stamp, error)
	// WillNeed hints that [off, off+n) will be read soon.
	WillNeed(off, n int64)
	// Allocate reserves space for [off, off+n) without changing the length. Best effort: on a
	// file system without support it does nothing.
	Allocate(off, n int64) error
	// StartWrite begins to write [off, off+n) back without waiting. Best effort.
	StartWrite(off, n int64)
}

// osDisk is a directory of the host.
type osDisk struct{ dir string }

// DirDisk returns the Disk in a directory of the host.
func DirDisk(dir string) Disk { return osDisk{dir} }

func (d osDisk) path(name string) string { return filepath.Join(d.dir, name) }

func (d osDisk) Open(name string, create bool) (File, error) {
	flag := os.O_RDWR
	if create {
		flag |= os.O_CREATE
	}
	return d.open(name, flag)
}

func (d osDisk) OpenRead(name string) (File, error) { return d.open(name, os.O_RDONLY) }

func (d osDisk) open(name string, flag int) (File, error) {
	// unix.Open rather than os.OpenFile: regular files need no poller, and an
	// *os.File costs an allocation, a finalizer and two more system calls.
	for {
		fd, err := unix.Open(d.path(name), flag|unix.O_CLOEXEC, 0o600)
		switch {
		case err == unix.EINTR:
			continue
		case err != nil:
			return nil, &fs.PathError{Op: "open", Path: d.path(name), Err: err}
		}
		return &osFile{fd: fd, name: name}, nil
	}
}

func (d osDisk) Remove(name string) error     { return os.Remove(d.path(name)) }
func (d osDisk) Rename(from, to string) error { return os.Rename(d.path(from), d.path(to)) }
func (d osDisk) Mkdir(name string) error      { return os.Mkdir(d.path(name), 0o700) }

func (d osDisk) List(name string) ([]string, error) {
	f, err := os.Open(d.path(name))
	if err != nil {
		return nil, err
	}
	defer f.Close()
	return f.Readdirnames(-1)
}

func (d osDisk) SyncDir(name string) error {
	f, err := os.Open(d.path(name))
	if err != nil {
		return err
	}
	defer f.Close()
	return f.Sync()
}

func (d osDisk) SyncAll() error {
	f, err := os.Open(d.dir)
	if err != nil {
		return err
	}
	defer f.Close()
	if err := unix.Syncfs(int(f.Fd())); err != nil {
		return &fs.PathError{Op: "syncfs", Path: d.dir, Err: err}
	}
	return nil
}

func (d osDisk) Space() (total, free uint64, err error) {
	var st unix.Statfs_t
	if err := unix.Statfs(d.dir, &st); err != nil {
		return 0, 0, err
	}
	return st.Blocks * uint64(st.Bsize), st.Bavail * uint64(st.Bsize), nil
}

func (d osDisk) Lock() (io.Closer, error) {
	f, err := os.OpenFile(d.path("lock"), os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, err
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		f.Close()
		if errors.Is(err, unix.EWOULDBLOCK) {
			err = os.ErrExist
		}
		return nil, err
	}
	return f, nil
}

type osFile struct {
	fd   int
	name string
}

// Fd is the descriptor, for sendfile and for passing.
func (f *osFile) Fd() int { return f.fd }

func (f *osFile) fail(op string, err error) error {
	return &fs.PathError{Op: op, Path: f.name, Err: err}
}

func (f *osFile) ReadAt(p []byte, off int64) (int, error) {
	done := 0
	for done < len(p) {
		n, err := unix.Pread(f.fd, p[done:], off+int64(done))
		switch {
		case err == unix.EINTR:
		case err != nil:
			return done, f.fail("read", err)
		case n == 0:
			return done, io.EOF
		}
		done += max(n, 0)
	}
	return done, nil
}

func (f *osFile) WriteAt(p []byte, off int64) (int, error) {
	done := 0
	for done < len(p) {
		n, err := unix.Pwrite(f.fd, p[done:], off+int64(done))
		switch {
		case err == unix.EINTR:
		case err != nil:
			return done, f.fail("write", err)
		}
		done += max(n, 0)
	}
	return done, nil
}

func (f *osFile) Sync() error {
	for {
		err := unix.Fdatasync(f.fd)
		switch {
		case err == unix.EINTR:
		case err != nil:
			return f.fail("fdatasync", err)
		default:
			return nil
		}
	}
}

func (f *osFile) Truncate(n int64) error {
	for {
		err := unix.Ftruncate(f.fd, n)
		switch {
		case err == unix.EINTR:
		case err != nil:
			return f.fail("truncate", err)
		default:
			return nil
		}
	}
}

func (f *osFile) stat() (st unix.Stat_t, err error) {
	if err := unix.Fstat(f.fd, &st); err != nil {
		return st, f.fail("stat", err)
	}
	return st, nil
}

func (f *osFile) Size() (int64, error) {
	st, err := f.stat()
	return st.Size, err
}

func (f *osFile) WillNeed(off, n int64) {
	_ = unix.Fadvise(f.fd, off, n, unix.FADV_WILLNEED)
}

func (f *osFile) Stamp() (Stamp, error) {
	st, err := f.stat()
	return Stamp{Inode: st.Ino, Changed: st.Ctim.Nano(), Size: st.Size}, err
}

func (f *osFile) Allocate(off, n int64) error {
	err := unix.Fallocate(f.fd, unix.FALLOC_FL_KEEP_SIZE, off, n)
	if err == nil || errors.Is(err, unix.EOPNOTSUPP) || errors.Is(err, unix.EINTR) {
		return nil
	}
	return f.fail("fallocate", err)
}

func (f *osFile) StartWrite(off, n int64) {
	_ = unix.SyncFileRange(f.fd, off, n, unix.SYNC_FILE_RANGE_WRITE)
}

func (f *osFile) Close() error { return unix.Close(f.fd) }
