package main

import (
	"bytes"
	"fmt"
	"log/slog"
	"os"
	"os/signal"
	"path/filepath"
	"strconv"
	"syscall"
	"time"

	"penstock.io/penstock/fuse/hold"
	"penstock.io/penstock/fuse/kernel"
)

// The node agent in a container. When a container's first process ends, the kernel ends all
// processes of the container. If the first process were the agent, the mounts would end with
// the agent, and the kubelet would restart the container after ever longer pauses. So the
// first process is a supervisor that does almost nothing, and runs the agent, the same
// program, as its child:
//
//	supervisor            the container's first process, which the kernel spares when memory is short
//	  agent               penstock-node-agent csi --node ...: if it is killed, the supervisor starts another agent
//	    penstock mount    children of the supervisor when their agent is gone; the next agent finds
//	    penstock mount    them by their locks (csi/node, Recover)
//
// The kernel kills agent and mounts together if the group has no memory left. The next agent
// then takes up the mounts from the holder. The killed agent may be unable to end: one of its
// threads waits in the kernel for a mount without a server, until the next agent takes up the
// mount. So the supervisor counts an agent as ended after agentDies of dying, and reaps the
// agent later.

// agentName is the agent's argv[0], to tell the agent from the supervisor in a process list.
const agentName = "penstock-node-agent"

const (
	agentSettles  = time.Second            // an agent with a shorter life has failed
	agentPause    = 100 * time.Millisecond // pause after the first failure; doubles up to
	agentMaxPause = 5 * time.Second
	agentKilled   = time.Second      // the largest pause after a killed agent
	agentFailures = 5                // exits in a row until the supervisor gives up, unless mounts are left
	agentEnds     = 10 * time.Second // bound for the agent's end after SIGTERM
	mountsLeave   = 15 * time.Second // bound for the mounts after the agent; a kubelet waits for 30 s
	leaveLook     = 50 * time.Millisecond
	agentLook     = 500 * time.Millisecond // interval of checks for a dying agent
	agentDies     = 2 * time.Second        // an agent dying for longer can't end
)

// supervisor runs a node agent, and starts the next agent after each end.
type supervisor struct {
	log  *slog.Logger
	args []string // the agent's arguments, with its name
	// held: a holder has the mounts, so the mount processes may leave.
	held bool
	oom  string // oom_score_adj of all but the supervisor
	agent
}

// agent is the state of the current agent and the counts of earlier agents.
type agent struct {
	pid      int // 0: none runs
	begun    time.Time
	dying    time.Time // first time the agent was seen dying; zero: not dying
	failures int       // agents in a row that failed before this agent,
	own      int       // of which so many exited without a signal
	ended    int       // all agents before this agent
}

// supervise runs the supervisor until SIGTERM or SIGINT, or until agentFailures agents in a
// row exited without a signal and no mounts are left. supervise returns the agent's exit
// status.
func supervise(args []string, held bool, log *slog.Logger) error {
	s := &supervisor{log: log, args: append([]string{agentName}, args...), held: held, oom: "0"}
	if b, err := os.ReadFile(oomFile); err == nil {
		s.oom = string(bytes.TrimSpace(b))
	}
	// With -1000 the kernel spares the supervisor even when it kills a whole group; -999 is
	// not enough.
	if err := os.WriteFile(oomFile, []byte("-1000"), 0); err != nil {
		log.Warn("the supervisor of the node agent could not exempt itself from the out-of-memory killer", "err", err)
	}
	signals, ends := make(chan os.Signal, 8), make(chan os.Signal, 1)
	signal.Notify(signals, syscall.SIGTERM, syscall.SIGINT, syscall.SIGHUP, syscall.SIGQUIT)
	signal.Notify(ends, syscall.SIGCHLD)
	defer signal.Stop(signals)
	defer signal.Stop(ends)
	start := time.NewTimer(0)
	defer start.Stop()
	look := time.NewTicker(agentLook)
	defer look.Stop()
	var late <-chan time.Time // fires agentEnds after the first SIGTERM
	stopping := false
	for {
		status, ended := 0, false
		select {
		case <-start.C:
			if err := s.start(); err != nil {
				log.Error("the node agent could not be started; the supervisor tries again", "err", err)
				start.Reset(s.failed(agentKilled))
			}
		case sig := <-signals:
			stop := sig == syscall.SIGTERM || sig == syscall.SIGINT
			if s.pid != 0 {
				_ = syscall.Kill(s.pid, sig.(syscall.Signal))
			} else if stop {
				s.leave(ends)
				return nil
			}
			if stop && !stopping {
				stopping, late = true, time.After(agentEnds)
			}
		case <-late:
			log.Error("the agent does not end, and is killed", "pid", s.pid)
			_ = syscall.Kill(s.pid, syscall.SIGKILL)
		case <-look.C:
			pid := s.pid
			if ended = s.lost(time.Now()); ended {
				status = killed + int(syscall.SIGKILL)
				log.Error("the node agent has ended, except for a thread that waits in the kernel for a mount: the supervisor does not wait for the thread", "pid", pid)
			}
		case <-ends:
			status, ended = s.reap()
		}
		switch {
		case !ended:
			continue
		case stopping:
			s.leave(ends)
			return exitWith(status)
		}
		s.ended++
		if time.Since(s.begun) >= agentSettles {
			s.failures, s.own = 0, 0
			log.Warn("the node agent ended: the supervisor starts the next one, and mounts go on", "status", status)
			start.Reset(0)
			continue
		}
		limit := agentKilled
		if status < killed {
			s.own++
			limit = agentMaxPause
		}
		pause := s.failed(limit)
		if s.own >= agentFailures && len(childProcesses()) == 0 {
			log.Error("the node agent is given up", "status", status, "failures", s.own)
			return exitWith(status)
		}
		log.Warn("the node agent ended soon after its start", "status", status, "failures", s.failures, "next", pause)
		start.Reset(pause)
	}
}

// lost reports whether the agent has been dying for agentDies and so can't end by itself. If
// so, lost forgets the agent; reap reaps the process later.
func (s *supervisor) lost(now time.Time) bool {
	if s.pid == 0 || !kernel.Dying(s.pid) {
		s.dying = time.Time{}
		return false
	}
	if s.dying.IsZero() {
		s.dying = now
	}
	if now.Sub(s.dying) < agentDies {
		return false
	}
	s.pid, s.dying = 0, time.Time{}
	return true
}

// failed counts a failure and returns the pause before the next start, at most limit.
func (s *supervisor) failed(limit time.Duration) time.Duration {
	s.failures++
	return min(agentPause<<min(s.failures-1, 16), limit)
}

// killed plus the signal's number is the status of a process killed by a signal.
const killed = 128

// exitWith ends the program with a status.
func exitWith(status int) error {
	if status == exitOK {
		return nil
	}
	return &statusError{status}
}

// start starts an agent.
func (s *supervisor) start() error {
	env := append(os.Environ(), hold.OOMEnv+"="+s.oom, agentsEnv+"="+strconv.Itoa(s.ended))
	// os/exec waits for its own children, but this process reaps all children, so start uses
	// ForkExec. The agent has its own process group, so that a signal to the supervisor's
	// group does not reach the agent twice.
	pid, err := syscall.ForkExec("/proc/self/exe", s.args, &syscall.ProcAttr{
		Env: env, Files: []uintptr{0, 1, 2}, Sys: &syscall.SysProcAttr{Setpgid: true},
	})
	if err != nil {
		return err
	}
	s.pid, s.begun, s.dying = pid, time.Now(), time.Time{}
	return nil
}

// reap reaps all ended children. If the agent is among the children, reap returns true and the
// agent's exit status, or killed plus the number of the agent's signal.
func (s *supervisor) reap() (status int, ended bool) {
	for {
		var how syscall.WaitStatus
		pid, err := syscall.Wait4(-1, &how, syscall.WNOHANG, nil)
		if err == syscall.EINTR {
			continue
		}
		if err != nil || pid <= 0 {
			return status, ended
		}
		if pid != s.pid {
			continue
		}
		s.pid, ended = 0, true
		if status = how.ExitStatus(); how.Signaled() {
			status = killed + int(how.Signal())
		}
	}
}

// leave sends SIGHUP to the mount processes and waits for at most mountsLeave, so that the
// mount processes make their changes durable before the kernel kills them with this process.
// The mounts stay with the holder for the next container.
func (s *supervisor) leave(ends <-chan os.Signal) {
	if !s.held {
		return
	}
	told := map[int]bool{}
	late := time.After(mountsLeave)
	look := time.NewTicker(leaveLook)
	defer look.Stop()
	for {
		s.reap()
		left := childProcesses()
		if len(left) == 0 {
			return
		}
		for _, pid := range left {
			if !told[pid] {
				told[pid] = true
				_ = syscall.Kill(pid, syscall.SIGHUP)
			}
		}
		select {
		case <-ends:
		case <-look.C:
		case <-late:
			s.log.Warn("processes of mounts have not ended: the next driver takes care of bytes that are not durable yet", "processes", len(left))
			return
		}
	}
}

// childProcesses lists this process's running children, without dying processes.
func childProcesses() (pids []int) {
	self := strconv.Itoa(os.Getpid())
	all, _ := filepath.Glob("/proc/[0-9]*/stat")
	for _, name := range all {
		b, err := os.ReadFile(name)
		if err != nil {
			continue // the process ended
		}
		// PID (NAME) STATE PARENT: a name may contain brackets and spaces.
		f := bytes.Fields(b[bytes.LastIndexByte(b, ')')+1:])
		if len(f) < 2 || string(f[1]) != self || string(f[0]) == "Z" || string(f[0]) == "X" {
			continue
		}
		if pid, err := strconv.Atoi(filepath.Base(filepath.Dir(name))); err == nil && !kernel.Dying(pid) {
			pids = append(pids, pid)
		}
	}
	return pids
}

// agentsEnv holds the number of agents of this supervisor that ended before the current agent.
const agentsEnv = "PENSTOCK_CSI_AGENTS_ENDED"

// agentsEnded reads agentsEnv and removes the variable. told is false without a supervisor.
func agentsEnded() (n int, told bool) {
	v, told := os.LookupEnv(agentsEnv)
	if !told {
		return 0, false
	}
	os.Unsetenv(agentsEnv) // mount processes must not inherit the variable
	n, err := strconv.Atoi(v)
	return n, err == nil
}

// oomFile holds the adjustment of this process's rank for the kernel's choice of a process to
// kill when memory is short: -1000 (never) to 1000.
const oomFile = "/proc/self/oom_score_adj"

// takeOOM sets this process's oom_score_adj to the value in hold.OOMEnv, in place of the
// parent's inherited value. The caller calls takeOOM before other work, which takes memory.
// Any process may raise its own value.
func takeOOM() {
	n, told := os.LookupEnv(hold.OOMEnv)
	if !told {
		return
	}
	os.Unsetenv(hold.OOMEnv)
	if err := os.WriteFile(oomFile, []byte(n), 0); err != nil {
		fmt.Fprintf(os.Stderr, "penstock: %s=%s: %v\n", hold.OOMEnv, n, err)
	}
}
