package main

import (
	"context"
	"errors"
	"os"

	"github.com/spf13/cobra"

	"penstock.io/penstock/cmd/penstock/local"
)

func newMeta() *cobra.Command {
	var cfg local.MetaConfig
	var logs logFlags
	cmd := &cobra.Command{
		Use:   "meta",
		Short: "Run a metadata server",
		Long: `Serves the volumes of a cluster: names, attributes, leases, quota, and which
chunks hold which bytes. Without --etcd it embeds an etcd of one member in DIR.`,
		Example: `  penstock meta --dir /var/lib/penstock-meta
  penstock meta --dir /var/lib/penstock-meta --etcd http://10.0.0.1:2379,http://10.0.0.2:2379`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			log, err := logs.logger(cmd.ErrOrStderr())
			if err != nil {
				return err
			}
			if cfg.Dir == "" {
				return usagef("say where to keep the data: --dir DIR")
			}
			unsafe, err := local.Controls(os.Getenv(local.ControlVariable), log)
			if err != nil {
				return err
			}
			cfg.Unsafe, cfg.UnsafeNoFsync, cfg.Logger = unsafe.Meta, unsafe.NoJournal, log
			m, release, err := local.RunMeta(cmd.Context(), cfg)
			if err != nil {
				return err
			}
			started(log, "meta", "dir", cfg.Dir, "address", m.Addr)
			return untilFailed(cmd.Context(), m.Failed(), func(ctx context.Context) error { return errors.Join(m.Close(ctx), release()) })
		},
	}
	f := cmd.Flags()
	f.StringVar(&cfg.Dir, "dir", "", "data directory; made if it does not exist")
	f.StringSliceVar(&cfg.Etcd, "etcd", nil, "endpoints of the cluster's etcd (default: one embedded in DIR)")
	f.StringVar(&cfg.Name, "name", "meta", "name of this server")
	f.DurationVar(&cfg.CommitDelay, "commit-delay", 0, "how long operations that nobody waits for gather before they are journaled (default 10ms)")
	logs.add(cmd)
	markDirs(cmd, "dir")
	return configurable(cmd)
}
