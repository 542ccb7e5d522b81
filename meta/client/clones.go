package client

import (
	"context"
	"math/rand/v2"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/wire"
)

// Clone makes an independent volume from a snapshot of another volume or, if snapshot is
// empty, from that volume's present state. No data is copied. The clone is made once even if
// the request was sent several times. Errors: NoSuchSnapshot, VolumeExists, Invalid (the
// name), NotSupported (other volumes are attached in v), ResourceExceeded, and the errors of
// TakeSnapshot.
func (s *Session) Clone(ctx context.Context, v meta.VolumeID, snapshot, name string) (Volume, error) {
	return s.askVolume(ctx, wire.Admin{Op: wire.AdminClone, Volume: v, Entry: name}, wire.CloneRequest{Snapshot: snapshot, Token: rand.Uint64() | 1})
}

// Clones lists the clones of a volume, or of every volume if v is 0.
func (s *Session) Clones(ctx context.Context, v meta.VolumeID) (l []wire.CloneInfo, err error) {
	err = s.askJSON(ctx, wire.Admin{Op: wire.AdminClones, Volume: v}, nil, &l)
	return l, err
}

// Promote starts to make a clone independent of its source, and returns the progress; the copy
// continues in the background. rate bounds the bytes copied per second from now on: 0 is
// unlimited, any other value is at least wire.MinPromoteRate, nil keeps the present rate.
// Errors: Busy (the clone itself has clones), Invalid (the rate).
func (s *Session) Promote(ctx context.Context, v meta.VolumeID, rate *uint64) (st wire.PromoteStatus, err error) {
	var body any
	if rate != nil {
		body = wire.PromoteRequest{Rate: rate}
	}
	err = s.askJSON(ctx, wire.Admin{Op: wire.AdminPromote, Volume: v}, body, &st)
	return st, err
}
