package main

import (
	"cmp"
	"errors"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/spf13/cobra"

	penstock "penstock.io/penstock"
	"penstock.io/penstock/cmd/penstock/local"
	"penstock.io/penstock/meta/admin"
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
gRPC. A cluster may have several gateways, each with a name of its own. Each
registers with the metadata servers, which give its name a number, the broker's id for
Kafka clients. The name is the name in the gateway's certificate, or --name. When a gateway
ends, other gateways take over its partitions and groups: at once after an orderly end,
otherwise when the gateway's session has ended.

The gateway tells clients the addresses at which its servers listen. If clients reach the
gateway at other addresses, such as behind NAT or with --kafka 0.0.0.0:9092, give these
addresses with --advertise-kafka and --advertise-ingest.

With --stream-users clients must log in, and may do what their user ids may do by the
modes and ACLs of the streams' directories. Beyond loopback addresses the servers need
users and TLS.`,
		Example: `  penstock gateway --cluster meta1:7400,meta2:7400 --kafka 127.0.0.1:9092
  penstock gateway --cluster meta1:7400 --name edge-3 --kafka 10.0.0.7:9092 --ingest 10.0.0.7:9094 \
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
			for flag, at := range map[string]string{"--advertise-kafka": cfg.AdvertiseKafka, "--advertise-ingest": cfg.AdvertiseIngest} {
				if host, port, err := net.SplitHostPort(at); at != "" && (err != nil || host == "" || port == "") {
					return usagef("%s is HOST:PORT, and %q is not", flag, at)
				}
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
			started(log, "gateway", "number", g.Number, "kafka", g.Kafka, "ingest", cmp.Or(g.Ingest, "none"), "admin", addr)
			return untilFailed(ctx, nil, g.Close)
		},
	}
	f := cmd.Flags()
	f.StringVar(&cfg.Kafka, "kafka", defaultKafka, "address at which the gateway serves streams to Kafka clients")
	f.StringVar(&cfg.Ingest, "ingest", "", "address at which the gateway takes records over HTTP and gRPC, such as "+defaultIngest+" (default: none)")
	doorFlags(cmd, &cfg.Doors)
	f.StringVar(&cfg.Name, "name", "", "name of this gateway, different from all other gateways of the cluster (default: the name in its certificate, or the host's name)")
	f.StringVar(&cfg.AdvertiseKafka, "advertise-kafka", "", "HOST:PORT at which Kafka clients reach the gateway (default: the address at which the server listens)")
	f.StringVar(&cfg.AdvertiseIngest, "advertise-ingest", "", "HOST:PORT at which clients of HTTP and gRPC reach the gateway (default: the address at which the server listens)")
	f.DurationVar(&cfg.Idle, "stream-idle", stream.DefaultIdle, "time after the last use of a partition until the gateway gives the partition up; a gateway without partitions has no session, so that volumes can be rolled back")
	port.flag(cmd, "a socket in the directory for run-time files")
	port.openFlag(cmd)
	at.flags(cmd)
	logs.add(cmd)
	configurable(cmd)
	cmd.AddCommand(newGatewayList())
	return cmd
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

// gatewayView is what the command prints of a gateway.
type gatewayView struct {
	Name   string `json:"name" yaml:"name"`
	Number uint32 `json:"number" yaml:"number"`
	Live   bool   `json:"live" yaml:"live"`
	Kafka  string `json:"kafka,omitempty" yaml:"kafka,omitempty"`
	Ingest string `json:"ingest,omitempty" yaml:"ingest,omitempty"`
	Since  string `json:"since,omitempty" yaml:"since,omitempty"`
}

func newGatewayList() *cobra.Command {
	var w where
	var out output
	cmd := &cobra.Command{
		Use:   "list",
		Short: "List the gateways that were ever registered",
		Long: `Lists the gateways that were ever registered: the name, the number that belongs to the
name (the broker's id for Kafka clients), and, of a gateway that runs, the addresses that
clients are told, and since when its process is registered. A gateway that ended without
saying so counts as running for 6 s.`,
		Example: `  penstock gateway list
  penstock gateway list --output json`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return w.api(cmd.Context(), func(c *admin.Client) error {
				answer, err := c.Gateways.ListGateways(cmd.Context(), &admin.ListGatewaysRequest{})
				if err != nil {
					return err
				}
				views := []gatewayView{}
				for _, g := range answer.Gateways {
					v := gatewayView{Name: g.Name, Number: g.Number, Live: g.Instance != "", Kafka: g.Kafka, Ingest: g.Ingest}
					if v.Live {
						v.Since = g.Since.AsTime().Format(time.RFC3339)
					}
					views = append(views, v)
				}
				return out.print(cmd.OutOrStdout(), views, func(t *table) {
					t.row("GATEWAY", "NUMBER", "STATE", "KAFKA", "INGEST", "SINCE")
					for _, v := range views {
						state := "away"
						if v.Live {
							state = "running"
						}
						t.row(v.Name, v.Number, state, cmp.Or(v.Kafka, "-"), cmp.Or(v.Ingest, "-"), cmp.Or(v.Since, "-"))
					}
				})
			})
		},
	}
	out.flag(cmd)
	w.flags(cmd)
	return cmd
}
