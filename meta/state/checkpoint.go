package state

import (
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"

	"github.com/cockroachdb/pebble/v2/vfs"
	"golang.org/x/sys/unix"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/journal"
)

// fileSum remembers a table file's sum: such a file never changes, and its name
// is never reused within one store.
type fileSum struct {
	size uint64
	sum  [16]byte
}

// lockFile is made by whoever opens the store.
const lockFile = "LOCK"

func isNoSpace(err error) bool { return errors.Is(err, unix.ENOSPC) || errors.Is(err, unix.EDQUOT) }

// Checkpoint flushes, then makes dir (which must not exist) a copy of the store by hard links,
// and returns the copy's position and its files in dir/store. The position may be later than
// at the call, never earlier. Checkpoint reads only the files that are new since this Store's
// last checkpoint. The caller removes dir when the files are stored elsewhere. Apply continues
// meanwhile. Errors: Exists, IO, NoSpace, Corrupt.
func (s *Store) Checkpoint(dir string, shared *Shared) (journal.Position, []journal.File, error) {
	const op = "checkpoint state"
	fail := func(err error) (journal.Position, []journal.File, error) {
		return journal.Position{}, nil, ioError(op, dir, err)
	}
	if err := s.link(op, dir); err != nil {
		return journal.Position{}, nil, err
	}
	// Only the copy has its position: a flush may have come in between. Opening the copy also
	// proves that it can be opened.
	c, err := open(dir, shared, readOnly)
	if err != nil {
		return fail(err)
	}
	at := c.applied
	if err := c.closeDB(); err != nil {
		return fail(err)
	}
	files, err := s.list(shared.fs, filepath.Join(dir, storeDir))
	if err != nil {
		return fail(err)
	}
	return at, files, nil
}

// Copy flushes, then makes dir (which must not exist) a copy of the store by hard links, for
// Rebase. It reads no table file, so its time does not depend on the size of the store. The
// copy's position may be later than at the call, never earlier. Apply continues meanwhile.
// Errors: Exists, IO, NoSpace.
func (s *Store) Copy(dir string) error { return s.link("copy state", dir) }

func (s *Store) link(op, dir string) error {
	err := os.Mkdir(dir, 0o700)
	if errors.Is(err, os.ErrExist) {
		return meta.E(op, meta.Exists, dir, nil)
	}
	if err == nil {
		err = s.db.Flush()
	}
	if err == nil {
		err = s.db.Checkpoint(filepath.Join(dir, storeDir))
	}
	return ioError(op, dir, err)
}

// list returns the files of a checkpoint with their sums.
func (s *Store) list(fs vfs.FS, dir string) ([]journal.File, error) {
	names, err := os.ReadDir(dir)
	if err != nil {
		return nil, err
	}
	s.sumsMu.Lock()
	defer s.sumsMu.Unlock()
	old, sums := s.sums, map[string]fileSum{}
	var files []journal.File
	for _, n := range names {
		if !n.Type().IsRegular() || n.Name() == lockFile {
			continue
		}
		fi, err := n.Info()
		if err != nil {
			return nil, err
		}
		f := journal.File{Name: n.Name(), Size: uint64(fi.Size())}
		table := strings.HasSuffix(f.Name, ".sst")
		if known, ok := old[f.Name]; table && ok && known.size == f.Size {
			f.Sum = known.sum
		} else if f.Sum, err = sumFile(fs, filepath.Join(dir, f.Name)); err != nil {
			return nil, err
		}
		if table {
			sums[f.Name] = fileSum{f.Size, f.Sum}
		}
		files = append(files, f)
	}
	s.sums = sums
	return files, nil
}

func sumFile(fs vfs.FS, name string) (sum [16]byte, err error) {
	f, err := fs.Open(name)
	if err != nil {
		return sum, err
	}
	defer f.Close()
	h := sha256.New()
	if _, err := io.Copy(h, f); err != nil {
		return sum, err
	}
	copy(sum[:], h.Sum(nil))
	return sum, nil
}

// Restore makes dir (which must not exist, or be empty) the state in a checkpoint's files; get
// opens a file. Restore checks every file against its sum. dir appears complete or not at all.
// The caller opens it and checks that Applied is the checkpoint's position. Errors: Exists,
// Corrupt, IO, NoSpace, and get's.
func Restore(dir string, v meta.VolumeID, files []journal.File, get func(journal.File) (io.ReadCloser, error)) (err error) {
	const op = "restore state"
	tmp := dir + ".restoring"
	if err := os.RemoveAll(tmp); err != nil {
		return ioError(op, dir, err)
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, os.RemoveAll(tmp))
		}
	}()
	if err := os.MkdirAll(filepath.Join(tmp, storeDir), 0o700); err != nil {
		return ioError(op, dir, err)
	}
	for _, f := range files {
		if f.Name != filepath.Base(f.Name) || strings.HasPrefix(f.Name, ".") {
			return meta.E(op, meta.Corrupt, dir, fmt.Errorf("a checkpoint's file is named %q", f.Name))
		}
		if err := restoreFile(filepath.Join(tmp, storeDir, f.Name), f, get); err != nil {
			return ioError(op, f.Name, err)
		}
	}
	if err := syncDir(filepath.Join(tmp, storeDir)); err != nil {
		return ioError(op, dir, err)
	}
	if err := writeFormat(tmp, v); err != nil {
		return err
	}
	return Install(tmp, dir)
}

// Install renames a complete state directory to its place. Errors: Exists, IO.
func Install(from, dir string) error {
	const op = "restore state"
	if err := os.Rename(from, dir); err != nil {
		if errors.Is(err, unix.ENOTEMPTY) || errors.Is(err, unix.EEXIST) {
			return meta.E(op, meta.Exists, dir, nil)
		}
		return ioError(op, dir, err)
	}
	return ioError(op, dir, syncDir(filepath.Dir(dir)))
}

func restoreFile(name string, f journal.File, get func(journal.File) (io.ReadCloser, error)) error {
	r, err := get(f)
	if err != nil {
		return err
	}
	defer r.Close()
	w, err := os.OpenFile(name, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	h := sha256.New()
	// One byte more than the size suffices to detect a longer file.
	n, err := io.Copy(io.MultiWriter(w, h), io.LimitReader(r, int64(f.Size)+1))
	if err == nil && (uint64(n) != f.Size || [16]byte(h.Sum(nil)[:16]) != f.Sum) {
		err = meta.E("restore state", meta.Corrupt, f.Name, fmt.Errorf("%d bytes that do not match the checkpoint's sum", n))
	}
	if err == nil {
		err = w.Sync()
	}
	return errors.Join(err, w.Close())
}
