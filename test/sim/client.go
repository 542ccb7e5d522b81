package sim

import (
	"errors"
	"fmt"
	"slices"

	"penstock.io/penstock/meta"
)

// client is a mount with a session for each volume.
type client struct {
	node
	w        *world
	vols     []*clientVolume
	stopping bool
}

// clientVolume is the client's state of one session.
type clientVolume struct {
	c           *client
	w           *world
	vol         meta.VolumeID
	incarnation uint64
	unique      uint64

	session    meta.SessionID
	conn       *conn
	ready      bool  // the server knows us
	leaseUntil int64 // on the client's clock
	nextReq    uint64
	pending    map[uint64]*request
	retained   []retained
	seen       meta.Seq
	durable    meta.Seq
	// ackHold bounds the acknowledged entries while the client awaits answers that an
	// earlier connection may have lost.
	ackHold meta.Seq
	leases  map[meta.Ino]bool
	cache   map[string]cached // names in the root directory
	files   map[string]meta.Ino
	chunk   *writer
	busy    int
}

type request struct {
	msg    any // *call, syncMsg, allocMsg
	start  int // event
	replay bool
	resent bool
	done   func(r any)
	ops    []meta.OpID // for a sync: the operations that it makes durable
}

// retained is a mutation with an early answer.
type retained struct {
	call *call
	seq  meta.Seq
	ino  meta.Ino
}

type cached struct {
	sees change
	ino  meta.Ino
}

// writer is the open packed chunk of a session.
type writer struct {
	rec meta.ChunkRecord
	off int
	// idle: no append is under way.
	idle bool
}

func newClient(w *world, i int) *client {
	c := &client{w: w, node: node{name: fmt.Sprintf("client%d", i+1), drift: int64(i)*15 - 15}}
	for v := range w.cfg.Volumes {
		c.vols = append(c.vols, &clientVolume{c: c, w: w, vol: meta.VolumeID(v + 1)})
	}
	return c
}

func (cv *clientVolume) name() string { return fmt.Sprintf("%s on volume %d", cv.c.name, cv.vol) }

func (c *client) boot() {
	for _, cv := range c.vols {
		cv.incarnation = c.w.rng.Uint64()
		cv.unique, cv.session, cv.conn, cv.ready, cv.leaseUntil = 0, 0, nil, false, 0
		cv.pending, cv.retained, cv.seen, cv.durable = map[uint64]*request{}, nil, 0, 0
		cv.forgetAll()
		cv.files, cv.chunk, cv.busy = map[string]meta.Ino{}, nil, 0
		cv.connect()
		cv.alive()
	}
	c.work()
}

func (c *client) crash() {
	if c.stopping {
		return
	}
	c.w.res.Crashes++
	c.w.trace("%s crashes", c.name)
	c.life++
	for _, cv := range c.vols {
		if cv.conn != nil {
			cv.conn.broken = true
		}
		c.w.truth.dropped(cv)
	}
	c.w.after(50+c.w.rng.Int64N(200), &c.node, c.boot)
}

func (cv *clientVolume) forgetAll() {
	cv.leases, cv.cache = map[meta.Ino]bool{}, map[string]cached{}
}

func (cv *clientVolume) disconnect() {
	if cv.conn == nil {
		return
	}
	cv.w.res.Breaks++
	cv.conn.broken = true
	cv.conn, cv.ready = nil, false
	cv.w.after(cv.w.rng.Int64N(backAfter)+1, &cv.c.node, cv.connect)
}

// connect dials a server: the present owner of the volume, a former owner, or a later
// owner.
func (cv *clientVolume) connect() {
	if cv.conn != nil {
		return
	}
	srv := cv.w.log[cv.vol-1].owner
	if srv == nil || cv.w.chance(200) {
		srv = cv.w.servers[cv.w.rng.IntN(len(cv.w.servers))]
	}
	c := &conn{w: cv.w, cv: cv, srv: srv, life: srv.life}
	cv.conn = c
	sent := cv.w.clock(&cv.c.node)
	c.send(helloMsg{cv.session})
	cv.w.after(150, &cv.c.node, func() {
		if cv.conn == c && !cv.ready {
			cv.disconnect()
		}
	})
	cv.leaseFrom(sent, false)
}

func (cv *clientVolume) leaseFrom(sent int64, ok bool) {
	if ok {
		cv.leaseUntil = max(cv.leaseUntil, sent+sessionTTL-sessionTTL/margin)
	}
}

// alive renews the lease, and looks for another server when nobody answers.
func (cv *clientVolume) alive() {
	now := cv.w.clock(&cv.c.node)
	if cv.ready {
		cv.conn.send(aliveMsg{now})
		if now > cv.leaseUntil+sessionTTL {
			cv.disconnect()
		}
	}
	cv.w.after(sessionTTL/4, &cv.c.node, cv.alive)
}

func (cv *clientVolume) receive(c *conn, m any) {
	if cv.conn != c {
		return
	}
	switch m := m.(type) {
	case goneMsg:
		cv.disconnect()
	case welcomeMsg:
		cv.welcome(m)
	case aliveMsg:
		cv.leaseFrom(m.sent, true)
	case durableMsg:
		cv.durable = max(cv.durable, m.seq)
		cv.retained = slices.DeleteFunc(cv.retained, func(r retained) bool { return r.seq <= m.seq })
	case recallMsg:
		delete(cv.leases, m.ino)
		clear(cv.cache)
		c.send(recalledMsg(m))
	case *reply:
		r := cv.pending[m.req]
		delete(cv.pending, m.req)
		if r != nil {
			cv.answered(r, m)
		}
	case syncedMsg:
		if r := cv.pending[m.req]; r != nil {
			delete(cv.pending, m.req)
			cv.w.truth.synced(cv, r.ops)
			r.done(m)
		}
	case ordered:
		if r := cv.pending[m.req]; r != nil {
			delete(cv.pending, m.req)
			r.done(m)
		}
	case allocated:
		cv.w.truth.handedOut(cv, m.chunk.ID)
		if r := cv.pending[m.req]; r != nil {
			delete(cv.pending, m.req)
			r.done(m)
		}
	}
}

// welcome goes on with the session, or begins another.
func (cv *clientVolume) welcome(m welcomeMsg) {
	cv.ready = true
	if cv.session != 0 && m.session != cv.session {
		cv.w.trace("%s: the session is over", cv.name())
		cv.w.truth.dropped(cv)
		old := cv.pending
		cv.pending, cv.retained, cv.chunk = map[uint64]*request{}, nil, nil
		cv.seen, cv.durable, cv.ackHold = 0, 0, 0
		for _, id := range sorted(old) {
			if !old[id].replay {
				old[id].done(nil)
			}
		}
	}
	cv.session = m.session
	if !m.resumed {
		cv.forgetAll()
	}
	if !cv.resent() {
		cv.ackHold = cv.durable
	}
	// The order of the requests: answered requests by the order of their answers, then
	// unanswered replays of an earlier connection, then requests that were never
	// answered.
	var replays []*request
	for _, r := range cv.retained {
		replays = append(replays, &request{msg: r.call, replay: true, start: cv.w.res.Events})
	}
	cv.retained = nil
	var asked []uint64
	for _, id := range sorted(cv.pending) {
		if r := cv.pending[id]; r.replay {
			replays = append(replays, r)
			delete(cv.pending, id)
		} else {
			asked = append(asked, id)
		}
	}
	if cv.w.cfg.Off.ReplayOrder {
		cv.w.rng.Shuffle(len(replays), func(i, j int) { replays[i], replays[j] = replays[j], replays[i] })
	}
	for _, r := range replays {
		c := *r.msg.(*call)
		cv.nextReq++
		c.req, c.replay = cv.nextReq, true
		r.msg, r.resent = &c, true
		cv.pending[c.req] = r
		cv.conn.send(&c)
	}
	for _, id := range asked {
		// These requests are no replays: nobody assigned numbers to them, so they must
		// not bring along numbers that belong to others.
		r := cv.pending[id]
		if m, ok := r.msg.(syncMsg); ok {
			r.msg = syncMsg{m.req, syncAll} // entries have other numbers now
		}
		_, r.resent = r.msg.(*call)
		cv.conn.send(r.msg)
	}
	cv.conn.send(aliveMsg{cv.w.clock(&cv.c.node)})
}

// resent: a request without an answer was sent on an earlier connection, too.
func (cv *clientVolume) resent() bool {
	for _, r := range cv.pending {
		if r.resent {
			return true
		}
	}
	return false
}

func (cv *clientVolume) ack() meta.Seq {
	if cv.resent() {
		return cv.ackHold
	}
	return cv.durable
}

func (cv *clientVolume) ask(make func(req uint64) any, done func(any)) *request {
	cv.nextReq++
	r := &request{msg: make(cv.nextReq), start: cv.w.res.Events, done: done}
	cv.pending[cv.nextReq] = r
	if cv.ready {
		cv.conn.send(r.msg)
	}
	return r
}

// do asks for an operation.
func (cv *clientVolume) do(id meta.OpID, op meta.Op, done func(*reply)) {
	cv.ask(func(req uint64) any { return &call{req: req, id: id, op: op, ack: cv.ack()} }, func(a any) {
		r, _ := a.(*reply)
		done(r)
	})
}

// answered handles a reply. A mutation is retained until it is durable.
func (cv *clientVolume) answered(r *request, m *reply) {
	c := r.msg.(*call)
	if r.replay && m.err != nil {
		cv.w.fail("%s: %T %v was answered early; sent again it fails: %v", cv.name(), c.op, c.id, m.err)
		return
	}
	for _, s := range m.sees {
		cv.w.truth.saw(cv, "an answer", s, r.start)
	}
	if m.grant != 0 {
		cv.leases[m.grant] = true
	}
	if m.seq != 0 && m.err == nil {
		cv.w.truth.answered(cv, m, c)
		clear(cv.cache) // no recall announces the client's own changes
		cv.seen = max(cv.seen, m.seq)
		if m.seq > cv.durable {
			kept := *c
			switch op := c.op.(type) {
			case *meta.Create:
				n := *op
				n.Ino, n.Time = m.res.Attr.Ino, m.res.Attr.Btime
				kept.op = &n
			}
			cv.retained = append(cv.retained, retained{&kept, m.seq, m.res.Attr.Ino})
		}
	}
	if r.done != nil {
		r.done(m)
	}
}

func (cv *clientVolume) opID() meta.OpID {
	cv.unique++
	return meta.OpID{Incarnation: cv.incarnation, Unique: cv.unique}
}

// work does something on some volume, now and then.
func (c *client) work() {
	if c.stopping {
		return
	}
	if cv := c.vols[c.w.rng.IntN(len(c.vols))]; cv.busy < 3 {
		cv.act()
	}
	c.w.after(1+c.w.rng.Int64N(12), &c.node, c.work)
}

var someNames = []string{"a", "b", "c", "d", "e"}

func (cv *clientVolume) act() {
	w := cv.w
	name := someNames[w.rng.IntN(len(someNames))]
	cv.busy++
	end := func(*reply) { cv.busy-- }
	switch p := w.rng.IntN(100); {
	case p < 22:
		cv.do(cv.opID(), &meta.Create{Parent: meta.RootIno, Name: name, Mode: meta.TypeRegular | 0o644, Excl: true}, func(r *reply) {
			if r != nil && r.err == nil {
				cv.files[name] = r.res.Attr.Ino
			}
			cv.busy--
		})
	case p < 34:
		cv.do(cv.opID(), &meta.Unlink{Parent: meta.RootIno, Name: name}, func(r *reply) {
			if r != nil && r.err == nil && r.res.Attr.Nlink == 0 {
				cv.do(cv.opID(), &meta.ReleaseOrphans{Inos: []meta.Ino{r.res.Attr.Ino}}, end)
				return
			}
			cv.busy--
		})
	case p < 44:
		to := someNames[w.rng.IntN(len(someNames))]
		if to == name {
			cv.busy--
			return
		}
		cv.do(cv.opID(), &meta.Rename{Parent: meta.RootIno, Name: name, NewParent: meta.RootIno, NewName: to, Flags: uint32(w.rng.IntN(2)) * meta.RenameNoReplace}, func(r *reply) {
			if r != nil && r.err == nil && r.res.Attr2.Ino != 0 && r.res.Attr2.Nlink == 0 {
				cv.do(cv.opID(), &meta.ReleaseOrphans{Inos: []meta.Ino{r.res.Attr2.Ino}}, end)
				return
			}
			cv.busy--
		})
	case p < 66:
		cv.lookup(name, func(meta.Ino) { cv.busy-- })
	case p < 80:
		cv.lookup(name, func(ino meta.Ino) {
			if ino == 0 {
				cv.busy--
				return
			}
			cv.write(ino, end)
		})
	case p < 92:
		cv.lookup(name, func(ino meta.Ino) {
			if ino == 0 {
				cv.busy--
				return
			}
			cv.read(ino, 0)
		})
	case p < 94:
		cv.do(meta.OpID{}, &meta.StatFSOp{}, end)
	case p < 97:
		cv.snap()
	default:
		cv.sync()
	}
}

// lookup finds a name, in the cache if the lease allows this.
func (cv *clientVolume) lookup(name string, done func(meta.Ino)) {
	if c, ok := cv.cache[name]; ok && cv.leases[meta.RootIno] && cv.w.clock(&cv.c.node) < cv.leaseUntil {
		cv.w.truth.saw(cv, "its cache", c.sees, cv.w.res.Events)
		done(c.ino)
		return
	}
	cv.do(meta.OpID{}, &meta.Lookup{Parent: meta.RootIno, Name: name}, func(r *reply) {
		if r == nil || r.err != nil && !errors.Is(r.err, meta.NotFound) {
			done(0)
			return
		}
		if r.grant != 0 {
			cv.cache[name] = cached{r.sees[0], r.res.Attr.Ino}
		}
		done(r.res.Attr.Ino)
	})
}

// sync waits until everything answered so far is in the journal.
func (cv *clientVolume) sync() {
	var ops []meta.OpID
	for _, r := range cv.retained {
		ops = append(ops, r.call.id)
	}
	seq := cv.seen
	for _, id := range sorted(cv.pending) {
		if r := cv.pending[id]; r.replay {
			ops = append(ops, r.msg.(*call).id)
			seq = syncAll
		}
	}
	if len(ops) == 0 {
		cv.busy--
		return
	}
	r := cv.ask(func(req uint64) any { return syncMsg{req, seq} }, func(any) { cv.busy-- })
	r.ops = ops
}

// syncAll means: every answered operation.
const syncAll = meta.Seq(1<<64 - 1)

// write appends to the session's packed chunk on every replica, syncs the replicas, and
// commits the extent.
func (cv *clientVolume) write(ino meta.Ino, done func(*reply)) {
	if cv.chunk == nil {
		cv.ask(func(req uint64) any { return allocMsg{req} }, func(a any) {
			if m, ok := a.(allocated); ok && cv.chunk == nil {
				cv.chunk = &writer{rec: m.chunk, idle: true}
			}
			done(nil)
		})
		return
	}
	ch := cv.chunk
	if !ch.idle || ch.off > 40*blockSize {
		if ch.idle {
			cv.retire(ch)
		}
		done(nil)
		return
	}
	ch.idle = false
	id, off := cv.opID(), ch.off
	ch.off += blockSize
	left, failed := len(ch.rec.Servers), false
	over := false
	finish := func() {
		if over {
			return
		}
		over = true
		ch.idle = true
		if failed || left > 0 {
			cv.retire(ch)
			done(nil)
			return
		}
		e := meta.Extent{Off: 0, Len: blockSize, Chunk: ch.rec.ID, ChunkOff: uint64(off)}
		cv.w.res.Writes++
		cv.do(id, &meta.Write{Ino: ino, Extents: []meta.Extent{e}, Size: blockSize, Synced: true}, done)
	}
	for _, srv := range ch.rec.Servers {
		d := cv.w.disks[srv-1]
		cv.w.after(cv.w.delay(), &d.node, func() {
			err := d.append(ch.rec.ID, ch.rec.Fence, off, block(id))
			if err == nil {
				err = d.sync(ch.rec.ID, off+blockSize)
			}
			cv.w.after(cv.w.delay(), &cv.c.node, func() {
				failed = failed || err != nil
				if left--; left == 0 {
					finish()
				}
			})
		})
	}
	cv.w.after(150, &cv.c.node, finish)
}

// retire stops the use of a chunk: the owner seals it.
func (cv *clientVolume) retire(ch *writer) {
	if cv.chunk == ch {
		cv.chunk = nil
	}
	if cv.ready {
		cv.conn.send(sealMsg{ch.rec.ID})
	}
}

// read asks for the places of a file's bytes, and reads the bytes from a replica. If the
// bytes have moved or gone by then, read asks again.
func (cv *clientVolume) read(ino meta.Ino, try int) {
	cv.do(meta.OpID{}, &meta.Open{Ino: ino}, func(r *reply) {
		if r == nil || r.err != nil || len(r.res.Extents) == 0 {
			cv.busy--
			return
		}
		e, servers := r.res.Extents[0], r.res.Places[0].Servers
		d := cv.w.disks[servers[cv.w.rng.IntN(len(servers))]-1]
		cv.w.after(cv.w.delay(), &d.node, func() {
			b, err := d.read(e.Chunk, int(e.ChunkOff), int(e.Len))
			b = slices.Clone(b)
			cv.w.after(cv.w.delay(), &cv.c.node, func() {
				if err != nil {
					if try < 5 {
						cv.read(ino, try+1)
					} else {
						cv.busy--
					}
					return
				}
				cv.w.res.Reads++
				if op := blockOp(b); op != r.sees[0].op {
					cv.w.fail("%s reads inode %d: the bytes of %v, not of %v", cv.name(), ino, op, r.sees[0].op)
				}
				cv.busy--
			})
		})
	})
}
