package stories

import (
	"fmt"
	"strings"
	"testing"
)

// TestRacks: a volume lands in the rack of its first pod and draws later pods there. A
// rack without room for a claim gets none of the claim's pods. Both nodes and their
// kubelets are real; rack2 has small disks.
func TestRacks(t *testing.T) {
	s := begin(t)
	for i, node := range nodes {
		rack := fmt.Sprintf("rack%d", i+1)
		if got := s.get("csinode/"+node, ".spec.drivers[?(@.name==\"csi.penstock.io\")].topologyKeys"); !strings.Contains(got, "topology.penstock.io/rack") {
			t.Errorf("%s has keys %s", node, got)
		}
		if got := s.get("node/"+node, ".metadata.labels.topology\\.penstock\\.io/rack"); got != rack {
			t.Errorf("%s stands in %q", node, got)
		}
		name := "of-" + rack
		s.apply(claim(name, "penstock-rack", "ReadWriteMany", "64Mi"), pod("first-"+rack, node, map[string]string{"/data": name}))
	}
	s.ready("first-rack1", "first-rack2")
	for _, rack := range []string{"rack1", "rack2"} {
		s.sh("first-"+rack, "echo "+rack+" > /data/f; sync /data/f")
		v, err := show(t.Context(), s.volume("of-"+rack))
		if err != nil || v.Topology != "/dc1/"+rack || v.Replicas != 2 {
			t.Errorf("the volume of the pod in %s: %+v, %v", rack, v, err)
		}
	}
	// Two more pods on each claim, without a wish for a node.
	for _, rack := range []string{"rack1", "rack2"} {
		for i := range 2 {
			name := fmt.Sprintf("later%d-%s", i, rack)
			s.apply(pod(name, "", map[string]string{"/data": "of-" + rack}))
			s.ready(name)
			if got := s.get("pod/"+name, ".spec.nodeName"); got != "node"+rack[4:] {
				t.Errorf("a pod of a volume in %s runs on %s", rack, got)
			}
			s.want(name, "cat /data/f", rack)
		}
	}
	// More than rack2's room: a pod that may choose goes to rack1, and a pod bound to
	// rack2 waits.
	s.apply(claim("pinned", "penstock-rack", "ReadWriteMany", "8Gi"), pod("pinned", "node2", map[string]string{"/data": "pinned"}))
	for i := range 3 {
		name := fmt.Sprintf("large%d", i)
		s.apply(claim(name, "penstock-rack", "ReadWriteMany", "8Gi"), pod(name, "", map[string]string{"/data": name}))
		s.ready(name)
		if got := s.get("pod/"+name, ".spec.nodeName"); got != "node1" {
			t.Errorf("a pod whose volume fits into rack1 only runs on %s", got)
		}
	}
	s.kubectl("wait", "--for=jsonpath={.status.conditions[?(@.type==\"PodScheduled\")].reason}=Unschedulable", "pod/pinned", "--timeout=30s")
	if got := s.get("pod/pinned", ".status.conditions[?(@.type==\"PodScheduled\")].message"); !strings.Contains(got, "did not have enough free storage") {
		t.Errorf("the pod waits since %q", got)
	}
}
