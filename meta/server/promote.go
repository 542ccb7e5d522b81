package server

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/cluster"
	"penstock.io/penstock/meta/namespace"
	"penstock.io/penstock/meta/placement"
	"penstock.io/penstock/meta/task"
)

// Promoting a clone: the owner copies the data that the clone has in other volumes' chunks,
// chunk server by chunk server where the chunks lie. Then the clone does not need its origin
// any more. The volume's row records that the promotion is wanted; each owner of the clone
// continues it from the clone's state. Meanwhile calls wait only for the recall of a file's
// leases.
//
//	1. remove the parts of the origin's state that the clone can't see (SweepClone)
//	2. remove the clone's base, as a deleted snapshot is removed
//	3. copy ranges, and swap the extents of every generation (AdoptExtents)
//	4. the state is an ordinary volume's: store a checkpoint of it
//	5. remove the origin from the row; the origin forgets its note about the clone

const (
	// promoteRefs bounds the extents read in a round.
	promoteRefs = 200_000
	// promoteSome bounds the extents in an entry.
	promoteSome  = 1000
	promotePause = 5 * time.Second // after something failed
	// promotePiece bounds the bytes of an order if there is a rate. An order also copies at
	// most the bytes of one second at the rate.
	promotePiece = 16 << 20
)

// promotion is the progress of the work, and its rate.
type promotion struct {
	k           *kernel
	checkpoints *checkpoints
	clones      *clones
	collection  *collection
	compaction  *compaction
	foreign     *foreign
	leases      *leases
	sealing     *sealing

	copied, left atomic.Uint64

	rate  atomic.Uint64 // bytes a second; 0: no bound
	pace  pace          // of the single loop that copies
	looks atomic.Uint64 // times that the loop has read the row

	busy bool // a promotion is under way; the owner's mu guards busy
	// stop, if not nil, abandons the chunk being filled. The owner's mu guards stop.
	stop context.CancelCauseFunc
}

// errRolled is why a chunk being filled is abandoned: a rollback waits until no chunk is open,
// and the data to copy may differ after the rollback.
var errRolled = errors.New("the volume is being rolled back")

// errHeld: the places of all data left to copy may be cached by clients that are away, or
// can't commit their writes.
var errHeld = errors.New("clients that are away, or can't commit, have cached the rest")

// promote begins a promotion, or returns the progress of a promotion under way. rate, unless
// nil, holds from now on. Errors: Invalid (the rate), Busy (the volume has clones itself).
func (pr *promotion) promote(ctx context.Context, rate *uint64) (meta.PromoteStatus, error) {
	k := pr.k
	const op = "promote volume"
	if rate != nil && *rate != 0 && *rate < meta.MinPromoteRate {
		return meta.PromoteStatus{}, meta.E(op, meta.Invalid, "", fmt.Errorf("a rate of %d: it is 0 or at least %d bytes a second", *rate, meta.MinPromoteRate))
	}
	if err := k.await(ctx, k.recovered); err != nil {
		return meta.PromoteStatus{}, err
	}
	pr.clones.one.Lock()
	defer pr.clones.one.Unlock()
	c := k.srv.cfg.Cluster
	row, err := c.Volume(ctx, k.vol)
	if err != nil {
		return meta.PromoteStatus{}, err
	}
	if row.Origin == nil {
		return meta.PromoteStatus{Done: true, Copied: pr.copied.Load()}, nil
	}
	begun := row.Origin.Promoting
	if !begun {
		all, err := c.Volumes(ctx)
		if err != nil {
			return meta.PromoteStatus{}, err
		}
		if names := clonesIn(all, k.vol, 0); len(names) > 0 {
			return meta.PromoteStatus{}, meta.E(op, meta.Busy, row.Name, fmt.Errorf("its own clones need its origin, too: %s; promote or delete the clones first", strings.Join(names, ", ")))
		}
	}
	if !begun || rate != nil && *rate != row.Origin.Rate {
		if row, err = c.UpdateVolume(ctx, k.vol, func(v *cluster.Volume) error {
			if v.Origin != nil {
				v.Origin.Promoting = true
				if rate != nil {
					v.Origin.Rate = *rate
				}
			}
			return nil
		}); err != nil {
			return meta.PromoteStatus{}, err
		}
		if row.Origin == nil { // the promotion ended just now
			return meta.PromoteStatus{Done: true, Copied: pr.copied.Load()}, nil
		}
		k.log.Info("the clone is being promoted", "origin", row.Origin.Volume, "snapshot", row.Origin.Snapshot, "rate", row.Origin.Rate)
	}
	pr.rate.Store(row.Origin.Rate)
	k.tasks.promotion.Wake()
	return meta.PromoteStatus{Copied: pr.copied.Load(), Left: pr.left.Load(), Rate: row.Origin.Rate}, nil
}

// promoteSpan is how many bytes an order may copy.
func (pr *promotion) promoteSpan() uint64 {
	if rate := pr.rate.Load(); rate != 0 {
		return min(rate, promotePiece)
	}
	return 1<<64 - 1
}

// promoteTurn waits until the rate lets n bytes be copied.
func (pr *promotion) promoteTurn(ctx context.Context, n uint64) error {
	if rate := pr.rate.Load(); rate != 0 {
		if wait := pr.pace.take(time.Now(), int(n), float64(rate)); wait > 0 {
			select {
			case <-time.After(wait):
			case <-ctx.Done():
			}
		}
	}
	return context.Cause(ctx)
}

// rolledBack waits until the volume is not being rolled back.
func (pr *promotion) rolledBack(ctx context.Context) error {
	k := pr.k
	k.mu.Lock()
	closed := k.closed
	k.mu.Unlock()
	if closed == nil {
		return nil
	}
	return k.await(ctx, closed)
}

// newPromotionTask returns the task that continues a promotion, after promote and after the
// volume is opened.
func newPromotionTask(o *owner) *task.Task {
	return task.New(task.Options{
		Name: "promote the clone", Retry: promotePause,
		Failed: "promoting the clone stopped, it is tried again", Log: o.log,
		Round: func(ctx context.Context) (time.Duration, error) {
			origin, err := o.promotion.toPromote()
			if err == nil && origin != nil {
				o.promotion.setPromoting(true)
				err = o.promotion.promoteAll(ctx, origin)
			}
			if err == nil {
				o.promotion.setPromoting(false)
			}
			return task.Idle, err
		},
	})
}

// toPromote reads the volume's row. It returns the origin if a promotion is wanted, else nil,
// and sets the rate from the row. clones.one is held meanwhile, so that a rate set by promote at
// the same time is stored later, and stays.
func (pr *promotion) toPromote() (*cluster.Origin, error) {
	k := pr.k
	pr.clones.one.Lock()
	defer pr.clones.one.Unlock()
	defer pr.looks.Add(1)
	row, err := k.srv.cfg.Cluster.Volume(k.ctx, k.vol)
	if err != nil || row.Origin == nil || !row.Origin.Promoting {
		return nil, err
	}
	pr.rate.Store(row.Origin.Rate)
	return row.Origin, nil
}

func (pr *promotion) setPromoting(yes bool) {
	pr.k.mu.Lock()
	pr.busy = yes
	pr.k.mu.Unlock()
}

// step runs an operation of the owner and waits for the journal.
func (pr *promotion) step(ctx context.Context, op meta.Op) (*meta.Result, error) {
	return pr.k.do(ctx, op, nil)
}

func (pr *promotion) promoteAll(ctx context.Context, origin *cluster.Origin) error {
	k := pr.k
	var base meta.Generation
	for sweep := (&meta.SweepClone{}); ; {
		res, err := pr.step(ctx, sweep)
		if err != nil {
			return err
		}
		if res.EOF {
			base = meta.Generation(res.Off)
			break
		}
		sweep.From = res.Data
	}
	for base != 0 {
		res, err := pr.step(ctx, &meta.DropSnapshot{At: base, Max: dropStep})
		if err != nil {
			return err
		}
		if res.EOF {
			break
		}
	}
	for more := true; more; {
		err := pr.rolledBack(ctx)
		if err == nil {
			more, err = pr.adoptSome(ctx)
		}
		switch {
		case errors.Is(err, errHeld):
			select {
			case <-time.After(k.srv.cfg.SessionTTL):
			case <-ctx.Done():
				return k.gone()
			}
		case err != nil && !errors.Is(err, errRolled):
			return err
		}
	}
	k.tasks.usage.Wake()
	if _, err := pr.step(ctx, &meta.SweepClone{Forget: true}); err != nil {
		return err
	}
	// From now on, the state loaded by other servers is the clone's own.
	if err := k.settled(ctx); err != nil {
		return err
	}
	if err := pr.checkpoints.checkpoint(ctx); err != nil {
		return err
	}
	if _, err := k.srv.cfg.Cluster.UpdateVolume(ctx, k.vol, func(v *cluster.Volume) error { v.Origin = nil; return nil }); err != nil {
		return err
	}
	k.mu.Lock()
	pr.foreign.clone = false
	k.mu.Unlock()
	k.log.Info("the clone was promoted", "copied", pr.copied.Load())
	k.srv.peers.settleOrigin(ctx, origin)
	return nil
}

// adoptSome copies some of the data in other volumes' chunks. If it finds no such data in any
// generation, none can come later, since only existing data can be copied by reference.
// Errors: errHeld, errRolled.
func (pr *promotion) adoptSome(ctx context.Context) (more bool, err error) {
	k := pr.k
	if err := k.settled(ctx); err != nil {
		return false, err
	}
	k.mu.Lock()
	if k.ctx.Err() != nil || k.stClosed {
		k.mu.Unlock()
		return false, k.gone()
	}
	k.wg.Hold() // the store stays open meanwhile
	defer k.wg.Release()
	frozen := k.st.Freeze()
	beyond := pr.leases.AllOutOfReach(time.Now(), isAway)
	k.mu.Unlock()
	refs := map[meta.ChunkID][]namespace.ForeignExtent{}
	n, left := 0, uint64(0)
	err = namespace.ForeignExtents(frozen, func(e namespace.ForeignExtent) bool {
		left += e.Len
		if _, ok := refs[e.Chunk]; !beyond[e.Ino] && (ok || n < promoteRefs) {
			refs[e.Chunk] = append(refs[e.Chunk], e)
			n++
		}
		return k.ctx.Err() == nil
	})
	if err = errors.Join(err, frozen.Close()); err != nil {
		return false, err
	}
	pr.left.Store(left)
	if n == 0 && left > 0 {
		return true, errHeld
	}
	if n == 0 {
		return false, nil
	}
	ids := slices.SortedFunc(maps.Keys(refs), meta.ChunkID.Compare)
	most := 256
	if pr.rate.Load() != 0 {
		most = 1 // repair moves chunks during a slow copy: look places up late
	}
	for len(ids) > 0 {
		some := 1
		for some < min(len(ids), most) && ids[some].Volume == ids[0].Volume {
			some++
		}
		places, err := k.srv.peers.placesIn(ctx, ids[0].Volume, ids[:some], true)
		if err != nil {
			return false, err
		}
		for _, p := range places {
			// A file may have got out of reach since, while an earlier chunk was copied.
			k.mu.Lock()
			reach := slices.DeleteFunc(refs[p.ID], func(e namespace.ForeignExtent) bool { return pr.leases.outOfReach(e.Ino) })
			k.mu.Unlock()
			if len(reach) == 0 {
				continue
			}
			if err := pr.adoptChunk(ctx, p, reach); err != nil {
				return true, err
			}
		}
		ids = ids[some:]
	}
	return true, nil
}

// adoptChunk copies the needed ranges of a chunk to a chunk of this volume, on the servers of
// the original, and swaps the extents. Errors: errRolled (a rollback began: the collector
// seals the unfinished chunk, which is garbage).
func (pr *promotion) adoptChunk(ctx context.Context, from meta.ChunkPlace, refs []namespace.ForeignExtent) (err error) {
	k := pr.k
	const op = "promote volume"
	m := k.srv.serverMap.servers()
	var servers []meta.ServerID
	for _, id := range from.Servers {
		if s, ok := m.Server(id); ok && s.State == placement.Live {
			servers = append(servers, id)
		}
	}
	if len(servers) == 0 || !from.Sealed {
		return meta.E(op, meta.Unavailable, from.ID.String(), fmt.Errorf("it lies on %v, sealed: %v", from.Servers, from.Sealed))
	}
	policy, err := k.policy()
	if err != nil {
		return err
	}
	runs := union(refs)
	ctx, stop := context.WithCancelCause(ctx)
	defer stop(nil)
	k.mu.Lock()
	if k.closed != nil {
		k.mu.Unlock()
		return errRolled // before a chunk is open, or the rollback would wait for it
	}
	fence := meta.Fence{Term: k.own.Term()}
	res, wait, err := k.start(&meta.AllocChunks{N: 1, Servers: [][]meta.ServerID{servers}, Fence: fence}, 0)
	if err != nil {
		k.mu.Unlock()
		return err
	}
	target := res.Chunks[0].ID
	pr.collection.filling[target], pr.stop = true, stop
	k.mu.Unlock()
	defer func() {
		k.mu.Lock()
		delete(pr.collection.filling, target)
		pr.stop = nil
		k.mu.Unlock()
		if err != nil && context.Cause(ctx) == errRolled {
			err = errRolled
		}
	}()
	if err := k.await(ctx, wait); err != nil {
		return err
	}
	class := classOn(m, servers, policy.Class)
	var length uint64
	at := make([]uint64, len(runs))               // where each run begins in the copy
	for i, done := 0, uint64(0); i < len(runs); { // done: bytes of runs[i]
		order := meta.Order{Kind: meta.OrderCopy, Chunk: target, Fence: fence, From: from.ID, Length: length, Class: class}
		for room := pr.promoteSpan(); room > 0 && len(order.Ranges) < 1024 && i < len(runs); {
			if done == 0 {
				at[i] = length
			}
			n := min(room, runs[i].Len-done)
			order.Ranges = append(order.Ranges, meta.CopyRun{Off: runs[i].Off + done, Len: n})
			room, length, done = room-n, length+n, done+n
			if done == runs[i].Len {
				i, done = i+1, 0
			}
		}
		if err := pr.promoteTurn(ctx, length-order.Length); err != nil {
			return err
		}
		if err := pr.compaction.copyOn(ctx, servers, order, length, copyPatience+time.Duration((length-order.Length)/minCopyRate)*time.Second, nil); err != nil {
			return err // the collector seals the unfinished chunk, which is garbage
		}
	}
	byInode := map[meta.Ino][]meta.Adopted{}
	for _, r := range refs {
		i, _ := slices.BinarySearchFunc(runs, r.ChunkOff, func(x meta.CopyRun, off uint64) int { return cmp.Compare(x.Off+x.Len-1, off) })
		byInode[r.Ino] = append(byInode[r.Ino], meta.Adopted{Ino: r.Ino, At: r.At, Old: r.Extent, Copy: target, Off: at[i] + r.ChunkOff - runs[i].Off})
	}
	for _, ino := range slices.Sorted(maps.Keys(byInode)) {
		for some := range slices.Chunk(byInode[ino], promoteSome) {
			if err := context.Cause(ctx); err != nil {
				return err
			}
			if err := pr.adopt1(ino, some); err != nil && !errors.Is(err, meta.Again) {
				return err
			}
		}
	}
	_, err = pr.sealing.seal(ctx, target, nil)
	return err
}

// classOn returns the class if each of the servers has a disk of the class with room, else "".
// A copy stays on the servers of its original: a server without such a disk takes the copy on any
// disk, and the repair moves the copy later.
func classOn(m *placement.Map, servers []meta.ServerID, class string) string {
	for _, id := range servers {
		s, ok := m.Server(id)
		if !ok || !slices.ContainsFunc(s.Disks, func(d placement.Disk) bool { return d.Class == class && d.Free > placement.Reserve(d.Total) }) {
			return ""
		}
	}
	return class
}

// union joins the ranges of the chunk with references from extents.
func union(refs []namespace.ForeignExtent) (runs []meta.CopyRun) {
	sorted := slices.SortedFunc(slices.Values(refs), func(a, b namespace.ForeignExtent) int { return cmp.Compare(a.ChunkOff, b.ChunkOff) })
	for _, r := range sorted {
		end := r.ChunkOff + r.Len
		if n := len(runs) - 1; n >= 0 && r.ChunkOff <= runs[n].Off+runs[n].Len {
			runs[n].Len = max(runs[n].Len, end-runs[n].Off)
			continue
		}
		runs = append(runs, meta.CopyRun{Off: r.ChunkOff, Len: r.Len})
	}
	return runs
}

// adopt1 swaps extents of an inode. Sessions that cached the extents' places are asked to drop
// them first, as for compaction.
func (pr *promotion) adopt1(ino meta.Ino, l []meta.Adopted) error {
	res, err := pr.compaction.swapped(ino, func() (meta.Op, error) { return &meta.AdoptExtents{Extents: l}, nil })
	if err == nil {
		pr.copied.Add(res.Off)
		pr.left.Add(-min(res.Off, pr.left.Load()))
	}
	return err
}
