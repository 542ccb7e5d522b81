package server

import (
	"cmp"
	"context"
	"errors"
	"slices"
	"sync"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/namespace"
	"penstock.io/penstock/meta/placement"
)

// Open chunks are data like sealed chunks: bytes synced to a chunk are promised, however long
// its writer is idle. So an inspection looks for the replicas of open chunks, too, and counts
// the missing replicas. It ends a chunk that lost a replica, or was begun with fewer replicas
// than the policy permits, or was begun under another policy if a new chunk would meet the
// policy better. The writer gets an error at its next append and goes on in a new chunk. The
// ended chunk is then repaired like any other.

// openChunk is the state of a chunk still being appended to.
type openChunk struct {
	rec *meta.ChunkRecord
	// written: some bytes of the chunk are promised. If none are, missing replicas do not
	// matter: the writer makes the replicas when it begins.
	written  bool
	standing placement.Standing
	want     int    // replicas, by the policy
	ends     string // why the chunk must end; "" if it may go on
	// askable: a server of the record can be asked, or all are given up. Otherwise the chunk
	// can't be sealed.
	askable bool
	// unmet: the chunk lies where its policy wants no data, or a new chunk would meet the
	// policy better.
	unmet bool
}

// openChunk judges the record of an open chunk.
func (in *inspection) openChunk(rec *meta.ChunkRecord, policy *meta.Policy, m *placement.Map) openChunk {
	k := in.k
	replicas := in.faults.replicas(rec)
	x := openChunk{rec: rec, written: in.written(rec), standing: m.Standing(replicas), want: int(max(policy.Replicas, 1))}
	x.askable = slices.ContainsFunc(rec.Servers, func(id meta.ServerID) bool {
		s, ok := m.Server(id)
		return ok && (s.State == placement.Live || s.State == placement.Draining)
	}) || !slices.ContainsFunc(rec.Servers, func(id meta.ServerID) bool { return !k.srv.chunkServers.neverBack(id) })
	x.ends = in.mustEnd(rec, replicas, m)
	why := ""
	switch {
	case k.srv.cfg.Unsafe.NoMeet:
	case m.Elsewhere(policy, rec.Servers):
		why = "it lies where its policy wants no data"
	case fewer(policy, rec.Servers):
		why = "it has fewer replicas than its policy allows: it was begun under another one"
	case m.Fuller(policy, rec.Servers, k.srv.chunkServers.suspected.of(rec.Session)):
		why = "it has fewer replicas than its policy wants, or nearer to each other, and a new chunk would be better off"
	}
	x.unmet = why != "" || m.Outside(policy, rec.Servers)
	if x.ends = cmp.Or(x.ends, why); k.srv.cfg.Unsafe.NoEnd {
		x.ends = ""
	}
	return x
}

// written reports whether the journal refers to an open chunk. If so, every server of the
// record has synced the bytes (rule 5), and a server without the chunk has lost its replica.
func (in *inspection) written(rec *meta.ChunkRecord) bool {
	k := in.k
	if rec.Live > 0 {
		return true
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	now, file, err := namespace.ReadChunk(k.view(), rec.ID)
	return err == nil && (now.Live > 0 || file != 0)
}

// mustEnd returns why an open chunk can't be continued at its places; "" if it can.
func (in *inspection) mustEnd(rec *meta.ChunkRecord, replicas []placement.Replica, m *placement.Map) string {
	for _, x := range replicas {
		s, ok := m.Server(x.Server)
		switch {
		case ok && s.State == placement.Draining:
			return "it has a replica on a server that is to be emptied"
		case ok && s.State == placement.Gone:
			return "it has a replica on a server that is gone"
		case x.State == placement.Unfit:
			return "it has a replica on a disk that is to be emptied, or of another class than its policy wants"
		case x.State == placement.Bad:
			return "one of its replicas is lost or bad"
		}
	}
	return ""
}

// judgeOpen asks a server about its replica of an open chunk with promised bytes.
func (in *inspection) judgeOpen(ctx context.Context, rec *meta.ChunkRecord, server meta.ServerID) (placement.ReplicaState, error) {
	k := in.k
	ctx, cancel := context.WithTimeout(ctx, orderPatience)
	defer cancel()
	_, err := k.order(ctx, server, meta.Order{Kind: meta.OrderStat, Chunk: rec.ID})
	switch k := meta.KindOf(err); {
	case err == nil:
		return placement.Good, nil
	case k == meta.NoSuchChunk, k == meta.Corrupt, k == meta.IO:
		return placement.Bad, nil
	}
	return placement.Bad, err
}

// listedOpen notes the state of a listed replica of an open chunk. leaves is the disk to be
// emptied with the replica, if any. other: the disk has another class than the policy wants.
func (in *inspection) listedOpen(server meta.ServerID, c *meta.ReplicaInfo, leaves string, other bool) {
	switch {
	case c.Err != meta.KindOK:
		in.faults.note(c.ID, fault{server: server, state: placement.Bad, corrupt: c.Err == meta.Corrupt, disk: leaves})
	case leaves != "" || other:
		in.faults.note(c.ID, fault{server: server, state: placement.Unfit, disk: leaves})
	case !in.faults.corrupt(c.ID, server):
		in.faults.clear(c.ID, server) // the replica is back
	}
}

// sealSome seals open chunks that must end, up to sealsAtOnce at a time.
func (in *inspection) sealSome(chunks []openChunk) {
	k := in.k
	var wg sync.WaitGroup
	slots := make(chan struct{}, sealsAtOnce)
	for _, x := range chunks {
		slots <- struct{}{}
		wg.Go(func() {
			defer func() { <-slots }()
			id := x.rec.ID
			rec, err := in.sealing.seal(k.ctx, id, nil)
			if errors.Is(err, meta.NoSuchChunk) {
				return // the chunk was deleted meanwhile
			}
			if err != nil {
				if k.ctx.Err() == nil {
					k.log.Warn("an open chunk that must end can't be sealed yet; the owner tries again", "chunk", id, "why", x.ends, "error", err)
				}
				return
			}
			in.faults.sealed(&rec)
			if rec.State == meta.ChunkSealed {
				k.log.Info("an open chunk was ended; its writer goes on in a new chunk", "chunk", id, "why", x.ends, "were", x.rec.Servers, "are", rec.Servers)
				k.tasks.inspection.Wake()
			}
		})
	}
	wg.Wait()
}

// addOpen counts an open chunk. Repair copies nothing before the chunk is sealed, and a seal
// needs a replica within reach.
func (r *RepairStatus) addOpen(x *openChunk) {
	r.Open++
	for _, id := range x.rec.Servers {
		n := r.Nodes[id]
		n.Open++
		r.Nodes[id] = n
	}
	if x.standing.Away > 0 {
		r.Away++
	}
	if x.written {
		reason := placement.ShortReason(x.standing.Counted(), x.want)
		r.addShort(reason, x.rec.Live)
		r.addReach(x.standing, x.want)
		if reason != placement.None {
			return
		}
	}
	if x.unmet {
		r.Misplaced++
	}
}

// addShort counts a chunk with so many bytes that has too few replicas.
func (r *RepairStatus) addShort(why placement.Reason, bytes uint64) {
	switch why {
	case placement.Lost:
		r.Lost++
	case placement.Endangered:
		r.Endangered++
	case placement.UnderReplicate:
		r.UnderReplicated++
	default:
		return
	}
	r.ShortBytes += bytes
}

// addReach counts a chunk if none of its replicas, or only one of several wanted, can be
// reached now, because repair still waits for the servers away.
func (r *RepairStatus) addReach(s placement.Standing, want int) {
	switch {
	case s.Away == 0:
	case s.Live == 0:
		r.Unreachable++
	case s.Live == 1 && want > 1:
		r.LastReachable++
	}
}
