package penstock

import (
	"context"
	"time"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/wire"
)

// Pin tells of a holder that keeps a snapshot.
type Pin = wire.PinInfo

// PinSnapshot keeps a snapshot from being deleted, by hand and by schedule, until
// the holder gives it up or ttl is over: a nanosecond to meta.MaxPinTTL by the
// clock of the volume's owner, and meta.ClockSkew more. A pin of the holder that
// lasts longer already stays as it is. It is durable when the call returns. The
// holder is any text of 1 to 255 bytes. Who may read the volume may pin.
// Errors: NoSuchSnapshot, Invalid, NameTooLong, ResourceExceeded (meta.MaxPins).
func (v *Volume) PinSnapshot(ctx context.Context, name, holder string, ttl time.Duration) (Pin, error) {
	return v.pinAt(ctx, name, 0, holder, ttl)
}

// pinAt is PinSnapshot of the snapshot of a generation; 0: whichever has the name.
func (v *Volume) pinAt(ctx context.Context, name string, at meta.Generation, holder string, ttl time.Duration) (Pin, error) {
	s, err := v.snapshotSession()
	if err != nil {
		return Pin{}, err
	}
	return s.PinSnapshotAt(ctx, v.id, name, at, holder, ttl)
}

// UnpinSnapshot gives a pin up, and tells whether there was one. Who made it may,
// and who administers the volume. Errors: NoSuchSnapshot, AccessDenied.
func (v *Volume) UnpinSnapshot(ctx context.Context, name, holder string) (released bool, err error) {
	s, err := v.snapshotSession()
	if err != nil {
		return false, err
	}
	return s.UnpinSnapshot(ctx, v.id, name, holder)
}

// Pin is PinSnapshot for a volume that shows a snapshot. Errors: also
// NotSupported for one that does not; NoSuchSnapshot if what is shown was deleted,
// although another snapshot has its name by now.
func (v *Volume) Pin(ctx context.Context, holder string, ttl time.Duration) (Pin, error) {
	if v.view == nil {
		return Pin{}, meta.E("pin snapshot", meta.NotSupported, v.name, nil)
	}
	return v.view.of.pinAt(ctx, v.view.snap.Name, v.view.snap.At, holder, ttl)
}

// renewals is how many times a pin is renewed in its time to live.
const renewals = 3

// KeepPinned renews a pin of the snapshot that is shown here until ctx ends, or
// the snapshot is gone; the pin then runs out by itself, since others may hold
// it under the same name.
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
		_, err := v.Pin(asking, holder, ttl)
		cancel()
		switch meta.KindOf(err) {
		case meta.KindOK:
		case meta.NoSuchSnapshot, meta.NoSuchVolume:
			v.c.log.Error("the pinned snapshot is gone", "snapshot", v.name, "holder", holder, "err", err)
			return
		default:
			if ctx.Err() == nil {
				v.c.log.Warn("pin not renewed; it is tried again", "snapshot", v.name, "holder", holder, "err", err)
			}
			wait /= renewals
		}
	}
}
