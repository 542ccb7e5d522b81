package client

import (
	"context"
	"errors"
	"slices"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/wire"
)

// UseGrant is a grant that holds as long as a use does.
type UseGrant struct {
	ID     uint64        `json:"id"`
	Who    string        `json:"who"` // client/NAME
	Volume meta.VolumeID `json:"volume"`
	For    string        `json:"for"` // the use; empty: it ends with none
}

// Grants lists the grants of the cluster by number, as G has them, whose number is ID. It
// asks for a page at a time. Errors: NotSupported (the cluster has no certificates).
func Grants[G any](ctx context.Context, s *Session, number func(*G) uint64) (all []G, err error) {
	return grantsOf(ctx, s, "", number)
}

// grantsOf is Grants for one use; "": all.
func grantsOf[G any](ctx context.Context, s *Session, use string, number func(*G) uint64) (all []G, err error) {
	for after := uint64(0); ; {
		var page []G
		err := s.askJSON(ctx, wire.Admin{Op: wire.AdminGrants, Name: use, Ino: meta.Ino(after), Entry: wire.PageOfGrants}, nil, &page)
		if err != nil {
			return nil, err
		}
		if len(page) == 0 {
			return all, nil
		}
		all = append(all, page...)
		after = number(&page[len(page)-1])
	}
}

// GrantFor grants a client the volumes that q names, for as long as a use lasts. If q
// names none, the use is over: what the client was granted for it is taken back. In a
// cluster without certificates it does nothing: nobody needs grants. Errors: NotFound
// (no such client), NoSuchVolume, Exists (it has other rights for the same use), Invalid,
// Again (a later request was served before this one, see q.AsOf).
func (s *Session) GrantFor(ctx context.Context, q wire.GrantsFor) error {
	return s.askJSON(ctx, wire.Admin{Op: wire.AdminGrantFor}, q, nil)
}

// Revision is that of the cluster's state, not older than the call: for q.AsOf of
// GrantFor.
func (s *Session) Revision(ctx context.Context) (int64, error) {
	var r wire.RevisionAnswer
	err := s.askJSON(ctx, wire.Admin{Op: wire.AdminRevision}, nil, &r)
	return r.Revision, err
}

// UseGrants lists the grants that end with a use, with "" with any; none in a cluster
// without certificates.
func (s *Session) UseGrants(ctx context.Context, use string) ([]UseGrant, error) {
	all, err := grantsOf(ctx, s, use, func(g *UseGrant) uint64 { return g.ID })
	if errors.Is(err, meta.NotSupported) {
		return nil, nil
	}
	return slices.DeleteFunc(all, func(g UseGrant) bool { return g.For == "" || use != "" && g.For != use }), err
}
