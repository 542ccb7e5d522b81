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
	"penstock.io/penstock/meta/client"
)

func newSnapshotGroup() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "group",
		Short: "Take, list and delete snapshots of several volumes, of one moment",
		Long: `A group is a snapshot of each of several volumes, with one name and of one moment: if a
program wrote in one volume because of a write in another volume, no group has the
later write without the earlier write. Each snapshot of a group is used like any other
snapshot of its volume. Either all snapshots of a group exist, or none.`,
	}
	cmd.AddCommand(newSnapshotGroupCreate(), newSnapshotGroupList(), newSnapshotGroupDelete())
	return cmd
}

// groupAnswer is a group in the form that commands print.
type groupAnswer struct {
	Name    string          `json:"name" yaml:"name"`
	State   meta.GroupState `json:"state" yaml:"state"`
	Began   time.Time       `json:"began" yaml:"began"`
	Volumes []groupVolume   `json:"volumes" yaml:"volumes"`
}

type groupVolume struct {
	Volume       string          `json:"volume" yaml:"volume"` // the name; the number of a deleted volume
	ID           meta.VolumeID   `json:"id" yaml:"id"`
	Generation   meta.Generation `json:"generation,omitempty" yaml:"generation,omitempty"`
	Inodes       uint64          `json:"inodes" yaml:"inodes"`
	Bytes        uint64          `json:"bytes" yaml:"bytes"`
	Unanswered   uint64          `json:"unanswered,omitempty" yaml:"unanswered,omitempty"`
	UnansweredBy []string        `json:"unanswered_by,omitempty" yaml:"unanswered_by,omitempty"`
}

func groupAnswerOf(g *meta.Group, names map[meta.VolumeID]string) groupAnswer {
	a := groupAnswer{Name: g.Name, State: g.State, Began: time.Unix(0, int64(g.Began)).UTC()}
	for _, m := range g.Members {
		v := groupVolume{Volume: names[m.Volume], ID: m.Volume, Generation: m.At, Inodes: m.Inodes, Bytes: m.Bytes, Unanswered: m.Unanswered, UnansweredBy: m.UnansweredBy}
		if v.Volume == "" {
			v.Volume = strconv.FormatUint(uint64(m.Volume), 10)
		}
		a.Volumes = append(a.Volumes, v)
	}
	return a
}

func newSnapshotGroupCreate() *cobra.Command {
	var w where
	var out output
	var strict bool
	cmd := &cobra.Command{
		Use:   "create NAME VOLUME...",
		Short: "Take a snapshot of each volume, at one moment",
		Long: `Takes a snapshot of each volume, all of the same name and moment, or none. Clients
first commit their buffered data, as for 'penstock snapshot create'. For a moment, a
second at most, changes in the volumes wait.`,
		Example: `  penstock snapshot group create before-the-upgrade data index wal`,
		Args:    cobra.MinimumNArgs(2),
		RunE: func(cmd *cobra.Command, args []string) error {
			return w.withAPI(cmd.Context(), func(s *client.Session, api *admin.Client) error {
				names := map[meta.VolumeID]string{}
				var ids []meta.VolumeID
				for _, name := range args[1:] {
					v, err := volumeByName(cmd.Context(), s, name)
					if err != nil {
						return err
					}
					names[v.ID] = name
					ids = append(ids, v.ID)
				}
				taken, err := api.TakeGroup(cmd.Context(), args[0], ids, strict)
				if err != nil {
					return adviseGroup(err)
				}
				g := taken.Record()
				a := groupAnswerOf(&g, names)
				for _, v := range a.Volumes {
					if v.Unanswered > 0 {
						i := meta.SnapshotInfo{Name: v.Volume + "@" + g.Name, Unanswered: v.Unanswered, UnansweredBy: v.UnansweredBy}
						fmt.Fprintf(cmd.ErrOrStderr(), "warning: %s\n", unansweredText(&i))
					}
				}
				return out.print(cmd.OutOrStdout(), a, func(t *table) { t.row(a.Name) })
			})
		},
	}
	out.flag(cmd)
	w.flags(cmd)
	cmd.Flags().BoolVar(&strict, "strict", false, "take no snapshot if a file would be in it only as of its last sync")
	return cmd
}

// adviseGroup adds advice to an error.
func adviseGroup(err error) error {
	switch {
	case errors.Is(err, meta.Exists):
		return fmt.Errorf("%w; choose another name, or delete that one", err)
	case errors.Is(err, meta.NotFound):
		name := ""
		if e, ok := errors.AsType[*meta.Error](err); ok {
			name = " " + printable(e.Subject)
		}
		return fmt.Errorf("there is no group of snapshots%s; 'penstock snapshot group list' shows the groups", name)
	}
	return adviseSnapshot(err, "VOLUME")
}

// namesOfVolumes returns the names of the volumes of groups.
func namesOfVolumes(ctx context.Context, s *client.Session, groups []meta.Group) (map[meta.VolumeID]string, error) {
	names := map[meta.VolumeID]string{}
	for _, g := range groups {
		for _, m := range g.Members {
			if _, known := names[m.Volume]; known {
				continue
			}
			names[m.Volume] = ""
			v, err := s.LookUpVolume(ctx, m.Volume, "")
			if errors.Is(err, meta.NoSuchVolume) {
				continue
			}
			if err != nil {
				return nil, err
			}
			names[m.Volume] = v.Name
		}
	}
	return names, nil
}

func newSnapshotGroupList() *cobra.Command {
	var w where
	var out output
	cmd := &cobra.Command{
		Use:     "list [VOLUME]",
		Short:   "List group snapshots, of one volume or of all",
		Example: `  penstock snapshot group list`,
		Args:    cobra.MaximumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			return w.withAPI(cmd.Context(), func(s *client.Session, api *admin.Client) error {
				q := &admin.ListGroupsRequest{}
				if len(args) > 0 {
					q.Volume = admin.Named(args[0])
				}
				answer, err := api.Groups.ListGroups(cmd.Context(), q)
				if err != nil {
					return err
				}
				l := answer.Records()
				names, err := namesOfVolumes(cmd.Context(), s, l)
				if err != nil {
					return err
				}
				all := []groupAnswer{}
				for _, g := range l {
					all = append(all, groupAnswerOf(&g, names))
				}
				return out.print(cmd.OutOrStdout(), all, func(t *table) {
					t.row("NAME", "VOLUME", "CREATED", "FILES", "SIZE", "STATE")
					for _, g := range all {
						for _, v := range g.Volumes {
							t.row(g.Name, v.Volume, g.Began.Local().Format(time.DateTime), v.Inodes, bytesText(v.Bytes), string(g.State))
						}
					}
				})
			})
		},
	}
	out.flag(cmd)
	w.flags(cmd)
	return cmd
}

func newSnapshotGroupDelete() *cobra.Command {
	var w where
	var yes bool
	cmd := &cobra.Command{
		Use:   "delete NAME",
		Short: "Delete the snapshots of a group",
		Long: `Deletes the snapshots of a group. A snapshot that a clone needs is deleted with the last
such clone. A snapshot of the group that is deleted already is no error. On a terminal
the command asks; a script gives --yes.`,
		Example: `  penstock snapshot group delete before-the-upgrade --yes`,
		Args:    cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			ctx := cmd.Context()
			return w.withAPI(ctx, func(s *client.Session, api *admin.Client) error {
				if !yes {
					if err := confirmGroup(ctx, cmd, s, api, args[0]); err != nil {
						return err
					}
				}
				return adviseGroup(api.DeleteGroup(ctx, args[0]))
			})
		},
	}
	w.flags(cmd)
	destroying(cmd, &yes)
	return cmd
}

// confirmGroup names the volumes with snapshots of a group, and asks for confirmation.
func confirmGroup(ctx context.Context, cmd *cobra.Command, s *client.Session, api *admin.Client, name string) error {
	record, err := api.Groups.GetGroup(ctx, &admin.GetGroupRequest{Group: &admin.GroupRef{Name: name}})
	if err != nil {
		return adviseGroup(err)
	}
	l := []meta.Group{record.Record()}
	names, err := namesOfVolumes(ctx, s, l)
	if err != nil {
		return err
	}
	g := groupAnswerOf(&l[0], names)
	var of []string
	for _, v := range g.Volumes {
		of = append(of, v.Volume)
	}
	return confirm(cmd, fmt.Sprintf("Delete the snapshots %s of volumes %s for ever?", name, strings.Join(of, ", ")), name)
}
