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
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"penstock.io/penstock/cmd/penstock/spawn"
	"penstock.io/penstock/fuse/hold"
	"penstock.io/penstock/test/program"
)

// TestHangup: a process that gets SIGHUP leaves the mount to a successor, and ends with the
// status for that.
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

// TestReplacementFails: if a replacement fails, the mount goes on: with the old process if that
// process was not yet asked to end, otherwise with the old program.
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

	// The successor has taken the mount, and ends before serving.
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

// TestHolderWithoutDescriptors: a holder that can take no more connections keeps its mounts.
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

// TestPatienceRunsOut: a mount that no process serves for too long is given up. Users of the
// mount get errors, and the directory can be mounted anew.
func TestPatienceRunsOut(t *testing.T) {
	t.Parallel() // the test mostly waits: for the session of the killed process to end
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

// TestAnotherMountIsNotGivenUp: a mount was taken away by force while no process served the
// mount, and another mount without a holder took its place. The holder does not give the other
// mount up.
func TestAnotherMountIsNotGivenUp(t *testing.T) {
	t.Parallel() // the test mostly waits: for the session of the killed process to end
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

// TestMountOutOfSight: a mount was taken out of sight while no process served the mount, and a
// program still uses the mount. The next process mounts, and the written bytes are in the file.
func TestMountOutOfSight(t *testing.T) {
	r := newRig(t, "--patience=90s")
	r.mount()
	// Another process has the file: every child of this process would close its own descriptor
	// first, and wait for a server.
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

// TestOwnHolder: a mount has a holder of its own. Whatever ends the mount's process, the holder
// starts the next process, also of another version at --replace. The holder ends with the mount.
func TestOwnHolder(t *testing.T) {
	r := newRig(t)
	r.Until("metadata server", func() error { _, err := r.Ctl("volume", "list"); return err })
	metrics := filepath.Join(r.Dir, "mount.sock")
	const score = "321" // the rank of the process among those killed when memory is short
	r.Env = append(r.Env, hold.OOMEnv+"="+score)
	// No process reads the holder's messages, from before the first kill on.
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
	go first.Wait() // the process is killed below, at the latest with the test
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
	r.hold.Close() // the holder waits for connected processes
	r.Until("unmounted", func() error { return unix.Unmount(r.at, 0) })
	r.Until("its holder's end", func() error {
		if l := holders(); len(l) > 0 {
			return fmt.Errorf("%v", l)
		}
		return nil
	})
	r.Until("fsck", func() error { _, err := r.Ctl("fsck"); return err })
	// Without a holder no process can be replaced.
	if out, err := exec.Command(program.Path, "mount", "--replace", r.at).CombinedOutput(); err == nil || !strings.Contains(string(out), "was it mounted with --hold?") {
		t.Errorf("replaced what is not mounted: %v %s", err, out)
	}
}

// TestHolderRestarted: the holder is killed, or told to end. The serving process goes on, and
// gives the next holder the last holder's descriptors, so that the mount outlives its process
// again.
func TestHolderRestarted(t *testing.T) {
	r := newRig(t, "--patience", "90s")
	r.mount()
	pid := r.server()
	u := r.load("append", "tree", "locks", "unlinked", "blocks")
	for _, end := range []func(){
		r.holder.Kill,
		func() {
			if err := r.holder.Stop(60 * time.Second); err != nil {
				t.Error(err)
			}
		},
	} {
		end()
		r.startHolder("--patience", "90s")
		r.Until("held again", func() error {
			if now := r.server(); now != pid {
				return fmt.Errorf("by %d, not %d", now, pid)
			}
			return nil
		})
		r.kill()
		pid = r.succeed("/")
	}
	u.end()
	r.clean(pid)
}
