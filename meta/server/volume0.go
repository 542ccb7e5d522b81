package server

import (
	"context"
	"errors"
	"fmt"
	"time"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/capability"
	"penstock.io/penstock/meta/cluster"
	"penstock.io/penstock/meta/namespace"
	"penstock.io/penstock/meta/placement"
)

// Volume 0 holds the system's chunks: the files of checkpoints.

// systemPolicy places chunks of volume 0 on three hosts, or on fewer if the cluster has fewer
// (rule 10).
var systemPolicy = meta.Policy{Replicas: 3, MinReplicas: 1}

// SystemGrant returns a grant to write a chunk of volume 0. Such chunks have up to three
// replicas, independent of any volume's policy (rule 10).
func (s *Server) SystemGrant(id meta.ChunkID, maxLen uint64) (meta.ChunkGrant, error) {
	servers, err := s.serverMap.place(1, &systemPolicy, placement.Writer{}, nil)
	if err != nil {
		return meta.ChunkGrant{}, err
	}
	fence := meta.Fence{Term: meta.Term(id.Term)}
	return meta.ChunkGrant{ID: id, Fence: fence, Servers: servers[0], MaxLen: maxLen,
		Cap: s.chunkServers.sign(capability.MaxLife, capability.Claims{
			Volume: id.Volume, Chunk: id, Rights: capability.Append | capability.Read, Fence: fence, MaxLen: maxLen,
			Client: s.cfg.Identity,
		})}, nil
}

// OpenAll opens the volumes that have this server as home and were not released by their last
// owners, and finishes deletions. Other volumes are opened on request.
func (hs *hosted) OpenAll(ctx context.Context) error {
	all, err := hs.cfg.Cluster.Volumes(ctx)
	if err != nil {
		return err
	}
	var errs []error
	for _, v := range all {
		if _, mine := hs.home(v.ID); !mine || v.State == cluster.VolumeCreating {
			continue // the origin's owner looks after a volume being created
		}
		if v.State == cluster.VolumeDeleting {
			if err := hs.trash.deleteVolume(ctx, v, deletion{now: true}); err != nil {
				hs.log.Warn("a volume's deletion could not be finished", "volume", v.Name, "error", err)
			}
			continue
		}
		if v.State == cluster.VolumeTrash {
			continue
		}
		h, err := hs.cfg.Cluster.Holder(ctx, v.ID)
		if err == nil && (h.Released && !h.Held && v.ID != meta.RootVolume || h.Held && h.Name != hs.cfg.Name) {
			continue
		}
		if err == nil {
			_, err = hs.open(ctx, v.ID)
		}
		// Since Volumes, another server may have opened the volume, or the volume was deleted.
		if err != nil && !errors.Is(err, meta.NotOwner) && !errors.Is(err, meta.NoSuchVolume) {
			errs = append(errs, fmt.Errorf("volume %s: %w", v.Name, err))
		}
	}
	return errors.Join(errs...)
}

// Settle waits, as long as ctx allows, until the open chunks of ended sessions are sealed.
func (hs *hosted) Settle(ctx context.Context) error {
	for _, o := range hs.owners() {
		for ctx.Err() == nil && o.ctx.Err() == nil {
			open := 0
			o.mu.Lock()
			err := namespace.AllOpenChunks(o.view(), func(c meta.ChunkRecord, _ meta.Ino) bool {
				if j := o.sessions[c.Session]; j == nil {
					open++
				}
				return true
			})
			o.mu.Unlock()
			if err != nil {
				return err
			}
			if open == 0 {
				break
			}
			select {
			case <-time.After(5 * time.Millisecond):
			case <-ctx.Done():
			}
		}
	}
	return nil
}
