package crash

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"sync"
)

// A worker does one kind of work below one folder, and keeps a model of it:
// what was acknowledged, and what of that was made durable. After a crash
// verify compares what is there with the model: everything durable, and beyond
// it what some prefix of the rest explains.
type worker interface {
	// step does one operation or a few. An error means that the mount failed;
	// the model then knows which operation has an unknown outcome.
	step() error
	// verify checks what is there after a restart, and takes it as the state to
	// go on from.
	verify() error
	// close gives up what is open; errors are those of a dead mount.
	close()
}

// load is a set of workers on one mount.
type load struct {
	workers []worker
	names   []string
}

// newLoad makes two workers of each kind below root. What was synced counts only
// if over was still false when the sync had returned: while a power cut takes
// its way through the kernel, a sync in flight may succeed without its bytes
// (ext4's shutdown does so in 7 of 100 cuts); with real power nobody would have
// heard of that success.
func newLoad(root string, seed uint64, over func() bool) *load {
	l := &load{}
	kinds := []struct {
		name string
		make func(dir string, id uint64, r *rand.Rand) worker
	}{
		{"append", func(dir string, id uint64, r *rand.Rand) worker {
			return &appender{dir: dir, rand: r, over: over, id: id << 32}
		}},
		{"overwrite", func(dir string, id uint64, r *rand.Rand) worker {
			return &overwriter{dir: dir, rand: r, over: over, id: id}
		}},
		{"names", func(dir string, _ uint64, r *rand.Rand) worker { return &namer{dir: dir, rand: r, over: over} }},
		{"replace", func(dir string, id uint64, r *rand.Rand) worker {
			return &replacer{dir: dir, rand: r, over: over, id: id}
		}},
	}
	for i := range uint64(2) {
		for _, kind := range kinds {
			name := fmt.Sprintf("%s-%d", kind.name, i)
			l.names = append(l.names, name)
			l.workers = append(l.workers, kind.make(filepath.Join(root, name), i, rand.New(rand.NewPCG(seed, uint64(len(l.names))))))
		}
	}
	return l
}

// prepare makes the workers' folders, durable.
func (l *load) prepare(root string) error {
	for _, name := range l.names {
		if err := os.Mkdir(filepath.Join(root, name), 0o755); err != nil {
			return err
		}
	}
	return syncDir(root)
}

// run lets all workers step until ctx ends or one fails. It tells the first
// failure of each.
func (l *load) run(ctx context.Context) error {
	errs := make([]error, len(l.workers))
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	var wg sync.WaitGroup
	for i, w := range l.workers {
		wg.Go(func() {
			defer w.close()
			for ctx.Err() == nil {
				if err := w.step(); err != nil {
					errs[i] = fmt.Errorf("%s: %w", l.names[i], err)
					return
				}
			}
		})
	}
	wg.Wait()
	return errors.Join(errs...)
}

// verify checks every worker's files.
func (l *load) verify() error {
	errs := make([]error, len(l.workers))
	for i, w := range l.workers {
		if err := w.verify(); err != nil {
			errs[i] = fmt.Errorf("%s: %w", l.names[i], err)
		}
	}
	return errors.Join(errs...)
}

// syncDir makes the names in a directory durable.
func syncDir(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	defer d.Close()
	return d.Sync()
}

// pattern fills b with the bytes that file id has at off. Any run of them can
// be checked alone, and none is zero.
func pattern(b []byte, id uint64, off int64) {
	for i := range b {
		at := uint64(off) + uint64(i)
		x := (at/8 + 1) * 0x9e3779b97f4a7c15
		x ^= id * 0xd6e8feb86659fd93
		x ^= x >> 29
		b[i] = byte(x>>(8*(at%8))) | 1
	}
}

// checkPattern compares and tells where the first difference is.
func checkPattern(b []byte, id uint64, off int64) error {
	want := make([]byte, len(b))
	pattern(want, id, off)
	for i := range b {
		if b[i] != want[i] {
			return fmt.Errorf("file %x: byte %d is %#x, want %#x (and %d of the next bytes are zero)", id, off+int64(i), b[i], want[i], zerosAt(b[i:]))
		}
	}
	return nil
}

func zerosAt(b []byte) int {
	for i, x := range b {
		if x != 0 {
			return i
		}
	}
	return len(b)
}
