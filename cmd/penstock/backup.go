package main

import (
	"fmt"

	"github.com/spf13/cobra"

	"penstock.io/penstock/cmd/penstock/local"
)

func newClusterBackup() *cobra.Command {
	var cfg local.BackupConfig
	var logs logFlags
	cmd := &cobra.Command{
		Use:   "backup FILE",
		Short: "Keep what etcd holds of the cluster in a file",
		Long: `Writes the cluster's records and every volume's journal, as they are at one
moment, into FILE, which 'penstock cluster restore --from FILE' takes if etcd is lost.
It is not in the way of anybody, and takes moments. What files consist of is
not in it: that, and the checkpoints of volumes, are on the chunk servers.

FILE HOLDS SECRETS: the keys that capabilities are signed with, and the certificate
authority, sealed. Only its owner may read it (mode 0600): keep it as you keep the
credentials of a metadata server, and beside copies of their cluster.key.

It speaks to etcd itself: run it where a metadata server runs.`,
		Example: `  penstock cluster backup /var/backups/penstock.backup --etcd https://10.0.0.1:2379 \
      --etcd-ca /etc/penstock/etcd-ca.pem --etcd-cert /etc/penstock/etcd.pem --etcd-key /etc/penstock/etcd.key
  penstock cluster backup /var/backups/penstock.backup --dir /srv/penstock`,
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			log, err := logs.logger(cmd.ErrOrStderr())
			if err != nil {
				return err
			}
			if len(cfg.Etcd) == 0 && cfg.Dir == "" {
				return usagef("say where etcd is: --etcd ENDPOINTS, or --dir DIR of a metadata server that embeds it")
			}
			cfg.Logger = log
			b, size, err := local.TakeBackup(cmd.Context(), cfg, args[0])
			if err != nil {
				return err
			}
			cmd.Println(fmt.Sprintf("cluster %s as of %s: %d records and the journals of %d volumes, %s, in %s; it holds secrets", b.Cluster, when(b.At), len(b.ClusterRecords()), len(b.VolumeRecords()), bytesText(uint64(size)), args[0]))
			return nil
		},
	}
	etcdFlags(cmd, &cfg.Etcd, &cfg.EtcdTLS)
	cmd.Flags().StringVar(&cfg.Dir, "dir", "", "data directory of a metadata server, or of 'penstock up', that embeds its etcd")
	logs.add(cmd)
	markDirs(cmd, "dir")
	return cmd
}
