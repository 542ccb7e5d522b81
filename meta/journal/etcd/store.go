package etcd

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"time"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/journal"
)

// callTimeout bounds one call of etcd; the log repeats the call as long as the log's caller
// waits.
const callTimeout = 5 * time.Second

// deleteBatch bounds the entries deleted by one transaction: each leaves a tombstone, and etcd
// applies a transaction while all other requests wait.
const deleteBatch = 512

// OpenLog gives the journal of an owned volume.
func OpenLog(own *Ownership) *journal.Journal {
	return journal.New(own.Volume, own.Store(), own.Lost())
}

// Store returns the journal's store under this ownership.
func (w *Ownership) Store() journal.Store {
	return &store{cli: w.owners.cli, keys: w.keys, owner: w.revision, unfenced: w.owners.cfg.UnsafeNoFence, lease: w.owners.lease, volume: w.Volume}
}

// ReadLog returns the journal of a volume for a reader. The reader's pins depend on lease; a
// reader without pins passes nil.
func ReadLog(cli *clientv3.Client, clusterPrefix string, v meta.VolumeID, lease *Lease) *journal.Journal {
	return journal.New(v, ReadStore(cli, clusterPrefix, v, lease), nil)
}

// ReadStore is the journal's store for a reader.
func ReadStore(cli *clientv3.Client, clusterPrefix string, v meta.VolumeID, lease *Lease) journal.Store {
	return &store{cli: cli, keys: keys{VolumePrefix(clusterPrefix, v)}, owner: -1, lease: lease, volume: v}
}

// store keeps a log in etcd. owner is the create revision of the owner key; unfenced: writes do
// not compare owner (OwnersConfig.UnsafeNoFence).
type store struct {
	cli      *clientv3.Client
	keys     keys
	owner    int64
	unfenced bool
	lease    *Lease
	volume   meta.VolumeID
}

func (s *store) wrap(op string, err error) error {
	return wrap(op, fmt.Sprintf("volume %d", s.volume), err)
}

func (s *store) owned() clientv3.Cmp {
	if s.unfenced {
		return clientv3.Compare(clientv3.CreateRevision(s.keys.owner()), "!=", -1)
	}
	return clientv3.Compare(clientv3.CreateRevision(s.keys.owner()), "=", s.owner)
}

func (s *store) Commit(ctx context.Context, seq meta.Seq, value []byte) (bool, error) {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	before := clientv3.Compare(clientv3.CreateRevision(s.keys.entry(seq-1)), ">", 0)
	if seq == 1 {
		before = clientv3.Compare(clientv3.CreateRevision(s.keys.checkpoint()), "=", 0)
	}
	key := s.keys.entry(seq)
	r, err := s.cli.Txn(ctx).
		If(s.owned(), before, clientv3.Compare(clientv3.CreateRevision(key), "=", 0)).
		Then(clientv3.OpPut(key, string(value))).
		Commit()
	if err != nil {
		return false, s.wrap("append to journal", err)
	}
	return r.Succeeded, nil
}

func (s *store) Inspect(ctx context.Context, seq meta.Seq) (journal.Inspection, error) {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	r, err := s.cli.Txn(ctx).Then(
		clientv3.OpGet(s.keys.owner(), clientv3.WithKeysOnly()),
		clientv3.OpGet(s.keys.entry(seq)),
		clientv3.OpGet(s.keys.entry(seq-1), clientv3.WithKeysOnly()),
	).Commit()
	if err != nil {
		return journal.Inspection{}, s.wrap("read journal", err)
	}
	var in journal.Inspection
	if kvs := r.Responses[0].GetResponseRange().Kvs; len(kvs) > 0 {
		in.Owned = kvs[0].CreateRevision == s.owner
	}
	if kvs := r.Responses[1].GetResponseRange().Kvs; len(kvs) > 0 {
		in.Value = kvs[0].Value
	}
	in.Prev = len(r.Responses[2].GetResponseRange().Kvs) > 0
	return in, nil
}

func (s *store) Range(ctx context.Context, from meta.Seq, limit int) ([]journal.Record, error) {
	return s.entries(ctx, s.keys.entry(from), clientv3.WithLimit(int64(limit)))
}

func (s *store) Last(ctx context.Context) (journal.Record, error) {
	recs, err := s.entries(ctx, s.keys.entry(0), clientv3.WithLimit(1),
		clientv3.WithSort(clientv3.SortByKey, clientv3.SortDescend))
	if err != nil || len(recs) == 0 {
		return journal.Record{}, err
	}
	return recs[0], nil
}

func (s *store) entries(ctx context.Context, from string, opts ...clientv3.OpOption) ([]journal.Record, error) {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	r, err := s.cli.Get(ctx, from, append(opts, clientv3.WithRange(s.keys.afterEntries()))...)
	if err != nil {
		return nil, s.wrap("read journal", err)
	}
	recs := make([]journal.Record, 0, len(r.Kvs))
	for _, kv := range r.Kvs {
		seq, err := s.keys.seq(kv.Key)
		if err != nil {
			return nil, err
		}
		recs = append(recs, journal.Record{Seq: seq, Value: kv.Value})
	}
	return recs, nil
}

func (s *store) Checkpoint(ctx context.Context) ([]byte, int64, error) {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	r, err := s.cli.Get(ctx, s.keys.checkpoint())
	if err != nil {
		return nil, 0, s.wrap("read checkpoint", err)
	}
	if len(r.Kvs) == 0 {
		return nil, 0, nil
	}
	return r.Kvs[0].Value, r.Kvs[0].ModRevision, nil
}

func (s *store) PutCheckpoint(ctx context.Context, rev int64, value []byte) (bool, error) {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	r, err := s.cli.Txn(ctx).
		If(s.owned(), clientv3.Compare(clientv3.ModRevision(s.keys.checkpoint()), "=", rev)).
		Then(clientv3.OpPut(s.keys.checkpoint(), string(value))).
		Commit()
	if err != nil {
		return false, s.wrap("record checkpoint", err)
	}
	return r.Succeeded, nil
}

// DeleteBefore deletes in batches and makes etcd forget the old revisions. The database then
// reuses the space; the database file need not shrink.
func (s *store) DeleteBefore(ctx context.Context, before meta.Seq) error {
	var revision int64
	for {
		first, err := s.entries(ctx, s.keys.entry(0), clientv3.WithLimit(1), clientv3.WithKeysOnly())
		if err != nil {
			return err
		}
		if len(first) == 0 || first[0].Seq >= before {
			break
		}
		end := min(first[0].Seq+deleteBatch, before)
		call, cancel := context.WithTimeout(ctx, callTimeout)
		r, err := s.cli.Delete(call, s.keys.entry(first[0].Seq), clientv3.WithRange(s.keys.entry(end)))
		cancel()
		if err != nil {
			return s.wrap("trim journal", err)
		}
		revision = r.Header.Revision
	}
	if revision == 0 {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	_, err := s.cli.Compact(ctx, revision)
	if errors.Is(err, rpctypes.ErrCompacted) {
		return nil // another volume's owner was faster
	}
	return s.wrap("compact journal", err)
}

func (s *store) Pin(ctx context.Context, seq meta.Seq) (func(context.Context) error, error) {
	if s.lease == nil {
		return nil, meta.E("pin checkpoint", meta.Invalid, "", errors.New("this reader has no lease"))
	}
	key := fmt.Sprintf("%s%016x", s.keys.pins(), uint64(s.lease.ID()))
	var b [8]byte
	binary.BigEndian.PutUint64(b[:], uint64(seq))
	call, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	if _, err := s.cli.Put(call, key, string(b[:]), clientv3.WithLease(s.lease.ID())); err != nil {
		return nil, s.wrap("pin checkpoint", err)
	}
	return func(ctx context.Context) error {
		ctx, cancel := context.WithTimeout(ctx, callTimeout)
		defer cancel()
		_, err := s.cli.Delete(ctx, key)
		return s.wrap("unpin checkpoint", err)
	}, nil
}

func (s *store) OldestPin(ctx context.Context) (seq meta.Seq, ok bool, err error) {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	r, err := s.cli.Get(ctx, s.keys.pins(), clientv3.WithPrefix())
	if err != nil {
		return 0, false, s.wrap("read pins", err)
	}
	for _, kv := range r.Kvs {
		if len(kv.Value) != 8 {
			return 0, false, meta.E("read pins", meta.Corrupt, string(kv.Key), nil)
		}
		if p := meta.Seq(binary.BigEndian.Uint64(kv.Value)); !ok || p < seq {
			seq, ok = p, true
		}
	}
	return seq, ok, nil
}

func (s *store) Hint(ctx context.Context) <-chan struct{} {
	return watchHint(ctx, s.cli, s.keys.entry(0), s.keys.afterEntries())
}

// watchHint returns a channel that receives when a key in [key, end) may have changed; an empty
// end means the key alone. The channel is closed when ctx ends. etcd ends a watch whose
// revision was compacted; then watchHint begins another watch and sends a hint, because the
// ended watch may have missed a change.
func watchHint(ctx context.Context, cli *clientv3.Client, key, end string) <-chan struct{} {
	opts := []clientv3.OpOption{clientv3.WithKeysOnly()}
	if end != "" {
		opts = append(opts, clientv3.WithRange(end))
	}
	hint := make(chan struct{}, 1)
	tell := func() {
		select {
		case hint <- struct{}{}:
		default:
		}
	}
	w := cli.Watch(ctx, key, opts...) // from when the caller has the channel on
	go func() {
		defer close(hint)
		for {
			select {
			case <-ctx.Done(): // not only when etcd's client closes w: see cluster.watch
				return
			case _, ok := <-w:
				if ok {
					tell()
					continue
				}
			}
			select {
			case <-ctx.Done():
				return
			case <-time.After(watchPause):
			}
			w = cli.Watch(ctx, key, opts...)
			tell()
		}
	}()
	return hint
}

// watchPause is the pause between the end of a watch and the next one.
const watchPause = 100 * time.Millisecond
