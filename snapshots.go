package penstock

import (
	"context"
	"time"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/wire"
)

// Snapshot describes one of a volume.
type Snapshot = wire.SnapshotInfo

// SnapshotUse is what a volume's snapshots hold, in bytes.
type SnapshotUse = wire.SnapshotUse

// snapshotSession is what a session does about snapshots; the methods' promises
// are at meta/client.
type snapshotSession interface {
	Snapshots(ctx context.Context, v meta.VolumeID) (wire.SnapshotList, error)
	TakeSnapshot(ctx context.Context, v meta.VolumeID, name string) (wire.SnapshotInfo, error)
	TakeWhole(ctx context.Context, v meta.VolumeID, name string) (wire.SnapshotInfo, error)
	DeleteSnapshot(ctx context.Context, v meta.VolumeID, name string) (wire.SnapshotInfo, error)
	SnapshotUse(ctx context.Context, v meta.VolumeID, drop []string) (wire.SnapshotUse, error)
	DiffSnapshots(ctx context.Context, v meta.VolumeID, from, to string, fn func(meta.Change) error) error
	RollBack(ctx context.Context, v meta.VolumeID, name string, force bool) error
	ScheduleSnapshots(ctx context.Context, v meta.VolumeID, keep string) error
	AwaitDigest(ctx context.Context, v meta.VolumeID, name string, unpaced bool) (wire.SnapshotInfo, error)
	PinSnapshotAt(ctx context.Context, v meta.VolumeID, name string, at meta.Generation, holder string, ttl time.Duration) (wire.PinInfo, error)
	UnpinSnapshot(ctx context.Context, v meta.VolumeID, name, holder string) (released bool, err error)
}

var _ snapshotSession = session{}

func (v *Volume) snapshotSession() (snapshotSession, error) {
	if err := v.readOnly("snapshot"); err != nil {
		return nil, err
	}
	s, ok := v.c.sess.(snapshotSession)
	if !ok {
		return nil, meta.E("snapshot", meta.NotSupported, v.name, nil)
	}
	return s, nil
}

// TakeSnapshot keeps the volume as it is now under a name. Everything that a
// write returned for before the call, through any client that commits what it
// buffered within a second, is in it, and durable when the call returns. The files of
// a client that does not are in it as they were synced last: Snapshot.Unanswered
// counts them, and they lose nothing outside the snapshot. The name
// is text without '/', '@', ':' and control characters. Errors: Exists, Invalid,
// NameTooLong, ResourceExceeded, AccessDenied (the grant is not to administer),
// Unavailable (what a client left open can't be settled now).
func (v *Volume) TakeSnapshot(ctx context.Context, name string) (Snapshot, error) {
	s, err := v.snapshotSession()
	if err != nil {
		return Snapshot{}, err
	}
	defer v.snapshotsChanged()
	return s.TakeSnapshot(ctx, v.id, name)
}

// TakeWholeSnapshot is TakeSnapshot, but takes none if it would have files only as they
// were synced last. Errors: as TakeSnapshot; Unavailable (there are such files, and the
// text says whose), NotSupported (the owner is of an older version).
func (v *Volume) TakeWholeSnapshot(ctx context.Context, name string) (Snapshot, error) {
	s, err := v.snapshotSession()
	if err != nil {
		return Snapshot{}, err
	}
	defer v.snapshotsChanged()
	return s.TakeWhole(ctx, v.id, name)
}

// Snapshots lists the volume's snapshots, oldest first.
func (v *Volume) Snapshots(ctx context.Context) ([]Snapshot, error) {
	s, err := v.snapshotSession()
	if err != nil {
		return nil, err
	}
	l, err := s.Snapshots(ctx, v.id)
	return l.Snapshots, err
}

// SnapshotUse counts, to the byte, what the volume's snapshots hold beside the volume as
// it is committed now, what each of them alone holds, and what deleting those that are
// named, all of them, would give back. A stored byte counts once, however many have it.
// It reads the names of nothing, but the places of all bytes of every file that was
// changed since the oldest snapshot. Errors: NoSuchSnapshot, AccessDenied (the grant is
// not to administer), NotSupported (the owner is of an older version).
func (v *Volume) SnapshotUse(ctx context.Context, names ...string) (SnapshotUse, error) {
	s, err := v.snapshotSession()
	if err != nil {
		return SnapshotUse{}, err
	}
	return s.SnapshotUse(ctx, v.id, names)
}

// DeleteSnapshot deletes a snapshot: from then on nobody can read it; what it
// alone held is freed in the background. Errors: NoSuchSnapshot, Busy (somebody
// pinned it: the text says who, and until when).
func (v *Volume) DeleteSnapshot(ctx context.Context, name string) error {
	s, err := v.snapshotSession()
	if err != nil {
		return err
	}
	defer v.snapshotsChanged()
	_, err = s.DeleteSnapshot(ctx, v.id, name)
	return err
}

// DiffSnapshots calls fn with what changed from one snapshot to a later one, in
// the order of paths; with to empty, to the volume as it is committed now. It
// costs what changed, not what the volume holds. Errors: NoSuchSnapshot, Invalid
// (from is not the earlier one), Stale (fn took longer than a minute for a
// page), and fn's.
func (v *Volume) DiffSnapshots(ctx context.Context, from, to string, fn func(meta.Change) error) error {
	s, err := v.snapshotSession()
	if err != nil {
		return err
	}
	return s.DiffSnapshots(ctx, v.id, from, to, fn)
}

// ScheduleSnapshots has the volume's owners take and delete snapshots: keep is
// like "24h:hourly,30d:daily" (for 24 hours the first of each hour, for 30 days
// the first of each day), empty for none. Errors: Invalid.
func (v *Volume) ScheduleSnapshots(ctx context.Context, keep string) error {
	s, err := v.snapshotSession()
	if err != nil {
		return err
	}
	return s.ScheduleSnapshots(ctx, v.id, keep)
}

// RollBack makes the volume what a snapshot is. With force its sessions end,
// this client's too: what was not synced is lost and open files fail; without,
// it is refused with Busy while anybody is in the volume, and this client is.
func (v *Volume) RollBack(ctx context.Context, name string, force bool) error {
	s, err := v.snapshotSession()
	if err != nil {
		return err
	}
	return s.RollBack(ctx, v.id, name, force)
}
