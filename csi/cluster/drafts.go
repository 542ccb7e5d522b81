package cluster

import (
	"context"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/admin"
	"penstock.io/penstock/meta/client"
)

// Rename renames a volume. Errors: NoSuchVolume, VolumeExists, Invalid.
func (c *Cluster) Rename(ctx context.Context, id meta.VolumeID, name string) (Volume, error) {
	return c.one(func(api *admin.Client) (meta.VolumeInfo, error) { return api.RenameVolume(ctx, id, name) })
}

// Discard deletes an unattached, never used volume without putting it into the trash, if the
// volume still has this name. Errors: as of Delete, and Busy (the volume has another name).
func (c *Cluster) Discard(ctx context.Context, id meta.VolumeID, name string) error {
	api, err := c.administration()
	if err != nil {
		return err
	}
	return api.DiscardVolume(ctx, id, name)
}

// Dirs lists the directories in a directory of the tree, without the volumes attached in it.
// Errors: NotFound, NotDir.
func (c *Cluster) Dirs(ctx context.Context, at string) (names []string, err error) {
	err = c.with(ctx, func(s *client.Session) error {
		v, dir, err := s.Walk(ctx, at, false)
		if err != nil {
			return err
		}
		names = nil
		end := uint64(0)
		for q := (meta.ReadDir{Ino: dir, Max: 4096}); ; {
			r, err := s.Do(ctx, v, meta.OpID{}, &q, meta.LeaseNone)
			if err != nil {
				return err
			}
			if end == 0 {
				end = r.Off
			}
			for _, e := range r.Entries {
				if end != 0 && e.Cookie >= end { // the entry was added after the listing began
					return nil
				}
				if e.Type&meta.TypeMask == meta.TypeDir && e.Volume == 0 {
					names = append(names, e.Name)
				}
				q.Cookie = e.Cookie
			}
			if r.EOF || len(r.Entries) == 0 {
				return nil
			}
		}
	})
	return names, err
}
