package takeover

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// locker is a process that obeys commands for one file, a line each: lock, try, unlock, close. It
// answers with "ok" or the error.
func locker(how, name string, in io.Reader, out io.Writer) error {
	f, err := os.OpenFile(name, os.O_RDWR|os.O_CREATE, 0o644)
	if err != nil {
		return err
	}
	fmt.Fprintln(out, "open")
	for s := bufio.NewScanner(in); s.Scan(); {
		var err error
		switch s.Text() {
		case "lock":
			err = retry(func() error { return locking[how](f, unix.F_WRLCK, true) })
		case "try":
			err = locking[how](f, unix.F_WRLCK, false)
		case "unlock":
			err = locking[how](f, unix.F_UNLCK, false)
		case "close":
			err = f.Close()
		}
		if err == nil {
			err = errors.New("ok")
		}
		fmt.Fprintln(out, err)
	}
	return nil
}

// lockerEnv makes this binary a locker.
const lockerEnv = "PENSTOCK_TAKEOVER_LOCKER"

type lockProcess struct {
	t   *testing.T
	cmd *exec.Cmd
	in  io.WriteCloser
	out chan string
}

func startLocker(t *testing.T, how, name string) *lockProcess {
	t.Helper()
	p := &lockProcess{t: t, cmd: exec.Command(os.Args[0], name), out: make(chan string, 8)}
	p.cmd.Env, p.cmd.Stderr = append(os.Environ(), lockerEnv+"="+how), os.Stderr
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	out, err := p.cmd.StdoutPipe()
	if err == nil {
		p.in, err = p.cmd.StdinPipe()
	}
	if err == nil {
		err = p.cmd.Start()
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(p.kill)
	go func() {
		for s := bufio.NewScanner(out); s.Scan(); {
			p.out <- s.Text()
		}
		close(p.out)
	}()
	p.says("open")
	return p
}

func (p *lockProcess) kill() {
	_ = p.cmd.Process.Kill()
	_ = p.cmd.Wait()
}

func (p *lockProcess) says(want string) {
	p.t.Helper()
	select {
	case got := <-p.out:
		if got != want {
			p.t.Errorf("it says %q, not %q", got, want)
		}
	case <-time.After(60 * time.Second):
		p.t.Fatalf("it says nothing, not %q", want)
	}
}

// waits: the locker has not answered.
func (p *lockProcess) waits() {
	p.t.Helper()
	select {
	case got := <-p.out:
		p.t.Errorf("it says %q, and should wait", got)
	case <-time.After(100 * time.Millisecond):
	}
}

func (p *lockProcess) do(what string) { fmt.Fprintln(p.in, what) }

func (p *lockProcess) must(what, want string) {
	p.t.Helper()
	p.do(what)
	p.says(want)
}

// TestLocksOutliveTheServer: locks of each kind, and the processes that wait for locks, outlive
// the process that serves the mount. The locks end as without the change of process: unlocked,
// closed, or with their owner.
func TestLocksOutliveTheServer(t *testing.T) {
	r := newRig(t, "--respawn", "--settle=50ms") // each is killed before long
	r.mount()
	busy := syscall.EAGAIN.Error()
	for how := range locking {
		t.Run(how, func(t *testing.T) {
			name := filepath.Join(r.at, how)
			for _, end := range []string{"unlock", "close", "kill"} {
				a, b, c := startLocker(t, how, name), startLocker(t, how, name), startLocker(t, how, name)
				a.must("lock", "ok")
				b.must("try", busy)
				b.do("lock")
				b.waits()
				r.killNext()
				c.must("try", busy)
				b.waits()
				if end == "kill" {
					a.kill()
				} else {
					a.must(end, "ok")
				}
				b.says("ok")
				r.killNext()
				c.must("try", busy)
				b.must("unlock", "ok")
				c.must("try", "ok")
				for _, p := range []*lockProcess{a, b, c} {
					p.kill()
				}
			}
		})
	}
	r.clean(r.server())
}

// inCall waits until a thread of the process is in a system call that locks.
func (p *lockProcess) inCall() {
	p.t.Helper()
	for deadline := time.Now().Add(60 * time.Second); time.Now().Before(deadline); time.Sleep(5 * time.Millisecond) {
		all, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/syscall", p.cmd.Process.Pid))
		for _, name := range all {
			b, _ := os.ReadFile(name)
			call, _, _ := strings.Cut(string(b), " ")
			if n, err := strconv.Atoi(call); err == nil && (n == unix.SYS_FCNTL || n == unix.SYS_FLOCK) {
				return
			}
		}
	}
	p.t.Fatal("it does not lock")
}

// TestKilledInsideALock: a process that is killed while asking for a lock does not have the lock
// afterwards: neither if the owner stands still and grants the request after the process is gone,
// nor if the owner fails and its successor gets the request again.
func TestKilledInsideALock(t *testing.T) {
	r := newRig(t, "--respawn")
	r.mount()
	for how := range locking {
		t.Run("stands-still/"+how, func(t *testing.T) {
			name := filepath.Join(r.at, "s-"+how)
			a := startLocker(t, how, name)
			r.halt()
			defer r.up.Resume()
			a.do("try")
			a.inCall()
			a.kill()
			if err := r.up.Resume(); err != nil {
				t.Fatal(err)
			}
			startLocker(t, how, name).must("lock", "ok")
		})
		t.Run("fails/"+how, func(t *testing.T) {
			name := filepath.Join(r.at, "f-"+how)
			a, b := startLocker(t, how, name), startLocker(t, how, name)
			a.must("lock", "ok")
			b.do("lock")
			b.inCall()
			b.waits()
			r.up.Kill()
			b.kill()
			r.begin()
			a.must("unlock", "ok")
			startLocker(t, how, name).must("lock", "ok")
		})
	}
	r.clean(r.server())
}

// halt stops the cluster, and waits until all of its threads stand still.
func (r *rig) halt() {
	r.T.Helper()
	if err := r.up.Pause(); err != nil {
		r.T.Fatal(err)
	}
	r.Until("it stands still", func() error {
		all, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/stat", r.up.PID()))
		for _, name := range all {
			if b, rerr := os.ReadFile(name); rerr == nil && !strings.Contains(string(b), ") T ") {
				err = errors.Join(err, fmt.Errorf("%s", b))
			}
		}
		return err
	})
}

// killNext kills the serving process, and waits for the next.
func (r *rig) killNext() {
	r.T.Helper()
	pid := r.server()
	if pid == 0 {
		r.T.Fatal("nobody serves")
	}
	if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
		r.T.Fatal(err)
	}
	r.next(pid)
}
