package cluster

import (
	"context"
	"fmt"

	clientv3 "go.etcd.io/etcd/client/v3"

	"penstock.io/penstock/meta"
)

// labels are those of a volume that has any: the record labels/<volume>. They are
// not in the volume's row, since a program that does not know them would drop them
// whenever it writes that.
type labels struct {
	Version int               `json:"v"`
	Volume  meta.VolumeID     `json:"volume"`
	Labels  map[string]string `json:"labels"`
}

func (c *Cluster) labelsKey(v meta.VolumeID) string {
	return fmt.Sprintf("%s/labels/%08x", c.prefix, uint32(v))
}

// putLabels writes the record of a volume, or with none removes it.
func (c *Cluster) putLabels(v meta.VolumeID, l map[string]string) clientv3.Op {
	if len(l) == 0 {
		return clientv3.OpDelete(c.labelsKey(v))
	}
	return clientv3.OpPut(c.labelsKey(v), encode(labels{recordVersion, v, l}))
}

// Labels reads those of the volumes from first to last that have any, linearizably.
func (c *Cluster) Labels(ctx context.Context, first, last meta.VolumeID) (map[meta.VolumeID]map[string]string, error) {
	all := map[meta.VolumeID]map[string]string{}
	end := c.labelsKey(last) + "\x00"
	for from := c.labelsKey(first); ; {
		r, err := c.cli.Get(ctx, from, clientv3.WithRange(end), clientv3.WithLimit(page))
		if err != nil {
			return nil, wrap("read labels", fmt.Sprint(first), err)
		}
		for _, kv := range r.Kvs {
			l, err := decode[labels](kv.Key, kv.Value)
			if err != nil {
				return nil, err
			}
			all[l.Volume] = l.Labels
			from = string(kv.Key) + "\x00"
		}
		if !r.More {
			return all, nil
		}
	}
}

// ChangeLabels sets labels of a volume, or with nil removes them, by compare and
// swap. Errors: NoSuchVolume, ResourceExceeded.
func (c *Cluster) ChangeLabels(ctx context.Context, id meta.VolumeID, change map[string]*string) error {
	const op = "change labels"
	key := c.labelsKey(id)
	for {
		r, err := c.cli.Get(ctx, key)
		if err != nil {
			return wrap(op, fmt.Sprint(id), err)
		}
		var have labels
		rev := int64(0)
		if len(r.Kvs) > 0 {
			if have, err = decode[labels](r.Kvs[0].Key, r.Kvs[0].Value); err != nil {
				return err
			}
			rev = r.Kvs[0].ModRevision
		}
		now, err := meta.ChangeLabels(have.Labels, change)
		if err != nil {
			return err
		}
		t, err := c.cli.Txn(ctx).If(clientv3.Compare(clientv3.ModRevision(key), "=", rev), clientv3.Compare(clientv3.CreateRevision(c.rowKey(id)), ">", 0)).
			Then(c.putLabels(id, now)).Commit()
		if err != nil {
			return wrap(op, fmt.Sprint(id), err)
		}
		if t.Succeeded {
			return nil
		}
		if _, err := c.Volume(ctx, id); err != nil {
			return err
		}
	}
}
