package csi

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
)

// TestVolumeHealth: the controller reports a volume whose quota is nearly used up, until the
// quota has room again, and reports no other volume.
func TestVolumeHealth(t *testing.T) {
	r := newRig(t)
	r.drive(nil)
	q := claim("pvc-1", map[string]string{"sealOnClose": "true", "inodes": "20"})
	id := must(t, r.controller().CreateVolume, q).GetVolume().GetVolumeId()
	well := must(t, r.controller().CreateVolume, claim("pvc-2", nil)).GetVolume().GetVolumeId()
	at := r.path("s")
	must(t, r.node().NodeStageVolume, &csi.NodeStageVolumeRequest{VolumeId: id, StagingTargetPath: at, VolumeCapability: capability(manyWriters)})
	told := func(want map[string]csi.VolumeHealthErrorType) {
		t.Helper()
		r.until(fmt.Sprint("its health is ", want), func() error {
			h := must(t, r.controller().ControllerGetVolumeHealth, &csi.ControllerGetVolumeHealthRequest{VolumeId: id}).GetVolumeHealth().GetHealthStatuses()
			l := must(t, r.controller().ControllerListVolumeHealth, &csi.ControllerListVolumeHealthRequest{}).GetEntries()
			for _, e := range h {
				if is, expected := want[e.GetReason()]; !expected || is != e.GetStatus() {
					return fmt.Errorf("%v", h)
				}
			}
			if len(h) != len(want) || len(l) != min(len(want), 1) || len(l) == 1 && l[0].GetVolumeId() != id {
				return fmt.Errorf("%v, listed: %v", h, l)
			}
			return nil
		})
	}
	const degraded = csi.VolumeHealthErrorType_DEGRADED
	told(nil)
	for i := range 18 {
		if err := os.WriteFile(filepath.Join(at, fmt.Sprint("f", i)), make([]byte, 64<<10), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	told(map[string]csi.VolumeHealthErrorType{"InodesNearlyUsedUp": degraded})
	for i := range 10 {
		if err := os.Remove(filepath.Join(at, fmt.Sprint("f", i))); err != nil {
			t.Fatal(err)
		}
	}
	told(nil)
	if h := must(t, r.controller().ControllerGetVolumeHealth, &csi.ControllerGetVolumeHealthRequest{VolumeId: well}).GetVolumeHealth().GetHealthStatuses(); len(h) != 0 {
		t.Errorf("of a volume that nobody used: %v", h)
	}
	must(t, r.controller().DeleteVolume, &csi.DeleteVolumeRequest{VolumeId: well})
	_, err := r.controller().ControllerGetVolumeHealth(t.Context(), &csi.ControllerGetVolumeHealthRequest{VolumeId: well})
	wants(t, "the health of a volume that is gone", err, codes.NotFound)
	r.gone(id, at)
	r.clean()
}

// TestTrash: a claim that was deleted by mistake is taken back with its contents. The class of
// the claim sets the terms.
func TestTrash(t *testing.T) {
	r := newRig(t)
	r.drive(nil)
	q := claim("pvc-1", map[string]string{"trash": "1h", "maxChunk": "64Mi", "advisoryQuota": "32Mi", "advisoryInodes": "100"})
	id := must(t, r.controller().CreateVolume, q).GetVolume().GetVolumeId()
	if again := must(t, r.controller().CreateVolume, q).GetVolume().GetVolumeId(); again != id {
		t.Errorf("made twice: %s, %s", id, again)
	}
	type terms struct {
		MaxChunk       uint64 `json:"max_chunk"`
		TrashSeconds   uint64 `json:"trash_seconds"`
		AdvisoryBytes  uint64 `json:"advisory_bytes"`
		AdvisoryInodes uint64 `json:"advisory_inodes"`
	}
	show := func(want terms) {
		t.Helper()
		var got terms
		out, err := r.ctl("volume", "show", "csi-pvc-1", "--output", "json")
		if err == nil {
			err = json.Unmarshal(out, &got)
		}
		if err != nil || got != want {
			t.Errorf("%+v, %v; want %+v", got, err, want)
		}
	}
	show(terms{64 << 20, 3600, 32 << 20, 100})
	must(t, r.controller().ControllerModifyVolume, &csi.ControllerModifyVolumeRequest{VolumeId: id, MutableParameters: map[string]string{"trash": "2h", "advisoryInodes": "0"}})
	show(terms{64 << 20, 7200, 32 << 20, 0})
	stage := func(id, at string) *csi.NodeStageVolumeRequest {
		return &csi.NodeStageVolumeRequest{VolumeId: id, StagingTargetPath: r.path(at), VolumeCapability: capability(manyWriters)}
	}
	must(t, r.node().NodeStageVolume, stage(id, "s"))
	if err := os.WriteFile(r.path("s", "f"), []byte("kept"), 0o644); err != nil {
		t.Fatal(err)
	}
	must(t, r.node().NodeUnstageVolume, &csi.NodeUnstageVolumeRequest{VolumeId: id, StagingTargetPath: r.path("s")})
	for range 2 {
		must(t, r.controller().DeleteVolume, &csi.DeleteVolumeRequest{VolumeId: id})
	}
	if l := must(t, r.controller().ListVolumes, &csi.ListVolumesRequest{}).GetEntries(); len(l) != 0 || slices.Contains(r.volumes(), "csi-pvc-1") {
		t.Errorf("a deleted volume is listed: %v, %v", l, r.volumes())
	}
	if _, err := r.ctl("volume", "undelete", "csi-pvc-1"); err != nil {
		t.Fatal(err)
	}
	must(t, r.node().NodeStageVolume, stage("name=csi-pvc-1", "t"))
	if b, err := os.ReadFile(r.path("t", "f")); err != nil || string(b) != "kept" {
		t.Errorf("DATA: taken back it reads %q, %v", b, err)
	}
	must(t, r.node().NodeUnstageVolume, &csi.NodeUnstageVolumeRequest{VolumeId: "name=csi-pvc-1", StagingTargetPath: r.path("t")})
	if _, err := r.ctl("volume", "delete", "csi-pvc-1", "--now", "--yes"); err != nil {
		t.Fatal(err)
	}
	r.clean()
}
