package cluster

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"penstock.io/penstock/test/load"
)

// final checks the promises after all faults are healed: nothing acknowledged is lost, every
// mount sees the same, fsck is clean, every chunk has its copies, and no disk has a chunk without
// a reference.
func (s *Soak) final(ctx context.Context) error {
	for _, w := range s.workers {
		err := eventually(ctx, time.Minute, func(context.Context) error {
			if err := w.worker.Settle(); err != nil {
				return err
			}
			return w.worker.Verify()
		})
		if err != nil {
			return fmt.Errorf("at the end, %s: %w", w.name, err)
		}
	}
	r := rand.New(rand.NewPCG(s.Seed, 4000))
	for _, m := range s.Cluster.Mounts {
		for _, w := range s.workers {
			seen, ok := w.worker.(load.Watched)
			if !ok {
				continue
			}
			for range 4 {
				if err := seen.Look(filepath.Join(m.Path, w.name), r); err != nil {
					return fmt.Errorf("at the end, %s as %s sees it: %w", w.name, m.Name, err)
				}
			}
		}
	}
	s.Logf("every worker's files are right on every mount")
	began := time.Now()
	errs := make([]error, len(s.snaps))
	var wg sync.WaitGroup
	for i, k := range s.snaps {
		wg.Go(func() { errs[i] = k.final(ctx) })
	}
	wg.Wait()
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("at the end: %w", err)
	}
	s.Logf("snapshots and clones are right, and gone, %v after the end", time.Since(began).Round(time.Millisecond))
	if err := s.Cluster.Fsck(ctx, 2*time.Minute); err != nil {
		return fmt.Errorf("at the end: %w", err)
	}
	s.Logf("fsck is clean, %v after the end", time.Since(began).Round(time.Millisecond))
	if err := s.finishPacked(); err != nil {
		return fmt.Errorf("at the end: %w", err)
	}
	if err := eventually(ctx, s.Patience, s.Cluster.replicated); err != nil {
		return fmt.Errorf("at the end: %w", err)
	}
	s.Logf("all chunks have their copies and no disk has others, %v after the end", time.Since(began).Round(time.Millisecond))
	return nil
}

// finishPacked makes each mount finish the chunk of small files that the mount still has open in
// each volume: a mount keeps a chunk below 2 MiB open while the mount lives, though all files of
// the chunk may be gone, and such a chunk is no leak.
func (s *Soak) finishPacked() error {
	dirs := map[string]bool{}
	for _, w := range s.workers {
		dirs[filepath.Dir(filepath.Dir(w.name))] = true // the volume's
	}
	small := make([]byte, 60<<10)
	for _, m := range s.Cluster.Mounts {
		for volume := range dirs {
			dir, err := os.MkdirTemp(filepath.Join(m.Path, volume), "finish")
			if err != nil {
				return err
			}
			f, err := os.Open(dir)
			if err != nil {
				return err
			}
			// The first sync of a volume returns the error of earlier losses once.
			if err := unix.Syncfs(int(f.Fd())); err != nil && !errors.Is(err, unix.EIO) {
				return errors.Join(err, f.Close())
			}
			for i := range 50 {
				if err := os.WriteFile(filepath.Join(dir, fmt.Sprint(i)), small, 0o600); err != nil {
					return errors.Join(err, f.Close())
				}
			}
			err = unix.Syncfs(int(f.Fd()))
			if err := errors.Join(err, f.Close(), os.RemoveAll(dir)); err != nil {
				return err
			}
		}
	}
	return nil
}

// replicated demands, without asking the checker of the system itself, that each extent of each
// file lies on as many disks as its volume's policy wants, and that the disks hold nothing else.
func (c *Cluster) replicated(ctx context.Context) error {
	by, err := c.ByID(ctx)
	if err != nil {
		return err
	}
	status, err := c.Status(ctx)
	if err != nil {
		return err
	}
	var problems []string
	wanted := map[string][]*Member{} // chunk: members in the chunk's record
	for _, v := range status.Volumes {
		if v.Path == "" || v.Path == "/" {
			continue
		}
		var files []string
		err := filepath.WalkDir(filepath.Join(c.Mounts[0].Path, v.Path), func(path string, e fs.DirEntry, err error) error {
			if err == nil && e.Type().IsRegular() {
				files = append(files, path)
			}
			return err
		})
		if err != nil {
			return err
		}
		for _, f := range files {
			l, err := c.Locate(ctx, f)
			if err != nil {
				return err
			}
			for _, e := range l.Extents {
				if e.Chunk == "" {
					continue
				}
				if e.Sealed && len(e.Servers) != int(v.Replicas) {
					problems = append(problems, fmt.Sprintf("chunk %s of %s has servers %v, want %d of them", e.Chunk, f, e.Servers, v.Replicas))
				}
				for _, id := range e.Servers {
					m := by[id]
					if m == nil {
						problems = append(problems, fmt.Sprintf("chunk %s of %s lies on server %d, which is not there", e.Chunk, f, id))
						continue
					}
					if !slices.Contains(wanted[e.Chunk], m) {
						wanted[e.Chunk] = append(wanted[e.Chunk], m)
					}
				}
			}
		}
	}
	for _, m := range c.Chunks {
		have, err := m.stored()
		if err != nil {
			return err
		}
		for chunk := range have {
			// Volume 0 holds checkpoints; its chunks are in no file.
			if !strings.HasPrefix(chunk, "00000000") && !slices.Contains(wanted[chunk], m) {
				problems = append(problems, fmt.Sprintf("%s has chunk %s, to which no file refers", m.Name, chunk))
			}
		}
		for chunk, members := range wanted {
			if slices.Contains(members, m) && !have[chunk] {
				problems = append(problems, fmt.Sprintf("%s should have chunk %s, and has not", m.Name, chunk))
			}
		}
	}
	if len(problems) > 0 {
		slices.Sort(problems)
		return fmt.Errorf("DATA: %d problems of chunks:\n%s", len(problems), strings.Join(problems[:min(len(problems), 20)], "\n"))
	}
	return nil
}

// stored are the chunks on a member's disk.
func (m *Member) stored() (map[string]bool, error) {
	have := map[string]bool{}
	err := filepath.WalkDir(filepath.Join(m.disk.At, "d0", "chunks"), func(path string, e fs.DirEntry, err error) error {
		if errors.Is(err, os.ErrNotExist) {
			return nil // deleted meanwhile
		}
		if err == nil && !e.IsDir() {
			if id, ok := strings.CutSuffix(e.Name(), ".data"); ok {
				have[id] = true
			}
		}
		return err
	})
	return have, err
}
