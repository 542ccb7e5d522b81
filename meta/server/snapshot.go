package server

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/namespace"
)

// Snapshots of a volume (rule 8). The owner runs all operations in one order, so a snapshot
// between two operations is a state that existed. But under an exclusive lease a client
// acknowledges writes by itself. So before a snapshot:
//
//  1. the owner grants no exclusive lease and recalls all exclusive leases. Clients
//     hold their writers, commit buffered data, synced, and close open-ended extents;
//     a client acknowledges no write after its answer. The owner neither waits for an
//     absent client nor ends its session. A client unable to commit in time reports
//     that, keeps its data and its lease, and goes on;
//  2. if a client does not answer in time, or holds on, the owner seals the client's
//     open-ended extents, at least at the synced length, under a higher fence;
//  3. TakeSnapshot runs, the owner grants exclusive leases again, and the caller waits
//     for the journal.
//
// The snapshot then contains every write acknowledged by write(), except the writes of clients
// that did not answer. The barrier concerns only files being written; creating, renaming,
// reading and looking up go on.
//
// Slow seals (a chunk server is unreachable) go on with the barrier lowered. Clients write
// meanwhile, so the owner raises the barrier again after the seals.

const (
	// barrierWait is how long clients may take to give leases back.
	barrierWait = time.Second
	// barrierHeld is how long the barrier stays up for seals.
	barrierHeld = time.Second
	// barrierSeals bounds the time of all seals together, and barrierTries how often the owner
	// raises the barrier.
	barrierSeals = 10 * time.Second
	barrierTries = 4
)

// takeHow are the options of snapshots.take.
type takeHow struct {
	// filler, if not nil, is the caller's session; the session must be filling this mirror's
	// target when the snapshot is taken.
	filler *session
	// strict: no snapshot unless every client has committed its buffered data.
	strict bool
}

// endsOpen reports whether an operation leaves an extent open-ended.
func endsOpen(op meta.Op) bool {
	w, ok := op.(*meta.Write)
	return ok && slices.ContainsFunc(w.Extents, func(e meta.Extent) bool { return e.OpenEnded })
}

// snapshots takes, finds and deletes the snapshots of a volume, which are records in the store.
// The owner's mu guards the fields.
type snapshots struct {
	k        *kernel
	groups   *groupSnapshots
	leases   *leases
	mirror   *mirrorTarget
	openEnds *openEnds

	snapped meta.Seq // last entry that takes or deletes a snapshot
	// unanswered maps each snapshot taken by this owner to the files with leases not given back
	// by clients.
	unanswered map[meta.Generation]unanswered
	freed      uint64 // bytes freed by the deletion of a snapshot under way
}

// take takes a snapshot, and returns which files the snapshot has only as last synced.
// Errors: the errors of meta.TakeSnapshot; Unavailable (a client's open chunk can't be sealed
// now; or, in strict mode, some files are only as last synced), ReadOnly (how.filler does not
// fill this target), NotOwner.
func (ss *snapshots) take(ctx context.Context, op *meta.TakeSnapshot, how takeHow) (meta.Snapshot, unanswered, error) {
	k := ss.k
	if err := k.await(ctx, k.recovered); err != nil {
		return meta.Snapshot{}, unanswered{}, err
	}
	began := time.Now()
	var held time.Duration // the longest time behind the barrier
	sealing, end := context.WithCancel(ctx)
	defer end()
	for try := 1; ; try++ {
		p, err := ss.throughBarrier(ctx, sealing, op, how)
		held = max(held, p.held)
		if p.before || errors.Is(err, meta.Exists) {
			if derr := ss.notDropped(ctx, op.Name); derr != nil {
				err = derr
			}
		}
		if p.seals != nil {
			if try == 1 {
				defer time.AfterFunc(barrierSeals, end).Stop()
			}
			if serr := p.seals.wait(); err == nil && serr != nil {
				err = ss.openEnds.cantSettle(serr)
			}
			if err == nil && try == barrierTries {
				err = meta.E("take snapshot", meta.Unavailable, k.subject(), errors.New("files are still being appended to"))
			}
			if err == nil {
				continue
			}
		}
		if err == nil {
			err = k.await(ctx, p.durable)
		}
		if err != nil {
			return meta.Snapshot{}, p.late, err
		}
		sn, err := ss.taken(meta.Generation(p.res.Off), op.Name)
		if err != nil {
			return sn, p.late, err
		}
		k.tasks.digests.Wake()
		level := slog.LevelInfo
		if p.late.files > 0 {
			level = slog.LevelWarn
		}
		k.log.Log(ctx, level, "snapshot taken", "name", op.Name, "generation", p.res.Off, "written", p.written, "unanswered", p.late.files, "by", p.late.clients,
			"held", held.Round(time.Millisecond), "took", time.Since(began).Round(time.Millisecond))
		return sn, p.late, nil
	}
}

// taken finds the snapshot just taken, by generation.
func (ss *snapshots) taken(at meta.Generation, name string) (meta.Snapshot, error) {
	all, err := ss.list()
	if err != nil {
		return meta.Snapshot{}, err
	}
	i := slices.IndexFunc(all, func(s meta.Snapshot) bool { return s.At == at })
	if i < 0 {
		return meta.Snapshot{}, meta.E("take snapshot", meta.NoSuchSnapshot, name, errors.New("it was taken, and deleted at once"))
	}
	return all[i], nil
}

// notDropped refuses the name of a deleted snapshot kept only for its clones or pins.
func (ss *snapshots) notDropped(ctx context.Context, name string) error {
	k := ss.k
	sn, err := ss.find(name)
	if errors.Is(err, meta.NoSuchSnapshot) {
		return nil // the snapshot was deleted meanwhile
	}
	if err != nil {
		return err
	}
	all, err := k.srv.cfg.Cluster.Volumes(ctx)
	if err != nil || !isDropped(all, k.vol, sn.At) {
		return err
	}
	why := "pins"
	if names := clonesIn(all, k.vol, sn.At); len(names) > 0 {
		why = "clones: " + strings.Join(names, ", ")
	}
	return meta.E("take snapshot", meta.Exists, name, fmt.Errorf("it was deleted, but keeps its name as long as it has %s", why))
}

// passage is the result of raising the barrier once.
type passage struct {
	res     *meta.Result // of TakeSnapshot
	before  bool         // an earlier request had taken the snapshot
	durable <-chan struct{}
	written int // files under exclusive leases
	late    unanswered
	held    time.Duration
	// seals, if not nil, still run: no snapshot was taken. The caller tries again after the
	// seals, unless there is an error.
	seals *seals
}

// throughBarrier raises the barrier, and takes a snapshot behind the barrier. sealing is the
// context of the seals.
func (ss *snapshots) throughBarrier(ctx, sealing context.Context, op *meta.TakeSnapshot, how takeHow) (p passage, err error) {
	k := ss.k
	if err := ss.leases.lockWithoutBarrier(ctx, nil); err != nil {
		return p, err
	}
	// A request refused in any case, or run before, raises no barrier.
	if p.res, err = ss.mayTake(op); err != nil || p.res != nil {
		p.durable = k.untilDurable(ss.snapped)
		if p.res != nil {
			p.before = true
			p.late = ss.unanswered[meta.Generation(p.res.Off)]
		}
		k.mu.Unlock()
		return p, err
	}
	began := time.Now()
	b := ss.leases.raiseBarrier(barrierWait)
	p.written = ss.leases.Exclusive()
	k.mu.Unlock()

	p.late, err = ss.leases.recallWriters(ctx, b.patience)
	k.mu.Lock()
	defer func() {
		ss.leases.lowerBarrier()
		p.held = time.Since(began)
		k.mu.Unlock()
	}()
	if err == nil && how.strict && p.late.files > 0 {
		err = meta.E("take snapshot", meta.Unavailable, k.subject(), fmt.Errorf("not all written bytes have arrived yet: %v", p.late))
	}
	if err == nil {
		p.seals, err = ss.openEnds.cut(sealing, b)
	}
	if err == nil {
		err = k.failed
	}
	if err == nil && how.filler != nil && !ss.mirror.filledBy(how.filler) {
		err = errNoFiller("take snapshot", k) // other sessions may have written since the barrier
	}
	if err != nil || p.seals != nil {
		return p, err
	}
	seq := k.cur.seq
	if p.res, err = k.run(op, 0); err != nil {
		return p, err
	}
	p.late.known = true
	ss.unanswered[meta.Generation(p.res.Off)] = p.late
	ss.snapped = max(ss.snapped, min(seq, k.newest()))
	p.durable = k.untilDurable(seq)
	return p, nil
}

// mayTake refuses a snapshot impossible even without open files. If the operation ran before,
// mayTake returns its result. The caller holds the owner's mu.
func (ss *snapshots) mayTake(op *meta.TakeSnapshot) (before *meta.Result, err error) {
	k := ss.k
	if k.failed != nil {
		return nil, k.failed
	}
	res, effects, err := namespace.Execute(k.view(), k.context(0), op)
	if err == nil && len(effects) == 0 {
		return res, nil // the repeated operation takes no room
	}
	if err := k.full(op); err != nil {
		return nil, err
	}
	if errors.Is(err, meta.Busy) {
		return nil, nil
	}
	return nil, err
}

// list lists the snapshots in the journal, oldest first.
func (ss *snapshots) list() ([]meta.Snapshot, error) {
	all, _, err := ss.listShown()
	return all, err
}

// listShown is list, and also returns the generation shown to readers of a mirror;
// zero if the volume is no mirror's target.
func (ss *snapshots) listShown() ([]meta.Snapshot, meta.Generation, error) {
	k := ss.k
	for {
		k.mu.Lock()
		if k.failed != nil {
			k.mu.Unlock()
			return nil, 0, k.failed
		}
		if ss.snapped <= k.durable {
			all, err := namespace.Snapshots(k.view())
			shown := ss.mirror.shown
			k.mu.Unlock()
			if err == nil {
				all, err = ss.groups.decided(all)
			}
			return all, shown, err
		}
		wait := k.untilDurable(ss.snapped)
		k.mu.Unlock()
		if err := k.await(k.ctx, wait); err != nil {
			return nil, 0, err
		}
	}
}

// find finds a readable snapshot by name. Errors: NoSuchSnapshot.
func (ss *snapshots) find(name string) (meta.Snapshot, error) {
	all, err := ss.list()
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

func snapshotInfo(s meta.Snapshot) meta.SnapshotInfo {
	i := meta.SnapshotInfo{Name: s.Name, At: s.At, Created: time.Unix(0, int64(s.Created)).UTC(), Inodes: s.Inodes, Bytes: s.Bytes, State: meta.SnapshotReady}
	switch {
	case s.Deleting:
		i.State = meta.SnapshotDeleting
	case s.Rolling:
		i.State = meta.SnapshotRolling
	}
	return i
}

// checkSnapshotName refuses invalid names; a mount names a snapshot as VOLUME@SNAPSHOT:PATH.
func checkSnapshotName(name string) error {
	const op = "name snapshot"
	switch {
	case len(name) > meta.MaxName:
		return meta.E(op, meta.NameTooLong, "", fmt.Errorf("it has %d bytes, and may have %d", len(name), meta.MaxName))
	case name == "", name == ".", name == "..", strings.ContainsAny(name, "/@:"), !utf8.ValidString(name), strings.ContainsFunc(name, unicode.IsControl):
		return meta.E(op, meta.Invalid, strconv.QuoteToGraphic(name), errors.New("a snapshot's name is text without '/', '@', ':' and control characters, and not '.' or '..'"))
	}
	return nil
}

// listSnapshots describes all snapshots, or only the snapshots named only.
func (o *owner) listSnapshots(only string) (*meta.SnapshotList, error) {
	all, shown, err := o.snapshots.listShown()
	if err != nil {
		return nil, err
	}
	if only != "" {
		all = slices.DeleteFunc(all, func(s meta.Snapshot) bool { return s.Name != only })
	}
	l := &meta.SnapshotList{Snapshots: make([]meta.SnapshotInfo, len(all))}
	for i, s := range all {
		l.Snapshots[i] = snapshotInfo(s)
		l.Snapshots[i].Shown = s.At == shown
	}
	return l, o.read(func(v *view) error {
		for i := range l.Snapshots {
			tellUnanswered(&l.Snapshots[i], o.snapshots.unanswered[l.Snapshots[i].At])
			if o.groups.known[all[i].Group] {
				l.Snapshots[i].Group = all[i].Group
			}
		}
		l.Failing = o.schedule.going.failing()
		if err := errors.Join(o.pinned.listPins(l.Snapshots), o.digesting.listDigests(l.Snapshots)); err != nil {
			return err
		}
		var err error
		l.Held, err = namespace.Buried(v)
		is, terr := namespace.Tallied(v)
		if is.On {
			l.Quota = &meta.SnapshotQuota{InForce: is.InForce, Bytes: is.Alone, Falls: is.InForce && is.Stale}
		}
		return errors.Join(err, terr)
	})
}
