package server

import (
	"context"
	"encoding/base64"
	"errors"
	"time"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/namespace"
	"penstock.io/penstock/meta/wire"
)

const (
	// eventsPage bounds the events of an answer.
	eventsPage = 1000
	// eventsWait bounds how long a request waits for an event.
	eventsWait = 20 * time.Second
)

// eventWaits are the requests waiting for more events of a volume. The owner's mu guards them.
type eventWaits struct {
	news     chan struct{} // closed when the store has more events; nil: nobody waits
	watchers int           // waiting requests
}

// more returns a channel closed when the store has more events.
func (w *eventWaits) more() <-chan struct{} {
	if w.news == nil {
		w.news = make(chan struct{})
	}
	return w.news
}

// tell wakes the waiting requests: the store has more events.
func (w *eventWaits) tell() {
	if w.news != nil {
		close(w.news)
		w.news = nil
	}
}

// events answers a request of a client that follows a volume's events. It reads the store, so
// every event is in the journal: an operation answered early becomes an event when it is
// journaled. It reads a frozen state, so requests do not wait for it. Errors: ReadOnly (a
// mirror's target: its events are of the tree being filled, which readers don't see).
func (o *owner) events(ctx context.Context, sess *session, q *wire.EventsRequest) (*wire.EventsAnswer, error) {
	if err := o.await(ctx, o.recovered); err != nil {
		return nil, err
	}
	if err := awaitApplied(ctx, o); err != nil { // what was answered before, as that events are kept
		return nil, err
	}
	over := time.After(min(max(q.Wait, 0), eventsWait))
	for {
		o.mu.Lock()
		if o.failed != nil || o.stClosed || o.ctx.Err() != nil {
			o.mu.Unlock()
			return nil, o.gone()
		}
		if o.mirror.shown != 0 && !o.fills(sess.id) {
			err := errMirror("events", o)
			o.mu.Unlock()
			return nil, err
		}
		if closed := o.closed; closed != nil { // being rolled back: neither the old state nor the new
			o.mu.Unlock()
			if err := o.await(ctx, closed); err != nil {
				return nil, err
			}
			continue
		}
		told := o.eventWaits.more()
		o.wg.Add(1) // keeps the store open
		frozen := o.st.Freeze()
		o.mu.Unlock()
		a, err := readEvents(frozen, q)
		err = errors.Join(err, frozen.Close())
		o.wg.Done()
		if err != nil {
			return nil, err
		}
		// If this server has lost the volume, its state lacks events that the next owner may
		// already have reported: a caller with those events must not get an answer without
		// them.
		o.mu.Lock()
		late := o.outsideLease()
		o.mu.Unlock()
		if late {
			if err := o.await(ctx, soon()); err != nil {
				return nil, err
			}
			continue
		}
		if len(a.Events) > 0 || a.Rescan || a.Keep == 0 || q.Wait <= 0 {
			return a, nil
		}
		o.watch(1)
		select {
		case <-told:
		case <-over:
			q.Wait = 0
		case <-ctx.Done():
			err = meta.E("call", meta.Interrupted, "", context.Cause(ctx))
		case <-o.ctx.Done():
			err = o.gone()
		}
		o.watch(-1)
		if err != nil {
			return nil, err
		}
	}
}

// watch adds n to the requests waiting for an event: a volume with a waiting request is not
// idle.
func (o *owner) watch(n int) {
	o.mu.Lock()
	o.eventWaits.watchers += n
	o.mu.Unlock()
}

// readEvents reads a page of events, and the paths of the directories in it.
func readEvents(r namespace.Reader, q *wire.EventsRequest) (*wire.EventsAnswer, error) {
	log, err := namespace.EventLog(r)
	if err != nil {
		return nil, err
	}
	a := &wire.EventsAnswer{Keep: log.Keep, First: log.First, Last: log.Last}
	since := q.Since
	if q.Oldest && log.First > 0 {
		since = log.First - 1
	}
	if log.Keep == 0 || q.Newest {
		return a, nil
	}
	if since+1 < log.First || since > log.Last {
		a.Rescan = true
		return a, nil
	}
	all, err := namespace.Events(r, since, eventsPage)
	if err != nil {
		return nil, err
	}
	dirs := namespace.NewPaths(r)
	a.Dirs = map[meta.Ino][]byte{}
	size := 0
	for _, e := range all {
		a.Events = append(a.Events, wire.EventInfoOf(e))
		size += jsonSize(&a.Events[len(a.Events)-1])
		for _, dir := range []meta.Ino{e.Parent, e.FromParent} {
			if _, told := a.Dirs[dir]; dir == 0 || told {
				continue
			}
			path, err := dirs.Of(dir)
			switch {
			case err == nil:
				a.Dirs[dir] = []byte(path)
				size += 32 + base64.StdEncoding.EncodedLen(len(path))
			case !errors.Is(err, meta.Stale) && !errors.Is(err, meta.NameTooLong):
				return nil, err
			}
		}
		if size > pageBytes {
			break // the next request begins after the last event
		}
	}
	return a, nil
}

// eventsOp answers a request about events at the owner of the volume.
func (s *Server) eventsOp(ctx context.Context, sess *session, m *wire.Admin, re *wire.AdminRe) error {
	o, err := s.ownerOf(ctx, m)
	if err != nil {
		return err
	}
	if m.Op == wire.AdminSetEvents {
		if err := o.mayMirror(ctx, sess, "events"); err != nil {
			return err
		}
		var q wire.SetEventsRequest
		if err := readBody(m, &q); err != nil {
			return err
		}
		return o.durably(ctx, &meta.SetEvents{Keep: q.Keep})
	}
	var q wire.EventsRequest
	if err := readBody(m, &q); err != nil {
		return err
	}
	a, err := o.events(ctx, sess, &q)
	if err != nil {
		return err
	}
	return reportJSON(re, a)
}
