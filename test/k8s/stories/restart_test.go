package stories

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"penstock.io/penstock/test/k8s/rig"
)

// victims are parts of the driver on a node, by what is in their command lines.
var victims = map[string]string{
	"the process of a mount": "*' mount --log-file=/var/lib/penstock-csi/'*",
	"the node agent":         "*' csi --node '*",
}

// TestDriverRestarts: in the middle of what a pod writes, reads, maps and has open,
// the process of its mount is killed, the node agent is, and the driver's pods are
// deleted, all of them. The pod sees pauses and no error. What pods have synced is
// there for those that come after, and claims are served as before.
func TestDriverRestarts(t *testing.T) {
	s := begin(t)
	s.apply(claim("data", "penstock", "ReadWriteMany", "8Gi"), pod("a", "node2", map[string]string{"/data": "data"}))
	s.ready("a")
	s.sh("a", "load files /data/many 200; echo kept > /data/f; sync -f /data/f; (user /data/used /stop; echo ended $?) </dev/null >/out 2>&1 & sleep 2; cat /out")
	for _, what := range []string{"the process of a mount", "the process of a mount", "the node agent"} {
		s.kills(what)
		s.passes("a", what+" was killed")
		time.Sleep(2 * time.Second)
	}
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	if err := the.Driver(ctx); err != nil {
		t.Fatal(err)
	}
	if _, err := the.Kubectl(ctx, "-n", rig.Namespace, "delete", "pods", "-l", "app.kubernetes.io/component!=hold", "--timeout=120s"); err != nil {
		t.Fatal(err)
	}
	s.passes("a", "the driver's pods were deleted")
	if err := the.Driver(ctx); err != nil {
		t.Fatal(err)
	}
	s.passes("a", "nothing more")
	s.sh("a", "touch /stop")
	s.until(patience, "the pod's program ends", func(context.Context) error {
		out := s.sh("a", "cat /out")
		if !strings.Contains(out, "ended ") {
			return fmt.Errorf("it goes on: %s", out)
		}
		t.Logf("in the pod:\n%s", out)
		if !strings.HasSuffix(out, "ended 0") || strings.Count(out, "a pause of") == 0 {
			t.Error("the pod saw an error, or no pause: nothing was killed")
		}
		return nil
	})
	s.kubectl("delete", "pod", "a", "--timeout=60s")
	s.apply(pod("b", "node2", map[string]string{"/data": "data"}), claim("new", "penstock", "ReadWriteMany", "64Mi"),
		pod("c", "node1", map[string]string{"/data": "data", "/new": "new"}))
	s.ready("b", "c")
	for _, p := range []string{"b", "c"} {
		s.want(p, "cat /data/f; load check /data/many 200", "kept\n200 files are right")
	}
	s.sh("c", "echo x > /new/x; sync -f /new/x")
}

// kills ends a part of the driver on node2 with SIGKILL.
func (s *story) kills(what string) {
	s.Helper()
	ctx, cancel := context.WithTimeout(s.Context(), patience)
	defer cancel()
	out, err := the.Machine("node2").Command(ctx, "sh", "-c", `
		for p in /proc/[0-9]*; do
			case "$(tr '\0' ' ' <$p/cmdline 2>/dev/null)" in
			'sh -c '*) ;;
			`+victims[what]+`) kill -KILL ${p#/proc/} && echo ${p#/proc/} ;;
			esac
		done`).CombinedOutput()
	if err != nil || len(strings.Fields(string(out))) == 0 {
		s.Fatalf("%s is not killed: %s %v", what, out, err)
	}
}

// passes waits until a pod can use its claim.
func (s *story) passes(pod, after string) {
	s.Helper()
	begun := time.Now()
	s.sh(pod, "echo x > /data/x; rm /data/x; cat /data/f > /dev/null")
	s.Logf("%s: the pod's next write, with the time that kubectl takes, was done after %v", after, time.Since(begun).Round(time.Millisecond))
}
