package csi

import (
	"bytes"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// volume makes a volume and stages the volume.
func (r *rig) staged(name string) (id, staging string) {
	r.t.Helper()
	id = must(r.t, r.controller().CreateVolume, claim(name, nil)).GetVolume().GetVolumeId()
	staging = r.path(name)
	must(r.t, r.node().NodeStageVolume, &csi.NodeStageVolumeRequest{VolumeId: id, StagingTargetPath: staging, VolumeCapability: capability(manyWriters)})
	return id, staging
}

// gone takes a volume away, from its targets, too.
func (r *rig) gone(id, staging string, targets ...string) {
	r.t.Helper()
	for _, p := range targets {
		must(r.t, r.node().NodeUnpublishVolume, &csi.NodeUnpublishVolumeRequest{VolumeId: id, TargetPath: p})
	}
	must(r.t, r.node().NodeUnstageVolume, &csi.NodeUnstageVolumeRequest{VolumeId: id, StagingTargetPath: staging})
	must(r.t, r.controller().DeleteVolume, &csi.DeleteVolumeRequest{VolumeId: id})
}

func publish(id, staging, target string) *csi.NodePublishVolumeRequest {
	return &csi.NodePublishVolumeRequest{VolumeId: id, StagingTargetPath: staging, TargetPath: target, VolumeCapability: capability(manyWriters)}
}

func wants(t *testing.T, what string, err error, code codes.Code) {
	t.Helper()
	if status.Code(err) != code {
		t.Errorf("%s: %v; want %v", what, err, code)
	}
}

// TestTargetsDoNotEscape: a target is a link, a path with .., or a directory with contents where
// a volume should be.
func TestTargetsDoNotEscape(t *testing.T) {
	r := newRig(t)
	r.drive(nil)
	id, staging := r.staged("pvc-1")
	precious := r.path("precious")
	if err := os.MkdirAll(precious, 0o755); err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(precious, "file")
	if err := os.WriteFile(file, []byte("kept"), 0o644); err != nil {
		t.Fatal(err)
	}
	link := r.path("link")
	if err := os.Symlink(precious, link); err != nil {
		t.Fatal(err)
	}
	_, err := r.node().NodePublishVolume(t.Context(), publish(id, staging, link))
	wants(t, "published at a link", err, codes.InvalidArgument)
	_, err = r.node().NodeUnpublishVolume(t.Context(), &csi.NodeUnpublishVolumeRequest{VolumeId: id, TargetPath: link})
	wants(t, "unpublished at a link", err, codes.InvalidArgument)
	_, err = r.node().NodeUnpublishVolume(t.Context(), &csi.NodeUnpublishVolumeRequest{VolumeId: id, TargetPath: precious})
	if err == nil {
		t.Error("unpublished where something else lies")
	}
	for _, p := range []string{"relative", r.path("a") + "/../b", "/..", "/", r.dir + "//x", r.path("a") + "/."} {
		_, err := r.node().NodePublishVolume(t.Context(), publish(id, staging, p))
		wants(t, "published at "+p, err, codes.InvalidArgument)
		_, err = r.node().NodeUnpublishVolume(t.Context(), &csi.NodeUnpublishVolumeRequest{VolumeId: id, TargetPath: p})
		wants(t, "unpublished at "+p, err, codes.InvalidArgument)
		_, err = r.node().NodeStageVolume(t.Context(), &csi.NodeStageVolumeRequest{VolumeId: id, StagingTargetPath: p, VolumeCapability: capability(manyWriters)})
		wants(t, "staged at "+p, err, codes.InvalidArgument)
	}
	if b, err := os.ReadFile(file); err != nil || string(b) != "kept" {
		t.Errorf("DATA: the file reads %q, %v", b, err)
	}
	if got := r.mounts(); !slices.Equal(got, []string{staging}) {
		t.Errorf("mounted: %v", got)
	}

	// A directory above the target may be a link, as a kubelet's often is.
	if err := os.Mkdir(r.path("real"), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(r.path("real"), r.path("kubelet")); err != nil {
		t.Fatal(err)
	}
	pod := r.path("kubelet", "pod")
	for range 2 {
		must(t, r.node().NodePublishVolume, publish(id, staging, pod))
	}
	if got := r.mounts(); !slices.Contains(got, r.path("real", "pod")) || len(got) != 2 {
		t.Errorf("mounted: %v", got)
	}
	r.gone(id, staging, pod)
	r.clean()
}

// TestNothingIsWiped: a volume that is published twice, also by another program on top of the
// first mount, keeps its contents, whichever target is unpublished how often.
func TestNothingIsWiped(t *testing.T) {
	r := newRig(t)
	r.drive(nil)
	id, staging := r.staged("pvc-1")
	target := r.path("pod")
	must(t, r.node().NodePublishVolume, publish(id, staging, target))
	if err := os.WriteFile(filepath.Join(target, "f"), []byte("kept"), 0o644); err != nil {
		t.Fatal(err)
	}
	if err := os.MkdirAll(filepath.Join(target, "d", "e"), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mount(staging, target, "", unix.MS_BIND, ""); err != nil { // a second layer
		t.Fatal(err)
	}
	for range 3 {
		must(t, r.node().NodeUnpublishVolume, &csi.NodeUnpublishVolumeRequest{VolumeId: id, TargetPath: target})
	}
	if _, err := os.Lstat(target); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("the target is still there: %v", err)
	}
	if b, err := os.ReadFile(filepath.Join(staging, "f")); err != nil || string(b) != "kept" {
		t.Errorf("DATA: the file reads %q, %v", b, err)
	}
	if _, err := os.Stat(filepath.Join(staging, "d", "e")); err != nil {
		t.Error(err)
	}
	// While a pod has the volume, the volume is not unstaged.
	must(t, r.node().NodePublishVolume, publish(id, staging, target))
	_, err := r.node().NodeUnstageVolume(t.Context(), &csi.NodeUnstageVolumeRequest{VolumeId: id, StagingTargetPath: staging})
	wants(t, "unstaged under a pod", err, codes.FailedPrecondition)
	if _, err := os.ReadFile(filepath.Join(target, "f")); err != nil {
		t.Error(err)
	}
	r.gone(id, staging, target)
	r.clean()
}

// TestOthersVolumes: the driver touches no volume of another maker, and no volume of another
// cluster.
func TestOthersVolumes(t *testing.T) {
	r := newRig(t)
	r.drive(nil)
	if _, err := r.ctl("volume", "create", "datasets"); err != nil {
		t.Fatal(err)
	}
	mine := must(t, r.controller().CreateVolume, claim("datasets", nil)).GetVolume().GetVolumeId() // has nothing to do with the other volume
	for _, id := range []string{"name=datasets", "v1-00000000-000002-00000000", strings.Replace(mine, "v1-", "v1-0", 1)} {
		_, err := r.controller().ControllerExpandVolume(t.Context(), &csi.ControllerExpandVolumeRequest{VolumeId: id, CapacityRange: &csi.CapacityRange{RequiredBytes: 1 << 40}})
		if c := status.Code(err); c != codes.FailedPrecondition && c != codes.NotFound {
			t.Errorf("expanded %s: %v", id, err)
		}
	}
	_, err := r.controller().DeleteVolume(t.Context(), &csi.DeleteVolumeRequest{VolumeId: "name=datasets"})
	wants(t, "deleted by name", err, codes.FailedPrecondition)
	// Anybody may compute a sum.
	_, err = r.controller().DeleteVolume(t.Context(), &csi.DeleteVolumeRequest{VolumeId: rehandle(mine, func(n uint32) uint32 { return n - 1 })})
	wants(t, "deleted by number", err, codes.FailedPrecondition)
	_, err = r.controller().DeleteVolume(t.Context(), &csi.DeleteVolumeRequest{VolumeId: rehandle(mine, func(uint32) uint32 { return 1 })})
	wants(t, "deleted the root", err, codes.FailedPrecondition)
	if v := r.volumes(); !slices.Contains(v, "datasets") || !slices.Contains(v, "csi-datasets") {
		t.Errorf("volumes: %v", v)
	}
	// The volume can be mounted by its name, which an administrator wrote.
	stage := &csi.NodeStageVolumeRequest{VolumeId: "name=datasets", StagingTargetPath: r.path("s"), VolumeCapability: capability(manyReaders)}
	must(t, r.node().NodeStageVolume, stage)
	p := publish("name=datasets", r.path("s"), r.path("pod"))
	p.VolumeCapability = capability(manyReaders)
	must(t, r.node().NodePublishVolume, p)
	if err := os.WriteFile(r.path("pod", "f"), nil, 0o644); !errors.Is(err, unix.EROFS) {
		t.Errorf("a reader writes: %v", err)
	}
	must(t, r.node().NodeUnpublishVolume, &csi.NodeUnpublishVolumeRequest{VolumeId: "name=datasets", TargetPath: r.path("pod")})
	must(t, r.node().NodeUnstageVolume, &csi.NodeUnstageVolumeRequest{VolumeId: "name=datasets", StagingTargetPath: r.path("s")})
	must(t, r.controller().DeleteVolume, &csi.DeleteVolumeRequest{VolumeId: mine})
	if _, err := r.ctl("volume", "delete", "datasets", "--yes"); err != nil {
		t.Fatal(err)
	}
	r.clean()
}

// TestSecretsAreNotTold: values given as secrets, or given where no secret belongs, are in no
// log at the highest verbosity, in no state and on no command line.
func TestSecretsAreNotTold(t *testing.T) {
	const secret = "hunter2-4f1c"
	r := newRig(t)
	r.drive(nil)
	secrets := map[string]string{"token": secret}
	q := claim("pvc-1", nil)
	q.Secrets = secrets
	id := must(t, r.controller().CreateVolume, q).GetVolume().GetVolumeId()
	for _, p := range []map[string]string{{"password": secret}, {"subDir": "../" + secret}} {
		bad := claim("pvc-2", p)
		bad.Secrets = secrets
		_, err := r.controller().CreateVolume(t.Context(), bad)
		wants(t, "an unknown parameter", err, codes.InvalidArgument)
		if strings.Contains(err.Error(), secret) {
			t.Errorf("the answer tells it: %v", err)
		}
	}
	for _, known := range []string{"class", "topology", "topologyLevel", "volumeNamePrefix", "attachPath", "replicas", "spread", "inodes", "compression", "maxChunk", "trash", "advisoryQuota", "encrypt", "noatime"} {
		_, err := r.controller().CreateVolume(t.Context(), claim("pvc-2", map[string]string{known: secret + "="}))
		wants(t, "a secret as "+known, err, codes.InvalidArgument)
		if !strings.Contains(err.Error(), known) || strings.Contains(err.Error(), secret) {
			t.Errorf("the answer about %s: %v", known, err)
		}
	}
	_, err := r.controller().ControllerModifyVolume(t.Context(), &csi.ControllerModifyVolumeRequest{VolumeId: id, Secrets: secrets, MutableParameters: map[string]string{"key": secret}})
	wants(t, "an unknown change", err, codes.InvalidArgument)
	staging, target := r.path("s"), r.path("pod")
	context := map[string]string{"user": secret}
	_, err = r.node().NodeStageVolume(t.Context(), &csi.NodeStageVolumeRequest{VolumeId: id, StagingTargetPath: staging, VolumeCapability: capability(manyWriters, "password="+secret), Secrets: secrets})
	wants(t, "an unknown option", err, codes.InvalidArgument)
	must(t, r.node().NodeStageVolume, &csi.NodeStageVolumeRequest{VolumeId: id, StagingTargetPath: staging, VolumeCapability: capability(manyWriters), VolumeContext: context, PublishContext: context, Secrets: secrets})
	p := publish(id, staging, target)
	p.Secrets, p.VolumeContext, p.PublishContext = secrets, context, context
	must(t, r.node().NodePublishVolume, p)
	_, err = r.node().NodePublishVolume(t.Context(), &csi.NodePublishVolumeRequest{VolumeId: "csi-1", TargetPath: r.path("pod2"), VolumeCapability: capability(manyWriters), VolumeContext: map[string]string{"csi.storage.k8s.io/ephemeral": "true", "password": secret}, Secrets: secrets})
	wants(t, "an inline volume's unknown attribute", err, codes.InvalidArgument)
	for _, line := range r.processes() {
		if strings.Contains(line, secret) {
			t.Errorf("a command line tells it: %s", line)
		}
	}
	// All files of logs and state, while everything is mounted.
	looked := 0
	err = filepath.WalkDir(r.dir, func(name string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if d.IsDir() && (name == staging || name == target || name == r.path("m") || name == r.path("c")) {
			return filepath.SkipDir
		}
		if !d.Type().IsRegular() {
			return nil
		}
		b, err := os.ReadFile(name)
		if err != nil {
			return err
		}
		looked++
		if bytes.Contains(b, []byte(secret)) {
			t.Errorf("%s tells it", name)
		}
		return nil
	})
	if err != nil || looked < 4 {
		t.Errorf("looked at %d files, %v", looked, err)
	}
	if b, err := os.ReadFile(r.path("log")); err != nil || !bytes.Contains(b, []byte(`"method":"NodeStageVolume"`)) {
		t.Errorf("the log has no calls: %v", err)
	}
	r.gone(id, staging, target)
	r.clean()
}

// TestDriverIsKilled: a pod writes and reads on while the driver is killed and another driver
// takes its place.
func TestDriverIsKilled(t *testing.T) {
	r := newRig(t)
	r.drive(nil)
	id, staging := r.staged("pvc-1")
	target := r.path("pod")
	must(t, r.node().NodePublishVolume, publish(id, staging, target))
	var writes atomic.Int64
	stop := make(chan struct{})
	var pod sync.WaitGroup
	pod.Go(func() {
		f, err := os.Create(filepath.Join(target, "f"))
		if err != nil {
			t.Error(err)
			return
		}
		defer f.Close()
		for n := 0; ; n++ {
			select {
			case <-stop:
				return
			default:
			}
			b := []byte{byte(n)}
			if _, err := f.WriteAt(b, int64(n%4096)); err != nil {
				t.Errorf("write %d: %v", n, err)
				return
			}
			if _, err := f.ReadAt(b, int64(n%4096)); err != nil || b[0] != byte(n) {
				t.Errorf("read %d: %d, %v", n, b[0], err)
				return
			}
			writes.Add(1)
		}
	})
	more := func() {
		t.Helper()
		from := writes.Load()
		r.until("the pod goes on", func() error {
			if t.Failed() || writes.Load() < from+10 {
				return errors.New("it does not")
			}
			return nil
		})
	}
	for range 3 {
		more()
		r.driver.Kill()
		more()
		r.drive(nil)
		must(t, r.node().NodeStageVolume, &csi.NodeStageVolumeRequest{VolumeId: id, StagingTargetPath: staging, VolumeCapability: capability(manyWriters)})
		must(t, r.node().NodePublishVolume, publish(id, staging, target))
	}
	more()
	close(stop)
	pod.Wait()
	if got := r.mounts(); len(got) != 2 {
		t.Errorf("mounted: %v", got)
	}
	r.gone(id, staging, target)
	r.clean()
}

// TestDeadMount: the process that serves a volume is killed. The volume's health reports the end.
// Publishing the volume to another pod, or again to the same pod, mends the mount, and the synced
// bytes are readable.
func TestDeadMount(t *testing.T) {
	r := newRig(t)
	r.drive(nil)
	id, staging := r.staged("pvc-1")
	target := r.path("pod")
	must(t, r.node().NodePublishVolume, publish(id, staging, target))
	f, err := os.Create(filepath.Join(target, "f"))
	if err != nil {
		t.Fatal(err)
	}
	if _, err = f.WriteString("synced"); err == nil {
		err = f.Sync()
	}
	if err != nil {
		t.Fatal(err)
	}
	f.Close()
	health := &csi.NodeGetVolumeHealthRequest{VolumeId: id, StagingTargetPath: staging, VolumePublishPath: target}
	if h := must(t, r.node().NodeGetVolumeHealth, health).GetVolumeHealth().GetHealthStatuses(); len(h) > 0 {
		t.Errorf("a healthy volume: %v", h)
	}
	for _, line := range r.processes() {
		pid := strings.Split(line, "/")[2]
		if err := syscall.Kill(atoi(t, pid), syscall.SIGKILL); err != nil {
			t.Fatal(err)
		}
	}
	r.until("its health tells", func() error {
		h := must(t, r.node().NodeGetVolumeHealth, health).GetVolumeHealth().GetHealthStatuses()
		if len(h) != 1 || h[0].GetStatus() != csi.VolumeHealthErrorType_INACCESSIBLE {
			return errors.New("it is said to be healthy")
		}
		return nil
	})
	if _, err := r.node().NodeGetVolumeStats(t.Context(), &csi.NodeGetVolumeStatsRequest{VolumeId: id, VolumePath: target}); err == nil {
		t.Error("a dead mount has statistics")
	}
	// A kubelet does not repeat a staging: a pod that comes has the volume mounted again.
	next := r.path("next")
	again(r, r.node().NodePublishVolume, publish(id, staging, next))
	if b, err := os.ReadFile(filepath.Join(next, "f")); err != nil || string(b) != "synced" {
		t.Errorf("the file of the next pod reads %q, %v", b, err)
	}
	again(r, r.node().NodeStageVolume, &csi.NodeStageVolumeRequest{VolumeId: id, StagingTargetPath: staging, VolumeCapability: capability(manyWriters)})
	again(r, r.node().NodePublishVolume, publish(id, staging, target))
	if b, err := os.ReadFile(filepath.Join(target, "f")); err != nil || string(b) != "synced" {
		t.Errorf("DATA: the file reads %q, %v", b, err)
	}
	if h := must(t, r.node().NodeGetVolumeHealth, health).GetVolumeHealth().GetHealthStatuses(); len(h) > 0 {
		t.Errorf("a mended volume: %v", h)
	}
	r.gone(id, staging, target, next)
	r.clean()
}
