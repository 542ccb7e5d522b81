// Package server owns the service of volumes: sessions and their leases, early
// replies and group commit, chunks and their grants, hand-over and recovery.
// The rules of POSIX are in meta/namespace, the log in meta/journal; nothing
// here knows how either works.
package server

import (
	"context"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/wire"
)

// Config of a metadata server. Zero durations and sizes take their defaults.
type Config struct {
	Name    string
	Cluster Cluster
	Blob    meta.Blob
	Logger  *slog.Logger
	// ScratchDir is for checkpoints being cut: on the same file system as the
	// stores, so that table files can be linked.
	ScratchDir string
	// SessionTTL is the lease of a client's session. Default 8 s.
	SessionTTL time.Duration
	// CommitDelay is how long an entry that nobody waits for gathers
	// operations. Default 10 ms.
	CommitDelay time.Duration
	// CheckpointBytes of journal start a checkpoint. Default 32 MiB.
	CheckpointBytes int
	// CacheBytes bounds the cache of hot records of one volume. Default 128 MiB.
	CacheBytes int
	// CompactInterval is the least time between two looks for dead space in a
	// volume. Default 2 s.
	CompactInterval time.Duration
	// Dead reports whether the process of a session surely runs no more: then
	// its lease need not run out first. Nil: never.
	Dead func(host string, pid uint32, start uint64) bool
	// Room tells how much of the disks that hold journal and state is free, and
	// how large they are, in bytes; nil where that is somebody else's care.
	Room func() (free, total uint64, err error)
	// Unsafe switches mechanisms off, for the runs that prove their tests.
	Unsafe Unsafe
}

// Unsafe switches safety mechanisms off (positive controls).
type Unsafe struct {
	NoRecall bool // leases are granted over others
	NoWait   bool // what is not durable is seen by others
}

// Server serves the volumes of a cluster.
type Server struct {
	cfg   Config
	log   *slog.Logger
	epoch time.Time
	stats counters
	tight atomic.Pointer[shortage] // nil: there is room

	// Lock order: an owner's mu before mu; never the other way.
	mu       sync.Mutex
	sessions map[meta.SessionID]*session
	volumes  map[meta.VolumeID]*opening
	links    map[meta.ServerID]*link
	keys     []meta.CapKey
	closing  bool
	ready    chan struct{} // closed when clients may come
	// restarting: volumes are being taken again; ready is closed afterwards.
	restarting bool
	breaking   sync.Mutex // held by startOver, before mu

	ctx    context.Context
	cancel context.CancelCauseFunc
	wg     sync.WaitGroup
}

// opening is a volume that is open or being opened.
type opening struct {
	done chan struct{}
	o    *owner
	err  error
}

type counters struct {
	calls, entries, journalBytes, checkpoints, expired, sealed, deleted atomic.Uint64
}

// New makes a server; Serve lets it speak.
func New(ctx context.Context, cfg Config) (*Server, error) {
	if cfg.SessionTTL == 0 {
		cfg.SessionTTL = 8 * time.Second
	}
	if cfg.CommitDelay == 0 {
		cfg.CommitDelay = 10 * time.Millisecond
	}
	if cfg.CheckpointBytes == 0 {
		cfg.CheckpointBytes = 32 << 20
	}
	if cfg.CacheBytes == 0 {
		cfg.CacheBytes = 128 << 20
	}
	if cfg.CompactInterval == 0 {
		cfg.CompactInterval = 2 * time.Second
	}
	if cfg.Logger == nil {
		cfg.Logger = slog.New(slog.DiscardHandler)
	}
	s := &Server{
		cfg: cfg, log: cfg.Logger, epoch: time.Now(),
		sessions: map[meta.SessionID]*session{},
		volumes:  map[meta.VolumeID]*opening{},
		links:    map[meta.ServerID]*link{},
		ready:    make(chan struct{}),
	}
	var err error
	if s.keys, err = cfg.Cluster.CapKeys(ctx); err != nil {
		return nil, err
	}
	s.ctx, s.cancel = context.WithCancelCause(context.Background())
	s.wg.Go(s.expireLoop)
	if cfg.Room != nil {
		s.wg.Go(s.roomLoop)
	}
	return s, nil
}

// Serve accepts connections until the server is closed or the listener fails.
func (s *Server) Serve(l net.Listener) error {
	stop := context.AfterFunc(s.ctx, func() { l.Close() })
	defer stop()
	for {
		conn, err := l.Accept()
		if err != nil {
			if s.ctx.Err() != nil {
				return nil
			}
			return meta.E("accept", meta.IO, l.Addr().String(), err)
		}
		s.wg.Go(func() {
			stop := context.AfterFunc(s.ctx, func() { conn.Close() })
			defer stop()
			s.connection(conn)
		})
	}
}

// connection does the handshake and serves whoever it is.
func (s *Server) connection(conn net.Conn) {
	defer conn.Close()
	conn.SetDeadline(time.Now().Add(10 * time.Second))
	rd := wire.NewReader(conn)
	t, _, body, err := rd.Next()
	if err != nil {
		s.greet(conn, err)
		return
	}
	var h wire.Hello
	if t != wire.THello {
		return
	}
	if err := wire.Decode(body, &h); err != nil {
		s.greet(conn, err)
		return
	}
	if h.Min > wire.Version || h.Max < wire.MinVersion {
		s.greet(conn, meta.E("hello", meta.Version, h.Name, fmt.Errorf("you speak protocol %d to %d, this server %d to %d", h.Min, h.Max, wire.MinVersion, wire.Version)))
		return
	}
	if h.Cluster != "" && h.Cluster != s.cfg.Cluster.ID() {
		s.greet(conn, meta.E("hello", meta.Version, h.Name, fmt.Errorf("this is cluster %s, not %s", s.cfg.Cluster.ID(), h.Cluster)))
		return
	}
	rd.Trust()
	ans := wire.Hello{
		Min: wire.MinVersion, Max: wire.Version, Role: h.Role, Name: s.cfg.Name,
		Cluster: s.cfg.Cluster.ID(), TTL: uint64(s.cfg.SessionTTL.Milliseconds()),
	}
	if h.Role == wire.RoleChunkServer {
		conn.SetDeadline(time.Time{})
		conn.Write(wire.Append(nil, 0, &ans))
		s.serveLink(conn, rd)
		return
	}
	s.mu.Lock()
	enrol := s.ready
	s.mu.Unlock()
	if h.Role == wire.RoleEnrol {
		enrol = closedChan
	}
	select {
	case <-enrol:
	case <-time.After(4 * time.Second):
		s.greet(conn, meta.E("hello", meta.Unavailable, s.cfg.Name, errors.New("the server is still opening its volumes")))
		return
	case <-s.ctx.Done():
		return
	}
	sess, known, err := s.admit(&h)
	if err != nil {
		s.greet(conn, err)
		return
	}
	ans.Session, ans.Resumed = sess.id, known
	conn.SetDeadline(time.Time{})
	if _, err := conn.Write(wire.Append(nil, 0, &ans)); err != nil {
		return
	}
	snd := sess.attach(conn)
	snd.Enqueue(0, s.serverList())
	if known {
		sess.resendRecalls()
	}
	err = sess.read(conn, rd)
	sess.detach(conn)
	if err != nil && s.ctx.Err() == nil {
		if k := meta.KindOf(err); k == meta.Protocol || k == meta.Version {
			s.log.Warn("connection dropped", "session", sess.name, "error", err)
			return
		}
		// The process may have died: then nothing is waited for.
		if s.cfg.Dead != nil && s.cfg.Dead(sess.host, sess.pid, sess.start) {
			s.endSession(sess, errors.New("its process is gone"))
		}
	}
}

func (s *Server) greet(conn net.Conn, err error) {
	conn.Write(wire.Append(nil, 0, &wire.Hello{
		Min: wire.MinVersion, Max: wire.Version, Err: meta.KindOf(err), Detail: err.Error(), Cluster: s.cfg.Cluster.ID(),
	}))
}

// admit finds the session that a client wants to go on with, or makes one.
// known: its leases stand. A session that this server does not know, but that
// some volume's journal does, goes on under its number without leases: the
// client claims them.
func (s *Server) admit(h *wire.Hello) (sess *session, known bool, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closing {
		return nil, false, meta.E("hello", meta.Unavailable, s.cfg.Name, errors.New("the server is stopping"))
	}
	if s.restarting && h.Role != wire.RoleEnrol {
		return nil, false, meta.E("hello", meta.Unavailable, s.cfg.Name, errors.New("the server takes its volumes again"))
	}
	if h.Session != 0 {
		if sess = s.sessions[h.Session]; sess != nil {
			// One that was taken up and has not sent its claims yet never got
			// our answer: its leases are not known here.
			return sess, !sess.claims.Load(), nil
		}
	}
	id := h.Session
	if id == 0 || !s.journaledSomewhere(id) {
		var b [8]byte
		rand.Read(b[:])
		if id = meta.SessionID(binary.LittleEndian.Uint64(b[:])); id == 0 {
			id = 1
		}
	}
	sess = &session{
		srv: s, id: id, role: h.Role, name: h.Name, host: h.Host, pid: h.PID, start: h.Start,
		cancels: map[uint64]context.CancelCauseFunc{},
	}
	sess.ctx, sess.cancel = context.WithCancelCause(s.ctx)
	sess.touch()
	sess.claims.Store(id == h.Session)
	s.sessions[id] = sess
	return sess, false, nil
}

func (s *Server) session(id meta.SessionID) *session {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.sessions[id]
}

// opened returns the owner of a volume that is open here, without waiting.
func (s *Server) opened(v meta.VolumeID) *owner {
	s.mu.Lock()
	op := s.volumes[v]
	s.mu.Unlock()
	if op == nil {
		return nil
	}
	select {
	case <-op.done:
		return op.o
	default:
		return nil
	}
}

// owners lists the volumes that are open here.
func (s *Server) owners() (all []*owner) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, op := range s.volumes {
		select {
		case <-op.done:
			if op.o != nil {
				all = append(all, op.o)
			}
		default:
		}
	}
	slices.SortFunc(all, func(a, b *owner) int { return int(a.vol) - int(b.vol) })
	return all
}

// open opens a volume, or waits for who does. Errors: NoSuchVolume, NotOwner,
// Unavailable.
func (s *Server) open(ctx context.Context, v meta.VolumeID) (*owner, error) {
	s.mu.Lock()
	if s.closing {
		s.mu.Unlock()
		return nil, meta.E("open volume", meta.Unavailable, fmt.Sprint(v), errors.New("the server is stopping"))
	}
	op := s.volumes[v]
	if op == nil {
		op = &opening{done: make(chan struct{})}
		s.volumes[v] = op
		s.wg.Go(func() {
			op.o, op.err = s.openOwner(v)
			if op.err != nil {
				s.mu.Lock()
				delete(s.volumes, v)
				s.mu.Unlock()
			}
			close(op.done)
		})
	}
	s.mu.Unlock()
	select {
	case <-op.done:
		return op.o, op.err
	case <-ctx.Done():
		return nil, meta.E("open volume", meta.Interrupted, fmt.Sprint(v), context.Cause(ctx))
	}
}

// expireLoop ends sessions whose lease ran out.
func (s *Server) expireLoop() {
	every := s.cfg.SessionTTL / 16
	t := time.NewTicker(every)
	defer t.Stop()
	last := time.Now()
	for {
		select {
		case <-s.ctx.Done():
			return
		case <-t.C:
		}
		// While this process stood still nobody could renew: that time does not
		// count. To wait longer for a session is always safe.
		stood := time.Since(last) - every
		last = time.Now()
		s.mu.Lock()
		if stood > 2*every {
			s.log.Warn("this process stood still: leases are extended", "for", stood)
			for _, sess := range s.sessions {
				sess.renewed.Add(int64(stood))
			}
		}
		var late []*session
		for _, sess := range s.sessions {
			if sess.idle() > s.cfg.SessionTTL {
				late = append(late, sess)
			}
		}
		s.mu.Unlock()
		for _, sess := range late {
			s.stats.expired.Add(1)
			s.endSession(sess, errors.New("its lease ran out"))
		}
		s.endStubborn(max(stood, 0))
	}
}

// recallTTLs is how many lives of a session a client that renews may leave a
// recall unanswered. It is longer than a client tries to save what it buffered.
const recallTTLs = 4

// endStubborn ends sessions that are alive but answer no recall: others must
// not wait for them for ever.
func (s *Server) endStubborn(stood time.Duration) {
	for _, o := range s.owners() {
		o.mu.Lock()
		o.leases.extend(stood)
		late := o.leases.unanswered(time.Now().Add(-recallTTLs * s.cfg.SessionTTL))
		o.mu.Unlock()
		for _, sess := range late {
			s.stats.expired.Add(1)
			s.endSession(sess, errors.New("it left a recall unanswered"))
		}
	}
}

// endSession voids a session: leases and locks go, what it held in each
// volume is released through the journal.
func (s *Server) endSession(sess *session, why error) {
	sess.mu.Lock()
	if sess.ended {
		sess.mu.Unlock()
		return
	}
	sess.ended = true
	sess.mu.Unlock()
	s.log.Info("session ended", "session", sess.name, "why", why)
	s.mu.Lock()
	delete(s.sessions, sess.id)
	s.mu.Unlock()
	for _, o := range s.owners() {
		o.endSession(sess.id, sess)
	}
	sess.cancel(why)
	if !errors.Is(why, errLeft) {
		// A client that lives connects again, and hears that it lost everything.
		sess.mu.Lock()
		if sess.conn != nil {
			sess.conn.Close()
		}
		sess.mu.Unlock()
	}
}

// Close stops in order: every volume's journal gets what was answered, then
// ownership is released.
func (s *Server) Close(ctx context.Context) error {
	s.mu.Lock()
	if s.closing {
		s.mu.Unlock()
		return nil
	}
	s.closing = true
	s.mu.Unlock()
	var errs []error
	for _, o := range s.owners() {
		if err := o.close(ctx); err != nil {
			errs = append(errs, err)
		}
	}
	s.cancel(errors.New("the server was stopped"))
	s.wg.Wait()
	return errors.Join(errs...)
}

// Abandon stops without releasing anything, as a crash would: for tests.
func (s *Server) Abandon() {
	s.mu.Lock()
	s.closing = true
	s.mu.Unlock()
	owners := s.owners()
	for _, o := range owners {
		o.cancel(errors.New("abandoned"))
	}
	s.cancel(errors.New("abandoned"))
	s.wg.Wait()
	for _, o := range owners {
		o.closeStore()
	}
}
