package server

import (
	"context"
	"errors"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/cluster"
	"penstock.io/penstock/meta/namespace"
	"penstock.io/penstock/meta/server/pins"
)

// pinned gives the pins of a volume what they use of the owner.
type pinned struct {
	pins.Pins
	k         *kernel
	mirror    *mirrorTarget
	snapshots *snapshots
}

// Change runs an operation about pins and waits for the journal.
func (pn *pinned) Change(ctx context.Context, op meta.Op) (*meta.Result, error) {
	k := pn.k
	if err := k.await(ctx, k.recovered); err != nil {
		return nil, err
	}
	return k.do(ctx, op, func() error { return k.full(op) })
}

// Read calls fn with the state and the time.
func (pn *pinned) Read(fn func(r namespace.Reader, now meta.Time) error) error {
	return pn.k.read(func(v *view) error { return fn(v, pn.k.now()) })
}

// Snapshot finds a readable snapshot by name. Errors: NoSuchSnapshot.
func (pn *pinned) Snapshot(name string) (meta.Snapshot, error) { return pn.snapshots.find(name) }

// unpin releases a pin; released: there was a pin. The pin's maker may release it, and so may
// sessions that administer the volume. Errors: NoSuchSnapshot, AccessDenied.
func (pn *pinned) unpin(ctx context.Context, sess *session, name, holder string) (released bool, err error) {
	return pn.Unpin(ctx, name, holder, func(maker string) error {
		if !sess.who.Role.Granted() || maker == sess.who.String() {
			return nil
		}
		return sess.authorize(pn.k.vol, cluster.AdminRights)
	})
}

// listPins adds the pins to their snapshots, as many as fit into a page. The caller holds the
// owner's mu.
func (pn *pinned) listPins(l []meta.SnapshotInfo) error {
	left := pageBytes
	return pins.List(pn.k.view(), pn.k.now(), l, func(p *meta.PinInfo) bool {
		left -= jsonSize(p)
		return left >= 0
	})
}

// mayGo refuses the deletion of a volume of which a snapshot is pinned, and of a mirror's
// target. Errors: Busy.
func (pn *pinned) mayGo(ctx context.Context) error {
	k := pn.k
	if err := k.await(ctx, k.recovered); err != nil {
		return err
	}
	return k.read(func(v *view) error {
		if pn.mirror.shown != 0 {
			return meta.E("delete volume", meta.Busy, k.subject(), errors.New("it is a mirror's target: 'penstock mirror delete' comes first"))
		}
		return pins.MayDelete(v, k.now(), k.subject())
	})
}
