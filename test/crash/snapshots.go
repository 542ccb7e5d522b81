package crash

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
)

// snapshots takes snapshots a moment before a fault, of open files with unsynced bytes:
// once the snapshot command has returned, the snapshot must have all of these bytes.
type snapshots struct {
	s    *system
	have []snapshotted
}

// snapshotted is the contents that a snapshot must show, by name.
type snapshotted struct {
	name  string
	files map[string][]byte
}

// snapshotTries is the number of attempts to take a complete snapshot: on a busy machine
// clients may need longer than a snapshot waits.
const snapshotTries = 20

// take writes files and takes a snapshot. end closes the files, after the fault.
func (k *snapshots) take(ctx context.Context, round int) (end func(), err error) {
	var open []*os.File
	end = func() {
		for _, f := range open {
			f.Close() // the mount is gone
		}
	}
	content := func(n int) []byte { return bytes.Repeat(fmt.Appendf(nil, "round %d: %d bytes\n", round, n), n/16)[:n] }
	files := map[string][]byte{}
	write := func(name string, sync bool, parts ...int) error {
		f, err := os.Create(filepath.Join(k.s.mount, name))
		if err != nil {
			return err
		}
		open = append(open, f)
		for i, n := range parts {
			p := content(n)
			if _, err := f.Write(p); err != nil {
				return err
			}
			if files[name] = append(files[name], p...); sync && i < len(parts)-1 {
				if err := f.Sync(); err != nil {
					return err
				}
			}
		}
		return nil
	}
	if err := errors.Join(
		write("kept-large", false, 3<<20, 70_000),
		write("kept-log", true, 9000, 8000, 7000, 6000, 50_000), // an open-ended file, and bytes after its recorded end
		write("kept-small", false, 500),
	); err != nil {
		return end, err
	}
	for try := range snapshotTries {
		name := fmt.Sprintf("round%d-%d", round, try)
		if _, err = exec.CommandContext(ctx, k.s.binary, "snapshot", "create", "root", name, "--strict", "--dir", k.s.dir).Output(); err == nil {
			k.have = append(k.have, snapshotted{name, files})
			return end, nil
		}
	}
	if e, ok := errors.AsType[*exec.ExitError](err); ok {
		err = fmt.Errorf("penstock snapshot create: %w\n%s", err, e.Stderr)
	}
	return end, err
}

// verify reads every snapshot that take made.
func (k *snapshots) verify() error {
	for _, sn := range k.have {
		for name, want := range sn.files {
			got, err := os.ReadFile(filepath.Join(k.s.mount, ".snapshot", sn.name, name))
			if err != nil {
				return err
			}
			if !bytes.Equal(got, want) {
				return fmt.Errorf("DATA: %s in snapshot %s has %d bytes, %d were written before it was taken, or others", name, sn.name, len(got), len(want))
			}
		}
	}
	return nil
}
