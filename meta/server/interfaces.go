package server

import (
	"context"
	"time"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/cluster"
	"penstock.io/penstock/meta/journal"
	"penstock.io/penstock/meta/namespace"
)

// Journal is the log of one volume, as its owner sees it.
type Journal = journal.Log

// Store is the local copy of a volume's state, not synced by itself: the
// journal makes it durable.
type Store interface {
	namespace.Reader
	// Applied is the last entry whose effects the store has.
	Applied() journal.Position
	// Apply adds the effects of the entry that ends at pos, in one batch with
	// the position.
	Apply(pos journal.Position, effects []namespace.Effect) error
	// Remove takes keys away that nobody can see, with no entry.
	Remove(keys [][]byte) error
	// Snapshot cuts a copy of the store, flushed, and lists its files, which
	// lie in dir/store. Apply may run meanwhile.
	Snapshot(dir string) (journal.Position, []journal.File, error)
	// Copy cuts a copy of the store in dir, flushed, for a volume that begins as
	// this one. Apply may run meanwhile.
	Copy(dir string) error
	// Freeze gives the store as it is now, for reading at leisure; it must be
	// closed before the store.
	Freeze() Frozen
	Close() error
}

// Frozen is a store that does not change.
type Frozen interface {
	namespace.Reader
	Close() error
}

// Ownership is the right to journal for a volume, until it is lost.
type Ownership interface {
	Term() meta.Term
	// Lost is closed when the right is gone or can't be known to stand.
	Lost() <-chan struct{}
	// Left is how long the right surely stands: answers given later are void.
	Left() time.Duration
	// PredecessorDone: the owner before released the volume in order or surely
	// runs no more, so that its answers need not be waited out (rule 2).
	PredecessorDone() bool
	// Head is the journal's last entry as of when the right was taken; false: it
	// is to be read.
	Head() (journal.Position, bool)
	// Release hands the volume over in order.
	Release(ctx context.Context) error
	// Yield gives the volume back by an owner that never answered for it.
	Yield(ctx context.Context) error
}

// Holder is who owns a volume, or owned it last.
type Holder struct {
	Name, Addr string // empty: nobody ever did
	Held       bool   // it owns the volume now
	Released   bool   // it let the volume go in order, or nobody ever had it
}

// Member is this server's place among the meta servers.
type Member interface {
	// Standing is how long the lease that all ownerships of this process hang on
	// surely stands.
	Standing() time.Duration
	// Unregister takes this server off the list of meta servers: it stops.
	Unregister(ctx context.Context) error
}

// Volumes is the table of volumes.
type Volumes interface {
	Volumes(ctx context.Context) ([]cluster.Volume, error)
	Volume(ctx context.Context, id meta.VolumeID) (cluster.Volume, error)
	VolumeByName(ctx context.Context, name string) (cluster.Volume, error)
	CreateVolume(ctx context.Context, name string, p meta.Policy, now meta.Time, words ...func(*cluster.Volume)) (cluster.Volume, error)
	// CreateClone adds a clone, being created. Errors: as cluster.CreateClone.
	CreateClone(ctx context.Context, name string, p meta.Policy, now meta.Time, from cluster.Origin) (cluster.Volume, error)
	UpdateVolume(ctx context.Context, id meta.VolumeID, change func(*cluster.Volume) error) (cluster.Volume, error)
	// Labels are those of the volumes from first to last that have any;
	// ChangeLabels sets some, or with nil removes them. Errors: as of cluster.
	Labels(ctx context.Context, first, last meta.VolumeID) (map[meta.VolumeID]cluster.Labels, error)
	ChangeLabels(ctx context.Context, id meta.VolumeID, change map[string]*string) error
	// DeleteVolume removes a volume's row, and notes which chunk servers may
	// still have chunks of it; DeletedVolumes lists those volumes, SweptVolume
	// notes that one server has none any more.
	DeleteVolume(ctx context.Context, id meta.VolumeID, on ...meta.ServerID) error
	DeletedVolumes(ctx context.Context) ([]cluster.Deleted, error)
	SweptVolume(ctx context.Context, id meta.VolumeID, server meta.ServerID) error
}

// Stores are the local copies of volumes' states.
type Stores interface {
	// OpenStore opens the local copy of a volume's state. When the copy is
	// missing, damaged, or older than the checkpoint, it is made again from it.
	OpenStore(ctx context.Context, v meta.VolumeID, cp journal.Checkpoint, have bool) (Store, error)
	// BaseStore opens the local copy of a clone's state. If there is none it is
	// made, at position zero, from an open store or, if that is nil, from a
	// checkpoint, onto which replay then puts what came after.
	BaseStore(ctx context.Context, v meta.VolumeID, from Store, cp journal.Checkpoint, replay func(Store) error) (Store, error)
	// PutAsideStore renames the local copy, so that OpenStore makes a new one.
	PutAsideStore(v meta.VolumeID) error
	// DropStore removes the local copy.
	DropStore(v meta.VolumeID) error
}

// Views show the whole cluster.
type Views interface {
	// View is the newest state of the whole cluster that this process knows; nil
	// where there is nothing to know. Changed is closed when the next is there.
	View() *cluster.View
	Changed() <-chan struct{}
	// Current gives a view that is not older than the call. It bounds by itself
	// how often it asks etcd. Errors: Unavailable, Canceled.
	Current(ctx context.Context) (*cluster.View, error)
}

// MirrorTable is the records of mirrors; the promises are at package cluster.
type MirrorTable interface {
	Mirrors(ctx context.Context) ([]meta.Mirror, error)
	Mirror(ctx context.Context, target meta.VolumeID) (meta.Mirror, error)
	PutMirror(ctx context.Context, m meta.Mirror) (meta.Mirror, error)
	DropMirror(ctx context.Context, target meta.VolumeID) error
}

// GroupTable is the records of group snapshots; the promises are at package cluster.
type GroupTable interface {
	Groups(ctx context.Context) ([]meta.Group, error)
	Group(ctx context.Context, name string) (meta.Group, error)
	PutGroup(ctx context.Context, g meta.Group) (meta.Group, error)
	DropGroup(ctx context.Context, g meta.Group) error
}

// Nodes is the table of chunk servers.
type Nodes interface {
	// Nodes are the chunk servers that were ever seen, by id, as this process
	// knows them; ObserveNode records one that reports, SetNodeState what is
	// wanted with one. Errors: NotFound.
	Nodes() []cluster.Node
	ObserveNode(ctx context.Context, n cluster.Node, now meta.Time) error
	SetNodeState(ctx context.Context, id meta.ServerID, state cluster.NodeState, now meta.Time) (cluster.Node, error)
	// BindServer makes a chunk server's number the identity's, or finds that it
	// is. Errors: AccessDenied (it is another's), Unavailable.
	BindServer(ctx context.Context, id meta.ServerID, who string) error
}

// Cluster is the table of volumes and whatever else the servers share.
type Cluster interface {
	Member
	Volumes
	Stores
	Views
	Nodes
	MirrorTable
	GroupTable
	ID() string
	NewServerID(ctx context.Context) (meta.ServerID, error)
	CapKeys(ctx context.Context) ([]meta.CapKey, error)
	// FreshCapKeys rotates them if the newest is older than every.
	FreshCapKeys(ctx context.Context, every time.Duration) (rotated bool, err error)
	// Holder tells who owns a volume, or owned it last.
	Holder(ctx context.Context, v meta.VolumeID) (Holder, error)
	// Own takes a volume. Errors: NotOwner (the subject is the owner's address).
	Own(ctx context.Context, v meta.VolumeID) (Ownership, Journal, error)
	// Expect readies Own for a volume that its owner is about to release, so
	// that it takes less time then.
	Expect(ctx context.Context, v meta.VolumeID) error
	// Records are the cluster's records that outlive processes.
	Records(ctx context.Context) ([]cluster.Record, error)
	// Restored tells whether a volume was made again from its checkpoint after
	// the cluster's records were lost; SettleRestored notes that the
	// sessions that the checkpoint names are ended.
	Restored(ctx context.Context, v meta.VolumeID) (cluster.Restoration, bool, error)
	SettleRestored(ctx context.Context, v meta.VolumeID) error
	// Follow gives a volume's journal to a reader.
	Follow(ctx context.Context, v meta.VolumeID) (Journal, error)
	// Etcd tells how the journal's store is; what can't be found out stands in it.
	Etcd(ctx context.Context) meta.EtcdHealth
	// Relieve frees space in the journal's store and clears its alarm.
	Relieve(ctx context.Context) error
}
