package cluster

import (
	"context"
	"strconv"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/client"
)

// Clone makes a volume from a snapshot of volume of or, with snapshot empty, from the present
// state of volume of. The clone begins with the policy of volume of. Errors: VolumeExists,
// NoSuchVolume, NoSuchSnapshot, NotSupported (volumes are attached in volume of).
func (c *Cluster) Clone(ctx context.Context, of meta.VolumeID, snapshot, name string) (Volume, error) {
	return c.one(ctx, func(s *client.Session) (client.Volume, error) { return s.Clone(ctx, of, snapshot, name) })
}

// Origin returns the name of the snapshot from which clone was made; "" if the cluster took
// the snapshot for the clone alone. Errors: NotFound (clone is no clone of volume of).
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
