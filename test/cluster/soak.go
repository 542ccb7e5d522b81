package cluster

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"text/tabwriter"
	"time"

	"penstock.io/penstock/test/history"
	"penstock.io/penstock/test/load"
)

// Soak is a long run of a mixed load with self-verifying data, while a seeded nemesis makes one
// fault after the other. A violation ends the soak; the promises for the end are checked when
// every fault is healed.
//
// All clients except the last write histories of names, too: faults that may end a session before
// its operations are journaled (which loses unsynced operations, as a power failure of a
// workstation does) fall on the last client alone.
type Soak struct {
	Cluster *Cluster
	For     time.Duration
	Seed    uint64
	Logf    func(string, ...any)
	Every   time.Duration // mean time between faults; 0 means 5 s
	// Patience is how long repair may take at the end; 0 means 3 minutes.
	Patience time.Duration
	Self     string   // program that becomes an Intruder if its environment asks for an Intruder; empty for none
	Only     []string // kinds of faults; empty means all
	Copies   bool     // snapshots and clones of the volumes are made, changed and deleted meanwhile

	meter   load.Meter
	stalls  *stalls
	histOps atomic.Int64 // operations in checked histories
	told    atomic.Int64 // errors that the load got
	dark    atomic.Int32 // blackouts under way
	nemesis *nemesis
	workers []*driven
	snaps   []*snapper
	mu      sync.Mutex
	bad     error
	began   time.Time
	cancel  context.CancelFunc
}

// volumes of the soak, by name: copies of each byte.
var soakVolumes = []struct {
	name     string
	replicas int
}{{"three", 3}, {"two", 2}}

// driven is a worker of the load on a mount.
type driven struct {
	name   string // volume/client/worker
	mount  *Mount
	worker load.Worker
}

// Run runs the soak.
func (s *Soak) Run(ctx context.Context) error {
	if s.Every == 0 {
		s.Every = 5 * time.Second
	}
	if s.Patience == 0 {
		s.Patience = 3 * time.Minute
	}
	s.began = time.Now()
	s.stalls = newStalls()
	s.meter.Observe = s.stalls.observe
	if err := s.prepare(ctx); err != nil {
		return fmt.Errorf("preparing: %w", err)
	}
	s.nemesis = newNemesis(s)
	if s.Self != "" {
		if err := s.intrude(ctx); err != nil {
			return err
		}
	}
	// The load goes on for a while after the last fault, on a healed system.
	all, cancel := context.WithCancel(ctx)
	defer cancel()
	s.cancel = cancel
	var wg sync.WaitGroup
	for i, w := range s.workers {
		wg.Go(func() { s.drive(all, w, rand.New(rand.NewPCG(s.Seed, 1000+uint64(i)))) })
	}
	for i := range s.Cluster.Mounts {
		wg.Go(func() { s.look(all, i, rand.New(rand.NewPCG(s.Seed, 2000+uint64(i)))) })
	}
	wg.Go(func() { s.histories(all, rand.New(rand.NewPCG(s.Seed, 3000))) })
	for i, v := range soakVolumes {
		if !s.Copies {
			break
		}
		k := newSnapper(s, v.name, rand.New(rand.NewPCG(s.Seed, 5000+uint64(i))))
		s.snaps = append(s.snaps, k)
		wg.Go(func() { k.run(all) })
	}
	wg.Go(func() { s.watch(all) })
	wg.Go(func() { s.administer(all) })
	faults, stop := context.WithTimeout(all, s.For)
	defer stop()
	err := s.nemesis.run(faults)
	if s.verdict() == nil { // otherwise the failed state is kept for inspection
		err = errors.Join(err, s.nemesis.healAll(ctx))
	}
	s.Logf("healed after %v", time.Since(s.began).Round(time.Second))
	if err == nil && s.verdict() == nil {
		sleep(all, 5*time.Second)
	}
	cancel()
	done := make(chan struct{})
	go func() { wg.Wait(); close(done) }()
	select {
	case <-done:
	case <-time.After(90 * time.Second):
		return errors.Join(err, s.verdict(), errors.New("the load hangs 90 s after its end"))
	}
	if err := errors.Join(err, s.verdict()); err != nil {
		return err
	}
	for _, m := range s.Cluster.others {
		if err := m.Stop(); err != nil {
			return err
		}
	}
	return s.final(ctx)
}

// fail ends the soak.
func (s *Soak) fail(err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.bad == nil {
		s.bad = fmt.Errorf("%s, %v after the start: %w", time.Now().Format("15:04:05.000"), time.Since(s.began).Round(time.Millisecond), err)
		s.Logf("VIOLATION %v", s.bad)
	}
	s.cancel()
}

func (s *Soak) verdict() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.bad
}

func sleep(ctx context.Context, d time.Duration) {
	select {
	case <-ctx.Done():
	case <-time.After(d):
	}
}

// prepare makes volumes, folders and workers.
func (s *Soak) prepare(ctx context.Context) error {
	c := s.Cluster
	for _, v := range soakVolumes {
		if _, err := c.Penstock(ctx, "volume", "create", v.name, "--force", "--attach", "/"+v.name, "--replicas", fmt.Sprint(v.replicas)); err != nil {
			return err
		}
		for _, m := range c.Mounts {
			dir := filepath.Join(m.Path, v.name, m.Name)
			if err := os.Mkdir(dir, 0o755); err != nil {
				return err
			}
			l := load.New(dir, load.Options{Seed: s.Seed + uint64(len(s.workers)), Each: 1, Meter: &s.meter, Over: func() bool { return s.dark.Load() > 0 }})
			if err := l.Prepare(dir); err != nil {
				return err
			}
			for i, w := range l.Workers {
				s.workers = append(s.workers, &driven{name: filepath.Join(v.name, m.Name, l.Names[i]), mount: m, worker: w})
			}
		}
		if err := os.Mkdir(filepath.Join(c.Mounts[0].Path, v.name, "histories"), 0o755); err != nil {
			return err
		}
	}
	return nil
}

// drive lets a worker work; after each error, and now and then, drive verifies the worker.
func (s *Soak) drive(ctx context.Context, w *driven, r *rand.Rand) {
	defer w.worker.Close()
	for ctx.Err() == nil {
		err := w.worker.Step()
		if err == nil {
			sleep(ctx, time.Duration(r.IntN(40))*time.Millisecond)
			if r.IntN(100) > 0 {
				continue
			}
		} else if ctx.Err() == nil {
			s.told.Add(1)
			w.mount.note("%s was told: %v", w.name, err)
		}
		w.worker.Close()
		s.settle(ctx, w)
	}
}

// settle verifies a worker, as soon as its mount serves.
func (s *Soak) settle(ctx context.Context, w *driven) {
	for ctx.Err() == nil {
		era := w.mount.era.Load()
		err := w.worker.Settle()
		if err == nil && s.dark.Load() > 0 {
			err = errDark // bytes durable by Verify need not be (load.Options.Over)
		}
		if err == nil {
			err = w.worker.Verify()
		}
		if err == nil {
			return
		}
		if s.judge(w.mount, era, w.name, err) {
			return
		}
		sleep(ctx, 200*time.Millisecond)
	}
}

var errDark = errors.New("a sync during a blackout does not count")

// judge ends the soak if an error is a violation, and the mount that saw the violation served all
// the time, since an era that the caller took before: below a mount point without a mount no file
// exists.
func (s *Soak) judge(m *Mount, era int64, what string, err error) bool {
	var v *load.Violation
	if !errors.As(err, &v) || era%2 == 0 || m.era.Load() != era {
		return false
	}
	s.fail(fmt.Errorf("%s: %w", what, err))
	return true
}

// look reads the files of other clients' workers through one mount.
func (s *Soak) look(ctx context.Context, i int, r *rand.Rand) {
	m := s.Cluster.Mounts[i]
	for ctx.Err() == nil {
		w := s.workers[r.IntN(len(s.workers))]
		seen, ok := w.worker.(load.Watched)
		if !ok || w.mount == m {
			continue
		}
		era := m.era.Load()
		err := seen.Look(filepath.Join(m.Path, w.name), r)
		if err != nil && !s.judge(m, era, fmt.Sprintf("%s as %s sees it", w.name, m.Name), err) && ctx.Err() == nil {
			s.told.Add(1)
			m.note("looking at %s: %v", w.name, err)
			sleep(ctx, 300*time.Millisecond)
		}
		sleep(ctx, time.Duration(r.IntN(60))*time.Millisecond)
	}
}

// histories crosses operations on names from two clients, directory after directory, and checks
// that the operations are linearizable.
func (s *Soak) histories(ctx context.Context, r *rand.Rand) {
	mounts := s.Cluster.Mounts[:max(1, len(s.Cluster.Mounts)-1)]
	for i := 0; ctx.Err() == nil; i++ {
		v := soakVolumes[i%len(soakVolumes)].name
		dir := func(m *Mount) string { return filepath.Join(m.Path, v, "histories", fmt.Sprint("h", i)) }
		a, b := mounts[i%len(mounts)], mounts[(i+1)%len(mounts)]
		if err := os.Mkdir(dir(a), 0o755); err != nil {
			s.told.Add(1)
			a.note("%v", err)
			sleep(ctx, 300*time.Millisecond)
			continue
		}
		h := history.Run(dir(a), dir(b), r.Uint64(), true, func(d time.Duration, err error) { s.meter.Count(load.Name, 0, d, err) })
		if err := history.Check(h, true); err != nil {
			s.fail(fmt.Errorf("names in %s: %w", dir(a), err))
			return
		}
		s.histOps.Add(int64(len(h)))
		// The remains of a history go while the next history runs; remains that can't be removed
		// now go at the end.
		if err := os.RemoveAll(dir(b)); err != nil && ctx.Err() == nil {
			b.note("%v", err)
		}
		sleep(ctx, time.Duration(r.IntN(400))*time.Millisecond)
	}
}

// watch ends the soak if a process ends unexpectedly.
func (s *Soak) watch(ctx context.Context) {
	for ctx.Err() == nil {
		for _, m := range s.members() {
			if err := m.died(); err != nil && !m.mayDie.Load() {
				s.fail(err)
				return
			}
		}
		sleep(ctx, 100*time.Millisecond)
	}
}

// administer lets the administrator call now and then: the administrator's certificate is renewed
// only by use.
func (s *Soak) administer(ctx context.Context) {
	for ctx.Err() == nil {
		sleep(ctx, max(s.Cluster.cfg.CertificateLife/8, 10*time.Second))
		one, cancel := context.WithTimeout(ctx, 10*time.Second)
		_, _ = s.Cluster.Penstock(one, "cluster", "members") // the cluster may be broken just now
		cancel()
	}
}

func (s *Soak) members() []*Member {
	c := s.Cluster
	all := slices.Concat(c.Etcd, c.Metas, c.Chunks, c.Gateways, c.others)
	for _, m := range c.Mounts {
		all = append(all, m.Member)
	}
	return all
}

// Report is a table of the events.
func (s *Soak) Report() string {
	var b strings.Builder
	w := tabwriter.NewWriter(&b, 0, 0, 2, ' ', 0)
	fmt.Fprintf(w, "seed %d, %v\n", s.Seed, time.Since(s.began).Round(time.Second))
	fmt.Fprintln(w, "FAULT\tTIMES\tFOR")
	total := 0
	var kinds []string
	for _, c := range s.nemesis.counts() {
		kinds = append(kinds, c.kind)
		fmt.Fprintf(w, "%s\t%d\t%v\n", c.kind, c.times, c.lasted.Round(time.Second))
		total += c.times
	}
	fmt.Fprintf(w, "all\t%d\n\n", total)
	fmt.Fprintln(w, "CALL\tTIMES\tFAILED\tBYTES\tMEDIAN\tP99\tWORST")
	for _, k := range load.Kinds() {
		f := s.meter.Figures(k)
		fmt.Fprintf(w, "%v\t%d\t%d\t%d\t%v\t%v\t%v\n", k, f.Calls, f.Failed, f.Bytes, f.Median.Round(time.Microsecond), f.P99.Round(time.Microsecond), f.Worst.Round(time.Millisecond))
	}
	fmt.Fprintf(w, "\noperations in linearizable histories\t%d\nbytes verified\t%d\nerrors told\t%d\n", s.histOps.Load(), s.meter.Figures(load.Read).Bytes, s.told.Load())
	for _, k := range s.snaps {
		for _, what := range slices.Sorted(maps.Keys(k.times)) {
			fmt.Fprintf(w, "%s, %s\t%d\n", k.of, what, k.times[what])
		}
	}
	s.stalls.table(w, kinds)
	w.Flush()
	return b.String()
}
