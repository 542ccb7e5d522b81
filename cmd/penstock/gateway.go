package main

import (
	"cmp"
	"errors"
	"os"
	"path/filepath"
	"strconv"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/spf13/cobra"

	penstock "penstock.io/penstock"
	"penstock.io/penstock/cmd/penstock/local"
	"penstock.io/penstock/stream"
)

func newGateway() *cobra.Command {
	var cfg local.GatewayConfig
	var logs logFlags
	var at where
	var port adminPort
	cmd := &cobra.Command{
		Use:   "gateway",
		Short: "Run a gateway: streams for Kafka, HTTP and gRPC clients",
		Long: `Serves the streams of a cluster to Kafka clients, and takes records over HTTP and
gRPC. A cluster may have several
gateways, each with a --node number of its own. A partition that nobody leads is led
by the gateway that is asked first, and Kafka clients are told which gateway leads
a partition or coordinates a group. When a gateway ends, the others take over what
it led: at once after an orderly end, else when its session has ended.

With --stream-users clients must log in, and may do what their user ids may do by the
modes and ACLs of the streams' directories. Beyond loopback addresses the servers need
users and TLS.`,
		Example: `  penstock gateway --cluster meta1:7400,meta2:7400 --node 2 --kafka 127.0.0.1:9092
  penstock gateway --cluster meta1:7400 --node 3 --kafka 10.0.0.7:9092 --ingest 10.0.0.7:9094 \
      --stream-users /etc/penstock/users.json --tls-cert /etc/penstock/tls.crt --tls-key /etc/penstock/tls.key`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			log, err := logs.logger(cmd.ErrOrStderr())
			if err != nil {
				return err
			}
			unsafe, err := local.Controls(os.Getenv(local.ControlVariable), log)
			if err != nil {
				return err
			}
			cfg.Unsafe = unsafe.Streams
			if cfg.Node < 1 {
				return usagef("--node is a number from 1 on, and not the number of another gateway")
			}
			if cfg.Meta, cfg.Creds, err = at.open(); err != nil {
				return err
			}
			cfg.Logger = log
			ctx := cmd.Context()
			c, err := penstock.Dial(ctx, penstock.Config{Meta: cfg.Meta, Creds: cfg.Creds, Name: "gateway", Logger: log})
			if err != nil {
				return err
			}
			cfg.Cluster = c.Cluster()
			if err := c.Close(ctx); err != nil {
				return err
			}
			g, err := local.StartGateway(ctx, cfg)
			if err != nil {
				return err
			}
			socket := "unix:" + filepath.Join(noteDir(), "gateway-"+strconv.Itoa(os.Getpid())+".sock")
			addr, stopAdmin, err := port.serve(ctx, log, socket, prometheus.Gatherers{local.Metrics(nil, nil, nil), g.Metrics()}, g.Ready)
			if err != nil {
				return errors.Join(err, g.Close(ctx))
			}
			defer stopAdmin()
			started(log, "gateway", "node", cfg.Node, "kafka", g.Kafka, "ingest", cmp.Or(g.Ingest, "none"), "admin", addr)
			return untilFailed(ctx, nil, g.Close)
		},
	}
	f := cmd.Flags()
	f.StringVar(&cfg.Kafka, "kafka", defaultKafka, "address at which the gateway serves streams to Kafka clients")
	f.StringVar(&cfg.Ingest, "ingest", "", "address at which the gateway takes records over HTTP and gRPC, such as "+defaultIngest+" (default: none)")
	doorFlags(cmd, &cfg.Doors)
	f.Int32Var(&cfg.Node, "node", 1, "the number of this gateway for Kafka clients; no other gateway of the cluster has it")
	f.DurationVar(&cfg.Idle, "stream-idle", stream.DefaultIdle, "time after the last use of a partition until the gateway gives the partition up; a gateway without partitions has no session, so that volumes can be rolled back")
	port.flag(cmd, "a socket in the directory for run-time files")
	port.openFlag(cmd)
	at.flags(cmd)
	logs.add(cmd)
	return configurable(cmd)
}

// doorFlags adds the flags that say how a gateway's servers know their clients.
func doorFlags(cmd *cobra.Command, d *local.Doors) {
	f := cmd.Flags()
	f.StringVar(&d.Users, "stream-users", "", "file of users: clients of streams must log in as a user of this file (see 'penstock stream password'); without the flag every client may use every stream")
	f.StringVar(&d.Cert, "tls-cert", "", "file with the certificate (PEM) of the servers for streams, which then speak TLS only; a changed file counts for new connections")
	f.StringVar(&d.Key, "tls-key", "", "file with the key of --tls-cert (PEM)")
	f.StringVar(&d.ClientCA, "tls-client-ca", "", "file with authorities (PEM) of client certificates: such a certificate logs a client in as the user with its common name")
	f.BoolVar(&d.Open, "stream-insecure", false, "let the servers for streams listen beyond loopback addresses without users or without TLS")
}
