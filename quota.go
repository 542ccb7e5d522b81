package penstock

import (
	"context"
	"sync"
	"sync/atomic"
	"time"

	"penstock.io/penstock/meta"
	metaclient "penstock.io/penstock/meta/client"
)

// meter is this client's part of a volume's quota: the bytes promised by the owner.
//
// A promise is idle, or belongs to the buffered bytes of a file (file.promised), from write(2)
// until the answer to their commit. Bytes in an open-ended extent, whose end the journal does
// not know yet, keep their promise, too. A write that finds too few idle bytes asks the owner
// for the missing bytes and returns the idle bytes with the request, so that a waiting client
// holds no idle bytes.
//
// left is the promise of a predecessor process, for the bytes restored from the predecessor's
// memory. The rest of left stays until the ends of the predecessor's files are sealed:
// appended bytes count from then on, and the owner does not check again whether the bytes fit.
//
// mu is a leaf lock: it may be taken under an inode's mutex.
type meter struct {
	v *Volume

	on atomic.Bool
	// overwrites: bytes held only by snapshots count, too, so an overwrite also reserves the
	// overwritten bytes, in case a snapshot has them.
	overwrites atomic.Bool

	mu    sync.Mutex
	epoch uint64 // the volume's epoch; answers of another epoch are not for this session
	gen   uint32 // increases when all promises become void; a file's promises of an older gen are void
	idle  uint64
	most  uint64 // most bytes that may be idle
	busy  bool   // a request is under way: one at a time
	free  chan struct{}

	left uint64 // of a predecessor's
	ends int    // open tasks until left becomes idle
}

// promise is the promise of a file, or of a write that is not buffered yet.
type promise struct {
	n   uint64
	gen uint32
}

// use moves n bytes to the promise p of a file, from the promise got of a write and then from
// the idle bytes. If there are fewer than n, use moves nothing and returns false.
func (q *meter) use(p, got *promise, n uint64) bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.current(p)
	q.current(got)
	lacks := n - min(n, got.n)
	if q.idle < lacks {
		return false
	}
	q.idle -= lacks
	got.n -= n - lacks
	p.n += n
	return true
}

// has returns the valid bytes of a promise: zero if the promise is of an older gen.
func (q *meter) has(p *promise) uint64 {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.current(p)
	return p.n
}

func (q *meter) current(p *promise) {
	if p.gen != q.gen {
		*p = promise{gen: q.gen}
	}
}

// move moves up to n bytes between promises.
func (q *meter) move(from, to *promise, n uint64) {
	q.mu.Lock()
	q.current(from)
	q.current(to)
	n = min(n, from.n)
	from.n -= n
	to.n += n
	q.mu.Unlock()
}

// drop makes the promise of a file or a write idle, and starts the return of excess idle
// bytes.
func (q *meter) drop(p *promise) {
	q.mu.Lock()
	q.current(p)
	n := p.n
	p.n = 0
	q.idleLocked(n)
	q.mu.Unlock()
}

// idleLocked adds n idle bytes and starts the return of excess idle bytes. The caller has held
// the meter's mu since it found the bytes to be promised.
func (q *meter) idleLocked(n uint64) {
	if n == 0 {
		return
	}
	q.idle += n
	if q.idle > q.most {
		q.v.c.spawn(func() { q.reserve(q.v.c.ctx, 0, 0, metaclient.Place{}) })
	}
}

// void makes every promise void, at the beginning of an epoch or within an epoch.
func (q *meter) void(epoch uint64) {
	q.mu.Lock()
	q.epoch = epoch
	q.gen++
	q.idle, q.most, q.left = 0, 0, 0
	q.mu.Unlock()
}

// inherit takes over the promise of a predecessor process. The caller calls inherited when the
// predecessor's bytes are restored.
func (q *meter) inherit(ctx context.Context) {
	v := q.v
	if !q.on.Load() {
		return
	}
	q.mu.Lock()
	gen := q.gen
	q.mu.Unlock()
	v.c.stats.rpcs.Add(1)
	p, err := v.c.kept.session.Inherit(ctx, v.id)
	if err != nil {
		v.c.log.Warn("the predecessor's reservation of a quota could not be given back", "volume", v.name, "err", err)
		return
	}
	q.mu.Lock()
	if gen == q.gen { // else the promise belonged to a session that has ended
		q.left, q.most = p.Granted, p.Idle
	}
	q.mu.Unlock()
}

// putBack moves up to n bytes of the predecessor's promise to a file.
func (q *meter) putBack(p *promise, n uint64) {
	q.mu.Lock()
	q.current(p)
	n = min(n, q.left)
	q.left -= n
	p.n += n
	q.mu.Unlock()
}

// inheriting counts a task that must end before the rest of the predecessor's promise is
// returned; inherited counts the end of a task.
func (q *meter) inheriting() {
	q.mu.Lock()
	q.ends++
	q.mu.Unlock()
}

func (q *meter) inherited() {
	q.mu.Lock()
	q.ends--
	n := uint64(0)
	if q.ends == 0 {
		n, q.left = q.left, 0
	}
	q.idleLocked(n)
	q.mu.Unlock()
}

// reserve asks the owner for want bytes and returns the idle bytes. Bytes granted beyond want
// become idle. The client sends one request at a time. A request continues after the end of
// ctx; its bytes then become idle. got is want or, if the volume lacks room and the write has
// a place, the bytes needed at that place. Errors: Again (promises became void meanwhile).
func (q *meter) reserve(ctx context.Context, want, round uint64, at metaclient.Place) (got promise, err error) {
	v := q.v
	for {
		q.mu.Lock()
		if want > 0 && q.idle >= want { // the request of another write brought the bytes
			q.idle -= want
			got = promise{want, q.gen}
			q.mu.Unlock()
			return got, nil
		}
		if want == 0 && round == 0 && q.idle <= q.most {
			q.mu.Unlock()
			return got, nil
		}
		if !q.busy {
			break
		}
		if q.free == nil {
			q.free = make(chan struct{})
		}
		free := q.free
		q.mu.Unlock()
		select {
		case <-free:
		case <-ctx.Done():
			return got, meta.E("reserve", meta.Interrupted, v.name, context.Cause(ctx))
		}
	}
	q.busy = true
	give, gen, epoch := q.idle, q.gen, q.epoch
	q.idle = 0
	q.mu.Unlock()

	done := make(chan error, 1)
	taken := make(chan struct{}) // closed when the caller waits no more
	v.c.spawn(func() {
		v.c.stats.rpcs.Add(1)
		p, err := v.c.sess.Reserve(v.c.ctx, v.id, epoch, give, want, round, at)
		q.mu.Lock()
		defer q.mu.Unlock()
		q.busy = false
		if q.free != nil {
			close(q.free)
			q.free = nil
		}
		if err != nil || gen != q.gen {
			if err == nil && want > 0 { // the granted bytes are void already
				err = errVoid
			}
			done <- err
			return
		}
		q.most = p.Idle
		if round != 0 {
			q.most = 0
		}
		if !p.Metered {
			q.on.Store(false)
		}
		q.idle += p.Granted
		select {
		case <-taken:
		default:
			got = promise{min(want, p.Granted), gen}
			q.idle -= got.n
			done <- nil
		}
	})
	select {
	case err := <-done:
		return got, err
	case <-ctx.Done():
		q.mu.Lock()
		defer q.mu.Unlock()
		select {
		case err := <-done: // in the last moment
			return got, err
		default:
		}
		close(taken)
		return promise{}, meta.E("reserve", meta.Interrupted, v.name, context.Cause(ctx))
	}
}

// errVoid: promises became void while more were asked for.
var errVoid = meta.E("reserve", meta.Again, "", nil)

// room reserves n bytes for a write, or the bytes needed at the write's place, and nothing if
// the volume no longer has a quota. While the owner has not yet been notified of files unlinked
// here a moment ago, room waits and asks again before it reports that the bytes don't fit.
func (q *meter) room(ctx context.Context, n uint64, at metaclient.Place) (promise, error) {
	for try := 0; ; try++ {
		got, err := q.reserve(ctx, n, 0, at)
		switch meta.KindOf(err) {
		case meta.KindOK:
			if !q.on.Load() {
				got.n = 0
			}
			return got, nil
		case meta.Again:
			continue
		case meta.SessionExpired:
			// This write loses nothing: it asks again in the next epoch, which begins here in
			// a moment.
			select {
			case <-time.After(time.Millisecond):
			case <-ctx.Done():
			}
			continue
		case meta.QuotaExceeded:
			if try < orphanTries && q.v.orphans.some() {
				select {
				case <-time.After(orphanWait):
				case <-ctx.Done():
				}
				continue
			}
			return promise{}, meta.E("write", meta.QuotaExceeded, q.v.name, err)
		}
		return promise{}, err
	}
}

// orphanTries bounds the waits for messages to the owner about unlinked files.
const orphanTries = 50

func (o *orphanList) some() bool {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.runs
}

// needs returns how many bytes the volume may grow by when n bytes are written at off: bytes
// at offsets where nothing is stored or buffered, and, in an inline file, which has no holes,
// the bytes that fill the file up. With overwrites, all bytes without a reservation count: a
// snapshot may hold the stored bytes, which then count beside the new ones, and may hold an
// inline file as a whole. The caller holds mu.
func (in *inode) needs(f *file, off, n uint64) uint64 {
	end := off + n
	if in.vol.meter.overwrites.Load() {
		return in.needsAll(f, off, end)
	}
	need := n
	f.m.each(off, end, func(s *segment) bool {
		need -= min(s.end(), end) - max(s.off, off)
		return true
	})
	if size := max(f.size, end); size <= meta.InlineMax {
		has := in.vol.meter.has(&f.promised)
		if in.attrOK {
			has += in.attr.Blocks
		}
		if size > has {
			need = max(need, size-has)
		}
	}
	return need
}

func (in *inode) needsAll(f *file, off, end uint64) uint64 {
	need := end - off
	f.m.each(off, end, func(s *segment) bool {
		// A blob being committed has its own promise.
		if b := s.b; b != nil && !b.clean && !b.frozen {
			need -= min(s.end(), end) - max(s.off, off)
		}
		return true
	})
	switch size := max(f.size, end); {
	case size <= meta.InlineMax:
		need = max(need, size-min(size, in.vol.meter.has(&f.promised)))
	case f.uncommitted == 0 && in.attrOK && in.attr.Flags&meta.FlagInline != 0:
		need += in.attr.Blocks
	}
	return need
}

// enough is the owner's answer about a write that does not fit as a whole.
type enough struct {
	f      *file
	low    uint64 // the lease was not lowered since,
	passed uint32 // since then no snapshot was taken,
	gates  uint32 // and nothing cut off or punched here
	at     metaclient.Place
	need   uint64 // the bytes that the write needed then,
	spare  uint64 // and the bytes of need that the owner found to be stored already
}

// asked says under which circumstances an answer about a write holds. mu is held.
func (in *inode) asked(f *file, need, at, n uint64) enough {
	return enough{f: f, low: in.low, passed: in.passed, gates: f.turns.gates, at: metaclient.Place{Ino: in.ino, Off: at, Len: n}, need: need}
}

// spared returns how many of the bytes that a write needs now are unneeded by the owner's
// answer. The caller holds mu.
func (e *enough) spared(in *inode, f *file, need, at, n uint64) uint64 {
	now := in.asked(f, need, at, n)
	if now.spare = e.spare; now != *e {
		return 0
	}
	return e.spare
}

// notSpent returns the promise of a failed commit to the file. If the outcome is unknown, the
// owner may still do the commit, so the promise stays with the commit.
func (q *meter) notSpent(w *work, unknown bool) {
	w.in.mu.Lock()
	defer w.in.mu.Unlock()
	switch {
	case unknown:
	case w.in.file == w.f:
		q.move(&w.promised, &w.f.promised, w.promised.n)
	default:
		q.drop(&w.promised)
	}
	w.promised = promise{}
}

// unneededLocked gives up a file's promise when nothing of the file is buffered. The caller
// holds mu.
func (q *meter) unneededLocked(f *file) {
	if f.uncommitted == 0 && !f.own.ended && f.promised.n > 0 {
		q.drop(&f.promised)
	}
}

var _ metaclient.QuotaHandler = (*Client)(nil) // else the session would tell nobody

// Metered tells whether a volume has a quota of bytes, and whether an overwrite reserves the
// overwritten bytes. The session calls Metered in the owner's order; Metered does not block.
func (c *Client) Metered(id meta.VolumeID, on, overwrites bool, settle func()) {
	v := c.lookVolume(id)
	if v == nil {
		if settle != nil {
			settle()
		}
		return
	}
	v.meter.overwrites.Store(overwrites)
	if v.meter.on.Swap(on) != on {
		v.meter.void(v.owner.epoch.Load())
	}
	if settle != nil {
		c.spawn(func() {
			v.meter.settleUnmetered()
			settle()
		})
	}
}

// settleUnmetered commits the bytes that were buffered before the volume had a quota.
func (q *meter) settleUnmetered() {
	v := q.v
	for _, in := range v.c.table.all(func(in *inode) bool { return in.vol == v }) {
		in.mu.Lock()
		//lint:ignore SA2001 a write that saw no quota is in the list of dirty files once it let go
		in.mu.Unlock()
		in.put()
	}
	ctx, cancel := context.WithTimeout(v.c.ctx, flushFor) // all users of the volume wait for this
	defer cancel()
	err := v.back.flushAll(ctx, flushClose)
	if e := v.back.closeEnds(ctx); err == nil {
		err = e
	}
	if err != nil && v.c.ctx.Err() == nil {
		v.c.log.Warn("not everything could be committed before a quota came", "volume", v.name, "err", err)
	}
}

// Reclaim returns the idle bytes to the owner. The session calls it; Reclaim does not block.
func (c *Client) Reclaim(id meta.VolumeID, round uint64) {
	c.spawn(func() {
		v := c.lookVolume(id)
		if v == nil {
			_, _ = c.sess.Reserve(c.ctx, id, metaclient.AnyEpoch, 0, 0, round, metaclient.Place{})
			return
		}
		if _, err := v.meter.reserve(c.ctx, 0, round, metaclient.Place{}); err != nil && c.ctx.Err() == nil {
			c.log.Warn("the unused part of a quota could not be given back", "volume", v.name, "err", err)
		}
	})
}
