package cluster

import (
	"context"
	"strconv"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/admin"
)

// Clone makes a volume from a snapshot of volume of or, with snapshot empty, from the present
// state of volume of. The clone begins with the policy of volume of. Errors: VolumeExists,
// NoSuchVolume, NoSuchSnapshot, NotSupported (volumes are attached in volume of).
func (c *Cluster) Clone(ctx context.Context, of meta.VolumeID, snapshot, name string) (Volume, error) {
	api, err := c.administration()
	if err != nil {
		return Volume{}, err
	}
	made, err := api.Clones.CreateClone(ctx, &admin.CreateCloneRequest{Volume: admin.Numbered(of), Snapshot: snapshot, Name: name})
	if err != nil {
		return Volume{}, err
	}
	return c.Volume(ctx, meta.VolumeID(made.Id))
}

// Origin returns the name of the snapshot from which clone was made; "" if the cluster took
// the snapshot for the clone alone. of 0 stands for any volume. Errors: NotFound (clone is no
// clone of volume of).
func (c *Cluster) Origin(ctx context.Context, of, clone meta.VolumeID) (snapshot string, err error) {
	api, err := c.administration()
	if err != nil {
		return "", err
	}
	q := &admin.ListClonesRequest{}
	if of != 0 {
		q.Volume = admin.Numbered(of)
	}
	answer, err := api.Clones.ListClones(ctx, q)
	if err != nil {
		return "", err
	}
	for _, x := range answer.Clones {
		switch {
		case x.Id != uint32(clone):
		case x.Implied:
			return "", nil
		default:
			return x.Snapshot, nil
		}
	}
	return "", meta.E("find origin", meta.NotFound, strconv.Itoa(int(clone)), nil)
}
