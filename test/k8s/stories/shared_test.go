package stories

import (
	"context"
	"fmt"
	"testing"
)

// TestShared: two pods on two nodes use one claim and see each other's files, a
// workstation sees the files at the claim's path, and later pods find them.
func TestShared(t *testing.T) {
	s := begin(t)
	s.apply(claim("data", "penstock", "ReadWriteMany", "1Gi"),
		pod("a", "node1", map[string]string{"/data": "data"}),
		pod("b", "node2", map[string]string{"/data": "data"}))
	s.ready("a", "b")
	s.sh("a", "echo from a > /data/f; mkdir /data/d; echo more > /data/d/g; sync /data/f")
	s.want("b", "cat /data/f /data/d/g", "from a\nmore")
	s.sh("b", "echo from b >> /data/f; mv /data/d/g /data/h")
	s.want("a", "cat /data/f; ls -R /data", "from a\nfrom b\n/data:\nd\nf\nh\n\n/data/d:")

	// Each read in one pod sees the last write of the other pod at once.
	s.want("a", "for i in $(seq 50); do echo $i > /data/n; done; cat /data/n", "50")
	s.want("b", "cat /data/n", "50")

	s.want("a", "df -Pk /data | awk 'NR==2 {print $2}'", "1048576")

	tree, err := the.MountTree(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	desk := the.Machine("desk")
	t.Cleanup(func() {
		if out, err := desk.Command(context.Background(), "umount", tree).CombinedOutput(); err != nil {
			t.Errorf("umount: %v: %s", err, out)
		}
	})
	at := fmt.Sprintf("%s/kubernetes/%s/data", tree, s.ns)
	b, err := desk.Command(t.Context(), "cat", at+"/f").CombinedOutput()
	if string(b) != "from a\nfrom b\n" {
		t.Errorf("the workstation reads %q, %v", b, err)
	}
	if b, err := desk.Command(t.Context(), "sh", "-c", "echo from the desk > "+at+"/desk").CombinedOutput(); err != nil {
		t.Errorf("the workstation writes: %v: %s", err, b)
	}
	s.want("b", "cat /data/desk", "from the desk")

	sum := s.sh("a", "dd if=/dev/urandom of=/data/big bs=1M count=64 2>/dev/null; sha256sum < /data/big")
	s.kubectl("delete", "pod", "a", "b", "--wait")
	s.apply(pod("c", "node2", map[string]string{"/data": "data"}))
	s.ready("c")
	s.want("c", "sha256sum < /data/big", sum)
	s.want("c", "cat /data/f", "from a\nfrom b")
}
