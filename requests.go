package penstock

import (
	"context"
	"sync/atomic"
	"time"

	"penstock.io/penstock/meta"
	metaclient "penstock.io/penstock/meta/client"
)

// requests are a volume's operations: the client sends them to the volume's owner or, of a
// view, answers them from the index.
type requests struct {
	v *Volume

	// mutations counts the answered operations that changed the volume. durable is the value
	// of mutations up to which all changes are journaled.
	mutations, durable atomic.Uint64
	// epoch is 1 plus the number of times that the session expired in this volume.
	epoch atomic.Uint64
	// only is the epoch outside of which no operation is sent; 0: all epochs. The filler of a
	// mirror's target sets it, so that every operation runs under the same right to fill.
	only atomic.Uint64
}

// do sends one operation and returns the stamp under which the reply may be cached.
//
// If the session ended before the answer to a read, do sends the read again in the next
// session: a read changes nothing.
func (rq *requests) do(ctx context.Context, call *Call, op meta.Op, want meta.LeaseMode) (*meta.Result, stamp, error) {
	for {
		var res *meta.Result
		var st stamp
		var err error
		if rq.v.frozen() {
			res, st, err = rq.ask(ctx, op)
		} else {
			res, st, err = rq.doOnce(ctx, call, op, want)
		}
		if op.Code().Mutates() || meta.KindOf(err) != meta.SessionExpired || !rq.nextEpoch(ctx) {
			return res, st, err
		}
	}
}

// nextEpoch waits for the next session after the end of the last one. It returns false if the
// caller stops waiting, or accepts only its own epoch.
func (rq *requests) nextEpoch(ctx context.Context) bool {
	if rq.only.Load() != metaclient.AnyEpoch {
		return false
	}
	select {
	case <-time.After(time.Millisecond):
		return true
	case <-ctx.Done():
	case <-rq.v.c.ctx.Done():
	}
	return false
}

func (rq *requests) doOnce(ctx context.Context, call *Call, op meta.Op, want meta.LeaseMode) (*meta.Result, stamp, error) {
	v := rq.v
	c := v.c
	c.stats.rpcs.Add(1)
	var id meta.OpID
	mutates := op.Code().Mutates()
	if mutates {
		if ctx.Err() != nil { // the caller was killed while something else was waited for
			return nil, stamp{}, meta.E("call", meta.Interrupted, v.name, context.Cause(ctx))
		}
		id = c.opID(call)
	}
	st := stamp{tick: c.table.tick.Load()}
	g := c.table.begin()
	res, err := c.sess.Do(ctx, v.id, rq.only.Load(), id, op, want, func() { c.table.end(g) })
	if mutates && err == nil {
		rq.mutations.Add(1)
		if call != nil && ctx.Err() != nil {
			call.late = append(call.late, res) // the caller may be gone
		}
	}
	if res != nil { // an error may bring grants, too: an absent name
		st.grants = res.Grants
	}
	return res, st, err
}

// doBatch sends operations in one frame, as background work, if the epoch has not changed (see
// metaSession). All operations share the stamp; each reply adds its grants.
func (rq *requests) doBatch(ctx context.Context, epoch uint64, ops []batchOp) ([]meta.Result, []error, stamp, error) {
	v := rq.v
	c := v.c
	c.stats.rpcs.Add(1)
	changes := uint64(0)
	for i := range ops {
		if v.frozen() {
			ops[i].At = v.view.snap.At
		}
		if ops[i].Op.Code().Mutates() {
			ops[i].ID = c.opID(nil)
			changes++
		}
	}
	st := stamp{tick: c.table.tick.Load()}
	g := c.table.begin()
	res, errs, err := c.sess.DoBatch(ctx, v.home().id, epoch, ops)
	c.table.end(g)
	if err == nil {
		rq.mutations.Add(changes)
	}
	return res, errs, st, err
}

// ask is do for a view.
func (rq *requests) ask(ctx context.Context, op meta.Op) (*meta.Result, stamp, error) {
	v := rq.v
	c := v.c
	st := stamp{tick: c.table.tick.Load()}
	if op.Code().Mutates() {
		return nil, st, v.readOnly("change")
	}
	if v.view.gone.Load() {
		return nil, st, v.view.stale(nil)
	}
	if res, ok, err := v.index.query(ctx, op); ok {
		return res, st, err
	}
	c.stats.rpcs.Add(1)
	res, err := c.sess.DoAt(ctx, v.view.of.id, v.view.snap.At, op)
	return res, st, v.view.verdictAt(err)
}

// sync waits until everything answered so far is journaled.
func (rq *requests) sync(ctx context.Context) error {
	v := rq.v
	n := rq.mutations.Load()
	if rq.durable.Load() >= n {
		return nil
	}
	v.c.stats.rpcs.Add(1)
	if err := v.c.sess.Sync(ctx, v.id); err != nil {
		v.back.failure.note(err)
		return err
	}
	for {
		old := rq.durable.Load()
		if old >= n || rq.durable.CompareAndSwap(old, n) {
			return nil
		}
	}
}
