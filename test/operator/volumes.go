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
