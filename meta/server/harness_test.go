package server

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/client"
	"penstock.io/penstock/meta/cluster"
	"penstock.io/penstock/meta/journal"
	"penstock.io/penstock/meta/state"
)

// fakeCluster is one volume whose journal is in memory and outlives servers.
type fakeCluster struct {
	dir    string
	vol    cluster.Volume
	log    *journal.Memory
	shared *state.Shared

	mu   sync.Mutex
	lost chan struct{}
}

func (f *fakeCluster) ID() string { return "test" }
func (f *fakeCluster) Volumes(context.Context) ([]cluster.Volume, error) {
	return []cluster.Volume{f.vol}, nil
}
func (f *fakeCluster) Volume(_ context.Context, id meta.VolumeID) (cluster.Volume, error) {
	if id != f.vol.ID {
		return cluster.Volume{}, meta.E("volume", meta.NoSuchVolume, "", nil)
	}
	return f.vol, nil
}
func (f *fakeCluster) VolumeByName(_ context.Context, name string) (cluster.Volume, error) {
	return f.vol, nil
}
func (f *fakeCluster) CreateVolume(context.Context, string, meta.Policy, meta.Time) (cluster.Volume, error) {
	return cluster.Volume{}, errors.ErrUnsupported
}
func (f *fakeCluster) UpdateVolume(_ context.Context, _ meta.VolumeID, change func(*cluster.Volume) error) (cluster.Volume, error) {
	return f.vol, change(&f.vol)
}
func (f *fakeCluster) NewServerID(context.Context) (meta.ServerID, error) { return 1, nil }
func (f *fakeCluster) DeleteVolume(context.Context, meta.VolumeID) error {
	return errors.ErrUnsupported
}
func (f *fakeCluster) CapKeys(context.Context) ([]meta.CapKey, error) {
	return []meta.CapKey{{ID: 1, Secret: make([]byte, 32)}}, nil
}
func (f *fakeCluster) PutAsideStore(meta.VolumeID) error {
	return os.Rename(f.dir, f.dir+".aside")
}
func (f *fakeCluster) DropStore(meta.VolumeID) error { return nil }
func (f *fakeCluster) Relieve(context.Context) error { return nil }

type fakeOwn struct {
	term meta.Term
	lost chan struct{}
}

func (o fakeOwn) Term() meta.Term               { return o.term }
func (o fakeOwn) Lost() <-chan struct{}         { return o.lost }
func (o fakeOwn) Left() time.Duration           { return time.Hour }
func (o fakeOwn) PredecessorDone() bool         { return true }
func (o fakeOwn) Release(context.Context) error { return nil }
func (o fakeOwn) Yield(context.Context) error   { return nil }

func (f *fakeCluster) Own(context.Context, meta.VolumeID) (Ownership, Journal, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	st, term := f.log.Take()
	lost := make(chan struct{})
	f.lost = lost
	return fakeOwn{term, lost}, journal.New(f.vol.ID, st, lost), nil
}

func (f *fakeCluster) OpenStore(_ context.Context, v meta.VolumeID, _ journal.Checkpoint, _ bool) (Store, error) {
	st, err := state.Open(f.dir, v, f.shared)
	if errors.Is(err, meta.NotFound) {
		st, err = state.Create(f.dir, v, f.shared)
	}
	if err != nil {
		return nil, err
	}
	return store{st, f.shared}, nil
}

// site is a server that can be stopped and started on the same cluster.
type site struct {
	t       *testing.T
	cluster *fakeCluster
	addr    string
	dir     string
	srv     *Server
	done    chan error
	ttl     time.Duration
	adjust  func(*Config) // nil, or what a test wants otherwise
}

func newSite(t *testing.T) *site { return newSiteTTL(t, time.Second) }

func newSiteTTL(t *testing.T, ttl time.Duration) *site {
	t.Helper()
	dir := t.TempDir()
	s := &site{t: t, dir: dir, ttl: ttl, addr: filepath.Join(dir, "m.sock")}
	s.cluster = &fakeCluster{
		dir: filepath.Join(dir, "store"), vol: cluster.Volume{ID: 1, Name: "root", State: cluster.VolumeActive, Policy: meta.Policy{Replicas: 1}},
		log: journal.NewMemory(1), shared: state.NewShared(8<<20, 100, nil),
	}
	s.start()
	t.Cleanup(func() {
		if s.srv != nil {
			s.srv.Close(context.Background())
			<-s.done
		}
		s.cluster.shared.Close()
	})
	return s
}

func (s *site) start() {
	s.t.Helper()
	level := slog.LevelError
	if testing.Verbose() {
		level = slog.LevelDebug
	}
	cfg := Config{
		Name: "m", Cluster: s.cluster, ScratchDir: s.dir, SessionTTL: s.ttl, CommitDelay: 5 * time.Millisecond,
		Logger: slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: level})),
		Dead:   func(string, uint32, uint64) bool { return false },
	}
	for c := range strings.SplitSeq(os.Getenv("PENSTOCK_CONTROL"), ",") {
		switch c {
		case "meta-norecall":
			cfg.Unsafe.NoRecall = true
		case "meta-nowait":
			cfg.Unsafe.NoWait = true
		}
	}
	if s.adjust != nil {
		s.adjust(&cfg)
	}
	srv, err := New(context.Background(), cfg)
	if err != nil {
		s.t.Fatal(err)
	}
	os.Remove(s.addr)
	l, err := net.Listen("unix", s.addr)
	if err != nil {
		s.t.Fatal(err)
	}
	s.srv, s.done = srv, make(chan error, 1)
	go func() { s.done <- srv.Serve(l) }()
	if err := srv.OpenAll(context.Background()); err != nil {
		s.t.Fatal(err)
	}
}

// crash stops the server as SIGKILL would: nothing is flushed or released.
func (s *site) crash() {
	s.srv.Abandon()
	<-s.done
	s.srv = nil
}

// peer is a client that obeys recalls at once unless told to hold them.
type peer struct {
	*client.Session
	mu      sync.Mutex
	leases  map[meta.Ino]meta.LeaseMode
	hold    bool
	held    []func()
	recalls int
	expired int
	orphans []meta.Ino
}

func (p *peer) Granted(_ meta.VolumeID, g meta.Grant) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.leases[g.Ino] = g.Mode
}

func (p *peer) Recall(r meta.Recall, done func()) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.recalls++
	drop := func() {
		p.mu.Lock()
		p.leases[r.Ino] = min(p.leases[r.Ino], r.Keep)
		p.mu.Unlock()
		done()
	}
	if p.hold {
		p.held = append(p.held, drop)
		return
	}
	go drop()
}

func (p *peer) Expired(error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.expired++
	p.leases = map[meta.Ino]meta.LeaseMode{}
}

func (p *peer) Orphaned(_ meta.VolumeID, ino meta.Ino) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.orphans = append(p.orphans, ino)
}

func (p *peer) Claims(yield func(meta.VolumeID, []meta.Grant, []meta.Lock)) {
	var g []meta.Grant
	for ino, m := range p.leases {
		if m > meta.LeaseNone {
			g = append(g, meta.Grant{Ino: ino, Mode: m})
		}
	}
	yield(1, g, nil)
}

func (p *peer) mode(ino meta.Ino) meta.LeaseMode {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.leases[ino]
}

func (s *site) dial(name string) *peer {
	s.t.Helper()
	p := &peer{leases: map[meta.Ino]meta.LeaseMode{}}
	sess, err := client.Dial(s.t.Context(), client.Config{Addrs: []string{"unix:" + s.addr}, Name: name, Handler: p})
	if err != nil {
		s.t.Fatal(err)
	}
	p.Session = sess
	s.t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 3*time.Second)
		defer cancel()
		sess.Close(ctx)
	})
	return p
}

func (p *peer) do(t *testing.T, op meta.Op, want meta.LeaseMode) *meta.Result {
	t.Helper()
	r, err := p.Do(t.Context(), 1, meta.OpID{}, op, want)
	if err != nil {
		t.Fatalf("%T: %v", op, err)
	}
	return r
}

func (p *peer) create(t *testing.T, name string) *meta.Result {
	t.Helper()
	return p.do(t, &meta.Create{Parent: meta.RootIno, Name: name, Mode: meta.TypeRegular | 0o644, Excl: true}, meta.LeaseExclusive)
}
