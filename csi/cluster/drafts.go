package cluster

import (
	"context"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/client"
)

// Rename gives a volume another name. Errors: NoSuchVolume, VolumeExists, Invalid.
func (c *Cluster) Rename(ctx context.Context, id meta.VolumeID, name string) (Volume, error) {
	return c.one(ctx, func(s *client.Session) (client.Volume, error) { return s.RenameVolume(ctx, id, name) })
}

// Discard deletes a volume that hangs nowhere and that nobody ever used, past the
// trash, if it still has the name. Errors: as Delete, and Busy (it has another).
func (c *Cluster) Discard(ctx context.Context, id meta.VolumeID, name string) error {
	return c.with(ctx, func(s *client.Session) error { return s.DiscardVolume(ctx, id, name) })
}

// Dirs names the directories in a directory of the tree, without the volumes that
// hang there. Errors: NotFound, NotDir.
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
				if end != 0 && e.Cookie >= end { // it was added meanwhile
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
