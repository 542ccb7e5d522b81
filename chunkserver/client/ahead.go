package client

import (
	"context"
	"maps"
	"sync"
	"time"

	"penstock.io/penstock/chunkserver/wire"
	"penstock.io/penstock/meta"
)

// Reading ahead. A read over the network costs a round trip and a frame at
// either end, whatever its size: sequential reads of 128 KiB would cost three
// times what those of 1 MiB do, and wait for each. So who reads a sealed chunk
// in small steps, in order, is served from pieces of 1 MiB that are fetched
// ahead, several at a time. What is fetched is verified and can't change; there
// is nothing to invalidate.
//
// Who reads whole pieces in order would gain nothing by a copy. For him pieces
// are asked for ahead but left in the socket, for a moment, until he comes and
// says where they shall go: he reads without waiting for a round trip, into
// memory that is in the caches, and the server is never idle. Where something
// else is asked of that connection meanwhile, or he doesn't come, they are
// taken out of its way.
const (
	aheadPiece = remoteMax
	aheadWhole = remoteMax / 2        // larger reads are of whole pieces, or might be
	aheadMost  = remoteMax            // larger reads are as good without
	aheadHold  = 2 * time.Millisecond // the moment
	aheadAfter = 2                    // reads in order before it begins
	aheadDepth = 4                    // pieces beyond the one being read, at most
	aheadSlack = 256 << 10            // how far out of order several readers of one file may be
	aheadIdle  = 2 * time.Second
	// maxAhead bounds the pieces of all chunks together, and maxRuns the chunks.
	maxAhead = 64
	maxRuns  = 256
)

// run is a chunk that is read in order.
type run struct {
	mu     sync.Mutex // taken before Client.mu
	next   uint64     // where the furthest read ended
	hits   int
	used   time.Time
	pieces []*aheadOf // in order of offset
}

// aheadOf is one piece. Guarded by the run's mu until done is closed by who fetches.
type aheadOf struct {
	off     uint64
	n       int
	buf     *[]byte // nil until it is known that it doesn't go to a reader's memory
	done    chan struct{}
	err     error
	dropped bool // nobody wants it any more: who fetches gives the buffer back

	held   *call  // its bytes wait in the socket for a reader; nil: they don't
	to     []byte // a reader's memory for all of it
	begun  bool   // the bytes go to where they shall: it is too late for another place
	cancel context.CancelFunc
}

var aheadPool = sync.Pool{New: func() any { b := make([]byte, aheadPiece); return &b }}

// runOf finds a chunk's run, or begins one.
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

// readAhead serves a read from pieces fetched ahead; false: read it plainly.
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
	for at := first; at < min(end+depth*aheadPiece, pl.Length); at += aheadPiece {
		if r.find(at) == nil && !r.fetch(c, *pl, at, len(p) > aheadWhole) {
			break
		}
	}
	for at := off; at < end; {
		a := r.find(at)
		if a == nil {
			return false
		}
		if a.held != nil && !a.begun && a.to == nil && at == a.off && end-at >= uint64(a.n) {
			a.to = p[at-off:][:a.n]
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
			r.drop(c, a.off, a.off+aheadPiece) // there are no bytes in it
		case a.buf == nil:
			return false // they went to another reader
		default:
			at += uint64(copy(p[at-off:], (*a.buf)[at-a.off:a.n]))
		}
	}
	return true
}

// wait waits for a piece, with r.mu held but while it does; false: it takes too
// long, or ctx has ended. Nobody writes to the reader's memory any more, then.
func (r *run) wait(c *Client, ctx context.Context, pl *meta.ChunkPlace, a *aheadOf, direct bool) bool {
	select {
	case <-a.done:
		return true
	default:
	}
	r.mu.Unlock()
	if a.held != nil {
		a.held.await()
	}
	var late <-chan time.Time
	if a.held != nil && len(pl.Servers) > 1 {
		// Only one server was asked; a plain read asks another one in time.
		t := time.NewTimer(c.lat.patience(a.n))
		defer t.Stop()
		late = t.C
	}
	ok := true
	select {
	case <-a.done:
	case <-late:
		ok = false
	case <-ctx.Done():
		ok = false
	}
	r.mu.Lock()
	if ok {
		return true
	}
	r.hits = 0
	if direct {
		a.cancel()
		r.mu.Unlock()
		<-a.done
		r.mu.Lock()
	}
	r.drop(c, a.off, a.off+aheadPiece)
	return false
}

// find gives the piece that has the byte at off.
func (r *run) find(off uint64) *aheadOf {
	for _, a := range r.pieces {
		if off >= a.off && off < a.off+uint64(a.n) {
			return a
		}
	}
	return nil
}

// fetch begins to read a piece; false if there are too many. With hold it stays
// in the socket until somebody waits for it.
func (r *run) fetch(c *Client, pl meta.ChunkPlace, at uint64, hold bool) bool {
	select {
	case c.pieces <- struct{}{}:
	default:
		return false
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		<-c.pieces
		return false
	}
	a := &aheadOf{off: at, n: int(min(aheadPiece, pl.Length-at)), done: make(chan struct{})}
	ctx, cancel := context.WithCancel(c.ctx)
	a.cancel = cancel
	if hold {
		a.held = &call{t: wire.Read, hold: make(chan struct{}, 1), place: func() []byte { return r.place(a) }}
	}
	r.pieces = append(r.pieces, a)
	c.wg.Go(func() {
		defer cancel()
		servers := c.order(pl.Servers)
		var err error
		if !hold || !r.fetchHeld(ctx, c, servers[0], &pl, a) {
			err = ctx.Err()
			if err == nil {
				err = c.fetch(ctx, servers, &pl, r.place(a), at)
			}
		}
		r.mu.Lock()
		defer r.mu.Unlock()
		a.err = err
		close(a.done)
		if a.dropped {
			a.free(c)
		}
	})
	return true
}

// fetchHeld reads a piece from one server, to where a reader wants it if he
// comes in time; false: it could not.
func (r *run) fetchHeld(ctx context.Context, c *Client, id meta.ServerID, pl *meta.ChunkPlace, a *aheadOf) bool {
	q := wire.Request{Cap: c.readCap(pl.ID), Chunk: pl.ID, Off: a.off, N: uint32(a.n)}
	return c.ask(ctx, id, &q, a.held, wire.FlagRaw) == nil && (!a.held.bad || c.cfg.UnsafeNoVerify)
}

// place says where a piece's bytes go.
func (r *run) place(a *aheadOf) []byte {
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

// drop lets go of the pieces that lie wholly within [lo, hi).
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

// dropRuns forgets what nobody reads any more.
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
