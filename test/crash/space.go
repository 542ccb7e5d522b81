package crash

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"

	"penstock.io/penstock/test/disk"
	"penstock.io/penstock/test/load"
)

// full fills one of the machine's disks under a system in use, and checks that
// the writer is told, that nothing synced is lost, and that the system goes on
// by itself once space is back.
func (m *machine) full(ctx context.Context, d *disk.Disk, seed uint64, logf func(string, ...any)) error {
	if err := m.start(ctx); err != nil {
		return err
	}
	l := load.New(m.mount, load.Options{Seed: seed, Over: m.killed.Load})
	if err := l.Prepare(m.mount); err != nil {
		return err
	}
	if err := m.under(ctx, l, 500*time.Millisecond, func() error { return nil }); err != nil {
		return err
	}
	release, err := d.Fill()
	if err != nil {
		return err
	}
	told, err := m.writeUntilTold(ctx)
	if err != nil {
		return errors.Join(err, release())
	}
	logf("%v: told after %d files: ENOSPC", filepath.Base(d.At), told)
	if err := release(); err != nil {
		return err
	}
	if err := m.goesOn(ctx); err != nil {
		return err
	}
	// What was synced before and while the disk was full is there, also after
	// a crash. The first check takes what it finds as durable: so it is made so.
	if err := errors.Join(syncFS(m.mount), l.Verify()); err != nil {
		return err
	}
	m.kill()
	if err := m.start(ctx); err != nil {
		return err
	}
	if err := errors.Join(l.Verify(), m.fsck(ctx), m.checkTold()); err != nil {
		return err
	}
	return m.stop()
}

func syncFS(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	defer d.Close()
	return os.NewSyscallError("syncfs", unix.Syncfs(int(d.Fd())))
}

// toldPath names the files of writeUntilTold; each is synced before the next.
func (m *machine) toldPath(i int) string {
	return filepath.Join(m.mount, fmt.Sprintf("space-%05d", i))
}

const toldBytes = 64 << 10

// writeUntilTold writes and syncs files until one of the calls gives ENOSPC. Any
// other error is a failure, and so is a disk that never fills.
func (m *machine) writeUntilTold(ctx context.Context) (int, error) {
	deadline := time.Now().Add(time.Minute)
	b := make([]byte, toldBytes)
	for i := 0; time.Now().Before(deadline); i++ {
		select {
		case <-ctx.Done():
			return i, ctx.Err()
		case <-m.process.Done():
			return i, fmt.Errorf("the process ended on a full disk\n%s", m.process.Output())
		default:
		}
		load.Pattern(b, uint64(i), 0)
		err := writeSynced(m.toldPath(i), b)
		if errors.Is(err, unix.ENOSPC) {
			return i, nil
		}
		if err != nil {
			return i, fmt.Errorf("on a full disk, want ENOSPC: %w", err)
		}
	}
	return 0, errors.New("a minute of writing on a full disk, and no error")
}

func writeSynced(path string, b []byte) error {
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o644)
	if err != nil {
		return err
	}
	_, werr := f.Write(b)
	var serr error
	if werr == nil {
		serr = f.Sync()
	}
	return errors.Join(werr, serr, f.Close())
}

// goesOn waits until a file can be written and synced again.
func (m *machine) goesOn(ctx context.Context) error {
	var err error
	for deadline := time.Now().Add(time.Minute); time.Now().Before(deadline); time.Sleep(100 * time.Millisecond) {
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if err = writeSynced(filepath.Join(m.mount, "goes-on"), []byte("again")); err == nil {
			return nil
		}
	}
	return fmt.Errorf("a minute after space came back, writing still fails: %w", err)
}

// checkTold verifies the files that were synced while the disk filled up.
func (m *machine) checkTold() error {
	for i := 0; ; i++ {
		b, err := os.ReadFile(m.toldPath(i))
		if errors.Is(err, os.ErrNotExist) {
			return nil
		}
		if err != nil {
			return err
		}
		if _, err := os.Stat(m.toldPath(i + 1)); err != nil {
			return nil // the last one is the one that failed
		}
		if len(b) != toldBytes {
			return fmt.Errorf("%s has %d bytes, %d were synced", m.toldPath(i), len(b), toldBytes)
		}
		if err := load.CheckPattern(b, uint64(i), 0); err != nil {
			return err
		}
	}
}
