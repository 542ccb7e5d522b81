package cluster

import (
	"context"
	"errors"
	"fmt"

	clientv3 "go.etcd.io/etcd/client/v3"

	"penstock.io/penstock/meta"
)

func (c *Cluster) groupKey(name string) string { return c.prefix + "/groups/" + name }

// Groups lists the records of group snapshots, by name; each page linearizably.
func (c *Cluster) Groups(ctx context.Context) ([]meta.Group, error) {
	var all []meta.Group
	err := c.pages(ctx, c.prefix+"/groups/", func(key, value []byte, rev int64) error {
		g, err := decode[meta.Group](key, value)
		g.Revision = rev
		all = append(all, g)
		return err
	})
	return all, err
}

// Group reads a record, linearizably. Errors: NotFound.
func (c *Cluster) Group(ctx context.Context, name string) (meta.Group, error) {
	r, err := c.cli.Get(ctx, c.groupKey(name))
	if err != nil {
		return meta.Group{}, wrap("read group", name, err)
	}
	if len(r.Kvs) == 0 {
		return meta.Group{}, meta.E("read group", meta.NotFound, name, errors.New("there is no such group of snapshots"))
	}
	g, err := decode[meta.Group](r.Kvs[0].Key, r.Kvs[0].Value)
	g.Revision = r.Kvs[0].ModRevision
	return g, err
}

// PutGroup writes a record if the record has not changed since the caller read g.Revision
// (zero: the record must be absent). Errors: Again (the record has changed), Version.
func (c *Cluster) PutGroup(ctx context.Context, g meta.Group) (meta.Group, error) {
	const op = "write group"
	if g.Version != meta.GroupVersion {
		return g, meta.E(op, meta.Version, g.Name, fmt.Errorf("the record has version %d, this program writes %d", g.Version, meta.GroupVersion))
	}
	key, was := c.groupKey(g.Name), g.Revision
	g.Revision = 0
	t, err := c.cli.Txn(ctx).If(clientv3.Compare(clientv3.ModRevision(key), "=", was)).Then(clientv3.OpPut(key, encode(g))).Commit()
	if err != nil {
		return g, wrap(op, g.Name, err)
	}
	if !t.Succeeded {
		return g, meta.E(op, meta.Again, g.Name, errors.New("it was changed meanwhile"))
	}
	g.Revision = t.Header.Revision
	return g, nil
}

// DropGroup removes a record if the record has not changed since the caller read g.Revision.
// Errors: Again.
func (c *Cluster) DropGroup(ctx context.Context, g meta.Group) error {
	const op = "delete group"
	key := c.groupKey(g.Name)
	t, err := c.cli.Txn(ctx).If(clientv3.Compare(clientv3.ModRevision(key), "=", g.Revision)).Then(clientv3.OpDelete(key)).Commit()
	if err != nil {
		return wrap(op, g.Name, err)
	}
	if !t.Succeeded {
		return meta.E(op, meta.Again, g.Name, errors.New("it was changed meanwhile"))
	}
	return nil
}
