package penstock

import (
	"context"
	crand "crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"time"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/wire"
)

// Mirror is what is known of a mirror; MirrorRound is one copy of a snapshot.
type (
	Mirror      = meta.Mirror
	MirrorRound = meta.MirrorRound
)

// mirrorSession is what a session does about mirrors; the methods' promises are
// at meta/client.
type mirrorSession interface {
	Mirrors(ctx context.Context, target meta.VolumeID) ([]meta.Mirror, error)
	PutMirror(ctx context.Context, m meta.Mirror) (meta.Mirror, error)
	DropMirror(ctx context.Context, target meta.VolumeID) error
	ShowSnapshot(ctx context.Context, target meta.VolumeID, name string) error
	DiffExact(ctx context.Context, v meta.VolumeID, from, to string, fn func(meta.Change) error) error
}

var _ mirrorSession = session{}

// Mirrors administers the mirrors whose targets are in the cluster that a client
// is connected to. A mirror's target is a volume that holds what another one, the
// source, held at one of its snapshots: readers see the last snapshot that was
// copied completely and checked, and go to the next one at once. Only the mirror
// writes it. RunMirrors does the copying.
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
func (m Mirrors) All(ctx context.Context) ([]Mirror, error) { return m.s.Mirrors(ctx, 0) }

// Find gives the mirror that has a target. Errors: NoSuchVolume, NotFound.
func (m Mirrors) Find(ctx context.Context, target string) (Mirror, error) {
	v, err := m.c.Volume(ctx, target)
	if err != nil {
		return Mirror{}, err
	}
	return m.find(ctx, v.id)
}

func (m Mirrors) find(ctx context.Context, target meta.VolumeID) (Mirror, error) {
	l, err := m.s.Mirrors(ctx, target)
	if err != nil {
		return Mirror{}, err
	}
	if len(l) != 1 {
		return Mirror{}, meta.E("find mirror", meta.Protocol, "", fmt.Errorf("%d records of one mirror", len(l)))
	}
	if l[0].Version > meta.MirrorVersion {
		return l[0], meta.E("find mirror", meta.Version, "", fmt.Errorf("the record has version %d, this program knows up to %d", l[0].Version, meta.MirrorVersion))
	}
	return l[0], nil
}

// Change changes what is wanted of a mirror: how often, how fast, whether it is
// paused. change may be called several times. Errors: change's, and those of Find.
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
	Source *Volume // of this cluster or another one
	// At says how whoever copies reaches the source's cluster; its addresses are
	// empty for a volume of the target's cluster.
	At     meta.MirrorSource
	Target string      // name of the volume that is made
	Policy meta.Policy // of it
	Every  time.Duration
	Rate   uint64
	Keep   int
}

// Create makes a target, which is empty until the first round is complete.
// Errors: VolumeExists, Invalid.
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
	made, err := vols.Create(ctx, p.Target, p.Policy, VolumeWords{})
	if err != nil {
		return none, err
	}
	var b [6]byte
	_, _ = crand.Read(b[:]) // never fails
	r := Mirror{Version: meta.MirrorVersion, Name: "mirror-" + hex.EncodeToString(b[:]), Target: made.ID, State: meta.MirrorRunning,
		Source: p.At, Every: p.Every, Rate: p.Rate, Keep: p.Keep}
	r.Source.Volume, r.Source.ID = p.Source.name, p.Source.id
	v, err := m.c.VolumeByID(ctx, made.ID)
	if err == nil {
		err = v.filling(ctx, func() error {
			if _, err := v.TakeSnapshot(ctx, emptySnapshot(&r)); err != nil {
				return err
			}
			return m.s.ShowSnapshot(ctx, v.id, emptySnapshot(&r))
		})
	}
	if err == nil {
		r, err = m.s.PutMirror(ctx, r)
	}
	if err != nil {
		err = fmt.Errorf("volume %s was made, but is no mirror's target: delete it: %w", p.Target, err)
	}
	return r, err
}

// emptySnapshot is the target's first, which readers see until a round is
// complete.
func emptySnapshot(r *Mirror) string { return r.Name + "-empty" }

// shown is the snapshot that readers of the target see.
func shown(r *Mirror) string {
	if r.Last != nil {
		return r.Last.Snapshot
	}
	return emptySnapshot(r)
}

// fillWait is how long the one that fills a target may take to let go.
const fillWait = 2 * time.Minute

// fill takes the right to change a mirror's target, which one session has.
// Errors: WouldBlock (another one has it).
func (v *Volume) fill(ctx context.Context, owner uint64, wait bool) error {
	return v.SetLock(ctx, meta.Lock{Ino: meta.MirrorLock, Owner: owner, Type: meta.LockWrite, Flock: true, End: 1<<63 - 1}, wait)
}

func (v *Volume) unfill(ctx context.Context, owner uint64) error {
	return v.SetLock(ctx, meta.Lock{Ino: meta.MirrorLock, Owner: owner, Type: meta.LockUnlock, Flock: true, End: 1<<63 - 1}, false)
}

// filling runs fn with the right to change a mirror's target, once whoever has it
// let go. Errors: Busy (it does not).
func (v *Volume) filling(ctx context.Context, fn func() error) error {
	owner := rand.Uint64()
	wait, cancel := context.WithTimeout(ctx, fillWait)
	err := v.fill(wait, owner, true)
	cancel()
	if meta.KindOf(err) == meta.Interrupted && ctx.Err() == nil {
		return meta.E("mirror", meta.Busy, v.name, errors.New("whoever fills it does not let go: try again, or stop that process"))
	}
	if err != nil {
		return err
	}
	err = fn()
	end, cancel := context.WithTimeout(context.WithoutCancel(ctx), 10*time.Second)
	defer cancel()
	if uerr := v.unfill(end, owner); err == nil {
		err = uerr
	}
	return err
}

// Promote makes the target a volume like others, with what its readers see: what
// was copied of a round that is under way goes. The mirror stays known, so that
// Resync and Reverse can go on from there. Errors: Busy.
func (m Mirrors) Promote(ctx context.Context, target string) (Mirror, error) {
	v, err := m.c.Volume(ctx, target)
	if err != nil {
		return Mirror{}, err
	}
	r, err := m.change(ctx, v.id, func(r *Mirror) error {
		if r.State == meta.MirrorPromoted {
			return meta.E("promote mirror", meta.Invalid, target, errors.New("it was promoted before"))
		}
		r.State = meta.MirrorPaused // whoever fills it lets go
		return nil
	})
	if err != nil {
		return r, err
	}
	if r.Round != nil {
		if err := v.filling(ctx, func() error { return v.RollBack(ctx, shown(&r), true) }); err != nil && meta.KindOf(err) != meta.SessionExpired {
			return r, err
		}
	}
	if err := v.filling(ctx, func() error {
		if _, err := v.PinSnapshot(ctx, shown(&r), r.Name, mirrorPin); err != nil {
			return err
		}
		return m.s.ShowSnapshot(ctx, v.id, "")
	}); err != nil {
		return r, err
	}
	return m.change(ctx, v.id, func(r *Mirror) error { r.State, r.Round = meta.MirrorPromoted, nil; return nil })
}

// Resync makes a promoted target one again: what was written to it since goes.
// Its sessions end. Errors: Invalid (it was not promoted).
func (m Mirrors) Resync(ctx context.Context, target string) (Mirror, error) {
	v, err := m.c.Volume(ctx, target)
	if err != nil {
		return Mirror{}, err
	}
	r, err := m.find(ctx, v.id)
	if err != nil {
		return r, err
	}
	if r.State != meta.MirrorPromoted {
		return r, meta.E("resync mirror", meta.Invalid, target, errors.New("it was not promoted"))
	}
	if err := m.become(ctx, v, shown(&r)); err != nil {
		return r, err
	}
	return m.change(ctx, v.id, func(r *Mirror) error { r.State = meta.MirrorRunning; return nil })
}

// become makes a volume a target that holds what one of its snapshots does. First
// it refuses writers, then their sessions end, and what they wrote goes.
func (m Mirrors) become(ctx context.Context, v *Volume, snapshot string) error {
	if err := v.filling(ctx, func() error { return m.s.ShowSnapshot(ctx, v.id, snapshot) }); err != nil {
		return err
	}
	err := v.filling(ctx, func() error { return v.RollBack(ctx, snapshot, true) })
	if meta.KindOf(err) == meta.SessionExpired {
		err = nil // ours was one of them
	}
	return err
}

// Reverse turns a promoted mirror around: the source, which is a volume of the
// cluster of m, becomes the target of the volume that was its mirror; what was
// written to it since the last complete round goes, and its sessions end. old
// administers the mirror as it was; at says how whoever copies reaches the new
// source. Errors: Invalid (it was not promoted), NoSuchSnapshot (the source does
// not have the snapshot that both had any more).
func (m Mirrors) Reverse(ctx context.Context, old Mirrors, target string, at meta.MirrorSource) (Mirror, error) {
	was, err := old.Find(ctx, target)
	if err != nil {
		return was, err
	}
	if was.State != meta.MirrorPromoted || was.Last == nil {
		return was, meta.E("reverse mirror", meta.Invalid, target, errors.New("promote it first, after a complete round"))
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
	if _, err := m.find(ctx, v.id); meta.KindOf(err) == meta.NotFound {
		if _, err := m.s.PutMirror(ctx, r); err != nil {
			return was, err
		}
	} else if err != nil {
		return was, err
	}
	if err := m.become(ctx, v, was.Last.Snapshot); err != nil {
		return was, err
	}
	if r, err = m.change(ctx, v.id, func(r *Mirror) error { r.State = meta.MirrorRunning; return nil }); err != nil {
		return r, err
	}
	return r, old.s.DropMirror(ctx, was.Target)
}

// Delete forgets a mirror. Its target stays, a volume like others, as Promote
// makes it. src is a client of the source's cluster, where the mirror's snapshots
// are deleted; nil leaves them: their pins run out. Errors: as Promote.
func (m Mirrors) Delete(ctx context.Context, target string, src *Client) error {
	r, err := m.Find(ctx, target)
	if err != nil {
		return err
	}
	if r.State != meta.MirrorPromoted {
		if r, err = m.Promote(ctx, target); err != nil {
			return err
		}
	}
	if err := m.s.DropMirror(ctx, r.Target); err != nil {
		return err
	}
	v, err := m.c.VolumeByID(ctx, r.Target)
	if err != nil {
		return err
	}
	errs := []error{v.dropMirrored(ctx, &r, 0)}
	if src != nil {
		s, err := src.VolumeByID(ctx, r.Source.ID)
		if err == nil {
			err = s.dropMirrored(ctx, &r, 0)
		}
		if meta.KindOf(err) != meta.NoSuchVolume {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

// dropMirrored deletes the snapshots of a mirror but the newest and those that
// others pinned.
func (v *Volume) dropMirrored(ctx context.Context, r *Mirror, keep int) error {
	l, err := v.Snapshots(ctx)
	if err != nil {
		return err
	}
	var errs []error
	for i := len(l) - 1; i >= 0; i-- {
		if !strings.HasPrefix(l[i].Name, r.Name+"-") || l[i].State != wire.SnapshotReady {
			continue
		}
		if keep--; keep >= 0 {
			continue
		}
		if _, err := v.UnpinSnapshot(ctx, l[i].Name, r.Name); err != nil && meta.KindOf(err) != meta.NoSuchSnapshot {
			errs = append(errs, err)
			continue
		}
		if err := v.DeleteSnapshot(ctx, l[i].Name); err != nil && meta.KindOf(err) != meta.NoSuchSnapshot && meta.KindOf(err) != meta.Busy {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}
