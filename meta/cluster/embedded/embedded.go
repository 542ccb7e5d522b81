// Package embedded runs etcd inside the process, for a single machine. The package owns etcd's
// folder, sockets and settings, and the lock on the data directory.
//
// The folder has member/ (etcd's own) and, while etcd runs, two Unix sockets of mode 0600: c
// for clients and p for peers. Nobody uses p, but etcd requires a peer socket.
package embedded

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/url"
	"os"
	"path/filepath"
	"sync"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.etcd.io/etcd/server/v3/embed"
	"go.etcd.io/etcd/server/v3/etcdserver/api/v3client"
	"go.uber.org/zap"

	"penstock.io/penstock/meta"
)

// maxSocketPath is the size of sun_path in bytes, including the final NUL.
const maxSocketPath = 108

// Defaults of Config.
const (
	// DefaultQuota is the largest quota that etcd's authors recommend. Owners keep their
	// journals far smaller: if entries alone filled the quota, no checkpoint could be recorded,
	// and without a checkpoint no entry can be trimmed.
	DefaultQuota = 8 << 30
	// snapshotEvery and catchUp bound the raft entries that etcd keeps in memory: with entries
	// of 700 KiB, etcd's default of 5,000 would be gigabytes.
	snapshotEvery = 200
	catchUp       = 50
	// A single member elects itself after one election timeout, and so starts in 30 to 80 ms.
	// Ticks of 25 ms cost 0.7 % of a processor, ticks of 10 ms twice as much. A longer timeout
	// has no advantage.
	tickMs     = 25
	electionMs = 125
	// maxRequest leaves room for an entry's key and comparisons, and for a
	// checkpoint record.
	maxRequest = 1536 << 10
	walFiles   = 2
)

// Config says how the server runs.
type Config struct {
	Dir    string       // etcd's folder; created if missing
	Quota  int64        // size of the database from which on etcd refuses writes, in bytes; zero means DefaultQuota
	Logger *slog.Logger // warnings and errors; nil discards
	// UnsafeNoFsync gives up durability, for positive controls.
	UnsafeNoFsync bool
	// StartTimeout bounds the start after the opening of files; zero means 30 s.
	StartTimeout time.Duration
	// OpenTimeout bounds the opening of files, which reads all files; zero means 10 min.
	OpenTimeout time.Duration
}

// Server is a running etcd with one member.
type Server struct {
	etcd     *embed.Etcd
	life     *life
	dir      string
	client   *clientv3.Client
	endpoint string
	stop     context.CancelFunc // stops the goroutine in wg; nil: none runs
	wg       sync.WaitGroup
}

// EndpointIn returns the Endpoint of a server that runs in a folder, given by an absolute
// path.
func EndpointIn(dir string) string { return "unix://" + filepath.Join(dir, "c") }

// Start is StartContext for callers that never give up.
func Start(cfg Config) (*Server, error) { return StartContext(context.Background(), cfg) }

// StartContext runs etcd in cfg.Dir, which the caller has locked, and waits until etcd serves,
// or ctx ends. Errors: Invalid (the path is too long for a socket), Corrupt, IO, Unavailable
// (etcd did not start in time), Interrupted. After the last two, etcd may work in the folder
// until the process ends.
func StartContext(ctx context.Context, cfg Config) (*Server, error) {
	const op = "start embedded etcd"
	if cfg.Logger == nil {
		cfg.Logger = slog.New(slog.DiscardHandler)
	}
	if cfg.Quota == 0 {
		cfg.Quota = DefaultQuota
	}
	if cfg.StartTimeout == 0 {
		cfg.StartTimeout = 30 * time.Second
	}
	if cfg.OpenTimeout == 0 {
		cfg.OpenTimeout = 10 * time.Minute
	}
	dir, err := filepath.Abs(cfg.Dir)
	if err != nil {
		return nil, meta.E(op, meta.Invalid, cfg.Dir, err)
	}
	socket := filepath.Join(dir, "c")
	if len(socket) >= maxSocketPath {
		return nil, meta.E(op, meta.Invalid, dir, fmt.Errorf("the path of its socket has %d bytes, the kernel takes %d: choose a shorter data directory", len(socket), maxSocketPath-1))
	}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, meta.E(op, fileKind(err), dir, err)
	}
	if err := os.Chmod(dir, 0o700); err != nil {
		return nil, meta.E(op, fileKind(err), dir, err)
	}

	ending := &endings{cause: make(chan string, 1)}
	l := new(life)
	if _, err := os.Stat(filepath.Join(dir, "member")); errors.Is(err, os.ErrNotExist) {
		l.newUntil = time.Now().Add(firstRecords)
	}
	c := embed.NewConfig()
	c.Name = "penstock"
	c.Dir = dir
	client := url.URL{Scheme: "unix", Path: socket}
	// For peers etcd uses only the host. With an empty host etcd would listen on an abstract
	// socket, which every user can reach.
	peer := url.URL{Scheme: "unix", Host: filepath.Join(dir, "p")}
	// Advertised addresses must have the form host:port; nobody dials the addresses of a single
	// member.
	nobody := url.URL{Scheme: "http", Host: "127.0.0.1:1"}
	c.ListenClientUrls, c.AdvertiseClientUrls = []url.URL{client}, []url.URL{nobody}
	c.ListenPeerUrls, c.AdvertisePeerUrls = []url.URL{peer}, []url.URL{nobody}
	c.InitialCluster = c.Name + "=" + nobody.String()
	c.InitialClusterToken = "penstock"
	c.TickMs, c.ElectionMs = tickMs, electionMs
	c.SnapshotCount, c.SnapshotCatchUpEntries = snapshotEvery, catchUp
	c.MaxSnapFiles, c.MaxWalFiles = walFiles, walFiles
	c.QuotaBackendBytes = cfg.Quota
	c.MaxRequestBytes = maxRequest
	c.AutoCompactionMode, c.AutoCompactionRetention = "revision", "0"
	c.EnableGRPCGateway = false
	// NewConfig leaves this zero: etcd would log each request as a slow request.
	c.WarningUnaryRequestDuration = embed.DefaultWarningUnaryRequestDuration
	c.UnsafeNoFsync = cfg.UnsafeNoFsync
	c.ZapLoggerBuilder = embed.NewZapLoggerBuilder(zap.New(&bridge{log: cfg.Logger, dir: dir, life: l}, zap.WithFatalHook(fatal{ending}), zap.WithPanicHook(panics{ending})))

	e, err := openEtcd(ctx, c, &cfg, ending)
	if err != nil {
		return nil, err
	}
	timeout := time.NewTimer(cfg.StartTimeout)
	defer timeout.Stop()
	select {
	case <-e.Server.ReadyNotify():
	case err := <-e.Err():
		return nil, errors.Join(meta.E(op, meta.IO, dir, err), closeEtcd(e, dir))
	case <-timeout.C:
		return nil, errors.Join(meta.E(op, meta.Unavailable, dir, fmt.Errorf("it did not come up in %v: see whether its disk takes writes", cfg.StartTimeout)), closeEtcd(e, dir))
	case <-ctx.Done():
		return nil, errors.Join(meta.E(op, meta.Interrupted, dir, fmt.Errorf("it was not up yet: %w", context.Cause(ctx))), closeEtcd(e, dir))
	}
	for _, s := range []string{client.Path, peer.Host} {
		if err := os.Chmod(s, 0o600); err != nil {
			e.Close()
			return nil, meta.E(op, fileKind(err), s, err)
		}
	}
	s := &Server{etcd: e, life: l, dir: dir, client: v3client.New(e.Server), endpoint: EndpointIn(dir)}
	s.reserveSpace(dir, cfg.Logger)
	return s, nil
}

// catch turns the panics with which etcd answers damaged files into errors.
func catch(f func() error) (err error) {
	defer func() {
		if r := recover(); r != nil {
			err = meta.E("start", meta.Corrupt, "", fmt.Errorf("etcd gave up: %v", r))
		}
	}()
	return f()
}

// Client returns a client within the process, without a socket and without encoding. Close
// closes it.
func (s *Server) Client() *clientv3.Client { return s.client }

// Endpoint returns the socket by which other processes of the same user reach the server, for
// clientv3.Config.Endpoints.
func (s *Server) Endpoint() string { return s.endpoint }

// Err returns a channel that receives when the server has stopped without Close.
func (s *Server) Err() <-chan error { return s.etcd.Err() }

// DBSize returns the size of etcd's database file, and the used bytes in the file.
func (s *Server) DBSize(ctx context.Context) (size, used int64, err error) {
	r, err := s.client.Status(ctx, s.endpoint)
	if err != nil {
		return 0, 0, meta.E("ask etcd", meta.Unavailable, "", err)
	}
	return r.DbSize, r.DbSizeInUse, nil
}

// Close stops the server and waits.
func (s *Server) Close() error {
	if s.stop != nil {
		s.stop()
		s.wg.Wait()
	}
	err := s.client.Close()
	if errors.Is(err, context.Canceled) {
		err = nil // the client's own context, which its Close cancels
	}
	s.life.closing.Store(true)
	return errors.Join(err, closeEtcd(s.etcd, s.dir))
}
