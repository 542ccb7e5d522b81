// Package server owns the service of volumes: sessions and their leases, early replies and
// group commit, chunks and their grants, hand-over and recovery. The POSIX rules are in
// meta/namespace, the log is in meta/journal; this package depends on neither's internals.
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

// Server serves the volumes of a cluster.
type Server struct {
	cfg      Config
	log      *slog.Logger
	epoch    time.Time
	stats    counters
	roomless roomless
	tight    atomic.Pointer[shortage] // nil: the disks have room

	suspected suspicion

	// Lock order: an owner's mu before mu; never the other way.
	mu        sync.Mutex
	sessions  map[meta.SessionID]*session
	latest    map[string]*session // by place: the session begun last
	volumes   map[meta.VolumeID]*opening
	links     map[meta.ServerID]*link
	keys      []meta.CapKey
	keysAt    time.Time // when keys arrived
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
	gate      peering.Gate // connections before identification
	refusals  peering.Refusals
	conns     atomic.Int64
	repairs   *repairs
	digests   digests
	indexes   making
	filling   chan struct{} // a slot for the chunk filled by compaction

	comparisons *comparisons

	api *api // for administrators

	tree     turns // of attaching and detaching a volume
	deleting turns
	setting  turns // of changing a volume's policy and the settings in its row
	purging  purges
	// atRest are closed volumes with this server as home, closed in order by their last
	// owners. While the list of metadata servers is unchanged, no other server takes such a
	// volume, so homeLoop does not ask etcd for each volume at every change. Guarded by mu.
	atRest map[meta.VolumeID]bool

	// seenMu guards seen and the map built from seen; seenMu is the innermost lock.
	seenMu   sync.Mutex
	seen     map[meta.ServerID]*sighting
	placed   *placement.Map // nil: make a new map
	placedAt time.Time
	mapTurn  uint64 // counts the invalidations of maps

	ctx    context.Context
	cancel context.CancelCauseFunc
	wg     task.Group
}

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
	s.keysAt = time.Now() // the newest key may be a moment old
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
	if _, lost := s.cfg.Cluster.(*lostCluster); lost && h.Role != wire.RoleChunkServer {
		s.greet(conn, beingRestored())
		return
	}
	rd.Trust()
	if !who.Expires.IsZero() {
		// A connection ends with the certificate shown at its start; a client with a newer
		// certificate connects again.
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
		// If the process has died, the session ends at once.
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

// admit finds the session that a client resumes, or makes a session under the client's number.
// Each volume decides, when the client enters, whether the session is still valid there.
// Errors: AccessDenied for a session of another identity, Unavailable.
func (s *Server) admit(h *wire.Hello, who peering.Identity) (*session, error) {
	wait := time.NewTimer(4 * time.Second)
	defer wait.Stop()
	for {
		s.mu.Lock()
		if s.closing {
			s.mu.Unlock()
			return nil, meta.E("hello", meta.Unavailable, s.cfg.Name, errStopping)
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
				srv: s, id: id, who: who, role: h.Role, name: h.Name, host: h.Host, pid: h.PID, start: h.Start, streams: h.Streams,
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
		// The session begins anew after the old one has ended in every volume.
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

// expireLoop ends sessions without a keep-alive: after keptFor, or, once the lease has run
// out, if another caller needs what the session holds, if the session's process ended, or if
// the server has too many late sessions. expireLoop also ends sessions that leave a recall
// unanswered.
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
		// No client could renew while this process stood still, so that time does not count.
		// Waiting longer for a session is always safe.
		stood := time.Since(last) - every
		last = time.Now()
		s.mu.Lock()
		if stood > 2*every {
			s.log.Warn("this process stood still: it extends the leases of its sessions", "for", stood)
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
					s.log.Info("a session is late: the server keeps it until another session needs one of its leases or locks", "session", sess.name, "idle", idle.Round(time.Second))
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

// maxLinger bounds how long a silent client may ask the server to keep its session: meanwhile
// the session's locks and open files, and the space of files referenced by the session alone,
// stay bound.
const maxLinger = 15 * time.Minute

// awaitedBy returns the late sessions that hold up another session, or because of which
// another session was refused.
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
		for id, entered := range o.awaited { // the owner serves nobody before these sessions claim
			inTheWay[id] = inTheWay[id] || entered
		}
		o.mu.Unlock()
	}
	for _, sess := range late {
		// The session may have come back meanwhile.
		if (inTheWay[sess.id] || sess.wanted.Load()) && sess.idle() > s.cfg.SessionTTL {
			awaited = append(awaited, sess)
		}
	}
	return awaited
}

// recallTTLs is how many session TTLs a renewing client may leave a recall unanswered, for
// instance because the client can't save its buffered data. Then the owner ends the session.
const recallTTLs = 4

// endStubborn ends sessions that renew but answer no recall: other sessions must not wait
// forever. stood extends all deadlines. awaitedBy handles silent sessions; a session that came
// back has the full time again.
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

// endSession voids a session: the server drops its leases and locks, and the journal of each
// volume entered here releases the session's files.
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
	// A client that uses nothing of this server is not reported as cut off. A client mounted
	// anew since its last sign of life is back already.
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
		// A living client connects again, and learns of the loss.
		sess.mu.Lock()
		if sess.conn != nil {
			sess.conn.Close()
		}
		sess.mu.Unlock()
	}
}

// unregisterWait is how long a stopping server waits for etcd to remove its registration.
const unregisterWait = 5 * time.Second

// Close stops in order: each volume's journal commits all answered operations, then the server
// releases its ownerships.
func (s *Server) Close(ctx context.Context) error {
	s.mu.Lock()
	if s.closing {
		s.mu.Unlock()
		return nil
	}
	s.closing = true
	s.mu.Unlock()
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

// Abandon stops the server without releasing anything, as a crash would: for tests.
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
	// Also close the stores of volumes that were being opened.
	for _, o := range append(owners, s.owners()...) {
		o.closeStore()
	}
	s.standbys.close()
}
