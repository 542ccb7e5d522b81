package load

import (
	"context"
	"errors"
	"math/rand/v2"
	"os"
	"path/filepath"
	"testing"
	"time"
)

// TestWorkersKnow is the control of the load itself: on a plain directory the load finds
// nothing, and finds each planted loss.
func TestWorkersKnow(t *testing.T) {
	root := t.TempDir()
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	l := New(root, Options{Seed: seed})
	if err := l.Prepare(root); err != nil {
		t.Fatal(err)
	}
	run := func() {
		t.Helper()
		ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
		defer cancel()
		if err := l.Run(ctx); err != nil {
			t.Fatal(err)
		}
		for _, w := range l.Workers {
			switch w := w.(type) {
			case *appender:
				w.files[0].synced, w.files[0].named = w.files[0].written, true
				w.show()
			case *overwriter:
				w.synced = w.seq
				w.show()
			case *namer:
				w.synced = len(w.ops)
			case *replacer:
				w.synced = w.version
				w.shown.Store(w.synced)
			}
		}
	}
	run()
	if err := l.Verify(); err != nil {
		t.Fatalf("nothing was broken: %v", err)
	}
	for i, w := range l.Workers[:4] {
		run()
		if err := plant(root, l.Names[i], w); err != nil {
			t.Fatal(err)
		}
		var v *Violation
		if seen, ok := w.(Watched); ok {
			r := rand.New(rand.NewPCG(seed, 5))
			look := func() error { return seen.Look(filepath.Join(root, l.Names[i]), r) }
			for range 200 { // any of the files
				if err := look(); errors.As(err, &v) {
					break
				}
			}
			if v == nil {
				t.Errorf("%s: others don't see a planted loss", l.Names[i])
			}
		}
		v = nil
		if err := w.Verify(); !errors.As(err, &v) {
			t.Errorf("%s: a planted loss was not seen: %v", l.Names[i], err)
		}
		repair(t, root, l, i)
	}
}

// TestFrozen: a copy of a folder, made while the worker stood still, passes as a
// snapshot. A copy from before the acknowledged operations does not pass as a whole
// snapshot, and a copy with a planted loss does not pass at all.
func TestFrozen(t *testing.T) {
	const seed = 6 // with this seed the appender syncs its open file again
	root, dark := t.TempDir(), false
	l := New(root, Options{Seed: seed, Each: 1, Over: func() bool { return dark }})
	if err := l.Prepare(root); err != nil {
		t.Fatal(err)
	}
	shot := func(name string) string {
		t.Helper()
		to := filepath.Join(t.TempDir(), name)
		if err := os.CopyFS(to, os.DirFS(filepath.Join(root, name))); err != nil {
			t.Fatal(err)
		}
		return to
	}
	for i, w := range l.Workers {
		steps := func(n int) {
			t.Helper()
			for range n {
				if err := w.Step(); err != nil {
					t.Fatal(err)
				}
			}
		}
		frozen := func() func(bool) Check { return w.(Frozen).Freeze() }
		steps(200)
		dark = true // the next operations are acknowledged, but not durable
		early := shot(l.Names[i])
		steps(5)
		taken := frozen()
		steps(3)
		now := shot(l.Names[i])
		whole := taken(true)
		if err := errors.Join(whole(now), whole(early), taken(false)(early)); err != nil {
			t.Errorf("%s: %v", l.Names[i], err)
		}
		dark = false
		steps(100) // the later syncs prove that nothing was lost
		var v *Violation
		if err := whole(now); err != nil {
			t.Errorf("%s: %v", l.Names[i], err)
		}
		if err := whole(early); !errors.As(err, &v) {
			t.Errorf("%s: what was acknowledged before is missing: %v", l.Names[i], err)
		}
		if err := taken(false)(early); err != nil {
			t.Errorf("%s: %v", l.Names[i], err)
		}
		// Operations begun after the snapshot are not in the snapshot.
		if late := shot(l.Names[i]); l.Names[i] != "append-0" { // an appender may have begun another file
			if err := whole(late); !errors.As(err, &v) {
				t.Errorf("%s: it has what came later: %v", l.Names[i], err)
			}
		}
		if err := plant(filepath.Dir(now), l.Names[i], w); err != nil {
			t.Fatal(err)
		}
		if err := taken(false)(now); !errors.As(err, &v) {
			t.Errorf("%s: a planted loss is not seen: %v", l.Names[i], err)
		}
		taken = frozen()
		w.Close()
		if err := w.Verify(); err != nil {
			t.Fatal(err)
		}
		if i > 0 && taken(true) != nil { // appended files can only grow
			t.Errorf("%s: it was verified in between, and may have gone back", l.Names[i])
		}
	}
}

// TestBegunInTheDark: an operation begun while syncs do not count is not held against a
// mount, neither when the file is replaced by a new file nor when a later sync counts.
// All operations that the later sync made durable are demanded.
func TestBegunInTheDark(t *testing.T) {
	const seed, steps = 5, 100 // with a sync in each of the eight on average
	for _, again := range []bool{true, false} {
		root, dark := t.TempDir(), true
		l := New(root, Options{Seed: seed, Over: func() bool { return dark }, Each: 1})
		if err := l.Prepare(root); err != nil {
			t.Fatal(err)
		}
		look := func(w Worker) error {
			return w.(Watched).Look(w.(*overwriter).dir, rand.New(rand.NewPCG(seed, 5)))
		}
		for i, w := range l.Workers {
			o, ok := w.(*overwriter)
			if !ok {
				continue
			}
			step := func() {
				t.Helper()
				for range steps {
					if err := o.Step(); err != nil {
						t.Fatal(err)
					}
				}
			}
			step()
			if dark = false; again {
				o.Close()
				if err := errors.Join(o.Settle(), o.Verify()); err != nil {
					t.Fatal(err)
				}
			}
			step()
			if err := look(o); err != nil {
				t.Errorf("begun anew %v: %v", again, err)
			}
			if err := o.Verify(); err != nil {
				t.Errorf("begun anew %v: %v", again, err)
			}
			step()
			o.Close()
			if err := plant(root, l.Names[i], w); err != nil {
				t.Fatal(err)
			}
			o.synced = o.seq
			o.show()
			var v *Violation
			if err := look(o); !errors.As(err, &v) {
				t.Errorf("begun anew %v: others don't see a planted loss: %v", again, err)
			}
			if err := o.Verify(); !errors.As(err, &v) {
				t.Errorf("begun anew %v: a planted loss was not seen: %v", again, err)
			}
		}
	}
}

// plant damages data that a worker synced.
func plant(root, name string, w Worker) error {
	dir := filepath.Join(root, name)
	switch w := w.(type) {
	case *appender:
		return os.Truncate(filepath.Join(dir, w.files[0].name), w.files[0].synced-1)
	case *overwriter:
		f, err := os.OpenFile(filepath.Join(dir, "blocks"), os.O_RDWR, 0)
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
func repair(t *testing.T, root string, l *Load, i int) {
	t.Helper()
	dir := filepath.Join(root, l.Names[i])
	if err := os.RemoveAll(dir); err != nil {
		t.Fatal(err)
	}
	if err := os.Mkdir(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	l.Workers[i] = l.worker(root, i)
}
