package stall

import (
	"bytes"
	"context"
	"encoding/binary"
	"fmt"
	"os"
	"slices"
	"strconv"
	"sync"
	"syscall"
	"testing"
	"time"

	"penstock.io/penstock"
	"penstock.io/penstock/meta"
	"penstock.io/penstock/test/child"
	"penstock.io/penstock/test/slow"
)

func TestMain(m *testing.M) { os.Exit(child.Main[role](m)) }

// rounds of each fault; PENSTOCK_STALL_ROUNDS asks for more.
func rounds() int {
	if n, err := strconv.Atoi(os.Getenv("PENSTOCK_STALL_ROUNDS")); err == nil {
		return n
	}
	return 2
}

// load is a writer that times its steps and remembers the bytes that fsync acknowledged.
type load struct {
	name string
	v    *penstock.Volume
	step func(l *load, ctx context.Context) error

	mu      sync.Mutex
	files   []*written
	begun   time.Time // of the step under way
	longest time.Duration
	steps   int
	err     error
}

// written is a file with its acknowledged part.
type written struct {
	ino    meta.Ino
	seed   uint64
	size   uint64 // written
	synced uint64
}

// fill makes the bytes of a file from off on: each 8 tell file and place.
func fill(p []byte, seed, off uint64) {
	for i := 0; i+8 <= len(p); i += 8 {
		binary.LittleEndian.PutUint64(p[i:], seed<<40^(off+uint64(i)))
	}
}

func (l *load) create(ctx context.Context) (*written, error) {
	l.mu.Lock()
	n := uint64(len(l.files) + 1)
	l.mu.Unlock()
	i, err := l.v.CreateOpen(ctx, nil, meta.Create{Parent: meta.RootIno, Name: fmt.Sprint(l.name, n), Mode: meta.TypeRegular | 0o644}, uint32(os.O_WRONLY))
	if err != nil {
		return nil, err
	}
	f := &written{ino: i.Entry.Attr.Ino, seed: n + uint64(l.name[0])<<8}
	l.mu.Lock()
	l.files = append(l.files, f)
	l.mu.Unlock()
	return f, nil
}

func (l *load) write(ctx context.Context, f *written, n int, sync bool) error {
	p := make([]byte, n)
	fill(p, f.seed, f.size)
	if _, err := l.v.Write(ctx, nil, f.ino, p, int64(f.size), false, false); err != nil {
		return err
	}
	f.size += uint64(n)
	if !sync {
		return nil
	}
	if err := l.v.Fsync(ctx, f.ino, true); err != nil {
		return err
	}
	f.synced = f.size
	return nil
}

func (l *load) last() *written {
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.files) == 0 {
		return nil
	}
	return l.files[len(l.files)-1]
}

func (l *load) end(ctx context.Context, f *written) {
	l.v.Release(ctx, f.ino, uint32(os.O_WRONLY))
}

// loads are the ways to write: appends to one file with fsync (open-ended, own
// chunk), small files (packed chunks), a stream (own chunks, written behind).
func loads(v *penstock.Volume) []*load {
	return []*load{
		{name: "append", v: v, step: func(l *load, ctx context.Context) (err error) {
			f := l.last()
			if f == nil {
				if f, err = l.create(ctx); err != nil {
					return err
				}
			}
			return l.write(ctx, f, 4096, true)
		}},
		{name: "small", v: v, step: func(l *load, ctx context.Context) error {
			f, err := l.create(ctx)
			if err != nil {
				return err
			}
			defer l.end(ctx, f)
			return l.write(ctx, f, 24<<10, true)
		}},
		{name: "tream", v: v, step: func(l *load, ctx context.Context) (err error) {
			f := l.last()
			if f == nil || f.size >= 64<<20 {
				if f != nil {
					l.end(ctx, f)
				}
				if f, err = l.create(ctx); err != nil {
					return err
				}
			}
			time.Sleep(5 * time.Millisecond)
			return l.write(ctx, f, 256<<10, f.size%(4<<20) == 0)
		}},
	}
}

func (l *load) run(ctx context.Context) {
	for ctx.Err() == nil {
		l.mu.Lock()
		l.begun = time.Now()
		l.mu.Unlock()
		err := l.step(l, context.WithoutCancel(ctx))
		l.mu.Lock()
		l.longest = max(l.longest, time.Since(l.begun))
		l.steps++
		if err != nil {
			l.err = err
		}
		l.mu.Unlock()
		if err != nil {
			return
		}
	}
}

// take returns the longest step since the last call, a step under way included.
func (l *load) take() (time.Duration, int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	d := max(l.longest, time.Since(l.begun))
	n := l.steps
	l.longest, l.steps = 0, 0
	return d, n
}

// done is the number of steps since the last take.
func (l *load) done() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.steps
}

func (l *load) failed() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.err
}

// verify reads all files with another client.
func (l *load) verify(t *testing.T, v *penstock.Volume) {
	t.Helper()
	var total uint64
	for _, f := range l.files {
		e, err := v.GetAttr(t.Context(), f.ino)
		if err != nil {
			t.Errorf("%s: %v", l.name, err)
			return
		}
		if e.Attr.Size < f.synced || e.Attr.Size > f.size {
			t.Errorf("DATA: %s, inode %d: %d bytes; %d were synced, %d written", l.name, f.ino, e.Attr.Size, f.synced, f.size)
		}
		got, want := make([]byte, 1<<20), make([]byte, 1<<20)
		for off := uint64(0); off < e.Attr.Size; off += uint64(len(got)) {
			n, err := v.Read(t.Context(), f.ino, got, int64(off))
			fill(want, f.seed, off)
			if err != nil || n != int(min(e.Attr.Size-off, uint64(len(got)))) || !bytes.Equal(got[:n], want[:n]) {
				t.Errorf("DATA: %s, inode %d: %d bytes at %d are wrong: %v", l.name, f.ino, n, off, err)
				return
			}
			total += uint64(n)
		}
	}
	t.Logf("%s: %d files, %d bytes are right", l.name, len(l.files), total)
}

// TestStall: faults hit a writer's chunk servers, one after the other.
func TestStall(t *testing.T) {
	// One server more than a chunk has replicas, or two: with one, the next failure needs the
	// server of the previous failure again.
	servers := 5
	if os.Getenv("PENSTOCK_STALL_SERVERS") == "4" {
		servers = 4
	}
	s := newSite(t, servers)
	s.volume("data", 3)
	for _, fault := range []struct {
		name       string
		limit      time.Duration
		hurt, heal func(c *chunkServer)
	}{
		{"killed", 2 * time.Second, func(c *chunkServer) { c.kill() }, func(c *chunkServer) { c.start() }},
		{"stopped", 4 * time.Second, func(c *chunkServer) { c.signal(syscall.SIGSTOP) }, func(c *chunkServer) { c.signal(syscall.SIGCONT) }},
		{"cut off", 4 * time.Second, func(c *chunkServer) { c.relay.hold(true) }, func(c *chunkServer) { c.relay.hold(false) }},
	} {
		t.Run(fault.name, func(t *testing.T) {
			c, v := s.client("writer", "data")
			ls := loads(v)
			for _, l := range ls {
				l.name = fault.name[:1] + l.name
			}
			ctx, stop := context.WithCancel(t.Context())
			var wg sync.WaitGroup
			for _, l := range ls {
				wg.Go(func() { l.run(ctx) })
			}
			time.Sleep(1500 * time.Millisecond)
			stalls := map[string][]time.Duration{}
			over := map[string]bool{} // stalled for longer than allowed
			var quiet time.Duration
			speed, err := slow.StartOn(s.dir)
			if err != nil {
				t.Fatal(err)
			}
			defer speed.Close()
			for r := range rounds() {
				for _, l := range ls {
					d, _ := l.take()
					quiet = max(quiet, d)
				}
				victim := s.servers[r%servers]
				speed.Factor()
				fault.hurt(victim)
				time.Sleep(fault.limit + time.Second)
				for _, l := range ls {
					s.eventually(l.name+" goes on after the fault", func() bool { return l.done() > 0 || l.failed() != nil })
				}
				factor := speed.Factor()
				for _, l := range ls {
					d, _ := l.take()
					stalls[l.name] = append(stalls[l.name], d)
					over[l.name] = over[l.name] || d > slow.Bound(fault.limit, factor)
				}
				t.Logf("work takes %.1f times as long as on a quiet machine", factor)
				fault.heal(victim)
				s.eventually("the server is back", func() bool { return s.there() == servers })
				time.Sleep(500 * time.Millisecond)
			}
			stop()
			wg.Wait()
			for _, l := range ls {
				if err := l.failed(); err != nil {
					t.Errorf("%s failed: %v", l.name, err)
				}
				d := stalls[l.name]
				slices.Sort(d)
				t.Logf("%s: %d rounds, stalls median %v, longest %v (between faults %v)", l.name, len(d), d[len(d)/2], d[len(d)-1], quiet)
				if over[l.name] {
					t.Errorf("%s stood still for %v, the limit is %v on a quiet machine", l.name, d, fault.limit)
				}
			}
			cctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
			defer cancel()
			if err := c.Close(cctx); err != nil {
				t.Error(err)
			}
			rc, rv := s.client("reader", "data")
			for _, l := range ls {
				l.verify(t, rv)
			}
			if err := rc.Close(cctx); err != nil {
				t.Error(err)
			}
		})
	}
}

// TestNowhereToGo: with too few servers left for three replicas writers wait;
// when servers come back they go on, and nobody is told of an error.
func TestNowhereToGo(t *testing.T) {
	s := newSite(t, 4)
	s.volume("data", 3)
	c, v := s.client("writer", "data")
	ls := loads(v)[:2]
	ctx, stop := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	for _, l := range ls {
		wg.Go(func() { l.run(ctx) })
	}
	time.Sleep(time.Second)
	s.servers[0].kill()
	s.servers[1].kill()
	time.Sleep(4 * time.Second)
	for _, l := range ls {
		l.take()
		if err := l.failed(); err != nil {
			t.Errorf("%s failed: %v", l.name, err)
		}
	}
	s.servers[0].start()
	s.eventually("writers go on", func() bool {
		for _, l := range ls {
			if l.done() < 5 && l.failed() == nil {
				return false
			}
		}
		return true
	})
	stop()
	wg.Wait()
	for _, l := range ls {
		if err := l.failed(); err != nil {
			t.Errorf("%s failed: %v", l.name, err)
		}
	}
	cctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	if err := c.Close(cctx); err != nil {
		t.Error(err)
	}
	rc, rv := s.client("reader", "data")
	for _, l := range ls {
		l.verify(t, rv)
	}
	if err := rc.Close(cctx); err != nil {
		t.Error(err)
	}
}
