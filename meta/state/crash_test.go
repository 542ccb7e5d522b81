package state

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
)

// crashDir names the directory for the child to be killed.
const crashDir = "PENSTOCK_STATE_CRASH_DIR"

func TestMain(m *testing.M) {
	if dir := os.Getenv(failingDir); dir != "" {
		fmt.Fprintln(os.Stderr, syncFails(dir)) // and the process ends before
		return
	}
	if dir := os.Getenv(crashDir); dir != "" {
		if err := applyUntilKilled(dir); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	os.Exit(m.Run())
}

// The model: the effect of entry n is a function of n alone.
const modelKeys = 300

type effect struct {
	key, end, val []byte // val nil: delete; end set: delete the range
}

func model(n int) (effects []effect) {
	rng := rand.New(rand.NewPCG(uint64(n), 1))
	for range 1 + rng.IntN(20) {
		k := key(rng.IntN(modelKeys))
		switch rng.IntN(10) {
		case 0:
			effects = append(effects, effect{key: k})
		case 1:
			lo := rng.IntN(modelKeys)
			effects = append(effects, effect{key: key(lo), end: key(lo + rng.IntN(20))})
		default:
			effects = append(effects, effect{key: k, val: bytes.Repeat([]byte{byte(n), byte(n >> 8)}, rng.IntN(400))})
		}
	}
	return effects
}

// unseen is a key that each third entry n puts, and that the store removes without an entry
// before the next entry is applied.
func unseen(n int) []byte { return fmt.Appendf(nil, "unseen%08d", n) }

func applyModel(s *Store, n int) error {
	if (n-1)%3 == 0 && n > 1 {
		if err := s.Remove([][]byte{unseen(n - 1)}); err != nil {
			return err
		}
	}
	return s.Apply(pos(n), func(b Batch) error {
		if n%3 == 0 {
			b.Put(unseen(n), []byte("unseen"))
		}
		for _, e := range model(n) {
			switch {
			case e.end != nil:
				b.DeleteRange(e.key, e.end)
			case e.val == nil:
				b.Delete(e.key)
			default:
				b.Put(e.key, e.val)
			}
		}
		return nil
	})
}

// checkModel fails unless the store holds exactly the state of its position.
func checkModel(t *testing.T, s *Store) int {
	t.Helper()
	n := int(s.Applied().Seq)
	if n > 0 && s.Applied() != pos(n) {
		t.Fatalf("position %v, want %v", s.Applied(), pos(n))
	}
	want := map[string]string{}
	for i := 1; i <= n; i++ {
		for _, e := range model(i) {
			switch {
			case e.end != nil:
				maps.DeleteFunc(want, func(k, _ string) bool { return k >= string(e.key) && k < string(e.end) })
			case e.val == nil:
				delete(want, string(e.key))
			default:
				want[string(e.key)] = string(e.val)
			}
		}
	}
	var wrong []string
	got := 0
	if err := s.Scan([]byte{1}, []byte{0xff}, func(k, v []byte) bool {
		if n%3 == 0 && bytes.Equal(k, unseen(n)) {
			return true // removed before the next entry, or not yet
		}
		if w, ok := want[string(k)]; !ok || w != string(v) {
			wrong = append(wrong, string(k))
		}
		got++
		return true
	}); err != nil {
		t.Fatal(err)
	}
	if len(wrong) > 0 || got != len(want) {
		t.Fatalf("at entry %d: %d keys, want %d; wrong: %q", n, got, len(want), wrong[:min(5, len(wrong))])
	}
	for _, k := range slices.Sorted(maps.Keys(want)) {
		if v, ok, err := s.Get([]byte(k)); err != nil || !ok || string(v) != want[k] {
			t.Fatalf("DATA: at entry %d: get %s: %d bytes, %v, %v", n, k, len(v), ok, err)
		}
	}
	return n
}

// applyUntilKilled is the child: the child applies entries as fast as possible, flushes and
// checkpoints now and then, and prints the durable entries.
func applyUntilKilled(dir string) error {
	sh := NewShared(1<<20, 100, nil)
	sh.memTable = 256 << 10
	s, err := Open(filepath.Join(dir, "v"), vol, sh)
	if err != nil {
		return err
	}
	fmt.Println("open", s.Applied().Seq)
	for i := 1; ; i++ {
		n := int(s.Applied().Seq) + 1
		if err := applyModel(s, n); err != nil {
			return err
		}
		if i%300 == 0 {
			if err := s.Flush(); err != nil {
				return err
			}
			fmt.Println("durable", n)
		}
		if i%1000 == 0 {
			cp := filepath.Join(dir, fmt.Sprint("cp", n))
			if _, _, err := s.Checkpoint(cp, sh); err != nil {
				return err
			}
			fmt.Println("checkpoint", n)
		}
	}
}

// The process is killed at any moment: the store stands at an entry not older
// than the last flush, with exactly the content of that entry.
func TestKilled(t *testing.T) {
	dir := t.TempDir()
	sh := shared(t)
	s, err := Create(filepath.Join(dir, "v"), vol, sh)
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	for round := range 8 {
		child := exec.Command(os.Args[0])
		child.Env = append(os.Environ(), crashDir+"="+dir)
		out, err := child.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		var stderr bytes.Buffer
		child.Stderr = &stderr
		if err := child.Start(); err != nil {
			t.Fatal(err)
		}
		lines := bufio.NewScanner(out)
		durable, opened := 0, false
		for lines.Scan() {
			word, num, _ := strings.Cut(lines.Text(), " ")
			n, err := strconv.Atoi(num)
			if err != nil {
				t.Fatal(lines.Text())
			}
			if !opened {
				opened = true
				time.AfterFunc(time.Duration(rand.IntN(400))*time.Millisecond, func() { child.Process.Kill() })
			}
			if word != "open" {
				durable = n
			}
		}
		err = child.Wait()
		var exit *exec.ExitError
		if !opened || !errors.As(err, &exit) || exit.Exited() {
			t.Fatalf("the child ended by itself: %v %s", err, stderr.String())
		}
		s, err := Open(filepath.Join(dir, "v"), vol, sh)
		if err != nil {
			t.Fatal(err)
		}
		n := checkModel(t, s)
		t.Logf("round %d: durable %d, stands at %d", round, durable, n)
		if n < durable {
			t.Fatalf("stands at %d, %d was durable", n, durable)
		}
		if err := s.Close(); err != nil {
			t.Fatal(err)
		}
	}
}

// The machine loses power: unsynced bytes survive in part, or not at all.
func TestPowerLoss(t *testing.T) {
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	rng := rand.New(rand.NewPCG(seed, 0))
	fs := vfs.NewCrashableMem()
	if err := fs.MkdirAll("v", 0o700); err != nil {
		t.Fatal(err)
	}
	root, err := fs.OpenDir("/")
	if err == nil {
		err = errors.Join(root.Sync(), root.Close()) // Create does the like
	}
	if err != nil {
		t.Fatal(err)
	}
	h := create
	for round := range 15 {
		sh := NewShared(1<<20, 100, nil)
		sh.memTable, sh.fs = 64<<10, fs
		s, err := open("v", sh, h)
		if err != nil {
			t.Fatalf("seed %d round %d: %v", seed, round, err)
		}
		n := checkModel(t, s)
		durable := n
		for range 1 + rng.IntN(400) {
			n++
			if err := applyModel(s, n); err != nil {
				t.Fatal(err)
			}
			if rng.IntN(60) == 0 {
				if err := s.Flush(); err != nil {
					t.Fatal(err)
				}
				durable = n
			}
		}
		if round == 0 {
			if err := s.Flush(); err != nil { // the store's existence is durable
				t.Fatal(err)
			}
			durable, h = n, existing
		}
		lost := fs.CrashClone(vfs.CrashCloneCfg{UnsyncedDataPercent: rng.IntN(101), RNG: rng})
		if err := s.Close(); err != nil {
			t.Fatal(err)
		}
		sh.Close()
		fs = lost
		sh = NewShared(1<<20, 100, nil)
		sh.fs = fs.CrashClone(vfs.CrashCloneCfg{}) // only to look at
		if s, err = open("v", sh, h); err != nil {
			t.Fatalf("seed %d round %d: %v", seed, round, err)
		}
		if got := checkModel(t, s); got < durable || got > n {
			t.Fatalf("seed %d round %d: stands at %d, durable was %d, applied %d", seed, round, got, durable, n)
		}
		if err := s.Close(); err != nil {
			t.Fatal(err)
		}
		sh.Close()
	}
}

// Applying goes on while a checkpoint is cut: the checkpoint has the state at its own entry.
func TestCheckpointWhileApplying(t *testing.T) {
	top, sh := t.TempDir(), shared(t)
	sh.memTable = 256 << 10
	s, err := Create(filepath.Join(top, "v"), vol, sh)
	if err != nil {
		t.Fatal(err)
	}
	stop, stopped := make(chan struct{}), make(chan error)
	go func() {
		for n := 1; ; n++ {
			select {
			case <-stop:
				stopped <- nil
				return
			default:
			}
			if err := applyModel(s, n); err != nil {
				stopped <- err
				return
			}
		}
	}()
	for i := range 8 {
		cp, to := filepath.Join(top, fmt.Sprint("cp", i)), filepath.Join(top, fmt.Sprint("r", i))
		low := s.Applied()
		at, files, err := s.Checkpoint(cp, sh)
		if err != nil {
			t.Fatal(err)
		}
		if at.Seq < low.Seq {
			t.Fatalf("checkpoint at %v, %v was applied before", at, low)
		}
		if err := Restore(to, vol, files, fromDir(cp)); err != nil {
			t.Fatal(err)
		}
		r, err := Open(to, vol, sh)
		if err != nil || r.Applied() != at {
			t.Fatal(at, err)
		}
		checkModel(t, r)
		if err := r.Close(); err != nil {
			t.Fatal(err)
		}
	}
	close(stop)
	if err := <-stopped; err != nil {
		t.Fatal(err)
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
}
