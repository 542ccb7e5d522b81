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

// TestWorkersKnow is the control of the load itself: on a plain directory it
// finds nothing, and each planted loss is found.
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

// TestBegunInTheDark: what is begun while syncs don't count is not held against
// a mount, neither when the file is given up and begun anew nor when a later
// sync counts; and what that sync made durable is demanded.
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

// plant damages what a worker synced.
func plant(root, name string, w Worker) error {
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
