package admin

import (
	"context"
	"errors"

	"penstock.io/penstock/meta"
)

// Calls about snapshots that take more than one request.

// TakeWhole takes a snapshot unless it would have files only as they were synced last, since
// their clients did not commit in time what they had buffered. Errors: those of
// CreateSnapshot; Unavailable (there are such files, and the text says whose, or the volume
// changes owners all the time).
func (c *Client) TakeWhole(ctx context.Context, volume *VolumeRef, name string) (*Snapshot, error) {
	for try := 1; ; try++ {
		i, err := c.Snapshots.CreateSnapshot(ctx, &CreateSnapshotRequest{Volume: volume, Name: name, Strict: true})
		if err != nil || i.Strict {
			return i, err
		}
		// An owner took it that is gone, and what that was told of clients with it. Another
		// request may do better.
		_, derr := c.Snapshots.DeleteSnapshot(ctx, &DeleteSnapshotRequest{Volume: volume, Name: name, Generation: i.Generation})
		if try == 2 || derr != nil {
			return nil, meta.E("take snapshot", meta.Unavailable, name, errors.Join(errors.New("the volume changes owners, and whether everything is in it is not known: try again"), derr))
		}
	}
}

// DeleteSnapshot deletes the snapshot that has a name now; later: although clones need it.
// Errors: NoSuchSnapshot, and those of the call of this name.
func (c *Client) DeleteSnapshot(ctx context.Context, volume *VolumeRef, name string, later bool) (*Snapshot, error) {
	i, err := c.FindSnapshot(ctx, volume, name)
	if err != nil {
		return nil, err
	}
	return c.Snapshots.DeleteSnapshot(ctx, &DeleteSnapshotRequest{Volume: volume, Name: name, Generation: i.Generation, Later: later})
}

// FindSnapshot finds the snapshot of a name; one that is being deleted if there is no newer
// one. Errors: NoSuchSnapshot, NoSuchVolume.
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

// Diff calls fn with what changed, page by page: q is the request for the first one. Errors:
// those of DiffSnapshots; Stale if fn takes longer than a minute for a page; fn's.
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

// Info says what the API tells of a snapshot in the words of package meta.
func (x *Snapshot) Info() (i meta.SnapshotInfo) {
	Hear(&i, x)
	return i
}

// Info says what the API tells of a pin in the words of package meta.
func (x *Pin) Info() (p meta.PinInfo) {
	Hear(&p, x)
	return p
}

// List says what the API tells of a volume's snapshots in the words of package meta.
func (x *ListSnapshotsResponse) List() *meta.SnapshotList {
	l := &meta.SnapshotList{Snapshots: []meta.SnapshotInfo{}}
	Hear(l, x)
	return l
}

// Use says what the API tells of what snapshots hold in the words of package meta.
func (x *SnapshotUsage) Use() *meta.SnapshotUse {
	u := &meta.SnapshotUse{Snapshots: []meta.SnapshotUseOf{}}
	Hear(u, x)
	return u
}
