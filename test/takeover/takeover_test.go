package takeover

import (
	"bufio"
	"bytes"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"penstock.io/penstock/cmd/penstock/spawn"
	"penstock.io/penstock/fuse/hold"
	"penstock.io/penstock/test/program"
)

var kills = flag.Int("kills", 6, "how often the process that serves the mount is killed under load")

// loadEnv makes this binary a process that uses a mount.
const loadEnv = "PENSTOCK_TAKEOVER_LOAD"

func TestMain(m *testing.M) {
	if how := os.Getenv(lockerEnv); how != "" {
		if err := locker(how, os.Args[1], os.Stdin, os.Stdout); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	if names := os.Getenv(loadEnv); names != "" {
		if err := run(os.Args[1], strings.Split(names, ","), os.Stdin, os.Stdout); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	os.Exit(program.Main(m))
}

// rig is a cluster of one process, a holder, and a mount.
type rig struct {
	*program.Rig
	at     string
	socket string
	up     *spawn.Process // the cluster
	holder *spawn.Process
	hold   *hold.Client
}

func newRig(t *testing.T, holder ...string) *rig {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Fatal("mounting needs root")
	}
	r := &rig{Rig: program.NewRig(t)}
	// Every process of this rig has the rig's folder in its environment; a successor that the
	// holder starts is no child of the test.
	r.Env = append(r.Env, rigEnv+"="+r.Dir)
	t.Cleanup(r.killAll)
	r.Addr = "unix:" + filepath.Join(r.Dir, "c", "meta.sock")
	r.at, r.socket = filepath.Join(r.Dir, "mnt"), filepath.Join(r.Dir, "hold.sock")
	if err := os.Mkdir(r.at, 0o755); err != nil {
		t.Fatal(err)
	}
	r.begin()
	if holder != nil {
		r.startHolder(holder...)
	}
	return r
}

// begin starts the cluster.
func (r *rig) begin() {
	r.T.Helper()
	r.up = r.Run("up", "--dir", filepath.Join(r.Dir, "c"), "--admin", "none")
}

const rigEnv = "PENSTOCK_TAKEOVER_RIG"

// killAll ends all running processes of the rig.
func (r *rig) killAll() {
	mark := []byte(rigEnv + "=" + r.Dir)
	for again := true; again; {
		again = false
		procs, _ := filepath.Glob("/proc/[0-9]*")
		for _, p := range procs {
			env, err := os.ReadFile(p + "/environ")
			pid, perr := strconv.Atoi(filepath.Base(p))
			if err != nil || perr != nil || pid == os.Getpid() || !slices.ContainsFunc(bytes.Split(env, []byte{0}), func(v []byte) bool { return bytes.Equal(v, mark) }) {
				continue
			}
			again = syscall.Kill(pid, syscall.SIGKILL) == nil || again // the process may have started another meanwhile
		}
		time.Sleep(10 * time.Millisecond)
	}
}

func (r *rig) startHolder(args ...string) {
	r.T.Helper()
	r.holder = r.Run(append([]string{"hold", "--socket", r.socket}, args...)...)
	r.hold = r.dial()
}

func (r *rig) dial() (h *hold.Client) {
	r.T.Helper()
	r.Until("holder", func() (err error) { h, err = hold.Dial(r.socket); return err })
	r.T.Cleanup(h.Close)
	return h
}

// mount mounts, and has the remains of the mount go with the test.
func (r *rig) mount(args ...string) *spawn.Process {
	r.T.Helper()
	return r.mountOf("/", args...)
}

// serve starts a process that is to serve the mount, or to mount.
func (r *rig) serve(source string, args ...string) *spawn.Process {
	r.T.Helper()
	return r.Run(append([]string{"mount", "--dir", filepath.Join(r.Dir, "c"), "--hold=" + r.socket, source, r.at}, args...)...)
}

func (r *rig) mountOf(source string, args ...string) *spawn.Process {
	r.T.Helper()
	r.Until("metadata server", func() error { _, err := r.Ctl("volume", "list"); return err })
	p := r.serve(source, args...)
	r.T.Cleanup(func() { _ = unix.Unmount(r.at, unix.MNT_FORCE|unix.MNT_DETACH) })
	r.Until("mounted", func() error {
		if !spawn.Mounted(r.at) || r.server() == 0 {
			return errors.New("not yet")
		}
		return nil
	})
	return p
}

// server is the process that serves the mount, 0 if none does.
func (r *rig) server() int {
	if r.hold == nil {
		return 0
	}
	l, err := r.hold.Show(r.at)
	if err != nil || len(l) != 1 {
		return 0
	}
	return l[0].PID
}

// succeed starts a process for an unserved mount, and waits until the process serves. A process
// whose session ended before, since the machine stood still, is started again, as a supervisor
// would.
func (r *rig) succeed(source string, args ...string) int {
	r.T.Helper()
	p := r.serve(source, args...)
	r.Until("a successor", func() error {
		if r.server() == p.PID() {
			return nil
		}
		select {
		case <-p.Done():
			if !strings.Contains(p.Output(), "session expired") {
				r.T.Fatalf("of %s: %s", source, p.Output())
			}
			p = r.serve(source, args...)
		default:
		}
		return errors.New("nobody serves")
	})
	return p.PID()
}

// next waits until another process serves.
func (r *rig) next(than int) (pid int) {
	r.T.Helper()
	r.Until("a successor", func() error {
		if pid = r.server(); pid == 0 || pid == than {
			return errors.New("nobody serves")
		}
		return nil
	})
	return pid
}

// user is a process that uses the mount.
type user struct {
	r    *rig
	cmd  *exec.Cmd
	stop func()
	out  bytes.Buffer
	errs bytes.Buffer
}

func (r *rig) load(kinds ...string) *user {
	r.T.Helper()
	u := &user{r: r, cmd: exec.CommandContext(r.T.Context(), os.Args[0], r.at)}
	u.cmd.Env = append(os.Environ(), loadEnv+"="+strings.Join(kinds, ","))
	u.cmd.Stderr = &u.errs
	u.cmd.WaitDelay = time.Second
	in, err := u.cmd.StdinPipe()
	if err != nil {
		r.T.Fatal(err)
	}
	out, err := u.cmd.StdoutPipe()
	if err != nil {
		r.T.Fatal(err)
	}
	if err := u.cmd.Start(); err != nil {
		r.T.Fatal(err)
	}
	rd := bufio.NewReader(out)
	if line, err := rd.ReadString('\n'); err != nil || line != "begun\n" {
		r.T.Fatalf("%q %v %s", line, err, u.errs.String())
	}
	u.stop = func() {
		in.Close()
		_, _ = rd.WriteTo(&u.out)
	}
	return u
}

// end stops the load, which must not have seen anything.
func (u *user) end() {
	u.r.T.Helper()
	if err := u.saw(); err != nil {
		u.r.T.Error(err)
	}
}

// saw stops the load and returns the error of the load.
func (u *user) saw() error {
	u.r.T.Helper()
	late := time.AfterFunc(60*time.Second, func() { u.cmd.Process.Kill() })
	defer late.Stop()
	u.stop()
	err := u.cmd.Wait()
	u.r.T.Logf("%s", u.out.String())
	if err != nil {
		return fmt.Errorf("who used the mount: %w\n%s", err, u.errs.String())
	}
	return nil
}

// probe makes and removes a file, again and again, and keeps the longest time of a round.
type probe struct {
	stop  chan struct{}
	ended chan error
	worst chan time.Duration
}

func (r *rig) probe() *probe {
	p := &probe{stop: make(chan struct{}), ended: make(chan error, 1), worst: make(chan time.Duration)}
	name := filepath.Join(r.at, "probe")
	go func() {
		var worst time.Duration
		for {
			begun := time.Now()
			f, err := os.OpenFile(name, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
			if err == nil {
				err = errors.Join(f.Close(), os.Remove(name))
			}
			if err != nil {
				p.ended <- err
				return
			}
			worst = max(worst, time.Since(begun))
			select {
			case p.worst <- worst:
				worst = 0
			case <-p.stop:
				p.ended <- nil
				return
			default:
			}
		}
	}()
	return p
}

// take is the longest round since the last take.
func (p *probe) take(t *testing.T) time.Duration {
	t.Helper()
	select {
	case d := <-p.worst:
		return d
	case err := <-p.ended:
		t.Fatalf("probe: %v", err)
	case <-time.After(60 * time.Second):
		t.Fatal("the mount hangs")
	}
	return 0
}

func (p *probe) end(t *testing.T) {
	close(p.stop)
	if err := <-p.ended; err != nil {
		t.Error("probe:", err)
	}
}

func pauses(t *testing.T, what string, l []time.Duration) {
	if len(l) == 0 {
		return
	}
	slices.Sort(l)
	t.Logf("%s: %d pauses, p50 %v, max %v", what, len(l), l[len(l)/2].Round(time.Millisecond), l[len(l)-1].Round(time.Millisecond))
}

// TestKilled: the process that serves a mount is killed again and again, under a load that knows
// every byte. The load sees no error, only pauses.
func TestKilled(t *testing.T) {
	r := newRig(t, "--respawn", "--settle=100ms") // each process is killed before long
	r.mount()
	u := r.load(allKinds...)
	p := r.probe()
	pid := r.server()
	var l []time.Duration
	rnd := rand.New(rand.NewPCG(uint64(time.Now().UnixNano()), 1))
	for range *kills {
		time.Sleep(200*time.Millisecond + rand.N(600*time.Millisecond) + time.Duration(rnd.IntN(1000))*time.Microsecond)
		p.take(t)
		if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
			t.Fatal(err)
		}
		pid = r.next(pid)
		l = append(l, p.take(t))
	}
	p.end(t)
	u.end()
	pauses(t, "killed", l)
	r.clean(pid)
}

// clean unmounts; everybody ends, and the cluster is whole.
func (r *rig) clean(pid int) {
	r.T.Helper()
	r.Until("unmounted", func() error { return unix.Unmount(r.at, 0) })
	r.Until("the server's end", func() error {
		if l, err := r.hold.List(); err != nil || len(l) > 0 {
			return fmt.Errorf("%d mounts are held: %w", len(l), err)
		}
		if err := syscall.Kill(pid, 0); err == nil {
			b, _ := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
			if !bytes.Contains(b, []byte(") Z ")) {
				return fmt.Errorf("process %d lives", pid)
			}
		}
		return nil
	})
	r.Until("fsck", func() error { _, err := r.Ctl("fsck"); return err })
}

// TestReplaced: mount --replace upgrades a live mount; a user of the mount goes on.
func TestReplaced(t *testing.T) {
	r := newRig(t, "--respawn")
	first := r.mount()
	u := r.load(allKinds...)
	p := r.probe()
	pid := r.server()
	var l []time.Duration
	for range 3 {
		time.Sleep(300 * time.Millisecond)
		p.take(t)
		out, err := exec.Command(program.Path, "mount", "--replace", r.at, "--hold="+r.socket).CombinedOutput()
		if err != nil {
			t.Fatalf("%v: %s", err, out)
		}
		pid = r.next(pid)
		l = append(l, p.take(t))
	}
	<-first.Done()
	if err := first.End(); err != nil {
		t.Errorf("the first process ended with %v", err)
	}
	p.end(t)
	u.end()
	pauses(t, "replaced", l)
	r.clean(pid)
}
