package cluster

import (
	"context"
	"fmt"
	"strconv"
	"strings"

	clientv3 "go.etcd.io/etcd/client/v3"

	"penstock.io/penstock/meta"
)

// labels is the record labels/<volume> of a volume with labels. The labels are not in the
// volume's row, since an older program would drop unknown fields whenever it writes the row.
type labels struct {
	Version int               `json:"v"`
	Volume  meta.VolumeID     `json:"volume"`
	Labels  map[string]string `json:"labels"`
}

func (c *Cluster) labelsKey(v meta.VolumeID) string {
	return fmt.Sprintf("%s/labels/%08x", c.prefix, uint32(v))
}

// putLabels writes the labels of a volume or, if there are none, removes the record.
func (c *Cluster) putLabels(v meta.VolumeID, l map[string]string) clientv3.Op {
	if len(l) == 0 {
		return clientv3.OpDelete(c.labelsKey(v))
	}
	return clientv3.OpPut(c.labelsKey(v), encode(labels{recordVersion, v, l}))
}

// decodeLabels reads the record of a volume. Errors: Corrupt, Version.
func (c *Cluster) decodeLabels(v meta.VolumeID, value []byte) (labels, error) {
	key := c.labelsKey(v)
	l, err := decode[labels]([]byte(key), value)
	if err == nil && l.Volume != v {
		err = meta.E("read cluster record", meta.Corrupt, key, fmt.Errorf("it is of volume %d", l.Volume))
	}
	if err != nil {
		return labels{}, err
	}
	return l, nil
}

// Labels are the labels of a volume. Err: the labels are unreadable (Corrupt, Version).
type Labels struct {
	Set map[string]string
	Err error
}

// Labels reads the labels of the volumes from first to last, linearizably, page by page. An
// unreadable record does not prevent reading the others.
func (c *Cluster) Labels(ctx context.Context, first, last meta.VolumeID) (map[meta.VolumeID]Labels, error) {
	all := map[meta.VolumeID]Labels{}
	err := c.span(ctx, c.labelsKey(first), c.labelsKey(last)+"\x00", func(key, value []byte, _ int64) error {
		id, err := strconv.ParseUint(string(key[strings.LastIndexByte(string(key), '/')+1:]), 16, 32)
		if err != nil {
			return meta.E("read cluster record", meta.Corrupt, string(key), err)
		}
		l, err := c.decodeLabels(meta.VolumeID(id), value)
		all[meta.VolumeID(id)] = Labels{l.Labels, err}
		return nil
	})
	return all, err
}

// ChangeLabels sets labels of a volume, or removes those with a nil value, by
// compare-and-swap. Errors: NoSuchVolume, ResourceExceeded.
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
			if have, err = c.decodeLabels(id, r.Kvs[0].Value); err != nil {
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
