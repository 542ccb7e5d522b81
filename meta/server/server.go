// Package server owns the service of volumes: sessions and their leases, early replies and
// group commit, chunks and their grants, hand-over and recovery. The POSIX rules are in
// meta/namespace, the log is in meta/journal; this package depends on neither's internals.
package server

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/time/rate"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/cluster"
	peering "penstock.io/penstock/meta/peer"
	"penstock.io/penstock/meta/state"
	"penstock.io/penstock/meta/task"
	"penstock.io/penstock/meta/wire"
)

// Config configures a metadata server. Zero durations and sizes take their defaults.
type Config struct {
	Name    string
	Cluster Cluster
	// Identity is the identity in this server's own capabilities: "meta/name", or empty if the
	// server has no certificate.
	Identity string
	Blob     meta.Blob
	Logger   *slog.Logger
	// ScratchDir holds checkpoints while the server writes them. ScratchDir is on the file
	// system of the stores, so that table files can be linked.
	ScratchDir string
	// Chunks reads bytes for the digests of snapshots; DigestDir records the known digests. If
	// either is unset, the server computes no digests.
	Chunks    ChunkReader
	DigestDir string
	// DigestRate bounds the bytes read per second for all digests together. AwaitedDigestRate
	// is a further bound, only for digests awaited by a caller. Each is at least
	// MinDigestRate. Defaults DefaultDigestRate and DefaultAwaitedDigestRate.
	DigestRate, AwaitedDigestRate uint64
	digestTurn                    time.Duration // tests: how long a turn is; 0: digestTurn
	// ChunkWriter writes the indexes of snapshots; nil: no indexes.
	ChunkWriter ChunkWriter
	// Addr is the server's address as announced to clients and other servers.
	Addr string
	// Creds are shown to other meta servers.
	Creds *peering.Credentials
	// SessionTTL is the lease of a client's session. Default 6 s.
	SessionTTL time.Duration
	// Grace bounds by how much a client's lease may outlive the server's own lease at etcd. A
	// successor waits for Grace after a crash. Default half of SessionTTL.
	Grace time.Duration
	// HomeAfter is how long the list of meta servers must be unchanged before a volume is
	// moved to its home. Default 1 s. Negative: volumes stay with their owners, and a volume
	// without an owner is opened only on request.
	HomeAfter time.Duration
	// IdleClose is how long an unused volume stays open. Default 1 min.
	IdleClose time.Duration
	// CommitDelay is how long a journal entry gathers operations while no caller waits for the
	// entry. Default 10 ms.
	CommitDelay time.Duration
	// CheckpointBytes of journal start a checkpoint. Default 32 MiB.
	CheckpointBytes int
	// CheckpointEvery is the greatest age of a checkpoint while its volume is being changed. A
	// loss of all of etcd loses the newer changes. Default DefaultCheckpointEvery.
	CheckpointEvery time.Duration
	// KeepForCheckpoint keeps an unreferenced chunk until no needed checkpoint refers to the
	// chunk. A cluster restored after the loss of all of etcd then has every byte of its
	// checkpoints.
	KeepForCheckpoint bool
	// BlobGrace is how long a checkpoint's files may have too few live replicas before the
	// server stores the files again. Default DefaultBlobGrace.
	BlobGrace time.Duration
	// CacheBytes bounds the cache of hot records of each volume. Default 128 MiB.
	CacheBytes int
	// CompactInterval is the least time between two searches for dead space in a volume.
	// Default 2 s.
	CompactInterval time.Duration
	// CompactRate bounds the bytes per second copied to each replica of a chunk filled by
	// compaction. All volumes of this process together fill one chunk at a time. Default 64
	// MiB.
	CompactRate uint64
	// JoinLeast adjacent fragments of a file, each smaller than JoinSmall bytes, are copied
	// into one chunk (placement.JoinRule). Defaults 16 and 256 KiB; negative JoinLeast: never.
	JoinLeast int
	JoinSmall uint64
	// JoinInterval is the least time between two searches for fragments in a volume in use and
	// changing. Default 5 min.
	JoinInterval time.Duration
	joinNow      func() bool // tests: look for fragments exactly when joinNow returns true; nil: as above
	lostPage     int         // tests: the most lost chunks per answer; 0: the constant
	// tests: treeLook, treeGrace, orderPatience of deletions, endingFor; 0: the constants.
	treeLook, treeGrace, deletePatience, endingFor time.Duration
	groupHold, groupFrozen                         time.Duration // tests: groupHold, groupFrozen; 0: the constants
	// Followers is how many servers besides the owner follow a volume's journal.
	// Default DefaultFollowers; negative: none.
	Followers int
	// Gateways is the list of gateways.
	Gateways GatewayTable
	// Trust lets new servers and clients join; nil without certificates.
	Trust *Trust
	// MaxConns bounds the connections. Default 32,768.
	MaxConns int
	// RepairDelay is how long a chunk server may be unreachable before the chunks of that
	// server are copied elsewhere. Default 30 s.
	RepairDelay time.Duration
	// RepairGrace is how long a replica is kept after the journal stopped naming the replica.
	// Default 1 min.
	RepairGrace time.Duration
	// RepairInterval is the time between two inspections of all chunks of a volume; events
	// start an inspection earlier. Default 5 s. ListInterval is the most time between two
	// complete lists of a server's replicas. Default 10 min.
	RepairInterval, ListInterval time.Duration
	// RepairParallel bounds the concurrent copies, RepairRate the bytes per second of all
	// copies and RepairServerRate the bytes per second to each server, for all volumes of this
	// process. Defaults 8, 256 MiB, 128 MiB.
	RepairParallel   int
	RepairRate       uint64
	RepairServerRate uint64
	// Balance is the difference between the fills of two servers, as a part of 1, above which
	// chunks are moved. Negative: chunks are never moved. Default 0.1.
	Balance float64
	// LeakGrace is how long the server keeps, at least, a chunk of volume 0 named by no
	// checkpoint. The default is also the minimum: longer than a checkpoint may take.
	LeakGrace time.Duration
	// Courtesy is how long a session is kept after the last sign of its client, unless another
	// caller needs a lease, a lock or room held by the session. Default DefaultCourtesy.
	Courtesy time.Duration
	// Dead reports whether the process of a session has surely ended; the server then ends the
	// session before its lease runs out. Nil: never.
	Dead func(host string, pid uint32, start uint64) bool
	// Room returns the free and the total bytes of the disks of journal and state; nil if this
	// server does not watch the disks.
	Room func() (free, total uint64, err error)
	// RoomPath is the path of the disks in messages.
	RoomPath string
	// ReadChunk reads from a sealed chunk; only a survey uses ReadChunk.
	ReadChunk func(ctx context.Context, at meta.ChunkPlace, p []byte, off uint64) error
	// KeyLook is the interval of the checks whether the capability keys are due for rotation.
	// Default one minute.
	KeyLook time.Duration
	// Unsafe switches mechanisms off, for the test runs that must fail without the mechanism.
	Unsafe Unsafe
}

// Unsafe switches safety mechanisms off (positive controls).
type Unsafe struct {
	NoRecall bool // leases are granted despite conflicting leases
	NoWait   bool // callers see changes before the changes are durable
	// NoPutIn: a session asked to give a file up has no precedence for its remaining changes
	// of the file; these changes wait like any other writer's.
	NoPutIn bool
	// NoLease: an owner answers after its lease ran out, and its successor does not wait for
	// any lease.
	NoLease bool
	// NoRevoke: a session keeps its access to volumes, and outlives its identity.
	NoRevoke bool
	// NoSquash: a client with squashed root may create everything that root may create.
	NoSquash bool
	// NoStreams: clients that do not serve streams may change the files of streams.
	NoStreams bool
	// NoPace: no caller is slowed down, regardless of its load.
	NoPace bool
	// NoFence: the journal accepts entries of deposed owners.
	NoFence bool
	// NoPromise: quota reserved by a session is not withheld from other sessions.
	NoPromise bool
	// NoFreeze: owners answer changes while a group's snapshots are taken.
	NoFreeze bool
	// NoCheckpointAge: the age of a checkpoint counts from the opening of its volume.
	NoCheckpointAge bool
	// NoEnd: an open chunk stays in use regardless of lost replicas.
	NoEnd bool
	// NoLeast: a chunk begins with one replica if more find no room, regardless of the minimum
	// in the policy.
	NoLeast bool
	// NoCourtesy: a session ends with its lease, even if no caller needs anything held by the
	// session.
	NoCourtesy bool
	// NoMeet: open chunks stay in use although they don't meet a changed policy.
	NoMeet bool
	// NoReplayCheck: the owner does not check a client's claim that a call is a replay, nor
	// the inode numbers in replays.
	NoReplayCheck bool
	// NoTellPolicy: the owner does not notify a volume's sessions of a new policy.
	NoTellPolicy bool
	// NoLossWait: of a chunk to be given up, a replica that could not be judged counts as
	// damaged.
	NoLossWait bool
	// NoRules: everybody may make every call of the administrative API.
	NoRules bool
	// NoLeadership: every session may write a file that another session leads, and the open end
	// of a file is not sealed before a session begins to lead.
	NoLeadership bool
}

// Server serves the volumes of a cluster. Its parts each have the state, the lock and the methods
// of one concept; furnish tells each part which other parts it uses.
//
// Lock order: an owner's mu before the mu of a part; never the other way. No goroutine holds the
// mu of two parts at once, except that the mu of serverMap, the innermost lock, may be taken
// under each.
type Server struct {
	process
	api      *api         // for administrators
	gate     peering.Gate // connections before identification
	refusals peering.Refusals
	conns    atomic.Int64

	chunkServers chunkServers
	serverMap    serverMap
	clients      clients
	enrolment    enrolment
	peers        peers
	adminFrames  adminFrames
	hosted       hosted
	opener       opener
	standbys     *standbys
	room         diskRoom
	catalogue    catalogue
	junctions    junctionTree
	trash        trash

	repairs     *repairs
	orphans     orphanBlobs
	checker     checker
	surveyor    surveyor
	health      healthReport
	digests     digests
	indexes     making
	comparisons *comparisons
	filling     chan struct{} // a slot for the chunk filled by compaction
}

// process is what all parts of a server share: the configuration, and the server's life.
type process struct {
	cfg   Config
	log   *slog.Logger
	epoch time.Time // of the server's start
	stats counters

	// closing: the server is stopping. Close sets closing before it lists the owners. A part
	// that adds a volume or a session reads closing under its own mu, so the list has every
	// volume added.
	closing atomic.Bool

	ctx    context.Context
	cancel context.CancelCauseFunc
	wg     task.Group
}

// stops reports whether the server is stopping.
func (p *process) stops() bool { return p.closing.Load() }

// digestsHere reports whether this server computes digests of snapshots.
func (p *process) digestsHere() bool { return p.cfg.Chunks != nil && p.cfg.DigestDir != "" }

type counters struct {
	calls, entries, journalBytes, checkpoints, refused, expired, sealed, deleted, staleDeleted atomic.Uint64

	// Compaction: chunks filled, bytes copied, extents moved, failures.
	compacted, compactedBytes, compactedExtents, compactFailed atomic.Uint64
}

// New makes a server and starts its background loops; Serve accepts connections.
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
		process: process{cfg: cfg, log: cfg.Logger, epoch: time.Now()},
		repairs: newRepairs(),
		digests: newDigests(cfg.DigestRate, cfg.AwaitedDigestRate),
		indexes: making{make(chan struct{}, 1), rate.NewLimiter(indexRate, indexPage)},
		filling: make(chan struct{}, 1),

		comparisons: newComparisons(),
	}
	s.chunkServers.links = map[meta.ServerID]*link{}
	s.chunkServers.suspected.looking = make(chan struct{}, 4)
	s.serverMap.seen = map[meta.ServerID]*sighting{}
	s.clients.sessions, s.clients.latest = map[meta.SessionID]*session{}, map[string]*session{}
	s.enrolment.strangers = make(chan struct{}, maxStrangers)
	s.hosted.volumes, s.hosted.atRest = map[meta.VolumeID]*opening{}, map[meta.VolumeID]bool{}
	s.hosted.homeWake = make(chan struct{}, 1)
	keys, err := cfg.Cluster.CapKeys(ctx)
	if err != nil {
		return nil, err
	}
	s.chunkServers.keys, s.chunkServers.keysAt = keys, time.Now() // the newest key may be a moment old
	s.ctx, s.cancel = context.WithCancelCause(context.Background())
	s.standbys = newStandbys(s)
	s.api = newAPI(s)
	s.furnish()
	s.wg.Go(s.api.run)
	s.wg.Go(s.clients.expireLoop)
	s.wg.Go(s.enrolment.guardLoop)
	s.wg.Go(s.repairs.repairLoop)
	s.wg.Go(s.orphans.leakLoop)
	s.wg.Go(s.chunkServers.keyLoop)
	s.wg.Go(s.standbys.loop)
	if cfg.HomeAfter > 0 {
		s.wg.Go(s.hosted.homeLoop)
		s.wg.Go(s.hosted.visitLoop)
		s.wg.Go(s.junctions.treeLoop)
	}
	if cfg.Room != nil {
		s.wg.Go(s.room.roomLoop)
		s.wg.Go(s.room.roomlessLoop)
	}
	return s, nil
}

// furnish tells each part of the server which other parts it uses.
func (s *Server) furnish() {
	p := &s.process
	chunkServers, serverMap, hosted, peers := &s.chunkServers, &s.serverMap, &s.hosted, &s.peers

	s.chunkServers.process = p
	s.serverMap.process, s.serverMap.hosted, s.serverMap.repairs = p, hosted, s.repairs

	// Clients and other metadata servers.
	s.clients.process, s.clients.srv, s.clients.hosted = p, s, hosted
	en := &s.enrolment
	en.process, en.chunkServers, en.clients, en.hosted, en.refusals = p, chunkServers, &s.clients, hosted, &s.refusals
	ps := &s.peers
	ps.process, ps.adminFrames, ps.chunkServers, ps.clients, ps.hosted = p, &s.adminFrames, chunkServers, &s.clients, hosted
	af := &s.adminFrames
	af.process, af.catalogue, af.hosted, af.room = p, &s.catalogue, hosted, &s.room

	// Volumes.
	hs := &s.hosted
	hs.process, hs.opener, hs.peers, hs.room = p, &s.opener, peers, &s.room
	hs.serverMap, hs.standbys, hs.trash = serverMap, s.standbys, &s.trash
	op := &s.opener
	op.process, op.srv, op.api, op.hosted, op.peers, op.standbys = p, s, s.api, hosted, peers, s.standbys
	s.room.process, s.room.hosted, s.room.peers = p, hosted, peers
	ca := &s.catalogue
	ca.process, ca.api, ca.hosted, ca.junctions, ca.peers, ca.serverMap = p, s.api, hosted, &s.junctions, peers, serverMap
	jt := &s.junctions
	jt.process, jt.hosted, jt.peers, jt.trash = p, hosted, peers, &s.trash
	tr := &s.trash
	tr.process, tr.catalogue, tr.chunkServers, tr.hosted = p, &s.catalogue, chunkServers, hosted
	tr.peers, tr.serverMap, tr.standbys = peers, serverMap, s.standbys

	// Chunks.
	rs := s.repairs
	rs.process, rs.api, rs.chunkServers, rs.hosted, rs.peers, rs.serverMap = p, s.api, chunkServers, hosted, peers, serverMap
	s.orphans.process, s.orphans.chunkServers, s.orphans.hosted = p, chunkServers, hosted
	s.orphans.serverMap, s.orphans.trash = serverMap, &s.trash
	ch := &s.checker
	ch.process, ch.chunkServers, ch.hosted, ch.junctions, ch.peers = p, chunkServers, hosted, &s.junctions, peers
	s.surveyor.process, s.surveyor.chunkServers = p, chunkServers
	hr := &s.health
	hr.process, hr.clients, hr.enrolment, hr.hosted, hr.repairs = p, &s.clients, &s.enrolment, hosted, s.repairs
	hr.room, hr.serverMap, hr.standbys = &s.room, serverMap, s.standbys
}

// Resolve finds a connected chunk server.
func (s *Server) Resolve(id meta.ServerID) (meta.ServerInfo, bool) {
	return s.chunkServers.Resolve(id)
}

// Order sends an order to a chunk server and waits for the result. Errors: Unavailable (no
// stream to the server, or no answer), and the result's error.
func (s *Server) Order(ctx context.Context, id meta.ServerID, o meta.Order) (meta.OrderResult, error) {
	return s.chunkServers.Order(ctx, id, o)
}

// SystemReadCap returns a capability to read the chunks of a volume.
func (s *Server) SystemReadCap(v meta.VolumeID) []byte { return s.chunkServers.SystemReadCap(v) }

// AwaitServer waits until at least one of the chunk servers is connected. Errors: Unavailable,
// Canceled.
func (s *Server) AwaitServer(ctx context.Context, any []meta.ServerID) error {
	return s.chunkServers.AwaitServer(ctx, any)
}

// AwaitServers waits until n chunk servers are connected, or, for n = 0, until some chunk
// server is connected and the number has not changed for quiet. Errors: Unavailable.
func (s *Server) AwaitServers(ctx context.Context, n int, quiet time.Duration) error {
	return s.chunkServers.AwaitServers(ctx, n, quiet)
}

// LeaseLost gives up every volume owned under a lease that is over. The caller must not take
// volumes under a new lease before LeaseLost returns.
func (s *Server) LeaseLost() { s.hosted.LeaseLost() }

// OpenAll opens the volumes that have this server as home and were not released by their last
// owners, and finishes deletions. Other volumes are opened on request.
func (s *Server) OpenAll(ctx context.Context) error { return s.hosted.OpenAll(ctx) }

// Settle waits, as long as ctx allows, until the open chunks of ended sessions are sealed.
func (s *Server) Settle(ctx context.Context) error { return s.hosted.Settle(ctx) }

// Health returns what might be wrong, as far as this server knows. It takes a few seconds at
// most: a fact not found out by then is reported as unknown.
func (s *Server) Health(ctx context.Context) *meta.ServerHealth { return s.health.Health(ctx) }

// Fsck checks a volume's state, with all counts made again, and asks the chunk servers for
// every chunk in the state. It reads the state at a single journal entry: changes go on
// meanwhile.
func (s *Server) Fsck(ctx context.Context, v meta.VolumeID) (*FsckReport, error) {
	return s.checker.Fsck(ctx, v)
}

// Survey makes a survey. dir is for temporary states of volumes; backup is a backup of the
// cluster's records, or nil.
func (s *Server) Survey(ctx context.Context, dir string, shared *state.Shared, backup *cluster.Backup) (*Survey, error) {
	return s.surveyor.Survey(ctx, dir, shared, backup)
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

// connection does the handshake and serves the caller by role.
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
	// A server that restores the cluster does not know the cluster's ID.
	if id := s.cfg.Cluster.ID(); h.Cluster != "" && h.Cluster != id && id != "" {
		s.greet(conn, meta.E("hello", meta.Version, h.Name, fmt.Errorf("this is cluster %s, not %s", s.cfg.Cluster.ID(), h.Cluster)))
		return
	}
	ans := wire.Hello{
		Min: wire.Version, Max: wire.Version, Role: h.Role, Name: s.cfg.Name, Host: s.cfg.Addr,
		Cluster: s.cfg.Cluster.ID(), TTL: uint64(s.cfg.SessionTTL.Milliseconds()),
	}
	if !who.Anyone() && who.Role == "" {
		if err := s.enrolment.stranger(conn, rd, v, &ans); err != nil {
			s.greet(conn, err)
		}
		return
	}
	if err := s.enrolment.mayConnect(who, h.Role); err != nil {
		s.refusals.Warn(s.log, "a connection was refused", "error", err)
		s.greet(conn, err)
		return
	}
	if _, lost := s.cfg.Cluster.(*lostCluster); lost && h.Role != wire.RoleChunkServer {
		s.greet(conn, beingRestored())
		return
	}
	rd.Trust()
	if !who.Expires.IsZero() {
		// A connection ends with the certificate shown at its start; a client with a newer
		// certificate connects again.
		defer time.AfterFunc(time.Until(who.Expires), func() { conn.Close() }).Stop()
		defer s.enrolment.certs.shown(who)()
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
		s.peers.servePeer(conn, rd, v, &session{srv: s, who: who, role: h.Role, name: h.Name})
		return
	}
	grant := s.hosted.grant()
	if grant <= 0 {
		s.greet(conn, meta.E("hello", meta.Unavailable, s.cfg.Name, errors.New("this server has no lease at etcd")))
		return
	}
	sess, err := s.clients.admit(&h, who)
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
	snd.Enqueue(0, s.chunkServers.serverList())
	snd.Enqueue(0, s.peers.metaList())
	err = sess.read(conn, rd)
	sess.detach(conn, err)
	if err != nil && s.ctx.Err() == nil {
		if k := meta.KindOf(err); k == meta.Protocol || k == meta.Version {
			s.log.Warn("the server closes the connection of a client, which broke the protocol", "session", sess.name, "error", err)
			return
		}
		// If the process has died, the session ends at once.
		if s.cfg.Dead != nil && s.cfg.Dead(sess.host, sess.pid, sess.start) {
			s.clients.endSession(sess, errors.New("its process is gone"))
		}
	}
}

func (s *Server) greet(conn net.Conn, err error) {
	conn.Write(wire.Append(nil, wire.Version, 0, &wire.Hello{
		Min: wire.Version, Max: wire.Version, Err: meta.KindOf(err), Detail: err.Error(), Cluster: s.cfg.Cluster.ID(),
	}))
}

// unregisterWait is how long a stopping server waits for etcd to remove its registration.
const unregisterWait = 5 * time.Second

// Close stops in order: each volume's journal commits all answered operations, then the server
// releases its ownerships.
func (s *Server) Close(ctx context.Context) error {
	if s.closing.Swap(true) {
		return nil
	}
	var errs []error
	// First, no further client shall be sent to this server. If etcd does not answer, the
	// registration expires by itself, so the rest of Close does not wait for etcd.
	tell, cancel := context.WithTimeoutCause(ctx, unregisterWait, errors.New("etcd does not answer"))
	if err := s.cfg.Cluster.Unregister(tell); err != nil {
		s.log.Warn("the registration of this server could not be removed from etcd; it expires by itself", "error", err)
	}
	cancel()
	var wg sync.WaitGroup
	var mu sync.Mutex
	for _, o := range s.hosted.owners() {
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

// Abandon stops the server without releasing anything, as a crash would: for tests.
func (s *Server) Abandon() {
	s.closing.Store(true)
	owners := s.hosted.owners()
	for _, o := range owners {
		o.cancel(errors.New("abandoned"))
	}
	s.cancel(errors.New("abandoned"))
	s.wg.Wait()
	// Also close the stores of volumes that were being opened.
	for _, o := range append(owners, s.hosted.owners()...) {
		o.closeStore()
	}
	s.standbys.close()
}
