package server

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/namespace"
	"penstock.io/penstock/meta/task"
	"penstock.io/penstock/meta/wire"
)

// What goes on about snapshots behind the requests: deleted ones are dissolved
// and a volume is rolled back, in steps that are journaled, so that any owner
// goes on with them; and the schedule is kept.

// dropStep is how many superseded versions one step of a deletion deals with:
// a few milliseconds in which nobody else is answered.
const dropStep = 256

// snapshotRetry is when work that failed is taken up again.
const snapshotRetry = 15 * time.Second

// newSnapshotTask does the work on snapshots and clones of a volume that is served.
func newSnapshotTask(o *owner) *task.Task {
	return task.New(task.Options{
		Name: "keep snapshots", Failed: "work on snapshots and clones failed, it is tried again", Log: o.log,
		Round: func(ctx context.Context) (time.Duration, error) {
			again := time.Now().Add(o.keepSchedule())
			more, err := o.dropUntil(again)
			if more {
				return 0, nil
			}
			held := false
			if err == nil {
				held, err = o.settleClones(ctx)
			}
			open, gerr := o.dropUndecided()
			wait := max(0, time.Until(again))
			if err = errors.Join(err, gerr); held || open || err != nil {
				wait = min(wait, snapshotRetry)
			}
			return wait, err
		},
	})
}

// dropUntil works off deleted snapshots until something else is to be looked at: then
// there may be more.
func (o *owner) dropUntil(again time.Time) (more bool, err error) {
	for {
		if more, err = o.dropSome(); !more || err != nil || o.ctx.Err() != nil {
			return false, err
		}
		if !time.Now().Before(again) {
			return true, nil
		}
		if o.tasks.snapshots.Woken() { // the schedule may be another one
			return true, nil
		}
	}
}

// snapshotWork tells whether the volume must stay open for it. Caller holds mu.
func (o *owner) snapshotWork() bool {
	if o.schedule.read.IsZero() { // its schedule was not looked at yet
		return true
	}
	if o.schedule.going.tries > 0 { // the next owner would not know what fails
		return true
	}
	if o.barrier != nil || o.closed != nil || o.schedule.open || o.digesting.busy || o.indexing.busy || o.promotion.busy {
		return true
	}
	if is, err := namespace.Tallied(&view{o: o}); err != nil || is.Stale {
		return true
	}
	all, err := namespace.Snapshots(&view{o: o})
	return err != nil || slices.ContainsFunc(all, func(s meta.Snapshot) bool {
		_, decided := o.groups[s.Group]
		return s.Deleting || s.Group != 0 && !decided
	})
}

// deleteSnapshot makes a snapshot unreadable; what it alone saw goes later. at is its
// generation, or zero if the caller knows only its name.
// Errors: NoSuchSnapshot, Busy (the volume is being rolled back to it, or somebody
// pinned it).
func (o *owner) deleteSnapshot(ctx context.Context, name string, at meta.Generation) (meta.Snapshot, error) {
	sn := meta.Snapshot{Name: name, At: at}
	if err := o.await(ctx, o.recovered); err != nil {
		return sn, err
	}
	all, err := o.snapshots()
	if err != nil {
		return sn, err
	}
	i := -1
	if at == 0 {
		i = slices.IndexFunc(all, func(s meta.Snapshot) bool { return s.Name == name && !s.Deleting })
	}
	if i < 0 { // a request that is sent again finds what it did
		i = slices.IndexFunc(all, func(s meta.Snapshot) bool { return s.Name == name && (at == 0 || s.At == at) })
	}
	switch {
	case i >= 0:
		sn = all[i]
	case at == 0:
		return sn, meta.E("find snapshot", meta.NoSuchSnapshot, name, nil)
	}
	if i >= 0 && !sn.Deleting {
		if err := o.deleteGeneration(ctx, sn); err != nil {
			return sn, err
		}
	}
	sn.Deleting = true
	return sn, nil
}

// deleteGeneration is deleteSnapshot for one that is known: another one that has its
// name by now is not meant. Errors: Busy. That it is gone already is none.
func (o *owner) deleteGeneration(ctx context.Context, sn meta.Snapshot) error {
	if err := o.await(ctx, o.recovered); err != nil {
		return err
	}
	o.mu.Lock()
	seq := o.cur.seq
	if _, err := o.run(&meta.DropSnapshot{At: sn.At, Max: 1}, 0); err != nil {
		o.mu.Unlock()
		return err
	}
	delete(o.groups, sn.Group)
	o.snapped = max(o.snapped, min(seq, o.newest()))
	wait := o.untilDurable(seq)
	o.mu.Unlock()
	if err := o.await(ctx, wait); err != nil {
		return err
	}
	o.log.Info("snapshot deleted, what it held goes", "name", sn.Name, "generation", sn.At)
	o.tasks.snapshots.Wake()
	o.tasks.usage.Wake() // it may be gone already
	return nil
}

// dropSome works a bounded amount off a deleted snapshot and waits for the
// journal; more tells that there may be more.
func (o *owner) dropSome() (more bool, err error) {
	o.mu.Lock()
	if o.failed != nil {
		defer o.mu.Unlock()
		return false, o.failed
	}
	all, err := namespace.Snapshots(&view{o: o})
	i := slices.IndexFunc(all, func(s meta.Snapshot) bool { return s.Deleting })
	if err != nil || i < 0 {
		o.mu.Unlock()
		return false, err
	}
	seq := o.cur.seq
	res, err := o.run(&meta.DropSnapshot{At: all[i].At, Max: dropStep}, 0)
	if err != nil {
		o.mu.Unlock()
		return false, fmt.Errorf("deleting snapshot %s: %w", all[i].Name, err)
	}
	o.freed += res.Off
	if res.EOF {
		o.log.Info("a deleted snapshot is gone", "name", all[i].Name, "generation", all[i].At, "freed", o.freed)
		o.freed = 0
		delete(o.unanswered, all[i].At)
	}
	wait := o.untilDurable(seq)
	o.mu.Unlock()
	if err := o.await(o.ctx, wait); err != nil {
		return false, err
	}
	o.tasks.collection.Wake()
	if res.EOF {
		o.tasks.usage.Wake()
	}
	return true, nil
}

// ---- rolling back

// rolling is the snapshot that the volume is being rolled back to, zero if none.
// Nobody else uses the owner yet, or the caller holds mu.
func (o *owner) rolling() (meta.Generation, error) {
	all, err := namespace.Snapshots(&view{o: o})
	for _, s := range all {
		if s.Rolling {
			return s.At, err
		}
	}
	return 0, err
}

// roller is whoever names the reply records of requests to roll back: no session, they
// all end then.
const roller = ^meta.SessionID(0)

// maxRolled is how many such requests are remembered.
const maxRolled = 8

// rolledFor is a request whose first step was booked: whatever comes, the volume is
// rolled back to its end, by this owner or the next one, and never again for it.
type rolledFor struct {
	token uint64
	seq   meta.Seq
}

// rollbacks are those of a volume.
type rollbacks struct {
	// exclude is held while an entry that leads to another volume is made or taken away,
	// and alone while the volume is rolled back. Nobody waits for it.
	exclude sync.RWMutex

	// The owner's mu guards the rest.

	done []rolledFor // the last requests for which the volume was rolled back
	// current is the request for which it is being rolled back, over closed when it was;
	// see beginRoll.
	current struct {
		token uint64
		over  chan struct{}
	}
}

// load reads for which requests the volume was rolled back.
func (r *rollbacks) load(st Store) (err error) {
	rerr := namespace.Replies(st, roller, func(key, val []byte) bool {
		var f rolledFor
		var id meta.OpID
		_, f.seq, id, _, err = namespace.DecodeReply(key, val)
		f.token = id.Incarnation
		r.done = append(r.done, f)
		return err == nil
	})
	return errors.Join(err, rerr)
}

// find gives the request of a token, if the volume was rolled back for it.
func (r *rollbacks) find(token uint64) (rolledFor, bool) {
	i := slices.IndexFunc(r.done, func(f rolledFor) bool { return token != 0 && f.token == token })
	if i < 0 {
		return rolledFor{}, false
	}
	return r.done[i], true
}

// note is what a rollback's first step journals in entry seq, beside its own effects.
func (r *rollbacks) note(token uint64, seq meta.Seq) (effects []namespace.Effect) {
	if _, noted := r.find(token); noted || token == 0 {
		return nil
	}
	if n := len(r.done) + 1 - maxRolled; n > 0 {
		effects = append(effects, namespace.DeleteReplies(roller, 0, r.done[n-1].seq))
		r.done = slices.Clone(r.done[n:])
	}
	r.done = append(r.done, rolledFor{token, seq})
	return append(effects, namespace.PutReply(roller, seq, meta.OpID{Incarnation: token, Step: meta.BackgroundStep}, &meta.Result{}))
}

// beginRoll lets one at a time roll the volume back, until end is called. It is nil if a
// request of this token has done so before, or has by now. Errors: Busy (for another).
func (o *owner) beginRoll(ctx context.Context, token uint64) (end func(), err error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	for token != 0 && o.rollbacks.current.token == token {
		over := o.rollbacks.current.over
		o.mu.Unlock()
		err := o.await(ctx, over)
		o.mu.Lock()
		if err != nil {
			return nil, err
		}
	}
	if done, ok := o.rollbacks.find(token); ok {
		durable := o.untilDurable(done.seq)
		o.mu.Unlock()
		err := o.await(ctx, durable)
		o.mu.Lock()
		return nil, err
	}
	if !o.rollbacks.exclude.TryLock() {
		return nil, meta.E("roll back", meta.Busy, o.subject(), errors.New("a volume is being attached or detached inside it, or it is being rolled back already"))
	}
	over := make(chan struct{})
	o.rollbacks.current.token, o.rollbacks.current.over = token, over
	return func() {
		o.mu.Lock()
		defer o.mu.Unlock()
		o.rollbacks.exclude.Unlock()
		o.rollbacks.current.token = 0
		close(over)
	}, nil
}

// rollHow says how a volume is to be rolled back.
type rollHow struct {
	token  uint64 // names the request: it is done once
	force  bool   // although sessions are in the volume
	filler bool   // only if the session that asks fills it, a mirror's target
}

// rollBack makes the volume what a snapshot is. Nobody may be in it, unless
// it is forced: then its sessions end, and what they had not synced is lost. Errors:
// NoSuchSnapshot, Busy (also if volumes were attached or detached inside since the
// snapshot), Unavailable (what sessions wrote can't be settled), ReadOnly (it was
// asked for as who fills a mirror's target, and sess does not).
func (o *owner) rollBack(ctx context.Context, sess *session, name string, how rollHow) error {
	if err := o.await(ctx, o.recovered); err != nil {
		return err
	}
	end, err := o.beginRoll(ctx, how.token)
	if err != nil || end == nil {
		return err
	}
	begun := false
	defer func() {
		if !begun {
			end()
		}
	}()
	if err := o.lateEnd(ctx); err != nil {
		return err
	}
	sn, err := o.snapshot(name)
	if err != nil {
		return err
	}
	err = o.junctionsSince(ctx, sn.At, func(c namespace.JunctionChange) error {
		v, what := c.Now, "attached"
		if v == 0 {
			v, what = c.Was, "detached"
		}
		return meta.E("roll back", meta.Busy, o.subject(), fmt.Errorf("volume %d was %s since the snapshot, as %q in directory %d, and where a volume hangs is not rolled back: undo that first", v, what, c.Name, c.Parent))
	})
	if err != nil {
		return err
	}
	// A rollback that is refused, or fails before its first step, has cost nobody anything:
	// what mounts had written is committed first.
	o.mu.Lock()
	err = o.mayRoll(sess, how)
	o.mu.Unlock()
	if err != nil { // before anybody is held up
		return err
	}
	err = o.endWriting(ctx, writingEnd{op: "roll back", force: true}, func() error { return o.closeToRoll(sess, how) })
	if err != nil {
		return err
	}
	o.log.Warn("the volume is being rolled back: nobody is let in", "snapshot", name, "generation", sn.At)
	done := make(chan error, 1)
	begun = true
	o.wg.Go(func() {
		defer end()
		err := o.rollTo(sn.At, how.token)
		if err == nil {
			o.log.Info("the volume was rolled back", "snapshot", name, "generation", sn.At)
		} else {
			o.log.Error("the volume was not rolled back", "snapshot", name, "error", err)
		}
		done <- err
	})
	select {
	case err := <-done:
		return err
	case <-o.ctx.Done():
		return o.gone()
	case <-ctx.Done():
		return meta.E("roll back", meta.Interrupted, o.subject(), fmt.Errorf("it goes on: %w", context.Cause(ctx)))
	}
}

// closeToRoll lets nobody into the volume until rollTo has ended. Errors: those of
// rollBack.
func (o *owner) closeToRoll(sess *session, how rollHow) error {
	o.mu.Lock()
	defer o.mu.Unlock()
	if err := o.mayRoll(sess, how); err != nil {
		return err
	}
	o.closed = make(chan struct{})
	if stop := o.promotion.stop; stop != nil {
		stop(errRolled)
	}
	return nil
}

// mayRoll refuses to close the volume for a rollback. Caller holds mu. Errors: those of
// rollBack.
func (o *owner) mayRoll(sess *session, how rollHow) error {
	err := o.failed
	switch {
	case err != nil:
	case o.closed != nil:
		err = meta.E("roll back", meta.Busy, o.subject(), errors.New("it is being rolled back already"))
	case how.filler && !o.filledBy(sess):
		// Who filled it and slept may find a volume that others write by now.
		err = errNoFiller("roll back", o)
	case !how.force && len(o.sessions) > 0:
		err = meta.E("roll back", meta.Busy, o.subject(), fmt.Errorf("in use by %s: end that, or force it", o.users()))
	}
	return err
}

// junctionsSince calls fn with the names that changed since a snapshot and lead or
// led to volumes, until it says no.
func (o *owner) junctionsSince(ctx context.Context, at meta.Generation, fn func(namespace.JunctionChange) error) error {
	const page = 1000
	var from []byte
	for {
		if err := ctx.Err(); err != nil {
			return meta.E("junctions", meta.Interrupted, o.subject(), err)
		}
		o.mu.Lock()
		if o.failed != nil || o.stClosed {
			defer o.mu.Unlock()
			return o.gone()
		}
		all, next, err := namespace.JunctionsSince(&view{o: o}, at, from, page)
		o.mu.Unlock()
		if err != nil {
			return err
		}
		for _, c := range all {
			if err := fn(c); err != nil {
				return err
			}
		}
		if from = next; from == nil {
			return nil
		}
	}
}

// users names some of the sessions in the volume. Caller holds mu.
func (o *owner) users() string {
	var names []string
	for _, j := range o.sessions {
		names = append(names, j.info.Name)
	}
	slices.Sort(names)
	if n := len(names); n > 4 {
		names = append(names[:4], fmt.Sprintf("%d others", n-4))
	}
	return fmt.Sprint(names)
}

// settleFor is how long what sessions left may take to be settled before a
// rollback that has not begun is given up.
const settleFor = 30 * time.Second

// rollTo ends what sessions hold, rolls back, and lets everybody in again. Once
// a step is journaled it is not given up but with the owner.
func (o *owner) rollTo(at meta.Generation, token uint64) error {
	err := o.endAll()
	if err == nil {
		err = o.rollSteps(at, token, settleFor)
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.ctx.Err() == nil && o.closed != nil {
		close(o.closed)
		o.closed = nil
	}
	return err
}

// resumeRollback goes on, before anybody is served, with what the owner before
// did not finish.
func (o *owner) resumeRollback() error {
	o.mu.Lock()
	at, err := o.rolling()
	closed := o.closed
	o.mu.Unlock()
	if err != nil {
		o.lose(err)
		return err
	}
	if closed == nil {
		return nil
	}
	o.log.Warn("the volume is being rolled back: that goes on first", "generation", at)
	if err := o.rollSteps(at, 0, 0); err != nil {
		if o.ctx.Err() == nil {
			o.lose(err)
		}
		return err
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	close(o.closed)
	o.closed = nil
	return nil
}

// endAll ends every session in the volume, which nobody can enter now.
func (o *owner) endAll() error {
	o.mu.Lock()
	var in []*session
	for s := range o.entered {
		in = append(in, s)
	}
	o.mu.Unlock()
	var wg sync.WaitGroup
	for _, s := range in {
		wg.Go(func() {
			o.endSession(s.id, s)
			s.enqueue(0, &wire.Moved{Volume: o.vol}) // it comes back, and hears that it lost everything
			s.flush()
		})
	}
	wg.Wait()
	o.mu.Lock()
	var left []meta.SessionID
	for id := range o.sessions {
		left = append(left, id)
	}
	o.mu.Unlock()
	for _, id := range left {
		o.endSession(id, nil)
	}
	// Those that left files without an end stay until that is sealed.
	for began := time.Now(); ; {
		o.mu.Lock()
		n := len(o.sessions)
		o.mu.Unlock()
		if n == 0 {
			return o.flush(o.ctx)
		}
		if time.Since(began) > settleFor {
			return meta.E("roll back", meta.Unavailable, o.subject(), errors.New("what its sessions were writing can't be sealed"))
		}
		select {
		case <-time.After(10 * time.Millisecond):
		case <-o.ctx.Done():
			return o.gone()
		}
	}
}

// rollSteps rolls back once everything that sessions held is gone. patience
// bounds the wait for that; 0: none. token names the request, if not zero.
func (o *owner) rollSteps(at meta.Generation, token uint64, patience time.Duration) error {
	began := time.Now()
	step := &meta.Rollback{To: at}
	for n := 0; ; n++ {
		o.sealAbandoned()
		for o.ctx.Err() == nil && o.reapSome() {
		}
		o.mu.Lock()
		if o.failed != nil {
			defer o.mu.Unlock()
			return o.failed
		}
		seq := o.cur.seq
		res, effects, err := o.execute(step, 0, meta.OpID{}, false, &view{o: o})
		if err == nil {
			// In one entry with the first step, so that one is not there without the other.
			o.apply(append(effects, o.rollbacks.note(token, o.cur.seq)...), 0)
		}
		wait := o.untilDurable(seq)
		o.mu.Unlock()
		if errors.Is(err, meta.Busy) && (patience == 0 || time.Since(began) < patience) {
			select {
			case <-time.After(50 * time.Millisecond):
				continue
			case <-o.ctx.Done():
				return o.gone()
			}
		}
		if err != nil {
			return err
		}
		if err := o.await(o.ctx, wait); err != nil {
			return err
		}
		if res.EOF {
			return nil
		}
		patience, step.From = 0, res.Data
	}
}
