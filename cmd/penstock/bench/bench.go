// Package bench owns the project's workloads, their timing, and the comparison of two
// directories. The package works on any directory and never looks at the type of the file
// system.
//
// A row is a single figure. Rows on the same files form a group. For each round, a group is
// prepared on every side; then each row runs on one side after the other (the order changes
// with each round), so that other load on the machine meets both sides alike. Before each run
// of a cold row, the restart command runs for the side and the kernel's caches are dropped.
// The figure of a row is the median of its rounds.
//
// Rows that remove many files run last, and nothing else is removed before: a file system may
// be slow to reuse recently freed inodes, and a row would then measure the after-effects of
// another row.
//
// A stamp in each 4 KiB block checks all bytes read against the bytes written: a file system
// that returns wrong bytes fails the run instead of counting as fast.
package bench

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// Config configures a run.
type Config struct {
	// Dirs are one or two directories. With two, ratios are of the first to the second.
	Dirs []string
	// Rounds of each row; the median counts. 0 means 3.
	Rounds int
	// Only names rows or groups to run; empty means all.
	Only []string
	// Scale multiplies sizes and counts; 0 means 1.
	Scale float64
	// RestartCmd is a shell command that restarts the servers of a directory. The command runs
	// before each cold row, with the directory in BENCH_DIR. Empty: no restart.
	RestartCmd string
	// PreparedCmd runs for each directory after a group's files were made and before its rows,
	// FinishCmd after its rows, with the directory in BENCH_DIR: for example to make a volume
	// immutable and mutable again. Empty: no command.
	PreparedCmd, FinishCmd string
	// PIDsCmd is a shell command that prints the ids of the first directory's processes, for
	// their CPU time. Empty: none.
	PIDsCmd string
	// PIDs are the ids of such processes if the ids never change.
	PIDs []int
	// Tree is the source tree to pack, unpack and search. Empty: the sources of the installed
	// Go.
	Tree string
	// Scratch holds the packed tree; empty means /dev/shm.
	Scratch string
	// Progress gets a line for each step; nil means none.
	Progress io.Writer
}

// Unit is the unit of a row's value; each unit defines the better direction.
type Unit string

// Units of values.
const (
	MegabytesPerSecond Unit = "MB/s" // 10^6 bytes; more is better
	PerSecond          Unit = "/s"   // operations; more is better
	Seconds            Unit = "s"    // less is better
)

// Result is a row's outcome for all directories.
type Result struct {
	Row   string   `json:"row"`
	Title string   `json:"title"`
	Unit  Unit     `json:"unit"`
	Sides []Figure `json:"sides"`
	// Ratio of the first directory's value to the second's; for seconds, how many times longer
	// the first takes. Zero with a single directory.
	Ratio float64 `json:"ratio,omitempty"`
}

// Figure is a row's outcome for a single directory.
type Figure struct {
	Dir    string    `json:"dir"`
	Value  float64   `json:"value"`  // median
	Rounds []float64 `json:"rounds"` // in order
	// CPU seconds for each operation (unit /s), for each gigabyte of 10^9 bytes (MB/s), or for
	// the whole run (s); medians. CPUMachine counts all processes of the machine and the
	// kernel's threads. CPUProcesses counts this tool, its children and, for the first
	// directory, the processes of PIDs and PIDsCmd.
	CPUMachine   float64 `json:"cpu_machine"`
	CPUProcesses float64 `json:"cpu_processes"`
}

// Report is the outcome of a run.
type Report struct {
	Kernel  string   `json:"kernel"`
	CPUs    int      `json:"cpus"`
	Rounds  int      `json:"rounds"`
	Scale   float64  `json:"scale"`
	Results []Result `json:"results"`
}

// row is the workload of a single figure.
type row struct {
	name, title string
	unit        Unit
	cold        bool // servers restarted, all caches dropped
	dropEntries bool // the kernel's dentries and inodes dropped
	removes     bool // removes the group's files: runs after all other groups
	// before prepares the timed part; may be nil.
	before func(*side) error
	// run is timed and returns the amount of work: bytes for MB/s, operations for /s; ignored
	// for seconds.
	run func(*side) (float64, error)
	// after checks the result of run; may be nil.
	after func(*side) error
}

// group is a set of rows on the same files.
type group struct {
	name string
	once bool // prepared for the first round only: the rows change nothing
	// prepare makes the files in the empty directory of a round; may be nil.
	prepare func(*side) error
	rows    []row
	// finish frees disk space that later groups do not need; may be nil.
	finish func(*side) error
}

// side is a directory under test with the state of its workloads.
type side struct {
	top   string // a fresh directory below the directory of Config.Dirs
	dir   string // below top: the directory of this group and round
	cfg   *Config
	first bool
	seed  uint64 // seed of the contents of this round's files
	pids  []int
}

func (c *Config) scaled(n int) int { return max(int(float64(n)*c.Scale), 16) }

// Run measures all selected rows. Run creates files only below a fresh directory in each of
// cfg.Dirs, and removes the fresh directories before it returns.
func Run(ctx context.Context, cfg Config) (*Report, error) {
	if err := cfg.complete(); err != nil {
		return nil, err
	}
	groups, err := selected(cfg.Only)
	if err != nil {
		return nil, err
	}
	// A worker blocked in a raw system call keeps its processor. With more processors than
	// workers, no worker waits until the runtime notices.
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(16 + runtime.NumCPU()))

	var sides []*side
	defer func() {
		for _, s := range sides {
			os.RemoveAll(s.top) // after a failed run
		}
	}()
	for i, dir := range cfg.Dirs {
		top, err := os.MkdirTemp(dir, "penstock-bench-")
		if err != nil {
			return nil, err
		}
		sides = append(sides, &side{top: top, cfg: &cfg, first: i == 0})
	}

	var uts unix.Utsname
	if err := unix.Uname(&uts); err != nil {
		return nil, err
	}
	report := &Report{Kernel: unix.ByteSliceToString(uts.Release[:]), CPUs: runtime.NumCPU(), Rounds: cfg.Rounds, Scale: cfg.Scale}
	m := &measuring{cfg: &cfg, sides: sides, samples: map[string][][]sample{}}
	for _, removing := range []bool{false, true} {
		for _, g := range groups {
			if err := m.group(ctx, g, removing); err != nil {
				return nil, err
			}
		}
	}
	for _, g := range groups {
		for _, r := range g.rows {
			report.Results = append(report.Results, m.result(r))
		}
	}
	for _, s := range sides {
		if err := os.RemoveAll(s.top); err != nil {
			return nil, err
		}
	}
	return report, nil
}

func (c *Config) complete() error {
	if len(c.Dirs) < 1 || len(c.Dirs) > 2 {
		return fmt.Errorf("bench: %d directories given; one or two can be measured", len(c.Dirs))
	}
	for i, dir := range c.Dirs {
		abs, err := filepath.Abs(dir)
		if err != nil {
			return err
		}
		if st, err := os.Stat(abs); err != nil {
			return err
		} else if !st.IsDir() {
			return fmt.Errorf("bench: %s is not a directory", dir)
		}
		c.Dirs[i] = abs
	}
	if c.Rounds == 0 {
		c.Rounds = 3
	}
	if c.Scale == 0 {
		c.Scale = 1
	}
	if c.Rounds < 1 || c.Scale < 0 || c.Scale > 1000 {
		return fmt.Errorf("bench: %d rounds at scale %g: need at least one round, and a scale of at most 1000", c.Rounds, c.Scale)
	}
	if c.Progress == nil {
		c.Progress = io.Discard
	}
	if c.Scratch == "" {
		c.Scratch = "/dev/shm"
	}
	return nil
}

// selected returns the groups with only the rows named in only, all rows if only is empty.
func selected(only []string) ([]group, error) {
	all := groups()
	if len(only) == 0 {
		return all, nil
	}
	known := map[string]bool{}
	var chosen []group
	for _, g := range all {
		known[g.name] = true
		var rows []row
		for _, r := range g.rows {
			known[r.name] = true
			if slices.Contains(only, g.name) || slices.Contains(only, r.name) {
				rows = append(rows, r)
			}
		}
		if len(rows) > 0 {
			g.rows = rows
			chosen = append(chosen, g)
		}
	}
	for _, name := range only {
		if !known[name] {
			return nil, fmt.Errorf("bench: no row or group %q; there are %s", name, strings.Join(Rows(), ", "))
		}
	}
	return chosen, nil
}

// Rows lists the names of all rows.
func Rows() []string {
	var names []string
	for _, g := range groups() {
		for _, r := range g.rows {
			names = append(names, r.name)
		}
	}
	return names
}

// measuring is the state of a run.
type measuring struct {
	cfg     *Config
	sides   []*side
	samples map[string][][]sample // by row: side, round
}

// group runs all rounds of a group's rows with row.removes equal to removing.
func (m *measuring) group(ctx context.Context, g group, removing bool) error {
	rows := slices.DeleteFunc(slices.Clone(g.rows), func(r row) bool { return r.removes != removing })
	if len(rows) == 0 && (removing || len(g.rows) == 0) {
		return nil
	}
	for round := range m.cfg.Rounds {
		order := slices.Clone(m.sides)
		if round%2 == 1 {
			slices.Reverse(order)
		}
		fresh := !removing && (round == 0 || !g.once)
		for _, s := range order {
			err := s.enter(g, round, fresh)
			if err == nil && !removing {
				err = s.shell(ctx, s.cfg.PreparedCmd)
			}
			if err != nil {
				return fmt.Errorf("bench %s: preparing %s: %w", g.name, s.dir, err)
			}
		}
		for _, r := range rows {
			for _, s := range order {
				if err := ctx.Err(); err != nil {
					return err
				}
				got, err := runRow(ctx, r, s)
				if err != nil {
					return fmt.Errorf("bench %s on %s: %w", r.name, s.dir, err)
				}
				at := slices.Index(m.sides, s)
				if m.samples[r.name] == nil {
					m.samples[r.name] = make([][]sample, len(m.sides))
				}
				m.samples[r.name][at] = append(m.samples[r.name][at], got)
				fmt.Fprintf(m.cfg.Progress, "round %d/%d  %-18s %14s  %s\n", round+1, m.cfg.Rounds, r.name, valueText(r.unit, got.value), m.cfg.Dirs[at])
			}
		}
		for _, s := range order {
			if removing {
				continue
			}
			err := s.shell(ctx, s.cfg.FinishCmd)
			if err == nil && g.finish != nil {
				err = g.finish(s)
			}
			if err != nil {
				return fmt.Errorf("bench %s: finishing %s: %w", g.name, s.dir, err)
			}
		}
	}
	return nil
}

// enter sets the side's directory and seed for a group and round. With fresh, enter also
// creates the directory and prepares the group's files.
func (s *side) enter(g group, round int, fresh bool) error {
	if g.once {
		round = 0
	}
	s.seed = uint64(round+1)<<32 | uint64(len(g.name))
	s.dir = filepath.Join(s.top, fmt.Sprintf("%s-round%d", g.name, round+1))
	if !fresh {
		return nil
	}
	if err := os.Mkdir(s.dir, 0o755); err != nil {
		return err
	}
	if g.prepare == nil {
		return nil
	}
	return g.prepare(s)
}

func (m *measuring) result(r row) Result {
	res := Result{Row: r.name, Title: r.title, Unit: r.unit}
	for at := range m.sides {
		res.Sides = append(res.Sides, figure(m.cfg.Dirs[at], m.samples[r.name][at]))
	}
	if s := res.Sides; len(s) == 2 && s[1].Value > 0 {
		res.Ratio = s[0].Value / s[1].Value
	}
	return res
}

// sample is the outcome of a single row, side and round.
type sample struct {
	value      float64
	cpuMachine float64 // as in Figure
	cpuProcs   float64
}

func figure(dir string, samples []sample) Figure {
	f := Figure{Dir: dir}
	var machine, procs []float64
	for _, s := range samples {
		f.Rounds = append(f.Rounds, s.value)
		machine = append(machine, s.cpuMachine)
		procs = append(procs, s.cpuProcs)
	}
	f.Value, f.CPUMachine, f.CPUProcesses = median(f.Rounds), median(machine), median(procs)
	return f
}

func median(values []float64) float64 {
	v := slices.Sorted(slices.Values(values))
	if n := len(v); n%2 == 0 {
		return (v[n/2-1] + v[n/2]) / 2
	}
	return v[len(v)/2]
}

func runRow(ctx context.Context, r row, s *side) (sample, error) {
	if r.before != nil {
		if err := r.before(s); err != nil {
			return sample{}, err
		}
	}
	// The kernel must not write an earlier row's dirty pages during this row.
	if err := s.cfg.syncDirs(); err != nil {
		return sample{}, err
	}
	switch {
	case r.cold:
		if err := s.restart(ctx); err != nil {
			return sample{}, err
		}
		if err := dropCaches(3); err != nil {
			return sample{}, err
		}
	case r.dropEntries:
		if err := dropCaches(2); err != nil {
			return sample{}, err
		}
	}
	if err := s.findPIDs(ctx); err != nil {
		return sample{}, err
	}
	runtime.GC()
	before, err := readCPU(s.pids)
	if err != nil {
		return sample{}, err
	}
	start := time.Now()
	amount, err := r.run(s)
	elapsed := time.Since(start).Seconds()
	if err != nil {
		return sample{}, err
	}
	after, err := readCPU(s.pids)
	if err != nil {
		return sample{}, err
	}
	if r.after != nil {
		if err := r.after(s); err != nil {
			return sample{}, err
		}
	}
	m := sample{cpuMachine: after.machine - before.machine, cpuProcs: after.processes - before.processes}
	switch r.unit {
	case Seconds:
		m.value = elapsed
		return m, nil
	case MegabytesPerSecond:
		amount /= 1e6
		m.cpuMachine *= 1000 // per gigabyte
		m.cpuProcs *= 1000
	}
	m.value = amount / elapsed
	m.cpuMachine /= amount
	m.cpuProcs /= amount
	return m, nil
}

// restart runs the restart command for this side.
func (s *side) restart(ctx context.Context) error {
	return s.shell(ctx, s.cfg.RestartCmd)
}

// shell runs one of the user's commands, with this side's directory in BENCH_DIR.
func (s *side) shell(ctx context.Context, command string) error {
	if command == "" {
		return nil
	}
	cmd := exec.CommandContext(ctx, "/bin/sh", "-c", command)
	cmd.Env = append(os.Environ(), "BENCH_DIR="+filepath.Dir(s.top))
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("command %q: %w\n%s", command, err, out)
	}
	return nil
}

// findPIDs asks which processes serve the first directory now.
func (s *side) findPIDs(ctx context.Context) error {
	s.pids = nil
	if !s.first {
		return nil
	}
	s.pids = slices.Clone(s.cfg.PIDs)
	if s.cfg.PIDsCmd == "" {
		return nil
	}
	out, err := exec.CommandContext(ctx, "/bin/sh", "-c", s.cfg.PIDsCmd).Output()
	if err != nil {
		return fmt.Errorf("process id command %q: %w", s.cfg.PIDsCmd, err)
	}
	for _, word := range strings.Fields(string(out)) {
		var pid int
		if _, err := fmt.Sscan(word, &pid); err != nil {
			return fmt.Errorf("process id command %q printed %q, which is no number", s.cfg.PIDsCmd, word)
		}
		s.pids = append(s.pids, pid)
	}
	return nil
}

// errMismatch marks a difference between the bytes read and the bytes written.
var errMismatch = errors.New("the read bytes are not the written bytes")
