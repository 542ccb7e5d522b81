package penstock

import (
	"context"
	"sync/atomic"
	"time"

	"penstock.io/penstock/meta"
)

// A change whose caller is killed may be done already, or late. What it changed is cached
// here and above, under leases for which nobody is recalled, as the change is our own; so
// whoever asked for it goes, and what takes the answer in stays: it keeps the name locks and
// the turns that it has until the owner has said what became of the change, and then has
// the kernel forget what it may have cached meanwhile.

// none is the outcome of what has none but an error.
type none struct{}

// killedWait is how long who is killed waits for the owner's word that his change was
// given up, or done: it comes at once, unless the owner hangs.
const killedWait = time.Second

// through runs fn, which asks for a change of a volume with ctx and its call, to its end,
// though the caller may go before: Interrupted. untaken then undoes what only a caller
// ends, as that a file is open; nil: there is nothing.
func through[T any](ctx context.Context, v *Volume, call *Call, fn func(call *Call) (T, error), untaken func(T)) (T, error) {
	if ctx.Done() == nil || ctx == v.c.ctx {
		return fn(call)
	}
	type outcome struct {
		t   T
		err error
	}
	var own *Call // the caller's may be gone before fn is over
	if call != nil {
		own = new(*call)
	}
	var over atomic.Bool // the caller has gone, or need not
	done := make(chan outcome, 1)
	v.c.spawn(func() {
		var o outcome
		o.t, o.err = fn(own)
		done <- o
		if over.CompareAndSwap(false, true) {
			return
		}
		if o.err == nil && untaken != nil {
			untaken(o.t)
		}
		if own != nil {
			v.changedLate(own.late)
		}
	})
	take := func(o outcome) (T, error) {
		if call != nil {
			*call = *own
		}
		return o.t, o.err
	}
	select {
	case o := <-done:
		return take(o)
	case <-ctx.Done():
	}
	patience := time.NewTimer(killedWait)
	defer patience.Stop()
	select {
	case o := <-done:
		return take(o)
	case <-patience.C:
	}
	if !over.CompareAndSwap(false, true) {
		return take(<-done)
	}
	var nothing T
	return nothing, meta.E("call", meta.Interrupted, v.name, context.Cause(ctx))
}

// changedLate has the kernel forget what changed after its request was answered.
func (v *Volume) changedLate(results []*meta.Result) {
	n := v.c.cfg.Notify
	if n == nil {
		return
	}
	for _, r := range results {
		for _, a := range []*meta.Attr{&r.Attr, &r.Attr2, &r.ParentAttr, &r.NewParentAttr} {
			switch {
			case a.Ino == 0:
			case a.IsDir():
				n.InvalEntries(v.id, a.Ino)
				n.InvalAttr(v.id, a.Ino)
			default:
				n.InvalData(v.id, a.Ino, 0, 0)
			}
		}
	}
}
