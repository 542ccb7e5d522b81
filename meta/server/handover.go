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

// The planned move of a volume from one server to another. Clients wait from the moment when
// the owner stops answering until the next owner answers. So as much work as possible is done
// before: the next owner first applies the journal up to its end, and then sends the request.
// Within the wait remain one journal entry, the transaction that releases the volume, a read
// and a transaction that take the volume, and the reading of the last entries. A stopping
// server asks the next owner to send the request.

// handOverWait bounds how long a volume being handed over answers no call. After handOverWait
// the volume stays.
const handOverWait = 3 * time.Second

// handedOver is the cause of an owner's end after a hand-over. addr is the next owner's
// address.
type handedOver struct{ addr string }

func (handedOver) Error() string { return "the volume was handed over" }

// takeOver prepares a volume's store and asks the volume's owner to release the volume. It
// returns the store; entries journaled just before the release may still be missing. Errors:
// NotOwner (the owner keeps the volume; the subject is the owner's address), and those of
// loadState.
func (op *opener) takeOver(ctx context.Context, v meta.VolumeID, from string) (Store, error) {
	log, err := op.cfg.Cluster.Follow(ctx, v)
	if err != nil {
		return nil, err
	}
	st, pos, _, err := op.loadState(ctx, v, log, nil)
	if err != nil {
		return nil, err
	}
	keep := func(err error) (Store, error) {
		return nil, meta.E("take volume", meta.NotOwner, from, errors.Join(err, op.standbys.give(v, st)))
	}
	if err := op.cfg.Cluster.Expect(ctx, v); err != nil {
		return keep(err)
	}
	// The owner first journals everything answered. Entries are applied as they come, so that
	// few are left to read after the release.
	following, stop := context.WithCancel(ctx)
	var wg sync.WaitGroup
	wg.Go(func() {
		err := log.Follow(following, pos, func(e journal.Entry) error { return replay(st, e) }, nil)
		if following.Err() == nil {
			op.log.Warn("a volume's journal could not be followed before the take-over", "volume", v, "error", err)
		}
	})
	ask, cancel := context.WithTimeoutCause(ctx, handOverWait, errors.New("the owner did not hand over in time"))
	defer cancel()
	re, err := op.peers.askPeer(ask, from, &wire.Admin{Op: wire.AdminHandOver, Volume: v, Name: op.cfg.Name, Entry: op.cfg.Addr})
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

// handOver gives the volume to another server: it journals everything answered, releases the
// right to the volume, and sends the sessions to the next owner. Calls arriving meanwhile wait
// for the next owner. Errors: NotOwner, Unavailable (the volume stays), Busy (another
// hand-over is under way).
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
			close(o.leaving) // the calls held back go on
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
	// No call is answered any more, so the release goes on even if the caller gave up.
	call, cancel := context.WithTimeout(context.WithoutCancel(ctx), handOverWait)
	err := o.own.Release(call)
	cancel()
	o.dismiss(to, why)
	o.log.Info("the volume was handed over", "to", to, "drained", drained.Round(time.Millisecond), "journaled", journaled.Round(time.Millisecond), "took", time.Since(began).Round(time.Millisecond), "error", err)
	o.srv.wg.Go(func() { o.srv.hosted.retire(o) }) // the next owner does not wait for the end
	return err
}

// drainWait bounds drain, and is part of handOverWait.
const drainWait = time.Second

// drain waits, at most for drainWait, until everything answered is durable except for about
// one entry, while calls go on. So only one entry is left to write while calls are held back.
func (o *owner) drain(ctx context.Context) {
	end := time.NewTimer(drainWait)
	defer end.Stop()
	for again := true; again; {
		o.mu.Lock()
		wait := o.untilDurable(o.newest())
		again = len(o.queue) > 0 // more entries than the current entry
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

// close gives the volume to the next server in rank, since this server stops.
func (o *owner) close(ctx context.Context) error {
	next := ""
	if view := o.srv.cfg.Cluster.View(); view != nil {
		for _, m := range cluster.Rank(o.vol, view.MetaServers) {
			if m.Name == o.srv.cfg.Name {
				continue
			}
			ask, cancel := context.WithTimeoutCause(ctx, handOverWait+time.Second, errors.New("the server did not take the volume in time"))
			re, err := o.srv.peers.askPeer(ask, m.Addr, &wire.Admin{Op: wire.AdminTake, Volume: o.vol, Name: o.srv.cfg.Name, Entry: o.srv.cfg.Addr})
			cancel()
			if err == nil {
				err = re.Status.Error()
			}
			if o.ctx.Err() != nil {
				return nil // another server took the volume
			}
			o.log.Info("a server did not take the volume", "server", m.Name, "error", err)
			if err == nil {
				continue // the server answered as if it owned the volume
			}
			if next == "" {
				next = m.Addr
			}
		}
	}
	for {
		// A server that did not take the volume above may still take it later.
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
			leaving = nil // after the owner parted, leaving is never closed
		}
		select {
		case <-leaving: // the volume stays: hand it over again
		case <-o.ctx.Done():
			return nil
		case <-ctx.Done():
			return meta.E("hand over", meta.Unavailable, o.subject(), context.Cause(ctx))
		}
	}
}

// leaverFor is how long another server's notice of stopping counts, unless the server goes off
// the list of servers before.
const leaverFor = 10 * time.Second

// leavers are listed servers that announced to stop. No volume has its home at a leaver.
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

// forget drops servers that are not on the list: a server appearing later under the same name
// is a new server.
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
