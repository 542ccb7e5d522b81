package main

import (
	"context"
	"errors"
	"os"

	"github.com/spf13/cobra"

	"penstock.io/penstock/cmd/penstock/local"
	"penstock.io/penstock/meta/server"
)

func newMeta() *cobra.Command {
	var cfg local.MetaConfig
	var logs logFlags
	var creds credentials
	var port adminPort
	cmd := &cobra.Command{
		Use:   "meta",
		Short: "Run a metadata server",
		Long: `Serves the volumes of a cluster: names, attributes, leases, quota, and which
chunks hold which bytes. Without --etcd the server embeds an etcd of one member in DIR.`,
		Example: `  penstock meta --dir /var/lib/penstock-meta
  penstock meta --dir /var/lib/penstock-meta --listen 10.0.0.4:7400 --etcd https://10.0.0.1:2379,https://10.0.0.2:2379`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			log, err := logs.logger(cmd.ErrOrStderr())
			if err != nil {
				return err
			}
			if cfg.Dir == "" {
				return usagef("say where to keep the data: --dir DIR")
			}
			for name, rate := range map[string]uint64{"--digest-rate": cfg.DigestRate, "--awaited-digest-rate": cfg.AwaitedDigestRate} {
				if cmd.Flags().Changed(name[2:]) && rate < server.MinDigestRate {
					return usagef("%s: %d bytes a second are too few, the least is 1M", name, rate)
				}
			}
			if cfg.Creds, err = creds.open(); err != nil {
				return err
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
			stop := func(ctx context.Context) error { return errors.Join(m.Close(ctx), release()) }
			addr, stopAdmin, err := port.serve(cmd.Context(), log, adminSocket(cfg.Dir), local.Metrics(m, nil, nil), m.Ready)
			if err != nil {
				return errors.Join(err, stop(cmd.Context()))
			}
			defer stopAdmin()
			started(log, "meta", "dir", cfg.Dir, "address", m.Addr, "admin", addr)
			return untilFailed(cmd.Context(), m.Failed(), stop)
		},
	}
	f := cmd.Flags()
	f.StringVar(&cfg.Dir, "dir", "", "data directory; made if it does not exist")
	etcdFlags(cmd, &cfg.Etcd, &cfg.EtcdTLS)
	f.StringVar(&cfg.Listen, "listen", "", "host:port to serve TCP on, beside the socket in the data directory")
	f.StringVar(&cfg.Advertise, "advertise", "", "address that others are told (default: that of --listen)")
	f.StringVar(&cfg.Name, "name", "", "name of this server, unique in the cluster and the same after a restart (default: its address)")
	f.DurationVar(&cfg.CommitDelay, "commit-delay", 0, "how long operations gather, while no caller waits, before they are journaled (default 10ms)")
	creds.flags(cmd)
	f.DurationVar(&cfg.Repair.Grace, "repair-grace", 0, "how long an unneeded copy is kept for clients that may still read it (default 1m)")
	f.DurationVar(&cfg.Repair.ListInterval, "list-interval", 0, "most time between two comparisons of the chunk servers' replicas with the records (default 10m)")
	f.Var((*sizeFlag)(&cfg.DigestRate), "digest-rate", "bytes read for digests of snapshots in a second, 1M or more (default 64M)")
	f.Var((*sizeFlag)(&cfg.AwaitedDigestRate), "awaited-digest-rate", "bytes read in a second, in addition, for digests that a mirror or a user waits for, 1M or more (default 256M)")
	f.DurationVar(&cfg.CheckpointEvery, "checkpoint-every", 0, "largest age of a changing volume's checkpoint: later changes are lost if etcd is lost whole (default 5m)")
	f.IntVar(&cfg.Followers, "followers", 0, "metadata servers besides the owner that keep a copy of a volume's state ready; -1: none (default 2)")
	f.DurationVar(&cfg.Repair.Delay, "repair-delay", 0, "how long a chunk server may be out of reach before its chunks are copied elsewhere (default 30s)")
	f.DurationVar(&cfg.Repair.Interval, "repair-interval", 0, "time between two looks at all chunks of a volume (default 5s)")
	f.IntVar(&cfg.Repair.Parallel, "repair-parallel", 0, "copies under way at a time, for all volumes of this server (default 8)")
	f.Var((*sizeFlag)(&cfg.Repair.Rate), "repair-rate", "bytes copied in a second, for all volumes of this server (default 256M)")
	f.Var((*sizeFlag)(&cfg.Repair.ServerRate), "repair-server-rate", "bytes copied in a second to one chunk server (default 128M)")
	f.Float64Var(&cfg.Repair.Balance, "balance", 0, "by how much the fill of two chunk servers may differ, a part of 1, before chunks are moved; negative: never move (default 0.1)")
	f.Var((*sizeFlag)(&cfg.Repair.CompactRate), "compact-rate", "bytes copied by compaction in a second to each chunk server, one chunk at a time (default 64M)")
	f.IntVar(&cfg.Repair.JoinFragments, "join-fragments", 0, "how many fragments of a file must follow each other to be joined, at least 2; -1: never join (default 16)")
	f.Var((*sizeFlag)(&cfg.Repair.JoinBelow), "join-below", "fragments of this size or larger stay where they are (default 256K)")
	f.DurationVar(&cfg.Repair.JoinInterval, "join-interval", 0, "least time between two looks for fragments in a volume that changes (default 5m)")
	port.flag(cmd, "DIR/admin.sock")
	port.openFlag(cmd)
	logs.add(cmd)
	markDirs(cmd, "dir")
	return configurable(cmd)
}
