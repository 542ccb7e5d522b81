package penstock

import (
	"context"

	"penstock.io/penstock/meta"
	metaclient "penstock.io/penstock/meta/client"
	"penstock.io/penstock/meta/wire"
)

// CloneOf describes a volume that was cloned from another.
type CloneOf = wire.CloneInfo

// cloneSession is what a session does about clones; the methods' promises are
// at meta/client.
type cloneSession interface {
	Clone(ctx context.Context, v meta.VolumeID, snapshot, name string) (metaclient.Volume, error)
	Clones(ctx context.Context, v meta.VolumeID) ([]wire.CloneInfo, error)
	Promote(ctx context.Context, v meta.VolumeID, rate *uint64) (wire.PromoteStatus, error)
}

var _ cloneSession = session{}

func (v *Volume) cloneSession() (cloneSession, error) {
	if err := v.readOnly("clone"); err != nil {
		return nil, err
	}
	s, ok := v.c.sess.(cloneSession)
	if !ok {
		return nil, meta.E("clone", meta.NotSupported, v.name, nil)
	}
	return s, nil
}

// Clone makes a new volume that holds what a snapshot of this one does, or with
// snapshot empty what this one holds now (a snapshot is taken for that, and goes
// with the clone). It takes no longer for a larger volume, and no data is copied:
// both lie in the same chunks until they are written. Client.Volume opens it by
// its name. The snapshot can't be deleted, nor this volume, while the clone is
// there. Errors: NoSuchSnapshot, VolumeExists, Invalid (the name), NotSupported
// (volumes are attached inside this one), AccessDenied.
func (v *Volume) Clone(ctx context.Context, snapshot, name string) error {
	s, err := v.cloneSession()
	if err != nil {
		return err
	}
	if snapshot == "" {
		defer v.snapshotsChanged()
	}
	_, err = s.Clone(ctx, v.id, snapshot, name)
	return err
}

// Clones lists the volumes that were cloned from this one and still need it.
func (v *Volume) Clones(ctx context.Context) ([]CloneOf, error) {
	s, err := v.cloneSession()
	if err != nil {
		return nil, err
	}
	return s.Clones(ctx, v.id)
}

// Promotion tells how far a clone is on the way to needing no other volume.
type Promotion = wire.PromoteStatus

// MinPromoteRate is the lowest rate of Volume.PromoteAt, in bytes a second.
const MinPromoteRate = wire.MinPromoteRate

// Promote begins to copy what this volume, a clone, still shares with what it
// was cloned from, and tells how far that is. It goes on in the background, also
// under the volume's next owners, while the volume is used; once it is done the
// origin may be deleted. Of a volume that is no clone it says so. Errors: Busy
// (the volume has clones itself), AccessDenied.
func (v *Volume) Promote(ctx context.Context) (Promotion, error) { return v.promote(ctx, nil) }

// PromoteAt is Promote that copies at most rate bytes a second, from now on and
// under the volume's next owners: MinPromoteRate or more, or 0 for as fast as it
// goes. A byte counts once, however many replicas it has. It may be called
// again with another rate, which holds within about a second. Errors: also
// Invalid (the rate).
func (v *Volume) PromoteAt(ctx context.Context, rate uint64) (Promotion, error) {
	return v.promote(ctx, &rate)
}

func (v *Volume) promote(ctx context.Context, rate *uint64) (Promotion, error) {
	s, err := v.cloneSession()
	if err != nil {
		return Promotion{}, err
	}
	return s.Promote(ctx, v.id, rate)
}
