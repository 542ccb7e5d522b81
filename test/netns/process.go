package netns

import (
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"

	"penstock.io/penstock/cmd/penstock/spawn"
)

// Config describes a process to start on a node.
type Config struct {
	Name string // in errors
	Path string
	Args []string
	Env  []string // beside the environment of the test
	Log  io.Writer
	// Alone gives the process a process-id space of its own, as containers have: other processes
	// of the machine can't tell whether the process lives.
	Alone bool
}

// Start starts a process on the node. The process dies with the test.
func (n *Node) Start(cfg Config) (*spawn.Process, error) {
	cmd := exec.Command(cfg.Path, cfg.Args...)
	cmd.Env = append(os.Environ(), cfg.Env...)
	attr := &syscall.SysProcAttr{}
	if cfg.Alone {
		attr.Cloneflags = syscall.CLONE_NEWPID
	}
	cmd.SysProcAttr = attr
	return spawn.Begin(cmd, cfg.Name, cfg.Log, func(cmd *exec.Cmd) error { return n.start(cmd) })
}

// Run runs a command on the node to its end, and returns the command's output.
func (n *Node) Run(ctx context.Context, path string, args ...string) ([]byte, error) {
	cmd := exec.CommandContext(ctx, path, args...)
	var out limited
	cmd.Stdout, cmd.Stderr = &out, &out
	if err := n.start(cmd); err != nil {
		return nil, err
	}
	err := cmd.Wait()
	return out.b, err
}

// limited keeps the first bytes of an output.
type limited struct{ b []byte }

func (l *limited) Write(p []byte) (int, error) {
	if room := 16<<20 - len(l.b); room > 0 {
		l.b = append(l.b, p[:min(len(p), room)]...)
	}
	return len(p), nil
}

// Output is Run with standard output alone.
func (n *Node) Output(ctx context.Context, path string, args ...string) ([]byte, error) {
	var out limited
	err := n.Pipe(ctx, nil, &out, path, args...)
	return out.b, err
}

// Pipe runs a command on the node to its end, between an input, which may be nil, and an output.
func (n *Node) Pipe(ctx context.Context, in io.Reader, out io.Writer, path string, args ...string) error {
	cmd := exec.CommandContext(ctx, path, args...)
	var errs limited
	cmd.Stdin, cmd.Stdout, cmd.Stderr = in, out, &errs
	if err := n.start(cmd); err != nil {
		return err
	}
	if err := cmd.Wait(); err != nil {
		return fmt.Errorf("%w\n%s", err, errs.b)
	}
	return nil
}

// start starts a command on the node; the command is killed when the test dies.
func (n *Node) start(cmd *exec.Cmd) error {
	if cmd.SysProcAttr == nil {
		cmd.SysProcAttr = &syscall.SysProcAttr{}
	}
	cmd.SysProcAttr.Setpgid = true
	cmd.SysProcAttr.Pdeathsig = syscall.SIGKILL
	return within(n.ns, cmd.Start)
}

// within runs f on a thread in a namespace. A single thread that lives as long as the test does
// all such work: a child's Pdeathsig is sent when the thread that started the child ends, and
// other threads may end early.
func within(ns string, f func() error) error {
	launcher.once.Do(func() {
		launcher.work = make(chan job)
		go launch()
	})
	j := job{ns: ns, f: f, done: make(chan error)}
	launcher.work <- j
	return <-j.done
}

type job struct {
	ns   string
	f    func() error
	done chan error
}

var launcher struct {
	once sync.Once
	work chan job
}

// launch does the jobs, for ever.
func launch() {
	runtime.LockOSThread()
	for j := range launcher.work {
		j.done <- inNamespace(j.ns, j.f)
	}
}

func inNamespace(ns string, f func() error) error {
	home, err := os.Open("/proc/thread-self/ns/net")
	if err != nil {
		return err
	}
	defer home.Close()
	there, err := os.Open(filepath.Join(namespaces, ns))
	if err != nil {
		return err
	}
	defer there.Close()
	if err := unix.Setns(int(there.Fd()), unix.CLONE_NEWNET); err != nil {
		return fmt.Errorf("netns: entering %s: %w", ns, err)
	}
	err = f()
	if back := unix.Setns(int(home.Fd()), unix.CLONE_NEWNET); back != nil {
		panic(fmt.Sprintf("netns: the launching thread can't return from %s: %v", ns, back))
	}
	return err
}

// Do runs f on a thread in the node's namespace: sockets that f opens belong to the node. f must
// not start goroutines that open sockets.
func (n *Node) Do(f func() error) error { return within(n.ns, f) }

// Processes lists the processes of the node.
func (n *Node) Processes() ([]int, error) {
	var st syscall.Stat_t
	if err := syscall.Stat(filepath.Join(namespaces, n.ns), &st); err != nil {
		return nil, err
	}
	return processesIn(map[uint64]bool{st.Ino: true})
}

// Kill ends all processes on the node at once, as a loss of power does, and returns though some
// processes can't end yet: a process that waits for its own mount ends when the mount is taken
// away by force.
func (n *Node) Kill() error {
	killed := map[int]bool{}
	for {
		pids, err := n.Processes()
		if err != nil {
			return err
		}
		fresh := false
		for _, pid := range pids {
			fresh = fresh || !killed[pid]
			killed[pid] = true
			_ = syscall.Kill(pid, syscall.SIGKILL)
		}
		if !fresh { // every process that was about to start another is dead
			return nil
		}
	}
}
