package penstock

import (
	"context"
	"errors"
	"time"

	"penstock.io/penstock/meta"
)

// Pages of shared mappings.
//
// A program that stores into a shared mapping makes a page of the kernel dirty. The client
// learns of the page only when the kernel writes the page back: seconds later, or when an
// invalidation demands the write. Until then the page may hold bytes invisible to other
// clients. So before the client gives a lease back, the kernel writes back its dirty pages
// (Launder), and the client puts the pages into the file under the lease; other clients change
// the file later. A page received after the end of its session is refused with an error: the
// page would overwrite later writes of other clients.
//
// A page never extends a file. The kernel writes pages up to the file size known to the
// kernel, and another client may have truncated the file since.

// Launderer is a Notifier for kernels with shared mappings.
type Launderer interface {
	// MayBeDirty reports whether a kernel may have dirty pages of the inode. It does not wait,
	// and may report true for an inode without dirty pages.
	MayBeDirty(v meta.VolumeID, ino meta.Ino) bool
	// Launder has the kernels write back and drop the inode's pages, and returns when
	// WritePage was called for each, and has returned.
	Launder(v meta.VolumeID, ino meta.Ino)
	// Settle waits until WritePage has returned for every page that was written back before
	// the call.
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

// pageFlush is the interval at which written-back pages are flushed while more pages arrive:
// the pages of one file may exceed the write buffer.
const pageFlush = 20 * time.Millisecond

// pageFlushMax bounds a wait for another operation of this client on the file: the operation
// may itself wait for the end of the recall.
const pageFlushMax = 2 * time.Second

// flushPages commits written-back pages, if there are any.
func (in *inode) flushPages(within time.Duration) {
	in.mu.Lock()
	some := in.file != nil && in.file.uncommitted > 0
	in.mu.Unlock()
	if !some {
		return
	}
	ctx, cancel := context.WithTimeout(in.vol.c.ctx, within)
	defer cancel()
	_ = in.vol.back.flushRound(ctx, in, flushClose)
}

// collect runs fn, during which the kernel writes pages back while the lease is being given
// back, and commits pages meanwhile to make room for more.
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
			// The next flush returns the same error.
			in.flushPages(pageFlushMax)
		}
	}
}

// Epoch numbers the client's sessions with the volume. A page written back in one session must
// not be put into the file in another.
func (v *Volume) Epoch() uint64 { return v.owner.epoch.Load() }

// WritePage writes a page of a shared mapping that the kernel has written back, up to the end
// of the file. epoch is the Epoch at the time of the write-back. Errors: as Write;
// SessionExpired.
func (v *Volume) WritePage(ctx context.Context, call *Call, ino meta.Ino, p []byte, off int64, epoch uint64) error {
	if err := v.readOnly("write"); err != nil {
		return err
	}
	if len(p) == 0 || off < 0 {
		return nil
	}
	in := v.node(ino)
	defer in.put()
	_, err := v.buffers.write(ctx, call, in, p, writing{off: off, page: true, epoch: epoch})
	return err
}

// pageTry is how long a page waits for the exclusive lease before WritePage checks whether the
// present lease is being recalled: the page must go in before the recall ends.
const pageTry = 5 * time.Millisecond

// toWritePage waits until a page may be put in, and returns with mu held.
func (in *inode) toWritePage(ctx context.Context, epoch uint64) (*file, error) {
	v := in.vol
	var gated time.Time
	for {
		in.mu.Lock()
		if v.owner.epoch.Load() != epoch || in.inval > 0 {
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
			case f.turns.gate > gates: // a truncation or a similar operation
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
			if _, err := in.loadMap(ctx, in.held(), true); err != nil {
				return nil, err
			}
			continue
		}
		if f.mapOK && in.lease == meta.LeaseExclusive && in.liveLocked() && f.turns.gate == 0 {
			return f, nil
		}
		in.mu.Unlock()
		if err := in.awaitPageTurn(ctx); err != nil {
			return nil, err
		}
	}
}

// held returns the present lease.
func (in *inode) held() meta.LeaseMode {
	in.mu.Lock()
	defer in.mu.Unlock()
	return in.lease
}

// awaitPageTurn asks for the exclusive lease, and gives up when the present lease is being
// recalled: the owner grants no other before this page is in the file.
func (in *inode) awaitPageTurn(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	got := make(chan error, 1)
	in.pins.Add(1)
	in.vol.c.spawn(func() {
		defer in.put()
		f, _, err := in.withMap(ctx, meta.LeaseExclusive)
		if err == nil {
			if f.turns.gate != 0 && (in.recall == nil || !in.recall.pages) {
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
				return nil // no other operation can write the page: ask again
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

// collectLast commits the pages that programs dirtied while the kernel forgot other pages.
// After that the kernel has no pages of the file, and gets none while reads are held back. The
// caller holds in.mu, which collectLast releases meanwhile.
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
