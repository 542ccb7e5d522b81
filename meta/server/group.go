package server

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/cluster"
	"penstock.io/penstock/meta/namespace"
	peering "penstock.io/penstock/meta/peer"
	"penstock.io/penstock/meta/wire"
)

// Snapshots of several volumes that show one moment. Who asks for it leads each of the
// owners through the same steps (meta/client, TakeGroup):
//
//  1. hold: the barrier is put up, in the order of volumes;
//  2. ready: exclusive leases are back, no file ends open any more;
//  3. take: once all are ready. From now on no change is answered, and the snapshot is
//     taken, hidden;
//  4. release: once all are taken. It fails if the owner answered changes since step 3.
//
// The moment is any between the last take and the first release: then no volume
// answered changes, so each snapshot is the volume as of then. A barrier alone, as of
// one volume's snapshot, would not do: it lets through what an owner answers, and a
// name made in a volume after its snapshot, and another in the next volume before that
// one's, would be the effect without its cause.
//
// A hold ends by itself soon, and fails the group with it: who asked may be gone, and
// owners don't know of one another. The group's record decides. It is made before the
// first hold, undecided: nobody is shown the snapshots. Who asked makes it ready, or
// aborted; an owner that finds it undecided after groupOverdue, aborted. Both is done by
// compare-and-swap, so it is one of them. The snapshots of an aborted group are deleted
// by their owners, and the record goes after the last of them: see decided.

const (
	// groupHold is how long a barrier stays up for a group in all, before the changes
	// stop, and groupFrozen how long these are held up at most.
	groupHold   = 4 * time.Second
	groupFrozen = time.Second
	// groupOverdue is after what time a group is given up by whoever comes across it:
	// longer than a try takes that is still at it (meta/client).
	groupOverdue = 30 * time.Second
)

// groupHolding is a group's barrier at one of its volumes. Guarded by the owner's mu, but
// for ready.
type groupHolding struct {
	id    uint64
	b     *barrier
	op    *meta.TakeSnapshot
	began time.Time
	over  *time.Timer        // ends it
	stop  context.CancelFunc // ends what waits in it
	// ready is closed when the volume can be snapshot, or failed says why not.
	ready  chan struct{}
	failed error
	late   unanswered
	taken  *meta.Result // of op
	seq    meta.Seq     // that must be durable for it
}

// frozen tells what to wait for before anything may be changed, nil: nothing. Caller
// holds mu.
func (o *owner) frozen() <-chan struct{} {
	if o.barrier != nil && o.barrier.frozen {
		return o.barrier.over
	}
	return nil
}

func (o *owner) errHold(why string) error {
	return meta.E("take group", meta.Again, o.subject(), errors.New(why))
}

// holding gives the hold of a group. Caller holds mu.
func (o *owner) holding(id uint64) (*groupHolding, error) {
	switch h := o.group; {
	case o.failed != nil:
		return nil, o.failed
	case h == nil || h.id != id:
		return nil, o.errHold("the time was over, or the volume has another owner by now")
	default:
		return h, nil
	}
}

// endHold lets the volume go on. Caller holds mu.
func (o *owner) endHold(h *groupHolding) {
	if o.group != h {
		return
	}
	h.over.Stop()
	h.stop()
	o.group = nil
	o.lowerBarrier()
	o.log.Debug("a group's barrier is down", "name", h.op.Name, "held", time.Since(h.began).Round(time.Millisecond), "taken", h.taken != nil)
}

// hold puts the barrier up for a group that is undecided, and begins to take leases
// back. Errors: those of mayTake, Again.
func (o *owner) hold(ctx context.Context, name string, q wire.GroupStep) error {
	if err := o.await(ctx, o.recovered); err != nil {
		return err
	}
	op := &meta.TakeSnapshot{Name: name, Token: q.ID}
	if err := o.lockWithoutBarrier(ctx, func() bool { return o.group != nil && o.group.id == q.ID }); err != nil {
		return err
	}
	if o.group != nil {
		o.mu.Unlock()
		return nil // the request came twice
	}
	before, err := o.mayTake(op)
	if err == nil && before != nil {
		err = o.errHold("it was taken before")
	}
	if err != nil {
		o.mu.Unlock()
		return err
	}
	h := &groupHolding{
		id: q.ID, op: op, began: time.Now(), ready: make(chan struct{}), b: o.raiseBarrier(barrierWait),
	}
	waiting, stop := context.WithCancel(o.ctx)
	h.stop = stop
	h.over = time.AfterFunc(cmp.Or(o.srv.cfg.groupHold, groupHold), func() { o.giveUp(h) })
	o.group = h
	o.mu.Unlock()
	o.wg.Go(func() { o.makeReady(waiting, h, q.Strict) })
	// Only now: who gives the group up afterwards ends this hold, too.
	g, err := o.srv.cfg.Cluster.Group(ctx, name)
	if err == nil && (g.ID != q.ID || g.State != meta.GroupTaking || !slices.Contains(g.Volumes(), o.vol)) {
		err = o.errHold("the group was given up")
	}
	if err != nil {
		o.giveUp(h)
	}
	return err
}

func (o *owner) giveUp(h *groupHolding) {
	o.mu.Lock()
	o.endHold(h)
	o.mu.Unlock()
}

// makeReady takes back what clients have exclusively, and settles the ends of files.
func (o *owner) makeReady(ctx context.Context, h *groupHolding, strict bool) {
	late, err := o.recallWriters(ctx, h.b.patience)
	sealing, end := context.WithTimeout(o.ctx, barrierSeals)
	defer end()
	var goOn *seals
	o.mu.Lock()
	h.late = late
	h.late.known = true
	if o.group != h {
		err = o.errHold("the time was over")
	}
	if err == nil && strict && late.files > 0 {
		err = meta.E("take group", meta.Unavailable, o.subject(), fmt.Errorf("what was written is not all in yet: %v", late))
	}
	if err == nil {
		goOn, err = o.cutOpenEnds(sealing, h.b)
	}
	if err == nil && goOn != nil {
		err = o.errHold("files are still being appended to")
	}
	if err == nil && o.group != h {
		err = o.errHold("the time was over")
	}
	h.b.cut = true // nothing ends open from here on
	if h.failed = err; err != nil {
		o.endHold(h)
	}
	close(h.ready)
	o.mu.Unlock()
	if goOn != nil {
		if err := goOn.wait(); err != nil { // the next try finds them sealed
			o.log.Warn("a group's snapshot waits for the ends of files", "name", h.op.Name, "error", err)
		}
	}
}

// awaitReady waits until the volume can be snapshot. Errors: Again, Unavailable.
func (o *owner) awaitReady(ctx context.Context, id uint64) error {
	o.mu.Lock()
	h, err := o.holding(id)
	o.mu.Unlock()
	if err == nil {
		err = o.await(ctx, h.ready)
	}
	if err != nil {
		return err
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	return h.failed
}

// takeHeld takes the snapshot of a volume that is ready. From then on no change is
// answered, until the hold ends. Errors: Again, and those of meta.TakeSnapshot.
func (o *owner) takeHeld(ctx context.Context, id uint64) (m meta.GroupMember, err error) {
	o.mu.Lock()
	h, err := o.holding(id)
	if err == nil && !h.b.cut {
		err = o.errHold("the volume is not ready")
	}
	if err == nil && h.taken == nil {
		if err = o.takeFrozen(h); err != nil {
			o.endHold(h)
		}
	}
	if err != nil {
		o.mu.Unlock()
		return m, err
	}
	at, late := meta.Generation(h.taken.Off), h.late
	wait := o.untilDurable(h.seq)
	o.mu.Unlock()
	if err := o.await(ctx, wait); err != nil {
		return m, err
	}
	o.tasks.snapshots.Wake() // it looks what becomes of the group
	o.mu.Lock()
	defer o.mu.Unlock()
	all, err := namespace.Snapshots(&view{o: o})
	if err != nil {
		return m, err
	}
	i := slices.IndexFunc(all, func(s meta.Snapshot) bool { return s.At == at && !s.Deleting })
	if i < 0 {
		return m, o.errHold("the group was given up")
	}
	s := all[i]
	return meta.GroupMember{Volume: o.vol, At: at, Created: s.Created, Inodes: s.Inodes, Bytes: s.Bytes, Unanswered: uint64(late.files), UnansweredBy: late.clients}, nil
}

// takeFrozen stops changes, and takes the snapshot in the same moment. Caller holds mu.
func (o *owner) takeFrozen(h *groupHolding) (err error) {
	if !h.over.Reset(cmp.Or(o.srv.cfg.groupFrozen, groupFrozen)) {
		return o.errHold("the time was over")
	}
	h.b.frozen = !o.srv.cfg.Unsafe.NoFreeze
	seq := o.cur.seq
	if h.taken, err = o.run(h.op, 0); err != nil {
		return err
	}
	h.seq = seq
	o.unanswered[meta.Generation(h.taken.Off)] = h.late
	o.snapped = max(o.snapped, min(seq, o.newest()))
	return nil
}

// releaseHold ends the hold. It fails unless no change was answered since the snapshot was
// taken, here or by another owner: this one has the right to the volume still. Errors:
// Again.
func (o *owner) releaseHold(id uint64) error {
	o.mu.Lock()
	defer o.mu.Unlock()
	h, err := o.holding(id)
	if err != nil {
		return err
	}
	defer o.endHold(h)
	if h.taken == nil || o.leaving != nil || o.outsideLease() {
		return o.errHold("the snapshot was not taken, or the volume goes to another owner")
	}
	return nil
}

// ---- what becomes of groups

// member finds the snapshot of a group that is there, also if it is hidden.
func (o *owner) member(name string, id uint64) (meta.Snapshot, bool, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.failed != nil {
		return meta.Snapshot{}, false, o.failed
	}
	all, err := namespace.Snapshots(&view{o: o})
	i := slices.IndexFunc(all, func(s meta.Snapshot) bool { return s.Name == name && s.Group == id && !s.Deleting })
	if err != nil || i < 0 {
		return meta.Snapshot{}, false, err
	}
	return all[i], true, nil
}

// deleteMember deletes the snapshot of a group that is ready or aborted: of the latter
// there will be none afterwards. One that is overdue it aborts. Errors: Busy (it is
// undecided, or somebody pinned the snapshot), NotOwner (perhaps: then another knows
// whether there is one).
func (o *owner) deleteMember(ctx context.Context, name string, id uint64) error {
	if err := o.await(ctx, o.recovered); err != nil {
		return err
	}
	g, err := o.srv.endOverdue(ctx, name, id)
	if err == nil && (g.ID != id || g.State == meta.GroupTaking) {
		err = meta.E("delete group", meta.Busy, name, errors.New("it is another one, or being taken"))
	}
	if err != nil {
		return err
	}
	o.mu.Lock()
	if o.group != nil && o.group.id == id {
		o.endHold(o.group)
	}
	o.mu.Unlock()
	sn, there, err := o.member(name, id)
	switch {
	case err != nil:
		return err
	case !there:
		return o.surelyNone(ctx)
	case g.State == meta.GroupAborted:
		return o.deleteGeneration(ctx, sn)
	}
	if _, err = o.deleteUnpinned(ctx, name, sn.At, true); err != nil {
		return err
	}
	o.mu.Lock()
	delete(o.groups, id) // its record goes, and the snapshot may stay for its clones
	o.mu.Unlock()
	return nil
}

// surelyNone is nil if the next owner, too, will find that a snapshot is not there which
// this one does not find: its deletion is in the journal, and nobody else can have taken
// it. Errors: NotOwner.
func (o *owner) surelyNone(ctx context.Context) error {
	o.mu.Lock()
	wait := o.untilDurable(o.snapped)
	o.mu.Unlock()
	if err := o.await(ctx, wait); err != nil {
		return err
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	switch {
	case o.failed != nil:
		return o.failed
	case o.leaving != nil || o.outsideLease():
		return meta.E("delete group", meta.NotOwner, "", fmt.Errorf("volume %d goes to another owner, or may have one", o.vol))
	}
	return nil
}

// ownerOfMember is ownerFor also of a volume in the trash: that may come back, with all
// its snapshots. Errors: those of ownerFor, NoSuchVolume only of one that is gone for good.
func (s *Server) ownerOfMember(ctx context.Context, v meta.VolumeID) (*owner, error) {
	for range 4 {
		row, err := s.cfg.Cluster.Volume(ctx, v)
		if err != nil {
			return nil, err
		}
		if row.State == cluster.VolumeDeleting {
			return nil, meta.E("delete group", meta.NoSuchVolume, row.Name, fmt.Errorf("it is %s", row.State))
		}
		o, err := s.ownerAs(ctx, v, row.State)
		if !errors.Is(err, meta.NoSuchVolume) {
			return o, err
		}
	}
	return nil, meta.E("delete group", meta.Busy, fmt.Sprint(v), errors.New("the volume goes to the trash and comes back: try again"))
}

// decided leaves out of a list of snapshots what belongs to groups that are undecided
// or aborted, or whose records can't be read. What has to be done about those is done by
// dropUndecided.
func (o *owner) decided(all []meta.Snapshot) ([]meta.Snapshot, error) {
	var err error
	all = slices.DeleteFunc(all, func(s meta.Snapshot) bool {
		if s.Group == 0 || s.Deleting || err != nil {
			return false
		}
		var open bool
		if open, _, err = o.undecided(s); unreadable(err) {
			err = nil // dropUndecided tells
		}
		return open
	})
	return all, err
}

// unreadable: a record is damaged, or of a later version. That stays, and concerns one
// group.
func unreadable(err error) bool { return errors.Is(err, meta.Version) || errors.Is(err, meta.Corrupt) }

// undecided tells whether a snapshot is to be hidden: it belongs to a group that is
// undecided or aborted, which it gives too; or one whose record can't be read (Version,
// Corrupt); or it is gone meanwhile.
func (o *owner) undecided(s meta.Snapshot) (bool, meta.Group, error) {
	o.mu.Lock()
	_, known := o.groups[s.Group]
	o.mu.Unlock()
	if known {
		return false, meta.Group{}, nil
	}
	g, err := o.srv.cfg.Cluster.Group(o.ctx, s.Name)
	switch {
	case err != nil && !errors.Is(err, meta.NotFound):
		return unreadable(err), g, err
	case err == nil && g.ID == s.Group && g.State != meta.GroupReady:
		return true, g, nil
	}
	ready := err == nil && g.ID == s.Group
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.failed != nil {
		return false, g, o.failed
	}
	// Since the caller saw it it may have gone, and its record after it.
	all, err := namespace.Snapshots(&view{o: o})
	if err != nil || !slices.ContainsFunc(all, func(x meta.Snapshot) bool { return x.At == s.At && !x.Deleting }) {
		return err == nil, meta.Group{}, err
	}
	if o.groups == nil {
		o.groups = map[uint64]bool{}
	}
	o.groups[s.Group] = ready
	return false, g, nil
}

// dropUndecided deletes snapshots of groups that are aborted, and aborts those that are
// overdue. more: there are some that have to be looked at again. One that fails stops no
// other.
func (o *owner) dropUndecided() (more bool, err error) {
	o.mu.Lock()
	if o.failed != nil {
		o.mu.Unlock()
		return false, o.failed
	}
	all, err := namespace.Snapshots(&view{o: o})
	o.mu.Unlock()
	if err != nil {
		return false, err
	}
	var errs []error
	for _, s := range all {
		if s.Group == 0 || s.Deleting {
			continue
		}
		open, g, err := o.undecided(s)
		if err == nil && open && g.State == meta.GroupTaking {
			if g, err = o.srv.abortOverdue(o.ctx, g); errors.Is(err, meta.Again) {
				more = true // it was decided this moment
				continue
			}
		}
		if err == nil && open && g.State == meta.GroupAborted {
			o.log.Warn("a snapshot goes whose group was not completed", "name", s.Name, "generation", s.At)
			err = o.deleteGeneration(o.ctx, s)
			open = err != nil
		}
		if err != nil {
			errs = append(errs, fmt.Errorf("the group of snapshot %s: %w", s.Name, err))
		}
		more = more || open
	}
	return more || len(errs) > 0, errors.Join(errs...)
}

func overdue(g *meta.Group) bool { return time.Since(time.Unix(0, int64(g.Began))) > groupOverdue }

// abortOverdue aborts a group that is undecided for too long: who took it is gone. Others
// it gives back as they are. Errors: Again (it was decided this moment).
func (s *Server) abortOverdue(ctx context.Context, g meta.Group) (meta.Group, error) {
	if g.State != meta.GroupTaking || !overdue(&g) {
		return g, nil
	}
	g.State = meta.GroupAborted
	return s.cfg.Cluster.PutGroup(ctx, g)
}

// endOverdue reads the record of a group, and aborts the one of this id if it is
// overdue. Errors: NotFound.
func (s *Server) endOverdue(ctx context.Context, name string, id uint64) (meta.Group, error) {
	for {
		g, err := s.cfg.Cluster.Group(ctx, name)
		if err == nil && g.ID == id {
			g, err = s.abortOverdue(ctx, g)
		}
		if !errors.Is(err, meta.Again) {
			return g, err
		}
	}
}

// ---- requests

// groupOp answers a request about group snapshots.
func (s *Server) groupOp(ctx context.Context, sess *session, m *wire.Admin, re *wire.AdminRe) error {
	switch m.Op {
	case wire.AdminGroups:
		return s.listGroups(ctx, sess, m, re)
	case wire.AdminGroupPut:
		var q wire.GroupRequest
		if err := readBody(m, &q); err != nil {
			return err
		}
		g, err := s.putGroup(ctx, m.Entry, &q)
		if err != nil {
			return err
		}
		return reportJSON(re, g)
	}
	var q wire.GroupStep
	if err := readBody(m, &q); err != nil {
		return err
	}
	if !meta.IsGroupID(q.ID) {
		return meta.E("take group", meta.Protocol, m.Entry, fmt.Errorf("%d can't be a group's", q.ID))
	}
	find := s.ownerFor
	if q.Step == wire.GroupDelete {
		find = s.ownerOfMember
	}
	o, err := find(ctx, m.Volume)
	if err != nil {
		return err
	}
	switch q.Step {
	case wire.GroupHold:
		if err := o.mayMirror(ctx, sess, "snapshot"); err != nil {
			return err
		}
		return o.hold(ctx, m.Entry, q)
	case wire.GroupReady:
		return o.awaitReady(ctx, q.ID)
	case wire.GroupTake:
		x, err := o.takeHeld(ctx, q.ID)
		if err != nil {
			return err
		}
		return reportJSON(re, x)
	case wire.GroupRelease:
		return o.releaseHold(q.ID)
	case wire.GroupDelete:
		return o.deleteMember(ctx, m.Entry, q.ID)
	}
	return meta.E("take group", meta.NotSupported, q.Step, nil)
}

// listGroups lists those whose volumes the session may administer all.
func (s *Server) listGroups(ctx context.Context, sess *session, m *wire.Admin, re *wire.AdminRe) error {
	var all []meta.Group
	var err error
	if m.Entry != "" {
		var g meta.Group
		if g, err = s.cfg.Cluster.Group(ctx, m.Entry); err == nil {
			all = append(all, g)
		}
	} else {
		all, err = s.cfg.Cluster.Groups(ctx)
	}
	if err != nil {
		return err
	}
	all = slices.DeleteFunc(all, func(g meta.Group) bool {
		return m.Volume != 0 && !slices.Contains(g.Volumes(), m.Volume) || sess.who.Role == peering.Client && sess.mayAdmin(m.Op, g.Volumes()...) != nil
	})
	if all == nil {
		all = []meta.Group{}
	}
	return reportJSON(re, all)
}

// putGroup makes, decides or removes the record of a group. Errors: Exists (there is
// one of that name that is ready), Busy (it is being taken), Again (it was decided
// otherwise), NotFound.
func (s *Server) putGroup(ctx context.Context, name string, q *wire.GroupRequest) (meta.Group, error) {
	const op = "take group"
	c := s.cfg.Cluster
	if n := len(q.Volumes); n == 0 || n > meta.MaxGroup || !slices.IsSorted(q.Volumes) || len(slices.Compact(slices.Clone(q.Volumes))) != n {
		return meta.Group{}, meta.E(op, meta.Invalid, name, fmt.Errorf("a group has 1 to %d volumes, each once", meta.MaxGroup))
	}
	if !meta.IsGroupID(q.ID) {
		return meta.Group{}, meta.E(op, meta.Protocol, name, fmt.Errorf("%d can't be a group's", q.ID))
	}
	if err := checkSnapshotName(name); err != nil {
		return meta.Group{}, err
	}
	g, err := c.Group(ctx, name)
	absent := errors.Is(err, meta.NotFound)
	if err != nil && !absent {
		return g, err
	}
	if !absent && !slices.Equal(g.Volumes(), q.Volumes) {
		return g, meta.E(op, meta.Exists, name, errors.New("there is a group of this name, of other volumes"))
	}
	mine := !absent && g.ID == q.ID
	switch q.Do {
	case wire.GroupBegin:
		switch {
		case absent:
			g = meta.Group{Version: meta.GroupVersion, Name: name, ID: q.ID, State: meta.GroupTaking, Began: meta.Time(time.Now().UnixNano())}
			for _, v := range q.Volumes {
				if row, err := c.Volume(ctx, v); err != nil {
					return g, err
				} else if row.State != cluster.VolumeActive {
					return g, meta.E(op, meta.NoSuchVolume, row.Name, fmt.Errorf("it is %s", row.State))
				}
				g.Members = append(g.Members, meta.GroupMember{Volume: v})
			}
			return c.PutGroup(ctx, g)
		case mine || g.State == meta.GroupAborted:
			return g, nil
		case g.State == meta.GroupReady:
			return g, meta.E(op, meta.Exists, name, nil)
		}
		if g, err = s.abortOverdue(ctx, g); err == nil && g.State == meta.GroupTaking {
			err = meta.E(op, meta.Busy, name, errors.New("it is being taken"))
		}
		return g, err
	case wire.GroupDecide:
		switch {
		case !mine || g.State == meta.GroupAborted:
			return g, meta.E(op, meta.Again, name, errors.New("it was given up"))
		case g.State == meta.GroupReady:
			return g, nil
		}
		if len(q.Members) != len(q.Volumes) || !slices.Equal((&meta.Group{Members: q.Members}).Volumes(), q.Volumes) {
			return g, meta.E(op, meta.Protocol, name, errors.New("not a snapshot of each volume"))
		}
		g.State, g.Members = meta.GroupReady, q.Members
		return c.PutGroup(ctx, g)
	case wire.GroupAbort:
		if !mine || g.State != meta.GroupTaking {
			return g, err
		}
		g.State = meta.GroupAborted
		return c.PutGroup(ctx, g)
	case wire.GroupForget:
		if !mine {
			return g, nil
		}
		if g, err = s.abortOverdue(ctx, g); err != nil { // no volume of it is there to have done so
			return g, err
		}
		if g.State == meta.GroupTaking {
			return g, meta.E(op, meta.Busy, name, errors.New("it is being taken"))
		}
		return g, c.DropGroup(ctx, g)
	}
	return g, meta.E(op, meta.NotSupported, q.Do, nil)
}
