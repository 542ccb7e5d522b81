package posix

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	"penstock.io/penstock/test/history"
)

// TestDirectoryHistory crosses creates, renames, exchanges and unlinks of a few names
// from two mounts, two threads each, in one small directory after the other. For each
// history, some order of the operations must explain all answers. PENSTOCK_HISTORY sets
// the duration.
func TestDirectoryHistory(t *testing.T) {
	within := 10 * time.Second
	if s := os.Getenv("PENSTOCK_HISTORY"); s != "" {
		var err error
		if within, err = time.ParseDuration(s); err != nil {
			t.Fatalf("PENSTOCK_HISTORY: %v", err)
		}
	}
	a, b := twoMounts(t)
	operations, rounds := 0, 0
	for end := time.Now().Add(within); time.Now().Before(end); rounds++ {
		seed := *seedFlag + uint64(rounds)
		name := fmt.Sprint("history", rounds)
		if err := os.Mkdir(filepath.Join(a, name), 0o755); err != nil {
			t.Fatal(err)
		}
		h := history.Run(filepath.Join(a, name), filepath.Join(b, name), seed, false, nil)
		operations += len(h)
		if err := history.Check(h, a != b); err != nil {
			t.Fatalf("seed %d: %v", seed, err)
		}
		if err := os.RemoveAll(filepath.Join(b, name)); err != nil {
			t.Fatal(err)
		}
	}
	t.Logf("%d operations in %d directories", operations, rounds)
}
