package server

import (
	"context"
	"errors"
	"time"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/namespace"
	"penstock.io/penstock/meta/task"
)

// What snapshots alone hold, in a volume whose quota has it: the state machine counts
// it as it changes, but for what was there before the policy came and for what goes
// with snapshots. Those are counted here, on a frozen state, so that nobody waits.

const (
	// tallyEvery is the least time between two counts that came to nothing, since a
	// snapshot was deleted meanwhile.
	tallyEvery = 200 * time.Millisecond
	tallyRetry = 5 * time.Second // after an error
)

// newUsageTask counts whenever it must.
func newUsageTask(o *owner) *task.Task {
	return task.New(task.Options{
		Name: "count what snapshots hold", Retry: tallyRetry,
		Failed: "what snapshots hold could not be counted, it is tried again", Log: o.log,
		Round: func(context.Context) (time.Duration, error) {
			again, err := o.tallyOnce()
			if again {
				return tallyEvery, err
			}
			return task.Idle, err
		},
	})
}

// tallyOnce counts if it must; again tells that there is more to count.
func (o *owner) tallyOnce() (again bool, err error) {
	o.mu.Lock()
	is, err := namespace.Tallied(&view{o: o})
	o.mu.Unlock()
	if err != nil || !is.Stale {
		return false, err
	}
	if err := o.settled(o.ctx); err != nil {
		return false, err
	}
	began := time.Now()
	v, release, err := o.freezeState(o.ctx, &checking{})
	if err != nil {
		return false, err
	}
	op, err := namespace.Recounted(v)
	err = errors.Join(err, v.Close())
	release()
	if err != nil || op == nil {
		return op == nil, err
	}
	if err = o.durably(o.ctx, op); meta.KindOf(err) == meta.Again {
		return true, nil
	}
	if err != nil {
		return false, err
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	if is, err = namespace.Tallied(&view{o: o}); err != nil {
		return false, err
	}
	o.log.Info("what snapshots alone hold was counted", "bytes", is.Alone, "took", time.Since(began).Round(time.Millisecond))
	return is.Stale, nil
}

// uncounted tells whether snapshots count with more than they hold until that is
// counted anew, and has it done. Caller holds mu.
func (o *owner) uncounted() bool {
	is, err := namespace.Tallied(&view{o: o})
	if err != nil || !is.InForce || !is.Stale {
		return false
	}
	o.tasks.usage.Wake()
	return true
}
