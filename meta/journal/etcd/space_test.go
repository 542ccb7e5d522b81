package etcd_test

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/cluster/embedded"
	"penstock.io/penstock/meta/journal"
	"penstock.io/penstock/meta/journal/etcd"
)

// scribe appends to the log of a volume and trims the log.
type scribe struct {
	t   testing.TB
	own *etcd.Ownership
	log *journal.Journal
	at  journal.Position
}

func newScribe(t testing.TB, o *etcd.Owners, v meta.VolumeID) *scribe {
	t.Helper()
	own, err := o.Await(t.Context(), v)
	if err != nil {
		t.Fatal(err)
	}
	s := &scribe{t: t, own: own, log: etcd.OpenLog(own)}
	if cp, ok, err := s.log.Checkpoint(t.Context()); err != nil {
		t.Fatal(err)
	} else if ok {
		s.at = cp.Position
	}
	if err := s.log.Read(t.Context(), s.at, func(e journal.Entry) error { s.at = e.Position(); return nil }); err != nil {
		t.Fatal(err)
	}
	return s
}

func (s *scribe) append(ctx context.Context, payload []byte) error {
	e := journal.Next(s.own.Volume, s.at, s.own.Term, payload)
	err := s.log.Append(ctx, e)
	if err == nil {
		s.at = e.Position()
	}
	return err
}

func (s *scribe) trim(ctx context.Context) error {
	return s.log.Trim(ctx, journal.Checkpoint{Volume: s.own.Volume, Position: s.at, Term: s.own.Term})
}

func noise(rng *rand.Rand, n int) []byte {
	b := make([]byte, n)
	for i := 0; i+8 <= n; i += 8 {
		x := rng.Uint64()
		for k := range 8 {
			b[i+k] = byte(x >> (8 * k))
		}
	}
	return b
}

// 200 MB of journal go through etcd; the database stays small without defragmentation.
func TestChurnStaysBounded(t *testing.T) {
	s := server(t)
	o := owners(t, s.Client(), "a", etcd.LeaseConfig{TTL: time.Minute})
	rng := rand.New(rand.NewPCG(1, 2))
	w := newScribe(t, o, 1)
	const total, trimEvery = 200 << 20, 8 << 20
	var most int64
	written, since, began := 0, 0, time.Now()
	for n := 0; written < total; n++ {
		size := []int{300, 20 << 10, 200 << 10, journal.MaxPayload}[n%4]
		if err := w.append(t.Context(), noise(rng, size)); err != nil {
			t.Fatal(err)
		}
		written += size
		if since += size; since < trimEvery {
			continue
		}
		since = 0
		if err := w.trim(t.Context()); err != nil {
			t.Fatal(err)
		}
		size64, _, err := s.DBSize(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		most = max(most, size64)
	}
	t.Logf("%d MB in %v; database at most %d MB", written>>20, time.Since(began), most>>20)
	if most > 100<<20 {
		t.Fatalf("the database grew to %d bytes", most)
	}
	if n, err := w.log.Size(t.Context()); err != nil || n > trimEvery+journal.MaxPayload*2 {
		t.Fatal(n, err)
	}
}

// etcd fills up: appends are refused with nothing written, reads go on; after
// space was recovered and the log trimmed everything works again.
func TestNoSpace(t *testing.T) {
	dir, err := os.MkdirTemp("", "etcd")
	if err != nil {
		t.Fatal(err)
	}
	defer os.RemoveAll(dir)
	s, err := embedded.Start(embedded.Config{Dir: dir, Quota: 64 << 20})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	cli, ctx := s.Client(), t.Context()
	o := owners(t, cli, "a", etcd.LeaseConfig{TTL: time.Minute})
	w := newScribe(t, o, 1)
	rng := rand.New(rand.NewPCG(1, 2))
	// Old revisions fill the database too: their space can be recovered at once.
	for range 40 {
		if _, err := cli.Put(ctx, "/other", string(noise(rng, 1<<20))); err != nil {
			t.Fatal(err)
		}
	}
	n := 0
	for ; ; n++ {
		if err = w.append(ctx, noise(rng, 256<<10)); err != nil {
			break
		}
	}
	if !errors.Is(err, meta.NoSpace) || n < 10 {
		t.Fatalf("after %d entries: %v", n, err)
	}
	if full, err := embedded.NoSpace(ctx, cli); err != nil || !full {
		t.Fatal(full, err)
	}
	count := 0
	if err := w.log.Read(ctx, journal.Position{}, func(e journal.Entry) error { count++; return nil }); err != nil || count != n {
		t.Fatalf("%d entries of %d, %v", count, n, err)
	}
	if err := w.trim(ctx); !errors.Is(err, meta.NoSpace) {
		t.Fatal(err)
	}
	if err := embedded.RecoverSpace(ctx, cli, s.Endpoint()); err != nil {
		t.Fatal(err)
	}
	if err := w.trim(ctx); err != nil {
		t.Fatal(err)
	}
	if full, err := embedded.NoSpace(ctx, cli); err != nil || full {
		t.Fatal(full, err)
	}
	// The refused owner goes on: no entry was in doubt.
	for range 100 {
		if err := w.append(ctx, noise(rng, 256<<10)); err != nil {
			t.Fatal(err)
		}
		if err := w.trim(ctx); err != nil {
			t.Fatal(err)
		}
	}
}

// serveDir names the folder of an etcd in a child process, which the test kills.
const serveDir = "PENSTOCK_ETCD_DIR"

func TestMain(m *testing.M) {
	if dir := os.Getenv(serveDir); dir != "" {
		if _, err := embedded.Start(embedded.Config{Dir: dir}); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		fmt.Println("ready")
		select {}
	}
	os.Exit(m.Run())
}

// child runs an etcd in another process, and waits until the etcd serves.
func child(t *testing.T, dir string) *exec.Cmd {
	c := exec.Command(os.Args[0])
	c.Env = append(os.Environ(), serveDir+"="+dir)
	c.Stderr = os.Stderr
	out, err := c.StdoutPipe()
	if err != nil {
		t.Error(err)
		return nil
	}
	if err := c.Start(); err != nil {
		t.Error(err)
		return nil
	}
	if !bufio.NewScanner(out).Scan() {
		t.Error("etcd did not start")
	}
	return c
}

// etcd is killed and started again and again under an appending client: every
// append is settled, none is lost, none is there twice.
func TestServerKilled(t *testing.T) {
	dir, err := os.MkdirTemp("", "etcd")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	server := child(t, dir)
	t.Cleanup(func() { server.Process.Kill(); server.Wait() })
	cli, err := clientv3.New(clientv3.Config{Endpoints: []string{"unix://" + dir + "/c"}, DialTimeout: time.Second, Logger: zap.NewNop()})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { cli.Close() })
	o := owners(t, cli, "a", etcd.LeaseConfig{TTL: 2 * time.Minute})
	w := newScribe(t, o, 1)
	stop := make(chan struct{})
	var killer sync.WaitGroup
	kills := 0
	var acks atomic.Int64
	killer.Go(func() {
		for seen := int64(0); ; seen = acks.Load() {
			// Most times a client has made progress since etcd came back, however slow the return
			// was.
			for kills%4 > 0 && acks.Load() == seen {
				select {
				case <-stop:
					return
				case <-time.After(time.Millisecond):
				}
			}
			select {
			case <-stop:
				return
			case <-time.After(time.Duration(50+rand.IntN(250)) * time.Millisecond):
			}
			server.Process.Kill()
			server.Wait()
			kills++
			if server = child(t, dir); server == nil {
				return
			}
		}
	})
	var acked []string
	for began, i := time.Now(), 0; time.Since(began) < 4*time.Second; i++ {
		p := fmt.Sprint("entry ", i)
		if err := w.append(t.Context(), []byte(p)); err != nil {
			t.Errorf("append %d: %v", i, err)
			break
		}
		acked = append(acked, p)
		acks.Add(1)
	}
	close(stop)
	killer.Wait()
	var got []string
	err = w.log.Read(t.Context(), journal.Position{}, func(e journal.Entry) error {
		got = append(got, string(bytes.Clone(e.Payload)))
		return nil
	})
	if err != nil || fmt.Sprint(got) != fmt.Sprint(acked) {
		t.Fatalf("%d entries, %d acknowledged: %v", len(got), len(acked), err)
	}
	t.Logf("%d entries, %d kills", len(got), kills)
}

// Several processes fight for the same volume, each appending while owning the volume and each
// with a lease that sometimes is not renewed: the log is a single chain.
func TestOwnersFight(t *testing.T) {
	s := server(t)
	cli := s.Client()
	var wg sync.WaitGroup
	var mu sync.Mutex
	acked := map[string]bool{}
	deadline := time.Now().Add(4 * time.Second)
	for id := range 3 {
		wg.Go(func() {
			rng := rand.New(rand.NewPCG(uint64(id), uint64(time.Now().UnixNano())))
			for time.Now().Before(deadline) {
				sleepy := rng.IntN(2) == 0
				l, err := etcd.NewLease(t.Context(), cli, etcd.LeaseConfig{TTL: time.Second, Margin: 200 * time.Millisecond,
					KeepAlive: func(ctx context.Context, id clientv3.LeaseID) (time.Duration, error) {
						if sleepy {
							return 0, errors.New("asleep")
						}
						r, err := cli.KeepAliveOnce(ctx, id)
						if err != nil {
							return 0, err
						}
						return time.Duration(r.TTL) * time.Second, nil
					}})
				if err != nil {
					t.Error(err)
					return
				}
				o := etcd.NewOwners(cli, l, etcd.OwnersConfig{Prefix: prefix, Server: fmt.Sprint(id)})
				ctx, cancel := context.WithDeadline(t.Context(), deadline.Add(3*time.Second))
				own, err := o.Await(ctx, 9)
				cancel()
				if err == nil {
					w := &scribe{t: t, own: own, log: etcd.OpenLog(own)}
					if err := w.log.Read(t.Context(), w.at, func(e journal.Entry) error { w.at = e.Position(); return nil }); err != nil {
						t.Error(err)
					}
					for i := 0; i < 200+rng.IntN(400) && time.Now().Before(deadline); i++ {
						p := fmt.Sprintf("%d of %d", i, own.Term)
						if err := w.append(t.Context(), []byte(p)); err != nil {
							if k := meta.KindOf(err); k != meta.Fenced {
								t.Error(err)
							}
							break
						}
						mu.Lock()
						acked[p] = true
						mu.Unlock()
						time.Sleep(time.Millisecond)
					}
					if !sleepy {
						if err := own.Release(t.Context()); err != nil {
							t.Error(err)
						}
					}
				}
				if !sleepy {
					if err := l.Close(t.Context()); err != nil {
						t.Error(err)
					}
				} else {
					<-l.Lost()
					t.Cleanup(func() { l.Close(closing()) })
				}
			}
		})
	}
	wg.Wait()
	var chain journal.Chain
	chain.Volume = 9
	terms := map[meta.Term]bool{}
	n := 0
	err := etcd.ReadLog(cli, prefix, 9, nil).Read(t.Context(), journal.Position{}, func(e journal.Entry) error {
		if !acked[string(e.Payload)] {
			t.Errorf("entry %d %q was not acknowledged", e.Seq, e.Payload)
		}
		terms[e.Term] = true
		n++
		return chain.Step(e)
	})
	if err != nil || n != len(acked) {
		t.Fatalf("%d entries, %d acknowledged: %v", n, len(acked), err)
	}
	t.Logf("%d entries under %d terms", n, len(terms))
}
