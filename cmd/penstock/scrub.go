package main

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/spf13/cobra"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/admin"
)

func newScrub() *cobra.Command {
	var w where
	var node nodeFlag
	var wait bool
	cmd := &cobra.Command{
		Use:   "scrub",
		Short: "Have chunk servers read everything now and compare it with its checksums",
		Long: `Chunk servers read all their data once in --scrub-period anyway, slowly. This command
makes them begin now, and read faster. Corrupt replicas are kept aside, and copied again
from good replicas. 'penstock disk list' shows how far each disk is; with --wait the
command shows the same, and ends when all disks are done.`,
		Example: `  penstock scrub --wait
  penstock scrub --node 3`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			ctx := cmd.Context()
			return w.api(ctx, func(c *admin.Client) error {
				before, err := listDisks(ctx, c)
				if err != nil {
					return err
				}
				if len(before) == 0 && node == 0 {
					return errors.New("scrub: no chunk server with a disk is connected, so nothing can be read; see 'penstock node list'")
				}
				if _, err := c.Nodes.ScrubNodes(ctx, &admin.ScrubNodesRequest{Node: uint64(node)}); err != nil {
					return err
				}
				if !wait {
					return nil
				}
				return waitScrub(ctx, cmd, c, uint64(node), before)
			})
		},
	}
	node.flag(cmd)
	cmd.Flags().BoolVar(&wait, "wait", false, "wait until everything was read")
	w.flags(cmd)
	return cmd
}

// waitScrub shows the progress of the disks until each disk has completed a pass that is not
// in before. While a disk of before is not connected, waitScrub waits for the disk.
func waitScrub(ctx context.Context, cmd *cobra.Command, c *admin.Client, node uint64, before []diskView) error {
	p, began := newProgress(cmd), time.Now()
	defer p.end()
	for {
		now, err := listDisks(ctx, c)
		if err != nil {
			return err
		}
		s := scrubbed(before, now, node)
		line := fmt.Sprintf("%.1f %% of %d disks read, %v", 100*s.read/float64(max(s.disks, 1)), s.disks, time.Since(began).Round(time.Second))
		if len(s.away) > 0 {
			line += fmt.Sprintf("; not connected: %v", s.away)
		}
		p.show(line)
		if s.disks+len(s.failed) == 0 {
			return errors.New("scrub: the chunk server's disks are not connected any more; see 'penstock node list'")
		}
		if s.read >= float64(s.disks) {
			if len(s.failed) > 0 {
				return meta.E("scrub", meta.IO, fmt.Sprint(s.failed), fmt.Errorf("these disks failed and were not read; see 'penstock disk list'"))
			}
			return nil
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(time.Second):
		}
	}
}

// scrubState is how far a scrub of several disks is.
type scrubState struct {
	disks  int      // that the scrub has to read, connected or not
	read   float64  // the part of the disks that was read, 0 to disks
	failed []string // paths of disks that were failed or removed meanwhile
	away   []string // paths of disks that are not connected now
}

// scrubbed compares the disks of a chunk server (0: of all) with the disks before the scrub.
func scrubbed(before, now []diskView, node uint64) (s scrubState) {
	ended, seen := map[string]string{}, map[string]bool{}
	for _, d := range before {
		ended[d.ID] = d.ScrubEnd
	}
	for _, d := range now {
		if node != 0 && d.Server != node {
			continue
		}
		seen[d.ID] = true
		if d.State == "failed" || d.State == "removed" {
			s.failed = append(s.failed, d.Path)
			continue
		}
		s.disks++
		if d.ScrubEnd != ended[d.ID] {
			s.read++
		} else {
			s.read += min(d.Scrub, 0.999)
		}
	}
	if len(seen) == 0 {
		return s
	}
	for _, d := range before {
		if node != 0 && d.Server != node || seen[d.ID] || d.State == "failed" || d.State == "removed" {
			continue
		}
		s.disks++
		s.away = append(s.away, d.Path)
	}
	return s
}

// progress shows a line that changes on a terminal. Without a terminal, progress prints at
// most a line every ten seconds, and the last line.
type progress struct {
	cmd      *cobra.Command
	terminal bool
	last     string
	shown    time.Time
	printed  string
}

func newProgress(cmd *cobra.Command) *progress {
	p := &progress{cmd: cmd}
	p.terminal = isTerminal(cmd.ErrOrStderr())
	return p
}

func (p *progress) show(line string) {
	p.last = line
	switch {
	case p.terminal:
		fmt.Fprintf(p.cmd.ErrOrStderr(), "\r\x1b[K%s", line)
	case time.Since(p.shown) >= 10*time.Second:
		p.plain()
	}
}

func (p *progress) plain() {
	p.shown, p.printed = time.Now(), p.last
	fmt.Fprintln(p.cmd.ErrOrStderr(), p.last)
}

func (p *progress) end() {
	if p.terminal {
		fmt.Fprintln(p.cmd.ErrOrStderr())
	} else if p.last != p.printed {
		p.plain()
	}
}
