package client

import (
	"context"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/wire"
)

// Mirrors lists the records of all mirrors or, if target is not 0, the record of the target.
// Errors: NotFound (the volume is no mirror's target).
func (s *Session) Mirrors(ctx context.Context, target meta.VolumeID) (l []meta.Mirror, err error) {
	err = s.askJSON(ctx, wire.Admin{Op: wire.AdminMirrors, Volume: target}, nil, &l)
	return l, err
}

// PutMirror writes a record back, and returns the stored record. Errors: Again (the record was
// changed since the caller read it), Version.
func (s *Session) PutMirror(ctx context.Context, m meta.Mirror) (now meta.Mirror, err error) {
	err = s.askJSON(ctx, wire.Admin{Op: wire.AdminMirrorPut, Volume: m.Target}, m, &now)
	return now, err
}

// DropMirror removes a record.
func (s *Session) DropMirror(ctx context.Context, target meta.VolumeID) error {
	return s.askJSON(ctx, wire.Admin{Op: wire.AdminMirrorDrop, Volume: target}, nil, nil)
}

// ShowSnapshot sets the snapshot that readers of a mirror's target see. With an empty name the
// target becomes an ordinary volume again. The session must hold meta.MirrorLock. Errors:
// NoSuchSnapshot, ReadOnly (the session does not hold the lock).
func (s *Session) ShowSnapshot(ctx context.Context, target meta.VolumeID, name string) error {
	return s.askJSON(ctx, wire.Admin{Op: wire.AdminMirrorShow, Volume: target, Entry: name}, nil, nil)
}
