package operator

import (
	"context"
	"iter"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/admin"
)

// Volumes lists the volumes.
func (o *Operator) Volumes(ctx context.Context) iter.Seq2[meta.VolumeInfo, error] {
	return o.API.EachVolume(ctx, &admin.ListVolumesRequest{})
}

// FindVolume finds a volume by name.
func (o *Operator) FindVolume(ctx context.Context, name string) (meta.VolumeInfo, error) {
	return o.API.FindVolume(ctx, admin.Named(name))
}

// VolumeByID finds a volume by number.
func (o *Operator) VolumeByID(ctx context.Context, id meta.VolumeID) (meta.VolumeInfo, error) {
	return o.API.FindVolume(ctx, admin.Numbered(id))
}

// CreateVolume makes a volume.
func (o *Operator) CreateVolume(ctx context.Context, name string, p meta.Policy, words meta.VolumeWords) (meta.VolumeInfo, error) {
	return o.API.CreateVolume(ctx, name, p, words)
}

// SetVolume changes a volume.
func (o *Operator) SetVolume(ctx context.Context, id meta.VolumeID, p meta.Policy, words meta.VolumeWords) (meta.VolumeInfo, error) {
	return o.API.SetVolume(ctx, id, p, words)
}

// DeleteVolume deletes a volume.
func (o *Operator) DeleteVolume(ctx context.Context, id meta.VolumeID, now bool) error {
	return o.API.DeleteVolume(ctx, id, now)
}

// UndeleteVolume takes a volume out of the trash.
func (o *Operator) UndeleteVolume(ctx context.Context, id meta.VolumeID, name, as string) (meta.VolumeInfo, error) {
	return o.API.UndeleteVolume(ctx, id, name, as)
}

// RenameVolume gives a volume another name.
func (o *Operator) RenameVolume(ctx context.Context, id meta.VolumeID, name string) (meta.VolumeInfo, error) {
	return o.API.RenameVolume(ctx, id, name)
}

// DetachVolume takes a volume out of the tree.
func (o *Operator) DetachVolume(ctx context.Context, id meta.VolumeID) error {
	return o.API.DetachVolume(ctx, id)
}

// DiscardVolume deletes a volume of a name past the trash.
func (o *Operator) DiscardVolume(ctx context.Context, id meta.VolumeID, name string) error {
	return o.API.DiscardVolume(ctx, id, name)
}
