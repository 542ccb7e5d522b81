package main

import (
	"context"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/admin"
	"penstock.io/penstock/meta/client"
)

// onVolume makes a command about a single volume, named by the first argument.
func onVolume(cmd *cobra.Command, work func(ctx context.Context, c *admin.Client, v meta.VolumeInfo, args []string) error) *cobra.Command {
	var w where
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		return w.api(cmd.Context(), func(c *admin.Client) error {
			v, err := c.FindVolume(cmd.Context(), admin.Named(args[0]))
			if err != nil {
				return err
			}
			return work(cmd.Context(), c, v, args)
		})
	}
	w.flags(cmd)
	return cmd
}

// treePath refuses a tree path without a leading /: a relative path would depend on the
// shell's working directory, which is not a directory of the tree.
func treePath(path string) error {
	if path != "" && !strings.HasPrefix(path, "/") {
		return usagef("%s: a path of the tree begins with /", printable(path))
	}
	return nil
}

func newVolumeAttach() *cobra.Command {
	var parents bool
	var w where
	cmd := &cobra.Command{
		Use:   "attach NAME PATH",
		Short: "Hang a volume into the tree",
		Long: `Attaches a volume to the tree: from then on PATH is the volume's root directory, in
every mount that shows PATH's parent. The last name of PATH must be free. If the volume
is attached there already, the command succeeds.`,
		Example: `  penstock volume attach datasets /projects/vision/datasets --parents`,
		Args:    cobra.MatchAll(cobra.ExactArgs(2), func(_ *cobra.Command, args []string) error { return treePath(args[1]) }),
		RunE: func(cmd *cobra.Command, args []string) error {
			return w.withAPI(cmd.Context(), func(s *client.Session, c *admin.Client) error {
				v, err := c.FindVolume(cmd.Context(), admin.Named(args[0]))
				if err != nil {
					return err
				}
				_, err = c.AttachVolume(cmd.Context(), s, v.ID, args[1], parents)
				return err
			})
		},
	}
	w.flags(cmd)
	cmd.Flags().BoolVar(&parents, "parents", false, "make missing parent directories")
	return cmd
}

func newVolumeDetach() *cobra.Command {
	return onVolume(&cobra.Command{
		Use:     "detach NAME",
		Short:   "Take a volume out of the tree; its files stay",
		Example: `  penstock volume detach datasets`,
		Args:    cobra.ExactArgs(1),
	}, func(ctx context.Context, c *admin.Client, v meta.VolumeInfo, _ []string) error {
		return c.DetachVolume(ctx, v.ID)
	})
}

func newVolumeRename() *cobra.Command {
	return onVolume(&cobra.Command{
		Use:   "rename NAME NEW",
		Short: "Give a volume another name; its path in the tree stays",
		Long: `Gives a volume another name. Mounts of the volume go on. The volume's path in the tree
does not change: for that, detach and attach the volume. Grants refer to the volume's
number, and stay.`,
		Example: `  penstock volume rename scratch scratch-2026`,
		Args:    cobra.ExactArgs(2),
	}, func(ctx context.Context, c *admin.Client, v meta.VolumeInfo, args []string) error {
		_, err := c.RenameVolume(ctx, v.ID, args[1])
		return err
	})
}

func newVolumeDelete() *cobra.Command {
	var yes, now bool
	var cmd *cobra.Command
	cmd = onVolume(&cobra.Command{
		Use:   "delete NAME",
		Short: "Delete a volume with everything in it",
		Long: `Deletes a volume with everything in it. The volume must be detached first, and no other
volume may be attached inside. During the volume's trash time ('penstock volume set
--trash') 'penstock volume undelete' brings the volume back as it was. After the trash
time, or at once with --now, the volume's bytes are freed. On a terminal the command
asks; a script gives --yes.`,
		Example: `  penstock volume delete scratch --yes
  penstock volume delete scratch --now --yes`,
		Args: cobra.ExactArgs(1),
	}, func(ctx context.Context, c *admin.Client, v meta.VolumeInfo, _ []string) error {
		trash := time.Duration(v.TrashSeconds) * time.Second
		if !yes {
			until := "for ever"
			if trash > 0 && !now {
				until = fmt.Sprintf("(%v in the trash, then for ever)", trash)
			}
			question := fmt.Sprintf("Delete volume %s (%s in %d files) %s?", v.Name, bytesText(v.UsedBytes), v.UsedInodes, until)
			if err := confirm(cmd, question, v.Name); err != nil {
				return err
			}
		}
		if err := c.DeleteVolume(ctx, v.ID, now); err != nil {
			return err
		}
		if trash > 0 && !now {
			cmd.PrintErrf("Volume %s (%d) is in the trash for %v: 'penstock volume undelete %s' brings it back.\n", v.Name, v.ID, trash, v.Name)
		}
		return nil
	})
	destroying(cmd, &yes)
	cmd.Flags().BoolVar(&now, "now", false, "free the volume's bytes at once, past the trash")
	return cmd
}

func newVolumeUndelete() *cobra.Command {
	var w where
	var as string
	cmd := &cobra.Command{
		Use:   "undelete NAME|NUMBER",
		Short: "Take a volume out of the trash",
		Long: `Takes a volume out of the trash, in the state of its deletion. The volume is not
attached. Of several volumes with one name the command takes the volume that was deleted
last; a number ('penstock volume list --trash') names any of them. If another volume has
the name now, --as gives a new name.`,
		Example: `  penstock volume undelete scratch
  penstock volume undelete 42 --as scratch-old`,
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			return w.api(cmd.Context(), func(c *admin.Client) error {
				_, err := c.UndeleteVolume(cmd.Context(), 0, args[0], as)
				if n, nerr := strconv.ParseUint(args[0], 10, 32); nerr == nil && meta.KindOf(err) == meta.NoSuchVolume {
					_, err = c.UndeleteVolume(cmd.Context(), meta.VolumeID(n), args[0], as)
				}
				return err
			})
		},
	}
	w.flags(cmd)
	cmd.Flags().StringVar(&as, "as", "", "its new name")
	return cmd
}
