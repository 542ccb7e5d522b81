package server

import (
	"cmp"
	"context"
	"errors"
	"slices"
	"time"

	"penstock.io/penstock/meta"
)

// barrier holds exclusive leases off while a snapshot is taken, or writing ends. The
// table of leases knows of it, too (lease.Table.RaiseBarrier).
type barrier struct {
	over chan struct{} // closed when it is down
	// cut: the time to answer is over; no extent is left open-ended any more.
	cut bool
	// patience is how long clients may take to give leases back.
	patience time.Duration
	// frozen: no change is answered at all, for a group's snapshot.
	frozen bool
}

// lockWithoutBarrier locks mu at a moment when no barrier is up and every session may
// enter, or when enough, if not nil, returns true; enough is called with mu held. If there
// is an error, mu is not locked.
func (o *owner) lockWithoutBarrier(ctx context.Context, enough func() bool) error {
	o.mu.Lock()
	for (o.barrier != nil || o.closed != nil) && (enough == nil || !enough()) {
		over := o.closed
		if o.barrier != nil {
			over = o.barrier.over
		}
		o.mu.Unlock()
		if err := o.await(ctx, over); err != nil {
			return err
		}
		o.mu.Lock()
	}
	return nil
}

// raiseBarrier puts a barrier up. None may be up. Caller holds mu.
func (o *owner) raiseBarrier(patience time.Duration) *barrier {
	o.barrier = &barrier{over: make(chan struct{}), patience: patience}
	o.leases.RaiseBarrier()
	return o.barrier
}

// lowerBarrier takes the barrier down that is up. Caller holds mu.
func (o *owner) lowerBarrier() {
	over := o.barrier.over
	o.barrier = nil
	o.leases.LowerBarrier()
	close(over)
}

// recallWriters takes exclusive leases back, and tells which are still out when
// every session has answered or the barrier's patience is over.
func (o *owner) recallWriters(ctx context.Context, patience time.Duration) (late unanswered, err error) {
	deadline := time.Now().Add(cmp.Or(patience, barrierWait))
	ctx, cancel := context.WithDeadline(ctx, deadline)
	defer cancel()
	for {
		o.mu.Lock()
		now := time.Now()
		// A session that is away is asked, too: it hears so when it comes back, be it
		// while the ends of files are still being settled.
		waits, send := o.leases.AskWriters(now, max(deadline.Sub(now), time.Millisecond), isAway)
		o.sendRecalls(send)
		if len(waits) == 0 {
			late = o.stillOut()
		}
		o.mu.Unlock()
		if len(waits) == 0 {
			return late, nil
		}
		for _, ch := range waits {
			select {
			case <-ch:
				continue
			case <-ctx.Done():
			case <-o.ctx.Done():
				return late, o.gone()
			}
			if !errors.Is(context.Cause(ctx), context.DeadlineExceeded) {
				return late, meta.E("take snapshot", meta.Interrupted, "", context.Cause(ctx))
			}
			o.mu.Lock()
			defer o.mu.Unlock()
			return o.stillOut(), nil
		}
	}
}

// stillOut tells which files are held exclusively. Caller holds mu.
func (o *owner) stillOut() (u unanswered) {
	if o.leases.NoRecall {
		return u // they were not asked for
	}
	u.files = o.leases.Exclusive()
	o.leases.Writers(func(_ meta.Ino, s *session) bool {
		if !slices.Contains(u.clients, s.name) {
			u.clients = append(u.clients, s.name)
		}
		return len(u.clients) < unansweredNamed
	})
	slices.Sort(u.clients)
	return u
}
