package server

import (
	"errors"
	"fmt"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/journal"
	"penstock.io/penstock/meta/namespace"
	"penstock.io/penstock/meta/wire"
)

// committer journals the entries of a volume.
type committer struct {
	k           *kernel
	checkpoints *checkpoints
	eventWaits  *eventWaits
}

// commitLoop journals entries one after the other (a single entry in flight: pipelined
// transactions may commit out of order). An entry without waiters gathers operations for
// CommitDelay.
func (c *committer) commitLoop(pos journal.Position) {
	for {
		c.k.mu.Lock()
		e, urgent := c.k.take()
		c.k.mu.Unlock()
		if e == nil {
			select {
			case <-c.k.wake:
				continue
			case <-c.k.ctx.Done():
				return
			}
		}
		if !urgent && !c.k.gather(e) {
			return
		}
		next, err := c.commit(e, pos)
		if err != nil {
			c.k.lose(err)
			return
		}
		pos = next
		c.checkpoints.maybeCheckpoint()
	}
}

// commit journals an entry, then notifies the waiters and sessions, then applies the entry to
// the store and takes it out of the overlay.
func (c *committer) commit(e *entry, pos journal.Position) (journal.Position, error) {
	c.k.mu.Lock()
	if len(c.k.queue) > 0 && c.k.queue[0] == e {
		c.k.queue = c.k.queue[1:]
		c.k.queued -= e.bytes
	} else {
		c.k.cur = &entry{seq: e.seq + 1, sessions: map[*session]struct{}{}}
	}
	dropped := c.forgetReplies(e)
	c.k.mu.Unlock()
	e.effects = append(e.effects, dropped...)

	je := journal.Next(c.k.vol, pos, c.k.own.Term(), namespace.AppendEffects(nil, e.effects))
	if je.Seq != e.seq {
		panic(fmt.Sprintf("entry %d of volume %d would be journaled as %d: an entry was skipped or taken twice", e.seq, c.k.vol, je.Seq))
	}
	for {
		err := c.k.j.Append(c.k.ctx, je)
		if err == nil {
			break
		}
		if !errors.Is(err, meta.NoSpace) {
			return pos, err
		}
		if err := c.k.waitForSpace(err); err != nil {
			return pos, err
		}
	}
	pos = je.Position()

	c.k.mu.Lock()
	c.k.noSpace = nil
	c.k.durable = e.seq
	kept := c.k.waiters[:0]
	for _, w := range c.k.waiters {
		if w.seq <= e.seq {
			close(w.ch)
		} else {
			kept = append(kept, w)
		}
	}
	c.k.waiters = kept
	for s := range e.sessions {
		s.enqueue(0, &wire.Durable{Volume: c.k.vol, Seq: e.seq})
	}
	c.k.mu.Unlock()
	for s := range e.sessions {
		s.flush()
	}

	if err := c.k.st.Apply(pos, e.effects); err != nil {
		return pos, err
	}
	c.k.mu.Lock()
	c.k.ov.settle(e, c.k.cache)
	if e.events {
		c.eventWaits.tell()
	}
	c.checkpoints.since += len(je.Payload)
	c.k.mu.Unlock()
	c.k.srv.stats.entries.Add(1)
	c.k.srv.stats.journalBytes.Add(uint64(len(je.Payload)))
	return pos, nil
}

// forgetReplies returns the effects that drop the reply records acknowledged by the clients of
// the entry. The caller holds mu.
func (c *committer) forgetReplies(e *entry) (effects []namespace.Effect) {
	for s := range e.sessions {
		j := c.k.sessions[s.id]
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
