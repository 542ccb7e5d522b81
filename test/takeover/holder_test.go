package takeover

import (
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"penstock.io/penstock/cmd/penstock/spawn"
	"penstock.io/penstock/test/program"
)

// The process that is asked to go by SIGHUP leaves the mount to a successor, and
// says so by its status.
func TestHangup(t *testing.T) {
	r := newRig(t, "--respawn")
	first := r.mount()
	u := r.load("append", "tree", "locks", "unlinked")
	pid := r.server()
	if err := syscall.Kill(pid, syscall.SIGHUP); err != nil {
		t.Fatal(err)
	}
	pid = r.next(pid)
	<-first.Done()
	if state := first.State(); !strings.Contains(state, "exit status 75") {
		t.Error(state)
	}
	u.end()
	r.clean(pid)
}

// Where a replacement fails the mount goes on: with the old process if that was
// not asked to go yet, else with the old program.
func TestReplacementFails(t *testing.T) {
	r := newRig(t, "--respawn")
	logs := filepath.Join(r.Dir, "logs")
	if err := os.Mkdir(logs, 0o700); err != nil {
		t.Fatal(err)
	}
	first := r.mount("--log-file", filepath.Join(logs, "mount"))
	u := r.load("append", "tree", "locks", "unlinked")
	pid := r.server()

	if err := os.Rename(logs, logs+".away"); err != nil {
		t.Fatal(err)
	}
	out, err := exec.Command(program.Path, "mount", "--replace", r.at, "--hold="+r.socket).CombinedOutput()
	if err == nil || !strings.Contains(string(out), "log-file") {
		t.Fatalf("it could not write its log, and says %v %s", err, out)
	}
	if now := r.server(); now != pid {
		t.Fatalf("process %d serves, not %d", now, pid)
	}
	if err := os.Rename(logs+".away", logs); err != nil {
		t.Fatal(err)
	}

	// It has taken the mount, and ends before it serves.
	successor := r.dial()
	device, memory, ok, err := successor.Take(r.at, true)
	if err != nil || !ok {
		t.Fatal(ok, err)
	}
	<-first.Done()
	device.Close()
	memory.Close()
	successor.Close()
	pid = r.next(pid)
	u.end()
	r.clean(pid)
}

// A holder that can take no more connections keeps what it has.
func TestHolderWithoutDescriptors(t *testing.T) {
	r := newRig(t, "--settle=1s")
	r.mount()
	var before unix.Rlimit
	err := unix.Prlimit(r.holder.PID(), unix.RLIMIT_NOFILE, nil, &before)
	if err == nil {
		err = unix.Prlimit(r.holder.PID(), unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: 3, Max: before.Max}, nil)
	}
	if err != nil {
		t.Fatal(err)
	}
	c, err := net.DialUnix("unixpacket", nil, &net.UnixAddr{Name: r.socket, Net: "unixpacket"})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	time.Sleep(500 * time.Millisecond)
	if l, err := r.hold.List(); err != nil || len(l) != 1 || l[0].PID == 0 {
		t.Fatalf("it holds %+v, %v", l, err)
	}
	if err := unix.Prlimit(r.holder.PID(), unix.RLIMIT_NOFILE, &before, nil); err != nil {
		t.Fatal(err)
	}
	r.dial()
	r.clean(r.server())
}

// A mount that nobody serves for too long is given up: who uses it gets errors,
// and it can be mounted anew.
func TestPatienceRunsOut(t *testing.T) {
	t.Parallel() // it waits, mostly: for the session of the killed to end
	r := newRig(t, "--patience=1s")
	r.mount()
	name := filepath.Join(r.at, "file")
	f, err := os.Create(name)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if err := syscall.Kill(r.server(), syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	asked := make(chan error, 1)
	go func() { _, err := os.Stat(filepath.Join(r.at, "other")); asked <- err }()
	select {
	case err := <-asked:
		if !errors.Is(err, syscall.ENOTCONN) && !errors.Is(err, syscall.ECONNABORTED) {
			t.Errorf("who used it is told %v", err)
		}
	case <-time.After(60 * time.Second):
		t.Fatal("who used it waits still")
	}
	if l, err := r.hold.List(); err != nil || len(l) > 0 {
		t.Errorf("held still: %+v %v", l, err)
	}
	r.mount()
	if _, err := os.Stat(name); err != nil {
		t.Error(err)
	}
	r.clean(r.server())
}

// A mount that was taken away by force while nobody served it is not given up in
// the stead of another, which has no holder.
func TestAnotherMountIsNotGivenUp(t *testing.T) {
	t.Parallel() // it waits, mostly: for the session of the killed to end
	r := newRig(t, "--patience=2s")
	r.mount()
	r.kill()
	if err := unix.Unmount(r.at, unix.MNT_FORCE|unix.MNT_DETACH); err != nil {
		t.Fatal(err)
	}
	other := r.Run("mount", "--dir", filepath.Join(r.Dir, "c"), "/", r.at)
	r.Until("mounted", func() error {
		if !spawn.Mounted(r.at) {
			return errors.New("not yet")
		}
		return nil
	})
	r.Until("given up", func() error {
		if l, err := r.hold.List(); err != nil || len(l) > 0 {
			return fmt.Errorf("%+v %w", l, err)
		}
		return nil
	})
	if err := os.WriteFile(filepath.Join(r.at, "file"), []byte("here"), 0o600); err != nil {
		t.Error(err)
	}
	if err := other.Stop(60 * time.Second); err != nil {
		t.Fatal(err)
	}
}

// A mount that was taken out of sight while nobody served it, and something uses
// it still: who is started next mounts, and what was written is there.
func TestMountOutOfSight(t *testing.T) {
	r := newRig(t, "--patience=90s")
	r.mount()
	// Another process has the file: each that this one starts would close its own
	// descriptor first, and wait for who serves.
	user := exec.Command("/bin/sh", "-c", `exec 3>"$0"; printf here >&3; echo written; read x`, filepath.Join(r.at, "open"))
	user.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	in, err := user.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := user.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := user.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		in.Close()
		_ = user.Wait()
	})
	if _, err := io.ReadFull(out, make([]byte, len("written\n"))); err != nil {
		t.Fatal(err)
	}
	r.kill()
	if err := unix.Unmount(r.at, unix.MNT_DETACH); err != nil {
		t.Fatal(err)
	}
	p := r.serve("/")
	r.Until("mounted anew", func() error {
		if !spawn.Mounted(r.at) || r.server() != p.PID() {
			return errors.New("not yet")
		}
		return nil
	})
	if got, err := os.ReadFile(filepath.Join(r.at, "open")); err != nil || string(got) != "here" {
		t.Errorf("%q is not what was written: %v", got, err)
	}
	r.clean(p.PID())
}

// systemd stands in for the service manager: it keeps what a service sends to
// $NOTIFY_SOCKET, and gives it to the next process of the service from descriptor
// 3 on (sd_notify(3), sd_listen_fds(3)).
type systemd struct {
	r      *rig
	socket string

	mu    sync.Mutex
	ready bool
	store []stored
}

type stored struct {
	name string
	fd   *os.File
}

func newSystemd(r *rig) *systemd {
	r.T.Helper()
	s := &systemd{r: r, socket: filepath.Join(r.Dir, "notify")}
	c, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: s.socket, Net: "unixgram"})
	if err != nil {
		r.T.Fatal(err)
	}
	r.T.Cleanup(func() {
		c.Close()
		s.mu.Lock()
		defer s.mu.Unlock()
		for _, e := range s.store {
			e.fd.Close()
		}
	})
	go func() { // ends with the test
		b, oob := make([]byte, 4096), make([]byte, 1024)
		for {
			n, on, _, _, err := c.ReadMsgUnix(b, oob)
			if err != nil {
				return
			}
			s.message(string(b[:n]), oob[:on])
		}
	}()
	return s
}

func (s *systemd) message(text string, oob []byte) {
	var fds []*os.File
	if messages, err := unix.ParseSocketControlMessage(oob); err == nil {
		for i := range messages {
			l, _ := unix.ParseUnixRights(&messages[i])
			for _, fd := range l {
				unix.CloseOnExec(fd)
				fds = append(fds, os.NewFile(uintptr(fd), "stored"))
			}
		}
	}
	said := make(map[string]string)
	for line := range strings.Lines(text) {
		k, v, _ := strings.Cut(strings.TrimSpace(line), "=")
		said[k] = v
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	name := said["FDNAME"]
	switch {
	case said["FDSTORE"] == "1":
		if name == "" || strings.ContainsAny(name, ":\n") || len(name) > 255 {
			s.r.T.Errorf("systemd takes no name %q", name)
		}
		for _, f := range fds {
			s.store = append(s.store, stored{name, f})
		}
	case said["FDSTOREREMOVE"] == "1":
		s.store = slices.DeleteFunc(s.store, func(e stored) bool {
			if e.name == name {
				e.fd.Close()
			}
			return e.name == name
		})
	case said["READY"] == "1":
		s.ready = true
	default:
		s.r.T.Errorf("systemd is told %q", text)
	}
}

func (s *systemd) count() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.store)
}

// forget loses what was stored last.
func (s *systemd) forget(n int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for range n {
		s.store[len(s.store)-1].fd.Close()
		s.store = s.store[:len(s.store)-1]
	}
}

// start runs the holder as the service, and waits until it says that it is ready.
func (s *systemd) start() *spawn.Process {
	s.r.T.Helper()
	s.mu.Lock()
	s.ready = false
	var names []string
	var files []*os.File
	for _, e := range s.store {
		names, files = append(names, e.name), append(files, e.fd)
	}
	s.mu.Unlock()
	script := `exec "$0" "$@"`
	env := append(os.Environ(), append(slices.Clone(s.r.Env), "NOTIFY_SOCKET="+s.socket)...)
	if len(names) > 0 {
		script = "LISTEN_PID=$$ " + script
		env = append(env, "LISTEN_FDS="+fmt.Sprint(len(names)), "LISTEN_FDNAMES="+strings.Join(names, ":"))
	}
	cmd := exec.Command("/bin/sh", "-c", script, program.Path, "hold", "--socket", s.r.socket)
	cmd.Env, cmd.ExtraFiles = env, files
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	p, err := spawn.Begin(cmd, "hold", io.Discard, (*exec.Cmd).Start)
	if err != nil {
		s.r.T.Fatal(err)
	}
	s.r.T.Cleanup(p.Kill)
	s.r.Until("ready", func() error {
		s.mu.Lock()
		defer s.mu.Unlock()
		if !s.ready {
			return errors.New(p.State())
		}
		return nil
	})
	s.r.hold = s.r.dial()
	return p
}

// The holder itself is killed, alone and together with who serves: systemd has
// the descriptors, and mounts go on.
func TestHolderRestarted(t *testing.T) {
	r := newRig(t)
	s := newSystemd(r)
	holder := s.start()
	first := r.mount()
	pid := r.server()
	u := r.load("append", "tree", "locks", "unlinked", "blocks")
	stored := func() error {
		if n := s.count(); n != 2 {
			return fmt.Errorf("%d descriptors are stored", n)
		}
		return nil
	}
	r.Until("stored", stored)

	// Who serves goes on, and finds the next holder; another one waits for that.
	holder.Kill()
	holder = s.start()
	if _, _, ok, err := r.dial().Take(r.at, false); err == nil || r.server() != pid {
		t.Fatalf("another one got the mount: %v %v, served by %d, not %d", ok, err, r.server(), pid)
	}
	r.Until("stored", stored)

	// It is killed when it has stored one of two: what is whole is held, and who
	// serves the rest comes back.
	holder.Kill()
	s.forget(1)
	holder = s.start()
	r.Until("held again", func() error {
		if r.server() != pid {
			return errors.New("not yet")
		}
		return nil
	})
	r.Until("stored", stored)

	// Both: the next process takes over from the descriptors alone.
	holder.Kill()
	first.Kill()
	holder = s.start()
	r.Run("mount", "--dir", filepath.Join(r.Dir, "c"), "--hold="+r.socket, "/", r.at)
	pid = r.next(pid)
	u.end()
	r.clean(pid)
	r.Until("nothing stored", func() error {
		if n := s.count(); n != 0 {
			return fmt.Errorf("%d descriptors", n)
		}
		return nil
	})
	if err := holder.Stop(10 * time.Second); err != nil {
		t.Error(err)
	}
}
