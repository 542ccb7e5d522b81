package csi

import (
	"errors"
	"fmt"
	"hash/crc32"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
)

func atoi(t *testing.T, s string) int {
	t.Helper()
	n, err := strconv.Atoi(s)
	if err != nil {
		t.Fatal(err)
	}
	return n
}

// rehandle gives a handle another volume's number, with a right checksum.
func rehandle(id string, change func(uint32) uint32) string {
	parts := strings.Split(id, "-")
	n, err := strconv.ParseUint(parts[2], 16, 32)
	if err != nil {
		panic(err)
	}
	body := fmt.Sprintf("%s-%s-%06x", parts[0], parts[1], change(uint32(n)))
	return fmt.Sprintf("%s-%08x", body, crc32.Checksum([]byte(body), crc32.MakeTable(crc32.Castagnoli)))
}

// TestPlaces: a node tells its place. A volume lands in the rack of the request, and tells the
// rack; a request for a rack without servers is refused.
func TestPlaces(t *testing.T) {
	r := newRig(t)
	r.drive(nil, "--max-volumes", "7")
	here := map[string]string{"topology.penstock.io/zone": "dc1", "topology.penstock.io/rack": "rack1", "topology.penstock.io/host": "node1"}
	info := must(t, r.node().NodeGetInfo, &csi.NodeGetInfoRequest{})
	if got := info.GetAccessibleTopology().GetSegments(); info.GetNodeId() != "node1" || !maps.Equal(got, here) {
		t.Errorf("node %s stands at %v", info.GetNodeId(), got)
	}
	if n := info.GetMaxVolumesPerNode(); n != 7 {
		t.Errorf("it takes %d volumes", n)
	}
	there := maps.Clone(here)
	there["topology.penstock.io/rack"] = "rack9"
	q := claim("pvc-1", map[string]string{"topologyLevel": "rack"})
	q.AccessibilityRequirements = &csi.TopologyRequirement{Requisite: []*csi.Topology{{Segments: there}}}
	_, err := r.controller().CreateVolume(t.Context(), q)
	wants(t, "a rack without servers", err, codes.ResourceExhausted)
	q.AccessibilityRequirements.Requisite = append(q.AccessibilityRequirements.Requisite, &csi.Topology{Segments: here})
	v := must(t, r.controller().CreateVolume, q).GetVolume()
	want := map[string]string{"topology.penstock.io/zone": "dc1", "topology.penstock.io/rack": "rack1"}
	if got := v.GetAccessibleTopology(); len(got) != 1 || !maps.Equal(got[0].GetSegments(), want) {
		t.Errorf("it can be reached from %v", got)
	}
	if again := must(t, r.controller().CreateVolume, q).GetVolume(); again.GetVolumeId() != v.GetVolumeId() {
		t.Errorf("made twice: %v", again)
	}
	out, err := r.ctl("volume", "show", "csi-pvc-1", "--output", "yaml")
	if err != nil || !strings.Contains(string(out), "topology: /dc1/rack1\n") {
		t.Errorf("%s %v", out, err)
	}
	for _, c := range []struct {
		segments map[string]string
		some     bool
	}{{here, true}, {there, false}, {nil, true}} {
		q := &csi.GetCapacityRequest{Parameters: map[string]string{"topologyLevel": "rack"}}
		if c.segments != nil {
			q.AccessibleTopology = &csi.Topology{Segments: c.segments}
		}
		if got := must(t, r.controller().GetCapacity, q).GetAvailableCapacity(); got > 0 != c.some {
			t.Errorf("capacity %d at %v", got, c.segments)
		}
		// Without a level the pod's place does not matter.
		if q.Parameters = nil; must(t, r.controller().GetCapacity, q).GetAvailableCapacity() == 0 {
			t.Errorf("no capacity at %v for volumes that lie anywhere", c.segments)
		}
	}
	// The place by the node's labels, if any, goes before the place of the chunk server.
	file := r.path("topology")
	for text, rack := range map[string]string{"none": "rack1", "/zone2/row1/rack7/node1": "row1.rack7"} {
		if err := os.WriteFile(file, []byte(text+"\n"), 0o600); err != nil {
			t.Fatal(err)
		}
		r.driver.Kill()
		r.drive(nil, "--topology-file", file)
		if got := again(r, r.node().NodeGetInfo, &csi.NodeGetInfoRequest{}).GetAccessibleTopology().GetSegments()["topology.penstock.io/rack"]; got != rack {
			t.Errorf("with %q in the file the node stands in rack %q", text, got)
		}
	}
	must(t, r.controller().DeleteVolume, &csi.DeleteVolumeRequest{VolumeId: v.GetVolumeId()})
	r.clean()
}

// TestPages: volumes are listed once each, in pages, whichever volumes are deleted meanwhile.
func TestPages(t *testing.T) {
	r := newRig(t)
	r.drive(nil)
	if _, err := r.ctl("volume", "create", "by-hand"); err != nil {
		t.Fatal(err)
	}
	var made []string
	for i := range 5 {
		made = append(made, must(t, r.controller().CreateVolume, claim(fmt.Sprint("pvc-", i), nil)).GetVolume().GetVolumeId())
	}
	var seen []string
	token := ""
	for page := 0; ; page++ {
		a := must(t, r.controller().ListVolumes, &csi.ListVolumesRequest{MaxEntries: 2, StartingToken: token})
		for _, e := range a.GetEntries() {
			seen = append(seen, e.GetVolume().GetVolumeId())
		}
		if page == 0 { // the last volume of the page goes
			must(t, r.controller().DeleteVolume, &csi.DeleteVolumeRequest{VolumeId: made[1]})
		}
		if token = a.GetNextToken(); token == "" {
			break
		}
	}
	if !slices.Equal(seen, made) {
		t.Errorf("listed %v; made %v", seen, made)
	}
	_, err := r.controller().ListVolumes(t.Context(), &csi.ListVolumesRequest{StartingToken: "-1"})
	wants(t, "a wrong token", err, codes.Aborted)
	_, err = r.controller().ListVolumes(t.Context(), &csi.ListVolumesRequest{MaxEntries: -1})
	wants(t, "a negative number", err, codes.InvalidArgument)
	for _, id := range made {
		must(t, r.controller().DeleteVolume, &csi.DeleteVolumeRequest{VolumeId: id})
	}
	if _, err := r.ctl("volume", "delete", "by-hand", "--yes"); err != nil {
		t.Fatal(err)
	}
	r.clean()
}

// TestInTheTree: the volume of a claim hangs at its path, and its files are seen through the
// path. A second volume of the same name hangs beside the first, and the directories go with the
// last volume.
func TestInTheTree(t *testing.T) {
	r := newRig(t)
	r.drive(nil)
	one := must(t, r.controller().CreateVolume, claim("pvc-1", inTree)).GetVolume().GetVolumeId()
	two := must(t, r.controller().CreateVolume, claim("pvc-2", inTree)).GetVolume().GetVolumeId()
	tree, pod := r.path("tree"), r.path("pod")
	must(t, r.node().NodeStageVolume, &csi.NodeStageVolumeRequest{VolumeId: one, StagingTargetPath: pod, VolumeCapability: capability(manyWriters)})
	if err := os.WriteFile(r.path("pod", "f"), []byte("x"), 0o644); err != nil {
		t.Fatal(err)
	}
	if err := os.Mkdir(tree, 0o755); err != nil {
		t.Fatal(err)
	}
	p := r.start(nil, "mount", "--cluster", r.cluster(), "/", tree)
	r.until("the tree shows the claim", func() error {
		_, err := os.Stat(r.path("tree", "kubernetes", "team", "data", "f"))
		return err
	})
	l, err := os.ReadDir(r.path("tree", "kubernetes", "team"))
	if err != nil || len(l) != 2 || l[0].Name() != "data" || !strings.HasPrefix(l[1].Name(), "data.") {
		t.Errorf("claims: %v, %v", l, err)
	}
	must(t, r.node().NodeUnstageVolume, &csi.NodeUnstageVolumeRequest{VolumeId: one, StagingTargetPath: pod})
	for _, id := range []string{one, two} {
		must(t, r.controller().DeleteVolume, &csi.DeleteVolumeRequest{VolumeId: id})
	}
	r.until("the namespace's directory is gone", func() error {
		if l, err := os.ReadDir(r.path("tree", "kubernetes")); err != nil || len(l) > 0 {
			return fmt.Errorf("%v %w", l, err)
		}
		return nil
	})
	if err := unix.Unmount(tree, 0); err != nil {
		t.Error(err)
	}
	<-p.Done()
	r.clean()
}

// TestUse: the volume of a group, a volume for a single writer, statistics, growing, and the
// same volume staged in another way.
func TestUse(t *testing.T) {
	r := newRig(t)
	r.drive(nil)
	id := must(t, r.controller().CreateVolume, claim("pvc-1", map[string]string{"compression": "zstd"})).GetVolume().GetVolumeId()
	if out, err := r.ctl("volume", "show", "csi-pvc-1", "--output", "yaml"); err != nil || !strings.Contains(string(out), "compression: zstd\n") {
		t.Errorf("%s %v", out, err)
	}
	staging, a, b := r.path("staging"), r.path("a"), r.path("b")
	alone := capability(oneWriter)
	alone.GetMount().VolumeMountGroup = "2000"
	must(t, r.node().NodeStageVolume, &csi.NodeStageVolumeRequest{VolumeId: id, StagingTargetPath: staging, VolumeCapability: alone})
	var st unix.Stat_t
	if err := unix.Stat(staging, &st); err != nil || st.Gid != 2000 || st.Mode&0o2070 != 0o2070 {
		t.Errorf("group %d, mode %o, %v", st.Gid, st.Mode, err)
	}
	other := capability(oneWriter, "noexec")
	_, err := r.node().NodeStageVolume(t.Context(), &csi.NodeStageVolumeRequest{VolumeId: id, StagingTargetPath: staging, VolumeCapability: other})
	wants(t, "staged in another way", err, codes.AlreadyExists)
	p := publish(id, staging, a)
	p.VolumeCapability = alone
	must(t, r.node().NodePublishVolume, p)
	q := publish(id, staging, b)
	q.VolumeCapability = alone
	_, err = r.node().NodePublishVolume(t.Context(), q)
	wants(t, "a second pod", err, codes.FailedPrecondition)
	p.Readonly = true
	_, err = r.node().NodePublishVolume(t.Context(), p)
	wants(t, "the same pod, read-only now", err, codes.AlreadyExists)

	total := func(unit csi.VolumeUsage_Unit) int64 {
		for _, u := range must(t, r.node().NodeGetVolumeStats, &csi.NodeGetVolumeStatsRequest{VolumeId: id, VolumePath: a}).GetUsage() {
			if u.GetUnit() == unit {
				return u.GetTotal()
			}
		}
		return 0
	}
	if got := total(csi.VolumeUsage_BYTES); got != 64<<20 {
		t.Errorf("%d bytes", got)
	}
	must(t, r.controller().ControllerExpandVolume, &csi.ControllerExpandVolumeRequest{VolumeId: id, CapacityRange: &csi.CapacityRange{RequiredBytes: 256 << 20}})
	r.until("the mount sees the new size", func() error {
		if got := total(csi.VolumeUsage_BYTES); got != 256<<20 {
			return fmt.Errorf("%d bytes", got)
		}
		return nil
	})
	must(t, r.controller().ControllerModifyVolume, &csi.ControllerModifyVolumeRequest{VolumeId: id, MutableParameters: map[string]string{"inodes": "1000", "compression": "s2"}})
	if out, err := r.ctl("volume", "show", "csi-pvc-1", "--output", "yaml"); err != nil || !strings.Contains(string(out), "compression: s2\n") {
		t.Errorf("%s %v", out, err)
	}
	r.until("the mount sees the new number of files", func() error {
		if got := total(csi.VolumeUsage_INODES); got != 1000 {
			return fmt.Errorf("%d files", got)
		}
		return nil
	})
	_, err = r.controller().ControllerExpandVolume(t.Context(), &csi.ControllerExpandVolumeRequest{VolumeId: id, CapacityRange: &csi.CapacityRange{LimitBytes: 1 << 20}})
	wants(t, "shrunk", err, codes.OutOfRange)
	r.gone(id, staging, a)
	r.clean()
}

func fromSnapshot(id string) *csi.VolumeContentSource {
	return &csi.VolumeContentSource{Type: &csi.VolumeContentSource_Snapshot{Snapshot: &csi.VolumeContentSource_SnapshotSource{SnapshotId: id}}}
}

// TestRestore: a volume made of a snapshot has the contents of the snapshot, and a volume made of
// a volume has the present contents of the origin, each with a size of its own. Bytes written to
// one volume are in no other.
func TestRestore(t *testing.T) {
	r := newRig(t)
	r.drive(nil)
	id, staging := r.staged("pvc-1")
	put := func(path, text string) {
		t.Helper()
		if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	put(r.path("pvc-1", "f"), "one")
	x := must(t, r.controller().CreateSnapshot, &csi.CreateSnapshotRequest{Name: "s", SourceVolumeId: id}).GetSnapshot().GetSnapshotId()
	put(r.path("pvc-1", "f"), "two")
	restored := claim("pvc-2", nil)
	restored.VolumeContentSource = fromSnapshot(x)
	restored.CapacityRange.RequiredBytes = 128 << 20
	copied := claim("pvc-3", nil)
	copied.VolumeContentSource = &csi.VolumeContentSource{Type: &csi.VolumeContentSource_Volume{Volume: &csi.VolumeContentSource_VolumeSource{VolumeId: id}}}
	made := map[string]string{}
	for _, c := range []struct {
		q    *csi.CreateVolumeRequest
		want string
	}{{restored, "one"}, {copied, "two"}} {
		v := must(t, r.controller().CreateVolume, c.q).GetVolume()
		if v.GetCapacityBytes() != c.q.GetCapacityRange().GetRequiredBytes() {
			t.Errorf("%s has %d bytes", c.q.GetName(), v.GetCapacityBytes())
		}
		if again := must(t, r.controller().CreateVolume, c.q).GetVolume(); again.GetVolumeId() != v.GetVolumeId() {
			t.Errorf("%s was made twice", c.q.GetName())
		}
		at := r.path(c.q.GetName())
		made[v.GetVolumeId()] = at
		must(t, r.node().NodeStageVolume, &csi.NodeStageVolumeRequest{VolumeId: v.GetVolumeId(), StagingTargetPath: at, VolumeCapability: capability(manyWriters)})
		if b, err := os.ReadFile(at + "/f"); err != nil || string(b) != c.want {
			t.Errorf("DATA: %s reads %q, %v; want %q", c.q.GetName(), b, err, c.want)
		}
		put(at+"/f", "its own")
	}
	if b, err := os.ReadFile(r.path("pvc-1", "f")); err != nil || string(b) != "two" {
		t.Errorf("DATA: the origin reads %q, %v", b, err)
	}
	// The deleted snapshot is gone except for the volume that needs the snapshot, and the origin
	// stays for as long.
	must(t, r.controller().DeleteSnapshot, &csi.DeleteSnapshotRequest{SnapshotId: x})
	must(t, r.controller().DeleteSnapshot, &csi.DeleteSnapshotRequest{SnapshotId: x})
	if l := must(t, r.controller().ListSnapshots, &csi.ListSnapshotsRequest{}).GetEntries(); len(l) != 0 {
		t.Errorf("a deleted snapshot is listed: %v", l)
	}
	late := claim("pvc-4", nil)
	late.VolumeContentSource = fromSnapshot(x)
	_, err := r.controller().CreateVolume(t.Context(), late)
	wants(t, "a volume from a deleted snapshot", err, codes.NotFound)
	_, err = r.controller().DeleteVolume(t.Context(), &csi.DeleteVolumeRequest{VolumeId: id})
	wants(t, "the origin is deleted", err, codes.FailedPrecondition)
	for v, at := range made {
		if b, err := os.ReadFile(at + "/f"); err != nil || string(b) != "its own" {
			t.Errorf("DATA: %s reads %q, %v", at, b, err)
		}
		r.gone(v, at)
	}
	r.until("the snapshot went with the volume", func() error {
		if out, err := r.ctl("snapshot", "list", "csi-pvc-1"); err != nil || strings.Contains(string(out), "csi-s") {
			return fmt.Errorf("%s %w", out, err)
		}
		return nil
	})
	r.gone(id, staging)
	r.clean()
}

// TestSnapshotIsMountedWithItsIndex: the node part keeps indexes of snapshots in its own
// directory, the only writable directory of a container with a read-only root.
func TestSnapshotIsMountedWithItsIndex(t *testing.T) {
	r := newRig(t)
	r.drive(nil)
	id, staging := r.staged("pvc-1")
	if err := os.WriteFile(filepath.Join(staging, "f"), []byte("text"), 0o644); err != nil {
		t.Fatal(err)
	}
	snapshot := func(args ...string) {
		t.Helper()
		if _, err := r.ctl(append([]string{"snapshot"}, args...)...); err != nil {
			t.Fatal(err)
		}
	}
	snapshot("create", "csi-pvc-1", "v1")
	const view = "name=csi-pvc-1@v1"
	at := r.path("view")
	must(t, r.node().NodeStageVolume, &csi.NodeStageVolumeRequest{VolumeId: view, StagingTargetPath: at, VolumeCapability: capability(manyReaders)})
	r.until("the index is in use", func() error {
		b := make([]byte, 1024)
		n, err := unix.Getxattr(at, "penstock.index", b)
		if err == nil && !strings.HasPrefix(string(b[:n]), "ready") {
			err = errors.New(string(b[:n]))
		}
		return err
	})
	if l, err := filepath.Glob(filepath.Join(r.path("state"), "indexes", "*.index")); err != nil || len(l) != 1 {
		t.Errorf("%v, %v", l, err)
	}
	must(t, r.node().NodeUnstageVolume, &csi.NodeUnstageVolumeRequest{VolumeId: view, StagingTargetPath: at})
	snapshot("delete", "csi-pvc-1", "v1", "--yes")
	r.gone(id, staging)
	r.clean()
}

// TestReadOnlyClaim: a claim of a snapshot that no pod may write is served by the snapshot
// itself, with its index. The snapshot stays while mounted, whatever happens to the claim.
func TestReadOnlyClaim(t *testing.T) {
	r := newRig(t)
	r.drive(nil)
	id, staging := r.staged("pvc-1")
	f := filepath.Join(staging, "f")
	if err := os.WriteFile(f, []byte("one"), 0o644); err != nil {
		t.Fatal(err)
	}
	x := must(t, r.controller().CreateSnapshot, &csi.CreateSnapshotRequest{Name: "s", SourceVolumeId: id}).GetSnapshot().GetSnapshotId()
	if err := os.WriteFile(f, []byte("two"), 0o644); err != nil {
		t.Fatal(err)
	}
	made := func(name string, mode csi.VolumeCapability_AccessMode_Mode) string {
		t.Helper()
		q := claim(name, nil)
		q.VolumeContentSource, q.VolumeCapabilities = fromSnapshot(x), []*csi.VolumeCapability{capability(mode)}
		v := must(t, r.controller().CreateVolume, q).GetVolume().GetVolumeId()
		if again := must(t, r.controller().CreateVolume, q).GetVolume().GetVolumeId(); again != v {
			t.Errorf("%s was made twice", name)
		}
		return v
	}
	stage := func(v, at string, mode csi.VolumeCapability_AccessMode_Mode) *csi.NodeStageVolumeRequest {
		return &csi.NodeStageVolumeRequest{VolumeId: v, StagingTargetPath: r.path(at), VolumeCapability: capability(mode)}
	}
	// shows demands that a mount shows the snapshot's text.
	shows := func(at string) string {
		t.Helper()
		if b, err := os.ReadFile(r.path(at, "f")); err != nil || string(b) != "one" {
			t.Errorf("DATA: %s reads %q, %v", at, b, err)
		}
		all, err := mountinfo.GetMounts(mountinfo.SingleEntryFilter(r.path(at)))
		if err != nil || len(all) != 1 {
			t.Fatal(all, err)
		}
		return all[0].Source
	}
	pins := func() int { t.Helper(); return r.pins("csi-pvc-1") }
	a, b, w := made("a", manyReaders), made("b", manyReaders), made("w", manyWriters)
	for range 2 {
		must(t, r.node().NodeStageVolume, stage(a, "at-a", manyReaders))
	}
	must(t, r.node().NodeStageVolume, stage(b, "at-b", manyReaders))
	must(t, r.node().NodeStageVolume, stage(w, "at-w", manyWriters))
	for at, want := range map[string]string{"at-a": "csi-pvc-1@csi-s:", "at-b": "csi-pvc-1@csi-s:", "at-w": "csi-w:"} {
		if got := shows(at); got != want {
			t.Errorf("at %s is mounted %s, not %s", at, got, want)
		}
	}
	if n := pins(); n != 2 {
		t.Errorf("%d pins for two mounts", n)
	}
	r.until("the index is in use", func() error {
		buf := make([]byte, 1024)
		n, err := unix.Getxattr(r.path("at-a"), "penstock.index", buf)
		if err == nil && !strings.HasPrefix(string(buf[:n]), "ready") {
			err = errors.New(string(buf[:n]))
		}
		return err
	})
	if err := os.WriteFile(r.path("at-a", "f"), nil, 0o644); !errors.Is(err, unix.EROFS) {
		t.Errorf("a claim that is read only was written: %v", err)
	}
	if err := os.WriteFile(r.path("at-w", "f"), []byte("mine"), 0o644); err != nil {
		t.Error(err)
	}
	series := func(handle string) string {
		return `penstock_client_rpcs_total{handle="` + handle + `",volume="csi-pvc-1@csi-s"}`
	}
	r.tells("both mounts of the snapshot are told of", []string{series(a), series(b)}, nil)
	publishA := publish(a, r.path("at-a"), r.path("pod"))
	publishA.VolumeCapability = capability(manyReaders)
	must(t, r.node().NodePublishVolume, publishA)
	if got := shows("pod"); got != "csi-pvc-1@csi-s:" {
		t.Errorf("a pod sees %s", got)
	}
	r.gone(a, r.path("at-a"), r.path("pod"))
	r.gone(w, r.path("at-w"))
	if n := pins(); n != 1 {
		t.Errorf("%d pins for one mount", n)
	}

	// An administrator deletes the claim under its pods.
	must(t, r.controller().DeleteVolume, &csi.DeleteVolumeRequest{VolumeId: b})
	_, err := r.controller().DeleteSnapshot(t.Context(), &csi.DeleteSnapshotRequest{SnapshotId: x})
	wants(t, "a snapshot that is mounted is deleted", err, codes.FailedPrecondition)
	shows("at-b")
	// The mount's process is killed. The kernel would return the cached root for an hour.
	health := &csi.NodeGetVolumeHealthRequest{VolumeId: id, StagingTargetPath: r.path("at-b")}
	if h := must(t, r.node().NodeGetVolumeHealth, health).GetVolumeHealth().GetHealthStatuses(); len(h) > 0 {
		t.Errorf("a healthy mount: %v", h)
	}
	for _, line := range r.processes() {
		if strings.HasSuffix(line, r.path("at-b")+" ") {
			if err := syscall.Kill(atoi(t, strings.Split(line, "/")[2]), syscall.SIGKILL); err != nil {
				t.Fatal(err)
			}
		}
	}
	r.until("its health tells", func() error {
		if h := must(t, r.node().NodeGetVolumeHealth, health).GetVolumeHealth().GetHealthStatuses(); len(h) != 1 {
			return errors.New("it is said to be healthy")
		}
		return nil
	})
	must(t, r.node().NodeUnstageVolume, &csi.NodeUnstageVolumeRequest{VolumeId: b, StagingTargetPath: r.path("at-b")})

	// An administrator allows writes after all.
	c := made("c", manyReaders)
	if _, err := r.ctl("volume", "set", "csi-c", "--immutable=false"); err != nil {
		t.Fatal(err)
	}
	must(t, r.node().NodeStageVolume, stage(c, "at-c", manyWriters))
	if got := shows("at-c"); got != "csi-c:" {
		t.Errorf("a volume that may be written is mounted from %s", got)
	}
	// The deleted snapshot still serves a claim mounted from the snapshot.
	d := made("d", manyReaders)
	must(t, r.controller().DeleteSnapshot, &csi.DeleteSnapshotRequest{SnapshotId: x})
	must(t, r.node().NodeStageVolume, stage(d, "at-d", manyReaders))
	if got := shows("at-d"); got != "csi-pvc-1@csi-s:" {
		t.Errorf("at at-d is mounted %s", got)
	}
	shows("at-c")
	r.gone(c, r.path("at-c"))
	r.gone(d, r.path("at-d"))
	r.gone(id, staging)
	r.clean()
}
