package rig

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"
)

// Machine is a set of namespaces (mounts, network, processes, host name, IPC) that looks
// like a machine of its own to its processes. The machine's first process ends with this
// process, and its end ends the machine: processes, mounts, network.
type Machine struct {
	Name string
	Addr string
	dir  string
	init *exec.Cmd // nil: another process holds the machine
	pid  int       // id of the machine's first process

	mu      sync.Mutex
	running map[string]*Process
}

// Process runs on a machine.
type Process struct {
	enter *os.Process   // nsenter, the parent of the process
	ended chan struct{} // closed when the process has ended

	err error
}

// newMachine starts a machine and waits until its view of the world is set up.
func newMachine(dir, name, addr string, hosts map[string]string) (*Machine, error) {
	m := &Machine{Name: name, Addr: addr, dir: filepath.Join(dir, name), running: map[string]*Process{}}
	for _, d := range []string{"lib/kubelet", "lib/containerd", "lib/penstock-csi", "log/pods", "log/containers", "show"} {
		if err := os.MkdirAll(filepath.Join(m.dir, d), 0o755); err != nil {
			return nil, err
		}
	}
	text, err := json.Marshal(view{Name: name, Dir: m.dir, Addr: addr, Prefix: networkBits, Hosts: hosts})
	if err != nil {
		return nil, err
	}
	r, w, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	defer r.Close()
	said, err := os.Create(filepath.Join(m.dir, "init.log"))
	if err != nil {
		return nil, err
	}
	defer said.Close()
	m.init = exec.Command("/proc/self/exe")
	m.init.Env = append(os.Environ(), initVariable+"="+string(text))
	m.init.ExtraFiles = []*os.File{w}
	m.init.Stdout, m.init.Stderr = said, said
	m.init.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags: syscall.CLONE_NEWNS | syscall.CLONE_NEWNET | syscall.CLONE_NEWPID | syscall.CLONE_NEWUTS | syscall.CLONE_NEWIPC,
		Pdeathsig:  syscall.SIGKILL,
		Setsid:     true, // an interrupt of the terminal ends us first, and us alone
	}
	err = start(m.init)
	w.Close()
	if err != nil {
		return nil, fmt.Errorf("machine %s: %w", name, err)
	}
	if n, _ := r.Read(make([]byte, 1)); n != 1 {
		err := m.init.Wait()
		b, _ := os.ReadFile(said.Name())
		return nil, fmt.Errorf("machine %s did not come up: %v: %s", name, err, b)
	}
	m.pid = m.init.Process.Pid
	return m, nil
}

// start starts a process that dies with this process. The kernel watches the thread that
// started the process, so a thread that never ends starts it.
func start(cmd *exec.Cmd) error {
	starting.Do(func() {
		go func() {
			runtime.LockOSThread()
			for c := range starts {
				c.err <- c.cmd.Start()
			}
		}()
	})
	c := starter{cmd, make(chan error)}
	starts <- c
	return <-c.err
}

type starter struct {
	cmd *exec.Cmd
	err chan error
}

var (
	starting sync.Once
	starts   = make(chan starter)
)

// Command returns a command that will run on the machine.
func (m *Machine) Command(ctx context.Context, name string, args ...string) *exec.Cmd {
	return exec.CommandContext(ctx, "nsenter", append([]string{
		"-t", strconv.Itoa(m.pid), "-m", "-n", "-p", "-u", "-i", "--wd=/", "--", name}, args...)...)
}

// Start runs a program for as long as the machine lives, unless it is killed. The output
// is in the file of Log.
func (m *Machine) Start(as, name string, args ...string) (*Process, error) {
	cmd := m.Command(context.Background(), name, args...)
	log, err := os.OpenFile(m.Log(as), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err != nil {
		return nil, err
	}
	defer log.Close()
	cmd.Stdout, cmd.Stderr = log, log
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL, Setsid: true}
	if err := start(cmd); err != nil {
		return nil, fmt.Errorf("%s on %s: %w", as, m.Name, err)
	}
	if err := os.WriteFile(m.pidFile(as), []byte(strconv.Itoa(cmd.Process.Pid)), 0o644); err != nil {
		return nil, err
	}
	p := &Process{enter: cmd.Process, ended: make(chan struct{})}
	m.mu.Lock()
	m.running[as] = p
	m.mu.Unlock()
	go func() { // ends with the machine at the latest
		p.err = cmd.Wait()
		close(p.ended)
	}()
	return p, nil
}

// Log returns the file with the output of the program started under a name.
func (m *Machine) Log(as string) string { return filepath.Join(m.dir, "log", as+".log") }

// Signal sends a signal to the program started under a name.
func (m *Machine) Signal(as string, sig syscall.Signal) error {
	b, err := os.ReadFile(m.pidFile(as))
	if err != nil {
		return err
	}
	// The program is the only child of nsenter.
	enter := strings.TrimSpace(string(b))
	b, err = os.ReadFile("/proc/" + enter + "/task/" + enter + "/children")
	if err != nil {
		return fmt.Errorf("%s on %s: %w", as, m.Name, err)
	}
	pid, err := strconv.Atoi(strings.TrimSpace(string(b)))
	if err != nil {
		return fmt.Errorf("%s on %s has processes %q", as, m.Name, b)
	}
	if err := syscall.Kill(pid, sig); err != nil || sig != syscall.SIGCONT {
		return err
	}
	// nsenter stops when the program stops, and then would not reap it.
	outside, err := strconv.Atoi(enter)
	if err != nil {
		return err
	}
	return syscall.Kill(outside, sig)
}

// pidFile is the file with the id of the process that entered the machine to run a
// program.
func (m *Machine) pidFile(as string) string { return filepath.Join(m.dir, "log", as+".pid") }

// Died lists the started programs that have ended.
func (m *Machine) Died() (names []string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for name, p := range m.running {
		select {
		case <-p.ended:
			names = append(names, fmt.Sprintf("%s on %s: %v", name, m.Name, p.err))
		default:
		}
	}
	slices.Sort(names)
	return names
}

// stop ends the machine. When stop returns, no process of the machine is left, so neither
// are its mounts and its network.
func (m *Machine) stop() error {
	m.mu.Lock()
	for _, p := range m.running {
		// nsenter reaps the program that it started; see Signal.
		_ = p.enter.Signal(syscall.SIGCONT)
	}
	m.mu.Unlock()
	if err := m.init.Process.Kill(); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return err
	}
	done := make(chan error, 1)
	go func() { done <- m.init.Wait() }() // the kernel lets the first process go last
	select {
	case <-done:
		return nil
	case <-time.After(30 * time.Second):
		return fmt.Errorf("machine %s does not end: a process of it does not die", m.Name)
	}
}

// link joins the networks of two machines.
func (m *Machine) link(o *Machine) error {
	ours, theirs := strconv.Itoa(m.pid), strconv.Itoa(o.pid)
	in := func(pid, args string) error {
		return quiet("nsenter", append([]string{"-t", pid, "-n", "ip"}, strings.Fields(args)...)...)
	}
	name := "to-" + o.Name
	return errors.Join(
		in(ours, fmt.Sprintf("link add %s type veth peer name uplink netns %s", name, theirs)),
		in(ours, "link set "+name+" master cni0 up"),
		in(theirs, "link set uplink master cni0 up"),
	)
}
