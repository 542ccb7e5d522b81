package stories

import (
	"context"
	"fmt"
	"strings"
	"testing"

	"penstock.io/penstock/test/k8s/rig"
)

// TestInline: with inline volumes deployed, a pod brings a volume along, and the volume
// goes with the pod. This is the last of the stories.
func TestInline(t *testing.T) {
	s := begin(t)
	s.inline()
	s.apply(fmt.Sprintf(`apiVersion: v1
kind: Pod
metadata: {name: p, namespace: NAMESPACE}
spec:
  terminationGracePeriodSeconds: 1
  nodeSelector: {kubernetes.io/hostname: node2}
  containers:
    - name: main
      image: %s
      command: [sleep, "100000"]
      volumeMounts: [{name: scratch, mountPath: /scratch}]
  volumes:
    - name: scratch
      csi: {driver: csi.penstock.io, volumeAttributes: {size: 32Mi}}`, rig.Image))
	s.ready("p")
	s.want("p", "echo x > /scratch/x; cat /scratch/x; df -Pk /scratch | awk 'NR==2 {print $2}'", "x\n32768")
	if v, err := the.Volumes(t.Context()); err != nil || len(v) != 1 {
		t.Errorf("volumes: %v %v", v, err)
	}
	s.kubectl("delete", "pod", "p", "--timeout=60s")
	s.until(patience, "it is gone with its pod", s.left)
}

// inline lets pods bring volumes along until the test ends. Until then the nodes are
// administrators; afterwards they are clients again.
func (s *story) inline() {
	s.Helper()
	// The nodes join with another role. Their earlier credentials are kept for the way
	// back, since a name can be taken only once.
	deploy := func(role, before string, inline bool) error {
		ctx, cancel := context.WithTimeout(context.Background(), 2*patience)
		defer cancel()
		token, err := the.Penstock(ctx, "cluster", "join-token", "--role", role)
		if err != nil {
			return err
		}
		// The modes of a CSIDriver can't be changed, and a node that has joined keeps its
		// identity.
		for _, args := range [][]string{
			{"delete", "csidriver", "csi.penstock.io"},
			{"delete", "secret", "penstock-node-token"},
			{"create", "secret", "generic", "penstock-node-token", "--from-literal=token=" + strings.TrimSpace(token)},
			{"delete", "pods", "-l", "app.kubernetes.io/component=node", "--timeout=120s"},
		} {
			if args[0] == "delete" && args[1] == "pods" {
				for _, node := range nodes {
					script := fmt.Sprintf("cd /var/lib/penstock-csi; mv credentials credentials-%s; if test -d credentials-%s; then mv credentials-%[2]s credentials; fi", before, role)
					if out, err := the.Machine(node).Command(ctx, "sh", "-ec", script).CombinedOutput(); err != nil {
						return fmt.Errorf("%w: %s", err, out)
					}
				}
			}
			if _, err := the.Kubectl(ctx, append([]string{"-n", rig.Namespace}, args...)...); err != nil {
				return err
			}
		}
		return the.Deploy(ctx, rig.Change{Inline: inline})
	}
	if err := deploy("admin", "client", true); err != nil {
		s.Fatal(err)
	}
	s.Cleanup(func() {
		if err := deploy("client", "admin", false); err != nil {
			s.Error(err)
		}
		for _, node := range nodes {
			if _, err := the.Penstock(context.Background(), "cluster", "evict", "admin/"+node); err != nil {
				s.Error(err)
			}
		}
	})
}
