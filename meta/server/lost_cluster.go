package server

import (
	"context"
	"errors"
	"time"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/cluster"
	"penstock.io/penstock/meta/journal"
)

// lostCluster is the Cluster of a server used only for a survey: lostCluster has no records,
// and refuses requests with beingRestored.
type lostCluster struct{ key meta.CapKey }

var _ Cluster = (*lostCluster)(nil)

func beingRestored() error {
	return meta.E("find cluster", meta.Unavailable, "", errors.New("the cluster is being restored"))
}

func (c *lostCluster) ID() string { return "" }

func (c *lostCluster) CapKeys(context.Context) ([]meta.CapKey, error) {
	return []meta.CapKey{c.key}, nil
}

func (c *lostCluster) FreshCapKeys(context.Context, time.Duration) (bool, error) {
	return false, beingRestored()
}

// Standing returns a standing long enough for chunk servers to enrol.
func (c *lostCluster) Standing() time.Duration { return time.Minute }

func (c *lostCluster) Unregister(context.Context) error { return nil }

func (c *lostCluster) Volumes(context.Context) ([]cluster.Volume, error) { return nil, beingRestored() }

func (c *lostCluster) Volume(context.Context, meta.VolumeID) (cluster.Volume, error) {
	return cluster.Volume{}, beingRestored()
}

func (c *lostCluster) VolumeByName(context.Context, string) (cluster.Volume, error) {
	return cluster.Volume{}, beingRestored()
}

func (c *lostCluster) CreateVolume(context.Context, string, meta.Policy, meta.Time, ...func(*cluster.Volume)) (cluster.Volume, error) {
	return cluster.Volume{}, beingRestored()
}

func (c *lostCluster) CreateClone(context.Context, string, meta.Policy, meta.Time, cluster.Origin) (cluster.Volume, error) {
	return cluster.Volume{}, beingRestored()
}

func (c *lostCluster) BaseStore(context.Context, meta.VolumeID, Store, journal.Checkpoint, func(Store) error) (Store, error) {
	return nil, beingRestored()
}

func (c *lostCluster) UpdateVolume(context.Context, meta.VolumeID, func(*cluster.Volume) error) (cluster.Volume, error) {
	return cluster.Volume{}, beingRestored()
}

func (c *lostCluster) Labels(context.Context, meta.VolumeID, meta.VolumeID) (map[meta.VolumeID]cluster.Labels, error) {
	return nil, beingRestored()
}

func (c *lostCluster) ChangeLabels(context.Context, meta.VolumeID, map[string]*string) error {
	return beingRestored()
}

func (c *lostCluster) DeleteVolume(context.Context, meta.VolumeID, ...meta.ServerID) error {
	return beingRestored()
}

func (c *lostCluster) DeletedVolumes(context.Context) ([]cluster.Deleted, error) {
	return nil, beingRestored()
}

func (c *lostCluster) SweptVolume(context.Context, meta.VolumeID, meta.ServerID) error {
	return beingRestored()
}

func (c *lostCluster) Mirrors(context.Context) ([]meta.Mirror, error) { return nil, beingRestored() }

func (c *lostCluster) Mirror(context.Context, meta.VolumeID) (meta.Mirror, error) {
	return meta.Mirror{}, beingRestored()
}

func (c *lostCluster) PutMirror(context.Context, meta.Mirror) (meta.Mirror, error) {
	return meta.Mirror{}, beingRestored()
}

func (c *lostCluster) DropMirror(context.Context, meta.VolumeID) error { return beingRestored() }

func (c *lostCluster) Groups(context.Context) ([]meta.Group, error) { return nil, beingRestored() }

func (c *lostCluster) Group(context.Context, string) (meta.Group, error) {
	return meta.Group{}, beingRestored()
}

func (c *lostCluster) PutGroup(context.Context, meta.Group) (meta.Group, error) {
	return meta.Group{}, beingRestored()
}

func (c *lostCluster) DropGroup(context.Context, meta.Group) error { return beingRestored() }

func (c *lostCluster) OpenStore(context.Context, meta.VolumeID, journal.Checkpoint, bool) (Store, error) {
	return nil, beingRestored()
}

func (c *lostCluster) PutAsideStore(meta.VolumeID) error { return beingRestored() }

func (c *lostCluster) DropStore(meta.VolumeID) error { return beingRestored() }

func (c *lostCluster) NewServerID(context.Context) (meta.ServerID, error) {
	return 0, beingRestored()
}

func (c *lostCluster) Holder(context.Context, meta.VolumeID) (Holder, error) {
	return Holder{}, beingRestored()
}

func (c *lostCluster) Own(context.Context, meta.VolumeID) (Ownership, Journal, error) {
	return nil, nil, beingRestored()
}

func (c *lostCluster) Expect(context.Context, meta.VolumeID) error { return beingRestored() }

func (c *lostCluster) Records(context.Context) ([]cluster.Record, error) { return nil, beingRestored() }

func (c *lostCluster) Restored(context.Context, meta.VolumeID) (cluster.Restoration, bool, error) {
	return cluster.Restoration{}, false, beingRestored()
}

func (c *lostCluster) SettleRestored(context.Context, meta.VolumeID) error { return beingRestored() }

func (c *lostCluster) Nodes() []cluster.Node { return nil }

// BindServer accepts every chunk server: the survey itself checks the servers' disks.
func (c *lostCluster) BindServer(context.Context, meta.ServerID, string) error { return nil }

func (c *lostCluster) ObserveNode(context.Context, cluster.Node, meta.Time) error {
	return beingRestored()
}

func (c *lostCluster) SetNodeState(context.Context, meta.ServerID, cluster.NodeState, meta.Time) (cluster.Node, error) {
	return cluster.Node{}, beingRestored()
}

func (c *lostCluster) Follow(context.Context, meta.VolumeID) (Journal, error) {
	return nil, beingRestored()
}

func (c *lostCluster) View() *cluster.View { return nil }

func (c *lostCluster) Changed() <-chan struct{} { return nil }

func (c *lostCluster) Current(context.Context) (*cluster.View, error) {
	return nil, beingRestored()
}

func (c *lostCluster) Relieve(context.Context) error { return nil }

func (c *lostCluster) Etcd(context.Context) meta.EtcdHealth {
	return meta.EtcdHealth{Error: "its records of the cluster are lost: penstock cluster restore makes them again"}
}
