package cluster

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"maps"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"penstock.io/penstock/meta/peer"
	"penstock.io/penstock/test/child"
	"penstock.io/penstock/test/load"
	"penstock.io/penstock/test/slow"
)

var (
	burstNodes   = flag.Int("burst", 4, "how many nodes join at once in TestBurst; make burst: 40")
	burstFor     = flag.Duration("burst-within", 2*time.Second, "the time in which they join")
	burstProfile = flag.String("burst-profile", "", "directory to which processor profiles of the metadata server are written: while nothing happens, and during a burst")
	burstFiles   = flag.Int("burst-files", 1000, "files of the larger data set of TestBurst; the smaller has a tenth")
)

const (
	burstFile = 8 << 10 // bytes of each file of a data set, too many for the file's inode
	burstRead = 20      // files that a node reads
	// burstFirst bounds the time from a node's start to its first byte, on a quiet machine.
	burstFirst = 5 * time.Second
)

// fileOf is where a data set's file lies: a hundred in each directory.
func fileOf(i int) string { return fmt.Sprintf("d%d/f%d", i/100, i) }

// TestBurst: many nodes come within a short time; on each node a pod uses a claim of a data
// set, reads the claim and writes. Then the nodes go: three of four by a drain, the others by a
// loss of power, after which they are evicted. Nothing is lost, nothing of the nodes stays, and
// the cost of a node for the servers does not grow with the number of files.
//
// A node is a network name space with an address and a certificate of its own. In the name
// space run the processes that Kubernetes runs on a node: the holder of mounts and the node
// part of the driver, which the test calls as a kubelet does; the controller grants the node
// the volume, as Kubernetes' attacher asks. The kernel and the clock are those of this machine,
// and there is no kubelet, container or supervisor. A node starts when it asks for its
// certificate.
func TestBurst(t *testing.T) {
	// Looks through all files for fragments are as rare as anywhere.
	c := start(t, Config{Racks: 2, EtcdMembers: 1, Metas: 1, ChunkServers: 2, Mounts: 1, DiskBytes: 2 << 30, MetaArgs: []string{"--join-interval", "5m"}})
	// Bought before: a single token lets all nodes in.
	if c.creds.tokens[peer.Client] == "" {
		t.Fatal("no join token of clients")
	}
	driver, err := c.driver()
	c.must(t, err)
	var cost [2]burstCost
	for i, files := range []int{max(1, *burstFiles/10), *burstFiles} {
		before := c.leftovers(t)
		claim := fmt.Sprint("set", i)
		v, err := asked(t.Context(), driver.CreateVolume, &csi.CreateVolumeRequest{
			Name: "pvc-" + claim, VolumeCapabilities: []*csi.VolumeCapability{shared()}, CapacityRange: &csi.CapacityRange{RequiredBytes: 3 << 29},
			Parameters: map[string]string{"replicas": "2", "csi.storage.k8s.io/pvc/namespace": "team", "csi.storage.k8s.io/pvc/name": claim},
		})
		c.must(t, err)
		began := time.Now()
		// A workstation sees the data set at the claim's path.
		c.must(t, fillSet(filepath.Join(c.Mounts[0].Path, "kubernetes/team", claim), files))
		t.Logf("%d files written in %v", files, time.Since(began).Round(time.Millisecond))
		cost[i] = burst(t, c, driver, claim, v.GetVolume().GetVolumeId(), files)
		c.must(t, c.Fsck(t.Context(), time.Minute))
		_, err = asked(t.Context(), driver.DeleteVolume, &csi.DeleteVolumeRequest{VolumeId: v.GetVolume().GetVolumeId()})
		c.must(t, err)
		c.must(t, eventually(t.Context(), time.Minute, func(context.Context) error {
			if after := c.leftovers(t); after != before {
				return fmt.Errorf("before the burst there were\n%s\nafter it\n%s", before, after)
			}
			return nil
		}))
	}
	c.must(t, c.Fsck(t.Context(), time.Minute))
	// A further call for each file would be nine times as many.
	for _, k := range []struct {
		name         string
		small, large float64
	}{{"calls to the metadata server", cost[0].calls, cost[1].calls}, {"entries of the journal", cost[0].entries, cost[1].entries}, {"requests to etcd", cost[0].etcd, cost[1].etcd}} {
		if k.large > 1.5*k.small+20 {
			t.Errorf("%s of a node: %.1f with a tenth of the files, %.1f with all", k.name, k.small, k.large)
		}
	}
}

// driver starts the controller of the driver.
func (c *Cluster) driver() (csi.ControllerClient, error) {
	m, err := c.newMember("controller", c.Racks[0], 0)
	if err != nil {
		return nil, err
	}
	c.others = append(c.others, m)
	socket := filepath.Join(c.cfg.Dir, "controller.sock")
	m.path = c.cfg.Penstock
	m.args = append([]string{"csi", "--controller", "--endpoint", "unix://" + socket, "--cluster", c.metaAddrs()}, c.creds.flags(admin)...)
	if err := m.Start(); err != nil {
		return nil, err
	}
	conn, err := dialDriver(socket)
	return csi.NewControllerClient(conn), err
}

// leftovers lists the possible remains of a burst: volumes and grants.
func (c *Cluster) leftovers(t *testing.T) string {
	t.Helper()
	var names []string
	for _, command := range []string{"volume", "grant"} {
		out, err := c.Penstock(t.Context(), command, "list", "--output", "json")
		c.must(t, err)
		var all []struct {
			ID   uint64 `json:"id"`
			Name string `json:"name"`
			Who  string `json:"who"`
		}
		c.must(t, json.Unmarshal(out, &all))
		for _, x := range all {
			names = append(names, fmt.Sprintln(command, x.ID, x.Name+x.Who))
		}
	}
	slices.Sort(names)
	return strings.Join(names, "")
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
	// None of the set's cost is left to be counted as a node's.
	return errors.Join(append(errs, load.SyncAll(dir))...)
}

// burstCost is the cost of a node for the servers, from the node's start to its end.
type burstCost struct{ calls, entries, etcd float64 }

// burst lets nodes come and go, whose pods use a claim's volume.
func burst(t *testing.T, c *Cluster, driver csi.ControllerClient, claim, volume string, files int) burstCost {
	t.Helper()
	// The servers' work without nodes: more after more writes.
	idle := *burstFor / 4
	quiet := c.burdens(t)
	profiled := c.profile(fmt.Sprint("idle-", files), idle)
	time.Sleep(idle)
	before := c.burdens(t)
	c.must(t, <-profiled)
	anyway := float64(before.metaCPU-quiet.metaCPU) / float64(before.at.Sub(quiet.at))
	profiled = c.profile(fmt.Sprint("come-", files), *burstFor)
	path := filepath.Join("kubernetes/team", claim)
	pace := slow.Start()
	nodes := make([]*agent, *burstNodes)
	first, errs := make([]time.Duration, len(nodes)), make([]error, len(nodes))
	var wg sync.WaitGroup
	for i := range nodes {
		a, err := c.newAgent(fmt.Sprint("node", i, claim), c.Racks[i%len(c.Racks)])
		c.must(t, err)
		nodes[i] = a
		wg.Go(func() { first[i], errs[i] = c.serveNode(t.Context(), driver, a, volume, i, files) })
		time.Sleep(*burstFor / time.Duration(len(nodes)))
	}
	wg.Wait()
	c.must(t, errors.Join(errs...))
	slower := pace.Factor()
	pace.Close()
	processes, memory := map[uint32]string{}, map[string]float64{}
	for _, a := range nodes {
		pids, err := a.node.Processes()
		c.must(t, err)
		for _, pid := range pids {
			processes[uint32(pid)] = a.name
			memory[commandOf(t, pid)] += float64(rss(t, pid)) / float64(len(nodes)) / 1e6
		}
	}
	c.must(t, <-profiled)
	profiled = c.profile(fmt.Sprint("go-", files), *burstFor/4)
	// The nodes go: three of four in order, the fourth as in a loss of power.
	for i, a := range nodes {
		if i%4 != 3 {
			errs[i] = errors.Join(a.drain(t.Context(), volume), unpublish(t.Context(), driver, volume, a.name))
			continue
		}
		errs[i] = a.kill()
		// The node's sessions wait for successors for as long as its holder would have.
		// Kubernetes gives up the node's attachments later, or earlier.
		_, err := c.Penstock(t.Context(), "cluster", "evict", "client/"+a.name)
		errs[i] = errors.Join(errs[i], err, unpublish(t.Context(), driver, volume, a.name))
	}
	c.must(t, errors.Join(errs...))
	gone := time.Now()
	c.must(t, eventually(t.Context(), time.Minute, func(ctx context.Context) error {
		out, err := c.Penstock(ctx, "status", "--output", "json")
		if err != nil {
			return err
		}
		var s struct {
			Meta struct {
				Sessions []struct {
					Name string `json:"name"`
					PID  uint32 `json:"pid"`
				} `json:"sessions"`
			} `json:"meta"`
		}
		if err := json.Unmarshal(out, &s); err != nil {
			return err
		}
		if len(s.Meta.Sessions) == 0 {
			return errors.New("penstock status lists no sessions, not even those of the mount")
		}
		for _, x := range s.Meta.Sessions {
			if node := processes[x.PID]; node != "" {
				return fmt.Errorf("%s has a session still: %s", node, x.Name)
			}
		}
		return nil
	}))
	t.Logf("the last session ended %v after the last node", time.Since(gone).Round(time.Millisecond))
	after := c.burdens(t)
	c.must(t, <-profiled)
	n := float64(len(nodes))
	slices.Sort(first)
	p99, bound := first[(len(first)*99)/100], slow.Bound(burstFirst, slower)
	if p99 > bound {
		t.Errorf("first bytes come %v after a node's start, p99: more than %v, or %v on a machine that is %.1f times as slow as a quiet one", p99, burstFirst, bound, slower)
	}
	t.Logf("%d nodes, %d files, a machine %.1f times as slow as a quiet one: first byte %v median, %v p99 after a node's start; each %.1f processes, resident %s; a node costs %.1f calls, %v of the metadata server, %.1f entries and %.0f bytes of its journal, %.1f requests to etcd, %v of etcd; in %v in which the metadata server takes %.1f ms a second while nothing happens",
		len(nodes), files, slower, first[len(first)/2].Round(time.Millisecond), p99.Round(time.Millisecond), float64(len(processes))/n, sizes(memory),
		(after.calls-before.calls)/n, ((after.metaCPU - before.metaCPU) / time.Duration(len(nodes))).Round(100*time.Microsecond),
		(after.entries-before.entries)/n, (after.bytes-before.bytes)/n, (after.etcd-before.etcd)/n, ((after.etcdCPU - before.etcdCPU) / time.Duration(len(nodes))).Round(100*time.Microsecond),
		after.at.Sub(before.at).Round(100*time.Millisecond), 1000*anyway)
	// The synced bytes of each node are in the volume.
	for i := range nodes {
		c.must(t, checkFile(filepath.Join(c.Mounts[0].Path, path, "out", fmt.Sprint("n", i)), uint64(1e9+i)))
	}
	return burstCost{calls: (after.calls - before.calls) / n, entries: (after.entries - before.entries) / n, etcd: (after.etcd - before.etcd) / n}
}

// serveNode brings a node up, and works like a training process in the node's pod. It returns the
// time from the node's start to the first byte that the pod read.
func (c *Cluster) serveNode(ctx context.Context, driver csi.ControllerClient, a *agent, volume string, i, files int) (first time.Duration, err error) {
	began := time.Now()
	if err := a.begin(ctx, c); err != nil {
		return 0, err
	}
	if err := a.use(ctx, driver, volume); err != nil {
		return 0, err
	}
	rng := rand.New(rand.NewPCG(*seed, uint64(i)))
	for k := range burstRead {
		n := rng.IntN(files)
		if err := checkFile(filepath.Join(a.pod(), fileOf(n)), uint64(n)); err != nil {
			return 0, err
		}
		if k == 0 {
			first = time.Since(began)
		}
	}
	f, err := os.Create(filepath.Join(a.pod(), "out", fmt.Sprint("n", i)))
	if err != nil {
		return 0, err
	}
	b := make([]byte, burstFile)
	load.Pattern(b, uint64(1e9+i), 0)
	_, err = f.Write(b)
	return first, errors.Join(err, f.Sync(), f.Close(), load.SyncDir(filepath.Join(a.pod(), "out")))
}

// checkFile demands a file with an id's bytes, all of the bytes.
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

// burdens counts the servers' work since their start.
type burdens struct {
	at                          time.Time
	calls, entries, bytes, etcd float64
	metaCPU, etcdCPU            time.Duration
}

func (c *Cluster) burdens(t *testing.T) (b burdens) {
	t.Helper()
	s, err := c.Status(t.Context())
	c.must(t, err)
	b.at = time.Now()
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

// profile begins a processor profile of the metadata server, if the command line asks for the
// profile, and returns the result.
func (c *Cluster) profile(name string, d time.Duration) <-chan error {
	done := make(chan error, 1)
	if *burstProfile == "" {
		done <- nil
		return done
	}
	go func() { // ends with the profile
		http := http.Client{Transport: &http.Transport{DisableKeepAlives: true, DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, "unix", filepath.Join(c.Metas[0].disk.At, "data", "admin.sock"))
		}}}
		done <- func() error {
			re, err := http.Get(fmt.Sprintf("http://meta/debug/pprof/profile?seconds=%d", max(1, int(d.Seconds()))))
			if err != nil {
				return err
			}
			defer re.Body.Close()
			b, err := io.ReadAll(re.Body)
			if err != nil {
				return err
			}
			return os.WriteFile(filepath.Join(*burstProfile, "meta-"+name+".pprof"), b, 0o644)
		}()
	}()
	return done
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

// sizes writes down how many MB each of some commands takes.
func sizes(mb map[string]float64) string {
	var all []string
	for _, name := range slices.Sorted(maps.Keys(mb)) {
		all = append(all, fmt.Sprintf("%s %.0f MB", name, mb[name]))
	}
	return strings.Join(all, ", ")
}

// commandOf is the command of penstock that a process runs.
func commandOf(t *testing.T, pid int) string {
	t.Helper()
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
	if err != nil {
		t.Fatal(err)
	}
	words := strings.Split(string(b), "\x00")
	if len(words) < 2 {
		t.Fatalf("process %d of a node is %q", pid, b)
	}
	return words[1]
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
