package etcd

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"sync"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/journal"
	"penstock.io/penstock/meta/process"
)

// Owner is the record of the present or last owner of a volume.
type Owner struct {
	Version int             `json:"v"` // 1
	Term    meta.Term       `json:"term"`
	Server  string          `json:"server"` // the meta server's name
	Addr    string          `json:"addr"`   // address for clients
	Process process.Process `json:"process"`
	// Released: the owner released the volume in an orderly way. All answers of the owner are
	// in the journal, and no session holds anything of the volume.
	Released bool `json:"released,omitempty"`
}

const ownerVersion = 1

// decodeOwner decodes a record. The version is checked first: a newer version may have changed
// everything else.
func decodeOwner(key string, b []byte) (Owner, error) {
	var head struct {
		Version int `json:"v"`
	}
	if err := json.Unmarshal(b, &head); err != nil || head.Version < 1 {
		return Owner{}, meta.E("read owner", meta.Corrupt, key, err)
	}
	if head.Version > ownerVersion {
		return Owner{}, meta.E("read owner", meta.Version, key, fmt.Errorf("record has format %d, this program knows up to %d", head.Version, ownerVersion))
	}
	var o Owner
	if err := json.Unmarshal(b, &o); err != nil {
		return Owner{}, meta.E("read owner", meta.Corrupt, key, err)
	}
	return o, nil
}

// OwnersConfig describes the process that takes volumes.
type OwnersConfig struct {
	Prefix  string // of the cluster: /penstock/<cluster>
	Server  string
	Addr    string
	Process process.Process
	// Dead reports whether the process of a volume's holder has surely ended, so that nobody
	// needs to wait for the end of the holder's lease. Nil: Process.Dead.
	Dead func(Owner) bool
	// UnsafeNoFence lets a deposed owner append (positive control).
	UnsafeNoFence bool
}

// Owners takes volumes under one lease.
type Owners struct {
	cli   *clientv3.Client
	lease *Lease
	cfg   OwnersConfig

	mu       sync.Mutex
	expected map[meta.VolumeID]Owner // see Expect
}

// NewOwners takes volumes for a meta server.
func NewOwners(cli *clientv3.Client, lease *Lease, cfg OwnersConfig) *Owners {
	if cfg.Dead == nil {
		cfg.Dead = func(o Owner) bool { return o.Process.Dead(cfg.Process) }
	}
	return &Owners{cli: cli, lease: lease, cfg: cfg, expected: map[meta.VolumeID]Owner{}}
}

// Lease returns the lease of the ownerships.
func (o *Owners) Lease() *Lease { return o.lease }

// Ownership is the right to journal for a volume.
type Ownership struct {
	Volume meta.VolumeID
	Term   meta.Term
	// Previous is the previous owner of the volume; Version is 0 without a previous owner.
	// Unless the previous owner released the volume, or has surely ended, the owner's answers
	// and the leases of the owner's sessions may still be valid (rule 2).
	Previous Owner
	// PreviousDead: the holder surely runs no more, as Dead told.
	PreviousDead bool

	owners   *Owners
	keys     keys
	revision int64 // create revision of the owner key
	record   Owner
	head     journal.Position
	headOK   bool

	mu       sync.Mutex
	released bool
	lost     chan struct{}
}

// Acquire takes a volume now. Errors: NotOwner (another server holds the volume: the subject is
// the server's address), Fenced (the process's lease is lost), Unavailable, NoSpace.
func (o *Owners) Acquire(ctx context.Context, v meta.VolumeID) (*Ownership, error) {
	subject := fmt.Sprintf("volume %d", v)
	k := keys{VolumePrefix(o.cfg.Prefix, v)}
	if prev, ok := o.expectedOf(v); ok && o.lease.Left() > 0 {
		// If the owner released the volume as expected, the record has exactly these bytes.
		prev.Released = true
		own := o.claim(v, k, prev)
		done, err := o.take(ctx, own, clientv3.Compare(clientv3.Value(k.term()), "=", string(marshal(prev))))
		switch {
		case err != nil:
			return nil, err
		case done:
			return own, nil
		}
	}
	for {
		if o.lease.Left() == 0 {
			return nil, meta.E("own", meta.Fenced, subject, o.lease.Err())
		}
		r, err := o.cli.Txn(ctx).Then(clientv3.OpGet(k.owner()), clientv3.OpGet(k.term())).Commit()
		if err != nil {
			return nil, wrap("own", subject, err)
		}
		var previous Owner
		var ownerRev, termRev int64
		if kvs := r.Responses[1].GetResponseRange().Kvs; len(kvs) > 0 {
			if previous, err = decodeOwner(k.term(), kvs[0].Value); err != nil {
				return nil, err
			}
			termRev = kvs[0].ModRevision
		}
		own := o.claim(v, k, previous)
		if kvs := r.Responses[0].GetResponseRange().Kvs; len(kvs) > 0 {
			holder, err := decodeOwner(k.owner(), kvs[0].Value)
			if err != nil {
				return nil, err
			}
			if !o.cfg.Dead(holder) {
				return nil, meta.E("own", meta.NotOwner, holder.Addr, fmt.Errorf("%s is owned by %s at term %d", subject, holder.Server, holder.Term))
			}
			ownerRev, own.PreviousDead = kvs[0].ModRevision, true
		} else if own.Previous.Version > 0 && o.cfg.Dead(own.Previous) {
			own.PreviousDead = true
		}
		// A separate transaction deletes the key of a dead holder: the fence is the key's
		// create revision, which only a new key has.
		if ownerRev != 0 {
			_, err := o.cli.Txn(ctx).
				If(clientv3.Compare(clientv3.ModRevision(k.owner()), "=", ownerRev)).
				Then(clientv3.OpDelete(k.owner())).Commit()
			if err != nil {
				return nil, wrap("own", subject, err)
			}
		}
		done, err := o.take(ctx, own, clientv3.Compare(clientv3.ModRevision(k.term()), "=", termRev))
		switch {
		case err != nil:
			return nil, err
		case done:
			return own, nil
		}
		// Another was faster: look again.
	}
}

// claim makes an ownership that is still to be taken, after prev.
func (o *Owners) claim(v meta.VolumeID, k keys, prev Owner) *Ownership {
	return &Ownership{
		Volume: v, Term: prev.Term + 1, Previous: prev, owners: o, keys: k, lost: make(chan struct{}),
		record: Owner{Version: ownerVersion, Term: prev.Term + 1, Server: o.cfg.Server, Addr: o.cfg.Addr, Process: o.cfg.Process},
	}
}

// take tries to make own the owner if nobody is, and the term key is as said.
func (o *Owners) take(ctx context.Context, own *Ownership, term clientv3.Cmp) (bool, error) {
	b, k := string(marshal(own.record)), own.keys
	call, cancel := context.WithTimeout(ctx, acquireTimeout)
	t, err := o.cli.Txn(call).
		If(clientv3.Compare(clientv3.CreateRevision(k.owner()), "=", 0), term).
		Then(clientv3.OpPut(k.owner(), b, clientv3.WithLease(o.lease.ID())),
			clientv3.OpPut(k.term(), b),
			// From now on no other server can append: the last entry is the log's end.
			clientv3.OpGet(k.entry(0), clientv3.WithRange(k.afterEntries()), clientv3.WithLimit(1),
				clientv3.WithSort(clientv3.SortByKey, clientv3.SortDescend))).
		Commit()
	cancel()
	if err != nil {
		// If the transaction was committed after all, the key belongs to the present process,
		// at an unused term; the next Acquire must not wait for the key.
		return false, errors.Join(wrap("own", fmt.Sprintf("volume %d", own.Volume), err), o.abandon(own))
	}
	if !t.Succeeded {
		return false, nil
	}
	own.revision = t.Header.Revision
	if kvs := t.Responses[2].GetResponseRange().Kvs; len(kvs) > 0 {
		// If the entry can't be decoded, reading the log reports why.
		if e, err := journal.Decode(kvs[0].Value); err == nil && e.Volume == own.Volume {
			own.head, own.headOK = e.Position(), true
		}
	}
	go own.watch()
	return true, nil
}

// marshal gives a record's bytes.
func marshal(rec Owner) []byte {
	b, err := json.Marshal(rec)
	if err != nil {
		panic("etcd: an owner record is plain data: " + err.Error())
	}
	return b
}

// Expect notes the present owner of a volume, which is about to release the volume: the next
// Acquire then needs one transaction and no read. After a wrong expectation Acquire works as
// without Expect. Errors: the errors of Last.
func (o *Owners) Expect(ctx context.Context, v meta.VolumeID) error {
	last, held, err := o.Last(ctx, v)
	if err == nil && held {
		o.mu.Lock()
		o.expected[v] = last
		o.mu.Unlock()
	}
	return err
}

// expectedOf returns the note of Expect, once.
func (o *Owners) expectedOf(v meta.VolumeID) (Owner, bool) {
	o.mu.Lock()
	defer o.mu.Unlock()
	prev, ok := o.expected[v]
	delete(o.expected, v)
	return prev, ok
}

// abandon deletes the owner key that a transaction of unknown outcome may have made.
func (o *Owners) abandon(own *Ownership) error {
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	_, err := o.cli.Txn(ctx).
		If(clientv3.Compare(clientv3.Value(own.keys.owner()), "=", string(marshal(own.record))),
			clientv3.Compare(clientv3.LeaseValue(own.keys.owner()), "=", o.lease.ID())).
		Then(clientv3.OpDelete(own.keys.owner())).Commit()
	return err
}

// acquireTimeout bounds the taking of a volume; the caller tries again.
const acquireTimeout = 2 * time.Second

// Await acquires the volume as soon as the holder releases the volume. Errors: the errors of
// Acquire except NotOwner, and ctx's.
func (o *Owners) Await(ctx context.Context, v meta.VolumeID) (*Ownership, error) {
	k := keys{VolumePrefix(o.cfg.Prefix, v)}
	hint := watchHint(ctx, o.cli, k.owner(), "")
	poll := time.NewTicker(200 * time.Millisecond)
	defer poll.Stop()
	for {
		own, err := o.Acquire(ctx, v)
		if meta.KindOf(err) != meta.NotOwner {
			return own, err
		}
		select {
		case <-ctx.Done():
			return nil, meta.E("own", meta.Canceled, fmt.Sprintf("volume %d", v), context.Cause(ctx))
		case _, ok := <-hint:
			if !ok {
				hint = nil
			}
		case <-poll.C:
		}
	}
}

// Server returns the name of the server that takes volumes.
func (o *Owners) Server() string { return o.cfg.Server }

// Last returns the present owner of a volume (held), or the last owner; Version is 0 if the
// volume never had an owner. Errors: Unavailable, Corrupt, Version.
func (o *Owners) Last(ctx context.Context, v meta.VolumeID) (last Owner, held bool, err error) {
	k := keys{VolumePrefix(o.cfg.Prefix, v)}
	subject := fmt.Sprintf("volume %d", v)
	r, err := o.cli.Txn(ctx).Then(clientv3.OpGet(k.owner()), clientv3.OpGet(k.term())).Commit()
	if err != nil {
		return Owner{}, false, wrap("find owner", subject, err)
	}
	for i, key := range []string{k.owner(), k.term()} {
		if kvs := r.Responses[i].GetResponseRange().Kvs; len(kvs) > 0 {
			last, err = decodeOwner(key, kvs[0].Value)
			return last, i == 0, err
		}
	}
	return Owner{}, false, nil
}

// Head returns the last entry of the journal at the time of the acquisition; false: the journal
// was empty, or the entry unreadable.
func (w *Ownership) Head() (journal.Position, bool) { return w.head, w.headOK }

// watch ends the ownership with the lease.
func (w *Ownership) watch() {
	select {
	case <-w.owners.lease.Lost():
		w.end()
	case <-w.lost:
	}
}

func (w *Ownership) end() (first bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.released {
		return false
	}
	w.released = true
	close(w.lost)
	return true
}

// Lost is closed when the volume must no longer be owned: the lease was lost, or Release was
// called. If another server took the volume under a valid lease, Append returns Fenced.
func (w *Ownership) Lost() <-chan struct{} { return w.lost }

// Release hands the volume over: the next owner need not wait. The caller has journaled all of
// its answers. Errors: Fenced (the ownership was lost before), Unavailable (the end of the
// lease releases the volume).
func (w *Ownership) Release(ctx context.Context) error {
	rec := w.record
	rec.Released = true
	return w.giveBack(ctx, rec)
}

// Yield returns a volume that the owner could not open, and so never answered for. The record
// of the previous owner stays as before, with the facts whether the previous owner released the
// volume and whether the owner's process runs. Release would tell the next owner not to wait
// for the predecessor's leases. Errors: as Release.
func (w *Ownership) Yield(ctx context.Context) error {
	rec := w.Previous
	if rec.Version == 0 { // no owner ever answered for the volume
		rec = w.record
		rec.Released = true
	}
	rec.Term = w.Term
	return w.giveBack(ctx, rec)
}

// giveBack deletes the owner key and leaves rec as the last owner's record.
func (w *Ownership) giveBack(ctx context.Context, rec Owner) error {
	subject := fmt.Sprintf("volume %d", w.Volume)
	if !w.end() {
		return meta.E("release", meta.Fenced, subject, nil)
	}
	r, err := w.owners.cli.Txn(ctx).
		If(clientv3.Compare(clientv3.CreateRevision(w.keys.owner()), "=", w.revision)).
		Then(clientv3.OpDelete(w.keys.owner()), clientv3.OpPut(w.keys.term(), string(marshal(rec)))).
		Commit()
	if err != nil {
		return wrap("release", subject, err)
	}
	if !r.Succeeded {
		return meta.E("release", meta.Fenced, subject, nil)
	}
	return nil
}
