package server

import (
	"context"
	"errors"
	"fmt"
	"time"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/namespace"
	"penstock.io/penstock/meta/wire"
)

// Promises of a volume's quota.
//
// What write(2) took must fit when it is committed, perhaps after close. So a
// session reserves bytes before it buffers them, and what was promised to one
// is out of reach for all others:
//
//	committed (early replies included) + promised <= limit
//
// An operation says how much of the session's promise is for it (Call.Reserved).
// When it succeeds, that much of the promise is over: what it took is committed,
// the rest is free again. Whoever asks for more than is free waits until
// everybody gave back what lay idle, who was not heard of lately is heard of or
// over, what was deleted is reaped, and what the refusal rests on is in the journal
// (rule 13).
//
// Promises are in memory. Sessions claim theirs from the next owner, before it
// admits anything; what they were answered and the journal lost is replayed
// without being asked for again (rule 3). A claim may count bytes twice that the
// journal already has (the answer went down with the owner): that refuses too
// much until the operation comes again, never too little. A session that does
// not come back is ended first, and the open end of its files sealed, so that
// nothing is unaccounted for when others are let in. A session that ends while
// this owner lives leaves its promise behind until those files are sealed: what
// it appended to them counts then, unmetered (rule 7).
//
// Guarded by the owner's mu.
type quota struct {
	limit uint64 // bytes; zero: none, and the rest is unused
	used  uint64 // bytes that count, early replies included
	// overwrites: sessions are told to reserve what they overwrite, too: what snapshots
	// hold counts, or soon will.
	overwrites bool

	held  map[meta.SessionID]*promise
	total uint64 // of all promises, left ones included
	left  uint64 // of sessions that ended, until their files are sealed
	idle  uint64 // sum of the promises' idle

	round  *reclaim // under way
	rounds uint64
	// turning is closed when a quota that comes is in force: until then nothing
	// is promised.
	turning chan struct{}
}

// promise is one session's.
type promise struct {
	bytes uint64
	idle  uint64 // it may leave so much of it unused
	drawn map[meta.Ino]uint64
	// serial and granted are of the last request that was decided; given is the
	// last whose Give counted.
	serial, granted, given uint64
	waiting                bool // it asks for more, so nothing of it lies idle
}

// reclaim is one round of asking for what lies idle.
type reclaim struct {
	round   uint64
	pending map[meta.SessionID]struct{}
	done    chan struct{}
}

const (
	// idleMost and idlePart bound what all sessions together may leave idle: so
	// many bytes, and that part of the quota.
	idleMost = 64 << 20
	idlePart = 100
	// reclaimWait bounds a round: a session that says nothing for so long keeps
	// what it has, and who asks is refused.
	reclaimWait = 2 * time.Second
	// settleWait bounds how long a quota that comes waits for what sessions
	// wrote without one.
	settleWait = 10 * time.Second
	// roomTries bounds how often who is refused waits for what is being reaped or
	// sealed, leasePoll apart.
	roomTries = 100
)

// loadQuota begins with the journaled limit and usage.
func (o *owner) loadQuota() error {
	p, err := namespace.Policy(o.st)
	if err != nil {
		return err
	}
	o.quota.limit, o.quota.overwrites = p.QuotaBytes, p.QuotaSnapshots
	o.quota.used, _, err = namespace.Counted(o.st)
	return err
}

func (q *quota) of(id meta.SessionID) *promise {
	p := q.held[id]
	if p == nil {
		if q.held == nil {
			q.held = map[meta.SessionID]*promise{}
		}
		p = &promise{}
		q.held[id] = p
	}
	return p
}

func (q *quota) add(p *promise, n uint64)  { p.bytes += n; q.total += n }
func (q *quota) take(p *promise, n uint64) { n = min(n, p.bytes); p.bytes -= n; q.total -= n }

// spend ends n bytes of a session's promise.
func (q *quota) spend(id meta.SessionID, n uint64) {
	if p := q.held[id]; p != nil {
		q.take(p, n)
	}
}

// cover is how much of its growth a call need not ask for.
func (q *quota) cover(id meta.SessionID, c *wire.Call) uint64 {
	p := q.held[id]
	switch {
	case p == nil || c.Replay:
		return 0
	case c.Draw:
		return p.bytes
	}
	return min(c.Reserved, p.bytes)
}

// charge books what a call took of its session's promise; before is what the
// volume held. Caller holds mu.
func (o *owner) charge(id meta.SessionID, c *wire.Call, before uint64) {
	q := &o.quota
	p := q.held[id]
	if p == nil || c.Replay || !c.Draw && c.Reserved == 0 {
		return
	}
	w, ok := c.Op.(*meta.Write)
	if !ok {
		q.take(p, c.Reserved)
		return
	}
	if c.Draw {
		if q.used > before {
			if p.drawn == nil {
				p.drawn = map[meta.Ino]uint64{}
			}
			n := min(q.used-before, p.bytes)
			p.drawn[w.Ino] += n
			q.take(p, n)
		}
		return
	}
	q.take(p, c.Reserved-min(c.Reserved, p.drawn[w.Ino]))
	delete(p.drawn, w.Ino)
}

// leave books that a session ended.
func (q *quota) leave(id meta.SessionID) {
	p := q.held[id]
	if p == nil {
		return
	}
	delete(q.held, id)
	q.idle -= p.idle
	q.left += p.bytes
	q.answered(id, ^uint64(0))
}

// answered notes that a session has nothing idle as of a round.
func (q *quota) answered(id meta.SessionID, round uint64) {
	r := q.round
	if r == nil || r.round > round {
		return
	}
	delete(r.pending, id)
	if len(r.pending) == 0 {
		q.round = nil
		close(r.done)
	}
}

// mostIdle bounds what all sessions together may leave idle.
func (q *quota) mostIdle() uint64 { return min(idleMost, q.limit/idlePart) }

// share sets how much of a session's promise may lie idle, and tells whether
// others have more than their part.
func (q *quota) share(p *promise) (crowded bool) {
	most := q.mostIdle()
	fair := most / uint64(max(1, len(q.held)))
	q.idle -= p.idle
	p.idle = min(fair, most-min(most, q.idle))
	q.idle += p.idle
	return p.idle < fair
}

// freeLeft frees what ended sessions left, once no file of theirs is open-ended.
// Caller holds mu.
func (o *owner) freeLeft() {
	if o.quota.left == 0 {
		return
	}
	if _, files, err := o.abandoned(); err == nil && files == 0 {
		o.quota.total -= o.quota.left
		o.quota.left = 0
	}
}

// reclaim asks everybody for what lies idle, and returns what to wait for; nil
// if nobody can have anything. Caller holds mu.
func (o *owner) reclaim() <-chan struct{} {
	q := &o.quota
	if q.round != nil {
		return q.round.done
	}
	q.rounds++
	r := &reclaim{round: q.rounds, pending: map[meta.SessionID]struct{}{}, done: make(chan struct{})}
	for s := range o.entered {
		if p := q.held[s.id]; p != nil && p.bytes > 0 && !p.waiting && !s.away.Load() {
			r.pending[s.id] = struct{}{}
			s.enqueue(0, &wire.Quota{Volume: o.vol, Metered: true, Round: r.round, Overwrites: q.overwrites})
			go s.flush() // whoever asks holds mu
		}
	}
	if len(r.pending) == 0 {
		return nil
	}
	o.begin(r, reclaimWait)
	return r.done
}

// begin books a round, which ends after a while even if some say nothing.
// Caller holds mu.
func (o *owner) begin(r *reclaim, wait time.Duration) {
	o.quota.round = r
	time.AfterFunc(wait, func() {
		o.mu.Lock()
		defer o.mu.Unlock()
		if o.quota.round == r {
			o.log.Warn("sessions did not give back what lies idle of the quota", "sessions", len(r.pending))
			o.quota.round = nil
			close(r.done)
		}
	})
}

// roomSearch is how far who was refused has gone.
type roomSearch struct {
	rounds, waits int
	synced        bool
}

// unheard tells whether sessions that were not heard of lately hold promises: they
// are heard of in a moment, or end. One that only lingers ends for it. Caller holds mu.
func (o *owner) unheard() (yes bool) {
	for s := range o.entered {
		p := o.quota.held[s.id]
		if p == nil || p.bytes == 0 || s.idle() <= o.srv.cfg.SessionTTL/2 {
			continue
		}
		yes = true
		if s.idle() > o.srv.cfg.SessionTTL {
			s.wanted.Store(true)
		}
	}
	return yes
}

// promisesLeave tells whether sessions that are being ended have promises still: those are
// free when what they left open is sealed. Caller holds mu.
func (o *owner) promisesLeave() bool {
	inside := map[meta.SessionID]bool{}
	for s := range o.entered {
		inside[s.id] = true
	}
	for id, p := range o.quota.held {
		if p.bytes > 0 && !inside[id] {
			return true
		}
	}
	return o.quota.left > 0
}

// findRoom says what to wait for before a refusal is final; nil: it is. Caller
// holds mu.
func (o *owner) findRoom(k *roomSearch, cause error) <-chan struct{} {
	var e *meta.Error
	if bytes := errors.As(cause, &e) && e.Op != namespace.OpInodeQuota; bytes {
		// The second round is for one that began before this was asked.
		if k.rounds < 2 {
			k.rounds++
			if wait := o.reclaim(); wait != nil {
				return wait
			}
		}
		if o.unheard() {
			return soon()
		}
	}
	reaping := false
	if err := namespace.ReapQueue(&view{o: o}, func(meta.Ino) bool { reaping = true; return false }); err != nil {
		return nil
	}
	o.freeLeft()
	if o.lateHoldFiles() && k.waits < roomTries {
		k.waits++
		return soon()
	}
	if (reaping || o.uncounted() || o.promisesLeave()) && k.waits < roomTries {
		k.waits++
		o.tasks.collection.Wake()
		return soon()
	}
	if !k.synced {
		k.synced = true
		return o.untilDurable(o.newest())
	}
	return nil
}

// serveReserve promises bytes, or takes some back.
func (o *owner) serveReserve(s *session, id uint64, m *wire.Reserve) {
	o.mu.Lock()
	o.giveBack(s, m)
	k := roomSearch{}
	re, wait := o.reserve(s, m, &k)
	if wait == nil {
		s.enqueue(id, re)
		o.mu.Unlock()
		return
	}
	o.mu.Unlock()
	ctx, stop := s.waiting(id)
	s.wg.Go(func() {
		defer stop()
		for wait != nil {
			err := o.await(ctx, wait)
			o.mu.Lock()
			if err == nil {
				// Its process may have a successor by now, which was told what is promised.
				err = context.Cause(ctx)
			}
			if err != nil {
				re = &wire.Reserved{Status: wire.StatusOf(err)}
				if p := o.quota.held[s.id]; p != nil {
					p.waiting = false
				}
				break
			}
			if re, wait = o.reserve(s, m, &k); wait != nil {
				o.mu.Unlock()
			}
		}
		s.enqueue(id, re)
		o.mu.Unlock()
		s.flush()
	})
}

// giveBack books the part of a request that asks for nothing. Caller holds mu.
func (o *owner) giveBack(s *session, m *wire.Reserve) {
	q := &o.quota
	if _, ok := o.entered[s]; !ok || o.failed != nil {
		return
	}
	p := q.of(s.id)
	if m.Serial > p.given {
		p.given = m.Serial
		q.take(p, m.Give)
	}
	if m.Round != 0 {
		q.idle -= p.idle
		p.idle = 0
		q.answered(s.id, m.Round)
	}
}

// reserve answers, or says what to wait for. Caller holds mu.
func (o *owner) reserve(s *session, m *wire.Reserve, k *roomSearch) (*wire.Reserved, <-chan struct{}) {
	q := &o.quota
	switch _, ok := o.entered[s]; {
	case o.failed != nil:
		return &wire.Reserved{Status: wire.StatusOf(o.failed)}, nil
	case !ok && s.ended.Load():
		return nil, never // its connection is being closed
	case !ok:
		return &wire.Reserved{Status: wire.StatusOf(o.srv.elsewhere(o.vol))}, nil
	case o.leaving != nil:
		return nil, o.leaving
	case o.outsideLease():
		return nil, soon()
	}
	p := q.of(s.id)
	if m.Inherit {
		return q.inherit(p, m.Serial), nil
	}
	if m.Want == 0 {
		return &wire.Reserved{Idle: p.idle, Metered: q.limit > 0 || q.turning != nil}, nil
	}
	if m.Serial <= p.serial {
		return &wire.Reserved{Granted: p.granted, Idle: p.idle, Metered: true}, nil
	}
	select {
	case <-o.recovered:
	default:
		return nil, o.wantRecovered()
	}
	if q.turning != nil {
		return nil, q.turning
	}
	if q.limit == 0 {
		return &wire.Reserved{}, nil
	}
	free := q.limit - min(q.limit, q.used)
	free -= min(free, q.total)
	less := m.Want
	if free < less {
		less = o.needed(m)
	}
	if free < less {
		if !p.waiting {
			p.waiting = true
			q.idle -= p.idle
			p.idle = 0
			q.answered(s.id, q.rounds)
		}
		err := meta.E("quota", meta.QuotaExceeded, fmt.Sprintf("%d of %d bytes", q.used, q.limit), nil)
		if wait := o.findRoom(k, err); wait != nil {
			return nil, wait
		}
		p.waiting = false
		return &wire.Reserved{Status: wire.StatusOf(err), Metered: true}, nil
	}
	p.waiting = false
	if free < m.Want {
		p.serial, p.granted = m.Serial, less
		if !o.srv.cfg.Unsafe.NoPromise {
			q.add(p, less)
		}
		return &wire.Reserved{Granted: less, Idle: p.idle, Metered: true}, nil
	}
	if q.share(p) {
		o.reclaim() // of those that have more than their part; nobody waits
	}
	// Near the limit nobody gets much ahead: it would be asked for at once.
	granted := m.Want + min(p.idle, (free-m.Want)/8)
	p.serial, p.granted = m.Serial, granted
	if !o.srv.cfg.Unsafe.NoPromise {
		q.add(p, granted)
	}
	return &wire.Reserved{Granted: granted, Idle: p.idle, Metered: true}, nil
}

// inherit tells a session's new process what the ones before it were promised: it
// puts back what they had buffered, has the ends of their files sealed, and gives the
// rest back.
func (q *quota) inherit(p *promise, serial uint64) *wire.Reserved {
	if serial > p.serial {
		p.serial, p.granted = serial, p.bytes
		p.drawn = nil // what was half committed is committed anew
	}
	return &wire.Reserved{Granted: p.granted, Idle: p.idle, Metered: q.limit > 0 || q.turning != nil}
}

// maxClaim bounds what a session may say that it was promised: sums don't wrap.
const maxClaim = 1 << 56

// claimPromise gives a session back what the owner before promised it.
func (o *owner) claimPromise(s *session, n uint64) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if _, ok := o.entered[s]; !ok || !o.awaited[s.id] {
		o.log.Warn("a claim came too late", "session", s.name)
		return
	}
	if o.quota.limit == 0 {
		return
	}
	p := o.quota.of(s.id)
	o.quota.take(p, p.bytes)
	o.quota.add(p, min(n, maxClaim))
}

// setPolicy journals a policy. Caller has the turn: what is in force here is what
// was journaled last. A quota that comes waits until the sessions have
// committed what they wrote without one, so that nothing of it is refused later,
// but for those that are away;
// one that is lowered leaves the promises standing, and refuses what is new.
func (o *owner) setPolicy(ctx context.Context, policy meta.Policy) error {
	if err := o.await(ctx, o.recovered); err != nil {
		return err
	}
	o.mu.Lock()
	q := &o.quota
	var settle <-chan struct{}
	counted := q.overwrites
	comes := policy.QuotaBytes > 0 && (q.limit == 0 || policy.QuotaSnapshots && !counted)
	// Who enters meanwhile is told as well.
	q.overwrites = counted || policy.QuotaSnapshots
	if comes {
		q.turning = make(chan struct{})
		q.rounds++
		r := &reclaim{round: q.rounds, pending: map[meta.SessionID]struct{}{}, done: make(chan struct{})}
		for s := range o.entered {
			if s.enqueue(0, &wire.Quota{Volume: o.vol, Metered: true, Round: r.round, Settle: true, Overwrites: q.overwrites}) && !s.away.Load() {
				r.pending[s.id] = struct{}{}
				go s.flush()
			}
		}
		if len(r.pending) > 0 {
			o.begin(r, settleWait)
			settle = r.done
		}
	}
	o.mu.Unlock()
	var err error
	if settle != nil {
		err = o.await(ctx, settle)
	}
	if err == nil {
		err = o.durably(ctx, &meta.SetPolicy{Policy: policy})
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	if q.overwrites = counted; err == nil {
		q.overwrites = policy.QuotaSnapshots
		was := q.limit
		q.limit = policy.QuotaBytes
		if used, _, uerr := namespace.Counted(&view{o: o}); uerr == nil {
			q.used = used
		}
		if was > 0 && q.limit == 0 {
			*q = quota{rounds: q.rounds, round: q.round, overwrites: q.overwrites, turning: q.turning}
			if q.round != nil {
				close(q.round.done)
				q.round = nil
			}
		}
		o.lowerIdle()
	}
	if comes {
		close(q.turning)
		q.turning = nil
	}
	if q.limit == 0 || q.overwrites != (counted || policy.QuotaSnapshots) {
		for s := range o.entered {
			s.enqueue(0, &wire.Quota{Volume: o.vol, Metered: q.limit > 0, Overwrites: q.overwrites})
			go s.flush()
		}
	}
	o.tasks.usage.Wake()
	return err
}

// lowerIdle has what lies idle given back if that is more than may. Nobody waits. What
// a round that is under way has been answered to may lie idle again, so another one
// follows it. Caller holds mu.
func (o *owner) lowerIdle() {
	q := &o.quota
	if q.idle <= q.mostIdle() {
		return
	}
	before, done := q.round, o.reclaim()
	if before == nil || o.ctx.Err() != nil || o.stClosed {
		return
	}
	o.wg.Go(func() {
		if o.await(o.ctx, done) == nil {
			o.mu.Lock()
			o.lowerIdle()
			o.mu.Unlock()
		}
	})
}

// needed is what a session that asks for bytes can't do without. Caller holds mu.
func (o *owner) needed(m *wire.Reserve) uint64 {
	if m.Len == 0 {
		return m.Want
	}
	n, err := namespace.Room(&view{o: o}, m.Ino, m.Off, m.Len)
	if err != nil {
		return m.Want // it will fail otherwise
	}
	return min(m.Want, n)
}
