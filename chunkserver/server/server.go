// Package server is the network side of a chunk server: it answers the frames of
// chunkserver/wire over stores, checks the capability of every operation, passes descriptors
// to readers on the same machine, and carries out the orders of volume owners. A Server is
// itself a chunkserver.Service.
package server

import (
	"context"
	"crypto/cipher"
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
	"penstock.io/penstock/meta/peer"
)

// Config describes the server.
type Config struct {
	ID       meta.ServerID
	Addr     string // the address for clients: "unix:/path" or "host:port"
	Local    string // beside a "host:port": "unix:/path", for clients on the machine; may be empty
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
	// Peers makes the client that reads chunks of other servers, from functions that return
	// the servers' addresses and the right to read (nil: nothing is pulled).
	Peers func(where func(meta.ServerID) (meta.ServerInfo, bool), cap func(meta.ChunkID) []byte) Peers
	// PullRate bounds the bytes a second of all pulls together; 0 means 128 MiB.
	PullRate uint64
	// ScrubPeriod is the time in which everything is read once; 0 means two weeks; below zero:
	// only on request.
	ScrubPeriod time.Duration

	// Clock is this machine's clock; nil: time.Now.
	Clock func() time.Time

	UnsafeNoCap    bool // positive control: check no capability
	UnsafeOwnClock bool // positive control: judge capabilities by this machine's clock
}

// Peers reads from other chunk servers; chunkserver/client.Client is one.
type Peers interface {
	Stat(ctx context.Context, server meta.ServerID, id meta.ChunkID) (chunkserver.Info, error)
	ReadAt(ctx context.Context, place meta.ChunkPlace, p []byte, off uint64) error
	Close() error
}

// Server serves several stores. Safe for concurrent use.
type Server struct {
	cfg    Config
	disks  *Disks
	slog   *slog.Logger
	news   news
	pulls  pulls
	terms  terms
	clocks clocks

	mu    sync.Mutex
	conns map[*conn]struct{} // greeted
	// evicted are the identities, "role/name", of evicted peers.
	evicted peer.Worthless
	// accepted counts the connections with known peers; gate counts the others.
	accepted int
	shares   map[string]*share // of connected identities
	lns      map[net.Listener]struct{}
	where    map[meta.ChunkID]*disk // with several disks: where chunks were found
	ended    bool
	wg       sync.WaitGroup
	ctx      context.Context
	stop     context.CancelFunc

	capMu sync.RWMutex
	keys  []meta.CapKey
	seen  map[string]capability.Claims // verified tokens

	tickets cipher.AEAD // encrypts tickets

	gate     peer.Gate
	refusals peer.Refusals

	refused, frames     atomic.Uint64
	descriptors, shared atomic.Uint64
	threads             atomic.Int32  // connections with a thread of their own
	rawWait             time.Duration // rawWait
	answering           atomic.Int64  // bytes of answers in memory
	held                atomic.Uint64
}

var _ chunkserver.Service = (*Server)(nil)

// New makes a server of open stores, which the server then owns.
func New(cfg Config, stores ...*store.Store) *Server {
	return NewWithDisks(cfg, wireDisks(cfg.Class, stores))
}

// NewWithDisks makes a server of disks, which the server then owns.
func NewWithDisks(cfg Config, disks *Disks) *Server {
	if cfg.Logger == nil {
		cfg.Logger = slog.Default()
	}
	if cfg.MaxConns == 0 {
		cfg.MaxConns = 4096
	}
	s := &Server{
		cfg: cfg, disks: disks, slog: cfg.Logger, keys: cfg.Keys,
		conns: map[*conn]struct{}{}, shares: map[string]*share{}, lns: map[net.Listener]struct{}{},
		where: map[meta.ChunkID]*disk{}, seen: map[string]capability.Claims{}, tickets: newTicketSeal(), rawWait: rawWait,
	}
	s.clocks.own, s.clocks.alone = cfg.Clock, cfg.UnsafeOwnClock
	if s.cfg.PullRate == 0 {
		s.cfg.PullRate = 128 << 20
	}
	if s.cfg.ScrubPeriod == 0 {
		s.cfg.ScrubPeriod = 14 * 24 * time.Hour
	}
	s.ctx, s.stop = context.WithCancel(context.Background())
	s.terms.open(disks.cfg.Dir, cfg.Logger)
	s.wg.Go(func() { s.terms.keep(s.ctx) })
	s.wg.Go(s.beat)
	s.news.begin()
	disks.watch(s.badReplica)
	s.wg.Go(s.watchDisks)
	return s
}

// Serve answers the connections of ln until ctx or the server ends, then closes ln. It may be
// called for several listeners.
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
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.ended {
		nc.Close()
		return
	}
	s.gate.Enter(nc)
	s.wg.Go(func() {
		defer s.gate.Leave(nc)
		if c := s.greet(nc); c != nil {
			c.from = nc
			c.serve()
		}
	})
}

// known counts a connection with a known peer. Errors: ResourceExceeded.
func (s *Server) known(c *conn) error {
	s.gate.Leave(c.from)
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.accepted >= s.cfg.MaxConns {
		s.refused.Add(1)
		return meta.E("chunk connection", meta.ResourceExceeded, c.who.String(), fmt.Errorf("there are %d connections", s.accepted))
	}
	s.accepted++
	c.counted = true
	return nil
}

// greet identifies the peer; nil if the peer may not connect.
func (s *Server) greet(nc net.Conn) *conn {
	nc, who, err := peer.Greet(s.ctx, nc)
	if err != nil {
		s.refused.Add(1)
		s.refusals.Warn(s.slog, "chunk connection refused", "err", err)
		return nil
	}
	c, err := newConn(s, nc, who)
	if err != nil {
		s.refusals.Warn(s.slog, "chunk connection refused", "err", err)
		nc.Close()
		return nil
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.ended {
		nc.Close()
		return nil
	}
	if s.evicted.Has(who) {
		s.refused.Add(1)
		s.refusals.Warn(s.slog, "chunk connection refused: its peer was evicted", "peer", who.String())
		nc.Close()
		return nil
	}
	s.conns[c] = struct{}{}
	return c
}

// Close ends all connections, waits for running requests, and closes the stores with a
// checkpoint, so that the next start has nothing to recover.
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
	s.stop() // greetings, too
	s.wg.Wait()
	return errors.Join(s.pulls.close(), s.disks.Close())
}

// Info tells where the server is and stands.
func (s *Server) Info() meta.ServerInfo {
	i := meta.ServerInfo{ID: s.cfg.ID, Addr: s.cfg.Addr, Local: s.cfg.Local, Topology: s.cfg.Topology, Class: s.cfg.Class, Host: s.cfg.Host}
	for _, d := range s.disks.list() {
		di := d.info()
		i.Disks = append(i.Disks, di)
		if di.State == meta.DiskOK || di.State == meta.DiskFull {
			i.Total += di.Total
			i.Free += di.Free
		}
	}
	return i
}

// DiskStats are counts of one disk since the opening of its store.
type DiskStats struct {
	meta.DiskInfo
	store.Stats
	Scrub ScrubStats
}

// Stats are counts since New.
type Stats struct {
	Conns       int    // open now
	Refused     uint64 // connections and capabilities
	Frames      uint64
	Descriptors uint64 // of chunks, passed to readers on this machine
	Shared      uint64 // appends with their bytes in memory shared with the writer
	Answering   uint64 // bytes of answers in memory now
	Held        uint64 // reads that waited because their client had too many pending answers
	Pulled      uint64 // chunks copied from other servers
	PulledBytes uint64
	PullErrors  uint64 // and pieces
	// GatheredBytes of pieces were copied into chunks here, for compaction.
	GatheredBytes uint64
	Disks         []DiskStats
}

// Stats tells counts.
func (s *Server) Stats() Stats {
	s.mu.Lock()
	st := Stats{Conns: len(s.conns), Refused: s.refused.Load(), Frames: s.frames.Load(), Descriptors: s.descriptors.Load(), Shared: s.shared.Load()}
	s.mu.Unlock()
	st.Pulled, st.PulledBytes, st.PullErrors = s.pulls.done.Load(), s.pulls.bytes.Load(), s.pulls.failed.Load()
	st.Answering, st.Held = uint64(s.answering.Load()), s.held.Load()
	st.GatheredBytes = s.pulls.gathered.Load()
	for _, d := range s.disks.list() {
		ds := DiskStats{DiskInfo: d.info()}
		if open := d.serves(); open != nil {
			ds.Stats = open.Stats()
		}
		d.mu.Lock()
		ds.Scrub = d.scrub.stats
		d.mu.Unlock()
		st.Disks = append(st.Disks, ds)
	}
	return st
}

// SetKeys replaces the capability keys.
func (s *Server) SetKeys(keys []meta.CapKey) {
	s.capMu.Lock()
	s.keys = keys
	clear(s.seen)
	s.capMu.Unlock()
}

// evict ends the connections of peers evicted from the cluster, and refuses new connections.
// The list replaces the previous list.
func (s *Server) evict(who []string) {
	evicted, malformed := peer.ParseWorthless(who)
	for _, entry := range malformed {
		s.slog.Error("an entry of the list of evicted peers is malformed, so every certificate of the peer is refused: see that all servers run the same release", "entry", entry)
	}
	s.mu.Lock()
	s.evicted = evicted
	ended := map[*conn]string{}
	for c := range s.conns {
		if s.evicted.Has(c.who) {
			ended[c] = c.who.String()
		}
	}
	s.mu.Unlock()
	for c, who := range ended {
		s.slog.Warn("chunk connection ended: the peer was evicted", "peer", who)
		c.NetConn().Close() // the connection's reader ends the rest
	}
}
