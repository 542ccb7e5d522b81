package csi

import (
	"bytes"
	"fmt"
	"net"
	"os"
	"os/exec"
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/moby/sys/mountinfo"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	registration "k8s.io/kubelet/pkg/apis/pluginregistration/v1"

	"penstock.io/penstock/test/program"
)

// freePort is a port of loopback that nobody has now.
func freePort(t *testing.T) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	return l.Addr().String()
}

// TestNodeHasItsGrantsOnly: in a cluster with certificates the controller is an
// administrator and a node a client, which mounts what it was granted, and nothing
// else.
func TestNodeHasItsGrantsOnly(t *testing.T) {
	r := emptyRig(t)
	r.secure = freePort(t)
	run := func(stdin string, args ...string) string {
		t.Helper()
		cmd := exec.Command(program.Path, args...)
		cmd.Stdin = strings.NewReader(stdin)
		var errs bytes.Buffer
		cmd.Stderr = &errs
		out, err := cmd.Output()
		if err != nil {
			t.Fatalf("%v: %v: %s", args, err, &errs)
		}
		return string(out)
	}
	run("", "cluster", "init", "--dir", r.path("m"), "--credentials", r.path("cred"))
	r.start(nil, "meta", "--dir", r.path("m"), "--listen", r.secure, "--credentials", r.path("cred", "meta"))
	r.until("the metadata server answers", func() error { _, err := r.ctl("volume", "list"); return err })
	for role, name := range map[string]string{"chunkserver": "c1", "client": "node1"} {
		token, err := r.ctl("cluster", "join-token", "--role", role)
		if err != nil {
			t.Fatal(err)
		}
		run(string(token), "cluster", "join", "--cluster", r.secure, "--name", name, "--credentials", r.path("cred", name))
	}
	r.start(nil, "chunkserver", "--data", r.path("c"), "--cluster", r.secure, "--listen", freePort(t), "--credentials", r.path("cred", "c1"), "--topology", "/dc1/rack1/node1")
	r.hasChunkServer()

	r.start(nil, "csi", "--controller", "--endpoint", "unix://"+r.socket(), "--cluster", r.secure, "--credentials", r.path("cred", "admin"), "--log-level", "debug")
	r.answers(r.conn)
	r.start(nil, "csi", "--node", "--node-name", "node1", "--state-dir", r.path("state"), "--endpoint", "unix://"+r.path("node.sock"), "--registration-dir", r.path(), "--cluster", r.secure, "--credentials", r.path("cred", "node1"), "--log-level", "debug")
	conn := r.dial(r.path("node.sock"))
	r.answers(conn)
	kubelet := registration.NewRegistrationClient(r.dial(r.path("csi.penstock.io-reg.sock")))
	if info, err := kubelet.GetInfo(t.Context(), &registration.InfoRequest{}, grpc.WaitForReady(true)); err != nil || info.GetEndpoint() != r.path("node.sock") {
		t.Errorf("the kubelet is told: %v, %v", info, err)
	}
	node := csi.NewNodeClient(conn)
	if got := must(t, node.NodeGetInfo, &csi.NodeGetInfoRequest{}).GetAccessibleTopology().GetSegments()["topology.penstock.io/rack"]; got != "rack1" {
		t.Errorf("the node stands in rack %q", got)
	}

	id := must(t, r.controller().CreateVolume, claim("pvc-1", nil)).GetVolume().GetVolumeId()
	other := must(t, r.controller().CreateVolume, claim("pvc-2", nil)).GetVolume().GetVolumeId()
	stage := func(id, at string) *csi.NodeStageVolumeRequest {
		return &csi.NodeStageVolumeRequest{VolumeId: id, StagingTargetPath: r.path(at), VolumeCapability: capability(manyWriters)}
	}
	refused := func(id string) {
		t.Helper()
		_, err := node.NodeStageVolume(t.Context(), stage(id, "refused"))
		if c := status.Code(err); c != codes.PermissionDenied && c != codes.NotFound {
			t.Errorf("staged without a grant: %v", err)
		}
	}
	refused(id)
	if _, err := r.ctl("grant", "add", "node1", "csi-pvc-1", "--rights", "write"); err != nil {
		t.Fatal(err)
	}
	r.until("the grant is known", func() error { _, err := node.NodeStageVolume(t.Context(), stage(id, "s")); return err })
	refused(other)
	if _, err := node.NodePublishVolume(t.Context(), publish(id, r.path("s"), r.path("pod"))); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(r.path("pod", "f"), []byte("x"), 0o644); err != nil {
		t.Error(err)
	}
	// A claim of a snapshot is mounted as what the node was granted: the snapshot, or
	// where it was not granted the origin, the claim's own volume.
	for i, c := range []struct{ of, want string }{{id, "csi-pvc-1@csi-s0:"}, {other, "csi-frozen1:"}} {
		x := must(t, r.controller().CreateSnapshot, &csi.CreateSnapshotRequest{Name: fmt.Sprint("s", i), SourceVolumeId: c.of}).GetSnapshot().GetSnapshotId()
		q := claim(fmt.Sprint("frozen", i), nil)
		q.VolumeContentSource, q.VolumeCapabilities = fromSnapshot(x), []*csi.VolumeCapability{capability(manyReaders)}
		v := must(t, r.controller().CreateVolume, q).GetVolume().GetVolumeId()
		if _, err := r.ctl("grant", "add", "node1", "csi-"+q.GetName(), "--rights", "read"); err != nil {
			t.Fatal(err)
		}
		at := stage(v, fmt.Sprint("view", i))
		at.VolumeCapability = capability(manyReaders)
		must(t, node.NodeStageVolume, at)
		if m, err := mountinfo.GetMounts(mountinfo.SingleEntryFilter(at.GetStagingTargetPath())); err != nil || len(m) != 1 || m[0].Source != c.want {
			t.Errorf("%v, %v; want %s", m, err, c.want)
		}
		must(t, node.NodeUnstageVolume, &csi.NodeUnstageVolumeRequest{VolumeId: v, StagingTargetPath: at.GetStagingTargetPath()})
		must(t, r.controller().DeleteVolume, &csi.DeleteVolumeRequest{VolumeId: v})
		must(t, r.controller().DeleteSnapshot, &csi.DeleteSnapshotRequest{SnapshotId: x})
	}
	must(t, node.NodeUnpublishVolume, &csi.NodeUnpublishVolumeRequest{VolumeId: id, TargetPath: r.path("pod")})
	must(t, node.NodeUnstageVolume, &csi.NodeUnstageVolumeRequest{VolumeId: id, StagingTargetPath: r.path("s")})
	for _, v := range []string{id, other} {
		must(t, r.controller().DeleteVolume, &csi.DeleteVolumeRequest{VolumeId: v})
	}
	r.clean()
}
