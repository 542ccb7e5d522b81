package stories

import (
	"context"
	"testing"
	"time"

	"penstock.io/penstock/test/k8s/rig"
)

// quickly bounds steps 2 to 5 of docs/kubernetes.md: ten minutes, as the page's title
// says, less two for the image.
const quickly = 8 * time.Minute

// TestQuickStart follows steps 2 to 5 of docs/kubernetes.md by the page's commands, with
// a cluster to try out, in a Kubernetes without the driver, and prints the duration of
// each step. Step 1 makes the image, which the nodes of the rig have.
func TestQuickStart(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), 15*patience)
	defer cancel()
	s := follow(ctx, t)
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		if out, err := s.manual.Run(ctx, "kubectl delete -f deploy/kubernetes/examples/claim.yaml --ignore-not-found --timeout=100s"); err != nil {
			t.Errorf("%v: %s", err, out)
		}
	})
	s.noDriver()
	s.kubectl("-n", rig.Namespace, "delete", "secret", "penstock-controller-token", "penstock-node-token")
	s.kubectl(unplaced...)
	s.moved = true
	if err := exchange(ctx, "rig", "chart"); err != nil {
		t.Fatal(err)
	}
	s.disks()
	factor := s.slower()
	begun := time.Now()
	for _, x := range []struct {
		what, heading string
		paragraphs    []int
	}{
		{"2. etcd's certificates", "### Etcd's certificates", nil},
		{"2. the cluster", "### Install", nil},
		{"3. who is who", "## 3. Who is who", nil},
		{"4. the driver", "## 4. The driver", []int{1, 3}},
		{"5. a claim", "## 5. A claim", nil},
	} {
		from := time.Now()
		if x.what == "4. the driver" {
			s.helms = true
		}
		s.do(x.heading, x.paragraphs...)
		t.Logf("step %s: %.0f s", x.what, time.Since(from).Seconds())
	}
	took, slower := time.Since(begun), factor()
	t.Logf("steps 2 to 5 took %.0f s on a machine that is %.1f times as slow as a quiet one", took.Seconds(), slower)
	if bound := quickly/2 + time.Duration(slower*float64(quickly/2)); took > bound {
		t.Errorf("they took longer than %v", bound)
	}
}
