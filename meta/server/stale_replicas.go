package server

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/namespace"
	"penstock.io/penstock/meta/placement"
)

// replicaKey names a replica.
type replicaKey struct {
	chunk  meta.ChunkID
	server meta.ServerID
}

// stale holds replicas not named by the journal: of chunks with other replicas now, or of
// chunks without a record (orphans). A server's list or a repair adds a replica. After a grace
// time the owner reads the journal anew, and deletes the replica if the journal still does not
// name the replica. A list that lacks a replica has no effect here.
type stale struct {
	k         *kernel
	repairing *repairing

	mu sync.Mutex
	m  map[replicaKey]staleSince
	// bytes of replicas that are no orphans, by server. Balancing counts these bytes as free
	// already; orphans may have to stay.
	bytes map[meta.ServerID]uint64
}

type staleSince struct {
	at     time.Time
	orphan bool
	bytes  uint64
}

// maxStale bounds the replicas in memory; a later list shows the rest.
const maxStale = 1 << 20

// add notes a replica of the given size (0: unknown).
func (s *stale) add(id meta.ChunkID, server meta.ServerID, bytes uint64, orphan bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.m == nil {
		s.m, s.bytes = map[replicaKey]staleSince{}, map[meta.ServerID]uint64{}
	}
	k := replicaKey{id, server}
	x, ok := s.m[k]
	if !ok && len(s.m) >= maxStale {
		return
	}
	if !ok {
		x.at = time.Now()
	}
	s.uncount(k)
	x.orphan, x.bytes = orphan, max(x.bytes, bytes)
	s.m[k] = x
	if !orphan {
		s.bytes[server] += x.bytes
	}
}

// uncount takes a replica's bytes off the sum. The caller holds mu.
func (s *stale) uncount(k replicaKey) {
	x, ok := s.m[k]
	if !ok || x.orphan {
		return
	}
	if s.bytes[k.server] -= x.bytes; s.bytes[k.server] == 0 {
		delete(s.bytes, k.server)
	}
}

// drop forgets a replica, and returns the replica's counted bytes (0 for an orphan).
func (s *stale) drop(k replicaKey) (bytes uint64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if x := s.m[k]; !x.orphan {
		bytes = x.bytes
	}
	s.uncount(k)
	delete(s.m, k)
	return bytes
}

// leaving adds to each server the bytes waiting for deletion.
func (s *stale) leaving(to map[meta.ServerID]*placement.Server) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for id, n := range s.bytes {
		if x := to[id]; x != nil {
			x.Leaving += n
		}
	}
}

// old lists the replicas noted at least grace ago.
func (s *stale) old(grace time.Duration) (keys []replicaKey) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for k, x := range s.m {
		if time.Since(x.at) >= grace {
			keys = append(keys, k)
		}
	}
	return keys
}

func (s *stale) count(st *RepairStatus) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, x := range s.m {
		if x.orphan {
			st.Orphans++
		} else {
			st.Extra++
		}
	}
}

// deleteStale deletes the replicas that were stale for RepairGrace.
func (s *stale) deleteStale() {
	k := s.k
	keys := s.old(k.srv.cfg.RepairGrace)
	var wg sync.WaitGroup
	slots := make(chan struct{}, 8)
	for _, key := range keys {
		if k.ctx.Err() != nil {
			break
		}
		if _, ok := k.srv.chunkServers.Resolve(key.server); !ok {
			// The server lists its replicas after its return.
			s.drop(key)
			continue
		}
		slots <- struct{}{}
		wg.Go(func() {
			defer func() { <-slots }()
			done, deleted, err := s.deleteOne(key)
			if done {
				n := s.drop(key)
				if deleted {
					k.srv.repairs.changed(key.server, 0, n)
				}
			} else if err != nil && k.ctx.Err() == nil {
				k.log.Warn("an unneeded replica could not be deleted; the owner tries again", "chunk", key.chunk, "server", key.server, "error", err)
			}
		})
	}
	wg.Wait()
}

// deleteOne deletes a replica if the journal still does not name the replica. done: no work is
// left. deleted: the replica was deleted in this call.
func (s *stale) deleteOne(key replicaKey) (done, deleted bool, err error) {
	k := s.k
	unlock, ok := k.srv.repairs.lock(s.repairing, key.chunk)
	if !ok {
		return false, false, nil
	}
	defer unlock()
	rec, err := s.repairing.chunkNow(k.ctx, key.chunk)
	orphan := errors.Is(err, meta.NoSuchChunk)
	switch {
	case orphan && k.quarantined():
		return false, false, nil // may be the last copy of a restored volume's lost data
	case orphan:
		if err := s.orphaned(key.chunk); err != nil {
			_, serr := k.order(k.ctx, key.server, meta.Order{Kind: meta.OrderStat, Chunk: key.chunk})
			return errors.Is(serr, meta.NoSuchChunk), false, err
		}
	case err != nil:
		return false, false, err
	case rec.State == meta.ChunkOpen:
		return true, false, nil // open chunks are not judged (rule 12)
	}
	if !orphan {
		if adopted, err := s.adopt(&rec, key.server); adopted || err != nil {
			return adopted, false, err
		}
	}
	ctx, cancel := context.WithTimeout(k.ctx, orderPatience)
	defer cancel()
	fence := s.repairing.fresh(rec.Fence)
	if _, err := k.order(ctx, key.server, meta.Order{Kind: meta.OrderDelete, Chunk: key.chunk, Fence: fence}); err != nil && !errors.Is(err, meta.NoSuchChunk) {
		return false, false, err
	}
	k.log.Info("an unneeded replica was deleted", "chunk", key.chunk, "server", key.server, "orphan", orphan)
	k.srv.stats.staleDeleted.Add(1)
	return true, true, nil
}

// adopt checks, before the deletion of a replica not named by a live chunk's record, whether
// the named replicas exist. Too few may exist if the record is from a checkpoint older than a
// move of the chunk. If the unnamed replica is good, adopt then adds the replica to the
// record. Errors: Corrupt if no good replica is left; errors of the orders and of the journal.
func (s *stale) adopt(rec *meta.ChunkRecord, server meta.ServerID) (adopted bool, err error) {
	k := s.k
	if slices.Contains(rec.Servers, server) {
		return true, nil
	}
	if rec.State != meta.ChunkSealed || rec.Gone() {
		return false, nil // an operator accepted the loss as final
	}
	policy, err := k.policy()
	if err != nil {
		return false, err
	}
	good := 0
	for _, id := range rec.Servers {
		if state, err := s.repairing.judge(k.ctx, rec, id); err == nil && state == placement.Good {
			good++
		}
	}
	if good >= min(int(max(policy.Replicas, 1)), len(rec.Servers)) {
		return false, nil
	}
	state, err := s.repairing.judge(k.ctx, rec, server)
	if err != nil {
		return false, err
	}
	if state != placement.Good {
		if good == 0 {
			return false, meta.E("collect chunks", meta.Corrupt, rec.ID.String(), fmt.Errorf("no good replica is left: that of server %d is kept, bad as it is", server))
		}
		return false, nil
	}
	k.log.Warn("the journal did not name a good replica that is needed; the owner added the replica", "chunk", rec.ID, "server", server, "named", rec.Servers, "good", good)
	fence := s.repairing.fresh(rec.Fence)
	if rec.CRC != 0 {
		// The server has the same content, so only the fence rises: the server then refuses
		// delete orders still on their way.
		if err := s.repairing.pull(k.ctx, rec, fence, rec.CRC, "", server, []meta.ServerID{server}); err != nil {
			return false, err
		}
	}
	return true, s.repairing.setReplicas(k.ctx, rec, append(slices.Clone(rec.Servers), server), fence)
}

// orphaned proves that a chunk without a record belongs to no file. IDs are issued only after
// their journaling (rule 4), and this owner has every entry of the journal, so the journal
// once had the chunk's record and removed the record in order. An ID beyond the journal's last
// means that the journal was set back: then nothing is deleted. Errors: Corrupt.
func (s *stale) orphaned(id meta.ChunkID) error {
	k := s.k
	k.mu.Lock()
	last, err := namespace.LastChunk(k.view())
	k.mu.Unlock()
	if err != nil {
		return err
	}
	if id.Volume != k.vol || meta.Term(id.Term) > k.own.Term() || id.Counter > last {
		return meta.E("collect chunks", meta.Corrupt, id.String(), errors.New("the journal has not given out this chunk: was it set back? nothing is deleted"))
	}
	return nil
}
