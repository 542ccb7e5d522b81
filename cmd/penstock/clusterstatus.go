package main

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"penstock.io/penstock/meta/client"
	"penstock.io/penstock/meta/server"
	"penstock.io/penstock/meta/wire"
)

// clusterView is the state of a cluster as `penstock cluster status` prints it.
type clusterView struct {
	Cluster string `json:"cluster" yaml:"cluster"`
	// Health is "ok", or what is wrong, the worst first.
	Health  string     `json:"health" yaml:"health"`
	Meta    []metaView `json:"metadata_servers" yaml:"metadata_servers"`
	Nodes   []nodeView `json:"nodes" yaml:"nodes"`
	Disks   []diskView `json:"bad_disks" yaml:"bad_disks"`
	Volumes int        `json:"volumes" yaml:"volumes"`
	// Repair is the sum over all owners; empty where one did not answer.
	Repair *server.RepairStatus `json:"repair,omitempty" yaml:"repair,omitempty"`
}

// metaView is a metadata server.
type metaView struct {
	Name    string `json:"name" yaml:"name"`
	Address string `json:"address" yaml:"address"`
	Uptime  string `json:"uptime,omitempty" yaml:"uptime,omitempty"`
	Owns    int    `json:"owns" yaml:"owns"`
	Follows int    `json:"follows" yaml:"follows"`
	Error   string `json:"error,omitempty" yaml:"error,omitempty"`
}

func readCluster(ctx context.Context, s *client.Session) (*clusterView, error) {
	v := &clusterView{Cluster: s.Cluster(), Meta: []metaView{}, Disks: []diskView{}}
	for _, err := range s.Volumes(ctx) {
		if err != nil {
			return nil, err
		}
		v.Volumes++
	}
	nodes, repair, rerr := listNodes(ctx, s)
	if repair == nil {
		return nil, rerr
	}
	v.Nodes = nodes
	var bad []string
	for _, m := range s.MetaServers() {
		one := metaView{Name: m.Name, Address: m.Addr}
		step, cancel := context.WithTimeout(ctx, dialTimeout)
		re, err := s.AdminAt(step, m.Addr, wire.Admin{Op: wire.AdminStatus})
		cancel()
		var st server.Status
		if err == nil {
			err = json.Unmarshal(re.Report, &st)
		}
		if err != nil {
			one.Error = err.Error()
			bad = append(bad, fmt.Sprintf("metadata server %s does not answer", m.Name))
		} else {
			one.Uptime, one.Owns, one.Follows = st.Uptime, len(st.Volumes), len(st.Standbys)
		}
		v.Meta = append(v.Meta, one)
	}
	disks, err := listDisks(ctx, s)
	if err != nil {
		return nil, err
	}
	for _, d := range disks {
		if d.State != "ok" {
			v.Disks = append(v.Disks, d)
			bad = append(bad, fmt.Sprintf("disk %s of node %d is %s", d.Path, d.Server, d.State))
		}
	}
	for _, n := range nodes {
		if !n.Live && n.State != "removed" {
			bad = append(bad, fmt.Sprintf("node %d (%s) is away", n.ID, n.Name))
		}
	}
	if rerr == nil {
		v.Repair = repair
		bad = append(repairText(repair), bad...)
	} else {
		bad = append(bad, "not all owners could be asked about their chunks")
	}
	v.Health = "ok"
	if len(bad) > 0 {
		v.Health = strings.Join(bad, "; ")
	}
	return v, nil
}

// repairText says what is wrong with chunks, the worst first.
func repairText(r *server.RepairStatus) (bad []string) {
	for _, x := range []struct {
		n    uint64
		text string
	}{
		{r.Lost, "have no good replica that can be reached"},
		{r.Endangered, "have one replica left"},
		{r.UnderReplicated, "have too few replicas"},
		{r.Corrupt, "have a corrupt replica"},
		{r.Draining, "are on a node or disk that is being emptied"},
		{r.Misplaced, "lie where their policy doesn't want them"},
		{r.Surplus, "have too many replicas"},
	} {
		if x.n > 0 {
			bad = append(bad, fmt.Sprintf("%d chunks %s", x.n, x.text))
		}
	}
	if r.Blocked > 0 {
		bad = append(bad, fmt.Sprintf("%d of them can't be helped now: too few servers or too little room", r.Blocked))
	}
	if r.Unscanned > 0 {
		bad = append(bad, fmt.Sprintf("%d volumes were not looked through yet", r.Unscanned))
	}
	return bad
}

func newClusterStatus() *cobra.Command {
	var w where
	var out output
	var check bool
	cmd := &cobra.Command{
		Use:   "status",
		Short: "Show servers, disks and whether all chunks are as they should be",
		Example: `  penstock cluster status
  penstock cluster status --check || echo something is wrong`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return w.with(cmd.Context(), func(s *client.Session) error {
				v, err := readCluster(cmd.Context(), s)
				if err != nil {
					return err
				}
				if err := out.print(cmd.OutOrStdout(), v, v.table); err != nil {
					return err
				}
				if check && v.Health != "ok" {
					return &statusError{exitFailed}
				}
				return nil
			})
		},
	}
	cmd.Flags().BoolVar(&check, "check", false, "exit with status 1 unless all is well")
	out.flag(cmd)
	w.flags(cmd)
	return cmd
}

func (v *clusterView) table(t *table) {
	t.row("cluster", v.Cluster)
	t.row("volumes", v.Volumes)
	for i, h := range strings.Split(v.Health, "; ") {
		name := ""
		if i == 0 {
			name = "health"
		}
		t.row(name, h)
	}
	if r := v.Repair; r != nil {
		t.row("chunks", fmt.Sprintf("%d sealed (%s), %d open, %d to be deleted", r.Chunks, bytesText(r.Bytes), r.Open, r.Deleting))
		if n := v.Repair.AcceptedLost; n > 0 {
			t.row("lost", fmt.Sprintf("%d chunks or parts of them were accepted as lost: see 'penstock chunk lost'", n))
		}
		t.row("repair", fmt.Sprintf("%s to copy, %d copies under way, %s/s; %d chunks (%s) copied, %d failures since the servers started",
			bytesText(r.CopyBytes), r.Copying, bytesText(uint64(r.Rate)), r.Copied, bytesText(r.CopiedBytes), r.Failed))
	}
	t.row()
	t.row("METADATA SERVER", "ADDRESS", "UP", "OWNS", "FOLLOWS", "ERROR")
	for _, m := range v.Meta {
		t.row(m.Name, m.Address, m.Uptime, m.Owns, m.Follows, m.Error)
	}
	t.row()
	t.row("NODE", "NAME", "STATE", "PLACE", "USED", "FREE", "CHUNKS")
	for _, n := range slices.Clone(v.Nodes) {
		t.row(n.ID, n.Name, n.stateText(), n.Topology, bytesText(n.Total-min(n.Free, n.Total)), bytesText(n.Free), n.Chunks)
	}
	if len(v.Disks) > 0 {
		t.row()
		t.row("DISK", "NODE", "PATH", "STATE", "DETAIL")
		for _, d := range v.Disks {
			t.row(short(d.ID), d.Server, d.Path, d.State, d.Detail)
		}
	}
}
