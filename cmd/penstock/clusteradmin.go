package main

import (
	"bufio"
	"cmp"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/protobuf/types/known/durationpb"

	"penstock.io/penstock/cmd/penstock/local"
	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/admin"
	"penstock.io/penstock/meta/client"
	"penstock.io/penstock/meta/cluster"
	"penstock.io/penstock/meta/peer"
)

func newClusterInit() *cobra.Command {
	var cfg local.FoundConfig
	var logs logFlags
	var once bool
	cmd := &cobra.Command{
		Use:   "init",
		Short: "Make a new cluster with its certificate authority",
		Long: `Makes a cluster in an etcd without a cluster: its certificate authority, and in
--credentials the first two credentials, DIR/meta for a metadata server and
DIR/admin for the administrator. All others join with a token of
'penstock cluster join-token'. An existing cluster is left as it is.

If the command is interrupted, or gets no answer from etcd, run it again: it makes the
same cluster, whose keys are in DIR.new until the cluster is complete.

DIR/meta/cluster.key opens the authority's key, which etcd keeps sealed. Metadata
servers that join get a copy. Without any copy no certificate can be signed any more:
keep a copy with your backups.`,
		Example: `  penstock cluster init --etcd https://10.0.0.1:2379 --credentials /etc/penstock/credentials
  penstock cluster init --dir /var/lib/penstock-meta --credentials /etc/penstock/credentials`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			log, err := logs.logger(cmd.ErrOrStderr())
			if err != nil {
				return err
			}
			cfg.Logger = log
			switch {
			case cfg.Credentials == "":
				return usagef("say where the credentials go: --credentials DIR")
			case (cfg.Dir == "") == (len(cfg.Etcd) == 0):
				return usagef("say where the cluster's etcd is: --etcd, or --dir for one that the metadata server of that directory embeds")
			}
			if once {
				have, err := peer.Load(filepath.Join(cfg.Credentials, "meta"), nil)
				if err == nil {
					cmd.Printf("%s has credentials of cluster %s; nothing is made\n", cfg.Credentials, have.Identity().Cluster)
					return nil
				}
				if meta.KindOf(err) != meta.NotFound {
					return err
				}
			}
			id, err := local.Found(cmd.Context(), cfg)
			if err != nil {
				return err
			}
			cmd.Printf("cluster %s; credentials are in %s/meta and %s/admin\n", id, cfg.Credentials, cfg.Credentials)
			return nil
		},
	}
	f := cmd.Flags()
	f.StringVar(&cfg.Dir, "dir", "", "data directory of the metadata server whose embedded etcd holds the cluster")
	f.StringVar(&cfg.Credentials, "credentials", "", "directory for the first credentials: made, or empty")
	f.BoolVar(&once, "once", false, "do nothing if the directory has credentials already: for programs that start again and again")
	f.StringVar(&cfg.Meta, "meta-name", "meta1", "name of the first metadata server")
	f.DurationVar(&cfg.Life, "certificate-life", peer.LeafFor, "lifetime of certificates, which are renewed after half of it")
	etcdFlags(cmd, &cfg.Etcd, &cfg.EtcdTLS)
	logs.add(cmd)
	markDirs(cmd, "dir", "credentials")
	return cmd
}

func newClusterJoinToken() *cobra.Command {
	var at where
	var role, name, revoke string
	var ttl time.Duration
	var list bool
	var out output
	cmd := &cobra.Command{
		Use:   "join-token",
		Short: "Make a secret that lets a machine join the cluster",
		Long: `Prints a token for one role. Any program with the token may join until the token ends
or is revoked. The token names the cluster's authority, so that a joining program
trusts no other cluster. Without --name each bearer joins under a new name. With --name
the bearer joins under that name alone, also in place of an earlier bearer.`,
		Example: `  penstock cluster join-token --role chunkserver --ttl 1h
  penstock cluster join-token --list
  penstock cluster join-token --revoke abcdefghij`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return at.api(cmd.Context(), func(c *admin.Client) error {
				switch {
				case revoke != "":
					_, err := c.Grants.RevokeJoinToken(cmd.Context(), &admin.RevokeJoinTokenRequest{Id: revoke})
					return err
				case list:
					all, err := listTokens(cmd.Context(), c)
					if err != nil {
						return err
					}
					return out.print(cmd.OutOrStdout(), all, func(t *table) {
						t.row("ID", "ROLE", "NAME", "EXPIRES")
						for _, k := range all {
							t.row(k.ID, k.Role, dash(k.Name), timeText(k.Expires))
						}
					})
				}
				r, err := peer.ParseRole(role)
				if err != nil {
					return usagef("--role: %w", err)
				}
				made, err := c.Grants.MakeJoinToken(cmd.Context(), &admin.MakeJoinTokenRequest{Role: admin.RoleOf(r), Name: peer.FitName(name), Life: durationpb.New(ttl)})
				if err != nil {
					return err
				}
				fmt.Fprintln(cmd.OutOrStdout(), made.Token)
				return nil
			})
		},
	}
	f := cmd.Flags()
	f.StringVar(&role, "role", "", "what its bearer is: meta, chunkserver, client, gateway or admin")
	f.StringVar(&name, "name", "", "the only name that its bearer may take")
	f.DurationVar(&ttl, "ttl", time.Hour, "lifetime of the token")
	f.BoolVar(&list, "list", false, "list the valid tokens, without their secrets")
	f.StringVar(&revoke, "revoke", "", "end the token of this id")
	out.flag(cmd)
	at.flags(cmd)
	return cmd
}

// listTokens lists the valid join tokens.
func listTokens(ctx context.Context, c *admin.Client) (all []cluster.TokenRecord, err error) {
	answer, err := c.Grants.ListJoinTokens(ctx, &admin.ListJoinTokensRequest{})
	for _, x := range answer.GetTokens() {
		var r cluster.TokenRecord
		admin.Hear(&r, x)
		all = append(all, r)
	}
	return all, err
}

func timeText(t meta.Time) string { return time.Unix(0, int64(t)).Format(time.RFC3339) }

func newClusterJoin() *cobra.Command {
	var token, file, name, dir string
	var addrs []string
	var once bool
	cmd := &cobra.Command{
		Use:   "join",
		Short: "Get credentials for a join token",
		Long: `Makes a key, has it signed by a metadata server of the cluster that the token
names, and writes the credentials to a directory. The key never leaves this
machine. Without --token and --token-file the token is read from standard
input, which keeps it out of the list of processes.`,
		Example: `  penstock cluster join --cluster 10.0.0.4:7400 --credentials /etc/penstock/credentials < token`,
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if dir == "" || len(addrs) == 0 {
				return usagef("say where the cluster is and where the credentials go: --cluster host:port, --credentials DIR")
			}
			if once {
				have, err := peer.Load(dir, nil)
				if err == nil {
					if err := peer.ForgetJoiningKey(dir); err != nil {
						return err
					}
					cmd.Printf("joined as %s before; credentials are in %s\n", have.Identity(), dir)
					return nil
				}
				if meta.KindOf(err) != meta.NotFound {
					return err
				}
			}
			switch {
			case file != "":
				b, err := os.ReadFile(file)
				if err != nil {
					return usagef("--token-file: %w", err)
				}
				token = string(b)
			case token == "":
				line, _ := bufio.NewReader(cmd.InOrStdin()).ReadString('\n')
				token = line
			}
			if name == "" {
				host, err := os.Hostname()
				if err != nil {
					return usagef("this machine has no name; give --name")
				}
				name = host
			}
			id, err := client.Join(cmd.Context(), addrs, strings.TrimSpace(token), peer.FitName(name), dir)
			if err != nil {
				return err
			}
			cmd.Printf("joined cluster %s as %s; credentials are in %s\n", id.Cluster, id, dir)
			return nil
		},
	}
	f := cmd.Flags()
	f.StringVar(&token, "token", "", "the token (others may see it in the list of processes)")
	f.StringVar(&file, "token-file", "", "file that holds the token")
	f.BoolVar(&once, "once", false, "do nothing if the directory has credentials already: for programs that start again and again")
	f.StringVar(&name, "name", "", "name to join under (default: the machine's); one of more than 63 letters is cut, and a digest of it appended")
	f.StringVar(&dir, "credentials", "", "directory for the credentials")
	f.StringSliceVar(&addrs, "cluster", nil, "addresses of metadata servers, host:port")
	markDirs(cmd, "credentials")
	return cmd
}

func newClusterMembers() *cobra.Command {
	var at where
	var out output
	cmd := &cobra.Command{
		Use:     "members",
		Short:   "List the identities that certificates were signed for",
		Example: `  penstock cluster members`,
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return at.api(cmd.Context(), func(c *admin.Client) error {
				answer, err := c.Grants.ListMembers(cmd.Context(), &admin.ListMembersRequest{})
				if err != nil {
					return err
				}
				var all []cluster.Member
				for _, x := range answer.Members {
					var m cluster.Member
					admin.Hear(&m, x)
					all = append(all, m)
				}
				return out.print(cmd.OutOrStdout(), all, func(t *table) {
					t.row("IDENTITY", "JOINED", "TOKEN", "STATE")
					for _, m := range all {
						state := "member"
						if m.Evicted {
							state = "evicted"
						}
						t.row(m, timeText(m.Joined), dash(m.Token), state)
					}
				})
			})
		},
	}
	out.flag(cmd)
	at.flags(cmd)
	return cmd
}

func newClusterEvict() *cobra.Command {
	var at where
	cmd := &cobra.Command{
		Use:   "evict ROLE/NAME",
		Short: "Make an identity's certificates worthless",
		Long: `Ends the sessions and connections of an identity, and refuses the identity from now
on, on every metadata server and chunk server within seconds. A token for the name lets
the identity in again with a new certificate; its earlier certificates stay refused.`,
		Example: `  penstock cluster evict client/pod-7`,
		Args:    cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			if !strings.Contains(args[0], "/") {
				return usagef("%q is no identity: write ROLE/NAME, as 'penstock cluster members' shows them", args[0])
			}
			return at.api(cmd.Context(), func(c *admin.Client) error {
				_, err := c.Grants.EvictMember(cmd.Context(), &admin.EvictMemberRequest{Identity: args[0]})
				return err
			})
		},
	}
	at.flags(cmd)
	return cmd
}

func newClusterSet() *cobra.Command {
	var at where
	var plain bool
	var keyLife time.Duration
	var clientRate uint32
	cmd := &cobra.Command{
		Use:   "set",
		Short: "Change or show the cluster's settings",
		Long: `--plain-bulk lets the bytes of files go over plain TCP, on connections that
tickets open, so that the kernel can send files to sockets by itself. All other
traffic stays encrypted, and so do volumes with the policy encrypt. An attacker who can
watch the network can then read files; an attacker who can change packets can change
files.

--key-life is how long a key signs capabilities before the next key does: 2h at
least, 24h by default. Capabilities of an older key stay valid until they end.

--client-rate is the number of operations in a second that a metadata server does for
one client identity, all its mounts together (50000 by default). Further operations
wait; none fails.`,
		Example: `  penstock cluster set --plain-bulk=true
  penstock cluster set --key-life 12h`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return at.api(cmd.Context(), func(c *admin.Client) error {
				q, change := &admin.ChangeSettingsRequest{}, false
				for flag, add := range map[string]func(){
					"plain-bulk":  func() { q.PlainBulk = &plain },
					"key-life":    func() { q.KeyLife = durationpb.New(keyLife) },
					"client-rate": func() { q.ClientRate = &clientRate },
				} {
					if cmd.Flags().Changed(flag) {
						change = true
						add()
					}
				}
				var answer *admin.Settings
				var err error
				if change {
					answer, err = c.Grants.ChangeSettings(cmd.Context(), q)
				} else {
					answer, err = c.Grants.GetSettings(cmd.Context(), &admin.GetSettingsRequest{})
				}
				if err != nil {
					return err
				}
				var set cluster.Settings
				admin.Hear(&set, answer)
				fmt.Fprintf(cmd.OutOrStdout(), "plain-bulk: %t\nkey-life: %v\nclient-rate: %d\n", set.PlainBulk, cmp.Or(set.KeyLife, cluster.DefaultKeyLife), cmp.Or(set.ClientRate, cluster.DefaultClientRate))
				return nil
			})
		},
	}
	cmd.Flags().DurationVar(&keyLife, "key-life", 0, "how long a key signs capabilities (0: the default, 24h)")
	cmd.Flags().Uint32Var(&clientRate, "client-rate", 0, "operations a second of one client identity (0: the default, 50000)")
	cmd.Flags().BoolVar(&plain, "plain-bulk", false, "send bytes of volumes without encryption over plain TCP")
	at.flags(cmd)
	return cmd
}

// dash returns "-" for an empty cell of a table.
func dash(s string) string {
	if s == "" {
		return "-"
	}
	return s
}
