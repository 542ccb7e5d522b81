package server

import (
	"context"
	"errors"
	"fmt"
	"net"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/admin"
	"penstock.io/penstock/meta/client"
	"penstock.io/penstock/meta/cluster"
	"penstock.io/penstock/meta/journal"
)

// homing makes a crew whose volumes go home.
func homing(t *testing.T, n int) *crew {
	t.Helper()
	return homingWith(t, n, func(*Config) {})
}

func homingWith(t *testing.T, n int, adjust func(*Config)) *crew {
	t.Helper()
	e := startEtcd(t, filepath.Join(shortDir(t), "etcd"))
	t.Cleanup(func() { e.Close() })
	c := newCrewWith(t, n, e.Client(), func(cfg *Config) {
		cfg.HomeAfter, cfg.SessionTTL = 100*time.Millisecond, 2*time.Second
		adjust(cfg)
	})
	for _, h := range c.hands {
		eventually(t, "all servers know each other", func() error {
			if v := h.cluster.View(); len(v.MetaServers) != n {
				return fmt.Errorf("%s knows %d", h.name, len(v.MetaServers))
			}
			return nil
		})
	}
	return c
}

// homeOf finds the server that is a volume's home.
func (c *crew) homeOf(v meta.VolumeID) *hand {
	return c.named(cluster.Rank(v, c.hands[0].cluster.View().MetaServers)[0].Name)
}

// spread makes volumes until every server is the home of a volume.
func (c *crew) spread() (ids []meta.VolumeID) {
	homes := map[*hand]bool{}
	for i := 0; len(homes) < len(c.hands); i++ {
		v, err := c.hands[0].cluster.CreateVolume(c.t.Context(), fmt.Sprint("v", i), meta.Policy{Replicas: 1}, 0)
		if err != nil {
			c.t.Fatal(err)
		}
		homes[c.homeOf(v.ID)] = true
		ids = append(ids, v.ID)
	}
	return ids
}

func (p *peer) file(t *testing.T, v meta.VolumeID, name string) meta.Ino {
	t.Helper()
	r, err := p.Do(t.Context(), v, meta.OpID{}, newFile(name), meta.LeaseNone)
	if err != nil {
		t.Fatalf("volume %d, %s: %v", v, name, err)
	}
	return r.Attr.Ino
}

// A single session uses volumes of several servers though the session knew one address; each
// volume is served by its home and by no other server.
func TestVolumesSpread(t *testing.T) {
	t.Parallel()
	c := homing(t, 3)
	ids := c.spread()
	p := c.hands[0].dial("a")
	for _, v := range ids {
		p.file(t, v, "x")
		for _, h := range c.hands {
			if o := h.srv.hosted.opened(v); (o != nil) != (h == c.homeOf(v)) {
				t.Errorf("volume %d is open at %s: %v; its home is %s", v, h.name, o != nil, c.homeOf(v).name)
			}
		}
	}
	// Every server gives the answers that only the owner knows.
	api := newAPIClient(t, "unix:"+c.hands[0].addr(), nil)
	for _, v := range ids {
		if _, err := api.Volumes.CheckVolume(t.Context(), &admin.CheckVolumeRequest{Volume: admin.Numbered(v)}); err != nil {
			t.Errorf("fsck of volume %d: %v", v, err)
		}
	}
	for v, err := range p.Volumes(t.Context()) {
		if err != nil {
			t.Fatal(err)
		}
		if v.ID != meta.RootVolume && v.UsedInodes < 2 {
			t.Errorf("volume %d has %d inodes by the list", v.ID, v.UsedInodes)
		}
	}
	// A volume is attached in another volume, which another server owns.
	child, parent := ids[0], ids[1]
	for _, v := range ids[1:] {
		if c.homeOf(v) != c.homeOf(child) {
			parent = v
		}
	}
	if _, err := p.ask(t.Context(), toAttach(child, parent, "sub")); err != nil {
		t.Fatal(err)
	}
	r, err := p.Do(t.Context(), parent, meta.OpID{}, &meta.Lookup{Parent: meta.RootIno, Name: "sub"}, meta.LeaseNone)
	if err != nil || r.Volume != child {
		t.Fatalf("the junction leads to %+v, %v", r, err)
	}
	if _, err := p.ask(t.Context(), toDetach(child)); err != nil {
		t.Fatal(err)
	}
}

// A server that comes back gets its volumes back, with leases and locks; its clients see neither
// an error nor an expiry.
func TestVolumesComeHome(t *testing.T) {
	t.Parallel()
	c := homing(t, 2)
	ids := c.spread()
	v := ids[0]
	h := c.homeOf(v)
	p, q := c.hands[0].dial("a"), c.hands[1].dial("b")
	ino := p.file(t, v, "x")
	l := meta.Lock{Ino: ino, Owner: 1, Type: meta.LockWrite, End: 1<<63 - 1}
	p.locks = []meta.Lock{l}
	if err := p.SetLock(t.Context(), v, l, false); err != nil {
		t.Fatal(err)
	}
	q.file(t, v, "y")
	h.stop()
	p.file(t, v, "while it is away")
	if err := q.SetLock(t.Context(), v, l, false); !errors.Is(err, meta.WouldBlock) {
		t.Fatalf("a's lock did not go with the volume: %v", err)
	}
	h.start()
	eventually(t, "the volume comes home", func() error {
		if o := h.srv.hosted.opened(v); o == nil {
			return errors.New("not yet")
		}
		return nil
	})
	if err := q.SetLock(t.Context(), v, l, false); !errors.Is(err, meta.WouldBlock) {
		t.Fatalf("a's lock did not come home: %v", err)
	}
	for _, name := range []string{"x", "y", "while it is away"} {
		if _, err := q.Do(t.Context(), v, meta.OpID{}, &meta.Lookup{Parent: meta.RootIno, Name: name}, meta.LeaseNone); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
	if p.expired+q.expired > 0 {
		t.Errorf("sessions expired: %d, %d", p.expired, q.expired)
	}
}

// A server that stops has the next server take its volumes: when the first server is gone, the
// volumes are open on the next server, and a client that asks there earlier waits for its answer.
func TestStoppingServerIsRelieved(t *testing.T) {
	t.Parallel()
	c := homing(t, 3)
	v := c.spread()[0]
	h := c.homeOf(v)
	p := c.hands[0].dial("a")
	p.file(t, v, "x")
	view := c.hands[0].cluster.View().MetaServers
	next := c.named(cluster.Rank(v, view)[1].Name)
	eventually(t, "the next one follows", func() error {
		if _, warm := next.srv.standbys.position(v); !warm {
			return errors.New("not yet")
		}
		return nil
	})
	// The volume's journal stands still: every client that asks meanwhile waits.
	o := h.srv.hosted.opened(v)
	o.mu.Lock()
	stopped := make(chan struct{})
	go func() { h.stop(); close(stopped) }()
	eventually(t, "the next one is about to take it", func() error {
		if next.srv.hosted.coming(v) == nil {
			return errors.New("not yet")
		}
		return nil
	})
	if at, mine := next.srv.hosted.home(v); !mine {
		t.Errorf("%s believes that the home is %s, which told it that it stops", next.name, at.Name)
	}
	asked := make(chan error, 1)
	go func() {
		_, err := next.srv.hosted.ownerFor(context.Background(), v)
		asked <- err
	}()
	select {
	case err := <-asked:
		t.Errorf("who asked the next owner too early was answered: %v", err)
	case <-time.After(50 * time.Millisecond):
	}
	o.mu.Unlock()
	if err := <-asked; err != nil {
		t.Errorf("who asked the next owner too early: %v", err)
	}
	<-stopped
	if next.srv.hosted.opened(v) == nil {
		t.Errorf("nobody but %s stopped, and %s did not take its volume", h.name, next.name)
	}
	p.file(t, v, "y")
	if p.expired > 0 {
		t.Error("the session expired")
	}
}

func (c *crew) named(name string) *hand {
	for _, h := range c.hands {
		if h.name == name {
			return h
		}
	}
	c.t.Fatalf("%s is none of ours", name)
	return nil
}

// A server that is asked to take a volume which the owner keeps, or a volume that no owner gives,
// answers with the owner's name; the volume stays.
func TestTakingFails(t *testing.T) {
	t.Parallel()
	c := homing(t, 2)
	v := c.spread()[0]
	h := c.homeOf(v)
	other := c.hands[0]
	if other == h {
		other = c.hands[1]
	}
	p := h.dial("a")
	p.file(t, v, "x")
	_, err := other.srv.hosted.openAs(t.Context(), v, cluster.VolumeActive, "unix:"+filepath.Join(c.dir, "nobody"))
	if !errors.Is(err, meta.NotOwner) {
		t.Errorf("an owner that can't be asked: %v", err)
	}
	o := h.srv.hosted.opened(v)
	o.mu.Lock()
	o.leaving = make(chan struct{}) // as if another had asked before
	o.mu.Unlock()
	if _, err = other.srv.hosted.openAs(t.Context(), v, cluster.VolumeActive, "unix:"+h.addr()); !errors.Is(err, meta.NotOwner) {
		t.Errorf("an owner that refuses: %v", err)
	}
	o.mu.Lock()
	close(o.leaving)
	o.leaving = nil
	o.mu.Unlock()
	p.file(t, v, "y")
	// The prepared copy follows again.
	eventually(t, "it follows again", func() error {
		if _, warm := other.srv.standbys.position(v); !warm {
			return errors.New("not yet")
		}
		return nil
	})
}

// fullDisk is a cluster whose local copies can't be opened while full is set.
type fullDisk struct {
	Cluster
	full *atomic.Bool
}

func (d fullDisk) OpenStore(ctx context.Context, v meta.VolumeID, cp journal.Checkpoint, have bool) (Store, error) {
	if d.full.Load() {
		return nil, meta.E("open store", meta.NoSpace, fmt.Sprint(v), nil)
	}
	return d.Cluster.OpenStore(ctx, v, cp, have)
}

// A home that can't open a volume has another server serve the volume, and takes the volume back
// when the home can. If no server can open the volume, the client gets the reason.
func TestHomeThatCantOpen(t *testing.T) {
	t.Parallel()
	full := map[string]*atomic.Bool{"m0": {}, "m1": {}}
	c := homingWith(t, 2, func(cfg *Config) {
		cfg.Followers = -1 // each opening opens the store
		cfg.Cluster = fullDisk{cfg.Cluster, full[cfg.Name]}
	})
	row, err := c.hands[0].cluster.CreateVolume(t.Context(), "v", meta.Policy{Replicas: 1}, 0)
	if err != nil {
		t.Fatal(err)
	}
	v := row.ID
	home, other := c.homeOf(v), c.hands[0]
	if other == home {
		other = c.hands[1]
	}
	full[home.name].Store(true)
	p := home.dial("a")
	p.file(t, v, "x")
	if home.srv.hosted.opened(v) != nil || other.srv.hosted.opened(v) == nil {
		t.Fatal("the volume is not served elsewhere")
	}
	full[home.name].Store(false)
	eventually(t, "it comes home", func() error {
		if home.srv.hosted.opened(v) == nil {
			return errors.New("not yet")
		}
		return nil
	})
	p.file(t, v, "y")

	full[home.name].Store(true)
	full[other.name].Store(true)
	if row, err = c.hands[0].cluster.CreateVolume(t.Context(), "w", meta.Policy{Replicas: 1}, 0); err != nil {
		t.Fatal(err)
	}
	for _, h := range c.hands {
		if _, err := h.srv.hosted.ownerFor(t.Context(), row.ID); h == c.homeOf(row.ID) && !errors.Is(err, meta.NoSpace) {
			t.Errorf("%s says %v", h.name, err)
		}
	}
	full[home.name].Store(false)
	full[other.name].Store(false)
	p.file(t, row.ID, "z")
}

// A client that is cut off from the owner while other clients reach the owner is expired, and
// told so on return: its leases are void, and no session waits for the client longer than a lease
// lasts.
func TestClientCutOff(t *testing.T) {
	t.Parallel()
	s := newSiteTTL(t, 3*time.Second)
	side := filepath.Join(s.dir, "side.sock")
	l, err := net.Listen("unix", side)
	if err != nil {
		t.Fatal(err)
	}
	cut := &listenerWithCut{Listener: l}
	go s.srv.Serve(cut)
	p := &peer{leases: map[meta.Ino]meta.LeaseMode{}}
	p.Session, err = client.Dial(t.Context(), client.Config{Addrs: []string{"unix:" + side}, Name: "cut off", Handler: p})
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		ctx, cancel := context.WithTimeout(context.Background(), time.Second)
		defer cancel()
		p.Close(ctx)
	}()
	q := s.dial("other")
	ino := p.create(t, "x").Attr.Ino
	if err := p.Sync(t.Context(), 1); err != nil {
		t.Fatal(err)
	}
	cut.cut(true)
	began := time.Now()
	// Other sessions wait for the exclusive lease, not for ever.
	if _, err := q.Do(t.Context(), 1, meta.OpID{}, &meta.Open{Ino: ino}, meta.LeaseExclusive); err != nil {
		t.Fatal(err)
	}
	if d := time.Since(began); d > time.Minute {
		t.Errorf("the other waited %v", d)
	}
	if left := p.LeaseLeft(1); left > 0 {
		t.Errorf("the one that was cut off believes in its lease for another %v while the other has it", left)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
	_, err = p.Do(ctx, 1, meta.OpID{}, &meta.GetAttr{Ino: ino}, meta.LeaseShared)
	cancel()
	if !errors.Is(err, meta.Interrupted) {
		t.Errorf("without an owner there is an answer: %v", err)
	}
	cut.cut(false)
	eventually(t, "it hears that it expired", func() error {
		p.mu.Lock()
		defer p.mu.Unlock()
		if p.expired != 1 {
			return fmt.Errorf("%d times", p.expired)
		}
		return nil
	})
	p.create(t, "goes on")
}

// listenerWithCut hangs up on every client while cut is set.
type listenerWithCut struct {
	net.Listener

	mu    sync.Mutex
	conns []net.Conn
	off   bool
}

func (l *listenerWithCut) Accept() (net.Conn, error) {
	for {
		c, err := l.Listener.Accept()
		if err != nil {
			return nil, err
		}
		l.mu.Lock()
		off := l.off
		l.conns = append(l.conns, c)
		l.mu.Unlock()
		if !off {
			return c, nil
		}
		c.Close()
	}
}

func (l *listenerWithCut) cut(off bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.off = off
	for _, c := range l.conns {
		c.Close()
	}
	l.conns = nil
}
