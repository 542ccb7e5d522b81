// Package operator administers a cluster for tests as an operator's program does: by the
// administrative API, in the words of package meta.
package operator

import (
	"context"
	"testing"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/admin"
	"penstock.io/penstock/meta/peer"
	"penstock.io/penstock/meta/wire"
)

// Operator calls the administrative API. Errors are the errors of the calls.
type Operator struct{ API *admin.Client }

// New makes an Operator that shows credentials, which may be nil on Unix sockets; the test's end
// closes the Operator.
func New(t testing.TB, addr string, creds *peer.Credentials) *Operator {
	t.Helper()
	c, err := admin.New(admin.Config{Addrs: []string{addr}, Creds: creds})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return &Operator{c}
}

// Beside is New for a session's client, with the servers of the session.
func Beside(t testing.TB, addr string, creds *peer.Credentials, s interface{ MetaServers() []wire.MetaServer }) *Operator {
	t.Helper()
	c, err := admin.New(admin.Config{Addrs: []string{addr}, Creds: creds, Known: func() (addrs []string) {
		for _, m := range s.MetaServers() {
			addrs = append(addrs, m.Addr)
		}
		return addrs
	}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return &Operator{c}
}

// TakeSnapshot takes a snapshot.
func (o *Operator) TakeSnapshot(ctx context.Context, v meta.VolumeID, name string) (meta.SnapshotInfo, error) {
	return info(o.API.Snapshots.CreateSnapshot(ctx, &admin.CreateSnapshotRequest{Volume: admin.Numbered(v), Name: name}))
}

// TakeWhole takes a snapshot without missing writes.
func (o *Operator) TakeWhole(ctx context.Context, v meta.VolumeID, name string) (meta.SnapshotInfo, error) {
	return info(o.API.TakeWhole(ctx, admin.Numbered(v), name))
}

func info(x *admin.Snapshot, err error) (meta.SnapshotInfo, error) {
	if err != nil {
		return meta.SnapshotInfo{}, err
	}
	return x.Info(), nil
}

// Snapshots lists the snapshots of a volume.
func (o *Operator) Snapshots(ctx context.Context, v meta.VolumeID) (meta.SnapshotList, error) {
	return o.list(ctx, &admin.ListSnapshotsRequest{Volume: admin.Numbered(v)})
}

// CountedSnapshots lists snapshots with their bytes, exactly counted.
func (o *Operator) CountedSnapshots(ctx context.Context, v meta.VolumeID) (meta.SnapshotList, error) {
	return o.list(ctx, &admin.ListSnapshotsRequest{Volume: admin.Numbered(v), Count: true})
}

func (o *Operator) list(ctx context.Context, q *admin.ListSnapshotsRequest) (meta.SnapshotList, error) {
	answer, err := o.API.Snapshots.ListSnapshots(ctx, q)
	if err != nil {
		return meta.SnapshotList{}, err
	}
	return *answer.List(), nil
}

// AwaitDigest describes a snapshot after its digest has been computed.
func (o *Operator) AwaitDigest(ctx context.Context, v meta.VolumeID, name string, unpaced bool) (meta.SnapshotInfo, error) {
	return info(o.API.Snapshots.GetSnapshotDigest(ctx, &admin.GetSnapshotDigestRequest{Volume: admin.Numbered(v), Snapshot: name, Unpaced: unpaced}))
}

// DeleteSnapshot deletes the snapshot of a name.
func (o *Operator) DeleteSnapshot(ctx context.Context, v meta.VolumeID, name string) (meta.SnapshotInfo, error) {
	return info(o.API.DeleteSnapshot(ctx, admin.Numbered(v), name, false))
}

// DropSnapshot deletes the snapshot of a name although clones need the snapshot.
func (o *Operator) DropSnapshot(ctx context.Context, v meta.VolumeID, name string) (meta.SnapshotInfo, error) {
	return info(o.API.DeleteSnapshot(ctx, admin.Numbered(v), name, true))
}

// SnapshotUse counts the bytes of snapshots.
func (o *Operator) SnapshotUse(ctx context.Context, v meta.VolumeID, drop []string) (meta.SnapshotUse, error) {
	answer, err := o.API.Snapshots.GetSnapshotUsage(ctx, &admin.GetSnapshotUsageRequest{Volume: admin.Numbered(v), Delete: drop})
	if err != nil {
		return meta.SnapshotUse{}, err
	}
	return *answer.Use(), nil
}

// DiffSnapshots lists the changes.
func (o *Operator) DiffSnapshots(ctx context.Context, v meta.VolumeID, from, to string, fn func(meta.Change) error) error {
	return o.API.Diff(ctx, &admin.DiffSnapshotsRequest{Volume: admin.Numbered(v), From: from, To: to}, fn)
}

// DiffExact lists the changes for a copy that is to be equal.
func (o *Operator) DiffExact(ctx context.Context, v meta.VolumeID, from, to string, fn func(meta.Change) error) error {
	return o.API.Diff(ctx, &admin.DiffSnapshotsRequest{Volume: admin.Numbered(v), From: from, To: to, Exact: true}, fn)
}

// RollBack makes a volume equal to a snapshot.
func (o *Operator) RollBack(ctx context.Context, v meta.VolumeID, name string, force bool) error {
	_, err := o.API.Snapshots.RollBackVolume(ctx, &admin.RollBackVolumeRequest{Volume: admin.Numbered(v), Snapshot: name, Force: force})
	return err
}

// ScheduleSnapshots sets a volume's schedule.
func (o *Operator) ScheduleSnapshots(ctx context.Context, v meta.VolumeID, keep string) error {
	_, err := o.API.Snapshots.SetSchedule(ctx, &admin.SetScheduleRequest{Volume: admin.Numbered(v), Keep: keep})
	return err
}

// PinSnapshot pins a snapshot.
func (o *Operator) PinSnapshot(ctx context.Context, v meta.VolumeID, name, holder string, ttl time.Duration) (meta.PinInfo, error) {
	return o.PinSnapshotAt(ctx, v, name, 0, holder, ttl)
}

// PinSnapshotAt pins the snapshot of a generation.
func (o *Operator) PinSnapshotAt(ctx context.Context, v meta.VolumeID, name string, at meta.Generation, holder string, ttl time.Duration) (meta.PinInfo, error) {
	p, err := o.API.Snapshots.PinSnapshot(ctx, &admin.PinSnapshotRequest{Volume: admin.Numbered(v), Snapshot: name, Generation: uint64(at), Holder: holder, Ttl: durationpb.New(ttl)})
	if err != nil {
		return meta.PinInfo{}, err
	}
	return p.Info(), nil
}

// UnpinSnapshot releases a pin.
func (o *Operator) UnpinSnapshot(ctx context.Context, v meta.VolumeID, name, holder string) (released bool, err error) {
	answer, err := o.API.Snapshots.UnpinSnapshot(ctx, &admin.UnpinSnapshotRequest{Volume: admin.Numbered(v), Snapshot: name, Holder: holder})
	return answer.GetReleased(), err
}

// SnapshotIndex tells where the index of a snapshot lies.
func (o *Operator) SnapshotIndex(ctx context.Context, v meta.VolumeID, name string) (*admin.SnapshotIndex, error) {
	return o.API.Snapshots.GetSnapshotIndex(ctx, &admin.GetSnapshotIndexRequest{Volume: admin.Numbered(v), Snapshot: name})
}

// Clone makes a clone of a snapshot, or of the present state.
func (o *Operator) Clone(ctx context.Context, v meta.VolumeID, snapshot, name string) (meta.CloneInfo, error) {
	c, err := o.API.Clones.CreateClone(ctx, &admin.CreateCloneRequest{Volume: admin.Numbered(v), Snapshot: snapshot, Name: name})
	if err != nil {
		return meta.CloneInfo{}, err
	}
	return c.Info(), nil
}

// Clones lists the clones of a volume.
func (o *Operator) Clones(ctx context.Context, v meta.VolumeID) ([]meta.CloneInfo, error) {
	l, err := o.API.Clones.ListClones(ctx, &admin.ListClonesRequest{Volume: admin.Numbered(v)})
	return l.List(), err
}

// Promote starts or continues a promotion, and returns its progress.
func (o *Operator) Promote(ctx context.Context, v meta.VolumeID, rate *uint64) (meta.PromoteStatus, error) {
	st, err := o.API.Clones.PromoteClone(ctx, &admin.PromoteCloneRequest{Volume: admin.Numbered(v), Rate: rate})
	if err != nil {
		return meta.PromoteStatus{}, err
	}
	return st.Status(), nil
}

// TakeGroup takes a snapshot of each volume, all of the same moment.
func (o *Operator) TakeGroup(ctx context.Context, name string, volumes []meta.VolumeID, strict bool) (meta.Group, error) {
	return record(o.API.TakeGroup(ctx, name, volumes, strict))
}

// Groups lists the groups of a volume; 0: of all volumes.
func (o *Operator) Groups(ctx context.Context, v meta.VolumeID) ([]meta.Group, error) {
	q := &admin.ListGroupsRequest{}
	if v != 0 {
		q.Volume = admin.Numbered(v)
	}
	l, err := o.API.Groups.ListGroups(ctx, q)
	return l.Records(), err
}

// Group finds a group of any state.
func (o *Operator) Group(ctx context.Context, name string) (meta.Group, error) {
	return record(o.API.Groups.GetGroup(ctx, &admin.GetGroupRequest{Group: &admin.GroupRef{Name: name}}))
}

func record(g *admin.Group, err error) (meta.Group, error) {
	if err != nil {
		return meta.Group{}, err
	}
	return g.Record(), nil
}

// DeleteGroup deletes a group and the group's snapshots.
func (o *Operator) DeleteGroup(ctx context.Context, name string) error {
	return o.API.DeleteGroup(ctx, name)
}
