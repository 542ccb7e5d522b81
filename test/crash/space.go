package crash

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"penstock.io/penstock/test/disk"
	"penstock.io/penstock/test/load"
)

// full fills one of the machine's disks under a system in use, except for left bytes. It
// checks that the writer gets an error, that no synced data is lost, and that the system
// continues by itself once the disk has room.
func (m *machine) full(ctx context.Context, d *disk.Disk, left int64, seed uint64, logf func(string, ...any)) error {
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
	release, err := d.Fill(left)
	if err != nil {
		return err
	}
	told, err := m.writeUntilTold(ctx, 0)
	if err := errors.Join(err, release()); err != nil {
		return err
	}
	logf("%v: told after %d files: ENOSPC", filepath.Base(d.At), told)
	if err := m.goesOn(ctx); err != nil {
		return err
	}
	if left > 0 {
		if err := m.lastBlock(ctx, d, told, logf); err != nil {
			return err
		}
	}
	// Data synced before and during the full disk must be there, also after a crash. The
	// first Verify takes the data on the mount for durable, so SyncAll makes the data
	// durable first.
	if err := errors.Join(load.SyncAll(m.mount), l.Verify()); err != nil {
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

// lastBlock fills the disk of an etcd under a writer, at once and to the last block. etcd
// ends the process if it can't write its own files; the writer then gets this error, or
// ENOSPC if the metadata server notices the full disk earlier. checkTold compares the
// synced files later.
func (m *machine) lastBlock(ctx context.Context, d *disk.Disk, from int, logf func(string, ...any)) error {
	release, err := d.Fill(0)
	if err != nil {
		return err
	}
	told, err := m.writeUntilTold(ctx, from)
	if err == nil {
		logf("%v: without a block left told after %d files: ENOSPC", filepath.Base(d.At), told-from)
		return errors.Join(release(), m.goesOn(ctx))
	}
	select { // callers see the process end before this function does
	case <-m.process.Done():
	case <-time.After(30 * time.Second):
		return errors.Join(err, release())
	}
	if out := m.process.Output(); !strings.Contains(out, unix.ENOSPC.Error()) {
		return errors.Join(fmt.Errorf("the process ended on a full disk, and not for want of space: %w\n%s", err, out), release())
	}
	logf("%v: without a block left etcd ended the process: %v", filepath.Base(d.At), err)
	return errors.Join(release(), m.start(ctx))
}

// toldPath names the files of writeUntilTold; each is synced before the next.
func (m *machine) toldPath(i int) string {
	return filepath.Join(m.mount, fmt.Sprintf("space-%05d", i))
}

const toldBytes = 64 << 10

// writeUntilTold writes and syncs numbered files, beginning with from, until a call fails
// with ENOSPC, and returns the number of that file. Any other error is a failure, and so
// is a disk that never fills.
func (m *machine) writeUntilTold(ctx context.Context, from int) (int, error) {
	deadline := time.Now().Add(time.Minute)
	b := make([]byte, toldBytes)
	for i := from; time.Now().Before(deadline); i++ {
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

// goesOn waits until a file can be written and synced again. The file lies in a chunk,
// because a file stored inline needs no room on the chunk disk.
func (m *machine) goesOn(ctx context.Context) error {
	var err error
	b := make([]byte, toldBytes)
	for deadline := time.Now().Add(time.Minute); time.Now().Before(deadline); time.Sleep(100 * time.Millisecond) {
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if err = writeSynced(filepath.Join(m.mount, "goes-on"), b); err == nil {
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
			return nil // the write of the last file failed
		}
		if len(b) != toldBytes {
			return fmt.Errorf("DATA: %s has %d bytes, %d were synced", m.toldPath(i), len(b), toldBytes)
		}
		if err := load.CheckPattern(b, uint64(i), 0); err != nil {
			return err
		}
	}
}
