package server

import (
	"context"
	"errors"
	"slices"
	"time"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/cluster"
)

// A volume can be deleted while chunk servers are away, some for good. The record that
// replaces the volume's row names every known chunk server. The owner of the root volume asks
// each of these servers, when connected, for the chunks of the volume, and deletes them, with
// replicas that no record named any more. When a complete list shows no chunk, the owner takes
// the server off the record. The record is the proof that the volume is deleted: it was
// written when the row was deleted, the cluster never reuses the id of a volume, and a record
// that can't be read proves nothing.

// knownServers lists all chunk servers ever seen, as far as this server knows.
func (sm *serverMap) knownServers() (all []meta.ServerID) {
	for _, n := range sm.cfg.Cluster.Nodes() {
		all = append(all, n.ID)
	}
	for _, x := range sm.sightings() {
		all = append(all, x.info.ID)
	}
	slices.Sort(all)
	return slices.Compact(all)
}

// sweepDeleted deletes chunks of deleted volumes, if this server owns the root volume. since
// remembers when a deleted volume was first seen here: chunks that the volume's clients were
// still writing may arrive for a while, at most RepairGrace.
func (tr *trash) sweepDeleted(since map[meta.VolumeID]time.Time) error {
	o := tr.hosted.opened(meta.RootVolume)
	if o == nil || o.await(o.ctx, o.recovered) != nil || o.quarantined() {
		return nil
	}
	ctx, cancel := context.WithTimeout(o.ctx, time.Minute)
	defer cancel()
	all, err := tr.cfg.Cluster.DeletedVolumes(ctx)
	if err != nil {
		return err
	}
	for v := range since {
		if !slices.ContainsFunc(all, func(d cluster.Deleted) bool { return d.Volume == v }) {
			delete(since, v)
		}
	}
	var errs []error
	for _, d := range all {
		// A volume restored from an older checkpoint is not deleted.
		if _, err := tr.cfg.Cluster.Volume(ctx, d.Volume); !errors.Is(err, meta.NoSuchVolume) || d.Volume == meta.RootVolume {
			errs = append(errs, err)
			continue
		}
		first, again := since[d.Volume]
		if !again {
			since[d.Volume] = time.Now()
		}
		for _, id := range d.On {
			if _, ok := tr.chunkServers.Resolve(id); !ok {
				continue // the server is away: swept when it is back
			}
			left, err := o.sweepServer(ctx, id, d.Volume)
			if err != nil {
				errs = append(errs, err)
			} else if left == 0 && again && time.Since(first) >= tr.cfg.RepairGrace {
				errs = append(errs, tr.cfg.Cluster.SweptVolume(ctx, d.Volume, id))
			}
		}
	}
	return errors.Join(errs...)
}

// sweepServer deletes the chunks that a server has of a deleted volume, files of the volume's
// checkpoints included, and returns how many it deleted.
func (o *owner) sweepServer(ctx context.Context, id meta.ServerID, v meta.VolumeID) (n int, err error) {
	var chunks []meta.ChunkID
	if err := o.srv.chunkServers.listChunks(id, v, func(c meta.ChunkID) { chunks = append(chunks, c) }); err != nil {
		return 0, err
	}
	if err := o.srv.chunkServers.listChunks(id, 0, func(c meta.ChunkID) {
		if c.Term < blobTerm && meta.VolumeID(c.Counter>>32) == v {
			chunks = append(chunks, c)
		}
	}); err != nil {
		return 0, err
	}
	for _, c := range chunks {
		if o.own.Left() <= 0 {
			return n, meta.E("collect chunks", meta.Unavailable, c.String(), errors.New("the root volume's lease is not certain now"))
		}
		call, cancel := context.WithTimeout(ctx, orderPatience)
		_, err := o.order(call, id, meta.Order{Kind: meta.OrderDelete, Chunk: c, Fence: meta.Fence{Term: 1<<64 - 1}})
		cancel()
		if err != nil && !errors.Is(err, meta.NoSuchChunk) {
			return n, err
		}
		n++
		o.srv.stats.staleDeleted.Add(1)
	}
	if n > 0 {
		o.log.Info("chunks of a deleted volume were deleted", "volume", v, "server", id, "chunks", n)
	}
	return n, nil
}
