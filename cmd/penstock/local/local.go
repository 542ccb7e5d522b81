// Package local owns the wiring of roles into processes: a whole machine in a single process
// (Up), or a process for each role. The parts use the same sockets, protocols and formats in a
// single process as in a cluster.
package local

import (
	"context"
	"crypto/sha256"
	"crypto/tls"
	"errors"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"golang.org/x/sys/unix"

	chunkclient "penstock.io/penstock/chunkserver/client"
	chunks "penstock.io/penstock/chunkserver/server"
	"penstock.io/penstock/chunkserver/store"
	"penstock.io/penstock/meta"
	metaclient "penstock.io/penstock/meta/client"
	"penstock.io/penstock/meta/cluster"
	"penstock.io/penstock/meta/cluster/embedded"
	"penstock.io/penstock/meta/journal/etcd"
	"penstock.io/penstock/meta/peer"
	"penstock.io/penstock/meta/process"
	"penstock.io/penstock/meta/server"
	"penstock.io/penstock/meta/state"
	"penstock.io/penstock/meta/wire"
)

// Names in a data directory.
const (
	MetaSocket  = "meta.sock"
	ChunkSocket = "chunk.sock"
	etcdDir     = "etcd"
	metaDir     = "meta"
	chunkDir    = "chunks"
)

// RootVolumeName is the name of the volume at "/".
const RootVolumeName = "root"

// MetaConfig configures a metadata server.
type MetaConfig struct {
	Dir string // data directory
	// Cluster is the id of the cluster that Dir belongs to; empty: any cluster, or a new
	// cluster.
	Cluster string
	// Etcd are the endpoints of the cluster's etcd; if empty, the server embeds an etcd in
	// Dir.
	Etcd    []string
	EtcdTLS EtcdTLS
	// Listen is "host:port", served beside Dir's socket; empty: the socket alone.
	Listen string
	// Advertise is the address announced to other processes; empty: Listen, else the socket.
	Advertise string
	Creds     *peer.Credentials // for Listen, and to reach chunk servers
	Name      string
	Logger    *slog.Logger
	// CommitDelay, SessionTTL, CheckpointBytes: zero takes the defaults.
	CommitDelay     time.Duration
	SessionTTL      time.Duration
	CheckpointBytes int
	// CheckpointEvery bounds the time of changes lost if all of etcd is lost. Followers is the
	// number of servers that follow a volume besides the owner. Zero takes the defaults.
	CheckpointEvery   time.Duration
	Followers         int
	KeepForCheckpoint bool // see server.Config
	// DigestRate is the rate of reading for digests of snapshots, in bytes a second.
	// AwaitedDigestRate is the rate for digests that a caller waits for. Zero takes the
	// defaults.
	DigestRate, AwaitedDigestRate uint64
	// Repair says how chunks are repaired; zero takes the defaults.
	Repair        Repair
	Unsafe        server.Unsafe
	UnsafeNoFsync bool // of the embedded etcd
}

// Repair is how a metadata server repairs and compacts chunks: see
// server.Config.
type Repair struct {
	Delay, Grace, Interval, ListInterval time.Duration
	Parallel                             int
	Rate, ServerRate                     uint64 // bytes a second
	Balance                              float64

	CompactRate   uint64 // bytes a second
	JoinFragments int
	JoinBelow     uint64 // bytes
	JoinInterval  time.Duration
}

// Meta is a running metadata server.
type Meta struct {
	Server *server.Server
	Addr   string

	cfg        MetaConfig
	etcd       *embedded.Server
	cli        *clientv3.Client
	cluster    *cluster.Cluster
	leaseMu    sync.Mutex
	lease      *etcd.Lease                // nil before register, and after a loss
	owners     *etcd.Owners               // on lease
	left       atomic.Pointer[etcd.Lease] // lease, readable without leaseMu
	registered bool                       // guarded by leaseMu
	unregister context.CancelFunc         // nil before register
	shared     *state.Shared
	blob       *chunkBlob
	serve      sync.WaitGroup
	failed     chan error
	renewing   context.CancelFunc // nil without certificates
}

// StartMeta starts a metadata server. The data directory is already locked.
func StartMeta(ctx context.Context, cfg MetaConfig) (m *Meta, err error) {
	m = &Meta{cfg: cfg, failed: make(chan error, 1)}
	defer func() {
		if err != nil {
			end, cancel := stopping(ctx)
			defer cancel()
			m.Close(end)
		}
	}()
	if err = checkRole(cfg.Creds, peer.Meta); err != nil {
		return m, err
	}
	if id := cfg.Creds.Identity(); id.Role != "" {
		// Only 'penstock cluster init' makes a cluster with certificates.
		if cfg.Cluster == "" {
			cfg.Cluster = id.Cluster
		}
		cfg.Name = id.Name
		m.cfg = cfg
	}
	if len(cfg.Etcd) == 0 {
		m.etcd, err = embedded.StartContext(ctx, embedded.Config{Dir: filepath.Join(cfg.Dir, etcdDir), Logger: cfg.Logger.With("part", "etcd"), UnsafeNoFsync: cfg.UnsafeNoFsync})
		if err != nil {
			return m, err
		}
		m.cli = m.etcd.Client()
	} else {
		var etcdTLS *tls.Config
		if etcdTLS, err = cfg.EtcdTLS.Config(); err != nil {
			return m, err
		}
		m.cli, err = cluster.Dial(cfg.Etcd, etcdTLS)
		if err != nil {
			return m, meta.E("connect to etcd", meta.Unavailable, strings.Join(cfg.Etcd, ","), err)
		}
	}
	var opened *cluster.Cluster
	err = waitsOf(cfg.Logger, startBound).forStep(ctx, "read the cluster's records from etcd", strings.Join(cfg.Etcd, ","), func(ctx context.Context) (err error) {
		opened, err = cluster.Open(ctx, m.cli, cluster.Config{Expect: cfg.Cluster, Logger: cfg.Logger, Replaced: m.fail})
		return err
	})
	if err != nil {
		return m, err
	}
	m.cluster = opened
	if err = ageCopies(filepath.Join(cfg.Dir, metaDir), m.cluster.RestoredAt(), cfg.Logger); err != nil {
		return m, err
	}
	if _, err = m.cluster.Volume(ctx, meta.RootVolume); errors.Is(err, meta.NoSuchVolume) {
		_, err = m.cluster.CreateVolume(ctx, RootVolumeName, meta.Policy{Replicas: 1, LocalFirst: true}, meta.Time(time.Now().UnixNano()))
		if errors.Is(err, meta.VolumeExists) {
			err = nil
		}
	}
	if err != nil {
		return m, err
	}
	self, err := process.Self()
	if err != nil {
		return m, err
	}
	listeners, addr, err := listen(peer.ListenJoiners, filepath.Join(cfg.Dir, MetaSocket), cfg.Listen, cfg.Advertise, cfg.Creds, cfg.Logger)
	if err != nil {
		return m, err
	}
	serving := false
	defer func() {
		if !serving {
			closeAll(listeners)
		}
	}()
	m.Addr = addr
	if cfg.Name == "" {
		// Unique among the cluster's servers, and the same after a restart.
		cfg.Name = "meta"
		if cfg.Listen != "" || cfg.Advertise != "" {
			cfg.Name = addr
		}
	}
	m.cfg.Name = cfg.Name
	dir := filepath.Join(cfg.Dir, metaDir)
	scratch := filepath.Join(dir, "scratch")
	if err = os.RemoveAll(scratch); err == nil {
		err = os.MkdirAll(scratch, 0o700)
	}
	if err != nil {
		return m, meta.E("prepare data directory", meta.IO, dir, err)
	}
	m.shared = state.NewShared(64<<20, 1000, cfg.Logger.With("part", "state"))
	m.blob = newChunkBlob(cfg.Creds, cfg.Logger)
	backend := &server.Backend{
		Cluster: m.cluster, Shared: m.shared, Dir: dir, Blob: m.blob, Logger: cfg.Logger,
		Owners: func(ctx context.Context) (*etcd.Owners, error) {
			return m.takeOwners(ctx, etcd.OwnersConfig{
				Prefix: m.cluster.Prefix(), Server: cfg.Name, Addr: addr, Process: self,
				// After the loss of its lease, this process serves none of its former volumes.
				Dead:          func(o etcd.Owner) bool { return o.Process == self || o.Process.Dead(self) },
				UnsafeNoFence: cfg.Unsafe.NoFence,
			})
		},
		LeaseLeft: m.leaseLeft,
		Leave:     m.leave,
		Endpoints: cfg.Etcd,
	}
	if m.etcd != nil {
		backend.Endpoints = []string{m.etcd.Endpoint()}
		backend.Space = func(ctx context.Context) error { return embedded.RecoverSpace(ctx, m.cli, m.etcd.Endpoint()) }
	} else {
		backend.Space = embedded.NewReliever(m.cli, cfg.Etcd).Relieve
	}
	trust, err := trust(ctx, m.cluster, cfg.Creds, cfg.Logger)
	if err != nil {
		return m, err
	}
	m.Server, err = server.New(ctx, server.Config{
		Trust: trust, Gateways: cluster.GatewaysOf(m.cluster), Identity: boundTo(cfg.Creds),
		Name: cfg.Name, Addr: addr, Creds: cfg.Creds, Cluster: backend, Blob: m.blob, Logger: cfg.Logger, ScratchDir: scratch,
		ChunkWriter: m.blob, Chunks: m.blob, DigestDir: filepath.Join(dir, "digests"), DigestRate: cfg.DigestRate, AwaitedDigestRate: cfg.AwaitedDigestRate,
		CommitDelay: cfg.CommitDelay, SessionTTL: cfg.SessionTTL, CheckpointBytes: cfg.CheckpointBytes, Unsafe: cfg.Unsafe,
		CheckpointEvery: cfg.CheckpointEvery, KeepForCheckpoint: cfg.KeepForCheckpoint, Followers: cfg.Followers,
		RepairDelay: cfg.Repair.Delay, RepairGrace: cfg.Repair.Grace, RepairInterval: cfg.Repair.Interval, ListInterval: cfg.Repair.ListInterval,
		RepairParallel: cfg.Repair.Parallel, RepairRate: cfg.Repair.Rate, RepairServerRate: cfg.Repair.ServerRate, Balance: cfg.Repair.Balance,
		CompactRate: cfg.Repair.CompactRate, JoinLeast: cfg.Repair.JoinFragments, JoinSmall: cfg.Repair.JoinBelow, JoinInterval: cfg.Repair.JoinInterval,
		Room: func() (free, total uint64, err error) { return room(dir) }, RoomPath: dir,
		Dead: func(h string, pid uint32, start uint64) bool { return process.Parse(h, pid, start).Dead(self) },
	})
	if err != nil {
		return m, err
	}
	m.blob.server = m.Server
	if err = m.register(ctx, backend.Owners); err != nil {
		return m, err
	}
	// Restoring a volume may need chunk servers, so the server accepts chunk servers before
	// the volumes are open. Clients can connect, too, and wait.
	serving = true
	if trust != nil {
		run, cancel := context.WithCancel(context.WithoutCancel(ctx))
		m.renewing = cancel
		m.serve.Go(func() { m.keepRenewed(run, trust) })
	}
	for _, l := range listeners {
		m.serve.Go(func() {
			if err := m.Server.Serve(l); err != nil {
				m.fail(err)
			}
		})
	}
	return m, nil
}

// ownerTTL is the life of the etcd lease of this server's ownerships and registration. After a
// crash no other server takes a volume until the lease expires.
const ownerTTL = 3 * time.Second

// takeOwners returns the process' ownerships, bound to the lease at etcd. If the lease was
// lost, because the process stood still or etcd was unreachable, takeOwners makes a new lease.
func (m *Meta) takeOwners(ctx context.Context, cfg etcd.OwnersConfig) (*etcd.Owners, error) {
	m.leaseMu.Lock()
	defer m.leaseMu.Unlock()
	if m.lease != nil && m.lease.Left() > 0 {
		return m.owners, nil
	}
	if old := m.lease; old != nil {
		// The server stops serving on the old lease before a new lease exists.
		if m.Server != nil {
			m.Server.LeaseLost()
		}
		m.lease = nil
		m.left.Store(nil)
		// Keys of the old lease may still exist at etcd; a new term fences them.
		if err := old.Close(ctx); err != nil {
			m.cfg.Logger.Warn("a lost lease could not be given back", "error", err)
		}
	}
	lease, err := etcd.NewLease(ctx, m.cli, etcd.LeaseConfig{TTL: ownerTTL, Logger: m.cfg.Logger})
	if err != nil {
		return nil, err
	}
	if m.registered {
		if err := m.cluster.RegisterMetaServer(ctx, lease.ID(), m.cfg.Name, m.Addr); err != nil {
			return nil, errors.Join(err, lease.Close(ctx))
		}
	}
	m.lease, m.owners = lease, etcd.NewOwners(m.cli, lease, cfg)
	m.left.Store(lease)
	return m.owners, nil
}

// leaseLeft returns the rest of the lease's life, 0 without a lease. leaseLeft does not block.
func (m *Meta) leaseLeft() time.Duration {
	if l := m.left.Load(); l != nil {
		return l.Left()
	}
	return 0
}

// Ready returns the reason why the server can't serve now, nil if the server can. Ready does
// not block.
func (m *Meta) Ready() error {
	if m.leaseLeft() <= 0 {
		return meta.E("metadata server", meta.Unavailable, m.cfg.Name, errors.New("it has no lease at etcd, so it serves nothing: see whether etcd has a majority"))
	}
	return nil
}

// register adds this process to the list of metadata servers. A goroutine registers the
// process again after the loss of a lease.
func (m *Meta) register(ctx context.Context, owners func(context.Context) (*etcd.Owners, error)) error {
	m.leaseMu.Lock()
	m.registered = true
	m.leaseMu.Unlock()
	o, err := owners(ctx)
	if err != nil {
		return err
	}
	if err := m.cluster.RegisterMetaServer(ctx, o.Lease().ID(), m.cfg.Name, m.Addr); err != nil {
		return err
	}
	if _, err := m.cluster.Refresh(ctx); err != nil { // the list now has this server
		return err
	}
	run, cancel := context.WithCancel(context.WithoutCancel(ctx))
	m.unregister = cancel
	m.serve.Go(func() {
		for {
			m.leaseMu.Lock()
			lost := m.lease
			m.leaseMu.Unlock()
			if lost != nil {
				select {
				case <-lost.Lost():
				case <-run.Done():
					return
				}
			}
			call, cancel := context.WithTimeout(run, ownerTTL)
			_, err := owners(call)
			cancel()
			if err == nil {
				continue
			}
			if run.Err() != nil {
				return
			}
			m.cfg.Logger.Warn("no lease at etcd: nothing can be served", "error", err)
			select {
			case <-time.After(200 * time.Millisecond):
			case <-run.Done():
				return
			}
		}
	})
	return nil
}

// leave removes this process from the list of metadata servers.
func (m *Meta) leave(ctx context.Context) error {
	m.leaseMu.Lock()
	m.registered = false
	m.leaseMu.Unlock()
	if m.unregister != nil {
		m.unregister()
	}
	return m.cluster.UnregisterMetaServer(ctx, m.cfg.Name, m.Addr)
}

// ownBlocks is the largest number of blocks that ext4 reserves for its own metadata and
// reports as free (ext4_calculate_resv_clusters). Not even root may write to the reserved
// blocks. ext4 reserves a fiftieth of the disk, including the inode tables; statfs leaves the
// inode tables out of the disk's size, so room subtracts up to a fortieth of that size.
const ownBlocks = 4096

// room returns how many bytes this process may still write on dir's file system, and the file
// system's size.
func room(dir string) (free, total uint64, err error) {
	var st unix.Statfs_t
	if err := unix.Statfs(dir, &st); err != nil {
		return 0, 0, meta.E("statfs", meta.IO, dir, err)
	}
	blocks := st.Bavail
	if os.Geteuid() == 0 {
		blocks = max(blocks, st.Bfree-min(st.Bfree, st.Blocks/40, ownBlocks))
	}
	return blocks * uint64(st.Bsize), st.Blocks * uint64(st.Bsize), nil
}

// listen opens a role's socket, and a TCP listener if tcp is not empty. addr is the address
// announced to other processes.
func listen(onTCP func(string, *peer.Credentials) (net.Listener, error), socket, tcp, advertise string, creds *peer.Credentials, log *slog.Logger) (all []net.Listener, addr string, err error) {
	addr = "unix:" + socket
	l, err := peer.Listen(addr, creds)
	if err != nil {
		return nil, "", err
	}
	all = append(all, l)
	if tcp != "" {
		if l, err = onTCP(tcp, creds); err != nil {
			closeAll(all)
			return nil, "", err
		}
		all = append(all, l)
		addr = l.Addr().String()
		if creds.IsInsecure() {
			log.Warn("INSECURE: plain TCP without certificates; every user of this machine may do everything", "address", addr)
		}
	}
	if advertise != "" {
		addr = advertise
	}
	return all, addr, nil
}

func closeAll(all []net.Listener) {
	for _, l := range all {
		l.Close()
	}
}

// ClusterID returns the cluster's id in the form recorded on disks.
func (m *Meta) ClusterID() [16]byte { return diskCluster(m.cluster.ID()) }

func diskCluster(id string) (b [16]byte) {
	s := sha256.Sum256([]byte(id))
	copy(b[:], s[:])
	return b
}

// NewServerID allocates the number of a new chunk server.
func (m *Meta) NewServerID(ctx context.Context) (meta.ServerID, error) {
	return m.cluster.NewServerID(ctx)
}

// OpenVolumes opens every volume, so that sessions of an earlier run can continue.
func (m *Meta) OpenVolumes(ctx context.Context) error { return m.Server.OpenAll(ctx) }

// openVolumes calls OpenVolumes for callers that wait until all volumes are open.
func (m *Meta) openVolumes(ctx context.Context) error {
	return waitsOf(m.cfg.Logger, startBound).forStep(ctx, "open the volumes", filepath.Join(m.cfg.Dir, metaDir), m.OpenVolumes)
}

// Failed returns a channel with the error that ends the server's service.
func (m *Meta) Failed() <-chan error { return m.failed }

// fail reports the first error; later errors are consequences of the first.
func (m *Meta) fail(err error) {
	select {
	case m.failed <- err:
	default:
	}
}

// Close stops the server's parts in order. After ctx ends, Close waits for at most closeGrace.
func (m *Meta) Close(ctx context.Context) error {
	return closing(m.cfg.Logger).forStep(ctx, "stop the metadata server", m.cfg.Dir, m.close)
}

func (m *Meta) close(ctx context.Context) error {
	var errs []error
	if m.renewing != nil {
		m.renewing()
	}
	if m.Server != nil {
		errs = append(errs, m.Server.Close(ctx))
	}
	if m.unregister != nil {
		m.unregister()
	}
	m.serve.Wait()
	if m.blob != nil {
		errs = append(errs, m.blob.Close())
	}
	if m.shared != nil {
		m.shared.Close()
	}
	if m.lease != nil {
		errs = append(errs, m.lease.Close(ctx))
	}
	if m.cluster != nil {
		m.cluster.Close()
	}
	if m.etcd != nil {
		errs = append(errs, m.etcd.Close())
	} else if m.cli != nil {
		errs = append(errs, m.cli.Close())
	}
	return errors.Join(errs...)
}

// ChunkConfig configures a chunk server.
type ChunkConfig struct {
	Dir string // data directory, for the socket and the identity
	// Disks are directories, each "[class=]DIR"; empty: a directory in Dir.
	Disks []string
	// AnyDisk starts the server even if a disk can't be opened, so that an operator can
	// replace the disk.
	AnyDisk bool
	// PullRate and ScrubPeriod: as in the server's Config.
	PullRate    uint64
	ScrubPeriod time.Duration
	Meta        []string // addresses of metadata servers
	// Listen, Advertise, Creds: as in MetaConfig; Creds is shown to metadata
	// servers, too.
	Listen    string
	Advertise string
	Creds     *peer.Credentials
	// LocalClients announces the socket in Dir to clients on this machine, so that the clients
	// share memory and descriptors with the server.
	LocalClients bool
	// Congestion is the TCP congestion control of connections; "" leaves the
	// machine's default.
	Congestion  string
	Topology    string
	Class       string
	Cluster     [16]byte
	ID          meta.ServerID
	Name        string
	Logger      *slog.Logger
	Store       store.Options // switches of positive controls
	UnsafeNoCap bool          // a positive control, too
	// UnsafeOwnClock, a positive control, judges capabilities by this machine's clock.
	UnsafeOwnClock bool
}

// Chunk is a running chunk server.
type Chunk struct {
	Server *chunks.Server
	Addr   string
	creds  *peer.Credentials
	dir    string // the data directory
	log    *slog.Logger
	disks  *chunks.Disks
	links  atomic.Int32 // connected streams to metadata servers
	cancel context.CancelFunc
	wg     sync.WaitGroup
	failed chan error
}

// StartChunkServer opens the disks, listens, and connects to the metadata servers.
func StartChunkServer(ctx context.Context, cfg ChunkConfig) (c *Chunk, err error) {
	c = &Chunk{creds: cfg.Creds, failed: make(chan error, 1), dir: cfg.Dir, log: cfg.Logger}
	defer func() {
		if err != nil {
			end, cancel := stopping(ctx)
			defer cancel()
			c.Close(end)
		}
	}()
	if err := checkRole(cfg.Creds, peer.ChunkServer); err != nil {
		return c, err
	}
	specs, err := diskSpecs(cfg)
	if err != nil {
		return c, err
	}
	o := cfg.Store
	o.Boot = process.Boot()
	var paths []string
	for _, d := range specs {
		paths = append(paths, d.Path)
	}
	var disks *chunks.Disks
	err = waitsOf(cfg.Logger, startBound).forStep(ctx, "open the disks", strings.Join(paths, ","), func(context.Context) (err error) {
		disks, err = chunks.OpenDisks(chunks.DisksConfig{
			Dir: cfg.Dir, Disks: specs, Cluster: cfg.Cluster, Server: cfg.ID, Options: o, Logger: cfg.Logger,
		})
		return err
	})
	if err != nil {
		return c, err
	}
	c.disks = disks
	if err := c.disks.FirstError(); err != nil && !cfg.AnyDisk {
		return c, err
	}
	listeners, addr, err := listen(peer.ListenTicketed, filepath.Join(cfg.Dir, ChunkSocket), cfg.Listen, cfg.Advertise, cfg.Creds, cfg.Logger)
	if err != nil {
		return c, err
	}
	c.Addr = addr
	socket := ""
	if cfg.LocalClients && !strings.HasPrefix(addr, "unix:") {
		path, err := filepath.Abs(filepath.Join(cfg.Dir, ChunkSocket))
		if err != nil {
			closeAll(listeners)
			return c, meta.E("start chunk server", meta.IO, cfg.Dir, err)
		}
		socket = "unix:" + path
	}
	c.Server = chunks.NewWithDisks(chunks.Config{
		ID: cfg.ID, Addr: addr, Local: socket, Topology: cfg.Topology, Class: specs[0].Class, Host: process.Boot(), Logger: cfg.Logger, Congestion: cfg.Congestion,
		PullRate: cfg.PullRate, ScrubPeriod: cfg.ScrubPeriod, UnsafeNoCap: cfg.UnsafeNoCap, UnsafeOwnClock: cfg.UnsafeOwnClock,
		Peers: func(where func(meta.ServerID) (meta.ServerInfo, bool), capability func(meta.ChunkID) []byte) chunks.Peers {
			return chunkclient.New(chunkclient.Config{
				Name: cfg.Name, Logger: cfg.Logger, Creds: cfg.Creds, Congestion: cfg.Congestion, NoShare: true, Resolve: where, ReadChunkCap: capability,
			})
		},
	}, c.disks)
	run, cancel := context.WithCancel(context.WithoutCancel(ctx))
	c.cancel = cancel
	for _, l := range listeners {
		c.wg.Go(func() {
			if err := c.Server.Serve(run, l); err != nil && run.Err() == nil {
				c.fail(err)
			}
		})
	}
	c.wg.Go(func() { keepRenewed(run, cfg.Meta, cfg.Creds, cfg.Logger) })
	// Keep a stream to every metadata server: each server may own a volume.
	c.wg.Go(func() {
		err := metaclient.RunLink(run, metaclient.LinkConfig{
			Addrs: cfg.Meta, Name: cfg.Name, Logger: cfg.Logger, Creds: cfg.Creds,
			Report: func() wire.Report {
				return wire.Report{Info: c.Server.Info(), Generation: c.Server.Generation(), Now: c.Server.Clock()}
			},
			Events: c.Server.Events, More: c.Server.More, Order: c.Server.Order, Clock: c.Server.HeardClock,
			Connected: func(up bool) {
				if up {
					c.links.Add(1)
				} else {
					c.links.Add(-1)
				}
			},
		})
		if err != nil {
			c.fail(err)
		}
	})
	return c, nil
}

// Ready returns the reason why the server can't serve now, nil if the server can.
func (c *Chunk) Ready() error {
	if c.links.Load() == 0 {
		return meta.E("chunk server", meta.Unavailable, "", errors.New("no metadata server is connected"))
	}
	for _, d := range c.Server.Info().Disks {
		if d.State == meta.DiskOK || d.State == meta.DiskFull {
			return nil
		}
	}
	return meta.E("chunk server", meta.Unavailable, "", errors.New("no disk is well"))
}

// diskClasses are the valid classes of a disk.
var diskClasses = []string{"nvme", "ssd", "hdd"}

// diskSpecs parses cfg.Disks, each "[class=]DIR". Errors: Invalid.
func diskSpecs(cfg ChunkConfig) ([]chunks.DiskSpec, error) {
	const op = "open disks"
	if len(cfg.Disks) == 0 {
		return []chunks.DiskSpec{{Path: filepath.Join(cfg.Dir, chunkDir), Class: cfg.Class}}, nil
	}
	var specs []chunks.DiskSpec
	for _, s := range cfg.Disks {
		d := chunks.DiskSpec{Path: s, Class: cfg.Class}
		if class, path, ok := strings.Cut(s, "="); ok && slices.Contains(diskClasses, class) {
			d.Class, d.Path = class, path
		}
		var err error
		if d.Path, err = filepath.Abs(d.Path); err != nil || d.Path == "/" {
			return nil, meta.E(op, meta.Invalid, s, err)
		}
		specs = append(specs, d)
	}
	return specs, nil
}

// Failed returns a channel with the error that ends the server's service.
func (c *Chunk) Failed() <-chan error { return c.failed }

func (c *Chunk) fail(err error) {
	select {
	case c.failed <- err:
	default:
	}
}

// Close stops the server's parts in order. After ctx ends, Close waits for at most closeGrace.
func (c *Chunk) Close(ctx context.Context) error {
	return closing(c.log).forStep(ctx, "stop the chunk server", c.dir, c.close)
}

func (c *Chunk) close(context.Context) error {
	var errs []error
	if c.cancel != nil {
		c.cancel()
	}
	if c.Server != nil {
		errs = append(errs, c.Server.Close())
	}
	c.wg.Wait()
	if c.disks != nil {
		errs = append(errs, c.disks.Close())
	}
	return errors.Join(errs...)
}
