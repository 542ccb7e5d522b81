package server

import (
	"context"
	"time"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/cluster"
	"penstock.io/penstock/meta/journal"
	"penstock.io/penstock/meta/namespace"
)

// Journal is the log of a volume, as used by the volume's owner.
type Journal = journal.Log

// Store is the local copy of a volume's state. The store does not sync its writes: the journal
// makes the state durable.
type Store interface {
	namespace.Reader
	// Applied returns the position of the last entry applied to the store.
	Applied() journal.Position
	// Apply adds the effects of the entry ending at pos, in one batch with the position.
	Apply(pos journal.Position, effects []namespace.Effect) error
	// Remove deletes keys that no reader can see, without a journal entry.
	Remove(keys [][]byte) error
	// Snapshot makes a flushed copy of the store in dir/store and lists the copy's files.
	// Apply may run meanwhile.
	Snapshot(dir string) (journal.Position, []journal.File, error)
	// Copy makes a flushed copy of the store in dir, for a new volume that begins with the
	// same state. Apply may run meanwhile.
	Copy(dir string) error
	// Freeze returns the store's present state for reading. The caller must close the Frozen
	// before the store.
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
	// PredecessorDone: the owner before released the volume in order, or surely runs no more.
	// So this owner need not wait until the predecessor's answers expire (rule 2).
	PredecessorDone() bool
	// Head returns the journal's last entry at the time when the right was taken; false: the
	// owner must read the journal for it.
	Head() (journal.Position, bool)
	// Release hands the volume over in order.
	Release(ctx context.Context) error
	// Yield gives the volume back. Only for an owner that never answered a call.
	Yield(ctx context.Context) error
}

// Holder is the present or last owner of a volume.
type Holder struct {
	Name, Addr string // empty: nobody ever did
	Held       bool   // the server owns the volume now
	Released   bool   // the server released the volume in order, or the volume never had an owner
}

// Member is this server's place among the meta servers.
type Member interface {
	// Standing is how long the lease behind all ownerships of this process surely stands.
	Standing() time.Duration
	// Unregister removes this server from the list of meta servers, since the server stops.
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
	// Labels returns the labels of the volumes from first to last, without volumes that have
	// no labels. ChangeLabels sets labels, or removes a label whose value is nil. Errors: as
	// of cluster.
	Labels(ctx context.Context, first, last meta.VolumeID) (map[meta.VolumeID]cluster.Labels, error)
	ChangeLabels(ctx context.Context, id meta.VolumeID, change map[string]*string) error
	// DeleteVolume removes a volume's row, and records the chunk servers that may still have
	// chunks of the volume. DeletedVolumes lists the volumes so recorded. SweptVolume records
	// that a server has no such chunks any more.
	DeleteVolume(ctx context.Context, id meta.VolumeID, on ...meta.ServerID) error
	DeletedVolumes(ctx context.Context) ([]cluster.Deleted, error)
	SweptVolume(ctx context.Context, id meta.VolumeID, server meta.ServerID) error
}

// Stores are the local copies of volumes' states.
type Stores interface {
	// OpenStore opens the local copy of a volume's state. A copy that is missing, damaged, or
	// older than the checkpoint is made again from the checkpoint.
	OpenStore(ctx context.Context, v meta.VolumeID, cp journal.Checkpoint, have bool) (Store, error)
	// BaseStore opens the local copy of a clone's state. If the copy is missing, BaseStore
	// makes it at position zero: from the open store from, or, if from is nil, from the
	// checkpoint, to which replay then applies the later entries.
	BaseStore(ctx context.Context, v meta.VolumeID, from Store, cp journal.Checkpoint, replay func(Store) error) (Store, error)
	// PutAsideStore renames the local copy, so that OpenStore makes a new copy.
	PutAsideStore(v meta.VolumeID) error
	// DropStore removes the local copy.
	DropStore(v meta.VolumeID) error
}

// Views show the whole cluster.
type Views interface {
	// View is the newest state of the cluster known to this process; nil: no state is known.
	// Changed is closed when a newer view arrives.
	View() *cluster.View
	Changed() <-chan struct{}
	// Current returns a view that is not older than the call. Current itself limits how often
	// it asks etcd. Errors: Unavailable, Canceled.
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

// GatewayTable is the list of gateways; the promises are at package cluster.
type GatewayTable interface {
	Register(ctx context.Context, g cluster.Gateway, lease int64) (cluster.Gateway, int64, error)
	Unregister(ctx context.Context, name, instance string) error
	List(ctx context.Context, all bool) ([]cluster.Gateway, error)
}

// Nodes is the table of chunk servers.
type Nodes interface {
	// Nodes are all chunk servers ever seen, by id, as known to this process. ObserveNode
	// records a chunk server that reports. SetNodeState sets the state wanted for a chunk
	// server. Errors: NotFound.
	Nodes() []cluster.Node
	ObserveNode(ctx context.Context, n cluster.Node, now meta.Time) error
	SetNodeState(ctx context.Context, id meta.ServerID, state cluster.NodeState, now meta.Time) (cluster.Node, error)
	// BindServer binds a chunk server's number to an identity, or confirms the binding.
	// Errors: AccessDenied (the number belongs to another identity), Unavailable.
	BindServer(ctx context.Context, id meta.ServerID, who string) error
}

// Cluster is the table of volumes and the other state shared by the servers.
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
	// FreshCapKeys rotates the capability keys if the newest key is older than every.
	FreshCapKeys(ctx context.Context, every time.Duration) (rotated bool, err error)
	// Holder returns the present or last owner of a volume.
	Holder(ctx context.Context, v meta.VolumeID) (Holder, error)
	// Own takes a volume. Errors: NotOwner (the subject is the owner's address).
	Own(ctx context.Context, v meta.VolumeID) (Ownership, Journal, error)
	// Expect prepares Own for a volume about to be released by its owner, so that Own takes
	// less time.
	Expect(ctx context.Context, v meta.VolumeID) error
	// Records are the cluster's records that outlast processes.
	Records(ctx context.Context) ([]cluster.Record, error)
	// Restored reports whether a volume was made again from its checkpoint after the loss of
	// the cluster's records. SettleRestored records that the sessions in the checkpoint are
	// ended.
	Restored(ctx context.Context, v meta.VolumeID) (cluster.Restoration, bool, error)
	SettleRestored(ctx context.Context, v meta.VolumeID) error
	// Follow gives a volume's journal to a reader.
	Follow(ctx context.Context, v meta.VolumeID) (Journal, error)
	// Etcd returns the health of the journal's store. The result also names the facts that
	// could not be found out.
	Etcd(ctx context.Context) meta.EtcdHealth
	// Relieve frees space in the journal's store and clears the store's alarm.
	Relieve(ctx context.Context) error
}
