package main

import (
	"context"
	"errors"
	"os"

	"github.com/spf13/cobra"

	"penstock.io/penstock/cmd/penstock/local"
)

func newChunkServer() *cobra.Command {
	var cfg local.ChunkConfig
	var logs logFlags
	var at where
	cmd := &cobra.Command{
		Use:   "chunkserver",
		Short: "Run a chunk server",
		Long: `Stores chunks on local disks, each a directory of its own, and serves them.
A directory that holds anything but a disk of this cluster is refused, never
cleaned.`,
		Example: `  penstock chunkserver --data /var/lib/penstock-chunks --cluster unix:/var/lib/penstock-meta/meta.sock`,
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			log, err := logs.logger(cmd.ErrOrStderr())
			if err != nil {
				return err
			}
			if cfg.Dir == "" {
				return usagef("say where to keep the data: --data DIR")
			}
			if cfg.Meta, err = at.addrs(); err != nil {
				return err
			}
			unsafe, err := local.Controls(os.Getenv(local.ControlVariable), log)
			if err != nil {
				return err
			}
			cfg.Store, cfg.Logger = unsafe.Store, log
			c, release, err := local.RunChunkServer(cmd.Context(), cfg)
			if err != nil {
				return err
			}
			started(log, "chunkserver", "dir", cfg.Dir, "address", c.Addr)
			return untilFailed(cmd.Context(), c.Failed(), func(ctx context.Context) error { return errors.Join(c.Close(ctx), release()) })
		},
	}
	f := cmd.Flags()
	f.StringVar(&cfg.Dir, "data", "", "directory for identity, socket and, without --disk, the one disk")
	f.StringSliceVar(&cfg.Disks, "disk", nil, "directories of the disks (default one in --data)")
	f.StringVar(&cfg.Topology, "topology", "/local", "where the server stands: /datacenter/rack/node")
	f.StringVar(&cfg.Class, "class", "ssd", "class of the disks: nvme, ssd, hdd")
	f.StringVar(&cfg.Name, "name", "chunkserver", "name of this server")
	at.flags(cmd)
	logs.add(cmd)
	markDirs(cmd, "data")
	return configurable(cmd)
}
