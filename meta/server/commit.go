package server

import (
	"errors"
	"fmt"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/journal"
	"penstock.io/penstock/meta/namespace"
	"penstock.io/penstock/meta/wire"
)

// commitLoop journals entries one after the other (a single entry in flight: pipelined
// transactions may commit out of order). An entry without waiters gathers operations for
// CommitDelay.
func (o *owner) commitLoop(pos journal.Position) {
	for {
		o.mu.Lock()
		e, urgent := o.take()
		o.mu.Unlock()
		if e == nil {
			select {
			case <-o.wake:
				continue
			case <-o.ctx.Done():
				return
			}
		}
		if !urgent && !o.gather(e) {
			return
		}
		next, err := o.commit(e, pos)
		if err != nil {
			o.lose(err)
			return
		}
		pos = next
		o.checkpoints.maybeCheckpoint()
	}
}

// commit journals an entry, then notifies the waiters and sessions, then applies the entry to
// the store and takes it out of the overlay.
func (o *owner) commit(e *entry, pos journal.Position) (journal.Position, error) {
	o.mu.Lock()
	if len(o.queue) > 0 && o.queue[0] == e {
		o.queue = o.queue[1:]
		o.queued -= e.bytes
	} else {
		o.cur = &entry{seq: e.seq + 1, sessions: map[*session]struct{}{}}
	}
	dropped := o.forgetReplies(e)
	o.mu.Unlock()
	e.effects = append(e.effects, dropped...)

	je := journal.Next(o.vol, pos, o.own.Term(), namespace.AppendEffects(nil, e.effects))
	if je.Seq != e.seq {
		panic(fmt.Sprintf("entry %d of volume %d would be journaled as %d: an entry was skipped or taken twice", e.seq, o.vol, je.Seq))
	}
	for {
		err := o.j.Append(o.ctx, je)
		if err == nil {
			break
		}
		if !errors.Is(err, meta.NoSpace) {
			return pos, err
		}
		if err := o.waitForSpace(err); err != nil {
			return pos, err
		}
	}
	pos = je.Position()

	o.mu.Lock()
	o.noSpace = nil
	o.durable = e.seq
	kept := o.waiters[:0]
	for _, w := range o.waiters {
		if w.seq <= e.seq {
			close(w.ch)
		} else {
			kept = append(kept, w)
		}
	}
	o.waiters = kept
	for s := range e.sessions {
		s.enqueue(0, &wire.Durable{Volume: o.vol, Seq: e.seq})
	}
	o.mu.Unlock()
	for s := range e.sessions {
		s.flush()
	}

	if err := o.st.Apply(pos, e.effects); err != nil {
		return pos, err
	}
	o.mu.Lock()
	o.ov.settle(e, o.cache)
	if e.events {
		o.eventWaits.tell()
	}
	o.checkpoints.since += len(je.Payload)
	o.mu.Unlock()
	o.srv.stats.entries.Add(1)
	o.srv.stats.journalBytes.Add(uint64(len(je.Payload)))
	return pos, nil
}

// forgetReplies returns the effects that drop the reply records acknowledged by the clients of
// the entry. The caller holds mu.
func (o *owner) forgetReplies(e *entry) (effects []namespace.Effect) {
	for s := range e.sessions {
		j := o.sessions[s.id]
		if j == nil || len(j.order) == 0 || j.order[0].seq > j.acked {
			continue
		}
		n := 0
		for n < len(j.order) && j.order[n].seq <= j.acked {
			delete(j.replies, j.order[n].id)
			j.order[n] = nil
			n++
		}
		j.order = j.order[n:]
		effects = append(effects, namespace.DeleteReplies(s.id, j.forgot, j.acked))
		j.forgot = j.acked
	}
	return effects
}
