package penstock

import (
	"context"
	"errors"
	"iter"

	"penstock.io/penstock/meta"
	metaclient "penstock.io/penstock/meta/client"
)

// Event is one change of a volume's namespace; RescanError tells a consumer that
// events were missed.
type (
	Event       = metaclient.Event
	RescanError = meta.RescanError
)

// eventSession is what a session does about events; the methods' promises are at
// meta/client.
type eventSession interface {
	EventLog(ctx context.Context, v meta.VolumeID) (meta.EventLog, error)
	SetEvents(ctx context.Context, v meta.VolumeID, keep uint64) error
	Events(ctx context.Context, v meta.VolumeID, since uint64, follow bool, fn func(metaclient.Event) error) error
}

var _ eventSession = session{}

func (v *Volume) eventSession() (eventSession, error) {
	if err := v.readOnly("events"); err != nil {
		return nil, err
	}
	s, ok := v.c.sess.(eventSession)
	if !ok {
		return nil, meta.E("events", meta.NotSupported, v.name, nil)
	}
	return s, nil
}

// EventLog tells which events the volume keeps. Keep 0: they are switched off.
func (v *Volume) EventLog(ctx context.Context) (meta.EventLog, error) {
	s, err := v.eventSession()
	if err != nil {
		return meta.EventLog{}, err
	}
	return s.EventLog(ctx, v.id)
}

// SetEvents switches the volume's events on, keeping the last keep of them
// (meta.MinEvents to meta.MaxEvents; some 60 bytes each in the volume's state),
// or with 0 off. Errors: Invalid, AccessDenied (the grant is not to administer).
func (v *Volume) SetEvents(ctx context.Context, keep uint64) error {
	s, err := v.eventSession()
	if err != nil {
		return err
	}
	return s.SetEvents(ctx, v.id, keep)
}

// Events returns the events after number since, in the order of the journal, each once. With
// follow, Events waits for more until ctx ends, also when the owner changes. The reported
// changes are durable. A consumer that stops can continue later from the number of the last
// handled event. An error ends the sequence: *RescanError when some of the requested events
// are no longer kept, NotSupported when events are switched off.
//
// To begin, or after a RescanError: take the number Last of EventLog, or of the error, walk
// the tree, then request the events after Last. Some events describe changes that the walk
// already saw, so treat an event as "look here". For an exact copy, take a snapshot, copy the
// snapshot, and continue after the snapshot's own event.
func (v *Volume) Events(ctx context.Context, since uint64, follow bool) iter.Seq2[Event, error] {
	enough := errors.New("enough")
	return func(yield func(Event, error) bool) {
		s, err := v.eventSession()
		if err == nil {
			err = s.Events(ctx, v.id, since, follow, func(e Event) error {
				if !yield(e, nil) {
					return enough
				}
				return nil
			})
		}
		if err != nil && !errors.Is(err, enough) {
			yield(Event{}, err)
		}
	}
}
