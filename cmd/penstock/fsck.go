package main

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/spf13/cobra"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/admin"
	"penstock.io/penstock/meta/client"
	"penstock.io/penstock/meta/server"
)

// checkView is the outcome of the check of a volume.
type checkView struct {
	Volume string `json:"volume" yaml:"volume"`
	// Report is the checker's report: its counts, and a list of texts under "problems".
	Report map[string]any `json:"report" yaml:"report"`
}

// problems lists the problems of the report.
func (v checkView) problems() []string {
	for k, x := range v.Report {
		list, ok := x.([]any)
		if !ok || (k != "problems" && k != "Problems") {
			continue
		}
		var texts []string
		for _, p := range list {
			texts = append(texts, fmt.Sprint(p))
		}
		return texts
	}
	return nil
}

func newFsck() *cobra.Command {
	var w where
	var out output
	var only []string
	cmd := &cobra.Command{
		Use:   "fsck",
		Short: "Check that names, inodes, extents, chunks and counters agree",
		Long: `Walks all records of the volumes, with decoders of its own, and compares: link
counts with names, extents with chunks, chunks with the lists of the chunk
servers, counters with the counted objects. The system stays in use meanwhile. With
--dir, and no process running there, fsck opens the data directory itself.

The exit status is 0 if all is well, 1 if anything is wrong or could not be
checked. fsck changes nothing.`,
		Example: `  penstock fsck
  penstock fsck --dir /var/lib/penstock --volume datasets --output json`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return w.withOrAlone(cmd.Context(), func(s *client.Session, c *admin.Client) error {
				views, err := check(cmd.Context(), s, c, only, cmd.PrintErrf)
				if err != nil {
					return err
				}
				bad := 0
				for _, v := range views {
					bad += len(v.problems())
				}
				err = out.print(cmd.OutOrStdout(), views, func(t *table) {
					for _, v := range views {
						leaves := map[string]any{}
						flatten("", v.Report, leaves)
						t.row("volume", v.Volume)
						for _, k := range slices.Sorted(maps.Keys(leaves)) {
							t.row("  "+k, leafText(leaves[k]))
						}
					}
				})
				if err != nil {
					return err
				}
				if bad > 0 {
					cmd.PrintErrf("penstock fsck: %d problems\n", bad)
					return &statusError{exitFailed}
				}
				if out.format == "table" {
					cmd.Println("clean")
				}
				return nil
			})
		},
	}
	out.flag(cmd)
	w.flags(cmd)
	cmd.Flags().StringSliceVar(&only, "volume", nil, "volumes to check (default all)")
	return cmd
}

// showChecks prints the progress of a check every few seconds, until done is closed.
func showChecks(ctx context.Context, c *admin.Client, name string, tell func(string, ...any), done <-chan struct{}) {
	t := time.NewTicker(2 * time.Second)
	defer t.Stop()
	for {
		select {
		case <-done:
			return
		case <-t.C:
		}
		st, err := c.Health.GetServerStatus(ctx, &admin.GetServerStatusRequest{})
		if err != nil {
			continue
		}
		for _, c := range st.Checks {
			if c.Of > 0 {
				tell("volume %s: %d of %d chunks asked for\n", name, c.Chunks, c.Of)
			} else {
				tell("volume %s: %d records read\n", name, c.Records)
			}
		}
	}
}

func check(ctx context.Context, s *client.Session, c *admin.Client, only []string, tell func(string, ...any)) ([]checkView, error) {
	views := []checkView{}
	for v, err := range c.EachVolume(ctx, &admin.ListVolumesRequest{}) {
		if err != nil {
			return nil, err
		}
		if !v.State.Usable() || len(only) > 0 && !slices.Contains(only, v.Name) {
			continue
		}
		done := make(chan struct{})
		go showChecks(ctx, c, v.Name, tell, done)
		answer, err := c.Volumes.CheckVolume(ctx, &admin.CheckVolumeRequest{Volume: admin.Numbered(v.ID)})
		close(done)
		if err != nil {
			return nil, fmt.Errorf("volume %s: %w", v.Name, err)
		}
		report := server.FsckReport{Problems: []string{}}
		admin.Hear(&report, answer)
		view := checkView{Volume: v.Name}
		b, err := json.Marshal(report)
		if err == nil {
			err = json.Unmarshal(b, &view.Report)
		}
		if err != nil {
			panic("a report is plain data: " + err.Error())
		}
		views = append(views, view)
	}
	for _, name := range only {
		if !slices.ContainsFunc(views, func(v checkView) bool { return v.Volume == name }) {
			return nil, meta.E("find volume", meta.NoSuchVolume, name, nil)
		}
	}
	return views, nil
}
