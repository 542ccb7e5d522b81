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

// Digests of snapshots are computed by the owner of the volume, in the
// background. It reads the namespace from its own store, between other requests,
// and bytes as any reader does. What blocks are called is remembered on this
// server's disk, by the places of their bytes: what an earlier snapshot shares, and
// what was read before an interruption, is not read again.
//
// A volume computes one digest at a time, and all volumes of a process together
// read no more than a rate. They take turns, digestTurn each, in the order in which
// they came: a digest that takes days keeps nobody from one that takes a second. It
// keeps its place in the tree meanwhile. Digests that somebody waits for (who asked
// for it) have turns and a rate of their own, and one of them goes before another of
// the same volume that was begun. So have those of mirrors whose copying is not held
// to a rate: they read bytes as fast as they can, several blocks at a time, since a
// round is shown no sooner than they are there; the copier reads as fast.

// ChunkReader reads the bytes of chunks, verified.
type ChunkReader interface {
	ReadAt(ctx context.Context, pl meta.ChunkPlace, p []byte, off uint64) error
}

const (
	// DefaultDigestRate and DefaultAwaitedDigestRate are how many bytes a second
	// digests read, and those that somebody waits for.
	DefaultDigestRate        = 64 << 20
	DefaultAwaitedDigestRate = 256 << 20
	// MinDigestRate is the least of both: a block each second.
	MinDigestRate = digest.BlockSize
	// askCost is what a question about the namespace counts as, in bytes: a
	// digest asks some 16,000 a second at most.
	askCost = 4 << 10
	// digestAside is how many blocks a digest that is not held to a rate reads and sums
	// at a time, as far as there are processors, and unpacedSlots how many such digests
	// a process computes side by side: of a mirror's source and of its target.
	digestAside  = 4
	unpacedSlots = 2
	// digestTurn is how long a digest reads before others get their turn.
	digestTurn = 2 * time.Second
	// digestAwaited is how long who asked for a digest counts as waiting for it.
	digestAwaited = 5 * time.Minute
	// digestRetry and digestRetryMost are the times between two tries.
	digestRetry     = 5 * time.Second
	digestRetryMost = 5 * time.Minute
	// digestPause is the longest that a digest which failed waits in addition, as
	// long as it took: it will read as much again before it fails in the same place.
	digestPause = time.Hour
	// digestErrorMost bounds the text of why there is no digest, in bytes.
	digestErrorMost = 200
)

// digests is what a server has for them.
type digests struct {
	background, awaited, unpaced lane
}

// lane is what digests of several volumes share: as many read at a time as it has slots.
type lane struct {
	slot  chan struct{} // who came first gets one first
	limit *rate.Limiter
	// paced: the limit is for the bytes that are read, too, and not for questions alone.
	paced bool
}

func newDigests(background, awaited uint64) digests {
	lane := func(bytes uint64, slots int, paced bool) lane {
		return lane{make(chan struct{}, slots), rate.NewLimiter(rate.Limit(max(bytes, MinDigestRate)), 2*digest.BlockSize), paced}
	}
	return digests{lane(background, 1, true), lane(awaited, 1, true), lane(awaited, unpacedSlots, false)}
}

// digesting is what an owner has for them.
type digesting struct {
	hurry chan struct{} // capacity 1: somebody began to wait for a digest

	mu      sync.Mutex
	awaited map[meta.Generation]waited // somebody waits for it
	// arrivals are what was written to a mirror's target, to be summed before a digest
	// is computed of it; maxArrived at most.
	arrivals []arrival
	tried    map[meta.Generation]*retry // it failed
	oldest   bool                       // whose turn it is among those that nobody waits for

	busy bool // guarded by the owner's mu
}

// waited says until when somebody waits for a digest, and until when it is not held to
// a rate.
type waited struct{ until, unpaced time.Time }

// retry is about something that failed and is to be tried again.
type retry struct {
	now  bool          // it is being tried
	err  error         // why
	wait time.Duration // before the try after the next
	due  time.Time     // of the next
}

// failed plans the next try.
func (r *retry) failed(err error, now time.Time) {
	r.wait = min(max(2*r.wait, digestRetry), digestRetryMost)
	r.err, r.due = err, now.Add(r.wait)
}

// digestDir is where a volume's known blocks are.
func (s *Server) digestDir(v meta.VolumeID) string {
	return filepath.Join(s.cfg.DigestDir, fmt.Sprintf("volume-%d", v))
}

// digestsHere tells whether owners of this process compute digests.
func (s *Server) digestsHere() bool { return s.cfg.Chunks != nil && s.cfg.DigestDir != "" }

// digestBusy notes whether the owner computes a digest now.
func (o *owner) digestBusy(yes bool) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.digesting.busy = yes
}

// wakeUp tells who waits at a channel of capacity 1.
func wakeUp(ch chan<- struct{}) {
	select {
	case ch <- struct{}{}:
	default:
	}
}

// awaitDigest notes that somebody waits for the digest of a snapshot, which is not to be
// held to a rate if it is unpaced.
func (o *owner) awaitDigest(at meta.Generation, unpaced bool) {
	d := &o.digesting
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
		o.tasks.digests.Wake()
	}
}

// isAwaited tells whether somebody waits for the digest of a snapshot, and whether it is
// not held to a rate.
func (d *digesting) isAwaited(at meta.Generation) (awaited, unpaced bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	now, w := time.Now(), d.awaited[at]
	return now.Before(w.until), now.Before(w.unpaced)
}

// newDigestTask computes what is missing.
func newDigestTask(o *owner) *task.Task {
	d := &o.digesting
	return task.New(task.Options{Name: "compute digests", Round: func(ctx context.Context) (time.Duration, error) {
		select {
		case <-d.hurry: // who waits is seen below
		default:
		}
		sn, ok, next, err := o.undigested()
		if awaited, _ := d.isAwaited(sn.At); err == nil && !(ok && awaited) && d.someArrived() {
			err := o.sumArrivals()
			if err != nil && ctx.Err() == nil {
				o.log.Warn("what a mirror copies is summed when all of it is there", "error", err)
				d.forgetArrivals()
			}
			return 0, err
		}
		if err == nil && ok {
			o.tryDigest(sn, nil)
			return 0, nil
		}
		if err != nil {
			if ctx.Err() == nil {
				o.log.Warn("it could not be found out which snapshots have no digest; that is tried again", "in", digestRetry, "error", err)
			}
			return digestRetry, err
		}
		if next.IsZero() {
			return task.Idle, nil
		}
		return max(0, time.Until(next)), nil // of those that failed
	}})
}

// undigested is the snapshot whose digest is to be computed now: one that somebody
// waits for, else one that is pinned, else by turns the newest and the oldest, so
// that neither waits for ever while snapshots are taken faster than digests can be
// computed. One that failed is not among them before it is due; next is when the
// first of those is.
func (o *owner) undigested() (sn meta.Snapshot, ok bool, next time.Time, err error) {
	all, err := o.snapshots()
	if err != nil {
		return sn, false, next, err
	}
	o.mu.Lock()
	have, err := namespace.Digests(&view{o: o})
	pins, perr := namespace.Pins(&view{o: o}, o.now())
	o.mu.Unlock()
	if err := errors.Join(err, perr); err != nil {
		return sn, false, next, err
	}
	all = slices.DeleteFunc(all, func(s meta.Snapshot) bool {
		_, ok := have[s.At]
		return ok || s.Deleting
	})
	d := &o.digesting
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

// tryDigest computes a digest, and remembers whether that failed. blocks are those
// of the digest that this one goes before; nil: of none.
func (o *owner) tryDigest(sn meta.Snapshot, blocks *known.Blocks) {
	d := &o.digesting
	trying := func(yes bool) {
		if r := d.tried[sn.At]; r != nil {
			r.now = yes
		}
	}
	d.mu.Lock()
	trying(true)
	d.mu.Unlock()
	began := time.Now()
	err := o.digest(sn, blocks)
	d.mu.Lock()
	defer d.mu.Unlock()
	trying(false)
	if o.ctx.Err() != nil || errors.Is(err, errOvertaken) {
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
	case meta.NoSuchSnapshot: // it was deleted meanwhile
	case meta.Unavailable: // servers come and go
		o.log.Info("no digest of a snapshot yet; it is tried again", "name", sn.Name, "in", time.Until(r.due).Round(time.Second), "error", err)
	default:
		r.due = r.due.Add(min(time.Since(began), digestPause))
		o.log.Warn("no digest of a snapshot; it is tried again", "name", sn.Name, "in", time.Until(r.due).Round(time.Second), "error", err)
	}
}

// turn is the right of a digest to read.
type turn struct {
	o        *owner
	sn       meta.Snapshot
	arrivals bool          // of what arrived in a mirror's target, and not of a snapshot
	blocks   *known.Blocks // nil: before the first turn
	nested   bool          // it goes before another one that was begun, whose blocks it has
	in       *lane         // whose slot it has; nil: none
	since    time.Time
}

// take waits until it is this digest's turn, and then until it may ask so many
// questions and read n bytes more. One of another snapshot of the volume that somebody
// waits for is computed first. Errors: the owner's end; errOvertaken.
func (t *turn) take(ctx context.Context, questions, n int) error {
	d := &t.o.digesting
	hurried := false
	select {
	case <-d.hurry:
		hurried = true
	default:
	}
	for hurried || t.in == nil || time.Since(t.since) > t.o.srv.cfg.digestTurn {
		t.leave()
		from := &t.o.srv.digests.background
		if t.arrivals {
			if from = &t.o.srv.digests.unpaced; hurried {
				return errOvertaken
			}
		} else if awaited, unpaced := d.isAwaited(t.sn.At); unpaced {
			from = &t.o.srv.digests.unpaced
		} else if awaited {
			from = &t.o.srv.digests.awaited
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
			return t.o.gone()
		}
	}
	cost := questions * askCost
	if t.in.paced {
		cost += n
	}
	if cost == 0 {
		return nil
	}
	return t.o.pace(t.in.limit, cost)
}

// aside is how many blocks may be read at a time.
func (t *turn) aside() int {
	if t.in == nil || t.in.paced {
		return 1
	}
	return min(digestAside, runtime.GOMAXPROCS(0))
}

// pace waits until n more of what a limiter counts may be done. Errors: the owner's
// end.
func (o *owner) pace(l *rate.Limiter, n int) error {
	if err := l.WaitN(o.ctx, n); err != nil {
		return o.gone()
	}
	return nil
}

// errOvertaken ends a digest that has not begun, and what is done before one: another
// one is to be computed first.
var errOvertaken = errors.New("another digest comes first")

// letPass computes the digests of the volume that somebody waits for. This is not
// one of them, and goes on from where it is.
func (t *turn) letPass() error {
	for !t.nested {
		sn, ok, _, err := t.o.undigested()
		if err != nil {
			return err
		}
		if awaited, _ := t.o.digesting.isAwaited(sn.At); !ok || sn.At == t.sn.At || !awaited {
			return nil
		}
		if t.blocks == nil {
			return errOvertaken
		}
		t.o.tryDigest(sn, t.blocks)
		if t.o.ctx.Err() != nil {
			return t.o.gone()
		}
	}
	return nil
}

// leave lets others have their turn.
func (t *turn) leave() {
	if t.in != nil {
		<-t.in.slot
		t.in = nil
	}
}

// digest computes and records one. blocks are those of the digest that it goes
// before, which will finish them.
func (o *owner) digest(sn meta.Snapshot, blocks *known.Blocks) (err error) {
	t := &turn{o: o, sn: sn, blocks: blocks, nested: blocks != nil}
	defer t.leave()
	if !t.nested {
		o.digestBusy(true)
		defer o.digestBusy(false)
		// However many volumes wait for their first turn, they take no memory.
		if err := t.take(o.ctx, 0, 0); err != nil {
			return err
		}
		if t.blocks, err = known.Open(o.ctx, o.srv.digestDir(o.vol)); err != nil {
			return err
		}
		defer func() {
			if err != nil {
				err = errors.Join(err, t.blocks.Close())
			} else if ferr := t.blocks.Finish(); ferr != nil {
				o.log.Warn("blocks that were read are not remembered", "error", ferr)
			}
		}()
	}
	// Others read while a large table grows.
	defer func(before func()) { t.blocks.Growing = before }(t.blocks.Growing)
	t.blocks.Growing = t.leave
	began := time.Now()
	ask := func(ctx context.Context, op meta.Op) (*meta.Result, error) {
		if err := t.take(ctx, 1, 0); err != nil {
			return nil, err
		}
		return o.askAt(ctx, sn.At, op, t.leave)
	}
	// The turn, and the question for where the bytes are, which are read beside.
	before := func(ctx context.Context, n int) error { return t.take(ctx, min(n, 1), n) }
	where := func(ctx context.Context, op meta.Op) (*meta.Result, error) {
		return o.askAt(ctx, sn.At, op, func() {})
	}
	way := digest.Way{Known: t.blocks, Turn: before, Aside: t.aside}
	var v *vouching
	if o.isMirror() {
		if v, err = t.newVouching(); err != nil {
			return err
		}
		defer func() {
			if err := v.proved.Close(); err != nil {
				o.log.Warn("what a digest made out is not forgotten", "error", err)
			}
		}()
		way.Known, way.Believe = v, v.believe
	}
	ctx := o.ctx
	if v != nil {
		ctx = v.ctx
	}
	sum, p, err := digest.Walk(ctx, digest.Asked{Ask: ask, Read: func(ctx context.Context, ino meta.Ino, p []byte, off uint64) error {
		return o.readAt(ctx, where, ino, p, off)
	}}, way)
	if v != nil {
		err = v.wait(err)
	}
	if err != nil {
		return err
	}
	t.leave()
	o.mu.Lock()
	seq := o.cur.seq
	op := &meta.SetDigest{At: sn.At, Digest: meta.SnapshotDigest{Version: digest.Version, Sum: sum, Made: o.now(), Inodes: p.Inodes, Bytes: p.Bytes, Read: p.Read}}
	_, err = o.run(op, 0)
	wait := o.untilDurable(seq)
	o.mu.Unlock()
	if err != nil {
		return err
	}
	o.log.Info("digest of a snapshot", "name", sn.Name, "digest", sum.String(), "inodes", p.Inodes, "bytes", p.Bytes, "read", p.Read, "took", time.Since(began).Round(time.Millisecond))
	if err := o.await(o.ctx, wait); err != nil || v == nil {
		return err
	}
	if err := v.proved.Keep(); err != nil && o.ctx.Err() == nil {
		o.log.Warn("blocks that were verified are not remembered", "error", err)
	}
	return nil
}

// askAt reads the namespace at a snapshot. waiting is called before it waits for
// others.
func (o *owner) askAt(ctx context.Context, at meta.Generation, op meta.Op, waiting func()) (*meta.Result, error) {
	for {
		res, wait, err := o.tryAt(at, op)
		if err != nil || wait == nil {
			return res, err
		}
		waiting()
		if err := o.await(ctx, wait); err != nil {
			return nil, err
		}
	}
}

// tryAt reads, or says what to wait for first: the places of a clone's chunks in
// other volumes.
func (o *owner) tryAt(at meta.Generation, op meta.Op) (*meta.Result, <-chan struct{}, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.failed != nil {
		return nil, nil, o.failed
	}
	q := o.context(0)
	q.At = at
	res, err := namespace.Query(&view{o: o}, q, op)
	if err != nil {
		return nil, nil, err
	}
	wait, err := o.fillPlaces(res)
	return res, wait, err
}

// readAt reads the bytes of a file of a tree that ask answers for.
func (o *owner) readAt(ctx context.Context, ask func(context.Context, meta.Op) (*meta.Result, error), ino meta.Ino, p []byte, off uint64) error {
	var m fileMap
	if err := m.ask(func(op meta.Op) (*meta.Result, error) { return ask(ctx, op) }, ino, off, off+uint64(len(p))); err != nil {
		return err
	}
	return o.readMapped(ctx, &m, p, off)
}

// fileMap says where a part of a file lies.
type fileMap struct {
	extents []meta.Extent // in order, holes left out
	inline  []byte        // its beginning
	places  map[meta.ChunkID]meta.ChunkPlace
}

// ask finds out where the bytes [off, end) lie.
func (m *fileMap) ask(ask func(meta.Op) (*meta.Result, error), ino meta.Ino, off, end uint64) error {
	m.places = map[meta.ChunkID]meta.ChunkPlace{}
	for off < end {
		res, err := ask(&meta.Open{Ino: ino, Off: off, Len: end - off})
		if err != nil {
			return err
		}
		m.inline = res.Data
		for _, pl := range res.Places {
			m.places[pl.ID] = pl
		}
		m.extents = append(m.extents, res.Extents...)
		if res.EOF || len(res.Extents) == 0 {
			break
		}
		off = m.extents[len(m.extents)-1].End()
	}
	return nil
}

// readMapped reads bytes of a file from where they lie; in holes there are zeros.
func (o *owner) readMapped(ctx context.Context, m *fileMap, p []byte, off uint64) error {
	clear(p)
	if off < uint64(len(m.inline)) {
		copy(p, m.inline[off:])
	}
	end := off + uint64(len(p))
	for _, e := range m.extents {
		lo, hi := max(e.Off, off), min(e.End(), end)
		if e.Chunk.IsZero() || lo >= hi {
			continue
		}
		pl, ok := m.places[e.Chunk]
		if !ok {
			return meta.E("digest", meta.Unavailable, o.subject(), fmt.Errorf("nobody says where chunk %v lies", e.Chunk))
		}
		if err := o.srv.cfg.Chunks.ReadAt(ctx, pl, p[lo-off:hi-off], e.ChunkOff+lo-e.Off); err != nil {
			return err
		}
	}
	return nil
}

// forgetDigests removes what is remembered of a volume that is gone.
func (s *Server) forgetDigests(v meta.VolumeID) {
	if s.cfg.DigestDir == "" {
		return
	}
	if err := os.RemoveAll(s.digestDir(v)); err != nil {
		s.log.Warn("known blocks of a deleted volume", "volume", v, "error", err)
	}
}

// listDigests adds digests to the snapshots that they are of, or why there is none
// yet although it was tried, and whether it is being tried again. Caller holds mu.
func (o *owner) listDigests(l []meta.SnapshotInfo) error {
	all, err := namespace.Digests(&view{o: o})
	o.digesting.mu.Lock()
	defer o.digesting.mu.Unlock()
	for i := range l {
		if r := o.digesting.tried[l[i].At]; r != nil {
			l[i].DigestError, l[i].DigestTrying = shortened(r.err), r.now
		}
		if d, ok := all[l[i].At]; ok {
			l[i].DigestError, l[i].DigestTrying = "", false
			l[i].Digest = &meta.DigestInfo{Digest: digest.Sum(d.Sum).String(), Made: time.Unix(0, int64(d.Made)).UTC(), Inodes: d.Inodes, Bytes: d.Bytes, Read: d.Read}
		}
	}
	return err
}

// shortened is the text of an error as a list has room for it.
func shortened(err error) string {
	text := err.Error()
	return strings.ToValidUTF8(text[:min(len(text), digestErrorMost)], "")
}
