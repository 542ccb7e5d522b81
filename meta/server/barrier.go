package server

import (
	"cmp"
	"context"
	"errors"
	"slices"
	"time"

	"penstock.io/penstock/meta"
)

// barrier blocks new exclusive leases while a snapshot is taken, or writing ends. The table of
// leases has the same barrier (lease.Table.RaiseBarrier).
type barrier struct {
	over chan struct{} // closed when the barrier is down
	// cut: the time to answer is over; no extent is left open-ended from now on.
	cut bool
	// patience is how long clients may take to give leases back.
	patience time.Duration
	// frozen: no change is answered at all, for a group's snapshot.
	frozen bool
}

// lockWithoutBarrier locks mu at a moment when no barrier is up and every session may enter,
// or when enough, if not nil, returns true; enough is called with mu held. With an error, mu
// is not locked.
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

// raiseBarrier puts a barrier up. No barrier may be up. The caller holds mu.
func (o *owner) raiseBarrier(patience time.Duration) *barrier {
	o.barrier = &barrier{over: make(chan struct{}), patience: patience}
	o.leases.RaiseBarrier()
	return o.barrier
}

// lowerBarrier takes the barrier down. The caller holds mu.
func (o *owner) lowerBarrier() {
	over := o.barrier.over
	o.barrier = nil
	o.leases.LowerBarrier()
	close(over)
}

// recallWriters recalls exclusive leases. It returns the leases still out when every session
// has answered or patience is over.
func (o *owner) recallWriters(ctx context.Context, patience time.Duration) (late unanswered, err error) {
	deadline := time.Now().Add(cmp.Or(patience, barrierWait))
	ctx, cancel := context.WithDeadline(ctx, deadline)
	defer cancel()
	for {
		o.mu.Lock()
		now := time.Now()
		// Sessions that are away are asked, too: a session receives the recall when it is
		// back, possibly while the ends of files are still being settled.
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

// stillOut counts the files with an exclusive lease, and names some holders. The caller holds
// mu.
func (o *owner) stillOut() (u unanswered) {
	if o.leases.NoRecall {
		return u // no lease was recalled
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
