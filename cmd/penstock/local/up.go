package local

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"time"

	penstock "penstock.io/penstock"
	"penstock.io/penstock/chunkserver/store"
	"penstock.io/penstock/fuse"
	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/cluster/embedded"
	"penstock.io/penstock/meta/server"
	"penstock.io/penstock/stream"
)

// Config configures a whole machine in a single process.
type Config struct {
	Dir   string
	Mount string // "" mounts nothing
	// MountOptions, WriteBuffer and MetaCache: zero values take the defaults.
	MountOptions fuse.Options
	WriteBuffer  int64
	MetaCache    int
	Logger       *slog.Logger
	CommitDelay  time.Duration
	DigestRate   uint64 // see MetaConfig
	// Kafka is the address of the server for Kafka clients; "": no such server. If KafkaOptional,
	// an address that is not free is no error.
	Kafka         string
	KafkaOptional bool
	// Doors say how the gateway's servers know their clients.
	Doors Doors
	// Ingest and IngestOptional are the same for appends over HTTP and gRPC.
	Ingest         string
	IngestOptional bool
	// StreamIdle is how long the gateway leads an unused partition; 0: stream.DefaultIdle.
	StreamIdle time.Duration
	Unsafe     Unsafe
}

// Unsafe switches safety mechanisms off. Only 'make controls' sets Unsafe, to prove that the
// tests detect the loss of each mechanism.
type Unsafe struct {
	Meta      server.Unsafe
	Mirrors   penstock.MirrorUnsafe
	Streams   stream.Unsafe
	NoJournal bool // etcd does not sync
	Store     store.Options
	NoCap     bool // chunk servers check no capability
	OwnClock  bool // chunk servers judge capabilities by local clocks
	NoLaunder bool // mounts give leases back with pages of mappings still in the kernel
	NoDrain   bool // a mount that ends discards changes that are not durable
	Lines     fuse.UnsafeLines
}

// identity is the content of a data directory's identityFile.
type identity struct {
	Version  int           `json:"version"` // 1
	ServerID meta.ServerID `json:"chunk_server"`
	// Cluster is the id of the directory's cluster; empty before the directory is part of a
	// cluster.
	Cluster string `json:"cluster,omitempty"`
}

const (
	identityFile    = "penstock.json"
	identityVersion = 1
)

func readIdentity(dir string) (identity, error) {
	path := filepath.Join(dir, identityFile)
	b, err := os.ReadFile(path)
	if errors.Is(err, os.ErrNotExist) {
		names, rerr := os.ReadDir(dir)
		if rerr != nil && !errors.Is(rerr, os.ErrNotExist) {
			return identity{}, meta.E("open data directory", meta.IO, dir, rerr)
		}
		for _, n := range names {
			if n.Name() != "LOCK" && n.Name() != "lost+found" {
				return identity{}, meta.E("open data directory", meta.Invalid, dir, fmt.Errorf("it holds %q but no %s: it is not a Penstock data directory; choose an empty one", n.Name(), identityFile))
			}
		}
		return identity{}, nil
	}
	if err != nil {
		return identity{}, meta.E("open data directory", meta.IO, path, err)
	}
	var id identity
	if err := json.Unmarshal(b, &id); err != nil || id.Version < 1 {
		return identity{}, meta.E("open data directory", meta.Corrupt, path, err)
	}
	if id.Version > identityVersion {
		return identity{}, meta.E("open data directory", meta.Version, path, fmt.Errorf("it has format %d, this program knows up to %d: use a newer program", id.Version, identityVersion))
	}
	return id, nil
}

// write replaces the file: write, sync, rename, sync the folder.
func (id identity) write(dir string) error {
	id.Version = identityVersion
	b, err := json.MarshalIndent(id, "", "  ")
	if err != nil {
		panic("local: an identity is plain data: " + err.Error())
	}
	path := filepath.Join(dir, identityFile)
	f, err := os.OpenFile(path+".new", os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o600)
	if err == nil {
		_, err = f.Write(append(b, '\n'))
		err = errors.Join(err, f.Sync(), f.Close())
	}
	if err == nil {
		err = os.Rename(path+".new", path)
	}
	if err == nil {
		var d *os.File
		if d, err = os.Open(dir); err == nil {
			err = errors.Join(d.Sync(), d.Close())
		}
	}
	if err != nil {
		return meta.E("write data directory", meta.IO, path, err)
	}
	return nil
}

// System is a whole machine, running.
type System struct {
	Meta  *Meta
	Chunk *Chunk
	Mount *Mount
	// Gateway is nil without one.
	Gateway *Gateway
	// stopMirrors stops the mirrors and waits for their goroutine.
	stopMirrors func()
	lock        *embedded.Lock
	log         *slog.Logger
}

// Up starts the metadata server, the chunk server, the mirrors, the gateway if cfg.Kafka or
// cfg.Ingest is set, and the mount if cfg.Mount is set. Errors: DirectoryInUse, Version, Invalid (not a Penstock data directory), Busy, and the
// errors of StartMount.
func Up(ctx context.Context, cfg Config) (s *System, err error) {
	if cfg.Dir, err = filepath.Abs(cfg.Dir); err != nil {
		return nil, meta.E("open data directory", meta.Invalid, cfg.Dir, err)
	}
	s = &System{log: cfg.Logger}
	defer func() {
		if err != nil {
			end, cancel := stopping(ctx)
			defer cancel()
			s.Close(end)
			s = nil
		}
	}()
	id, err := readIdentity(cfg.Dir)
	if err != nil {
		return s, err
	}
	if s.lock, err = embedded.LockDir(cfg.Dir); err != nil {
		return s, err
	}
	if id.Version == 0 {
		if err = id.write(cfg.Dir); err != nil {
			return s, err
		}
	}
	s.Meta, err = StartMeta(ctx, MetaConfig{
		Dir: cfg.Dir, Cluster: id.Cluster, Name: "up", Logger: cfg.Logger, CommitDelay: cfg.CommitDelay, DigestRate: cfg.DigestRate, Unsafe: cfg.Unsafe.Meta, UnsafeNoFsync: cfg.Unsafe.NoJournal,
	})
	if err != nil {
		return s, err
	}
	if id.ServerID == 0 || id.Cluster == "" {
		if id.ServerID == 0 {
			if id.ServerID, err = s.Meta.NewServerID(ctx); err != nil {
				return s, err
			}
		}
		id.Cluster = s.Meta.cluster.ID()
		if err = id.write(cfg.Dir); err != nil {
			return s, err
		}
	}
	s.Chunk, err = StartChunkServer(ctx, ChunkConfig{
		Dir: cfg.Dir, Meta: []string{s.Meta.Addr}, Topology: "/local", Class: "ssd", Cluster: s.Meta.ClusterID(),
		ID: id.ServerID, Name: "up", Logger: cfg.Logger, Store: cfg.Unsafe.Store, UnsafeNoCap: cfg.Unsafe.NoCap, UnsafeOwnClock: cfg.Unsafe.OwnClock,
	})
	if err != nil {
		return s, err
	}
	if err = s.Meta.openVolumes(ctx); err != nil {
		return s, err
	}
	s.stopMirrors = s.Meta.runMirrors(cfg.Logger)
	s.Gateway, err = StartGateway(ctx, GatewayConfig{
		// The data directory is locked: no other process has the name, and a restart goes on with
		// the same registration.
		Meta: []string{s.Meta.Addr}, Cluster: s.Meta.cluster.ID(), Name: "up", Instance: "up", Logger: cfg.Logger,
		Kafka: cfg.Kafka, KafkaOptional: cfg.KafkaOptional, Ingest: cfg.Ingest, IngestOptional: cfg.IngestOptional, Doors: cfg.Doors, Idle: cfg.StreamIdle, Unsafe: cfg.Unsafe.Streams,
	})
	if err != nil {
		return s, err
	}
	gateways := &StreamGateways{}
	// A mount that must log in is one of 'penstock mount'.
	if s.Gateway != nil && s.Gateway.Ingest != "" && cfg.Doors.Users == "" && cfg.Doors.Cert == "" {
		gateways.Addresses = []string{s.Gateway.Ingest}
	}
	if cfg.Mount != "" {
		s.Mount, err = StartMount(ctx, MountConfig{
			NoLaunder: cfg.Unsafe.NoLaunder,
			Meta:      []string{s.Meta.Addr}, Dir: cfg.Mount, Logger: cfg.Logger, Options: cfg.MountOptions,
			WriteBuffer: cfg.WriteBuffer, MetaCache: cfg.MetaCache, Gateways: gateways,
		})
		if err != nil {
			return s, err
		}
	}
	return s, nil
}

// Failed waits for the failure of a part, and returns the part's error. Failed returns nil if
// ctx ends, or if umount removes the mount.
func (s *System) Failed(ctx context.Context) error {
	var unmounted <-chan struct{}
	if s.Mount != nil {
		unmounted = s.Mount.Done()
	}
	select {
	case err := <-s.Meta.Failed():
		return err
	case err := <-s.Chunk.Failed():
		return err
	case <-unmounted:
		return nil
	case <-ctx.Done():
		return nil
	}
}

// Close stops the parts in order: the mirrors; the mount, which flushes, also lines to the gateway; the gateway, which ends its streams; the metadata server,
// which seals open chunks and commits the journal; the chunk server. Each of these steps takes
// at most a share of the time until ctx ends, so that later steps have time left: a remote
// chunk server may be silent, and the mount waits for the chunk server until its context ends.
func (s *System) Close(ctx context.Context) error {
	var errs []error
	step := func(of float64, stop func(context.Context) error) {
		ctx, cancel := part(ctx, of)
		defer cancel()
		errs = append(errs, stop(ctx))
	}
	if s.stopMirrors != nil {
		s.stopMirrors()
	}
	if s.Mount != nil {
		step(0.6, s.Mount.Close)
	}
	if s.Gateway != nil {
		step(0.3, s.Gateway.Close)
	}
	if s.Meta != nil && s.Meta.Server != nil {
		// Chunks that the mount left open are sealed while the chunk server runs.
		step(0.3, s.Meta.Server.Settle)
	}
	if s.Meta != nil {
		step(0.7, s.Meta.Close)
	}
	if s.Chunk != nil {
		errs = append(errs, s.Chunk.Close(ctx))
	}
	if s.lock != nil {
		errs = append(errs, s.lock.Close())
	}
	return errors.Join(errs...)
}

// part returns a context that ends after the fraction of of the time until ctx ends.
func part(ctx context.Context, of float64) (context.Context, context.CancelFunc) {
	end, ok := ctx.Deadline()
	if !ok {
		return context.WithCancel(ctx)
	}
	return context.WithTimeout(ctx, time.Duration(of*float64(time.Until(end))))
}

// MountConfig configures a mount.
type MountConfig struct {
	Meta        []string
	Volume      string // name; "" is the root volume
	Path        string // in the volume
	Dir         string
	Source      string
	Options     fuse.Options
	Logger      *slog.Logger
	WriteBuffer int64
	MetaCache   int
	NoLaunder   bool // see Unsafe
	Gateways    *StreamGateways
}

// Mount is a client together with its mount.
type Mount struct {
	*fuse.Mount
	Client *penstock.Client
	// Hold: the mount was to be handed to a holder. Held reports whether a holder has the
	// mount.
	Hold bool
}

// StartMount connects to the metadata servers and mounts.
func StartMount(ctx context.Context, cfg MountConfig) (*Mount, error) {
	n := fuse.NewNotifier()
	host, err := os.Hostname()
	if err != nil {
		host = "localhost"
	}
	dial, cancel := context.WithTimeout(ctx, 30*time.Second)
	defer cancel()
	c, err := penstock.Dial(dial, penstock.Config{
		Meta: cfg.Meta, Name: fmt.Sprintf("%s: mount %s (pid %d)", host, cfg.Dir, os.Getpid()), Logger: cfg.Logger,
		WriteBuffer: cfg.WriteBuffer, MetaCache: cfg.MetaCache, Notify: n, UnsafeNoLaunder: cfg.NoLaunder,
	})
	if err != nil {
		return nil, err
	}
	if err := cfg.Gateways.Open(); err != nil {
		return nil, errors.Join(err, c.Close(ctx))
	}
	fc := fuse.Config{Tree: fuse.ClientTree(c), Notifier: n, Logger: cfg.Logger, Dir: cfg.Dir, Source: cfg.Source, Options: cfg.Options, Streams: StreamFiles(cfg.Gateways)(c)}
	if err := findRoot(ctx, c, cfg, &fc); err != nil {
		return nil, errors.Join(err, c.Close(ctx))
	}
	m, err := fuse.New(ctx, fc)
	if err != nil {
		return nil, errors.Join(err, c.Close(ctx))
	}
	return &Mount{Mount: m, Client: c}, nil
}

// findRoot sets fc.Volume and fc.Root to the directory that becomes the mount's root.
func findRoot(ctx context.Context, c *penstock.Client, cfg MountConfig, fc *fuse.Config) error {
	fc.Volume, fc.Root = meta.RootVolume, meta.RootIno
	if cfg.Volume == "" && (cfg.Path == "" || cfg.Path == "/") {
		return nil
	}
	v, err := c.VolumeByID(ctx, meta.RootVolume)
	if cfg.Volume != "" {
		v, err = c.Volume(ctx, cfg.Volume)
	}
	if err != nil {
		return err
	}
	fc.Volume = v.ID()
	if cfg.Path != "" && cfg.Path != "/" {
		e, err := v.Tree().Stat(ctx, cfg.Path)
		if err != nil {
			return err
		}
		fc.Volume, fc.Root = e.Volume, e.Attr.Ino
	}
	return nil
}

// busyGrace bounds how long Close waits for a mount in use.
const busyGrace = 10 * time.Second

// Close unmounts, flushes, and ends the session. A mount still in use after busyGrace is
// unmounted by force.
func (m *Mount) Close(ctx context.Context) error {
	return errors.Join(m.Stop(ctx, busyGrace, nil), m.Client.Close(ctx))
}
