package server

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/journal"
	"penstock.io/penstock/meta/lock"
	"penstock.io/penstock/meta/namespace"
	"penstock.io/penstock/meta/wire"
)

// openOwner takes a volume, brings its store to the end of the journal, and
// begins to serve. Operations that are not replays wait until every session
// that the journal knows has come back or ended.
func (s *Server) openOwner(v meta.VolumeID) (*owner, error) {
	ctx := s.ctx
	vol, err := s.cfg.Cluster.Volume(ctx, v)
	if err != nil {
		return nil, err
	}
	began := time.Now()
	own, j, err := s.cfg.Cluster.Own(ctx, v)
	if err != nil {
		return nil, err
	}
	release := func(err error) (*owner, error) {
		// Nobody was answered: whoever takes the volume next waits for the
		// owner before as if we had not been.
		if yerr := own.Yield(context.WithoutCancel(ctx)); yerr != nil {
			s.log.Warn("a volume that could not be opened could not be given back", "volume", vol.Name, "error", yerr)
		}
		return nil, err
	}
	st, pos, bytes, err := s.loadState(ctx, v, j)
	if err != nil {
		return release(err)
	}
	if pos.Seq == 0 {
		effects := namespace.Format(v, meta.Time(time.Now().UnixNano()), 0o755, uint32(os.Geteuid()), uint32(os.Getegid()), vol.Policy)
		e := journal.Next(v, pos, own.Term(), namespace.AppendEffects(nil, effects))
		if err := j.Append(ctx, e); err != nil {
			st.Close()
			return release(err)
		}
		pos = e.Position()
		if err := st.Apply(pos, effects); err != nil {
			st.Close()
			return release(err)
		}
	}
	o := &owner{
		srv: s, vol: v, log: s.log.With("volume", vol.Name), own: own, j: j, st: st,
		ov: newOverlay(), cache: newCache(s.cfg.CacheBytes),
		cur: &entry{seq: pos.Seq + 1, sessions: map[*session]struct{}{}}, durable: pos.Seq,
		wake: make(chan struct{}, 1), leases: newLeaseTable(), locks: lock.New(), lockWaits: map[lock.Ticket]*lockWait{},
		sessions: map[meta.SessionID]*journaled{}, recovered: make(chan struct{}),
		awaited: map[meta.SessionID]struct{}{}, sinceCheckpoint: bytes, gcWake: make(chan struct{}, 1),
	}
	o.leases.unsafe = s.cfg.Unsafe.NoRecall
	o.ctx, o.cancel = context.WithCancelCause(s.ctx)
	if err := o.loadSessions(); err != nil {
		st.Close()
		return release(err)
	}
	o.publishResumable() // before anybody may ask to resume
	o.wg.Go(func() { o.commitLoop(pos) })
	o.wg.Go(func() {
		select {
		case <-own.Lost():
			o.lose(meta.E("own", meta.Fenced, fmt.Sprintf("volume %d", v), errors.New("the right to serve the volume was lost")))
		case <-o.ctx.Done():
		}
	})
	sessions := len(o.sessions)
	o.wg.Go(o.recover)
	o.wg.Go(o.gcLoop)
	o.log.Info("serving volume", "id", v, "term", own.Term(), "replayed", bytes, "sessions", sessions, "took", time.Since(began).Round(time.Millisecond))
	return o, nil
}

// loadState opens the local store and brings it to the end of the journal. A
// store that the journal contradicts (an etcd restored from a backup, a store
// of another history) or no longer reaches is put aside and made again from
// the checkpoint.
func (s *Server) loadState(ctx context.Context, v meta.VolumeID, j Journal) (st Store, pos journal.Position, bytes int, err error) {
	cp, have, err := j.Checkpoint(ctx)
	if err != nil {
		return nil, pos, 0, err
	}
	for try := 0; ; try++ {
		if st, err = s.cfg.Cluster.OpenStore(ctx, v, cp, have); err != nil {
			return nil, pos, 0, err
		}
		pos, bytes = st.Applied(), 0
		err = j.Read(ctx, pos, func(e journal.Entry) error {
			effects, err := namespace.DecodeEffects(e.Payload)
			if err != nil {
				return err
			}
			pos = e.Position()
			bytes += len(e.Payload)
			return st.Apply(pos, effects)
		})
		if err == nil {
			return st, pos, bytes, nil
		}
		err = errors.Join(err, st.Close())
		if try > 0 || !errors.Is(err, meta.Corrupt) && !errors.Is(err, meta.Stale) {
			return nil, pos, 0, err
		}
		s.log.Error("the local state does not fit the journal: it is put aside and made again", "volume", v, "error", err)
		if err := s.cfg.Cluster.PutAsideStore(v); err != nil {
			return nil, pos, 0, err
		}
	}
}

// loadSessions reads which sessions the journal knows and what they were
// answered.
func (o *owner) loadSessions() error {
	var err error
	if e := namespace.Sessions(o.st, func(info meta.SessionStart, ended bool) bool {
		j := &journaled{seq: o.durable, info: info, replies: map[meta.OpID]*keptReply{}, holds: map[uint64]meta.Seq{}}
		o.sessions[info.Session] = j
		o.awaited[info.Session] = struct{}{}
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
			j.replies[k.id] = &k
			j.order = append(j.order, &k)
			return true
		})
		err = errors.Join(err, e)
		return err == nil
	}); e != nil {
		return e
	}
	return err
}

// journaledSomewhere reports whether a volume that is open here knows the
// session. Caller holds the server's mu; an owner's own lock comes before it,
// so the answer is taken from what recovery published.
func (s *Server) journaledSomewhere(id meta.SessionID) bool {
	for _, op := range s.volumes {
		select {
		case <-op.done:
			if op.o != nil && op.o.mayResume(id) {
				return true
			}
		default:
		}
	}
	return false
}

// mayResume: the session is one that recovery waits for.
func (o *owner) mayResume(id meta.SessionID) bool {
	o.resumeMu.Lock()
	defer o.resumeMu.Unlock()
	_, ok := o.resumable[id]
	return ok
}

func (o *owner) publishResumable() {
	o.resumeMu.Lock()
	defer o.resumeMu.Unlock()
	o.resumable = map[meta.SessionID]struct{}{}
	for id := range o.awaited {
		o.resumable[id] = struct{}{}
	}
}

// recover waits until every journaled session is back with its claims, or is
// surely over, and then lets ordinary operations run.
func (o *owner) recover() {
	deadline := time.Now().Add(o.srv.cfg.SessionTTL + o.srv.cfg.SessionTTL/4)
	o.mu.Lock()
	nobody := len(o.awaited) == 0
	o.mu.Unlock()
	// The owner before may still be answering inside its lease.
	if !o.own.PredecessorDone() {
		o.log.Info("waiting for the lease of the owner before to run out")
	} else if nobody {
		deadline = time.Now()
	}
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for told := false; ; told = true {
		o.mu.Lock()
		var over []meta.SessionID
		late := !time.Now().Before(deadline)
		for id := range o.awaited {
			info := o.sessions[id].info
			dead := o.srv.cfg.Dead != nil && o.srv.cfg.Dead(info.Host, info.PID, info.Start)
			if dead || late || slices.Contains(o.over, id) {
				over = append(over, id)
			} else if !told {
				o.log.Info("waiting for a client to come back", "session", info.Name, "pid", info.PID)
			}
		}
		done := len(o.awaited) == len(over) && (late || o.own.PredecessorDone())
		o.mu.Unlock()
		for _, id := range over {
			o.endSession(id, nil)
			o.mu.Lock()
			delete(o.awaited, id)
			o.publishResumable()
			o.mu.Unlock()
		}
		if done {
			break
		}
		select {
		case <-tick.C:
		case <-o.ctx.Done():
			return
		}
	}
	if err := o.settleOpenEnded(); err != nil {
		return
	}
	o.mu.Lock()
	o.awaited = nil
	o.resumeMu.Lock()
	o.resumable = nil
	o.resumeMu.Unlock()
	close(o.recovered)
	o.mu.Unlock()
}

// serveClaim gives a session back what it held under the owner before. Its
// replays follow on the same connection; with the claim it counts as back.
func (o *owner) serveClaim(s *session, m *wire.Claim) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if _, ok := o.awaited[s.id]; !ok {
		o.log.Warn("a claim came too late", "session", s.name)
		return
	}
	for _, g := range m.Leases {
		o.leases.grant(s, g.Ino, g.Mode)
	}
	for _, l := range m.Locks {
		l.Session = s.id
		o.locks.Set(l, 0)
	}
}

// back notes that a session has sent its claims and replays. Caller holds mu.
func (o *owner) back(id meta.SessionID) {
	if _, ok := o.awaited[id]; ok {
		delete(o.awaited, id)
		o.publishResumable()
	}
}

// endSession releases what a session held in this volume. s is nil when this
// server never saw it.
func (o *owner) endSession(id meta.SessionID, s *session) {
	o.mu.Lock()
	if s != nil {
		o.leases.dropAll(s)
		for e := range o.cur.sessions {
			if e == s {
				delete(o.cur.sessions, s)
			}
		}
	}
	o.dropLocks(id)
	j := o.sessions[id]
	if j == nil || j.ending || o.failed != nil {
		o.mu.Unlock()
		return
	}
	j.ending = true
	end := meta.SessionEnd{Session: id}
	for o.failed == nil {
		res, err := o.run(&end, 0)
		if err != nil {
			o.log.Error("a session could not be ended", "session", j.info.Name, "error", err)
			break
		}
		if res.EOF {
			break
		}
		end.From = meta.Ino(res.Off)
		// It may hold a million orphans: others come in between, and what is
		// not yet journaled stays bounded.
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
	o.mu.Unlock()
	o.kickGC() // which seals the chunks that it left open
}

// reapOne removes the tail of the truncated file that stands in an operation's
// way, a bounded amount at a time. Caller holds mu.
func (o *owner) reapOne(cause error) error {
	var e *meta.Error
	var ino meta.Ino
	if errors.As(cause, &e) {
		if n, ok := strings.CutPrefix(e.Subject, "inode "); ok {
			i, _ := strconv.ParseUint(n, 10, 64)
			ino = meta.Ino(i)
		}
	}
	if ino == 0 {
		return cause
	}
	w := &view{o: o}
	res, effects, err := namespace.Execute(w, o.context(0), &meta.Reap{Ino: ino, Max: 4096})
	if err != nil {
		return err
	}
	if len(effects) == 0 && !res.EOF {
		return cause
	}
	o.apply(effects, 0)
	return nil
}

// close hands the volume over in order: sessions' early replies are journaled,
// the store is left as it is, the right is released.
func (o *owner) close(ctx context.Context) error {
	o.mu.Lock()
	var wait <-chan struct{} = closedChan
	if o.failed == nil && (len(o.cur.effects) > 0 || len(o.queue) > 0) {
		wait = o.untilDurable(o.newest())
	}
	o.mu.Unlock()
	select {
	case <-wait:
	case <-o.ctx.Done():
	case <-ctx.Done():
	}
	o.mu.Lock()
	clean := o.failed == nil
	o.mu.Unlock()
	o.cancel(errors.New("the server is stopping"))
	err := o.closeStore()
	if clean {
		err = errors.Join(err, o.own.Release(ctx))
	}
	return err
}
