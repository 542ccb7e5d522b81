package client

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"path"
	"strings"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/wire"
)

// volumes decodes the volumes of an answer.
func volumes(re *wire.AdminRe) ([]meta.VolumeInfo, error) {
	var all []meta.VolumeInfo
	if err := json.Unmarshal(re.Report, &all); err != nil || len(all) != len(re.Volumes) {
		return nil, meta.E("admin", meta.Protocol, "descriptions of volumes", err)
	}
	for i, v := range re.Volumes {
		all[i].Path = v.Path
	}
	return all, nil
}

// askVolume runs a request answered with exactly one volume.
func (s *Session) askVolume(ctx context.Context, a wire.Admin, body any) (meta.VolumeInfo, error) {
	if body != nil {
		b, err := json.Marshal(body)
		if err != nil {
			panic("client: a request is plain data: " + err.Error())
		}
		a.Body = b
	}
	re, err := s.Admin(ctx, a)
	if err != nil {
		return meta.VolumeInfo{}, err
	}
	all, err := volumes(re)
	if err != nil {
		return meta.VolumeInfo{}, err
	}
	if len(all) != 1 {
		return meta.VolumeInfo{}, meta.E("find volume", meta.NoSuchVolume, a.Name, nil)
	}
	return all[0], nil
}

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

// CreateVolume makes a volume that is not attached. Errors: VolumeExists, Invalid,
// ResourceExceeded (volumes, labels).
func (s *Session) CreateVolume(ctx context.Context, name string, p meta.Policy, words wire.VolumeWords) (meta.VolumeInfo, error) {
	return s.askVolume(ctx, wire.Admin{Op: wire.AdminCreateVolume, Name: name, Policy: p}, wire.VolumeCreation{Once: once(), VolumeWords: words})
}

// SetVolume changes a volume's stored settings: the policy words named in words.Only (nil: all
// policy words), and the further words that are set. Errors: NoSuchVolume, Invalid,
// ResourceExceeded (labels).
func (s *Session) SetVolume(ctx context.Context, id meta.VolumeID, p meta.Policy, words wire.VolumeWords) (meta.VolumeInfo, error) {
	return s.askVolume(ctx, wire.Admin{Op: wire.AdminSetPolicy, Volume: id, Policy: p}, body(words))
}

func body(w wire.VolumeWords) any {
	if w.Empty() {
		return nil
	}
	return w
}

// AttachVolume attaches a volume at a path of the tree; with parents it makes missing
// directories above the path. A volume already attached at the path is no error. Errors:
// Exists (the name is taken, or the volume is attached elsewhere), NotFound, NotDir, Invalid.
func (s *Session) AttachVolume(ctx context.Context, id meta.VolumeID, at string, parents bool) (meta.VolumeInfo, error) {
	at = path.Clean("/" + at)
	if at == "/" {
		return meta.VolumeInfo{}, meta.E("attach", meta.Invalid, at, errors.New("the root volume is there"))
	}
	parent, dir, err := s.Walk(ctx, path.Dir(at), parents)
	if err != nil {
		return meta.VolumeInfo{}, err
	}
	return s.askVolume(ctx, wire.Admin{Op: wire.AdminAttach, Volume: id, Parent: parent, Ino: dir, Entry: path.Base(at)}, once())
}

// DetachVolume removes a volume's junction. Errors: NotAttached, NoSuchVolume.
func (s *Session) DetachVolume(ctx context.Context, id meta.VolumeID) error {
	return s.askJSON(ctx, wire.Admin{Op: wire.AdminDetach, Volume: id}, once(), nil)
}

// RenameVolume gives a volume another name. Errors: VolumeExists, Invalid,
// NotPermitted (the root volume).
func (s *Session) RenameVolume(ctx context.Context, id meta.VolumeID, name string) (meta.VolumeInfo, error) {
	return s.askVolume(ctx, wire.Admin{Op: wire.AdminRenameVolume, Volume: id, Entry: name}, once())
}

// DeleteVolume puts an unattached volume into the trash for the volume's trash time. With now,
// or without a trash time, the volume is deleted at once. Errors: Busy (the volume is
// attached), NotEmpty (another volume is attached in it), NotPermitted.
func (s *Session) DeleteVolume(ctx context.Context, id meta.VolumeID, now bool) error {
	return s.deleteVolume(ctx, id, wire.VolumeDeletion{Now: now})
}

func (s *Session) deleteVolume(ctx context.Context, id meta.VolumeID, q wire.VolumeDeletion) error {
	q.Once = once()
	b, err := json.Marshal(q)
	if err != nil {
		panic("client: a request is plain data: " + err.Error())
	}
	_, again, err := s.adminAgain(ctx, wire.Admin{Op: wire.AdminDeleteVolume, Volume: id, Body: b})
	if again && errors.Is(err, meta.NoSuchVolume) {
		return nil // numbers are never reused: the volume is gone, together with the record of our request
	}
	return err
}

// DiscardVolume deletes an unattached volume without the trash, if the volume still has the
// name at that moment. Errors: as DeleteVolume, and Busy (the volume has another name).
func (s *Session) DiscardVolume(ctx context.Context, id meta.VolumeID, name string) error {
	return s.deleteVolume(ctx, id, wire.VolumeDeletion{Now: true, Name: name})
}

// UndeleteVolume takes a volume out of the trash: by number or, if id is 0, the volume of the
// name that was deleted last. as is the new name; empty keeps the old name. Errors:
// NoSuchVolume (the volume is not in the trash), VolumeExists.
func (s *Session) UndeleteVolume(ctx context.Context, id meta.VolumeID, name, as string) (meta.VolumeInfo, error) {
	return s.askVolume(ctx, wire.Admin{Op: wire.AdminUndeleteVolume, Volume: id, Name: name, Entry: as}, once())
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
