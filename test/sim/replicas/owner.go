package replicas

import (
	"slices"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/replica"
)

// copies is how many replicas a chunk is to have.
const copies = 3

// record is the journal's record of a chunk.
type record struct {
	meta.ChunkRecord
	n         int
	committed uint64 // extents refer to bytes below
	openEnded bool   // the file ends at the sealed length
	session   int
	file      int
	base      uint64 // offset of the chunk in its file
	used      bool   // the file has an extent in the chunk
	dropped   bool
}

// state is the sum of the journal's entries.
type state struct {
	recs    []*record
	expired []bool // sessions
}

func (s *state) clone() state {
	c := state{expired: slices.Clone(s.expired)}
	for _, r := range s.recs {
		k := *r
		k.Servers = slices.Clone(r.Servers)
		c.recs = append(c.recs, &k)
	}
	return c
}

// journal takes entries of the newest term only.
type journal struct {
	term uint64
	state
}

// owner is a metadata server that owns the volume, or believes so.
type owner struct {
	node
	w      *world
	term   uint64
	active bool
	st     state // the journal, as far as the owner's term has read it
	fences []uint32
	busy   []bool  // chunks whose seal, copy or move is under way
	seen   []int64 // by session: time of the last message
	away   []int64 // by server: since when the server does not answer; 0: it answers
}

// take starts an owner with a new term, which has read the journal to its end.
func (o *owner) take() {
	w := o.w
	w.journal.term++
	w.res.Takeovers++
	w.trace("%s takes over, term %d", o.name, w.journal.term)
	o.life++
	*o = owner{node: o.node, w: w, term: w.journal.term, active: true, st: w.journal.clone(), away: make([]int64, len(w.servers))}
	for range o.st.expired {
		o.seen = append(o.seen, w.Now)
	}
	o.grow()
	o.work()
}

func (o *owner) crash() {
	o.w.trace("%s crashes", o.name)
	o.life++
	o.active = false
	o.down = o.w.Now + o.w.rng.Int64N(300)
}

func (o *owner) grow() {
	for len(o.busy) < len(o.st.recs) {
		o.busy = append(o.busy, false)
		o.fences = append(o.fences, 0)
	}
	for len(o.seen) < len(o.st.expired) {
		o.seen = append(o.seen, o.w.Now)
	}
}

// fresh returns a fence above every fence that any owner has used for a chunk.
func (o *owner) fresh(r *record) meta.Fence {
	if o.w.cfg.Off.OldFences && r.State != meta.ChunkOpen {
		return r.Fence
	}
	if r.Fence.Term == meta.Term(o.term) {
		o.fences[r.n] = max(o.fences[r.n], r.Fence.Seals)
	}
	o.fences[r.n]++
	return meta.Fence{Term: meta.Term(o.term), Seals: o.fences[r.n]}
}

// commit journals an entry, if the owner is still the newest, and calls back
// unless the owner ends before.
func (o *owner) commit(apply func(*state) error, back func(error)) {
	w, term := o.w, o.term
	w.schedule(w.Now+w.delay(), nil, func() {
		var err error = meta.Fenced
		if term == w.journal.term {
			if err = apply(&w.journal.state); err == nil {
				w.truth.committed()
				if o.term == term {
					_ = apply(&o.st)
					o.grow()
				}
			}
		}
		w.after(w.delay(), &o.node, func() {
			if o.term != term {
				return
			}
			if err == error(meta.Fenced) {
				w.trace("%s learns that it is fenced", o.name)
				o.active = false
			}
			back(err)
		})
	})
}

// work does an owner's periodic work.
func (o *owner) work() {
	o.w.after(20+o.w.rng.Int64N(20), &o.node, func() {
		if !o.active {
			return
		}
		o.work()
		for k, t := range o.seen {
			if !o.st.expired[k] && o.w.Now-t > sessionTTL {
				o.expire(k)
			}
		}
		for _, r := range o.st.recs {
			if o.busy[r.n] || r.dropped {
				continue
			}
			switch {
			case r.State == meta.ChunkOpen && o.st.expired[r.session]:
				o.seal(r, nil, func(bool) {})
			case r.State == meta.ChunkOpen && o.w.cfg.Off.Orphans && !r.used:
				o.collect(r)
			case r.State == meta.ChunkDeleting:
				o.collect(r)
			case r.State == meta.ChunkSealed && !r.used && o.st.expired[r.session]:
				o.unlink(r)
			case r.State == meta.ChunkSealed && (o.w.calm || o.w.rng.IntN(4) == 0):
				o.survey(r)
			}
		}
		if n := len(o.st.recs); n > 0 {
			for range 1 + n/40 {
				o.orphans(o.st.recs[o.w.rng.IntN(n)])
			}
		}
	})
}

func (o *owner) expire(session int) {
	o.seen[session] = o.w.Now
	o.commit(func(s *state) error {
		s.expired[session] = true
		return nil
	}, func(error) {})
}

func (o *owner) server(id meta.ServerID) *server { return o.w.servers[int(id)-1] }

// seal ends a chunk by rule 5. need is the length that the writer asks to keep; nil if
// the writer does not ask.
func (o *owner) seal(r *record, need *uint64, back func(ok bool)) {
	w := o.w
	if r.State != meta.ChunkOpen {
		back(true)
		return
	}
	if o.busy[r.n] {
		back(false)
		return
	}
	o.busy[r.n] = true
	done := func(ok bool) {
		o.busy[r.n] = false
		back(ok)
	}
	fence := o.fresh(r)
	c := replica.Case{Servers: slices.Clone(r.Servers), Off: &w.cfg.Off.Off}
	at := uint64(0)
	if need != nil {
		c.Asked, c.Need, at = true, *need, *need
	}
	answers := make([]replica.Answer, len(c.Servers))
	var ask func(which []meta.ServerID, at uint64, rounds int)
	ask = func(which []meta.ServerID, at uint64, rounds int) {
		left := len(which)
		for _, id := range which {
			i, s := slices.Index(c.Servers, id), o.server(id)
			call(w, &o.node, &s.node, false, func(reply func(replica.Answer)) { s.freeze(r.n, fence, at, reply) }, func(a answer[replica.Answer]) {
				answers[i] = a.v // the zero value means: unreachable
				if left--; left > 0 {
					return
				}
				if r.State != meta.ChunkOpen || !o.active {
					done(r.State != meta.ChunkOpen)
					return
				}
				c.Committed, c.OpenEnded = r.committed, r.openEnded
				d := replica.DecideSeal(c, answers)
				w.mix(d.Length)
				w.trace("%s: chunk %d: %v at %d on %v (cut %v, discard %v, away %v) %s", o.name, r.n, d.Verdict, d.Length, d.Servers, d.Cut, d.Discard, d.Away, d.Why)
				switch d.Verdict {
				case replica.Take:
					w.truth.deciding(r.n, c, answers, d)
					o.ended(r, fence, d, done)
				case replica.Tell:
					if rounds == 0 {
						done(false)
						return
					}
					ask(d.Ask, d.Length, rounds-1)
				case replica.Yield:
					o.active = false
					done(false)
				case replica.Missing:
					if !w.truth.lost(r.n, answers) {
						w.fail("chunk %d can't be sealed though a replica of all that was promised lives: %s", r.n, d.Why)
					}
					// The missing bytes were synced on one replica alone: an operator
					// inspects the chunk and accepts the loss.
					w.res.Losses++
					c.AcceptLoss = true
					ask(c.Servers, at, 4)
				case replica.Conflict:
					if !w.truth.chunks[r.n].rude || c.AcceptLoss {
						w.fail("chunk %d can't be sealed: %s", r.n, d.Why)
					}
					// Two writers wrote to the chunk, which rule 6 forbids: again an
					// operator decides.
					w.res.Losses++
					c.AcceptLoss = true
					ask(c.Servers, at, 4)
				default:
					done(false)
				}
			})
		}
	}
	ask(c.Servers, at, 4)
}

// ended journals the seal, and then cuts.
func (o *owner) ended(r *record, fence meta.Fence, d replica.Decision, done func(bool)) {
	if o.w.cfg.Off.CutFirst {
		o.finish(r, fence, d.Length, d.Servers)
	}
	o.commit(func(s *state) error {
		k := s.recs[r.n]
		if k.State != meta.ChunkOpen {
			return meta.Sealed
		}
		if k.committed > d.Length+d.Lost {
			return meta.Again // committed while the replicas were asked
		}
		k.committed = min(k.committed, d.Length) // less only as an operator said
		k.State, k.Length, k.CRC, k.Fence, k.Servers = meta.ChunkSealed, d.Length, d.CRC, fence, slices.Clone(d.Servers)
		if k.openEnded {
			k.committed = d.Length
		}
		if !k.used && s.expired[k.session] || d.Length == 0 {
			k.State = meta.ChunkDeleting
		}
		return nil
	}, func(err error) {
		if err == nil {
			o.w.res.Seals++
			if len(d.Servers) < copies {
				o.w.res.Shortened++
			}
			o.finish(r, fence, d.Length, d.Servers)
		}
		done(err == nil)
	})
}

// finish sends the journaled end to the replicas, once. The survey sends the end to
// replicas that miss this message.
func (o *owner) finish(r *record, fence meta.Fence, length uint64, servers []meta.ServerID) {
	for _, id := range servers {
		s := o.server(id)
		o.w.send(&o.node, &s.node, false, func() { s.end(r.n, fence, length, func(error) {}) })
	}
}

// survey asks all servers for their replicas of a sealed chunk, and does one step about
// the answers.
func (o *owner) survey(r *record) {
	w := o.w
	o.busy[r.n] = true
	answers := make([]replica.Answer, len(w.servers))
	left := len(w.servers)
	for i, s := range w.servers {
		call(w, &o.node, &s.node, false, func(reply func(replica.Answer)) {
			k := s.peek(r.n)
			if k == nil {
				k = &rep{}
			}
			if k.rot > 0 && w.rng.IntN(2) == 0 {
				k.Damaged = true // the scrubber came by
			}
			reply(s.tell(k, 0))
		}, func(a answer[replica.Answer]) {
			answers[i] = a.v
			if a.ok {
				o.away[i] = 0
			} else if o.away[i] == 0 {
				o.away[i] = w.Now
			}
			if left--; left == 0 {
				o.repair(r, answers)
			}
		})
	}
}

// repair does at most one step about a chunk, then ends the work on the chunk.
func (o *owner) repair(r *record, answers []replica.Answer) {
	w := o.w
	free := func(error) { o.busy[r.n] = false }
	if !o.active || r.State != meta.ChunkSealed {
		free(nil)
		return
	}
	var good, spare []*server
	var bad []int
	for i, a := range answers {
		s := w.servers[i]
		member := slices.Contains(r.Servers, s.id())
		switch {
		case a.Reach != replica.Answered:
			if member && o.away[i] > 0 && w.Now-o.away[i] > 300 {
				bad = append(bad, i)
			}
		case member && !a.Damaged && a.State == replica.Sealed && a.Length == r.Length && a.CRC == r.CRC:
			good = append(good, s)
		case member:
			bad = append(bad, i)
		default:
			spare = append(spare, s)
		}
	}
	want := len(good) < copies
	// First the replicas in the journal: their state decides about the others.
	first := slices.Clone(w.servers)
	slices.SortStableFunc(first, func(a, b *server) int {
		rank := map[bool]int{true: 0, false: 1}
		return rank[slices.Contains(r.Servers, a.id())] - rank[slices.Contains(r.Servers, b.id())]
	})
	for _, s := range first {
		a := answers[s.i]
		if a.Reach != replica.Answered {
			continue
		}
		others := len(good)
		if slices.Contains(good, s) {
			others--
		}
		switch act := replica.Return(r.ChunkRecord, s.id(), a, others, want, &w.cfg.Off.Off); act {
		case replica.TellAt:
			f := o.fresh(r)
			call(w, &o.node, &s.node, false, func(reply func(replica.Answer)) { s.freeze(r.n, f, r.Length, reply) }, func(b answer[replica.Answer]) {
				if !b.ok || b.v.Reach != replica.Answered || !o.active || r.State != meta.ChunkSealed {
					free(nil)
					return
				}
				switch act := replica.Return(r.ChunkRecord, s.id(), b.v, others, want, &w.cfg.Off.Off); act {
				case replica.Finish, replica.Join, replica.Discard:
					o.settle(r, s, act, free)
				default: // the replica stays, and must not hold up the work on the others
					o.spread(r, answers, good, spare, bad, free)
				}
			})
			return
		case replica.Finish, replica.Join, replica.Discard:
			o.settle(r, s, act, free)
			return
		}
	}
	o.spread(r, answers, good, spare, bad, free)
}

// spread copies to missing replicas, drops surplus replicas, and moves a replica now and
// then.
func (o *owner) spread(r *record, answers []replica.Answer, good, spare []*server, bad []int, free func(error)) {
	w, want := o.w, len(good) < copies
	switch {
	case want && len(good) > 0 && len(bad) > 0 && answers[bad[0]].Reach == replica.Answered:
		o.copy(r, w.servers[bad[0]], good, 0, free) // in place
	case want && len(good) > 0 && len(spare) > 0:
		o.copy(r, spare[w.rng.IntN(len(spare))], good, 0, free)
	case len(good) >= copies && (len(bad) > 0 || len(good) > copies):
		var drop *server
		if len(bad) > 0 {
			drop = w.servers[bad[0]]
		} else {
			drop = good[w.rng.IntN(len(good))]
		}
		o.replicas(r, 0, drop.id(), o.fresh(r), free)
	case len(good) == copies && len(spare) > 0 && w.chance(150):
		w.res.Moves++
		o.copy(r, spare[w.rng.IntN(len(spare))], good, good[w.rng.IntN(len(good))].id(), free)
	default:
		free(nil)
	}
}

// settle carries out the decision of Return about one server's replica.
func (o *owner) settle(r *record, s *server, act replica.Action, free func(error)) {
	w := o.w
	f := o.fresh(r)
	w.trace("%s: chunk %d on %s: %v", o.name, r.n, s.name, act)
	if act == replica.Join && w.cfg.Off.Return {
		o.replicas(r, s.id(), 0, f, free)
		return
	}
	switch act {
	case replica.Finish, replica.Join:
		call(w, &o.node, &s.node, false, func(reply func(error)) { s.end(r.n, f, r.Length, reply) }, func(a answer[error]) {
			if !a.ok || a.v != nil || act == replica.Finish {
				free(nil)
				return
			}
			w.res.Joins++
			o.replicas(r, s.id(), 0, f, free)
		})
	case replica.Discard:
		if slices.Contains(r.Servers, s.id()) && !w.cfg.Off.Members {
			o.replicas(r, 0, s.id(), f, free)
			return
		}
		call(w, &o.node, &s.node, false, func(reply func(error)) { s.delete(r.n, f, reply) }, func(a answer[error]) { free(nil) })
	default:
		free(nil)
	}
}

// copy puts a sealed copy on a server and then makes the copy a replica, in place of the
// server instead if instead is set.
func (o *owner) copy(r *record, to *server, from []*server, instead meta.ServerID, free func(error)) {
	w := o.w
	f := o.fresh(r)
	length, crc := r.Length, r.CRC
	w.trace("%s: copies chunk %d to %s under %v", o.name, r.n, to.name, f)
	call(w, &o.node, &to.node, false, func(reply func(error)) { to.pull(r.n, f, length, crc, from, reply) }, func(a answer[error]) {
		if !a.ok || a.v != nil || r.State != meta.ChunkSealed {
			free(nil)
			return
		}
		o.replicas(r, to.id(), instead, f, free)
	})
}

// replicas journals a change of a chunk's replicas, under the fence of the preceding
// order.
func (o *owner) replicas(r *record, add, drop meta.ServerID, f meta.Fence, back func(error)) {
	expect := slices.Clone(r.Servers)
	o.commit(func(s *state) error {
		k := s.recs[r.n]
		if k.State != meta.ChunkSealed || !slices.Equal(k.Servers, expect) {
			return meta.Again
		}
		k.Servers = slices.DeleteFunc(slices.Clone(k.Servers), func(id meta.ServerID) bool { return id == drop })
		if add != 0 && !slices.Contains(k.Servers, add) {
			k.Servers = append(k.Servers, add)
		}
		k.Fence = f
		return nil
	}, back)
}

// collect deletes a chunk without references on all servers, and drops its record when
// all replicas are gone.
func (o *owner) collect(r *record) {
	w := o.w
	o.busy[r.n] = true
	f := o.fresh(r)
	left, gone := len(w.servers), true
	for _, s := range w.servers {
		call(w, &o.node, &s.node, false, func(reply func(error)) { s.delete(r.n, f, reply) }, func(a answer[error]) {
			if slices.Contains(r.Servers, s.id()) && (!a.ok || a.v != nil) {
				gone = false
			}
			if left--; left > 0 {
				return
			}
			o.busy[r.n] = false
			if !gone || !o.active {
				return
			}
			o.commit(func(st *state) error {
				st.recs[r.n].dropped = true
				return nil
			}, func(error) {})
		})
	}
}

// orphans deletes the servers' remains of a chunk that the journal dropped.
func (o *owner) orphans(r *record) {
	if !r.dropped {
		return
	}
	for _, s := range o.w.servers {
		o.w.send(&o.node, &s.node, false, func() {
			if k := s.peek(r.n); k != nil && (k.State == replica.Open || k.State == replica.Sealed) {
				s.delete(r.n, meta.Fence{Term: meta.Term(o.term), Seals: 1 << 30}, func(error) {})
			}
		})
	}
}

// ---- requests of writers

// hello begins a session.
func (o *owner) hello(reply func(session int)) {
	if !o.active {
		return
	}
	id := -1
	o.commit(func(s *state) error {
		if id < 0 {
			id = len(s.expired)
		}
		s.expired = append(s.expired, false)
		return nil
	}, func(err error) {
		if err == nil {
			reply(id)
		}
	})
}

func (o *owner) beat(session int, reply func(error)) {
	switch {
	case !o.active || session >= len(o.st.expired):
	case o.st.expired[session]:
		reply(meta.SessionExpired)
	default:
		o.seen[session] = o.w.Now
		reply(nil)
	}
}

// alloc hands out a chunk, from the journal.
func (o *owner) alloc(session, file int, base uint64, reply func(*record)) {
	if !o.active || session >= len(o.st.expired) || o.st.expired[session] {
		return
	}
	w := o.w
	var servers []meta.ServerID
	for _, i := range w.rng.Perm(len(w.servers))[:copies] {
		if o.away[i] > 0 && w.rng.IntN(4) > 0 {
			i = (i + 1) % len(w.servers)
		}
		if id := w.servers[i].id(); !slices.Contains(servers, id) {
			servers = append(servers, id)
		}
	}
	var made *record
	o.commit(func(s *state) error {
		if s.expired[session] {
			return meta.SessionExpired
		}
		k := &record{n: len(s.recs), session: session, file: file, base: base}
		k.State, k.Fence, k.Servers = meta.ChunkOpen, meta.Fence{Term: meta.Term(o.term)}, slices.Clone(servers)
		s.recs = append(s.recs, k)
		if made == nil {
			made = k
			w.truth.handedOut(k)
		}
		return nil
	}, func(err error) {
		if err == nil {
			k := *made
			reply(&k)
		}
	})
}

// extents commits that the file refers to the first n bytes of a chunk, or, if openEnded,
// to all its future bytes, too.
func (o *owner) extents(chunk, session int, n uint64, openEnded bool, reply func(error)) {
	if !o.active {
		return
	}
	o.commit(func(s *state) error {
		k := s.recs[chunk]
		switch {
		case s.expired[session]:
			return meta.SessionExpired
		case k.State != meta.ChunkOpen && n > k.Length, k.dropped, k.State == meta.ChunkDeleting && n > 0:
			return meta.Sealed
		}
		k.committed, k.used = max(k.committed, n), true
		if k.State == meta.ChunkOpen {
			k.openEnded = k.openEnded || openEnded
		} else if openEnded || k.openEnded {
			k.committed = k.Length
		}
		return nil
	}, reply)
}

// unlinks now and then removes files of ended writers.
func (w *world) unlinks() {
	w.after(60+w.rng.Int64N(60), nil, func() {
		w.unlinks()
		o := w.owner()
		if !o.active || len(o.st.recs) == 0 || w.calm {
			return
		}
		live := 0
		for _, r := range o.st.recs {
			if r.State == meta.ChunkSealed {
				live++
			}
		}
		if live < 6 {
			return
		}
		r := o.st.recs[w.rng.IntN(len(o.st.recs))]
		if r.State != meta.ChunkSealed || !r.used && !o.st.expired[r.session] {
			return
		}
		o.unlink(r)
	})
}

func (o *owner) unlink(r *record) {
	o.commit(func(s *state) error {
		k := s.recs[r.n]
		if k.State != meta.ChunkSealed {
			return meta.Again
		}
		k.State = meta.ChunkDeleting
		o.w.truth.unlinked(k)
		return nil
	}, func(error) {})
}
