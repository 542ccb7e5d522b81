package hold

import (
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"syscall"
	"time"
)

// lostServer has another process serve a mount. Caller holds mu.
func (d *Daemon) lostServer(m *record) {
	d.cfg.Logger.Warn("a mount has no process any more: its users wait for the next process", "mount", m.name, "pid", m.server.pid)
	// A server that repeatedly ends soon after its start counts as no server; a request may be
	// the cause of the end.
	if m.yielded || m.unservedSince.IsZero() || time.Since(m.servedSince) >= d.cfg.Settle {
		m.unservedSince, m.respawned = time.Now(), 0
	}
	m.server, m.stillLooks, m.yielded, m.leaving = nil, 0, false, false
	d.handOver(m)
}

// handOver gives an unserved mount to the process that has waited longest, or starts a
// successor. The caller holds mu.
func (d *Daemon) handOver(m *record) {
	if !m.unserved() {
		return
	}
	if len(m.waiting) > 0 {
		m.successor = m.waiting[0].conn
		m.waiting = m.waiting[1:]
		m.successor.send(&packet{Op: "take", Name: m.name, Found: true}, m.device, m.memory)
		return
	}
	if d.cfg.Respawn && m.command.Path != "" && d.ctx.Err() == nil && !d.ending && m.starting == 0 {
		pause := min(time.Duration(m.respawned)*respawnPause, maxRespawnPause)
		m.respawned++
		d.starts++
		m.starting = d.starts
		d.respawn(m, m.starting, pause)
	}
}

// respawn starts a successor after a pause. Caller holds mu.
func (d *Daemon) respawn(m *record, which int, pause time.Duration) {
	d.wg.Go(func() {
		select {
		case <-time.After(pause):
		case <-d.ctx.Done():
			return
		}
		d.mu.Lock()
		needed := d.mounts[m.name] == m && m.unserved()
		if !needed && m.starting == which { // else no successor could start after the present server
			m.starting = 0
		}
		start := m.command
		d.mu.Unlock()
		if !needed {
			return
		}
		cmd := exec.Cmd{
			Path: start.Path, Args: start.Args, Env: append(slices.Clone(start.Env), TakeoverEnv+"=1", fmt.Sprint(OOMEnv, "=", start.OOM)), Dir: start.Dir,
			Stdout: os.Stdout, Stderr: os.Stderr, SysProcAttr: &syscall.SysProcAttr{Setsid: true},
		}
		if err := cmd.Start(); err != nil {
			d.cfg.Logger.Error("no successor could be started for a mount's process", "mount", m.name, "err", err)
			d.successorCame(m, which)
			d.tryAgain(m)
			return
		}
		// The child must not inherit the oom_score_adj of the holder, which the kernel should
		// kill last. The child sets its own value before all else; this value holds until
		// then.
		if err := os.WriteFile(fmt.Sprintf("/proc/%d/oom_score_adj", cmd.Process.Pid), []byte(strconv.Itoa(start.OOM)), 0); err != nil {
			d.cfg.Logger.Warn("a successor has this process's priority for the out-of-memory killer, not its own", "mount", m.name, "err", err)
		}
		go func() { // ends with the child, or with the holder
			err := cmd.Wait()
			d.successorCame(m, which)
			d.cfg.Logger.Info("a mount's process ended", "mount", m.name, "pid", cmd.Process.Pid, "status", err)
			d.tryAgain(m)
		}()
	})
}

// successorCame forgets the starting successor which, after a failed start or its end.
func (d *Daemon) successorCame(m *record, which int) {
	d.mu.Lock()
	if m.starting == which {
		m.starting = 0
	}
	d.mu.Unlock()
}

// tryAgain hands the mount over again if the mount is still held and unserved.
func (d *Daemon) tryAgain(m *record) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.mounts[m.name] == m {
		d.handOver(m)
	}
}
