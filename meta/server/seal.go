package server

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/namespace"
	"penstock.io/penstock/meta/replica"
	"penstock.io/penstock/meta/wire"
)

const (
	// sealWait is how long a seal waits for other replicas after the first answer, sealLimit
	// how long for the first answer, because a freeze may sync much. A stopped or unreachable
	// server is left out: the chunk then has a replica fewer until the next repair.
	sealWait  = time.Second
	sealLimit = 5 * time.Second
	// sealsAtOnce bounds the abandoned chunks sealed in parallel.
	sealsAtOnce = 16
)

// sealing ends chunks: of writers that ask for it, and of writers that left chunks open.
type sealing struct {
	k     *kernel
	words *words
}

func (sl *sealing) serveSeal(s *session, id uint64, m *wire.Seal) {
	s.wg.Go(func() {
		var need *uint64
		if m.Asked {
			need = &m.Need
		}
		rec, err := sl.seal(s.ctx, m.Chunk, need)
		re := &wire.Reply{Status: wire.StatusOf(err)}
		if err == nil {
			re.Result.Chunks = []meta.ChunkRecord{rec}
		}
		s.enqueue(id, re)
		s.flush()
	})
}

// answered is the result of one order among several.
type answered struct {
	meta.OrderResult
	err error
}

// orderAll gives the same order to several servers in parallel and waits at most sealLimit,
// and at most sealWait after the first answer. A server without a connection is asked again
// meanwhile, unless the server can't come back.
func (sl *sealing) orderAll(ctx context.Context, servers []meta.ServerID, or meta.Order) []answered {
	k := sl.k
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
				out[i].OrderResult, out[i].err = k.order(ctx, id, or)
				if !errors.Is(out[i].err, meta.Unavailable) {
					first.Do(func() { time.AfterFunc(sealWait, late) })
					return
				}
				if ctx.Err() != nil || k.srv.chunkServers.neverBack(id) {
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

// seal ends a chunk (rule 5): freeze the reachable replicas at a higher fence, choose a length
// that verifies on the replicas, journal the length with the servers of these replicas, and
// only then cut the replicas. need, if the chunk's writer asks, is the acknowledged length;
// the writer sends later bytes again to another chunk. Errors: Unavailable while the answers
// do not determine the length, Fenced, Corrupt.
func (sl *sealing) seal(ctx context.Context, id meta.ChunkID, need *uint64) (meta.ChunkRecord, error) {
	k := sl.k
	for {
		k.mu.Lock()
		rec, file, err := namespace.ReadChunk(k.view(), id)
		k.mu.Unlock()
		if err != nil {
			return rec, err
		}
		if rec.State != meta.ChunkOpen {
			return rec, nil
		}
		fence := sl.sealFence(&rec)
		end, err := sl.freeze(ctx, &rec, file, fence, need, nil)
		if err != nil {
			return rec, err
		}
		if rec, err = sl.end(ctx, id, fence, end); !errors.Is(err, meta.Again) {
			return rec, err
		}
	}
}

// end journals the end of a frozen chunk, and cuts its replicas there. Errors: Again (no
// replica was frozen, and a session has begun to write to the chunk since).
func (sl *sealing) end(ctx context.Context, id meta.ChunkID, fence meta.Fence, end ending) (meta.ChunkRecord, error) {
	k := sl.k
	rec := meta.ChunkRecord{ID: id}
	k.mu.Lock()
	if end.unwritten {
		now, file, err := namespace.ReadChunk(k.view(), id)
		if err == nil && now.State == meta.ChunkOpen && (now.Live > 0 || file != 0) {
			err = meta.E("seal", meta.Again, id.String(), errors.New("its first bytes were committed meanwhile"))
		}
		if err != nil {
			k.mu.Unlock()
			return rec, err
		}
	}
	_, wait, err := k.start(&meta.SealChunk{Chunk: id, Length: end.Length, CRC: end.CRC, Fence: fence, Servers: end.Servers, Lost: end.Lost > 0}, 0)
	k.mu.Unlock()
	if err != nil {
		return rec, err
	}
	if err := k.await(ctx, wait); err != nil {
		return rec, err
	}
	now := meta.ChunkRecord{ID: id, State: meta.ChunkSealed, Length: end.Length, CRC: end.CRC, Fence: fence, Servers: end.Servers}
	// The journal has decided; the inspection repeats the order for a replica left open.
	for i, err := range sl.sealReplicas(ctx, &now, now.Servers) {
		if err != nil && !(end.unwritten && errors.Is(err, meta.NoSuchChunk)) {
			k.log.Warn("a replica is not sealed yet", "chunk", id, "server", now.Servers[i], "error", err)
		}
	}
	k.srv.stats.sealed.Add(1)
	k.tasks.collection.Wake()
	k.mu.Lock()
	defer k.mu.Unlock()
	rec, _, err = namespace.ReadChunk(k.view(), id)
	if errors.Is(err, meta.NoSuchChunk) {
		// Nothing referred to the chunk, so the chunk is being deleted.
		now.State = meta.ChunkDeleting
		return now, nil
	}
	return rec, err
}

// sealFence returns the next fence for a seal of an open chunk.
func (sl *sealing) sealFence(rec *meta.ChunkRecord) meta.Fence {
	k := sl.k
	fence := meta.Fence{Term: k.own.Term(), Seals: rec.Fence.Seals + 1}
	if rec.Fence.Term != fence.Term {
		fence.Seals = 1
	}
	return fence
}

// ending is the decided end of a chunk.
type ending struct {
	replica.Decision
	// unwritten: no session is known to have written to the chunk, and no replica was frozen.
	// A session may still write until the journal has the chunk's end.
	unwritten bool
}

// freeze freezes the reachable replicas and decides where the chunk ends. A non-nil accept
// means that an operator accepts the loss of bytes present on no replica; accept may refuse,
// given the replicas' answers.
func (sl *sealing) freeze(ctx context.Context, rec *meta.ChunkRecord, file meta.Ino, fence meta.Fence, need *uint64, accept func([]replica.Answer) error) (ending, error) {
	k := sl.k
	const op = "seal"
	c := replica.Case{Servers: rec.Servers, OpenEnded: file != 0}
	if rec.Live > 0 || file != 0 {
		// Finding the end of the last journaled extent takes a walk of the volume under its
		// lock, and a dead chunk server leaves many chunks to seal. The walk is not needed: an
		// extent is journaled after every replica of the record has synced the extent (except
		// the extents of inodes with FlagUnsynced: no more than their actual sync was
		// promised). So each answering replica with its own bytes reports no lower mark.
		// Committed is 1 for replicas without their bytes: a wiped disk must not pass for a
		// chunk never written. If the decided length is below the chunk's used bytes (a disk
		// set back to an old image), the walk is made below.
		c.Committed = 1
	}
	order := meta.Order{Kind: meta.OrderSeal, Chunk: rec.ID, Fence: fence}
	if need != nil {
		c.Asked, c.Need, order.Length = true, *need, *need
	}
	said := sl.orderAll(ctx, rec.Servers, order)
	answers := make([]replica.Answer, len(said))
	absent := 0
	var errs []error
	for i, a := range said {
		answers[i] = replica.AnswerOf(a.OrderResult, a.err, order.Length)
		if answers[i].Reach == replica.Unreachable && k.srv.chunkServers.neverBack(rec.Servers[i]) {
			answers[i].Reach = replica.Lost
		}
		if errors.Is(a.err, meta.NoSuchChunk) {
			absent++
		} else if a.err != nil {
			errs = append(errs, a.err)
		}
	}
	if c.Committed == 0 && absent > 0 && absent+len(errs) == len(said) {
		// As far as known, no session wrote to the chunk, and nothing refers to the chunk.
		return ending{replica.Decision{Servers: rec.Servers}, true}, nil
	}
	if accept != nil {
		if err := accept(answers); err != nil {
			return ending{}, err
		}
		c.AcceptLoss = true
		if c.Committed > 0 {
			most, err := sl.committed(rec.ID)
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
				// Shared extents count more than once in rec.Live, so the walk decides.
				most, err := sl.committed(rec.ID)
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
			for i, a := range sl.orderAll(ctx, d.Ask, order) {
				answers[slices.Index(rec.Servers, d.Ask[i])] = replica.AnswerOf(a.OrderResult, a.err, d.Length)
			}
			if accept != nil { // a replica that answered before may be out of reach now
				if err := accept(answers); err != nil {
					return ending{}, err
				}
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

// sealReplicas sends the journaled end of a chunk to some of its replicas: to all replicas
// after the seal, and to an absent replica after its return. The order may be repeated.
// Errors, for each server: Unavailable (repeat the order later); NoSuchChunk, WrongOffset
// (shorter), Corrupt (other bytes), Sealed (at another length): the replica is unusable and
// must be deleted.
func (sl *sealing) sealReplicas(ctx context.Context, rec *meta.ChunkRecord, servers []meta.ServerID) []error {
	said := sl.orderAll(ctx, servers, meta.Order{Kind: meta.OrderSeal, Chunk: rec.ID, Fence: rec.Fence, Final: true, Length: rec.Length, Compress: sl.words.compression()})
	errs := make([]error, len(said))
	for i, a := range said {
		errs[i] = a.err
		// Older chunks have no checksum: their freezes did not report a checksum.
		if a.err == nil && rec.CRC != 0 && a.CRC != rec.CRC {
			errs[i] = meta.E("seal", meta.Corrupt, rec.ID.String(), fmt.Errorf("chunk server %d has other bytes: checksum %08x, not %08x", servers[i], a.CRC, rec.CRC))
		}
	}
	return errs
}

// committed returns the end of the last journaled extent in a chunk, or the length of the
// chunk's part of a snapshot index. committed walks the whole volume.
func (sl *sealing) committed(id meta.ChunkID) (most uint64, err error) {
	k := sl.k
	k.mu.Lock()
	defer k.mu.Unlock()
	err = namespace.AllExtents(k.view(), func(_ meta.Ino, e meta.Extent) bool {
		if e.Chunk == id {
			most = max(most, e.ChunkOff+e.Len)
		}
		return true
	})
	if err != nil || most > 0 {
		return most, err
	}
	indexes, err := namespace.Indexes(k.view())
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

// suspicion holds writers' reports of chunk servers that failed an append. A report counts
// only for the reporting session: a server out of one client's reach may serve other clients
// well, and no client can keep others from a server.
type suspicion struct {
	looking chan struct{} // bounds the concurrent verifications

	mu sync.Mutex
	m  map[meta.SessionID]map[meta.ServerID]time.Time // until when
}

const (
	// suspectFor is how long a session gets no chunk on a server reported by the session.
	suspectFor  = 15 * time.Second
	maxSuspects = 64 // per session
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

// lift forgets the reports of a server when the server is back after an absence.
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

// trouble notes a session's report of chunk servers, and verifies the replicas reported as
// bad.
func (r *repairs) trouble(sess *session, m *wire.Trouble) {
	if len(m.Away) > 0 {
		r.log.Warn("a client can't reach chunk servers", "session", sess.name, "servers", m.Away)
		r.chunkServers.suspected.add(sess.id, m.Away)
	}
	for _, b := range m.Bad {
		r.log.Error("a client found a damaged replica", "session", sess.name, "chunk", b.Chunk, "server", b.Server)
		if b.Chunk.Volume != m.Volume {
			continue
		}
		// The client's report proves nothing: the server reads the replica and reports.
		select {
		case r.chunkServers.suspected.looking <- struct{}{}:
			r.wg.Go(func() {
				defer func() { <-r.chunkServers.suspected.looking }()
				// Without an end, some silent servers would take all slots for good.
				ctx, cancel := context.WithTimeout(r.ctx, verifyPatience(meta.DefaultChunk))
				defer cancel()
				if _, err := r.chunkServers.Order(ctx, b.Server, meta.Order{Kind: meta.OrderVerify, Chunk: b.Chunk}); err != nil {
					r.log.Warn("a replica reported by a client is damaged, or its server did not answer", "chunk", b.Chunk, "server", b.Server, "error", err)
					if k := meta.KindOf(err); k == meta.Corrupt || k == meta.NoSuchChunk {
						r.badReplica(b.Chunk, b.Server, k == meta.Corrupt)
					}
				}
			})
		default: // the client reports again
		}
	}
}

// minVerifyRate is the least rate at which a server reads a replica of its own without counting
// as stuck, in bytes per second.
const minVerifyRate = 16 << 20

// verifyPatience is how long a server may take to read a replica of n bytes.
func verifyPatience(n uint64) time.Duration {
	return 20*time.Second + time.Duration(n/minVerifyRate)*time.Second
}

// of lists the servers suspected by a session, the latest report first.
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

// sealThese begins to seal chunks; the caller waits for the seals.
func (sl *sealing) sealThese(ctx context.Context, open []meta.ChunkID) *seals {
	s := &seals{done: make(chan struct{}), errs: make([]error, len(open))}
	go func() {
		defer close(s.done)
		var wg sync.WaitGroup
		slots := make(chan struct{}, sealsAtOnce)
		for i, id := range open {
			slots <- struct{}{}
			wg.Go(func() {
				defer func() { <-slots }()
				_, s.errs[i] = sl.seal(ctx, id, nil)
			})
		}
		wg.Wait()
	}()
	return s
}

// seals are running seals of chunks.
type seals struct {
	done chan struct{} // closed when all seals have ended
	errs []error
}

func (s *seals) wait() error {
	<-s.done
	return errors.Join(s.errs...)
}

// sealAll seals chunks in parallel, since each may wait for servers that don't answer; failed:
// some could not be sealed yet.
func (sl *sealing) sealAll(ids []meta.ChunkID) (failed bool) {
	k := sl.k
	var wg sync.WaitGroup
	var bad atomic.Bool
	slots := make(chan struct{}, sealsAtOnce)
	for _, id := range ids {
		slots <- struct{}{}
		wg.Go(func() {
			defer func() { <-slots }()
			if _, err := sl.seal(k.ctx, id, nil); err != nil && k.ctx.Err() == nil {
				bad.Store(true)
				if errors.Is(err, meta.Unavailable) {
					k.log.Warn("a chunk that its writer left open can't be sealed yet; the owner tries again", "chunk", id, "error", err)
				} else {
					k.log.Error("a chunk that its writer left open can't be sealed", "chunk", id, "error", err)
				}
			}
		})
	}
	wg.Wait()
	return bad.Load()
}
