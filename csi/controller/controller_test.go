package controller

import (
	"context"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"penstock.io/penstock/csi/cluster"
	"penstock.io/penstock/csi/policy"
	"penstock.io/penstock/meta"
)

// memory is a cluster in memory that makes clones.
type memory struct {
	volumes map[meta.VolumeID]*held
	last    meta.VolumeID
	cut     string // the operation after which the caller is cut off, once
}

type held struct {
	cluster.Volume
	snapshots []cluster.Snapshot
	gen       meta.Generation
	of        meta.VolumeID // of a clone
	from      string
}

func (m *memory) after(op string) error {
	if m.cut == op {
		m.cut = ""
		return meta.E(op, meta.Unavailable, "", nil)
	}
	return nil
}

func (m *memory) ID(context.Context) (string, error) { return "c1", nil }

func (m *memory) get(id meta.VolumeID) (*held, error) {
	if v := m.volumes[id]; v != nil {
		return v, nil
	}
	return nil, meta.E("find", meta.NoSuchVolume, fmt.Sprint(id), nil)
}

func (m *memory) Volume(_ context.Context, id meta.VolumeID) (cluster.Volume, error) {
	v, err := m.get(id)
	if err != nil {
		return cluster.Volume{}, err
	}
	return v.Volume, nil
}

func (m *memory) VolumeByName(_ context.Context, name string) (cluster.Volume, error) {
	for _, v := range m.volumes {
		if v.Name == name {
			return v.Volume, nil
		}
	}
	return cluster.Volume{}, meta.E("find", meta.NoSuchVolume, name, nil)
}

func (m *memory) Volumes(context.Context) (all []cluster.Volume, err error) {
	for _, v := range m.volumes {
		all = append(all, v.Volume)
	}
	return all, nil
}

func (m *memory) Create(_ context.Context, name string, t policy.Terms) (cluster.Volume, error) {
	m.last++
	m.volumes[m.last] = &held{Volume: cluster.Volume{ID: m.last, Name: name, Terms: t}}
	return m.volumes[m.last].Volume, m.after("create")
}

func (m *memory) Set(_ context.Context, id meta.VolumeID, t policy.Terms) (cluster.Volume, error) {
	v, err := m.get(id)
	if err != nil {
		return cluster.Volume{}, err
	}
	v.Policy = t.Policy // first the one, then the other
	if err := m.after("set policy"); err != nil {
		return cluster.Volume{}, err
	}
	v.Compression = t.Compression
	return v.Volume, m.after("set compression")
}

func (m *memory) Delete(_ context.Context, id meta.VolumeID) error {
	delete(m.volumes, id)
	return m.after("delete")
}

func (m *memory) Attach(_ context.Context, id meta.VolumeID, at string) error {
	m.volumes[id].Path = at
	return m.after("attach")
}

func (m *memory) Detach(_ context.Context, id meta.VolumeID) error {
	m.volumes[id].Path = ""
	return m.after("detach")
}

func (m *memory) Tidy(context.Context, string) error { return nil }

func (m *memory) Nodes(context.Context) ([]policy.Site, error) {
	return []policy.Site{{Topology: "/z/r1/h", Disks: []policy.Disk{{Free: 1 << 40}}}, {Topology: "/z/r2/h", Disks: []policy.Disk{{Free: 1 << 40}}}}, nil
}

func (m *memory) Snapshots(_ context.Context, id meta.VolumeID) ([]cluster.Snapshot, error) {
	v, err := m.get(id)
	if err != nil {
		return nil, err
	}
	return v.snapshots, nil
}

func (m *memory) TakeSnapshot(_ context.Context, id meta.VolumeID, name string) (cluster.Snapshot, error) {
	v := m.volumes[id]
	v.gen++
	x := cluster.Snapshot{Name: name, At: v.gen, Created: time.Unix(int64(v.gen), 0), Bytes: 1 << 20, Ready: true}
	v.snapshots = append(v.snapshots, x)
	return x, m.after("take snapshot")
}

func (m *memory) DeleteSnapshot(_ context.Context, id meta.VolumeID, name string) error {
	v := m.volumes[id]
	v.snapshots = slices.DeleteFunc(v.snapshots, func(x cluster.Snapshot) bool { return x.Name == name })
	return m.after("delete snapshot")
}

func (m *memory) Clone(_ context.Context, of meta.VolumeID, snapshot, name string) (cluster.Volume, error) {
	m.last++
	v := &held{Volume: cluster.Volume{ID: m.last, Name: name, Terms: policy.Terms{Policy: m.volumes[of].Policy}}, of: of, from: snapshot}
	m.volumes[m.last] = v
	return v.Volume, m.after("clone")
}

func (m *memory) Origin(_ context.Context, of, clone meta.VolumeID) (string, error) {
	if v := m.volumes[clone]; v != nil && v.of != 0 && (v.of == of || of == 0) {
		return v.from, nil
	}
	return "", meta.E("origin", meta.NotFound, "", nil)
}

func newServer() (*Server, *memory) {
	m := &memory{volumes: map[meta.VolumeID]*held{1: {Volume: cluster.Volume{ID: 1, Name: "root"}}}, last: 1}
	return New(Config{Cluster: m, Logger: slog.New(slog.DiscardHandler)}), m
}

func request(name string, bytes int64) *csi.CreateVolumeRequest {
	return &csi.CreateVolumeRequest{Name: name, CapacityRange: &csi.CapacityRange{RequiredBytes: bytes}, VolumeCapabilities: []*csi.VolumeCapability{{
		AccessType: &csi.VolumeCapability_Mount{Mount: &csi.VolumeCapability_MountVolume{}},
		AccessMode: &csi.VolumeCapability_AccessMode{Mode: csi.VolumeCapability_AccessMode_MULTI_NODE_MULTI_WRITER},
	}}}
}

func ok[Q, A any](t *testing.T, call func(context.Context, Q) (A, error), q Q) A {
	t.Helper()
	a, err := call(t.Context(), q)
	if err != nil {
		t.Fatalf("%T: %v", q, err)
	}
	return a
}

func fails[Q, A any](t *testing.T, code codes.Code, call func(context.Context, Q) (A, error), q Q) {
	t.Helper()
	if _, err := call(t.Context(), q); status.Code(err) != code {
		t.Errorf("%T: %v; want %v", q, err, code)
	}
}

func TestSnapshots(t *testing.T) {
	s, m := newServer()
	a := ok(t, s.CreateVolume, request("a", 1<<30)).GetVolume().GetVolumeId()
	b := ok(t, s.CreateVolume, request("b", 1<<30)).GetVolume().GetVolumeId()
	var made []string
	for i := range 5 {
		of := a
		if i > 2 {
			of = b
		}
		q := &csi.CreateSnapshotRequest{Name: fmt.Sprint("snap-", i), SourceVolumeId: of}
		first := ok(t, s.CreateSnapshot, q).GetSnapshot()
		if again := ok(t, s.CreateSnapshot, q).GetSnapshot(); again.GetSnapshotId() != first.GetSnapshotId() || again.GetSourceVolumeId() != of {
			t.Errorf("taken twice: %v, %v", first, again)
		}
		made = append(made, first.GetSnapshotId())
	}
	m.volumes[2].snapshots = append(m.volumes[2].snapshots, cluster.Snapshot{Name: "by-hand", At: 99, Ready: true}, cluster.Snapshot{Name: "csi-going", At: 100})
	fails(t, codes.AlreadyExists, s.CreateSnapshot, &csi.CreateSnapshotRequest{Name: "snap-0", SourceVolumeId: b})
	// Another process doesn't know the names and looks.
	other := New(Config{Cluster: m, Logger: s.Logger})
	fails(t, codes.AlreadyExists, other.CreateSnapshot, &csi.CreateSnapshotRequest{Name: "snap-4", SourceVolumeId: a})
	fails(t, codes.NotFound, s.CreateSnapshot, &csi.CreateSnapshotRequest{Name: "x", SourceVolumeId: "nothing"})
	fails(t, codes.InvalidArgument, s.CreateSnapshot, &csi.CreateSnapshotRequest{Name: "x", SourceVolumeId: a, Parameters: map[string]string{"k": "v"}})
	fails(t, codes.FailedPrecondition, s.DeleteVolume, &csi.DeleteVolumeRequest{VolumeId: a})

	pages := func(n int32, of string, between func(page int)) (ids []string) {
		token := ""
		for page := 0; ; page++ {
			l := ok(t, s.ListSnapshots, &csi.ListSnapshotsRequest{MaxEntries: n, StartingToken: token, SourceVolumeId: of})
			for _, e := range l.GetEntries() {
				ids = append(ids, e.GetSnapshot().GetSnapshotId())
			}
			between(page)
			if token = l.GetNextToken(); token == "" {
				return ids
			}
		}
	}
	for n := range int32(7) {
		if got := pages(n, "", func(int) {}); !slices.Equal(got, made) {
			t.Errorf("in pages of %d: %v, want %v", n, got, made)
		}
	}
	if got := pages(2, b, func(int) {}); !slices.Equal(got, made[3:]) {
		t.Errorf("of one volume: %v", got)
	}
	if got := pages(2, "nothing", func(int) {}); got != nil {
		t.Errorf("of no volume: %v", got)
	}
	got := pages(2, "", func(page int) {
		if page == 0 { // the last one of the page goes
			ok(t, s.DeleteSnapshot, &csi.DeleteSnapshotRequest{SnapshotId: made[1]})
		}
	})
	if !slices.Equal(got, made) {
		t.Errorf("with one deleted between pages: %v", got)
	}
	if l := ok(t, s.ListSnapshots, &csi.ListSnapshotsRequest{SnapshotId: made[4]}).GetEntries(); len(l) != 1 || l[0].GetSnapshot().GetSnapshotId() != made[4] {
		t.Errorf("one: %v", l)
	}
	if l := ok(t, s.ListSnapshots, &csi.ListSnapshotsRequest{SnapshotId: made[1]}).GetEntries(); len(l) != 0 {
		t.Errorf("a deleted one: %v", l)
	}
	fails(t, codes.Aborted, s.ListSnapshots, &csi.ListSnapshotsRequest{StartingToken: "nonsense"})
	fails(t, codes.NotFound, s.GetSnapshot, &csi.GetSnapshotRequest{SnapshotId: made[1]})
	ok(t, s.GetSnapshot, &csi.GetSnapshotRequest{SnapshotId: made[0]})
	// The name of a deleted one is free in any volume.
	made = append(made, ok(t, s.CreateSnapshot, &csi.CreateSnapshotRequest{Name: "snap-1", SourceVolumeId: b}).GetSnapshot().GetSnapshotId())
	for _, id := range append(made, "nothing") {
		ok(t, s.DeleteSnapshot, &csi.DeleteSnapshotRequest{SnapshotId: id})
	}
	ok(t, s.DeleteVolume, &csi.DeleteVolumeRequest{VolumeId: a})
	ok(t, s.DeleteVolume, &csi.DeleteVolumeRequest{VolumeId: b})
	if len(m.volumes) != 1 {
		t.Errorf("left: %v", m.volumes)
	}
}

// TestClones: a volume from a snapshot or a volume has the policy that its class
// says, also if the call that made it was cut off at any step.
func TestClones(t *testing.T) {
	for _, cut := range []string{"", "clone", "set policy", "set compression", "attach"} {
		s, m := newServer()
		a := ok(t, s.CreateVolume, request("a", 1<<30)).GetVolume().GetVolumeId()
		snap := ok(t, s.CreateSnapshot, &csi.CreateSnapshotRequest{Name: "s", SourceVolumeId: a}).GetSnapshot().GetSnapshotId()
		of := func(id string) *csi.VolumeContentSource {
			if strings.HasPrefix(id, "s1-") {
				return &csi.VolumeContentSource{Type: &csi.VolumeContentSource_Snapshot{Snapshot: &csi.VolumeContentSource_SnapshotSource{SnapshotId: id}}}
			}
			return &csi.VolumeContentSource{Type: &csi.VolumeContentSource_Volume{Volume: &csi.VolumeContentSource_VolumeSource{VolumeId: id}}}
		}
		for i, source := range []string{snap, a} {
			q := request(fmt.Sprint("c", i), 2<<30)
			q.VolumeContentSource = of(source)
			q.Parameters = map[string]string{"replicas": "2", "attachPath": "/k/{volume}", "topologyLevel": "rack", "compression": "zstd"}
			q.AccessibilityRequirements = &csi.TopologyRequirement{Requisite: []*csi.Topology{{Segments: map[string]string{policy.KeyRack: "r2"}}}}
			m.cut = cut
			var v *csi.Volume
			for range 3 {
				if r, err := s.CreateVolume(t.Context(), q); err == nil {
					v = r.GetVolume()
				}
			}
			if v == nil || m.cut != "" {
				t.Fatalf("cut off after %q: not made", cut)
			}
			have := m.volumes[m.last]
			if p := have.Policy; p.Replicas != 2 || p.QuotaBytes != 2<<30 || p.Topology != "/z/r2" || p.Immutable || have.Compression != meta.CompressZstd || have.Path != "/k/"+q.Name || have.of != 2 || (have.from != "") != (source == snap) {
				t.Errorf("cut off after %q: %+v", cut, have)
			}
			if v.GetContentSource() == nil || len(v.GetAccessibleTopology()) != 1 {
				t.Errorf("the answer: %v", v)
			}
			empty := request(q.Name, 2<<30)
			empty.Parameters = q.Parameters
			fails(t, codes.AlreadyExists, s.CreateVolume, empty)
			if source == a {
				q.VolumeContentSource = of(snap)
				fails(t, codes.AlreadyExists, s.CreateVolume, q)
			}
		}
		// Nobody writes what is made of a snapshot to be read only.
		readers := csi.VolumeCapability_AccessMode_MULTI_NODE_READER_ONLY
		for i, modes := range [][]csi.VolumeCapability_AccessMode_Mode{{readers}, {readers, csi.VolumeCapability_AccessMode_MULTI_NODE_MULTI_WRITER}} {
			q := request(fmt.Sprint("r", i), 2<<30)
			q.VolumeContentSource, q.VolumeCapabilities = of(snap), nil
			for _, mode := range modes {
				c := request("", 0).GetVolumeCapabilities()[0]
				c.AccessMode.Mode = mode
				q.VolumeCapabilities = append(q.VolumeCapabilities, c)
			}
			for range 2 {
				ok(t, s.CreateVolume, q)
				if have := m.volumes[m.last]; have.Name != "csi-"+q.Name || have.Policy.Immutable != (i == 0) {
					t.Errorf("for %v: %+v", modes, have)
				}
			}
			q.VolumeCapabilities = request("", 0).GetVolumeCapabilities()
			if i == 0 {
				fails(t, codes.AlreadyExists, s.CreateVolume, q)
			}
		}
		small := request("small", 1<<10)
		small.VolumeContentSource = of(snap)
		fails(t, codes.OutOfRange, s.CreateVolume, small)
		lost := request("lost", 1<<30)
		lost.VolumeContentSource = of(strings.Replace(snap, "s1-", "s1-x", 1))
		fails(t, codes.NotFound, s.CreateVolume, lost)
		lost.VolumeContentSource = &csi.VolumeContentSource{}
		fails(t, codes.InvalidArgument, s.CreateVolume, lost)
	}
}

// bare is a cluster that makes no clones.
type bare struct{ Cluster }

func TestNoClones(t *testing.T) {
	_, m := newServer()
	s := New(Config{Cluster: bare{m}, Logger: slog.New(slog.DiscardHandler)})
	for _, c := range ok(t, s.ControllerGetCapabilities, &csi.ControllerGetCapabilitiesRequest{}).GetCapabilities() {
		if slices.Contains(withClones, c.GetRpc().GetType()) {
			t.Errorf("%v is offered", c)
		}
	}
	q := request("a", 1)
	q.VolumeContentSource = &csi.VolumeContentSource{}
	fails(t, codes.InvalidArgument, s.CreateVolume, q)
}
