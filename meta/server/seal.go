package server

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/namespace"
	"penstock.io/penstock/meta/replica"
	"penstock.io/penstock/meta/wire"
)

const (
	// sealWait is how long a seal waits for other replicas once one has answered,
	// sealLimit how long for the first: to freeze may mean to sync much. Who is
	// stopped, cut off or not there is left out: the chunk then has a replica
	// fewer until repair copied it.
	sealWait  = time.Second
	sealLimit = 5 * time.Second
	// sealsAtOnce bounds the abandoned chunks that are sealed side by side.
	sealsAtOnce = 16
)

func (o *owner) serveSeal(s *session, id uint64, m *wire.Seal) {
	s.wg.Go(func() {
		var need *uint64
		if m.Asked {
			need = &m.Need
		}
		rec, err := o.seal(s.ctx, m.Chunk, need)
		re := &wire.Reply{Status: wire.StatusOf(err)}
		if err == nil {
			re.Result.Chunks = []meta.ChunkRecord{rec}
		}
		s.enqueue(id, re)
		s.flush()
	})
}

// answered is what came of one order of several.
type answered struct {
	meta.OrderResult
	err error
}

// orderAll gives the same order to several servers at the same time and waits
// a bounded time for each; one whose stream is just coming back is waited for,
// too.
func (o *owner) orderAll(ctx context.Context, servers []meta.ServerID, or meta.Order) []answered {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	late := func() { cancel(errors.New("no answer in time")) }
	defer time.AfterFunc(sealLimit, late).Stop()
	var first sync.Once
	out := make([]answered, len(servers))
	var wg sync.WaitGroup
	for i, id := range servers {
		wg.Go(func() {
			for {
				out[i].OrderResult, out[i].err = o.order(ctx, id, or)
				if !errors.Is(out[i].err, meta.Unavailable) {
					first.Do(func() { time.AfterFunc(sealWait, late) })
					return
				}
				if ctx.Err() != nil || o.srv.neverBack(id) {
					return
				}
				select {
				case <-ctx.Done():
					return
				case <-time.After(20 * time.Millisecond):
				}
			}
		})
	}
	wg.Wait()
	return out
}

// seal ends a chunk (rule 5): freeze the reachable replicas at a higher fence,
// take a length that verifies on them, journal it with the replicas that have
// it, and only then cut them there. It waits while no replica can tell. need,
// if its writer asks, is how far the chunk was acknowledged; what lies beyond is
// sent again elsewhere.
func (o *owner) seal(ctx context.Context, id meta.ChunkID, need *uint64) (meta.ChunkRecord, error) {
	for {
		o.mu.Lock()
		rec, file, err := namespace.ReadChunk(&view{o: o}, id)
		o.mu.Unlock()
		if err != nil {
			return rec, err
		}
		if rec.State != meta.ChunkOpen {
			return rec, nil
		}
		fence := o.sealFence(&rec)
		end, err := o.freeze(ctx, &rec, file, fence, need, nil)
		if err != nil {
			return rec, err
		}
		if rec, err = o.end(ctx, id, fence, end); !errors.Is(err, meta.Again) {
			return rec, err
		}
	}
}

// end journals where a frozen chunk ends, and cuts its replicas there. Errors: Again (it
// was not frozen, for want of replicas, and somebody has begun to write to it since).
func (o *owner) end(ctx context.Context, id meta.ChunkID, fence meta.Fence, end ending) (meta.ChunkRecord, error) {
	rec := meta.ChunkRecord{ID: id}
	o.mu.Lock()
	if end.unwritten {
		now, file, err := namespace.ReadChunk(&view{o: o}, id)
		if err == nil && now.State == meta.ChunkOpen && (now.Live > 0 || file != 0) {
			err = meta.E("seal", meta.Again, id.String(), errors.New("its first bytes were committed meanwhile"))
		}
		if err != nil {
			o.mu.Unlock()
			return rec, err
		}
	}
	seq := o.cur.seq
	if _, err := o.run(&meta.SealChunk{Chunk: id, Length: end.Length, CRC: end.CRC, Fence: fence, Servers: end.Servers, Lost: end.Lost > 0}, 0); err != nil {
		o.mu.Unlock()
		return rec, err
	}
	wait := o.untilDurable(seq)
	o.mu.Unlock()
	if err := o.await(ctx, wait); err != nil {
		return rec, err
	}
	now := meta.ChunkRecord{ID: id, State: meta.ChunkSealed, Length: end.Length, CRC: end.CRC, Fence: fence, Servers: end.Servers}
	// The journal decided; who misses this is told again when it is looked at.
	for i, err := range o.sealReplicas(ctx, &now, now.Servers) {
		if err != nil && !(end.unwritten && errors.Is(err, meta.NoSuchChunk)) {
			o.log.Warn("a replica is not sealed yet", "chunk", id, "server", now.Servers[i], "error", err)
		}
	}
	o.srv.stats.sealed.Add(1)
	o.tasks.collection.Wake()
	o.mu.Lock()
	defer o.mu.Unlock()
	rec, _, err := namespace.ReadChunk(&view{o: o}, id)
	if errors.Is(err, meta.NoSuchChunk) {
		// Nothing referred to it: it is on its way out.
		now.State = meta.ChunkDeleting
		return now, nil
	}
	return rec, err
}

// sealFence is the next fence that an open chunk is sealed under.
func (o *owner) sealFence(rec *meta.ChunkRecord) meta.Fence {
	fence := meta.Fence{Term: o.own.Term(), Seals: rec.Fence.Seals + 1}
	if rec.Fence.Term != fence.Term {
		fence.Seals = 1
	}
	return fence
}

// ending is where a chunk is to end.
type ending struct {
	replica.Decision
	// unwritten: nobody ever wrote to it, and there was nothing to freeze: until the
	// journal has its end somebody may.
	unwritten bool
}

// freeze freezes the reachable replicas and decides where the chunk ends. accept
// says that an operator accepts that what no replica has is lost, and may refuse
// by what the replicas answered.
func (o *owner) freeze(ctx context.Context, rec *meta.ChunkRecord, file meta.Ino, fence meta.Fence, need *uint64, accept func([]replica.Answer) error) (ending, error) {
	const op = "seal"
	c := replica.Case{Servers: rec.Servers, OpenEnded: file != 0}
	if rec.Live > 0 || file != 0 {
		// Where the last journaled extent ends is known only by looking through the
		// volume, with its lock held, and a chunk server that dies leaves many chunks
		// to seal. It need not be known: an extent is journaled when every replica of
		// the record has synced it (but for inodes marked as having others, of which
		// no more was promised than that), so each that answers, and has its own
		// bytes, tells a mark no lower. 1 is for those that have none: a wiped disk must not pass
		// for a chunk that was never written. What comes out shorter than what is in
		// use of the chunk (a disk set back to an old image) is looked at closer below.
		c.Committed = 1
	}
	order := meta.Order{Kind: meta.OrderSeal, Chunk: rec.ID, Fence: fence}
	if need != nil {
		c.Asked, c.Need, order.Length = true, *need, *need
	}
	said := o.orderAll(ctx, rec.Servers, order)
	answers := make([]replica.Answer, len(said))
	absent := 0
	var errs []error
	for i, a := range said {
		answers[i] = replica.AnswerOf(a.OrderResult, a.err, order.Length)
		if answers[i].Reach == replica.Unreachable && o.srv.neverBack(rec.Servers[i]) {
			answers[i].Reach = replica.Lost
		}
		if errors.Is(a.err, meta.NoSuchChunk) {
			absent++
		} else if a.err != nil {
			errs = append(errs, a.err)
		}
	}
	if c.Committed == 0 && absent > 0 && absent+len(errs) == len(said) {
		// As far as one can tell nobody wrote to it, and nothing refers to it.
		return ending{replica.Decision{Servers: rec.Servers}, true}, nil
	}
	if accept != nil {
		if err := accept(answers); err != nil {
			return ending{}, err
		}
		c.AcceptLoss = true
		if c.Committed > 0 {
			most, err := o.committed(rec.ID)
			if err != nil {
				return ending{}, err
			}
			c.Committed = max(c.Committed, most)
		}
	}
	for range 8 {
		d := replica.DecideSeal(c, answers)
		why := errors.Join(append([]error{errors.New(d.Why)}, errs...)...)
		switch d.Verdict {
		case replica.Take:
			if rec.Live > d.Length && c.Committed <= 1 {
				// Extents that are shared count more than once: look closer.
				most, err := o.committed(rec.ID)
				if err != nil {
					return ending{}, err
				}
				if most > d.Length {
					c.Committed = most
					continue
				}
			}
			if d.Lost > 0 && accept == nil {
				panic(fmt.Sprintf("chunk %v: a seal gives %d bytes up that nobody accepted as lost", rec.ID, d.Lost))
			}
			return ending{Decision: d}, nil
		case replica.Tell:
			order.Length = d.Length
			for i, a := range o.orderAll(ctx, d.Ask, order) {
				answers[slices.Index(rec.Servers, d.Ask[i])] = replica.AnswerOf(a.OrderResult, a.err, d.Length)
			}
		case replica.Yield:
			return ending{}, meta.E(op, meta.Fenced, rec.ID.String(), why)
		case replica.Missing, replica.Conflict:
			return ending{}, meta.E(op, meta.Corrupt, rec.ID.String(), why)
		default:
			return ending{}, meta.E(op, meta.Unavailable, rec.ID.String(), why)
		}
	}
	return ending{}, meta.E(op, meta.Unavailable, rec.ID.String(), errors.New("replicas change while they are asked"))
}

// sealReplicas sends the journaled end of a chunk to some of its replicas, as
// often as one likes: to all of them after the seal, and to one that was away
// when it comes back. Errors, for each: Unavailable (say it again later);
// NoSuchChunk, WrongOffset (shorter), Corrupt (other bytes), Sealed (at another
// length): this replica is none and must go.
func (o *owner) sealReplicas(ctx context.Context, rec *meta.ChunkRecord, servers []meta.ServerID) []error {
	said := o.orderAll(ctx, servers, meta.Order{Kind: meta.OrderSeal, Chunk: rec.ID, Fence: rec.Fence, Final: true, Length: rec.Length, Compress: o.compression()})
	errs := make([]error, len(said))
	for i, a := range said {
		errs[i] = a.err
		// Chunks that were sealed before freezes told checksums have none.
		if a.err == nil && rec.CRC != 0 && a.CRC != rec.CRC {
			errs[i] = meta.E("seal", meta.Corrupt, rec.ID.String(), fmt.Errorf("chunk server %d has other bytes: checksum %08x, not %08x", servers[i], a.CRC, rec.CRC))
		}
	}
	return errs
}

// committed is where the last journaled extent in a chunk ends. It looks
// through the whole volume.
func (o *owner) committed(id meta.ChunkID) (most uint64, err error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	err = namespace.AllExtents(&view{o: o}, func(_ meta.Ino, e meta.Extent) bool {
		if e.Chunk == id {
			most = max(most, e.ChunkOff+e.Len)
		}
		return true
	})
	if err != nil || most > 0 {
		return most, err
	}
	indexes, err := namespace.Indexes(&view{o: o})
	for _, x := range indexes {
		for _, p := range x.Parts {
			if p.Chunk == id {
				most = p.Length
			}
		}
	}
	return most, err
}

// ---- suspicion

// suspicion is what writers said of chunk servers that they could not append
// to. It counts for the session that said it alone: what is cut off from one
// client may be well for others, and nobody can keep others from a server.
type suspicion struct {
	looking chan struct{} // bounds the replicas that are verified

	mu sync.Mutex
	m  map[meta.SessionID]map[meta.ServerID]time.Time // until when
}

const (
	// suspectFor is how long a server that failed its writer gets no chunk of it.
	suspectFor  = 15 * time.Second
	maxSuspects = 64 // of one session
)

func (u *suspicion) add(s meta.SessionID, servers []meta.ServerID) {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.dropOld()
	if u.m == nil {
		u.m = map[meta.SessionID]map[meta.ServerID]time.Time{}
	}
	if u.m[s] == nil {
		u.m[s] = map[meta.ServerID]time.Time{}
	}
	for _, id := range servers {
		if len(u.m[s]) < maxSuspects {
			u.m[s][id] = time.Now().Add(suspectFor)
		}
	}
}

// lift forgets what was said of a server, which went meanwhile and is back.
func (u *suspicion) lift(id meta.ServerID) {
	u.mu.Lock()
	defer u.mu.Unlock()
	for _, l := range u.m {
		delete(l, id)
	}
	u.dropOld()
}

func (u *suspicion) dropOld() {
	now := time.Now()
	for s, l := range u.m {
		for id, until := range l {
			if now.After(until) {
				delete(l, id)
			}
		}
		if len(l) == 0 {
			delete(u.m, s)
		}
	}
}

// trouble notes what a session says of chunk servers.
func (s *Server) trouble(sess *session, m *wire.Trouble) {
	if len(m.Away) > 0 {
		s.log.Warn("a client can't reach chunk servers", "session", sess.name, "servers", m.Away)
		s.suspected.add(sess.id, m.Away)
	}
	for _, b := range m.Bad {
		s.log.Error("a client found a replica that does not verify", "session", sess.name, "chunk", b.Chunk, "server", b.Server)
		if b.Chunk.Volume != m.Volume {
			continue
		}
		// Its word proves nothing: the server reads the replica and reports.
		select {
		case s.suspected.looking <- struct{}{}:
			s.wg.Go(func() {
				defer func() { <-s.suspected.looking }()
				if _, err := s.Order(s.ctx, b.Server, meta.Order{Kind: meta.OrderVerify, Chunk: b.Chunk}); err != nil {
					s.log.Warn("replica verified", "chunk", b.Chunk, "server", b.Server, "error", err)
					if k := meta.KindOf(err); k == meta.Corrupt || k == meta.NoSuchChunk {
						s.badReplica(b.Chunk, b.Server, k == meta.Corrupt)
					}
				}
			})
		default: // the client will say it again
		}
	}
}

// of lists what a session suspects now, the latest first.
func (u *suspicion) of(s meta.SessionID) (ids []meta.ServerID) {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.dropOld()
	ids = slices.Collect(maps.Keys(u.m[s]))
	slices.SortFunc(ids, func(a, b meta.ServerID) int {
		return cmp.Or(u.m[s][b].Compare(u.m[s][a]), cmp.Compare(a, b))
	})
	return ids
}
