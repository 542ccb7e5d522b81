package server

import (
	"context"
	"errors"
	"sync"
	"time"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/namespace"
)

// An owner compares snapshots in a single pass: the changes are sorted by path, and a rename is
// known only when the pass has met both of its paths. If an answer does not hold all changes, the
// server keeps the comparison and sends the other pages from memory. A request for a page
// prolongs the life of the comparison: the server drops a comparison diffKeep after the last
// request. A comparison with its last page sent stays, too, for a client that repeats the request
// after a lost answer, but is dropped earlier if its slot is needed.
//
// At most diffSlots comparisons are made or kept at a time, which bounds their memory. A request
// for a further comparison waits.

const (
	diffPage  = 10_000 // changes in an answer, fewer if they take pageBytes
	diffKeep  = time.Minute
	diffSlots = 8 // comparisons made and kept at once
)

// comparison is a finished comparison; all are its changes.
type comparison struct {
	o    *owner
	all  []meta.Change
	told bool // the last page was sent; begin may drop the comparison
	drop *time.Timer
}

// comparisons are the comparisons of a server.
type comparisons struct {
	most int

	mu     sync.Mutex
	kept   map[uint64]*comparison
	last   uint64        // the last number given
	making int           // begun and not kept yet
	freed  chan struct{} // closed when another comparison may begin; nil: nobody waits
}

func newComparisons() *comparisons {
	return &comparisons{most: diffSlots, kept: map[uint64]*comparison{}}
}

// forget drops the comparison numbered of. The caller holds mu.
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

// begin waits until another comparison may be made, and reserves a slot. Errors: Interrupted,
// NotOwner.
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

// end releases the slot reserved by begin.
func (x *comparisons) end() {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.making--
	x.wake()
}

// keep stores a comparison in the slot reserved by begin, and returns its number.
func (x *comparisons) keep(c *comparison) uint64 {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.making--
	// No earlier owner gave out the same number.
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

// changePage is a page of a comparison's changes, and where the next page begins.
type changePage struct {
	changes []meta.Change
	next    changePlace // zero: this page is the last
}

// changePlace is a position in a kept comparison: how many changes were sent.
type changePlace struct {
	of   uint64 // the comparison's number
	told int
}

// page returns a page of a kept comparison. Errors: Stale.
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

// firstChanges returns the first changes, as many as an answer holds.
func firstChanges(all []meta.Change) []meta.Change {
	// The encoded size of a change besides its paths: kind, inode, type, and field tags.
	const rest = 40
	return pageOf(all[:min(diffPage, len(all))], func(c *meta.Change) int { return len(c.Path) + len(c.From) + rest })
}

// diff compares two snapshots, or a snapshot with the current volume if to is "", and returns
// the first page. It reads a frozen state, so requests do not wait for it. Errors:
// NoSuchSnapshot, Invalid, Stale, Busy (the volume is being rolled back), Canceled.
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

// compare returns the changes from a snapshot to another, or to the current volume if to is
// "". It ends when ctx does.
func (o *owner) compare(ctx context.Context, from, to string, exact bool) ([]meta.Change, error) {
	if err := o.await(ctx, o.recovered); err != nil {
		return nil, err
	}
	a, err := o.snapshots.find(from)
	if err != nil {
		return nil, err
	}
	var b meta.Snapshot
	if to != "" {
		if b, err = o.snapshots.find(to); err != nil {
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
