package main

import (
	"context"
	"fmt"
	"slices"

	"github.com/spf13/cobra"

	penstock "penstock.io/penstock"
	"penstock.io/penstock/meta/admin"
	"penstock.io/penstock/meta/client"
	"penstock.io/penstock/meta/server"
)

// clusterView is the output of `penstock cluster status`.
type clusterView struct {
	Cluster string `json:"cluster" yaml:"cluster"`
	// Health is "ok", "warning" or "critical", as in 'penstock health', and Problems are the
	// reasons.
	Health   string             `json:"health" yaml:"health"`
	Problems []penstock.Problem `json:"problems" yaml:"problems"`

	Meta    []metaView `json:"metadata_servers" yaml:"metadata_servers"`
	Nodes   []nodeView `json:"nodes" yaml:"nodes"`
	Disks   []diskView `json:"bad_disks" yaml:"bad_disks"`
	Volumes int        `json:"volumes" yaml:"volumes"`
	// Repair is the sum over all owners. If an owner did not answer, Repair is empty and
	// RepairError has the error.
	Repair      *server.RepairStatus `json:"repair,omitempty" yaml:"repair,omitempty"`
	RepairError string               `json:"repair_error,omitempty" yaml:"repair_error,omitempty"`
}

// metaView is a metadata server in the form that commands print.
type metaView struct {
	Name    string `json:"name" yaml:"name"`
	Address string `json:"address" yaml:"address"`
	Uptime  string `json:"uptime,omitempty" yaml:"uptime,omitempty"`
	Owns    int    `json:"owns" yaml:"owns"`
	Follows int    `json:"follows" yaml:"follows"`
	Error   string `json:"error,omitempty" yaml:"error,omitempty"`
}

func readCluster(ctx context.Context, s *client.Session, c *admin.Client) (*clusterView, error) {
	v := &clusterView{Cluster: s.Cluster(), Meta: []metaView{}, Disks: []diskView{}}
	for _, err := range c.EachVolume(ctx, &admin.ListVolumesRequest{}) {
		if err != nil {
			return nil, err
		}
		v.Volumes++
	}
	nodes, repair, rerr := listNodes(ctx, c)
	if repair == nil {
		return nil, rerr
	}
	v.Nodes = nodes
	servers, err := c.Health.ListServers(ctx, &admin.ListServersRequest{})
	if err != nil {
		return nil, err
	}
	for _, m := range servers.Servers {
		one := metaView{Name: m.Name, Address: m.Address}
		if st, err := serverStatus(ctx, c, m.Address); err != nil {
			one.Error = err.Error()
		} else {
			one.Uptime, one.Owns, one.Follows = st.Uptime, len(st.Volumes), len(st.Standbys)
		}
		v.Meta = append(v.Meta, one)
	}
	disks, err := listDisks(ctx, c)
	if err != nil {
		return nil, err
	}
	for _, d := range disks {
		if d.State != "ok" {
			v.Disks = append(v.Disks, d)
		}
	}
	if rerr == nil {
		v.Repair = repair
	} else {
		v.RepairError = rerr.Error()
	}
	return v, nil
}

// serverStatus asks a single metadata server for its status.
func serverStatus(ctx context.Context, c *admin.Client, addr string) (*admin.ServerStatus, error) {
	one, err := c.At(addr)
	if err != nil {
		return nil, err
	}
	ctx, cancel := withinDial(ctx)
	defer cancel()
	return one.Health.GetServerStatus(ctx, &admin.GetServerStatusRequest{})
}

func newClusterStatus() *cobra.Command {
	var w where
	var out output
	var check bool
	var which judgement
	cmd := &cobra.Command{
		Use:   "status",
		Short: "Show servers, disks and whether all chunks are as they should be",
		Long: `Shows the health of the cluster as 'penstock health' judges it, and all metadata
servers, chunk servers and disks that are not well.

With --check the exit status is the one of 'penstock health': 0 all is well, 1 a
warning, 2 critical (also if nobody answers), 3 the command was called wrongly. Between
two steps of an upgrade, --check --for-upgrade waits for what matters to the upgrade.`,
		Example: `  penstock cluster status
  penstock cluster status --check || echo something is wrong
  until penstock cluster status --check --for-upgrade; do sleep 1; done`,
		Args:        cobra.NoArgs,
		Annotations: map[string]string{asMonitors: "check"},
		RunE: func(cmd *cobra.Command, _ []string) error {
			var h penstock.Health
			// A cluster without a server that answers has no status: the error of the connection
			// says so, before the health is asked for.
			err := w.withAPI(cmd.Context(), func(s *client.Session, c *admin.Client) (err error) {
				if h, err = w.health(cmd.Context()); err != nil {
					return err
				}
				h = which.of(h)
				v, err := readCluster(cmd.Context(), s, c)
				if err != nil {
					return err
				}
				v.Health, v.Problems = h.Status, h.Problems
				return out.print(cmd.OutOrStdout(), v, v.table)
			})
			if err != nil || !check {
				return err
			}
			return healthStatus(&h)
		},
	}
	cmd.Flags().BoolVar(&check, "check", false, "exit with the status of 'penstock health'")
	which.flag(cmd)
	out.flag(cmd)
	w.flags(cmd)
	return cmd
}

func (v *clusterView) table(t *table) {
	t.row("cluster", v.Cluster)
	t.row("volumes", v.Volumes)
	t.row("health", v.Health)
	if r := v.Repair; r != nil {
		t.row("chunks", fmt.Sprintf("%d sealed (%s), %d open, %d to be deleted", r.Chunks, bytesText(r.Bytes), r.Open, r.Deleting))
		if n := v.Repair.AcceptedLost; n > 0 {
			t.row("lost", fmt.Sprintf("%d chunks or parts of them were accepted as lost: see 'penstock chunk lost'", n))
		}
		t.row("repair", fmt.Sprintf("%s to copy, %d copies under way, %s/s; %d chunks (%s) copied, %d failures since the servers started",
			bytesText(r.CopyBytes), r.Copying, bytesText(uint64(r.Rate)), r.Copied, bytesText(r.CopiedBytes), r.Failed))
	}
	if v.RepairError != "" {
		t.row("repair", "not all owners could be asked about their chunks: "+v.RepairError)
	}
	showProblems(t, v.Problems)
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
