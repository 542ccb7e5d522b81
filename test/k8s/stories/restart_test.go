package stories

import (
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"penstock.io/penstock/test/k8s/rig"
)

var (
	kills = flag.Int("kills", 10, "how often the process of a mount, and the node agent, is killed")
	ends  = flag.Int("ends", 2, "how often the node agent's container is killed, so that the kubelet waits longer each time before it starts it again: none, 10 s, 20 s, 40 s ...")
)

// Parts of the driver on a node, by their command lines.
const (
	mountProcess = " mount --log-file=/var/lib/penstock-csi/"
	nodeAgent    = "penstock-node-agent csi --node "
	supervisor   = "/penstock csi --node " // the node agent's supervisor: the first process of the container
	holder       = " hold --socket="
)

// used is a pod that writes, reads, maps, locks and has files open on a claim. The pod
// knows every byte of the claim, and measures its pauses.
type used struct {
	*story
	pod, node, class string
}

// pause is a time in which the pod waited.
type pause struct {
	begun time.Time
	took  time.Duration
}

// uses begins a story with such a pod.
func uses(t *testing.T, node string) *used {
	t.Helper()
	u := &used{begin(t), "user", node, "penstock"}
	u.uses()
	return u
}

// uses starts the pod.
func (u *used) uses() {
	u.Helper()
	u.apply(claim("data", u.class, "ReadWriteMany", "8Gi"), pod(u.pod, u.node, map[string]string{"/data": "data"}))
	u.ready(u.pod)
	u.sh(u.pod, "load files /data/many 200; echo kept > /data/f; sync -f /data/f; (user /data/used /stop 50ms; echo ended $?) </dev/null >/out 2>&1 & sleep 2; cat /out")
}

// find gives the processes of a part of the driver on the pod's node.
func (u *used) find(part string) (pids []int) {
	u.Helper()
	pids, err := the.Find(u.node, func(line string) bool { return strings.Contains(line, part) })
	if err != nil {
		u.Fatal(err)
	}
	return pids
}

// kill ends a part of the driver with SIGKILL.
func (u *used) kill(part string) {
	u.Helper()
	pids := u.find(part)
	if len(pids) == 0 {
		u.Fatalf("no process %q is there to be killed", part)
	}
	for _, pid := range pids {
		if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
			u.Fatal(err)
		}
	}
}

// next waits until exactly one process of a part runs, other than these.
func (u *used) next(part string, than []int) {
	u.Helper()
	u.until(patience+time.Minute, "the next"+part, func(context.Context) error {
		if now := u.find(part); len(now) != 1 || slices.Contains(than, now[0]) {
			return fmt.Errorf("there are %v", now)
		}
		return nil
	})
}

// passes waits until the pod can use its claim.
func (u *used) passes(after string) {
	u.Helper()
	begun := time.Now()
	u.sh(u.pod, "echo x > /data/x; rm /data/x; cat /data/f > /dev/null")
	u.Logf("%s: the pod's next write, with the time that kubectl takes, was done after %v", after, time.Since(begun).Round(time.Millisecond))
}

var paused = regexp.MustCompile(`(?m)^a pause of (\S+) at (\d+)$`)

// ended stops the pod's work and returns its pauses; any error fails the test. Later pods
// on both nodes must find the bytes that the pod has synced.
func (u *used) ended() (all []pause) {
	u.Helper()
	u.sh(u.pod, "touch /stop")
	if err := the.Until(patience, "the pod's program ends", func(context.Context) error {
		out := u.sh(u.pod, "cat /out")
		if !strings.Contains(out, "ended ") {
			return fmt.Errorf("it goes on: %s", out)
		}
		for _, m := range paused.FindAllStringSubmatch(out, -1) {
			took, err := time.ParseDuration(m[1])
			if err != nil {
				u.Fatal(err)
			}
			at, err := strconv.ParseInt(m[2], 10, 64)
			if err != nil {
				u.Fatal(err)
			}
			all = append(all, pause{time.UnixMilli(at), took})
		}
		u.Logf("in the pod, pauses left out:\n%s", paused.ReplaceAllString(out, ""))
		if !strings.HasSuffix(out, "ended 0") {
			u.Errorf("the pod saw an error: %s", u.mountLog())
		}
		return nil
	}); err != nil {
		u.stuck()
		u.Fatal(err)
	}
	u.kubectl("delete", "pod", u.pod, "--timeout=60s")
	u.apply(pod("b", "node2", map[string]string{"/data": "data"}), claim("new", u.class, "ReadWriteMany", "64Mi"),
		pod("c", "node1", map[string]string{"/data": "data", "/new": "new"}))
	u.ready("b", "c")
	for _, p := range []string{"b", "c"} {
		u.want(p, "cat /data/f; load check /data/many 200", "kept\n200 files are right")
	}
	u.sh("c", "echo x > /new/x; sync -f /new/x")
	return all
}

// stuck prints where the pod's program waits: in the kernel, and in its own code (the
// program prints this when it is ended).
func (u *used) stuck() {
	u.Helper()
	for _, pid := range u.find("user /data/used /stop") {
		out, err := exec.Command("sh", "-c", fmt.Sprintf("for t in /proc/%d/task/*; do cat $t/wchan $t/syscall $t/stack; echo; done", pid)).CombinedOutput()
		u.Logf("process %d in the kernel: %v\n%s", pid, err, out)
		if err := syscall.Kill(pid, syscall.SIGQUIT); err != nil {
			u.Logf("process %d: %v", pid, err)
		}
	}
	time.Sleep(2 * time.Second)
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	out, err := the.Kubectl(ctx, "-n", u.ns, "exec", u.pod, "--", "cat", "/out")
	u.Logf("and in its own code: %v\n%s\n%s", err, paused.ReplaceAllString(out, ""), u.mountLog())
}

// mountLog returns the logs of the mounts on the pod's node, which go with the mounts.
func (u *used) mountLog() string {
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	out, err := the.Machine(u.node).Command(ctx, "sh", "-c", "tail -n 60 /var/lib/penstock-csi/volumes/*/log").CombinedOutput()
	return fmt.Sprintf("logs of mounts: %v\n%s", err, out)
}

// slower measures from now on how much slower this machine is than a quiet machine, until
// the caller calls factor.
func (s *story) slower() (factor func() float64) {
	s.Helper()
	ask, err := the.Slow(s.Context())
	if err != nil {
		s.Fatal(err)
	}
	return func() float64 {
		s.Helper()
		f, err := ask()
		if err != nil {
			s.Fatal(err)
		}
		return f
	}
}

// aim bounds half of the pauses on a quiet machine.
const aim = 500 * time.Millisecond

// pauses prints the pauses after a number of kills, in order of their length. Half of the
// pauses must be shorter than the aim; on a machine that is slower by factor, half of the
// aim is stretched by the factor (package slow, Bound).
func (u *used) pauses(what string, l []time.Duration, factor float64) {
	u.Helper()
	slices.Sort(l)
	p50, bound := l[len(l)/2], aim/2+time.Duration(float64(aim/2)*factor)
	u.Logf("%s %d times: pauses of p50 %v, p99 %v, max %v (0: under 50ms); the machine is %.1f times as slow as a quiet one, which makes %v of %v",
		what, len(l), p50, l[len(l)*99/100], l[len(l)-1], factor, bound.Round(time.Millisecond), aim)
	if p50 > bound {
		u.Errorf("%s: half of the pauses are longer than %v", what, p50)
	}
}

// longest returns the longest pause in a period.
func longest(all []pause, from, to time.Time) (d time.Duration) {
	for _, p := range all {
		if p.begun.Before(to) && p.begun.Add(p.took).After(from) {
			d = max(d, p.took)
		}
	}
	return d
}

// paused fails if no pause lies in a period: then nothing was killed.
func (u *used) paused(what string, all []pause, from, to time.Time) {
	u.Helper()
	d := longest(all, from, to)
	if d == 0 {
		u.Errorf("%s: no pause at all", what)
	}
	u.Logf("%s: a pause of %v", what, d)
}

// TestDriverRestarts: while a pod writes, reads, maps and has files open, the node
// agent's container is killed with SIGKILL, and all pods of the driver except the
// holder's are deleted. The pod sees pauses and no error. Later pods find the synced
// bytes, and claims are served as before.
func TestDriverRestarts(t *testing.T) {
	u := uses(t, "node2")
	ctx, cancel := context.WithTimeout(t.Context(), 2*patience)
	defer cancel()
	times := []time.Time{time.Now()}
	mount, agent := u.find(mountProcess), u.find(nodeAgent)
	u.kill(supervisor)
	u.next(nodeAgent, agent)
	u.next(mountProcess, mount)
	u.passes("the node agent's container was killed")
	if err := the.Driver(ctx); err != nil {
		t.Fatal(err)
	}
	times = append(times, time.Now())
	if _, err := the.Kubectl(ctx, "-n", rig.Namespace, "delete", "pods", "-l", "app.kubernetes.io/component!=hold", "--timeout=120s"); err != nil {
		t.Fatal(err)
	}
	u.passes("the driver's pods were deleted")
	if err := the.Driver(ctx); err != nil {
		t.Fatal(err)
	}
	u.passes("nothing more")
	times = append(times, time.Now())
	all := u.ended()
	u.paused("the node agent's container killed", all, times[0], times[1])
	u.paused("the driver's pods deleted", all, times[1], times[2])
}

// TestAgentKills: the node agent is killed again and again. Its supervisor starts the
// next agent in the same container, and the process of the mount stays.
func TestAgentKills(t *testing.T) {
	u := uses(t, "node2")
	ctx, cancel := context.WithTimeout(t.Context(), 2*patience)
	defer cancel()
	restarts, err := u.agent(ctx, ".restartCount")
	if err != nil {
		t.Fatal(err)
	}
	mount := u.find(mountProcess)
	factor := u.slower()
	var times []time.Time
	for range *kills {
		agent := u.find(nodeAgent)
		times = append(times, time.Now())
		u.kill(nodeAgent)
		u.next(nodeAgent, agent)
		time.Sleep(500*time.Millisecond + rand.N(time.Second))
	}
	times = append(times, time.Now())
	slow := factor()
	if now := u.find(mountProcess); !slices.Equal(now, mount) {
		t.Errorf("the mount was served by %v, and is by %v", mount, now)
	}
	u.passes("the node agent was killed")
	if now, err := u.agent(ctx, ".restartCount"); err != nil || now != restarts {
		t.Errorf("the container was started %s times more, and %s before: %v", now, restarts, err)
	}
	if err := the.Driver(ctx); err != nil {
		t.Fatal(err)
	}
	all := u.ended()
	var l []time.Duration
	for i := range *kills {
		l = append(l, longest(all, times[i], times[i+1]))
	}
	u.pauses("the node agent killed", l, slow)
}

// TestKills: the process of a mount is killed again and again. The pod sees pauses, which
// the test prints, and no error.
func TestKills(t *testing.T) {
	u := uses(t, "node2")
	factor := u.slower()
	var times []time.Time
	for range *kills {
		mount := u.find(mountProcess)
		times = append(times, time.Now())
		u.kill(mountProcess)
		u.next(mountProcess, mount)
		time.Sleep(500*time.Millisecond + rand.N(500*time.Millisecond))
	}
	times = append(times, time.Now())
	slow := factor()
	all := u.ended()
	var l []time.Duration
	for i := range *kills {
		l = append(l, longest(all, times[i], times[i+1]))
	}
	u.pauses("the mount's process killed", l, slow)
	if l[len(l)-1] == 0 {
		t.Error("there was no pause at all: nothing was killed")
	}
}

// image tells of which image a part of the driver runs on the pod's node.
func (u *used) image(part string) string {
	u.Helper()
	pids := u.find(part)
	if len(pids) != 1 {
		u.Fatalf("processes %v are %q", pids, part)
	}
	out, err := exec.CommandContext(u.Context(), fmt.Sprintf("/proc/%d/exe", pids[0]), "version", "--output", "json").Output()
	var v struct{ Version string }
	if err == nil {
		err = json.Unmarshal(out, &v)
	}
	if err != nil {
		u.Fatalf("%s %v", out, err)
	}
	return v.Version
}

// TestUpgrade: the driver is upgraded to another image under a pod that uses a claim,
// then the holder, whose successor gets its state from the mounts. If a mount's process
// is killed then, another process follows. Then the same back again. All this happens on
// the node with the metadata server, which sees the holder's processes.
func TestUpgrade(t *testing.T) {
	u := uses(t, "node1")
	ctx, cancel := context.WithTimeout(t.Context(), 4*patience)
	defer cancel()
	before := u.image(nodeAgent)
	type step struct {
		what     string
		from, to time.Time
		must     bool // a pause is expected
	}
	var steps []step
	for _, tag := range []string{rig.NextTag, ""} {
		want := tag
		if tag == "" {
			want = before
		}
		from := time.Now()
		if err := the.Deploy(ctx, rig.Change{Tag: tag}); err != nil {
			t.Fatal(err)
		}
		u.passes("the driver is of " + want)
		u.until(patience, "the mount is served by the new image", func(context.Context) error {
			if got := u.image(mountProcess); got != want || u.image(nodeAgent) != want {
				return fmt.Errorf("it is served by %s", got)
			}
			return nil
		})
		steps = append(steps, step{"the driver upgraded to " + want, from, time.Now(), true})

		old := u.find(holder)
		if got := u.image(holder); got == want {
			t.Errorf("the holder was replaced together with the driver: it is of %s", got)
		}
		from = time.Now()
		if _, err := the.Kubectl(ctx, "-n", rig.Namespace, "delete", "pods", "-l", "app.kubernetes.io/component=hold", "--timeout=120s"); err != nil {
			t.Fatal(err)
		}
		u.next(holder, old)
		if got := u.image(holder); got != want {
			t.Errorf("the holder is of %s, not of %s", got, want)
		}
		if err := the.Driver(ctx); err != nil {
			t.Fatal(err)
		}
		u.passes("the holder was replaced")
		u.held()
		steps = append(steps, step{"the holder replaced", from, time.Now(), false})
		mount := u.find(mountProcess)
		from = time.Now()
		u.kill(mountProcess)
		u.next(mountProcess, mount)
		u.passes("the mount's process was killed after the holder was replaced")
		steps = append(steps, step{"a mount's process killed after that", from, time.Now(), true})
	}
	all := u.ended()
	for _, s := range steps {
		if s.must {
			u.paused(s.what, all, s.from, s.to)
		} else {
			t.Logf("%s: the longest pause is %v (0: under 50ms)", s.what, longest(all, s.from, s.to))
		}
	}
}

// held waits until the holder on the pod's node has the pod's mount.
func (u *used) held() {
	u.Helper()
	u.until(patience, "the holder has the mount", func(ctx context.Context) error {
		out, err := the.PenstockOn(ctx, u.node, "hold", "--socket=/run/penstock-csi/hold.sock", "--list")
		if err == nil && !strings.Contains(out, " pid ") {
			err = fmt.Errorf("it has %q", out)
		}
		return err
	})
}

// agent is a value of the node agent's container on the pod's node.
func (u *used) agent(ctx context.Context, path string) (string, error) {
	return the.Kubectl(ctx, "-n", rig.Namespace, "get", "pods", "-l", "app.kubernetes.io/component=node", "--field-selector", "spec.nodeName="+u.node,
		"-o", "jsonpath={.items[*].status.containerStatuses[?(@.name==\"penstock\")]"+path+"}")
}

// TestOutOfMemory: the node agent's container, which has the mounts, runs out of memory,
// and the kernel kills agent and mounts. The kernel spares the supervisor, where the
// machine allows this, and the supervisor starts agent and mounts anew. The pod sees a
// pause.
func TestOutOfMemory(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), 4*patience)
	defer cancel()
	if err := the.Deploy(ctx, rig.Change{Memory: "512Mi"}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		if err := the.Deploy(ctx, rig.Change{}); err != nil {
			t.Error(err)
		}
	})
	u := uses(t, "node2")
	mount, agent, above := u.find(mountProcess), u.find(nodeAgent), u.find(supervisor)
	score, err := os.ReadFile(fmt.Sprintf("/proc/%d/oom_score_adj", above[0]))
	if err != nil {
		t.Fatal(err)
	}
	spared := strings.TrimSpace(string(score)) == "-1000"
	group, limit, err := rig.MemoryGroup(agent[0])
	if err != nil || limit != 512<<20 {
		t.Fatalf("the node agent may use %d bytes in %s: %v", limit, group, err)
	}
	if of, _, err := rig.MemoryGroup(mount[0]); err != nil || of != group {
		t.Fatalf("the mount's process counts in %s, the agent in %s: %v", of, group, err)
	}
	from := time.Now()
	full, err := the.Machine(u.node).Fill(ctx, group, 2*limit)
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := full(); err != nil {
			t.Error(err)
		}
	}()
	u.until(patience, "the kernel kills the agent", func(context.Context) error {
		if now := u.find(nodeAgent); len(now) > 0 && now[0] == agent[0] {
			return fmt.Errorf("it lives: %v", now)
		}
		return nil
	})
	if err := full(); err != nil {
		t.Fatal(err)
	}
	u.next(nodeAgent, agent)
	u.next(mountProcess, mount)
	u.passes("the node agent ran out of memory")
	to := time.Now()
	if now := u.find(supervisor); spared && !slices.Equal(now, above) {
		t.Errorf("the supervisor was process %v, and is %v", above, now)
	}
	if !spared {
		t.Log("the machine does not let the supervisor be spared (CAP_SYS_RESOURCE): the container has ended with it")
		u.until(patience, "Kubernetes says so", func(ctx context.Context) error {
			// If Kubernetes starts a container while the group is still full, the
			// container ends with StartError.
			out, err := u.agent(ctx, ".lastState.terminated.reason")
			if err == nil && out != "OOMKilled" && out != "StartError" {
				err = fmt.Errorf("it says %q", out)
			}
			return err
		})
	}
	all := u.ended()
	u.paused("out of memory", all, from, to)
}

// TestBackOff: the node agent's container ends so often that the kubelet waits before it
// starts the container again, longer than the session of a mount lives. No other client
// needs the pod's files, so the pod sees a long pause and no error.
func TestBackOff(t *testing.T) {
	u := uses(t, "node2")
	waited := false
	times := []time.Time{time.Now()}
	for range *ends {
		mount, agent := u.find(mountProcess), u.find(nodeAgent)
		u.kill(supervisor)
		u.until(10*time.Minute, "the kubelet starts the agent again", func(ctx context.Context) error {
			if out, err := u.agent(ctx, ".state.waiting.reason"); err == nil && out == "CrashLoopBackOff" {
				waited = true
			}
			if now := u.find(nodeAgent); len(now) != 1 || slices.Contains(agent, now[0]) {
				return fmt.Errorf("there are %v", now)
			}
			return nil
		})
		u.next(mountProcess, mount)
		u.passes("the agent was started again")
		times = append(times, time.Now())
	}
	all := u.ended()
	var most time.Duration
	for i := range *ends {
		u.paused(fmt.Sprintf("end %d of the agent", i+1), all, times[i], times[i+1])
		most = max(most, longest(all, times[i], times[i+1]))
	}
	// The session of a mount lives for 6 s.
	if !waited || most < 7*time.Second {
		t.Errorf("the kubelet waited: %t; the longest pause was %v, of no interest", waited, most)
	}
}
