package cluster

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"time"
)

// replace gives the disk of a chunk server up, waits until the disk's chunks lie elsewhere, and
// puts an empty disk in its place.
func (n *nemesis) replace(ctx context.Context, r *rand.Rand) (string, func(context.Context) error, error) {
	by, err := n.c.ByID(ctx)
	if err != nil || len(by) == 0 {
		return "", nil, errNothing // nobody to ask just now
	}
	server := some(r, slices.Sorted(maps.Keys(by)))
	m := by[server]
	out, err := n.asked(ctx, "disk", "list", "--node", fmt.Sprint(server), "--output", "json")
	if err != nil {
		return "", nil, err
	}
	var disks []struct {
		ID string `json:"id"`
	}
	if err := json.Unmarshal(out, &disks); err != nil || len(disks) != 1 {
		return "", nil, errNothing // the disk went meanwhile
	}
	id := disks[0].ID
	_, err = n.asked(ctx, "disk", "fail", id, "--yes")
	return m.Name, func(ctx context.Context) error {
		if err := n.emptied(ctx, server); err != nil {
			return err
		}
		// The first call makes the server let go of the old disk, and then reports that the disk
		// is not empty.
		_, _ = n.c.Penstock(ctx, "disk", "replace", id, "--yes")
		if _, err := n.c.Penstock(ctx, "disk", "replace", id, "--yes"); err == nil {
			return fmt.Errorf("a disk that is not empty took the place of disk %s", id)
		}
		if err := empty(filepath.Join(m.disk.At, "d0")); err != nil {
			return err
		}
		_, err := n.asked(ctx, "disk", "replace", id, "--yes")
		return err
	}, err
}

// emptied waits until every metadata server reports a chunk server empty, twice, since a volume
// may be between two metadata servers.
func (n *nemesis) emptied(ctx context.Context, server uint64) error {
	times := 0
	return eventually(ctx, 3*time.Minute, func(ctx context.Context) error {
		// With standard error, where the command names silent servers.
		out, err := n.c.admin.Run(ctx, n.c.cfg.Penstock, append([]string{"node", "list", "--output", "json", "--cluster", n.c.metaAddrs()}, n.c.creds.flags(admin)...)...)
		var nodes []struct {
			ID     uint64 `json:"id"`
			Chunks uint64 `json:"chunks"`
			Open   uint64 `json:"open_chunks"`
		}
		if err = errors.Join(err, json.Unmarshal(out, &nodes)); err != nil {
			times = 0
			return fmt.Errorf("penstock node list: %w\n%s", err, out)
		}
		for _, node := range nodes {
			if node.ID == server && node.Chunks+node.Open > 0 {
				times = 0
				return fmt.Errorf("server %d still has %d chunks and %d open ones on a disk that was given up", server, node.Chunks, node.Open)
			}
		}
		if times++; times < 2 {
			return errors.New("once more")
		}
		return nil
	})
}

// empty removes everything in a directory.
func empty(dir string) error {
	entries, err := os.ReadDir(dir)
	for _, e := range entries {
		err = errors.Join(err, os.RemoveAll(filepath.Join(dir, e.Name())))
	}
	return err
}
