package penstock

import (
	"context"
	"time"

	"penstock.io/penstock/meta"
)

// snapshotSession is what a session does about snapshots, by the administrative API.
type snapshotSession interface {
	Snapshots(ctx context.Context, v meta.VolumeID) (*meta.SnapshotList, error)
	TakeSnapshot(ctx context.Context, v meta.VolumeID, name string) (meta.SnapshotInfo, error)
	DeleteSnapshot(ctx context.Context, v meta.VolumeID, name string) (meta.SnapshotInfo, error)
	// DiffSnapshots: exact if a copy is to be made equal, see namespace.DiffExact.
	DiffSnapshots(ctx context.Context, v meta.VolumeID, from, to string, exact bool, fn func(meta.Change) error) error
	AwaitDigest(ctx context.Context, v meta.VolumeID, name string, unpaced bool) (meta.SnapshotInfo, error)
	PinSnapshotAt(ctx context.Context, v meta.VolumeID, name string, at meta.Generation, holder string, ttl time.Duration) (meta.PinInfo, error)
	UnpinSnapshot(ctx context.Context, v meta.VolumeID, name, holder string) (released bool, err error)
}

var _ snapshotSession = session{}

func (sn *snapshotNames) session() (snapshotSession, error) {
	v := sn.v
	if err := v.readOnly("snapshot"); err != nil {
		return nil, err
	}
	s, ok := v.c.sess.(snapshotSession)
	if !ok {
		return nil, meta.E("snapshot", meta.NotSupported, v.name, nil)
	}
	return s, nil
}

// take takes a snapshot of the volume's present state. Errors: those of
// CreateSnapshot.
func (sn *snapshotNames) take(ctx context.Context, name string) error {
	s, err := sn.session()
	if err != nil {
		return err
	}
	defer sn.changed()
	_, err = s.TakeSnapshot(ctx, sn.v.id, name)
	return err
}

// all lists the volume's snapshots, oldest first.
func (sn *snapshotNames) all(ctx context.Context) ([]meta.SnapshotInfo, error) {
	s, err := sn.session()
	if err != nil {
		return nil, err
	}
	l, err := s.Snapshots(ctx, sn.v.id)
	if err != nil {
		return nil, err
	}
	return l.Snapshots, nil
}

// delete deletes the snapshot of a name. Errors: those of DeleteSnapshot.
func (sn *snapshotNames) delete(ctx context.Context, name string) error {
	s, err := sn.session()
	if err != nil {
		return err
	}
	defer sn.changed()
	_, err = s.DeleteSnapshot(ctx, sn.v.id, name)
	return err
}

// diff calls fn with each change from one snapshot to a later one, or, if to is
// empty, to the committed state of the volume. exact: a copy is to be made equal. Errors:
// those of DiffSnapshots, and fn's.
func (sn *snapshotNames) diff(ctx context.Context, from, to string, exact bool, fn func(meta.Change) error) error {
	s, err := sn.session()
	if err != nil {
		return err
	}
	return s.DiffSnapshots(ctx, sn.v.id, from, to, exact, fn)
}
