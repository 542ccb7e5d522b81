package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"penstock.io/penstock/chunkserver/store"
	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/admin"
	"penstock.io/penstock/meta/server"
)

func newDisk() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "disk",
		Short: "List, give up, replace and check the disks of chunk servers",
		Long: `A chunk server has one or more disks (--disk), each with an identity of its own.
The server remembers its disks: if another disk or an empty directory (a disk that is
not mounted) is at a disk's path, the server refuses and never changes it, and counts
the missing disk as failed, whose data is copied from other replicas. A disk that
returns I/O errors, became read-only, or does not answer fails by itself.

To exchange a disk:

  penstock disk fail DISK --wait   # takes nothing new, its data is moved elsewhere
  penstock disk replace DISK       # the server closes the disk: unmount it
  penstock disk replace DISK       # once more, with an empty file system mounted there

A disk that failed by itself needs the last two steps only. DISK is the id that
'penstock disk list' shows, or the beginning of the id.`,
	}
	cmd.AddCommand(newDiskList(), newDiskFail(), newDiskReplace(), newDiskCheck())
	return cmd
}

// diskView is a disk in the form that commands print.
type diskView struct {
	ID     string `json:"id" yaml:"id"`
	Server uint64 `json:"node" yaml:"node"`
	Path   string `json:"path" yaml:"path"`
	Class  string `json:"class" yaml:"class"`
	State  string `json:"state" yaml:"state"`
	Detail string `json:"detail,omitempty" yaml:"detail,omitempty"`
	Total  uint64 `json:"total_bytes" yaml:"total_bytes"`
	Free   uint64 `json:"free_bytes" yaml:"free_bytes"`
	// Chunks and Bytes count the data still to be moved off a disk that is being emptied.
	// Pending: the counts do not include all volumes yet.
	Chunks  uint64 `json:"chunks_to_move,omitempty" yaml:"chunks_to_move,omitempty"`
	Bytes   uint64 `json:"bytes_to_move,omitempty" yaml:"bytes_to_move,omitempty"`
	Pending bool   `json:"pending,omitempty" yaml:"pending,omitempty"`
	// Scrub is the progress of the scrub, 0 to 1. ScrubEnd is the end of the last complete
	// scrub.
	Scrub    float64 `json:"scrub,omitempty" yaml:"scrub,omitempty"`
	ScrubEnd string  `json:"scrub_end,omitempty" yaml:"scrub_end,omitempty"`
}

func listDisks(ctx context.Context, c *admin.Client) ([]diskView, error) {
	answer, err := c.Nodes.ListNodes(ctx, &admin.ListNodesRequest{})
	if err != nil {
		return nil, err
	}
	views := []diskView{}
	for _, x := range answer.Nodes {
		var n server.NodeStatus
		if admin.Hear(&n, x); !n.Connected {
			continue
		}
		for _, d := range n.Disks {
			v := diskView{ID: d.ID, Server: uint64(n.ID), Path: d.Path, Class: d.Class, State: d.State.String(), Detail: d.Detail,
				Total: d.Total, Free: d.Free, Scrub: float64(d.Scrubbed) / 1000}
			if d.ScrubEnd != 0 {
				v.ScrubEnd = time.Unix(0, int64(d.ScrubEnd)).UTC().Format(time.RFC3339Nano)
			}
			views = append(views, v)
		}
	}
	return views, nil
}

// findDisk finds a disk by its id or the beginning of its id.
func findDisk(ctx context.Context, c *admin.Client, id string) (diskView, error) {
	all, err := listDisks(ctx, c)
	if err != nil {
		return diskView{}, err
	}
	var found []diskView
	for _, d := range all {
		if strings.HasPrefix(d.ID, id) && id != "" {
			found = append(found, d)
		}
	}
	switch len(found) {
	case 0:
		return diskView{}, fmt.Errorf("no disk of a connected chunk server has an id that begins with %s; 'penstock disk list' shows the disks", printable(id))
	case 1:
		return found[0], nil
	}
	return diskView{}, usagef("%d disks have ids that begin with %s; give more of it", len(found), id)
}

func (d diskView) String() string {
	return fmt.Sprintf("%s of chunk server %d (%s)", d.Path, d.Server, d.ID)
}

func newDiskList() *cobra.Command {
	var w where
	var out output
	var node nodeFlag
	cmd := &cobra.Command{
		Use:   "list",
		Short: "List the disks of the chunk servers that are connected",
		Example: `  penstock disk list
  penstock disk list --node 3 --output json`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return w.api(cmd.Context(), func(c *admin.Client) error {
				all, err := listDisks(cmd.Context(), c)
				if err != nil {
					return err
				}
				views := []diskView{}
				for _, v := range all {
					if node == 0 || v.Server == uint64(node) {
						views = append(views, v)
					}
				}
				warn(cmd, countLeft(cmd.Context(), c, views))
				return out.print(cmd.OutOrStdout(), views, func(t *table) {
					t.row("NODE", "DISK", "PATH", "CLASS", "STATE", "USED", "FREE", "TO MOVE", "SCRUBBED", "DETAIL")
					for _, v := range views {
						t.row(v.Server, short(v.ID), v.Path, v.Class, v.State, bytesText(v.Total-min(v.Free, v.Total)), bytesText(v.Free), v.moveText(), v.scrubText(), v.Detail)
					}
				})
			})
		},
	}
	node.flag(cmd)
	out.flag(cmd)
	w.flags(cmd)
	return cmd
}

// short returns the first 12 digits of a disk's id, for people.
func short(id string) string { return id[:min(len(id), 12)] }

func (d diskView) moveText() string {
	switch {
	case d.State != meta.DiskFailing.String():
		return "-"
	case d.Chunks == 0 && d.Pending:
		return "?"
	}
	return fmt.Sprintf("%d (%s)", d.Chunks, bytesText(d.Bytes))
}

func (d diskView) scrubText() string {
	switch {
	case d.Scrub > 0:
		return fmt.Sprintf("%.0f %%", 100*d.Scrub)
	case d.ScrubEnd != "":
		return d.ScrubEnd[:min(len(d.ScrubEnd), len("2006-01-02T15:04"))]
	}
	return "-"
}

// nodeFlag is the value of --node: a chunk server's number, or zero.
type nodeFlag uint64

func (n *nodeFlag) flag(cmd *cobra.Command) {
	cmd.Flags().Var(n, "node", "number of a chunk server (default all); see 'penstock node list'")
}

// Set parses a number.
func (n *nodeFlag) Set(text string) error {
	v, err := strconv.ParseUint(text, 10, 64)
	if err != nil || v == 0 {
		return fmt.Errorf("%q is no chunk server's number; see 'penstock node list'", text)
	}
	*n = nodeFlag(v)
	return nil
}

func (n *nodeFlag) String() string {
	if *n == 0 {
		return ""
	}
	return fmt.Sprint(uint64(*n))
}

// Type names the value in help texts.
func (n *nodeFlag) Type() string { return "number" }

// diskOrder finds the disk, asks for confirmation unless yes is set, and calls order. after
// gets the error of order, and completes the command.
func diskOrder(cmd *cobra.Command, w *where, id, question string, yes bool, order func(*admin.Client, diskView) error, after func(*admin.Client, diskView, error) error) error {
	return w.api(cmd.Context(), func(c *admin.Client) error {
		d, err := findDisk(cmd.Context(), c, id)
		if err != nil {
			return err
		}
		if !yes {
			if err := confirm(cmd, fmt.Sprintf(question, d), short(d.ID)); err != nil {
				return err
			}
		}
		return after(c, d, order(c, d))
	})
}

// countLeft sets the counts of data still to be moved off disks that are being emptied. If
// countLeft returns an error, the counts are incomplete and Pending is set.
func countLeft(ctx context.Context, c *admin.Client, views []diskView) error {
	if !slices.ContainsFunc(views, func(v diskView) bool { return v.State == meta.DiskFailing.String() }) {
		return nil
	}
	r, err := readRepair(ctx, c)
	for i := range views {
		if v := &views[i]; v.State == meta.DiskFailing.String() {
			left := r.Disks[v.ID]
			v.Chunks, v.Bytes, v.Pending = left.Chunks, left.Bytes, err != nil || r.Unscanned > 0
		}
	}
	return err
}

// emptyTimes is how often in a row a disk must be found empty: a volume may be between two
// owners, or its owner may not know yet that the disk was given up.
const emptyTimes = 3

// waitEmptied shows the data left on a disk that was given up, until the disk is empty.
// Errors: IO if the disk fails during the wait.
func waitEmptied(cmd *cobra.Command, c *admin.Client, d diskView) error {
	ctx := cmd.Context()
	p := newProgress(cmd)
	defer p.end()
	var most uint64
	for empty := 0; empty < emptyTimes; {
		all, err := listDisks(ctx, c)
		all = slices.DeleteFunc(all, func(x diskView) bool { return x.ID != d.ID })
		err = errors.Join(err, countLeft(ctx, c, all))
		if ctx.Err() != nil {
			return ctx.Err()
		}
		was := empty
		empty = 0
		switch {
		case err != nil:
			p.show("not all metadata servers answer: " + firstLine(err))
		case len(all) == 0:
			p.show(fmt.Sprintf("chunk server %d is not connected", d.Server))
		case all[0].State == meta.DiskFailed.String() || all[0].State == meta.DiskRemoved.String():
			return meta.E("empty disk", meta.IO, d.ID, fmt.Errorf("it can't be read any more (%s): its replicas are copied from other servers, see 'penstock cluster status'", all[0].Detail))
		case all[0].State != meta.DiskFailing.String():
			p.show("the metadata server has not heard of it yet")
		case all[0].Chunks > 0:
			most = max(most, all[0].Bytes)
			p.show(fmt.Sprintf("%s are left, %.0f %% done", all[0].moveText(), 100*float64(most-all[0].Bytes)/float64(max(most, 1))))
		case all[0].Pending:
			p.show("volumes are still being looked through")
		default:
			empty = was + 1
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(time.Second):
		}
	}
	p.show(fmt.Sprintf("nothing that is needed is left on %s: 'penstock disk replace %s' lets go of it", d, short(d.ID)))
	return nil
}

func newDiskFail() *cobra.Command {
	var w where
	var yes, wait bool
	cmd := &cobra.Command{
		Use:   "fail DISK",
		Short: "Give a disk up: the disk takes no new data, and its data is moved elsewhere",
		Long: `Gives a disk up. The disk takes no new data; its replicas are served until they were
copied elsewhere. 'penstock disk replace' puts a new disk in its place. This can't be
undone. With --wait the command shows the progress, and ends when the disk has no
needed data; if the command is interrupted, the copying goes on. Without --wait, see TO
MOVE in 'penstock disk list'.`,
		Example: `  penstock disk fail 4f1c09 --yes --wait`,
		Args:    cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			return diskOrder(cmd, &w, args[0], "Give up disk %s?", yes, func(c *admin.Client, d diskView) error {
				_, err := c.Nodes.FailDisk(cmd.Context(), &admin.FailDiskRequest{Node: d.Server, Disk: d.ID})
				return err
			}, func(c *admin.Client, d diskView, err error) error {
				if err != nil {
					return err
				}
				cmd.Println("given up; its data is being moved")
				if !wait {
					return nil
				}
				return waitEmptied(cmd, c, d)
			})
		},
	}
	w.flags(cmd)
	destroying(cmd, &yes)
	cmd.Flags().BoolVar(&wait, "wait", false, "wait until nothing is left on the node or disk")
	return cmd
}

func newDiskReplace() *cobra.Command {
	var w where
	var yes bool
	cmd := &cobra.Command{
		Use:   "replace DISK",
		Short: "Exchange a disk that failed or was given up for a new disk",
		Long: `Makes the chunk server let go of a disk that failed or was given up, so that it
can be unmounted. If the directory is empty, it becomes a new disk; else mount
an empty file system there and run the command again, which fails as long as
something is there. A disk that is well is not let go of.`,
		Example: `  penstock disk replace 4f1c09 --yes`,
		Args:    cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			return diskOrder(cmd, &w, args[0], "Let go of disk %s? Replicas that are nowhere else are lost.", yes, func(c *admin.Client, d diskView) error {
				_, err := c.Nodes.ReplaceDisk(cmd.Context(), &admin.ReplaceDiskRequest{Node: d.Server, Disk: d.ID})
				return err
			}, func(_ *admin.Client, d diskView, err error) error {
				if meta.KindOf(err) == meta.NotEmpty {
					cmd.Printf("let go of; unmount %s, mount an empty file system there, then once more: penstock disk replace %s\n", d.Path, short(d.ID))
					return nil
				}
				if err != nil {
					return err
				}
				cmd.Println("replaced; see 'penstock disk list'")
				return nil
			})
		},
	}
	w.flags(cmd)
	destroying(cmd, &yes)
	return cmd
}

func newDiskCheck() *cobra.Command {
	var out output
	cmd := &cobra.Command{
		Use:   "check DIR",
		Short: "Read everything on a disk, and list damaged and lost data",
		Long: `Reads a disk of a stopped chunk server, with decoders of its own, and compares
everything with the checksums. The command changes nothing. The exit status is 0 if all
is well, 1 if anything is damaged.

A server does not open a disk with a damaged log, and goes on with its other disks.
Replicas that this command counts as sound can be copied from other replicas, and
'penstock disk replace' exchanges the disk.`,
		Example: `  penstock disk check /var/lib/penstock-chunks/chunks`,
		Args:    cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			if _, err := os.Stat(args[0]); err != nil {
				return err
			}
			rep, err := store.Check(store.DirDisk(args[0]))
			if err != nil {
				return err
			}
			view := struct {
				Chunks   uint64   `json:"chunks" yaml:"chunks"`
				Sealed   uint64   `json:"sealed" yaml:"sealed"`
				Packed   uint64   `json:"compressed" yaml:"compressed"`
				Bytes    uint64   `json:"verified_bytes" yaml:"verified_bytes"`
				Records  uint64   `json:"log_records" yaml:"log_records"`
				Notes    []string `json:"notes" yaml:"notes"`
				Problems []string `json:"problems" yaml:"problems"`
			}{rep.Chunks, rep.Sealed, rep.Packed, rep.Bytes, rep.LogRecords, append([]string{}, rep.Notes...), append([]string{}, rep.Problems...)}
			err = out.print(cmd.OutOrStdout(), view, func(t *table) {
				t.row("chunks", view.Chunks)
				t.row("sealed", view.Sealed)
				t.row("compressed", view.Packed)
				t.row("verified", bytesText(view.Bytes))
				t.row("log records", view.Records)
				for _, n := range view.Notes {
					t.row("note", n)
				}
				for _, p := range view.Problems {
					t.row("PROBLEM", p)
				}
			})
			if err == nil && len(view.Problems) > 0 {
				cmd.PrintErrf("penstock disk check: %s: %d problems\n", args[0], len(view.Problems))
				return &statusError{exitFailed}
			}
			return err
		},
	}
	out.flag(cmd)
	return cmd
}
