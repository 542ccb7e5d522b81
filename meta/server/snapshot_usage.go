package server

import (
	"context"
	"errors"
	"slices"
	"time"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/namespace"
	"penstock.io/penstock/meta/task"
)

// Bytes held by snapshots alone, in a volume whose quota counts such bytes. The state machine
// counts every change, except for bytes older than the policy and bytes freed with snapshots.
// The task of this file counts both on a frozen state, so that no caller waits.

const (
	// tallyEvery is the least time before a repetition of a count that failed because a
	// snapshot was deleted meanwhile.
	tallyEvery = 200 * time.Millisecond
	tallyRetry = 5 * time.Second // after an error
)

// snapshotUsage counts the bytes held by snapshots.
type snapshotUsage struct {
	k      *kernel
	leases *leases
}

// newUsageTask counts whenever the stored count is stale.
func newUsageTask(o *owner) *task.Task {
	return task.New(task.Options{
		Name: "count what snapshots hold", Retry: tallyRetry,
		Failed: "what snapshots hold could not be counted, it is tried again", Log: o.log,
		Round: func(context.Context) (time.Duration, error) {
			again, err := o.usage.tallyOnce()
			if again {
				return tallyEvery, err
			}
			return task.Idle, err
		},
	})
}

// tallyOnce counts if the stored count is stale. again: a further count is needed.
func (su *snapshotUsage) tallyOnce() (again bool, err error) {
	k := su.k
	k.mu.Lock()
	is, err := namespace.Tallied(k.view())
	k.mu.Unlock()
	if err != nil || !is.Stale {
		return false, err
	}
	if err := k.settled(k.ctx); err != nil {
		return false, err
	}
	began := time.Now()
	v, release, err := k.freezeState(k.ctx, &checking{})
	if err != nil {
		return false, err
	}
	op, err := namespace.Recounted(v)
	err = errors.Join(err, v.Close())
	release()
	if err != nil || op == nil {
		return op == nil, err
	}
	if err = su.leases.durably(k.ctx, op); meta.KindOf(err) == meta.Again {
		return true, nil
	}
	if err != nil {
		return false, err
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	if is, err = namespace.Tallied(k.view()); err != nil {
		return false, err
	}
	k.log.Info("the bytes that only snapshots hold were counted", "bytes", is.Alone, "took", time.Since(began).Round(time.Millisecond))
	return is.Stale, nil
}

// stale reports whether snapshots currently count with more bytes than the snapshots hold,
// and starts a new count. The caller holds the owner's mu.
func (su *snapshotUsage) stale() bool {
	k := su.k
	is, err := namespace.Tallied(k.view())
	if err != nil || !is.InForce || !is.Stale {
		return false
	}
	k.tasks.usage.Wake()
	return true
}

// count counts the bytes held by snapshots, in the state at one journal entry; changes
// go on meanwhile. The state includes every operation answered before the call.
func (su *snapshotUsage) count(ctx context.Context, drop []string) (*meta.SnapshotUse, error) {
	k := su.k
	if err := k.await(ctx, k.recovered); err != nil {
		return nil, err
	}
	if err := k.settled(ctx); err != nil {
		return nil, err
	}
	view, release, err := k.freezeState(ctx, &checking{})
	if err != nil {
		return nil, err
	}
	defer release()
	h, err := readHeld(view, drop)
	if err = errors.Join(err, view.Close()); err != nil {
		return nil, err
	}
	u := &meta.SnapshotUse{Live: h.Live, Alone: h.Alone, Going: h.Going, Freed: h.Freed, Snapshots: []meta.SnapshotUseOf{}}
	for _, s := range h.Each {
		u.Snapshots = append(u.Snapshots, meta.SnapshotUseOf{Name: s.Name, At: s.At, Bytes: s.Bytes, Alone: s.Alone})
	}
	return u, nil
}

// countFor bounds how long a list of snapshots waits for countHeld.
const countFor = 2 * time.Second

// countHeld adds to a list the exact number of bytes held by snapshots alone. If the count
// takes longer than countFor, the list keeps the owner's running sum.
func (su *snapshotUsage) countHeld(ctx context.Context, l *meta.SnapshotList) {
	k := su.k
	select {
	case <-k.recovered:
	default:
		return // a list of snapshots is no reason to end sessions
	}
	ctx, cancel := context.WithTimeout(ctx, countFor)
	defer cancel()
	u, err := su.count(ctx, nil)
	if err != nil {
		k.log.Debug("what snapshots alone hold was not counted for a list of them", "error", err)
		return
	}
	l.Held, l.Counted = u.Alone, true
}

// readHeld is namespace.ReadHeld with names of snapshots. Errors: NoSuchSnapshot.
func readHeld(r namespace.Reader, names []string) (*namespace.Held, error) {
	all, err := namespace.Snapshots(r)
	if err != nil {
		return nil, err
	}
	var drop []meta.Generation
	for _, name := range names {
		i := slices.IndexFunc(all, func(s meta.Snapshot) bool { return s.Name == name && !s.Deleting })
		if i < 0 {
			return nil, meta.E("find snapshot", meta.NoSuchSnapshot, name, nil)
		}
		drop = append(drop, all[i].At)
	}
	return namespace.ReadHeld(r, drop)
}
