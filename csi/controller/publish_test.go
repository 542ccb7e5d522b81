package controller

import (
	"maps"
	"slices"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"

	"penstock.io/penstock/csi/cluster"
	"penstock.io/penstock/csi/handle"
	"penstock.io/penstock/meta"
)

// TestPublish: a node gets exactly the grants that the volume's mount needs, for as long
// as the volume is published to the node.
func TestPublish(t *testing.T) {
	s, m := newServer()
	const (
		data = meta.VolumeID(10 + iota)
		reader
		gone
		going
	)
	m.volumes[data] = &held{Volume: cluster.Volume{ID: data, Name: "csi-data"}, snapshots: []cluster.Snapshot{{Name: "s", At: 1, Ready: true}}}
	m.volumes[reader] = &held{Volume: cluster.Volume{ID: reader, Name: "csi-reader", Origin: cluster.Origin{Volume: data, Snapshot: "s"}}}
	m.volumes[reader].Policy.Immutable = true
	m.volumes[gone] = &held{Volume: cluster.Volume{ID: gone, Name: "csi-gone", Origin: cluster.Origin{Volume: 99, Snapshot: "s"}}}
	m.volumes[gone].Policy.Immutable = true
	m.volumes[going] = &held{Volume: cluster.Volume{ID: going, Name: "csi-going", Deleting: true}}
	of := func(id meta.VolumeID) string {
		return handle.Volume{Cluster: handle.ClusterOf("c1"), Volume: id}.String()
	}
	ask := func(id, node string, mode csi.VolumeCapability_AccessMode_Mode, readOnly bool) *csi.ControllerPublishVolumeRequest {
		c := request("", 1).GetVolumeCapabilities()[0]
		c.AccessMode.Mode = mode
		return &csi.ControllerPublishVolumeRequest{VolumeId: id, NodeId: node, VolumeCapability: c, Readonly: readOnly}
	}
	const (
		writers = csi.VolumeCapability_AccessMode_MULTI_NODE_MULTI_WRITER
		readers = csi.VolumeCapability_AccessMode_MULTI_NODE_READER_ONLY
	)
	for what, x := range map[string]struct {
		q    *csi.ControllerPublishVolumeRequest
		want map[meta.VolumeID]bool
	}{
		"written":              {ask(of(data), "n", writers, false), map[meta.VolumeID]bool{data: true}},
		"read":                 {ask(of(data), "n", readers, false), map[meta.VolumeID]bool{data: false}},
		"read-only":            {ask(of(data), "n", writers, true), map[meta.VolumeID]bool{data: false}},
		"a snapshot's":         {ask(of(reader), "n", readers, false), map[meta.VolumeID]bool{reader: false, data: false}},
		"its origin is gone":   {ask(of(gone), "n", readers, false), map[meta.VolumeID]bool{gone: false}},
		"by hand":              {ask("name=csi-data", "n", writers, false), map[meta.VolumeID]bool{data: true}},
		"a snapshot's by hand": {ask("name=csi-data@s", "n", writers, false), map[meta.VolumeID]bool{data: false}},
	} {
		for range 2 {
			ok(t, s.ControllerPublishVolume, x.q)
		}
		if got := m.published["n "+x.q.GetVolumeId()]; len(m.published) != 1 || !maps.Equal(got, x.want) {
			t.Errorf("%s: %v, want %v", what, m.published, x.want)
		}
		for range 2 {
			ok(t, s.ControllerUnpublishVolume, &csi.ControllerUnpublishVolumeRequest{VolumeId: x.q.GetVolumeId(), NodeId: "n"})
		}
		if len(m.published) != 0 {
			t.Errorf("%s: left: %v", what, m.published)
		}
	}
	other := handle.Volume{Cluster: handle.ClusterOf("c2"), Volume: data}.String()
	fails(t, codes.NotFound, s.ControllerPublishVolume, ask(of(going), "n", writers, false))
	fails(t, codes.NotFound, s.ControllerPublishVolume, ask(of(98), "n", writers, false))
	fails(t, codes.NotFound, s.ControllerPublishVolume, ask("nonsense", "n", writers, false))
	fails(t, codes.NotFound, s.ControllerPublishVolume, ask(of(data), "nobody", writers, false))
	fails(t, codes.FailedPrecondition, s.ControllerPublishVolume, ask(other, "n", writers, false))
	fails(t, codes.FailedPrecondition, s.ControllerUnpublishVolume, &csi.ControllerUnpublishVolumeRequest{VolumeId: other, NodeId: "n"})
	ok(t, s.ControllerUnpublishVolume, &csi.ControllerUnpublishVolumeRequest{VolumeId: of(98), NodeId: "n"}) // the volume may be gone
	ok(t, s.ControllerUnpublishVolume, &csi.ControllerUnpublishVolumeRequest{VolumeId: "nonsense", NodeId: "n"})
	if len(m.published) != 0 {
		t.Errorf("published: %v", m.published)
	}

	// A list of all volumes also has the nodes to which they are published.
	for _, n := range []string{"n1", "n2"} {
		ok(t, s.ControllerPublishVolume, ask(of(data), n, writers, false))
	}
	fails(t, codes.AlreadyExists, s.ControllerPublishVolume, ask(of(data), "n1", writers, true))
	for _, e := range ok(t, s.ListVolumes, &csi.ListVolumesRequest{}).GetEntries() {
		want := []string(nil)
		if e.GetVolume().GetVolumeId() == of(data) {
			want = []string{"n1", "n2"}
		}
		if got := e.GetStatus().GetPublishedNodeIds(); !slices.Equal(got, want) {
			t.Errorf("%s is published to %v, want %v", e.GetVolume().GetVolumeId(), got, want)
		}
	}
	if got := ok(t, s.ControllerGetVolume, &csi.ControllerGetVolumeRequest{VolumeId: of(data)}).GetStatus().GetPublishedNodeIds(); len(got) != 2 {
		t.Errorf("published to %v", got)
	}
	// A published volume is not deleted.
	fails(t, codes.FailedPrecondition, s.DeleteVolume, &csi.DeleteVolumeRequest{VolumeId: of(data)})
	ok(t, s.ControllerUnpublishVolume, &csi.ControllerUnpublishVolumeRequest{VolumeId: of(data)}) // of no node: of all
	if len(m.published) != 0 {
		t.Errorf("published: %v", m.published)
	}

	// A volume for one node at a time is refused to a second node.
	for _, mode := range []csi.VolumeCapability_AccessMode_Mode{
		csi.VolumeCapability_AccessMode_SINGLE_NODE_WRITER, csi.VolumeCapability_AccessMode_SINGLE_NODE_READER_ONLY,
		csi.VolumeCapability_AccessMode_SINGLE_NODE_SINGLE_WRITER, csi.VolumeCapability_AccessMode_SINGLE_NODE_MULTI_WRITER,
	} {
		for range 2 {
			ok(t, s.ControllerPublishVolume, ask(of(data), "n1", mode, false))
		}
		fails(t, codes.FailedPrecondition, s.ControllerPublishVolume, ask(of(data), "n2", mode, false))
		ok(t, s.ControllerUnpublishVolume, &csi.ControllerUnpublishVolumeRequest{VolumeId: of(data), NodeId: "n1"})
		ok(t, s.ControllerPublishVolume, ask(of(data), "n2", mode, false))
		ok(t, s.ControllerUnpublishVolume, &csi.ControllerUnpublishVolumeRequest{VolumeId: of(data), NodeId: "n2"})
	}
	ok(t, s.DeleteVolume, &csi.DeleteVolumeRequest{VolumeId: of(gone)})
}
