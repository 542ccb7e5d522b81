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
	"penstock.io/penstock/meta/wire"
)

// roller is the session ID of the reply records of rollback requests. No session has that ID;
// a rollback ends all sessions.
const roller = ^meta.SessionID(0)

// maxRolled bounds the rollback requests in memory and journal.
const maxRolled = 8

// settleFor bounds the wait for files and chunks of ended sessions, before a rollback not yet
// begun is given up.
const settleFor = 30 * time.Second

// rolling returns the snapshot that the volume is being rolled back to, zero if none. The
// caller holds the owner's mu, or the owner is not shared yet.
func (rb *rollbacks) rolling() (meta.Generation, error) {
	all, err := namespace.Snapshots(rb.o.view())
	for _, s := range all {
		if s.Rolling {
			return s.At, err
		}
	}
	return 0, err
}

// rolledFor is a rollback request whose first step is booked. This owner or the next one
// completes the rollback, and never repeats a rollback for the same request.
type rolledFor struct {
	token uint64
	seq   meta.Seq
}

// rollbacks are the rollbacks of a volume.
type rollbacks struct {
	o *owner

	// exclude is read-locked while an entry leading to another volume is made or removed, and
	// locked while the volume is rolled back. Callers use TryLock and never wait.
	exclude sync.RWMutex

	// The owner's mu guards the rest.

	done []rolledFor // the last completed or begun rollbacks
	// current is the running rollback's request; over is closed at the rollback's end. See
	// beginRoll.
	current struct {
		token uint64
		over  chan struct{}
	}
}

// load reads the requests of earlier rollbacks from the store.
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

// find returns the request with a token, if the volume was rolled back for that request.
func (r *rollbacks) find(token uint64) (rolledFor, bool) {
	i := slices.IndexFunc(r.done, func(f rolledFor) bool { return token != 0 && f.token == token })
	if i < 0 {
		return rolledFor{}, false
	}
	return r.done[i], true
}

// note returns the effects that record the request, for entry seq of a rollback's first step;
// the effects are journaled beside the step's own.
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

// beginRoll admits one rollback at a time, until end is called. end is nil if a request with
// this token has rolled the volume back already. Errors: Busy (another rollback).
func (rb *rollbacks) beginRoll(ctx context.Context, token uint64) (end func(), err error) {
	o := rb.o
	o.mu.Lock()
	defer o.mu.Unlock()
	for token != 0 && rb.current.token == token {
		over := rb.current.over
		o.mu.Unlock()
		err := o.await(ctx, over)
		o.mu.Lock()
		if err != nil {
			return nil, err
		}
	}
	if done, ok := rb.find(token); ok {
		durable := o.untilDurable(done.seq)
		o.mu.Unlock()
		err := o.await(ctx, durable)
		o.mu.Lock()
		return nil, err
	}
	if !rb.exclude.TryLock() {
		return nil, meta.E("roll back", meta.Busy, o.subject(), errors.New("a volume is being attached or detached inside it, or it is being rolled back already"))
	}
	over := make(chan struct{})
	rb.current.token, rb.current.over = token, over
	return func() {
		o.mu.Lock()
		defer o.mu.Unlock()
		rb.exclude.Unlock()
		rb.current.token = 0
		close(over)
	}, nil
}

// rollHow are the options of rollBack.
type rollHow struct {
	token  uint64 // names the request; a request runs once
	force  bool   // despite sessions in the volume
	filler bool   // only if the calling session fills the volume, a mirror's target
}

// rollBack makes the volume's state that of a snapshot. No session may be in the volume,
// unless how.force is set: then rollBack ends the sessions, and their unsynced data is lost.
// Errors: NoSuchSnapshot, Busy (also if volumes were attached or detached inside since the
// snapshot), Unavailable (sessions' writes can't be settled), ReadOnly (how.filler is set, and
// sess does not fill the target).
func (rb *rollbacks) rollBack(ctx context.Context, sess *session, name string, how rollHow) error {
	o := rb.o
	if err := o.await(ctx, o.recovered); err != nil {
		return err
	}
	end, err := rb.beginRoll(ctx, how.token)
	if err != nil || end == nil {
		return err
	}
	begun := false
	defer func() {
		if !begun {
			end()
		}
	}()
	if err := o.late.awaitEnd(ctx); err != nil {
		return err
	}
	sn, err := o.snapshots.find(name)
	if err != nil {
		return err
	}
	err = rb.junctionsSince(ctx, sn.At, func(c namespace.JunctionChange) error {
		v, what := c.Now, "attached"
		if v == 0 {
			v, what = c.Was, "detached"
		}
		return meta.E("roll back", meta.Busy, o.subject(), fmt.Errorf("volume %d was %s since the snapshot, as %q in directory %d, and where a volume hangs is not rolled back: undo that first", v, what, c.Name, c.Parent))
	})
	if err != nil {
		return err
	}
	// Mounts commit their data first, so a rollback refused or failed before its first step
	// loses nothing.
	o.mu.Lock()
	err = rb.mayRoll(sess, how)
	o.mu.Unlock()
	if err != nil { // refused before any session is held up
		return err
	}
	err = o.openEnds.endWriting(ctx, writingEnd{op: "roll back", force: true}, func() error { return rb.closeToRoll(sess, how) })
	if err != nil {
		return err
	}
	o.log.Warn("the volume is being rolled back: no session may enter", "snapshot", name, "generation", sn.At)
	done := make(chan error, 1)
	begun = true
	o.wg.Go(func() {
		err := rb.rollTo(sn.At, how.token)
		end() // before the answer: the caller's next rollback must not find this one
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

// closeToRoll keeps all sessions out of the volume until rollTo has ended. Errors: the errors
// of rollBack.
func (rb *rollbacks) closeToRoll(sess *session, how rollHow) error {
	o := rb.o
	o.mu.Lock()
	defer o.mu.Unlock()
	if err := rb.mayRoll(sess, how); err != nil {
		return err
	}
	o.closed = make(chan struct{})
	if stop := o.promotion.stop; stop != nil {
		stop(errRolled)
	}
	return nil
}

// mayRoll refuses to close the volume for a rollback. The caller holds the owner's mu. Errors: the errors
// of rollBack.
func (rb *rollbacks) mayRoll(sess *session, how rollHow) error {
	o := rb.o
	err := o.failed
	switch {
	case err != nil:
	case o.closed != nil:
		err = meta.E("roll back", meta.Busy, o.subject(), errors.New("it is being rolled back already"))
	case how.filler && !o.mirror.filledBy(sess):
		// A filler that slept may find a volume with other writers.
		err = errNoFiller("roll back", &o.kernel)
	case !how.force && len(o.sessions) > 0:
		err = meta.E("roll back", meta.Busy, o.subject(), fmt.Errorf("in use by %s: end that, or force it", rb.users()))
	}
	return err
}

// junctionsSince calls fn with each name changed since a snapshot that leads or led to a
// volume, until fn returns an error.
func (rb *rollbacks) junctionsSince(ctx context.Context, at meta.Generation, fn func(namespace.JunctionChange) error) error {
	o := rb.o
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
		all, next, err := namespace.JunctionsSince(o.view(), at, from, page)
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

// users names some of the sessions in the volume. The caller holds the owner's mu.
func (rb *rollbacks) users() string {
	var names []string
	for _, j := range rb.o.sessions {
		names = append(names, j.info.Name)
	}
	slices.Sort(names)
	if n := len(names); n > 4 {
		names = append(names[:4], fmt.Sprintf("%d others", n-4))
	}
	return fmt.Sprint(names)
}

// rollTo ends all sessions, rolls back, and admits sessions again. After the first journaled
// step only the owner's end stops the rollback.
func (rb *rollbacks) rollTo(at meta.Generation, token uint64) error {
	o := rb.o
	err := rb.endAll()
	if err == nil {
		err = rb.rollSteps(at, token, settleFor)
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.ctx.Err() == nil && o.closed != nil {
		close(o.closed)
		o.closed = nil
	}
	return err
}

// resumeRollback completes the previous owner's unfinished rollback, before any session is
// served.
func (rb *rollbacks) resumeRollback() error {
	o := rb.o
	o.mu.Lock()
	at, err := rb.rolling()
	closed := o.closed
	o.mu.Unlock()
	if err != nil {
		o.lose(err)
		return err
	}
	if closed == nil {
		return nil
	}
	o.log.Warn("the volume is being rolled back: the owner finishes the rollback first", "generation", at)
	if err := rb.rollSteps(at, 0, 0); err != nil {
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

// endAll ends every session in the volume, which is closed to new sessions. Errors:
// Unavailable if a session's files can't be sealed within settleFor.
func (rb *rollbacks) endAll() error {
	o := rb.o
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
			s.enqueue(0, &wire.Moved{Volume: o.vol}) // the client comes back, and learns of the loss
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
	// Sessions with open-ended files stay until the files are sealed.
	for began := time.Now(); ; {
		o.mu.Lock()
		n := len(o.sessions)
		o.mu.Unlock()
		if n == 0 {
			return o.flush(o.ctx)
		}
		if time.Since(began) > settleFor {
			return meta.E("roll back", meta.Unavailable, o.subject(), errors.New("the open chunks of its sessions can't be sealed"))
		}
		select {
		case <-time.After(10 * time.Millisecond):
		case <-o.ctx.Done():
			return o.gone()
		}
	}
}

// rollSteps rolls back after everything held by sessions is released. patience bounds that
// wait; 0: no bound. token names the request, if not zero.
func (rb *rollbacks) rollSteps(at meta.Generation, token uint64, patience time.Duration) error {
	o := rb.o
	began := time.Now()
	step := &meta.Rollback{To: at}
	for n := 0; ; n++ {
		o.collection.sealAbandoned()
		for o.ctx.Err() == nil && o.collection.reapSome() {
		}
		o.mu.Lock()
		if o.failed != nil {
			defer o.mu.Unlock()
			return o.failed
		}
		seq := o.cur.seq
		res, effects, err := o.execute(step, 0, meta.OpID{}, false, o.view())
		if err == nil {
			// The request's record is in the entry of the first step, so neither exists alone.
			o.apply(append(effects, rb.note(token, o.cur.seq)...), 0)
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
