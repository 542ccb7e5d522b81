package main

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/admin"
	"penstock.io/penstock/meta/client"
	"penstock.io/penstock/meta/server"
)

// statusView is the output of `penstock status`.
type statusView struct {
	Cluster string       `json:"cluster" yaml:"cluster"`
	Volumes []volumeView `json:"volumes" yaml:"volumes"`
	Servers []serverView `json:"chunk_servers" yaml:"chunk_servers"`
	// Meta is the metadata server's own report, with counters since its start.
	Meta map[string]any `json:"meta" yaml:"meta"`
}

// serverView is a chunk server in the form that commands print.
type serverView struct {
	ID       uint64 `json:"id" yaml:"id"`
	Address  string `json:"address" yaml:"address"`
	Topology string `json:"topology,omitempty" yaml:"topology,omitempty"`
	Class    string `json:"class,omitempty" yaml:"class,omitempty"`
	Total    uint64 `json:"total_bytes" yaml:"total_bytes"`
	Free     uint64 `json:"free_bytes" yaml:"free_bytes"`
}

func readStatus(ctx context.Context, s *client.Session, c *admin.Client) (*statusView, error) {
	status, err := c.Health.GetServerStatus(ctx, &admin.GetServerStatusRequest{})
	if err != nil {
		return nil, err
	}
	nodes, err := c.Nodes.ListNodes(ctx, &admin.ListNodesRequest{})
	if err != nil {
		return nil, err
	}
	view := &statusView{Cluster: s.Cluster(), Volumes: []volumeView{}, Servers: []serverView{}}
	for v, err := range c.EachVolume(ctx, &admin.ListVolumesRequest{}) {
		if err != nil {
			return nil, err
		}
		if v.State != meta.VolumeInTrash {
			view.Volumes = append(view.Volumes, viewOf(v))
		}
	}
	for _, n := range nodes.Nodes {
		if n.Connected {
			view.Servers = append(view.Servers, serverView{ID: n.Id, Address: n.Address, Topology: n.Topology, Class: n.Class, Total: n.TotalBytes, Free: n.FreeBytes})
		}
	}
	var report server.Status
	admin.Hear(&report, status)
	b, err := json.Marshal(report)
	if err == nil {
		err = json.Unmarshal(b, &view.Meta)
	}
	return view, err
}

func newStatus() *cobra.Command {
	var w where
	var out output
	cmd := &cobra.Command{
		Use:   "status",
		Short: "Show volumes, chunk servers and the meta server's counters",
		Example: `  penstock status
  penstock status --dir /var/lib/penstock --output json`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return w.withAPI(cmd.Context(), func(s *client.Session, c *admin.Client) error {
				view, err := readStatus(cmd.Context(), s, c)
				if err != nil {
					return err
				}
				return out.print(cmd.OutOrStdout(), view, func(t *table) {
					t.row("cluster", view.Cluster)
					t.row()
					listVolumes(t, view.Volumes)
					t.row()
					t.row("CHUNK SERVER", "ADDRESS", "USED", "FREE", "CLASS", "PLACE")
					for _, c := range view.Servers {
						t.row(c.ID, c.Address, bytesText(c.Total-min(c.Free, c.Total)), bytesText(c.Free), c.Class, c.Topology)
					}
					t.row()
					leaves := map[string]any{}
					flatten("", view.Meta, leaves)
					for _, k := range slices.Sorted(maps.Keys(leaves)) {
						t.row(k, leafText(leaves[k]))
					}
				})
			})
		},
	}
	out.flag(cmd)
	w.flags(cmd)
	return cmd
}

// flatten turns nested JSON into leaves named a.b.0.c.
func flatten(prefix string, v any, into map[string]any) {
	join := func(k string) string {
		if prefix == "" {
			return k
		}
		return prefix + "." + k
	}
	switch v := v.(type) {
	case map[string]any:
		for k, x := range v {
			flatten(join(k), x, into)
		}
	case []any:
		for i, x := range v {
			flatten(join(fmt.Sprint(i)), x, into)
		}
	default:
		into[prefix] = v
	}
}

// leafText prints JSON numbers without an exponent.
func leafText(v any) string {
	if f, ok := v.(float64); ok {
		return strings.TrimSuffix(strings.TrimRight(fmt.Sprintf("%.3f", f), "0"), ".")
	}
	return fmt.Sprint(v)
}
