package stories

import (
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"penstock.io/penstock/test/k8s/rates"
	"penstock.io/penstock/test/k8s/rig"
)

var (
	trainRounds  = flag.Int("train-rounds", 3, "rounds of TestTraining: each a pod that begins with nothing cached")
	trainSamples = flag.Int("train-samples", 50000, "images of TestTraining, a multiple of a thousand")
)

// trainAims are the aims for a claim, as shares of the speed of the node's own disk in
// samples per second, by form of the data and place.
var trainAims = map[string]float64{"shards/claim": 0.99, "shards/snapshot": 0.99, "files/snapshot": 0.99, "files/claim": 0.95}

const firstEpochAim = 0.90

// trained is a line of train.py's output.
type trained struct {
	rates.Part
	End     string
	Right   int
	Sum     uint64
	Weights string
	Done    bool
}

// TestTraining: a loop of PyTorch trains a network on images on the node's own disk, on a
// claim, and on a mounted snapshot of the claim's volume, by turns. The test compares the
// speeds, and demands equal networks.
func TestTraining(t *testing.T) {
	const node = "node1"
	s := begin(t)
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Hour)
	defer cancel()
	if err := the.LoadTorch(ctx, node); err != nil {
		t.Fatal(err)
	}
	script, err := os.ReadFile(the.File("test/k8s/train/train.py"))
	if err != nil {
		t.Fatal(err)
	}
	s.apply(claim("images", "penstock", "ReadWriteMany", "4Gi"), configMap("script", "train.py", string(script)),
		imagesPod("prepare", rig.Image, "[sleep, \"100000\"]", "local", "claim"))
	s.ready("prepare")
	for _, place := range []string{"local", "claim"} {
		began := time.Now()
		s.long(ctx, "exec", "prepare", "--", "load", "images", "/"+place, fmt.Sprint(*trainSamples))
		t.Logf("%d images, as files and in shards, were written to %s in %.1f s", *trainSamples, place, time.Since(began).Seconds())
	}
	s.kubectl("delete", "pod", "prepare")

	volume := s.volume("images")
	must := func(args ...string) {
		if _, err := the.Penstock(ctx, args...); err != nil {
			t.Fatal(err)
		}
	}
	must("snapshot", "create", volume, "v1")
	t.Cleanup(func() { // before the namespace and the volume are deleted
		s.kubectl("delete", "pod", "--all", "--timeout=120s")
		s.kubectl("delete", "pvc/v1", "pv/"+s.ns+"-v1", "--ignore-not-found", "--timeout=120s")
		s.until(patience, "the snapshot is deleted", func(ctx context.Context) error {
			_, err := the.Penstock(ctx, "snapshot", "delete", volume, "v1", "--yes")
			return err
		})
	})
	s.apply(snapshotClaim("v1", volume+"@v1"))

	var parts []rates.Part
	for round := range *trainRounds {
		for _, dir := range []string{filepath.Join(the.Dir, node, "lib", "images"), filepath.Join(the.Dir, node, "chunks")} {
			if err := evict(dir); err != nil {
				t.Fatal(err)
			}
		}
		parts = append(parts, s.train(ctx, round, node)...)
	}
	rows, err := rates.Compare(parts, "local")
	if err != nil {
		t.Fatal(err)
	}
	for _, r := range rows {
		aim := trainAims[r.Form+"/"+r.Place]
		if r.Epoch == 1 {
			aim = firstEpochAim
		}
		t.Logf("%v; aim %.2f", r, aim)
		if r.Below(aim) {
			t.Errorf("%s, epoch %d: %s has %.4f ± %.4f of the local speed, less than %.2f", r.Form, r.Epoch, r.Place, r.Ratio, r.Error, aim)
		}
	}
}

// train runs one round in a new pod, so that the node has nothing of the volumes cached.
func (s *story) train(ctx context.Context, round int, node string) (parts []rates.Part) {
	s.Helper()
	name := fmt.Sprint("train-", round)
	s.apply(imagesPod(name, rig.Torch, `[python3, -c, "import signal; signal.pause()"]`, "script", "local", "claim", "snapshot"))
	s.ready(name)
	began := time.Now()
	out := s.long(ctx, "exec", name, "--", "python3", "/script/train.py", "--place", "local=/local", "--place", "claim=/claim", "--place", "snapshot=/snapshot",
		fmt.Sprint("--samples=", *trainSamples), fmt.Sprint("--blocks=", gcd(*trainSamples/1000, 10)), fmt.Sprint("--seed=", round))
	took := time.Since(began)

	ends, done := map[string]trained{}, false
	spent := map[string]float64{} // by place
	for _, line := range strings.Split(strings.TrimSpace(out), "\n") {
		var l trained
		if err := json.Unmarshal([]byte(line), &l); err != nil {
			s.Fatalf("%s printed %q: %v", name, line, err)
		}
		l.Round = round
		switch {
		case l.Done:
			done = true
		case l.End != "":
			s.sameAs(ends, l)
		default:
			parts = append(parts, l.Part)
			spent[l.Place] += l.Seconds
		}
	}
	if !done {
		s.Fatalf("%s did not come to its end:\n%s", name, out)
	}
	s.waits(ctx, node, name, took, spent)
	s.kubectl("delete", "pod", name)
	return parts
}

// imagesPod returns the manifest of a pod on node1 with some of these volumes.
func imagesPod(name, image, command string, volumes ...string) string {
	sources := map[string]string{
		"script":   "configMap: {name: script}",
		"local":    "hostPath: {path: /var/lib/images, type: DirectoryOrCreate}",
		"claim":    "persistentVolumeClaim: {claimName: images}",
		"snapshot": "persistentVolumeClaim: {claimName: v1, readOnly: true}",
	}
	mounts, list := "", ""
	for _, v := range volumes {
		mounts += fmt.Sprintf("        - {name: %s, mountPath: /%[1]s}\n", v)
		list += fmt.Sprintf("    - {name: %s, %s}\n", v, sources[v])
	}
	return fmt.Sprintf(`apiVersion: v1
kind: Pod
metadata: {name: %s, namespace: NAMESPACE}
spec:
  terminationGracePeriodSeconds: 1
  nodeSelector: {kubernetes.io/hostname: node1}
  containers:
    - name: main
      image: %s
      command: %s
      volumeMounts:
%s  volumes:
%s`, name, image, command, mounts, list)
}

// waits prints how long READs of the pod's volumes waited, by the node's metrics.
func (s *story) waits(ctx context.Context, node, pod string, took time.Duration, spent map[string]float64) {
	s.Helper()
	told, err := the.Machine(node).Command(ctx, "busybox", "wget", "-q", "-O", "-", "http://127.0.0.1:9817/metrics").Output()
	if err != nil {
		s.Fatal(err)
	}
	volume := s.volume("images")
	for place, source := range map[string]string{"claim": volume, "snapshot": volume + "@v1"} {
		line := regexp.MustCompile(fmt.Sprintf(`(?m)^penstock_csi_pod_read_waiting_seconds_total\{handle="[^"]*",namespace=%q,pod=%q,volume=%q\} (.*)$`, s.ns, pod, source))
		value := ""
		if m := line.FindStringSubmatch(string(told)); m != nil {
			value = m[1]
		}
		waiting, err := strconv.ParseFloat(value, 64)
		if err != nil || waiting <= 0 || waiting > took.Seconds() {
			s.Errorf("of the %s the node tells %q, after %v: %v", place, value, took, err)
			continue
		}
		s.Logf("%s: READs of the %s waited for %.1f s (read-ahead is in it), of %.1f s in which its images were trained on: %.1f %%", pod, place, waiting, spent[place], 100*waiting/spent[place])
	}
}

// sameAs demands that all places had the same images, and gave the same network.
func (s *story) sameAs(ends map[string]trained, l trained) {
	s.Helper()
	key := fmt.Sprint(l.Form, l.Epoch)
	first, known := ends[key]
	if !known {
		ends[key] = l
		if l.Samples != *trainSamples {
			s.Errorf("%+v: not %d images", l, *trainSamples)
		}
		if l.Epoch == 2 && l.Samples >= 10000 && l.Right < l.Samples/2 {
			s.Errorf("%+v: the network learned nothing", l)
		}
		return
	}
	if first.Samples != l.Samples || first.Sum != l.Sum || first.Weights != l.Weights || first.Right != l.Right {
		s.Errorf("%s and %s differ: %+v, %+v", first.End, l.End, first, l)
	}
}

func gcd(a, b int) int {
	for b != 0 {
		a, b = b, a%b
	}
	return a
}

// long is kubectl for long work.
func (s *story) long(ctx context.Context, args ...string) string {
	s.Helper()
	out, err := the.Kubectl(ctx, append([]string{"-n", s.ns}, args...)...)
	if err != nil {
		s.Fatalf("%v\n%s", err, out)
	}
	return out
}

// evict has the kernel forget the pages of all files of a directory.
func evict(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	defer d.Close()
	if err := unix.Syncfs(int(d.Fd())); err != nil { // dirty pages would stay
		return err
	}
	return filepath.WalkDir(dir, func(path string, e os.DirEntry, err error) error {
		if err != nil || !e.Type().IsRegular() {
			return err
		}
		f, err := os.Open(path)
		if os.IsNotExist(err) {
			return nil // the chunk server removed the file
		}
		if err != nil {
			return err
		}
		defer f.Close()
		return unix.Fadvise(int(f.Fd()), 0, 0, unix.FADV_DONTNEED)
	})
}

// snapshotClaim returns the manifest of a claim for a volume, or for VOLUME@SNAPSHOT,
// that an administrator makes known to Kubernetes by its name.
func snapshotClaim(name, source string) string {
	return fmt.Sprintf(`apiVersion: v1
kind: PersistentVolume
metadata: {name: NAMESPACE-%[1]s}
spec:
  capacity: {storage: 1Gi}
  accessModes: [ReadOnlyMany]
  persistentVolumeReclaimPolicy: Retain
  storageClassName: ""
  claimRef: {namespace: NAMESPACE, name: %[1]s}
  csi: {driver: csi.penstock.io, volumeHandle: "name=%[2]s", readOnly: true}
---
apiVersion: v1
kind: PersistentVolumeClaim
metadata: {name: %[1]s, namespace: NAMESPACE}
spec:
  storageClassName: ""
  volumeName: NAMESPACE-%[1]s
  accessModes: [ReadOnlyMany]
  resources: {requests: {storage: 1Gi}}`, name, source)
}

// configMap returns the manifest of a ConfigMap with a single file.
func configMap(name, file, text string) string {
	return fmt.Sprintf("apiVersion: v1\nkind: ConfigMap\nmetadata: {name: %s, namespace: NAMESPACE}\ndata:\n  %s: |\n%s", name, file, "    "+strings.ReplaceAll(strings.TrimSpace(text), "\n", "\n    "))
}
