package client

import (
	"context"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/wire"
)

// Mirrors lists the records of mirrors, or that of one target. Errors: NotFound
// (the volume is no mirror's target).
func (s *Session) Mirrors(ctx context.Context, target meta.VolumeID) (l []meta.Mirror, err error) {
	err = s.askJSON(ctx, wire.Admin{Op: wire.AdminMirrors, Volume: target}, nil, &l)
	return l, err
}

// PutMirror writes a record back, and gives it as it is then. Errors: Again (it
// was changed since it was read), Version.
func (s *Session) PutMirror(ctx context.Context, m meta.Mirror) (now meta.Mirror, err error) {
	err = s.askJSON(ctx, wire.Admin{Op: wire.AdminMirrorPut, Volume: m.Target}, m, &now)
	return now, err
}

// DropMirror removes a record.
func (s *Session) DropMirror(ctx context.Context, target meta.VolumeID) error {
	return s.askJSON(ctx, wire.Admin{Op: wire.AdminMirrorDrop, Volume: target}, nil, nil)
}

// ShowSnapshot shows the readers of a mirror's target a snapshot; with "" it is a
// volume like others again. The session must hold meta.MirrorLock. Errors:
// NoSuchSnapshot, ReadOnly (it does not).
func (s *Session) ShowSnapshot(ctx context.Context, target meta.VolumeID, name string) error {
	return s.askJSON(ctx, wire.Admin{Op: wire.AdminMirrorShow, Volume: target, Entry: name}, nil, nil)
}
