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

// volumeQuota keeps the promises of a volume's quota.
//
// The account of used and promised bytes is a pure machine (meta/quota). This file asks and
// answers sessions, and lets requests wait for room.
//
// An operation names the part of the session's promise reserved for the operation
// (Call.Reserved). When the operation succeeds, that part of the promise ends: the bytes taken
// are committed, the rest is free again. A request for more than the free bytes waits until
// all sessions gave back their idle bytes, every silent session has renewed or ended, deleted
// files are reaped, and the journal has everything that the refusal rests on (rule 13).
//
// Promises are in memory. Sessions claim their promises from the next owner, before that owner
// admits other operations. An operation answered by the old owner but missing in the journal
// is replayed without a new reservation (rule 3). A claim may count bytes already in the
// journal (if the answer was lost with the owner): the owner then refuses too much until the
// operation is repeated, never too little. A session that does not come back is ended first,
// and the open ends of its files sealed, so that all bytes are counted before other sessions
// are admitted. A session that ends under this owner leaves its promise behind until its files
// are sealed: then the bytes appended by the session count, unmetered (rule 7).
//
// Guarded by the owner's mu.
type volumeQuota struct {
	o *owner

	quota.Account
	// overwrites: sessions must also reserve overwritten bytes, because bytes held by
	// snapshots count, or will count soon.
	overwrites bool
	// turning is closed when a new quota is in force; until then nothing is promised. Nil: no
	// quota is being introduced.
	turning chan struct{}
}

const (
	// reclaimWait bounds a round. A session silent for longer keeps its promise, and the
	// waiting request is refused.
	reclaimWait = 2 * time.Second
	// settleWait bounds how long a new quota waits for the commits of unreserved writes.
	settleWait = 10 * time.Second
	// roomTries bounds how often a request waits for reaping or sealing, leasePoll apart.
	roomTries = 100
)

// loadQuota loads the journaled limit and usage.
func (q *volumeQuota) loadQuota() error {
	o := q.o
	p, err := namespace.Policy(o.st)
	if err != nil {
		return err
	}
	q.NoPromise = o.srv.cfg.Unsafe.NoPromise
	q.SetLimit(p.QuotaBytes)
	q.overwrites = p.QuotaSnapshots
	used, _, err := namespace.Counted(o.st)
	q.SetUsed(used)
	return err
}

// metered reports whether sessions must reserve before they write.
func (q *volumeQuota) metered() bool { return q.Limit() > 0 || q.turning != nil }

// cover returns how many bytes of a call's growth the session's promise covers.
func (q *volumeQuota) cover(id meta.SessionID, c *wire.Call) uint64 {
	if c.Replay {
		return 0
	}
	return q.Cover(id, c.Reserved, c.Draw)
}

// noteUse takes over the volume's use after an operation, into the account and into the watch
// of the advisory quota. The caller holds the owner's mu.
func (q *volumeQuota) noteUse(bytes, inodes uint64) {
	if q.Limit() > 0 {
		q.SetUsed(bytes)
	}
	q.o.words.watchQuota(bytes, inodes)
}

// charge books the bytes that a call took of its session's promise; before is the volume's
// usage before the call. The caller holds the owner's mu.
func (q *volumeQuota) charge(id meta.SessionID, c *wire.Call, before uint64) {
	w, write := c.Op.(*meta.Write)
	switch {
	case c.Replay || !c.Draw && c.Reserved == 0:
	case !write:
		q.Spend(id, c.Reserved)
	case c.Draw:
		q.Draw(id, w.Ino, before)
	default:
		q.ChargeWrite(id, w.Ino, c.Reserved)
	}
}

// freeLeft frees the promises of ended sessions when no abandoned file is open-ended. The
// caller holds the owner's mu.
func (q *volumeQuota) freeLeft() {
	if q.Left() == 0 {
		return
	}
	if _, files, err := q.o.collection.abandoned(); err == nil && files == 0 {
		q.FreeLeft()
	}
}

// reclaim asks all sessions to give back idle bytes, and returns a channel closed when the
// round is over; nil if no session can have idle bytes. The caller holds the owner's mu.
func (q *volumeQuota) reclaim() <-chan struct{} {
	if r := q.Round(); r != nil {
		return r.Over()
	}
	var asked []meta.SessionID
	for s := range q.o.entered {
		if q.Askable(s.id) && !s.away.Load() {
			asked = append(asked, s.id)
			s.enqueue(0, &wire.Quota{Volume: q.o.vol, Metered: true, Round: q.NextRound(), Overwrites: q.overwrites})
			go s.flush() // not in line: the caller holds the owner's mu
		}
	}
	return q.beginRound(asked, reclaimWait)
}

// beginRound begins a round of at most wait, and returns a channel closed when the round is
// over; nil: no session is asked. The caller holds the owner's mu.
func (q *volumeQuota) beginRound(asked []meta.SessionID, wait time.Duration) <-chan struct{} {
	o := q.o
	r := q.BeginRound(asked)
	if r == nil {
		return nil
	}
	time.AfterFunc(wait, func() {
		o.mu.Lock()
		defer o.mu.Unlock()
		silent := r.Pending()
		if q.EndRound(r) {
			o.log.Warn("sessions did not give back their unused part of the quota", "sessions", silent)
		}
	})
	return r.Over()
}

// roomSearch counts the steps tried for a request before its refusal.
type roomSearch struct {
	rounds, waits int
	synced        bool
}

// unheard reports whether silent sessions hold promises: each such session renews in a moment,
// or ends. unheard marks late sessions as wanted, so that these sessions end. The caller holds
// the owner's mu.
func (q *volumeQuota) unheard() (yes bool) {
	o := q.o
	for s := range o.entered {
		if bytes, _ := q.Promise(s.id); bytes == 0 || s.idle() <= o.srv.cfg.SessionTTL/2 {
			continue
		}
		yes = true
		if s.idle() > o.srv.cfg.SessionTTL {
			s.wanted.Store(true)
		}
	}
	return yes
}

// promisesLeave reports whether ending sessions still have promises; the promises become free
// when the open chunks of these sessions are sealed. The caller holds the owner's mu.
func (q *volumeQuota) promisesLeave() bool {
	inside := map[meta.SessionID]bool{}
	for s := range q.o.entered {
		inside[s.id] = true
	}
	return q.PromisedBeyond(inside)
}

// findRoom returns a channel to wait for before the next try; nil: the refusal is final. The
// caller holds the owner's mu.
func (q *volumeQuota) findRoom(k *roomSearch, cause error) <-chan struct{} {
	o := q.o
	var e *meta.Error
	if bytes := errors.As(cause, &e) && e.Op != namespace.OpInodeQuota; bytes {
		// The first round may have begun before this request, so a second may be needed.
		if k.rounds < 2 {
			k.rounds++
			if wait := q.reclaim(); wait != nil {
				return wait
			}
		}
		if q.unheard() {
			return soon()
		}
	}
	reaping := false
	if err := namespace.ReapQueue(o.view(), func(meta.Ino) bool { reaping = true; return false }); err != nil {
		return nil
	}
	q.freeLeft()
	if o.late.holdFiles() && k.waits < roomTries {
		k.waits++
		return soon()
	}
	if (reaping || o.usage.stale() || q.promisesLeave()) && k.waits < roomTries {
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

// serveReserve promises bytes to a session, or takes promised bytes back.
func (q *volumeQuota) serveReserve(s *session, id uint64, m *wire.Reserve) {
	o := q.o
	o.mu.Lock()
	q.giveBack(s, m)
	k := roomSearch{}
	re, wait := q.reserve(s, m, &k)
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
				// The client's process may have a successor, already informed of the promises.
				err = context.Cause(ctx)
			}
			if err != nil {
				re = &wire.Reserved{Status: wire.StatusOf(err)}
				q.WaitNoMore(s.id)
				break
			}
			if re, wait = q.reserve(s, m, &k); wait != nil {
				o.mu.Unlock()
			}
		}
		s.enqueue(id, re)
		o.mu.Unlock()
		s.flush()
	})
}

// giveBack books the bytes given back by a request, and the answer to a round. The caller holds
// the owner's mu.
func (q *volumeQuota) giveBack(s *session, m *wire.Reserve) {
	if _, ok := q.o.entered[s]; !ok || q.o.failed != nil {
		return
	}
	q.GiveBack(s.id, m.Serial, m.Give)
	if m.Round != 0 {
		q.Answer(s.id, m.Round)
	}
}

// reserve returns the answer to a request, or a channel to wait for before the next try. The
// caller holds the owner's mu.
func (q *volumeQuota) reserve(s *session, m *wire.Reserve, k *roomSearch) (*wire.Reserved, <-chan struct{}) {
	o := q.o
	switch _, ok := o.entered[s]; {
	case o.failed != nil:
		return &wire.Reserved{Status: wire.StatusOf(o.failed)}, nil
	case !ok && s.ended.Load():
		return nil, never // the session's connection is being closed
	case !ok:
		return &wire.Reserved{Status: wire.StatusOf(o.srv.hosted.elsewhere(o.vol))}, nil
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
	granted, fits := q.promise(s.id, m)
	if !fits {
		q.Wait(s.id)
		err := meta.E("quota", meta.QuotaExceeded, fmt.Sprintf("%d of %d bytes", q.Used(), q.Limit()), nil)
		if wait := q.findRoom(k, err); wait != nil {
			return nil, wait
		}
		q.WaitNoMore(s.id)
		return &wire.Reserved{Status: wire.StatusOf(err), Metered: true}, nil
	}
	_, idle := q.Promise(s.id)
	return &wire.Reserved{Granted: granted, Idle: idle, Metered: true}, nil
}

// promise promises a session m.Want bytes or, without room for all, the indispensable part
// (needed). false: even that part does not fit. The caller holds the owner's mu.
func (q *volumeQuota) promise(id meta.SessionID, m *wire.Reserve) (granted uint64, fits bool) {
	free := q.Free()
	if free < m.Want {
		least := q.needed(m)
		if free < least {
			return 0, false
		}
		return q.GrantExactly(id, m.Serial, least), true
	}
	q.WaitNoMore(id)
	if q.Share(id) {
		q.reclaim() // from sessions above their share; nobody waits
	}
	return q.Grant(id, m.Serial, m.Want), true
}

// maxClaim bounds a session's claim of an earlier promise, so that sums don't wrap.
const maxClaim = 1 << 56

// claimPromise gives a session back its promise of n bytes from the previous owner.
func (q *volumeQuota) claimPromise(s *session, n uint64) {
	o := q.o
	o.mu.Lock()
	defer o.mu.Unlock()
	if _, ok := o.entered[s]; !ok || !o.awaited[s.id] {
		o.log.Warn("a claim came too late", "session", s.name)
		return
	}
	q.Claim(s.id, min(n, maxClaim))
}

// setPolicy journals a policy. The caller has the volume's turn (Server.setting): the policy
// in force here is the last one journaled. A new quota waits until the sessions have committed
// their unreserved writes, so that no such write is refused later; setPolicy does not wait for
// absent sessions. A lowered quota leaves promises standing, and refuses new requests.
func (o *owner) setPolicy(ctx context.Context, policy meta.Policy) error {
	if err := o.await(ctx, o.recovered); err != nil {
		return err
	}
	o.mu.Lock()
	q := &o.quota
	var settle <-chan struct{}
	counted := q.overwrites
	comes := policy.QuotaBytes > 0 && (q.Limit() == 0 || policy.QuotaSnapshots && !counted)
	// Sessions entering meanwhile get the new value, too.
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
		settle = o.quota.beginRound(asked, settleWait)
	}
	o.mu.Unlock()
	var err error
	if settle != nil {
		err = o.await(ctx, settle)
	}
	if err == nil {
		err = o.leases.durably(ctx, &meta.SetPolicy{Policy: policy})
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	if q.overwrites = counted; err == nil {
		q.overwrites = policy.QuotaSnapshots
		q.SetLimit(policy.QuotaBytes)
		if used, _, uerr := namespace.Counted(o.view()); uerr == nil {
			q.SetUsed(used)
		}
		o.quota.lowerIdle()
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

// lowerIdle asks for idle bytes back if more lie idle than MostIdle allows. Nobody waits. A
// session may leave bytes idle again after its answer to a running round, so another round
// follows. The caller holds the owner's mu.
func (q *volumeQuota) lowerIdle() {
	o := q.o
	if q.Idle() <= q.MostIdle() {
		return
	}
	before, done := q.Round(), q.reclaim()
	if before == nil || o.ctx.Err() != nil || o.stClosed {
		return
	}
	o.wg.Go(func() {
		if o.await(o.ctx, done) == nil {
			o.mu.Lock()
			q.lowerIdle()
			o.mu.Unlock()
		}
	})
}

// needed returns how many bytes a request can't do without. The caller holds the owner's mu.
func (q *volumeQuota) needed(m *wire.Reserve) uint64 {
	if m.Len == 0 {
		return m.Want
	}
	n, err := namespace.Room(q.o.view(), m.Ino, m.Off, m.Len)
	if err != nil {
		return m.Want // the write will report the error
	}
	return min(m.Want, n)
}
