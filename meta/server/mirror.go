package server

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/cluster"
	"penstock.io/penstock/meta/wire"
)

// The target of a mirror. Its live tree belongs to one session, which fills it:
// the one that holds meta.MirrorLock. All others read the snapshot that is shown,
// as if it were the volume, and change nothing. They go on to another one at
// once, by one journal entry: before it, whatever is leased is taken back, and
// nobody is answered in between. So that nobody waits for a reader that does not
// answer (it was stopped, or cut off), all are asked before, while reads go on: by
// then its session is over. One that falls silent just between holds others up for
// readsHeldUpAtFirst. What they have cached is of the snapshot that is shown, so the session
// that fills the live tree takes none of their leases, nor waits for them, and what
// it holds is in nobody's way (lease.Table.EnterLiveTree).

// readsHeldUpAtFirst is how long reads are held up at most while what was leased since all
// were asked is taken back; each time that it is not enough, reads go on, all are
// asked again, and it is twice as long: it must do one day.
const readsHeldUpAtFirst = 250 * time.Millisecond

// mirrorTarget is how a volume stands that a mirror fills. The owner's mu guards it.
type mirrorTarget struct {
	// shown is the snapshot that readers see if the volume is a mirror's target, else
	// zero. What is in the journal says so, or will in a moment.
	shown meta.Generation
	// changing: another one is to be shown; flip, if not nil, holds reads up until it is
	// closed, since that is about to be.
	changing bool
	flip     chan struct{}
}

// mirrored tells which generation a read is answered from; zero for the live
// tree. Caller holds mu.
func (o *owner) mirrored(s *session, c *wire.Call) (at meta.Generation, re *wire.Reply, wait <-chan struct{}) {
	if o.fillsNow(s) || o.mirror.shown == 0 && o.mirror.flip == nil {
		return 0, nil, nil
	}
	switch _, open := c.Op.(*meta.Open); {
	case o.mirror.flip != nil:
		return 0, nil, o.mirror.flip
	case open && c.Want == meta.LeaseExclusive: // to write
		re, _ = o.refuse(errMirror("open", o))
		return 0, re, nil
	case o.snapped > o.durable:
		return 0, nil, o.untilDurable(o.snapped)
	}
	return o.mirror.shown, nil, nil
}

// mayChange tells whether a session may run a mutation. Caller holds mu.
func (o *owner) mayChange(s *session, op meta.Op) bool {
	return o.fillsNow(s) || o.mirror.shown == 0 || op.Code() == meta.OpReleaseOrphans
}

// fillsNow is fills for who is about to look at the live tree, or to change it: then
// what it is leased is of that. Caller holds mu.
func (o *owner) fillsNow(s *session) bool {
	if o.mirror.shown == 0 && o.mirror.flip == nil || !o.fills(s.id) {
		return false
	}
	if o.mirror.shown != 0 {
		o.leases.EnterLiveTree(s)
	}
	return true
}

func errMirror(op string, o *owner) error {
	return meta.E(op, meta.ReadOnly, o.subject(), errors.New("it is a mirror's target, whose live tree is the mirror's alone"))
}

// fills tells whether a session is the one that fills the target. Caller holds mu.
func (o *owner) fills(id meta.SessionID) bool {
	l, held := o.locks.Get(meta.Lock{Ino: meta.MirrorLock, Flock: true, Type: meta.LockWrite})
	return held && l.Type == meta.LockWrite && l.Session == id
}

func (o *owner) isMirror() bool {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.mirror.shown != 0
}

// mayMirror refuses to all but who fills it what concerns the live tree of a
// mirror's target. Errors: ReadOnly.
func (o *owner) mayMirror(ctx context.Context, sess *session, op string) error {
	if err := o.await(ctx, o.recovered); err != nil {
		return err
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.mirror.shown == 0 || o.fills(sess.id) {
		return nil
	}
	return errMirror(op, o)
}

// filledBy tells whether the volume is a target, and a session the one that fills
// it. Caller holds mu.
func (o *owner) filledBy(sess *session) bool { return o.mirror.shown != 0 && o.fills(sess.id) }

func errNoFiller(op string, o *owner) error {
	return meta.E(op, meta.ReadOnly, o.subject(), errors.New("it is no mirror's target any more, or another session fills it"))
}

// mayFill refuses what only the session that fills a target does to all others.
// Errors: ReadOnly.
func (o *owner) mayFill(ctx context.Context, sess *session, op string) error {
	if err := o.await(ctx, o.recovered); err != nil {
		return err
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	if !o.filledBy(sess) {
		return errNoFiller(op, o)
	}
	return nil
}

// show makes the volume a mirror's target, or shows its readers another
// snapshot, or with "" makes it a volume like others. Only who holds the lock
// may. Errors: NoSuchSnapshot, ReadOnly (another session fills it).
func (o *owner) show(ctx context.Context, sess *session, name string) error {
	if err := o.await(ctx, o.recovered); err != nil {
		return err
	}
	op := &meta.SetMirror{}
	if name != "" {
		sn, err := o.snapshot(name)
		if err != nil {
			return err
		}
		op.Shown = sn.At
	}
	o.mu.Lock()
	if o.failed != nil {
		defer o.mu.Unlock()
		return o.failed
	}
	if !o.fills(sess.id) {
		defer o.mu.Unlock()
		return errMirror("show snapshot", o)
	}
	if o.mirror.changing {
		defer o.mu.Unlock()
		return meta.E("show snapshot", meta.Busy, o.subject(), errors.New("another one is about to be shown"))
	}
	o.mirror.changing = true
	defer func() {
		o.mu.Lock()
		defer o.mu.Unlock()
		o.mirror.changing = false
	}()
	o.mu.Unlock()
	var wait <-chan struct{}
	err := o.whenUnleased(ctx, func() error {
		if !o.fills(sess.id) { // since then
			return errMirror("show snapshot", o)
		}
		seq := o.cur.seq
		if _, err := o.run(op, 0); err != nil {
			return err
		}
		o.mirror.shown = op.Shown
		o.leases.OneTree()
		o.snapped = max(o.snapped, min(seq, o.newest())) // nobody sees it before the journal has it
		wait = o.untilDurable(seq)
		return nil
	})
	if err != nil {
		return err
	}
	if err := o.await(ctx, wait); err != nil {
		return err
	}
	o.log.Info("what readers of the mirror see", "snapshot", name, "generation", op.Shown)
	return nil
}

// whenUnleased runs do, under mu, at a moment when nothing of the volume is leased.
func (o *owner) whenUnleased(ctx context.Context, do func() error) error {
	for hold := readsHeldUpAtFirst; ; hold *= 2 {
		o.mu.Lock()
		asked := o.recallEverything()
		o.mu.Unlock()
		for _, answered := range asked {
			if err := o.await(ctx, answered); err != nil {
				return err
			}
		}
		if done, err := o.unleasedWithin(ctx, hold, do); done || err != nil {
			return err
		}
	}
}

// unleasedWithin holds reads up until nothing is leased and do has run, or for hold:
// then it gives false. Who fills a target is not held up, and may be leased something
// at any time but while do runs.
func (o *owner) unleasedWithin(ctx context.Context, hold time.Duration, do func() error) (done bool, err error) {
	over := make(chan struct{})
	o.mu.Lock()
	o.mirror.flip = over
	o.mu.Unlock()
	defer func() {
		o.mu.Lock()
		defer o.mu.Unlock()
		o.mirror.flip = nil
		close(over)
	}()
	short, cancel := context.WithTimeout(ctx, hold)
	defer cancel()
	err = o.recallAll(short, func() error {
		done = true
		return do()
	})
	if !done && ctx.Err() == nil && short.Err() != nil {
		return false, nil
	}
	return done, err
}

// unmirrored refuses to delete a volume that a mirror's record names, also one that
// was promoted: the record knows which snapshots of the source are the mirror's.
// Errors: Busy.
func (s *Server) unmirrored(ctx context.Context, v cluster.Volume) error {
	m, err := s.cfg.Cluster.Mirror(ctx, v.ID)
	if meta.KindOf(err) == meta.NotFound {
		return nil
	}
	if err != nil {
		return err
	}
	return meta.E("delete volume", meta.Busy, v.Name, fmt.Errorf("it is, or was, the target of a mirror of %s: 'penstock mirror delete %s' comes first, with --leave-source if the source is gone", m.Source.Volume, v.Name))
}

// mirrors lists the records of mirrors. Those whose target is gone are dropped:
// once a volume was deleted without its record.
func (s *Server) mirrors(ctx context.Context) ([]meta.Mirror, error) {
	c := s.cfg.Cluster
	l, err := c.Mirrors(ctx)
	if err != nil {
		return nil, err
	}
	known := map[meta.VolumeID]bool{}
	if v := c.View(); v != nil {
		for _, x := range v.Volumes {
			known[x.ID] = true
		}
	}
	all := []meta.Mirror{}
	for _, m := range l {
		if !known[m.Target] { // the view may be older than the volume
			if _, err := c.Volume(ctx, m.Target); meta.KindOf(err) == meta.NoSuchVolume {
				s.log.Info("the record of a mirror goes, its target is gone", "target", m.Target, "source", m.Source.Volume)
				if err := c.DropMirror(ctx, m.Target); err != nil {
					return nil, err
				}
				continue
			} else if err != nil {
				return nil, err
			}
		}
		all = append(all, m)
	}
	return all, nil
}

// mirrorOp answers requests about mirrors.
func (s *Server) mirrorOp(ctx context.Context, sess *session, m *wire.Admin, re *wire.AdminRe) error {
	c := s.cfg.Cluster
	switch m.Op {
	case wire.AdminMirrors:
		if m.Volume == 0 {
			all, err := s.mirrors(ctx)
			if err != nil {
				return err
			}
			return reportJSON(re, all)
		}
		x, err := c.Mirror(ctx, m.Volume)
		if err != nil {
			return err
		}
		return reportJSON(re, []meta.Mirror{x})
	case wire.AdminMirrorPut:
		var x meta.Mirror
		if err := json.Unmarshal(m.Body, &x); err != nil || x.Target != m.Volume || x.Target == 0 {
			return meta.E("write mirror", meta.Protocol, "", err)
		}
		x, err := c.PutMirror(ctx, x)
		if err != nil {
			return err
		}
		return reportJSON(re, x)
	case wire.AdminMirrorDrop:
		return c.DropMirror(ctx, m.Volume)
	}
	o, err := s.ownerFor(ctx, m.Volume)
	if err != nil {
		return err
	}
	return o.show(ctx, sess, m.Entry)
}
