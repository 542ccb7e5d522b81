package stories

import (
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

var cloned = flag.Int("files", 5000, "files of the claim that is cloned")

// atOnce is a class whose volumes are made before a pod needs them.
const atOnce = `apiVersion: storage.k8s.io/v1
kind: StorageClass
metadata: {name: NAMESPACE-at-once}
provisioner: csi.penstock.io
volumeBindingMode: Immediate
allowVolumeExpansion: true
parameters: {replicas: "1"}`

// class makes a class for the story, and deletes it at the end.
func (s *story) class(manifest string) {
	s.Helper()
	s.apply(manifest)
	s.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
		defer cancel()
		if _, err := the.Kubectl(ctx, "delete", "storageclass", "-l", "!app.kubernetes.io/name"); err != nil {
			s.Error(err)
		}
	})
}

// bound waits until a claim is bound, and returns the duration.
func (s *story) bound(claim string) time.Duration {
	s.Helper()
	begin := time.Now()
	s.kubectl("wait", "--for=jsonpath={.status.phase}=Bound", "pvc/"+claim, fmt.Sprintf("--timeout=%v", patience))
	return time.Since(begin)
}

// volume is the name of a claim's volume in the cluster.
func (s *story) volume(claim string) string {
	s.Helper()
	return "csi-" + s.get("pvc/"+claim, ".spec.volumeName")
}

// shown is a volume in the output of `penstock volume show`.
type shown struct {
	Topology string
	Replicas int
	Data     struct {
		Placed  bool
		ToMove  int `json:"to_move"`
		Servers []struct{ Chunks int }
	}
}

func show(ctx context.Context, volume string) (v shown, err error) {
	out, err := the.Penstock(ctx, "volume", "show", volume, "--output", "json")
	if err == nil {
		err = json.Unmarshal([]byte(out), &v)
	}
	return v, err
}

// from is a line of a claim's spec.
func from(kind, name string) string {
	group := ""
	if kind == "VolumeSnapshot" {
		group = "apiGroup: snapshot.storage.k8s.io, "
	}
	return fmt.Sprintf("dataSource: {%skind: %s, name: %s}", group, kind, name)
}

func snapshot(name, claim string) string {
	return fmt.Sprintf(`apiVersion: snapshot.storage.k8s.io/v1
kind: VolumeSnapshot
metadata: {name: %s, namespace: NAMESPACE}
spec:
  volumeSnapshotClassName: penstock
  source: {persistentVolumeClaimName: %s}`, name, claim)
}

// TestCopies: pods of two nodes read a claim's snapshot, and no pod can write it. A clone
// of many files is made as quickly as a clone of none, and is independent.
func TestCopies(t *testing.T) {
	s := begin(t)
	class := s.ns + "-at-once"
	s.class(atOnce)
	s.apply(claim("data", class, "ReadWriteMany", "1Gi"), claim("empty", class, "ReadWriteMany", "1Gi"),
		pod("w", "node1", map[string]string{"/data": "data", "/empty": "empty"}))
	s.ready("w")
	s.sh("w", fmt.Sprintf("load files /data/many %d", *cloned))
	sum := s.sh("w", "dd if=/dev/urandom of=/data/big bs=1M count=16 2>/dev/null; echo first > /data/f; sync -f /data; sha256sum < /data/big")

	s.apply(snapshot("snap", "data"))
	s.kubectl("wait", "--for=jsonpath={.status.readyToUse}=true", "volumesnapshot/snap", "--timeout=60s")
	s.sh("w", "echo second > /data/f; rm /data/big")
	s.apply(claim("frozen", class, "ReadOnlyMany", "1Gi", from("VolumeSnapshot", "snap")),
		pod("r1", "node1", map[string]string{"/data": "frozen"}), pod("r2", "node2", map[string]string{"/data": "frozen"}))
	s.ready("r1", "r2")
	for _, p := range []string{"r1", "r2"} {
		s.want(p, "cat /data/f; sha256sum < /data/big", "first\n"+sum)
		s.want(p, "echo x 2>&1 > /data/f || true; touch /data/new 2>&1 || true", "sh: can't create /data/f: Read-only file system\ntouch: /data/new: Read-only file system")
		s.want(p, fmt.Sprintf("load check /data/many %d", *cloned), fmt.Sprintf("%d files are right", *cloned))
	}

	// Three clones of each kind, in turn; the quickest counts, because other work uses
	// the machine.
	least := map[string]time.Duration{}
	for i := range 3 {
		for _, origin := range []string{"empty", "data"} {
			name := fmt.Sprintf("clone-%s-%d", origin, i)
			s.apply(claim(name, class, "ReadWriteMany", "1Gi", from("PersistentVolumeClaim", origin)))
			if d := s.bound(name); least[origin] == 0 || d < least[origin] {
				least[origin] = d
			}
		}
	}
	t.Logf("a clone of %d files is bound after %v, one of none after %v", *cloned, least["data"], least["empty"])
	// Under a second, or on a busy machine not much more than the time of Kubernetes
	// itself.
	if least["data"] > max(time.Second, 2*least["empty"]) {
		t.Errorf("a clone of %d files takes %v, one of none %v", *cloned, least["data"], least["empty"])
	}
	s.apply(pod("c", "node2", map[string]string{"/data": "clone-data-0"}))
	s.ready("c")
	s.want("c", "cat /data/f; echo third > /data/f; rm -r /data/many; cat /data/f", "second\nthird")
	s.want("w", fmt.Sprintf("cat /data/f; load check /data/many %d", *cloned), fmt.Sprintf("second\n%d files are right", *cloned))
}

// summary is the part about volumes of a kubelet's statistics.
type summary struct {
	Pods []struct {
		PodRef struct{ Name, Namespace string }
		Volume []struct {
			PVCRef                                                       struct{ Name string }
			CapacityBytes, UsedBytes, AvailableBytes, Inodes, InodesUsed uint64
		}
	}
}

// TestGrow: a claim grows while a pod uses it, the kubelet reports its fill, and a
// VolumeAttributesClass gives the claim a second replica, of new and of existing data.
func TestGrow(t *testing.T) {
	s := begin(t)
	class := s.ns + "-at-once"
	s.class(atOnce)
	s.apply(claim("data", class, "ReadWriteMany", "64Mi"), pod("w", "node1", map[string]string{"/data": "data"}))
	s.ready("w")
	s.want("w", "dd if=/dev/zero of=/data/big bs=1M count=100 conv=fsync 2>&1 | grep -o 'Disk quota exceeded' || dd if=/dev/zero of=/data/big bs=1M count=100 conv=fsync", "Disk quota exceeded")
	s.sh("w", "rm /data/big; dd if=/dev/urandom of=/data/f bs=1M count=40 conv=fsync 2>/dev/null")
	s.kubectl("patch", "pvc", "data", "-p", `{"spec":{"resources":{"requests":{"storage":"256Mi"}}}}`)
	s.kubectl("wait", "--for=jsonpath={.status.capacity.storage}=256Mi", "pvc/data", "--timeout=120s")
	s.want("w", "df -Pk /data | awk 'NR==2 {print $2}'", "262144")
	s.sh("w", "dd if=/dev/zero of=/data/big bs=1M count=100 conv=fsync 2>/dev/null")

	s.until(time.Minute, "the kubelet tells how full the volume is", func(ctx context.Context) error {
		out, err := the.Kubectl(ctx, "get", "--raw", "/api/v1/nodes/node1/proxy/stats/summary")
		if err != nil {
			return err
		}
		var sum summary
		if err := json.Unmarshal([]byte(out), &sum); err != nil {
			return err
		}
		for _, p := range sum.Pods {
			for _, v := range p.Volume {
				if p.PodRef.Namespace == s.ns && v.PVCRef.Name == "data" && v.CapacityBytes == 256<<20 && v.UsedBytes >= 140<<20 && v.UsedBytes < 150<<20 && v.InodesUsed >= 2 {
					return nil
				}
			}
		}
		return fmt.Errorf("it tells %+v", sum)
	})

	volume := s.volume("data")
	copies := func(n int) func(context.Context) error {
		return func(ctx context.Context) error {
			v, err := show(ctx, volume)
			on := 0
			for _, server := range v.Data.Servers {
				if server.Chunks > 0 {
					on++
				}
			}
			if err == nil && (v.Replicas != n || on < n || !v.Data.Placed || v.Data.ToMove != 0) {
				err = fmt.Errorf("it is %+v", v)
			}
			return err
		}
	}
	s.until(patience, "it has one replica", copies(1))
	example := the.File("deploy/kubernetes/examples/attributes.yaml")
	s.kubectl("apply", "-f", example)
	t.Cleanup(func() { s.kubectl("delete", "-f", example, "--wait=false") }) // the object goes with its last claim
	s.kubectl("patch", "pvc", "data", "-p", `{"spec":{"volumeAttributesClassName":"penstock-two-replicas"}}`)
	s.kubectl("wait", "--for=jsonpath={.status.currentVolumeAttributesClassName}=penstock-two-replicas", "pvc/data", "--timeout=120s")
	s.until(patience, "it has two replicas", copies(2))
}

// TestExamples follows docs/kubernetes.md with the shipped examples, unchanged.
func TestExamples(t *testing.T) {
	s := begin(t)
	examples := func(name string) string { return the.File(filepath.Join("deploy/kubernetes/examples", name)) }
	s.kubectl("apply", "-f", examples("claim.yaml"))
	s.ready("writer")
	if got := s.sh("writer", "cat /results/log; id -u; ls -l /results/log | awk '{print $3, $4}'"); !strings.HasSuffix(got, "\n1000\n1000 1000") {
		t.Errorf("the pod prints %q", got)
	}
	s.kubectl("apply", "-f", examples("snapshot.yaml"))
	s.sh("writer", "echo later >> /results/log")
	s.apply(pod("again", "", map[string]string{"/results": "results-again"}))
	s.ready("again")
	if got := s.sh("again", "wc -l < /results/log"); got != "1" {
		t.Errorf("the snapshot has %s lines", got)
	}
	s.kubectl("delete", "pod", "writer", "--grace-period=1")
}
