// Package cluster owns whole clusters of real processes: a real etcd of three members, metadata
// servers, chunk servers and mounts, each on a node of a data centre of network namespaces
// (test/netns), each with file systems of its own whose power can be cut (test/disk). The tests
// inject faults and check the promises of every part; the longest test is the soak.
package cluster

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"penstock.io/penstock/cmd/penstock/spawn"
	"penstock.io/penstock/meta/peer"
	"penstock.io/penstock/test/netns"
)

// Binaries are the programs of a cluster.
type Binaries struct{ Penstock, Etcd string }

// Config describes the cluster to build.
type Config struct {
	Binaries
	Dir          string // scratch, with a short path: sockets lie in Dir
	Racks        int
	Metas        int
	ChunkServers int
	Mounts       int
	Gateways     int   // only without certificates
	EtcdMembers  int   // 0 means 3
	DiskBytes    int64 // of each chunk server's disk; 0 means 512 MiB
	Env          []string
	EtcdArgs     []string // more arguments of etcd
	MetaArgs     []string // and of metadata servers
	// CertificateLife is how long certificates hold; 0 means as long as by default.
	CertificateLife time.Duration
	// Insecure leaves certificates out, which works on loopback addresses only.
	Insecure bool
}

// Cluster is a running cluster.
type Cluster struct {
	cfg    Config
	Net    *netns.Net
	Racks  []*netns.Rack
	Etcd   []*Member
	Metas  []*Member
	Chunks []*Member
	Mounts []*Mount
	// Gateways serve streams to clients on the node users.
	Gateways []*Member
	users    *netns.Node
	others   []*Member
	admin    *netns.Node
	creds    credentials
}

// ports of the parts, each on its own node.
const (
	etcdClientPort = 2379
	etcdPeerPort   = 2380
	metaPort       = 7400
	chunkPort      = 7500
)

// New brings a cluster up, with every mount serving. The caller closes the cluster, even with an
// error.
func New(ctx context.Context, cfg Config) (*Cluster, error) {
	if cfg.EtcdMembers == 0 {
		cfg.EtcdMembers = 3
	}
	if cfg.DiskBytes == 0 {
		cfg.DiskBytes = 512 << 20
	}
	c := &Cluster{cfg: cfg, creds: credentials{insecure: cfg.Insecure, base: filepath.Join(cfg.Dir, "credentials")}}
	steps := []struct {
		name string
		do   func(context.Context) error
	}{
		{"network", c.wire}, {"etcd", c.startEtcd}, {"certificates", c.found}, {"metadata servers", c.startMetas},
		{"chunk servers", c.startChunks}, {"mounts", c.startMounts}, {"gateways", c.startGateways},
	}
	for _, s := range steps {
		if err := s.do(ctx); err != nil {
			return c, fmt.Errorf("cluster: %s: %w", s.name, err)
		}
	}
	return c, nil
}

// wire makes the racks, and members without processes.
func (c *Cluster) wire(context.Context) (err error) {
	if c.Net, err = c.creds.network(); err != nil {
		return err
	}
	for i := range max(c.cfg.Racks, 1) {
		r, err := c.Net.AddRack(fmt.Sprint("rack", i+1))
		if err != nil {
			return err
		}
		c.Racks = append(c.Racks, r)
	}
	add := func(to *[]*Member, kind string, count int, bytes int64) error {
		for i := range count {
			m, err := c.newMember(fmt.Sprint(kind, i+1), c.Racks[i%len(c.Racks)], bytes)
			*to = append(*to, m)
			if err != nil {
				return err
			}
		}
		return nil
	}
	if c.admin, err = c.Racks[0].AddNode("admin"); err != nil {
		return err
	}
	if c.cfg.Gateways > 0 {
		if c.users, err = c.Racks[0].AddNode("users"); err != nil {
			return err
		}
	}
	if err := add(&c.Etcd, "etcd", c.cfg.EtcdMembers, 512<<20); err != nil {
		return err
	}
	if err := add(&c.Metas, "meta", c.cfg.Metas, 256<<20); err != nil {
		return err
	}
	return add(&c.Chunks, "cs", c.cfg.ChunkServers, c.cfg.DiskBytes)
}

func (c *Cluster) startEtcd(ctx context.Context) error {
	var peers []string
	for _, m := range c.Etcd {
		peers = append(peers, fmt.Sprintf("%s=http://%s:%d", m.Name, m.Node.Addr, etcdPeerPort))
	}
	for _, m := range c.Etcd {
		client, peer := fmt.Sprintf("http://%s:%d", m.Node.Addr, etcdClientPort), fmt.Sprintf("http://%s:%d", m.Node.Addr, etcdPeerPort)
		m.path = c.cfg.Binaries.Etcd
		m.args = []string{
			"--name", m.Name, "--data-dir", filepath.Join(m.disk.At, "data"), "--logger", "zap", "--log-level", "warn",
			"--listen-client-urls", client, "--advertise-client-urls", client,
			"--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer,
			"--initial-cluster", strings.Join(peers, ","), "--initial-cluster-state", "new", "--initial-cluster-token", "test",
			"--quota-backend-bytes", fmt.Sprint(256 << 20),
		}
		m.args = append(m.args, c.cfg.EtcdArgs...)
		m.ready = func(ctx context.Context) error { return m.healthy() }
		if err := m.Start(); err != nil {
			return err
		}
	}
	return c.Ready(ctx, c.Etcd...)
}

// etcdURLs are all members, for --etcd.
func (c *Cluster) etcdURLs() string {
	var urls []string
	for _, m := range c.Etcd {
		urls = append(urls, fmt.Sprintf("http://%s:%d", m.Node.Addr, etcdClientPort))
	}
	return strings.Join(urls, ",")
}

func (c *Cluster) startMetas(ctx context.Context) error {
	for i, m := range c.Metas {
		if i == 1 {
			if err := c.Ready(ctx, c.Metas[0]); err != nil { // the first metadata server lets the others in
				return err
			}
		}
		if i > 0 {
			if err := c.join(ctx, peer.Meta, m.Name); err != nil {
				return err
			}
		}
		m.path = c.cfg.Penstock
		m.args = append([]string{
			"meta", "--dir", filepath.Join(m.disk.At, "data"), "--name", m.Name, "--etcd", c.etcdURLs(),
			"--listen", fmt.Sprintf("%s:%d", m.Node.Addr, metaPort),
			// So that collections and joins happen while a test waits.
			"--repair-grace", "10s", "--list-interval", "10s", "--join-interval", "2s", "--join-fragments", "4",
		}, c.creds.flags(m.Name)...)
		m.args = append(m.args, c.cfg.MetaArgs...)
		m.ready = func(context.Context) error { return m.listens(metaPort) }
		if err := m.Start(); err != nil {
			return err
		}
	}
	return c.Ready(ctx, c.Metas...)
}

// metaAddrs are all metadata servers, for --cluster.
func (c *Cluster) metaAddrs() string {
	var addrs []string
	for _, m := range c.Metas {
		addrs = append(addrs, m.addr(metaPort))
	}
	return strings.Join(addrs, ",")
}

func (c *Cluster) startChunks(ctx context.Context) error {
	for _, m := range c.Chunks {
		if err := c.join(ctx, peer.ChunkServer, m.Name); err != nil {
			return err
		}
		m.path = c.cfg.Penstock
		m.args = append([]string{
			"chunkserver", "--data", filepath.Join(m.disk.At, "id"), "--disk", filepath.Join(m.disk.At, "d0"), "--name", m.Name,
			"--topology", m.place(),
			// The machines of these tests share the same file system: no way around their
			// network.
			"--local-clients=false",
			"--listen", m.addr(chunkPort), "--cluster", c.metaAddrs(),
		}, c.creds.flags(m.Name)...)
		m.ready = func(ctx context.Context) error {
			s, err := c.Status(ctx)
			if err != nil {
				return err
			}
			for _, srv := range s.ChunkServers {
				if srv.Address == m.addr(chunkPort) {
					return nil
				}
			}
			return fmt.Errorf("penstock status does not list %s", m.addr(chunkPort))
		}
		if err := m.Start(); err != nil {
			return err
		}
	}
	return c.Ready(ctx, c.Chunks...)
}

// Ready waits until members serve.
func (c *Cluster) Ready(ctx context.Context, members ...*Member) error {
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	for _, m := range members {
		if err := m.await(ctx); err != nil {
			return err
		}
	}
	return nil
}

// Penstock runs an administrator's command against the cluster.
func (c *Cluster) Penstock(ctx context.Context, args ...string) ([]byte, error) {
	args = append(args, append([]string{"--cluster", c.metaAddrs()}, c.creds.flags(admin)...)...)
	out, err := c.admin.Output(ctx, c.cfg.Penstock, args...)
	if err != nil {
		return out, fmt.Errorf("penstock %s: %w\n%s", strings.Join(args, " "), err, out)
	}
	return out, nil
}

// Status is the output of penstock status.
type Status struct {
	Volumes []struct {
		ID        uint32 `json:"id"`
		Name      string `json:"name"`
		Path      string `json:"path"`
		UsedBytes uint64 `json:"used_bytes"`
		Replicas  uint32 `json:"replicas"`
	} `json:"volumes"`
	ChunkServers []struct {
		ID       uint64 `json:"id"`
		Address  string `json:"address"`
		Topology string `json:"topology"`
	} `json:"chunk_servers"`
	Meta map[string]any `json:"meta"`
}

// Status asks for the state of the cluster.
func (c *Cluster) Status(ctx context.Context) (*Status, error) {
	out, err := c.Penstock(ctx, "status", "--output", "json")
	if err != nil {
		return nil, err
	}
	var s Status
	if err := json.Unmarshal(out, &s); err != nil {
		return nil, fmt.Errorf("penstock status: %w\n%s", err, out)
	}
	return &s, nil
}

// Fsck demands that penstock fsck finds nothing, within a time: recently broken parts may still
// be under repair.
func (c *Cluster) Fsck(ctx context.Context, within time.Duration) error {
	return eventually(ctx, within, func(ctx context.Context) error {
		_, err := c.Penstock(ctx, "fsck")
		return err
	})
}

// oneTry is long: a look at all chunks runs a command for each file, and other processes may want
// the processors. A command that asks an absent part gets its error within seconds.
const oneTry = 2 * time.Minute

// eventually tries until the call works or the time is over.
func eventually(ctx context.Context, within time.Duration, try func(context.Context) error) error {
	end := time.Now().Add(within)
	for {
		one, cancel := context.WithTimeout(ctx, oneTry)
		err := try(one)
		cancel()
		if err == nil {
			return nil
		}
		if ctx.Err() != nil || time.Now().After(end) {
			return err
		}
		time.Sleep(200 * time.Millisecond)
	}
}

// Close ends everything and leaves nothing: mounts first, then from the top down.
func (c *Cluster) Close() error {
	var errs []error
	for _, m := range c.Mounts {
		errs = append(errs, m.end())
	}
	for _, members := range [][]*Member{c.others, c.Gateways, c.Chunks, c.Metas, c.Etcd} {
		for _, m := range members {
			errs = append(errs, m.end())
		}
	}
	if c.Net != nil {
		errs = append(errs, c.Net.Close())
	}
	return errors.Join(errs...)
}

// Stop ends the mounts in order, then all servers; each must end well.
func (c *Cluster) Stop() error {
	var errs []error
	for _, m := range c.Mounts {
		errs = append(errs, m.Stop())
	}
	for _, members := range [][]*Member{c.others, c.Gateways, c.Chunks, c.Metas, c.Etcd} {
		for _, m := range members {
			errs = append(errs, m.Stop())
		}
	}
	return errors.Join(errs...)
}

// Mount is a client's mount of the whole tree.
type Mount struct {
	*Member
	Path string
}

func (c *Cluster) startMounts(ctx context.Context) error {
	for i := range c.cfg.Mounts {
		name := fmt.Sprint("client", i+1)
		if err := c.grant(ctx, name); err != nil {
			return err
		}
		m, err := c.newMount(name, "/", c.Racks[i%len(c.Racks)])
		if err == nil {
			err = c.begin(ctx, m)
		}
		if err != nil {
			return err
		}
	}
	for _, m := range c.Mounts {
		if err := c.Ready(ctx, m.Member); err != nil {
			return err
		}
	}
	return nil
}

// newMount adds a node that will mount a source; the mount is not begun.
func (c *Cluster) newMount(name, source string, rack *netns.Rack) (*Mount, error) {
	member, err := c.newMember(name, rack, 0)
	if err != nil {
		return nil, err
	}
	m := &Mount{Member: member, Path: filepath.Join(c.cfg.Dir, name)}
	c.Mounts = append(c.Mounts, m)
	m.path = c.cfg.Penstock
	// The place is said: all nodes share the machine's boot id.
	m.args = append([]string{"mount", source, m.Path, "--cluster", c.metaAddrs(), "--topology", m.place()}, c.creds.flags(name)...)
	m.ready = func(context.Context) error {
		if !spawn.Mounted(m.Path) {
			return fmt.Errorf("nothing is mounted at %s", m.Path)
		}
		return nil
	}
	m.clean = func() error { return spawn.Unmount(m.Path) }
	return m, os.Mkdir(m.Path, 0o755)
}

// begin gets a mount its certificate and starts the mount.
func (c *Cluster) begin(ctx context.Context, m *Mount) error {
	if err := c.join(ctx, peer.Client, m.Name); err != nil {
		return err
	}
	return m.Start()
}
