package crash

import (
	"context"
	"errors"
	"fmt"
	"os/exec"
	"strconv"
	"sync"
	"syscall"
	"time"

	"penstock.io/penstock/test/load"
)

// failingSyncs makes fsync and fdatasync fail for a while, for the whole process or only
// for files of the chunk disk, then cuts the power. All bytes acknowledged as synced must
// be there, above all the bytes acknowledged after a sync had failed. The process may end
// when its journal's disk fails, and must not end when a chunk disk fails.
func (m *machine) failingSyncs(ctx context.Context, rounds int, chunksOnly bool, seed uint64, logf func(string, ...any)) error {
	if err := m.start(ctx); err != nil {
		return err
	}
	l := load.New(m.mount, load.Options{Seed: seed, Over: m.killed.Load})
	if err := l.Prepare(m.mount); err != nil {
		return err
	}
	for round := range rounds {
		told, err := m.failSyncsUnder(ctx, l, chunksOnly)
		if err != nil {
			return fmt.Errorf("round %d: %w", round, err)
		}
		if err := m.reboot(); err != nil {
			return err
		}
		if err := m.start(ctx); err != nil {
			return fmt.Errorf("round %d, after failing syncs: %w", round, err)
		}
		logf("round %d: the load was told: %v", round, told)
		if err := errors.Join(l.Verify(), m.fsck(ctx)); err != nil {
			return fmt.Errorf("round %d, after failing syncs and a power cut: %w", round, err)
		}
		if told == nil {
			return fmt.Errorf("DATA: round %d: syncs failed below, and nobody above was told", round)
		}
	}
	return m.stop()
}

// failSyncsUnder runs the load, breaks syncs with strace for half a second, and cuts the
// power while the load goes on. It returns the errors that the load got.
func (m *machine) failSyncsUnder(ctx context.Context, l *load.Load, chunksOnly bool) (told error, err error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	// Each worker continues after an error, as programs with retries do.
	var mu sync.Mutex
	var wg sync.WaitGroup
	for i, w := range l.Workers {
		wg.Go(func() {
			defer w.Close()
			for ctx.Err() == nil {
				serr := w.Step()
				if serr == nil {
					continue
				}
				mu.Lock()
				if told == nil && !m.killed.Load() {
					told = fmt.Errorf("%s: %w", l.Names[i], serr)
				}
				mu.Unlock()
				return
			}
		})
	}
	time.Sleep(300 * time.Millisecond)
	args := []string{"-f", "-qq", "-o", "/dev/null", "-p", strconv.Itoa(m.process.PID()),
		"-e", "trace=fsync,fdatasync", "-e", "inject=fsync,fdatasync:error=EIO"}
	if chunksOnly {
		files, err := filesBelow(m.chunks.At, func(string) bool { return true })
		if err != nil {
			return nil, err
		}
		for _, f := range files {
			args = append(args, "-P", f)
		}
	}
	strace := exec.Command("strace", args...)
	if err := strace.Start(); err != nil {
		return nil, err
	}
	time.Sleep(500 * time.Millisecond)
	// SIGINT makes strace detach: the process continues with a working disk.
	serr := strace.Process.Signal(syscall.SIGINT)
	_ = strace.Wait() // the exit status only says that SIGINT ended strace
	time.Sleep(300 * time.Millisecond)
	select {
	case <-m.process.Done():
		if chunksOnly {
			serr = errors.Join(serr, fmt.Errorf("the process ended because syncs of the chunk disk failed\n%s", m.process.Output()))
		}
	default:
	}
	cut := m.cut(cutBoth)
	cancel()
	wg.Wait()
	mu.Lock()
	defer mu.Unlock()
	return told, errors.Join(serr, cut)
}
