package csi

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	registration "k8s.io/kubelet/pkg/apis/pluginregistration/v1"

	"penstock.io/penstock/test/port"
	"penstock.io/penstock/test/program"
)

// newSecureRig is a rig with certificates, in which node1 and node2 are clients.
func newSecureRig(t *testing.T) *rig {
	t.Helper()
	r := emptyRig(t)
	r.secure = port.Free(t)
	run := func(stdin string, args ...string) {
		t.Helper()
		cmd := exec.Command(program.Path, args...)
		cmd.Stdin = strings.NewReader(stdin)
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("%v: %v: %s", args, err, out)
		}
	}
	run("", "cluster", "init", "--dir", r.path("m"), "--credentials", r.path("cred"))
	r.start(nil, "meta", "--dir", r.path("m"), "--listen", r.secure, "--credentials", r.path("cred", "meta"))
	r.until("the metadata server answers", func() error { _, err := r.ctl("volume", "list"); return err })
	for name, role := range map[string]string{"c1": "chunkserver", "node1": "client", "node2": "client"} {
		token, err := r.ctl("cluster", "join-token", "--role", role)
		if err != nil {
			t.Fatal(err)
		}
		run(string(token), "cluster", "join", "--cluster", r.secure, "--name", name, "--credentials", r.path("cred", name))
	}
	r.start(nil, "chunkserver", "--data", r.path("c"), "--cluster", r.secure, "--listen", port.Free(t), "--credentials", r.path("cred", "c1"), "--topology", "/dc1/rack1/node1")
	r.hasChunkServer()
	return r
}

// apart starts controller and node1's driver as Kubernetes has them: two processes, an
// administrator and a client. The node's driver uses another name on its machine.
func (r *rig) apart() csi.NodeClient {
	r.t.Helper()
	r.start(nil, "csi", "--controller", "--endpoint", "unix://"+r.socket(), "--cluster", r.secure, "--credentials", r.path("cred", "admin"), "--log-level", "debug")
	r.answers(r.conn)
	r.start(nil, "csi", "--node", "--node-name", "node1.local", "--state-dir", r.path("state"), "--endpoint", "unix://"+r.path("node.sock"), "--registration-dir", r.path(), "--cluster", r.secure, "--credentials", r.path("cred", "node1"), "--log-level", "debug")
	conn := r.dial(r.path("node.sock"))
	r.answers(conn)
	return csi.NewNodeClient(conn)
}

// granted lists the grants for published volumes, as "NODE RIGHTS VOLUME".
func (r *rig) granted() (all []string) {
	r.t.Helper()
	out, err := r.ctl("grant", "list", "--output", "json")
	if err != nil {
		r.t.Fatal(err)
	}
	var l []struct {
		Who    string `json:"who"`
		Volume int    `json:"volume"`
		Rights int    `json:"rights"`
		For    string `json:"for"`
	}
	if err := json.Unmarshal(out, &l); err != nil {
		r.t.Fatal(err)
	}
	for _, g := range l {
		if g.For != "" {
			all = append(all, fmt.Sprintf("%s %s %d", strings.TrimPrefix(g.Who, "client/"), map[int]string{1: "read", 2: "write"}[g.Rights], g.Volume))
		}
	}
	slices.Sort(all)
	return all
}

func publishTo(node, volume string, mode csi.VolumeCapability_AccessMode_Mode) *csi.ControllerPublishVolumeRequest {
	return &csi.ControllerPublishVolumeRequest{VolumeId: volume, NodeId: node, VolumeCapability: capability(mode)}
}

func unpublishFrom(node, volume string) *csi.ControllerUnpublishVolumeRequest {
	return &csi.ControllerUnpublishVolumeRequest{VolumeId: volume, NodeId: node}
}

// TestNodeHasItsGrantsOnly: in a cluster with certificates the controller is an administrator
// and a node is a client. The node can open a volume as long as the volume is published to the
// node, and no other volume: neither through the node's driver nor by hand with the node's
// credentials.
func TestNodeHasItsGrantsOnly(t *testing.T) {
	r := newSecureRig(t)
	node := r.apart()
	kubelet := registration.NewRegistrationClient(r.dial(r.path("csi.penstock.io-reg.sock")))
	if info, err := kubelet.GetInfo(t.Context(), &registration.InfoRequest{}, grpc.WaitForReady(true)); err != nil || info.GetEndpoint() != r.path("node.sock") {
		t.Errorf("the kubelet is told: %v, %v", info, err)
	}
	info := must(t, node.NodeGetInfo, &csi.NodeGetInfoRequest{})
	if got := info.GetAccessibleTopology().GetSegments()["topology.penstock.io/rack"]; got != "rack1" {
		t.Errorf("the node stands in rack %q", got)
	}
	if info.GetNodeId() != "node1" {
		t.Errorf("the node is called %q, which is not what the cluster knows it by", info.GetNodeId())
	}

	id := must(t, r.controller().CreateVolume, claim("pvc-1", nil)).GetVolume().GetVolumeId()
	other := must(t, r.controller().CreateVolume, claim("pvc-2", nil)).GetVolume().GetVolumeId()
	stage := func(id, at string) *csi.NodeStageVolumeRequest {
		return &csi.NodeStageVolumeRequest{VolumeId: id, StagingTargetPath: r.path(at), VolumeCapability: capability(manyWriters)}
	}
	refused := func(id string) {
		t.Helper()
		// A node that just lost a grant may be refused later, by the volume's owner.
		_, err := node.NodeStageVolume(t.Context(), stage(id, "refused"))
		if c := status.Code(err); c != codes.PermissionDenied && (c != codes.Unavailable || !strings.Contains(err.Error(), "permission denied")) {
			t.Errorf("staged without a grant: %v", err)
		}
		must(t, node.NodeUnstageVolume, &csi.NodeUnstageVolumeRequest{VolumeId: id, StagingTargetPath: r.path("refused")})
	}
	byHand := func(name string) {
		t.Helper()
		at := r.path("by-hand")
		if err := os.MkdirAll(at, 0o755); err != nil {
			t.Fatal(err)
		}
		out, err := exec.Command(program.Path, "mount", "--background", "--log-file", r.path("log"), "--cluster", r.secure, "--credentials", r.path("cred", "node1"), name+":/", at).CombinedOutput()
		if err == nil {
			t.Errorf("with a node's credentials %s is mounted by hand", name)
			if err := unix.Unmount(at, 0); err != nil {
				t.Error(err)
			}
		} else if !strings.Contains(string(out), "permission denied") {
			t.Errorf("%s is not mounted for another reason: %s", name, out)
		}
	}
	published := func(want ...string) {
		t.Helper()
		if got := r.granted(); !slices.Equal(got, want) {
			t.Errorf("granted: %q, want %q", got, want)
		}
	}
	refused(id)
	byHand("csi-pvc-1")
	// Calls about other volumes of a node are served at once with these calls.
	var calls sync.WaitGroup
	for _, v := range []string{id, other} {
		calls.Go(func() {
			for range 15 {
				if v == id {
					if _, err := r.controller().ControllerPublishVolume(t.Context(), publishTo("node1", v, manyWriters)); err != nil {
						t.Errorf("publish: %v", err)
					}
				}
				if _, err := r.controller().ControllerUnpublishVolume(t.Context(), unpublishFrom("node1", v)); err != nil {
					t.Errorf("unpublish: %v", err)
				}
			}
		})
	}
	calls.Wait()
	published()
	// A volume for one node at a time goes to one node.
	must(t, r.controller().ControllerPublishVolume, publishTo("node1", id, oneWriter))
	must(t, r.controller().ControllerPublishVolume, publishTo("node1", id, oneWriter))
	if _, err := r.controller().ControllerPublishVolume(t.Context(), publishTo("node2", id, oneWriter)); status.Code(err) != codes.FailedPrecondition || !strings.Contains(err.Error(), "node1") {
		t.Errorf("a single writer's volume is published to a second node: %v", err)
	}
	must(t, r.controller().ControllerUnpublishVolume, unpublishFrom("node1", id))
	published()
	// Also with two controllers called at once, as after a change of leader.
	r.start(nil, "csi", "--controller", "--endpoint", "unix://"+r.path("second.sock"), "--cluster", r.secure, "--credentials", r.path("cred", "admin"))
	second := r.dial(r.path("second.sock"))
	r.answers(second)
	for range 10 {
		var (
			errs  [2]error
			asked sync.WaitGroup
		)
		for i, c := range []csi.ControllerClient{r.controller(), csi.NewControllerClient(second)} {
			asked.Go(func() {
				_, errs[i] = c.ControllerPublishVolume(t.Context(), publishTo(fmt.Sprint("node", i+1), id, oneWriter))
			})
		}
		asked.Wait()
		won := 0
		if errs[0] != nil {
			won = 1
		}
		if errs[won] != nil || status.Code(errs[1-won]) != codes.FailedPrecondition {
			t.Errorf("a single writer's volume is published to two nodes at once: %v", errs)
		}
		published(fmt.Sprintf("node%d write 2", won+1))
		must(t, r.controller().ControllerUnpublishVolume, &csi.ControllerUnpublishVolumeRequest{VolumeId: id})
	}
	// A grant for another node is of no use here.
	must(t, r.controller().ControllerPublishVolume, publishTo("node2", other, manyWriters))
	for range 2 {
		must(t, r.controller().ControllerPublishVolume, publishTo("node1", id, manyWriters))
	}
	published("node1 write 2", "node2 write 3")
	must(t, node.NodeStageVolume, stage(id, "s")) // at once
	refused(other)
	byHand("csi-pvc-2")
	if _, err := r.controller().ControllerPublishVolume(t.Context(), publishTo("node3", id, manyWriters)); status.Code(err) != codes.NotFound {
		t.Errorf("published to a node that never joined: %v", err)
	}
	if _, err := node.NodePublishVolume(t.Context(), publish(id, r.path("s"), r.path("pod"))); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(r.path("pod", "f"), []byte("x"), 0o644); err != nil {
		t.Error(err)
	}
	// A claim of a snapshot is mounted by the node's grants: as the snapshot, for a grant to read
	// the origin; or as the claim's own volume, for a grant on this volume alone.
	for i, c := range []struct{ of, want string }{{id, "csi-pvc-1@csi-s0:"}, {other, "csi-frozen1:"}} {
		x := must(t, r.controller().CreateSnapshot, &csi.CreateSnapshotRequest{Name: fmt.Sprint("s", i), SourceVolumeId: c.of}).GetSnapshot().GetSnapshotId()
		q := claim(fmt.Sprint("frozen", i), nil)
		q.VolumeContentSource, q.VolumeCapabilities = fromSnapshot(x), []*csi.VolumeCapability{capability(manyReaders)}
		v := must(t, r.controller().CreateVolume, q).GetVolume().GetVolumeId()
		if i == 0 {
			must(t, r.controller().ControllerPublishVolume, publishTo("node1", v, manyReaders))
			published("node1 read 2", "node1 read 4", "node1 write 2", "node2 write 3")
		} else if _, err := r.ctl("grant", "add", "node1", "csi-"+q.GetName(), "--rights", "read"); err != nil {
			t.Fatal(err)
		}
		at := stage(v, fmt.Sprint("view", i))
		at.VolumeCapability = capability(manyReaders)
		must(t, node.NodeStageVolume, at)
		if m, err := mountinfo.GetMounts(mountinfo.SingleEntryFilter(at.GetStagingTargetPath())); err != nil || len(m) != 1 || m[0].Source != c.want {
			t.Errorf("%v, %v; want %s", m, err, c.want)
		}
		must(t, node.NodeUnstageVolume, &csi.NodeUnstageVolumeRequest{VolumeId: v, StagingTargetPath: at.GetStagingTargetPath()})
		must(t, r.controller().ControllerUnpublishVolume, unpublishFrom("node1", v))
		must(t, r.controller().DeleteVolume, &csi.DeleteVolumeRequest{VolumeId: v})
		must(t, r.controller().DeleteSnapshot, &csi.DeleteSnapshotRequest{SnapshotId: x})
	}
	published("node1 write 2", "node2 write 3")
	for _, e := range must(t, r.controller().ListVolumes, &csi.ListVolumesRequest{}).GetEntries() {
		want := map[string]string{id: "node1", other: "node2"}[e.GetVolume().GetVolumeId()]
		if got := e.GetStatus().GetPublishedNodeIds(); len(got) != 1 || got[0] != want {
			t.Errorf("%s is published to %q, want %s", e.GetVolume().GetVolumeId(), got, want)
		}
	}
	must(t, node.NodeUnpublishVolume, &csi.NodeUnpublishVolumeRequest{VolumeId: id, TargetPath: r.path("pod")})
	must(t, node.NodeUnstageVolume, &csi.NodeUnstageVolumeRequest{VolumeId: id, StagingTargetPath: r.path("s")})
	for range 2 {
		must(t, r.controller().ControllerUnpublishVolume, unpublishFrom("node1", id))
	}
	refused(id)
	byHand("csi-pvc-1")
	published("node2 write 3")

	// Readers do not write, whatever their node does with its credentials.
	must(t, r.controller().ControllerPublishVolume, publishTo("node1", id, manyReaders))
	published("node1 read 2", "node2 write 3")
	must(t, node.NodeStageVolume, stage(id, "s"))
	must(t, node.NodePublishVolume, publish(id, r.path("s"), r.path("pod")))
	if b, err := os.ReadFile(r.path("pod", "f")); err != nil || string(b) != "x" {
		t.Errorf("DATA: a reader reads %q, %v", b, err)
	}
	if err := os.WriteFile(r.path("pod", "g"), []byte("x"), 0o644); !errors.Is(err, unix.EROFS) {
		t.Errorf("a reader writes: %v", err)
	}
	// The node is taken for gone: its mount is cut off, and its leases are gone with the node.
	must(t, r.controller().ControllerUnpublishVolume, unpublishFrom("node1", id))
	r.until("the mount is cut off", func() error {
		if _, err := os.ReadDir(r.path("pod")); err == nil {
			return errors.New("it still lists the volume")
		}
		return nil
	})
	must(t, node.NodeUnpublishVolume, &csi.NodeUnpublishVolumeRequest{VolumeId: id, TargetPath: r.path("pod")})
	must(t, node.NodeUnstageVolume, &csi.NodeUnstageVolumeRequest{VolumeId: id, StagingTargetPath: r.path("s")})
	// An evicted node keeps nothing, also without being unpublished; nor does any node keep
	// grants on a deleted volume.
	must(t, r.controller().ControllerPublishVolume, publishTo("node2", id, manyWriters))
	if _, err := r.ctl("cluster", "evict", "client/node2"); err != nil {
		t.Fatal(err)
	}
	published()
	must(t, r.controller().ControllerPublishVolume, publishTo("node1", other, manyWriters))
	published("node1 write 3")
	if _, err := r.controller().DeleteVolume(t.Context(), &csi.DeleteVolumeRequest{VolumeId: other}); status.Code(err) != codes.FailedPrecondition || !strings.Contains(err.Error(), "node1") {
		t.Errorf("a volume that node1 has is deleted: %v", err)
	}
	if _, err := r.ctl("volume", "delete", "csi-pvc-2", "--yes"); err != nil { // so may an administrator
		t.Fatal(err)
	}
	for _, v := range []string{id, other} {
		must(t, r.controller().DeleteVolume, &csi.DeleteVolumeRequest{VolumeId: v})
	}
	r.until("a deleted volume's grants are gone", func() error {
		if got := r.granted(); len(got) > 0 {
			return fmt.Errorf("%q", got)
		}
		return nil
	})
	r.clean()
}
