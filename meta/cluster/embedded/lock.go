package embedded

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"penstock.io/penstock/meta"
)

// Lock is the right of one process to use a data directory. The kernel releases the lock at the
// end of the process, even after SIGKILL.
type Lock struct{ f *os.File }

// LockDir locks dir (created if missing, mode 0700) for this process, by flock on dir/LOCK. The
// file contains the process id for people. Errors: DirectoryInUse (naming the holder), IO,
// AccessDenied.
func LockDir(dir string) (*Lock, error) {
	const op = "lock data directory"
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, meta.E(op, fileKind(err), dir, err)
	}
	f, err := os.OpenFile(filepath.Join(dir, "LOCK"), os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, meta.E(op, fileKind(err), dir, err)
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		holder, rerr := os.ReadFile(f.Name())
		f.Close()
		if !errors.Is(err, unix.EWOULDBLOCK) {
			return nil, meta.E(op, meta.IO, dir, err)
		}
		who := "another process"
		if pid, perr := strconv.Atoi(strings.TrimSpace(string(holder))); rerr == nil && perr == nil {
			who = fmt.Sprintf("process %d", pid)
		}
		return nil, meta.E(op, meta.DirectoryInUse, dir, fmt.Errorf("%s holds it: stop that one first, or choose another directory", who))
	}
	err = f.Truncate(0)
	if err == nil {
		_, err = f.WriteAt([]byte(strconv.Itoa(os.Getpid())+"\n"), 0)
	}
	if err != nil {
		f.Close()
		return nil, meta.E(op, meta.IO, dir, err)
	}
	return &Lock{f}, nil
}

// Close releases the directory. The file LOCK stays: after a removal, two processes could hold
// locks on two files of the same name.
func (l *Lock) Close() error { return l.f.Close() }

func fileKind(err error) meta.Kind {
	switch {
	case errors.Is(err, os.ErrPermission):
		return meta.AccessDenied
	case errors.Is(err, unix.ENOSPC), errors.Is(err, unix.EDQUOT): // of the file system
		return meta.NoSpace
	}
	return meta.IO
}
