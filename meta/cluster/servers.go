package cluster

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"strings"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"penstock.io/penstock/meta"
)

// ChunkServer is a chunk server that lives.
type ChunkServer struct {
	Version int             `json:"v"`
	Info    meta.ServerInfo `json:"info"`
}

// MetaServer is a meta server that lives.
type MetaServer struct {
	Version int    `json:"v"`
	Name    string `json:"name"` // stays the same over restarts
	Addr    string `json:"addr"` // "unix:/path" or "host:port"
}

// NewServerID gives out the id of a new chunk server, which keeps it on its
// disks for ever.
func (c *Cluster) NewServerID(ctx context.Context) (meta.ServerID, error) {
	n, err := c.nextID(ctx, "server")
	return meta.ServerID(n), err
}

// RegisterChunkServer tells the cluster of a chunk server as long as the lease
// lives; again, with what changed.
func (c *Cluster) RegisterChunkServer(ctx context.Context, lease clientv3.LeaseID, info meta.ServerInfo) error {
	key := fmt.Sprintf("%s/chunkservers/%016x", c.prefix, uint64(info.ID))
	_, err := c.cli.Put(ctx, key, encode(ChunkServer{recordVersion, info}), clientv3.WithLease(lease))
	return wrap("register chunk server", info.Addr, err)
}

// RegisterMetaServer tells the cluster of a meta server as long as the lease
// lives.
func (c *Cluster) RegisterMetaServer(ctx context.Context, lease clientv3.LeaseID, name, addr string) error {
	if name == "" || strings.ContainsAny(name, "/\x00") {
		return meta.E("register meta server", meta.Invalid, name, errors.New("its name has a slash, or is empty"))
	}
	_, err := c.cli.Put(ctx, c.prefix+"/metaservers/"+name, encode(MetaServer{recordVersion, name, addr}), clientv3.WithLease(lease))
	return wrap("register meta server", name, err)
}

// UnregisterMetaServer takes a meta server off the list, unless another one has
// its name by now.
func (c *Cluster) UnregisterMetaServer(ctx context.Context, name, addr string) error {
	key := c.prefix + "/metaservers/" + name
	_, err := c.cli.Txn(ctx).
		If(clientv3.Compare(clientv3.Value(key), "=", encode(MetaServer{recordVersion, name, addr}))).
		Then(clientv3.OpDelete(key)).Commit()
	return wrap("unregister meta server", name, err)
}

// capKeys is the record of the capability keys, ascending by id.
type capKeys struct {
	Version int           `json:"v"`
	Keys    []meta.CapKey `json:"keys"`
}

// add makes a new key and drops what is too old.
func (r *capKeys) add() {
	next := meta.CapKey{ID: 1, Secret: make([]byte, 32)}
	if n := len(r.Keys); n > 0 {
		next.ID = r.Keys[n-1].ID + 1
	}
	rand.Read(next.Secret) // never fails: it stops the program instead
	r.Version, r.Keys = recordVersion, append(r.Keys, next)
	r.Keys = r.Keys[max(0, len(r.Keys)-keptKeys):]
}

// keptKeys is how many capability keys stay valid: what an older one signed
// must be renewed within one rotation.
const keptKeys = 2

// CapKeys gives the capability keys, ascending; the last one signs. The first
// call in a cluster makes one.
func (c *Cluster) CapKeys(ctx context.Context) ([]meta.CapKey, error) {
	r, _, err := c.capKeys(ctx)
	if err == nil && len(r.Keys) == 0 {
		return c.rotate(ctx, func(k []meta.CapKey) bool { return len(k) == 0 })
	}
	return r.Keys, err
}

// FreshCapKeys rotates the capability keys if the newest is older than every, and
// tells whether this call did. Of several that ask at once one does. The age is
// etcd's to count: a key beside the record hangs on a lease that long (etcd gives
// none below some seconds), so that no clocks are compared and no restart of a
// server begins it anew. With another every than before the age counts from now. Errors:
// Unavailable.
func (c *Cluster) FreshCapKeys(ctx context.Context, every time.Duration) (rotated bool, err error) {
	const op = "rotate capability keys"
	age, keys := c.prefix+"/keyage", c.prefix+"/capkeys"
	r, err := c.cli.Get(ctx, age)
	if err != nil {
		return false, wrap(op, "", err)
	}
	had := int64(0)
	if len(r.Kvs) > 0 {
		if string(r.Kvs[0].Value) == every.String() {
			return false, nil
		}
		had = r.Kvs[0].ModRevision
	}
	now, rev, err := c.capKeys(ctx)
	if err != nil {
		return false, err
	}
	lease, err := c.cli.Grant(ctx, int64((every+time.Second-1)/time.Second))
	if err != nil {
		return false, wrap(op, "", err)
	}
	then := []clientv3.Op{clientv3.OpPut(age, every.String(), clientv3.WithLease(lease.ID))}
	if had == 0 {
		now.add()
		then = append(then, clientv3.OpPut(keys, encode(now)))
	}
	t, err := c.cli.Txn(ctx).
		If(clientv3.Compare(clientv3.ModRevision(age), "=", had), clientv3.Compare(clientv3.ModRevision(keys), "=", rev)).
		Then(then...).Commit()
	if err != nil {
		return false, wrap(op, "", err) // the lease ends by itself, if it was not used
	}
	if !t.Succeeded {
		_, err := c.cli.Revoke(ctx, lease.ID) // another was quicker
		return false, wrap(op, "", err)
	}
	return had == 0, nil
}

// RotateCapKeys adds a key, which signs from now on, and drops the oldest.
func (c *Cluster) RotateCapKeys(ctx context.Context) ([]meta.CapKey, error) {
	return c.rotate(ctx, func([]meta.CapKey) bool { return true })
}

func (c *Cluster) capKeys(ctx context.Context) (capKeys, int64, error) {
	r, err := c.cli.Get(ctx, c.prefix+"/capkeys")
	if err != nil {
		return capKeys{}, 0, wrap("read capability keys", "", err)
	}
	if len(r.Kvs) == 0 {
		return capKeys{}, 0, nil
	}
	k, err := decode[capKeys](r.Kvs[0].Key, r.Kvs[0].Value)
	return k, r.Kvs[0].ModRevision, err
}

// rotate adds a key if the present ones want one.
func (c *Cluster) rotate(ctx context.Context, want func([]meta.CapKey) bool) ([]meta.CapKey, error) {
	for {
		r, rev, err := c.capKeys(ctx)
		if err != nil || !want(r.Keys) {
			return r.Keys, err
		}
		r.add()
		key := c.prefix + "/capkeys"
		t, err := c.cli.Txn(ctx).
			If(clientv3.Compare(clientv3.ModRevision(key), "=", rev)).
			Then(clientv3.OpPut(key, encode(r))).Commit()
		if err != nil {
			return nil, wrap("rotate capability keys", "", err)
		}
		if t.Succeeded {
			return r.Keys, nil
		}
	}
}
