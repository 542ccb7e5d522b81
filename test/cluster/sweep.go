package cluster

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"

	"penstock.io/penstock/test/disk"
)

// scratch is where clusters keep their disks and logs: directories whose file "alive" is locked
// as long as their test lives, however the test ends.
const (
	scratch = "/var/tmp"
	prefix  = "pcl-"
	alive   = "alive"
)

// claim makes a scratch directory; the file is to be closed when the directory
// is gone.
func claim() (dir string, held *os.File, err error) {
	if dir, err = os.MkdirTemp(scratch, prefix); err != nil {
		return "", nil, err
	}
	// Locked before the file has its name: otherwise a sweep could come in between.
	if held, err = os.CreateTemp(dir, alive); err != nil {
		return dir, nil, err
	}
	return dir, held, errors.Join(unix.Flock(int(held.Fd()), unix.LOCK_EX), os.Rename(held.Name(), filepath.Join(dir, alive)))
}

// sweep removes the remains of killed tests: mounts, loop devices, files.
func sweep(in string) error {
	dirs, err := filepath.Glob(filepath.Join(in, prefix+"*"))
	if err != nil {
		return err
	}
	var errs []error
	for _, dir := range dirs {
		if dead, err := abandoned(dir); err != nil || !dead {
			errs = append(errs, err)
			continue
		}
		errs = append(errs, disk.Discard(dir), os.RemoveAll(dir))
	}
	return errors.Join(errs...)
}

// abandoned: the directory's test is dead. A directory without the file is being made, unless the
// directory is old.
func abandoned(dir string) (bool, error) {
	f, err := os.Open(filepath.Join(dir, alive))
	if errors.Is(err, os.ErrNotExist) {
		st, err := os.Stat(dir)
		if errors.Is(err, os.ErrNotExist) {
			return false, nil // swept meanwhile
		}
		return err == nil && time.Since(st.ModTime()) > time.Hour, err
	}
	if err != nil {
		return false, err
	}
	defer f.Close()
	err = unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
	if errors.Is(err, unix.EWOULDBLOCK) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("locking %s: %w", f.Name(), err)
	}
	return true, nil
}
