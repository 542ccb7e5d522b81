// Package data owns the tests that give a real system many files to keep and measure the system's
// use of resources: space that deleted files give back, etcd's database through many creates and
// deletes, and the state restored from checkpoints. The system is the built binary with its own
// processes and a real mount.
//
// In go test the amounts are small; PENSTOCK_DATA=full sets the amounts that the project promises
// (100,000 small files, a million inodes).
package data

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"io/fs"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"penstock.io/penstock/cmd/penstock/spawn"
	"penstock.io/penstock/test/load"
)

// system is a penstock with its data directory and mount point.
type system struct {
	binary  string
	dir     string
	mount   string
	log     io.Writer
	process *spawn.Process
	// compactions counts the compactions in the log up to the last look.
	compactions int
}

func (s *system) start(ctx context.Context) error {
	p, err := spawn.Start(ctx, spawn.Config{Binary: s.binary, Dir: s.dir, Mount: s.mount, Log: s.log})
	s.process = p
	return err
}

func (s *system) stop() error {
	err := s.process.Stop(time.Minute)
	s.process = nil
	return err
}

func (s *system) kill() { s.process.Kill(); s.process = nil }

// end leaves neither process nor mount.
func (s *system) end() error {
	if s.process == nil {
		return spawn.Unmount(s.mount)
	}
	return s.process.End()
}

func (s *system) run(ctx context.Context, args ...string) ([]byte, error) {
	out, err := exec.CommandContext(ctx, s.binary, args...).CombinedOutput()
	if err != nil {
		return nil, fmt.Errorf("penstock %s: %w\n%s", strings.Join(args, " "), err, out)
	}
	return out, nil
}

func (s *system) fsck(ctx context.Context) error {
	_, err := s.run(ctx, "fsck", "--dir", s.dir)
	return err
}

// counters are the numbers of the metadata server in penstock status.
func (s *system) counters(ctx context.Context) (map[string]any, error) {
	out, err := s.run(ctx, "status", "--dir", s.dir, "--output", "json")
	if err != nil {
		return nil, err
	}
	var v struct {
		Meta map[string]any `json:"meta"`
	}
	err = json.Unmarshal(out, &v)
	return v.Meta, err
}

// diskUse is the size of the regular files below a folder, in bytes of blocks.
func diskUse(dir string, match func(string) bool) (int64, error) {
	var sum int64
	err := filepath.WalkDir(dir, func(path string, e fs.DirEntry, err error) error {
		if os.IsNotExist(err) {
			return nil // deleted while we look
		}
		if err != nil || !e.Type().IsRegular() || match != nil && !match(path) {
			return err
		}
		var st unix.Stat_t
		if unix.Lstat(path, &st) == nil {
			sum += st.Blocks * 512
		}
		return nil
	})
	return sum, err
}

// resident is the memory of the process in bytes.
func (s *system) resident() int64 {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/statm", s.process.PID()))
	if err != nil {
		return 0
	}
	f := strings.Fields(string(b))
	n, _ := strconv.ParseInt(f[1], 10, 64)
	return n * int64(os.Getpagesize())
}

// files is a set of small files whose contents follow from their numbers.
type files struct {
	dir   string
	count int
	size  int
}

const perDir = 1000

func (f files) path(i int) string {
	return filepath.Join(f.dir, fmt.Sprintf("d%03d", i/perDir), fmt.Sprintf("f%06d", i))
}

func (f files) content(i int) []byte {
	b := make([]byte, f.size)
	r := rand.New(rand.NewPCG(uint64(i), 7))
	for j := 0; j+8 <= len(b); j += 8 {
		v := r.Uint64()
		for k := range 8 {
			b[j+k] = byte(v >> (8 * k))
		}
	}
	return b
}

func (f files) create() error {
	for i := range f.count {
		if i%perDir == 0 {
			if err := os.Mkdir(filepath.Dir(f.path(i)), 0o755); err != nil {
				return err
			}
		}
		if err := os.WriteFile(f.path(i), f.content(i), 0o644); err != nil {
			return err
		}
	}
	return load.SyncAll(f.dir)
}

// stays says which files are kept: every tenth.
func stays(i int) bool { return i%10 == 3 }

// thin deletes all files but the files to keep.
func (f files) thin() error {
	for i := range f.count {
		if !stays(i) {
			if err := os.Remove(f.path(i)); err != nil {
				return err
			}
		}
	}
	return load.SyncAll(f.dir)
}

// verify reads every kept file, and looks for the deleted files.
func (f files) verify() error {
	for i := range f.count {
		b, err := os.ReadFile(f.path(i))
		if !stays(i) {
			if !os.IsNotExist(err) {
				return fmt.Errorf("DATA: %s was deleted, and reading it says %v", f.path(i), err)
			}
			continue
		}
		if err != nil {
			return err
		}
		if string(b) != string(f.content(i)) {
			return fmt.Errorf("DATA: %s has other bytes than were written", f.path(i))
		}
	}
	return nil
}
