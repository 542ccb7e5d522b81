package penstock

import (
	"context"
	"time"

	"penstock.io/penstock/meta"
)

// pin keeps the snapshot of a name from being deleted for a time. at, if not zero, is
// its generation. Errors: those of the administrative API's PinSnapshot.
func (sn *snapshotNames) pin(ctx context.Context, name string, at meta.Generation, holder string, ttl time.Duration) error {
	s, err := sn.session()
	if err != nil {
		return err
	}
	_, err = s.PinSnapshotAt(ctx, sn.v.id, name, at, holder, ttl)
	return err
}

// unpin releases a pin, if there is one. Errors: NoSuchSnapshot, AccessDenied.
func (sn *snapshotNames) unpin(ctx context.Context, name, holder string) error {
	s, err := sn.session()
	if err != nil {
		return err
	}
	_, err = s.UnpinSnapshot(ctx, sn.v.id, name, holder)
	return err
}

// Pin keeps the snapshot shown by v from being deleted, by hand and by schedule, until the
// holder releases the pin or ttl is over: a nanosecond to meta.MaxPinTTL by the clock of the
// volume's owner, and meta.ClockSkew more. A pin of the same holder with a later end stays
// unchanged. The pin is durable when the call returns. The holder is any text of 1 to 255
// bytes. Clients that may read the volume may pin. Errors: NotSupported for a volume that
// shows no snapshot; NoSuchSnapshot if the shown snapshot was deleted, even if another
// snapshot has its name by now; Invalid, NameTooLong, ResourceExceeded (meta.MaxPins).
func (v *Volume) Pin(ctx context.Context, holder string, ttl time.Duration) error {
	if v.view == nil {
		return meta.E("pin snapshot", meta.NotSupported, v.name, nil)
	}
	return v.view.of.snapshots.pin(ctx, v.view.snap.Name, v.view.snap.At, holder, ttl)
}

// renewals is how many times a pin is renewed in its time to live.
const renewals = 3

// KeepPinned renews a pin of the snapshot shown by v until ctx ends or the snapshot is gone.
// The pin then expires by itself, since other clients may hold the pin under the same name.
func (v *Volume) KeepPinned(ctx context.Context, holder string, ttl time.Duration) {
	wait := ttl / renewals
	for {
		select {
		case <-time.After(wait):
		case <-ctx.Done():
			return
		}
		wait = ttl / renewals
		asking, cancel := context.WithTimeout(ctx, max(wait, time.Second))
		err := v.Pin(asking, holder, ttl)
		cancel()
		switch meta.KindOf(err) {
		case meta.KindOK:
		case meta.NoSuchSnapshot, meta.NoSuchVolume:
			v.c.log.Error("the pinned snapshot is gone", "snapshot", v.name, "holder", holder, "err", err)
			return
		default:
			if ctx.Err() == nil {
				v.c.log.Warn("a pin was not renewed; the client tries again", "snapshot", v.name, "holder", holder, "err", err)
			}
			wait /= renewals
		}
	}
}
