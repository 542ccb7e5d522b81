package crash

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

var (
	rounds   = flag.Int("rounds", 0, "rounds of each test; 0 means a few")
	seed     = flag.Uint64("seed", uint64(time.Now().UnixNano()), "of the random choices")
	given    = flag.String("binary", "", "penstock to test; empty builds it")
	controls = flag.Bool("controls", false, "switch each mechanism off, and demand that its test fails")
)

// few is the number of rounds without the flag.
func few(n int) int {
	if *rounds > 0 {
		return *rounds
	}
	return n
}

// buildFlags and buildEnv say how; see race_test.go.
var (
	buildFlags []string
	buildEnv   = "CGO_ENABLED=0"
)

// built is the penstock that TestMain built.
var built string

func TestMain(m *testing.M) {
	flag.Parse()
	os.Exit(build(m))
}

func build(m *testing.M) int {
	if *given != "" {
		built = *given
		return m.Run()
	}
	dir, err := os.MkdirTemp("", "penstock-crash-")
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	defer os.RemoveAll(dir)
	built = filepath.Join(dir, "penstock")
	args := append([]string{"build", "-o", built}, buildFlags...)
	cmd := exec.Command("go", append(args, "penstock.io/penstock/cmd/penstock")...)
	cmd.Env = append(os.Environ(), buildEnv)
	if out, err := cmd.CombinedOutput(); err != nil {
		fmt.Fprintf(os.Stderr, "building penstock: %v\n%s", err, out)
		return 1
	}
	return m.Run()
}

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

// logFile collects what the processes print; a failing test shows where it is.
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
	s := &system{binary: built, dir: filepath.Join(dir, "data"), mount: filepath.Join(dir, "mnt"), log: logFile(t)}
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
	m, err := newMachine(t.Context(), scratch(t), built, metaBytes, chunkBytes, logFile(t))
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

// TestSIGKILL: whatever the moment, all that was synced is there, the rest is a
// prefix, and fsck finds nothing.
func TestSIGKILL(t *testing.T) {
	if err := newSystem(t).killRounds(t.Context(), few(4), *seed, t.Logf); err != nil {
		t.Fatal(err)
	}
}

// TestPowerCut: the same with what was not on the disks lost.
func TestPowerCut(t *testing.T) {
	if err := machineOf(t, 512<<20, 512<<20).powerRounds(t.Context(), few(3), *seed, t.Logf); err != nil {
		t.Fatal(err)
	}
}

// TestWorkersKnow is the control of the load itself: on a plain directory it
// finds nothing, and each planted loss is found.
func TestWorkersKnow(t *testing.T) {
	root := t.TempDir()
	l := newLoad(root, *seed, never)
	if err := l.prepare(root); err != nil {
		t.Fatal(err)
	}
	run := func() {
		t.Helper()
		ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
		defer cancel()
		if err := l.run(ctx); err != nil {
			t.Fatal(err)
		}
		for _, w := range l.workers {
			switch w := w.(type) {
			case *appender:
				w.files[0].synced, w.files[0].named = w.files[0].written, true
			case *overwriter:
				w.synced = w.seq
			case *namer:
				w.synced = len(w.ops)
			case *replacer:
				w.synced = w.version
			}
		}
	}
	run()
	if err := l.verify(); err != nil {
		t.Fatalf("nothing was broken: %v", err)
	}
	for i, w := range l.workers[:4] {
		run()
		if err := plant(root, l.names[i], w); err != nil {
			t.Fatal(err)
		}
		if err := w.verify(); err == nil {
			t.Errorf("%s: a planted loss was not seen", l.names[i])
		}
		repair(t, root, l, i)
	}
}

func never() bool { return false }

// plant damages what a worker synced.
func plant(root, name string, w worker) error {
	dir := filepath.Join(root, name)
	switch w := w.(type) {
	case *appender:
		return os.Truncate(filepath.Join(dir, w.files[0].name), w.files[0].synced-1)
	case *overwriter:
		f, err := os.OpenFile(w.path(), os.O_RDWR, 0)
		if err != nil {
			return err
		}
		defer f.Close()
		block := w.writes[len(w.writes)-1]
		_, err = f.WriteAt(w.block(int(block), 0), int64(block)*blockSize)
		return err
	case *namer:
		return os.Symlink("nobody", filepath.Join(dir, "nobody"))
	case *replacer:
		return os.Truncate(filepath.Join(dir, "current"), 20)
	}
	return errors.New("unknown worker")
}

// repair starts a damaged worker anew.
func repair(t *testing.T, root string, l *load, i int) {
	t.Helper()
	dir := filepath.Join(root, l.names[i])
	if err := os.RemoveAll(dir); err != nil {
		t.Fatal(err)
	}
	if err := os.Mkdir(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	l.workers[i] = newLoad(root, *seed, never).workers[i]
}

// TestPowerCutIsReal is the control of the disk: after a cut a synced file is
// there and one that was only written is not.
func TestPowerCutIsReal(t *testing.T) {
	dir := scratch(t)
	d, err := newDisk(filepath.Join(dir, "disk.img"), filepath.Join(dir, "disk"), 64<<20)
	if d != nil {
		t.Cleanup(func() {
			if err := d.remove(); err != nil {
				t.Error(err)
			}
		})
	}
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"synced", "written"} {
		f, err := os.Create(filepath.Join(d.at, name))
		if err != nil {
			t.Fatal(err)
		}
		if _, err := f.WriteString("here"); err != nil {
			t.Fatal(err)
		}
		if name == "synced" {
			if err := errors.Join(f.Sync(), syncDir(d.at)); err != nil {
				t.Fatal(err)
			}
		}
		f.Close()
	}
	if err := errors.Join(d.cut(), d.unmount(), d.mount()); err != nil {
		t.Fatal(err)
	}
	if b, err := os.ReadFile(filepath.Join(d.at, "synced")); string(b) != "here" {
		t.Errorf("the synced file: %q, %v", b, err)
	}
	if _, err := os.ReadFile(filepath.Join(d.at, "written")); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the file that was not synced survived: %v", err)
	}
	release, err := d.fill()
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(d.at, "more"), make([]byte, 1<<20), 0o644); !errors.Is(err, unix.ENOSPC) {
		t.Errorf("writing to the full disk: %v", err)
	}
	if err := release(); err != nil {
		t.Fatal(err)
	}
}
