package stories

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"
)

// TestNamespaceGoes: a node may use the volumes of its pods and no others. The deletion
// of a namespace with writing pods, a snapshot, a clone of the snapshot and a volume
// bound to a rack leaves nothing behind, not even a grant.
func TestNamespaceGoes(t *testing.T) {
	s := begin(t)
	s.apply(claim("data", "penstock", "ReadWriteMany", "256Mi"), claim("rack", "penstock-rack", "ReadWriteMany", "64Mi"),
		pod("a", "node1", map[string]string{"/data": "data", "/rack": "rack"}), pod("b", "node2", map[string]string{"/data": "data"}))
	s.ready("a", "b")
	s.sh("a", "load files /data/many 300; echo x > /rack/x")
	s.apply(snapshot("snap", "data"), claim("clone", "penstock", "ReadWriteMany", "256Mi", from("VolumeSnapshot", "snap")),
		pod("c", "node2", map[string]string{"/data": "clone"}))
	s.ready("c")
	s.want("c", "load check /data/many 300", "300 files are right")
	volumes, err := the.Volumes(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	number := func(claim string) (n int) {
		for _, v := range volumes {
			if v.Name == "csi-"+s.get("pvc/"+claim, ".spec.volumeName") {
				n = v.ID
			}
		}
		return n
	}
	data, rack, clone := number("data"), number("rack"), number("clone")
	want := []string{fmt.Sprint("node1 ", data), fmt.Sprint("node1 ", rack), fmt.Sprint("node2 ", data), fmt.Sprint("node2 ", clone)}
	got, err := the.Published(t.Context())
	slices.Sort(got)
	slices.Sort(want)
	if err != nil || !slices.Equal(got, want) {
		t.Errorf("granted: %q, %v; want %q", got, err, want)
	}
	// With all credentials on it, node2 can't open a volume that only node1's pods have.
	out, err := the.PenstockOn(t.Context(), "node2", "mount", "--background", "--cluster", the.Meta(), "--credentials", "/var/lib/penstock-csi/credentials",
		"csi-"+s.get("pvc/rack", ".spec.volumeName")+":/", "/mnt")
	if err == nil || !strings.Contains(err.Error(), "permission denied") {
		t.Errorf("node2 mounts node1's volume: %s, %v", out, err)
	}
	for _, p := range []string{"a", "b", "c"} {
		s.sh(p, "(while true; do dd if=/dev/zero of=/data/busy-$HOSTNAME bs=256k count=4 conv=fsync; done) >/dev/null 2>&1 &")
	}
	s.kubectl("delete", "pod", "c", "--timeout=60s")
	s.until(patience, "the grant goes with the pod", func(ctx context.Context) error {
		got, err := the.Published(ctx)
		if err == nil && slices.Contains(got, fmt.Sprint("node2 ", clone)) {
			err = fmt.Errorf("granted: %q", got)
		}
		return err
	})
	s.end()
}

// TestDeadCluster: no server answers any more. Writing pods hang, but can be deleted, and
// leave nothing in the kernel. When the cluster is back, the remains are cleared away,
// and new pods find the synced bytes.
func TestDeadCluster(t *testing.T) {
	s := begin(t)
	s.apply(claim("data", "penstock", "ReadWriteMany", "256Mi"),
		pod("w", "node2", map[string]string{"/data": "data"}), pod("r", "node1", map[string]string{"/data": "data"}))
	s.ready("w", "r")
	s.sh("w", "echo kept > /data/f; sync /data/f")
	s.sh("w", "(while true; do dd if=/dev/zero of=/data/busy bs=256k count=4 conv=fsync; done) >/dev/null 2>&1 &")
	s.sh("r", "(while true; do ls -l /data; cat /data/f; sleep 0.1; done) >/dev/null 2>&1 &")

	servers := [][2]string{{"node1", "meta"}, {"node1", "chunkserver"}, {"node2", "chunkserver"}, {"store1", "chunkserver"}, {"store2", "chunkserver"}}
	signal := func(sig syscall.Signal) {
		t.Helper()
		for _, p := range servers {
			if err := the.Machine(p[0]).Signal(p[1], sig); err != nil {
				t.Error(err)
			}
		}
	}
	// These bytes are written while all servers stand still, and are accepted all the
	// same: the file is open, no other mount has looked at it, so the writer keeps its
	// lease, and bytes in place of other bytes need no quota.
	s.sh("w", "mkdir /data/own; head -c 3000000 /dev/zero > /data/own/unsynced; sync /data/own/unsynced; yes unsynced | head -c 3000000 > /tmp/bytes")
	s.sh("w", `sh -c 'exec 3<>/data/own/unsynced; echo $$ >/tmp/writer; sleep 3; dd if=/tmp/bytes bs=1M >&3' >/dev/null 2>&1 &
until [ -s /tmp/writer ]; do sleep 0.1; done`)
	signal(syscall.SIGSTOP)
	back := false
	defer func() {
		if !back {
			signal(syscall.SIGCONT)
		}
	}()
	time.Sleep(5 * time.Second) // until all pods hang in a call
	// The writer's close hangs, since close makes the bytes durable; the file's position
	// shows that the write is over.
	s.sh("w", "until grep -q '^pos:.*3000000$' /proc/$(cat /tmp/writer)/fdinfo/3; do sleep 0.1; done")
	begin := time.Now()
	s.kubectl("delete", "pod", "w", "r", "--timeout=120s")
	t.Logf("with a cluster that does not answer, pods are deleted after %v", time.Since(begin))
	for _, node := range nodes {
		s.until(time.Minute, "nobody is stuck in the kernel of "+node, func(ctx context.Context) error {
			out, err := the.Machine(node).Command(ctx, "sh", "-c", `cat /proc/[0-9]*/task/[0-9]*/stat 2>/dev/null | grep ') D ' | cut -c1-60; true`).Output()
			if err == nil && len(out) > 0 {
				err = fmt.Errorf("%s", out)
			}
			return err
		})
	}
	signal(syscall.SIGCONT)
	back = true
	// A kubelet looks at a staged mount before it unstages the mount, and waits there for
	// the cluster (docs/parts/csi.md, Limits). Each call may take two minutes.
	begin = time.Now()
	s.until(2*patience, "nothing is staged", func(ctx context.Context) error { return s.staged(ctx) })
	t.Logf("and nothing of theirs is staged %v after the cluster is back", time.Since(begin))
	s.apply(pod("late", "node2", map[string]string{"/data": "data"}))
	s.ready("late")
	s.want("late", "cat /data/f", "kept")
	s.want("late", "yes unsynced | head -c 3000000 | cmp - /data/own/unsynced && echo same", "same")
}
