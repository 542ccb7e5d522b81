package server

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"

	"penstock.io/penstock/chunkserver"
	"penstock.io/penstock/meta"
)

const (
	// gatherWindow is how many bytes are gathered before they are appended: pieces
	// of a file are scattered over their chunks, and within a window each block of
	// those, which is read whole to be verified, is read once.
	gatherWindow = 16 << 20
	// gatherGap is how many bytes between two pieces are read in passing: a block.
	gatherGap = chunkserver.ChecksumBlock
	// gatherRead bounds one reading, gatherReads how many are under way.
	gatherRead  = 4 << 20
	gatherReads = 4
)

// gatherCap is the right to read a volume's chunks elsewhere, while orders to
// gather last.
type gatherCap struct {
	cap   []byte
	users int
}

// want is a part of a piece: n bytes of a chunk that go to off in the window.
type want struct {
	src    uint32 // index in the order's Chunks
	at, to uint64
	n      uint64
}

// gather carries out OrderGather. Every byte is verified where it is read, and
// only replicas that are sealed as the order says are read: rule 5.
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
	g := &gathering{s: s, o: o, from: make([][]*source, len(o.Chunks))}
	if s.cfg.Peers != nil {
		g.peers = s.sources(*o)
		defer s.pulls.lend(o.Chunk.Volume, o.Cap)()
	}
	at := o.Length
	var own pacer
	var wants []want
	var n uint64 // in the window
	buf := make([]byte, 0, min(gatherWindow, total(o.Pieces)))
	flush := func() error {
		buf = buf[:n]
		if err := g.fill(ctx, buf, wants); err != nil {
			return err
		}
		for p := range slices.Chunk(buf, 1<<20) {
			if err := s.pulls.pace.wait(ctx, uint64(len(p)), s.cfg.PullRate); err != nil {
				return err
			}
			if err := own.wait(ctx, uint64(len(p)), o.Rate); err != nil {
				return err
			}
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
			k := min(p.Len, gatherWindow-n)
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

// lend makes a capability known for reading a volume's chunks, until it is given
// back.
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

// gathering is one order's sources.
type gathering struct {
	s     *Server
	o     *meta.Order
	peers Peers // nil: nothing is read elsewhere

	mu   sync.Mutex
	from [][]*source // by index in the order's Chunks; nil: not yet asked for
}

// fill reads what the window wants, in order of where it lies: what is near each
// other in one go, several at once.
func (g *gathering) fill(ctx context.Context, buf []byte, wants []want) error {
	slices.SortFunc(wants, func(a, b want) int { return cmp.Or(cmp.Compare(a.src, b.src), cmp.Compare(a.at, b.at)) })
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	var wg sync.WaitGroup
	slots := make(chan struct{}, gatherReads)
	for len(wants) > 0 {
		lo, hi, k := wants[0].at, wants[0].at+wants[0].n, 1
		for k < len(wants) && wants[k].src == wants[0].src && wants[k].at <= hi+gatherGap && max(hi, wants[k].at+wants[k].n)-lo <= gatherRead {
			hi = max(hi, wants[k].at+wants[k].n)
			k++
		}
		some := wants[:k]
		wants = wants[k:]
		one := func() {
			p := buf[some[0].to : some[0].to+some[0].n]
			if len(some) > 1 {
				p = make([]byte, hi-lo)
			}
			if err := g.read(ctx, some[0].src, p, lo); err != nil {
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

// read reads of a source from the first replica that serves it, this server's
// own before others.
func (g *gathering) read(ctx context.Context, src uint32, p []byte, off uint64) error {
	c := &g.o.Chunks[src]
	var errs []error
	for _, r := range g.sources(src) {
		err := g.look(ctx, c, r)
		if err == nil {
			err = r.read(ctx, p, off)
		}
		if err == nil || ctx.Err() != nil {
			return err
		}
		errs = append(errs, fmt.Errorf("%s: %w", r.name, err))
	}
	return meta.E("gather pieces", meta.Unavailable, c.Chunk.String(), fmt.Errorf("nobody serves %d bytes at %d: %w", len(p), off, errors.Join(errs...)))
}

// source is a replica that may be read when it was looked at.
type source struct {
	reader
	mu   sync.Mutex
	good bool
}

// look makes sure that a replica is what the order says, once.
func (g *gathering) look(ctx context.Context, c *meta.CopySource, r *source) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.good {
		return nil
	}
	i, err := r.stat(ctx)
	if err == nil && (i.State != meta.ChunkSealed || i.Length != c.Length || c.CRC != 0 && i.CRC != c.CRC) {
		err = fmt.Errorf("not sealed under the record: state %d, %d bytes, checksum %08x; ought to be %d bytes, %08x", i.State, i.Length, i.CRC, c.Length, c.CRC)
	}
	r.good = err == nil
	return err
}

// sources lists the replicas that a source may have.
func (g *gathering) sources(src uint32) []*source {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.from[src] != nil {
		return g.from[src]
	}
	c := g.o.Chunks[src]
	all := []*source{}
	// What lies here though the record does not say so may be the rest of a move.
	if slices.Contains(c.Servers, g.s.cfg.ID) {
		all = append(all, &source{reader: reader{
			name: "this server",
			stat: func(ctx context.Context) (chunkserver.Info, error) { return g.s.Stat(ctx, c.Chunk) },
			read: func(ctx context.Context, p []byte, off uint64) error { return g.s.Read(ctx, c.Chunk, p, off) },
		}})
	}
	for _, id := range c.Servers {
		if id == g.s.cfg.ID || g.peers == nil {
			continue
		}
		place := meta.ChunkPlace{ID: c.Chunk, Servers: []meta.ServerID{id}, Sealed: true, Length: c.Length}
		all = append(all, &source{reader: reader{
			name: fmt.Sprintf("chunk server %d", id),
			stat: func(ctx context.Context) (chunkserver.Info, error) { return g.peers.Stat(ctx, id, c.Chunk) },
			read: func(ctx context.Context, p []byte, off uint64) error { return g.peers.ReadAt(ctx, place, p, off) },
		}})
	}
	g.from[src] = all
	return all
}
