package crash

import (
	"bytes"
	"flag"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"testing"
	"time"

	"penstock.io/penstock/test/program"
)

var (
	rounds   = flag.Int("rounds", 0, "rounds of each test; 0 means a few")
	seed     = flag.Uint64("seed", uint64(time.Now().UnixNano()), "of the random choices")
	controls = flag.Bool("controls", false, "switch each mechanism off, and demand that its test fails")
)

// few is the number of rounds without the flag.
func few(n int) int {
	if *rounds > 0 {
		return *rounds
	}
	return n
}

func TestMain(m *testing.M) { os.Exit(program.Main(m)) }

// scratch is a short path: sockets of the data directory have 107 bytes.
func scratch(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("/var/tmp", "pc-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := os.RemoveAll(dir); err != nil {
			t.Error(err)
		}
	})
	return dir
}

// logFile returns the file that collects the output of the processes. A failing test
// prints the file's path.
func logFile(t *testing.T) io.Writer {
	t.Helper()
	f, err := os.CreateTemp("", "penstock-crash-*.log")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		f.Close()
		if t.Failed() {
			t.Logf("seed %d; the processes' log is %s", *seed, f.Name())
			return
		}
		os.Remove(f.Name())
	})
	return f
}

func newSystem(t *testing.T) *system {
	t.Helper()
	dir := scratch(t)
	s := &system{binary: program.Path, dir: filepath.Join(dir, "data"), mount: filepath.Join(dir, "mnt"), log: logFile(t)}
	for _, d := range []string{s.dir, s.mount} {
		if err := os.Mkdir(d, 0o700); err != nil {
			t.Fatal(err)
		}
	}
	t.Cleanup(func() {
		if err := s.end(); err != nil {
			t.Error(err)
		}
	})
	return s
}

func machineOf(t *testing.T, metaBytes, chunkBytes int64) *machine {
	t.Helper()
	m, err := newMachine(t.Context(), scratch(t), program.Path, metaBytes, chunkBytes, logFile(t))
	if m != nil {
		t.Cleanup(func() {
			if err := m.end(); err != nil {
				t.Error(err)
			}
		})
	}
	if err != nil {
		t.Fatal(err)
	}
	return m
}

// TestSIGKILL kills the system at random moments. All synced data must be there, the
// unsynced changes must form a prefix, and fsck must find nothing.
func TestSIGKILL(t *testing.T) {
	if err := newSystem(t).killRounds(t.Context(), few(4), *seed, t.Logf); err != nil {
		t.Fatal(err)
	}
}

// TestCompressed is TestSIGKILL and TestPowerCut on a compressed volume: chunks are
// compressed under the load, while the process is killed or its disks lose power.
func TestCompressed(t *testing.T) {
	s := newSystem(t)
	s.compression = "zstd"
	// The load's bytes hardly compress; prose does.
	prose := bytes.Repeat([]byte("under pressure to a turbine "), 150_000)
	files, seen := 0, false
	s.verified = func() error {
		for i := range files {
			name := filepath.Join(s.mount, fmt.Sprint("prose", i))
			if got, err := os.ReadFile(name); err != nil || !bytes.Equal(got, prose) {
				return fmt.Errorf("DATA: %s: %d bytes, %w", name, len(got), err)
			}
		}
		for end := time.Now().Add(time.Minute); files > 0 && !seen && time.Now().Before(end); time.Sleep(100 * time.Millisecond) {
			n, err := s.compressed(t.Context())
			if err != nil {
				return err
			}
			seen = n > 0
		}
		f, err := os.Create(filepath.Join(s.mount, fmt.Sprint("prose", files)))
		if err != nil {
			return err
		}
		defer f.Close()
		files++
		if _, err := f.Write(prose); err != nil {
			return err
		}
		return f.Sync()
	}
	if err := s.killRounds(t.Context(), few(2), *seed, t.Logf); err != nil {
		t.Fatal(err)
	}
	if !seen {
		t.Error("nothing was compressed")
	}
	if *rounds == 0 {
		return // TestCrash of the store cuts the power in memory
	}
	m := machineOf(t, 512<<20, 512<<20)
	m.compression = "zstd"
	if err := m.powerRounds(t.Context(), *rounds, *seed, t.Logf); err != nil {
		t.Fatal(err)
	}
}

// TestPowerCut is TestSIGKILL with a loss of power: unsynced bytes are lost, too.
func TestPowerCut(t *testing.T) {
	if err := machineOf(t, 512<<20, 512<<20).powerRounds(t.Context(), few(3), *seed, t.Logf); err != nil {
		t.Fatal(err)
	}
}
