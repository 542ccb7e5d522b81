package stories

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"penstock.io/penstock/test/k8s/rig"
)

// servers is a Penstock cluster in Kubernetes, made by the chart as
// docs/kubernetes.md tells.
type servers struct {
	*story
	manual *rig.Manual
	moved  bool // the driver uses the story's cluster now
	helms  bool // and was installed by helm
}

// All objects of the release have this label.
const clusterLabel = "app.kubernetes.io/name=penstock-cluster"

// follow begins a story that follows docs/kubernetes.md. Its cluster is removed at the
// end.
func follow(ctx context.Context, t *testing.T) *servers {
	t.Helper()
	s := &servers{story: begin(t)}
	var err error
	if s.manual, err = the.NewManual(ctx); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.away)
	t.Cleanup(s.tellServers)
	return s
}

// do runs the commands of a chapter, or of some of its paragraphs, with the rig's image.
func (s *servers) do(heading string, paragraphs ...int) {
	s.Helper()
	blocks, err := s.manual.Blocks("docs/kubernetes.md", heading)
	if err != nil {
		s.Fatal(err)
	}
	ran := false
	for n, b := range blocks {
		if len(paragraphs) == 0 || slices.Contains(paragraphs, n) {
			s.run(b)
			ran = true
		}
	}
	if !ran {
		s.Fatalf("docs/kubernetes.md has nothing to do below %q", heading)
	}
}

// run runs commands in the shell that ran the documentation's commands.
func (s *servers) run(commands string) {
	s.Helper()
	commands = strings.NewReplacer("registry.example.com/penstock", "penstock", "image.tag=0.1.0", "image.tag=0.1.0-dev",
		"image.tag=0.2.0", "image.tag="+rig.NextTag, "'worker-*'", "'node*'").Replace(commands)
	ctx, cancel := context.WithTimeout(s.Context(), 10*time.Minute)
	defer cancel()
	begun := time.Now()
	out, err := s.manual.Run(ctx, commands)
	if err != nil {
		s.Fatal(err)
	}
	s.Logf("%.1f s: %s\n%s", time.Since(begun).Seconds(), commands, out)
}

// volumes is how many local volumes each node has for servers' claims, and where.
const (
	volumes      = 12
	localVolumes = "/var/lib/local-volumes"
)

// disks makes local volumes on the nodes; claims without a class get such a volume.
func (s *servers) disks() {
	s.Helper()
	text := []string{`apiVersion: storage.k8s.io/v1
kind: StorageClass
metadata: {name: local, annotations: {storageclass.kubernetes.io/is-default-class: "true"}}
provisioner: kubernetes.io/no-provisioner
volumeBindingMode: WaitForFirstConsumer`}
	for _, node := range nodes {
		for n := range volumes {
			at := fmt.Sprint(localVolumes, "/", n)
			if out, err := the.Machine(node).Command(s.Context(), "mkdir", "-p", at).CombinedOutput(); err != nil {
				s.Fatalf("%v: %s", err, out)
			}
			text = append(text, fmt.Sprintf(`apiVersion: v1
kind: PersistentVolume
metadata: {name: %s-%d, labels: {story: local}}
spec:
  capacity: {storage: 10Gi}
  accessModes: [ReadWriteOnce]
  persistentVolumeReclaimPolicy: Retain
  storageClassName: local
  local: {path: %s}
  nodeAffinity: {required: {nodeSelectorTerms: [{matchExpressions: [{key: kubernetes.io/hostname, operator: In, values: [%[1]s]}]}]}}`, node, n, at))
		}
	}
	s.apply(text...)
}

// point connects the driver to another cluster; "" is the rig's own. The nodes' earlier
// credentials are kept for the way back.
func (s *servers) point(ctx context.Context, cluster string, tokens func() error) error {
	if cluster == "" && !s.moved {
		return nil
	}
	s.moved = cluster != ""
	put, take := "rig", "chart"
	if !s.moved {
		put, take = take, put
	}
	kubectl := func(args ...string) error {
		_, err := the.Kubectl(ctx, append([]string{"-n", rig.Namespace}, args...)...)
		return err
	}
	if err := kubectl("delete", "secret", "penstock-controller-token", "penstock-node-token", "--ignore-not-found"); err != nil {
		return err
	}
	if err := tokens(); err != nil {
		return err
	}
	if err := exchange(ctx, put, take); err != nil {
		return err
	}
	// A pod reads the cluster's address when the pod starts.
	return errors.Join(
		the.Configure(ctx, rig.Change{Cluster: cluster}),
		kubectl("delete", "pods", "-l", "app.kubernetes.io/name=penstock,app.kubernetes.io/component in (node, controller)", "--timeout=120s"),
		the.Driver(ctx),
	)
}

// unplaced removes the places of the nodes. A kubelet refuses a new place for a node, and
// a driver without a configured place, as users have it, takes the place of a chunk
// server with the same kernel: here any chunk server, since all machines of the rig share
// a kernel.
var unplaced = []string{"label", "nodes", "--all", "topology.penstock.io/zone-", "topology.penstock.io/rack-", "topology.penstock.io/host-"}

// exchange keeps the nodes' credentials under one name, and restores the credentials of
// another name, if there are any.
func exchange(ctx context.Context, put, take string) error {
	for _, node := range nodes {
		script := fmt.Sprintf("cd /var/lib/penstock-csi; mv credentials credentials-%s; if test -d credentials-%s; then mv credentials-%[2]s credentials; fi", put, take)
		if out, err := the.Machine(node).Command(ctx, "sh", "-ec", script).CombinedOutput(); err != nil {
			return fmt.Errorf("%w: %s", err, out)
		}
	}
	return nil
}

// kill ends a server's process with SIGKILL, and deletes its pod.
func (s *servers) kill(pod string) {
	s.Helper()
	killed := 0
	for _, node := range nodes {
		pids, err := the.Find(node, func(line string) bool {
			return strings.Contains(line, "--name="+pod+" ") || strings.Contains(line, "--advertise="+pod+".")
		})
		if err != nil {
			s.Fatal(err)
		}
		for _, pid := range pids {
			if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
				s.Fatal(err)
			}
			killed++
		}
	}
	if killed == 0 {
		s.Fatalf("no process of %s is there to be killed", pod)
	}
	s.kubectl("-n", rig.Namespace, "delete", "pod", pod, "--timeout=120s")
	s.up(pod)
}

// up waits until a server's pod is ready.
func (s *servers) up(pod string) {
	s.Helper()
	s.until(2*patience, pod+" is ready", func(ctx context.Context) error {
		_, err := the.Kubectl(ctx, "-n", rig.Namespace, "wait", "--for=condition=Ready", "pod/"+pod, "--timeout=10s")
		return err
	})
}

// well waits until all chunks have their replicas.
func (s *servers) well() {
	s.Helper()
	s.until(2*patience, "all is well", func(ctx context.Context) error {
		out, err := the.Kubectl(ctx, "-n", rig.Namespace, "exec", "penstock-meta-1", "-c", "penstock", "--", "/penstock", "cluster", "status", "--check", "--for-upgrade")
		if err != nil {
			err = fmt.Errorf("%w: %s", err, out)
		}
		return err
	})
}

// TestCluster: the chart installs etcd, metadata servers and chunk servers, with the
// commands of docs/kubernetes.md, and the driver works with this cluster. While a pod
// writes, reads, maps and has files open on a claim, one server of each kind is killed, a
// chunk server loses its claims and is replaced, all servers are upgraded, and the first
// metadata server is removed: the pod sees no error. The release is uninstalled and
// installed again, and goes on with the data of its claims. In the end everything is
// removed, and the driver uses the rig's own cluster again.
func TestCluster(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), 15*patience)
	defer cancel()
	s := follow(ctx, t)
	s.disks()
	s.do("### Etcd's certificates")
	s.do("### Install")

	// Two nodes are two hosts.
	s.class(strings.ReplaceAll(atOnce, `replicas: "1"`, `replicas: "2"`))
	u := &used{s.story, "user", "node1", s.ns + "-at-once"}
	if err := s.point(ctx, "penstock-meta."+rig.Namespace+".svc:7400", func() error { s.do("## 3. Who is who"); return nil }); err != nil {
		t.Fatal(err)
	}
	u.uses()

	for _, pod := range []string{"penstock-meta-first-0", "penstock-etcd-1", "penstock-chunkserver-a-1"} {
		begun := time.Now()
		s.kill(pod)
		u.passes(pod + " was killed")
		s.well()
		t.Logf("%s was killed, and all is well after %v", pod, time.Since(begun).Round(time.Second))
	}

	s.do("### A node or a claim is lost", 0, 1)
	s.up("penstock-chunkserver-a-2")
	u.passes("a chunk server lost its claims")

	s.do("### Upgrade")
	s.versions(rig.NextTag)
	u.passes("all servers were upgraded")

	s.do("### A node or a claim is lost", 2)
	s.up("penstock-meta-2")
	s.run(`penstock() { kubectl -n $ns exec penstock-meta-2 -c penstock -- /penstock "$@"; }
penstock cluster evict meta/penstock-meta-first-0`)
	s.well()
	u.passes("the first metadata server was taken out")

	for _, p := range u.ended() {
		if p.took > time.Second {
			t.Logf("a pause of %v at %v", p.took, p.begun)
		}
	}
	s.do("### Take the cluster away, and put it back")
	s.apply(pod("again", "node2", map[string]string{"/data": "data"}))
	s.ready("again")
	s.want("again", "cat /data/f; load check /data/many 200", "kept\n200 files are right")
}

// tellServers prints the logs of the cluster's pods, if the story failed.
func (s *servers) tellServers() {
	if !s.Failed() {
		return
	}
	for _, args := range [][]string{
		{"get", "pods,pvc", "-o", "wide"}, {"get", "events", "--sort-by=.lastTimestamp"},
		{"get", "csistoragecapacities", "-o", "custom-columns=C:.storageClassName,N:.nodeTopology.matchLabels,S:.capacity,G:.metadata.generation,M:.metadata.managedFields[*].time"},
		{"logs", "-l", "app.kubernetes.io/name=penstock", "--all-containers", "--prefix", "--tail=60", "--max-log-requests=40"},
	} {
		out, _ := the.Kubectl(context.Background(), append([]string{"-n", rig.Namespace}, args...)...)
		s.Log(out)
	}
	out, _ := the.Kubectl(context.Background(), "-n", rig.Namespace, "logs", "-l", clusterLabel, "--all-containers", "--prefix", "--tail=20", "--max-log-requests=40")
	s.Log(out)
}

// versions fails unless the pods of all servers have the image with this tag.
func (s *servers) versions(tag string) {
	s.Helper()
	out := s.kubectl("-n", rig.Namespace, "get", "pods", "-l", clusterLabel+",app.kubernetes.io/component in (meta, chunkserver)",
		"-o", `jsonpath={range .items[*]}{.metadata.name} {.spec.containers[0].image}{"\n"}{end}`)
	for line := range strings.Lines(out) {
		if !strings.HasSuffix(strings.TrimSpace(line), ":"+tag) {
			s.Errorf("not of version %s: %s", tag, line)
		}
	}
}

// away removes the story's pods and claims, the cluster and its data, and connects the
// driver to the rig's cluster again.
func (s *servers) away() {
	ctx, cancel := context.WithTimeout(context.Background(), 4*patience)
	defer cancel()
	try := func(args ...string) {
		if out, err := the.Kubectl(ctx, args...); err != nil {
			s.Errorf("%v: %s", err, out)
		}
	}
	try("-n", s.ns, "delete", "pods", "--all", "--timeout=120s")
	try("-n", s.ns, "delete", "pvc", "--all", "--timeout=120s")
	// The driver can delete the volumes only while it uses their cluster.
	if err := the.Until(patience, "the volumes are deleted", func(ctx context.Context) error {
		out, err := the.Kubectl(ctx, "get", "pv", "-o", `jsonpath={range .items[?(@.spec.csi)]}{.metadata.name} {end}`)
		if err == nil && out != "" {
			err = errors.New(out)
		}
		return err
	}); err != nil {
		s.Error(err)
	}
	if s.helms {
		if _, err := s.manual.Run(ctx, "helm uninstall penstock --namespace "+rig.Namespace+" --wait"); err != nil {
			s.Error(err)
		}
		try(unplaced...)
	}
	if err := s.point(ctx, "", func() error { return the.Tokens(ctx) }); err != nil {
		s.Error(err)
	}
	if _, err := s.manual.Run(ctx, "helm uninstall penstock-cluster --namespace $ns --wait"); err != nil {
		s.Error(err)
	}
	try("-n", rig.Namespace, "delete", "pvc", "-l", clusterLabel, "--timeout=60s")
	try("-n", rig.Namespace, "delete", "secret", "penstock-etcd-tls", "penstock-etcd-client", "penstock-meta-token", "penstock-chunkserver-token", "--ignore-not-found")
	try("delete", "pv", "-l", "story=local", "--timeout=60s")
	try("delete", "storageclass", "local", "--ignore-not-found")
	for _, node := range nodes {
		// The credentials' cluster no longer exists.
		if out, err := the.Machine(node).Command(ctx, "rm", "-rf", localVolumes, "/var/lib/penstock-csi/credentials-chart").CombinedOutput(); err != nil {
			s.Errorf("%v: %s", err, out)
		}
	}
}
