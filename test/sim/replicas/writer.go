package replicas

import (
	"bytes"
	"errors"
	"slices"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/replica"
)

// maxLen is the length in bytes at which a writer finishes a chunk by itself.
const maxLen = 120

// writer is a client that writes one file after the other, each through several chunks.
type writer struct {
	node
	w        *world
	k        int
	stopping bool
	session  int // -1: none
	file     int
	files    int
	salt     int // from which the writer derives its bytes
	buf      []byte
	synced   uint64 // of the file

	// The chunk under way, and its offset in the file (base).
	m         *replica.Writer
	rec       *record
	base      uint64
	openEnded bool
	ended     bool // the journal knows that the file ends in the chunk
	sealing   bool
	rude      bool // the writer goes on in its predecessor's chunk
	era       int  // of the chunk
	syncs     []uint64
}

func (c *writer) boot() {
	c.session = -1
	c.m, c.rec, c.sealing, c.buf, c.synced = nil, nil, false, nil, 0
	c.rude = false
	c.era++
	c.files++
	c.file = c.k + 1000*c.files
	c.tick()
	c.heart()
}

// over begins again, with another session and another file.
func (c *writer) over() {
	c.life++
	c.boot()
}

func (c *writer) crash() {
	w := c.w
	w.trace("%s crashes", c.name)
	c.life++
	c.down = w.Now + w.rng.Int64N(300)
	c.salt++
	era := c.rec
	base, session, acked := c.base, c.session, uint64(0)
	if c.m != nil {
		acked = c.m.Acked()
	}
	if w.rng.IntN(3) == 0 || session < 0 || era == nil {
		w.after(c.down-w.Now, &c.node, c.boot)
		return
	}
	// A successor has the session, the file's memory and the capability.
	w.res.Successors++
	rude := w.rng.IntN(2) == 0 && c.m != nil && c.m.Err() == nil
	w.after(c.down-w.Now, &c.node, func() {
		c.m, c.sealing, c.syncs = nil, false, nil
		c.era++
		if rude {
			// A writer that goes on at its predecessor's last known place, though rule 6
			// forbids this: replicas must not mix the bytes of the two writers.
			c.rude, w.truth.chunks[era.n].rude = true, true
			c.buf = c.buf[:base+acked]
			c.start(era, base, acked)
		} else {
			c.rec, c.base = era, base
			c.m = replica.NewWriter(len(era.Servers), 0)
			c.m.Off = &w.cfg.Off.Off
			_, _ = c.m.Append(uint64(len(c.buf)) - base)
			for i := range era.Servers {
				c.m.AckedTo(i, acked)
			}
			c.m.Fail(0, meta.Interrupted)
			c.sealing = true
			c.askSeal(false)
		}
		c.tick()
		c.heart()
	})
}

func (c *writer) heart() {
	c.w.after(beat, &c.node, func() {
		c.heart()
		if c.session < 0 || c.stopping && c.m == nil {
			return
		}
		session, o := c.session, c.w.owner()
		call(c.w, &c.node, &o.node, false, func(reply func(error)) { o.beat(session, reply) }, func(a answer[error]) {
			if a.ok && errors.Is(a.v, meta.SessionExpired) && c.session == session {
				c.over()
			}
		})
	})
}

// tick does the application's work, and repeats unanswered requests.
func (c *writer) tick() {
	w := c.w
	w.after(1+w.rng.Int64N(6), &c.node, func() {
		c.tick()
		switch {
		case c.sealing:
		case c.stopping && c.m == nil:
		case c.session < 0:
			o := w.owner()
			w.after(40, &c.node, func() {})
			call(w, &c.node, &o.node, false, o.hello, func(a answer[int]) {
				if a.ok && c.session < 0 {
					c.session = a.v
				}
			})
		case c.m == nil:
			if uint64(len(c.buf)) > 600 || w.rng.IntN(200) == 0 && c.synced == uint64(len(c.buf)) {
				c.over()
				return
			}
			c.alloc(uint64(len(c.buf)), nil)
		case c.stopping || c.m.Length() >= maxLen || w.rng.IntN(120) == 0:
			if c.m.Acked() == c.m.Length() || w.rng.IntN(20) == 0 {
				c.finish()
			}
		default:
			for range 1 + w.rng.IntN(3) {
				c.write(1 + w.rng.IntN(7))
			}
			if w.rng.IntN(6) == 0 {
				c.sync()
			}
		}
	})
}

// alloc gets a fresh chunk for the file from base on; again is sent first.
func (c *writer) alloc(base uint64, again []byte) {
	w, o, era := c.w, c.w.owner(), c.era
	session, file := c.session, c.file
	c.sealing = true // nothing else meanwhile
	call(w, &c.node, &o.node, false, func(reply func(*record)) { o.alloc(session, file, base, reply) }, func(a answer[*record]) {
		if c.era != era {
			return
		}
		if !a.ok {
			c.alloc(base, again)
			return
		}
		c.sealing = false
		c.start(a.v, base, 0)
		if len(again) > 0 {
			c.append(again)
		}
	})
}

// start begins to write to a chunk, whose first have bytes exist.
func (c *writer) start(rec *record, base, have uint64) {
	c.era++
	c.rec, c.base, c.syncs = rec, base, nil
	c.m = replica.NewWriter(len(rec.Servers), 0)
	c.m.Off = &c.w.cfg.Off.Off
	if have > 0 {
		_, _ = c.m.Append(have)
		for i := range rec.Servers {
			c.m.AckedTo(i, have)
		}
	}
	c.openEnded, c.ended = c.w.rng.IntN(2) == 0, false
	if c.openEnded {
		c.commit(have, nil)
	}
}

// write appends n new bytes.
func (c *writer) write(n int) {
	var p []byte
	for i := range n {
		pos := len(c.buf) + i
		p = append(p, byte(pos*31+c.file*7+c.salt*101+pos>>3))
	}
	c.buf = append(c.buf, p...)
	c.append(p)
}

// append sends bytes of buf to all replicas.
func (c *writer) append(p []byte) {
	off, err := c.m.Append(uint64(len(p)))
	if err != nil {
		return
	}
	for i := range c.rec.Servers {
		c.sendTo(i, off, p)
	}
}

func (c *writer) sendTo(i int, off uint64, p []byte) {
	w, s, era := c.w, c.w.servers[int(c.rec.Servers[i])-1], c.era
	p = bytes.Clone(p)
	chunk, fence, end := c.rec.n, c.rec.Fence, off+uint64(len(p))
	call(w, &c.node, &s.node, true, func(reply func(error)) { s.append(chunk, fence, off, p, reply) }, func(a answer[error]) {
		switch {
		case c.era != era:
		case a.ok && a.v == nil:
			c.m.AckedTo(i, end)
			c.progress()
		case !a.ok && c.m.Has(i, end):
		default:
			c.failed(i, a.v)
		}
	})
}

func (c *writer) failed(i int, err error) {
	if err == nil {
		err = meta.Unavailable
	}
	if c.m.Fail(i, err) == replica.Renew {
		c.w.res.Renewals++
		for off := uint64(0); off < c.m.Length(); off += 8 {
			if end := min(off+8, c.m.Length()); !c.m.Has(i, end) {
				c.resend(i, off)
				return
			}
		}
		return
	}
	if !c.sealing {
		c.sealing = true
		c.askSeal(true)
	}
}

// resend sends replica i all bytes without an acknowledgement from it, from off at the
// latest.
func (c *writer) resend(i int, off uint64) {
	for off > 0 && !c.m.Has(i, off) {
		off--
	}
	for !c.m.Has(i, c.m.Length()) && c.m.Has(i, off+1) {
		off++
	}
	c.sendTo(i, off, c.buf[c.base+off:c.base+c.m.Length()])
}

func (c *writer) sync() {
	upTo := c.m.Length()
	if upTo == 0 || c.m.Err() != nil {
		return
	}
	c.syncs = append(c.syncs, upTo)
	for i, id := range c.rec.Servers {
		if !c.m.Ask(i, upTo) {
			continue
		}
		w, s, era, chunk := c.w, c.w.servers[int(id)-1], c.era, c.rec.n
		type synced struct {
			mark uint64
			err  error
		}
		call(w, &c.node, &s.node, true, func(reply func(synced)) {
			s.sync(chunk, upTo, func(n uint64, err error) { reply(synced{n, err}) })
		}, func(a answer[synced]) {
			switch {
			case c.era != era:
			case a.ok && a.v.err == nil:
				c.m.SyncedTo(i, upTo, a.v.mark)
				c.progress()
			default:
				c.failed(i, a.v.err)
			}
		})
	}
	c.progress()
}

// progress tells truth the acknowledged length, and returns from syncs.
func (c *writer) progress() {
	acked := c.m.Acked()
	c.w.truth.acked(c.rec.n, c.buf[c.base:c.base+acked])
	synced := c.m.Synced()
	for len(c.syncs) > 0 && c.syncs[0] <= synced {
		upTo := c.syncs[0]
		c.syncs = c.syncs[1:]
		if c.openEnded && c.ended {
			c.promise(c.base + upTo)
		} else {
			c.commit(upTo, func() { c.promise(c.base + upTo) })
		}
	}
}

// promise: a sync of the file up to pos returns.
func (c *writer) promise(pos uint64) {
	if pos > c.synced {
		c.synced = pos
		c.w.truth.promised(c, pos)
	}
}

// commit journals that the file refers to n bytes of the chunk, or ends in the chunk.
func (c *writer) commit(n uint64, then func()) {
	w, o, era := c.w, c.w.owner(), c.era
	chunk, session, ended := c.rec.n, c.session, c.openEnded
	call(w, &c.node, &o.node, false, func(reply func(error)) { o.extents(chunk, session, n, ended, reply) }, func(a answer[error]) {
		switch {
		case c.era != era:
		case a.ok && errors.Is(a.v, meta.SessionExpired):
			c.over()
		case a.ok && errors.Is(a.v, meta.Sealed):
			if c.sealing {
				c.over() // the file was unlinked
				return
			}
			// An owner sealed the chunk below this length: the lost bytes are sent again.
			c.m.Fail(0, meta.Sealed)
			c.sealing = true
			c.askSeal(true)
		case !a.ok || a.v != nil:
			c.commit(n, then)
		default:
			c.ended = c.ended || ended
			if then != nil {
				then()
			}
		}
	})
}

// finish has the chunk sealed though nothing failed.
func (c *writer) finish() {
	c.m.Fail(0, meta.Canceled)
	c.sealing = true
	c.askSeal(true)
}

// askSeal asks until the chunk is sealed, and continues in a fresh chunk.
func (c *writer) askSeal(stopped bool) {
	w, o, era := c.w, c.w.owner(), c.era
	chunk, session := c.rec.n, c.session
	var need *uint64
	if n := c.m.Need(); stopped {
		need = &n
	}
	call(w, &c.node, &o.node, false, func(reply func(uint64)) {
		if !o.active || chunk >= len(o.st.recs) || session >= len(o.st.expired) || o.st.expired[session] {
			return
		}
		r := o.st.recs[chunk]
		o.seal(r, need, func(ok bool) {
			if ok && r.State != meta.ChunkOpen {
				reply(r.Length)
			}
		})
	}, func(a answer[uint64]) {
		if c.era != era {
			return
		}
		if !a.ok {
			w.after(5+w.rng.Int64N(40), &c.node, func() {
				if c.era == era {
					c.askSeal(stopped)
				}
			})
			return
		}
		c.sealedAt(a.v)
	})
}

// sealedAt continues after a seal: the bytes below length belong to the file, later bytes
// are sent again.
func (c *writer) sealedAt(length uint64) {
	if length > c.m.Acked() && c.rude {
		c.over() // the writer can't know which writer's bytes these are
		return
	}
	if length > c.m.Length() {
		c.w.fail("%s: chunk %d is sealed at %d, only %d bytes were ever sent", c.name, c.rec.n, length, c.m.Length())
		return
	}
	from, _ := c.m.Again(length)
	again := slices.Clone(c.buf[c.base+from:])
	next := func() {
		c.promise(c.base + from) // frozen replicas made their answered lengths durable
		c.m, c.era, c.rude = nil, c.era+1, false
		c.sealing = false
		if c.stopping && len(again) == 0 {
			c.rec = nil
			return
		}
		c.alloc(c.base+from, again)
	}
	if length == 0 {
		next()
		return
	}
	c.openEnded = false
	c.commit(from, next)
}
