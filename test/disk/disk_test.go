package disk

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
)

func syncDir(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	defer d.Close()
	return d.Sync()
}

// TestPowerCutIsReal is the control of the disk: after a cut a synced file is there, and
// a file without a sync is not.
func TestPowerCutIsReal(t *testing.T) {
	d := Temp(t, 64<<20)
	for _, name := range []string{"synced", "written"} {
		f, err := os.Create(filepath.Join(d.At, name))
		if err != nil {
			t.Fatal(err)
		}
		if _, err := f.WriteString("here"); err != nil {
			t.Fatal(err)
		}
		if name == "synced" {
			if err := errors.Join(f.Sync(), syncDir(d.At)); err != nil {
				t.Fatal(err)
			}
		}
		f.Close()
	}
	if err := errors.Join(d.Cut(), d.Unmount(), d.Mount()); err != nil {
		t.Fatal(err)
	}
	if b, err := os.ReadFile(filepath.Join(d.At, "synced")); string(b) != "here" {
		t.Errorf("the synced file: %q, %v", b, err)
	}
	if _, err := os.ReadFile(filepath.Join(d.At, "written")); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the file that was not synced survived: %v", err)
	}
	release, err := d.Fill(0)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(d.At, "more"), make([]byte, 1<<20), 0o644); !errors.Is(err, unix.ENOSPC) {
		t.Errorf("writing to the full disk: %v", err)
	}
	if err := release(); err != nil {
		t.Fatal(err)
	}
}

// TestRebootWaits: a mount namespace that still has the disk keeps the disk's state at
// the power cut.
func TestRebootWaits(t *testing.T) {
	d := Temp(t, 16<<20)
	other := exec.Command("sleep", "0.5")
	other.SysProcAttr = &syscall.SysProcAttr{Unshareflags: syscall.CLONE_NEWNS, Pdeathsig: syscall.SIGKILL}
	if err := other.Start(); err != nil {
		t.Fatal(err)
	}
	defer other.Wait()
	if err := errors.Join(d.Cut(), d.Unmount(), d.Mount()); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(d.At, "file"), []byte("here"), 0o644); err != nil {
		t.Fatal(err)
	}
}
