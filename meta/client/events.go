package client

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/wire"
)

// eventsWait is how long a request waits for events.
const eventsWait = 15 * time.Second

// Event is an event of a volume, with the present path of its file if known.
type Event struct {
	meta.Event
	// Path and FromPath are Name and From with the paths of their directories, from the
	// volume's root, without a leading slash. The paths are for people: a directory may have
	// been moved since the event, and the path is empty if the directory is gone. Parent and
	// Name describe the time of the event.
	Path     string
	FromPath string
}

// EventLog returns the numbers of the events that a volume keeps.
func (s *Session) EventLog(ctx context.Context, v meta.VolumeID) (meta.EventLog, error) {
	a, err := s.events(ctx, v, wire.EventsRequest{Newest: true})
	return meta.EventLog{Keep: a.Keep, First: a.First, Last: a.Last}, err
}

// SetEvents switches a volume's events off (keep 0), on, or changes how many are
// kept: meta.MinEvents to meta.MaxEvents. Errors: Invalid.
func (s *Session) SetEvents(ctx context.Context, v meta.VolumeID, keep uint64) error {
	return s.askJSON(ctx, wire.Admin{Op: wire.AdminSetEvents, Volume: v}, wire.SetEventsRequest{Keep: keep}, nil)
}

func (s *Session) events(ctx context.Context, v meta.VolumeID, q wire.EventsRequest) (a wire.EventsAnswer, err error) {
	err = s.askJSON(ctx, wire.Admin{Op: wire.AdminEvents, Volume: v}, q, &a)
	return a, err
}

// Events calls fn with the events after number since, in order, each once. With follow, Events
// then waits for more events until ctx ends; without follow, Events returns after the last
// event. Events continues when the volume's owner changes. Errors: *meta.RescanError (the
// volume no longer keeps some events after since; while following, this also happens if fn is
// too slow); NotSupported (events are switched off); and the errors of fn.
func (s *Session) Events(ctx context.Context, v meta.VolumeID, since uint64, follow bool, fn func(Event) error) error {
	return s.eventsFrom(ctx, v, wire.EventsRequest{Since: since}, follow, fn)
}

// KeptEvents is Events from the oldest event kept when the volume's owner answers.
func (s *Session) KeptEvents(ctx context.Context, v meta.VolumeID, follow bool, fn func(Event) error) error {
	return s.eventsFrom(ctx, v, wire.EventsRequest{Oldest: true}, follow, fn)
}

func (s *Session) eventsFrom(ctx context.Context, v meta.VolumeID, q wire.EventsRequest, follow bool, fn func(Event) error) error {
	if follow {
		q.Wait = eventsWait
	}
	for {
		a, err := s.events(ctx, v, q)
		if follow && ctx.Err() == nil && passes(err) {
			// The volume is between two owners, or no owner can be reached.
			select {
			case <-time.After(lookMax):
				continue
			case <-ctx.Done():
			}
		}
		switch {
		case err != nil:
			return err
		case a.Keep == 0:
			return meta.E("events", meta.NotSupported, fmt.Sprintf("volume %d", v), errors.New("its events are switched off: 'penstock volume set VOLUME --events on'"))
		case a.Rescan:
			return &meta.RescanError{Since: q.Since, First: a.First, Last: a.Last}
		}
		if q.Oldest {
			q.Since = max(a.First, 1) - 1
			q.Oldest = false
		}
		for i := range a.Events {
			e := Event{Event: a.Events[i].Event()}
			if e.Seq != q.Since+1 {
				return meta.E("events", meta.Protocol, "", fmt.Errorf("event %d came after %d", e.Seq, q.Since))
			}
			e.Path, e.FromPath = pathIn(a.Dirs, e.Parent, e.Name), pathIn(a.Dirs, e.FromParent, e.From)
			if err := fn(e); err != nil {
				return err
			}
			q.Since = e.Seq
		}
		if !follow && q.Since >= a.Last {
			return nil
		}
	}
}

// passes reports that, judging by the error, the volume will be served again soon.
func passes(err error) bool {
	switch meta.KindOf(err) {
	case meta.NotOwner, meta.Unavailable, meta.Interrupted:
		return true
	}
	return false
}

func pathIn(dirs map[meta.Ino][]byte, dir meta.Ino, name string) string {
	at, ok := dirs[dir]
	if !ok || name == "" {
		return ""
	}
	return strings.TrimPrefix(string(at)+"/"+name, "/")
}
