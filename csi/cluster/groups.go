package cluster

import (
	"context"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/admin"
)

// Group finds a group of snapshots, of any state. Errors: NotFound.
func (c *Cluster) Group(ctx context.Context, name string) (meta.Group, error) {
	api, err := c.administration()
	if err != nil {
		return meta.Group{}, err
	}
	g, err := api.Groups.GetGroup(ctx, &admin.GetGroupRequest{Group: &admin.GroupRef{Name: name}})
	if err != nil {
		return meta.Group{}, err
	}
	return g.Record(), nil
}

// TakeGroup takes a snapshot of each volume, all as of one moment, or no snapshot. Errors:
// Exists, Busy (a group of this name is being taken), NoSuchVolume, Unavailable,
// ResourceExceeded, NotSupported.
func (c *Cluster) TakeGroup(ctx context.Context, name string, volumes []meta.VolumeID) (meta.Group, error) {
	api, err := c.administration()
	if err != nil {
		return meta.Group{}, err
	}
	g, err := api.TakeGroup(ctx, name, volumes, false)
	if err != nil {
		return meta.Group{}, err
	}
	return g.Record(), nil
}

// DeleteGroup deletes a group and its snapshots. The cluster deletes a snapshot with clones
// together with its last clone. Errors: NotFound, Busy (a snapshot is pinned, or the group is
// being taken).
func (c *Cluster) DeleteGroup(ctx context.Context, name string) error {
	api, err := c.administration()
	if err != nil {
		return err
	}
	return api.DeleteGroup(ctx, name)
}
