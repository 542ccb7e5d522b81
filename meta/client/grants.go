package client

import (
	"context"
	"errors"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/wire"
)

// UseGrant is a grant that holds as long as a use does.
type UseGrant struct {
	Who    string        `json:"who"` // client/NAME
	Volume meta.VolumeID `json:"volume"`
	For    string        `json:"for"` // the use; empty: it ends with none
}

// GrantFor makes grants for a use, or without volumes takes those back that are there.
// In a cluster without certificates it does nothing: nobody needs any. Errors: NotFound
// (no such client), NoSuchVolume, Exists (it has other rights for the same use), Invalid,
// NotSupported (the metadata servers are of before).
func (s *Session) GrantFor(ctx context.Context, q wire.GrantsFor) error {
	err := s.askJSON(ctx, wire.Admin{Op: wire.AdminGrantFor}, q, nil)
	if errors.Is(err, meta.NotSupported) {
		return meta.E("grant", meta.NotSupported, q.For, errors.New("metadata servers of before make no grants for a use: upgrade them"))
	}
	return err
}

// UseGrants lists the grants that end with a use; none in a cluster without
// certificates.
func (s *Session) UseGrants(ctx context.Context) (some []UseGrant, err error) {
	var all []UseGrant
	err = s.askJSON(ctx, wire.Admin{Op: wire.AdminGrants}, nil, &all)
	if errors.Is(err, meta.NotSupported) {
		return nil, nil
	}
	for _, g := range all {
		if g.For != "" {
			some = append(some, g)
		}
	}
	return some, err
}
