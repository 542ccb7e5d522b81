package main

import (
	"context"
	"fmt"
	"maps"
	"math"
	"slices"
	"time"

	"github.com/spf13/cobra"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/admin"
	"penstock.io/penstock/meta/server"
)

// volumeFull is a volume with the facts that only its owner knows.
type volumeFull struct {
	volumeView `yaml:",inline"`
	Snapshots  *snapshotsView `json:"snapshots,omitempty" yaml:"snapshots,omitempty"`
	Events     *eventsView    `json:"events,omitempty" yaml:"events,omitempty"`
	Data       *dataView      `json:"data,omitempty" yaml:"data,omitempty"`
}

// eventsView describes the kept events.
type eventsView struct {
	Keep  uint64 `json:"keep" yaml:"keep"` // smallest number of events kept
	First uint64 `json:"first" yaml:"first"`
	Last  uint64 `json:"last" yaml:"last"`
}

// snapshotsView sums a volume's snapshots.
type snapshotsView struct {
	Count   int    `json:"count" yaml:"count"`
	Held    uint64 `json:"held_bytes" yaml:"held_bytes"` // see meta.SnapshotList
	Counted bool   `json:"held_counted" yaml:"held_counted"`
	// Quota is the part of Held that counts in the volume's quota, by the volume's policy.
	Quota *meta.SnapshotQuota `json:"quota,omitempty" yaml:"quota,omitempty"`
	Keep  string              `json:"keep,omitempty" yaml:"keep,omitempty"`
	// Failing is the reason why a scheduled snapshot could not be taken.
	Failing *meta.ScheduleFailing `json:"schedule_failing,omitempty" yaml:"schedule_failing,omitempty"`
}

// dataView describes the servers of a volume's chunks, and the chunks to be moved.
type dataView struct {
	Chunks uint64 `json:"chunks" yaml:"chunks"`
	Bytes  uint64 `json:"bytes" yaml:"bytes"` // of sealed chunks, each counted once
	Open   uint64 `json:"open" yaml:"open"`
	// Short chunks have fewer replicas than the policy wants.
	Short      uint64 `json:"short" yaml:"short"`
	ShortBytes uint64 `json:"short_bytes" yaml:"short_bytes"`
	Placed     bool   `json:"placed" yaml:"placed"`         // all chunks lie as the policy wants
	ToMove     uint64 `json:"to_move" yaml:"to_move"`       // chunks that do not lie so
	ToCopy     uint64 `json:"copy_bytes" yaml:"copy_bytes"` // bytes still to be copied for ToMove
	Blocked    uint64 `json:"blocked" yaml:"blocked"`       // of ToMove: nothing can be done now
	// Unmet is the reason why the cluster can't meet the policy.
	Unmet   string       `json:"unmet,omitempty" yaml:"unmet,omitempty"`
	Servers []serverData `json:"servers" yaml:"servers"`
	Stored  *storedView  `json:"stored,omitempty" yaml:"stored,omitempty"` // nil unless chunks are compressed, or will be
}

// storedView sums the replicas of sealed chunks.
type storedView struct {
	Replicas   uint64  `json:"replicas" yaml:"replicas"`
	Compressed uint64  `json:"compressed" yaml:"compressed"` // of Replicas
	Dense      uint64  `json:"dense" yaml:"dense"`           // of Replicas: compression saves nothing
	Plain      uint64  `json:"plain_bytes" yaml:"plain_bytes"`
	Stored     uint64  `json:"stored_bytes" yaml:"stored_bytes"` // bytes of the replicas on the disks
	Ratio      float64 `json:"ratio" yaml:"ratio"`               // Plain / Stored
}

// serverData describes a chunk server's chunks of a volume.
type serverData struct {
	ID       uint64 `json:"id" yaml:"id"`
	Topology string `json:"topology,omitempty" yaml:"topology,omitempty"`
	Class    string `json:"class,omitempty" yaml:"class,omitempty"`
	Chunks   uint64 `json:"chunks" yaml:"chunks"`
	Open     uint64 `json:"open" yaml:"open"`
	Bytes    uint64 `json:"bytes" yaml:"bytes"`
}

// repairOf asks a volume's owner for the state of the volume's chunks.
func repairOf(ctx context.Context, c *admin.Client, v meta.VolumeID) (*server.RepairStatus, error) {
	answer, err := c.Nodes.GetRepairStatus(ctx, &admin.GetRepairStatusRequest{Volume: admin.Numbered(v)})
	if err != nil {
		return nil, err
	}
	var r server.RepairStatus
	admin.Hear(&r, answer.Status)
	return &r, nil
}

// toMove counts the chunks that do not lie as the policy wants.
func toMove(r *server.RepairStatus) uint64 { return r.Degraded() }

func readVolume(ctx context.Context, c *admin.Client, name string) (*volumeFull, error) {
	v, err := c.FindVolume(ctx, admin.Named(name))
	if err != nil {
		return nil, err
	}
	full := &volumeFull{volumeView: viewOf(v)}
	answer, err := c.Snapshots.ListSnapshots(ctx, &admin.ListSnapshotsRequest{Volume: admin.Numbered(v.ID), Count: true})
	if err != nil {
		return nil, err
	}
	list := answer.List()
	full.Snapshots = &snapshotsView{len(list.Snapshots), list.Held, list.Counted, list.Quota, list.Keep, list.Failing}
	if log, err := c.EventLog(ctx, admin.Numbered(v.ID)); err == nil && log.Keep > 0 {
		full.Events = &eventsView{log.Keep, log.First, log.Last}
	} else if err != nil {
		return nil, err
	}
	r, err := repairOf(ctx, c, v.ID)
	if meta.KindOf(err) == meta.AccessDenied {
		return full, nil // only the volume's administrators may see the servers
	}
	if err != nil {
		return nil, err
	}
	d := &dataView{Chunks: r.Chunks, Bytes: r.Bytes, Open: r.Open, Short: r.Lost + r.Endangered + r.UnderReplicated, ShortBytes: r.ShortBytes, ToMove: toMove(r), ToCopy: r.CopyBytes, Blocked: r.Blocked, Unmet: r.Unmet, Servers: []serverData{}}
	d.Placed = d.ToMove == 0 && r.Unscanned == 0
	if b := r.Stored; b.Replicas > 0 {
		d.Stored = &storedView{b.Replicas, b.Compressed, b.Dense, b.Plain, b.Stored, math.Round(b.Ratio()*1000) / 1000}
	}
	nodes, err := c.Nodes.ListNodes(ctx, &admin.ListNodesRequest{})
	if err != nil && meta.KindOf(err) != meta.AccessDenied { // only the cluster's administrators may list servers
		return nil, err
	}
	for _, id := range slices.Sorted(maps.Keys(r.Nodes)) {
		n := r.Nodes[id]
		one := serverData{ID: uint64(id), Chunks: n.Chunks, Open: n.Open, Bytes: n.Bytes}
		for _, x := range nodes.GetNodes() {
			if x.Connected && x.Id == uint64(id) {
				one.Topology, one.Class = x.Topology, x.Class
			}
		}
		d.Servers = append(d.Servers, one)
	}
	full.Data = d
	return full, nil
}

func newVolumeShow() *cobra.Command {
	var w where
	var out output
	cmd := &cobra.Command{
		Use:   "show NAME",
		Short: "Show one volume: policy, use, snapshots, and the places of its data",
		Long: `Shows one volume: the policy, the used bytes and files, the bytes that only snapshots
keep, the chunk servers with the volume's data, and the number of chunks still to be
moved for the policy. The parts of the last checkpoint count as chunks of the volume.`,
		Example: `  penstock volume show datasets
  penstock volume show datasets --output yaml`,
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			return w.api(cmd.Context(), func(c *admin.Client) error {
				v, err := readVolume(cmd.Context(), c, args[0])
				if err != nil {
					return err
				}
				return out.print(cmd.OutOrStdout(), v, func(t *table) { v.table(t) })
			})
		},
	}
	out.flag(cmd)
	w.flags(cmd)
	return cmd
}

// countedText describes the bytes of snapshots that count in a quota.
func countedText(q *meta.SnapshotQuota) string {
	switch {
	case !q.InForce:
		return "what they hold is being counted"
	case q.Falls:
		return bytesText(q.Bytes) + ", less what deleted ones held, which is being counted"
	}
	return bytesText(q.Bytes) + " that they alone hold"
}

func (v *volumeFull) table(t *table) {
	showVolume(t, v.volumeView)
	if n := v.Snapshots; n != nil {
		t.row("snapshots", fmt.Sprintf("%d, which %s", n.Count, heldText(n.Held, n.Counted || n.Count == 0)))
		if q := n.Quota; q != nil {
			t.row("", "in the quota: "+countedText(q))
		}
		if n.Keep != "" {
			t.row("schedule", n.Keep)
		}
		if n.Failing != nil {
			t.row("", failingText(n.Failing))
		}
	}
	if e := v.Events; e != nil {
		t.row("events", fmt.Sprintf("%d to %d; the last %d are kept", e.First, e.Last, e.Keep))
	}
	d := v.Data
	if d == nil {
		return
	}
	t.row("chunks", fmt.Sprintf("%d (%s), %d open", d.Chunks, bytesText(d.Bytes), d.Open))
	if b := d.Stored; b != nil {
		t.row("stored", fmt.Sprintf("%s in %s, ratio %.2f; of %d replicas %d are compressed, %d would not shrink", bytesText(b.Plain), bytesText(b.Stored), b.Ratio, b.Replicas, b.Compressed, b.Dense))
	}
	if d.Short > 0 {
		t.row("short", fmt.Sprintf("%d chunks (%s) have fewer than %d replicas", d.Short, bytesText(d.ShortBytes), v.Replicas))
	}
	if d.Unmet != "" {
		t.row("unmet", "nothing in the cluster can meet the policy: "+d.Unmet)
		t.row("", "add nodes where it wants them, or ask for less: penstock volume set")
	}
	placed := "as its policy wants"
	if !d.Placed {
		placed = moveText(d.ToMove, d.ToCopy, d.Blocked, 0)
	}
	t.row("placed", placed)
	for _, s := range d.Servers {
		t.row(fmt.Sprintf("on server %d", s.ID), fmt.Sprintf("%d chunks (%s), %d open, %s %s", s.Chunks, bytesText(s.Bytes), s.Open, s.Topology, s.Class))
	}
}

func moveText(chunks, bytes, blocked uint64, rate float64) string {
	line := fmt.Sprintf("%d chunks do not lie as the policy wants, %s to copy", chunks, bytesText(bytes))
	if chunks == 0 {
		line = "what its chunk servers have is being listed"
	}
	if rate > 0 {
		line += fmt.Sprintf(", %s/s", bytesText(uint64(rate)))
	}
	if blocked > 0 {
		line += fmt.Sprintf("; %d have nowhere to go: see 'penstock node list'", blocked)
	}
	return line
}

// setUntilHeld sets a policy, and tries again once a second while the answer is Unavailable:
// the owner can't seal open chunks that violate the policy, or mounts can't write their data
// back. setUntilHeld shows the reason.
func setUntilHeld(cmd *cobra.Command, c *admin.Client, v meta.VolumeInfo, words meta.VolumeWords) error {
	p := newProgress(cmd)
	defer p.end()
	for {
		_, err := c.SetVolume(cmd.Context(), v.ID, v.Policy, words)
		if meta.KindOf(err) != meta.Unavailable || cmd.Context().Err() != nil {
			return err
		}
		p.show(firstLine(err))
		select {
		case <-cmd.Context().Done():
			return cmd.Context().Err()
		case <-time.After(time.Second):
		}
	}
}

// waitPlaced shows how much of a volume does not lie as its policy wants, until nothing is
// left to move.
func waitPlaced(ctx context.Context, cmd *cobra.Command, c *admin.Client, v meta.VolumeInfo) error {
	p := newProgress(cmd)
	defer p.end()
	for clean := 0; ; {
		r, err := repairOf(ctx, c, v.ID)
		switch {
		case ctx.Err() != nil:
			return ctx.Err()
		case meta.KindOf(err) == meta.AccessDenied:
			return err // the grant was revoked
		case err != nil:
			clean = 0
			p.show("its owner does not answer: " + firstLine(err))
		case toMove(r) == 0 && r.Unscanned == 0:
			if clean++; clean == 2 { // twice: the volume may have been between two owners
				p.show(fmt.Sprintf("volume %s lies as its policy wants: %d chunks (%s)", v.Name, r.Chunks, bytesText(r.Bytes)))
				return nil
			}
		default:
			clean = 0
			p.show(moveText(toMove(r), r.CopyBytes, r.Blocked, r.Rate))
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(time.Second):
		}
	}
}
