package main

import (
	"context"
	"fmt"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/admin"
	"penstock.io/penstock/meta/client"
	"penstock.io/penstock/meta/cluster"
)

func newGrant() *cobra.Command {
	grant := &cobra.Command{
		Use:   "grant",
		Short: "Say which clients may use which volumes",
		Long: `A client may use only volumes that were granted to the client. Servers and
administrators need no grants.`,
	}
	grant.AddCommand(newGrantAdd(), newGrantList(), newGrantRevoke())
	return grant
}

func newGrantAdd() *cobra.Command {
	var at where
	var rights, users string
	cmd := &cobra.Command{
		Use:   "add CLIENT VOLUME",
		Short: "Let a client use a volume",
		Long: `CLIENT is the name in a client's certificate, or a pattern: pod-*. VOLUME is a
volume's name, or "*" for all volumes.

--users chooses the owner of files that the client makes: as-is keeps the user ids
of the client, root-squash maps root to 65534 (nobody), all-to=UID:GID maps every user
to that user and group. Only ownership is mapped; the client's kernel enforces modes,
as on any network file system.`,
		Example: `  penstock grant add pod-7 datasets --rights read
  penstock grant add 'build-*' scratch --rights write --users all-to=1000:1000`,
		Args: cobra.ExactArgs(2),
		RunE: func(cmd *cobra.Command, args []string) error {
			r, err := cluster.ParseRights(rights)
			if err != nil {
				return usagef("--rights: %w", err)
			}
			g := cluster.Grant{Who: args[0], Rights: r}
			if !strings.Contains(g.Who, "/") {
				g.Who = "client/" + g.Who
			}
			if err := parseUsers(users, &g); err != nil {
				return err
			}
			if err := g.Check(); err != nil {
				return usagef("%w", err)
			}
			said := &admin.Grant{}
			admin.Say(said, g)
			q := &admin.AddGrantRequest{Client: said.Client, Rights: said.Rights, Users: said.Users, Uid: said.Uid, Gid: said.Gid}
			return at.api(cmd.Context(), func(c *admin.Client) error {
				if args[1] != "*" {
					v, err := c.FindVolume(cmd.Context(), admin.Named(args[1]))
					if err != nil {
						return err
					}
					q.Volume = admin.Numbered(v.ID)
				}
				made, err := c.Grants.AddGrant(cmd.Context(), q)
				if err != nil {
					return err
				}
				fmt.Fprintf(cmd.OutOrStdout(), "grant %d\n", made.Id)
				return nil
			})
		},
	}
	f := cmd.Flags()
	f.StringVar(&rights, "rights", "read", "read, write, or admin (policy, attaching, deleting)")
	f.StringVar(&users, "users", "as-is", "as-is, root-squash, or all-to=UID:GID")
	at.flags(cmd)
	return cmd
}

// parseUsers reads --users.
func parseUsers(s string, g *cluster.Grant) error {
	how, ids, given := strings.Cut(s, "=")
	g.Users = cluster.Users(how)
	if g.Users != cluster.UsersAllTo {
		if given {
			return usagef("--users %s takes no ids", how)
		}
		return nil
	}
	uid, gid, ok := strings.Cut(ids, ":")
	u, err := strconv.ParseUint(uid, 10, 32)
	if err == nil {
		var n uint64
		n, err = strconv.ParseUint(gid, 10, 32)
		g.UID, g.GID = uint32(u), uint32(n)
	}
	if !ok || err != nil {
		return usagef("--users: all-to needs a user and a group, all-to=1000:1000")
	}
	return nil
}

func newGrantList() *cobra.Command {
	var at where
	var out output
	cmd := &cobra.Command{
		Use:   "list",
		Short: "List the grants",
		Long: `A grant with a value in the column FOR ends by itself: csi:HANDLE is the grant of a
volume that the CSI driver published to the client, and ends when the driver
unpublishes the volume.`,
		Example: `  penstock grant list`,
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return at.withAPI(cmd.Context(), func(s *client.Session, c *admin.Client) error {
				all, err := listGrants(cmd.Context(), c)
				if err != nil {
					return err
				}
				names := map[meta.VolumeID]string{0: "*"}
				for v, err := range c.EachVolume(cmd.Context(), &admin.ListVolumesRequest{}) {
					if err != nil {
						return err
					}
					names[v.ID] = v.Name
				}
				return out.print(cmd.OutOrStdout(), all, func(t *table) {
					t.row("GRANT", "CLIENT", "VOLUME", "RIGHTS", "USERS", "SINCE", "FOR")
					for _, g := range all {
						users := string(g.Users)
						if g.Users == cluster.UsersAllTo {
							users = fmt.Sprintf("%s=%d:%d", g.Users, g.UID, g.GID)
						}
						name, ok := names[g.Volume]
						if !ok {
							name = fmt.Sprintf("(deleted: %d)", g.Volume)
						}
						t.row(g.ID, g.Who, name, g.Rights, users, timeText(g.Created), g.For)
					}
				})
			})
		},
	}
	out.flag(cmd)
	at.flags(cmd)
	return cmd
}

// listGrants lists all grants, by number.
func listGrants(ctx context.Context, c *admin.Client) (all []cluster.Grant, err error) {
	for q := (&admin.ListGrantsRequest{}); ; {
		page, err := c.Grants.ListGrants(ctx, q)
		if err != nil {
			return nil, err
		}
		for _, x := range page.Grants {
			var g cluster.Grant
			admin.Hear(&g, x)
			all = append(all, g)
		}
		if q.PageToken = page.NextPageToken; q.PageToken == "" {
			return all, nil
		}
	}
}

func newGrantRevoke() *cobra.Command {
	var at where
	cmd := &cobra.Command{
		Use:   "revoke GRANT",
		Short: "Take a grant back",
		Long: `GRANT is the number in 'penstock grant list'. Within seconds metadata servers refuse
the client, and the chunks that the client has open for writing are sealed. The
client's right to read from chunk servers ends within 60 seconds.`,
		Example: `  penstock grant revoke 3`,
		Args:    cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			id, err := strconv.ParseUint(args[0], 10, 64)
			if err != nil || id == 0 {
				return usagef("%q is no grant's number; see 'penstock grant list'", args[0])
			}
			return at.api(cmd.Context(), func(c *admin.Client) error {
				_, err := c.Grants.RevokeGrant(cmd.Context(), &admin.RevokeGrantRequest{Id: id})
				return err
			})
		},
	}
	at.flags(cmd)
	return cmd
}
