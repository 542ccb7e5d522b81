package server

import (
	"context"
	"errors"
	"strings"
	"time"

	"google.golang.org/protobuf/proto"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/admin"
	"penstock.io/penstock/meta/namespace"
)

const (
	// eventsPage bounds the events of an answer.
	eventsPage = 1000
	// eventsWait bounds how long a request waits for an event.
	eventsWait = 20 * time.Second
)

// eventWaits are the requests waiting for more events of a volume. The owner's mu guards them.
type eventWaits struct {
	k      *kernel
	mirror *mirrorTarget

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

// eventsQuery asks for events of a volume.
type eventsQuery struct {
	since  uint64 // the events after this number
	oldest bool   // all kept events; since is ignored
	newest bool   // no event: only the numbers of the kept events
	// wait is how long the owner may wait for an event if the volume has none after since.
	wait time.Duration
}

// events tells a follower the events of the volume. It reads the store, so every event is in
// the journal: an operation answered early becomes an event when it is journaled. It reads a
// frozen state, so requests do not wait for it. Errors: NotSupported (events are switched off);
// ReadOnly (a mirror's target: its events are of the tree being filled, which readers don't see).
func (w *eventWaits) events(ctx context.Context, q eventsQuery) (*admin.ReadEventsResponse, error) {
	if err := w.k.await(ctx, w.k.recovered); err != nil {
		return nil, err
	}
	if err := w.k.awaitApplied(ctx); err != nil { // what was answered before, as that events are kept
		return nil, err
	}
	over := time.After(min(max(q.wait, 0), eventsWait))
	for {
		w.k.mu.Lock()
		if w.k.failed != nil || w.k.stClosed || w.k.ctx.Err() != nil {
			w.k.mu.Unlock()
			return nil, w.k.gone()
		}
		if w.mirror.shown != 0 && !q.newest {
			err := errMirror("events", w.k)
			w.k.mu.Unlock()
			return nil, err
		}
		if closed := w.k.closed; closed != nil { // being rolled back: neither the old state nor the new
			w.k.mu.Unlock()
			if err := w.k.await(ctx, closed); err != nil {
				return nil, err
			}
			continue
		}
		told := w.more()
		w.k.wg.Hold() // keeps the store open
		frozen := w.k.st.Freeze()
		w.k.mu.Unlock()
		a, err := readEvents(frozen, q)
		err = errors.Join(err, frozen.Close())
		w.k.wg.Release()
		if err != nil {
			return nil, err
		}
		// If this server has lost the volume, its state lacks events that the next owner may
		// already have reported: a caller with those events must not get an answer without
		// them.
		w.k.mu.Lock()
		late := w.k.outsideLease()
		w.k.mu.Unlock()
		switch {
		case late:
			if err := w.k.await(ctx, soon()); err != nil {
				return nil, err
			}
			continue
		case a.Log.Keep == 0 && !q.newest:
			return nil, meta.E("events", meta.NotSupported, w.k.subject(), errors.New("its events are switched off: 'penstock volume set VOLUME --events on'"))
		case len(a.Events) > 0 || a.Rescan || q.wait <= 0:
			a.Volume = uint32(w.k.vol)
			return a, nil
		}
		w.watch(1)
		select {
		case <-told:
		case <-over:
			q.wait = 0
		case <-ctx.Done():
			err = meta.E("call", meta.Interrupted, "", context.Cause(ctx))
		case <-w.k.ctx.Done():
			err = w.k.gone()
		}
		w.watch(-1)
		if err != nil {
			return nil, err
		}
	}
}

// watch adds n to the requests waiting for an event: a volume with a waiting request is not
// idle.
func (w *eventWaits) watch(n int) {
	w.k.mu.Lock()
	w.watchers += n
	w.k.mu.Unlock()
}

// readEvents reads a page of events, with the present paths of the events' names.
func readEvents(r namespace.Reader, q eventsQuery) (*admin.ReadEventsResponse, error) {
	log, err := namespace.EventLog(r)
	if err != nil {
		return nil, err
	}
	a := &admin.ReadEventsResponse{Log: &admin.EventLog{}}
	admin.Say(a.Log, log)
	since := q.since
	if q.oldest && log.First > 0 {
		since = log.First - 1
	}
	if log.Keep == 0 || q.newest {
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
	paths := namePaths{namespace.NewPaths(r), map[meta.Ino]*string{}}
	size := 0
	for _, e := range all {
		one := &admin.Event{}
		admin.Say(one, e)
		if one.Path, err = paths.of(e.Parent, e.Name); err != nil {
			return nil, err
		}
		if one.FromPath, err = paths.of(e.FromParent, e.From); err != nil {
			return nil, err
		}
		a.Events = append(a.Events, one)
		if size += proto.Size(one); size > pageBytes {
			break // the next request begins after the last event
		}
	}
	return a, nil
}

// namePaths finds the present paths of names.
type namePaths struct {
	paths *namespace.Paths
	dirs  map[meta.Ino]*string // nil: the directory is gone, or its path is too long
}

// of returns the path of a name in a directory, from the root without a leading slash; "" if
// the directory is gone, or its path too long.
func (p *namePaths) of(dir meta.Ino, name string) ([]byte, error) {
	if dir == 0 || name == "" {
		return nil, nil
	}
	at, known := p.dirs[dir]
	if !known {
		path, err := p.paths.Of(dir)
		switch {
		case err == nil:
			at = &path
		case !errors.Is(err, meta.Stale) && !errors.Is(err, meta.NameTooLong):
			return nil, err
		}
		p.dirs[dir] = at
	}
	if at == nil {
		return nil, nil
	}
	return []byte(strings.TrimPrefix(*at+"/"+name, "/")), nil
}
