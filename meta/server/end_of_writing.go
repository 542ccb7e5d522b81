package server

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"time"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/namespace"
)

// What ends writing in a volume (rule 20): it becomes immutable, is deleted or rolled back.
// Under an exclusive lease a client acknowledges writes by itself and commits them a moment
// later. Committed afterwards they would be refused, though a program was told that they
// were written. So writing ends behind the barrier that a snapshot is taken behind
// (snapshot.go): exclusive leases are taken back, with what was written under them, nobody
// gets one until writing has ended, and from then on write(2) itself is told.
//
// Unlike a snapshot, which has such a file as it was synced last while its writer goes on,
// this is not done without a client that can't commit in time: it is refused, unless who
// asks for it gives up what that client holds.

// endingWait is how long clients may take to commit, each time that they are asked, and
// endingFor how long all of that may take before it is refused. Between two rounds, for
// endingPause, writers go on.
const (
	endingWait  = 10 * time.Second
	endingFor   = time.Minute
	endingPause = time.Second
)

// writingEnd is how writing ends.
type writingEnd struct {
	op    string // for errors and logs
	force bool   // what can't be committed is given up
	// goesOn: writers may write afterwards, so who can't commit in time does that later.
	goesOn bool
}

// late tells whether it is done without those who can't commit in time.
func (e writingEnd) late() bool { return e.force || e.goesOn }

// endWriting runs end at a moment when nobody holds anything that is not committed, no file
// has an open end, and nobody may begin to write: end must see to it that nobody may
// afterwards. end runs without mu. Errors: Unavailable (a client did not commit what it
// holds, or what it left open can't be sealed), those of end.
func (o *owner) endWriting(ctx context.Context, how writingEnd, end func() error) error {
	if o.srv.cfg.Unsafe.NoRecall {
		return end()
	}
	if err := o.await(ctx, o.recovered); err != nil {
		return err
	}
	sealing, cancel := context.WithCancel(ctx)
	defer cancel()
	began := time.Now()
	for {
		ended, again, err := o.endBehindBarrier(ctx, sealing, how, end)
		if ended || err != nil && !again {
			return err
		}
		if time.Since(began) > cmp.Or(o.srv.cfg.endingFor, endingFor) {
			return err
		}
		select {
		case <-time.After(endingPause):
		case <-ctx.Done():
			return err
		}
	}
}

// endBehindBarrier puts the barrier up once. ended: end has run, and err is its error.
// again: what was in the way may be over soon.
func (o *owner) endBehindBarrier(ctx, sealing context.Context, how writingEnd, end func() error) (ended, again bool, err error) {
	if err := o.lockWithoutBarrier(ctx, nil); err != nil {
		return false, false, err
	}
	if o.failed != nil {
		defer o.mu.Unlock()
		return false, false, o.failed
	}
	b := o.raiseBarrier(endingWait)
	o.mu.Unlock()
	defer func() {
		o.mu.Lock()
		defer o.mu.Unlock()
		o.lowerBarrier()
	}()
	late, err := o.recallWriters(ctx, b.patience)
	if err != nil {
		return false, false, err
	}
	if late.files > 0 && !how.late() {
		return false, true, meta.E(how.op, meta.Unavailable, o.subject(), fmt.Errorf("what was written is not all in yet: %v: wait until those mounts can write it back, or end them; --force gives it up", late))
	}
	o.mu.Lock()
	seals, err := o.cutOpenEnds(sealing, b)
	o.mu.Unlock()
	if err == nil && seals != nil && !how.late() {
		if err = seals.wait(); err == nil {
			err = meta.E(how.op, meta.Unavailable, o.subject(), errors.New("files are still being appended to"))
		}
		return false, err != nil && ctx.Err() == nil, err
	}
	if err != nil && !how.late() {
		return false, true, err
	}
	if late.files > 0 && !how.goesOn {
		o.log.Warn("writing ends, and what mounts had not written back is given up", "why", how.op, "files", late.files, "by", late.clients)
	}
	return true, false, end()
}

// immutable tells whether the volume's policy lets nobody write. Caller holds mu.
func (o *owner) immutable() bool {
	p, err := namespace.Policy(&view{o: o})
	return err == nil && p.Immutable
}
