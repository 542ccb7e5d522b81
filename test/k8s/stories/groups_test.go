package stories

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"testing"

	"penstock.io/penstock/test/k8s/rig"
)

// TestGroupSnapshot: with snapshots of groups deployed, a VolumeGroupSnapshot of the
// claims with a label shows one moment of these claims. A pod writes each number to one
// claim, syncs the number, and only then writes it to the other claim, all the time. In
// claims made of the snapshots, the last numbers are equal, or the first claim is one
// ahead.
func TestGroupSnapshot(t *testing.T) {
	s := begin(t)
	deploy := func(groups bool) {
		ctx, cancel := context.WithTimeout(context.Background(), 2*patience)
		defer cancel()
		if err := the.Deploy(ctx, rig.Change{Groups: groups}); err != nil {
			s.Fatal(err)
		}
	}
	t.Cleanup(func() {
		defer s.kubectl("delete", "volumegroupsnapshotclass", "penstock", "--ignore-not-found")
		defer deploy(false)
		if t.Failed() {
			s.tell()
		}
		s.end() // while the controller that deletes groups runs
	})
	deploy(true)

	s.apply(claim("first", "penstock", "ReadWriteMany", "64Mi"), claim("second", "penstock", "ReadWriteMany", "64Mi"), claim("other", "penstock", "ReadWriteMany", "64Mi"),
		pod("w", "node1", map[string]string{"/first": "first", "/second": "second", "/other": "other"}))
	s.ready("w")
	s.kubectl("label", "pvc", "first", "second", "app=experiment")
	s.sh("w", `(n=0; while true; do n=$((n+1)); for c in first second; do echo $n >> /$c/log; sync /$c/log; done; done) >/dev/null 2>&1 &`)
	last := func(pod, claim string) int {
		n, err := strconv.Atoi(s.sh(pod, "tail -n 1 /"+claim+"/log"))
		if err != nil {
			s.Fatal(err)
		}
		return n
	}
	s.until(patience, "the pod writes", func(ctx context.Context) error {
		out, err := the.Kubectl(ctx, "-n", s.ns, "exec", "w", "--", "sh", "-ec", "test $(wc -l < /second/log) -gt 20")
		if err != nil {
			err = fmt.Errorf("%w: %s", err, out)
		}
		return err
	})

	s.kubectl("apply", "-f", the.File("deploy/kubernetes/examples/group-snapshot.yaml"))
	s.kubectl("wait", "--for=jsonpath={.status.readyToUse}=true", "volumegroupsnapshot/experiment-1", fmt.Sprintf("--timeout=%v", patience))
	members := s.members("experiment-1")
	if len(members) != 2 || members["first"] == "" || members["second"] == "" {
		t.Fatalf("the group's snapshots are %v", members)
	}
	for _, m := range members {
		s.kubectl("wait", "--for=jsonpath={.status.readyToUse}=true", "volumesnapshot/"+m, fmt.Sprintf("--timeout=%v", patience))
	}
	var claims []string
	for of, m := range members {
		claims = append(claims, claim(of+"-then", "penstock", "ReadWriteMany", "64Mi", from("VolumeSnapshot", m)))
	}
	s.apply(append(claims, pod("r", "node2", map[string]string{"/first": "first-then", "/second": "second-then"}))...)
	s.ready("r")
	first, second := last("r", "first"), last("r", "second")
	now := last("w", "second")
	t.Logf("the snapshots end with %d and %d, the claims were at %d later", first, second, now)
	if first != second && first != second+1 {
		t.Errorf("the first claim's snapshot ends with %d, the second's with %d: that is not one moment", first, second)
	}
	if now <= first {
		t.Errorf("the snapshots end with %d, the claim with %d: nothing was written meanwhile", first, now)
	}
	for _, c := range []string{"first", "second"} { // no number is left out
		s.want("r", "wc -l < /"+c+"/log", strconv.Itoa(map[string]int{"first": first, "second": second}[c]))
	}

	// The group is deleted, and claims made of it stay.
	s.kubectl("delete", "volumegroupsnapshot", "experiment-1", fmt.Sprintf("--timeout=%v", patience))
	s.until(patience, "the group and its snapshots are gone", func(ctx context.Context) error {
		out, err := the.Kubectl(ctx, "get", "volumegroupsnapshotcontents,volumesnapshotcontents,volumesnapshots", "-A", "-o", "name")
		if err == nil && out != "" {
			err = fmt.Errorf("left in Kubernetes: %s", out)
		}
		if err != nil {
			return err
		}
		out, err = the.Penstock(ctx, "snapshot", "group", "list", "--output", "json")
		if err == nil && strings.Contains(out, "csi-") {
			err = fmt.Errorf("left in the cluster: %s", out)
		}
		return err
	})
	if got := last("r", "first"); got != first {
		t.Errorf("without the group a claim made of it ends with %d, before with %d", got, first)
	}
}

// members returns the names of a group's snapshots by claim.
func (s *story) members(group string) map[string]string {
	s.Helper()
	var l struct {
		Items []struct {
			Metadata struct {
				Name            string
				OwnerReferences []struct{ Kind, Name string }
			}
			Spec struct {
				Source struct{ PersistentVolumeClaimName string }
			}
		}
	}
	if err := json.Unmarshal([]byte(s.kubectl("get", "volumesnapshots", "-o", "json")), &l); err != nil {
		s.Fatal(err)
	}
	all := map[string]string{}
	for _, i := range l.Items {
		if slices.ContainsFunc(i.Metadata.OwnerReferences, func(o struct{ Kind, Name string }) bool {
			return o.Kind == "VolumeGroupSnapshot" && o.Name == group
		}) {
			all[i.Spec.Source.PersistentVolumeClaimName] = i.Metadata.Name
		}
	}
	return all
}
