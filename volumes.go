package penstock

import (
	"context"
	"iter"

	"penstock.io/penstock/meta"
	metaclient "penstock.io/penstock/meta/client"
	"penstock.io/penstock/meta/wire"
)

// VolumeInfo describes a volume to those who administer it; VolumeWords are what
// is kept of it beside its policy.
type (
	VolumeInfo  = metaclient.Volume
	VolumeWords = wire.VolumeWords
)

// volumeSession is what a session does about volumes; the methods' promises are
// at meta/client.
type volumeSession interface {
	Volumes(ctx context.Context) iter.Seq2[metaclient.Volume, error]
	FindVolume(ctx context.Context, name string) (metaclient.Volume, error)
	CreateVolume(ctx context.Context, name string, p meta.Policy, words wire.VolumeWords) (metaclient.Volume, error)
	SetVolume(ctx context.Context, id meta.VolumeID, p meta.Policy, words wire.VolumeWords) (metaclient.Volume, error)
	AttachVolume(ctx context.Context, id meta.VolumeID, at string, parents bool) (metaclient.Volume, error)
	DetachVolume(ctx context.Context, id meta.VolumeID) error
	RenameVolume(ctx context.Context, id meta.VolumeID, name string) (metaclient.Volume, error)
	DeleteVolume(ctx context.Context, id meta.VolumeID, now bool) error
	UndeleteVolume(ctx context.Context, id meta.VolumeID, name, as string) (metaclient.Volume, error)
}

var _ volumeSession = session{}

// Volumes administers the volumes of the cluster that a client is connected to:
// it makes, attaches, renames and deletes them. Errors beside those that methods
// name: AccessDenied (the identity is no administrator, or not of the volume),
// Unavailable.
type Volumes struct{ s volumeSession }

// Volumes gives the administration of volumes. Errors: NotSupported.
func (c *Client) Volumes() (Volumes, error) {
	s, ok := c.sess.(volumeSession)
	if !ok {
		return Volumes{}, meta.E("volumes", meta.NotSupported, "", nil)
	}
	return Volumes{s}, nil
}

// All lists the volumes by number, those in the trash and those being deleted,
// too; a page is asked for at a time.
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

// Set changes a volume's policy, of which the words that words.Only names count
// (meta.PolicyWords; nil: the policy as a whole), and the other words that are said;
// what lies elsewhere than the new policy wants is moved in the background. Who
// names the words takes back nothing that another changes at the same time. Errors:
// NoSuchVolume, Invalid, ResourceExceeded (labels), NotSupported.
func (v Volumes) Set(ctx context.Context, id meta.VolumeID, p meta.Policy, words VolumeWords) (VolumeInfo, error) {
	return v.s.SetVolume(ctx, id, p, words)
}

// Attach hangs a volume into the tree at a path whose last name must be free;
// parents makes the directories above that are missing. That it hangs there
// already is no error. Errors: Exists (the name is taken, or the volume hangs
// elsewhere), NotFound, NotDir, Invalid (it would lie below itself).
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

// Delete puts a volume that hangs nowhere into the trash for as long as its trash
// time; with now, or without a trash time, its bytes are freed at once. Errors:
// Busy (it is attached), NotEmpty (another is attached in it), NotPermitted.
func (v Volumes) Delete(ctx context.Context, id meta.VolumeID, now bool) error {
	return v.s.DeleteVolume(ctx, id, now)
}

// Undelete takes a volume out of the trash: by number, or with id 0 the one of
// the name that was deleted last. as is its new name, empty for the old one. It
// hangs nowhere then. Errors: NoSuchVolume (it is not in the trash),
// VolumeExists (another has the name by now).
func (v Volumes) Undelete(ctx context.Context, id meta.VolumeID, name, as string) (VolumeInfo, error) {
	return v.s.UndeleteVolume(ctx, id, name, as)
}
