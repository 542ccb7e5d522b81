package admin

import (
	"context"
	"errors"
	"fmt"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	"penstock.io/penstock/meta"
)

// eventsWait is how long a request of Follow waits for an event.
const eventsWait = 15 * time.Second

// VolumeEvent is an event of a volume, with the present paths of its names.
type VolumeEvent struct {
	meta.Event
	// Path and FromPath are Name and From with the paths of their directories, from the
	// volume's root, without a leading slash. The paths are for people: a directory may have
	// been moved since the event, and the path is empty if the directory is gone. Parent and
	// Name describe the time of the event.
	Path, FromPath string
}

// EventLog returns the numbers of the events that a volume keeps. Errors: as of GetEventLog.
func (c *Client) EventLog(ctx context.Context, volume *VolumeRef) (log meta.EventLog, err error) {
	answer, err := c.Events.GetEventLog(ctx, &GetEventLogRequest{Volume: volume})
	if err == nil {
		Hear(&log, answer)
	}
	return log, err
}

// Follow calls fn with the events that q asks for, in order, each once. With follow, Follow
// then waits for more events until ctx ends; without follow, Follow returns after the last
// event. Follow continues when the volume's owner changes, and with follow until a server can be
// reached again. It modifies q, so that a further call with q continues after the last event that
// fn handled.
//
// Errors: *meta.RescanError (the volume no longer keeps some events after q.Since; while
// following, this also happens if fn is too slow); the other errors of ReadEvents; and the errors
// of fn.
func (c *Client) Follow(ctx context.Context, q *ReadEventsRequest, follow bool, fn func(VolumeEvent) error) error {
	q.Wait = nil
	if follow {
		q.Wait = durationpb.New(eventsWait)
	}
	for {
		a, err := c.Events.ReadEvents(ctx, q)
		if follow && ctx.Err() == nil && passes(err) {
			select {
			case <-time.After(tryMax):
				continue
			case <-ctx.Done():
			}
		}
		if err != nil {
			return err
		}
		q.Volume = Numbered(meta.VolumeID(a.Volume))
		if a.Rescan {
			return &meta.RescanError{Since: q.Since, First: a.Log.First, Last: a.Log.Last}
		}
		if q.Oldest {
			q.Since = max(a.Log.First, 1) - 1
			q.Oldest = false
		}
		for _, x := range a.Events {
			if x.Seq != q.Since+1 {
				return meta.E("events", meta.Protocol, "", fmt.Errorf("event %d came after %d", x.Seq, q.Since))
			}
			e := VolumeEvent{Path: string(x.Path), FromPath: string(x.FromPath)}
			Hear(&e.Event, x)
			if err := fn(e); err != nil {
				return err
			}
			q.Since = e.Seq
		}
		if !follow && q.Since >= a.Log.Last {
			return nil
		}
	}
}

// passes reports that, judging by the error, a further call will be answered: the volume
// changes its owner, or no server could be reached for a while.
func passes(err error) bool {
	switch meta.KindOf(err) {
	case meta.NotOwner, meta.Unavailable, meta.Interrupted:
		return true
	}
	lost, is := errors.AsType[*noAnswer](err)
	return is && !refused(lost.err)
}
