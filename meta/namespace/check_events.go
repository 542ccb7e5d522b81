package namespace

import "encoding/binary"

// event checks one event, and the numbers of events for gaps.
func (c *checker) event(k, v []byte) {
	w := walker{b: v}
	ver, kind, bits, typ := w.u8(), w.u8(), w.u8(), w.u8()
	w.u64()
	w.n()
	w.n()
	w.take(int(min(w.n(), 1<<20)))
	if bits&1 != 0 {
		w.n()
		w.take(int(min(w.n(), 1<<20)))
	}
	if bits&2 != 0 {
		w.n()
	}
	if bits&4 != 0 {
		w.n()
	}
	if problem := w.done(ver); len(k) != 9 || problem != "" || kind == 0 || bits > 15 || typ > 15 {
		c.bad(k, "an event of kind %d, bits %x: %s", kind, bits, problem)
		return
	}
	n := binary.BigEndian.Uint64(k[1:])
	if c.events == 0 {
		c.event1 = n
	}
	if n != c.event1+c.events {
		c.bad(k, "event %d, %d come from %d on", n, c.events, c.event1)
	}
	c.events++
}

// over judges the word about advisory quotas.
func (c *checker) over(k, v []byte) {
	if len(k) != 1 || len(v) != 2 || v[0] != 1 || v[1] < 1 || v[1] > 3 {
		c.bad(k, "crossed quotas: %x", v)
	}
}

// changer checks the note of a session that is changing a file.
func (c *checker) changer(k, v []byte) {
	if len(k) != 17 || len(v) != 1 || v[0] != 1 {
		c.bad(k, "a key of %d bytes with a value of %d", len(k), len(v))
		return
	}
	if s := binary.BigEndian.Uint64(k[1:]); !c.sessions[s] {
		c.bad(k, "a file is being changed by session %x, which has no record", s)
	}
}
