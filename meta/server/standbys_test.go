package server

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/blobdir"
	"penstock.io/penstock/meta/client"
	"penstock.io/penstock/meta/cluster"
	"penstock.io/penstock/meta/cluster/embedded"
	"penstock.io/penstock/meta/journal/etcd"
	"penstock.io/penstock/meta/state"
	"penstock.io/penstock/test/operator"
)

// crew is several servers on the same etcd, each with stores of its own; the blobs of checkpoints
// are shared. A crew has no chunk servers.
type crew struct {
	t     *testing.T
	dir   string
	cli   *clientv3.Client
	blob  meta.Blob
	hands []*hand
	// watch, if set, stands between a server and etcd.
	watcher func(clientv3.Watcher) clientv3.Watcher
	adjust  func(*Config) // nil, or a test's changes to the configuration
}

// hand is a server of the crew.
type hand struct {
	c       *crew
	name    string
	dir     string
	cli     *clientv3.Client
	cluster *cluster.Cluster
	shared  *state.Shared
	lease   *etcd.Lease
	owners  *etcd.Owners
	mu      sync.Mutex
	srv     *Server
	serving chan error
	stopReg context.CancelFunc // ends the goroutine that keeps the server's registration
}

// startEtcd runs an etcd in this process. Close the etcd in a Cleanup registered before the
// servers' Cleanup, not in a defer, which runs before all cleanups: a view that a server reads
// while etcd closes finds no store, and etcd panics.
func startEtcd(t *testing.T, dir string) *embedded.Server {
	t.Helper()
	s, err := embedded.Start(embedded.Config{Dir: dir})
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// shortDir is a folder with a path short enough for a socket's address.
func shortDir(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "ps")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	return dir
}

func newCrew(t *testing.T, n int, cli *clientv3.Client) *crew {
	t.Helper()
	return newCrewWith(t, n, cli, nil)
}

func newCrewWith(t *testing.T, n int, cli *clientv3.Client, adjust func(*Config)) *crew {
	t.Helper()
	c := &crew{t: t, dir: shortDir(t), cli: cli, adjust: adjust}
	blobs, err := blobdir.Open(filepath.Join(c.dir, "blobs"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { blobs.Close() })
	c.blob = blobs
	t.Cleanup(func() {
		for _, h := range c.hands {
			h.stop()
		}
	})
	c.add(n)
	return c
}

// add starts n servers.
func (c *crew) add(n int) {
	c.t.Helper()
	for range n {
		name := fmt.Sprint("m", len(c.hands))
		h := &hand{c: c, name: name, dir: filepath.Join(c.dir, name)}
		c.hands = append(c.hands, h)
		h.start()
	}
}

// handTTL outlasts a machine that stands still for a while; a server that ends gives its lease
// back.
const handTTL = 15 * time.Second

func (h *hand) addr() string { return filepath.Join(h.dir, "s") }

// start runs a server that owns nothing yet.
func (h *hand) start() {
	t := h.c.t
	t.Helper()
	fail := func(err error) {
		if err != nil {
			t.Helper()
			t.Fatal(err)
		}
	}
	ctx := context.Background()
	fail(os.MkdirAll(filepath.Join(h.dir, "scratch"), 0o700))
	h.cli = h.c.cli
	if h.c.watcher != nil {
		own := *h.c.cli
		own.Watcher = h.c.watcher(h.c.cli)
		h.cli = &own
	}
	var err error
	h.cluster, err = cluster.Open(ctx, h.cli, cluster.Config{})
	fail(err)
	if _, err := h.cluster.Volume(ctx, meta.RootVolume); errors.Is(err, meta.NoSuchVolume) {
		_, err = h.cluster.CreateVolume(ctx, "root", meta.Policy{Replicas: 1}, 0)
		fail(err)
	}
	h.lease, err = etcd.NewLease(ctx, h.cli, etcd.LeaseConfig{TTL: handTTL})
	fail(err)
	h.owners = etcd.NewOwners(h.cli, h.lease, etcd.OwnersConfig{Prefix: h.cluster.Prefix(), Server: h.name, Addr: "unix:" + h.addr()})
	fail(h.cluster.RegisterMetaServer(ctx, h.lease.ID(), h.name, "unix:"+h.addr()))
	h.shared = state.NewShared(8<<20, 100, nil)
	level := slog.LevelError + 4
	if testing.Verbose() {
		level = slog.LevelInfo
	}
	log := slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: level})).With("at", h.name)
	backend := &Backend{
		Cluster: h.cluster, Shared: h.shared, Dir: h.dir, Blob: h.c.blob, Logger: log,
		Owners: func(ctx context.Context) (*etcd.Owners, error) {
			h.mu.Lock()
			defer h.mu.Unlock()
			if h.lease.Left() > 0 {
				return h.owners, nil
			}
			lease, err := etcd.NewLease(ctx, h.cli, etcd.LeaseConfig{TTL: handTTL})
			if err != nil {
				return nil, err
			}
			if err := h.cluster.RegisterMetaServer(ctx, lease.ID(), h.name, "unix:"+h.addr()); err != nil {
				return nil, err
			}
			h.lease = lease
			h.owners = etcd.NewOwners(h.cli, lease, etcd.OwnersConfig{Prefix: h.cluster.Prefix(), Server: h.name, Addr: "unix:" + h.addr()})
			return h.owners, nil
		},
	}
	cfg := Config{
		Name: h.name, Cluster: backend, Blob: h.c.blob, ScratchDir: filepath.Join(h.dir, "scratch"),
		SessionTTL: 3 * time.Second, CommitDelay: 2 * time.Millisecond, Logger: log, Addr: "unix:" + h.addr(),
		HomeAfter: -1, // these tests decide the owners
		Dead:      func(string, uint32, uint64) bool { return false },
	}
	if h.c.adjust != nil {
		h.c.adjust(&cfg)
	}
	h.srv, err = New(ctx, cfg)
	fail(err)
	os.Remove(h.addr())
	l, err := net.Listen("unix", h.addr())
	fail(err)
	h.serving = make(chan error, 1)
	srv, serving := h.srv, h.serving
	go func() { serving <- srv.Serve(l) }()
	reg, stop := context.WithCancel(ctx)
	h.stopReg = stop
	go func() {
		for reg.Err() == nil {
			backend.Owners(reg)
			select {
			case <-reg.Done():
			case <-time.After(100 * time.Millisecond):
			}
		}
	}()
}

// stop ends a server in order.
func (h *hand) stop() {
	if h.srv == nil {
		return
	}
	h.stopReg() // the registration may be asking an etcd that does not answer, while others wait
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	h.srv.Close(ctx)
	h.rest()
}

// crash ends a server as SIGKILL would, but the server gives its lease back.
func (h *hand) crash() {
	h.srv.Abandon()
	h.rest()
}

func (h *hand) rest() {
	<-h.serving
	h.stopReg()
	h.srv = nil
	h.mu.Lock()
	defer h.mu.Unlock()
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	h.lease.Close(ctx)
	h.cluster.Close()
	h.shared.Close()
}

// own makes a server take a volume, as an owner.
func (h *hand) own(v meta.VolumeID) *owner {
	h.c.t.Helper()
	o, err := h.srv.hosted.open(h.c.t.Context(), v)
	if err != nil {
		h.c.t.Fatal(err)
	}
	return o
}

// yield hands a volume over in order; the server goes on as the volume's standby.
func (h *hand) yield(v meta.VolumeID) {
	h.c.t.Helper()
	o := h.srv.hosted.opened(v)
	if err := o.handOver(h.c.t.Context(), ""); err != nil {
		h.c.t.Fatal(err)
	}
	eventually(h.c.t, "it is retired", func() error {
		if h.srv.hosted.opened(v) != nil {
			return errors.New("not yet")
		}
		return nil
	})
}

func (h *hand) dial(name string) *peer {
	h.c.t.Helper()
	p := &peer{leases: map[meta.Ino]meta.LeaseMode{}}
	sess, err := client.Dial(h.c.t.Context(), client.Config{Addrs: []string{"unix:" + h.addr()}, Name: name, Handler: p})
	if err != nil {
		h.c.t.Fatal(err)
	}
	p.Session, p.Operator = sess, operator.Beside(h.c.t, "unix:"+h.addr(), nil, sess)
	h.c.t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), time.Second)
		defer cancel()
		sess.Close(ctx)
	})
	return p
}

// at waits until a server's standby stands at an entry.
func (h *hand) at(v meta.VolumeID, seq meta.Seq) {
	h.c.t.Helper()
	var got meta.Seq
	for deadline := time.Now().Add(time.Minute); time.Now().Before(deadline); time.Sleep(5 * time.Millisecond) {
		pos, _ := h.srv.standbys.position(v)
		if got = pos.Seq; got >= seq {
			return
		}
	}
	h.srv.standbys.mu.Lock()
	taken := len(h.srv.standbys.taken)
	h.srv.standbys.mu.Unlock()
	h.c.t.Fatalf("%s stands at %d, want %d; it follows %+v, owns %v, has taken %d, and sees %v", h.name, got, seq, h.srv.Status().Standbys, h.srv.hosted.opened(v) != nil, taken, h.cluster.View().MetaServers)
}

// sum is the digest of everything in a store.
func sum(t *testing.T, st Store) [32]byte {
	t.Helper()
	h := sha256.New()
	if err := st.Scan([]byte{1}, bytes.Repeat([]byte{0xff}, 64), func(k, v []byte) bool {
		fmt.Fprintf(h, "%d %x %d %x;", len(k), k, len(v), v)
		return true
	}); err != nil {
		t.Fatal(err)
	}
	return [32]byte(h.Sum(nil))
}

// same stops the following and the owning of a volume everywhere and compares the stores byte by
// byte: all must stand at the same position, with the same content.
func (c *crew) same(v meta.VolumeID) {
	t := c.t
	t.Helper()
	for _, h := range c.hands {
		if o := h.srv.hosted.opened(v); o != nil {
			if err := o.flush(t.Context()); err != nil {
				t.Fatal(err)
			}
			h.yield(v)
		}
	}
	last, err := etcd.ReadStore(c.cli, "/penstock/default", v, nil).Last(t.Context())
	if err != nil || last.Seq == 0 {
		t.Fatal(last.Seq, err)
	}
	seq := last.Seq
	var first [32]byte
	for i, h := range c.hands {
		h.at(v, seq)
		st := h.srv.standbys.take(v)
		if st == nil {
			t.Fatalf("%s has no store", h.name)
		}
		if st.Applied().Seq != seq {
			t.Fatalf("%s stands at %v, others at %d", h.name, st.Applied(), seq)
		}
		got := sum(t, st)
		if i == 0 {
			first = got
		} else if got != first {
			t.Fatalf("%s has diverged at entry %d", h.name, seq)
		}
		if err := h.srv.standbys.give(v, st); err != nil {
			t.Fatal(err)
		}
	}
}

func (p *peer) files(t *testing.T, prefix string, n int) {
	t.Helper()
	for i := range n {
		p.create(t, fmt.Sprint(prefix, i))
	}
	if err := p.Sync(t.Context(), 1); err != nil {
		t.Fatal(err)
	}
}

// Of three servers, one owns: the other two are at the owner's position, byte by byte. The volume
// moves around; opening the volume takes no time; the old owner follows on with its own store.
func TestFollowersAreHot(t *testing.T) {
	t.Parallel()
	dir := shortDir(t)
	s := startEtcd(t, dir)
	t.Cleanup(func() { s.Close() })
	c := newCrew(t, 3, s.Client())
	best := time.Hour // the time that a followed volume took to open; 100 ms on a machine at rest
	for round := range 6 {
		h := c.hands[round%3]
		began := time.Now()
		o := h.own(1)
		took := time.Since(began)
		t.Logf("round %d: %s opened the volume in %v", round, h.name, took)
		if round >= 3 {
			best = min(best, took)
		}
		p := h.dial(fmt.Sprint("client", round))
		p.files(t, fmt.Sprint("r", round, "-"), 200)
		if round == 3 {
			if err := o.checkpoints.checkpoint(t.Context()); err != nil {
				t.Fatal(err)
			}
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		p.Session.Close(ctx)
		cancel()
		o.flush(t.Context())
		for _, other := range c.hands {
			if other != h {
				other.at(1, o.durableNow())
			}
		}
		c.same(1)
	}
	if best > time.Second {
		t.Errorf("a followed volume took %v to open at best", best)
	}
	for _, h := range c.hands {
		if n := h.srv.standbys.reloads.Load(); n > 1 {
			t.Errorf("%s loaded its copy %d times", h.name, n)
		}
	}
}

func (o *owner) durableNow() meta.Seq {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.durable
}
