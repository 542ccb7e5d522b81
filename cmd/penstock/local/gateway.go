package local

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"sync"
	"time"

	penstock "penstock.io/penstock"
	"penstock.io/penstock/meta"
	"penstock.io/penstock/stream"
	"penstock.io/penstock/stream/kafka"
)

// GatewayConfig configures a gateway: the servers through which clients of other protocols use
// streams.
type GatewayConfig struct {
	Meta    []string
	Cluster string
	// Kafka is the address of the Kafka server, host:port. The server asks for no credentials,
	// so that the address must be a loopback address.
	Kafka string
	// Optional: when the address can't be used, there is no gateway, and a message in the log.
	Optional bool
	Logger   *slog.Logger
}

// Gateway is a running gateway. It connects to the cluster when a request needs a stream
// first, so that a gateway that nobody uses holds no session.
type Gateway struct {
	Addr string // of the Kafka server

	cfg    GatewayConfig
	server *kafka.Server
	ctx    context.Context // ends with Close
	stop   context.CancelFunc
	wg     sync.WaitGroup

	mu     sync.Mutex // held while the client connects
	client *penstock.Client
	host   *stream.Host
}

// StartGateway starts a gateway; nil if the address can't be used and cfg.Optional is set.
// Errors: Invalid (not a loopback address), and those of the listener.
func StartGateway(ctx context.Context, cfg GatewayConfig) (*Gateway, error) {
	addr, err := net.ResolveTCPAddr("tcp", cfg.Kafka)
	if err == nil && !addr.IP.IsLoopback() {
		err = errors.New("the Kafka server asks for no credentials and listens on loopback addresses only, such as 127.0.0.1:9092")
	}
	if err != nil {
		return nil, meta.E("start gateway", meta.Invalid, cfg.Kafka, err)
	}
	l, err := new(net.ListenConfig).Listen(ctx, "tcp", addr.String())
	if err != nil && cfg.Optional {
		cfg.Logger.Warn("streams are not served to Kafka clients, because the address is not free; choose another one with --kafka", "address", cfg.Kafka, "error", err)
		return nil, nil
	}
	if err != nil {
		return nil, meta.E("start gateway", meta.Busy, cfg.Kafka, err)
	}
	g := &Gateway{Addr: l.Addr().String(), cfg: cfg}
	g.ctx, g.stop = context.WithCancel(context.WithoutCancel(ctx))
	g.server = kafka.New(kafka.Config{Host: g.connect, Cluster: cfg.Cluster, Logger: cfg.Logger})
	g.wg.Go(func() {
		if err := g.server.Serve(l); err != nil {
			cfg.Logger.Warn("the Kafka server has ended", "error", err)
		}
	})
	return g, nil
}

// connect returns the streams, and connects to the cluster first.
func (g *Gateway) connect(ctx context.Context) (*stream.Host, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.host != nil {
		return g.host, nil
	}
	if err := g.ctx.Err(); err != nil {
		return nil, meta.E("start gateway", meta.Unavailable, g.cfg.Kafka, errors.New("the gateway stops"))
	}
	name, err := os.Hostname()
	if err != nil {
		name = "localhost"
	}
	dial, cancel := context.WithTimeout(ctx, 30*time.Second)
	defer cancel()
	c, err := penstock.Dial(dial, penstock.Config{
		Meta: g.cfg.Meta, Name: fmt.Sprintf("%s: gateway (pid %d)", name, os.Getpid()), Logger: g.cfg.Logger, WriteBuffer: 64 << 20, MetaCache: 100_000,
	})
	if err != nil {
		return nil, err
	}
	root, err := c.VolumeByID(dial, meta.RootVolume)
	if err != nil {
		return nil, errors.Join(err, c.Close(dial))
	}
	g.client, g.host = c, stream.NewHost(c, root, g.cfg.Logger)
	host := g.host
	g.wg.Go(func() { host.Run(g.ctx) })
	return g.host, nil
}

// Close ends the connections, then the streams, then the session. What was acknowledged is
// durable before.
func (g *Gateway) Close(ctx context.Context) error {
	g.server.Close()
	g.stop()
	g.wg.Wait()
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.client == nil {
		return nil
	}
	return errors.Join(g.host.Close(), g.client.Close(ctx))
}
