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
)

// Snapshots of several volumes at one moment. The client leads each volume's owner through the
// same steps (meta/admin, TakeGroup):
//
//  1. hold: raise the barrier, in the order of volumes;
//  2. ready: exclusive leases are back, no file ends open any more;
//  3. take: once all owners are ready. From now on the owner answers no change. The
//     snapshot is taken, hidden;
//  4. release: once all snapshots are taken. Fails if the owner answered changes since
//     step 3.
//
// The moment is any between the last take and the first release: no owner answers changes
// then, so each snapshot is the volume at that moment. The barrier of a single volume's
// snapshot would not do, since an owner still answers changes behind such a barrier. A client
// could create a name in the first volume after its snapshot, and then a name in the second
// volume before its snapshot: the group would have the effect without its cause.
//
// A hold soon ends by itself, and the group fails with it: the client may be gone, and the
// owners do not know one another. The group's record decides. The client makes the record,
// undecided, before the first hold, and the snapshots stay hidden. Then the client changes the
// record to ready or aborted. An owner aborts a record that is still undecided after
// groupOverdue. Each change is a compare-and-swap, so only one succeeds. The owners delete the
// snapshots of an aborted group, and the record is dropped after the last snapshot: see
// decided.

const (
	// groupHold bounds how long a group's barrier stays up before changes stop. groupFrozen
	// bounds how long changes are held up.
	groupHold   = 4 * time.Second
	groupFrozen = time.Second
	// groupOverdue is the age after which any server aborts an undecided group. No attempt of
	// a live client takes so long (meta/admin).
	groupOverdue = 30 * time.Second
)

// groupHolding is a group's barrier at a volume. The owner's mu guards all fields but ready.
type groupHolding struct {
	id    uint64
	b     *barrier
	op    *meta.TakeSnapshot
	began time.Time
	over  *time.Timer        // ends the hold
	stop  context.CancelFunc // ends the waits of makeReady
	// ready is closed when the volume can be snapshot, or failed says why not.
	ready  chan struct{}
	failed error
	late   unanswered
	taken  *meta.Result // of op
	seq    meta.Seq     // the entry that must be durable for taken
}

// groupSnapshots is an owner's state of group snapshots. The owner's mu guards it.
type groupSnapshots struct {
	k         *kernel
	clones    *clones
	leases    *leases
	openEnds  *openEnds
	snapshots *snapshots

	held  *groupHolding   // group snapshot under way; nil: none
	known map[uint64]bool // group snapshots already decided; false: the group has no record
}

func (gs *groupSnapshots) errHold(why string) error {
	return meta.E("take group", meta.Again, gs.k.subject(), errors.New(why))
}

// holding gives the hold of a group. The caller holds the owner's mu.
func (gs *groupSnapshots) holding(id uint64) (*groupHolding, error) {
	switch h := gs.held; {
	case gs.k.failed != nil:
		return nil, gs.k.failed
	case h == nil || h.id != id:
		return nil, gs.errHold("the time was over, or the volume has another owner by now")
	default:
		return h, nil
	}
}

// endHold lets the volume go on. The caller holds the owner's mu.
func (gs *groupSnapshots) endHold(h *groupHolding) {
	if gs.held != h {
		return
	}
	h.over.Stop()
	h.stop()
	gs.held = nil
	gs.leases.lowerBarrier()
	gs.k.log.Debug("a group's barrier is down", "name", h.op.Name, "held", time.Since(h.began).Round(time.Millisecond), "taken", h.taken != nil)
}

// hold raises the barrier for the undecided group name, and begins to recall exclusive leases.
// strict: the group fails if some clients do not commit. Errors: those of mayTake, Again.
func (gs *groupSnapshots) hold(ctx context.Context, name string, id uint64, strict bool) error {
	k := gs.k
	if err := k.await(ctx, k.recovered); err != nil {
		return err
	}
	op := &meta.TakeSnapshot{Name: name, Token: id}
	if err := gs.leases.lockWithoutBarrier(ctx, func() bool { return gs.held != nil && gs.held.id == id }); err != nil {
		return err
	}
	if gs.held != nil {
		k.mu.Unlock()
		return nil // the request came twice
	}
	before, err := gs.snapshots.mayTake(op)
	if err == nil && before != nil {
		err = gs.errHold("it was taken before")
	}
	if err != nil {
		k.mu.Unlock()
		return err
	}
	h := &groupHolding{
		id: id, op: op, began: time.Now(), ready: make(chan struct{}), b: gs.leases.raiseBarrier(barrierWait),
	}
	waiting, stop := context.WithCancel(k.ctx)
	h.stop = stop
	h.over = time.AfterFunc(cmp.Or(k.srv.cfg.groupHold, groupHold), func() { gs.giveUp(h) })
	gs.held = h
	k.mu.Unlock()
	k.wg.Go(func() { gs.makeReady(waiting, h, strict) })
	// Read the record only after o.groups.held is set: a server that aborts the group from now on
	// ends this hold, too.
	g, err := k.srv.cfg.Cluster.Group(ctx, name)
	if err == nil && (g.ID != id || g.State != meta.GroupTaking || !slices.Contains(g.Volumes(), k.vol)) {
		err = gs.errHold("the group was given up")
	}
	if err != nil {
		gs.giveUp(h)
	}
	return err
}

func (gs *groupSnapshots) giveUp(h *groupHolding) {
	gs.k.mu.Lock()
	gs.endHold(h)
	gs.k.mu.Unlock()
}

// makeReady recalls exclusive leases and settles the ends of files.
func (gs *groupSnapshots) makeReady(ctx context.Context, h *groupHolding, strict bool) {
	k := gs.k
	late, err := gs.leases.recallWriters(ctx, h.b.patience)
	sealing, end := context.WithTimeout(k.ctx, barrierSeals)
	defer end()
	var goOn *seals
	k.mu.Lock()
	h.late = late
	h.late.known = true
	if gs.held != h {
		err = gs.errHold("the time was over")
	}
	if err == nil && strict && late.files > 0 {
		err = meta.E("take group", meta.Unavailable, k.subject(), fmt.Errorf("not all written bytes have arrived yet: %v", late))
	}
	if err == nil {
		goOn, err = gs.openEnds.cut(sealing, h.b)
	}
	if err == nil && goOn != nil {
		err = gs.errHold("files are still being appended to")
	}
	if err == nil && gs.held != h {
		err = gs.errHold("the time was over")
	}
	h.b.cut = true // nothing ends open from here on
	if h.failed = err; err != nil {
		gs.endHold(h)
	}
	close(h.ready)
	k.mu.Unlock()
	if goOn != nil {
		if err := goOn.wait(); err != nil { // the next attempt finds the chunks sealed
			k.log.Warn("a group's snapshot waits for the ends of files", "name", h.op.Name, "error", err)
		}
	}
}

// awaitReady waits until the volume can be snapshot. Errors: Again, Unavailable.
func (gs *groupSnapshots) awaitReady(ctx context.Context, id uint64) error {
	k := gs.k
	k.mu.Lock()
	h, err := gs.holding(id)
	k.mu.Unlock()
	if err == nil {
		err = k.await(ctx, h.ready)
	}
	if err != nil {
		return err
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	return h.failed
}

// takeHeld takes the snapshot of a volume that is ready. From then on the owner answers no
// change until the hold ends. Errors: Again, and those of meta.TakeSnapshot.
func (gs *groupSnapshots) takeHeld(ctx context.Context, id uint64) (m meta.GroupMember, err error) {
	k := gs.k
	k.mu.Lock()
	h, err := gs.holding(id)
	if err == nil && !h.b.cut {
		err = gs.errHold("the volume is not ready")
	}
	if err == nil && h.taken == nil {
		if err = gs.takeFrozen(h); err != nil {
			gs.endHold(h)
		}
	}
	if err != nil {
		k.mu.Unlock()
		return m, err
	}
	at, late := meta.Generation(h.taken.Off), h.late
	wait := k.untilDurable(h.seq)
	k.mu.Unlock()
	if err := k.await(ctx, wait); err != nil {
		return m, err
	}
	k.tasks.snapshots.Wake() // the task checks the group's record
	k.mu.Lock()
	defer k.mu.Unlock()
	all, err := namespace.Snapshots(k.view())
	if err != nil {
		return m, err
	}
	i := slices.IndexFunc(all, func(s meta.Snapshot) bool { return s.At == at && !s.Deleting })
	if i < 0 {
		return m, gs.errHold("the group was given up")
	}
	s := all[i]
	return meta.GroupMember{Volume: k.vol, At: at, Created: s.Created, Inodes: s.Inodes, Bytes: s.Bytes, Unanswered: uint64(late.files), UnansweredBy: late.clients}, nil
}

// takeFrozen stops changes, and takes the snapshot in the same moment. The caller holds the owner's mu.
func (gs *groupSnapshots) takeFrozen(h *groupHolding) (err error) {
	k := gs.k
	if !h.over.Reset(cmp.Or(k.srv.cfg.groupFrozen, groupFrozen)) {
		return gs.errHold("the time was over")
	}
	h.b.frozen = !k.srv.cfg.Unsafe.NoFreeze
	seq := k.cur.seq
	if h.taken, err = k.run(h.op, 0); err != nil {
		return err
	}
	h.seq = seq
	gs.snapshots.unanswered[meta.Generation(h.taken.Off)] = h.late
	gs.snapshots.snapped = max(gs.snapshots.snapped, min(seq, k.newest()))
	return nil
}

// releaseHold ends the hold. Success means that no change was answered since the snapshot was
// taken: this owner held changes up and still has the right to the volume, so no other owner
// answered either. Errors: Again.
func (gs *groupSnapshots) releaseHold(id uint64) error {
	k := gs.k
	k.mu.Lock()
	defer k.mu.Unlock()
	h, err := gs.holding(id)
	if err != nil {
		return err
	}
	defer gs.endHold(h)
	if h.taken == nil || k.leaving != nil || k.outsideLease() {
		return gs.errHold("the snapshot was not taken, or the volume goes to another owner")
	}
	return nil
}

// ---- the decision about a group, and its consequences

// member returns the group's snapshot of this volume, also a hidden snapshot, but not a
// snapshot being deleted.
func (gs *groupSnapshots) member(name string, id uint64) (meta.Snapshot, bool, error) {
	k := gs.k
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.failed != nil {
		return meta.Snapshot{}, false, k.failed
	}
	all, err := namespace.Snapshots(k.view())
	i := slices.IndexFunc(all, func(s meta.Snapshot) bool { return s.Name == name && s.Group == id && !s.Deleting })
	if err != nil || i < 0 {
		return meta.Snapshot{}, false, err
	}
	return all[i], true, nil
}

// deleteMember deletes the snapshot of a ready or aborted group. If the group is overdue,
// deleteMember aborts it first. After success for an aborted group, the volume will have no
// such snapshot. Errors: Busy (the group is undecided, or the snapshot is pinned), NotOwner
// (another server may own the volume and know of the snapshot).
func (gs *groupSnapshots) deleteMember(ctx context.Context, name string, id uint64) error {
	k := gs.k
	if err := k.await(ctx, k.recovered); err != nil {
		return err
	}
	g, err := groupRecords{k.srv.cfg.Cluster}.endOverdue(ctx, name, id)
	if err == nil && (g.ID != id || g.State == meta.GroupTaking) {
		err = meta.E("delete group", meta.Busy, name, errors.New("it is another one, or being taken"))
	}
	if err != nil {
		return err
	}
	k.mu.Lock()
	if gs.held != nil && gs.held.id == id {
		gs.endHold(gs.held)
	}
	k.mu.Unlock()
	sn, there, err := gs.member(name, id)
	switch {
	case err != nil:
		return err
	case !there:
		return gs.surelyNone(ctx)
	case g.State == meta.GroupAborted:
		return gs.snapshots.deleteGeneration(ctx, sn)
	}
	if _, err = gs.clones.deleteUnpinned(ctx, name, sn.At, true); err != nil {
		return err
	}
	k.mu.Lock()
	delete(gs.known, id) // the record will be dropped; the snapshot may stay for clones
	k.mu.Unlock()
	return nil
}

// surelyNone is called after this owner did not find a snapshot. It returns nil if the next
// owner will not find the snapshot either: the deletion is in the journal, and no other server
// can have taken the snapshot. Errors: NotOwner.
func (gs *groupSnapshots) surelyNone(ctx context.Context) error {
	k := gs.k
	k.mu.Lock()
	wait := k.untilDurable(gs.snapshots.snapped)
	k.mu.Unlock()
	if err := k.await(ctx, wait); err != nil {
		return err
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	switch {
	case k.failed != nil:
		return k.failed
	case k.leaving != nil || k.outsideLease():
		return meta.E("delete group", meta.NotOwner, "", fmt.Errorf("volume %d goes to another owner, or may have one", k.vol))
	}
	return nil
}

// decided removes from a list the snapshots of groups that are undecided or aborted, or have
// an unreadable record. dropUndecided handles the removed snapshots.
func (gs *groupSnapshots) decided(all []meta.Snapshot) ([]meta.Snapshot, error) {
	var err error
	all = slices.DeleteFunc(all, func(s meta.Snapshot) bool {
		if s.Group == 0 || s.Deleting || err != nil {
			return false
		}
		var open bool
		if open, _, err = gs.undecided(s); unreadable(err) {
			err = nil // dropUndecided tells
		}
		return open
	})
	return all, err
}

// unreadable reports whether a record is damaged or of a later version. Such an error lasts,
// and concerns only the record's group.
func unreadable(err error) bool { return errors.Is(err, meta.Version) || errors.Is(err, meta.Corrupt) }

// undecided reports whether a snapshot must stay hidden: the snapshot's group is undecided or
// aborted (then undecided also returns the group), or the group's record can't be read (errors
// Version, Corrupt), or the snapshot was deleted meanwhile.
func (gs *groupSnapshots) undecided(s meta.Snapshot) (bool, meta.Group, error) {
	k := gs.k
	k.mu.Lock()
	_, known := gs.known[s.Group]
	k.mu.Unlock()
	if known {
		return false, meta.Group{}, nil
	}
	g, err := k.srv.cfg.Cluster.Group(k.ctx, s.Name)
	switch {
	case err != nil && !errors.Is(err, meta.NotFound):
		return unreadable(err), g, err
	case err == nil && g.ID == s.Group && g.State != meta.GroupReady:
		return true, g, nil
	}
	ready := err == nil && g.ID == s.Group
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.failed != nil {
		return false, g, k.failed
	}
	// The snapshot may be deleted since the caller listed it, and then the record.
	all, err := namespace.Snapshots(k.view())
	if err != nil || !slices.ContainsFunc(all, func(x meta.Snapshot) bool { return x.At == s.At && !x.Deleting }) {
		return err == nil, meta.Group{}, err
	}
	if gs.known == nil {
		gs.known = map[uint64]bool{}
	}
	gs.known[s.Group] = ready
	return false, g, nil
}

// dropUndecided deletes the snapshots of aborted groups, and aborts overdue groups. more: some
// groups need another look. An error about a group does not stop the work on other groups.
func (gs *groupSnapshots) dropUndecided() (more bool, err error) {
	k := gs.k
	k.mu.Lock()
	if k.failed != nil {
		k.mu.Unlock()
		return false, k.failed
	}
	all, err := namespace.Snapshots(k.view())
	k.mu.Unlock()
	if err != nil {
		return false, err
	}
	var errs []error
	for _, s := range all {
		if s.Group == 0 || s.Deleting {
			continue
		}
		open, g, err := gs.undecided(s)
		if err == nil && open && g.State == meta.GroupTaking {
			if g, err = (groupRecords{k.srv.cfg.Cluster}).abortOverdue(k.ctx, g); errors.Is(err, meta.Again) {
				more = true // the group was decided this moment
				continue
			}
		}
		if err == nil && open && g.State == meta.GroupAborted {
			k.log.Warn("a snapshot goes whose group was not completed", "name", s.Name, "generation", s.At)
			err = gs.snapshots.deleteGeneration(k.ctx, s)
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

// abortOverdue aborts a group that is undecided for too long: its client is gone. abortOverdue
// returns any other group unchanged. Errors: Again (the group was decided this moment).
func (r groupRecords) abortOverdue(ctx context.Context, g meta.Group) (meta.Group, error) {
	if g.State != meta.GroupTaking || !overdue(&g) {
		return g, nil
	}
	g.State = meta.GroupAborted
	return r.cluster.PutGroup(ctx, g)
}

// endOverdue reads the record of a group, and aborts the group if the record has this id and
// is overdue. Errors: NotFound.
func (r groupRecords) endOverdue(ctx context.Context, name string, id uint64) (meta.Group, error) {
	for {
		g, err := r.cluster.Group(ctx, name)
		if err == nil && g.ID == id {
			g, err = r.abortOverdue(ctx, g)
		}
		if !errors.Is(err, meta.Again) {
			return g, err
		}
	}
}

// groupRecords changes the records of groups as callers ask.
type groupRecords struct{ cluster Cluster }

// groupWanted is the group that a caller means: the record's name and id, and the group's volumes,
// ascending.
type groupWanted struct {
	name    string
	id      uint64
	volumes []meta.VolumeID
}

const opGroup = "take group"

// read reads the record of a group's name. mine: the record is of this attempt. absent: there is
// no record. Errors: Invalid, NameTooLong, Exists (a group of other volumes has the name).
func (r groupRecords) read(ctx context.Context, w *groupWanted) (g meta.Group, mine, absent bool, err error) {
	slices.Sort(w.volumes)
	if n := len(w.volumes); n == 0 || n > meta.MaxGroup || len(slices.Compact(slices.Clone(w.volumes))) != n {
		return g, false, false, errGroupVolumes(w.name)
	}
	if err := checkGroupID(w.name, w.id); err != nil {
		return g, false, false, err
	}
	if err := checkSnapshotName(w.name); err != nil {
		return g, false, false, err
	}
	g, err = r.cluster.Group(ctx, w.name)
	switch {
	case errors.Is(err, meta.NotFound):
		return g, false, true, nil
	case err != nil:
		return g, false, false, err
	case !slices.Equal(g.Volumes(), w.volumes):
		return g, false, false, meta.E(opGroup, meta.Exists, w.name, errors.New("there is a group of this name, of other volumes"))
	}
	return g, g.ID == w.id, false, nil
}

func errGroupVolumes(name string) error {
	return meta.E(opGroup, meta.Invalid, name, fmt.Errorf("a group has 1 to %d volumes, each once", meta.MaxGroup))
}

func checkGroupID(name string, id uint64) error {
	if !meta.IsGroupID(id) {
		return meta.E(opGroup, meta.Invalid, name, fmt.Errorf("%d can't be a group's id, which is even and not zero", id))
	}
	return nil
}

// begin makes a record, undecided. If an aborted group has the name, begin returns the aborted
// group. Errors: as of read; Exists (a ready group has the name), Busy (the group is being taken),
// NoSuchVolume, Again (another caller changed the record).
func (r groupRecords) begin(ctx context.Context, w *groupWanted) (meta.Group, error) {
	g, mine, absent, err := r.read(ctx, w)
	switch {
	case err != nil || mine || g.State == meta.GroupAborted:
		return g, err
	case g.State == meta.GroupReady:
		return g, meta.E(opGroup, meta.Exists, w.name, nil)
	case !absent:
		if g, err = r.abortOverdue(ctx, g); err == nil && g.State == meta.GroupTaking {
			err = meta.E(opGroup, meta.Busy, w.name, errors.New("it is being taken"))
		}
		return g, err
	}
	g = meta.Group{Version: meta.GroupVersion, Name: w.name, ID: w.id, State: meta.GroupTaking, Began: meta.Time(time.Now().UnixNano())}
	for _, v := range w.volumes {
		if row, err := r.cluster.Volume(ctx, v); err != nil {
			return g, err
		} else if row.State != cluster.VolumeActive {
			return g, meta.E(opGroup, meta.NoSuchVolume, row.Name, fmt.Errorf("it is %s", row.State))
		}
		g.Members = append(g.Members, meta.GroupMember{Volume: v})
	}
	return r.cluster.PutGroup(ctx, g)
}

// decide sets a group ready. Errors: as of read; Invalid (members is not a member for each volume,
// in order), Again (the group was decided otherwise, or another caller changed the record).
func (r groupRecords) decide(ctx context.Context, w *groupWanted, members []meta.GroupMember) (meta.Group, error) {
	g, mine, _, err := r.read(ctx, w)
	switch {
	case err != nil || mine && g.State == meta.GroupReady:
		return g, err
	case !mine || g.State == meta.GroupAborted:
		return g, meta.E(opGroup, meta.Again, w.name, errors.New("it was given up"))
	case !slices.Equal((&meta.Group{Members: members}).Volumes(), w.volumes):
		return g, meta.E(opGroup, meta.Invalid, w.name, errors.New("not a snapshot of each volume"))
	}
	g.State, g.Members = meta.GroupReady, members
	return r.cluster.PutGroup(ctx, g)
}

// abort aborts an undecided group. It returns the record, also of a group that is decided, and of
// another group of the name. Errors: as of read; NotFound, Again (another caller changed the
// record).
func (r groupRecords) abort(ctx context.Context, w *groupWanted) (meta.Group, error) {
	g, mine, absent, err := r.read(ctx, w)
	if absent {
		err = meta.E(opGroup, meta.NotFound, w.name, errors.New("there is no such group of snapshots"))
	}
	if err != nil || !mine || g.State != meta.GroupTaking {
		return g, err
	}
	g.State = meta.GroupAborted
	return r.cluster.PutGroup(ctx, g)
}

// forget deletes the record of a decided or aborted group. Errors: as of read; Busy (the group is
// being taken), Again (another caller changed the record).
func (r groupRecords) forget(ctx context.Context, w *groupWanted) error {
	g, mine, _, err := r.read(ctx, w)
	if err != nil || !mine {
		return err
	}
	if g, err = r.abortOverdue(ctx, g); err != nil { // no owner of a member is left to abort the group
		return err
	}
	if g.State == meta.GroupTaking {
		return meta.E(opGroup, meta.Busy, w.name, errors.New("it is being taken"))
	}
	return r.cluster.DropGroup(ctx, g)
}
