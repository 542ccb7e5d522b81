package server

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/namespace"
	"penstock.io/penstock/meta/task"
)

// Background work on snapshots: the owner dissolves deleted snapshots, rolls a volume back,
// and keeps the schedule. Dissolving and rolling back proceed in journaled steps, so that any
// owner can continue.

// dropStep bounds the superseded versions per step of a deletion: a few milliseconds without
// answers to other callers.
const dropStep = 256

// snapshotRetry is the pause after failed work.
const snapshotRetry = 15 * time.Second

// newSnapshotTask does the work on snapshots and clones of an open volume.
func newSnapshotTask(o *owner) *task.Task {
	return task.New(task.Options{
		Name: "keep snapshots", Failed: "work on snapshots and clones failed, it is tried again", Log: o.log,
		Round: func(ctx context.Context) (time.Duration, error) {
			again := time.Now().Add(o.schedule.keepSchedule())
			more, err := o.snapshots.dropUntil(again)
			if more {
				return 0, nil
			}
			held := false
			if err == nil {
				held, err = o.clones.settleClones(ctx)
			}
			open, gerr := o.groups.dropUndecided()
			wait := max(0, time.Until(again))
			if err = errors.Join(err, gerr); held || open || err != nil {
				wait = min(wait, snapshotRetry)
			}
			return wait, err
		},
	})
}

// dropUntil dissolves deleted snapshots until again, or until the task is woken. more: deleted
// snapshots may be left.
func (ss *snapshots) dropUntil(again time.Time) (more bool, err error) {
	k := ss.k
	for {
		if more, err = ss.dropSome(); !more || err != nil || k.ctx.Err() != nil {
			return false, err
		}
		if !time.Now().Before(again) {
			return true, nil
		}
		if k.tasks.snapshots.Woken() { // the schedule may have changed
			return true, nil
		}
	}
}

// snapshotWork reports whether the volume must stay open for work on snapshots. The caller
// holds mu.
func (o *owner) snapshotWork() bool {
	if o.schedule.read.IsZero() { // the owner has not read the schedule yet
		return true
	}
	if o.schedule.going.tries > 0 { // the next owner would not know of the failures
		return true
	}
	if o.leases.barrier != nil || o.closed != nil || o.schedule.open || o.digesting.busy || o.indexing.busy || o.promotion.busy {
		return true
	}
	if is, err := namespace.Tallied(o.view()); err != nil || is.Stale {
		return true
	}
	all, err := namespace.Snapshots(o.view())
	return err != nil || slices.ContainsFunc(all, func(s meta.Snapshot) bool {
		_, decided := o.groups.known[s.Group]
		return s.Deleting || s.Group != 0 && !decided
	})
}

// delete makes a snapshot unreadable; bytes held by the snapshot alone are freed
// later. at is the snapshot's generation, or zero if the caller knows only the name. Errors:
// NoSuchSnapshot, Busy (a rollback to the snapshot is running, or the snapshot is pinned).
func (ss *snapshots) delete(ctx context.Context, name string, at meta.Generation) (meta.Snapshot, error) {
	k := ss.k
	sn := meta.Snapshot{Name: name, At: at}
	if err := k.await(ctx, k.recovered); err != nil {
		return sn, err
	}
	all, err := ss.list()
	if err != nil {
		return sn, err
	}
	i := -1
	if at == 0 {
		i = slices.IndexFunc(all, func(s meta.Snapshot) bool { return s.Name == name && !s.Deleting })
	}
	if i < 0 { // a repeated request finds the deleted snapshot
		i = slices.IndexFunc(all, func(s meta.Snapshot) bool { return s.Name == name && (at == 0 || s.At == at) })
	}
	switch {
	case i >= 0:
		sn = all[i]
	case at == 0:
		return sn, meta.E("find snapshot", meta.NoSuchSnapshot, name, nil)
	}
	if i >= 0 && !sn.Deleting {
		if err := ss.deleteGeneration(ctx, sn); err != nil {
			return sn, err
		}
	}
	sn.Deleting = true
	return sn, nil
}

// deleteGeneration deletes a known snapshot by generation: a newer snapshot of the same name
// stays. Errors: Busy. An already deleted snapshot is no error.
func (ss *snapshots) deleteGeneration(ctx context.Context, sn meta.Snapshot) error {
	k := ss.k
	if err := k.await(ctx, k.recovered); err != nil {
		return err
	}
	k.mu.Lock()
	seq := k.cur.seq
	if _, err := k.run(&meta.DropSnapshot{At: sn.At, Max: 1}, 0); err != nil {
		k.mu.Unlock()
		return err
	}
	delete(ss.groups.known, sn.Group)
	ss.snapped = max(ss.snapped, min(seq, k.newest()))
	wait := k.untilDurable(seq)
	k.mu.Unlock()
	if err := k.await(ctx, wait); err != nil {
		return err
	}
	k.log.Info("a snapshot was deleted: its bytes are freed in the background", "name", sn.Name, "generation", sn.At)
	k.tasks.snapshots.Wake()
	k.tasks.usage.Wake() // the snapshot may be dissolved already
	return nil
}

// dropSome dissolves a bounded part of a deleted snapshot and waits for the journal. more:
// further parts may be left.
func (ss *snapshots) dropSome() (more bool, err error) {
	k := ss.k
	k.mu.Lock()
	if k.failed != nil {
		defer k.mu.Unlock()
		return false, k.failed
	}
	all, err := namespace.Snapshots(k.view())
	i := slices.IndexFunc(all, func(s meta.Snapshot) bool { return s.Deleting })
	if err != nil || i < 0 {
		k.mu.Unlock()
		return false, err
	}
	res, wait, err := k.start(&meta.DropSnapshot{At: all[i].At, Max: dropStep}, 0)
	if err != nil {
		k.mu.Unlock()
		return false, fmt.Errorf("deleting snapshot %s: %w", all[i].Name, err)
	}
	ss.freed += res.Off
	if res.EOF {
		k.log.Info("a deleted snapshot is gone", "name", all[i].Name, "generation", all[i].At, "freed", ss.freed)
		ss.freed = 0
		delete(ss.unanswered, all[i].At)
	}
	k.mu.Unlock()
	if err := k.await(k.ctx, wait); err != nil {
		return false, err
	}
	k.tasks.collection.Wake()
	if res.EOF {
		k.tasks.usage.Wake()
	}
	return true, nil
}
