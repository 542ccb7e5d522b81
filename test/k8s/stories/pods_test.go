package stories

import (
	"fmt"
	"testing"

	"penstock.io/penstock/test/k8s/rig"
)

// restricted is a pod as careful platforms demand it: no root, no capabilities, a
// read-only root; the pod's group owns the files that it writes.
const restricted = `apiVersion: v1
kind: Pod
metadata: {name: %s, namespace: NAMESPACE, labels: {app: careful}}
spec:
  terminationGracePeriodSeconds: 1
  nodeSelector: {kubernetes.io/hostname: %s}
  securityContext: {runAsNonRoot: true, runAsUser: %d, runAsGroup: 3000, fsGroup: 2000, seccompProfile: {type: RuntimeDefault}}
  containers:
    - name: main
      image: %s
      command: [sleep, "100000"]
      securityContext: {allowPrivilegeEscalation: false, readOnlyRootFilesystem: true, capabilities: {drop: [ALL]}}
      volumeMounts:
        - {name: data, mountPath: /data}
        - {name: data, mountPath: /part, subPath: a/b}
        - {name: data, mountPath: /file, subPath: only}
        - {name: data, mountPath: /named, subPathExpr: pods/$(NAME)}
        - {name: about, mountPath: /about}
        - {name: scratch, mountPath: /scratch}
      env:
        - {name: NAME, valueFrom: {fieldRef: {fieldPath: metadata.name}}}
  volumes:
    - name: data
      persistentVolumeClaim: {claimName: data}
    - name: about
      projected:
        sources:
          - configMap: {name: settings}
          - downwardAPI: {items: [{path: labels, fieldRef: {fieldPath: metadata.labels}}]}
          - serviceAccountToken: {path: token}
    - name: scratch
      ephemeral:
        volumeClaimTemplate:
          spec:
            storageClassName: penstock
            accessModes: [ReadWriteOnce]
            resources: {requests: {storage: 32Mi}}`

// TestPods: users other than root, groups, read-only roots, parts of a volume, projected
// volumes beside the volume, a volume that lives as long as its pod.
func TestPods(t *testing.T) {
	s := begin(t)
	s.kubectl("create", "configmap", "settings", "--from-literal=rate=0.1")
	s.apply(claim("data", "penstock", "ReadWriteMany", "256Mi"), pod("first", "node1", map[string]string{"/data": "data"}))
	s.ready("first")
	s.sh("first", "echo one > /data/only; chmod 664 /data/only; chgrp 2000 /data/only; ln -s /etc /data/out")
	s.kubectl("delete", "pod", "first")

	s.apply(fmt.Sprintf(restricted, "a", "node1", 1000, rig.Image), fmt.Sprintf(restricted, "b", "node2", 1001, rig.Image))
	s.ready("a", "b")
	s.want("a", "id -u; id -g; id -G", "1000\n3000\n3000 2000")
	s.want("a", "stat -c '%g %A' /data", "2000 drwxrwsr-x")
	s.want("a", "echo hello > /data/f; mkdir /data/d; stat -c '%u %g' /data/f /data/d", "1000 2000\n1000 2000")
	// The other user is of the same group.
	s.want("b", "cat /data/f; echo again > /data/g; stat -c '%u %g' /data/g", "hello\n1001 2000")
	s.want("a", "echo x 2>/dev/null > /x || echo the root is read-only", "the root is read-only")
	s.want("a", "echo part > /part/p; cat /data/a/b/p; cat /file; echo two >> /file; cat /data/only", "part\none\none\ntwo")
	s.want("b", "cat /part/p; cat /file; ls /data/pods; echo mine > /named/x; cat /data/pods/b/x", "part\none\ntwo\na\nb\nmine")
	// Kubernetes adds further labels, such as the node's zone.
	s.want("a", "cat /about/rate; echo; grep ^app= /about/labels; test -s /about/token && echo token", "0.1\napp=\"careful\"\ntoken")
	s.want("a", "echo x > /scratch/x; df -Pk /scratch | awk 'NR==2 {print $2}'", "32768")
	s.want("b", "ls /scratch", "")
	s.kubectl("delete", "pod", "a", "b")

	// A part of a volume (subPath) can't be a way out of the volume.
	s.apply(`apiVersion: v1
kind: Pod
metadata: {name: thief, namespace: NAMESPACE}
spec:
  terminationGracePeriodSeconds: 1
  restartPolicy: Never
  containers:
    - name: main
      image: ` + rig.Image + `
      command: [cat, /etc-of-the-node/hostname]
      volumeMounts: [{name: data, mountPath: /etc-of-the-node, subPath: out}]
  volumes: [{name: data, persistentVolumeClaim: {claimName: data}}]`)
	s.kubectl("wait", "--for=jsonpath={.status.containerStatuses[0].state.waiting.reason}=CreateContainerConfigError", "pod/thief", "--timeout=60s")
}
