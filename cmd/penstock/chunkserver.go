package main

import (
	"context"
	"errors"
	"os"
	"time"

	"github.com/spf13/cobra"

	"penstock.io/penstock/cmd/penstock/local"
)

func newChunkServer() *cobra.Command {
	var cfg local.ChunkConfig
	var logs logFlags
	var at where
	var port adminPort
	cmd := &cobra.Command{
		Use:   "chunkserver",
		Short: "Run a chunk server",
		Long: `Stores chunks on local disks, each a directory of its own, and serves them.
A directory that holds anything but a disk of this cluster and server is
refused, never cleaned, and so is an empty directory in the place of a known disk: the
disk counts as failed, its data is repaired elsewhere, and the server goes on with its
other disks.
See 'penstock disk --help'.`,
		Example: `  penstock chunkserver --data /var/lib/penstock-chunks --disk nvme=/mnt/a --disk hdd=/mnt/b --cluster meta1:7500,meta2:7500
  penstock chunkserver --data /var/lib/penstock-chunks --cluster unix:/var/lib/penstock-meta/meta.sock`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			log, err := logs.logger(cmd.ErrOrStderr())
			if err != nil {
				return err
			}
			if cfg.Dir == "" {
				return usagef("say where to keep the data: --data DIR")
			}
			if cfg.Meta, cfg.Creds, err = at.open(); err != nil {
				return err
			}
			unsafe, err := local.Controls(os.Getenv(local.ControlVariable), log)
			if err != nil {
				return err
			}
			cfg.Store, cfg.UnsafeNoCap, cfg.UnsafeOwnClock, cfg.Logger = unsafe.Store, unsafe.NoCap, unsafe.OwnClock, log
			c, release, err := local.RunChunkServer(cmd.Context(), cfg)
			if err != nil {
				return err
			}
			stop := func(ctx context.Context) error { return errors.Join(c.Close(ctx), release()) }
			addr, stopAdmin, err := port.serve(cmd.Context(), log, adminSocket(cfg.Dir), local.Metrics(nil, c, nil), c.Ready)
			if err != nil {
				return errors.Join(err, stop(cmd.Context()))
			}
			defer stopAdmin()
			started(log, "chunkserver", "dir", cfg.Dir, "address", c.Addr, "admin", addr)
			return untilFailed(cmd.Context(), c.Failed(), stop)
		},
	}
	f := cmd.Flags()
	f.StringVar(&cfg.Dir, "data", "", "directory for identity, socket and, without --disk, the one disk")
	f.StringSliceVar(&cfg.Disks, "disk", nil, "[CLASS=]DIR of a disk; may be repeated (default one in --data)")
	f.Uint64Var(&cfg.PullRate, "pull-rate", 128<<20, "most bytes copied from other servers in a second")
	f.DurationVar(&cfg.ScrubPeriod, "scrub-period", 14*24*time.Hour, "how long reading everything once may take; below zero: only when asked")
	f.StringVar(&cfg.Listen, "listen", "", "host:port to serve TCP on, beside the socket in the data directory")
	f.StringVar(&cfg.Advertise, "advertise", "", "address that others are told (default: that of --listen)")
	f.BoolVar(&cfg.LocalClients, "local-clients", true, "with --listen: mounts on this machine that run as root or as this user read from the disk itself and share memory, through the socket in the data directory")
	f.StringVar(&cfg.Congestion, "tcp-congestion", "", "TCP congestion control of bulk connections, as the kernel calls it (default: cubic, else the machine's)")
	f.StringVar(&cfg.Topology, "topology", "/local", "where the server stands: /datacenter/rack/node")
	f.StringVar(&cfg.Class, "class", "ssd", "class of the disks: nvme, ssd, hdd")
	f.StringVar(&cfg.Name, "name", "chunkserver", "name of this server")
	port.flag(cmd, "admin.sock in --data")
	port.openFlag(cmd)
	at.flags(cmd)
	logs.add(cmd)
	markDirs(cmd, "data")
	return configurable(cmd)
}
