package node

import (
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// TestAbandoned: a kubelet looks at a staged mount that no pod has any more, and that
// does not answer, before it has it unstaged. It is not kept waiting. As long as another
// pod has the volume, or asks for it, nothing is taken away.
func TestAbandoned(t *testing.T) {
	const volume = "v"
	for what, wanted := range map[string]bool{"no pod has it": false, "a pod asks for it": true} {
		t.Run(what, func(t *testing.T) {
			t.Parallel()
			s := New(Config{State: t.TempDir(), Name: "node1", Logger: slog.New(slog.DiscardHandler), AbandonAfter: 300 * time.Millisecond})
			s.probes.wait = 100 * time.Millisecond
			dir := t.TempDir()
			staging, a, b := filepath.Join(dir, "staged"), filepath.Join(dir, "a"), filepath.Join(dir, "b")
			if err := os.Mkdir(staging, 0o700); err != nil {
				t.Fatal(err)
			}
			f := s.folderOf(volume, staging)
			if err := f.write(record{Volume: volume, Staging: staging}); err != nil {
				t.Fatal(err)
			}
			dev, err := unix.Open("/dev/fuse", unix.O_RDWR|unix.O_CLOEXEC, 0) // nobody reads from it
			if err != nil {
				t.Fatal(err)
			}
			defer unix.Close(dev)
			if err := unix.Mount("v", staging, "fuse"+kind, 0, fmt.Sprintf("fd=%d,rootmode=40000,user_id=0,group_id=0", dev)); err != nil {
				t.Fatal(err)
			}
			defer unix.Unmount(staging, unix.MNT_DETACH|unix.MNT_FORCE)
			for _, target := range []string{a, b} {
				if err := bind(staging, target, false); err != nil {
					t.Fatal(err)
				}
				defer unix.Unmount(target, unix.MNT_DETACH|unix.MNT_FORCE)
				s.releases.want(volume, target)
			}
			unpublish := func(target string) {
				t.Helper()
				if _, err := s.NodeUnpublishVolume(t.Context(), &csi.NodeUnpublishVolumeRequest{VolumeId: volume, TargetPath: target}); err != nil {
					t.Fatal(err)
				}
			}
			stays := func(why string) {
				t.Helper()
				time.Sleep(4 * s.AbandonAfter)
				if m, err := mountAt(staging); m == nil || err != nil {
					t.Fatalf("%s, and the mount is taken away: %v", why, err)
				}
			}
			unpublish(a)
			stays("a pod has the volume")
			if wanted {
				ask := &csi.NodePublishVolumeRequest{VolumeId: volume, StagingTargetPath: staging, TargetPath: a, VolumeCapability: &csi.VolumeCapability{
					AccessType: &csi.VolumeCapability_Mount{Mount: &csi.VolumeCapability_MountVolume{}},
					AccessMode: &csi.VolumeCapability_AccessMode{Mode: csi.VolumeCapability_AccessMode_MULTI_NODE_MULTI_WRITER},
				}}
				if _, err := s.NodePublishVolume(t.Context(), ask); err == nil {
					t.Fatal("a mount that does not answer is published")
				}
				unpublish(b)
				stays("a pod asks for the volume")
				unpublish(a)
			} else {
				unpublish(b)
			}
			looked := make(chan error, 1)
			go func() { _, err := os.Stat(staging); looked <- err }()
			select {
			case <-looked:
			case <-time.After(30 * time.Second):
				t.Error("who looks at the mount waits for ever")
			}
			for deadline := time.Now().Add(30 * time.Second); ; time.Sleep(endPoll) {
				m, err := mountAt(staging)
				if m == nil && err == nil {
					break
				}
				if err != nil || time.Now().After(deadline) {
					t.Fatalf("the mount stays: %v, %v", m, err)
				}
			}
			for deadline := time.Now().Add(30 * time.Second); ; time.Sleep(endPoll) {
				_, err := s.NodeUnstageVolume(t.Context(), &csi.NodeUnstageVolumeRequest{VolumeId: volume, StagingTargetPath: staging})
				if err == nil {
					break
				}
				if status.Code(err) != codes.Aborted || time.Now().After(deadline) {
					t.Fatal(err)
				}
			}
		})
	}
}
