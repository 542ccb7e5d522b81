package main

import (
	"fmt"
	"time"

	"github.com/spf13/cobra"

	"penstock.io/penstock/cmd/penstock/local"
	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/server"
)

func newClusterRestore() *cobra.Command {
	var cfg local.RestoreConfig
	var logs logFlags
	var out output
	var creds credentials
	var yes bool
	cmd := &cobra.Command{
		Use:   "restore",
		Short: "Make a cluster again whose etcd was lost whole",
		Long: `Rebuilds the cluster's records and every volume from the newest complete checkpoint on
the chunk servers, and writes them into an etcd that has no cluster. Stop every metadata
server, leave the chunk servers running, and start this command where a metadata server
ran: with that server's directory, --listen and certificates, so that the chunk servers
find it.

With --from FILE, of 'penstock cluster backup', volumes and records come back as of the
backup, or as of a checkpoint that is newer. The command never takes an older state where
it finds a newer complete one.

All later changes are lost. The command shows how old the restored state is; the number
of lost operations is not known. Chunks that no checkpoint names stay on the disks for
14 days. Without --yes the command shows the state that it found, and writes nothing.
Clients must mount again.

The command refuses an etcd that has a cluster. If etcd has an older copy of this
cluster, or a broken cluster, and no metadata server runs, --overwrite replaces the
records: the old contents of etcd are kept in a file in DIR, and are the backup unless
--from names another file.`,
		Example: `  penstock cluster restore --dir /var/lib/penstock-meta --etcd http://10.0.0.1:2379 --chunkservers 12
  penstock cluster restore --dir /var/lib/penstock-meta --etcd http://10.0.0.1:2379 --chunkservers 12 --yes
  penstock cluster restore --from /var/backups/penstock.backup --dir /var/lib/penstock-meta --etcd http://10.0.0.1:2379 --chunkservers 12 --yes`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			log, err := logs.logger(cmd.ErrOrStderr())
			if err != nil {
				return err
			}
			if cfg.Dir == "" {
				return usagef("say which metadata server's directory: --dir DIR")
			}
			if cfg.Creds, err = creds.open(); err != nil {
				return err
			}
			cfg.Logger = log
			cfg.Confirm = func(sv *server.Survey) (bool, error) {
				return yes, out.print(cmd.OutOrStdout(), sv, func(t *table) { surveyTable(t, sv) })
			}
			sv, err := local.Restore(cmd.Context(), cfg)
			if err != nil {
				return err
			}
			if !yes {
				cmd.PrintErrln("nothing was written: say --yes to restore this")
				return &statusError{exitFailed}
			}
			log.Info("the cluster is restored: start the metadata servers", "cluster", sv.Cluster, "volumes", len(sv.Volumes))
			return nil
		},
	}
	f := cmd.Flags()
	f.StringVar(&cfg.Dir, "dir", "", "data directory of a metadata server")
	etcdFlags(cmd, &cfg.Etcd, &cfg.EtcdTLS)
	f.Lookup("etcd").Usage = "endpoints of the new, empty etcd (default: one embedded in DIR)"
	f.StringVar(&cfg.Name, "name", "restore", "name in logs")
	f.StringVar(&cfg.Listen, "listen", "", "host:port where the chunk servers look for a metadata server")
	f.IntVar(&cfg.Servers, "chunkservers", 0, "chunk servers to wait for (default: until no other came for 10 s)")
	f.DurationVar(&cfg.Wait, "wait", 5*time.Minute, "how long to wait for them")
	f.StringVar(&cfg.From, "from", "", "file of 'penstock cluster backup'")
	f.BoolVar(&cfg.Overwrite, "overwrite", false, "overwrite the cluster in etcd, if no metadata server runs")
	f.BoolVar(&yes, "yes", false, "write the found volumes into etcd")
	creds.flags(cmd)
	logs.add(cmd)
	out.flag(cmd)
	markDirs(cmd, "dir")
	return cmd
}

// surveyTable shows the restored state and the losses.
func surveyTable(t *table, sv *server.Survey) {
	t.row("cluster", sv.Cluster)
	t.row("chunk servers", fmt.Sprint(len(sv.Servers)))
	t.row("records of", when(sv.Written))
	for _, v := range sv.Volumes {
		t.row("volume", fmt.Sprintf("%s (%d)", v.Name, v.ID))
		if v.Seq == 0 {
			t.row("  state", "no complete checkpoint: it begins empty")
		} else if v.FromBackup > 0 {
			t.row("  state", fmt.Sprintf("as of the backup of %s (%v ago), journal entry %d, the last %d from the backup; everything later is lost", when(v.Written), time.Since(time.Unix(0, int64(v.Written))).Round(time.Second), v.Seq, v.FromBackup))
		} else {
			t.row("  state", fmt.Sprintf("as of %s (%v ago), journal entry %d; everything later is lost", when(v.Written), time.Since(time.Unix(0, int64(v.Written))).Round(time.Second), v.Seq))
		}
		t.row("  chunks", fmt.Sprintf("%d with %s in use", v.Chunks, bytesText(v.Bytes)))
		t.row("  missing chunks", fmt.Sprintf("%d with %s: those bytes answer EIO until a server that has them comes back", v.MissingCount, bytesText(v.MissingBytes)))
		t.row("  unknown chunks", fmt.Sprintf("%d with %s: written after the checkpoint, kept for %d days", v.TailCount, bytesText(v.TailBytes), int(server.Quarantine.Hours()/24)))
	}
	for _, n := range sv.Notes {
		t.row("note", n)
	}
}

func when(t meta.Time) string {
	if t == 0 {
		return "never"
	}
	return time.Unix(0, int64(t)).Format(time.DateTime)
}
