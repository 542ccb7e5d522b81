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
		Short: "Save the cluster's records and journals from etcd in a file",
		Long: `Writes the cluster's records and every volume's journal, as of one moment, into FILE.
If etcd is lost, 'penstock cluster restore --from FILE' reads the file. The command
takes moments and disturbs no client. FILE does not have the contents of files: the
chunk servers have them, and the checkpoints of volumes.

FILE HOLDS SECRETS: the keys that sign capabilities, and the sealed certificate
authority. Only its owner may read it (mode 0600). Keep FILE as carefully as the
credentials of a metadata server, and together with copies of their cluster.key.

The command connects to etcd itself: run it on the machine of a metadata server.`,
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
