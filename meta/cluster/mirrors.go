package cluster

import (
	"context"
	"errors"
	"fmt"

	clientv3 "go.etcd.io/etcd/client/v3"

	"penstock.io/penstock/meta"
)

func (c *Cluster) mirrorKey(target meta.VolumeID) string {
	return fmt.Sprintf("%s/mirrors/%08x", c.prefix, uint32(target))
}

// Mirrors lists the records of all mirrors, by target, linearizably.
func (c *Cluster) Mirrors(ctx context.Context) ([]meta.Mirror, error) {
	var all []meta.Mirror
	err := c.pages(ctx, c.prefix+"/mirrors/", func(key, value []byte, rev int64) error {
		m, err := decode[meta.Mirror](key, value)
		m.Revision = rev
		all = append(all, m)
		return err
	})
	return all, err
}

// Mirror reads the record of the mirror with this target. Errors: NotFound.
func (c *Cluster) Mirror(ctx context.Context, target meta.VolumeID) (meta.Mirror, error) {
	r, err := c.cli.Get(ctx, c.mirrorKey(target))
	if err != nil {
		return meta.Mirror{}, wrap("read mirror", fmt.Sprint(target), err)
	}
	if len(r.Kvs) == 0 {
		return meta.Mirror{}, meta.E("read mirror", meta.NotFound, fmt.Sprint(target), errors.New("the volume is no mirror's target"))
	}
	m, err := decode[meta.Mirror](r.Kvs[0].Key, r.Kvs[0].Value)
	m.Revision = r.Kvs[0].ModRevision
	return m, err
}

// PutMirror writes a record if the record has not changed since the caller read m.Revision
// (zero: the record must be absent), and the target is a volume. If the stored record already
// says the same, an earlier call whose answer was lost may have written it: PutMirror returns
// that record. Errors: Again (the record has changed), NoSuchVolume, Version.
func (c *Cluster) PutMirror(ctx context.Context, m meta.Mirror) (meta.Mirror, error) {
	const op = "write mirror"
	if m.Version != meta.MirrorVersion {
		return m, meta.E(op, meta.Version, fmt.Sprint(m.Target), fmt.Errorf("the record has version %d, this program writes %d", m.Version, meta.MirrorVersion))
	}
	key, was := c.mirrorKey(m.Target), m.Revision
	m.Revision = 0
	t, err := c.cli.Txn(ctx).If(clientv3.Compare(clientv3.ModRevision(key), "=", was), clientv3.Compare(clientv3.ModRevision(c.rowKey(m.Target)), ">", 0)).
		Then(clientv3.OpPut(key, encode(m))).Else(clientv3.OpGet(key)).Commit()
	if err != nil {
		return m, wrap(op, fmt.Sprint(m.Target), err)
	}
	if !t.Succeeded {
		if _, err := c.Volume(ctx, m.Target); err != nil {
			return m, err
		}
		for _, kv := range t.Responses[0].GetResponseRange().Kvs {
			if string(kv.Value) == encode(m) {
				m.Revision = kv.ModRevision
				return m, nil
			}
		}
		return m, meta.E(op, meta.Again, fmt.Sprint(m.Target), errors.New("it was changed meanwhile"))
	}
	m.Revision = t.Header.Revision
	return m, nil
}

// DropMirror removes a record. A missing record is not an error.
func (c *Cluster) DropMirror(ctx context.Context, target meta.VolumeID) error {
	_, err := c.cli.Delete(ctx, c.mirrorKey(target))
	return wrap("delete mirror", fmt.Sprint(target), err)
}
