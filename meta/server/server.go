// Package server owns the service of volumes: sessions and their leases, early
// replies and group commit, chunks and their grants, hand-over and recovery.
// The rules of POSIX are in meta/namespace, the log in meta/journal; nothing
// here knows how either works.
package server

import (
	"cmp"
	"context"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/time/rate"

	"penstock.io/penstock/meta"
	peering "penstock.io/penstock/meta/peer"
	"penstock.io/penstock/meta/placement"
	"penstock.io/penstock/meta/wire"
)

// Config of a metadata server. Zero durations and sizes take their defaults.
type Config struct {
	Name    string
	Cluster Cluster
	// Identity is what this server's own capabilities are bound to: "meta/name",
	// or empty if it has no certificate.
	Identity string
	Blob     meta.Blob
	Logger   *slog.Logger
	// ScratchDir is for checkpoints being cut: on the same file system as the
	// stores, so that table files can be linked.
	ScratchDir string
	// Chunks reads bytes for the digests of snapshots, DigestDir remembers which are
	// known. Without the one or the other no digests are computed.
	Chunks    ChunkReader
	DigestDir string
	// DigestRate is how many bytes a second are read for all digests together,
	// AwaitedDigestRate how many beside that for those that somebody waits for;
	// each at least MinDigestRate. Defaults DefaultDigestRate and
	// DefaultAwaitedDigestRate.
	DigestRate, AwaitedDigestRate uint64
	digestTurn                    time.Duration // tests: how long a turn is; 0: digestTurn
	// ChunkWriter writes the indexes of snapshots; nil: none are made.
	ChunkWriter ChunkWriter
	// Addr is the address that others are told.
	Addr string
	// Creds are shown to other meta servers.
	Creds *peering.Credentials
	// SessionTTL is the lease of a client's session. Default 6 s.
	SessionTTL time.Duration
	// Grace bounds how long a client's lease may outlive the server's own lease at
	// etcd: what a successor waits for after a crash. Default half of SessionTTL.
	Grace time.Duration
	// HomeAfter is how long the list of meta servers must have stood before a
	// volume is asked to come home. Default 1 s; negative: volumes stay where they
	// are, and one that nobody owns is opened only when somebody asks for it.
	HomeAfter time.Duration
	// IdleClose is how long a volume that nobody uses stays open. Default 1 min.
	IdleClose time.Duration
	// CommitDelay is how long an entry that nobody waits for gathers
	// operations. Default 10 ms.
	CommitDelay time.Duration
	// CheckpointBytes of journal start a checkpoint. Default 32 MiB.
	CheckpointBytes int
	// CheckpointEvery is how old a checkpoint gets while its volume is being
	// changed: what is newer is lost if etcd is lost whole. Default
	// DefaultCheckpointEvery.
	CheckpointEvery time.Duration
	// KeepForCheckpoint keeps chunks that nothing refers to any more until a
	// checkpoint says so: then a cluster whose etcd is lost whole comes back with
	// every byte of its checkpoints.
	KeepForCheckpoint bool
	// BlobGrace is how long a checkpoint's files may have too few live replicas
	// before they are stored again. Default DefaultBlobGrace.
	BlobGrace time.Duration
	// CacheBytes bounds the cache of hot records of one volume. Default 128 MiB.
	CacheBytes int
	// CompactInterval is the least time between two looks for dead space in a
	// volume. Default 2 s.
	CompactInterval time.Duration
	// CompactRate is how many bytes a second are copied to each replica of a chunk
	// that compaction fills, one chunk at a time for all volumes of this process.
	// Default 64 MiB.
	CompactRate uint64
	// JoinLeast fragments of a file that follow each other, each smaller than
	// JoinSmall bytes, are copied into one chunk (placement.JoinRule). Defaults
	// 16 and 256 KiB; negative JoinLeast: never.
	JoinLeast int
	JoinSmall uint64
	// JoinInterval is the least time between two looks for fragments in a volume
	// that is in use and changes. Default 5 min.
	JoinInterval time.Duration
	joinNow      func() bool // tests: look for fragments whenever it says so, and never else; nil: as above
	lostPage     int         // tests: the most lost chunks in one answer; 0: lostPage
	// tests: treeLook, treeGrace and orderPatience of deletions; 0: these.
	treeLook, treeGrace, deletePatience, endingFor time.Duration
	groupHold, groupFrozen                         time.Duration // tests: in place of these; 0: these
	// Followers is how many servers besides the owner follow a volume's journal.
	// Default DefaultFollowers; negative: none.
	Followers int
	// Trust lets others join; nil where there are no certificates.
	Trust *Trust
	// MaxConns bounds the connections. Default 32,768.
	MaxConns int
	// RepairDelay is how long a chunk server may be out of reach before what it
	// has is copied elsewhere. Default 30 s.
	RepairDelay time.Duration
	// RepairGrace is how long a replica that the journal does not name any more
	// is kept. Default 1 min.
	RepairGrace time.Duration
	// RepairInterval is the time between two looks at all chunks of a volume;
	// news hurry it. Default 5 s. ListInterval is the most time between two
	// complete lists of a server's replicas. Default 10 min.
	RepairInterval, ListInterval time.Duration
	// RepairParallel copies are made at a time, RepairRate bytes a second in all
	// and RepairServerRate to one server, for all volumes of this process.
	// Default 8, 256 MiB, 128 MiB.
	RepairParallel   int
	RepairRate       uint64
	RepairServerRate uint64
	// Balance is by how much the fill of two servers, a part of 1, may differ
	// before chunks are moved; negative: they never are. Default 0.1.
	Balance float64
	// LeakGrace is how long a chunk of volume 0 that no checkpoint names is
	// kept, at least. Default and least: longer than a checkpoint may take.
	LeakGrace time.Duration
	// Courtesy is for how long a session is kept whose client is not heard of, unless
	// somebody needs what it holds. Default DefaultCourtesy.
	Courtesy time.Duration
	// Dead reports whether the process of a session surely runs no more: then
	// its lease need not run out first. Nil: never.
	Dead func(host string, pid uint32, start uint64) bool
	// Room tells how much of the disks that hold journal and state is free, and
	// how large they are, in bytes; nil where that is somebody else's care.
	Room func() (free, total uint64, err error)
	// RoomPath is where that is, for people.
	RoomPath string
	// ReadChunk reads of a sealed chunk; only a survey needs it.
	ReadChunk func(ctx context.Context, at meta.ChunkPlace, p []byte, off uint64) error
	// KeyLook is how often it is looked whether the capability keys are to be
	// rotated. Default one minute.
	KeyLook time.Duration
	// Unsafe switches mechanisms off, for the runs that prove their tests.
	Unsafe Unsafe
}

// Unsafe switches safety mechanisms off (positive controls).
type Unsafe struct {
	NoRecall bool // leases are granted over others
	NoWait   bool // what is not durable is seen by others
	// NoPutIn: a session that is asked to give a file up puts in what it still has of the
	// file as any other writer would.
	NoPutIn bool
	// NoLease: an owner answers although its lease ran out, and its successor
	// waits for nobody's.
	NoLease bool
	// NoRevoke: a session keeps what it was given, and outlives its identity.
	NoRevoke bool
	// NoSquash: a client whose root is squashed makes what root may make.
	NoSquash bool
	// NoPace: nobody is held up, however much is asked.
	NoPace bool
	// NoFence: the journal takes what owners write that were deposed.
	NoFence bool
	// NoPromise: what sessions reserve of a quota is not kept from others.
	NoPromise bool
	// NoFreeze: changes are answered while a group's snapshots are taken.
	NoFreeze bool
	// NoCheckpointAge: the age of a checkpoint counts from when its volume was opened.
	NoCheckpointAge bool
	// NoEnd: an open chunk goes on whatever became of its replicas.
	NoEnd bool
	// NoLeast: a chunk begins with one replica where there is no room for more, whatever
	// its policy says.
	NoLeast bool
	// NoCourtesy: a session ends with its lease, though nobody needs what it holds.
	NoCourtesy bool
	// NoMeet: open chunks that don't meet a changed policy are gone on with.
	NoMeet bool
	// NoReplayCheck: a client is believed what it calls a replay, and each inode number.
	NoReplayCheck bool
	// NoTellPolicy: sessions in a volume are not told of a policy that was set.
	NoTellPolicy bool
}

// Server serves the volumes of a cluster.
type Server struct {
	cfg      Config
	log      *slog.Logger
	epoch    time.Time
	stats    counters
	roomless roomless
	tight    atomic.Pointer[shortage] // nil: there is room

	suspected suspicion

	// Lock order: an owner's mu before mu; never the other way.
	mu        sync.Mutex
	sessions  map[meta.SessionID]*session
	latest    map[string]*session // of each place the session that began last
	volumes   map[meta.VolumeID]*opening
	links     map[meta.ServerID]*link
	keys      []meta.CapKey
	keysAt    time.Time // when they came
	paces     paces
	evicted   []string // identities; with keys, for chunk servers
	closing   bool
	standbys  *standbys
	homeWake  chan struct{} // capacity 1: to homeLoop
	leavers   leavers
	certs     seenCerts
	cutOff    cutOff
	abandoned abandonedBytes
	unable    unable
	// strangers has a slot for each connection without a certificate.
	strangers chan struct{}
	gate      peering.Gate // connections that are not known yet
	refusals  peering.Refusals
	conns     atomic.Int64
	repairs   *repairs
	digests   digests
	indexes   making
	filling   chan struct{} // a slot for the chunk that compaction fills

	comparisons *comparisons

	api *api // for administrators

	tree     turns // of changing where a volume hangs
	deleting turns
	setting  turns // of changing its policy and its row's words
	purging  purges
	// atRest are volumes of this home that are closed and that their owner before
	// let go in order. With the same metadata servers nobody but this one takes
	// them, so homeLoop does not ask etcd for each again whenever something
	// changes. Guarded by mu.
	atRest map[meta.VolumeID]bool

	// seenMu guards seen and the map made of it; it is the innermost lock.
	seenMu   sync.Mutex
	seen     map[meta.ServerID]*sighting
	placed   *placement.Map // nil: to be made anew
	placedAt time.Time
	mapTurn  uint64 // counts what made maps old

	ctx    context.Context
	cancel context.CancelCauseFunc
	wg     sync.WaitGroup
}

type counters struct {
	calls, entries, journalBytes, checkpoints, refused, expired, sealed, deleted, staleDeleted atomic.Uint64

	// compaction: chunks filled, bytes copied into them, extents moved, failures
	compacted, compactedBytes, compactedExtents, compactFailed atomic.Uint64
}

// New makes a server; Serve lets it speak.
func New(ctx context.Context, cfg Config) (*Server, error) {
	if cfg.SessionTTL == 0 {
		cfg.SessionTTL = 6 * time.Second
	}
	if cfg.Grace == 0 {
		cfg.Grace = cfg.SessionTTL / 2
	}
	if cfg.HomeAfter == 0 {
		cfg.HomeAfter = time.Second
	}
	if cfg.IdleClose == 0 {
		cfg.IdleClose = time.Minute
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
	if cfg.CheckpointEvery == 0 {
		cfg.CheckpointEvery = DefaultCheckpointEvery
	}
	if cfg.BlobGrace == 0 {
		cfg.BlobGrace = DefaultBlobGrace
	}
	if cfg.Followers == 0 {
		cfg.Followers = DefaultFollowers
	}
	cfg.CompactInterval = cmp.Or(cfg.CompactInterval, DefaultCompactInterval)
	cfg.CompactRate = cmp.Or(cfg.CompactRate, DefaultCompactRate)
	cfg.JoinLeast = cmp.Or(cfg.JoinLeast, DefaultJoinLeast)
	cfg.JoinSmall = cmp.Or(cfg.JoinSmall, DefaultJoinSmall)
	cfg.JoinInterval = cmp.Or(cfg.JoinInterval, DefaultJoinInterval)
	if cfg.MaxConns == 0 {
		cfg.MaxConns = 32 << 10
	}
	cfg.Courtesy = cmp.Or(cfg.Courtesy, DefaultCourtesy)
	cfg.RepairDelay = cmp.Or(cfg.RepairDelay, DefaultRepairDelay)
	cfg.RepairGrace = cmp.Or(cfg.RepairGrace, DefaultRepairGrace)
	cfg.RepairInterval = cmp.Or(cfg.RepairInterval, DefaultRepairInterval)
	cfg.KeyLook = cmp.Or(cfg.KeyLook, DefaultKeyLook)
	cfg.ListInterval = cmp.Or(cfg.ListInterval, DefaultListInterval)
	cfg.RepairParallel = cmp.Or(cfg.RepairParallel, DefaultRepairParallel)
	cfg.DigestRate = cmp.Or(cfg.DigestRate, DefaultDigestRate)
	cfg.AwaitedDigestRate = cmp.Or(cfg.AwaitedDigestRate, DefaultAwaitedDigestRate)
	cfg.digestTurn = cmp.Or(cfg.digestTurn, digestTurn)
	cfg.RepairRate = cmp.Or(cfg.RepairRate, DefaultRepairRate)
	cfg.RepairServerRate = cmp.Or(cfg.RepairServerRate, DefaultRepairServerRate)
	cfg.Balance = cmp.Or(cfg.Balance, DefaultBalance)
	cfg.LeakGrace = cmp.Or(cfg.LeakGrace, DefaultLeakGrace)
	if cfg.Logger == nil {
		cfg.Logger = slog.New(slog.DiscardHandler)
	}
	s := &Server{
		cfg: cfg, log: cfg.Logger, epoch: time.Now(),
		sessions:  map[meta.SessionID]*session{},
		latest:    map[string]*session{},
		volumes:   map[meta.VolumeID]*opening{},
		atRest:    map[meta.VolumeID]bool{},
		links:     map[meta.ServerID]*link{},
		suspected: suspicion{looking: make(chan struct{}, 4)},
		homeWake:  make(chan struct{}, 1),
		strangers: make(chan struct{}, maxStrangers),
		seen:      map[meta.ServerID]*sighting{},
		repairs:   newRepairs(),
		digests:   newDigests(cfg.DigestRate, cfg.AwaitedDigestRate),
		indexes:   making{make(chan struct{}, 1), rate.NewLimiter(indexRate, indexPage)},
		filling:   make(chan struct{}, 1),

		comparisons: newComparisons(),
	}
	var err error
	if s.keys, err = cfg.Cluster.CapKeys(ctx); err != nil {
		return nil, err
	}
	s.keysAt = time.Now() // the newest may have been made a moment ago
	s.ctx, s.cancel = context.WithCancelCause(context.Background())
	s.standbys = newStandbys(s)
	s.api = newAPI(s)
	s.wg.Go(s.api.run)
	s.wg.Go(s.expireLoop)
	s.wg.Go(s.guardLoop)
	s.wg.Go(s.repairLoop)
	s.wg.Go(s.leakLoop)
	s.wg.Go(s.keyLoop)
	s.wg.Go(s.standbys.loop)
	if cfg.HomeAfter > 0 {
		s.wg.Go(s.homeLoop)
		s.wg.Go(s.visitLoop)
		s.wg.Go(s.treeLoop)
	}
	if cfg.Room != nil {
		s.wg.Go(s.roomLoop)
		s.wg.Go(s.roomlessLoop)
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
		s.gate.Enter(conn)
		s.wg.Go(func() {
			defer s.gate.Leave(conn)
			stop := context.AfterFunc(s.ctx, func() { conn.Close() })
			defer stop()
			greeted, who, err := peering.Greet(s.ctx, conn)
			if err != nil {
				s.refusals.Warn(s.log, "a connection was refused", "error", err)
				return
			}
			if who.Anyone() || who.Role != "" { // others stay strangers
				s.gate.Leave(conn)
				defer s.conns.Add(-1)
				if s.conns.Add(1) > int64(s.cfg.MaxConns) {
					greeted.Close()
					return
				}
			}
			s.connection(greeted, who)
		})
	}
}

// connection does the handshake and serves whoever it is.
func (s *Server) connection(conn net.Conn, who peering.Identity) {
	defer conn.Close()
	conn.SetDeadline(time.Now().Add(10 * time.Second))
	rd := wire.NewReader(conn)
	if speaksHTTP2(rd) {
		s.api.serve(conn, rd, who)
		return
	}
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
	v, ok := wire.Negotiate(&h)
	if !ok {
		s.greet(conn, meta.E("hello", meta.Version, h.Name, fmt.Errorf("the caller speaks protocol versions %d to %d, this server speaks version %d", h.Min, h.Max, wire.Version)))
		return
	}
	// A server that restores the cluster does not know which it is.
	if id := s.cfg.Cluster.ID(); h.Cluster != "" && h.Cluster != id && id != "" {
		s.greet(conn, meta.E("hello", meta.Version, h.Name, fmt.Errorf("this is cluster %s, not %s", s.cfg.Cluster.ID(), h.Cluster)))
		return
	}
	ans := wire.Hello{
		Min: wire.Version, Max: wire.Version, Role: h.Role, Name: s.cfg.Name, Host: s.cfg.Addr,
		Cluster: s.cfg.Cluster.ID(), TTL: uint64(s.cfg.SessionTTL.Milliseconds()),
	}
	if !who.Anyone() && who.Role == "" {
		if err := s.stranger(conn, rd, v, &ans); err != nil {
			s.greet(conn, err)
		}
		return
	}
	if err := s.mayConnect(who, h.Role); err != nil {
		s.refusals.Warn(s.log, "a connection was refused", "error", err)
		s.greet(conn, err)
		return
	}
	if _, lost := s.cfg.Cluster.(*lostCluster); lost && h.Role != wire.RoleChunkServer && h.Role != wire.RoleEnrol {
		s.greet(conn, beingRestored())
		return
	}
	rd.Trust()
	if !who.Expires.IsZero() {
		// A connection ends with the certificate that began it; who has a new one
		// by then comes back with it.
		defer time.AfterFunc(time.Until(who.Expires), func() { conn.Close() }).Stop()
		defer s.certs.shown(who)()
	}
	switch h.Role {
	case wire.RoleChunkServer:
		conn.SetDeadline(time.Time{})
		conn.Write(wire.Append(nil, v, 0, &ans))
		s.serveLink(conn, rd, v, h.Name, who)
		return
	case wire.RolePeer:
		conn.SetDeadline(time.Time{})
		conn.Write(wire.Append(nil, v, 0, &ans))
		s.servePeer(conn, rd, v, &session{srv: s, who: who, role: h.Role, name: h.Name})
		return
	}
	grant := s.grant()
	if grant <= 0 {
		s.greet(conn, meta.E("hello", meta.Unavailable, s.cfg.Name, errors.New("this server has no lease at etcd")))
		return
	}
	sess, err := s.admit(&h, who)
	if err != nil {
		s.greet(conn, err)
		return
	}
	sess.linger.Store(int64(time.Duration(min(h.TTL, uint64(maxLinger.Milliseconds()))) * time.Millisecond))
	ans.Resumed = h.Resumed
	ans.Session, ans.TTL = sess.id, uint64(grant.Milliseconds())
	snd := sess.attach(conn, v, &ans)
	if snd == nil {
		return
	}
	conn.SetDeadline(time.Time{})
	snd.Enqueue(0, s.serverList())
	snd.Enqueue(0, s.metaList())
	err = sess.read(conn, rd)
	sess.detach(conn, err)
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
	conn.Write(wire.Append(nil, wire.Version, 0, &wire.Hello{
		Min: wire.Version, Max: wire.Version, Err: meta.KindOf(err), Detail: err.Error(), Cluster: s.cfg.Cluster.ID(),
	}))
}

// admit finds the session that a client goes on with, or makes one under its
// number. What the session is worth is each volume's to say, when it is entered.
func (s *Server) admit(h *wire.Hello, who peering.Identity) (*session, error) {
	wait := time.NewTimer(4 * time.Second)
	defer wait.Stop()
	for {
		s.mu.Lock()
		if s.closing {
			s.mu.Unlock()
			return nil, meta.E("hello", meta.Unavailable, s.cfg.Name, errors.New("the server is stopping"))
		}
		old := s.sessions[h.Session]
		if old == nil {
			id := h.Session
			for id == 0 {
				var b [8]byte
				rand.Read(b[:])
				id = meta.SessionID(binary.LittleEndian.Uint64(b[:]))
			}
			sess := &session{pace: s.paces.of(who),
				srv: s, id: id, who: who, role: h.Role, name: h.Name, host: h.Host, pid: h.PID, start: h.Start,
				cancels: map[uint64]context.CancelCauseFunc{}, ordered: queues{}, late: queues{}, gone: make(chan struct{}),
			}
			sess.ctx, sess.cancel = context.WithCancelCause(s.ctx)
			sess.touch()
			s.sessions[id] = sess
			if before := s.latest[placeOf(sess.name)]; before != nil {
				before.followed.Store(int64(time.Since(s.epoch)))
			}
			s.latest[placeOf(sess.name)] = sess
			s.mu.Unlock()
			s.cutOff.back(sess.name)
			return sess, nil
		}
		s.mu.Unlock()
		if !old.ended.Load() {
			if !old.who.Same(who) {
				return nil, meta.E("hello", meta.AccessDenied, who.String(), errors.New("the session is another's"))
			}
			return old, nil
		}
		// It begins anew once it has ended in every volume.
		select {
		case <-old.gone:
		case <-wait.C:
			return nil, meta.E("hello", meta.Unavailable, s.cfg.Name, errors.New("the session is being ended"))
		case <-s.ctx.Done():
			return nil, meta.E("hello", meta.Unavailable, s.cfg.Name, context.Cause(s.ctx))
		}
	}
}

func (s *Server) session(id meta.SessionID) *session {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.sessions[id]
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
		}
		if stood > every/2 { // or the machine is overloaded
			for _, sess := range s.sessions {
				sess.renewed.Add(int64(stood))
			}
		}
		var over, late []*session
		for _, sess := range s.sessions {
			switch idle := sess.idle(); {
			case idle <= s.cfg.SessionTTL:
				sess.heard()
			case idle > sess.keptFor():
				over = append(over, sess)
			default:
				was := sess.away.Load()
				if !sess.lapse() {
					continue
				}
				late = append(late, sess)
				if !was {
					s.log.Info("a session is late: it is kept until somebody needs what it holds", "session", sess.name, "idle", idle.Round(time.Second))
				}
			}
		}
		s.mu.Unlock()
		end := func(all []*session, why string) {
			for _, sess := range all {
				s.stats.expired.Add(1)
				s.endSession(sess, errors.New(why))
			}
		}
		end(over, "its lease ran out")
		end(s.awaitedBy(late), "its lease ran out, and somebody needs what it holds")
		end(s.deadAmong(late), "its process is gone")
		end(s.tooMany(late), "its lease ran out, and too many others' did")
		s.endStubborn(max(stood, 0))
	}
}

// maxLinger bounds for how long a session is kept whose process was not heard of:
// what it locks and has open, and the space of files that it alone has, is bound
// meanwhile.
const maxLinger = 15 * time.Minute

// awaitedBy gives those of some late sessions that others wait for, or were refused
// something by.
func (s *Server) awaitedBy(late []*session) (awaited []*session) {
	if len(late) == 0 {
		return nil
	}
	inTheWay := map[meta.SessionID]bool{}
	for _, o := range s.owners() {
		o.mu.Lock()
		for _, sess := range o.leases.InTheWay() {
			inTheWay[sess.id] = true
		}
		for _, id := range o.locks.Holdups() {
			inTheWay[id] = true
		}
		for id, entered := range o.awaited { // nobody is served before it says what it has
			inTheWay[id] = inTheWay[id] || entered
		}
		o.mu.Unlock()
	}
	for _, sess := range late {
		// It may have come back meanwhile.
		if (inTheWay[sess.id] || sess.wanted.Load()) && sess.idle() > s.cfg.SessionTTL {
			awaited = append(awaited, sess)
		}
	}
	return awaited
}

// recallTTLs is how many lives of a session a client that renews may leave a recall
// unanswered, be it since it can't save what it has buffered: then the owner ends the
// session.
const recallTTLs = 4

// endStubborn ends sessions that are alive but answer no recall: others must
// not wait for them for ever. Those that are away are awaitedBy's, and have as
// much time to answer when they are back.
func (s *Server) endStubborn(stood time.Duration) {
	patience := recallTTLs * s.cfg.SessionTTL
	for _, o := range s.owners() {
		o.mu.Lock()
		o.leases.Extend(stood)
		late := o.leases.Stubborn(time.Now().Add(-patience))
		o.mu.Unlock()
		for _, sess := range late {
			if sess.away.Load() || time.Since(s.epoch)-time.Duration(sess.returned.Load()) < patience {
				continue
			}
			s.stats.expired.Add(1)
			s.endSession(sess, errors.New("it left a recall unanswered"))
		}
	}
}

// endSession voids a session: leases and locks go, what it held in each
// volume that it entered here is released through the journal.
func (s *Server) endSession(sess *session, why error) {
	if sess.ended.Swap(true) {
		return
	}
	s.log.Info("session ended", "session", sess.name, "why", why)
	used := false
	for _, o := range s.owners() {
		used = used || o.has(sess)
		o.endSession(sess.id, sess)
	}
	// A client that needs nothing of this server any more goes without a word.
	// One that was mounted anew since it was last heard of is back.
	if used && sess.role == wire.RoleClient && !errors.Is(why, errLeft) && sess.followed.Load() <= max(sess.renewed.Load(), 0) {
		s.cutOff.add(sess, why)
	}
	s.mu.Lock()
	if s.sessions[sess.id] == sess {
		delete(s.sessions, sess.id)
	}
	if place := placeOf(sess.name); s.latest[place] == sess {
		delete(s.latest, place)
	}
	s.mu.Unlock()
	close(sess.gone)
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

// unregisterWait is how long a server that stops waits for etcd to take it off the list.
const unregisterWait = 5 * time.Second

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
	// Nobody is to be sent here any more. Without an etcd that answers the registration
	// ends by itself: nothing else of this is to wait for it.
	tell, cancel := context.WithTimeoutCause(ctx, unregisterWait, errors.New("etcd does not answer"))
	if err := s.cfg.Cluster.Unregister(tell); err != nil {
		s.log.Warn("the cluster could not be told that this server stops", "error", err)
	}
	cancel()
	var wg sync.WaitGroup
	var mu sync.Mutex
	for _, o := range s.owners() {
		wg.Go(func() {
			if err := o.close(ctx); err != nil {
				mu.Lock()
				errs = append(errs, err)
				mu.Unlock()
			}
		})
	}
	wg.Wait()
	s.cancel(errors.New("the server was stopped"))
	errs = append(errs, s.standbys.close())
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
	// And of those that were being opened.
	for _, o := range append(owners, s.owners()...) {
		o.closeStore()
	}
	s.standbys.close()
}
