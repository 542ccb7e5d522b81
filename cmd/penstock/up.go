package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/spf13/cobra"

	"penstock.io/penstock/cmd/penstock/local"
	"penstock.io/penstock/stream"
)

// closeTimeout bounds an orderly stop; a second signal ends at once.
const closeTimeout = 60 * time.Second

func newUp() *cobra.Command {
	var cfg local.Config
	var logs logFlags
	var port adminPort
	var noGateway bool
	cmd := &cobra.Command{
		Use:   "up",
		Short: "Run everything on this machine, in one process",
		Long: `Runs an embedded etcd, a metadata server, a chunk server, a gateway and a mount in
one process, with the protocols and formats of a cluster. The data in DIR stays for the
next start. SIGINT or SIGTERM, or umount of the mount point, stops
cleanly: the mount is flushed and unmounted first.

The parts talk over Unix sockets of mode 0600 in DIR. The gateway serves streams
to Kafka clients, and over HTTP and gRPC, at loopback addresses, to every user of this
machine: without --stream-users the gateway asks for no credentials. If a default
address is not free, the gateway does not serve there.`,
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
			cfg.KafkaOptional, cfg.IngestOptional = !cmd.Flags().Changed("kafka"), !cmd.Flags().Changed("ingest")
			if noGateway {
				cfg.Kafka, cfg.Ingest = "", ""
			}
			ctx := cmd.Context()
			began := time.Now()
			cfg.MountOptions.Watchdog = watchdogProgram
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
			addr, stopAdmin, err := port.serve(ctx, log, adminSocket(abs), prometheus.Gatherers{local.Metrics(s.Meta, s.Chunk, s.Mount), s.Gateway.Metrics()}, s.Chunk.Ready)
			if err != nil {
				return errors.Join(err, closeSystem())
			}
			defer stopAdmin()
			kafkaAddr, ingestAddr := gatewayAddrs(s)
			started(log, "up", "dir", cfg.Dir, "mount", cfg.Mount, "meta", s.Meta.Addr, "admin", addr, "kafka", kafkaAddr, "ingest", ingestAddr, "took", time.Since(began).Round(time.Millisecond))
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
	f.DurationVar(&cfg.CommitDelay, "commit-delay", 0, "how long operations gather, while no caller waits, before they are journaled (default 10ms)")
	f.BoolVar(&cfg.MountOptions.ReadOnly, "read-only", false, "mount read-only")
	f.BoolVar(&cfg.MountOptions.SUID, "suid", false, "honour set-id programs and file capabilities of the mount")
	f.BoolVar(&cfg.MountOptions.Dev, "dev", false, "honour device nodes of the mount")
	f.BoolVar(&cfg.MountOptions.AllowOther, "allow-other", false, "without root: let other users in (needs user_allow_other in /etc/fuse.conf)")
	doorFlags(cmd, &cfg.Doors)
	f.StringVar(&cfg.Kafka, "kafka", defaultKafka, "address at which the gateway serves streams to Kafka clients")
	f.StringVar(&cfg.Ingest, "ingest", defaultIngest, "address at which the gateway takes records over HTTP and gRPC")
	f.DurationVar(&cfg.StreamIdle, "stream-idle", stream.DefaultIdle, "time after the last use of a partition until the gateway gives the partition up; a gateway without partitions has no session, so that volumes can be rolled back")
	f.BoolVar(&noGateway, "no-gateway", false, "run no gateway: streams are not served")
	port.flag(cmd, "DIR/admin.sock")
	port.openFlag(cmd)
	logs.add(cmd)
	markDirs(cmd, "dir", "mount")
	return configurable(cmd)
}

// gatewayAddrs returns the addresses of the gateway's servers, for the log.
func gatewayAddrs(s *local.System) (kafka, ingest string) {
	if s.Gateway == nil {
		return "none", "none"
	}
	return cmp.Or(s.Gateway.Kafka, "none"), cmp.Or(s.Gateway.Ingest, "none")
}

// markDirs lets the shell complete directories for flags.
func markDirs(cmd *cobra.Command, flags ...string) {
	for _, name := range flags {
		if err := cmd.MarkFlagDirname(name); err != nil {
			panic(err) // the flag was added just before
		}
	}
}

// untilFailed waits until the role fails or the command's context ends, and stops the role in
// order.
func untilFailed(ctx context.Context, failed <-chan error, stop func(context.Context) error) error {
	var err error
	select {
	case err = <-failed:
	case <-ctx.Done():
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), closeTimeout)
	defer cancel()
	return errors.Join(err, stop(ctx))
}
