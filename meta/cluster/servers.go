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
	"penstock.io/penstock/meta/capability"
)

// ChunkServer is a running chunk server.
type ChunkServer struct {
	Version int             `json:"v"`
	Info    meta.ServerInfo `json:"info"`
}

// MetaServer is a running metadata server.
type MetaServer struct {
	Version int    `json:"v"`
	Name    string `json:"name"` // stays the same over restarts
	Addr    string `json:"addr"` // "unix:/path" or "host:port"
}

// NewServerID assigns the id of a new chunk server, which keeps it on its disks for ever.
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

// UnregisterMetaServer removes a metadata server from the list, unless another server has its
// name by now.
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
	// Since is the time when the newest key was made, on the clock of the key's maker.
	Since meta.Time `json:"since"`
}

// add makes a new key and drops keys that are too old.
func (r *capKeys) add(now time.Time) {
	next := meta.CapKey{ID: 1, Secret: make([]byte, 32)}
	if n := len(r.Keys); n > 0 {
		next.ID = r.Keys[n-1].ID + 1
	}
	rand.Read(next.Secret) // never fails: the program would stop instead
	r.Version, r.Keys, r.Since = recordVersion, append(r.Keys, next), meta.Time(now.UnixNano())
	r.Keys = r.Keys[max(0, len(r.Keys)-keptKeys):]
}

const (
	// keptKeys is the number of valid capability keys: the signing key and the previous key.
	keptKeys = 2
	// keyHold is the least age of the newest key before another is added, whatever clocks say:
	// by then the last capabilities of the previous key have ended. A server may hear of the
	// newest key 5 s late and waits 10 s before it signs with it.
	keyHold = capability.MaxLife + time.Minute
)

// CapKeys returns the capability keys, ascending by id; all are valid, the last is the newest.
// The first call in a cluster makes a key. Errors: Unavailable, Corrupt, Version.
func (c *Cluster) CapKeys(ctx context.Context) ([]meta.CapKey, error) {
	for {
		r, rev, err := c.capKeys(ctx)
		if err != nil || len(r.Keys) > 0 {
			return r.Keys, err
		}
		r.add(time.Now())
		if done, err := c.putCapKeys(ctx, r, rev, 0); err != nil || done {
			return r.Keys, err
		}
	}
}

// FreshCapKeys adds a capability key and drops the oldest if the newest is older than every,
// and reports whether this call did. Of several concurrent callers, one does.
//
// The age is counted on servers' clocks: an etcd lease would start again whenever etcd elects
// a leader or starts. A server whose clock shows a time before the key was made counts from
// then on, so that clocks which are wrong by d make a key that much older or younger, and no
// clock delays the next key for longer than every. However wrong clocks are, no key comes
// within keyHold of the previous one: a key of etcd beside the record, under a lease of that
// length, which may last longer but never shorter, prevents it. Errors: Unavailable, Corrupt,
// Version.
func (c *Cluster) FreshCapKeys(ctx context.Context, every time.Duration) (rotated bool, err error) {
	return c.freshCapKeys(ctx, time.Now(), every, keyHold)
}

func (c *Cluster) freshCapKeys(ctx context.Context, now time.Time, every, hold time.Duration) (rotated bool, err error) {
	const op = "rotate capability keys"
	r, rev, err := c.capKeys(ctx)
	if err != nil || len(r.Keys) == 0 {
		return false, err // CapKeys makes the first
	}
	age := now.Sub(time.Unix(0, int64(r.Since)))
	switch {
	case age < 0:
		r.Since = meta.Time(now.UnixNano())
		_, err := c.putCapKeys(ctx, r, rev, 0) // else another was quicker
		return false, err
	case age < every:
		return false, nil
	}
	g, err := c.cli.Get(ctx, c.prefix+"/keyhold", clientv3.WithKeysOnly())
	if err != nil || len(g.Kvs) > 0 {
		return false, wrap(op, "", err)
	}
	lease, err := c.cli.Grant(ctx, int64((hold+time.Second-1)/time.Second))
	if err != nil {
		return false, wrap(op, "", err)
	}
	r.add(now)
	rotated, err = c.putCapKeys(ctx, r, rev, lease.ID)
	if err == nil && !rotated {
		_, err = c.cli.Revoke(ctx, lease.ID) // another was quicker
		err = wrap(op, "", err)
	}
	return rotated, err // after an error, the unused lease ends by itself
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

// putCapKeys writes the record if the record's revision is still rev, and reports success.
// With a lease, putCapKeys writes only if no key is held, and then holds the newest as long as
// the lease lives.
func (c *Cluster) putCapKeys(ctx context.Context, r capKeys, rev int64, lease clientv3.LeaseID) (done bool, err error) {
	key, held := c.prefix+"/capkeys", c.prefix+"/keyhold"
	is := []clientv3.Cmp{clientv3.Compare(clientv3.ModRevision(key), "=", rev)}
	then := []clientv3.Op{clientv3.OpPut(key, encode(r))}
	if lease != 0 {
		is = append(is, clientv3.Compare(clientv3.CreateRevision(held), "=", 0))
		then = append(then, clientv3.OpPut(held, "", clientv3.WithLease(lease)))
	}
	t, err := c.cli.Txn(ctx).If(is...).Then(then...).Commit()
	if err != nil {
		return false, wrap("write capability keys", "", err)
	}
	return t.Succeeded, nil
}
