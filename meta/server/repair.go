package server

import (
	"container/heap"
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/capability"
	"penstock.io/penstock/meta/namespace"
	"penstock.io/penstock/meta/placement"
)

// Repair brings each sealed chunk to the servers wanted by its volume's policy. The owner of a
// volume inspects all its chunks repeatedly (inspect.go), and queues faulty chunks here, the
// most endangered first, for all volumes of this process together. Nothing of the queue is
// written down: a successor finds the same faults by its own inspection.
//
// One chunk is repaired in this order, and the repair may stop at any point:
//
//  1. the target servers pull copies; each copy is verified against the journaled
//     length and checksum and durable before the target reports success;
//  2. the journal's record names the new replicas (SetReplicas, by comparison);
//  3. after a grace time for readers with the old record, the replicas no longer
//     named by the record are deleted (stale_replicas.go).
//
// A stop after step 1 leaves copies named by no record; a stop after step 2, old replicas.
// The servers' lists show both, and step 3 deletes both.

// Defaults of Config.
const (
	DefaultRepairDelay      = 30 * time.Second
	DefaultRepairGrace      = time.Minute
	DefaultRepairInterval   = 5 * time.Second
	DefaultListInterval     = 10 * time.Minute
	DefaultRepairParallel   = 8
	DefaultRepairRate       = 256 << 20
	DefaultRepairServerRate = 128 << 20
	DefaultBalance          = 0.1
)

const (
	// maxRepairs chunks wait for repair; later inspections find the chunks left out.
	maxRepairs = 4096
	// maxPerServer bounds the concurrent copies from each server, and to each server.
	maxPerServer = 2
	// minCopyRate is the least rate of a copy that makes progress, in bytes per second.
	minCopyRate = 1 << 20
	// copyPatience is how much longer than at that rate a copy may take.
	copyPatience = 20 * time.Second
	// retryRepair is the pause after a failed repair of a chunk.
	retryRepair = 2 * time.Second
)

// job is a chunk waiting for repair or being repaired.
type job struct {
	by      *repairing // of the owner that has the chunk
	id      meta.ChunkID
	urgency int
	reason  placement.Reason
	bytes   uint64
	at      int // in the heap; -1: running
	// servers of the plan at the time of queuing: sources and targets
	from, to []meta.ServerID
}

// jobs is a heap of jobs, the most urgent on top, older chunks first.
type jobs []*job

func (h jobs) Len() int { return len(h) }
func (h jobs) Less(i, j int) bool {
	if h[i].urgency != h[j].urgency {
		return h[i].urgency > h[j].urgency
	}
	return h[i].id.Compare(h[j].id) < 0
}
func (h jobs) Swap(i, j int) { h[i], h[j] = h[j], h[i]; h[i].at, h[j].at = i, j }
func (h *jobs) Push(x any)   { j := x.(*job); j.at = len(*h); *h = append(*h, j) }
func (h *jobs) Pop() any {
	old := *h
	j := old[len(old)-1]
	*h, j.at = old[:len(old)-1], -1
	return j
}

// repairs are the repairs of all volumes owned by this process.
type repairs struct {
	*process
	api          *api
	chunkServers *chunkServers
	hosted       *hosted
	peers        *peers
	serverMap    *serverMap

	mu      sync.Mutex
	queue   jobs
	byChunk map[meta.ChunkID]*job // queued or running
	failed  map[meta.ChunkID]time.Time
	in, out map[meta.ServerID]int
	running int
	dropped bool // some jobs did not fit the queue
	// recent copies, for the rate
	done []copied
	// changes of servers' disks not yet covered by the servers' reports
	recent []change
	wake   chan struct{} // capacity 1

	copies, bytes, failures atomic.Uint64
}

// change is a number of bytes added to and deleted from a server's disks.
type change struct {
	at        time.Time
	server    meta.ServerID
	got, gone uint64 // bytes
}

// reportLag is the greatest age of a report's disk figures at arrival.
const reportLag = time.Second

type copied struct {
	at    time.Time
	bytes uint64
}

func newRepairs() *repairs {
	return &repairs{
		byChunk: map[meta.ChunkID]*job{}, failed: map[meta.ChunkID]time.Time{},
		in: map[meta.ServerID]int{}, out: map[meta.ServerID]int{}, wake: make(chan struct{}, 1),
	}
}

func (r *repairs) kick() {
	select {
	case r.wake <- struct{}{}:
	default:
	}
}

// add queues a chunk, or updates the urgency and plan of a queued chunk. A chunk whose repair
// failed less than retryRepair ago is ignored.
func (r *repairs) add(by *repairing, id meta.ChunkID, st *placement.Step, bytes uint64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if until, ok := r.failed[id]; ok {
		if time.Now().Before(until) {
			return
		}
		delete(r.failed, id)
	}
	if j := r.byChunk[id]; j != nil {
		if j.at >= 0 && j.by == by {
			j.urgency, j.reason, j.from, j.to = st.Urgency(), st.Reason, st.From, st.Add
			heap.Fix(&r.queue, j.at)
		}
		return
	}
	if len(r.queue) >= maxRepairs {
		r.dropped = true
		// A less urgent job makes room: the last leaf of the heap is not always the least
		// urgent job, but never among the most urgent jobs.
		last := r.queue[len(r.queue)-1]
		if last.urgency >= st.Urgency() {
			return
		}
		heap.Remove(&r.queue, last.at)
		delete(r.byChunk, last.id)
	}
	j := &job{by: by, id: id, urgency: st.Urgency(), reason: st.Reason, bytes: bytes, from: st.From, to: st.Add}
	heap.Push(&r.queue, j)
	r.byChunk[id] = j
	r.kick()
}

// forget drops the queued jobs of an owner that ended.
func (r *repairs) forget(by *repairing) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.queue = slices.DeleteFunc(r.queue, func(j *job) bool {
		if j.by == by {
			delete(r.byChunk, j.id)
		}
		return j.by == by
	})
	for i, j := range r.queue {
		j.at = i
	}
	heap.Init(&r.queue)
}

// next takes the most urgent job whose servers have time, among the top 64. next returns nil
// if no such job is queued or if parallel jobs are running.
func (r *repairs) next(parallel int) *job {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.running >= parallel {
		return nil
	}
	var held []*job
	var got *job
	for len(r.queue) > 0 && len(held) < 64 {
		j := heap.Pop(&r.queue).(*job)
		if r.free(j) {
			got = j
			break
		}
		held = append(held, j)
	}
	for _, j := range held {
		heap.Push(&r.queue, j)
	}
	if got != nil {
		r.running++
		for _, id := range got.to {
			r.in[id]++
		}
		for _, id := range got.from[:min(1, len(got.from))] {
			r.out[id]++
		}
	}
	return got
}

// free reports whether the job's servers have time, and rotates j.from so that a source with
// time comes first. The caller holds the owner's mu.
func (r *repairs) free(j *job) bool {
	for _, id := range j.to {
		if r.in[id] >= maxPerServer {
			return false
		}
	}
	for i, id := range j.from {
		if r.out[id] < maxPerServer {
			j.from = slices.Concat(j.from[i:], j.from[:i])
			return true
		}
	}
	return len(j.from) == 0 || len(j.to) == 0
}

func (r *repairs) finish(j *job, err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.running--
	delete(r.byChunk, j.id)
	drop := func(m map[meta.ServerID]int, ids []meta.ServerID) {
		for _, id := range ids {
			if m[id]--; m[id] <= 0 {
				delete(m, id)
			}
		}
	}
	drop(r.in, j.to)
	drop(r.out, j.from[:min(1, len(j.from))])
	if err != nil {
		r.failures.Add(1)
		if len(r.failed) > maxRepairs {
			clear(r.failed)
		}
		r.failed[j.id] = time.Now().Add(retryRepair)
	}
	r.kick()
}

// changed notes bytes added to and deleted from a server, for unreported.
func (r *repairs) changed(server meta.ServerID, got, gone uint64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(r.recent) < maxStale {
		r.recent = append(r.recent, change{time.Now(), server, got, gone})
	}
}

// unreported adds to the servers in to the changes that the servers' reports don't show yet or
// may not show: running copies except of the job without, finished copies and deletions. told
// is the time of each server's last report.
func (r *repairs) unreported(told map[meta.ServerID]time.Time, without *job, to map[meta.ServerID]*placement.Server) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, j := range r.byChunk {
		if j.at >= 0 || j == without {
			continue
		}
		for _, id := range j.to {
			if s := to[id]; s != nil {
				s.Got += j.bytes
			}
		}
	}
	r.recent = slices.DeleteFunc(r.recent, func(c change) bool {
		t, ok := told[c.server]
		return !ok || t.After(c.at.Add(reportLag))
	})
	for _, c := range r.recent {
		s := to[c.server]
		switch {
		case s == nil:
		case told[c.server].After(c.at):
			s.Got, s.Gone = s.Got+c.got, s.Gone+c.gone
		default:
			s.Coming, s.Leaving = s.Coming+c.got, s.Leaving+c.gone
		}
	}
}

func (r *repairs) loads() map[meta.ServerID]uint32 {
	r.mu.Lock()
	defer r.mu.Unlock()
	l := map[meta.ServerID]uint32{}
	for id, n := range r.in {
		l[id] += uint32(n)
	}
	return l
}

// lock keeps repairs from a chunk until unlock; false: the chunk is being repaired.
func (r *repairs) lock(by *repairing, id meta.ChunkID) (unlock func(), ok bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if j := r.byChunk[id]; j != nil {
		if j.at < 0 {
			return nil, false
		}
		heap.Remove(&r.queue, j.at)
	}
	r.byChunk[id] = &job{by: by, id: id, at: -1}
	return func() {
		r.mu.Lock()
		defer r.mu.Unlock()
		delete(r.byChunk, id)
	}, true
}

// copiedNow notes a finished copy of n bytes.
func (r *repairs) copiedNow(n uint64) {
	r.copies.Add(1)
	r.bytes.Add(n)
	r.mu.Lock()
	defer r.mu.Unlock()
	now := time.Now()
	r.done = append(slices.DeleteFunc(r.done, func(c copied) bool { return now.Sub(c.at) > rateOver }), copied{now, n})
}

// rateOver is the time over which rate averages.
const rateOver = 10 * time.Second

func (r *repairs) rate() float64 {
	r.mu.Lock()
	defer r.mu.Unlock()
	var n uint64
	for _, c := range r.done {
		if time.Since(c.at) <= rateOver {
			n += c.bytes
		}
	}
	return float64(n) / rateOver.Seconds()
}

// share is the rate in bytes per second for one more copy, so that all copies together stay
// within RepairRate and RepairServerRate.
func (r *repairs) share() uint64 {
	r.mu.Lock()
	n := min(r.cfg.RepairParallel, max(1, r.running+len(r.queue)))
	r.mu.Unlock()
	return max(1, min(r.cfg.RepairRate/uint64(n), r.cfg.RepairServerRate/maxPerServer))
}

// repairLoop starts queued repairs. If the queue overflowed, repairLoop starts new inspections
// when the queue is three quarters empty.
func (r *repairs) repairLoop() {
	var wg sync.WaitGroup
	defer wg.Wait()
	for {
		for {
			j := r.next(r.cfg.RepairParallel)
			if j == nil {
				break
			}
			wg.Go(func() {
				err := j.by.repair(j)
				if err != nil && j.by.k.ctx.Err() == nil {
					j.by.k.log.Warn("a chunk could not be repaired; the owner tries again", "chunk", j.id, "error", err)
				}
				r.finish(j, err)
			})
		}
		r.mu.Lock()
		more := r.dropped && len(r.queue) < maxRepairs/4
		if more {
			r.dropped = false
		}
		r.mu.Unlock()
		if more {
			r.kickRepair()
		}
		select {
		case <-r.ctx.Done():
			return
		case <-r.wake:
		}
	}
}

// kickRepair makes every owner inspect its chunks now.
func (r *repairs) kickRepair() {
	for _, o := range r.hosted.owners() {
		o.tasks.inspection.Wake()
	}
}

// errLeaving refuses new work: the next owner of the volume finds the remaining work.
var errLeaving error = meta.E("repair", meta.Unavailable, "", errors.New("the volume is being handed over"))

// repairing carries out the repairs of a volume's chunks.
type repairing struct {
	k       *kernel
	faults  *faults
	sealing *sealing
	stale   *stale
	words   *words

	// fences counts the orders about sealed chunks; see fresh.
	fences atomic.Uint32
}

// chunkNow reads a chunk's record and waits until the record is durable in the journal,
// because the next step may rest on the record (rule 4). Errors: NoSuchChunk, also only once
// durable; Unavailable while the owner is leaving or its lease is uncertain.
func (rp *repairing) chunkNow(ctx context.Context, id meta.ChunkID) (meta.ChunkRecord, error) {
	k := rp.k
	k.mu.Lock()
	if k.failed != nil {
		k.mu.Unlock()
		return meta.ChunkRecord{}, k.failed
	}
	if k.leaving != nil {
		k.mu.Unlock()
		return meta.ChunkRecord{}, errLeaving
	}
	rec, _, err := namespace.ReadChunk(k.view(), id)
	wait := k.untilDurable(k.newest())
	k.mu.Unlock()
	if k := meta.KindOf(err); err != nil && k != meta.NoSuchChunk {
		return rec, err
	}
	if werr := k.await(ctx, wait); werr != nil {
		return rec, werr
	}
	if k.own.Left() <= 0 {
		return rec, meta.E("repair", meta.Unavailable, id.String(), errors.New("the volume's lease is not certain now"))
	}
	return rec, err
}

// repair plans anew for the job's chunk and carries out the plan: copies, then the record,
// then the deletion of old replicas.
func (rp *repairing) repair(j *job) error {
	k := rp.k
	ctx := k.ctx
	rec, err := rp.chunkNow(ctx, j.id)
	if errors.Is(err, meta.NoSuchChunk) || err == nil && (rec.State != meta.ChunkSealed || rec.Gone()) {
		return nil
	}
	if err != nil {
		return err
	}
	policy, err := k.policy()
	if err != nil {
		return err
	}
	replicas, err := rp.look(ctx, &rec)
	if err != nil {
		return err
	}
	m := k.srv.serverMap.servers()
	st := m.Plan(chance{}, &policy, replicas)
	if st.Reason == placement.None && j.reason == placement.Imbalance {
		// Balance with the current fills, and without this copy.
		st, _ = k.srv.serverMap.makeMap(j).Balance(&policy, k.srv.cfg.Balance).Move(chance{}, rec.Servers, rec.Length)
	}
	if !st.Work() {
		return nil
	}
	crc := rec.CRC
	if crc == 0 && len(st.Add) > 0 {
		if crc, err = rp.agreed(ctx, &rec, st.From); err != nil {
			return err
		}
	}
	var added []meta.ServerID
	var errs []error
	fence := rp.fresh(rec.Fence)
	for _, to := range st.Add {
		if err := rp.pull(ctx, &rec, fence, crc, policy.Class, to, m.Nearest(to, j.prefer(st.From))); err != nil {
			errs = append(errs, err)
			if !slices.Contains(rec.Servers, to) {
				rp.stale.add(rec.ID, to, 0, false) // the target may have made the copy
			}
			continue
		}
		added = append(added, to)
		rp.faults.clear(rec.ID, to)
	}
	next := slices.Concat(st.Keep, added)
	if len(added) < len(st.Add) {
		// Some copies failed, so no old replica is removed.
		next = slices.Clone(rec.Servers)
		for _, id := range added {
			if !slices.Contains(next, id) {
				next = append(next, id)
			}
		}
	} else {
		// A replica copied anew keeps its place in the order.
		order := func(id meta.ServerID) int {
			if i := slices.Index(rec.Servers, id); i >= 0 {
				return i
			}
			return len(rec.Servers)
		}
		slices.SortStableFunc(next, func(a, b meta.ServerID) int { return order(a) - order(b) })
	}
	if len(next) == 0 || slices.Equal(next, rec.Servers) {
		return errors.Join(errs...)
	}
	if err := rp.setReplicas(ctx, &rec, next, fence); err != nil {
		for _, id := range added {
			rp.stale.add(rec.ID, id, rec.Length, false)
		}
		if errors.Is(err, meta.NoSuchChunk) {
			return nil // the chunk was deleted meanwhile; the stale list removes the copies
		}
		return errors.Join(append(errs, err)...)
	}
	k.log.Info("replicas changed", "chunk", rec.ID, "why", st.Reason, "were", rec.Servers, "are", next)
	for _, id := range rec.Servers {
		if !slices.Contains(next, id) {
			rp.stale.add(rec.ID, id, rec.Length, false)
			rp.faults.clear(rec.ID, id)
		}
	}
	return errors.Join(errs...)
}

// prefer moves the source chosen by free to the front.
func (j *job) prefer(from []meta.ServerID) []meta.ServerID {
	if len(j.from) == 0 || !slices.Contains(from, j.from[0]) {
		return from
	}
	return append([]meta.ServerID{j.from[0]}, slices.DeleteFunc(slices.Clone(from), func(id meta.ServerID) bool { return id == j.from[0] })...)
}

// fresh returns a fence for an order about a sealed chunk, above the fence f of the chunk's
// record and above all earlier fences of this owner, for any chunk. A server with a later
// order then refuses a late order: a late deletion does not remove a newer copy, and a late
// copy does not restore a deleted replica.
func (rp *repairing) fresh(f meta.Fence) meta.Fence {
	seals := uint32(0)
	if f.Term == rp.k.own.Term() {
		seals = f.Seals
	}
	for {
		last := rp.fences.Load()
		if next := max(last, seals) + 1; rp.fences.CompareAndSwap(last, next) {
			return meta.Fence{Term: rp.k.own.Term(), Seals: next}
		}
	}
}

// setReplicas journals the servers of a chunk if the chunk's record is still rec. fence is the
// fence of the copies' orders. Without servers, the record marks the chunk as lost.
func (rp *repairing) setReplicas(ctx context.Context, rec *meta.ChunkRecord, servers []meta.ServerID, fence meta.Fence) error {
	k := rp.k
	op := &meta.SetReplicas{Chunk: rec.ID, Expect: rec.Servers, Servers: servers, Fence: fence, Lost: len(servers) == 0}
	_, err := k.do(ctx, op, func() error {
		if k.failed == nil && k.leaving != nil {
			return errLeaving
		}
		return k.failed
	})
	return err
}

// look asks the servers of all replicas marked as bad, and returns the state of all replicas.
// look clears the marks of replicas that are good again.
func (rp *repairing) look(ctx context.Context, rec *meta.ChunkRecord) ([]placement.Replica, error) {
	replicas := rp.faults.replicas(rec)
	for i := range replicas {
		if replicas[i].State != placement.Bad {
			continue
		}
		state, err := rp.judge(ctx, rec, replicas[i].Server)
		switch {
		case errors.Is(err, meta.Unavailable), errors.Is(err, meta.Canceled), errors.Is(err, meta.Interrupted):
			// The mark stands.
		case err != nil:
			return nil, err
		case state == placement.Good:
			rp.faults.clear(rec.ID, replicas[i].Server)
			replicas[i].State = placement.Good
		}
	}
	return replicas, nil
}

// provesBad reports whether an order that failed with k shows that the replica is missing or
// damaged. An error of any other kind shows nothing: the server is away or slow, the order was
// interrupted, or its owner is. The replica may then be good.
func provesBad(k meta.Kind) bool {
	switch k {
	case meta.NoSuchChunk, meta.Corrupt, meta.IO, meta.WrongOffset, meta.Sealed, meta.Fenced:
		return true
	}
	return false
}

// judge asks a server about its replica of a sealed chunk. If the replica is still open, judge
// seals the replica at the journaled end first (rule 5). Bad without an error: the server
// answered, and the replica is missing or damaged. With an error, nothing is known about the
// replica.
func (rp *repairing) judge(ctx context.Context, rec *meta.ChunkRecord, server meta.ServerID) (placement.ReplicaState, error) {
	k := rp.k
	ask, cancel := context.WithTimeout(ctx, orderPatience)
	defer cancel()
	r, err := k.order(ask, server, meta.Order{Kind: meta.OrderStat, Chunk: rec.ID})
	if err == nil && r.State == meta.ChunkOpen {
		if err = rp.sealing.sealReplicas(ask, rec, []meta.ServerID{server})[0]; err == nil {
			return placement.Good, nil
		}
	}
	switch {
	case err == nil && r.Length == rec.Length && (rec.CRC == 0 || r.CRC == rec.CRC):
		if rp.faults.corrupt(rec.ID, server) {
			// The mark came from a read of the bytes, so an answer from the server's index
			// does not clear the mark.
			read, cancel := context.WithTimeout(ctx, verifyPatience(rec.Length))
			_, err := k.order(read, server, meta.Order{Kind: meta.OrderVerify, Chunk: rec.ID})
			cancel()
			switch {
			case provesBad(meta.KindOf(err)):
				return placement.Bad, nil
			case err != nil:
				return placement.Bad, err
			}
		}
		return placement.Good, nil
	case err == nil, provesBad(meta.KindOf(err)):
		return placement.Bad, nil
	default:
		return placement.Bad, err
	}
}

// orderPatience is how long a small order may take.
const orderPatience = 10 * time.Second

// agreed returns the checksum of a chunk whose seal did not journal a checksum. Every server
// in from must answer, and all must agree. Errors: Corrupt if the replicas differ.
func (rp *repairing) agreed(ctx context.Context, rec *meta.ChunkRecord, from []meta.ServerID) (uint32, error) {
	ctx, cancel := context.WithTimeout(ctx, orderPatience)
	defer cancel()
	var crc uint32
	for i, id := range from {
		r, err := rp.k.order(ctx, id, meta.Order{Kind: meta.OrderStat, Chunk: rec.ID})
		if err != nil {
			return 0, err
		}
		if r.State != meta.ChunkSealed || r.Length != rec.Length || i > 0 && r.CRC != crc {
			return 0, meta.E("repair", meta.Corrupt, rec.ID.String(), fmt.Errorf("its replicas differ: servers %v", from))
		}
		crc = r.CRC
	}
	return crc, nil
}

// copyTerms returns the rate of a copy of n bytes, in bytes per second, and its time limit, if
// the bounds allow rate. The capability for the reads is signed once and holds at most
// capability.MaxLife; a rate too low to finish within half of that time is raised.
func copyTerms(n, rate uint64) (uint64, time.Duration) {
	const most = uint64(capability.MaxLife/2) / uint64(time.Second)
	least := (n + most - 1) / most
	rate = max(rate, least, 1)
	return rate, copyPatience + time.Duration(n/min(rate, max(minCopyRate, least)))*time.Second
}

// pull copies a sealed chunk to the server to, from one of the servers in from. If the target
// has the same content already, the target only takes over the fence. Errors: Unavailable,
// Corrupt, NoSuchChunk, the target's errors.
func (rp *repairing) pull(ctx context.Context, rec *meta.ChunkRecord, fence meta.Fence, crc uint32, class string, to meta.ServerID, from []meta.ServerID) error {
	k := rp.k
	rate, patience := copyTerms(rec.Length, k.srv.repairs.share())
	ctx, cancel := context.WithTimeoutCause(ctx, patience, errors.New("the copy took too long"))
	defer cancel()
	or := meta.Order{
		Kind: meta.OrderPull, Chunk: rec.ID, Fence: fence, Length: rec.Length, CRC: crc, Class: class, Rate: rate, Compress: rp.words.compression(),
		Cap: k.srv.chunkServers.sign(patience+time.Minute, capability.Claims{
			Volume: k.vol, Chunk: rec.ID, Rights: capability.Read, Client: k.srv.chunkServers.certified(to), // the target shows the capability
		}),
	}
	for _, id := range from {
		if i, ok := k.srv.chunkServers.Resolve(id); ok {
			i.Disks = nil
			or.Sources = append(or.Sources, i)
		}
	}
	if len(or.Sources) == 0 {
		return meta.E("repair", meta.Unavailable, rec.ID.String(), fmt.Errorf("none of servers %v is connected", from))
	}
	r, err := k.order(ctx, to, or)
	if err == nil && (r.State != meta.ChunkSealed || r.Length != rec.Length || r.CRC != crc) {
		err = meta.E("repair", meta.Corrupt, rec.ID.String(), fmt.Errorf("server %d has %d bytes with checksum %08x, want %d with %08x", to, r.Length, r.CRC, rec.Length, crc))
	}
	if err != nil {
		if k := meta.KindOf(err); k == meta.Corrupt || k == meta.NoSuchChunk {
			rp.suspect(rec, from)
		}
		return err
	}
	k.srv.repairs.copiedNow(rec.Length)
	k.srv.repairs.changed(to, rec.Length, 0)
	return nil
}

// suspect verifies the replicas of all sources of a failed copy.
func (rp *repairing) suspect(rec *meta.ChunkRecord, servers []meta.ServerID) {
	for _, id := range servers {
		_ = rp.verifyReplica(rp.k.ctx, rec, id, 0, copyPatience) // verifyReplica marks a bad replica
	}
}

// verifyReplica makes a server read its whole replica of a chunk, at rate bytes per second (0:
// no limit), and compare the bytes with its checksums. For a sealed chunk, verifyReplica
// compares length and checksum with the record as well. A bad replica is marked and an
// inspection started. Errors: Corrupt, NoSuchChunk, IO; Unavailable, also if the replica is
// still open.
func (rp *repairing) verifyReplica(ctx context.Context, rec *meta.ChunkRecord, id meta.ServerID, rate uint64, patience time.Duration) error {
	k := rp.k
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	r, err := k.order(ctx, id, meta.Order{Kind: meta.OrderVerify, Chunk: rec.ID, Rate: rate})
	read := err != nil // the bytes are wrong, not only the server's index
	switch {
	case err != nil, rec.State != meta.ChunkSealed:
	case r.State != meta.ChunkSealed:
		err = meta.E("verify", meta.Unavailable, rec.ID.String(), fmt.Errorf("server %d has it open still", id))
	case r.Length != rec.Length || rec.CRC != 0 && r.CRC != rec.CRC:
		err = meta.E("verify", meta.Corrupt, rec.ID.String(), fmt.Errorf("server %d has %d bytes with checksum %08x, want %d with %08x", id, r.Length, r.CRC, rec.Length, rec.CRC))
	}
	switch kind := meta.KindOf(err); {
	case kind == meta.Corrupt, kind == meta.NoSuchChunk, kind == meta.IO, err != nil && !read:
		k.log.Warn("a replica does not verify", "chunk", rec.ID, "server", id, "error", err)
		known := rp.faults.has(rec.ID, id)
		rp.faults.set(rec.ID, id, placement.Bad, read)
		if !known {
			k.tasks.inspection.Wake()
		}
	}
	return err
}

// relist makes every owner list a server again.
func (r *repairs) relist(id meta.ServerID) {
	for _, o := range r.hosted.owners() {
		o.inspection.mu.Lock()
		delete(o.inspection.listed, id)
		o.inspection.changed[id] = time.Now()
		o.inspection.mu.Unlock()
		o.tasks.inspection.Wake()
	}
}

// events handles a chunk server's notices about replicas and disks.
func (r *repairs) events(id meta.ServerID, l []meta.ReplicaEvent) {
	for _, e := range l {
		switch e.Kind {
		case meta.EventCorrupt, meta.EventLost:
			r.badReplica(e.Chunk, id, e.Kind == meta.EventCorrupt)
		case meta.EventDiskFailed, meta.EventDiskBack:
			r.relist(id)
		}
	}
}

// badReplica notes a notice about a bad replica. The server is asked about the replica before
// any repair.
func (r *repairs) badReplica(chunk meta.ChunkID, server meta.ServerID, corrupt bool) {
	o := r.hosted.opened(chunk.Volume)
	if o == nil {
		return // the volume's owner gets the same notice on its own stream
	}
	o.faults.set(chunk, server, placement.Bad, corrupt)
	o.tasks.inspection.Wake()
}
