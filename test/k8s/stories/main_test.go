// Package stories has the daily work of Kubernetes users with Penstock, a test for each
// story. The stories share one rig; each has its own namespace, and leaves nothing
// behind.
package stories

import (
	"context"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"testing"
	"time"

	"penstock.io/penstock/test/k8s/rig"
)

var (
	the    *rig.Rig
	hold   = flag.Bool("hold", false, "after the tests keep everything up until an interrupt, to look around")
	attach = flag.String("attach", "", "directory of a rig that another process holds: run the stories there")
)

func TestMain(m *testing.M) {
	rig.Init()
	flag.Parse()
	if flag.Lookup("test.run").Value.String() == "" && flag.Lookup("test.skip").Value.String() == "" {
		// These stories have targets of their own (see the Makefile).
		if err := flag.Set("test.skip", "^(TestTraining|TestStorageSuite)$"); err != nil {
			panic(err)
		}
	}
	os.Exit(run(m))
}

func run(m *testing.M) int {
	stop, cancel := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer cancel()
	begin := time.Now()
	say := func(format string, args ...any) {
		fmt.Printf("%6.1f s  %s\n", time.Since(begin).Seconds(), fmt.Sprintf(format, args...))
	}
	var err error
	if *attach != "" {
		the, err = rig.Attach("../../..", *attach, say)
	} else {
		the, err = rig.Up("../../..", say)
	}
	if err != nil {
		fmt.Println("the rig did not come up:", err)
		return 1
	}
	done := make(chan int, 1)
	go func() { done <- m.Run() }()
	code := 1
	select {
	case code = <-done:
		if *hold && stop.Err() == nil {
			say("held; -attach %s works with it; %s", the.Dir, the.Enter("node1"))
			<-stop.Done()
		}
	case <-stop.Done():
		say("interrupted")
	}
	if code != 0 {
		the.Failed()
	}
	if text, err := the.Memory(); err == nil {
		say("memory of each part, MiB:\n%s", text)
	}
	if err := the.Down(); err != nil {
		say("what is left after the end: %v", err)
		return 1
	}
	say("taken down")
	return code
}

// story is the namespace of a test.
type story struct {
	*testing.T
	ns string
}

// begin makes a namespace named after the test. When the test ends, the namespace is
// deleted; if the test passed until then, the deletion must leave nothing.
func begin(t *testing.T) *story {
	t.Helper()
	s := &story{T: t, ns: strings.ToLower(strings.TrimPrefix(t.Name(), "Test"))}
	s.kubectl("create", "namespace", s.ns)
	s.until(30*time.Second, "the namespace has its account", func(ctx context.Context) error {
		_, err := the.Kubectl(ctx, "-n", s.ns, "get", "serviceaccount", "default")
		return err
	})
	t.Cleanup(func() {
		if t.Failed() {
			s.tell()
		}
		s.end()
	})
	return s
}

// tell prints Kubernetes' view of the story.
func (s *story) tell() {
	for _, args := range [][]string{
		{"get", "pods,pvc,volumesnapshot,volumegroupsnapshot", "-o", "wide"},
		{"get", "events", "--sort-by=.lastTimestamp", "-o", "custom-columns=W:.reason,O:.involvedObject.name,M:.message"},
	} {
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
		out, err := the.Kubectl(ctx, append([]string{"-n", s.ns}, args...)...)
		cancel()
		s.Logf("%v %v\n%s", args, err, out)
	}
	// The logs of the driver and its sidecars.
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	out, err := the.Kubectl(ctx, "-n", rig.Namespace, "logs", "-l", "app.kubernetes.io/name=penstock", "--all-containers", "--prefix", "--tail=30", "--max-log-requests=40")
	s.Logf("the driver's logs: %v\n%s", err, out)
}

// end deletes the namespace and demands that nothing is left: no volume in the cluster or
// in Kubernetes, no grant, nothing staged on a node.
func (s *story) end() {
	s.Helper()
	s.kubectl("delete", "namespace", s.ns, "--timeout=120s", "--ignore-not-found")
	s.until(patience, "nothing is left", func(ctx context.Context) error { return s.left(ctx) })
}

// left fails if something of the stories is left.
func (s *story) left(ctx context.Context) error {
	if out, err := the.Kubectl(ctx, "get", "pv,volumesnapshotcontents,volumegroupsnapshotcontents", "-o", "name"); err != nil || out != "" {
		return fmt.Errorf("left in Kubernetes: %s %w", out, err)
	}
	volumes, err := the.Volumes(ctx)
	if err != nil || len(volumes) > 0 {
		return fmt.Errorf("left in the cluster: %v %w", volumes, err)
	}
	if grants, err := the.Published(ctx); err != nil || len(grants) > 0 {
		return fmt.Errorf("nodes may still use: %q %w", grants, err)
	}
	return s.staged(ctx)
}

// staged fails if a node has a mount, or a volume known to the driver.
func (s *story) staged(ctx context.Context) error {
	for _, node := range nodes {
		m := the.Machine(node)
		b, err := m.Command(ctx, "sh", "-c", "grep -c 'fuse[a-z]*[.]penstock' /proc/mounts; ls /var/lib/penstock-csi/volumes /var/lib/penstock-csi/inline 2>/dev/null | grep -v '^/' | grep -c .").Output()
		if got := strings.Fields(string(b)); len(got) != 2 || got[0] != "0" || got[1] != "0" {
			return fmt.Errorf("mounts and staged volumes on %s: %q %w", node, b, err)
		}
	}
	return nil
}

var nodes = []string{"node1", "node2"}

// patience bounds, on a busy machine, work that takes seconds.
const patience = 2 * time.Minute

func (s *story) kubectl(args ...string) string {
	s.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience+30*time.Second)
	defer cancel()
	out, err := the.Kubectl(ctx, append([]string{"-n", s.ns}, args...)...)
	if err != nil {
		s.Fatal(err)
	}
	return out
}

// get returns a value of an object, by a path in the object.
func (s *story) get(object, path string) string {
	s.Helper()
	return s.kubectl("get", object, "-o", "jsonpath={"+path+"}")
}

func (s *story) apply(manifests ...string) {
	s.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	text := strings.ReplaceAll(strings.Join(manifests, "\n---\n"), "NAMESPACE", s.ns)
	if err := the.Apply(ctx, text); err != nil {
		s.Fatalf("%v\n%s", err, text)
	}
}

// sh runs a script in a pod and returns its output.
func (s *story) sh(pod, script string) string {
	s.Helper()
	return strings.TrimSpace(s.kubectl("exec", pod, "--", "sh", "-ec", script))
}

// want runs a script in a pod, which must print text.
func (s *story) want(pod, script, text string) {
	s.Helper()
	if got := s.sh(pod, script); got != text {
		s.Errorf("in %s: %s: %q, not %q", pod, script, got, text)
	}
}

func (s *story) ready(pods ...string) {
	s.Helper()
	for _, p := range pods {
		s.kubectl("wait", "--for=condition=Ready", "pod/"+p, fmt.Sprintf("--timeout=%v", patience))
	}
}

func (s *story) until(d time.Duration, what string, try func(context.Context) error) {
	s.Helper()
	if err := the.Until(d, what, try); err != nil {
		s.Fatal(err)
	}
}

// claim returns the manifest of a claim; more are further lines of its spec.
func claim(name, class, mode, size string, more ...string) string {
	return fmt.Sprintf(`apiVersion: v1
kind: PersistentVolumeClaim
metadata: {name: %s, namespace: NAMESPACE}
spec:
  storageClassName: %s
  accessModes: [%s]
  resources: {requests: {storage: %s}}
%s`, name, class, mode, size, indent(more))
}

// pod returns the manifest of a pod that sleeps, with claims at paths; more are further
// lines of its spec. The pod gets a second to end: without it the API server would forget
// the pod before its kubelet has unmounted anything.
func pod(name, node string, claims map[string]string, more ...string) string {
	mounts, volumes := "", ""
	for path, c := range claims {
		mounts += fmt.Sprintf("        - {name: %s, mountPath: %s}\n", c, path)
		volumes += fmt.Sprintf("    - {name: %s, persistentVolumeClaim: {claimName: %[1]s}}\n", c)
	}
	if node != "" {
		more = append(more, fmt.Sprintf("nodeSelector: {kubernetes.io/hostname: %s}", node))
	}
	return fmt.Sprintf(`apiVersion: v1
kind: Pod
metadata: {name: %s, namespace: NAMESPACE}
spec:
  terminationGracePeriodSeconds: 1
  containers:
    - name: main
      image: %s
      command: [sleep, "100000"]
      volumeMounts:
%s  volumes:
%s%s`, name, rig.Image, mounts, volumes, indent(more))
}

func indent(lines []string) string {
	text := strings.Join(lines, "\n")
	if text == "" {
		return ""
	}
	return "  " + strings.ReplaceAll(text, "\n", "\n  ") + "\n"
}
