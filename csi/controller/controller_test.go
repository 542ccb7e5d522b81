package controller

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"path"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
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
	cut     string               // the operation after which the caller is cut off, once
	refuse  map[string]meta.Kind // kind of refusal by operation or directory
	dirs    map[string]bool
	silent  map[string]bool // directories about which nobody says anything
	// meanwhile is called before a draft is discarded, and before terms are set.
	meanwhile func()
	health    map[meta.VolumeID]meta.VolumeHealth
	published map[string]map[meta.VolumeID]bool // by node and handle: true, to write

	mu    sync.Mutex
	asked map[meta.VolumeID]int // requests for the volume's snapshots
}

type held struct {
	cluster.Volume
	snapshots []cluster.Snapshot
	gen       meta.Generation
	of        meta.VolumeID // of a clone
	from      string
	silent    bool // requests for the volume's snapshots get no answer
}

func (m *memory) before(op string) error {
	if k, is := m.refuse[op]; is {
		return meta.E(op, k, "", nil)
	}
	return nil
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
	if err := m.before("create"); err != nil {
		return cluster.Volume{}, err
	}
	m.last++
	m.volumes[m.last] = &held{Volume: cluster.Volume{ID: m.last, Name: name, Terms: t}}
	return m.volumes[m.last].Volume, m.after("create")
}

func (m *memory) Set(_ context.Context, id meta.VolumeID, from, to policy.Terms) (cluster.Volume, error) {
	if m.meanwhile != nil {
		m.meanwhile()
	}
	v, err := m.get(id)
	if err == nil {
		err = m.before("set")
	}
	if err != nil {
		return cluster.Volume{}, err
	}
	// First the policy, then the words.
	if err := errors.Join(v.Policy.Change(&to.Policy, to.Policy.Differs(&from.Policy)...), m.after("set policy")); err != nil {
		return cluster.Volume{}, err
	}
	if to.Compression != from.Compression {
		v.Compression = to.Compression
	}
	if to.TrashSeconds != from.TrashSeconds {
		v.TrashSeconds = to.TrashSeconds
	}
	if to.AdvisoryBytes != from.AdvisoryBytes {
		v.AdvisoryBytes = to.AdvisoryBytes
	}
	if to.AdvisoryInodes != from.AdvisoryInodes {
		v.AdvisoryInodes = to.AdvisoryInodes
	}
	return v.Volume, m.after("set words")
}

func (m *memory) Rename(_ context.Context, id meta.VolumeID, name string) (cluster.Volume, error) {
	v, err := m.get(id)
	if err == nil {
		err = m.before("rename")
	}
	if err != nil {
		return cluster.Volume{}, err
	}
	v.Name = name
	return v.Volume, m.after("rename")
}

func (m *memory) Delete(_ context.Context, id meta.VolumeID) error {
	if err := m.before("delete"); err != nil {
		return err
	}
	delete(m.volumes, id)
	return m.after("delete")
}

func (m *memory) Discard(ctx context.Context, id meta.VolumeID, name string) error {
	if m.meanwhile != nil {
		m.meanwhile()
	}
	if v, err := m.get(id); err != nil || v.Name != name {
		return errors.Join(err, meta.E("discard", meta.Busy, name, nil))
	}
	return m.Delete(ctx, id)
}

func (m *memory) Attach(_ context.Context, id meta.VolumeID, at string) error {
	m.dirs[path.Dir(at)] = true
	if err := m.before("attach"); err != nil {
		return err
	}
	if len(path.Base(at)) > meta.MaxName {
		return meta.E("attach", meta.NameTooLong, at, nil)
	}
	for _, v := range m.volumes {
		if v.Path == at && v.ID != id {
			return meta.E("attach", meta.Exists, at, nil)
		}
	}
	m.volumes[id].Path = at
	return m.after("attach")
}

func (m *memory) Detach(_ context.Context, id meta.VolumeID) error {
	m.volumes[id].Path = ""
	return m.after("detach")
}

// look is asking for a directory.
func (m *memory) look(ctx context.Context, dir string) error {
	if m.silent[dir] { // the directory's volume has no owner
		<-ctx.Done()
		return meta.E("look", meta.Unavailable, dir, context.Cause(ctx))
	}
	return m.before(dir)
}

func (m *memory) Tidy(ctx context.Context, dir string) error {
	if err := m.before("tidy"); err != nil {
		return err
	}
	if err := m.look(ctx, dir); err != nil {
		return err
	}
	for _, v := range m.volumes {
		if path.Dir(v.Path) == dir {
			return nil
		}
	}
	delete(m.dirs, dir)
	return m.after("tidy")
}

func (m *memory) Dirs(ctx context.Context, at string) (names []string, err error) {
	if err := m.look(ctx, at); err != nil {
		return nil, err
	}
	for d := range m.dirs {
		if path.Dir(d) == at {
			names = append(names, path.Base(d))
		}
	}
	return names, nil
}

func (m *memory) Nodes(context.Context) ([]policy.Site, error) {
	return []policy.Site{{Topology: "/z/r1/h", Disks: []policy.Disk{{Free: 1 << 40}}}, {Topology: "/z/r2/h", Disks: []policy.Disk{{Free: 1 << 40}}}, {Topology: "/z/r2/i", Disks: []policy.Disk{{Free: 1 << 40}}}}, nil
}

func (m *memory) Publish(_ context.Context, node, handle string, volumes map[meta.VolumeID]bool, alone bool) error {
	if node == "nobody" {
		return meta.E("publish", meta.NotFound, node, nil)
	}
	if m.published == nil {
		m.published = map[string]map[meta.VolumeID]bool{}
	}
	if was, is := m.published[node+" "+handle]; is && !maps.Equal(was, volumes) {
		return meta.E("publish", meta.Exists, node, nil)
	}
	for k := range m.published {
		if n, h, _ := strings.Cut(k, " "); alone && h == handle && n != node {
			return meta.E("publish", meta.Busy, n, nil)
		}
	}
	m.published[node+" "+handle] = volumes
	return m.after("publish")
}

func (m *memory) Unpublish(_ context.Context, node, handle string) error {
	maps.DeleteFunc(m.published, func(k string, _ map[meta.VolumeID]bool) bool {
		n, h, _ := strings.Cut(k, " ")
		return h == handle && (node == "" || n == node)
	})
	return m.after("unpublish")
}

func (m *memory) Published(context.Context, string) (map[string][]string, error) {
	nodes := map[string][]string{}
	for _, k := range slices.Sorted(maps.Keys(m.published)) {
		n, h, _ := strings.Cut(k, " ")
		nodes[h] = append(nodes[h], n)
	}
	return nodes, nil
}

func (m *memory) Health(context.Context) (map[meta.VolumeID]meta.VolumeHealth, error) {
	return m.health, m.before("health")
}

func (m *memory) Snapshots(ctx context.Context, id meta.VolumeID) ([]cluster.Snapshot, error) {
	m.mu.Lock()
	m.asked[id]++
	m.mu.Unlock()
	v, err := m.get(id)
	if err != nil {
		return nil, err
	}
	if v.silent { // no owner: a session looks for an owner until its context ends
		<-ctx.Done()
		return nil, meta.E("list snapshots", meta.Unavailable, v.Name, context.Cause(ctx))
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
	if err := m.before("clone"); err != nil {
		return cluster.Volume{}, err
	}
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
	m := &memory{volumes: map[meta.VolumeID]*held{1: {Volume: cluster.Volume{ID: 1, Name: "root"}}}, last: 1, dirs: map[string]bool{}, asked: map[meta.VolumeID]int{}}
	return New(Config{Cluster: m, Grants: m, Logger: slog.New(slog.DiscardHandler)}), m
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
	other := New(Config{Cluster: m, Grants: m, Logger: s.Logger})
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
		if page == 0 { // the last snapshot of the page is deleted
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
	// The name of a deleted snapshot may be used in any volume.
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

// TestNothingMeetsIt: a class that the cluster can't meet has no capacity, makes no volume, also
// none from a snapshot, leaves no remains, and no volume is modified to the class.
func TestNothingMeetsIt(t *testing.T) {
	s, m := newServer()
	a := ok(t, s.CreateVolume, request("a", 1<<30)).GetVolume().GetVolumeId()
	snap := ok(t, s.CreateSnapshot, &csi.CreateSnapshotRequest{Name: "s", SourceVolumeId: a}).GetSnapshot().GetSnapshotId()
	q := request("b", 1<<30)
	for _, q.VolumeContentSource = range []*csi.VolumeContentSource{nil, {Type: &csi.VolumeContentSource_Snapshot{Snapshot: &csi.VolumeContentSource_SnapshotSource{SnapshotId: snap}}}} {
		for _, q.Parameters = range []map[string]string{{"replicas": "4"}, {"replicas": "3", "spread": "rack"}, {"class": "tape"}, {"topology": "/mars"}} {
			if _, err := s.CreateVolume(t.Context(), q); status.Code(err) != codes.ResourceExhausted {
				t.Errorf("%v: %v", q.Parameters, err)
			}
			if got := ok(t, s.GetCapacity, &csi.GetCapacityRequest{Parameters: q.Parameters}).GetAvailableCapacity(); got != 0 {
				t.Errorf("%v: a capacity of %d", q.Parameters, got)
			}
		}
	}
	if len(m.volumes) != 2 { // the root, and a
		t.Errorf("volumes are left: %v", m.volumes)
	}
	if got := ok(t, s.GetCapacity, &csi.GetCapacityRequest{Parameters: map[string]string{"replicas": "3"}}).GetAvailableCapacity(); got == 0 {
		t.Error("what can be met has no capacity")
	}
}

// TestClones: a volume made from a snapshot or a volume has the policy of its class, also if the
// call was interrupted at any step.
func TestClones(t *testing.T) {
	for _, cut := range []string{"", "clone", "set policy", "set words", "attach", "rename"} {
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
				// Meanwhile the origin is expanded and changed.
				m.volumes[2].Policy.QuotaBytes += 1 << 30
				m.volumes[2].Policy.NoAtime = !m.volumes[2].Policy.NoAtime
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
		// A volume made from a snapshot for readers only is never written.
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
	s := New(Config{Cluster: bare{m}, Grants: m, Logger: slog.New(slog.DiscardHandler)})
	for _, c := range ok(t, s.ControllerGetCapabilities, &csi.ControllerGetCapabilitiesRequest{}).GetCapabilities() {
		if slices.Contains(withClones, c.GetRpc().GetType()) {
			t.Errorf("%v is offered", c)
		}
	}
	q := request("a", 1)
	q.VolumeContentSource = &csi.VolumeContentSource{}
	fails(t, codes.InvalidArgument, s.CreateVolume, q)
}

// TestSilentVolumes: volumes that can't be opened don't keep other volumes from having
// snapshots, and the other volumes are not asked again.
func TestSilentVolumes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s, m := newServer()
		var ids []string
		for i := range 60 {
			ids = append(ids, ok(t, s.CreateVolume, request(fmt.Sprint("v", i), 1<<30)).GetVolume().GetVolumeId())
		}
		kept := ok(t, s.CreateSnapshot, &csi.CreateSnapshotRequest{Name: "kept", SourceVolumeId: ids[50]}).GetSnapshot().GetSnapshotId()
		for id := meta.VolumeID(2); id < 42; id += 5 {
			m.volumes[id].silent = true
		}
		// A controller that has just started.
		s = New(Config{Cluster: m, Grants: m, Logger: s.Logger})
		clear(m.asked)
		began := time.Now()
		const calls = 6
		for i := range calls {
			ok(t, s.CreateSnapshot, &csi.CreateSnapshotRequest{Name: fmt.Sprint("s", i), SourceVolumeId: ids[59]})
		}
		if took := time.Since(began); took > calls*lookFor {
			t.Errorf("%d snapshots took %v", calls, took)
		}
		fails(t, codes.AlreadyExists, s.CreateSnapshot, &csi.CreateSnapshotRequest{Name: "kept", SourceVolumeId: ids[58]})
		for id, n := range m.asked {
			// A silent volume is asked again if the search ended early.
			if most := map[bool]int{false: 1, true: 2}[m.volumes[id].silent]; n > most && id != 52 && id != 60 && id != 61 {
				t.Errorf("volume %d was asked %d times within %v", id, n, time.Since(began))
			}
		}
		if len(m.asked) != 60 {
			t.Errorf("%d volumes were asked", len(m.asked))
		}
		// A silent volume that answers later is remembered.
		m.volumes[7].silent = false
		m.volumes[7].snapshots = []cluster.Snapshot{{Name: "csi-late", At: 1, Ready: true}}
		time.Sleep(askAgain)
		ok(t, s.CreateSnapshot, &csi.CreateSnapshotRequest{Name: "another", SourceVolumeId: ids[59]})
		fails(t, codes.AlreadyExists, s.CreateSnapshot, &csi.CreateSnapshotRequest{Name: "late", SourceVolumeId: ids[58]})

		// A request for one snapshot, or for a volume's snapshots, asks no other volume.
		clear(m.asked)
		for _, q := range []*csi.ListSnapshotsRequest{{SnapshotId: kept}, {SourceVolumeId: ids[50]}, {SnapshotId: kept, SourceVolumeId: ids[50]}} {
			if l := ok(t, s.ListSnapshots, q).GetEntries(); len(l) != 1 || l[0].GetSnapshot().GetSnapshotId() != kept {
				t.Errorf("%v: %v", q, l)
			}
		}
		if len(m.asked) != 1 {
			t.Errorf("volumes that were asked: %v", m.asked)
		}
		// A list of all snapshots without some of them would mean that these are deleted.
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
		defer cancel()
		if _, err := s.ListSnapshots(ctx, &csi.ListSnapshotsRequest{}); status.Code(err) != codes.Unavailable && status.Code(err) != codes.DeadlineExceeded || !strings.Contains(err.Error(), "csi-v") {
			t.Errorf("a list of all: %v", err)
		}
		for _, v := range m.volumes {
			v.silent = false
		}
		time.Sleep(askAgain)
		for _, name := range []string{"last", "very-last"} {
			ok(t, s.CreateSnapshot, &csi.CreateSnapshotRequest{Name: name, SourceVolumeId: ids[59]})
		}
		if !s.index.full() {
			t.Error("all volumes were asked, and the index does not know")
		}
		// The list has no deleted snapshots.
		for _, e := range ok(t, s.ListSnapshots, &csi.ListSnapshotsRequest{}).GetEntries() {
			ok(t, s.DeleteSnapshot, &csi.DeleteSnapshotRequest{SnapshotId: e.GetSnapshot().GetSnapshotId()})
		}
		if len(s.index.of) != 0 {
			t.Errorf("of snapshots that are gone it knows %v", s.index.of)
		}
	})
}

// left returns the remaining volumes and directories except the root.
func (m *memory) left() (names []string) {
	for _, v := range m.volumes {
		if v.ID != 1 {
			names = append(names, v.Name)
		}
	}
	return append(names, slices.Sorted(maps.Keys(m.dirs))...)
}

var inTree = map[string]string{"csi.storage.k8s.io/pvc/name": "data", "csi.storage.k8s.io/pvc/namespace": "team"}

// TestNothingIsLeft: after a final answer the orchestrator may never call again, so
// nothing may be left. After other answers, the repeated call finds, or removes, the
// remains.
func TestNothingIsLeft(t *testing.T) {
	content := func(id string) *csi.VolumeContentSource {
		return &csi.VolumeContentSource{Type: &csi.VolumeContentSource_Volume{Volume: &csi.VolumeContentSource_VolumeSource{VolumeId: id}}}
	}
	for _, clone := range []bool{false, true} {
		for op, kinds := range map[string][]meta.Kind{
			"create": {meta.Invalid, meta.ResourceExceeded, meta.NotSupported}, "clone": {meta.Invalid, meta.Busy, meta.ReadOnly},
			"set": {meta.Invalid, meta.NotSupported, meta.NoSuchVolume, meta.Unavailable}, "rename": {meta.VolumeExists, meta.Corrupt, meta.Unavailable},
			"attach": {meta.NotDir, meta.ReadOnly, meta.Exists, meta.NameTooLong, meta.QuotaExceeded, meta.NotPermitted, meta.Unavailable, meta.Again},
		} {
			for _, kind := range kinds {
				for _, cut := range []string{"", "create", "clone", "set words", "attach", "rename"} {
					s, m := newServer()
					q := request("c", 2<<30)
					q.Parameters = inTree
					had := 0
					if clone {
						of := ok(t, s.CreateVolume, request("origin", 1<<30)).GetVolume().GetVolumeId()
						q.VolumeContentSource, had = content(of), 1
					}
					what := fmt.Sprintf("clone %v, cut off after %q, then %s refused with %v", clone, cut, op, kind)
					m.cut = cut
					if _, err := s.CreateVolume(t.Context(), q); cut != "" && m.cut == "" && !goesOn(err) {
						t.Errorf("%s: after an answer that did not come: %v", what, err)
					}
					if _, err := m.VolumeByName(t.Context(), "csi-c"); err == nil {
						continue // the volume is complete
					}
					m.cut = ""
					m.refuse = map[string]meta.Kind{op: kind}
					var err error
					for range 2 { // the second call finds the remains of the first
						if _, err = s.CreateVolume(t.Context(), q); err == nil {
							break
						}
						if left := m.left(); !goesOn(err) && len(left) != had {
							t.Errorf("%s: %v; left: %v", what, err, left)
						}
					}
					if err == nil {
						continue // the call did not need this operation
					}
					// If the orchestrator calls again, the driver succeeds once the
					// operation is allowed.
					m.refuse = nil
					v := ok(t, s.CreateVolume, q).GetVolume().GetVolumeId()
					if len(ok(t, s.ListVolumes, &csi.ListVolumesRequest{}).GetEntries()) != had+1 {
						t.Errorf("%s: volumes: %v", what, m.left())
					}
					ok(t, s.DeleteVolume, &csi.DeleteVolumeRequest{VolumeId: v})
					if left := m.left(); len(left) != had {
						t.Errorf("%s: at the end there are %v", what, left)
					}
				}
			}
		}
	}
	// The next call, which is certain to come, removes remains that can't be removed now.
	s, m := newServer()
	q := request("c", 1<<30)
	q.Parameters = inTree
	m.refuse = map[string]meta.Kind{"attach": meta.NotDir, "delete": meta.Unavailable}
	fails(t, codes.Unavailable, s.CreateVolume, q)
	if l := ok(t, s.ListVolumes, &csi.ListVolumesRequest{}).GetEntries(); len(m.left()) == 0 || len(l) != 0 {
		t.Errorf("listed: %v, there: %v", l, m.left())
	}
	delete(m.refuse, "delete")
	fails(t, codes.FailedPrecondition, s.CreateVolume, q)
	if left := m.left(); len(left) != 0 {
		t.Errorf("left: %v", left)
	}
	// A draft of something else is nobody's.
	m.refuse = map[string]meta.Kind{"attach": meta.Unavailable}
	fails(t, codes.Unavailable, s.CreateVolume, q)
	m.refuse = nil
	q.VolumeContentSource = content(ok(t, s.CreateVolume, request("origin", 1<<30)).GetVolume().GetVolumeId())
	ok(t, s.CreateVolume, q)
	if c, err := m.VolumeByName(t.Context(), "csi-c"); err != nil || m.volumes[c.ID].of == 0 {
		t.Errorf("a clone: %+v, %v", c, err)
	}
}

// TestChangesBeside: settings that an administrator changes while a claim is expanded or
// modified stay.
func TestChangesBeside(t *testing.T) {
	s, m := newServer()
	id := ok(t, s.CreateVolume, request("a", 1<<30)).GetVolume().GetVolumeId()
	v := m.volumes[m.last]
	m.meanwhile = func() { v.Policy.QuotaInodes, v.TrashSeconds, v.AdvisoryBytes = 1000, 60, 5 }
	ok(t, s.ControllerExpandVolume, &csi.ControllerExpandVolumeRequest{VolumeId: id, CapacityRange: &csi.CapacityRange{RequiredBytes: 2 << 30}})
	if p := v.Policy; p.QuotaBytes != 2<<30 || p.QuotaInodes != 1000 || v.TrashSeconds != 60 || v.AdvisoryBytes != 5 {
		t.Errorf("expanded: %+v", v.Terms)
	}
	m.meanwhile = func() { v.Policy.QuotaBytes, v.Compression = 9<<30, meta.CompressS2 }
	ok(t, s.ControllerModifyVolume, &csi.ControllerModifyVolumeRequest{VolumeId: id, MutableParameters: map[string]string{"noatime": "true", "advisoryQuota": "7"}})
	if p := v.Policy; p.QuotaBytes != 9<<30 || !p.NoAtime || p.QuotaInodes != 1000 || v.Compression != meta.CompressS2 || v.AdvisoryBytes != 7 {
		t.Errorf("modified: %+v", v.Terms)
	}
}

// TestTwoControllers: one controller removes a draft, and another controller completes the draft
// before the removal. Then the volume stays, and stays attached.
func TestTwoControllers(t *testing.T) {
	s, m := newServer()
	q := request("c", 1<<30)
	q.Parameters = inTree
	m.refuse = map[string]meta.Kind{"rename": meta.Corrupt}
	other := New(Config{Cluster: m, Grants: m, Logger: s.Logger})
	var v string
	m.meanwhile = func() {
		m.meanwhile, m.refuse = nil, nil
		v = ok(t, other.CreateVolume, q).GetVolume().GetVolumeId()
		// The removing controller had looked at the draft before.
		m.volumes[m.last].Path = ""
	}
	fails(t, codes.Unavailable, s.CreateVolume, q) // which is called again
	if left := m.left(); !slices.Equal(left, []string{"csi-c", "/kubernetes/team"}) {
		t.Fatalf("there: %v", left)
	}
	if at := m.volumes[m.last].Path; at != "/kubernetes/team/data" {
		t.Errorf("it hangs at %q", at)
	}
	if again := ok(t, s.CreateVolume, q).GetVolume().GetVolumeId(); again != v || v == "" {
		t.Errorf("it is %s, and was %s", again, v)
	}
}

// TestDetachedMeanwhile: another controller detaches a draft to remove it, and dies. The
// controller that completes the draft attaches it again.
func TestDetachedMeanwhile(t *testing.T) {
	s, m := newServer()
	q := request("c", 1<<30)
	q.Parameters = inTree
	s.Step = func(step string) {
		if step == "create.name" {
			m.volumes[m.last].Path = ""
		}
	}
	ok(t, s.CreateVolume, q)
	if at := m.volumes[m.last].Path; at != "/kubernetes/team/data" {
		t.Errorf("it hangs at %q", at)
	}
}

// TestLongClaims: a claim with the longest possible name is attached beside another
// claim.
func TestLongClaims(t *testing.T) {
	s, m := newServer()
	long := strings.Repeat("c", 253)
	paths := map[string]bool{}
	for i := range 3 {
		q := request(fmt.Sprint("v", i), 1<<30)
		q.Parameters = map[string]string{"csi.storage.k8s.io/pvc/name": long, "csi.storage.k8s.io/pvc/namespace": "team"}
		ok(t, s.CreateVolume, q)
		at := m.volumes[m.last].Path
		if paths[at] || path.Dir(at) != "/kubernetes/team" || len(path.Base(at)) > meta.MaxName {
			t.Errorf("volume %d hangs at %s", i, at)
		}
		paths[at] = true
	}
}

// claimAt returns a request for a claim attached at a path.
func claimAt(name, at string) *csi.CreateVolumeRequest {
	q := request(name, 1<<30)
	q.Parameters = map[string]string{"attachPath": at}
	return q
}

// TestEmptyDirectories: the directory of a namespace is removed with its last volume,
// also if an earlier call was interrupted, or could not remove the directory.
func TestEmptyDirectories(t *testing.T) {
	for _, cut := range []string{"", "detach", "tidy"} {
		for _, another := range []bool{false, true} { // another process goes on
			s, m := newServer()
			q := request("a", 1<<30)
			q.Parameters = inTree
			id := ok(t, s.CreateVolume, q).GetVolume().GetVolumeId()
			ok(t, s.CreateVolume, claimAt("b", "/home/k8s/{volume}"))
			m.cut = cut
			if cut != "" {
				fails(t, codes.Unavailable, s.DeleteVolume, &csi.DeleteVolumeRequest{VolumeId: id})
			}
			if another {
				s = New(Config{Cluster: m, Grants: m, Logger: s.Logger})
				m.dirs["/kubernetes/left"] = true // by a call before
			}
			m.dirs["/home/people"] = true // made by people, beside the directories of claims
			ok(t, s.DeleteVolume, &csi.DeleteVolumeRequest{VolumeId: id})
			if cut == "" {
				delete(m.dirs, "/kubernetes/left") // no record shows that directories could be left
			}
			if left := m.left(); !slices.Equal(left, []string{"csi-b", "/home/k8s", "/home/people"}) {
				t.Errorf("cut off after %q, another process %v: left %v", cut, another, left)
			}
		}
	}
	// A directory that may not be removed stays, and the volume goes.
	s, m := newServer()
	q := request("a", 1<<30)
	q.Parameters = inTree
	id := ok(t, s.CreateVolume, q).GetVolume().GetVolumeId()
	m.refuse = map[string]meta.Kind{"tidy": meta.NotPermitted}
	ok(t, s.DeleteVolume, &csi.DeleteVolumeRequest{VolumeId: id})
	if left := m.left(); !slices.Equal(left, []string{"/kubernetes/team"}) {
		t.Errorf("left: %v", left)
	}
}

// TestOthersDirectories: a directory that can't be read delays only the deletion of the
// volumes that were attached there last.
func TestOthersDirectories(t *testing.T) {
	for _, kind := range []meta.Kind{meta.Unavailable, meta.NoSpace, meta.KindOK} { // KindOK: nothing is said
		synctest.Test(t, func(t *testing.T) {
			s, m := newServer()
			away := &csi.DeleteVolumeRequest{VolumeId: ok(t, s.CreateVolume, claimAt("a", "/pods/away/{volume}")).GetVolume().GetVolumeId()}
			if kind == meta.KindOK {
				m.silent = map[string]bool{"/pods/away": true}
			} else {
				m.refuse = map[string]meta.Kind{"/pods/away": kind}
			}
			deleteAway := func() {
				t.Helper()
				ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
				defer cancel()
				if _, err := s.DeleteVolume(ctx, away); err == nil {
					t.Errorf("%v: a volume is gone, and nobody knows of its directory", kind)
				}
			}
			deleteAway()
			for range 3 {
				another := ok(t, s.CreateVolume, claimAt("b", "/pods/here/{volume}")).GetVolume().GetVolumeId()
				began := time.Now()
				ok(t, s.DeleteVolume, &csi.DeleteVolumeRequest{VolumeId: another})
				if took := time.Since(began); took > othersWait {
					t.Errorf("%v: another volume waits %v", kind, took)
				}
			}
			if left := m.left(); !slices.Equal(left, []string{"csi-a", "/pods/away"}) {
				t.Errorf("%v: left %v", kind, left)
			}
			deleteAway()
			m.refuse, m.silent = nil, nil
			ok(t, s.DeleteVolume, away)
			if left := m.left(); len(left) != 0 {
				t.Errorf("%v: at the end there are %v", kind, left)
			}
		})
	}
	// A failed search for other calls' directories does not delay deletions either. The
	// next call tries again after errors that may go away.
	for _, kind := range []meta.Kind{meta.Unavailable, meta.AccessDenied, meta.NotFound} {
		s, m := newServer()
		var ids []string
		for i := range 2 {
			ids = append(ids, ok(t, s.CreateVolume, request(fmt.Sprint(i), 1<<30)).GetVolume().GetVolumeId())
		}
		m.dirs["/kubernetes/left"] = true
		m.refuse = map[string]meta.Kind{"/kubernetes": kind}
		ok(t, s.DeleteVolume, &csi.DeleteVolumeRequest{VolumeId: ids[0]})
		m.refuse = nil
		ok(t, s.DeleteVolume, &csi.DeleteVolumeRequest{VolumeId: ids[1]})
		if left := m.left(); (len(left) == 0) != (kind == meta.Unavailable) {
			t.Errorf("%v: left %v", kind, left)
		}
	}
}

func TestHealth(t *testing.T) {
	s, m := newServer()
	var ids []string
	m.health = map[meta.VolumeID]meta.VolumeHealth{1: {Failed: "root"}, 99: {Failed: "another's"}}
	type told map[string]csi.VolumeHealthErrorType
	const (
		degraded, away, lost = csi.VolumeHealthErrorType_DEGRADED, csi.VolumeHealthErrorType_INACCESSIBLE, csi.VolumeHealthErrorType_DATA_LOSS
	)
	cases := []struct {
		have meta.VolumeHealth
		want told
	}{
		{meta.VolumeHealth{}, told{}},
		{meta.VolumeHealth{Advisory: true}, told{}},
		{meta.VolumeHealth{Failed: "no state"}, told{"CannotBeServed": away}},
		{meta.VolumeHealth{Recovering: true}, told{"Recovering": away}},
		{meta.VolumeHealth{Lost: 2, Endangered: 1, UnderReplicated: 4}, told{"ChunksUnreachable": away, "TooFewReplicas": degraded}},
		{meta.VolumeHealth{AcceptedLost: 1, Corrupt: 1, Away: 3}, told{"ChunksLost": lost, "CorruptReplicas": degraded, "ServersAway": degraded}},
		{meta.VolumeHealth{Unplaceable: "2 of 3 servers"}, told{"PolicyCannotBeMet": degraded}},
		{meta.VolumeHealth{Unplaceable: "2 of 3 servers", Unmet: "2 hosts"}, told{"PolicyCannotBeMet": degraded}},
		{meta.VolumeHealth{GivenUpFiles: 1, GivenUpBytes: 7}, told{"BytesGivenUp": lost}},
		{meta.VolumeHealth{Unmet: "2 hosts"}, told{"PolicyCannotBeMet": degraded}},
		{meta.VolumeHealth{UsedBytes: 95, QuotaBytes: 100, UsedInodes: 10, QuotaInodes: 10}, told{"BytesNearlyUsedUp": degraded, "InodesUsedUp": degraded}},
	}
	for i, c := range cases {
		ids = append(ids, ok(t, s.CreateVolume, request(fmt.Sprint("v", i), 1<<30)).GetVolume().GetVolumeId())
		m.health[m.last] = c.have
	}
	read := func(h *csi.VolumeHealth) told {
		got := told{}
		for _, e := range h.GetHealthStatuses() {
			got[e.GetReason()] = e.GetStatus()
		}
		if len(got) != len(h.GetHealthStatuses()) {
			t.Errorf("a reason is told twice: %v", h)
		}
		return got
	}
	for i, c := range cases {
		h := ok(t, s.ControllerGetVolumeHealth, &csi.ControllerGetVolumeHealthRequest{VolumeId: ids[i]}).GetVolumeHealth()
		if got := read(h); h.GetVolumeId() != ids[i] || !maps.Equal(got, c.want) {
			t.Errorf("%+v: %v, want %v", c.have, got, c.want)
		}
	}
	for n := range int32(4) {
		var got []string
		for q := (&csi.ControllerListVolumeHealthRequest{MaxEntries: n}); ; {
			l := ok(t, s.ControllerListVolumeHealth, q)
			for _, e := range l.GetEntries() {
				got = append(got, e.GetVolumeId())
			}
			if q.StartingToken = l.GetNextToken(); q.StartingToken == "" {
				break
			}
		}
		if !slices.Equal(got, ids[2:]) {
			t.Errorf("in pages of %d: %v", n, got)
		}
	}
	fails(t, codes.InvalidArgument, s.ControllerGetVolumeHealth, &csi.ControllerGetVolumeHealthRequest{})
	fails(t, codes.NotFound, s.ControllerGetVolumeHealth, &csi.ControllerGetVolumeHealthRequest{VolumeId: "nothing"})
	fails(t, codes.Aborted, s.ControllerListVolumeHealth, &csi.ControllerListVolumeHealthRequest{StartingToken: "x"})
	fails(t, codes.InvalidArgument, s.ControllerListVolumeHealth, &csi.ControllerListVolumeHealthRequest{MaxEntries: -1})
	m.refuse = map[string]meta.Kind{"health": meta.Unavailable} // a controller without the answer does not claim health
	fails(t, codes.Unavailable, s.ControllerGetVolumeHealth, &csi.ControllerGetVolumeHealthRequest{VolumeId: ids[0]})
	fails(t, codes.Unavailable, s.ControllerListVolumeHealth, &csi.ControllerListVolumeHealthRequest{})
}
