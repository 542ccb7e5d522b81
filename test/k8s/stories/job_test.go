package stories

import (
	"context"
	"encoding/json"
	"fmt"
	"regexp"
	"strings"
	"testing"
	"time"

	"penstock.io/penstock/test/k8s/rig"
)

// TestTrainingJob: an indexed Job of four pods on two nodes reads a data set twice, with
// checkpoints to a second claim; its pods are killed on the way. Each pod compares every
// byte, and goes on from its checkpoint.
func TestTrainingJob(t *testing.T) {
	const shards, workers, epochs = 16, 4, 2
	s := begin(t)
	s.apply(claim("data", "penstock", "ReadWriteMany", "1Gi"), claim("checkpoints", "penstock", "ReadWriteMany", "1Gi"),
		pod("prepare", "", map[string]string{"/data": "data", "/checkpoints": "checkpoints"}))
	s.ready("prepare")
	data := s.volume("data")
	s.sh("prepare", fmt.Sprintf("load data /data %d", shards))
	s.apply(fmt.Sprintf(`apiVersion: batch/v1
kind: Job
metadata: {name: train, namespace: NAMESPACE}
spec:
  completionMode: Indexed
  completions: %[1]d
  parallelism: %[1]d
  backoffLimit: 100
  podReplacementPolicy: TerminatingOrFailed
  template:
    metadata: {labels: {job: train}}
    spec:
      restartPolicy: Never
      terminationGracePeriodSeconds: 0
      topologySpreadConstraints:
        - {maxSkew: 1, topologyKey: kubernetes.io/hostname, whenUnsatisfiable: DoNotSchedule, labelSelector: {matchLabels: {job: train}}}
      containers:
        - name: main
          image: %[2]s
          command: [load, train, /data, /checkpoints, "%[3]d", "%[1]d", "%[4]d", 500ms]
          volumeMounts: [{name: data, mountPath: /data, readOnly: true}, {name: checkpoints, mountPath: /checkpoints}]
      volumes:
        - {name: data, persistentVolumeClaim: {claimName: data}}
        - {name: checkpoints, persistentVolumeClaim: {claimName: checkpoints}}`, workers, rig.Image, shards, epochs))
	s.until(patience, "all have a checkpoint", func(ctx context.Context) error {
		out, err := the.Kubectl(ctx, "-n", s.ns, "exec", "prepare", "--", "sh", "-ec", fmt.Sprintf("cd /checkpoints; for n in $(seq 0 %d); do test -s $n; done", workers-1))
		if err != nil {
			err = fmt.Errorf("%w: %s", err, out)
		}
		return err
	})
	s.until(patience, "the nodes tell how long each waits for its data", func(ctx context.Context) error {
		told := ""
		for _, node := range nodes {
			out, err := the.Machine(node).Command(ctx, "busybox", "wget", "-q", "-O", "-", "http://127.0.0.1:9817/metrics").Output()
			if err != nil {
				return fmt.Errorf("%s: %w", node, err)
			}
			told += string(out)
		}
		waits := regexp.MustCompile(`(?m)^penstock_csi_pod_read_waiting_seconds_total\{handle="[^"]*",namespace="`+s.ns+`",pod="(train-[^"]+)",volume="`+data+`"\} (.*)$`).FindAllStringSubmatch(told, -1)
		if len(waits) != workers {
			return fmt.Errorf("%d of %d tell", len(waits), workers)
		}
		for _, w := range waits {
			t.Logf("until now %s may have waited %s s", w[1], w[2])
		}
		return nil
	})
	// The pods read until the test lets them begin the second epoch, and are killed
	// before.
	s.kubectl("delete", "pods", "-l", "job=train", "--force", "--grace-period=0")
	s.sh("prepare", "touch /checkpoints/go")
	s.kubectl("wait", "--for=condition=Complete", "job/train", fmt.Sprintf("--timeout=%v", patience))

	told := strings.Split(strings.TrimSpace(s.kubectl("logs", "-l", "job=train", "--tail=1")), "\n")
	if len(told) != workers {
		t.Errorf("%d of %d workers ended: %q", len(told), workers, told)
	}
	for _, line := range told {
		var p struct {
			Step, Lives, Samples int
			Reading, Total       time.Duration
		}
		if err := json.Unmarshal([]byte(line), &p); err != nil {
			t.Fatalf("%q: %v", line, err)
		}
		// A step is 64 samples and 100 small files.
		const steps = epochs * shards / workers
		if p.Step != steps || p.Samples != steps*164 {
			t.Errorf("DATA: a worker says %+v", p)
		}
		if p.Lives < 2 {
			t.Errorf("a worker of %d lives did not go on from a checkpoint", p.Lives)
		}
		t.Logf("a worker of %d lives waited %v of %v for data", p.Lives, p.Reading, p.Total)
	}
}
