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

// recordKind is a kind of record: all whose keys begin so, or the one key.
type recordKind struct {
	key string
	// kept: checkpoints of the root volume hold records of this kind, in chunks
	// that any chunk server may have. Secrets never: they stay in etcd and in
	// the files of metadata servers' credentials.
	kept bool
}

// recordKinds has every kind that there is. What is not here, or is not kept,
// is in no checkpoint: a new kind has to be thought about.
var recordKinds = []recordKind{
	{"format", false},        // written last by who restores
	{"counters/", true},      //
	{"table/", true},         //
	{"names/", true},         //
	{"chunkservers/", false}, // who lives: on a lease
	{"metaservers/", false},  // who lives: on a lease
	{"nodes/", true},         //
	{"bearers/", true},       //
	{"deleted/", true},       //
	{"mirrors/", true},       //
	{"labels/", true},        //
	{"keyhold", false},       // that the newest capability key stays for now: on a lease
	{"capkeys", false},       // secret: who has them reads and writes every chunk
	{"restored/", true},      //
	{authorityKey, false},    // secret, sealed as it is: metadata servers keep a copy beside the key that opens it
	{"tokens/", false},       // of secrets; on leases
	{"members/", true},       //
	{"grants/", true},        //
	{"ended/", false},        // their revisions count, which are this etcd's
	{"groups/", false},       // one that was undecided in the checkpoint would have snapshots deleted that are whole since
	{"settings", true},       //
	{"volumes/", false},      // journals: each volume's checkpoints are its own
}

// kindOf finds a record's kind; ok is false for one that nobody knows.
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

// Records reads all records of the cluster that outlive processes, each page
// linearizably: what a new etcd is to be given if this one is lost whole. What
// hangs on a lease, the journals of volumes and secrets are left out, and what
// no row of recordKinds says.
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
				c.log.Warn("records of a kind that this program does not know are in no checkpoint", "key", key)
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
