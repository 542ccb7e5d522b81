package cluster

import (
	"context"
	"strconv"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/client"
)

// Clone makes a volume out of a snapshot of another or, with snapshot empty, of
// what the other is now. It begins with the other's policy. Errors: VolumeExists,
// NoSuchVolume, NoSuchSnapshot, NotSupported (volumes are attached inside).
func (c *Cluster) Clone(ctx context.Context, of meta.VolumeID, snapshot, name string) (Volume, error) {
	return c.one(ctx, func(s *client.Session) (client.Volume, error) { return s.Clone(ctx, of, snapshot, name) })
}

// Origin tells of which snapshot of a volume another one is a clone; of one that
// was taken for the clone alone the name is empty. Errors: NotFound, it is no
// clone of that volume.
func (c *Cluster) Origin(ctx context.Context, of, clone meta.VolumeID) (snapshot string, err error) {
	err = c.with(ctx, func(s *client.Session) error {
		all, err := s.Clones(ctx, of)
		if err != nil {
			return err
		}
		for _, x := range all {
			if x.ID != clone {
				continue
			}
			if !x.Implied {
				snapshot = x.Snapshot
			}
			return nil
		}
		return meta.E("find origin", meta.NotFound, strconv.Itoa(int(clone)), nil)
	})
	return snapshot, err
}
