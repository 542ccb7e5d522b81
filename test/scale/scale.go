// Package scale measures the cost of metadata with one, two and three metadata servers, as
// processes of their own over one etcd: creates of several clients in several volumes, the
// processor time of servers, followers and etcd for each, and the bytes that go through the
// journal.
package scale

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"penstock.io/penstock/cmd/penstock/local"
	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/admin"
	metaclient "penstock.io/penstock/meta/client"
	"penstock.io/penstock/meta/cluster/embedded"
	"penstock.io/penstock/meta/peer"
	"penstock.io/penstock/test/child"
)

// role is the kind of a child process: an etcd, or a metadata server.
type role struct {
	Dir       string
	Etcd      string // endpoint; empty: be the etcd
	Name      string
	Followers int
}

// Run serves until the parent closes its end.
func (c role) Run() error {
	quiet := slog.New(slog.DiscardHandler)
	if c.Etcd == "" {
		s, err := embedded.Start(embedded.Config{Dir: c.Dir, Logger: quiet})
		if err != nil {
			return err
		}
		defer s.Close()
		child.Ready(s.Endpoint())
		child.Orphaned()
		return nil
	}
	m, release, err := local.RunMeta(context.Background(), local.MetaConfig{
		Dir: c.Dir, Etcd: []string{c.Etcd}, Name: c.Name, Creds: peer.Insecure(), Logger: quiet, Followers: c.Followers,
	})
	if err != nil {
		return err
	}
	child.Ready(m.Addr)
	child.Orphaned()
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	if err := m.Close(ctx); err != nil {
		return err
	}
	return release()
}

// cpuOf is the processor time of a child, in seconds.
func cpuOf(t testing.TB, p *child.Process) float64 {
	t.Helper()
	d, err := p.CPU()
	if err != nil {
		t.Fatal(err)
	}
	return d.Seconds()
}

// handler caches nothing: recalls are answered at once.
type handler struct{}

func (handler) Granted(meta.VolumeID, meta.Grant)    {}
func (handler) Recall(_ meta.Recall, done func())    { done() }
func (handler) Expired(_ []meta.VolumeID, err error) { panic(fmt.Sprint("a session expired: ", err)) }

// result is the result of a run.
type result struct {
	made    int64
	rate    float64 // creates a second
	all     float64 // µs of processor time of all metadata servers for a create
	busiest float64 // µs of the busiest server, for a create of all
	etcd    float64 // µs
	client  float64 // µs
}

// measure creates files for a while: each of volumes has a client with a few
// requests on the way.
func measure(t testing.TB, servers, volumes, followers int, length time.Duration) result {
	t.Helper()
	dir, err := os.MkdirTemp("", "scale") // short: sockets have short paths
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	etcd := child.Start(t, role{Dir: filepath.Join(dir, "etcd"), Name: "etcd"})
	var metas []*child.Process
	var addrs []string
	for i := range servers {
		name := fmt.Sprint("m", i+1)
		metas = append(metas, child.Start(t, role{Dir: filepath.Join(dir, name), Etcd: etcd.Addr, Name: name, Followers: followers}))
		addrs = append(addrs, metas[i].Addr)
	}
	ctx := t.Context()
	var sessions []*metaclient.Session
	var ids []meta.VolumeID
	for v := range volumes {
		s, err := metaclient.Dial(ctx, metaclient.Config{Addrs: addrs, Name: fmt.Sprint("client ", v), Handler: handler{}})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
			defer cancel()
			if err := s.Close(ctx); err != nil {
				t.Error(err)
			}
		})
		sessions = append(sessions, s)
	}
	api, err := admin.New(admin.Config{Addrs: addrs})
	if err != nil {
		t.Fatal(err)
	}
	defer api.Close()
	for v := range volumes {
		made, err := api.CreateVolume(ctx, fmt.Sprint("v", v), meta.Policy{Replicas: 1}, meta.VolumeWords{})
		if err != nil {
			t.Fatal(err)
		}
		ids = append(ids, made.ID)
	}
	var made atomic.Int64
	work := func(length time.Duration, round string) {
		t.Helper()
		var wg sync.WaitGroup
		stop := time.Now().Add(length)
		for v := range volumes {
			for k := range 4 {
				wg.Go(func() {
					for i := 0; time.Now().Before(stop); i++ {
						op := &meta.Create{Parent: meta.RootIno, Name: fmt.Sprintf("%s-%d-%d", round, k, i), Mode: meta.TypeRegular | 0o644}
						if _, err := sessions[v].Do(ctx, ids[v], meta.OpID{}, op, meta.LeaseNone); err != nil {
							t.Errorf("create: %v", err)
							return
						}
						made.Add(1)
					}
				})
			}
		}
		wg.Wait()
		for v := range volumes {
			if err := sessions[v].Sync(ctx, ids[v]); err != nil {
				t.Errorf("sync: %v", err)
			}
		}
	}
	// Volumes settle on their servers first.
	work(length/3, "warm")
	time.Sleep(min(length/3, 3*time.Second))
	made.Store(0)
	before := make([]float64, servers)
	for i, m := range metas {
		before[i] = cpuOf(t, m)
	}
	etcdBefore, selfBefore, begun := cpuOf(t, etcd), selfCPU(), time.Now()
	work(length, "run")
	took := time.Since(begun).Seconds()
	n := float64(made.Load())
	if n == 0 {
		t.Fatal("nothing was created")
	}
	r := result{made: made.Load(), rate: n / took, etcd: 1e6 * (cpuOf(t, etcd) - etcdBefore) / n, client: 1e6 * (selfCPU() - selfBefore) / n}
	for i, m := range metas {
		used := 1e6 * (cpuOf(t, m) - before[i]) / n
		r.all += used
		r.busiest = max(r.busiest, used)
	}
	return r
}

// rss is the resident memory of the process, in bytes.
func rss(t testing.TB, p *child.Process) float64 {
	t.Helper()
	b, err := os.ReadFile("/proc/" + strconv.Itoa(p.PID()) + "/statm")
	if err != nil {
		t.Fatal(err)
	}
	pages, err := strconv.ParseFloat(strings.Fields(string(b))[1], 64)
	if err != nil {
		t.Fatal(err)
	}
	return pages * float64(os.Getpagesize())
}

// sessions opens n sessions that each hold a lease on a directory of their own and then only stay
// alive, and returns the server's cost of a session: bytes of memory, and processor time a
// second.
func sessions(t testing.TB, n int, length time.Duration) (memory, cpu float64) {
	t.Helper()
	dir, err := os.MkdirTemp("", "scale")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	etcd := child.Start(t, role{Dir: filepath.Join(dir, "etcd"), Name: "etcd"})
	m := child.Start(t, role{Dir: filepath.Join(dir, "m1"), Etcd: etcd.Addr, Name: "m1", Followers: -1})
	ctx := t.Context()
	open := func(name string) *metaclient.Session {
		s, err := metaclient.Dial(ctx, metaclient.Config{Addrs: []string{m.Addr}, Name: name, Handler: handler{}})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
			defer cancel()
			if err := s.Close(ctx); err != nil {
				t.Error(err)
			}
		})
		if _, err := s.Do(ctx, meta.RootVolume, meta.OpID{}, &meta.Create{Parent: meta.RootIno, Name: name, Mode: meta.TypeDir | 0o755}, meta.LeaseShared); err != nil {
			t.Fatal(err)
		}
		return s
	}
	open("first")
	time.Sleep(time.Second)
	before := rss(t, m)
	for i := range n {
		open(fmt.Sprint("s", i))
	}
	time.Sleep(time.Second)
	used := cpuOf(t, m)
	time.Sleep(length)
	return (rss(t, m) - before) / float64(n), (cpuOf(t, m) - used) / length.Seconds() / float64(n)
}

func selfCPU() float64 {
	var u syscall.Rusage
	if syscall.Getrusage(syscall.RUSAGE_SELF, &u) != nil {
		return 0
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano()).Seconds()
}
