package client

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/wire"
)

// LookUpVolume finds a volume that the session is to use, by number or, if id is 0, by name. Errors:
// NoSuchVolume.
func (s *Session) LookUpVolume(ctx context.Context, id meta.VolumeID, name string) (wire.VolumeInfo, error) {
	re, err := s.Admin(ctx, wire.Admin{Op: wire.AdminVolumeByName, Volume: id, Name: name})
	if err != nil {
		return wire.VolumeInfo{}, err
	}
	if len(re.Volumes) != 1 {
		return wire.VolumeInfo{}, meta.E("find volume", meta.NoSuchVolume, name, nil)
	}
	return re.Volumes[0], nil
}

// Walk follows a path from the root volume, through junctions, to a directory; with mkdir it
// makes missing directories with mode 0755. Walk does not follow symbolic links. Errors:
// NotFound, NotDir, AccessDenied.
func (s *Session) Walk(ctx context.Context, at string, mkdir bool) (meta.VolumeID, meta.Ino, error) {
	v, ino := meta.RootVolume, meta.RootIno
	for name := range strings.FieldsFuncSeq(at, func(r rune) bool { return r == '/' }) {
		r, err := s.Do(ctx, v, meta.OpID{}, &meta.Lookup{Parent: ino, Name: name}, meta.LeaseNone)
		if mkdir && errors.Is(err, meta.NotFound) {
			r, err = s.Do(ctx, v, meta.OpID{}, &meta.Create{Parent: ino, Name: name, Mode: meta.TypeDir | 0o755, Excl: true}, meta.LeaseNone)
			if errors.Is(err, meta.Exists) { // somebody else did
				r, err = s.Do(ctx, v, meta.OpID{}, &meta.Lookup{Parent: ino, Name: name}, meta.LeaseNone)
			}
		}
		if err != nil {
			return 0, 0, fmt.Errorf("%s: %w", at, err)
		}
		switch {
		case r.Volume != 0:
			v, ino = r.Volume, meta.RootIno
		case !r.Attr.IsDir():
			return 0, 0, meta.E("walk", meta.NotDir, at, fmt.Errorf("%q is no directory", name))
		default:
			ino = r.Attr.Ino
		}
	}
	return v, ino, nil
}
