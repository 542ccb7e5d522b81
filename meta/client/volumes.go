package client

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"iter"
	"path"
	"strings"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/wire"
)

// Volume describes a volume.
type Volume struct {
	wire.VolumeInfo
	Detail wire.VolumeDetail
}

// volumes decodes the volumes of an answer.
func volumes(re *wire.AdminRe) ([]Volume, error) {
	all := make([]Volume, len(re.Volumes))
	for i, v := range re.Volumes {
		all[i].VolumeInfo = v
	}
	if len(all) == 0 {
		return all, nil
	}
	var details []wire.VolumeDetail
	if err := json.Unmarshal(re.Report, &details); err != nil || len(details) != len(all) {
		return nil, meta.E("admin", meta.Protocol, "details of volumes", err)
	}
	for i, d := range details {
		all[i].Detail = d
	}
	return all, nil
}

// askVolume runs a request answered with exactly one volume.
func (s *Session) askVolume(ctx context.Context, a wire.Admin, body any) (Volume, error) {
	if body != nil {
		b, err := json.Marshal(body)
		if err != nil {
			panic("client: a request is plain data: " + err.Error())
		}
		a.Body = b
	}
	re, err := s.Admin(ctx, a)
	if err != nil {
		return Volume{}, err
	}
	all, err := volumes(re)
	if err != nil {
		return Volume{}, err
	}
	if len(all) != 1 {
		return Volume{}, meta.E("find volume", meta.NoSuchVolume, a.Name, nil)
	}
	return all[0], nil
}

// volumesPage is the largest number of volumes in an answer.
const volumesPage = 1000

// Volumes lists the volumes of the cluster by number, including volumes in the trash and
// volumes being deleted. Volumes asks for one page at a time.
func (s *Session) Volumes(ctx context.Context) iter.Seq2[Volume, error] {
	return func(yield func(Volume, error) bool) {
		for after := meta.VolumeID(0); ; {
			re, err := s.Admin(ctx, wire.Admin{Op: wire.AdminVolumes, Parent: after, Ino: volumesPage})
			var page []Volume
			if err == nil {
				page, err = volumes(re)
			}
			if err != nil {
				yield(Volume{}, err)
				return
			}
			for _, v := range page {
				if !yield(v, nil) {
					return
				}
			}
			if len(page) != volumesPage {
				return
			}
			after = page[len(page)-1].ID
		}
	}
}

// FindVolume finds a volume by name. Errors: NoSuchVolume.
func (s *Session) FindVolume(ctx context.Context, name string) (Volume, error) {
	return s.askVolume(ctx, wire.Admin{Op: wire.AdminVolumeByName, Name: name}, nil)
}

// VolumeByID finds a volume by number, also a volume in the trash or being deleted. Errors:
// NoSuchVolume.
func (s *Session) VolumeByID(ctx context.Context, id meta.VolumeID) (Volume, error) {
	return s.askVolume(ctx, wire.Admin{Op: wire.AdminVolumeByName, Volume: id}, nil)
}

// CreateVolume makes a volume that is not attached. Errors: VolumeExists, Invalid,
// ResourceExceeded (volumes, labels).
func (s *Session) CreateVolume(ctx context.Context, name string, p meta.Policy, words wire.VolumeWords) (Volume, error) {
	return s.askVolume(ctx, wire.Admin{Op: wire.AdminCreateVolume, Name: name, Policy: p}, wire.VolumeCreation{Once: once(), VolumeWords: words})
}

// SetVolume changes a volume's stored settings: the policy words named in words.Only (nil: all
// policy words), and the further words that are set. Errors: NoSuchVolume, Invalid,
// ResourceExceeded (labels).
func (s *Session) SetVolume(ctx context.Context, id meta.VolumeID, p meta.Policy, words wire.VolumeWords) (Volume, error) {
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
func (s *Session) AttachVolume(ctx context.Context, id meta.VolumeID, at string, parents bool) (Volume, error) {
	at = path.Clean("/" + at)
	if at == "/" {
		return Volume{}, meta.E("attach", meta.Invalid, at, errors.New("the root volume is there"))
	}
	parent, dir, err := s.Walk(ctx, path.Dir(at), parents)
	if err != nil {
		return Volume{}, err
	}
	return s.askVolume(ctx, wire.Admin{Op: wire.AdminAttach, Volume: id, Parent: parent, Ino: dir, Entry: path.Base(at)}, once())
}

// DetachVolume removes a volume's junction. Errors: NotAttached, NoSuchVolume.
func (s *Session) DetachVolume(ctx context.Context, id meta.VolumeID) error {
	return s.askJSON(ctx, wire.Admin{Op: wire.AdminDetach, Volume: id}, once(), nil)
}

// RenameVolume gives a volume another name. Errors: VolumeExists, Invalid,
// NotPermitted (the root volume).
func (s *Session) RenameVolume(ctx context.Context, id meta.VolumeID, name string) (Volume, error) {
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
func (s *Session) UndeleteVolume(ctx context.Context, id meta.VolumeID, name, as string) (Volume, error) {
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
