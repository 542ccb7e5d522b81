package takeover

import (
	"crypto/sha256"
	"encoding/hex"
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
	"penstock.io/penstock/fuse"
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
		t.Errorf("DATA: %q is not what was written: %v", got, err)
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
	max   int // FileDescriptorStoreMax; 0: it does not matter
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
			if s.max > 0 && len(s.store) == s.max {
				f.Close() // without a word
				continue
			}
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
	if s.max > 0 {
		env = append(env, fmt.Sprint("FDSTORE=", s.max))
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

// systemd takes so many descriptors of a unit and no more: the holder says which
// mount would end with it, and has it kept as soon as another one goes.
func TestStoreIsFull(t *testing.T) {
	r := newRig(t)
	s := newSystemd(r)
	s.max = 3
	s.start()
	r.mount()
	other := filepath.Join(r.Dir, "other")
	if err := os.Mkdir(other, 0o755); err != nil {
		t.Fatal(err)
	}
	r.Run("mount", "--dir", filepath.Join(r.Dir, "c"), "--hold="+r.socket, "/", other)
	t.Cleanup(func() { _ = unix.Unmount(other, unix.MNT_FORCE|unix.MNT_DETACH) })
	unkept := func(want ...string) {
		t.Helper()
		r.Until("the holder tells what is not kept", func() error {
			l, err := r.hold.List()
			if err != nil {
				return err
			}
			var got []string
			for _, m := range l {
				if m.Unkept != "" && strings.Contains(m.Unkept, "FileDescriptorStoreMax") {
					got = append(got, m.Name)
				}
			}
			if !slices.Equal(got, want) || s.count() != 2 {
				return fmt.Errorf("not kept are %v of %+v, and %d descriptors are stored", got, l, s.count())
			}
			return nil
		})
	}
	unkept(other)
	out, err := exec.Command(program.Path, "hold", "--list", "--socket", r.socket).CombinedOutput()
	if err != nil || !strings.Contains(string(out), "not kept beyond the holder") {
		t.Errorf("hold --list: %v, %s", err, out)
	}
	r.Until("unmounted", func() error { return unix.Unmount(r.at, 0) })
	unkept()
	r.at = other
	r.clean(r.server())
}

// A mount with a holder of its own: whatever ends its process the holder starts the
// next one, also of another version at --replace. It ends with the mount.
func TestOwnHolder(t *testing.T) {
	r := newRig(t)
	r.Until("metadata server", func() error { _, err := r.Ctl("volume", "list"); return err })
	metrics := filepath.Join(r.Dir, "mount.sock")
	const score = "321" // how soon it is to be killed when memory is short
	r.Env = append(r.Env, fuse.OOMEnv+"="+score)
	// Nobody reads what it says, from before the first kill on.
	log, said, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	first := exec.Command(program.Path, "mount", "--dir", filepath.Join(r.Dir, "c"), "--hold", "--admin=unix:"+metrics, "/", r.at)
	first.Env, first.Stderr = append(os.Environ(), r.Env...), said
	err = first.Start()
	said.Close()
	if err != nil {
		t.Fatal(err)
	}
	go first.Wait() // it is killed below, at the latest with the test
	t.Cleanup(func() { _ = unix.Unmount(r.at, unix.MNT_FORCE|unix.MNT_DETACH) })
	dir, err := filepath.EvalSymlinks(r.at)
	if err != nil {
		t.Fatal(err)
	}
	sum := sha256.Sum256([]byte(dir))
	r.socket = filepath.Join("/run/penstock", "hold-"+hex.EncodeToString(sum[:8])+".sock")
	r.hold = r.dial()
	pid := r.next(0)
	holders := func() (pids []string) {
		t.Helper()
		all, err := filepath.Glob("/proc/[0-9]*")
		if err != nil {
			t.Fatal(err)
		}
		for _, p := range all {
			if line, err := os.ReadFile(p + "/cmdline"); err == nil && strings.Contains(string(line), "\x00hold\x00--socket\x00"+r.socket) {
				pids = append(pids, filepath.Base(p))
			}
		}
		return pids
	}
	if l := holders(); len(l) != 1 {
		t.Fatalf("its holders are %v", l)
	}
	tells := func() {
		t.Helper()
		if b, err := os.ReadFile(fmt.Sprintf("/proc/%d/oom_score_adj", pid)); err != nil || strings.TrimSpace(string(b)) != score {
			t.Errorf("who serves is killed for want of memory by %s, not %s: %v", b, score, err)
		}
		r.Until("who serves tells what it counts", func() error {
			m, err := program.Metrics(metrics)
			if err == nil && len(m) == 0 {
				err = errors.New("nothing")
			}
			return err
		})
	}
	tells()
	log.Close()
	u := r.load("append", "tree", "locks", "unlinked")
	for range 2 {
		if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
			t.Fatal(err)
		}
		pid = r.next(pid)
		tells()
		out, err := exec.Command(program.Path, "mount", "--replace", r.at).CombinedOutput()
		if err != nil {
			t.Fatalf("%v: %s", err, out)
		}
		pid = r.next(pid)
		tells()
	}
	u.end()
	r.hold.Close() // it waits for those who are connected
	r.Until("unmounted", func() error { return unix.Unmount(r.at, 0) })
	r.Until("its holder's end", func() error {
		if l := holders(); len(l) > 0 {
			return fmt.Errorf("%v", l)
		}
		return nil
	})
	r.Until("fsck", func() error { _, err := r.Ctl("fsck"); return err })
	// Without it nobody can be replaced.
	if out, err := exec.Command(program.Path, "mount", "--replace", r.at).CombinedOutput(); err == nil || !strings.Contains(string(out), "was it mounted with --hold?") {
		t.Errorf("replaced what is not mounted: %v %s", err, out)
	}
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
	if err := holder.Stop(60 * time.Second); err != nil {
		t.Error(err)
	}
}
