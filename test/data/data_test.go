package data

import (
	"bytes"
	"errors"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"penstock.io/penstock/test/program"
)

// full asks for the amounts that the project promises.
var full = os.Getenv("PENSTOCK_DATA") == "full"

func amount(ci, promised int) int {
	if full {
		return promised
	}
	return ci
}

func TestMain(m *testing.M) { os.Exit(program.Main(m)) }

func newSystem(t *testing.T) *system {
	t.Helper()
	dir, err := os.MkdirTemp("/var/tmp", "pd-") // short: the directory holds sockets
	if err != nil {
		t.Fatal(err)
	}
	log, err := os.CreateTemp("", "penstock-data-*.log")
	if err != nil {
		t.Fatal(err)
	}
	s := &system{binary: program.Path, dir: filepath.Join(dir, "data"), mount: filepath.Join(dir, "mnt"), log: log}
	for _, d := range []string{s.dir, s.mount} {
		if err := os.Mkdir(d, 0o700); err != nil {
			t.Fatal(err)
		}
	}
	t.Cleanup(func() {
		if err := s.end(); err != nil {
			t.Error(err)
		}
		if err := os.RemoveAll(dir); err != nil {
			t.Error(err)
		}
		log.Close()
		if t.Failed() {
			t.Log("the processes' log is", log.Name())
		} else {
			os.Remove(log.Name())
		}
	})
	if err := s.start(t.Context()); err != nil {
		t.Fatal(err)
	}
	return s
}

func (s *system) chunkUse(t *testing.T) int64 {
	t.Helper()
	n, err := diskUse(filepath.Join(s.dir, "chunks"), func(p string) bool { return strings.HasSuffix(p, ".data") })
	if err != nil {
		t.Fatal(err)
	}
	return n
}

// shrinks waits until the chunks take at most 1.5 times their live bytes, plus the 1 MiB below
// which nothing is compacted.
func (s *system) shrinks(t *testing.T, live int64) {
	t.Helper()
	limit := live + live/2 + 1<<20
	began := time.Now()
	var use int64
	for time.Since(began) < 2*time.Minute {
		if use = s.chunkUse(t); use <= limit {
			t.Logf("%d bytes on disk, %d live, %v after the last unlink", use, live, time.Since(began).Round(time.Millisecond))
			return
		}
		time.Sleep(100 * time.Millisecond)
	}
	t.Fatalf("%d bytes on disk, %d of them live: the space of deleted files did not come back", use, live)
}

// TestDeletedSmallFilesGiveTheirSpaceBack: the space of deleted small files comes back, also of
// files that lie between files that stay.
func TestDeletedSmallFilesGiveTheirSpaceBack(t *testing.T) {
	t.Run("many", func(t *testing.T) { spaceComesBack(t, amount(10_000, 100_000), 20<<10) })
	t.Run("few and small", func(t *testing.T) { spaceComesBack(t, amount(1_500, 100_000), 6<<10) })
}

func spaceComesBack(t *testing.T, count, size int) {
	s := newSystem(t)
	f := files{dir: s.mount, count: count, size: size}
	began := time.Now()
	if err := f.create(); err != nil {
		t.Fatal(err)
	}
	live := int64(f.count/10) * int64(f.size)
	t.Logf("%d files in %v: %d bytes on disk", f.count, time.Since(began).Round(time.Millisecond), s.chunkUse(t))
	if err := f.thin(); err != nil {
		t.Fatal(err)
	}
	s.shrinks(t, live)
	if err := f.verify(); err != nil {
		t.Fatal(err)
	}
	if err := s.fsck(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := s.stop(); err != nil {
		t.Fatal(err)
	}
	if err := s.start(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := f.verify(); err != nil {
		t.Fatal("after a restart: ", err)
	}
}

// TestKilledWhileCompacting: SIGKILL while extents move to another chunk loses nothing, and the
// space comes back afterwards.
func TestKilledWhileCompacting(t *testing.T) {
	s := newSystem(t)
	f := files{dir: s.mount, count: amount(3000, 30_000), size: 20 << 10}
	if err := f.create(); err != nil {
		t.Fatal(err)
	}
	if err := f.thin(); err != nil {
		t.Fatal(err)
	}
	live := int64(f.count/10) * int64(f.size)
	r := rand.New(rand.NewPCG(uint64(time.Now().UnixNano()), 1))
	for round := range amount(4, 40) {
		if err := s.compacting(t); err != nil {
			t.Logf("round %d: %v", round, err)
			break // the compaction was quicker than this test
		}
		after := time.Duration(r.IntN(40)) * time.Millisecond
		time.Sleep(after)
		s.kill()
		if err := s.start(t.Context()); err != nil {
			t.Fatal(err)
		}
		if err := f.verify(); err != nil {
			t.Fatalf("round %d, killed %v after compaction began: %v", round, after, err)
		}
	}
	s.shrinks(t, live)
	if err := f.verify(); err != nil {
		t.Fatal(err)
	}
	if err := s.fsck(t.Context()); err != nil {
		t.Fatal(err)
	}
}

// compacting waits until the log reports the beginning of a compaction.
func (s *system) compacting(t *testing.T) error {
	t.Helper()
	log := s.log.(*os.File)
	for deadline := time.Now().Add(10 * time.Second); time.Now().Before(deadline); time.Sleep(time.Millisecond) {
		b, err := os.ReadFile(log.Name())
		if err != nil {
			return err
		}
		if n := bytes.Count(b, []byte(`"compacting"`)); n > s.compactions {
			s.compactions = n
			return nil
		}
	}
	return errors.New("no compaction begins")
}

// TestProcessThatStoodStill: a process that stood still for longer than its leases (SIGSTOP, a
// machine that slept) goes on: the mount works, no written byte is lost, an open file stays
// open.
func TestProcessThatStoodStill(t *testing.T) {
	s := newSystem(t)
	f := files{dir: s.mount, count: 50, size: 20 << 10}
	if err := f.create(); err != nil {
		t.Fatal(err)
	}
	open, err := os.Create(filepath.Join(s.mount, "open"))
	if err != nil {
		t.Fatal(err)
	}
	defer open.Close()
	if _, err := open.WriteString("before "); err != nil { // not synced
		t.Fatal(err)
	}
	if err := syscall.Kill(s.process.PID(), syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	time.Sleep(11 * time.Second) // an owner's lease is 5 s, a session's 8 s
	if err := syscall.Kill(s.process.PID(), syscall.SIGCONT); err != nil {
		t.Fatal(err)
	}
	began := time.Now()
	if _, err := open.WriteString("after"); err != nil {
		t.Fatal(err)
	}
	if err := open.Sync(); err != nil {
		t.Fatal(err)
	}
	t.Logf("synced %v after it woke", time.Since(began).Round(time.Millisecond))
	if b, err := os.ReadFile(open.Name()); err != nil || string(b) != "before after" {
		t.Fatalf("DATA: %q, %v", b, err)
	}
	if err := f.thin(); err != nil {
		t.Fatal(err)
	}
	if err := f.verify(); err != nil {
		t.Fatal(err)
	}
	if err := s.fsck(t.Context()); err != nil {
		t.Fatal(err)
	}
}
