package crash

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"time"

	"penstock.io/penstock/cmd/penstock/spawn"
)

// secondMount runs `penstock mount` in a separate process.
func (s *system) secondMount(ctx context.Context, at string) (end func() error, err error) {
	if err := os.Mkdir(at, 0o755); err != nil {
		return nil, err
	}
	cmd := exec.Command(s.binary, "mount", "--dir", s.dir, "/", at)
	cmd.Env = append(os.Environ(), s.env...)
	cmd.Stdout, cmd.Stderr = s.log, s.log
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	done := make(chan error, 1)
	go func() { done <- cmd.Wait() }()
	end = func() error {
		_ = cmd.Process.Signal(syscall.SIGTERM)
		var err error
		select {
		case err = <-done:
		case <-time.After(90 * time.Second):
			_ = cmd.Process.Kill()
			err = errors.Join(errors.New("the second mount did not stop within 90 s"), <-done)
		}
		return errors.Join(err, spawn.Unmount(at), os.Remove(at))
	}
	for deadline := time.Now().Add(90 * time.Second); ; time.Sleep(5 * time.Millisecond) {
		select {
		case err := <-done:
			return nil, fmt.Errorf("penstock mount ended: %w", err)
		case <-ctx.Done():
			return nil, errors.Join(ctx.Err(), end())
		default:
		}
		if spawn.Mounted(at) {
			return end, nil
		}
		if time.Now().After(deadline) {
			return nil, errors.Join(errors.New("the second mount does not serve"), end())
		}
	}
}

// twoMounts repeatedly makes a change on one mount and checks the other mount at once.
func (s *system) twoMounts(ctx context.Context, operations int, seed uint64) error {
	if err := s.start(ctx); err != nil {
		return err
	}
	other := s.mount + "2"
	end, err := s.secondMount(ctx, other)
	if err != nil {
		return err
	}
	if err := crossed(s.mount, other, operations, seed); err != nil {
		return errors.Join(err, end())
	}
	return errors.Join(end(), s.fsck(ctx), s.stop())
}

// crossed does one operation after the other on either mount, and after each operation
// compares the files on the other mount.
func crossed(a, b string, operations int, seed uint64) error {
	r := rand.New(rand.NewPCG(seed, 96))
	roots := []string{a, b}
	contents := map[string]string{}
	for i := range operations {
		turn := r.IntN(2)
		here, there := roots[turn], roots[1-turn]
		name := fmt.Sprintf("crossed-%d", r.IntN(8))
		to := name
		old, exists := contents[name]
		var err error
		switch k := r.IntN(4); {
		case !exists || k == 0:
			contents[name] = fmt.Sprintf("written by %d as operation %d", turn, i)
			err = os.WriteFile(filepath.Join(here, name), []byte(contents[name]), 0o644)
		case k == 1:
			delete(contents, name)
			err = os.Remove(filepath.Join(here, name))
		case k == 2:
			to = fmt.Sprintf("crossed-%d", r.IntN(8))
			delete(contents, name)
			contents[to] = old
			err = os.Rename(filepath.Join(here, name), filepath.Join(here, to))
		default:
			contents[name] = old + "+"
			var f *os.File
			if f, err = os.OpenFile(filepath.Join(here, name), os.O_WRONLY|os.O_APPEND, 0); err == nil {
				_, werr := f.WriteString("+")
				err = errors.Join(werr, f.Close())
			}
		}
		if err != nil {
			return fmt.Errorf("operation %d on mount %d: %w", i, turn, err)
		}
		for _, n := range []string{name, to} {
			want, exists := contents[n]
			got, err := os.ReadFile(filepath.Join(there, n))
			switch {
			case !exists && !errors.Is(err, os.ErrNotExist):
				return fmt.Errorf("DATA: operation %d: %s was removed on mount %d, and mount %d reads %q, %v", i, n, turn, 1-turn, got, err)
			case exists && (err != nil || string(got) != want):
				return fmt.Errorf("DATA: operation %d: %s holds %q since mount %d wrote it, and mount %d reads %q, %v", i, n, want, turn, 1-turn, got, err)
			}
		}
	}
	return nil
}
