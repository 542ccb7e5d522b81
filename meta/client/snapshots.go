package client

import (
	"context"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/wire"
)

// ListViews lists the snapshots of a volume that can be shown, oldest first.
func (s *Session) ListViews(ctx context.Context, v meta.VolumeID) ([]meta.Snapshot, error) {
	var a wire.ViewsAnswer
	err := s.askJSON(ctx, wire.Admin{Op: wire.AdminViews, Volume: v}, nil, &a)
	return a.Snapshots, err
}

// TakeTarget takes a snapshot of a mirror's target. The session must have the right to fill
// the target. The snapshot is taken once even if the request was sent several times. Errors:
// Exists, Invalid, NameTooLong, ResourceExceeded, Unavailable, ReadOnly (the session does not
// have the right).
func (s *Session) TakeTarget(ctx context.Context, v meta.VolumeID, name string) error {
	return s.askJSON(ctx, wire.Admin{Op: wire.AdminTakeTarget, Volume: v, Entry: name}, once(), nil)
}

// RollBackTarget resets a mirror's target to a snapshot. The volume must be a mirror's target,
// and the session must have the right to fill it; the right ends with the rollback. The
// rollback happens once even if the request was sent several times. Errors: NoSuchSnapshot,
// Busy, Unavailable, ReadOnly.
func (s *Session) RollBackTarget(ctx context.Context, v meta.VolumeID, name string) error {
	return s.askJSON(ctx, wire.Admin{Op: wire.AdminRollBackTarget, Volume: v, Entry: name}, once(), nil)
}

// ShowSnapshot sets the snapshot that readers of a mirror's target see. With an empty name the
// target becomes an ordinary volume again. The session must have the right to fill the target.
// Errors: NoSuchSnapshot, ReadOnly (the session does not have the right).
func (s *Session) ShowSnapshot(ctx context.Context, target meta.VolumeID, name string) error {
	return s.askJSON(ctx, wire.Admin{Op: wire.AdminShowTarget, Volume: target, Entry: name}, nil, nil)
}
