package penstock

import (
	"context"

	"penstock.io/penstock/meta"
)

// Group describes snapshots of several volumes that show one moment.
type Group = meta.Group

// groupSession is what a session does about groups; the methods' promises are at
// meta/admin.
type groupSession interface {
	Groups(ctx context.Context) ([]meta.Group, error)
	Group(ctx context.Context, name string) (meta.Group, error)
	TakeGroup(ctx context.Context, name string, volumes []meta.VolumeID, strict bool) (meta.Group, error)
	DeleteGroup(ctx context.Context, name string) error
}

var _ groupSession = session{}

// Groups administers group snapshots: snapshots of several volumes that show one moment.
type Groups struct{ s groupSession }

// Groups gives the administration of group snapshots. Errors: NotSupported.
func (c *Client) Groups() (Groups, error) {
	s, ok := c.sess.(groupSession)
	if !ok {
		return Groups{}, meta.E("groups", meta.NotSupported, "", nil)
	}
	return Groups{s}, nil
}

// Take takes a snapshot of each of 1 to meta.MaxGroup volumes, all under one name and as of
// one moment: if a change began, in any volume, after another change was acknowledged, in any
// other volume, a group with the later change has the earlier change, too. The guarantee
// covers bytes that clients commit within a second (see Volume.TakeSnapshot); each member
// counts the files with uncommitted bytes. With strict, Take fails rather than make a group
// with such files. Take makes all snapshots or none. Changes in the volumes wait meanwhile,
// for a second at most. Errors: Exists (a group of that name, or a snapshot in one of the
// volumes), Busy (a group of that name is being taken), Invalid, NameTooLong and
// ResourceExceeded, NoSuchVolume, AccessDenied (a grant is not to administer), Unavailable
// (the volumes could not be held at one moment; or, with strict, the text names the clients
// with uncommitted bytes).
func (g Groups) Take(ctx context.Context, name string, strict bool, volumes ...*Volume) (Group, error) {
	var ids []meta.VolumeID
	for _, v := range volumes {
		if err := v.readOnly("snapshot"); err != nil {
			return Group{}, err
		}
		ids = append(ids, v.id)
		defer v.snapshots.changed()
	}
	return g.s.TakeGroup(ctx, name, ids, strict)
}

// All lists the groups by name, also those that are being taken or were given up: see
// Group.State. Errors: AccessDenied (the identity is no administrator).
func (g Groups) All(ctx context.Context) ([]Group, error) { return g.s.Groups(ctx) }

// Find returns the complete group of a name. Errors: NotFound.
func (g Groups) Find(ctx context.Context, name string) (Group, error) {
	x, err := g.s.Group(ctx, name)
	if err == nil && x.State != meta.GroupReady {
		err = meta.E("find group", meta.NotFound, name, nil)
	}
	if err != nil {
		return Group{}, err
	}
	return x, nil
}

// Delete deletes the snapshots of a group and the group's record. Snapshots deleted before
// cause no error; a snapshot needed by clones is deleted with the last clone. Errors:
// NotFound, Busy (the group is being taken, or a snapshot is pinned: other snapshots may
// already be deleted).
func (g Groups) Delete(ctx context.Context, name string) error { return g.s.DeleteGroup(ctx, name) }
