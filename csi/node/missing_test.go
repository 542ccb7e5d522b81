package node

import (
	"context"
	"log/slog"
	"os/exec"
	"path/filepath"
	"reflect"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"penstock.io/penstock/csi/cluster"
	"penstock.io/penstock/csi/handle"
	"penstock.io/penstock/meta"
)

// oneVolume is a cluster with a volume that has a snapshot, and a volume under deletion.
type oneVolume struct{ Cluster }

const oneVolumeID = meta.VolumeID(10)

func (oneVolume) ID(context.Context) (string, error) { return "c1", nil }

func (oneVolume) Volume(_ context.Context, id meta.VolumeID) (cluster.Volume, error) {
	if id == oneVolumeID || id == oneVolumeID+1 {
		return cluster.Volume{ID: id, Name: map[bool]string{true: "data", false: "going"}[id == oneVolumeID], Deleting: id != oneVolumeID}, nil
	}
	return cluster.Volume{}, meta.E("find volume", meta.NoSuchVolume, "", nil)
}

func (c oneVolume) VolumeByName(ctx context.Context, name string) (cluster.Volume, error) {
	switch name {
	case "data":
		return c.Volume(ctx, oneVolumeID)
	case "going":
		return c.Volume(ctx, oneVolumeID+1)
	}
	return c.Volume(ctx, 0)
}

func (oneVolume) Snapshots(_ context.Context, v meta.VolumeID) ([]cluster.Snapshot, error) {
	return []cluster.Snapshot{{Name: "s", At: 1, Ready: true}, {Name: "taking", At: 2}}, nil
}

// TestWhatIsMissing: each call that names a missing volume gives the answer of the
// specification's tables of errors, and starts no process. The calls are the service's
// own list.
func TestWhatIsMissing(t *testing.T) {
	of := handle.ClusterOf("c1")
	volume := func(id meta.VolumeID) string { return handle.Volume{Cluster: of, Volume: id}.String() }
	volumes := map[string]string{
		"missing": volume(99), "being deleted": volume(oneVolumeID + 1), "malformed": "nonsense", "damaged": volume(oneVolumeID) + "0",
		"a snapshot's handle": handle.Snapshot{Cluster: of, Volume: oneVolumeID, At: 1}.String(), "missing by name": "name=nothing", "deleted by name": "name=going",
		"a missing snapshot by name": "name=data@nothing", "a snapshot that is not whole": "name=data@taking", "a snapshot of a missing volume": "name=nothing@s", "a name that can't be": "name=a/b",
	}
	started := ""
	s := New(Config{State: t.TempDir(), Cluster: oneVolume{}, Name: "node1", Logger: slog.New(slog.DiscardHandler),
		Command: func(source, _, _, _ string, _ []string, _ bool) *exec.Cmd {
			started = source
			return exec.Command("false")
		}})
	pods := t.TempDir()
	staging, target := filepath.Join(pods, "staging"), filepath.Join(pods, "target")
	capability := &csi.VolumeCapability{AccessType: &csi.VolumeCapability_Mount{Mount: &csi.VolumeCapability_MountVolume{}},
		AccessMode: &csi.VolumeCapability_AccessMode{Mode: csi.VolumeCapability_AccessMode_MULTI_NODE_MULTI_WRITER}}
	type asking struct {
		request func(id string) any
		want    codes.Code
	}
	table := map[string]*asking{
		"NodeStageVolume": {func(id string) any {
			return &csi.NodeStageVolumeRequest{VolumeId: id, StagingTargetPath: staging, VolumeCapability: capability}
		}, codes.NotFound},
		"NodeUnstageVolume": {func(id string) any { return &csi.NodeUnstageVolumeRequest{VolumeId: id, StagingTargetPath: staging} }, codes.OK},
		"NodePublishVolume": {func(id string) any {
			return &csi.NodePublishVolumeRequest{VolumeId: id, StagingTargetPath: staging, TargetPath: target, VolumeCapability: capability}
		}, codes.NotFound},
		"NodeUnpublishVolume": {func(id string) any { return &csi.NodeUnpublishVolumeRequest{VolumeId: id, TargetPath: target} }, codes.OK},
		"NodeGetVolumeStats":  {func(id string) any { return &csi.NodeGetVolumeStatsRequest{VolumeId: id, VolumePath: target} }, codes.NotFound},
		"NodeExpandVolume":    {func(id string) any { return &csi.NodeExpandVolumeRequest{VolumeId: id, VolumePath: target} }, codes.NotFound},
		"NodeGetVolumeHealth": {func(id string) any { return &csi.NodeGetVolumeHealthRequest{VolumeId: id} }, codes.NotFound},
		// These calls name no volume.
		"NodeGetStorageHealth": nil, "NodeGetCapabilities": nil, "NodeGetInfo": nil,
	}
	for _, m := range csi.Node_ServiceDesc.Methods {
		a, known := table[m.MethodName]
		if !known {
			t.Errorf("what does %s answer for what is missing?", m.MethodName)
		}
		if a == nil {
			continue
		}
		call := func(id string) error {
			out := reflect.ValueOf(s).MethodByName(m.MethodName).Call([]reflect.Value{reflect.ValueOf(t.Context()), reflect.ValueOf(a.request(id))})
			err, _ := out[1].Interface().(error)
			return err
		}
		for what, id := range volumes {
			if err := call(id); status.Code(err) != a.want {
				t.Errorf("%s of %s (%s): %v; want %v", m.MethodName, what, id, err, a.want)
			}
			if started != "" {
				t.Fatalf("%s of %s starts a process for %s", m.MethodName, what, started)
			}
		}
	}
	// Volumes that exist and were not staged.
	for _, id := range []string{volume(oneVolumeID), "name=data", "name=data@s"} {
		q := table["NodePublishVolume"].request(id).(*csi.NodePublishVolumeRequest)
		if _, err := s.NodePublishVolume(t.Context(), q); status.Code(err) != codes.FailedPrecondition {
			t.Errorf("NodePublishVolume of %s, which is not staged: %v", id, err)
		}
	}
}
