package client

import (
	"context"
	"maps"
	"sync"
	"time"

	"penstock.io/penstock/chunkserver/wire"
	"penstock.io/penstock/meta"
)

// Reading ahead. A read over the network costs a round trip, and a frame at either end,
// whatever its size: sequential reads of 128 KiB would cost three times as much as reads of 1
// MiB, and wait each time. So a reader that reads a sealed chunk in small steps, in order, is
// served from pieces of 1 MiB that the client fetches ahead, several at a time. Fetched pieces
// are verified and can't change, so there is nothing to invalidate.
//
// For a reader of whole blocks, a copy would cost more than it saves. The client requests
// pieces for such a reader ahead, but leaves the bytes in the socket for a moment, until the
// reader takes them: it reads without waiting for a round trip, into memory that is in the
// caches, no goroutine is woken to hand the bytes over, and the server is never idle. If
// another request needs the connection meanwhile, or the reader does not come, the client's
// goroutine reads the bytes.
const (
	aheadPiece = remoteMax
	aheadWhole = remoteMax / 2        // larger reads are of whole pieces, or might be
	aheadMost  = remoteMax            // larger reads are as good without
	aheadHold  = 2 * time.Millisecond // the moment
	aheadAfter = 2                    // reads in order before fetching ahead begins
	aheadDepth = 4                    // most pieces beyond the one being read
	aheadSlack = 256 << 10            // bytes by which several readers of one file may be out of order
	aheadIdle  = 2 * time.Second
	// maxAhead bounds the pieces of all chunks together, and maxRuns the chunks.
	maxAhead = 64
	maxRuns  = 256
)

// run is a chunk that is being read in order.
type run struct {
	mu     sync.Mutex // taken before Client.mu
	next   uint64     // where the furthest read ended
	hits   int
	used   time.Time
	pieces []*aheadOf // in order of offset
	line   *link      // over which pieces come, in order; may have ended
}

// aheadOf is one piece. The run's mu guards it until the fetching goroutine closes done.
type aheadOf struct {
	off     uint64
	n       int
	buf     *[]byte // nil until the piece is known not to go to a reader's memory
	done    chan struct{}
	err     error
	dropped bool // no longer wanted: the fetching goroutine returns the buffer

	held  *call  // the call whose data wait in the socket for a reader; nil: none
	to    []byte // a reader's memory for the whole piece
	begun bool   // the destination of the bytes is fixed
	gone  int    // leading bytes that readers took out of the socket, or are about to take
	part  bool   // a reader is about to take bytes
}

var aheadPool = sync.Pool{New: func() any { b := make([]byte, aheadPiece); return &b }}

// runOf returns a chunk's run, and begins a missing run.
func (c *Client) runOf(id meta.ChunkID) *run {
	c.mu.Lock()
	defer c.mu.Unlock()
	r := c.runs[id]
	if r == nil && len(c.runs) < maxRuns && !c.closed {
		r = &run{}
		c.runs[id] = r
	}
	return r
}

// readAhead serves a read from pieces fetched ahead. If it returns false, the caller reads in
// the ordinary way.
func (c *Client) readAhead(ctx context.Context, pl *meta.ChunkPlace, p []byte, off uint64) bool {
	if !pl.Sealed || len(p) > aheadMost {
		return false
	}
	r := c.runOf(pl.ID)
	if r == nil {
		return false
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	end := off + uint64(len(p))
	slack := max(aheadSlack, 4*uint64(len(p)))
	r.used = time.Now()
	switch {
	case off+slack < r.next || off > r.next+slack: // somewhere else
		r.drop(c, 0, ^uint64(0))
		r.next, r.hits = end, 0
		return false
	case r.hits < aheadAfter:
		r.hits++
		r.next = max(r.next, end)
		return false
	}
	r.hits++
	r.next = max(r.next, end)
	if behind := r.next - min(r.next, 2*slack); behind > 0 {
		r.drop(c, 0, behind)
	}
	first := off - off%aheadPiece
	depth := uint64(min(r.hits*len(p)/aheadWhole, aheadDepth))
	r.follow(c, pl)
	whole := func(at uint64) bool { return at%block == 0 || at == pl.Length }
	hold := len(p) > aheadWhole || r.line != nil && whole(off) && whole(end)
	r.want(c, pl, first, end, depth, hold)
	for at := off; at < end; {
		a := r.find(at)
		if a == nil {
			return false
		}
		if at < a.off+uint64(a.gone) {
			return false // the bytes went to another reader
		}
		if a.held != nil && !a.begun && a.to == nil && !a.part {
			to := p[at-off : min(end, a.off+uint64(a.n))-off]
			switch {
			case len(to) == a.n:
				a.to = to
			case r.line != nil && whole(at) && whole(at+uint64(len(to))) && r.takePart(a, to, int(at-a.off)):
				at += uint64(len(to))
				if a.gone == a.n {
					r.drop(c, a.off, a.off+aheadPiece)
				}
				continue
			}
		}
		direct := a.to != nil && &a.to[0] == &p[at-off]
		if !r.wait(c, ctx, pl, a, direct) {
			return false
		}
		switch {
		case a.err != nil:
			r.drop(c, a.off, a.off+aheadPiece)
			return false
		case direct:
			at += uint64(a.n)
			r.drop(c, a.off, a.off+aheadPiece) // the piece has no bytes
		case a.buf == nil:
			return false // the bytes went to another reader
		default:
			at += uint64(copy(p[at-off:], (*a.buf)[at-a.off:a.n]))
		}
	}
	return true
}

// wait waits for a piece. It unlocks r.mu, which the caller holds, meanwhile. It returns false
// if the piece takes too long, or ctx has ended; then nothing writes to the reader's memory
// any more.
func (r *run) wait(c *Client, ctx context.Context, pl *meta.ChunkPlace, a *aheadOf, direct bool) bool {
	select {
	case <-a.done:
		return true
	default:
	}
	r.mu.Unlock()
	var turn chan struct{}
	if k := a.held; k != nil {
		turn = k.turn
		k.takers.Add(1)
		if l := k.at.Load(); l != nil {
			l.take(k)
		}
		select {
		case <-a.done:
			r.mu.Lock()
			return true
		default:
			k.await()
		}
	}
	var late <-chan time.Time
	if a.held != nil && len(pl.Servers) > 1 {
		// Only one server was asked; an ordinary read asks another one in time.
		t := time.NewTimer(c.lat.patience(a.n))
		defer t.Stop()
		late = t.C
	}
	for ok := true; ok; {
		select {
		case <-a.done:
			r.mu.Lock()
			return true
		case <-turn:
			a.held.at.Load().take(a.held)
		case <-late:
			ok = false
		case <-ctx.Done():
			ok = false
		}
	}
	if a.held != nil {
		a.held.takers.Add(-1) // before drop, so that the turn is not reserved for this goroutine
	}
	r.mu.Lock()
	r.hits = 0
	switch {
	case !direct:
	case !a.begun:
		a.to = nil
	default:
		r.mu.Unlock()
		a.held.at.Load().stop(a.done)
		r.mu.Lock()
	}
	r.drop(c, a.off, a.off+aheadPiece)
	return false
}

// takePart reads the next bytes of a piece out of the socket, if they have arrived. The caller
// holds the run's mu, which takePart unlocks while it reads.
func (r *run) takePart(a *aheadOf, to []byte, at int) bool {
	l := a.held.at.Load()
	if l == nil || at != a.gone {
		return false
	}
	a.gone += len(to)
	a.part = true
	r.mu.Unlock()
	ok := l.takePart(a.held, to, at)
	r.mu.Lock()
	a.part = false
	if !ok {
		a.gone = at
	}
	return ok
}

// follow chooses the connection of the pieces: over one connection, pieces arrive in reading
// order. follow never chooses an encrypted connection: one goroutine decrypts more slowly than
// it could read.
func (r *run) follow(c *Client, pl *meta.ChunkPlace) {
	p := c.peer(c.order(pl.Servers)[0])
	pool := c.pool(forOthers, c.readCap(pl.ID))
	if r.line != nil && r.line.p == p && p.has(r.line, pool) {
		return
	}
	r.line = nil
	l := p.idle(pool, p.near(), true)
	if l == nil {
		return
	}
	l.release()
	if l.Plain() {
		r.line = l
	}
}

// want requests the unrequested pieces of [first, end), and depth pieces behind.
func (r *run) want(c *Client, pl *meta.ChunkPlace, first, end, depth uint64, hold bool) {
	upTo := min(end+depth*aheadPiece, pl.Length)
	if hold {
		// Such pieces take no memory of this process, so several are requested together when
		// few are left, which wakes the server less often.
		enough := true
		for at := first; at < upTo; at += aheadPiece {
			enough = enough && r.find(at) != nil
		}
		if enough {
			return
		}
		if len(c.pieces) < maxAhead/2 {
			upTo = min(end+2*depth*aheadPiece, pl.Length)
		}
	}
	for at := first; at < upTo; at += aheadPiece {
		if r.find(at) == nil && !r.fetch(c, *pl, at, hold) {
			break
		}
	}
	if r.line != nil {
		_ = r.line.Flush() // the connection's reader notices an error
	}
}

// find returns the piece with the byte at off.
func (r *run) find(off uint64) *aheadOf {
	for _, a := range r.pieces {
		if off >= a.off && off < a.off+uint64(a.n) {
			return a
		}
	}
	return nil
}

// fetch begins to read a piece; it returns false if too many are being read. With hold, the
// bytes stay in the socket until a reader waits for them.
func (r *run) fetch(c *Client, pl meta.ChunkPlace, at uint64, hold bool) bool {
	select {
	case c.pieces <- struct{}{}:
	default:
		return false
	}
	a := &aheadOf{off: at, n: int(min(aheadPiece, pl.Length-at)), done: make(chan struct{})}
	servers := c.order(pl.Servers)
	work := func() error { return c.fetch(c.ctx, servers, &pl, r.memory(a), at) }
	if hold {
		a.held = &call{t: wire.Read, hold: true, turn: make(chan struct{}, 1), place: func() []byte { return r.memory(a) }}
		q := &wire.Request{Cap: c.readCap(pl.ID), Chunk: pl.ID, Off: a.off, N: uint32(a.n)}
		if r.line != nil {
			r.pieces = append(r.pieces, a)
			r.line.users.Add(1)
			r.ask(c, r.line, q, a)
			return true
		}
		p, pool := c.peer(servers[0]), c.pool(forOthers, q.Cap)
		work = func() error {
			l, err := p.link(c.ctx, pool)
			if err != nil {
				return err
			}
			r.mu.Lock()
			defer r.mu.Unlock()
			r.ask(c, l, q, a)
			_ = l.Flush() // the connection's reader notices an error
			return nil
		}
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		<-c.pieces
		return false
	}
	r.pieces = append(r.pieces, a)
	c.wg.Go(func() {
		if err := work(); err != nil || !hold {
			r.mu.Lock()
			defer r.mu.Unlock()
			a.came(c, err)
		}
	})
	return true
}

// ask requests a piece, with the next Flush, and releases the connection when the piece has
// arrived. The caller holds the run's mu.
func (r *run) ask(c *Client, l *link, q *wire.Request, a *aheadOf) {
	k := a.held
	k.notify = func(_ *wire.Answer, err error) {
		l.release()
		if err == nil && k.bad && !c.cfg.UnsafeNoVerify {
			err = corrupt(q.Chunk, q.Off) // an ordinary read distinguishes the causes
		}
		r.mu.Lock()
		defer r.mu.Unlock()
		a.came(c, err)
	}
	id, err := l.start(k)
	if err != nil {
		l.release()
		a.came(c, err)
		return
	}
	l.Queue(q.AppendFrame(nil, k.t, wire.FlagRaw, id, 0, 0))
}

// came ends the fetching of a piece. The run's mu is held.
func (a *aheadOf) came(c *Client, err error) {
	a.err = err
	close(a.done)
	if a.dropped {
		a.free(c)
	}
}

// memory returns the memory for the bytes of a piece.
func (r *run) memory(a *aheadOf) []byte {
	r.mu.Lock()
	defer r.mu.Unlock()
	a.begun = true
	if a.to != nil {
		return a.to
	}
	if a.buf == nil {
		a.buf = aheadPool.Get().(*[]byte)
	}
	return (*a.buf)[:a.n]
}

func (a *aheadOf) free(c *Client) {
	if a.buf != nil {
		aheadPool.Put(a.buf)
		a.buf = nil
	}
	<-c.pieces
}

// drop drops the pieces entirely within [lo, hi).
func (r *run) drop(c *Client, lo, hi uint64) {
	kept := r.pieces[:0]
	for _, a := range r.pieces {
		if a.off < lo || a.off+uint64(a.n) > hi {
			kept = append(kept, a)
			continue
		}
		select {
		case <-a.done:
			a.free(c)
		default:
			a.dropped = true
			if a.held != nil {
				a.held.await()
			}
		}
	}
	clear(r.pieces[len(kept):])
	r.pieces = kept
}

// dropRuns forgets unused runs.
func (c *Client) dropRuns(all bool) {
	c.mu.Lock()
	runs := maps.Clone(c.runs)
	c.mu.Unlock()
	for id, r := range runs {
		r.mu.Lock()
		if all || time.Since(r.used) > aheadIdle {
			r.drop(c, 0, ^uint64(0))
			r.hits = 0
			c.mu.Lock()
			delete(c.runs, id)
			c.mu.Unlock()
		}
		r.mu.Unlock()
	}
}
