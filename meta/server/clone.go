package server

import (
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/admin"
	"penstock.io/penstock/meta/cluster"
	"penstock.io/penstock/meta/journal"
	"penstock.io/penstock/meta/namespace"
)

// Clones of a volume (namespace/clone.go defines them). The origin's owner makes a clone in
// steps. Each step is durable before the next:
//
//	1. the snapshot, if the request names none
//	2. the clone's row, "creating": it reserves the name, and nobody opens the clone
//	3. PinClone in the origin's journal
//	4. the row becomes active
//
// After a failure, the next owner of the origin finds a row of step 2 or 3, and either
// finishes the clone, or deletes the row if the snapshot is gone. The deletion of a clone goes
// in reverse: first the row, then the note of PinClone. So a note without a row belongs to a
// deleted clone, and a row always has its note before the clone is opened.
//
// The clone's state is made at the first opening: a copy of the origin's state (hard links if
// the same process serves the origin, else the origin's checkpoint), and a journal entry.

// impliedPrefix begins the names of snapshots taken for a clone; 16 hex digits end the names.
// Such snapshots, like those of the schedule, are recognized by name.
const impliedPrefix = "clone-"

func impliedName(clone string, token uint64) string {
	const room = meta.MaxName - len(impliedPrefix) - 17
	return fmt.Sprintf("%s%s-%016x", impliedPrefix, clone[:min(len(clone), room)], token)
}

func isImplied(name string) bool {
	n := len(name)
	if !strings.HasPrefix(name, impliedPrefix) || n < len(impliedPrefix)+17 || name[n-17] != '-' {
		return false
	}
	_, err := hex.DecodeString(name[n-16:])
	return err == nil
}

// dependent returns an error, Busy, if the volume has clones: op would destroy data that the
// clones need.
func dependent(op string, v cluster.Volume, all []cluster.Volume) error {
	if names := clonesIn(all, v.ID, 0); len(names) > 0 {
		return meta.E(op, meta.Busy, v.Name, fmt.Errorf("it has clones that need it: %s; promote or delete the clones first", strings.Join(names, ", ")))
	}
	return nil
}

// clonesIn names the clones of a volume, or of its snapshot at, if at is not 0.
func clonesIn(all []cluster.Volume, v meta.VolumeID, at meta.Generation) (names []string) {
	for _, x := range all {
		if x.Origin != nil && x.Origin.Volume == v && (at == 0 || x.Origin.At == at) {
			names = append(names, x.Name)
		}
	}
	return names
}

// isDropped reports whether a volume's snapshot is deleted and kept for its clones only.
func isDropped(all []cluster.Volume, v meta.VolumeID, at meta.Generation) bool {
	return slices.ContainsFunc(all, func(x cluster.Volume) bool { return x.ID == v && slices.Contains(x.Dropped, at) })
}

// clones makes and releases the clones of a volume.
type clones struct {
	k         *kernel
	leases    *leases
	mirror    *mirrorTarget
	rollbacks *rollbacks
	snapshots *snapshots

	one sync.Mutex // held while a clone is made or released; locked before the owner's mu
}

// makeClone makes a clone of a snapshot or, if snapshot is empty, of the volume's present state.
// token identifies the request, so that a repetition makes no second clone. Errors: NoSuchSnapshot, VolumeExists, Invalid (the
// name), NotSupported (volumes are attached inside this volume), ResourceExceeded (too many
// clones, or too many files were unlinked and open when the snapshot was taken), Busy (the
// volume is being promoted), ReadOnly (a mirror's target, and no snapshot named), and those of
// snapshots.take.
func (cl *clones) makeClone(ctx context.Context, name, snapshot string, token uint64) (cluster.Volume, error) {
	k := cl.k
	c := k.srv.cfg.Cluster
	var none cluster.Volume
	if err := k.await(ctx, k.recovered); err != nil {
		return none, err
	}
	cl.one.Lock()
	defer cl.one.Unlock()
	began := time.Now()
	if err := cluster.CheckVolumeName(name); err != nil { // before a snapshot is taken in vain
		return none, err
	}
	row, err := c.VolumeByName(ctx, name)
	switch {
	case err == nil && row.Origin != nil && row.Origin.Volume == k.vol && token != 0 && row.Origin.Token == token:
		// The request is a repetition: an earlier owner may not have finished.
		if row.State == cluster.VolumeCreating {
			if err := cl.finishClone(ctx, &row); err != nil {
				return none, err
			}
		}
		return row, nil
	case err == nil:
		return none, meta.E("clone", meta.VolumeExists, name, nil)
	case !errors.Is(err, meta.NoSuchVolume):
		return none, err
	}
	all, err := c.Volumes(ctx)
	if err != nil {
		return none, err
	}
	for _, x := range all {
		if snapshot == "" && x.Attach != nil && x.Attach.Parent == k.vol { // before a snapshot is taken in vain
			return none, cl.leadsNowInside(x.Name)
		}
		if x.ID == k.vol && x.Origin != nil && x.Origin.Promoting {
			return none, meta.E("clone", meta.Busy, x.Name, errors.New("it is being promoted: wait for that"))
		}
	}
	from := cluster.Origin{Volume: k.vol, Snapshot: snapshot, Token: token}
	if snapshot == "" && cl.mirror.isMirror() {
		return none, meta.E("clone", meta.ReadOnly, k.subject(), errors.New("it is a mirror's target, which is being filled: clone one of its snapshots"))
	}
	if snapshot == "" {
		from.Implied, from.Snapshot = true, impliedName(name, token)
		if _, _, err := cl.snapshots.take(ctx, &meta.TakeSnapshot{Name: from.Snapshot, Token: token}, takeHow{}); err != nil {
			return none, err
		}
	}
	sn, err := cl.snapshots.find(from.Snapshot)
	if err != nil {
		return none, err
	}
	from.At = sn.At
	if isDropped(all, k.vol, sn.At) {
		return none, meta.E("clone", meta.NoSuchSnapshot, sn.Name, errors.New("it was deleted, and is only there for the clones that it has"))
	}
	if err := cl.noJunctions(ctx, sn.At); err != nil {
		k.tasks.snapshots.Wake()
		return none, err
	}
	if err := cl.mayClone(ctx, sn.At); err != nil {
		k.tasks.snapshots.Wake()
		return none, err
	}
	policy, err := k.policy()
	if err != nil {
		return none, err
	}
	row, err = c.CreateClone(ctx, name, policy, k.now(), from)
	if err == nil {
		err = cl.finishClone(ctx, &row)
	}
	if err != nil {
		k.tasks.snapshots.Wake() // deletes the rest
		return none, err
	}
	k.log.Info("a clone was made", "clone", name, "id", row.ID, "snapshot", from.Snapshot, "took", time.Since(began).Round(time.Millisecond))
	return row, nil
}

// mayClone refuses a snapshot whose clone could not be opened. Without this check the first
// opening would fail, since it makes the clone's state, and the row would stay.
func (cl *clones) mayClone(ctx context.Context, at meta.Generation) error {
	k := cl.k
	if err := k.settled(ctx); err != nil {
		return err
	}
	k.mu.Lock()
	if k.ctx.Err() != nil || k.stClosed {
		k.mu.Unlock()
		return k.gone()
	}
	k.wg.Hold() // keeps the store open
	k.mu.Unlock()
	defer k.wg.Release()
	st := k.st.Freeze()
	return errors.Join(namespace.MayClone(st, at), st.Close())
}

// leadsInside returns the error that refuses a clone because of an attached volume. do says
// how to go on.
func (cl *clones) leadsInside(who, do string) error {
	return meta.E("clone", meta.NotSupported, cl.k.subject(),
		fmt.Errorf("%s attached inside it, and a clone would lead into that one, not into a copy: %s; that volume is cloned by itself, and its clone attached inside this one's", who, do))
}

func (cl *clones) leadsNowInside(name string) error {
	return cl.leadsInside("volume "+name+" is", fmt.Sprintf("detach it (penstock volume detach %s) until the clone is made, or clone a snapshot from before it was attached", name))
}

// noJunctions refuses a clone of a snapshot that shows volumes attached inside. An attached
// volume's row says where it is attached. A volume that the snapshot shows is either still
// attached, or its detachment left a note. The rows are read before the notes, so that a
// volume detached in between is found.
func (cl *clones) noJunctions(ctx context.Context, at meta.Generation) error {
	k := cl.k
	rows, err := k.srv.cfg.Cluster.Volumes(ctx)
	if err != nil {
		return err
	}
	names := map[meta.VolumeID]string{}
	for _, x := range rows {
		names[x.ID] = x.Name
		if x.Attach == nil || x.Attach.Parent != k.vol {
			continue
		}
		k.mu.Lock()
		then, err := namespace.JunctionThen(k.view(), at, x.Attach.Ino, x.Attach.Name)
		k.mu.Unlock()
		if err != nil {
			return err
		}
		if then != 0 {
			return cl.leadsNowInside(x.Name)
		}
	}
	return cl.rollbacks.junctionsSince(ctx, at, func(c namespace.JunctionChange) error {
		if c.Was == 0 {
			return nil
		}
		name := names[c.Was]
		if name == "" {
			name = fmt.Sprint(c.Was, ", which is gone,")
		}
		return cl.leadsInside("when the snapshot was taken, volume "+name+" was", "clone the volume as it is now, or a snapshot that was taken while that was not attached")
	})
}

// finishClone pins the snapshot of a clone being created, and makes the clone's row active. If
// the snapshot is gone, or can't be pinned for lack of room, finishClone deletes the row. The
// caller holds clones.one.
func (cl *clones) finishClone(ctx context.Context, row *cluster.Volume) error {
	c := cl.k.srv.cfg.Cluster
	if err := cl.leases.durably(ctx, &meta.PinClone{At: row.Origin.At, Clone: row.ID}); err != nil {
		if errors.Is(err, meta.NoSuchSnapshot) || errors.Is(err, meta.ResourceExceeded) {
			err = errors.Join(err, c.DeleteVolume(context.WithoutCancel(ctx), row.ID))
		}
		return err
	}
	now, err := c.UpdateVolume(ctx, row.ID, func(v *cluster.Volume) error {
		if v.State == cluster.VolumeCreating {
			v.State = cluster.VolumeActive
		}
		return nil
	})
	if err == nil {
		*row = now
	}
	return err
}

// settleClones makes the notes of the volume's clones agree with the table of volumes, which
// is authoritative, and deletes snapshots kept for clones only. held: such a snapshot is still
// pinned or mounted, and the caller must try again.
func (cl *clones) settleClones(ctx context.Context) (held bool, err error) {
	k := cl.k
	cl.one.Lock()
	defer cl.one.Unlock()
	if err := k.await(ctx, k.recovered); err != nil {
		return false, err
	}
	k.mu.Lock()
	if k.failed != nil || k.stClosed {
		defer k.mu.Unlock()
		return false, k.failed
	}
	pins, err := namespace.ClonePins(k.view())
	var all []meta.Snapshot
	if err == nil {
		all, err = namespace.Snapshots(k.view())
	}
	k.mu.Unlock()
	if err != nil {
		return false, err
	}
	implied := slices.ContainsFunc(all, func(s meta.Snapshot) bool { return isImplied(s.Name) && !s.Deleting })
	if v := k.srv.cfg.Cluster.View(); len(pins) == 0 && !implied && v != nil &&
		!slices.ContainsFunc(v.Volumes, func(x cluster.Volume) bool {
			return x.Origin != nil && x.Origin.Volume == k.vol || x.ID == k.vol && len(x.Dropped) > 0
		}) {
		return false, nil
	}
	rows, err := k.srv.cfg.Cluster.Volumes(ctx)
	if err != nil {
		return false, err
	}
	wanted := map[namespace.ClonePin]bool{}
	var dropped []meta.Generation
	var errs []error
	for _, x := range rows {
		if x.ID == k.vol {
			dropped = x.Dropped
		}
		if x.Origin == nil || x.Origin.Volume != k.vol {
			continue
		}
		pin := namespace.ClonePin{At: x.Origin.At, Clone: x.ID}
		wanted[pin] = true
		switch {
		case x.State == cluster.VolumeCreating:
			k.log.Info("a clone was not finished: this server goes on with it", "clone", x.Name)
			if err := cl.finishClone(ctx, &x); err != nil {
				errs = append(errs, err)
			}
		case !slices.Contains(pins, pin):
			// A note is lost only when a cluster is restored.
			if err := cl.leases.durably(ctx, &meta.PinClone{At: pin.At, Clone: pin.Clone}); err != nil {
				errs = append(errs, meta.E("keep snapshot for clone", meta.KindOf(err), x.Name, err))
			}
		}
	}
	needed := map[meta.Generation]bool{}
	for p := range wanted {
		needed[p.At] = true
	}
	for _, p := range pins {
		if !wanted[p] {
			if err := cl.leases.durably(ctx, &meta.PinClone{At: p.At, Clone: p.Clone, Drop: true}); err != nil {
				return false, errors.Join(append(errs, err)...)
			}
			k.log.Info("a clone does not need its origin any more", "clone", p.Clone, "generation", p.At)
		}
	}
	for _, s := range all {
		if (isImplied(s.Name) || slices.Contains(dropped, s.At)) && !s.Deleting && !s.Rolling && !needed[s.At] {
			// Delete by generation: another snapshot may have the name by now.
			switch err := cl.snapshots.deleteGeneration(ctx, s); {
			case errors.Is(err, meta.Busy):
				held = true
				k.log.Debug("a snapshot that no clone needs any more is kept still", "name", s.Name, "generation", s.At, "error", err)
			case err != nil:
				errs = append(errs, err)
			}
		}
	}
	if len(dropped) > 0 {
		errs = append(errs, cl.forgetDropped(ctx, dropped))
	}
	return held, errors.Join(errs...)
}

// cloneGone settles the end of a clone. The snapshot task tries again if settling fails, or if
// a snapshot to be deleted with the clone is held, such as by a mount.
func (cl *clones) cloneGone(ctx context.Context) error {
	held, err := cl.settleClones(ctx)
	if held || err != nil {
		cl.k.tasks.snapshots.Wake()
	}
	return err
}

// deleteUnpinned is snapshots.delete for requests. If clones need the snapshot, the error names
// the clones; with later, the snapshot is deleted with the last of these clones.
func (cl *clones) deleteUnpinned(ctx context.Context, name string, at meta.Generation, later bool) (meta.SnapshotInfo, error) {
	k := cl.k
	sn, err := cl.snapshots.delete(ctx, name, at)
	if !errors.Is(err, meta.Busy) {
		return snapshotInfo(sn), err
	}
	// The note of a deleted clone may still be there.
	if _, serr := cl.settleClones(ctx); serr != nil {
		return snapshotInfo(sn), errors.Join(err, serr)
	}
	if sn, err = cl.snapshots.delete(ctx, name, at); !errors.Is(err, meta.Busy) {
		return snapshotInfo(sn), err
	}
	all, verr := k.srv.cfg.Cluster.Volumes(ctx)
	if names := clonesIn(all, k.vol, sn.At); verr == nil && len(names) > 0 {
		if later {
			return cl.dropSnapshot(ctx, sn)
		}
		err = meta.E("delete snapshot", meta.Busy, name, fmt.Errorf("clones need it: %s; promote or delete the clones first", strings.Join(names, ", ")))
	}
	return snapshotInfo(sn), err
}

// dropSnapshot records in the volume's row that the snapshot is to be deleted when no clone
// needs it and no pin made meanwhile holds it. The settling of the last clone's end runs after
// dropSnapshot, since both hold clones.one, and reads the row. Errors: Busy (the snapshot is
// pinned, or its last clone was just deleted).
func (cl *clones) dropSnapshot(ctx context.Context, sn meta.Snapshot) (meta.SnapshotInfo, error) {
	k := cl.k
	cl.one.Lock()
	defer cl.one.Unlock()
	i := snapshotInfo(sn)
	all, err := k.srv.cfg.Cluster.Volumes(ctx)
	if err != nil {
		return i, err
	}
	if isDropped(all, k.vol, sn.At) {
		i.State = meta.SnapshotDropped
		return i, nil
	}
	if len(clonesIn(all, k.vol, sn.At)) == 0 {
		return i, meta.E("delete snapshot", meta.Busy, sn.Name, errors.New("a clone of it went at this moment: try again"))
	}
	k.mu.Lock()
	if err = k.failed; err == nil {
		err = namespace.Unpinned(k.view(), &sn, k.now())
	}
	k.mu.Unlock()
	if err != nil {
		return i, err
	}
	_, err = k.srv.cfg.Cluster.UpdateVolume(ctx, k.vol, func(v *cluster.Volume) error {
		if !slices.Contains(v.Dropped, sn.At) {
			v.Dropped = append(v.Dropped, sn.At)
		}
		return nil
	})
	if err != nil {
		return i, err
	}
	k.log.Info("a snapshot will be deleted when no clone needs it", "name", sn.Name, "generation", sn.At)
	i.State = meta.SnapshotDropped
	return i, nil
}

// forgetDropped removes snapshots deleted, or being deleted, from the volume's row.
func (cl *clones) forgetDropped(ctx context.Context, dropped []meta.Generation) error {
	k := cl.k
	all, err := cl.snapshots.list()
	if err != nil {
		return err
	}
	still := func(at meta.Generation) bool {
		return slices.ContainsFunc(all, func(s meta.Snapshot) bool { return s.At == at && !s.Deleting })
	}
	if !slices.ContainsFunc(dropped, func(at meta.Generation) bool { return !still(at) }) {
		return nil
	}
	_, err = k.srv.cfg.Cluster.UpdateVolume(ctx, k.vol, func(v *cluster.Volume) error {
		v.Dropped = slices.DeleteFunc(v.Dropped, func(at meta.Generation) bool { return slices.Contains(dropped, at) && !still(at) })
		return nil
	})
	return err
}

const (
	// peerPatience bounds a request of an owner to another owner.
	peerPatience = 20 * time.Second
	peerPause    = 50 * time.Millisecond
)

// openStore opens the local copy of a volume's state. The state of a clone without a
// checkpoint begins as a copy of the origin's state.
func (op *opener) openStore(ctx context.Context, v meta.VolumeID, cp journal.Checkpoint, have bool) (Store, error) {
	c := op.cfg.Cluster
	if have {
		return c.OpenStore(ctx, v, cp, true)
	}
	row, err := c.Volume(ctx, v)
	if err != nil {
		return nil, err
	}
	if row.Origin == nil {
		return c.OpenStore(ctx, v, cp, false)
	}
	from := row.Origin.Volume
	// settled: the copy must contain every answered operation, above all the snapshot.
	if o := op.hosted.opened(from); o != nil && o.settled(ctx) == nil {
		o.mu.Lock()
		ok := o.ctx.Err() == nil && !o.stClosed
		if ok {
			o.wg.Hold() // keeps the store open
		}
		o.mu.Unlock()
		if ok {
			defer o.wg.Release()
			return c.BaseStore(ctx, v, o.st, cp, nil)
		}
	}
	log, err := c.Follow(ctx, from)
	if err != nil {
		return nil, err
	}
	cp, release, err := log.Pin(ctx)
	if errors.Is(err, meta.NotFound) {
		ask, cancel := context.WithTimeoutCause(ctx, maxLoad, errors.New("the origin's owner makes no checkpoint"))
		defer cancel()
		err = op.peers.whereOwned(ask, from, func(o *owner) error {
			if err := o.flush(ask); err != nil {
				return err
			}
			return o.checkpoints.checkpoint(ask)
		}, func(addr string) error {
			c, err := op.api.peers.client(addr, false)
			if err == nil {
				_, err = c.Volumes.CheckpointVolume(ask, &admin.CheckpointVolumeRequest{Volume: admin.Numbered(from)})
			}
			return err
		})
		if err == nil {
			cp, release, err = log.Pin(ctx)
		}
	}
	if err != nil {
		return nil, err
	}
	defer func() {
		// If release fails, the pin ends with its lease.
		if err := release(context.WithoutCancel(ctx)); err != nil {
			op.log.Warn("a checkpoint's pin could not be taken back", "volume", from, "error", err)
		}
	}()
	return c.BaseStore(ctx, v, nil, cp, func(st Store) error {
		return log.Read(ctx, st.Applied(), func(e journal.Entry) error { return replay(st, e) })
	})
}

// firstEffects returns the effects of a volume's first journal entry.
func firstEffects(st Store, row *cluster.Volume) ([]namespace.Effect, error) {
	now := meta.Time(time.Now().UnixNano())
	if row.Origin != nil {
		return namespace.CloneEffects(st, row.Origin.At, row.ID, row.Policy, now)
	}
	return namespace.Format(row.ID, now, 0o755, uint32(os.Geteuid()), uint32(os.Getegid()), row.Policy), nil
}
