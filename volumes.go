package penstock

import (
	"context"
	"iter"

	"penstock.io/penstock/meta"
)

// VolumeInfo describes a volume to an administrator; VolumeWords are the recorded properties
// of a volume beside its policy.
type (
	VolumeInfo  = meta.VolumeInfo
	VolumeWords = meta.VolumeWords
)

// volumeSession is what a session does about volumes; the methods' promises are
// at meta/admin.
type volumeSession interface {
	Volumes(ctx context.Context) iter.Seq2[meta.VolumeInfo, error]
	FindVolume(ctx context.Context, name string) (meta.VolumeInfo, error)
	CreateVolume(ctx context.Context, name string, p meta.Policy, words meta.VolumeWords) (meta.VolumeInfo, error)
	SetVolume(ctx context.Context, id meta.VolumeID, p meta.Policy, words meta.VolumeWords) (meta.VolumeInfo, error)
	AttachVolume(ctx context.Context, id meta.VolumeID, at string, parents bool) (meta.VolumeInfo, error)
	DetachVolume(ctx context.Context, id meta.VolumeID) error
	RenameVolume(ctx context.Context, id meta.VolumeID, name string) (meta.VolumeInfo, error)
	DeleteVolume(ctx context.Context, id meta.VolumeID, now bool) error
	UndeleteVolume(ctx context.Context, id meta.VolumeID, name, as string) (meta.VolumeInfo, error)
}

var _ volumeSession = session{}

// Volumes administers the volumes of the client's cluster: it makes, attaches, renames and
// deletes volumes. Each method can also return AccessDenied (the identity is no administrator,
// or not of the volume) and Unavailable.
type Volumes struct{ s volumeSession }

// Volumes gives the administration of volumes. Errors: NotSupported.
func (c *Client) Volumes() (Volumes, error) {
	s, ok := c.sess.(volumeSession)
	if !ok {
		return Volumes{}, meta.E("volumes", meta.NotSupported, "", nil)
	}
	return Volumes{s}, nil
}

// All lists the volumes by number, including volumes in the trash or being deleted. It
// requests one page at a time.
func (v Volumes) All(ctx context.Context) iter.Seq2[VolumeInfo, error] { return v.s.Volumes(ctx) }

// Find finds a volume by name. Errors: NoSuchVolume.
func (v Volumes) Find(ctx context.Context, name string) (VolumeInfo, error) {
	return v.s.FindVolume(ctx, name)
}

// Create makes a volume that hangs nowhere. Its name is text of 1 to 255 bytes without
// '/', '@', ':' and control characters, and not "." or "..". Errors: VolumeExists, Invalid,
// ResourceExceeded.
func (v Volumes) Create(ctx context.Context, name string, p meta.Policy, words VolumeWords) (VolumeInfo, error) {
	return v.s.CreateVolume(ctx, name, p, words)
}

// Set changes the words of a volume's policy that words.Only names (meta.PolicyWords; nil: the
// whole policy), and the properties set in words. Data not placed as the new policy demands
// moves in the background. A caller that names words does not undo another caller's concurrent
// change of other words. Errors: NoSuchVolume, Invalid, ResourceExceeded (labels),
// NotSupported.
func (v Volumes) Set(ctx context.Context, id meta.VolumeID, p meta.Policy, words VolumeWords) (VolumeInfo, error) {
	return v.s.SetVolume(ctx, id, p, words)
}

// Attach attaches a volume to the tree at a path whose last name must be free. With parents,
// Attach makes missing parent directories. A volume attached at the path already is no error.
// Errors: Exists (the name is taken, or the volume is attached elsewhere), NotFound, NotDir,
// Invalid (the volume would lie below itself).
func (v Volumes) Attach(ctx context.Context, id meta.VolumeID, path string, parents bool) (VolumeInfo, error) {
	return v.s.AttachVolume(ctx, id, path, parents)
}

// Detach takes a volume out of the tree; its files stay. Errors: NotAttached.
func (v Volumes) Detach(ctx context.Context, id meta.VolumeID) error {
	return v.s.DetachVolume(ctx, id)
}

// Rename gives a volume another name; where it hangs is not changed. Errors:
// VolumeExists, Invalid, NotPermitted (the root volume).
func (v Volumes) Rename(ctx context.Context, id meta.VolumeID, name string) (VolumeInfo, error) {
	return v.s.RenameVolume(ctx, id, name)
}

// Delete moves a detached volume into the trash for the volume's trash time. With now, or
// without a trash time, the volume's bytes are freed at once. Errors: Busy (the volume is
// attached), NotEmpty (another volume is attached in it), NotPermitted.
func (v Volumes) Delete(ctx context.Context, id meta.VolumeID, now bool) error {
	return v.s.DeleteVolume(ctx, id, now)
}

// Undelete takes a volume out of the trash: by number, or, with id 0, the last deleted volume
// of the name. as is the volume's new name; empty: the old name. The volume is then detached.
// Errors: NoSuchVolume (the volume is not in the trash), VolumeExists (another volume has the
// name by now).
func (v Volumes) Undelete(ctx context.Context, id meta.VolumeID, name, as string) (VolumeInfo, error) {
	return v.s.UndeleteVolume(ctx, id, name, as)
}
