package server

import (
	"context"
	"errors"
	"log/slog"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/cluster"
	"penstock.io/penstock/meta/lease"
	"penstock.io/penstock/meta/namespace"
	"penstock.io/penstock/meta/wire"
)

// replyPrefix is the first byte of reply records, which only recovery reads.
var replyPrefix = namespace.PutReply(0, 0, meta.OpID{}, &meta.Result{}).Key[0]

// eventPrefix is that of events, which those who follow them read from the store.
const eventPrefix = namespace.EventPrefix

// owner serves one volume while this server owns it.
//
// Lock order: mu, then a session's sender. No call to etcd, disk sync or
// network is made under mu; the store is read under it.
type owner struct {
	srv  *Server
	vol  meta.VolumeID
	name string // of the volume, as of when its row was read last
	log  *slog.Logger
	own  Ownership
	// fences counts the orders about sealed chunks; see fresh.
	fences atomic.Uint32
	j      Journal
	st     Store

	// hanging is held while something is hung into the volume, and alone while
	// it is deleted. It is taken before mu.
	hanging   sync.RWMutex
	rollbacks rollbacks

	mu    sync.Mutex
	state cluster.VolumeState // what the volume's row says
	ov    *overlay
	cache *cache
	// cur is being filled, queue is full and waits for the journal.
	cur     *entry
	queue   []*entry
	queued  int // bytes in queue
	durable meta.Seq
	waiters []waiter
	wake    chan struct{} // to the committer, capacity 1
	failed  error
	// stClosed: the store may not be asked any more.
	stClosed bool

	leases   *lease.Table[*session]
	quota    volumeQuota
	words    words
	locks    locks
	mirror   mirrorTarget
	sessions map[meta.SessionID]*journaled

	// recovered is closed when operations that are not replays may run.
	recovered chan struct{}
	// wanted: somebody who has no session to come back waits for recovered.
	wanted atomic.Bool
	// allBack, of capacity 1, tells recover that awaited got empty.
	allBack chan struct{}
	// awaited are journaled sessions not yet back or gone; true: it has entered,
	// and its claims and replays are on their way.
	awaited map[meta.SessionID]bool
	// entered are the sessions inside, each with the number of its entry: what
	// came before another entry is not executed after it. entries is the last.
	entered  map[*session]uint64
	entries  uint64
	departed []departed // for the task that ends them
	told     policyTold
	// leaving: the volume is being handed over, and nothing new is answered;
	// closed if it stays after all.
	leaving chan struct{}
	over    []meta.SessionID // of awaited: ended, but not to the last step

	inspection inspection
	faults     faults
	stale      stale

	checkpoints checkpoints
	check       *checking            // under way; nil: none
	restored    *cluster.Restoration // nil: it never was
	noSpace     error                // etcd refuses writes
	snapped     meta.Seq             // the last entry that takes or deletes a snapshot
	barrier     *barrier             // a snapshot is being taken,
	group       *groupHolding        // of a group; nil: not
	groups      map[uint64]bool      // that are decided; false: without a record
	closed      chan struct{}        // nobody may enter until it is closed; nil: all may
	digesting   digesting
	indexing    indexing
	clone       bool       // files may lie in other volumes' chunks,
	foreign     foreign    // which are these
	promotion   promotion  // of a clone,
	cloning     sync.Mutex // held while a clone of this volume is made or let go, before mu
	freed       uint64     // by the deletion of a snapshot under way
	schedule    schedule   // of snapshots
	// unanswered are, of each snapshot taken here, the files that were not given back.
	unanswered map[meta.Generation]unanswered
	compaction compaction
	replays    replays
	filling    map[meta.ChunkID]bool // open, by promotion or compaction: not abandoned

	eventWaits eventWaits
	tasks      tasks

	ctx    context.Context
	cancel context.CancelCauseFunc
	wg     sync.WaitGroup
}

// journaled is what the volume's state knows of a session.
type journaled struct {
	seq     meta.Seq // entry that holds its SessionStart
	info    meta.SessionStart
	replies map[meta.OpID]*keptReply
	order   []*keptReply // by seq
	acked   meta.Seq     // replies up to here may go
	forgot  meta.Seq     // replies up to here are gone
	ending  bool
	// holds are the first entries of batches that are only partly answered: a
	// notice that those are durable may overtake the batch's reply.
	holds map[uint64]meta.Seq
}

// ack lets replies go that the client has, and knows to be durable.
func (j *journaled) ack(seq meta.Seq) {
	for _, h := range j.holds {
		seq = min(seq, h-1)
	}
	j.acked = max(j.acked, seq)
}

type keptReply struct {
	id  meta.OpID
	seq meta.Seq
	re  *wire.Reply
	// claimed: it was executed by an owner before, and what was promised for it
	// was claimed here.
	claimed bool
}

type waiter struct {
	seq meta.Seq
	ch  chan struct{}
}

// leasePoll is how often what waits for the owner's lease looks again.
const leasePoll = 20 * time.Millisecond

// maxEntryBytes closes an entry: half of etcd's request limit, with room.
const maxEntryBytes = 512 << 10

// maxQueued is how many bytes of effects may wait for the journal before
// mutations wait, too.
const maxQueued = 8 << 20

// closedChan is a channel to wait for when there is nothing to wait for.
var closedChan = func() chan struct{} { c := make(chan struct{}); close(c); return c }()

func (o *owner) now() meta.Time { return meta.Time(time.Now().UnixNano()) }

func (o *owner) context(s meta.SessionID) namespace.Context {
	return namespace.Context{Now: o.now(), Session: s, Term: o.own.Term(), Volume: o.vol, Seq: o.cur.seq}
}

// untilDurable returns a channel that is closed when entry seq is in the
// journal, and hurries it. Caller holds mu.
func (o *owner) untilDurable(seq meta.Seq) <-chan struct{} {
	// An operation may have had no effects: nothing would ever journal the
	// empty entry.
	if seq = min(seq, o.newest()); seq <= o.durable {
		return closedChan
	}
	o.hurry()
	for i := range o.waiters {
		if o.waiters[i].seq == seq {
			return o.waiters[i].ch
		}
	}
	ch := make(chan struct{})
	o.waiters = append(o.waiters, waiter{seq, ch})
	return ch
}

// newest is the last entry that has, or will have, something in it. Caller
// holds mu.
func (o *owner) newest() meta.Seq {
	if len(o.cur.effects) == 0 {
		return o.cur.seq - 1
	}
	return o.cur.seq
}

func (o *owner) hurry() {
	o.cur.urgent = true
	select {
	case o.wake <- struct{}{}:
	default:
	}
}

// apply books the effects of an executed operation in the current entry.
// Caller holds mu.
func (o *owner) apply(effects []namespace.Effect, by meta.SessionID) {
	if bytes, inodes, ok := namespace.UsageAfter(effects); ok {
		if o.quota.Limit() > 0 {
			o.quota.SetUsed(bytes)
		}
		o.watchQuota(bytes, inodes)
	}
	first := len(o.cur.effects) == 0
	for _, ef := range effects {
		o.ov.add(o.cur, ef, by)
	}
	if o.cur.bytes >= maxEntryBytes {
		o.cut()
		first = true
	}
	if first && len(effects) > 0 {
		select {
		case o.wake <- struct{}{}:
		default:
		}
	}
}

// cut closes the current entry. Caller holds mu.
func (o *owner) cut() {
	o.queue = append(o.queue, o.cur)
	o.queued += o.cur.bytes
	o.cur = &entry{seq: o.cur.seq + 1, sessions: map[*session]struct{}{}}
}

// execute runs an operation of the owner itself or in an owner's role, and
// books its effects. Caller holds mu. An operation that meets a truncated tail
// reaps it first.
func (o *owner) execute(op meta.Op, as meta.SessionID, id meta.OpID, replay bool, w *view) (*meta.Result, []namespace.Effect, error) {
	return o.executeFor(op, as, id, replay, 0, w)
}

// executeFor is execute for an operation of which reserved bytes were promised.
func (o *owner) executeFor(op meta.Op, as meta.SessionID, id meta.OpID, replay bool, reserved uint64, w *view) (*meta.Result, []namespace.Effect, error) {
	for range 1 << 20 {
		c := o.context(as)
		c.Op, c.Replay, c.Squash = id, replay, w.squash
		c.Reserved, c.Held = reserved, o.quota.Promised()-reserved
		res, effects, err := namespace.Execute(w, c, op)
		if err == nil || !errors.Is(err, meta.Again) {
			return res, effects, err
		}
		if rerr := o.reapOne(err); rerr != nil {
			return nil, nil, rerr
		}
	}
	return nil, nil, meta.E("execute", meta.Busy, "", errors.New("the reaping does not end"))
}

// run executes and books an operation of the owner itself. Caller holds mu.
func (o *owner) run(op meta.Op, as meta.SessionID) (*meta.Result, error) {
	if o.failed != nil {
		return nil, o.failed
	}
	w := &view{o: o, session: as}
	res, effects, err := o.execute(op, as, meta.OpID{}, false, w)
	if err != nil {
		return nil, err
	}
	o.apply(effects, 0)
	return res, nil
}

// attempt answers one call, or says what to wait for before trying again.
// Caller holds mu.
func (o *owner) attempt(s *session, c *wire.Call, k *ticket) (*wire.Reply, <-chan struct{}) {
	if o.failed != nil {
		return &wire.Reply{Status: wire.StatusOf(o.failed)}, nil
	}
	entry, ok := o.entered[s]
	if !ok {
		if s.ended.Load() {
			return nil, never // its connection is being closed
		}
		return o.refuse(o.srv.elsewhere(o.vol))
	}
	if k.entry == 0 {
		k.entry = entry
	} else if k.entry != entry {
		// It waited while its session ended and began anew: the client has given up
		// by now what it would do.
		return o.refuse(meta.E("call", meta.SessionExpired, s.name, nil))
	}
	if o.leaving != nil {
		return nil, o.leaving // or until the volume is gone
	}
	if o.outsideLease() {
		return nil, soon()
	}
	if j := o.sessions[s.id]; j != nil && c.Ack > j.acked {
		j.ack(min(c.Ack, o.durable))
	}
	if c.At != 0 {
		return o.queryAt(s, c)
	}
	if c.Op.Code().Mutates() {
		return o.mutate(s, c, k)
	}
	return o.query(s, c, k)
}

func (o *owner) refuse(err error) (*wire.Reply, <-chan struct{}) {
	return &wire.Reply{Status: wire.StatusOf(err)}, nil
}

// journalSession makes the session known to whoever owns the volume next,
// before it gets an early reply. Caller holds mu.
func (o *owner) journalSession(s *session) (<-chan struct{}, error) {
	j := o.sessions[s.id]
	if j == nil {
		start := meta.SessionStart{Session: s.id, Name: s.name, Host: s.host, PID: s.pid, Start: s.start}
		seq := o.cur.seq
		if _, err := o.run(&start, 0); err != nil {
			return nil, err
		}
		j = &journaled{seq: min(seq, o.newest()), info: start, replies: map[meta.OpID]*keptReply{}, holds: map[uint64]meta.Seq{}}
		o.sessions[s.id] = j
	}
	if j.ending {
		return nil, meta.E("session", meta.SessionExpired, s.name, nil)
	}
	if j.seq > o.durable {
		return o.untilDurable(j.seq), nil
	}
	return nil, nil
}

func (o *owner) mutate(s *session, c *wire.Call, k *ticket) (*wire.Reply, <-chan struct{}) {
	if c.ID.IsZero() {
		return o.refuse(meta.E("call", meta.Protocol, "", errors.New("a mutation without an operation id")))
	}
	if j := o.sessions[s.id]; j != nil {
		if kept := j.replies[c.ID]; kept != nil {
			// Answered before: the same again. What it says may be old, so
			// nothing is leased with it.
			if kept.seq <= o.durable {
				// The notice may have gone down with a connection.
				s.enqueue(0, &wire.Durable{Volume: o.vol, Seq: kept.seq})
			}
			if kept.claimed && !c.Replay {
				kept.claimed = false
				o.quota.Spend(s.id, c.Reserved)
			}
			re := *kept.re
			re.Grants = nil
			return &re, nil
		}
	}
	if err := o.checkReplay(s, c); err != nil {
		return o.refuse(err)
	}
	select {
	case <-o.recovered:
	default:
		if !c.Replay {
			return nil, o.wantRecovered()
		}
	}
	if err := o.full(c.Op); err != nil && !c.Replay {
		return o.refuse(err)
	}
	if !c.Replay && !o.mayChange(s, c.Op) {
		return o.refuse(errMirror("change", o))
	}
	if wait, err := o.journalSession(s); wait != nil || err != nil {
		if err != nil {
			return o.refuse(err)
		}
		return nil, wait
	}
	if o.queued > maxQueued {
		return nil, o.untilDurable(o.queue[len(o.queue)-1].seq)
	}
	if o.barrier != nil && o.barrier.cut && endsOpen(c.Op) {
		return nil, o.barrier.over
	}
	if wait := o.frozen(); wait != nil {
		return nil, wait
	}
	w := &view{o: o, session: s.id, squash: s.squash(o.vol)}
	var orphaned meta.Ino
	if !o.leases.Alone(s) {
		wait, ino, err := o.recallFor(s, c.Op, k, w)
		if err != nil {
			return o.refuse(err)
		}
		if wait != nil {
			return nil, wait
		}
		orphaned = ino
	}
	op := c.Op
	switch m := op.(type) {
	case *meta.Unlink:
		n := *m
		n.Holders = o.holders(s, orphaned, k)
		op = &n
	case *meta.Rename:
		n := *m
		n.Holders = o.holders(s, orphaned, k)
		op = &n
	}
	cover := o.quota.cover(s.id, c)
	res, effects, err := o.executeFor(op, s.id, c.ID, c.Replay, cover, w)
	if w.wait > o.durable {
		return nil, o.untilDurable(w.wait)
	}
	if errors.Is(err, meta.QuotaExceeded) {
		if wait := o.findRoom(&k.room, err); wait != nil {
			return nil, wait
		}
	}
	if err != nil {
		re := &wire.Reply{Status: wire.StatusOf(err)}
		if errors.Is(err, meta.Exists) {
			o.grantNames(s, c.Op, re)
		}
		return re, nil
	}
	re := &wire.Reply{Seq: o.cur.seq, Result: *res}
	o.grantFor(s, c, res, re)
	effects = append(effects, namespace.PutReply(s.id, o.cur.seq, c.ID, res))
	o.cur.sessions[s] = struct{}{}
	before := o.quota.Used()
	o.apply(effects, s.id)
	if written, ok := op.(*meta.Write); ok && o.mirror.shown != 0 {
		o.arrived(written)
	}
	o.charge(s.id, c, before)
	j := o.sessions[s.id]
	kept := &keptReply{id: c.ID, seq: re.Seq, re: re}
	j.replies[c.ID] = kept
	j.order = append(j.order, kept)
	if orphaned != 0 {
		o.tellOrphaned(s, orphaned, k, res)
	}
	return re, nil
}

// recallFor takes back what other sessions cached of the inodes that op is
// going to change, but for read times: who caches an inode may tell an older one. It
// also finds the inode whose last name op may take, if
// other sessions stand at it. Caller holds mu.
func (o *owner) recallFor(s *session, op meta.Op, k *ticket, w *view) (wait <-chan struct{}, orphaned meta.Ino, err error) {
	inos, err := namespace.Touched(w, op)
	if err != nil {
		return nil, 0, err
	}
	keep := meta.LeaseNone
	if m, ok := op.(*meta.SetAttr); ok && m.ReadTime() {
		keep = meta.LeaseShared
	}
	_, write := op.(*meta.Write)
	for _, ino := range inos {
		if write && o.putsIn(s, ino) {
			continue
		}
		if ch := o.recall(s, ino, keep); ch != nil {
			o.leases.Block(&k.leases, ino)
			o.noteHolders(ino, k)
			wait = ch
		}
	}
	if wait != nil {
		return wait, 0, nil
	}
	var dir meta.Ino
	var name string
	switch m := op.(type) {
	case *meta.Unlink:
		dir, name = m.Parent, m.Name
	case *meta.Rename:
		dir, name = m.NewParent, m.NewName
	default:
		return nil, 0, nil
	}
	r, err := namespace.Query(w, o.context(s.id), &meta.Lookup{Parent: dir, Name: name})
	if err != nil {
		return nil, 0, nil // the operation itself says so
	}
	o.noteHolders(r.Attr.Ino, k)
	return nil, r.Attr.Ino, nil
}

// holders are the sessions that may hold ino open, the caller among them. What
// those hold that are not back yet, while others replay, nobody knows: each is
// told when it is, and gives up what it has not open. Caller holds mu.
func (o *owner) holders(s *session, ino meta.Ino, k *ticket) []meta.SessionID {
	ids := []meta.SessionID{s.id}
	for _, id := range k.holders[ino] {
		if h := o.srv.session(id); h != nil && id != s.id {
			if _, err := o.journalSession(h); err == nil {
				ids = append(ids, id)
			}
		}
	}
	for id := range o.awaited {
		if j := o.sessions[id]; j != nil && !j.ending && !slices.Contains(ids, id) {
			ids = append(ids, id)
		}
	}
	return ids
}

func (o *owner) tellOrphaned(s *session, ino meta.Ino, k *ticket, res *meta.Result) {
	gone := res.Attr.Ino == ino && res.Attr.Nlink == 0 || res.Attr2.Ino == ino && res.Attr2.Nlink == 0
	if !gone {
		return
	}
	for _, id := range k.holders[ino] {
		if h := o.srv.session(id); h != nil && id != s.id {
			h.enqueue(0, &wire.Recall{Recall: meta.Recall{Volume: o.vol, Ino: ino}, Orphan: true})
		}
	}
}

// grantFor leases what a mutation's reply tells. Caller holds mu.
func (o *owner) grantFor(s *session, c *wire.Call, res *meta.Result, re *wire.Reply) {
	if c.Want == meta.LeaseNone {
		return
	}
	mode := meta.LeaseShared
	switch c.Op.(type) {
	case *meta.Create, *meta.Tmpfile:
		if c.Want == meta.LeaseExclusive && res.Attr.IsRegular() {
			mode = meta.LeaseExclusive
		}
	}
	for _, a := range []*meta.Attr{&res.ParentAttr, &res.NewParentAttr} {
		if a.Ino != 0 {
			o.give(s, a.Ino, meta.LeaseShared, re)
		}
	}
	if res.Attr.Ino != 0 {
		o.give(s, res.Attr.Ino, mode, re)
	}
	if res.Attr2.Ino != 0 {
		o.give(s, res.Attr2.Ino, meta.LeaseShared, re)
	}
}

// grantNames leases the directory of a lookup that found nothing, or of a
// create that found something: the answer may be cached. Caller holds mu.
func (o *owner) grantNames(s *session, op meta.Op, re *wire.Reply) {
	switch m := op.(type) {
	case *meta.Lookup:
		o.give(s, m.Parent, meta.LeaseShared, re)
	case *meta.Create:
		o.give(s, m.Parent, meta.LeaseShared, re)
	}
}

func (o *owner) query(s *session, c *wire.Call, k *ticket) (*wire.Reply, <-chan struct{}) {
	select {
	case <-o.recovered:
	default:
		return nil, o.wantRecovered()
	}
	want := c.Want
	at, re, wait := o.mirrored(s, c)
	if re != nil || wait != nil {
		return re, wait
	}
	if want > meta.LeaseNone && o.leases.Count(s) == 0 {
		// Whoever owns the volume next must know who may hold leases: it waits
		// for them, or until their processes are gone.
		wait, err := o.journalSession(s)
		switch {
		case err != nil:
			want = meta.LeaseNone
		case wait != nil:
			return nil, wait
		}
	}
	if _, open := c.Op.(*meta.Open); open && want == meta.LeaseExclusive {
		if o.barrier != nil {
			return nil, o.barrier.over
		}
		if o.immutable() {
			return o.refuse(meta.E("open", meta.ReadOnly, o.subject(), errors.New("the volume is immutable")))
		}
	}
	w := &view{o: o, session: s.id}
	_, w.counters = c.Op.(*meta.StatFSOp)
	q := o.context(s.id)
	q.At = at
	res, err := namespace.Query(w, q, c.Op)
	if w.wait > o.durable {
		return nil, o.untilDurable(w.wait)
	}
	if err != nil {
		re := &wire.Reply{Status: wire.StatusOf(err)}
		if want > meta.LeaseNone && errors.Is(err, meta.NotFound) {
			o.grantNames(s, c.Op, re)
		}
		return re, nil
	}
	if wait, err := o.fillPlaces(res); wait != nil || err != nil {
		if err != nil {
			return o.refuse(err)
		}
		return nil, wait
	}
	if w.counters {
		o.srv.fillDisk(&res.StatFS)
	}
	re = &wire.Reply{Result: *res}
	ino := res.Attr.Ino
	if ino == 0 {
		ino = subject(c.Op)
	}
	// Another session may hold newer attributes, size and data.
	keep := meta.LeaseShared
	if _, open := c.Op.(*meta.Open); open && want == meta.LeaseExclusive {
		keep = meta.LeaseNone
	}
	if !o.leases.Alone(s) && ino != 0 {
		if at == 0 { // who is shown a snapshot reads nothing that others may hold
			if ch := o.recall(s, ino, keep); ch != nil {
				o.leases.Block(&k.leases, ino)
				return nil, ch
			}
		}
		if _, open := c.Op.(*meta.Open); open && want > o.leases.Mode(s, ino) {
			if ch := o.leases.Blocked(&k.leases, ino); ch != nil {
				return nil, ch
			}
			o.leases.UnblockInode(&k.leases, ino)
		}
	}
	if want == meta.LeaseNone {
		return re, nil
	}
	switch m := c.Op.(type) {
	case *meta.Lookup:
		o.give(s, m.Parent, meta.LeaseShared, re)
		if res.Volume == 0 {
			o.give(s, ino, meta.LeaseShared, re)
		}
	case *meta.ReadDir:
		o.give(s, ino, meta.LeaseShared, re)
		if m.Plus {
			alone := o.leases.Alone(s)
			for i := range res.Entries {
				d := &res.Entries[i]
				if d.Attr == nil || d.Volume != 0 {
					continue
				}
				if !alone && o.leases.ExclusiveElsewhere(s, d.Ino) {
					d.Attr = nil
					continue
				}
				o.give(s, d.Ino, meta.LeaseShared, re)
			}
		}
	case *meta.Open:
		o.give(s, ino, want, re)
		if want == meta.LeaseExclusive && at == 0 {
			o.giveAgain(s, m.Also, re)
		}
	default:
		if ino != 0 {
			o.give(s, ino, meta.LeaseShared, re)
		}
	}
	return re, nil
}

// subject is the inode that a read is about.
func subject(op meta.Op) meta.Ino {
	switch m := op.(type) {
	case *meta.GetXattr:
		return m.Ino
	case *meta.ListXattr:
		return m.Ino
	case *meta.ReadLink:
		return m.Ino
	case *meta.Seek:
		return m.Ino
	case *meta.ReadDir:
		return m.Ino
	}
	return 0
}

// serve answers a call now if it can, else from a goroutine of its own.
// inline: wait here (replays, whose order matters).
func (o *owner) serve(s *session, id uint64, c *wire.Call, inline bool) {
	k := &ticket{}
	o.mu.Lock()
	re, wait := o.attempt(s, c, k)
	if wait == nil {
		o.leases.Unblock(&k.leases)
		s.enqueue(id, re)
		o.mu.Unlock()
		return
	}
	o.mu.Unlock()
	finish := func(ctx context.Context) {
		re := o.retry(ctx, s, c, k, wait)
		s.enqueue(id, re)
		o.leases.Unblock(&k.leases)
		o.mu.Unlock()
		s.flush()
	}
	if inline {
		finish(s.ctx)
		return
	}
	ctx, stop := s.waiting(id)
	s.wg.Go(func() { defer stop(); finish(ctx) })
}

// retry waits and attempts until there is an answer; it returns with mu held.
func (o *owner) retry(ctx context.Context, s *session, c *wire.Call, k *ticket, wait <-chan struct{}) *wire.Reply {
	for {
		select {
		case <-wait:
		case <-ctx.Done():
			o.mu.Lock()
			return &wire.Reply{Status: wire.StatusOf(meta.E("call", meta.Interrupted, "", context.Cause(ctx)))}
		case <-o.ctx.Done():
			o.mu.Lock()
			return &wire.Reply{Status: wire.StatusOf(o.gone())}
		}
		o.mu.Lock()
		var re *wire.Reply
		if re, wait = o.attempt(s, c, k); wait == nil {
			return re
		}
		o.mu.Unlock()
	}
}

// closeStore closes the store once nobody can be at it: the owner's goroutines
// have ended, and everybody else reads it under mu.
func (o *owner) closeStore() error {
	o.wg.Wait()
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.stClosed {
		return nil
	}
	o.stClosed = true
	if o.failed == nil {
		o.failed = o.gone()
	}
	// It holds journaled effects only (rule 1): a standby may go on with it.
	return o.srv.standbys.give(o.vol, o.st)
}

// gone is why the owner serves no more: whoever asks for it asks the next owner.
func (o *owner) gone() error {
	cause := context.Cause(o.ctx)
	var to handedOver
	errors.As(cause, &to)
	return meta.E("volume", meta.NotOwner, to.addr, cause)
}

// serveBatch answers operations in order; nothing is leased by a batch, so
// that its reply may come when all are decided.
func (o *owner) serveBatch(s *session, id uint64, b *wire.Batch) {
	out := &wire.BatchRe{Replies: make([]wire.Reply, len(b.Calls))}
	i := 0
	var entry uint64
	var room roomSearch              // of the call that is waited for
	step := func() <-chan struct{} { // under mu
		for ; i < len(b.Calls); i++ {
			c := &b.Calls[i]
			c.Want = meta.LeaseNone
			k := &ticket{entry: entry, room: room}
			re, wait := o.attempt(s, c, k)
			entry, room = k.entry, k.room
			if wait != nil {
				o.leases.Unblock(&k.leases)
				return wait
			}
			room = roomSearch{}
			o.leases.Unblock(&k.leases)
			out.Replies[i] = *re
			if j := o.sessions[s.id]; j != nil && re.Seq != 0 && j.holds[id] == 0 {
				j.holds[id] = re.Seq
			}
		}
		if j := o.sessions[s.id]; j != nil {
			delete(j.holds, id)
		}
		return nil
	}
	o.mu.Lock()
	wait := step()
	if wait == nil {
		s.enqueue(id, out)
		o.mu.Unlock()
		return
	}
	o.mu.Unlock()
	ctx, stop := s.waiting(id)
	s.wg.Go(func() {
		defer stop()
		defer s.flush()
		for {
			select {
			case <-wait:
				o.mu.Lock()
				if wait = step(); wait == nil {
					s.enqueue(id, out)
					o.mu.Unlock()
					return
				}
				o.mu.Unlock()
				continue
			case <-ctx.Done():
			case <-o.ctx.Done():
			}
			for ; i < len(b.Calls); i++ {
				out.Replies[i] = wire.Reply{Status: wire.StatusOf(o.gone())}
			}
			s.enqueue(id, out)
			return
		}
	})
}

// serveSync answers when the journal has everything up to m.Seq.
func (o *owner) serveSync(s *session, id uint64, m *wire.Sync) {
	o.mu.Lock()
	if o.failed != nil {
		s.enqueue(id, &wire.Reply{Status: wire.StatusOf(o.failed)})
		o.mu.Unlock()
		return
	}
	if o.noSpace != nil && m.Seq > o.durable {
		s.enqueue(id, &wire.Reply{Status: wire.StatusOf(o.noSpace)})
		o.mu.Unlock()
		return
	}
	wait := o.untilDurable(m.Seq)
	o.mu.Unlock()
	s.wg.Go(func() {
		var err error
		select {
		case <-wait:
		case <-o.ctx.Done():
			err = o.gone()
		case <-s.ctx.Done():
			return
		}
		s.enqueue(id, &wire.Reply{Status: wire.StatusOf(err)})
		s.flush()
	})
}
