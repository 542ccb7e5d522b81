package server

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/cluster"
	"penstock.io/penstock/meta/namespace"
)

// pins keeps the pins of a volume's snapshots, which are records in the store.
type pins struct {
	k         *kernel
	mirror    *mirrorTarget
	snapshots *snapshots
}

// pinSnapshot protects a snapshot from deletion for ttl, for a holder. by is the identity of
// the caller. at, unless zero, is the generation that the snapshot must have. Errors:
// NoSuchSnapshot, Invalid, NameTooLong, ResourceExceeded.
func (pn *pins) pinSnapshot(ctx context.Context, name string, at meta.Generation, holder, by string, ttl time.Duration) (meta.PinInfo, error) {
	sn, err := pn.pinnable(name, at)
	if err != nil {
		return meta.PinInfo{}, err
	}
	if _, err := pn.changePin(ctx, &meta.PinSnapshot{At: sn.At, Holder: holder, By: by, TTL: ttl}); err != nil {
		return meta.PinInfo{}, err
	}
	p, ok, err := pn.pin(sn.At, holder)
	if err == nil && !ok {
		err = meta.E("pin snapshot", meta.NoSuchSnapshot, name, errors.New("it was pinned, and let go at once"))
	}
	return pinInfo(p), err
}

// pinnable returns the snapshot with a name and, unless at is zero, with generation at.
func (pn *pins) pinnable(name string, at meta.Generation) (meta.Snapshot, error) {
	sn, err := pn.snapshots.find(name)
	if err == nil && at != 0 && at != sn.At {
		err = meta.E("pin snapshot", meta.NoSuchSnapshot, name, errors.New("it was deleted, and another one has its name"))
	}
	return sn, err
}

// unpin releases a pin; released: there was a pin. The pin's maker may release it, and so may
// sessions that administer the volume. Errors: NoSuchSnapshot, AccessDenied.
func (pn *pins) unpin(ctx context.Context, sess *session, name, holder string) (released bool, err error) {
	sn, err := pn.pinnable(name, 0)
	if err != nil {
		return false, err
	}
	p, ok, err := pn.pin(sn.At, holder)
	if err != nil || !ok {
		return false, err
	}
	if sess.who.Role.Granted() && p.By != sess.who.String() {
		if err := sess.authorize(pn.k.vol, cluster.AdminRights); err != nil {
			return false, meta.E("unpin snapshot", meta.AccessDenied, holder, fmt.Errorf("it was pinned by %s: %w", p.By, err))
		}
	}
	res, err := pn.changePin(ctx, &meta.UnpinSnapshot{At: sn.At, Holder: holder})
	if err != nil {
		return false, err
	}
	return res.Existed, nil
}

// changePin runs an operation about pins and waits for the journal.
func (pn *pins) changePin(ctx context.Context, op meta.Op) (*meta.Result, error) {
	k := pn.k
	if err := k.await(ctx, k.recovered); err != nil {
		return nil, err
	}
	return k.do(ctx, op, func() error { return k.full(op) })
}

// all lists the pins that have not surely ended.
func (pn *pins) all() (all []meta.Pin, err error) {
	err = pn.k.read(func(v *view) (err error) {
		all, err = namespace.Pins(v, pn.k.now())
		return err
	})
	return all, err
}

// pin returns a holder's pin unless the pin has surely ended.
func (pn *pins) pin(at meta.Generation, holder string) (p meta.Pin, ok bool, err error) {
	all, err := pn.all()
	i := slices.IndexFunc(all, func(p meta.Pin) bool { return p.Snapshot == at && p.Holder == holder })
	if err != nil || i < 0 {
		return p, false, err
	}
	return all[i], true, nil
}

func pinInfo(p meta.Pin) meta.PinInfo {
	return meta.PinInfo{Holder: p.Holder, By: p.By, Made: time.Unix(0, int64(p.Made)).UTC(), Until: time.Unix(0, int64(p.Until)).UTC()}
}

// listPins adds the pins to their snapshots, as many as fit into a page, and counts the other
// pins in MorePins. The caller holds the owner's mu.
func (pn *pins) listPins(l []meta.SnapshotInfo) error {
	all, err := namespace.Pins(pn.k.view(), pn.k.now())
	left := pageBytes
	for _, p := range all {
		i := slices.IndexFunc(l, func(s meta.SnapshotInfo) bool { return s.At == p.Snapshot })
		if i < 0 {
			continue
		}
		info := pinInfo(p)
		if left -= jsonSize(&info); left < 0 {
			l[i].MorePins++
			continue
		}
		l[i].Pins = append(l[i].Pins, info)
	}
	return err
}

// mayGo refuses the deletion of a volume of which a snapshot is pinned.
func (pn *pins) mayGo(ctx context.Context) error {
	k := pn.k
	if err := k.await(ctx, k.recovered); err != nil {
		return err
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.failed != nil {
		return k.failed
	}
	if pn.mirror.shown != 0 {
		return meta.E("delete volume", meta.Busy, k.subject(), errors.New("it is a mirror's target: 'penstock mirror delete' comes first"))
	}
	all, err := namespace.Pins(k.view(), k.now())
	if err != nil || len(all) == 0 {
		return err
	}
	return meta.E("delete volume", meta.Busy, k.subject(), fmt.Errorf("snapshots of it are pinned, one by %s until %s: 'penstock pin list' shows them",
		all[0].Holder, time.Unix(0, int64(all[0].Until)).UTC().Format(time.RFC3339)))
}
