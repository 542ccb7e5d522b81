package client

import (
	"context"
	"math/rand/v2"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/wire"
)

// Clone makes a volume of its own out of a snapshot of another, or with snapshot
// empty out of what the other is now: no data is copied. It is made once,
// however often the request had to be sent. Errors: NoSuchSnapshot,
// VolumeExists, Invalid (the name), NotSupported (volumes are attached inside),
// ResourceExceeded, and those of TakeSnapshot.
func (s *Session) Clone(ctx context.Context, v meta.VolumeID, snapshot, name string) (Volume, error) {
	return s.askVolume(ctx, wire.Admin{Op: wire.AdminClone, Volume: v, Entry: name}, wire.CloneRequest{Snapshot: snapshot, Token: rand.Uint64() | 1})
}

// Clones lists the clones of a volume; v 0: all that there are.
func (s *Session) Clones(ctx context.Context, v meta.VolumeID) (l []wire.CloneInfo, err error) {
	err = s.askJSON(ctx, wire.Admin{Op: wire.AdminClones, Volume: v}, nil, &l)
	return l, err
}

// Promote begins to make a clone independent of what it was cloned from, and
// tells how far that is: it goes on by itself. rate bounds the bytes that are
// copied in a second from now on, 0 for as fast as it goes, else at least
// wire.MinPromoteRate; nil leaves it as it is. Errors: Busy (it has clones
// itself), Invalid (the rate).
func (s *Session) Promote(ctx context.Context, v meta.VolumeID, rate *uint64) (st wire.PromoteStatus, err error) {
	var body any
	if rate != nil {
		body = wire.PromoteRequest{Rate: rate}
	}
	err = s.askJSON(ctx, wire.Admin{Op: wire.AdminPromote, Volume: v}, body, &st)
	return st, err
}
