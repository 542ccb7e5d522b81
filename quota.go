package penstock

import (
	"context"
	"sync"
	"sync/atomic"
	"time"

	"penstock.io/penstock/meta"
	metaclient "penstock.io/penstock/meta/client"
)

// meter is a volume's part of a quota: what the owner promised this client.
//
// A promise lies idle, or belongs to a file's buffered bytes (file.promised),
// from when write(2) took them until their commit is answered. The part of a
// file whose end the journal does not know yet (an open-ended extent) keeps its
// promise, too. A write that finds too little idle asks the owner for what it
// lacks and gives what is idle with it, so that one who waits has none.
//
// What a predecessor was promised (left) is for the bytes that are put back. The
// rest stands until the ends of its files are sealed: what it appended there counts
// only then, and nobody asks whether it fits.
//
// mu is a leaf: it may be taken under an inode's.
type meter struct {
	on atomic.Bool
	// overwrites: what snapshots alone hold counts, so what is overwritten is to be
	// reserved, too, in case a snapshot has it.
	overwrites atomic.Bool

	mu    sync.Mutex
	epoch uint64 // of the volume: what is asked for in another one is not for this session
	gen   uint32 // grows when all promises are void; what files have of older ones is none
	idle  uint64
	most  uint64 // that may lie idle
	busy  bool   // a request is under way: one at a time
	free  chan struct{}

	left uint64 // of a predecessor's
	ends int    // what must be done before left is idle
}

// promise is what a file has, or a write that is not buffered yet.
type promise struct {
	n   uint64
	gen uint32
}

// use gives n bytes to a file, of what a write has got and of what is idle; false: there
// are not as many, and nothing is given.
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

// has is what a file has. What it had before its promises became void is none.
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

// move takes up to n bytes from one to another.
func (q *meter) move(from, to *promise, n uint64) {
	q.mu.Lock()
	q.current(from)
	q.current(to)
	n = min(n, from.n)
	from.n -= n
	to.n += n
	q.mu.Unlock()
}

// drop makes what a file or a write has idle, and has what is too much given back.
func (v *Volume) drop(p *promise) {
	q := &v.meter
	q.mu.Lock()
	q.current(p)
	n := p.n
	p.n = 0
	v.idleLocked(n)
	q.mu.Unlock()
}

// idleLocked adds bytes that nobody needs now, and has what is too much given back. The
// meter's mu is held since before they were found to be promised.
func (v *Volume) idleLocked(n uint64) {
	if n == 0 {
		return
	}
	q := &v.meter
	q.idle += n
	if q.idle > q.most {
		v.c.spawn(func() { v.reserve(v.c.ctx, 0, 0, metaclient.Place{}) })
	}
}

// void forgets every promise, at the beginning of an epoch or within one.
func (q *meter) void(epoch uint64) {
	q.mu.Lock()
	q.epoch = epoch
	q.gen++
	q.idle, q.most, q.left = 0, 0, 0
	q.mu.Unlock()
}

// inherit takes over what a predecessor was promised; inherited is to be called when
// its bytes are put back.
func (v *Volume) inherit(ctx context.Context) {
	q := &v.meter
	if !q.on.Load() {
		return
	}
	q.mu.Lock()
	gen := q.gen
	q.mu.Unlock()
	v.c.stats.rpcs.Add(1)
	p, err := v.c.kept.session.Inherit(ctx, v.id)
	if err != nil {
		v.c.log.Warn("what a predecessor had reserved of a quota stays reserved", "volume", v.name, "err", err)
		return
	}
	q.mu.Lock()
	if gen == q.gen { // else it was of a session that has ended since
		q.left, q.most = p.Granted, p.Idle
	}
	q.mu.Unlock()
}

// putBack gives a file up to n bytes of what a predecessor was promised.
func (q *meter) putBack(p *promise, n uint64) {
	q.mu.Lock()
	q.current(p)
	n = min(n, q.left)
	q.left -= n
	p.n += n
	q.mu.Unlock()
}

// inheriting notes something that must be done before what is left of a
// predecessor's promise is given back; inherited, that it is.
func (q *meter) inheriting() {
	q.mu.Lock()
	q.ends++
	q.mu.Unlock()
}

func (v *Volume) inherited() {
	q := &v.meter
	q.mu.Lock()
	q.ends--
	n := uint64(0)
	if q.ends == 0 {
		n, q.left = q.left, 0
	}
	v.idleLocked(n)
	q.mu.Unlock()
}

// reserve asks the owner for want bytes and gives what is idle back. What
// is granted beyond want becomes idle. Requests go one by one; a request ends
// even if ctx does before, and then what it brings is idle. got is want, or with a
// place for them what they take there, if there is no room for more. Errors: Again
// (promises became void meanwhile).
func (v *Volume) reserve(ctx context.Context, want, round uint64, at metaclient.Place) (got promise, err error) {
	q := &v.meter
	for {
		q.mu.Lock()
		if want > 0 && q.idle >= want { // another's request brought it
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
			if err == nil && want > 0 { // what was granted is void already
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

// room reserves n bytes for a write to a place, or what it takes there; it gives none
// if the volume has no quota any more. Files that were unlinked here a moment ago
// are told to the owner before it is final that they don't fit.
func (v *Volume) room(ctx context.Context, n uint64, at metaclient.Place) (promise, error) {
	for try := 0; ; try++ {
		got, err := v.reserve(ctx, n, 0, at)
		switch meta.KindOf(err) {
		case meta.KindOK:
			if !v.meter.on.Load() {
				got.n = 0
			}
			return got, nil
		case meta.Again:
			continue
		case meta.SessionExpired:
			// Nothing of this write is lost with it: it asks anew in the next epoch, which
			// begins here in a moment.
			select {
			case <-time.After(time.Millisecond):
			case <-ctx.Done():
			}
			continue
		case meta.QuotaExceeded:
			if try < orphanTries && v.orphans.some() {
				select {
				case <-time.After(orphanWait):
				case <-ctx.Done():
				}
				continue
			}
			return promise{}, meta.E("write", meta.QuotaExceeded, v.name, err)
		}
		return promise{}, err
	}
}

// orphanTries bounds the waiting for unlinked files to be told of.
const orphanTries = 50

func (o *orphanList) some() bool {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.runs
}

// needs is how many bytes the volume may grow by when n bytes at off are
// written: those that nothing stored or buffered lies at, and in a file that is
// stored inline, which has no holes, those that fill it up. With overwrites it is all
// for which nothing was reserved yet: what lies there may be in a snapshot, and then
// counts beside what replaces it; so may what is stored inline, as a whole. mu is held.
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
		// What is being committed takes its promise along.
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

// enough is what the owner said of a write for which there is no room as a whole.
type enough struct {
	f      *file
	low    uint64 // the lease was not lowered since,
	passed uint32 // no snapshot taken in spite of it,
	gates  uint32 // and nothing cut off or punched here
	at     metaclient.Place
	need   uint64 // what the write needed then,
	spare  uint64 // and so much of that is not needed
}

// asked says under which circumstances an answer about a write holds. mu is held.
func (in *inode) asked(f *file, need, at, n uint64) enough {
	return enough{f: f, low: in.low, passed: in.passed, gates: f.gates, at: metaclient.Place{Ino: in.ino, Off: at, Len: n}, need: need}
}

// spared is how much of what a write needs now the owner said is not needed. mu is
// held.
func (e *enough) spared(in *inode, f *file, need, at, n uint64) uint64 {
	now := in.asked(f, need, at, n)
	if now.spare = e.spare; now != *e {
		return 0
	}
	return e.spare
}

// notSpent books that a commit failed: what was promised for it is the file's
// again. If nobody waits for the answer, the commit may go through after all,
// and the promise is left to it.
func (v *Volume) notSpent(w *work, unknown bool) {
	w.in.mu.Lock()
	defer w.in.mu.Unlock()
	switch {
	case unknown:
	case w.in.file == w.f:
		v.meter.move(&w.promised, &w.f.promised, w.promised.n)
	default:
		v.drop(&w.promised)
	}
	w.promised = promise{}
}

// unneededLocked gives up what a file was promised once nothing of it is buffered. mu
// is held.
func (v *Volume) unneededLocked(f *file) {
	if f.uncommitted == 0 && !f.ended && f.promised.n > 0 {
		v.drop(&f.promised)
	}
}

var _ metaclient.QuotaHandler = (*Client)(nil) // else the session would tell nobody

// Metered tells that a volume has a quota of bytes, or none, and whether what is
// overwritten is to be reserved. It is called by the
// session in the owner's order and does not block.
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
		v.meter.void(v.epoch.Load())
	}
	if settle != nil {
		c.spawn(func() {
			v.settleUnmetered()
			settle()
		})
	}
}

// settleUnmetered commits what was buffered before the volume had a quota.
func (v *Volume) settleUnmetered() {
	for _, in := range v.c.table.all(func(in *inode) bool { return in.vol == v }) {
		in.mu.Lock()
		//lint:ignore SA2001 a write that saw no quota is in the list of dirty files once it let go
		in.mu.Unlock()
		in.put()
	}
	ctx, cancel := context.WithTimeout(v.c.ctx, flushFor) // all who use the volume wait for it
	defer cancel()
	err := v.flushAll(ctx, flushClose)
	if e := v.closeEnds(ctx); err == nil {
		err = e
	}
	if err != nil && v.c.ctx.Err() == nil {
		v.c.log.Warn("not everything could be committed before a quota came", "volume", v.name, "err", err)
	}
}

// Reclaim gives back what lies idle. It is called by the session and does not
// block.
func (c *Client) Reclaim(id meta.VolumeID, round uint64) {
	c.spawn(func() {
		v := c.lookVolume(id)
		if v == nil {
			_, _ = c.sess.Reserve(c.ctx, id, metaclient.AnyEpoch, 0, 0, round, metaclient.Place{})
			return
		}
		if _, err := v.reserve(c.ctx, 0, round, metaclient.Place{}); err != nil && c.ctx.Err() == nil {
			c.log.Warn("what lies idle of a quota was not given back", "volume", v.name, "err", err)
		}
	})
}
