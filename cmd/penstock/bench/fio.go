package bench

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"text/tabwriter"
)

// Tolerance is the largest relative difference between a row and its fio twin.
const Tolerance = 0.15

// fioTwin is the fio job with the same workload as one of our rows. As for our rows, the tool
// drops the page cache, and the kernel decides on read-ahead.
type fioTwin struct {
	group, row string
	read       bool // fio's figure is under "read"
	args       func(s *side) []string
}

func fioTwins() []fioTwin {
	size := func(n int64) string { return fmt.Sprintf("--size=%d", n) }
	return []fioTwin{
		{"large", "seq-write-fsync", false, func(s *side) []string {
			return []string{"--filename=" + filepath.Join(s.dir, "fio"), "--rw=write", "--bs=1m", size(s.largeSize()), "--end_fsync=1", "--fallocate=none", "--unlink=1"}
		}},
		{"large", "seq-read-cold", true, func(s *side) []string {
			return []string{"--filename=" + filepath.Join(s.dir, "large"), "--rw=read", "--bs=128k", size(s.largeSize())}
		}},
		{"large", "rand-read-cold", true, func(s *side) []string {
			return []string{"--filename=" + filepath.Join(s.dir, "large"), "--rw=randread", "--bs=4k", "--norandommap", size(s.largeSize()),
				fmt.Sprintf("--number_ios=%d", s.cfg.scaled(coldRandReads))}
		}},
		{"append", "append-fsync", false, func(s *side) []string {
			return []string{"--filename=" + filepath.Join(s.dir, "fio"), "--rw=write", "--bs=4k", size(int64(s.cfg.scaled(appends)) * blockSize),
				"--fsync=1", "--fallocate=none", "--file_append=1", "--unlink=1"}
		}},
	}
}

// CompareWithFio runs four rows and their fio twins on the first directory, with interleaved
// rounds, and prints the medians of each row and its twin. CompareWithFio fails if any row
// differs from its twin by more than Tolerance.
func CompareWithFio(ctx context.Context, cfg Config, w io.Writer) error {
	if err := cfg.complete(); err != nil {
		return err
	}
	top, err := os.MkdirTemp(cfg.Dirs[0], "penstock-bench-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(top)
	s := &side{top: top, cfg: &cfg, first: true}

	t := tabwriter.NewWriter(w, 0, 8, 2, ' ', 0)
	fmt.Fprintln(t, "row\tours\tfio\tours/fio")
	var apart []string
	for i, twin := range fioTwins() {
		var g group
		var r row
		for _, g = range groups() {
			if g.name == twin.group {
				break
			}
		}
		for _, r = range g.rows {
			if r.name == twin.row {
				break
			}
		}
		var ours, theirs []float64
		for round := range cfg.Rounds {
			if err := s.enter(g, i*cfg.Rounds+round, true); err != nil {
				return err
			}
			if twin.read {
				// The first read after writing finds a disk that is still busy, or a host
				// without the file in its cache, so an untimed read comes first.
				if _, err := runRow(ctx, r, s); err != nil {
					return fmt.Errorf("bench %s: %w", r.name, err)
				}
			}
			var m sample
			var value float64
			steps := []func() error{
				func() (err error) { m, err = runRow(ctx, r, s); return err },
				func() (err error) { value, err = s.runFio(ctx, r, twin); return err },
			}
			if round%2 == 1 {
				slices.Reverse(steps)
			}
			for _, step := range steps {
				if err := step(); err != nil {
					return fmt.Errorf("bench %s beside fio: %w", r.name, err)
				}
			}
			ours, theirs = append(ours, m.value), append(theirs, value)
			fmt.Fprintf(cfg.Progress, "round %d/%d  %-18s %14s  fio %14s\n", round+1, cfg.Rounds, r.name, valueText(r.unit, m.value), valueText(r.unit, value))
			if g.finish != nil {
				if err := g.finish(s); err != nil {
					return err
				}
			}
		}
		a, b := median(ours), median(theirs)
		fmt.Fprintf(t, "%s\t%s\t%s\t%.3f\n", r.name, valueText(r.unit, a), valueText(r.unit, b), a/b)
		if math.Abs(a/b-1) > Tolerance {
			apart = append(apart, r.name)
		}
	}
	if err := t.Flush(); err != nil {
		return err
	}
	if len(apart) > 0 {
		return fmt.Errorf("bench: these rows differ from fio by more than %.0f %%: %v", Tolerance*100, apart)
	}
	return nil
}

// runFio runs a fio job after a sync and with dropped caches, after a restart for a cold row,
// and returns fio's figure in the row's unit.
func (s *side) runFio(ctx context.Context, r row, twin fioTwin) (float64, error) {
	if err := errors.Join(s.cfg.syncDirs(), dropCaches(3)); err != nil {
		return 0, err
	}
	if r.cold {
		if err := s.restart(ctx); err != nil {
			return 0, err
		}
	}
	args := append([]string{"--name=twin", "--ioengine=psync", "--invalidate=0", "--fadvise_hint=0", "--thread", "--output-format=json"}, twin.args(s)...)
	out, err := exec.CommandContext(ctx, "fio", args...).Output()
	if err != nil {
		return 0, err
	}
	type direction struct {
		Bytes float64 `json:"bw_bytes"` // a second
		IOPS  float64 `json:"iops"`
	}
	var report struct {
		Jobs []struct {
			Read  direction `json:"read"`
			Write direction `json:"write"`
		} `json:"jobs"`
	}
	if err := json.Unmarshal(out, &report); err != nil {
		return 0, fmt.Errorf("its output: %w\n%s", err, out)
	}
	if len(report.Jobs) != 1 {
		return 0, fmt.Errorf("it reports %d jobs", len(report.Jobs))
	}
	d := report.Jobs[0].Write
	if twin.read {
		d = report.Jobs[0].Read
	}
	if r.unit == MegabytesPerSecond {
		return d.Bytes / 1e6, nil
	}
	return d.IOPS, nil
}
