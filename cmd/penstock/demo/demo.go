// Package demo owns the demonstration: the main job of the system on real input, from an
// empty folder to a verified restart after SIGKILL, with the speed of each step beside
// the native file system's. The demonstration uses only the binary and the kernel, as a
// user does.
package demo

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"text/tabwriter"
	"time"

	"golang.org/x/sys/unix"

	"penstock.io/penstock/cmd/penstock/spawn"
)

// Config says where to run and how much.
type Config struct {
	Binary  string // path of penstock
	Scratch string // folder for the data, the mount and the native copy; empty means /var/tmp
	// Target, if set, is a plain directory used in place of a mount: nothing is
	// started or killed.
	Target string
	// Tree is the source tree to ingest; empty means the sources of the
	// installed Go.
	Tree string
	// Images and ShardBytes size the generated data; 0 means 10,000 files and
	// shards of 256 MiB.
	Images     int
	ShardBytes int64
	Out        io.Writer
}

const (
	shards  = 2
	epochs  = 2
	readers = 4
	writers = 4
)

// result is a line of the table.
type result struct {
	step         string
	amount       float64
	unit         string // of amount
	ours, native time.Duration
	alone        bool // no native time to compare with
}

// Run runs the demonstration and cleans up, also after a failure.
func Run(ctx context.Context, cfg Config) (err error) {
	if cfg.Images == 0 {
		cfg.Images = 10_000
	}
	if cfg.ShardBytes == 0 {
		cfg.ShardBytes = 256 << 20
	}
	if cfg.Scratch == "" {
		cfg.Scratch = "/var/tmp"
	}
	if cfg.Tree == "" {
		out, err := exec.CommandContext(ctx, "go", "env", "GOROOT").Output()
		if err != nil {
			return fmt.Errorf("demo: no Go found, whose sources are the data set: %w", err)
		}
		cfg.Tree = filepath.Join(strings.TrimSpace(string(out)), "src")
	}
	scratch, err := os.MkdirTemp(cfg.Scratch, "penstock-demo-")
	if err != nil {
		return err
	}
	d := &demo{cfg: cfg, data: filepath.Join(scratch, "data"), mount: filepath.Join(scratch, "mnt"), native: filepath.Join(scratch, "native"), files: map[string]want{}}
	defer func() { err = errors.Join(err, d.cleanUp(scratch)) }()
	for _, dir := range []string{d.data, d.mount, d.native} {
		if err := os.Mkdir(dir, 0o755); err != nil {
			return err
		}
	}
	began := time.Now()
	if err := d.run(ctx); err != nil {
		return fmt.Errorf("demo: %w", err)
	}
	d.printf("\n%d files, %.1f GB, verified byte by byte at the end; %.0f s in all.\n", len(d.files), float64(d.bytes())/1e9, time.Since(began).Seconds())
	return nil
}

type demo struct {
	cfg     Config
	data    string // of penstock
	mount   string
	native  string // the same on the file system below
	root    string // where the tree of penstock is
	process *spawn.Process
	files   map[string]want // by path relative to the root
	results []result
}

func (d *demo) printf(format string, a ...any) { fmt.Fprintf(d.cfg.Out, format, a...) }

func (d *demo) start(ctx context.Context) error {
	d.root = d.mount
	if d.cfg.Target != "" {
		root, err := os.MkdirTemp(d.cfg.Target, "penstock-demo-target-")
		d.root = root
		return err
	}
	p, err := spawn.Start(ctx, spawn.Config{Binary: d.cfg.Binary, Dir: d.data, Mount: d.mount})
	d.process = p
	return err
}

func (d *demo) run(ctx context.Context) error {
	if err := d.start(ctx); err != nil {
		return err
	}
	if d.process != nil {
		d.printf("penstock up: %d ms until %s served\n", d.process.StartedIn.Milliseconds(), d.mount)
	}
	for _, step := range []func(context.Context) error{d.ingestTree, d.ingestImages, d.ingestShards, d.train, d.checkpoint} {
		if err := step(ctx); err != nil {
			return err
		}
	}
	if d.process != nil {
		if err := d.killAndStart(ctx); err != nil {
			return err
		}
	}
	if err := d.verify(ctx); err != nil {
		return err
	}
	if d.process != nil {
		if err := d.process.Stop(time.Minute); err != nil {
			return err
		}
		d.process = nil
	}
	return d.table()
}

// killAndStart ends the process as a crash would, and starts a new process over the dead
// mount.
func (d *demo) killAndStart(ctx context.Context) error {
	d.printf("SIGKILL\n")
	d.process.Kill()
	d.process = nil
	if err := d.start(ctx); err != nil {
		return fmt.Errorf("after SIGKILL: %w", err)
	}
	d.results = append(d.results, result{step: "from SIGKILL to serving again", ours: d.process.StartedIn, alone: true})
	return nil
}

// both times a step on the mount and on the native file system.
func (d *demo) both(step string, amount float64, unit string, do func(root string) error) error {
	r := result{step: step, amount: amount, unit: unit}
	for _, side := range []struct {
		root string
		took *time.Duration
	}{{d.native, &r.native}, {d.root, &r.ours}} {
		if err := errors.Join(syncAll(d.native), syncAll(d.root)); err != nil { // the work that the last step left must not count for this step
			return fmt.Errorf("%s: %w", step, err)
		}
		began := time.Now()
		if err := do(side.root); err != nil {
			return fmt.Errorf("%s: %w", step, err)
		}
		*side.took = time.Since(began)
	}
	d.results = append(d.results, r)
	d.printf("%-34s %8.2f s   native %8.2f s\n", step, r.ours.Seconds(), r.native.Seconds())
	return nil
}

// syncAll makes everything on a directory's file system durable.
func syncAll(dir string) error {
	f, err := os.Open(dir)
	if err != nil {
		return err
	}
	defer f.Close()
	return os.NewSyscallError("syncfs", unix.Syncfs(int(f.Fd())))
}

func (d *demo) table() error {
	t := tabwriter.NewWriter(d.cfg.Out, 0, 8, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(t, "\nstep\tpenstock\tnative\tratio\t")
	for _, r := range d.results {
		if r.alone {
			fmt.Fprintf(t, "%s\t%.2f s\t\t\t\n", r.step, r.ours.Seconds())
			continue
		}
		fmt.Fprintf(t, "%s\t%s\t%s\t%.2f\t\n", r.step, speed(r, r.ours), speed(r, r.native), r.native.Seconds()/r.ours.Seconds())
	}
	return t.Flush()
}

func speed(r result, took time.Duration) string {
	return fmt.Sprintf("%.0f %s/s", r.amount/took.Seconds(), r.unit)
}

// cleanUp ends the process and its mount, then removes the scratch folder, but never
// through a mount.
func (d *demo) cleanUp(scratch string) error {
	var err error
	if d.process != nil {
		err = d.process.End()
	}
	err = errors.Join(err, spawn.Unmount(d.mount))
	if spawn.Mounted(d.mount) {
		return errors.Join(err, fmt.Errorf("demo: %s is still mounted; %s stays", d.mount, scratch))
	}
	if d.cfg.Target != "" && d.root != "" && d.root != d.mount {
		err = errors.Join(err, os.RemoveAll(d.root))
	}
	return errors.Join(err, os.RemoveAll(scratch))
}
