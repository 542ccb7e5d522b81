package server

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/cluster/embedded"
	trio "penstock.io/penstock/test/etcd"
)

func TestMain(m *testing.M) {
	trio.Main()
	// The tests mostly wait: for leases, looks, syncs. The command line may say otherwise.
	if err := flag.Set("test.parallel", "4"); err != nil {
		panic(err)
	}
	os.Exit(m.Run())
}

// busy creates files and waits for each file to be durable, and notes the worst pause and the
// failures; reads of an existing file go on beside the creations.
type busy struct {
	p      *peer
	prefix string
	ctx    context.Context
	cancel context.CancelFunc
	wg     sync.WaitGroup

	made               atomic.Int64
	mu                 sync.Mutex
	worstWrite, worstR time.Duration
	refused, failed    int
	last               error
	names              []string
}

func (h *hand) busy(prefix string) *busy {
	b := &busy{p: h.dial(prefix), prefix: prefix}
	b.p.create(h.c.t, prefix+"-there")
	b.ctx, b.cancel = context.WithCancel(context.Background())
	b.wg.Go(func() {
		for n := 0; b.ctx.Err() == nil; n++ {
			began := time.Now()
			name := fmt.Sprint(prefix, n)
			_, err := b.p.Do(b.ctx, 1, meta.OpID{}, newFile(name), meta.LeaseNone)
			if err == nil {
				err = b.p.Sync(b.ctx, 1)
			}
			if b.ctx.Err() != nil {
				return
			}
			b.mu.Lock()
			b.worstWrite = max(b.worstWrite, time.Since(began))
			switch {
			case err == nil:
				b.made.Add(1)
				b.names = append(b.names, name)
			case errors.Is(err, meta.NoSpace):
				b.refused++
				b.last = err
			default:
				b.failed++
				b.last = err
			}
			b.mu.Unlock()
		}
	})
	b.wg.Go(func() {
		for b.ctx.Err() == nil {
			began := time.Now()
			_, err := b.p.Do(b.ctx, 1, meta.OpID{}, &meta.Lookup{Parent: meta.RootIno, Name: prefix + "-there"}, meta.LeaseNone)
			if b.ctx.Err() != nil {
				return
			}
			b.mu.Lock()
			b.worstR = max(b.worstR, time.Since(began))
			if err != nil {
				b.failed++
				b.last = err
			}
			b.mu.Unlock()
			time.Sleep(5 * time.Millisecond)
		}
	})
	return b
}

func (b *busy) stop() {
	b.cancel()
	b.wg.Wait()
}

// more waits until busy has made n further files.
func (b *busy) more(t *testing.T, n int64) {
	t.Helper()
	from := b.made.Load()
	for deadline := time.Now().Add(3 * time.Minute); b.made.Load() < from+n; time.Sleep(5 * time.Millisecond) {
		if time.Now().After(deadline) {
			b.mu.Lock()
			defer b.mu.Unlock()
			t.Fatalf("only %d of %d files: %v", b.made.Load()-from, n, b.last)
		}
	}
}

// Members of etcd die, stand still and come back, the leader before all: no
// file is lost, nothing fails, copies are the same to the byte.
func TestEtcdMembersComeAndGo(t *testing.T) {
	t.Parallel()
	x := trio.Start(t, 0)
	c := newCrew(t, 3, x.Client())
	c.hands[0].own(1)
	b := c.hands[0].busy("f")
	b.more(t, 20)
	worst := func(what string) {
		b.mu.Lock()
		t.Logf("%-40s worst write %v, worst read %v, %d files", what, b.worstWrite.Round(time.Millisecond), b.worstR.Round(time.Millisecond), b.made.Load())
		b.worstWrite, b.worstR = 0, 0
		b.mu.Unlock()
	}
	worst("nothing")
	follower := func() *trio.Member {
		l := x.Leader()
		for _, m := range x.Members {
			if m != l {
				return m
			}
		}
		return nil
	}
	m := follower()
	m.Kill()
	b.more(t, 20)
	worst("a member killed")
	m.Start(t)
	b.more(t, 20)
	worst("it comes back")
	if m = x.Leader(); m != nil {
		m.Kill()
		b.more(t, 20)
		worst("the leader killed")
		m.Start(t)
		b.more(t, 20)
		worst("it comes back")
	}
	m = follower()
	m.Pause()
	b.more(t, 20)
	m.Resume()
	worst("a member stopped")
	if m = x.Leader(); m != nil {
		m.Pause()
		b.more(t, 20)
		m.Resume()
		worst("the leader stopped")
	}
	b.more(t, 50)
	worst("after all")
	b.stop()
	if b.failed > 0 {
		// An owner that lost its lease (the leader stood still for longer) takes the volume
		// again; its clients wait meanwhile and get no error.
		t.Errorf("%d operations failed: %v", b.failed, b.last)
	}
	c.check(b)
	c.same(1)
}

// check finds every file that the client was told is durable.
func (c *crew) check(b *busy) {
	c.t.Helper()
	p := c.serving().dial("checker")
	for _, n := range b.names {
		if _, err := p.Do(c.t.Context(), 1, meta.OpID{}, &meta.Lookup{Parent: meta.RootIno, Name: n}, meta.LeaseNone); err != nil {
			c.t.Fatalf("%s, which was durable: %v", n, err)
		}
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	p.Session.Close(ctx)
	b.p.Session.Close(ctx)
}

// serving is the server that owns volume 1; if no server owns volume 1, the first server takes
// the volume.
func (c *crew) serving() *hand {
	for _, h := range c.hands {
		if h.srv.hosted.opened(1) != nil {
			return h
		}
	}
	c.hands[0].own(1)
	return c.hands[0]
}

// etcd is full of old revisions: reads go on, changes are refused with the reason, and the volume
// recovers without an administrator.
func TestEtcdNoSpaceByItself(t *testing.T) {
	x := trio.Start(t, 48<<20)
	cli := x.Client()
	c := newCrew(t, 2, cli)
	for _, h := range c.hands {
		h.srv.cfg.Cluster.(*Backend).Space = embedded.NewReliever(cli, x.Endpoints()).Relieve
	}
	c.hands[0].own(1)
	b := c.hands[0].busy("f")
	b.more(t, 10)
	junk := make([]byte, 1<<20)
	for n := 0; ; n++ {
		if _, err := cli.Put(t.Context(), "/junk", string(junk)); err != nil {
			break
		}
		if n > 200 {
			t.Fatal("etcd is never full")
		}
	}
	full := time.Now()
	eventually(t, "etcd says that it is full", func() error {
		if is, err := embedded.NoSpace(t.Context(), cli); err != nil || !is {
			return errors.Join(errors.New("not yet"), err)
		}
		return nil
	})
	b.more(t, 20)
	after := time.Since(full)
	b.stop()
	t.Logf("changes again after %v; %d were refused, last: %v; worst read %v", after.Round(time.Millisecond), b.refused, b.last, b.worstR.Round(time.Millisecond))
	if b.failed > 0 {
		t.Errorf("%d operations failed otherwise: %v", b.failed, b.last)
	}
	c.check(b)
	c.same(1)
}

// A follower was away; the journal was trimmed and etcd compacted meanwhile. The follower's copy
// is behind the checkpoint, or damaged, or gone: the follower makes a new copy.
func TestFollowerFallsBehind(t *testing.T) {
	dir := shortDir(t)
	s := startEtcd(t, dir)
	t.Cleanup(func() { s.Close() })
	c := newCrew(t, 3, s.Client())
	o := c.hands[0].own(1)
	p := c.hands[0].dial("a")
	p.files(t, "a", 50)
	lag := c.hands[1]
	lag.at(1, o.durableNow())
	for i, spoil := range []func(store string){
		func(string) {},
		func(store string) { os.RemoveAll(store) },
		func(store string) {
			tables, err := filepath.Glob(filepath.Join(store, "store", "*.sst"))
			if err != nil || len(tables) == 0 {
				t.Fatal("no table file to damage", err)
			}
			for _, f := range tables {
				b, err := os.ReadFile(f)
				if err != nil {
					t.Fatal(err)
				}
				for at := 0; at < len(b); at += 50 {
					b[at] ^= 0x40
				}
				if err := os.WriteFile(f, b, 0o600); err != nil {
					t.Fatal(err)
				}
			}
		},
		func(store string) { os.Remove(filepath.Join(store, "FORMAT")) },
	} {
		lag.stop()
		p.files(t, fmt.Sprint("b", i, "-"), 50)
		if i != 2 {
			if err := o.checkpoints.checkpoint(t.Context()); err != nil {
				t.Fatal(err)
			}
		}
		p.files(t, fmt.Sprint("c", i, "-"), 50)
		spoil(filepath.Join(lag.dir, "volume-00000001"))
		lag.start()
		lag.at(1, o.durableNow())
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Second)
	defer cancel()
	p.Session.Close(ctx)
	c.same(1)
}

// The copy of a follower that is behind is being loaded while the journal goes on being trimmed
// under the follower.
func TestTrimmedWhileLoading(t *testing.T) {
	t.Parallel()
	dir := shortDir(t)
	s := startEtcd(t, dir)
	t.Cleanup(func() { s.Close() })
	c := newCrew(t, 2, s.Client())
	o := c.hands[0].own(1)
	p := c.hands[0].dial("a")
	p.files(t, "a", 50)
	for round := range 5 {
		c.hands[1].stop()
		if err := os.RemoveAll(c.hands[1].dir); err != nil {
			t.Fatal(err)
		}
		if err := o.checkpoints.checkpoint(t.Context()); err != nil {
			t.Fatal(err)
		}
		c.hands[1].start()
		for i := range 8 {
			p.files(t, fmt.Sprint("r", round, "-", i, "-"), 10)
			if err := o.checkpoints.checkpoint(t.Context()); err != nil {
				t.Fatal(err)
			}
		}
		c.hands[1].at(1, o.durableNow())
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Second)
	defer cancel()
	p.Session.Close(ctx)
	c.same(1)
}

// etcd is put back to a copy of yesterday: nobody writes over what was
// acknowledged since; with the right etcd all goes on.
func TestEtcdSetBack(t *testing.T) {
	t.Parallel()
	dir := shortDir(t)
	s := startEtcd(t, filepath.Join(dir, "e"))
	t.Cleanup(func() {
		if s != nil {
			s.Close()
		}
	})
	c := newCrew(t, 2, s.Client())
	c.hands[0].own(1)
	p := c.hands[0].dial("a")
	p.files(t, "a", 20)
	leave := func() { // or the client comes back and asks another server for its volume
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		p.Session.Close(ctx)
	}
	leave()
	for _, h := range c.hands {
		h.stop()
	}
	s.Close()
	s = nil
	copyDir := func(from, to string) {
		t.Helper()
		if out, err := exec.Command("cp", "-a", from, to).CombinedOutput(); err != nil {
			t.Fatal(string(out), err)
		}
	}
	copyDir(filepath.Join(dir, "e"), filepath.Join(dir, "old"))
	s = startEtcd(t, filepath.Join(dir, "e"))
	c.cli = s.Client()
	for _, h := range c.hands {
		h.start()
	}
	o := c.hands[0].own(1)
	p = c.hands[0].dial("b")
	p.files(t, "b", 20)
	leave()
	seq := o.durableNow()
	c.hands[1].at(1, seq)
	for _, h := range c.hands {
		h.stop()
	}
	s.Close()
	s = nil
	if err := os.Rename(filepath.Join(dir, "e"), filepath.Join(dir, "new")); err != nil {
		t.Fatal(err)
	}
	s = startEtcd(t, filepath.Join(dir, "old"))
	c.cli = s.Client()
	for _, h := range c.hands {
		h.start()
		if _, err := h.srv.hosted.open(t.Context(), 1); !errors.Is(err, meta.Ahead) {
			t.Fatalf("%s opens a volume whose journal was set back: %v", h.name, err)
		}
	}
	for _, h := range c.hands {
		h.stop()
	}
	s.Close()
	s = nil
	s = startEtcd(t, filepath.Join(dir, "new"))
	c.cli = s.Client()
	for _, h := range c.hands {
		h.start()
	}
	c.hands[1].own(1)
	p = c.hands[1].dial("c")
	for _, name := range []string{"a19", "b19"} {
		p.do(t, &meta.Lookup{Parent: meta.RootIno, Name: name}, meta.LeaseNone)
	}
	for _, h := range c.hands {
		if aside, _ := filepath.Glob(filepath.Join(h.dir, "*.damaged*")); len(aside) > 0 {
			t.Fatal("a copy was put aside", aside)
		}
	}
	leave()
	c.same(1)
}

// liar is a watch that drops, repeats, reorders and delays events, and falls silent without an
// error.
type liar struct {
	clientv3.Watcher
	mu  sync.Mutex
	rng *rand.Rand
}

func (l *liar) draw(n int) int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.rng.IntN(n)
}

func (l *liar) Watch(ctx context.Context, key string, opts ...clientv3.OpOption) clientv3.WatchChan {
	in, out := l.Watcher.Watch(ctx, key, opts...), make(chan clientv3.WatchResponse)
	go func() {
		defer close(out)
		var held []clientv3.WatchResponse
		send := func(r clientv3.WatchResponse) {
			select {
			case out <- r:
			case <-ctx.Done():
			}
		}
		for r := range in {
			switch l.draw(8) {
			case 0, 1: // lost
			case 2:
				send(r)
				send(r)
			case 3, 4:
				held = append(held, r)
			case 5:
				time.Sleep(time.Duration(l.draw(30)) * time.Millisecond)
				send(r)
			case 6:
				for len(held) > 0 {
					i := l.draw(len(held))
					send(held[i])
					held = append(held[:i], held[i+1:]...)
				}
				send(r)
			case 7:
				if l.draw(20) == 0 {
					for range in { // silent for ever
					}
					return
				}
				send(r)
			}
		}
	}()
	return out
}

// Watches lie: copies and views still come to where the journal is, and owners
// never diverge. The volume moves around all the while.
func TestWatchesLie(t *testing.T) {
	t.Parallel()
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	rng := rand.New(rand.NewPCG(seed, 1))
	dir := shortDir(t)
	s := startEtcd(t, dir)
	t.Cleanup(func() { s.Close() })
	c := newCrew(t, 0, s.Client())
	n := uint64(0)
	c.watcher = func(w clientv3.Watcher) clientv3.Watcher {
		n++
		return &liar{Watcher: w, rng: rand.New(rand.NewPCG(seed, n))}
	}
	c.add(3)
	for round := range 8 {
		h := c.hands[rng.IntN(3)]
		o := h.own(1)
		p := h.dial(fmt.Sprint("client", round))
		for i := range 4 {
			p.files(t, fmt.Sprint("r", round, "-", i, "-"), 20)
			if rng.IntN(4) == 0 {
				if err := o.checkpoints.checkpoint(t.Context()); err != nil {
					t.Fatal(err)
				}
			}
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		p.Session.Close(ctx)
		cancel()
		o.flush(t.Context())
		if rng.IntN(2) == 0 {
			other := c.hands[rng.IntN(3)]
			if other != h {
				other.crash()
				other.start()
			}
		}
		c.same(1)
	}
	// The views know of a volume that is made now.
	v, err := c.hands[0].cluster.CreateVolume(t.Context(), "late", meta.Policy{Replicas: 1}, 0)
	if err != nil {
		t.Fatal(err)
	}
	for _, h := range c.hands {
		eventually(t, "the view of "+h.name, func() error {
			if _, ok := h.cluster.View().Volume(v.ID); !ok {
				return errors.New("it does not know the new volume")
			}
			return nil
		})
	}
}
