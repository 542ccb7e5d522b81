package local

import (
	"cmp"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net"
	"os"
	"sync"
	"time"

	penstock "penstock.io/penstock"
	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/peer"
	"penstock.io/penstock/stream"
	ingest "penstock.io/penstock/stream/ingest/server"
	"penstock.io/penstock/stream/kafka"
	"penstock.io/penstock/stream/partition"
)

// GatewayConfig configures a gateway: the servers through which clients of other protocols use
// streams.
type GatewayConfig struct {
	Meta    []string
	Cluster string
	// Creds are shown to metadata servers that are reached over TCP; nil: Unix sockets only.
	Creds *peer.Credentials
	// Name is the name by which the gateway registers with the metadata servers; "": that of a
	// gateway's certificate, or of the host. Instance tells the processes of a name apart; "": a
	// random word. Without Meta the gateway does not register, and has the number 1.
	Name     string
	Instance string
	// AdvertiseKafka and AdvertiseIngest are the addresses that clients are told, "host:port"; "":
	// the addresses at which the servers listen.
	AdvertiseKafka  string
	AdvertiseIngest string
	// Kafka is the address of the Kafka server, Ingest that of the HTTP server for
	// appends: host:port, or "" for no such server.
	Kafka  string
	Ingest string
	Doors
	// KafkaOptional, IngestOptional: if the address is not free, there is no such server, and a
	// message in the log.
	KafkaOptional  bool
	IngestOptional bool
	// Idle is how long the gateway leads a partition, and keeps a session with the cluster,
	// after the last use; 0: stream.DefaultIdle.
	Idle   time.Duration
	Logger *slog.Logger
	Unsafe stream.Unsafe
}

// Gateway is a running gateway. It connects to the cluster when a request needs a stream, and
// ends the session when it leads nothing any more: a gateway that nobody uses holds no session,
// which would keep volumes from being rolled back.
type Gateway struct {
	Kafka  string // address of the Kafka server; "": none
	Ingest string // address of the HTTP server for appends; "": none
	Number int32  // the number that belongs to the gateway's name

	cfg    GatewayConfig
	listed *registration
	kafka  *kafka.Server   // nil: none
	ingest *ingest.Server  // nil: none
	ctx    context.Context // ends with Close
	stop   context.CancelFunc
	wg     sync.WaitGroup

	counters partition.Counters

	mu     sync.Mutex // held while the client connects and disconnects
	client *penstock.Client
	host   *stream.Host
	end    context.CancelFunc // of host.Run
	ran    chan struct{}      // closed when host.Run has ended
}

// StartGateway starts a gateway; nil if no server has an address, or no address is free and all
// are optional. Errors: Invalid (an address beyond loopback, a wrong file of TLS), Busy (an address is not free).
func StartGateway(ctx context.Context, cfg GatewayConfig) (*Gateway, error) {
	if err := cfg.check(); err != nil {
		return nil, err
	}
	users, err := cfg.users()
	if err != nil {
		return nil, err
	}
	if users != nil {
		users.Unsafe = cfg.Unsafe
	}
	kafkaTLS, err := cfg.tls(cfg.Logger)
	if err != nil {
		return nil, err
	}
	ingestTLS, err := cfg.tls(cfg.Logger, "h2", "http/1.1")
	if err != nil {
		return nil, err
	}
	if cfg.serveMembers() {
		others := ingestTLS.GetConfigForClient
		ingestTLS.GetConfigForClient = func(hello *tls.ClientHelloInfo) (*tls.Config, error) {
			if hello.ServerName == peer.GatewayServer {
				return cfg.Creds.AsGateway("h2"), nil
			}
			return others(hello)
		}
	}
	kl, err := cfg.listen(ctx, "kafka", cfg.Kafka, cfg.KafkaOptional)
	if err != nil {
		return nil, err
	}
	il, err := cfg.listen(ctx, "ingest", cfg.Ingest, cfg.IngestOptional)
	if err != nil {
		if kl != nil {
			err = errors.Join(err, kl.Close())
		}
		return nil, err
	}
	if kl == nil && il == nil {
		return nil, nil
	}
	g := &Gateway{cfg: cfg}
	if kl != nil {
		g.Kafka = kl.Addr().String()
	}
	if il != nil {
		g.Ingest = il.Addr().String()
	}
	g.listed, err = register(ctx, &cfg, advertised(cfg.AdvertiseKafka, g.Kafka), advertised(cfg.AdvertiseIngest, g.Ingest))
	if err != nil {
		for _, l := range []net.Listener{kl, il} {
			if l != nil {
				err = errors.Join(err, l.Close())
			}
		}
		return nil, err
	}
	self, _ := g.listed.list()
	g.Number = self.Number
	g.ctx, g.stop = context.WithCancel(context.WithoutCancel(ctx))
	g.wg.Go(func() { g.listed.run(g.ctx) })
	if cfg.Creds != nil && !cfg.Creds.IsInsecure() {
		g.wg.Go(func() { keepRenewed(g.ctx, cfg.Meta, cfg.Creds, cfg.Logger) })
	}
	g.wg.Go(g.disconnectIdle)
	g.wg.Go(g.retainIdle)
	if kl != nil {
		g.kafka = kafka.New(kafka.Config{Host: g.connect, Node: g.Number, Gateways: g.listed.list, Advertise: cfg.AdvertiseKafka, Cluster: cfg.Cluster, Users: users, TLS: kafkaTLS, Logger: cfg.Logger, UnsafeLate: cfg.Unsafe.NoLate})
		g.serve("kafka", g.kafka.Serve, kl)
	}
	if il != nil {
		ic := ingest.Config{Host: g.connect, Users: users, TLS: ingestTLS, Logger: cfg.Logger}
		if cfg.serveMembers() && g.listed.client != nil {
			ic.Member = (&gatewayMembers{creds: cfg.Creds, users: users, ask: g.listed.access}).login
		}
		g.ingest = ingest.New(ic)
		g.serve("ingest", g.ingest.Serve, il)
	}
	return g, nil
}

// listen listens at the address of a server, whose flag has a name; nil if the server has
// no address, or the address is optional and not free. Errors: Invalid, Busy.
func (cfg *GatewayConfig) listen(ctx context.Context, flag, at string, optional bool) (net.Listener, error) {
	if at == "" {
		return nil, nil
	}
	addr, err := net.ResolveTCPAddr("tcp", at)
	if err == nil && !addr.IP.IsLoopback() {
		if err = cfg.beyondLoopback(); err != nil {
			err = fmt.Errorf("--%s: %w", flag, err)
		}
	}
	if err != nil {
		return nil, meta.E("start gateway", meta.Invalid, at, err)
	}
	l, err := new(net.ListenConfig).Listen(ctx, "tcp", addr.String())
	if err != nil && optional {
		cfg.Logger.Warn("a server of the gateway does not run, because its address is not free; choose another address", "flag", "--"+flag, "address", at, "error", err)
		return nil, nil
	}
	if err != nil {
		return nil, meta.E("start gateway", meta.Busy, at, err)
	}
	return l, nil
}

// serve runs a server until the gateway is closed.
func (g *Gateway) serve(name string, serve func(net.Listener) error, l net.Listener) {
	g.wg.Go(func() {
		if err := serve(l); err != nil {
			g.cfg.Logger.Warn("a server of the gateway has ended", "server", name, "error", err)
		}
	})
}

// connect returns the streams, and connects to the cluster first.
func (g *Gateway) connect(ctx context.Context) (*stream.Host, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.host != nil {
		return g.host, nil
	}
	if err := g.ctx.Err(); err != nil {
		return nil, meta.E("start gateway", meta.Unavailable, "gateway", errors.New("the gateway stops"))
	}
	name, err := os.Hostname()
	if err != nil {
		name = "localhost"
	}
	dial, cancel := context.WithTimeout(ctx, 30*time.Second)
	defer cancel()
	c, err := penstock.Dial(dial, penstock.Config{
		Meta: g.cfg.Meta, Creds: g.cfg.Creds, Name: fmt.Sprintf("%s: gateway (pid %d)", name, os.Getpid()), Logger: g.cfg.Logger, WriteBuffer: 64 << 20, MetaCache: 100_000, MetaIdle: cmp.Or(g.cfg.Idle, stream.DefaultIdle), Streams: true,
	})
	if err != nil {
		return nil, err
	}
	root, err := c.VolumeByID(dial, meta.RootVolume)
	if err != nil {
		return nil, errors.Join(err, c.Close(dial))
	}
	host := stream.NewHost(c, root, g.cfg.Logger)
	self, _ := g.listed.list()
	host.Address, host.Idle = self.Address(), cmp.Or(g.cfg.Idle, host.Idle)
	host.Gateways = g.listed.list
	if g.kafka != nil {
		host.CoordinationEnded = g.kafka.EndGroups
	}
	host.Unsafe = g.cfg.Unsafe
	host.Counters = &g.counters
	g.client, g.host, g.ran = c, host, make(chan struct{})
	var run context.Context
	run, g.end = context.WithCancel(g.ctx)
	ran := g.ran
	g.wg.Go(func() {
		defer close(ran)
		host.Run(run)
	})
	return host, nil
}

// Ready reports why the gateway serves nobody; nil: it serves.
func (g *Gateway) Ready() error {
	if g.ctx.Err() != nil {
		return meta.E("gateway", meta.Unavailable, "gateway", errors.New("the gateway stops"))
	}
	return nil
}

// disconnectIdle ends the session whenever the gateway leads nothing, until the gateway stops.
func (g *Gateway) disconnectIdle() {
	for {
		select {
		case <-time.After(cmp.Or(g.cfg.Idle, stream.DefaultIdle) / 4):
		case <-g.ctx.Done():
			return
		}
		g.mu.Lock()
		if g.host != nil && g.host.CloseIdle() {
			if err := g.disconnect(context.WithoutCancel(g.ctx)); err != nil {
				g.cfg.Logger.Warn("the session of an unused gateway could not be ended; it expires", "error", err)
			}
		}
		g.mu.Unlock()
	}
}

// retainIdleEvery is how often a gateway looks for old records of partitions that nobody leads.
const retainIdleEvery = time.Hour

// retainIdle removes old records of partitions that nobody leads, until the gateway stops. The
// first look is at a random time, so that gateways take turns.
func (g *Gateway) retainIdle() {
	wait := rand.N(retainIdleEvery)
	for {
		select {
		case <-time.After(wait):
		case <-g.ctx.Done():
			return
		}
		wait = retainIdleEvery
		h, err := g.connect(g.ctx)
		if err == nil {
			err = h.RetainIdle(g.ctx)
		}
		if err != nil && g.ctx.Err() == nil {
			g.cfg.Logger.Warn("old records of unused streams could not be removed; the gateway tries again", "again in", wait, "error", err)
		}
	}
}

// disconnect closes the streams and ends the session. The caller holds mu.
func (g *Gateway) disconnect(ctx context.Context) error {
	g.end()
	<-g.ran
	ctx, cancel := context.WithTimeout(ctx, 30*time.Second)
	defer cancel()
	err := errors.Join(g.reported(g.host.Close()), g.reported(g.client.Close(ctx)))
	g.client, g.host = nil, nil
	return err
}

// reported returns nil for an error that says that unsynced bytes were lost with a session, and
// logs the error: the producers of these bytes were not told that the bytes are durable.
func (g *Gateway) reported(err error) error {
	if errors.Is(err, meta.SessionExpired) {
		g.cfg.Logger.Warn("records that were not acknowledged were lost with an earlier session", "error", err)
		return nil
	}
	return err
}

// handOver bounds how long a gateway that stops waits until other gateways can lead what it leads.
const handOver = 10 * time.Second

// leave takes the gateway from the list of gateways, and gives what it leads to the others while its
// servers still tell clients where to go.
func (g *Gateway) leave(ctx context.Context) {
	others, err := g.listed.leave(ctx)
	if err != nil {
		g.cfg.Logger.Warn("the gateway could not be taken from the list of gateways; others take over after its term", "error", err)
	}
	if !others {
		return
	}
	for deadline := time.Now().Add(handOver); time.Now().Before(deadline) && ctx.Err() == nil; time.Sleep(50 * time.Millisecond) {
		g.mu.Lock()
		leads := g.host != nil && g.host.Leads()
		g.mu.Unlock()
		if !leads {
			return
		}
	}
	g.cfg.Logger.Warn("not all partitions and groups could be given to other gateways in time; the end of the session frees them", "waited", handOver)
}

// Close takes the gateway from the list of gateways, and gives what it leads to others; then it ends
// the connections, the streams, and the session. What was acknowledged is durable before.
func (g *Gateway) Close(ctx context.Context) error {
	g.leave(ctx)
	if g.kafka != nil {
		g.kafka.Close()
	}
	if g.ingest != nil {
		g.ingest.Close()
	}
	g.stop()
	g.wg.Wait()
	err := g.listed.close()
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.client == nil {
		return err
	}
	return errors.Join(err, g.disconnect(ctx))
}
