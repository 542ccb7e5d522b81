package cluster

import (
	"context"
	"errors"
	"fmt"
	"math"
	"time"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/peer"
)

// GatewayTerm is how long a gateway stays registered after its last call. A gateway calls every
// GatewayEvery.
const (
	GatewayTerm  = 6 * time.Second
	GatewayEvery = 2 * time.Second
)

// Gateway is a gateway that serves streams. The record of a running gateway is under a lease; an
// empty Instance says that the gateway is not registered now.
type Gateway struct {
	Version int    `json:"v" pb:"-"`
	Name    string `json:"name"`
	// Number belongs to the name for ever, and is from 1 to 2^31-1.
	Number uint32 `json:"number"`
	// Instance is drawn by the gateway's process when the process starts.
	Instance string `json:"instance,omitempty"`
	// The addresses that clients are told, "host:port"; empty: the gateway has no such server.
	Kafka  string `json:"kafka,omitempty"`
	Ingest string `json:"ingest,omitempty"`
	// Since is when the process registered first.
	Since meta.Time `json:"since,omitempty"`
	// IngestTLS: the server at Ingest speaks TLS. IngestMembers: clients of the cluster log in there
	// with their certificates of the cluster.
	IngestTLS     bool `json:"ingest_tls,omitempty"`
	IngestMembers bool `json:"ingest_members,omitempty"`
}

// GatewayName is the record of a gateway's number.
type GatewayName struct {
	Version int    `json:"v"`
	Name    string `json:"name"`
	Number  uint32 `json:"number"`
}

// GatewayTable is the records of gateways.
type GatewayTable struct{ c *Cluster }

// GatewaysOf returns the records of a cluster's gateways.
func GatewaysOf(c *Cluster) GatewayTable { return GatewayTable{c} }

func (t GatewayTable) key(name string) string { return t.c.prefix + "/gateways/" + name }

// Register registers a running gateway for GatewayTerm from now on. lease is the result of
// the call before, 0 for the first call. The number and the time in g are ignored: Register
// returns the record with those of the cluster. Errors: Invalid (the name), Exists (another process
// is registered by the name), Unavailable, NoSpace, Version, Corrupt.
func (t GatewayTable) Register(ctx context.Context, g Gateway, lease int64) (Gateway, int64, error) {
	const op = "register gateway"
	if err := peer.CheckName(g.Name); err != nil {
		return g, 0, err
	}
	if g.Instance == "" {
		return g, 0, meta.E(op, meta.Invalid, g.Name, errors.New("the request does not tell the process apart from others: it has no instance"))
	}
	var err error
	if g.Number, err = t.number(ctx, g.Name); err != nil {
		return g, 0, err
	}
	id := clientv3.LeaseID(lease)
	if id != 0 {
		_, err := t.c.cli.KeepAliveOnce(ctx, id)
		if errors.Is(err, rpctypes.ErrLeaseNotFound) {
			id = 0
		} else if err != nil {
			return g, 0, wrap(op, g.Name, err)
		}
	}
	if id == 0 {
		l, err := t.c.cli.Grant(ctx, int64(GatewayTerm/time.Second))
		if err != nil {
			return g, 0, wrap(op, g.Name, err)
		}
		id = l.ID
	}
	if g, err = t.put(ctx, g, id); err != nil && int64(id) != lease {
		if _, rerr := t.c.cli.Revoke(context.WithoutCancel(ctx), id); rerr != nil {
			t.c.log.Debug("an unused lease could not be revoked; the lease ends by itself", "gateway", g.Name, "err", rerr)
		}
	}
	return g, int64(id), err
}

// put writes the record of a gateway under a lease, unless the record is there.
func (t GatewayTable) put(ctx context.Context, g Gateway, lease clientv3.LeaseID) (Gateway, error) {
	const op = "register gateway"
	key := t.key(g.Name)
	for {
		r, err := t.c.cli.Get(ctx, key)
		if err != nil {
			return g, wrap(op, g.Name, err)
		}
		var rev int64
		g.Version, g.Since = recordVersion, meta.Time(time.Now().UnixNano())
		if len(r.Kvs) > 0 {
			old, err := decode[Gateway](r.Kvs[0].Key, r.Kvs[0].Value)
			if err != nil {
				return g, err
			}
			if old.Instance != g.Instance {
				return g, meta.E(op, meta.Exists, g.Name, fmt.Errorf("another process, with the addresses %q and %q, is registered by this name: give each gateway a name of its own; the name of a gateway that ended without saying so is free after %v", old.Kafka, old.Ingest, GatewayTerm))
			}
			g.Since, rev = old.Since, r.Kvs[0].ModRevision
			if old == g && r.Kvs[0].Lease == int64(lease) {
				return g, nil
			}
		}
		done, err := t.c.cli.Txn(ctx).
			If(clientv3.Compare(clientv3.ModRevision(key), "=", rev)).
			Then(clientv3.OpPut(key, encode(g), clientv3.WithLease(lease))).Commit()
		if err != nil {
			return g, wrap(op, g.Name, err)
		}
		if done.Succeeded {
			return g, nil
		}
	}
}

// number returns the number of a name, and gives a new name the next number.
func (t GatewayTable) number(ctx context.Context, name string) (uint32, error) {
	key := t.c.prefix + "/gatewaynames/" + name
	for {
		r, err := t.c.cli.Get(ctx, key)
		if err != nil {
			return 0, wrap("number gateway", name, err)
		}
		if len(r.Kvs) > 0 {
			n, err := decode[GatewayName](r.Kvs[0].Key, r.Kvs[0].Value)
			return n.Number, err
		}
		n, err := t.c.nextID(ctx, "gateway")
		if err != nil {
			return 0, err
		}
		if n > math.MaxInt32 {
			return 0, meta.E("number gateway", meta.NoSpace, name, errors.New("all numbers of gateways are in use"))
		}
		if _, err := t.c.cli.Txn(ctx).
			If(clientv3.Compare(clientv3.CreateRevision(key), "=", 0)).
			Then(clientv3.OpPut(key, encode(GatewayName{recordVersion, name, uint32(n)}))).Commit(); err != nil {
			return 0, wrap("number gateway", name, err)
		}
	}
}

// Unregister ends the registration of a gateway's process. A process that is not registered
// is not an error. Errors: Unavailable.
func (t GatewayTable) Unregister(ctx context.Context, name, instance string) error {
	const op = "unregister gateway"
	key := t.key(name)
	for {
		r, err := t.c.cli.Get(ctx, key)
		if err != nil || len(r.Kvs) == 0 {
			return wrap(op, name, err)
		}
		g, err := decode[Gateway](r.Kvs[0].Key, r.Kvs[0].Value)
		if err != nil || g.Instance != instance {
			return err
		}
		done, err := t.c.cli.Txn(ctx).
			If(clientv3.Compare(clientv3.ModRevision(key), "=", r.Kvs[0].ModRevision)).
			Then(clientv3.OpDelete(key)).Commit()
		if err != nil || done.Succeeded {
			return wrap(op, name, err)
		}
	}
}

// List lists the registered gateways by name, linearizably; with all, also the names that no
// process is registered by. Errors: Unavailable, Version, Corrupt.
func (t GatewayTable) List(ctx context.Context, all bool) ([]Gateway, error) {
	live, err := list[Gateway](ctx, t.c, "/gateways/")
	if err != nil || !all {
		return live, err
	}
	names, err := list[GatewayName](ctx, t.c, "/gatewaynames/")
	if err != nil {
		return nil, err
	}
	byName := map[string]Gateway{}
	for _, g := range live {
		byName[g.Name] = g
	}
	var known []Gateway
	for _, n := range names {
		g, ok := byName[n.Name]
		if !ok {
			g = Gateway{Version: recordVersion, Name: n.Name, Number: n.Number}
		}
		known = append(known, g)
	}
	return known, nil
}
