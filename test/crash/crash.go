// Package crash owns the tests that break a real system from outside: SIGKILL at any
// moment, power cuts of either disk, full disks, failing disks, flipped bits. The system
// is the built binary with its own processes, a real mount and real file systems on loop
// devices. A load (load.go) that remembers every acknowledgement checks the state
// afterwards, and so does penstock fsck.
//
// Each test runs a few rounds in go test, and many with -rounds. Positive controls
// (-controls) switch one mechanism of the system off and demand that the guarding test
// fails.
package crash

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"sync/atomic"
	"time"

	"penstock.io/penstock/cmd/penstock/spawn"
	"penstock.io/penstock/test/disk"
	"penstock.io/penstock/test/load"
)

// ControlEnv names the environment variable that switches a mechanism of penstock up off.
const ControlEnv = "PENSTOCK_CONTROL"

// system is a penstock up with its data directory and mount point. A test may start and
// kill the system many times.
type system struct {
	binary      string
	dir         string // data directory
	mount       string
	env         []string
	log         io.Writer
	process     *spawn.Process
	compression string       // of the root volume; empty: unchanged
	verified    func() error // called after each round of kills, if set
	killed      atomic.Bool  // on purpose: errors of the load are expected from then on
}

func (s *system) start(ctx context.Context) error {
	s.killed.Store(false)
	p, err := spawn.Start(ctx, spawn.Config{Binary: s.binary, Dir: s.dir, Mount: s.mount, Env: s.env, Log: s.log})
	if err != nil {
		return err
	}
	s.process = p
	if s.compression == "" {
		return nil
	}
	out, err := exec.CommandContext(ctx, s.binary, "volume", "set", "root", "--compression", s.compression, "--dir", s.dir).CombinedOutput()
	if err != nil {
		return fmt.Errorf("penstock volume set: %w\n%s", err, out)
	}
	return nil
}

// compressed tells how many chunks of the root volume are.
func (s *system) compressed(ctx context.Context) (uint64, error) {
	out, err := exec.CommandContext(ctx, s.binary, "volume", "show", "root", "--output", "json", "--dir", s.dir).Output()
	if err != nil {
		return 0, fmt.Errorf("penstock volume show: %w", err)
	}
	var v struct {
		Data struct {
			Stored struct {
				Compressed uint64 `json:"compressed"`
			} `json:"stored"`
		} `json:"data"`
	}
	err = json.Unmarshal(out, &v)
	return v.Data.Stored.Compressed, err
}

func (s *system) kill() {
	s.killed.Store(true)
	s.process.Kill()
}

func (s *system) stop() error {
	if s.process == nil {
		return nil
	}
	err := s.process.Stop(time.Minute)
	s.process = nil
	return err
}

// end leaves neither process nor mount, however the test went.
func (s *system) end() error {
	if s.process == nil {
		return spawn.Unmount(s.mount)
	}
	err := s.process.End()
	s.process = nil
	return err
}

// fsck runs penstock fsck on the running system.
func (s *system) fsck(ctx context.Context) error {
	out, err := exec.CommandContext(ctx, s.binary, "fsck", "--dir", s.dir).CombinedOutput()
	if err != nil {
		return fmt.Errorf("penstock fsck: %w\n%s", err, out)
	}
	return nil
}

// under runs a load until the time is over, then calls blow, which must make
// the mount fail, and waits for the load. Errors of the load before the blow
// are failures.
func (s *system) under(ctx context.Context, l *load.Load, d time.Duration, blow func() error) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	done := make(chan error, 1)
	go func() {
		err := l.Run(ctx)
		if err != nil && !s.killed.Load() {
			err = fmt.Errorf("before anything was broken (%s): %w", s.process.State(), err)
		} else {
			err = nil // the injected fault explains the error
		}
		done <- err
	}()
	var early error
	select {
	case early = <-done:
		done <- nil
	case <-time.After(d):
	}
	err := blow()
	cancel()
	select {
	case late := <-done:
		return errors.Join(early, late, err)
	case <-time.After(2 * time.Minute):
		return errors.Join(early, err, errors.New("the load hangs on a mount whose process was killed"))
	}
}

// killRounds loads, kills, starts and verifies.
func (s *system) killRounds(ctx context.Context, rounds int, seed uint64, logf func(string, ...any)) error {
	if err := s.start(ctx); err != nil {
		return err
	}
	l := load.New(s.mount, load.Options{Seed: seed, Over: s.killed.Load})
	if err := l.Prepare(s.mount); err != nil {
		return err
	}
	kept := snapshots{s: s}
	r := rand.New(rand.NewPCG(seed, 99))
	for round := range rounds {
		d := time.Duration(20+r.IntN(1500)) * time.Millisecond
		if err := s.under(ctx, l, d, func() error {
			end, err := kept.take(ctx, round)
			s.kill()
			end()
			return err
		}); err != nil {
			return fmt.Errorf("round %d: %w", round, err)
		}
		if err := s.start(ctx); err != nil {
			return fmt.Errorf("round %d, starting after SIGKILL: %w", round, err)
		}
		logf("round %d: killed after %v, serving again after %v", round, d, s.process.StartedIn.Round(time.Millisecond))
		if err := errors.Join(l.Verify(), kept.verify(), s.fsck(ctx)); err != nil {
			return fmt.Errorf("round %d, killed after %v: %w", round, d, err)
		}
		if s.verified != nil {
			if err := s.verified(); err != nil {
				return fmt.Errorf("round %d: %w", round, err)
			}
		}
	}
	return s.stop()
}

// powerTarget selects the disk that loses power.
type powerTarget int

const (
	cutBoth powerTarget = iota
	cutMeta
	cutChunks
)

func (t powerTarget) String() string {
	return [...]string{"both disks", "the meta disk", "the chunk disk"}[t]
}

// machine is a system on two loop disks: data directory (etcd, state) and
// chunks.
type machine struct {
	system
	meta   *disk.Disk
	chunks *disk.Disk
}

// newMachine makes the disks below scratch. A first start makes the data directory; then
// the chunks move to a separate disk, by the steps that an operator would take.
func newMachine(ctx context.Context, scratch, binary string, metaBytes, chunkBytes int64, log io.Writer) (*machine, error) {
	m := &machine{system: system{binary: binary, dir: filepath.Join(scratch, "meta", "data"), mount: filepath.Join(scratch, "mnt"), log: log}}
	if err := os.Mkdir(m.mount, 0o755); err != nil {
		return nil, err
	}
	var err error
	if m.meta, err = disk.New(filepath.Join(scratch, "meta.img"), filepath.Join(scratch, "meta"), metaBytes); err != nil {
		return m, err
	}
	if err := os.Mkdir(m.dir, 0o700); err != nil {
		return m, err
	}
	if err := m.start(ctx); err != nil {
		return m, err
	}
	if err := m.stop(); err != nil {
		return m, err
	}
	if m.chunks, err = disk.New(filepath.Join(scratch, "chunks.img"), filepath.Join(scratch, "chunks"), chunkBytes); err != nil {
		return m, err
	}
	folder := filepath.Join(m.dir, "chunks")
	err = errors.Join(copyTree(folder, m.chunks.At), m.chunks.Unmount(), os.RemoveAll(folder), os.Mkdir(folder, 0o700))
	if err != nil {
		return m, err
	}
	m.chunks.At = folder
	return m, m.chunks.Mount()
}

// end leaves no process, mount or loop device.
func (m *machine) end() error {
	err := m.system.end()
	if m.chunks != nil {
		err = errors.Join(err, m.chunks.Remove())
	}
	if m.meta != nil {
		err = errors.Join(err, m.meta.Remove())
	}
	return err
}

// cut takes the power away: from then on no byte reaches the disks. Then the processes
// end, and the disks are mounted again as after a reboot.
func (m *machine) cut(target powerTarget) error {
	m.killed.Store(true)
	var errs []error
	if target != cutChunks {
		errs = append(errs, m.meta.Cut())
	}
	if target != cutMeta {
		errs = append(errs, m.chunks.Cut())
	}
	// For a moment the processes see their disks fail.
	time.Sleep(20 * time.Millisecond)
	m.kill()
	return errors.Join(errs...)
}

// reboot mounts the disks again, with an empty page cache.
func (m *machine) reboot() error {
	if err := spawn.Unmount(m.mount); err != nil {
		return err
	}
	if err := errors.Join(m.chunks.Unmount(), m.meta.Unmount()); err != nil {
		return err
	}
	if err := m.meta.Mount(); err != nil {
		return err
	}
	return m.chunks.Mount()
}

// powerRounds loads, cuts, reboots and verifies.
func (m *machine) powerRounds(ctx context.Context, rounds int, seed uint64, logf func(string, ...any)) error {
	if err := m.start(ctx); err != nil {
		return err
	}
	l := load.New(m.mount, load.Options{Seed: seed, Over: m.killed.Load})
	if err := l.Prepare(m.mount); err != nil {
		return err
	}
	kept := snapshots{s: &m.system}
	r := rand.New(rand.NewPCG(seed, 98))
	for round := range rounds {
		target := powerTarget(round % 3)
		d := time.Duration(20+r.IntN(1500)) * time.Millisecond
		if err := m.under(ctx, l, d, func() error {
			end, err := kept.take(ctx, round)
			err = errors.Join(err, m.cut(target))
			end()
			return err
		}); err != nil {
			return fmt.Errorf("round %d, %v: %w", round, target, err)
		}
		if err := m.reboot(); err != nil {
			return err
		}
		if err := m.start(ctx); err != nil {
			return fmt.Errorf("round %d, starting after a power cut of %v: %w", round, target, err)
		}
		logf("round %d: power cut of %v after %v, serving again after %v", round, target, d, m.process.StartedIn.Round(time.Millisecond))
		if err := errors.Join(l.Verify(), kept.verify(), m.fsck(ctx)); err != nil {
			return fmt.Errorf("round %d, power cut of %v after %v: %w", round, target, d, err)
		}
	}
	return m.stop()
}
