package posix

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"penstock.io/penstock/test/posix/suite"
)

// twoMounts is one fresh directory by the paths of two mounts of one cluster,
// each served by a process of its own.
func twoMounts(t *testing.T) (a, b string) {
	t.Helper()
	if *dirFlag != "" {
		a = subject(t)
		if *otherFlag == "" {
			return a, a
		}
		return a, filepath.Join(*otherFlag, filepath.Base(a))
	}
	c := startCluster(t)
	second := c.mountAgain(t)
	a, err := os.MkdirTemp(c.mount, "posix-")
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(a, 0o755); err != nil {
		t.Fatal(err)
	}
	return a, filepath.Join(second, filepath.Base(a))
}

// TestCoherence runs the cases for two mounts.
func TestCoherence(t *testing.T) {
	a, b := twoMounts(t)
	conform(t, a, b, suite.CoherenceCases())
}

// TestMapped runs the cases of files that are mapped and stored into while others
// change them, plain and in a volume that compresses.
func TestMapped(t *testing.T) {
	if *dirFlag != "" {
		a, b := twoMounts(t)
		conform(t, a, b, suite.MappedCases())
		return
	}
	c := startCluster(t)
	second := c.mountAgain(t)
	bin, err := binary()
	if err != nil {
		t.Fatal(err)
	}
	if out, err := exec.Command(bin, "volume", "create", "z", "--attach", "/z", "--compression", "zstd", "--dir", c.dir).CombinedOutput(); err != nil {
		t.Fatalf("penstock volume create: %v\n%s", err, out)
	}
	for _, below := range []string{"plain", "z/compressed"} {
		a, b := filepath.Join(c.mount, below), filepath.Join(second, below)
		if err := errors.Join(os.Mkdir(a, 0o755), os.Chmod(a, 0o755)); err != nil {
			t.Fatal(err)
		}
		conform(t, a, b, suite.MappedCases())
	}
}
