package cluster

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"penstock.io/penstock/meta"
)

// watchFormat checks regularly that etcd still has this cluster, and no older copy: an
// operator may replace the etcd of this process's start by an empty or restored etcd, or by
// yesterday's backup. The state of this process belongs to the first etcd.
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

// sameFormat reads the format record, linearizably, and returns etcd's revision. last is a
// revision that etcd had before the call. Errors: Invalid (another etcd, or an older copy),
// Unavailable.
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

// whatNow tells the operator of a replaced etcd what to do.
const whatNow = "give it its newest data back, or let 'penstock cluster restore' make the cluster again (docs/operations.md, etcd is lost)"
