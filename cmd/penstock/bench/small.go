package bench

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

const (
	smallFiles   = 10_000
	smallBytes   = 100 << 10
	smallDirs    = 100
	smallWriters = 4
)

// smallGroup makes many files the size of an image and reads the files in random order. File i
// is in directory i mod 100 of its set; each writing row makes its own set.
func smallGroup() group {
	read := func(readers int) func(*side) (float64, error) {
		return func(s *side) (float64, error) { return s.readSmall(readers) }
	}
	return group{name: "small", rows: []row{
		{name: "small-create-1", title: "10,000 files of 100 KiB created, 1 writer, syncfs", unit: PerSecond,
			run: func(s *side) (float64, error) { return s.createSmall("one", 1) }},
		{name: "small-create-4", title: "10,000 files of 100 KiB created, 4 writers, syncfs", unit: PerSecond,
			run: func(s *side) (float64, error) { return s.createSmall("four", smallWriters) }},
		{name: "small-read-cold-1", title: "read in random order, 1 reader, cold", unit: PerSecond, cold: true, run: read(1)},
		{name: "small-read-warm-1", title: "read in random order, 1 reader, warm", unit: PerSecond,
			before: func(s *side) error { _, err := s.readSmall(1); return err }, run: read(1)},
		{name: "small-read-cold-4", title: "read in random order, 4 readers, cold", unit: PerSecond, cold: true, run: read(4)},
		{name: "small-read-warm-4", title: "read in random order, 4 readers, warm", unit: PerSecond,
			before: func(s *side) error { _, err := s.readSmall(1); return err }, run: read(4)},
	}, prepare: func(s *side) error {
		_, err := s.createSmall("read", smallWriters)
		return err
	}, finish: func(s *side) error {
		for _, set := range []string{"one", "four", "read"} {
			for _, p := range s.smallPaths(set) {
				// On an immutable volume the files can't be truncated, and stay until the end.
				err := os.Truncate(p.String(), 0)
				if err != nil && !errors.Is(err, os.ErrNotExist) && !errors.Is(err, os.ErrPermission) {
					return err
				}
			}
		}
		return nil
	}}
}

func (s *side) smallPaths(set string) []cpath {
	paths := make([]cpath, s.cfg.scaled(smallFiles))
	for i := range paths {
		paths[i] = newPath(filepath.Join(s.dir, set, fmt.Sprintf("d%02d", i%smallDirs), fmt.Sprintf("image-%06d.jpg", i)))
	}
	return paths
}

func (s *side) createSmall(set string, writers int) (float64, error) {
	for d := range smallDirs {
		if err := os.MkdirAll(filepath.Join(s.dir, set, fmt.Sprintf("d%02d", d)), 0o755); err != nil {
			return 0, err
		}
	}
	paths := s.smallPaths(set)
	buffers := make([][]byte, writers)
	for w := range buffers {
		buffers[w] = newBuffer(smallBytes)
	}
	err := parallel(writers, len(paths), func(w, i int) error {
		fd, err := rawOpen(paths[i], unix.O_WRONLY|unix.O_CREAT|unix.O_EXCL, 0o644)
		if err != nil {
			return err
		}
		stamp(buffers[w], mix(s.seed, i+1), 0)
		if err := writeFull(fd, buffers[w]); err != nil {
			return fmt.Errorf("%s: %w", paths[i], err)
		}
		return rawClose(fd)
	})
	if err != nil {
		return 0, err
	}
	return float64(len(paths)), syncAll(s.dir)
}

func (s *side) readSmall(readers int) (float64, error) {
	paths := s.smallPaths("read")
	order := rand.New(rand.NewPCG(s.seed, 2)).Perm(len(paths))
	buffers := make([][]byte, readers)
	for w := range buffers {
		buffers[w] = make([]byte, smallBytes+blockSize)
	}
	err := parallel(readers, len(paths), func(w, at int) error {
		i := order[at]
		fd, err := rawOpen(paths[i], unix.O_RDONLY, 0)
		if err != nil {
			return err
		}
		n, err := readFull(fd, buffers[w])
		if err != nil {
			return fmt.Errorf("%s: %w", paths[i], err)
		}
		if n != smallBytes {
			return fmt.Errorf("%s has %d bytes, %d were written: %w", paths[i], n, smallBytes, errMismatch)
		}
		if err := check(buffers[w][:n], mix(s.seed, i+1), 0); err != nil {
			return fmt.Errorf("%s: %w", paths[i], err)
		}
		return rawClose(fd)
	})
	return float64(len(paths)), err
}
