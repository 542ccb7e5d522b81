package server

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"
	"unicode"
	"unicode/utf8"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/cluster"
	"penstock.io/penstock/meta/namespace"
	"penstock.io/penstock/meta/wire"
)

// Snapshots of a volume (rule 8). What is answered here runs in one order, so a
// snapshot between two operations is a state that existed. But under an
// exclusive lease a client acknowledges writes by itself. So before a snapshot:
//
//  1. nobody gets an exclusive lease, and those that are out are taken back:
//     clients hold their writers, commit what is buffered, synced, and close
//     open-ended extents; from its answer on a client acknowledges nothing.
//     Nobody waits for one that is away, nor ends it;
//  2. the open-ended extents of who does not answer in time are sealed, at what
//     was synced at least, under a higher fence;
//  3. TakeSnapshot runs, exclusive leases are given again, and the caller waits
//     for the journal.
//
// Whatever write() returned for is in it then, unless its client is one of
// those that did not answer. It all concerns files being written; creating,
// renaming, reading and looking up go on.

const (
	// barrierWait is how long clients may take to give leases back.
	barrierWait = time.Second
	// barrierSeals is how long who did not answer may take to be sealed, each
	// time around; it is tried barrierTries times.
	barrierSeals = 10 * time.Second
	barrierTries = 4
)

// barrier holds exclusive leases off while a snapshot is taken.
type barrier struct {
	over chan struct{}
	// cut: the time to answer is over; no extent is left open-ended any more.
	cut bool
}

// endsOpen tells whether an operation leaves an extent open-ended.
func endsOpen(op meta.Op) bool {
	w, ok := op.(*meta.Write)
	return ok && slices.ContainsFunc(w.Extents, func(e meta.Extent) bool { return e.OpenEnded })
}

// takeSnapshot takes one. filler, if not nil, is who asks as the session that fills a
// mirror's target, and must be it when the snapshot is taken. Errors: those of
// meta.TakeSnapshot; Unavailable (what a client left open can't be sealed now),
// ReadOnly (filler is not), NotOwner.
func (o *owner) takeSnapshot(ctx context.Context, op *meta.TakeSnapshot, filler *session) (meta.Snapshot, error) {
	var none meta.Snapshot
	if err := o.await(ctx, o.recovered); err != nil {
		return none, err
	}
	began := time.Now()
	o.mu.Lock()
	for o.barrier != nil || o.closed != nil {
		over := o.closed
		if o.barrier != nil {
			over = o.barrier.over
		}
		o.mu.Unlock()
		if err := o.await(ctx, over); err != nil {
			return none, err
		}
		o.mu.Lock()
	}
	// What would be refused anyway holds nobody up.
	if err := o.mayTake(op); err != nil {
		o.mu.Unlock()
		return none, err
	}
	b := &barrier{over: make(chan struct{})}
	o.barrier = b
	writers := len(o.leases.writable)
	lift := func() {
		o.barrier = nil
		close(b.over)
	}
	o.mu.Unlock()

	late, err := o.recallWriters(ctx)
	o.mu.Lock()
	if err == nil {
		err = o.cutOpenEnds(ctx, b)
	}
	if err == nil {
		err = o.failed
	}
	if err == nil && filler != nil && !o.filledBy(filler) {
		err = errNoFiller("take snapshot", o) // since the barrier others may have written
	}
	if err != nil {
		lift()
		o.mu.Unlock()
		return none, err
	}
	seq := o.cur.seq
	res, err := o.run(op, 0)
	if err != nil {
		lift()
		o.mu.Unlock()
		return none, err
	}
	o.snapped = max(o.snapped, min(seq, o.newest()))
	wait := o.untilDurable(seq)
	lift()
	held := time.Since(began)
	o.mu.Unlock()
	if err := o.await(ctx, wait); err != nil {
		return none, err
	}
	all, err := o.snapshots()
	if err != nil {
		return none, err
	}
	i := slices.IndexFunc(all, func(s meta.Snapshot) bool { return s.At == meta.Generation(res.Off) })
	if i < 0 {
		return none, meta.E("take snapshot", meta.NoSuchSnapshot, op.Name, errors.New("it was taken, and deleted at once"))
	}
	wakeUp(o.digesting.wake)
	o.log.Info("snapshot taken", "name", op.Name, "generation", res.Off, "written", writers, "unanswered", late, "held", held.Round(time.Millisecond), "took", time.Since(began).Round(time.Millisecond))
	return all[i], nil
}

// mayTake refuses a snapshot that could not be taken even if nothing were open.
// Caller holds mu.
func (o *owner) mayTake(op *meta.TakeSnapshot) error {
	if o.failed != nil {
		return o.failed
	}
	if err := o.full(op); err != nil {
		return err
	}
	_, _, err := namespace.Execute(&view{o: o}, o.context(0), op)
	if errors.Is(err, meta.Busy) {
		return nil
	}
	return err
}

// recallWriters takes exclusive leases back, and tells how many are still out
// when the time is over.
func (o *owner) recallWriters(ctx context.Context) (late int, err error) {
	ctx, cancel := context.WithTimeout(ctx, barrierWait)
	defer cancel()
	for {
		var waits []<-chan struct{}
		o.mu.Lock()
		late = 0
		for ino := range o.leases.writable {
			// Who is away is asked, too: it hears so when it comes back, be it while
			// the ends of files are still being settled.
			ch := o.leases.ask(o.vol, nil, ino, meta.LeaseShared)
			switch {
			case o.leases.away(ino, meta.LeaseShared):
				late++
			case ch != nil:
				waits = append(waits, ch)
			}
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
				return 0, o.gone()
			}
			if !errors.Is(context.Cause(ctx), context.DeadlineExceeded) {
				return 0, meta.E("take snapshot", meta.Interrupted, "", context.Cause(ctx))
			}
			o.mu.Lock()
			defer o.mu.Unlock()
			return len(o.leases.writable), nil
		}
	}
}

// cutOpenEnds seals the chunks that files end in without a length. Caller holds
// mu; when there is no error, there are none, and there will be none before mu
// is released.
func (o *owner) cutOpenEnds(ctx context.Context, b *barrier) error {
	ctx, cancel := context.WithTimeout(ctx, barrierSeals)
	defer cancel()
	for try := 0; ; try++ {
		var open []meta.ChunkID
		if err := namespace.OpenEnded(&view{o: o}, func(_ meta.Ino, c meta.ChunkRecord) bool {
			open = append(open, c.ID)
			return true
		}); err != nil {
			return err
		}
		if len(open) == 0 {
			return nil
		}
		if try == barrierTries {
			return meta.E("take snapshot", meta.Unavailable, o.subject(), fmt.Errorf("%d files are still being appended to", len(open)))
		}
		b.cut = true
		o.mu.Unlock()
		errs := make([]error, len(open))
		var wg sync.WaitGroup
		slots := make(chan struct{}, sealsAtOnce)
		for i, id := range open {
			slots <- struct{}{}
			wg.Go(func() {
				defer func() { <-slots }()
				_, errs[i] = o.seal(ctx, id, nil)
			})
		}
		wg.Wait()
		o.mu.Lock()
		if err := errors.Join(errs...); err != nil {
			return meta.E("take snapshot", meta.Unavailable, o.subject(), fmt.Errorf("a file's end can't be settled: %w", err))
		}
	}
}

// queryAt answers a read at a snapshot. What it shows never changes and is in
// the journal, so there is nothing to lease, nothing of other sessions to wait
// for, and none of the claims that a change of owner waits for. Caller holds mu.
func (o *owner) queryAt(s *session, c *wire.Call) (*wire.Reply, <-chan struct{}) {
	if c.Op.Code().Mutates() {
		return o.refuse(meta.E("call", meta.ReadOnly, "", errors.New("snapshots can't be changed")))
	}
	if o.snapped > o.durable {
		return nil, o.untilDurable(o.snapped)
	}
	q := o.context(s.id)
	q.At = c.At
	res, err := namespace.Query(&view{o: o, session: s.id}, q, c.Op)
	if err != nil {
		return o.refuse(err)
	}
	if wait, err := o.fillPlaces(res); wait != nil || err != nil {
		if err != nil {
			return o.refuse(err)
		}
		return nil, wait
	}
	if _, ok := c.Op.(*meta.StatFSOp); ok {
		o.srv.fillDisk(&res.StatFS)
	}
	return &wire.Reply{Result: *res}, nil
}

// snapshots lists those in the journal, oldest first.
func (o *owner) snapshots() ([]meta.Snapshot, error) {
	all, _, err := o.shownSnapshots()
	return all, err
}

// shownSnapshots is snapshots; it tells also which one readers of a mirror are
// shown, zero if the volume is the target of none.
func (o *owner) shownSnapshots() ([]meta.Snapshot, meta.Generation, error) {
	for {
		o.mu.Lock()
		if o.failed != nil {
			o.mu.Unlock()
			return nil, 0, o.failed
		}
		if o.snapped <= o.durable {
			all, err := namespace.Snapshots(&view{o: o})
			shown := o.mirror
			o.mu.Unlock()
			return all, shown, err
		}
		wait := o.untilDurable(o.snapped)
		o.mu.Unlock()
		if err := o.await(o.ctx, wait); err != nil {
			return nil, 0, err
		}
	}
}

// snapshot finds one that can be read by its name. Errors: NoSuchSnapshot.
func (o *owner) snapshot(name string) (meta.Snapshot, error) {
	all, err := o.snapshots()
	if err != nil {
		return meta.Snapshot{}, err
	}
	for _, s := range all {
		if s.Name == name && !s.Deleting {
			return s, nil
		}
	}
	return meta.Snapshot{}, meta.E("find snapshot", meta.NoSuchSnapshot, name, nil)
}

func snapshotInfo(s meta.Snapshot) wire.SnapshotInfo {
	i := wire.SnapshotInfo{Name: s.Name, At: s.At, Created: time.Unix(0, int64(s.Created)).UTC(), Inodes: s.Inodes, Bytes: s.Bytes, State: wire.SnapshotReady}
	switch {
	case s.Deleting:
		i.State = wire.SnapshotDeleting
	case s.Rolling:
		i.State = wire.SnapshotRolling
	}
	return i
}

// snapshotOp answers a request about snapshots at the owner of the volume.
func (s *Server) snapshotOp(ctx context.Context, sess *session, m *wire.Admin, re *wire.AdminRe) error {
	v, err := s.find(ctx, m)
	if err != nil {
		return err
	}
	o, err := s.ownerFor(ctx, v.ID)
	if err != nil {
		return err
	}
	body := func(to any) error {
		if len(m.Body) == 0 {
			return nil
		}
		if err := json.Unmarshal(m.Body, to); err != nil {
			return meta.E("admin", meta.Protocol, "", err)
		}
		return nil
	}
	switch m.Op {
	case wire.AdminSnapshotCreate, wire.AdminSnapshotRollback, wire.AdminSnapshotSchedule:
		if err := o.mayMirror(ctx, sess, "snapshot"); err != nil && m.Entry != "" {
			return err
		}
	}
	switch m.Op {
	case wire.AdminSnapshots:
		var q wire.SnapshotsRequest
		if err := body(&q); err != nil {
			return err
		}
		l, err := o.listSnapshots()
		if err != nil {
			return err
		}
		if i := slices.IndexFunc(l.Snapshots, func(i wire.SnapshotInfo) bool { return q.Digest != "" && i.Name == q.Digest }); i >= 0 && l.Snapshots[i].Digest == nil {
			o.awaitDigest(l.Snapshots[i].At)
		}
		l.Keep = v.Keep
		return reportJSON(re, l)
	case wire.AdminSnapshotCreate:
		var q wire.SnapshotRequest
		if err := body(&q); err != nil {
			return err
		}
		var filler *session
		if q.Filler {
			if err := o.mayFill(ctx, sess, "take snapshot"); err != nil {
				return err
			}
			filler = sess
		}
		if !utf8.ValidString(m.Entry) || strings.ContainsFunc(m.Entry, unicode.IsControl) {
			return meta.E("take snapshot", meta.Invalid, fmt.Sprintf("%q", m.Entry), errors.New("a name is text"))
		}
		sn, err := o.takeSnapshot(ctx, &meta.TakeSnapshot{Name: m.Entry, Token: q.Token}, filler)
		if err != nil {
			return err
		}
		return reportJSON(re, snapshotInfo(sn))
	case wire.AdminSnapshotDelete:
		sn, err := o.deleteUnpinned(ctx, m.Entry)
		if err != nil {
			return err
		}
		return reportJSON(re, snapshotInfo(sn))
	case wire.AdminSnapshotDiff:
		var q wire.DiffRequest
		if err := body(&q); err != nil {
			return err
		}
		if q.To == "" { // with the live tree
			if err := o.mayMirror(ctx, sess, "compare"); err != nil {
				return err
			}
		}
		a, err := o.diff(ctx, &q)
		if err != nil {
			return err
		}
		return reportJSON(re, a)
	case wire.AdminSnapshotRollback:
		var q wire.SnapshotRequest
		if err := body(&q); err != nil {
			return err
		}
		return o.rollBack(ctx, sess, m.Entry, &q)
	case wire.AdminSnapshotSchedule:
		if _, err := parseKeep(m.Entry); err != nil {
			return err
		}
		if _, err := s.cfg.Cluster.UpdateVolume(ctx, v.ID, func(v *cluster.Volume) error { v.Keep = m.Entry; return nil }); err != nil {
			return err
		}
		o.setSchedule(m.Entry)
		return nil
	}
	panic(fmt.Sprintf("server: request %d is not about snapshots", m.Op))
}

func (o *owner) listSnapshots() (*wire.SnapshotList, error) {
	all, shown, err := o.shownSnapshots()
	if err != nil {
		return nil, err
	}
	l := &wire.SnapshotList{Snapshots: make([]wire.SnapshotInfo, len(all))}
	for i, s := range all {
		l.Snapshots[i] = snapshotInfo(s)
		l.Snapshots[i].Shown = s.At == shown
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	if err := errors.Join(o.listPins(l.Snapshots), o.listDigests(l.Snapshots)); err != nil {
		return nil, err
	}
	l.Held, err = namespace.Buried(&view{o: o})
	return l, err
}
