package main

import (
	"context"
	"errors"
	"fmt"
	"path"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/admin"
	"penstock.io/penstock/meta/client"
)

func newClone() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "clone",
		Short: "Make writable copies of volumes that share their data, and list them",
		Long: `A clone is a volume of its own that begins as a snapshot of another volume, its origin.
Making a clone takes a moment whatever the size, and copies no data: clone and origin
share chunks until one of the two is written. While the clone exists, neither the
snapshot nor the origin can be deleted.
A clone is deleted like any volume: 'penstock volume delete'.`,
	}
	cmd.AddCommand(newCloneCreate(), newCloneList())
	return cmd
}

func newCloneCreate() *cobra.Command {
	var w where
	var out output
	var attach string
	var parents bool
	cmd := &cobra.Command{
		Use:   "create VOLUME[@SNAPSHOT] NAME",
		Short: "Clone a snapshot of a volume, or the volume as it is now",
		Long: `Makes volume NAME, which begins as the snapshot. Without a snapshot, NAME begins as the
volume is now: the command takes a snapshot, which is deleted with the clone. The clone
has the settings of the volume: its policy with the quota, trash time, compression,
advisory quota, schedule of snapshots, labels. 'penstock volume set' changes them.`,
		Example: `  penstock clone create imagenet@v3 experiment-17 --attach /experiments/17
  penstock clone create results results-copy`,
		Args: cobra.ExactArgs(2),
		RunE: func(cmd *cobra.Command, args []string) error {
			ctx := cmd.Context()
			name, snapshot, at := strings.Cut(args[0], "@")
			if at && snapshot == "" {
				return usagef("%s names no snapshot", args[0])
			}
			if err := treePath(attach); err != nil {
				return err
			}
			return w.withAPI(ctx, func(s *client.Session, api *admin.Client) error {
				if attach != "" { // a mistake here must not leave a volume behind
					if _, _, err := s.Walk(ctx, path.Dir(path.Clean("/"+attach)), parents); err != nil {
						return err
					}
				}
				v, err := volumeByName(ctx, s, name)
				if err != nil {
					return err
				}
				made, err := api.Clones.CreateClone(ctx, &admin.CreateCloneRequest{Volume: admin.Numbered(v.ID), Snapshot: snapshot, Name: args[1]})
				if errors.Is(err, meta.NoSuchSnapshot) {
					return adviseSnapshot(err, name)
				}
				if err != nil {
					return err
				}
				c, err := api.FindVolume(ctx, admin.Numbered(meta.VolumeID(made.Id)))
				if err != nil {
					return err
				}
				if attach != "" {
					if c, err = api.AttachVolume(ctx, s, c.ID, attach, parents); err != nil {
						return fmt.Errorf("volume %s was made, but not attached: %w", args[1], err)
					}
				}
				return out.print(cmd.OutOrStdout(), viewOf(c), func(t *table) { showVolume(t, viewOf(c)) })
			})
		},
	}
	out.flag(cmd)
	w.flags(cmd)
	cmd.Flags().StringVar(&attach, "attach", "", "path of the tree where the volume hangs; its parent must exist, the last name must not")
	cmd.Flags().BoolVar(&parents, "parents", false, "make missing parent directories")
	return cmd
}

func newCloneList() *cobra.Command {
	var w where
	var out output
	cmd := &cobra.Command{
		Use:   "list [VOLUME]",
		Short: "List the clones of a volume, or all clones, with their origins",
		Example: `  penstock clone list
  penstock clone list imagenet --output json`,
		Args: cobra.MaximumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			ctx := cmd.Context()
			return w.api(ctx, func(api *admin.Client) error {
				l, err := listClones(ctx, api, args)
				if err != nil {
					return err
				}
				return out.print(cmd.OutOrStdout(), l, func(t *table) {
					t.row("NAME", "OF", "CREATED")
					for _, c := range l {
						t.row(c.Name, c.Origin+"@"+c.Snapshot, c.Created.Local().Format(time.DateTime))
					}
				})
			})
		},
	}
	out.flag(cmd)
	w.flags(cmd)
	return cmd
}

func listClones(ctx context.Context, api *admin.Client, of []string) ([]meta.CloneInfo, error) {
	q := &admin.ListClonesRequest{}
	if len(of) > 0 {
		q.Volume = admin.Named(of[0])
	}
	answer, err := api.Clones.ListClones(ctx, q)
	return answer.List(), err
}
