package server

import (
	"context"
	"errors"
	"sync"
	"time"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/cluster"
	"penstock.io/penstock/meta/journal"
	"penstock.io/penstock/meta/wire"
)

// A volume goes from one server to another in order. Clients wait from when the
// owner holds their calls back until the next one answers, so whatever can be
// done before is: the next owner brings its copy to the end of the journal, and
// then asks. Between stand one entry in the journal, one transaction that
// releases, a reading and a transaction that take, and the reading of the last
// entries. A server that stops asks the next one to ask.

// handOverWait bounds the time in which a volume that is handed over answers
// nobody: then it stays.
const handOverWait = 3 * time.Second

// handedOver is why an owner parted that gave its volume to another.
type handedOver struct{ addr string }

func (handedOver) Error() string { return "the volume was handed over" }

// takeOver makes ready for a volume and asks its owner to release it. It gives
// the store at the end of the journal, as it was before the release. Errors:
// NotOwner (the owner keeps it; the subject is its address), and those of
// loadState.
func (s *Server) takeOver(ctx context.Context, v meta.VolumeID, from string) (Store, error) {
	log, err := s.cfg.Cluster.Follow(ctx, v)
	if err != nil {
		return nil, err
	}
	st, pos, _, err := s.loadState(ctx, v, log, nil)
	if err != nil {
		return nil, err
	}
	keep := func(err error) (Store, error) {
		return nil, meta.E("take volume", meta.NotOwner, from, errors.Join(err, s.standbys.give(v, st)))
	}
	if err := s.cfg.Cluster.Expect(ctx, v); err != nil {
		return keep(err)
	}
	// The owner goes on until it has journaled what it answered: that is applied
	// as it comes, so that little is left to read when it is done.
	following, stop := context.WithCancel(ctx)
	var wg sync.WaitGroup
	wg.Go(func() {
		err := log.Follow(following, pos, func(e journal.Entry) error { return replay(st, e) }, nil)
		if following.Err() == nil {
			s.log.Warn("a volume's journal could not be followed before it was taken", "volume", v, "error", err)
		}
	})
	ask, cancel := context.WithTimeoutCause(ctx, handOverWait, errors.New("the owner did not hand over in time"))
	defer cancel()
	re, err := s.askPeer(ask, from, &wire.Admin{Op: wire.AdminHandOver, Volume: v, Name: s.cfg.Name, Entry: s.cfg.Addr})
	stop()
	wg.Wait()
	if err == nil {
		err = re.Status.Error()
	}
	if err != nil {
		return keep(err)
	}
	return st, nil
}

// handOver gives the volume to another server in order: everything answered is
// journaled, the right is released, sessions are told where to go. Calls that
// come meanwhile are not answered: the next owner does it.
// Errors: NotOwner, Unavailable (the volume stays).
func (o *owner) handOver(ctx context.Context, to string) error {
	began := time.Now()
	o.drain(ctx)
	drained := time.Since(began)
	o.mu.Lock()
	if o.failed == nil && o.leaving != nil {
		o.mu.Unlock()
		return meta.E("hand over", meta.Busy, o.subject(), errors.New("it is being handed over"))
	}
	o.leaving = make(chan struct{})
	for o.failed == nil && (len(o.cur.effects) > 0 || o.newest() > o.durable) {
		wait := o.untilDurable(o.newest())
		o.mu.Unlock()
		var err error
		select {
		case <-wait:
		case <-o.ctx.Done():
		case <-ctx.Done():
			err = meta.E("hand over", meta.Unavailable, o.subject(), context.Cause(ctx))
		}
		o.mu.Lock()
		if err != nil {
			close(o.leaving) // who was held back goes on
			o.leaving = nil
			o.mu.Unlock()
			return err
		}
	}
	why := handedOver{to}
	if !o.part(to, why) {
		err := o.failed
		o.mu.Unlock()
		return err
	}
	o.mu.Unlock()
	journaled := time.Since(began) - drained
	// Nobody is answered any more: it is released whoever still waits for that.
	call, cancel := context.WithTimeout(context.WithoutCancel(ctx), handOverWait)
	err := o.own.Release(call)
	cancel()
	o.dismiss(to, why)
	o.log.Info("the volume was handed over", "to", to, "drained", drained.Round(time.Millisecond), "journaled", journaled.Round(time.Millisecond), "took", time.Since(began).Round(time.Millisecond), "error", err)
	o.srv.wg.Go(func() { o.srv.retire(o) }) // who takes it does not wait for that
	return err
}

// drainWait bounds drain; it is part of handOverWait.
const drainWait = time.Second

// drain lets the journal get what was answered before calls are held back, so
// that one entry is left to be written while they are.
func (o *owner) drain(ctx context.Context) {
	end := time.NewTimer(drainWait)
	defer end.Stop()
	for again := true; again; {
		o.mu.Lock()
		wait := o.untilDurable(o.newest())
		again = len(o.queue) > 0 // more than what one entry takes
		o.mu.Unlock()
		select {
		case <-wait:
		case <-end.C:
			return
		case <-o.ctx.Done():
			return
		case <-ctx.Done():
			return
		}
	}
}

// close gives the volume to whoever is next, since the server stops.
func (o *owner) close(ctx context.Context) error {
	next := ""
	if view := o.srv.cfg.Cluster.View(); view != nil {
		for _, m := range cluster.Rank(o.vol, view.MetaServers) {
			if m.Name == o.srv.cfg.Name {
				continue
			}
			ask, cancel := context.WithTimeoutCause(ctx, handOverWait+time.Second, errors.New("the server did not take the volume in time"))
			re, err := o.srv.askPeer(ask, m.Addr, &wire.Admin{Op: wire.AdminTake, Volume: o.vol, Name: o.srv.cfg.Name, Entry: o.srv.cfg.Addr})
			cancel()
			if err == nil {
				err = re.Status.Error()
			}
			if o.ctx.Err() != nil {
				return nil // it has gone, whoever has it
			}
			o.log.Info("a server did not take the volume", "server", m.Name, "error", err)
			if err == nil {
				continue // it believes that it had it
			}
			if next == "" {
				next = m.Addr
			}
		}
	}
	for {
		// A server that was given up above may take it after all.
		o.mu.Lock()
		leaving, parted := o.leaving, o.failed != nil
		o.mu.Unlock()
		if !parted && leaving == nil {
			if err := o.handOver(ctx, next); !errors.Is(err, meta.Busy) {
				return err
			}
			continue
		}
		if parted {
			leaving = nil // it is not closed any more
		}
		select {
		case <-leaving: // it stays
		case <-o.ctx.Done():
			return nil
		case <-ctx.Done():
			return meta.E("hand over", meta.Unavailable, o.subject(), context.Cause(ctx))
		}
	}
}

// leaverFor is how long a server that said it stops is believed, unless it goes
// off the list before.
const leaverFor = 10 * time.Second

// leavers are servers on the list that said they stop: nothing is at home there
// any more.
type leavers struct {
	mu sync.Mutex
	m  map[string]time.Time // until when
}

func (l *leavers) add(name string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.m == nil {
		l.m = map[string]time.Time{}
	}
	l.m[name] = time.Now().Add(leaverFor)
}

func (l *leavers) has(name string) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return time.Now().Before(l.m[name])
}

// forget those that are not on the list: one that comes back under the name of
// one is another.
func (l *leavers) forget(listed []cluster.MetaServer) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for name := range l.m {
		there := false
		for _, m := range listed {
			there = there || m.Name == name
		}
		if !there {
			delete(l.m, name)
		}
	}
}
