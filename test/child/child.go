// Package child lets a test binary also be other processes: servers with their own
// processor time, which can be stopped and killed.
package child

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// variable is the environment variable with the child's role, as JSON.
const variable = "PENSTOCK_TEST_CHILD"

// A Role is a kind of child; its fields are its configuration.
type Role interface {
	// Run serves until Orphaned returns. When ready, Run prints a line: its address, or nothing.
	Run() error
}

// Tests runs the tests of a package: a testing.M, or a wrapper that prepares first.
type Tests interface{ Run() int }

// Main runs the tests of a package or, in a child, the child's role. Main returns the
// exit status.
func Main[R Role](m Tests) int {
	v := os.Getenv(variable)
	if v == "" {
		return m.Run()
	}
	var r R
	err := json.Unmarshal([]byte(v), &r)
	if err == nil {
		err = r.Run()
	}
	if err != nil {
		fmt.Fprintf(os.Stderr, "child %s: %v\n", v, err)
		return 1
	}
	return 0
}

// Ready tells the parent the address of the serving child.
func Ready(addr string) { fmt.Println(addr) }

// Orphaned returns when the parent has closed the parent's end of the pipe, or is gone.
func Orphaned() { _, _ = io.Copy(io.Discard, os.Stdin) }

// Process is a running child.
type Process struct {
	Addr  string // address from Ready
	cmd   *exec.Cmd
	stdin io.Closer
	ended chan struct{}
}

// Start starts a child and returns when the child is ready. The end of the test ends the
// child.
func Start(t testing.TB, r Role) *Process {
	t.Helper()
	v, err := json.Marshal(r)
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command("/proc/self/exe", "-test.run=^$")
	cmd.Env = append(os.Environ(), variable+"="+string(v))
	cmd.Stderr = os.Stderr
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := Spawn(cmd); err != nil {
		t.Fatal(err)
	}
	p := &Process{cmd: cmd, stdin: in, ended: make(chan struct{})}
	lines := bufio.NewReader(out)
	line, err := lines.ReadString('\n')
	go func() {
		_, _ = io.Copy(io.Discard, lines)
		_ = cmd.Wait()
		close(p.ended)
	}()
	t.Cleanup(func() { p.stop(t, v) })
	if err != nil {
		t.Fatalf("child %s: %v", v, err)
	}
	p.Addr = strings.TrimSpace(line)
	return p
}

// Spawn starts a command that is killed when this process ends. The kernel kills a command when
// the thread that started the command ends, and threads do end earlier, such as threads of
// goroutines locked to a thread. So a thread that never ends starts all commands.
func Spawn(cmd *exec.Cmd) error {
	if cmd.SysProcAttr == nil {
		cmd.SysProcAttr = &syscall.SysProcAttr{}
	}
	cmd.SysProcAttr.Pdeathsig = syscall.SIGKILL
	spawner.once.Do(func() {
		spawner.start, spawner.started = make(chan *exec.Cmd), make(chan error)
		go func() {
			runtime.LockOSThread()
			for cmd := range spawner.start {
				spawner.started <- cmd.Start()
			}
		}()
	})
	spawner.mu.Lock()
	defer spawner.mu.Unlock()
	spawner.start <- cmd
	return <-spawner.started
}

var spawner struct {
	once    sync.Once
	mu      sync.Mutex
	start   chan *exec.Cmd
	started chan error
}

// stop asks the child to end, and kills a child that does not.
func (p *Process) stop(t testing.TB, what []byte) {
	_ = p.stdin.Close()
	select {
	case <-p.ended:
	case <-time.After(time.Minute):
		t.Errorf("child %s does not end", what)
		p.Kill()
	}
}

// Kill ends the child with SIGKILL and waits for the end.
func (p *Process) Kill() {
	_ = p.cmd.Process.Kill()
	<-p.ended
}

// Signal sends a signal to the child.
func (p *Process) Signal(sig syscall.Signal) error { return p.cmd.Process.Signal(sig) }

// PID of the child.
func (p *Process) PID() int { return p.cmd.Process.Pid }

// CPU returns the processor time of the child, without its children, by the child's own
// clock: in nanoseconds, where /proc has ticks.
func (p *Process) CPU() (time.Duration, error) { return CPU(p.PID()) }

// CPU returns the processor time of any process of this PID name space.
func CPU(pid int) (time.Duration, error) {
	const sched = 2 // CPUCLOCK_SCHED, of all threads
	var ts unix.Timespec
	if err := unix.ClockGettime(int32(^pid<<3|sched), &ts); err != nil {
		return 0, err
	}
	return time.Duration(ts.Nano()), nil
}
