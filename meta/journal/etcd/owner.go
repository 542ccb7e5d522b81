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
}

// Owners takes volumes on one lease.
type Owners struct {
	cli   *clientv3.Client
	lease *Lease
	cfg   OwnersConfig
}

// NewOwners takes volumes for a meta server.
func NewOwners(cli *clientv3.Client, lease *Lease, cfg OwnersConfig) *Owners {
	if cfg.Dead == nil {
		cfg.Dead = func(o Owner) bool { return o.Process.Dead(cfg.Process) }
	}
	return &Owners{cli: cli, lease: lease, cfg: cfg}
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

	mu       sync.Mutex
	released bool
	lost     chan struct{}
}

// Acquire takes a volume now. Errors: NotOwner (another holds it: the subject
// is its address), Fenced (the process's lease is lost), Unavailable, NoSpace.
func (o *Owners) Acquire(ctx context.Context, v meta.VolumeID) (*Ownership, error) {
	subject := fmt.Sprintf("volume %d", v)
	k := keys{VolumePrefix(o.cfg.Prefix, v)}
	for {
		if o.lease.Left() == 0 {
			return nil, meta.E("own", meta.Fenced, subject, o.lease.Err())
		}
		r, err := o.cli.Txn(ctx).Then(clientv3.OpGet(k.owner()), clientv3.OpGet(k.term())).Commit()
		if err != nil {
			return nil, wrap("own", subject, err)
		}
		own := &Ownership{Volume: v, Term: 1, owners: o, keys: k, lost: make(chan struct{})}
		var ownerRev, termRev int64
		if kvs := r.Responses[1].GetResponseRange().Kvs; len(kvs) > 0 {
			if own.Previous, err = decodeOwner(k.term(), kvs[0].Value); err != nil {
				return nil, err
			}
			termRev = kvs[0].ModRevision
			own.Term = own.Previous.Term + 1
		}
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
		own.record = Owner{Version: ownerVersion, Term: own.Term, Server: o.cfg.Server, Addr: o.cfg.Addr, Process: o.cfg.Process}
		b, err := json.Marshal(own.record)
		if err != nil {
			panic("etcd: an owner record is plain data: " + err.Error())
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
		call, cancel := context.WithTimeout(ctx, acquireTimeout)
		t, err := o.cli.Txn(call).
			If(clientv3.Compare(clientv3.CreateRevision(k.owner()), "=", 0),
				clientv3.Compare(clientv3.ModRevision(k.term()), "=", termRev)).
			Then(clientv3.OpPut(k.owner(), string(b), clientv3.WithLease(o.lease.ID())),
				clientv3.OpPut(k.term(), string(b))).
			Commit()
		cancel()
		if err != nil {
			// If it was committed after all, the key is this process's own, at a
			// term nobody uses; the next Acquire must not wait for itself.
			return nil, errors.Join(wrap("own", subject, err), o.abandon(own))
		}
		if !t.Succeeded {
			continue // another was faster: look again
		}
		own.revision = t.Header.Revision
		go own.watch()
		return own, nil
	}
}

// abandon deletes the owner key that a transaction of unknown outcome may have
// made.
func (o *Owners) abandon(own *Ownership) error {
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	b, err := json.Marshal(own.record)
	if err != nil {
		panic("etcd: an owner record is plain data: " + err.Error())
	}
	_, err = o.cli.Txn(ctx).
		If(clientv3.Compare(clientv3.Value(own.keys.owner()), "=", string(b)),
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
	b, err := json.Marshal(rec)
	if err != nil {
		panic("etcd: an owner record is plain data: " + err.Error())
	}
	r, err := w.owners.cli.Txn(ctx).
		If(clientv3.Compare(clientv3.CreateRevision(w.keys.owner()), "=", w.revision)).
		Then(clientv3.OpDelete(w.keys.owner()), clientv3.OpPut(w.keys.term(), string(b))).
		Commit()
	if err != nil {
		return wrap("release", subject, err)
	}
	if !r.Succeeded {
		return meta.E("release", meta.Fenced, subject, nil)
	}
	return nil
}
