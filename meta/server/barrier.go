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

// lockWithoutBarrier locks mu at a moment when no barrier is up and every session may enter, or
// when enough, if not nil, returns true; enough is called with the owner's mu held. With an
// error, mu is not locked.
func (l *leases) lockWithoutBarrier(ctx context.Context, enough func() bool) error {
	k := l.k
	k.mu.Lock()
	for (l.barrier != nil || k.closed != nil) && (enough == nil || !enough()) {
		over := k.closed
		if l.barrier != nil {
			over = l.barrier.over
		}
		k.mu.Unlock()
		if err := k.await(ctx, over); err != nil {
			return err
		}
		k.mu.Lock()
	}
	return nil
}

// raiseBarrier puts a barrier up. No barrier may be up. The caller holds the owner's mu.
func (l *leases) raiseBarrier(patience time.Duration) *barrier {
	l.barrier = &barrier{over: make(chan struct{}), patience: patience}
	l.RaiseBarrier()
	return l.barrier
}

// lowerBarrier takes the barrier down. The caller holds the owner's mu.
func (l *leases) lowerBarrier() {
	over := l.barrier.over
	l.barrier = nil
	l.LowerBarrier()
	close(over)
}

// frozen returns the channel to wait for before any change; nil: changes may go on. The caller
// holds the owner's mu.
func (l *leases) frozen() <-chan struct{} {
	if l.barrier != nil && l.barrier.frozen {
		return l.barrier.over
	}
	return nil
}

// recallWriters recalls exclusive leases. It returns the leases still out when every session
// has answered or patience is over.
func (l *leases) recallWriters(ctx context.Context, patience time.Duration) (late unanswered, err error) {
	k := l.k
	deadline := time.Now().Add(cmp.Or(patience, barrierWait))
	ctx, cancel := context.WithDeadline(ctx, deadline)
	defer cancel()
	for {
		k.mu.Lock()
		now := time.Now()
		// Sessions that are away are asked, too: a session receives the recall when it is
		// back, possibly while the ends of files are still being settled.
		waits, send := l.AskWriters(now, max(deadline.Sub(now), time.Millisecond), isAway)
		l.sendRecalls(send)
		if len(waits) == 0 {
			late = l.stillOut()
		}
		k.mu.Unlock()
		if len(waits) == 0 {
			return late, nil
		}
		for _, ch := range waits {
			select {
			case <-ch:
				continue
			case <-ctx.Done():
			case <-k.ctx.Done():
				return late, k.gone()
			}
			if !errors.Is(context.Cause(ctx), context.DeadlineExceeded) {
				return late, meta.E("take snapshot", meta.Interrupted, "", context.Cause(ctx))
			}
			k.mu.Lock()
			defer k.mu.Unlock()
			return l.stillOut(), nil
		}
	}
}

// stillOut counts the files with an exclusive lease, and names some holders. The caller holds
// the owner's mu.
func (l *leases) stillOut() (u unanswered) {
	if l.NoRecall {
		return u // no lease was recalled
	}
	u.files = l.Exclusive()
	l.Writers(func(_ meta.Ino, s *session) bool {
		if !slices.Contains(u.clients, s.name) {
			u.clients = append(u.clients, s.name)
		}
		return len(u.clients) < unansweredNamed
	})
	slices.Sort(u.clients)
	return u
}
