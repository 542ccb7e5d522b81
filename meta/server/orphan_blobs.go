package server

import (
	"context"
	"errors"
	"slices"
	"time"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/cluster"
	"penstock.io/penstock/meta/placement"
)

// Chunks of volume 0 are the files of checkpoints. No chunk record names them: the checkpoint
// named in a volume's journal lists its chunks. A crash while a checkpoint is made, or while
// an old checkpoint is deleted, leaks chunks.
//
// A chunk's id contains the volume, and the term in which the chunk was made. The volume's
// owner takes a chunk as leaked if no checkpoint is being made, the checkpoint named in the
// journal does not have the chunk (its manifest was read without error), no reader can be
// loading an older checkpoint, and all this was so twice, a grace time apart. Ids of older
// programs contain no volume: for such chunks, the owner of the root volume reads the journals
// of all volumes.

// DefaultLeakGrace is how long a chunk with an unknown writer is kept: longer than a
// checkpoint may take.
const DefaultLeakGrace = maxCheckpoint + 10*time.Minute

// blobTerm is the least number that older programs wrote in the place of the term: the time.
// No volume changes its owner so often.
const blobTerm = 1 << 30

// leaks maps the chunks of volume 0 that seem leaked to the time of the first such finding.
type leaks map[replicaKey]time.Time

// orphanBlobs finds and deletes chunks that no volume and no checkpoint names.
type orphanBlobs struct {
	*process
	chunkServers *chunkServers
	hosted       *hosted
	serverMap    *serverMap
	trash        *trash
}

// leakLoop looks for leaked chunks of volume 0.
func (ob *orphanBlobs) leakLoop() {
	found, swept := leaks{}, map[meta.VolumeID]time.Time{}
	t := time.NewTicker(min(ob.cfg.ListInterval, max(ob.cfg.RepairGrace, ob.cfg.RepairInterval)))
	defer t.Stop()
	for {
		select {
		case <-ob.ctx.Done():
			return
		case <-t.C:
		}
		ob.collectLeaks(found)
		if err := ob.trash.sweepDeleted(swept); err != nil && ob.ctx.Err() == nil {
			ob.log.Info("chunks of deleted volumes can't be collected now", "error", err)
		}
	}
}

func (ob *orphanBlobs) collectLeaks(found leaks) {
	byVolume := map[meta.VolumeID][]replicaKey{}
	seen := map[replicaKey]bool{}
	for _, x := range ob.serverMap.servers().Servers() {
		if x.State != placement.Live && x.State != placement.Draining {
			continue
		}
		if err := ob.chunkServers.listChunks(x.ID, 0, func(id meta.ChunkID) {
			k := replicaKey{id, x.ID}
			seen[k] = true
			of := meta.VolumeID(id.Counter >> 32)
			if id.Term >= blobTerm {
				of = meta.RootVolume
			}
			byVolume[of] = append(byVolume[of], k)
		}); err != nil && ob.ctx.Err() == nil {
			ob.log.Warn("a chunk server's checkpoint chunks could not be listed", "server", x.ID, "error", err)
		}
	}
	for _, o := range ob.hosted.owners() {
		if keys := byVolume[o.vol]; len(keys) > 0 {
			if err := o.judgeBlobs(keys, found); err != nil && o.ctx.Err() == nil {
				o.log.Warn("whether checkpoint chunks are leaked can't be told now", "chunks", len(keys), "error", err)
			}
		}
	}
	for k := range found {
		if !seen[k] {
			delete(found, k)
		}
	}
}

// judgeBlobs deletes the chunks among keys that have been leaked for the grace time.
func (o *owner) judgeBlobs(keys []replicaKey, found leaks) error {
	if !o.checkpoints.one.TryLock() {
		return nil // a checkpoint is being made, and its chunks are not named yet
	}
	defer o.checkpoints.one.Unlock()
	if o.await(o.ctx, o.recovered) != nil || o.quarantined() {
		return nil
	}
	ctx, cancel := context.WithTimeout(o.ctx, time.Minute)
	defer cancel()
	named := map[meta.ChunkID]bool{}
	if err := o.namedBlobs(ctx, o.j, named); err != nil {
		return err
	}
	o.checkpoints.addNamed(named)
	unsigned := false
	for _, k := range keys {
		unsigned = unsigned || k.chunk.Term >= blobTerm && !named[k.chunk]
	}
	if unsigned {
		if err := o.srv.allNamed(ctx, o, named); err != nil {
			return err
		}
	}
	// A failed deletion on a server does not stop the deletions on other servers.
	var errs []error
	for _, k := range keys {
		if named[k.chunk] || k.chunk.Term < blobTerm && meta.Term(k.chunk.Term) > o.own.Term() {
			delete(found, k)
			continue
		}
		since, again := found[k]
		grace := o.srv.cfg.RepairGrace
		if k.chunk.Term >= blobTerm {
			grace = max(grace, o.srv.cfg.LeakGrace)
		}
		switch {
		case !again:
			found[k] = time.Now()
		case time.Since(since) < grace:
		case o.own.Left() <= 0:
			errs = append(errs, meta.E("collect checkpoint chunks", meta.Unavailable, "", errors.New("the volume's lease is not certain now")))
			return errors.Join(errs...)
		default:
			call, cancel := context.WithTimeout(ctx, orderPatience)
			_, err := o.order(call, k.server, meta.Order{Kind: meta.OrderDelete, Chunk: k.chunk, Fence: meta.Fence{Term: 1<<64 - 1}})
			cancel()
			if err != nil && !errors.Is(err, meta.NoSuchChunk) {
				errs = append(errs, err)
				continue
			}
			delete(found, k)
			o.srv.stats.staleDeleted.Add(1)
			o.log.Info("a leaked chunk of a checkpoint was deleted", "chunk", k.chunk, "server", k.server)
		}
	}
	return errors.Join(errs...)
}

// namedBlobs adds the chunks of a volume's recorded checkpoint to named. Errors: Unavailable
// (a reader may be loading an older checkpoint), and errors of reading.
func (o *owner) namedBlobs(ctx context.Context, j Journal, named map[meta.ChunkID]bool) error {
	cp, have, err := j.Checkpoint(ctx)
	if err != nil {
		return err
	}
	if pin, pinned, err := j.OldestPin(ctx); err != nil {
		return err
	} else if pinned && (!have || pin <= cp.Seq) {
		// A pin at the checkpoint's own entry counts, too: a checkpoint that lost replicas is
		// stored again at the same entry.
		return meta.E("collect checkpoint chunks", meta.Unavailable, "", errors.New("a reader may be loading an older checkpoint"))
	}
	if !have {
		return nil
	}
	full, err := LoadManifest(ctx, o.srv.cfg.Blob, cp)
	if err != nil {
		return err
	}
	addParts(named, blobsOf(full))
	return nil
}

func addParts(named map[meta.ChunkID]bool, refs []meta.BlobRef) {
	for _, r := range refs {
		for _, p := range r.Parts {
			named[p.Chunk] = true
		}
	}
}

// allNamed adds the chunks of every other volume's checkpoint to named. Volumes being deleted
// count, too: a server continuing the deletion may have to load the checkpoint.
func (s *Server) allNamed(ctx context.Context, o *owner, named map[meta.ChunkID]bool) error {
	all, err := s.cfg.Cluster.Volumes(ctx)
	if err != nil {
		return err
	}
	for _, v := range all {
		if v.ID == o.vol {
			continue
		}
		j, err := s.cfg.Cluster.Follow(ctx, v.ID)
		if err != nil {
			return err
		}
		if err := o.namedBlobs(ctx, j, named); err != nil {
			return err
		}
	}
	return nil
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
