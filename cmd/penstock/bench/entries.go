package bench

import (
	"fmt"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

const (
	emptyFiles = 20_000
	listed     = 100_000
	statPasses = 10 // over the files, for a row long enough to time
)

// entriesGroup makes, stats and removes empty files; each thread has its own directory, as
// jobs do. The kernel's dentries and inodes are dropped before the first stat; the second stat
// finds them in memory.
func entriesGroup(threads int) group {
	row1 := func(name, what string, run func(*side) (float64, error)) row {
		plural := "s"
		if threads == 1 {
			plural = ""
		}
		return row{name: fmt.Sprintf("%s-%d", name, threads), title: fmt.Sprintf("%s, %d thread%s", what, threads, plural), unit: PerSecond, run: run}
	}
	stat := func(s *side) (float64, error) {
		paths := s.emptyPaths(threads)
		stats := make([]unix.Stat_t, threads)
		err := parallel(threads, len(paths), func(w, i int) error {
			if err := rawStat(paths[i], &stats[w]); err != nil {
				return err
			}
			if stats[w].Size != 0 || stats[w].Mode != unix.S_IFREG|0o644 {
				return fmt.Errorf("%s: size %d, mode %o: %w", paths[i], stats[w].Size, stats[w].Mode, errMismatch)
			}
			return nil
		})
		return float64(len(paths)), err
	}
	first := row1("stat-first", "stat of 20,000 empty files, first", stat)
	first.dropEntries = true
	again := row1("stat-again", "stat of the same files, again", passes(statPasses, stat))
	again.before = func(s *side) error { _, err := stat(s); return err }
	return group{name: fmt.Sprintf("entries-%d", threads), prepare: func(s *side) error {
		for t := range threads {
			if err := os.Mkdir(filepath.Join(s.dir, fmt.Sprintf("t%d", t)), 0o755); err != nil {
				return err
			}
		}
		return nil
	}, rows: []row{
		row1("create", "20,000 empty files created", func(s *side) (float64, error) {
			paths := s.emptyPaths(threads)
			err := parallel(threads, len(paths), func(_, i int) error {
				fd, err := rawOpen(paths[i], unix.O_WRONLY|unix.O_CREAT|unix.O_EXCL, 0o644)
				if err != nil {
					return err
				}
				return rawClose(fd)
			})
			return float64(len(paths)), err
		}),
		first,
		again,
		removing(row1("unlink", "unlink of 20,000 empty files", func(s *side) (float64, error) {
			paths := s.emptyPaths(threads)
			err := parallel(threads, len(paths), func(_, i int) error { return rawUnlink(paths[i]) })
			return float64(len(paths)), err
		})),
	}}
}

func removing(r row) row {
	r.removes = true
	return r
}

func (s *side) emptyPaths(threads int) []cpath {
	paths := make([]cpath, s.cfg.scaled(emptyFiles))
	for i := range paths {
		paths[i] = newPath(filepath.Join(s.dir, fmt.Sprintf("t%d", i%threads), fmt.Sprintf("file-%07d", i)))
	}
	return paths
}

// listGroup lists a single directory of many entries with their attributes, as ls -l does.
func listGroup() group {
	list := func(s *side) (float64, error) {
		want := s.cfg.scaled(listed)
		d, err := os.Open(filepath.Join(s.dir, "list"))
		if err != nil {
			return 0, err
		}
		defer d.Close()
		buf := make([]byte, 64<<10)
		var st unix.Stat_t
		seen := 0
		for {
			n, err := unix.Getdents(int(d.Fd()), buf)
			if err != nil {
				return 0, fmt.Errorf("getdents: %w", err)
			}
			if n == 0 {
				break
			}
			_, _, names := unix.ParseDirent(buf[:n], -1, nil)
			for _, name := range names {
				if err := unix.Fstatat(int(d.Fd()), name, &st, unix.AT_SYMLINK_NOFOLLOW); err != nil {
					return 0, fmt.Errorf("stat %s: %w", name, err)
				}
				seen++
			}
		}
		if seen != want {
			return 0, fmt.Errorf("%d entries listed, %d were made: %w", seen, want, errMismatch)
		}
		return float64(seen), nil
	}
	return group{name: "list", once: true, prepare: func(s *side) error {
		dir := filepath.Join(s.dir, "list")
		if err := os.Mkdir(dir, 0o755); err != nil {
			return err
		}
		return parallel(8, s.cfg.scaled(listed), func(_, i int) error {
			fd, err := rawOpen(newPath(filepath.Join(dir, fmt.Sprintf("entry-%07d", i))), unix.O_WRONLY|unix.O_CREAT|unix.O_EXCL, 0o644)
			if err != nil {
				return err
			}
			return rawClose(fd)
		})
	}, rows: []row{
		{name: "readdir-first", title: "readdir with attributes of 100,000 entries, first", unit: PerSecond, dropEntries: true, run: list},
		{name: "readdir-again", title: "readdir with attributes of 100,000 entries, again", unit: PerSecond,
			before: func(s *side) error { _, err := list(s); return err }, run: list},
	}}
}
