package controller

import (
	"context"
	"reflect"
	"slices"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"penstock.io/penstock/csi/cluster"
	"penstock.io/penstock/csi/handle"
	"penstock.io/penstock/meta"
)

// TestWhatIsMissing: each call that names a missing volume, snapshot or group gives the answer of
// the specification's tables of errors: NotFound where the object is needed, and OK where the
// object is to be deleted. The calls are the service's own list, so that a new call can't be left
// out.
func TestWhatIsMissing(t *testing.T) {
	const (
		data = meta.VolumeID(10 + iota)
		going
		trashed
		none
	)
	of := handle.ClusterOf("c1")
	volume := func(id meta.VolumeID) string { return handle.Volume{Cluster: of, Volume: id}.String() }
	snapshot := func(id meta.VolumeID, at meta.Generation) string {
		return handle.Snapshot{Cluster: of, Volume: id, At: at}.String()
	}

	volumes := map[string]string{
		"missing": volume(none), "being deleted": volume(going), "in the trash": volume(trashed), "malformed": "nonsense", "damaged": volume(data) + "0",
		"a snapshot's handle": snapshot(data, 1), "missing by name": "name=nothing", "deleted by name": "name=csi-going", "a name that can't be": "name=a/b",
		"a missing snapshot by name": "name=csi-data@nothing", "a snapshot that goes, by name": "name=csi-data@going", "a snapshot of a missing volume by name": "name=nothing@csi-s",
	}
	snapshots := map[string]string{"missing": snapshot(data, 9), "of a missing volume": snapshot(none, 1), "that goes": snapshot(data, 2), "malformed": "nonsense", "a volume's handle": volume(data)}
	gone := map[string]string{"missing": handle.Group{Cluster: of, ID: 1, Name: "csi-g"}.String(), "malformed": "nonsense", "a volume's handle": volume(data)}

	byHand := []string{"a missing snapshot by name", "a snapshot that goes, by name"} // the volume exists, and this service must not change it
	capability := request("", 1).GetVolumeCapabilities()
	type asking struct {
		things  map[string]string
		request func(id string) any
		want    codes.Code
		except  map[string]codes.Code
	}
	notMine := map[string]codes.Code{}
	for _, what := range byHand {
		notMine[what] = codes.FailedPrecondition
	}
	made := func(from *csi.VolumeContentSource) *csi.CreateVolumeRequest {
		q := request("new", 1<<20)
		q.VolumeContentSource = from
		return q
	}
	table := map[string][]asking{
		"CreateVolume": {
			{volumes, func(id string) any {
				return made(&csi.VolumeContentSource{Type: &csi.VolumeContentSource_Volume{Volume: &csi.VolumeContentSource_VolumeSource{VolumeId: id}}})
			}, codes.NotFound, nil},
			{snapshots, func(id string) any {
				return made(&csi.VolumeContentSource{Type: &csi.VolumeContentSource_Snapshot{Snapshot: &csi.VolumeContentSource_SnapshotSource{SnapshotId: id}}})
			}, codes.NotFound, nil},
		},
		"DeleteVolume": {{volumes, func(id string) any { return &csi.DeleteVolumeRequest{VolumeId: id} }, codes.OK,
			notMine}},
		"ControllerPublishVolume": {{volumes, func(id string) any {
			return &csi.ControllerPublishVolumeRequest{VolumeId: id, NodeId: "n", VolumeCapability: capability[0]}
		}, codes.NotFound, nil}},
		"ControllerUnpublishVolume": {{volumes, func(id string) any { return &csi.ControllerUnpublishVolumeRequest{VolumeId: id, NodeId: "n"} }, codes.OK, nil}},
		"ValidateVolumeCapabilities": {{volumes, func(id string) any {
			return &csi.ValidateVolumeCapabilitiesRequest{VolumeId: id, VolumeCapabilities: capability}
		}, codes.NotFound, nil}},
		"ControllerGetVolume":       {{volumes, func(id string) any { return &csi.ControllerGetVolumeRequest{VolumeId: id} }, codes.NotFound, notMine}},
		"ControllerGetVolumeHealth": {{volumes, func(id string) any { return &csi.ControllerGetVolumeHealthRequest{VolumeId: id} }, codes.NotFound, nil}},
		"ControllerExpandVolume": {{volumes, func(id string) any {
			return &csi.ControllerExpandVolumeRequest{VolumeId: id, CapacityRange: &csi.CapacityRange{RequiredBytes: 1}}
		}, codes.NotFound, notMine}},
		"ControllerModifyVolume": {{volumes, func(id string) any { return &csi.ControllerModifyVolumeRequest{VolumeId: id} }, codes.NotFound, notMine}},
		"CreateSnapshot":         {{volumes, func(id string) any { return &csi.CreateSnapshotRequest{Name: "x", SourceVolumeId: id} }, codes.NotFound, notMine}},
		"DeleteSnapshot":         {{snapshots, func(id string) any { return &csi.DeleteSnapshotRequest{SnapshotId: id} }, codes.OK, nil}},
		"GetSnapshot":            {{snapshots, func(id string) any { return &csi.GetSnapshotRequest{SnapshotId: id} }, codes.NotFound, nil}},
		"ListSnapshots": {
			{volumes, func(id string) any { return &csi.ListSnapshotsRequest{SourceVolumeId: id} }, codes.OK, nil},
			{snapshots, func(id string) any { return &csi.ListSnapshotsRequest{SnapshotId: id} }, codes.OK, nil},
		},
		"CreateVolumeGroupSnapshot": {{volumes, func(id string) any {
			return &csi.CreateVolumeGroupSnapshotRequest{Name: "x", SourceVolumeIds: []string{volume(data), id}}
		}, codes.NotFound, notMine}},
		"DeleteVolumeGroupSnapshot": {{gone, func(id string) any { return &csi.DeleteVolumeGroupSnapshotRequest{GroupSnapshotId: id} }, codes.OK, nil}},
		"GetVolumeGroupSnapshot":    {{gone, func(id string) any { return &csi.GetVolumeGroupSnapshotRequest{GroupSnapshotId: id} }, codes.NotFound, nil}},
		// These calls name no object.
		"ListVolumes": nil, "ControllerListVolumeHealth": nil, "GetCapacity": nil, "ControllerGetCapabilities": nil, "GroupControllerGetCapabilities": nil,
	}
	fresh := func() (*Server, *Groups, *memory) {
		s, m := newServer()
		m.volumes[data] = &held{Volume: cluster.Volume{ID: data, Name: "csi-data"}, snapshots: []cluster.Snapshot{{Name: "csi-s", At: 1, Ready: true}, {Name: "going", At: 2}}}
		m.volumes[going] = &held{Volume: cluster.Volume{ID: going, Name: "csi-going", Deleting: true}}
		m.volumes[trashed] = &held{Volume: cluster.Volume{ID: trashed, Name: "csi-trashed", Deleting: true, Trashed: true}}
		groups := &Groups{s: s, c: &grouped{memory: m, groups: map[string]meta.Group{}}}
		return s, groups, m
	}
	calls := 0
	for method := range services() {
		asked, known := table[method]
		if !known {
			t.Errorf("what does %s answer for what is missing?", method)
		}
		for _, a := range asked {
			for what, id := range a.things {
				want := a.want
				if w, is := a.except[what]; is {
					want = w
				}
				calls++
				s, groups, m := fresh()
				if err := call(s, groups, method, a.request(id)); status.Code(err) != want {
					t.Errorf("%s of %s (%s): %v; want %v", method, what, id, err, want)
				}
				if len(m.volumes) < 4 && method != "DeleteVolume" || len(m.volumes) > 4 || len(m.volumes[data].snapshots) != 2 || len(m.published) != 0 {
					t.Errorf("%s of %s (%s) left %v, %v", method, what, id, m.volumes, m.published)
				}
			}
		}
	}
	if calls < 150 {
		t.Errorf("%d calls were made", calls)
	}
}

// services yields the names of all calls of this package's services.
func services() func(yield func(string) bool) {
	return func(yield func(string) bool) {
		for _, m := range slices.Concat(csi.Controller_ServiceDesc.Methods, csi.GroupController_ServiceDesc.Methods) {
			if !yield(m.MethodName) {
				return
			}
		}
	}
}

// call makes a call by its name.
func call(s *Server, g *Groups, method string, q any) error {
	m := reflect.ValueOf(s).MethodByName(method)
	if !m.IsValid() {
		m = reflect.ValueOf(g).MethodByName(method)
	}
	out := m.Call([]reflect.Value{reflect.ValueOf(context.Background()), reflect.ValueOf(q)})
	err, _ := out[1].Interface().(error)
	return err
}

// TestCopyOfASnapshotByHand: a volume made by hand from a snapshot's claim is made from
// the snapshot, not from the present volume.
func TestCopyOfASnapshotByHand(t *testing.T) {
	s, m := newServer()
	m.volumes[10] = &held{Volume: cluster.Volume{ID: 10, Name: "data"}, snapshots: []cluster.Snapshot{{Name: "v3", At: 1, Bytes: 5 << 20, Ready: true}}}
	m.last = 10
	q := request("copy", 8<<20)
	q.VolumeContentSource = &csi.VolumeContentSource{Type: &csi.VolumeContentSource_Volume{Volume: &csi.VolumeContentSource_VolumeSource{VolumeId: "name=data@v3"}}}
	for range 2 {
		ok(t, s.CreateVolume, q)
	}
	if got := m.volumes[11]; got == nil || got.from != "v3" || len(m.volumes) != 3 {
		t.Errorf("DATA: the copy is made of %+v", got)
	}
	q.Name, q.CapacityRange.RequiredBytes = "small", 4<<20
	fails(t, codes.OutOfRange, s.CreateVolume, q)
}
