package bench

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"
)

// TestTwoDirectories runs a little of every group on two directories and checks that each row has
// a figure for both, that the restart command ran for both before the cold row, and that no files
// are left.
func TestTwoDirectories(t *testing.T) {
	first, second, tree := t.TempDir(), t.TempDir(), t.TempDir()
	restarts, hooks := filepath.Join(t.TempDir(), "restarts"), filepath.Join(t.TempDir(), "hooks")
	if err := os.WriteFile(filepath.Join(tree, "a.go"), []byte("package a\n\nfunc NewReader() {}\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	only := []string{"seq-write-fsync", "seq-read-cold", "seq-read-warm", "rand-read-warm", "mmap-read-warm", "checkpoint",
		"small-create-4", "small-read-warm-4", "images-again-2", "create-8", "stat-again-8", "unlink-8", "readdir-again", "append-fsync",
		"untar", "find", "grep-warm", "rm-rf"}
	defer func(d time.Duration) { imagePause = d }(imagePause)
	imagePause = 0
	var progress bytes.Buffer
	report, err := Run(t.Context(), Config{
		Dirs: []string{first, second}, Rounds: 2, Only: only, Scale: 0.002, Tree: tree, Scratch: t.TempDir(), Progress: &progress,
		RestartCmd: `echo "$BENCH_DIR" >>` + restarts, PIDs: []int{os.Getpid()},
		PreparedCmd: `test -d "$BENCH_DIR" && echo prepared >>` + hooks, FinishCmd: `echo finished >>` + hooks,
	})
	if err != nil {
		t.Fatalf("%v\n%s", err, progress.Bytes())
	}
	var rows []string
	for _, r := range report.Results {
		rows = append(rows, r.Row)
		if len(r.Sides) != 2 || r.Ratio <= 0 {
			t.Errorf("%s: %+v", r.Row, r)
			continue
		}
		for i, dir := range []string{first, second} {
			if s := r.Sides[i]; s.Dir != dir || len(s.Rounds) != 2 || s.Value <= 0 {
				t.Errorf("%s, side %d: %+v", r.Row, i, s)
			}
		}
	}
	slices.Sort(only)
	slices.Sort(rows)
	if !slices.Equal(rows, only) {
		t.Errorf("rows %v, want %v", rows, only)
	}
	got, err := os.ReadFile(restarts)
	if err != nil {
		t.Fatal(err)
	}
	if want := strings.Join([]string{first, second, second, first, ""}, "\n"); string(got) != want {
		t.Errorf("restarts:\n%swant:\n%s", got, want)
	}
	// Eight groups, two rounds, two directories.
	ran, err := os.ReadFile(hooks)
	if err != nil || bytes.Count(ran, []byte("prepared\n")) != 32 || bytes.Count(ran, []byte("finished\n")) != 32 {
		t.Errorf("hooks ran, %v:\n%s", err, ran)
	}
	for _, dir := range []string{first, second} {
		left, err := os.ReadDir(dir)
		if err != nil {
			t.Fatal(err)
		}
		if len(left) > 0 {
			t.Errorf("left in %s: %v", dir, left)
		}
	}
	var table bytes.Buffer
	if err := report.WriteTable(&table); err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(table.String(), "untar") || !strings.Contains(table.String(), " times") {
		t.Errorf("table:\n%s", table.String())
	}
}

// TestWrongBytesAreSeen: a file system that returns other bytes than were written fails the run.
func TestWrongBytesAreSeen(t *testing.T) {
	s := &side{dir: t.TempDir(), cfg: &Config{Scale: 0.002}, seed: 7}
	size := s.largeSize()
	if _, err := s.writeLarge("large", size); err != nil {
		t.Fatal(err)
	}
	name := filepath.Join(s.dir, "large")
	for _, damage := range []struct {
		what string
		do   func(*os.File) error
	}{
		{"a block of zeros", func(f *os.File) error { _, err := f.WriteAt(make([]byte, blockSize), 3*blockSize); return err }},
		{"a short file", func(f *os.File) error { return f.Truncate(size - blockSize) }},
	} {
		f, err := os.OpenFile(name, os.O_RDWR, 0)
		if err != nil {
			t.Fatal(err)
		}
		if err := damage.do(f); err != nil {
			t.Fatal(err)
		}
		f.Close()
		if _, err := s.readLarge("large", size, coldReadBlock); !errors.Is(err, errMismatch) {
			t.Errorf("%s: read gave %v", damage.what, err)
		}
		if _, err := s.readMapped(); err == nil {
			t.Errorf("%s: mmap gave no error", damage.what)
		}
	}
}

func TestUnknownRowIsRefused(t *testing.T) {
	_, err := Run(t.Context(), Config{Dirs: []string{t.TempDir()}, Only: []string{"nonsense"}})
	if err == nil || !strings.Contains(err.Error(), "nonsense") {
		t.Errorf("error %v", err)
	}
}

func TestMedian(t *testing.T) {
	for _, c := range []struct {
		values []float64
		want   float64
	}{{[]float64{3}, 3}, {[]float64{9, 1, 5}, 5}, {[]float64{4, 1, 3, 2}, 2.5}} {
		if got := median(c.values); got != c.want {
			t.Errorf("median(%v) = %v, want %v", c.values, got, c.want)
		}
	}
}

func TestBusySeconds(t *testing.T) {
	got, err := busySeconds([]byte("cpu  100 20 30 4000 500 6 7 8 9 10\ncpu0 1 2 3\n"))
	if err != nil || got < 1.6299 || got > 1.6301 {
		t.Errorf("busySeconds = %v, %v; want 1.63", got, err)
	}
	if _, err := busySeconds([]byte("intr 1 2 3")); err == nil {
		t.Error("nonsense was accepted")
	}
}
