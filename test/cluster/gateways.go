package cluster

import (
	"context"
	"fmt"
	"math/rand/v2"
	"strings"
	"time"
)

// ports of a gateway, for Kafka clients and for appends.
const (
	kafkaPort  = 9092
	ingestPort = 9094
)

// startGateways starts the gateways. They ask for no credentials and so serve loopback
// addresses only, which the nodes of a cluster without certificates have.
func (c *Cluster) startGateways(ctx context.Context) error {
	if c.cfg.Gateways == 0 {
		return nil
	}
	for i := range c.cfg.Gateways {
		m, err := c.newMember(fmt.Sprint("gateway", i+1), c.Racks[i%len(c.Racks)], 0)
		c.Gateways = append(c.Gateways, m)
		if err != nil {
			return err
		}
		m.alone = true
		m.path = c.cfg.Penstock
		m.args = append([]string{
			"gateway", "--cluster", c.metaAddrs(), "--admin", "none",
			"--kafka", m.addr(kafkaPort), "--ingest", m.addr(ingestPort),
		}, c.creds.flags(m.Name)...)
		m.args = append(m.args, "--name", m.Name)
		m.ready = func(context.Context) error { return m.listens(kafkaPort) }
		if err := m.Start(); err != nil {
			return err
		}
	}
	return c.Ready(ctx, c.Gateways...)
}

// gatewayAddrs are the addresses of all gateways for a given port; each turn begins with another
// gateway.
func (c *Cluster) gatewayAddrs(port, turn int) (addrs []string) {
	for i := range c.Gateways {
		addrs = append(addrs, c.Gateways[(i+turn)%len(c.Gateways)].addr(port))
	}
	return addrs
}

func (n *nemesis) gateways() []*Member { return n.c.Gateways }

// users stand for the node of the streams' clients.
func (n *nemesis) users() []*Member { return []*Member{{Name: n.c.users.Name, Node: n.c.users}} }

func (n *nemesis) ofGateways() []fault {
	if len(n.c.Gateways) == 0 {
		return nil
	}
	long := 12 * time.Second
	return []fault{
		{"kill gateway", []string{"gateway"}, 6 * time.Second, 5, n.kill(n.gateways)},
		{"pause gateway", []string{"gateway"}, long, 5, n.pause(n.gateways)},
		{"stop gateway", []string{"gateway"}, 3 * time.Second, 3, n.stop},
		{"isolate gateway from meta", []string{"gateway"}, long, 3, n.isolate(n.gateways, n.metas)},
		{"cut gateway from meta one way", []string{"gateway"}, long, 2, n.link(n.gateways, n.metas, "one way")},
		{"cut gateway from chunk", []string{"chunk"}, long, 2, n.link(n.gateways, n.chunks, "cut")},
		{"cut gateway from its clients", []string{"gateway"}, long, 2, n.link(n.gateways, n.users, "cut")},
	}
}

// stop ends a gateway in order, which gives its partitions and groups to other gateways.
func (n *nemesis) stop(_ context.Context, r *rand.Rand) (string, func(context.Context) error, error) {
	m := some(r, n.c.Gateways)
	m.serves(false)
	if err := m.Stop(); err != nil && !strings.Contains(err.Error(), "signal: killed") {
		return "", nil, err
	}
	return m.Name, n.restart(m), nil
}
