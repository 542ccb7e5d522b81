package server

import (
	"context"
	"errors"
	"sync"
	"time"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/namespace"
)

// Snapshots are compared in one go, since a rename is known only when both ends of it
// are, and changes are told in the order of paths. So a comparison of more changes
// than one answer takes is kept until its last page was asked for. What that needs of
// memory is bounded by how many are made and kept at once; who asks for another one
// waits.

const (
	diffPage  = 10_000 // changes in one answer, fewer if they take pageBytes
	diffKeep  = time.Minute
	diffSlots = 8 // comparisons made and kept at once
)

// comparison is one that was made; all is what changed.
type comparison struct {
	o    *owner
	all  []meta.Change
	told bool // to the end: it is kept for who asks again since an answer was lost
	drop *time.Timer
}

// comparisons are those of a server.
type comparisons struct {
	most int

	mu     sync.Mutex
	kept   map[uint64]*comparison
	last   uint64        // number of one
	making int           // not kept yet
	freed  chan struct{} // closed when another one may begin; nil: nobody waits
}

func newComparisons() *comparisons {
	return &comparisons{most: diffSlots, kept: map[uint64]*comparison{}}
}

// forget drops one. Caller holds mu.
func (x *comparisons) forget(of uint64) {
	if c := x.kept[of]; c != nil {
		c.drop.Stop()
		delete(x.kept, of)
		x.wake()
	}
}

func (x *comparisons) wake() {
	if x.freed != nil {
		close(x.freed)
		x.freed = nil
	}
}

// begin waits until another one may be made, and books it. Errors: Interrupted, NotOwner.
func (x *comparisons) begin(ctx context.Context, o *owner) error {
	x.mu.Lock()
	for {
		for of, c := range x.kept {
			if x.making+len(x.kept) < x.most {
				break
			}
			if c.told {
				x.forget(of)
			}
		}
		if x.making+len(x.kept) < x.most {
			x.making++
			x.mu.Unlock()
			return nil
		}
		if x.freed == nil {
			x.freed = make(chan struct{})
		}
		freed := x.freed
		x.mu.Unlock()
		if err := o.await(ctx, freed); err != nil {
			return err
		}
		x.mu.Lock()
	}
}

// end gives up what begin booked.
func (x *comparisons) end() {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.making--
	x.wake()
}

// keep keeps what begin booked, and gives its number.
func (x *comparisons) keep(c *comparison) uint64 {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.making--
	// Not one that an owner before gave.
	x.last = max(x.last+1, uint64(time.Now().UnixNano()))
	of := x.last
	x.kept[of] = c
	c.drop = time.AfterFunc(diffKeep, func() {
		x.mu.Lock()
		defer x.mu.Unlock()
		x.forget(of)
	})
	return of
}

// changePage is one page of what a comparison found, and where the next one begins.
type changePage struct {
	changes []meta.Change
	next    changePlace // zero: this is the last one
}

// changePlace is a place in a comparison that is kept: how many changes were told.
type changePlace struct {
	of   uint64 // its number
	told int
}

// page gives a page of one that is kept. Errors: Stale.
func (x *comparisons) page(o *owner, from changePlace) (*changePage, error) {
	x.mu.Lock()
	defer x.mu.Unlock()
	c := x.kept[from.of]
	if c == nil || c.o != o || from.told < 0 || from.told > len(c.all) {
		return nil, meta.E("compare", meta.Stale, o.subject(), errors.New("this comparison was given up: begin again"))
	}
	c.drop.Reset(diffKeep)
	page := &changePage{changes: firstChanges(c.all[from.told:])}
	told := from.told + len(page.changes)
	if c.told = told == len(c.all); c.told {
		x.wake()
	} else {
		page.next = changePlace{from.of, told}
	}
	return page, nil
}

// firstChanges gives the first changes, as many as one answer takes.
func firstChanges(all []meta.Change) []meta.Change {
	// What a change takes beside its paths: kind, inode, type, and the tags of its fields.
	const rest = 40
	return pageOf(all[:min(diffPage, len(all))], func(c *meta.Change) int { return len(c.Path) + len(c.From) + rest })
}

// diff compares two snapshots, or one with the volume as it is. It reads a
// frozen state, so nobody waits for it. Errors: NoSuchSnapshot, Invalid, Stale, Busy
// (the volume is being rolled back), Canceled.
func (o *owner) diff(ctx context.Context, from, to string, exact bool) (*changePage, error) {
	x := o.srv.comparisons
	if err := x.begin(ctx, o); err != nil {
		return nil, err
	}
	all, err := o.compare(ctx, from, to, exact)
	if err != nil {
		x.end()
		return nil, err
	}
	if page := firstChanges(all); len(page) == len(all) {
		x.end()
		return &changePage{changes: page}, nil
	}
	return x.page(o, changePlace{of: x.keep(&comparison{o: o, all: all})})
}

// compare gives what changed from one snapshot to another, or to the volume as it is.
// It ends when ctx does.
func (o *owner) compare(ctx context.Context, from, to string, exact bool) ([]meta.Change, error) {
	if err := o.await(ctx, o.recovered); err != nil {
		return nil, err
	}
	a, err := o.snapshot(from)
	if err != nil {
		return nil, err
	}
	var b meta.Snapshot
	if to != "" {
		if b, err = o.snapshot(to); err != nil {
			return nil, err
		}
	}
	if to != "" && a.At == b.At {
		return nil, nil
	}
	if err := o.settled(ctx); err != nil {
		return nil, err
	}
	frozen, release, err := o.freezeWhole(ctx)
	if err != nil {
		return nil, err
	}
	defer release()
	differ := namespace.Diff
	if exact {
		differ = namespace.DiffExact
	}
	all, err := differ(frozen, a.At, b.At)
	if err = errors.Join(err, frozen.Close()); err != nil {
		return nil, err
	}
	return all, nil
}

// freezeWhole is freezeState unless the volume is being rolled back: then what it
// would give is neither what was nor what will be. Errors: Busy, NotOwner.
func (o *owner) freezeWhole(ctx context.Context) (frozenReader, func(), error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.closed != nil && o.ctx.Err() == nil {
		return frozenReader{}, nil, meta.E("compare", meta.Busy, o.subject(), errors.New("it is being rolled back"))
	}
	return o.freezeLocked(ctx, &checking{})
}
