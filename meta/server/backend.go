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
	// Owners returns the Owners of the process's valid etcd lease, with a new lease if the
	// lease before was lost.
	Owners func(context.Context) (*etcd.Owners, error)
	// LeaseLeft returns how long the lease of Owners is still valid; nil: an hour.
	LeaseLeft func() time.Duration
	// Leave removes this process from the list of meta servers; nil if not listed.
	Leave  func(context.Context) error
	Shared *state.Shared
	Dir    string // stores lie in DIR/volume-%08x
	Blob   meta.Blob
	Logger *slog.Logger
	// Space frees the space left by etcd's compaction and clears etcd's alarm; nil if another
	// party maintains etcd.
	Space func(context.Context) error
	// Endpoints of etcd.
	Endpoints []string
}

var _ Cluster = (*Backend)(nil)

func (b *Backend) storeDir(v meta.VolumeID) string {
	return filepath.Join(b.Dir, fmt.Sprintf("volume-%08x", uint32(v)))
}

// Own takes the volume. If an earlier process with this server's name still holds the volume,
// Own waits until that process's hold ends.
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

// Expect prepares Own.
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

// Etcd asks etcd for its health.
func (b *Backend) Etcd(ctx context.Context) meta.EtcdHealth {
	return b.Cluster.Etcd(ctx, b.Endpoints)
}

// Standing returns the rest of the process's lease.
func (b *Backend) Standing() time.Duration {
	if b.LeaseLeft == nil {
		return time.Hour
	}
	return b.LeaseLeft()
}

// Unregister removes this process from the list of meta servers.
func (b *Backend) Unregister(ctx context.Context) error {
	if b.Leave == nil {
		return nil
	}
	return b.Leave(ctx)
}

// Follow returns the journal for a reader. The reader's pins end with the process's lease.
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

// OpenStore opens the store in its folder, or makes it again from the checkpoint. If the store
// is damaged, OpenStore first puts the folder aside; if the store is older than the
// checkpoint, OpenStore first deletes the folder.
func (b *Backend) OpenStore(ctx context.Context, v meta.VolumeID, cp journal.Checkpoint, have bool) (Store, error) {
	dir := b.storeDir(v)
	st, err := state.Open(dir, v, b.Shared)
	switch {
	case err == nil && have && st.Applied().Seq < cp.Seq:
		b.Logger.Info("the local state is older than the checkpoint: the checkpoint is loaded", "volume", v, "local", st.Applied().Seq, "checkpoint", cp.Seq)
		if err := st.Close(); err != nil {
			return nil, err
		}
		if err := os.RemoveAll(dir); err != nil {
			return nil, meta.E("open store", meta.IO, dir, err)
		}
	case err == nil:
		return store{st, b.Shared}, nil
	case errors.Is(err, meta.Corrupt):
		b.Logger.Error("the local state is damaged: the server puts it aside and builds it again", "volume", v, "error", err)
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

// BaseStore opens the store in its folder, or makes the store in a temporary folder and
// renames the folder when the store is complete.
func (b *Backend) BaseStore(ctx context.Context, v meta.VolumeID, from Store, cp journal.Checkpoint, replay func(Store) error) (Store, error) {
	dir := b.storeDir(v)
	st, err := state.Open(dir, v, b.Shared)
	if errors.Is(err, meta.Corrupt) {
		b.Logger.Error("the local state is damaged: the server puts it aside and builds it again", "volume", v, "error", err)
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

// replayed makes a store in dir from a checkpoint, and calls replay to bring it up to date.
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

// PutAsideStore renames the store's folder, with the suffix ".damaged-" and a time.
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
					// All keys of a kind, as a clone begins, or thousands of events. The entry
					// may have put some of these events: a scan would miss them.
					b.DeleteRange(e.Key, e.Value)
					continue
				}
				// A few replies. They are deleted singly, since after each new range
				// tombstone, Pebble's next read rebuilds all range tombstones of a memtable.
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
