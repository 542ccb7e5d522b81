package sim

import (
	"errors"
	"slices"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/namespace"
)

// Messages from a client to an owner.
type (
	helloMsg struct{ session meta.SessionID }
	call     struct {
		req    uint64
		id     meta.OpID
		op     meta.Op
		at     meta.Generation // zero: the live volume
		replay bool
		ack    meta.Seq
	}
	syncMsg struct {
		req uint64
		seq meta.Seq
	}
	aliveMsg    struct{ sent int64 }
	recalledMsg recallMsg
	allocMsg    struct{ req uint64 }
	sealMsg     struct{ chunk meta.ChunkID }
)

// Messages from an owner to a client.
type (
	welcomeMsg struct {
		session meta.SessionID
		resumed bool
	}
	reply struct {
		req     uint64
		id      meta.OpID
		seq     meta.Seq
		res     meta.Result
		err     error
		grant   meta.Ino
		changes []change // made by the operation
		sees    []change // last changes of the places in the answer
	}
	durableMsg struct{ seq meta.Seq }
	recallMsg  struct {
		ino   meta.Ino
		round int
	}
	goneMsg   struct{}
	allocated struct {
		req   uint64
		chunk meta.ChunkRecord
	}
	syncedMsg struct{ req uint64 }
)

// conn is a connection: messages arrive in order, or the connection breaks.
type conn struct {
	w        *world
	cv       *clientVolume
	srv      *server
	life     int // of the server's process
	broken   bool
	up, dn   int64 // when the last message each way arrives
	accepted *session
}

func (c *conn) after(last *int64, n *node, do func()) {
	at := max(c.w.Now+c.w.delay(), *last)
	*last = at
	c.w.after(at-c.w.Now, n, func() {
		if !c.broken && c.life == c.srv.life {
			do()
		}
	})
}

func (c *conn) send(m any) { c.after(&c.up, &c.srv.node, func() { c.srv.receive(c, m) }) }
func (c *conn) down(m any) { c.after(&c.dn, &c.cv.c.node, func() { c.cv.receive(c, m) }) }

func (s *server) receive(c *conn, m any) {
	o := s.owners[c.cv.vol]
	if o == nil || !o.holds() || o.closed {
		c.down(goneMsg{})
		return
	}
	if h, ok := m.(helloMsg); ok {
		o.hello(c, h)
		return
	}
	if ses := c.accepted; ses != nil && o.live[ses.id] == ses && ses.conn == c {
		o.handle(ses, m)
	} else {
		c.down(goneMsg{})
	}
}

// hello resumes a session, or makes a new session. A session that the log knows and this
// owner does not continues under its number, without leases.
func (o *owner) hello(c *conn, h helloMsg) {
	s, resumed := o.live[h.session], true
	if s != nil && s.fresh {
		resumed = false // the client never got the answer, and the owner does not know the client's leases
	}
	if s == nil {
		resumed = false
		if s = o.awaited[h.session]; s == nil {
			s = &session{id: meta.SessionID(o.w.rng.Uint64() | 1), replies: map[meta.OpID]*reply{}}
		}
		o.live[s.id] = s
		s.fresh = true
	}
	s.conn, c.accepted = c, s
	s.heard = o.w.clock(&o.srv.node)
	s.inbox, s.stuck = nil, false
	o.waits = slices.DeleteFunc(o.waits, func(w *waiting) bool { return w.s == s }) // the client asks again
	c.down(welcomeMsg{s.id, resumed})
	for _, ino := range sorted(o.leases) {
		if o.leases[ino][s.id] > 0 {
			o.ask(s, ino)
		}
	}
}

// handle handles one message of a session. Messages behind a waiting replay wait, too.
func (o *owner) handle(s *session, m any) {
	if s.stuck {
		s.inbox = append(s.inbox, m)
		return
	}
	switch m := m.(type) {
	case *call:
		w := &waiting{s: s, conn: s.conn, c: m}
		if r := o.attempt(w); r != nil {
			s.conn.down(r)
			o.kick() // the call may have blocked others
			return
		}
		s.stuck = m.replay
		o.waits = append(o.waits, w)
	case syncMsg:
		last := o.cur.seq
		if len(o.cur.effects) == 0 {
			last--
		}
		o.await(s, min(m.seq, last), func() { s.conn.down(syncedMsg{m.req}) })
	case aliveMsg:
		s.heard = o.w.clock(&o.srv.node)
		delete(o.awaited, s.id)
		s.fresh = false
		s.conn.down(m)
	case recalledMsg:
		if o.leases[m.ino][s.id] != m.round {
			return // to an earlier round
		}
		delete(o.leases[m.ino], s.id)
		o.w.trace("volume %d: %x forgot names of %d", o.l.vol, s.id, m.ino)
		o.kick()
	case allocMsg:
		o.alloc(s, m)
	case orderMsg:
		o.order(s, m)
	case sealMsg:
		c, _, err := namespace.ReadChunk(&view{o: o}, m.chunk)
		if err == nil && c.State == meta.ChunkOpen && !o.sealing[c.ID] {
			o.sealing[c.ID] = true
			o.freeze(c)
		}
	}
}

// await calls do when entry seq is in the log.
func (o *owner) await(s *session, seq meta.Seq, do func()) {
	c := s.conn
	if seq > o.durable {
		o.propose(0)
		o.w.after(3, &o.srv.node, func() {
			if !o.ended && s.conn == c {
				o.await(s, seq, do)
			}
		})
		return
	}
	do()
}

func (o *owner) alloc(s *session, m allocMsg) {
	if !o.recovered || !o.journaled(s) {
		c := s.conn
		o.w.after(5, &o.srv.node, func() {
			if !o.ended && s.conn == c && o.live[s.id] == s {
				o.alloc(s, m)
			}
		})
		return
	}
	var all []meta.ServerID
	for _, d := range o.w.disks {
		all = append(all, d.id)
	}
	res, err := o.run(&meta.AllocChunks{N: 1, Servers: [][]meta.ServerID{all}, Fence: meta.Fence{Term: o.term}}, s.id)
	if err != nil {
		o.w.fail("%v", err)
		return
	}
	o.await(s, o.cur.seq, func() { s.conn.down(allocated{m.req, res.Chunks[0]}) })
}

// journaled journals the session before an early reply, so that the next owner of the
// volume knows the session.
func (o *owner) journaled(s *session) bool {
	if s.started == 0 {
		if _, err := o.run(&meta.SessionStart{Session: s.id, Name: s.conn.cv.name()}, 0); err != nil {
			o.w.fail("%v", err)
		}
		s.started = o.cur.seq
	}
	if s.started > o.durable {
		o.propose(0)
		return false
	}
	return true
}

// kick tries the waiting calls again, in the order of arrival.
func (o *owner) kick() {
	if o.kicked {
		return
	}
	o.kicked = true
	o.w.after(0, &o.srv.node, func() {
		o.kicked = false
		if o.ended || !o.holds() {
			return
		}
		for again := true; again; {
			again = false
			for _, w := range slices.Clone(o.waits) {
				if o.live[w.s.id] != w.s || w.s.conn != w.conn {
					continue
				}
				r := o.attempt(w)
				if r == nil {
					continue
				}
				o.waits = slices.DeleteFunc(o.waits, func(x *waiting) bool { return x == w })
				w.conn.down(r)
				again = true
				if w.s.stuck && w.c.replay {
					w.s.stuck = false
					box := w.s.inbox
					w.s.inbox = nil
					for _, m := range box {
						o.handle(w.s, m)
					}
				}
			}
		}
	})
}

// blocked says whether an operation conflicts with leases on ino and must wait. New
// leases queue behind the operation.
func (o *owner) blocked(ino meta.Ino, but *waiting) bool {
	return slices.ContainsFunc(o.waits, func(w *waiting) bool { return w != but && slices.Contains(w.blocks, ino) })
}

// attempt answers a call, or says nil: not yet.
func (o *owner) attempt(w *waiting) *reply {
	s, c := w.s, w.c
	s.acked = max(s.acked, min(c.ack, o.durable))
	if !c.op.Code().Mutates() {
		return o.query(w)
	}
	if kept := s.replies[c.id]; kept != nil {
		if kept.seq <= o.durable {
			s.conn.down(durableMsg{kept.seq}) // the client may have missed the earlier message
		}
		again := *kept
		again.req, again.grant = c.req, 0
		return &again
	}
	if !o.recovered && !c.replay || !o.journaled(s) {
		return nil
	}
	if !o.w.cfg.Off.Recall && o.recall(w) {
		return nil
	}
	v := &view{o: o, session: s.id}
	ctx := o.context(s.id)
	ctx.Op, ctx.Replay = c.id, c.replay
	op := c.op
	res, effects, err := namespace.Execute(v, ctx, op)
	if errors.Is(err, meta.Again) {
		o.reap()
		o.kick()
		return nil
	}
	if v.wait > o.durable {
		o.propose(0)
		return nil
	}
	r := &reply{req: c.req, id: c.id, err: err}
	if err != nil {
		for _, at := range o.places(op, nil) {
			r.sees = append(r.sees, o.last(at))
		}
		return r
	}
	r.seq, r.res = o.cur.seq, *res
	for _, at := range o.places(op, res) {
		r.changes = append(r.changes, change{at: at, op: c.id, ver: o.w.truth.version(c.id, c.replay), by: s.id})
	}
	for _, ch := range r.changes {
		o.names[ch.at] = ch
	}
	o.cur.changes = append(o.cur.changes, r.changes...)
	if !slices.Contains(o.cur.sessions, s) {
		o.cur.sessions = append(o.cur.sessions, s)
	}
	effects = append(effects, namespace.PutReply(s.id, o.cur.seq, c.id, res))
	o.book(effects, s.id)
	s.replies[c.id] = r
	s.order = append(s.order, r)
	o.w.res.Operations++
	if c.replay {
		o.w.res.Replays++
	}
	o.w.trace("volume %d: %T %v of %x in entry %d: inode %d", o.l.vol, op, c.id, s.id, r.seq, res.Attr.Ino)
	return r
}

// places returns the places that an operation changed, or found empty.
func (o *owner) places(op meta.Op, res *meta.Result) []place {
	switch m := op.(type) {
	case *meta.Create:
		return []place{{o.l.vol, m.Parent, m.Name}}
	case *meta.Unlink:
		return []place{{o.l.vol, m.Parent, m.Name}}
	case *meta.Rename:
		return []place{{o.l.vol, m.Parent, m.Name}, {o.l.vol, m.NewParent, m.NewName}}
	case *meta.Write:
		if res != nil {
			return []place{{o.l.vol, m.Ino, ""}}
		}
	}
	return nil
}

func (o *owner) last(at place) change {
	c := o.names[at]
	c.at = at
	return c
}

// recall asks other sessions to give up their leases on the places that op is going to
// change.
func (o *owner) recall(w *waiting) (wait bool) {
	inos, err := namespace.Touched(&view{o: o}, w.c.op)
	if err != nil {
		o.w.fail("%v", err)
	}
	for _, ino := range inos {
		for _, id := range sorted(o.leases[ino]) {
			if id == w.s.id {
				continue
			}
			wait = true
			if o.leases[ino][id] == 0 && o.live[id] != nil {
				o.ask(o.live[id], ino)
			}
		}
		if wait && !slices.Contains(w.blocks, ino) {
			w.blocks = append(w.blocks, ino)
		}
	}
	return wait
}

// ask begins a round of recalling, or repeats a round on a new connection.
func (o *owner) ask(s *session, ino meta.Ino) {
	if o.leases[ino][s.id] == 0 {
		o.rounds++
		o.leases[ino][s.id] = o.rounds
	}
	o.w.trace("volume %d: %x is asked to forget names of %d", o.l.vol, s.id, ino)
	s.conn.down(recallMsg{ino, o.leases[ino][s.id]})
}

func (o *owner) query(w *waiting) *reply {
	if !o.recovered {
		return nil
	}
	if w.c.at != 0 { // a snapshot never changes, and is journaled
		ctx := o.context(w.s.id)
		ctx.At = w.c.at
		r := &reply{req: w.c.req}
		res, err := namespace.Query(&view{o: o, session: w.s.id}, ctx, w.c.op)
		if r.err = err; err == nil {
			r.res = *res
		}
		return r
	}
	v := &view{o: o, session: w.s.id}
	_, v.counters = w.c.op.(*meta.StatFSOp)
	res, err := namespace.Query(v, o.context(w.s.id), w.c.op)
	if v.wait > o.durable {
		o.propose(0)
		return nil
	}
	r := &reply{req: w.c.req, err: err}
	if err == nil {
		r.res = *res
	}
	switch m := w.c.op.(type) {
	case *meta.Lookup:
		r.sees = []change{o.last(place{o.l.vol, m.Parent, m.Name})}
		if (err == nil || errors.Is(err, meta.NotFound)) && (o.w.cfg.Off.Recall || !o.blocked(m.Parent, w) && o.leases[m.Parent][w.s.id] == 0) {
			if o.leases[m.Parent] == nil {
				o.leases[m.Parent] = map[meta.SessionID]int{}
			}
			o.leases[m.Parent][w.s.id] = 0
			o.w.trace("volume %d: %x may keep names of %d", o.l.vol, w.s.id, m.Parent)
			r.grant = m.Parent
		}
	case *meta.Open:
		r.sees = []change{o.last(place{o.l.vol, m.Ino, ""})}
	}
	return r
}
