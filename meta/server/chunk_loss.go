package server

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/namespace"
	"penstock.io/penstock/meta/placement"
	"penstock.io/penstock/meta/replica"
)

// A chunk whose last replica is gone keeps its record: reads of the chunk fail, repair looks
// for a replica, and the chunk is whole again if a server returns with a replica. Only an
// operator can know that no server will. A loss accepted by an operator is journaled in the
// chunk's record: reads fail at once and for good, repair has nothing to do, and a replica
// that appears later is deleted, since users acted on the loss.

const (
	lostPage     = 1000   // chunks in an answer
	maxLostFiles = 100    // files listed of a chunk
	maxAccepted  = 10_000 // chunks in a request
)

// losses finds the chunks whose bytes are lost, and takes note of an operator's acceptance.
type losses struct {
	k          *kernel
	faults     *faults
	inspection *inspection
	repairing  *repairing
	sealing    *sealing
	stale      *stale
}

// lossOf asks every server of a chunk about the replica, for a chunk without a known good
// replica. good: a sealed chunk has a good replica. The replicas of an open chunk do not
// suffice to tell the chunk's end: lossOf reports their lengths.
func (ls *losses) lossOf(ctx context.Context, rec *meta.ChunkRecord) (l LostChunk, good bool) {
	k := ls.k
	l = LostChunk{ID: rec.ID, Chunk: rec.ID.String(), State: LossTotal, Live: rec.Live, Length: rec.Length}
	waits, damaged, some := false, false, false
	for _, id := range rec.Servers {
		ask, cancel := context.WithTimeout(ctx, orderPatience)
		said, err := k.order(ask, id, meta.Order{Kind: meta.OrderStat, Chunk: rec.ID})
		cancel()
		why := ""
		switch kind := meta.KindOf(err); {
		case err == nil && rec.State == meta.ChunkSealed:
			state, err := ls.repairing.judge(ctx, rec, id)
			switch {
			case err == nil && state == placement.Good:
				return l, true
			case err != nil && !k.srv.cfg.Unsafe.NoLossWait:
				why, waits = fmt.Sprintf("may be good, its node does not say: %v", err), true
			default:
				why, damaged = fmt.Sprintf("differs, or is damaged: %d bytes of %d", said.Length, rec.Length), true
			}
		case err == nil:
			why, some = fmt.Sprintf("has %d bytes", said.Length), true
		case kind == meta.NoSuchChunk && k.srv.serverMap.failedDisk(id) != "":
			why, waits = fmt.Sprintf("not there, but its disk %s failed and was not given up", k.srv.serverMap.failedDisk(id)), true
		case kind == meta.NoSuchChunk:
			why = "not there"
		case k.srv.chunkServers.neverBack(id):
			why = "its node was removed"
		case kind == meta.Corrupt, kind == meta.IO:
			why, damaged = "damaged: "+said.Detail, true
		default:
			why, waits = "its node does not answer", true
		}
		l.Replicas = append(l.Replicas, LostReplica{Server: id, Why: why})
	}
	switch {
	case waits:
		l.State = LossPending
	case damaged:
		l.State = LossDamaged
	case some:
		l.State = LossShort
	}
	return l, false
}

// lostChunks lists the chunks without a good replica, and the chunks accepted as lost, with
// their files: a page by id, beginning behind after. On the way, lostChunks seals open chunks
// whose writer is gone and whose end can be determined, and does not list them. Errors:
// Invalid (after is no id).
func (ls *losses) lostChunks(ctx context.Context, after string) (*lostChunks, error) {
	k := ls.k
	var from meta.ChunkID
	if after != "" {
		var err error
		if from, err = meta.ParseChunkID(after); err != nil {
			return nil, meta.E("list lost chunks", meta.Invalid, after, err)
		}
	}
	policy, err := k.policy()
	if err != nil {
		return nil, err
	}
	if after == "" {
		ls.inspection.lookAfresh(ctx)
	}
	short, err := ls.inspection.shortOpen(ctx, from)
	if err != nil {
		return nil, err
	}
	out := &lostChunks{}
	var recs []meta.ChunkRecord
	silent := map[meta.ChunkID]bool{} // open, and no server can be asked for the end
	m, most := k.srv.serverMap.servers(), cmp.Or(k.srv.cfg.lostPage, lostPage)
	err = ls.inspection.walkRecords(func(rec *meta.ChunkRecord) {
		if rec.ID.Compare(from) <= 0 {
			return
		}
		switch {
		case rec.Lost:
		case rec.State == meta.ChunkOpen:
			x := ls.inspection.openChunk(rec, &policy, m)
			if !x.written || rec.Session != 0 && x.ends == "" && x.standing.Live > 0 && !short[rec.ID] {
				return
			}
			silent[rec.ID] = !x.askable
		case rec.State != meta.ChunkSealed || m.Plan(chance{}, &policy, ls.faults.replicas(rec)).Live > 0:
			return
		}
		if len(recs) == most {
			out.more++
			return
		}
		recs = append(recs, *rec)
	})
	if err != nil {
		return nil, err
	}
	found := make([]*LostChunk, len(recs))
	var wg sync.WaitGroup
	slots := make(chan struct{}, sealsAtOnce)
	for i := range recs {
		rec := &recs[i]
		if rec.Lost {
			found[i] = &LostChunk{ID: rec.ID, Chunk: rec.ID.String(), State: LossAccepted, Live: rec.Live, Length: rec.Length}
			if rec.Gone() {
				found[i].Length = 0
			}
			continue
		}
		slots <- struct{}{}
		wg.Go(func() {
			defer func() { <-slots }()
			if rec.State == meta.ChunkOpen && !silent[rec.ID] {
				if now, err := ls.sealing.seal(ctx, rec.ID, nil); err == nil || now.State == meta.ChunkSealed {
					return // sealed: not lost
				}
			}
			if l, good := ls.lossOf(ctx, rec); !good {
				found[i] = &l
			}
		})
	}
	wg.Wait()
	for _, l := range found {
		if l != nil {
			out.chunks = append(out.chunks, *l)
		}
	}
	if out.more > 0 {
		out.after = recs[len(recs)-1].ID.String()
	}
	if err := ls.filesIn(ctx, out.chunks); err != nil {
		return nil, err
	}
	if n := len(pageOf(out.chunks, jsonSize)); n < len(out.chunks) {
		out.after = out.chunks[n-1].Chunk
		out.more += uint64(len(out.chunks) - n)
		out.chunks = out.chunks[:n]
	}
	return out, nil
}

// filesIn fills in the files with bytes in the chunks.
func (ls *losses) filesIn(ctx context.Context, chunks []LostChunk) error {
	k := ls.k
	if len(chunks) == 0 {
		return nil
	}
	if err := k.settled(ctx); err != nil {
		return err
	}
	view, release, err := k.freezeState(ctx, &checking{})
	if err != nil {
		return err
	}
	defer release()
	in := map[meta.ChunkID]map[meta.Ino]uint64{}
	for _, c := range chunks {
		in[c.ID] = map[meta.Ino]uint64{}
	}
	err = namespace.AllExtents(view, func(ino meta.Ino, e meta.Extent) bool {
		if files, ok := in[e.Chunk]; ok {
			files[ino] += e.Len
		}
		return true
	})
	wanted := map[meta.Ino]bool{}
	for i := range chunks {
		c := &chunks[i]
		c.Files = []LostFile{}
		for _, ino := range slices.Sorted(maps.Keys(in[c.ID])) {
			if len(c.Files) == maxLostFiles {
				c.More++
				continue
			}
			c.Files = append(c.Files, LostFile{Ino: ino, Bytes: in[c.ID][ino]})
			wanted[ino] = true
		}
	}
	var names map[meta.Ino]string
	if err == nil {
		names, err = namespace.NamesOf(view, wanted)
	}
	if err := errors.Join(err, view.Close()); err != nil {
		return err
	}
	for i := range chunks {
		for k := range chunks[i].Files {
			f := &chunks[i].Files[k]
			if name, ok := names[f.Ino]; ok {
				f.Path = "/" + name
			}
		}
	}
	return nil
}

// acceptLoss records, for each named chunk, that bytes without a replica are lost. It stops at
// the first chunk that it refuses. Errors: Invalid (no such id, or too many), NoSuchChunk,
// Unavailable (a server or disk may have a replica), Busy (the chunk is not lost, or is being
// repaired), Corrupt (damaged replicas are left, and only damaged gives them up).
func (ls *losses) acceptLoss(ctx context.Context, chunks []string, damaged bool, by string) (*lostChunks, error) {
	k := ls.k
	if n := len(chunks); n > maxAccepted {
		return nil, meta.E("accept loss", meta.Invalid, k.subject(), fmt.Errorf("%d chunks in one request, at most %d: name some at a time", n, maxAccepted))
	}
	out := &lostChunks{}
	for _, name := range chunks {
		id, err := meta.ParseChunkID(name)
		if err != nil || id.Volume != k.vol {
			return nil, meta.E("accept loss", meta.Invalid, name, errors.Join(err, fmt.Errorf("it is no chunk of volume %d", k.vol)))
		}
		l, err := ls.acceptOne(ctx, id, damaged)
		if err != nil {
			return nil, err
		}
		if l != nil {
			k.log.Warn("a chunk was accepted as lost", "chunk", id, "live", l.Live, "left", l.Length, "by", by)
			out.chunks = append(out.chunks, *l)
		}
	}
	if err := ls.filesIn(ctx, out.chunks); err != nil {
		return nil, err
	}
	// The losses are accepted, and the answer has no pages: the last chunks go without their
	// files.
	for left, i := pageBytes, 0; i < len(out.chunks); i++ {
		c := &out.chunks[i]
		if left -= jsonSize(&c.Files); left < 0 {
			c.More += uint64(len(c.Files))
			c.Files = []LostFile{}
		}
	}
	return out, nil
}

// acceptOne accepts the loss of a chunk. It returns nil if nothing had to be accepted.
func (ls *losses) acceptOne(ctx context.Context, id meta.ChunkID, damaged bool) (*LostChunk, error) {
	k := ls.k
	unlock, ok := k.srv.repairs.lock(ls.repairing, id)
	if !ok {
		return nil, refuseLoss(id, meta.Busy, "it is being repaired")
	}
	defer unlock()
	rec, err := ls.repairing.chunkNow(ctx, id)
	if err != nil {
		return nil, err
	}
	if rec.State == meta.ChunkDeleting || rec.Gone() {
		return nil, nil
	}
	l, good := ls.lossOf(ctx, &rec)
	switch {
	case good:
		return nil, refuseLoss(id, meta.Busy, "a good replica is left")
	case l.State == LossPending:
		return nil, refuseLoss(id, meta.Unavailable, "%s: give up what is gone for good ('penstock node remove --force', 'penstock disk replace')", whyLost(&l))
	case l.State == LossDamaged && !damaged:
		return nil, refuseLoss(id, meta.Corrupt, "%s: what verifies can still be read, and --damaged gives it up", whyLost(&l))
	}
	if rec.State == meta.ChunkOpen {
		return ls.acceptEnd(ctx, &rec, &l)
	}
	if err := ls.repairing.setReplicas(ctx, &rec, nil, ls.repairing.fresh(rec.Fence)); err != nil {
		return nil, err
	}
	ls.faults.forget(id)
	for _, s := range rec.Servers {
		ls.stale.add(id, s, 0, false)
	}
	l.State, l.Length = LossAccepted, 0
	return &l, nil
}

// acceptEnd seals an open chunk at the length that its replicas have.
func (ls *losses) acceptEnd(ctx context.Context, rec *meta.ChunkRecord, l *LostChunk) (*LostChunk, error) {
	k := ls.k
	k.mu.Lock()
	_, file, err := namespace.ReadChunk(k.view(), rec.ID)
	k.mu.Unlock()
	if err != nil {
		return nil, err
	}
	fence := ls.sealing.sealFence(rec)
	end, err := ls.sealing.freeze(ctx, rec, file, fence, nil, func(answers []replica.Answer) error {
		for i, a := range answers {
			if a.Reach == replica.Unreachable {
				return refuseLoss(rec.ID, meta.Unavailable, "node %d does not answer: it may have what is missing", rec.Servers[i])
			}
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	now, err := ls.sealing.end(ctx, rec.ID, fence, end)
	if err != nil || end.Lost == 0 {
		return nil, err
	}
	for _, s := range rec.Servers {
		if !slices.Contains(now.Servers, s) {
			ls.stale.add(rec.ID, s, 0, false)
		}
	}
	ls.faults.forget(rec.ID)
	l.State, l.Length = LossAccepted, end.Length
	return l, nil
}

func whyLost(l *LostChunk) string {
	var all []string
	for _, r := range l.Replicas {
		all = append(all, fmt.Sprintf("node %d: %s", r.Server, r.Why))
	}
	return strings.Join(all, "; ")
}

func refuseLoss(id meta.ChunkID, k meta.Kind, format string, a ...any) error {
	return meta.E("accept loss", k, id.String(), fmt.Errorf(format, a...))
}
