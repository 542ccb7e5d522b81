package failover

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"time"

	"penstock.io/penstock/cmd/penstock/spawn"
	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/admin"
	"penstock.io/penstock/meta/client"
	"penstock.io/penstock/meta/cluster"
	"penstock.io/penstock/meta/cluster/embedded"
	"penstock.io/penstock/meta/journal/etcd"
	"penstock.io/penstock/meta/peer"
	"penstock.io/penstock/test/port"
)

// site is metadata servers on one etcd, each a process of its own that reaches etcd through a
// gate.
type site struct {
	binary string
	dir    string
	env    []string
	etcd   *embedded.Server
	metas  []*server
	owners *etcd.Owners
}

type server struct {
	s    *site
	name string
	addr string
	dir  string
	gate *gate
	more []string // arguments
	p    *spawn.Process
	log  *os.File
}

// newSite starts n servers. The caller closes the site, even with an error.
func newSite(binary, dir string, n int, env ...string) (*site, error) {
	s := &site{binary: binary, dir: dir, env: env}
	var err error
	if s.etcd, err = embedded.Start(embedded.Config{Dir: filepath.Join(dir, "etcd")}); err != nil {
		return s, err
	}
	s.owners = etcd.NewOwners(s.etcd.Client(), nil, etcd.OwnersConfig{Prefix: "/penstock/default"})
	for i := range n {
		addr, err := port.Find()
		if err != nil {
			return s, err
		}
		m := &server{s: s, name: fmt.Sprint("m", i+1), addr: addr, dir: filepath.Join(dir, fmt.Sprint("m", i+1))}
		s.metas = append(s.metas, m)
		if m.gate, err = newGate(filepath.Join(dir, fmt.Sprint("e", i+1)), strings.TrimPrefix(s.etcd.Endpoint(), "unix://")); err != nil {
			return s, err
		}
		if m.log, err = os.Create(m.dir + ".log"); err != nil {
			return s, err
		}
		if err := m.start(); err != nil {
			return s, err
		}
	}
	for _, m := range s.metas {
		if err := m.await(90 * time.Second); err != nil {
			return s, err
		}
	}
	return s, nil
}

func (m *server) start() error {
	cmd := exec.Command(m.s.binary, append([]string{"meta", "--dir", m.dir, "--name", m.name, "--etcd", "unix://" + m.gate.path,
		"--listen", m.addr, "--insecure", "--log-level", "info"}, m.more...)...)
	cmd.Env = append(os.Environ(), m.s.env...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	var err error
	m.p, err = spawn.Begin(cmd, m.name, m.log, (*exec.Cmd).Start)
	return err
}

// await waits until the server lets a client in.
func (m *server) await(within time.Duration) error {
	ctx, cancel := context.WithTimeout(context.Background(), within)
	defer cancel()
	c, err := client.Dial(ctx, client.Config{Addrs: []string{m.addr}, Name: "probe", Creds: peer.Insecure()})
	if err != nil {
		return fmt.Errorf("%s does not answer: %w\n%s", m.name, err, m.p.Output())
	}
	return c.Close(ctx)
}

func (s *site) addrs() (l []string) {
	for _, m := range s.metas {
		l = append(l, m.addr)
	}
	return l
}

// owner finds the server that owns a volume by etcd's record; nil if none does.
func (s *site) owner(v meta.VolumeID) *server {
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	rec, held, err := s.owners.Last(ctx, v)
	if err != nil || !held {
		return nil
	}
	for _, m := range s.metas {
		if m.name == rec.Server {
			return m
		}
	}
	return nil
}

// home is the server that should own a volume while all servers live.
func (s *site) home(v meta.VolumeID) *server {
	var all []cluster.MetaServer
	for _, m := range s.metas {
		all = append(all, cluster.MetaServer{Name: m.name})
	}
	first := cluster.Rank(v, all)[0].Name
	for _, m := range s.metas {
		if m.name == first {
			return m
		}
	}
	return nil
}

func (s *site) dial(ctx context.Context, name string, h client.Handler, log *slog.Logger) (*client.Session, error) {
	return client.Dial(ctx, client.Config{Addrs: s.addrs(), Name: name, Handler: h, Logger: log.With("client", name), Creds: peer.Insecure()})
}

// api makes a client of the administrative API.
func (s *site) api() (*admin.Client, error) {
	return admin.New(admin.Config{Addrs: s.addrs(), Creds: peer.Insecure()})
}

// volumes makes n volumes beside the root.
func (s *site) volumes(ctx context.Context, n int) (ids []meta.VolumeID, err error) {
	c, err := s.api()
	if err != nil {
		return nil, err
	}
	defer c.Close()
	for i := range n {
		v, err := c.CreateVolume(ctx, fmt.Sprint("v", i), meta.Policy{Replicas: 1}, meta.VolumeWords{})
		if err != nil {
			return nil, err
		}
		ids = append(ids, v.ID)
	}
	return ids, nil
}

func (s *site) close() {
	for _, m := range s.metas {
		if m.p != nil {
			m.p.Resume()
			m.p.Kill()
		}
		if m.gate != nil {
			m.gate.close()
		}
		if m.log != nil {
			m.log.Close()
		}
	}
	if s.etcd != nil {
		s.etcd.Close()
	}
}

// gate is a Unix socket in front of another socket; the gate can hold back the bytes of both
// directions, as a broken network does.
type gate struct {
	path, to string
	l        net.Listener
	wg       sync.WaitGroup

	mu    sync.Mutex
	shut  chan struct{} // nil: open; otherwise closed when the gate opens
	held  int           // bytes held back towards the other
	conns map[net.Conn]struct{}
	done  bool
}

func newGate(path, to string) (*gate, error) {
	l, err := net.Listen("unix", path)
	if err != nil {
		return nil, err
	}
	g := &gate{path: path, to: to, l: l, conns: map[net.Conn]struct{}{}}
	g.wg.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			up, err := net.Dial("unix", to)
			if err != nil {
				c.Close()
				continue
			}
			g.mu.Lock()
			g.conns[c], g.conns[up] = struct{}{}, struct{}{}
			if g.done {
				c.Close()
				up.Close()
			}
			g.mu.Unlock()
			g.wg.Go(func() { g.copy(c, up, false) })
			g.wg.Go(func() { g.copy(up, c, true) })
		}
	})
	return g, nil
}

func (g *gate) copy(to, from net.Conn, onward bool) {
	defer to.Close()
	defer from.Close()
	buf := make([]byte, 64<<10)
	for {
		n, err := from.Read(buf)
		if err != nil {
			return
		}
		g.mu.Lock()
		wait := g.shut
		if wait != nil && onward {
			g.held += n
		}
		g.mu.Unlock()
		if wait != nil {
			<-wait
		}
		if _, err := to.Write(buf[:n]); err != nil {
			return
		}
	}
}

// cut holds everything back from now on; heal lets everything pass.
func (g *gate) cut() {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.shut == nil {
		g.shut, g.held = make(chan struct{}), 0
	}
}

// holds returns the number of bytes held back on their way to the other side.
func (g *gate) holds() int {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.held
}

func (g *gate) heal() {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.shut != nil {
		close(g.shut)
		g.shut = nil
	}
}

func (g *gate) close() {
	g.heal()
	g.l.Close()
	g.mu.Lock()
	g.done = true
	for c := range g.conns {
		c.Close()
	}
	g.mu.Unlock()
	g.wg.Wait()
}
