// Package spawn owns penstock as a child process: starting `penstock up`, noticing that
// its mount serves, ending it gently or with SIGKILL, and leaving no process and no mount
// behind. The demo and the crash tests use it; callers that start other roles and
// programs use Begin.
package spawn

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// Config describes the process to start.
type Config struct {
	Binary string   // path of penstock
	Dir    string   // data directory
	Mount  string   // mount point, an existing directory; empty for none
	Args   []string // more arguments of `penstock up`
	Env    []string // more environment, "NAME=value"
	// Wrap goes before the command line: strace and its arguments.
	Wrap []string
	// Log gets the output of the process; nil drops the output. Errors of this package
	// have the output's end.
	Log io.Writer
	// Ready is how long the mount may take to serve; 0 means 60 s.
	Ready time.Duration
}

// Process is a running `penstock up`, or the command given to Begin.
type Process struct {
	cfg  Config
	name string
	cmd  *exec.Cmd
	tail *tail
	done chan struct{} // closed when the process ended
	err  error         // then: how
	// StartedIn is the time from the start of the process until its mount
	// served.
	StartedIn time.Duration
}

// ErrNotReady: the process runs, but its mount did not serve in time.
var ErrNotReady = errors.New("penstock up does not serve")

// Start runs `penstock up` and returns when its mount serves.
func Start(ctx context.Context, cfg Config) (*Process, error) {
	if cfg.Ready == 0 {
		cfg.Ready = time.Minute
	}
	args := append(slices.Clone(cfg.Wrap), cfg.Binary, "up", "--dir", cfg.Dir)
	if cfg.Mount != "" {
		args = append(args, "--mount", cfg.Mount)
	}
	args = append(args, cfg.Args...)
	cmd := exec.Command(args[0], args[1:]...)
	cmd.Env = append(os.Environ(), cfg.Env...)
	// A separate process group: Ctrl-C reaches this process only, which then ends the
	// child in order.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	began := time.Now()
	p, err := Begin(cmd, "penstock up", cfg.Log, (*exec.Cmd).Start)
	if err != nil {
		return nil, err
	}
	p.cfg = cfg
	if err := p.waitReady(ctx, began); err != nil {
		p.Kill()
		return nil, errors.Join(err, Unmount(cfg.Mount))
	}
	p.StartedIn = time.Since(began)
	return p, nil
}

// Begin starts any command with start, which must put the command into a process group of
// its own; name is for errors. The command's output goes to log; nil drops the output.
func Begin(cmd *exec.Cmd, name string, log io.Writer, start func(*exec.Cmd) error) (*Process, error) {
	p := &Process{name: name, cmd: cmd, tail: &tail{to: log}, done: make(chan struct{})}
	cmd.Stdout, cmd.Stderr = p.tail, p.tail
	cmd.WaitDelay = 5 * time.Second
	if err := start(cmd); err != nil {
		return nil, err
	}
	go func() {
		p.err = cmd.Wait()
		close(p.done)
	}()
	return p, nil
}

func (p *Process) waitReady(ctx context.Context, began time.Time) error {
	for {
		if p.cfg.Mount != "" && Mounted(p.cfg.Mount) && answers(p.cfg.Mount) {
			return nil
		}
		if p.cfg.Mount == "" {
			if _, err := os.Stat(filepath.Join(p.cfg.Dir, "meta.sock")); err == nil {
				return nil
			}
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-p.done:
			return fmt.Errorf("penstock up ended before it served: %w\n%s", p.err, p.tail)
		case <-time.After(2 * time.Millisecond):
		}
		if time.Since(began) > p.cfg.Ready {
			return fmt.Errorf("%w after %v\n%s", ErrNotReady, p.cfg.Ready, p.tail)
		}
	}
}

// answers reports whether a path's mount answers statfs: the kernel never answers statfs
// from memory, so a dead mount does not look alive. Between the end of a dead mount and
// the beginning of a new mount, the folder below answers, which is no mount. The asking
// thread may hang; answers does not wait for it.
func answers(mount string) bool {
	ok := make(chan bool, 1)
	go func() {
		var st, above unix.Statfs_t
		ok <- unix.Statfs(mount, &st) == nil && unix.Statfs(filepath.Dir(mount), &above) == nil &&
			(st.Type != above.Type || st.Fsid != above.Fsid)
	}()
	select {
	case v := <-ok:
		return v
	case <-time.After(10 * time.Second):
		return false
	}
}

// PID returns the id of the process (with Wrap, of strace).
func (p *Process) PID() int { return p.cmd.Process.Pid }

// Done is closed when the process ended.
func (p *Process) Done() <-chan struct{} { return p.done }

// State describes whether the process runs, or how the process ended.
func (p *Process) State() string {
	select {
	case <-p.done:
		return fmt.Sprintf("the process ended: %v; it said:\n%s", p.err, p.tail)
	case <-time.After(100 * time.Millisecond): // the mount may go before the process ends
		return "the process runs"
	}
}

// Output returns the end of the process's output.
func (p *Process) Output() string { return p.tail.String() }

// Kill ends the process, and a wrapped process, with SIGKILL and waits for the end. The
// dead mount stays.
func (p *Process) Kill() {
	// The group has no other members: Setpgid made it for this process.
	_ = syscall.Kill(-p.cmd.Process.Pid, syscall.SIGKILL)
	<-p.done
}

// Pause stops the process (SIGSTOP); Resume continues the process.
func (p *Process) Pause() error { return syscall.Kill(-p.cmd.Process.Pid, syscall.SIGSTOP) }

// Resume undoes Pause.
func (p *Process) Resume() error { return syscall.Kill(-p.cmd.Process.Pid, syscall.SIGCONT) }

// Stop ends the process gently. The process must unmount and exit with status 0 within
// the time.
func (p *Process) Stop(within time.Duration) error {
	if err := syscall.Kill(-p.cmd.Process.Pid, syscall.SIGTERM); err != nil && !errors.Is(err, syscall.ESRCH) {
		return err
	}
	select {
	case <-p.done:
	case <-time.After(within):
		p.Kill()
		return errors.Join(fmt.Errorf("%s did not stop within %v\n%s", p.name, within, p.tail), Unmount(p.cfg.Mount))
	}
	if p.err != nil {
		return errors.Join(fmt.Errorf("%s: %w\n%s", p.name, p.err, p.tail), Unmount(p.cfg.Mount))
	}
	if p.cfg.Mount != "" && Mounted(p.cfg.Mount) {
		return errors.Join(fmt.Errorf("penstock up left its mount %s behind", p.cfg.Mount), Unmount(p.cfg.Mount))
	}
	return nil
}

// End makes sure that neither process nor mount is left, however things went.
func (p *Process) End() error {
	select {
	case <-p.done:
	default:
		p.Kill()
	}
	return Unmount(p.cfg.Mount)
}

// Mounted reports whether a path is a mount point. Mounted reads the kernel's list and
// never asks the mount, which may be dead.
func Mounted(path string) bool {
	b, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return false
	}
	for line := range strings.Lines(string(b)) {
		if f := strings.Fields(line); len(f) > 4 && unescape(f[4]) == path {
			return true
		}
	}
	return false
}

// unescape undoes the octal escapes of mountinfo.
func unescape(s string) string {
	return strings.NewReplacer(`\040`, " ", `\011`, "\t", `\012`, "\n", `\134`, `\`).Replace(s)
}

// Unmount unmounts all mounts at a path, dead or alive.
func Unmount(path string) error {
	if path == "" {
		return nil
	}
	for range 10 {
		if !Mounted(path) {
			return nil
		}
		if err := unix.Unmount(path, unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW); err != nil {
			if out, ferr := exec.Command("fusermount3", "-u", "-z", path).CombinedOutput(); ferr != nil {
				return fmt.Errorf("unmounting %s: %w; fusermount3: %s", path, err, out)
			}
		}
	}
	return fmt.Errorf("%s is mounted again and again", path)
}

// tail keeps the last bytes of a process's output, and passes all output on.
type tail struct {
	to  io.Writer
	mu  sync.Mutex
	buf []byte
}

const tailBytes = 8 << 10

func (t *tail) Write(p []byte) (int, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.buf = append(t.buf, p...)
	if extra := len(t.buf) - tailBytes; extra > 0 {
		t.buf = append(t.buf[:0], t.buf[extra:]...)
	}
	if t.to != nil {
		return t.to.Write(p)
	}
	return len(p), nil
}

func (t *tail) String() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	return string(t.buf)
}
