package cluster

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"penstock.io/penstock/meta"
)

// watchFormat looks, now and then, whether etcd still holds this cluster, and no older copy
// of it: somebody may put an empty etcd, a restored one, or yesterday's backup in the place
// of the one that this process began with. What this process knows is of that one.
func (c *Cluster) watchFormat(ctx context.Context, replaced func(error)) {
	every := time.NewTicker(refresh)
	defer every.Stop()
	for last := int64(0); ; {
		call, cancel := context.WithTimeout(ctx, refresh)
		rev, err := c.sameFormat(call, last)
		cancel()
		if errors.Is(err, meta.Invalid) {
			replaced(err)
			return
		}
		last = max(last, rev)
		select {
		case <-ctx.Done():
			return
		case <-every.C:
		}
	}
}

// sameFormat reads the format record, linearizably, and gives etcd's revision. last is one
// that etcd had before the call. Errors: Invalid (another etcd, or an older copy), Unavailable.
func (c *Cluster) sameFormat(ctx context.Context, last int64) (rev int64, err error) {
	const op = "look at etcd"
	key := c.prefix + "/format"
	r, err := c.cli.Get(ctx, key)
	if err != nil {
		return 0, wrap(op, key, err)
	}
	var f Format
	if len(r.Kvs) > 0 && json.Unmarshal(r.Kvs[0].Value, &f) != nil {
		return 0, meta.E(op, meta.Corrupt, key, nil)
	}
	switch {
	case len(r.Kvs) == 0:
		err = fmt.Errorf("it held cluster %s, and is empty now: %s", c.format.ID, whatNow)
	case f.ID != c.format.ID:
		err = fmt.Errorf("it held cluster %s, and holds cluster %s now: %s", c.format.ID, f.ID, whatNow)
	case f.Restored != c.format.Restored:
		err = errors.New("the cluster was restored meanwhile: start this server again")
	case r.Header.Revision < last:
		err = fmt.Errorf("it was set back from revision %d to %d: an older copy took its place; %s", last, r.Header.Revision, whatNow)
	}
	if err != nil {
		return 0, meta.E(op, meta.Invalid, key, err)
	}
	return r.Header.Revision, nil
}

// whatNow is what an operator whose etcd is not what it was has to do.
const whatNow = "give it its newest data back, or let 'penstock cluster restore' make the cluster again (docs/operations.md, etcd is lost)"
