package cluster

import (
	"context"
	"fmt"
	"slices"

	clientv3 "go.etcd.io/etcd/client/v3"

	"penstock.io/penstock/meta"
)

// Deleted records that a volume is gone, and lists the chunk servers that may still have
// chunks of the volume: all servers not seen without such chunks since. Ids of volumes are
// never reused, so the record proves that nothing refers to the chunks.
type Deleted struct {
	Version int             `json:"v"`
	Volume  meta.VolumeID   `json:"volume"`
	On      []meta.ServerID `json:"on"`
}

func (c *Cluster) deletedKey(v meta.VolumeID) string {
	return fmt.Sprintf("%s/deleted/%08x", c.prefix, uint32(v))
}

// DeletedVolumes lists the deleted volumes of which some server may still have
// chunks, linearizably.
func (c *Cluster) DeletedVolumes(ctx context.Context) ([]Deleted, error) {
	return list[Deleted](ctx, c, "/deleted/")
}

// SweptVolume notes that a server has no chunk of a deleted volume any more. After the last
// server, the record is removed.
func (c *Cluster) SweptVolume(ctx context.Context, v meta.VolumeID, server meta.ServerID) error {
	const op = "note deleted volume"
	key := c.deletedKey(v)
	for {
		r, err := c.cli.Get(ctx, key)
		if err != nil {
			return wrap(op, fmt.Sprint(v), err)
		}
		if len(r.Kvs) == 0 {
			return nil
		}
		d, err := decode[Deleted](r.Kvs[0].Key, r.Kvs[0].Value)
		if err != nil {
			return err
		}
		d.On = slices.DeleteFunc(d.On, func(id meta.ServerID) bool { return id == server })
		then := clientv3.OpPut(key, encode(d))
		if len(d.On) == 0 {
			then = clientv3.OpDelete(key)
		}
		t, err := c.cli.Txn(ctx).If(clientv3.Compare(clientv3.ModRevision(key), "=", r.Kvs[0].ModRevision)).Then(then).Commit()
		if err != nil {
			return wrap(op, fmt.Sprint(v), err)
		}
		if t.Succeeded {
			return nil
		}
	}
}
