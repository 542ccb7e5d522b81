package penstock

import (
	"context"

	"penstock.io/penstock/meta"
)

// CloneOf describes a volume that was cloned from another.
type CloneOf = meta.CloneInfo

// cloneSession is what a session does about clones; the methods' promises are
// at meta/admin.
type cloneSession interface {
	Clone(ctx context.Context, v meta.VolumeID, snapshot, name string) (meta.CloneInfo, error)
	Clones(ctx context.Context, v meta.VolumeID) ([]meta.CloneInfo, error)
	Promote(ctx context.Context, v meta.VolumeID, rate *uint64) (meta.PromoteStatus, error)
}

var _ cloneSession = session{}

func (sn *snapshotNames) cloneSession() (cloneSession, error) {
	v := sn.v
	if err := v.readOnly("clone"); err != nil {
		return nil, err
	}
	s, ok := v.c.sess.(cloneSession)
	if !ok {
		return nil, meta.E("clone", meta.NotSupported, v.name, nil)
	}
	return s, nil
}

// Clone makes a new volume with the contents of a snapshot of v. If snapshot is empty, Clone
// takes a snapshot of v; the snapshot is deleted with the clone. Clone copies no data, so the
// time does not grow with the volume: origin and clone share chunks until either is written.
// Client.Volume opens the clone by name. While the clone exists, neither the snapshot nor v
// can be deleted. Errors: NoSuchSnapshot, VolumeExists, Invalid (the name), NotSupported
// (volumes are attached inside v), AccessDenied.
func (v *Volume) Clone(ctx context.Context, snapshot, name string) error {
	s, err := v.snapshots.cloneSession()
	if err != nil {
		return err
	}
	if snapshot == "" {
		defer v.snapshots.changed()
	}
	_, err = s.Clone(ctx, v.id, snapshot, name)
	return err
}

// Clones lists the volumes that were cloned from v and still need v.
func (v *Volume) Clones(ctx context.Context) ([]CloneOf, error) {
	s, err := v.snapshots.cloneSession()
	if err != nil {
		return nil, err
	}
	return s.Clones(ctx, v.id)
}

// Promotion tells how far a clone is on the way to needing no other volume.
type Promotion = meta.PromoteStatus

// MinPromoteRate is the lowest rate of Volume.PromoteAt, in bytes a second.
const MinPromoteRate = meta.MinPromoteRate

// Promote begins to copy the data that v, a clone, still shares with its origin, and returns
// the progress. Copying continues in the background, also under the volume's next owners,
// while the volume is used. After the last byte is copied, the origin may be deleted. For a
// volume that is no clone, Promotion.Done is true. Errors: Busy (the volume has clones
// itself), AccessDenied.
func (v *Volume) Promote(ctx context.Context) (Promotion, error) {
	return v.snapshots.promote(ctx, nil)
}

// PromoteAt is Promote with a bound on the copying of rate bytes a second, from now on and
// under the volume's next owners: MinPromoteRate or more, or 0 for no bound. A byte counts
// once, however many replicas the byte has. A later call with another rate takes effect within
// about a second. Errors: also Invalid (the rate).
func (v *Volume) PromoteAt(ctx context.Context, rate uint64) (Promotion, error) {
	return v.snapshots.promote(ctx, &rate)
}

func (sn *snapshotNames) promote(ctx context.Context, rate *uint64) (Promotion, error) {
	s, err := sn.cloneSession()
	if err != nil {
		return Promotion{}, err
	}
	return s.Promote(ctx, sn.v.id, rate)
}
