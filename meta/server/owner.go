package server

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/cluster"
	"penstock.io/penstock/meta/namespace"
	"penstock.io/penstock/meta/wire"
)

// replyPrefix is the first byte of reply records, which only recovery reads.
var replyPrefix = namespace.PutReply(0, 0, meta.OpID{}, &meta.Result{}).Key[0]

// eventPrefix is the first byte of event records. Followers of a volume's events read them
// from the store.
const eventPrefix = namespace.EventPrefix

// owner serves one volume while this server owns it.
//
// Lock order: hanging, or clones.one; then mu; then a session's sender. No goroutine holds
// hanging and clones.one at once, and both are held across calls to etcd. No call to
// etcd, disk sync or network is made under mu; the store is read under mu.
type owner struct {
	kernel
	state cluster.VolumeState // state in the volume's row

	// hanging is read-locked while the server attaches a volume below this volume, and locked
	// while the server deletes this volume. hanging is taken before mu.
	hanging   sync.RWMutex
	rollbacks rollbacks

	leases *leases
	quota  volumeQuota
	words  words
	locks  locks
	mirror mirrorTarget

	// allBack, of capacity 1, notifies recover when awaited becomes empty.
	allBack chan struct{}
	// awaited has the sessions known to the journal when the owner took the volume, and neither
	// back nor ended since. The value is true if the session has entered, and will send claims
	// and replays.
	awaited  map[meta.SessionID]bool
	departed []departed // departed sessions, for the task that ends them
	told     policyTold
	over     []meta.SessionID // sessions in awaited whose end began but was not finished

	sealing    sealing
	openEnds   openEnds
	snapshots  snapshots
	usage      snapshotUsage
	reading    snapshotReading
	collection collection
	losses     losses
	inspection inspection
	faults     faults
	stale      stale

	checkpoints checkpoints
	check       *checking // check under way; nil: none
	groups      groupSnapshots
	digesting   digesting
	indexing    indexing
	foreign     foreign   // the chunks of other volumes
	promotion   promotion // promotion of a clone
	clones      clones    // making and releasing clones of this volume
	schedule    schedule  // schedule of snapshots
	compaction  compaction
	replays     replays
	repairing   repairing
	pinned      pinned

	eventWaits eventWaits
	committing committer
	late       lateSessions
}

// lodge tells the owner's guests whose guests they are. Each guest has the state and the methods
// of a task of the owner's, such as compaction. A guest uses the kernel, and the other guests
// that the guest names. Only the quota and rollbacks use the whole owner.
func (o *owner) lodge() {
	k, leases, faults, mirror := &o.kernel, o.leases, &o.faults, &o.mirror
	o.quota.o, o.rollbacks.o = o, o
	k.use = &o.quota
	k.lost = func(cause error) {
		o.dismiss("", cause)
		o.srv.wg.Go(func() { o.srv.hosted.retire(o) })
	}
	o.words.k, o.words.inspection, o.words.leases = k, &o.inspection, leases
	o.foreign.k, o.foreign.sealing = k, &o.sealing
	o.checkpoints.k = k
	o.committing.k, o.committing.checkpoints, o.committing.eventWaits = k, &o.checkpoints, &o.eventWaits
	o.eventWaits.k, o.eventWaits.mirror = k, mirror
	o.told.k, o.late.k = k, k

	// Chunks.
	o.sealing.k, o.sealing.words = k, &o.words
	o.stale.k, o.stale.repairing = k, &o.repairing
	rp := &o.repairing
	rp.k, rp.faults, rp.sealing, rp.stale, rp.words = k, faults, &o.sealing, &o.stale, &o.words
	in := &o.inspection
	in.k, in.checkpoints, in.faults, in.repairing = k, &o.checkpoints, faults, &o.repairing
	in.sealing, in.stale, in.words = &o.sealing, &o.stale, &o.words
	ls := &o.losses
	ls.k, ls.faults, ls.inspection = k, faults, &o.inspection
	ls.repairing, ls.sealing, ls.stale = &o.repairing, &o.sealing, &o.stale
	cl := &o.collection
	cl.k, cl.checkpoints, cl.faults, cl.indexing = k, &o.checkpoints, faults, &o.indexing
	cl.repairing, cl.sealing = &o.repairing, &o.sealing
	c := &o.compaction
	c.k, c.collection, c.faults, c.leases, c.sealing = k, &o.collection, faults, leases, &o.sealing

	// Snapshots, clones and mirrors.
	o.openEnds.k, o.openEnds.leases, o.openEnds.sealing = k, leases, &o.sealing
	o.reading.k, o.reading.foreign = k, &o.foreign
	o.usage.k, o.usage.leases = k, leases
	o.pinned.Volume, o.pinned.k, o.pinned.mirror, o.pinned.snapshots = &o.pinned, k, mirror, &o.snapshots
	o.schedule.k, o.schedule.mirror, o.schedule.snapshots = k, mirror, &o.snapshots
	ss := &o.snapshots
	ss.k, ss.groups, ss.leases, ss.mirror, ss.openEnds = k, &o.groups, leases, mirror, &o.openEnds
	gs := &o.groups
	gs.k, gs.clones, gs.leases, gs.openEnds, gs.snapshots = k, &o.clones, leases, &o.openEnds, &o.snapshots
	d := &o.digesting
	d.k, d.mirror, d.reading, d.snapshots = k, mirror, &o.reading, &o.snapshots
	ix := &o.indexing
	ix.k, ix.digesting, ix.reading, ix.sealing, ix.snapshots = k, &o.digesting, &o.reading, &o.sealing, &o.snapshots
	cs := &o.clones
	cs.k, cs.leases, cs.mirror, cs.rollbacks, cs.snapshots = k, leases, mirror, &o.rollbacks, &o.snapshots
	pr := &o.promotion
	pr.k, pr.checkpoints, pr.clones, pr.collection = k, &o.checkpoints, &o.clones, &o.collection
	pr.compaction, pr.foreign, pr.leases, pr.sealing = &o.compaction, &o.foreign, leases, &o.sealing
	mirror.k, mirror.digesting, mirror.leases, mirror.locks = k, &o.digesting, leases, &o.locks
	mirror.repairing, mirror.snapshots = &o.repairing, &o.snapshots
}

// journaled is the part of the volume's state about a session known to the journal.
type journaled struct {
	seq     meta.Seq // the entry holding its SessionStart
	info    meta.SessionStart
	replies map[meta.OpID]*keptReply
	order   []*keptReply // ordered by seq
	acked   meta.Seq     // replies up to acked may be dropped
	forgot  meta.Seq     // replies up to forgot are dropped
	ending  bool
	// holds maps each partly answered batch to the entry of the batch's first operation. The
	// notice that the entry is durable may overtake the batch's reply.
	holds map[uint64]meta.Seq
}

// ack permits dropping the replies up to seq: the client has them and knows that they are
// durable. ack stops before the first entry of each batch in holds.
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
	// claimed: an earlier owner executed the operation, and the client claimed the bytes
	// promised for the operation from this owner.
	claimed bool
}

type waiter struct {
	seq meta.Seq
	ch  chan struct{}
}

// leasePoll is how often a call waiting for the owner's lease is attempted again.
const leasePoll = 20 * time.Millisecond

// maxEntryBytes is the size that closes an entry: less than half of etcd's request limit.
const maxEntryBytes = 512 << 10

// maxQueued is how many bytes of effects may wait for the journal. Above maxQueued, mutations
// wait too.
const maxQueued = 8 << 20

// closedChan is a closed channel, for a wait that is already over.
var closedChan = func() chan struct{} { c := make(chan struct{}); close(c); return c }()

// attempt answers a call, or returns the channel to wait for before the next attempt. Caller
// holds mu.
func (o *owner) attempt(s *session, c *wire.Call, k *ticket) (*wire.Reply, <-chan struct{}) {
	if o.failed != nil {
		return &wire.Reply{Status: wire.StatusOf(o.failed)}, nil
	}
	entry, ok := o.entered[s]
	if !ok {
		if s.ended.Load() {
			return nil, never // the session's connection is being closed
		}
		return refuse(o.srv.hosted.elsewhere(o.vol))
	}
	if k.entry == 0 {
		k.entry = entry
	} else if k.entry != entry {
		// The session ended and entered again while the call waited. The client has already
		// given up the call.
		return refuse(meta.E("call", meta.SessionExpired, s.name, nil))
	}
	if o.leaving != nil {
		return nil, o.leaving // closed if the volume stays; once the volume is gone, retry ends by o.ctx
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

func refuse(err error) (*wire.Reply, <-chan struct{}) {
	return &wire.Reply{Status: wire.StatusOf(err)}, nil
}

// journalSession journals the session's start, so that the volume's next owner knows the
// session before the session gets an early reply. It returns the channel to wait for, or nil
// if the start is durable. Errors: SessionExpired. Caller holds mu.
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
		return refuse(meta.E("call", meta.Protocol, "", errors.New("a mutation without an operation id")))
	}
	if k.led != nil {
		if k.led.Seq > o.durable {
			return nil, o.untilDurable(k.led.Seq)
		}
		return k.led, nil
	}
	if j := o.sessions[s.id]; j != nil {
		if kept := j.replies[c.ID]; kept != nil {
			// The operation was executed before: send the same reply without leases, since the
			// attributes in the reply may be old.
			if kept.seq <= o.durable {
				// The notice about the durable entry may have been lost with a connection.
				s.enqueue(0, &wire.Durable{Volume: o.vol, Seq: kept.seq})
			}
			if kept.claimed && !c.Replay {
				kept.claimed = false
				o.quota.Spend(s.id, c.Reserved)
			}
			if _, ok := c.Op.(*meta.Lead); ok && kept.seq > o.durable {
				return nil, o.untilDurable(kept.seq)
			}
			re := *kept.re
			re.Grants = nil
			return &re, nil
		}
	}
	if err := o.checkReplay(s, c); err != nil {
		return refuse(err)
	}
	select {
	case <-o.recovered:
	default:
		if !c.Replay {
			return nil, o.wantRecovered()
		}
	}
	if err := o.full(c.Op); err != nil && !c.Replay {
		return refuse(err)
	}
	if !c.Replay && !o.mirror.mayChange(s, c.Op) {
		return refuse(errMirror("change", &o.kernel))
	}
	if wait, err := o.journalSession(s); wait != nil || err != nil {
		if err != nil {
			return refuse(err)
		}
		return nil, wait
	}
	if o.queued > maxQueued {
		return nil, o.untilDurable(o.queue[len(o.queue)-1].seq)
	}
	if o.leases.barrier != nil && o.leases.barrier.cut && endsOpen(c.Op) {
		return nil, o.leases.barrier.over
	}
	if wait := o.leases.frozen(); wait != nil {
		return nil, wait
	}
	w := &view{k: &o.kernel, session: s.id, squash: s.squash(o.vol), noStreams: !s.streams && !o.srv.cfg.Unsafe.NoStreams}
	if err := o.leases.leaders.admit(o, s, c.Op); err != nil {
		return refuse(err)
	}
	var orphaned meta.Ino
	if !o.leases.Alone(s) {
		wait, ino, err := o.leases.recallFor(s, c.Op, k, w)
		if err != nil {
			return refuse(err)
		}
		if wait != nil {
			return nil, wait
		}
		orphaned = ino
	}
	if m, ok := c.Op.(*meta.Lead); ok {
		if wait := o.leases.leaders.seal(o, m.Ino); wait != nil {
			o.leases.Block(&k.leases, m.Ino)
			return nil, wait
		}
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
		if wait := o.quota.findRoom(&k.room, err); wait != nil {
			return nil, wait
		}
	}
	if err != nil {
		re := &wire.Reply{Status: wire.StatusOf(err)}
		if errors.Is(err, meta.Exists) {
			o.leases.grantNames(s, c.Op, re)
		}
		return re, nil
	}
	re := &wire.Reply{Seq: o.cur.seq, Result: *res}
	o.leases.grantFor(s, c, res, re)
	effects = append(effects, namespace.PutReply(s.id, o.cur.seq, c.ID, res))
	o.cur.sessions[s] = struct{}{}
	before := o.quota.Used()
	o.apply(effects, s.id)
	if written, ok := op.(*meta.Write); ok && o.mirror.shown != 0 {
		o.mirror.arrived(written)
	}
	o.quota.charge(s.id, c, before)
	j := o.sessions[s.id]
	kept := &keptReply{id: c.ID, seq: re.Seq, re: re}
	j.replies[c.ID] = kept
	j.order = append(j.order, kept)
	switch m := op.(type) {
	case *meta.Lead:
		// The reply to Lead waits for the journal. If the owner died with an unjournaled reply,
		// the next owner could give the same epoch to another session.
		o.leases.leaders.begin(m.Ino, s.id)
		if re.Seq > o.durable {
			led := *re
			led.Grants = nil // the leases may be recalled until the reply goes out
			k.led = &led
			return nil, o.untilDurable(re.Seq)
		}
	case *meta.EndLead:
		o.leases.leaders.ended(o.view(), m.Ino)
	}
	if orphaned != 0 {
		o.tellOrphaned(s, orphaned, k, res)
	}
	return re, nil
}

// holders are the sessions that may hold ino open, the caller included. While other sessions
// replay, the owner does not know the open files of a session that is not yet back. So each
// such session is listed. A session coming back is notified, and releases the inode unless the
// inode is open. Caller holds mu.
func (o *owner) holders(s *session, ino meta.Ino, k *ticket) []meta.SessionID {
	ids := []meta.SessionID{s.id}
	for _, id := range k.holders[ino] {
		if h := o.srv.clients.session(id); h != nil && id != s.id {
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
		if h := o.srv.clients.session(id); h != nil && id != s.id {
			h.enqueue(0, &wire.Recall{Recall: meta.Recall{Volume: o.vol, Ino: ino}, Orphan: true})
		}
	}
}

func (o *owner) query(s *session, c *wire.Call, k *ticket) (*wire.Reply, <-chan struct{}) {
	select {
	case <-o.recovered:
	default:
		return nil, o.wantRecovered()
	}
	want := c.Want
	at, re, wait := o.mirror.mirrored(s, c)
	if re != nil || wait != nil {
		return re, wait
	}
	if want > meta.LeaseNone && o.leases.Count(s) == 0 {
		// The volume's next owner must know which sessions may hold leases: the next owner
		// waits for each such session, or until the session's process has ended.
		wait, err := o.journalSession(s)
		switch {
		case err != nil:
			want = meta.LeaseNone
		case wait != nil:
			return nil, wait
		}
	}
	if _, open := c.Op.(*meta.Open); open && want == meta.LeaseExclusive {
		if o.leases.barrier != nil {
			return nil, o.leases.barrier.over
		}
		if o.immutable() {
			return refuse(meta.E("open", meta.ReadOnly, o.subject(), errors.New("the volume is immutable")))
		}
		if err := o.leases.leaders.check(s, c.Op); err != nil {
			return refuse(err)
		}
	}
	w := &view{k: &o.kernel, session: s.id}
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
			o.leases.grantNames(s, c.Op, re)
		}
		return re, nil
	}
	if wait, err := o.foreign.fillPlaces(res); wait != nil || err != nil {
		if err != nil {
			return refuse(err)
		}
		return nil, wait
	}
	if w.counters {
		o.srv.chunkServers.fillDisk(&res.StatFS)
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
		if at == 0 { // no session caches changes of a snapshot
			if want == meta.LeaseNone && readsXattr(c.Op) {
				return re, nil // no session changes extended attributes in its cache
			}
			followed, ch := o.leases.follow(s, k, o.vol, c, re)
			if ch != nil {
				return nil, ch
			}
			if followed {
				if m, ok := c.Op.(*meta.Lookup); ok && want > meta.LeaseNone {
					o.leases.give(s, m.Parent, meta.LeaseShared, re)
				}
				return re, nil
			}
			if ch := o.leases.recall(s, ino, keep); ch != nil {
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
		o.leases.give(s, m.Parent, meta.LeaseShared, re)
		if res.Volume == 0 {
			o.leases.give(s, ino, meta.LeaseShared, re)
		}
	case *meta.ReadDir:
		o.leases.give(s, ino, meta.LeaseShared, re)
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
				o.leases.give(s, d.Ino, meta.LeaseShared, re)
			}
		}
	case *meta.Open:
		o.leases.give(s, ino, want, re)
		if want == meta.LeaseExclusive && at == 0 {
			o.leases.giveAgain(s, m.Also, re)
		}
	default:
		if ino != 0 {
			o.leases.give(s, ino, meta.LeaseShared, re)
		}
	}
	return re, nil
}

// subject is the inode read by an operation without attributes in its result; 0: none.
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

// serve answers a call at once if possible, otherwise from a new goroutine. With inline, serve
// itself waits: replays must keep their order.
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

// retry waits and attempts the call again until attempt returns a reply, or until ctx or the
// owner ends. retry returns with mu held.
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

// closeStore hands the store to the standbys after the last use of the store: the owner's
// goroutines have ended, and all other readers hold mu.
func (o *owner) closeStore() error {
	o.wg.Wait()
	o.mu.Lock()
	defer o.mu.Unlock()
	for !o.wg.Empty() { // a goroutine that began to use the store meanwhile
		o.mu.Unlock()
		o.wg.Wait()
		o.mu.Lock()
	}
	if o.stClosed {
		return nil
	}
	o.stClosed = true
	if o.failed == nil {
		o.failed = o.gone()
	}
	// The store has only journaled effects (rule 1), so a standby may continue from it.
	return o.srv.standbys.give(o.vol, o.st)
}

// serveBatch answers a batch's operations in order and replies once all have answers. The calls
// of a batch get no leases: a late reply can bring no lease recalled meanwhile.
func (o *owner) serveBatch(s *session, id uint64, b *wire.Batch) {
	out := &wire.BatchRe{Replies: make([]wire.Reply, len(b.Calls))}
	i := 0
	var entry uint64
	var room roomSearch              // search for room of the call awaited by step
	step := func() <-chan struct{} { // the caller holds mu
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

// serveSync replies when the journal has every entry up to m.Seq.
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

// dismiss sends the sessions of an owner that parted to the next owner, at to, and cancels the
// owner's context.
func (o *owner) dismiss(to string, cause error) {
	o.mu.Lock()
	var all []*session
	for s := range o.entered {
		s.enqueue(0, &wire.Moved{Volume: o.vol, Addr: to})
		all = append(all, s)
	}
	o.mu.Unlock()
	o.cancel(cause)
	for _, s := range all {
		go s.flush()
	}
}

// serving returns o, unless the caller wants an active volume and the volume is not active (in
// the trash or being deleted). Errors: NoSuchVolume.
func (o *owner) serving(as cluster.VolumeState) (*owner, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if as == cluster.VolumeActive && o.state != cluster.VolumeActive {
		return nil, meta.E("open volume", meta.NoSuchVolume, o.subject(), fmt.Errorf("it is %s", o.state))
	}
	return o, nil
}

// leadsTo is the volume behind a junction; 0: there is none.
func (o *owner) leadsTo(at cluster.Attach) meta.VolumeID {
	o.mu.Lock()
	defer o.mu.Unlock()
	r, err := namespace.Query(o.view(), o.context(0), &meta.Lookup{Parent: at.Ino, Name: at.Name})
	if err != nil {
		return 0
	}
	return r.Volume
}

// unused: no session holds anything in the volume, and nothing is under way.
func (o *owner) unused() bool {
	select {
	case <-o.recovered:
	default:
		return false
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.failed != nil || o.leaving != nil || o.eventWaits.watchers > 0 || len(o.sessions) > 0 || len(o.entered) > 0 || len(o.cur.effects) > 0 || o.newest() > o.durable {
		return false
	}
	if o.snapshotWork() {
		return false
	}
	work := false
	some := func(meta.Ino) bool { work = true; return false }
	if namespace.ReapQueue(o.view(), some) != nil {
		return false
	}
	err := namespace.AllOpenChunks(o.view(), func(meta.ChunkRecord, meta.Ino) bool { work = true; return false })
	return err == nil && !work
}
