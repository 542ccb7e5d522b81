package admin

import (
	"context"
	"errors"

	"penstock.io/penstock/meta"
)

// Calls about snapshots that take several requests.

// TakeWhole takes a snapshot, but fails if the snapshot would hold a file only as of its last
// sync because a client did not commit its buffered bytes in time. Errors: as of
// CreateSnapshot; Unavailable (a file is incomplete, and the text names the clients; or the
// volume keeps changing owners).
func (c *Client) TakeWhole(ctx context.Context, volume *VolumeRef, name string) (*Snapshot, error) {
	for try := 1; ; try++ {
		i, err := c.Snapshots.CreateSnapshot(ctx, &CreateSnapshotRequest{Volume: volume, Name: name, Strict: true})
		if err != nil || i.Strict {
			return i, err
		}
		// The owner that took the snapshot is gone, and with the owner its knowledge of the
		// clients' commits. A second request may succeed.
		_, derr := c.Snapshots.DeleteSnapshot(ctx, &DeleteSnapshotRequest{Volume: volume, Name: name, Generation: i.Generation})
		if try == 2 || derr != nil {
			return nil, meta.E("take snapshot", meta.Unavailable, name, errors.Join(errors.New("the volume changes owners, and whether everything is in it is not known: try again"), derr))
		}
	}
}

// DeleteSnapshot deletes the snapshot that has the name now. later: delete the snapshot even
// if clones need it. Errors: NoSuchSnapshot, and the errors of the API's DeleteSnapshot.
func (c *Client) DeleteSnapshot(ctx context.Context, volume *VolumeRef, name string, later bool) (*Snapshot, error) {
	i, err := c.FindSnapshot(ctx, volume, name)
	if err != nil {
		return nil, err
	}
	return c.Snapshots.DeleteSnapshot(ctx, &DeleteSnapshotRequest{Volume: volume, Name: name, Generation: i.Generation, Later: later})
}

// FindSnapshot finds a snapshot by name. It returns a snapshot being deleted only if no other
// snapshot has the name. Errors: NoSuchSnapshot, NoSuchVolume.
func (c *Client) FindSnapshot(ctx context.Context, volume *VolumeRef, name string) (*Snapshot, error) {
	l, err := c.Snapshots.ListSnapshots(ctx, &ListSnapshotsRequest{Volume: volume, Name: name})
	if err != nil {
		return nil, err
	}
	var found *Snapshot
	for _, i := range l.Snapshots {
		if found == nil || i.State != SnapshotState_SNAPSHOT_DELETING {
			found = i
		}
	}
	if found == nil {
		return nil, meta.E("find snapshot", meta.NoSuchSnapshot, name, nil)
	}
	return found, nil
}

// Diff calls fn with each change, page by page; q requests the first page. Diff modifies q.
// Errors: as of DiffSnapshots; Stale if fn takes longer than a minute for a page; the errors
// of fn.
func (c *Client) Diff(ctx context.Context, q *DiffSnapshotsRequest, fn func(meta.Change) error) error {
	for {
		page, err := c.Snapshots.DiffSnapshots(ctx, q)
		if err != nil {
			return err
		}
		for _, x := range page.Changes {
			if err := fn(meta.Change{Kind: meta.ChangeKind(x.Kind), Path: string(x.Path), From: string(x.From), Ino: meta.Ino(x.Inode), Type: x.Type, Content: x.Content}); err != nil {
				return err
			}
		}
		if page.NextPageToken == "" {
			return nil
		}
		q.PageToken = page.NextPageToken
	}
}

// Info translates a snapshot to package meta.
func (x *Snapshot) Info() (i meta.SnapshotInfo) {
	Hear(&i, x)
	return i
}

// Info translates a pin to package meta.
func (x *Pin) Info() (p meta.PinInfo) {
	Hear(&p, x)
	return p
}

// List translates a volume's snapshots to package meta.
func (x *ListSnapshotsResponse) List() *meta.SnapshotList {
	l := &meta.SnapshotList{Snapshots: []meta.SnapshotInfo{}}
	Hear(l, x)
	return l
}

// Use translates the space used by snapshots to package meta.
func (x *SnapshotUsage) Use() *meta.SnapshotUse {
	u := &meta.SnapshotUse{Snapshots: []meta.SnapshotUseOf{}}
	Hear(u, x)
	return u
}
