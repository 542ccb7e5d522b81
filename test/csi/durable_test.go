package csi

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"penstock.io/penstock/cmd/penstock/spawn"
	"penstock.io/penstock/test/program"
)

// writes has a pod write a file, close the file and go. Nothing is synced.
func (r *rig) writes(target, name string) (want []byte) {
	r.t.Helper()
	want = bytes.Repeat([]byte("written, not synced. "), 5000)
	if err := os.WriteFile(filepath.Join(target, name), want, 0o644); err != nil {
		r.t.Fatal(err)
	}
	return want
}

// stays demands that an unstaging fails while bytes are not durable, and that the state stays.
func (r *rig) stays(when, id, staging string) {
	r.t.Helper()
	ctx, cancel := context.WithTimeout(r.t.Context(), 3*time.Second)
	defer cancel()
	_, err := r.node().NodeUnstageVolume(ctx, &csi.NodeUnstageVolumeRequest{VolumeId: id, StagingTargetPath: staging})
	if c := status.Code(err); c != codes.Unavailable && c != codes.Aborted && c != codes.DeadlineExceeded {
		r.t.Fatalf("DATA: %s, unstaged while what was written is not durable: %v", when, err)
	}
	r.t.Logf("%s: %v", when, err)
	if l, _ := os.ReadDir(r.path("state", "volumes")); len(l) != 1 {
		r.t.Fatalf("DATA: %s, the driver's state is gone: %v", when, l)
	}
}

// TestUnstageWaits: chunk servers stand still after a pod has written, closed and ended. While
// they stand still, the pod's volume is not unstaged, whichever process is killed: the driver,
// or, with a holder, the mount's process, before and after the mount was taken away. When the
// chunk servers go on, all bytes are there.
func TestUnstageWaits(t *testing.T) {
	for _, held := range []bool{false, true} {
		t.Run(fmt.Sprint("held ", held), func(t *testing.T) {
			r := newRig(t)
			if held {
				r.held("--patience", "2s")
			}
			r.drive(nil)
			id, staging := r.staged("pvc-1")
			target := r.path("a")
			must(t, r.node().NodePublishVolume, publish(id, staging, target))
			r.halt(r.chunks.PID())
			goOn := func() { _ = syscall.Kill(r.chunks.PID(), syscall.SIGCONT) }
			t.Cleanup(goOn)
			want := r.writes(target, "f")
			must(t, r.node().NodeUnpublishVolume, &csi.NodeUnpublishVolumeRequest{VolumeId: id, TargetPath: target})
			r.stays("the first call", id, staging)
			r.driver.Kill()
			r.drive(nil)
			r.stays("another driver", id, staging)
			if held {
				if err := syscall.Kill(r.server(), syscall.SIGKILL); err != nil {
					t.Fatal(err)
				}
				r.stays("the mount's process is killed", id, staging)
			}
			// An unmount takes the mount away, as a driver would that is killed then.
			unmounted := make(chan error, 1)
			go func() { unmounted <- unix.Unmount(staging, unix.MNT_DETACH) }()
			r.until("the mount is taken away", func() error {
				if m := r.mounts(); len(m) > 0 {
					return fmt.Errorf("%v", m)
				}
				return nil
			})
			r.driver.Kill()
			if held {
				for _, p := range r.processes() {
					var pid int
					if _, err := fmt.Sscanf(p, "/proc/%d/", &pid); err == nil {
						_ = syscall.Kill(pid, syscall.SIGKILL)
					}
				}
			}
			r.drive(nil)
			r.stays("everything is killed", id, staging)
			goOn()
			again(r, r.node().NodeUnstageVolume, &csi.NodeUnstageVolumeRequest{VolumeId: id, StagingTargetPath: staging})
			<-unmounted
			if held {
				r.nothingHeld()
			}
			must(t, r.node().NodeStageVolume, &csi.NodeStageVolumeRequest{VolumeId: id, StagingTargetPath: staging, VolumeCapability: capability(manyWriters)})
			must(t, r.node().NodePublishVolume, publish(id, staging, target))
			if got, err := os.ReadFile(filepath.Join(target, "f")); err != nil || !bytes.Equal(got, want) {
				t.Errorf("DATA: %d bytes of %d are there after the volume was unstaged: %v", len(got), len(want), err)
			}
			r.gone(id, staging, target)
			r.clean()
		})
	}
}

// TestUnmetPolicyKeepsBytes: a volume has a policy that the cluster can't meet, so no bytes that
// a pod writes become durable. The volume is not unstaged, and umount(8) does not return, until
// an operator sets a weaker policy; then all bytes are in the volume.
func TestUnmetPolicyKeepsBytes(t *testing.T) {
	r := newRig(t)
	r.drive(nil)
	id, staging := r.staged("pvc-1")
	target, at := r.path("a"), r.path("mnt")
	must(t, r.node().NodePublishVolume, publish(id, staging, target))
	if err := os.Mkdir(at, 0o755); err != nil {
		t.Fatal(err)
	}
	mount := r.start(nil, "mount", "--cluster", r.cluster(), "csi-pvc-1:/", at)
	r.until("it is mounted", func() error {
		if !spawn.Mounted(at) {
			return errors.New("not yet")
		}
		return nil
	})
	if out, err := r.ctl("volume", "set", "csi-pvc-1", "--replicas", "2", "--min-replicas", "2", "--force"); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	// A reported loss is not silent: a write may have met the loss by then.
	write := func(dir, name string) []byte {
		want := bytes.Repeat([]byte(name+" is written, not synced. "), 5000)
		if err := os.WriteFile(filepath.Join(dir, name), want, 0o644); err != nil && !errors.Is(err, syscall.ENOSPC) {
			t.Fatal(err)
		}
		return want
	}
	want := map[string][]byte{"f": write(target, "f"), "g": write(at, "g")}
	must(t, r.node().NodeUnpublishVolume, &csi.NodeUnpublishVolumeRequest{VolumeId: id, TargetPath: target})
	unmounted := make(chan error, 1)
	go func() { unmounted <- exec.Command("umount", at).Run() }()
	for i := range 2 {
		r.stays(fmt.Sprint("call ", i), id, staging)
	}
	select {
	case err := <-unmounted:
		t.Fatalf("DATA: umount returned while what was written is not durable: %v", err)
	default:
	}
	if out, err := r.ctl("volume", "set", "csi-pvc-1", "--replicas", "1", "--min-replicas", "1"); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	again(r, r.node().NodeUnstageVolume, &csi.NodeUnstageVolumeRequest{VolumeId: id, StagingTargetPath: staging})
	if err := <-unmounted; err != nil {
		t.Errorf("umount: %v", err)
	}
	<-mount.Done()
	must(t, r.node().NodeStageVolume, &csi.NodeStageVolumeRequest{VolumeId: id, StagingTargetPath: staging, VolumeCapability: capability(manyWriters)})
	must(t, r.node().NodePublishVolume, publish(id, staging, target))
	for name, want := range want {
		if got, err := os.ReadFile(filepath.Join(target, name)); err != nil || !bytes.Equal(got, want) {
			t.Errorf("DATA: %d bytes of %d of %s are there: %v", len(got), len(want), name, err)
		}
	}
	r.gone(id, staging, target)
	r.clean()
}

// TestAbandonIsTold: an operator gives up bytes that were written through one of several handles
// of a file, in a mount that goes on. Each handle hears of the loss, whichever handle wrote: one
// fsync fails, and so does each close of the handle's descriptors before the fsync. A handle that
// is opened later hears nothing; a write never fails. An fsync that waits for the servers during
// the loss fails, and its handle hears nothing more.
func TestAbandonIsTold(t *testing.T) {
	r := newRig(t)
	r.drive(nil)
	id, staging := r.staged("pvc-1")
	target := r.path("a")
	must(t, r.node().NodePublishVolume, publish(id, staging, target))
	open := func(name string) int {
		t.Helper()
		fd, err := unix.Open(filepath.Join(target, name), unix.O_RDWR|unix.O_CREAT, 0o644)
		if err != nil {
			t.Fatal(err)
		}
		return fd
	}
	tells := func(what string, err, want error) {
		t.Helper()
		if err != want {
			t.Errorf("DATA: %s tells %v, not %v", what, err, want)
		}
	}
	wrote, other, waiting := open("f"), open("f"), open("g")
	tells("fsync before", unix.Fsync(wrote), nil)
	r.halt(r.chunks.PID())
	goOn := func() { _ = syscall.Kill(r.chunks.PID(), syscall.SIGCONT) }
	t.Cleanup(goOn)
	for _, fd := range []int{wrote, waiting} {
		if n, err := unix.Write(fd, bytes.Repeat([]byte("written, not synced. "), 5000)); err != nil {
			t.Fatal(n, err)
		}
	}
	waited := make(chan error, 1)
	go func() { waited <- unix.Fsync(waiting) }()
	out, err := exec.CommandContext(t.Context(), program.Path, "client", "abandon", staging, "--yes", "--state-dir", r.path("state")).CombinedOutput()
	if err != nil {
		t.Fatalf("abandon: %v: %s", err, out)
	}
	r.until("health tells", func() error {
		// The status says whether all is well.
		said, _ := exec.CommandContext(t.Context(), program.Path, "health", "--cluster", r.cluster()).CombinedOutput()
		if !strings.Contains(string(said), "volume csi-pvc-1: has files as they were synced last: an operator gave up") {
			return fmt.Errorf("%s", said)
		}
		return nil
	})
	dup, err := unix.Dup(wrote)
	if err != nil {
		t.Fatal(err)
	}
	tells("close of a second descriptor", unix.Close(dup), unix.EIO)
	tells("fsync through the handle that wrote", unix.Fsync(wrote), unix.EIO)
	tells("the next one", unix.Fsync(wrote), nil)
	tells("fsync through another handle", unix.Fsync(other), unix.EIO)
	tells("an fsync that waited, or comes now", <-waited, unix.EIO)
	late, later := open("f"), open("g")
	tells("fsync through a handle that was opened later", unix.Fsync(late), nil)
	tells("fsync through a handle that was opened after an fsync was told that waited", unix.Fsync(later), nil)
	goOn()
	for _, fd := range []int{wrote, other, late, waiting, later} {
		_, err := unix.Write(fd, []byte("written later"))
		tells("write", err, nil)
		tells("fsync of what was written later", unix.Fsync(fd), nil)
		tells("close", unix.Close(fd), nil)
	}
	r.gone(id, staging, target)
	r.clean()
}

// TestAbandon: the chunk server will not come back, and an operator gives up the last bytes that
// a pod wrote: through the mount's process, or through the holder without such a process and
// without a cluster.
func TestAbandon(t *testing.T) {
	for _, by := range []string{"process", "holder"} {
		t.Run(by, func(t *testing.T) {
			r := newRig(t)
			r.held("--patience", "2s")
			r.drive(nil)
			id, staging := r.staged("pvc-1")
			target := r.path("a")
			must(t, r.node().NodePublishVolume, publish(id, staging, target))
			r.halt(r.chunks.PID())
			goOn := func() { _ = syscall.Kill(r.chunks.PID(), syscall.SIGCONT) }
			t.Cleanup(goOn)
			want := r.writes(target, "f")
			must(t, r.node().NodeUnpublishVolume, &csi.NodeUnpublishVolumeRequest{VolumeId: id, TargetPath: target})
			if by == "holder" {
				r.meta.Kill()
				if err := syscall.Kill(r.server(), syscall.SIGKILL); err != nil {
					t.Fatal(err)
				}
			}
			r.stays("the first call", id, staging)
			client := func(args ...string) string {
				cmd := exec.CommandContext(t.Context(), program.Path, append([]string{"client"}, append(args, "--state-dir", r.path("state"), "--hold", r.hold)...)...)
				out, err := cmd.CombinedOutput()
				if _, exit := errors.AsType[*exec.ExitError](err); err != nil && !exit {
					t.Fatal(err)
				}
				return string(out)
			}
			if said := client("unsynced"); !strings.Contains(said, staging) || !strings.Contains(said, fmt.Sprint(len(want))) {
				t.Errorf("unsynced says:\n%s", said)
			}
			if said := client("abandon", staging); !strings.Contains(said, "--yes") || !strings.Contains(said, fmt.Sprint(len(want))) {
				t.Errorf("abandon without a word of consent says:\n%s", said)
			}
			r.stays("nothing was given up yet", id, staging)
			if said := client("abandon", staging, "--yes"); !strings.Contains(said, fmt.Sprintf("gave up %d bytes of 1 files", len(want))) {
				t.Errorf("abandon says:\n%s", said)
			}
			again(r, r.node().NodeUnstageVolume, &csi.NodeUnstageVolumeRequest{VolumeId: id, StagingTargetPath: staging})
			r.nothingHeld()
			goOn()
			if by == "holder" {
				r.startMeta()
				r.hasChunkServer()
			}
			must(t, r.controller().DeleteVolume, &csi.DeleteVolumeRequest{VolumeId: id})
			r.clean()
		})
	}
}

// TestKilledPodEnds: chunk servers stand still. A pod whose claim has a class with
// sync-on-close has written to an open file, and is killed. The pod ends, although the kill
// closed the file and the written bytes can't be made durable.
func TestKilledPodEnds(t *testing.T) {
	r := newRig(t)
	r.drive(nil)
	id := must(t, r.controller().CreateVolume, claim("pvc-1", map[string]string{"syncOnClose": "true"})).GetVolume().GetVolumeId()
	staging, target := r.path("pvc-1"), r.path("a")
	must(t, r.node().NodeStageVolume, &csi.NodeStageVolumeRequest{VolumeId: id, StagingTargetPath: staging, VolumeCapability: capability(manyWriters)})
	must(t, r.node().NodePublishVolume, publish(id, staging, target))
	r.halt(r.chunks.PID())
	goOn := func() { _ = syscall.Kill(r.chunks.PID(), syscall.SIGCONT) }
	t.Cleanup(goOn)
	// The pod is killed while the file is open, in no write and no close.
	pod := exec.Command("sh", "-c", `exec 1>f; printf %0300000d 1; kill -STOP $$`)
	pod.Dir = target
	if err := pod.Start(); err != nil {
		t.Fatal(err)
	}
	for end := time.Now().Add(60 * time.Second); ; time.Sleep(10 * time.Millisecond) {
		if i, err := os.Stat(filepath.Join(target, "f")); err == nil && i.Size() == 300_000 {
			break
		} else if time.Now().After(end) {
			t.Fatal("nothing was written: ", err)
		}
	}
	began := time.Now()
	_ = pod.Process.Kill()
	ended := make(chan error, 1)
	go func() { ended <- pod.Wait() }()
	select {
	case err := <-ended:
		t.Logf("it ended after %v: %v", time.Since(began), err)
	case <-time.After(60 * time.Second):
		t.Errorf("it has not ended for %v", time.Since(began))
	}
	goOn()
	r.gone(id, staging, target)
	r.clean()
}
