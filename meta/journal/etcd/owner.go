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

// Owner is the record of who owns, or last owned, a volume.
type Owner struct {
	Version int             `json:"v"` // 1
	Term    meta.Term       `json:"term"`
	Server  string          `json:"server"` // the meta server's name
	Addr    string          `json:"addr"`   // where clients reach it
	Process process.Process `json:"process"`
	// Released: the owner let the volume go in an orderly way, everything
	// answered is in the journal, and no session holds anything of it.
	Released bool `json:"released,omitempty"`
}

const ownerVersion = 1

// decodeOwner reads a record. The version is looked at first: a newer one may
// have changed all the rest.
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

// OwnersConfig says for whom volumes are taken.
type OwnersConfig struct {
	Prefix  string // of the cluster: /penstock/<cluster>
	Server  string
	Addr    string
	Process process.Process
	// Dead reports whether the holder of a volume surely runs no more, so that
	// its lease need not run out first. Nil asks Process.Dead.
	Dead func(Owner) bool
	// UnsafeNoFence lets a deposed owner append, for the run that proves its test.
	UnsafeNoFence bool
}

// Owners takes volumes on one lease.
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

// Lease is the lease that the ownerships hang on.
func (o *Owners) Lease() *Lease { return o.lease }

// Ownership is the right to journal for a volume.
type Ownership struct {
	Volume meta.VolumeID
	Term   meta.Term
	// Previous is who owned the volume before; Version is 0 if nobody did.
	// Unless it released the volume, or surely runs no more, its answers and
	// its sessions' leases may stand for their time (rule 2).
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

// Acquire takes a volume now. Errors: NotOwner (another holds it: the subject
// is its address), Fenced (the process's lease is lost), Unavailable, NoSpace.
func (o *Owners) Acquire(ctx context.Context, v meta.VolumeID) (*Ownership, error) {
	subject := fmt.Sprintf("volume %d", v)
	k := keys{VolumePrefix(o.cfg.Prefix, v)}
	if prev, ok := o.expectedOf(v); ok && o.lease.Left() > 0 {
		// Released as expected, the record is this one, to the byte.
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
		// A dead holder's key is deleted in a transaction of its own: the fence
		// is the key's create revision, which only a new key has.
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

// claim is an ownership that is still to be taken, after prev.
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
			// Nobody else can append from here on: this is the log's end.
			clientv3.OpGet(k.entry(0), clientv3.WithRange(k.afterEntries()), clientv3.WithLimit(1),
				clientv3.WithSort(clientv3.SortByKey, clientv3.SortDescend))).
		Commit()
	cancel()
	if err != nil {
		// If it was committed after all, the key is this process's own, at a
		// term nobody uses; the next Acquire must not wait for itself.
		return false, errors.Join(wrap("own", fmt.Sprintf("volume %d", own.Volume), err), o.abandon(own))
	}
	if !t.Succeeded {
		return false, nil
	}
	own.revision = t.Header.Revision
	if kvs := t.Responses[2].GetResponseRange().Kvs; len(kvs) > 0 {
		// What can't be decoded, a reading of the log explains.
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

// Expect notes who owns a volume now, which it is about to release: the next
// Acquire then needs one transaction and no reading. If it comes otherwise,
// Acquire is as without. Errors: those of Last.
func (o *Owners) Expect(ctx context.Context, v meta.VolumeID) error {
	last, held, err := o.Last(ctx, v)
	if err == nil && held {
		o.mu.Lock()
		o.expected[v] = last
		o.mu.Unlock()
	}
	return err
}

// expectedOf gives what Expect noted, once.
func (o *Owners) expectedOf(v meta.VolumeID) (Owner, bool) {
	o.mu.Lock()
	defer o.mu.Unlock()
	prev, ok := o.expected[v]
	delete(o.expected, v)
	return prev, ok
}

// abandon deletes the owner key that a transaction of unknown outcome may have
// made.
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

// Await acquires the volume as soon as its holder lets it go. Errors: those of
// Acquire but NotOwner, and ctx's.
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

// Server is for whom volumes are taken.
func (o *Owners) Server() string { return o.cfg.Server }

// Last tells who owns a volume (held), or owned it last; Version is 0 if nobody
// ever did. Errors: Unavailable, Corrupt, Version.
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

// Head is the last entry of the journal as of when the volume was taken; false:
// there was none, or it can't be read.
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

// Lost is closed when the volume may be owned no more: the lease was lost, or
// Release was called. That another took the volume while the lease stood is
// told by Append (Fenced).
func (w *Ownership) Lost() <-chan struct{} { return w.lost }

// Release hands the volume over: the next owner need not wait. The caller has
// journaled everything it answered. Errors: Fenced (it was lost before),
// Unavailable (the lease's end releases it).
func (w *Ownership) Release(ctx context.Context) error {
	rec := w.record
	rec.Released = true
	return w.giveBack(ctx, rec)
}

// Yield gives the volume back by an owner that never answered for it: one that
// could not open it. Whether the owner before released it, and whether that
// process lives, is as it was; a Release here would tell the next owner not to
// wait for the predecessor's leases. Errors: as Release.
func (w *Ownership) Yield(ctx context.Context) error {
	rec := w.Previous
	if rec.Version == 0 { // nobody ever answered for it
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
