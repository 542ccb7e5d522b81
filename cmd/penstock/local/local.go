// Package local owns the wiring of roles into processes: one machine in one
// process (Up), or one role each. Every part talks to the others as it does in
// a cluster, through the same sockets, protocols and formats.
package local

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"golang.org/x/sys/unix"

	chunks "penstock.io/penstock/chunkserver/server"
	"penstock.io/penstock/chunkserver/store"
	"penstock.io/penstock/meta"
	metaclient "penstock.io/penstock/meta/client"
	"penstock.io/penstock/meta/cluster"
	"penstock.io/penstock/meta/cluster/embedded"
	"penstock.io/penstock/meta/journal/etcd"
	"penstock.io/penstock/meta/server"
	"penstock.io/penstock/meta/state"
	"penstock.io/penstock/meta/wire"
)

// Where things lie in a data directory.
const (
	MetaSocket  = "meta.sock"
	ChunkSocket = "chunk.sock"
	etcdDir     = "etcd"
	metaDir     = "meta"
	chunkDir    = "chunks"
)

// RootVolumeName is the name of the volume at "/".
const RootVolumeName = "root"

// MetaConfig is what a metadata server needs.
type MetaConfig struct {
	Dir string // data directory
	// Etcd are the endpoints of a cluster's etcd; empty embeds one in Dir.
	Etcd   []string
	Listen string // "unix:/path" or "host:port"; empty: Dir's socket
	Name   string
	Logger *slog.Logger
	// CommitDelay, SessionTTL, CheckpointBytes: zero takes the defaults.
	CommitDelay     time.Duration
	SessionTTL      time.Duration
	CheckpointBytes int
	Unsafe          server.Unsafe
	UnsafeNoFsync   bool // of the embedded etcd
}

// Meta is a running metadata server.
type Meta struct {
	Server *server.Server
	Addr   string

	cfg     MetaConfig
	etcd    *embedded.Server
	cli     *clientv3.Client
	cluster *cluster.Cluster
	leaseMu sync.Mutex
	lease   *etcd.Lease  // nil before a volume was taken
	owners  *etcd.Owners // on lease
	shared  *state.Shared
	blob    *chunkBlob
	serve   sync.WaitGroup
	failed  chan error
}

// StartMeta starts a metadata server. The data directory is already locked.
func StartMeta(ctx context.Context, cfg MetaConfig) (m *Meta, err error) {
	m = &Meta{cfg: cfg, failed: make(chan error, 1)}
	defer func() {
		if err != nil {
			m.Close(context.WithoutCancel(ctx))
		}
	}()
	if len(cfg.Etcd) == 0 {
		m.etcd, err = embedded.Start(embedded.Config{Dir: filepath.Join(cfg.Dir, etcdDir), Logger: cfg.Logger.With("part", "etcd"), UnsafeNoFsync: cfg.UnsafeNoFsync})
		if err != nil {
			return m, err
		}
		m.cli = m.etcd.Client()
	} else {
		m.cli, err = cluster.Dial(cfg.Etcd, nil)
		if err != nil {
			return m, meta.E("connect to etcd", meta.Unavailable, strings.Join(cfg.Etcd, ","), err)
		}
	}
	if m.cluster, err = cluster.Open(ctx, m.cli, cluster.Config{Logger: cfg.Logger}); err != nil {
		return m, err
	}
	if _, err = m.cluster.Volume(ctx, meta.RootVolume); errors.Is(err, meta.NoSuchVolume) {
		_, err = m.cluster.CreateVolume(ctx, RootVolumeName, meta.Policy{Replicas: 1}, meta.Time(time.Now().UnixNano()))
		if errors.Is(err, meta.VolumeExists) {
			err = nil
		}
	}
	if err != nil {
		return m, err
	}
	self, err := etcd.Self()
	if err != nil {
		return m, err
	}
	addr := cfg.Listen
	if addr == "" {
		addr = "unix:" + filepath.Join(cfg.Dir, MetaSocket)
	}
	m.Addr = addr
	dir := filepath.Join(cfg.Dir, metaDir)
	scratch := filepath.Join(dir, "scratch")
	if err = os.RemoveAll(scratch); err == nil {
		err = os.MkdirAll(scratch, 0o700)
	}
	if err != nil {
		return m, meta.E("prepare data directory", meta.IO, dir, err)
	}
	m.shared = state.NewShared(64<<20, 1000, cfg.Logger.With("part", "state"))
	m.blob = newChunkBlob(cfg.Logger)
	backend := &server.Backend{
		Cluster: m.cluster, Shared: m.shared, Dir: dir, Blob: m.blob, Logger: cfg.Logger,
		Owners: func(ctx context.Context) (*etcd.Owners, error) {
			return m.takeOwners(ctx, etcd.OwnersConfig{
				Prefix: m.cluster.Prefix(), Server: cfg.Name, Addr: addr, Process: self,
				// What this process owned before it lost its lease it serves no more.
				Dead: func(o etcd.Owner) bool { return o.Process == self || o.Process.Dead(self) },
			})
		},
	}
	if m.etcd != nil {
		backend.Space = func(ctx context.Context) error { return embedded.RecoverSpace(ctx, m.cli, m.etcd.Endpoint()) }
	}
	host, pid := metaclient.PIDSpace(), uint32(os.Getpid())
	m.Server, err = server.New(ctx, server.Config{
		Name: cfg.Name, Cluster: backend, Blob: m.blob, Logger: cfg.Logger, ScratchDir: scratch,
		CommitDelay: cfg.CommitDelay, SessionTTL: cfg.SessionTTL, CheckpointBytes: cfg.CheckpointBytes, Unsafe: cfg.Unsafe,
		Room: func() (free, total uint64, err error) { return room(dir) },
		Dead: func(h string, p uint32, start uint64) bool {
			if h != host || h == "" {
				return false
			}
			// This very process holds no session of before its start.
			if p == pid && start == metaclient.ProcessStart(pid) {
				return false
			}
			return metaclient.ProcessStart(p) != start
		},
	})
	if err != nil {
		return m, err
	}
	m.blob.server = m.Server
	l, err := listen(addr)
	if err != nil {
		return m, err
	}
	// Chunk servers may be needed to restore a volume, so they may connect
	// before the volumes are open; clients are served then, too, and wait.
	m.serve.Go(func() {
		if err := m.Server.Serve(l); err != nil {
			m.failed <- err
		}
	})
	return m, nil
}

// takeOwners gives the process' standing as an owner, on a new lease if the one
// before was lost: the process stood still, or etcd was away.
func (m *Meta) takeOwners(ctx context.Context, cfg etcd.OwnersConfig) (*etcd.Owners, error) {
	m.leaseMu.Lock()
	defer m.leaseMu.Unlock()
	if m.lease != nil && m.lease.Left() > 0 {
		return m.owners, nil
	}
	if old := m.lease; old != nil {
		m.lease = nil
		// What hangs on it may still stand at etcd; a new term fences it.
		if err := old.Close(ctx); err != nil {
			m.cfg.Logger.Warn("a lost lease could not be given back", "error", err)
		}
	}
	lease, err := etcd.NewLease(ctx, m.cli, etcd.LeaseConfig{Logger: m.cfg.Logger})
	if err != nil {
		return nil, err
	}
	m.lease, m.owners = lease, etcd.NewOwners(m.cli, lease, cfg)
	return m.owners, nil
}

// room tells what this process may still write on a folder's file system.
func room(dir string) (free, total uint64, err error) {
	var st unix.Statfs_t
	if err := unix.Statfs(dir, &st); err != nil {
		return 0, 0, meta.E("statfs", meta.IO, dir, err)
	}
	blocks := st.Bavail
	if os.Geteuid() == 0 {
		blocks = st.Bfree
	}
	return blocks * uint64(st.Bsize), st.Blocks * uint64(st.Bsize), nil
}

// listen opens "unix:/path" with mode 0600, or "host:port". A socket that
// nobody answers on is left over from a crash, and is removed.
func listen(addr string) (net.Listener, error) {
	path, ok := strings.CutPrefix(addr, "unix:")
	if !ok {
		l, err := net.Listen("tcp", addr)
		if err != nil {
			return nil, meta.E("listen", meta.Busy, addr, err)
		}
		return l, nil
	}
	if len(path) > 107 {
		return nil, meta.E("listen", meta.NameTooLong, path, fmt.Errorf("a socket's path has at most 107 bytes, this one has %d: choose a shorter --dir", len(path)))
	}
	if c, err := net.Dial("unix", path); err == nil {
		c.Close()
		return nil, meta.E("listen", meta.Busy, path, errors.New("another process answers on this socket"))
	}
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, meta.E("listen", meta.IO, path, err)
	}
	l, err := net.Listen("unix", path)
	if err != nil {
		return nil, meta.E("listen", meta.IO, path, err)
	}
	if err := os.Chmod(path, 0o600); err != nil {
		l.Close()
		return nil, meta.E("listen", meta.IO, path, err)
	}
	return l, nil
}

// ClusterID is the cluster's identity as disks record it.
func (m *Meta) ClusterID() [16]byte { return diskCluster(m.cluster.ID()) }

func diskCluster(id string) (b [16]byte) {
	s := sha256.Sum256([]byte(id))
	copy(b[:], s[:])
	return b
}

// NewServerID gives a chunk server its number.
func (m *Meta) NewServerID(ctx context.Context) (meta.ServerID, error) {
	return m.cluster.NewServerID(ctx)
}

// OpenVolumes opens every volume, so that sessions of before can go on.
func (m *Meta) OpenVolumes(ctx context.Context) error { return m.Server.OpenAll(ctx) }

// Failed tells when the server can't go on.
func (m *Meta) Failed() <-chan error { return m.failed }

// Close stops in order.
func (m *Meta) Close(ctx context.Context) error {
	var errs []error
	if m.Server != nil {
		errs = append(errs, m.Server.Close(ctx))
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

// ChunkConfig is what a chunk server needs.
type ChunkConfig struct {
	Dir      string   // data directory, for the socket and the identity
	Disks    []string // directories; empty: one in Dir
	Meta     []string // addresses of metadata servers
	Listen   string   // empty: Dir's socket
	Topology string
	Class    string
	Cluster  [16]byte
	ID       meta.ServerID
	Name     string
	Logger   *slog.Logger
	Store    store.Options // switches of positive controls
}

// Chunk is a running chunk server.
type Chunk struct {
	Server *chunks.Server
	Addr   string
	stores []*store.Store
	disks  []string
	cancel context.CancelFunc
	wg     sync.WaitGroup
	failed chan error
}

// StartChunkServer opens the disks and serves them.
func StartChunkServer(ctx context.Context, cfg ChunkConfig) (c *Chunk, err error) {
	c = &Chunk{failed: make(chan error, 2)}
	defer func() {
		if err != nil {
			c.Close(context.WithoutCancel(ctx))
		}
	}()
	disks := cfg.Disks
	if len(disks) == 0 {
		disks = []string{filepath.Join(cfg.Dir, chunkDir)}
	}
	for _, dir := range disks {
		st, err := openDisk(dir, cfg)
		if err != nil {
			return c, err
		}
		c.stores, c.disks = append(c.stores, st), append(c.disks, dir)
	}
	addr := cfg.Listen
	if addr == "" {
		addr = "unix:" + filepath.Join(cfg.Dir, ChunkSocket)
	}
	c.Addr = addr
	l, err := listen(addr)
	if err != nil {
		return c, err
	}
	c.Server = chunks.New(chunks.Config{
		ID: cfg.ID, Addr: addr, Topology: cfg.Topology, Class: cfg.Class, Host: metaclient.BootID(), Logger: cfg.Logger,
	}, c.stores...)
	run, cancel := context.WithCancel(context.WithoutCancel(ctx))
	c.cancel = cancel
	c.wg.Go(func() {
		if err := c.Server.Serve(run, l); err != nil && run.Err() == nil {
			c.failed <- err
		}
	})
	c.wg.Go(func() {
		err := metaclient.RunLink(run, metaclient.LinkConfig{
			Addrs: cfg.Meta, Name: cfg.Name, Logger: cfg.Logger,
			Report: func() wire.Report { return wire.Report{Info: c.Server.Info()} },
			Order:  c.Server.Order,
		})
		if err != nil {
			c.failed <- err
		}
	})
	return c, nil
}

// openDisk opens a disk, or makes an empty directory one. A directory that
// holds anything else is refused, never cleaned.
func openDisk(dir string, cfg ChunkConfig) (*store.Store, error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, meta.E("open disk", meta.IO, dir, err)
	}
	o := cfg.Store
	o.Cluster, o.Logger, o.Boot = cfg.Cluster, cfg.Logger, metaclient.BootID()
	names, err := os.ReadDir(dir)
	if err != nil {
		return nil, meta.E("open disk", meta.IO, dir, err)
	}
	d := store.DirDisk(dir)
	if len(names) == 0 || len(names) == 1 && names[0].Name() == "lost+found" {
		if err := store.Init(d, o); err != nil {
			return nil, err
		}
	}
	return store.Open(d, o)
}

// Failed tells when the server can't go on.
func (c *Chunk) Failed() <-chan error { return c.failed }

// Close stops in order.
func (c *Chunk) Close(ctx context.Context) error {
	var errs []error
	if c.cancel != nil {
		c.cancel()
	}
	if c.Server != nil {
		errs = append(errs, c.Server.Close())
	}
	c.wg.Wait()
	for _, s := range c.stores {
		errs = append(errs, s.Close())
	}
	return errors.Join(errs...)
}
