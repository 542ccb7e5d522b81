package csi

import (
	"bytes"
	"errors"
	"flag"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"

	"penstock.io/penstock/fuse/kernel"
	"penstock.io/penstock/test/port"
)

var kills = flag.Int("kills", 3, "how often the node agent is killed, alone and with all mounts")

// proc is a process below the driver's supervisor.
type proc struct {
	pid, parent int
	line        string
	zombie      bool
	dying       bool // or a zombie: the process does nothing more
}

// below lists the processes of the driver's container.
func (r *rig) below() (all []proc) {
	r.t.Helper()
	names, err := filepath.Glob("/proc/[0-9]*")
	if err != nil {
		r.t.Fatal(err)
	}
	group, err := os.Readlink(fmt.Sprintf("/proc/%d/ns/pid", r.driver.PID()))
	if err != nil {
		r.t.Fatal(err)
	}
	for _, name := range names {
		stat, err := os.ReadFile(name + "/stat")
		line, lerr := os.ReadFile(name + "/cmdline")
		if ns, nerr := os.Readlink(name + "/ns/pid"); errors.Join(err, lerr, nerr) != nil || ns != group {
			continue // the process ended, or is elsewhere
		}
		f := bytes.Fields(stat[bytes.LastIndexByte(stat, ')')+1:])
		all = append(all, proc{atoi(r.t, filepath.Base(name)), atoi(r.t, string(f[1])), string(bytes.ReplaceAll(line, []byte{0}, []byte{' '})), string(f[0]) == "Z", kernel.Dying(atoi(r.t, filepath.Base(name)))})
	}
	return all
}

// the returns the only process below the supervisor whose command line has a text.
func (r *rig) the(text string) (pid int, err error) {
	for _, p := range r.below() {
		if !p.dying && strings.Contains(p.line, text) {
			if pid != 0 {
				return 0, fmt.Errorf("%q: there are %d and %d", text, pid, p.pid)
			}
			pid = p.pid
		}
	}
	if pid == 0 {
		err = fmt.Errorf("%q: there is none", text)
	}
	return pid, err
}

// another waits until a single such process runs, other than the given process.
func (r *rig) another(text string, than int) (pid int) {
	r.t.Helper()
	r.until("the next "+text, func() (err error) {
		if pid, err = r.the(text); err == nil && pid == than {
			err = errors.New("it is the same one")
		}
		return err
	})
	return pid
}

const (
	agentLine = "penstock-node-agent csi "
	mountLine = " mount --log-file="
)

// ticks makes and removes a file again and again, and reports each round's length and end.
// Between two rounds ticks rests.
type ticks struct {
	stop  chan struct{}
	ended chan error
	worst chan time.Duration
}

func tick(dir string, rest time.Duration) *ticks {
	k := &ticks{stop: make(chan struct{}), ended: make(chan error, 1), worst: make(chan time.Duration)}
	go func() { // ends with end
		name := filepath.Join(dir, "tick")
		var worst time.Duration
		for {
			begun := time.Now()
			if err := errors.Join(os.WriteFile(name, []byte("x"), 0o644), os.Remove(name)); err != nil {
				k.ended <- err
				return
			}
			worst = max(worst, time.Since(begun))
			select {
			case k.worst <- worst:
				worst = 0
			case <-k.stop:
				k.ended <- nil
				return
			default:
			}
			time.Sleep(rest)
		}
	}()
	return k
}

// take is the longest round since the last take.
func (k *ticks) take(t *testing.T) time.Duration {
	t.Helper()
	select {
	case d := <-k.worst:
		return d
	case err := <-k.ended:
		t.Fatalf("who used the volume: %v", err)
	case <-time.After(90 * time.Second):
		t.Fatal("the volume hangs")
	}
	return 0
}

func (k *ticks) end(t *testing.T) {
	t.Helper()
	close(k.stop)
	if err := <-k.ended; err != nil {
		t.Errorf("who used the volume: %v", err)
	}
}

// TestAgentIsKilled: in a container the node agent is killed with SIGKILL while a pod works.
// The pod's mount goes on with its own process, the container lives, and the next agent serves.
// The same holds when the kernel has killed every process but the supervisor.
func TestAgentIsKilled(t *testing.T) {
	r := newRig(t)
	r.held("--settle=100ms") // each mount is killed before long
	pods := r.container()
	r.drive(nil)
	q := claim("pvc-1", nil)
	q.CapacityRange.RequiredBytes = 256 << 20
	id := must(t, r.controller().CreateVolume, q).GetVolume().GetVolumeId()
	staging, target := filepath.Join(pods, "staging"), filepath.Join(pods, "pod")
	stage := &csi.NodeStageVolumeRequest{VolumeId: id, StagingTargetPath: staging, VolumeCapability: capability(manyWriters)}
	must(t, r.node().NodeStageVolume, stage)
	must(t, r.node().NodePublishVolume, publish(id, staging, target))
	p := r.pod(target)
	k := tick(target, 0)
	supervisor := r.driver.PID()
	spared := func(pid int) string {
		b, err := os.ReadFile(fmt.Sprintf("/proc/%d/oom_score_adj", pid))
		if err != nil {
			t.Fatal(err)
		}
		return strings.TrimSpace(string(b))
	}
	own := spared(os.Getpid())
	least := "-1000"
	if b, err := os.ReadFile(r.path("log")); err == nil && bytes.Contains(b, []byte("oom_score_adj: permission denied")) {
		least = own // even root may not set a lower value here (CAP_SYS_RESOURCE)
	}
	agent, mount := r.another(agentLine, 0), r.another(mountLine, 0)
	var alone, together []time.Duration
	for n := range 2 * *kills {
		all := n%2 == 1
		if time.Sleep(200 * time.Millisecond); all {
			time.Sleep(time.Second) // a process that lived for so long is followed at once
		}
		if spared(supervisor) != least || spared(agent) != own || spared(mount) != own {
			t.Errorf("the kernel spares supervisor, agent and mount by %s, %s and %s", spared(supervisor), spared(agent), spared(mount))
		}
		k.take(t)
		victims := []int{agent}
		if all {
			victims = append(victims, mount)
		}
		for _, pid := range victims {
			if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
				t.Fatal(err)
			}
		}
		agent = r.another(agentLine, agent)
		if all {
			mount = r.another(mountLine, mount)
		} else if now, err := r.the(mountLine); err != nil || now != mount {
			t.Fatalf("the agent's end was that of process %d, now %d serves: %v", mount, now, err)
		}
		r.answers(r.conn)
		must(t, r.node().NodeStageVolume, stage)
		must(t, r.node().NodePublishVolume, publish(id, staging, target))
		if d := k.take(t); all {
			together = append(together, d)
		} else {
			alone = append(alone, d)
		}
	}
	for what, l := range map[string][]time.Duration{"the agent": alone, "agent and mount": together} {
		slices.Sort(l)
		t.Logf("%s killed %d times: pauses of p50 %v, max %v", what, len(l), l[len(l)/2].Round(time.Millisecond), l[len(l)-1].Round(time.Millisecond))
	}
	select {
	case <-r.driver.Done():
		t.Fatalf("the container has ended: %s", r.driver.State())
	default:
	}
	for _, x := range r.below() {
		if x.zombie && x.parent == supervisor {
			t.Errorf("process %d was not reaped", x.pid)
		}
	}
	// An agent that is told to begin anew does so.
	if err := syscall.Kill(supervisor, syscall.SIGHUP); err != nil {
		t.Fatal(err)
	}
	r.another(agentLine, agent)
	r.answers(r.conn)
	if now, err := r.the(mountLine); err != nil || now != mount {
		t.Errorf("process %d serves, it was %d: %v", now, mount, err)
	}
	k.end(t)
	// The mount is of an earlier agent; all bytes are durable when the mount's process is told to
	// go.
	if err := r.driver.Stop(60 * time.Second); err != nil {
		t.Errorf("told to end: %v", err)
	}
	if b, err := os.ReadFile(r.path("state", "volumes", key(t, r), "log")); err != nil || !bytes.Contains(b, []byte("the mount is left to the next process")) {
		t.Errorf("the mount's process was not told to leave: %v %s", err, b)
	}
	r.drive(nil)
	r.passes(target)
	p.end()
	r.gone(id, staging, target)
	r.nothingHeld()
	r.containerIsClean(pods)
}

// key is the name of the only folder of the state.
func key(t *testing.T, r *rig) string {
	t.Helper()
	l, err := os.ReadDir(r.path("state", "volumes"))
	if err != nil || len(l) != 1 {
		t.Fatal(l, err)
	}
	return l[0].Name()
}

// TestAgentCannotEnd: the agent is killed together with the process of a mount in which one of
// the agent's threads waits, so that the agent can't end before a process serves the mount. The
// next agent does not wait for the end: it serves at the sockets of the killed agent, also
// while the cluster stands still, and takes the mount up.
func TestAgentCannotEnd(t *testing.T) {
	r := newRig(t)
	r.held("--settle=100ms")
	pods := r.container()
	admin := port.Free(t)
	r.driver = r.start(nil, "csi", "--inline", "--endpoint", "unix://"+r.socket(), "--cluster", r.cluster(), "--state-dir", r.path("state"), "--node-name", "node1",
		"--hold", r.hold, "--registration-dir", r.dir, "--admin", admin)
	r.answers(r.conn)
	id := must(t, r.controller().CreateVolume, claim("pvc-1", nil)).GetVolume().GetVolumeId()
	staging, target, grouped := filepath.Join(pods, "staging"), filepath.Join(pods, "pod"), filepath.Join(pods, "grouped")
	must(t, r.node().NodeStageVolume, &csi.NodeStageVolumeRequest{VolumeId: id, StagingTargetPath: staging, VolumeCapability: capability(manyWriters)})
	must(t, r.node().NodePublishVolume, publish(id, staging, target))
	r.halt(r.meta.PID())
	goOn := sync.OnceFunc(func() { _ = syscall.Kill(r.meta.PID(), syscall.SIGCONT) })
	t.Cleanup(goOn)
	q := publish(id, staging, grouped)
	q.VolumeCapability = capability(manyWriters)
	q.VolumeCapability.GetMount().VolumeMountGroup = "4242"
	agent, mount := r.another(agentLine, 0), r.another(mountLine, 0)
	for try := 0; ; try++ {
		if try == 5 {
			t.Fatal("an agent whose thread waits in a mount ends nevertheless")
		}
		conn := r.dial(r.socket())
		go func() { _, _ = csi.NewNodeClient(conn).NodePublishVolume(t.Context(), q, grpc.WaitForReady(true)) }() // ends with the test
		r.until("a thread waits for the mount", func() error { return waitsForMount(agent) })
		time.Sleep(300 * time.Millisecond) // until the mount's process has read its input; otherwise the process can end
		if err := syscall.Kill(agent, syscall.SIGKILL); err != nil {
			t.Fatal(err)
		}
		if time.Sleep(300 * time.Millisecond); kernel.Dying(agent) {
			break
		}
		agent = r.another(agentLine, agent)
	}
	if err := syscall.Kill(mount, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	next := r.another(agentLine, agent)
	conn := r.dial(r.socket())
	r.until("the next agent serves", func() error {
		_, err := csi.NewIdentityClient(conn).GetPluginInfo(t.Context(), &csi.GetPluginInfoRequest{}, grpc.WaitForReady(true))
		return err
	})
	// Nor for the remains of earlier pods in the cluster, for which the driver has half a minute.
	if b, err := os.ReadFile(r.path("log")); err != nil || bytes.Contains(b, []byte("not everything that deleted pods left behind could be removed")) {
		t.Errorf("it looked for what pods left behind first: %v", err)
	}
	if !kernel.Dying(agent) {
		t.Error("the agent could end while nobody served the mount: nothing was tried")
	}
	r.until("the agent that serves is the next one", func() error {
		now, err := r.the(agentLine)
		if err == nil && now != next {
			err = fmt.Errorf("process %d is there, %d was started", now, next)
		}
		return err // or the process is about to start a mount's process, which has the same name for a moment
	})
	goOn()
	r.another(mountLine, mount)
	r.passes(target)
	r.until("the killed agent is reaped", func() error {
		if _, err := os.Stat(fmt.Sprintf("/proc/%d", agent)); err == nil {
			return errors.New("it is there")
		}
		return nil
	})
	r.conn = conn
	r.until("the port of the killed agent is served", func() error {
		a, err := http.Get("http://" + admin + "/metrics")
		if err != nil {
			return err
		}
		defer a.Body.Close()
		b, err := io.ReadAll(a.Body)
		if err == nil && !bytes.Contains(b, []byte("\npenstock_csi_agents_ended_total ")) {
			err = errors.New("it does not tell how many agents ended")
		}
		return err
	})
	again(r, r.node().NodePublishVolume, q)
	r.gone(id, staging, target, grouped)
	r.nothingHeld()
	r.containerIsClean(pods)
}

// inMounts are the calls, by numbers on each kind of machine, in which an agent may wait
// for a mount when it sets a group: statx, lstat, lchown.
var inMounts = map[string][]string{"amd64": {"332", "6", "262", "94"}, "arm64": {"291", "79", "54"}}

// waitsForMount demands that a thread of a process is in one of these calls.
func waitsForMount(pid int) error {
	all, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/syscall", pid))
	for _, name := range all {
		b, _ := os.ReadFile(name)
		if n, _, _ := strings.Cut(string(b), " "); slices.Contains(inMounts[runtime.GOARCH], n) {
			return nil
		}
	}
	return errors.Join(err, errors.New("none does"))
}

// TestAgentGivenUp: an agent that can't begin is not started again for ever: the container ends
// with the agent's status, which the starter of the container sees.
func TestAgentGivenUp(t *testing.T) {
	r := newRig(t)
	r.container()
	for _, c := range []struct {
		args   []string
		status int
	}{
		{[]string{"--endpoint", "unix://" + r.path("nowhere", "csi.sock")}, 1},
		{[]string{"--endpoint", "unix://" + r.socket(), "--log-level", "much"}, 2},
		{[]string{"--endpoint", "unix://" + r.socket(), "--dir", r.path("m")}, 2},
	} {
		p := r.start(nil, append([]string{"csi", "--node", "--cluster", r.cluster(), "--state-dir", r.path("state"), "--node-name", "node1"}, c.args...)...)
		select {
		case <-p.Done():
		case <-time.After(60 * time.Second):
			t.Fatalf("%v: it is tried for ever", c.args)
		}
		if want := "exit status " + strconv.Itoa(c.status); !strings.Contains(p.State(), want) {
			t.Errorf("%v: it ended with %s, want %s", c.args, p.State(), want)
		}
	}
}
