// Package server owns the network side of a chunk server: it answers the
// frames of chunkserver/wire over stores, checks the capability of every
// operation, passes descriptors to readers on the same machine, and carries
// out the orders of volume owners. A Server is itself a chunkserver.Service.
package server

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"penstock.io/penstock/chunkserver"
	"penstock.io/penstock/chunkserver/store"
	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/capability"
)

// Config says who the server is.
type Config struct {
	ID       meta.ServerID
	Addr     string // that clients are told: "unix:/path" or "host:port"
	Topology string
	Class    string
	Host     string // boot id of the machine
	Keys     []meta.CapKey
	Logger   *slog.Logger // nil: slog.Default()
	// Congestion is the TCP congestion control of accepted connections; ""
	// leaves the machine's default.
	Congestion string
	// MaxConns bounds the connections; 0 means 4,096.
	MaxConns int

	UnsafeNoCap bool // positive control: check no capability
}

// Server serves several stores. Safe for concurrent use.
type Server struct {
	cfg    Config
	stores []*store.Store
	slog   *slog.Logger

	mu    sync.Mutex
	conns map[*conn]struct{}
	lns   map[net.Listener]struct{}
	where map[meta.ChunkID]*store.Store // with several stores: where chunks were found
	ended bool
	wg    sync.WaitGroup
	ctx   context.Context
	stop  context.CancelFunc

	capMu sync.RWMutex
	keys  []meta.CapKey
	seen  map[string]capability.Claims // tokens that verified

	refused, frames atomic.Uint64
	threads         atomic.Int32 // connections that were given a thread
}

var _ chunkserver.Service = (*Server)(nil)

// New makes a server of open stores, which it owns from then on.
func New(cfg Config, stores ...*store.Store) *Server {
	if cfg.Logger == nil {
		cfg.Logger = slog.Default()
	}
	if cfg.MaxConns == 0 {
		cfg.MaxConns = 4096
	}
	s := &Server{
		cfg: cfg, stores: stores, slog: cfg.Logger, keys: cfg.Keys,
		conns: map[*conn]struct{}{}, lns: map[net.Listener]struct{}{},
		where: map[meta.ChunkID]*store.Store{}, seen: map[string]capability.Claims{},
	}
	s.ctx, s.stop = context.WithCancel(context.Background())
	return s
}

// Serve answers connections of ln until ctx or the server ends, then closes
// ln. It may be called for several listeners.
func (s *Server) Serve(ctx context.Context, ln net.Listener) error {
	s.mu.Lock()
	if s.ended {
		s.mu.Unlock()
		return meta.E("serve chunks", meta.Unavailable, "", errors.New("closed"))
	}
	s.lns[ln] = struct{}{}
	s.mu.Unlock()
	defer context.AfterFunc(ctx, func() { ln.Close() })()
	for {
		nc, err := ln.Accept()
		if err != nil {
			s.mu.Lock()
			delete(s.lns, ln)
			ended := s.ended
			s.mu.Unlock()
			ln.Close()
			if ended || ctx.Err() != nil || errors.Is(err, net.ErrClosed) {
				return nil
			}
			return meta.E("serve chunks", meta.IO, ln.Addr().String(), err)
		}
		s.accept(nc)
	}
}

func (s *Server) accept(nc net.Conn) {
	c, err := newConn(s, nc)
	if err != nil {
		s.slog.Warn("chunk connection refused", "err", err)
		nc.Close()
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.ended || len(s.conns) >= s.cfg.MaxConns {
		s.refused.Add(1)
		nc.Close()
		return
	}
	s.conns[c] = struct{}{}
	s.wg.Go(func() {
		c.serve()
		s.mu.Lock()
		delete(s.conns, c)
		s.mu.Unlock()
	})
}

// Close ends all connections, waits for what is under way, and closes the
// stores with a checkpoint, so that the next start has nothing to recover.
func (s *Server) Close() error {
	s.mu.Lock()
	if s.ended {
		s.mu.Unlock()
		return nil
	}
	s.ended = true
	for ln := range s.lns {
		ln.Close()
	}
	for c := range s.conns {
		c.Close()
	}
	s.mu.Unlock()
	s.stop()
	s.wg.Wait()
	var errs []error
	for _, st := range s.stores {
		errs = append(errs, st.Close())
	}
	return errors.Join(errs...)
}

// Info tells where the server is and stands.
func (s *Server) Info() meta.ServerInfo {
	i := meta.ServerInfo{ID: s.cfg.ID, Addr: s.cfg.Addr, Topology: s.cfg.Topology, Class: s.cfg.Class, Host: s.cfg.Host}
	for _, st := range s.stores {
		if d := st.Stats(); d.Failed == "" {
			i.Total += d.Total
			i.Free += d.Free
		}
	}
	return i
}

// Stats are counts since New.
type Stats struct {
	Conns   int    // open now
	Refused uint64 // connections and capabilities
	Frames  uint64
	Disks   []store.Stats
}

// Stats tells counts.
func (s *Server) Stats() Stats {
	s.mu.Lock()
	st := Stats{Conns: len(s.conns), Refused: s.refused.Load(), Frames: s.frames.Load()}
	s.mu.Unlock()
	for _, d := range s.stores {
		st.Disks = append(st.Disks, d.Stats())
	}
	return st
}

// Stores are the server's disks, for scrubbing.
func (s *Server) Stores() []*store.Store { return s.stores }

// SetKeys replaces the capability keys.
func (s *Server) SetKeys(keys []meta.CapKey) {
	s.capMu.Lock()
	s.keys = keys
	clear(s.seen)
	s.capMu.Unlock()
}

// check verifies a token, from memory if it was seen before, and that it
// allows the operation.
func (s *Server) check(token []byte, r capability.Rights, id meta.ChunkID, fence meta.Fence, end uint64) error {
	if s.cfg.UnsafeNoCap {
		return nil
	}
	now := meta.Time(time.Now().UnixNano())
	s.capMu.RLock()
	c, ok := s.seen[string(token)]
	keys := s.keys
	s.capMu.RUnlock()
	if !ok || now >= c.Expiry {
		var err error
		if c, err = capability.Verify(keys, token, now); err != nil {
			s.refused.Add(1)
			return err
		}
		s.capMu.Lock()
		if len(s.seen) >= 1<<16 {
			clear(s.seen)
		}
		s.seen[string(token)] = c
		s.capMu.Unlock()
	}
	if err := c.Allow(r, id, fence, end); err != nil {
		s.refused.Add(1)
		return err
	}
	return nil
}

// find tells the store that has a chunk; with create, where a new one goes.
func (s *Server) find(ctx context.Context, id meta.ChunkID, create bool) (*store.Store, error) {
	if len(s.stores) == 1 {
		return s.stores[0], nil
	}
	s.mu.Lock()
	st := s.where[id]
	s.mu.Unlock()
	if st != nil {
		return st, nil
	}
	var most uint64
	for _, d := range s.stores {
		_, err := d.Stat(ctx, id)
		if meta.KindOf(err) != meta.NoSuchChunk {
			st = d
			break
		}
		if ds := d.Stats(); create && ds.Failed == "" && (st == nil || ds.Free > most) {
			st, most = d, ds.Free
		}
	}
	if st == nil {
		return nil, meta.E("find chunk", meta.NoSuchChunk, id.String(), nil)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if other := s.where[id]; other != nil {
		return other, nil
	}
	if len(s.where) >= 1<<20 {
		clear(s.where)
	}
	s.where[id] = st
	return st, nil
}

// Append implements chunkserver.Service.
func (s *Server) Append(ctx context.Context, id meta.ChunkID, fence meta.Fence, off uint64, p []byte, crc uint32) error {
	st, err := s.find(ctx, id, off == 0)
	if err != nil {
		return err
	}
	return st.Append(ctx, id, fence, off, p, crc)
}

// Sync implements chunkserver.Service.
func (s *Server) Sync(ctx context.Context, id meta.ChunkID, upTo uint64) (uint64, error) {
	st, err := s.find(ctx, id, false)
	if err != nil {
		return 0, err
	}
	return st.Sync(ctx, id, upTo)
}

// Seal implements chunkserver.Service.
func (s *Server) Seal(ctx context.Context, id meta.ChunkID, fence meta.Fence, final bool, length uint64) (chunkserver.Info, error) {
	st, err := s.find(ctx, id, true)
	if err != nil {
		return chunkserver.Info{}, err
	}
	return st.Seal(ctx, id, fence, final, length)
}

// Read implements chunkserver.Service.
func (s *Server) Read(ctx context.Context, id meta.ChunkID, p []byte, off uint64) error {
	st, err := s.find(ctx, id, false)
	if err != nil {
		return err
	}
	return st.Read(ctx, id, p, off)
}

// Stat implements chunkserver.Service.
func (s *Server) Stat(ctx context.Context, id meta.ChunkID) (chunkserver.Info, error) {
	st, err := s.find(ctx, id, false)
	if err != nil {
		return chunkserver.Info{}, err
	}
	return st.Stat(ctx, id)
}

// Delete implements chunkserver.Service.
func (s *Server) Delete(ctx context.Context, id meta.ChunkID, fence meta.Fence) error {
	st, err := s.find(ctx, id, false)
	if err != nil {
		if meta.KindOf(err) != meta.NoSuchChunk {
			return err
		}
		// Every store remembers the deletion, so that a late append fails.
		for _, d := range s.stores {
			err = errors.Join(err, d.Delete(ctx, id, fence))
		}
		return nil
	}
	err = st.Delete(ctx, id, fence)
	if err == nil {
		s.mu.Lock()
		delete(s.where, id)
		s.mu.Unlock()
	}
	return err
}

// Order carries out what a volume's owner asks.
func (s *Server) Order(ctx context.Context, o meta.Order) meta.OrderResult {
	var i chunkserver.Info
	var err error
	switch o.Kind {
	case meta.OrderSeal:
		i, err = s.Seal(ctx, o.Chunk, o.Fence, o.Final, o.Length)
	case meta.OrderDelete:
		err = s.Delete(ctx, o.Chunk, o.Fence)
	case meta.OrderStat:
		i, err = s.Stat(ctx, o.Chunk)
	case meta.OrderKeys:
		s.SetKeys(o.Keys)
	case meta.OrderCopy:
		i, err = s.copyRanges(ctx, o)
	default:
		err = meta.E("order", meta.NotSupported, "", fmt.Errorf("kind %d", o.Kind))
	}
	r := meta.OrderResult{State: i.State, Length: i.Length, Synced: i.Synced, CRC: i.CRC, Fence: i.Fence, Existing: !i.ID.IsZero()}
	if err != nil {
		r.Err, r.Detail = meta.KindOf(err), err.Error()
	}
	return r
}

// copyRanges carries out OrderCopy: it appends ranges of a chunk that lies here
// to another one, from offset o.Length on, in order, and syncs it. What is
// read is verified. Running it again appends nothing that is there already.
func (s *Server) copyRanges(ctx context.Context, o meta.Order) (chunkserver.Info, error) {
	buf := make([]byte, 0, 1<<20)
	at := o.Length
	flush := func() error {
		if len(buf) == 0 {
			return nil
		}
		err := s.Append(ctx, o.Chunk, o.Fence, at, buf, chunkserver.CRC(buf))
		at += uint64(len(buf))
		buf = buf[:0]
		return err
	}
	for _, r := range o.Ranges {
		for off, end := r.Off, r.Off+r.Len; off < end; {
			if len(buf) == cap(buf) {
				if err := flush(); err != nil {
					return chunkserver.Info{}, err
				}
			}
			n := min(uint64(cap(buf)-len(buf)), end-off)
			p := buf[len(buf) : len(buf)+int(n)]
			if err := s.Read(ctx, o.From, p, off); err != nil {
				return chunkserver.Info{}, err
			}
			buf = buf[:len(buf)+int(n)]
			off += n
		}
	}
	if err := flush(); err != nil {
		return chunkserver.Info{}, err
	}
	if _, err := s.Sync(ctx, o.Chunk, at); err != nil {
		return chunkserver.Info{}, err
	}
	return s.Stat(ctx, o.Chunk)
}
