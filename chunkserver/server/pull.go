package server

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"penstock.io/penstock/chunkserver"
	"penstock.io/penstock/chunkserver/store"
	"penstock.io/penstock/meta"
)

// pulls are the chunks being received, and the means to receive them.
type pulls struct {
	mu     sync.Mutex
	client Peers // made with the first pull
	where  map[meta.ServerID]meta.ServerInfo
	busy   map[meta.ChunkID]*pulling
	pace   pacer
	lent   map[meta.VolumeID]*gatherCap

	done, bytes, failed, gathered atomic.Uint64
}

// pulling is one chunk being received.
type pulling struct {
	cap    []byte // to read it from other servers
	cancel context.CancelFunc
	done   chan struct{}
}

// pacer spaces bytes out.
type pacer struct {
	mu   sync.Mutex
	free time.Time // when the next byte may go
}

// wait waits until n more bytes may go at rate bytes a second (0: at once).
func (p *pacer) wait(ctx context.Context, n, rate uint64) error {
	if rate == 0 {
		return nil
	}
	p.mu.Lock()
	now := time.Now()
	if p.free.Before(now) {
		p.free = now
	}
	d := p.free.Sub(now)
	p.free = p.free.Add(time.Duration(float64(n) / float64(rate) * float64(time.Second)))
	p.mu.Unlock()
	if d < time.Millisecond {
		return nil
	}
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// begin waits until no other pull of the chunk is under way.
func (p *pulls) begin(ctx context.Context, id meta.ChunkID) (context.Context, func(), error) {
	for {
		p.mu.Lock()
		k := p.busy[id]
		if k == nil {
			ctx, cancel := context.WithCancel(ctx)
			k = &pulling{cancel: cancel, done: make(chan struct{})}
			if p.busy == nil {
				p.busy = map[meta.ChunkID]*pulling{}
			}
			p.busy[id] = k
			p.mu.Unlock()
			return ctx, func() {
				cancel()
				p.mu.Lock()
				delete(p.busy, id)
				p.mu.Unlock()
				close(k.done)
			}, nil
		}
		p.mu.Unlock()
		select {
		case <-k.done:
		case <-ctx.Done():
			return nil, nil, meta.E("pull chunk", meta.Canceled, id.String(), context.Cause(ctx))
		}
	}
}

// cancel ends the pull of the chunk, if any.
func (p *pulls) cancel(ctx context.Context, id meta.ChunkID) {
	p.mu.Lock()
	k := p.busy[id]
	p.mu.Unlock()
	if k == nil {
		return
	}
	k.cancel()
	select {
	case <-k.done:
	case <-ctx.Done():
	}
}

func (p *pulls) close() error {
	p.mu.Lock()
	cl := p.client
	p.mu.Unlock()
	if cl == nil {
		return nil
	}
	return cl.Close()
}

// sources notes the addresses of an order's sources, and returns the client for reading.
func (s *Server) sources(o meta.Order) Peers {
	p := &s.pulls
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.client == nil {
		p.where = map[meta.ServerID]meta.ServerInfo{}
		p.client = s.cfg.Peers(func(id meta.ServerID) (meta.ServerInfo, bool) {
			p.mu.Lock()
			defer p.mu.Unlock()
			i, ok := p.where[id]
			return i, ok
		}, func(id meta.ChunkID) []byte {
			p.mu.Lock()
			defer p.mu.Unlock()
			if k := p.busy[id]; k != nil {
				return k.cap
			}
			if c := p.lent[id.Volume]; c != nil {
				return c.cap
			}
			return nil
		})
	}
	for _, i := range o.Sources {
		p.where[i.ID] = i
	}
	if k := p.busy[o.Chunk]; k != nil {
		k.cap = o.Cap
	}
	return p.client
}

// pullPiece is how much is asked of a source at a time, in bytes.
const pullPiece = 4 << 20

// pull carries out OrderPull. It chooses a disk of the wanted class that takes new chunks. A
// chunk on another disk of this server is moved.
func (s *Server) pull(ctx context.Context, o meta.Order) (chunkserver.Info, error) {
	const op = "pull chunk"
	var none chunkserver.Info
	ctx, end, err := s.pulls.begin(ctx, o.Chunk)
	if err != nil {
		return none, err
	}
	defer end()
	i, err := s.pullOne(ctx, o)
	if err != nil {
		s.pulls.failed.Add(1)
		if ctx.Err() != nil {
			err = meta.E(op, meta.Canceled, o.Chunk.String(), err)
		}
	}
	return i, err
}

func (s *Server) pullOne(ctx context.Context, o meta.Order) (chunkserver.Info, error) {
	const op = "pull chunk"
	var none chunkserver.Info
	var old *disk // has the chunk now, and may not keep it
	to, err := s.findDisk(ctx, o.Chunk, false, "")
	switch {
	case err == nil && len(s.disks.list()) == 1:
		if st, why := to.state(); st == meta.DiskFailed || st == meta.DiskRemoved {
			return none, meta.E(op, meta.IO, to.path, errors.New(why))
		}
	case meta.KindOf(err) == meta.NoSuchChunk:
		to = nil
	case err != nil:
		return none, err
	default:
		if state, _ := to.state(); state != meta.DiskOK && state != meta.DiskFull || o.Class != "" && to.class != o.Class {
			old, to = to, nil
		}
	}
	if to == nil {
		if to = emptiest(s.disks.list(), o.Class); to == nil {
			return none, meta.E(op, meta.NoSpace, o.Chunk.String(), fmt.Errorf("no disk of class %q takes new chunks", o.Class))
		}
	}
	st := to.serves()
	if st == nil {
		return none, meta.E(op, meta.IO, to.path, errors.New("its disk failed"))
	}
	i, err := s.receive(ctx, o, st, old)
	if err != nil {
		return none, err
	}
	to.mu.Lock()
	delete(to.unreadable, o.Chunk)
	to.mu.Unlock()
	s.mu.Lock()
	s.where[o.Chunk] = to
	s.mu.Unlock()
	// The chunk must end up on one disk, even if an earlier move was interrupted.
	for _, d := range s.disks.list() {
		if d == to {
			continue
		}
		st := d.serves()
		if st == nil {
			continue
		}
		if _, err := st.Peek(o.Chunk); meta.KindOf(err) == meta.NoSuchChunk {
			continue
		}
		if err := st.Delete(ctx, o.Chunk, o.Fence); err != nil {
			s.slog.Warn("a replica was copied to another disk, and could not be removed from the old disk", "chunk", o.Chunk.String(), "disk", d.id, "error", err)
		}
	}
	return i, nil
}

// receive copies the chunk into a store. If all bytes arrived and their checksum differs from
// the journal's, some source served wrong bytes with matching block checksums: then each
// source is tried alone.
func (s *Server) receive(ctx context.Context, o meta.Order, st *store.Store, old *disk) (chunkserver.Info, error) {
	const op = "pull chunk"
	src := s.readers(o, old)
	var errs []error
	for try := range len(src) + 1 {
		with := src
		if try > 0 {
			with = src[try-1 : try]
			if len(src) == 1 {
				break
			}
		}
		i, err := s.receiveFrom(ctx, o, st, with)
		if err == nil {
			return i, nil
		}
		errs = append(errs, err)
		if ctx.Err() != nil || meta.KindOf(err) != meta.Corrupt {
			break
		}
	}
	if len(src) == 0 {
		return chunkserver.Info{}, meta.E(op, meta.Invalid, o.Chunk.String(), errors.New("no sources"))
	}
	return chunkserver.Info{}, errors.Join(errs...)
}

// reader is one source to read from.
type reader struct {
	name string
	stat func(context.Context) (chunkserver.Info, error)
	read func(context.Context, []byte, uint64) error
}

func (s *Server) readers(o meta.Order, old *disk) (all []reader) {
	if old != nil {
		if st := old.serves(); st != nil {
			all = append(all, reader{
				name: "disk " + old.id,
				stat: func(ctx context.Context) (chunkserver.Info, error) { return st.Stat(ctx, o.Chunk) },
				read: func(ctx context.Context, p []byte, off uint64) error { return st.Read(ctx, o.Chunk, p, off) },
			})
		}
	}
	if s.cfg.Peers == nil {
		return all
	}
	cl := s.sources(o)
	for _, i := range o.Sources {
		if i.ID == s.cfg.ID {
			continue
		}
		place := meta.ChunkPlace{ID: o.Chunk, Servers: []meta.ServerID{i.ID}, Sealed: true, Length: o.Length}
		all = append(all, reader{
			name: fmt.Sprintf("chunk server %d", i.ID),
			stat: func(ctx context.Context) (chunkserver.Info, error) { return cl.Stat(ctx, i.ID, o.Chunk) },
			read: func(ctx context.Context, p []byte, off uint64) error { return cl.ReadAt(ctx, place, p, off) },
		})
	}
	return all
}

// receiveFrom copies the chunk, verified, each piece from the first source that serves it.
func (s *Server) receiveFrom(ctx context.Context, o meta.Order, st *store.Store, src []reader) (chunkserver.Info, error) {
	const op = "pull chunk"
	var none chunkserver.Info
	in, err := st.Receive(ctx, o.Chunk, o.Fence, o.Length, o.CRC)
	if err != nil {
		return none, err
	}
	if in == nil {
		return st.Stat(ctx, o.Chunk) // the store has the chunk already
	}
	defer in.Abort()
	var errs []error
	give := func(r reader, err error) {
		errs = append(errs, fmt.Errorf("%s: %w", r.name, err))
	}
	good := slices.Clone(src)[:0]
	for _, r := range src {
		i, err := r.stat(ctx)
		if err == nil {
			err = sealedAs(i, o.Chunk, o.Length, o.CRC)
		}
		if err != nil {
			give(r, err)
			continue
		}
		good = append(good, r)
	}
	buf := make([]byte, min(pullPiece, o.Length))
	var own pacer
	for at := uint64(0); at < o.Length; {
		p := buf[:min(pullPiece, o.Length-at)]
		if err := s.pulls.pace.wait(ctx, uint64(len(p)), s.cfg.PullRate); err != nil {
			return none, err
		}
		if err := own.wait(ctx, uint64(len(p)), o.Rate); err != nil {
			return none, err
		}
		got := false
		for k := 0; k < len(good) && !got && ctx.Err() == nil; {
			err := good[k].read(ctx, p, at)
			if got = err == nil; got {
				break
			}
			give(good[k], err)
			if meta.KindOf(err) == meta.Corrupt {
				k++ // other pieces of this source may be good
				continue
			}
			good = slices.Delete(good, k, k+1)
		}
		if ctx.Err() != nil {
			return none, context.Cause(ctx)
		}
		if !got {
			return none, meta.E(op, meta.Unavailable, o.Chunk.String(), fmt.Errorf("no server has the %d bytes at %d: %w", len(p), at, errors.Join(errs...)))
		}
		if _, err := in.Write(p); err != nil {
			return none, err
		}
		at += uint64(len(p))
		s.pulls.bytes.Add(uint64(len(p)))
	}
	if len(good) == 0 {
		return none, meta.E(op, meta.Unavailable, o.Chunk.String(), errors.Join(errs...))
	}
	i, err := in.Commit(ctx)
	if err == nil {
		s.pulls.done.Add(1)
	}
	return i, err
}

// sealedAs tells why a replica is no source: rule 5.
func sealedAs(i chunkserver.Info, id meta.ChunkID, length uint64, crc uint32) error {
	if i.State != meta.ChunkSealed || i.Length != length || i.CRC != crc {
		return meta.E("copy chunk", meta.Invalid, id.String(), fmt.Errorf(
			"not sealed under the record: state %d, %d bytes, checksum %08x; ought to be %d bytes, %08x", i.State, i.Length, i.CRC, length, crc))
	}
	return nil
}
