package stories

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"penstock.io/penstock/test/k8s/rig"
)

// noDriver removes everything of deploy/kubernetes except the namespace with its Secrets.
func (s *servers) noDriver() {
	s.Helper()
	const all = "deployment,daemonset,configmap,serviceaccount,role,rolebinding,networkpolicy,poddisruptionbudget," +
		"csidriver,clusterrole,clusterrolebinding,storageclass,volumesnapshotclass"
	s.kubectl("-n", rig.Namespace, "delete", all, "-l", "app.kubernetes.io/name=penstock", "--timeout=60s")
}

// TestChangeOver: a release whose nodes have grants made by hand (from before
// attachments) is changed over with the commands of docs/kubernetes.md, while a pod
// writes, reads, maps and has files open. The pod sees no error, not even when the
// kubelets are restarted and the grants made by hand are revoked; later pods get their
// volumes; and in the end no grant is left. The nodes' places follow their labels.
func TestChangeOver(t *testing.T) {
	s := &servers{story: begin(t)}
	ctx, cancel := context.WithTimeout(t.Context(), 10*patience)
	defer cancel()
	var err error
	if s.manual, err = the.NewManual(ctx); err != nil {
		t.Fatal(err)
	}
	s.noDriver()
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 4*patience)
		defer cancel()
		if out, err := s.manual.Run(ctx, "helm uninstall penstock --namespace "+rig.Namespace+" --wait"); err != nil {
			t.Errorf("%v: %s", err, out)
		}
		if err := the.Deploy(ctx, rig.Change{}); err != nil {
			t.Error(err)
		}
	})
	for _, n := range []struct{ node, rack string }{{"node1", "rack1"}, {"node2", "rack2"}} {
		s.kubectl("label", "node", n.node, "--overwrite", "topology.kubernetes.io/zone=dc1", "example.com/rack="+n.rack)
	}
	if _, err := the.Penstock(ctx, "grant", "add", "node*", "*", "--rights", "write"); err != nil {
		t.Fatal(err)
	}
	s.run(fmt.Sprintf(`helm install penstock deploy/helm/penstock --namespace %s --set 'cluster={%s}' \
    --set image.repository=registry.example.com/penstock --set image.tag=0.1.0 --set 'node.topologyLabels={topology.kubernetes.io/zone,example.com/rack}' --set grantNodes=false`, rig.Namespace, the.Meta()))
	if err := the.Driver(ctx); err != nil {
		t.Fatal(err)
	}

	u := &used{s.story, "user", "node2", "penstock"}
	u.uses()
	if out, err := the.Machine("node2").Command(ctx, "cat", "/var/lib/penstock-csi/topology").CombinedOutput(); err != nil || strings.TrimSpace(string(out)) != "/dc1/rack2/node2" {
		t.Errorf("by its labels node2 stands at %q, %v", out, err)
	}
	attached := func(ctx context.Context) error {
		out, err := the.Kubectl(ctx, "get", "volumeattachments", "-o", `jsonpath={range .items[?(@.status.attached)]}{.spec.nodeName} {.spec.source.persistentVolumeName}{"\n"}{end}`)
		if err == nil && !strings.Contains(out, "node2 "+s.get("pvc/data", ".spec.volumeName")) {
			err = fmt.Errorf("attached is %q", out)
		}
		return err
	}
	if err := attached(ctx); err == nil {
		t.Error("the volume is attached before the release is changed over")
	}
	if out, err := s.manual.Run(ctx, "helm upgrade penstock deploy/helm/penstock --namespace "+rig.Namespace+" --reset-then-reuse-values --set grantNodes=true"); err == nil || !strings.Contains(err.Error(), "Who grants nodes their volumes") {
		t.Errorf("what Kubernetes would refuse is not refused: %v: %s", err, out)
	}
	if _, err := s.manual.Run(ctx, "kubectl get csidriver csi.penstock.io -o jsonpath={.spec.attachRequired} | grep -x false"); err != nil {
		t.Error(err)
	}

	begun := time.Now()
	s.do("### Who grants nodes their volumes")
	s.apply(claim("late", "penstock", "ReadWriteMany", "64Mi"), pod("late", "node1", map[string]string{"/late": "late"}))
	s.ready("late")
	t.Logf("a pod that starts then has its volume %v after the change began", time.Since(begun).Round(100*time.Millisecond))
	if err := the.Driver(ctx); err != nil {
		t.Fatal(err)
	}
	s.sh("late", "echo x > /late/x; sync /late/x")
	s.until(3*patience, "what the running pod has is attached", attached)
	t.Logf("what the running pod has is attached %v after the change began", time.Since(begun).Round(time.Second))
	u.passes("the release was changed over")

	for _, node := range nodes {
		if err := the.RestartKubelet(node); err != nil {
			t.Fatal(err)
		}
	}
	s.until(patience, "node2's kubelet tells that the volume is in use", func(ctx context.Context) error {
		out, err := the.Kubectl(ctx, "get", "node", "node2", "-o", "jsonpath={.status.volumesInUse}")
		if err == nil && !strings.Contains(out, s.get("pv/"+s.get("pvc/data", ".spec.volumeName"), ".spec.csi.volumeHandle")) {
			err = fmt.Errorf("it tells %q", out)
		}
		return err
	})
	u.passes("the kubelets were restarted")
	if err := the.RevokeByHand(ctx, "client/node*"); err != nil {
		t.Fatal(err)
	}
	u.passes("what was granted by hand was revoked")
	if grants, err := the.Published(ctx); err != nil || len(grants) != 2 {
		t.Errorf("granted: %q, %v", grants, err)
	}
	s.kubectl("delete", "pod", "late", "--timeout=60s")
	s.kubectl("delete", "pvc", "late", "--timeout=60s")
	var most time.Duration
	for _, p := range u.ended() {
		most = max(most, p.took)
	}
	t.Logf("the longest pause was %v (0: under 50ms)", most)
	s.end()
}
