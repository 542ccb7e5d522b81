// Package load owns the work that tests give a mount while the tests break the system
// below, and the models that know the state that must follow. Each byte can be checked
// alone: a byte is a function of its file, its place and, in files with overwrites, the
// number of the write.
package load

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"sync"

	"golang.org/x/sys/unix"
)

// A Worker does one kind of work below one folder, and keeps a model of the folder: the
// acknowledged operations, and how many of them are durable. After a crash Verify
// compares the folder with the model: the folder must have all durable operations, and some
// prefix of the later operations must explain the rest.
type Worker interface {
	// Step does one operation or a few. An error means that the mount failed; the model
	// then marks the outcome of the failed operation as unknown.
	Step() error
	// Settle syncs the folder after a Step failed, while the system runs. The synced
	// state may differ from the state that the model wrote.
	Settle() error
	// Verify checks the folder after a restart, or after Settle, and makes its state the
	// model's state. Errors: a Violation if no prefix explains the folder; any other
	// error means that Verify could not read the folder.
	Verify() error
	// Close closes the open files. Errors come from a dead mount.
	Close()
}

// A Watched worker lets other goroutines look at its files while it works.
type Watched interface {
	// Look reads a random part of the worker's folder, as another mount shows the folder
	// in dir. Errors: a Violation if bytes are wrong, or if less is there than was
	// durable before.
	Look(dir string, r *rand.Rand) error
}

// A Frozen worker's folder can be checked in a snapshot that was taken while the worker
// worked.
type Frozen interface {
	// The test calls Freeze before it asks for a snapshot, and taken once the snapshot is
	// there. taken returns the check of the folder in the snapshot. The folder must be in
	// a state between the two calls, and must have all operations that were durable at
	// Freeze. If whole, the snapshot must also have the operations acknowledged at
	// Freeze, unless these were lost since (a later sync that succeeds before the check
	// shows that they were not lost). taken returns nil if the worker was verified
	// between the two calls, and may have gone back.
	Freeze() (taken func(whole bool) Check)
}

// Check checks a worker's folder in a snapshot, which dir shows. Errors: a Violation if
// the state is impossible. A Check may be called several times, also while the worker
// works.
type Check func(dir string) error

// progress says how far a worker is, in the numbers of its operations.
type progress struct {
	past   int    // verifications so far
	lost   int    // verifications that found acknowledged operations lost
	begun  uint64 // the last operation tried
	done   uint64 // acknowledged,
	synced uint64 // durable
}

// least returns the number of operations that a snapshot must have that was asked for at
// p; now is a later moment.
func (p progress) least(now progress, whole bool) uint64 {
	if whole && now.lost == p.lost && now.synced >= p.done {
		return p.done
	}
	return p.synced
}

// verified is p after Verify, which found everything up to an operation.
func (p progress) verified(found uint64) progress {
	p.past++
	if found < p.done {
		p.lost++
	}
	p.begun, p.done, p.synced = found, found, found
	return p
}

// Violation is an error that no working system causes: acknowledged bytes or names are
// lost, or unwritten bytes appear.
type Violation struct{ Text string }

func (v *Violation) Error() string { return "DATA: " + v.Text }

func violated(format string, a ...any) error { return &Violation{fmt.Sprintf(format, a...)} }

// Load is a set of workers on one mount.
type Load struct {
	Workers []Worker
	Names   []string
	seed    uint64
	over    func() bool
	meter   *Meter
}

// Options configures a load.
type Options struct {
	Seed uint64
	// Over, if not nil, is asked after a sync has returned: if Over returns true, the sync counts
	// as not done. While a power cut passes through the kernel, a sync in flight may succeed
	// without its bytes (ext4's shutdown does so in 7 of 100 cuts); with real power no program
	// would have received the success.
	Over func() bool
	// Each is the number of workers of each kind; 0 means 2.
	Each int
	// Meter counts; nil does not.
	Meter *Meter
}

// New makes workers of each kind below root.
func New(root string, o Options) *Load {
	l := &Load{seed: o.Seed, over: o.Over, meter: o.Meter}
	if l.over == nil {
		l.over = func() bool { return false }
	}
	if l.meter == nil {
		l.meter = &Meter{}
	}
	if o.Each == 0 {
		o.Each = 2
	}
	for i := range uint64(o.Each) {
		for _, kind := range kinds {
			l.Names = append(l.Names, fmt.Sprintf("%s-%d", kind, i))
			l.Workers = append(l.Workers, l.worker(root, len(l.Workers)))
		}
	}
	return l
}

var kinds = []string{"append", "overwrite", "names", "replace"}

// worker makes the worker of a number, without a past.
func (l *Load) worker(root string, i int) Worker {
	dir, id := filepath.Join(root, l.Names[i]), uint64(i/len(kinds))
	r := rand.New(rand.NewPCG(l.seed, uint64(i+1)))
	switch kinds[i%len(kinds)] {
	case "append":
		return &appender{dir: dir, rand: r, over: l.over, meter: l.meter, id: id << 32}
	case "overwrite":
		return &overwriter{dir: dir, rand: r, over: l.over, meter: l.meter, id: id}
	case "names":
		return &namer{dir: dir, rand: r, over: l.over, meter: l.meter}
	}
	return &replacer{dir: dir, rand: r, over: l.over, meter: l.meter, id: id}
}

// Prepare makes the workers' folders, durable.
func (l *Load) Prepare(root string) error {
	for _, name := range l.Names {
		if err := os.Mkdir(filepath.Join(root, name), 0o755); err != nil {
			return err
		}
	}
	return SyncDir(root)
}

// Run lets all workers step until ctx ends or a worker fails. It returns the first
// failure of each worker.
func (l *Load) Run(ctx context.Context) error {
	errs := make([]error, len(l.Workers))
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	var wg sync.WaitGroup
	for i, w := range l.Workers {
		wg.Go(func() {
			defer w.Close()
			for ctx.Err() == nil {
				if err := w.Step(); err != nil {
					errs[i] = fmt.Errorf("%s: %w", l.Names[i], err)
					return
				}
			}
		})
	}
	wg.Wait()
	return errors.Join(errs...)
}

// Verify checks every worker's files.
func (l *Load) Verify() error {
	errs := make([]error, len(l.Workers))
	for i, w := range l.Workers {
		if err := w.Verify(); err != nil {
			errs[i] = fmt.Errorf("%s: %w", l.Names[i], err)
		}
	}
	return errors.Join(errs...)
}

// SyncDir makes the names in a directory durable.
func SyncDir(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	defer d.Close()
	return d.Sync()
}

// SyncAll makes all changes on the file system of a directory durable. sync(2) would wait for
// every mount of the machine, also for a mount that stands still, and an interrupted caller can't
// be killed.
func SyncAll(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	defer d.Close()
	return os.NewSyscallError("syncfs", unix.Syncfs(int(d.Fd())))
}

// Pattern fills b with the bytes of file id at offset off. Any run of these bytes can be
// checked alone, and no byte is zero.
func Pattern(b []byte, id uint64, off int64) {
	for i := range b {
		at := uint64(off) + uint64(i)
		x := (at/8 + 1) * 0x9e3779b97f4a7c15
		x ^= id * 0xd6e8feb86659fd93
		x ^= x >> 29
		b[i] = byte(x>>(8*(at%8))) | 1
	}
}

// CheckPattern compares and tells where the first difference is.
func CheckPattern(b []byte, id uint64, off int64) error {
	want := make([]byte, len(b))
	Pattern(want, id, off)
	for i := range b {
		if b[i] != want[i] {
			return violated("file %x: byte %d is %#x, want %#x (and %d of the next bytes are zero)", id, off+int64(i), b[i], want[i], zerosAt(b[i:]))
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
