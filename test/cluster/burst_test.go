package cluster

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"penstock.io/penstock/cmd/penstock/spawn"
	"penstock.io/penstock/meta/peer"
	"penstock.io/penstock/test/child"
	"penstock.io/penstock/test/load"
)

var (
	burstNodes = flag.Int("burst", 4, "how many nodes join at once in TestBurst; make burst: 40")
	burstFor   = flag.Duration("burst-within", 2*time.Second, "the time in which they join")
	burstFiles = flag.Int("burst-files", 1000, "files of the larger data set of TestBurst; the smaller has a tenth")
)

const (
	burstFile = 8 << 10 // bytes of each file of a data set, too many to lie in its inode
	burstRead = 20      // files that a node reads
)

// fileOf is where a data set's file lies: a hundred in each directory.
func fileOf(i int) string { return fmt.Sprintf("d%d/f%d", i/100, i) }

// TestBurst: many nodes come within a short time, mount a data set, read it and
// write, and go, three of four in order and the others by SIGKILL. Nothing is lost,
// nothing of them stays, and what one of them costs the servers does not grow with
// the files there are.
//
// A node is a network name space with its own address and certificate, and a mount
// process as the node driver starts one; their kernel and clock are this machine's,
// and there is no kubelet. Its start is where it asks for its certificate.
func TestBurst(t *testing.T) {
	c := start(t, Config{Racks: 2, EtcdMembers: 1, Metas: 1, ChunkServers: 2, Mounts: 1, DiskBytes: 2 << 30})
	c.must(t, c.grant(t.Context(), "node*"))
	var err error
	// Bought before: one token lets in all.
	if c.creds.tokens[peer.Client] == "" {
		t.Fatal("no join token of clients")
	}
	var cost [2]burstCost
	for i, files := range []int{max(1, *burstFiles/10), *burstFiles} {
		volume := fmt.Sprint("set", i)
		_, err = c.Penstock(t.Context(), "volume", "create", volume, "--attach", "/"+volume, "--replicas", "2")
		c.must(t, err)
		began := time.Now()
		c.must(t, fillSet(filepath.Join(c.Mounts[0].Path, volume), files))
		t.Logf("%d files written in %v", files, time.Since(began).Round(time.Millisecond))
		cost[i] = burst(t, c, volume, files)
	}
	c.must(t, c.Fsck(t.Context(), time.Minute))
	// A call more for each file that was there would be nine times as many.
	for _, k := range []struct {
		name         string
		small, large float64
	}{{"calls to the metadata server", cost[0].calls, cost[1].calls}, {"entries of the journal", cost[0].entries, cost[1].entries}, {"requests to etcd", cost[0].etcd, cost[1].etcd}} {
		if k.large > 1.5*k.small+20 {
			t.Errorf("%s of a node: %.1f with a tenth of the files, %.1f with all", k.name, k.small, k.large)
		}
	}
}

// fillSet writes a data set, its directories side by side.
func fillSet(dir string, files int) error {
	if err := os.Mkdir(filepath.Join(dir, "out"), 0o755); err != nil {
		return err
	}
	dirs := (files + 99) / 100
	errs := make([]error, min(dirs, 8))
	var wg sync.WaitGroup
	for w := range errs {
		wg.Go(func() {
			b := make([]byte, burstFile)
			for d := w; d < dirs && errs[w] == nil; d += len(errs) {
				errs[w] = os.Mkdir(filepath.Join(dir, fmt.Sprint("d", d)), 0o755)
				for i := d * 100; i < min(files, (d+1)*100) && errs[w] == nil; i++ {
					load.Pattern(b, uint64(i), 0)
					errs[w] = os.WriteFile(filepath.Join(dir, fileOf(i)), b, 0o644)
				}
			}
		})
	}
	wg.Wait()
	// Nothing of it is left to be counted as a node's.
	return errors.Join(append(errs, syncfs(dir))...)
}

func syncfs(dir string) error {
	f, err := os.Open(dir)
	if err != nil {
		return err
	}
	return errors.Join(unix.Syncfs(int(f.Fd())), f.Close())
}

// burstCost is what a node costs the servers, from its start to its end.
type burstCost struct{ calls, entries, etcd float64 }

// burst lets nodes come and go.
func burst(t *testing.T, c *Cluster, volume string, files int) burstCost {
	t.Helper()
	before := c.burdens(t)
	nodes := make([]*Mount, *burstNodes)
	first, errs := make([]time.Duration, len(nodes)), make([]error, len(nodes))
	var wg sync.WaitGroup
	for i := range nodes {
		m, err := c.newMount(fmt.Sprint("node", i, volume), volume+":/", c.Racks[i%len(c.Racks)])
		c.must(t, err)
		nodes[i] = m
		wg.Go(func() { first[i], errs[i] = c.serveNode(t.Context(), m, i, files) })
		time.Sleep(*burstFor / time.Duration(len(nodes)))
	}
	wg.Wait()
	c.must(t, errors.Join(errs...))
	memory := 0.0
	for _, m := range nodes {
		memory += float64(rss(t, m.running().PID())) / float64(len(nodes))
	}
	// They go: three of four in order, one as a machine that loses its power does.
	for i, m := range nodes {
		if i%4 == 3 {
			m.Kill()
			errs[i] = m.clean()
		} else if errs[i] = m.Stop(); spawn.Mounted(m.Path) {
			errs[i] = errors.Join(errs[i], fmt.Errorf("%s is still mounted", m.Path))
		}
	}
	c.must(t, errors.Join(errs...))
	gone := time.Now()
	c.must(t, eventually(t.Context(), time.Minute, func(ctx context.Context) error {
		s, err := c.Penstock(ctx, "status", "--output", "json")
		if err != nil {
			return err
		}
		for _, m := range nodes {
			if bytes.Contains(s, []byte(m.Path+" ")) {
				return fmt.Errorf("%s has a session still", m.Name)
			}
		}
		return nil
	}))
	t.Logf("the last session ended %v after the last node", time.Since(gone).Round(time.Millisecond))
	after := c.burdens(t)
	n := float64(len(nodes))
	slices.Sort(first)
	t.Logf("%d nodes, %d files: first byte %v median, %v p99 after a node's start; each %.0f MB resident; a node costs %.1f calls, %v of the metadata server, %.1f entries and %.0f bytes of its journal, %.1f requests to etcd, %v of etcd",
		len(nodes), files, first[len(first)/2].Round(time.Millisecond), first[(len(first)*99)/100].Round(time.Millisecond), memory/1e6,
		(after.calls-before.calls)/n, ((after.metaCPU - before.metaCPU) / time.Duration(len(nodes))).Round(100*time.Microsecond),
		(after.entries-before.entries)/n, (after.bytes-before.bytes)/n, (after.etcd-before.etcd)/n, ((after.etcdCPU - before.etcdCPU) / time.Duration(len(nodes))).Round(100*time.Microsecond))
	// What each of them synced is there.
	for i := range nodes {
		c.must(t, checkFile(filepath.Join(c.Mounts[0].Path, volume, "out", fmt.Sprint("n", i)), uint64(1e9+i)))
	}
	return burstCost{calls: (after.calls - before.calls) / n, entries: (after.entries - before.entries) / n, etcd: (after.etcd - before.etcd) / n}
}

// serveNode brings a node up, and does what a training process does on it. It
// gives the time from the node's start to the first byte that it read.
func (c *Cluster) serveNode(ctx context.Context, m *Mount, i, files int) (first time.Duration, err error) {
	began := time.Now()
	if err := c.begin(ctx, m); err != nil {
		return 0, err
	}
	if err := c.Ready(ctx, m.Member); err != nil {
		return 0, err
	}
	rng := rand.New(rand.NewPCG(*seed, uint64(i)))
	for k := range burstRead {
		n := rng.IntN(files)
		if err := checkFile(filepath.Join(m.Path, fileOf(n)), uint64(n)); err != nil {
			return 0, err
		}
		if k == 0 {
			first = time.Since(began)
		}
	}
	f, err := os.Create(filepath.Join(m.Path, "out", fmt.Sprint("n", i)))
	if err != nil {
		return 0, err
	}
	b := make([]byte, burstFile)
	load.Pattern(b, uint64(1e9+i), 0)
	_, err = f.Write(b)
	return first, errors.Join(err, f.Sync(), f.Close(), load.SyncDir(filepath.Join(m.Path, "out")))
}

// checkFile demands a file with an id's bytes, all of them.
func checkFile(path string, id uint64) error {
	b, err := os.ReadFile(path)
	if err == nil && len(b) != burstFile {
		err = fmt.Errorf("%s has %d bytes", path, len(b))
	}
	if err == nil {
		err = load.CheckPattern(b, id, 0)
	}
	return err
}

// burdens is what the servers have done since they started.
type burdens struct {
	calls, entries, bytes, etcd float64
	metaCPU, etcdCPU            time.Duration
}

func (c *Cluster) burdens(t *testing.T) (b burdens) {
	t.Helper()
	s, err := c.Status(t.Context())
	c.must(t, err)
	for name, to := range map[string]*float64{"calls": &b.calls, "journal_entries": &b.entries, "journal_bytes": &b.bytes} {
		v, ok := s.Meta[name].(float64)
		if !ok {
			t.Fatalf("penstock status does not tell %s: %v", name, s.Meta)
		}
		*to = v
	}
	b.metaCPU, err = child.CPU(c.Metas[0].running().PID())
	c.must(t, err)
	b.etcdCPU, err = child.CPU(c.Etcd[0].running().PID())
	c.must(t, err)
	b.etcd, err = c.Etcd[0].handled()
	c.must(t, err)
	return b
}

// handled is how many requests an etcd member has answered.
func (m *Member) handled() (n float64, err error) {
	conn, err := m.dial(etcdClientPort)
	if err != nil {
		return 0, err
	}
	defer conn.Close()
	if err := conn.SetDeadline(time.Now().Add(10 * time.Second)); err != nil {
		return 0, err
	}
	if _, err := io.WriteString(conn, "GET /metrics HTTP/1.0\r\n\r\n"); err != nil {
		return 0, err
	}
	all, err := io.ReadAll(conn)
	if err != nil {
		return 0, err
	}
	found := false
	for line := range strings.Lines(string(all)) {
		if rest, ok := strings.CutPrefix(line, "grpc_server_handled_total{"); ok {
			var k float64
			if _, err := fmt.Sscan(rest[strings.LastIndexByte(rest, '}')+1:], &k); err != nil {
				return 0, fmt.Errorf("etcd's metrics: %w: %s", err, line)
			}
			n, found = n+k, true
		}
	}
	if !found {
		return 0, errors.New("etcd's metrics have no grpc_server_handled_total")
	}
	return n, nil
}

// rss is the memory of a process, in bytes.
func rss(t *testing.T, pid int) int64 {
	t.Helper()
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/statm", pid))
	if err != nil {
		t.Fatal(err)
	}
	var size, resident int64
	if _, err := fmt.Sscan(string(b), &size, &resident); err != nil {
		t.Fatal(err)
	}
	return resident * int64(os.Getpagesize())
}

func (c *Cluster) must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
