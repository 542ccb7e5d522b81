package csi

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// crashes are the steps at which the driver is killed, by the life of a volume that passes the
// step.
var crashes = map[string][]string{
	"claim": {
		"create.make", "create.made", "create.attached", "create.name", "create.named", "expand.set", "expand.done", "modify.set", "modify.done",
		"delete.detach", "detached", "delete.delete", "delete.deleted",
	},
	"mount": {
		"stage.record", "stage.directory", "stage.start", "stage.started", "stage.mounted", "publish.bind", "publish.bound",
		"unpublish.unmount", "unpublish.unmounted", "unpublish.removed", "unstage.unmount", "unstage.unmounted", "unstage.forget",
	},
	"givenup": {"stage.record", "stage.directory", "stage.start", "stage.started", "stage.mounted", "publish.bind", "publish.bound"},
	"refused": {"discard.detach", "discard.delete"},
	"clone":   {"snapshot.take", "snapshot.taken", "create.made", "create.set", "create.name", "unsnapshot.delete", "unsnapshot.deleted"},
	"group":   {"group.take", "group.taken", "ungroup.delete", "ungroup.deleted"},
	"copy":    {"create.make", "create.made", "create.set", "delete.delete"},
	"reader":  {"stage.record", "stage.started", "stage.mounted", "unstage.unmounted", "unstage.forget"},
	// Staged again by a pod that comes after the mount's process was killed.
	"dead": {"stage.record", "stage.directory", "stage.start", "stage.started", "stage.mounted", "publish.bind", "publish.bound"},
	"inline": {
		"inline.make", "inline.made", "stage.record", "stage.directory", "stage.start", "stage.started", "stage.mounted", "publish.bind", "publish.bound",
		"unpublish.unmount", "unpublish.unmounted", "unpublish.removed", "unstage.unmount", "unstage.unmounted", "unstage.forget", "inline.delete", "inline.deleted",
	},
	"inlinegivenup": {"inline.make", "inline.made", "stage.record", "stage.directory", "stage.start", "stage.started", "stage.mounted", "publish.bind", "publish.bound"},
	"granted":       {"grant.add", "grant.added", "grant.revoke", "grant.revoked"},
	"held":          {"takeup.start", "takeup.started", "stage.started", "unstage.unmounted", "unstage.forget"},
}

// TestTableOfCrashes: the table has every step that the driver names.
func TestTableOfCrashes(t *testing.T) {
	var table []string
	for _, l := range crashes {
		table = append(table, l...)
	}
	step := regexp.MustCompile(`Step\("([^"]+)"\)|s\.change\(ctx, [^,]+, "([^"]+)"`)
	seen := map[string]bool{}
	for _, folder := range []string{"controller", "node"} {
		files, err := filepath.Glob(filepath.Join("..", "..", "csi", folder, "*.go"))
		if err != nil || len(files) == 0 {
			t.Fatal(files, err)
		}
		for _, f := range files {
			b, err := os.ReadFile(f)
			if err != nil {
				t.Fatal(err)
			}
			for _, m := range step.FindAllStringSubmatch(string(b), -1) {
				if m[1] != "" {
					seen[m[1]] = true
				} else {
					seen[m[2]+".set"], seen[m[2]+".done"] = true, true
				}
			}
		}
	}
	for s := range seen {
		if !slices.Contains(table, s) {
			t.Errorf("nobody kills the driver at %s", s)
		}
	}
	for _, s := range table {
		if !seen[s] {
			t.Errorf("the driver has no step %s", s)
		}
	}
}

// again makes a call until the call succeeds, as an orchestrator does. If the driver dies during
// the call, again starts another driver.
func again[Q, A any](r *rig, call func(context.Context, Q, ...grpc.CallOption) (A, error), q Q) (a A) {
	r.t.Helper()
	var err error
	for deadline := time.Now().Add(60 * time.Second); time.Now().Before(deadline); time.Sleep(10 * time.Millisecond) {
		if a, err = call(r.t.Context(), q); err == nil {
			return a
		}
		select {
		case <-r.driver.Done():
			r.deaths++
			r.drive(nil)
			continue
		default:
		}
		if c := status.Code(err); c != codes.Aborted && c != codes.Unavailable && c != codes.FailedPrecondition {
			r.t.Fatalf("%T: %v", q, err)
		}
	}
	r.t.Fatalf("%T: %v", q, err)
	return a
}

// once makes a call a single time: the call succeeds, or the driver dies during the call and once
// starts another driver.
func once[Q, A any](r *rig, call func(context.Context, Q, ...grpc.CallOption) (A, error), q Q) {
	r.t.Helper()
	_, err := call(r.t.Context(), q)
	if err == nil {
		return
	}
	select {
	case <-r.driver.Done():
		r.deaths++
		r.drive(nil)
	case <-time.After(30 * time.Second):
		r.t.Fatalf("%T: %v", q, err)
	}
}

// refuses makes a call until the driver refuses the call, over the driver's death.
func refuses[Q, A any](r *rig, code codes.Code, call func(context.Context, Q, ...grpc.CallOption) (A, error), q Q) {
	r.t.Helper()
	r.until("it is refused", func() error {
		_, err := call(r.t.Context(), q)
		switch {
		case err == nil:
			r.t.Fatalf("%T is not refused", q)
		case status.Code(err) == code:
			return nil
		}
		select {
		case <-r.driver.Done():
			r.deaths++
			r.drive(nil)
		default:
		}
		return err
	})
}

// lives are the stages of a volume's life, every call made until success unless noted.
var lives = map[string]func(r *rig, name string){
	"claim": func(r *rig, name string) {
		v := again(r, r.controller().CreateVolume, claim(name, inTree)).GetVolume()
		again(r, r.controller().ControllerExpandVolume, &csi.ControllerExpandVolumeRequest{VolumeId: v.GetVolumeId(), CapacityRange: &csi.CapacityRange{RequiredBytes: 128 << 20}})
		again(r, r.controller().ControllerModifyVolume, &csi.ControllerModifyVolumeRequest{VolumeId: v.GetVolumeId(), MutableParameters: map[string]string{"noatime": "true"}})
		if got := again(r, r.controller().ControllerGetVolume, &csi.ControllerGetVolumeRequest{VolumeId: v.GetVolumeId()}).GetVolume().GetCapacityBytes(); got != 128<<20 {
			r.t.Errorf("%s: expanded to %d bytes", name, got)
		}
		again(r, r.controller().DeleteVolume, &csi.DeleteVolumeRequest{VolumeId: v.GetVolumeId()})
	},
	// A volume from a snapshot; the origin is changed during the making, and the snapshot is
	// deleted before the volume.
	"clone": func(r *rig, name string) {
		v := again(r, r.controller().CreateVolume, claim(name, nil)).GetVolume().GetVolumeId()
		x := again(r, r.controller().CreateSnapshot, &csi.CreateSnapshotRequest{Name: name, SourceVolumeId: v}).GetSnapshot()
		q := claim(name+"-copy", map[string]string{"noatime": "true"})
		q.VolumeContentSource = fromSnapshot(x.GetSnapshotId())
		once(r, r.controller().CreateVolume, q)
		again(r, r.controller().ControllerExpandVolume, &csi.ControllerExpandVolumeRequest{VolumeId: v, CapacityRange: &csi.CapacityRange{RequiredBytes: 128 << 20}})
		c := again(r, r.controller().CreateVolume, q).GetVolume()
		if c.GetCapacityBytes() != 64<<20 {
			r.t.Errorf("%s: the clone has %d bytes", name, c.GetCapacityBytes())
		}
		if l := again(r, r.controller().ListSnapshots, &csi.ListSnapshotsRequest{}).GetEntries(); len(l) != 1 {
			r.t.Errorf("%s: snapshots: %v", name, l)
		}
		again(r, r.controller().DeleteSnapshot, &csi.DeleteSnapshotRequest{SnapshotId: x.GetSnapshotId()})
		for _, id := range []string{c.GetVolumeId(), v} {
			if id == v {
				again(r, r.controller().DeleteSnapshot, &csi.DeleteSnapshotRequest{SnapshotId: x.GetSnapshotId()})
			}
			again(r, r.controller().DeleteVolume, &csi.DeleteVolumeRequest{VolumeId: id})
		}
	},
	// Snapshots of two volumes at one moment; the test makes a volume of one snapshot.
	"group": func(r *rig, name string) {
		var volumes []string
		for _, part := range []string{"-data", "-log"} {
			volumes = append(volumes, again(r, r.controller().CreateVolume, claim(name+part, nil)).GetVolume().GetVolumeId())
		}
		q := &csi.CreateVolumeGroupSnapshotRequest{Name: name, SourceVolumeIds: volumes}
		g := again(r, r.groups().CreateVolumeGroupSnapshot, q).GetGroupSnapshot()
		if twice := again(r, r.groups().CreateVolumeGroupSnapshot, q).GetGroupSnapshot(); twice.GetGroupSnapshotId() != g.GetGroupSnapshotId() || len(g.GetSnapshots()) != 2 || !g.GetReadyToUse() {
			r.t.Errorf("%s: %v, and then %v", name, g, twice)
		}
		if l := again(r, r.controller().ListSnapshots, &csi.ListSnapshotsRequest{}).GetEntries(); len(l) != 2 {
			r.t.Errorf("%s: snapshots: %v", name, l)
		}
		again(r, r.groups().DeleteVolumeGroupSnapshot, deletion(g))
		if l := again(r, r.controller().ListSnapshots, &csi.ListSnapshotsRequest{}).GetEntries(); len(l) != 0 {
			r.t.Errorf("%s: snapshots are left: %v", name, l)
		}
		for _, v := range volumes {
			again(r, r.controller().DeleteVolume, &csi.DeleteVolumeRequest{VolumeId: v})
		}
	},
	"copy": func(r *rig, name string) {
		v := again(r, r.controller().CreateVolume, claim(name, nil)).GetVolume().GetVolumeId()
		q := claim(name+"-copy", map[string]string{"noatime": "true", "attachPath": "/kubernetes/team/{volume}"})
		q.VolumeContentSource = &csi.VolumeContentSource{Type: &csi.VolumeContentSource_Volume{Volume: &csi.VolumeContentSource_VolumeSource{VolumeId: v}}}
		c := again(r, r.controller().CreateVolume, q).GetVolume().GetVolumeId()
		for _, id := range []string{c, v} {
			again(r, r.controller().DeleteVolume, &csi.DeleteVolumeRequest{VolumeId: id})
		}
	},
	// Somebody put a file where the namespace's directory should be: the answer is
	// final, and nobody calls again.
	"refused": func(r *rig, name string) {
		r.tree().file("/kubernetes/blocked")
		refuses(r, codes.FailedPrecondition, r.controller().CreateVolume, claim(name, map[string]string{"csi.storage.k8s.io/pvc/name": "data", "csi.storage.k8s.io/pvc/namespace": "blocked"}))
	},
	// The pod goes before its volume exists: an abandoned volume is not made again.
	"givenup": func(r *rig, name string) {
		v := again(r, r.controller().CreateVolume, claim(name, inTree)).GetVolume().GetVolumeId()
		staging, target := r.path("staging"), r.path("target")
		once(r, r.node().NodeStageVolume, &csi.NodeStageVolumeRequest{VolumeId: v, StagingTargetPath: staging, VolumeCapability: capability(manyWriters)})
		if r.deaths == 0 {
			once(r, r.node().NodePublishVolume, publish(v, staging, target))
		}
		again(r, r.node().NodeUnpublishVolume, &csi.NodeUnpublishVolumeRequest{VolumeId: v, TargetPath: target})
		again(r, r.node().NodeUnstageVolume, &csi.NodeUnstageVolumeRequest{VolumeId: v, StagingTargetPath: staging})
		again(r, r.controller().DeleteVolume, &csi.DeleteVolumeRequest{VolumeId: v})
	},
	// A claim that only reads is mounted as the snapshot, which is pinned meanwhile.
	"reader": func(r *rig, name string) {
		v := again(r, r.controller().CreateVolume, claim(name, nil)).GetVolume().GetVolumeId()
		x := again(r, r.controller().CreateSnapshot, &csi.CreateSnapshotRequest{Name: name, SourceVolumeId: v}).GetSnapshot().GetSnapshotId()
		q := claim(name+"-reader", inTree)
		q.VolumeContentSource, q.VolumeCapabilities = fromSnapshot(x), []*csi.VolumeCapability{capability(manyReaders)}
		c := again(r, r.controller().CreateVolume, q).GetVolume().GetVolumeId()
		staging := r.path("staging")
		again(r, r.node().NodeStageVolume, &csi.NodeStageVolumeRequest{VolumeId: c, StagingTargetPath: staging, VolumeCapability: capability(manyReaders)})
		if n := r.pins("csi-" + name); n != 1 {
			r.t.Errorf("%s: %d pins for one mount", name, n)
		}
		again(r, r.node().NodeUnstageVolume, &csi.NodeUnstageVolumeRequest{VolumeId: c, StagingTargetPath: staging})
		r.until("nothing pins the snapshot", func() error { // a driver releases the pin after the beginning of its answer
			if n := r.pins("csi-" + name); n != 0 {
				return fmt.Errorf("%d pins are left", n)
			}
			return nil
		})
		again(r, r.controller().DeleteVolume, &csi.DeleteVolumeRequest{VolumeId: c})
		again(r, r.controller().DeleteSnapshot, &csi.DeleteSnapshotRequest{SnapshotId: x})
		again(r, r.controller().DeleteVolume, &csi.DeleteVolumeRequest{VolumeId: v})
	},
	"mount": func(r *rig, name string) {
		v := again(r, r.controller().CreateVolume, claim(name, nil)).GetVolume()
		staging, target := r.path("staging"), r.path("target")
		use := func(look func()) {
			again(r, r.node().NodeStageVolume, &csi.NodeStageVolumeRequest{VolumeId: v.GetVolumeId(), StagingTargetPath: staging, VolumeCapability: capability(manyWriters)})
			again(r, r.node().NodePublishVolume, &csi.NodePublishVolumeRequest{VolumeId: v.GetVolumeId(), StagingTargetPath: staging, TargetPath: target, VolumeCapability: capability(manyWriters)})
			look()
			again(r, r.node().NodeUnpublishVolume, &csi.NodeUnpublishVolumeRequest{VolumeId: v.GetVolumeId(), TargetPath: target})
			again(r, r.node().NodeUnstageVolume, &csi.NodeUnstageVolumeRequest{VolumeId: v.GetVolumeId(), StagingTargetPath: staging})
		}
		use(func() {
			if err := os.WriteFile(filepath.Join(target, "f"), []byte(name), 0o644); err != nil {
				r.t.Errorf("%s: %v", name, err)
			}
		})
		use(func() {
			if b, err := os.ReadFile(filepath.Join(target, "f")); err != nil || string(b) != name {
				r.t.Errorf("DATA: %s: what was written reads %q, %v", name, b, err)
			}
		})
		again(r, r.controller().DeleteVolume, &csi.DeleteVolumeRequest{VolumeId: v.GetVolumeId()})
	},
	"held": func(r *rig, name string) {
		v := again(r, r.controller().CreateVolume, claim(name, nil)).GetVolume().GetVolumeId()
		staging, target := r.path("staging"), r.path("target")
		again(r, r.node().NodeStageVolume, &csi.NodeStageVolumeRequest{VolumeId: v, StagingTargetPath: staging, VolumeCapability: capability(manyWriters)})
		again(r, r.node().NodePublishVolume, publish(v, staging, target))
		// Not open when a driver is started: this process's child would close the file, a close
		// that waits for a server.
		f := filepath.Join(target, "f")
		err := os.WriteFile(f, []byte(name), 0o644)
		if err == nil {
			err = syscall.Kill(r.server(), syscall.SIGKILL)
		}
		if err != nil {
			r.t.Fatalf("%s: %v", name, err)
		}
		if strings.Contains(name, "takeup") {
			<-r.driver.Done()
		}
		again(r, r.node().NodePublishVolume, publish(v, staging, target))
		if b, err := os.ReadFile(f); err != nil || string(b) != name {
			r.t.Errorf("DATA: %s: what was written reads %q, %v", name, b, err)
		}
		again(r, r.node().NodeUnpublishVolume, &csi.NodeUnpublishVolumeRequest{VolumeId: v, TargetPath: target})
		again(r, r.node().NodeUnstageVolume, &csi.NodeUnstageVolumeRequest{VolumeId: v, StagingTargetPath: staging})
		again(r, r.controller().DeleteVolume, &csi.DeleteVolumeRequest{VolumeId: v})
		r.nothingHeld()
	},
	// A node has the grant once, or not at all, wherever the controller died.
	"granted": func(r *rig, name string) {
		v := again(r, r.controller().CreateVolume, claim(name, nil)).GetVolume().GetVolumeId()
		again(r, r.controller().ControllerPublishVolume, publishTo("node1", v, manyWriters))
		if g := r.granted(); len(g) != 1 || !strings.HasPrefix(g[0], "node1 write ") {
			r.t.Errorf("%s: published, and granted are %q", name, g)
		}
		again(r, r.controller().ControllerUnpublishVolume, unpublishFrom("node1", v))
		if g := r.granted(); len(g) != 0 {
			r.t.Errorf("%s: unpublished, and granted are %q", name, g)
		}
		again(r, r.controller().DeleteVolume, &csi.DeleteVolumeRequest{VolumeId: v})
	},
	// A kubelet stages a volume once: a mount that has ended since comes back with the next pod,
	// though the driver dies meanwhile.
	"dead": func(r *rig, name string) {
		r.driver.Kill()
		r.drive(nil)
		v := again(r, r.controller().CreateVolume, claim(name, nil)).GetVolume().GetVolumeId()
		staging, first, target := r.path("staging"), r.path("first"), r.path("target")
		must(r.t, r.node().NodeStageVolume, &csi.NodeStageVolumeRequest{VolumeId: v, StagingTargetPath: staging, VolumeCapability: capability(manyWriters)})
		must(r.t, r.node().NodePublishVolume, publish(v, staging, first))
		r.driver.Kill()
		r.drive(r.killed)
		if err := syscall.Kill(r.server(), syscall.SIGKILL); err != nil {
			r.t.Fatal(err)
		}
		again(r, r.node().NodePublishVolume, publish(v, staging, target))
		f := filepath.Join(target, "f")
		if err := os.WriteFile(f, []byte(name), 0o644); err != nil {
			r.t.Errorf("%s: %v", name, err)
		}
		for _, at := range []string{first, target} {
			again(r, r.node().NodeUnpublishVolume, &csi.NodeUnpublishVolumeRequest{VolumeId: v, TargetPath: at})
		}
		again(r, r.node().NodeUnstageVolume, &csi.NodeUnstageVolumeRequest{VolumeId: v, StagingTargetPath: staging})
		again(r, r.controller().DeleteVolume, &csi.DeleteVolumeRequest{VolumeId: v})
	},
	// The pod goes before its volume exists: an unfinished volume goes with the pod.
	"inlinegivenup": func(r *rig, name string) {
		target := r.path("target")
		once(r, r.node().NodePublishVolume, inlineFor(name, target))
		again(r, r.node().NodeUnpublishVolume, &csi.NodeUnpublishVolumeRequest{VolumeId: name, TargetPath: target})
	},
	"inline": func(r *rig, name string) {
		target := r.path("target")
		again(r, r.node().NodePublishVolume, inlineFor(name, target))
		if err := os.WriteFile(filepath.Join(target, "f"), []byte(name), 0o644); err != nil {
			r.t.Errorf("%s: %v", name, err)
		}
		again(r, r.node().NodeUnpublishVolume, &csi.NodeUnpublishVolumeRequest{VolumeId: name, TargetPath: target})
	},
}

// inlineFor has a pod bring a volume along.
func inlineFor(name, target string) *csi.NodePublishVolumeRequest {
	return &csi.NodePublishVolumeRequest{VolumeId: name, TargetPath: target, VolumeCapability: capability(manyWriters), VolumeContext: map[string]string{"csi.storage.k8s.io/ephemeral": "true", "size": "16Mi"}}
}

var inTree = map[string]string{"csi.storage.k8s.io/pvc/name": "data", "csi.storage.k8s.io/pvc/namespace": "team"}

// TestCrashes kills the driver at every step of the table. The next driver, called again,
// brings the volume's life to its end and leaves nothing behind.
func TestCrashes(t *testing.T) {
	plain, secure := newRig(t), newSecureRig(t)
	for life, steps := range crashes {
		r := plain
		if life == "granted" {
			r = secure
		}
		for _, step := range steps {
			t.Run(life+"/"+step, func(t *testing.T) {
				r.t = t
				r.deaths = 0
				if r.hold = ""; life == "held" {
					r.held()
				}
				r.killed = []string{"PENSTOCK_CSI_KILL_AT=" + step}
				r.drive(r.killed)
				lives[life](r, "pvc-"+life+"-"+strings.ReplaceAll(step, ".", "-"))
				if r.deaths != 1 {
					t.Errorf("the driver died %d times", r.deaths)
				}
				r.clean()
				for _, left := range []string{"staging", "first", "target"} {
					if err := os.Remove(r.path(left)); err != nil && !errors.Is(err, os.ErrNotExist) {
						t.Errorf("%s is not empty: %v", left, err)
					}
				}
				r.driver.Kill()
			})
		}
	}
	plain.t, secure.t = t, t
}
