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

// Open chunks are data as sealed ones are: what was synced to them is promised, however
// idle their writers are. An inspection looks for their replicas, too, counts those that
// are missing, and ends a chunk that has lost one, or that was begun with fewer than the
// policy wants, or under another policy, where a fresh one would meet it better. Its writer hears that at its next append and
// goes on in a fresh chunk; what the old one has is then repaired as of any other.

// openChunk is how a chunk stands that is still being appended to.
type openChunk struct {
	rec *meta.ChunkRecord
	// written: something of it is promised. Of another it does not matter what became
	// of its replicas, which its writer makes when it begins.
	written  bool
	standing placement.Standing
	want     int    // replicas, by the policy
	ends     string // why it must end; "" if it may go on
	// askable: a server of its record can be asked, or all were given up, without which it
	// can't be sealed.
	askable bool
	// unmet: it lies where its policy wants no data, or a fresh chunk would meet it better.
	unmet bool
}

// openChunk judges the record of an open chunk.
func (o *owner) openChunk(rec *meta.ChunkRecord, policy *meta.Policy, m *placement.Map) openChunk {
	replicas := o.faults.replicas(rec)
	x := openChunk{rec: rec, written: o.written(rec), standing: m.Standing(replicas), want: int(max(policy.Replicas, 1))}
	x.askable = slices.ContainsFunc(rec.Servers, func(id meta.ServerID) bool {
		s, ok := m.Server(id)
		return ok && (s.State == placement.Live || s.State == placement.Draining)
	}) || !slices.ContainsFunc(rec.Servers, func(id meta.ServerID) bool { return !o.srv.neverBack(id) })
	x.ends = o.mustEnd(rec, replicas, m)
	why := ""
	switch {
	case o.srv.cfg.Unsafe.NoMeet:
	case m.Elsewhere(policy, rec.Servers):
		why = "it lies where its policy wants no data"
	case fewer(policy, rec.Servers):
		why = "it has fewer replicas than its policy allows: it was begun under another one"
	case m.Fuller(policy, rec.Servers, o.srv.suspected.of(rec.Session)):
		why = "it has fewer replicas than its policy wants, or nearer to each other, and a new chunk would be better off"
	}
	x.unmet = why != "" || m.Outside(policy, rec.Servers)
	if x.ends = cmp.Or(x.ends, why); o.srv.cfg.Unsafe.NoEnd {
		x.ends = ""
	}
	return x
}

// written reports whether the journal refers to an open chunk: then every server of its
// record has synced that much (rule 5), and one that knows nothing of the chunk lost it.
func (o *owner) written(rec *meta.ChunkRecord) bool {
	if rec.Live > 0 {
		return true
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	now, file, err := namespace.ReadChunk(&view{o: o}, rec.ID)
	return err == nil && (now.Live > 0 || file != 0)
}

// mustEnd says why an open chunk can't be gone on with where it lies; "" if it can.
func (o *owner) mustEnd(rec *meta.ChunkRecord, replicas []placement.Replica, m *placement.Map) string {
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

// judgeOpen asks a server about its replica of an open chunk that something is promised
// of.
func (o *owner) judgeOpen(ctx context.Context, rec *meta.ChunkRecord, server meta.ServerID) (placement.ReplicaState, error) {
	ctx, cancel := context.WithTimeout(ctx, orderPatience)
	defer cancel()
	_, err := o.order(ctx, server, meta.Order{Kind: meta.OrderStat, Chunk: rec.ID})
	switch k := meta.KindOf(err); {
	case err == nil:
		return placement.Good, nil
	case k == meta.NoSuchChunk, k == meta.Corrupt, k == meta.IO:
		return placement.Bad, nil
	}
	return placement.Bad, err
}

// listedOpen judges one listed replica of an open chunk; leaves is the disk that it is to
// leave, if any, other tells that its disk has another class than the policy wants.
func (o *owner) listedOpen(l *lists, server meta.ServerID, c *meta.ReplicaInfo, leaves string, other bool) {
	l.mu.Lock()
	l.seen[c.ID]++
	l.mu.Unlock()
	switch {
	case c.Err != meta.KindOK:
		o.faults.note(c.ID, fault{server: server, state: placement.Bad, corrupt: c.Err == meta.Corrupt, disk: leaves})
	case leaves != "" || other:
		o.faults.note(c.ID, fault{server: server, state: placement.Unfit, disk: leaves})
	case !o.faults.corrupt(c.ID, server):
		o.faults.clear(c.ID, server) // it is back
	}
}

// sealSome seals open chunks that must end, side by side.
func (o *owner) sealSome(chunks []openChunk) {
	var wg sync.WaitGroup
	slots := make(chan struct{}, sealsAtOnce)
	for _, x := range chunks {
		slots <- struct{}{}
		wg.Go(func() {
			defer func() { <-slots }()
			id := x.rec.ID
			rec, err := o.seal(o.ctx, id, nil)
			if errors.Is(err, meta.NoSuchChunk) {
				return // it went meanwhile
			}
			if err != nil {
				if o.ctx.Err() == nil {
					o.log.Warn("an open chunk that must end can't be sealed yet, it is tried again", "chunk", id, "why", x.ends, "error", err)
				}
				return
			}
			o.faults.sealed(&rec)
			if rec.State == meta.ChunkSealed {
				o.log.Info("an open chunk was ended, its writer goes on in another", "chunk", id, "why", x.ends, "were", x.rec.Servers, "are", rec.Servers)
				o.tasks.inspection.Wake()
			}
		})
	}
	wg.Wait()
}

// addOpen counts an open chunk. Nothing is copied before it is sealed, which takes one
// replica that can be reached.
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

// addShort counts a chunk of some bytes that has fewer replicas than it should have.
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

// addReach counts a chunk of which now none, or only one of several replicas can be
// reached, since servers are away that are waited for.
func (r *RepairStatus) addReach(s placement.Standing, want int) {
	switch {
	case s.Away == 0:
	case s.Live == 0:
		r.Unreachable++
	case s.Live == 1 && want > 1:
		r.LastReachable++
	}
}
