package node

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/moby/sys/mountinfo"
	dto "github.com/prometheus/client_model/go"
	"golang.org/x/sys/unix"

	"penstock.io/penstock/csi/cluster"
	"penstock.io/penstock/csi/handle"
	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/process"
)

// forgets is a holder without mounts, which notes the requests to forget.
type forgets []string

func (f *forgets) Orphans() ([]string, error)          { return nil, nil }
func (f *forgets) Unsynced(string) (int, int64, error) { return 0, 0, nil }
func (f *forgets) Forget(path string) error            { *f = append(*f, path); return nil }
func (f *forgets) forgot(path string) bool             { return slices.Contains(*f, path) }
func exists(f folder) bool                             { _, err := os.Stat(string(f)); return err == nil }

// TestRecover: a staged volume that is not mounted any more is forgotten. A volume in an unknown
// state is left alone: the holder may have bytes of a pod.
func TestRecover(t *testing.T) {
	holder := new(forgets)
	s := New(Config{State: t.TempDir(), Holder: holder, Logger: slog.New(slog.DiscardHandler)})
	staged := func(volume string) folder {
		t.Helper()
		f := s.folderOf(volume, "/staging/"+volume)
		if err := f.write(record{Volume: volume, Staging: "/staging/" + volume, Source: volume + ":/"}); err != nil {
			t.Fatal(err)
		}
		return f
	}
	again, before := staged("again"), staged("before")
	for f, in := range map[folder]string{again: process.Boot(), before: "another"} {
		r, err := f.read()
		if r.Boot = in; err == nil {
			err = f.write(r)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	gone, damaged, next, unknown := staged("gone"), staged("damaged"), staged("next"), staged("unknown")
	if err := os.WriteFile(damaged.file(recordName), []byte(`{"version":`), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(next.file(recordName), []byte(`{"version":2}`), 0o600); err != nil {
		t.Fatal(err)
	}
	bare := folder(filepath.Join(s.State, "volumes", "0123"))
	if err := os.Mkdir(string(bare), 0o700); err != nil {
		t.Fatal(err)
	}
	s.mountsAt = func(path string) ([]*mountinfo.Info, error) {
		if path == "/staging/unknown" {
			return nil, errors.New("the table of mounts can't be read")
		}
		return mountsAt(path)
	}
	for range 2 { // looking changes nothing
		l, err := s.Recover()
		slices.Sort(l)
		if err != nil || !slices.Equal(l, []string{"again", "unknown"}) {
			t.Errorf("staged: %v, %v", l, err)
		}
		if exists(gone) || exists(bare) || exists(before) || !holder.forgot("/staging/gone") {
			t.Error("state is left of what is not mounted")
		}
		for what, f := range map[string]folder{"of a damaged record": damaged, "of another version": next, "of what may be mounted": unknown, "of what is staged again": again} {
			if !exists(f) {
				t.Errorf("the state %s is gone", what)
			}
		}
		if len(*holder) != 2 {
			t.Errorf("the holder forgot %v", *holder)
		}
	}
	// The unreadable record may be of an inline volume: without the volume's name, the
	// sweep would delete the volume.
	s.Inline = true
	if err := s.Sweep(t.Context(), []string{"unknown"}); err == nil {
		t.Error("all is cleared away that is not known to be staged")
	}
	all, err := s.Gather()
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range all {
		if f.GetName() == "penstock_csi_records_unreadable" && f.Metric[0].Gauge.GetValue() != 2 {
			t.Errorf("%v records can't be read", f.Metric[0].Gauge.GetValue())
		}
	}
	if i := slices.IndexFunc(all, func(f *dto.MetricFamily) bool { return f.GetName() == "penstock_csi_records_unreadable" }); i < 0 {
		t.Error("nothing tells of records that can't be read")
	}
}

// inlineVolumes is a cluster with volumes, which notes the deletions.
type inlineVolumes struct {
	Cluster
	names   []string
	listing func() // called at each listing
	deleted []string
}

func (c *inlineVolumes) Volumes(context.Context) (all []cluster.Volume, err error) {
	for i, name := range c.names {
		all = append(all, cluster.Volume{ID: meta.VolumeID(i + 2), Name: name})
	}
	c.listing()
	return all, nil
}

func (c *inlineVolumes) VolumeByName(_ context.Context, name string) (cluster.Volume, error) {
	if i := slices.Index(c.names, name); i >= 0 {
		return cluster.Volume{ID: meta.VolumeID(i + 2), Name: name}, nil
	}
	return cluster.Volume{}, meta.E("find volume", meta.NoSuchVolume, name, nil)
}

func (c *inlineVolumes) Delete(_ context.Context, id meta.VolumeID) error {
	c.deleted = append(c.deleted, c.names[id-2])
	return nil
}

// TestSweepBesideService: inline volumes are swept while pods come: a volume that a pod is
// getting stays, and so does a volume that a pod has got since the listing.
func TestSweepBesideService(t *testing.T) {
	const node = "node1"
	c := &inlineVolumes{}
	s := New(Config{State: t.TempDir(), Cluster: c, Name: node, Inline: true, Logger: slog.New(slog.DiscardHandler)})
	gone, kept, coming, came := handle.InlineName(node, "gone"), handle.InlineName(node, "kept"), handle.InlineName(node, "coming"), handle.InlineName(node, "came")
	c.names = []string{gone, kept, coming, came, handle.InlineName("node2", "gone"), "data"}
	var end func()
	c.listing = func() {
		var err error
		if end, err = s.pending.Begin(coming); err != nil {
			t.Fatal(err)
		}
		if err := s.folderOf("came", "/staging/came").write(record{Volume: "came", Staging: "/staging/came", Source: came + ":/"}); err != nil {
			t.Fatal(err)
		}
	}
	if err := s.Sweep(t.Context(), []string{"kept"}); err != nil {
		t.Fatal(err)
	}
	if !slices.Equal(c.deleted, []string{gone}) {
		t.Errorf("deleted %v, want %s alone", c.deleted, gone)
	}
	end()
	if _, err := s.pending.Begin(gone, kept, coming, came); err != nil {
		t.Errorf("what was cleared away can't be used: %v", err)
	}
}

// TestLockOfFolderThatGoes: callers take the lock and remove the folder again and again; never do
// two callers have the lock, even if a caller opens the file just before another caller removes
// the file.
func TestLockOfFolderThatGoes(t *testing.T) {
	f := folder(filepath.Join(t.TempDir(), "volumes", "0123"))
	var (
		wg      sync.WaitGroup
		holders atomic.Int32
		left    atomic.Int32
	)
	left.Store(2000)
	for range 4 {
		wg.Go(func() {
			for left.Load() > 0 {
				l, err := f.lock()
				if meta.KindOf(err) == meta.Busy {
					continue
				}
				if err != nil {
					t.Error(err)
					return
				}
				if n := holders.Add(1); n != 1 {
					t.Errorf("%d have the lock", n)
				}
				runtime.Gosched()
				holders.Add(-1)
				// Another caller may make the folder anew during the removal.
				if err := f.remove(); err != nil && !errors.Is(err, syscall.ENOTEMPTY) {
					t.Error(err)
				}
				l.Close()
				if left.Add(-1); t.Failed() {
					return
				}
			}
		})
	}
	wg.Wait()
}

// TestTold: no two metrics of a name have the same labels, whatever the mounts report.
func TestTold(t *testing.T) {
	number := func(n float64) *float64 { return &n }
	count := func(n uint64) *uint64 { return &n }
	all := told{}
	for _, n := range []float64{1, 2, 4} {
		all.add("a", "", dto.MetricType_COUNTER,
			&dto.Metric{Label: []*dto.LabelPair{label("volume", "v"), label("handle", "h")}, Counter: &dto.Counter{Value: number(n)}},
			&dto.Metric{Label: []*dto.LabelPair{label("handle", "other"), label("volume", "v")}, Counter: &dto.Counter{Value: number(n)}})
		all.add("b", "", dto.MetricType_HISTOGRAM, &dto.Metric{Histogram: &dto.Histogram{
			SampleCount: count(uint64(n)), SampleSum: number(n), Bucket: []*dto.Bucket{{CumulativeCount: count(uint64(n)), UpperBound: number(1)}},
		}})
	}
	all.add("a", "", dto.MetricType_GAUGE, &dto.Metric{Gauge: &dto.Gauge{Value: number(1)}}) // of a process of another version
	if a := all["a"]; len(a.Metric) != 2 || a.Metric[0].Counter.GetValue() != 7 || a.Metric[1].Counter.GetValue() != 7 {
		t.Errorf("told: %v", a)
	}
	if h := all["b"].Metric[0].Histogram; len(all["b"].Metric) != 1 || h.GetSampleCount() != 7 || h.GetSampleSum() != 7 || h.Bucket[0].GetCumulativeCount() != 7 {
		t.Errorf("told: %v", h)
	}
}

// refusing mounts a volume whose process answers each request with EPERM, so that each look at
// the mount fails. ended is closed at the end of the FUSE connection.
func refusing(t *testing.T, staging string) (ended chan struct{}) {
	t.Helper()
	dev, err := unix.Open("/dev/fuse", unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	if err := unix.Mount("v", staging, "fuse."+kind, 0, fmt.Sprintf("fd=%d,rootmode=40000,user_id=0,group_id=0,allow_other", dev)); err != nil {
		unix.Close(dev)
		t.Fatal(err)
	}
	ended = make(chan struct{})
	t.Cleanup(func() { unix.Unmount(staging, unix.MNT_FORCE|unix.MNT_DETACH); <-ended })
	go func() { // ends with the connection
		defer close(ended)
		defer unix.Close(dev)
		request := make([]byte, 1<<17)
		for {
			_, err := unix.Read(dev, request)
			if errors.Is(err, unix.EINTR) || errors.Is(err, unix.ENOENT) {
				continue
			}
			if err != nil {
				return
			}
			const initialise, forget, forgetAll = 26, 2, 42
			answer := make([]byte, 16)
			copy(answer[8:], request[8:16]) // the request's number
			switch binary.NativeEndian.Uint32(request[4:]) {
			case forget, forgetAll:
				continue
			case initialise:
				answer = append(answer, make([]byte, 64)...)
				copy(answer[16:], request[40:48]) // the kernel's version
				binary.NativeEndian.PutUint32(answer[36:], 4096)
			default:
				refused := -int32(unix.EPERM)
				binary.NativeEndian.PutUint32(answer[4:], uint32(refused))
			}
			binary.NativeEndian.PutUint32(answer, uint32(len(answer)))
			if _, err := unix.Write(dev, answer); err != nil && !errors.Is(err, unix.ENOENT) {
				return
			}
		}
	}()
	return ended
}

// TestOthersKeepTheirMount: a silent mount in use is taken from a pod. The connection of the
// volume's mounts ends only if no other pod of the node has the volume.
func TestOthersKeepTheirMount(t *testing.T) {
	s := New(Config{State: t.TempDir(), Name: "node1", Logger: slog.New(slog.DiscardHandler)})
	dir := t.TempDir()
	staging, first, last := filepath.Join(dir, "staging"), filepath.Join(dir, "first"), filepath.Join(dir, "last")
	if err := os.Mkdir(staging, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := s.folderOf("v", staging).write(record{Volume: "v", Staging: staging}); err != nil {
		t.Fatal(err)
	}
	ended := refusing(t, staging)
	for _, pod := range []string{first, last} {
		if err := bind(staging, pod, false); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { unix.Unmount(pod, unix.MNT_DETACH) })
		used, err := unix.Open(pod, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { unix.Close(used) })
	}
	if err := s.unpublish(t.Context(), first); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(first); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the first pod's mount is left: %v", err)
	}
	if err := s.probes.ask(t.Context(), last); !errors.Is(err, unix.EPERM) {
		t.Errorf("the mount of the pod that stays does not reach its process: %v", err)
	}
	if err := s.unpublish(t.Context(), last); err != nil {
		t.Fatal(err)
	}
	select {
	case <-ended:
	case <-time.After(60 * time.Second):
		t.Error("nobody has the volume, and calls in its mounts go on")
	}
}

// TestUnstageOfWhatMountsLate: a driver has begun a mount and dies, and the next driver must
// remove the mount before the mount exists. The late mount is removed, and so is the mount's
// process.
func TestUnstageOfWhatMountsLate(t *testing.T) {
	s := New(Config{State: t.TempDir(), Name: "node1", Logger: slog.New(slog.DiscardHandler)})
	const volume = "v"
	staging := t.TempDir()
	f := s.folderOf(volume, staging)
	if err := f.write(record{Volume: volume, Staging: staging}); err != nil {
		t.Fatal(err)
	}
	process, err := f.lock()
	if err != nil {
		t.Fatal(err)
	}
	defer process.Close()
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	unstaged := make(chan error, 1)
	go func() { unstaged <- s.unstage(ctx, volume, staging) }()
	time.Sleep(20 * endPoll) // by then the driver has looked for the mount
	dev, err := unix.Open("/dev/fuse", unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	err = unix.Mount("v", staging, "fuse."+kind, 0, fmt.Sprintf("fd=%d,rootmode=40000,user_id=0,group_id=0", dev))
	unix.Close(dev)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Unmount(staging, unix.MNT_DETACH)
	for m, err := mountAt(staging); m != nil || err != nil; m, err = mountAt(staging) {
		if err != nil || ctx.Err() != nil {
			t.Fatalf("the mount stays: %v", errors.Join(err, ctx.Err()))
		}
		time.Sleep(endPoll)
	}
	process.Close()
	if err := <-unstaged; err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(string(f)); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("its state is left: %v", err)
	}
}
