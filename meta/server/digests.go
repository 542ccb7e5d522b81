package server

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/time/rate"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/digest"
	"penstock.io/penstock/meta/digest/known"
	"penstock.io/penstock/meta/namespace"
	"penstock.io/penstock/meta/task"
)

// The owner of a volume computes the digests of snapshots, in the background. The owner reads
// the namespace from its own store, between requests, and file bytes as any reader does. The
// server keeps the names of blocks on its disk, by the places of the blocks' bytes: blocks
// shared with an earlier snapshot, and blocks read before an interruption, are not read again.
//
// A volume computes a single digest at a time. All volumes of a process together read at most
// at a fixed rate. Digests take turns of digestTurn each, in the order of arrival, so that a
// digest of days does not delay a digest of a second; a digest keeps its position in the tree
// between turns. Awaited digests (a client asked for the digest) have separate turns and a
// separate rate, and an awaited digest interrupts another digest begun on the same volume.
// Digests of mirrors whose copying has no rate limit also have separate turns: they read as
// fast as possible, several blocks at a time, since the mirror's round becomes visible only
// after the digests; the copier reads as fast.

// ChunkReader reads the bytes of chunks, verified.
type ChunkReader interface {
	ReadAt(ctx context.Context, pl meta.ChunkPlace, p []byte, off uint64) error
}

const (
	// DefaultDigestRate and DefaultAwaitedDigestRate are the bytes a second that background
	// digests and awaited digests read.
	DefaultDigestRate        = 64 << 20
	DefaultAwaitedDigestRate = 256 << 20
	// MinDigestRate is the least value of either rate: a block each second.
	MinDigestRate = digest.BlockSize
	// askCost is the cost of a question about the namespace, in bytes: a digest asks at most
	// some 16,000 questions a second.
	askCost = 4 << 10
	// digestAside is how many blocks a digest without a rate limit reads and sums in parallel,
	// processors permitting. unpacedSlots is how many such digests a process computes in
	// parallel: of a mirror's source and of its target.
	digestAside  = 4
	unpacedSlots = 2
	// digestTurn is the longest that a digest reads before other digests get a turn.
	digestTurn = 2 * time.Second
	// digestAwaited is how long a digest counts as awaited after a request for it.
	digestAwaited = 5 * time.Minute
	// digestRetry and digestRetryMost are the least and the longest wait before a retry.
	digestRetry     = 5 * time.Second
	digestRetryMost = 5 * time.Minute
	// digestPause bounds the extra wait after a failed digest. The extra wait is the time that
	// the digest took: the next try reads as much before it may fail again.
	digestPause = time.Hour
	// digestErrorMost bounds the text of a digest's last error, in bytes.
	digestErrorMost = 200
)

// digests holds the lanes of a server.
type digests struct {
	background, awaited, unpaced lane
}

// lane is shared by digests of several volumes. As many digests read at a time as the lane has
// slots.
type lane struct {
	slot  chan struct{} // digests get slots in order of arrival
	limit *rate.Limiter
	// paced: the limit counts questions and the bytes read. Otherwise, questions only.
	paced bool
}

func newDigests(background, awaited uint64) digests {
	lane := func(bytes uint64, slots int, paced bool) lane {
		return lane{make(chan struct{}, slots), rate.NewLimiter(rate.Limit(max(bytes, MinDigestRate)), 2*digest.BlockSize), paced}
	}
	return digests{lane(background, 1, true), lane(awaited, 1, true), lane(awaited, unpacedSlots, false)}
}

// digesting is an owner's state of digests.
type digesting struct {
	k         *kernel
	mirror    *mirrorTarget
	reading   *snapshotReading
	snapshots *snapshots

	hurry chan struct{} // capacity 1: a client began to wait for a digest

	mu      sync.Mutex
	awaited map[meta.Generation]waited // digests that a client waits for
	// arrivals are the writes to a mirror's target, to be summed before the target's digest is
	// computed; at most maxArrived.
	arrivals []arrival
	tried    map[meta.Generation]*retry // failed digests
	oldest   bool                       // of the digests not awaited, the oldest is next, else the newest

	busy bool // guarded by the owner's mu
}

// waited says until when a digest counts as awaited, and until when it has no rate limit.
type waited struct{ until, unpaced time.Time }

// retry is the state of a failed action that is to be tried again.
type retry struct {
	now  bool          // a try is running
	err  error         // of the last try
	wait time.Duration // between the last try and the next, doubled with each failure
	due  time.Time     // when the next try is due
}

// failed plans the next try.
func (r *retry) failed(err error, now time.Time) {
	r.wait = min(max(2*r.wait, digestRetry), digestRetryMost)
	r.err, r.due = err, now.Add(r.wait)
}

// digestDir is the folder of a volume's known blocks.
func (tr *trash) digestDir(v meta.VolumeID) string {
	return filepath.Join(tr.cfg.DigestDir, fmt.Sprintf("volume-%d", v))
}

// digestBusy records whether the owner computes a digest now.
func (d *digesting) digestBusy(yes bool) {
	d.k.mu.Lock()
	defer d.k.mu.Unlock()
	d.busy = yes
}

// wakeUp notifies the receiver of a channel of capacity 1, without blocking.
func wakeUp(ch chan<- struct{}) {
	select {
	case ch <- struct{}{}:
	default:
	}
}

// awaitDigest records that a client waits for the digest of a snapshot. With unpaced, the
// digest has no rate limit.
func (d *digesting) awaitDigest(at meta.Generation, unpaced bool) {
	now := time.Now()
	d.mu.Lock()
	w := d.awaited[at]
	news := !now.Before(w.until) || unpaced && !now.Before(w.unpaced)
	if d.awaited == nil {
		d.awaited = map[meta.Generation]waited{}
	}
	w.until = now.Add(digestAwaited)
	if unpaced {
		w.unpaced = w.until
	}
	d.awaited[at] = w
	d.mu.Unlock()
	if news {
		wakeUp(d.hurry)
		d.k.tasks.digests.Wake()
	}
}

// isAwaited reports whether a client waits for the digest of a snapshot, and whether the
// digest has no rate limit.
func (d *digesting) isAwaited(at meta.Generation) (awaited, unpaced bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	now, w := time.Now(), d.awaited[at]
	return now.Before(w.until), now.Before(w.unpaced)
}

// newDigestTask returns the task that computes missing digests.
func newDigestTask(o *owner) *task.Task {
	d := &o.digesting
	return task.New(task.Options{Name: "compute digests", Round: func(ctx context.Context) (time.Duration, error) {
		select {
		case <-d.hurry: // undigested finds the awaited digest
		default:
		}
		sn, ok, next, err := o.digesting.undigested()
		if awaited, _ := d.isAwaited(sn.At); err == nil && !(ok && awaited) && d.someArrived() {
			err := o.mirror.sumArrivals()
			if err != nil && ctx.Err() == nil {
				o.log.Warn("the digest of a mirror's snapshot waits until the copy is complete", "error", err)
				d.forgetArrivals()
			}
			return 0, err
		}
		if err == nil && ok {
			o.digesting.tryDigest(sn, nil)
			return 0, nil
		}
		if err != nil {
			if ctx.Err() == nil {
				o.log.Warn("the snapshots without a digest can't be listed; the owner tries again", "in", digestRetry, "error", err)
			}
			return digestRetry, err
		}
		if next.IsZero() {
			return task.Idle, nil
		}
		return max(0, time.Until(next)), nil // the next retry
	}})
}

// undigested returns the snapshot whose digest is to be computed now: an awaited snapshot,
// else a pinned snapshot, else in turns the newest and the oldest. With turns, neither waits
// for ever while snapshots are taken faster than digests are computed. A snapshot whose digest
// failed is skipped until its retry is due; next is when the first retry is due.
func (d *digesting) undigested() (sn meta.Snapshot, ok bool, next time.Time, err error) {
	k := d.k
	all, err := d.snapshots.list()
	if err != nil {
		return sn, false, next, err
	}
	k.mu.Lock()
	have, err := namespace.Digests(k.view())
	pins, perr := namespace.Pins(k.view(), k.now())
	k.mu.Unlock()
	if err := errors.Join(err, perr); err != nil {
		return sn, false, next, err
	}
	all = slices.DeleteFunc(all, func(s meta.Snapshot) bool {
		_, ok := have[s.At]
		return ok || s.Deleting
	})
	d.mu.Lock()
	defer d.mu.Unlock()
	there := map[meta.Generation]bool{}
	for _, s := range all {
		there[s.At] = true
	}
	maps.DeleteFunc(d.awaited, func(at meta.Generation, _ waited) bool { return !there[at] })
	maps.DeleteFunc(d.tried, func(at meta.Generation, _ *retry) bool { return !there[at] })
	now, best := time.Now(), 0
	for _, s := range all { // oldest first
		if r := d.tried[s.At]; r != nil && now.Before(r.due) {
			if next.IsZero() || r.due.Before(next) {
				next = r.due
			}
			continue
		}
		rank := 1
		switch {
		case now.Before(d.awaited[s.At].until):
			rank = 3
		case slices.ContainsFunc(pins, func(p meta.Pin) bool { return p.Snapshot == s.At }):
			rank = 2
		}
		if rank > best || rank == 1 && best == 1 && !d.oldest {
			sn, ok, best = s, true, rank
		}
	}
	return sn, ok, next, nil
}

// tryDigest computes a digest, and records a failure. blocks are the blocks of the digest
// interrupted by this digest, or nil.
func (d *digesting) tryDigest(sn meta.Snapshot, blocks *known.Blocks) {
	k := d.k
	trying := func(yes bool) {
		if r := d.tried[sn.At]; r != nil {
			r.now = yes
		}
	}
	d.mu.Lock()
	trying(true)
	d.mu.Unlock()
	began := time.Now()
	err := d.digest(sn, blocks)
	d.mu.Lock()
	defer d.mu.Unlock()
	trying(false)
	if k.ctx.Err() != nil || errors.Is(err, errOvertaken) {
		return
	}
	if err == nil {
		delete(d.tried, sn.At)
		delete(d.awaited, sn.At)
		d.oldest = !d.oldest
		return
	}
	r := d.tried[sn.At]
	if r == nil {
		if d.tried == nil {
			d.tried = map[meta.Generation]*retry{}
		}
		r = &retry{}
		d.tried[sn.At] = r
	}
	r.failed(err, time.Now())
	switch meta.KindOf(err) {
	case meta.NoSuchSnapshot: // the snapshot was deleted meanwhile
	case meta.Unavailable: // servers come and go
		k.log.Info("a snapshot has no digest yet; the owner tries again", "name", sn.Name, "in", time.Until(r.due).Round(time.Second), "error", err)
	default:
		r.due = r.due.Add(min(time.Since(began), digestPause))
		k.log.Warn("the digest of a snapshot failed; the owner tries again", "name", sn.Name, "in", time.Until(r.due).Round(time.Second), "error", err)
	}
}

// turn is the right of a digest to read.
type turn struct {
	d        *digesting
	sn       meta.Snapshot
	arrivals bool          // sums arrivals in a mirror's target, not a snapshot
	blocks   *known.Blocks // nil: before the first turn
	nested   bool          // interrupts another digest, and uses its blocks
	in       *lane         // the lane whose slot the digest holds, or nil
	since    time.Time
}

// take waits for this digest's turn, and then until the digest may ask so many questions and
// read n more bytes. An awaited digest of another snapshot of the volume is computed first.
// Errors: the owner's end; errOvertaken.
func (t *turn) take(ctx context.Context, questions, n int) error {
	d := t.d
	hurried := false
	select {
	case <-d.hurry:
		hurried = true
	default:
	}
	for hurried || t.in == nil || time.Since(t.since) > t.d.k.srv.cfg.digestTurn {
		t.leave()
		from := &t.d.k.srv.digests.background
		if t.arrivals {
			if from = &t.d.k.srv.digests.unpaced; hurried {
				return errOvertaken
			}
		} else if awaited, unpaced := d.isAwaited(t.sn.At); unpaced {
			from = &t.d.k.srv.digests.unpaced
		} else if awaited {
			from = &t.d.k.srv.digests.awaited
		} else if err := t.letPass(); err != nil {
			return err
		}
		hurried = false
		select {
		case from.slot <- struct{}{}:
			t.in, t.since = from, time.Now()
		case <-d.hurry:
			hurried = true
		case <-ctx.Done():
			return t.d.k.gone()
		}
	}
	cost := questions * askCost
	if t.in.paced {
		cost += n
	}
	if cost == 0 {
		return nil
	}
	return t.d.pace(t.in.limit, cost)
}

// aside returns how many blocks the digest may read in parallel.
func (t *turn) aside() int {
	if t.in == nil || t.in.paced {
		return 1
	}
	return min(digestAside, runtime.GOMAXPROCS(0))
}

// pace waits until the limiter permits n more. Errors: the owner's end.
func (d *digesting) pace(l *rate.Limiter, n int) error {
	if err := l.WaitN(d.k.ctx, n); err != nil {
		return d.k.gone()
	}
	return nil
}

// errOvertaken ends a digest not begun, or the summing of arrivals before a digest: another
// digest is to be computed first.
var errOvertaken = errors.New("another digest comes first")

// letPass computes the awaited digests of the volume. The caller's digest is not awaited, and
// continues from its position afterwards.
func (t *turn) letPass() error {
	for !t.nested {
		sn, ok, _, err := t.d.undigested()
		if err != nil {
			return err
		}
		if awaited, _ := t.d.isAwaited(sn.At); !ok || sn.At == t.sn.At || !awaited {
			return nil
		}
		if t.blocks == nil {
			return errOvertaken
		}
		t.d.tryDigest(sn, t.blocks)
		if t.d.k.ctx.Err() != nil {
			return t.d.k.gone()
		}
	}
	return nil
}

// leave gives up the slot, if held, so that other digests get a turn.
func (t *turn) leave() {
	if t.in != nil {
		<-t.in.slot
		t.in = nil
	}
}

// digest computes and records the digest of a snapshot. blocks are the blocks of the digest
// interrupted by this digest, which will finish them, or nil.
func (d *digesting) digest(sn meta.Snapshot, blocks *known.Blocks) (err error) {
	k := d.k
	t := &turn{d: d, sn: sn, blocks: blocks, nested: blocks != nil}
	defer t.leave()
	if !t.nested {
		d.digestBusy(true)
		defer d.digestBusy(false)
		// Volumes waiting for their first turn use no memory for blocks.
		if err := t.take(k.ctx, 0, 0); err != nil {
			return err
		}
		if t.blocks, err = known.Open(k.ctx, k.srv.trash.digestDir(k.vol)); err != nil {
			return err
		}
		defer func() {
			if err != nil {
				err = errors.Join(err, t.blocks.Close())
			} else if ferr := t.blocks.Finish(); ferr != nil {
				k.log.Warn("the digests of the read blocks could not be recorded", "error", ferr)
			}
		}()
	}
	// Other digests get a turn while a large table of blocks grows.
	defer func(before func()) { t.blocks.Growing = before }(t.blocks.Growing)
	t.blocks.Growing = t.leave
	began := time.Now()
	ask := func(ctx context.Context, op meta.Op) (*meta.Result, error) {
		if err := t.take(ctx, 1, 0); err != nil {
			return nil, err
		}
		return d.reading.ask(ctx, sn.At, op, t.leave)
	}
	// before takes the turn, for the bytes and for the question where the bytes lie; where
	// takes no turn, since reads run in parallel.
	before := func(ctx context.Context, n int) error { return t.take(ctx, min(n, 1), n) }
	where := func(ctx context.Context, op meta.Op) (*meta.Result, error) {
		return d.reading.ask(ctx, sn.At, op, func() {})
	}
	way := digest.Way{Known: t.blocks, Turn: before, Aside: t.aside}
	var v *vouching
	if d.mirror.isMirror() {
		if v, err = t.newVouching(); err != nil {
			return err
		}
		defer func() {
			if err := v.proved.Close(); err != nil {
				k.log.Warn("the records of a digest could not be removed", "error", err)
			}
		}()
		way.Known, way.Believe = v, v.believe
	}
	ctx := k.ctx
	if v != nil {
		ctx = v.ctx
	}
	sum, p, err := digest.Walk(ctx, digest.Asked{Ask: ask, Read: func(ctx context.Context, ino meta.Ino, p []byte, off uint64) error {
		return d.reading.readAt(ctx, where, ino, p, off)
	}}, way)
	if v != nil {
		err = v.wait(err)
	}
	if err != nil {
		return err
	}
	t.leave()
	k.mu.Lock()
	op := &meta.SetDigest{At: sn.At, Digest: meta.SnapshotDigest{Version: digest.Version, Sum: sum, Made: k.now(), Inodes: p.Inodes, Bytes: p.Bytes, Read: p.Read}}
	_, wait, err := k.start(op, 0)
	k.mu.Unlock()
	if err != nil {
		return err
	}
	k.log.Info("the digest of a snapshot was computed", "name", sn.Name, "digest", sum.String(), "inodes", p.Inodes, "bytes", p.Bytes, "read", p.Read, "took", time.Since(began).Round(time.Millisecond))
	if err := k.await(k.ctx, wait); err != nil || v == nil {
		return err
	}
	if err := v.proved.Keep(); err != nil && k.ctx.Err() == nil {
		k.log.Warn("the digests of the verified blocks could not be recorded", "error", err)
	}
	return nil
}

// forgetDigests removes the known blocks of a deleted volume.
func (tr *trash) forgetDigests(v meta.VolumeID) {
	if tr.cfg.DigestDir == "" {
		return
	}
	if err := os.RemoveAll(tr.digestDir(v)); err != nil {
		tr.log.Warn("the known blocks of a deleted volume could not be removed", "volume", v, "error", err)
	}
}

// listDigests adds to snapshots their digests, or the error of the last try and whether
// another try is running. The caller holds the owner's mu.
func (d *digesting) listDigests(l []meta.SnapshotInfo) error {
	all, err := namespace.Digests(d.k.view())
	d.mu.Lock()
	defer d.mu.Unlock()
	for i := range l {
		if r := d.tried[l[i].At]; r != nil {
			l[i].DigestError, l[i].DigestTrying = shortened(r.err), r.now
		}
		if d, ok := all[l[i].At]; ok {
			l[i].DigestError, l[i].DigestTrying = "", false
			l[i].Digest = &meta.DigestInfo{Digest: digest.Sum(d.Sum).String(), Made: time.Unix(0, int64(d.Made)).UTC(), Inodes: d.Inodes, Bytes: d.Bytes, Read: d.Read}
		}
	}
	return err
}

// shortened returns the first digestErrorMost bytes of an error's text.
func shortened(err error) string {
	text := err.Error()
	return strings.ToValidUTF8(text[:min(len(text), digestErrorMost)], "")
}
