package server

import (
	"context"
	"errors"
	"time"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/wire"
)

// The target of a mirror. One session fills the target's live tree: the holder of
// meta.MirrorLock. All other sessions read the shown snapshot as if it were the volume, and
// change nothing. One journal entry switches all readers to another snapshot. Before the
// entry, the owner recalls every lease, and answers no reader until the switch.
//
// A reader may not answer a recall (its process was stopped, or its network cut). Such a
// reader must not hold up other readers, so the owner recalls all leases a first time while
// reads go on: the silent reader's session ends meanwhile. A reader falling silent only after
// the first recall holds other readers up for readsHeldUpAtFirst.
//
// Readers cache attributes and data of the shown snapshot, not of the live tree. So the
// session filling the live tree recalls no lease of a reader, and no reader waits for a lease
// of the filling session (lease.Table.EnterLiveTree).

// readsHeldUpAtFirst bounds how long reads are held up at first while the leases granted since
// the first recall are recalled. If the time does not suffice, reads go on, all leases are
// recalled again, and the bound doubles: so some round is long enough.
const readsHeldUpAtFirst = 250 * time.Millisecond

// mirrorTarget is a volume's state as the target of a mirror. The owner's mu guards it.
type mirrorTarget struct {
	k         *kernel
	digesting *digesting
	leases    *leases
	locks     *locks
	repairing *repairing
	snapshots *snapshots

	// shown is the snapshot that readers see if the volume is a mirror's target, else zero.
	// The journal entry with shown is durable, or about to be.
	shown meta.Generation
	// changing: another snapshot is about to be shown. flip, if not nil, holds reads up until
	// flip is closed, after the switch or after the bound of whenUnleased.
	changing bool
	flip     chan struct{}
}

// mirrored returns the generation to answer a read from (zero: the live tree), or a reply with
// an error, or a channel to wait for. The caller holds the owner's mu.
func (mt *mirrorTarget) mirrored(s *session, c *wire.Call) (at meta.Generation, re *wire.Reply, wait <-chan struct{}) {
	k := mt.k
	if mt.fillsNow(s) || mt.shown == 0 && mt.flip == nil {
		return 0, nil, nil
	}
	switch _, open := c.Op.(*meta.Open); {
	case mt.flip != nil:
		return 0, nil, mt.flip
	case open && c.Want == meta.LeaseExclusive: // to write
		re, _ = refuse(errMirror("open", k))
		return 0, re, nil
	case mt.snapshots.snapped > k.durable:
		return 0, nil, k.untilDurable(mt.snapshots.snapped)
	}
	return mt.shown, nil, nil
}

// mayChange reports whether a session may run a mutation. The caller holds the owner's mu.
func (mt *mirrorTarget) mayChange(s *session, op meta.Op) bool {
	return mt.fillsNow(s) || mt.shown == 0 || op.Code() == meta.OpReleaseOrphans
}

// fillsNow is fills for a call about to read or change the live tree. If the session fills a
// target, the session's leases count as leases on the live tree from now on. The caller holds the owner's mu.
func (mt *mirrorTarget) fillsNow(s *session) bool {
	if mt.shown == 0 && mt.flip == nil || !mt.fills(s.id) {
		return false
	}
	if mt.shown != 0 {
		mt.leases.EnterLiveTree(s)
	}
	return true
}

func errMirror(op string, k *kernel) error {
	return meta.E(op, meta.ReadOnly, k.subject(), errors.New("it is a mirror's target, whose live tree is the mirror's alone"))
}

// fills reports whether a session fills the target: the session holds meta.MirrorLock for
// writing. The caller holds the owner's mu.
func (mt *mirrorTarget) fills(id meta.SessionID) bool {
	l, held := mt.locks.Get(meta.Lock{Ino: meta.MirrorLock, Flock: true, Type: meta.LockWrite})
	return held && l.Type == meta.LockWrite && l.Session == id
}

func (mt *mirrorTarget) isMirror() bool {
	mt.k.mu.Lock()
	defer mt.k.mu.Unlock()
	return mt.shown != 0
}

// mayMirror refuses a request about the live tree of a mirror's target from any session but
// the session filling the target. Errors: ReadOnly.
func (mt *mirrorTarget) mayMirror(ctx context.Context, sess *session, op string) error {
	k := mt.k
	if err := k.await(ctx, k.recovered); err != nil {
		return err
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	if mt.shown == 0 || mt.fills(sess.id) {
		return nil
	}
	return errMirror(op, k)
}

// filledBy reports whether the volume is a mirror's target and sess fills it. The caller holds the owner's mu.
func (mt *mirrorTarget) filledBy(sess *session) bool { return mt.shown != 0 && mt.fills(sess.id) }

func errNoFiller(op string, k *kernel) error {
	return meta.E(op, meta.ReadOnly, k.subject(), errors.New("it is no mirror's target any more, or another session fills it"))
}

// mayFill refuses a request reserved for the session filling a target, from any other session
// or if the volume is no target. Errors: ReadOnly.
func (mt *mirrorTarget) mayFill(ctx context.Context, sess *session, op string) error {
	k := mt.k
	if err := k.await(ctx, k.recovered); err != nil {
		return err
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	if !mt.filledBy(sess) {
		return errNoFiller(op, k)
	}
	return nil
}

// show makes the volume a mirror's target, or shows another snapshot to the target's readers,
// or, with name "", makes the volume an ordinary volume. The session must hold
// meta.MirrorLock. Errors: NoSuchSnapshot, ReadOnly (the session does not fill the target),
// Busy (another call of show runs).
func (mt *mirrorTarget) show(ctx context.Context, sess *session, name string) error {
	k := mt.k
	if err := k.await(ctx, k.recovered); err != nil {
		return err
	}
	op := &meta.SetMirror{}
	if name != "" {
		sn, err := mt.snapshots.find(name)
		if err != nil {
			return err
		}
		op.Shown = sn.At
	}
	k.mu.Lock()
	if k.failed != nil {
		defer k.mu.Unlock()
		return k.failed
	}
	if !mt.fills(sess.id) {
		defer k.mu.Unlock()
		return errMirror("show snapshot", k)
	}
	if mt.changing {
		defer k.mu.Unlock()
		return meta.E("show snapshot", meta.Busy, k.subject(), errors.New("another one is about to be shown"))
	}
	mt.changing = true
	defer func() {
		k.mu.Lock()
		defer k.mu.Unlock()
		mt.changing = false
	}()
	k.mu.Unlock()
	var wait <-chan struct{}
	err := mt.whenUnleased(ctx, func() error {
		if !mt.fills(sess.id) { // the lock may be lost since the check above
			return errMirror("show snapshot", k)
		}
		seq := k.cur.seq
		if _, err := k.run(op, 0); err != nil {
			return err
		}
		mt.shown = op.Shown
		mt.leases.OneTree()
		mt.snapshots.snapped = max(mt.snapshots.snapped, min(seq, k.newest())) // no reader sees the snapshot before the journal has the entry
		wait = k.untilDurable(seq)
		return nil
	})
	if err != nil {
		return err
	}
	if err := k.await(ctx, wait); err != nil {
		return err
	}
	k.log.Info("readers of the mirror see a new snapshot", "snapshot", name, "generation", op.Shown)
	return nil
}

// whenUnleased runs do, under the owner's mu, while no lease is held on the volume.
func (mt *mirrorTarget) whenUnleased(ctx context.Context, do func() error) error {
	k := mt.k
	for hold := readsHeldUpAtFirst; ; hold *= 2 {
		k.mu.Lock()
		asked := mt.leases.recallEverything()
		k.mu.Unlock()
		for _, answered := range asked {
			if err := k.await(ctx, answered); err != nil {
				return err
			}
		}
		if done, err := mt.unleasedWithin(ctx, hold, do); done || err != nil {
			return err
		}
	}
}

// unleasedWithin holds reads up until no lease is held and do has run, at most for hold: then
// done is false. The session filling a target is not held up, and may get leases at any time
// except while do runs.
func (mt *mirrorTarget) unleasedWithin(ctx context.Context, hold time.Duration, do func() error) (done bool, err error) {
	k := mt.k
	over := make(chan struct{})
	k.mu.Lock()
	mt.flip = over
	k.mu.Unlock()
	defer func() {
		k.mu.Lock()
		defer k.mu.Unlock()
		mt.flip = nil
		close(over)
	}()
	short, cancel := context.WithTimeout(ctx, hold)
	defer cancel()
	err = mt.leases.recallAll(short, func() error {
		done = true
		return do()
	})
	if !done && ctx.Err() == nil && short.Err() != nil {
		return false, nil
	}
	return done, err
}
