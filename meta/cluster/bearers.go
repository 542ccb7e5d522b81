package cluster

import (
	"context"
	"errors"
	"fmt"

	clientv3 "go.etcd.io/etcd/client/v3"

	"penstock.io/penstock/meta"
)

// Bearer records the certificate of a chunk server's number: a process with another
// certificate is not this server, whatever number the process claims.
type Bearer struct {
	Version int           `json:"v"`
	Server  meta.ServerID `json:"server"`
	Who     string        `json:"who"` // "chunkserver/name"
}

// BindServer binds a number to the identity who, or finds the binding. A number belongs to the
// first identity that shows the number, until the identity is evicted or the node removed;
// then to the next identity. If the newest view shows the binding, BindServer does not ask
// etcd, which may be away. Errors: AccessDenied (bound to another identity), Unavailable,
// NoSpace.
func (c *Cluster) BindServer(ctx context.Context, id meta.ServerID, who string) error {
	const op = "bind chunk server"
	if b, ok := c.View().Bearers[id]; ok && b.Who == who {
		return nil
	}
	key := fmt.Sprintf("%s/bearers/%016x", c.prefix, uint64(id))
	for {
		r, err := c.cli.Get(ctx, key)
		if err != nil {
			return wrap(op, who, err)
		}
		var rev int64
		if len(r.Kvs) > 0 {
			b, err := decode[Bearer](r.Kvs[0].Key, r.Kvs[0].Value)
			if err != nil {
				return err
			}
			if b.Who == who {
				return nil
			}
			if free, err := c.givenUp(ctx, id, b.Who); err != nil {
				return err
			} else if !free {
				return meta.E(op, meta.AccessDenied, who, fmt.Errorf("number %d belongs to %s: 'penstock cluster evict' that certificate, or 'penstock node remove' the server, if it is to be another's", id, b.Who))
			}
			rev = r.Kvs[0].ModRevision
		}
		t, err := c.cli.Txn(ctx).
			If(clientv3.Compare(clientv3.ModRevision(key), "=", rev)).
			Then(clientv3.OpPut(key, encode(Bearer{recordVersion, id, who}))).Commit()
		if err != nil {
			return wrap(op, who, err)
		}
		if t.Succeeded {
			return nil
		}
	}
}

// givenUp reports whether a number's bearer has lost its claim to the number.
func (c *Cluster) givenUp(ctx context.Context, id meta.ServerID, bearer string) (bool, error) {
	m, err := get[Member](ctx, c, "member", "/members/"+bearer)
	switch {
	case err == nil && m.Evicted:
		return true, nil
	case err != nil && !errors.Is(err, meta.NotFound):
		return false, err
	}
	n, err := get[Node](ctx, c, "node", fmt.Sprintf("/nodes/%016x", uint64(id)))
	if errors.Is(err, meta.NotFound) {
		return false, nil
	}
	return err == nil && n.State == NodeRemoved, err
}
