package penstock

import (
	"context"
	"errors"
	"slices"

	"penstock.io/penstock/meta"
)

// Location says where a run of a file's committed bytes lies.
type Location struct {
	Inline  bool // the bytes lie in the inode's record, without extents
	Extents []LocatedExtent
	EOF     bool // no extents follow
}

// LocatedExtent is a run of bytes and the chunk servers of its chunk.
type LocatedExtent struct {
	meta.Extent
	Sealed  bool
	Servers []meta.ServerID
}

// Locate returns the places of a file's bytes from an offset on, some thousand extents at a
// time; more follow unless EOF. Uncommitted bytes have no place. Errors: Invalid (not a
// regular file).
func (v *Volume) Locate(ctx context.Context, ino meta.Ino, off uint64) (Location, error) {
	ctx = context.WithValue(ctx, pastIndex{}, true) // repair may have moved chunks since the index was made
	res, _, err := v.owner.do(ctx, nil, &meta.Open{Ino: ino, Off: off}, meta.LeaseNone)
	if err != nil {
		return Location{}, err
	}
	if !res.Attr.IsRegular() {
		return Location{}, meta.E("locate", meta.Invalid, v.subject(ino), errors.New("it is no regular file"))
	}
	l := Location{Inline: res.Attr.Flags&meta.FlagInline != 0, EOF: res.EOF}
	for _, e := range res.Extents {
		x := LocatedExtent{Extent: e}
		if i := slices.IndexFunc(res.Places, func(p meta.ChunkPlace) bool { return p.ID == e.Chunk }); i >= 0 {
			x.Sealed, x.Servers = res.Places[i].Sealed, res.Places[i].Servers
		}
		l.Extents = append(l.Extents, x)
	}
	return l, nil
}
