package cluster

import (
	"context"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/client"
)

// Group finds a group of snapshots, of any state. Errors: NotFound.
func (c *Cluster) Group(ctx context.Context, name string) (g meta.Group, err error) {
	err = c.with(ctx, func(s *client.Session) error {
		g, err = s.Group(ctx, name)
		return err
	})
	return g, err
}

// TakeGroup takes a snapshot of each volume, all as of one moment, or no snapshot. Errors:
// Exists, Busy (a group of this name is being taken), NoSuchVolume, Unavailable,
// ResourceExceeded, NotSupported.
func (c *Cluster) TakeGroup(ctx context.Context, name string, volumes []meta.VolumeID) (g meta.Group, err error) {
	err = c.with(ctx, func(s *client.Session) error {
		g, err = s.TakeGroup(ctx, name, volumes, false)
		return err
	})
	return g, err
}

// DeleteGroup deletes a group and its snapshots. The cluster deletes a snapshot with clones
// together with its last clone. Errors: NotFound, Busy (a snapshot is pinned, or the group is
// being taken).
func (c *Cluster) DeleteGroup(ctx context.Context, name string) error {
	return c.with(ctx, func(s *client.Session) error { return s.DeleteGroup(ctx, name) })
}
