package cluster

import (
	"context"
	"strings"

	clientv3 "go.etcd.io/etcd/client/v3"
)

// Record is one of the cluster's records; its key is without the cluster's prefix and slash.
type Record struct {
	Key   string
	Value []byte
}

// recordKind is a kind of record: all records with a prefix of the key, or the single record
// of a key.
type recordKind struct {
	key string
	// kept: checkpoints of the root volume contain records of this kind, in chunks on any
	// chunk server. Secrets are never kept: they stay in etcd and in the credentials of
	// metadata servers.
	kept bool
}

// recordKinds has every kind of record. A kind that is missing here, or not kept, is in no
// checkpoint: each new kind needs a decision.
var recordKinds = []recordKind{
	{"format", false},        // the restoration writes it last
	{"counters/", true},      //
	{"table/", true},         //
	{"names/", true},         //
	{"chunkservers/", false}, // running processes: under a lease
	{"metaservers/", false},  // running processes: under a lease
	{"nodes/", true},         //
	{"bearers/", true},       //
	{"gateways/", false},     // running processes: under a lease
	{"gatewaynames/", true},  // clients know a gateway by its number
	{"deleted/", true},       //
	{"mirrors/", true},       //
	{"labels/", true},        //
	{"keyhold", false},       // holds the newest capability key: under a lease
	{"capkeys", false},       // secret: the keys permit to read and write every chunk
	{"restored/", true},      //
	{authorityKey, false},    // secret, although encrypted: metadata servers keep a copy beside the key that decrypts it
	{"tokens/", false},       // of secrets; on leases
	{"members/", true},       //
	{"grants/", true},        //
	{"ended/", false},        // meaningful only by revisions of this etcd
	{"groups/", false},       // if it was undecided in the checkpoint, complete snapshots would be deleted
	{"settings", true},       //
	{"volumes/", false},      // journals: each volume has checkpoints of its own
}

// kindOf returns a record's kind; ok is false for an unknown one.
func kindOf(key string) (k recordKind, ok bool) {
	for _, k := range recordKinds {
		if key == k.key || strings.HasSuffix(k.key, "/") && strings.HasPrefix(key, k.key) {
			return k, true
		}
	}
	return recordKind{}, false
}

// keptRecord tells whether a checkpoint holds the record of a key.
func keptRecord(key string) bool {
	k, ok := kindOf(key)
	return ok && k.kept
}

// Records reads all records of the cluster that outlive processes, each page linearizably: the
// contents of a new etcd after the loss of this one. Records under leases, the journals of
// volumes, secrets and kinds missing in recordKinds are left out.
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
			k, known := kindOf(key)
			switch {
			case !known:
				c.log.Warn("records of a kind unknown to this program are in no checkpoint", "key", key)
			case k.kept && kv.Lease == 0:
				all = append(all, Record{key, kv.Value})
			case !k.kept && strings.HasSuffix(k.key, "/"):
				from = max(from, clientv3.GetPrefixRangeEnd(prefix+k.key)) // over the journals at once
			}
		}
		if !r.More {
			return all, nil
		}
	}
}
