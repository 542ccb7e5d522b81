// Package pins keeps the pins of a volume's snapshots. A pin protects a snapshot from deletion
// for a time, for a holder such as a training run. Pins are records in the volume's state, so
// every owner of the volume knows the pins.
package pins

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/namespace"
)

// A Volume is what pins use of the volume's owner.
type Volume interface {
	// Change runs an operation once the volume is recovered, and waits until the journal has
	// the operation.
	Change(ctx context.Context, op meta.Op) (*meta.Result, error)
	// Read calls fn with the volume's present state and the time.
	Read(fn func(r namespace.Reader, now meta.Time) error) error
	// Snapshot finds a readable snapshot by name. Errors: NoSuchSnapshot.
	Snapshot(name string) (meta.Snapshot, error)
}

// Pins are the pins of a volume.
type Pins struct {
	Volume Volume
}

// Pin protects a snapshot from deletion for ttl, for a holder. by is the identity of the
// caller. at, unless zero, is the generation that the snapshot must have. Errors:
// NoSuchSnapshot, Invalid, NameTooLong, ResourceExceeded.
func (p *Pins) Pin(ctx context.Context, name string, at meta.Generation, holder, by string, ttl time.Duration) (meta.PinInfo, error) {
	sn, err := p.pinnable(name, at)
	if err != nil {
		return meta.PinInfo{}, err
	}
	if _, err := p.Volume.Change(ctx, &meta.PinSnapshot{At: sn.At, Holder: holder, By: by, TTL: ttl}); err != nil {
		return meta.PinInfo{}, err
	}
	pin, ok, err := p.find(sn.At, holder)
	if err == nil && !ok {
		err = meta.E("pin snapshot", meta.NoSuchSnapshot, name, errors.New("it was pinned, and let go at once"))
	}
	return info(pin), err
}

// pinnable returns the snapshot with a name and, unless at is zero, with generation at.
func (p *Pins) pinnable(name string, at meta.Generation) (meta.Snapshot, error) {
	sn, err := p.Volume.Snapshot(name)
	if err == nil && at != 0 && at != sn.At {
		err = meta.E("pin snapshot", meta.NoSuchSnapshot, name, errors.New("it was deleted, and another one has its name"))
	}
	return sn, err
}

// Unpin releases a pin; released: there was a pin. may refuses to release the pin of a maker.
// Errors: NoSuchSnapshot, AccessDenied (may refused).
func (p *Pins) Unpin(ctx context.Context, name, holder string, may func(maker string) error) (released bool, err error) {
	sn, err := p.pinnable(name, 0)
	if err != nil {
		return false, err
	}
	pin, ok, err := p.find(sn.At, holder)
	if err != nil || !ok {
		return false, err
	}
	if err := may(pin.By); err != nil {
		return false, meta.E("unpin snapshot", meta.AccessDenied, holder, fmt.Errorf("it was pinned by %s: %w", pin.By, err))
	}
	res, err := p.Volume.Change(ctx, &meta.UnpinSnapshot{At: sn.At, Holder: holder})
	if err != nil {
		return false, err
	}
	return res.Existed, nil
}

// find returns a holder's pin unless the pin has surely ended.
func (p *Pins) find(at meta.Generation, holder string) (pin meta.Pin, ok bool, err error) {
	err = p.Volume.Read(func(r namespace.Reader, now meta.Time) error {
		all, err := namespace.Pins(r, now)
		if i := slices.IndexFunc(all, func(x meta.Pin) bool { return x.Snapshot == at && x.Holder == holder }); err == nil && i >= 0 {
			pin, ok = all[i], true
		}
		return err
	})
	return pin, ok, err
}

func info(p meta.Pin) meta.PinInfo {
	return meta.PinInfo{Holder: p.Holder, By: p.By, Made: time.Unix(0, int64(p.Made)).UTC(), Until: time.Unix(0, int64(p.Until)).UTC()}
}

// List adds the pins to their snapshots in l, and counts the pins that fits refuses in MorePins.
func List(r namespace.Reader, now meta.Time, l []meta.SnapshotInfo, fits func(*meta.PinInfo) bool) error {
	all, err := namespace.Pins(r, now)
	for _, p := range all {
		i := slices.IndexFunc(l, func(s meta.SnapshotInfo) bool { return s.At == p.Snapshot })
		if i < 0 {
			continue
		}
		pin := info(p)
		if !fits(&pin) {
			l[i].MorePins++
			continue
		}
		l[i].Pins = append(l[i].Pins, pin)
	}
	return err
}

// MayDelete refuses the deletion of a volume of which a snapshot is pinned. Errors: Busy.
func MayDelete(r namespace.Reader, now meta.Time, volume string) error {
	all, err := namespace.Pins(r, now)
	if err != nil || len(all) == 0 {
		return err
	}
	return meta.E("delete volume", meta.Busy, volume, fmt.Errorf("snapshots of it are pinned, one by %s until %s: 'penstock pin list' shows them",
		all[0].Holder, time.Unix(0, int64(all[0].Until)).UTC().Format(time.RFC3339)))
}
