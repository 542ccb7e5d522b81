package csi

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"

	"penstock.io/penstock/csi/handle"
)

// halt stops a process, and waits until all of its threads stand still.
func (r *rig) halt(pid int) {
	r.t.Helper()
	if err := syscall.Kill(pid, syscall.SIGSTOP); err != nil {
		r.t.Fatal(err)
	}
	r.until("it stands still", func() error {
		all, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/stat", pid))
		for _, name := range all {
			b, rerr := os.ReadFile(name)
			if rerr == nil && !bytes.Contains(b, []byte(") T ")) {
				err = errors.Join(err, fmt.Errorf("%s", b))
			}
		}
		return err
	})
}

// TestStoppedCluster: the cluster stands still while a pod's volume is given to the pod's group,
// and this call hangs. Other pods of the volume are taken away at once; the first pod is taken
// away, too, once its own call is over. All of that happens before the cluster comes back.
func TestStoppedCluster(t *testing.T) {
	r := newRig(t)
	r.drive(nil)
	id, staging := r.staged("pvc-1")
	a, b := r.path("pod-a"), r.path("pod-b")
	must(t, r.node().NodePublishVolume, publish(id, staging, a))
	r.halt(r.meta.PID())
	going := false
	goOn := func() {
		if !going {
			going = true
			_ = syscall.Kill(r.meta.PID(), syscall.SIGCONT)
		}
	}
	t.Cleanup(goOn)
	grouped := publish(id, staging, b)
	grouped.VolumeCapability = capability(manyWriters)
	grouped.VolumeCapability.GetMount().VolumeMountGroup = "4242"
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	published := make(chan error, 1)
	go func() { _, err := r.node().NodePublishVolume(ctx, grouped); published <- err }()
	r.until("pod b has it, but for its group", func() error {
		for _, m := range r.mounts() {
			if m == b {
				return nil
			}
		}
		return os.ErrNotExist
	})
	if _, err := r.node().NodeUnpublishVolume(t.Context(), &csi.NodeUnpublishVolumeRequest{VolumeId: id, TargetPath: a}); err != nil {
		t.Errorf("pod a can't be deleted: %v", err)
	}
	_, err := r.node().NodeUnpublishVolume(t.Context(), &csi.NodeUnpublishVolumeRequest{VolumeId: id, TargetPath: b})
	wants(t, "unpublished while it is being published", err, codes.Aborted)
	select {
	case err := <-published:
		t.Errorf("its group was set by a cluster that stands still: %v", err)
	default:
	}
	cancel() // a kubelet waits for two minutes
	again(r, r.node().NodeUnpublishVolume, &csi.NodeUnpublishVolumeRequest{VolumeId: id, TargetPath: b})
	if m := r.mounts(); len(m) != 1 || m[0] != staging {
		t.Errorf("mounted: %v", m)
	}
	goOn()
	again(r, r.node().NodeUnstageVolume, &csi.NodeUnstageVolumeRequest{VolumeId: id, StagingTargetPath: staging}) // the thread that set the group may still be inside
	must(t, r.controller().DeleteVolume, &csi.DeleteVolumeRequest{VolumeId: id})
	r.clean()
}

// TestInlineOff: when the driver is started without --inline, the inline volumes of running
// pods live on, and go with their pods. The driver leaves a volume of another node alone.
func TestInlineOff(t *testing.T) {
	r := newRig(t)
	others := handle.InlineName("node2", "csi-2")
	if _, err := r.ctl("volume", "create", others, "--replicas", "1", "--quota", "16M"); err != nil {
		t.Fatal(err)
	}
	r.drive(nil)
	bring := func(id, size string) *csi.NodePublishVolumeRequest {
		return &csi.NodePublishVolumeRequest{VolumeId: id, TargetPath: r.path(id), VolumeCapability: capability(manyWriters), VolumeContext: map[string]string{"csi.storage.k8s.io/ephemeral": "true", "size": size}}
	}
	away := func(id string) {
		t.Helper()
		must(t, r.node().NodeUnpublishVolume, &csi.NodeUnpublishVolumeRequest{VolumeId: id, TargetPath: r.path(id)})
	}
	_, err := r.node().NodePublishVolume(t.Context(), bring("csi-3", "101Gi"))
	wants(t, "a volume of more than --inline-max", err, codes.InvalidArgument)
	must(t, r.node().NodePublishVolume, bring("csi-1", "16Mi"))
	must(t, r.node().NodePublishVolume, bring("csi-3", "16Mi"))
	if v := r.volumes(); len(v) != 3 {
		t.Errorf("volumes: %v", v)
	}
	for _, id := range []string{"csi-1", "csi-3"} {
		if err := os.WriteFile(filepath.Join(r.path(id), "f"), nil, 0o644); err != nil {
			t.Error(err)
		}
	}
	away("csi-1")
	if err := r.driver.Stop(30 * time.Second); err != nil {
		t.Error(err)
	}
	r.drive(nil, "--inline=false")
	_, err = r.node().NodePublishVolume(t.Context(), bring("csi-4", "16Mi"))
	wants(t, "a volume of a pod's is served though it is switched off", err, codes.FailedPrecondition)
	away("csi-3")
	away("csi-3")
	if v := r.volumes(); len(v) != 1 || v[0] != others {
		t.Errorf("volumes: %v", v)
	}
	if err := r.driver.Stop(30 * time.Second); err != nil {
		t.Error(err)
	}
	r.drive(nil) // looks for the remains of pods
	if v := r.volumes(); len(v) != 1 || v[0] != others {
		t.Errorf("volumes: %v", v)
	}
	if _, err := r.ctl("volume", "delete", others, "--yes"); err != nil {
		t.Fatal(err)
	}
	r.clean()
}
