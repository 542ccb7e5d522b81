package posix

import (
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"penstock.io/penstock/test/posix/exercise"
)

var (
	seedFlag = flag.Uint64("seed", uint64(time.Now().UnixNano()), "of the random exercisers")
	opsFlag  = flag.Int("ops", 3000, "operations of each random exerciser")
)

// TestFileExerciser compares files with arrays in memory under random
// operations, several files at the same time.
func TestFileExerciser(t *testing.T) {
	dir := subject(t)
	parallel(t, 4, func(i int) error {
		return exercise.File(filepath.Join(dir, fmt.Sprint("file", i)), *seedFlag+uint64(i), *opsFlag)
	})
}

// TestTreeExerciser compares trees with trees in memory under random
// operations, several trees at the same time.
func TestTreeExerciser(t *testing.T) {
	dir := subject(t)
	parallel(t, 4, func(i int) error {
		own := filepath.Join(dir, fmt.Sprint("tree", i))
		if err := os.Mkdir(own, 0o755); err != nil {
			return err
		}
		return exercise.Tree(own, *seedFlag+uint64(i), *opsFlag)
	})
}

// parallel runs f several times at once and fails the test with all errors.
func parallel(t *testing.T, n int, f func(i int) error) {
	t.Helper()
	errs := make([]error, n)
	var wg sync.WaitGroup
	for i := range n {
		wg.Go(func() { errs[i] = f(i) })
	}
	wg.Wait()
	if err := errors.Join(errs...); err != nil {
		t.Error(err)
	}
}
