// Package load owns the work that tests give a mount while they break what is
// below it, and the models that know what must be there afterwards. Every byte
// can be checked alone: it follows from its file, its place and, where a file is
// written again, the number of the write.
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

// A Worker does one kind of work below one folder, and keeps a model of it:
// what was acknowledged, and what of that was made durable. After a crash
// Verify compares what is there with the model: everything durable, and beyond
// it what some prefix of the rest explains.
type Worker interface {
	// Step does one operation or a few. An error means that the mount failed;
	// the model then knows which operation has an unknown outcome.
	Step() error
	// Settle makes durable what is there, after a Step failed and while the system
	// goes on. What it makes durable need not be what the model had written.
	Settle() error
	// Verify checks what is there after a restart, or after Settle, and takes it as
	// the state to go on from. What must not be is a Violation; any other error
	// says that it could not look.
	Verify() error
	// Close gives up what is open; errors are those of a dead mount.
	Close()
}

// A Watched worker lets others look at its files while it works.
type Watched interface {
	// Look reads something of the worker in its folder as another mount shows it.
	// Less than what was durable before, or wrong bytes, is a Violation.
	Look(dir string, r *rand.Rand) error
}

// A Frozen worker's folder can be checked in a snapshot that was taken while it
// worked.
type Frozen interface {
	// Freeze is called before a snapshot is asked for, and what it gives once the
	// snapshot is there; that gives the check of the folder in the snapshot: as it
	// was at one moment between the two, with what was durable at the first. In one
	// that is whole is what was acknowledged at the first, too, unless it was lost
	// since: a sync that succeeds later, before the check, says that it was not. Nil:
	// the worker was verified in between, and may have gone back.
	Freeze() (taken func(whole bool) Check)
}

// Check checks a worker's folder in a snapshot, as a directory shows it; what must
// not be is a Violation. It may be called again, also while the worker works.
type Check func(dir string) error

// progress is how far a worker is, in the numbers of its operations.
type progress struct {
	past   int    // how often it was verified,
	lost   int    // and how often it had lost then what was acknowledged
	begun  uint64 // the last one tried,
	done   uint64 // acknowledged,
	synced uint64 // durable
}

// least is what a snapshot has at least that was asked for at p; now is a later moment.
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

// Violation is what no working system shows: acknowledged bytes or names lost,
// or bytes that nobody wrote.
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

// Options are what a load may be told.
type Options struct {
	Seed uint64
	// Over: what was synced counts only if it was still false when the sync had
	// returned. While a power cut takes its way through the kernel, a sync in
	// flight may succeed without its bytes (ext4's shutdown does so in 7 of 100
	// cuts); with real power nobody would have heard of that success. Nil is never.
	Over func() bool
	// Each is how many workers of each kind there are; 0 means 2.
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

// Run lets all workers step until ctx ends or one fails. It tells the first
// failure of each.
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

// SyncAll makes all that was changed on the file system of a directory durable.
// sync(2) would wait for every mount of the machine, also for one that stands
// still, and can't be killed meanwhile.
func SyncAll(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	defer d.Close()
	return os.NewSyscallError("syncfs", unix.Syncfs(int(d.Fd())))
}

// Pattern fills b with the bytes that file id has at off. Any run of them can
// be checked alone, and none is zero.
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
