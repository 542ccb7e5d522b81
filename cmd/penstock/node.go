package main

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/admin"
	"penstock.io/penstock/meta/server"
)

func newNode() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "node",
		Short: "List, empty and remove chunk servers",
		Long: `A node is a chunk server that the cluster has seen. To remove a node for good:

  penstock node drain NODE --wait    # all its data is copied elsewhere
  (stop the server)
  penstock node remove NODE

A dead node needs 'penstock node remove NODE' only: its data is copied again from other
replicas once the node has been away for long, removed or not.`,
	}
	cmd.AddCommand(newNodeList(), newNodeDrain(), newNodeRemove())
	return cmd
}

// nodeView is a chunk server in the form that commands print.
type nodeView struct {
	ID       uint64 `json:"id" yaml:"id"`
	Name     string `json:"name" yaml:"name"`
	Address  string `json:"address,omitempty" yaml:"address,omitempty"`
	Topology string `json:"topology" yaml:"topology"`
	State    string `json:"state" yaml:"state"`
	Live     bool   `json:"live" yaml:"live"`
	Gone     string `json:"gone,omitempty" yaml:"gone,omitempty"`
	Total    uint64 `json:"total_bytes" yaml:"total_bytes"`
	Free     uint64 `json:"free_bytes" yaml:"free_bytes"`
	Disks    int    `json:"disks" yaml:"disks"`
	BadDisks int    `json:"bad_disks" yaml:"bad_disks"`
	// Chunks, Bytes and Open count the server's chunks according to the journals. Needed
	// counts the chunks without enough other replicas.
	Chunks uint64 `json:"chunks" yaml:"chunks"`
	Bytes  uint64 `json:"chunk_bytes" yaml:"chunk_bytes"`
	Open   uint64 `json:"open_chunks" yaml:"open_chunks"`
	Needed uint64 `json:"needed_chunks" yaml:"needed_chunks"`
	// ToLeave and ToArrive count the chunks still to be moved off the server, or off one of
	// its disks, and onto the server.
	ToLeave       uint64 `json:"chunks_to_leave" yaml:"chunks_to_leave"`
	ToLeaveBytes  uint64 `json:"bytes_to_leave" yaml:"bytes_to_leave"`
	ToArrive      uint64 `json:"chunks_to_arrive" yaml:"chunks_to_arrive"`
	ToArriveBytes uint64 `json:"bytes_to_arrive" yaml:"bytes_to_arrive"`
}

// moveText describes the chunks still to be moved: "-12 (96.0 MiB)" off the server, "+…" onto
// the server.
func (n nodeView) moveText() string {
	var parts []string
	if n.ToLeave > 0 {
		parts = append(parts, fmt.Sprintf("-%d (%s)", n.ToLeave, bytesText(n.ToLeaveBytes)))
	}
	if n.ToArrive > 0 {
		parts = append(parts, fmt.Sprintf("+%d (%s)", n.ToArrive, bytesText(n.ToArriveBytes)))
	}
	return strings.Join(parts, " ")
}

func (n nodeView) stateText() string {
	switch {
	case n.State == "removed" || n.Live:
		return n.State
	case n.Gone != "":
		return n.State + ", away " + n.Gone
	}
	return n.State + ", away"
}

// readRepair sums the owners' counts of their volumes' chunks. If some servers do not answer,
// readRepair returns the sum of the other servers' counts together with an error.
func readRepair(ctx context.Context, c *admin.Client) (*server.RepairStatus, error) {
	sum := &server.RepairStatus{Nodes: map[meta.ServerID]server.NodeChunks{}}
	answer, err := c.Nodes.GetRepairStatus(ctx, &admin.GetRepairStatusRequest{})
	if err != nil {
		return sum, err
	}
	admin.Hear(sum, answer.Status)
	var errs []error
	for _, x := range answer.Unanswered {
		errs = append(errs, fmt.Errorf("metadata server %s: %w", x.Server, x.Error.AsError()))
	}
	return sum, errors.Join(errs...)
}

// listNodes returns all chunk servers ever seen, with the counts of their chunks.
func listNodes(ctx context.Context, c *admin.Client) ([]nodeView, *server.RepairStatus, error) {
	views, err := knownNodes(ctx, c)
	if err != nil {
		return nil, nil, err
	}
	repair, err := countChunks(ctx, c, views)
	return views, repair, err
}

// knownNodes returns all chunk servers ever seen, without the counts of their chunks, for
// which every metadata server must answer.
func knownNodes(ctx context.Context, c *admin.Client) ([]nodeView, error) {
	answer, err := c.Nodes.ListNodes(ctx, &admin.ListNodesRequest{})
	if err != nil {
		return nil, err
	}
	views := []nodeView{}
	for _, x := range answer.Nodes {
		var n server.NodeStatus
		admin.Hear(&n, x)
		v := nodeView{ID: uint64(n.ID), Name: n.Name, Address: n.Addr, Topology: n.Topology, State: string(n.State), Live: n.Live,
			Total: n.Total, Free: n.Free, Disks: len(n.Disks)}
		if n.Gone > 0 {
			v.Gone = n.Gone.String()
		}
		for _, d := range n.Disks {
			if n.Live && d.State != meta.DiskOK && d.State != meta.DiskFull {
				v.BadDisks++
			}
		}
		views = append(views, v)
	}
	return views, nil
}

// countChunks sets the counts of chunks of each node.
func countChunks(ctx context.Context, c *admin.Client, views []nodeView) (*server.RepairStatus, error) {
	repair, err := readRepair(ctx, c)
	for i := range views {
		v := &views[i]
		n := repair.Nodes[meta.ServerID(v.ID)]
		v.Chunks, v.Bytes, v.Open, v.Needed = n.Chunks, n.Bytes, n.Open, n.Needed
		v.ToLeave, v.ToLeaveBytes, v.ToArrive, v.ToArriveBytes = n.ToLeave, n.ToLeaveBytes, n.ToArrive, n.ToArriveBytes
	}
	return repair, err
}

// warn prints err, which made the counts of chunks incomplete, on standard error.
func warn(cmd *cobra.Command, err error) {
	if err != nil {
		cmd.PrintErrf("penstock: the counts of chunks are not complete: %v\n", err)
	}
}

func newNodeList() *cobra.Command {
	var w where
	var out output
	cmd := &cobra.Command{
		Use:   "list",
		Short: "List the chunk servers that were ever seen",
		Example: `  penstock node list
  penstock node list --output json`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return w.api(cmd.Context(), func(c *admin.Client) error {
				views, repair, err := listNodes(cmd.Context(), c)
				if repair == nil {
					return err
				}
				warn(cmd, err)
				return out.print(cmd.OutOrStdout(), views, func(t *table) {
					t.row("NODE", "NAME", "STATE", "PLACE", "ADDRESS", "USED", "FREE", "DISKS", "CHUNKS", "OPEN", "NEEDED", "TO MOVE")
					for _, v := range views {
						disks := strconv.Itoa(v.Disks)
						if v.BadDisks > 0 {
							disks += fmt.Sprintf(" (%d bad)", v.BadDisks)
						}
						t.row(v.ID, v.Name, v.stateText(), v.Topology, v.Address, bytesText(v.Total-min(v.Free, v.Total)), bytesText(v.Free), disks, v.Chunks, v.Open, v.Needed, v.moveText())
					}
				})
			})
		},
	}
	out.flag(cmd)
	w.flags(cmd)
	return cmd
}

// findNode finds a node by its number or its name, without the counts of chunks.
func findNode(ctx context.Context, c *admin.Client, word string) (nodeView, error) {
	all, err := knownNodes(ctx, c)
	if err != nil {
		return nodeView{}, err
	}
	var found []nodeView
	for _, n := range all {
		if fmt.Sprint(n.ID) == word {
			return n, nil
		}
		if n.Name == word && n.State != "removed" {
			found = append(found, n)
		}
	}
	switch len(found) {
	case 0:
		return nodeView{}, fmt.Errorf("no chunk server has the number or name %s; 'penstock node list' shows the chunk servers", printable(word))
	case 1:
		return found[0], nil
	}
	return nodeView{}, usagef("%d nodes are called %s; give the number of one", len(found), word)
}

func newNodeDrain() *cobra.Command {
	var w where
	var cancel, wait, yes bool
	cmd := &cobra.Command{
		Use:   "drain NODE",
		Short: "Copy everything on a chunk server elsewhere, so that it can be stopped",
		Long: `Copies everything on a chunk server elsewhere. Meanwhile the server takes no new data,
and goes on serving its replicas. With --wait the command shows the progress, and ends
when the server can be stopped; without --wait, see 'penstock node list'. If the command
is interrupted, the drain goes on; --cancel ends the drain.

First the command lists the volumes that will have fewer copies of new data, or that
can't be written, on the remaining servers, and asks; a script gives --yes. The data of
such volumes stays on the server until another server is there.`,
		Example: `  penstock node drain 3 --wait
  penstock node drain 3 --cancel`,
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			ctx := cmd.Context()
			return w.api(ctx, func(c *admin.Client) error {
				n, err := findNode(ctx, c, args[0])
				if err != nil {
					return err
				}
				if cancel {
					_, err := c.Nodes.CancelDrain(ctx, &admin.CancelDrainRequest{Node: n.ID})
					return err
				}
				if n.State == "active" {
					if err := forecastDrain(cmd, c, n, yes); err != nil {
						return err
					}
				}
				if _, err := c.Nodes.DrainNode(ctx, &admin.DrainNodeRequest{Node: n.ID}); err != nil {
					return err
				}
				if !wait {
					return nil
				}
				return waitDrain(ctx, cmd, c, n)
			})
		},
	}
	f := cmd.Flags()
	f.BoolVar(&cancel, "cancel", false, "take a drain back")
	f.BoolVar(&wait, "wait", false, "wait until nothing is left on the node or disk")
	f.BoolVar(&yes, "yes", false, "do not ask")
	w.flags(cmd)
	return cmd
}

// forecastDrain prints the effects of a drain on volumes, and asks for confirmation unless yes
// is set. Without a terminal, forecastDrain asks only if some volumes become worse off.
func forecastDrain(cmd *cobra.Command, c *admin.Client, n nodeView, yes bool) error {
	ctx := cmd.Context()
	answer, err := c.Nodes.ForecastDrain(ctx, &admin.ForecastDrainRequest{Node: n.ID})
	if err != nil {
		return err
	}
	var f server.DrainForecast
	admin.Hear(&f, answer)
	lines := forecastLines(&f)
	for _, line := range lines {
		cmd.PrintErrln(line)
	}
	if yes || len(lines) == 0 && !isTerminal(cmd.InOrStdin()) {
		return nil
	}
	counted := []nodeView{n}
	_, err = countChunks(ctx, c, counted)
	warn(cmd, err)
	return confirm(cmd, fmt.Sprintf("Empty chunk server %d (%s, %s)?", n.ID, n.Name, bytesText(counted[0].Bytes)), fmt.Sprint(n.ID))
}

// forecastLines describes the volumes that become worse off; nil if none does.
func forecastLines(f *server.DrainForecast) (lines []string) {
	for _, v := range f.Volumes {
		switch {
		case v.Then == 0:
			lines = append(lines, fmt.Sprintf("volume %s: UNWRITABLE while the server is drained: too few others have room for the %d copies of its policy, or for its least number", v.Name, v.Replicas))
		default:
			lines = append(lines, fmt.Sprintf("volume %s: DEGRADED while the server is drained: new data has %d of %d copies", v.Name, v.Then, v.Replicas))
		}
	}
	if len(lines) > 0 {
		lines = append(lines, "What these volumes have on the server has nowhere to go, so the drain does not end, until another server is added where their policies want it.")
	}
	if f.Used > f.Room {
		lines = append(lines, fmt.Sprintf("%s are used on the server, and the others have room for %s", bytesText(f.Used), bytesText(f.Room)))
	}
	return lines
}

// waitDrain shows the number of chunks left on a node until the node is empty.
func waitDrain(ctx context.Context, cmd *cobra.Command, c *admin.Client, n nodeView) error {
	p := newProgress(cmd)
	defer p.end()
	var most uint64
	clean := 0
	for {
		r, err := readRepair(ctx, c)
		if ctx.Err() != nil {
			return ctx.Err()
		}
		left := r.Nodes[meta.ServerID(n.ID)]
		most = max(most, left.Bytes)
		switch {
		case err != nil:
			clean = 0
			p.show("not all metadata servers answer: " + firstLine(err))
		case left.Chunks+left.Open == 0 && r.Unscanned == 0:
			// Twice: a volume may have been between two owners.
			if clean++; clean == 2 {
				p.show(fmt.Sprintf("chunk server %d is empty: it can be stopped, and then removed with 'penstock node remove %d'", n.ID, n.ID))
				return nil
			}
		default:
			clean = 0
			p.show(drainText(left, most, r))
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(time.Second):
		}
	}
}

func drainText(left server.NodeChunks, most uint64, r *server.RepairStatus) string {
	line := fmt.Sprintf("%d chunks (%s) and %d open ones are left", left.Chunks, bytesText(left.Bytes), left.Open)
	if most > left.Bytes {
		line += fmt.Sprintf(", %.0f %% done", 100*float64(most-left.Bytes)/float64(most))
	}
	if r.Rate > 0 {
		line += fmt.Sprintf(", %s/s, %v to go", bytesText(uint64(r.Rate)), time.Duration(float64(left.Bytes)/r.Rate*float64(time.Second)).Round(time.Second))
	}
	if r.Unscanned > 0 {
		line += fmt.Sprintf("; %d volumes are still being looked through", r.Unscanned)
	}
	if r.Blocked > 0 {
		line += fmt.Sprintf("; %d chunks have nowhere to go: see 'penstock cluster status'", r.Blocked)
	}
	return line
}

func firstLine(err error) string {
	line, _, _ := strings.Cut(err.Error(), "\n")
	return line
}

func newNodeRemove() *cobra.Command {
	var w where
	var force, yes bool
	cmd := &cobra.Command{
		Use:   "remove NODE",
		Short: "Give a chunk server up for good",
		Long: `Gives a chunk server up for good: the cluster does not wait for the server any more,
and does not let it in again. The server must be empty ('penstock node drain'). With
--force the server may still have replicas; data without another replica is then lost.`,
		Example: `  penstock node remove 3 --yes`,
		Args:    cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			ctx := cmd.Context()
			return w.api(ctx, func(c *admin.Client) error {
				n, err := findNode(ctx, c, args[0])
				if err != nil {
					return err
				}
				if !yes {
					counted := []nodeView{n}
					_, err := countChunks(ctx, c, counted)
					warn(cmd, err)
					question := fmt.Sprintf("Remove chunk server %d (%s) for good?", n.ID, n.Name)
					if needed := counted[0].Needed; needed > 0 {
						question = fmt.Sprintf("Remove chunk server %d (%s) for good, with %d chunks that are not elsewhere often enough?", n.ID, n.Name, needed)
					}
					if err := confirm(cmd, question, fmt.Sprint(n.ID)); err != nil {
						return err
					}
				}
				_, err = c.Nodes.RemoveNode(ctx, &admin.RemoveNodeRequest{Node: n.ID, Force: force})
				return err
			})
		},
	}
	f := cmd.Flags()
	f.BoolVar(&force, "force", false, "also if the node still has replicas")
	destroying(cmd, &yes)
	w.flags(cmd)
	return cmd
}
