package server

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"penstock.io/penstock/chunkserver"
	"penstock.io/penstock/meta"
)

const (
	// gatherWindow is the number of bytes that are gathered before they are appended. The
	// pieces of a file are scattered over their chunks, and a block is read as a whole for
	// verification; within a window, each block is read once.
	gatherWindow = 16 << 20
	// gatherGap is how many bytes between two pieces are read in passing: a block.
	gatherGap = chunkserver.ChecksumBlock
	// gatherRead bounds the bytes of one read, gatherReads the parallel reads.
	gatherRead  = 4 << 20
	gatherReads = 4
)

// gatherCap is the right to read a volume's chunks elsewhere, while orders to
// gather last.
type gatherCap struct {
	cap   []byte
	users int
}

// want is a part of a piece: n bytes of a chunk for offset off of the window.
type want struct {
	src    uint32 // index in the order's Chunks
	at, to uint64
	n      uint64
}

// gather carries out OrderGather. Every byte is verified where it is read, and only replicas
// sealed as in the order are read (rule 5).
func (s *Server) gather(ctx context.Context, o meta.Order) (chunkserver.Info, error) {
	i, err := s.gatherAll(ctx, &o)
	if err != nil {
		s.pulls.failed.Add(1)
		if ctx.Err() != nil {
			err = meta.E("gather pieces", meta.Canceled, o.Chunk.String(), err)
		}
	}
	return i, err
}

func (s *Server) gatherAll(ctx context.Context, o *meta.Order) (chunkserver.Info, error) {
	const op = "gather pieces"
	var none chunkserver.Info
	if len(o.Pieces) == 0 || len(o.Pieces) > meta.MaxPieces || len(o.Chunks) > meta.MaxSources {
		return none, meta.E(op, meta.Invalid, o.Chunk.String(), fmt.Errorf("%d pieces of %d chunks", len(o.Pieces), len(o.Chunks)))
	}
	for _, p := range o.Pieces {
		if int(p.Chunk) >= len(o.Chunks) || p.Len == 0 || p.Off+p.Len < p.Len || p.Off+p.Len > o.Chunks[p.Chunk].Length {
			return none, meta.E(op, meta.Invalid, o.Chunk.String(), fmt.Errorf("%d bytes at %d of source %d of %d", p.Len, p.Off, p.Chunk, len(o.Chunks)))
		}
	}
	ctx, cancel := context.WithCancelCause(ctx)
	g := &gathering{s: s, o: o, from: make([]*replicas, len(o.Chunks)), ctx: ctx}
	defer g.wg.Wait()
	defer cancel(nil)
	if s.cfg.Peers != nil {
		g.peers = s.sources(*o)
		defer s.pulls.lend(o.Chunk.Volume, o.Cap)()
	}
	at := o.Length
	var wants []want
	var n uint64 // in the window
	buf := make([]byte, 0, min(gatherWindow, total(o.Pieces)))
	flush := func() error {
		buf = buf[:n]
		if err := g.fill(ctx, buf, wants); err != nil {
			return err
		}
		for p := range slices.Chunk(buf, 1<<20) {
			if err := s.appendOn(ctx, o.Class, o.Chunk, o.Fence, at, p, chunkserver.CRC(p)); err != nil {
				return err
			}
			at += uint64(len(p))
			s.pulls.gathered.Add(uint64(len(p)))
		}
		wants, n = wants[:0], 0
		return nil
	}
	for _, p := range o.Pieces {
		for p.Len > 0 {
			k := min(p.Len, gatherWindow-n, gatherRead)
			wants = append(wants, want{src: p.Chunk, at: p.Off, to: n, n: k})
			p.Off, p.Len, n = p.Off+k, p.Len-k, n+k
			if n == gatherWindow {
				if err := flush(); err != nil {
					return none, err
				}
			}
		}
	}
	if n > 0 {
		if err := flush(); err != nil {
			return none, err
		}
	}
	if _, err := s.Sync(ctx, o.Chunk, at); err != nil {
		return none, err
	}
	return s.Stat(ctx, o.Chunk)
}

func total(pieces []meta.CopyPiece) (n uint64) {
	for _, p := range pieces {
		n += min(p.Len, gatherWindow)
	}
	return n
}

// lend makes a capability for reading a volume's chunks known, until giveBack is called.
func (p *pulls) lend(v meta.VolumeID, cap []byte) (giveBack func()) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.lent == nil {
		p.lent = map[meta.VolumeID]*gatherCap{}
	}
	c := p.lent[v]
	if c == nil {
		c = &gatherCap{}
		p.lent[v] = c
	}
	c.cap = cap // the latest lasts longest
	c.users++
	return func() {
		p.mu.Lock()
		defer p.mu.Unlock()
		if c.users--; c.users == 0 {
			delete(p.lent, v)
		}
	}
}

// gathering has the sources of one order.
type gathering struct {
	s     *Server
	o     *meta.Order
	peers Peers           // nil: nothing is read elsewhere
	ctx   context.Context // of the order
	wg    sync.WaitGroup  // of the goroutines that examine replicas
	pace  pacer           // for the order's rate

	mu   sync.Mutex
	from []*replicas // by index in the order's Chunks; nil: not yet asked for
}

// fill reads the wanted bytes of the window, sorted by place: adjacent bytes in one read,
// several reads in parallel.
func (g *gathering) fill(ctx context.Context, buf []byte, wants []want) error {
	slices.SortFunc(wants, func(a, b want) int { return cmp.Or(cmp.Compare(a.src, b.src), cmp.Compare(a.at, b.at)) })
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	var wg sync.WaitGroup
	slots := make(chan struct{}, gatherReads)
	for len(wants) > 0 {
		lo, hi, k, n := wants[0].at, wants[0].at+wants[0].n, 1, wants[0].n
		for k < len(wants) && wants[k].src == wants[0].src && wants[k].at <= hi+gatherGap && max(hi, wants[k].at+wants[k].n)-lo <= gatherRead {
			hi = max(hi, wants[k].at+wants[k].n)
			n += wants[k].n
			k++
		}
		// Bytes read in passing count, too, and so do bytes wanted twice: the larger of
		// reading and appending.
		n = max(n, hi-lo)
		some := wants[:k]
		wants = wants[k:]
		one := func() {
			p := buf[some[0].to : some[0].to+some[0].n]
			if len(some) > 1 {
				p = make([]byte, hi-lo)
			}
			err := g.s.pulls.pace.wait(ctx, n, g.s.cfg.PullRate)
			if err == nil {
				err = g.pace.wait(ctx, n, g.o.Rate)
			}
			if err == nil {
				err = g.read(ctx, some[0].src, p, lo)
			}
			if err != nil {
				cancel(err)
				return
			}
			if len(some) > 1 {
				for _, w := range some {
					copy(buf[w.to:w.to+w.n], p[w.at-lo:])
				}
			}
		}
		slots <- struct{}{}
		wg.Go(func() {
			defer func() { <-slots }()
			if ctx.Err() == nil {
				one()
			}
		})
	}
	wg.Wait()
	return context.Cause(ctx)
}

// read reads from this server's own replica of a source, else from any other replica sealed as
// in the order. The client tries the next replica when a replica fails or is slow, and
// remembers the failure.
func (g *gathering) read(ctx context.Context, src uint32, p []byte, off uint64) error {
	c, r := &g.o.Chunks[src], g.replicas(src)
	err := g.own(ctx, c, r, p, off)
	if err == nil || ctx.Err() != nil {
		return err
	}
	errs := []error{fmt.Errorf("this server: %w", err)}
	for asked := 0; ; {
		var good []meta.ServerID
		good, err = g.elsewhere(ctx, c, r, asked)
		if len(good) == 0 {
			errs = append(errs, err)
			break
		}
		place := meta.ChunkPlace{ID: c.Chunk, Servers: good[asked:], Sealed: true, Length: c.Length}
		asked = len(good)
		if err = g.peers.ReadAt(ctx, place, p, off); err == nil || ctx.Err() != nil {
			return err
		}
		errs = append(errs, fmt.Errorf("chunk servers %v: %w", place.Servers, err))
	}
	return meta.E("gather pieces", meta.Unavailable, c.Chunk.String(), fmt.Errorf("no server has the %d bytes at %d: %w", len(p), off, errors.Join(errs...)))
}

// replicas are the replicas of one source.
type replicas struct {
	looked sync.Once // this server's own replica was examined
	asked  sync.Once // the other replicas were asked for
	begun  time.Time // time of that request

	mu   sync.Mutex
	mine error           // why this server's own replica is not read; nil: it is read
	good []meta.ServerID // servers of other replicas that are sealed as in the order
	errs []error         // why others are not read
	left int             // have not answered yet
	more chan struct{}   // closed and replaced when a server answered
}

func (g *gathering) replicas(src uint32) *replicas {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.from[src] == nil {
		g.from[src] = &replicas{more: make(chan struct{})}
	}
	return g.from[src]
}

// own reads from this server's replica.
func (g *gathering) own(ctx context.Context, c *meta.CopySource, r *replicas, p []byte, off uint64) error {
	r.looked.Do(func() {
		// A replica that the record does not name may be left over from a move.
		if !slices.Contains(c.Servers, g.s.cfg.ID) {
			r.mine = errors.New("it has none")
			return
		}
		i, err := g.s.Stat(g.ctx, c.Chunk)
		if err == nil {
			err = sealedAs(i, c.Chunk, c.Length, cmp.Or(c.CRC, i.CRC))
		}
		r.mine = err
	})
	r.mu.Lock()
	err := r.mine
	r.mu.Unlock()
	if err != nil {
		return err
	}
	if err = g.s.Read(ctx, c.Chunk, p, off); err != nil && ctx.Err() == nil && meta.KindOf(err) != meta.Corrupt {
		r.mu.Lock() // a replica that is corrupt in one piece may be good in others
		r.mine = err
		r.mu.Unlock()
	}
	return err
}

// gatherLook is how long the other servers may take to answer after the first answer: with
// several servers, a read continues with another one when one is silent.
const gatherLook = 300 * time.Millisecond

// elsewhere lists the readable servers, if more than than. It waits for the next answer, and a
// moment for all answers. The error joins the refusals: all other servers refused.
func (g *gathering) elsewhere(ctx context.Context, c *meta.CopySource, r *replicas, than int) ([]meta.ServerID, error) {
	r.asked.Do(func() {
		r.begun = time.Now()
		for _, id := range c.Servers {
			if id == g.s.cfg.ID || g.peers == nil {
				continue
			}
			r.mu.Lock()
			r.left++
			r.mu.Unlock()
			g.wg.Go(func() {
				i, err := g.peers.Stat(g.ctx, id, c.Chunk)
				if err == nil {
					err = sealedAs(i, c.Chunk, c.Length, cmp.Or(c.CRC, i.CRC))
				}
				r.mu.Lock()
				defer r.mu.Unlock()
				if r.left--; err == nil {
					r.good = append(r.good, id)
				} else {
					r.errs = append(r.errs, fmt.Errorf("chunk server %d: %w", id, err))
				}
				close(r.more)
				r.more = make(chan struct{})
			})
		}
	})
	for {
		r.mu.Lock()
		good, left, more, err := slices.Clone(r.good), r.left, r.more, errors.Join(r.errs...)
		r.mu.Unlock()
		var late <-chan time.Time
		switch some := len(good) > than; {
		case some && (left == 0 || time.Since(r.begun) >= gatherLook):
			return good, nil
		case left == 0:
			return nil, err
		case some:
			late = time.After(gatherLook - time.Since(r.begun))
		}
		select {
		case <-more:
		case <-late:
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		}
	}
}
