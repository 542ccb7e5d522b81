package etcd

import (
	"context"
	"encoding/json"

	clientv3 "go.etcd.io/etcd/client/v3"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/journal"
)

// Restored is the beginning of a restored volume's journal.
type Restored struct {
	Volume meta.VolumeID
	// Term is above every term that was seen anywhere. The next owner's term is Term+1.
	Term meta.Term
	// Checkpoint and the journal's entry at its position, as stored. Without a checkpoint the
	// journal is empty, and so is the volume.
	Checkpoint *journal.Checkpoint
	Entry      []byte
	// Tail has the following entries, or the first entries of the journal.
	Tail []journal.Entry
}

// Restore writes the journal of a volume into an etcd that has no key of the volume.
func Restore(ctx context.Context, cli *clientv3.Client, clusterPrefix string, r Restored) error {
	const op = "restore journal"
	k := keys{VolumePrefix(clusterPrefix, r.Volume)}
	// No process answers for the volume: a surviving process has lost its lease with etcd.
	b, err := json.Marshal(Owner{Version: ownerVersion, Term: r.Term, Server: "restore", Released: true})
	if err != nil {
		panic("etcd: an owner record is plain data: " + err.Error())
	}
	ops := []clientv3.Op{clientv3.OpPut(k.term(), string(b))}
	if r.Checkpoint != nil {
		e, err := journal.Decode(r.Entry)
		if err != nil {
			return err
		}
		if e.Volume != r.Volume || e.Position() != r.Checkpoint.Position {
			return meta.E(op, meta.Corrupt, e.Position().String(), nil)
		}
		cp, err := journal.EncodeCheckpoint(*r.Checkpoint)
		if err != nil {
			return err
		}
		ops = append(ops, clientv3.OpPut(k.entry(e.Seq), string(r.Entry)), clientv3.OpPut(k.checkpoint(), string(cp)))
	}
	if _, err = cli.Txn(ctx).Then(ops...).Commit(); err != nil {
		return wrap(op, k.prefix, err)
	}
	for _, e := range r.Tail {
		b, err := journal.Encode(e)
		if err != nil {
			return err
		}
		// Large entries do not fit into one request together.
		if _, err := cli.Put(ctx, k.entry(e.Seq), string(b)); err != nil {
			return wrap(op, k.entry(e.Seq), err)
		}
	}
	return nil
}
