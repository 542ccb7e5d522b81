package server

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/cluster"
	"penstock.io/penstock/meta/journal"
	"penstock.io/penstock/meta/namespace"
	"penstock.io/penstock/meta/task"
	"penstock.io/penstock/meta/wire"
)

// opener makes the owner of a volume: it takes the volume's journal and loads the state.
type opener struct {
	*process
	srv      *Server // of the owners
	api      *api
	hosted   *hosted
	peers    *peers
	standbys *standbys
}

// openOwner takes a volume, brings its store to the end of the journal, and begins to serve.
// Only replays run until every session known to the journal has come back or ended. A
// non-empty from names the present owner; openOwner asks that owner for the volume when
// everything else is ready.
func (op *opener) openOwner(v meta.VolumeID, state cluster.VolumeState, from string) (*owner, error) {
	ctx := op.ctx
	vol, err := op.cfg.Cluster.Volume(ctx, v)
	if err != nil {
		return nil, err
	}
	if vol.State != state {
		return nil, meta.E("open volume", meta.NoSuchVolume, vol.Name, fmt.Errorf("it is %s", vol.State))
	}
	var st Store
	if from != "" {
		if st, err = op.takeOver(ctx, v, from); err != nil {
			return nil, err
		}
	}
	began := time.Now()
	var restored <-chan restoration
	if from != "" {
		restored = op.askRestoration(ctx, v) // already settled by the present owner
	}
	own, j, err := op.cfg.Cluster.Own(ctx, v)
	if err != nil {
		if st != nil {
			err = errors.Join(err, op.standbys.give(v, st))
		}
		return nil, err
	}
	release := func(err error) (*owner, error) {
		// This owner answered no caller, so the next owner waits only for the leases of our
		// predecessor.
		if yerr := own.Yield(context.WithoutCancel(ctx)); yerr != nil {
			op.log.Warn("the ownership of a volume that could not be opened could not be released", "volume", vol.Name, "error", yerr)
		}
		return nil, err
	}
	if restored == nil {
		restored = op.askRestoration(ctx, v)
	}
	owned := time.Since(began)
	// A store already at the end of the journal needs no read of the journal.
	var pos journal.Position
	var bytes int
	if end, ok := own.Head(); ok && st != nil && st.Applied() == end {
		pos = end
	} else if st, pos, bytes, err = op.loadState(ctx, v, j, st); err != nil {
		return release(err)
	}
	if pos.Seq == 0 {
		effects, err := firstEffects(st, &vol)
		if err != nil {
			op.standbys.give(v, st)
			return release(err)
		}
		e := journal.Next(v, pos, own.Term(), namespace.AppendEffects(nil, effects))
		if err := j.Append(ctx, e); err != nil {
			op.standbys.give(v, st)
			return release(err)
		}
		pos = e.Position()
		if err := st.Apply(pos, effects); err != nil {
			op.standbys.give(v, st)
			return release(err)
		}
	}
	o := &owner{
		kernel: kernel{
			srv: op.srv, vol: v, log: op.log.With("volume", vol.Name), own: own, j: j, st: st,
			ov: newOverlay(), cache: newCache(op.cfg.CacheBytes),
			cur: &entry{seq: pos.Seq + 1, sessions: map[*session]struct{}{}}, durable: pos.Seq,
			wake: make(chan struct{}, 1), recovered: make(chan struct{}),
			sessions: map[meta.SessionID]*journaled{}, entered: map[*session]uint64{},
		},
		words: words{name: vol.Name}, state: state, locks: newLocks(),
		allBack: make(chan struct{}, 1),
		awaited: map[meta.SessionID]bool{}, snapshots: snapshots{unanswered: map[meta.Generation]unanswered{}}, digesting: digesting{hurry: make(chan struct{}, 1)},
		inspection:  inspection{listed: map[meta.ServerID]listing{}, changed: map[meta.ServerID]time.Time{}},
		collection:  collection{filling: map[meta.ChunkID]bool{}},
		checkpoints: checkpoints{since: bytes, recorded: noCheckpoint(vol.Created)},
	}
	o.leases = newLeases(&o.kernel)
	o.lodge()
	o.ctx, o.cancel = context.WithCancelCause(op.ctx)
	o.tasks = newTasks(o)
	if o.foreign.clone, err = namespace.IsClone(st); err != nil {
		op.standbys.give(v, st)
		return release(err)
	}
	if err := o.quota.loadQuota(); err != nil {
		op.standbys.give(v, st)
		return release(err)
	}
	if o.mirror.shown, err = namespace.Mirror(o.st); err != nil {
		op.standbys.give(v, st)
		return release(err)
	}
	if err := errors.Join(o.loadSessions(), o.replays.load(o.st), o.leases.leaders.load(o.view(), op.cfg.Unsafe.NoLeadership)); err != nil {
		op.standbys.give(v, st)
		return release(err)
	}
	was := <-restored
	if was.err != nil {
		op.standbys.give(v, st)
		return release(was.err)
	}
	o.loadRestoration(was.r)
	if rolling, err := o.rollbacks.rolling(); err != nil {
		op.standbys.give(v, st)
		return release(err)
	} else if rolling != 0 {
		o.closed = make(chan struct{})
	}
	o.wg.Go(func() { o.committing.commitLoop(pos) })
	o.wg.Go(func() {
		lost := own.Lost()
		if op.cfg.Unsafe.NoLease {
			lost = nil
		}
		select {
		case <-lost:
			o.lose(errLeaseLost)
		case <-o.ctx.Done():
		}
	})
	sessions := len(o.sessions)
	o.words.set(&vol)
	o.words.comparePolicy(&vol)
	o.wg.Go(o.recover)
	o.promotion.busy = vol.Origin != nil && vol.Origin.Promoting
	o.startTasks(vol.Origin != nil)
	o.log.Info("serving volume", "id", v, "term", own.Term(), "replayed", bytes, "sessions", sessions, "taken", owned.Round(time.Millisecond), "took", time.Since(began).Round(time.Millisecond))
	return o, nil
}

// loadState opens the local store and brings the store to the end of the journal. loadState
// puts aside a store that contradicts the journal (a store of another history), and rebuilds
// the store from the checkpoint; a store too old for the journal loads the checkpoint, too. A
// store ahead of the journal stops everything (Ahead): etcd was set back to an older copy, and
// operations acknowledged since then must not be overwritten. open is the store if already
// taken. After an error loadState has given the folder back to the standbys.
func (op *opener) loadState(ctx context.Context, v meta.VolumeID, j Journal, open Store) (st Store, pos journal.Position, bytes int, err error) {
	if st = open; st == nil {
		// A standby's store is at the end of the journal, or nearly.
		st = op.standbys.take(v)
	}
	for try := 0; ; try++ {
		if st == nil {
			cp, have, err := j.Checkpoint(ctx)
			if err != nil {
				return nil, pos, 0, errors.Join(err, op.standbys.give(v, nil))
			}
			if st, err = op.openStore(ctx, v, cp, have); err != nil {
				return nil, pos, 0, errors.Join(err, op.standbys.give(v, nil))
			}
		}
		pos, bytes = st.Applied(), 0
		err = j.Read(ctx, pos, func(e journal.Entry) error {
			pos = e.Position()
			bytes += len(e.Payload)
			return replay(st, e)
		})
		if err == nil {
			return st, pos, bytes, nil
		}
		err = errors.Join(err, st.Close())
		st = nil
		if try > 0 || !errors.Is(err, meta.Corrupt) && !errors.Is(err, meta.Stale) {
			return nil, pos, 0, errors.Join(err, op.standbys.give(v, nil))
		}
		if errors.Is(err, meta.Stale) {
			continue // openStore loads the checkpoint
		}
		op.log.Error("the local state does not fit the journal: the server puts it aside and builds it again", "volume", v, "error", err)
		if err := op.cfg.Cluster.PutAsideStore(v); err != nil {
			return nil, pos, 0, errors.Join(err, op.standbys.give(v, nil))
		}
	}
}

// replay applies a journal entry to a store without a working owner. Errors: IO, Corrupt.
func replay(st Store, e journal.Entry) error {
	effects, err := namespace.DecodeEffects(e.Payload)
	if err == nil {
		err = namespace.Unseen(st, effects, st.Remove)
	}
	if err != nil {
		return err
	}
	return st.Apply(e.Position(), effects)
}

// loadSessions reads the journaled sessions, the replies to the sessions, and the requests of
// earlier rollbacks.
func (o *owner) loadSessions() error {
	var err error
	if e := namespace.Sessions(o.st, func(info meta.SessionStart, ended bool) bool {
		j := &journaled{seq: o.durable, info: info, replies: map[meta.OpID]*keptReply{}, holds: map[uint64]meta.Seq{}}
		o.sessions[info.Session] = j
		o.awaited[info.Session] = false
		if ended {
			o.over = append(o.over, info.Session)
			return true
		}
		e := namespace.Replies(o.st, info.Session, func(key, val []byte) bool {
			var k keptReply
			var res *meta.Result
			if _, k.seq, k.id, res, err = namespace.DecodeReply(key, val); err != nil {
				return false
			}
			k.re = &wire.Reply{Seq: k.seq, Result: *res}
			k.claimed = true
			j.replies[k.id] = &k
			j.order = append(j.order, &k)
			return true
		})
		err = errors.Join(err, e)
		return err == nil
	}); e != nil {
		return e
	}
	return errors.Join(err, o.rollbacks.load(o.st))
}

const (
	// takeoverTTLs is how many session TTLs the predecessor's sessions have for coming back,
	// as long as no caller waits for the volume. The machines of the sessions may be
	// overloaded or stand still, and ending a session loses its uncommitted writes
	// (courtesy.go). The limit is not a day, because until then the volume is neither served
	// nor inspected nor repaired.
	takeoverTTLs = 10
	// takeoverStretch bounds by how much an overloaded machine may stretch the wait.
	takeoverStretch = 4
)

// recover waits until every journaled session is back with its claims or is surely over, and
// then lets ordinary operations run. The previous owner answered only journaled sessions (see
// enter). So when all are back, no answer and no lease of the previous owner can stand (rule
// 2).
func (o *owner) recover() {
	wait := o.srv.cfg.SessionTTL + o.srv.cfg.SessionTTL/4
	if !o.own.PredecessorDone() {
		// The predecessor may still answer within its lease, but etcd had ended that lease
		// when we took the volume; the leases of its clients end within Grace of that time.
		wait = max(o.srv.cfg.Grace+o.srv.cfg.Grace/4, 3*o.srv.cfg.SessionTTL/4)
	}
	if o.srv.cfg.Unsafe.NoLease {
		wait = 0
	}
	began := time.Now()
	const every = 20 * time.Millisecond
	tick := time.NewTicker(every)
	defer tick.Stop()
	waited := ownTime{every: every, last: began}
	for told := false; ; told = true {
		o.mu.Lock()
		var over []meta.SessionID
		patience := wait
		if wait > 0 && o.unwanted() && !o.srv.cfg.Unsafe.NoCourtesy {
			patience = max(wait, takeoverTTLs*o.srv.cfg.SessionTTL)
		}
		late := waited.passed(time.Now()) >= patience || time.Since(began) >= takeoverStretch*patience
		for id, entered := range o.awaited {
			j := o.sessions[id]
			if j == nil { // the session ended after its return
				delete(o.awaited, id)
				continue
			}
			dead := o.srv.cfg.Dead != nil && o.srv.cfg.Dead(j.info.Host, j.info.PID, j.info.Start)
			// An entered session has a lease here, and expireLoop ends the session by that
			// lease.
			if dead || late && !entered || slices.Contains(o.over, id) {
				over = append(over, id)
			} else if !told {
				o.log.Info("waiting for a client to come back", "session", j.info.Name, "pid", j.info.PID)
			}
		}
		done := len(o.awaited) == len(over)
		o.mu.Unlock()
		for _, id := range over {
			o.endSession(id, nil)
			o.mu.Lock()
			delete(o.awaited, id)
			o.over = slices.DeleteFunc(o.over, func(x meta.SessionID) bool { return x == id })
			o.mu.Unlock()
		}
		if done {
			break
		}
		select {
		case <-tick.C:
		case <-o.allBack:
		case <-o.ctx.Done():
			return
		}
	}
	if err := o.collection.settleOpenEnded(); err != nil {
		return
	}
	if err := o.settleRestoration(); err != nil {
		o.lose(err)
		return
	}
	if err := o.rollbacks.resumeRollback(); err != nil {
		return
	}
	o.mu.Lock()
	close(o.recovered)
	o.mu.Unlock()
}

// serveClaim gives a session back its leases and locks of the previous owner. The session's
// replays follow on the same connection.
func (o *owner) serveClaim(s *session, m *wire.Claim) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if _, ok := o.entered[s]; !ok || !o.awaited[s.id] {
		o.log.Warn("a claim came too late", "session", s.name)
		return
	}
	for _, g := range m.Leases {
		o.leases.Claim(s, g.Ino, g.Mode)
	}
	for _, l := range m.Locks {
		l.Session = s.id
		o.locks.Set(l, 0)
	}
}

// endSession releases everything held by a session in this volume. s is nil if the session
// never entered here; only recover passes nil. While files end in open chunks of the session,
// the lengths of the files are unknown. The session's leases of these files stand until the
// chunks are sealed, so that no reader sees less than what was synced.
func (o *owner) endSession(id meta.SessionID, s *session) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if s != nil {
		if _, ok := o.entered[s]; !ok {
			return // the session may be entering over another connection
		}
		delete(o.entered, s)
		for e := range o.cur.sessions {
			if e == s {
				delete(o.cur.sessions, s)
			}
		}
	}
	j := o.sessions[id]
	if j == nil || j.ending || o.failed != nil {
		o.release(id, s)
		return
	}
	j.ending = true
	if s != nil { // else recover seals before the owner serves operations
		left, files, err := o.leftOpen(id)
		if err != nil {
			o.log.Error("a session could not be ended", "session", j.info.Name, "error", err)
			return // the store failed; the next owner ends the session
		}
		if len(left) > 0 {
			// Sessions asking for other files need not wait.
			o.leases.DropAll(s, files...)
			o.departed = append(o.departed, departed{id, s})
			o.tasks.departures.Wake()
			return
		}
	}
	o.finishSession(id, s)
}

// departed is an ended session with open-ended files.
type departed struct {
	id meta.SessionID
	s  *session
}

// leftOpen lists the open chunks of a session at the ends of files, and the files. The caller
// holds mu.
func (o *owner) leftOpen(id meta.SessionID) (ids []meta.ChunkID, files []meta.Ino, err error) {
	err = namespace.OpenChunks(o.view(), id, func(c meta.ChunkRecord, file meta.Ino) bool {
		if file != 0 {
			ids, files = append(ids, c.ID), append(files, file)
		}
		return true
	})
	return ids, files, err
}

// newDepartureTask seals the open chunks of departed sessions, all sessions in parallel, and
// then ends each session.
func newDepartureTask(o *owner) *task.Task {
	return task.New(task.Options{Name: "end departed sessions", Round: func(context.Context) (time.Duration, error) {
		o.mu.Lock()
		all := o.departed
		o.departed = nil
		o.mu.Unlock()
		for _, d := range all {
			o.wg.Go(func() { o.depart(d) })
		}
		return task.Idle, nil
	}})
}

func (o *owner) depart(d departed) {
	for wait := 20 * time.Millisecond; ; wait = min(2*wait, 5*time.Second) {
		o.mu.Lock()
		if o.failed != nil {
			o.mu.Unlock()
			return // the next owner seals and ends
		}
		left, _, err := o.leftOpen(d.id)
		if err == nil && len(left) == 0 {
			o.finishSession(d.id, d.s)
			o.mu.Unlock()
			return
		}
		o.mu.Unlock()
		if err != nil {
			o.lose(err)
			return
		}
		if !o.sealing.sealAll(left) {
			continue
		}
		select {
		case <-time.After(wait):
		case <-o.ctx.Done():
			return
		}
	}
}

// release drops the leases and locks of a session. The caller holds mu.
func (o *owner) release(id meta.SessionID, s *session) {
	if s != nil {
		o.leases.DropAll(s)
	}
	o.locks.drop(id)
}

// finishSession releases an ending session through the journal. The caller holds mu;
// finishSession unlocks and locks mu between steps.
func (o *owner) finishSession(id meta.SessionID, s *session) {
	o.release(id, s)
	end := meta.SessionEnd{Session: id}
	for o.failed == nil {
		res, err := o.run(&end, 0)
		if err != nil {
			o.log.Error("a session could not be ended", "session", o.sessions[id].info.Name, "error", err)
			break
		}
		if res.EOF {
			break
		}
		end.From = meta.Ino(res.Off)
		// The session may hold a million orphans. Other callers get mu between steps, and the
		// unjournaled bytes stay bounded.
		var wait <-chan struct{} = closedChan
		if o.queued > maxQueued {
			wait = o.untilDurable(o.queue[0].seq)
		}
		o.mu.Unlock()
		select {
		case <-wait:
		case <-o.ctx.Done():
		}
		o.mu.Lock()
	}
	delete(o.sessions, id)
	o.leases.leaders.end(id)
	o.quota.Leave(id)
	o.tasks.collection.Wake() // collection seals the session's other open chunks
}
