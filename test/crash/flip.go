package crash

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"

	"penstock.io/penstock/cmd/penstock/spawn"
	"penstock.io/penstock/test/load"
)

// flips changes one bit at a time on the disks of a stopped system, starts the system,
// and reads everything: each read must return the right byte or an error.
//
// flips counts how many changes were noticed. No read can notice a flip in bytes that no
// metadata refers to.
type flips struct {
	tried, refused, errors, unnoticed int
}

const (
	flipFiles = 40
	flipBytes = 150_000
)

// prepareFlips writes known files and stops the system.
func (s *system) prepareFlips(ctx context.Context) error {
	if err := s.start(ctx); err != nil {
		return err
	}
	b := make([]byte, flipBytes)
	for i := range flipFiles {
		load.Pattern(b, uint64(i), 0)
		if err := writeSynced(filepath.Join(s.mount, fmt.Sprintf("flip-%02d", i)), b); err != nil {
			return err
		}
	}
	return s.stop()
}

// flip makes n trials on files below folder (relative to the data directory) for which match
// is true.
func (s *system) flip(ctx context.Context, n int, seed uint64, folder string, match func(name string) bool) (flips, error) {
	var total flips
	r := rand.New(rand.NewPCG(seed, 97))
	for range n {
		files, err := filesBelow(filepath.Join(s.dir, folder), match)
		if err != nil {
			return total, err
		}
		if len(files) == 0 {
			return total, fmt.Errorf("no file below %s to damage", folder)
		}
		if err := s.flipOnce(ctx, r, files, &total); err != nil {
			return total, err
		}
	}
	return total, nil
}

func filesBelow(dir string, match func(string) bool) ([]string, error) {
	var files []string
	err := filepath.WalkDir(dir, func(path string, e fs.DirEntry, err error) error {
		if err != nil || !e.Type().IsRegular() {
			return err
		}
		info, err := e.Info()
		if err == nil && info.Size() > 0 && match(e.Name()) {
			files = append(files, path)
		}
		return err
	})
	return files, err
}

// flipOnce damages one bit in a copy of the data directory.
func (s *system) flipOnce(ctx context.Context, r *rand.Rand, files []string, total *flips) error {
	file := files[r.IntN(len(files))]
	saved := s.dir + ".saved"
	if err := copyTree(s.dir, saved); err != nil {
		return err
	}
	at, bit, err := flipBit(file, r)
	if err != nil {
		return err
	}
	total.tried++
	where := fmt.Sprintf("bit %d of byte %d of %s", bit, at, strings.TrimPrefix(file, s.dir+"/"))
	outcome := s.readFlipped(ctx, where, total)
	// The next trial begins with whole data.
	return errors.Join(outcome, s.end(), os.RemoveAll(s.dir), os.Rename(saved, s.dir))
}

// flipBit flips a random bit of a file, preferably among the non-zero bytes:
// pre-allocated files are mostly zeros.
func flipBit(file string, r *rand.Rand) (at int64, bit int, err error) {
	b, err := os.ReadFile(file)
	if err != nil {
		return 0, 0, err
	}
	for range 1000 {
		at = r.Int64N(int64(len(b)))
		if b[at] != 0 {
			break
		}
	}
	bit = r.IntN(8)
	b[at] ^= 1 << bit
	f, err := os.OpenFile(file, os.O_WRONLY, 0)
	if err != nil {
		return at, bit, err
	}
	_, werr := f.WriteAt(b[at:at+1], at)
	return at, bit, errors.Join(werr, f.Sync(), f.Close())
}

// readFlipped starts the damaged system and reads everything.
func (s *system) readFlipped(ctx context.Context, where string, total *flips) error {
	if err := s.start(ctx); errors.Is(err, spawn.ErrNotReady) {
		return fmt.Errorf("%s was flipped, and the start hangs instead of failing: %w", where, err)
	} else if err != nil {
		total.refused++ // and said so
		return nil
	}
	noticed := false
	for i := range flipFiles {
		b, err := os.ReadFile(filepath.Join(s.mount, fmt.Sprintf("flip-%02d", i)))
		if err != nil {
			noticed = true
			continue
		}
		if len(b) != flipBytes {
			return fmt.Errorf("DATA: %s was flipped, and file %d has %d bytes", where, i, len(b))
		}
		if err := load.CheckPattern(b, uint64(i), 0); err != nil {
			return fmt.Errorf("DATA: %s was flipped, and wrong bytes were read: %w", where, err)
		}
	}
	entries, err := os.ReadDir(s.mount)
	if err != nil {
		noticed = true
	} else if !noticed && len(entries) != flipFiles {
		return fmt.Errorf("DATA: %s was flipped, and the directory has %d names, want %d", where, len(entries), flipFiles)
	}
	if s.fsck(ctx) != nil {
		noticed = true
	}
	if noticed {
		total.errors++
	} else {
		total.unnoticed++
	}
	return nil
}

// copyTree copies files and folders with their modes, and leaves out sockets.
func copyTree(from, to string) error {
	return filepath.WalkDir(from, func(path string, e fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		rel, err := filepath.Rel(from, path)
		if err != nil {
			return err
		}
		info, err := e.Info()
		if err != nil {
			return err
		}
		switch {
		case e.IsDir():
			return os.MkdirAll(filepath.Join(to, rel), info.Mode().Perm())
		case e.Type().IsRegular():
			b, err := os.ReadFile(path)
			if err != nil {
				return err
			}
			return os.WriteFile(filepath.Join(to, rel), b, info.Mode().Perm())
		}
		return nil
	})
}
