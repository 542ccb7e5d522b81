package server

import (
	"context"
	"errors"
	"fmt"
	"time"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/namespace"
	"penstock.io/penstock/meta/quota"
	"penstock.io/penstock/meta/wire"
)

// Promises of a volume's quota.
//
// The account of what is used and promised is a pure machine (meta/quota). Here sessions
// are asked and answered, and requests wait for room.
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
type volumeQuota struct {
	quota.Account
	// overwrites: sessions are told to reserve what they overwrite, too: what snapshots
	// hold counts, or soon will.
	overwrites bool
	// turning is closed when a quota that comes is in force: until then nothing
	// is promised.
	turning chan struct{}
}

const (
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
	o.quota.NoPromise = o.srv.cfg.Unsafe.NoPromise
	o.quota.SetLimit(p.QuotaBytes)
	o.quota.overwrites = p.QuotaSnapshots
	used, _, err := namespace.Counted(o.st)
	o.quota.SetUsed(used)
	return err
}

// metered tells whether sessions must reserve what they write.
func (q *volumeQuota) metered() bool { return q.Limit() > 0 || q.turning != nil }

// cover is how much of its growth a call need not ask for.
func (q *volumeQuota) cover(id meta.SessionID, c *wire.Call) uint64 {
	if c.Replay {
		return 0
	}
	return q.Cover(id, c.Reserved, c.Draw)
}

// charge books what a call took of its session's promise; before is what the
// volume held. Caller holds mu.
func (o *owner) charge(id meta.SessionID, c *wire.Call, before uint64) {
	w, write := c.Op.(*meta.Write)
	switch {
	case c.Replay || !c.Draw && c.Reserved == 0:
	case !write:
		o.quota.Spend(id, c.Reserved)
	case c.Draw:
		o.quota.Draw(id, w.Ino, before)
	default:
		o.quota.ChargeWrite(id, w.Ino, c.Reserved)
	}
}

// freeLeft frees what ended sessions left, once no file of theirs is open-ended.
// Caller holds mu.
func (o *owner) freeLeft() {
	if o.quota.Left() == 0 {
		return
	}
	if _, files, err := o.abandoned(); err == nil && files == 0 {
		o.quota.FreeLeft()
	}
}

// reclaim asks everybody for what lies idle, and returns what to wait for; nil
// if nobody can have anything. Caller holds mu.
func (o *owner) reclaim() <-chan struct{} {
	q := &o.quota
	if r := q.Round(); r != nil {
		return r.Over()
	}
	var asked []meta.SessionID
	for s := range o.entered {
		if q.Askable(s.id) && !s.away.Load() {
			asked = append(asked, s.id)
			s.enqueue(0, &wire.Quota{Volume: o.vol, Metered: true, Round: q.NextRound(), Overwrites: q.overwrites})
			go s.flush() // whoever asks holds mu
		}
	}
	return o.beginRound(asked, reclaimWait)
}

// beginRound begins a round, which ends after a while even if some sessions say nothing,
// and gives what to wait for; nil: nobody is asked. Caller holds mu.
func (o *owner) beginRound(asked []meta.SessionID, wait time.Duration) <-chan struct{} {
	r := o.quota.BeginRound(asked)
	if r == nil {
		return nil
	}
	time.AfterFunc(wait, func() {
		o.mu.Lock()
		defer o.mu.Unlock()
		silent := r.Pending()
		if o.quota.EndRound(r) {
			o.log.Warn("sessions did not give back what lies idle of the quota", "sessions", silent)
		}
	})
	return r.Over()
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
		if bytes, _ := o.quota.Promise(s.id); bytes == 0 || s.idle() <= o.srv.cfg.SessionTTL/2 {
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
	return o.quota.PromisedBeyond(inside)
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
				o.quota.WaitNoMore(s.id)
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
	if _, ok := o.entered[s]; !ok || o.failed != nil {
		return
	}
	o.quota.GiveBack(s.id, m.Serial, m.Give)
	if m.Round != 0 {
		o.quota.Answer(s.id, m.Round)
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
	if m.Inherit {
		granted := q.Inherit(s.id, m.Serial)
		_, idle := q.Promise(s.id)
		return &wire.Reserved{Granted: granted, Idle: idle, Metered: q.metered()}, nil
	}
	if m.Want == 0 {
		_, idle := q.Promise(s.id)
		return &wire.Reserved{Idle: idle, Metered: q.metered()}, nil
	}
	if granted, before := q.Decided(s.id, m.Serial); before {
		_, idle := q.Promise(s.id)
		return &wire.Reserved{Granted: granted, Idle: idle, Metered: true}, nil
	}
	select {
	case <-o.recovered:
	default:
		return nil, o.wantRecovered()
	}
	if q.turning != nil {
		return nil, q.turning
	}
	if q.Limit() == 0 {
		return &wire.Reserved{}, nil
	}
	granted, fits := o.promise(s.id, m)
	if !fits {
		q.Wait(s.id)
		err := meta.E("quota", meta.QuotaExceeded, fmt.Sprintf("%d of %d bytes", q.Used(), q.Limit()), nil)
		if wait := o.findRoom(k, err); wait != nil {
			return nil, wait
		}
		q.WaitNoMore(s.id)
		return &wire.Reserved{Status: wire.StatusOf(err), Metered: true}, nil
	}
	_, idle := q.Promise(s.id)
	return &wire.Reserved{Granted: granted, Idle: idle, Metered: true}, nil
}

// promise promises a session what it wants, or where there is no room for that, what it
// can't do without. false: there is no room for that either. Caller holds mu.
func (o *owner) promise(id meta.SessionID, m *wire.Reserve) (granted uint64, fits bool) {
	q := &o.quota
	free := q.Free()
	if free < m.Want {
		least := o.needed(m)
		if free < least {
			return 0, false
		}
		return q.GrantExactly(id, m.Serial, least), true
	}
	q.WaitNoMore(id)
	if q.Share(id) {
		o.reclaim() // of those that have more than their part; nobody waits
	}
	return q.Grant(id, m.Serial, m.Want), true
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
	o.quota.Claim(s.id, min(n, maxClaim))
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
	comes := policy.QuotaBytes > 0 && (q.Limit() == 0 || policy.QuotaSnapshots && !counted)
	// Who enters meanwhile is told as well.
	q.overwrites = counted || policy.QuotaSnapshots
	if comes {
		q.turning = make(chan struct{})
		var asked []meta.SessionID
		for s := range o.entered {
			if s.enqueue(0, &wire.Quota{Volume: o.vol, Metered: true, Round: q.NextRound(), Settle: true, Overwrites: q.overwrites}) && !s.away.Load() {
				asked = append(asked, s.id)
				go s.flush()
			}
		}
		settle = o.beginRound(asked, settleWait)
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
		q.SetLimit(policy.QuotaBytes)
		if used, _, uerr := namespace.Counted(&view{o: o}); uerr == nil {
			q.SetUsed(used)
		}
		o.lowerIdle()
	}
	if comes {
		close(q.turning)
		q.turning = nil
	}
	if q.Limit() == 0 || q.overwrites != (counted || policy.QuotaSnapshots) {
		for s := range o.entered {
			s.enqueue(0, &wire.Quota{Volume: o.vol, Metered: q.Limit() > 0, Overwrites: q.overwrites})
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
	if q.Idle() <= q.MostIdle() {
		return
	}
	before, done := q.Round(), o.reclaim()
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
