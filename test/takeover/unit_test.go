package takeover

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"penstock.io/penstock/cmd/penstock/spawn"
	"penstock.io/penstock/test/program"
)

const exampleUnit = "../../deploy/systemd/penstock-data.service.example"

// unit treats a real process as systemd does by the directives of a unit, after
// systemd.service(5).
type unit struct {
	t    *testing.T
	sets map[string]string
	args []string

	mu       sync.Mutex
	cmd      *exec.Cmd
	starts   int
	stopping bool
	ended    chan struct{} // closed when the process has ended and none is started
	result   string        // how: an exit status or the name of a signal
	out      bytes.Buffer
}

func readUnit(t *testing.T) *unit {
	t.Helper()
	b, err := os.ReadFile(exampleUnit)
	if err != nil {
		t.Fatal(err)
	}
	u := &unit{t: t, sets: make(map[string]string), ended: make(chan struct{})}
	for line := range strings.Lines(string(b)) {
		if key, value, found := strings.Cut(strings.TrimSpace(line), "="); found && !strings.HasPrefix(key, "#") {
			u.sets[key] = value
		}
	}
	// systemd stops a unit that requires another unit when the other unit restarts.
	known := []string{"Description", "After", "Wants", "StartLimitIntervalSec", "ExecStart", "ExecReload", "Restart", "RestartForceExitStatus", "RestartSec",
		"KillSignal", "RestartKillSignal", "TimeoutStopSec", "OOMPolicy", "LimitNOFILE", "WantedBy"}
	if !strings.Contains(u.sets["After"], "penstock-hold.service") || !strings.Contains(u.sets["Wants"], "penstock-hold.service") {
		t.Error("the mount may be stopped after its holder")
	}
	for key := range u.sets {
		if !slices.Contains(known, key) {
			t.Fatalf("this test does not know %s", key)
		}
	}
	return u
}

// start starts ExecStart.
func (u *unit) start() {
	u.t.Helper()
	u.mu.Lock()
	defer u.mu.Unlock()
	if err := u.begin(); err != nil {
		u.t.Fatal(err)
	}
	u.t.Cleanup(func() {
		u.mu.Lock()
		u.stopping = true
		ended := u.ended
		_ = u.cmd.Process.Kill()
		u.mu.Unlock()
		<-ended
	})
}

// begin starts the process once. Caller holds mu.
func (u *unit) begin() error {
	u.cmd = exec.Command(u.args[0], u.args[1:]...)
	u.cmd.Env = append(os.Environ(), "INVOCATION_ID=0123456789abcdef0123456789abcdef")
	u.cmd.Stderr = &u.out
	u.starts++
	if err := u.cmd.Start(); err != nil {
		return err
	}
	go u.wait(u.cmd)
	return nil
}

// wait waits for the end, and starts the next process if the unit says so.
func (u *unit) wait(cmd *exec.Cmd) {
	_ = cmd.Wait()
	status := cmd.ProcessState.Sys().(syscall.WaitStatus)
	result, clean := strconv.Itoa(status.ExitStatus()), status.ExitStatus() == 0
	if status.Signaled() {
		result = unix.SignalName(status.Signal())
		clean = slices.Contains([]string{"SIGHUP", "SIGINT", "SIGTERM", "SIGPIPE"}, result)
	}
	again := u.sets["Restart"] == "always" || u.sets["Restart"] == "on-failure" && !clean ||
		slices.Contains(strings.Fields(u.sets["RestartForceExitStatus"]), result)
	pause, err := time.ParseDuration(cmp.Or(u.sets["RestartSec"], "100ms"))
	if err != nil {
		u.t.Error(err)
	}
	time.Sleep(pause)
	u.mu.Lock()
	defer u.mu.Unlock()
	u.result = result
	if again && !u.stopping {
		if err = u.begin(); err == nil {
			return
		}
		u.t.Error(err)
	}
	close(u.ended)
}

func (u *unit) pid() int {
	u.mu.Lock()
	defer u.mu.Unlock()
	return u.cmd.Process.Pid
}

func (u *unit) reload() {
	u.t.Helper()
	line := strings.Fields(strings.ReplaceAll(u.sets["ExecReload"], "$MAINPID", strconv.Itoa(u.pid())))
	if len(line) == 0 {
		u.t.Fatal("the unit can't be reloaded")
	}
	if out, err := exec.Command(line[0], line[1:]...).CombinedOutput(); err != nil {
		u.t.Fatalf("%v: %s", err, out)
	}
}

func (u *unit) stop() {
	u.t.Helper()
	u.end(cmp.Or(u.sets["KillSignal"], "SIGTERM"))
}

// restart is `systemctl restart`: a stop, by another signal if the unit names a signal, and a
// start.
func (u *unit) restart() {
	u.t.Helper()
	u.end(cmp.Or(u.sets["RestartKillSignal"], u.sets["KillSignal"], "SIGTERM"))
	u.mu.Lock()
	defer u.mu.Unlock()
	u.stopping, u.ended = false, make(chan struct{})
	if err := u.begin(); err != nil {
		u.t.Fatal(err)
	}
}

// end ends the process by a signal; no process follows.
func (u *unit) end(signal string) {
	u.t.Helper()
	u.mu.Lock()
	u.stopping = true
	err := u.cmd.Process.Signal(unix.SignalNum(signal))
	u.mu.Unlock()
	if err != nil {
		u.t.Fatal(err)
	}
	within, err := time.ParseDuration(cmp.Or(u.sets["TimeoutStopSec"], "90s"))
	if err != nil {
		u.t.Fatal(err)
	}
	select {
	case <-u.ended:
	case <-time.After(within):
		u.t.Fatal("it does not stop in time, and would be killed")
	}
}

// TestExampleUnit: the mount of the example unit lives through reload, restart and a kill, with
// its open files and locks. Stopped or unmounted, the mount ends in order, and systemd has
// nothing left to hold.
func TestExampleUnit(t *testing.T) {
	r := newRig(t, "--patience", "90s")
	r.Until("metadata server", func() error { _, err := r.Ctl("volume", "list"); return err })
	u := readUnit(t)
	args := strings.Fields(u.sets["ExecStart"])
	if !strings.HasPrefix(args[0], "/") || args[1] != "mount" {
		t.Fatalf("it starts %q", args)
	}
	args[0] = program.Path
	args[slices.Index(args, "--config")] = "--dir"
	args[slices.Index(args, "/etc/penstock/mount.yaml")] = filepath.Join(r.Dir, "c")
	args[slices.Index(args, "--hold=/run/penstock/hold.sock")] = "--hold=" + r.socket
	dir := slices.Index(args, "/mnt/data")
	args[dir] = r.at
	volume, _, _ := strings.Cut(args[dir-1], ":")
	r.Must("volume", "create", volume, "--attach", "/v")
	u.args = args
	mounted := func() {
		t.Helper()
		r.Until("mounted", func() error {
			if !spawn.Mounted(r.at) || r.server() != u.pid() {
				return errors.New("not yet")
			}
			return nil
		})
	}
	u.start()
	t.Cleanup(func() { _ = unix.Unmount(r.at, unix.MNT_FORCE|unix.MNT_DETACH) })
	mounted()

	w := r.load("append", "blocks", "locks")
	for _, end := range []func(){u.reload, func() { _ = syscall.Kill(u.pid(), syscall.SIGKILL) }, u.restart, u.reload, u.restart} {
		time.Sleep(200 * time.Millisecond)
		pid := u.pid()
		end()
		r.next(pid)
		mounted()
	}
	// An administrator who replaces the process by hand would take the process from systemd.
	pid := u.pid()
	out, err := exec.Command(program.Path, "mount", "--replace", r.at, "--hold="+r.socket).CombinedOutput()
	if err == nil || !strings.Contains(string(out), "systemctl reload") || r.server() != pid {
		t.Errorf("mount --replace: %v, process %d serves and %d did: %s", err, r.server(), pid, out)
	}
	w.end()

	want := pattern(3, 4, 4<<20)
	if err := os.WriteFile(filepath.Join(r.at, "last"), want, 0o644); err != nil {
		t.Fatal(err)
	}
	u.stop()
	if spawn.Mounted(r.at) || u.result != "0" {
		t.Fatalf("stopped, it ended with %s, and is mounted: %v\n%s", u.result, spawn.Mounted(r.at), u.out.String())
	}
	if l, err := r.hold.List(); err != nil || len(l) != 0 {
		t.Errorf("the holder has %v, %v", l, err)
	}
	r.holder.Kill() // as the machine is switched off
	r.startHolder()
	*u = unit{t: t, sets: u.sets, args: u.args, ended: make(chan struct{})}
	u.start()
	mounted()
	if got, err := os.ReadFile(filepath.Join(r.at, "last")); err != nil || !bytes.Equal(got, want) {
		t.Errorf("DATA: after the stop there are %d bytes, not those written: %v", len(got), err)
	}
	starts := u.starts
	r.Until("unmounted", func() error { return unix.Unmount(r.at, 0) })
	<-u.ended
	if u.result != "0" || u.starts != starts {
		t.Errorf("unmounted, it ended with %s, and was started %d times more", u.result, u.starts-starts)
	}
	r.Until("fsck", func() error { _, err := r.Ctl("fsck"); return err })
}

// TestBackgroundStays: each successor of a process that serves a mount in the background knows
// that the successor serves in the background, too, and keeps the log, whichever process started
// the successor.
func TestBackgroundStays(t *testing.T) {
	const variable = "PENSTOCK_SERVES_IN_BACKGROUND="
	r := newRig(t, "--respawn")
	r.mount("--background")
	for range 2 {
		r.killNext()
		b, err := os.ReadFile(fmt.Sprintf("/proc/%d/environ", r.server()))
		if err != nil {
			t.Fatal(err)
		}
		if !slices.Contains(strings.Split(string(b), "\x00"), variable+"1") {
			t.Errorf("the successor of a mount in the background does not know: %q", b)
		}
	}
	r.clean(r.server())
}

// TestHangupUnmounts: a mount without a holder ends in order when its terminal is closed.
func TestHangupUnmounts(t *testing.T) {
	// Under nohup(1) every process started here ignores the signal, and a mount keeps to that; a
	// process that catches the signal passes the default on.
	signals := make(chan os.Signal, 1)
	signal.Notify(signals, syscall.SIGHUP)
	t.Cleanup(func() { signal.Stop(signals) })
	r := newRig(t)
	r.Until("metadata server", func() error { _, err := r.Ctl("volume", "list"); return err })
	p := r.Run("mount", "--dir", filepath.Join(r.Dir, "c"), "/", r.at)
	t.Cleanup(func() { _ = unix.Unmount(r.at, unix.MNT_FORCE|unix.MNT_DETACH) })
	r.Until("ready", func() error {
		if !strings.Contains(p.Output(), "mount serves") {
			return errors.New("not yet")
		}
		return nil
	})
	if err := syscall.Kill(p.PID(), syscall.SIGHUP); err != nil {
		t.Fatal(err)
	}
	select {
	case <-p.Done():
	case <-time.After(60 * time.Second):
		t.Fatal("it goes on")
	}
	if spawn.Mounted(r.at) {
		t.Error("the mount is left")
	}
	if err := p.End(); err != nil {
		t.Errorf("%v: %s", err, p.Output())
	}
}
