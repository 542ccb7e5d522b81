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

// The node agent in a container. The kernel ends all processes of a container with
// its first one, mounts with the agent: and the kubelet starts a container anew
// later each time. So the first process is one that does next to nothing, and the
// agent, that same program, is its child:
//
//	supervisor            the container's first process, which the kernel spares when memory is short
//	  agent               penstock-node-agent csi --node ...: killed, another one is started
//	    penstock mount    children of the supervisor when their agent is gone; the next one finds
//	    penstock mount    them by their locks (csi/node, Recover)
//
// Killed together, as the kernel does with a group that has no memory left, the
// mounts are taken up by the next agent from the holder. Such an agent may be unable
// to end: a thread of it waits in the kernel for a mount that nobody serves, and that
// only the next agent has taken up. So it counts as ended when it has been dying for a
// while, and is reaped when it can be.

// agentName is the agent's argv[0], by which people tell the two apart.
const agentName = "penstock-node-agent"

const (
	agentSettles  = time.Second            // an agent that lived for less has failed
	agentPause    = 100 * time.Millisecond // before the one after a failed one; twice as long each time, up to
	agentMaxPause = 5 * time.Second
	agentKilled   = time.Second      // or up to this, if it did not end by itself
	agentFailures = 5                // that it ended by itself in a row, and it is given up, unless mounts are left
	agentEnds     = 10 * time.Second // so long after SIGTERM, at most
	mountsLeave   = 15 * time.Second // and the mounts after it: a kubelet waits for 30 s
	leaveLook     = 50 * time.Millisecond
	agentLook     = 500 * time.Millisecond // whether it is dying,
	agentDies     = 2 * time.Second        // and for so long: it can't end
)

// supervisor runs one agent after the other.
type supervisor struct {
	log  *slog.Logger
	args []string // the agent's, with its name
	// held: a holder has the mounts, so that their processes may leave them.
	held bool
	oom  string // oom_score_adj of all but the supervisor
	agent
}

// agent is the present one.
type agent struct {
	pid      int // 0: none runs
	begun    time.Time
	dying    time.Time // since when it has been seen so; zero: it is not
	failures int       // in a row, before it: soon after they had begun agents ended,
	own      int       // so many of them by themselves
	ended    int       // agents in all, before it
}

// supervise is a supervisor's life. It ends after SIGTERM or SIGINT, or when agents
// end again and again, with the agent's exit status.
func supervise(args []string, held bool, log *slog.Logger) error {
	s := &supervisor{log: log, args: append([]string{agentName}, args...), held: held, oom: "0"}
	if b, err := os.ReadFile(oomFile); err == nil {
		s.oom = string(bytes.TrimSpace(b))
	}
	// -1000, and not -999: it is spared as well when the kernel ends all of a group.
	if err := os.WriteFile(oomFile, []byte("-1000"), 0); err != nil {
		log.Warn("the supervisor of the node agent may be killed for want of memory as anybody", "err", err)
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
	var late <-chan time.Time // the agent does not end
	stopping := false
	for {
		status, ended := 0, false
		select {
		case <-start.C:
			if err := s.start(); err != nil {
				log.Error("no agent can be started", "err", err)
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
				log.Error("the node agent has ended but for a thread that waits in the kernel, for a mount; it is not waited for", "pid", pid)
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
			log.Warn("the node agent ended; the next one is started, and mounts go on", "status", status)
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
		log.Warn("the node agent ended soon after it began", "status", status, "failures", s.failures, "next", pause)
		start.Reset(pause)
	}
}

// lost tells that the agent has been dying for so long that it can't end by itself;
// from then on it is none of ours but to be reaped.
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

// failed counts a failure, and gives the pause after it.
func (s *supervisor) failed(limit time.Duration) time.Duration {
	s.failures++
	return min(agentPause<<min(s.failures-1, 16), limit)
}

// killed and a signal's number is the status of who was killed by it.
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
	// Not by os/exec, which waits for its children itself: this process reaps all
	// that come to it. In a group of its own, so that a signal to the supervisor's
	// does not reach it twice.
	pid, err := syscall.ForkExec("/proc/self/exe", s.args, &syscall.ProcAttr{
		Env: env, Files: []uintptr{0, 1, 2}, Sys: &syscall.SysProcAttr{Setpgid: true},
	})
	if err != nil {
		return err
	}
	s.pid, s.begun, s.dying = pid, time.Now(), time.Time{}
	return nil
}

// reap takes in all that have ended, and tells how the agent did if it is one of
// them: its exit status, or killed and the signal that did it.
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

// leave has the processes of mounts make things durable and end, before the kernel
// ends them with this one. Their mounts stay with the holder, for a container that
// comes after.
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
			s.log.Warn("processes that serve mounts have not ended; what is not durable yet is left to who comes after", "processes", len(left))
			return
		}
	}
}

// childProcesses lists this process's children that run: not what is dying.
func childProcesses() (pids []int) {
	self := strconv.Itoa(os.Getpid())
	all, _ := filepath.Glob("/proc/[0-9]*/stat")
	for _, name := range all {
		b, err := os.ReadFile(name)
		if err != nil {
			continue // it ended
		}
		// PID (NAME) STATE PARENT: a name may have brackets and spaces in it.
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

// agentsEnv tells an agent how many have ended before it below this supervisor.
const agentsEnv = "PENSTOCK_CSI_AGENTS_ENDED"

// agentsEnded is what the supervisor told; none: there is no supervisor.
func agentsEnded() (n int, told bool) {
	v, told := os.LookupEnv(agentsEnv)
	if !told {
		return 0, false
	}
	os.Unsetenv(agentsEnv) // the mounts are not to know
	n, err := strconv.Atoi(v)
	return n, err == nil
}

// oomFile says how soon a process is killed when memory is short, from -1000
// (never) to 1000.
const oomFile = "/proc/self/oom_score_adj"

// takeOOM has this process be killed for want of memory as it was told to, and not
// as who started it: before it does anything that takes memory. To ask for more
// than one's parent has is anybody's right.
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
