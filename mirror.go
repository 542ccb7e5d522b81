package penstock

import (
	"context"
	crand "crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"time"

	"penstock.io/penstock/meta"
)

// Mirror is the record of a mirror; MirrorRound is one copy of a snapshot.
type (
	Mirror      = meta.Mirror
	MirrorRound = meta.MirrorRound
)

// mirrorSession is what a session does about mirrors: the calls of the service Mirrors of the
// administrative API, and what only the session that fills a target may do (meta/client).
type mirrorSession interface {
	Mirrors(ctx context.Context) ([]meta.Mirror, error)
	Mirror(ctx context.Context, target meta.VolumeID) (meta.Mirror, error)
	PutMirror(ctx context.Context, m meta.Mirror) (meta.Mirror, error)
	DropMirror(ctx context.Context, target meta.VolumeID) error
	ShowSnapshot(ctx context.Context, target meta.VolumeID, name string) error
	TakeTarget(ctx context.Context, target meta.VolumeID, name string) error
	RollBackTarget(ctx context.Context, target meta.VolumeID, name string) error
}

var _ mirrorSession = session{}

// Mirrors administers the mirrors with targets in the client's cluster. A mirror's target is a
// volume with the contents of a snapshot of another volume, the source. Readers see the last
// snapshot that was copied completely and checked, and switch to the next at once. Only the
// mirror writes the target. RunMirrors copies.
type Mirrors struct {
	c *Client
	s mirrorSession
}

// Mirrors gives the administration of mirrors. Errors: NotSupported.
func (c *Client) Mirrors() (Mirrors, error) {
	s, ok := c.sess.(mirrorSession)
	if !ok {
		return Mirrors{}, meta.E("mirrors", meta.NotSupported, "", nil)
	}
	return Mirrors{c, s}, nil
}

// All lists the mirrors, by the number of the target.
func (m Mirrors) All(ctx context.Context) ([]Mirror, error) { return m.s.Mirrors(ctx) }

// Find gives the mirror that has a target. Errors: NoSuchVolume, NotFound.
func (m Mirrors) Find(ctx context.Context, target string) (Mirror, error) {
	v, err := m.c.Volume(ctx, target)
	if err != nil {
		return Mirror{}, err
	}
	return m.find(ctx, v.id)
}

func (m Mirrors) find(ctx context.Context, target meta.VolumeID) (Mirror, error) {
	r, err := m.s.Mirror(ctx, target)
	if err == nil && r.Version > meta.MirrorVersion {
		err = meta.E("find mirror", meta.Version, "", fmt.Errorf("the record has version %d, this program knows up to %d", r.Version, meta.MirrorVersion))
	}
	return r, err
}

// Change changes the settings of a mirror: how often, how fast. change may be called several
// times. Errors: change's, and those of Find.
func (m Mirrors) Change(ctx context.Context, target string, change func(*Mirror) error) (Mirror, error) {
	v, err := m.c.Volume(ctx, target)
	if err != nil {
		return Mirror{}, err
	}
	return m.change(ctx, v.id, change)
}

func (m Mirrors) change(ctx context.Context, target meta.VolumeID, change func(*Mirror) error) (Mirror, error) {
	for {
		r, err := m.find(ctx, target)
		if err != nil {
			return r, err
		}
		if err := change(&r); err != nil {
			return r, err
		}
		now, err := m.s.PutMirror(ctx, r)
		if meta.KindOf(err) != meta.Again {
			return now, err
		}
	}
}

// MirrorPlan says what is to be mirrored, to where.
type MirrorPlan struct {
	Source *Volume // of this cluster or another
	// At says how the copying process reaches the source's cluster. Its addresses are empty
	// for a volume of the target's cluster.
	At     meta.MirrorSource
	Target string      // name of the volume that is made
	Policy meta.Policy // of it
	Force  bool        // also if nothing in the cluster can meet the policy
	Every  time.Duration
	Rate   uint64
	Keep   int
}

// Create makes a target, which is empty until the first round is complete. What
// an error leaves of it Delete makes a volume like others. Errors: VolumeExists,
// Invalid.
func (m Mirrors) Create(ctx context.Context, p MirrorPlan) (Mirror, error) {
	none := Mirror{}
	if p.Keep < 1 || p.Every < 0 {
		return none, meta.E("create mirror", meta.Invalid, p.Target, errors.New("at least one snapshot is kept, and a round begins every so often, or never by itself"))
	}
	if err := p.Source.readOnly("create mirror"); err != nil {
		return none, err
	}
	vols, err := m.c.Volumes()
	if err != nil {
		return none, err
	}
	made, err := vols.Create(ctx, p.Target, p.Policy, VolumeWords{Force: p.Force})
	if err != nil {
		return none, err
	}
	var b [6]byte
	_, _ = crand.Read(b[:]) // never fails
	r := Mirror{Version: meta.MirrorVersion, Name: "mirror-" + hex.EncodeToString(b[:]), Target: made.ID, State: meta.MirrorPaused,
		Source: p.At, Every: p.Every, Rate: p.Rate, Keep: p.Keep}
	r.Source.Volume, r.Source.ID = p.Source.name, p.Source.id
	// The record comes first: a target with a record can be deleted in any state.
	if r, err = m.s.PutMirror(ctx, r); err != nil {
		return r, fmt.Errorf("volume %s was made, but is no mirror's target: delete it: %w", p.Target, err)
	}
	v, err := m.c.VolumeByID(ctx, made.ID)
	if err == nil {
		err = filling(ctx, v, func() error {
			if err := v.snapshots.take(ctx, emptySnapshot(&r)); err != nil {
				return err
			}
			return m.s.ShowSnapshot(ctx, v.id, emptySnapshot(&r))
		})
	}
	if err == nil {
		r, err = m.Resume(ctx, p.Target)
	}
	if err != nil {
		err = fmt.Errorf("volume %s was made, but its mirror does not run: delete the mirror, then the volume: %w", p.Target, err)
	}
	return r, err
}

// Pause stops copying. A round under way stops within seconds; readers continue. Errors:
// Invalid (the mirror was promoted).
func (m Mirrors) Pause(ctx context.Context, target string) (Mirror, error) {
	return m.want(ctx, target, meta.MirrorPaused)
}

// Resume goes on copying after a pause, with the round that was stopped. Errors:
// Invalid (the volume is no mirror's target any more, or not yet).
func (m Mirrors) Resume(ctx context.Context, target string) (Mirror, error) {
	v, err := m.c.Volume(ctx, target)
	if err != nil {
		return Mirror{}, err
	}
	if s, err := v.snapshots.shown(ctx); err != nil {
		return Mirror{}, err
	} else if s == nil {
		return Mirror{}, meta.E("resume mirror", meta.Invalid, target, errors.New("the volume is one like others: 'penstock mirror promote' and then 'resync' make it a target, 'penstock mirror delete' forgets the mirror"))
	}
	return m.want(ctx, target, meta.MirrorRunning)
}

func (m Mirrors) want(ctx context.Context, target string, to meta.MirrorState) (Mirror, error) {
	return m.Change(ctx, target, func(r *Mirror) error {
		switch r.State {
		case meta.MirrorPromoted:
			return meta.E("change mirror", meta.Invalid, target, errors.New("it was promoted: 'penstock mirror resync' makes it a mirror again"))
		case meta.MirrorPromoting:
			return meta.E("change mirror", meta.Invalid, target, errors.New("it is being promoted: if that failed, say 'penstock mirror promote' again"))
		}
		r.State = to
		return nil
	})
}

// Sync asks for a round, which copies what the source holds from now on. Errors:
// Invalid (the mirror does not run).
func (m Mirrors) Sync(ctx context.Context, target string) (Mirror, error) {
	return m.Change(ctx, target, func(r *Mirror) error {
		if r.State != meta.MirrorRunning {
			return meta.E("sync mirror", meta.Invalid, target, fmt.Errorf("it is %s", r.State))
		}
		r.Asked++
		return nil
	})
}

// awaitPoll is how often Await looks.
const awaitPoll = 200 * time.Millisecond

// Await waits until readers see the complete round that Sync, which returned asked, requested.
// A failed round is repeated until ctx ends. Await calls failing, if not nil, with the reason
// of a failure, and again when the reason changes. It returns the last state of the mirror.
// Errors: Canceled (the mirror was paused or promoted), Interrupted (ctx ended), and those of
// Find.
func (m Mirrors) Await(ctx context.Context, asked Mirror, failing func(why string)) (Mirror, error) {
	for r, told := asked, ""; ; {
		if r.Heard >= asked.Asked && r.Round == nil {
			return r, nil
		}
		if r.State != meta.MirrorRunning {
			return r, meta.E("sync mirror", meta.Canceled, "", fmt.Errorf("it is %s", r.State))
		}
		if r.Error != told && r.Error != "" && failing != nil {
			failing(r.Error)
		}
		told = r.Error
		select {
		case <-time.After(awaitPoll):
		case <-ctx.Done():
			return r, meta.E("sync mirror", meta.Interrupted, "", context.Cause(ctx))
		}
		now, err := m.find(ctx, asked.Target)
		if err != nil {
			return r, err
		}
		r = now
	}
}

// shown returns the snapshot that the owner shows to a mirror's readers; nil for a volume that
// is no target.
func (sn *snapshotNames) shown(ctx context.Context) (*meta.SnapshotInfo, error) {
	l, err := sn.all(ctx)
	if err != nil {
		return nil, err
	}
	for i := range l {
		if l[i].Shown {
			return &l[i], nil
		}
	}
	return nil, nil
}

// emptySnapshot is the target's first, which readers see until a round is
// complete.
func emptySnapshot(r *Mirror) string { return r.Name + "-empty" }

// shown returns the name of the last complete snapshot. Readers see this snapshot, or already
// the snapshot of the round under way: only the owner knows (Volume.shown).
func shown(r *Mirror) string {
	if r.Last != nil {
		return r.Last.Snapshot
	}
	return emptySnapshot(r)
}

// fillWait bounds the wait for the process that fills a target to release the right to fill.
const fillWait = 2 * time.Minute

// fill takes the right to change a mirror's target. One session at a time has the right.
// Errors: WouldBlock (another session has the right).
func fill(ctx context.Context, v *Volume, owner uint64, wait bool) error {
	return v.SetLock(ctx, meta.Lock{Ino: meta.MirrorLock, Owner: owner, Type: meta.LockWrite, Flock: true, End: 1<<63 - 1}, wait)
}

func unfill(ctx context.Context, v *Volume, owner uint64) error {
	return v.SetLock(ctx, meta.Lock{Ino: meta.MirrorLock, Owner: owner, Type: meta.LockUnlock, Flock: true, End: 1<<63 - 1}, false)
}

// fillTries is how often filling runs a function that fails because the right to fill was
// lost.
const fillTries = 3

// filling runs fn with the right to change a mirror's target, after the last holder has
// released the right. fn may end the session in the volume, and the right with the session. If
// fn fails because the right was lost, fn runs again. Errors: Busy (the holder keeps the
// right), fn's.
func filling(ctx context.Context, v *Volume, fn func() error) (err error) {
	for range fillTries {
		if err = fillOnce(ctx, v, fn); meta.KindOf(err) != meta.ReadOnly {
			return err
		}
	}
	return err
}

func fillOnce(ctx context.Context, v *Volume, fn func() error) error {
	owner := rand.Uint64()
	wait, cancel := context.WithTimeout(ctx, fillWait)
	err := fill(wait, v, owner, true)
	cancel()
	if meta.KindOf(err) == meta.Interrupted && ctx.Err() == nil {
		return meta.E("mirror", meta.Busy, v.name, errors.New("the process that fills it does not let go: try again, or stop that process"))
	}
	if err != nil {
		return err
	}
	err = fn()
	end, cancel := context.WithTimeout(context.WithoutCancel(ctx), 10*time.Second)
	defer cancel()
	if uerr := unfill(end, v, owner); err == nil && meta.KindOf(uerr) != meta.SessionExpired {
		err = uerr
	}
	return err
}

// Promote makes the target an ordinary volume with the contents that readers see; data of a
// round under way is removed. The mirror's record stays, so that Resync and Reverse can
// continue from the last snapshot. After an error, the caller calls Promote again to complete
// the promotion; until then the mirror is paused. Errors: Busy, Invalid (the mirror was
// promoted before).
func (m Mirrors) Promote(ctx context.Context, target string) (Mirror, error) {
	v, err := m.c.Volume(ctx, target)
	if err != nil {
		return Mirror{}, err
	}
	r, err := m.find(ctx, v.id)
	if err != nil {
		return r, err
	}
	if s, err := v.snapshots.shown(ctx); err != nil {
		return r, err
	} else if r.State == meta.MirrorPromoted && s == nil {
		return r, meta.E("promote mirror", meta.Invalid, target, errors.New("it was promoted before"))
	}
	return m.release(ctx, v)
}

// release makes a target an ordinary volume. release may end at any point and be called again:
//
//  1. Paused: the process that fills the target releases the right to fill.
//  2. Promoting, written under the right to fill: a later holder of the right finds this state,
//     and fills nothing.
//  3. The owner rolls back data beyond the snapshot that readers see. Then the record has no
//     round any more. A repeated rollback is safe because the target still refuses writers. The
//     owner rolls back only a target: a process that sleeps before its request may wake after
//     another process has done all steps.
//  4. The owner shows no snapshot any more: the volume can be written. From here on nothing is
//     rolled back.
//  5. Promoted.
func (m Mirrors) release(ctx context.Context, v *Volume) (Mirror, error) {
	r, err := m.change(ctx, v.id, func(r *Mirror) error {
		if r.State == meta.MirrorRunning {
			r.State = meta.MirrorPaused
		}
		return nil
	})
	if err != nil {
		return r, err
	}
	if err := filling(ctx, v, func() error {
		r, err := m.change(ctx, v.id, func(r *Mirror) error {
			if r.State != meta.MirrorPromoted { // Promoted: a Resync failed, and existing writes stay
				r.State = meta.MirrorPromoting
			}
			return nil
		})
		if err != nil {
			return err
		}
		s, err := v.snapshots.shown(ctx)
		if err != nil || s == nil || r.Round == nil {
			return err
		}
		if r.Round.Snapshot != s.Name {
			if err := m.s.RollBackTarget(ctx, v.id, s.Name); err != nil { // which ends our session there, too
				return err
			}
		}
		_, err = m.change(ctx, v.id, func(r *Mirror) error {
			if n := r.Round; n != nil && n.Snapshot == s.Name { // shown, by a process that ended before it could record so
				if s.Digest != nil {
					n.Digest = s.Digest.Digest
				}
				n.Ended = time.Now().UTC()
				r.Last = n
				r.Rounds++
			}
			r.Round = nil
			return nil
		})
		return err
	}); err != nil {
		return r, err
	}
	if err := filling(ctx, v, func() error {
		s, err := v.snapshots.shown(ctx)
		if err != nil || s == nil {
			return err
		}
		if err := v.snapshots.pin(ctx, s.Name, 0, r.Name, mirrorPin); err != nil {
			return err
		}
		return m.s.ShowSnapshot(ctx, v.id, "")
	}); err != nil {
		return r, err
	}
	return m.change(ctx, v.id, func(r *Mirror) error { r.State, r.Round = meta.MirrorPromoted, nil; return nil })
}

// Resync makes a promoted volume a target again: writes since the promotion are removed, and
// the volume's sessions end. Errors: Invalid (the mirror was not promoted).
func (m Mirrors) Resync(ctx context.Context, target string) (Mirror, error) {
	v, err := m.c.Volume(ctx, target)
	if err != nil {
		return Mirror{}, err
	}
	r, err := m.find(ctx, v.id)
	if err != nil {
		return r, err
	}
	promoted := func(r *Mirror) error {
		if r.State != meta.MirrorPromoted {
			return meta.E("resync mirror", meta.Invalid, target, errors.New("it was not promoted"))
		}
		return nil
	}
	if err := promoted(&r); err != nil {
		return r, err
	}
	if err := m.become(ctx, v, shown(&r)); err != nil {
		return r, err
	}
	return m.change(ctx, v.id, func(r *Mirror) error {
		if err := promoted(r); err != nil {
			return err
		}
		r.State = meta.MirrorRunning
		return nil
	})
}

// become makes a volume a target with the contents of one of the volume's snapshots. The owner
// first refuses writers. Then the writers' sessions end, and their writes are rolled back.
func (m Mirrors) become(ctx context.Context, v *Volume, snapshot string) error {
	if err := filling(ctx, v, func() error { return m.s.ShowSnapshot(ctx, v.id, snapshot) }); err != nil {
		return err
	}
	return filling(ctx, v, func() error { return m.s.RollBackTarget(ctx, v.id, snapshot) })
}

// Reverse turns a promoted mirror around: the source, a volume of the cluster of m, becomes
// the target of its former mirror. Writes to the source since the last complete round are
// removed, and the source's sessions end. old administers the former mirror; at says how the
// copying process reaches the new source. Errors: Invalid (the mirror was not promoted), Busy
// (the source is, or was, the target of another mirror), NoSuchSnapshot (the source no longer
// has the snapshot of the last complete round).
func (m Mirrors) Reverse(ctx context.Context, old Mirrors, target string, at meta.MirrorSource) (Mirror, error) {
	const op = "reverse mirror"
	to, err := old.c.Volume(ctx, target)
	if err != nil {
		return Mirror{}, err
	}
	was, err := old.find(ctx, to.id)
	if err != nil {
		return was, err
	}
	if s, err := to.snapshots.shown(ctx); err != nil {
		return was, err
	} else if was.State != meta.MirrorPromoted || s != nil || was.Last == nil {
		return was, meta.E(op, meta.Invalid, target, errors.New("promote it first, after a complete round"))
	}
	v, err := m.c.VolumeByID(ctx, was.Source.ID)
	if err != nil {
		return was, err
	}
	if _, err := v.Snapshot(ctx, was.Last.Snapshot); err != nil {
		return was, err
	}
	r := was
	r.Revision, r.Target, r.Source, r.State, r.Asked = 0, v.id, at, meta.MirrorPaused, was.Asked+1
	r.Source.Volume, r.Source.ID = target, was.Target
	there, err := m.find(ctx, v.id)
	switch {
	case meta.KindOf(err) == meta.NotFound:
	case err != nil:
		return was, err
	case there.Name != was.Name || there.Source.ID != was.Target:
		return was, meta.E(op, meta.Busy, v.name, fmt.Errorf("volume %s has a mirror of its own, from %s: 'penstock mirror delete' comes first", v.name, there.Source.Volume))
	case there.State == meta.MirrorRunning: // an earlier try got as far
		return there, old.s.DropMirror(ctx, was.Target)
	default: // left by an incomplete try, or by the time as a target
		r.Revision = there.Revision
	}
	if _, err := m.s.PutMirror(ctx, r); err != nil {
		return was, err
	}
	if err := m.become(ctx, v, was.Last.Snapshot); err != nil {
		return was, err
	}
	if r, err = m.Resume(ctx, v.name); err != nil {
		return r, err
	}
	return r, old.s.DropMirror(ctx, was.Target)
}

// Delete forgets a mirror. The target stays, as an ordinary volume with the contents that
// Promote would leave. src is a client of the source's cluster, where Delete deletes the
// mirror's snapshots. With src nil the snapshots stay until their pins expire. Errors: as
// Promote.
func (m Mirrors) Delete(ctx context.Context, target string, src *Client) error {
	v, err := m.c.Volume(ctx, target)
	if err != nil {
		return err
	}
	r, err := m.find(ctx, v.id)
	if err != nil {
		return err
	}
	if s, err := v.snapshots.shown(ctx); err != nil {
		return err
	} else if r.State != meta.MirrorPromoted || s != nil {
		if r, err = m.release(ctx, v); err != nil {
			return err
		}
	}
	errs := []error{dropMirrored(ctx, v, &r, 0)}
	if src != nil {
		s, err := src.VolumeByID(ctx, r.Source.ID)
		if err == nil {
			err = dropMirrored(ctx, s, &r, 0)
		}
		if meta.KindOf(err) != meta.NoSuchVolume {
			errs = append(errs, err)
		}
	}
	if err := errors.Join(errs...); err != nil {
		return err
	}
	return m.s.DropMirror(ctx, r.Target)
}

// dropMirrored deletes the snapshots of a mirror, except the last complete snapshot, the
// keep-1 before, and those pinned by other holders; with keep 0, all. Newer snapshots belong
// to a round under way, perhaps of another process by now.
func dropMirrored(ctx context.Context, v *Volume, r *Mirror, keep int) error {
	l, err := v.snapshots.all(ctx)
	if err != nil {
		return err
	}
	if keep > 0 {
		l = l[:1+slices.IndexFunc(l, func(s meta.SnapshotInfo) bool { return s.Name == shown(r) })]
	}
	var errs []error
	for i := len(l) - 1; i >= 0; i-- {
		if !strings.HasPrefix(l[i].Name, r.Name+"-") || l[i].State != meta.SnapshotReady {
			continue
		}
		if keep--; keep >= 0 {
			continue
		}
		if err := v.snapshots.unpin(ctx, l[i].Name, r.Name); err != nil && meta.KindOf(err) != meta.NoSuchSnapshot {
			errs = append(errs, err)
			continue
		}
		if err := v.snapshots.delete(ctx, l[i].Name); err != nil && meta.KindOf(err) != meta.NoSuchSnapshot && meta.KindOf(err) != meta.Busy {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}
