package csi

import (
	"os"
	"slices"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
)

func (r *rig) groups() csi.GroupControllerClient { return csi.NewGroupControllerClient(r.conn) }

// deletion is the request of an orchestrator to delete a group.
func deletion(g *csi.VolumeGroupSnapshot) *csi.DeleteVolumeGroupSnapshotRequest {
	q := &csi.DeleteVolumeGroupSnapshotRequest{GroupSnapshotId: g.GetGroupSnapshotId()}
	for _, x := range g.GetSnapshots() {
		q.SnapshotIds = append(q.SnapshotIds, x.GetSnapshotId())
	}
	return q
}

// TestGroupOfSnapshots: a group of snapshots has two volumes at one moment. The group is
// listed, volumes are made of its snapshots, and the group is deleted as a whole.
func TestGroupOfSnapshots(t *testing.T) {
	r := newRig(t)
	r.drive(nil)
	var ids, stagings []string
	put := func(text string) {
		t.Helper()
		for _, at := range stagings {
			if err := os.WriteFile(at+"/f", []byte(text), 0o644); err != nil {
				t.Fatal(err)
			}
		}
	}
	for _, name := range []string{"pvc-data", "pvc-log"} {
		id, _ := r.staged(name)
		ids, stagings = append(ids, id), append(stagings, r.path(name))
	}
	put("then")
	q := &csi.CreateVolumeGroupSnapshotRequest{Name: "g", SourceVolumeIds: ids}
	g := must(t, r.groups().CreateVolumeGroupSnapshot, q).GetGroupSnapshot()
	put("now")
	q.SourceVolumeIds = []string{ids[1], ids[0]}
	if twice := must(t, r.groups().CreateVolumeGroupSnapshot, q).GetGroupSnapshot(); twice.String() != g.String() {
		t.Errorf("asked for twice: %v, then %v", g, twice)
	}
	get := &csi.GetVolumeGroupSnapshotRequest{GroupSnapshotId: g.GetGroupSnapshotId(), SnapshotIds: deletion(g).GetSnapshotIds()}
	if got := must(t, r.groups().GetVolumeGroupSnapshot, get).GetGroupSnapshot(); got.String() != g.String() {
		t.Errorf("got %v, want %v", got, g)
	}
	if !g.GetReadyToUse() || len(g.GetSnapshots()) != 2 {
		t.Fatal(g)
	}
	for _, x := range g.GetSnapshots() {
		if x.GetGroupSnapshotId() != g.GetGroupSnapshotId() || !slices.Contains(ids, x.GetSourceVolumeId()) || !x.GetReadyToUse() {
			t.Error(x)
		}
		if y := must(t, r.controller().GetSnapshot, &csi.GetSnapshotRequest{SnapshotId: x.GetSnapshotId()}).GetSnapshot(); y.String() != x.String() {
			t.Errorf("alone it is %v, in its group %v", y, x)
		}
		_, err := r.controller().DeleteSnapshot(t.Context(), &csi.DeleteSnapshotRequest{SnapshotId: x.GetSnapshotId()})
		wants(t, "one of a group is deleted", err, codes.InvalidArgument)
		c := claim("copy-of-"+x.GetSourceVolumeId(), nil)
		c.VolumeContentSource = fromSnapshot(x.GetSnapshotId())
		v := must(t, r.controller().CreateVolume, c).GetVolume().GetVolumeId()
		at := r.path(c.GetName())
		must(t, r.node().NodeStageVolume, &csi.NodeStageVolumeRequest{VolumeId: v, StagingTargetPath: at, VolumeCapability: capability(manyWriters)})
		if b, err := os.ReadFile(at + "/f"); err != nil || string(b) != "then" {
			t.Errorf("DATA: a volume of the group reads %q, %v", b, err)
		}
		r.gone(v, at)
	}
	for what, c := range map[string]struct {
		q    *csi.CreateVolumeGroupSnapshotRequest
		code codes.Code
	}{
		"no name":              {&csi.CreateVolumeGroupSnapshotRequest{SourceVolumeIds: ids}, codes.InvalidArgument},
		"no volumes":           {&csi.CreateVolumeGroupSnapshotRequest{Name: "h"}, codes.InvalidArgument},
		"a volume twice":       {&csi.CreateVolumeGroupSnapshotRequest{Name: "h", SourceVolumeIds: []string{ids[0], ids[0]}}, codes.InvalidArgument},
		"a volume that is not": {&csi.CreateVolumeGroupSnapshotRequest{Name: "h", SourceVolumeIds: []string{ids[0], "nothing"}}, codes.NotFound},
		"other volumes":        {&csi.CreateVolumeGroupSnapshotRequest{Name: "g", SourceVolumeIds: ids[:1]}, codes.AlreadyExists},
		"parameters":           {&csi.CreateVolumeGroupSnapshotRequest{Name: "h", SourceVolumeIds: ids, Parameters: map[string]string{"x": "y"}}, codes.InvalidArgument},
	} {
		_, err := r.groups().CreateVolumeGroupSnapshot(t.Context(), c.q)
		wants(t, what, err, c.code)
	}
	_, err := r.controller().CreateSnapshot(t.Context(), &csi.CreateSnapshotRequest{Name: "g", SourceVolumeId: ids[0]})
	wants(t, "a snapshot of the group's name", err, codes.AlreadyExists)
	few := deletion(g)
	few.SnapshotIds = few.SnapshotIds[:1]
	_, err = r.groups().DeleteVolumeGroupSnapshot(t.Context(), few)
	wants(t, "a group with fewer snapshots", err, codes.InvalidArgument)
	must(t, r.groups().DeleteVolumeGroupSnapshot, deletion(g))
	must(t, r.groups().DeleteVolumeGroupSnapshot, deletion(g))
	_, err = r.groups().GetVolumeGroupSnapshot(t.Context(), get)
	wants(t, "a group that was deleted", err, codes.NotFound)
	if l := must(t, r.controller().ListSnapshots, &csi.ListSnapshotsRequest{}).GetEntries(); len(l) != 0 {
		t.Errorf("left: %v", l)
	}
	// Another group of its name is another group.
	if h := must(t, r.groups().CreateVolumeGroupSnapshot, q).GetGroupSnapshot(); h.GetGroupSnapshotId() == g.GetGroupSnapshotId() {
		t.Error("a handle is given again")
	} else {
		must(t, r.groups().DeleteVolumeGroupSnapshot, deletion(g))
		must(t, r.groups().GetVolumeGroupSnapshot, &csi.GetVolumeGroupSnapshotRequest{GroupSnapshotId: h.GetGroupSnapshotId()})
		must(t, r.groups().DeleteVolumeGroupSnapshot, deletion(h))
	}
	for i, id := range ids {
		r.gone(id, stagings[i])
	}
}
