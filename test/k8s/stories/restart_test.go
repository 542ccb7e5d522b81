package stories

import (
	"context"
	"testing"

	"penstock.io/penstock/test/k8s/rig"
)

// TestDriverRestarts: the driver's pods are deleted, all of them. What pods have
// synced is there for pods that come after, those that used the volume can be
// deleted, and claims are served as before.
func TestDriverRestarts(t *testing.T) {
	s := begin(t)
	s.apply(claim("data", "penstock", "ReadWriteMany", "256Mi"), pod("a", "node2", map[string]string{"/data": "data"}))
	s.ready("a")
	s.sh("a", "load files /data/many 200; echo kept > /data/f; sync")
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	if _, err := the.Kubectl(ctx, "-n", rig.Namespace, "delete", "pods", "--all", "--timeout=120s"); err != nil {
		t.Fatal(err)
	}
	if err := the.Driver(ctx); err != nil {
		t.Fatal(err)
	}
	s.kubectl("delete", "pod", "a", "--timeout=60s")
	s.apply(pod("b", "node2", map[string]string{"/data": "data"}), claim("new", "penstock", "ReadWriteMany", "64Mi"),
		pod("c", "node1", map[string]string{"/data": "data", "/new": "new"}))
	s.ready("b", "c")
	for _, p := range []string{"b", "c"} {
		s.want(p, "cat /data/f; load check /data/many 200", "kept\n200 files are right")
	}
	s.sh("c", "echo x > /new/x; sync")
}
