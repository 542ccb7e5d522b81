package posix

import (
	"os"
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
