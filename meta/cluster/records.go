package cluster

import (
	"context"
	"strings"

	clientv3 "go.etcd.io/etcd/client/v3"
)

// Record is one of the cluster's records, its key without the cluster's prefix
// and slash.
type Record struct {
	Key   string
	Value []byte
}

// notKept are records that Records leaves out: a volume's are in its own
// checkpoints, and secrets are not written into chunks.
var notKept = []string{"volumes/", "capkeys", "secrets/"}

// Records reads all records of the cluster that outlive processes, each page
// linearizably: what a new etcd is to be given if this one is lost whole. What
// hangs on a lease, the journals of volumes and secrets are left out.
func (c *Cluster) Records(ctx context.Context) ([]Record, error) {
	var all []Record
	prefix := c.prefix + "/"
	end := clientv3.GetPrefixRangeEnd(prefix)
	for from := prefix; ; {
		r, err := c.cli.Get(ctx, from, clientv3.WithRange(end), clientv3.WithLimit(page))
		if err != nil {
			return nil, wrap("read cluster", prefix, err)
		}
		for _, kv := range r.Kvs {
			key := strings.TrimPrefix(string(kv.Key), prefix)
			from = string(kv.Key) + "\x00"
			left := kv.Lease != 0
			for _, p := range notKept {
				if strings.HasPrefix(key, p) {
					left = true
					from = max(from, clientv3.GetPrefixRangeEnd(prefix+p)) // over the journals at once
				}
			}
			if !left {
				all = append(all, Record{key, kv.Value})
			}
		}
		if !r.More {
			return all, nil
		}
	}
}
