package server

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"time"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/cluster"
	"penstock.io/penstock/meta/journal"
	"penstock.io/penstock/meta/journal/etcd"
	"penstock.io/penstock/meta/namespace"
	"penstock.io/penstock/meta/state"
)

// Backend is the Cluster of real servers: the table and the journals in etcd,
// the stores in folders.
type Backend struct {
	*cluster.Cluster
	// Owners gives who takes volumes on a lease that stands, a new one if the
	// one before was lost.
	Owners func(context.Context) (*etcd.Owners, error)
	// LeaseLeft is how long the lease of Owners stands; nil: for ever.
	LeaseLeft func() time.Duration
	// Leave takes this process off the list of meta servers; nil: it is on none.
	Leave  func(context.Context) error
	Shared *state.Shared
	Dir    string // stores lie in DIR/volume-%08x
	Blob   meta.Blob
	Logger *slog.Logger
	// Space frees what compaction left in etcd and clears its alarm; nil where
	// etcd is somebody else's to look after.
	Space func(context.Context) error
	// Endpoints of etcd.
	Endpoints []string
}

var _ Cluster = (*Backend)(nil)

func (b *Backend) storeDir(v meta.VolumeID) string {
	return filepath.Join(b.Dir, fmt.Sprintf("volume-%08x", uint32(v)))
}

// Own takes the volume. What still hangs on the lease of a process of this
// server's name before this one is waited for.
func (b *Backend) Own(ctx context.Context, v meta.VolumeID) (Ownership, Journal, error) {
	owners, err := b.Owners(ctx)
	if err != nil {
		return nil, nil, err
	}
	own, err := owners.Acquire(ctx, v)
	if errors.Is(err, meta.NotOwner) {
		last, _, herr := owners.Last(ctx, v)
		if herr != nil || last.Server != owners.Server() {
			return nil, nil, err
		}
		own, err = owners.Await(ctx, v)
	}
	if err != nil {
		return nil, nil, err
	}
	return owned{own, owners}, etcd.OpenLog(own), nil
}

// Expect readies Own.
func (b *Backend) Expect(ctx context.Context, v meta.VolumeID) error {
	owners, err := b.Owners(ctx)
	if err != nil {
		return err
	}
	return owners.Expect(ctx, v)
}

// Holder reads the owner's record.
func (b *Backend) Holder(ctx context.Context, v meta.VolumeID) (Holder, error) {
	owners, err := b.Owners(ctx)
	if err != nil {
		return Holder{}, err
	}
	rec, held, err := owners.Last(ctx, v)
	return Holder{Name: rec.Server, Addr: rec.Addr, Held: held, Released: rec.Version == 0 || rec.Released}, err
}

// Etcd asks etcd how it is.
func (b *Backend) Etcd(ctx context.Context) meta.EtcdHealth {
	return b.Cluster.Etcd(ctx, b.Endpoints)
}

// Standing is what is left of the process's lease.
func (b *Backend) Standing() time.Duration {
	if b.LeaseLeft == nil {
		return time.Hour
	}
	return b.LeaseLeft()
}

// Unregister takes this process off the list of meta servers.
func (b *Backend) Unregister(ctx context.Context) error {
	if b.Leave == nil {
		return nil
	}
	return b.Leave(ctx)
}

// Follow gives the journal to a reader, whose pins hang on the process' lease.
func (b *Backend) Follow(ctx context.Context, v meta.VolumeID) (Journal, error) {
	owners, err := b.Owners(ctx)
	if err != nil {
		return nil, err
	}
	return etcd.ReadLog(b.Client(), b.Prefix(), v, owners.Lease()), nil
}

type owned struct {
	*etcd.Ownership
	owners *etcd.Owners
}

func (o owned) Term() meta.Term     { return o.Ownership.Term }
func (o owned) Left() time.Duration { return o.owners.Lease().Left() }
func (o owned) PredecessorDone() bool {
	return o.Previous.Version == 0 || o.Previous.Released || o.PreviousDead
}

// OpenStore opens the store in its folder, or makes it again from the
// checkpoint. A store that is older than the checkpoint, or damaged, is put
// aside first, never overwritten.
func (b *Backend) OpenStore(ctx context.Context, v meta.VolumeID, cp journal.Checkpoint, have bool) (Store, error) {
	dir := b.storeDir(v)
	st, err := state.Open(dir, v, b.Shared)
	switch {
	case err == nil && have && st.Applied().Seq < cp.Seq:
		b.Logger.Info("the local state is older than the checkpoint: loading that", "volume", v, "local", st.Applied().Seq, "checkpoint", cp.Seq)
		if err := st.Close(); err != nil {
			return nil, err
		}
		if err := os.RemoveAll(dir); err != nil {
			return nil, meta.E("open store", meta.IO, dir, err)
		}
	case err == nil:
		return store{st, b.Shared}, nil
	case errors.Is(err, meta.Corrupt):
		b.Logger.Error("the local state is damaged: it is put aside and made again", "volume", v, "error", err)
		if err := b.PutAsideStore(v); err != nil {
			return nil, err
		}
	case errors.Is(err, meta.NotFound):
	default:
		return nil, err
	}
	if have {
		if cp, err = LoadManifest(ctx, b.Blob, cp); err != nil {
			return nil, err
		}
		err = state.Restore(dir, v, cp.Files, func(f journal.File) (io.ReadCloser, error) { return b.Blob.Get(ctx, f.Ref) })
		if err != nil {
			return nil, err
		}
		if st, err = state.Open(dir, v, b.Shared); err != nil {
			return nil, err
		}
		return store{st, b.Shared}, nil
	}
	if st, err = state.Create(dir, v, b.Shared); err != nil {
		return nil, err
	}
	return store{st, b.Shared}, nil
}

// BaseStore opens the store in its folder, or makes it beside that and puts it
// there when it is whole.
func (b *Backend) BaseStore(ctx context.Context, v meta.VolumeID, from Store, cp journal.Checkpoint, replay func(Store) error) (Store, error) {
	dir := b.storeDir(v)
	st, err := state.Open(dir, v, b.Shared)
	if errors.Is(err, meta.Corrupt) {
		b.Logger.Error("the local state is damaged: it is put aside and made again", "volume", v, "error", err)
		if err = b.PutAsideStore(v); err == nil {
			err = meta.E("open store", meta.NotFound, dir, nil)
		}
	}
	if !errors.Is(err, meta.NotFound) {
		if err != nil {
			return nil, err
		}
		return store{st, b.Shared}, nil
	}
	tmp := dir + ".base"
	if err := os.RemoveAll(tmp); err != nil {
		return nil, meta.E("clone store", meta.IO, tmp, err)
	}
	if from != nil {
		err = from.Copy(tmp)
	} else {
		err = b.replayed(ctx, tmp, v, cp, replay)
	}
	if err == nil {
		err = state.Rebase(tmp, v, b.Shared)
	}
	if err != nil {
		return nil, err
	}
	if err := state.Install(tmp, dir); err != nil {
		return nil, err
	}
	if st, err = state.Open(dir, v, b.Shared); err != nil {
		return nil, err
	}
	return store{st, b.Shared}, nil
}

// replayed makes a store in dir from a checkpoint and what replay applies to it.
func (b *Backend) replayed(ctx context.Context, dir string, v meta.VolumeID, cp journal.Checkpoint, replay func(Store) error) error {
	cp, err := LoadManifest(ctx, b.Blob, cp)
	if err == nil {
		err = state.Restore(dir, v, cp.Files, func(f journal.File) (io.ReadCloser, error) { return b.Blob.Get(ctx, f.Ref) })
	}
	if err != nil {
		return err
	}
	st, err := state.Open(dir, v, b.Shared)
	if err != nil {
		return err
	}
	return errors.Join(replay(store{st, b.Shared}), st.Close())
}

// PutAsideStore renames the folder to one that ends with .damaged and a time.
func (b *Backend) PutAsideStore(v meta.VolumeID) error {
	dir := b.storeDir(v)
	aside := fmt.Sprintf("%s.damaged-%d", dir, time.Now().UnixNano())
	if err := os.Rename(dir, aside); err != nil && !errors.Is(err, os.ErrNotExist) {
		return meta.E("put store aside", meta.IO, dir, err)
	}
	return nil
}

// DropStore removes the folder.
func (b *Backend) DropStore(v meta.VolumeID) error {
	if err := os.RemoveAll(b.storeDir(v)); err != nil {
		return meta.E("drop store", meta.IO, b.storeDir(v), err)
	}
	return nil
}

// Relieve frees space in etcd.
func (b *Backend) Relieve(ctx context.Context) error {
	if b.Space == nil {
		return nil
	}
	return b.Space(ctx)
}

// store adapts the Pebble store.
type store struct {
	*state.Store
	shared *state.Shared
}

func (s store) Apply(pos journal.Position, effects []namespace.Effect) error {
	return s.Store.Apply(pos, func(b state.Batch) error {
		for i := range effects {
			switch e := &effects[i]; e.Kind {
			case namespace.Put:
				b.Put(e.Key, e.Value)
			case namespace.Delete:
				b.Delete(e.Key)
			case namespace.DeleteRange:
				if len(e.Key) == 1 || e.Key[0] == namespace.EventPrefix {
					// All of a kind, as a clone begins, or thousands of events, of
					// which the entry itself may have put some.
					b.DeleteRange(e.Key, e.Value)
					continue
				}
				// Replies, a few: one by one, since Pebble builds all range
				// tombstones of a memtable anew for each read after a new one.
				var keys [][]byte
				if err := s.Store.Scan(e.Key, e.Value, func(k, _ []byte) bool {
					keys = append(keys, bytes.Clone(k))
					return true
				}); err != nil {
					return err
				}
				for _, k := range keys {
					b.Delete(k)
				}
			default:
				return meta.E("apply", meta.Corrupt, fmt.Sprintf("effect kind %d", e.Kind), nil)
			}
		}
		return nil
	})
}

func (s store) Freeze() Frozen { return s.Store.Freeze() }

func (s store) Snapshot(dir string) (journal.Position, []journal.File, error) {
	return s.Checkpoint(dir, s.shared)
}
