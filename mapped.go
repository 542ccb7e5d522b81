package penstock

import (
	"context"
	"errors"
	"time"

	"penstock.io/penstock/meta"
)

// Pages of shared mappings.
//
// A program that stores into a shared mapping makes a page of the kernel dirty, and
// nobody hears of it before the kernel writes the page back: seconds later, or when
// an invalidation asks for it. Until then the page may hold more than anybody else can
// see. So before a lease is given back the kernel writes back what it has (Launder),
// and the pages go into the file under the lease that still stands; whoever asked for
// the lease changes the file after that. A page that comes too late for this, as its
// session has ended, is refused with an error: put in later, it would undo what others
// wrote in the meantime.
//
// A page never makes a file longer. The kernel goes by the size that it knows, and
// somebody else may have truncated the file since.

// Launderer is a Notifier of kernels that have shared mappings.
type Launderer interface {
	// MayBeDirty reports whether a kernel may have dirty pages of the inode. It does not
	// wait, and it may be wrong by saying yes.
	MayBeDirty(v meta.VolumeID, ino meta.Ino) bool
	// Launder has the kernels write back and drop the inode's pages, and returns when
	// WritePage was called for each, and has returned.
	Launder(v meta.VolumeID, ino meta.Ino)
	// Settle waits until WritePage has returned for each page that was written back by now.
	Settle(v meta.VolumeID, ino meta.Ino)
}

// mayBeDirty gives the Launderer of an inode of which a kernel may have dirty pages,
// else nil.
func (c *Client) mayBeDirty(v meta.VolumeID, ino meta.Ino) Launderer {
	if l, ok := c.cfg.Notify.(Launderer); ok && !c.cfg.UnsafeNoLaunder && l.MayBeDirty(v, ino) {
		return l
	}
	return nil
}

// pageFlush is how often what was written back is flushed while more comes: the pages
// of one file may be more than fit the write buffer.
const pageFlush = 20 * time.Millisecond

// pageFlushMax bounds what waits for an operation of this client on the file, which may
// itself wait until the lease is given back.
const pageFlushMax = 2 * time.Second

// flushPages commits what was put in, unless there is nothing.
func (in *inode) flushPages(within time.Duration) {
	in.mu.Lock()
	some := in.file != nil && in.file.uncommitted > 0
	in.mu.Unlock()
	if !some {
		return
	}
	ctx, cancel := context.WithTimeout(in.vol.c.ctx, within)
	defer cancel()
	_ = in.vol.flushRound(ctx, in, flushClose)
}

// collect runs fn, in which pages are written back while the lease is being given back,
// and commits meanwhile so that there is room for them.
func (in *inode) collect(fn func()) {
	done := make(chan struct{})
	in.vol.c.spawn(func() {
		fn()
		close(done)
	})
	for {
		select {
		case <-done:
			return
		case <-time.After(pageFlush):
			// Its error comes again in the flush that follows.
			in.flushPages(pageFlushMax)
		}
	}
}

// Epoch numbers the client's sessions with the volume: what a page held when it was
// written back in one counts for nothing in another.
func (v *Volume) Epoch() uint64 { return v.epoch.Load() }

// WritePage puts in what the kernel has written back of a shared mapping: what of it
// lies before the end of the file. epoch is that of the time when the kernel did so.
// Errors: as Write; SessionExpired.
func (v *Volume) WritePage(ctx context.Context, call *Call, ino meta.Ino, p []byte, off int64, epoch uint64) error {
	if err := v.readOnly("write"); err != nil {
		return err
	}
	if len(p) == 0 || off < 0 {
		return nil
	}
	in := v.node(ino)
	defer in.put()
	_, err := v.writeIn(ctx, call, in, p, writing{off: off, page: true, epoch: epoch})
	return err
}

// pageTry is how long a page waits for the exclusive lease before it looks whether the
// lease that is there is being taken back: the page is put in before that.
const pageTry = 5 * time.Millisecond

// toWritePage waits until a page may be put in, and returns with mu held.
func (in *inode) toWritePage(ctx context.Context, epoch uint64) (*file, error) {
	v := in.vol
	var gated time.Time
	for {
		in.mu.Lock()
		if v.epoch.Load() != epoch || in.inval > 0 {
			in.mu.Unlock()
			return nil, meta.E("write a page of a mapping", meta.SessionExpired, v.subject(in.ino), errors.New("the session in which the page was stored into has ended"))
		}
		f := in.fileLocked()
		if r := in.recall; r != nil && r.pages {
			gates := int32(0)
			if r.gated {
				gates = 1
			}
			switch {
			case f.gate > gates: // a truncation or its like
				if gated.IsZero() {
					gated = time.Now()
				}
				if time.Since(gated) > pageFlushMax {
					in.mu.Unlock()
					return nil, meta.E("write a page of a mapping", meta.IO, v.subject(in.ino), errors.New("the lease is being taken back, and another operation on the file waits for that"))
				}
				in.mu.Unlock()
				time.Sleep(pageTry)
				continue
			case in.lease == meta.LeaseNone:
				in.mu.Unlock()
				return nil, meta.E("write a page of a mapping", meta.IO, v.subject(in.ino), errors.New("the lease is gone"))
			case f.mapOK:
				return f, nil
			}
			in.mu.Unlock()
			if _, err := in.loadMap(ctx, in.held()); err != nil {
				return nil, err
			}
			continue
		}
		if f.mapOK && in.lease == meta.LeaseExclusive && in.liveLocked() && f.gate == 0 {
			return f, nil
		}
		in.mu.Unlock()
		if err := in.awaitPageTurn(ctx); err != nil {
			return nil, err
		}
	}
}

// held is the lease that is there.
func (in *inode) held() meta.LeaseMode {
	in.mu.Lock()
	defer in.mu.Unlock()
	return in.lease
}

// awaitPageTurn asks for the exclusive lease, and gives up when the lease is being
// taken back: the owner grants none before this page was put in.
func (in *inode) awaitPageTurn(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	got := make(chan error, 1)
	in.pins.Add(1)
	in.vol.c.spawn(func() {
		defer in.put()
		f, _, err := in.withMap(ctx, meta.LeaseExclusive)
		if err == nil {
			if f.gate != 0 && (in.recall == nil || !in.recall.pages) {
				err = in.wait(ctx, f)
			}
			in.mu.Unlock()
		}
		got <- err
	})
	tick := time.NewTicker(pageTry)
	defer tick.Stop()
	for {
		select {
		case err := <-got:
			if errors.Is(err, meta.Busy) {
				return nil // nobody else could put the page in: it asks again
			}
			return err
		case <-tick.C:
		}
		in.mu.Lock()
		recalled := in.recall != nil && in.recall.pages
		in.mu.Unlock()
		if recalled {
			cancel()
			<-got
			return nil
		}
	}
}

// collectLast commits the pages that were stored into while the kernel forgot the
// others. It has none any more, and fills none while reads are held back. in.mu is
// held, and released meanwhile.
func (in *inode) collectLast(ask *recallAsk, pages Launderer) {
	in.mu.Unlock()
	in.collect(func() { pages.Settle(in.vol.id, in.ino) })
	in.mu.Lock()
	in.recall.pages = false
	if f := in.file; f != nil && f.uncommitted > 0 {
		in.mu.Unlock()
		in.flushForRecall(ask)
		in.mu.Lock()
	}
}
