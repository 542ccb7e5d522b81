package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"github.com/spf13/cobra"

	"penstock.io/penstock/cmd/penstock/admin"
	"penstock.io/penstock/cmd/penstock/local"
)

// closeTimeout bounds an orderly stop; a second signal ends at once.
const closeTimeout = 60 * time.Second

func newUp() *cobra.Command {
	var cfg local.Config
	var logs logFlags
	var adminAddr string
	cmd := &cobra.Command{
		Use:   "up",
		Short: "Run everything on this machine, in one process",
		Long: `Runs an embedded etcd, a metadata server, a chunk server and a mount in one
process, with the protocols and formats of a cluster. What is stored in DIR is
there again next time. SIGINT or SIGTERM, or umount of the mount point, stops
cleanly: the mount is flushed and unmounted first.

The parts talk over Unix sockets of mode 0600 in DIR.`,
		Example: `  penstock up --dir /var/lib/penstock --mount /mnt/penstock`,
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			log, err := logs.logger(cmd.ErrOrStderr())
			if err != nil {
				return err
			}
			if cfg.Dir == "" {
				return usagef("say where to keep the data: --dir DIR")
			}
			if cfg.Unsafe, err = local.Controls(os.Getenv(local.ControlVariable), log); err != nil {
				return err
			}
			cfg.Logger = log
			ctx := cmd.Context()
			began := time.Now()
			s, err := local.Up(ctx, cfg)
			if err != nil {
				return err
			}
			closeSystem := func() error {
				ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), closeTimeout)
				defer cancel()
				return s.Close(ctx)
			}
			abs, err := filepath.Abs(cfg.Dir)
			if err != nil {
				return errors.Join(err, closeSystem())
			}
			forget, err := leaveNote(abs, cfg.Mount)
			if err != nil {
				return errors.Join(err, closeSystem())
			}
			defer forget()
			if adminAddr == "" {
				adminAddr = "unix:" + filepath.Join(abs, "admin.sock")
			}
			a, err := admin.Listen(admin.Config{Addr: adminAddr, Gatherer: local.Metrics(s.Meta, s.Chunk, s.Mount), Logger: log})
			if err != nil {
				return errors.Join(err, closeSystem())
			}
			defer a.Close(context.WithoutCancel(ctx))
			started(log, "up", "dir", cfg.Dir, "mount", cfg.Mount, "meta", s.Meta.Addr, "admin", adminAddr, "took", time.Since(began).Round(time.Millisecond))
			if cfg.Mount != "" {
				fmt.Fprintf(cmd.OutOrStdout(), "penstock is mounted on %s; Ctrl-C stops it\n", cfg.Mount)
			} else {
				fmt.Fprintln(cmd.OutOrStdout(), "penstock is up; Ctrl-C stops it")
			}
			failed := s.Failed(ctx)
			return errors.Join(failed, closeSystem())
		},
	}
	f := cmd.Flags()
	f.StringVar(&cfg.Dir, "dir", "", "data directory; made if it does not exist")
	f.StringVar(&cfg.Mount, "mount", "", "mount point, an empty directory; without it nothing is mounted")
	f.Int64Var(&cfg.WriteBuffer, "write-buffer", 0, "bytes of written data kept in memory at most (default 256 MiB)")
	f.IntVar(&cfg.MetaCache, "meta-cache", 0, "inodes kept in memory at most (default 500,000)")
	f.DurationVar(&cfg.CommitDelay, "commit-delay", 0, "how long operations that nobody waits for gather before they are journaled (default 10ms)")
	f.BoolVar(&cfg.MountOptions.ReadOnly, "read-only", false, "mount read-only")
	f.BoolVar(&cfg.MountOptions.AllowOther, "allow-other", false, "without root: let other users in (needs user_allow_other in /etc/fuse.conf)")
	f.StringVar(&adminAddr, "admin", "", "address of metrics, health and profiles: unix:/path or a loopback host:port (default DIR/admin.sock)")
	logs.add(cmd)
	markDirs(cmd, "dir", "mount")
	return configurable(cmd)
}

// markDirs lets the shell complete directories for these flags.
func markDirs(cmd *cobra.Command, flags ...string) {
	for _, name := range flags {
		if err := cmd.MarkFlagDirname(name); err != nil {
			panic(err) // the flag was added just before
		}
	}
}

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
			var failed error
			select {
			case failed = <-m.Failed():
			case <-cmd.Context().Done():
			}
			ctx, cancel := context.WithTimeout(context.WithoutCancel(cmd.Context()), closeTimeout)
			defer cancel()
			return errors.Join(failed, m.Close(ctx), release())
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
			var failed error
			select {
			case failed = <-c.Failed():
			case <-cmd.Context().Done():
			}
			ctx, cancel := context.WithTimeout(context.WithoutCancel(cmd.Context()), closeTimeout)
			defer cancel()
			return errors.Join(failed, c.Close(ctx), release())
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
