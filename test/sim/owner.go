package sim

import (
	"errors"
	"fmt"
	"slices"

	"github.com/google/btree"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/journal"
	"penstock.io/penstock/meta/namespace"
)

// server is a metadata server: it takes over volumes and serves the volumes.
type server struct {
	node
	w      *world
	owners map[meta.VolumeID]*owner
	stores map[meta.VolumeID]*store // of volumes that the server does not own now
	kept   map[meta.VolumeID]*store // the part of a store that survives a crash
	taking map[meta.VolumeID]bool
}

func newServer(w *world, i int) *server {
	s := &server{w: w, node: node{name: fmt.Sprintf("server%d", i+1), drift: int64(i)*20 - 20}}
	s.kept = map[meta.VolumeID]*store{}
	return s
}

func (s *server) boot() {
	s.owners, s.taking, s.stores = map[meta.VolumeID]*owner{}, map[meta.VolumeID]bool{}, map[meta.VolumeID]*store{}
	for v, st := range s.kept {
		s.stores[v] = st.clone()
	}
	s.poll()
}

func (s *server) crash() {
	s.w.res.Crashes++
	s.w.trace("%s crashes", s.name)
	s.life++
	s.owners = map[meta.VolumeID]*owner{}
	s.w.after(10+s.w.rng.Int64N(300), &s.node, s.boot)
}

// poll looks for volumes without an owner.
func (s *server) poll() {
	for _, l := range s.w.log {
		if s.owners[l.vol] != nil || s.taking[l.vol] {
			continue
		}
		s.taking[l.vol] = true
		life, sent := s.life, s.w.clock(&s.node)
		s.w.after(s.w.delay(), nil, func() {
			t, ok := l.take(s, life)
			s.w.after(s.w.delay(), &s.node, func() {
				if s.life != life {
					return // asked before a crash
				}
				delete(s.taking, l.vol)
				if ok {
					s.open(l, t, sent)
				}
			})
		})
	}
	s.w.after(pollEvery/2+s.w.rng.Int64N(pollEvery), &s.node, s.poll)
}

// entry is a journal entry being put together.
type entry struct {
	seq      meta.Seq
	effects  []namespace.Effect
	changes  []change
	sessions []*session
}

// session is a client's standing with an owner.
type session struct {
	id      meta.SessionID
	conn    *conn
	heard   int64
	started meta.Seq // entry that journals the session; zero: not yet
	replies map[meta.OpID]*reply
	order   []*reply
	acked   meta.Seq
	forgot  meta.Seq
	inbox   []any // messages behind a waiting replay
	stuck   bool
	fresh   bool // resumed by this owner; no keep-alive came yet
}

// waiting is a call without an answer yet.
type waiting struct {
	s      *session
	conn   *conn
	c      *call
	blocks []meta.Ino
}

// owner serves one volume.
type owner struct {
	w     *world
	srv   *server
	l     *volumeLog
	token int64
	term  meta.Term
	until int64 // of the right to answer, on the server's clock

	st       *store
	over     *btree.BTreeG[*pending]
	cur      *entry
	flight   *proposal
	inFlight *entry
	timer    bool // a proposal is due
	durable  meta.Seq
	commits  int

	live      map[meta.SessionID]*session
	awaited   map[meta.SessionID]*session
	recovered bool
	opened    int64 // on the server's clock
	waits     []*waiting
	kicked    bool
	// leases has the round in which each lease is being recalled, or zero.
	leases  map[meta.Ino]map[meta.SessionID]int
	rounds  int
	names   map[place]change
	sealing map[meta.ChunkID]bool
	ended   bool
	closed  bool // being rolled back: nobody is let in
}

// open brings the store to the end of the log and begins.
func (s *server) open(l *volumeLog, t taken, sent int64) {
	o := &owner{
		w: s.w, srv: s, l: l, token: t.token, term: t.term, until: sent + ownerTTL - ownerTTL/margin,
		over: btree.NewG(16, func(a, b *pending) bool { return a.k < b.k }),
		live: map[meta.SessionID]*session{}, awaited: map[meta.SessionID]*session{}, leases: map[meta.Ino]map[meta.SessionID]int{},
		names: map[place]change{}, sealing: map[meta.ChunkID]bool{}, opened: s.w.clock(&s.node),
	}
	if o.st = s.stores[l.vol]; o.st == nil {
		o.st = newStore()
	}
	if t.cp != nil && o.st.pos.Seq < t.cp.state.pos.Seq {
		o.st = t.cp.state.clone()
	}
	chain := journal.Chain{Volume: l.vol, At: o.st.pos}
	for _, p := range t.recs {
		if p.entry.Seq <= o.st.pos.Seq {
			continue
		}
		if err := chain.Step(p.entry); err != nil {
			s.w.fail("%s: reading the log of volume %d: %v", s.name, l.vol, err)
			return
		}
		effects, err := namespace.DecodeEffects(p.entry.Payload)
		if err != nil {
			s.w.fail("%v", err)
			return
		}
		o.st.apply(p.entry.Position(), effects)
	}
	// The checks' knowledge of the entries up to here.
	for _, p := range l.all[:o.st.pos.Seq] {
		for _, c := range p.changes {
			o.names[c.at] = c
		}
	}
	o.durable = o.st.pos.Seq
	o.cur = &entry{seq: o.durable + 1}
	s.owners[l.vol] = o
	delete(s.stores, l.vol)
	if err := namespace.Sessions(o.st, func(i meta.SessionStart, _ bool) bool {
		o.awaited[i.Session] = &session{id: i.Session, started: o.durable, replies: map[meta.OpID]*reply{}}
		return true
	}); err != nil {
		s.w.fail("%v", err)
	}
	for _, id := range sorted(o.awaited) {
		a := o.awaited[id]
		if err := namespace.Replies(o.st, id, func(k, v []byte) bool {
			_, seq, op, res, err := namespace.DecodeReply(k, v)
			if err != nil {
				s.w.fail("%v", err)
				return false
			}
			r := &reply{id: op, seq: seq, res: *res}
			a.replies[op] = r
			a.order = append(a.order, r)
			return true
		}); err != nil {
			s.w.fail("%v", err)
		}
	}
	o.renew()
	o.reopen()
	o.tick()
}

// holds: the owner may answer (rule 2).
func (o *owner) holds() bool {
	return o.w.cfg.Off.OwnerLease || o.w.clock(&o.srv.node) < o.until
}

func (o *owner) renew() {
	if o.ended {
		return
	}
	sent := o.w.clock(&o.srv.node)
	o.w.after(o.w.delay(), nil, func() {
		ok := o.l.renew(o.token)
		o.w.after(o.w.delay(), &o.srv.node, func() {
			if ok {
				o.until = max(o.until, sent+ownerTTL-ownerTTL/margin)
			}
		})
	})
	o.w.after(ownerTTL/4, &o.srv.node, o.renew)
}

// lose ends the serving; pending effects are dropped (rule 1).
func (o *owner) lose(why string) {
	if o.ended {
		return
	}
	o.w.trace("%s serves volume %d no more: %s", o.srv.name, o.l.vol, why)
	o.ended = true
	if o.srv.owners[o.l.vol] == o {
		delete(o.srv.owners, o.l.vol)
		o.srv.stores[o.l.vol] = o.st
	}
	for _, id := range sorted(o.live) {
		if c := o.live[id].conn; c != nil {
			c.down(goneMsg{})
		}
	}
}

// tick does the work that is due: expiry, recovery, sealing, collecting.
func (o *owner) tick() {
	if o.ended {
		return
	}
	if !o.holds() {
		o.lose("its lease is over")
		return
	}
	now := o.w.clock(&o.srv.node)
	for _, id := range sorted(o.live) {
		if s := o.live[id]; now-s.heard > sessionTTL {
			// A late session ends when another session needs its leases, or (by chance)
			// when the owner needs the room.
			if !o.w.cfg.Off.Courtesy && now-s.heard <= courtesy && !o.inTheWay(id) && !o.w.chance(30) {
				continue
			}
			o.w.res.Expired++
			o.w.trace("volume %d: session %x expires", o.l.vol, id)
			o.end(id)
		}
	}
	if !o.recovered {
		late := now-o.opened > sessionTTL+sessionTTL/4
		if late || o.term == 1 {
			for _, id := range sorted(o.awaited) {
				o.end(id)
			}
			o.recovered = true
			o.kick()
		}
	}
	o.seal()
	o.collect()
	o.dropSome()
	o.w.after(20, &o.srv.node, o.tick)
}

// inTheWay says whether a call waits for a lease of a session.
func (o *owner) inTheWay(id meta.SessionID) bool {
	for _, holders := range o.leases {
		if holders[id] > 0 {
			return true
		}
	}
	return false
}

// end releases the leases and chunks of a session.
func (o *owner) end(id meta.SessionID) {
	delete(o.live, id)
	delete(o.awaited, id)
	o.w.truth.ended(o.l.vol, id)
	for _, holders := range o.leases {
		delete(holders, id)
	}
	o.waits = slices.DeleteFunc(o.waits, func(w *waiting) bool { return w.s.id == id })
	op := &meta.SessionEnd{Session: id}
	for {
		res, err := o.run(op, 0)
		if err != nil {
			o.w.fail("ending session %x: %v", id, err)
			return
		}
		if res.EOF {
			break
		}
		op.From = meta.Ino(res.Off)
	}
	o.kick()
}

// run executes an operation of the owner itself.
func (o *owner) run(op meta.Op, as meta.SessionID) (*meta.Result, error) {
	res, effects, err := namespace.Execute(&view{o: o, session: as}, o.context(as), op)
	for errors.Is(err, meta.Again) {
		o.reap()
		res, effects, err = namespace.Execute(&view{o: o, session: as}, o.context(as), op)
	}
	if err != nil {
		return nil, err
	}
	o.book(effects, 0)
	return res, nil
}

func (o *owner) reap() {
	var inos []meta.Ino
	if err := namespace.ReapQueue(&view{o: o}, func(i meta.Ino) bool { inos = append(inos, i); return len(inos) < 4 }); err != nil {
		o.w.fail("%v", err)
	}
	for _, ino := range inos {
		if _, effects, err := namespace.Execute(&view{o: o}, o.context(0), &meta.Reap{Ino: ino, Max: 100}); err != nil {
			o.w.fail("reaping %d: %v", ino, err)
		} else {
			o.book(effects, 0)
		}
	}
}

func (o *owner) context(s meta.SessionID) namespace.Context {
	return namespace.Context{Now: meta.Time(o.w.clock(&o.srv.node)) * 1e6, Session: s, Term: o.term, Volume: o.l.vol, Seq: o.cur.seq}
}

func (o *owner) book(effects []namespace.Effect, by meta.SessionID) {
	for _, e := range effects {
		o.cur.effects = append(o.cur.effects, e)
		if e.Kind == namespace.DeleteRange || e.Key[0] == replyPrefix {
			continue
		}
		o.over.ReplaceOrInsert(&pending{k: string(e.Key), v: e.Value, del: e.Kind == namespace.Delete, seq: o.cur.seq, by: by})
	}
	o.propose(2 + o.w.rng.Int64N(8))
}

// propose sends the current entry to the log, in d milliseconds.
func (o *owner) propose(d int64) {
	if o.timer || o.flight != nil || len(o.cur.effects) == 0 {
		return
	}
	o.timer = true
	o.w.after(d, &o.srv.node, func() {
		o.timer = false
		if o.ended || o.flight != nil || len(o.cur.effects) == 0 {
			return
		}
		e := o.cur
		o.cur = &entry{seq: e.seq + 1}
		for _, s := range e.sessions {
			o.forget(e, s)
		}
		p := &proposal{journal.Next(o.l.vol, o.st.pos, o.term, namespace.AppendEffects(nil, e.effects)), e.changes}
		o.flight, o.inFlight = p, e
		o.send(p)
	})
}

// forget drops replies that the client acknowledged.
func (o *owner) forget(e *entry, s *session) {
	if s.acked <= s.forgot {
		return
	}
	n := 0
	for n < len(s.order) && s.order[n].seq <= s.acked {
		delete(s.replies, s.order[n].id)
		n++
	}
	s.order = s.order[n:]
	e.effects = append(e.effects, namespace.DeleteReplies(s.id, s.forgot, s.acked))
	s.forgot = s.acked
}

// send proposes until the outcome is known: requests and answers get lost, and
// a request may arrive twice, the second time late.
func (o *owner) send(p *proposal) {
	if o.flight != p || o.ended {
		return
	}
	w := o.w
	deliver := func() {
		v := o.l.propose(o.token, *p)
		if !w.chance(30) {
			w.after(w.delay(), &o.srv.node, func() { o.settled(p, v) })
		}
	}
	if !w.chance(30) {
		w.after(w.delay(), nil, deliver)
	}
	if w.chance(30) {
		w.after(w.delay()+w.rng.Int64N(2*ownerTTL), nil, deliver)
	}
	w.after(80, &o.srv.node, func() { o.send(p) })
}

func (o *owner) settled(p *proposal, v verdict) {
	switch {
	case o.flight != p || o.ended:
	case v.in:
		o.committed(p)
	case v.other && v.owned:
		o.w.fail("volume %d: %s owns it at term %d, and entry %d is another's", o.l.vol, o.srv.name, o.term, p.entry.Seq)
	case !v.owned:
		o.lose(fmt.Sprintf("another took it: token %d of %d, entry %d", o.token, o.l.token, p.entry.Seq))
	}
}

func (o *owner) committed(p *proposal) {
	e := o.inFlight
	o.flight, o.inFlight = nil, nil
	o.durable = e.seq
	for _, s := range e.sessions {
		if s.conn != nil {
			s.conn.down(durableMsg{e.seq})
		}
	}
	o.st.apply(p.entry.Position(), e.effects)
	for _, ef := range e.effects {
		if old, ok := o.over.Get(&pending{k: string(ef.Key)}); ok && old.seq == e.seq {
			o.over.Delete(old)
		}
	}
	if o.w.chance(100) {
		o.srv.kept[o.l.vol] = o.st.clone()
	}
	if o.commits++; o.commits%12 == 0 {
		cp := &checkpoint{o.st.clone()}
		o.srv.kept[o.l.vol] = o.st.clone()
		o.w.after(o.w.delay(), nil, func() { o.l.trim(o.token, cp) })
	}
	o.propose(2 + o.w.rng.Int64N(8))
	o.kick()
}

// seal ends the chunks without a session (rule 5): it freezes the replicas, collects
// lengths, journals the seal, and only then cuts the replicas.
func (o *owner) seal() {
	if err := namespace.AllOpenChunks(&view{o: o}, func(c meta.ChunkRecord, _ meta.Ino) bool {
		if o.live[c.Session] == nil && o.awaited[c.Session] == nil && !o.sealing[c.ID] {
			o.sealing[c.ID] = true
			o.w.after(0, &o.srv.node, func() { o.freeze(c) })
		}
		return true
	}); err != nil {
		o.w.fail("%v", err)
	}
}

func (o *owner) freeze(c meta.ChunkRecord) {
	if o.ended {
		return
	}
	w := o.w
	f := meta.Fence{Term: o.term, Seals: c.Fence.Seals + 1}
	got := map[meta.ServerID]meta.OrderResult{}
	decided := false
	decide := func() {
		if decided || o.ended || !o.holds() {
			return
		}
		decided = true
		var best meta.OrderResult
		var have []meta.ServerID
		for _, id := range sorted(got) {
			if r := got[id]; r.Err == meta.KindOK {
				have = append(have, id)
				if r.Length >= best.Length {
					best = r
				}
			}
		}
		// A shorter replica is no replica of the sealed chunk.
		have = slices.DeleteFunc(have, func(id meta.ServerID) bool { return got[id].Length < best.Length })
		if len(have) == 0 {
			delete(o.sealing, c.ID) // nobody can tell: again later
			return
		}
		if _, err := o.run(&meta.SealChunk{Chunk: c.ID, Length: best.Length, Fence: f, Servers: have}, 0); err != nil {
			w.fail("sealing %v at %d: %v", c.ID, best.Length, err)
			return
		}
		w.res.Seals++
		w.trace("volume %d: %v sealed at %d on %v", o.l.vol, c.ID, best.Length, have)
		seq := o.cur.seq
		var cut func()
		cut = func() {
			switch {
			case o.ended:
			case o.durable < seq:
				w.after(5, &o.srv.node, cut)
			default:
				delete(o.sealing, c.ID)
				for _, id := range have {
					d := w.disks[id-1]
					w.after(w.delay(), &d.node, func() {
						if err := d.seal(c.ID, f, int(best.Length)); errors.Is(err, meta.Corrupt) {
							w.fail("%s has less of %v than it told", d.name, c.ID)
						}
					})
				}
			}
		}
		cut()
	}
	for _, id := range c.Servers {
		d := w.disks[id-1]
		w.after(w.delay(), &d.node, func() {
			r := d.freeze(c.ID, f)
			w.after(w.delay(), &o.srv.node, func() {
				if got[id] = r; len(got) == len(c.Servers) {
					decide()
				}
			})
		})
	}
	w.after(120, &o.srv.node, decide)
}

// collect deletes the chunks without references, once the journal says so.
func (o *owner) collect() {
	if !o.recovered || o.over.Len() > 0 {
		return
	}
	var c meta.ChunkRecord
	if err := namespace.DeletingChunks(o.st, func(x meta.ChunkRecord) bool { c = x; return false }); err != nil {
		o.w.fail("%v", err)
	}
	if c.ID.IsZero() || o.sealing[c.ID] {
		return
	}
	for _, id := range c.Servers {
		d := o.w.disks[id-1]
		o.w.after(o.w.delay(), &d.node, func() { d.delete(c.ID) })
	}
	if _, err := o.run(&meta.DropChunk{Chunk: c.ID}, 0); err != nil {
		o.w.fail("%v", err)
	}
}
