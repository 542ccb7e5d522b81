package cluster

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"penstock.io/penstock/test/disk"
)

// TestSweep: the remains of a dead test are removed, and the files of a living test stay.
func TestSweep(t *testing.T) {
	dir, held, err := claim()
	if err != nil {
		t.Fatal(err)
	}
	left := filepath.Join(dir, "server")
	d, err := disk.New(left+".img", left, 8<<20)
	if d != nil {
		t.Cleanup(func() { _ = d.Remove() }) // for a test that fails
	}
	if err != nil {
		t.Fatal(err)
	}
	loops := func() string {
		t.Helper()
		out, err := exec.Command("losetup", "--associated", left+".img").CombinedOutput()
		if err != nil {
			t.Fatalf("losetup: %v\n%s", err, out)
		}
		return strings.TrimSpace(string(out))
	}
	before := loops()
	if before == "" {
		t.Fatal("the disk has no loop device")
	}
	if err := sweep(scratch); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(filepath.Join(left, "lost+found")); err != nil {
		t.Fatalf("the disk of a living test: %v", err)
	}
	if err := held.Close(); err != nil { // as the process's death does
		t.Fatal(err)
	}
	if err := sweep(scratch); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(dir); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the directory is still there: %v", err)
	}
	device, _, _ := strings.Cut(before, ":")
	if out, err := os.ReadFile("/sys/block/" + filepath.Base(device) + "/loop/backing_file"); err == nil && strings.Contains(string(out), left) {
		t.Errorf("%s is still there: %s", device, out)
	}
}
