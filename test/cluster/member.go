package cluster

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"penstock.io/penstock/cmd/penstock/spawn"
	"penstock.io/penstock/test/disk"
	"penstock.io/penstock/test/netns"
)

// Member is one process of a cluster with its node and its disk; a test may start and end the
// process many times.
type Member struct {
	Name string
	Node *netns.Node

	disk  *disk.Disk // nil for mounts and gateways
	alone bool       // like a member with a disk: see Start
	log   *os.File
	path  string
	args  []string
	env   []string
	ready func(context.Context) error
	clean func() error // after the process ended, before its next start; may be nil

	mayDie atomic.Bool  // the disk is broken: the end of the process is no defect
	era    atomic.Int64 // odd while the member serves; changes at each beginning and end

	mu      sync.Mutex
	process *spawn.Process // nil while none should run
}

func (c *Cluster) newMember(name string, rack *netns.Rack, bytes int64) (*Member, error) {
	node, err := rack.AddNode(name)
	if err != nil {
		return &Member{Name: name}, err
	}
	return c.memberOn(node, name, bytes)
}

// memberOn is newMember on an existing node.
func (c *Cluster) memberOn(node *netns.Node, name string, bytes int64) (*Member, error) {
	m := &Member{Name: name, Node: node, env: c.cfg.Env}
	logs := filepath.Join(c.cfg.Dir, "log")
	if err := os.MkdirAll(logs, 0o755); err != nil {
		return m, err
	}
	var err error
	if m.log, err = os.OpenFile(filepath.Join(logs, name), os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o644); err != nil {
		return m, err
	}
	if bytes > 0 {
		m.disk, err = disk.New(filepath.Join(c.cfg.Dir, name+".img"), filepath.Join(c.cfg.Dir, name), bytes)
	}
	return m, err
}

func (m *Member) addr(port int) string { return fmt.Sprintf("%s:%d", m.Node.Addr, port) }

// place is where the member stands, for --topology.
func (m *Member) place() string { return fmt.Sprintf("/dc1/%s/%s", m.Node.Rack.Name, m.Name) }

// note writes a line of the test into the member's log.
func (m *Member) note(format string, a ...any) {
	fmt.Fprintf(m.log, "--- %s "+format+"\n", append([]any{time.Now().Format("15:04:05.000")}, a...)...)
}

// Start starts the process.
func (m *Member) Start() error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.process != nil {
		return fmt.Errorf("%s runs already", m.Name)
	}
	if m.clean != nil {
		if err := m.clean(); err != nil {
			return err
		}
	}
	m.note("start %s %s", m.path, strings.Join(m.args, " "))
	p, err := m.Node.Start(netns.Config{
		Name: m.Name, Path: m.path, Args: m.args, Env: m.env, Log: m.log,
		// Servers are alone as on a machine of their own: no other part may conclude from the
		// process table that a server is dead. A mount serves callers of this machine.
		Alone: m.disk != nil || m.alone,
	})
	if err != nil {
		return err
	}
	m.process = p
	return nil
}

func (m *Member) running() *spawn.Process {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.process
}

// await waits until the member serves; the end of its process is an error.
func (m *Member) await(ctx context.Context) error {
	for {
		p := m.running()
		if p == nil {
			return fmt.Errorf("%s does not run", m.Name)
		}
		one, cancel := context.WithTimeout(ctx, 5*time.Second)
		err := m.ready(one)
		cancel()
		if err == nil {
			m.serves(true)
			return nil
		}
		select {
		case <-p.Done():
			return fmt.Errorf("%s: %s", m.Name, p.State())
		case <-ctx.Done():
			return fmt.Errorf("%s does not serve: %w\n%s", m.Name, err, p.Output())
		case <-time.After(50 * time.Millisecond):
		}
	}
}

// Kill ends the process with SIGKILL; its dead mount stays.
func (m *Member) Kill() {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.process != nil {
		m.serves(false)
		m.note("SIGKILL")
		m.process.Kill()
		m.process = nil
	}
}

// serves notes whether the member serves from now on.
func (m *Member) serves(now bool) {
	if era := m.era.Load(); (era%2 == 1) != now {
		m.era.CompareAndSwap(era, era+1)
	}
}

// Pause stops the process where it is; Resume lets the process go on.
func (m *Member) Pause() error { return m.signal("pause", (*spawn.Process).Pause) }

// Resume undoes Pause.
func (m *Member) Resume() error { return m.signal("resume", (*spawn.Process).Resume) }

func (m *Member) signal(what string, f func(*spawn.Process) error) error {
	p := m.running()
	if p == nil {
		return fmt.Errorf("%s does not run", m.Name)
	}
	m.note("%s", what)
	return f(p)
}

// Stop ends the process gently; the process must end well.
func (m *Member) Stop() error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.process == nil {
		return nil
	}
	m.note("SIGTERM")
	err := m.process.Stop(time.Minute)
	m.process = nil
	return err
}

// CutPower takes the power away from the member: bytes that are not on its disk are lost. Reboot
// brings the disk back.
//
// The process stands still when the disk goes. A sync under way then may succeed without its
// bytes (ext4's shutdown behaves so); where the power is really cut, no process lives to see that
// success. A process that told other parts of the success would make a promise that no disk
// keeps.
func (m *Member) CutPower() error {
	m.note("power cut")
	err := errors.Join(m.freeze(), m.disk.Cut())
	m.Kill()
	return err
}

// freeze stops the process, for good; the process may have ended.
func (m *Member) freeze() error {
	if p := m.running(); p != nil && p.Pause() == nil {
		return standsStill(p.PID())
	}
	return nil
}

// standsStill waits until no thread of a stopped process runs its own code: each thread is
// stopped, or in a call of the kernel from which the thread will not return.
func standsStill(pid int) error {
	for deadline := time.Now().Add(30 * time.Second); ; time.Sleep(time.Millisecond) {
		files, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/stat", pid))
		if err != nil {
			return err
		}
		running := 0
		for _, f := range files {
			b, err := os.ReadFile(f)
			if err != nil {
				continue // the thread ended
			}
			// The state follows the name, which is in parentheses.
			if i := bytes.LastIndexByte(b, ')'); i+2 < len(b) && bytes.IndexByte([]byte("RS"), b[i+2]) >= 0 {
				running++
			}
		}
		if running == 0 {
			return nil
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("process %d was stopped, and %d of its threads run", pid, running)
		}
	}
}

// Reboot mounts the disk again after CutPower; the kernel's caches are gone.
func (m *Member) Reboot() error { return errors.Join(m.disk.Unmount(), m.disk.Mount()) }

// died returns an error if the process ended by itself.
func (m *Member) died() error {
	p := m.running()
	if p == nil {
		return nil
	}
	select {
	case <-p.Done():
		return fmt.Errorf("%s ended by itself: %s", m.Name, p.State())
	default:
		return nil
	}
}

// end leaves neither process nor mount nor disk.
func (m *Member) end() error {
	m.Kill()
	var errs []error
	if m.clean != nil {
		errs = append(errs, m.clean())
	}
	if m.disk != nil {
		errs = append(errs, m.disk.Remove())
	}
	if m.log != nil {
		errs = append(errs, m.log.Close())
	}
	return errors.Join(errs...)
}

// dial connects to a port of the member, from its own node.
func (m *Member) dial(port int) (conn net.Conn, err error) {
	err = m.Node.Do(func() (err error) {
		conn, err = net.DialTimeout("tcp", m.addr(port), time.Second)
		return err
	})
	return conn, err
}

func (m *Member) listens(port int) error {
	conn, err := m.dial(port)
	if err != nil {
		return err
	}
	return conn.Close()
}

// healthy asks an etcd member whether the member can serve.
func (m *Member) healthy() error {
	conn, err := m.dial(etcdClientPort)
	if err != nil {
		return err
	}
	defer conn.Close()
	if err := conn.SetDeadline(time.Now().Add(3 * time.Second)); err != nil {
		return err
	}
	if _, err := fmt.Fprintf(conn, "GET /health HTTP/1.0\r\n\r\n"); err != nil {
		return err
	}
	b := make([]byte, 4096)
	n, err := conn.Read(b)
	if err != nil || !strings.Contains(string(b[:n]), " 200 ") {
		return fmt.Errorf("etcd's health: %w %s", err, b[:n])
	}
	return nil
}
