package penstock

import (
	"context"
	"sync/atomic"
	"time"

	"penstock.io/penstock/meta"
)

// A change whose caller is killed may have been done, or may be done late. The client and the
// kernel cache the change's effects under leases of the client, and no owner recalls a lease
// for the holder's own change. So the caller returns, but the goroutine that handles the
// answer stays: the goroutine keeps its name locks and turns until the owner has reported the
// outcome, and then makes the kernel forget state cached meanwhile.

// none is the result of operations that return only an error.
type none struct{}

// killedWait is how long a killed caller waits for the owner's report that its change was
// given up or done. The report comes at once, unless the owner hangs.
const killedWait = time.Second

// through runs fn, which requests a change of a volume, to its end, although the caller may
// return earlier with Interrupted. untaken then undoes effects that only a caller could end,
// for example an opened file; nil: the change has no such effects.
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
			v.owner.changedLate(own.late)
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

// changedLate makes the kernel forget inodes changed after the answer to their request.
func (rq *requests) changedLate(results []*meta.Result) {
	v := rq.v
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
